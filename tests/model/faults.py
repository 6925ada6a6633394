"""Steps of the environment: late requests and markers, crashes, pauses, changes of stores and leaders."""

from collections.abc import Iterator

from tests.model import kafka, late, scripts
from tests.model.rules import FAULT, Configuration, Rules, spend
from tests.model.world import (
    NONE,
    PROCESSES,
    SLOTS,
    Process,
    Store,
    View,
    World,
    put,
    with_part,
    with_process,
    with_store,
)
from tests.model.writing import Step


def steps(world: World, rules: Rules, configuration: Configuration) -> Iterator[Step]:
    """List every step that happens without an action of a process."""
    yield from late.steps(world, rules)
    for s in SLOTS:
        if kafka.waits_for_markers(world, s):
            yield f"markers of s{s}", kafka.write_markers(world, s)
    yield from _nonce_expires(world)
    left = world.left
    if left[FAULT.kill]:
        for p in PROCESSES:
            yield f"p{p}: killed, starts again", _killed(spend(world, FAULT.kill), p)
    if left[FAULT.expire]:
        for s in SLOTS:
            if world.holders[s] >= 0:
                paused = world._replace(holders=put(world.holders, s, NONE))
                yield f"p{world.holders[s]} pauses: the lease of s{s} runs out", spend(paused, FAULT.expire)
    if left[FAULT.fence]:
        for s in SLOTS:
            if not kafka.waits_for_markers(world, s):
                for label, fenced in kafka.fences(world, s):
                    yield f"s{s} is fenced from outside{label}", spend(fenced, FAULT.fence)
    if left[FAULT.forget_id]:
        for s in SLOTS:
            part = world.parts[s]
            if part.txn is None:
                expired = part._replace(owner=part.owner + 1, epoch=NONE, producer_id=part.producer_id + 1)
                forgotten = with_part(world, s, expired)
                yield f"the transactional id of s{s} expires", spend(forgotten, FAULT.forget_id)
    if left[FAULT.finalize]:
        finalized = tuple(part._replace(bumps=True) for part in world.parts)
        yield "transactions of version 2 are finalized", spend(world._replace(parts=finalized), FAULT.finalize)
    if left[FAULT.flush]:
        store = scripts.flushed(world.stores[world.primary])
        yield f"store {world.primary} flushed", spend(with_store(world, world.primary, store), FAULT.flush)
    if world.replica is not None and left[FAULT.replicate] and world.replica != world.stores[0]:
        yield "the replica catches up", spend(world._replace(replica=world.stores[0]), FAULT.replicate)
    if world.replica is not None and left[FAULT.failover]:
        yield from _fail_over(spend(world, FAULT.failover), world.replica, configuration)
    if world.replica is not None and left[FAULT.rewind] and world.replica != world.stores[0]:
        yield "the store becomes an older copy of itself", _rewind(spend(world, FAULT.rewind), world.replica)
    if left[FAULT.depose]:
        shown = (len(world.control), *(len(part.ledger) for part in world.parts))
        yield "leaders are deposed", spend(world._replace(deposed=shown), FAULT.depose)


def _killed(world: World, p: int) -> World:
    """A process loses its state, and its leases expire. Its sent requests stay."""
    parts = tuple(
        part if part.txn is None or part.txn.by != p else part._replace(txn=part.txn._replace(by=NONE))
        for part in world.parts
    )
    fresh = Process(world.primary, NONE, NONE, None, tuple(View() for _ in SLOTS), None)
    holders = tuple(NONE if holder == p else holder for holder in world.holders)
    return with_process(world._replace(parts=parts, holders=holders), p, fresh)


def _fail_over(world: World, replica: Store, configuration: Configuration) -> Iterator[Step]:
    """The replica is promoted, as another store; with a split, one process goes on with the old one."""
    world = world._replace(stores=(*world.stores, replica), replica=None, primary=1)

    def moved(*movers: int) -> World:
        after = world
        for p in movers:
            # A store recovery is bound to its server: it ends.
            after = with_process(after, p, after.processes[p]._replace(address=1, recovery=None))
        return after

    yield "failover", moved(0, 1)
    if configuration.split:
        for p in PROCESSES:
            yield f"failover; p{p} is left with the old store", moved(1 - p)


def _rewind(world: World, older: Store) -> World:
    """Every process has had a heartbeat since the last claim; then the store becomes an older copy of itself."""
    now = world.stores[0]
    processes = tuple(
        process if process.generation != now.generation else process._replace(claims_seen=now.claims)
        for process in world.processes
    )
    return with_store(world._replace(processes=processes), 0, older)


def _nonce_expires(world: World) -> Iterator[Step]:
    """A nonce expires whose recovery has ended; a running recovery renews its nonce, unless it pauses."""
    for here, store in enumerate(world.stores):
        if store.nonce == NONE:
            continue
        alive = any(
            process.address == here and process.recovery is not None and process.recovery.nonce == store.nonce
            for process in world.processes
        )
        forgotten = with_store(world, here, store._replace(nonce=NONE))
        if not alive:
            yield f"the nonce of store {here} expires", forgotten
        elif world.left[FAULT.expire]:
            yield f"a pause: the nonce of store {here} expires", spend(forgotten, FAULT.expire)
