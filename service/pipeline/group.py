"""A group of requests, and the pure steps with it: its partitions, its records, its ledger entries, its marks."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from service.claims.redis_store import Row
from service.claims.states import Delivered, DeliveredBatch
from service.contract import Guarantee
from service.contract.wire import KEY_HEADER, STAMP_HEADER, TRACE_HEADER, encode_stamp
from service.events.event import partition_of
from service.kafka.admin import Topic
from service.kafka.session import Partition, Record, RecordMetadata
from service.pipeline.request import Committed, WriteRequest
from service.slots.ledger_rows import encode_entry

# A request whose claims stand, and the accepted_at of each of its events, in ms.
ClaimedRequest = tuple[WriteRequest, Sequence[int]]
# A written request, and what it is to be answered once it is marked.
CommittedRequest = tuple[WriteRequest, Committed]
# Of a request, the events that are for partitions with too few replicas in sync, by index.
LeftOut = Mapping[WriteRequest, Mapping[int, Partition]]


@dataclass(eq=False, slots=True)
class Group:
    """Requests that one transaction holds, as the queue gives them out. Later ones have higher numbers.

    `started` is by time.monotonic.
    """

    requests: list[WriteRequest]
    number: int
    started: float
    quarantined: bool = False  # it is of a topic that has failed a group

    @property
    def guarantee(self) -> Guarantee:
        return self.requests[0].guarantee

    @property
    def atomic(self) -> bool:
        """Whether it is one atomic batch."""
        return self.requests[0].atomic


def route(
    requests: Iterable[WriteRequest], topic_of: Callable[[str], Topic]
) -> tuple[dict[Partition, None], dict[WriteRequest, dict[int, Partition]]]:
    """Choose the partition of each event of a group; returns those to write to, once, and the events to leave out.

    Those are for partitions with too few replicas in sync. Events without a key share one partition of their topic, as
    in KIP-480, and one that has enough.
    """
    chosen: dict[Partition, None] = {}
    left_out: dict[WriteRequest, dict[int, Partition]] = {}
    sticky: dict[str, int] = {}
    for request in requests:
        request.partitions = partitions = []
        for index, event in enumerate(request.events):
            topic = topic_of(event.topic)
            number = partition_of(event, topic.partitions)
            if number is None:
                if event.topic not in sticky:
                    sticky[event.topic] = _any_partition(topic)
                number = sticky[event.topic]
            partitions.append(number)
            if number in topic.under_min_isr:
                left_out.setdefault(request, {})[index] = event.topic, number
            else:
                chosen[event.topic, number] = None
    return chosen, left_out


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
    for request, accepted in group:
        for event, partition, at in zip(request.events, request.partitions, accepted, strict=True):
            stamp = encode_stamp(event.id, event.fp, at, writer)
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
    for request, accepted in group:
        found = []
        for event, at in zip(request.events, accepted, strict=True):
            record, place = next(rest)
            there = Delivered(at, event.fp, record.topic, record.partition, place.offset, place.timestamp)
            found.append((event.id, there))
        yield request, Committed(accepted[0], tuple(found), replayed=False)


def entries_of(delivered: Iterable[CommittedRequest]) -> Iterator[str]:
    """The ledger's entries of a group, as JSON text."""
    for request, committed in delivered:
        batch = request.asked[0][0] if request.atomic else None
        for i, (id, there) in enumerate(committed.places):
            yield encode_entry(id, there) if batch is None else encode_entry(id, there, batch, i)


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
