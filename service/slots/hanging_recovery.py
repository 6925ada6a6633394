"""Ends a slot's hanging transactions by the evidence in its partitions, after the fence and before the begin record.

Otherwise the begin record's marker would end the one in the ledger, and the first transaction of the new term those in
other partitions, whatever the evidence says (see service/kafka/hanging.py).
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog
from aiokafka import errors
from prometheus_client import Counter

from service.contract.wire import STAMP_HEADER, Stamp, WireError
from service.kafka.admin import KafkaAdmin
from service.kafka.hanging import Marker, RecordCoordinates, Transaction, Verdict, markers_to_read, verdicts
from service.kafka.inspection import LogEntry, fetch
from service.kafka.metadata import Partition
from service.kafka.producer import TransactionalProducer
from service.kafka.reader import ends, offsets_since
from service.slots.ledger_rows import partitions_of

log = structlog.get_logger(__name__)

# Offsets before `applied` to read too: begin records and their markers, two offsets for each failed recovery, may
# follow the last record with entries.
LOOK_BACK: Final = 32
# The most by which the brokers' clocks (LogAppendTime) and Redis's (accepted_at) may differ.
CLOCKS_APART_MS: Final = 3_600_000
RETRY_PAUSE_S: Final = 0.02
# Errors of a partition that no longer has the offset, is gone, or may not be read: its markers cannot be found.
UNREADABLE: Final = (
    errors.OffsetOutOfRangeError,
    errors.TopicAuthorizationFailedError,
    errors.UnknownTopicOrPartitionError,
)


@dataclass
class LedgerTail:
    """The transactions of a producer id in its slot's ledger partition, from an offset on."""

    start: int
    transactions: list[Transaction] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)  # producer epochs with a begin record in the tail
    markers: list[tuple[int, Marker]] = field(default_factory=list)

    def add(self, ledger: Partition, entry: LogEntry) -> None:
        """Add a record or a marker of the ledger's partition."""
        if entry.marker is not None:
            self.markers.append((entry.offset, entry.marker))
            return
        partitions = partitions_of(entry.value)
        if partitions is None:
            self.begun.add(entry.epoch)
        self.transactions.append(Transaction({**(partitions or {}), ledger: entry.offset}))

    def marker_after(self, offset: int) -> Marker | None:
        """Find the first marker after an offset."""
        return next((marker for at, marker in self.markers if at > offset), None)

    def names(self, partition: Partition, offset: int) -> bool:
        """Whether a transaction's first offset in the partition is this one, by its ledger record."""
        return any(transaction.offsets.get(partition) == offset for transaction in self.transactions)


class HangingRecovery:
    """Ends one slot's hanging transactions, by its new producer: it has fenced the others and written nothing yet."""

    def __init__(
        self,
        cluster: KafkaAdmin,
        ledger: Partition,
        producer: TransactionalProducer,
        timeout_s: float,
        ended: Counter,
    ) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._producer = producer
        self._timeout_s = timeout_s
        self._ended = ended

    async def run(self, applied: int | None, maybe_hanging: Collection[Partition]) -> set[Partition]:
        """End hanging transactions in the ledger, in partitions named there, in those without marker, `maybe_hanging`.

        `applied`: the ledger offset up to which records are marked, None if unknown. Returns the partitions whose
        leaders did not answer. Raises KafkaAway where the evidence cannot be read.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._run(applied, maybe_hanging)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            why = f"{self._ledger}: hanging transactions cannot be determined: {error!r}"
            raise self._cluster.failed("settle", why) from error

    async def _run(self, applied: int | None, maybe_hanging: Collection[Partition]) -> set[Partition]:
        if applied is None:
            applied = (await ends(self._cluster, self._ledger[0], [self._ledger[1]]))[self._ledger[1]]
        tail = await self._read(max(0, applied - LOOK_BACK))
        named = {partition for transaction in tail.transactions for partition in transaction.offsets}
        without_marker = self._producer.without_marker
        open_from, unanswered = await self._producer.find_open({self._ledger, *named, *without_marker, *maybe_hanging})
        if self._ledger in unanswered:
            raise errors.LeaderNotAvailableError(f"{self._ledger}")
        if open_from:
            await self._end_open(open_from, tail, without_marker)
        return unanswered

    async def _end_open(
        self, open_from: Mapping[Partition, int], tail: LedgerTail, without_marker: Collection[Partition]
    ) -> None:
        """End the transactions that are open from these offsets on, each by its verdict."""
        start = min(tail.start, open_from.get(self._ledger, tail.start))
        if start < tail.start:
            tail = await self._read(start)
        unproven: list[Partition] = []
        for partition, offset in open_from.items():
            # The tail has the ledger records of the last transaction, and of one that is open in the ledger.
            if partition == self._ledger or partition in without_marker or tail.names(partition, offset):
                continue
            wider = await self._read_back(partition, offset, tail)
            if wider is None:
                unproven.append(partition)
            else:
                tail = wider
        markers = await self._markers(markers_to_read(open_from, tail.transactions), tail)
        found = verdicts(open_from, tail.transactions, markers)
        found |= dict.fromkeys(unproven, Verdict.UNKNOWN)
        for commit in (True, False):
            ended = sorted(each for each, verdict in found.items() if (verdict is not Verdict.ABORT) is commit)
            if ended:
                await self._producer.end_open(ended, commit=commit)
        for (topic, number), verdict in found.items():
            self._ended.labels(verdict.value).inc()
            log.warning(
                "hanging transaction ended",
                topic=topic,
                partition=number,
                first_offset=open_from[topic, number],
                verdict=verdict.value,
                **({"ended_by": "commit"} if verdict is Verdict.UNKNOWN else {}),
            )

    async def _read(self, start: int) -> LedgerTail:
        """Read this producer id's records in the ledger's partition, from an offset to its end after the fence."""
        producer_id = self._producer.producer_id
        tail = LedgerTail(start)
        offset, end = start, start + 1
        while offset < end:
            try:
                entries, offset, end = await self._fetch(self._ledger, offset)
            except errors.OffsetOutOfRangeError:  # deleted by retention, or the topic was created again
                if (offset := await self._offset_since(0)) < 0:
                    break
                tail.start, end = offset, offset + 1
                continue
            for entry in entries:
                if entry.producer_id == producer_id:
                    tail.add(self._ledger, entry)
        return tail

    async def _offset_since(self, since_ms: int) -> int:
        """Find the offset of the ledger's first record of a time (ms) or later; -1 if there is none."""
        topic, number = self._ledger
        found = (await offsets_since(self._cluster, topic, [number], since_ms))[number]
        return -1 if found is None else found

    async def _read_back(self, partition: Partition, offset: int, tail: LedgerTail) -> LedgerTail | None:
        """Read more of the ledger, back to the record of a transaction that is open from `offset` on, or to its term's
        begin record.

        Starts at the time at which the open record was accepted, then at the first offset. None if neither is found.
        """
        first = await self._first_of(partition, offset)
        if first is None:
            return None
        epoch, accepted_at_ms = first
        if epoch in tail.begun:
            return tail
        for since_ms in (max(0, accepted_at_ms - CLOCKS_APART_MS), 0):
            start = await self._offset_since(since_ms)
            wider = await self._read(min(start, tail.start)) if start >= 0 else tail
            if wider.names(partition, offset) or epoch in wider.begun:
                return wider
        return None

    async def _first_of(self, partition: Partition, offset: int) -> tuple[int, int] | None:
        """Read the producer epoch and accepted_at (ms) of the record at an offset; None if it cannot be read."""
        try:
            entries, _, _ = await self._fetch(partition, offset)
        except UNREADABLE:
            return None
        for entry in entries[:1]:
            headers = dict(entry.headers)
            try:
                return entry.epoch, Stamp.decode(headers.get(STAMP_HEADER, b"")).accepted_at
            except WireError:
                return None
        return None

    async def _markers(self, records: Iterable[RecordCoordinates], tail: LedgerTail) -> dict[RecordCoordinates, Marker]:
        found = {record: await self._marker(record, tail) for record in records}
        return {record: marker for record, marker in found.items() if marker is not None}

    async def _marker(self, record: RecordCoordinates, tail: LedgerTail) -> Marker | None:
        """Read the marker that ended the transaction of a record; None if it cannot be read any more."""
        if record.partition == self._ledger:
            return tail.marker_after(record.offset)
        offset, end = record.offset, record.offset + 1
        while offset < end:
            try:
                entries, offset, end = await self._fetch(record.partition, offset)
            except UNREADABLE:
                return None
            for entry in entries:
                if entry.marker is not None and entry.producer_id == self._producer.producer_id:
                    return entry.marker
        return None

    async def _fetch(self, partition: Partition, offset: int) -> tuple[list[LogEntry], int, int]:
        """Fetch entries, the next offset and the partition's end, again after retriable errors. Raises UNREADABLE."""
        client = self._producer.client
        while True:
            try:
                return await fetch(client, partition, offset)
            except UNREADABLE:
                raise
            except (errors.KafkaError, OSError) as error:
                if not getattr(error, "retriable", True):
                    raise
                if partition[0] not in client._topics:
                    client.set_topics({*client._topics, partition[0]})
                await asyncio.sleep(RETRY_PAUSE_S)
                await client.force_metadata_update()
