"""What a run says of the ids: of the hours that it touched, and, over all hours, of ids that have several rows."""

from functools import reduce as fold
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark.cost import Cost
from spark.reading.decode import EVENT, REJECT
from spark.reading.planning import Plan, shifted
from spark.report import document, heatmap
from spark.rules import classify, cross_hour, findings
from spark.rules.balance import Balance
from spark.settings import Settings
from spark.tables import deliveries as deliveries_table
from spark.tables import hours, lake, verdict_history
from spark.tables.lake import Lake


class Judgement:
    """One run's. It writes `rejects`, `findings` and `verdicts`, and ends with the balance.

    Of nearly all ids there is one clean row, of which numbers are summed up and no more; whatever else is read, joined
    or kept is about the few others.
    """

    def __init__(
        self, spark: SparkSession, tables: Lake, plan: Plan, last: Plan | None, settings: Settings, cost: Cost
    ) -> None:
        self.spark = spark
        self.lake = tables
        self.plan = plan
        self.last = last
        self.settings = settings
        self.cost = cost
        self.seen = classify.evidence(plan, settings)
        self.kept: list[DataFrame] = []

    def carry_out(self, before: dict[str, Any] | None, kept_from: str) -> Balance:
        """Judge what is to be judged; `before` is what the last run left, `kept_from` the lake's first hour or ""."""
        balance = Balance.of(before)
        balance.forget(kept_from)
        deliveries = self.lake.read("deliveries")
        if kept_from:
            deliveries = deliveries.where(hours.since(kept_from))
        with self.cost.step("judge"):
            touched = self._touched(deliveries, before, balance)
        with self.cost.step("ids"):
            whole = not self.settings.options.skip_ids
            several, many = self._repeated(deliveries if whole else deliveries.where(hours.within(touched)))
            balance.shifted |= shifted(self.plan, self.last)
            if whole and balance.shifted:
                # Their rows are taken out of the sums of hours as they are judged now, so these must be judged now too.
                touched |= set(hours.of(_wide(many, several).where("is_clean = 0")))
                balance.shifted = False
        rows = deliveries.where(hours.within(touched))
        with self.cost.step("judge"):
            judged = self._by_hour(rows, several, many.where(hours.within(touched)), touched, balance)
        with self.cost.step("map"):
            partitions = self.plan.partitions <= heatmap.PARTITIONS_MAX
            balance.place(touched, heatmap.cells(rows, partitions=partitions).collect() if touched else [])
        suspects = findings.suspicious(judged)
        found = [
            findings.of_logs(self.spark, self.plan),
            findings.of_ids(suspects, self.seen, findings.HOUR),
            findings.of_places(suspects, findings.HOUR),
            findings.unkeyed(rows.where("is_clean = 0"), self.seen),
        ]
        replaced = [f"scope = '{findings.LOG}'"]
        if touched:
            replaced.append(f"(scope = '{findings.HOUR}' AND {hours.sql(touched)})")
        if whole:
            with self.cost.step("ids"):
                found += self._over_hours(deliveries, several, many, balance)
                replaced.append(f"scope = '{findings.IDS}'")
        with self.cost.step("findings"):
            united = fold(lambda one, more: one.unionByName(more, allowMissingColumns=True), found)
            united = united.withColumn("run", F.lit(self.plan.run).cast("bigint"))
            self.lake.replace("findings", united, " OR ".join(replaced), self.plan.run)
        with self.cost.step("verdicts"):
            self._keep_history(judged, rows.where("is_clean = 1"), several, touched)
        for frame in self.kept:
            frame.unpersist()
        return balance

    def _touched(self, deliveries: DataFrame, before: dict[str, Any] | None, balance: Balance) -> set[str]:
        """The hours that this run wrote to, those whose verdict waits for time; all where the rules have changed."""
        if before is None or before["options"] != self.plan.options or before["topics"] != self.plan.topics:
            return set(hours.of(deliveries))
        return set(hours.of(deliveries.where(F.col("run") == self.plan.run))) | balance.open_hours()

    def _repeated(self, rows: DataFrame) -> tuple[DataFrame, DataFrame]:
        """Ids with several rows (ids.repeated), and these rows (state.ROW)."""
        several = self._keep(cross_hour.repeated(rows))
        if spans := cross_hour.spans_of(several):
            return several, self._keep(cross_hour.rows_of(rows, several, spans))
        # Spark leaves out whatever is made of nothing.
        return several.where("false"), rows.where("false")

    def _by_hour(
        self, rows: DataFrame, several: DataFrame, many: DataFrame, touched: set[str], balance: Balance
    ) -> DataFrame:
        """The judged rows of these hours that are not clean, or whose id has others; all rows go into the balance."""
        odd = rows.where((F.col("is_clean") == 0) & (F.col("kind") == EVENT)).join(several, "id", "left_anti")
        judged = self._keep(
            classify.judge(deliveries_table.alone(odd).unionByName(deliveries_table.gathered(many)), self.seen)
        )
        clean = rows.where((F.col("is_clean") == 1) | (F.col("kind") != EVENT))
        sums = findings.sums(judged).unionByName(findings.sums(classify.classify_clean(clean, self.seen))).collect()
        twice = findings.sums(classify.classify_clean(many.where("is_clean = 1"), self.seen)).collect()
        balance.replace(touched, sums, twice)
        if any(row["rejects"] for row in sums):
            rejects = rows.where((F.col("run") == self.plan.run) & (F.col("kind") == REJECT) & (F.col("count") > 0))
            told = rejects.withColumn("seen_ms", F.col("last_ms")).select("*", "reject.*").select(*lake.REJECT)
            self.lake.append("rejects", told.coalesce(1), self.plan.run)
        return judged

    def _over_hours(
        self, deliveries: DataFrame, several: DataFrame, many: DataFrame, balance: Balance
    ) -> list[DataFrame]:
        """Findings (lake.FINDING) that no single hour shows; has ids of several hours count once in the balance."""
        wide = _wide(many, several)
        apart = classify.judge(deliveries_table.gathered(wide), self.seen)
        together = classify.judge(deliveries_table.gathered(wide, by_hour=False), self.seen)
        balance.adjust(findings.sums(apart).collect(), findings.sums(together).collect())
        # What is further back is in no report's window, nor near enough to what is.
        first = hours.text_of(document.window_from(self.plan, self.settings) - self.seen.key_ttl_ms)
        recent = deliveries.where(hours.since(first))
        retried = self._keep(cross_hour.retried(recent, self.seen))
        spans = cross_hour.spans_of(retried)
        clients = [cross_hour.client_duplicates(recent, retried, spans, self.seen)] if spans else []
        return [
            *clients,
            findings.of_ids(findings.suspicious(together), self.seen, findings.IDS),
            cross_hour.superseded(together),
        ]

    def _keep_history(self, judged: DataFrame, clean: DataFrame, several: DataFrame, touched: set[str]) -> None:
        """Write down of which ids something else is said now."""
        said = verdict_history.last(self.lake.read("verdicts"), self.plan.run)
        waiting = verdict_history.standing(said)
        theirs = clean.where(hours.within(touched & set(hours.of(waiting))))
        arrived = theirs.join(waiting, ["accepted_hour", "id"], "left_semi").join(several, "id", "left_anti")
        changes = verdict_history.changed(judged, arrived, said, self.plan.run, self.plan.frozen_ms)
        if not changes.isEmpty():
            self.lake.append("verdicts", changes.coalesce(1), self.plan.run)

    def _keep(self, rows: DataFrame) -> DataFrame:
        self.kept.append(rows.persist(StorageLevel.MEMORY_AND_DISK))
        return rows


def _wide(many: DataFrame, several: DataFrame) -> DataFrame:
    """Those of the rows (state.ROW) of ids with several whose id lies in several hours."""
    return many.join(several.where("first < last"), "id", "left_semi")
