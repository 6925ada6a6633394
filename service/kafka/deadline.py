"""Waits for Kafka's tasks, in which a cancellation by others is a failure of Kafka; aiokafka makes such ones."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from service.core import shared_task
from service.core.problems import KafkaAway
from service.core.shared_task import result_of, unwaited
from service.core.supervision import Cancelled

T = TypeVar("T")

# The event loop holds tasks weakly, so a task that is no longer awaited is kept here until it ends.
_given_up: set[asyncio.Task[Any]] = set()


class Abandoned(KafkaAway, ConnectionError):
    """An awaited task was cancelled by somebody other than its waiter: a failure, not the waiter's cancellation."""


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` for at most `seconds`. At the timeout the task is cancelled, not awaited, and TimeoutError raised.

    `asyncio.timeout` cancels once and then waits, for ever where the work swallows the cancellation. A CancelledError
    that the work raises by itself (aiokafka's consumer cancels its fetches in `stop` and awaits them) becomes
    Abandoned.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError
        return result_of(task)
    except Cancelled as error:
        raise Abandoned(str(error)) from error
    finally:
        if not task.done():
            _given_up.add(task)
            task.add_done_callback(_ended)
            task.cancel()


async def shared(task: asyncio.Task[T]) -> T:
    """Await a task that several callers share, as `shared_task.shared` does. Raises Abandoned for its Cancelled."""
    try:
        return await shared_task.shared(task)
    except Cancelled as error:
        raise Abandoned(str(error)) from error


def _ended(task: asyncio.Task[Any]) -> None:
    _given_up.discard(task)
    unwaited(task)
