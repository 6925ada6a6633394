"""The columns of the tables of a lake, their partitions, and which tables a run writes after its merge."""

from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import StructType

from spark.engine import frames
from spark.tables import deliveries

COORDINATES: Final = (
    "array<struct<topic: string, partition: int, offset: bigint, timestamp: bigint, slot: int, pid: bigint, "
    "epoch: int, instance: string, cause: string>>"
)

FINDING: Final = {
    "scope": "string",
    "accepted_hour": "timestamp",
    "kind": "string",
    "cause": "string",
    "id": "binary",
    "key": "string",
    "topic": "string",
    "partition": "int",
    "count": "bigint",
    "first_offset": "bigint",
    "last_offset": "bigint",
    "last_ms": "bigint",
    "coordinates": COORDINATES,
    "fingerprint": "binary",
    "run": "bigint",
    "late_ms": "bigint",
}
"""The columns of a finding. `scope`: `hour` (from one hour), `ids` (from all hours), `log` (from the logs themselves).
`run` is the run that made the finding, null in lakes of an earlier version. `late_ms` is when the finding was decided,
if its hour had left the report's window before; else null.

In the scope `ids` a row without kind revokes the findings about this id in the scope `hour`.
"""

PROGRESS: Final = {
    "run": "bigint",
    "frozen_ms": "bigint",
    "role": "string",
    "topic": "string",
    "partition": "int",
    "topic_id": "string",
    "audited": "boolean",
    "compacted": "boolean",
    "recreated_at_ms": "bigint",
    "first": "bigint",
    "start": "bigint",
    "end": "bigint",
    "last_stable": "bigint",
    "high_watermark": "bigint",
    "complete_since_ms": "bigint",
    "decided_until_ms": "bigint",
    "gaps": "array<struct<first: bigint, last: bigint, cause: string, seen_ms: bigint>>",
    "blocking_transaction": (
        "struct<producer_id: bigint, epoch: int, start_offset: bigint, transactional_id: string, since_ms: bigint>"
    ),
    "options": "string",
    "guarantees": "array<struct<first: bigint, guarantee: string>>",
    "later_end": "bigint",
    "caught_up_run": "bigint",
    "behind_run": "bigint",
    "behind_end": "bigint",
    "first_record_ms": "bigint",
    "leader_epoch": "int",
    "skip_ids": "boolean",
    "keep_days": "int",
}

PUBLISHED: Final = {"finding_id": "string", "value": "string", "sent": "boolean"}
"""The value of a finding in the topic of findings, or, if not `sent`, the value to be sent; null for a tombstone."""

RUN: Final = {
    "run": "bigint",
    "frozen_ms": "bigint",
    "verdict": "string",
    "summary": "string",
    "report": "string",
    "counted_run": "bigint",
}
"""The columns of a finished run. `counted_run`: the run that wrote the rows of HOURLY_BALANCE and HOURLY_RECORDS that
were right for this one; null for runs of an earlier version, before the last one."""

HOURLY_COUNTS: Final = (
    *("ids", "records", "copies_extra", "accepted"),
    *("delivered_once", "duplicated", "conflicted", "lost", "pending", "stuck", "unprovable"),
    *("phantom", "open", "unrequested", "unrequested_multiple", "unkeyed", "rejects"),
    *("answered_201", "answered_202", "answered_503", "answered_504", "answered_other", "replayed"),
)
"""The counts of an hour and topic (findings.SUMS)."""

HOURLY_BALANCE: Final = {
    "run": "bigint",
    "accepted_hour": "timestamp",
    "topic": "string",
    "is_adjustment": "boolean",
    **dict.fromkeys(HOURLY_COUNTS, "bigint"),
}
"""The balance by hour and topic. The rows with `is_adjustment` are added to the others, so that an id with rows in
several hours counts once."""

HOURLY_RECORDS: Final = {
    "run": "bigint",
    "accepted_hour": "timestamp",
    "topic": "string",
    "partition": "int",
    "records": "bigint",
}
"""Records by hour of acceptance, topic and partition; `partition` is null for the records of all partitions."""

VERDICT: Final = {
    "run": "bigint",
    "frozen_ms": "bigint",
    "accepted_hour": "timestamp",
    "id": "binary",
    "key": "string",
    "topic": "string",
    "verdict": "string",
    "before": "string",
    "last_ms": "bigint",
}
"""The columns of a changed verdict. An id that was always `delivered_once` has no row.

`verdict` is a category of the balance. For an id that was not accepted it is `phantom`, `pending` until that can be
decided, or `evidence_gap` if it cannot. It is null if the id has no verdict any more. `before` is the verdict until
then, null for the first verdict.
"""

REJECT: Final = {
    "run": "bigint",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "count": "bigint",
    "seen_ms": "bigint",
    "reason": "string",
    "content": "binary",
}
"""The columns of an undecoded record, or of `count` undecoded parts of a record.

`content` has the first decode.CONTENT_MAX bytes.
"""

SINK: Final = {
    "sink": "string",
    **FINDING,
    "sink_ms": "bigint",
    "events": "bigint",
    "read_ms": "bigint",
    "is_closed": "boolean",
    "definition": "string",
    "released": "string",
    "expected": "bigint",
    "present_once": "bigint",
    "missing_in_sink": "bigint",
    "twice_in_sink": "bigint",
    "late_in_sink": "bigint",
    "pending": "bigint",
    "extra_in_sink": "bigint",
    "unidentified": "bigint",
    "unprovable": "bigint",
    "sink_coordinates": "array<struct<topic: string, partition: int, offset: bigint, timestamp: bigint>>",
}
"""The columns of a row about a sink: a finding (with `kind`), the counts of an hour (without), or, without an hour, the
sink's own row.

`sink_ms` is when the row of a late event arrived, or when the run froze that found an event missing; `events` the
number of events of a finding. `read_ms` is when the run froze that compared the hour, in the sink's own row the last
run that has read the sink, as is `run`; `last_ms` is there until when that run knew each event of the sink's topics.
`is_closed`: no verdict of the hour may change. `definition`: the rule of the sink then, and what else verdicts depend
on, as digests. `released`: what open transactions hid from consumers (sink_verdicts.Released), as JSON.
`sink_coordinates`: the records of a finding's event in a mirror.
"""

MIRRORED: Final = {
    "sink": "string",
    "run": "bigint",
    "accepted_hour": "timestamp",
    "id": "binary",
    "event_ms": "bigint",
    "arrived_ms": "bigint",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp_ms": "bigint",
    "topic_id": "string",
    "logs": "string",
}
"""The columns of a record that was read from a mirror by a run, or, without an hour, the mirror's own row.

`id` is null without Fencepost's header. `event_ms` is the acceptance in that header, else the timestamp; `arrived_ms`
the timestamp, if it is that of the mirror's broker. `logs`: what is known of each log (mirror_logs.MirrorLog), as JSON.
"""

REPAIR: Final = {
    "plan": "bigint",
    "made_ms": "bigint",
    "run": "bigint",
    "options": "string",
    "state": "string",
    "source": "string",
    "target": "string",
    "layout": "string",
    "entries": "bigint",
    "written": "bigint",
    "ended_ms": "bigint",
}
"""The columns of a plan of the command `repair`. `run` is the last finished run, whose findings the plan is about.

`state`: `planned` (nothing was sent), `executing` (an attempt has begun), `done`. `source` is the topic of --clean,
`target` that of --into. `layout` (JSON, repair.layouts) has the ids of the topics, the spans that are copied, where
they begin in the target, and how far the sources were read.
"""

REPAIR_ENTRY: Final = {
    "plan": "bigint",
    "finding_id": "string",
    "kind": "string",
    "sink": "string",
    "id": "string",
    "key": "string",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "accepted_ms": "bigint",
    "action": "string",
    "reason": "string",
    "sent_key": "string",
    "first_sent_ms": "bigint",
    "outcome": "string",
    "detail": "string",
    "written_topic": "string",
    "written_partition": "int",
    "written_offset": "bigint",
    "ended_ms": "bigint",
}
"""The columns of an entry of a plan: a lost event, an event that a sink lacks, or a copy that `--clean` leaves out."""

TABLES: Final[Mapping[str, Mapping[str, str]]] = {
    "deliveries": deliveries.ROW,
    "findings": FINDING,
    "progress": PROGRESS,
    "published": PUBLISHED,
    "runs": RUN,
    "hourly_balance": HOURLY_BALANCE,
    "hourly_records": HOURLY_RECORDS,
    "rejects": REJECT,
    "repairs": REPAIR,
    "repair_entries": REPAIR_ENTRY,
    "sinks": SINK,
    "mirrored": MIRRORED,
    "verdicts": VERDICT,
}
WRITTEN_AFTER_MERGE: Final = (
    *("rejects", "findings", "verdicts", "mirrored", "sinks"),
    *("hourly_balance", "hourly_records", "runs"),
)
"""The tables that a run writes after it has merged its records into `deliveries`, besides views and `published`."""

COMPACTED: Final = (
    *("findings", "mirrored", "progress", "published", "rejects", "repairs", "repair_entries", "sinks", "verdicts"),
)
"""The tables that are compacted as a whole. Of `runs` only the newest rows are read, by their files' statistics."""

PARTITIONS: Final = {
    "deliveries": ("accepted_hour", "is_clean"),
    "hourly_balance": ("run",),
    "hourly_records": ("run",),
}
"""The few rows of an hour that are not clean lie in a partition of their own, since only they are read in full. The
hourly sums of a run replace those of runs before the last, whose files need not be read for that."""

STATISTICS_OF: Final = {"deliveries": "run"}
"""Delta collects file statistics (for data skipping) of these columns only."""


def of(name: str) -> StructType:
    """Return the schema of a table."""
    struct = StructType.fromDDL(frames.ddl(TABLES[name]))
    assert isinstance(struct, StructType)
    return struct
