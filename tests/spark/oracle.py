"""What was planted in a history, and what an audit must say of it: plain Python that knows the faults by name.

Nothing here is derived from records or shared with the job. A story (tests/spark/generator.py) says of each id which
copies it has and why, which claimed places are empty and what can be proven of them; this module adds that up to the
findings and the balance of each stage, and compares them with a report.

A history has STAGES runs. What is said by stage is a tuple of that length.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from service.contract import wire
from tests.spark.history import Life

STAGES: Final = 3

Said = tuple[str | None, str | None, str | None]
"""One word for each stage; None: nothing."""

Place = tuple[str, int, int]

# Copies beyond this number are counted, but not all named.
NAMED_MAX: Final = 128

_HOUR_MS: Final = 3_600_000

THERE: Final = "there"
LOST: Final = "lost"
PENDING: Final = "pending"


@dataclass(eq=False)
class Record:
    """A record of a data topic. `cause` is why it was planted beside earlier ones of its id.

    `visible` is the stage from which a run can read it (None: never), `other` says that its fingerprint is not the
    one of the id's first record, `entered` that its transaction has a ledger entry for it, `forwarded` that a program
    sent it with that record's headers, whatever it made of the rest, `named` that its ledger record names topic ids.
    From the stage `vanished` on its log has it no more, as a leader without it was elected.
    """

    topic: str
    partition: int
    ts: int
    at: int
    key: str | None = None
    id: bytes = b""
    life: Life | None = None
    value: bytes | None = b"1"
    record_key: bytes | None = None
    headers: tuple[wire.Header, ...] = ()
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
        return wire.fingerprint(self.topic, self.asked, self.record_key, self.headers, self.value)

    @property
    def place(self) -> Place:
        assert self.offset >= 0, f"{self.key} was not written"
        return self.topic, self.partition, self.offset

    def entry(self) -> wire.Entry:
        batch, member = self.batch or (None, None)
        return wire.Entry(self.id, self.fp, self.at, *self.place, self.ts, batch, member)


@dataclass(eq=False)
class Claim:
    """A place that a ledger entry or a 201 names, and what becomes of it: `there`, `lost`, `pending`, or why nobody
    can know; None: not claimed yet. `place` is asked for when all records are written."""

    source: str
    place: Callable[[], Place]
    fates: Said


@dataclass(eq=False)
class Planted:
    """One id. `otherwise` is where it stands as long as it has neither a copy of ours nor an outstanding claim.

    `derived` are records of other topics, made of one of the copies by a program that forwards headers; `meant` says of
    which topics that is known. `until` is the last stage whose window still shows it; from the stage `again` on, when
    another copy comes into the log, its findings are shown all the same. `stuck` names the answer that left it unsure,
    `unsure` has when the requests were accepted that were left so.
    """

    id: bytes
    key: str | None
    copies: list[Record] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    accepted: bool = True
    phantom: Said = (None, None, None)
    otherwise: Said = (None, None, None)
    stuck: str = "504"
    unsure: list[int] = field(default_factory=list)
    until: int = STAGES
    again: int = STAGES + 1
    derived: list[Record] = field(default_factory=list)
    meant: set[str] = field(default_factory=set)

    def shown(self, stage: int) -> bool:
        """Whether a stage's report has its findings."""
        return stage <= self.until or stage >= self.again

    def visible(self, stage: int) -> list[Record]:
        """The copies in the order in which they count."""
        copies = [copy for copy in self.copies if copy.visible is not None and copy.visible <= stage < copy.vanished]
        return sorted(copies, key=lambda copy: (not copy.entered, copy.ts, copy.place))

    def forwarded_by(self, stage: int) -> list[Record]:
        """The derived records that a stage can see."""
        return sorted((one for one in self.derived if one.stage <= stage), key=lambda one: (one.ts, one.place))

    def fates(self, stage: int) -> set[str]:
        return {claim.fates[stage - 1] or THERE for claim in self.claims} - {THERE}

    def category(self, stage: int) -> str | None:
        """Its place in the balance of a stage; None: nobody accepted it."""
        if not self.accepted:
            return None
        copies, fates = self.visible(stage), self.fates(stage)
        if LOST in fates:
            return LOST
        if len(copies) > 1:
            return "conflicted" if any(copy.other for copy in copies) else "duplicated"
        if PENDING in fates:
            return PENDING
        if fates:
            return "unprovable"
        # A stranger's record under the same key settles nothing.
        ours = any(copy.life is not None for copy in copies)
        return "delivered_once" if ours else self.otherwise[stage - 1]


@dataclass(eq=False)
class Retried:
    """Ids that are one request under several keys: one finding, named by what they have in common."""

    ids: list[Planted]


@dataclass(eq=False)
class Gone:
    """Offsets `first` to before `last` of a log that went away unread, found at `stage`."""

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
    """All that was planted."""

    ids: list[Planted] = field(default_factory=list)
    retried: list[Retried] = field(default_factory=list)
    unkeyed: list[Record] = field(default_factory=list)
    gone: list[Gone] = field(default_factory=list)
    rejects: Counter[int] = field(default_factory=Counter)
    answers: Counter[tuple[int, str]] = field(default_factory=Counter)
    held: dict[int, set[tuple[str, int]]] = field(default_factory=dict)

    def findings(self, stage: int) -> Counter[Finding]:
        """Every finding of a stage's report."""
        found: Counter[Finding] = Counter()
        for one in self.ids:
            if one.shown(stage):
                found.update(_of_id(one, stage))
        for retried in self.retried:
            there = [one for one in retried.ids if one.visible(stage)]
            if len(there) > 1:
                there.sort(key=lambda one: (one.copies[0].at, one.id))
                places = tuple(_coordinate(one.visible(stage)[0], None) for one in there)
                found["client_duplicate", "new_key", there[0].id.hex(), there[0].key, len(there), places] += 1
        found.update(self._of_places(stage))
        return found

    def _of_places(self, stage: int) -> Iterable[Finding]:
        places: dict[_Where, list[tuple[int, int]]] = {}
        for one in self.ids:
            if not one.shown(stage):
                continue
            for claim in one.claims:
                fate = claim.fates[stage - 1]
                if fate not in (None, THERE, LOST, PENDING):
                    topic, partition, offset = claim.place()
                    places.setdefault(("evidence_gap", fate, topic, partition), []).append((offset, 1))
            if one.phantom[stage - 1] == "evidence_gap":
                for copy in one.visible(stage):
                    if copy.life is not None:
                        unheard = ("evidence_gap", "ledger_gone", copy.topic, copy.partition)
                        places.setdefault(unheard, []).append((copy.offset, 1))
        for record in self.unkeyed:
            if record.stage <= stage < record.vanished:
                places.setdefault(("unkeyed", None, record.topic, record.partition), []).append((record.offset, 1))
        for gone in self.gone:
            if gone.stage <= stage:
                where: _Where = ("evidence_gap", gone.cause, gone.topic, gone.partition)
                ends = [(gone.first, 0), (max(gone.last - 1, gone.first), gone.last - gone.first)]
                # What was promised within them went away with them: it is counted once.
                claimed = [(offset, 0) for offset, _ in places.get(where, ()) if gone.first <= offset < gone.last]
                rest = [(offset, n) for offset, n in places.get(where, ()) if not gone.first <= offset < gone.last]
                places[where] = [*ends, *claimed, *rest]
        for (kind, cause, topic, partition), marks in places.items():
            offsets = [offset for offset, _ in marks]
            yield (kind, cause, topic, partition, sum(count for _, count in marks), min(offsets), max(offsets))

    def balance(self, stage: int) -> dict[str, int]:
        """The numbers of the balance's line, with zeros left out."""
        sums: Counter[str] = Counter()
        for one in self.ids:
            if stage <= one.until:
                category = one.category(stage)
                if category is not None:
                    sums.update((category, "accepted"))
                elif one.phantom[stage - 1] == "phantom":
                    sums["phantom"] += 1
                sums["records"] += len(one.visible(stage)) + len(one.forwarded_by(stage))
        return {name: count for name, count in sums.items() if count}

    def requests(self, stage: int) -> dict[str, int]:
        """How many answers were journaled, by status; zeros left out."""
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
        places = tuple(_coordinate(copy, copy.cause if nth else None) for nth, copy in enumerate(copies))
        yield (kind, copies[1].cause, *head, len(copies), places if len(places) <= NAMED_MAX else NAMED_MAX)
    lost = [claim for claim in one.claims if claim.fates[stage - 1] == LOST]
    if lost:
        cause = "ledger" if any(claim.source == "ledger" for claim in lost) else "answer"
        claimed = sorted((*claim.place(), None, None, None, None, None, claim.source) for claim in lost)
        yield (LOST, cause, *head, len(lost), tuple(claimed))
    if one.phantom[stage - 1] == "phantom":
        ours = tuple(_coordinate(copy, None) for copy in copies if copy.life is not None)
        yield ("phantom", None, *head, len(ours), ours)
    derived = [copy for copy in one.forwarded_by(stage) if copy.topic not in one.meant]
    if derived:
        yield ("derived_copy", None, *head, len(derived), tuple(_coordinate(copy, None) for copy in derived))
    if _is_stuck(one, stage):
        yield ("stuck", one.stuck, *head, 0, ())


def _is_stuck(one: Planted, stage: int) -> bool:
    return one.category(stage) == "stuck"


def _coordinate(copy: Record, cause: str | None) -> tuple[Any, ...]:
    life = copy.life
    writer = (None,) * 4 if life is None else (life.slot, life.producer_id, life.epoch, life.instance)
    return (*copy.place, copy.ts, *writer, cause)


_COORDINATE: Final = ("topic", "partition", "offset", "timestamp", "slot", "pid", "epoch", "instance", "cause")


def told(document: Mapping[str, Any]) -> Counter[Finding]:
    """The findings of a report.json, in the form of `Plants.findings`."""
    found: Counter[Finding] = Counter()
    for one in document["findings"]:
        head = (one["kind"], one["cause"])
        if one["kind"] in ("unkeyed", "evidence_gap"):
            bounds = (one["topic"], one["partition"], one["count"], one["first_offset"], one["last_offset"])
            found[(*head, *bounds)] += 1
            continue
        places = [tuple(place[name] for name in _COORDINATE) for place in one["coordinates"]]
        if one["kind"] == LOST:
            places.sort()
        name = one["fingerprint"] if one["kind"] == "client_duplicate" else one["id"]
        assert one["finding_id"] == f"{one['kind']}:{name}", one
        named: Any = tuple(places) if one["count"] <= NAMED_MAX else len(places)
        found[(*head, one["id"], one["key"], one["count"], named)] += 1
    return found


@dataclass
class Score:
    """A report against what was planted: for each kind and cause how many are right, missing and too many."""

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
        """One line for each kind and cause."""
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
    """What a stage's report without the pass over ids has right and wrong of those that are stuck: no more are, and no
    fewer, than with the pass."""
    score = Score()
    wanted = Counter(_stuck_by_hour(one, stage) for one in plants.ids if one.shown(stage) and _is_stuck(one, stage))
    found = Counter(finding for finding in told(document) if finding[0] == "stuck")
    score.faults += [f"stage {stage}, hour by hour: missing {one}" for one in wanted - found]
    score.faults += [f"stage {stage}, hour by hour: too many {one}" for one in found - wanted]
    return score


def _stuck_by_hour(one: Planted, stage: int) -> Finding:
    """The finding of an id that is stuck, as its hour alone tells it: no record of another hour tells the id's key."""
    hours = {at // _HOUR_MS for at in one.unsure}
    key = one.key if any(copy.at // _HOUR_MS in hours for copy in one.visible(stage)) else None
    return ("stuck", one.stuck, one.id.hex(), key, 0, ())


def compare(plants: Plants, stage: int, document: Mapping[str, Any], status: int) -> Score:
    """What a stage's report has right and wrong."""
    score = Score()
    wanted, found = plants.findings(stage), told(document)
    for counter, part in (
        (score.right, wanted & found),
        (score.missing, wanted - found),
        (score.extra, found - wanted),
    ):
        for one, count in part.items():
            counter[one[0], one[1] or ""] += count
    score.faults += [f"stage {stage}: missing {one}" for one in wanted - found]
    score.faults += [f"stage {stage}: too many {one}" for one in found - wanted]
    said: list[tuple[str, Any, Any]] = [
        ("balance", plants.balance(stage), {name: n for name, n in document["balance"].items() if n}),
        ("requests", plants.requests(stage), {name: n for name, n in document["requests"].items() if n}),
        ("rejects", sum(n for since, n in plants.rejects.items() if since <= stage), document["evidence"]["rejects"]),
        (
            "held up",
            plants.held.get(stage, set()),
            {(log["topic"], log["partition"]) for log in document["evidence"]["held_up"]},
        ),
        ("exit status", 3 if wanted else 0, status),
        ("named twice", 0, len(document["findings"]) - len({one["finding_id"] for one in document["findings"]})),
        ("number of findings", wanted.total(), document["run"]["findings"]),
    ]
    score.faults += [f"stage {stage}: {what}: {told}, not {want}" for what, want, told in said if told != want]
    return score
