"""Tests tasks that several callers share: results, and cancellations of a caller and of the task."""

import asyncio

import pytest

from service.core.shared_task import shared
from service.core.supervision import Cancelled


async def test_a_cancelled_caller_of_a_shared_task_leaves_it_to_the_others() -> None:
    go_on = asyncio.Event()

    async def work() -> int:
        await go_on.wait()
        return 7

    task = asyncio.create_task(work())
    first, second = asyncio.create_task(shared(task)), asyncio.create_task(shared(task))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    go_on.set()
    assert await second == 7


async def test_each_caller_of_a_task_that_was_cancelled_gets_an_error() -> None:
    task = asyncio.create_task(asyncio.sleep(5.0), name="look-up")
    task.cancel()
    for _ in range(2):
        with pytest.raises(Cancelled, match="look-up was cancelled by another than its waiter"):
            await shared(task)
