"""A log that was truncated and grew again: the truncated records are no evidence, and the new records are read.

The broker is killed, and its log is cut off, as a leader's is after an unclean election.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession

from deploy.stack import Kafka
from service.contract.wire.ids import event_id
from spark.tables import view
from tests.spark.conftest import Audit
from tests.spark.history import TIMEOUT_S, WRITER, History
from tests.spark.runs import cut
from tests.spark.times import LATER_S
from tests.spark.views import Views, id_of


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Kafka]:
    kafka = Kafka(tmp_path / "kafka")
    try:
        kafka.start()
        yield kafka
    finally:
        kafka.stop()


def _wait_for_end(history: History, topic: str, end: int) -> None:
    """Wait until a partition has this end: the marker of a transaction is written after the answer to its commit."""
    consumer = Consumer({"bootstrap.servers": history.bootstrap, "group.id": "ends"})
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while (consumer.get_watermark_offsets(TopicPartition(topic, 0), TIMEOUT_S) or (0, 0))[1] != end:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        consumer.close()


@pytest.mark.long
def test_records_that_a_new_leader_lacks_are_dropped_and_its_own_are_read(
    spark: SparkSession, broker: Kafka, namespace: str, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a run was interrupted before it updated a view by records that are gone when it is resumed."""
    history = History(broker.bootstrap, namespace)
    topic = history.topic(f"{namespace}-t")
    producer = history.transactional(WRITER)
    history.deliver(producer, WRITER, topic, [f"kept-{n}" for n in range(3)])
    _wait_for_end(history, topic, 4)
    log = broker.folder / "data" / f"{topic}-0" / "00000000000000000000.log"
    size = log.stat().st_size
    gone = history.deliver(producer, WRITER, topic, [f"gone-{n}" for n in range(3)])
    _wait_for_end(history, topic, 8)
    history.raw(history.plain, topic, b"nobody's")
    first = audit(history, later_s=LATER_S)
    assert first.findings() == {("unkeyed", None, f"{topic}[0]")}
    assert first.document["balance"]["delivered_once"] == 6
    views = Views(spark, history, first.lake)
    assert views.register(topic) == 6
    history.deliver(producer, WRITER, topic, ["gone-3"])
    _wait_for_end(history, topic, 11)
    with cut(monkeypatch, view, "update", after=False):
        audit(history, later_s=LATER_S)

    broker.kill()
    os.truncate(log, size)
    broker.start()
    history.forget_producer()
    producer = history.transactional(WRITER)
    new = history.deliver(producer, WRITER, topic, [f"new-{n}" for n in range(7)])
    assert new[0].offset == 4
    assert new[-1].offset > gone[-1].offset
    producer.begin_transaction()
    history.ledger(producer, WRITER, [new[0].entry(id=event_id("lost"), offset=1000)])
    producer.commit_transaction(30)
    _wait_for_end(history, topic, 12)
    resumed = audit(history, later_s=LATER_S)
    assert (resumed.document["run"]["resumed"], resumed.document["balance"]["delivered_once"]) == (True, 7)
    ran = audit(history, later_s=LATER_S)
    balance = ran.document["balance"]
    assert (balance["delivered_once"], balance["unprovable"], balance["records"]) == (10, 4, 10)
    assert ran.findings() == {("evidence_gap", "truncated", f"{topic}[0]"), ("lost", "ledger", None)}
    (gap,) = [one for one in ran.document["findings"] if one["kind"] == "evidence_gap"]
    assert (gap["count"], gap["first_offset"], gap["last_offset"]) == (7, 4, 10)
    kept = [f"kept-{n}" for n in range(3)]
    assert views.rows(topic).keys() == {id_of(key) for key in (*kept, *(f"new-{n}" for n in range(7)))}
