"""Awaits a task that several callers share."""

import asyncio
from typing import Any, TypeVar

from service.core.supervision import Cancelled

T = TypeVar("T")


async def shared(task: asyncio.Task[T]) -> T:
    """Await a task that several callers share; a caller's cancellation leaves the task running. Raises Cancelled."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.add_done_callback(unwaited)
        raise
    return result_of(task)


def result_of(task: asyncio.Task[T]) -> T:
    """Return the result of a finished task. Raises Cancelled if the task was cancelled by another than its waiter.

    As CancelledError, which `task.result` raises, that would end the waiter's own task silently.
    """
    if task.cancelled():
        raise Cancelled(f"{task.get_name()} was cancelled by another than its waiter")
    return task.result()


def unwaited(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a finished future that may have no waiter, so that the event loop does not log it."""
    if not task.cancelled():
        task.exception()
