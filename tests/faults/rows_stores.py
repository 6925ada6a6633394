"""Rows with sentinels and clusters: failovers by themselves, a primary in a partition, hash slots that are moved."""

from typing import Any

from tests.faults.matrix import row
from tests.faults.relay import Relay
from tests.faults.world import World
from tests.stores import ClusterStore, SentinelStore, Store, ask


def sentinels(world: World) -> SentinelStore:
    assert isinstance(world.stores, SentinelStore)
    return world.stores


def nodes(world: World) -> ClusterStore:
    assert isinstance(world.stores, ClusterStore)
    return world.stores


def fail_over(world: World, stores: Store) -> None:
    """Kill the primary, and note how long its replica took to be promoted."""
    stores.primary.kill()
    world.notes.append(f"promoted after {stores.follow_failover():.1f} s")


@row("the primary killed, sentinels promote its replica", stores=SentinelStore)
def sentinel_failover(world: World) -> None:
    fail_over(world, sentinels(world))


@row("sentinels promote a replica twice, and one of three sentinels is dead", stores=SentinelStore)
def sentinel_failover_and_back(world: World) -> None:
    stores = sentinels(world)
    stores.sentinels[0].kill()
    fail_over(world, stores)
    world.wait_acked(30)
    stores.heal()
    fail_over(world, stores)


@row(
    "a primary cut off from sentinels and replica, with one process; it comes back",
    stores=SentinelStore,
    services=1,
    in_run=True,
)
def sentinel_partition(world: World) -> None:
    """Two primaries at once: the process that is cut off too commits claims that the promoted replica never saw."""
    stores = sentinels(world)
    moved = world.services[0]
    relays = [world.exits.enter_context(Relay(sentinel.port)) for sentinel in stores.sentinels]
    (left,) = world.start_services(1, redis=stores.url_by([relay.port for relay in relays]))
    world.wait_acked(30)
    for relay in relays:
        relay.hold()
    stores.cut_off()
    world.notes.append(f"promoted after {stores.follow_failover():.1f} s")
    world.until(lambda: not moved.ready(), 10, "the process that follows the sentinels is not ready")
    world.wait_acked(100)
    assert stores.thinks_it_is_primary(), "the old primary does not know of the other one"
    assert left.ready()
    assert not moved.ready()
    stores.heal()
    for relay in relays:
        relay.let_go()


@row("the primary of a cluster's shard killed, its replica is elected", stores=ClusterStore)
def cluster_failover(world: World) -> None:
    fail_over(world, nodes(world))


@row("the hash slot of the keys is moved to another node, key by key", stores=ClusterStore)
def cluster_slot_moved(world: World) -> None:
    """Amid the move the keys are on two nodes: no script runs on either, and nothing is written."""
    stores = nodes(world)
    world.wait_acked(100)
    stores.begin_move()
    stores.move_keys(20)
    world.until(lambda: not any(each.ready() for each in world.services), 10, "no process is ready amid the move")
    moved = 20
    while count := stores.move_keys():
        moved += count
    stores.end_move()
    world.notes.append(f"{moved} keys moved")


@row("the hash slot of the keys is moved to another node at once", stores=ClusterStore)
def cluster_slot_moved_at_once(world: World) -> None:
    """By CLUSTER MIGRATESLOTS of Valkey 9."""
    stores = nodes(world)
    slot = stores.hash_slot
    ask(stores.primary, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", stores.id_of(stores.second))

    def is_there() -> bool:
        ranges: list[Any] = ask(stores.third, "CLUSTER", "SLOTS")
        return [each[2][1] for each in ranges if each[0] <= slot <= each[1]] == [stores.second.port]

    world.until(is_there, 30, "the hash slot is moved")
