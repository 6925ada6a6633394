"""Tests an interrupted run that a command line with other options resumes after its merge."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark.settings import HOUR_MS
from spark.tables import lake, view
from tests.spark.conftest import Audit
from tests.spark.history import History, Writer
from tests.spark.test_runs import cut

LATER_S = 3600.0
ONE = Writer(0, 100, 0, "a:1")


def _topics(history: History) -> tuple[str, str]:
    """Write two topics: one with a duplicate and a claim without record, one without faults."""
    first, second = (history.topic(f"{history.namespace}-{name}") for name in ("a", "b"))
    producer = history.transactional(ONE)
    history.deliver(producer, ONE, first, ["once", "twice"])
    (there,) = history.deliver(producer, ONE, first, ["twice"])
    history.answers([there.answer(id=b"l" * 16, offset=1000)])
    history.deliver(producer, ONE, second, ["other"])
    return first, second


def test_a_run_is_finished_by_the_options_that_it_was_planned_with(
    spark: SparkSession, history: History, audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all options of its plan (`run_plan.settings_of`). Then the options of the command line apply."""
    first, second = _topics(history)
    rules = tmp_path / "rules.toml"
    rules.write_text(f'[[topics]]\npattern = "{first}"\nguarantee = "idempotent"\n')
    planned: dict[str, Any] = {"grace_s": 7200, "window_h": 24, "key_ttl_s": 7200, "rules": str(rules)}
    with cut(monkeypatch, view, "update", after=False):
        audit(history, later_s=LATER_S, topics=(first,), **planned)
    ran = audit(history, later_s=LATER_S, topics=(second,))
    # No record is reported as gone that the plan of the other topics does not name.
    assert ran.findings() == set()
    assert ran.document["run"]["topics"] == [second]
    assert (ran.document["run"]["number"], ran.document["run"]["finished_first"]) == (2, 1)
    before = ran.document["history"][1]
    assert (before["number"], before["findings"], before["pending"], before["accepted"]) == (1, 1, 1, 3)
    again = audit(history, later_s=LATER_S, topics=(first,))
    assert again.findings() == {("duplicate", "rewrite", "twice"), ("lost", "answer", None)}
    assert again.document["run"]["finished_first"] is None
    assert [row["verdict"] for row in lake.Lake(spark, str(ran.lake)).read("runs").orderBy("run").collect()] == [
        "findings",
        "clean",
        "findings",
    ]


@pytest.mark.long
def test_a_run_without_the_pass_over_ids_is_finished_without_it(
    history: History, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has committed its findings, so that a resumed run cannot add those of the pass."""
    topic = history.topic(f"{history.namespace}-t")
    producer = history.transactional(ONE)
    for hours_ago in (5, 2):
        history.deliver(producer, ONE, topic, ["twice"], at=history.now_ms - hours_ago * HOUR_MS)
    with cut(monkeypatch, lake.Lake, "replace", after=True, only="findings"):
        audit(history, later_s=LATER_S, skip_ids=True)
    ran = audit(history, later_s=LATER_S)
    assert ran.findings() == {("duplicate", "rewrite", "twice")}
    run = ran.document["run"]
    assert (run["number"], run["finished_first"], run["ids_pass"]) == (2, 1, True)
    assert [row["findings"] for row in ran.document["history"]] == [1, 0]
