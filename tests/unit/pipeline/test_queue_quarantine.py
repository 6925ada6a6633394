"""Which lane a request waits in, who is woken for it, and that nobody is let go of, or asks in circles."""

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
from service.pipeline.request import BatchChunk, WriteRequest
from tests.unit.fakes import make_event, unheard
from tests.unit.pipeline.test_queue import MANY, SETTINGS, answered, keys_of, request


def atomic(*events: tuple[str, str]) -> WriteRequest:
    """An atomic batch of (key, topic)."""
    made = [make_event(key, topic) for key, topic in events]
    return WriteRequest.of(made, 0.0, 10.0, Guarantee.EXACTLY_ONCE, unheard, (b"w" * 16, b"f" * 8))


async def asleep(taker: "asyncio.Task[None]") -> bool:
    """Does who waits at the queue still wait, once all that is ready has run?"""
    for _ in range(3):
        await asyncio.sleep(0)
    return not taker.done()


# ---------------------------------------------------------------------------------------------------------- lanes


async def test_a_batch_with_one_suspect_topic_travels_apart() -> None:
    queue = Queue(SETTINGS, MANY)
    queue.quarantine("bad")
    queue.admit([atomic(("a", "orders"), ("b", "bad")), request("c")])
    group = queue.take()
    assert keys_of(group) == ["a", "b"]
    assert queue.suspects(group)
    assert keys_of(queue.take()) == ["c"]


async def test_a_commit_of_one_topic_says_nothing_of_another() -> None:
    queue = Queue(SETTINGS, MANY)
    for topic in ("bad", "worse"):
        queue.quarantine(topic)
    queue.admit([request("a", "bad"), request("b", "worse"), request("c")])
    queue.take()
    queue.admit([request("d", "bad")])
    queue.release({"orders", "worse"})
    assert keys_of(queue.take()) == ["c", "b"], "in which the one that is trusted is, and not the other"
    queue.release({"bad"})
    assert not queue._apart_turns


async def test_who_was_answered_apart_does_not_hide_who_was_not() -> None:
    queue = Queue(SETTINGS, MANY)
    queue.quarantine("bad")
    first, second = request("a", "bad"), request("b", "bad")
    first.failures = second.failures = 1
    queue.admit([first, second])
    answered(queue, first)
    assert queue.take() == [second]


@pytest.mark.parametrize("topic", ["orders", "bad"])
async def test_who_waits_behind_the_answered_is_not_let_go_of_with_them(topic: str) -> None:
    queue = Queue(SETTINGS, MANY)
    queue.quarantine("bad")
    first, second, third = (request(key, topic) for key in "abc")
    queue.admit([first, second, third])
    answered(queue, first)
    queue.forget_answered()
    assert queue.take() == [second, third]


def train(*events: tuple[str, str]) -> list[WriteRequest]:
    """Requests of one train, by (key, topic)."""
    whole = BatchChunk()
    for key, topic in events:
        whole.add(make_event(key, topic))
    return [
        WriteRequest.of((event,), 0.0, 10.0, Guarantee.EXACTLY_ONCE, unheard, train=whole) for event in whole.events
    ]


async def test_who_has_nobody_left_before_it_goes_though_its_train_came_apart() -> None:
    queue = Queue(SETTINGS, MANY)
    queue.quarantine("bad")
    ill, well = train(("a", "bad"), ("b", "orders"))
    queue.admit([ill, well])
    group = queue.take()
    assert group == [ill]
    queue.put_back(group)
    assert queue.take() == [well]


async def test_nobody_passes_who_is_elsewhere_in_whatever_order_they_came_back() -> None:
    queue = Queue(SETTINGS, MANY)
    first, second, third = train(("a", "orders"), ("b", "orders"), ("c", "orders"))
    queue.admit([first, second, third])
    queue.put_back(queue.take())
    assert queue.take() == [first, second, third]
    for each in (second, third):
        queue.put_back([each])
    assert queue.take() == []
    queue.put_back([first])
    assert queue.take() == [first, second], "the third was passed over, and waits for them"


# --------------------------------------------------------------------------------------------------------- takers


async def test_nobody_asks_in_circles_for_what_waits_for_its_own_kind() -> None:
    """One group apart at a time: who may not take the next sleeps, until the first is back or its topic trusted."""
    queue = Queue(SETTINGS, MANY)
    queue.quarantine("bad")
    queue.admit([request("a", "bad")])
    apart = queue.take()
    queue.admit([request("b", "bad")])
    taker = asyncio.create_task(queue.wait())
    assert await asleep(taker)
    queue.release({"bad"})
    assert not await asleep(taker)
    queue.returned(apart)


def plain(key: str) -> WriteRequest:
    return request(key, guarantee=Guarantee.IDEMPOTENT)


def bad(key: str) -> WriteRequest:
    return request(key, "bad")


@pytest.mark.parametrize("make", [request, plain, bad])
async def test_who_brings_a_group_back_wakes_another_for_what_waits(
    make: Callable[[str], WriteRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUP_QUICK_S", 60.0)
    queue = Queue(SETTINGS, 1)
    queue.quarantine("bad")
    queue.admit([request("a")])
    group = queue.take()
    queue.admit([make("b")])
    taker = asyncio.create_task(queue.wait())
    assert await asleep(taker)
    queue.returned(group)
    assert not await asleep(taker)


@pytest.mark.parametrize("make", [request, plain])
async def test_who_leaves_something_behind_wakes_another_for_it(make: Callable[[str], WriteRequest]) -> None:
    queue = Queue(SETTINGS, MANY)
    most = GROUP_LEDGER_BYTES_MAX // (ENTRY_BYTES + len("orders"))
    taker = asyncio.create_task(queue.wait())
    other = asyncio.create_task(queue.wait())
    await asyncio.sleep(0)
    queue.admit([make(str(number)) for number in range(2 * most)])
    assert not await asleep(taker)
    assert await asleep(other)
    assert len(queue.take()) == most
    assert not await asleep(other)


async def test_a_taker_that_was_cancelled_keeps_no_other_from_being_woken() -> None:
    queue = Queue(SETTINGS, MANY)
    gone, here = asyncio.create_task(queue.wait()), asyncio.create_task(queue.wait())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    queue.notify_all()
    assert not await asleep(here)


# ------------------------------------------------------------------------------------------------- groups at once


async def test_who_finds_nothing_to_take_is_no_group_under_way() -> None:
    queue = Queue(SETTINGS)
    nothing = [queue.take() for _ in range(3)]
    queue.admit([request("a")])
    assert keys_of(queue.take()) == ["a"]
    assert not any(nothing)


async def test_a_crowd_is_looked_at_again_when_the_oldest_group_is_slow_and_each_time(
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
        queue.admit([request(key)])
        assert keys_of(queue.take()) == [key]
        now[0] += 0.02
    for key, delay_s in (("c", 0.011), ("d", 0.019)):
        queue.admit([request(key)])
        assert queue.take() == []
        assert queue.take() == []
        assert delays == [delay_s], "one look for all"
        now[0] += delays.pop() + 0.001
        taker = asyncio.create_task(queue.wait())
        await asyncio.sleep(0)
        room.pop()()
        await asyncio.wait_for(taker, 1.0)
        assert keys_of(queue.take()) == [key]


async def test_what_was_answered_on_its_way_is_no_request_of_a_group() -> None:
    queue = Queue(SETTINGS, MANY)
    one = request("a")
    queue.admit([one])
    group = queue.take()
    one.move(RequestEvent.ANSWER)
    queue.leave(one)
    queue.put_back(group)
    assert not any(queue._waiting.values())
