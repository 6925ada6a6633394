"""What was last_verdicts of an id, run after run: a verdict that changed keeps what it was before."""

from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark.rule_table import PENDING
from spark.tables import lake

DELIVERED_ONCE: Final = "delivered_once"
_WHOLE: Final = ["accepted_hour", "id"]


def last(verdicts: DataFrame, run: int) -> DataFrame:
    """lake.VERDICT → `accepted_hour, id, before`: what the runs before this one said last."""
    return verdicts.where(F.col("run") < run).groupBy(*_WHOLE).agg(F.max_by("verdict", "run").alias("before"))


def may_change(last_verdicts: DataFrame) -> DataFrame:
    """Those of the last verdicts that a later run may revise: all but `delivered_once`."""
    return last_verdicts.where(F.col("before").isNotNull() & (F.col("before") != DELIVERED_ONCE))


def changed(classified: DataFrame, clean: DataFrame, last_verdicts: DataFrame, run: int, frozen_ms: int) -> DataFrame:
    """lake.VERDICT of the ids whose verdict differs from the last one.

    `classified` as classify.classify gives them, `clean` the clean rows (deliveries.ROW) of ids with a last verdict.
    """
    with_verdict = classified.withColumn("verdict", F.coalesce("category", "phantom"))
    claimed = (F.col("entries_count") > 0) | (F.col("answered_201") > 0)
    arrived = clean.withColumn("verdict", F.when(claimed, DELIVERED_ONCE))
    columns = [*_WHOLE, "key", "topic", "last_ms", "verdict"]
    now = with_verdict.select(*columns).unionByName(arrived.select(*columns)).join(last_verdicts, _WHOLE, "left")
    first = F.col("before").isNull() & (F.coalesce(F.col("verdict"), F.lit(DELIVERED_ONCE)) == DELIVERED_ONCE)
    other = now.where(~F.col("verdict").eqNullSafe(F.col("before")) & ~first)
    fixed = {"run": F.lit(run), "frozen_ms": F.lit(frozen_ms)}
    return other.select(*(fixed.get(name, F.col(name)).cast(kind).alias(name) for name, kind in lake.VERDICT.items()))


def counted(verdicts: DataFrame, since_ms: int) -> dict[str, Any]:
    """The changes whose evidence lies in the window, by kind; `revised` are those of verdicts other than `pending`."""
    changes = verdicts.where((F.col("last_ms") >= since_ms) & F.col("before").isNotNull())
    rows = changes.groupBy("before", "verdict").count().collect()
    found = sorted((row["before"], row["verdict"] or "", row["count"]) for row in rows)
    return {
        "revised": sum(count for before, _, count in found if before != PENDING),
        "changes": [{"before": before, "after": after or None, "ids": count} for before, after, count in found],
    }
