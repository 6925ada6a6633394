"""Random steps on a store: Redis, and its fake in memory, with the model as the oracle.

Hypothesis draws the steps: calls of processes that are up to date, late, or wrong, and changes of a store from outside.
After each step both stores must have the state and the answer of the model's functions; a failure is shrunk to the
fewest steps.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from deploy.stack import Redis
from service.claims.redis_store import RedisKeys
from service.claims.states import Claimed, Outcome
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
from tests.model.world import NONE, SLOTS, Debt, Store, decode

EXAMPLES: Final = 40
STEPS: Final = 40
RULES: Final = Rules()

# The reply of a call, or the kind of exception that it raised.
Answer = Any
Call = Callable[[Modelled], Awaitable[Answer]]

a_slot = st.sampled_from(SLOTS)
# The distance of a caller's numbers from the store's, mostly 0.
off = st.sampled_from([0, 0, 0, 0, 0, -1, 1])
a_store = st.sampled_from([THIS, THIS, THIS, THIS, OTHER])
a_nonce = st.sampled_from([1, 1, 1, 2])
some_offsets = st.tuples(st.integers(-1, 12), st.integers(-1, 12))


class Life(RuleBasedStateMachine):
    """One store in the model, in Redis and in memory, with the same steps."""

    def __init__(self, stores: tuple[Modelled, ...], loop: asyncio.AbstractEventLoop, count: int) -> None:
        super().__init__()
        self.stores = stores
        self.loop = loop
        self.count = count  # number of ids: one event, or an atomic batch and its two members
        self.empty = scripts.flushed(Store(NONE, NONE, NONE, (), (), (0,) * count))
        self.at = min(store.now_ms() for store in stores)
        # The first store is complete.
        self.put(self.empty._replace(generation=2, named=THIS, freed=(3, 5), applied=(3, 5)))

    def put(self, model: Store) -> None:
        """Change the store from outside."""
        self.model = model
        for store in self.stores:
            store.write(model)

    def ask(self, call: Call, wanted: Answer, after: Store) -> None:
        """Call each store: all must answer as the model, whose store is then `after`."""
        for store in self.stores:
            answer = self.loop.run_until_complete(_outcome(call(store)))
            assert answer == wanted, f"{type(store).__name__} answers {answer}, the model {wanted}"
        self.model = after

    def ask_within(self, generation: int, named: int, call: Call, wanted: Answer, after: Store) -> None:
        """Do `ask` for a generation of a store, which may not be the present one."""
        if not scripts.settled(self.model, THIS, generation, named, RULES):
            wanted, after = StoreLost, self.model
        self.ask(call, wanted, after)

    def ask_under(self, call: Call, after: Store | None) -> None:
        """Do `ask` for a step of store recovery; `after` is None if the model refuses it."""
        self.ask(call, StoreLost if after is None else None, self.model if after is None else after)

    @invariant()
    def all_hold_the_same(self) -> None:
        for store in self.stores:
            assert store.read(self.count) == self.model, type(store).__name__

    # ------------------------------------------------------------------------------------ writing an event

    def near(self, number: int, by: int) -> int:
        return max(0, number + by)

    @rule(slot=a_slot, term_off=off, generation_off=off, named=a_store)
    def claim(self, slot: int, term_off: int, generation_off: int, named: int) -> None:
        term = self.near(self.model.freed[slot], term_off)
        generation = self.near(self.model.generation, generation_off)
        outcome, after = scripts.claim(self.model, slot, term, RULES)

        async def call(store: Modelled) -> Outcome:
            here = generation_of(generation, named, store.server)
            if self.count > 1:
                return (await store.keys.claim_all(here, slot, term, asked_of(self.count))).outcome
            (claim,) = await store.keys.claim(here, slot, term, asked_of(1))
            return claim.outcome

        self.ask_within(generation, named, call, outcome or Fenced, after)

    @rule(slot=a_slot, term_off=off, previous_off=off, length=st.integers(1, 3), generation_off=off, named=a_store)
    def mark(self, slot: int, term_off: int, previous_off: int, length: int, generation_off: int, named: int) -> None:
        term, previous = self.near(self.model.freed[slot], term_off), self.model.applied[slot] + previous_off
        generation = self.near(self.model.generation, generation_off)
        debt = Debt(generation, named, term, previous, max(0, previous + length), 1)
        found = [decode(key) for key in self.model.keys]
        mine = [
            state is None or (isinstance(state, Claimed) and (state.slot, state.term) == (slot, term))
            for state in found
        ]

        async def call(store: Modelled) -> int:
            here = generation_of(generation, named, store.server)
            return await store.keys.mark(here, slot, term, previous, debt.offset, rows_of(self.count, self.at))

        self.ask_within(generation, named, call, mine.count(False), scripts.mark(self.model, slot, debt, RULES))

    @rule(slot=a_slot, term_off=off, generation_off=off, named=a_store)
    def release(self, slot: int, term_off: int, generation_off: int, named: int) -> None:
        term = self.near(self.model.freed[slot], term_off)
        generation = self.near(self.model.generation, generation_off)

        async def call(store: Modelled) -> None:
            await store.keys.release(generation_of(generation, named, store.server), slot, term, IDS[: self.count])

        self.ask_within(generation, named, call, None, scripts.release(self.model, slot, term, RULES))

    @rule(generation_off=off, named=a_store)
    def find(self, generation_off: int, named: int) -> None:
        generation = self.near(self.model.generation, generation_off)
        state = decode(self.model.keys[0])
        dead = isinstance(state, Claimed) and self.model.freed[state.slot] > state.term

        async def call(store: Modelled) -> bool:
            return (await store.keys.find(generation_of(generation, named, store.server), IDS[0])).dead

        self.ask_within(generation, named, call, dead, self.model)

    # -------------------------------------------------------------------------------------- slot recovery

    @rule(slot=a_slot, by=st.integers(-1, 3), rows=st.booleans(), generation_off=off, named=a_store)
    def replay_and_free(self, slot: int, by: int, rows: bool, generation_off: int, named: int) -> None:
        term = self.near(self.model.freed[slot], by)
        generation = self.near(self.model.generation, generation_off)
        after = scripts.free(scripts.replay(self.model, rows), slot, term, term)

        async def call(store: Modelled) -> None:
            found = rows_of(self.count, self.at) if rows else []
            await store.keys.replay(generation_of(generation, named, store.server), found, (slot, term))

        self.ask_within(generation, named, call, None if after.freed[slot] == term else Fenced, after)

    # ------------------------------------------------------------------------------------- store recovery

    @rule(nonce=a_nonce, stale=st.sampled_from([False, False, True]))
    def recover(self, nonce: int, stale: bool) -> None:
        seen = self.empty if stale else self.model
        after = scripts.recover(self.model, nonce, (seen.generation, seen.named))

        async def call(store: Modelled) -> bool:
            return await store.keys.recover(identity_of(seen, store.server), name_of(nonce))

        self.ask(call, after is not None, after or self.model)

    @precondition(lambda self: self.model.nonce != NONE)
    @rule(nonce=a_nonce, named=a_store, rows=st.booleans())
    def recover_replay(self, nonce: int, named: int, rows: bool) -> None:
        may = scripts.recovering(self.model, THIS, named, nonce, RULES)

        async def call(store: Modelled) -> None:
            found = rows_of(self.count, self.at) if rows else []
            await store.keys.recover_replay(_server(store, named), name_of(nonce), found)

        self.ask_under(call, scripts.replay(self.model, rows) if may else None)

    @precondition(lambda self: self.model.nonce != NONE)
    @rule(nonce=a_nonce, named=a_store, by=st.sampled_from([1, 1, 1, 0, -1]), through=some_offsets)
    def recover_end(self, nonce: int, named: int, by: int, through: tuple[int, int]) -> None:
        generation = self.near(self.model.generation, by)
        after = scripts.recovered(self.model, THIS, named, nonce, generation, through, RULES)

        async def call(store: Modelled) -> None:
            await store.keys.recover_end(_server(store, named), name_of(nonce), generation, through)

        self.ask_under(call, after)

    @precondition(lambda self: self.model.nonce != NONE)
    @rule(nonce=a_nonce)
    def recover_abandon(self, nonce: int) -> None:
        async def call(store: Modelled) -> None:
            await store.keys.recover_abandon(store.server, name_of(nonce))

        self.ask(call, None, scripts.abandoned(self.model, nonce))

    # ---------------------------------------------------------------------------------------- from outside

    @rule(really=st.sampled_from([False, False, False, True]))
    def flush(self, really: bool) -> None:
        if really:
            self.put(scripts.flushed(self.model))

    @precondition(lambda self: self.model.generation != NONE)
    @rule(really=st.sampled_from([False, False, False, True]))
    def another_server_has_its_data(self, really: bool) -> None:
        """Promote a replica, or restart the server with its dump: the generation names the store before."""
        if really:
            self.put(self.model._replace(named=OTHER))

    @precondition(lambda self: self.model.generation == NONE or self.model.named == OTHER)
    @rule(through=some_offsets)
    def recover_from_it(self, through: tuple[int, int]) -> None:
        """Run a whole store recovery, because otherwise most steps would meet a lost store."""
        if self.model.nonce == NONE:
            self.recover(1, False)
        self.recover_replay(self.model.nonce, THIS, True)
        self.recover_end(self.model.nonce, THIS, 1, through)


async def _outcome(call: Awaitable[Answer]) -> Answer:
    try:
        return await call
    except (StoreLost, Fenced) as error:
        return type(error)


def _server(store: Modelled, named: int) -> str:
    return store.server if named == THIS else ELSEWHERE


@pytest.mark.parametrize("count", [1, 3], ids=["an event", "an atomic batch"])
def test_redis_and_the_model_answer_alike_in_any_order_of_operations(redis: Redis, namespace: str, count: int) -> None:
    drawn = int(os.environ.get("TEST_SEED") or random.randrange(2**32))
    print(f"TEST_SEED={drawn}")  # noqa: T201 - how to have the same lives again
    loop = asyncio.new_event_loop()
    with redis.client() as client:
        real = InRedis(redis, namespace, client)

        @seed(drawn)
        def life() -> Life:
            return Life((real, InMemory(real.now_ms())), loop, count)

        quick = settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        try:
            run_state_machine_as_test(life, settings=quick)  # type: ignore[arg-type] # any factory will do
        finally:
            assert isinstance(real.keys, RedisKeys)
            loop.run_until_complete(real.keys.close())
            loop.close()
