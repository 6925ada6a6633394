"""The hours that a run classifies."""

from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark.reading.run_plan import DATA, Plan
from spark.rules.reconcile import classifies_all, may_differ
from tests.spark.test_classify import log

LAST = Plan(1, 1000, "A", (log(DATA, "t", 0),))
LAST_RUN: dict[str, Any] = {"run": 1, "options": LAST.options, "topics": LAST.topics}


@pytest.mark.parametrize(
    ("last_run", "plan", "all_hours"),
    [
        (LAST_RUN, replace(LAST, run=2), False),
        (None, LAST, True),
        (LAST_RUN, replace(LAST, run=2, options="B"), True),
        (LAST_RUN, replace(LAST, run=2, logs=(log(DATA, "u", 0),)), True),
        # Run 2 had other options, merged nothing, and was planned again after it had replaced findings.
        (LAST_RUN, replace(LAST, run=3), True),
    ],
    ids=["the next run", "the first run", "other options", "other topics", "after a run that was planned again"],
)
def test_a_run_classifies_all_hours_if_findings_may_be_those_of_other_options(
    last_run: dict[str, Any] | None, plan: Plan, all_hours: bool
) -> None:
    assert classifies_all(last_run, plan) is all_hours


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
