"""The queue: its bounds, its order, what travels together and what apart."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from service.errors import Problem
from service.event import ENTRY_BYTES, Event
from service.request import WAITING_BYTES, Queue, Request
from service.settings import GROUP_EVENT_BYTES_MAX, GROUP_LEDGER_BYTES_MAX, Settings
from service.shared import Guarantee
from service.states import IllegalMove, RequestEvent, RequestState
from service.wire import event_id
from tests.unit.fakes import unheard

MANY = 1_000_000  # groups at once


def request(name: str, topic: str = "t", size: int = 1, guarantee: Guarantee = Guarantee.EXACTLY_ONCE) -> Request:
    return Request([event(name, topic, size)], 0.0, 1.0, guarantee, unheard)


def event(name: str, topic: str = "t", size: int = 1) -> Event:
    return Event(name, event_id(name), topic, None, b"x" * size, [], None, None)


def batch(name: str, *topics: str) -> Request:
    members = [event(f"{name}/{n}", topic) for n, topic in enumerate(topics)]
    return Request(members, 0.0, 1.0, Guarantee.EXACTLY_ONCE, unheard, whole=(event_id(name), b"f" * 8))


def names(group: Sequence[Request]) -> list[str]:
    return [each.events[0].key for each in group]


def queue(**settings: Any) -> Queue:
    return Queue(replace(Settings(), **settings), MANY)


def answer(queue: Queue, request: Request) -> None:
    request.move(RequestEvent.ANSWER)
    queue.leave(request)


async def test_first_come_first_served() -> None:
    line = queue()
    line.admit([request("a"), request("b")])
    line.admit([request("c")])
    assert names(line.take()) == ["a", "b", "c"]
    assert line.take() == []


async def test_the_bound_of_events_counts_all_that_have_no_answer() -> None:
    line = queue(queue_events_max=2)
    first, second = request("a"), request("b")
    line.admit([first, second])
    line.take()
    with pytest.raises(Problem) as caught:
        line.admit([request("c")])
    assert (caught.value.kind.status, caught.value.kind.code) == (503, "not-written")
    answer(line, first)
    line.admit([request("c")])
    assert line.events == 2


async def test_the_bound_of_bytes() -> None:
    line = queue(queue_bytes_max=2 * (WAITING_BYTES + 100))
    line.admit([request("a", size=100)])
    with pytest.raises(Problem):
        line.admit([request("b", size=101)])
    line.admit([request("b", size=100)])
    assert line.bytes == 2 * (WAITING_BYTES + 100)


async def test_a_batch_is_let_in_whole_or_not() -> None:
    line = queue(queue_events_max=2)
    with pytest.raises(Problem):
        line.admit([request("a"), request("b"), request("c")])
    assert (line.events, line.bytes, line.take()) == (0, 0, [])


async def test_what_goes_round_again_comes_first_and_in_its_order() -> None:
    line = queue()
    a, b, c, d = (request(name) for name in "abcd")
    line.admit([a, b, c, d])
    line.take()
    late = request("late")
    line.admit([late])
    answer(line, c)
    line.put_back([a, b, c, d])
    assert names(line.take()) == ["a", "b", "d", "late"]


async def test_what_was_answered_while_it_waited_is_not_given_out() -> None:
    line = queue()
    a, b = request("a"), request("b")
    line.admit([a, b])
    answer(line, a)
    assert names(line.take()) == ["b"]


async def test_a_group_closes_at_what_a_transaction_holds() -> None:
    line = queue(queue_bytes_max=10**9)
    large = GROUP_EVENT_BYTES_MAX // 2
    line.admit([request("a", size=large), request("b", size=large), request("c", size=1)])
    assert names(line.take()) == ["a", "b"]
    assert names(line.take()) == ["c"]
    line.admit([request(str(number)) for number in range(GROUP_LEDGER_BYTES_MAX // ENTRY_BYTES + 10)])
    first = line.take()
    assert len(first) == GROUP_LEDGER_BYTES_MAX // (ENTRY_BYTES + 1)
    assert len(line.take()) == GROUP_LEDGER_BYTES_MAX // ENTRY_BYTES + 10 - len(first)


async def test_what_alone_is_too_much_goes_alone() -> None:
    line = queue(queue_bytes_max=10**9)
    line.admit([request("a", size=2 * GROUP_EVENT_BYTES_MAX), request("b")])
    assert names(line.take()) == ["a"]


async def test_an_atomic_batch_goes_alone() -> None:
    line = queue()
    line.admit([request("a"), batch("whole", "t", "u"), request("b")])
    assert names(line.take()) == ["a"]
    (whole,) = line.take()
    assert whole.atomic
    assert len(whole.asked) == 3
    assert names(line.take()) == ["b"]


async def test_a_group_has_one_guarantee() -> None:
    line = queue()
    line.admit([request("a"), request("b", guarantee=Guarantee.IDEMPOTENT), request("c")])
    groups = [names(line.take()), names(line.take())]
    assert sorted(groups) == [["a", "c"], ["b"]]


async def test_a_suspect_travels_apart_until_one_of_its_events_commits() -> None:
    line = queue()
    good, bad, worse = request("good"), request("bad", "poisoned"), request("worse", "poisoned")
    line.admit([good, bad, worse])
    failed = line.take()
    line.suspect("poisoned")
    bad.failures = worse.failures = 1
    line.put_back(failed)
    fresh = request("fresh", "poisoned")
    line.admit([fresh])

    alone = line.take()
    assert names(alone) == ["bad"], "what was in a failed group goes alone"
    assert names(line.take()) == ["good"], "and the others do not wait for it"
    assert line.take() == [], "one apart at a time"
    line.returned(alone)
    alone = line.take()
    assert names(alone) == ["worse"]
    line.returned(alone)
    together = line.take()
    assert names(together) == ["fresh"]
    line.trust(["poisoned"])
    line.returned(together)
    line.admit([request("x", "poisoned"), request("y")])
    assert names(line.take()) == ["x", "y"]


async def test_suspects_that_failed_nothing_go_together_by_topic() -> None:
    line = queue()
    line.suspect("p")
    line.suspect("q")
    line.admit([request("p1", "p"), request("q1", "q"), request("p2", "p"), batch("both", "p", "q")])
    group = line.take()
    assert names(group) == ["p1", "p2"]
    line.returned(group)
    assert names(line.take()) == ["q1"]


async def test_trust_lets_what_waits_apart_go() -> None:
    line = queue()
    line.suspect("p")
    line.admit([request("p1", "p"), request("q1", "q")])
    line.trust(["other"])
    line.trust(["p"])
    assert sorted(names(line.take())) == ["p1", "q1"]


async def test_takers_are_woken_one_for_each_group() -> None:
    line = queue()
    woken: list[str] = []

    async def take(name: str) -> None:
        await line.wait()
        woken.append(name)
        line.take()

    takers = [asyncio.create_task(take(name)) for name in ("first", "second")]
    await asyncio.sleep(0)
    line.admit([request("a")])
    await takers[0]
    assert woken == ["first"]
    takers.append(asyncio.create_task(take("third")))
    await asyncio.sleep(0)
    line.nudge_all()
    await asyncio.gather(*takers)
    assert woken == ["first", "second", "third"]


async def test_a_taker_that_was_cancelled_takes_no_wake_up_with_it() -> None:
    line = queue()
    gone = asyncio.create_task(line.wait())
    stays = asyncio.create_task(line.wait())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    line.admit([request("a")])
    await asyncio.wait_for(stays, 1)
    assert gone.cancelled()


async def test_answered_requests_do_not_stay_in_the_lanes() -> None:
    line = queue()
    requests = [request(str(number)) for number in range(50)]
    line.admit(requests)
    for each in requests:
        answer(line, each)
    line.forget_answered()
    assert line.events == line.bytes == 0
    assert line.take() == []


async def test_an_answered_request_stays_answered() -> None:
    asked = request("a")
    with pytest.raises(IllegalMove):
        asked.move(RequestEvent.SEND)
    asked.move(RequestEvent.ANSWER)
    asked.move(RequestEvent.SEND)
    assert asked.state is RequestState.ANSWERED
    assert asked.answered
