"""What a finished run leaves to the next ones: its row of `runs`, and what a run without Spark repeats of it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pyspark.sql import Row
from pyspark.sql import functions as F  # noqa: N812

from spark.reading.run_plan import Plan, RunContext, of_run
from spark.report import document
from spark.rules import hourly
from spark.settings import Options
from spark.step_timer import StepTimer
from spark.steps import maintenance
from spark.tables import last_run_file, verdict_history
from spark.tables.lake import Lake

# Number of earlier runs in the report's history.
HISTORY_RUNS: Final = 19

# The most findings that a run leaves in the file of the last run, for a run without Spark.
SHOWN_MAX: Final = 1_000


class Shown(NamedTuple):
    """What a report shows of the lake's findings and verdicts, and what it depends on, as JSON.

    `collected` is a document.Collected, `revised` are the counts of verdict_history.Revisions. A later report shows the
    same if its window begins at or after `since_ms`, and not after `until_ms` (None: whenever it begins), and if
    `judged_by` is the same (document.judged_by). `published`: whether the topic of findings has these.
    `maintained_ms` is when the plan of the run was frozen, if the run has maintained the lake by the options
    `maintenance_options`, else 0.
    """

    collected: dict[str, Any]
    revised: dict[str, Any]
    since_ms: int
    until_ms: int | None
    judged_by: dict[str, Any]
    published: bool
    maintained_ms: int
    maintenance_options: list[Any]

    @classmethod
    def of(
        cls,
        context: RunContext,
        collected: document.Collected,
        revised: verdict_history.Revisions,
        oldest_ms: int | None,
    ) -> "Shown":
        """Describe what a run shows; `oldest_ms` is current_findings.oldest_ms."""
        return cls(
            collected=collected._asdict(),
            revised=revised.counts,
            since_ms=context.window_from,
            until_ms=min((ms for ms in (oldest_ms, revised.oldest_ms) if ms is not None), default=None),
            judged_by=document.judged_by(context),
            published=context.settings.options.publish,
            maintained_ms=context.plan.frozen_ms if maintenance.is_part_of(context) else 0,
            maintenance_options=maintenance.options_of(context.settings.options),
        )


class EarlierRuns(NamedTuple):
    """What a lake has of earlier runs: the summary of the last finished one and its plan (None: there is none), and the
    plans of those that were interrupted since, by number.

    `unstored` are rows of runs without Spark since the last commit to `runs` (last_run_file.LastRun). `is_complete`:
    the last run is known to have come to its end, with its maintenance if that was due.
    """

    last_run: dict[str, Any] | None
    last_plan: Plan | None
    interrupted: dict[int, Plan]
    unstored: Sequence[Mapping[str, Any]] = ()
    is_complete: bool = False

    @property
    def newest(self) -> int:
        """The highest number of these runs; 0 without any."""
        return max(self.interrupted, default=of_run(self.last_run, "run", 0))


def earlier_runs(lake: Lake) -> EarlierRuns:
    """Read the earlier runs: from the file of the last run if its commits are the newest, else from the tables."""
    kept = last_run_file.load(lake)
    if kept is not None:
        return EarlierRuns(kept.finished, Plan.from_rows(kept.plan), {}, kept.unstored, is_complete=True)
    last_run = last_finished_run(lake)
    number = of_run(last_run, "run", 0)
    planned = lake.read_cached("progress").where(F.col("run") >= number)
    plans = _plans_of(planned.collect() if lake.exists("progress") else [])
    return EarlierRuns(last_run, plans.pop(number, None), plans)


def _plans_of(rows: Iterable[Row]) -> dict[int, Plan]:
    """Build the plans of rows of `progress`, by run, in the order of the runs."""
    by_run: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_run.setdefault(row["run"], []).append(row.asDict(recursive=True))
    plans = (Plan.from_rows(by_run[run]) for run in sorted(by_run))
    return {plan.run: plan for plan in plans if plan is not None}


def last_finished_run(lake: Lake) -> dict[str, Any] | None:
    """Read the last finished run: its number, its summary, its sums by hour (hourly.STORED), and the newest reports.

    The newest number is read first, from Delta's statistics; by that number Delta prunes the files of older runs.
    """
    if not lake.exists("runs"):
        return None
    runs = lake.read_cached("runs")
    newest = runs.agg(F.max("run")).collect()[0][0]
    if newest is None:
        return None
    newest_runs = runs.where(F.col("run") > oldest_past(newest)).orderBy(F.desc("run"))
    summary = F.when(F.col("run") == newest, F.col("summary")).alias("summary")
    rows = newest_runs.select("report", "counted_run", summary).collect()
    counted_run = rows[0]["counted_run"]
    return {
        "run": newest,
        "reports": [json.loads(row["report"]) for row in rows],
        "counted_run": counted_run,
        **json.loads(rows[0]["summary"]),
        **hourly.load(lake, counted_run),
    }


def row_of(
    report: document.Report, plan: Plan, summary: Mapping[str, Any], counted_run: int | None, timer: StepTimer
) -> dict[str, Any]:
    """Return the row of `runs` (schemas.RUN) of a run."""
    kept = {
        **{name: report.document[name] for name in ("run", "balance")},
        # The report was written before its own time was known.
        "cost": {**report.document["cost"], "seconds": timer.seconds()},
    }
    return {
        "run": plan.run,
        "frozen_ms": plan.frozen_ms,
        "verdict": report.document["run"]["verdict"],
        "summary": json.dumps(summary),
        "report": json.dumps(kept),
        "counted_run": counted_run,
    }


def history_of(row: Mapping[str, Any], last_run: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the reports of the history after the run of a `row_of`, newest first."""
    past = of_run(last_run, "reports", [])
    return [json.loads(row["report"]), *(one for one in past if one["run"]["number"] > oldest_past(row["run"]))]


def oldest_past(run: int) -> int:
    """Return the number after which the runs are in the history of the report after `run`."""
    return run - HISTORY_RUNS


def last_pass_after(run: int, options: Options, last_run: Mapping[str, Any] | None) -> int:
    """Return the number of the last run that compared ids, after the run `run`; 0 if that is not known."""
    return int(of_run(last_run, "last_pass", 0)) if options.skip_ids else run
