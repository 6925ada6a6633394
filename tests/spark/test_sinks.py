"""Sinks compared with the lake: each fault with its kind and cause, when it may be said, and what is read for it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark.errors import PySparkValueError
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import Rules, SinkRule
from spark.engine import frames
from spark.errors import CannotRun, Unreadable
from spark.reading import iceberg
from spark.reading.intervals import Interval, merged, without
from spark.reading.run_plan import DATA, LEDGER, REQUESTS, UNWANTED, Log, Plan, RunContext
from spark.reading.sinks import SinkReader, check_rules
from spark.rules import sink_audit, sink_verdicts
from spark.rules.sink_verdicts import (
    NEVER_READ,
    RELEASED_MOST,
    HourState,
    Released,
    SinkState,
)
from spark.tables import hours, schemas
from tests.sinks.iceberg import Iceberg
from tests.spark.rows import answer, copy, entry, ids, name_of
from tests.spark.test_classify import log, settings
from tests.spark.times import HOUR_MS, MINUTE_MS
from tests.spark.warehouse import BEGIN_MS, FROZEN_MS, LATE_S, RULE, SETTLE_MS, Warehouse, counts, event, id_of, time_of


@pytest.fixture
def warehouse(spark: SparkSession, tmp_path: Path) -> Warehouse:
    return Warehouse(spark, tmp_path)


def test_a_table_may_be_read_in_thousands_of_spans_of_time(warehouse: Warehouse) -> None:
    """The hours of a long window in which events are missing, each of them compared again in every run."""
    warehouse.store([("first", BEGIN_MS, None), ("between", BEGIN_MS + 1, None), ("second", BEGIN_MS + 2, None)])
    spans = [(BEGIN_MS + 2 * nth, BEGIN_MS + 2 * nth + 1) for nth in range(2000)]
    read = SinkReader(warehouse.spark, warehouse.rule).read(spans)
    assert sorted(row["event_ms"] for row in read.collect()) == [BEGIN_MS, BEGIN_MS + 2]


def test_the_time_of_a_table_may_be_a_field_of_a_structure(warehouse: Warehouse) -> None:
    warehouse.store([("first", BEGIN_MS, None), ("later", BEGIN_MS + 5, None)])
    table = warehouse.spark.read.format("delta").load(warehouse.rule.path)
    nested = replace(warehouse.rule, path=f"{warehouse.rule.path}-nested", event_time="event.at")
    table.selectExpr("event_id", "struct(accepted_at at) event").write.format("delta").save(nested.path)
    read = SinkReader(warehouse.spark, nested).read([(BEGIN_MS, BEGIN_MS + 1)])
    assert [row["event_ms"] for row in read.collect()] == [BEGIN_MS]


def test_each_event_is_judged_by_its_rows_in_the_sink(warehouse: Warehouse) -> None:
    warehouse.rule = replace(warehouse.rule, arrived="loaded_at")
    due = BEGIN_MS + SETTLE_MS + 1000 * LATE_S
    fresh = FROZEN_MS - SETTLE_MS - 1000 * LATE_S
    warehouse.deliver(
        *event("once", 1),
        *event("gone", 2),
        *event("again", 3),
        *event("copied", 4),
        *event("copied", 5),
        *event("slow", 6),
        # The first that names a record, the ledger or an answer, tells when it was written.
        *ids({"slow": [answer(201, 6, at=BEGIN_MS)]}),
        *event("in time", 7),
        *event("fresh", 8, at=fresh),
        *event("other", 9, topic="u"),
        # A copy in another topic, and a claim without a record: the sink has one record of it.
        *event("again", 20, topic="u"),
        *ids({"again": [entry(21, at=BEGIN_MS)]}),
        # Of two records the later one tells until when a row may come.
        *event("recopied", 22),
        *event("recopied", 23, at=BEGIN_MS + 1),
        # Named by nothing but its own header; without the header, but named; and the record of another program.
        *ids(
            {"unclaimed": [copy(24, at=BEGIN_MS)], "bare": [copy(25, at=BEGIN_MS, writer=None), entry(25, at=BEGIN_MS)]}
        ),
        *ids({"foreign": [copy(26, at=BEGIN_MS, writer=None)]}),
        # A claim without a record: lost, and not the fault of a sink.
        *ids({"lost": [entry(10, at=BEGIN_MS)]}),
        # In doubt, and never written.
        *ids({"stuck": [answer(504, at=BEGIN_MS)]}),
    )
    warehouse.store(
        [
            *((name, BEGIN_MS, BEGIN_MS) for name in ("once", "again", "again", "copied", "copied")),
            ("slow", BEGIN_MS, due + 6),
            *((name, BEGIN_MS, due + 5) for name in ("in time", "unclaimed", "bare")),
            ("recopied", BEGIN_MS, due + 6),
            ("unknown", BEGIN_MS, BEGIN_MS),
            # Within the margin around an hour that is compared, and in an hour that is not.
            *((None, at, BEGIN_MS) for at in (BEGIN_MS, BEGIN_MS - 1)),
            ("once", BEGIN_MS - HOUR_MS, BEGIN_MS),
        ]
    )
    report = warehouse.run()
    assert warehouse.found() == {
        ("missing_in_sink", None, "gone"),
        ("twice_in_sink", "repeated", "again"),
        ("twice_in_sink", "copied", "copied"),
        ("late_in_sink", "arrived", "slow"),
    }
    assert counts(report) == {
        "expected": 10,
        "present_once": 5,
        "missing_in_sink": 1,
        "twice_in_sink": 2,
        "late_in_sink": 1,
        "pending": 1,
        "unidentified": 1,
    }
    # Every event that was accepted before the hour with the pending one is judged.
    assert (report.judged_until_ms, report.read_ms, report.unreadable) == (
        min(fresh // HOUR_MS * HOUR_MS, FROZEN_MS - SETTLE_MS - 1000 * LATE_S),
        FROZEN_MS,
        None,
    )
    proofs = {
        name_of(row["id"]): (row["count"], [one["offset"] for one in row["coordinates"]], row["sink_ms"])
        for row in warehouse.lake.read("sinks").where("kind IS NOT NULL").collect()
    }
    assert proofs == {
        "gone": (1, [2], FROZEN_MS),
        "again": (2, [3], BEGIN_MS),
        "copied": (2, [4, 5], BEGIN_MS),
        "slow": (1, [6], due + 6),
    }
    # An hour that has left the window is not compared any more: its findings are no longer current.
    others = frames.rows_of(warehouse.spark, schemas.of("findings"), [])
    of_hours = [sink_audit.with_findings(warehouse.lake, others, ms).count() for ms in (BEGIN_MS, BEGIN_MS + HOUR_MS)]
    assert of_hours == [4, 0]
    first_of_window, later = (warehouse.run(BEGIN_MS + hour * HOUR_MS) for hour in (24, 25))
    assert first_of_window.counts["expected"] == 10
    assert counts(later) == {"expected": 1, "missing_in_sink": 1}


def test_an_event_is_missing_when_its_lateness_is_over_and_late_when_it_comes(warehouse: Warehouse) -> None:
    warehouse.deliver(*event("slow", 1), *event("once", 2))
    warehouse.store([("once", BEGIN_MS, None)])
    # The entry was written 5 ms after the acceptance.
    due = BEGIN_MS + 5 + SETTLE_MS + 1000 * LATE_S
    assert counts(warehouse.run(due)) == {"expected": 2, "present_once": 1, "pending": 1}
    assert counts(warehouse.run(due + 1)) == {"expected": 2, "present_once": 1, "missing_in_sink": 1}
    assert warehouse.found() == {("missing_in_sink", None, "slow")}
    # The row comes after the run was killed, which had stored that the event is missing: the run is resumed.
    warehouse.store([("slow", BEGIN_MS, None)])
    warehouse.take_over()
    for later in (1, 2):
        assert counts(warehouse.run(due + later)) == {"expected": 2, "present_once": 1, "late_in_sink": 1}
        assert warehouse.found() == {("late_in_sink", "was_missing", "slow")}
    # What was missing in another table, or by another rule, says nothing.
    warehouse.rule = replace(warehouse.rule, margin_s=30)
    assert counts(warehouse.run(due + 3)) == {"expected": 2, "present_once": 2}


def test_an_hour_that_matches_is_not_read_again_unless_it_has_new_records(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Sequence[Interval]] = []

    def noted(reader: SinkReader, intervals: Sequence[Interval]) -> Any:
        read.append(intervals)
        return original(reader, intervals)

    original: Callable[..., Any] = SinkReader.read
    monkeypatch.setattr(SinkReader, "read", noted)
    other = event("other", 9, topic="u", at=BEGIN_MS - 2 * HOUR_MS)
    warehouse.deliver(*event("once", 1), *event("next", 2, at=BEGIN_MS + 2 * HOUR_MS), *other)
    warehouse.store([("once", BEGIN_MS, None), ("next", BEGIN_MS + 2 * HOUR_MS, None)])
    around = MINUTE_MS
    first_hour = (BEGIN_MS - around, BEGIN_MS + HOUR_MS + around)
    third_hour = (BEGIN_MS + 2 * HOUR_MS - around, BEGIN_MS + 3 * HOUR_MS + around)
    warehouse.run()
    assert read == [[first_hour, third_hour]]
    report = warehouse.run(FROZEN_MS + 1)
    assert (len(read), counts(report)) == (1, {"expected": 2, "present_once": 2})
    assert report.judged_until_ms == FROZEN_MS + 1 - SETTLE_MS - 1000 * LATE_S
    warehouse.deliver(*event("more", 3))
    warehouse.store([("more", BEGIN_MS, None)])
    assert counts(warehouse.run(FROZEN_MS + 2)) == {"expected": 3, "present_once": 3}
    assert read[1:] == [[first_hour]]
    # Rows that are repeated in an hour that has matched are found on request.
    warehouse.store([("once", BEGIN_MS, None)])
    assert counts(warehouse.run(FROZEN_MS + 3)) == {"expected": 3, "present_once": 3}
    assert counts(warehouse.run(FROZEN_MS + 4, recheck_sinks=True))["twice_in_sink"] == 1
    # Another definition of the sink is another comparison, also of hours that had none of its events.
    warehouse.rule = replace(warehouse.rule, topics=("[tu]",))
    both = [log(DATA, topic, 0, decided_until_ms=FROZEN_MS + 5) for topic in ("t", "u")]
    found = counts(warehouse.run(FROZEN_MS + 5, logs=both))
    assert (len(read), found["expected"], found["missing_in_sink"]) == (4, 4, 1)


def test_a_sink_that_cannot_be_read_keeps_its_findings_and_its_watermark(warehouse: Warehouse, tmp_path: Path) -> None:
    unreadable = ("evidence_gap", "unreadable", "None[None]")
    warehouse.deliver(*event("gone", 1))
    warehouse.rule = replace(warehouse.rule, topics=("later.*",))
    before = warehouse.run()
    assert (before.awaits_topics, before.unreadable, before.read_ms, warehouse.found()) == (True, None, None, set())
    warehouse.rule = replace(warehouse.rule, topics=RULE.topics)
    never = warehouse.run()
    assert never.unreadable is not None
    assert (counts(never), never.read_ms, never.judged_until_ms, never.awaits_topics) == ({}, None, None, False)
    assert (warehouse.found(), warehouse.finding_ids()) == ({unreadable}, ["evidence_gap:warehouse"])
    warehouse.store([("other", BEGIN_MS, None)])
    backlog = log(DATA, "t", 0, decided_until_ms=BEGIN_MS + MINUTE_MS)
    known = warehouse.run(FROZEN_MS + 1, logs=(backlog,))
    assert counts(known) == {"expected": 1, "missing_in_sink": 1}
    assert known.judged_until_ms == BEGIN_MS + MINUTE_MS - SETTLE_MS
    assert warehouse.found() == {("missing_in_sink", None, "gone")}
    warehouse.deliver(*event("new", 2))
    folder = Path(warehouse.rule.path)
    folder.rename(tmp_path / "away")
    away = warehouse.run(FROZEN_MS + 2)
    assert away.unreadable is not None
    assert "\n" not in away.unreadable
    assert away[:4] == known[:4]
    assert warehouse.found() == {("missing_in_sink", None, "gone"), unreadable}
    assert warehouse.finding_ids() == ["evidence_gap:warehouse", f"missing_in_sink:warehouse:{id_of('gone')}"]
    (tmp_path / "away").rename(folder)
    warehouse.store([("gone", BEGIN_MS, None), ("new", BEGIN_MS, None)])
    assert counts(warehouse.run(FROZEN_MS + 3)) == {"expected": 2, "present_once": 1, "late_in_sink": 1}
    assert warehouse.found() == {("late_in_sink", "was_missing", "gone")}
    # Otherwise a sink with a mistake in its topics would have no fault.
    warehouse.rule = replace(warehouse.rule, topics=("typo",))
    wrong = warehouse.run(FROZEN_MS + 4)
    assert "topics: no run has audited a topic that typo names" in (wrong.unreadable or "")
    assert (wrong.awaits_topics, unreadable in warehouse.found()) == (False, True)


def test_what_no_delivered_event_has_is_extra_in_a_sink_of_its_own(warehouse: Warehouse) -> None:
    warehouse.rule = replace(warehouse.rule, exclusive=True)
    decided = FROZEN_MS - SETTLE_MS
    warehouse.deliver(
        *event("once", 1),
        # Written in another hour, or to another topic, or lost: not unknown.
        *event("earlier", 2, at=BEGIN_MS - 2 * HOUR_MS),
        *event("other", 3, topic="u"),
        *event("long before", 4, at=BEGIN_MS - 30 * HOUR_MS),  # found by the second look, at all hours of the lake
        *ids({"lost": [entry(10, at=BEGIN_MS)]}),
    )
    warehouse.store(
        [
            *((name, BEGIN_MS, None) for name in ("once", "earlier", "other", "lost", "made up", "made up")),
            ("long before", BEGIN_MS, None),
            ("empty hour", BEGIN_MS + 2 * HOUR_MS, None),
            ("last", decided - MINUTE_MS - 1, None),
            ("too new", decided - MINUTE_MS, None),
            ("too old", BEGIN_MS - HOUR_MS + MINUTE_MS - 1, None),
        ]
    )
    report = warehouse.run()
    extra = {name for kind, _, name in warehouse.found() if kind == "extra_in_sink"}
    assert extra == {"made up", "empty hour", "last"}
    assert report.counts["extra_in_sink"] == 3
    by_hour = {
        hours.text_at(row["accepted_hour"]): row["is_closed"]
        for row in warehouse.lake.read("sinks").where("kind IS NULL AND accepted_hour IS NOT NULL").collect()
    }
    assert by_hour[hours.text_of(BEGIN_MS + HOUR_MS)] is True
    assert by_hour[hours.text_of(decided)] is False
    # Of an hour that the lake no longer keeps no event is known.
    warehouse.run(kept_from=hours.text_of(BEGIN_MS + HOUR_MS), recheck_sinks=True)
    assert {name for kind, _, name in warehouse.found() if kind == "extra_in_sink"} == {"empty hour", "last"}


def test_rows_may_name_coordinates_in_place_of_an_id(spark: SparkSession, tmp_path: Path) -> None:
    rule = replace(RULE, id="", coordinates=("topic", "part", "off"), event_time="at_ms", exclusive=True)
    rule = replace(rule, topics=("[st]",))
    warehouse = Warehouse(spark, tmp_path, rule)
    warehouse.deliver(
        *event("once", 1), *event("gone", 2), *event("again", 3), *event("copied", 4), *event("copied", 5)
    )
    rows = [("t", 0, offset, BEGIN_MS) for offset in (1, 3, 3, 4, 77, 79, 79)]
    rows += [("t", 0, None, BEGIN_MS)]  # type: ignore[list-item]
    frame = spark.createDataFrame(rows, "topic string, part int, off bigint, at_ms bigint")
    frame.write.format("delta").save(warehouse.rule.path)
    report = warehouse.run()
    assert warehouse.found() == {
        ("missing_in_sink", None, "gone"),
        ("twice_in_sink", "repeated", "again"),
        ("extra_in_sink", None, "t[0]"),
    }
    assert counts(report) == {
        "expected": 4,
        "present_once": 2,
        "missing_in_sink": 1,
        "twice_in_sink": 1,
        "extra_in_sink": 2,
        "unidentified": 1,
    }
    (extra,) = warehouse.lake.read("sinks").where("kind = 'extra_in_sink'").collect()
    assert (extra["count"], extra["first_offset"], extra["last_offset"]) == (3, 77, 79)


def test_an_event_is_looked_for_at_each_of_its_times_before_it_is_missing(warehouse: Warehouse) -> None:
    """A client has set a timestamp, by which the sink keeps the row; an id of two hours has a row in the other one."""
    warehouse.rule = replace(warehouse.rule, arrived="loaded_at")
    long_ago, other, late = BEGIN_MS - 30 * 24 * HOUR_MS, BEGIN_MS - 3 * HOUR_MS, FROZEN_MS - 1
    warehouse.deliver(
        *event("dated", 1, timestamp_ms=long_ago),
        *event("both", 2),
        *event("both", 3, at=other),
        *event("gone", 4, timestamp_ms=long_ago),
        *event("slow", 5, timestamp_ms=long_ago),
        # Each record has a row at its own time: the other row is not read for it.
        *event("each", 6),
        *event("each", 7, at=other),
    )
    warehouse.store(
        [
            ("dated", long_ago, BEGIN_MS),
            ("both", other, other),
            ("slow", long_ago, late),
            ("each", BEGIN_MS, late),
            ("each", other, other),
        ]
    )
    report = warehouse.run()
    assert warehouse.found() == {
        ("missing_in_sink", None, "gone"),
        ("late_in_sink", "arrived", "slow"),
        ("late_in_sink", "arrived", "each"),
    }
    assert report.counts["twice_in_sink"] == 0


def test_an_id_of_several_hours_is_compared_in_each_by_itself(warehouse: Warehouse) -> None:
    """The sink has a row for each record; rows within the margin around an hour are copies, and no repetition."""
    edge = BEGIN_MS + HOUR_MS - 1
    warehouse.deliver(
        *event("apart", 1),
        *event("apart", 2, at=BEGIN_MS - 3 * HOUR_MS),
        *event("close", 3, at=edge),
        *event("close", 4, at=edge + 2),
        *event("edges", 5),
    )
    warehouse.store(
        [
            # The first time within the margin around its hour, and the first one after it.
            ("edges", BEGIN_MS - MINUTE_MS, None),
            ("edges", BEGIN_MS + HOUR_MS + MINUTE_MS, None),
            ("apart", BEGIN_MS, None),
            ("apart", BEGIN_MS - 3 * HOUR_MS, None),
            ("close", edge, None),
            ("close", edge + 2, None),
        ]
    )
    assert counts(warehouse.run()) == {"expected": 5, "present_once": 3, "twice_in_sink": 2}
    assert warehouse.found() == {("twice_in_sink", "copied", "close")}


def test_what_an_open_transaction_has_hidden_is_expected_from_when_it_no_longer_does(warehouse: Warehouse) -> None:
    blocked = log(DATA, "t", 0, end=5, last_stable=5, high_watermark=9)
    warehouse.deliver(*event("read", 4))
    warehouse.store([("other", BEGIN_MS, None)])
    assert counts(warehouse.run(FROZEN_MS, logs=(blocked,))) == {"expected": 1, "missing_in_sink": 1}
    warehouse.deliver(*event("hidden", 6))
    assert counts(warehouse.run(FROZEN_MS + 10)) == {"expected": 2, "missing_in_sink": 1, "pending": 1}
    assert counts(warehouse.run(FROZEN_MS + 10 + 1000 * LATE_S))["pending"] == 1
    assert counts(warehouse.run(FROZEN_MS + 11 + 1000 * LATE_S)) == {"expected": 2, "missing_in_sink": 2}


def test_a_run_whose_rules_have_no_sink_forgets_it(warehouse: Warehouse) -> None:
    warehouse.deliver(*event("gone", 1))
    warehouse.store([("other", BEGIN_MS, None)])
    warehouse.run()
    assert warehouse.found() == {("missing_in_sink", None, "gone")}
    without = replace(settings(window_h=24), rules=Rules())
    context = RunContext(Plan(2, FROZEN_MS, "{}", ()), without)
    assert sink_audit.audit(warehouse.lake, context, lambda line: None) == []
    assert warehouse.lake.read("sinks").isEmpty()


def test_events_before_the_beginning_of_a_sink_are_not_expected(warehouse: Warehouse) -> None:
    warehouse.rule = replace(warehouse.rule, since_ms=BEGIN_MS + 1)
    warehouse.deliver(*event("before", 1), *event("after", 2, at=BEGIN_MS + HOUR_MS))
    warehouse.store([("after", BEGIN_MS + HOUR_MS, None)])
    assert counts(warehouse.run()) == {"expected": 1, "present_once": 1}


def test_the_rules_about_an_event_of_a_sink_in_all_their_cases(spark: SparkSession) -> None:
    def category(rows: int, arrived: int | None, missing: bool, due: int, deleted: bool = False) -> Column:
        arrived_ms, due_ms = F.lit(arrived), F.lit(due)
        return sink_verdicts.category(F.lit(rows), arrived_ms, F.lit(missing), due_ms, F.lit(deleted), 10)

    def cause(kind: str, rows: int = 1, records: int = 1, missing: bool = False) -> Column:
        return sink_verdicts.cause(*map(F.lit, (kind, rows, records, missing)))

    def expected(count: int, claimed: bool, header: bool | None) -> Column:
        return sink_verdicts.is_expected(*map(F.lit, (count, claimed, header)))

    def visible(accepted: int, named: int | None, released: int | None = None) -> Column:
        return sink_verdicts.visible_ms(F.lit(accepted), F.lit(named), F.lit(released), 100)

    def decided(event_ms: int) -> Column:
        return sink_verdicts.is_unknown_decided(F.lit(event_ms), 5, 20, 40)

    cases: list[tuple[Column, Any]] = [
        (category(2, 1, True, 5), "twice_in_sink"),
        (category(1, None, False, 5), "present_once"),
        (category(1, 5, False, 5), "present_once"),
        (category(1, 6, False, 5), "late_in_sink"),
        (category(1, 5, True, 5), "late_in_sink"),
        (category(0, None, False, 9), "missing_in_sink"),
        (category(0, None, False, 10), "pending"),
        (category(0, None, True, 10, True), "pending"),
        # A mirror may have had the record, but none that an earlier run has found missing.
        (category(0, None, False, 9, True), "unprovable"),
        (category(0, None, True, 9, True), "missing_in_sink"),
        (category(1, None, False, 9, True), "present_once"),
        (cause("twice_in_sink", 2, 1), "repeated"),
        (cause("twice_in_sink", 2, 2), "copied"),
        (cause("twice_in_sink", 2, 3), "copied"),
        (cause("late_in_sink", missing=True), "was_missing"),
        (cause("late_in_sink"), "arrived"),
        (cause("missing_in_sink", 0), None),
        (expected(1, True, None), True),
        (expected(1, False, True), True),
        (expected(1, False, False), False),
        (expected(1, False, None), False),
        (expected(0, True, True), False),
        (visible(7, 5), 107),
        (visible(5, 7), 107),
        (visible(5, None), 105),
        (visible(5, 7, 106), 107),
        (visible(5, 7, 108), 108),
        *((decided(ms), ms in (25, 34)) for ms in (24, 25, 34, 35)),
    ]
    (found,) = spark.range(1).select(*(column.alias(str(nth)) for nth, (column, _) in enumerate(cases))).collect()
    assert list(found) == [value for _, value in cases]


ID: Final = id_of("once")
# Those that name an event come first.
TEXTS: Final = (ID, ID.upper(), str(UUID(ID)), f"{ID}    ", ID[1:], f"-{ID[1:]}", None)
BYTES: Final = (bytes.fromhex(ID), bytes.fromhex(ID[2:]), b"", None, None, None, None)


@pytest.fixture(scope="module", params=["parquet", "iceberg"])
def forms(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> SinkRule:
    """A sink with a row in each ms from BEGIN_MS on, which has an id as text (TEXTS) and as bytes (BYTES)."""
    root = tmp_path_factory.mktemp("forms")
    times = [time_of(BEGIN_MS + nth) for nth in range(len(TEXTS))]
    if request.param == "iceberg":
        columns = {"event_id": pa.string(), "raw": pa.binary(), "accepted_at": pa.timestamp("us", "UTC")}
        return Iceberg(root, columns).append(event_id=TEXTS, raw=BYTES, accepted_at=times)
    path = str(root / "rows")
    schema = "event_id string, raw binary, accepted_at timestamp"
    rows = list(zip(TEXTS, BYTES, times, strict=True))
    spark.createDataFrame(rows, schema).coalesce(1).write.parquet(path)
    return replace(RULE, format="parquet", path=path)


WHOLE: Final = [(BEGIN_MS - HOUR_MS, BEGIN_MS + HOUR_MS)]


@pytest.mark.parametrize(("expression", "identified"), [("lower(event_id)", 4), ("raw", 1)])
def test_an_id_is_bytes_hexadecimal_digits_or_a_uuid(
    spark: SparkSession, forms: SinkRule, expression: str, identified: int
) -> None:
    rows = SinkReader(spark, replace(forms, id=expression)).read(WHOLE).orderBy("event_ms").collect()
    assert [row["event_ms"] - BEGIN_MS for row in rows] == [*range(len(TEXTS))]
    assert [row["id"] for row in rows] == [BYTES[0]] * identified + [None] * (len(TEXTS) - identified)
    assert {row["arrived_ms"] for row in rows} == {None}


def test_the_rows_of_an_interval_are_read_and_none_of_its_end(spark: SparkSession, forms: SinkRule) -> None:
    past = BEGIN_MS + len(TEXTS)
    rows = (
        SinkReader(spark, forms)
        .read([(BEGIN_MS - 1, BEGIN_MS), (BEGIN_MS + 1, BEGIN_MS + 2), (past, past + 1)])
        .collect()
    )
    assert [row["event_ms"] for row in rows] == [BEGIN_MS + 1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"id": "accepted_at"}, "the id is a timestamp: write an expression for its 16 bytes"),
        ({"id": "no_such_column"}, "no_such_column"),
        ({"id": "concat(event_id, rand())"}, "the expression for the event gives another value each time"),
        ({"event_time": "event_id"}, "the column event_id is a string: name a timestamp"),
        ({"arrived": "event_id"}, "the column event_id is a string"),
        ({"format": "parquet", "path": "/no/such/folder"}, "/no/such/folder"),
        ({"format": "iceberg", "path": "/no/such/folder", "table": ""}, "/no/such/folder"),
        ({"format": "jdbc", "url": "jdbc:nothing://127.0.0.1/", "table": "t"}, "No suitable driver"),
        ({"password_file": "/no/such/file"}, "/no/such/file"),
    ],
)
def test_a_sink_that_is_not_as_its_rule_says_is_unreadable(
    spark: SparkSession, forms: SinkRule, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(Unreadable) as caught:
        SinkReader(spark, replace(forms, **changes)).read(WHOLE)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("time_type", [pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.int64()], ids=str)
def test_the_hours_of_an_iceberg_table_are_read_by_each_type_of_time_in_parts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time_type: pa.DataType
) -> None:
    monkeypatch.setattr(iceberg, "PART_ROWS", 2)
    table = Iceberg(tmp_path, {"Event": pa.uuid(), "at": time_type, "unread": pa.time64("us")})
    uuids = [bytes([nth]) * 16 for nth in range(5)]
    for part in (uuids[:3], uuids[3:]):  # a file for each
        values = [
            BEGIN_MS + uuids.index(id) if pa.types.is_integer(time_type) else time_of(BEGIN_MS + uuids.index(id))
            for id in part
        ]
        rule = table.append(Event=part, at=values, unread=[None] * len(part))
    read = SinkReader(spark, replace(rule, id="event", event_time="at")).read(
        [(BEGIN_MS + 1, BEGIN_MS + 3), (BEGIN_MS + 4, BEGIN_MS + 9)]
    )
    assert sorted((bytes(row["id"]), row["event_ms"]) for row in read.collect()) == [
        (uuids[nth], BEGIN_MS + nth) for nth in (1, 2, 4)
    ]


def test_a_run_reads_one_snapshot_of_an_iceberg_table(spark: SparkSession, tmp_path: Path) -> None:
    table = Iceberg(tmp_path, {"event_id": pa.string(), "accepted_at": pa.timestamp("us", "UTC")})
    rule = table.append(event_id=[id_of("first")], accepted_at=[time_of(BEGIN_MS)])
    reader = SinkReader(spark, rule)
    assert reader.read(WHOLE).count() == 1
    table.append(event_id=[id_of("second")], accepted_at=[time_of(BEGIN_MS)])
    by_path = replace(rule, table="", catalog_file="", path=table.metadata)
    assert [one.read(WHOLE).count() for one in (reader, SinkReader(spark, rule), SinkReader(spark, by_path))] == [
        1,
        2,
        2,
    ]


def test_no_message_has_a_secret_of_a_catalog(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "catalog.toml"
    rule = replace(RULE, format="iceberg", table="sales.orders", catalog_file=str(file))
    file.write_text('type = "sql"\nuri = "nothing://auditor:hush@db/x"\ns3.secret-access-key = "nothing"\n')
    with pytest.raises(Unreadable) as caught:
        SinkReader(spark, rule).read(WHOLE)
    assert "hush" not in str(caught.value)
    assert "nothing" not in str(caught.value)
    assert "***" in str(caught.value)
    for wrong in ("uri = hush", 'uri = ["hush"]'):
        file.write_text(wrong)
        with pytest.raises(Unreadable, match=r"catalog\.toml is no TOML|the property uri of the catalog") as caught:
            SinkReader(spark, rule).read(WHOLE)
        assert "hush" not in str(caught.value)


def test_an_expression_that_is_no_sql_stops_the_run_before_it_begins(spark: SparkSession) -> None:
    check_rules(spark, [RULE, replace(RULE, id="lower(event_id)")])
    with pytest.raises(CannotRun, match=r"^the sink 'warehouse': 'lower\(' is no expression of Spark SQL: "):
        check_rules(spark, [replace(RULE, id="lower(")])


# ------------------------------------------------------------------------------------------------- without Spark


def test_a_sink_whose_format_is_not_installed_stops_the_run_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(iceberg, "find_spec", lambda name: None)
    iceberg.check_installed(RULE)
    with pytest.raises(CannotRun, match=r"'warehouse' needs pyiceberg and pyarrow: install .* extra iceberg"):
        iceberg.check_installed(replace(RULE, format="iceberg"))


def test_a_column_that_arrow_cannot_convert_makes_the_sink_unreadable_and_spark_fails_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"event_id": pa.string(), "accepted_at": pa.timestamp("us", "UTC")}
    rule = Iceberg(tmp_path, columns).append(event_id=[id_of("one")], accepted_at=[time_of(BEGIN_MS)])
    session = Mock()
    session.createDataFrame.side_effect = PySparkValueError("Spark")
    with pytest.raises(PySparkValueError):
        list(iceberg.IcebergTable(session, rule).parts(WHOLE))
    odd = pa.record_batch({name: pa.array([[b"list"]]) for name in columns})
    monkeypatch.setattr("pyiceberg.io.pyarrow.ArrowScan.to_record_batches", lambda scan, tasks: [odd])
    with pytest.raises(Unreadable, match="Unsupported cast from list"):
        list(iceberg.IcebergTable(session, rule).parts(WHOLE))


def test_position_deletes_of_an_iceberg_table_are_applied_and_equality_deletes_make_it_unreadable(
    tmp_path: Path,
) -> None:
    table = Iceberg(tmp_path, {"event_id": pa.string(), "accepted_at": pa.timestamp("us", "UTC")})
    names = ["kept", "deleted", "kept too"]
    rule = table.append(event_id=[id_of(name) for name in names], accepted_at=[time_of(BEGIN_MS)] * len(names))
    table.delete_row(1)
    session = Mock()
    list(iceberg.IcebergTable(session, rule).parts(WHOLE))
    read = [id for call in session.createDataFrame.call_args_list for id in call.args[0]["event_id"].to_pylist()]
    assert read == [id_of("kept"), id_of("kept too")]
    table.delete_rows_with("event_id", id_of("kept"))
    with pytest.raises(Unreadable, match=r"^the table has rows that equality deletes remove: compact it, and"):
        list(iceberg.IcebergTable(session, rule).parts(WHOLE))


def test_headers_and_connection_strings_of_a_catalog_are_secrets_also_in_part() -> None:
    found = iceberg.secrets_of(
        {
            "type": "rest",
            "header.Authorization": "Bearer hush",
            "adls.connection-string": "AccountName=a1;AccountKey=whisper==;EndpointSuffix=e1",
            "header.X-Api-Key": "quiet",
        }
    )
    assert {"Bearer hush", "hush", "whisper==", "quiet"} <= set(found)
    assert not {"rest", "Bearer", "a1", "e1", ""} & set(found)


def test_the_columns_of_an_iceberg_table_that_a_rule_needs_are_read() -> None:
    names = ["Topic", "part", "off", "At", "value", "arrived_at"]
    rule = replace(RULE, id="", coordinates=("topic", "part + 0", "`off`"), event_time="at", arrived="arrived_at")
    assert iceberg.columns_of(rule, names) == ["Topic", "part", "off", "At", "arrived_at"]


def test_intervals_are_united_and_subtracted() -> None:
    assert merged([(5, 7), (1, 3), (3, 4), (6, 9)]) == [(1, 4), (5, 9)]
    assert without([(0, 10), (20, 30)], [(2, 4), (8, 22)]) == [(0, 2), (4, 8), (22, 30)]
    assert without([(0, 10)], [(0, 10)]) == []
    assert without([(0, 10)], []) == [(0, 10)]


def test_hours_are_due_that_are_open_or_have_new_records_or_another_definition() -> None:
    state = SinkState(3, 1, (), "a", {"0": HourState(3, True, "a", {}), "1": HourState(2, False, "a", {})})
    assert sink_verdicts.due_hours({}, state, "a", [], again=False) == {"1"}
    assert sink_verdicts.due_hours({"0": 3, "2": 1}, state, "a", [], again=False) == {"1", "2"}
    assert sink_verdicts.due_hours({"0": 4}, state, "a", ["3"], again=False) == {"0", "1", "3"}
    assert (
        sink_verdicts.due_hours({}, state, "b", [], again=False)
        == sink_verdicts.due_hours({}, state, "a", [], again=True)
        == {"0", "1"}
    )


def test_what_was_hidden_is_kept_as_long_as_its_hour_may_be_compared() -> None:
    def blocked(topic: str, partition: int) -> Log:
        return log(DATA, topic, partition, end=5, last_stable=5, high_watermark=9)

    last = Plan(1, 10, "", (blocked("t", 0), log(DATA, "t", 1), blocked("t", 2), blocked("u", 0)))
    # The log of partition 0 is read to its offset 6 only, as with --max-records; that of partition 2 is recreated.
    read = log(DATA, "t", 0, end=6, last_stable=8, high_watermark=9)
    others = log(DATA, "t", 1, end=200), log(DATA, "t", 2, topic_id="another"), log(DATA, "u", 0)
    plan = Plan(2, 20, "", (read, *others))
    old, new = Released("t", 1, 1, 2, 5), Released("t", 0, 5, 8, 20)
    assert sink_verdicts.released(RULE, plan, last, [], 0) == (new,)
    assert sink_verdicts.released(RULE, plan, last, [old, new], 5) == (old, new)
    assert sink_verdicts.released(RULE, plan, last, [old], 6) == (new,)
    assert sink_verdicts.released(RULE, plan, None, [], 0) == ()
    many = [old] * RELEASED_MOST
    assert sink_verdicts.released(RULE, plan, last, many, 0) == (*many[1:], new)


def test_a_run_knows_all_events_until_the_first_record_that_it_has_not_read() -> None:
    def decided(*logs: Log) -> int:
        return sink_verdicts.decided_until_ms(RULE, Plan(1, FROZEN_MS, "", logs), SETTLE_MS)

    backlog = log(DATA, "t", 0, decided_until_ms=BEGIN_MS)
    assert decided() == decided(replace(backlog, decided_until_ms=FROZEN_MS + 1)) == FROZEN_MS - SETTLE_MS
    # A topic of another sink, and one that was deleted.
    assert decided(replace(backlog, topic="u"), replace(backlog, audited=False)) == FROZEN_MS - SETTLE_MS
    for unread in (backlog, replace(backlog, role=UNWANTED, audited=False), replace(backlog, role=LEDGER, topic="l")):
        assert decided(unread) == BEGIN_MS - SETTLE_MS, unread.role


def test_the_watermark_of_a_sink_is_not_past_what_was_read() -> None:
    read = SinkState(1, FROZEN_MS, (), "a", {}, BEGIN_MS)

    def judged(state: SinkState, *open_ms: int) -> int | None:
        return sink_verdicts.judged_until_ms(RULE, SETTLE_MS, state, open_ms)

    over = FROZEN_MS - SETTLE_MS - 1000 * LATE_S
    assert (judged(read), judged(read, BEGIN_MS - 1), judged(read, BEGIN_MS + 1)) == (BEGIN_MS, BEGIN_MS - 1, BEGIN_MS)
    assert (judged(replace(read, decided_ms=FROZEN_MS)), judged(replace(read, decided_ms=None))) == (over, over)
    # The records behind an open transaction have no known time.
    assert (judged(NEVER_READ), judged(replace(read, decided_ms=-SETTLE_MS))) == (None, None)


def test_no_event_is_known_of_before_the_claims_and_the_hours_that_the_lake_keeps() -> None:
    plan = Plan(1, 20, "", (log(LEDGER, "l", 0, complete_since_ms=7), log(REQUESTS, "r", 0)))
    assert [sink_verdicts.complete_since_ms(plan, kept_ms) for kept_ms in (0, 9)] == [7, 9]
    assert sink_verdicts.complete_since_ms(Plan(1, 20, "", ()), 9) == 20


def test_another_window_settlement_or_quarantine_is_another_definition_of_a_sink() -> None:
    given = settings(window_h=24)
    (rule,) = given.rules.topics
    refused = replace(given, rules=replace(given.rules, topics=(replace(rule, quarantine="refused"),)))
    changed = [settings(window_h=25), settings(window_h=24, grace_s=61), refused]
    made = [sink_verdicts.definition(RULE, one) for one in (given, *changed)]
    assert len(set(made)) == len(made)
    assert all(one.startswith(RULE.definition) for one in made)
    assert sink_verdicts.definition(RULE, settings(window_h=24)) == made[0]


@pytest.mark.parametrize(
    ("expected", "present", "findings"), [(2, 1, 1), (1, 1, 0), (2, 1, 2)], ids=["closes", "too few", "too many"]
)
def test_the_balance_of_a_sink_closes_if_its_categories_add_up_and_each_fault_has_a_finding(
    expected: int, present: int, findings: int
) -> None:
    counted = dict.fromkeys(sink_verdicts.COUNTS_OF_SINK, 0) | {
        "expected": expected,
        "present_once": present,
        "missing_in_sink": 1,
    }
    found = dict.fromkeys(sink_verdicts.KIND_OF_COUNT.values(), 0) | {"missing_in_sink": findings}
    with (
        nullcontext() if (expected, findings) == (2, 1) else pytest.raises(CannotRun, match="does not close: expected")
    ):
        sink_audit.check_balance(RULE, counted, found)


def test_an_hour_closes_when_nothing_of_it_may_change() -> None:
    none = dict.fromkeys(sink_verdicts.COUNTS_OF_SINK, 0)
    over = BEGIN_MS + HOUR_MS + SETTLE_MS + 1000 * LATE_S

    def closes(frozen_ms: int, decided_ms: int = 0, rule: SinkRule = RULE, *counted: str) -> bool:
        counts = none | dict.fromkeys(counted, 1)
        return sink_verdicts.closes(BEGIN_MS, counts, rule, SETTLE_MS, frozen_ms, decided_ms)

    assert (closes(over), closes(over + 1)) == (False, True)
    assert closes(over + 1, 0, RULE, "expected", "late_in_sink")
    for name in ("pending", "missing_in_sink", "twice_in_sink", "extra_in_sink"):
        assert not closes(over + 1, 0, RULE, name), name
    own = replace(RULE, exclusive=True)
    decided = BEGIN_MS + HOUR_MS + 1000 * RULE.margin_s
    assert (closes(over + 1, decided, own), closes(over + 1, decided + 1, own)) == (False, True)
