"""Makes hanging transactions: some of their partitions never get a marker.

Without the brokers' verification, a record can be written into a partition that the coordinator does not know of. The
coordinator then ends the transaction in the other partitions only, as after it has taken a partition without a leader
for a deleted one (KAFKA-20734).
"""

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterator, Sequence

from aiokafka import errors
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its stubs forget them
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from deploy.stack import Kafka
from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.contract.wire.ids import event_id, fingerprint
from service.contract.wire.ledger import Begin, LedgerRecord
from service.contract.wire.ledger_entries import CommittedOffset, Entry, LedgerOffsets
from service.contract.wire.names import ledger_topic, transactional_id
from service.core.metrics import Telemetry
from service.kafka.admin import KafkaAdmin
from service.kafka.group_offsets import GroupOffsets
from service.kafka.metadata import Partition
from service.kafka.offset_commit import OffsetCommit
from service.kafka.open_check import OpenCheck
from service.kafka.outcomes import OffsetsRefused, TransactionFailed
from service.kafka.producer import TransactionalProducer
from service.kafka.protocol import AddPartitionsToTxnRequest, EndTxnRequest
from service.kafka.records import Record, RecordMetadata, own_record
from service.kafka.session import ProducerSession
from tests import kafka_versions
from tests.integration.client import Asked

VERIFICATION = "transaction.partition.verification.enable"
# A broker's errors for a Produce while its own setting changes: the log lacks the expected verification, or the
# coordinator cannot be asked.
VERIFYING = (errors.InvalidTxnState, errors.NotEnoughReplicasError)
VERIFYING_CODES = tuple(error.errno for error in VERIFYING)
WAIT_S = 15.0


@contextlib.contextmanager
def unverified(kafka: Kafka) -> Iterator[None]:
    """Make the broker accept transactional records for partitions that were not added to their transaction."""
    _verify(kafka, "false")
    try:
        yield
    finally:
        _verify(kafka, "true")


def _verify(kafka: Kafka, value: str) -> None:
    setting = ConfigEntry(VERIFICATION, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.BROKER, str(kafka.node_id), incremental_configs=[setting])
    admin = kafka.admin()
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(WAIT_S)


class HangingProducer:
    """A slot's producer that leaves a transaction behind."""

    def __init__(self, cluster: KafkaAdmin, transactional_id: str, ledger: Partition) -> None:
        self._cluster = cluster
        self._transactional_id = transactional_id
        self._ledger = ledger

    async def write(
        self,
        entries: Sequence[tuple[Partition, bytes]],
        *,
        marked: Collection[Partition],
        commit: bool | None,
        with_record: bool = True,
        accepted_at: int | None = None,
        fp: bytes = b"f" * 8,
    ) -> dict[Partition, int]:
        """Write a transaction with one event in each partition, and markers in those `marked`; returns the offsets.

        `commit` None: it is not ended at all. `accepted_at` None: now, because retention would delete older records.
        """
        accepted_at = time.time_ns() // 1_000_000 if accepted_at is None else accepted_at
        async with asyncio.timeout(WAIT_S):
            session = await self._begun(accepted_at)
        records = []
        for (topic, number), id in entries:
            stamp = Stamp(id, fp, accepted_at, self._ledger[1], session.producer_id, session.epoch, "hanging_producer")
            records.append(Record(topic, number, None, id, [(STAMP_HEADER, stamp.encode())], accepted_at))
        add = AddPartitionsToTxnRequest(
            session.transactional_id, session.producer_id, session.epoch, [(topic, [n]) for topic, n in marked]
        )
        if marked:
            while any(row[1] for _, rows in (await session.request(session.coordinator, add)).errors for row in rows):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the markers of the begin record are not written yet
        places = await self._send(session, records)
        offsets = dict(zip([partition for partition, _ in entries], [place.offset for place in places], strict=True))
        if with_record:
            named = [
                Entry(id, fp, accepted_at, *partition, offsets[partition], accepted_at) for partition, id in entries
            ]
            line = LedgerRecord(self._ledger[1], session.producer_id, session.epoch, "hanging_producer", named).encode()
            (place,) = await self._send(session, [own_record(*self._ledger, None, line)])
            offsets[self._ledger] = place.offset
        if commit is not None:
            end = EndTxnRequest(session.transactional_id, session.producer_id, session.epoch, commit)
            assert (await session.request(session.coordinator, end)).error_code == 0
        await session.close()
        return offsets

    async def write_offsets(self, entry: tuple[Partition, bytes], offsets: GroupOffsets, *, commit: bool) -> Partition:
        """Write an event and a group's offsets; the partition of these gets no marker. Returns that partition.

        Without `commit`, there is no ledger record.
        """
        now_ms = time.time_ns() // 1_000_000
        async with asyncio.timeout(WAIT_S):
            session = await self._begun(now_ms)
            partition, id = entry
            topics = [(topic, [n]) for topic, n in (partition, self._ledger)]
            add = AddPartitionsToTxnRequest(session.transactional_id, session.producer_id, session.epoch, topics)
            while any(row[1] for _, rows in (await session.request(session.coordinator, add)).errors for row in rows):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (place,) = await self._send(session, [Record(*partition, None, id, [], now_ms)])
            of_group = OffsetCommit(session, OpenCheck(session))
            while True:  # the topic of offsets may be new, and the broker does not know its new setting yet
                with contextlib.suppress(OffsetsRefused, *VERIFYING):
                    await of_group.commit(offsets, None)
                    break
                await asyncio.sleep(0.05)
            at = await of_group.partition_of(offsets.group)
            assert at is not None
            open_from, _ = await OpenCheck(session).ask([at], WAIT_S)
        if commit:
            named = Entry(id, b"f" * 8, now_ms, *partition, place.offset, now_ms, id, 0)
            positions = [CommittedOffset(each.topic, each.partition, each.offset) for each in offsets.positions]
            committed = LedgerOffsets(
                id, b"f" * 8, now_ms, offsets.group, offsets.member, offsets.generation, positions, at[1], open_from[at]
            )
            head = self._ledger[1], session.producer_id, session.epoch, "hanging_producer"
            line = LedgerRecord(*head, [named], {}, committed).encode()
            await self._send(session, [own_record(*self._ledger, None, line)])
        end = EndTxnRequest(session.transactional_id, session.producer_id, session.epoch, commit)
        assert (await session.request(session.coordinator, end)).error_code == 0
        await session.close()
        return at

    async def _begun(self, accepted_at: int) -> ProducerSession:
        """Start a producer and write its begin record, again if the broker changes VERIFICATION meanwhile."""
        while True:
            producer = TransactionalProducer(self._cluster, self._transactional_id, 5_000)
            await producer.start()
            begin = Begin(self._ledger[1], producer.producer_id, producer.epoch, "hanging_producer", 1, accepted_at)
            try:
                await producer.send([], self._ledger)
                await producer.commit(begin.encode())
                return producer._session
            except TransactionFailed as failed:
                await producer.close()
                if not isinstance(failed.__cause__, VERIFYING):
                    raise

    async def _send(self, session: ProducerSession, records: Sequence[Record]) -> list[RecordMetadata]:
        leaders = {p: await session.find_leader(p) for p in {(record.topic, record.partition) for record in records}}
        batches = session.batches(records, leaders)
        async with asyncio.timeout(WAIT_S):
            await session.send(batches, leaders, 5_000)
            while any(batch.response and batch.response[0] in VERIFYING_CODES for batch in batches):
                await asyncio.sleep(0.05)  # the broker does not know its new setting yet
                await session.send(batches, leaders, 5_000)
        places = [RecordMetadata(-1, -1)] * len(records)
        for batch in batches:
            result = batch.result(records)
            assert isinstance(result, list), batch.response
            for member, place in zip(batch.members, result, strict=True):
                places[member] = place
        return places


async def leave_hanging(
    kafka: Kafka, namespace: str, slot: int, asked: Asked, *, in_ledger: bool, commit: bool
) -> tuple[str, int, int]:
    """Leave a slot's transaction hanging in the ledger or in the event's partition 0; returns the event's coordinates.

    This fences the holder of the slot.
    """
    data, ledger = (asked.topic, 0), (ledger_topic(namespace), slot)
    cluster = KafkaAdmin(
        kafka.bootstrap,
        client_id="hanging_producer",
        request_timeout_ms=5_000,
        telemetry=Telemetry(),
        transactions=kafka_versions.transactions(),
    )
    try:
        with unverified(kafka):
            offsets = await HangingProducer(cluster, transactional_id(namespace, slot), ledger).write(
                [(data, event_id(asked.key))],
                marked=[data if in_ledger else ledger],
                commit=commit,
                accepted_at=time.time_ns() // 1_000_000,
                fp=fingerprint(asked.topic, None, None, [], asked.value),
            )
    finally:
        await cluster.close()
    return *data, offsets[data]
