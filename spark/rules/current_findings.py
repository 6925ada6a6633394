"""The findings that stand: those of the lake that hold and lie in the window, each under a name of its own."""

from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark import rule_table
from spark.reading.decode import UNKEYED
from spark.rules.findings import CLIENT_DUPLICATE, CONFLICT, DUPLICATE, EVIDENCE_GAP, IDS, KINDS, SEVERITIES
from spark.tables import hours
from spark.tables.deliveries import hour_of

# A foreign writer may put anything into the header; a caller's keys end here.
KEY_CHARS: Final = 255

FIELDS: Final = (
    "finding_id",
    "kind",
    "cause",
    "severity",
    "id",
    "fingerprint",
    "key",
    "topic",
    "partition",
    "count",
    "first_offset",
    "last_offset",
    "coordinates",
)
"""The fields of a finding, in this order. `id` and `fingerprint` are in hexadecimal digits."""

COPIES: Final = (DUPLICATE, CONFLICT)
"""Kinds whose records are the copies too many."""

_PLACES: Final = (UNKEYED, EVIDENCE_GAP)
_PLACE: Final = ("kind", "cause", "topic", "partition")


def by_hour(findings: DataFrame, since_ms: int) -> DataFrame:
    """lake.FINDING → those of it that stand; what is found of a partition still hour by hour.

    `since_ms` is where the window begins, and the first hour that the balance counts.
    """
    seen = F.col("last_ms") >= since_ms
    counted = F.col("accepted_hour") >= F.timestamp_millis(F.lit(since_ms))
    recent = findings.where(rule_table.is_in_window(seen, counted) & F.col("kind").isNotNull())
    united = findings.where((F.col("scope") == IDS) & F.col("kind").isNull())
    passes = united.select("id", F.coalesce("run", F.lit(0)).alias("passed"))
    over_hours = (F.col("scope") == IDS) | F.col("kind").isin(*_PLACES)
    revoked = rule_table.is_revoked(F.coalesce("run", F.lit(0)), F.col("passed"))
    of_hours = recent.where(~over_hours).join(passes, "id", "left")
    of_hours = of_hours.where(F.col("passed").isNull() | ~revoked).select(*recent.columns)
    return recent.where(over_hours).unionByName(of_hours)


def by_finding(current: DataFrame) -> DataFrame:
    """What `by_hour` gives → FIELDS, one row a finding: those of a partition summed over its hours.

    `finding_id` is the same in every run: `duplicate:<id>`, `client_duplicate:<fingerprint>`, as an id may be among
    several of these, or `unkeyed::orders:3` for what is found of a partition.
    An id of which two hours tell apart (only where the pass over ids is left out) keeps what the later one says.
    """
    of_partitions = F.col("kind").isin(*_PLACES)
    single = (
        current.where(~of_partitions)
        .groupBy("kind", F.coalesce("fingerprint", "id").alias("named"))
        .agg(F.max_by(F.struct(*current.columns), F.struct("accepted_hour", "last_ms")).alias("last"))
        .select("last.*")
    )
    places = (
        current.where(of_partitions)
        .groupBy(*_PLACE)
        .agg(
            F.sum("count").alias("count"),
            F.min("first_offset").alias("first_offset"),
            F.max("last_offset").alias("last_offset"),
        )
    )
    kept = [name for name in current.columns if name in FIELDS]
    rows = single.select(*kept).unionByName(places, allowMissingColumns=True)
    shown_id, fingerprint = F.lower(F.hex("id")), F.lower(F.hex("fingerprint"))
    severity = F.create_map(*(F.lit(word) for pair in SEVERITIES.items() for word in pair))
    place = F.concat_ws(":", *(F.coalesce(F.col(name).cast("string"), F.lit("")) for name in _PLACE))
    return rows.select(
        F.when(F.col("id").isNull(), place)
        .otherwise(F.concat_ws(":", "kind", F.coalesce(fingerprint, shown_id)))
        .alias("finding_id"),
        *_PLACE[:2],
        severity[F.col("kind")].alias("severity"),
        shown_id.alias("id"),
        fingerprint.alias("fingerprint"),
        F.substring("key", 1, KEY_CHARS).alias("key"),
        "topic",
        "partition",
        "count",
        "first_offset",
        "last_offset",
        F.coalesce("coordinates", F.array().cast(rows.schema["coordinates"].dataType)).alias("coordinates"),
    ).select(*FIELDS)


def as_json() -> Column:
    """A row of FIELDS as JSON, nulls included."""
    return F.to_json(F.struct(*FIELDS), {"ignoreNullFields": "false"})


def in_order(found: DataFrame) -> DataFrame:
    """FIELDS in an order that does not depend on the run: kinds as in KINDS, then by topic, place, cause, id."""
    rank = F.array_position(F.array(*(F.lit(name) for name in KINDS)), F.col("kind"))
    return found.orderBy(rank, "topic", "partition", "cause", "id")


def causes(found: DataFrame) -> list[dict[str, Any]]:
    """FIELDS → how many findings there are by kind, topic and cause, and how many copies too many: a bounded number.

    A copy too many counts for the topic in which it lies and for its own cause; those of which no coordinates were
    kept count with their finding.
    """
    uncounted = F.col("count") - F.size("coordinates")
    many = F.col("kind").isin(*COPIES)
    each = found.select(
        "kind",
        "topic",
        "cause",
        F.lit(1).alias("findings"),
        F.when(many, uncounted).otherwise(F.col("count")).alias("records"),
    )
    copies = found.where(many).select("kind", F.explode("coordinates").alias("copy")).where("copy.cause is not null")
    extra = copies.select("kind", "copy.topic", "copy.cause", F.lit(0).alias("findings"), F.lit(1).alias("records"))
    summed = (
        each.unionByName(extra)
        .groupBy("kind", "topic", "cause")
        .agg(F.sum("findings").alias("findings"), F.sum("records").alias("records"))
    )
    rows = [row.asDict() for row in summed.collect()]
    return sorted(rows, key=lambda row: (KINDS.index(row["kind"]), row["topic"] or "", row["cause"] or ""))


def finding_counts(current: DataFrame, *, partitions: bool) -> DataFrame:
    """What `by_hour` gives → `hour string, topic, partition, kind, cause, records`: where and when the trouble is.

    A copy counts where it lies, in the hour of its timestamp; a missing record where it was promised, and whatever
    has no place of its own with partition null, in the hour of the acceptance. Without `partitions` every one is null.
    """
    copy = F.col("copy")
    too_many = F.when(F.col("kind").isin(*COPIES), copy["cause"].isNotNull()).when(
        F.col("kind") == CLIENT_DUPLICATE, F.col("nth") > 0
    )
    placed = (
        current.select("accepted_hour", "kind", "cause", F.posexplode("coordinates").alias("nth", "copy"))
        .where(F.coalesce(too_many, F.lit(True)))
        .select(
            F.coalesce(hour_of(copy["timestamp"]), F.col("accepted_hour")).alias("hour"),
            copy["topic"].alias("topic"),
            copy["partition"].alias("partition"),
            "kind",
            F.when(F.col("kind").isin(*COPIES), copy["cause"]).otherwise(F.col("cause")).alias("cause"),
            F.lit(1).cast("bigint").alias("records"),
        )
    )
    # Those of which no coordinates were kept count where the last kept one lies.
    last = F.try_element_at("coordinates", F.lit(-1))
    rest = current.select(
        F.coalesce(hour_of(last["timestamp"]), F.col("accepted_hour"), hour_of(F.col("last_ms"))).alias("hour"),
        F.coalesce(last["topic"], F.col("topic")).alias("topic"),
        F.coalesce(last["partition"], F.col("partition")).alias("partition"),
        "kind",
        "cause",
        (F.col("count") - F.coalesce(F.size("coordinates"), F.lit(0))).alias("records"),
    ).where("records > 0")
    found = placed.unionByName(rest)
    where = F.col("partition") if partitions else F.lit(None).cast("int")
    return (
        found.withColumn("partition", where)
        .groupBy("hour", "topic", "partition", "kind", "cause")
        .agg(F.sum("records").alias("records"))
        .withColumn("hour", hours.as_text(F.col("hour")))
    )
