"""Tests rates over all processes: slices of a bucket, debts, a store that is away, and what an answer says of them."""

import asyncio
from collections.abc import Sequence

import pytest

from service.claims.rates import Ask, Granted
from service.core.problems import RATE_LIMITED, Problem, StoreAway, StoreUnanswered
from service.http.caller import Caller
from service.http.rates import HELD_S, PAUSE_S, SLICE_S, TIMEOUT_S, RatePending, Rates, rate_lines


class World:
    """Processes that share a store, at a time that the test chooses."""

    def __init__(self, processes: int = 1) -> None:
        self.now = 1_000.0
        self.asked: list[Ask] = []
        self.calls = 0
        self.fault: Exception | None = None
        self.is_silent = False
        self._buckets = Rates(now=lambda: self.now)  # of the store
        self.rates = [Rates(self, lambda: processes, now=lambda: self.now) for _ in range(processes)]

    async def take_tokens(self, asks: Sequence[Ask]) -> list[Granted]:
        self.calls += 1
        self.asked += asks
        await asyncio.sleep(60 if self.is_silent else 0)
        if self.fault is not None:
            raise self.fault
        return await self._buckets.take(asks)

    def callers(self, events: float | None = None, size: float | None = None) -> list[Caller]:
        """Make one caller in each process."""
        return [Caller("shop", lambda _: True, rates.buckets("shop", events, size)) for rates in self.rates]


async def sent(caller: Caller, events: int = 1, size: int = 0) -> int:
    """Send events as a request does; returns 0 if they are admitted, else Retry-After in seconds."""
    while True:
        try:
            caller.admit()
            caller.spend(events, size)
            return 0
        except RatePending as wanted:
            await wanted.fetched()
        except Problem as problem:
            return (problem.kind is RATE_LIMITED and problem.retry_after_s) or -1


async def test_a_rate_lets_a_second_of_events_through_at_once_and_then_as_many_a_second() -> None:
    world = World()
    (caller,) = world.callers(10)
    assert [await sent(caller) for _ in range(12)] == [0] * 10 + [1, 1]
    world.now += 0.35
    assert [await sent(caller) for _ in range(4)] == [0, 0, 0, 1]
    world.now += 500
    assert [await sent(caller) for _ in range(11)] == [0] * 10 + [1]


async def test_a_rate_of_less_than_one_a_second() -> None:
    world = World()
    (caller,) = world.callers(0.5)
    found = []
    for step_s in (0, 0, 1, 1):
        world.now += step_s
        found.append(await sent(caller))
    assert found == [0, 2, 1, 0]


async def test_a_rate_holds_over_all_processes() -> None:
    world = World(4)
    callers = world.callers(20)
    found = [await sent(callers[n % 4]) for n in range(40)]
    assert found.count(0) == 20
    world.now += 0.5
    later = [await sent(callers[n % 4]) for n in range(40)]
    assert later.count(0) == 10


async def test_the_debt_of_a_batch_is_that_of_all_processes() -> None:
    world = World(2)
    one, other = world.callers(10)
    assert await sent(one, 40) == 0
    await asyncio.sleep(0.01)  # the debt is sent without a further request
    assert await sent(other) == 4  # the time of 31 events
    world.now += 3.0
    assert await sent(other) == 1
    world.now += 0.2
    assert await sent(other) == 0


async def test_events_cost_no_round_trip_each() -> None:
    world = World()
    (caller,) = world.callers(100_000)
    for _ in range(20_000):
        world.now += 1e-5
        assert await sent(caller) == 0
        await asyncio.sleep(0)
    assert world.calls < 40
    assert max(ask.want for ask in world.asked) == int(100_000 * SLICE_S)


async def test_a_slice_that_is_not_used_goes_back() -> None:
    world = World(2)
    one, other = world.callers(1_000)
    assert await sent(one) == 0
    held = sum(ask.want for ask in world.asked) - 1
    assert held > 0
    world.now += HELD_S + 1.0
    assert await sent(one, held) == 0
    await asyncio.sleep(0.01)
    assert world.asked[-1].spent <= 0
    assert await sent(other) == 0


async def test_many_requests_wait_for_one_slice() -> None:
    world = World()
    (caller,) = world.callers(100)
    assert set(await asyncio.gather(*(sent(caller) for _ in range(50)))) == {0}
    assert world.calls < 30


async def test_bytes_are_limited_too() -> None:
    world = World()
    (caller,) = world.callers(None, 1_000)
    assert [await sent(caller, size=600) for _ in range(3)] == [0, 0, 1]
    world.now += 0.3
    assert await sent(caller, size=600) == 0
    (both,) = world.callers(5, 10_000)
    assert [(one.burst, one.burst_bytes) for one in (both, caller)] == [(5, 10_000), (None, 1_000)]


@pytest.mark.parametrize("fault", [StoreAway("away"), StoreUnanswered("silent"), RuntimeError("bug")])
async def test_without_the_store_each_process_has_its_share(fault: Exception) -> None:
    world = World(2)
    callers = world.callers(20)
    world.fault = fault
    for caller in callers:
        assert [await sent(caller) for _ in range(12)].count(0) == 10
    assert world.calls == 2  # the store is left alone for a while
    world.fault = None
    world.now += PAUSE_S
    await sent(callers[0])
    assert world.calls == 3


async def test_a_store_that_is_silent_holds_nobody() -> None:
    world = World()
    (caller,) = world.callers(20)
    world.is_silent = True
    began = asyncio.get_running_loop().time()
    assert [await sent(caller), await sent(caller)] == [0, 0]
    assert asyncio.get_running_loop().time() - began < TIMEOUT_S + 1.0
    assert world.calls == 1


async def test_a_bug_while_a_slice_is_asked_for_refuses_for_a_while_and_holds_nobody() -> None:
    now, members = [1_000.0], [0]
    rates = Rates(members=lambda: 1 // members[0], now=lambda: now[0])
    caller = Caller("shop", lambda _: True, rates.buckets("shop", 20, None))
    async with asyncio.timeout(10):
        assert [await sent(caller), await sent(caller)] == [PAUSE_S, PAUSE_S]
        members[0] = 1
        now[0] += PAUSE_S
        assert await sent(caller) == 0


async def test_who_waits_for_a_slice_is_told_when_no_more_are_asked_for() -> None:
    world = World()
    world.is_silent = True
    (bucket,) = world.rates[0].buckets("shop", 20, None)
    waiting = asyncio.create_task(bucket.wait_s())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await world.rates[0].close()
    async with asyncio.timeout(1):
        assert await waiting == 0


async def test_a_client_is_told_what_remains() -> None:
    world = World()
    buckets = world.rates[0].buckets("shop", 100, 5_000)
    caller = Caller("shop", lambda _: True, buckets)
    assert rate_lines(()) == b""
    assert await sent(caller, 30, 600) == 0
    await asyncio.sleep(0.01)
    lines = caller.rate_lines().decode().splitlines()
    assert lines[0] == 'ratelimit-policy: "events";q=100;w=1, "bytes";q=5000;w=1;qu="content-bytes"'
    assert lines[1] == 'ratelimit: "events";r=70;t=1, "bytes";r=4400;t=1'
    slow = world.rates[0].buckets("slow", 0.1, None)
    assert rate_lines(slow).splitlines()[0] == b'ratelimit-policy: "events";q=1;w=10'


async def test_who_cannot_wait_for_tokens_gets_a_429() -> None:
    problem = RatePending("why", asyncio.get_running_loop().create_future())
    assert (problem.kind, problem.retry_after_s) == (RATE_LIMITED, 1)
