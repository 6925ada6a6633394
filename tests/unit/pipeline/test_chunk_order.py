"""The order within a batch, also where its train comes apart: what is behind an event in doubt waits for it."""

import asyncio
import time

import pytest

from service.claims.states import Claim, Claimed, Delivered, Outcome, RequestEvent, RequestState
from service.contract import Guarantee
from service.core.problems import StoreAway, StoreLost, StoreUnanswered
from service.core.settings import Settings
from service.kafka.outcomes import TransactionFailed, TransactionOutcome
from service.pipeline.queue import Queue
from service.pipeline.request import BatchChunk, Committed, WriteRequest, WriteResult
from tests.unit.fakes import EPOCH, NOW_MS, World, end_of_term, ended, make_event, unheard

SETTINGS = Settings(instance="test")
MANY = 1_000_000  # groups at once


def train_of(*keys: str, topics: str = "orders") -> list[WriteRequest]:
    """Requests of one train; with several topics, by their blanks, each has its own."""
    train, names = BatchChunk(), topics.split()
    return [
        WriteRequest.of(
            (make_event(key, names[place % len(names)]),),
            time.monotonic(),
            10.0,
            Guarantee.EXACTLY_ONCE,
            unheard,
            train=train,
        )
        for place, key in enumerate(keys)
    ]


def keys_of(group: list[WriteRequest]) -> list[str]:
    return [request.events[0].key for request in group]


def answered(queue: Queue, *requests: WriteRequest) -> None:
    for each in requests:
        each.move(RequestEvent.ANSWER)
        queue.leave(each)


@pytest.mark.parametrize("trusted", [False, True])
async def test_a_train_that_came_apart_keeps_its_order(trusted: bool) -> None:
    """Also while one of it is in doubt, elsewhere: what came after it waits for its answer, or for it."""
    queue = Queue(SETTINGS, MANY)
    train = train_of("a", "b", "c")
    queue.admit(train)
    failed = queue.take()
    for each in failed:
        each.failures += 1
    queue.quarantine("orders")
    queue.returned(failed)
    queue.put_back(failed)
    alone = queue.take()
    assert keys_of(alone) == ["a"]
    queue.returned(alone)  # in doubt: it waits for a recovery
    if trusted:  # another slot has committed something else of the topic
        queue.release(["orders"])
    assert queue.take() == []
    waiting = asyncio.create_task(queue.wait())
    await asyncio.sleep(0)
    assert not waiting.done()  # and nobody runs in circles meanwhile
    queue.put_back(alone)
    await waiting
    again = queue.take()
    assert keys_of(again) == (["a", "b", "c"] if trusted else ["a"])
    if not trusted:
        queue.returned(again)
        assert queue.take() == []
        answered(queue, *again)
        assert keys_of(queue.take()) == ["b"]


async def test_a_train_s_other_topics_do_not_wait() -> None:
    queue = Queue(SETTINGS, MANY)
    queue.admit(train_of("a", "b", "c", topics="bad orders"))
    failed = queue.take()
    queue.quarantine("bad")
    queue.returned(failed)
    queue.put_back([failed[1]])
    assert keys_of(queue.take()) == ["b"]
    queue.put_back([failed[0], failed[2]])
    assert keys_of(queue.take()) == ["a", "c"]


async def test_what_was_held_and_is_answered_meanwhile_is_let_go_of() -> None:
    queue = Queue(SETTINGS, MANY)
    train = train_of("a", "b")
    queue.admit(train)
    queue.put_back(queue.take())
    first, second = queue.take()
    queue.put_back([second])
    assert queue.take() == []
    answered(queue, second)
    assert queue.take() == []
    assert not queue._held
    queue.put_back([first])
    assert keys_of(queue.take()) == ["a"]


async def train_on_its_way(world: World, *keys: str) -> "asyncio.Task[list[WriteResult]]":
    train = BatchChunk()
    for key in keys:
        train.add(make_event(key))
    await world.topic_metadata.get("orders", time.monotonic())
    task = asyncio.create_task(world.admission.submit_train(train))
    await asyncio.sleep(0)
    return task


async def test_a_batch_keeps_its_order_while_one_of_it_is_in_doubt() -> None:
    """Its topic hangs twice: the whole, and then the commit of the first event alone. The second must not overtake."""
    world = World()
    first, second = await world.slot(0), await world.slot(1)
    for n, verdict in enumerate([TransactionOutcome.ABORTED, TransactionOutcome.UNKNOWN]):
        stuck = TransactionFailed(verdict, "TimeoutError()", stuck={"orders"})
        world.producers[n].trouble.before["write"].append(stuck)
    told = await train_on_its_way(world, "a", "b")
    await end_of_term(world.serve(first))
    await world.recover(first)
    world.writer.recovered()
    await end_of_term(world.serve(second))  # in which the first event hangs alone
    serving = world.serve(first)
    await asyncio.sleep(0.05)
    assert world.keys_written(0) == []
    await world.recover(second)
    world.writer.recovered()
    one, two = await told
    assert isinstance(one, Committed)
    assert isinstance(two, Committed)
    assert one.places[0][1].offset < two.places[0][1].offset
    await ended(serving)


async def test_what_comes_behind_a_claim_that_is_in_doubt_is_not_written_before_it() -> None:
    world = World()
    slot = await world.slot()
    requests = train_of("a", "b", "c")
    doubtful, behind, _ = requests
    doubtful.claimants = ((5, 50),)
    for request in requests:
        request.move(RequestEvent.CLAIM)
    new = Claim(Outcome.NEW, Claimed(slot.n, slot.term, NOW_MS, b"f" * 8))
    own = Claim(Outcome.IN_PROGRESS, Claimed(5, 50, NOW_MS, b"f" * 8))
    assert world.writer._sort(requests, [own, new, new], {}) == ([], requests[1:], [])
    assert behind.state is RequestState.QUEUED
    assert world.writer._parked == [doubtful]


@pytest.mark.parametrize("claim", ["delivered", "in doubt, and in no train"])
async def test_what_comes_behind_an_event_that_is_not_waited_for_is_written_with_the_others(claim: str) -> None:
    world = World()
    slot = await world.slot()
    requests = train_of("a", "b")
    first, second = requests
    found = Claim(Outcome.DELIVERED, Delivered(NOW_MS, first.events[0].fp, "orders", 0, 3, NOW_MS))
    if claim != "delivered":
        first.train = second.train = None
        first.claimants = ((5, 50),)
        found = Claim(Outcome.IN_PROGRESS, Claimed(5, 50, NOW_MS, b"f" * 8))
    world.queue.admit(requests)
    for request in requests:
        request.move(RequestEvent.CLAIM)
    new = Claimed(slot.n, slot.term, NOW_MS, b"f" * 8)
    assert world.writer._sort(requests, [found, Claim(Outcome.NEW, new)], {}) == ([(second, new)], [], [])
    assert second.accepted_at == NOW_MS


@pytest.mark.parametrize("error", [StoreUnanswered("no answer"), StoreAway("OOM"), StoreLost("another"), None])
@pytest.mark.parametrize("step", ["write", "abandon"])
async def test_what_waits_behind_a_claim_in_doubt_is_not_forgotten_where_the_term_ends_meanwhile(
    step: str, error: Exception | None
) -> None:
    """It goes round again, or where its claim cannot be given up it waits for the slot's recovery as its group does."""
    world = World()
    slot = await world.slot()
    await world.topic_metadata.get("orders", time.monotonic())
    train = train_of("a", "b")
    others = train_of("z") if step == "write" else []
    world.producers[0].trouble.before[step].append(TransactionFailed(TransactionOutcome.UNKNOWN, "gone"))
    requests = [*train, *others]
    doubtful = train[0]
    # Its own claim of an ended term, which is still to be recovered.
    doubtful.claimants = ((5, 50),)
    world.keys.server.freed[5] = 50
    await world.keys.claim(EPOCH, 5, 50, doubtful.asked)
    if error is not None:
        world.keys.trouble.before["release"].append(error)
    world.queue.admit(requests)
    assert isinstance(await end_of_term(world.serve(slot)), TransactionFailed)
    again = {train[1]} if error is None else set[WriteRequest]()
    assert set(world.writer._parked) == set(requests) - again
    assert set(world.queue._waiting[Guarantee.EXACTLY_ONCE]) == again
