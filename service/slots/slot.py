"""A slot: one long-lived transactional producer, the term in which it may write, and the marks that it owes."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from service.claims.redis_store import KeyStore, Row, StoreGeneration
from service.claims.states import SLOT, Claim, SlotEvent, SlotState
from service.contract.wire import Begin, encode_ledger
from service.core.problems import StoreLost
from service.kafka.outcomes import TransactionFailed
from service.kafka.producer import IdempotentProducer, TransactionalProducer
from service.kafka.session import Partition, Record, RecordMetadata

# For what has no ledger record: offsets that no `applied` is ever at, so that a mark moves none.
NO_RECORD: Final = -2
# Ledger records, of 512 KiB at most, that may wait for their mark: with more of them the term ends, and the recovery
# reads them from the ledger again.
PENDING_MARKS_MAX: Final = 16


class Link(NamedTuple):
    """What a mark is for: when it was written, the offset of its ledger record, and of the one before."""

    generation: StoreGeneration
    term: int
    previous: int
    offset: int


class Slot:
    """Slot `n` of the namespace while this process holds it. Its pool's task owns it; nothing else moves its state."""

    def __init__(self, n: int, keys: KeyStore, ledger: str, instance: str, idempotent: IdempotentProducer) -> None:
        self.n = n
        self.idempotent = idempotent  # for events whose guarantee is `idempotent`
        self.term = -1
        self.generation = StoreGeneration(-1, "")
        self.state = SlotState.VACANT
        self.draining = False  # it is to be given back
        self.superseded = False  # its term or generation has passed: it is to be recovered before it writes again
        self.down_since = time.monotonic()  # it cannot write, until it has been recovered; then infinite
        self.applied = -1  # what this process knows of it in the store
        self.in_doubt = 0  # events of a transaction without a clean commit, until the slot has been recovered
        self.in_doubt_since = 0.0  # by time.monotonic
        self.maybe_hanging: set[Partition] = set()  # partitions that the next recovery asks for open transactions
        self._keys = keys
        self._ledger = ledger
        self._instance = instance
        self._producer: TransactionalProducer | None = None
        self._last_record = -1
        self._sent = 0  # events of the last transaction
        self._likely = True  # the next group will have something to write
        self._unmarked: deque[tuple[Link, Sequence[Row]]] = deque()
        self._marking = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Slot {self.n} {self.state.value} term={self.term} unmarked={len(self._unmarked)}>"

    @property
    def producer(self) -> TransactionalProducer:
        assert self._producer is not None, f"{self!r} has no producer"
        return self._producer

    @property
    def cut_off(self) -> bool:
        """Whether a connection of this term has ended: what it has written may lack markers since."""
        return self._producer is not None and self._producer.lost

    @property
    def producer_id(self) -> int | None:
        """Kafka's id of its producer, None while it has none."""
        return None if self._producer is None else self._producer.producer_id

    def move(self, event: SlotEvent) -> None:
        """The one way in which the state changes."""
        self.state = SLOT[self.state, event]

    # ------------------------------------------------------------------------------------ recovery's steps on it

    def enter(self, generation: StoreGeneration, producer: TransactionalProducer) -> None:
        """A fenced-in producer begins a life. Of the last term's debts those stay that no ledger will replay."""
        self.generation = generation
        self.superseded = False
        self._producer = producer
        self._unmarked = deque(
            debt for debt in self._unmarked if debt[0].offset == NO_RECORD and debt[0].generation == generation
        )
        self.move(SlotEvent.FENCE)

    async def begin(self, at_ms: int) -> int:
        """Commit the begin record; its offset is the term. Raises TransactionFailed."""
        begin = Begin(
            self.n, self.producer.producer_id, self.producer.epoch, self._instance, self.generation.number, at_ms
        )
        await self.producer.send([], (self._ledger, self.n))
        self.term = await self.producer.commit(begin.encode())
        self._last_record = self.term
        self.move(SlotEvent.BEGIN)
        return self.term

    async def end(self) -> None:
        """Close the producer: its life is over, whatever it was doing."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.close()
        await self.idempotent.close()

    # --------------------------------------------------------------------------------------------- within a term

    async def claim(self, asked: Sequence[tuple[bytes, bytes]]) -> list[Claim]:
        """Claim (id, fingerprint) pairs for this slot in this term. Raises as KeyStore.claim does."""
        return await self._keys.claim(self.generation, self.n, self.term, asked)

    async def claim_all(self, asked: Sequence[tuple[bytes, bytes]]) -> Claim:
        """Claim an atomic batch for this slot in this term: the whole first, then its members; all or none."""
        return await self._keys.claim_all(self.generation, self.n, self.term, asked)

    async def release(self, ids: Sequence[bytes]) -> None:
        """Give up claims that were never sent."""
        await self._keys.release(self.generation, self.n, self.term, ids)

    def open(self, partitions: Iterable[Partition]) -> None:
        """Begin the transaction of a group while its claims are made: one round trip less to wait for (KIP-98).

        `send` or `abandon` comes next. Nothing is begun where the last group had nothing to write: this one is likely
        to be of replays too, and a transaction that stays empty costs two requests and its markers.
        """
        if self._likely:
            self.producer.open([*partitions, (self._ledger, self.n)])

    async def abandon(self) -> None:
        """There is nothing to write. Raises TransactionFailed: the term is over then."""
        self._likely = False
        await self.producer.abandon()

    async def send(self, records: Sequence[Record]) -> list[RecordMetadata]:
        """Send the records of a transaction, and await every answer; their places. `commit` comes next.

        Raises TransactionFailed: the term is over then.
        """
        self.move(SlotEvent.WRITE)
        self._likely = True
        self._sent = len(records)
        try:
            return await self.producer.send(records, (self._ledger, self.n))
        except TransactionFailed as failed:
            self.fail(failed)
            raise

    async def commit(self, entries: Iterable[str], topic_ids: Mapping[str, str]) -> Link:
        """Write the ledger record of what was sent, with these entries, and commit. Raises as `send` does.

        `topic_ids` are those of the records' topics, as far as they are known. Answers the ledger's previous and new
        offset, which `mark` wants.
        """
        try:
            head = self.n, self.producer.producer_id, self.producer.epoch, self._instance
            offset = await self.producer.commit(encode_ledger(*head, entries, topic_ids))
        except TransactionFailed as failed:
            self.fail(failed)
            raise
        self.move(SlotEvent.COMMIT)
        previous, self._last_record = self._last_record, offset
        return Link(self.generation, self.term, previous, offset)

    def fail(self, failed: TransactionFailed) -> None:
        """A transaction did not commit cleanly: what was sent is in doubt until the slot has been recovered."""
        self.maybe_hanging.update(failed.hanging)
        self.move(SlotEvent.FAIL)
        self.in_doubt, self.in_doubt_since = self._sent, time.monotonic()

    def unlinked(self) -> Link:
        """The link of what is written now and has no ledger record."""
        return Link(self.generation, self.term, NO_RECORD, NO_RECORD)

    async def mark(self, link: Link, rows: Sequence[Row]) -> None:
        """Mark what a committed ledger record says, after all that was to be marked before it.

        Where this raises, the record stays owed: the next mark, or `settle_debts`, tries it again in its order, and
        until then `applied` stays where it is, so that a recovery would find it. StoreLost at once where the slot has
        entered another generation meanwhile, whose recovery has read the record.
        """
        async with self._marking:
            if link.generation != self.generation:
                raise StoreLost(f"generation {link.generation.number} has passed")
            self._unmarked.append((link, rows))
            await self._flush()

    async def flush_marks(self) -> None:
        """Try again what could not be marked."""
        async with self._marking:
            await self._flush()

    @property
    def has_pending_marks(self) -> bool:
        return bool(self._unmarked)

    @property
    def takes_groups(self) -> bool:
        """Whether it may take a group now."""
        return not (self.draining or self.superseded or self.has_too_many_pending_marks)

    @property
    def has_too_many_pending_marks(self) -> bool:
        """Are so many marks pending that no further group may be taken before one of them succeeds?"""
        return len(self._unmarked) >= PENDING_MARKS_MAX

    async def _flush(self) -> None:
        owed = self._unmarked  # a new term begins with debts of its own
        while owed:
            link, rows = owed[0]
            await self._keys.mark(link.generation, self.n, link.term, link.previous, link.offset, rows)
            owed.popleft()
            self.applied = max(self.applied, link.offset)
