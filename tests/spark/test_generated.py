"""Histories with known faults, from seeds: each fault is found, named as it was planted, and nothing else is.

Five seeds, and three broken jobs; `python -m tests.spark.generated` has fifty, and every mutant.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import SparkSession

from deploy.local.stack import Kafka
from tests.spark.generated import Trial
from tests.spark.mutants import MUTANTS, Mutant, alive
from tests.spark.oracle import STAGES, Score
from tests.spark.runs import interpreted

SEEDS: Final = range(5)
TIMEOUT_MS: Final = 900_000  # the most that the broker allows


@pytest.fixture(autouse=True, scope="module")
def quickly(spark: SparkSession) -> Iterator[None]:
    with interpreted(spark):
        yield


def test_what_was_planted_is_what_is_found(spark: SparkSession, kafka: Kafka, tmp_path: Path) -> None:
    trial = Trial(spark, kafka.bootstrap, tmp_path, SEEDS, TIMEOUT_MS)
    total = Score()
    for _ in range(STAGES):
        total.add(trial.next())
    if not total.perfect:
        pytest.fail("\n".join([total.table(), *total.faults]))
    assert (total.recall, total.precision) == (1.0, 1.0)
    assert len(total.right) > 20
    assert min(total.right.values()) >= len(SEEDS)


def test_broken_rules_are_noticed(spark: SparkSession, kafka: Kafka, tmp_path: Path) -> None:
    trial = Trial(spark, kafka.bootstrap, tmp_path, SEEDS[:1], TIMEOUT_MS)
    assert trial.next().faults == []
    some = [mutant for mutant in MUTANTS if mutant.stage == 1][::30]
    survived = [str(mutant) for mutant in some if not trial.noticed(mutant)]
    assert survived == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_every_mutant_is_one_of_the_job_as_it_is(mutant: Mutant) -> None:
    with alive(mutant):
        pass
