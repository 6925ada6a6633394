"""Waiting for what swallows cancellations, or makes some of its own: aiokafka's `close` and `stop` do both."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from service.core.problems import KafkaAway

T = TypeVar("T")

# The loop holds its tasks weakly: what was given up lives here until it ends.
_given_up: set[asyncio.Task[Any]] = set()


class Abandoned(KafkaAway, ConnectionError):
    """What was waited for was cancelled, and not by who waited: a failure like any other, and no order to end."""


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` answers. Raises TimeoutError when the time is up: it is cancelled then, and not waited for.

    `asyncio.timeout` cancels once, and waits: a cancellation that is swallowed on the way would never come again. One
    that comes out of the work itself (aiokafka's consumer cancels its fetches as it stops, and waits for them) is
    Abandoned: taken for the caller's own, it would end him without a word.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError
        return _result(task)
    finally:
        if not task.done():
            _given_up.add(task)
            task.add_done_callback(_ended)
            task.cancel()


async def shared(task: asyncio.Task[T]) -> T:
    """What a task answers for which several wait; who is cancelled leaves it running. Raises Abandoned as `within`."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.add_done_callback(_ended)
        raise
    return _result(task)


def _result(task: asyncio.Task[T]) -> T:
    if task.cancelled():
        raise Abandoned(f"{task.get_name()} was cancelled from within")
    return task.result()


def unwaited(task: asyncio.Future[Any]) -> None:
    """For a task, or an answer, that has ended, and that maybe nobody waits for: its failure is no news to the loop."""
    if not task.cancelled():
        task.exception()


def _ended(task: asyncio.Task[Any]) -> None:
    _given_up.discard(task)
    unwaited(task)
