"""The topic of findings has one record for each current finding, also after interrupted runs."""

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from service.contract import SharedSettings
from service.contract.wire.names import findings_topic
from spark.errors import CannotRun
from spark.reading.kafka_admin import KafkaAdmin
from spark.report import publish
from spark.rules import current_findings
from spark.tables import lake, schemas
from tests.spark.history import History
from tests.spark.runs import Cut

Found = dict[str, int]
"""Findings by id, with their number of records."""


class Outbox:
    """A lake and its topic of findings."""

    def __init__(self, spark: SparkSession, history: History, root: Path) -> None:
        self.spark, self.history = spark, history
        self.lake = lake.Lake(spark, str(root / "lake"))
        self.shared = SharedSettings(kafka=history.bootstrap, namespace=history.namespace)
        self.last: publish.PublishedTopic | None = None
        for _ in range(2):
            self.prepare()

    def prepare(self) -> publish.PublishedTopic:
        with closing(KafkaAdmin(self.spark, self.shared)) as broker:
            return publish.prepare(broker, self.history.namespace)

    def own(self, *, replaces: bool) -> None:
        topic = self.prepare()
        if publish.check_owner(self.lake, self.shared, topic, 1, replaces=replaces):
            self.last = topic

    def publish(self, found: Found) -> None:
        fields = {name: kind for name, kind in schemas.FINDING.items() if name in current_findings.FIELDS} | {
            "id": "string"
        }
        schema = ", ".join(f"{name} {fields.get(name, 'string')}" for name in current_findings.FIELDS)
        rows = [{"finding_id": name, "kind": "lost", "count": count} for name, count in found.items()]
        frame = self.spark.createDataFrame(rows, schema)
        self.last = publish.publish(self.lake, self.shared, frame, self.prepare(), self.last, 1)

    def counts(self) -> Found:
        """The current values of a reader of the compacted topic."""
        return {key: value["count"] for key, value in dict(self.history.published()).items() if value is not None}


def test_the_findings_topic_has_the_current_findings_and_each_change_is_sent_once(
    spark: SparkSession, history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(spark, history, tmp_path)
    outbox.publish({})
    assert not outbox.lake.exists(publish.TABLE)
    found = {f"lost:{n}": 1 for n in range(20)}
    outbox.publish(found)
    assert outbox.counts() == found
    assert {tuple(row) for row in outbox.lake.read(publish.TABLE).select("finding_id", "sent").collect()} == {
        (name, True) for name in found
    }
    outbox.publish(found)
    assert len(history.published()) == 20

    # Killed between sending and marking; one finding is new, one has changed, and one is no longer current.
    changed = {**found, "lost:3": 2, "lost:new": 1}
    del changed["lost:7"]
    with monkeypatch.context() as patch:
        patch.setattr(publish, "mark_sent", _cut)
        with pytest.raises(Cut):
            outbox.publish(changed)
    assert outbox.counts() == changed
    outbox.publish(changed)
    sent = [key for key, _ in history.published()]
    assert sorted(sent[20:23]) == ["lost:3", "lost:7", "lost:new"]
    assert sorted(sent[23:]) == sorted([*found, "lost:new"])
    assert outbox.counts() == changed

    # A run that has lost its lease sends nothing; what it had sent before arrives after the next run.
    with monkeypatch.context() as patch:
        with outbox.lake.begin_commit(publish.TABLE, 1) as table:
            table.update("finding_id = 'lost:3'", {"sent": "false"})
        patch.setattr(outbox.lake, "check_held", _cut)
        with pytest.raises(Cut):
            outbox.publish(changed)
    assert len(history.published()) == len(sent)
    late = spark.createDataFrame([("lost:7", json.dumps(_finding("lost:7", 1)))], "finding_id string, value string")
    sent_late = late.selectExpr("CAST(finding_id AS BINARY) key", "CAST(value AS BINARY) value").write.format("kafka")
    topic = findings_topic(history.namespace)
    sent_late.option("kafka.bootstrap.servers", history.bootstrap).option("topic", topic).save()
    assert outbox.counts() == {**changed, "lost:7": 1}
    outbox.publish(changed)
    assert outbox.counts() == changed

    # Killed before sending; before the next run another finding is no longer current, and one is current again.
    with monkeypatch.context() as patch:
        patch.setattr(publish, "_send", _cut)
        with pytest.raises(Cut):
            outbox.publish({})
    assert outbox.counts() == changed
    outbox.publish({"lost:7": 5})
    assert outbox.counts() == {"lost:7": 5}
    written = len(history.published())
    outbox.publish({"lost:7": 5})
    assert len(history.published()) == written

    # Records were deleted from the topic; later the topic itself, and the run that sent again was killed.
    name = findings_topic(history.namespace)
    history.configure(name, "cleanup.policy", "compact,delete")
    history.delete_before(name, 0, written)
    outbox.publish({"lost:7": 5})
    assert history.published() == [("lost:7", {"v": 1, **_finding("lost:7", 5)})]
    history.remove(name)
    with monkeypatch.context() as patch:
        patch.setattr(publish, "_send", _cut)
        with pytest.raises(Cut):
            outbox.publish({"lost:7": 5})
    outbox.publish({"lost:7": 5, "lost:8": 1})
    assert outbox.counts() == {"lost:7": 5, "lost:8": 1}
    written = len(history.published())
    outbox.publish({"lost:7": 5, "lost:8": 1})
    assert len(history.published()) == written == 2


def test_a_first_publication_that_was_killed_before_it_was_marked_is_sent_again(
    spark: SparkSession, history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(spark, history, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(outbox.lake, "overwrite", _cut)
        with pytest.raises(Cut):
            outbox.publish({"lost:1": 1, "lost:2": 1})
    outbox.publish({"lost:1": 2})
    assert outbox.counts() == {"lost:1": 2}
    sent = len(history.published())
    outbox.publish({"lost:1": 2})
    assert len(history.published()) == sent


def test_a_lake_replaces_the_findings_of_another_lake_only_if_that_was_asked_for(
    spark: SparkSession, history: History, tmp_path: Path
) -> None:
    before = Outbox(spark, history, tmp_path / "before")
    before.publish({"lost:1": 1, "lost:2": 1, "lost:3": 1})
    before.publish({"lost:1": 1, "lost:2": 1})
    other = Outbox(spark, history, tmp_path / "other")
    with pytest.raises(CannotRun, match=r"findings'.* --replace-findings if --lake .*other.*, else --no-publish"):
        other.own(replaces=False)
    assert before.counts() == other.counts() == {"lost:1": 1, "lost:2": 1}
    sent = len(history.published())
    other.own(replaces=True)
    other.publish({"lost:2": 1, "lost:4": 1})
    assert sorted(key for key, _ in history.published()[sent:]) == ["lost:1", "lost:4"]
    other.publish({"lost:2": 1, "lost:4": 1})
    assert other.counts() == {"lost:2": 1, "lost:4": 1}
    # From now on it is this lake's; and an empty topic is anybody's.
    other.own(replaces=False)
    other.publish({})
    Outbox(spark, history, tmp_path / "third").own(replaces=False)


def test_a_run_that_was_killed_after_it_had_taken_the_findings_of_another_lake_is_repeated(
    spark: SparkSession, history: History, tmp_path: Path
) -> None:
    Outbox(spark, history, tmp_path / "before").publish({"lost:1": 1, "lost:2": 1})
    Outbox(spark, history, tmp_path / "other").own(replaces=True)
    again = Outbox(spark, history, tmp_path / "other")
    again.own(replaces=True)
    again.publish({"lost:2": 2})
    assert again.counts() == {"lost:2": 2}


def _finding(name: str, count: int) -> dict[str, Any]:
    return {**dict.fromkeys(current_findings.FIELDS), "finding_id": name, "kind": "lost", "count": count}


PUBLISHED = publish.PublishedTopic("A", (0, 3), (10, 7))


@pytest.mark.parametrize(
    ("last", "has_records"),
    [
        (PUBLISHED, True),
        (dataclasses.replace(PUBLISHED, high_watermarks=(9, 7)), False),
        (None, False),
        (dataclasses.replace(PUBLISHED, topic_id="B"), False),
        (dataclasses.replace(PUBLISHED, log_starts=(0, 2)), False),
        (dataclasses.replace(PUBLISHED, high_watermarks=(10, 8)), False),
    ],
)
def test_a_topic_has_what_was_sent_unless_it_was_recreated_emptied_truncated_or_written_since(
    last: publish.PublishedTopic | None, has_records: bool
) -> None:
    stored = None if last is None else json.loads(json.dumps(dataclasses.asdict(last)))
    assert PUBLISHED.has_records_of(publish.PublishedTopic.of(stored)) == has_records


def test_a_topic_is_not_known_with_records_that_another_run_has_sent_meanwhile() -> None:
    after = dataclasses.replace(PUBLISHED, high_watermarks=(12, 8))
    assert [PUBLISHED.with_sent((12, 8), sent) for sent in (2, 3, 4)] == [PUBLISHED, after, PUBLISHED]


def _cut(*_: Any, **__: Any) -> None:
    raise Cut


def test_a_findings_topic_that_is_not_compacted_is_refused(
    spark: SparkSession, history: History, tmp_path: Path
) -> None:
    name = history.topic(findings_topic(history.namespace))
    with pytest.raises(CannotRun, match=f"topic '{name}' is not compacted: set its cleanup.policy .*--no-publish"):
        Outbox(spark, history, tmp_path)
