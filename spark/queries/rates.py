"""The command `rates`: surplus copies and latencies by topic, process and caller."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark.queries import export
from spark.reading.decode import EVENT
from spark.rules import cross_hour, current_findings
from spark.rules.kinds import with_surplus
from spark.settings import CSV, RatesOptions, glob_regex
from spark.tables import hours, lake_version
from spark.tables.lake import Lake

FIELDS: Final = (
    "topic",
    "instance",
    "caller",
    "records",
    "surplus_copies",
    "surplus_per_million",
    "latency_p50_ms",
    "latency_p99_ms",
    "latency_max_ms",
)
"""The fields of a row, in this order. `instance` is null for all processes together, and for other writers' records;
`caller` for all callers together, and for records whose caller is not known."""

Key = tuple[str, str | None, str | None]
"""Topic, instance and caller."""


def rates(spark: SparkSession, options: RatesOptions, scopes: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of JSON or CSV, a row for each topic (instance, caller) with records or surplus copies.

    What was accepted, or for surplus copies has evidence, in the window of the last run counts, or since the time of
    the options. `scopes` are those of the callers (Rules.scopes), by which the option `by_caller` knows them. CannotRun
    if the lake has no finished run, or is of an earlier version.
    """
    lake = Lake(spark, options.lake)
    lake_version.check(lake)
    since_ms = export.since(lake, options.since_ms)
    records = {_key(row): row.asDict() for row in _records(lake, options, since_ms, scopes).collect()}
    copies = {_key(row): int(row["copies"]) for row in _surplus(lake, options, since_ms, scopes).collect()}
    keys = sorted({*records, *copies}, key=lambda key: tuple((part is not None, part or "") for part in key))
    rows = [row_of(key, records.get(key), copies.get(key, 0)) for key in keys]
    if options.format == CSV:
        return export.csv_lines(FIELDS, ([*row.values()] for row in rows))
    return (json.dumps(row) + "\n" for row in rows)


def row_of(key: Key, counted: Mapping[str, Any] | None, copies: int) -> dict[str, Any]:
    """Build a row (FIELDS) from the counts of the records of a topic, process and caller, None for no records."""
    records = counted["records"] if counted else 0
    p50, p99 = (counted and counted["latencies"]) or (None, None)
    most = counted["latency_max_ms"] if counted else None
    per_million = round(copies / records * 1e6, 3) if records else None
    return dict(zip(FIELDS, (*key, records, copies, per_million, p50, p99, most), strict=True))


def _key(row: Any) -> Key:
    return row["topic"], row["instance"], row["caller"]


def _records(lake: Lake, options: RatesOptions, since_ms: int, scopes: Sequence[str]) -> DataFrame:
    """Count the records by topic, instance and caller, with the time from acceptance to ledger record."""
    rows = lake.read("deliveries").where(hours.since(hours.text_of(since_ms)))
    delivered = rows.where((F.col("kind") == EVENT) & (F.col("count") > 0) & (F.col("accepted_ms") >= since_ms))
    latency_ms = F.col("entry_seen_ms") - F.col("record_accepted_ms")
    caller = cross_hour.caller_of(scopes) if options.by_caller else _no_name()
    return (
        delivered.where(_is_of(options))
        .groupBy("topic", _instance(options).alias("instance"), caller.alias("caller"))
        .agg(
            F.count(F.lit(1)).alias("records"),
            F.percentile_approx(latency_ms, [0.5, 0.99]).alias("latencies"),
            F.max(latency_ms).alias("latency_max_ms"),
        )
    )


def _surplus(lake: Lake, options: RatesOptions, since_ms: int, scopes: Sequence[str]) -> DataFrame:
    """Count the surplus copies of the current findings by topic, instance and caller; at most 128 of a finding are."""
    found = current_findings.by_finding(current_findings.by_hour(lake.read("findings"), since_ms))
    of_kinds = found.where(F.col("kind").isin(*with_surplus("with_cause")))
    copies = of_kinds.select(F.unhex("id").alias("id"), F.explode("coordinates").alias("copy"))
    each = copies.where("copy.cause is not null").select("id", "copy.topic", "copy.instance").where(_is_of(options))
    caller = _no_name()
    if options.by_caller:
        # Another writer's copy has the caller of the event that it repeats.
        rows = lake.read("deliveries").where(F.col("kind") == EVENT)
        of_ids = rows.join(F.broadcast(each.select("id").distinct()), "id", "left_semi")
        known = of_ids.groupBy("id").agg(F.max(cross_hour.caller_of(scopes)).alias("caller"))
        each, caller = each.join(known, "id", "left"), F.col("caller")
    by = ("topic", _instance(options).alias("instance"), caller.alias("caller"))
    return each.groupBy(*by).agg(F.count(F.lit(1)).alias("copies"))


def _is_of(options: RatesOptions) -> Column:
    """Return the condition that the topic of a row is wanted."""
    return F.col("topic").rlike(glob_regex(options.topics)) if options.topics else F.lit(True)


def _instance(options: RatesOptions) -> Column:
    return F.col("instance") if options.by_instance else _no_name()


def _no_name() -> Column:
    return F.lit(None).cast("string")
