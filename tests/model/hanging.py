"""Hanging transactions of a slot, and how a recovery ends them: by the service's functions, over the model's log.

The data partition of event n is ("data", n); an offset there is the index of its transaction among the hanging ones.
"""

from collections.abc import Iterator

from service.kafka.hanging import (
    ActiveProducer,
    Marker,
    RecordCoordinates,
    Transaction,
    Verdict,
    markers_to_read,
    verdicts,
)
from service.kafka.hanging import hanging as open_from
from service.kafka.metadata import Partition
from tests.model import kafka
from tests.model.rules import Rules
from tests.model.world import ABORT, COMMIT, NONE, Hung, Part, View, World, has_offsets, with_part

MARKERS = {ABORT: Marker.ABORT, COMMIT: Marker.COMMIT}
ENDS = {Verdict.ABORT: ABORT, Verdict.COMMIT: COMMIT}


def name(world: World, s: int) -> World:
    """Let the next recovery of the slot check the data partitions with hanging transactions."""
    part = world.parts[s]
    return with_part(world, s, part._replace(hung=tuple(hung._replace(named=True) for hung in part.hung)))


def seen(part: Part, applied: int, rules: Rules) -> list[Hung]:
    """Find hanging transactions in the ledger partition, in partitions that recovery knows, and in those of entries."""
    return [
        hung
        for hung in part.hung
        if (hung.ledger or hung.named or hung.record >= max(applied, 0))
        and (rules.former_settled or hung.producer_id == part.producer_id)
    ]


def settlements(world: World, s: int, applied: int, rules: Rules) -> Iterator[tuple[str, World]]:
    """List what ends hanging transactions: each is one step, and may be the last.

    A transaction without data ends those of the slot's producer id. Then come former ids: each marker of one is written
    directly, after an empty transaction has shown that no later owner has fenced this one.
    """
    part = world.parts[s]
    found = seen(part, applied, rules)
    ids = {hung.producer_id for hung in found}
    unnamed = 1 if has_offsets(world) and not rules.offsets_named else NONE
    for producer_id in {part.producer_id} & ids or ids:
        of_id = [hung for hung in found if hung.producer_id == producer_id]
        former = "" if producer_id == part.producer_id else " under a former producer id"
        reads = rules.evidence_read and (rules.former_evidence or not former)
        for verdict, partitions in _verdicts(
            part, s, of_id, applied, rules._replace(evidence_read=reads), unnamed
        ).items():
            data = tuple(("data", number) in partitions for number in range(len(world.copies)))
            ledger = ("ledger", s) in partitions
            ended = kafka.mark_hung(world, s, ENDS[verdict], (data, ledger), producer_id)
            yield f"{verdict.value} what hangs in s{s}{former}", kafka.next_epoch(ended, s)


def settle_unconfirmed(world: World, s: int, view: View) -> Iterator[tuple[str, World]]:
    """A fenced session aborts what a later owner writes under another producer id, as if that were a former one.

    Only before the ledger record, because the verdict is an abort then.
    """
    part = world.parts[s]
    if part.txn is None or part.txn.decided or part.txn.record != NONE or part.txn.producer_id == view.producer_id:
        return
    aborted = part.txn._replace(copies=(0,) * len(world.copies))
    yield f"abort what s{s} has open under another producer id", with_part(world, s, part._replace(txn=aborted))


def _verdicts(
    part: Part, s: int, found: list[Hung], applied: int, rules: Rules, unnamed: int
) -> dict[Verdict, set[Partition]]:
    """Decide how each partition ends; `unnamed` is the data partition that no ledger record names."""
    transactions = []
    markers: dict[RecordCoordinates, Marker] = {}
    producers: dict[Partition, list[ActiveProducer]] = {}
    for hung in found:
        start = part.hung.index(hung)
        offsets: dict[Partition, int] = {}
        for number, copies in enumerate(hung.copies):
            if copies:
                producers.setdefault(("data", number), []).append(ActiveProducer(s, 0, start))
            if hung.data and hung.data[number] and number != unnamed:
                offsets["data", number] = start
        if hung.ledger:
            producers.setdefault(("ledger", s), []).append(ActiveProducer(s, 0, hung.record))
        if hung.record == NONE or (hung.record < applied and not rules.ledger_read_back):
            continue
        offsets["ledger", s] = hung.record
        ended = [RecordCoordinates(*place) for place in offsets.items() if not _is_open(hung, place[0])]
        if not rules.evidence_read:
            offsets = {partition: offset for partition, offset in offsets.items() if _is_open(hung, partition)}
        elif hung.marker != NONE and len(ended) < len(offsets):
            markers |= dict.fromkeys(ended, MARKERS[hung.marker])
        transactions.append(Transaction(offsets))
    begins = open_from(producers, {s})
    assert markers_to_read(begins, transactions) == markers.keys()
    by_verdict: dict[Verdict, set[Partition]] = {}
    for partition, verdict in verdicts(begins, transactions, markers).items():
        by_verdict.setdefault(verdict, set()).add(partition)
    return by_verdict


def _is_open(hung: Hung, partition: Partition) -> bool:
    kind, number = partition
    return hung.ledger if kind == "ledger" else bool(hung.copies[number])
