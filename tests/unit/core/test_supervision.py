"""Tests background tasks: they go on after any exception, which is logged."""

import asyncio
from collections.abc import Iterator

import pytest
import structlog

from service.core import supervision as module
from service.core.metrics import Telemetry
from service.core.supervision import log_failure, log_loop_errors, supervise
from tests.unit.fakes import ended, until
from tests.unit.scrape import sample


@pytest.fixture
def lines() -> Iterator[list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_LEAST_S", 0.001)
    monkeypatch.setattr(module, "PAUSE_MOST_S", 0.002)


def failures_of(telemetry: Telemetry, task: str) -> float:
    return sample(telemetry, "fencepost_task_failures_total", task=task)


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


async def test_a_task_that_fails_is_restarted_counted_and_logged_once_a_kind(
    telemetry: Telemetry, lines: list[structlog.typing.EventDict]
) -> None:
    troubles: list[BaseException] = [KeyError("a"), ValueError("b"), KeyError("c"), asyncio.CancelledError()]
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if troubles:
            raise troubles.pop(0)
        await asyncio.sleep(60)

    task = supervise("sweep", work, telemetry)
    await until(lambda: runs == 5)
    assert failures_of(telemetry, "sweep") == 4
    assert [line["why"] for line in lines] == ["'a'", "b", "cancelled from within"]
    assert not task.done()
    assert await ended(task) is None
    assert task.cancelled(), "its own cancellation ends it"


async def test_a_task_that_returns_is_not_restarted(telemetry: Telemetry) -> None:
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1

    await asyncio.wait_for(supervise("bring-up", work, telemetry), 1)
    assert (runs, failures_of(telemetry, "bring-up")) == (1, 0)


async def test_a_failed_task_without_a_waiter_is_counted_and_logged(
    telemetry: Telemetry, lines: list[structlog.typing.EventDict]
) -> None:
    async def fail() -> None:
        raise KeyError("a bug")

    async def cancelled() -> None:
        raise asyncio.CancelledError

    for work in (fail(), cancelled()):
        task = asyncio.create_task(work, name="slot-3")
        log_failure(task, "slot", telemetry)
        await asyncio.wait([task])
    await asyncio.sleep(0)
    assert failures_of(telemetry, "slot") == 1
    assert [(line["task"], line["why"]) for line in lines] == [("slot-3", "KeyError('a bug')")]


async def test_a_callback_that_fails_is_heard_of(telemetry: Telemetry, lines: list[structlog.typing.EventDict]) -> None:
    def fail() -> None:
        raise KeyError("a bug")

    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    log_loop_errors(loop, telemetry)
    try:
        loop.call_soon(fail)
        await until(lambda: failures_of(telemetry, "loop") == 1)
        loop.call_exception_handler({"message": "it ended", "exception": ConnectionResetError()})
    finally:
        loop.set_exception_handler(before)
    assert failures_of(telemetry, "loop") == 1
    assert len(lines) == 2
