"""Rows with faults of Redis."""

import time

from tests.faults.injectors import come_back, dump, save, sleep
from tests.faults.matrix import row
from tests.faults.world import World


@row("Redis flushed under load")
def redis_flushed(world: World) -> None:
    world.redis.flush()


@row("Redis flushed five times in a second")
def redis_flushed_again_and_again(world: World) -> None:
    for _ in range(5):
        world.redis.flush()
        time.sleep(0.2)


@row("Redis asleep for 3 s (DEBUG SLEEP)")
def redis_asleep(world: World) -> None:
    sleep(world, 3.0)


@row("Redis killed, and empty when it comes back")
def redis_restarted_empty(world: World) -> None:
    world.redis.kill()
    dump(world).unlink(missing_ok=True)
    world.redis.start()


@row("Redis killed, and back with an old dump")
def redis_restarted_from_an_old_dump(world: World) -> None:
    save(world)
    world.wait_acked(50)
    world.redis.kill()
    world.redis.start()


@row("Redis failed over to a replica that lags: claims and answers are lost", pair=True, in_run=True)
def redis_failed_over_with_lost_claims(world: World) -> None:
    world.link.hold()
    world.wait_acked(50)
    world.redis.kill()
    world.promote()


@row("split brain: a process is left on the old primary, then that one dies", pair=True, services=1)
def split_brain(world: World) -> None:
    """While a process commits claims of the old store, no process accepts the new one: its process is not ready."""
    moved = world.services[0]
    (left,) = world.start_services(1, redis=world.redis.url)
    world.wait_acked(30)
    world.promote()
    assert world.replica is not None
    with world.replica.client() as store:
        assert store.info("replication")["role"] == "master"
    world.until(lambda: not moved.ready(), 10, "the process that was led to the new primary is not ready")
    world.wait_acked(100)
    assert left.ready()
    assert not moved.ready()
    world.replica.kill()
    left.kill()
    world.retire(left)
    world.start_services(1)


@row("Redis failed over, and back again", pair=True)
def redis_failed_over_and_back(world: World) -> None:
    world.redis.kill()
    world.promote()
    come_back(world)
    world.wait_acked(30)
    world.redis.kill()
    world.promote()
