"""Findings from classified rows (classify.classify), and sums by hour and topic for the balance."""

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark import rule_table
from spark.engine import frames
from spark.reading.decode import EVENT, REJECT, UNKEYED
from spark.reading.run_plan import RETENTION, TRUNCATED, UNWANTED, Plan
from spark.rule_table import LOST, PENDING
from spark.rules import causes, kinds
from spark.rules.classify import CATEGORIES, PHANTOM, STUCK, UNPROVEN, LogEvidence
from spark.tables import schemas

HOUR: Final = "hour"
IDS: Final = "ids"
LOG: Final = "log"
"""Scopes of findings: the data from which findings were derived, and with which they are replaced."""

UNDECODED: Final = "undecoded"
"""The cause of an evidence gap: records that could not be decoded."""


def _total(column: str, condition: str) -> str:
    """Return the SQL sum of a column of the rows that meet a condition, 0 for no rows."""
    return f"coalesce(sum(CASE WHEN {condition} THEN {column} END), 0)"


_EVENT: Final = f"kind = '{EVENT}'"
_DELIVERED: Final = f"{_EVENT} AND `count` > 0"
_UNREQUESTED: Final = f"{_DELIVERED} AND NOT accepted AND phantom IS NULL AND with_header = 0"
_ANSWERED: Final = (*rule_table.ANSWER_COUNTS, "replayed")

SUMS: Final = {
    "ids": f"count_if({_DELIVERED})",
    "records": _total("`count`", _EVENT),
    "copies_extra": _total("copies_count - 1", f"{_EVENT} AND copies_count > 1"),
    "accepted": "count_if(accepted)",
    **{name: f"count_if(category = '{name}')" for name in CATEGORIES},
    PHANTOM: f"count_if(phantom = '{PHANTOM}' AND NOT accepted)",
    "open": "count_if(open)",
    "unrequested": f"count_if({_UNREQUESTED})",
    "unrequested_multiple": f"count_if({_UNREQUESTED} AND copies_count > 1)",
    "unkeyed": _total("`count`", f"kind = '{UNKEYED}'"),
    "rejects": _total("`count`", f"kind = '{REJECT}'"),
    **{name: _total(name, _EVENT) for name in _ANSWERED},
}
"""Counts by hour and topic: their names, and the SQL by which classified rows are summed up.

`phantom`: phantom ids that were not accepted; `unrequested`: delivered ids without Fencepost's header that neither
ledger nor answers name, as in topics with other writers."""


def sums(classified: DataFrame) -> DataFrame:
    """Sum up classified rows by hour and topic: → `accepted_hour, topic`, SUMS, and the number of `suspicious` rows."""
    counts = {name: F.expr(sql) for name, sql in SUMS.items()} | {"suspicious": F.count_if("suspicious")}
    return classified.groupBy("accepted_hour", "topic").agg(*(count.alias(name) for name, count in counts.items()))


_CLAIM: Final = ("id", "topic", "partition", "offset")


def newly_lost(classified: DataFrame) -> DataFrame:
    """Return the claims that are lost, and that no earlier run has proven to be lost.

    Rows classified by hour → `accepted_hour, id, topic, partition, offset`, a row for each offset.
    """
    lost = F.filter("missing", lambda claim: (claim["outcome"] == LOST) & ~claim["proven_lost"])
    each = classified.select("accepted_hour", "id", F.explode(lost).alias("claim"))
    return each.select("accepted_hour", "id", "claim.topic", "claim.partition", "claim.offset").distinct()


def without_record(claims: DataFrame, rows: DataFrame) -> DataFrame:
    """Filter lost claims (`newly_lost`, checkpointed) to those whose record is in none of these rows (deliveries.ROW).

    A record and a claim on its offset may count in two hours: if the acceptance was not plausible when the record was
    read, and is plausible when a replayed 201 with the same acceptance is.
    """
    # New names of the columns: Spark cannot join a checkpoint with the rows from which the checkpoint was made.
    records = rows.where((F.col("kind") == EVENT) & (F.col("count") > 0)).select(
        *(F.col(name).alias(name) for name in _CLAIM)
    )
    found = records.join(frames.broadcast_if_small(claims.select(*_CLAIM)), list(_CLAIM), "left_semi").distinct()
    return claims.join(found, list(_CLAIM), "left_anti")


def of_ids(rows: DataFrame, evidence: LogEvidence, scope: str) -> DataFrame:
    """Return the findings about ids: suspicious rows → schemas.FINDING.

    The kinds are duplicate, conflict, derived copy, lost, phantom and stuck.
    """
    found = F.array(_of_copies(), _of_derived_copies(), _of_lost_claims(), _of_phantom(), _of_doubt())
    each = _described(rows, evidence).withColumn("found", F.explode(F.array_compact(found)))
    of_found = ("kind", "cause", "topic", "count", "coordinates")
    columns = {name: F.col(name) for name in ("accepted_hour", "id", "key", "last_ms")}
    return as_findings(each, scope, columns | {name: F.col(f"found.{name}") for name in of_found})


def _described(rows: DataFrame, evidence: LogEvidence) -> DataFrame:
    """Add to suspicious rows what their findings list. Adds the columns

    `copies` (the copies in order, causes.ordered), `explained` (these as coordinates, each with its cause),
    `lost_claims` (claims as in `missing`), `forwarded` (derived copies that no rule expects), `forwarded_count bigint`.
    """
    derived_copies = F.filter("coordinates", lambda copy: copy["is_derived_copy"])
    expected_copies = F.filter(derived_copies, lambda copy: evidence.expects_derived_copies(copy["topic"]))
    return rows.withColumn("copies", causes.ordered()).withColumns(
        {
            "explained": causes.explained(F.col("copies"), evidence.ttl_of_entry_ms),
            "lost_claims": F.filter("missing", lambda claim: claim["outcome"] == LOST),
            "forwarded": F.filter(derived_copies, lambda copy: ~evidence.expects_derived_copies(copy["topic"])),
            # Copies beyond the cap have no coordinates.
            "forwarded_count": F.col("derived_copies_count") - F.size(expected_copies),
        }
    )


def _of_copies() -> Column:
    """Return the finding `duplicate` or `conflict` of a described row, null without a second copy."""
    kind = rule_table.copies_kind(F.col("conflicting"))
    cause = F.get("explained", F.lit(1))["cause"]
    return F.when(F.col("copies_count") > 1, _found(kind, cause, F.col("explained"), "copies_count"))


def _of_derived_copies() -> Column:
    """Return the finding `derived_copy` of a described row, or null; its topic is that of the first such copy."""
    found = _found(_kind(kinds.DERIVED_COPY), _no_cause(), _without_cause(F.col("forwarded")), "forwarded_count")
    of_its_topic = found.withField("topic", F.get("forwarded", F.lit(0))["topic"])
    return F.when(F.size("forwarded") > 0, of_its_topic)


def _of_lost_claims() -> Column:
    """Return the finding `lost` of a described row, or null; its cause is the source of the first lost claim."""
    source = F.get("lost_claims", F.lit(0))["source"]
    return F.when(F.size("lost_claims") > 0, _found(_kind(kinds.LOST), source, _claimed("lost_claims")))


def _of_phantom() -> Column:
    """Return the finding `phantom` of a described row, or null."""
    found = _found(_kind(kinds.PHANTOM), _no_cause(), _with_header(F.col("copies")))
    return F.when(F.col("phantom") == PHANTOM, found)


def _of_doubt() -> Column:
    """Return the finding `stuck` of a described row, or null."""
    cause = rule_table.in_doubt_cause(F.col("answered_202"), F.col("answered_504"))
    return F.when(F.col("category") == STUCK, _found(_kind(kinds.STUCK), cause, F.array().cast(schemas.COORDINATES)))


def _kind(kind: kinds.Kind) -> Column:
    return F.lit(kind.name)


def _no_cause() -> Column:
    return F.lit(None).cast("string")


def as_findings(rows: DataFrame, scope: str, columns: Mapping[str, Column]) -> DataFrame:
    """Convert rows to schemas.FINDING without `run` and `late_ms`: columns that are not given are null, or an empty
    array."""
    default: dict[str, Column] = {"scope": F.lit(scope), "coordinates": F.array()}
    of_run = ("run", "late_ms")
    data_types = {name: data_type for name, data_type in schemas.FINDING.items() if name not in of_run}
    return frames.typed(rows, data_types, {**default, **columns})


def of_partitions(rows: DataFrame, scope: str) -> DataFrame:
    """Return the findings about partitions (evidence gaps): suspicious rows → schemas.FINDING."""
    gaps = F.filter("missing", lambda claim: ~claim["outcome"].isin(LOST, PENDING))
    of_claims = F.transform(
        gaps,
        lambda claim: F.struct(
            _kind(kinds.EVIDENCE_GAP).alias("kind"),
            claim["outcome"].alias("cause"),
            claim["topic"].alias("topic"),
            claim["partition"].alias("partition"),
            claim["offset"].alias("first_offset"),
            claim["offset"].alias("last_offset"),
            # Records that were deleted unread are counted by `of_logs`, whether or not they were claimed.
            rule_table.gap_count(claim["outcome"].isin(RETENTION, TRUNCATED)).alias("count"),
        ),
    )
    of_copies = F.transform(
        F.filter("coordinates", lambda copy: copy["has_fencepost_header"] & ~copy["is_derived_copy"]),
        lambda copy: F.struct(
            _kind(kinds.EVIDENCE_GAP).alias("kind"),
            F.lit("ledger_gone").alias("cause"),
            copy["topic"].alias("topic"),
            copy["partition"].alias("partition"),
            copy["offset"].alias("first_offset"),
            copy["offset"].alias("last_offset"),
            F.lit(1).cast("bigint").alias("count"),
        ),
    )
    found = F.when(
        F.col("phantom") == UNPROVEN, F.concat(F.coalesce(of_claims, F.array().cast(gaps_type())), of_copies)
    ).otherwise(of_claims)
    each = rows.select("accepted_hour", "last_ms", F.explode(found).alias("found"))
    return _by_partition(each.select("accepted_hour", "last_ms", "found.*"), scope)


def without_id(rows: DataFrame, evidence: LogEvidence) -> DataFrame:
    """Return the findings about records without an id, by partition: deliveries.ROW → schemas.FINDING.

    A record with neither header is `unkeyed`. A record that could not be decoded is a gap in the evidence: in ledger or
    journal it may name any event, in a data topic it may be a copy of any event.
    """
    is_reject = F.col("kind") == REJECT
    reported = evidence.audited(F.col("topic")) | (is_reject & F.col("topic").isin(*evidence.claim_topics))
    records = rows.where(F.col("kind").isin(UNKEYED, REJECT) & (F.col("count") > 0) & reported)
    columns = {
        "kind": F.when(is_reject, _kind(kinds.EVIDENCE_GAP)).otherwise(_kind(kinds.UNKEYED)),
        "cause": F.when(is_reject, UNDECODED),
        "first_offset": F.col("offset"),
        "last_offset": F.col("offset"),
    }
    return _by_partition(records.withColumns(columns), HOUR)


def _by_partition(each: DataFrame, scope: str) -> DataFrame:
    """Sum up rows by hour and partition:

    `accepted_hour, kind, cause, topic, partition, first_offset, last_offset, count, last_ms` → schemas.FINDING.
    """
    grouped = each.groupBy("accepted_hour", "kind", "cause", "topic", "partition").agg(
        F.sum("count").alias("count"),
        F.min("first_offset").alias("first_offset"),
        F.max("last_offset").alias("last_offset"),
        F.max("last_ms").alias("last_ms"),
    )
    return as_findings(grouped, scope, {name: F.col(name) for name in grouped.columns})


def gaps_type() -> str:
    """Return the type of the array of a row's gaps in `of_partitions`."""
    return (
        "array<struct<kind: string, cause: string, topic: string, partition: int, first_offset: bigint, "
        "last_offset: bigint, count: bigint>>"
    )


def of_logs(spark: SparkSession, plan: Plan) -> list[DataFrame]:
    """Return the findings (schemas.FINDING) about the logs of audited topics: records that were deleted unread.

    No frame without such a finding.
    """
    rows = [
        {
            "scope": LOG,
            "kind": kinds.EVIDENCE_GAP.name,
            "cause": gap.cause,
            "topic": log.topic,
            "partition": log.partition,
            "count": gap.last - gap.first,
            "first_offset": gap.first,
            "last_offset": max(gap.last - 1, gap.first),
            "last_ms": gap.seen_ms,
            "coordinates": [],
        }
        for log in plan.logs
        if log.role != UNWANTED
        for gap in log.gaps
    ]
    return [frames.rows_of(spark, schemas.of("findings"), rows)] if rows else []


def _found(kind: Column, cause: Column, coordinates: Column, count: str | None = None) -> Column:
    """Build a finding of a row; the column `count` has its number of records (default: the number of coordinates)."""
    return F.struct(
        kind.alias("kind"),
        cause.alias("cause"),
        F.col("topic").alias("topic"),
        (F.size(coordinates) if count is None else F.col(count)).cast("bigint").alias("count"),
        coordinates.cast(schemas.COORDINATES).alias("coordinates"),
    )


def _claimed(claims: str) -> Column:
    """Convert claims to coordinates; the cause of each is the source of its claim (`ledger` or `answer`)."""
    return F.transform(
        claims,
        lambda claim: F.struct(
            *(claim[name].alias(name) for name in ("topic", "partition", "offset")),
            F.lit(None).cast("bigint").alias("timestamp"),
            F.lit(None).cast("int").alias("slot"),
            F.lit(None).cast("bigint").alias("pid"),
            F.lit(None).cast("int").alias("epoch"),
            F.lit(None).cast("string").alias("instance"),
            claim["source"].alias("cause"),
        ),
    )


def _with_header(copies: Column) -> Column:
    """Convert the copies with Fencepost's header to coordinates without cause."""
    return _without_cause(F.filter(copies, lambda copy: copy["has_fencepost_header"]))


def _without_cause(copies: Column) -> Column:
    """Convert copies to coordinates without cause."""
    return F.transform(
        copies,
        lambda copy: F.struct(
            *(copy[name].alias(name) for name in ("topic", "partition", "offset", "timestamp", *rule_table.PRODUCER)),
            F.lit(None).cast("string").alias("cause"),
        ),
    )
