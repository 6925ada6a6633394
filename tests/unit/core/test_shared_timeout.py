"""Tests the timer that many waits share: each ends at its own time, and tells its own cancellation from others."""

import asyncio
import time

import pytest

from service.core.shared_timeout import SharedTimeout

LONG_S = 5.0


async def test_waits_that_end_in_time_leave_nothing_behind() -> None:
    timeout = SharedTimeout(0.05)
    for _ in range(3):
        with timeout.wait():
            await asyncio.sleep(0)
    assert repr(timeout) == "<SharedTimeout 0 waits, timer set>"
    await asyncio.sleep(0.1)
    assert repr(timeout) == "<SharedTimeout 0 waits, timer not set>"


async def test_a_wait_that_takes_too_long_is_cancelled_and_raises() -> None:
    timeout = SharedTimeout(0.05)
    started = time.monotonic()
    with pytest.raises(TimeoutError), timeout.wait():
        await asyncio.sleep(LONG_S)
    assert 0.04 < time.monotonic() - started < 1
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_each_wait_has_its_own_end_though_they_share_a_timer() -> None:
    timeout = SharedTimeout(0.2)
    started = time.monotonic()

    async def hang(after_s: float) -> float:
        await asyncio.sleep(after_s)
        with pytest.raises(TimeoutError), timeout.wait():
            await asyncio.sleep(LONG_S)
        return time.monotonic() - started

    with timeout.wait():  # the timer is set for this wait, which is over long before
        await asyncio.sleep(0)
    first, second, third = await asyncio.gather(hang(0.0), hang(0.1), hang(0.1))
    assert 0.19 < first < LONG_S
    assert 0.29 < second < LONG_S
    assert 0.29 < third < LONG_S
    assert first < second
    assert repr(timeout) == "<SharedTimeout 0 waits, timer not set>"


async def test_a_wait_may_end_at_a_time_of_its_own() -> None:
    timeout = SharedTimeout(LONG_S)
    started = time.monotonic()
    with pytest.raises(TimeoutError), timeout.wait_until(asyncio.get_running_loop().time() + 0.05):
        await asyncio.sleep(LONG_S)
    with pytest.raises(TimeoutError), timeout.wait_until(asyncio.get_running_loop().time() - 1):
        await asyncio.sleep(LONG_S)
    assert 0.04 < time.monotonic() - started < 1


async def test_a_cancellation_from_outside_stays_one() -> None:
    timeout = SharedTimeout(LONG_S)

    async def hang() -> None:
        with timeout.wait():
            await asyncio.sleep(LONG_S)

    task = asyncio.create_task(hang())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert repr(timeout) == "<SharedTimeout 0 waits, timer set>"


async def test_a_cancellation_from_outside_at_the_same_time_counts() -> None:
    timeout = SharedTimeout(0.02)

    async def hang() -> None:
        with timeout.wait():
            try:
                await asyncio.sleep(LONG_S)
            finally:
                task.cancel()  # while its time is up

    task = asyncio.create_task(hang())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_awaited_work_is_not_hidden() -> None:
    timeout = SharedTimeout(0.02)

    async def fail() -> None:
        with timeout.wait():
            try:
                await asyncio.sleep(LONG_S)
            except asyncio.CancelledError:
                raise ValueError("its own") from None

    with pytest.raises(ValueError, match="its own"):
        await fail()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize(("outer_s", "inner_s", "raised"), [(0.05, LONG_S, "outer"), (LONG_S, 0.05, "inner")])
async def test_of_two_nested_waits_the_shorter_one_raises(outer_s: float, inner_s: float, raised: str) -> None:
    outer, inner = SharedTimeout(outer_s), SharedTimeout(inner_s)
    by = ""
    try:
        with outer.wait():
            try:
                with inner.wait():
                    await asyncio.sleep(LONG_S)
            except TimeoutError:
                by = "inner"
    except TimeoutError:
        by = "outer"
    assert by == raised
