"""Tests that the journal never delays an answer, and counts the answers that it drops."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from service.claims.states import Delivered
from service.contract import Guarantee
from service.contract.wire.ids import event_id
from service.contract.wire.journal import encode_answer
from service.core.metrics import Telemetry
from service.core.problems import NOT_WRITTEN, TOO_LARGE, KafkaAway, Problem
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.outcomes import OwnRecordFailed, RecordError
from service.pipeline import journal as module
from service.pipeline.journal import Journal
from service.pipeline.request import Committed, WriteRequest
from tests.unit.fakes import count_of, make_event, unreachable_kafka, until
from tests.unit.strategies import deliveries


class FakeSender(IdempotentProducer):
    """Takes records, or raises a planned error."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.hangs = False
        self.sent: list[bytes] = []
        self.tries = 0

    async def send(self, topic: str, partition: int, key: bytes | None, value: bytes) -> int:
        self.tries += 1
        if self.hangs:
            await asyncio.sleep(60)
        if self.error is not None:
            raise self.error
        self.sent.append(value)
        return len(self.sent)

    async def close(self) -> None:
        pass


class Kept:
    """Make a journal with a fake producer."""

    def __init__(self) -> None:
        self.telemetry = Telemetry()
        self.journal = Journal(unreachable_kafka(), "ns.requests", "test", self.telemetry)
        self.sender = self.journal._producer = FakeSender()

    def record(self, *keys: str) -> None:
        for key in keys:
            request = WriteRequest.for_event(make_event(key), 0.0, 1.0, Guarantee.EXACTLY_ONCE)
            self.journal.record(request, 503, Problem(NOT_WRITTEN, "why"), 0.001)

    @property
    def dropped(self) -> float:
        return count_of(self.telemetry.journal_dropped)

    @property
    def written(self) -> int:
        return sum(len(json.loads(value)["answers"]) for value in self.sender.sent)


@pytest.fixture
async def kept(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kept]:
    monkeypatch.setattr(module, "FLUSH_S", 0.005)
    monkeypatch.setattr(module, "PAUSE_S", 0.005)
    monkeypatch.setattr(module, "WAITING_MAX", 3)
    kept = Kept()
    kept.journal.start()
    yield kept
    with contextlib.suppress(asyncio.CancelledError):  # of its task, where the test has closed it before
        await kept.journal.close(0.01)


async def test_answers_are_written_soon(kept: Kept) -> None:
    kept.record("a", "b")
    await until(lambda: kept.written == 2)
    await kept.journal.close(0.2)
    assert kept.dropped == 0


async def test_while_kafka_is_away_the_journal_keeps_a_bounded_number_of_answers_and_counts_the_rest(
    kept: Kept,
) -> None:
    kept.sender.error = KafkaAway("it is away")
    kept.record("a", "b", "c", "d", "e")
    assert kept.dropped == 2
    await until(lambda: kept.sender.tries > 1)
    kept.sender.error = None
    await until(lambda: kept.written == 3)
    await kept.journal.close(0.2)
    assert kept.dropped == 2


async def test_an_unforeseen_error_ends_neither_the_journal_nor_its_stop(kept: Kept) -> None:
    kept.sender.error = RuntimeError("a bug")
    kept.record("a")
    await until(lambda: kept.sender.tries > 1)
    await kept.journal.close(0.2)
    assert kept.dropped == 1


async def test_a_stop_ends_at_its_timeout_and_counts_the_unwritten_answers_as_dropped(kept: Kept) -> None:
    kept.sender.hangs = True
    kept.record("a", "b")
    await until(lambda: kept.sender.tries > 0)
    with capture_logs() as logs:
        async with asyncio.timeout(0.5):
            await kept.journal.close(0.05)
    assert kept.dropped == 2
    # A stopped process is not scraped any more.
    assert [(line["event"], line["answers"]) for line in logs] == [("answers dropped from the journal", 2)]


async def test_a_stop_writes_the_waiting_answers(kept: Kept) -> None:
    kept.record("a", "b")
    with capture_logs() as logs:
        await kept.journal.close(0.5)
    assert (kept.written, kept.dropped, logs) == (2, 0, [])


class Narrow(FakeSender):
    """A sender whose topic accepts this many answers in a record at most."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    async def send(self, topic: str, partition: int, key: bytes | None, value: bytes) -> int:
        if len(json.loads(value)["answers"]) > self.most:
            self.tries += 1
            raise OwnRecordFailed(
                "too large", RecordError(TOO_LARGE, "the record is larger than its max.message.bytes")
            )
        return await super().send(topic, partition, key, value)


async def test_answers_that_are_too_large_for_one_record_are_written_in_several(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its max.message.bytes was lowered: otherwise no answer would be journaled any more."""
    monkeypatch.setattr(module, "WAITING_MAX", 100)
    kept.sender = kept.journal._producer = Narrow(3)
    kept.record(*(f"k{n}" for n in range(20)))
    await until(lambda: kept.written == 20)
    assert kept.dropped == 0
    tries = kept.sender.tries
    kept.record(*(f"more{n}" for n in range(4)))
    await until(lambda: kept.written == 24)
    assert kept.sender.tries == tries + 2, "what it takes was found out before"
    kept.sender.most = 100
    kept.journal.resize(1_048_588)
    kept.record(*(f"again{n}" for n in range(8)))
    await until(lambda: kept.written == 32)
    assert kept.sender.tries == tries + 3
    assert kept.journal.waiting == 0


async def test_an_answer_that_the_topic_never_takes_is_counted_as_dropped_and_the_others_are_written(
    kept: Kept,
) -> None:
    class Picky(Narrow):
        async def send(self, topic: str, partition: int, key: bytes | None, value: bytes) -> int:
            self.most = 0 if event_id("b").hex() in value.decode() else 100
            return await super().send(topic, partition, key, value)

    kept.sender = kept.journal._producer = Picky(100)
    with capture_logs() as lines:
        kept.record("a", "b", "c")
        await until(lambda: kept.written == 2)
    assert kept.dropped == 1
    assert [line["answers"] for line in lines] == [1]


async def test_a_cancellation_from_within_does_not_end_the_journal(kept: Kept) -> None:
    """aiokafka raises some by itself."""
    sends = [asyncio.CancelledError()]
    send = kept.sender.send

    async def cancelled_once(topic: str, partition: int, key: bytes | None, value: bytes) -> int:
        if sends:
            raise sends.pop()
        return await send(topic, partition, key, value)

    kept.sender.send = cancelled_once  # type: ignore[method-assign]
    kept.record("a")
    await until(lambda: kept.written == 1)
    assert not kept.dropped


NUMBERS = st.integers(0, 2**63 - 1)
COMMITTED = deliveries(NUMBERS)


@given(COMMITTED, NUMBERS, st.booleans(), st.floats(0, 1e5))
async def test_an_answer_is_written_as_the_contract_has_it(
    places: list[tuple[bytes, Delivered]], at: int, replayed: bool, latency_s: float
) -> None:
    kept = Kept()
    request = WriteRequest.for_event(make_event("k"), 0.0, 1.0, Guarantee.EXACTLY_ONCE)
    kept.journal.record(request, 201, Committed(at, tuple(places), replayed), latency_s)
    kept.journal.record(request, 503, Problem(NOT_WRITTEN, "why"), latency_s)
    kept.journal.record(request, 202, None, latency_s)
    ms = 1000 * latency_s
    *committed, refused, accepted = (msgspec.json.encode(answer).decode() for answer in kept.journal._waiting)
    assert ",".join(committed) == ",".join(
        encode_answer(id, state.fp, state.at, 201, None, replayed, ms, state.topic, state.partition, state.offset)
        for id, state in places
    )
    for text, status, code in ((refused, 503, "not-written"), (accepted, 202, None)):
        now, event = json.loads(text)["at"], request.events[0]
        assert text == encode_answer(event.id, event.fp, now, status, code, False, ms, event.topic, None, None)
