"""Tests the idempotent producer with partial answers: each partition has its own result."""

import asyncio
import contextlib

import pytest
from aiokafka.errors import (
    DuplicateSequenceNumber,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderForPartitionError,
    OutOfOrderSequenceNumber,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from structlog.testing import capture_logs

from service.core.problems import KafkaAway
from service.kafka import session as module
from service.kafka.outcomes import RECORD_ERRORS
from service.kafka.records import NOT_SENT, NotSent, RecordMetadata
from tests.unit.fake_brokers import (
    GONE,
    TOO_BIG,
    Met,
    idempotent,
    record,
)


async def test_the_refusal_of_one_partition_is_not_another_ones() -> None:
    """Partition 0 was refused, partition 1 has no answer: only the first batch was certainly not written."""
    producer, kafka = idempotent()
    kafka.leaders = {("plain.a", 1): 2}
    kafka.produced = lambda topic, partition: TOO_BIG if partition == 0 else GONE
    assert await producer.write([record("plain.a", 0), record("plain.a", 1)]) == [RECORD_ERRORS[TOO_BIG], None]
    assert producer._session is None, "a life with a gap in its sequence numbers goes on"
    assert kafka.closed


@pytest.mark.parametrize("met", [RecordMetadata(-1, -1), DuplicateSequenceNumber.errno, OutOfOrderSequenceNumber.errno])
async def test_a_record_without_an_offset_is_in_doubt_and_its_session_ends(met: Met) -> None:
    producer, kafka = idempotent()
    kafka.produced = lambda topic, partition: met
    assert await producer.write([record("plain.a")]) == [None]
    assert producer._session is None


async def test_a_topic_that_hangs_leaves_the_other_records_their_results() -> None:
    producer, kafka = idempotent(150)
    kafka.leaders = {("hangs", 0): 2}
    kafka.produced = lambda topic, partition: None if topic == "hangs" else RecordMetadata(1, -1)
    assert await producer.write([record("a"), record("hangs"), record("a")]) == [
        RecordMetadata(1, 5),
        None,
        RecordMetadata(2, 5),
    ]


async def test_a_record_without_a_leader_is_not_sent_and_the_others_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "METADATA_TIMEOUT_S", 0.03)
    producer, kafka = idempotent()
    kafka.leaderless, kafka.unknown = {"ill"}, {"gone"}
    refused = RECORD_ERRORS[UnknownTopicOrPartitionError.errno]
    assert await producer.write([record("ill"), record("a"), record("gone")]) == [
        NotSent(True),
        RecordMetadata(4, 5),
        refused,
    ]


async def test_too_few_replicas_before_the_append_is_not_sent_and_after_it_in_doubt() -> None:
    """Both are errors with acks=all: the first before the leader appends, the second after it has."""
    producer, kafka = idempotent()
    codes = {"before": NotEnoughReplicasError.errno, "after": NotEnoughReplicasAfterAppendError.errno}
    kafka.produced = lambda topic, partition: codes.get(topic, RecordMetadata(4, -1))
    records = [record("before"), record("a"), record("after")]
    assert await producer.write(records) == [NotSent(True), RecordMetadata(4, 5), None]
    assert producer._session is None


@pytest.mark.parametrize("second", [NotEnoughReplicasError.errno, TopicAuthorizationFailedError.errno, TOO_BIG])
async def test_a_record_that_was_sent_to_two_leaders_is_in_doubt(second: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOT_LEADER_PAUSE_S", 0.001)
    producer, kafka = idempotent()
    codes = [NotLeaderForPartitionError.errno, second]
    kafka.produced = lambda topic, partition: codes.pop(0)
    assert await producer.write([record("a")]) == [None]
    assert codes == []


async def test_records_whose_metadata_is_missing_at_the_timeout_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METADATA_TIMEOUT_S", 10.0)
    producer, kafka = idempotent(150)
    kafka.leaderless = {"ill"}
    assert await producer.write([record("a"), record("ill")]) == [NOT_SENT, NOT_SENT]
    assert kafka.batches("a") == []


async def test_writes_at_the_same_time_keep_their_sequence() -> None:
    producer, kafka = idempotent()
    await asyncio.gather(*(producer.write([record("a"), record("a")]) for _ in range(5)))
    assert [sequence for _, sequence, _ in kafka.batches("a")] == [0, 2, 4, 6, 8]


async def test_places_are_in_the_order_of_the_records() -> None:
    producer, kafka = idempotent()
    kafka.produced = lambda topic, partition: RecordMetadata(10 * partition, -1)
    records = [record("plain.a", 1), record("plain.a", 2), record("plain.a", 1)]
    assert await producer.write(records) == [RecordMetadata(10, 5), RecordMetadata(20, 5), RecordMetadata(11, 5)]
    assert producer._session is not None


async def test_send_all_writes_every_record_or_fails() -> None:
    """Readers through these records need each of them."""
    producer, kafka = idempotent()
    kafka.produced = lambda topic, partition: RecordMetadata(10 * partition, -1)
    places = await producer.send_all("a", [(2, None, b"x"), (1, b"k", b"y")])
    assert [place.offset for place in places] == [20, 10]
    kafka.produced = lambda topic, partition: TOO_BIG if partition == 1 else RecordMetadata(4, -1)
    with pytest.raises(KafkaAway, match=RECORD_ERRORS[TOO_BIG].why):
        await producer.send_all("a", [(2, None, b"x"), (1, b"k", b"y")])


async def test_an_unforeseen_error_is_logged_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a message of Kafka, which has no traceback."""
    producer, _ = idempotent()
    monkeypatch.setattr(producer._session, "batches", lambda *_: dict[str, int]()["of ours"])
    with capture_logs() as lines:
        assert await producer.write([record("a")]) == [NOT_SENT]
    (line,) = lines
    assert isinstance(line["exc_info"], KeyError)


async def test_a_cancellation_from_within_leaves_the_record_in_doubt_and_ends_the_session() -> None:
    producer, kafka = idempotent()
    kafka.produced = lambda topic, partition: asyncio.CancelledError()
    assert await producer.write([record("a")]) == [None]
    assert producer._session is None
    assert kafka.closed


async def test_a_topic_that_is_gone_is_logged_once_until_records_are_written_again() -> None:
    """Deleted, or without permission to write: it must be logged at once."""
    producer, kafka = idempotent()
    session = producer._session
    with capture_logs() as lines:
        answers: list[Met] = [
            UnknownTopicOrPartitionError.errno,
            TopicAuthorizationFailedError.errno,
            RecordMetadata(4, -1),
        ]
        kafka.produced = lambda topic, partition: answers.pop(0)
        while answers:
            producer._session = session
            with contextlib.suppress(KafkaAway):
                await producer.send("journal", 0, None, b"x")
    assert [(line["event"], line.get("why")) for line in lines] == [
        ("not every record was written", "journal: the topic or partition is not there (any more)"),
        ("records are written again", None),
    ]
