"""A slot: its transactional producer, the term in which the producer may write, and the marks that are pending."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from service.claims.keys import Keys, StoreGeneration
from service.claims.states import SLOT, Claim, Row, SlotEvent, SlotState
from service.contract.wire.ledger import Begin, encode_ledger
from service.core.problems import StoreLost
from service.core.time_slice import yield_after
from service.kafka.group_offsets import GroupOffsets
from service.kafka.hanging import RecordCoordinates
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.metadata import Partition
from service.kafka.outcomes import TransactionAborted, TransactionFailed
from service.kafka.producer import TransactionalProducer
from service.kafka.records import Record, RecordMetadata
from service.slots.ledger_rows import LedgerEntry, encode_entries

# The offset of events without a ledger record. `applied` is never at it, so that their mark does not move `applied`.
NO_RECORD: Final = -2
# Ledger records, of 512 KiB at most, whose marks may be pending before the slot takes another group. If they cannot be
# marked then, the term ends, and recovery reads the records from the ledger.
PENDING_MARKS_MAX: Final = 16


class LedgerPosition(msgspec.Struct, frozen=True):
    """Where a ledger record was written: its generation, term and offset, and the offset of the record before it."""

    generation: StoreGeneration
    term: int
    previous: int
    offset: int


class Slot:
    """Slot `n` of the namespace while this process holds it. Only the pool's task of this slot changes its state."""

    def __init__(self, n: int, keys: Keys, ledger: str, instance: str, idempotent: IdempotentProducer) -> None:
        self.n = n
        self.idempotent = idempotent  # for events whose guarantee is `idempotent`
        self.term = -1
        self.generation = StoreGeneration(-1, "")
        self.state = SlotState.VACANT
        self.draining = False  # takes no more groups: the slot will be given back
        self.superseded = False  # the term or the generation has passed: the slot must be recovered before it writes
        self.down_since = time.monotonic()  # since when the slot cannot write; infinite while it can
        self.applied = -1  # the offset up to which this process has marked ledger records in the store
        self.in_doubt = 0  # events of a transaction without a clean commit, until the slot has been recovered
        self.in_doubt_since = 0.0  # time.monotonic
        self.maybe_hanging: set[Partition] = set()  # partitions that the next recovery asks for open transactions
        self._keys = keys
        self._ledger = ledger
        self._instance = instance
        self._producer: TransactionalProducer | None = None
        self._last_record = -1  # the offset of the last ledger record of this term, at first the begin record
        self._ended_term = -1  # recovery marks the ledger records of this term and of older ones
        self._sent = 0  # events of the last transaction
        self._expects_records = True  # whether the last group had something to write
        self._pending_marks: deque[tuple[LedgerPosition, Sequence[Row]]] = deque()
        self._marking = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Slot {self.n} {self.state.value} term={self.term} pending_marks={len(self._pending_marks)}>"

    @property
    def producer(self) -> TransactionalProducer:
        assert self._producer is not None, f"{self!r} has no producer"
        return self._producer

    @property
    def cut_off(self) -> bool:
        """Whether a connection of this term has ended; its transactions may lack markers since."""
        return self._producer is not None and self._producer.has_lost_connection

    @property
    def producer_id(self) -> int | None:
        """The producer id of the current producer; None without a producer."""
        return None if self._producer is None else self._producer.producer_id

    @property
    def throttled_s(self) -> float:
        """The longest throttle time in a response of the last transaction, in seconds; 0 without a producer."""
        return 0.0 if self._producer is None else self._producer.throttled_s

    def move(self, event: SlotEvent) -> None:
        """Change the state. Raises IllegalMove where the table has no such move."""
        self.state = SLOT[self.state, event]

    # ----------------------------------------------------------------------------------------- steps of recovery

    def enter(self, generation: StoreGeneration, producer: TransactionalProducer) -> None:
        """Enter a generation with a producer that has fenced the older ones.

        Keeps the pending marks of events without a ledger record: recovery replays all others from the ledger.
        """
        self.generation = generation
        self.superseded = False
        self._producer = producer
        self._ended_term = self.term
        self._pending_marks = deque(
            (position, rows)
            for position, rows in self._pending_marks
            if position.offset == NO_RECORD and position.generation == generation
        )
        self.move(SlotEvent.FENCE)

    async def begin_term(self, at_ms: int) -> int:
        """Commit the begin record, accepted at `at_ms`, and return its offset, the term. Raises TransactionFailed."""
        begin = Begin(self.n, *self.producer.identity, self._instance, self.generation.number, at_ms)
        await self.producer.send([], (self._ledger, self.n))
        self.term = await self.producer.commit(begin.encode())
        self._last_record = self.term
        self.move(SlotEvent.BEGIN)
        return self.term

    async def close_producers(self) -> None:
        """Close both producers, whatever they are doing."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.close()
        await self.idempotent.close()

    # --------------------------------------------------------------------------------------------- within a term

    def claim(self, asked: Sequence[tuple[bytes, bytes]], ttls_s: Sequence[int] = ()) -> Awaitable[list[Claim]]:
        """Claim (id, fingerprint) pairs for this slot and term, as Keys.claim does. Raises what that raises."""
        return self._keys.claim(self.generation, self.n, self.term, asked, ttls_s)

    def claim_all(self, asked: Sequence[tuple[bytes, bytes]], ttl_s: int = 0) -> Awaitable[Claim]:
        """Claim an atomic batch for this slot and term, all or nothing: the whole's pair first, then its members'."""
        return self._keys.claim_all(self.generation, self.n, self.term, asked, ttl_s)

    async def release(self, ids: Sequence[bytes]) -> None:
        """Release claims whose events were not sent."""
        await self._keys.release(self.generation, self.n, self.term, ids)

    def begin_early(self, partitions: Iterable[Partition]) -> None:
        """Begin the transaction of a group while its claims are made, which saves a round trip (KIP-98).

        Call `send` or `abandon` next. Does nothing if the last group had nothing to write: this group is then likely
        to be of replays too, and an empty transaction costs two requests, its markers and, in version 2, an epoch.
        """
        if self._expects_records:
            self.producer.begin_early([*partitions, (self._ledger, self.n)])

    async def abandon(self) -> None:
        """Abort the transaction that `begin_early` began, if any. Raises TransactionFailed, which ends the term."""
        self._expects_records = False
        await self.producer.abandon()

    async def commit_offsets(self, offsets: GroupOffsets, *, ask_leader: bool = False) -> RecordCoordinates | None:
        """Commit a group's offsets in the transaction of the next `send`, as the producer does. Call `send` next.

        Raises OffsetsRefused and TransactionAborted: the transaction is aborted, and the term goes on. Raises
        TransactionFailed, which ends the term.
        """
        try:
            return await self.producer.commit_offsets(offsets, ask_leader=ask_leader)
        except TransactionFailed as failed:
            self._sent = 0
            self.fail(failed)
            raise

    async def send(self, records: Sequence[Record]) -> list[RecordMetadata]:
        """Send the records of a transaction and await their metadata, in their order. Call `commit` next.

        Raises TransactionAborted: the term goes on. Raises TransactionFailed, which ends the term.
        """
        self.move(SlotEvent.WRITE)
        self._expects_records = True
        self._sent = len(records)
        try:
            return await self.producer.send(records, (self._ledger, self.n))
        except TransactionAborted:
            self.move(SlotEvent.ABORT)
            raise
        except TransactionFailed as failed:
            self.fail(failed)
            raise

    async def commit(
        self, entries: Sequence[LedgerEntry], topic_ids: Mapping[str, str], offsets: str = ""
    ) -> LedgerPosition:
        """Write the ledger record with these entries and commit; the position is for `mark`. Raises as `send` does.

        `topic_ids` has the known ids of the records' topics, by name; `offsets` those of a group, encoded.
        """
        try:
            producer = self.producer
            head = self.n, *producer.identity, self._instance
            value = encode_ledger(*head, [encode_entries(entries)], topic_ids, offsets)
            await yield_after(len(entries))
            offset = await producer.commit(value)
        except TransactionAborted:
            self.move(SlotEvent.ABORT)
            raise
        except TransactionFailed as failed:
            self.fail(failed)
            raise
        self.move(SlotEvent.COMMIT)
        previous, self._last_record = self._last_record, offset
        return LedgerPosition(self.generation, self.term, previous, offset)

    def fail(self, failed: TransactionFailed) -> None:
        """Note a transaction that did not commit cleanly: its events are in doubt until the slot is recovered."""
        self.maybe_hanging.update(failed.hanging)
        self.move(SlotEvent.FAIL)
        self.in_doubt, self.in_doubt_since = self._sent, time.monotonic()

    def without_ledger_record(self) -> LedgerPosition:
        """Make the position of events that are written now without a ledger record."""
        return LedgerPosition(self.generation, self.term, NO_RECORD, NO_RECORD)

    async def mark(self, position: LedgerPosition, rows: Sequence[Row]) -> None:
        """Mark the rows of a committed ledger record as delivered, after all marks that are pending.

        Where this raises, the mark stays pending: the next `mark` or `flush_marks` tries again, in order. Until then
        `applied` does not move, so that a recovery would find the record. If the term of the record has ended, whose
        recovery reads the record too, the rows are marked once, and nothing of the slot changes. Raises StoreLost at
        once if the slot has entered another generation meanwhile.
        """
        async with self._marking:
            if position.generation != self.generation:
                raise StoreLost(f"generation {position.generation.number} has passed")
            if position.offset != NO_RECORD and position.term <= self._ended_term:
                await self._mark(position, rows)
                return
            self._pending_marks.append((position, rows))
            await self._flush()

    async def flush_marks(self) -> None:
        """Try the pending marks again. Raises as `mark` does."""
        async with self._marking:
            await self._flush()

    @property
    def has_pending_marks(self) -> bool:
        return bool(self._pending_marks)

    @property
    def takes_groups(self) -> bool:
        """Whether the slot may take a group now."""
        return not (self.draining or self.superseded or self.has_too_many_pending_marks)

    @property
    def has_too_many_pending_marks(self) -> bool:
        """Whether a pending mark must succeed before the slot may take another group."""
        return len(self._pending_marks) >= PENDING_MARKS_MAX

    async def _flush(self) -> None:
        """Mark the pending rows, oldest first, and move `applied` behind each record. Raises as Keys.mark does."""
        pending = self._pending_marks
        while pending:
            position, rows = pending[0]
            await self._mark(position, rows)
            pending.popleft()
            if pending is self._pending_marks:  # else another term has begun meanwhile
                self.applied = max(self.applied, position.offset)

    def _mark(self, position: LedgerPosition, rows: Sequence[Row]) -> Awaitable[int]:
        return self._keys.mark(position.generation, self.n, position.term, position.previous, position.offset, rows)
