"""A train goes in one piece while its events are alike, and is parted as soon as they may have fates of their own."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
import pytest

from service.claims.states import Claimed, Delivered, RequestState
from service.contract import Guarantee
from service.contract.wire import event_id
from service.core.problems import (
    FINGERPRINT_MISMATCH,
    IN_PROGRESS,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    RECORD_REFUSED,
    StoreAway,
    StoreUnanswered,
)
from service.core.settings import Settings
from service.events.event import Event
from service.kafka.admin import Topic
from service.kafka.outcomes import RecordError, TransactionFailed, TransactionOutcome
from service.kafka.session import Partition, Record, RecordMetadata
from service.pipeline import request
from service.pipeline.queue import Queue
from service.pipeline.request import BatchChunk, Committed, WriteRequest, WriteResult
from tests.unit.fakes import (
    NOW_MS,
    FakeProducer,
    World,
    end_of_term,
    ended,
    kind_of,
    make_event,
    unheard,
    until,
)


async def on_its_way(world: World, *events: Event | str) -> "asyncio.Task[list[WriteResult]]":
    """A train of these events (or keys), which has come as far as the queue."""
    train = BatchChunk()
    for event in events:
        train.add(make_event(event) if isinstance(event, str) else event)
        await world.topic_metadata.get(train.events[-1].topic, time.monotonic())
    task = asyncio.create_task(world.admission.submit_train(train))
    await asyncio.sleep(0)
    return task


def pieces(world: World) -> list[int]:
    """How many events each request has that waits for its answer."""
    waiting = (each for request in world.admission._open for each in request.parts or (request,))
    return [len(request.events) for request in waiting if not request.answered]


def problems(answers: list[WriteResult]) -> list[str | None]:
    return [None if kind is None else kind.code for kind in map(kind_of, answers)]


async def test_it_is_one_request_from_the_queue_to_its_answers() -> None:
    world = World()
    told = await on_its_way(world, "a", "b", make_event("c", "other"))
    assert pieces(world) == [3]
    assert world.queue.events == 3
    serving = world.serve(await world.slot())
    answers = await told
    assert world.keys_written() == [["a", "b", "c"]]
    assert world.journal.answers == [("a", 201), ("b", 201), ("c", 201)]
    assert [answer.places[0][0] for answer in answers if isinstance(answer, Committed)] == [*map(event_id, "abc")]
    assert [len(answer.places) for answer in answers if isinstance(answer, Committed)] == [1, 1, 1]
    assert all(world.keys.is_delivered(key) for key in "abc")
    assert (world.queue.events, world.queue.bytes) == (0, 0)
    assert b'fencepost_answers_total{code="",status="201"} 3.0' in world.telemetry.render()
    assert 'request_seconds_count{outcome="ok"} 3.0' in world.telemetry.render().decode()
    await ended(serving)


async def test_it_is_parted_where_something_is_known_of_one() -> None:
    """Delivered, another event under its key, in progress elsewhere: each is told so, and the others are written."""
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


async def test_a_poisoned_event_is_answered_alone_and_the_others_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    slot = await world.slot()
    write = FakeProducer.write

    async def refuses_other(
        producer: FakeProducer,
        records: Sequence[Record],
        ledger: Partition,
        record: Callable[[Sequence[RecordMetadata]], bytes],
    ) -> tuple[list[RecordMetadata], int]:
        if any(record.topic == "other" for record in records):
            raise TransactionFailed(TransactionOutcome.ABORTED, "no", {"other": RecordError(RECORD_REFUSED, "no")})
        return await write(producer, records, ledger, record)

    monkeypatch.setattr(FakeProducer, "write", refuses_other)
    told = await on_its_way(world, "a", make_event("bad", "other"), "c")
    await end_of_term(world.serve(slot))
    assert pieces(world) == [1, 1, 1]
    await end_of_term(await world.serve_again(slot))
    serving = await world.serve_again(slot)
    assert problems(await told) == [None, RECORD_REFUSED.code, None]
    assert [world.keys.is_delivered(key) for key in ("a", "bad", "c")] == [True, False, True]
    assert not world.keys.is_claimed("bad")
    await ended(serving)


@pytest.mark.parametrize("committed", [False, True])
async def test_what_is_in_doubt_is_found_or_written_again_each_for_itself(committed: bool) -> None:
    world = World()
    slot = await world.slot()
    world.producers[0].trouble.before["write"].append(TransactionFailed(TransactionOutcome.UNKNOWN, "gone"))
    told = await on_its_way(world, "a", "b")
    await end_of_term(world.serve(slot))
    assert pieces(world) == [1, 1]
    assert not told.done()
    await world.recover(slot)
    if committed:  # as the ledger tells a recovery
        for offset, key in enumerate("ab"):
            found = Delivered(NOW_MS, make_event(key).fp, "orders", 0, offset, NOW_MS)
            world.keys.server.keys[event_id(key)] = found
    world.writer.recovered()
    serving = world.serve(slot)
    answers = await told
    assert problems(answers) == [None, None]
    assert [answer.replayed for answer in answers if isinstance(answer, Committed)] == [False, False]
    assert world.keys_written() == ([] if committed else [["a", "b"]])
    await ended(serving)


async def test_its_deadline_is_that_of_each() -> None:
    """Waiting it is surely not written; in a transaction nobody knows."""
    world = World(request_timeout_ms=50)
    sweeping = asyncio.create_task(world.admission.sweep())
    assert problems(await (await on_its_way(world, "a", "b"))) == [NOT_WRITTEN.code] * 2
    slot = await world.slot()
    gate = world.producers[0].trouble.hold("write")
    serving = world.serve(slot)
    told = await on_its_way(world, "c", "d")
    assert problems(await told) == [OUTCOME_UNKNOWN.code] * 2
    assert world.journal.answers == [("a", 503), ("b", 503), ("c", 504), ("d", 504)]
    gate.set()
    await until(lambda: world.keys.is_delivered("d"))
    assert (world.queue.events, world.queue.bytes) == (0, 0)
    await ended(serving)
    await ended(sweeping)


@pytest.mark.parametrize("known", ["delivered", "nothing"])
async def test_one_that_was_answered_while_it_was_claimed_is_given_up_whole(known: str) -> None:
    world = World(request_timeout_ms=50)
    slot = await world.slot()
    serving = world.serve(slot)
    if known == "delivered":
        await (await on_its_way(world, "b"))
    sweeping = asyncio.create_task(world.admission.sweep())
    gate = world.keys.trouble.hold("claim")
    told = await on_its_way(world, "a", "b", "c")
    assert problems(await told) == [NOT_WRITTEN.code] * 3
    gate.set()
    await world.keys.trouble.reached["release"].wait()
    await until(lambda: not any(world.keys.is_claimed(key) for key in "abc"))
    assert world.keys.is_delivered("b") is (known == "delivered")
    assert world.keys_written() == ([["b"]] if known == "delivered" else [])
    await ended(serving)
    await ended(sweeping)


async def test_a_partition_with_too_few_replicas_refuses_its_own_events_only() -> None:
    world = World()
    world.cluster.topics["other"] = Topic("other", 1, {}, frozenset({0}))
    serving = world.serve(await world.slot())
    answers = await (await on_its_way(world, "a", make_event("b", "other"), "c"))
    assert problems(answers) == [None, NOT_WRITTEN.code, None]
    assert world.keys_written() == [["a", "c"]]
    assert not world.keys.is_claimed("b")
    await ended(serving)


async def test_a_claim_without_an_answer_waits_for_the_recovery_in_one_piece() -> None:
    """Its own claims stand then, in a term that has ended: they are found dead, and taken over."""
    world = World()
    slot = await world.slot()
    world.keys.trouble.after["claim"].append(StoreUnanswered("no answer"))
    told = await on_its_way(world, "a", "b")
    await end_of_term(world.serve(slot))
    assert pieces(world) == [2]
    assert [request.claimants for request in world.writer._parked] == [((0, slot.term),)]
    serving = await world.serve_again(slot)
    assert problems(await told) == [None, None]
    assert world.keys_written() == [["a", "b"]]
    await ended(serving)


async def test_its_own_claims_of_a_term_that_is_still_to_be_recovered_are_nobody_else_s() -> None:
    """Another slot meets them: they wait for the recovery, and are no 409."""
    world = World()
    first, second = await world.slot(0), await world.slot(1)
    world.keys.trouble.after["claim"].append(StoreUnanswered("no answer"))
    told = await on_its_way(world, "a", "b")
    await end_of_term(world.serve(first))
    serving = world.serve(second)
    world.writer.recovered()  # something else was
    await asyncio.sleep(0.05)
    assert not told.done()
    assert pieces(world) == [1, 1]
    await world.recover(first)
    world.writer.recovered()
    assert problems(await told) == [None, None]
    await ended(serving)


async def test_a_store_that_is_away_leaves_it_in_one_piece() -> None:
    world = World()
    world.keys.trouble.before["claim"].append(StoreAway("OOM"))
    serving = world.serve(await world.slot())
    answers = await (await on_its_way(world, "a", "b"))
    assert problems(answers) == [None, None]
    assert world.keys_written() == [["a", "b"]]
    await ended(serving)


@pytest.mark.parametrize("why", ["a suspect", "another guarantee", "one event"])
async def test_what_is_not_alike_does_not_go_in_one_piece(why: str) -> None:
    world = World()
    if why == "a suspect":
        world.queue.quarantine("other")
    topic = {"a suspect": "other", "another guarantee": "plain.a", "one event": "orders"}[why]
    events = [make_event("b", topic)] if why == "one event" else [make_event("a"), make_event("b", topic)]
    told = await on_its_way(world, *events)
    assert pieces(world) == [1] * len(events)
    serving = world.serve(await world.slot())
    assert problems(await told) == [None] * len(events)
    await ended(serving)


def test_the_parts_are_as_far_as_the_whole_was() -> None:
    train = BatchChunk()
    for key in "ab":
        train.add(make_event(key))
    told: list[tuple[int, WriteResult]] = []
    whole = WriteRequest.of(train.events, 5.0, 10.0, Guarantee.EXACTLY_ONCE, lambda _: None, train=train)
    whole.reply_each = lambda place, answer: told.append((place, answer))
    whole.group_number, whole.claimants, whole.partitions = 7, ((1, 2),), [4, 5]
    parts = whole.split()
    assert whole.answered
    assert [(part.deadline, part.group_number, part.claimants, part.state) for part in parts] == [
        (15.0, 7, ((1, 2),), RequestState.QUEUED)
    ] * 2
    assert [part.partitions for part in parts] == [[4], [5]]
    assert sum(part.size for part in parts) == whole.size
    committed = Committed(1, (), False)
    for part in reversed(parts):
        part.reply(committed)
    assert told == [(1, committed), (0, committed)]


@pytest.mark.parametrize("mark", ["slow", "failed"])
async def test_a_claim_of_another_request_in_the_same_term_is_not_given_up(mark: str) -> None:
    """A train is answered while it is claimed; one of its keys has just been committed by the same slot, and is not
    marked yet. Given up with the train's own claims, the key would be free, and be written again."""
    world = World(request_timeout_ms=100)
    sweeping = asyncio.create_task(world.admission.sweep())
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


async def test_the_parts_of_one_that_went_round_again_keep_their_order() -> None:
    """A claim without an answer, in one piece; then one of the middle can be had, and those beside it not yet."""
    world = World()
    first, second = await world.slot(0), await world.slot(1)
    events = [make_event(key, partition=0) for key in "abc"]
    world.keys.server.keys[event_id("b")] = Claimed(5, 50, NOW_MS, events[1].fp)
    world.keys.server.freed[5] = 50
    world.keys.trouble.after["claim"].append(StoreUnanswered("no answer"))
    told = await on_its_way(world, *events)
    await end_of_term(world.serve(first))
    world.keys.server.freed[5] = 51  # whoever held b is dead
    serving = world.serve(second)
    world.writer.recovered()
    await asyncio.sleep(0.05)
    assert world.keys_written(1) == []  # b would be before a
    await world.recover(first)
    world.writer.recovered()
    offsets = [answer.places[0][1].offset for answer in await told if isinstance(answer, Committed)]
    assert len(offsets) == 3
    assert offsets == sorted(offsets)
    await ended(serving)


async def test_what_parts_stays_one_in_the_order_of_deadlines() -> None:
    """To be sorted in each for itself took a time with the square of all that wait, as after an outage."""
    world = World()
    slot = await world.slot()
    world.producers[0].trouble.before["write"].append(TransactionFailed(TransactionOutcome.UNKNOWN, "gone"))
    told = await on_its_way(world, "a", "b")
    (whole,) = world.admission._open
    await end_of_term(world.serve(slot))
    assert list(world.admission._open) == [whole]
    assert (whole.answered, whole.settled, len(whole.parts)) == (True, False, 2)
    serving = await world.serve_again(slot)
    await told
    assert whole.settled
    await ended(serving)


async def test_a_topic_that_has_failed_meanwhile_does_not_hold_up_the_others_of_a_train() -> None:
    world = World()
    first, second = await world.slot(0), await world.slot(1)
    gate = world.keys.trouble.hold("claim")
    told = await on_its_way(world, "a", make_event("x", "other"), "c")
    serving = [world.serve(first)]
    await world.keys.trouble.reached["claim"].wait()
    world.queue.quarantine("other")
    hanging = world.submit("y", "other")
    await asyncio.sleep(0.01)
    world.keys.trouble.gates.clear()
    write = world.producers[1].trouble.hold("write")
    serving.append(world.serve(second))
    await world.producers[1].trouble.reached["write"].wait()
    world.keys.trouble.before["claim"].append(StoreAway("OOM"))  # the train goes round again
    gate.set()
    await until(lambda: world.keys_written(0) == [["a", "c"]])
    write.set()
    assert problems([*await told, await hanging]) == [None] * 4
    for each in serving:
        await ended(each)


def single(key: str) -> WriteRequest:
    return WriteRequest.of((make_event(key),), time.monotonic(), 10.0, Guarantee.EXACTLY_ONCE, unheard)


def whole_of(count: int, name: str = "w") -> WriteRequest:
    train = BatchChunk()
    for n in range(count):
        train.add(make_event(f"{name}{n}"))
    return WriteRequest.of(train.events, time.monotonic(), 10.0, Guarantee.EXACTLY_ONCE, unheard, train=train)


async def test_a_group_is_as_large_as_its_events_are_many() -> None:
    queue = Queue(Settings(instance="test"))
    queue.admit([whole_of(1_000)])
    assert len(queue.take()) == 1
    queue.admit([single("a")])
    assert queue.take() == []  # one event does not go beside a thousand
    queue = Queue(Settings(instance="test"))
    queue.admit([single(str(n)) for n in range(10)])
    assert len(queue.take()) == 10
    queue.admit([whole_of(300)])
    (taken,) = queue.take()  # but three hundred beside ten
    queue.put_back([taken])
    assert queue._waiting_count() == 300
    assert queue.take() == []  # two are under way


async def test_who_is_answered_keeps_nobody_s_answers() -> None:
    world = World()
    told = await on_its_way(world, "a", "b")
    (whole,) = world.admission._open
    serving = world.serve(await world.slot())
    await told
    assert (whole.reply, whole.reply_each) == (request.unheard, None)
    assert whole.settled
    await ended(serving)
