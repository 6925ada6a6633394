"""Rows that break Redis."""

from tests.faults.matrix import row
from tests.faults.world import World


@row("Redis flushed under load", in_run=True)
def redis_flushed(world: World) -> None:
    world.redis.flush()
