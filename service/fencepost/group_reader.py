"""Reads topics as a member of a consumer group, and commits each batch's offsets in the transaction of its results.

    async with (
        AsyncClient("http://127.0.0.1:8000") as client,
        GroupReader("orders", "billing", bootstrap_servers="127.0.0.1:9092") as reader,
    ):
        async for batch in reader:
            await batch.send(client, [Event("invoices", invoice_of(record.value)) for record in batch.records])

The guarantee: of each record, the results are in Kafka once, whatever crashes, and however the group rebalances. A
batch is of one partition and begins at the committed offset; the results and the offset behind the batch are one
transaction of the service, or neither is written (KIP-447). Two rules exclude a second result, each without the other:

- The transaction is refused if the member has been replaced (409 `stale-member`).
- The batch's key is made of the group and the offset at which the batch begins, so the service writes one batch at most
  from there. A new member may get an offset whose successor is in a transaction that is not ended yet, because
  aiokafka cannot ask for stable offsets only; its batch then meets the key of that transaction.

A record whose id is among those of the `lookback` offsets before it, in its partition, is a copy, and is left out. That
depends on the partition alone: whoever gets the partition reads the ids back from it.

The assignors of aiokafka (range, the default here, roundrobin, sticky) use the eager protocol: in a rebalance each
member gives up all its partitions, and gets them back with the next generation. It has no cooperative one (KIP-429).
"""

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, Self

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka import ConsumerRecord as Record
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError
from aiokafka.structs import TopicPartition

from .client import Event, KeyReused, Offsets, StaleMember, WrittenBatch
from .client.events import KEY
from .reader import METADATA_MS, POLL_MS, NewerVersion, id_of, refuse_settings

__all__ = ["AtomicSender", "GroupBatch", "GroupReader"]

LOOKBACK: Final = 10_000
RECORDS_MAX: Final = 500
FINISH_S: Final = 5.0
# A rebalance waits for this long for a member, which may take FINISH_S of it for its batch.
REBALANCE_MS: Final = 30_000
# How soon a member learns that its group rebalances, or that it has been replaced.
HEARTBEAT_MS: Final = 1_000
# Another member's transaction from the same offset ends within FENCEPOST_TRANSACTION_TIMEOUT_MS, 10 s, or is recovered.
# A member that has been replaced hears of it by its next heartbeat.
SETTLED_S: Final = 60.0
CONFLICT_PAUSE_S: Final = 0.2
# Settings of the consumer on which the guarantee depends.
_FIXED: Final[Mapping[str, Any]] = {
    "auto_offset_reset": "none",
    "enable_auto_commit": False,
    "isolation_level": "read_committed",
}
# Those that have arguments of their own.
_NAMED: Final = frozenset({"group_id", "group_instance_id"})
_DEFAULTS: Final[Mapping[str, Any]] = {
    "heartbeat_interval_ms": HEARTBEAT_MS,
    "metadata_max_age_ms": METADATA_MS,
    "partition_assignment_strategy": (RangePartitionAssignor,),
    "rebalance_timeout_ms": REBALANCE_MS,
}
_REMEDY: Final = (
    "the group was rewound, or its topic created again, while the service remembers the keys: use another group, "
    "or send under another key than batch.key"
)


class AtomicSender(Protocol):
    """Sends batches: an AsyncClient."""

    async def send_atomic(self, key: str, events: Iterable[Event], offsets: Offsets | None = None) -> WrittenBatch:
        """As Client.send_atomic."""


class Member(NamedTuple):
    """A member of the group in one generation."""

    id: str
    generation: int


def batch_key(group: str, topic: str, partition: int, first: int) -> str:
    """Make the key of the batch that begins at a committed offset (0 where the group has none); hashed if too long."""
    key = f"{group}/{topic}/{partition}/{first}"
    return key if KEY.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()


@dataclass(slots=True)
class GroupBatch:
    """Records of one partition that are not copies, and what sends their results.

    `key` and `offsets` are arguments of `send_atomic`; `offsets` commits the offset behind the batch, with the copies
    that were left out.
    """

    topic: str
    partition: int
    records: Sequence[Record]
    key: str
    offsets: Offsets
    is_written: bool = False
    refusal: StaleMember | KeyReused | None = None  # why the batch was dropped
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def member(self) -> Member:
        """The member that has read the batch."""
        return Member(self.offsets.member, self.offsets.generation)

    @property
    def end(self) -> int:
        """The offset behind the batch."""
        return self.offsets.positions[self.topic, self.partition]

    async def send(self, client: AtomicSender, events: Iterable[Event]) -> WrittenBatch | None:
        """Send the results, none or more, and commit the offsets with them.

        Returns None if the batch is dropped, and nothing of it written by this call: the partition has another member,
        or another batch was written from the same offset. What `send_atomic` raises otherwise is raised, and if the
        iteration goes on, the records come again.
        """
        try:
            written = await client.send_atomic(self.key, events, self.offsets)
        except (StaleMember, KeyReused) as error:
            self.refusal = error
            return None
        else:
            self.is_written = True
            return written
        finally:
            self.settled.set()


@dataclass(slots=True)
class PartitionReading:
    """How far a partition is read: `first` is the committed offset, `end` the next one to read.

    `seen` has the ids of the `lookback` offsets before `end`, each with the offset of its last copy, oldest first.
    """

    first: int
    end: int
    seen: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    def take(self, records: Sequence[Record], lookback: int) -> list[Record]:
        """Move past records; return those from `first` on that are no copies. Raises NewerVersion."""
        fresh = [record for record in records if self._is_fresh(record, lookback) and record.offset >= self.first]
        self.end = records[-1].offset + 1
        return fresh

    def _is_fresh(self, record: Record, lookback: int) -> bool:
        id = id_of(record) if lookback else None
        if id is None:
            return True
        while self.seen and next(iter(self.seen.values())) < record.offset - lookback:
            self.seen.popitem(last=False)
        is_fresh = id not in self.seen
        self.seen[id] = record.offset
        self.seen.move_to_end(id)
        return is_fresh


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka ships no types
    """Tells a reader of rebalances. aiokafka logs and drops what a listener raises."""

    def __init__(self, reader: "GroupReader") -> None:
        self._reader = reader

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        await self._reader._revoke()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self._reader._assign(assigned)


class GroupReader:
    """Reads topics as a member of a group: an async context manager, and an async iterator of GroupBatch.

    The next batch is given when the previous one is written. A batch that was not sent, or whose `send` failed, comes
    again. In a rebalance, a batch in flight has `finish_s` to be written; after that, it is written before the group
    has its next generation, or is refused and dropped.
    """

    def __init__(
        self,
        topics: str | Iterable[str],
        group: str,
        *,
        instance: str | None = None,
        lookback: int = LOOKBACK,
        records_max: int = RECORDS_MAX,
        finish_s: float = FINISH_S,
        **consumer: Any,
    ) -> None:
        """Prepare a reader; entering it joins the group.

        Args:
            topics: the topics to read, from the committed offsets, or from their beginning.
            group: the consumer group. All its members must send as the same caller of the service.
            instance: `group.instance.id` (KIP-345): a member that is started again under it gets its partitions back
                at once, without a rebalance.
            lookback: among the ids of so many offsets before a record, its copies are looked for; they are read back
                when a partition is assigned. 0: no record is a copy.
            records_max: the most records of a batch; their results must fit into one atomic batch.
            finish_s: how long a rebalance waits for the batch in flight, in seconds.
            consumer: further settings of aiokafka's consumer (bootstrap_servers, session_timeout_ms, ...).

        Raises:
            TypeError: a setting of the consumer is one that the reader sets itself.
        """
        refuse_settings(_FIXED.keys() | _NAMED, consumer)
        self._topics = [topics] if isinstance(topics, str) else list(topics)
        self._group, self._instance = group, instance
        self._lookback, self._records_max, self._finish_s = lookback, records_max, finish_s
        named = {"group_id": group, "group_instance_id": instance}
        self._settings = {**_DEFAULTS, **consumer, **_FIXED, **named}
        self._consumer: Any = None  # aiokafka ships no types
        self._member: Member | None = None  # None from the revocation of the partitions to the next assignment
        self._assigned = asyncio.Event()
        self._unplaced: set[TopicPartition] = set()  # assigned, with no position yet
        self._readings: dict[TopicPartition, PartitionReading] = {}
        self._fetched: deque[tuple[TopicPartition, list[Record]]] = deque()
        self._batch: GroupBatch | None = None  # the last one
        # Since when (time.monotonic) a batch from this offset meets another one; since when the member is stale.
        self._conflicts: dict[TopicPartition, tuple[int, float]] = {}
        self._stale: tuple[StaleMember, float] | None = None

    async def __aenter__(self) -> Self:
        self._consumer = AIOKafkaConsumer(**self._settings)
        self._consumer.subscribe(self._topics, listener=_Listener(self))
        try:
            await self._consumer.start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        """Leave the group. aiokafka's `stop` may raise a CancelledError that nobody asked for."""
        if self._batch is not None:
            self._batch.settled.set()
        task = asyncio.current_task()
        try:
            await self._consumer.stop()
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GroupBatch:
        """Wait for the next batch.

        Raises:
            OffsetOutOfRangeError: Kafka does not have the records from the committed offset on; nothing was skipped.
            NewerVersion: a newer release of Fencepost has written the next records; nothing was skipped.
            KeyReused: the group was rewound, or the topic created again: the text says what to do.
            StaleMember: the service refuses a member that Kafka knows: it may be on another cluster.
            KafkaError: what Kafka raises.
            RuntimeError: the reader was not entered.
        """
        if self._consumer is None:
            raise RuntimeError("GroupReader: enter it first: async with GroupReader(…) as reader")
        if self._batch is not None:
            batch, self._batch = self._batch, None
            batch.settled.set()
            await self._settle(batch)
        while True:
            member = self._member
            if member is None:
                await self._wait_for_assignment()
            elif self._unplaced:
                await self._place(member)
            elif self._fetched:
                self._batch = self._next_batch(member)
                if self._batch is not None:
                    return self._batch
            else:
                await self._fetch(member)

    # ------------------------------------------------------------------------------------------------ batches

    async def _fetch(self, member: Member) -> None:
        """Fetch records, for at most POLL_MS; none are kept if the partitions have been given up meanwhile."""
        with contextlib.suppress(NoOffsetForPartitionError):  # of a new assignment, without a position yet
            records = await self._consumer.getmany(timeout_ms=POLL_MS, max_records=self._records_max)
            if self._member is member:
                self._fetched.extend(records.items())

    def _next_batch(self, member: Member) -> GroupBatch | None:
        """Make a batch of the records that were fetched; None if all are copies, or before the committed offset.

        Raises NewerVersion; the records then come again.
        """
        at, records = self._fetched.popleft()
        reading = self._readings[at]
        try:
            fresh = reading.take(records, self._lookback)
        except NewerVersion:
            del self._readings[at]  # the ids that were seen include those of records that come again
            self._unplaced.add(at)
            raise
        if not fresh:
            return None
        key = batch_key(self._group, at.topic, at.partition, reading.first)
        positions = {(at.topic, at.partition): reading.end}
        offsets = Offsets(self._group, member.id, member.generation, positions, self._instance)
        return GroupBatch(at.topic, at.partition, fresh, key, offsets)

    async def _settle(self, batch: GroupBatch) -> None:
        """Note what became of a batch; one that is not written is read again. Raises KeyReused if that does not end."""
        if batch.member != self._member:  # its partition, if it is assigned again, is read from the committed offset
            return
        at = TopicPartition(batch.topic, batch.partition)
        if batch.is_written:
            self._readings[at].first = batch.end
            self._conflicts.pop(at, None)
        elif isinstance(batch.refusal, StaleMember):
            self._give_up()
            self._stale = (batch.refusal, time.monotonic())
        else:
            self._unplaced.add(at)
            if batch.refusal is not None:
                await self._pause_for_conflict(at, batch.refusal)

    async def _pause_for_conflict(self, at: TopicPartition, error: KeyReused) -> None:
        """Give another batch from the same offset time to commit. Raises the error SETTLED_S after the first one."""
        first = self._readings[at].first
        conflict = self._conflicts.get(at)
        if conflict is None or conflict[0] != first:
            conflict = self._conflicts[at] = (first, time.monotonic())
        if time.monotonic() - conflict[1] > SETTLED_S:
            error.add_note(_REMEDY)
            raise error
        await asyncio.sleep(CONFLICT_PAUSE_S)

    # ------------------------------------------------------------------------------------------------ the group

    def _give_up(self) -> None:
        """Drop what was fetched, until the next assignment."""
        self._member = None
        self._assigned.clear()
        self._fetched.clear()

    async def _revoke(self) -> None:
        """Give up all partitions, and wait for the batch in flight. The heartbeats go on meanwhile."""
        batch = self._batch
        self._give_up()
        if batch is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(batch.settled.wait(), self._finish_s)

    def _assign(self, assigned: Iterable[TopicPartition]) -> None:
        """Take the partitions of a new generation."""
        coordinator = self._consumer._coordinator  # no public name tells a consumer's member and generation
        self._member = Member(coordinator.member_id, coordinator.generation)
        self._unplaced = set(assigned)
        self._stale = None
        self._assigned.set()

    async def _wait_for_assignment(self) -> None:
        """Wait for a while, or raise what the group's coordinator has raised."""
        if self._stale is not None and time.monotonic() - self._stale[1] > SETTLED_S:
            raise self._stale[0]
        with contextlib.suppress(NoOffsetForPartitionError):  # of a partition that has no position yet
            await self._consumer.getmany(timeout_ms=0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._assigned.wait(), POLL_MS / 1000)

    async def _place(self, member: Member) -> None:
        """Look up where the group is in the partitions without a position, and go back from there for the ids."""
        partitions = sorted(self._unplaced)
        committed = {at: await self._consumer.committed(at) for at in partitions}
        beginnings = await self._consumer.beginning_offsets(partitions)
        ends = await self._consumer.end_offsets(partitions)
        if self._member is not member:
            return
        for at in partitions:
            offset = committed[at]
            if offset is None:
                reading = PartitionReading(0, beginnings[at])
            elif not beginnings[at] <= offset <= ends[at]:
                raise OffsetOutOfRangeError({at: offset})
            else:
                reading = PartitionReading(offset, max(beginnings[at], offset - self._lookback))
                known = self._readings.get(at)
                if known is not None and known.end == offset:  # its ids are those before the offset, and no others
                    reading = PartitionReading(offset, offset, known.seen)
            self._consumer.seek(at, reading.end)
            self._readings[at] = reading
            self._unplaced.discard(at)
