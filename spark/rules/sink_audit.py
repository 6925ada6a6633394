"""Compare sinks with what was delivered: is each event in the table, once, and in time?

A sink is a table that a consumer fills, or a mirror (spark.rules.mirrors), whose rows are its records. Each hour of
acceptance is compared by itself (sink_comparison), and again while a verdict about one of its events may change. The
table `sinks` of the lake has the findings and the counts of each hour, and a row of state for each sink; one commit
replaces them, and a report is made of what the table has.
"""

import json
from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SinkRule
from spark.engine import frames
from spark.errors import CannotRun, Unreadable
from spark.reading.decode import EVENT
from spark.reading.run_plan import RunContext
from spark.rule_table import PENDING
from spark.rules import mirrors, sink_verdicts
from spark.rules.current_findings import OF_SINKS
from spark.rules.sink_comparison import TABLE, Comparison, topics_of
from spark.rules.sink_verdicts import (
    COUNTS_OF_SINK,
    KIND_OF_COUNT,
    NEVER_READ,
    SINK_CATEGORIES,
    HourState,
    Released,
    SinkState,
)
from spark.step_timer import OnProgress
from spark.tables import hours, schemas
from spark.tables.lake import Lake


class SinkReport(NamedTuple):
    """A sink in the report of a run: its counts in the window, and its own watermark.

    `judged_until_ms`: every event that was accepted before is judged; None if none is, or the sink was never read.
    `unreadable` says why this run could not read it, None if it could. `awaits_topics`: the sink was never read, since
    no run has audited a topic whose events belong into it.
    """

    rule: SinkRule
    counts: dict[str, int]
    read_ms: int | None
    judged_until_ms: int | None
    unreadable: str | None
    awaits_topics: bool = False


def audit(lake: Lake, context: RunContext, on_progress: OnProgress) -> list[SinkReport]:
    """Compare the sinks of the rules with the lake, store the result in `sinks`, and return it by sink.

    A sink that cannot be read keeps its findings and its watermark, and has an evidence gap besides. What is stored of
    a sink that the rules no longer have is dropped. CannotRun if the stored counts do not agree.
    """
    rules = context.settings.rules.sinks
    errors = mirrors.update(lake, context, on_progress)
    if not rules:
        if lake.exists(TABLE) and not lake.read_cached(TABLE).isEmpty():
            nothing = frames.rows_of(lake.spark, schemas.of(TABLE), [])
            lake.replace(TABLE, nothing, "true", context.plan.run)
        return []
    states = _states(lake.read_cached(TABLE))
    newest = _newest_hours(lake, context, states)
    written: list[DataFrame] = []
    names = ", ".join(f"'{rule.name}'" for rule in rules)
    replaced = [f"sink NOT IN ({names})"]
    of_mirrors = mirrors.load(lake) if any(rule.is_mirror for rule in rules) else {}
    for rule in rules:
        mirror = of_mirrors.get(rule.name, mirrors.NEVER_READ)
        compared = Comparison(lake, context, rule, states.get(rule.name, NEVER_READ), mirror)
        rows, condition = _rows_of(compared, newest.get(rule.name, {}), errors, on_progress)
        written.append(rows)
        replaced.append(condition)
    lake.replace(TABLE, reduce(DataFrame.unionByName, written), " OR ".join(replaced), context.plan.run)
    return reports(lake, context, errors)


def _rows_of(
    compared: Comparison, newest: Mapping[str, int], errors: dict[str, str], on_progress: OnProgress
) -> tuple[DataFrame, str]:
    """Compare a sink, if it can be read; return rows and condition as `Comparison.carry_out` does.

    `errors` says, by name, why a sink cannot be read; what this comparison finds out is added.
    """
    rule = compared.rule
    if not compared.topics:
        if compared.state.run:
            errors[rule.name] = (
                f"topics: no run has audited a topic that {', '.join(rule.topics)} names (quarantine topics do not "
                "count), as one has before: correct them"
            )
    elif rule.name not in errors:
        try:
            return compared.carry_out(newest)
        except Unreadable as error:
            errors[rule.name] = str(error)
            on_progress(f"the sink {rule.name} cannot be read: {error}")
    return compared.unread(is_unreadable=rule.name in errors)


def reports(lake: Lake, context: RunContext, errors: Mapping[str, str]) -> list[SinkReport]:
    """Read the sinks of a report from the table; `errors` are those of sinks that could not be read, by name."""
    stored = lake.read_cached(TABLE)
    first = hours.text_of(context.window_from)
    of_window = _findings_since(stored, context.window_from)
    found = of_window.groupBy("sink", "kind").agg(F.sum("events")).collect()
    findings = {(row[0], row[1]): row[2] for row in found}
    states = _states(stored)
    made = []
    for rule in context.settings.rules.sinks:
        state = states.get(rule.name, NEVER_READ)
        by_hour = {hour: known.counts for hour, known in state.hours.items() if hour >= first}
        counts = {name: sum(of_hour[name] for of_hour in by_hour.values()) for name in COUNTS_OF_SINK}
        check_balance(rule, counts, {kind: findings.get((rule.name, kind), 0) for kind in KIND_OF_COUNT.values()})
        open_hours_ms = [hours.ms_of(hour) for hour, of_hour in by_hour.items() if of_hour[PENDING]]
        watermark = sink_verdicts.judged_until_ms(rule, context.settings.max_settle_ms, state, open_hours_ms)
        unreadable = errors.get(rule.name)
        awaits_topics = not (unreadable or state.run or topics_of(rule, context))
        made.append(SinkReport(rule, counts, state.read_ms, watermark, unreadable, awaits_topics))
    return made


def _findings_since(stored: DataFrame, since_ms: int) -> DataFrame:
    """Select the findings about sinks in the hours since a time: earlier hours are not compared any more. The gap of a
    sink that the last run could not read has no hour."""
    since = hours.since(hours.text_of(since_ms))
    return stored.where(f"kind IS NOT NULL AND (accepted_hour IS NULL OR {since})")


def check_balance(rule: SinkRule, counts: Mapping[str, int], findings: Mapping[str, int]) -> None:
    """Check the balance of a sink: its categories add up, and each fault has its finding; CannotRun otherwise."""
    adds_up = counts["expected"] == sum(counts[name] for name in SINK_CATEGORIES)
    if not adds_up or any(counts[name] != findings[kind] for name, kind in KIND_OF_COUNT.items()):
        text = ", ".join(f"{name} {counts[name]}" for name in COUNTS_OF_SINK)
        raise CannotRun(
            f"the balance of the sink {rule.name} does not close: {text}; findings: {dict(findings)}; this is a fault "
            "of the audit: keep the lake as it is, open an issue, and leave the sink out until then"
        )


def _states(stored: DataFrame) -> dict[str, SinkState]:
    """Read the state of each sink: its own row, and those of its hours."""
    rows = stored.where("kind IS NULL").select(
        *("sink", "run", "read_ms", "is_closed", "definition", "released", "last_ms", *COUNTS_OF_SINK),
        hours.as_text(F.col("accepted_hour")).alias("hour"),
    )
    by_sink: dict[str, dict[str, Row]] = {}
    for row in rows.collect():
        by_sink.setdefault(row["sink"], {})[row["hour"] or ""] = row
    states = {}
    for name, of_sink in by_sink.items():
        own = of_sink.pop("")
        known = tuple(Released(*span) for span in json.loads(own["released"]))
        of_hours = {hour: _hour_state(row) for hour, row in of_sink.items()}
        states[name] = SinkState(own["run"], own["read_ms"], known, own["definition"], of_hours, own["last_ms"])
    return states


def _hour_state(row: Row) -> HourState:
    return HourState(row["run"], row["is_closed"], row["definition"], {name: row[name] for name in COUNTS_OF_SINK})


def _newest_hours(lake: Lake, context: RunContext, states: Mapping[str, SinkState]) -> dict[str, dict[str, int]]:
    """Return for each sink the last run that wrote a row about its topics into each hour of the window.

    Of hours that no run has written to since the sink was last read, nothing is read.
    """
    rules = context.settings.rules.sinks
    since_run = min(_since_run(rule, context, states) for rule in rules)
    recent = lake.read_cached("deliveries").where(hours.since(hours.text_of(context.window_from)))
    written = recent.where((F.col("run") > since_run) & (F.col("kind") == EVENT))
    rows = written.groupBy("accepted_hour", "topic").agg(F.max("run").alias("run"))
    found: dict[str, dict[str, int]] = {}
    for row in rows.select(hours.as_text(F.col("accepted_hour")).alias("hour"), "topic", "run").collect():
        for rule in rules:
            if rule.expects(row["topic"]):
                of_sink = found.setdefault(rule.name, {})
                of_sink[row["hour"]] = max(row["run"], of_sink.get(row["hour"], 0))
    return found


def _since_run(rule: SinkRule, context: RunContext, states: Mapping[str, SinkState]) -> int:
    """Return the last run that has read a sink as it is defined now; 0 if none has."""
    state = states.get(rule.name, NEVER_READ)
    return state.run if state.definition == sink_verdicts.definition(rule, context.settings) else 0


def with_findings(lake: Lake, found: DataFrame, since_ms: int) -> DataFrame:
    """Add the findings about sinks, in the hours since a time (ms), to other findings.

    schemas.FINDING → schemas.FINDING; with current_findings.OF_SINKS if the lake has sinks.
    """
    if not lake.exists(TABLE):
        return found
    of_sinks = _findings_since(lake.read_cached(TABLE), since_ms).select(*schemas.FINDING, *OF_SINKS)
    return found.unionByName(of_sinks, allowMissingColumns=True)
