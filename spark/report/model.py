"""The types of report.json; `schema()` generates the JSON Schema from these types.

Each count has a unit in its description. Times are RFC 3339 in UTC, to the millisecond.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, TypedDict

import msgspec
from msgspec import Meta

from spark.rules import kinds

SCHEMA_ID: Final = "urn:fencepost:report:1"

Verdict = Literal["clean", "findings"]
Role = Literal["data", "ledger", "requests"]
Severity = kinds.Severity
Category = Literal[
    "pending", "lost", "duplicated", "conflicted", "delivered_once", "stuck", "unprovable", "phantom", "evidence_gap"
]
GapCause = Literal["retention", "truncated", "recreated"]
SilenceState = Literal["active", "expired", "unmatched"]


def _about(text: str, **limits: Any) -> Meta:
    return Meta(description=text, **limits)


def _ids(what: str) -> Meta:
    return Meta(ge=0, description=f"{what}. Unit: ids.")


def _records(what: str) -> Meta:
    return Meta(ge=0, description=f"{what}. Unit: records.")


def _answers(what: str) -> Meta:
    return Meta(ge=0, description=f"{what}. Unit: answers.")


def _one_of(names: Iterable[str]) -> Meta:
    return Meta(extra_json_schema={"enum": list(names)})


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
_SEVERITIES: Final = ", ".join(f"{name} ({meaning})" for name, meaning in kinds.SEVERITIES.items())
Kind = Annotated[str, _one_of(kinds.KINDS)]
CopyKind = Annotated[str, _one_of(kinds.with_surplus())]

_KIND_COUNTS: Final = {
    name: {"type": "integer", "minimum": 0, "description": f"Findings of kind {name}. Unit: findings."}
    for name in kinds.KINDS
}
Kinds = Annotated[
    dict[str, int],
    Meta(extra_json_schema={"properties": _KIND_COUNTS, "required": list(_KIND_COUNTS)}),
]


class Run(TypedDict):
    """The run and its verdict."""

    number: Annotated[int, _about("Number of the run on this lake, from 1.", ge=1)]
    verdict: Annotated[Verdict, _about("clean: there is no finding, or all of them are silenced.")]
    findings: Annotated[int, _about("All current findings in the window that are not silenced. Unit: findings.", ge=0)]
    failing: Annotated[
        int, _about("Those of the kinds in fail_on: the exit status is 3 if there are any. Unit: findings.", ge=0)
    ]
    fail_on: Annotated[list[Kind], _about("The kinds of --fail-on; all without that option.")]
    frozen_at: FrozenAt
    window_from: Annotated[Time, _about("Start of the report's window.")]
    namespace: Annotated[str, _about("FENCEPOST_NAMESPACE.")]
    kafka: Annotated[str, _about("FENCEPOST_KAFKA: bootstrap servers.")]
    lake: Annotated[str, _about("--lake.")]
    topics: Annotated[list[Topic], _about("The audited topics.")]
    caught_up: Annotated[bool, _about("Whether all committed records were read (false: --max-records).")]
    ids_pass: Annotated[
        bool, _about("Whether the pass over all ids was made, which finds copies in other hours (false: --skip-ids).")
    ]
    resumed: Annotated[bool, _about("Whether the run resumed an interrupted run.")]
    finished_first: Annotated[
        int | None,
        _about("Number of an interrupted run with other options that was finished first, with its own options."),
    ]
    recounted: Annotated[
        bool,
        _about("Whether the balance did not close, and all hours were counted again: a fault of the audit."),
    ]


class Balance(TypedDict):
    """accepted = delivered_once + duplicated + conflicted + lost + pending + stuck + unprovable."""

    accepted: Accepted
    delivered_once: DeliveredOnce
    duplicated: Annotated[int, _ids("Accepted ids with several records of one fingerprint")]
    conflicted: Annotated[int, _ids("Accepted ids with records of several fingerprints")]
    lost: Annotated[int, _ids("Accepted ids with a claimed record that is proven to be missing")]
    pending: Pending
    stuck: Annotated[int, _ids("Ids answered 202 or 504 that never settled")]
    unprovable: Annotated[int, _ids("Accepted ids without evidence any more")]
    phantom: Annotated[int, _ids("Ids with Fencepost's header that were never accepted")]
    records: Delivered


class TopicCounts(Balance):
    """The counts of one topic."""

    topic: Topic
    ids: Annotated[int, _ids("Ids that were delivered at least once")]
    copies_extra: Annotated[int, _records("Records beyond the first of their id")]
    open: Annotated[int, _ids("Ids whose verdict may change by time alone")]
    unrequested: Annotated[int, _ids("Delivered ids that neither ledger nor answers name")]
    unrequested_multiple: Annotated[int, _ids("Of those, ids with several records")]
    unkeyed: Annotated[int, _records("Records without either header of Fencepost")]
    rejects: Undecoded
    answered_201: Annotated[int, _answers("Answers 201")]
    answered_202: Annotated[int, _answers("Answers 202")]
    answered_503: Annotated[int, _answers("Answers 503")]
    answered_504: Annotated[int, _answers("Answers 504")]
    answered_other: Annotated[int, _answers("Answers with another status")]
    replayed: Annotated[int, _answers("Answers that were replays")]


class CauseCounts(TypedDict):
    """The findings of one kind, topic and cause, without those that are silenced."""

    kind: Annotated[Kind, _about("Kind of finding.")]
    topic: Annotated[str | None, _about("Kafka topic.")]
    cause: Annotated[str | None, _about("Cause.")]
    findings: Annotated[int, _about("Findings with this cause. Unit: findings.", ge=0)]
    records: Annotated[int, _records("Records of these findings; for duplicates and conflicts the surplus copies")]


class MapRow(TypedDict):
    """A row of the map: a partition, a topic, or all folded partitions."""

    topic: Annotated[str | None, _about("Kafka topic; null in the row of all folded partitions.")]
    partition: Annotated[
        PartitionOrNone,
        _about("Kafka partition; null for a whole topic, for findings without a partition, and for folded partitions."),
    ]
    records: Annotated[
        list[Annotated[int, Meta(ge=0)]], _about("Delivered records by column, by hour of acceptance. Unit: records.")
    ]
    troubled: Annotated[
        list[Annotated[int, Meta(ge=0)]],
        _about(
            "Records of findings by column: surplus copies, missing records, unkeyed records and so on. Unit: records."
        ),
    ]


Map = TypedDict(
    "Map",
    {
        "from": Annotated[
            Annotated[str, _TIME] | None,
            _about("The first hour of the first column, RFC 3339, UTC; null for an empty map."),
        ],
        "hours_a_column": Annotated[int, _about("Hours in a column. Unit: hours.", ge=1)],
        "columns": Annotated[int, _about("Number of columns.", ge=0)],
        "rows": Annotated[
            list[MapRow],
            _about("One row for each partition; of many partitions, those with the most findings and records."),
        ],
        "partitions_folded": Annotated[int, _about("Partitions folded into the last row. Unit: partitions.", ge=0)],
    },
)
"""Records and findings by hour and partition, reduced to the size of a page."""


class TimelinePoint(TypedDict):
    """Surplus copies of one hour, kind and cause."""

    hour: Annotated[Time, _about("The hour in which the copies were written, RFC 3339, UTC.")]
    kind: Annotated[CopyKind, _about("Kind of finding.")]
    cause: Annotated[str | None, _about("Cause of the copies.")]
    records: Annotated[int, _records("Surplus copies")]


class InstanceCounts(TypedDict):
    """The surplus copies that one process wrote."""

    instance: Annotated[str, _about("Process of the copies' producer.")]
    copies: Annotated[int, _records("Copies of duplicates and conflicts after the first")]


class Coordinate(TypedDict):
    """The coordinates of a record, or of a claim without a record."""

    topic: Topic
    partition: Partition
    offset: Offset
    timestamp: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        _about("The record's Kafka timestamp; null for a claim without a record. Unit: milliseconds since the epoch."),
    ]
    slot: Annotated[
        Annotated[int, Meta(ge=0)] | None, _about("Slot of the record's producer; null without Fencepost's header.")
    ]
    pid: Annotated[int | None, _about("Producer id of the record's producer.")]
    epoch: Annotated[int | None, _about("Producer epoch of the record's producer.")]
    instance: Annotated[str | None, _about("Process of the record's producer.")]
    cause: Annotated[
        str | None,
        _about(
            "Cause of this copy: one of foreign_writer, rewrite, expired_key, producer_restart, dual_producer; "
            "for a lost record the source of the claim (ledger, answer); null for the first copy."
        ),
    ]


class SinkCoordinate(TypedDict):
    """The coordinates of a record in a mirror."""

    topic: Topic
    partition: Partition
    offset: Offset
    timestamp: Annotated[int, _about("The record's Kafka timestamp there. Unit: milliseconds since the epoch.")]


class Silenced(TypedDict):
    """Why a finding does not count."""

    until: Annotated[
        Annotated[str, _TIME] | None, _about("When the silence ends; null: by the rule of the finding's topic.")
    ]
    reason: Annotated[str, _about("Why the finding need not be acted on.")]


class SilenceUse(TypedDict):
    """A silence of the file of --silences, and what it did in this run."""

    until: Annotated[Time, _about("When the silence ends.")]
    reason: Annotated[str, _about("Why the finding need not be acted on.")]
    finding: Annotated[str, _about("The finding_id, or a glob of several.")]
    state: Annotated[
        SilenceState,
        _about("active: of current findings; expired: ended before the ends were frozen; unmatched: of no finding."),
    ]
    findings: Annotated[int, _about("Findings that it silences. Unit: findings.", ge=0)]


class Finding(TypedDict):
    """One finding."""

    finding_id: Annotated[
        str,
        _about(
            "Id of the finding, the same in every run: kind:id, client_duplicate:fingerprint, "
            "kind:cause:topic:partition for a finding about a partition, or kind:sink:id (kind:sink:topic:partition "
            "for coordinates that no event has, kind:sink for a sink that could not be read). The key in the topic of "
            "findings."
        ),
    ]
    kind: Annotated[Kind, _about("Kind of finding.")]
    cause: Annotated[
        str | None,
        _about(
            "Cause of the second copy. For lost: the source of the claim; for stuck: the status of the answer; for "
            "twice_in_sink: repeated (more rows than records in Kafka) or copied (as many); for late_in_sink: arrived "
            "(by the column for the arrival) or was_missing (an earlier run had found the event missing)."
        ),
    ]
    severity: Annotated[
        Severity,
        _about(f"Severity of the kind: {_SEVERITIES}."),
    ]
    id: Annotated[
        Annotated[str, Meta(pattern="^[0-9a-f]{32}$")] | None,
        _about("The event id, hexadecimal; null for a finding about a partition."),
    ]
    fingerprint: Annotated[
        Annotated[str, Meta(pattern="^[0-9a-f]{16}$")] | None,
        _about("For client_duplicate: the common fingerprint of the ids, hexadecimal; else null."),
    ]
    key: Annotated[str | None, _about("The idempotency key, if a record has one; at most 255 characters.")]
    topic: Annotated[str | None, _about("Kafka topic; of several the first in alphabetical order.")]
    partition: Annotated[PartitionOrNone, _about("Kafka partition, for a finding about a partition.")]
    count: Annotated[
        int, _records("Records of the finding (for an evidence_gap of a log: offsets; for a sink: rows, or events)")
    ]
    first_offset: Annotated[OffsetOrNone, _about("The lowest offset, for a finding about a partition.")]
    last_offset: Annotated[OffsetOrNone, _about("The highest offset, for a finding about a partition.")]
    coordinates: Annotated[
        list[Coordinate],
        _about("The copies in their order (at most 128), or the claims without a record."),
    ]
    silenced: Annotated[Silenced | None, _about("The silence of the finding; null: it counts.")]
    sink: Annotated[str | None, _about("Name of the sink, for a finding about a sink.")]
    sink_ms: Annotated[
        int | None,
        _about(
            "For late_in_sink: when the first row arrived, if the sink tells; for missing_in_sink: when the ends of "
            "the run were frozen that found the event missing. Unit: milliseconds since the epoch."
        ),
    ]
    sink_coordinates: Annotated[
        list[SinkCoordinate], _about("The event's records in a mirror, at most 128; empty for other sinks.")
    ]


class HeldUp(TypedDict):
    """A partition that is blocked by an open transaction."""

    role: Annotated[Role, _about("Role of the topic.")]
    topic: Topic
    partition: Partition
    offset: Annotated[int, _about("The last stable offset: all offsets below are decided.", ge=0)]
    high_watermark: Annotated[int, _about("High watermark of the log. Unit: offset.", ge=0)]
    transactional_id: Annotated[str | None, _about("Transactional id of the transaction, if the broker reports one.")]
    producer_id: Annotated[int | None, _about("Producer id of the transaction, if the broker reports one.")]
    epoch: Annotated[int | None, _about("The producer's epoch.")]
    open_since: Annotated[
        Annotated[str, _TIME] | None,
        _about("Start of the transaction, or else the timestamp of the first undecided record."),
    ]
    age_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        _about("Age of the transaction when the ends were frozen. Unit: seconds."),
    ]


class Gap(TypedDict):
    """Offsets whose records are gone: deleted before they were read, or read and truncated since.

    For the cause `recreated` the offset up to which the earlier topic was read, and no record.
    """

    topic: Topic
    partition: Partition
    first: Annotated[int, _about("First offset.", ge=0)]
    last: Annotated[int, _about("The offset after the last one.", ge=0)]
    cause: Annotated[GapCause, _about("Cause of the gap.")]


LogRead = TypedDict(
    "LogRead",
    {
        "role": Annotated[Role, _about("Role of the topic.")],
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
    """The evidence for the verdict."""

    held_up: Annotated[list[HeldUp], _about("Partitions blocked by an open transaction.")]
    rejects: Undecoded
    gaps: Annotated[list[Gap], _about("Offsets whose records are gone: deleted unread, or truncated.")]
    logs: Annotated[list[LogRead], _about("How far each log was read.")]


class Change(TypedDict):
    """Verdicts that changed in one way."""

    before: Annotated[Category, _about("Verdict before.")]
    after: Annotated[Category | None, _about("Verdict now; null if the id has no verdict any more.")]
    ids: Annotated[int, _ids("Ids with this change")]


class Revisions(TypedDict):
    """Verdicts that differ from those of earlier runs. All changes are in the lake's table `verdicts`."""

    revised: Annotated[int, _ids("Changed verdicts that were not pending before")]
    changes: Annotated[list[Change], _about("Changes by verdict before and now.")]


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
    """The cost of the run."""

    seconds: Annotated[
        dict[str, Annotated[float, Meta(ge=0)]],
        _about("Time by step, and between the steps, from the start of Spark up to the report. Unit: seconds."),
    ]
    offsets: OffsetsRead


class PastRun(TypedDict):
    """A run in one line."""

    number: Annotated[int, _about("Number of the run.", ge=1)]
    frozen_at: FrozenAt
    verdict: Annotated[Verdict, _about("Verdict of the run.")]
    findings: Annotated[int, _about("Current findings of that run. Unit: findings.", ge=0)]
    accepted: Accepted
    delivered_once: DeliveredOnce
    pending: Pending
    records: Delivered
    offsets: OffsetsRead
    seconds: Annotated[float, _about("Time up to the report. Unit: seconds.", ge=0)]


class WebhookDelivery(TypedDict):
    """What the run has sent to the webhook."""

    findings: Annotated[int, _about("Findings that were to be sent. Unit: findings.", ge=0)]
    error: Annotated[
        str | None, _about("Why they could not be delivered: the next run sends them again; null: delivered.")
    ]


SINK_COUNTS: Final = ("expected", "present_once", "missing", "twice", "late", "pending", "unprovable", "extra")
"""The names of the counts of ids in a Sink."""


class Sink(TypedDict):
    """A sink: expected = present_once + missing + twice + late + pending + unprovable."""

    name: Annotated[str, _about("Name of the sink in the rules.")]
    format: Annotated[str, _about("Format of the sink: delta, parquet, jdbc or iceberg; kafka for a mirror.")]
    expected: Annotated[int, _ids("Ids of the window with a record that a consumer could read")]
    present_once: Annotated[int, _ids("Expected ids with one row that was not late")]
    missing: Annotated[int, _ids("Expected ids without a row, whose time to arrive is over")]
    twice: Annotated[int, _ids("Expected ids with several rows")]
    late: Annotated[int, _ids("Expected ids whose row arrived when that time was over")]
    pending: Annotated[int, _ids("Expected ids without a row that may still arrive")]
    unprovable: Annotated[int, _ids("Expected ids without a record in a mirror that may have deleted it unread")]
    extra: Annotated[int, _ids("Ids with rows that were never delivered, in an exclusive sink")]
    unidentified: Annotated[int, _about("Rows that name no event. Unit: rows.", ge=0)]
    judged_until: Annotated[
        Annotated[str, _TIME] | None,
        _about("The sink's watermark: every event that was accepted before is judged; null if none is."),
    ]
    read_at: Annotated[
        Annotated[str, _TIME] | None,
        _about("When the ends were frozen of the last run that has read the sink; null if none has."),
    ]
    unreadable: Annotated[
        str | None,
        _about("Why this run could not read the sink: its counts are those of the last run that could; else null."),
    ]
    awaits_topics: Annotated[
        bool,
        _about("Whether nothing was delivered for the sink yet: no run has audited a topic that its rule names."),
    ]


class Document(TypedDict):
    """The report of one run of the audit."""

    run: Annotated[Run, _about("The run and its verdict.")]
    balance: Annotated[Balance, _about("The closed balance of the window.")]
    topics: Annotated[list[TopicCounts], _about("Counts of the window by topic.")]
    kinds: Annotated[Kinds, _about("Findings by kind, without those that are silenced.")]
    silenced: Annotated[Kinds, _about("Silenced findings by kind.")]
    silences: Annotated[list[SilenceUse], _about("The silences of --silences, in the order of the file.")]
    causes: Annotated[list[CauseCounts], _about("Findings by kind, topic and cause, without those that are silenced.")]
    map: Annotated[Map, _about("Records and findings by hour and partition, reduced to the size of a page.")]
    timeline: Annotated[list[TimelinePoint], _about("Surplus copies over time.")]
    instances: Annotated[
        list[InstanceCounts],
        _about("Surplus copies in `findings` by the process that wrote them, the most first; at most 100."),
    ]
    findings: Annotated[
        list[Finding], _about("The findings, in an order that does not depend on the run; at most 100,000.")
    ]
    findings_left_out: Annotated[
        int, _about("Findings that are only in the lake, not in this report. Unit: findings.", ge=0)
    ]
    sinks: Annotated[list[Sink], _about("The sinks of the rules, compared with what was delivered.")]
    evidence: Annotated[Evidence, _about("The evidence for the verdict.")]
    verdicts: Annotated[Revisions, _about("Verdicts that differ from those of earlier runs.")]
    requests: Annotated[Requests, _about("Answers of the window by status.")]
    webhook: Annotated[WebhookDelivery | None, _about("The delivery to --webhook; null: nothing was to be sent.")]
    cost: Annotated[Cost, _about("The cost of the run.")]
    history: Annotated[list[PastRun], _about("This run and earlier runs, newest first; at most 20.")]


def schema() -> dict[str, Any]:
    """Generate the JSON Schema (2020-12) of report.json. Objects have no additional fields."""
    generated = msgspec.json.schema(Document)
    for definition in generated["$defs"].values():
        # Kinds is a dict for msgspec, whose schema allows additional fields.
        for described in (definition, *definition.get("properties", {}).values()):
            if "properties" in described:
                described["additionalProperties"] = False
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        "title": "Fencepost audit report",
        **generated,
    }
