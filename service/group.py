"""A group of claimed requests, and the pure steps from it: its records, its ledger entries, its answers, its marks."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from service.event import partition_of
from service.kafka.cluster import Topic
from service.kafka.life import BATCH_BYTES_MAX, Place, Record
from service.keys import Row
from service.request import Committed, Placed, Request
from service.slot import Link
from service.states import Claimed, Delivered, DeliveredBatch
from service.wire import KEY_HEADER, STAMP_HEADER, TRACE_HEADER, Entry, Stamp

# A request, and the claim that stands for it.
Won = tuple[Request, Claimed]
# A written request, and what it is to be answered once it is marked.
Committable = tuple[Request, Committed]
# Slot, producer id, epoch and instance, as a record's stamp names them.
Writer = tuple[int, int, int, str]


class Written(NamedTuple):
    """What became of a claimed group: written and to be marked, and requests whose claims are to be given up."""

    delivered: list[Committable]
    link: Link
    unwanted: list[Request]


def records_of(group: Sequence[Won], topic_of: Callable[[str], Topic], writer: Writer) -> Iterator[Record]:
    """The records of a group, in its order. Events without a key share one partition of their topic, as in KIP-480."""
    now_ms = time.time_ns() // 1_000_000
    sticky: dict[str, int] = {}
    for request, claim in group:
        for event in request.events:
            topic = topic_of(event.topic)
            partition = partition_of(event, topic.partitions)
            if partition is None:
                partition = sticky.setdefault(event.topic, random.randrange(topic.partitions))  # noqa: S311
            stamp = Stamp(event.id, event.fp, claim.at, *writer)
            headers = [(KEY_HEADER, event.key.encode()), (STAMP_HEADER, stamp.encode())]
            if event.traceparent is not None:
                headers.append((TRACE_HEADER, event.traceparent))
            headers += event.headers
            timestamp = now_ms if event.timestamp is None else event.timestamp
            most = min(BATCH_BYTES_MAX, topic.message_bytes_max)
            yield Record(event.topic, partition, event.record_key, event.value, headers, timestamp, most)


def entries_of(group: Sequence[Won], records: Sequence[Record], places: Sequence[Place]) -> Iterator[str]:
    """The ledger's entries of a group whose records are at these places, as JSON text."""
    rest = iter(zip(records, places, strict=True))
    for request, claim in group:
        batch = request.asked[0][0] if request.atomic else None
        for i, event in enumerate(request.events):
            record, (offset, ts) = next(rest)
            member = None if batch is None else i
            entry = Entry(event.id, event.fp, claim.at, event.topic, record.partition, offset, ts, batch, member)
            yield entry.encode()


def placed_all(group: Sequence[Won], records: Sequence[Record], places: Sequence[Place]) -> list[Committable]:
    """What each request of a written group is to be answered: where its events are."""
    rest = iter(zip(records, places, strict=True))
    delivered: list[Committable] = []
    for request, claim in group:
        found = []
        for event in request.events:
            record, (offset, timestamp) = next(rest)
            found.append(Placed(event.id, event.topic, record.partition, offset, timestamp))
        delivered.append((request, Committed(claim.at, tuple(found), replayed=False)))
    return delivered


def placed(id: bytes, state: Delivered) -> Placed:
    """Where an event is, as the store knows it."""
    return Placed(id, state.topic, state.partition, state.offset, state.ts)


def rows_of(request: Request, committed: Committed) -> Iterator[Row]:
    """The states that a committed request leaves in the store: each event's, and the whole's."""
    for event, place in zip(request.events, committed.places, strict=True):
        yield (
            event.id,
            Delivered(committed.at, event.fp, place.topic, place.partition, place.offset, place.timestamp),
        )
    if request.atomic:
        id, fp = request.asked[0]
        yield id, DeliveredBatch(committed.at, fp, len(request.events))
