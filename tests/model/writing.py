"""Steps of writing an event: post, claim, send, ledger record, commit, mark, release, and the answers."""

from collections.abc import Iterable, Iterator

from service.claims.states import CLAIMABLE, MAYBE_WRITTEN, Outcome, RequestEvent, SlotEvent
from tests.model import hanging, kafka, late, scripts
from tests.model.rules import FAULT, Configuration, Rules, spend
from tests.model.world import (
    CLAIMED,
    COMMITTED,
    EVENTS_SENT,
    IN_DOUBT,
    NONE,
    OFFSETS_SENT,
    OLDER,
    QUEUED,
    READY,
    RECORD_SENT,
    REFUSED,
    SENT,
    Debt,
    Request,
    Store,
    View,
    World,
    has_offsets,
    put,
    request_move,
    request_state,
    slot_move,
    with_process,
    with_request,
    with_store,
    with_view,
)

Step = tuple[str, World]


def steps(world: World, p: int, rules: Rules, configuration: Configuration) -> Iterator[Step]:
    """List every step of writing that process `p`, or its client, may take."""
    process = world.processes[p]
    request = process.request
    if request is None:
        yield from _post(world, p, configuration)
    elif not request.answered and world.left[FAULT.deadline]:
        yield from _deadline(spend(world, FAULT.deadline), p, request, rules)
    if request is not None and request.state in (QUEUED, IN_DOUBT):
        for s, view in enumerate(process.views):
            if view.state == READY and not view.unwanted:
                yield from _claim(world, p, s, view, request, rules)
    if request is not None and request.state == CLAIMED and process.views[request.slot].state == READY:
        yield from _send(world, p, process.views[request.slot], request, rules)
    if request is not None and request.state == SENT:
        yield from _write(world, p, process.views[request.slot], request, rules)
    for s, view in enumerate(process.views):
        yield from _apart(world, p, s, view, rules)


def end_term(world: World, p: int, s: int, rules: Rules) -> World:
    """End the slot's term: sent events are in doubt, events that were only claimed are claimed again."""
    process = world.processes[p]
    view = process.views[s]
    request = process.request
    if request is not None and request.slot == s and request.phase != COMMITTED:
        if request.answered:
            return end_term(_answer(world, p, NONE), p, s, rules)
        if request.state == SENT:
            request = Request(request_move(SENT, RequestEvent.DOUBT), wrote=request.wrote)
        elif request.state == CLAIMED and rules.term_kept:
            request = Request(request_move(CLAIMED, RequestEvent.QUEUE), wrote=request.wrote)
    view = view._replace(state=slot_move(view.state, SlotEvent.FAIL), unwanted=False)
    return with_process(world, p, process._replace(views=put(process.views, s, view), request=request))


def follow(view: View, ended: World, s: int) -> View:
    """Go on with the producer that a clean EndTxn response has named: in version 2 another one."""
    return view._replace(owner=ended.parts[s].owner, producer_id=ended.parts[s].producer_id)


def lose_store(world: World, p: int, generation: int) -> World:
    """A script for `generation` met another store: the process must settle its store again."""
    process = world.processes[p]
    if process.generation != generation:
        return world
    store = world.stores[process.address]
    older = store.generation == generation and store.claims < process.claims_seen
    claims_seen = OLDER + generation if older else NONE
    return with_process(world, p, process._replace(generation=NONE, store=NONE, claims_seen=claims_seen))


def note_claims(world: World, p: int, store: Store) -> World:
    """The process learns the number of claiming calls in the store."""
    if store.claims == NONE:
        return world
    return with_process(world, p, world.processes[p]._replace(claims_seen=store.claims))


def _post(world: World, p: int, configuration: Configuration) -> Iterator[Step]:
    """The client sends its request; a process that is not settled refuses it."""
    if p not in configuration.posters or world.processes[p].generation == NONE:
        return
    posted = with_request(world, p, Request())
    if not world.acknowledged and all(
        process.request is None or process.request.answered for process in world.processes
    ):
        yield f"p{p}: post", posted
    elif world.left[FAULT.post_again]:
        yield f"p{p}: post again", spend(posted, FAULT.post_again)


def _deadline(world: World, p: int, request: Request, rules: Rules) -> Iterator[Step]:
    """The request's deadline passes: 504 if it may be written, else 503, and its claim is to be released."""
    if rules.doubt_kept and request_state(request.state) in MAYBE_WRITTEN:
        under_way = with_request(world, p, request._replace(answered=True))
        yield f"p{p}: deadline, 504", under_way if request.state == SENT else _answer(world, p, NONE)
        return
    if request.state == CLAIMED:
        view = world.processes[p].views[request.slot]
        world = with_view(world, p, request.slot, view._replace(unwanted=True))
    if request.wrote:
        world = world._replace(wrong="503 was said of an event that is committed")
    yield f"p{p}: deadline, 503", _answer(world, p, REFUSED)


def _answer(world: World, p: int, author: int) -> World:
    """Answer the request; `author` is kept for what it wrote: NONE, or REFUSED if that must not be committed."""
    request_move(_open(world, p).state, RequestEvent.ANSWER)
    parts = tuple(
        part if part.txn is None or part.txn.by != p else part._replace(txn=part.txn._replace(by=author))
        for part in world.parts
    )
    return with_request(world._replace(parts=parts), p, None)


def _open(world: World, p: int) -> Request:
    request = world.processes[p].request
    assert request is not None
    return request


def _acknowledge(world: World, p: int) -> World:
    acknowledged = world.acknowledged or not _open(world, p).answered
    return _answer(world, p, NONE)._replace(acknowledged=acknowledged)


def _claim(world: World, p: int, s: int, view: View, request: Request, rules: Rules) -> Iterator[Step]:
    """Run a claim script: with its reply, or without one, which ends the term, and the script may run late."""
    address = world.processes[p].address
    store = world.stores[address]
    label = f"p{p}: claim for s{s} t{view.term}"
    state = request_move(request.state, RequestEvent.CLAIM)
    back = request._replace(state=request_move(state, RequestEvent.QUEUE), slot=NONE)
    if world.left[FAULT.lose_script]:
        ended = with_request(world, p, back)
        if rules.silence_ends_term:
            ended = end_term(ended, p, s, rules)
        script = (late.CLAIM, address, view.generation, view.store, s, view.term)
        yield f"{label}, no answer", late.leave(spend(ended, FAULT.lose_script), script)
    if not scripts.settled(store, address, view.generation, view.store, rules, world.processes[p].claims_seen):
        ended = end_term(with_request(world, p, back), p, s, rules)
        yield f"{label}: store lost", lose_store(ended, p, view.generation)
        return
    outcome, store = scripts.claim(store, s, view.term, rules)
    claimed = note_claims(with_store(world, address, store), p, store)
    if outcome is None:
        yield f"{label}: fenced", end_term(with_request(world, p, back), p, s, rules)
    elif outcome in CLAIMABLE:
        won = request._replace(state=request_move(state, RequestEvent.WIN), slot=s, phase=0)
        yield f"{label}: {outcome.value}", with_request(claimed, p, won)
    elif outcome is Outcome.DELIVERED:
        yield f"{label}: delivered, 201", _acknowledge(claimed, p)
    elif outcome is Outcome.IN_PROGRESS:
        if request.state == QUEUED:
            yield f"{label}: in progress, 409", _answer(claimed, p, NONE)
    else:
        yield f"{label}: 422", claimed._replace(wrong="a key in conflict with itself")


def _send(world: World, p: int, view: View, request: Request, rules: Rules) -> Iterator[Step]:
    """Send the events in the slot's transaction; all of them arrive, or not all."""
    s = request.slot
    if kafka.waits_for_markers(world, s):
        return
    label = f"p{p}: send in s{s} t{view.term}"
    if _meets_hung(world, s, view, rules, range(len(world.copies))):
        yield f"{label}: something hangs there", end_term(hanging.name(world, s), p, s, rules)
        return
    view = view._replace(checked=True)
    sent = request._replace(state=request_move(request.state, RequestEvent.SEND), phase=EVENTS_SENT)
    writing = with_view(world, p, s, view._replace(state=slot_move(view.state, SlotEvent.WRITE)))
    if has_offsets(world):
        yield from _send_offsets(label, writing, p, view, sent, rules)
        return
    count = len(world.copies)
    after = kafka.produce(writing, s, view.owner, (1,) * count, p)
    if after is None:
        fenced = writing if not rules.term_kept else with_request(writing, p, sent)
        yield f"{label}: fenced", end_term(fenced, p, s, rules)
        return
    yield label, with_request(after, p, sent)
    if world.left[FAULT.lose_send]:
        partly = kafka.produce(writing, s, view.owner, (1,) * (count - 1) + (0,), p)
        assert partly is not None
        partly = spend(with_request(partly, p, sent), FAULT.lose_send)
        yield from _failed(f"{label}, the last is lost", partly, p, s, view, rules)
        if world.parts[s].bumps:
            apart = kafka.produce(writing, s, view.owner, (1,) * (count - 1) + (0,), p, joined=False)
            assert apart is not None
            apart = spend(with_request(apart, p, sent), FAULT.lose_send)
            yield from _failed(f"{label}, the last is lost and has not joined", apart, p, s, view, rules)
        if not request.answered:
            for step, refused in _failed(f"{label}, the last is refused, 4xx", partly, p, s, view, rules):
                yield step, _answer(refused, p, REFUSED)
        unsaid = spend(with_request(after, p, sent), FAULT.lose_send)
        yield from _failed(f"{label}, reply lost", unsaid, p, s, view, rules)
    if world.left[FAULT.late_send]:
        partly = kafka.produce(writing, s, view.owner, (1,) * (count - 1) + (0,), p, joined=not world.parts[s].bumps)
        assert partly is not None
        delayed = (late.PRODUCE, s, view.owner, view.producer_id, count - 1)
        partly = late.leave(spend(with_request(partly, p, sent), FAULT.late_send), delayed, runs=1)
        yield from _failed(f"{label}, the last is late", partly, p, s, view, rules)
    if world.left[FAULT.abortable] and world.parts[s].bumps:
        yield from _abortable(label, spend(with_request(after, p, sent), FAULT.abortable), p, view, sent, rules)


def _abortable(label: str, world: World, p: int, view: View, sent: Request, rules: Rules) -> Iterator[Step]:
    """A broker answers TRANSACTION_ABORTABLE: the session aborts the transaction, and the request is sent again.

    Its claim is released; without a clean reply of the store the term ends.
    """
    s, again = sent.slot, sent._replace(state=request_move(sent.state, RequestEvent.RETURN), slot=NONE, phase=0)
    for skipped, aborted in kafka.aborts(world, s):
        step = f"{label}, abortable{skipped}"
        goes_on = follow(view._replace(checked=False, trusts=not rules.abort_rechecked), aborted, s)
        back = with_view(with_request(aborted, p, again), p, s, goes_on)
        yield f"{step}, release without an answer", _let_go(end_term(back, p, s, rules), p, s, view)
        address, claims_seen = world.processes[p].address, world.processes[p].claims_seen
        if scripts.settled(world.stores[address], address, view.generation, view.store, rules, claims_seen):
            released = scripts.release(world.stores[address], s, view.term, rules)
            yield f"{step}, released", with_store(back, address, released)


def _send_offsets(label: str, world: World, p: int, view: View, request: Request, rules: Rules) -> Iterator[Step]:
    """Commit the offsets of a group in the transaction, before the event. The group's coordinator may refuse them."""
    s, label = request.slot, f"{label}, the offsets"
    on_their_way = with_request(world, p, request._replace(phase=OFFSETS_SENT))
    after = kafka.produce(on_their_way, s, view.owner, (0, 1), p)
    if after is None:
        yield f"{label}: fenced", end_term(on_their_way, p, s, rules)
        return
    if rules.offsets_enclosed:
        yield label, after
    else:
        yield f"{label}, by themselves", on_their_way._replace(copies=put(world.copies, 1, min(2, world.copies[1] + 1)))
    if not world.left[FAULT.rebalance]:
        return
    label = f"{label}: stale member"
    if not rules.refusal_aborts:
        nothing = kafka.produce(on_their_way, s, view.owner, (0, 0), p)
        assert nothing is not None
        yield f"{label}, goes on", spend(nothing, FAULT.rebalance)
        return
    refused = _answer(spend(after, FAULT.rebalance), p, REFUSED)
    for skipped, aborted in kafka.aborts(refused, s):
        ready = follow(view._replace(unwanted=True), aborted, s)
        yield f"{label}, 409{skipped}", with_view(aborted, p, s, ready)


def _send_event(world: World, p: int, view: View, request: Request, rules: Rules) -> Iterator[Step]:
    """Send the event behind the offsets."""
    s = request.slot
    label = f"p{p}: send in s{s} t{view.term}, the event"
    after = kafka.produce(world, s, view.owner, (1, 0), p)
    if after is None:
        yield f"{label}: fenced", end_term(world, p, s, rules)
        return
    sent = request._replace(phase=EVENTS_SENT)
    yield label, with_request(after, p, sent)
    if world.left[FAULT.lose_send]:
        lost = with_request(spend(world, FAULT.lose_send), p, sent)
        yield from _failed(f"{label} is lost", lost, p, s, view, rules)
        unsaid = with_request(spend(after, FAULT.lose_send), p, sent)
        yield from _failed(f"{label}, reply lost", unsaid, p, s, view, rules)


def _meets_hung(world: World, s: int, view: View, rules: Rules, partitions: Iterable[int]) -> bool:
    """Check, before the term writes to these data partitions, whether one has an open transaction of the slot."""
    if not (rules.hanging_settled and rules.partitions_checked) or (view.checked and not rules.check_renewed):
        return False
    if view.trusts:
        return False
    own = [hung for hung in world.parts[s].hung if hung.producer_id == view.producer_id]
    return any(hung.copies[number] for hung in own for number in partitions)


def _failed(label: str, world: World, p: int, s: int, view: View, rules: Rules) -> Iterator[Step]:
    """A send failed, and no commit was requested: the claim is released before the slot's recovery.

    With a clean reply of the store, the event is known not to be written; without one it is in doubt.
    """
    if not rules.sends_awaited:
        yield label, world
        return
    ended = end_term(world, p, s, rules)
    yield f"{label}, release without an answer", _let_go(ended, p, s, view)
    address, request = world.processes[p].address, ended.processes[p].request
    claims_seen = world.processes[p].claims_seen
    if scripts.settled(world.stores[address], address, view.generation, view.store, rules, claims_seen):
        released = with_store(ended, address, scripts.release(world.stores[address], s, view.term, rules))
        if request is not None:
            again = Request(request_move(SENT, RequestEvent.RETURN), wrote=request.wrote)
            released = with_request(released, p, again)
        yield f"{label}, released", released


def _let_go(world: World, p: int, s: int, view: View) -> World:
    """The term has ended: the claim may be released before the slot's recovery, or not."""
    script = (late.RELEASE, world.processes[p].address, view.generation, view.store, s, view.term)
    return late.leave(world, script, runs=1)


def _write(world: World, p: int, view: View, request: Request, rules: Rules) -> Iterator[Step]:
    """The rest of a transaction: its ledger record, its commit, its mark."""
    s = request.slot
    if request.phase == OFFSETS_SENT:
        yield from _send_event(world, p, view, request, rules)
    elif request.phase == EVENTS_SENT:
        after = kafka.append(world, s, view.owner, 1)
        label = f"p{p}: ledger record in s{s}"
        if after is None:
            yield f"{label}: fenced", end_term(world, p, s, rules)
        else:
            yield label, with_request(after, p, request._replace(phase=RECORD_SENT))
    elif request.phase == RECORD_SENT:
        yield from _commit(world, p, s, view, rules)
    else:
        yield from _mark_and_answer(world, p, s, view, rules)


def _commit(world: World, p: int, s: int, view: View, rules: Rules) -> Iterator[Step]:
    """EndTxn: answered; answered with later markers; its reply lost; or in flight for long."""
    label = f"p{p}: commit in s{s}"
    txn = world.parts[s].txn
    decided = kafka.end(world, s, view.owner)
    if decided is None or txn is None:
        yield f"{label}: refused", end_term(world, p, s, rules)
        return

    def answered(after: World) -> World:
        debt = Debt(view.generation, view.store, view.term, view.last, txn.record, 1)
        ready = view._replace(state=slot_move(view.state, SlotEvent.COMMIT), last=txn.record, owed=(*view.owed, debt))
        after = with_view(after, p, s, follow(ready, after, s))
        return with_request(after, p, _open(after, p)._replace(phase=COMMITTED))

    for skipped, ended in kafka.endings(world, s, view.owner):
        yield f"{label}{skipped}", answered(ended)
    if world.left[FAULT.late_marker]:
        unmarked = kafka.end(world, s, view.owner, markers=False)
        assert unmarked is not None
        yield f"{label}, markers are late", answered(spend(unmarked, FAULT.late_marker))
    if world.left[FAULT.lose_reply]:
        for skipped, ended in kafka.endings(world, s, view.owner):
            unsaid = end_term(spend(ended, FAULT.lose_reply), p, s, rules)
            yield f"{label}{skipped}, reply lost", unsaid if rules.doubt_claimed else _let_go(unsaid, p, s, view)
        delayed = late.leave(spend(world, FAULT.lose_reply), (late.END, s, view.owner), runs=1)
        yield f"{label}, request is late", end_term(delayed, p, s, rules)


def _mark_and_answer(world: World, p: int, s: int, view: View, rules: Rules) -> Iterator[Step]:
    """The mark, and then 201 even if the mark failed: the ledger has the record."""
    for label, after in _pay(world, p, s, view, rules):
        yield f"{label}, 201", _acknowledge(after, p)


def _pay(world: World, p: int, s: int, view: View, rules: Rules) -> Iterator[Step]:
    """Mark the oldest pending record."""
    if not view.owed:  # a new term has begun: its recovery has marked it
        yield f"p{p}: nothing to mark", world
        return
    debt, *rest = view.owed
    address = world.processes[p].address
    label = f"p{p}: mark s{s} @{debt.offset}"
    if world.left[FAULT.fail_mark]:
        yield f"{label} fails", spend(world, FAULT.fail_mark)
    if world.left[FAULT.lose_script]:
        script = (late.MARK, address, debt.generation, debt.store, s, *debt[2:])
        yield f"{label}, no answer", late.leave(spend(world, FAULT.lose_script), script)
    claims_seen = world.processes[p].claims_seen
    if not scripts.settled(world.stores[address], address, debt.generation, debt.store, rules, claims_seen):
        yield f"{label}: store lost", lose_store(world, p, debt.generation)
        return
    marked = with_store(world, address, scripts.mark(world.stores[address], s, debt, rules))
    yield label, with_view(marked, p, s, view._replace(owed=tuple(rest)))


def _apart(world: World, p: int, s: int, view: View, rules: Rules) -> Iterator[Step]:
    """The steps of a slot beside its group: pending marks, releases, and another key's transaction."""
    if view.state != READY:
        return
    request = world.processes[p].request
    busy = request is not None and request.slot == s
    if view.owed and not busy:
        yield from _pay(world, p, s, view, rules)
    if view.unwanted:
        yield from _release(world, p, s, view, rules)
    if not busy and world.left[FAULT.other] and not kafka.waits_for_markers(world, s):
        yield from _other(world, p, s, view, rules)


def _release(world: World, p: int, s: int, view: View, rules: Rules) -> Iterator[Step]:
    """Release a claim whose request was answered 503; without a clean reply the term ends."""
    address = world.processes[p].address
    label = f"p{p}: release s{s} t{view.term}"
    if world.left[FAULT.lose_script]:
        script = (late.RELEASE, address, view.generation, view.store, s, view.term)
        ended = with_view(world, p, s, view._replace(unwanted=False))
        if rules.silence_ends_term:
            ended = end_term(world, p, s, rules)
        yield f"{label}, no answer", late.leave(spend(ended, FAULT.lose_script), script)
    claims_seen = world.processes[p].claims_seen
    if not scripts.settled(world.stores[address], address, view.generation, view.store, rules, claims_seen):
        yield f"{label}: store lost", end_term(world, p, s, rules)
        return
    released = with_store(world, address, scripts.release(world.stores[address], s, view.term, rules))
    yield label, with_view(released, p, s, view._replace(unwanted=False))


def _other(world: World, p: int, s: int, view: View, rules: Rules) -> Iterator[Step]:
    """Write and mark another key's event in one step; its ledger record names none of the model's events.

    It goes to the data partition of the first event.
    """
    world = spend(world, FAULT.other)
    label = f"p{p}: another key in s{s}"
    if _meets_hung(world, s, view, rules, (0,)):
        yield f"{label}: something hangs there", end_term(hanging.name(world, s), p, s, rules)
        if not (view.checked and world.left[FAULT.move]):
            return
        world, label = spend(world, FAULT.move), f"{label}, whose partition has a new leader"
        added = kafka.produce_other(world, s, view.owner)
        if added is not None and not rules.leader_followed:
            yield f"{label}: given up", end_term(hanging.name(added, s), p, s, rules)
            return
    sent = kafka.produce_other(world, s, view.owner)
    if sent is None:
        yield f"{label}: fenced", end_term(world, p, s, rules)
        return
    if world.left[FAULT.lose_send]:
        yield f"{label}, not sent", end_term(spend(sent, FAULT.lose_send), p, s, rules)
    written = kafka.append(sent, s, view.owner, 0)
    assert written is not None
    for skipped, ended in kafka.endings(written, s, view.owner):
        offset = len(world.parts[s].ledger)
        debt = Debt(view.generation, view.store, view.term, view.last, offset, 0)
        address = world.processes[p].address
        ended = with_view(ended, p, s, follow(view._replace(last=offset, checked=True), ended, s))
        claims_seen = world.processes[p].claims_seen
        if scripts.settled(ended.stores[address], address, view.generation, view.store, rules, claims_seen):
            yield f"{label}{skipped}", with_store(ended, address, scripts.mark(ended.stores[address], s, debt, rules))
