"""Rows with faults of brokers in a cluster of three (replication 3, min ISR 2)."""

import time

from service.contract.wire.names import transactional_id
from tests.faults.matrix import ALL_BROKERS_DIED_S, row
from tests.faults.rows_service import doomed
from tests.faults.wire import Broker
from tests.faults.world import World
from tests.integration.conftest import plan_of
from tests.integration.plan import Fault

QUOTA_BYTES_PER_S = 4_000.0
QUOTA_BOUND_S = 90.0


@row("the leader of a data partition killed", brokers=3)
def leader_killed(world: World) -> None:
    world.leader().kill()


@row("the transaction coordinator killed while a commit is on its way", brokers=3, services=0, load=False)
def coordinator_killed_during_a_commit(world: World) -> None:
    """The first process leaves the last slot to the other one, which may take no other."""
    *others, last = range(int(world.settings["FENCEPOST_SLOTS_MAX"]))
    world.start_services(1, only_slots=tuple(others))
    world.start_load()
    committing = doomed(world, Fault("commit", "hold", first=10), slots=1, only_slots=(last,))
    world.until(lambda: plan_of(committing).happened("commit"), 30, "a commit is about to be sent")
    coordinator = world.cluster.coordinator(transactional_id(world.namespace, last))
    coordinator.pause()
    plan_of(committing).let_go("commit")
    time.sleep(0.5)
    coordinator.kill()


@row("two of three brokers down for 6 s", brokers=3, bound_s=ALL_BROKERS_DIED_S)
def two_brokers_down(world: World) -> None:
    for broker in world.cluster.brokers[:2]:
        broker.kill()
    time.sleep(6.0)
    world.cluster.start()


@row("all brokers killed at once", brokers=3, bound_s=ALL_BROKERS_DIED_S)
def all_brokers_killed(world: World) -> None:
    world.cluster.kill()
    world.cluster.start()


@row("brokers restarted one after the other under load", brokers=3)
def rolling_broker_restart(world: World) -> None:
    for broker in world.cluster.brokers:
        broker.stop()
        world.cluster.heal()
    world.wait_acked(30)


@row("a leader that stands still for 8 s, is deposed, and wakes up", brokers=3)
def broker_paused(world: World) -> None:
    leader = world.leader()
    leader.pause()
    time.sleep(8.0)
    leader.resume()


@row("one broker alone, killed and started again", bound_s=ALL_BROKERS_DIED_S)
def only_broker_killed(world: World) -> None:
    world.cluster.kill()
    world.cluster.start()


@row("a quota of 4 kB/s for each producer, which stays, and a burst of 240 kB", bound_s=QUOTA_BOUND_S)
def producers_under_a_quota(world: World) -> None:
    """A broker counts for 11 s, so each of the four producers may write 44 kB at once before it is throttled."""
    (broker,) = world.cluster.brokers

    def limit(bytes_per_s: float | None) -> None:
        with Broker("127.0.0.1", broker.port) as connection:
            connection.limit_producers(bytes_per_s)

    limit(QUOTA_BYTES_PER_S)
    world.exits.callback(limit, None)
    assert world.load is not None
    begun, before = time.monotonic(), world.load.acked
    value = f'"{"x" * 1_000}"'
    burst = world.load.send([world.ask(f"burst-{n}", value=value) for n in range(240)])
    burst.result(QUOTA_BOUND_S)
    took_s = time.monotonic() - begun
    world.notes.append(f"the burst took {took_s:.1f} s, with {world.load.acked - before - 240} others meanwhile")
    assert took_s > int(world.settings["FENCEPOST_REQUEST_TIMEOUT_MS"]) / 1000, "the quota was not felt"


@row(
    "a topic below its min ISR where one slot serves: the others go on",
    brokers=3,
    services=1,
    settings={"FENCEPOST_SLOTS": "1"},
    in_run=True,
)
def topic_below_its_min_isr(world: World) -> None:
    weak = f"{world.namespace}.weak"
    world.cluster.brokers[0].create_topic(weak, 2, {"min.insync.replicas": "3"})
    world.topics.append(weak)  # for the checker
    assert world.load is not None
    # With all replicas in sync the topic takes events; then the service knows it, whichever broker is killed.
    world.load.send([world.ask("before", weak)]).result(timeout=30)
    world.cluster.brokers[2].kill()
    waiting = world.load.send([world.ask(f"weak-{n}", weak) for n in range(20)])
    time.sleep(2.0)  # the topic has failed a group
    begun = time.monotonic()
    world.wait_acked(200)  # also those of the failed group
    world.notes.append(f"200 others acknowledged within {time.monotonic() - begun:.1f} s")
    assert not waiting.done()
    world.cluster.heal()
    waiting.result(timeout=60)
