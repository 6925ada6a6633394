"""Reads a topic's committed records, each event once, and stores its position with the results.

The results and the reader's position are stored in one transaction of the application's own store:

    class Totals:                                                   # a Store
        async def load(self) -> Saved | None:
            return SELECT version, position
        async def commit(self, results: list[Sale], saved: Saved) -> None:
            BEGIN; INSERT results; UPDATE ... SET version, position WHERE version = saved.version - 1; COMMIT

    await Reader("orders", Totals(), bootstrap_servers="127.0.0.1:9092").follow(work)

The guarantee: the results of an event are stored once, whatever crashes and however often the reader is started again,
if the copies of its id are within the bounds: among the last `ids` ids, and read within `age_s` of each other, not
counting the time in which no reader ran. A reader knows the ids of its own partitions only: readers with positions of
their own do not share ids. All records without an id are passed on.
"""

import hashlib
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from aiokafka import AIOKafkaConsumer
from aiokafka import ConsumerRecord as Record
from aiokafka.structs import TopicPartition

__all__ = [
    "BOUNDS",
    "Bounds",
    "NewerVersion",
    "Overtaken",
    "Reader",
    "ReaderPosition",
    "ReaderStore",
    "Record",
    "Saved",
    "id_of",
]

R = TypeVar("R")
Stored = TypeVar("Stored", contravariant=True)

# Of the wire contract, version 1: the headers of an event's record, and the lengths of an id and of a fingerprint.
KEY_HEADER: Final = "idempotency-key"
STAMP_HEADER: Final = "fencepost"
ID_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 8
_STAMP_VERSION: Final = re.compile(rb"([1-9][0-9]{0,3});")

POLL_MS: Final = 500
# A new partition is found within this time.
METADATA_MS: Final = 60_000
# Settings of the consumer on which the guarantee depends.
_FIXED: Final[Mapping[str, Any]] = {
    "auto_offset_reset": "none",
    "enable_auto_commit": False,
    "group_id": None,
    "isolation_level": "read_committed",
}

_VERSION: Final = 1
_HEAD: Final = struct.Struct(">BQII")
_OFFSET: Final = struct.Struct(">IQ")
_SEEN: Final = struct.Struct(f">{ID_BYTES}sQ")


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


class ReaderStore(Protocol[Stored]):
    """Stores results and position together."""

    async def load(self) -> Saved | None:
        """Return what `commit` stored last, None before the first commit."""

    async def commit(self, results: Stored, saved: Saved) -> None:
        """Store both in one transaction.

        Raises:
            Overtaken: the version that is stored is not `saved.version - 1`; nothing was stored.
        """


class Overtaken(Exception):
    """Another reader has stored its position since: this reader must stop."""


class NewerVersion(Exception):
    """A record has a `fencepost` header of a later version than 1: its id is not known. Update this package."""


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


class Reader(Generic[R]):
    """Reads one topic from a stored position on."""

    def __init__(
        self,
        topic: str,
        store: ReaderStore[R],
        *,
        partitions: Iterable[int] | None = None,
        bounds: Bounds = BOUNDS,
        records_max: int = 500,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        **consumer: Any,
    ) -> None:
        """Prepare a reader; `follow` connects it.

        Args:
            topic: the topic to read.
            store: where results and position are stored together.
            partitions: the partitions to read; default: all, also those that are added later, from their beginning.
            bounds: which ids are remembered.
            records_max: the most records of one commit.
            now_ms: the clock by which ids age, in ms since the epoch.
            consumer: further settings of aiokafka's consumer (bootstrap_servers, security_protocol, ...).

        Raises:
            TypeError: a setting of the consumer is one that the reader sets itself.
        """
        refuse_settings(_FIXED.keys(), consumer)
        self._topic = topic
        self._store = store
        self._partitions = None if partitions is None else frozenset(partitions)
        self._bounds = bounds
        self._records_max = records_max
        self._now_ms = now_ms
        self._settings = {"metadata_max_age_ms": METADATA_MS, **consumer, **_FIXED}

    async def follow(self, work: Callable[[Sequence[Record]], Awaitable[R]]) -> None:
        """Read from the stored position on, until cancelled or failed. Call it again to continue.

        Args:
            work: makes results from records whose ids were not seen before. It must have no effects of its own: its
                results count only once the store has committed them.

        Raises:
            Overtaken: another reader has continued from this position.
            NewerVersion: a newer release of Fencepost has written the next records; nothing was skipped.
            aiokafka.errors.OffsetOutOfRangeError: Kafka no longer has the next record; nothing was skipped.
            Exception: whatever `work`, the store or Kafka raise.
        """
        async with AIOKafkaConsumer(**self._settings) as consumer:
            saved = await self._store.load()
            version = 0 if saved is None else saved.version
            position = ReaderPosition() if saved is None else ReaderPosition.decode(saved.position, self._now_ms())
            while True:
                await self._assign(consumer, position)
                fresh = await self._fetch(consumer, position)
                if fresh:
                    version += 1
                    await self._store.commit(await work(fresh), Saved(version, position.encode(self._now_ms())))

    async def _fetch(self, consumer: AIOKafkaConsumer, position: ReaderPosition) -> list[Record]:
        """Fetch records, move the position past them, and return those whose ids were not seen before."""
        batches = await consumer.getmany(timeout_ms=POLL_MS, max_records=self._records_max)
        fresh: list[Record] = []
        for partition, records in batches.items():
            now_ms = self._now_ms()
            fresh += [record for record in records if position.fresh(id_of(record), self._bounds, now_ms)]
            position.offsets[partition.partition] = records[-1].offset + 1
        return fresh

    async def _assign(self, consumer: AIOKafkaConsumer, position: ReaderPosition) -> None:
        """Assign all wanted partitions that exist to the consumer, and seek to the position in each."""
        numbers = consumer.partitions_for_topic(self._topic) or await _look_up(consumer, self._topic)
        wanted = numbers if self._partitions is None else numbers & self._partitions
        partitions = {TopicPartition(self._topic, number) for number in wanted}
        if partitions == consumer.assignment():
            return
        consumer.assign(sorted(partitions))
        for partition in partitions:
            if partition.partition in position.offsets:
                consumer.seek(partition, position.offsets[partition.partition])
            else:
                await consumer.seek_to_beginning(partition)


def refuse_settings(own: Collection[str], given: Mapping[str, Any]) -> None:
    """Raise TypeError if settings of a consumer are given that its reader sets itself."""
    if refused := sorted(given.keys() & set(own)):
        raise TypeError(f"the reader sets {' and '.join(refused)} itself: leave it out")


async def _look_up(consumer: AIOKafkaConsumer, topic: str) -> set[int]:
    """Find the partitions of a topic that the client's metadata does not include yet."""
    await consumer._client.add_topic(topic)
    return consumer.partitions_for_topic(topic) or set()


def id_of(record: Record) -> bytes | None:
    """Return the event id of a record: from the `fencepost` header, else from its idempotency key, else None.

    Raises NewerVersion.
    """
    headers: dict[str, bytes | None] = {}  # a header's value may be null in Kafka
    for name, content in record.headers:
        headers.setdefault(name, content)
    if (stamp := headers.get(STAMP_HEADER)) is not None and (id := _stamped_id(stamp)) is not None:
        return id
    key = headers.get(KEY_HEADER)
    return hashlib.sha256(b"\0" + key).digest()[:ID_BYTES] if key else None


def _stamped_id(stamp: bytes) -> bytes | None:
    """Return the id in a `fencepost` header; None if it is none of version 1. Raises NewerVersion for a later one."""
    found = _STAMP_VERSION.match(stamp)
    if found is not None and int(found[1]) > 1:
        raise NewerVersion(f"a {STAMP_HEADER} header of version {int(found[1])}: update the package fencepost")
    try:
        version, id_hex, fingerprint_hex, *numbers, _instance = stamp.decode("ascii").split(";")
        id, fingerprint = bytes.fromhex(id_hex), bytes.fromhex(fingerprint_hex)
        # accepted_at, slot, producer id, epoch
        complete = len([int(number) for number in numbers]) == 4
    except ValueError:
        return None
    valid = version == "1" and len(id) == ID_BYTES and len(fingerprint) == FINGERPRINT_BYTES and complete
    return id if valid else None
