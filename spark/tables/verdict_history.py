"""The history of verdicts: one row of the table `verdicts` for each change of an id's verdict."""

from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark import rule_table
from spark.rule_table import DELIVERED_ONCE, PENDING
from spark.tables import lake

_ID: Final = ["accepted_hour", "id"]


def last_verdicts(verdicts: DataFrame, run: int) -> DataFrame:
    """Return the last verdict of each id before this run: lake.VERDICT → `accepted_hour, id, last_verdict`."""
    return verdicts.where(F.col("run") < run).groupBy(*_ID).agg(F.max_by("verdict", "run").alias("last_verdict"))


def may_change(latest: DataFrame) -> DataFrame:
    """Filter last verdicts (from `last_verdicts`) to those that a later run may revise: all but `delivered_once`."""
    return latest.where(F.col("last_verdict").isNotNull() & (F.col("last_verdict") != DELIVERED_ONCE))


def changed(classified: DataFrame, clean: DataFrame | None, latest: DataFrame, run: int, frozen_ms: int) -> DataFrame:
    """Return lake.VERDICT of the ids whose verdict differs from their last verdict.

    `classified` are rows of classify.classify, `clean` the clean rows (deliveries.ROW) of ids with a last verdict
    (None for no rows), `latest` the last verdicts (from `last_verdicts`).
    """
    with_verdict = classified.withColumn("verdict", F.coalesce("category", "phantom"))
    columns = [*_ID, "key", "topic", "last_ms", "verdict"]
    verdicts = with_verdict.select(*columns)
    if clean is not None:
        category = rule_table.clean_category(F.col("entries_count"), F.col("answered_201"))
        clean_verdicts = clean.withColumn("verdict", category)
        verdicts = verdicts.unionByName(clean_verdicts.select(*columns))
    now = verdicts.join(latest, _ID, "left")
    is_first_delivery = F.col("last_verdict").isNull() & (
        F.coalesce(F.col("verdict"), F.lit(DELIVERED_ONCE)) == DELIVERED_ONCE
    )
    different = now.where(~F.col("verdict").eqNullSafe(F.col("last_verdict")) & ~is_first_delivery)
    columns_of_run = {"run": F.lit(run), "frozen_ms": F.lit(frozen_ms), "before": F.col("last_verdict")}
    return different.select(
        *(columns_of_run.get(name, F.col(name)).cast(data_type).alias(name) for name, data_type in lake.VERDICT.items())
    )


def counted(verdicts: DataFrame, since_ms: int) -> dict[str, Any]:
    """Count the changes with evidence in the window, by old and new verdict; `revised` counts those that were not
    `pending` before."""
    changes = verdicts.where((F.col("last_ms") >= since_ms) & F.col("before").isNotNull())
    rows = changes.groupBy("before", "verdict").count().collect()
    found = sorted((row["before"], row["verdict"] or "", row["count"]) for row in rows)
    return {
        "revised": sum(count for before, _, count in found if before != PENDING),
        "changes": [{"before": before, "after": after or None, "ids": count} for before, after, count in found],
    }
