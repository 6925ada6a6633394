"""Histories with known faults, from seeds: the audit finds each fault with its kind and cause, and nothing else.

One seed; with TEST_LONG five, one broken rule, a run that is interrupted by one with other options, and a run without
the pass over ids (in each `./tests/run`: test_changed_options.py, test_growing_logs.py). `python -m
tests.spark.generated` has fifty seeds, all these runs, and every mutant.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import date
from typing import Final

import pytest
from pyspark.sql import SparkSession

from deploy.stack import Kafka
from spark import rule_table
from tests.conftest import LONG
from tests.spark import checks
from tests.spark.generated import Trial
from tests.spark.generator import Script
from tests.spark.mutants import MUTANTS, sample
from tests.spark.oracle import STAGES, Record, Score
from tests.spark.script import CAUSES, DUAL, EXPIRED, FOREIGN, RESTART, REWRITE, TTL_MS

SEEDS: Final = range(5 if LONG else 1)
TIMEOUT_MS: Final = 900_000  # the most that the broker allows


@pytest.fixture(scope="module")
def first_stage(spark: SparkSession, kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Score]:
    """Histories whose first stage has been written and audited."""
    folder = tmp_path_factory.mktemp("trial")
    trial = Trial(spark, kafka.bootstrap, folder, SEEDS, TIMEOUT_MS, more_runs=LONG)
    return trial, trial.next()


@pytest.mark.long
def test_a_run_with_a_broken_rule_differs_from_what_was_planted(first_stage: tuple[Trial, Score]) -> None:
    """At the first stage; the next test continues with the others."""
    trial, score = first_stage
    assert score.faults == []
    assert trial.detects(next(mutant for mutant in MUTANTS if mutant.rule is rule_table.rank))


def test_an_audit_of_a_generated_history_finds_what_was_planted(first_stage: tuple[Trial, Score]) -> None:
    trial, total = first_stage
    for _ in range(STAGES - 1):
        total.add(trial.next())
    if not total.perfect:
        pytest.fail("\n".join([total.table(), *total.faults]))
    assert (total.recall, total.precision) == (1.0, 1.0)
    assert len(total.right) > 20
    assert min(total.right.values()) >= len(SEEDS)


def _assign_offsets(script: Script) -> None:
    """Assign the offsets that a broker would assign."""
    ends: Counter[tuple[str, int]] = Counter()
    for stage in script.stages:
        for record in [*(one for transaction in stage.transactions for one in transaction.records), *stage.bare]:
            record.offset = ends[record.topic, record.partition]
            ends[record.topic, record.partition] += 1
    for record in (script.kept, script.recreated_after, script.recreated_early_first, script.recreated_late_first):
        record.offset = 0


def _cause(copy: Record, earlier: Sequence[Record]) -> str:
    """Return the cause of a copy after these, by the rules of the contract in their own order."""
    writer, ours = copy.writer, [(other, other.writer) for other in earlier if other.writer is not None]
    if writer is None:
        return FOREIGN
    if any(other == writer for _, other in ours):
        return REWRITE if copy.entered else FOREIGN
    if ours and all(abs(other.at - copy.at) >= TTL_MS for other, _ in ours):
        return EXPIRED
    for _, other in ours:
        related = other.slot == writer.slot or other.instance == writer.instance
        if related and (other.producer_id, other.epoch) != (writer.producer_id, writer.epoch):
            return RESTART
    return DUAL


@pytest.mark.parametrize("seed", range(50))
def test_the_generator_plants_each_copy_under_the_cause_of_the_contract(seed: int) -> None:
    """At each stage, with the copies that can be read by then: an error here would look like an error of the job."""
    script = Script(seed, "w", "w", 0)
    _assign_offsets(script)
    causes = Counter[str]()
    for planted in script.plants.ids:
        for stage in range(1, STAGES + 1):
            copies = planted.visible(stage)
            for nth, copy in enumerate(copies[1:], 1):
                assert copy.cause == _cause(copy, copies[:nth]), (planted.key, stage, nth)
                causes[str(copy.cause)] += 1
    assert set(causes) == set(CAUSES)


def test_the_tables_of_cases_detect_five_broken_rules(spark: SparkSession) -> None:
    """Five other rules each day; `python -m tests.spark.generated --mutants` has them all."""
    seed = date.today().toordinal()
    survived = [str(mutant) for mutant in sample(5, seed) if not checks.detects(spark, mutant)]
    assert survived == [], f"drawn with the seed {seed}"
