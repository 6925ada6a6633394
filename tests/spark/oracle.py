"""The faults that were planted in a history, and the report that an audit must give: plain Python, without the job.

Nothing here is computed from Kafka's records or shared with the job. A scenario (tests/spark/generator.py) states the
copies of each id with their causes, and the outcome of each claim; this module adds these up to the findings and the
balance of each stage, and compares them with a report.

A history has STAGES runs. A value for each stage is a tuple of that length.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from service.contract.wire.ids import Header, fingerprint
from service.contract.wire.ledger_entries import Entry
from tests.spark.history import Writer
from tests.spark.times import HOUR_MS

STAGES: Final = 3

ByStage = tuple[str | None, str | None, str | None]
"""An outcome, category or finding for each stage; None: none."""

Coordinates = tuple[str, int, int]

# A finding lists at most this number of copies, and counts all.
NAMED_MAX: Final = 128


THERE: Final = "there"
LOST: Final = "lost"
PENDING: Final = "pending"


@dataclass(eq=False)
class Record:
    """A record of a data topic. `cause`: the cause of this copy, null for the first copy of its id.

    `visible`: the stage from which a run can read the record (None: never). `other`: the record has another fingerprint
    than the first record of its id. `entered`: its transaction has a ledger entry for it. `forwarded`: the record whose
    headers a program sent with this record. `named`: its ledger record names topic ids. `vanished`: the stage from
    which the log no longer has the record, since a leader without it was elected.
    """

    topic: str
    partition: int
    ts: int
    at: int
    key: str | None = None
    id: bytes = b""
    writer: Writer | None = None
    value: bytes | None = b"1"
    record_key: bytes | None = None
    headers: tuple[Header, ...] = ()
    asked: int | None = None
    entered: bool = True
    named: bool = True
    vanished: int = STAGES + 1
    cause: str | None = None
    other: bool = False
    stage: int = 1
    visible: int | None = 1
    batch: tuple[bytes, int] | None = None
    forwarded: "Record | None" = None
    offset: int = -1

    @property
    def fp(self) -> bytes:
        return fingerprint(self.topic, self.asked, self.record_key, self.headers, self.value)

    @property
    def coordinates(self) -> Coordinates:
        assert self.offset >= 0, f"{self.key} was not written"
        return self.topic, self.partition, self.offset

    def entry(self) -> Entry:
        batch, member = self.batch or (None, None)
        return Entry(self.id, self.fp, self.at, *self.coordinates, self.ts, batch, member)


@dataclass(eq=False)
class Claim:
    """Coordinates that a ledger entry or a 201 names, and their outcome at each stage.

    An outcome is `there`, `lost`, `pending`, or the cause of an evidence gap; None before the claim is written.
    `coordinates` is called when all records are written.
    """

    source: str
    coordinates: Callable[[], Coordinates]
    outcomes: ByStage


@dataclass(eq=False)
class Planted:
    """One id. `default_category`: its category while it has neither a copy with Fencepost's header nor a claim without
    a record.

    `derived`: records in other topics that a program forwarded with the headers of a copy; `expected_in`: the topics
    whose rule expects derived copies. `shown_until`: the last stage whose window shows the id; `shown_from`: the
    stage from which its findings are shown again, when another copy comes into the log. `stuck`: the status of the
    answer that left the id in doubt; `in_doubt`: when these requests were accepted.
    """

    id: bytes
    key: str | None
    copies: list[Record] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    accepted: bool = True
    phantom: ByStage = (None, None, None)
    default_category: ByStage = (None, None, None)
    stuck: str = "504"
    in_doubt: list[int] = field(default_factory=list)
    shown_until: int = STAGES
    shown_from: int = STAGES + 1
    derived: list[Record] = field(default_factory=list)
    expected_in: set[str] = field(default_factory=set)

    def shown(self, stage: int) -> bool:
        """Check whether the report of a stage has the findings of this id."""
        return stage <= self.shown_until or stage >= self.shown_from

    def visible(self, stage: int) -> list[Record]:
        """Return the copies that a stage can read, in the order of the audit."""
        copies = [copy for copy in self.copies if copy.visible is not None and copy.visible <= stage < copy.vanished]
        return sorted(copies, key=lambda copy: (not copy.entered, copy.ts, copy.coordinates))

    def forwarded_by(self, stage: int) -> list[Record]:
        """Return the derived copies that a stage can read."""
        return sorted((one for one in self.derived if one.stage <= stage), key=lambda one: (one.ts, one.coordinates))

    def outcomes(self, stage: int) -> set[str]:
        """Return the outcomes of the claims whose record is not there."""
        return {claim.outcomes[stage - 1] or THERE for claim in self.claims} - {THERE}

    def category(self, stage: int) -> str | None:
        """Return the category in the balance of a stage; None if the id was not accepted."""
        if not self.accepted:
            return None
        copies, outcomes = self.visible(stage), self.outcomes(stage)
        if LOST in outcomes:
            return LOST
        if len(copies) > 1:
            return "conflicted" if any(copy.other for copy in copies) else "duplicated"
        if PENDING in outcomes:
            return PENDING
        if outcomes:
            return "unprovable"
        # A record of another program under the same key settles no 202 or 504.
        ours = any(copy.writer is not None for copy in copies)
        return "delivered_once" if ours else self.default_category[stage - 1]


@dataclass(eq=False)
class Retried:
    """Ids that are one request under several keys: one finding, by their common fingerprint."""

    ids: list[Planted]


@dataclass(eq=False)
class UnreadGap:
    """Offsets from `first` to before `last` of a log that were deleted unread, found at `stage`."""

    topic: str
    partition: int
    cause: str
    first: int
    last: int
    stage: int


Finding = tuple[Any, ...]
"""Kind and cause; then id, key, count and coordinates, or topic, partition, count and the bounds of the offsets."""

_Where = tuple[str, str | None, str, int]


@dataclass
class Plants:
    """Everything that was planted."""

    ids: list[Planted] = field(default_factory=list)
    retried: list[Retried] = field(default_factory=list)
    unkeyed: list[Record] = field(default_factory=list)
    unread_gaps: list[UnreadGap] = field(default_factory=list)
    undecoded: list[Record] = field(default_factory=list)
    answers: Counter[tuple[int, str]] = field(default_factory=Counter)
    blocked: dict[int, set[tuple[str, int]]] = field(default_factory=dict)

    def findings(self, stage: int) -> Counter[Finding]:
        """Return the findings of the report of a stage."""
        found: Counter[Finding] = Counter()
        for one in self.ids:
            if one.shown(stage):
                found.update(_of_id(one, stage))
        for retried in self.retried:
            there = [one for one in retried.ids if one.visible(stage)]
            if len(there) > 1:
                there.sort(key=lambda one: (one.copies[0].at, one.id))
                listed = tuple(_coordinate(one.visible(stage)[0], None) for one in there)
                found["client_duplicate", "new_key", there[0].id.hex(), there[0].key, len(there), listed] += 1
        found.update(self._of_partitions(stage))
        return found

    def _of_partitions(self, stage: int) -> Iterable[Finding]:
        """Return the findings about partitions: evidence gaps and unkeyed records."""
        offsets_of: dict[_Where, list[tuple[int, int]]] = {}
        where: _Where
        for one in self.ids:
            if not one.shown(stage):
                continue
            for claim in one.claims:
                outcome = claim.outcomes[stage - 1]
                if outcome not in (None, THERE, LOST, PENDING):
                    topic, partition, offset = claim.coordinates()
                    offsets_of.setdefault(("evidence_gap", outcome, topic, partition), []).append((offset, 1))
            if one.phantom[stage - 1] == "evidence_gap":
                for copy in one.visible(stage):
                    if copy.writer is not None:
                        unclaimed = ("evidence_gap", "ledger_gone", copy.topic, copy.partition)
                        offsets_of.setdefault(unclaimed, []).append((copy.offset, 1))
        for record in self.unkeyed:
            if record.stage <= stage < record.vanished:
                offsets_of.setdefault(("unkeyed", None, record.topic, record.partition), []).append((record.offset, 1))
        for record in self.undecoded:
            if record.stage <= stage:
                where = ("evidence_gap", "undecoded", record.topic, record.partition)
                offsets_of.setdefault(where, []).append((record.offset, 1))
        for gap in self.unread_gaps:
            if gap.stage <= stage:
                where = ("evidence_gap", gap.cause, gap.topic, gap.partition)
                ends = [(gap.first, 0), (max(gap.last - 1, gap.first), gap.last - gap.first)]
                # Claims on these offsets do not count again.
                claimed = [(offset, 0) for offset, _ in offsets_of.get(where, ()) if gap.first <= offset < gap.last]
                rest = [(offset, n) for offset, n in offsets_of.get(where, ()) if not gap.first <= offset < gap.last]
                offsets_of[where] = [*ends, *claimed, *rest]
        for (kind, cause, topic, partition), marks in offsets_of.items():
            offsets = [offset for offset, _ in marks]
            yield (kind, cause, topic, partition, sum(count for _, count in marks), min(offsets), max(offsets))

    def balance(self, stage: int) -> dict[str, int]:
        """Return the numbers of the balance of a stage, without zeros."""
        sums: Counter[str] = Counter()
        for one in self.ids:
            if stage <= one.shown_until:
                category = one.category(stage)
                if category is not None:
                    sums.update((category, "accepted"))
                elif one.phantom[stage - 1] == "phantom":
                    sums["phantom"] += 1
                sums["records"] += len(one.visible(stage)) + len(one.forwarded_by(stage))
        return {name: count for name, count in sums.items() if count}

    def requests(self, stage: int) -> dict[str, int]:
        """Return the number of journaled answers by status, without zeros."""
        sums: Counter[str] = Counter()
        for (since, status), count in self.answers.items():
            if since <= stage:
                sums[status] += count
        return dict(sums)


def _of_id(one: Planted, stage: int) -> Iterable[Finding]:
    copies = one.visible(stage)
    key = one.key if copies else None
    head = (one.id.hex(), key)
    if len(copies) > 1:
        kind = "conflict" if any(copy.other for copy in copies) else "duplicate"
        listed = tuple(_coordinate(copy, copy.cause if nth else None) for nth, copy in enumerate(copies))
        yield (kind, copies[1].cause, *head, len(copies), listed if len(listed) <= NAMED_MAX else NAMED_MAX)
    lost = [claim for claim in one.claims if claim.outcomes[stage - 1] == LOST]
    if lost:
        cause = "ledger" if any(claim.source == "ledger" for claim in lost) else "answer"
        claimed = sorted((*claim.coordinates(), None, None, None, None, None, claim.source) for claim in lost)
        yield (LOST, cause, *head, len(lost), tuple(claimed))
    if one.phantom[stage - 1] == "phantom":
        ours = tuple(_coordinate(copy, None) for copy in copies if copy.writer is not None)
        yield ("phantom", None, *head, len(ours), ours)
    derived = [copy for copy in one.forwarded_by(stage) if copy.topic not in one.expected_in]
    if derived:
        yield ("derived_copy", None, *head, len(derived), tuple(_coordinate(copy, None) for copy in derived))
    if _is_stuck(one, stage):
        yield ("stuck", one.stuck, *head, 0, ())


def _is_stuck(one: Planted, stage: int) -> bool:
    return one.category(stage) == "stuck"


def _coordinate(copy: Record, cause: str | None) -> tuple[Any, ...]:
    return (*copy.coordinates, copy.ts, *_producer(copy.writer), cause)


def _producer(writer: Writer | None) -> tuple[Any, ...]:
    return (None,) * 4 if writer is None else (writer.slot, writer.producer_id, writer.epoch, writer.instance)


_COORDINATE: Final = ("topic", "partition", "offset", "timestamp", "slot", "pid", "epoch", "instance", "cause")


def findings_of(document: Mapping[str, Any]) -> Counter[Finding]:
    """Return the findings of a report.json, in the form of `Plants.findings`."""
    found: Counter[Finding] = Counter()
    for one in document["findings"]:
        head = (one["kind"], one["cause"])
        if one["kind"] in ("unkeyed", "evidence_gap"):
            bounds = (one["topic"], one["partition"], one["count"], one["first_offset"], one["last_offset"])
            found[(*head, *bounds)] += 1
            continue
        listed = [tuple(coordinates[name] for name in _COORDINATE) for coordinates in one["coordinates"]]
        if one["kind"] == LOST:
            listed.sort()
        name = one["fingerprint"] if one["kind"] == "client_duplicate" else one["id"]
        assert one["finding_id"] == f"{one['kind']}:{name}", one
        named: Any = tuple(listed) if one["count"] <= NAMED_MAX else len(listed)
        found[(*head, one["id"], one["key"], one["count"], named)] += 1
    return found


@dataclass
class Score:
    """The comparison of a report with what was planted: right, missing and surplus findings by kind and cause."""

    right: Counter[tuple[str, str]] = field(default_factory=Counter)
    missing: Counter[tuple[str, str]] = field(default_factory=Counter)
    extra: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def perfect(self) -> bool:
        return not self.faults

    @property
    def recall(self) -> float:
        return _ratio(self.right.total(), self.missing.total())

    @property
    def precision(self) -> float:
        return _ratio(self.right.total(), self.extra.total())

    def add(self, other: "Score") -> None:
        self.right += other.right
        self.missing += other.missing
        self.extra += other.extra
        self.faults += other.faults

    def table(self) -> str:
        """Format one line for each kind and cause."""
        lines = [f"{'kind':<18}{'cause':<18}{'planted':>8}{'found':>8}{'recall':>8}{'precision':>11}"]
        for name in sorted({*self.right, *self.missing, *self.extra}):
            right, missing, extra = self.right[name], self.missing[name], self.extra[name]
            lines.append(
                f"{name[0]:<18}{name[1]:<18}{right + missing:>8}{right + extra:>8}"
                f"{_ratio(right, missing):>8.3f}{_ratio(right, extra):>11.3f}"
            )
        return "\n".join(lines)


def _ratio(right: int, wrong: int) -> float:
    return right / (right + wrong) if right + wrong else 1.0


def compare_stuck(plants: Plants, stage: int, document: Mapping[str, Any]) -> Score:
    """Compare the findings `stuck` of a report without the pass over ids: as many as with the pass."""
    score = Score()
    wanted = Counter(_stuck_by_hour(one, stage) for one in plants.ids if one.shown(stage) and _is_stuck(one, stage))
    found = Counter(finding for finding in findings_of(document) if finding[0] == "stuck")
    score.faults += [f"stage {stage}, without the pass: missing {one}" for one in wanted - found]
    score.faults += [f"stage {stage}, without the pass: too many {one}" for one in found - wanted]
    return score


def _stuck_by_hour(one: Planted, stage: int) -> Finding:
    """Return the finding of a stuck id from its hour alone: no key if only a record of another hour has the key."""
    hours = {at // HOUR_MS for at in one.in_doubt}
    key = one.key if any(copy.at // HOUR_MS in hours for copy in one.visible(stage)) else None
    return ("stuck", one.stuck, one.id.hex(), key, 0, ())


def compare(plants: Plants, stage: int, document: Mapping[str, Any], status: int) -> Score:
    """Compare the report of a stage with what was planted."""
    score = Score()
    wanted, found = plants.findings(stage), findings_of(document)
    for counter, part in (
        (score.right, wanted & found),
        (score.missing, wanted - found),
        (score.extra, found - wanted),
    ):
        for one, count in part.items():
            counter[one[0], one[1] or ""] += count
    score.faults += [f"stage {stage}: missing {one}" for one in wanted - found]
    score.faults += [f"stage {stage}: too many {one}" for one in found - wanted]
    compared: list[tuple[str, Any, Any]] = [
        ("balance", plants.balance(stage), {name: n for name, n in document["balance"].items() if n}),
        ("requests", plants.requests(stage), {name: n for name, n in document["requests"].items() if n}),
        ("rejects", sum(one.stage <= stage for one in plants.undecoded), document["evidence"]["rejects"]),
        (
            "held up",
            plants.blocked.get(stage, set()),
            {(log["topic"], log["partition"]) for log in document["evidence"]["held_up"]},
        ),
        ("exit status", 3 if wanted else 0, status),
        ("named twice", 0, len(document["findings"]) - len({one["finding_id"] for one in document["findings"]})),
        ("number of findings", wanted.total(), document["run"]["findings"]),
    ]
    score.faults += [
        f"stage {stage}: {name}: {found}, not {expected}" for name, expected, found in compared if found != expected
    ]
    return score
