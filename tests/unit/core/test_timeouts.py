"""A shared timer for many waits: each ends at its own time, and none takes another's cancellation for its own."""

import asyncio
import time

import pytest

from service.core.timeouts import Patience

LONG_S = 5.0


async def test_what_is_done_in_time_goes_on_and_leaves_nothing_behind() -> None:
    patience = Patience(0.05)
    for _ in range(3):
        with patience.wait():
            await asyncio.sleep(0)
    assert not patience._waits
    await asyncio.sleep(0.1)
    assert patience._timer is None


async def test_what_takes_too_long_is_cancelled_and_told_so() -> None:
    patience = Patience(0.05)
    started = time.monotonic()
    with pytest.raises(TimeoutError), patience.wait():
        await asyncio.sleep(LONG_S)
    assert 0.04 < time.monotonic() - started < 1
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_each_wait_has_its_own_time_though_they_share_a_timer() -> None:
    patience = Patience(0.2)
    started = time.monotonic()

    async def hang(after_s: float) -> float:
        await asyncio.sleep(after_s)
        with pytest.raises(TimeoutError), patience.wait():
            await asyncio.sleep(LONG_S)
        return time.monotonic() - started

    with patience.wait():  # it arms the timer, and is over long before
        await asyncio.sleep(0)
    first, second, third = await asyncio.gather(hang(0.0), hang(0.1), hang(0.1))
    assert 0.19 < first < LONG_S
    assert 0.29 < second < LONG_S
    assert 0.29 < third < LONG_S
    assert first < second
    assert patience._timer is None


async def test_a_cancellation_from_outside_stays_one() -> None:
    patience = Patience(LONG_S)

    async def hang() -> None:
        with patience.wait():
            await asyncio.sleep(LONG_S)

    task = asyncio.create_task(hang())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not patience._waits


async def test_of_both_at_once_the_one_from_outside_counts() -> None:
    patience = Patience(0.02)

    async def hang() -> None:
        with patience.wait():
            try:
                await asyncio.sleep(LONG_S)
            finally:
                task.cancel()  # while its time is up

    task = asyncio.create_task(hang())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_its_own_is_not_hidden_by_the_end_of_its_time() -> None:
    patience = Patience(0.02)

    async def fail() -> None:
        with patience.wait():
            try:
                await asyncio.sleep(LONG_S)
            except asyncio.CancelledError:
                raise ValueError("its own") from None

    with pytest.raises(ValueError, match="its own"):
        await fail()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize(("outer_s", "inner_s", "told_by"), [(0.05, LONG_S, "outer"), (LONG_S, 0.05, "inner")])
async def test_of_two_within_each_other_the_shorter_one_tells(outer_s: float, inner_s: float, told_by: str) -> None:
    outer, inner = Patience(outer_s), Patience(inner_s)
    told = ""
    try:
        with outer.wait():
            try:
                with inner.wait():
                    await asyncio.sleep(LONG_S)
            except TimeoutError:
                told = "inner"
    except TimeoutError:
        told = "outer"
    assert told == told_by
