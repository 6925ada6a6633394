"""Decides what a plan does about each finding. Pure functions: the reading and the sending are in other modules."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from spark.repair.bodies import Body, with_fingerprint
from spark.rules import kinds
from spark.tables import schemas

SEND: Final = "send"
COPY: Final = "copy"
DROP: Final = "drop"
NONE: Final = "none"
"""Actions: send the event to Fencepost again; write its record into another topic; leave a copy out of
the topic that `--clean` writes; nothing, for a reason."""

RECORD_EXISTS: Final = "record_exists"
REPAIRED: Final = "repaired"
NO_BYTES: Final = "no_bytes"
NO_FINGERPRINT: Final = "no_fingerprint"
OTHER_BYTES: Final = "other_bytes"
BATCH_MEMBER: Final = "batch_member"
GONE: Final = "gone"
OTHER_RECORD: Final = "other_record"
"""Reasons for NONE: a record of the id is in Kafka; an earlier plan has repaired it; nobody has named the bytes;
nothing proves the bytes, since ledger and journal no longer have the fingerprint; the bytes have another fingerprint; a
member of an atomic batch or a produce request, whose key names all members; the record is no longer in Kafka; the
offset has another record."""

WRITTEN: Final = "written"
REPLAYED: Final = "replayed"
EXPIRED: Final = "expired"
REFUSED: Final = "refused"
UNSETTLED: Final = "unsettled"
OTHER_CALLER: Final = "other_caller"
COPIED: Final = "copied"
"""Outcomes. WRITTEN: the event is in Kafka once more than before. REPLAYED: the key is remembered, so nothing was
written. EXPIRED: the key may be forgotten, so nothing was written (412). REFUSED: as it would be each time. UNSETTLED:
no final answer in time. OTHER_CALLER: the token is another caller's, by which the key has another id."""

LEFT: Final = frozenset({REPLAYED, EXPIRED, REFUSED, UNSETTLED, OTHER_CALLER})
"""Outcomes that leave the event lost."""

IN_ORDER: Final = frozenset({RECORD_EXISTS, REPAIRED})
"""Reasons by which nothing is left to do."""

NEW_KEY: Final = "fencepost-repair-"


def new_key(id: str) -> str:
    """Return the key under which a lost event is written if its own key cannot write it: one for each id."""
    return f"{NEW_KEY}{id}"


Coordinates = tuple[str, int, int]
"""Topic, partition and offset."""
RecordId = tuple[str, int, int]
"""Topic id (KIP-516), partition and offset: a topic that is recreated has other records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row of `repair_entries` (schemas.REPAIR_ENTRY) without its plan.

    Not stored: `body`, which is sent; `lost_at`, the coordinates that have no record of the event; `doubtful`: an
    earlier plan may have written the event under its own key, and no run has read the topic since.
    """

    finding_id: str
    kind: str
    id: str
    key: str | None = None
    sink: str | None = None
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    accepted_ms: int | None = None
    action: str = NONE
    reason: str | None = None
    sent_key: str | None = None
    first_sent_ms: int | None = None
    outcome: str | None = None
    detail: str | None = None
    written_topic: str | None = None
    written_partition: int | None = None
    written_offset: int | None = None
    ended_ms: int | None = None
    body: Body | None = None
    lost_at: tuple[Coordinates, ...] = ()
    doubtful: bool = False

    def row(self, plan: int) -> dict[str, Any]:
        """Return the row of a plan."""
        return {"plan": plan, **{name: getattr(self, name) for name in schemas.REPAIR_ENTRY if name != "plan"}}

    @property
    def is_left(self) -> bool:
        """Whether something is left to do for an operator."""
        if self.action == NONE:
            return self.reason not in IN_ORDER
        return self.outcome is None or self.outcome in LEFT


@dataclass(frozen=True, slots=True)
class Claimed:
    """What ledger and journal say of an id: the fingerprints, and whether it is a member of an atomic batch."""

    fingerprints: frozenset[str] = frozenset()
    is_member: bool = False


NO_CLAIMS: Final = Claimed()


_DELIVERED: Final = 201
_UNDECIDED: Final = frozenset({202, 504})


def claimed(rows: Iterable[Mapping[str, Any]], lost_at: Collection[Coordinates]) -> Claimed:
    """Return what the entries of the ledger, and the answers of the journal, about an id say.

    Entries have no `status`, answers no `refused` and `batch`. A refusal (422 `fingerprint-mismatch`, for one) names
    the fingerprint of what was asked for, which need not be the event: it proves nothing. Of the others only the best
    count: those that name coordinates that were lost, else entries and 201, else 202 and 504.
    """
    best: tuple[set[str], set[str], set[str]] = (set(), set(), set())
    is_member = False
    for row in rows:
        status, fingerprint = row.get("status"), row["fp"]
        is_member = is_member or row.get("batch") is not None
        is_delivered = status == _DELIVERED or (status is None and row.get("refused") is None)
        if fingerprint is None or not (is_delivered or status in _UNDECIDED):
            continue
        at = row["topic"], row["partition"], row["offset"]
        best[2 if not is_delivered else 0 if at in lost_at else 1].add(fingerprint)
    return Claimed(frozenset(next(filter(None, best), set())), is_member)


@dataclass(frozen=True, slots=True)
class Executed:
    """A plan that was executed: its run, and the ids of the topics that it copied from and into, by name."""

    run: int
    topic_ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class History:
    """What earlier plans have done.

    By id: `first_sent_ms`, when its new key may first have been sent; `written`, where a plan wrote the event;
    `unsettled_run`, the run of the last plan that may have written the event without knowing it. By record and topic
    id of the target: `copied`, the plan that copied the record.
    """

    first_sent_ms: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[str, Coordinates] = field(default_factory=dict)
    unsettled_run: Mapping[str, int] = field(default_factory=dict)
    copied: Mapping[tuple[RecordId, str], int] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], executed: Mapping[int, Executed]) -> "History":
        """Read the rows of earlier plans; `executed` are the plans that were executed, by number."""
        first_sent: dict[str, int] = {}
        written: dict[str, Coordinates] = {}
        unsettled: dict[str, int] = {}
        copied: dict[tuple[RecordId, str], int] = {}
        for row in rows:
            if row["plan"] not in executed:
                continue
            id, plan = row["id"], executed[row["plan"]]
            if row["action"] == SEND:
                first_sent[id] = min(row["first_sent_ms"], first_sent.get(id, row["first_sent_ms"]))
                if row["outcome"] in (None, UNSETTLED):
                    unsettled[id] = max(plan.run, unsettled.get(id, 0))
            # With another caller's token the event was written too, under that caller's id.
            if row["outcome"] in (WRITTEN, OTHER_CALLER) and row["written_topic"] is not None:
                written[id] = (row["written_topic"], row["written_partition"], row["written_offset"])
            if row["outcome"] == COPIED:
                record = plan.topic_ids[row["topic"]], row["partition"], row["offset"]
                copied[record, plan.topic_ids[row["written_topic"]]] = row["plan"]
        return cls(first_sent, written, unsettled, copied)


def coordinates_of(finding: Mapping[str, Any]) -> tuple[Coordinates, ...]:
    """Return the coordinates that a finding (current_findings.FIELDS) lists."""
    return tuple((one["topic"], one["partition"], one["offset"]) for one in finding["coordinates"])


@dataclass(frozen=True, slots=True)
class LostEvidence:
    """What is known of the id of a lost event: its acceptance, the coordinates of a record of the id, or of its new
    key, that the lake knows, and what ledger and journal say."""

    accepted_ms: int
    record: Coordinates | None = None
    claimed: Claimed = NO_CLAIMS


def lost(
    finding: Mapping[str, Any],
    known: LostEvidence,
    bodies: Mapping[str, Sequence[Body]],
    history: History,
    run: int,
    now_ms: int,
) -> Entry:
    """Decide about a finding `lost` (current_findings.FIELDS) of the last run, `run`.

    `bodies` are those of the files, by id. The event is sent if its bytes are proven: by the id of their key, and by
    the fingerprint.
    """
    id = finding["id"]
    lost_at = coordinates_of(finding)
    _, partition, offset = lost_at[0] if lost_at else (None, None, None)
    entry = Entry(
        finding_id=finding["finding_id"],
        kind=kinds.LOST.name,
        id=id,
        key=finding["key"],
        topic=finding["topic"],
        partition=partition,
        offset=offset,
        accepted_ms=known.accepted_ms,
        lost_at=lost_at,
        doubtful=history.unsettled_run.get(id, -1) >= run,
    )
    return _decided(entry, known, bodies, history, now_ms)


def _decided(
    entry: Entry, known: LostEvidence, bodies: Mapping[str, Sequence[Body]], history: History, now_ms: int
) -> Entry:
    """Return the entry of a lost event with its action, or the reason why there is none."""
    id = entry.id
    if known.record is not None:
        return _nothing(entry, RECORD_EXISTS, known.record)
    if id in history.written:
        return _nothing(entry, REPAIRED, history.written[id])
    if known.claimed.is_member:
        return replace(entry, reason=BATCH_MEMBER)
    if id not in bodies:
        return replace(entry, reason=NO_BYTES)
    if not known.claimed.fingerprints:
        return replace(entry, reason=NO_FINGERPRINT)
    body = with_fingerprint(bodies, id, known.claimed.fingerprints)
    if body is None:
        return replace(entry, reason=OTHER_BYTES)
    first_sent_ms = history.first_sent_ms.get(id, now_ms)
    return replace(entry, action=SEND, key=body.key, body=body, first_sent_ms=first_sent_ms)


def _nothing(entry: Entry, reason: str, record: Coordinates) -> Entry:
    topic, partition, offset = record
    return replace(entry, reason=reason, written_topic=topic, written_partition=partition, written_offset=offset)


def records_of(finding: Mapping[str, Any], known: Collection[Coordinates]) -> list[Coordinates]:
    """Return where the event of a finding `missing_in_sink` may have records, of those that the lake knows of the id
    (`known`): at the coordinates that the finding lists, then elsewhere in the same topics."""
    listed = coordinates_of(finding)
    topics = {topic for topic, _, _ in listed}
    return [*(at for at in listed if at in known), *sorted(at for at in {*known} - {*listed} if at[0] in topics)]


def missing(
    finding: Mapping[str, Any],
    accepted_ms: int,
    records: Mapping[Coordinates, bool | None],
    history: History,
    topic_ids: Mapping[str, str],
    target: str,
) -> Entry:
    """Decide about a finding `missing_in_sink` (current_findings.FIELDS).

    `records`: where the event may have records (records_of), and whether the record there is that of the event, None if
    there is no record. `topic_ids` are the ids of topics that exist, by name; `target` is the topic of --into, empty
    without one.
    """
    listed = coordinates_of(finding)
    proven = [at for at, is_proven in records.items() if is_proven]
    topic, partition, offset = next(iter([*proven, *listed]), (None, None, None))
    entry = Entry(
        finding_id=finding["finding_id"],
        kind=kinds.MISSING_IN_SINK.name,
        id=finding["id"],
        key=finding["key"],
        sink=finding["sink"],
        topic=topic,
        partition=partition,
        offset=offset,
        accepted_ms=accepted_ms,
    )
    for name, number, at in {**dict.fromkeys(listed), **records}:
        record = topic_ids.get(name, ""), number, at
        if (plan := history.copied.get((record, topic_ids.get(target, "")))) is not None:
            return replace(entry, reason=REPAIRED, written_topic=target, detail=f"copied by plan {plan}")
    if not proven:
        return replace(entry, reason=OTHER_RECORD if False in records.values() else GONE)
    return replace(entry, action=COPY)


def surplus(copies: Sequence[Mapping[str, Any]], bounds: Mapping[int, tuple[int, int]]) -> list[Entry]:
    """Return the copies of one topic that `--clean` leaves out: those with a cause, but never all of an id.

    `copies` are `id, finding_id, key, partition, offset, topic, cause, nth`, of findings `duplicate`, in any order.
    `bounds` are the offsets by partition (first, behind the last) that are copied. A copy outside, which retention may
    have deleted, is neither left out nor the one that is kept.
    """
    by_id: dict[str, list[Mapping[str, Any]]] = {}
    for copy in copies:
        first, end = bounds[copy["partition"]]
        if not first <= copy["offset"] < end:
            continue
        by_id.setdefault(copy["id"], []).append(copy)
    dropped: list[Entry] = []
    for of_id in by_id.values():
        ordered = sorted(of_id, key=lambda copy: copy["nth"])
        kept = next((copy for copy in ordered if copy["cause"] is None), ordered[0])
        dropped += [_dropped(copy) for copy in ordered if copy is not kept]
    return dropped


def _dropped(copy: Mapping[str, Any]) -> Entry:
    names = ("finding_id", "id", "key", "topic", "partition", "offset")
    return Entry(kind=kinds.DUPLICATE.name, action=DROP, detail=copy["cause"], **{name: copy[name] for name in names})


def spans_without(first: int, end: int, dropped: Collection[int]) -> list[tuple[int, int]]:
    """Return the spans (first offset, offset behind the last) from `first` to `end` without these offsets."""
    spans = []
    for offset in sorted(dropped):
        if first <= offset < end:
            if offset > first:
                spans.append((first, offset))
            first = offset + 1
    if first < end:
        spans.append((first, end))
    return spans
