"""A group of requests, and functions without I/O that make its partitions, records, ledger entries and marks."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from msgspec.structs import replace

from service.claims.states import Delivered, DeliveredBatch, Row
from service.contract import Guarantee
from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER, TRACE_HEADER, encode_stamp, stamp_end
from service.contract.wire.ledger_entries import CommittedOffset, LedgerOffsets
from service.events.dead_letters import DeadLetter
from service.events.event import Event, partition_of
from service.kafka.group_offsets import OFFSETS_TOPIC, GroupOffsets, partition_of_group
from service.kafka.hanging import RecordCoordinates
from service.kafka.metadata import Partition
from service.kafka.records import Record, RecordMetadata
from service.kafka.topic_admin import Topic
from service.pipeline.request import Committed, Delivery, WriteRequest
from service.slots.ledger_rows import LedgerEntry

# A request whose claims stand, and the accepted_at (ms since the Unix epoch) of each of its events; one without events.
ClaimedRequest = tuple[WriteRequest, Sequence[int]]
# A written request, and its result, which is given after the mark.
CommittedRequest = tuple[WriteRequest, Committed]
# By request: the indexes of its events for partitions with too few replicas in sync, and those partitions.
LeftOut = Mapping[WriteRequest, Mapping[int, Partition]]


@dataclass(eq=False, slots=True)
class Group:
    """Requests of one transaction, as the queue gives them out. `number` grows; `started` is time.monotonic."""

    requests: list[WriteRequest]
    number: int
    started: float
    isolated: bool = False  # whether its topic has failed a group
    guarantee: Guarantee = field(init=False)  # of all its requests
    atomic: bool = field(init=False)  # whether the group is one atomic batch
    offsets: GroupOffsets | None = field(init=False)  # of a consumer group, to commit with its one atomic batch

    def __post_init__(self) -> None:
        first = self.requests[0]
        self.guarantee, self.atomic, self.offsets = first.guarantee, first.atomic, first.offsets

    @property
    def size(self) -> int:
        """The number of its events."""
        return sum([len(request.events) for request in self.requests])

    @property
    def event_bytes(self) -> int:
        """The bytes of its events."""
        return sum([request.event_bytes for request in self.requests])

    @property
    def ledger_bytes(self) -> int:
        """The bytes of its ledger entries."""
        return sum([request.ledger_bytes for request in self.requests])


def route(
    requests: Iterable[WriteRequest], topic_of: Callable[[str], Topic], offsets_topic: Topic | None = None
) -> tuple[dict[Partition, None], dict[WriteRequest, dict[int, Partition]]]:
    """Choose the partition of each event of a group. Returns the partitions to write to, and the events to leave out.

    Events are left out if their partition has too few replicas in sync, and a batch with the offsets of a consumer
    group if the group's partition of `offsets_topic` has, as far as that is known. Events without a key share one
    partition of their topic (KIP-480), one with enough replicas if there is any.
    """
    chosen: dict[Partition, None] = {}
    left_out: dict[WriteRequest, dict[int, Partition]] = {}
    sticky: dict[str, int] = {}
    for request in requests:
        if request.offsets is not None and offsets_topic is not None:
            of_group = partition_of_group(request.offsets.group, offsets_topic.partitions)
            if of_group in offsets_topic.under_min_isr:
                left_out[request] = {0: (OFFSETS_TOPIC, of_group)}
                continue
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
    """Choose a random partition with enough replicas in sync; partition 0 if there is none."""
    able = [number for number in range(topic.partitions) if number not in topic.under_min_isr]
    return random.choice(able) if able else 0  # noqa: S311


def records_of(
    group: Sequence[ClaimedRequest], topic_of: Callable[[str], Topic], writer: str, now_ms: int
) -> list[Record]:
    """Make the records of a group whose partitions are chosen, in its order. `writer` comes from `stamp_writer`.

    `now_ms` is the timestamp of events without one, ms since the Unix epoch.
    """
    records: list[Record] = []
    name, most = "", 0
    accepted_at, same_for_all = -1, ""
    for request, accepted_ats in group:
        if not request.events:
            continue
        for event, partition, at in zip(request.events, request.partitions, accepted_ats, strict=True):
            if at != accepted_at:
                accepted_at, same_for_all = at, stamp_end(at, writer)
            if event.topic != name:
                name, most = event.topic, topic_of(event.topic).message_bytes_max
            # The audit computes the fingerprint of each record, so its header has that of the encoded key and value.
            fp = event.fp if event.encoded is None else event.encoded.fp
            headers = [
                (KEY_HEADER, event.key.encode()),
                (STAMP_HEADER, encode_stamp(event.id, fp, same_for_all)),
            ]
            if event.traceparent is not None:
                headers.append((TRACE_HEADER, event.traceparent))
            headers += event.headers
            timestamp = now_ms if event.timestamp is None else event.timestamp
            records.append(Record(name, partition, event.record_key, event.value, headers, timestamp, most))
    return records


def committed_of(
    group: Sequence[ClaimedRequest], records: Sequence[Record], metadata: Sequence[RecordMetadata]
) -> list[CommittedRequest]:
    """Make the result of each request of a group from its records and their metadata."""
    committed: list[CommittedRequest] = []
    written = zip(records, metadata, strict=True)
    for request, accepted_ats in group:
        if not request.events:
            committed.append((request, Committed(accepted_ats[0], (), replayed=False)))
            continue
        its_own = islice(written, len(request.events))
        ttl_s = request.ttl_s
        deliveries = tuple(
            [
                (event.id, Delivered(at, event.fp, to.topic, to.partition, result.offset, result.timestamp, ttl_s))
                for event, at, (to, result) in zip(request.events, accepted_ats, its_own, strict=True)
            ]
        )
        if request.is_refused:
            deliveries = _with_refusals(request.events, deliveries)
        committed.append((request, Committed(accepted_ats[0], deliveries, replayed=False)))
    return committed


def _with_refusals(letters: Sequence[Event], deliveries: Sequence[Delivery]) -> tuple[Delivery, ...]:
    """Add to the deliveries of dead letters why they were refused."""
    pairs = zip(letters, deliveries, strict=True)
    return tuple(
        [
            (id, replace(state, refused=event.refused if isinstance(event, DeadLetter) else ""))
            for event, (id, state) in pairs
        ]
    )


def entries_of(written: Iterable[CommittedRequest]) -> list[LedgerEntry]:
    """Make the ledger entries of a group; those of an atomic batch have the batch's id and their index in it."""
    entries: list[LedgerEntry] = []
    for request, committed in written:
        batch = request.id.hex() if request.atomic else None
        entries += [
            LedgerEntry(
                id.hex(),
                state.fp.hex(),
                state.at,
                state.topic,
                state.partition,
                state.offset,
                state.ts,
                batch,
                i if batch else None,
                state.ttl_s,
                state.refused,
            )
            for i, (id, state) in enumerate(committed.deliveries)
        ]
    return entries


def ledger_offsets_of(written: Sequence[CommittedRequest], first_record: RecordCoordinates | None) -> LedgerOffsets:
    """Make the part of a ledger record that names the offsets of a group, of the one batch that was written.

    `first_record` is where the transaction begins in the partition with the group's offsets, if that is known.
    """
    ((request, committed),) = written
    offsets = request.offsets
    assert offsets is not None
    id, fp = request.to_claim[0]
    return LedgerOffsets(
        id,
        fp,
        committed.at,
        offsets.group,
        offsets.member,
        offsets.generation,
        [CommittedOffset(each.topic, each.partition, each.offset) for each in offsets.positions],
        None if first_record is None else first_record.partition[1],
        None if first_record is None else first_record.offset,
        request.ttl_s,
    )


def topic_ids_of(records: Iterable[Record], topic_of: Callable[[str], Topic]) -> dict[str, str]:
    """Find the known ids of the records' topics, by topic name."""
    topics = [topic_of(name) for name in {record.topic for record in records}]
    return {topic.name: topic.topic_id for topic in topics if topic.topic_id}


def rows_to_mark(written: Iterable[CommittedRequest]) -> list[Row]:
    """Make the (id, state) rows of a committed group: one for each event, and one for an atomic batch as a whole."""
    rows: list[Row] = []
    for request, committed in written:
        rows += committed.deliveries
        if request.atomic:
            id, fp = request.to_claim[0]
            rows.append((id, DeliveredBatch(committed.at, fp, len(request.events), request.ttl_s)))
    return rows
