"""Hanging transactions (KIP-664): which partitions hold one of a slot, and how each has to end. Pure functions.

A coordinator may complete a transaction without writing the marker of a partition that had no leader (KAFKA-20734).
The transaction stays open in that partition, and the next marker of its producer id ends it, commit or abort.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from service.kafka.metadata import Partition


class Marker(Enum):
    """The kind of control record that ends a transaction in one partition."""

    COMMIT = "commit"
    ABORT = "abort"


class Verdict(Enum):
    """How a hanging transaction has to end."""

    COMMIT = "commit"
    ABORT = "abort"
    UNKNOWN = "unknown"  # a partition that cannot be read may hold its marker


class ActiveProducer(NamedTuple):
    """A producer id in its partition leader's state; `start` is the first offset of its open transaction, or -1.

    `coordinator_epoch`: of the last marker in the partition, or -1.
    """

    producer_id: int
    epoch: int
    start: int
    coordinator_epoch: int = -1


class Transaction(NamedTuple):
    """A transaction with a ledger record: one of its offsets in each partition, the ledger partition included."""

    offsets: Mapping[Partition, int]


class RecordCoordinates(NamedTuple):
    """A record's offset in a partition; the marker of the record's transaction comes after it."""

    partition: Partition
    offset: int


def hanging(
    producers: Mapping[Partition, Iterable[ActiveProducer]], producer_ids: Collection[int]
) -> dict[Partition, int]:
    """Find the partitions in which one of the producer ids has an open transaction, and its first offset.

    The leaders must be asked after the fence: the coordinator has then ended every transaction of these ids, so one
    that is still open hangs.
    """
    return {
        partition: min(starts)
        for partition, active in producers.items()
        if (starts := [each.start for each in active if each.producer_id in producer_ids and each.start >= 0])
    }


def markers_to_read(open_from: Mapping[Partition, int], transactions: Iterable[Transaction]) -> set[RecordCoordinates]:
    """Find the records after which to look for markers of hanging transactions: those in their other partitions."""
    return {
        record
        for transaction in transactions
        if partitions_left_open(transaction, open_from)
        for record in _ended_in(transaction, open_from)
    }


def verdict(has_record: bool, markers: Collection[Marker | None]) -> Verdict:
    """Decide how a hanging transaction ends, by the markers in its other partitions (None: unreadable).

    Without any marker no consumer has seen the outcome, so the ledger record decides: the producer requests a commit
    only after the ledger record was written, and a request is answered as not written only without one.
    """
    if Marker.COMMIT in markers:
        return Verdict.COMMIT
    if Marker.ABORT in markers or not has_record:
        return Verdict.ABORT
    return Verdict.UNKNOWN if None in markers else Verdict.COMMIT


def verdicts(
    open_from: Mapping[Partition, int],
    transactions: Sequence[Transaction],
    markers: Mapping[RecordCoordinates, Marker],
) -> dict[Partition, Verdict]:
    """Decide how each partition's hanging transaction ends; `markers` are those found for `markers_to_read`.

    Where several transactions share an open range, a commit among them wins: a client may have its 201 already.
    """
    found: dict[Partition, set[Verdict]] = {partition: set() for partition in open_from}
    for transaction in transactions:
        if affected := partitions_left_open(transaction, open_from):
            how = verdict(True, [markers.get(record) for record in _ended_in(transaction, open_from)])
            for partition in affected:
                found[partition].add(how)
    return {partition: _strongest(of) for partition, of in found.items()}


def _strongest(found: Collection[Verdict]) -> Verdict:
    """Choose commit before unknown before abort; no verdict at all counts as a transaction without ledger record."""
    return next((each for each in (Verdict.COMMIT, Verdict.UNKNOWN) if each in found), verdict(False, ()))


def partitions_left_open(transaction: Transaction, open_from: Mapping[Partition, int]) -> list[Partition]:
    """Find the partitions in which a transaction is open, by the first offset that is open in each."""
    return [
        partition
        for partition, offset in transaction.offsets.items()
        if partition in open_from and offset >= open_from[partition]
    ]


def _ended_in(transaction: Transaction, open_from: Mapping[Partition, int]) -> list[RecordCoordinates]:
    still_open = partitions_left_open(transaction, open_from)
    return [
        RecordCoordinates(partition, offset)
        for partition, offset in transaction.offsets.items()
        if partition not in still_open
    ]
