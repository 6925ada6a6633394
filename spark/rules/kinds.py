"""The registry of the kinds of findings.

A new kind is one entry here, and the rule that makes its findings. The report, its JSON Schema, the page, the metrics,
the topic of findings and the exit status take from the entry what they need to know; tests compare the entries with the
README's table, the alerts and the runbook.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from spark.errors import CannotRun

Severity = Literal["error", "warning", "information"]
Subject = Literal["id", "content", "partition", "sink"]
Surplus = Literal["with_cause", "after_first", "each"]

SEVERITIES: Final[dict[Severity, str]] = {
    "error": "an event is missing, surplus or changed",
    "warning": "an operator must check",
    "information": "only the client knows whether the finding is a fault",
}
"""What each severity means."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of finding.

    name: what programs compare: in the report, the lake, the metrics and the topic of findings.
    title, plural: what people read, for one finding and for several.
    meaning: what such a finding says, in a sentence or two.
    severity: see SEVERITIES.
    breaks_promise: whether such a finding breaks Fencepost's promise, that every accepted event is in Kafka exactly
        once, as it was accepted. Such findings page an operator, all others make a ticket.
    subject: the scope of one finding, by which it has the same `finding_id` in every run: an id, a content (a
        fingerprint), a partition with a cause, whose findings of single hours are summed up (of a mirror: a topic; of a
        sink that could not be read: the sink), or an id in a sink (a partition in a sink whose rows name coordinates
        that no event has).
    surplus: which of its coordinates are surplus copies, shown over time: those with a cause, those after the first, or
        each; None if such a finding is not about copies.
    """

    name: str
    title: str
    plural: str
    meaning: str
    severity: Severity
    breaks_promise: bool = False
    subject: Subject = "id"
    surplus: Surplus | None = None


DUPLICATE: Final = Kind(
    "duplicate",
    "duplicate",
    "duplicates",
    "One id, delivered more than once with the same content.",
    severity="error",
    breaks_promise=True,
    surplus="with_cause",
)
CONFLICT: Final = Kind(
    "conflict",
    "conflict",
    "conflicts",
    "One id, delivered with different contents.",
    severity="error",
    breaks_promise=True,
    surplus="with_cause",
)
CLIENT_DUPLICATE: Final = Kind(
    "client_duplicate",
    "duplicate by the client",
    "duplicates by clients",
    "Different ids with the same content and record key: a client made a new key for its retry.",
    severity="information",
    subject="content",
    surplus="after_first",
)
DERIVED_COPY: Final = Kind(
    "derived_copy",
    "copy in another topic",
    "copies in other topics",
    "A record of another topic, forwarded with its header. If intended, set derived in the rules.",
    severity="warning",
    surplus="each",
)
LOST: Final = Kind(
    "lost",
    "lost event",
    "lost events",
    "The ledger or a 201 names an offset that has another record, or none.",
    severity="error",
    breaks_promise=True,
)
PHANTOM: Final = Kind(
    "phantom",
    "phantom",
    "phantoms",
    "A record with Fencepost's header that neither the ledger nor a 201 names.",
    severity="error",
    breaks_promise=True,
)
UNKEYED: Final = Kind(
    "unkeyed",
    "partition with unkeyed records",
    "partitions with unkeyed records",
    "Records without an id: duplicates among them cannot be found.",
    severity="warning",
    subject="partition",
)
STUCK: Final = Kind(
    "stuck",
    "stuck request",
    "stuck requests",
    "Answered 202 or 504, and never settled.",
    severity="warning",
)
EVIDENCE_GAP: Final = Kind(
    "evidence_gap",
    "gap in the evidence",
    "gaps in the evidence",
    "What would prove the delivery is missing, or a sink could not be read. Events without proof are not counted as "
    "lost, or as missing in a sink.",
    severity="warning",
    subject="partition",
)

MISSING_IN_SINK: Final = Kind(
    "missing_in_sink",
    "event missing in a sink",
    "events missing in sinks",
    "A delivered event that has no row in the sink (no record in the mirror), although its time to arrive is over.",
    severity="error",
    subject="sink",
)
TWICE_IN_SINK: Final = Kind(
    "twice_in_sink",
    "event twice in a sink",
    "events twice in sinks",
    "A delivered event that has several rows in the sink (several records in the mirror).",
    severity="error",
    subject="sink",
)
LATE_IN_SINK: Final = Kind(
    "late_in_sink",
    "event late in a sink",
    "events late in sinks",
    "A delivered event whose row in the sink (record in the mirror) arrived after its time to arrive.",
    severity="warning",
    subject="sink",
)
EXTRA_IN_SINK: Final = Kind(
    "extra_in_sink",
    "unknown event in a sink",
    "unknown events in sinks",
    "Rows (records in a mirror) about an event that was never delivered, in a sink of Fencepost's events only.",
    severity="error",
    subject="sink",
)

KINDS: Final = {kind.name: kind for kind in vars().values() if isinstance(kind, Kind)}
"""All kinds by name, in the order of the report."""

BREAKING: Final = tuple(kind.name for kind in KINDS.values() if kind.breaks_promise)
"""The names of the kinds that break Fencepost's promise."""


def with_subject(subject: Subject) -> tuple[str, ...]:
    """Return the names of the kinds whose findings are about this subject."""
    return tuple(kind.name for kind in KINDS.values() if kind.subject == subject)


def with_surplus(*surplus: Surplus) -> tuple[str, ...]:
    """Return the names of the kinds with such surplus copies; without arguments, of all kinds about copies."""
    return tuple(kind.name for kind in KINDS.values() if kind.surplus in (surplus or get_args(Surplus)))


def kinds_of(option: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds that an option names by their names or their severity, in the order of KINDS; all for no names.

    CannotRun for a name that is neither.
    """
    if wrong := [name for name in names if name not in KINDS and name not in SEVERITIES]:
        raise CannotRun(
            f"{option} {wrong[0]!r} is no kind of finding: write {', '.join(KINDS)}, or {', '.join(SEVERITIES)}"
        )
    return tuple(name for name, kind in KINDS.items() if not names or name in names or kind.severity in names)
