"""Tests atomic batches with the offsets of a consumer group: written together, refused, in doubt, and repeated."""

import asyncio
from collections.abc import Awaitable, Sequence

import pytest

from service.claims.states import Delivered, DeliveredBatch, SlotState
from service.contract.wire.ids import batch_fingerprint, event_id
from service.contract.wire.ledger import LedgerRecord, decode_ledger
from service.contract.wire.ledger_entries import CommittedOffset
from service.core.problems import (
    FORBIDDEN_TOPIC,
    KEY_EXPIRED,
    NOT_WRITTEN,
    STALE_MEMBER,
    UNKNOWN_TOPIC,
    Problem,
    StoreUnanswered,
)
from service.core.settings import WAITING_BYTES
from service.events.event import NONE_IS_PLAIN, Event
from service.events.offsets import fingerprint_of
from service.kafka.group_offsets import (
    AWAY,
    NOT_KEPT,
    OFFSETS_TOPIC,
    REFUSALS,
    TOO_FEW_REPLICAS,
    GroupOffsets,
    Position,
)
from service.kafka.outcomes import OffsetsRefused, TransactionFailed, TransactionOutcome
from service.kafka.reader import Item
from service.kafka.topic_admin import Topic
from service.pipeline.request import Committed, WriteRequest, WriteResult
from service.slots.ledger_rows import lowest_offsets, rows_of
from tests.unit.fakes import NOW_MS, World, end_of_term, ended, kind_of, make_event, until

OFFSETS = GroupOffsets("g", "m", 7, (Position("orders", 0, 5), Position("other", 2, 2**40, "seen")))
STALE = OffsetsRefused(REFUSALS[22])
ID = b"w" * 16


def whole_of(events: Sequence[Event]) -> tuple[bytes, bytes]:
    return ID, batch_fingerprint([*(event.fp for event in events), fingerprint_of(OFFSETS)])


async def submit(world: World, *events: Event, key: str = "k") -> WriteResult:
    arrived = asyncio.get_running_loop().time()
    for event in events:
        await world.checks.check(event, arrived)
    await world.checks.check_positions(OFFSETS, arrived)
    whole = whole_of(events) if key == "k" else (event_id(key), whole_of(events)[1])
    return await world.admission.submit_atomic(key, events, whole, arrived, None, OFFSETS)


def last_record(world: World) -> LedgerRecord:
    record = decode_ledger(world.producers[0].ledger[-1])
    assert isinstance(record, LedgerRecord)
    return record


async def test_events_and_offsets_are_in_one_ledger_record() -> None:
    world = World()
    serving = world.serve(await world.slot())
    events = make_event("k/0"), make_event("k/1", "other")
    answer = await submit(world, *events)
    assert isinstance(answer, Committed)
    assert world.producers[0].offsets == [OFFSETS]
    record = last_record(world)
    assert record.offsets is not None
    assert (record.offsets.group, record.offsets.member, record.offsets.generation) == ("g", "m", 7)
    assert record.offsets.positions == [CommittedOffset("orders", 0, 5), CommittedOffset("other", 2, 2**40)]
    assert (record.offsets.batch, record.offsets.fp) == whole_of(events)
    assert (record.offsets.partition, record.offsets.offset) == (3, 50)
    await until(lambda: isinstance(world.keys.server.keys[ID], DeliveredBatch))
    await ended(serving)


async def test_a_recovery_reads_from_the_ledger_what_was_marked() -> None:
    """The states in the store after the mark are those that a replay writes, also of a batch without events."""
    for events in ((make_event("k/0"), make_event("k/1", "kept")), ()):
        world = World()
        serving = world.serve(await world.slot())
        await submit(world, *events)
        await until(lambda world=world: isinstance(world.keys.server.keys[ID], DeliveredBatch))  # type: ignore[misc]
        value = world.producers[0].ledger[-1]
        assert dict(rows_of([Item(0, 1, None, value)])) == world.keys.server.keys
        found = lowest_offsets(value, 0, 1)
        assert found is not None
        assert found[OFFSETS_TOPIC, 3] == 50
        await ended(serving)


async def test_offsets_alone_are_written_once_and_then_answered_as_a_replay() -> None:
    world = World()
    serving = world.serve(await world.slot())
    first, again = await submit(world), await submit(world)
    assert isinstance(first, Committed)
    assert isinstance(again, Committed)
    assert (first.deliveries, first.replayed, again.deliveries, again.replayed) == ((), False, (), True)
    assert first.at == again.at
    assert len(world.producers[0].offsets) == 1
    assert world.queue.events == world.queue.bytes == 0
    await ended(serving)


async def test_a_stale_member_is_refused_alone_and_the_term_goes_on() -> None:
    world = World()
    slot = await world.slot()
    serving, term = world.serve(slot), slot.term
    world.producers[0].trouble.before["offsets"].append(STALE)
    stale = asyncio.create_task(submit(world, make_event("k/0")))
    others = [world.submit(key) for key in "abc"]
    assert kind_of(await stale) is STALE_MEMBER
    assert ID not in world.keys.server.keys  # a retry finds no claim
    assert all(isinstance(other, Committed) for other in await asyncio.gather(*others))
    assert (slot.term, slot.state) == (term, SlotState.READY)
    assert not any(key.startswith("k/") for keys in world.keys_written() for key in keys)
    answer = await submit(world, make_event("k/0"))  # by a member of the new generation
    assert isinstance(answer, Committed)
    assert not answer.replayed
    await ended(serving)


async def test_a_stale_member_is_answered_although_its_claim_cannot_be_released() -> None:
    """The term ends: its recovery frees the claim."""
    world = World()
    slot = await world.slot()
    world.producers[0].trouble.before["offsets"].append(STALE)
    world.keys.trouble.before["release"].append(StoreUnanswered("no answer"))
    stale = asyncio.create_task(submit(world, make_event("k/0")))
    await end_of_term(world.serve(slot))
    assert kind_of(await stale) is STALE_MEMBER
    serving = await world.serve_again(slot)
    assert isinstance(await submit(world, make_event("k/0")), Committed)
    await ended(serving)


async def test_offsets_in_a_failed_transaction_are_sent_again_with_their_events() -> None:
    world = World()
    slot = await world.slot()
    world.producers[0].trouble.before["offsets"].append(TransactionFailed(TransactionOutcome.ABORTED, "no answer"))
    answer = asyncio.create_task(submit(world, make_event("k/0")))
    await end_of_term(world.serve(slot))
    serving = await world.serve_again(slot)
    assert isinstance(await asyncio.wait_for(answer, 1.0), Committed)
    assert world.producers[0].offsets == [OFFSETS]
    await ended(serving)


async def test_a_batch_in_doubt_whose_member_is_stale_by_now_is_answered_by_its_ledger_record() -> None:
    world = World()
    slot = await world.slot()
    event = make_event("k/0")
    world.producers[0].trouble.before["commit"].append(TransactionFailed(TransactionOutcome.UNKNOWN, "no answer"))
    answer = asyncio.create_task(submit(world, event))
    await end_of_term(world.serve(slot))
    world.keys.server.keys[event.id] = Delivered(NOW_MS, event.fp, "orders", 1, 40, NOW_MS)
    world.keys.server.keys[ID] = DeliveredBatch(NOW_MS, whole_of([event])[1], 1)
    await world.recover(slot)
    world.producers[0].trouble.before["offsets"].append(STALE)
    world.writer.unwritten.recovered()
    serving = world.serve(slot)
    found = await asyncio.wait_for(answer, 1.0)
    assert isinstance(found, Committed)
    assert found.deliveries[0][1].offset == 40
    await ended(serving)


@pytest.mark.parametrize("position", [Position("orders", 3, 0), Position("not-there", 0, 0)])
async def test_positions_of_partitions_that_are_not_there_are_refused_before_the_claim(position: Position) -> None:
    world = World()
    with pytest.raises(Problem) as refused:
        await world.checks.check_positions(
            GroupOffsets("g", "m", 1, (OFFSETS.positions[0], position)), asyncio.get_running_loop().time()
        )
    assert refused.value.kind is UNKNOWN_TOPIC
    assert "offsets.positions[1]" in refused.value.detail


async def test_topics_of_positions_are_not_watched_as_topics_with_events_are() -> None:
    """A transaction of another program that hangs there is no matter of the service, and its alert would say so."""
    world = World()
    world.topic_admin.topics[OFFSETS_TOPIC] = Topic(OFFSETS_TOPIC, 3, {})
    arrived = asyncio.get_running_loop().time()
    await world.checks.check_positions(OFFSETS, arrived)
    assert set(world.topic_metadata.names) == {OFFSETS_TOPIC}
    asked = len(world.topic_admin.asked)
    await world.checks.check_positions(OFFSETS, arrived)
    assert len(world.topic_admin.asked) == asked, "the topics are cached"


async def test_a_group_whose_partition_can_get_no_marker_waits() -> None:
    """Its slot could begin no other transaction before the marker of this one is written."""
    world = World()
    for under_min_isr in ({0, 1, 2}, set()):
        world.topic_admin.topics[OFFSETS_TOPIC] = Topic(OFFSETS_TOPIC, 3, {}, frozenset(under_min_isr))
        world.topic_metadata.invalidate(OFFSETS_TOPIC)
        found = kind_of(await problem_or_none(world.checks.check_positions(OFFSETS, asyncio.get_running_loop().time())))
        assert found is (NOT_WRITTEN if under_min_isr else None)


async def test_a_group_whose_coordinator_keeps_no_offsets_is_refused_and_its_slot_recovered() -> None:
    """A slot that went on would wait with its next group for a marker that Kafka cannot write."""
    world = World()
    slot = await world.slot()
    world.topic_admin.topics[OFFSETS_TOPIC] = Topic(OFFSETS_TOPIC, 3, {})
    failed = TransactionFailed(TransactionOutcome.ABORTED, "not kept", offsets_error=NOT_KEPT)
    world.producers[0].trouble.before["offsets"].append(failed)
    answer = asyncio.create_task(submit(world, make_event("k/0")))
    await end_of_term(world.serve(slot))
    found = await asyncio.wait_for(answer, 1.0)
    assert kind_of(found) is NOT_WRITTEN
    assert isinstance(found, Problem)
    assert found.detail == f"offsets: {NOT_KEPT.why}"
    assert not world.keys.server.keys
    world.topic_admin.topics[OFFSETS_TOPIC] = Topic(OFFSETS_TOPIC, 3, {}, frozenset({0, 1, 2}))
    assert kind_of(await problem_or_none(submit(world, make_event("k/0")))) is NOT_WRITTEN  # metadata was dropped
    world.topic_admin.topics[OFFSETS_TOPIC] = Topic(OFFSETS_TOPIC, 3, {})
    world.topic_metadata.invalidate(OFFSETS_TOPIC)
    serving = await world.serve_again(slot)
    assert isinstance(await submit(world, make_event("k/0")), Committed)
    await ended(serving)


async def test_a_batch_that_waited_while_its_group_lost_its_replicas_is_not_begun() -> None:
    world = World()
    slot = await world.slot()
    world.topic_admin.topics[OFFSETS_TOPIC] = Topic(OFFSETS_TOPIC, 3, {})
    answer = asyncio.create_task(submit(world, make_event("k/0")))
    await until(lambda: world.queue.events == 1)
    world.topic_admin.topics[OFFSETS_TOPIC] = Topic(OFFSETS_TOPIC, 3, {}, frozenset({0, 1, 2}))
    world.topic_metadata.invalidate(OFFSETS_TOPIC)
    await world.topic_metadata.refresh([OFFSETS_TOPIC])  # as another batch's admission has it
    serving = world.serve(slot)
    found = await asyncio.wait_for(answer, 1.0)
    assert isinstance(found, Problem)
    assert (found.kind, found.detail) == (NOT_WRITTEN, f"offsets: {TOO_FEW_REPLICAS.why}")
    assert world.producers[0].leader_asked == []
    assert world.producers[0].begun_early is None
    await ended(serving)


async def test_a_group_whose_coordinator_hangs_is_isolated_until_the_coordinator_answers() -> None:
    world = World()
    serving = world.serve(await world.slot())
    trouble = world.producers[0].trouble
    trouble.before["offsets"].append(OffsetsRefused(AWAY))
    assert kind_of(await submit(world, make_event("k/0"))) is NOT_WRITTEN
    trouble.before["offsets"].append(OffsetsRefused(AWAY))
    gate = trouble.hold("offsets")
    hanging = [asyncio.create_task(submit(world, make_event(f"{key}/0"), key=key)) for key in "xy"]
    await until(lambda: len(world.producers[0].leader_asked) == 2)
    assert not world.queue.take()  # one batch of the group at a time, although another one waits
    gate.set()
    answers = await asyncio.gather(*hanging)
    assert sorted(str(kind_of(each)) for each in answers) == sorted([str(NOT_WRITTEN), str(None)])
    assert world.producers[0].leader_asked == [False, True, True]
    await until(lambda: not world.queue.is_isolated([OFFSETS.isolation_name]))
    await submit(world, make_event("z/0"), key="z")
    assert world.producers[0].leader_asked[-1] is False
    await ended(serving)


async def test_an_answer_of_the_coordinator_ends_the_isolation_of_its_group() -> None:
    world = World()
    serving = world.serve(await world.slot())
    for refused in (OffsetsRefused(AWAY), STALE):
        world.producers[0].trouble.before["offsets"].append(refused)
        await submit(world, key=str(refused.error.kind))
        assert world.queue.is_isolated([OFFSETS.isolation_name]) is (refused is not STALE)
    await ended(serving)


async def test_the_topic_of_offsets_is_closed_to_events_and_positions_when_it_is_known() -> None:
    """The check of a group's partition looks the topic up."""
    world = World()
    arrived = asyncio.get_running_loop().time()
    world.topic_admin.topics[OFFSETS_TOPIC] = Topic(OFFSETS_TOPIC, 3, {})
    await world.checks.check_positions(OFFSETS, arrived)
    assert world.topic_metadata.cached(OFFSETS_TOPIC) is not None
    position = Position(OFFSETS_TOPIC, 0, 1)
    for checking in (
        world.checks.check(make_event("k", OFFSETS_TOPIC), arrived),
        world.checks.check_positions(GroupOffsets("g", "m", 1, (position,)), arrived),
    ):
        assert kind_of(await problem_or_none(checking)) is FORBIDDEN_TOPIC
    assert world.checks.plain_bytes_max(OFFSETS_TOPIC) == NONE_IS_PLAIN


async def problem_or_none(checking: Awaitable[object]) -> WriteResult:
    try:
        await checking
    except Problem as problem:
        return problem
    return Committed(0, (), replayed=False)


async def test_an_old_key_of_offsets_alone_is_refused() -> None:
    """Its batch may be forgotten: to commit it again would move the group back."""
    world = World()
    await world.slot()
    with pytest.raises(Problem) as refused:
        await submit(world, key="01890000-0000-7000-8000-000000000000")
    assert refused.value.kind is KEY_EXPIRED


def test_a_request_without_events_has_a_size_and_ledger_bytes() -> None:
    request = WriteRequest.for_atomic((), whole_of(()), 0.0, 1.0, offsets=OFFSETS)
    assert request.atomic
    assert request.size > WAITING_BYTES
    assert request.ledger_bytes >= 2 * len("orders")
    assert (request.is_refused, request.topics, request.named) == (False, set(), {"id": ID.hex()})
