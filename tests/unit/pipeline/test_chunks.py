"""Tests chunks of a batch: their events are written together in order, and in parts if one of them fails."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
import pytest

from service.claims.states import Claimed, Delivered, RequestState
from service.contract import Guarantee
from service.contract.wire.headers import KEY_HEADER
from service.contract.wire.ids import event_id
from service.core.problems import (
    FINGERPRINT_MISMATCH,
    IN_PROGRESS,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    RECORD_REFUSED,
    TOO_LARGE,
    UNKNOWN_TOPIC,
    StoreAway,
    StoreLost,
    StoreUnanswered,
)
from service.core.settings import Settings
from service.events.event import Event
from service.kafka.metadata import Partition
from service.kafka.outcomes import RecordError, TransactionFailed, TransactionOutcome
from service.kafka.records import NOT_SENT, Record, RecordMetadata
from service.kafka.topic_admin import Topic
from service.pipeline import queue as queue_module
from service.pipeline.queue import Queue
from service.pipeline.request import (
    CHUNK_EVENTS_BESIDE_SINGLE,
    CHUNK_EVENTS_MAX,
    BatchChunk,
    Committed,
    WriteRequest,
    WriteResult,
)
from tests.unit.fakes import (
    GENERATION,
    KEPT_S,
    NOW_MS,
    FakeProducer,
    World,
    end_of_term,
    ended,
    kind_of,
    make_event,
    steps,
    until,
)

NO = RecordError(RECORD_REFUSED, "no")


async def on_its_way(world: World, *events: Event | str) -> "asyncio.Task[list[WriteResult]]":
    """Submit a chunk of these events (or keys), up to the queue."""
    chunk = BatchChunk()
    for event in events:
        chunk.add(make_event(event) if isinstance(event, str) else event)
        await world.topic_metadata.get(chunk.events[-1].topic, time.monotonic())
    task = asyncio.create_task(world.admission.submit_chunk(chunk))
    await asyncio.sleep(0)
    return task


def room(chunk: BatchChunk) -> int:
    """Count the events that a chunk takes."""
    while chunk.add(make_event(str(len(chunk.events)))):
        pass
    return len(chunk.events)


async def test_a_chunk_is_smaller_beside_a_single_event() -> None:
    """A POST beside it waits for the steps of the chunk. Other chunks do not count, nor events split off from them."""
    world = World()
    serving = world.serve(await world.slot())
    sweeping = asyncio.create_task(world.resolver.sweep())
    await (await on_its_way(world, "a", "b"))
    await (await on_its_way(world, "b", "c"))  # the repeated one is answered by itself
    on_their_way = await on_its_way(world, "d", "e")
    assert room(world.admission.new_chunk()) == CHUNK_EVENTS_MAX
    result = world.admission.submit(make_event("f"), time.monotonic())
    assert room(world.admission.new_chunk()) == CHUNK_EVENTS_BESIDE_SINGLE
    await on_their_way
    assert isinstance(await result, Committed)
    await until(lambda: room(world.admission.new_chunk()) == CHUNK_EVENTS_MAX)
    await ended(serving)
    await ended(sweeping)


def problems(answers: Sequence[WriteResult]) -> list[str | None]:
    return [None if kind is None else kind.code for kind in map(kind_of, answers)]


def offsets(answers: Sequence[WriteResult]) -> list[int]:
    return [answer.deliveries[0][1].offset for answer in answers if isinstance(answer, Committed)]


def key_of(record: Record) -> str:
    return dict(record.headers)[KEY_HEADER].decode()


def fails(
    monkeypatch: pytest.MonkeyPatch, of: Callable[[Sequence[Record]], TransactionFailed | None]
) -> list[list[str]]:
    """Let transactions fail as `of` says; returns the keys of each attempt."""
    tried: list[list[str]] = []
    send = FakeProducer.send

    async def met(producer: FakeProducer, records: Sequence[Record], ledger: Partition) -> list[RecordMetadata]:
        if records:
            tried.append([key_of(record) for record in records])
            if failure := of(records):
                raise failure
        return await send(producer, records, ledger)

    monkeypatch.setattr(FakeProducer, "send", met)
    return tried


async def live(world: World, n: int = 0) -> None:
    """Serve a slot, and again after each term that ends."""
    slot = await world.slot(n)
    while True:
        try:
            await world.writer.serve(slot)
        except TransactionFailed:
            await world.recover(slot)
            world.writer.unwritten.recovered()


async def test_a_chunk_is_one_request_in_the_queue_and_has_a_result_for_each_event() -> None:
    world = World()
    submitted = await on_its_way(world, "a", "b", make_event("c", "other"))
    assert world.queue.events == 3
    assert [len(request.events) for request in world.queue._waiting[Guarantee.EXACTLY_ONCE]] == [3]
    serving = world.serve(await world.slot())
    answers = await submitted
    assert world.keys_written() == [["a", "b", "c"]]
    assert world.journal.answers == [("a", 201), ("b", 201), ("c", 201)]
    assert [answer.deliveries[0][0] for answer in answers if isinstance(answer, Committed)] == [*map(event_id, "abc")]
    assert [len(answer.deliveries) for answer in answers if isinstance(answer, Committed)] == [1, 1, 1]
    assert all(world.keys.is_delivered(key) for key in "abc")
    assert (world.queue.events, world.queue.bytes) == (0, 0)
    page = world.telemetry.render()
    assert b'fencepost_answers_total{code="",status="201"} 3.0' in page
    assert b'request_seconds_count{outcome="ok"} 3.0' in page
    await ended(serving)


# ---------------------------------------------------------------------------------------------------------- claims


async def test_events_with_a_known_key_get_that_result_and_the_other_events_are_written_together() -> None:
    """Delivered, another event under its key, in progress elsewhere."""
    world = World()
    serving = world.serve(await world.slot())
    before = (await (await on_its_way(world, "b", "c")))[0]
    world.keys.server.keys[event_id("d")] = Claimed(5, 50, NOW_MS, b"f" * 8)
    world.keys.server.freed[5] = 50
    answers = await (await on_its_way(world, "a", "b", make_event("c", value=b"2"), "d", "e"))
    assert problems(answers) == [None, None, FINGERPRINT_MISMATCH.code, IN_PROGRESS.code, None]
    assert isinstance(before, Committed)
    assert answers[1] == msgspec.structs.replace(before, replayed=True)
    assert world.keys_written() == [["b", "c"], ["a", "e"]]
    assert (world.queue.events, world.queue.bytes) == (0, 0)
    assert world.journal.answers[2:] == [("b", 201), ("c", 422), ("d", 409), ("a", 201), ("e", 201)]
    await ended(serving)


async def test_a_chunk_that_was_written_already_is_answered_as_replayed_and_not_written_again() -> None:
    world = World()
    serving = world.serve(await world.slot())
    first = await (await on_its_way(world, "a", "b"))
    again = await (await on_its_way(world, "a", "b"))
    assert again == [msgspec.structs.replace(each, replayed=True) for each in first if isinstance(each, Committed)]
    assert world.keys_written() == [["a", "b"]]
    assert (world.queue.events, world.queue.bytes) == (0, 0)
    await ended(serving)


async def test_claims_that_are_taken_over_keep_their_times() -> None:
    world = World()
    for key, at in (("a", NOW_MS - 5), ("b", NOW_MS - 7)):
        world.keys.server.keys[event_id(key)] = Claimed(5, 50, at, make_event(key).fp)
    world.keys.server.freed[5] = 51
    serving = world.serve(await world.slot())
    answers = await (await on_its_way(world, "a", "b", "c"))
    assert [answer.at for answer in answers if isinstance(answer, Committed)] == [NOW_MS - 5, NOW_MS - 7, NOW_MS]
    assert world.keys_written() == [["a", "b", "c"]]
    await ended(serving)


@pytest.mark.parametrize("known", ["delivered", "nothing"])
async def test_a_chunk_that_is_answered_during_its_claim_releases_all_its_claims(known: str) -> None:
    world = World(request_timeout_ms=50)
    slot = await world.slot()
    serving = world.serve(slot)
    if known == "delivered":
        await (await on_its_way(world, "b"))
    gate = world.keys.trouble.hold("claim")
    submitted = await on_its_way(world, "a", "b", "c")
    assert problems(await submitted) == [NOT_WRITTEN.code] * 3
    gate.set()
    await world.keys.trouble.reached["release"].wait()
    await until(lambda: not any(world.keys.is_claimed(key) for key in "abc"))
    assert world.keys.is_delivered("b") is (known == "delivered")
    assert world.keys_written() == ([["b"]] if known == "delivered" else [])
    assert (world.queue.events, world.queue.bytes) == (0, 0)
    await ended(serving)


async def test_a_partition_with_too_few_replicas_refuses_its_own_events_only() -> None:
    world = World()
    world.topic_admin.topics["other"] = Topic("other", 1, {}, frozenset({0}))
    serving = world.serve(await world.slot())
    answers = await (await on_its_way(world, "a", make_event("b", "other"), "c"))
    assert problems(answers) == [None, NOT_WRITTEN.code, None]
    assert world.keys_written() == [["a", "c"]]
    assert not world.keys.is_claimed("b")
    await ended(serving)


async def test_a_chunk_stays_whole_when_the_store_is_away() -> None:
    world = World()
    world.keys.trouble.before["claim"].append(StoreAway("OOM"))
    serving = world.serve(await world.slot())
    answers = await (await on_its_way(world, "a", "b"))
    assert problems(answers) == [None, None]
    assert world.keys_written() == [["a", "b"]]
    await ended(serving)


async def test_a_full_store_holds_up_the_whole_chunk_and_gives_nothing_away() -> None:
    """The store takes over a dead claim and makes no new one; alone, the second event would overtake the first."""
    world = World()
    world.keys.server.keys[event_id("b")] = Claimed(5, 50, NOW_MS, make_event("b").fp)
    world.keys.server.freed[5] = 51
    world.keys.server.full = True
    serving = world.serve(await world.slot())
    submitted = await on_its_way(world, "a", "b")
    await asyncio.sleep(0.05)
    assert world.keys_written() == []
    world.keys.server.full = False
    assert problems(await submitted) == [None, None]
    assert world.keys_written() == [["a", "b"]]
    await ended(serving)


async def test_a_claim_without_an_answer_waits_for_the_recovery_whole() -> None:
    """Its own claims stand then, in an ended term: they are found dead, and taken over."""
    world = World()
    slot = await world.slot()
    world.keys.trouble.after["claim"].append(StoreUnanswered("no answer"))
    submitted = await on_its_way(world, "a", "b")
    await end_of_term(world.serve(slot))
    assert [request.claimants for request in world.writer.unwritten.parked] == [((0, slot.term),)]
    serving = await world.serve_again(slot)
    assert problems(await submitted) == [None, None]
    assert world.keys_written() == [["a", "b"]]
    await ended(serving)


async def test_a_chunk_that_meets_its_own_unanswered_claims_waits_for_the_recovery() -> None:
    """Another slot finds them: they wait for the recovery, and are not answered 409."""
    world = World()
    first, second = await world.slot(0), await world.slot(1)
    world.keys.trouble.after["claim"].append(StoreUnanswered("no answer"))
    submitted = await on_its_way(world, "a", "b")
    await end_of_term(world.serve(first))
    serving = world.serve(second)
    world.writer.unwritten.recovered()  # another slot was
    await asyncio.sleep(0.05)
    assert not submitted.done()
    await world.recover(first)
    world.writer.unwritten.recovered()
    assert problems(await submitted) == [None, None]
    await ended(serving)


async def test_an_event_in_doubt_holds_up_the_later_events_of_its_chunk() -> None:
    """The claim of the middle event gets no reply; later its key can be claimed, and those beside it not yet."""
    world = World()
    first, second = await world.slot(0), await world.slot(1)
    events = [make_event(key, partition=0) for key in "abc"]
    world.keys.server.keys[event_id("b")] = Claimed(5, 50, NOW_MS, events[1].fp)
    world.keys.server.freed[5] = 50
    world.keys.trouble.after["claim"].append(StoreUnanswered("no answer"))
    submitted = await on_its_way(world, *events)
    await end_of_term(world.serve(first))
    world.keys.server.freed[5] = 51  # the holder of b is dead
    serving = world.serve(second)
    world.writer.unwritten.recovered()
    await asyncio.sleep(0.05)
    assert world.keys_written(1) == []  # b would be before a
    assert not world.keys.is_claimed("b")
    await world.recover(first)
    world.writer.unwritten.recovered()
    answers = await submitted
    assert len(offsets(answers)) == 3
    assert offsets(answers) == sorted(offsets(answers))
    await ended(serving)


@pytest.mark.parametrize("error", [StoreUnanswered("no answer"), StoreAway("OOM"), StoreLost("another"), None])
@pytest.mark.parametrize("step", ["write", "abandon"])
async def test_a_chunk_that_is_held_up_when_the_term_ends_waits_for_the_recovery(
    step: str, error: Exception | None
) -> None:
    """It waits for a recovery; if its claim cannot be released, the claim is its own."""
    world = World()
    slot = await world.slot()
    world.producers[0].trouble.before[step].append(TransactionFailed(TransactionOutcome.UNKNOWN, "gone"))
    if error is not None:
        world.keys.trouble.before["release"].append(error)
    submitted = await on_its_way(world, "a", "b")
    (chunk,) = world.queue._waiting[Guarantee.EXACTLY_ONCE]
    # The own claim of the first, in an ended term whose slot is not recovered yet.
    chunk.claimants = ((5, 50),)
    world.keys.server.freed[5] = 50
    await world.keys.claim(GENERATION, 5, 50, chunk.to_claim[:1])
    other = await on_its_way(world, "z") if step == "write" else None
    assert isinstance(await end_of_term(world.serve(slot)), TransactionFailed)
    assert chunk in world.writer.unwritten.parked
    assert chunk.claimants == (((5, 50),) if error is None else ((5, 50), (slot.n, slot.term)))
    assert world.keys.is_claimed("b") is (error is not None)
    world.keys.server.freed[5] = 51
    serving = await world.serve_again(slot)
    assert problems(await submitted) == [None, None]
    if other is not None:
        assert problems(await other) == [None]
    await ended(serving)


@pytest.mark.parametrize("mark", ["slow", "failed"])
async def test_a_claim_of_another_request_in_the_same_term_is_not_given_up(mark: str) -> None:
    """A key of the chunk has just been committed by the same slot, and is not marked yet.

    The chunk is answered while it is claimed. If that key were released with the chunk's own claims, it would be
    written again.
    """
    world = World(request_timeout_ms=100)
    sweeping = asyncio.create_task(world.resolver.sweep())
    serving = world.serve(await world.slot())
    marking = None
    if mark == "slow":
        marking = world.keys.trouble.hold("mark")
    else:
        world.keys.trouble.before["mark"].append(StoreUnanswered("no answer"))
    first = world.submit("b")
    await world.keys.trouble.reached["mark"].wait()
    gate = world.keys.trouble.hold("claim")
    assert problems(await (await on_its_way(world, "a", "b"))) == [NOT_WRITTEN.code] * 2
    world.keys.trouble.gates.pop("claim")
    gate.set()
    await world.keys.trouble.reached["release"].wait()
    await until(lambda: not world.keys.is_claimed("a"))
    assert world.keys.is_claimed("b")
    again = world.submit("b")
    if marking is not None:
        await asyncio.sleep(0.02)
        marking.set()
    await asyncio.gather(first, again)
    assert world.keys_written() == [["b"]]
    await ended(serving)
    await ended(sweeping)


# ------------------------------------------------------------------------------------------------------ in doubt


@pytest.mark.parametrize("committed", [False, True])
async def test_a_chunk_in_doubt_is_found_or_written_after_the_recovery(committed: bool) -> None:
    world = World()
    slot = await world.slot()
    world.producers[0].trouble.before["write"].append(TransactionFailed(TransactionOutcome.UNKNOWN, "gone"))
    submitted = await on_its_way(world, "a", "b")
    await end_of_term(world.serve(slot))
    assert not submitted.done()
    await world.recover(slot)
    if committed:  # as a recovery finds in the ledger
        for offset, key in enumerate("ab"):
            found = Delivered(NOW_MS, make_event(key).fp, "orders", 0, offset, NOW_MS)
            world.keys.server.keys[event_id(key)] = found
    world.writer.unwritten.recovered()
    serving = world.serve(slot)
    answers = await submitted
    assert problems(answers) == [None, None]
    assert [answer.replayed for answer in answers if isinstance(answer, Committed)] == [False, False]
    assert world.keys_written() == ([] if committed else [["a", "b"]])
    await ended(serving)


async def test_a_chunk_keeps_its_order_while_its_first_half_is_in_doubt() -> None:
    """The whole chunk fails, and then its first half is in doubt: the second half must not overtake it."""
    world = World()
    first, second = await world.slot(0), await world.slot(1)
    for n, verdict in enumerate([TransactionOutcome.ABORTED, TransactionOutcome.UNKNOWN]):
        stuck = TransactionFailed(verdict, "TimeoutError()", stuck={"orders"})
        world.producers[n].trouble.before["write"].append(stuck)
    submitted = await on_its_way(world, "a", "b")
    await end_of_term(world.serve(first))
    await world.recover(first)
    world.writer.unwritten.recovered()
    await end_of_term(world.serve(second))  # in which the first event hangs alone
    serving = world.serve(first)
    await asyncio.sleep(0.05)
    assert world.keys_written(0) == []
    await world.recover(second)
    world.writer.unwritten.recovered()
    one, two = offsets(await submitted)
    assert one < two
    await ended(serving)


async def test_at_its_deadline_a_waiting_chunk_is_503_and_a_chunk_in_a_transaction_504_for_each_event() -> None:
    """A waiting chunk is not written; the outcome of one in a transaction is unknown."""
    world = World(request_timeout_ms=50)
    assert problems(await (await on_its_way(world, "a", "b"))) == [NOT_WRITTEN.code] * 2
    slot = await world.slot()
    gate = world.producers[0].trouble.hold("write")
    serving = world.serve(slot)
    submitted = await on_its_way(world, "c", "d")
    assert problems(await submitted) == [OUTCOME_UNKNOWN.code] * 2
    assert world.journal.answers == [("a", 503), ("b", 503), ("c", 504), ("d", 504)]
    gate.set()
    await until(lambda: world.keys.is_delivered("d"))
    assert (world.queue.events, world.queue.bytes) == (0, 0)
    await ended(serving)


# ------------------------------------------------------------------------------------------------------- in parts


@pytest.mark.parametrize("place", [0, 21, 63])
async def test_a_poisoned_event_is_found_by_bisection_and_the_other_events_are_written_in_order(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    keys = [f"k{n}" for n in range(64)]
    failed = TransactionFailed(TransactionOutcome.ABORTED, "no", {"orders": NO})
    tried = fails(monkeypatch, lambda records: failed if keys[place] in map(key_of, records) else None)
    serving = asyncio.create_task(live(world))
    answers = await (await on_its_way(world, *[make_event(key, partition=0) for key in keys]))
    assert problems(answers) == [RECORD_REFUSED.code if n == place else None for n in range(64)]
    assert len([each for each in tried if keys[place] in each]) == 7, "log₂ 64, and the event itself"
    assert len(tried) <= 13
    assert [key for each in tried if keys[place] not in each for key in each] == keys[:place] + keys[place + 1 :]
    assert [len(each.deliveries) for each in answers if isinstance(each, Committed)] == [1] * 63
    assert not world.keys.is_claimed(keys[place])
    assert (world.queue.events, world.queue.bytes) == (0, 0)
    await ended(serving)


async def test_a_failing_topic_does_not_hold_up_the_other_topics_of_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    stuck = TransactionFailed(TransactionOutcome.ABORTED, "TimeoutError()", stuck={"other"})
    tried = fails(monkeypatch, lambda records: stuck if any(each.topic == "other" for each in records) else None)
    serving = asyncio.create_task(live(world))
    submitted = await on_its_way(world, "a", make_event("x", "other"), "c", make_event("y", "other"))
    await until(lambda: world.keys.is_delivered("c"))
    assert not submitted.done()
    assert tried[:2] == [["a", "x", "c", "y"], ["a", "c"]]
    monkeypatch.undo()
    answers = await submitted
    assert problems(answers) == [None] * 4
    await ended(serving)


async def test_a_chunk_from_a_failed_group_is_tried_alone_before_it_is_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    failed = TransactionFailed(TransactionOutcome.ABORTED, "no", {"orders": NO})
    tried = fails(monkeypatch, lambda records: failed if "poison" in map(key_of, records) else None)
    poison = world.submit("poison")
    await steps()
    submitted = await on_its_way(world, "a", "b")
    serving = asyncio.create_task(live(world))
    assert problems([await poison, *await submitted]) == [RECORD_REFUSED.code, None, None]
    assert tried[0] == ["poison", "a", "b"]
    assert ["a", "b"] in tried[1:]
    await ended(serving)


@pytest.mark.parametrize("why", ["an isolated topic", "another guarantee"])
async def test_events_of_an_isolated_topic_or_another_guarantee_are_split_from_their_chunk(why: str) -> None:
    world = World()
    topic = {"an isolated topic": "other", "another guarantee": "plain.a"}[why]
    if why == "an isolated topic":
        world.queue.isolate({"other"})
    submitted = await on_its_way(world, make_event("b", topic), make_event("a"), make_event("c", topic))
    serving = world.serve(await world.slot())
    answers = await submitted
    assert problems(answers) == [None] * 3
    assert [answer.deliveries[0][1].topic for answer in answers if isinstance(answer, Committed)] == [
        topic,
        "orders",
        topic,
    ]
    assert sorted(world.keys_written()) == [["a"], ["b", "c"]]
    await ended(serving)


async def test_a_chunk_that_is_too_large_for_the_ledger_is_split_and_all_its_events_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its max.message.bytes was lowered."""
    world = World()
    full = RecordError(TOO_LARGE, "it is too large")
    failed = TransactionFailed(TransactionOutcome.ABORTED, "too large", {"fencepost.ledger": full})
    tried = fails(monkeypatch, lambda records: failed if len(records) > 3 else None)
    serving = asyncio.create_task(live(world))
    answers = await (await on_its_way(world, *"abcdefghij"))
    assert problems(answers) == [None] * 10
    assert [each for each in tried if len(each) <= 3] == [[*"ab"], [*"cde"], [*"fg"], [*"hij"]]
    await ended(serving)


async def test_a_chunk_is_retried_before_a_missing_topic_is_answered_404(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every broker knows a new topic yet, and 404 is final for a client."""
    world = World()
    absent = RecordError(UNKNOWN_TOPIC, "it is not there")
    tried = fails(
        monkeypatch,
        lambda _: TransactionFailed(TransactionOutcome.ABORTED, "no", {"orders": absent}) if len(tried) <= 3 else None,
    )
    serving = asyncio.create_task(live(world))
    began = time.monotonic()
    answers = await (await on_its_way(world, "a", "b"))
    assert tried[0] == tried[1] == ["a", "b"]
    assert time.monotonic() - began > 0.1
    assert problems(answers) == [UNKNOWN_TOPIC.code, None]
    await ended(serving)


async def test_a_chunk_is_split_by_the_retention_of_keys_and_keeps_the_order_of_each_topic() -> None:
    world = World()
    slot = await world.slot()
    events = [make_event("a"), make_event("b", "kept"), make_event("c"), make_event("d", "kept")]
    submitted = await on_its_way(world, *events)
    serving = world.serve(slot)
    assert problems(await submitted) == [None] * 4
    assert world.keys_written() == [["a", "c"], ["b", "d"]]
    assert world.keys.server.ttls_ms == {event_id(key): 1000 * KEPT_S for key in "bd"}
    await ended(serving)


async def test_each_event_of_an_idempotent_chunk_has_its_own_result() -> None:
    world = World()
    slot = await world.slot()
    world.idempotents[0].results.extend(
        [[RecordMetadata(3, NOW_MS), None, NOT_SENT, NO], [RecordMetadata(4, NOW_MS)], [NO]]
    )
    submitted = await on_its_way(world, *(make_event(key, f"plain.{key}") for key in "ab"), *PLAIN)
    serving = world.serve(slot)
    answers = await submitted
    assert problems(answers) == [None, OUTCOME_UNKNOWN.code, None, RECORD_REFUSED.code]
    assert offsets(answers) == [3, 4]
    assert world.keys_written() == [["a", "b", "c", "d"], ["c"], ["d"]]
    await until(lambda: not any(world.keys.is_claimed(key) for key in "abcd"))
    assert (world.queue.events, world.queue.bytes) == (0, 0)
    await ended(serving)


PLAIN = [make_event("c", "plain.a"), make_event("d", "plain.b")]


async def test_at_the_deadline_each_event_of_a_split_chunk_is_answered_503(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(request_timeout_ms=400)
    stuck = TransactionFailed(TransactionOutcome.ABORTED, "TimeoutError()", stuck={"orders"})
    fails(monkeypatch, lambda _: stuck)
    serving = asyncio.create_task(live(world))
    answers = await asyncio.wait_for(await on_its_way(world, *"abcdefgh"), 3.0)
    assert problems(answers) == [NOT_WRITTEN.code] * 8
    assert sorted(world.journal.answers) == [(key, 503) for key in "abcdefgh"]
    assert (world.queue.events, world.queue.bytes) == (0, 0)
    await ended(serving)


@pytest.mark.parametrize("then", ["writes", "fails again"])
async def test_a_cancelled_batch_finishes_the_events_under_way_and_writes_no_others(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events in flight are finished; waiting events are not written."""
    world = World()
    failed = TransactionFailed(TransactionOutcome.ABORTED, "no", {"orders": NO})
    tried = fails(monkeypatch, lambda records: failed if len(records) == 4 or then == "fails again" else None)
    slot = await world.slot()
    submitted = await on_its_way(world, *"abcd")
    await end_of_term(world.serve(slot))
    gate = world.keys.trouble.hold("claim")
    world.keys.trouble.reached["claim"].clear()
    serving = await world.serve_again(slot)
    await world.keys.trouble.reached["claim"].wait()
    assert isinstance(await ended_list(submitted), asyncio.CancelledError)
    assert sorted(world.journal.answers) == [("c", 503), ("d", 503)]
    gate.set()
    await until(lambda: not world.queue.events)
    assert tried == [["a", "b", "c", "d"], ["a", "b"]]
    status = 201 if then == "writes" else 503
    assert sorted(world.journal.answers)[:2] == [("a", status), ("b", status)]
    await ended(serving)


async def ended_list(task: "asyncio.Task[list[WriteResult]]") -> BaseException | None:
    task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    return result if isinstance(result, BaseException) else None


# ------------------------------------------------------------------------------------------------------- the request


async def test_a_split_chunk_hands_its_progress_and_its_results_to_its_parts() -> None:
    events = [make_event(key) for key in "abc"]
    results: list[WriteResult | None] = [None] * 3
    chunk = WriteRequest.for_chunk(events, 5.0, 15.0, Guarantee.EXACTLY_ONCE)
    collector = chunk.collect_in(results)
    chunk.group_number, chunk.claimants, chunk.partitions, chunk.failures = 7, ((1, 2),), [4, 5, 6], 1
    size = chunk.size
    parts = chunk.take_out([0, 2])
    assert [(part.deadline, part.group_number, part.claimants, part.state, part.failures) for part in parts] == [
        (15.0, 7, ((1, 2),), RequestState.QUEUED, 1)
    ] * 2
    assert [part.partitions for part in (*parts, chunk)] == [[4], [6], [5]]
    assert [part.indexes for part in (*parts, chunk)] == [[0], [2], [1]]
    assert [part.to_claim for part in (*parts, chunk)] == [
        [(each.id, each.fp)] for each in (events[0], events[2], events[1])
    ]
    assert sum(part.size for part in (*parts, chunk)) == size
    delivered = (events[0].id, Delivered(1, b"f" * 8, "orders", 0, 0, 0))
    for part in (chunk, *reversed(parts)):
        part.resolve(Committed(1, (delivered,), False))
    assert results == [Committed(1, (delivered,), False)] * 3
    assert collector.done.result() == []


async def test_an_event_need_not_wait_until_the_large_chunk_of_another_request_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups are compared by their requests: a chunk of a thousand events is one."""
    monkeypatch.setattr(queue_module, "GROUP_QUICK_S", 60.0)
    queue = Queue(Settings(instance="test"))
    for keys in ([str(n) for n in range(1_000)], ["a"]):
        arrived = time.monotonic()
        events = [*map(make_event, keys)]
        request = WriteRequest.for_chunk(events, arrived, arrived + 10.0, Guarantee.EXACTLY_ONCE)
        queue.admit(request)
        queue.put(request)
        group = queue.take()
        assert group is not None
        assert group.requests == [request]
