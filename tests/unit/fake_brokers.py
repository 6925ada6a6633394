"""Fake brokers for a producer's session, and producers that use them."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any, NamedTuple

import pytest
from aiokafka.errors import (
    InvalidProducerEpoch,
    KafkaConnectionError,
    MessageSizeTooLargeError,
)
from aiokafka.protocol.produce import ProduceRequest, ProduceResponse_v7
from aiokafka.protocol.transaction import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse_v0,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse_v0,
    EndTxnRequest,
    EndTxnResponse_v0,
)
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.structs import TopicPartition

from service.kafka.admin import TRANSACTIONS_1
from service.kafka.group_offsets import OFFSETS_TOPIC, GroupOffsets, partition_of_group
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.inspection import DescribeProducers, DescribeTransactions
from service.kafka.metadata import Partition
from service.kafka.offset_commit import TxnOffsetCommit, TxnOffsetCommitAndAdd
from service.kafka.outcomes import PRODUCER_FENCED, TransactionFailed
from service.kafka.producer import TransactionalProducer
from service.kafka.protocol import EndedAndBumped, EndTxnAndBumpRequest, ProduceAndAddRequest, Produced
from service.kafka.records import Record, RecordMetadata
from service.kafka.session import ProducerSession
from tests.unit.fakes import unreachable_kafka

LEDGER = ("ns.ledger", 0)
USUAL = ("a", "b", "orders", "small")
TOO_BIG = MessageSizeTooLargeError.errno
GONE = KafkaConnectionError()
FENCED = (InvalidProducerEpoch.errno, PRODUCER_FENCED)

# A broker's answer for a partition: its offset, an error code, an exception for the whole request, or silence.
Met = RecordMetadata | int | BaseException | None


def record(topic: str, partition: int = 0, value: bytes = b"1", most: int = 10**6) -> Record:
    return Record(topic, partition, None, value, [], 5, most)


def topics_of(request: Any) -> list[Any]:
    """Return the topics that a request names; one of aiokafka has no public name for them."""
    topics: list[Any] = [*(request.topics if isinstance(request, ProduceAndAddRequest) else request._topics)]
    return topics


class DescribedTransactions(NamedTuple):
    """The response to a DescribeTransactions request."""

    transactions: list[tuple[Any, ...]]


class DescribedProducers(NamedTuple):
    """The response to a DescribeProducers request."""

    topics: list[tuple[str, list[Any], dict[int, bytes]]]


class CommittedOffsets(NamedTuple):
    """The response to a TxnOffsetCommit request."""

    throttle_time_ms: int
    topics: list[tuple[str, list[tuple[int, int, dict[int, bytes]]], dict[int, bytes]]]


class FakeConnection:
    """A connection to a node of a FakeClient."""

    def __init__(self, client: "FakeClient", node: int) -> None:
        self._client = client
        self._node = node

    @property
    def transaction_version(self) -> int:
        return self._client.versions.get(self._node, 0)


class FakeClient:
    """A Client as far as a session uses it, and its brokers."""

    def __init__(self) -> None:
        self.cluster = self
        self.leaders: dict[Partition, int] = {}
        self.unknown: set[str] = set()  # topics without any partition
        self.leaderless: set[str] = set()
        self.unauthorized_topics: set[str] = set()
        self.tracked_topics: set[str] = set()
        self.asked: list[set[str]] = []  # topics that were looked up together
        self.produced: Callable[[str, int], Met] = lambda topic, partition: RecordMetadata(4, -1)
        self.added: Callable[[str, int], int] = lambda topic, partition: 0
        self.ended: int | BaseException | None = 0
        self.throttle_ms = 0  # in every response to a Produce
        self.requests: list[tuple[int, Any]] = []
        self.closed = False
        self.connected = True
        self.has_lost_connection = False
        self.has_due_session = False
        self.open_in: dict[Partition, int] = {}  # where producer 7 has an open transaction, and its first offset
        self.of_ledger: Met = RecordMetadata(9, -1)
        self.offsets_added: int | None = 0  # the error code of AddOffsetsToTxn, or silence
        self.coordinator_hangs = False  # the leader of a group's partition answers nothing about it
        self.offsets_committed: Callable[[str, int], int] = lambda topic, partition: 0  # and of TxnOffsetCommit
        self.refused: dict[Partition, int] = {}  # error codes in DescribeProducers responses
        self.versions: dict[int, int] = {}  # transaction.version, by the node that reports it
        # The next states of the transactional id's transaction, or an exception for the request; then "Ongoing".
        self.states: list[str | BaseException] = []
        self._connections: dict[int, FakeConnection] = {}
        self.next_producer: tuple[int, int] | None = None  # in the response to an EndTxn of version 5

    async def ready(self, node: int) -> bool:
        await asyncio.sleep(0)
        self.connected = True
        return True

    def connection(self, node: int) -> "FakeConnection | None":
        return self._connections.setdefault(node, FakeConnection(self, node)) if self.connected else None

    def leader_for_partition(self, partition: TopicPartition) -> int | None:
        if partition.topic in self.unknown | self.leaderless:
            return None
        return self.leaders.get((partition.topic, partition.partition), 1)

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return None if topic in self.unknown else {0, 1, 2}

    def topics(self, exclude_internal_topics: bool) -> set[str]:
        return self.tracked_topics - self.unknown

    def add_topic(self, topic: str) -> None:
        self.tracked_topics.add(topic)

    def set_topics(self, topics: set[str]) -> None:
        self.asked.append(topics - self.tracked_topics)
        self.tracked_topics = set(topics)

    async def force_metadata_update(self) -> bool:
        return True

    def refresh(self, topics: Collection[str]) -> "asyncio.Future[bool]":
        return asyncio.ensure_future(self.force_metadata_update())

    async def renew_sessions(self) -> None:
        if self.has_due_session:
            self.requests.append((0, "renewal"))
            self.has_due_session = False

    def try_send(self, node: int, request: Any) -> "asyncio.Future[Any] | None":
        return asyncio.ensure_future(self.send(node, request)) if self.connected else None

    async def send(self, node: int, request: Any) -> Any:
        self.requests.append((node, request))
        await asyncio.sleep(0)
        return await (self._of_version_2(request) or self._of_version_1(request))

    def _of_version_2(self, request: Any) -> Coroutine[Any, Any, Any] | None:
        match request:
            case DescribeTransactions():
                return self._describe(request)
            case EndTxnAndBumpRequest():
                return self._end_and_bump(request)
            case ProduceAndAddRequest():
                return self._produce_and_add(request)
        return None

    async def _describe(self, request: DescribeTransactions) -> DescribedTransactions:
        state = await self._meet(self.states.pop(0) if self.states else "Ongoing")
        if state.startswith("Complete"):  # its markers are written
            self.open_in = {}
        return DescribedTransactions([(0, request.transactional_id, state, 1, 1, 7, 0, [], {})])

    async def _end_and_bump(self, request: EndTxnAndBumpRequest) -> EndedAndBumped:
        self.open_in = {}
        code = await self._meet(self.ended)
        following = self.next_producer or (request.producer_id, request.producer_epoch + 1)
        return EndedAndBumped(0, code, *((-1, -1) if code else following))

    async def _produce_and_add(self, request: ProduceAndAddRequest) -> Produced:
        rows = [
            (topic, [await self._row(topic, partition) for partition, _ in batches])
            for topic, batches in topics_of(request)
        ]
        return Produced(rows, self.throttle_ms)

    async def _of_version_1(self, request: Any) -> Any:
        match request:
            case AddPartitionsToTxnRequest():
                rows = [(topic, [(n, self.added(topic, n)) for n in numbers]) for topic, numbers in topics_of(request)]
                return AddPartitionsToTxnResponse_v0(0, rows)
            case DescribeProducers():
                await self._meet(None if self.coordinator_hangs and OFFSETS_TOPIC in request.by_topic else 0)
                return DescribedProducers(
                    [(t, [self._active(t, n) for n in ns], {}) for t, ns in request.by_topic.items()]
                )
            case AddOffsetsToTxnRequest():
                return AddOffsetsToTxnResponse_v0(0, await self._meet(self.offsets_added))
            case TxnOffsetCommit() | TxnOffsetCommitAndAdd():
                await self._meet(None if self.coordinator_hangs else 0)
                return self._committed(request.offsets)
            case EndTxnRequest():
                self.open_in = {}
                return EndTxnResponse_v0(0, await self._meet(self.ended))
            case ProduceRequest():
                topics = []
                for topic, batches in topics_of(request):
                    topics.append((topic, [await self._row(topic, partition) for partition, _ in batches]))
                return ProduceResponse_v7(topics, self.throttle_ms)
        raise AssertionError(request)

    def _committed(self, offsets: GroupOffsets) -> CommittedOffsets:
        rows: list[tuple[str, list[tuple[int, int, dict[int, bytes]]], dict[int, bytes]]] = [
            (topic, [(each.partition, self.offsets_committed(topic, each.partition), {}) for each in positions], {})
            for topic, positions in offsets.topics
        ]
        if not all(code for _, codes, _ in rows for _, code, _ in codes):
            self.open_in[OFFSETS_TOPIC, partition_of_group(offsets.group, 3)] = 55
        return CommittedOffsets(0, rows)

    async def coordinator_lookup(self, kind: int, name: str) -> int:
        self.requests.append((0, f"look-up of {name}"))
        return 2

    def get_random_node(self) -> int:
        return 1

    def _active(self, topic: str, number: int) -> tuple[Any, ...]:
        partition = topic, number
        active: list[tuple[Any, ...]] = [(7, 0, 0, 0, 0, self.open_in.get(partition, -1), {}), (8, 0, 0, 0, 0, 3, {})]
        return number, self.refused.get(partition, 0), None, active, {}

    async def _meet(self, met: Any) -> Any:
        if met is None:
            await asyncio.sleep(60)
        if isinstance(met, BaseException):
            raise met
        return met

    async def _row(self, topic: str, partition: int) -> tuple[int, int, int, int, int]:
        met = await self._meet(self.of_ledger if (topic, partition) == LEDGER else self.produced(topic, partition))
        return (partition, met, -1, -1, 0) if isinstance(met, int) else (partition, 0, met.offset, met.timestamp, 0)

    def sent(self, kind: type | tuple[type, ...]) -> list[Any]:
        return [request for _, request in self.requests if isinstance(request, kind)]

    def batches(self, topic: str) -> list[tuple[int, int, list[bytes | None]]]:
        """List partition, base sequence and values of each batch that was sent to a topic."""
        found = []
        for request in self.sent((ProduceRequest, ProduceAndAddRequest)):
            for name, batches in topics_of(request):
                for partition, raw in batches:
                    batch = DefaultRecordBatch(bytes(raw))
                    if name == topic:
                        found.append((partition, batch.base_sequence, [each.value for each in batch]))
        return found

    async def close(self) -> None:
        self.closed = True


def fake_inside(session: ProducerSession) -> FakeClient:
    fake = FakeClient()
    session.client = fake  # type: ignore[assignment]
    session.producer_id, session.epoch, session.coordinator = 7, 0, 1
    return fake


def transactional(
    timeout_ms: int = 600, *, clear: bool = True, epoch: int = 0, transactions: str = TRANSACTIONS_1
) -> tuple[TransactionalProducer, FakeClient]:
    """Make a producer and its brokers; `clear`: the usual partitions are known to have no open transaction."""
    producer = TransactionalProducer(unreachable_kafka(timeout_ms, transactions), "ns.slot.0", timeout_ms)
    fake = fake_inside(producer._session)
    producer._session.epoch = epoch
    if clear:
        producer._open_check.note([LEDGER, *((topic, number) for topic in USUAL for number in range(3))])
    return producer, fake


def idempotent(timeout_ms: int = 600) -> tuple[IdempotentProducer, FakeClient]:
    producer = IdempotentProducer(unreachable_kafka(timeout_ms), "plain-0")
    producer._session = ProducerSession(unreachable_kafka(timeout_ms), "plain-0", throttle=producer.throttle)
    return producer, fake_inside(producer._session)


async def write(producer: TransactionalProducer, *records: Record) -> list[RecordMetadata]:
    places = await producer.send(records, LEDGER)
    await producer.commit(b"entries")
    return places


async def failure(producer: TransactionalProducer, *records: Record) -> TransactionFailed:
    with pytest.raises(TransactionFailed) as raised:
        await write(producer, *records)
    return raised.value
