"""The key stores of the suite: Redis, a Redis that lacks a newer command, and the fake with its own clock."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest
from redis import Redis as Client
from redis import ResponseError

from deploy.stack import Redis
from service.claims.keys import Keys, StoreGeneration
from service.claims.redis_store import RedisKeys
from service.core.metrics import Telemetry
from tests.contract.memory_keys import Clock, MemoryKeys, Server
from tests.durations import HOUR_MS

# Long enough for a few script calls, short enough for a test to wait for.
LEASE_MS = 300
RETENTION_MS = 60_000
LEAST_LEFT_MS = 40_000  # half of it, in which a state is about to expire, is longer than a test takes


@dataclass
class StoreUnderTest:
    """A key store, and ways to change it from outside."""

    keys: Keys
    flush: Callable[[], None]
    save: Callable[[], Callable[[], None]]  # copies the data of the store; returns a function that restores the copy
    elapse: Callable[[int], None]
    now_ms: Callable[[], int]
    full: Callable[[bool], None]  # whether the store takes no more writes
    hour: Keys  # the same store, used by a process whose leases last for an hour

    async def settled(self, generation: int = 1, freed: tuple[int, ...] = (10, 20)) -> StoreGeneration:
        """Make the store complete in a generation, with `freed` of each slot; each of these offsets is a term."""
        store = (await self.keys.who()).store
        assert await self.keys.recover(await self.keys.who(), "the first")
        await self.keys.recover_end(store, "the first", generation, freed)
        return StoreGeneration(generation, store)


SERVERS = ("redis", "older_redis")


def assert_expires(client: Client, key: bytes, at_ms: int) -> None:
    """Check the expiry of a key, by the server's clock; within 10 ms before Redis 7.0, which reports only a TTL."""
    try:
        assert client.pexpiretime(key) == at_ms  # type: ignore[arg-type] # bytes are fine
    except ResponseError:
        with client.pipeline(transaction=True) as pipeline:
            pipeline.time()
            pipeline.pttl(key)
            (seconds, micros), left_ms = pipeline.execute()
        assert int(seconds) * 1000 + int(micros) // 1000 + int(left_ms) == pytest.approx(at_ms, abs=10)


@pytest.fixture(params=["memory", *SERVERS])
async def under_test(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[StoreUnderTest]:
    if request.param == "memory":
        yield memory_store()
        return
    redis: Redis = request.getfixturevalue(request.param)
    keys, hour = redis_keys(redis, namespace), redis_keys(redis, namespace, lease_ttl_ms=HOUR_MS)
    with redis_store(redis, namespace, keys, hour) as under_test:
        yield under_test
    for each in (keys, hour):
        await each.close()


def memory_store() -> StoreUnderTest:
    clock = Clock()
    server = Server("run/replid", clock)
    keys, hour = (
        MemoryKeys(server, retention_ms=RETENTION_MS, least_left_ms=LEAST_LEFT_MS, lease_ttl_ms=lease_ms)
        for lease_ms in (LEASE_MS, HOUR_MS)
    )

    def fill(full: bool) -> None:
        server.full = full

    return StoreUnderTest(keys, server.flush, server.save, clock.pass_ms, lambda: clock.now_ms, fill, hour)


@contextlib.contextmanager
def redis_store(redis: Redis, namespace: str, keys: RedisKeys, hour: RedisKeys) -> Iterator[StoreUnderTest]:
    pattern = f"{{{namespace}:0}}*".encode()
    with redis.client() as client:

        def forget() -> None:
            """Delete the keys of this namespace only, as a flush would."""
            for key in client.scan_iter(match=pattern):
                client.delete(key)

        def save() -> Callable[[], None]:
            saved = {key: (client.dump(key), client.pttl(key)) for key in client.scan_iter(match=pattern)}

            def put_back() -> None:
                forget()
                for key, (dumped, ttl_ms) in saved.items():
                    client.restore(key, max(0, ttl_ms), dumped)

            return put_back

        def now_ms() -> int:
            seconds, micros = client.time()
            return int(seconds * 1000 + micros // 1000)

        def limit(full: bool) -> None:
            client.config_set("maxmemory", 1 if full else 0)

        try:
            yield StoreUnderTest(keys, forget, save, lambda ms: time.sleep(ms / 1000), now_ms, limit, hour)
        finally:
            limit(full=False)


def redis_keys(
    redis: Redis, namespace: str, retention_ms: int = RETENTION_MS, lease_ttl_ms: int = LEASE_MS
) -> RedisKeys:
    return RedisKeys(
        redis.url,
        namespace,
        retention_ms=retention_ms,
        least_left_ms=LEAST_LEFT_MS,
        lease_ttl_ms=lease_ttl_ms,
        timeout_s=10,
        telemetry=Telemetry(),
    )
