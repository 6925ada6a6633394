"""Redis and its fake in memory, set to a store of the model and read back in the model's terms.

The model numbers stores: THIS is the server that answers, OTHER is any other one. Nonces are numbers too.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from msgspec.structs import replace
from redis import Redis as Client

from deploy.stack import Redis
from service.claims.keys import Keys, ServerIdentity, StoreGeneration
from service.claims.redis_store import RedisKeys
from service.claims.state_codec import pack, unpack
from service.claims.states import Claimed, Delivered, DeliveredBatch, KeyState, Row
from service.core.metrics import Telemetry
from tests.contract.memory_keys import Clock, MemoryKeys, Server
from tests.model.world import FP, NONE, ONE, SLOTS, WHOLE, Store, decode, encode

THIS: Final = 0
OTHER: Final = 1
ELSEWHERE: Final = "another/server"

# No key expires during these tests.
RETENTION_MS: Final = 3_600_000
LEAST_LEFT_MS: Final = 600_000  # half of the retention that is left counts as little: more than a test takes
LEASE_MS: Final = 60_000

IDS: Final = tuple(bytes([number]) * 16 for number in range(3))  # the event; or the whole batch and its two members


def name_of(nonce: int) -> str:
    return f"nonce {nonce}"


class Modelled(Protocol):
    """A key store that can be compared with the model's store."""

    keys: Keys
    server: str  # its run_id/master_replid

    def read(self, count: int) -> Store:
        """Read its data, with the first `count` of IDS."""

    def write(self, store: Store) -> None:
        """Replace its data."""

    def now_ms(self) -> int: ...


class InRedis:
    """Redis. Its data are set and read without the script, by the keys that claims.lua describes."""

    def __init__(self, redis: Redis, namespace: str, client: Client) -> None:
        self.keys: Keys = RedisKeys(
            redis.url,
            namespace,
            retention_ms=RETENTION_MS,
            least_left_ms=LEAST_LEFT_MS,
            lease_ttl_ms=LEASE_MS,
            timeout_s=10,
            telemetry=Telemetry(),
        )
        self._client = client
        self._prefix = f"{{{namespace}:0}}".encode()
        info = {**client.info("server"), **client.info("replication")}
        self.server = f"{info['run_id']}/{info['master_replid']}"

    def read(self, count: int) -> Store:
        pipe = self._client.pipeline(transaction=True)
        for name in (b"g", b"n"):
            pipe.get(self._prefix + name)
        for name in (b"f", b"a"):
            pipe.hgetall(self._prefix + name)
        for id in IDS[:count]:
            pipe.get(self._prefix + b"k" + id)
        held, nonce, freed, applied, *states = pipe.execute()
        generation, _, named = (held or b"").decode().partition(" ")
        return Store(
            int(generation or NONE),
            _number(named, self.server),
            NONE if nonce is None else int(nonce.split()[1]),
            tuple(int(freed.get(str(slot).encode(), NONE)) for slot in SLOTS),
            tuple(int(applied.get(str(slot).encode(), NONE)) for slot in SLOTS),
            tuple(encode(timeless(None if state is None else unpack(state))) for state in states),
        )

    def write(self, store: Store) -> None:
        now_ms = self.now_ms()
        pipe = self._client.pipeline(transaction=True)
        pipe.delete(*(self._prefix + name for name in (b"g", b"n", b"f", b"a", *(b"k" + id for id in IDS))))
        if store.generation != NONE:
            pipe.set(self._prefix + b"g", f"{store.generation} {_name(store.named, self.server)}")
        if store.nonce != NONE:
            pipe.set(self._prefix + b"n", name_of(store.nonce))
        for name, offsets in ((b"f", store.freed), (b"a", store.applied)):
            for slot, offset in enumerate(offsets):
                if offset != NONE:
                    pipe.hset(self._prefix + name, str(slot), str(offset))
        for id, key in zip(IDS, store.keys, strict=False):
            if (state := timed(decode(key), now_ms)) is not None:
                pipe.set(self._prefix + b"k" + id, pack(state), pxat=state.at + RETENTION_MS)
        pipe.execute()

    def now_ms(self) -> int:
        seconds, micros = self._client.time()
        return int(seconds * 1000 + micros // 1000)


class InMemory:
    """The fake of the unit tests; its clock does not move."""

    def __init__(self, now_ms: int) -> None:
        self.server = "double/replid"
        self._held = Server(self.server, Clock(now_ms))
        self.keys: Keys = MemoryKeys(
            self._held, retention_ms=RETENTION_MS, least_left_ms=LEAST_LEFT_MS, lease_ttl_ms=LEASE_MS
        )

    def read(self, count: int) -> Store:
        held = self._held
        return Store(
            NONE if held.held is None else held.held.number,
            NONE if held.held is None else _number(held.held.store, self.server),
            NONE if held.nonce is None else int(held.nonce[0].split()[1]),
            tuple(held.freed.get(slot, NONE) for slot in SLOTS),
            tuple(held.applied.get(slot, NONE) for slot in SLOTS),
            tuple(encode(timeless(held.keys.get(id))) for id in IDS[:count]),
        )

    def write(self, store: Store) -> None:
        held = self._held
        claims = held.claims
        held.flush()
        held.claims = claims  # the model has no such number, because none of its stores is an older copy
        if store.generation != NONE:
            held.held = StoreGeneration(store.generation, _name(store.named, self.server))
        if store.nonce != NONE:
            held.nonce = (name_of(store.nonce), held.clock.now_ms + LEASE_MS)
        held.freed = {slot: offset for slot, offset in enumerate(store.freed) if offset != NONE}
        held.applied = {slot: offset for slot, offset in enumerate(store.applied) if offset != NONE}
        found = {id: timed(decode(key), held.clock.now_ms) for id, key in zip(IDS, store.keys, strict=False)}
        held.keys = {id: state for id, state in found.items() if state is not None}

    def now_ms(self) -> int:
        return self._held.clock.now_ms


def generation_of(generation: int, named: int, server: str) -> StoreGeneration:
    """Convert a caller's generation and store from the model's numbers."""
    return StoreGeneration(generation, _name(named, server))


def identity_of(store: Store, server: str) -> ServerIdentity:
    """Return what a caller knows of a store that was this one."""
    seen = None if store.generation == NONE else generation_of(store.generation, store.named, server)
    return ServerIdentity(server, seen)


def rows_of(count: int, at: int) -> list[Row]:
    """Return the ledger's rows for the first `count` of IDS."""
    one, whole = replace(ONE, at=at), replace(WHOLE, at=at)
    rows: Sequence[Delivered | DeliveredBatch] = (one,) if count == 1 else (whole, one, one)
    return list(zip(IDS, rows, strict=False))


def asked_of(count: int) -> list[tuple[bytes, bytes]]:
    """Return the (id, fingerprint) pair of a claim."""
    return [(id, FP) for id in IDS[:count]]


def timed(state: KeyState, at: int) -> KeyState:
    """Convert a state of the model, with `at` as accepted_at."""
    return state and replace(state, at=at)


def timeless(state: KeyState) -> KeyState:
    """Convert a state to the model's, which has one fingerprint, one position and no time."""
    found = timed(state, 0)
    assert not isinstance(found, Claimed) or found.fp == FP
    assert not isinstance(found, Delivered) or found == ONE
    assert not isinstance(found, DeliveredBatch) or found == WHOLE
    return found


def _name(number: int, server: str) -> str:
    return server if number == THIS else ELSEWHERE


def _number(name: str, server: str) -> int:
    return NONE if not name else THIS if name == server else OTHER
