"""Requests without an answer that are still in flight: they arrive late, twice, or never."""

from collections.abc import Iterator
from typing import Final

from tests.model import kafka, scripts
from tests.model.rules import Rules
from tests.model.world import Debt, World, with_store

END, CLAIM, MARK, RELEASE, REPLAY, RECOVERED, PRODUCE = range(7)
NAMES: Final = ("EndTxn", "claim", "mark", "release", "replay", "end of a store recovery", "Produce")


def leave(world: World, request: tuple[int, ...], runs: int = 2) -> World:
    """Add a request in flight, which may arrive `runs` times."""
    return world._replace(late=tuple(sorted((*world.late, (runs, *request)))))


def steps(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    """Let any of them arrive."""
    for place, (runs, kind, *arguments) in enumerate(world.late):
        rest = (*world.late[:place], *world.late[place + 1 :])
        again = world._replace(late=tuple(sorted((*rest, (runs - 1, kind, *arguments)))) if runs > 1 else rest)
        after = _arrive(again, kind, arguments, rules)
        if after is not None:
            yield f"late: {NAMES[kind]} runs", after


def _arrive(world: World, kind: int, arguments: list[int], rules: Rules) -> World | None:
    if kind == END:
        slot, owner = arguments
        return kafka.end(world, slot, owner if rules.former_refused else world.parts[slot].owner) or world
    if kind == PRODUCE:
        slot, owner, producer_id, event = arguments
        return kafka.produce_late(world, slot, owner, producer_id, event, rules)
    if kind == RECOVERED:
        here, generation, nonce, *through = arguments
        recovered = scripts.recovered(world.stores[here], here, here, nonce, generation, tuple(through), rules)
        return world if recovered is None else with_store(world, here, recovered)
    address, generation, named, slot, term, *rest = arguments
    store = world.stores[address]
    if not scripts.settled(store, address, generation, named, rules):
        return world
    if kind == CLAIM:
        _, store = scripts.claim(store, slot, term, rules)
    elif kind == MARK:
        previous, offset, holds = rest
        store = scripts.mark(store, slot, Debt(generation, named, term, previous, offset, holds), rules)
    elif kind == RELEASE:
        store = scripts.release(store, slot, term, rules)
    else:
        offset, holds = rest
        store = scripts.free(scripts.replay(store, holds), slot, term, offset)
    return with_store(world, address, store)
