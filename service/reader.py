"""For applications: a topic read committed, each event once, with the place kept beside the result.

What a reader did and how far it came go into one transaction of the application's own store:

    class Totals:                                                   # a Store
        async def load(self) -> Saved | None:
            return SELECT version, place
        async def commit(self, results: list[Sale], saved: Saved) -> None:
            BEGIN; INSERT results; UPDATE ... SET version, place WHERE version = saved.version - 1; COMMIT

    await follow("orders", work, Totals(), bootstrap_servers="127.0.0.1:9092")

The guarantee: the results of an event are stored once, whatever crashes and however often it is started again, as long
as copies of its id lie within the bounds: among the last `ids` ids, and seen within `age_s` of each other, counted only
while a reader runs. One reader's memory holds for the partitions that it follows; several readers, each with its own
partitions and its own place, do not know of each other's ids. Records without id are handed on as they are.
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
# A partition that is added later is found within this time.
METADATA_MS: Final = 60_000

_VERSION: Final = 1
_HEAD: Final = struct.Struct(">BQII")
_OFFSET: Final = struct.Struct(">IQ")
_SEEN: Final = struct.Struct(f">{wire.ID_BYTES}sQ")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a reader remembers: at most so many ids (24 bytes each, stored with every result), for so many seconds."""

    ids: int = 10_000
    age_s: float = 86_400.0


BOUNDS: Final = Bounds()


class Saved(NamedTuple):
    """A stored place: bytes for the store to keep, and its version, which grows by one with each commit, from 1."""

    version: int
    place: bytes


class ReaderStore(Protocol[R]):
    """Where results and place are kept together."""

    async def load(self) -> Saved | None:
        """What `commit` stored last, None where it never did."""

    async def commit(self, results: R, saved: Saved) -> None:
        """Store both in one transaction.

        Raises:
            Overtaken: the version that is stored is not `saved.version - 1`; nothing was stored.
        """


class Overtaken(Exception):
    """Another reader has stored its place over this one's: this one is to stop."""


@dataclass
class ReaderPosition:
    """Where a reader stands: the next offset of each partition, and the ids that it has seen, oldest first (ms)."""

    offsets: dict[int, int] = field(default_factory=dict)
    seen: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    def fresh(self, id: bytes | None, bounds: Bounds, now_ms: int) -> bool:
        """Whether an id (None: a record has none) is seen for the first time; from now on it is not."""
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
        """The place as bytes."""
        head = _HEAD.pack(_VERSION, now_ms, len(self.offsets), len(self.seen))
        offsets = b"".join(_OFFSET.pack(*pair) for pair in sorted(self.offsets.items()))
        return head + offsets + b"".join(_SEEN.pack(*pair) for pair in self.seen.items())

    @classmethod
    def decode(cls, raw: bytes, now_ms: int) -> "ReaderPosition":
        """The place of these bytes; the time in which nobody read makes no id older. ValueError for other bytes."""
        try:
            version, saved_ms, offsets, seen = _HEAD.unpack_from(raw)
            ids = _HEAD.size + offsets * _OFFSET.size
            if version != _VERSION or len(raw) != ids + seen * _SEEN.size:
                raise ValueError(f"{len(raw)} bytes of version {version}")
        except (struct.error, ValueError) as error:
            raise ValueError(
                f"no place of version {_VERSION} ({error}): give load() the bytes that commit() got"
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
    """Read a topic from the stored place on, until cancelled or failed.

    Args:
        work: makes results of records, those whose ids were not seen before. It must leave nothing behind: what it
            did is done when `store` has it.
        partitions: which to read; default: all, also those that are added later, from their beginning.
        records_max: how many records one commit is about, at most.
        consumer: further settings of aiokafka's consumer (bootstrap_servers, security_protocol, ...).

    Raises:
        Overtaken: another reader goes on from this one's place.
        aiokafka.errors.OffsetOutOfRangeError: Kafka no longer has what comes next; nothing was skipped.
        whatever `work`, `store` or Kafka raise: call again, it goes on where the store stands.
    """
    wanted = None if partitions is None else frozenset(partitions)
    settings = {**consumer, "isolation_level": "read_committed", "enable_auto_commit": False, "group_id": None}
    async with AIOKafkaConsumer(auto_offset_reset="none", metadata_max_age_ms=METADATA_MS, **settings) as reader:
        saved = await store.load()
        version = 0 if saved is None else saved.version
        place = ReaderPosition() if saved is None else ReaderPosition.decode(saved.place, now_ms())
        while True:
            await _assign(reader, topic, wanted, place)
            batches = await reader.getmany(timeout_ms=POLL_MS, max_records=records_max)
            fresh: list[Record] = []
            for where, records in batches.items():
                fresh += [record for record in records if place.fresh(id_of(record), bounds, now_ms())]
                place.offsets[where.partition] = records[-1].offset + 1
            if fresh:
                version += 1
                await store.commit(await work(fresh), Saved(version, place.encode(now_ms())))


async def _assign(reader: AIOKafkaConsumer, topic: str, wanted: frozenset[int] | None, place: ReaderPosition) -> None:
    """Have the reader stand where the place says, in every wanted partition that there is."""
    there = reader.partitions_for_topic(topic) or await _look_up(reader, topic)
    all_of_them = {TopicPartition(topic, partition) for partition in (there if wanted is None else there & wanted)}
    if all_of_them == reader.assignment():
        return
    reader.assign(sorted(all_of_them))
    for where in all_of_them:
        if where.partition in place.offsets:
            reader.seek(where, place.offsets[where.partition])
        else:
            await reader.seek_to_beginning(where)


async def _look_up(reader: AIOKafkaConsumer, topic: str) -> set[int]:
    """The partitions of a topic that the client has not asked for yet."""
    await reader._client.add_topic(topic)
    return reader.partitions_for_topic(topic) or set()


def id_of(record: Record) -> bytes | None:
    """The event id of a record: that of Fencepost's header, else of its idempotency key, else None."""
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
