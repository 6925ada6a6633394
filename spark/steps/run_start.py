"""The start of a run: the lake is upgraded, the run gets its plan, and the topic of findings is checked.

A run that was interrupted after its merge is resumed by its own plan, with the options of that plan. One that was
interrupted before its merge is planned anew.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from spark.engine import frames
from spark.errors import CannotRun
from spark.reading import planning, run_plan
from spark.reading.kafka_admin import KafkaAdmin
from spark.reading.run_plan import LEDGER, Plan, RunContext, of_run
from spark.report import publish
from spark.settings import Settings
from spark.step_timer import OnProgress
from spark.steps import dry_run, finished_runs, maintenance, migrations
from spark.steps.finished_runs import EarlierRuns
from spark.steps.record_reader import RecordReader
from spark.tables import lake_version, schemas, view
from spark.tables.lake import Lake


class Begun(NamedTuple):
    """A run that has its plan. `is_resumed`: the plan is that of an interrupted run, and its records are merged.

    `findings_topic` is the topic of findings before this run, None if the run does not publish; `published` its state
    whose records the outbox has, None if that is not known; `unstored` are rows of `runs` that this run adds to its own
    (last_run_file.LastRun).
    """

    context: RunContext
    is_resumed: bool
    findings_topic: publish.PublishedTopic | None
    published: publish.PublishedTopic | None
    unstored: Sequence[Mapping[str, Any]]


class RunStart:
    """Begins one run. `now_ms` replaces the clock, which is read when the plan is made."""

    def __init__(
        self, lake: Lake, settings: Settings, reader: RecordReader, on_progress: OnProgress, now_ms: int | None
    ) -> None:
        self._lake = lake
        self._settings = settings
        self._reader = reader
        self._on_progress = on_progress
        self._now_ms = now_ms

    def begin(self) -> Begun:
        """Upgrade the lake, plan the run, and check what it publishes."""
        self._reader.expect(0)
        migrations.migrate(self._lake, self._on_progress, self._check_namespace)
        earlier = self._earlier_runs()
        plan, is_resumed = self._plan(earlier)
        settings = self._resumed_settings(plan) if is_resumed else self._settings
        replaced = [other for other in earlier.interrupted.values() if other is not plan]
        complete_plan = earlier.last_plan if earlier.is_complete else None
        kept_from = maintenance.kept_from(plan, complete_plan, settings, earlier.last_run)
        context = RunContext(plan, settings, earlier.last_plan, earlier.last_run, replaced, kept_from)
        return Begun(context, is_resumed, *self._findings_topic(context), earlier.unstored)

    def preview(self) -> dry_run.Preview:
        """Make the plan that `begin` would make, without a write to the lake."""
        self._reader.expect(0)
        lake_version.check(self._lake)
        earlier = self._earlier_runs()
        plan = self._freeze(earlier)
        self._reader.release_claims()
        interrupted = max(earlier.interrupted, default=None)
        return dry_run.Preview(plan, interrupted, of_run(earlier.last_run, "reports", []))

    def _earlier_runs(self) -> EarlierRuns:
        """Read what the lake has of earlier runs; CannotRun if they were of another namespace."""
        earlier = finished_runs.earlier_runs(self._lake)
        if earlier.last_plan is not None:
            self._check_namespace(earlier.last_plan.options)
        return earlier

    def _plan(self, earlier: EarlierRuns) -> tuple[Plan, bool]:
        """Return this run's plan, and whether the plan is that of an interrupted run."""
        newest = earlier.newest
        if newest in earlier.interrupted:
            others = [publish.TABLE, *view.of_topics(self._lake)]
            self._lake.take_over(newest, ["deliveries", *schemas.WRITTEN_AFTER_MERGE, *others])
            # The process of a run that has lost its lease may be alive, and about to merge. After the fence its merge
            # is refused, so that the check after the fence is final.
            self._lake.fence(["deliveries"], newest)
            interrupted = earlier.interrupted[newest]
            if self._has_merged(interrupted):
                self._check_namespace(interrupted.options)
                self._lake.fence(others, newest)
                self._on_progress(f"run {newest} was interrupted after its merge; resuming there")
                return interrupted, True
            self._lake.fence([*schemas.WRITTEN_AFTER_MERGE, *others], newest)
            self._on_progress(f"run {newest} was interrupted before its merge; planning again")
        self._report_identities(earlier.last_plan)
        plan = self._freeze(earlier)
        self._store(plan)
        return plan, False

    def _freeze(self, earlier: EarlierRuns) -> Plan:
        """Make the plan of the run after all earlier ones."""
        now_ms, last_plan = planning.clock_ms(self._now_ms), earlier.last_plan
        named = self._reader.named_topics(now_ms, is_first_run=last_plan is None)
        with closing(KafkaAdmin(self._lake.spark, self._settings.shared)) as admin:
            # The number of an interrupted run is fenced.
            return planning.freeze(admin, self._settings, last_plan, now_ms, named, earlier.newest + 1)

    def _store(self, plan: Plan) -> None:
        """Store the plan; CannotRun if another run has stored a plan under this number, since Delta skips the second
        commit of a number."""
        rows = frames.rows_of(self._lake.spark, schemas.of("progress"), plan.rows())
        self._lake.append_once("progress", rows, plan.run)
        if self._lake.own_commit("progress") is None:
            raise self._lake.fenced(plan.run)

    def _has_merged(self, plan: Plan) -> bool:
        """Check whether an interrupted run has merged its records."""
        return not self._lake.read_cached("deliveries").where(F.col("run") == plan.run).isEmpty()

    def _resumed_settings(self, interrupted: Plan) -> Settings:
        """Return the settings by which an interrupted run is finished, and report if they are others than given."""
        settings = run_plan.resumed_settings(interrupted, self._settings)
        if settings == self._settings:
            return settings
        topics = ",".join(settings.options.topics) or "(none)"
        without = ",".join(settings.options.without_topics) or "(none)"
        ids = "with" if settings.options.skip_ids else "without"
        days = settings.options.keep_days or "(all)"
        self._on_progress(
            f"run {interrupted.run} was planned with other options (--topics {topics}, "
            f"--without-topics {without}, --grace-s {settings.options.grace_s}, "
            f"--window-h {settings.options.window_h}, --keep-days {days}, {ids} --skip-ids, "
            "its key retention, rules or timeouts): finishing it with its own options, then starting a run with those "
            "of this command line"
        )
        return settings

    def _report_identities(self, last_plan: Plan | None) -> None:
        """Report topics whose --identity has changed: rows in the lake keep their ids."""
        if last_plan is None:
            return
        last_identities = json.loads(last_plan.options).get("identity", {})
        identities = dict(self._settings.options.identity)
        read = {log.topic for log in last_plan.logs if log.role != LEDGER and log.end > log.first}
        if names := sorted(name for name in read if last_identities.get(name) != identities.get(name)):
            self._on_progress(
                f"--identity of {', '.join(names)} is another one than in the last run: it applies to what is read "
                "from now on, and what was read before keeps its ids; a --lake at a new folder, with "
                "--replace-findings, applies it to all"
            )

    def _check_namespace(self, options: str) -> None:
        """Check the namespace of the lake by a plan's `options`; CannotRun if it is another one, since by this
        namespace's ledger all records in that lake would be phantoms."""
        of_lake = json.loads(options)["namespace"]
        namespace = self._settings.shared.namespace
        if of_lake != namespace:
            raise CannotRun(
                f"--lake {self._settings.options.lake} is of namespace {of_lake!r}, not {namespace!r}: "
                "set FENCEPOST_NAMESPACE to the namespace of the lake, or use another --lake"
            )

    def _findings_topic(
        self, context: RunContext
    ) -> tuple[publish.PublishedTopic | None, publish.PublishedTopic | None]:
        """Create the topic of findings if needed, and check that this lake may publish. Returns Begun.findings_topic
        and Begun.published."""
        shared, options = context.settings.shared, context.settings.options
        published = publish.PublishedTopic.of(context.of_last_run("published"))
        if not options.publish:
            return None, published
        with closing(KafkaAdmin(self._lake.spark, shared)) as admin:
            topic = publish.prepare(admin, shared.namespace)
        replaces = options.replace_findings or published is not None
        has_taken = publish.check_owner(self._lake, shared, topic, context.plan.run, replaces=replaces)
        return topic, topic if has_taken else published
