"""Histories with known faults, from seeds: each fault is found, named as it was planted, and nothing else is.

Five seeds, and a broken job; `python -m tests.spark.generated` has fifty, and every mutant.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import date
from typing import Final

import pytest
from pyspark.sql import SparkSession

from deploy.stack import Kafka
from spark import rule_table
from tests.spark import checks
from tests.spark.generated import Trial
from tests.spark.generator import Script
from tests.spark.mutants import MUTANTS, drawn
from tests.spark.oracle import STAGES, Record, Score
from tests.spark.script import CAUSES, DUAL, EXPIRED, FOREIGN, RESTART, REWRITE, TTL_MS

SEEDS: Final = range(5)
TIMEOUT_MS: Final = 900_000  # the most that the broker allows


@pytest.fixture(scope="module")
def begun(spark: SparkSession, kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Score]:
    """Histories whose first stage has been written and judged."""
    trial = Trial(spark, kafka.bootstrap, tmp_path_factory.mktemp("trial"), SEEDS, TIMEOUT_MS)
    return trial, trial.next()


def test_a_broken_rule_is_noticed(begun: tuple[Trial, Score]) -> None:
    """At the first stage: the next test goes on to the others."""
    trial, score = begun
    assert score.faults == []
    assert trial.noticed(next(mutant for mutant in MUTANTS if mutant.rule is rule_table.rank))


def test_an_audit_of_a_generated_history_finds_what_was_planted(begun: tuple[Trial, Score]) -> None:
    trial, total = begun
    for _ in range(STAGES - 1):
        total.add(trial.next())
    if not total.perfect:
        pytest.fail("\n".join([total.table(), *total.faults]))
    assert (total.recall, total.precision) == (1.0, 1.0)
    assert len(total.right) > 20
    assert min(total.right.values()) >= len(SEEDS)


def _place_all(script: Script) -> None:
    """Offsets as a broker would give them, for those who ask nothing else of one."""
    ends: Counter[tuple[str, int]] = Counter()
    for stage in script.stages:
        for record in [*(one for transaction in stage.transactions for one in transaction.records), *stage.bare]:
            record.offset = ends[record.topic, record.partition]
            ends[record.topic, record.partition] += 1
    for record in (script.kept, script.anew_after, script.reborn_first, script.returned_first):
        record.offset = 0


def _cause(copy: Record, earlier: Sequence[Record]) -> str:
    """The contract's rules, as it words them, for a copy that comes after these."""
    life, ours = copy.life, [(other, other.life) for other in earlier if other.life is not None]
    if life is None:
        return FOREIGN
    if any(other == life for _, other in ours):
        return REWRITE if copy.entered else FOREIGN
    if ours and all(abs(other.at - copy.at) >= TTL_MS for other, _ in ours):
        return EXPIRED
    for _, other in ours:
        related = other.slot == life.slot or other.instance == life.instance
        if related and (other.producer_id, other.epoch) != (life.producer_id, life.epoch):
            return RESTART
    return DUAL


@pytest.mark.parametrize("seed", range(50))
def test_the_generator_plants_each_copy_under_the_cause_of_the_contract(seed: int) -> None:
    """At each stage, with what of an id can be seen by then: a generator that errs would blame the job."""
    script = Script(seed, "w", "w", 0)
    _place_all(script)
    told = Counter[str]()
    for planted in script.plants.ids:
        for stage in range(1, STAGES + 1):
            copies = planted.visible(stage)
            for nth, copy in enumerate(copies[1:], 1):
                assert copy.cause == _cause(copy, copies[:nth]), (planted.key, stage, nth)
                told[str(copy.cause)] += 1
    assert set(told) == set(CAUSES)


def test_ten_broken_rules_are_noticed_by_the_tables_of_cases(spark: SparkSession) -> None:
    """Another ten each day; `python -m tests.spark.generated --mutants` has them all."""
    seed = date.today().toordinal()
    survived = [str(mutant) for mutant in drawn(10, seed) if not checks.notices(spark, mutant)]
    assert survived == [], f"drawn with the seed {seed}"
