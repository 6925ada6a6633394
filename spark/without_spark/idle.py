"""A run without Spark, for logs that have nothing new.

Such a run is shorter than the start of Spark. Its verdicts are those of the last run (`unchanged_balance`), and its
report shows the same findings at another time. The last run has stored what its report shows of the lake in a file
(last_run_file, finished_runs.Shown). The run without Spark reads this file, makes its plan as any run does
(planning.freeze), writes the report, and stores its own summary in the file.

Lake and report must be in local folders. If the run has more to do, or may have, NeedsSpark is raised before anything
is written, and the process makes a run with Spark.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from service.contract.wire.names import findings_topic
from spark.errors import CannotRun, NeedsSpark
from spark.reading import planning, run_plan
from spark.reading.librdkafka_admin import LibrdkafkaAdmin
from spark.reading.run_plan import LEDGER, REQUESTS, Log, Plan, RunContext
from spark.reading.selection import known_to_the_lake_only
from spark.report import document, publish, webhook
from spark.rules import hourly
from spark.rules.balance import Balance
from spark.rules.reconcile import unchanged_balance
from spark.step_timer import OnProgress, StepTimer
from spark.steps import finished_runs, maintenance
from spark.steps.finished_runs import Shown
from spark.tables import files, hours, lake_version, last_run_file, lock, view
from spark.tables.last_run_file import LastRun, LocalFile
from spark.without_spark.before_spark import BeforeSpark


def run(known: BeforeSpark, on_progress: OnProgress, now_ms: int | None = None) -> document.Report | None:
    """Carry out a run without Spark, and return its report; None if the run needs Spark.

    `now_ms` replaces the clock. After an error the run with Spark follows too: it checks more before it asks Kafka, and
    reports the error. A process that holds the lake now may have ended by the time that Spark has started.
    """
    options = known.settings.options
    folder = files.local_folder(options.report)
    if folder is None or options.dry_run:
        return None
    try:
        if not (known.lake / last_run_file.FILE).is_file():
            return None
        with lock.held_locally(known.lake, options.lake):
            return _carry_out(known, folder, StepTimer(lambda step: None), on_progress, now_ms)
    except (CannotRun, NeedsSpark, OSError) as error:
        on_progress(f"starting Spark: {error}")
        return None


def _carry_out(
    known: BeforeSpark, folder: Path, timer: StepTimer, on_progress: OnProgress, now_ms: int | None
) -> document.Report:
    """Plan the run, and finish it if it repeats the last one; NeedsSpark otherwise, with nothing written.

    `folder` is that of the report.
    """
    settings = known.settings
    with timer.step("plan the run"):
        stored = _read(known.lake)
        shown, last_run = _shown_of(stored.last_run), stored.last_run.finished
        last_plan = Plan.from_rows(stored.last_run.plan)
        admin = known.admin
        number = last_run["run"] + 1
        plan = planning.freeze(admin, settings, last_plan, planning.clock_ms(now_ms), _NAMED, number)
        kept_from = maintenance.kept_from(plan, last_plan, settings, last_run)
        context = RunContext(plan, settings, last_plan, last_run, (), kept_from)
        balance = checked_balance(context, shown)
        if settings.options.publish:
            _check_published(admin, context, shown)
    closed = balance.close(hours.text_of(context.window_from))
    with timer.step("write the report"):
        results = document.Results(document.Collected(**shown.collected), closed, shown.revised)
        report = document.build(results, context, document.RunKind(), timer)
        _check_webhook(context, report)
        document.write_local(folder, report)
    on_progress(f"run {number}: no new offset in {len(plan.topics)} topics, and nothing to judge again: without Spark")
    finished = {
        **last_run,
        "run": number,
        "frozen_ms": plan.frozen_ms,
        "caught_up_ms": run_plan.caught_up_ms(plan, last_run),
        "late_hours": balance.late_hours,
        "last_pass": finished_runs.last_pass_after(number, settings.options, last_run),
    }
    last_run_file.store_local(
        known.lake, stored._replace(last_run=_next(stored.last_run, finished, plan, report, timer))
    )
    return report


def _read(lake: Path) -> LocalFile:
    """Read the last run of a lake of this version; NeedsSpark if its file is not that of the newest commits, or if the
    lake has views, which a run may have to make."""
    stored = last_run_file.load_local(lake)
    if stored is None or files.read_local(lake, lake_version.FILE) != lake_version.text_of(lake_version.VERSION):
        raise NeedsSpark("the tables have to be read")
    if (lake / view.TABLE).exists():
        raise NeedsSpark("the lake has views")
    return stored


def _shown_of(last_run: LastRun) -> Shown:
    """Return what the report of a run shows of the lake; NeedsSpark if that is not in its file."""
    if last_run.shown is None or last_run.shown.keys() != set(Shown._fields):
        raise NeedsSpark("the report is made of the tables")
    return Shown(**last_run.shown)


def _discover(logs: Sequence[Log], names: Sequence[str]) -> set[str]:
    """Find no topics in a ledger and a journal without new records; NeedsSpark if there are any."""
    if any(log.role in (LEDGER, REQUESTS) and log.end > log.start for log in logs):
        raise NeedsSpark("the ledger or the journal has new records")
    return set()


_NAMED: Final = planning.NamedTopics(_discover, known_to_the_lake_only)


def checked_balance(context: RunContext, shown: Shown) -> Balance:
    """Return the balance of a run whose report repeats what the last one shows, and which has no maintenance to do;
    NeedsSpark for any other run."""
    balance, window_from = unchanged_balance(context), context.window_from
    if balance is None or not balance.closes(hours.text_of(window_from)):
        raise NeedsSpark("hours are classified")
    if not shown.since_ms <= window_from <= (window_from if shown.until_ms is None else shown.until_ms):
        raise NeedsSpark("a finding or a changed verdict leaves the window")
    if document.judged_by(context) != shown.judged_by:
        raise NeedsSpark("other silences or rules apply")
    if maintenance.is_due(
        context.settings.options,
        shown.maintenance_options,
        shown.maintained_ms,
        context.of_last_run("hours", ()),
        context.plan.frozen_ms,
    ):
        raise NeedsSpark("the lake is maintained")
    return balance


def _check_published(admin: LibrdkafkaAdmin, context: RunContext, shown: Shown) -> None:
    """Check that the topic of findings has those of the last run; NeedsSpark otherwise."""
    name = findings_topic(context.settings.shared.namespace)
    topic = admin.describe([name]).get(name)
    if not shown.published or topic is None or not admin.compacted([name]):
        raise NeedsSpark("findings are published")
    if not publish.state_of(admin, topic).has_records_of(publish.PublishedTopic.of(context.of_last_run("published"))):
        raise NeedsSpark("findings are published again")


def _check_webhook(context: RunContext, report: document.Report) -> None:
    """Check that the webhook has nothing to do; NeedsSpark otherwise, since the runs of the lake have its state."""
    hook, state = context.settings.webhook, context.of_last_run("webhook", {})
    if hook is None:
        return
    decision = webhook.decide(report.document["findings"], report.document["run"]["fail_on"], state, hook.after)
    if decision.due or decision.sent != state:
        raise NeedsSpark("findings go to the webhook")


def _next(last: LastRun, finished: dict[str, Any], plan: Plan, report: document.Report, timer: StepTimer) -> LastRun:
    """Return this run as the next run reads it. The next run with Spark adds this run's row to the table `runs`."""
    in_columns = ("run", "counted_run", "reports", *hourly.STORED)
    summary = {name: value for name, value in finished.items() if name not in in_columns}
    row = finished_runs.row_of(report, plan, summary, finished["counted_run"], timer)
    unstored = [*last.unstored, row][-finished_runs.HISTORY_RUNS :]
    return LastRun({**finished, "reports": finished_runs.history_of(row, finished)}, plan.rows(), unstored, last.shown)
