"""Tests every transactional producer, on Kafka and on the fake in memory, and a slot that uses it."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest
from aiokafka.errors import InvalidProducerEpoch

from deploy.stack import Kafka
from service.claims.keys import StoreGeneration
from service.claims.states import Delivered, IllegalMove, SlotEvent, SlotState
from service.contract.wire.ledger import Begin, LedgerRecord, decode_ledger
from service.core.metrics import Telemetry
from service.core.problems import StoreAway
from service.kafka.admin import TRANSACTIONS_1, TRANSACTIONS_AUTO, KafkaAdmin
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.inspection import fetch
from service.kafka.outcomes import PRODUCER_FENCED, TransactionFailed, TransactionOutcome
from service.kafka.producer import TransactionalProducer
from service.kafka.protocol import EndTxnAndBumpRequest, ProduceAndAddRequest, ProduceRequest
from service.kafka.records import Record, RecordMetadata, builder_of
from service.slots.slot import LedgerPosition, Slot
from tests import kafka_versions
from tests.contract.memory_keys import Clock, MemoryKeys, Server
from tests.contract.memory_log import Broker, MemoryProducer
from tests.integration.judge import read_committed

LEDGER_PARTITIONS = 2
# Kafka writes the markers of a transaction some milliseconds after its commit; until then no other can begin.
MARKERS_S = 0.5
NOW_MS = time.time_ns() // 1_000_000


@dataclass
class TopicsUnderTest:
    """The topics: one with two partitions, one that accepts only small records, and a ledger."""

    topic: str
    narrow: str
    ledger: str
    new_producer: Callable[[str], Awaitable[TransactionalProducer]]
    read: Callable[[str], Awaitable[list[tuple[int, int, bytes | None]]]]  # rows of (partition, offset, value)

    def record(self, value: bytes, partition: int = 0, topic: str = "") -> Record:
        return Record(topic or self.topic, partition, None, value, [], NOW_MS)


# Kafka 4.0 and newer have transactions of version 2 (KIP-890) finalized; "kafka" does not use them. Older ones have
# "kafka, version 2" use version 1.
IN_VERSION_2 = pytest.mark.parametrize(
    "under_test",
    [
        pytest.param(
            "kafka, version 2",
            marks=pytest.mark.skipif(
                not kafka_versions.have_version_2(), reason="Kafka has transactions of version 2 since 4.0"
            ),
        )
    ],
    indirect=True,
)


@pytest.fixture(params=["memory", "kafka", "kafka, version 2"])
async def under_test(request: pytest.FixtureRequest) -> AsyncIterator[TopicsUnderTest]:
    unique = uuid.uuid4().hex[:8]
    topic, narrow, ledger = f"data-{unique}", f"narrow-{unique}", f"ledger-{unique}"
    made: list[TransactionalProducer] = []
    if request.param == "memory":
        broker = Broker()
        for name, partitions, bytes_max in ((topic, 2, 10**6), (narrow, 1, 500), (ledger, LEDGER_PARTITIONS, 10**6)):
            broker.create(name, partitions, bytes_max)

        async def new_fake(transactional_id: str) -> TransactionalProducer:
            producer = MemoryProducer(broker, transactional_id)
            await producer.start()
            return producer

        async def look(name: str) -> list[tuple[int, int, bytes | None]]:
            logs = enumerate(broker.topics[name])
            return [(partition, offset, value) for partition, log in logs for offset, value in log.committed()]

        yield TopicsUnderTest(topic, narrow, ledger, new_fake, look)
        return

    kafka: Kafka = request.getfixturevalue("kafka")
    kafka.create_topic(topic, partitions=2)
    kafka.create_topic(narrow, config={"max.message.bytes": "500"})
    kafka.create_topic(ledger, partitions=LEDGER_PARTITIONS)
    cluster = KafkaAdmin(
        kafka.bootstrap,
        client_id="contract",
        request_timeout_ms=5_000,
        telemetry=Telemetry(),
        transactions=TRANSACTIONS_1 if request.param == "kafka" else TRANSACTIONS_AUTO,
    )

    async def new_producer(transactional_id: str) -> TransactionalProducer:
        producer = TransactionalProducer(cluster, f"{transactional_id}-{unique}", 5_000)
        await producer.start()
        made.append(producer)
        return producer

    async def read(name: str) -> list[tuple[int, int, bytes | None]]:
        found = await asyncio.to_thread(read_committed, kafka.bootstrap, [name])
        return sorted((*record.place[1:], record.value) for record in found)

    yield TopicsUnderTest(topic, narrow, ledger, new_producer, read)
    for producer in made:
        await producer.close()
    await cluster.close()


async def write(
    producer: TransactionalProducer, records: Sequence[Record], ledger: tuple[str, int], line: bytes = b"a line"
) -> tuple[list[RecordMetadata], int]:
    """Write records in a transaction of their own; returns their coordinates and the ledger record's offset."""
    places = await producer.send(records, ledger)
    return places, await producer.commit(line)


async def write_in(slot: Slot, record: Record) -> LedgerPosition:
    await slot.send([record])
    return await slot.commit([], {})


async def writing(under_test: TopicsUnderTest) -> TransactionalProducer:
    """Make a producer that has written to both partitions, and so knows their leaders."""
    producer = await under_test.new_producer("slot")
    await write(producer, [under_test.record(b"0", 0), under_test.record(b"1", 1)], (under_test.ledger, 0))
    return producer


async def test_a_transaction_returns_the_offsets_of_its_records(under_test: TopicsUnderTest) -> None:
    producer = await under_test.new_producer("slot")
    records = [
        under_test.record(b"a", 1),
        under_test.record(b"b", 0),
        under_test.record(b"c", 1),
        under_test.record(b"d", 0),
    ]
    places, offset = await write(producer, records, (under_test.ledger, 1), b"noted")
    assert places == [
        RecordMetadata(0, NOW_MS),
        RecordMetadata(0, NOW_MS),
        RecordMetadata(1, NOW_MS),
        RecordMetadata(1, NOW_MS),
    ]
    assert await under_test.read(under_test.topic) == [(0, 0, b"b"), (0, 1, b"d"), (1, 0, b"a"), (1, 1, b"c")]
    assert await under_test.read(under_test.ledger) == [(1, offset, b"noted")]


async def test_offsets_grow_by_more_than_the_records(under_test: TopicsUnderTest) -> None:
    """Each transaction leaves a marker, so offsets are not counts."""
    producer = await under_test.new_producer("slot")
    (first,), one = await write(producer, [under_test.record(b"a")], (under_test.ledger, 0))
    (second,), two = await write(producer, [under_test.record(b"b")], (under_test.ledger, 0))
    assert (first.offset, second.offset) == (0, 2)
    assert (one, two) == (0, 2)


async def test_a_begin_record_is_a_transaction_without_events(under_test: TopicsUnderTest) -> None:
    producer = await under_test.new_producer("slot")
    places, offset = await write(producer, [], (under_test.ledger, 0))
    assert (places, offset) == ([], 0)
    assert await under_test.read(under_test.ledger) == [(0, 0, b"a line")]


async def test_a_transaction_may_be_opened_before_its_records_are_known(under_test: TopicsUnderTest) -> None:
    """A partition without a record gets a marker too, and a partition that was not opened is added."""
    producer = await writing(under_test)
    await asyncio.sleep(MARKERS_S)
    producer.begin_early([(under_test.topic, 0), (under_test.topic, 1), (under_test.ledger, 0)])
    places, offset = await write(producer, [under_test.record(b"a", 0)], (under_test.ledger, 0))
    assert (places, offset) == ([RecordMetadata(2, NOW_MS)], 2)
    await asyncio.sleep(MARKERS_S)
    producer.begin_early([(under_test.topic, 0), (under_test.ledger, 0)])
    places, offset = await write(producer, [under_test.record(b"b", 1)], (under_test.ledger, 0))
    assert (places, offset) == ([RecordMetadata(3, NOW_MS)], 4)
    assert await under_test.read(under_test.topic) == [(0, 0, b"0"), (0, 2, b"a"), (1, 0, b"1"), (1, 3, b"b")]


async def test_an_opened_transaction_that_is_abandoned_is_ended(under_test: TopicsUnderTest) -> None:
    producer = await writing(under_test)
    await producer.abandon()  # does nothing without an open transaction
    await asyncio.sleep(MARKERS_S)
    producer.begin_early([(under_test.topic, 0), (under_test.ledger, 0)])
    await producer.abandon()
    places, offset = await write(producer, [under_test.record(b"a", 0)], (under_test.ledger, 0))
    assert (places, offset) == ([RecordMetadata(3, NOW_MS)], 3), "the markers of the one that was ended come before"


async def test_one_transaction_may_be_opened_right_behind_another(under_test: TopicsUnderTest) -> None:
    """Whether or not the markers of the first transaction are written."""
    producer = await writing(under_test)
    written = []
    for n in range(12):
        producer.begin_early([(under_test.topic, 0), (under_test.ledger, 0)])
        if n % 3:
            await write(producer, [under_test.record(b"%d" % (10 + n))], (under_test.ledger, 0))
            written.append(b"%d" % (10 + n))
        else:
            await producer.abandon()
    assert [value for *_, value in await under_test.read(under_test.topic)] == [b"0", *written, b"1"]


async def test_a_missing_topic_fails_only_the_records_for_it(under_test: TopicsUnderTest) -> None:
    """The events of other topics are written."""
    producer = await writing(under_test)
    producer.begin_early([(under_test.topic, 0), ("not-there-" + under_test.topic, 0), (under_test.ledger, 0)])
    await write(producer, [under_test.record(b"a")], (under_test.ledger, 0))
    assert [value for *_, value in await under_test.read(under_test.topic)] == [b"0", b"a", b"1"]


async def test_an_open_of_a_fenced_producer_fails_as_fenced(under_test: TopicsUnderTest) -> None:
    old = await writing(under_test)
    await under_test.new_producer("slot")
    old.begin_early([(under_test.topic, 0), (under_test.ledger, 0)])
    with pytest.raises(TransactionFailed) as caught:
        await old.abandon()
    assert caught.value.outcome is TransactionOutcome.FENCED


async def test_a_producer_may_close_while_a_transaction_is_being_opened(under_test: TopicsUnderTest) -> None:
    old = await writing(under_test)
    old.begin_early([(under_test.topic, 0), (under_test.ledger, 0)])
    await old.close()
    new = await under_test.new_producer("slot")
    await write(new, [under_test.record(b"a")], (under_test.ledger, 0))
    assert [value for *_, value in await under_test.read(under_test.topic)] == [b"0", b"a", b"1"]


async def test_the_next_producer_fences_the_last(under_test: TopicsUnderTest) -> None:
    old = await under_test.new_producer("slot")
    await write(old, [under_test.record(b"a")], (under_test.ledger, 0))
    new = await under_test.new_producer("slot")
    assert new.producer_id == old.producer_id
    assert new.epoch == old.epoch + 1
    with pytest.raises(TransactionFailed) as caught:
        await write(old, [under_test.record(b"zombie")], (under_test.ledger, 0))
    assert not caught.value.record_errors
    await write(new, [under_test.record(b"b")], (under_test.ledger, 0))
    assert [value for *_, value in await under_test.read(under_test.topic)] == [b"a", b"b"]


@IN_VERSION_2
async def test_each_transaction_has_an_epoch_of_its_own_where_version_2_is_used(under_test: TopicsUnderTest) -> None:
    """A record batch has the epoch under which it was written, as its stamp has, and a late EndTxn meets no other."""
    producer = await under_test.new_producer("slot")
    session, epochs, partitions = producer._session, [], [(under_test.topic, 0), (under_test.ledger, 0)]
    for n in range(3):
        epochs.append(producer.epoch)
        if n:  # the leaders are known: one request adds the partitions, and no Produce does
            producer.begin_early(partitions)
            assert producer._early_begin is not None
        await write(producer, [under_test.record(b"%d" % n)], (under_test.ledger, 0))
        await session.await_markers()
    assert [epoch - epochs[0] for epoch in epochs] == [0, 1, 2]
    entries, _, _ = await fetch(producer.hanging.client, (under_test.topic, 0), 0)
    assert [(entry.epoch, entry.marker is None) for entry in entries] == [
        (epoch + (not is_record), is_record) for epoch in epochs for is_record in (True, False)
    ], "each marker has the next transaction's epoch"
    late = EndTxnAndBumpRequest(session.transactional_id, session.producer_id, epochs[-1], True)
    builder = builder_of(0, True, session.producer_id, epochs[-1], 1, 10_000)
    builder.append(NOW_MS, None, b"late", [])
    late_batch = session.transactional_id, -1, 1_000, [(under_test.topic, [(0, builder.build())])]

    async def late_requests_are_refused() -> None:
        assert (await session.request(session.coordinator, late)).error_code == PRODUCER_FENCED
        for kind in (ProduceRequest, ProduceAndAddRequest):
            ((_, ((_, code, *_),)),) = (await session.request(session.coordinator, kind(*late_batch))).topics
            assert code == InvalidProducerEpoch.errno

    producer.begin_early(partitions)
    await late_requests_are_refused()
    await producer.send([under_test.record(b"open")], (under_test.ledger, 0))
    await late_requests_are_refused()
    await producer.commit(b"its own")
    assert [value for *_, value in await under_test.read(under_test.topic)] == [b"0", b"1", b"2", b"open"]


@IN_VERSION_2
async def test_an_abort_without_a_partition_raises_the_epoch(under_test: TopicsUnderTest) -> None:
    """As after refused offsets: a late request of the aborted transaction cannot join the next one."""
    producer = await under_test.new_producer("slot")
    before = producer.epoch
    await producer._session.abort_transaction()
    assert producer.epoch == before + 1
    await write(producer, [under_test.record(b"a")], (under_test.ledger, 0))
    await producer._session.abort_transaction()
    assert producer.epoch == before + 3
    await write(producer, [under_test.record(b"b")], (under_test.ledger, 0))
    assert [value for *_, value in await under_test.read(under_test.topic)] == [b"a", b"b"]


async def test_a_producer_does_not_fence_other_transactional_ids(under_test: TopicsUnderTest) -> None:
    one, other = await under_test.new_producer("slot.0"), await under_test.new_producer("slot.1")
    for producer, value in ((one, b"1"), (other, b"2"), (one, b"3")):
        await write(producer, [under_test.record(value)], (under_test.ledger, 0))
    assert [value for *_, value in await under_test.read(under_test.topic)] == [b"1", b"2", b"3"]


async def test_records_that_were_sent_and_not_committed_are_never_visible(under_test: TopicsUnderTest) -> None:
    old = await under_test.new_producer("slot")

    await old.send([under_test.record(b"lost")], (under_test.ledger, 0))
    await old.close()
    new = await under_test.new_producer("slot")
    await write(new, [under_test.record(b"kept")], (under_test.ledger, 0))
    assert [value for *_, value in await under_test.read(under_test.topic)] == [b"kept"]


async def test_a_refusal_names_the_topic_and_nothing_of_the_group_is_seen(under_test: TopicsUnderTest) -> None:
    producer = await under_test.new_producer("slot")
    poison = under_test.record(b"x" * 2000, topic=under_test.narrow)
    with pytest.raises(TransactionFailed) as caught:
        await write(producer, [under_test.record(b"innocent"), poison], (under_test.ledger, 0))
    assert caught.value.outcome is TransactionOutcome.ABORTED
    assert {topic: error.kind.code for topic, error in caught.value.record_errors.items()} == {
        under_test.narrow: "too-large"
    }
    await producer.close()
    await under_test.new_producer("slot")
    assert await under_test.read(under_test.topic) == []


async def test_a_topic_that_is_not_there_is_named(under_test: TopicsUnderTest) -> None:
    producer = await under_test.new_producer("slot")
    gone = under_test.record(b"x", topic="not-there-" + under_test.topic)
    with pytest.raises(TransactionFailed) as caught:
        await write(producer, [gone], (under_test.ledger, 0))
    assert {error.kind.code for error in caught.value.record_errors.values()} == {"unknown-topic"}


async def test_a_closed_producer_writes_no_more(under_test: TopicsUnderTest) -> None:
    producer = await under_test.new_producer("slot")
    await producer.close()
    await producer.close()
    with pytest.raises(TransactionFailed):
        await write(producer, [under_test.record(b"late")], (under_test.ledger, 0))
    await under_test.new_producer("slot")
    assert await under_test.read(under_test.topic) == []


# ------------------------------------------------------------------------------------------------------------- slot


class Plain(IdempotentProducer):
    """A producer that the tests do not use."""

    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


class Forgetful(MemoryKeys):
    """A key store that refuses this many marks."""

    refuse = 0

    async def mark(self, *args: object) -> int:
        if self.refuse:
            self.refuse -= 1
            raise StoreAway("a test")
        return await super().mark(*args)  # type: ignore[arg-type]


@pytest.fixture
async def keys() -> Forgetful:
    server = Server("run/replid", Clock(NOW_MS), StoreGeneration(5, "run/replid"))
    return Forgetful(server, retention_ms=10**7, least_left_ms=10, lease_ttl_ms=1000)


async def ready(under_test: TopicsUnderTest, keys: Forgetful, epochs: list[int] | None = None) -> Slot:
    """Make slot 1, recovered to READY; `epochs` gets the one under which its begin record is written."""
    slot = Slot(1, keys, under_test.ledger, "me", Plain())
    slot.move(SlotEvent.LEASE)
    slot.enter(StoreGeneration(5, "run/replid"), await under_test.new_producer("slot.1"))
    if epochs is not None:
        epochs.append(slot.producer.epoch)
    await slot.begin_term(NOW_MS)
    slot.move(SlotEvent.CHECK)
    await keys.replay(slot.generation, [], (1, slot.term))
    slot.move(SlotEvent.FREE)
    return slot


def row(name: bytes, offset: int) -> tuple[bytes, Delivered]:
    return name * 16, Delivered(NOW_MS, b"f" * 8, "data", 0, offset, NOW_MS)


async def test_a_slot_s_term_is_the_offset_of_its_begin_record(under_test: TopicsUnderTest, keys: Forgetful) -> None:
    epochs: list[int] = []
    slot = await ready(under_test, keys, epochs)
    ((partition, offset, value),) = await under_test.read(under_test.ledger)
    assert (partition, offset) == (1, slot.term)
    begin = decode_ledger(value)
    assert begin == Begin(1, slot.producer.producer_id, epochs[0], "me", 5, NOW_MS)
    first = slot.term
    slot.move(SlotEvent.FAIL)
    await slot.close_producers()
    slot.move(SlotEvent.RECOVER)
    slot.enter(StoreGeneration(5, "run/replid"), await under_test.new_producer("slot.1"))
    assert await slot.begin_term(NOW_MS) > first


async def test_a_write_links_its_record_to_the_one_before(under_test: TopicsUnderTest, keys: Forgetful) -> None:
    slot = await ready(under_test, keys)
    first = await write_in(slot, under_test.record(b"a"))
    epoch = slot.producer.epoch
    second = await write_in(slot, under_test.record(b"b"))
    assert (first.term, first.previous) == (slot.term, slot.term)
    assert second.previous == first.offset
    assert slot.state is SlotState.READY
    *_, (_, offset, value) = await under_test.read(under_test.ledger)
    assert offset == second.offset
    assert decode_ledger(value) == LedgerRecord(1, slot.producer.producer_id, epoch, "me", [])
    await slot.mark(first, [row(b"a", 0)])
    await slot.mark(second, [row(b"b", 2)])
    assert await keys.applied(slot.generation, 1) == second.offset


async def test_a_mark_that_failed_is_owed_and_paid_in_order(under_test: TopicsUnderTest, keys: Forgetful) -> None:
    slot = await ready(under_test, keys)
    first = await write_in(slot, under_test.record(b"a"))
    second = await write_in(slot, under_test.record(b"b"))
    keys.refuse = 2
    with pytest.raises(StoreAway):
        await slot.mark(first, [row(b"a", 0)])
    assert slot.has_pending_marks
    with pytest.raises(StoreAway):
        await slot.mark(second, [row(b"b", 2)])
    assert await keys.applied(slot.generation, 1) == slot.term
    await slot.flush_marks()
    assert not slot.has_pending_marks
    assert await keys.applied(slot.generation, 1) == second.offset
    assert await keys.find_all(slot.generation, [b"a" * 16, b"b" * 16]) == [row(b"a", 0)[1], row(b"b", 2)[1]]


async def test_after_a_failure_a_slot_writes_only_with_a_new_producer(
    under_test: TopicsUnderTest, keys: Forgetful
) -> None:
    slot = await ready(under_test, keys)
    thief = await under_test.new_producer("slot.1")
    with pytest.raises(TransactionFailed):
        await write_in(slot, under_test.record(b"a"))
    assert slot.state is SlotState.DOUBT
    with pytest.raises(IllegalMove):
        await write_in(slot, under_test.record(b"a"))
    await slot.close_producers()
    assert isinstance(slot.idempotent, Plain)
    assert slot.idempotent.closed == 1, "what it has on its way would go on past the term"
    with pytest.raises(AssertionError, match="no producer"):
        _ = slot.producer
    await write(thief, [under_test.record(b"b")], (under_test.ledger, 1))
    assert [value for *_, value in await under_test.read(under_test.topic)] == [b"b"]
