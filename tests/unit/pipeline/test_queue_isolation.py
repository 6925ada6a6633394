"""Tests isolated topics: the queues of requests, the waiters that are woken, and that none is missed."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from service.claims.states import RequestEvent
from service.contract import Guarantee
from service.core.settings import GROUP_LEDGER_BYTES_MAX
from service.events.event import ENTRY_BYTES
from service.pipeline import queue as module
from service.pipeline.queue import Queue
from service.pipeline.request import WriteRequest
from tests.unit.fakes import make_event
from tests.unit.pipeline.test_queue import MANY, SETTINGS, admit, answered, group_of, keys_of, request, take


def atomic(*events: tuple[str, str]) -> WriteRequest:
    """Make an atomic batch of (key, topic)."""
    made = [make_event(key, topic) for key, topic in events]
    return WriteRequest.for_atomic(made, (b"w" * 16, b"f" * 8), 0.0, 10.0)


async def asleep(taker: "asyncio.Task[None]") -> bool:
    """Check whether the waiter still waits after all ready tasks have run."""
    for _ in range(3):
        await asyncio.sleep(0)
    return not taker.done()


# ---------------------------------------------------------------------------------------------------------- queues


async def test_an_atomic_batch_with_one_isolated_topic_is_taken_in_an_isolated_group() -> None:
    queue = Queue(SETTINGS, MANY)
    queue.isolate({"bad"})
    admit(queue, atomic(("a", "orders"), ("b", "bad")), request("c"))
    group = group_of(queue)
    assert keys_of(group.requests) == ["a", "b"]
    assert group.isolated
    assert keys_of(take(queue)) == ["c"]


async def test_requests_that_wait_already_are_isolated_with_their_topic() -> None:
    queue = Queue(SETTINGS, MANY)
    admit(queue, request("a", "bad"), request("b"), request("c", "bad"))
    queue.isolate({"bad"})
    group = group_of(queue)
    assert (keys_of(group.requests), group.isolated) == (["a", "c"], True)
    assert keys_of(take(queue)) == ["b"]


async def test_releasing_one_topic_leaves_another_isolated() -> None:
    queue = Queue(SETTINGS, MANY)
    for topic in ("bad", "worse"):
        queue.isolate({topic})
    admit(queue, request("a", "bad"), request("b", "worse"), request("c"))
    queue.take()
    admit(queue, request("d", "bad"))
    queue.release({"orders", "worse"})
    assert keys_of(take(queue)) == ["c", "b"], "the released topic shares the group, the other does not"
    queue.release({"bad"})
    assert not queue._isolated_order


async def test_an_answered_isolated_request_does_not_hide_the_one_behind_it() -> None:
    queue = Queue(SETTINGS, MANY)
    queue.isolate({"bad"})
    first, second = request("a", "bad"), request("b", "bad")
    first.failures = second.failures = 1
    admit(queue, first, second)
    answered(queue, first)
    assert take(queue) == [second]


@pytest.mark.parametrize("topic", ["orders", "bad"])
async def test_forgetting_answered_requests_keeps_the_waiting_requests_behind_them(topic: str) -> None:
    queue = Queue(SETTINGS, MANY)
    queue.isolate({"bad"})
    first, second, third = (request(key, topic) for key in "abc")
    admit(queue, first, second, third)
    answered(queue, first)
    queue.forget_answered()
    assert take(queue) == [second, third]


async def test_a_chunk_with_one_isolated_topic_is_taken_in_an_isolated_group() -> None:
    queue = Queue(SETTINGS, MANY)
    queue.isolate({"bad"})
    events = [make_event("a", "orders"), make_event("b", "bad")]
    admit(queue, WriteRequest.for_chunk(events, 0.0, 10.0, Guarantee.EXACTLY_ONCE), request("c"), request("d"))
    group = group_of(queue)
    assert (keys_of(group.requests), group.isolated) == (["a", "b"], True)
    assert keys_of(take(queue)) == ["c", "d"]


# --------------------------------------------------------------------------------------------------------- waiters


async def test_a_waiter_sleeps_while_the_isolated_topic_has_a_group_under_way() -> None:
    """One isolated group at a time: a waiter sleeps until it is done, or its topic is released."""
    queue = Queue(SETTINGS, MANY)
    queue.isolate({"bad"})
    admit(queue, request("a", "bad"))
    apart = group_of(queue)
    admit(queue, request("b", "bad"))
    taker = asyncio.create_task(queue._wait())
    assert await asleep(taker)
    queue.release({"bad"})
    assert not await asleep(taker)
    queue.done(apart)


def plain(key: str) -> WriteRequest:
    return request(key, guarantee=Guarantee.IDEMPOTENT)


def bad(key: str) -> WriteRequest:
    return request(key, "bad")


@pytest.mark.parametrize("make", [request, plain, bad])
async def test_a_finished_group_wakes_a_waiter_for_the_waiting_request(
    make: Callable[[str], WriteRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUP_QUICK_S", 60.0)
    queue = Queue(SETTINGS, 1)
    queue.isolate({"bad"})
    admit(queue, request("a"))
    group = group_of(queue)
    admit(queue, make("b"))
    taker = asyncio.create_task(queue._wait())
    assert await asleep(taker)
    queue.done(group)
    assert not await asleep(taker)


@pytest.mark.parametrize("make", [request, plain])
async def test_a_waiter_that_leaves_requests_behind_wakes_another_for_them(make: Callable[[str], WriteRequest]) -> None:
    queue = Queue(SETTINGS, MANY)
    most = GROUP_LEDGER_BYTES_MAX // (ENTRY_BYTES + len("orders"))
    taker = asyncio.create_task(queue._wait())
    other = asyncio.create_task(queue._wait())
    await asyncio.sleep(0)
    queue.put_back([make(str(number)) for number in range(2 * most)])
    assert not await asleep(taker)
    assert await asleep(other)
    assert len(take(queue)) == most
    assert not await asleep(other)


async def test_a_cancelled_waiter_does_not_keep_another_from_being_woken() -> None:
    queue = Queue(SETTINGS, MANY)
    gone, here = asyncio.create_task(queue._wait()), asyncio.create_task(queue._wait())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    queue.notify_all()
    assert not await asleep(here)


# ------------------------------------------------------------------------------------------------- groups at once


async def test_a_take_from_an_empty_queue_counts_no_group_under_way() -> None:
    queue = Queue(SETTINGS)
    nothing = [queue.take() for _ in range(3)]
    admit(queue, request("a"))
    assert keys_of(take(queue)) == ["a"]
    assert not any(nothing)


async def test_a_queue_at_capacity_is_looked_at_again_each_time_its_oldest_group_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, delays = [100.0], list[float]()
    room: list[Callable[[], None]] = []
    queue = Queue(SETTINGS)

    def call_later(delay_s: float, callback: Callable[[], None]) -> object:
        delays.append(round(delay_s, 6))
        room.append(callback)
        return object()

    loop: Any = SimpleNamespace(call_later=call_later, create_future=asyncio.get_running_loop().create_future)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
    for key in ("a", "b"):
        admit(queue, request(key))
        assert keys_of(take(queue)) == [key]
        now[0] += 0.02
    for key, delay_s in (("c", 0.011), ("d", 0.019)):
        admit(queue, request(key))
        assert queue.take() is None
        assert queue.take() is None
        assert delays == [delay_s], "one look for all"
        now[0] += delays.pop() + 0.001
        taker = asyncio.create_task(queue._wait())
        await asyncio.sleep(0)
        room.pop()()
        await asyncio.wait_for(taker, 1.0)
        assert keys_of(take(queue)) == [key]


async def test_a_request_that_was_answered_in_its_group_is_not_put_back() -> None:
    queue = Queue(SETTINGS, MANY)
    one = request("a")
    admit(queue, one)
    group = group_of(queue)
    one.move(RequestEvent.ANSWER)
    queue.leave(one)
    queue.put_back(group.requests)
    assert not any(queue._waiting.values())


async def test_isolated_topics_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that is deleted never commits again, which would release it."""
    monkeypatch.setattr(module, "ISOLATED_NAMES_MAX", 3)
    queue = Queue(SETTINGS, MANY)
    admit(queue, request("a", "first"))
    for topic in ("first", "second", "third", "fourth", "fifth"):
        queue.isolate({topic})
    isolated = [topic for topic in ("first", "second", "third", "fourth", "fifth") if queue.is_isolated((topic,))]
    assert isolated == ["first", "fourth", "fifth"], "the first has a request that waits"
    assert keys_of(take(queue)) == ["a"]
