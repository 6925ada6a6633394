"""Tests the window of a report: the same for balance and findings, and it begins with a whole hour."""

from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import SparkSession

from deploy.stack import Kafka
from spark import rule_table
from spark.rules import current_findings
from spark.rules.findings import HOUR, IDS, LOG
from spark.tables import lake
from tests.spark.history import History, Writer
from tests.spark.rows import HOUR_MS
from tests.spark.world import FOREVER

WINDOW_H = 168
ONE = Writer(0, 100, 0, "a:1")


@pytest.fixture
def past(kafka: Kafka, namespace: str) -> History:
    """An empty history whose internal topics take the writer's timestamps."""
    return History(kafka.bootstrap, namespace, internal=FOREVER)


def test_the_window_begins_with_a_whole_hour() -> None:
    for minutes in (0, 20, 59):
        frozen_ms = 500_000 * HOUR_MS + minutes * 60_000
        assert rule_table.window_from(frozen_ms, WINDOW_H * HOUR_MS) == (500_000 - WINDOW_H) * HOUR_MS


def test_a_finding_stands_by_the_time_of_its_evidence_or_by_the_pass_that_found_it(spark: SparkSession) -> None:
    """By the time of their evidence or their hour; and by the run of the pass over all ids, and its result."""
    since_ms = 500_000 * HOUR_MS

    def found(name: str, scope: str, *, last: int, hour: int | None, run: int | None, kind: str | None = "lost") -> Any:
        hour_at = None if hour is None else datetime.fromtimestamp((since_ms + hour * HOUR_MS) / 1000, UTC)
        id = None if scope == LOG else name.ljust(16).encode()
        values = {
            "scope": scope,
            "kind": kind,
            "id": id,
            "accepted_hour": hour_at,
            "last_ms": since_ms + last,
            "run": run,
        }
        return {**values, "topic": name, "coordinates": []}

    rows = [
        found("in", HOUR, last=0, hour=0, run=1),
        found("old", HOUR, last=-1, hour=-1, run=1),
        found("replayed", HOUR, last=5, hour=-99, run=1),
        found("clock behind", HOUR, last=-5, hour=0, run=1),
        found("gap", LOG, last=5, hour=None, run=1, kind="evidence_gap"),
        found("old gap", LOG, last=-5, hour=None, run=1, kind="evidence_gap"),
        found("all ids", IDS, last=0, hour=0, run=4),
    ]
    for name, run, passed in (("before", 3, 4), ("same run", 4, 4), ("since", 5, 4), ("old lake", None, None)):
        rows.append(found(name, HOUR, last=0, hour=0, run=run))
        rows.append(found(name, IDS, last=0, hour=0, run=passed, kind=None))
    standing = current_findings.by_hour(spark.createDataFrame(rows, lake.schema("findings")), since_ms)
    names = {row["topic"] for row in standing.collect()}
    assert names == {"in", "replayed", "clock behind", "gap", "all ids", "since"}
