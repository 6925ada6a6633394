"""The key store in memory: the rules of `service.claims.states` over dicts, with a clock that tests move."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from service.claims import states
from service.claims.keys import Found, Heartbeat, ServerIdentity, StoreGeneration
from service.claims.states import Claim, Claimed, KeyState, Row
from service.core.problems import Fenced, StoreAway, StoreIncomplete, StoreLost

LEASES_MOST = 10


class Clock:
    """A clock in milliseconds, which tests move."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def pass_ms(self, ms: int) -> None:
        self.now_ms += ms


@dataclass
class Server:
    """A store with one identity: what Redis would hold of a namespace. `flush` deletes all but the identity."""

    store: str
    clock: Clock
    held: StoreGeneration | None = None
    claims: int = 0  # the number of calls that claimed something
    nonce: tuple[str, int] | None = None  # with the time at which it expires
    freed: dict[int, int] = field(default_factory=dict)
    applied: dict[int, int] = field(default_factory=dict)
    leases: dict[int, tuple[str, int]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    members: dict[str, int] = field(default_factory=dict)
    keys: dict[bytes, states.Claimed | states.Delivered | states.DeliveredBatch] = field(default_factory=dict)
    ttls_ms: dict[bytes, int] = field(default_factory=dict)  # of keys with a retention of their own
    full: bool = False  # whether it takes no more writes
    evicts: str = ""  # its maxmemory-policy, "" for noeviction
    # evicted keys: their number, and the number at the begin of the last store recovery, and of the one that made the
    # generation
    evicted: int = 0
    evicted_at_begin: int = 0
    evicted_before: int = 0

    def save(self) -> Callable[[], None]:
        """Copy its data; returns a function that restores the copy."""
        saved = copy.deepcopy({name: held for name, held in vars(self).items() if name != "clock"})
        return lambda: vars(self).update(copy.deepcopy(saved))

    def flush(self) -> None:
        self.__init__(self.store, self.clock)  # type: ignore[misc]


class MemoryKeys:
    """`service.claims.keys.Keys` on a `Server`, which several may share, as processes share a Redis."""

    def __init__(self, server: Server, *, retention_ms: int, least_left_ms: int, lease_ttl_ms: int) -> None:
        self.server = server
        self._retention_ms = retention_ms
        self._least_left_ms = least_left_ms
        self._lease_ttl_ms = lease_ttl_ms
        self._claims_seen: dict[StoreGeneration, int] = {}
        self._incomplete: StoreGeneration | None = None

    # ------------------------------------------------------------------------------------- helpers, as in the script

    @property
    def _now_ms(self) -> int:
        return self.server.clock.now_ms

    def _settled(self, generation: StoreGeneration) -> None:
        if self.server.held != generation or self.server.store != generation.store:
            raise StoreLost
        self._demand(generation, self.server.claims >= self._claims_seen.get(generation, 0))

    @property
    def _has_evicted(self) -> bool:
        return self.server.evicted != self.server.evicted_before

    def _demand(self, generation: StoreGeneration, is_whole: bool) -> None:
        if not is_whole:
            self._incomplete = generation
            raise StoreIncomplete

    def _count_claims(self, claims: Sequence[Claim], generation: StoreGeneration) -> None:
        self.server.claims += any(claim.outcome in states.CLAIMABLE for claim in claims)
        self._claims_seen[generation] = self.server.claims

    def _get(self, id: bytes) -> KeyState:
        state = self.server.keys.get(id)
        retention_ms = self.server.ttls_ms.get(id, self._retention_ms)
        return None if state is None or state.at + retention_ms <= self._now_ms else state

    def _put(self, id: bytes, state: KeyState, ttl_s: int = 0) -> None:
        self.server.ttls_ms.pop(id, None)
        if state is None:
            self.server.keys.pop(id, None)
            return
        self.server.keys[id] = state
        if ttl_s:
            self.server.ttls_ms[id] = 1000 * ttl_s

    def _freed(self, slot: int) -> int:
        return self.server.freed.get(slot, -1)

    def _refuse_if_full(self) -> None:
        if self.server.full:
            raise StoreAway("it is full")

    def _holder(self, slot: int) -> str | None:
        holder, until_ms = self.server.leases.get(slot, ("", 0))
        return holder if until_ms > self._now_ms else None

    def _lease(self, slot: int, token: str) -> None:
        self.server.leases[slot] = (token, self._now_ms + self._lease_ttl_ms)
        self.server.taken.add(slot)

    def _replay(self, rows: Sequence[Row]) -> None:
        for id, delivered in rows:
            state = states.replay(self._get(id), delivered, self._now_ms, self._ttl_ms(delivered.ttl_s))
            if state is delivered:
                self._put(id, state, delivered.ttl_s)

    def _ttl_ms(self, ttl_s: int) -> int:
        return 1000 * ttl_s or self._retention_ms

    # ------------------------------------------------------------------------------------------------- operations

    async def who(self) -> ServerIdentity:
        held = self.server.held
        incomplete = held is not None and held == self._incomplete
        return ServerIdentity(self.server.store, held, incomplete, self.server.evicts)

    async def clock_ms(self) -> int:
        return self._now_ms

    async def resolve_again(self) -> None:
        pass

    async def claim(
        self,
        generation: StoreGeneration,
        slot: int,
        term: int,
        asked: Sequence[tuple[bytes, bytes]],
        ttls_s: Sequence[int] = (),
    ) -> list[Claim]:
        self._settled(generation)
        self._fence(slot, term)
        claims = []
        for (id, fp), ttl_s in zip(asked, ttls_s or [0] * len(asked), strict=True):
            wanted = Claimed(slot, term, self._now_ms, fp)
            claim = states.claim(self._get(id), wanted, self._freed, self._ttl_ms(ttl_s), self._least_left_ms)
            if self.server.full and claim.outcome in states.CLAIMABLE:
                claims.append(Claim(states.Outcome.NOT_CLAIMED, Claimed(slot, term, 0, fp)))
                continue
            if claim.outcome in states.CLAIMABLE:
                self._put(id, claim.state, ttl_s)
            claims.append(self._with_lease(claim))
        self._count_claims(claims, generation)
        return claims

    async def claim_all(
        self,
        generation: StoreGeneration,
        slot: int,
        term: int,
        asked: Sequence[tuple[bytes, bytes]],
        ttl_s: int = 0,
    ) -> Claim:
        self._settled(generation)
        self._fence(slot, term)
        present = [self._get(id) for id, _ in asked]
        wanted = [Claimed(slot, term, self._now_ms, fp) for _, fp in asked]
        claim, written = states.claim_all(present, wanted, self._freed, self._ttl_ms(ttl_s), self._least_left_ms)
        if self.server.full and written:
            return Claim(states.Outcome.NOT_CLAIMED, Claimed(slot, term, 0, asked[0][1]))
        for (id, _), state in zip(asked, written, strict=False):
            self._put(id, state, ttl_s)
        self._count_claims([claim], generation)
        return self._with_lease(claim)

    def _fence(self, slot: int, term: int) -> None:
        if self._freed(slot) != term:
            raise Fenced

    def _with_lease(self, claim: Claim) -> Claim:
        if claim.outcome is not states.Outcome.IN_PROGRESS:
            return claim
        assert isinstance(claim.state, Claimed)
        return Claim(claim.outcome, claim.state, self._holder(claim.state.slot) is not None)

    async def mark(
        self, generation: StoreGeneration, slot: int, term: int, previous: int, offset: int, rows: Sequence[Row]
    ) -> int:
        self._settled(generation)
        self._refuse_if_full()
        untouched = 0
        for id, delivered in rows:
            state = states.mark(self._get(id), slot, term, delivered)
            untouched += state is not delivered
            if state is delivered:
                self._put(id, state, delivered.ttl_s)
        if self.server.applied.get(slot, -1) == previous:
            self.server.applied[slot] = offset
        return untouched

    async def release(self, generation: StoreGeneration, slot: int, term: int, ids: Sequence[bytes]) -> None:
        self._settled(generation)
        for id in ids:
            self._put(id, states.release(self._get(id), slot, term))

    async def find(self, generation: StoreGeneration, id: bytes) -> Found:
        self._settled(generation)
        state = self._get(id)
        if isinstance(state, Claimed):
            return Found(state, self._freed(state.slot) > state.term, self._holder(state.slot) is not None)
        return Found(state)

    async def find_all(self, generation: StoreGeneration, ids: Sequence[bytes]) -> list[KeyState]:
        self._settled(generation)
        return [self._get(id) for id in ids]

    async def applied(self, generation: StoreGeneration, slot: int) -> int | None:
        self._settled(generation)
        return self.server.applied.get(slot)

    async def replay(
        self, generation: StoreGeneration, rows: Sequence[Row], free: tuple[int, int] | None = None
    ) -> None:
        self._settled(generation)
        self._refuse_if_full()
        self._replay(rows)
        if free is not None:
            slot, term = free
            _raise(self.server.freed, slot, term)
            _raise(self.server.applied, slot, term)
            self._fence(slot, term)

    async def take(self, generation: StoreGeneration, slot: int, token: str) -> bool:
        self._settled(generation)
        if self._holder(slot) not in (None, token):
            return False
        self._lease(slot, token)
        return True

    async def give_back(self, generation: StoreGeneration, slot: int, token: str, clean: bool) -> None:
        self._settled(generation)
        if self._holder(slot) == token:
            del self.server.leases[slot]
            if clean:
                self.server.taken.discard(slot)

    async def heartbeat(
        self, generation: StoreGeneration, token: str, slots: int, held: Mapping[int, int]
    ) -> Heartbeat:
        self._settled(generation)
        self._demand(generation, all(self.server.applied.get(slot, -1) >= applied for slot, applied in held.items()))
        self._demand(generation, not self._has_evicted)
        self._claims_seen[generation] = self.server.claims
        most_ms = self._now_ms + LEASES_MOST * self._lease_ttl_ms
        self.server.members[token] = self._now_ms + self._lease_ttl_ms
        members = self.server.members.items()
        self.server.members = {name: until for name, until in members if self._now_ms < until <= most_ms}
        view = ""
        for slot in range(1 + max([slots - 1, *held, *self.server.taken])):
            holder = self._holder(slot)
            if slot in held and holder in (None, token):
                self._lease(slot, token)
                view += "m"
            elif holder is not None:
                if self.server.leases[slot][1] > most_ms:
                    self.server.leases[slot] = (holder, self._now_ms + self._lease_ttl_ms)
                view += "t"
            else:
                view += "d" if slot in self.server.taken else "f"
        return Heartbeat(len(self.server.members), view, {slot: self.server.freed.get(slot, -1) for slot in held})

    async def leave(self, generation: StoreGeneration, token: str) -> None:
        self._settled(generation)
        self.server.members.pop(token, None)

    # --------------------------------------------------------------------------------------------- store recovery

    def _recovering(self, store: str, nonce: str) -> None:
        if self.server.store != store or self._nonce != nonce:
            raise StoreLost
        self.server.nonce = (nonce, self._now_ms + self._nonce_ttl_ms)

    @property
    def _nonce(self) -> str | None:
        nonce, until_ms = self.server.nonce or ("", 0)
        return nonce if until_ms > self._now_ms else None

    @property
    def _nonce_ttl_ms(self) -> int:
        return 5 * self._lease_ttl_ms

    async def recover(self, seen: ServerIdentity, nonce: str) -> bool:
        if self.server.store != seen.store:
            raise StoreLost
        if self._nonce is not None or (await self.who()).generation != seen.generation:
            return False
        self.server.nonce = (nonce, self._now_ms + self._nonce_ttl_ms)
        self.server.evicted_at_begin = self.server.evicted
        return True

    async def recover_read(self, store: str, nonce: str, slots: int) -> list[int | None]:
        self._recovering(store, nonce)
        return [None if self._has_evicted else self.server.applied.get(slot) for slot in range(slots)]

    async def recover_replay(self, store: str, nonce: str, rows: Sequence[Row]) -> None:
        self._recovering(store, nonce)
        self._replay(rows)

    async def recover_end(self, store: str, nonce: str, number: int, freed: Sequence[int]) -> None:
        self._recovering(store, nonce)
        if self.server.held is not None and self.server.held.number >= number:
            raise StoreLost
        for slot, offset in enumerate(freed):
            _raise(self.server.freed, slot, offset)
            _raise(self.server.applied, slot, offset)
        self.server.held = StoreGeneration(number, store)
        self.server.evicted_before = self.server.evicted_at_begin
        self.server.nonce = None

    async def recover_abandon(self, store: str, nonce: str) -> None:
        if self.server.store == store and self._nonce == nonce:
            self.server.nonce = None


def _raise(numbers: dict[int, int], slot: int, value: int) -> None:
    if value > numbers.get(slot, -1):
        numbers[slot] = value
