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
from tests.model.world import ABORT, COMMIT, NONE, Hung, Part, World, has_offsets, with_part

MARKERS = {ABORT: Marker.ABORT, COMMIT: Marker.COMMIT}
ENDS = {Verdict.ABORT: ABORT, Verdict.COMMIT: COMMIT}


def name(world: World, s: int) -> World:
    """Let the next recovery of the slot check the data partitions with hanging transactions."""
    part = world.parts[s]
    return with_part(world, s, part._replace(hung=tuple(hung._replace(named=True) for hung in part.hung)))


def seen(part: Part, applied: int) -> list[Hung]:
    """Find hanging transactions in the ledger partition, in partitions that recovery knows, and in those of entries."""
    return [hung for hung in part.hung if hung.ledger or hung.named or hung.record >= max(applied, 0)]


def settlements(world: World, s: int, applied: int, rules: Rules) -> Iterator[tuple[str, World]]:
    """List the transactions without data that end hanging ones: each is one step, and may be the last."""
    part = world.parts[s]
    found = seen(part, applied)
    unnamed = 1 if has_offsets(world) and not rules.offsets_named else NONE
    for verdict, partitions in _verdicts(part, s, found, applied, rules, unnamed).items():
        data = tuple(("data", number) in partitions for number in range(len(world.copies)))
        ledger = ("ledger", s) in partitions
        marker = ENDS[verdict]
        ended = kafka.next_epoch(kafka.mark_hung(world, s, marker, (data, ledger)), s)
        yield f"{verdict.value} what hangs in s{s}", ended


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
