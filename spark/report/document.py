"""What a run tells: one document, as JSON, as a page and as metrics."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from spark import rule_table
from spark.reading.decode import PLAUSIBLE_MS
from spark.reading.planning import DATA, LEDGER, REQUESTS, Log, Plan
from spark.report import heatmap, page
from spark.rules import current_findings
from spark.rules.balance import Balance, ByTopic, by_topic, closed
from spark.rules.findings import CLIENT_DUPLICATE, DERIVED_COPY, KINDS, SEVERITIES
from spark.settings import HOUR_MS, Settings
from spark.tables import files, hours

# More are counted and stay in the lake: a report is read, and held in the driver's memory.
FINDINGS_MAX: Final = 100_000

CLEAN: Final = "clean"
FINDINGS: Final = "findings"
EXIT_CLEAN: Final = 0
EXIT_FINDINGS: Final = 3


@dataclass(frozen=True)
class Report:
    """The document of report.json, and the exit status that goes with it."""

    document: dict[str, Any]

    @property
    def status(self) -> int:
        return EXIT_CLEAN if self.document["run"]["verdict"] == CLEAN else EXIT_FINDINGS


def build(
    held: DataFrame,
    found: DataFrame,
    plan: Plan,
    settings: Settings,
    balance: Balance,
    seconds: Mapping[str, float],
    resumed: bool,
    before: Sequence[Mapping[str, Any]],
    revised: Mapping[str, Any],
) -> Report:
    """The document of a run; CannotRun where its balance does not close.

    `held` are the findings that stand (standing.by_hour), `found` the same as a whole (FIELDS), `before` the documents
    of the runs before (what `runs` keeps of them), the last one first, `revised` the verdicts that changed
    (history.counted).
    """
    since_ms = window_from(plan, settings)
    first_hour, last_hour = hours.text_of(since_ms), hours.text_of(plan.frozen_ms)
    balance.drop_before(first_hour)
    topics = by_topic(balance.since(first_hour))
    line = closed(topics)
    causes = current_findings.causes(found)
    counted = {kind: sum(row["findings"] for row in causes if row["kind"] == kind) for kind in KINDS}
    number = sum(counted.values())
    listed: list[dict[str, Any]] = []
    troubles: list[dict[str, Any]] = []
    if number:
        told = current_findings.in_order(found).limit(FINDINGS_MAX).select(current_findings.as_json().alias("finding"))
        listed = [json.loads(row["finding"]) for row in told.collect()]
        places = current_findings.troubles(held, partitions=plan.partitions <= heatmap.PARTITIONS_MAX)
        troubles = [row.asDict() for row in places.collect()]
    document = {
        "run": {
            "number": plan.run,
            "verdict": FINDINGS if number else CLEAN,
            "findings": number,
            "frozen_at": _iso(plan.frozen_ms),
            "window_from": _iso(since_ms),
            "namespace": settings.shared.namespace,
            "kafka": settings.shared.kafka,
            "lake": settings.options.lake,
            "topics": plan.topics,
            "caught_up": all(log.end == log.last_stable for log in plan.logs if log.audited),
            "ids_pass": not settings.options.skip_ids,
            "resumed": resumed,
        },
        "balance": line,
        "topics": [{"topic": topic, **counts} for topic, counts in topics.items()],
        "kinds": counted,
        "causes": causes,
        "map": heatmap.drawn(balance.cells, troubles, plan.topics, first_hour, last_hour),
        "timeline": heatmap.timeline(
            troubles, (*current_findings.COPIES, CLIENT_DUPLICATE, DERIVED_COPY), first_hour, last_hour
        ),
        "findings": listed,
        "findings_left_out": number - len(listed),
        "evidence": _evidence(plan, topics),
        "verdicts": dict(revised),
        "requests": _requests(topics),
        "cost": {
            "seconds": dict(seconds),
            "offsets": sum(log.end - log.start for log in plan.logs if log.audited),
        },
    }
    document["history"] = [_summary(one) for one in (document, *before)]
    return Report(document)


def window_from(plan: Plan, settings: Settings) -> int:
    """From when on the report looks, ms."""
    return rule_table.window_from(plan.frozen_ms, settings.options.window_h * HOUR_MS)


def _summary(document: Mapping[str, Any]) -> dict[str, Any]:
    """A run in a line, from its document or from what `runs` kept of it."""
    run, balance, cost = document["run"], document["balance"], document["cost"]
    return {
        **{name: run[name] for name in ("number", "frozen_at", "verdict", "findings")},
        **{name: balance[name] for name in ("accepted", "delivered_once", "pending", "records")},
        "offsets": cost["offsets"],
        "seconds": round(sum(cost["seconds"].values()), 3),
    }


def write(spark: SparkSession, folder: str, made: Report) -> None:
    """report.json, report.html and metrics.prom into a folder, each whole or not at all."""
    files.write(spark, folder, "metrics.prom", [metrics(made.document)])
    files.write(spark, folder, "report.html", page.render(made.document))
    encoder = json.JSONEncoder(ensure_ascii=False, indent=1)
    files.write(spark, folder, "report.json", encoder.iterencode(made.document))


def _evidence(plan: Plan, topics: ByTopic) -> dict[str, Any]:
    """How far each log was read, what holds it up, and what could not be read."""
    audited = [log for role in (DATA, LEDGER, REQUESTS) for log in plan.of(role)]
    held = [
        {
            "role": log.role,
            "topic": log.topic,
            "partition": log.partition,
            "offset": log.last_stable,
            "high_watermark": log.high_watermark,
            "transactional_id": log.holder.transactional_id if log.holder else None,
            "producer_id": log.holder.producer_id if log.holder else None,
            "epoch": log.holder.epoch if log.holder else None,
            "open_since": _iso(since_ms) if since_ms else None,
            "age_s": round((plan.frozen_ms - since_ms) / 1000, 3) if since_ms else None,
        }
        for log in audited
        for since_ms in [_since_ms(log)]
        if log.end == log.last_stable < log.high_watermark
    ]
    return {
        "held_up": held,
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


def _since_ms(log: Log) -> int | None:
    """Since when a log is held up: by the broker's word, else by the first record's time, if that one can be meant.

    The transaction is a little older than its first record.
    """
    if log.holder is not None and log.holder.since_ms:
        return log.holder.since_ms
    earliest, latest = PLAUSIBLE_MS
    return log.decided_ms if earliest <= log.decided_ms <= latest else None


def _requests(topics: ByTopic) -> dict[str, int]:
    """The answers of the window, by status."""
    names = {"201": "answered_201", "202": "answered_202", "503": "answered_503", "504": "answered_504"}
    names |= {"other": "answered_other", "replayed": "replayed"}
    return {shown: sum(counts[name] for counts in topics.values()) for shown, name in names.items()}


def metrics(document: Mapping[str, Any]) -> str:
    """The document's numbers in the text format of Prometheus."""
    lines: list[str] = []

    def gauge(name: str, help: str, values: Iterable[tuple[dict[str, str], float]]) -> None:
        lines.append(f"# HELP fencepost_audit_{name} {help}")
        lines.append(f"# TYPE fencepost_audit_{name} gauge")
        for labels, value in values:
            told = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.append(f"fencepost_audit_{name}{{{told}}} {value}" if told else f"fencepost_audit_{name} {value}")

    run = document["run"]
    gauge("run", "Number of the last run.", [({}, run["number"])])
    frozen = datetime.fromisoformat(run["frozen_at"]).timestamp()
    gauge("frozen_timestamp_seconds", "When the ends of the last run were frozen.", [({}, frozen)])
    gauge("clean", "Whether the last run found nothing (1) or something (0).", [({}, int(run["verdict"] == CLEAN))])
    balance = [({"state": name}, value) for name, value in document["balance"].items()]
    gauge("ids", "Ids (records: records) of the window by their place in the balance.", balance)
    kinds = [({"kind": kind, "severity": SEVERITIES[kind]}, count) for kind, count in document["kinds"].items()]
    gauge("findings", "Findings of the window by kind.", kinds)
    causes = [
        ({"kind": row["kind"], "topic": row["topic"] or "", "cause": row["cause"] or ""}, row["records"])
        for row in document["causes"]
    ]
    gauge("finding_records", "Records that findings are about (copies too many) by kind, topic and cause.", causes)
    gauge("rejects", "Records that could not be decoded.", [({}, document["evidence"]["rejects"])])
    held = document["evidence"]["held_up"]
    gauge("held_up_partitions", "Partitions held up by an open transaction.", [({}, len(held))])
    oldest = max((log["age_s"] or 0 for log in held), default=0)
    gauge("held_up_oldest_seconds", "For how long the oldest of them had been held up at the freeze.", [({}, oldest)])
    steps = [({"step": step}, value) for step, value in document["cost"]["seconds"].items()]
    gauge("step_seconds", "Where the time of the last run went.", steps)
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
