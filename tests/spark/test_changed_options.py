"""Command lines with other options than the last run, which was cut off after its merge or not."""

import uuid
from typing import Any, NamedTuple

import pytest
from pyspark.sql import SparkSession

from deploy.stack import Kafka
from service.contract.wire.ids import event_id
from spark.settings import HOUR_MS
from spark.tables import lake, view
from tests.spark.conftest import Audit
from tests.spark.history import WRITER, History
from tests.spark.runs import Ran, cut
from tests.spark.times import LATER_S


class Runs(NamedTuple):
    """Runs in one lake. The first, of topic `first`, was cut off; `second`, of topic `second`, finished it first."""

    first_topic: str
    second_topic: str
    second: Ran
    by_default: Ran


@pytest.fixture(scope="module")
def runs(kafka: Kafka, audit: Audit, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    history = History(kafka.bootstrap, f"t-{uuid.uuid4().hex[:12]}")
    first, second, others, refused = (
        history.topic(f"{history.namespace}-{name}") for name in ("a", "b", "others", "refused")
    )
    producer = history.transactional(WRITER)
    history.deliver(producer, WRITER, first, ["once", "twice"])
    (there,) = history.deliver(producer, WRITER, first, ["twice"])
    history.answers([there.answer(id=b"l" * 16, offset=1000)])
    history.deliver(producer, WRITER, second, ["other"])
    for name in (others, refused):
        history.raw(history.plain, name, b"nobody's")
    history.answers([there.answer(422, id=event_id("refused"), topic=refused)])
    rules = tmp_path_factory.mktemp("rules") / "rules.toml"
    rules.write_text(f'[[topics]]\npattern = "{first}"\nguarantee = "idempotent"\n')
    planned: dict[str, Any] = {"grace_s": 7200, "window_h": 24, "key_ttl_s": 7200, "rules": str(rules)}
    with pytest.MonkeyPatch.context() as patch, cut(patch, view, "update", after=False):
        audit(history, later_s=LATER_S, topics=(first,), **planned)
    options: list[dict[str, Any]] = [{"topics": (second,)}, {}]
    return Runs(first, second, *(audit(history, later_s=LATER_S, **each) for each in options))


def test_a_run_is_finished_by_the_options_that_it_was_planned_with(spark: SparkSession, runs: Runs) -> None:
    """With all options of its plan (`run_plan.settings_of`). Then the options of the command line apply."""
    second, by_default = runs.second, runs.by_default
    # No record is reported as gone that the plan of the other topics does not name.
    assert second.findings() == set()
    assert second.document["run"]["topics"] == [runs.second_topic]
    assert (second.document["run"]["number"], second.document["run"]["finished_first"]) == (2, 1)
    before = second.document["history"][1]
    assert (before["number"], before["findings"], before["pending"], before["accepted"]) == (1, 1, 1, 3)
    assert by_default.findings() == {("duplicate", "rewrite", "twice"), ("lost", "answer", None)}
    assert by_default.document["run"]["finished_first"] is None
    verdicts = lake.Lake(spark, str(by_default.lake)).read("runs").where("run <= 3").orderBy("run").collect()
    assert [row["verdict"] for row in verdicts] == ["findings", "clean", "findings"]


def test_the_topics_of_a_default_run_do_not_depend_on_the_options_of_the_last_run(runs: Runs) -> None:
    """After a run that named more topics: test_planning.py, test_classify.py."""
    assert runs.by_default.document["run"]["topics"] == [runs.first_topic, runs.second_topic]


@pytest.mark.long
def test_a_run_without_the_pass_over_ids_is_finished_without_it(
    history: History, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has committed its findings, so that a resumed run cannot add those of the pass."""
    topic = history.topic(f"{history.namespace}-t")
    producer = history.transactional(WRITER)
    for hours_ago in (5, 2):
        history.deliver(producer, WRITER, topic, ["twice"], at=history.now_ms - hours_ago * HOUR_MS)
    with cut(monkeypatch, lake.Lake, "replace", after=True, only="findings"):
        audit(history, later_s=LATER_S, skip_ids=True)
    ran = audit(history, later_s=LATER_S)
    assert ran.findings() == {("duplicate", "rewrite", "twice")}
    run = ran.document["run"]
    assert (run["number"], run["finished_first"], run["ids_pass"]) == (2, 1, True)
    assert [row["findings"] for row in ran.document["history"]] == [1, 0]
