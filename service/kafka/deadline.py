"""Deadlines that hold also against what swallows cancellations, as aiokafka's `close` and `stop` do."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# The loop holds its tasks weakly: what was given up lives here until it ends.
_given_up: set[asyncio.Task[Any]] = set()


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` answers. Raises TimeoutError when the time is up: it is cancelled then, and not waited for.

    `asyncio.timeout` cancels once, and waits: a cancellation that is swallowed on the way would never come again.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        if not task.done():
            _given_up.add(task)
            task.add_done_callback(_ended)
            task.cancel()


def _ended(task: asyncio.Task[Any]) -> None:
    _given_up.discard(task)
    if not task.cancelled():
        task.exception()  # nobody waits for it
