"""One run: plan → read → reduce → merge → judge → find → report. The one place that knows the order."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark import session
from spark.errors import CannotRun
from spark.reading import decode, planning, source, wire_expressions
from spark.reading.kafka_admin import Broker, TopicPartition
from spark.reading.planning import DATA, LEDGER, REQUESTS, Log, Plan
from spark.report import document, publish
from spark.report.model import Document
from spark.rules import cross_hour, current_findings
from spark.rules.balance import Balance
from spark.rules.classify import CATEGORIES
from spark.rules.reconcile import reconcile
from spark.settings import HOUR_MS, Settings
from spark.step_timer import OnProgress, StepTimer
from spark.tables import deliveries, hours, lake, lock, verdict_history, view

Spans = dict[TopicPartition, source.Span]

# The runs before, of which the report tells.
HISTORY_RUNS: Final = 19


@dataclass(frozen=True)
class Outcome:
    """What a run found: the report's document, and the process's exit status (0 clean, 3 any finding)."""

    document: Document
    status: int


def run(spark: SparkSession, settings: Settings, on_progress: OnProgress, now_ms: int | None = None) -> Outcome:
    """Carry out one run, or the rest of one that was cut off. CannotRun where it is not possible.

    The rest of a run that had merged what it read is carried out by the options that it was planned with: its plan says
    what was read, and other options would judge by what was not. Where this command line has others, a run by these
    follows at once.

    The steps that write are each done once for a run's number, in this order: progress (the plan), deliveries,
    rejects, findings, verdicts, runs; tidying up comes last, and is no harm when it is done twice. What a later step
    needs of an earlier one it reads from the lake, not from memory, so that the same code goes on after a kill at any
    point.
    """
    decode.check_identities(spark, settings.options.identity)
    with lock.held(spark, settings.options.lake):
        now_ms = int(time.time() * 1000) if now_ms is None else now_ms
        first = _Run(spark, settings, on_progress, now_ms)
        outcome = first.carry_out()
        if first.settings == settings:
            return outcome
        # What was cut off is finished, by the options that it was planned with. Now what this command line asks for.
        return _Run(spark, settings, on_progress, now_ms, finished=outcome.document["run"]["number"]).carry_out()


def before_now(tables: lake.Lake) -> dict[str, Any] | None:
    """What the last finished run left: its number, its options, the sums of every hour; and the last reports.

    The newest number comes first, from Delta's statistics: by it Delta knows which files hold the last runs.
    """
    runs = tables.read("runs")
    newest = runs.agg(F.max("run")).collect()[0][0]
    if newest is None:
        return None
    last = runs.where(F.col("run") > newest - HISTORY_RUNS).orderBy(F.desc("run"))
    reports = [json.loads(row["report"]) for row in last.select("report").collect()]
    (summary,) = runs.where(F.col("run") == newest).select("summary").collect()
    return {"run": newest, "reports": reports, **json.loads(summary["summary"])}


class _Run:
    """`finished` is the number of a run with other options that this process has finished before."""

    def __init__(
        self, spark: SparkSession, settings: Settings, on_progress: OnProgress, now_ms: int, finished: int | None = None
    ) -> None:
        self.spark = spark
        self.settings = settings
        self.finished = finished
        self.on_progress = on_progress
        self.now_ms = now_ms
        self.lake = lake.Lake(spark, settings.options.lake)
        self.timer = StepTimer(on_progress)
        self.kept_from = ""
        self.last: Plan | None = None
        # The claims of ledger and journal (deliveries.summarize) that the plan has read already, and their spans.
        self.claims: tuple[tuple[Spans, Spans], DataFrame] | None = None

    def carry_out(self) -> Outcome:
        with self.timer.step("plan"):
            self.lake.upgrade()
            before = before_now(self.lake)
            plan, resumed = self._plan(before)
            self.kept_from = _kept_from(plan, self.settings.options.keep_days, before)
            if self.settings.options.publish:
                with closing(Broker(self.spark, self.settings.shared)) as broker:
                    publish.prepare(broker, self.settings.shared.namespace)
        merged = resumed and not self.lake.read("deliveries").where(F.col("run") == plan.run).isEmpty()
        if merged:
            self.on_progress(f"run {plan.run} was cut off after its merge; going on from there")
        else:
            self._merge(plan)
        if self.claims is not None:
            self.claims[1].unpersist()
        if not self.settings.options.skip_ids:
            with self.timer.step("ids"):
                self._rename(plan)
        with self.timer.step("unsure"):
            self._settle(plan)
        with self.timer.step("views"):
            view.update(self.lake, self.settings.shared, plan, self.last)
        balance = reconcile(self.spark, self.lake, plan, self.last, self.settings, self.timer, before, self.kept_from)
        window_from = planning.window_from(plan, self.settings)
        by_hour = current_findings.by_hour(self.lake.read("findings"), window_from).persist()
        found = current_findings.by_finding(by_hour).persist()
        if self.settings.options.publish:
            with self.timer.step("publish"):
                publish.publish(self.lake, self.settings.shared, found)
        with self.timer.step("report"):
            past = before["reports"] if before else []
            revised = verdict_history.counted(self.lake.read("verdicts"), window_from)
            outcome = document.build(
                by_hour, found, plan, self.settings, balance, self.timer.seconds, resumed, past, revised, self.finished
            )
            document.write(self.spark, self.settings.options.report, outcome)
        for frame in (by_hour, found):
            frame.unpersist()
        self._done(plan, balance, outcome)
        with self.timer.step("tidy"):
            self._tidy(plan, before)
        return Outcome(outcome.document, outcome.status)

    # ------------------------------------------------------------------------------------------------------ plan

    def _plan(self, before: dict[str, Any] | None) -> tuple[Plan, bool]:
        """This run's plan, and whether a run before us made it and was cut off."""
        done = before["run"] if before else 0
        progress = self.lake.read("progress").where(F.col("run") >= done).collect()
        newest = max((row["run"] for row in progress), default=done)
        self.last = Plan.from_rows(row.asDict(recursive=True) for row in progress if row["run"] == done)
        cut = Plan.from_rows(row.asDict(recursive=True) for row in progress if row["run"] == newest > done)
        self._check_namespace(self.last)
        if cut is not None:
            if self._goes_on(cut):
                self.on_progress(f"taking up run {cut.run}, which was cut off")
                self._take_options_of(cut)
                return cut, True
            self.on_progress(f"run {cut.run} was cut off before it merged; planning it anew")
        self._tell_identities()
        with closing(Broker(self.spark, self.settings.shared)) as broker:
            # Never the number of one that was cut off: what that one has written already would count as ours.
            plan = planning.freeze(
                broker, self.settings, self.last, self.now_ms, self._discover, self._named, newest + 1
            )
        rows = wire_expressions.rows_of(self.spark, lake.schema("progress"), plan.rows())
        if cut is None:
            self.lake.append("progress", rows, plan.run)
        else:
            self.lake.overwrite("progress", rows, f"run > {done}")
        return plan, False

    def _goes_on(self, cut: Plan) -> bool:
        """Whether a plan that was cut off is carried out: always once it is merged, else if it is what is wanted, and
        all that it would read is still there."""
        if not self.lake.read("deliveries").where(F.col("run") == cut.run).isEmpty():
            self._check_namespace(cut)
            return True
        if cut.options != planning.options_of(self.settings):
            return False
        with closing(Broker(self.spark, self.settings.shared)) as broker:
            return planning.readable(broker, cut)

    def _take_options_of(self, cut: Plan) -> None:
        """Have the rest of a run judged by the options that it was planned with."""
        if cut.options == planning.options_of(self.settings):
            return
        self.settings = planning.settings_of(cut.options, self.settings)
        topics = ",".join(self.settings.options.topics) or "(none)"
        self.on_progress(
            f"run {cut.run} was planned with other options (--topics {topics}, --grace-s "
            f"{self.settings.options.grace_s}, --window-h {self.settings.options.window_h}, its key retention, rules "
            "or timeouts): finishing it by its own, then planning anew by those of this command line"
        )

    def _tell_identities(self) -> None:
        """Report topics whose --identity changed: what is in the lake keeps the ids that it has."""
        if self.last is None:
            return
        theirs, ours = json.loads(self.last.options).get("identity", {}), dict(self.settings.options.identity)
        read = {log.topic for log in self.last.logs if log.role != LEDGER and log.end > log.first}
        if names := sorted(name for name in read if theirs.get(name) != ours.get(name)):
            self.on_progress(
                f"--identity of {', '.join(names)} is another one than the last run's: it holds for what is read from "
                "now on, and what was read keeps its ids; a --lake at a new folder reads all of it by this one"
            )

    def _check_namespace(self, plan: Plan | None) -> None:
        """CannotRun where the lake holds what another namespace's run has read: by this one's ledger all of that would
        be phantoms."""
        theirs = None if plan is None else json.loads(plan.options)["namespace"]
        ours = self.settings.shared.namespace
        if theirs not in (None, ours):
            raise CannotRun(
                f"--lake {self.settings.options.lake} is of namespace {theirs!r}, not {ours!r}: "
                "set FENCEPOST_NAMESPACE to that, or name another --lake"
            )

    def _discover(self, logs: Sequence[Log], names: Sequence[str]) -> set[str]:
        """Those of the topics that ledger or journal name. What is decoded for that is kept for the merge."""
        spans = planning.spans_of(logs, LEDGER), planning.spans_of(logs, REQUESTS)
        claims = self._read_claims(spans, self.now_ms)
        if self.settings.options.max_records is not None:  # the merge reads less
            return _topics(claims.where(decode.WRITTEN)) & set(names)
        parts = session.size_for(self.spark, sum(log.end - log.start for log in logs))
        claims = deliveries.summarize(claims, parts).persist(StorageLevel.MEMORY_AND_DISK)
        if self.claims is not None:
            self.claims[1].unpersist()
        self.claims = spans, claims
        return _topics(claims.where(deliveries.WRITTEN)) & set(names)

    def _named(self) -> set[str]:
        """The topics that ledger or journal name in all that earlier runs have merged."""
        return _topics(self.lake.read("deliveries").where(deliveries.WRITTEN))

    # ----------------------------------------------------------------------------------------------------- merge

    def _records(self, spans: Spans, *, headers: bool = True) -> DataFrame:
        return source.read(self.spark, self.settings.shared, spans, headers=headers)

    def _read_claims(self, spans: tuple[Spans, Spans], frozen_ms: int) -> DataFrame:
        """What ledger and journal say within their spans (decode.CLAIMS)."""
        ledger, answers = (self._records(one, headers=False) for one in spans)
        return decode.ledger(ledger, frozen_ms).unionByName(decode.answers(answers, frozen_ms))

    def _merge(self, plan: Plan) -> None:
        """Read what the plan names, reduce it to rows of the state, merge these into the hours that they touch."""
        waiting = sum(log.end - log.start for log in plan.logs if log.audited)
        self.on_progress(f"run {plan.run}: {waiting} offsets to read in {len(plan.topics)} topics")
        vanished = planning.vanished(plan, self.last)
        if not waiting and not vanished:
            return
        session.size_for(self.spark, waiting)
        spans = plan.spans(LEDGER), plan.spans(REQUESTS)
        if self.claims is not None and self.claims[0] == spans:
            claims = self.claims[1]
        else:
            claims = deliveries.summarize(self._read_claims(spans, plan.frozen_ms))
        copies = decode.deliveries(self._records(plan.spans(DATA)), plan.frozen_ms, self.settings.options.identity)
        exact = self._exact_hours(plan)
        arrived, ended = planning.arrived(plan, self.last), planning.ended(plan)
        rows = deliveries.reduce(copies, claims, plan.run, arrived, exact, ended)
        if vanished:
            self.on_progress(
                f"run {plan.run}: what was read of {len(vanished)} partitions is theirs no more from some offset on"
            )
            rows = deliveries.without(rows, self.lake.read("deliveries"), vanished, plan.run)
        if self.kept_from:
            rows = rows.where(hours.since(self.kept_from))
        if not self.lake.exists("deliveries"):
            # Nothing to merge with. Rebalanced by hour, so that the first run over a long history makes few files.
            with self.timer.step("read and write"):
                self.lake.append("deliveries", rows.hint("rebalance", *lake.PARTITIONS["deliveries"]), plan.run)
            return
        with self.timer.step("read"):
            # Read once, used twice. A checkpoint, not a cache: Delta refuses to merge from a plan that is cached.
            rows = rows.localCheckpoint()
            touched = hours.of(rows)
        with self.timer.step("merge"):
            if touched:
                self.lake.merge(rows, touched, plan.run)

    def _exact_hours(self, plan: Plan) -> tuple[int, int]:
        """From when to when (ms) others' records lie in the hour of their timestamps: where an option still looks."""
        options = self.settings.options
        back_ms = max(options.window_h, 24 * (options.keep_days or 0)) * HOUR_MS + self.settings.key_ttl_ms
        return plan.frozen_ms - back_ms, plan.frozen_ms

    def _rename(self, plan: Plan) -> None:
        """Put copies that have only a key under the id whose event they are copies of."""
        self._update(cross_hour.misnamed(self._recent(plan), plan.run), self.lake.rename, plan.run)

    def _settle(self, plan: Plan) -> None:
        """Note of each 202 or 504 what other hours know of its id, also where the pass over all ids is left out."""
        self._update(cross_hour.known_elsewhere(self._recent(plan), plan.run), self.lake.settle, plan.run)

    def _recent(self, plan: Plan) -> DataFrame:
        """The rows (deliveries.ROW) of the report's window, and of the keys' retention before it."""
        since_ms = planning.window_from(plan, self.settings) - self.settings.key_ttl_ms
        return self.lake.read("deliveries").where(hours.since(hours.text_of(since_ms)))

    @staticmethod
    def _update(found: DataFrame | None, write: Callable[[DataFrame, list[str], int], None], run: int) -> None:
        """Write what was found of rows, into the hours in which these lie."""
        if found is None:
            return
        # A checkpoint, as in `_merge`: what is read must not be what is written.
        found = found.localCheckpoint()
        if touched := hours.of(found):
            write(found, touched, run)

    # ------------------------------------------------------------------------------------------------------ done

    def _done(self, plan: Plan, balance: Balance, outcome: document.Report) -> None:
        """The run's row in `runs`, the last thing that it writes: from here on the next run is another one."""
        summary = {
            "options": plan.options,
            "topics": plan.topics,
            "frozen_ms": plan.frozen_ms,
            "kept_from": self.kept_from,
            **balance.document(),
        }
        row = {
            "run": plan.run,
            "frozen_ms": plan.frozen_ms,
            "verdict": outcome.document["run"]["verdict"],
            "summary": json.dumps(summary),
            "report": json.dumps({name: outcome.document[name] for name in ("run", "balance", "cost")}),
        }
        with self.timer.step("done"):
            rows = wire_expressions.rows_of(self.spark, lake.schema("runs"), [row])
            self.lake.append("runs", rows, plan.run)

    def _tidy(self, plan: Plan, before: dict[str, Any] | None) -> None:
        """Drop, compact and delete what the options say."""
        options = self.settings.options
        if options.keep_days is not None and self.kept_from != (before or {}).get("kept_from"):
            self.lake.delete_before(self.kept_from, plan.run)
        if options.optimize:
            # An hour once it is over, and again when something late came into it.
            now = hours.text_of(plan.frozen_ms)
            late = hours.of(self.lake.read("deliveries").where(F.col("run") == plan.run))
            self.lake.optimize(sorted({hour for hour in late if hour < now} | _ended(before, plan)))
        if options.vacuum_h is not None:
            self.lake.vacuum(options.vacuum_h, [*lake.SCHEMAS, publish.TABLE, lock.TABLE, *view.tables(self.lake)])


def _topics(rows: DataFrame) -> set[str]:
    return {row["topic"] for row in rows.select("topic").distinct().collect()}


def _kept_from(plan: Plan, keep_days: int | None, before: dict[str, Any] | None) -> str:
    """The first hour that the lake keeps; "" for all. It never moves back: what is gone is gone."""
    kept: str = (before or {}).get("kept_from", "")
    return kept if keep_days is None else max(kept, hours.text_of(plan.frozen_ms - keep_days * 24 * HOUR_MS))


def _ended(before: dict[str, Any] | None, plan: Plan) -> set[str]:
    """The hours that came to their end since the last run."""
    if before is None:
        return set()
    first, last = before["frozen_ms"] // HOUR_MS, plan.frozen_ms // HOUR_MS
    return {hours.text_of(hour * HOUR_MS) for hour in range(max(first, last - 24), last)}


def summary(outcome: Outcome, folder: str) -> str:
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
