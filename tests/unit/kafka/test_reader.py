"""Tests that reading ends in time, also with a consumer that ignores cancellation, as aiokafka's `stop` may."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition

from service.core.problems import KafkaAway
from service.kafka import reader
from service.kafka.reader import Item, Span, high_watermarks, read_through
from tests.unit.fakes import unreachable_kafka

SOON_S = 5.0


class Record(NamedTuple):
    offset: int
    key: bytes | None = None
    value: bytes | None = None


class Deaf:
    """A consumer with one record; one of its methods hangs until the test is over."""

    def __init__(self, hangs_in: str) -> None:
        self.hangs_in = hangs_in
        self.over = asyncio.Event()

    async def _maybe(self, method: str) -> None:
        while method == self.hangs_in and not self.over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.over.wait()

    async def start(self) -> None:
        await self._maybe("start")

    async def stop(self) -> None:
        await self._maybe("stop")

    async def getmany(self, *places: TopicPartition, timeout_ms: int) -> dict[TopicPartition, list[Record]]:
        await self._maybe("getmany")
        return {places[0]: [Record(7)]}

    async def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        await self._maybe("end_offsets")
        return dict.fromkeys(places, 8)

    def assign(self, _: object) -> None: ...
    def seek(self, *_: object) -> None: ...


@pytest.fixture
async def deaf(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deaf]:
    consumer = Deaf(request.param)
    monkeypatch.setattr(reader, "_consumer", lambda *_: consumer)
    monkeypatch.setattr(reader, "STOP_TIMEOUT_S", 0.05)
    yield consumer
    consumer.over.set()
    await asyncio.sleep(0.05)


async def ended(work: Any) -> Any:
    """Await the result for a short time, so that the test cannot hang."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=SOON_S)
    assert task.done(), "it hangs"
    return task.exception() or task.result()


async def read() -> list[Item]:
    records = read_through(unreachable_kafka(100), "t", {0: Span(None, 7)}, "read_committed", 0.1)
    return [item async for items in records for item in items]


@pytest.mark.parametrize("deaf", ["start", "getmany"], indirect=True)
async def test_a_consumer_that_hangs_is_given_up(deaf: Deaf) -> None:
    assert isinstance(await ended(read()), KafkaAway)


@pytest.mark.parametrize("deaf", ["stop"], indirect=True)
async def test_a_read_returns_its_records_although_the_consumer_does_not_stop(deaf: Deaf) -> None:
    assert [item.offset for item in await ended(read())] == [7]
    assert await ended(high_watermarks(unreachable_kafka(100), "t", [0])) == {0: 8}


@pytest.mark.parametrize("deaf", ["end_offsets"], indirect=True)
async def test_a_look_up_of_ends_that_hangs_is_kafka_away(deaf: Deaf) -> None:
    assert isinstance(await ended(high_watermarks(unreachable_kafka(100), "t", [0])), KafkaAway)


@pytest.mark.parametrize("deaf", ["nowhere"], indirect=True)
@pytest.mark.parametrize("error", [asyncio.CancelledError, KafkaError("unexpected")])
async def test_an_error_of_the_consumer_s_stop_does_not_fail_a_read(
    deaf: Deaf, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop() -> None:
        raise error

    monkeypatch.setattr(deaf, "stop", stop)
    assert [item.offset for item in await ended(read())] == [7]
    assert await ended(high_watermarks(unreachable_kafka(100), "t", [0])) == {0: 8}


@pytest.mark.parametrize("deaf", ["nowhere"], indirect=True)
@pytest.mark.parametrize("method", ["start", "getmany"])
@pytest.mark.parametrize("bug", [AssertionError(), AttributeError("x")], ids=repr)
async def test_a_bug_is_no_word_of_kafkas(
    deaf: Deaf, method: str, bug: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: object, **__: object) -> None:
        raise bug

    monkeypatch.setattr(deaf, method, failing)
    assert await ended(read()) is bug


@pytest.mark.parametrize("deaf", ["nowhere"], indirect=True)
@pytest.mark.parametrize("method", ["start", "getmany"])
async def test_a_consumer_that_cancels_itself_is_kafka_being_away(
    deaf: Deaf, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(*_: object, **__: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(deaf, method, cancelled)
    assert isinstance(await ended(read()), KafkaAway)
