"""Sinks in a real PostgreSQL and as Delta tables, whose consumer drops, repeats, is late and dies: all is found.

Some seeds; `python -m tests.sinks` has twenty. What a run says of each fault is tested in test_sinks.py too.
"""

from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import SparkSession

from deploy.stack import Kafka
from tests.sinks.planted import Trial
from tests.sinks.postgres import Postgres

SEEDS: Final = range(4)


@pytest.mark.long
def test_each_planted_fault_of_a_sink_is_found_and_nothing_else(
    spark: SparkSession, kafka: Kafka, tmp_path: Path
) -> None:
    with Postgres(tmp_path / "postgres") as postgres:
        trial = Trial(spark, kafka.bootstrap, postgres, tmp_path, SEEDS)
        score = trial.carry_out()
    if score.faults:
        pytest.fail("\n".join([score.table(), *score.faults]))
    assert {kind for kind, _ in score.right} == {"missing_in_sink", "twice_in_sink", "late_in_sink", "extra_in_sink"}
    # Each consumer dies once: between storing a batch and committing its offset, or the other way round.
    assert sum(sink.deaths for sink in trial.sinks) == len(trial.sinks)
    kept = [*tmp_path.glob("report-*/*"), *tmp_path.glob("lake/*/_delta_log/*.json")]
    assert kept
    assert not [path for path in kept if postgres.password in path.read_text()]
