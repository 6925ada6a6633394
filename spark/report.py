"""What a run tells: one document, as JSON, as a page and as metrics."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark import files, page
from spark.balance import Balance, ByHour, ByTopic, by_topic, closed
from spark.decode import UNKEYED
from spark.findings import CONFLICT, DUPLICATE, EVIDENCE_GAP, IDS, KINDS
from spark.lake import Lake
from spark.offsets import DATA, LEDGER, REQUESTS, Plan
from spark.settings import HOUR_MS, Settings

# More are counted and stay in the lake: a report is read, and held in the driver's memory.
FINDINGS_MAX: Final = 100_000

CLEAN: Final = "clean"
FINDINGS: Final = "findings"
EXIT_CLEAN: Final = 0
EXIT_FINDINGS: Final = 3

_PLACE: Final = ("kind", "cause", "topic", "partition")


@dataclass(frozen=True)
class Report:
    """The document of report.json, and the exit status that goes with it."""

    document: dict[str, Any]
    hours: ByHour

    @property
    def status(self) -> int:
        return EXIT_CLEAN if self.document["run"]["verdict"] == CLEAN else EXIT_FINDINGS


def build(
    tables: Lake, plan: Plan, settings: Settings, balance: Balance, seconds: Mapping[str, float], resumed: bool
) -> Report:
    """The document of a run, from the findings in the lake and the balance; CannotRun where that does not close."""
    since_ms = plan.frozen_ms - settings.options.window_h * HOUR_MS
    first_hour = datetime.fromtimestamp(since_ms / 1000, UTC).strftime("%Y-%m-%d %H:00:00")
    balance.drop_before(first_hour)
    hours = balance.since(first_hour)
    topics = by_topic(hours)
    line = closed(topics)
    standing = _standing(tables.read("findings"), since_ms).persist()
    causes = _causes(standing)
    counted = {kind: sum(row["findings"] for row in causes if row["kind"] == kind) for kind in KINDS}
    found = sum(counted.values())
    listed = [json.loads(row["finding"]) for row in _listed(standing).collect()]
    standing.unpersist()
    return Report(
        {
            "run": {
                "number": plan.run,
                "verdict": FINDINGS if found else CLEAN,
                "findings": found,
                "frozen_at": _iso(plan.frozen_ms),
                "window_from": _iso(since_ms),
                "namespace": settings.shared.namespace,
                "topics": plan.topics,
                "caught_up": all(log.end == log.last_stable for log in plan.logs if log.audited),
                "ids_pass": not settings.options.skip_ids,
                "resumed": resumed,
            },
            "balance": line,
            "topics": [{"topic": topic, **counts} for topic, counts in topics.items()],
            "kinds": counted,
            "causes": causes,
            "findings": [{name: finding.get(name) for name in _FINDING} for finding in listed],
            "findings_left_out": found - len(listed),
            "evidence": _evidence(plan, topics),
            "requests": _requests(topics),
            "cost": {
                "seconds": dict(seconds),
                "offsets": sum(log.end - log.start for log in plan.logs if log.audited),
            },
        },
        hours,
    )


_FINDING: Final = (
    "kind",
    "cause",
    "id",
    "key",
    "topic",
    "partition",
    "count",
    "first_offset",
    "last_offset",
    "coordinates",
)


def write(spark: SparkSession, folder: str, made: Report) -> None:
    """report.json, report.html and metrics.prom into a folder, each whole or not at all."""
    files.write(spark, folder, "metrics.prom", [metrics(made.document)])
    files.write(spark, folder, "report.html", page.render(made.document, made.hours))
    encoder = json.JSONEncoder(ensure_ascii=False, indent=1)
    files.write(spark, folder, "report.json", encoder.iterencode(made.document))


def _standing(findings: DataFrame, since_ms: int) -> DataFrame:
    """lake.FINDING → those that hold and lie in the window; those of partitions summed over its hours."""
    recent = findings.where(F.col("last_ms") >= since_ms)
    united = findings.where((F.col("scope") == IDS) & F.col("kind").isNull()).select("id")
    of_places = F.col("kind").isin(UNKEYED, EVIDENCE_GAP)
    single = recent.where(F.col("kind").isNotNull() & ~of_places)
    of_hours = single.where(F.col("scope") != IDS).join(united, "id", "left_anti")
    each = of_hours.unionByName(single.where(F.col("scope") == IDS))
    places = (
        recent.where(of_places)
        .groupBy(*_PLACE)
        .agg(
            F.sum("count").alias("count"),
            F.min("first_offset").alias("first_offset"),
            F.max("last_offset").alias("last_offset"),
        )
    )
    return each.select(*_PLACE, "id", "key", "count", "first_offset", "last_offset", "coordinates").unionByName(
        places, allowMissingColumns=True
    )


def _listed(standing: DataFrame) -> DataFrame:
    """Standing findings → `finding` (JSON), in an order that does not depend on the run, up to FINDINGS_MAX."""
    hexed = standing.withColumn("id", F.lower(F.hex("id"))).withColumn(
        "coordinates", F.coalesce("coordinates", F.array().cast(standing.schema["coordinates"].dataType))
    )
    ordered = hexed.orderBy(_rank(F.col("kind")), "topic", "partition", "cause", "id").limit(FINDINGS_MAX)
    return ordered.select(F.to_json(F.struct(*_FINDING), {"ignoreNullFields": "false"}).alias("finding"))


def _causes(standing: DataFrame) -> list[dict[str, Any]]:
    """How many findings there are by kind, topic and cause, and how many copies too many: a bounded number of rows.

    A copy too many counts for the topic in which it lies and for its own cause; those of which no coordinates were
    kept count with their finding.
    """
    uncounted = F.col("count") - F.size("coordinates")
    many = F.col("kind").isin(DUPLICATE, CONFLICT)
    each = standing.select(
        "kind",
        "topic",
        "cause",
        F.lit(1).alias("findings"),
        F.when(many, uncounted).otherwise(F.col("count")).alias("records"),
    )
    copies = standing.where(many).select("kind", F.explode("coordinates").alias("copy")).where("copy.cause is not null")
    extra = copies.select("kind", "copy.topic", "copy.cause", F.lit(0).alias("findings"), F.lit(1).alias("records"))
    summed = (
        each.unionByName(extra)
        .groupBy("kind", "topic", "cause")
        .agg(F.sum("findings").alias("findings"), F.sum("records").alias("records"))
    )
    rows = [row.asDict() for row in summed.collect()]
    return sorted(rows, key=lambda row: (KINDS.index(row["kind"]), row["topic"] or "", row["cause"] or ""))


def _rank(kind: Column) -> Column:
    """Kinds in the order of KINDS."""
    return F.array_position(F.array(*(F.lit(name) for name in KINDS)), kind)


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
            "open_since": _iso(log.decided_ms) if log.decided_ms else None,
            "age_s": round((plan.frozen_ms - log.decided_ms) / 1000, 3) if log.decided_ms else None,
        }
        for log in audited
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
    kinds = [({"kind": kind}, count) for kind, count in document["kinds"].items()]
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
