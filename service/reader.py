"""For applications: reads a topic's committed records, each event once, and stores its position with the results.

The results and the reader's position are stored in one transaction of the application's own store:

    class Totals:                                                   # a Store
        async def load(self) -> Saved | None:
            return SELECT version, position
        async def commit(self, results: list[Sale], saved: Saved) -> None:
            BEGIN; INSERT results; UPDATE ... SET version, position WHERE version = saved.version - 1; COMMIT

    await follow("orders", work, Totals(), bootstrap_servers="127.0.0.1:9092")

The guarantee: the results of an event are stored once, whatever crashes and however often the reader is started again,
if the copies of its id are within the bounds: among the last `ids` ids, and read within `age_s` of each other, not
counting the time in which no reader ran. A reader knows the ids of its own partitions only: readers with positions of
their own do not share ids. All records without an id are passed on.
"""

import struct
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from aiokafka import AIOKafkaConsumer
from aiokafka import ConsumerRecord as Record
from aiokafka.structs import TopicPartition

from service.contract import wire

__all__ = ["BOUNDS", "Bounds", "Overtaken", "ReaderPosition", "ReaderStore", "Record", "Saved", "follow", "id_of"]

R = TypeVar("R", contravariant=True)

POLL_MS: Final = 500
# A new partition is found within this time.
METADATA_MS: Final = 60_000

_VERSION: Final = 1
_HEAD: Final = struct.Struct(">BQII")
_OFFSET: Final = struct.Struct(">IQ")
_SEEN: Final = struct.Struct(f">{wire.ID_BYTES}sQ")


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many ids a reader remembers (24 bytes each, stored with each commit), and for how many seconds."""

    ids: int = 10_000
    age_s: float = 86_400.0


BOUNDS: Final = Bounds()


class Saved(NamedTuple):
    """A stored position: bytes for the store to keep, and its version, from 1, which grows by one with each commit."""

    version: int
    position: bytes


class ReaderStore(Protocol[R]):
    """Stores results and position together."""

    async def load(self) -> Saved | None:
        """Return what `commit` stored last, None before the first commit."""

    async def commit(self, results: R, saved: Saved) -> None:
        """Store both in one transaction.

        Raises:
            Overtaken: the version that is stored is not `saved.version - 1`; nothing was stored.
        """


class Overtaken(Exception):
    """Another reader has stored its position since: this reader must stop."""


@dataclass
class ReaderPosition:
    """A reader's position: the next offset by partition, and the ids seen with their times (ms), oldest first."""

    offsets: dict[int, int] = field(default_factory=dict)
    seen: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    def fresh(self, id: bytes | None, bounds: Bounds, now_ms: int) -> bool:
        """Whether an id is seen for the first time, and remember it; true for None, a record without an id."""
        if id is None:
            return True
        oldest_ms = now_ms - int(bounds.age_s * 1000)
        while self.seen and next(iter(self.seen.values())) < oldest_ms:
            self.seen.popitem(last=False)
        if id in self.seen:
            return False
        self.seen[id] = now_ms
        if len(self.seen) > bounds.ids:
            self.seen.popitem(last=False)
        return True

    def encode(self, now_ms: int) -> bytes:
        """Encode the position."""
        head = _HEAD.pack(_VERSION, now_ms, len(self.offsets), len(self.seen))
        offsets = b"".join(_OFFSET.pack(*pair) for pair in sorted(self.offsets.items()))
        return head + offsets + b"".join(_SEEN.pack(*pair) for pair in self.seen.items())

    @classmethod
    def decode(cls, raw: bytes, now_ms: int) -> "ReaderPosition":
        """Decode a position; ids do not age by the time in which no reader ran. Raises ValueError for other bytes."""
        try:
            version, saved_ms, offsets, seen = _HEAD.unpack_from(raw)
            ids = _HEAD.size + offsets * _OFFSET.size
            if version != _VERSION or len(raw) != ids + seen * _SEEN.size:
                raise ValueError(f"{len(raw)} bytes of version {version}")
        except (struct.error, ValueError) as error:
            raise ValueError(
                f"no position of version {_VERSION} ({error}): give load() the bytes that commit() got"
            ) from None
        paused_ms = max(now_ms - saved_ms, 0)
        return cls(
            dict(_OFFSET.iter_unpack(raw[_HEAD.size : ids])),
            OrderedDict((id, ms + paused_ms) for id, ms in _SEEN.iter_unpack(raw[ids:])),
        )


async def follow(
    topic: str,
    work: Callable[[Sequence[Record]], Awaitable[R]],
    store: ReaderStore[R],
    *,
    partitions: Iterable[int] | None = None,
    bounds: Bounds = BOUNDS,
    records_max: int = 500,
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    **consumer: Any,
) -> None:
    """Read a topic from the stored position on, until cancelled or failed.

    Args:
        work: makes results from records whose ids were not seen before. It must have no effects of its own: its
            results count only once `store` has committed them.
        partitions: the partitions to read; default: all, also those that are added later, from their beginning.
        records_max: the most records of one commit.
        consumer: further settings of aiokafka's consumer (bootstrap_servers, security_protocol, ...).

    Raises:
        Overtaken: another reader has continued from this position.
        aiokafka.errors.OffsetOutOfRangeError: Kafka no longer has the next record; nothing was skipped.
        Exception: whatever `work`, `store` or Kafka raise. Call `follow` again to continue from the stored position.
    """
    wanted = None if partitions is None else frozenset(partitions)
    settings = {**consumer, "isolation_level": "read_committed", "enable_auto_commit": False, "group_id": None}
    async with AIOKafkaConsumer(auto_offset_reset="none", metadata_max_age_ms=METADATA_MS, **settings) as reader:
        saved = await store.load()
        version = 0 if saved is None else saved.version
        position = ReaderPosition() if saved is None else ReaderPosition.decode(saved.position, now_ms())
        while True:
            await _assign(reader, topic, wanted, position)
            batches = await reader.getmany(timeout_ms=POLL_MS, max_records=records_max)
            fresh: list[Record] = []
            for partition, records in batches.items():
                fresh += [record for record in records if position.fresh(id_of(record), bounds, now_ms())]
                position.offsets[partition.partition] = records[-1].offset + 1
            if fresh:
                version += 1
                await store.commit(await work(fresh), Saved(version, position.encode(now_ms())))


async def _assign(
    reader: AIOKafkaConsumer, topic: str, wanted: frozenset[int] | None, position: ReaderPosition
) -> None:
    """Assign all wanted partitions that exist to the consumer, and seek to the position in each."""
    numbers = reader.partitions_for_topic(topic) or await _look_up(reader, topic)
    partitions = {TopicPartition(topic, number) for number in (numbers if wanted is None else numbers & wanted)}
    if partitions == reader.assignment():
        return
    reader.assign(sorted(partitions))
    for partition in partitions:
        if partition.partition in position.offsets:
            reader.seek(partition, position.offsets[partition.partition])
        else:
            await reader.seek_to_beginning(partition)


async def _look_up(reader: AIOKafkaConsumer, topic: str) -> set[int]:
    """Find the partitions of a topic that the client's metadata does not include yet."""
    await reader._client.add_topic(topic)
    return reader.partitions_for_topic(topic) or set()


def id_of(record: Record) -> bytes | None:
    """Return the event id of a record: from the `fencepost` header, else from its idempotency key, else None."""
    headers: dict[str, bytes | None] = {}  # a header's value may be null in Kafka
    for name, content in record.headers:
        headers.setdefault(name, content)
    if (stamp := headers.get(wire.STAMP_HEADER)) is not None:
        try:
            return wire.Stamp.decode(stamp).id
        except wire.WireError:
            pass
    key = headers.get(wire.KEY_HEADER)
    return wire.header_event_id(key) if key else None
