"""What a producer's life makes of refusals, silence and late answers; aiokafka is a small stand-in."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka.errors import (
    KafkaConnectionError,
    MessageSizeTooLargeError,
    NoError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.protocol.produce import ProduceResponse_v7
from aiokafka.protocol.transaction import AddPartitionsToTxnResponse_v0, EndTxnResponse_v0
from aiokafka.structs import RecordMetadata, TopicPartition

from service.errors import TOO_LARGE, UNKNOWN_TOPIC
from service.kafka import producer as module
from service.kafka.cluster import Cluster
from service.kafka.producer import IdempotentProducer, Place, Record, TransactionalProducer, _Life
from service.kafka.verdict import REFUSALS, TransactionFailed, Verdict
from service.telemetry import Telemetry

Met = Place | Exception | None  # what a batch meets: an answer, an error, or silence

LEDGER = ("ns.ledger", 0)
TOO_BIG = MessageSizeTooLargeError.errno
too_large: Exception = MessageSizeTooLargeError()
gone: Exception = KafkaConnectionError()


def record(topic: str, partition: int = 0, value: bytes = b"1") -> Record:
    return Record(topic, partition, None, value, [], 5)


def produced(topic: str, partition: int, code: int) -> Any:
    """A broker's answer about one partition."""
    return ProduceResponse_v7([(topic, [(partition, code, -1, -1, 0)])], 0)


class FakeAio:
    """AIOKafkaProducer as far as a life uses it. `send` is what a test says a batch meets."""

    def __init__(self) -> None:
        self.client = self.cluster = self._txn_manager = self._sender = self
        self.sender_task = self._transaction_waiter = None
        self.producer_id, self.producer_epoch = 7, 0
        self.without_metadata: set[str] = set()
        self.send: Callable[[str, int], Met] = lambda topic, partition: Place(4, -1)
        self.blocked: set[str] = set()  # topics of which no batch is taken any more
        self.posted: list[tuple[str, int]] = []
        self.commits: list[Exception | None] = []  # what the next commits meet
        self._closed = False

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return None if topic in self.without_metadata else {0, 1, 2}

    def add_topic(self, topic: str) -> None:
        pass

    async def force_metadata_update(self) -> None:
        pass

    def maybe_add_partition_to_txn(self, partition: TopicPartition) -> None:
        pass

    async def begin_transaction(self) -> None:
        pass

    async def commit_transaction(self) -> None:
        if self.commits and (error := self.commits.pop(0)):
            raise error

    async def send_batch(self, builder: Any, topic: str, partition: int) -> "asyncio.Future[Any]":
        if topic in self.blocked:
            await asyncio.sleep(60)
        self.posted.append((topic, partition))
        future = asyncio.get_running_loop().create_future()
        met = self.send(topic, partition)
        if isinstance(met, Place):
            tp = TopicPartition(topic, partition)
            future.set_result(RecordMetadata(topic, partition, tp, met.offset, met.timestamp, 0, 0))
        elif met is not None:
            future.set_exception(met)
        return future

    async def close(self) -> None:
        pass


def cluster(timeout_ms: int = 600) -> Cluster:
    return Cluster("127.0.0.1:1", client_id="test", request_timeout_ms=timeout_ms, telemetry=Telemetry())


def fake_inside(life: _Life) -> FakeAio:
    life.producer._closed = True  # it never began
    aio = life.producer = FakeAio()
    return aio


def transactional(timeout_ms: int = 600) -> tuple[TransactionalProducer, FakeAio]:
    producer = TransactionalProducer(cluster(timeout_ms), "ns.slot.0", timeout_ms)
    return producer, fake_inside(producer._life)


def idempotent() -> tuple[IdempotentProducer, FakeAio]:
    producer = IdempotentProducer(cluster(), "plain-0")
    producer._life = _Life(cluster(), "plain-0")
    return producer, fake_inside(producer._life)


async def write(producer: TransactionalProducer, *records: Record) -> list[Place]:
    places, _ = await producer.write(records, LEDGER, lambda _: b"entries")
    return places


# ----------------------------------------------------------------------------------------------------- deadlines


async def test_refusals_that_repeat_do_not_push_the_deadline_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiokafka asks again every few milliseconds, and each time the broker refuses anew."""
    monkeypatch.setattr(module, "REFUSED_PATIENCE_S", 0.05)
    producer, _ = transactional()

    async def refuse_again_and_again() -> None:
        async with producer._life.within(10):
            for _ in range(40):
                producer._life._look(produced("orders", 0, UnknownTopicOrPartitionError.errno))
                await asyncio.sleep(0.01)

    with pytest.raises(TimeoutError):
        await refuse_again_and_again()


async def test_a_refusal_leaves_a_nearer_deadline_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSED_PATIENCE_S", 5.0)
    producer, _ = transactional()

    async def refuse_and_wait() -> None:
        async with producer._life.within(0.03):
            producer._life._look(produced("orders", 0, TOO_BIG))
            await asyncio.sleep(0.3)

    with pytest.raises(TimeoutError):
        await refuse_and_wait()


async def test_what_is_no_refusal_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSED_PATIENCE_S", 0.0)
    producer, _ = transactional()
    async with producer._life.within(1):
        producer._life._look(produced("orders", 0, NoError.errno))
        await asyncio.sleep(0.01)
    assert not producer._life.refusals


async def test_a_refusal_of_add_partitions_counts_too() -> None:
    producer, _ = transactional()
    denied = TopicAuthorizationFailedError.errno
    producer._life._look(AddPartitionsToTxnResponse_v0(0, [("secret", [(1, denied)]), ("orders", [(0, 0)])]))
    assert producer._life.refusals == {("secret", 1): REFUSALS[denied]}


# ------------------------------------------------------------------------------------------------------ refusals


async def test_a_refusal_of_an_earlier_transaction_is_not_taken_for_the_present_one() -> None:
    producer, aio = transactional()

    def overcome(topic: str, partition: int) -> Met:
        producer._life._look(produced(topic, partition, UnknownTopicOrPartitionError.errno))
        return Place(1, -1)

    aio.send = overcome
    assert await write(producer, record("orders")) == [Place(1, 5)]
    aio.send = lambda topic, partition: gone
    with pytest.raises(TransactionFailed) as raised:
        await write(producer, record("orders"))
    assert raised.value.verdict is Verdict.ABORTED
    assert not raised.value.refusals


async def test_a_refusal_that_ends_a_transaction_is_told_by_its_topic() -> None:
    producer, aio = transactional()

    def refuse(topic: str, partition: int) -> Met:
        if topic == "orders":
            return Place(1, -1)
        producer._life._look(produced(topic, partition, TOO_BIG))
        return too_large

    aio.send = refuse
    with pytest.raises(TransactionFailed) as raised:
        await write(producer, record("orders"), record("small"))
    assert {topic: refusal.kind for topic, refusal in raised.value.refusals.items()} == {"small": TOO_LARGE}
    assert raised.value.verdict is Verdict.ABORTED


async def test_a_commit_that_fails_is_unknown() -> None:
    producer, aio = transactional()
    aio.commits = [KafkaConnectionError()]
    with pytest.raises(TransactionFailed) as raised:
        await write(producer, record("orders"))
    assert raised.value.verdict is Verdict.UNKNOWN


async def test_a_commit_that_was_repeated_inside_is_unknown_and_refuses_nothing() -> None:
    producer, aio = transactional()

    def overcome(topic: str, partition: int) -> Met:
        producer._life._look(produced(topic, partition, UnknownTopicOrPartitionError.errno))
        producer._life._look(EndTxnResponse_v0(0, 51))
        return Place(1, -1)

    aio.send = overcome
    with pytest.raises(TransactionFailed) as raised:
        await write(producer, record("orders"))
    assert raised.value.verdict is Verdict.UNKNOWN
    assert not raised.value.refusals


# --------------------------------------------------------------------------------------------------------- stuck


async def test_a_topic_without_an_answer_is_named_stuck() -> None:
    producer, aio = transactional(150)
    aio.send = lambda topic, partition: None if topic == "hangs" else Place(1, -1)
    with pytest.raises(TransactionFailed) as raised:
        await write(producer, record("orders"), record("hangs"))
    assert set(raised.value.stuck) == {"hangs"}
    assert raised.value.verdict is Verdict.ABORTED


async def test_a_topic_without_metadata_is_named_stuck_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METADATA_PATIENCE_S", 0.03)
    producer, aio = transactional(60_000)
    aio.without_metadata = {"hangs"}
    async with asyncio.timeout(3.0):
        with pytest.raises(TransactionFailed) as raised:
            await write(producer, record("orders"), record("hangs"))
    assert set(raised.value.stuck) == {"hangs"}


async def test_a_topic_that_takes_no_further_batch_is_named_stuck() -> None:
    """aiokafka keeps one batch of a partition and makes the next one wait: the hand-over itself hangs."""
    producer, aio = transactional(150)

    def first_only(topic: str, partition: int) -> Met:
        aio.blocked = {"hangs"}
        return None

    aio.send = first_only
    large = [record("hangs", value=b"x" * 600_000) for _ in range(3)]
    with pytest.raises(TransactionFailed) as raised:
        await write(producer, *large)
    assert set(raised.value.stuck) == {"hangs"}


async def test_what_waits_behind_a_refused_topic_is_not_called_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the broker refuses to add a partition, no batch of the group is sent: only one of them is to blame."""
    monkeypatch.setattr(module, "REFUSED_PATIENCE_S", 0.02)
    producer, aio = transactional()

    def refuse(topic: str, partition: int) -> Met:
        if topic == "gone":
            unknown = UnknownTopicOrPartitionError.errno
            producer._life._look(AddPartitionsToTxnResponse_v0(0, [("gone", [(0, unknown)]), ("orders", [(0, 55)])]))
        return None

    aio.send = refuse
    with pytest.raises(TransactionFailed) as raised:
        await write(producer, record("orders"), record("gone"))
    assert {topic: refusal.kind for topic, refusal in raised.value.refusals.items()} == {"gone": UNKNOWN_TOPIC}
    assert not raised.value.stuck


# ---------------------------------------------------------------------------------------------------- idempotent


async def test_the_refusal_of_one_partition_is_not_another_ones() -> None:
    """Partition 0 was refused, of partition 1 there is no answer: only the first batch was surely not written."""
    producer, aio = idempotent()
    life = producer._life
    assert life is not None

    def refuse_first(topic: str, partition: int) -> Met:
        if partition == 0:
            life._look(produced(topic, partition, TOO_BIG))
            return too_large
        return gone

    aio.send = refuse_first
    assert await producer.write([record("plain.a", 0), record("plain.a", 1)]) == [REFUSALS[TOO_BIG], None]
    assert producer._life is None, "a life with a gap in its sequence numbers goes on"


async def test_a_false_offset_is_no_place() -> None:
    """DuplicateSequenceNumber, which aiokafka calls a success."""
    producer, aio = idempotent()
    aio.send = lambda topic, partition: Place(-1, -1)
    assert await producer.write([record("plain.a")]) == [None]
    transaction, aio = transactional()
    aio.send = lambda topic, partition: Place(-1, -1)
    with pytest.raises(TransactionFailed):
        await write(transaction, record("orders"))


async def test_places_are_in_the_order_of_the_records() -> None:
    producer, aio = idempotent()
    aio.send = lambda topic, partition: Place(10 * partition, -1)
    records = [record("plain.a", 1), record("plain.a", 2), record("plain.a", 1)]
    assert await producer.write(records) == [Place(10, 5), Place(20, 5), Place(11, 5)]
