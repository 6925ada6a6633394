"""The rows of the table `deliveries`: one row for each offset that has a record of an id, or that a claim names.

ROW is the schema of the table. An event that was delivered once has one row, which joins the record, its ledger entry
and its answers; the row has no lists, so that reducing, merging and classifying are cheap. Only if an id has several
rows, or one that is not clean, these are `gathered` into one row with lists (GATHERED).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from service.contract.wire.ids import FINGERPRINT_BYTES
from spark import rule_table
from spark.reading import wire_expressions
from spark.reading.decode import ENTERED, EVENT, REJECT, REJECTED, hash_of
from spark.reading.run_plan import by_partition
from spark.settings import HOUR_MS

# Enough to analyse a finding; an id with more copies was put on every record by a broken writer.
COORDINATES_MAX: Final = 128
FINGERPRINTS_MAX: Final = 16

ROW: Final = {
    "accepted_hour": "timestamp",
    "is_clean": "tinyint",
    "kind": "string",
    "id": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "run": "bigint",
    "accepted_ms": "bigint",
    "last_ms": "bigint",
    "count": "bigint",
    "entries_count": "bigint",
    "answered_201": "bigint",
    "answered_202": "bigint",
    "answered_503": "bigint",
    "answered_504": "bigint",
    "answered_other": "bigint",
    "replayed": "bigint",
    "entry_seen_ms": "bigint",
    "answer_seen_ms": "bigint",
    "in_doubt_ms": "bigint",
    "freed_ms": "bigint",
    "timestamp_ms": "bigint",
    "record_accepted_ms": "bigint",
    "fingerprint": "binary",
    "alternative_fingerprints": "binary",
    "slot": "int",
    "pid": "bigint",
    "epoch": "int",
    "instance": "string",
    "has_fencepost_header": "boolean",
    "has_record_key": "boolean",
    "record_key_hash": "bigint",
    "key": "string",
    "batch_hash": "bigint",
    "topic_id_hash": "bigint",
    "reject": REJECTED,
    "was_past_end": "boolean",
    "elsewhere": "boolean",
    "proven_lost": "boolean",
    "record_topic_id_hash": "bigint",
    "key_ttl_s": "bigint",
}
"""Name and type of each column of `deliveries`, in order.

`is_clean` is 1 if the row needs no analysis (unless the id has another row): it has the record and one ledger entry,
or the record and a 201 that names the record, or a record without fencepost header and without claims. Nearly all rows
are clean, and of clean rows only counts are read again. Partition and offset are null for answers without an offset
(a 504).
`accepted_ms` is the earliest acceptance, `last_ms` the time of the last known evidence.
`count` is 1 if the offset has a record, 0 if the offset is only claimed, more for rejected parts of one record.
`entry_seen_ms` and `answer_seen_ms` are when ledger and journal first named the offset, `in_doubt_ms` when the last
202 or 504 was journaled, `freed_ms` when the last 503 was, null if a 202 or 504 follows that 503.
`timestamp_ms`, `record_accepted_ms` and the columns after them are those of the record; `record_key_hash` is a hash of
its record key, `batch_hash` of the id of its atomic batch, `topic_id_hash` of its topic's id, both by the ledger entry;
`record_topic_id_hash` is the same hash of the id of the topic from which the record was read. `key_ttl_s` is the
retention of the key by the ledger entry, in seconds, 0 for the service's own. Both are null in lakes of an earlier
version.
`alternative_fingerprints`: with Fencepost's header the record's computed fingerprint, if the header has another one;
without the header the other possible fingerprints of the record, 8 bytes each (`decode.copies`).
`was_past_end`: the log's high watermark was not past the offset when all claims on it were read, or in a later run if
the log was blocked then, so that the log never had the record. `elsewhere`: another row of the id, of any hour, settles
this 202 or 504 without offset; a row of the same hour also counts the id as accepted. `proven_lost`: a run has
classified the claims on this offset as lost.
"""

WRITTEN: Final = "entries_count + answered_201 + answered_202 + answered_504 > 0"
"""The condition that a ROW, or a row of `summarize`, is about a record that was or may have been written: a refused
request may name any topic."""

ROW_KEY: Final = ("accepted_hour", "kind", "id", "topic", "partition", "offset")
"""The columns that identify a row."""

COUNTS: Final = (
    "count",
    "entries_count",
    "answered_201",
    "answered_202",
    "answered_503",
    "answered_504",
    "answered_other",
    "replayed",
)
"""The columns that count evidence: records, ledger entries, and answers."""

LEAST: Final = ("accepted_ms", "entry_seen_ms", "answer_seen_ms", "batch_hash")
GREATEST: Final = ("run", "last_ms", "in_doubt_ms", "count", "was_past_end", "elsewhere", "proven_lost", "key_ttl_s")
RECORD: Final = (
    "timestamp_ms",
    "record_accepted_ms",
    "fingerprint",
    "alternative_fingerprints",
    *rule_table.PRODUCER,
    "has_fencepost_header",
    "has_record_key",
    "record_key_hash",
    "key",
    "reject",
)

_OF_RECORD: Final = (*RECORD, "record_topic_id_hash")

COPY_FIELDS: Final = (
    "timestamp: bigint, topic: string, partition: int, offset: bigint, fingerprint: binary, "
    "possible_fingerprints: binary, accepted_at: bigint, slot: int, pid: bigint, epoch: int, instance: string, "
    "has_fencepost_header: boolean, is_derived_copy: boolean"
)
CLAIM_FIELDS: Final = (
    "seen_ms: bigint, accepted_ms: bigint, topic: string, partition: int, offset: bigint, topic_id_hash: bigint, "
    "was_past_end: boolean, proven_lost: boolean, key_ttl_s: bigint"
)
FINGERPRINT_FIELDS: Final = "fingerprint: binary, possible_fingerprints: binary"

GATHERED: Final = {
    "accepted_hour": "timestamp",
    "kind": "string",
    "id": "binary",
    "accepted_ms": "bigint",
    "key": "string",
    "topic": "string",
    "last_ms": "bigint",
    "run": "bigint",
    "rows": "bigint",
    **dict.fromkeys(COUNTS, "bigint"),
    "with_header": "bigint",
    "derived_copies_count": "bigint",
    "is_clean": "tinyint",
    "in_doubt_ms": "bigint",
    "freed_ms": "bigint",
    "settled_elsewhere": "boolean",
    "fingerprints": f"array<struct<{FINGERPRINT_FIELDS}>>",
    "coordinates": f"array<struct<{COPY_FIELDS}>>",
    "entries": f"array<struct<{CLAIM_FIELDS}>>",
    "answered": f"array<struct<{CLAIM_FIELDS}>>",
}
"""One row for each id. `rows` is the number of its ROWs, `run` the last run that wrote one of these, `topic` the first
topic in alphabetical order. `with_header` counts the copies with Fencepost's header, `derived_copies_count` those of
them in topics to which the id was not written. `settled_elsewhere` is the column `elsewhere` of ROW.
`possible_fingerprints` is null for a copy with Fencepost's header. Lists are capped, copies first; counts, and whether
fingerprints differ, stay exact.
"""

# A time in ms and a position in a record are packed into one number; a record of 1 MB has fewer than 16,000 answers.
_POSITION_BITS: Final = 16


def hour_of(ms: Column) -> Column:
    """Return the hour of a time (ms), as a timestamp."""
    return F.timestamp_millis(F.floor(ms / HOUR_MS) * HOUR_MS)


def in_doubt(row: str = "") -> str:
    """Return the SQL condition that a ROW has answers 202 or 504, without an offset; `row` is its alias's prefix."""
    is_event = f"{row}kind = '{EVENT}' AND {row}is_clean = 0 AND {row}offset IS NULL"
    return f"{is_event} AND {row}answered_202 + {row}answered_504 > 0"


def same_coordinates(left: Column, right: Column) -> Column:
    """Check whether two structs (copies, claims) have the same topic, partition and offset."""
    return (
        (left["offset"] == right["offset"])
        & (left["partition"] == right["partition"])
        & (left["topic"] == right["topic"])
    )


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What a run knows of the logs of its records, by topic and partition.

    `arrived`: the earliest time (ms) at which the copies of a partition can have been written, where known; `exact`:
    the time span (ms) in which a copy without Fencepost's header counts in the hour of its timestamp, see `_hour`;
    `later_ends`: the end of each log, listed after all claims were written; `topic_ids`: the ids of the topics.
    """

    arrived: Mapping[tuple[str, int], int] = field(default_factory=dict)
    exact: tuple[int, int] | None = None
    later_ends: Mapping[tuple[str, int], int] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)


NO_FACTS: Final = LogFacts()


def reduce(copies: DataFrame, claims: DataFrame, run: int, facts: LogFacts = NO_FACTS) -> DataFrame:
    """Join copies (decode.COPIES) and claims (`summarize`) into ROW, a row for each ROW_KEY.

    Claims are aggregated as numbers only, so that Spark uses a hash aggregation. Records need no aggregation: they
    are joined. Both sides are partitioned by ROW_KEY, with one exchange each.
    """
    keyed = copies.select(
        _hour(facts.exact).alias("accepted_hour"),
        *ROW_KEY[1:],
        "timestamp_ms",
        F.col("accepted_ms").alias("record_accepted_ms"),
        *RECORD[2:-1],
        F.col("reject").alias("copy_reject"),
        "observed_ms",
    )
    joined = keyed.join(claims.hint("shuffle_hash"), list(ROW_KEY), "full_outer")
    sums = {name: F.coalesce(name, F.lit(0)) for name in COUNTS[1:]}
    count = F.when(F.col("timestamp_ms").isNotNull(), 1).otherwise(0) + F.coalesce("rejected", F.lit(0))
    columns: dict[str, Column] = {
        "is_clean": _is_clean({**sums, "count": count}, F.col("has_fencepost_header")),
        "run": F.lit(run),
        "accepted_ms": F.least("record_accepted_ms", "first_accepted_ms"),
        # A client, or a program that copies records, may set an old timestamp.
        "last_ms": F.greatest(
            F.coalesce("observed_ms", "timestamp_ms"),
            "record_accepted_ms",
            _arrived_ms(facts.arrived),
            "last_timestamp_ms",
        ),
        "count": count,
        **sums,
        "reject": F.coalesce("copy_reject", "reject"),
        "was_past_end": F.when(
            sums["entries_count"] + sums["answered_201"] > 0,
            rule_table.is_past_end(F.col("offset"), _by_partition(facts.later_ends)),
        ),
        "elsewhere": F.lit(None),
        "proven_lost": F.lit(None),
        "record_topic_id_hash": F.when(F.col("timestamp_ms").isNotNull(), topic_id_hash(facts.topic_ids)),
    }
    return joined.select(
        *(columns.get(name, F.col(name)).cast(data_type).alias(name) for name, data_type in ROW.items())
    )


def _hour(exact: tuple[int, int] | None) -> Column:
    """Return the hour in which a copy counts: the hour of its acceptance.

    Without Fencepost's header the acceptance is the timestamp, which its writer may set to any time. To limit the
    number of hours (partitions of the lake), a timestamp before the time span `exact` (ms) counts in the first hour of
    its month, a timestamp after that span in the last hour.
    """
    at = F.col("accepted_ms")
    if exact is None:
        return hour_of(at)
    first_ms, last_ms = exact
    first_hour = F.date_trunc("month", F.timestamp_millis(at))
    clamped = F.when(at < first_ms, first_hour).when(at > last_ms, hour_of(F.lit(last_ms)))
    return F.coalesce(F.when(~F.col("has_fencepost_header"), clamped), hour_of(at))


def _arrived_ms(arrived: Mapping[tuple[str, int], int]) -> Column:
    """Return the earliest time at which a row's record can have been written; null if unknown, or without a record."""
    return F.when(F.col("timestamp_ms").isNotNull(), _by_partition(arrived))


def is_unwritten(ends: Mapping[tuple[str, int], int]) -> Column:
    """Check whether a ROW has only claims, on an offset at or past the end of its log; false for any other log."""
    only_claimed = f"kind = '{EVENT}' AND is_clean = 0 AND count = 0 AND entries_count + answered_201 > 0"
    past_end = rule_table.is_past_end(F.col("offset"), _by_partition(ends))
    return F.expr(only_claimed) & F.coalesce(past_end, F.lit(False))


def _by_partition(values: Mapping[tuple[str, int], int]) -> Column:
    """Look up the value of a row's topic and partition; null if there is none."""
    constant = F.from_json(F.lit(json.dumps(by_partition(values))), "map<string, array<bigint>>")
    return wire_expressions.at_partition(constant, F.col("topic"), F.col("partition"))


def summarize(claims: DataFrame, parts: int | None = None) -> DataFrame:
    """Aggregate decode.CLAIMS by ROW_KEY, as numbers only, in `parts` partitions (default: the session's number)."""
    status = F.col("status")

    def count(condition: Column) -> Column:
        return F.count(F.when(condition, F.lit(1)))

    def last_answer(condition: Column) -> Column:
        """Return the last of these answers, as its time and its position in the journal record."""
        moment = F.shiftleft("timestamp_ms", _POSITION_BITS) + F.least("position", F.lit((1 << _POSITION_BITS) - 1))
        return F.max(F.when(condition, moment))

    answered = status != ENTERED
    has_offset = F.col("offset").isNotNull()
    rows = claims.withColumn("accepted_hour", hour_of(F.col("accepted_ms"))).withColumn(
        "kind", F.when(F.col("reject").isNull(), EVENT).otherwise(REJECT)
    )
    # Partitioned as the join needs the rows. A key has one or two claims, too few for a partial aggregation.
    partitioned = rows.repartition(*ROW_KEY) if parts is None else rows.repartition(parts, *ROW_KEY)
    in_doubt, freed = last_answer(status.isin(202, 504)), last_answer(status == 503)
    return partitioned.groupBy(*ROW_KEY, "reject").agg(
        F.min("accepted_ms").alias("first_accepted_ms"),
        F.max("timestamp_ms").alias("last_timestamp_ms"),
        count(status.isNull()).alias("rejected"),
        count(status == ENTERED).alias("entries_count"),
        *(count(status == code).alias(f"answered_{code}") for code in (201, 202, 503, 504)),
        count(answered & ~status.isin(201, 202, 503, 504)).alias("answered_other"),
        count(F.col("replayed")).alias("replayed"),
        F.min(F.when(status == ENTERED, F.greatest("timestamp_ms", "accepted_ms"))).alias("entry_seen_ms"),
        F.min(F.when(answered & has_offset, F.col("timestamp_ms"))).alias("answer_seen_ms"),
        F.min("batch_hash").alias("batch_hash"),
        F.max_by("topic_id_hash", F.when(status == ENTERED, F.col("timestamp_ms"))).alias("topic_id_hash"),
        F.max("key_ttl_s").alias("key_ttl_s"),
        F.shiftright(in_doubt, _POSITION_BITS).alias("in_doubt_ms"),
        F.when(in_doubt.isNull() | (freed > in_doubt), F.shiftright(freed, _POSITION_BITS)).alias("freed_ms"),
    )


def topic_id_hash(topic_ids: Mapping[str, str]) -> Column:
    """Look up the hash of the id of a row's topic; null if there is none."""
    constant = F.from_json(F.lit(json.dumps(dict(topic_ids))), "map<string, string>")
    return hash_of(F.try_element_at(constant, F.col("topic")))


def is_of_earlier_topic(topic_ids: Mapping[str, str]) -> Column:
    """Check whether the record of a row was read from an earlier topic of this name; false if that is not known."""
    return F.coalesce(F.col("record_topic_id_hash") != topic_id_hash(topic_ids), F.lit(False))


def in_spans(spans: Mapping[tuple[str, int], tuple[int, int]]) -> Column:
    """Check whether the offset of a row lies in these spans of partitions (first offset, offset after the last)."""
    # JSON: a condition for each span would make an expression as deep as there are spans.
    ends = by_partition({at: {"first": first, "end": end} for at, (first, end) in spans.items()})
    constant = F.from_json(F.lit(json.dumps(ends)), "map<string, array<struct<first: bigint, `end`: bigint>>>")
    span = wire_expressions.at_partition(constant, F.col("topic"), F.col("partition"))
    return F.coalesce(rule_table.is_within(F.col("offset"), span["first"], span["end"]), F.lit(False))


def with_vanished(
    rows: DataFrame,
    merged_rows: DataFrame,
    spans: Mapping[tuple[str, int], tuple[int, int]],
    topic_ids: Mapping[str, str],
    run: int,
) -> DataFrame:
    """Add to ROWs that are to be merged the merged rows with records in these spans, marked as `vanished`.

    Such a record is no longer in its log, since a leader without the record was elected. Claims on its offset stay, and
    so do records of an earlier topic of the same name (`topic_ids` are those of the present topics).
    """
    is_gone = in_spans(spans) & (F.col("count") > 0) & ~is_of_earlier_topic(topic_ids)
    gone = merged_rows.where(is_gone).select(*ROW_KEY, F.lit(True).alias("gone"))
    joined = rows.join(gone, list(ROW_KEY), "full_outer")
    columns = {"run": F.lit(run), **{name: F.coalesce(name, F.lit(0)) for name in ("is_clean", *COUNTS)}}
    return joined.select(
        *(columns.get(name, F.col(name)).cast(data_type).alias(name) for name, data_type in ROW.items()),
        F.coalesce("gone", F.lit(False)).alias("vanished"),
    )


def merged(*, vanished: bool = False) -> dict[str, Column]:
    """Merge the columns of an `old` ROW and a `new` one with the same key; without the old record if it has `vanished`.

    Returns the expressions by column, over frames with the aliases `old` and `new`.
    """

    def pair(name: str) -> tuple[Column, Column]:
        return F.col(f"old.{name}"), F.col(f"new.{name}")

    # `count` is no sum: a record that is written again at the same offset of a recreated topic counts once.
    columns = {name: pair(name)[0] + pair(name)[1] for name in COUNTS}
    columns |= {name: F.least(*pair(name)) for name in LEAST}
    columns |= {name: F.greatest(*pair(name)) for name in GREATEST}
    # If both rows have a record, the topic was recreated or truncated, and the log now has the later record.
    later = F.col("new.timestamp_ms").isNotNull()
    columns |= {name: F.when(later, pair(name)[1]).otherwise(F.coalesce(*pair(name))) for name in _OF_RECORD}
    if vanished:
        columns |= {name: F.col(f"new.{name}") for name in ("count", *_OF_RECORD)}
    columns["topic_id_hash"] = F.coalesce(F.col("new.topic_id_hash"), F.col("old.topic_id_hash"))
    freed, in_doubt = F.greatest(*pair("freed_ms")), columns["in_doubt_ms"]
    columns["freed_ms"] = F.when(in_doubt.isNull() | (freed >= in_doubt), freed)
    columns["is_clean"] = _is_clean(columns, columns["has_fencepost_header"], "old.").cast("tinyint")
    return columns


def gathered(rows: DataFrame, *, quarantine: Sequence[str] = (), by_hour: bool = True) -> DataFrame:
    """Gather ROWs of events into GATHERED: a row for each id and hour, or (not `by_hour`) for each id's last hour.

    `quarantine`: the topics for what is refused. A dead letter there counts as a derived copy of an id that was also
    written to another topic: it is no copy of that event.
    """
    by = ("accepted_hour", "id") if by_hour else ("id",)
    return _cast(_with_fingerprints(_grouped(_numbered(rows, by, quarantine), by)))


def _numbered(rows: DataFrame, by: Sequence[str], quarantine: Sequence[str]) -> DataFrame:
    """Number the rows of each group (`by`) and mark derived copies: ROW → ROW, `nth, written_topics, is_derived_copy`.

    Records come before claims without a record, and first the records to which the others are compared.
    """
    first = F.coalesce("timestamp_ms", "entry_seen_ms", "answer_seen_ms")
    weight = (F.desc("count"), F.col("entry_seen_ms").isNull(), F.desc_nulls_last("has_fencepost_header"))
    order = Window.partitionBy(*by).orderBy(*weight, first, "topic", "partition", "offset")
    is_written_to_topic = claimed() | (F.col("has_fencepost_header") & _computed_fingerprint().isNull())
    is_claimed = claimed()
    if quarantine:
        is_event = ~F.col("topic").isin(*quarantine)
        is_written_to_topic, is_claimed = is_written_to_topic & is_event, is_claimed & is_event
    written_topics = F.collect_set(F.when(is_written_to_topic, F.col("topic")))
    return (
        rows.withColumn("nth", F.row_number().over(order))
        .withColumn("written_topics", written_topics.over(Window.partitionBy(*by)))
        .withColumn("is_derived_copy", _is_derived_copy(is_claimed))
    )


def _grouped(numbered: DataFrame, by: Sequence[str]) -> DataFrame:
    """Group numbered rows: `_numbered` → GATHERED without `fingerprints`, `least_fingerprint, greatest_fingerprint`.

    The last two are structs of FINGERPRINT_FIELDS: they show that fingerprints differ beyond the cap of `coordinates`.
    """
    kept = F.col("nth") <= COORDINATES_MAX
    fingerprints = F.when(F.col("fingerprint").isNotNull() & ~F.col("is_derived_copy"), F.struct(*_fingerprint()))
    columns = {
        "accepted_hour": F.max("accepted_hour"),
        "kind": F.lit(EVENT),
        **{name: F.min(name) for name in ("accepted_ms", "key", "topic")},
        **{name: F.max(name) for name in ("last_ms", "in_doubt_ms", "freed_ms", "run")},
        "settled_elsewhere": F.coalesce(F.max("elsewhere"), F.lit(False)),
        **{name: F.sum(name) for name in COUNTS},
        "rows": F.count("*"),
        "is_clean": F.when(F.count("*") == 1, F.max("is_clean")).otherwise(0),
        "with_header": F.count(F.when(F.col("has_fencepost_header"), 1)),
        "derived_copies_count": F.count(F.when(F.col("is_derived_copy"), 1)),
        "coordinates": F.array_sort(F.collect_list(F.when(kept, _copy()))),
        "entries": F.array_sort(F.collect_list(F.when(kept, _claim("entry_seen_ms")))),
        "answered": F.array_sort(F.collect_list(F.when(kept, _claim("answer_seen_ms")))),
        "least_fingerprint": F.min(fingerprints),
        "greatest_fingerprint": F.max(fingerprints),
    }
    return numbered.groupBy(*by).agg(*(column.alias(name) for name, column in columns.items() if name not in by))


def _with_fingerprints(grouped: DataFrame) -> DataFrame:
    """Add `fingerprints`, the distinct ones of copies that are not derived: `_grouped` → GATHERED."""
    of_copies = F.transform(
        F.filter("coordinates", lambda copy: ~copy["is_derived_copy"]),
        lambda copy: F.struct(*(copy[name].alias(name) for name in ("fingerprint", "possible_fingerprints"))),
    )
    ends = F.array_compact(F.array("least_fingerprint", "greatest_fingerprint"))
    every = F.array_distinct(F.concat(ends, of_copies))
    return grouped.withColumn("fingerprints", F.slice(every, 1, FINGERPRINTS_MAX))


def gathered_single(rows: DataFrame) -> DataFrame:
    """Convert ROWs of events without another row in their hour into GATHERED; needs no exchange."""

    def as_list(item: Column) -> Column:
        return F.array_compact(F.array(item))

    lists = {
        "coordinates": as_list(_copy()),
        "entries": as_list(_claim("entry_seen_ms")),
        "answered": as_list(_claim("answer_seen_ms")),
        "fingerprints": as_list(F.when(F.col("fingerprint").isNotNull(), F.struct(*_fingerprint()))),
    }
    rows = rows.withColumn("is_derived_copy", F.lit(False))
    columns = {
        **lists,
        "rows": F.lit(1),
        "derived_copies_count": F.lit(0),
        "with_header": F.coalesce(F.col("has_fencepost_header").cast("bigint"), F.lit(0)),
        "settled_elsewhere": F.coalesce("elsewhere", F.lit(False)),
    }
    return _cast(rows.withColumns(columns))


def _cast(rows: DataFrame) -> DataFrame:
    """Select the columns of GATHERED."""
    return rows.select(*(F.col(name).cast(data_type) for name, data_type in GATHERED.items()))


def _copy() -> Column:
    """Return the record of a row as a struct of COPY_FIELDS, null without a record."""
    return F.when(
        F.col("count") > 0,
        F.struct(
            F.col("timestamp_ms").alias("timestamp"),
            "topic",
            "partition",
            "offset",
            *_fingerprint(),
            F.col("record_accepted_ms").alias("accepted_at"),
            *rule_table.PRODUCER,
            "has_fencepost_header",
            "is_derived_copy",
        ),
    )


def each_fingerprint(joined: Column) -> Column:
    """Split a binary column of concatenated fingerprints into an array; null for null."""
    size = FINGERPRINT_BYTES
    starts = F.sequence(F.lit(1), F.octet_length(joined) - size + 1, F.lit(size))
    return F.when(
        F.octet_length(joined) >= size, F.transform(starts, lambda start: F.substring(joined, start, F.lit(size)))
    )


def claimed() -> Column:
    """Check whether the ledger or a 201 names the offset of a row."""
    return F.col("entries_count") + F.col("answered_201") > 0


def _computed_fingerprint() -> Column:
    """Return the computed fingerprint of a record whose header has another one; null for any other record."""
    return F.when(F.col("has_fencepost_header"), F.col("alternative_fingerprints"))


def possible_fingerprints() -> Column:
    """Return the other possible fingerprints of a record without Fencepost's header, joined; else null."""
    return F.when(~F.col("has_fencepost_header"), F.col("alternative_fingerprints"))


def _has_distrusted_header() -> Column:
    """Check whether the record's computed fingerprint counts, not the header's: neither ledger nor a 201 names it."""
    return _computed_fingerprint().isNotNull() & ~claimed()


def _fingerprint() -> list[Column]:
    """Return the FINGERPRINT_FIELDS of a row's record."""
    counting = F.when(_has_distrusted_header(), _computed_fingerprint()).otherwise(F.col("fingerprint"))
    return [counting.alias("fingerprint"), possible_fingerprints().alias("possible_fingerprints")]


def _is_derived_copy(is_claimed: Column) -> Column:
    """Return `rule_table.is_derived_copy` of a row; `written_topics` are the topics to which its id was written.

    `is_claimed`: whether the ledger or a 201 names the row as an event, and not as a dead letter.
    """
    written_elsewhere = (F.size("written_topics") > 0) & ~F.array_contains("written_topics", F.col("topic"))
    is_derived_copy = rule_table.is_derived_copy(F.col("has_fencepost_header"), is_claimed, written_elsewhere)
    return F.coalesce(is_derived_copy, F.lit(False))


def _claim(seen_ms: str) -> Column:
    """Return the claim of the ledger or the journal (by the column `seen_ms`) as a struct of CLAIM_FIELDS, or null."""
    known = (F.coalesce(name, F.lit(False)).alias(name) for name in ("was_past_end", "proven_lost"))
    claim = F.struct(
        F.col(seen_ms).alias("seen_ms"),
        *("accepted_ms", "topic", "partition", "offset", "topic_id_hash"),
        *known,
        "key_ttl_s",
    )
    return F.when(F.col(seen_ms).isNotNull(), claim)


def _is_clean(sums: Mapping[str, Column], has_header: Column, row: str = "") -> Column:
    """Return 1 if a row is clean (see ROW), else 0; `row` is the prefix of its alias."""
    entries, answered = sums["entries_count"], sums["answered_201"]
    only_answered = (entries == 0) & (answered > 0)
    clean = (entries == 1) | only_answered | ((entries == 0) & ~F.coalesce(has_header, F.lit(False)))
    return F.when((F.col(f"{row}kind") == EVENT) & (sums["count"] == 1) & clean, 1).otherwise(0)
