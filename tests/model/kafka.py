"""The broker: transactional ids, their transactions, and the ledger's partitions.

Transactions are of version 1, as aiokafka speaks them: a request is known by its producer's id and epoch only, so a
late one meets whatever that producer does by then.
"""

from tests.model.world import NONE, OPEN, REFUSED, Txn, World, put, with_part


def produce(world: World, s: int, owner: int, copies: tuple[int, ...], by: int) -> World | None:
    """Events in the slot's transaction, which begins with the first. None for a producer that was fenced."""
    part = world.parts[s]
    if part.owner != owner:
        return None
    txn = part.txn or Txn((0,) * len(copies), NONE, 0, NONE)
    added = tuple(a + b for a, b in zip(txn.copies, copies, strict=True))
    return with_part(world, s, part._replace(txn=txn._replace(copies=added, by=by)))


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
    part = world.parts[s]
    txn = part.txn
    if part.owner != owner or txn is None or txn.decided:
        return None
    copies = tuple(min(2, a + b) for a, b in zip(world.copies, txn.copies, strict=True))
    world = with_part(world, s, part._replace(txn=txn._replace(decided=True)))._replace(copies=copies)
    if any(txn.copies):
        if txn.by == REFUSED:
            world = world._replace(wrong="503 or 4xx was said, and then the event was committed")
        elif txn.by != NONE:
            process = world.processes[txn.by]
            if process.request is not None:
                process = process._replace(request=process.request._replace(wrote=True))
                world = world._replace(processes=put(world.processes, txn.by, process))
    return write_markers(world, s) if markers else world


def write_markers(world: World, s: int) -> World:
    """The transaction's markers are written: readers see what it has committed."""
    part = world.parts[s]
    assert part.txn is not None
    return with_part(world, s, part._replace(txn=None, ledger=_closed(part.ledger, part.txn.record, part.txn.holds)))


def waits_for_markers(world: World, s: int) -> bool:
    """Would the coordinator answer CONCURRENT_TRANSACTIONS now?"""
    txn = world.parts[s].txn
    return txn is not None and txn.decided


def init_producer(world: World, s: int) -> World:
    """InitProducerId returns: what was open is aborted, and every older producer is fenced.

    Not to be asked for while markers are to be written: it returns only after them.
    """
    part = world.parts[s]
    ledger = part.ledger if part.txn is None else _closed(part.ledger, part.txn.record, 0)
    return with_part(world, s, part._replace(owner=part.owner + 1, epoch=part.epoch + 1, txn=None, ledger=ledger))


def abort(world: World, s: int) -> World:
    """EndTxn(abort) of the present producer, which nobody fences."""
    part = world.parts[s]
    aborted = part if part.txn is None else part._replace(txn=None, ledger=_closed(part.ledger, part.txn.record, 0))
    return with_part(world, s, aborted)


def read(ledger: tuple[int, ...], start: int, through: int) -> int | None:
    """Does the ledger, read_committed from `start` through a record, name the events? None: it is not readable yet."""
    if through >= len(ledger) or OPEN in ledger[: through + 1]:
        return None
    return int(1 in ledger[max(0, start) : through + 1])


def _closed(ledger: tuple[int, ...], record: int, holds: int) -> tuple[int, ...]:
    return ledger if record == NONE else put(ledger, record, holds)
