"""report.json as types; `schema()` is the JSON Schema that follows from them.

Each count names its unit. Times are RFC 3339 in UTC, to the millisecond.
"""

from typing import Annotated, Any, Final, Literal, TypedDict

import msgspec
from msgspec import Meta

SCHEMA_ID: Final = "urn:fencepost:report:1"

Verdict = Literal["clean", "findings"]
Role = Literal["data", "ledger", "requests"]
Kind = Literal[
    "duplicate", "conflict", "client_duplicate", "derived_copy", "lost", "phantom", "unkeyed", "stuck", "evidence_gap"
]
CopyKind = Literal["duplicate", "conflict", "client_duplicate", "derived_copy"]
Severity = Literal["error", "warning", "information"]
Category = Literal[
    "pending", "lost", "duplicated", "conflicted", "delivered_once", "stuck", "unprovable", "phantom", "evidence_gap"
]
GapCause = Literal["retention", "truncated", "recreated"]


def _about(text: str, **limits: Any) -> Meta:
    return Meta(description=text, **limits)


def _ids(what: str) -> Meta:
    return Meta(ge=0, description=f"{what}. Unit: ids.")


def _records(what: str) -> Meta:
    return Meta(ge=0, description=f"{what}. Unit: records.")


def _answers(what: str) -> Meta:
    return Meta(ge=0, description=f"{what}. Unit: answers.")


def _findings(kind: str) -> Meta:
    return Meta(ge=0, description=f"Findings of kind {kind}. Unit: findings.")


_TIME: Final = Meta(extra_json_schema={"format": "date-time"})
Time = Annotated[str, _TIME]
Topic = Annotated[str, _about("Kafka topic.")]
Partition = Annotated[int, _about("Kafka partition.", ge=0)]
Offset = Annotated[int, _about("Kafka offset.", ge=0)]
PartitionOrNone = Annotated[int, Meta(ge=0)] | None
OffsetOrNone = Annotated[int, Meta(ge=0)] | None
Accepted = Annotated[int, _ids("Ids in the ledger, or answered 201, 202 or 504")]
DeliveredOnce = Annotated[int, _ids("Accepted ids with exactly one record")]
Pending = Annotated[int, _ids("Accepted ids that cannot be judged yet")]
Delivered = Annotated[int, _records("Records that were delivered")]
Undecoded = Annotated[int, _records("Records that could not be decoded")]
FrozenAt = Annotated[Time, _about("When the ends of the logs were frozen.")]
OffsetsRead = Annotated[int, _about("Offsets read. Unit: offsets.", ge=0)]


class Run(TypedDict):
    """The run and its verdict."""

    number: Annotated[int, _about("Number of the run on this lake, from 1.", ge=1)]
    verdict: Annotated[Verdict, _about("clean: no finding.")]
    findings: Annotated[int, _about("All findings that stand in the window. Unit: findings.", ge=0)]
    frozen_at: FrozenAt
    window_from: Annotated[Time, _about("How far back the report looks.")]
    namespace: Annotated[str, _about("FENCEPOST_NAMESPACE.")]
    kafka: Annotated[str, _about("FENCEPOST_KAFKA: bootstrap servers.")]
    lake: Annotated[str, _about("--lake.")]
    topics: Annotated[list[Topic], _about("The audited topics.")]
    caught_up: Annotated[bool, _about("Whether everything committed has been read (false: --max-records).")]
    ids_pass: Annotated[bool, _about("Whether copies in other hours were looked for (false: --skip-ids).")]
    resumed: Annotated[bool, _about("Whether the run continued one that was cut off.")]
    finished_first: Annotated[
        int | None,
        _about("Number of a run that had been cut off with other options, and was finished by them before this one."),
    ]


class Balance(TypedDict):
    """accepted = delivered_once + duplicated + conflicted + lost + pending + stuck + unprovable."""

    accepted: Accepted
    delivered_once: DeliveredOnce
    duplicated: Annotated[int, _ids("Accepted ids with several records of one fingerprint")]
    conflicted: Annotated[int, _ids("Accepted ids with records of several fingerprints")]
    lost: Annotated[int, _ids("Accepted ids of which a promised record is proven not to be there")]
    pending: Pending
    stuck: Annotated[int, _ids("Ids answered 202 or 504 that never settled")]
    unprovable: Annotated[int, _ids("Accepted ids of which the evidence is gone")]
    phantom: Annotated[int, _ids("Ids with our header that nobody accepted")]
    records: Delivered


class TopicCounts(Balance):
    """The counts of one topic."""

    topic: Topic
    ids: Annotated[int, _ids("Ids that were delivered at least once")]
    copies_extra: Annotated[int, _records("Records beyond the first of their id")]
    open: Annotated[int, _ids("Ids whose verdict time alone may change")]
    unrequested: Annotated[int, _ids("Delivered ids of which neither ledger nor answers know")]
    unrequested_multiple: Annotated[int, _ids("Of those, ids with several records")]
    unkeyed: Annotated[int, _records("Records without any header of ours")]
    rejects: Undecoded
    answered_201: Annotated[int, _answers("Answers 201")]
    answered_202: Annotated[int, _answers("Answers 202")]
    answered_503: Annotated[int, _answers("Answers 503")]
    answered_504: Annotated[int, _answers("Answers 504")]
    answered_other: Annotated[int, _answers("Answers with another status")]
    replayed: Annotated[int, _answers("Answers that were replays")]


class Kinds(TypedDict):
    """How many findings there are of each kind."""

    duplicate: Annotated[int, _findings("duplicate")]
    conflict: Annotated[int, _findings("conflict")]
    client_duplicate: Annotated[int, _findings("client_duplicate")]
    derived_copy: Annotated[int, _findings("derived_copy")]
    lost: Annotated[int, _findings("lost")]
    phantom: Annotated[int, _findings("phantom")]
    unkeyed: Annotated[int, _findings("unkeyed")]
    stuck: Annotated[int, _findings("stuck")]
    evidence_gap: Annotated[int, _findings("evidence_gap")]


class CauseCounts(TypedDict):
    """The findings of one kind, topic and cause."""

    kind: Annotated[Kind, _about("Kind of finding.")]
    topic: Annotated[str | None, _about("Kafka topic.")]
    cause: Annotated[str | None, _about("Cause.")]
    findings: Annotated[int, _about("Findings whose own cause it is. Unit: findings.", ge=0)]
    records: Annotated[int, _records("Records concerned; of duplicates and conflicts the copies too many")]


class MapRow(TypedDict):
    """A row of the map: a partition, a topic, or what is folded."""

    topic: Annotated[str | None, _about("Kafka topic; null in the row that all other partitions share.")]
    partition: Annotated[
        PartitionOrNone, _about("Kafka partition; null where the row is a whole topic or has no place.")
    ]
    records: Annotated[
        list[Annotated[int, Meta(ge=0)]], _about("Delivered records by column, by hour of acceptance. Unit: records.")
    ]
    troubled: Annotated[
        list[Annotated[int, Meta(ge=0)]],
        _about("Records in trouble by column: copies too many, missing ones, unkeyed ones and so on. Unit: records."),
    ]


Map = TypedDict(
    "Map",
    {
        "from": Annotated[
            Annotated[str, _TIME] | None, _about("The first column's hour, RFC 3339, UTC; null for an empty map.")
        ],
        "hours_a_column": Annotated[int, _about("How many hours a column stands for. Unit: hours.", ge=1)],
        "columns": Annotated[int, _about("Number of columns.", ge=0)],
        "rows": Annotated[
            list[MapRow], _about("A partition each; where there are many, those with trouble and the busiest.")
        ],
        "partitions_folded": Annotated[int, _about("How many partitions share the last row. Unit: partitions.", ge=0)],
    },
)
"""Records and trouble by hour and partition, cut down to what can be shown."""


class TimelinePoint(TypedDict):
    """Copies too many of one hour, kind and cause."""

    hour: Annotated[Time, _about("The hour in which the copies were written, RFC 3339, UTC.")]
    kind: Annotated[CopyKind, _about("Kind of finding.")]
    cause: Annotated[str | None, _about("Cause of the copies.")]
    records: Annotated[int, _records("Copies too many")]


class Coordinate(TypedDict):
    """A record, or a place that was promised."""

    topic: Topic
    partition: Partition
    offset: Offset
    timestamp: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        _about("The record's Kafka timestamp; null for a place without a record. Unit: milliseconds since the epoch."),
    ]
    slot: Annotated[
        Annotated[int, Meta(ge=0)] | None, _about("Slot of the producer that wrote it; null without our header.")
    ]
    pid: Annotated[int | None, _about("Its producer id.")]
    epoch: Annotated[int | None, _about("Its producer epoch.")]
    instance: Annotated[str | None, _about("The process that wrote it.")]
    cause: Annotated[
        str | None,
        _about(
            "Why this copy is there: one of foreign_writer, rewrite, expired_key, producer_restart, dual_producer; "
            "for a lost place who promised it (ledger, answer); null for the first copy."
        ),
    ]


class Finding(TypedDict):
    """One finding."""

    finding_id: Annotated[
        str,
        _about(
            "Its name, the same in every run: kind:id, client_duplicate:fingerprint, or kind:cause:topic:partition for "
            "what is found of a partition. The key in the topic of findings."
        ),
    ]
    kind: Annotated[Kind, _about("What was found.")]
    cause: Annotated[
        str | None,
        _about(
            "Why; that of its first copy after the first. For lost and stuck: who promised it, or how it was answered."
        ),
    ]
    severity: Annotated[
        Severity,
        _about(
            "How bad its kind is: error (a promise that did not hold), warning (somebody has to look), information "
            "(only the client knows whether it is a fault)."
        ),
    ]
    id: Annotated[
        Annotated[str, Meta(pattern="^[0-9a-f]{32}$")] | None,
        _about("The event id, hexadecimal; null where the finding is about a partition."),
    ]
    fingerprint: Annotated[
        Annotated[str, Meta(pattern="^[0-9a-f]{16}$")] | None,
        _about("For client_duplicate: the fingerprint that the ids share, hexadecimal; else null."),
    ]
    key: Annotated[str | None, _about("The idempotency key, where a record has it; its first 255 characters.")]
    topic: Annotated[str | None, _about("Kafka topic, the first in the alphabet where there are several.")]
    partition: Annotated[PartitionOrNone, _about("Kafka partition, where the finding is about one.")]
    count: Annotated[int, _records("How many records it is about (offsets, for an evidence_gap of a log)")]
    first_offset: Annotated[OffsetOrNone, _about("The lowest offset, where the finding is about a partition.")]
    last_offset: Annotated[OffsetOrNone, _about("The highest offset, where the finding is about a partition.")]
    coordinates: Annotated[
        list[Coordinate],
        _about("Its copies in the order in which they count (at most 128 of them), or the promised places."),
    ]


class HeldUp(TypedDict):
    """A partition that an open transaction holds up."""

    role: Annotated[Role, _about("What the topic is.")]
    topic: Topic
    partition: Partition
    offset: Annotated[int, _about("The last stable offset: all below is decided.", ge=0)]
    high_watermark: Annotated[int, _about("Where the log ends. Unit: offset.", ge=0)]
    transactional_id: Annotated[str | None, _about("Whose transaction it is, where the broker tells.")]
    producer_id: Annotated[int | None, _about("Its producer id, where the broker tells.")]
    epoch: Annotated[int | None, _about("The producer's epoch.")]
    open_since: Annotated[
        Annotated[str, _TIME] | None,
        _about("When the transaction began, or else the timestamp of the first record that is not decided."),
    ]
    age_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        _about("How long it had been open when the ends were frozen. Unit: seconds."),
    ]


class Gap(TypedDict):
    """Offsets that went away before they were read."""

    topic: Topic
    partition: Partition
    first: Annotated[int, _about("First offset.", ge=0)]
    last: Annotated[int, _about("The offset after the last one.", ge=0)]
    cause: Annotated[GapCause, _about("Why.")]


LogRead = TypedDict(
    "LogRead",
    {
        "role": Annotated[Role, _about("What the topic is.")],
        "topic": Topic,
        "partition": Partition,
        "from": Annotated[int, _about("First offset that this run read.", ge=0)],
        "to": Annotated[int, _about("The offset after the last one.", ge=0)],
        "last_stable": Annotated[int, _about("Last stable offset.", ge=0)],
        "high_watermark": Annotated[int, _about("High watermark. Unit: offset.", ge=0)],
    },
)
"""How far a log was read."""


class Evidence(TypedDict):
    """What the verdict rests on."""

    held_up: Annotated[list[HeldUp], _about("Partitions held up by an open transaction.")]
    rejects: Undecoded
    gaps: Annotated[list[Gap], _about("What went away before it was read.")]
    logs: Annotated[list[LogRead], _about("How far each log was read.")]


class Change(TypedDict):
    """Verdicts that changed in one way."""

    before: Annotated[Category, _about("What was said.")]
    after: Annotated[Category | None, _about("What was said then; null for nothing any more.")]
    ids: Annotated[int, _ids("How many of them there were")]


class Revisions(TypedDict):
    """What was said of ids before, and is not said any more. All runs are in the lake's table `verdicts`."""

    revised: Annotated[int, _ids("Verdicts that had been said for good, not as pending")]
    changes: Annotated[list[Change], _about("The changes by kind.")]


Requests = TypedDict(
    "Requests",
    {
        "201": Annotated[int, _answers("Answers 201")],
        "202": Annotated[int, _answers("Answers 202")],
        "503": Annotated[int, _answers("Answers 503")],
        "504": Annotated[int, _answers("Answers 504")],
        "other": Annotated[int, _answers("Answers with another status")],
        "replayed": Annotated[int, _answers("Answers that were replays")],
    },
)
"""Answers of the window by status."""


class Cost(TypedDict):
    """What the run took."""

    seconds: Annotated[
        dict[str, Annotated[float, Meta(ge=0)]], _about("Time by step, up to the report. Unit: seconds.")
    ]
    offsets: OffsetsRead


class PastRun(TypedDict):
    """A run in one line."""

    number: Annotated[int, _about("Number of the run.", ge=1)]
    frozen_at: FrozenAt
    verdict: Annotated[Verdict, _about("Its verdict.")]
    findings: Annotated[int, _about("Findings that stood. Unit: findings.", ge=0)]
    accepted: Accepted
    delivered_once: DeliveredOnce
    pending: Pending
    records: Delivered
    offsets: OffsetsRead
    seconds: Annotated[float, _about("Time up to its report. Unit: seconds.", ge=0)]


class Document(TypedDict):
    """What one run of the audit found."""

    run: Annotated[Run, _about("The run and its verdict.")]
    balance: Annotated[Balance, _about("The closed balance of the window.")]
    topics: Annotated[list[TopicCounts], _about("Counts of the window by topic.")]
    kinds: Annotated[Kinds, _about("Findings by kind.")]
    causes: Annotated[list[CauseCounts], _about("Findings by kind, topic and cause.")]
    map: Annotated[Map, _about("Records and trouble by hour and partition, cut down to what can be shown.")]
    timeline: Annotated[list[TimelinePoint], _about("Copies too many over time.")]
    findings: Annotated[
        list[Finding], _about("The findings, in an order that does not depend on the run; at most 100,000.")
    ]
    findings_left_out: Annotated[int, _about("Findings that are only in the lake. Unit: findings.", ge=0)]
    evidence: Annotated[Evidence, _about("What the verdict rests on.")]
    verdicts: Annotated[Revisions, _about("What was said of ids before, and is not said any more.")]
    requests: Annotated[Requests, _about("Answers of the window by status.")]
    cost: Annotated[Cost, _about("What the run took.")]
    history: Annotated[list[PastRun], _about("This run and those before it, the last one first; at most 20.")]


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of report.json. Objects take no other fields than those named."""
    made = msgspec.json.schema(Document)
    for definition in made["$defs"].values():
        if "properties" in definition:
            definition["additionalProperties"] = False
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        "title": "Fencepost audit report",
        **made,
    }
