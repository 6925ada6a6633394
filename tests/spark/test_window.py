"""Tests the window of a report: the same for balance and findings, and it begins with a whole hour."""

from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import SparkSession

from deploy.stack import Kafka
from spark import rule_table
from spark.rules import current_findings, late_findings
from spark.rules.findings import HOUR, IDS, LOG
from spark.tables import hours, schemas
from tests.spark.history import History
from tests.spark.times import HOUR_MS, WINDOW_H
from tests.spark.world import FOREVER

SINCE_MS = 500_000 * HOUR_MS


@pytest.fixture
def past(kafka: Kafka, namespace: str) -> History:
    """An empty history whose internal topics take the writer's timestamps."""
    return History(kafka.bootstrap, namespace, internal=FOREVER)


def test_the_window_begins_with_a_whole_hour() -> None:
    for minutes in (0, 20, 59):
        frozen_ms = 500_000 * HOUR_MS + minutes * 60_000
        assert rule_table.window_from(frozen_ms, WINDOW_H * HOUR_MS) == (500_000 - WINDOW_H) * HOUR_MS


def _found(
    name: str,
    scope: str,
    *,
    last: int,
    hour: int | None,
    run: int | None = 1,
    kind: str | None = "lost",
    late: int | None = None,
    count: int = 1,
) -> Any:
    """A finding (schemas.FINDING) with its times relative to the start of the window: `last`, `late` (ms), `hour`."""
    values = {
        "scope": scope,
        "kind": kind,
        "id": name.ljust(16).encode() if kind in ("lost", None) else None,
        "accepted_hour": None if hour is None else datetime.fromtimestamp((SINCE_MS + hour * HOUR_MS) / 1000, UTC),
        "last_ms": SINCE_MS + last,
        "run": run,
        "late_ms": None if late is None else SINCE_MS + late,
        "count": count,
    }
    return {**values, "topic": name, "coordinates": []}


def test_a_finding_stands_by_the_time_of_its_evidence_or_by_the_pass_that_found_it(spark: SparkSession) -> None:
    """By the time of their evidence, hour or decision; and by the run of the pass over all ids, and its result."""
    rows = [
        _found("in", HOUR, last=0, hour=0),
        _found("old", HOUR, last=-1, hour=-1),
        _found("replayed", HOUR, last=5, hour=-99),
        _found("clock behind", HOUR, last=-5, hour=0),
        _found("gap", LOG, last=5, hour=None, kind="evidence_gap"),
        _found("old gap", LOG, last=-5, hour=None, kind="evidence_gap"),
        _found("decided late", HOUR, last=-5, hour=-1, late=0),
        _found("decided before", HOUR, last=-5, hour=-1, late=-1),
        _found("all ids", IDS, last=0, hour=0, run=4),
    ]
    for name, run, passed in (("before", 3, 4), ("same run", 4, 4), ("since", 5, 4), ("old lake", None, None)):
        rows.append(_found(name, HOUR, last=0, hour=0, run=run))
        rows.append(_found(name, IDS, last=0, hour=0, run=passed, kind=None))
    current = current_findings.by_hour(spark.createDataFrame(rows, schemas.of("findings")), SINCE_MS)
    names = {row["topic"] for row in current.collect()}
    assert names == {"in", "replayed", "clock behind", "gap", "decided late", "all ids", "since"}


def test_a_finding_is_late_if_its_hour_left_the_window_before_the_run_that_decided_it(spark: SparkSession) -> None:
    """The time of that run stays when a later run makes the finding again."""
    late_hour: dict[str, Any] = {"hour": -5, "last": -1}
    gap: dict[str, Any] = {**late_hour, "kind": "evidence_gap"}
    made = [
        _found("new", HOUR, **late_hour),
        _found("known", HOUR, **late_hour),
        _found("known to be late", HOUR, **late_hour),
        _found("decided in time", HOUR, hour=-6, last=-1),
        _found("seen", HOUR, hour=-5, last=1),
        _found("in two hours", HOUR, **late_hour),
        _found("in two hours", IDS, hour=-4, last=-1),
        _found("in two hours", IDS, hour=-4, last=-1, kind=None),
        _found("revoked before", HOUR, **late_hour),
        _found("over hours", IDS, **late_hour),
        _found("over hours", IDS, **late_hour, kind=None),
        _found("known over hours", IDS, **late_hour),
        _found("new gap", HOUR, **gap),
        _found("known gap", HOUR, **gap),
        _found("grown gap", HOUR, **gap, count=2),
    ]
    made_before = [
        _found("known", HOUR, **late_hour),
        _found("known over hours", IDS, **late_hour),
        _found("known to be late", HOUR, **late_hour, late=7),
        _found("revoked before", HOUR, **late_hour, run=3),
        _found("revoked before", IDS, hour=-4, last=-1, kind=None, run=4),
        _found("known gap", HOUR, **gap),
        _found("grown gap", HOUR, **gap),
    ]
    found, known = (spark.createDataFrame(rows, schemas.of("findings")) for rows in (made, made_before))
    late_hours = {hours.text_of(SINCE_MS - 5 * HOUR_MS): SINCE_MS + 9}
    rows = late_findings.with_late_ms(found, known, late_hours, SINCE_MS).collect()
    late = {(row["topic"], row["scope"]): row["late_ms"] - SINCE_MS for row in rows if row["late_ms"] is not None}
    assert late == {
        ("new", HOUR): 9,
        ("known to be late", HOUR): 7,
        ("in two hours", HOUR): 9,
        ("in two hours", IDS): 9,
        ("revoked before", HOUR): 9,
        ("over hours", IDS): 9,
        ("new gap", HOUR): 9,
        ("grown gap", HOUR): 9,
    }
    assert len(rows) == len(made)
    in_time = late_findings.with_late_ms(found, known, {}, SINCE_MS).collect()
    assert {row["late_ms"] for row in in_time} == {None}
