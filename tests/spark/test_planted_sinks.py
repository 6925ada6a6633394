"""Sinks in PostgreSQL, Delta and Iceberg, whose consumer drops, repeats, is late and dies: all is found.

Some seeds; `python -m tests.sinks` has twenty. What a run says of each fault is tested in test_sinks.py too.
"""

from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession

from deploy.stack import Kafka
from service.contract import Rules
from spark.reading.run_plan import DATA
from tests.sinks.killed import BATCH
from tests.sinks.orders import EVENTS, SAID, Fault, Orders
from tests.sinks.planted import LATE_S, Trial
from tests.sinks.postgres import Postgres
from tests.spark.history import History
from tests.spark.rows import copy, entry
from tests.spark.test_classify import log
from tests.spark.times import HOUR_MS
from tests.spark.warehouse import Warehouse

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


@pytest.mark.long
def test_what_a_crash_between_two_commits_does_is_found_and_one_transaction_leaves_nothing_to_find(
    spark: SparkSession, history: History, tmp_path: Path
) -> None:
    """The sinks of deploy/examples, killed with -9; the audit compares their tables in PostgreSQL with the events."""
    frozen_ms = history.now_ms + 4 * HOUR_MS
    found: set[Fault] = set()
    with Postgres(tmp_path / "postgres") as postgres:
        orders = Orders(history, postgres, 0, history.now_ms)
        orders.fill()
        (tmp_path / "password").write_text(postgres.password)
        warehouse = Warehouse(spark, tmp_path)
        evidence: list[Any] = []
        for one in orders.written:
            event: dict[str, Any] = {"at": one.at, "id": one.id, "topic": one.topic}
            evidence += [copy(one.offset, key=one.key, **event), entry(one.offset, **event)]
        warehouse.deliver(*evidence)
        for program in SAID:
            (warehouse.rule,) = Rules.parse(orders.rule(program, LATE_S), str(tmp_path / "rules.toml")).sinks
            report = warehouse.run(frozen_ms, logs=[log(DATA, orders.topic, 0, decided_until_ms=frozen_ms)])
            assert (report.unreadable, report.counts["expected"]) == (None, EVENTS)
            rows = warehouse.lake.read("sinks").where("kind IS NOT NULL").collect()
            found |= {(row["sink"], row["kind"], row["cause"], bytes(row["id"]).hex()) for row in rows}
        assert found == orders.faults()
    # A batch of each naive order, and nothing of the other kind.
    said = Counter((program, kind, cause) for program, kind, cause, _ in found)
    assert said == {(program, *fault): BATCH for program, fault in SAID.items() if fault is not None}
