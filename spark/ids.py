"""The pass over all ids: what no single hour shows. It reads narrow columns only, however long the history."""

from collections.abc import Iterable
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from spark import findings, hours, lake, state
from spark.decode import EVENT
from spark.verdict import Evidence

COORDINATES_MAX: Final = state.PLACES_MAX
# Pairs of hours that are asked for to prune by; with more of them nearly every hour is one of them.
SPANS_MAX: Final = 10_000
# Spans over several hours are a condition each, of which Spark compiles some hundred and no more.
WIDE_MAX: Final = 100

_WRITER: Final = ("slot", "pid", "epoch", "instance")


def repeated(rows: DataFrame) -> DataFrame:
    """state.ROW → `id, first timestamp, last timestamp` of events with several rows, and in which hours these lie."""
    return _several(rows.where(F.col("kind") == EVENT), "id")


def _several(rows: DataFrame, name: str) -> DataFrame:
    """What several rows have in the column `name`, with the first and the last hour of these rows."""
    hour = F.col("accepted_hour")
    counted = rows.groupBy(name).agg(F.count("*").alias("rows"), F.min(hour).alias("first"), F.max(hour).alias("last"))
    return counted.where("rows > 1").select(name, "first", "last")


def spans_of(several: DataFrame) -> list[tuple[str, str]]:
    """What `repeated` or `retried` gives → between which hours (`yyyy-MM-dd HH:mm:ss`) any of these lie."""
    named = [F.date_format(end, hours.FORMAT).alias(end) for end in ("first", "last")]
    found = several.select(*named).distinct().limit(SPANS_MAX).collect()
    if len(found) == SPANS_MAX:
        ends = several.agg(F.min("first").alias("first"), F.max("last").alias("last")).select(*named)
        found = ends.collect()
    return _joined((row["first"], row["last"]) for row in found)


def rows_of(rows: DataFrame, several: DataFrame, spans: Iterable[tuple[str, str]]) -> DataFrame:
    """The state.ROWs of these ids (as `repeated` names them), which lie in these hours only."""
    events = rows.where((F.col("kind") == EVENT) & _within(spans))
    return events.join(several.select("id"), "id", "left_semi").select(*state.ROW)


def _within(spans: Iterable[tuple[str, str]]) -> Column:
    """The condition that a row lies in one of these spans, with literals: Delta reads no other hour for it.

    Most spans are of one hour, and there may be thousands: these are one list, as a chain is too deep for Spark.
    """
    single: list[str] = []
    wide: list[str] = []
    for first, last in spans:
        if first == last:
            single.append(first)
        else:
            wide.append(f"accepted_hour BETWEEN TIMESTAMP '{first}' AND TIMESTAMP '{last}'")
    return F.expr(" OR ".join([hours.sql(single), *wide]))


def _joined(spans: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Spans of hours, those that overlap made one; where too many are wide, one from the first to the last of these."""
    found: list[tuple[str, str]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    wide = [span for span in found if span[0] < span[1]]
    return found if len(wide) <= WIDE_MAX else _joined([*found, (wide[0][0], wide[-1][1])])


def superseded(together: DataFrame) -> DataFrame:
    """Judged rows, one an id → lake.FINDING without kind: what the hours found about these ids holds no more."""
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


def _keyed(rows: DataFrame, seen: Evidence) -> DataFrame:
    """state.ROW → those of it that may be a client's retry, with their `fingerprint`.

    The fingerprint covers the record key; records without a key have no part in it, since values without a key (a
    reading, a counter) repeat without being retries.
    """
    keyed = rows.where((F.col("kind") == EVENT) & F.col("keyed") & F.col("fp").isNotNull())
    return keyed.where(seen.audited(F.col("topic"))).withColumn("fingerprint", F.col("fp"))


def retried(rows: DataFrame, seen: Evidence) -> DataFrame:
    """state.ROW → `fingerprint, first timestamp, last timestamp` of those that several rows have, and their hours."""
    return _several(_keyed(rows, seen), "fingerprint")


def client_duplicates(
    rows: DataFrame, several: DataFrame, spans: Iterable[tuple[str, str]], seen: Evidence
) -> DataFrame:
    """state.ROW → lake.FINDING: other ids with the same fingerprint and record key, accepted within the retention.

    `several` is what `retried` gives of the rows, `spans` where these lie: of all others nothing more is read.
    """
    told = _keyed(rows.where(_within(spans)), seen)
    first = F.struct("accepted_ms", "topic", "partition", "offset", "copied_ms", *_WRITER, "key", "accepted_hour")
    ids = told.join(several.select("fingerprint"), "fingerprint", "left_semi").groupBy("fingerprint", "id")
    rows = ids.agg(F.min(first).alias("first"), F.max("last_ms").alias("last_ms")).select(
        "fingerprint", "id", "last_ms", "first.*"
    )
    order = Window.partitionBy("fingerprint").orderBy("accepted_ms", "id")

    def near(side: str) -> Column:
        step = F.lag if side == "before" else F.lead
        distance = F.abs(F.col("accepted_ms") - step("accepted_ms").over(order))
        other = step("id").over(order) != F.col("id")
        return F.coalesce(other & (distance < seen.key_ttl_ms), F.lit(False))

    near_rows = rows.withColumn("near", near("before") | near("after")).where("near")
    numbered = near_rows.withColumn("nth", F.row_number().over(order))
    place = F.struct(
        "nth",
        "topic",
        "partition",
        "offset",
        F.col("copied_ms").alias("timestamp"),
        *_WRITER,
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
