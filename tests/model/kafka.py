"""The broker: transactional ids, their transactions, and the ledger's partitions.

A request is identified by its producer's id and epoch only, so that a late request applies to the producer's
transaction of that time. In transactions of version 2 (KIP-890) that is one transaction: each end raises the epoch.
There is no step that adds partitions: they are added before the records, or in version 2 each record adds its own.
Behind its last epoch a producer id is replaced, and no coordinator writes markers of the former id any more.
"""

from collections.abc import Iterator
from itertools import product
from typing import Final

from tests.model.rules import FAULT, Rules, spend
from tests.model.world import ABORT, COMMIT, NONE, OPEN, REFUSED, Hung, Part, Txn, World, put, with_part

Step = tuple[str, World]
Partitions = tuple[tuple[bool, ...], bool]
"""Selects data partitions, by event, and the slot's ledger partition."""

NEVER_COMES: Final = "never comes"
_REFUSED: Final = "503 or 4xx was said, and then the event was committed"


def _txn(world: World, part: Part) -> Txn:
    """Return the slot's transaction, or one that begins."""
    return part.txn or Txn((0,) * len(world.copies), NONE, 0, NONE, producer_id=part.producer_id)


def produce(world: World, s: int, owner: int, copies: tuple[int, ...], by: int, *, joined: bool = True) -> World | None:
    """Write events in the slot's transaction, which begins with the first. None for a fenced producer.

    Their partitions belong to the transaction, also if a record does not arrive; not `joined`, in version 2: only those
    of the records that arrive.
    """
    part = world.parts[s]
    if part.owner != owner:
        return None
    txn = _txn(world, part)
    added = tuple(a + b for a, b in zip(txn.copies, copies, strict=True))
    data = tuple(joined or bool(each) for each in added)
    return with_part(world, s, part._replace(txn=txn._replace(copies=added, by=by, data=data)))


def produce_late(world: World, s: int, owner: int, producer_id: int, event: int, rules: Rules) -> World:
    """A Produce arrives whose producer has given it up: it is refused once its producer has been replaced.

    Before that it joins the transaction in version 2, and its partition belongs to the transaction in version 1.
    Without the rule, the record opens a transaction that no coordinator knows.
    """
    part, copies = world.parts[s], tuple(int(number == event) for number in range(len(world.copies)))
    if part.owner == owner:
        joins = part.bumps or (part.txn is not None and bool(part.txn.data[event]))
        written = produce(world, s, owner, copies, part.txn.by if part.txn else NONE) if joins else None
        return written or world
    if rules.former_refused:
        return world
    hung = Hung(copies, False, NONE, 0, (), NONE, refused=False, named=False, producer_id=producer_id)
    return with_part(world, s, part._replace(hung=(*part.hung, hung)))


def produce_other(world: World, s: int, owner: int) -> World | None:
    """Write another key's event into the data partition of the first event."""
    part = world.parts[s]
    if part.owner != owner:
        return None
    txn = _txn(world, part)
    data = (True, *(txn.data or txn.copies)[1:])
    return with_part(world, s, part._replace(txn=txn._replace(data=tuple(map(bool, data)))))


def append(world: World, s: int, owner: int, holds: int) -> World | None:
    """Write the ledger record of the slot's transaction. None for a fenced producer.

    A second record in one transaction (only of a reused producer) counts for both.
    """
    part = world.parts[s]
    if part.owner != owner:
        return None
    txn = _txn(world, part)
    if txn.record != NONE:
        return with_part(world, s, part._replace(txn=txn._replace(holds=txn.holds | holds)))
    txn = txn._replace(record=len(part.ledger), holds=holds)
    return with_part(world, s, part._replace(txn=txn, ledger=(*part.ledger, OPEN)))


def append_apart(world: World, s: int) -> World:
    """Write a ledger record without entries, outside of any transaction."""
    part = world.parts[s]
    return with_part(world, s, part._replace(ledger=(*part.ledger, 0)))


def end(world: World, s: int, owner: int, *, markers: bool = True, at_last: bool = False) -> World | None:
    """EndTxn(commit) arrives: the outcome is final; the markers are written now or later.

    None for a fenced producer, or without a transaction. `at_last` as for `next_epoch`.
    """
    txn = world.parts[s].txn
    if world.parts[s].owner != owner or txn is None or txn.decided:
        return None
    world = with_part(_count(world, txn, txn.copies), s, world.parts[s]._replace(txn=txn._replace(decided=True)))
    world = next_epoch(world, s, at_last=at_last)
    return write_markers(world, s) if markers else world


def next_epoch(world: World, s: int, *, at_last: bool = False) -> World:
    """Raise the epoch of the slot's producer, as each end of a transaction of version 2 does; `at_last`: replace it."""
    part = world.parts[s]
    return world if not part.bumps else with_part(world, s, _renewed(part, at_last))


def _renewed(part: Part, at_last: bool) -> Part:
    """Give the slot its next producer: of the next epoch, or of another producer id behind the last epoch."""
    if at_last:
        return part._replace(owner=part.owner + 1, epoch=0, producer_id=part.producer_id + 1)
    return part._replace(owner=part.owner + 1, epoch=part.epoch + 1)


def _at_last(world: World, *, renews: bool = True) -> Iterator[tuple[str, World, bool]]:
    """List whether the producer has its last epoch, if what comes renews the producer."""
    yield "", world, False
    if renews and world.left[FAULT.overflow]:
        yield " at the last epoch", spend(world, FAULT.overflow), True


def endings(world: World, s: int, owner: int) -> Iterator[Step]:
    """EndTxn(commit) arrives: the markers are written, or the broker dies before those of some partitions.

    A restarted coordinator then takes a partition without a leader for deleted (KAFKA-20734).
    """
    for last, before, at_last in _at_last(world, renews=world.parts[s].bumps):
        decided = end(before, s, owner, at_last=at_last)
        if decided is not None:
            yield last, decided
            for label, skipped in _skip(before, s, COMMIT):
                yield f"{last}{label}", next_epoch(skipped, s, at_last=at_last)


def write_markers(world: World, s: int) -> World:
    """Write the transaction's markers: its committed records become visible."""
    part = world.parts[s]
    assert part.txn is not None
    ledger = _closed(part.ledger, part.txn.record, part.txn.holds)
    world = with_part(world, s, part._replace(txn=None, ledger=ledger))
    return mark_hung(world, s, COMMIT, _partitions(part.txn), part.txn.producer_id)


def _partitions(txn: Txn) -> Partitions:
    """List the partitions of a transaction: its data partitions, and the ledger's."""
    return txn.data or (False,) * len(txn.copies), txn.record != NONE


def _count(world: World, txn: Txn | Hung, copies: tuple[int, ...]) -> World:
    """Count the committed copies of the events."""
    if not any(copies):
        return world
    world = world._replace(copies=tuple(min(2, a + b) for a, b in zip(world.copies, copies, strict=True)))
    if isinstance(txn, Hung):
        return world._replace(wrong=_REFUSED) if txn.refused else world
    if txn.by == REFUSED:
        return world._replace(wrong=_REFUSED)
    if txn.by != NONE:
        process = world.processes[txn.by]
        if process.request is not None:
            process = process._replace(request=process.request._replace(wrote=True))
            world = world._replace(processes=put(world.processes, txn.by, process))
    return world


def _skip(world: World, s: int, marker: int) -> Iterator[Step]:
    """Complete a transaction without the marker of one or more of its partitions."""
    part = world.parts[s]
    if part.txn is None or not world.left[FAULT.skip_marker]:
        return
    txn = part.txn
    data, ledger = _partitions(txn)
    for data_skipped in product(
        *([False, True] if each and copies else [False] for each, copies in zip(data, txn.copies, strict=True))
    ):
        for ledger_skipped in (False, True) if ledger else (False,):
            if not any(data_skipped) and not ledger_skipped:
                continue
            marked = tuple(a and not b for a, b in zip(data, data_skipped, strict=True)), ledger and not ledger_skipped
            committed = tuple(
                copies if marker == COMMIT and here else 0 for copies, here in zip(txn.copies, marked[0], strict=True)
            )
            hung = Hung(
                tuple(copies if skipped else 0 for copies, skipped in zip(txn.copies, data_skipped, strict=True)),
                ledger_skipped,
                txn.record,
                txn.holds,
                txn.data,
                marker if any(marked[0]) or marked[1] else NONE,
                txn.by == REFUSED,
                named=False,
                producer_id=txn.producer_id,
            )
            written = part.ledger if ledger_skipped else _closed(part.ledger, txn.record, txn.holds * marker)
            after = _count(
                with_part(spend(world, FAULT.skip_marker), s, part._replace(txn=None, ledger=written)), txn, committed
            )
            after = mark_hung(after, s, marker, marked, txn.producer_id)
            after = with_part(after, s, after.parts[s]._replace(hung=(*after.parts[s].hung, hung)))
            yield f", marker of {_names(data_skipped, ledger_skipped)} {NEVER_COMES}", after


def _names(data: tuple[bool, ...], ledger: bool) -> str:
    events = [f"data {number}" for number, skipped in enumerate(data) if skipped]
    return " and ".join([*events, *(["the ledger"] if ledger else [])])


def mark_hung(world: World, s: int, marker: int, marked: Partitions, producer_id: int) -> World:
    """Write markers of a producer id of the slot: any open transaction of it in these partitions ends."""
    data, ledger = marked
    for hung in world.parts[s].hung:
        if hung.producer_id != producer_id:
            continue
        ended = tuple(copies if here else 0 for copies, here in zip(hung.copies, data, strict=True))
        closes = ledger and hung.ledger
        if not any(ended) and not closes:
            continue
        if marker == COMMIT:
            world = _count(world, hung, ended)
        part = world.parts[s]
        written = _closed(part.ledger, hung.record, hung.holds * marker) if closes else part.ledger
        left = hung._replace(
            copies=tuple(a - b for a, b in zip(hung.copies, ended, strict=True)),
            ledger=hung.ledger and not closes,
            marker=max(hung.marker, marker),
        )
        rest = [each for each in part.hung if each is not hung]
        if any(left.copies) or left.ledger:
            rest.append(left)
        world = with_part(world, s, part._replace(ledger=written, hung=tuple(rest)))
    return world


def waits_for_markers(world: World, s: int) -> bool:
    """Check whether the coordinator would answer CONCURRENT_TRANSACTIONS now."""
    txn = world.parts[s].txn
    return txn is not None and txn.decided


def init_producer(world: World, s: int, *, at_last: bool = False) -> World:
    """InitProducerId returns: an open transaction is aborted, and every older producer is fenced.

    Only without pending markers, because it returns after them. `at_last` as for `next_epoch`.
    """
    aborted = abort(world, s)
    return with_part(aborted, s, _renewed(aborted.parts[s], at_last))


def fences(world: World, s: int) -> Iterator[Step]:
    """InitProducerId returns; some partitions of an open transaction may get no marker."""
    for last, before, at_last in _at_last(world):
        yield last, init_producer(before, s, at_last=at_last)
        for label, skipped in _skip(before, s, ABORT):
            yield f"{last}{label}", init_producer(skipped, s, at_last=at_last)


def abort(world: World, s: int) -> World:
    """Abort the slot's transaction under its producer's epoch, which fences nobody."""
    part = world.parts[s]
    if part.txn is None:
        return world
    aborted = with_part(world, s, part._replace(txn=None, ledger=_closed(part.ledger, part.txn.record, 0)))
    return mark_hung(aborted, s, ABORT, _partitions(part.txn), part.txn.producer_id)


def aborts(world: World, s: int) -> Iterator[Step]:
    """EndTxn(abort) of the present producer arrives; some partitions may get no marker."""
    for last, before, at_last in _at_last(world, renews=world.parts[s].bumps):
        yield last, next_epoch(abort(before, s), s, at_last=at_last)
        for label, skipped in _skip(before, s, ABORT):
            yield f"{last}{label}", next_epoch(skipped, s, at_last=at_last)


def read(ledger: tuple[int, ...], start: int, through: int) -> int | None:
    """Check whether the ledger, read_committed from `start` through a record, names the events; None: unreadable."""
    if through >= len(ledger) or OPEN in ledger[: through + 1]:
        return None
    return int(1 in ledger[max(0, start) : through + 1])


def _closed(ledger: tuple[int, ...], record: int, holds: int) -> tuple[int, ...]:
    return ledger if record == NONE else put(ledger, record, holds)
