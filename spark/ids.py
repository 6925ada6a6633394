"""The pass over all ids: what no single hour shows. It reads narrow columns only, however long the history."""

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from spark import findings, lake, state
from spark.decode import EVENT
from spark.verdict import Evidence, judge

COORDINATES_MAX = state.COPIES_MAX


def in_several_hours(deliveries: DataFrame) -> DataFrame:
    """state.ROW → `id, hours array<timestamp>` of the ids that have rows in more than one hour."""
    return (
        deliveries.where(F.col("kind") == EVENT)
        .groupBy("id")
        .agg(F.min("accepted_hour").alias("first"), F.max("accepted_hour").alias("last"))
        .where("first < last")
        .select("id", F.array("first", "last").alias("hours"))
    )


@dataclass(frozen=True)
class Across:
    """The rows of ids that have several hours; judged as they are, and as one row an id."""

    rows: DataFrame
    apart: DataFrame
    together: DataFrame


def across(deliveries: DataFrame, several: DataFrame, seen: Evidence) -> Across:
    """The judged rows of these ids, hour by hour and united."""
    rows = deliveries.where(F.col("kind") == EVENT).join(F.broadcast(several.select("id")), "id", "left_semi")
    rows = rows.select(*state.ROW).persist()
    return Across(rows, judge(rows, seen), judge(state.united(rows), seen))


def superseded(together: DataFrame) -> DataFrame:
    """Judged rows → lake.FINDING without kind, one an id: what the hours found about it does not hold any more."""
    return together.select(
        *(
            {
                "scope": F.lit(findings.IDS),
                "accepted_hour": F.col("accepted_hour"),
                "id": F.col("id"),
                "topic": F.col("topic"),
                "last_ms": F.col("last_ms"),
            }.get(name, F.lit(None))
            .cast(kind)
            .alias(name)
            for name, kind in lake.FINDING.items()
        )
    )


def client_duplicates(deliveries: DataFrame, seen: Evidence) -> DataFrame:
    """state.ROW → lake.FINDING: other ids with the same fingerprint and record key, accepted within the retention.

    The fingerprint covers the record key; rows whose record has none have no fingerprint here, since values without
    a key (a reading, a counter) repeat without being retries.
    """
    told = deliveries.where((F.col("kind") == EVENT) & F.col("fingerprint").isNotNull() & seen.audited(F.col("topic")))
    repeated = told.groupBy("fingerprint").count().where("count > 1").select("fingerprint")
    rows = told.join(repeated, "fingerprint", "left_semi").select(
        "fingerprint", "id", "accepted_ms", "accepted_hour", "key", "topic", "last_ms", "coordinates"
    )
    order = Window.partitionBy("fingerprint").orderBy("accepted_ms", "id")

    def near(side: str) -> Column:
        step = F.lag if side == "before" else F.lead
        distance = F.abs(F.col("accepted_ms") - step("accepted_ms").over(order))
        other = step("id").over(order) != F.col("id")
        return F.coalesce(other & (distance < seen.key_ttl_ms), F.lit(False))

    near_rows = rows.withColumn("near", near("before") | near("after")).where("near")
    numbered = near_rows.withColumn("nth", F.row_number().over(order))
    first = F.get("coordinates", F.lit(0))
    place = F.struct(
        "nth",
        *(first[name].alias(name) for name in ("topic", "partition", "offset", "timestamp")),
        *(first[name].alias(name) for name in ("slot", "pid", "epoch", "instance")),
        F.lit(None).cast("string").alias("cause"),
    )
    grouped = numbered.groupBy("fingerprint").agg(
        F.max("accepted_hour").alias("accepted_hour"),
        F.max_by("id", -F.col("nth")).alias("id"),
        F.max_by("key", -F.col("nth")).alias("key"),
        F.min("topic").alias("topic"),
        F.count("id").alias("count"),
        F.max("last_ms").alias("last_ms"),
        F.collect_list(F.when(F.col("nth") <= COORDINATES_MAX, place)).alias("places"),
    )
    return grouped.select(
        F.lit(findings.IDS).alias("scope"),
        "accepted_hour",
        F.lit(findings.CLIENT_DUPLICATE).alias("kind"),
        F.lit("new_key").alias("cause"),
        "id",
        "key",
        "topic",
        F.lit(None).cast("int").alias("partition"),
        "count",
        F.lit(None).cast("bigint").alias("first_offset"),
        F.lit(None).cast("bigint").alias("last_offset"),
        "last_ms",
        F.transform(F.array_sort("places"), lambda one: one.dropFields("nth"))
        .cast(lake.COORDINATES)
        .alias("coordinates"),
    )
