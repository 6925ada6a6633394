"""The history of verdicts: one row of the table `verdicts` for each change of an id's verdict."""

from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark import rule_table
from spark.engine import frames
from spark.rule_table import DELIVERED_ONCE, PENDING
from spark.tables import schemas

_ID: Final = ["accepted_hour", "id"]


class Revisions(NamedTuple):
    """The changed verdicts (schemas.VERDICT) of a report's window.

    `counts` are what the report shows. `oldest_ms` is the least `last_ms` of a changed verdict, None without one: a
    later window that begins at or before it has the same changed verdicts, as long as no verdict changes.
    """

    counts: dict[str, Any]
    oldest_ms: int | None


def last_verdicts(verdicts: DataFrame, run: int) -> DataFrame:
    """Return the last verdict of each id before this run: schemas.VERDICT → `accepted_hour, id, last_verdict`."""
    return verdicts.where(F.col("run") < run).groupBy(*_ID).agg(F.max_by("verdict", "run").alias("last_verdict"))


def may_change(latest: DataFrame) -> DataFrame:
    """Filter last verdicts (from `last_verdicts`) to those that a later run may revise: all but `delivered_once`."""
    return latest.where(F.col("last_verdict").isNotNull() & (F.col("last_verdict") != DELIVERED_ONCE))


def changed(classified: DataFrame, clean: DataFrame | None, latest: DataFrame, run: int, frozen_ms: int) -> DataFrame:
    """Return schemas.VERDICT of the ids whose verdict differs from their last verdict.

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
    compared = verdicts.join(latest, _ID, "left")
    is_first_delivery = F.col("last_verdict").isNull() & (
        F.coalesce(F.col("verdict"), F.lit(DELIVERED_ONCE)) == DELIVERED_ONCE
    )
    different = compared.where(~F.col("verdict").eqNullSafe(F.col("last_verdict")) & ~is_first_delivery)
    columns_of_run = {"run": F.lit(run), "frozen_ms": F.lit(frozen_ms), "before": F.col("last_verdict")}
    columns_of_id = {name: F.col(name) for name in schemas.VERDICT if name not in columns_of_run}
    return frames.typed(different, schemas.VERDICT, columns_of_id | columns_of_run)


def counted(verdicts: DataFrame, since_ms: int) -> Revisions:
    """Count the changes with evidence in the window, by old and new verdict; `revised` counts those that were not
    `pending` before."""
    changes = verdicts.where((F.col("last_ms") >= since_ms) & F.col("before").isNotNull())
    counts = changes.groupBy("before", "verdict").agg(F.count("*").alias("ids"), F.min("last_ms").alias("oldest_ms"))
    rows = counts.collect()
    found = sorted((row["before"], row["verdict"] or "", row["ids"]) for row in rows)
    shown = {
        "revised": sum(ids for before, _, ids in found if before != PENDING),
        "changes": [{"before": before, "after": after or None, "ids": ids} for before, after, ids in found],
    }
    return Revisions(shown, min((row["oldest_ms"] for row in rows), default=None))
