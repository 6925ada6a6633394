"""Ends a slot's hanging transactions by the evidence in its partitions, after the fence and before the begin record.

Otherwise the begin record's marker would end the one in the ledger, and the first transaction of the new term those in
other partitions, whatever the evidence says (see service/kafka/hanging.py).
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog
from prometheus_client import Counter

from service.contract.wire.versions import NewerVersion, WireError
from service.core.time_slice import TimeSlice
from service.kafka.admin import UNANSWERED, KafkaAdmin
from service.kafka.group_offsets import OFFSETS_TOPIC
from service.kafka.hanging import (
    ActiveProducer,
    Marker,
    RecordCoordinates,
    Transaction,
    Verdict,
    markers_to_read,
    partitions_left_open,
    verdicts,
)
from service.kafka.hanging_transactions import HangingTransactions
from service.kafka.inspection import DELETED, UNREADABLE, LogEntry, fetch, no_leader
from service.kafka.metadata import Partition
from service.kafka.reader import high_watermarks, offsets_since
from service.slots.ledger_rows import lowest_offsets, names_producer

log = structlog.get_logger(__name__)

# Offsets before `applied` that are read as well: begin records and their markers, two offsets for each failed recovery,
# may follow the last record with entries.
LOOK_BACK: Final = 32
# The most by which the brokers' clocks (LogAppendTime) and Redis's (accepted_at) may differ. A ledger record is
# appended after its events were claimed, so its time is at most this much before their accepted_at.
CLOCKS_APART_MS: Final = 3_600_000
RETRY_PAUSE_S: Final = 0.02


@dataclass
class LedgerTail:
    """The transactions of a producer id in its slot's ledger partition, from an offset on."""

    producer_id: int
    start: int
    # By partition, the offset from which on to keep its transactions; without any, all transactions are kept.
    open_from: Mapping[Partition, int] = field(default_factory=dict)
    transactions: list[Transaction] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)  # producer epochs of the begin records in the tail
    markers: list[tuple[int, Marker]] = field(default_factory=list)  # the first after each transaction
    awaits_marker: bool = False
    is_of_slot: bool = False  # a record says that the slot wrote it under this producer id
    others: set[int] = field(default_factory=set)  # other producer ids under which the slot wrote records

    def add(self, ledger: Partition, entry: LogEntry) -> None:
        """Add a record or a marker of the ledger's partition. Raises NewerVersion."""
        if entry.producer_id != self.producer_id:
            if entry.producer_id not in self.others and names_producer(entry.value, entry.producer_id):
                self.others.add(entry.producer_id)
            return
        self.is_of_slot = self.is_of_slot or names_producer(entry.value, entry.producer_id)
        if entry.marker is not None:
            if self.awaits_marker:
                self.markers.append((entry.offset, entry.marker))
                self.awaits_marker = False
            return
        partitions = lowest_offsets(entry.value, ledger[1], entry.offset)
        if partitions is None:
            self.begun.add(entry.epoch)
        transaction = Transaction({**(partitions or {}), ledger: entry.offset})
        if not self.open_from or partitions_left_open(transaction, self.open_from):
            self.transactions.append(transaction)
            self.awaits_marker = True

    def marker_after(self, offset: int) -> Marker | None:
        """Find the first marker after the offset of one of the transactions."""
        return next((marker for at, marker in self.markers if at > offset), None)

    def has_all_since(self, epoch: int) -> bool:
        """Whether every ledger record of a transaction of this producer epoch is in the tail.

        A begin record is committed before the transactions of its term, whose epochs are the same (transactions of
        version 1) or later (version 2). Kafka only raises the epoch of one producer id.
        """
        return any(begun <= epoch for begun in self.begun)

    def names(self, partition: Partition, offset: int) -> bool:
        """Whether a transaction's first offset in the partition is this one, by its ledger record."""
        return any(transaction.offsets.get(partition) == offset for transaction in self.transactions)


class FirstRecord(NamedTuple):
    """The first record of an open transaction: its producer epoch, its accepted_at (ms), and the slot that wrote it.

    A record of a group's offsets has no header of Fencepost: `accepted_at` is the time at which the broker appended the
    record, and `slot` is None. `slot` is None as well where a program has copied the header from another record: the
    header then names another producer id than that of the record.
    """

    epoch: int
    accepted_at: int
    slot: int | None


class Decision(NamedTuple):
    """How the transactions of a producer id have to end; `unread`: partitions whose evidence could not be read."""

    tail: LedgerTail
    verdicts: Mapping[Partition, Verdict]
    unread: Collection[Partition]


class HangingRecovery:
    """Ends one slot's hanging transactions by its new producer, which has fenced the others and written nothing yet.

    Those under its own producer id are ended by a transaction. A former id, which Kafka has replaced at its last epoch,
    gets its markers by WriteTxnMarkers, if the service may Alter the admin.
    """

    def __init__(
        self,
        admin: KafkaAdmin,
        ledger: Partition,
        transactions: HangingTransactions,
        timeout_s: float,
        ended: Counter,
    ) -> None:
        self._admin = admin
        self._ledger = ledger
        self._transactions = transactions
        self._timeout_s = timeout_s
        self._ended = ended

    async def run(self, applied: int | None, maybe_hanging: Collection[Partition]) -> set[Partition]:
        """End hanging transactions in the ledger partition, in others that its records name, and in `maybe_hanging`.

        `applied` is the ledger offset up to which records are marked, or None if it is unknown. Returns the partitions
        whose leaders did not answer. Raises KafkaAway where the evidence cannot be read: `timeout_s` is the time for
        one response, because a long ledger takes more. Raises NewerVersion for evidence of a newer release.
        """
        try:
            return await self._run(applied, maybe_hanging)
        except UNANSWERED as error:
            why = f"{self._ledger}: hanging transactions cannot be determined: {error!r}"
            raise self._admin.failed("end-hanging", why) from error

    async def _run(self, applied: int | None, maybe_hanging: Collection[Partition]) -> set[Partition]:
        replays_all = applied is None
        if applied is None:
            applied = (await high_watermarks(self._admin, self._ledger[0], [self._ledger[1]]))[self._ledger[1]]
        start, producer_id = max(0, applied - LOOK_BACK), self._transactions.producer_id
        tail = await self._read(start, producer_id)
        named = {partition for transaction in tail.transactions for partition in transaction.offsets}
        without_marker = self._transactions.without_marker
        open_from, unanswered = await self._transactions.find_own(
            {self._ledger, *named, *without_marker, *maybe_hanging}
        )
        if self._ledger in unanswered:
            raise no_leader(self._ledger)
        if open_from:
            await self._end_hanging(open_from, tail, without_marker)
        former = {*tail.others, *self._transactions.former_ids}
        if former or maybe_hanging or replays_all:
            await self._end_former(tail, former, {self._ledger, *named, *without_marker, *maybe_hanging})
        return unanswered

    async def _end_hanging(
        self, open_from: Mapping[Partition, int], tail: LedgerTail, without_marker: Collection[Partition]
    ) -> None:
        """End the transactions of the own producer id that are open from these offsets on, each by its verdict."""
        decided = await self._decide(open_from, tail, without_marker)
        for commit in (True, False):
            hanging = sorted(each for each, verdict in decided.verdicts.items() if _commits(verdict) is commit)
            if hanging:
                ended = await self._transactions.end_own(hanging, commit=commit)
                self._note_ended({each: decided.verdicts[each] for each in ended}, open_from, decided.unread)

    async def _end_former(self, own: LedgerTail, former: set[int], partitions: set[Partition]) -> None:
        """End what hangs in partitions under producer ids that the slot had before.

        Such an id has written a record into the slot's ledger partition that names it, or the coordinator named it.
        Another id in a partition may be of any program, and its transaction may go on.
        """
        for producer_id in former:
            tail = await self._read(own.start, producer_id)
            partitions |= {partition for transaction in tail.transactions for partition in transaction.offsets}
        others = await self._transactions.find_of_others(partitions)
        others.pop(own.producer_id, None)  # it may have been replaced by now, with its markers on their way
        found: list[tuple[dict[Partition, ActiveProducer], Decision]] = []
        for producer_id, hanging in others.items():
            if producer_id in former or await self._is_of_slot(hanging):
                all_hanging, decided = await self._decide_former(hanging, own.start, partitions)
                if producer_id in former or decided.tail.is_of_slot:
                    found.append((all_hanging, decided))
        if not found:
            return
        # A later owner of the slot may have another producer id, with an open transaction. The coordinator ends an
        # empty transaction of this session only if there is no later owner. After that, every other id is an earlier
        # one: its last transaction has ended for the coordinator, and the id begins no other transaction.
        await self._transactions.end_own([self._ledger], commit=False)
        for hanging, decided in found:
            await self._end_all_of_former(hanging, decided)

    async def _decide_former(
        self, hanging: dict[Partition, ActiveProducer], start: int, asked: set[Partition]
    ) -> tuple[dict[Partition, ActiveProducer], Decision]:
        """Decide how another producer id's transactions end; returns where they are open as well.

        `asked` are the partitions whose leaders were asked for open transactions. The ledger may name others: an open
        transaction there would count as ended by a marker that cannot be read. Their leaders are therefore asked, and
        if a transaction is open there, all is decided again.
        """
        ((producer_id, *_), *_) = hanging.values()
        open_from = {partition: each.start for partition, each in hanging.items()}
        decided = await self._decide(open_from, await self._read(start, producer_id), ())
        named = {partition for each in decided.tail.transactions for partition in each.offsets} - asked
        more = (await self._transactions.find_of_others(named)).get(producer_id) if named else None
        if not more:
            return hanging, decided
        return await self._decide_former(hanging | more, decided.tail.start, asked | named)

    async def _is_of_slot(self, hanging: Mapping[Partition, ActiveProducer]) -> bool:
        """Whether this slot began a transaction: in its ledger partition, or by the header of a first record."""
        if self._ledger in hanging:
            return True
        firsts = [await self._first_of(partition, each.start) for partition, each in hanging.items()]
        return any(first is not None and first.slot == self._ledger[1] for first in firsts)

    async def _end_all_of_former(self, hanging: Mapping[Partition, ActiveProducer], decided: Decision) -> None:
        """Write the markers of a former producer id, and log those that are not written.

        Without evidence there is no marker, unlike for the own producer id, where the next marker would decide anyway.
        """
        for partition, former in sorted(hanging.items()):
            verdict = decided.verdicts[partition]
            if verdict is Verdict.UNKNOWN:
                why = "its outcome is unknown: what tells it was deleted, or may not be read"
            elif not await self._is_alone(partition, former):
                why = "several transactions are open there, and one marker would end all"
            else:
                why = await self._transactions.end_former(partition, former, commit=verdict is Verdict.COMMIT)
            if not why:
                self._note_ended({partition: verdict}, {partition: former.start}, decided.unread)
                continue
            log.warning(
                "hanging transaction not ended",
                topic=partition[0],
                partition=partition[1],
                first_offset=former.start,
                verdict=verdict.value,
                former_producer=former.producer_id,
                epoch=former.epoch,
                coordinator_epoch=former.coordinator_epoch,
                why=why,
                **_not_checked(decided.unread),
            )

    async def _is_alone(self, partition: Partition, former: ActiveProducer) -> bool:
        """Whether a former id has one transaction open in a partition: in version 2, each has an epoch of its own."""
        try:
            entries, _, _ = await self._fetch(partition, former.start)
        except UNREADABLE:
            return False
        return bool(entries) and entries[0].epoch == former.epoch

    async def _decide(
        self, open_from: Mapping[Partition, int], tail: LedgerTail, without_marker: Collection[Partition]
    ) -> Decision:
        """Decide how the transactions of the tail's producer id end that are open from these offsets on."""
        start = min(tail.start, open_from.get(self._ledger, tail.start))
        if start < tail.start:
            tail = await self._read(start, tail.producer_id)
        # The tail has the ledger records of the last transaction, and of one that is open in the ledger.
        sought = {
            partition: await self._first_of(partition, offset)
            for partition, offset in open_from.items()
            if partition != self._ledger and partition not in without_marker and not tail.names(partition, offset)
        }
        tail, proven = await self._read_back(sought, open_from, tail)
        unproven = [each for each in sought if each not in proven and not tail.names(each, open_from[each])]
        to_read = markers_to_read(open_from, tail.transactions)
        markers = await self._markers(to_read, tail)
        found = verdicts(open_from, tail.transactions, markers)
        found |= dict.fromkeys(unproven, Verdict.UNKNOWN)
        unread = {record.partition for record in to_read if record not in markers} | set(unproven)
        return Decision(tail, found, unread)

    def _note_ended(
        self, verdict_of: Mapping[Partition, Verdict], open_from: Mapping[Partition, int], unread: Collection[Partition]
    ) -> None:
        """Count and log the hanging transactions that were ended.

        `unread`: the partitions whose evidence could not be read, for example without the permission to Read them.
        """
        for (topic, number), verdict in verdict_of.items():
            self._ended.labels(verdict.value).inc()
            log.warning(
                "hanging transaction ended",
                topic=topic,
                partition=number,
                first_offset=open_from[topic, number],
                verdict=verdict.value,
                **({"ended_by": "commit"} if verdict is Verdict.UNKNOWN else {}),
                **_not_checked(unread),
            )

    async def _read(self, start: int, producer_id: int, open_from: Mapping[Partition, int] | None = None) -> LedgerTail:
        """Read a producer id's records in the ledger's partition, from an offset to its end after the fence.

        With `open_from`, only the transactions that are open there are kept.
        """
        tail = LedgerTail(producer_id, start, open_from or {})
        offset, end = start, start + 1
        time_slice = TimeSlice()
        while offset < end:
            try:
                entries, offset, end = await self._fetch(self._ledger, offset)
            except DELETED:
                if (offset := await self._offset_since(0)) < 0:
                    break
                tail.start, end = offset, offset + 1
                continue
            for entry in entries:
                tail.add(self._ledger, entry)
                if time_slice.is_over:
                    await time_slice.next()
        return tail

    async def _offset_since(self, since_ms: int) -> int:
        """Find the offset of the ledger's first record of a time (ms) or later; -1 if there is none."""
        topic, number = self._ledger
        found = (await offsets_since(self._admin, topic, [number], since_ms))[number]
        return -1 if found is None else found

    async def _read_back(
        self, sought: Mapping[Partition, FirstRecord | None], open_from: Mapping[Partition, int], tail: LedgerTail
    ) -> tuple[LedgerTail, set[Partition]]:
        """Read more of the ledger, from the time on at which the first records of open transactions were accepted.

        Returns what was read, and the partitions for which this is proof: a transaction without a ledger record there
        has none, because retention has deleted neither the records since that time nor the term's begin record. A
        ledger record is at most CLOCKS_APART_MS older than the accepted_at of its events.
        """
        unread = [first for first in sought.values() if first is not None and not tail.has_all_since(first.epoch)]
        is_complete = False
        if unread:
            since_ms = max(0, min(first.accepted_at for first in unread) - CLOCKS_APART_MS)
            log_start, since = await self._offset_since(0), await self._offset_since(since_ms)
            start = min(since, tail.start) if since >= 0 else tail.start
            tail = await self._read(start, tail.producer_id, open_from)
            has_older = log_start < since if since >= 0 else log_start >= 0
            is_complete = has_older and tail.start == start
        proven = {
            partition
            for partition, first in sought.items()
            if first is not None and (is_complete or tail.has_all_since(first.epoch))
        }
        return tail, proven

    async def _first_of(self, partition: Partition, offset: int) -> FirstRecord | None:
        """Read the first record of an open transaction; None if it cannot be read. Raises NewerVersion."""
        try:
            entries, _, _ = await self._fetch(partition, offset)
        except UNREADABLE:
            return None
        for entry in entries[:1]:
            if partition[0] == OFFSETS_TOPIC:
                return FirstRecord(entry.epoch, entry.timestamp, None)
            try:
                return FirstRecord(entry.epoch, entry.stamp().accepted_at, entry.slot())
            except NewerVersion:
                raise
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
                if entry.marker is not None and entry.producer_id == tail.producer_id:
                    return entry.marker
        return None

    async def _fetch(self, partition: Partition, offset: int) -> tuple[list[LogEntry], int, int]:
        """Fetch entries, the next offset and the partition's end, again after retriable errors and empty responses.

        Raises UNREADABLE, and TimeoutError after `timeout_s`.
        """
        client = self._transactions.client
        async with asyncio.timeout(self._timeout_s):
            while True:
                try:
                    entries, following, end = await fetch(client, partition, offset)
                    if offset < following or end <= offset:
                        return entries, following, end
                except UNREADABLE:
                    raise
                except UNANSWERED as error:
                    if not getattr(error, "retriable", True):
                        raise
                if partition[0] not in client.tracked_topics:
                    client.set_topics({*client.tracked_topics, partition[0]})
                await asyncio.sleep(RETRY_PAUSE_S)
                await client.force_metadata_update()


def _not_checked(unread: Collection[Partition]) -> dict[str, list[str]]:
    """Make the field of a log line for the partitions whose evidence could not be read, if there are any."""
    return {"not_checked": [f"{topic}/{number}" for topic, number in sorted(unread)]} if unread else {}


def _commits(verdict: Verdict) -> bool:
    """Whether a commit ends a transaction of this verdict. It ends one of unknown outcome: a client may have a 201."""
    return verdict is not Verdict.ABORT
