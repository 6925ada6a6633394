"""One run: plan → read → reduce → merge → judge → find → report. The one place that knows the order."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import reduce as fold
from typing import Any, Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark import (
    decode,
    findings,
    heat,
    ids,
    lake,
    lock,
    offsets,
    publish,
    report,
    source,
    standing,
    state,
    verdict,
    view,
)
from spark.balance import Balance
from spark.kafka import Broker, Place
from spark.offsets import DATA, LEDGER, REQUESTS, Plan
from spark.settings import Settings
from spark.verdict import CATEGORIES

HOUR_FORMAT: Final = "yyyy-MM-dd HH:mm:ss"
# The runs before, of which the report tells.
HISTORY_RUNS: Final = 19

Tell = Callable[[str], None]
"""Where progress is told, a line at a time."""


@dataclass
class Cost:
    """Where the time of a run went: seconds a step, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + round(time.monotonic() - started, 3)


@dataclass(frozen=True)
class Outcome:
    """What a run found: the report's document, and the process's exit status (0 clean, 3 any finding)."""

    document: dict[str, Any]
    status: int


def run(spark: SparkSession, settings: Settings, tell: Tell, now_ms: int | None = None) -> Outcome:
    """Carry out one run, or the rest of one that was cut off. CannotRun where it is not possible.

    The steps that write are each done once for a run's number, in this order: progress (the plan), deliveries,
    findings, runs. What a later step needs of an earlier one it reads from the lake, not from memory, so that the
    same code goes on after a kill at any point.
    """
    with lock.held(spark, settings.options.lake):
        return _Run(spark, settings, tell, int(time.time() * 1000) if now_ms is None else now_ms).carry_out()


class _Run:
    def __init__(self, spark: SparkSession, settings: Settings, tell: Tell, now_ms: int) -> None:
        self.spark = spark
        self.settings = settings
        self.tell = tell
        self.now_ms = now_ms
        self.lake = lake.Lake(spark, settings.options.lake)
        self.cost = Cost()

    def carry_out(self) -> Outcome:
        with self.cost.step("plan"):
            before = self._summary_before()
            plan, resumed = self._plan(before)
            if self.settings.options.publish:
                with closing(Broker(self.spark, self.settings.shared)) as broker:
                    publish.prepare(broker, self.settings.shared.namespace)
        merged = resumed and not self.lake.read("deliveries").where(F.col("run") == plan.run).isEmpty()
        if merged:
            self.tell(f"run {plan.run} was cut off after its merge; going on from there")
        else:
            self._merge(plan)
        with self.cost.step("views"):
            view.update(self.lake, self.settings.shared, plan)
        balance = self._judge(plan, before)
        held = standing.by_hour(self.lake.read("findings"), report.window_from(plan, self.settings)).persist()
        found = standing.whole(held).persist()
        if self.settings.options.publish:
            with self.cost.step("publish"):
                publish.publish(self.lake, self.settings.shared, found)
        with self.cost.step("report"):
            past = before["reports"] if before else []
            outcome = report.build(held, found, plan, self.settings, balance, self.cost.seconds, resumed, past)
            report.write(self.spark, self.settings.options.report, outcome)
        for frame in (held, found):
            frame.unpersist()
        self._done(plan, balance, outcome)
        return Outcome(outcome.document, outcome.status)

    # ------------------------------------------------------------------------------------------------------ plan

    def _summary_before(self) -> dict[str, Any] | None:
        """What the last finished run left: its number, its options, the sums of every hour; and the last reports."""
        last = self.lake.read("runs").orderBy(F.desc("run")).limit(HISTORY_RUNS)
        found = last.agg(
            F.max("run").alias("run"),
            F.max_by("summary", "run").alias("summary"),
            F.sort_array(F.collect_list(F.struct("run", "report")), asc=False)["report"].alias("reports"),
        ).collect()[0]
        if found["run"] is None:
            return None
        reports = [json.loads(one) for one in found["reports"]]
        return {"run": found["run"], "reports": reports, **json.loads(found["summary"])}

    def _plan(self, before: dict[str, Any] | None) -> tuple[Plan, bool]:
        """This run's plan, and whether a run before us made it and was cut off."""
        done = before["run"] if before else 0
        progress = self.lake.read("progress").where(F.col("run").isin(done, done + 1)).collect()
        last = Plan.from_rows(row.asDict(recursive=True) for row in progress if row["run"] == done)
        cut = Plan.from_rows(row.asDict(recursive=True) for row in progress if row["run"] == done + 1)
        if cut is not None:
            applied = not self.lake.read("deliveries").where(F.col("run") == cut.run).isEmpty()
            if applied or cut.options == offsets.options_of(self.settings):
                self.tell(f"taking up run {cut.run}, which was cut off")
                return cut, True
        with closing(Broker(self.spark, self.settings.shared)) as broker:
            plan = offsets.freeze(broker, self.settings, last, self.now_ms, self._discover)
        rows = self.spark.createDataFrame(plan.rows(), lake.schema("progress")).coalesce(1)
        if cut is None:
            self.lake.append("progress", rows, plan.run)
        else:
            self.lake.overwrite("progress", rows, f"run = {plan.run}")
        return plan, False

    def _discover(self, ledger: dict[Place, source.Span], requests: dict[Place, source.Span]) -> set[str]:
        records = self._records(ledger, headers=False).unionByName(self._records(requests, headers=False))
        return {row["topic"] for row in decode.topics_named(records).collect()}

    # ----------------------------------------------------------------------------------------------------- merge

    def _records(self, spans: dict[Place, source.Span], *, headers: bool = True) -> DataFrame:
        return source.read(self.spark, self.settings.shared, spans, headers=headers)

    def _merge(self, plan: Plan) -> None:
        """Read what the plan names, reduce it to one row an id and hour, merge it into the hours that it touches."""
        waiting = sum(log.end - log.start for log in plan.logs if log.audited)
        self.tell(f"run {plan.run}: {waiting} offsets to read in {len(plan.topics)} topics")
        if not waiting:
            return
        evidence = [
            decode.deliveries(self._records(plan.spans(DATA)), plan.frozen_ms),
            decode.ledger(self._records(plan.spans(LEDGER), headers=False), plan.frozen_ms),
            decode.answers(self._records(plan.spans(REQUESTS), headers=False), plan.frozen_ms),
        ]
        rows = state.reduce(fold(DataFrame.unionByName, evidence), plan.run)
        if not self.lake.exists("deliveries"):
            # Nothing to merge with. Rebalanced by hour, so that the first run over a long history makes few files.
            with self.cost.step("read and write"):
                self.lake.append("deliveries", rows.hint("rebalance", "accepted_hour"), plan.run)
            return
        with self.cost.step("read"):
            # Read once, used twice. A checkpoint, not a cache: Delta refuses to merge from a plan that is cached.
            rows = rows.localCheckpoint()
            hours = hours_of(rows)
        with self.cost.step("merge"):
            if hours:
                self.lake.merge(rows, hours, plan.run)

    # ----------------------------------------------------------------------------------------------------- judge

    def _judge(self, plan: Plan, before: dict[str, Any] | None) -> Balance:
        """Judge the hours that this run touched, those whose verdict waits for time, and, over all, the ids."""
        seen = verdict.evidence(plan, self.settings)
        balance = Balance.of(before)
        deliveries = self.lake.read("deliveries")
        with self.cost.step("judge"):
            touched = set(hours_of(deliveries.where(F.col("run") == plan.run)))
            if before is None or before["options"] != plan.options or before["topics"] != plan.topics:
                hours = touched | set(hours_of(deliveries))
            else:
                hours = touched | balance.open_hours()
            rows = deliveries.where(in_hours(sorted(hours)))
            # Two reads: of the plain rows only numbers, of the others, which are few, everything.
            judged = verdict.judge(rows.where("plain = 0"), seen)
            plain = findings.sums(verdict.plainly(rows.where("plain = 1"), seen))
            balance.replace(hours, findings.sums(judged).unionByName(plain).collect())
        with self.cost.step("map"):
            whole = plan.partitions <= heat.PARTITIONS_MAX
            balance.place(hours, heat.cells(rows, partitions=whole).collect() if hours else [])
        found = [findings.of_logs(self.spark, plan)]
        suspects = findings.suspicious(judged).persist(StorageLevel.MEMORY_AND_DISK)
        cached = [suspects]
        found += [findings.of_ids(suspects, seen, findings.HOUR), findings.of_places(suspects, findings.HOUR)]
        scopes = [findings.LOG]
        if not self.settings.options.skip_ids:
            with self.cost.step("ids"):
                several = ids.in_several_hours(deliveries).persist(StorageLevel.MEMORY_AND_DISK)
                cached.append(several)
                found.append(ids.client_duplicates(deliveries, seen))
                scopes.append(findings.IDS)
                balance.adjustment = {}
                if not several.isEmpty():
                    both = ids.across(deliveries, several, seen)
                    cached += [both.rows]
                    balance.adjust(findings.sums(both.apart).collect(), findings.sums(both.together).collect())
                    odd = findings.suspicious(both.together)
                    found += [
                        findings.of_ids(odd, seen, findings.IDS),
                        ids.superseded(both.together),
                    ]
        with self.cost.step("findings"):
            replaced = " OR ".join(
                [f"scope IN ({', '.join(repr(scope) for scope in scopes)})"]
                + ([f"(scope = 'hour' AND {_hours_sql(sorted(hours))})"] if hours else [])
            )
            self.lake.replace("findings", fold(DataFrame.unionByName, found), replaced, plan.run)
        for frame in cached:
            frame.unpersist()
        return balance

    # ------------------------------------------------------------------------------------------------------ done

    def _done(self, plan: Plan, balance: Balance, outcome: report.Report) -> None:
        """The run's row in `runs`, the last thing that it writes: from here on the next run is another one."""
        summary = {"options": plan.options, "topics": plan.topics, **balance.document()}
        row = {
            "run": plan.run,
            "frozen_ms": plan.frozen_ms,
            "verdict": outcome.document["run"]["verdict"],
            "summary": json.dumps(summary),
            "report": json.dumps({name: outcome.document[name] for name in ("run", "balance", "cost")}),
        }
        with self.cost.step("done"):
            rows = self.spark.createDataFrame([row], lake.schema("runs")).coalesce(1)
            self.lake.append("runs", rows, plan.run)


def hours_of(rows: DataFrame) -> list[str]:
    """The hours of rows, as text; as many as there are hours."""
    found = rows.select(F.date_format("accepted_hour", HOUR_FORMAT).alias("hour")).distinct().collect()
    return sorted(row["hour"] for row in found)


def _hours_sql(hours: list[str]) -> str:
    literals = ", ".join(f"TIMESTAMP '{hour}'" for hour in hours)
    return f"accepted_hour IN ({literals})"


def in_hours(hours: list[str]) -> Any:
    return F.expr(_hours_sql(hours)) if hours else F.lit(False)


def told(outcome: Outcome, folder: str) -> str:
    """The outcome in a few lines, for a terminal; `folder` is where the report is."""
    document = outcome.document
    balance = document["balance"]
    parts = "  ".join(f"{name} {balance[name]}" for name in CATEGORIES if balance[name] or name == "delivered_once")
    lines = [
        f"verdict    {document['run']['verdict']}, {document['run']['findings']} findings",
        f"balance    accepted {balance['accepted']} = {parts}",
        f"records    {balance['records']} delivered, {balance['phantom']} phantom",
    ]
    for row in document["causes"]:
        what = f"{row['kind']}{'/' + row['cause'] if row['cause'] else ''}"
        lines.append(f"finding    {what} in {row['topic']}: {row['findings']} findings, {row['records']} records")
    lines.append(f"report     {folder}/report.html")
    return "\n".join(lines) + "\n"
