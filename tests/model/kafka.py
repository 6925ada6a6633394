"""The broker: transactional ids, their transactions, and the ledger's partitions.

Transactions are of version 1, as aiokafka speaks them: a request is known by its producer's id and epoch only, so a
late one meets whatever that producer does by then.
"""

from collections.abc import Iterator
from itertools import product
from typing import Final

from tests.model.rules import FAULT, spend
from tests.model.world import ABORT, COMMIT, NONE, OPEN, REFUSED, Hung, Txn, World, put, with_part

Step = tuple[str, World]
Partitions = tuple[tuple[bool, ...], bool]
"""Of data partitions, by event, and of the slot's ledger partition: is it meant?"""

_REFUSED: Final = "503 or 4xx was said, and then the event was committed"


def produce(world: World, s: int, owner: int, copies: tuple[int, ...], by: int) -> World | None:
    """Events in the slot's transaction, which begins with the first. None for a producer that was fenced.

    Their partitions belong to the transaction, also where one does not get there.
    """
    part = world.parts[s]
    if part.owner != owner:
        return None
    txn = part.txn or Txn((0,) * len(copies), NONE, 0, NONE)
    added = tuple(a + b for a, b in zip(txn.copies, copies, strict=True))
    return with_part(world, s, part._replace(txn=txn._replace(copies=added, by=by, data=(True,) * len(copies))))


def produce_other(world: World, s: int, owner: int) -> World | None:
    """Another key's event, in the data partition of the first."""
    part = world.parts[s]
    if part.owner != owner:
        return None
    txn = part.txn or Txn((0,) * len(world.copies), NONE, 0, NONE)
    data = (True, *(txn.data or txn.copies)[1:])
    return with_part(world, s, part._replace(txn=txn._replace(data=tuple(map(bool, data)))))


def append(world: World, s: int, owner: int, holds: int) -> World | None:
    """The ledger record of the slot's transaction. None for a producer that was fenced.

    A second record in one transaction (only a producer that is used again does that) stands for both.
    """
    part = world.parts[s]
    if part.owner != owner:
        return None
    txn = part.txn or Txn((0,) * len(world.copies), NONE, 0, NONE)
    if txn.record != NONE:
        return with_part(world, s, part._replace(txn=txn._replace(holds=txn.holds | holds)))
    txn = txn._replace(record=len(part.ledger), holds=holds)
    return with_part(world, s, part._replace(txn=txn, ledger=(*part.ledger, OPEN)))


def append_apart(world: World, s: int) -> World:
    """A ledger record outside of any transaction, without entries."""
    part = world.parts[s]
    return with_part(world, s, part._replace(ledger=(*part.ledger, 0)))


def end(world: World, s: int, owner: int, *, markers: bool = True) -> World | None:
    """EndTxn(commit) arrives: the fate is final; the markers are written at once, or later.

    None where the producer was fenced, or there is no transaction to end.
    """
    txn = world.parts[s].txn
    if world.parts[s].owner != owner or txn is None or txn.decided:
        return None
    world = with_part(_count(world, txn, txn.copies), s, world.parts[s]._replace(txn=txn._replace(decided=True)))
    return write_markers(world, s) if markers else world


def endings(world: World, s: int, owner: int) -> Iterator[Step]:
    """EndTxn(commit) arrives: its markers are written, or the broker dies with those of some partitions to write.

    Then a coordinator that starts again takes a partition without a leader for deleted (KAFKA-20734).
    """
    decided = end(world, s, owner)
    if decided is not None:
        yield "", decided
        yield from _skip(world, s, COMMIT)


def write_markers(world: World, s: int) -> World:
    """The transaction's markers are written: readers see what it has committed."""
    part = world.parts[s]
    assert part.txn is not None
    ledger = _closed(part.ledger, part.txn.record, part.txn.holds)
    world = with_part(world, s, part._replace(txn=None, ledger=ledger))
    return mark_hung(world, s, COMMIT, _partitions(part.txn))


def _partitions(txn: Txn) -> Partitions:
    """What belongs to a transaction: which data partitions, and the ledger's?"""
    return txn.data or (False,) * len(txn.copies), txn.record != NONE


def _count(world: World, txn: Txn | Hung, copies: tuple[int, ...]) -> World:
    """Copies of the events are committed, for good."""
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
    """The transaction is complete, without the marker of one or more of the partitions where it has records."""
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
            )
            written = part.ledger if ledger_skipped else _closed(part.ledger, txn.record, txn.holds * marker)
            after = _count(
                with_part(spend(world, FAULT.skip_marker), s, part._replace(txn=None, ledger=written)), txn, committed
            )
            after = mark_hung(after, s, marker, marked)
            after = with_part(after, s, after.parts[s]._replace(hung=(*after.parts[s].hung, hung)))
            yield f", marker of {_names(data_skipped, ledger_skipped)} never comes", after


def _names(data: tuple[bool, ...], ledger: bool) -> str:
    events = [f"data {number}" for number, skipped in enumerate(data) if skipped]
    return " and ".join([*events, *(["the ledger"] if ledger else [])])


def mark_hung(world: World, s: int, marker: int, marked: Partitions) -> World:
    """Markers of the slot's producer id are written: what is open in these partitions ends, whosever it was."""
    data, ledger = marked
    for hung in world.parts[s].hung:
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
    """Would the coordinator answer CONCURRENT_TRANSACTIONS now?"""
    txn = world.parts[s].txn
    return txn is not None and txn.decided


def init_producer(world: World, s: int) -> World:
    """InitProducerId returns: what was open is aborted, and every older producer is fenced.

    Not to be asked for while markers are to be written: it returns only after them.
    """
    aborted = abort(world, s)
    part = aborted.parts[s]
    return with_part(aborted, s, part._replace(owner=part.owner + 1, epoch=part.epoch + 1))


def fences(world: World, s: int) -> Iterator[Step]:
    """InitProducerId returns; of what was open, some partitions may have no marker."""
    yield "", init_producer(world, s)
    for label, skipped in _skip(world, s, ABORT):
        yield label, init_producer(skipped, s)


def abort(world: World, s: int) -> World:
    """EndTxn(abort) of the present producer, which nobody fences."""
    part = world.parts[s]
    if part.txn is None:
        return world
    aborted = with_part(world, s, part._replace(txn=None, ledger=_closed(part.ledger, part.txn.record, 0)))
    return mark_hung(aborted, s, ABORT, _partitions(part.txn))


def read(ledger: tuple[int, ...], start: int, through: int) -> int | None:
    """Does the ledger, read_committed from `start` through a record, name the events? None: it is not readable yet."""
    if through >= len(ledger) or OPEN in ledger[: through + 1]:
        return None
    return int(1 in ledger[max(0, start) : through + 1])


def _closed(ledger: tuple[int, ...], record: int, holds: int) -> tuple[int, ...]:
    return ledger if record == NONE else put(ledger, record, holds)
