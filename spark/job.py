"""One run of the audit, in order: plan, read, reduce, merge, classify, findings, report.

Its parts: the start (steps.run_start), the records (steps.record_reader), their rows in the lake (spark.tables), the
verdicts about these (spark.rules), and the report (steps.run_report).
"""

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Any, NamedTuple

from pyspark.sql import SparkSession

from spark.engine import frames, session
from spark.reading import decode, planning, run_plan, sinks
from spark.reading.kafka_admin import KafkaAdmin
from spark.reading.run_plan import DATA, LEDGER, REQUESTS, Plan, RunContext, of_run
from spark.report import document
from spark.rules import hourly, sink_audit
from spark.rules.balance import Balance
from spark.rules.completion import complete_rows
from spark.rules.reconcile import reconcile, recount, unchanged_balance
from spark.settings import HOUR_MS, Settings
from spark.step_timer import OnProgress, StepTimer
from spark.steps import dry_run, finished_runs, maintenance, run_report
from spark.steps.record_reader import RecordReader
from spark.steps.run_report import Reported
from spark.steps.run_start import Begun, RunStart
from spark.tables import deliveries, hours, last_run_file, lock, schemas, view
from spark.tables.lake import Lake


class Finished(NamedTuple):
    """A finished run: its report, its plan, the settings by which it was made (those of its plan, if it was interrupted
    before), and its summary as the next run reads it (last_finished_run, without reports)."""

    report: document.Report
    plan: Plan
    settings: Settings
    last_run: Mapping[str, Any]


def run(
    spark: SparkSession,
    settings: Settings,
    on_progress: OnProgress,
    now_ms: int | None = None,
    before: Mapping[str, float] | None = None,
) -> document.Report:
    """Carry out one run as `finish_run` does, and return its report."""
    return finish_run(spark, settings, on_progress, now_ms, before).report


def finish_run(
    spark: SparkSession,
    settings: Settings,
    on_progress: OnProgress,
    now_ms: int | None = None,
    before: Mapping[str, float] | None = None,
    on_step: OnProgress | None = None,
) -> Finished:
    """Carry out one run, or the rest of an interrupted run, and return it; CannotRun if that is not possible.

    `now_ms` replaces the clock, which each run reads when it makes its plan. `before` are steps of the process before
    the run, with their seconds. `on_step` is that of StepTimer.

    An interrupted run that has merged its records is finished with the options of its plan: other options could need
    records that it has not read. A resumed run has the `skip_ids` and `keep_days` of its plan too: it may have
    committed its findings, and Delta skips a second commit. If this command line has other options, a run with these
    follows in this process. A run that was interrupted before its merge is not resumed: this run makes a plan of its
    own.

    Each step after the merge may be repeated by a process that resumes the run. The order of the tables is progress
    (the plan), deliveries, views, rejects, findings, verdicts, mirrored, sinks, published, hourly_balance,
    hourly_records, runs; the maintenance comes last. A step reads the results of earlier steps through the lake, so
    that the same code resumes a run that was killed after its merge.
    """
    decode.check_identities(spark, settings.options.identity)
    sinks.check_rules(spark, settings.rules.sinks)
    with (
        decode.newer_versions_refused(),
        lock.held(spark, settings.options.lake) as check_held,
        session.restored(spark),
    ):
        lake = Lake(spark, settings.options.lake, check_held)
        finished = _Run(lake, settings, StepTimer(on_progress, before, on_step), now_ms).carry_out()
        if finished.settings == settings:
            return finished
        # The interrupted run had other options, those of its plan: now a run with the options of this command line.
        timer = StepTimer(on_progress, on_step=on_step)
        return _Run(lake, settings, timer, now_ms, finished.plan.run).carry_out()


def preview(spark: SparkSession, settings: Settings, on_progress: OnProgress) -> dry_run.Preview:
    """Make the plan of the next run, and carry out nothing: neither lake nor topics are written.

    No lock is needed, so that another run may be at work. CannotRun as for a run.
    """
    with decode.newer_versions_refused(), session.restored(spark):
        lake = Lake(spark, settings.options.lake)
        return RunStart(lake, settings, RecordReader(lake, settings), on_progress, None).preview()


def plan_after(spark: SparkSession, settings: Settings, plan: Plan, now_ms: int | None = None) -> Plan | None:
    """List the logs as for the run after the finished run of `plan`, by requests to Kafka only; nothing is written.

    No topic is looked for in what ledger or journal have of new records: if there are any, the plan is not that of the
    next run. None if another run on the lake has made a plan since.
    """
    if Lake(spark, settings.options.lake).last_committed_run("progress") != plan.run:
        return None
    with closing(KafkaAdmin(spark, settings.shared)) as admin:
        return planning.freeze(admin, settings, plan, planning.clock_ms(now_ms), planning.NONE_NAMED)


class _Run:
    """One run on a lake. `finished_first` is the number of an interrupted run that this process has finished before,
    `now_ms` the time of the plan (None: by the clock)."""

    def __init__(
        self,
        lake: Lake,
        settings: Settings,
        timer: StepTimer,
        now_ms: int | None,
        finished_first: int | None = None,
    ) -> None:
        self.lake = lake
        self.settings = settings
        self.timer = timer
        self.on_progress = timer.on_progress
        self.now_ms = now_ms
        self.finished_first = finished_first
        self.reader = RecordReader(lake, settings)

    def carry_out(self) -> Finished:
        """Carry out the steps that are not yet done."""
        with self.timer.step("plan the run"):
            begun = RunStart(self.lake, self.settings, self.reader, self.on_progress, self.now_ms).begin()
        context, plan = begun.context, begun.context.plan
        if not begun.is_resumed:
            self._merge(context)
        self.reader.release_claims()
        balance = None if begun.is_resumed else unchanged_balance(context)
        if balance is None:
            complete_rows(self.lake, context, self.timer)
        with self.timer.step("update views"):
            view.update(self.lake, context.settings.shared, plan, context.last_plan)
        if balance is None:
            balance = reconcile(self.lake, context, self.timer)
        recounted = not balance.closes(hours.text_of(context.window_from))
        if recounted:
            self.on_progress(f"run {plan.run}: the balance does not close; counting all hours of the lake again")
            with self.timer.step("count again"):
                balance = recount(self.lake, context, balance)
        with self.timer.step("compare sinks"):
            compared = sink_audit.audit(self.lake, context, self.on_progress)
        kind = document.RunKind(begun.is_resumed, self.finished_first, recounted)
        reported = run_report.write(self.lake, begun, balance, compared, kind, self.timer)
        finished, reports = self._finish(begun, balance, reported)
        with self.timer.step("maintain the lake"):
            maintenance.carry_out(self.lake, context)
        # After the maintenance: a run without Spark finds in the file when that was.
        shown = reported.shown and reported.shown._asdict()
        last_run_file.store(self.lake, last_run_file.LastRun({**finished, "reports": reports}, plan.rows(), [], shown))
        return Finished(reported.report, plan, context.settings, finished)

    def _merge(self, context: RunContext) -> None:
        """Read the records of the plan, reduce them to deliveries.ROWs, and merge these into their hours."""
        plan, last_plan, unread = context.plan, context.last_plan, context.plan.unread
        self.on_progress(f"run {plan.run}: {unread} offsets to read in {len(plan.topics)} topics")
        vanished = run_plan.vanished(plan, last_plan)
        if not unread and not vanished:
            return
        spark = self.lake.spark
        self.reader.expect(unread)
        session.size_for(spark, unread)
        claims = self.reader.claims((plan.spans(LEDGER), plan.spans(REQUESTS)), plan.frozen_ms)
        copies = self.reader.copies(plan.spans(DATA), plan.frozen_ms)
        rows = deliveries.reduce(copies, claims, plan.run, _log_facts(context))
        if vanished:
            self.on_progress(
                f"run {plan.run}: {len(vanished)} partitions were truncated; dropping the records that are gone"
            )
            merged_rows = self.lake.read_cached("deliveries")
            rows = deliveries.with_vanished(rows, merged_rows, vanished, plan.topic_ids, plan.run)
        if context.kept_from:
            rows = rows.where(hours.since(context.kept_from))
        with self.timer.step("read records"):
            # A checkpoint, not a cache, since Delta refuses to merge from a cached plan.
            with session.compiling(spark, unread):
                rows = frames.checkpointed(rows)
            with closing(KafkaAdmin(spark, context.settings.shared)) as admin:
                planning.check_read(admin, plan)
        with self.timer.step("merge records"):
            if last_plan is None or not self.lake.exists("deliveries"):
                # There are no rows to merge into. Rebalanced by hour: a run over a long history writes few files.
                rebalanced = rows.hint("rebalance", *schemas.PARTITIONS["deliveries"])
                self.lake.append("deliveries", rebalanced, plan.run, in_memory=rows)
            elif touched := hours.of(rows):
                self.lake.merge(rows, touched, plan.run)

    def _finish(
        self, begun: Begun, balance: Balance, reported: Reported
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Store the sums by hour, and append the run to `runs`. With this row the run is finished, and the next start
        begins a new run. Returns the summary as the next run reads it, and the reports of its history."""
        context = begun.context
        plan, last_run, sums = context.plan, context.last_run, balance.document()
        topic = reported.findings_topic
        maintained_run = plan.run if maintenance.is_part_of(context) else maintenance.newest_maintenance(last_run)
        summary = {
            "options": plan.options,
            "topics": plan.topics,
            "frozen_ms": plan.frozen_ms,
            "kept_from": context.kept_from,
            "caught_up_ms": run_plan.caught_up_ms(plan, last_run),
            "last_pass": finished_runs.last_pass_after(plan.run, context.settings.options, last_run),
            "published": asdict(topic) if topic else of_run(last_run, "published"),
            "webhook": reported.webhook_state,
            "tidied": maintained_run,
            **{name: found for name, found in sums.items() if name not in hourly.STORED},
        }
        with self.timer.step("finish the run"):
            counted_run = hourly.store(self.lake, balance, last_run, plan.run)
            row = finished_runs.row_of(reported.report, plan, summary, counted_run, self.timer)
            rows = frames.rows_of(self.lake.spark, schemas.of("runs"), [*begun.unstored, row])
            self.lake.append_once("runs", rows, plan.run)
            stored = json.loads(row["summary"])
            finished = {"run": plan.run, "counted_run": counted_run, **stored, **hourly.as_stored(sums)}
        return finished, finished_runs.history_of(row, last_run)


def _log_facts(context: RunContext) -> deliveries.LogFacts:
    """Return what the plan of a run says of the logs of its records."""
    plan = context.plan
    return deliveries.LogFacts(
        arrived=run_plan.arrived(plan, context.last_plan),
        exact=_exact_hours(context),
        later_ends=run_plan.later_ends(plan),
        topic_ids=plan.topic_ids,
    )


def _exact_hours(context: RunContext) -> tuple[int, int]:
    """Return the time span (ms) in which records without Fencepost's header count in the hour of their timestamp.

    The span covers the window, the kept days, what was unread, and the longest key retention before these.
    """
    options, frozen_ms = context.settings.options, context.plan.frozen_ms
    back_ms = max(options.window_h, 24 * (options.keep_days or 0)) * HOUR_MS
    return min(frozen_ms - back_ms, context.unread_since) - context.settings.longest_ttl_ms, frozen_ms
