"""A group of requests, and the pure steps with it: its partitions, what parts, its records, its entries, its marks."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from service import native
from service.claims.redis_store import Row
from service.claims.states import Claim, Claimed, Delivered, DeliveredBatch, Outcome
from service.contract.wire import KEY_HEADER, STAMP_HEADER, TRACE_HEADER, encode_entry, encode_stamp
from service.events.event import partition_of
from service.kafka.admin import Topic
from service.kafka.session import Partition, Record, RecordMetadata
from service.pipeline.request import Committed, WriteRequest
from service.slots.slot import Link

_encode_stamp = native.texts.stamp if native.COMPILED else encode_stamp

# A request, and the claim that stands for it.
ClaimedRequest = tuple[WriteRequest, Claimed]
# A written request, and what it is to be answered once it is marked.
CommittedRequest = tuple[WriteRequest, Committed]


class Written(NamedTuple):
    """What became of a claimed group: written and to be marked, and requests whose claims are to be given up."""

    delivered: list[CommittedRequest]
    link: Link
    claims_to_release: list[WriteRequest]

    @property
    def nothing_written(self) -> bool:
        """Was nothing written, and does some of it go round again? Not at once: each try may cost a producer id."""
        return not self.delivered and any(not request.answered for request in self.claims_to_release)


def route(
    requests: Iterable[WriteRequest], topic_of: Callable[[str], Topic]
) -> tuple[dict[Partition, None], dict[WriteRequest, Partition]]:
    """Choose the partition of each event of a group; answers those to write to, once, and the requests to leave out.

    Those have an event for the partition that is told, which has too few replicas in sync. Events without a key share
    one partition of their topic, as in KIP-480, and one that has enough.
    """
    chosen: dict[Partition, None] = {}
    left_out: dict[WriteRequest, Partition] = {}
    sticky: dict[str, int] = {}
    for request in requests:
        request.partitions = []
        for event in request.events:
            topic = topic_of(event.topic)
            number = partition_of(event, topic.partitions)
            if number is None:
                if event.topic not in sticky:
                    sticky[event.topic] = _any_partition(topic)
                number = sticky[event.topic]
            request.partitions.append(number)
            if number in topic.under_min_isr:
                left_out[request] = event.topic, number
            else:
                chosen[event.topic, number] = None
    return chosen, left_out


def parted(
    requests: Sequence[WriteRequest], whether: Callable[[WriteRequest], bool] = lambda _: True
) -> list[WriteRequest]:
    """The same requests, but for trains in one piece that are to be parted."""
    return [one for each in requests for one in (each.split() if each.is_whole and whether(each) else (each,))]


def part_mixed(requests: list[WriteRequest], claims: Sequence[Claim]) -> list[Claim]:
    """One claim for each request: a train goes on in one piece only if all of it is new, else it is parted here.

    Also one that was answered meanwhile: of it what is claimed now is given up, and nothing else, for another
    request may have claimed the rest in this very term.
    """
    kept: list[WriteRequest] = []
    found: list[Claim] = []
    start = 0
    for request in requests:
        its = claims[start : start + len(request.asked)]
        start += len(its)
        if request.is_whole and any(claim.outcome is not Outcome.NEW for claim in its):
            kept += request.split()
            found += its
        else:
            kept.append(request)
            found.append(its[0])
    requests[:] = kept
    return found


def _any_partition(topic: Topic) -> int:
    """One with enough replicas in sync, if there is one."""
    able = [number for number in range(topic.partitions) if number not in topic.under_min_isr]
    return random.choice(able) if able else 0  # noqa: S311


def records_of(
    group: Sequence[ClaimedRequest], topic_of: Callable[[str], Topic], writer: str, now_ms: int
) -> list[Record]:
    """The records of a group that has its partitions, in its order; `writer` as `stamp_writer` has it.

    `now_ms` is the time of events that came without one.
    """
    records: list[Record] = []
    for request, claim in group:
        for event, partition in zip(request.events, request.partitions, strict=True):
            stamp = _encode_stamp(event.id, event.fp, claim.at, writer)
            headers = [(KEY_HEADER, event.key.encode()), (STAMP_HEADER, stamp)]
            if event.traceparent is not None:
                headers.append((TRACE_HEADER, event.traceparent))
            headers += event.headers
            timestamp = now_ms if event.timestamp is None else event.timestamp
            most = topic_of(event.topic).message_bytes_max
            records.append(Record(event.topic, partition, event.record_key, event.value, headers, timestamp, most))
    return records


def placed_all(
    group: Sequence[ClaimedRequest], records: Sequence[Record], places: Sequence[RecordMetadata]
) -> Iterator[CommittedRequest]:
    """What each request of a group is to be answered whose records are at these places."""
    rest = iter(zip(records, places, strict=True))
    for request, claim in group:
        found = []
        for event in request.events:
            record, place = next(rest)
            there = Delivered(claim.at, event.fp, record.topic, record.partition, place.offset, place.timestamp)
            found.append((event.id, there))
        yield request, Committed(claim.at, tuple(found), replayed=False)


def entries_of(delivered: Iterable[CommittedRequest]) -> Iterator[str]:
    """The ledger's entries of a group, as JSON text."""
    for request, committed in delivered:
        batch = request.asked[0][0] if request.atomic else None
        if native.COMPILED:
            yield from native.texts.entries(committed.places, batch)
            continue
        for i, (id, there) in enumerate(committed.places):
            yield encode_entry(id, there.fp, there.at, there.topic, there.partition, there.offset, there.ts, batch, i)


def topic_ids_of(records: Iterable[Record], topic_of: Callable[[str], Topic]) -> dict[str, str]:
    """The ids of the topics of a group's records, as far as they are known."""
    topics = [topic_of(name) for name in {record.topic for record in records}]
    return {topic.name: topic.topic_id for topic in topics if topic.topic_id}


def rows_of(delivered: Iterable[CommittedRequest]) -> list[Row]:
    """The states that a committed group leaves in the store: each event's, and those of atomic batches as a whole."""
    rows: list[Row] = []
    for request, committed in delivered:
        rows += committed.places
        if request.atomic:
            id, fp = request.asked[0]
            rows.append((id, DeliveredBatch(committed.at, fp, len(request.events))))
    return rows
