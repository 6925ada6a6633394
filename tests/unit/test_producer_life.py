"""What a producer's life makes of refusals, silence and half an answer; the broker is a small stand-in."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka.errors import (
    ConcurrentTransactions,
    DuplicateSequenceNumber,
    InvalidProducerEpoch,
    KafkaConnectionError,
    LeaderNotAvailableError,
    MessageSizeTooLargeError,
    NotLeaderForPartitionError,
    OperationNotAttempted,
    OutOfOrderSequenceNumber,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.protocol.produce import ProduceRequest, ProduceResponse_v7
from aiokafka.protocol.transaction import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse_v0,
    EndTxnRequest,
    EndTxnResponse_v0,
)
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.structs import TopicPartition

from service.errors import FORBIDDEN_TOPIC, TOO_LARGE, UNKNOWN_TOPIC
from service.kafka import life as module
from service.kafka.cluster import CODECS, Cluster
from service.kafka.life import Life, Partition, Place, Record
from service.kafka.producer import IdempotentProducer, TransactionalProducer
from service.kafka.verdict import PRODUCER_FENCED, REFUSALS, TransactionFailed, Verdict
from service.telemetry import Telemetry

LEDGER = ("ns.ledger", 0)
TOO_BIG = MessageSizeTooLargeError.errno
GONE = KafkaConnectionError()
FENCED = (InvalidProducerEpoch.errno, PRODUCER_FENCED)

# A broker's answer for a partition: its offset, an error code, an exception for the whole request, or silence.
Met = Place | int | Exception | None


def record(topic: str, partition: int = 0, value: bytes = b"1", most: int = 10**6) -> Record:
    return Record(topic, partition, None, value, [], 5, most)


class FakeClient:
    """AIOKafkaClient as far as a life uses it, and the brokers behind it."""

    def __init__(self) -> None:
        self.cluster = self
        self.leaders: dict[Partition, int] = {}
        self.unknown: set[str] = set()  # topics without any partition
        self.leaderless: set[str] = set()
        self._topics: set[str] = set()
        self.asked: list[set[str]] = []  # topics that were looked up at once
        self.produced: Callable[[str, int], Met] = lambda topic, partition: Place(4, -1)
        self.added: Callable[[str, int], int] = lambda topic, partition: 0
        self.ended: int | Exception | None = 0
        self.requests: list[tuple[int, Any]] = []
        self.closed = False

    def leader_for_partition(self, partition: TopicPartition) -> int | None:
        if partition.topic in self.unknown | self.leaderless:
            return None
        return self.leaders.get((partition.topic, partition.partition), 1)

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return None if topic in self.unknown else {0, 1, 2}

    def add_topic(self, topic: str) -> None:
        self._topics.add(topic)

    def set_topics(self, topics: set[str]) -> None:
        self.asked.append(topics - self._topics)
        self._topics = set(topics)

    async def force_metadata_update(self) -> bool:
        return True

    async def send(self, node: int, request: Any) -> Any:
        self.requests.append((node, request))
        await asyncio.sleep(0)
        match request:
            case AddPartitionsToTxnRequest():
                rows = [(topic, [(n, self.added(topic, n)) for n in numbers]) for topic, numbers in request._topics]
                return AddPartitionsToTxnResponse_v0(0, rows)
            case EndTxnRequest():
                return EndTxnResponse_v0(0, await self._meet(self.ended))
            case ProduceRequest():
                topics = []
                for topic, batches in request._topics:
                    topics.append((topic, [await self._row(topic, partition) for partition, _ in batches]))
                return ProduceResponse_v7(topics, 0)
        raise AssertionError(request)

    async def _meet(self, met: Any) -> Any:
        if met is None:
            await asyncio.sleep(60)
        if isinstance(met, Exception):
            raise met
        return met

    async def _row(self, topic: str, partition: int) -> tuple[int, int, int, int, int]:
        met = await self._meet(Place(9, -1) if (topic, partition) == LEDGER else self.produced(topic, partition))
        return (partition, met, -1, -1, 0) if isinstance(met, int) else (partition, 0, *met, 0)

    def sent(self, kind: type) -> list[Any]:
        return [request for _, request in self.requests if isinstance(request, kind)]

    def batches(self, topic: str) -> list[tuple[int, int, list[bytes | None]]]:
        """Partition, base sequence and values of each batch that was sent to a topic."""
        found = []
        for request in self.sent(ProduceRequest):
            for name, batches in request._topics:
                for partition, raw in batches:
                    batch = DefaultRecordBatch(bytes(raw))
                    if name == topic:
                        found.append((partition, batch.base_sequence, [each.value for each in batch]))
        return found

    async def close(self) -> None:
        self.closed = True


def cluster(timeout_ms: int = 600) -> Cluster:
    return Cluster("127.0.0.1:1", client_id="test", request_timeout_ms=timeout_ms, telemetry=Telemetry())


def fake_inside(life: Life) -> FakeClient:
    fake = FakeClient()
    life.client = fake
    life.producer_id, life.epoch, life.coordinator = 7, 0, 1
    return fake


def transactional(timeout_ms: int = 600) -> tuple[TransactionalProducer, FakeClient]:
    producer = TransactionalProducer(cluster(timeout_ms), "ns.slot.0", timeout_ms)
    return producer, fake_inside(producer._life)


def idempotent(timeout_ms: int = 600) -> tuple[IdempotentProducer, FakeClient]:
    producer = IdempotentProducer(cluster(timeout_ms), "plain-0")
    producer._life = Life(cluster(timeout_ms), "plain-0")
    return producer, fake_inside(producer._life)


async def write(producer: TransactionalProducer, *records: Record) -> list[Place]:
    places, _ = await producer.write(records, LEDGER, lambda _: b"entries")
    return places


async def failure(producer: TransactionalProducer, *records: Record) -> TransactionFailed:
    with pytest.raises(TransactionFailed) as raised:
        await write(producer, *records)
    return raised.value


# ------------------------------------------------------------------------------------------------- a transaction


async def test_a_transaction_is_four_requests_each_sent_once() -> None:
    producer, kafka = transactional()
    records = [record("a", 1), record("b", 0), record("a", 1), record("a", 0)]
    kafka.produced = lambda topic, partition: Place(100 * partition, 77 if topic == "b" else -1)
    places, ledger_offset = await producer.write(records, LEDGER, lambda places: repr(places).encode())
    assert places == [Place(100, 5), Place(0, 77), Place(101, 5), Place(0, 5)]
    assert ledger_offset == 9
    assert [type(request).__name__ for _, request in kafka.requests] == [
        "AddPartitionsToTxnRequest",
        "ProduceRequest",
        "ProduceRequest",
        "EndTxnRequest",
    ]
    (add,) = kafka.sent(AddPartitionsToTxnRequest)
    assert add._topics == [("a", [1, 0]), ("b", [0]), ("ns.ledger", [0])]
    (ledger,) = kafka.batches("ns.ledger")
    assert ledger == (0, 0, [repr(places).encode()])


async def test_a_transaction_that_is_open_is_not_begun_again() -> None:
    producer, kafka = transactional()
    producer.open([("a", 0), ("a", 1), LEDGER])
    await asyncio.sleep(0.01)
    assert [type(request).__name__ for _, request in kafka.requests] == ["AddPartitionsToTxnRequest"]
    await write(producer, record("a", 0))
    assert len(kafka.sent(AddPartitionsToTxnRequest)) == 1
    producer.open([("a", 0), LEDGER])
    await write(producer, record("a", 1), record("a", 0))
    assert [request._topics for request in kafka.sent(AddPartitionsToTxnRequest)[1:]] == [
        [("a", [0]), ("ns.ledger", [0])],
        [("a", [1])],
    ]
    assert [request._transaction_result for request in kafka.sent(EndTxnRequest)] == [True, True]


async def test_what_was_opened_for_nothing_is_aborted() -> None:
    producer, kafka = transactional()
    await producer.abandon()
    assert not kafka.requests
    producer.open([("a", 0), LEDGER])
    await producer.abandon()
    assert [request._transaction_result for request in kafka.sent(EndTxnRequest)] == [False]


async def test_what_could_not_be_opened_is_left_to_the_write_and_need_not_be_ended() -> None:
    producer, kafka = transactional()
    denied = TopicAuthorizationFailedError.errno
    kafka.added = lambda topic, partition: denied if topic == "secret" else 0
    producer.open([("a", 0), ("secret", 0), LEDGER])
    await producer.abandon()
    assert not kafka.sent(EndTxnRequest)
    producer.open([("a", 0), ("secret", 0), LEDGER])
    assert await write(producer, record("a")) == [Place(4, 5)]
    producer.open([("secret", 0), LEDGER])
    failed = await failure(producer, record("secret"))
    assert {topic: refusal.kind for topic, refusal in failed.refusals.items()} == {"secret": FORBIDDEN_TOPIC}


async def test_nobody_waits_for_a_leader_that_may_not_be_needed() -> None:
    producer, kafka = transactional()
    kafka.leaderless = {"moves"}
    producer.open([("a", 0), ("moves", 0), LEDGER])
    await producer.abandon()
    assert not kafka.requests


@pytest.mark.parametrize("last", ["write", "abandon"])
async def test_an_opening_without_an_answer_ends_the_life(last: str) -> None:
    producer, kafka = transactional()
    kafka.added = lambda topic, partition: -1
    producer.open([("a", 0), LEDGER])
    with pytest.raises(TransactionFailed) as raised:
        await (producer.abandon() if last == "abandon" else write(producer, record("a")))
    assert raised.value.verdict is Verdict.ABORTED
    assert not kafka.sent(ProduceRequest)
    assert not kafka.sent(EndTxnRequest)


async def test_each_leader_gets_a_request_of_its_own() -> None:
    producer, kafka = transactional()
    kafka.leaders = {("a", 0): 1, ("a", 1): 2, ("b", 0): 2}
    await write(producer, record("a", 0), record("a", 1), record("b", 0))
    produced = [
        (node, [topic for topic, _ in r._topics]) for node, r in kafka.requests if isinstance(r, ProduceRequest)
    ]
    assert produced == [(1, ["a"]), (2, ["a", "b"]), (1, ["ns.ledger"])]


async def test_sequence_numbers_go_on_over_batches_and_writes_and_begin_again_at_their_end() -> None:
    producer, kafka = transactional()
    full = [record("a", 0, b"x" * 300, most=700) for _ in range(3)]
    assert await write(producer, *full, record("a", 1)) == [Place(4, 5), Place(5, 5), Place(4, 5), Place(4, 5)]
    await write(producer, record("a", 0))
    assert [(partition, sequence) for partition, sequence, _ in kafka.batches("a")] == [(0, 0), (1, 0), (0, 2), (0, 3)]
    producer._life._sequences["a", 0] = 2**31 - 1
    await write(producer, record("a", 0), record("a", 0))
    await write(producer, record("a", 0))
    assert [sequence for _, sequence, _ in kafka.batches("a")][-2:] == [2**31 - 1, 1]


async def test_while_markers_are_written_the_next_transaction_asks_again() -> None:
    producer, kafka = transactional()
    answers = iter([ConcurrentTransactions.errno] * 6)
    kafka.added = lambda topic, partition: next(answers, 0)
    assert await write(producer, record("a")) == [Place(4, 5)]
    assert len(kafka.sent(AddPartitionsToTxnRequest)) == 4, "two partitions are told each time"


# ------------------------------------------------------------------------------------------------------ refusals


async def test_a_refusal_that_ends_a_transaction_is_told_by_its_topic() -> None:
    producer, kafka = transactional()
    kafka.produced = lambda topic, partition: TOO_BIG if topic == "small" else Place(1, -1)
    failed = await failure(producer, record("orders"), record("small"))
    assert {topic: refusal.kind for topic, refusal in failed.refusals.items()} == {"small": TOO_LARGE}
    assert failed.verdict is Verdict.ABORTED
    assert not failed.stuck
    assert not kafka.sent(EndTxnRequest)


async def test_where_a_partition_may_not_be_added_only_its_topic_is_to_blame() -> None:
    """The broker then adds none of them; the others were "not attempted"."""
    producer, kafka = transactional()
    denied = TopicAuthorizationFailedError.errno
    kafka.added = lambda topic, partition: denied if topic == "secret" else OperationNotAttempted.errno
    failed = await failure(producer, record("orders"), record("secret"))
    assert {topic: refusal.kind for topic, refusal in failed.refusals.items()} == {"secret": FORBIDDEN_TOPIC}
    assert not failed.stuck
    assert not kafka.sent(ProduceRequest)


async def test_the_leaders_of_many_topics_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, each request would answer for all before it: minutes of it, for a thousand topics."""
    monkeypatch.setattr(module, "METADATA_PATIENCE_S", 0.03)
    for producer, kafka in (transactional(60_000), idempotent(60_000)):
        kafka.leaderless = {"a", "b"}
        records = [record("a"), record("b"), record("known")]
        with contextlib.suppress(TransactionFailed):
            await (
                write(producer, *records) if isinstance(producer, TransactionalProducer) else producer.write(records)
            )
        assert kafka.asked == [{"a", "b"}]


async def test_a_partition_that_no_broker_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METADATA_PATIENCE_S", 0.03)
    producer, kafka = transactional(60_000)
    kafka.unknown = {"gone"}
    failed = await failure(producer, record("orders"), record("gone"))
    assert {topic: refusal.kind for topic, refusal in failed.refusals.items()} == {"gone": UNKNOWN_TOPIC}
    assert not kafka.requests


# --------------------------------------------------------------------------------------------------------- doubt


@pytest.mark.parametrize("ended", [GONE, 51, 15, -1, RequestTimedOutError(), AssertionError()], ids=repr)
async def test_a_commit_without_a_clean_answer_is_unknown(ended: int | Exception) -> None:
    producer, kafka = transactional()
    kafka.ended = ended
    assert (await failure(producer, record("orders"))).verdict is Verdict.UNKNOWN
    assert len(kafka.sent(EndTxnRequest)) == 1


async def test_a_commit_that_is_silent_is_unknown() -> None:
    producer, kafka = transactional(150)
    kafka.ended = None
    assert (await failure(producer, record("orders"))).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("code", FENCED)
async def test_a_fence_is_told_wherever_it_is_met(code: int) -> None:
    for step in ("added", "produced", "ended"):
        producer, kafka = transactional()
        if step == "ended":
            kafka.ended = code
        else:
            setattr(kafka, step, lambda topic, partition: code)
        failed = await failure(producer, record("orders"))
        assert (failed.verdict, failed.stuck) == (Verdict.FENCED, set()), step


async def test_a_false_offset_is_no_place() -> None:
    for met in (Place(-1, -1), DuplicateSequenceNumber.errno):
        transaction, kafka = transactional()
        kafka.produced = lambda topic, partition, met=met: met  # type: ignore[misc]
        assert (await failure(transaction, record("orders"))).verdict is Verdict.ABORTED
        assert not kafka.sent(EndTxnRequest)


async def test_a_ledger_record_without_an_answer_commits_nothing() -> None:
    producer, kafka = transactional()

    def broken(places: Any) -> bytes:
        raise RuntimeError("a bug")

    with pytest.raises(TransactionFailed) as raised:
        await producer.write([record("orders")], LEDGER, broken)
    assert raised.value.verdict is Verdict.ABORTED
    assert not kafka.sent(EndTxnRequest)


# --------------------------------------------------------------------------------------------------------- stuck


async def test_a_topic_without_an_answer_is_named_stuck() -> None:
    producer, kafka = transactional(150)
    kafka.leaders = {("hangs", 0): 2}
    kafka.produced = lambda topic, partition: None if topic == "hangs" else Place(1, -1)
    failed = await failure(producer, record("orders"), record("hangs"))
    assert set(failed.stuck) == {"hangs"}
    assert failed.verdict is Verdict.ABORTED


async def test_what_its_broker_does_not_lead_is_sent_to_who_does() -> None:
    """With the same sequence numbers: nothing of it was written."""
    producer, kafka = transactional()
    answers = iter([NotLeaderForPartitionError.errno, LeaderNotAvailableError.errno])

    def moves(topic: str, partition: int) -> Met:
        kafka.leaders["moves", 0] = 2
        return next(answers, Place(1, -1)) if topic == "moves" else Place(3, -1)

    kafka.produced = moves
    assert await write(producer, record("orders"), record("moves")) == [Place(3, 5), Place(1, 5)]
    assert [sequence for _, sequence, _ in kafka.batches("moves")] == [0, 0, 0]
    assert len(kafka.batches("orders")) == 1
    nodes = [node for node, request in kafka.requests if isinstance(request, ProduceRequest)]
    assert nodes == [1, 2, 2, 1]


async def test_where_one_batch_was_taken_the_other_is_not_sent_again() -> None:
    """Its leader came back between the two: the first would follow the second."""
    producer, kafka = transactional()
    answers = iter([NotLeaderForPartitionError.errno])
    kafka.produced = lambda topic, partition: next(answers, Place(1, -1))
    failed = await failure(producer, *[record("a", 0, b"x" * 300, most=500) for _ in range(2)])
    assert (failed.verdict, set(failed.stuck)) == (Verdict.ABORTED, {"a"})
    assert len(kafka.batches("a")) == 2


@pytest.mark.parametrize("code", [RequestTimedOutError.errno, NotLeaderForPartitionError.errno])
async def test_a_topic_whose_partition_fails_is_named_stuck(code: int) -> None:
    """Nobody sends it again from here: until it is well, its events must not hold up the others'."""
    producer, kafka = transactional()
    kafka.produced = lambda topic, partition: code if topic == "ill" else Place(1, -1)
    failed = await failure(producer, record("orders"), record("ill"))
    assert (set(failed.stuck), failed.refusals) == ({"ill"}, {})
    assert failed.verdict is Verdict.ABORTED


async def test_a_topic_without_a_leader_is_named_stuck_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METADATA_PATIENCE_S", 0.03)
    producer, kafka = transactional(60_000)
    kafka.leaderless = {"hangs"}
    async with asyncio.timeout(3.0):
        failed = await failure(producer, record("orders"), record("hangs"))
    assert set(failed.stuck) == {"hangs"}


async def test_a_connection_that_breaks_blames_no_topic() -> None:
    producer, kafka = transactional()
    kafka.produced = lambda topic, partition: GONE
    failed = await failure(producer, record("orders"))
    assert (failed.verdict, failed.refusals, set(failed.stuck)) == (Verdict.ABORTED, {}, set())


async def test_a_ledger_that_fails_blames_no_topic() -> None:
    producer, kafka = transactional()
    kafka.leaderless = {"ns.ledger"}
    failed = await failure(producer, record("orders"))
    assert "orders" not in failed.stuck


# ---------------------------------------------------------------------------------------------------- idempotent


async def test_the_refusal_of_one_partition_is_not_another_ones() -> None:
    """Partition 0 was refused, of partition 1 there is no answer: only the first batch was surely not written."""
    producer, kafka = idempotent()
    kafka.leaders = {("plain.a", 1): 2}
    kafka.produced = lambda topic, partition: TOO_BIG if partition == 0 else GONE
    assert await producer.write([record("plain.a", 0), record("plain.a", 1)]) == [REFUSALS[TOO_BIG], None]
    assert producer._life is None, "a life with a gap in its sequence numbers goes on"
    assert kafka.closed


@pytest.mark.parametrize("met", [Place(-1, -1), DuplicateSequenceNumber.errno, OutOfOrderSequenceNumber.errno])
async def test_without_a_place_it_is_in_doubt(met: Met) -> None:
    producer, kafka = idempotent()
    kafka.produced = lambda topic, partition: met
    assert await producer.write([record("plain.a")]) == [None]
    assert producer._life is None


async def test_what_hangs_leaves_the_others_their_places() -> None:
    producer, kafka = idempotent(150)
    kafka.leaders = {("hangs", 0): 2}
    kafka.produced = lambda topic, partition: None if topic == "hangs" else Place(1, -1)
    assert await producer.write([record("a"), record("hangs"), record("a")]) == [Place(1, 5), None, Place(2, 5)]


async def test_what_has_no_leader_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METADATA_PATIENCE_S", 0.03)
    producer, kafka = idempotent()
    kafka.leaderless, kafka.unknown = {"ill"}, {"gone"}
    refused = REFUSALS[UnknownTopicOrPartitionError.errno]
    assert await producer.write([record("ill"), record("a"), record("gone")]) == [None, Place(4, 5), refused]


async def test_writes_at_the_same_time_keep_their_sequence() -> None:
    producer, kafka = idempotent()
    await asyncio.gather(*(producer.write([record("a"), record("a")]) for _ in range(5)))
    assert [sequence for _, sequence, _ in kafka.batches("a")] == [0, 2, 4, 6, 8]


async def test_places_are_in_the_order_of_the_records() -> None:
    producer, kafka = idempotent()
    kafka.produced = lambda topic, partition: Place(10 * partition, -1)
    records = [record("plain.a", 1), record("plain.a", 2), record("plain.a", 1)]
    assert await producer.write(records) == [Place(10, 5), Place(20, 5), Place(11, 5)]
    assert producer._life is not None


# --------------------------------------------------------------------------------------------------- compression


@pytest.mark.parametrize("codec", list(CODECS))
async def test_a_batch_is_marked_with_its_codec(codec: str) -> None:
    compressing = Cluster(
        "127.0.0.1:1", client_id="test", request_timeout_ms=600, telemetry=Telemetry(), compression=codec
    )
    life = Life(compressing, "ns.slot.0", "ns.slot.0", 600)
    fake_inside(life)
    (batch,) = life.batches([record("a", 0, b"again and again " * 50)] * 3, {("a", 0): 1})
    made = DefaultRecordBatch(bytes(batch.payload))
    assert made.compression_type == CODECS[codec]
    assert [each.value for each in made] == [b"again and again " * 50] * 3
    assert (len(batch.payload) < 1_000) is (codec != "none")
