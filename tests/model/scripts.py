"""The scripts of claims.lua over a store of the model. The rules for keys are the service's own pure functions."""

from functools import cache

from service.claims import states
from service.claims.states import CLAIMABLE, Claimed, Outcome
from tests.model.rules import Rules
from tests.model.world import FP, LEAST_LEFT_MS, NONE, ONE, RETENTION_MS, WHOLE, Debt, Store, decode, encode, put

_ENDLESS = 1 << 30


def settled(store: Store, here: int, generation: int, named: int, rules: Rules, claims_seen: int = NONE) -> bool:
    """Check the caller's generation of a store, and that it is no older copy; the inverse of `unsettled()`."""
    if rules.older_copy_noticed and store.claims < claims_seen:
        return False
    if rules.generation_checked and (store.generation, store.named) != (generation, named):
        return False
    return here == named or not rules.store_identified


def claim(store: Store, slot: int, term: int, rules: Rules) -> tuple[Outcome | None, Store]:
    """Return the outcome, None for FENCED, and the store after it."""
    if rules.term_current and store.freed[slot] != term:
        return None, store
    outcome, keys = _claim(store.keys, slot, term, store.freed if rules.freed_respected else (_ENDLESS, _ENDLESS))
    if store.claims != NONE and outcome in CLAIMABLE:
        store = store._replace(claims=store.claims + 1)
    return outcome, store._replace(keys=keys)


@cache
def _claim(keys: tuple[int, ...], slot: int, term: int, freed: tuple[int, ...]) -> tuple[Outcome, tuple[int, ...]]:
    wanted = Claimed(slot, term, 0, FP)
    found = [decode(key) for key in keys]
    if len(keys) == 1:
        one = states.claim(found[0], wanted, freed.__getitem__, RETENTION_MS, LEAST_LEFT_MS)
        return one.outcome, (encode(one.state),)
    whole, written = states.claim_all(found, [wanted] * len(keys), freed.__getitem__, RETENTION_MS, LEAST_LEFT_MS)
    return whole.outcome, tuple(encode(state) for state in written) or keys


def _rows(keys: tuple[int, ...]) -> tuple[states.Delivered | states.DeliveredBatch, ...]:
    return (ONE,) if len(keys) == 1 else (WHOLE, ONE, ONE)[: len(keys)]


@cache
def _mark(keys: tuple[int, ...], slot: int, term: int) -> tuple[int, ...]:
    rows = zip(keys, _rows(keys), strict=True)
    return tuple(encode(states.mark(decode(key), slot, term, row)) for key, row in rows)


@cache
def _release(keys: tuple[int, ...], slot: int, term: int) -> tuple[int, ...]:
    return tuple(encode(states.release(decode(key), slot, term)) for key in keys)


@cache
def _replay(keys: tuple[int, ...]) -> tuple[int, ...]:
    rows = zip(keys, _rows(keys), strict=True)
    return tuple(encode(states.replay(decode(key), row, 0, RETENTION_MS)) for key, row in rows)


def mark(store: Store, slot: int, debt: Debt, rules: Rules) -> Store:
    """Mark the ledger record at `debt.offset`; `applied` moves only from exactly the previous record."""
    keys = _mark(store.keys, slot, debt.term) if debt.holds else store.keys
    applied = store.applied
    if applied[slot] == debt.previous or not rules.applied_gapless:
        applied = put(applied, slot, debt.offset)
    return store._replace(keys=keys, applied=applied)


def release(store: Store, slot: int, term: int, rules: Rules) -> Store:
    """Release a claim that was not sent."""
    if not rules.claim_released:
        found = (decode(key) for key in store.keys)
        return store._replace(keys=tuple(0 if isinstance(key, Claimed) else encode(key) for key in found))
    return store._replace(keys=_release(store.keys, slot, term))


def replay(store: Store, holds: int) -> Store:
    """Write ledger entries that a recovery has read."""
    return store._replace(keys=_replay(store.keys)) if holds else store


def free(store: Store, slot: int, term: int, offset: int) -> Store:
    """Raise `freed` and `applied` of a slot, never lower them."""
    return store._replace(
        freed=put(store.freed, slot, max(store.freed[slot], term)),
        applied=put(store.applied, slot, max(store.applied[slot], offset)),
    )


def recover(store: Store, nonce: int, seen: tuple[int, int]) -> Store | None:
    """Begin a store recovery, unless another is in progress, or has ended since `seen` (generation, store)."""
    if store.nonce != NONE or (store.generation, store.named) != seen:
        return None
    return store._replace(nonce=nonce)


def recovering(store: Store, here: int, named: int, nonce: int, rules: Rules) -> bool:
    """Check whether a script of a store recovery may run."""
    if rules.store_identified and here != named:
        return False
    return store.nonce == nonce or not rules.nonce_demanded


def recovered(
    store: Store, here: int, named: int, nonce: int, generation: int, through: tuple[int, ...], rules: Rules
) -> Store | None:
    """End a store recovery: set all `freed`, and the generation, never to an older one."""
    if not recovering(store, here, named, nonce, rules) or store.generation >= generation:
        return None
    for slot, offset in enumerate(through):
        store = free(store, slot, offset, offset)
    return store._replace(generation=generation, named=here, nonce=NONE)


def abandoned(store: Store, nonce: int) -> Store:
    """Delete the nonce of a failed attempt, if it is there."""
    return store._replace(nonce=NONE) if store.nonce == nonce else store


def flushed(store: Store) -> Store:
    """Return the store after a flush: empty."""
    return Store(NONE, NONE, NONE, (NONE, NONE), (NONE, NONE), (0,) * len(store.keys))
