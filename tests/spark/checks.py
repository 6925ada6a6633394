"""The checks that must detect a mutant (tests/spark/mutants.py): the tests of the tables of cases, without whole runs.

A check raises an AssertionError if a verdict differs.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Final

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark.reading import run_plan
from spark.rules.classify import classify, gather_evidence
from spark.tables import deliveries
from tests.spark import (
    test_balance,
    test_classify,
    test_client_duplicates,
    test_cross_hour,
    test_planning,
    test_plausible_times,
    test_sinks,
    test_view,
    test_window,
)
from tests.spark.fake_cluster import fake_cluster
from tests.spark.mutants import (
    BALANCES,
    CAUSES,
    CLIENTS,
    HOURS,
    LATE,
    PLANS,
    SINK_STATES,
    SINK_VERDICTS,
    STATES,
    TIMES,
    VERDICTS,
    VIEWS,
    WINDOWS,
    Mutant,
    active,
)
from tests.spark.rows import name_of
from tests.spark.times import HOUR_MS, WINDOW_H

WINDOW_MS: Final = WINDOW_H * HOUR_MS


def verdicts(spark: SparkSession) -> None:
    seen = gather_evidence(test_classify.plan(), test_classify.settings())
    classified = classify(deliveries.gathered(test_classify.cases(spark)), seen).persist()
    try:
        rows = {name_of(row["id"]): row for row in classified.collect()}
        for name in test_classify.CASES:
            test_classify.test_a_row_is_classified(rows, name)
        assert test_classify.found_of(classified, seen) == test_classify.FOUND
    finally:
        classified.unpersist()
    test_classify.test_an_id_in_doubt_is_pending_while_the_ledger_is_undecided(spark)


def plans(spark: SparkSession) -> None:
    """Run every test of the plan that needs no fixture but a cluster."""
    plan, settings = test_classify.plan(), test_classify.settings()
    assert run_plan.window_from(plan, settings) == (plan.frozen_ms - WINDOW_MS) // HOUR_MS * HOUR_MS
    for name, test in vars(test_planning).items():
        if name.startswith("test_") and list(inspect.signature(test).parameters) == ["cluster"]:
            test(fake_cluster())


def sink_states(spark: SparkSession) -> None:
    """Run every test of sinks that needs no fixture."""
    for name, test in vars(test_sinks).items():
        if name.startswith("test_") and not inspect.signature(test).parameters:
            test()


CHECKS: Final[Mapping[str, Callable[[SparkSession], None]]] = {
    VERDICTS: verdicts,
    CAUSES: test_classify.test_each_copy_after_the_first_has_the_cause_of_the_first_matching_rule,
    CLIENTS: test_client_duplicates.test_only_a_client_s_retry_is_reported_as_a_retry,
    STATES: test_classify.test_copies_are_ordered_by_ledger_then_time_then_coordinates,
    PLANS: plans,
    TIMES: test_plausible_times.test_an_implausible_time_is_replaced,
    HOURS: test_cross_hour.test_an_unsure_answer_is_settled_by_the_evidence_of_other_rows,
    WINDOWS: test_window.test_a_finding_stands_by_the_time_of_its_evidence_or_by_the_pass_that_found_it,
    LATE: test_window.test_a_finding_is_late_if_its_hour_left_the_window_before_the_run_that_decided_it,
    VIEWS: test_view.test_a_record_is_matched_to_a_row_by_its_own_headers_and_content,
    SINK_STATES: sink_states,
    SINK_VERDICTS: test_sinks.test_the_rules_about_an_event_of_a_sink_in_all_their_cases,
    BALANCES: lambda spark: test_balance.test_an_hour_with_open_verdicts_stays_in_the_balance(),
}


def detects(spark: SparkSession, mutant: Mutant) -> bool:
    """Check whether the check of a mutant fails with this mutant."""
    with active(mutant):
        try:
            CHECKS[mutant.check](spark)
        except (AssertionError, LookupError, PySparkException, Py4JJavaError):
            return True
    return False
