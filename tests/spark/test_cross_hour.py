"""Answers 202 and 504, which say nothing of an offset: what the other rows of their ids say, in any hour."""

from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark.engine import frames, session
from spark.rules import cross_hour
from spark.tables import deliveries, hours
from spark.tables.lake import Lake
from tests.spark.rows import NOW_MS, answer, copy, entry, ids, name_of, reduced
from tests.spark.times import HOUR_MS

EARLY, LATE = NOW_MS - 3 * HOUR_MS, NOW_MS - HOUR_MS

# evidence → the `elsewhere` and `freed_ms` that the other rows of the id give the 202 or 504
CASES: dict[str, tuple[Sequence[Any], tuple[bool, int | None] | None]] = {
    "entered": ([entry(1, at=EARLY), copy(1, at=EARLY), answer(504)], (True, None)),
    "lost": ([entry(2, at=EARLY), answer(202)], (True, None)),
    "answered": ([answer(201, 3, at=EARLY), answer(504)], (True, None)),
    "phantom": ([copy(4, at=EARLY), answer(504)], (True, None)),
    "strange": ([copy(5, at=EARLY, writer=None), answer(504)], None),
    "later": ([answer(504, at=EARLY), entry(6, at=LATE), copy(6, at=LATE)], (True, None)),
    "freed": ([answer(504, at=EARLY), answer(503, at=LATE)], (False, LATE + 20)),
    "freed-before": ([answer(503, at=EARLY), answer(504, at=LATE)], None),
    "both": ([answer(504, at=EARLY), answer(503, at=LATE), copy(7, at=LATE)], (True, LATE + 20)),
    # The 503 has freed the key: what a later request with it has written is an event of its own hour.
    "freed, written": (
        [answer(504, at=EARLY), answer(503, at=EARLY, timestamp_ms=EARLY + 30), entry(10, at=LATE), copy(10, at=LATE)],
        None,
    ),
    "alone": ([answer(504)], None),
    "twice": ([answer(504), answer(504, at=EARLY)], None),
    "same hour": ([answer(504), copy(8), entry(8)], (True, None)),
    "same hour, freed": ([answer(504), answer(503, timestamp_ms=NOW_MS + 30)], None),
    "refused": ([answer(504), answer(409, at=EARLY)], None),
}


def _settled(rows: Any) -> dict[str, tuple[bool, int | None]]:
    found = cross_hour.settled_elsewhere(rows, 1)
    assert found is not None
    return {name_of(row["id"]): (row["elsewhere"], row["freed_ms"]) for row in found.collect()}


def test_an_unsure_answer_is_settled_by_the_evidence_of_other_rows(spark: SparkSession) -> None:
    rows = reduced(spark, ids({name: case[0] for name, case in CASES.items()}))
    assert _settled(rows) == {name: settled for name, (_, settled) in CASES.items() if settled is not None}


def test_many_unsettled_answers_are_joined_without_a_broadcast(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a caller that always sends `Prefer: respond-async`. The rest is joined as Spark chooses, here by its bound
    for a broadcast."""
    rows = reduced(spark, ids({name: case[0] for name, case in CASES.items()}))
    settled = _settled(rows)
    with session.settings(spark, {"spark.sql.autoBroadcastJoinThreshold": "-1"}):
        few = cross_hour.settled_elsewhere(rows, 1)
        monkeypatch.setattr(frames, "BROADCAST_MAX", 2)
        many = cross_hour.settled_elsewhere(rows, 1)
        assert few is not None
        assert many is not None
        plans = [found._jdf.queryExecution().executedPlan().toString() for found in (few, many)]
        assert ["BroadcastExchange" in plan for plan in plans] == [True, False]
        assert _settled(rows) == settled


def test_a_settled_answer_is_not_looked_up_again(spark: SparkSession, tmp_path: Any) -> None:
    """A run that reads no other answer is not the slower for those that its history has."""
    lake = Lake(spark, str(tmp_path))
    known = {"here": [answer(202), copy(1), entry(1)], "there": [answer(202), copy(2, at=EARLY), entry(2, at=EARLY)]}
    lake.append_once("deliveries", reduced(spark, ids(known)), 1)
    found = cross_hour.settled_elsewhere(lake.read("deliveries"), 1)
    assert found is not None
    found = found.localCheckpoint()
    lake.settle_elsewhere(found, hours.of(found), 1)
    assert cross_hour.settled_elsewhere(lake.read("deliveries"), 2) is None


def test_evidence_of_other_hours_is_noted_once_and_revoked_by_a_later_answer(
    spark: SparkSession, tmp_path: Any
) -> None:
    lake = Lake(spark, str(tmp_path))
    lake.append_once("deliveries", reduced(spark, ids({name: case[0] for name, case in CASES.items()})), 1)
    found = cross_hour.settled_elsewhere(lake.read("deliveries"), 1)
    assert found is not None
    found = found.localCheckpoint()
    lake.settle_elsewhere(found, hours.of(found), 1)
    assert _settled(lake.read("deliveries")) == {}
    # Without new records: only the few rows in doubt are looked up.
    assert cross_hour.settled_elsewhere(lake.read("deliveries").where("run > 1"), 2) is None
    again = reduced(spark, ids({"freed": [answer(504, at=EARLY, timestamp_ms=NOW_MS)]}), 2)
    lake.merge(again, hours.of(again), 2)
    rows = lake.read("deliveries").where((F.col("answered_504") > 0) & (F.col("run") == 2)).collect()
    assert [(name_of(row["id"]), row["freed_ms"]) for row in rows] == [("freed", None)]


def test_a_doubt_is_open_again_when_the_record_that_settled_it_was_truncated(
    spark: SparkSession, tmp_path: Any
) -> None:
    """The ledger's entry settles it still, and so does another copy, also one that was read long ago."""
    lake = Lake(spark, str(tmp_path))
    known = {
        "gone": [copy(1, at=EARLY), answer(504)],
        "entered": [copy(2, at=EARLY), entry(2, at=EARLY), answer(504)],
        "copied": [copy(3, at=EARLY), copy(9, at=EARLY), answer(504)],
        "kept": [copy(8, at=EARLY), answer(504)],
        "same hour": [copy(1), answer(504)],
    }
    lake.append_once("deliveries", reduced(spark, ids(known)), 1)
    found = cross_hour.settled_elsewhere(lake.read("deliveries"), 1)
    assert found is not None
    found = found.localCheckpoint()
    lake.settle_elsewhere(found, hours.of(found), 1)
    rows = deliveries.with_vanished(reduced(spark, [], 2), lake.read("deliveries"), {("t", 0): (1, 4)}, {}, 2)
    rows = rows.localCheckpoint()
    lake.merge(rows, hours.of(rows), 2)
    for _ in range(2):
        found = cross_hour.settled_elsewhere(lake.read("deliveries"), 2, truncated=True)
        assert found is not None
        found = found.localCheckpoint()
        lake.settle_elsewhere(found, hours.of(found), 2)
        in_doubt = lake.read("deliveries").where(deliveries.in_doubt()).collect()
        settled = {name_of(row["id"]): row["elsewhere"] for row in in_doubt}
        assert settled == {"gone": False, "entered": True, "copied": True, "kept": True, "same hour": False}
    assert found.isEmpty()
