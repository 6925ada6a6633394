"""Faults during the load: one process is killed, and Redis is flushed."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from deploy.stack import Redis, Service, StackError

_DOWN_S = 1.0  # until the killed process is started again
_RECOVERY_S = 60.0  # store recovery replays the ledger, which takes a second or two here
_POLL_S = 0.02

Say = Callable[[str], None]


async def chaos(
    reached: Callable[[float], Awaitable[None]], service: Service, redis: Redis, services: list[Service], say: Say
) -> None:
    """Kill `service` at a third of the load and flush Redis at two thirds.

    Args:
        reached: waits until this share of the load is done, 0 to 1.
        service: the process to kill, and to start again.
        redis: the store to flush.
        services: all processes.
        say: prints a line.

    Raises:
        StackError: a process did not become ready again.
    """
    await reached(1 / 3)
    await asyncio.to_thread(service.kill)
    say(f"{service.name} killed with -9")
    await asyncio.sleep(_DOWN_S)
    begun = time.monotonic()
    await asyncio.to_thread(service.start)
    say(f"{service.name} started again, ready after {time.monotonic() - begun:.1f} s")

    await reached(2 / 3)
    begun = time.monotonic()
    await asyncio.to_thread(redis.flush)
    say("Redis flushed: it has forgotten every key")
    await _until_whole(services)
    say(f"every key is known again, {time.monotonic() - begun:.1f} s later: read back from the ledger in Kafka")


async def _until_whole(services: list[Service]) -> None:
    """Wait until every process has noticed the flush, and is ready again."""
    deadline = time.monotonic() + _RECOVERY_S
    waiting = list(services)
    while waiting:
        if time.monotonic() > deadline:
            raise StackError(f"{waiting[0].name} is not ready after {_RECOVERY_S:.0f} s\n{waiting[0].tail()}")
        waiting = [each for each in waiting if not await asyncio.to_thread(each.ready)]
        await asyncio.sleep(_POLL_S)
