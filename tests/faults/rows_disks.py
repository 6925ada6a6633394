"""Rows in which a server's disk is full, and has space again."""

import time
from collections.abc import Sequence
from typing import Final

from tests.faults.disk import Disk, lacking
from tests.faults.matrix import ALL_BROKERS_DIED_S, row
from tests.faults.world import World

FULL_S: Final = 6.0  # longer than a request's deadline


@row("the one broker's disk full; it dies of it, and is started again with room", services=0, load=False,
     bound_s=ALL_BROKERS_DIED_S, lacking=lacking)  # fmt: skip
def broker_disk_full(world: World) -> None:
    broker = world.cluster.brokers[0]
    broker.stop()
    disk = Disk(broker.folder / "data", megabytes=512)

    def take_away() -> None:
        broker.stop()
        disk.__exit__(None, None, None)
        broker.start()

    disk.__enter__()
    world.exits.callback(take_away)
    broker.start()
    world.start_services(2)
    world.start_load()
    disk.fill()
    world.until(lambda: not broker.running, 60, "the broker dies of its full disk")
    disk.free()
    broker.start()


@row("Redis's disk full, under its append-only file", services=0, load=False, lacking=lacking)
def redis_disk_full_aof(world: World) -> None:
    redis_disk_full(world, ["--appendonly", "yes"])


@row("Redis's disk full, under its snapshots", services=0, load=False, lacking=lacking)
def redis_disk_full_rdb(world: World) -> None:
    redis_disk_full(world, ["--save", "1 1"])


def redis_disk_full(world: World, saving: Sequence[str]) -> None:
    """Redis refuses writes, and keeps its data."""
    world.redis.stop()
    disk = world.exits.enter_context(Disk(world.folder / "disk", megabytes=64))
    world.redis.args += ["--dir", str(disk.folder), *saving]
    world.redis.start()
    world.start_services(2)
    load = world.start_load()
    disk.fill()
    before = load.acked
    time.sleep(FULL_S)
    world.notes.append(f"{load.acked - before} events acknowledged in {FULL_S:.0f} s with a full disk")
    disk.free()
