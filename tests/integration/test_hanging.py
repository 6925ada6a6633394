"""Tests transactions without markers: slot recovery ends them as the evidence says, before any other marker does."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from aiokafka.errors import ConcurrentTransactions
from aiokafka.protocol.transaction import InitProducerIdRequest
from confluent_kafka import OFFSET_INVALID, ConsumerGroupTopicPartitions, TopicPartition

from deploy.stack import Kafka
from service.contract.wire.ledger import Begin
from service.core.metrics import Telemetry
from service.kafka.admin import KafkaAdmin
from service.kafka.group_offsets import GroupOffsets, Position
from service.kafka.metadata import Partition
from service.kafka.nodes import coordinator
from service.kafka.outcomes import TransactionFailed, TransactionOutcome
from service.kafka.producer import TransactionalProducer
from service.kafka.records import Record
from service.slots.hanging_recovery import HangingRecovery
from tests import kafka_versions
from tests.integration.hanging import WAIT_S, HangingProducer, unverified
from tests.integration.judge import read_committed, wait_until_stable

NOW_MS = time.time_ns() // 1_000_000


@dataclass
class SlotUnderTest:
    """A slot's ledger partition, two data partitions, and clients of the broker."""

    kafka: Kafka
    cluster: KafkaAdmin
    name: str
    a: Partition
    b: Partition
    ledger: Partition
    telemetry: Telemetry

    def ended(self) -> dict[str, float]:
        """Read how many hanging transactions were ended, by verdict."""
        (family,) = self.telemetry.recovery.hanging_ended.collect()
        return {each.labels["verdict"]: each.value for each in family.samples}

    def hanging_producer(self) -> HangingProducer:
        return HangingProducer(self.cluster, self.name, self.ledger)

    async def recovered(
        self, applied: int | None = None, *, maybe_hanging: tuple[Partition, ...] = ()
    ) -> TransactionalProducer:
        """Run the steps of slot recovery: fence, settle, begin record."""
        producer = await self.fenced()
        ended = self.telemetry.recovery.hanging_ended
        recovery = HangingRecovery(self.cluster, self.ledger, producer.hanging, WAIT_S, ended)
        assert await recovery.run(applied, maybe_hanging) == set()
        await self.begin(producer)
        return producer

    async def fenced(self) -> TransactionalProducer:
        producer = TransactionalProducer(self.cluster, self.name, 5_000)
        await producer.start()
        return producer

    async def begin(self, producer: TransactionalProducer) -> None:
        begin = Begin(self.ledger[1], producer.producer_id, producer.epoch, "test", 1, NOW_MS)
        await producer.send([], self.ledger)
        await producer.commit(begin.encode())

    async def visible(self) -> set[bytes]:
        """Read the ids of the events that a read_committed consumer gets; the ledger must have the same."""
        topics = [self.a[0], self.b[0], self.ledger[0]]
        await asyncio.to_thread(wait_until_stable, self.kafka.bootstrap, topics, 3.0)
        found = await asyncio.to_thread(read_committed, self.kafka.bootstrap, topics)
        ids = {record.value for record in found if record.place[0] != self.ledger[0]}
        ledger = b"".join(record.value or b"" for record in found if record.place[0] == self.ledger[0])
        assert {id for id in ALL if id.hex().encode() in ledger} == ids, "ledger and data differ"
        return {id for id in ids if id is not None}


ALL = [bytes([n]) * 16 for n in range(1, 5)]
ONE, TWO, *_ = ALL


@pytest.fixture
async def under_test(kafka: Kafka) -> AsyncIterator[SlotUnderTest]:
    unique = uuid.uuid4().hex[:8]
    a, b, ledger = (f"a-{unique}", 1), (f"b-{unique}", 0), (f"ledger-{unique}", 2)
    for topic, number in (a, b, ledger):
        kafka.create_topic(topic, partitions=number + 1)
    telemetry = Telemetry()
    cluster = KafkaAdmin(
        kafka.bootstrap,
        client_id="hanging",
        request_timeout_ms=5_000,
        telemetry=telemetry,
        transactions=kafka_versions.transactions(),
    )
    yield SlotUnderTest(kafka, cluster, f"slot-{unique}", a, b, ledger, telemetry)
    await cluster.close()


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("marked", [("ledger",), ("b",), ("a", "b"), ("b", "ledger")])
async def test_a_hanging_transaction_ends_as_in_the_partitions_that_have_its_marker(
    under_test: SlotUnderTest, marked: tuple[str, ...], commit: bool
) -> None:
    with unverified(under_test.kafka):
        await under_test.hanging_producer().write(
            [(under_test.a, ONE), (under_test.b, TWO)],
            marked=[getattr(under_test, each) for each in marked],
            commit=commit,
        )
    await (await under_test.recovered()).close()
    assert await under_test.visible() == ({ONE, TWO} if commit else set())
    assert under_test.ended() == {"commit" if commit else "abort": 3 - len(marked)}


@pytest.mark.parametrize("with_record", [True, False])
async def test_a_transaction_without_markers_is_committed_if_it_has_a_ledger_record(
    under_test: SlotUnderTest, with_record: bool
) -> None:
    with unverified(under_test.kafka):
        await under_test.hanging_producer().write(
            [(under_test.a, ONE), (under_test.b, TWO)], marked=[], commit=None, with_record=with_record
        )
    maybe_hanging = (
        () if with_record else (under_test.a, under_test.b)
    )  # as the coordinator, or the next write, names them
    await (await under_test.recovered(maybe_hanging=maybe_hanging)).close()
    assert await under_test.visible() == ({ONE, TWO} if with_record else set())


async def test_a_term_writes_to_no_partition_with_a_hanging_transaction(under_test: SlotUnderTest) -> None:
    """The recovery did not know the partition, because the transaction had no ledger record yet."""
    with unverified(under_test.kafka):
        await under_test.hanging_producer().write([(under_test.a, ONE)], marked=[], commit=None, with_record=False)
    producer = await under_test.recovered()
    records = [Record(*under_test.a, None, THREE, [], NOW_MS), Record(*under_test.b, None, THREE, [], NOW_MS)]
    with pytest.raises(TransactionFailed) as failed:
        await producer.send(records, under_test.ledger)
    await producer.close()
    assert (failed.value.outcome, set(failed.value.hanging)) == (TransactionOutcome.ABORTED, {under_test.a})
    producer = await under_test.recovered(maybe_hanging=(under_test.a,))
    await producer.send(records[1:], under_test.ledger)
    await producer.commit(THREE.hex().encode())
    await producer.close()
    assert await under_test.visible() == {THREE}


THREE = ALL[2]


@pytest.mark.parametrize("commit", [True, False])
async def test_the_ledger_record_of_a_long_hanging_transaction_is_searched_for(
    under_test: SlotUnderTest, commit: bool
) -> None:
    """The slot has since written to other partitions: the record is far below the first offset that recovery reads."""
    with unverified(under_test.kafka):
        await under_test.hanging_producer().write(
            [(under_test.a, ONE)], marked=[under_test.ledger], commit=commit, accepted_at=NOW_MS
        )
    producer = await under_test.fenced()
    for _ in range(20):
        await under_test.begin(producer)
    await producer.close()
    await (await under_test.recovered(maybe_hanging=(under_test.a,))).close()
    assert await under_test.visible() == ({ONE} if commit else set())


@pytest.mark.parametrize("commit", [True, False])
async def test_the_offsets_of_a_group_that_hang_end_as_their_events(under_test: SlotUnderTest, commit: bool) -> None:
    """Kafka adds the partition with the group's offsets to a transaction by a group's name only."""
    offsets = GroupOffsets(f"group-{under_test.name}", "", -1, (Position(under_test.a[0], 0, 5),))  # of no member
    with unverified(under_test.kafka):
        hangs = await under_test.hanging_producer().write_offsets((under_test.a, ONE), offsets, commit=commit)
    await (await under_test.recovered(maybe_hanging=() if commit else (hangs,))).close()
    assert await under_test.visible() == ({ONE} if commit else set())
    assert under_test.ended() == {"commit" if commit else "abort": 1}
    asked = ConsumerGroupTopicPartitions(offsets.group, [TopicPartition(under_test.a[0], 0)])
    admin = under_test.kafka.admin()
    (future,) = admin.list_consumer_group_offsets([asked], require_stable=True).values()
    (found,) = (await asyncio.wait_for(asyncio.wrap_future(future), WAIT_S)).topic_partitions
    assert (found.error, found.offset) == (None, 5 if commit else OFFSET_INVALID)


@pytest.mark.long
async def test_what_hangs_under_a_producer_id_that_kafka_has_replaced_is_ended(under_test: SlotUnderTest) -> None:
    """Each of 32,766 fences takes an epoch of the id, and the next one gives another id. Shorter: test_lso_watch.py."""
    with unverified(under_test.kafka):
        await under_test.hanging_producer().write([(under_test.a, ONE)], marked=[under_test.ledger], commit=True)
    producer = await under_test.fenced()
    hangs_under, fence = producer.producer_id, InitProducerIdRequest(under_test.name, 5_000)
    node = await coordinator(producer.hanging.client, under_test.name)
    while (response := await producer.hanging.client.send(node, fence)).producer_id in (hangs_under, -1):
        assert response.error_code in (0, ConcurrentTransactions.errno)
    await producer.close()
    await (await under_test.recovered(maybe_hanging=(under_test.a,))).close()
    assert await under_test.visible() == {ONE}
    assert under_test.ended() == {"commit": 1}


async def test_the_coordinator_names_the_partitions_that_are_open_at_the_fence(under_test: SlotUnderTest) -> None:
    with unverified(under_test.kafka):
        await under_test.hanging_producer().write(
            [(under_test.a, ONE)], marked=[under_test.a, under_test.ledger], commit=None
        )
    producer = await under_test.fenced()
    assert producer.hanging.without_marker == {under_test.a, under_test.ledger}
    await producer.close()


async def test_a_recovery_without_a_hanging_transaction_writes_only_its_begin_record(under_test: SlotUnderTest) -> None:
    await under_test.hanging_producer().write(
        [(under_test.a, ONE)], marked=[under_test.a, under_test.ledger], commit=True
    )
    await (await under_test.recovered()).close()
    assert await under_test.visible() == {ONE}
    assert under_test.ended() == {}
    found = await asyncio.to_thread(
        wait_until_stable, under_test.kafka.bootstrap, [under_test.a[0], under_test.ledger[0]], 3.0
    )
    assert found[under_test.a] == 2, "the event and its marker"
    assert found[under_test.ledger] == 6, "two begin records, a ledger record, and their markers"
