"""A sink as a Delta table beside a lake, and the events of both."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from service.contract import Rules, SinkRule
from spark.engine import frames
from spark.reading.run_plan import DATA, LEDGER, REQUESTS, Log, Plan, RunContext
from spark.rules import current_findings, sink_audit
from spark.rules.sink_audit import SinkReport
from spark.settings import Settings
from spark.tables import schemas
from spark.tables.lake import Lake
from tests.spark import delta_files
from tests.spark.rows import NOW_MS, copy, entry, id_bytes, name_of, reduced
from tests.spark.test_classify import log, settings
from tests.spark.times import HOUR_MS

BEGIN_MS: Final = NOW_MS // HOUR_MS * HOUR_MS
"""The beginning of the hour in which events are accepted, if not otherwise stated."""
LATE_S: Final = 600
SETTLE_MS: Final = 80_000
"""Timeouts and grace of `settings`."""
FROZEN_MS: Final = BEGIN_MS + 4 * HOUR_MS
RULE: Final = SinkRule("warehouse", ("t",), "delta", "accepted_at", LATE_S, id="event_id", margin_s=60)

Found = tuple[str, str | None, str]
SinkRow = tuple[str | None, int, int | None]
"""The event's name (None: the row has no id), and the times of acceptance and of arrival (ms)."""


def event(name: str, offset: int, at: int = BEGIN_MS, **more: Any) -> list[Any]:
    """A record with its ledger entry."""
    id = id_bytes(name)
    return [copy(offset, at=at, key=name, id=id, **more), entry(offset, at=at, id=id, **_place(more))]


def _place(more: Mapping[str, Any]) -> dict[str, Any]:
    return {name: more[name] for name in ("topic", "partition") if name in more}


def id_of(name: str) -> str:
    return id_bytes(name).hex()


class Warehouse:
    """A lake, and a sink as a Delta table. `run` compares both at a time."""

    def __init__(self, spark: SparkSession, root: Path, rule: SinkRule = RULE) -> None:
        self.spark = spark
        self.rule = replace(rule, path=str(root / "sink"))
        self.lake = Lake(spark, str(root / "lake"))
        self.plans: list[Plan] = []

    def deliver(self, *evidence: Any) -> None:
        """Merge records and claims as the next run does."""
        run = len(self.plans) + 1
        self.lake.append_once("deliveries", reduced(self.spark, evidence, run), run)

    def store(self, rows: Sequence[SinkRow]) -> None:
        """Append rows to the sink."""
        values = [(name and id_of(name), time_of(at), arrived and time_of(arrived)) for name, at, arrived in rows]
        schema = "event_id string, accepted_at timestamp, loaded_at timestamp"
        frame = self.spark.createDataFrame(values, schema).coalesce(1)
        frame.write.format("delta").mode("append").save(self.rule.path)

    def run(
        self, frozen_ms: int = FROZEN_MS, *, logs: Sequence[Log] = (), kept_from: str = "", **options: Any
    ) -> SinkReport:
        default = (log(DATA, "t", 0, decided_until_ms=frozen_ms),)
        claims = (
            log(LEDGER, "l", 0, decided_until_ms=frozen_ms, complete_since_ms=BEGIN_MS - HOUR_MS),
            log(REQUESTS, "r", 0, decided_until_ms=frozen_ms),
        )
        plan = Plan(len(self.plans) + 1, frozen_ms, "{}", (*(logs or default), *claims))
        last_plan = self.plans[-1] if self.plans else None
        context = RunContext(plan, self._settings(**options), last_plan, kept_from=kept_from)
        (report,) = sink_audit.audit(self.lake, context, lambda line: None)
        self.plans.append(plan)
        return report

    def take_over(self) -> None:
        """Let another process repeat the last run, which was killed after it had compared the sink."""
        killed = self.plans.pop()
        self.lake = Lake(self.spark, self.lake.root)
        self.lake.take_over(killed.run, ["deliveries", "sinks"])

    def _settings(self, **options: Any) -> Settings:
        return replace(settings(**{"window_h": 24, **options}), rules=Rules(sinks=(self.rule,)))

    def found(self) -> set[Found]:
        """Return kind, cause and event (or partition) of each finding."""
        rows = delta_files.rows(Path(self.lake.path("sinks")), "kind", "cause", "id", "topic", "partition")
        return {
            (row["kind"], row["cause"], name_of(row["id"]) if row["id"] else f"{row['topic']}[{row['partition']}]")
            for row in rows
            if row["kind"] is not None
        }

    def finding_ids(self) -> list[str]:
        """Return the ids of the findings in the report of the last run."""
        others = frames.rows_of(self.spark, schemas.of("findings"), [])
        since_ms = self.plans[-1].frozen_ms - 24 * HOUR_MS
        current = current_findings.by_hour(sink_audit.with_findings(self.lake, others, since_ms), since_ms)
        return sorted(row["finding_id"] for row in current_findings.by_finding(current).collect())


def time_of(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def counts(report: SinkReport) -> dict[str, int]:
    """Return the counts of a report that are not 0."""
    return {name: number for name, number in report.counts.items() if number}
