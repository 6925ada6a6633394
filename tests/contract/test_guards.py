"""Compares the guards of `claims.lua` with those of the model: the same small stores and calls in both.

The conditions that a script checks before it writes (generation, store, term, nonce), and the moves of `applied`,
`freed` and the generation, are implemented twice: in Lua, and in `tests.model.scripts` for the search. The vectors here
compare both, as `test_vectors` does for the states of keys. The fake in memory is compared too.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import product

import pytest

from deploy.stack import Redis
from service.claims.keys import Keys, StoreGeneration
from service.claims.redis_store import RedisKeys
from service.claims.states import Claimed
from service.contract.wire.versions import NewerVersion
from service.core.problems import Fenced, StoreLost
from tests.contract.modelled import (
    ELSEWHERE,
    IDS,
    OTHER,
    THIS,
    InMemory,
    InRedis,
    Modelled,
    asked_of,
    generation_of,
    identity_of,
    name_of,
    rows_of,
)
from tests.model import scripts
from tests.model.rules import Rules
from tests.model.world import FP, NONE, Debt, Store, encode

RULES = Rules()
SLOT, TERM = 0, 100
CLAIM = encode(Claimed(SLOT, TERM, 0, FP))
STORE = Store(5, THIS, NONE, (TERM, 60), (104, 60), (CLAIM,))

Call = Callable[[Keys, StoreGeneration], Awaitable[object]]
# Every operation for one generation of one store, with arguments that no other guard refuses.
GUARDED: dict[str, Call] = {
    "claim": lambda keys, generation: keys.claim(generation, SLOT, TERM, asked_of(1)),
    "claim_all": lambda keys, generation: keys.claim_all(generation, SLOT, TERM, asked_of(3)),
    "mark": lambda keys, generation: keys.mark(generation, SLOT, TERM, 104, 106, rows_of(1, 1)),
    "release": lambda keys, generation: keys.release(generation, SLOT, TERM, IDS[:1]),
    "find": lambda keys, generation: keys.find(generation, IDS[0]),
    "find_all": lambda keys, generation: keys.find_all(generation, IDS),
    "applied": lambda keys, generation: keys.applied(generation, SLOT),
    "replay": lambda keys, generation: keys.replay(generation, rows_of(1, 1), (SLOT, 120)),
    "take": lambda keys, generation: keys.take(generation, SLOT, "me"),
    "give_back": lambda keys, generation: keys.give_back(generation, SLOT, "me", True),
    "heartbeat": lambda keys, generation: keys.heartbeat(generation, "me", 2, {SLOT: 104}),
    "leave": lambda keys, generation: keys.leave(generation, "me"),
}
CLAIMS: tuple[Call, ...] = (
    GUARDED["claim"],
    lambda keys, generation: keys.claim_all(generation, SLOT, TERM, asked_of(1)),
)
# Every operation of a store recovery in progress: for a server, and under nonce 7.
RecoveryCall = Callable[[Modelled, str], Awaitable[object]]
RECOVERING: dict[str, RecoveryCall] = {
    "recover_read": lambda held, server: held.keys.recover_read(server, name_of(7), 2),
    "recover_replay": lambda held, server: held.keys.recover_replay(server, name_of(7), rows_of(1, held.now_ms())),
}


@pytest.fixture(params=["memory", "redis"])
async def held(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Modelled]:
    if request.param == "memory":
        yield InMemory(now_ms=1_700_000_000_000)
        return
    redis: Redis = request.getfixturevalue("redis")
    with redis.client() as client:
        store = InRedis(redis, namespace, client)
        yield store
        assert isinstance(store.keys, RedisKeys)
        await store.keys.close()


@pytest.mark.parametrize("operation", GUARDED)
async def test_an_operation_for_another_generation_or_store_is_refused(held: Modelled, operation: str) -> None:
    """With every generation and store of the call, and every state of the server."""
    refused = 0
    for generation, named, caller in product((NONE, 4, 5, 6), (THIS, OTHER), (THIS, OTHER)):
        before = STORE._replace(generation=generation, named=NONE if generation == NONE else named)
        held.write(before)
        call = GUARDED[operation](held.keys, generation_of(5, caller, held.server))
        if scripts.settled(before, THIS, 5, caller, RULES):
            await call
        else:
            refused += 1
            with pytest.raises(StoreLost):
                await call
            assert held.read(1) == before
    assert refused == 15  # of 16: only one generation of one store, and a caller with both, is accepted


async def test_keys_of_a_later_layout_are_neither_read_nor_written(redis: Redis, namespace: str) -> None:
    """A later layout has its version before the generation, which every script compares."""
    with redis.client() as client:
        store = InRedis(redis, namespace, client)
        assert isinstance(store.keys, RedisKeys)
        try:
            store.write(STORE)
            generation = generation_of(5, THIS, store.server)
            seen = await store.keys.who()
            later = f"v2 5 {store.server}".encode()
            client.set(f"{{{namespace}:0}}g", later)
            before = {key: client.dump(key) for key in client.keys(f"{{{namespace}:0}}*")}
            with pytest.raises(NewerVersion, match="Redis holds keys of version 2, which a newer release has written"):
                await store.keys.who()
            for call in GUARDED.values():
                with pytest.raises(StoreLost):
                    await call(store.keys, generation)
            assert not await store.keys.recover(seen, "mine")
            assert {key: client.dump(key) for key in client.keys(f"{{{namespace}:0}}*")} == before
        finally:
            await store.keys.close()


@pytest.mark.parametrize("freed", [NONE, TERM - 1, TERM, TERM + 1])
async def test_a_claim_demands_its_slot_s_term(held: Modelled, freed: int) -> None:
    before = STORE._replace(freed=(freed, 60), keys=(0,))
    outcome, after = scripts.claim(before, SLOT, TERM, RULES)
    for call in CLAIMS:
        held.write(before)
        if outcome is None:
            with pytest.raises(Fenced):
                await call(held.keys, generation_of(5, THIS, held.server))
        else:
            await call(held.keys, generation_of(5, THIS, held.server))
        assert held.read(1) == after


@pytest.mark.parametrize("freed", [NONE, 59, 60, 61])
async def test_a_claim_of_another_slot_is_dead_below_its_freed(held: Modelled, freed: int) -> None:
    claimed = encode(Claimed(1, 60, 0, FP))
    before = STORE._replace(freed=(TERM, freed), keys=(claimed,))
    held.write(before)
    outcome, after = scripts.claim(before, SLOT, TERM, RULES)
    (claim,) = await held.keys.claim(generation_of(5, THIS, held.server), SLOT, TERM, asked_of(1))
    assert claim.outcome is outcome
    assert held.read(1) == after


@pytest.mark.parametrize("applied", [NONE, 100, 104, 106])
async def test_applied_moves_from_exactly_the_record_before(held: Modelled, applied: int) -> None:
    for previous, offset, term in product((NONE, 99, 100, 104, 106), (101, 106, 108), (TERM - 1, TERM)):
        before = STORE._replace(applied=(applied, 60))
        held.write(before)
        wanted = scripts.mark(before, SLOT, Debt(5, THIS, term, previous, offset, 1), RULES)
        await held.keys.mark(
            generation_of(5, THIS, held.server), SLOT, term, previous, offset, rows_of(1, held.now_ms())
        )
        assert held.read(1) == wanted, (previous, offset, term)


async def test_a_replay_raises_freed_and_applied_and_lowers_neither(held: Modelled) -> None:
    for freed, applied, term in product((NONE, 99, 100, 101), (NONE, 99, 100, 101), (99, 100, 101)):
        before = STORE._replace(freed=(freed, 60), applied=(applied, 60))
        held.write(before)
        wanted = scripts.free(scripts.replay(before, 1), SLOT, term, term)
        call = held.keys.replay(generation_of(5, THIS, held.server), rows_of(1, held.now_ms()), (SLOT, term))
        if wanted.freed[SLOT] != term:  # a later term was freed: the caller was fenced
            with pytest.raises(Fenced):
                await call
        else:
            await call
        assert held.read(1) == wanted, (freed, applied, term)


async def test_a_store_recovery_begins_once(held: Modelled) -> None:
    for seen, nonce, generation in product((NONE, 4, 5), (NONE, 7, 8), (NONE, 4, 5)):
        before = STORE._replace(nonce=nonce, generation=generation, named=NONE if generation == NONE else OTHER)
        held.write(before)
        wanted = scripts.recover(before, 7, (seen, NONE if seen == NONE else OTHER))
        identity = identity_of(STORE._replace(generation=seen, named=OTHER), held.server)
        assert await held.keys.recover(identity, name_of(7)) == (wanted is not None)
        assert held.read(1) == (wanted or before), (seen, nonce, generation)


@pytest.mark.parametrize("operation", RECOVERING)
async def test_each_step_of_a_store_recovery_demands_its_store_and_nonce(held: Modelled, operation: str) -> None:
    for nonce, named in product((NONE, 7, 8), (THIS, OTHER)):
        before = STORE._replace(nonce=nonce)
        held.write(before)
        call = RECOVERING[operation](held, held.server if named == THIS else ELSEWHERE)
        if scripts.recovering(before, THIS, named, 7, RULES):
            await call
            assert held.read(1) == (scripts.replay(before, 1) if operation == "recover_replay" else before)
        else:
            with pytest.raises(StoreLost):
                await call
            assert held.read(1) == before, (nonce, named)


async def test_the_end_of_a_store_recovery(held: Modelled) -> None:
    for nonce, named, generation, through in product(
        (NONE, 7, 8), (THIS, OTHER), (NONE, 4, 5, 6), ((90, 50), (110, 50), (90, 70))
    ):
        before = STORE._replace(nonce=nonce, generation=generation, named=NONE if generation == NONE else OTHER)
        held.write(before)
        wanted = scripts.recovered(before, THIS, named, 7, 5, through, RULES)
        call = held.keys.recover_end(held.server if named == THIS else ELSEWHERE, name_of(7), 5, through)
        if wanted is None:
            with pytest.raises(StoreLost):
                await call
        else:
            await call
        assert held.read(1) == (wanted or before), (nonce, named, generation, through)


async def test_an_attempt_that_failed_takes_only_its_own_nonce_away(held: Modelled) -> None:
    for nonce in (NONE, 7, 8):
        before = STORE._replace(nonce=nonce)
        held.write(before)
        await held.keys.recover_abandon(held.server, name_of(7))
        assert held.read(1) == scripts.abandoned(before, 7)
        held.write(before)
        await held.keys.recover_abandon(ELSEWHERE, name_of(7))
        assert held.read(1) == before
