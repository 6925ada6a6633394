"""A run that was cut off after its merge, and taken up by a command line with other options."""

from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark.tables import lake, view
from tests.spark.conftest import Audit, Ran
from tests.spark.history import History, Life
from tests.spark.test_runs import cut

LATER_S = 3600.0
ONE = Life(0, 100, 0, "a:1")


def _topics(history: History) -> tuple[str, str]:
    """Two topics: one with a duplicate and a place that is empty, one that is as it should be."""
    first, second = (history.topic(f"{history.namespace}-{name}") for name in ("a", "b"))
    producer = history.transactional(ONE)
    history.deliver(producer, ONE, first, ["once", "twice"])
    (there,) = history.deliver(producer, ONE, first, ["twice"])
    history.answers([there.answer(id=b"l" * 16, offset=1000)])
    history.deliver(producer, ONE, second, ["other"])
    return first, second


def _before(ran: Ran) -> dict[str, Any]:
    """What the report says of the run before."""
    run: dict[str, Any] = ran.document["history"][1]
    return run


def test_a_run_of_other_topics_finishes_the_interrupted_run_first(
    spark: SparkSession, history: History, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _topics(history)
    with cut(monkeypatch, view, "update", after=False):
        audit(history, later_s=LATER_S, topics=(first,))
    ran = audit(history, later_s=LATER_S, topics=(second,))
    # Nothing is called gone that the plan of the other topics does not name.
    assert ran.findings() == set()
    assert ran.document["run"]["topics"] == [second]
    assert (ran.document["run"]["number"], ran.document["run"]["finished_first"]) == (2, 1)
    assert (_before(ran)["number"], _before(ran)["findings"], _before(ran)["accepted"]) == (1, 2, 3)
    again = audit(history, later_s=LATER_S, topics=(first,))
    assert again.findings() == {("duplicate", "rewrite", "twice"), ("lost", "answer", None)}
    assert again.document["run"]["finished_first"] is None
    assert [row["verdict"] for row in lake.Lake(spark, str(ran.lake)).read("runs").orderBy("run").collect()] == [
        "findings",
        "clean",
        "findings",
    ]


@pytest.mark.parametrize(
    ("planned", "pending"),
    [({"grace_s": 7200}, 1), ({"window_h": 24}, 0), ({"key_ttl_s": 7200}, 0), ({"rules": "rules.toml"}, 0)],
    ids=["grace", "window", "retention", "rules"],
)
def test_a_run_is_finished_by_the_options_that_it_was_planned_with(
    history: History,
    audit: Audit,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    planned: dict[str, Any],
    pending: int,
) -> None:
    first, _ = _topics(history)
    if "rules" in planned:
        path = tmp_path / planned["rules"]
        path.write_text(f'[[topics]]\npattern = "{first}"\nguarantee = "idempotent"\n')
        planned = {"rules": str(path)}
    with cut(monkeypatch, view, "update", after=False):
        audit(history, later_s=LATER_S, **planned)
    ran = audit(history, later_s=LATER_S)
    assert ran.findings() == {("duplicate", "rewrite", "twice"), ("lost", "answer", None)}
    assert (ran.document["run"]["number"], ran.document["run"]["finished_first"]) == (2, 1)
    assert (_before(ran)["number"], _before(ran)["pending"]) == (1, pending)
