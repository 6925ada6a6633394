"""Steps of slot recovery and of store recovery."""

from collections.abc import Iterator

from service.claims.states import SlotEvent
from tests.model import hanging, kafka, late, scripts
from tests.model.rules import FAULT, Configuration, Rules, spend
from tests.model.world import (
    BEGUN,
    CHECKED,
    DOUBT,
    FENCED,
    FREE,
    LEASED,
    NONE,
    OLDER,
    READY,
    SLOTS,
    VACANT,
    Hung,
    Part,
    Process,
    Recovery,
    View,
    World,
    put,
    slot_move,
    with_process,
    with_store,
    with_view,
)
from tests.model.writing import Step, end_term, follow, lose_store

# The steps of a store recovery, by what has been done already.
NONCE_WRITTEN, APPENDED, SEEN = 0, 1, 2
FENCES = SEEN + len(SLOTS)
READING = FENCES + 1
REPLAYED = READING + len(SLOTS)

# The term of a slot that was checked before its fence, if that rule is left out.
CHECKED_EARLY = -2


def steps(world: World, p: int, rules: Rules, configuration: Configuration) -> Iterator[Step]:
    """List every step of recovery that process `p` may take."""
    process = world.processes[p]
    if process.generation == NONE:
        yield from (
            _settle(world, p, process, rules)
            if process.recovery is None
            else _recover(world, p, process, process.recovery, rules)
        )
        return
    for s, view in enumerate(process.views):
        if view.state == VACANT:
            slotless = all(other.state == VACANT for other in process.views)
            stalled = bool(world.parts[s].hung) and rules.stall_watched
            if (world.holders[s] == NONE and (configuration.take_over or s == p)) or (
                world.holders[s] == FREE and (slotless or stalled)
            ):
                taken = world._replace(holders=put(world.holders, s, p))
                yield f"p{p}: take s{s}", with_view(taken, p, s, View(slot_move(VACANT, SlotEvent.LEASE)))
        elif view.state in (DOUBT, LEASED):
            yield from _fence(world, p, s, view, rules)
        elif view.state == READY:
            if configuration.watchful:
                yield from _watch(world, p, s, view, rules)
            part = world.parts[s]
            if rules.stall_watched and any(_may_help(part, hung, rules) for hung in part.hung):
                yield from _watch_stalled(world, p, s, rules)
        elif view.state == FENCED:
            yield from _begin(world, p, s, view, rules)
        elif view.state == BEGUN:
            yield from _check(world, p, s, view, rules)
        elif view.state == CHECKED:
            yield from _replay_and_free(world, p, s, view, rules)
    yield from _give(world, p, process)


# ------------------------------------------------------------------------------------------------------ a slot


def _give(world: World, p: int, process: Process) -> Iterator[Step]:
    """A process with more than its share gives a slot to one without."""
    if any(view.state != READY for view in process.views):
        return
    if any(view.state != VACANT for view in world.processes[1 - p].views):
        return
    for s, view in enumerate(process.views):
        busy = process.request is not None and process.request.slot == s
        if world.holders[s] == p and not busy and not view.unwanted:
            given = world._replace(holders=put(world.holders, s, NONE if view.owed else FREE))
            vacant = View(slot_move(READY, SlotEvent.GIVE_BACK))
            yield f"p{p}: give s{s} to p{1 - p}", with_view(given, p, s, vacant)


def _fence(world: World, p: int, s: int, view: View, rules: Rules) -> Iterator[Step]:
    """The lease is taken (again), and InitProducerId returns. A slot with another process's lease is given up."""
    process = world.processes[p]
    if view.state == DOUBT:
        if world.holders[s] not in (NONE, FREE, p):
            yield f"p{p}: let go of s{s}", with_view(world, p, s, View(slot_move(DOUBT, SlotEvent.GIVE_BACK)))
            return
        world = world._replace(holders=put(world.holders, s, p))
    if not rules.checked_after_fence and view.term != CHECKED_EARLY:
        for whence, generation, named in newest(world, rules):
            if (generation, named) == (process.generation, process.store):
                yield (
                    f"p{p}: check s{s}{whence} before the fence",
                    with_view(world, p, s, view._replace(term=CHECKED_EARLY)),
                )
            else:
                yield f"p{p}: check s{s}{whence} before the fence: lost", lose_store(world, p, process.generation)
        return
    entered = View(
        slot_move(view.state, *([SlotEvent.RECOVER] if view.state == DOUBT else []), SlotEvent.FENCE),
        view.owner,
        generation=process.generation,
        store=process.store,
    )
    if not rules.producer_replaced and view.owner == world.parts[s].owner:
        yield f"p{p}: abort s{s} in the books only", with_view(world, p, s, entered)
        if not kafka.waits_for_markers(world, s):
            aborted = kafka.next_epoch(kafka.abort(world, s), s)
            same = follow(entered, aborted, s)
            yield f"p{p}: abort s{s}, same producer", with_view(aborted, p, s, same)
    elif not kafka.waits_for_markers(world, s):
        for label, fenced in kafka.fences(world, s):
            owner = fenced.parts[s].owner
            # The coordinator named the partitions of the open transaction before.
            settled_world = hanging.name(fenced, s) if kafka.NEVER_COMES in label else fenced
            fencing = entered._replace(owner=owner, producer_id=fenced.parts[s].producer_id)
            yield f"p{p}: fence s{s}{label}", with_view(settled_world, p, s, fencing)


def _watch(world: World, p: int, s: int, view: View, rules: Rules) -> Iterator[Step]:
    """The heartbeat of a holder that was fenced while idle."""
    process = world.processes[p]
    store = world.stores[process.address]
    busy = process.request is not None and process.request.slot == s
    settled = scripts.settled(store, process.address, view.generation, view.store, rules, process.claims_seen)
    if not busy and settled and store.freed[s] > view.term:
        yield f"p{p}: the heartbeat sees that s{s} t{view.term} has passed", end_term(world, p, s, rules)


def _may_help(part: Part, hung: Hung, rules: Rules) -> bool:
    """Check whether to recover the slot. Without the rule that ends what hangs, recoveries would never end."""
    settled = rules.hanging_settled and (rules.former_settled or hung.producer_id == part.producer_id)
    return settled or not hung.named


def _watch_stalled(world: World, p: int, s: int, rules: Rules) -> Iterator[Step]:
    """An LSO does not move in a partition where the producer of an idle slot has an open transaction."""
    request = world.processes[p].request
    if request is None or request.slot != s:
        stalled = end_term(hanging.name(world, s), p, s, rules)
        yield f"p{p}: an LSO stands still for what hangs in s{s}", stalled


def _begin(world: World, p: int, s: int, view: View, rules: Rules) -> Iterator[Step]:
    """Hanging transactions are ended; then the begin record is committed, whose offset is the term."""
    if kafka.waits_for_markers(world, s):
        return
    label = f"p{p}: begin in s{s}"
    if rules.hanging_settled and world.parts[s].hung:
        applied = world.stores[world.processes[p].address].applied[s]
        if hanging.seen(world.parts[s], applied, rules):
            yield from _settle_hung(world, p, s, view, applied, rules)
            return
    if not rules.former_confirmed and world.parts[s].owner != view.owner:
        for how, ended in hanging.settle_unconfirmed(world, s, view):
            yield f"p{p}: {how}", end_term(ended, p, s, rules)
    sent = kafka.append(world, s, view.owner, 0)
    if sent is None:
        yield f"{label}: fenced", end_term(world, p, s, rules)
        return
    txn = sent.parts[s].txn
    decided = kafka.end(sent, s, view.owner)
    assert txn is not None
    assert decided is not None
    term = txn.record if rules.terms_are_offsets else world.parts[s].epoch
    begun = view._replace(state=slot_move(view.state, SlotEvent.BEGIN), term=term, last=txn.record)
    for skipped, ended in kafka.endings(sent, s, view.owner):
        yield f"{label}: t{term}{skipped}", with_view(ended, p, s, follow(begun, ended, s))
    if world.left[FAULT.late_marker]:
        unmarked = kafka.end(sent, s, view.owner, markers=False)
        assert unmarked is not None
        later = with_view(spend(unmarked, FAULT.late_marker), p, s, follow(begun, unmarked, s))
        yield f"{label}: t{term}, markers are late", later
    if world.left[FAULT.lose_reply]:
        yield f"{label}, reply lost", end_term(spend(decided, FAULT.lose_reply), p, s, rules)


def _settle_hung(world: World, p: int, s: int, view: View, applied: int, rules: Rules) -> Iterator[Step]:
    """A transaction of the new term, without data, ends hanging transactions; a fenced producer cannot do that."""
    if world.parts[s].owner != view.owner:
        yield f"p{p}: end what hangs in s{s}: fenced", end_term(world, p, s, rules)
        return
    for label, ended in hanging.settlements(world, s, applied, rules):
        yield f"p{p}: {label}", with_view(ended, p, s, follow(view, ended, s))
        if world.left[FAULT.lose_reply]:
            yield f"p{p}: {label}, reply lost", end_term(spend(ended, FAULT.lose_reply), p, s, rules)


def newest(world: World, rules: Rules) -> Iterator[tuple[str, int, int]]:
    """List the possible answers of reading control: the newest generation and its store.

    The log of a deposed leader has no barrier that was appended later, so that only a read without a barrier trusts it.
    """
    last = len(world.control) - 1
    yield "", last, world.control[last]
    if not rules.control_barrier and world.deposed and world.deposed[0] - 1 != last:
        yield " from a deposed leader", world.deposed[0] - 1, world.control[world.deposed[0] - 1]


def readings(world: World, s: int, start: int, through: int, rules: Rules) -> Iterator[tuple[str, int]]:
    """List the possible contents of a ledger partition, once the own record can be read.

    A read up to an LSO may get that of a deposed leader.
    """
    ledger = world.parts[s].ledger
    holds = kafka.read(ledger, start, through)
    if holds is None:
        return
    yield "", holds
    if not rules.own_record_read and world.deposed:
        shown = world.deposed[1 + s]
        yield " as a deposed leader shows it", kafka.read(ledger[:shown], start, shown - 1) or 0


def _check(world: World, p: int, s: int, view: View, rules: Rules) -> Iterator[Step]:
    """After the fence, check whether control still names the store of the claims."""
    checked = with_view(world, p, s, view._replace(state=slot_move(view.state, SlotEvent.CHECK)))
    if not (rules.control_checked and rules.checked_after_fence):
        yield f"p{p}: do not check s{s}", checked
        return
    for whence, generation, named in newest(world, rules):
        if (generation, named) == (view.generation, view.store):
            yield f"p{p}: check s{s}{whence}", checked
        else:
            ended = lose_store(end_term(world, p, s, rules), p, view.generation)
            yield f"p{p}: check s{s}{whence}: store lost", ended


def _replay_and_free(world: World, p: int, s: int, view: View, rules: Rules) -> Iterator[Step]:
    """The ledger is read from `applied` through the own begin record, and marked; the last mark frees older terms."""
    address = world.processes[p].address
    store = world.stores[address]
    label = f"p{p}: replay and free s{s} t{view.term}"
    if not scripts.settled(store, address, view.generation, view.store, rules, world.processes[p].claims_seen):
        yield f"{label}: store lost", lose_store(end_term(world, p, s, rules), p, view.generation)
        return
    if any(hung.ledger for hung in world.parts[s].hung):
        if rules.former_settled:  # without it no recovery would help, and recoveries would never end
            yield f"{label}: cannot be read", end_term(world, p, s, rules)
        return
    for whence, read in readings(world, s, store.applied[s], view.last, rules):
        holds = read if rules.ledger_replayed else 0
        yield from _free(world, p, s, view, f"{label}{whence}", holds, rules)


def _free(world: World, p: int, s: int, view: View, label: str, holds: int, rules: Rules) -> Iterator[Step]:
    """The script that writes the read rows, and frees: with its reply, or without one."""
    address = world.processes[p].address
    store = world.stores[address]
    if world.left[FAULT.lose_script]:
        script = (late.REPLAY, address, view.generation, view.store, s, view.term, view.last, holds)
        yield f"{label}, no answer", late.leave(spend(end_term(world, p, s, rules), FAULT.lose_script), script)
    store = scripts.free(scripts.replay(store, holds), s, view.term, view.last)
    freed = with_store(world, address, store)
    if store.freed[s] != view.term:
        yield f"{label}: fenced", end_term(freed, p, s, rules)
    else:
        yield label, with_view(freed, p, s, view._replace(state=slot_move(view.state, SlotEvent.FREE)))


# ------------------------------------------------------------------------------------------------------ the store


def _settle(world: World, p: int, process: Process, rules: Rules) -> Iterator[Step]:
    """Adopt the store that Redis and control agree on, recover at once after a flush, find the primary, or recover."""
    here = process.address
    store = world.stores[here]
    for whence, generation, named in newest(world, rules):
        agreed = named == here and (store.generation, store.named) == (generation, named)
        if agreed and not (rules.older_copy_noticed and process.claims_seen == OLDER + generation):
            adopted = process._replace(generation=generation, store=named, claims_seen=NONE)
            yield f"p{p}: adopt g{generation}{whence}", with_process(world, p, adopted)
        elif named != here and here != world.primary:
            yield f"p{p}: resolve anew", with_process(world, p, process._replace(address=world.primary))
            if world.left[FAULT.misjudge]:
                yield from _write_nonce(spend(world, FAULT.misjudge), p, process, " of a store that nobody else uses")
        else:
            yield from _write_nonce(world, p, process, whence)


def _write_nonce(world: World, p: int, process: Process, why: str) -> Iterator[Step]:
    """A store recovery begins if no other one is in progress in this store."""
    here, nonce = process.address, 2 * len(world.control) + p
    store = world.stores[here]
    begun = scripts.recover(store, nonce, (store.generation, store.named))
    if begun is not None:
        started = with_process(world, p, process._replace(recovery=Recovery(NONCE_WRITTEN, nonce)))
        yield f"p{p}: recover store {here}{why}", with_store(started, here, begun)


def abandon(world: World, p: int) -> World:
    """The attempt has failed."""
    process = world.processes[p]
    if process.recovery is not None:
        store = scripts.abandoned(world.stores[process.address], process.recovery.nonce)
        world = with_store(world, process.address, store)
    return with_process(world, p, process._replace(recovery=None))


def _recover(world: World, p: int, process: Process, recovery: Recovery, rules: Rules) -> Iterator[Step]:
    """The next step of a store recovery, which gives up in another store, or without its nonce."""
    here, done = process.address, recovery.done
    store = world.stores[here]

    def on(after: World, recovery: Recovery = recovery) -> World:
        return with_process(after, p, process._replace(recovery=recovery._replace(done=done + 1)))

    may = scripts.recovering(store, here, here, recovery.nonce, rules)
    lost = f"p{p}: store recovery ends: not its nonce"
    if done == NONCE_WRITTEN:
        generation = len(world.control)
        appended = world._replace(control=(*world.control, here))
        yield f"p{p}: append g{generation} for store {here}", on(appended, recovery._replace(generation=generation))
    elif done == APPENDED:
        for whence, generation, _ in newest(world, rules):
            if generation == recovery.generation or not rules.superseded_stops:
                yield f"p{p}: read control through g{generation}{whence}", on(world)
            else:
                yield f"p{p}: read control{whence}: superseded", abandon(world, p)
    elif done < FENCES:
        s = done - SEEN
        if not rules.slots_fenced:
            yield f"p{p}: do not fence s{s}", on(world)
        elif not kafka.waits_for_markers(world, s):
            for label, fenced in kafka.fences(world, s):
                yield f"p{p}: fence s{s} for the store{label}", on(fenced)
    elif done == FENCES:
        if not may:
            yield lost, abandon(world, p)
            return
        through = tuple(len(part.ledger) for part in world.parts)
        appended = kafka.append_apart(kafka.append_apart(world, 0), 1)
        read = recovery._replace(starts=store.applied, through=through)
        yield f"p{p}: append own ledger records, read applied", on(appended, read)
    elif done < REPLAYED:
        s = done - READING
        if any(hung.ledger for hung in world.parts[s].hung):
            yield from _unblock(world, p, s, recovery, rules)
            return
        for whence, holds in readings(world, s, recovery.starts[s], recovery.through[s], rules):
            replayed = scripts.replay(store, holds if rules.store_replayed else 0)
            after = on(with_store(world, here, replayed)) if may else abandon(world, p)
            yield f"p{p}: replay ledger {s}{whence}" if may else lost, after
    else:
        generation, through = recovery.generation, recovery.through
        recovered = scripts.recovered(store, here, here, recovery.nonce, generation, through, rules)
        if recovered is None:
            yield lost, abandon(world, p)
            return
        label = f"p{p}: set g{generation}"
        if world.left[FAULT.lose_script]:
            script = (late.RECOVERED, here, generation, recovery.nonce, *through)
            yield f"{label}, no answer", late.leave(spend(abandon(world, p), FAULT.lose_script), script)
            unheard = late.leave(spend(world, FAULT.lose_script), script)
            given_up = with_process(unheard, p, process._replace(recovery=None))
            yield f"{label}, no answer, and the nonce stays", given_up
        settled = process._replace(generation=generation, store=here, recovery=None, claims_seen=NONE)
        yield label, with_process(with_store(world, here, recovered), p, settled)


def _unblock(world: World, p: int, s: int, recovery: Recovery, rules: Rules) -> Iterator[Step]:
    """A store recovery ends hanging transactions in a ledger partition that cannot be read through."""
    label = f"p{p}: ledger {s} cannot be read"
    if rules.store_settles and not kafka.waits_for_markers(world, s):
        for how, ended in hanging.settlements(kafka.init_producer(world, s), s, recovery.starts[s], rules):
            yield f"{label}: {how}", ended
