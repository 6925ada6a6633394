"""Tests the pure functions of a group: its partitions, records, ledger entries and marks."""

import pytest

from service.claims.states import Delivered, DeliveredBatch, RequestEvent
from service.contract import Guarantee
from service.contract.wire.headers import Stamp, stamp_writer
from service.contract.wire.ids import event_id
from service.contract.wire.ledger_entries import Entry
from service.events.event import event_of
from service.kafka.records import Record, RecordMetadata
from service.kafka.topic_admin import Topic
from service.pipeline.attempt import Attempt
from service.pipeline.decisions import ClaimToRelease
from service.pipeline.group import Group, committed_of, entries_of, records_of, route, rows_to_mark, topic_ids_of
from service.pipeline.request import Committed, WriteRequest
from service.slots.ledger_rows import encode_entries
from service.slots.slot import Slot
from tests.unit.fakes import FakeIdempotent, FakeKeys, make_event


def request(key: str, *topics: str, partition: int | None = None) -> WriteRequest:
    """Make a request of one event, or with several topics an atomic batch."""
    events = [make_event(key, topic, partition=partition) for topic in topics]
    if len(topics) > 1:
        return WriteRequest.for_atomic(events, (b"w" * 16, b"f" * 8), 0.0, 1.0)
    return WriteRequest.for_event(events[0], 0.0, 1.0, Guarantee.EXACTLY_ONCE)


def topic_of(name: str) -> Topic:
    """Return a topic: `ill` has one partition with enough replicas, `down` has none."""
    return Topic(name, 50, {}, {"ill": frozenset(range(50)) - {7}, "down": frozenset(range(50))}.get(name, frozenset()))


def test_events_without_a_key_share_one_partition_of_their_topic() -> None:
    """As in KIP-480: one batch and one marker, instead of fifty."""
    requests = [request(str(n), "orders", "other") for n in range(20)]
    chosen, left_out = route(requests, topic_of)
    assert [topic for topic, _ in chosen] == ["orders", "other"]
    assert {tuple(each.partitions) for each in requests} == {tuple(number for _, number in chosen)}
    assert not left_out


def test_a_partition_is_chosen_among_those_with_enough_replicas() -> None:
    alone, free, whole = request("a", "down"), request("b", "ill"), request("c", "orders", "down")
    fixed = request("d", "ill", partition=8)
    chosen, left_out = route([alone, free, whole, fixed], topic_of)
    assert free.partitions == [7]
    assert ("ill", 7) in chosen
    assert not {("down", 0), ("ill", 8)} & set(chosen)
    assert left_out == {alone: {0: ("down", 0)}, whole: {1: ("down", 0)}, fixed: {0: ("ill", 8)}}


@pytest.mark.parametrize("delivered", [True, False])
@pytest.mark.parametrize(("answered", "goes_round"), [((), False), ((True,), False), ((True, False), True)])
def test_an_attempt_retries_if_it_wrote_nothing_and_has_a_request_to_requeue(
    delivered: bool, answered: tuple[bool, ...], goes_round: bool
) -> None:
    """Each attempt may use up a producer id."""
    claims_to_release = [request("a", "orders") for _ in answered]
    for each, done in zip(claims_to_release, answered, strict=True):
        if done:
            each.move(RequestEvent.ANSWER)
    committed = [(request("b", "orders"), Committed(1, (), replayed=False))] if delivered else []
    slot = Slot(0, FakeKeys(), "ledger", "test", FakeIdempotent())
    attempt = Attempt(slot, Group([request("c", "orders")], 1, 0.0), delivered=committed)
    attempt.not_delivered = [ClaimToRelease(each, []) for each in claims_to_release]
    assert attempt.wrote_nothing_and_retries is (goes_round and not delivered)


TRACE = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"


def test_a_record_has_the_content_of_its_event_and_the_stamp_of_its_writer() -> None:
    event = event_of("k 1", event_id("k 1"), "orders", b"key", b"value", [("b", b"2"), ("a", b"1")], 3, 77, TRACE)
    bare = event_of("k 2", event_id("k 2"), "orders", None, b"", [])
    tombstone = event_of("k 3", event_id("k 3"), "orders", b"key", None, [])
    requests = [WriteRequest.for_event(each, 0.0, 1.0, Guarantee.EXACTLY_ONCE) for each in (event, bare, tombstone)]
    for each, partition in zip(requests, (3, 4, 5), strict=True):
        each.partitions = [partition]
    group = [(each, [1_000 + n]) for n, each in enumerate(requests)]
    topic = Topic("orders", 6, {"max.message.bytes": "4321"})
    first, second, third = records_of(group, lambda _: topic, stamp_writer(5, 6, 7, "me"), 88)
    stamp = Stamp(event.id, event.fp, 1_000, 5, 6, 7, "me").encode()
    headers = [("idempotency-key", b"k 1"), ("fencepost", stamp), ("traceparent", TRACE), ("b", b"2"), ("a", b"1")]
    assert first == Record("orders", 3, b"key", b"value", headers, 77, 4321)
    stamp = Stamp(bare.id, bare.fp, 1_001, 5, 6, 7, "me").encode()
    headers = [("idempotency-key", b"k 2"), ("fencepost", stamp)]
    assert second == Record("orders", 4, None, b"", headers, 88, 4321)
    assert (third.partition, third.key, third.value) == (5, b"key", None)


def test_ledger_entries_and_store_rows_name_each_event_and_each_atomic_batch() -> None:
    single, whole = request("a", "orders"), request("b", "orders", "other")
    single.partitions, whole.partitions = [1], [2, 3]
    group = [(single, [100]), (whole, [200, 200])]
    records = records_of(group, topic_of, stamp_writer(0, 1, 2, "me"), 0)
    delivered = committed_of(group, records, [RecordMetadata(11, 21), RecordMetadata(12, 22), RecordMetadata(13, 23)])
    event, (left, right), id = single.events[0], whole.events, b"w" * 16
    rows = [
        (event.id, Delivered(100, event.fp, "orders", 1, 11, 21)),
        (left.id, Delivered(200, left.fp, "orders", 2, 12, 22)),
        (right.id, Delivered(200, right.fp, "other", 3, 13, 23)),
    ]
    assert delivered == [
        (single, Committed(100, (rows[0],), replayed=False)),
        (whole, Committed(200, tuple(rows[1:]), replayed=False)),
    ]
    assert rows_to_mark(delivered) == [*rows, (id, DeliveredBatch(200, b"f" * 8, 2))]
    assert encode_entries(entries_of(delivered)) == ",".join(
        entry.encode()
        for entry in (
            Entry(event.id, event.fp, 100, "orders", 1, 11, 21),
            Entry(left.id, left.fp, 200, "orders", 2, 12, 22, id, 0),
            Entry(right.id, right.fp, 200, "other", 3, 13, 23, id, 1),
        )
    )


def test_a_ledger_record_names_the_ids_of_its_topics_as_far_as_they_are_known() -> None:
    topics = {name: Topic(name, 1, {}, topic_id=topic_id) for name, topic_id in (("a", "id-a"), ("b", ""), ("c", "x"))}
    records = [Record(name, 0, None, b"1", [], 0, 1000) for name in ("a", "b", "a")]
    assert topic_ids_of(records, topics.__getitem__) == {"a": "id-a"}
