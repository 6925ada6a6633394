"""Timeouts for coroutines that swallow cancellations or raise their own, as aiokafka's `close` and `stop` do."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from service.core.problems import KafkaAway

T = TypeVar("T")

# The event loop holds tasks weakly, so a task that is no longer awaited is kept here until it ends.
_given_up: set[asyncio.Task[Any]] = set()


class Abandoned(KafkaAway, ConnectionError):
    """An awaited task was cancelled by somebody other than its waiter: a failure, not the waiter's cancellation."""


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` for at most `seconds`. At the timeout the task is cancelled, not awaited, and TimeoutError raised.

    `asyncio.timeout` cancels once and then waits, for ever where the work swallows the cancellation. A CancelledError
    that the work raises by itself (aiokafka's consumer cancels its fetches in `stop` and awaits them) becomes
    Abandoned: as CancelledError it would end the caller's task silently.
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
    """Await a task that several callers share; a caller's cancellation leaves it running. Raises Abandoned."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.add_done_callback(_ended)
        raise
    return _result(task)


def _result(task: asyncio.Task[T]) -> T:
    if task.cancelled():
        raise Abandoned(f"{task.get_name()} was cancelled by another than its waiter")
    return task.result()


def unwaited(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a finished future that may have no waiter, so that the event loop does not log it."""
    if not task.cancelled():
        task.exception()


def _ended(task: asyncio.Task[Any]) -> None:
    _given_up.discard(task)
    unwaited(task)
