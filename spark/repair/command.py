"""The command `repair`: plans what to do about lost and missing events, and about surplus copies, and does it.

A plan is stored in the lake before anything is sent. A process that is killed leaves a plan without its outcome; the
same command afterwards sends and copies what is missing, and nothing twice.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings
from spark.errors import CannotRun
from spark.queries import export
from spark.reading.run_plan import Plan
from spark.repair import deduplication, evidence, execution, lost_and_missing, records_file
from spark.repair.entries import Entry
from spark.repair.invocation import Invocation, Outcome
from spark.repair.layouts import Layout
from spark.repair.plans import RepairPlans
from spark.settings import FindingsOptions, RepairOptions
from spark.step_timer import OnProgress
from spark.tables import lake_version, lock
from spark.tables.lake import Lake


def carry_out(
    spark: SparkSession,
    shared: SharedSettings,
    options: RepairOptions,
    on_progress: OnProgress,
    now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    transport: httpx.BaseTransport | None = None,
) -> Outcome:
    """Make a plan, store it, and execute it if the options say so; CannotRun if that is not possible.

    The lake is locked meanwhile, so that no run of the audit is at work. `transport` replaces the network for HTTP.
    """
    with lock.held(spark, options.lake) as check_held:
        lake = Lake(spark, options.lake, check_held)
        lake_version.check(lake)
        audited = _last_plan(lake, shared.namespace)
        plans = RepairPlans(lake, options, audited.run, now_ms)
        invocation = Invocation(lake, shared, options, audited, plans, on_progress, now_ms)
        return deduplication.deduplicate(invocation) if options.clean else _resend(invocation, transport)


def _last_plan(lake: Lake, namespace: str) -> Plan:
    """Return the plan of the last finished run; CannotRun without one, or for another namespace."""
    run = lake.read("runs").agg(F.max("run")).collect()[0][0]
    rows = [] if run is None else lake.read("progress").where(F.col("run") == run).collect()
    plan = Plan.from_rows(row.asDict(recursive=True) for row in rows)
    if plan is None:
        raise CannotRun(f"--lake {lake.root} has no finished run: give the --lake of a run")
    audited = json.loads(plan.options)["namespace"]
    if audited != namespace:
        raise CannotRun(
            f"--lake {lake.root} is of namespace {audited!r}, not {namespace!r}: set FENCEPOST_NAMESPACE to the "
            "namespace of the lake"
        )
    return plan


def _resend(invocation: Invocation, transport: httpx.BaseTransport | None) -> Outcome:
    """Repair lost events, and events that sinks lack."""
    options = invocation.options
    if options.execute and options.into:
        execution.finish_interrupted(invocation)
    selected = FindingsOptions(lake=options.lake, kinds=options.kinds, topics=options.topics, since_ms=options.since_ms)
    found = evidence.collected(export.selected(invocation.lake, selected))
    made = lost_and_missing.lost_events(invocation, found) + lost_and_missing.missing_events(invocation, found)
    plan = invocation.plans.begin(made, Layout())
    invocation.on_progress(f"plan {plan}: {len(made)} findings")
    if options.bodies_out:
        records_file.write(invocation.spark, invocation.shared, made, Path(options.bodies_out))
    if options.execute:
        made = execution.execute(invocation, plan, made, transport)
    is_left = any(entry.is_left for entry in made)
    return Outcome(plan, made, _summary(plan, made, options.execute), is_left)


def _summary(plan: int, made: Sequence[Entry], executed: bool) -> list[str]:
    """Count the entries of a plan by what was decided, and what became of it, for the terminal."""
    counts: dict[tuple[str, str], int] = {}
    for entry in made:
        what = entry.outcome or entry.reason or ("left" if executed else "planned")
        counts[entry.kind, f"{entry.action} {what}"] = counts.get((entry.kind, f"{entry.action} {what}"), 0) + 1
    lines = [f"plan       {plan}: {'done' if executed else 'planned, nothing was sent'}"]
    return lines + [f"{kind:15} {what}: {count}" for (kind, what), count in sorted(counts.items())]


def lines(outcome: Outcome) -> Iterator[str]:
    """Yield the entries of an outcome as JSON, a line each."""
    for entry in outcome.entries:
        yield json.dumps(entry.row(outcome.plan)) + "\n"
