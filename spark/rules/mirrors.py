"""The records of mirrors in the lake: a run adds what is new in each, and a mirror is compared by what was read of it.

The table `mirrored` of the lake has a row for each record that a mirror has, and a row of its own for each mirror, with
what is known of its logs. One commit of a run changes both, for all mirrors.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import reduce
from typing import Final, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SinkRule
from spark.engine import frames
from spark.errors import Unreadable
from spark.reading import mirror_logs
from spark.reading.intervals import Interval
from spark.reading.mirror_logs import LogPlan, MirrorLog, MirrorRead
from spark.reading.run_plan import DATA, UNWANTED, Plan, RunContext
from spark.reading.sinks import ROW
from spark.step_timer import OnProgress
from spark.tables import deliveries, hours, schemas
from spark.tables.lake import Lake

TABLE: Final = "mirrored"


class MirrorState(NamedTuple):
    """What is known of a mirror: the last run that has read it (0: none), and its logs then."""

    run: int
    logs: tuple[MirrorLog, ...]

    @property
    def reset_run(self) -> int:
        """The last run that has dropped records that it had read before."""
        return max((log.reset_run for log in self.logs), default=0)


NEVER_READ: Final = MirrorState(0, ())


def update(lake: Lake, context: RunContext, on_progress: OnProgress) -> dict[str, str]:
    """Add what is new in the mirrors of the rules to the lake; return why, by name, where one cannot be read.

    What is stored of mirrors that the rules no longer have is dropped.
    """
    rules = [rule for rule in context.settings.rules.sinks if rule.is_mirror]
    if not rules and not lake.exists(TABLE):
        return {}
    states = load(lake)
    plan = context.plan
    # Audited logs come last: a partition that a recreated topic no longer has keeps the id of the earlier topic.
    topic_ids = {log.topic: log.topic_id for log in sorted(plan.logs, key=lambda log: log.audited)}
    errors: dict[str, str] = {}
    written: list[DataFrame] = []
    replaced = [_of_others(rules)] if states.keys() - {rule.name for rule in rules} else []
    for rule in rules:
        state, topics = states.get(rule.name, NEVER_READ), topics_of(rule, plan)
        if not _is_to_be_read(state, topics, plan.run):
            continue
        try:
            read = mirror_logs.read(
                lake.spark,
                rule,
                {name: topic_ids[name] for name in topics},
                state.logs,
                plan,
                context.settings.options.max_records,
            )
        except Unreadable as error:
            errors[rule.name] = str(error)
            on_progress(f"the mirror {rule.name} cannot be read: {error}")
            continue
        written.append(_rows(lake, rule, read, plan.run))
        replaced.append(_replaced(rule, read.plans, plan.run))
    if replaced:
        nothing = frames.rows_of(lake.spark, schemas.of(TABLE), [])
        lake.replace(TABLE, reduce(DataFrame.unionByName, written, nothing), " OR ".join(replaced), plan.run)
    return errors


def _is_to_be_read(state: MirrorState, topics: Sequence[str], run: int) -> bool:
    """Check whether a run reads a mirror of these topics: something belongs into the mirror, and no process that was
    killed on the same run has read it after the freeze."""
    return state.run != run and (bool(topics) or state.run > 0)


def topics_of(rule: SinkRule, plan: Plan) -> list[str]:
    """Return the topics whose copies a mirror must have: those that this run audits, or an earlier one did."""
    names = {log.topic for log in plan.logs if log.role in (DATA, UNWANTED)}
    return sorted(name for name in names if rule.expects(name))


def load(lake: Lake) -> dict[str, MirrorState]:
    """Read what is known of each mirror, by name."""
    rows = lake.read_cached(TABLE).where("accepted_hour IS NULL").select("sink", "run", "logs").collect()
    return {
        row["sink"]: MirrorState(row["run"], tuple(MirrorLog(**log) for log in json.loads(row["logs"]))) for row in rows
    }


def newest_hours(lake: Lake, rule: SinkRule, since_run: int) -> dict[str, int]:
    """Return the hours of a mirror's records that were read after the run `since_run`, each with the last run."""
    recent = _of(lake, rule).where(F.col("run") > since_run)
    newest = recent.groupBy("accepted_hour").agg(F.max("run").alias("run"))
    rows = newest.select(hours.as_text(F.col("accepted_hour")).alias("hour"), "run").collect()
    return {row["hour"]: row["run"] for row in rows}


def read(lake: Lake, rule: SinkRule, intervals: Sequence[Interval]) -> DataFrame:
    """Return a mirror's records (sinks.ROW) whose events were accepted in these intervals; kept on the executors."""
    time = F.col("event_ms")
    inside = frames.any_of([(time >= first) & (time < end) for first, end in intervals])
    return frames.checkpointed(_of(lake, rule).where(inside).select(*ROW))


def _of(lake: Lake, rule: SinkRule) -> DataFrame:
    """Select the records of a mirror (schemas.MIRRORED)."""
    return lake.read_cached(TABLE).where((F.col("sink") == rule.name) & F.col("accepted_hour").isNotNull())


def _rows(lake: Lake, rule: SinkRule, read: MirrorRead, run: int) -> DataFrame:
    """Return the rows (schemas.MIRRORED) of what a run has read: the mirror's own, and its records."""
    logs = json.dumps([asdict(log) for log in read.logs])
    of_run = {"sink": F.lit(rule.name), "run": F.lit(run)}
    own = frames.typed(lake.spark.range(1), schemas.MIRRORED, of_run | {"logs": F.lit(logs)})
    columns = {name: F.col(name) for name in read.rows.columns}
    hour = deliveries.hour_of(F.col("event_ms"))
    records = frames.typed(read.rows, schemas.MIRRORED, columns | of_run | {"accepted_hour": hour})
    return own.unionByName(records)


def _of_others(rules: Iterable[SinkRule]) -> str:
    """Return the SQL condition of the rows of mirrors that the rules do not have."""
    names = ", ".join(f"'{rule.name}'" for rule in rules)
    return f"sink NOT IN ({names})" if names else "true"


def _replaced(rule: SinkRule, plans: Iterable[LogPlan], run: int) -> str:
    """Return the SQL condition of the rows of a mirror that a run replaces: its own, those of this run, and those of
    records that the mirror no longer has."""
    ids = ", ".join(f"'{topic_id}'" for topic_id in sorted({plan.log.topic_id for plan in plans}))
    of_others = f"topic_id NOT IN ({ids})" if ids else "true"
    gone = [
        f"(topic_id = '{plan.log.topic_id}' AND partition = {plan.log.partition} AND `offset` >= {plan.gone_from})"
        for plan in plans
        if plan.gone_from is not None
    ]
    return f"(sink = '{rule.name}' AND (accepted_hour IS NULL OR run = {run} OR {' OR '.join([of_others, *gone])}))"
