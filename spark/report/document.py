"""The report of a run: one document, written as JSON, as a page and as metrics."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from pyspark.sql import DataFrame, SparkSession

from service.contract import Rules
from spark.reading.decode import PLAUSIBLE_MS
from spark.reading.run_plan import DATA, LEDGER, REQUESTS, Log, Plan, RunContext
from spark.report import heatmap, metrics, model, page
from spark.rules import current_findings
from spark.rules.balance import ByTopic, Closed
from spark.rules.kinds import KINDS, kinds_of, with_surplus
from spark.rules.record_counts import PARTITIONS_MAX
from spark.rules.sink_audit import SinkReport
from spark.silences import Silence
from spark.step_timer import StepTimer
from spark.tables import files, hours

# Further findings are counted, and stay in the lake: the report must fit into the driver's memory.
FINDINGS_MAX: Final = 100_000

CLEAN: Final = "clean"
FINDINGS: Final = "findings"
EXIT_CLEAN: Final = 0
EXIT_FINDINGS: Final = 3

INSTANCES_MAX: Final = 100

CauseRow = dict[str, Any]
"""A row of current_findings.cause_counts."""


@dataclass(frozen=True)
class Report:
    """The document of report.json, and the exit status of the process."""

    document: model.Document

    @property
    def status(self) -> int:
        """Exit status: 3 for findings of the kinds of `--fail-on` that are not silenced, else 0."""
        return EXIT_FINDINGS if self.document["run"]["failing"] else EXIT_CLEAN


class RunKind(NamedTuple):
    """How a run came about: whether it was `resumed` after its merge, the number of an interrupted run with other
    options that was finished first, whether all hours were `recounted`, since the balance did not close."""

    resumed: bool = False
    finished_first: int | None = None
    recounted: bool = False


class Collected(NamedTuple):
    """The current findings on the driver; JSON keeps all of it.

    `causes`: the counts of those that are not silenced, by kind, topic and cause; `by_kind`: the number of each kind of
    these; `silenced`: the number of each kind of the others; `silencing`: the number of findings of each active
    silence; `listed`: the first FINDINGS_MAX of all; `counts`: their records by hour and partition
    (current_findings.finding_counts).
    """

    causes: list[dict[str, Any]]
    by_kind: dict[str, int]
    silenced: dict[str, int]
    silencing: list[int]
    listed: list[model.Finding]
    counts: list[dict[str, Any]]

    @property
    def number(self) -> int:
        """The number of all current findings."""
        return sum(self.by_kind.values()) + sum(self.silenced.values())


class Results(NamedTuple):
    """What a run has found: the current findings (`collect`), the closed balance, the changed verdicts
    (verdict_history.Revisions.counts), and the sinks of the rules."""

    collected: Collected
    balance: Closed
    revised: Mapping[str, Any]
    compared: Sequence[SinkReport] = ()


def build(results: Results, context: RunContext, kind: RunKind, timer: StepTimer) -> Report:
    """Build the document of a run; `timer` is that of the run's steps."""
    collected, balance = results.collected, results.balance
    plan, topics = context.plan, balance.topics
    silencing = dict(zip(_active(context), collected.silencing, strict=True))
    window = hours.text_of(context.window_from), hours.text_of(plan.frozen_ms)
    run = _run(context, collected.by_kind, kind)
    cost: model.Cost = {"seconds": timer.seconds(), "offsets": plan.unread}
    by_cause = heatmap.timeline(collected.counts, with_surplus(), *window)
    drawn = heatmap.drawn(balance.record_counts, collected.counts, plan.topics, *window)
    return Report(
        {
            "run": run,
            "balance": cast(model.Balance, balance.line),
            "topics": [cast(model.TopicCounts, {"topic": topic, **counts}) for topic, counts in topics.items()],
            "kinds": collected.by_kind,
            "silenced": collected.silenced,
            "silences": [
                _use_of(silence, plan.frozen_ms, silencing.get(silence, 0)) for silence in context.settings.silences
            ],
            "causes": cast(list[model.CauseCounts], collected.causes),
            "map": cast(model.Map, drawn),
            "timeline": cast(list[model.TimelinePoint], by_cause),
            "instances": instances(collected.listed),
            "findings": collected.listed,
            "findings_left_out": collected.number - len(collected.listed),
            "sinks": [_sink(sink) for sink in results.compared],
            "evidence": _evidence(plan, topics),
            "verdicts": cast(model.Revisions, results.revised),
            "requests": _requests(topics),
            "webhook": None,
            "cost": cost,
            "history": [
                _past_run({"run": run, "balance": balance.line, "cost": cost}),
                *map(_past_run, context.of_last_run("reports", [])),
            ],
        }
    )


def judged_by(context: RunContext) -> dict[str, Any]:
    """Return, as JSON keeps it, what a report's view of the same findings depends on: the active silences, and the
    kinds that do not count by the rules."""
    return {
        "silences": [[silence.finding, silence.until_ms, silence.reason] for silence in _active(context)],
        "uncounted": uncounted(context.plan, context.settings.rules),
        # Another release may have others.
        "kinds": [*KINDS],
        "fields": [*current_findings.FIELDS],
    }


def _active(context: RunContext) -> list[Silence]:
    return [silence for silence in context.settings.silences if silence.is_active(context.plan.frozen_ms)]


def collect(by_hour: DataFrame, found: DataFrame, context: RunContext) -> Collected:
    """Collect the current findings of a run (current_findings.by_hour), and the same by finding (FIELDS); only their
    number is queried if there are none."""
    active = _active(context)
    found = current_findings.with_silence(found, active, uncounted(context.plan, context.settings.rules))
    all_causes = current_findings.cause_counts(found)
    counted, silenced = _split_by_silence(all_causes)
    by_kind, silenced_by_kind = _by_kind(counted), _by_kind(silenced)
    silencing = [sum(row["findings"] for row in silenced if row["silence"] == nth) for nth in range(len(active))]
    causes = [{name: value for name, value in row.items() if name != "silence"} for row in counted]
    if not all_causes:
        return Collected(causes, by_kind, silenced_by_kind, silencing, [], [])
    shown = current_findings.in_order(found).limit(FINDINGS_MAX)
    rows = shown.select(current_findings.as_json().alias("finding"), "silence").collect()
    listed = [_listed(json.loads(row["finding"]), active, row["silence"]) for row in rows]
    counts = current_findings.finding_counts(by_hour, partitions=context.plan.partitions <= PARTITIONS_MAX)
    return Collected(causes, by_kind, silenced_by_kind, silencing, listed, [row.asDict() for row in counts.collect()])


def _split_by_silence(causes: Sequence[CauseRow]) -> tuple[list[CauseRow], list[CauseRow]]:
    """Split rows of current_findings.cause_counts into those that count, and those that are silenced."""
    counted = [row for row in causes if row["silence"] is None]
    return counted, [row for row in causes if row["silence"] is not None]


def instances(findings: Iterable[model.Finding]) -> list[model.InstanceCounts]:
    """Count the surplus copies of findings by the process that wrote them; at most INSTANCES_MAX, the most copies
    first. Copies without Fencepost's header are left out."""
    counted = Counter(
        copy["instance"]
        for finding in findings
        if finding["kind"] in with_surplus("with_cause")
        for copy in finding["coordinates"]
        if copy["cause"] is not None and copy["instance"] is not None
    )
    ordered = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    return [{"instance": instance, "copies": copies} for instance, copies in ordered[:INSTANCES_MAX]]


def uncounted(plan: Plan, rules: Rules) -> dict[str, list[str]]:
    """Return the kinds that do not count by the rules, for each audited topic that has such."""
    known = {topic: rules.rule(topic).findings for topic in plan.topics}
    counted = {topic: kinds_of("findings", names) for topic, names in known.items() if names}
    return {topic: [kind for kind in KINDS if kind not in kinds] for topic, kinds in counted.items()}


def _by_kind(causes: Sequence[CauseRow]) -> dict[str, int]:
    return {kind: sum(row["findings"] for row in causes if row["kind"] == kind) for kind in KINDS}


def _listed(finding: dict[str, Any], active: Sequence[Silence], nth: int | None) -> model.Finding:
    """Mark a finding with its silence, by the index of that silence."""
    silenced: model.Silenced | None = None
    if nth == current_findings.BY_RULE:
        silenced = {"until": None, "reason": f"the rule of {finding['topic']} does not count this kind"}
    elif nth is not None:
        silenced = {"until": _iso(active[nth].until_ms), "reason": active[nth].reason}
    return cast(model.Finding, {**finding, "silenced": silenced})


def _use_of(silence: Silence, frozen_ms: int, findings: int) -> model.SilenceUse:
    """Describe what a silence did in the run; `findings` is the number of findings that it is of."""
    is_active = silence.is_active(frozen_ms)
    return {
        "finding": silence.finding,
        "until": _iso(silence.until_ms),
        "reason": silence.reason,
        "state": "expired" if not is_active else "active" if findings else "unmatched",
        "findings": findings,
    }


def _run(context: RunContext, by_kind: Mapping[str, int], kind: RunKind) -> model.Run:
    """Describe the run; `by_kind` is the number of its findings of each kind, without those that are silenced."""
    plan, settings = context.plan, context.settings
    number = sum(by_kind.values())
    fail_on = kinds_of("--fail-on", settings.options.fail_on)
    return {
        "number": plan.run,
        "verdict": FINDINGS if number else CLEAN,
        "findings": number,
        "failing": sum(by_kind[name] for name in fail_on),
        "fail_on": list(fail_on),
        "frozen_at": _iso(plan.frozen_ms),
        "window_from": _iso(context.window_from),
        "namespace": settings.shared.namespace,
        "kafka": settings.shared.kafka,
        "lake": settings.options.lake,
        "topics": plan.topics,
        "caught_up": all(log.end == log.last_stable for log in plan.logs if log.audited),
        "ids_pass": context.compares_ids,
        "resumed": kind.resumed,
        "finished_first": kind.finished_first,
        "recounted": kind.recounted,
    }


def _past_run(document: Mapping[str, Any]) -> model.PastRun:
    """Summarise a run in one line, from its document or from its row in `runs`."""
    run, balance, cost = document["run"], document["balance"], document["cost"]
    return {
        "number": run["number"],
        "frozen_at": run["frozen_at"],
        "verdict": run["verdict"],
        "findings": run["findings"],
        "accepted": balance["accepted"],
        "delivered_once": balance["delivered_once"],
        "pending": balance["pending"],
        "records": balance["records"],
        "offsets": cost["offsets"],
        "seconds": round(sum(cost["seconds"].values()), 3),
    }


def write(spark: SparkSession, folder: str, report: Report) -> None:
    """Write report.json, report.html and metrics.prom into a folder, each atomically."""
    for name, parts in _files_of(report):
        files.write(spark, folder, name, parts)


def write_local(folder: Path, report: Report) -> None:
    """Write the same files as `write` into a local folder, without Spark."""
    for name, parts in _files_of(report):
        files.write_local(folder, name, parts)


def _files_of(report: Report) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the name of each file of a report, and the parts of its text."""
    yield "metrics.prom", [metrics.text(report.document)]
    yield "report.html", page.render(report.document)
    yield "report.json", json.JSONEncoder(ensure_ascii=False, indent=1).iterencode(report.document)


def _evidence(plan: Plan, topics: ByTopic) -> model.Evidence:
    """Describe how far each log was read, what blocks a log, and what could not be read."""
    audited = [log for role in (DATA, LEDGER, REQUESTS) for log in plan.of(role)]
    evidence = {
        "held_up": [_blocked(log, plan.frozen_ms) for log in audited if log.is_blocked],
        "rejects": sum(counts["rejects"] for counts in topics.values()),
        "gaps": [
            {"topic": log.topic, "partition": log.partition, "first": gap.first, "last": gap.last, "cause": gap.cause}
            for log in audited
            for gap in log.gaps
        ],
        "logs": [
            {
                "role": log.role,
                "topic": log.topic,
                "partition": log.partition,
                "from": log.start,
                "to": log.end,
                "last_stable": log.last_stable,
                "high_watermark": log.high_watermark,
            }
            for log in audited
        ],
    }
    return cast(model.Evidence, evidence)


def _blocked(log: Log, frozen_ms: int) -> dict[str, Any]:
    """Describe a log that an open transaction blocks (model.HeldUp)."""
    transaction, since_ms = log.blocking_transaction, _blocked_since_ms(log)
    return {
        "role": log.role,
        "topic": log.topic,
        "partition": log.partition,
        "offset": log.last_stable,
        "high_watermark": log.high_watermark,
        "transactional_id": transaction.transactional_id if transaction else None,
        "producer_id": transaction.producer_id if transaction else None,
        "epoch": transaction.epoch if transaction else None,
        "open_since": _iso(since_ms) if since_ms else None,
        "age_s": round((frozen_ms - since_ms) / 1000, 3) if since_ms else None,
    }


def _blocked_since_ms(log: Log) -> int | None:
    """Return the time (ms) since which a log is blocked: by the broker, else the first undecided record's timestamp,
    if plausible; None if both are unknown.

    The transaction is slightly older than its first record.
    """
    if log.blocking_transaction is not None and log.blocking_transaction.since_ms:
        return log.blocking_transaction.since_ms
    earliest, latest = PLAUSIBLE_MS
    return log.decided_until_ms if earliest <= log.decided_until_ms <= latest else None


def _sink(sink: SinkReport) -> model.Sink:
    """Describe a sink. The names of its counts leave out that they are those of a sink."""
    counts = {name.removesuffix("_in_sink"): count for name, count in sink.counts.items()}
    times = {"judged_until": sink.judged_until_ms, "read_at": sink.read_ms}
    described = {
        "name": sink.rule.name,
        "format": sink.rule.format,
        **counts,
        **{name: None if ms is None else _iso(ms) for name, ms in times.items()},
        "unreadable": sink.unreadable,
        "awaits_topics": sink.awaits_topics,
    }
    return cast(model.Sink, described)


def _requests(topics: ByTopic) -> model.Requests:
    """Count the answers of the window by status."""
    names = {"201": "answered_201", "202": "answered_202", "503": "answered_503", "504": "answered_504"}
    names |= {"other": "answered_other", "replayed": "replayed"}
    counted = {status: sum(counts[name] for counts in topics.values()) for status, name in names.items()}
    return cast(model.Requests, counted)


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
