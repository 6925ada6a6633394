"""One run of the audit, in order: plan, read, reduce, merge, classify, findings, report."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from typing import Any, Final, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark import dry_run, finished_runs, frames, maintenance, migrations, session
from spark.errors import CannotRun
from spark.reading import decode, planning, run_plan, sinks, source
from spark.reading.kafka_admin import KafkaAdmin, TopicPartition
from spark.reading.run_plan import DATA, LEDGER, REQUESTS, Log, Plan, RunContext, of_run
from spark.report import document, publish, webhook
from spark.rules import current_findings, hourly, sink_audit
from spark.rules.balance import Balance
from spark.rules.completion import complete_rows
from spark.rules.reconcile import reconcile, recount, unchanged_balance
from spark.settings import HOUR_MS, Settings
from spark.step_timer import OnProgress, StepTimer
from spark.tables import deliveries, hours, lake, lake_version, last_run_file, lock, schemas, verdict_history, view

Spans = dict[TopicPartition, source.Span]

# A ledger record has an entry for each event of a group of requests, a record of the journal their answers. Estimated
# for a first run, which has not yet selected the topics whose records would tell.
CLAIMS_A_RECORD: Final = 20


class Finished(NamedTuple):
    """A finished run: its report, its plan, and its summary as the next run reads it (last_finished_run, without
    reports)."""

    report: document.Report
    plan: Plan
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
    hourly_records, runs; the maintenance comes last. A step reads the results of earlier steps from the lake, not from
    memory, so that the same code resumes a run that was killed after its merge.
    """
    decode.check_identities(spark, settings.options.identity)
    sinks.check_rules(spark, settings.rules.sinks)
    with (
        decode.newer_versions_refused(),
        lock.held(spark, settings.options.lake) as check_held,
        session.restored(spark),
    ):
        tables = lake.Lake(spark, settings.options.lake, check_held)
        first_run = _Run(tables, settings, StepTimer(on_progress, before, on_step), now_ms)
        finished = first_run.carry_out()
        if first_run.settings == settings:
            return finished
        # The interrupted run had other options, those of its plan: now a run with the options of this command line.
        timer = StepTimer(on_progress, on_step=on_step)
        return _Run(tables, settings, timer, now_ms, finished.plan.run).carry_out()


def preview(spark: SparkSession, settings: Settings, on_progress: OnProgress) -> dry_run.Preview:
    """Make the plan of the next run, and carry out nothing: neither lake nor topics are written.

    No lock is needed, so that another run may be at work. CannotRun as for a run.
    """
    with decode.newer_versions_refused(), session.restored(spark):
        return _Run(lake.Lake(spark, settings.options.lake), settings, StepTimer(on_progress), None).preview()


def plan_after(spark: SparkSession, settings: Settings, plan: Plan, now_ms: int | None = None) -> Plan | None:
    """List the logs as for the run after the finished run of `plan`, by requests to Kafka only; nothing is written.

    No topic is looked for in what ledger or journal have of new records: if there are any, the plan is not that of the
    next run. None if another run on the lake has made a plan since.
    """
    if lake.Lake(spark, settings.options.lake).last_committed_run("progress") != plan.run:
        return None
    with closing(KafkaAdmin(spark, settings.shared)) as admin:
        return planning.freeze(admin, settings, plan, planning.clock_ms(now_ms), planning.NONE_NAMED)


class _Run:
    """The state of a run. `finished_first` is the number of an interrupted run that this process has finished before,
    `now_ms` the time of the plan (None: by the clock).

    `last_plan` is the plan of the last finished run, `replaced` the plans of later runs that were interrupted before
    their merge.
    """

    def __init__(
        self,
        tables: lake.Lake,
        settings: Settings,
        timer: StepTimer,
        now_ms: int | None,
        finished_first: int | None = None,
    ) -> None:
        self.spark = tables.spark
        self.settings = settings
        self.finished_first = finished_first
        self.on_progress = timer.on_progress
        self.now_ms = now_ms
        self.lake = tables
        self.timer = timer
        # Whether Spark interprets plans now; None if that is not yet decided.
        self.interprets: bool | None = None
        self.last_plan: Plan | None = None
        self.replaced: Sequence[Plan] = ()
        # The topic of findings; None if the run does not publish.
        self.findings_topic: publish.PublishedTopic | None = None
        # The webhook's state of each finding (webhook.Decision), which the next run reads.
        self.webhook_state: Mapping[str, int] = {}
        # What a run without Spark needs of this run's report; None if it could not repeat the report.
        self.shown: finished_runs.Shown | None = None
        # Whether the last run is known to have come to its end, with its maintenance if that was due.
        self.last_run_is_complete = False
        # Rows of runs without Spark since the last finished run of `runs` (last_run_file.LastRun.unstored).
        self.unstored: Sequence[Mapping[str, Any]] = ()
        # The claims of ledger and journal (deliveries.summarize) that were read for the plan, with their spans.
        self.claims: tuple[tuple[Spans, Spans], DataFrame] | None = None

    def carry_out(self) -> Finished:
        """Carry out the steps that are not yet done."""
        with self.timer.step("plan the run"):
            context, resumed = self._begin()
        plan = context.plan
        if not resumed:
            self._merge(context)
        self._release_claims()
        balance = None if resumed else unchanged_balance(context)
        if balance is None:
            complete_rows(self.lake, context, self.timer)
        with self.timer.step("update views"):
            view.update(self.lake, self.settings.shared, plan, context.last_plan)
        if balance is None:
            balance = reconcile(self.lake, context, self.timer)
        recounted = not balance.closes(hours.text_of(context.window_from))
        if recounted:
            self.on_progress(f"run {plan.run}: the balance does not close; counting all hours of the lake again")
            with self.timer.step("count again"):
                balance = recount(self.lake, context, balance)
        with self.timer.step("compare sinks"):
            compared = sink_audit.audit(self.lake, context, self.on_progress)
        report = self._report(context, balance, compared, document.RunKind(resumed, self.finished_first, recounted))
        finished, reports = self._finish(context, balance, report)
        with self.timer.step("maintain the lake"):
            maintenance.carry_out(self.lake, context)
        # After the maintenance: a run without Spark finds in the file when that was.
        kept = last_run_file.LastRun(
            {**finished, "reports": reports}, plan.rows(), [], self.shown and self.shown._asdict()
        )
        last_run_file.store(self.lake, kept)
        return Finished(report, plan, finished)

    def preview(self) -> dry_run.Preview:
        """Make the plan that `carry_out` would make, without a write to the lake."""
        self._expect(0)
        lake_version.check(self.lake)
        last_run, plans = self._read_last_run()
        interrupted = max(plans, default=None)
        plan = self._freeze(interrupted or of_run(last_run, "run", 0))
        self._release_claims()
        return dry_run.Preview(plan, interrupted, of_run(last_run, "reports", []))

    # ------------------------------------------------------------------------------------------------------ plan

    def _begin(self) -> tuple[RunContext, bool]:
        """Upgrade the lake, plan the run, and check what it publishes. Returns the run's context, and whether the plan
        is that of an interrupted run."""
        self._expect(0)
        migrations.migrate(self.lake, self.on_progress, self._check_namespace)
        last_run, plans = self._read_last_run()
        plan, resumed = self._plan(last_run, plans)
        complete_plan = self.last_plan if self.last_run_is_complete else None
        kept_from = maintenance.kept_from(plan, complete_plan, self.settings, last_run)
        if self.settings.options.publish:
            self.findings_topic = self._prepare_publishing()
            publish.check_owner(
                self.lake,
                self.settings.shared,
                self.findings_topic,
                plan.run,
                replaces=self.settings.options.replace_findings or of_run(last_run, "published") is not None,
            )
        return RunContext(plan, self.settings, self.last_plan, last_run, self.replaced, kept_from), resumed

    def _plan(self, last_run: Mapping[str, Any] | None, plans: dict[int, Plan]) -> tuple[Plan, bool]:
        """Return this run's plan, and whether the plan is that of an interrupted run.

        `plans` are those of the runs that were interrupted since the last finished run, by number.
        """
        last_number = of_run(last_run, "run", 0)
        newest = max(plans, default=last_number)
        if newest > last_number:
            others = [publish.TABLE, *view.of_topics(self.lake)]
            self.lake.take_over(newest, ["deliveries", *schemas.WRITTEN_AFTER_MERGE, *others])
            # The process of a run that has lost its lease may be alive, and about to merge. After the fence its merge
            # is refused, so that the check after the fence is final.
            self.lake.fence(["deliveries"], newest)
            if self._has_merged(plans[newest]):
                interrupted = plans.pop(newest)
                self.replaced = list(plans.values())
                self._check_namespace(interrupted.options)
                self.lake.fence(others, newest)
                self.on_progress(f"run {newest} was interrupted after its merge; resuming there")
                self._use_options_of(interrupted)
                return interrupted, True
            self.lake.fence([*schemas.WRITTEN_AFTER_MERGE, *others], newest)
            self.on_progress(f"run {newest} was interrupted before its merge; planning again")
        self.replaced = list(plans.values())
        self._report_identities()
        plan = self._freeze(newest)
        self._store(plan)
        return plan, False

    def _read_last_run(self) -> tuple[dict[str, Any] | None, dict[int, Plan]]:
        """Read the last finished run and its plan (`last_plan`); return the run, and the plans of the runs that were
        interrupted since, by number."""
        kept = last_run_file.load(self.lake)
        if kept is not None:
            last_run: dict[str, Any] | None = kept.finished
            self.last_plan, plans = Plan.from_rows(kept.plan), {}
            self.unstored, self.last_run_is_complete = kept.unstored, True
        else:
            last_run = finished_runs.last_finished_run(self.lake)
            number = of_run(last_run, "run", 0)
            plans = _plans_of(self.lake.read_cached("progress").where(F.col("run") >= number).collect())
            self.last_plan = plans.pop(number, None)
        if self.last_plan is not None:
            self._check_namespace(self.last_plan.options)
        return last_run, plans

    def _freeze(self, newest: int) -> Plan:
        """Make the plan of the run after the run `newest`."""
        now_ms = planning.clock_ms(self.now_ms)
        with closing(KafkaAdmin(self.spark, self.settings.shared)) as admin:
            named = planning.NamedTopics(partial(self._discover, now_ms), self._topics_in_lake)
            # `newest + 1`: the number of the interrupted run is fenced.
            return planning.freeze(admin, self.settings, self.last_plan, now_ms, named, newest + 1)

    def _store(self, plan: Plan) -> None:
        """Store the plan; CannotRun if another run has stored a plan under this number, since Delta skips the second
        commit of a number."""
        rows = frames.rows_of(self.spark, schemas.of("progress"), plan.rows())
        self.lake.append_once("progress", rows, plan.run)
        if self.lake.own_commit("progress") is None:
            raise self.lake.fenced(plan.run)

    def _has_merged(self, plan: Plan) -> bool:
        """Check whether an interrupted run has merged its records."""
        return not self.lake.read_cached("deliveries").where(F.col("run") == plan.run).isEmpty()

    def _use_options_of(self, interrupted: Plan) -> None:
        """Use the options of an interrupted run's plan for the rest of that run."""
        settings = run_plan.resumed_settings(interrupted, self.settings)
        if settings == self.settings:
            return
        self.settings = settings
        topics = ",".join(settings.options.topics) or "(none)"
        without = ",".join(settings.options.without_topics) or "(none)"
        ids = "with" if settings.options.skip_ids else "without"
        days = settings.options.keep_days or "(all)"
        self.on_progress(
            f"run {interrupted.run} was planned with other options (--topics {topics}, "
            f"--without-topics {without}, --grace-s {settings.options.grace_s}, "
            f"--window-h {settings.options.window_h}, --keep-days {days}, {ids} --skip-ids, "
            "its key retention, rules or timeouts): finishing it with its own options, then starting a run with those "
            "of this command line"
        )

    def _report_identities(self) -> None:
        """Report topics whose --identity has changed: rows in the lake keep their ids."""
        if self.last_plan is None:
            return
        last_identities = json.loads(self.last_plan.options).get("identity", {})
        identities = dict(self.settings.options.identity)
        read = {log.topic for log in self.last_plan.logs if log.role != LEDGER and log.end > log.first}
        if names := sorted(name for name in read if last_identities.get(name) != identities.get(name)):
            self.on_progress(
                f"--identity of {', '.join(names)} is another one than in the last run: it applies to what is read "
                "from now on, and what was read before keeps its ids; a --lake at a new folder, with "
                "--replace-findings, applies it to all"
            )

    def _check_namespace(self, options: str) -> None:
        """Check the namespace of the lake by a plan's `options`; CannotRun if it is another one, since by this
        namespace's ledger all records in that lake would be phantoms."""
        of_lake = json.loads(options)["namespace"]
        namespace = self.settings.shared.namespace
        if of_lake != namespace:
            raise CannotRun(
                f"--lake {self.settings.options.lake} is of namespace {of_lake!r}, not {namespace!r}: "
                "set FENCEPOST_NAMESPACE to the namespace of the lake, or use another --lake"
            )

    def _prepare_publishing(self) -> publish.PublishedTopic:
        """Create the topic of findings if needed."""
        with closing(KafkaAdmin(self.spark, self.settings.shared)) as admin:
            return publish.prepare(admin, self.settings.shared.namespace)

    def _discover(self, frozen_ms: int, logs: Sequence[Log], names: Sequence[str]) -> set[str]:
        """Return those of the topics that ledger or journal name; the decoded claims are kept for the merge."""
        spans = run_plan.spans_of(logs, LEDGER), run_plan.spans_of(logs, REQUESTS)
        if not any(first < end for of_role in spans for first, end in of_role.values()):
            return set()
        unread = sum(log.end - log.start for log in logs) * (1 if self.last_plan else CLAIMS_A_RECORD)
        unread = min(unread, self.settings.options.max_records or unread)
        self._expect(unread)
        parts = session.size_for(self.spark, unread)
        claims = deliveries.summarize(self._read_claims(spans, frozen_ms), parts)
        claims.persist(StorageLevel.MEMORY_AND_DISK)
        self._release_claims()
        self.claims = spans, claims
        return _topics(claims.where(deliveries.WRITTEN)) & set(names)

    def _release_claims(self) -> None:
        """Drop the claims that were read for the plan from the cache."""
        if self.claims is not None:
            self.claims[1].unpersist()

    def _topics_in_lake(self) -> set[str]:
        """Return the topics that ledger or journal name, from what earlier runs have merged."""
        return _topics(self.lake.read_cached("deliveries").where(deliveries.WRITTEN))

    def _expect(self, unread: int) -> None:
        """Let Spark interpret the run's plans, until the lake or the records to read are found to be large."""
        interprets = unread <= session.INTERPRETED_RECORDS and self.lake.is_small("deliveries")
        # Not changed back: the number of shuffle partitions is never lowered during a run.
        if self.interprets is None or (self.interprets and not interprets):
            self.interprets = interprets
            session.interpret(self.spark, interprets=interprets)

    # ----------------------------------------------------------------------------------------------------- merge

    def _records(self, spans: Spans, *, headers: bool = True) -> DataFrame:
        """Read the records of these spans (source.SCHEMA); few records in few tasks, not in one for each partition, and
        many in at least as many tasks as there are cores, also those of one partition."""
        offsets = sum(end - first for first, end in spans.values())
        tasks = None if self.interprets else session.tasks_for(self.spark, offsets)
        records = source.read(self.spark, self.settings.shared, spans, headers=headers, tasks=tasks)
        return records.coalesce(self.spark.sparkContext.defaultParallelism) if self.interprets else records

    def _read_claims(self, spans: tuple[Spans, Spans], frozen_ms: int) -> DataFrame:
        """Read the claims (decode.CLAIMS) of ledger and journal in their spans."""
        ledger, answers = (self._records(of_role, headers=False) for of_role in spans)
        return decode.ledger(ledger, frozen_ms).unionByName(decode.answers(answers, frozen_ms))

    def _merge(self, context: RunContext) -> None:
        """Read the records of the plan, reduce them to deliveries.ROWs, and merge these into their hours."""
        plan, last_plan, unread = context.plan, context.last_plan, context.plan.unread
        self.on_progress(f"run {plan.run}: {unread} offsets to read in {len(plan.topics)} topics")
        vanished = run_plan.vanished(plan, last_plan)
        if not unread and not vanished:
            return
        self._expect(unread)
        session.size_for(self.spark, unread)
        spans = plan.spans(LEDGER), plan.spans(REQUESTS)
        if self.claims is not None and self.claims[0] == spans:
            claims = self.claims[1]
        else:
            claims = deliveries.summarize(self._read_claims(spans, plan.frozen_ms))
        copies = decode.copies(self._records(plan.spans(DATA)), plan.frozen_ms, self.settings.options.identity)
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
            rows = frames.checkpointed(rows)
            with closing(KafkaAdmin(self.spark, self.settings.shared)) as admin:
                planning.check_read(admin, plan)
        with self.timer.step("merge records"):
            if last_plan is None or not self.lake.exists("deliveries"):
                # There are no rows to merge into. Rebalanced by hour: a run over a long history writes few files.
                self.lake.append("deliveries", rows.hint("rebalance", *schemas.PARTITIONS["deliveries"]), plan.run)
            elif touched := hours.of(rows):
                self.lake.merge(rows, touched, plan.run)

    # ------------------------------------------------------------------------------------------------------ done

    def _report(
        self,
        context: RunContext,
        balance: Balance,
        compared: Sequence[sink_audit.SinkReport],
        kind: document.RunKind,
    ) -> document.Report:
        """Close the balance, publish the current findings, and write the report; CannotRun before that if the balance
        does not close."""
        window_from = context.window_from
        closed = balance.close(hours.text_of(window_from))
        with ExitStack() as cache:
            by_hour = frames.cached(current_findings.by_hour(self._findings(window_from), window_from), cache)
            found = frames.cached(current_findings.by_finding(by_hour), cache)
            if self.findings_topic is not None:
                with self.timer.step("publish findings"):
                    self.findings_topic = self._publish(self.findings_topic, found, context)
            with self.timer.step("write the report"):
                collected = document.collect(by_hour, found, context)
                revised = verdict_history.counted(self.lake.read_cached("verdicts"), window_from)
                results = document.Results(collected, closed, revised.counts, compared)
                report = document.build(results, context, kind, self.timer)
                if collected.number <= finished_runs.SHOWN_MAX and not context.settings.rules.sinks:
                    oldest_ms = current_findings.oldest_ms(by_hour) if collected.number else None
                    self.shown = finished_runs.Shown.of(context, collected, revised, oldest_ms)
                self.lake.check_held()
                report = self._notify(report, context)
                document.write(self.spark, self.settings.options.report, report)
        return report

    def _findings(self, window_from: int) -> DataFrame:
        """Read the findings of the lake, those about sinks included."""
        findings = self.lake.read_cached("findings")
        if findings.isEmpty():
            # Without rows Spark plans next to nothing of what follows.
            findings = frames.rows_of(self.spark, schemas.of("findings"), [])
        return sink_audit.with_findings(self.lake, findings, window_from)

    def _publish(self, topic: publish.PublishedTopic, found: DataFrame, context: RunContext) -> publish.PublishedTopic:
        """Send the changes of the current findings to their topic; returns the topic as it is then."""
        last = publish.PublishedTopic.of(context.of_last_run("published"))
        return publish.publish(self.lake, self.settings.shared, found, topic, last, context.plan.run)

    def _notify(self, report: document.Report, context: RunContext) -> document.Report:
        """Send the new findings of a report to the webhook, if there is one; returns the report with the outcome.

        A delivery that fails does not fail the run.
        """
        hook = self.settings.webhook
        self.webhook_state = context.of_last_run("webhook", {})
        if hook is None:
            return report
        made, run = report.document, report.document["run"]
        decision = webhook.decide(made["findings"], run["fail_on"], self.webhook_state, hook.after)
        self.webhook_state = decision.sent
        if not decision.due:
            return report
        body = webhook.body_of(made, decision.due, self.settings.options.report, hook.format)
        error = webhook.send(hook, body, webhook.key_of(made, decision.due))
        if error is not None:
            self.webhook_state = decision.failed
            self.on_progress(f"--webhook: not delivered, and sent again by the next run: {error}")
        return document.Report({**made, "webhook": {"findings": len(decision.due), "error": error}})

    def _finish(
        self, context: RunContext, balance: Balance, report: document.Report
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Store the sums by hour, and append the run to `runs`. With this row the run is finished, and the next start
        begins a new run. Returns the summary as the next run reads it, and the reports of its history."""
        plan, last_run, sums = context.plan, context.last_run, balance.document()
        summary = {
            "options": plan.options,
            "topics": plan.topics,
            "frozen_ms": plan.frozen_ms,
            "kept_from": context.kept_from,
            "caught_up_ms": run_plan.caught_up_ms(plan, last_run),
            "last_pass": finished_runs.last_pass_after(plan.run, self.settings.options, last_run),
            "published": asdict(self.findings_topic) if self.findings_topic else of_run(last_run, "published"),
            "webhook": self.webhook_state,
            "tidied": plan.run if maintenance.is_part_of(context) else maintenance.newest_maintenance(last_run),
            **{name: found for name, found in sums.items() if name not in hourly.STORED},
        }
        with self.timer.step("finish the run"):
            counted_run = hourly.store(self.lake, balance, last_run, plan.run)
            row = finished_runs.row_of(report, plan, summary, counted_run, self.timer)
            rows = frames.rows_of(self.spark, schemas.of("runs"), [*self.unstored, row])
            self.lake.append_once("runs", rows, plan.run)
            stored = json.loads(row["summary"])
            finished = {"run": plan.run, "counted_run": counted_run, **stored, **hourly.as_stored(sums)}
        return finished, finished_runs.history_of(row, last_run)


def _plans_of(rows: Iterable[Row]) -> dict[int, Plan]:
    """Build the plans of rows of `progress`, by run, in the order of the runs."""
    by_run: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_run.setdefault(row["run"], []).append(row.asDict(recursive=True))
    plans = (Plan.from_rows(by_run[run]) for run in sorted(by_run))
    return {plan.run: plan for plan in plans if plan is not None}


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


def _topics(rows: DataFrame) -> set[str]:
    """Collect the distinct topics of rows."""
    return {row["topic"] for row in rows.select("topic").distinct().collect()}
