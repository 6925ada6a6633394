"""Tests answers 202 and 504, and offsets that are not read yet."""

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from deploy.stack import Kafka
from service.contract import wire
from spark.reading.kafka_admin import Ends, KafkaAdmin, TopicPartition
from spark.rules import cross_hour
from spark.tables import hours, lake
from tests.spark.conftest import Audit
from tests.spark.history import History, Writer
from tests.spark.rows import HOUR_MS, NOW_MS, answer, copy, entry, ids, name_of, reduced
from tests.spark.stories import Stories, Story

LATER_S = 3600.0
EARLY, LATE = NOW_MS - 3 * HOUR_MS, NOW_MS - HOUR_MS

# evidence → the `elsewhere` and `freed_ms` that other hours give the 202 or 504
CASES: dict[str, tuple[Sequence[Any], tuple[bool, int | None] | None]] = {
    "entered": ([entry(1, at=EARLY), copy(1, at=EARLY), answer(504)], (True, None)),
    "lost": ([entry(2, at=EARLY), answer(202)], (True, None)),
    "answered": ([answer(201, 3, at=EARLY), answer(504)], (True, None)),
    "phantom": ([copy(4, at=EARLY), answer(504)], (True, None)),
    "strange": ([copy(5, at=EARLY, writer=None), answer(504)], None),
    "later": ([answer(504, at=EARLY), entry(6, at=LATE), copy(6, at=LATE)], (True, None)),
    "freed": ([answer(504, at=EARLY), answer(503, at=LATE)], (False, LATE + 20)),
    "freed-before": ([answer(503, at=EARLY), answer(504, at=LATE)], None),
    "both": ([answer(504, at=EARLY), answer(503, at=LATE), copy(7, at=LATE)], (True, LATE + 20)),
    "alone": ([answer(504)], None),
    "twice": ([answer(504), answer(504, at=EARLY)], None),
    "same hour": ([answer(504), copy(8), entry(8)], None),
    "refused": ([answer(504), answer(409, at=EARLY)], None),
}


def _told(rows: Any) -> dict[str, tuple[bool, int | None]]:
    found = cross_hour.settled_elsewhere(rows, 1)
    assert found is not None
    return {name_of(row["id"]): (row["elsewhere"], row["freed_ms"]) for row in found.collect()}


def test_an_unsure_answer_is_settled_by_the_evidence_of_other_hours(spark: SparkSession) -> None:
    rows = reduced(spark, ids({name: case[0] for name, case in CASES.items()}))
    assert _told(rows) == {name: told for name, (_, told) in CASES.items() if told is not None}


def test_evidence_of_other_hours_is_noted_once_and_revoked_by_a_later_answer(
    spark: SparkSession, tmp_path: Any
) -> None:
    tables = lake.Lake(spark, str(tmp_path))
    tables.append("deliveries", reduced(spark, ids({name: case[0] for name, case in CASES.items()})), 1)
    found = cross_hour.settled_elsewhere(tables.read("deliveries"), 1)
    assert found is not None
    found = found.localCheckpoint()
    tables.settle_elsewhere(found, hours.of(found), 1)
    assert _told(tables.read("deliveries")) == {}
    # Without new records: only the few rows in doubt are looked up.
    assert cross_hour.settled_elsewhere(tables.read("deliveries").where("run > 1"), 2) is None
    again = reduced(spark, ids({"freed": [answer(504, at=EARLY, timestamp_ms=NOW_MS)]}), 2)
    tables.merge(again, hours.of(again), 2)
    rows = tables.read("deliveries").where((F.col("answered_504") > 0) & (F.col("run") == 2)).collect()
    assert [(name_of(row["id"]), row["freed_ms"]) for row in rows] == [("freed", None)]


# Without the pass over ids, with it, and again after a wrong clock has made all records old.
RUNS: tuple[Mapping[str, Any], ...] = (
    {"later_s": LATER_S, "skip_ids": True},
    {"later_s": LATER_S, "skip_ids": True},
    {"later_s": LATER_S},
    {"later_s": 10 * LATER_S},
    {"later_s": 10 * LATER_S, "skip_ids": True},
    {"later_s": 10 * LATER_S},
)


def a_run_without_the_pass_over_ids_calls_no_id_stuck_that_another_hour_settles(history: History) -> Story:
    writer = Writer(0, 100, 0, "a:1")
    topic, now_ms = history.topic(f"{history.namespace}-elsewhere"), history.now_ms
    producer = history.transactional(writer)
    (there,) = history.deliver(producer, writer, topic, ["slow"], at=now_ms - 5 * HOUR_MS, answer=False)

    def told(status: int, key: str, hours_ago: int) -> str:
        return there.answer(status, id=wire.event_id(key), at=now_ms - hours_ago * HOUR_MS)

    history.answers([told(504, "slow", 2), told(504, "freed", 5), told(504, "late", 2), told(504, "stuck", 3)])
    history.answers([told(503, "freed", 2)])
    first = yield
    assert {one["id"] for one in first.document["findings"] if one["topic"] == topic} == {
        wire.event_id(key).hex() for key in ("late", "stuck")
    }
    assert (first.balance(topic)["stuck"], first.balance(topic)["accepted"]) == (2, 3)
    # A row of an earlier hour that a later run reads settles it too.
    history.deliver(producer, writer, topic, ["late"], at=now_ms - 5 * HOUR_MS)
    for _ in RUNS[1:]:
        ran = yield
        assert ran.findings(topic) == {("stuck", "504", None)}
        balance = ran.balance(topic)
        assert (balance["accepted"], balance["delivered_once"], balance["stuck"]) == (3, 2, 1)


def the_key_of_a_stuck_id_comes_from_another_hour_only_with_the_pass_over_ids(history: History) -> Story:
    topic, hour_ms = history.topic(f"{history.namespace}-keys"), history.now_ms // HOUR_MS * HOUR_MS - 3 * HOUR_MS
    strange = {}
    for key, before_ms in (("same", 1000), ("other", HOUR_MS)):
        (strange[key],) = history.send(history.plain, topic, [key], None, ts=hour_ms + 2000 - before_ms)
    history.answers([one.answer(504, at=hour_ms + 2000) for one in strange.values()])
    told = {wire.event_id(key).hex(): key for key in strange}
    for keys in ({"same", None}, {"same", None}, {"same", "other"}):
        ran = yield
        found = [one for one in ran.document["findings"] if one["topic"] == topic]
        assert {(one["kind"], told[one["id"]]) for one in found} == {("stuck", "same"), ("stuck", "other")}
        assert {one["key"] for one in found} == keys


def a_driver_whose_clock_is_ahead_calls_no_record_lost_that_is_written_during_the_plan(history: History) -> Story:
    for _ in RUNS[:3]:
        yield
    writer = Writer(1, 200, 0, "b:1")
    topic = history.topic(f"{history.namespace}-meanwhile")
    producer = history.transactional(writer)
    history.deliver(producer, writer, topic, ["before"])
    whole = KafkaAdmin.ends
    written: list[Any] = []

    def ends(self: KafkaAdmin, places: Sequence[TopicPartition], *, strict: bool = True) -> dict[TopicPartition, Ends]:
        if not written and any(name == wire.ledger_topic(history.namespace) for name, _ in places):
            written.append(history.deliver(producer, writer, topic, ["meanwhile"]))
        return whole(self, places, strict=strict)

    with patch.object(KafkaAdmin, "ends", ends):
        first = yield
    assert written
    assert first.findings(topic) == set()
    assert (first.balance(topic)["pending"], first.balance(topic)["delivered_once"]) == (1, 1)
    second = yield
    assert (second.findings(topic), second.balance(topic)["delivered_once"]) == (set(), 2)


def a_proven_loss_stays_when_a_compacted_log_grows(history: History) -> Story:
    for _ in RUNS[:2]:
        yield
    writer = Writer(2, 300, 0, "c:1")
    topic = history.topic(f"{history.namespace}-compacted", 1, {"cleanup.policy": "compact"})
    producer = history.transactional(writer)
    (there,) = history.deliver(producer, writer, topic, ["there"], record_key=b"k", value=b'"$key"')
    history.answers([there.answer(id=wire.event_id("lost"), offset=7)])
    # In two hours, so that it counts once by the pass over ids.
    history.answers([there.answer(504, id=wire.event_id("lost"), at=history.now_ms - 3 * HOUR_MS)])
    first = yield
    assert first.findings(topic) == {("lost", "answer", None)}
    history.deliver(producer, writer, topic, [f"more-{n}" for n in range(20)], record_key=b"k", value=b'"$key"')
    for _ in RUNS[3:]:
        ran = yield
        assert ran.findings(topic) == {("lost", "answer", None)}
        balance = ran.balance(topic)
        assert (balance["lost"], balance["delivered_once"], balance["unprovable"]) == (1, 21, 0)


def a_verdict_that_is_newer_than_the_last_pass_over_ids_stands(history: History) -> Story:
    """The pass found an id of two hours delivered; then one of these hours, classified again, finds it lost."""
    writer = Writer(3, 400, 0, "d:1")
    topic, now_ms = history.topic(f"{history.namespace}-newer"), history.now_ms
    producer = history.transactional(writer)
    (there,) = history.deliver(producer, writer, topic, ["wide"], at=now_ms - 5 * HOUR_MS)
    history.answers([there.answer(504, at=now_ms - 2 * HOUR_MS)])
    for _ in RUNS[:4]:
        assert (yield).findings(topic) == set()
    producer.begin_transaction()
    history.ledger(producer, writer, [there.entry(at=now_ms - 2 * HOUR_MS, offset=1000)])
    producer.commit_transaction(30)
    ran = yield
    assert ran.balance(topic)["lost"] == 1
    assert ran.findings(topic) == {("lost", "ledger", None)}


STORIES = (
    a_run_without_the_pass_over_ids_calls_no_id_stuck_that_another_hour_settles,
    the_key_of_a_stuck_id_comes_from_another_hour_only_with_the_pass_over_ids,
    a_driver_whose_clock_is_ahead_calls_no_record_lost_that_is_written_during_the_plan,
    a_proven_loss_stays_when_a_compacted_log_grows,
    a_verdict_that_is_newer_than_the_last_pass_over_ids_stands,
)


@pytest.fixture(scope="module")
def stories(kafka: Kafka, audit: Audit) -> Stories:
    history = History(kafka.bootstrap, f"t-{uuid.uuid4().hex[:12]}")
    shared = Stories({story.__name__: story(history) for story in STORIES})
    shared.run(partial(audit, history), RUNS)
    return shared


@pytest.mark.parametrize("story", [story.__name__ for story in STORIES])
def test_that(stories: Stories, story: str) -> None:
    stories.check(story)


def test_a_stuck_id_of_two_hours_is_pending_again_while_a_ledger_is_blocked(history: History, audit: Audit) -> None:
    """The first run counted its hours; the second one, with less evidence, counts the id: the balance closes."""
    writer = Writer(0, 100, 0, "a:1")
    topic = history.topic(f"{history.namespace}-t")
    (there,) = history.deliver(history.transactional(writer), writer, topic, ["there"])
    for hours_ago in (5, 3):
        at = history.now_ms - hours_ago * HOUR_MS
        history.answers([there.answer(504, id=wire.event_id("stuck"), at=at)])
    first = audit(history, later_s=LATER_S)
    assert (first.document["balance"]["stuck"], first.document["balance"]["pending"]) == (1, 0)
    slow = history.transactional(writer)
    slow.begin_transaction()
    history.ledger(slow, writer, [])
    second = audit(history, later_s=LATER_S)
    slow.abort_transaction(30)
    assert (second.document["balance"]["stuck"], second.document["balance"]["pending"]) == (0, 1)
