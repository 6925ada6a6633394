"""Hanging transactions (KIP-664): which partitions hold one of a slot's, and how it has to end. Pure functions.

A coordinator may complete a transaction without the markers of a partition that had no leader (KAFKA-20734). The
transaction stays open there, and the next marker of its producer id would end it, whichever way that one goes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

Partition = tuple[str, int]


class Marker(Enum):
    """What the control record says that ends a transaction in one partition."""

    COMMIT = "commit"
    ABORT = "abort"


class Verdict(Enum):
    """How a hanging transaction has to end."""

    COMMIT = "commit"
    ABORT = "abort"
    UNKNOWN = "unknown"  # a partition that cannot be read may hold its marker


class ActiveProducer(NamedTuple):
    """What a partition's leader knows of a producer id: `start` is the first offset of its open transaction."""

    producer_id: int
    epoch: int
    start: int


class Transaction(NamedTuple):
    """A transaction with a ledger record: an offset of it in each of its partitions, the ledger's among them."""

    offsets: Mapping[Partition, int]


class OpenTransactionAt(NamedTuple):
    """An offset in a partition, after which the marker of its transaction is looked for."""

    partition: Partition
    offset: int


def hanging(
    producers: Mapping[Partition, Iterable[ActiveProducer]], producer_ids: Collection[int]
) -> dict[Partition, int]:
    """The partitions in which a producer id has a transaction open, and from which offset on.

    Asked of the leaders after the fence: the coordinator has ended every transaction of these ids, so it hangs.
    """
    return {
        partition: min(starts)
        for partition, active in producers.items()
        if (starts := [each.start for each in active if each.producer_id in producer_ids and each.start >= 0])
    }


def places_to_read(open_from: Mapping[Partition, int], transactions: Iterable[Transaction]) -> set[OpenTransactionAt]:
    """Where markers of the transactions that hang somewhere are to be found: in their other partitions."""
    return {
        place
        for transaction in transactions
        if _open_in(transaction, open_from)
        for place in _ended_in(transaction, open_from)
    }


def verdict(has_record: bool, markers: Collection[Marker | None]) -> Verdict:
    """How a transaction has to end that hangs: as in any other of its partitions; None is a marker not to be read.

    Where no partition has a marker, nobody has seen or been denied anything of it: a commit is asked for only after
    the ledger record, and only a transaction that surely has none is given up before the recovery of its slot.
    """
    if Marker.COMMIT in markers:
        return Verdict.COMMIT
    if Marker.ABORT in markers or not has_record:
        return Verdict.ABORT
    return Verdict.UNKNOWN if None in markers else Verdict.COMMIT


def verdicts(
    open_from: Mapping[Partition, int],
    transactions: Sequence[Transaction],
    markers: Mapping[OpenTransactionAt, Marker],
) -> dict[Partition, Verdict]:
    """How each partition's hanging transaction has to end; `markers` as found at `places_to_read`.

    Where several share an open range, a commit among them decides: somebody may have been told of it.
    """
    found: dict[Partition, set[Verdict]] = {partition: set() for partition in open_from}
    for transaction in transactions:
        if affected := _open_in(transaction, open_from):
            ends = verdict(True, [markers.get(place) for place in _ended_in(transaction, open_from)])
            for partition in affected:
                found[partition].add(ends)
    return {partition: _strongest(of) for partition, of in found.items()}


def _strongest(found: Collection[Verdict]) -> Verdict:
    """Without a transaction that has a ledger record: as one that has none."""
    return next((each for each in (Verdict.COMMIT, Verdict.UNKNOWN) if each in found), verdict(False, ()))


def _open_in(transaction: Transaction, open_from: Mapping[Partition, int]) -> list[Partition]:
    return [
        partition
        for partition, offset in transaction.offsets.items()
        if partition in open_from and offset >= open_from[partition]
    ]


def _ended_in(transaction: Transaction, open_from: Mapping[Partition, int]) -> list[OpenTransactionAt]:
    still_open = _open_in(transaction, open_from)
    return [
        OpenTransactionAt(partition, offset)
        for partition, offset in transaction.offsets.items()
        if partition not in still_open
    ]
