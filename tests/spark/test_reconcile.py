"""The hours that a run classifies."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from service.contract.wire.ids import event_id
from spark.engine import session
from spark.reading.run_plan import DATA, LEDGER, Log, LogGap, Plan, RunContext, reads_nothing_new
from spark.rules import current_findings
from spark.rules.balance import Balance
from spark.rules.reconcile import classifies_all, hours_to_classify, may_differ, reconcile, unchanged_balance
from spark.rules.record_counts import PARTITIONS_MAX
from spark.settings import OFFSETS_MOST
from spark.step_timer import StepTimer
from spark.tables import hours, schemas
from spark.tables.lake import Lake
from tests.spark.rows import NOW_MS, answer, copy, entry, ids, reduced
from tests.spark.scans import reads
from tests.spark.test_classify import log, settings
from tests.spark.test_classify import plan as a_plan
from tests.spark.times import HOUR_MS

LAST = Plan(1, 1000, "A", (log(DATA, "t", 0),))
LAST_RUN: dict[str, Any] = {"run": 1, "options": LAST.options, "topics": LAST.topics}


@pytest.mark.parametrize(
    ("last_run", "replaced", "plan", "all_hours"),
    [
        (LAST_RUN, [], replace(LAST, run=2), False),
        (None, [], LAST, True),
        (LAST_RUN, [], replace(LAST, run=2, options="B"), True),
        (LAST_RUN, [], replace(LAST, run=2, logs=(log(DATA, "u", 0),)), True),
        (LAST_RUN, [], replace(LAST, run=2, logs=(log(DATA, "t", 0), log(DATA, "u", 0))), False),
        (LAST_RUN, [], replace(LAST, run=2, logs=tuple(log(DATA, "t", n) for n in range(PARTITIONS_MAX + 1))), True),
        (LAST_RUN, [replace(LAST, run=2)], replace(LAST, run=3), False),
        # Run 2 merged nothing, and was planned again after it had replaced findings.
        (LAST_RUN, [replace(LAST, run=2, options="B")], replace(LAST, run=3), True),
        (LAST_RUN, [replace(LAST, run=2, options="B"), replace(LAST, run=3)], replace(LAST, run=4), True),
        (LAST_RUN, [replace(LAST, run=2, skip_ids=True)], replace(LAST, run=3), True),
    ],
    ids=[
        "the next run",
        "the first run",
        "other options",
        "other topics",
        "one more topic",
        "too many partitions to count each",
        "planned again",
        "planned again with other options",
        "planned again twice",
        "planned again with the pass over ids",
    ],
)
def test_a_run_classifies_all_hours_if_findings_may_be_those_of_other_options(
    last_run: dict[str, Any] | None, replaced: list[Plan], plan: Plan, all_hours: bool
) -> None:
    assert classifies_all(RunContext(plan, settings(), LAST, last_run, replaced)) is all_hours


@pytest.mark.parametrize(("evidence_changed", "again"), [(False, "LPSUF"), (True, "DLPSUFN")])
def test_hours_are_classified_again_whose_ids_of_several_hours_may_have_had_another_verdict(
    spark: SparkSession, evidence_changed: bool, again: str
) -> None:
    """A log that is blocked again makes what was stuck or lost pending; the balance subtracts present verdicts."""
    rows = [
        ("D", "delivered_once", None, 0),
        ("L", "lost", None, 0),
        ("P", "pending", None, 0),
        ("S", "stuck", None, 0),
        ("U", "unprovable", None, 0),
        ("F", None, "phantom", 0),
        ("N", None, None, 0),
        ("c", "delivered_once", None, 1),
    ]
    judged = spark.createDataFrame(rows, "name string, category string, phantom string, is_clean int")
    assert "".join(row["name"] for row in may_differ(judged, evidence_changed).collect()) == again


@pytest.mark.parametrize("skip_ids", [False, True])
def test_a_loss_is_proven_only_if_the_record_counts_in_no_other_hour(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip_ids: bool
) -> None:
    """A clock was a day ahead: the acceptance was plausible only when a replayed 201 was read, hours later."""
    lake = Lake(spark, str(tmp_path))
    replayed = answer(201, 5, at=NOW_MS - 2 * HOUR_MS, timestamp_ms=NOW_MS)
    rows = reduced(spark, [copy(5), entry(5), replayed, answer(201, 6, id=b"l" * 16)])
    lake.append_once("deliveries", rows, 1)
    # A verdict of another hour, which is not read, in a table that is not small.
    monkeypatch.setattr("spark.tables.lake.SMALL_BYTES", 0)
    known = {"run": 0, "accepted_hour": hours.at("2020-01-01 00:00:00"), "id": b"o" * 16, "verdict": "lost"}
    lake.append_once("verdicts", spark.createDataFrame([known], schemas.of("verdicts")), 0)
    timer = StepTimer(lambda line: None)
    with session.settings(spark, {"spark.sql.maxMetadataStringLength": "1000"}):
        reconcile(lake, RunContext(a_plan(), settings(skip_ids=skip_ids)), timer)
    assert reads(spark, tmp_path, "verdicts")["number of files read"] == 0
    found = {(row["offset"], row["count"]): row["proven_lost"] for row in lake.read("deliveries").collect()}
    assert found == {(5, 1): None, (5, 0): None, (6, 0): True}


def test_a_new_topic_lets_the_hours_be_classified_that_name_it(spark: SparkSession, tmp_path: Path) -> None:
    """A claim that an earlier run has merged is judged by the log of its topic once the topic is there."""
    lake = Lake(spark, str(tmp_path))
    evidence = ids({"known": [copy(1), entry(1)], "claimed": [entry(2, topic="u", at=NOW_MS - HOUR_MS)]})
    evidence += ids({"elsewhere": [copy(3, at=NOW_MS - 2 * HOUR_MS), entry(3, at=NOW_MS - 2 * HOUR_MS)]})
    lake.append_once("deliveries", reduced(spark, evidence), 1)
    rows, balance = lake.read("deliveries"), Balance()
    last_run = {"run": 1, "options": LAST.options, "topics": ["t"]}
    both = replace(LAST, run=2, logs=(log(DATA, "t", 0), log(DATA, "u", 0)))
    context = RunContext(both, settings(), LAST, last_run)
    assert hours_to_classify(rows, context, balance) == {hours.text_of(NOW_MS - HOUR_MS)}
    same = replace(context, plan=replace(LAST, run=2))
    assert hours_to_classify(rows, same, balance) == set()


READ = log(DATA, "t", 0, start=9, end=9)
LEDGER_READ = log(LEDGER, "l", 0, start=4, end=4)
IDLE_LAST = replace(LAST, logs=(READ, LEDGER_READ))
GAP = LogGap(2, 4, "retention", 1000)


@pytest.mark.parametrize(
    ("logs", "nothing_new"),
    [
        ((READ, LEDGER_READ), True),
        ((replace(READ, end=10), LEDGER_READ), False),
        ((READ, replace(LEDGER_READ, end=5)), False),
        # The records of a topic that is not audited are not read.
        ((READ, LEDGER_READ, log(DATA, "u", 0, audited=False, start=0, end=3)), True),
        ((replace(READ, topic_id="other"), LEDGER_READ), False),
        ((READ, replace(LEDGER_READ, gaps=(GAP,))), False),
        ((replace(READ, compacted=True), LEDGER_READ), False),
    ],
    ids=["nothing", "a record", "a ledger record", "not audited", "recreated", "a gap", "compacted"],
)
def test_a_run_reads_nothing_new_if_the_logs_have_no_records_and_prove_nothing_else(
    logs: tuple[Log, ...], nothing_new: bool
) -> None:
    assert reads_nothing_new(replace(IDLE_LAST, run=2, logs=logs), IDLE_LAST) is nothing_new
    assert not reads_nothing_new(replace(IDLE_LAST, run=2, logs=logs), None)


def test_an_end_that_becomes_known_is_new() -> None:
    blocked = replace(IDLE_LAST, logs=(replace(READ, later_end=OFFSETS_MOST), LEDGER_READ))
    assert not reads_nothing_new(replace(IDLE_LAST, run=2), blocked)


IDLE_RUN: dict[str, Any] = {
    **LAST_RUN,
    "last_pass": 1,
    "kept_from": "",
    "hours": {"2026-01-01 00:00:00": {"t": {"accepted": 1, "delivered_once": 1}}},
    "adjustment": {},
    "evidence_changed": False,
    "open_ids": False,
}


@pytest.mark.parametrize(
    ("changes", "compares_ids", "unchanged"),
    [
        ({}, True, True),
        ({"options": "B"}, True, False),
        ({"hours": {"2026-01-01 00:00:00": {"t": {"accepted": 1, "pending": 1, "open": 1}}}}, True, False),
        ({"adjustment": {"2026-01-01 00:00:00": {"t": {"accepted": -1}}}}, True, True),
        ({"open_ids": True}, True, False),
        ({"open_ids": True}, False, True),
        ({"last_pass": 0}, True, False),
        ({"last_pass": 0}, False, True),
        ({"evidence_changed": True}, True, False),
        ({"kept_from": "2025-01-01 00:00:00"}, True, False),
    ],
)
def test_a_run_is_unchanged_if_no_verdict_can_be_another_one(
    changes: Mapping[str, Any], compares_ids: bool, unchanged: bool
) -> None:
    plan, last_run = replace(IDLE_LAST, run=2), {**IDLE_RUN, **changes}
    context = RunContext(plan, settings(skip_ids=not compares_ids), IDLE_LAST, last_run)
    balance = unchanged_balance(context)
    assert (balance is not None) is unchanged
    assert balance is None or balance.hours == last_run["hours"]
    one_more = replace(plan, logs=(READ, LEDGER_READ, log(DATA, "u", 0, start=0, end=0)))
    assert unchanged_balance(replace(context, plan=one_more)) is None
    read = replace(plan, logs=(replace(READ, end=10), LEDGER_READ))
    assert unchanged_balance(replace(context, plan=read)) is None
    # An earlier version did not store whether an id with rows in several hours has an open verdict.
    earlier = {name: value for name, value in last_run.items() if name != "open_ids"}
    assert unchanged_balance(replace(context, last_run=earlier)) is None or not compares_ids


def test_a_run_of_nothing_new_would_find_what_the_last_run_found(spark: SparkSession, tmp_path: Path) -> None:
    lake, earlier, other = Lake(spark, str(tmp_path)), NOW_MS - 2 * HOUR_MS, (0, 11, 0, "b:1")
    evidence = ids(
        {
            "twice": [copy(1), entry(1), copy(2, writer=None)],
            "two hours": [copy(3, at=earlier), entry(3, at=earlier), copy(4, writer=other)],
            "lost": [entry(5)],
            "once": [copy(6), entry(6)],
        }
    )
    for offset, key in ((7, "first"), (8, "second")):
        by_key: dict[str, Any] = {"id": event_id(key)}
        evidence += [copy(offset, key=key, record_key_hash=7, **by_key), entry(offset, **by_key)]
    lake.append_once("deliveries", reduced(spark, evidence), 1)
    plan = a_plan()
    first = RunContext(plan, settings())
    timer = StepTimer(lambda line: None)
    last_balance = reconcile(lake, first, timer)
    last_balance.close(hours.text_of(first.window_from))
    findings_then = _findings(lake)
    kinds = {("duplicate", "hour"), ("duplicate", "ids"), ("lost", "hour"), ("client_duplicate", "ids")}
    assert {(row["kind"], row["scope"]) for row in lake.read("findings").collect()} >= kinds
    last_run: dict[str, Any] = {
        "run": plan.run,
        "options": plan.options,
        "topics": plan.topics,
        "last_pass": plan.run,
        **json.loads(json.dumps(last_balance.document())),
    }
    logs = (replace(one, start=one.end) for one in plan.logs)
    later = replace(plan, run=plan.run + 1, frozen_ms=plan.frozen_ms + HOUR_MS, logs=tuple(logs))
    context = RunContext(later, settings(), plan, last_run)
    unchanged = unchanged_balance(context)
    assert unchanged is not None
    assert unchanged == reconcile(lake, context, timer)
    assert _findings(lake) == findings_then


def test_what_came_in_a_pause_longer_than_the_window_is_reported_for_a_window(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake, plan, timer = Lake(spark, str(tmp_path)), a_plan(), StepTimer(lambda line: None)
    before_pause = plan.frozen_ms - 3 * HOUR_MS
    evidence = ids({"known": [entry(1)], "repeated": [copy(2, at=before_pause), entry(2, at=before_pause)]})
    lake.append_once("deliveries", reduced(spark, evidence), 1)
    first = RunContext(plan, settings())
    balance = reconcile(lake, first, timer)
    assert {row["kind"] for row in lake.read("findings").collect()} >= {"lost"}
    in_pause, later_in_pause = plan.frozen_ms + HOUR_MS, plan.frozen_ms + 3 * HOUR_MS
    evidence = ids(
        {
            "lost": [entry(5, at=in_pause)],
            "twice": [
                *(copy(6, at=in_pause), entry(6, at=in_pause)),
                *(copy(7, at=later_in_pause), entry(7, at=later_in_pause)),
            ],
            "repeated": [copy(3, at=before_pause, timestamp_ms=in_pause)],
        }
    )
    for offset, key in ((8, "first"), (9, "second")):
        by_key: dict[str, Any] = {"id": event_id(key), "at": in_pause}
        evidence += [copy(offset, key=key, record_key_hash=7, **by_key), entry(offset, **by_key)]
    lake.append_once("deliveries", reduced(spark, evidence, 2), 2)
    day_ms = 24 * HOUR_MS
    for run, later_ms, has_new in ((2, 20 * day_ms, True), (3, 21 * day_ms, True), (4, 28 * day_ms, False)):
        last_run = {
            "run": run - 1,
            "frozen_ms": plan.frozen_ms,
            "options": plan.options,
            "topics": plan.topics,
            **json.loads(json.dumps(balance.document())),
        }
        last_plan, plan = plan, replace(plan, run=run, frozen_ms=first.plan.frozen_ms + later_ms)
        context = RunContext(plan, settings(), last_plan, last_run)
        balance = reconcile(lake, context, timer)
        balance.close(hours.text_of(context.window_from))
        current = current_findings.by_hour(lake.read("findings"), context.window_from).where("topic = 't'")
        found = {(row["kind"], row["scope"]) for row in current.where("kind <> 'evidence_gap'").collect()}
        new = {("lost", "hour"), ("duplicate", "hour"), ("duplicate", "ids"), ("client_duplicate", "ids")}
        assert found == (new if has_new else set())
        lost = current.where("kind = 'lost'").collect()
        assert {bytes(row["id"]) for row in lost} == ({b"lost".ljust(16)} if has_new else set())


def _findings(lake: Lake) -> list[str]:
    """Return the findings of a lake as text, without their run."""
    return sorted(map(str, lake.read("findings").drop("run").collect()))
