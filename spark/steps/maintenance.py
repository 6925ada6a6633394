"""The maintenance of the lake at the end of a run: rows that it deletes, files that it compacts and vacuums."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from pyspark.sql import functions as F  # noqa: N812

from spark.reading import run_plan
from spark.reading.run_plan import Plan, RunContext, of_run
from spark.rules.balance import Balance
from spark.settings import HOUR_MS, Options, Settings
from spark.tables import hours, lock, schemas, view
from spark.tables.lake import Lake

DAY_MS: Final = 24 * HOUR_MS


def kept_from(plan: Plan, complete_plan: Plan | None, settings: Settings, last_run: Mapping[str, Any] | None) -> str:
    """Return the first hour that the lake keeps, "" for all. It never moves back, since older rows are deleted.

    After a pause longer than --keep-days the run keeps what was accepted in the pause, since no run has judged it, and
    the next runs keep it as long as its findings are in the reports.
    `complete_plan` is the plan of the last run if that run has come to its end, with its maintenance if that was due. A
    run that reads nothing new since then moves the hour once a day: where hours are deleted, a run classifies anew.
    """
    kept: str = of_run(last_run, "kept_from", "")
    if settings.options.keep_days is None:
        return kept
    first_ms = plan.frozen_ms - settings.options.keep_days * DAY_MS
    if hours.text_of(first_ms - DAY_MS) < kept and run_plan.reads_nothing_new(plan, complete_plan):
        return kept
    first = hours.text_of(min(first_ms, run_plan.paused_since(plan, settings, last_run)))
    late = Balance.of(last_run).decided_late(run_plan.window_from(plan, settings))
    return max(kept, min({first, *late}))


def is_first_of_hour(last_frozen_ms: int | None, frozen_ms: int) -> bool:
    """Check whether a run is the first one of its hour. `last_frozen_ms` is when the last run froze, None without
    one."""
    return last_frozen_ms is None or last_frozen_ms // HOUR_MS != frozen_ms // HOUR_MS


def newest_maintenance(last_run: Mapping[str, Any] | None) -> int:
    """Return the number of the newest run that has maintained the lake, by the summary of the last run; 0 without one.

    Each run of an earlier version, which did not store that number, has maintained the lake.
    """
    return 0 if last_run is None else int(last_run.get("tidied", last_run["run"]))


def _hours_ended(last_run: Mapping[str, Any] | None, plan: Plan) -> set[str]:
    """Return the hours that have ended since the last run, at most 24."""
    if last_run is None:
        return set()
    last_run_hour, current_hour = last_run["frozen_ms"] // HOUR_MS, plan.frozen_ms // HOUR_MS
    return {hours.text_of(hour * HOUR_MS) for hour in range(max(last_run_hour, current_hour - 24), current_hour)}


def options_of(options: Options) -> list[Any]:
    """Return the options of the maintenance, as JSON keeps them."""
    return [options.keep_days, options.optimize, options.vacuum_h]


def is_due(
    options: Options, last_options: list[Any], maintained_ms: int, with_rows: Iterable[str], frozen_ms: int
) -> bool:
    """Check whether maintenance by these options has anything to do since it was done at `maintained_ms` by
    `last_options`: once a day, after other options, or if an hour `with_rows` has ended since, which is then
    compacted."""
    if options.keep_days is None and options.vacuum_h is None and not options.optimize:
        return False
    if options_of(options) != last_options or frozen_ms - maintained_ms >= DAY_MS:
        return True
    last_hour, current_hour = hours.text_of(maintained_ms), hours.text_of(frozen_ms)
    return options.optimize and any(last_hour <= hour < current_hour for hour in with_rows)


def is_part_of(context: RunContext) -> bool:
    """Check whether the run ends with maintenance: with --follow only the first run of each hour does."""
    last_frozen_ms = None if context.last_run is None else int(context.last_run["frozen_ms"])
    return not context.settings.options.follow or is_first_of_hour(last_frozen_ms, context.plan.frozen_ms)


def carry_out(lake: Lake, context: RunContext) -> None:
    """Delete old rows, compact and vacuum the lake, as the options say, if maintenance is part of the run."""
    options, plan, last_run = context.settings.options, context.plan, context.last_run
    if not is_part_of(context):
        return
    if options.follow:
        lake.keep_short_logs([*schemas.TABLES, *view.tables(lake)])
    if options.keep_days is not None and context.kept_from != of_run(last_run, "kept_from"):
        lake.delete_before(context.kept_from, plan.run)
    if options.optimize:
        # An hour is compacted when it is over, and again after late rows.
        current_hour = hours.text_of(plan.frozen_ms)
        late = hours.of(lake.read_cached("deliveries").where(F.col("run") > newest_maintenance(last_run)))
        some_hours = sorted({hour for hour in late if hour < current_hour} | _hours_ended(last_run, plan))
        lake.optimize(some_hours, [*schemas.COMPACTED, *view.of_topics(lake)])
    if options.vacuum_h is not None:
        lake.vacuum(options.vacuum_h, [*schemas.TABLES, lock.TABLE, *view.tables(lake)])
