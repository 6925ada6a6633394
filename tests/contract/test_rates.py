"""Tests token buckets that processes share: one suite for the script in Redis and for the share of a process."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from deploy.stack import Redis
from service.claims.rates import Ask, Granted
from service.claims.redis_store import RedisKeys
from service.core.metrics import Telemetry
from service.http.rates import Rates, RateStore


class Alone:
    """The buckets of a process without a store."""

    def __init__(self) -> None:
        self._rates = Rates()

    async def take_tokens(self, asks: Sequence[Ask]) -> list[Granted]:
        return await self._rates.take(asks)


@pytest.fixture(params=["redis", "alone"])
async def store(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[RateStore]:
    if request.param == "alone":
        yield Alone()
        return
    redis: Redis = request.getfixturevalue("redis")
    keys = RedisKeys(
        redis.url,
        namespace,
        retention_ms=60_000,
        least_left_ms=1,
        lease_ttl_ms=1_000,
        timeout_s=1.0,
        telemetry=Telemetry(),
    )
    yield keys
    await keys.close()


def ask(id: bytes = b"a" * 16, rate: float = 10.0, burst: float = 10.0, spent: float = 0.0, want: int = 1) -> Ask:
    return Ask(id, rate, burst, spent, want)


async def granted(store: RateStore, *asks: Ask) -> list[int]:
    return [each.tokens for each in await store.take_tokens(asks)]


async def test_a_bucket_is_full_at_first_and_grants_what_it_has(store: RateStore) -> None:
    slow = ask(rate=0.001)
    assert await granted(store, slow._replace(want=4), slow._replace(want=4), slow._replace(want=4)) == [4, 4, 2]
    (empty,) = await store.take_tokens([slow])
    assert (empty.tokens, round(empty.left, 1)) == (0, 0.0)
    assert await granted(store, slow._replace(id=b"b" * 16, want=3)) == [3]


async def test_tokens_come_back_with_time_up_to_the_burst(store: RateStore) -> None:
    fast = ask(rate=1_000.0, burst=20.0, want=20)
    assert await granted(store, fast) == [20]
    await asyncio.sleep(0.01)
    assert 5 <= (await granted(store, fast))[0] <= 20
    await asyncio.sleep(0.1)
    assert await granted(store, fast, fast._replace(rate=0.001)) == [20, 0]


async def test_a_debt_is_paid_off_before_more_is_granted(store: RateStore) -> None:
    slow = ask(rate=0.001)
    (owing,) = await store.take_tokens([slow._replace(spent=25.0, want=5)])
    assert (owing.tokens, round(owing.left, 1)) == (0, -15.0)
    assert await granted(store, slow) == [0]


async def test_tokens_that_are_given_back_are_granted_again(store: RateStore) -> None:
    slow = ask(rate=0.001)
    assert await granted(store, slow._replace(want=8), slow._replace(spent=-6.0, want=9)) == [8, 8]
    assert await granted(store, slow._replace(spent=-100.0, want=100)) == [10]  # never more than the burst
