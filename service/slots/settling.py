"""Settles what hangs in a slot's partitions: by the evidence in them, after the fence and before the begin record.

The marker of the begin record would end what hangs in the ledger, and the first transaction of the new term what hangs
elsewhere, both by a verdict of their own (see service/kafka/hanging.py).
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
from service.kafka.hanging import Marker, OpenTransactionAt, Partition, Transaction, Verdict, markers_to_read, verdicts
from service.kafka.inspection import Entry, fetch
from service.kafka.producer import TransactionalProducer
from service.kafka.reader import ends, offsets_since
from service.slots.ledger_rows import partitions_of

log = structlog.get_logger(__name__)

# Offsets before `applied` that are read too: after the last record with events come begin records and markers, two
# offsets for each recovery that failed.
LOOK_BACK: Final = 32
# How far the broker's clock (LogAppendTime) and Redis's (accepted_at) may be apart; further back is read only in vain.
CLOCKS_APART_MS: Final = 3_600_000
RETRY_PAUSE_S: Final = 0.02
# A partition that no longer has the offset, is gone, or may not be read: no marker of it will be seen.
UNREADABLE: Final = (
    errors.OffsetOutOfRangeError,
    errors.TopicAuthorizationFailedError,
    errors.UnknownTopicOrPartitionError,
)


@dataclass
class LedgerTail:
    """What a producer id has in its slot's ledger partition from an offset on."""

    start: int
    transactions: list[Transaction] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)  # epochs whose begin record is there
    markers: list[tuple[int, Marker]] = field(default_factory=list)

    def add(self, ledger: Partition, entry: Entry) -> None:
        if entry.marker is not None:
            self.markers.append((entry.offset, entry.marker))
            return
        partitions = partitions_of(entry.value)
        if partitions is None:
            self.begun.add(entry.epoch)
        self.transactions.append(Transaction({**(partitions or {}), ledger: entry.offset}))

    def marker_after(self, offset: int) -> Marker | None:
        return next((marker for at, marker in self.markers if at > offset), None)

    def names(self, partition: Partition, offset: int) -> bool:
        """Whether a ledger record says of its transaction that it begins there."""
        return any(transaction.offsets.get(partition) == offset for transaction in self.transactions)


class Settlement:
    """Settles one slot's partitions, on the connections of its fenced-in producer, which has written nothing yet."""

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
        """Settle what hangs of the ledger's partition, those that it names, those without a marker and `maybe_hanging`.

        Answers the partitions whose leaders did not tell. Raises KafkaAway where what must be read cannot be.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._run(applied, maybe_hanging)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self._cluster.failed("settle", f"{self._ledger}: what hangs cannot be told: {error!r}") from error

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
            await self._settle(open_from, tail, without_marker)
        return unanswered

    async def _settle(
        self, open_from: Mapping[Partition, int], tail: LedgerTail, without_marker: Collection[Partition]
    ) -> None:
        start = min(tail.start, open_from.get(self._ledger, tail.start))
        if start < tail.start:
            tail = await self._read(start)
        unproven: list[Partition] = []
        for partition, offset in open_from.items():
            # Of the last transaction, and of what the ledger itself holds open, the tail has any record that there is.
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
        """The ledger's partition to its end, as it is after the fence; other producers' records do not count."""
        producer_id = self._producer.producer_id
        tail = LedgerTail(start)
        offset, end = start, start + 1
        while offset < end:
            try:
                entries, offset, end = await self._fetch(self._ledger, offset)
            except errors.OffsetOutOfRangeError:  # retention has passed it, or the topic was made anew and is shorter
                if (offset := await self._offset_since(0)) < 0:
                    break
                tail.start, end = offset, offset + 1
                continue
            for entry in entries:
                if entry.producer_id == producer_id:
                    tail.add(self._ledger, entry)
        return tail

    async def _offset_since(self, since_ms: int) -> int:
        """The offset of the ledger's first record of a time or later; -1 where there is none."""
        topic, number = self._ledger
        found = (await offsets_since(self._cluster, topic, [number], since_ms))[number]
        return -1 if found is None else found

    async def _read_back(self, partition: Partition, offset: int, tail: LedgerTail) -> LedgerTail | None:
        """More of the ledger, until it tells of the transaction that is open from an offset on, or of its term's begin.

        From when its record was accepted, and, where that is in vain, all of it. None where nothing tells.
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
        """The epoch of the record at an offset, and when it was accepted (ms); None where it does not tell."""
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

    async def _markers(self, places: Iterable[OpenTransactionAt], tail: LedgerTail) -> dict[OpenTransactionAt, Marker]:
        found = {place: await self._marker(place, tail) for place in places}
        return {place: marker for place, marker in found.items() if marker is not None}

    async def _marker(self, place: OpenTransactionAt, tail: LedgerTail) -> Marker | None:
        """The marker that has ended the transaction of this record; None where there is none to be read any more."""
        if place.partition == self._ledger:
            return tail.marker_after(place.offset)
        offset, end = place.offset, place.offset + 1
        while offset < end:
            try:
                entries, offset, end = await self._fetch(place.partition, offset)
            except UNREADABLE:
                return None
            for entry in entries:
                if entry.marker is not None and entry.producer_id == self._producer.producer_id:
                    return entry.marker
        return None

    async def _fetch(self, partition: Partition, offset: int) -> tuple[list[Entry], int, int]:
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
