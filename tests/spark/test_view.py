"""Tests the view of a topic: each id once, the same for any number of runs."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings
from service.contract.wire import ids
from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER, Stamp
from spark.errors import CannotRun
from spark.queries import show
from spark.reading import decode, source
from spark.reading.run_plan import Plan
from spark.rules import cross_hour
from spark.tables import deliveries, hours, view
from spark.tables.lake import Lake
from tests.spark.conftest import Audit
from tests.spark.history import OTHER_WRITER, WRITER, History
from tests.spark.rows import NOW_MS
from tests.spark.runs import cut
from tests.spark.times import HOUR_MS, LATER_S
from tests.spark.views import Views, id_of


def test_a_view_has_each_id_once_and_equals_a_view_that_is_rebuilt(
    spark: SparkSession, history: History, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = history.topic(f"{history.namespace}-t", 2, {"message.timestamp.after.max.ms": str(2**62)})
    options: dict[str, Any] = {"later_s": LATER_S, "topics": (topic,)}
    producer = history.transactional(WRITER)
    sent = {"value": b'"$key"', "record_key": b"k", "headers": [("h", b"1")]}
    history.deliver(producer, WRITER, topic, [f"k-{n}" for n in range(30)], **sent)  # type: ignore[arg-type]
    history.deliver(producer, WRITER, topic, ["gone"], value=None, record_key=b"gone", partition=1)
    # Another clock counts in microseconds.
    history.send(history.plain, topic, ["gone"], WRITER, ts=history.now_ms * 1000)
    # A copy that the ledger does not name is not the first one, although it has the earliest timestamp.
    history.send(history.plain, topic, ["k-1", "named"], WRITER, ts=history.now_ms - 5000, value=b"foreign")
    named = history.deliver(producer, WRITER, topic, ["named"], value=b"named", partition=1)[0]
    # The ledger record of this one comes later than the record.
    history.send(history.plain, topic, ["late"], None, ts=history.now_ms - 5000, value=b"before")
    producer.begin_transaction()
    late = history.send(producer, topic, ["late"], WRITER, value=b"late")[0]
    producer.commit_transaction(30)
    history.raw(history.plain, topic, b"no id")
    ran = audit(history, **options)
    views = Views(spark, history, ran.lake)

    assert views.register(topic) == 33
    rows = views.rows(topic)
    assert rows.keys() == {id_of(key) for key in (*(f"k-{n}" for n in range(30)), "gone", "named", "late")}
    assert rows[id_of("k-1")][2:] == (b'"k-1"', True)
    assert rows[id_of("gone")][2] is None
    assert rows[id_of("named")] == (1, named.offset, b"named", True)
    assert rows[id_of("late")][2:] == (b"before", False)
    assert views.register(topic) == 33
    whole = spark.read.format("delta").load(views.path(topic))
    assert {field.name: field.dataType.simpleString() for field in whole.schema} == {
        name: kind.replace(": ", ":").replace(", ", ",") for name, kind in view.COLUMNS.items()
    }
    first = whole.where("CAST(key AS STRING) = 'k'").orderBy("offset").limit(1).collect()[0]
    assert ("h", b"1") in {(header["key"], bytes(header["value"])) for header in first["headers"]}

    # Copies in the same hour and in another, a ledger record for an earlier record, and new ids.
    history.deliver(producer, WRITER, topic, [f"k-{n}" for n in range(25, 40)], value=b"again")
    history.deliver(
        producer, WRITER, topic, ["k-2", "new", id_of("k-3")], value=b"again", at=history.now_ms - 3 * HOUR_MS
    )
    producer.begin_transaction()
    history.ledger(producer, WRITER, [late.entry()])
    producer.commit_transaction(30)
    with cut(monkeypatch, view.View, "merge", after=False):
        audit(history, **options)
    assert views.rows(topic) == rows
    again = audit(history, **options)
    assert again.document["run"]["resumed"]
    grown = views.rows(topic)
    assert grown.keys() - rows.keys() == {
        id_of(key) for key in (*(f"k-{n}" for n in range(30, 40)), "new", id_of("k-3"))
    }
    assert {id for id in rows if grown[id] != rows[id]} == {id_of("late")}
    assert grown[id_of("late")] == (0, late.offset, b"late", True)

    # Interrupted after its commit: the next run has nothing to do.
    version = views.version(topic)
    lake = Lake(spark, str(ran.lake))
    last_plan, plan = (
        Plan.from_rows(row.asDict(recursive=True) for row in lake.read("progress").where(F.col("run") == run).collect())
        for run in (1, 2)
    )
    assert plan is not None
    view.update(lake, views.shared, plan, None)
    assert views.version(topic) == version

    _shown(spark, views.shared, str(ran.lake), topic)

    # Made again from all records, by the next update or by a new registration, it is the same.
    shutil.rmtree(ran.lake / view.FOLDER)
    view.update(lake, views.shared, plan, last_plan)
    assert views.rows(topic) == grown
    for name in (view.FOLDER, view.TABLE):
        shutil.rmtree(ran.lake / name)
    views.register(topic)
    assert views.rows(topic) == grown


def _shown(spark: SparkSession, shared: SharedSettings, root: str, topic: str) -> None:
    """Return the output of `show` for ids of the history, by key or by id."""
    lines = list(show.show(spark, shared, root, "k-1"))
    assert lines == list(show.show(spark, shared, root, id_of("k-1")))
    text = "\n".join(lines)
    assert text.startswith(f"id         {id_of('k-1')}\n")
    assert f"record     {topic}[0]@1  in the ledger, slot 0, producer 100 epoch 0, a:1" in text
    assert "  header   h: 1" in text
    assert '  value    "k-1"' in text
    assert "  value    foreign" in text
    assert "finding    conflict/foreign_writer, 2 records" in text
    # A key of 32 hexadecimal digits, which is here the id of another key: both are shown.
    both = list(show.show(spark, shared, root, id_of("k-3")))
    assert [line for line in both if line.startswith("id ")] == [
        f"id         {id}" for id in (id_of("k-3"), id_of(id_of("k-3")))
    ]
    gone = list(show.show(spark, shared, root, "gone"))
    assert "  value    null" in gone
    assert any(line.startswith("  time     ") and line.endswith("000 ms") for line in gone)
    with pytest.raises(CannotRun, match="does not know 'nobody': give an id"):
        list(show.show(spark, shared, root, "nobody"))


@pytest.mark.long
def test_a_view_has_only_records_that_a_run_has_audited(
    spark: SparkSession, history: History, audit: Audit, tmp_path: Path
) -> None:
    topic = history.topic(f"{history.namespace}-t", 2)
    views = Views(spark, history, tmp_path / "lake")
    with pytest.raises(CannotRun, match=f"no finished run on --lake .* has audited topic '{topic}'"):
        views.register(topic)
    producer = history.transactional(OTHER_WRITER)
    history.deliver(producer, OTHER_WRITER, topic, [f"k-{n}" for n in range(5)])
    ran = audit(history, later_s=LATER_S, publish=True)
    assert history.published() == []
    views = Views(spark, history, ran.lake)
    # Records that Kafka has deleted when the view is created are not in it.
    history.delete_before(topic, 0, 2)
    assert views.register(topic) == 3
    # A run that does not audit the topic leaves it to the next one; a recreated topic has other records.
    history.deliver(producer, OTHER_WRITER, topic, ["more"], partition=1)
    other = history.topic(f"{history.namespace}-o", 1)
    audit(history, later_s=LATER_S, topics=(other,))
    assert len(views.rows(topic)) == 3
    audit(history, later_s=LATER_S)
    kept = {id_of(key) for key in ("k-2", "k-3", "k-4", "more")}
    assert set(views.rows(topic)) == kept
    history.remove(topic)
    history.topic(topic, 2)
    history.send(history.plain, topic, ["other", "k-4"], None)
    left = Path(views.path(topic)) / "left.parquet"  # as a killed run leaves them
    left.touch()
    os.utime(left, (0, 0))
    last = audit(history, later_s=LATER_S, publish=True, vacuum_h=1)
    assert not left.exists()
    assert dict(history.published()) == {one["finding_id"]: {"v": 1, **one} for one in last.document["findings"]}
    assert set(views.rows(topic)) == kept | {id_of("other")}


@pytest.mark.parametrize("topic", ["_delta_log", "_samples"])
def test_a_topic_with_a_name_that_delta_reserves_has_no_view(topic: str) -> None:
    """Delta would take the view for a part of another table: it would be written and never read."""
    with pytest.raises(CannotRun, match=f"Delta reserves '{topic}'"):
        view.register(Mock(), SharedSettings(), "lake", topic)


@pytest.mark.long
def test_ledger_entries_read_by_a_run_of_other_topics_reach_the_view_with_the_next_run(
    spark: SparkSession, history: History, audit: Audit
) -> None:
    topic, other = (history.topic(f"{history.namespace}-{name}", 1) for name in ("t", "o"))
    producer = history.transactional(WRITER)
    # Two copies, of which a late ledger record names the second; and one whose ledger record comes late.
    history.send(history.plain, topic, ["twice", "once"], None, ts=history.now_ms - 5000, value=b"before")
    history.deliver(producer, WRITER, other, ["elsewhere"])
    named = history.send(history.plain, topic, ["twice", "alone"], WRITER, value=b"named")
    ran = audit(history, later_s=LATER_S, topics=(topic, other))
    views = Views(spark, history, ran.lake)
    views.register(topic)
    assert views.rows(topic)[id_of("twice")][2:] == (b"before", False)
    producer.begin_transaction()
    history.ledger(producer, WRITER, [one.entry() for one in named])
    producer.commit_transaction(30)
    for topics in ((other,), (topic, other)):
        audit(history, later_s=LATER_S, topics=topics)
    rows = views.rows(topic)
    assert rows[id_of("twice")] == (0, named[0].offset, b"named", True)
    assert rows[id_of("alone")] == (0, named[1].offset, b"named", True)
    assert rows[id_of("once")][2:] == (b"before", False)


def _record(
    partition: int, offset: int, key: str, value: bytes, *, ts: int, scope: str = "", ours: bool = True
) -> tuple[Any, ...]:
    """A record (source.SCHEMA), with Fencepost's header if it is `ours`."""
    headers = [(KEY_HEADER, key.encode())]
    if ours:
        fingerprint = ids.fingerprint("t", None, None, (), value)
        stamp = Stamp(ids.event_id(key, scope), fingerprint, NOW_MS, 0, 1, 0, "a:1")
        headers.append((STAMP_HEADER, stamp.encode()))
    return ("t", partition, offset, NOW_MS + ts, None, value, headers)


class _Log:
    """The records of the topic `t` as Kafka has them now, and the rows of `deliveries` that a run makes of them."""

    def __init__(self, spark: SparkSession, records: list[tuple[Any, ...]]) -> None:
        self.spark = spark
        self.records = records

    @property
    def spans(self) -> dict[tuple[str, int], tuple[int, int]]:
        return {(record[0], record[1]): (0, record[2] + 1) for record in sorted(self.records, key=lambda one: one[2])}

    def read(self, spans: dict[tuple[str, int], tuple[int, int]]) -> DataFrame:
        """Stands for source.read."""
        within = [one for one in self.records if one[:2] in spans and spans[one[0], one[1]][0] <= one[2]]
        within = [one for one in within if one[2] < spans[one[0], one[1]][1]]
        return self.spark.createDataFrame(within, source.SCHEMA)

    def rows(self, spans: dict[tuple[str, int], tuple[int, int]], run: int, topic_id: str = "one") -> DataFrame:
        copies = decode.copies(self.read(spans), NOW_MS + HOUR_MS, {})
        claims = deliveries.summarize(self.spark.createDataFrame([], decode.CLAIMS))
        return deliveries.reduce(copies, claims, run, deliveries.LogFacts(topic_ids={"t": topic_id})).localCheckpoint()


def test_a_row_of_a_truncated_record_or_of_a_changed_id_leaves_the_view(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next copy of its id replaces the row: the view is the same as one that is made from nothing."""
    log = _Log(
        spark,
        [
            _record(0, 0, "kept", b"kept", ts=0),
            _record(0, 1, "twice", b"first", ts=1),
            _record(0, 2, "gone", b"gone", ts=2),
            _record(0, 3, "rewritten", b"before", ts=3),
            _record(1, 0, "twice", b"second", ts=9),
            _record(1, 1, "named", b"named", ts=1, ours=False),
            _record(1, 2, "named", b"named", ts=2, scope="caller"),
            _record(1, 3, "recreated", b"old", ts=3),
        ],
    )
    monkeypatch.setattr(source, "read", lambda spark, shared, spans: log.read(spans))
    lake, shared = Lake(spark, str(tmp_path)), SharedSettings()
    a_view = view.View(lake, shared, "t")
    # An earlier topic of this name had another record at an offset that is truncated in the present one.
    earlier = [_record(0, 2, "earlier", b"earlier", ts=-9)]
    for run, (its_records, topic_id) in enumerate([(earlier, "earlier"), (log.records, "one")], 1):
        log.records = its_records
        lake.append_once("deliveries", log.rows(log.spans, run, topic_id), run)
        a_view.advance(lake.read("deliveries"), run - 1, view.TopicLogs(log.spans, log.spans), run)

    def shown() -> dict[bytes, tuple[int, int, bytes]]:
        return {
            bytes(row["id"]): (row["partition"], row["offset"], bytes(row["value"])) for row in a_view.rows().collect()
        }

    known = {
        key: ids.event_id(key) for key in ("kept", "twice", "gone", "rewritten", "named", "recreated", "new", "earlier")
    }
    of_caller = ids.event_id("named", "caller")
    assert shown().keys() == {*known.values(), of_caller} - {known["new"]}

    # A log was truncated, and has other records there; at one offset the same event. The other topic's offset has
    # another record, as in a recreated topic: its old record keeps its row.
    log.records[1:4] = [_record(0, 1, "new", b"new", ts=20), _record(0, 3, "rewritten", b"after", ts=3)]
    log.records[-1] = _record(1, 3, "named", b"named", ts=22, ours=False)
    vanished = {("t", 0): (1, 4)}
    read = vanished | {("t", 1): (3, 4)}
    topic_ids = {"t": "one"}
    merged_rows = lake.read("deliveries")
    rows = deliveries.with_vanished(log.rows(read, 3), merged_rows, vanished, topic_ids, 3).localCheckpoint()
    lake.merge(rows, hours.of(rows), 3)
    copies = cross_hour.copies_of_other_ids(lake.read("deliveries"), 2)
    assert copies is not None
    copies = copies.localCheckpoint()
    lake.change_ids(copies, hours.of(copies), 3)
    for _ in range(2):  # The second time as after an interruption.
        a_view.advance(lake.read("deliveries"), 2, view.TopicLogs(read, log.spans, vanished, topic_ids), 3)
        followed = shown()
        assert followed == {
            known["kept"]: (0, 0, b"kept"),
            known["twice"]: (1, 0, b"second"),
            known["rewritten"]: (0, 3, b"after"),
            known["new"]: (0, 1, b"new"),
            of_caller: (1, 1, b"named"),
            known["recreated"]: (1, 3, b"old"),
            known["earlier"]: (0, 2, b"earlier"),
        }
    shutil.rmtree(tmp_path / view.FOLDER)
    a_view.advance(lake.read("deliveries"), 0, view.TopicLogs(log.spans, log.spans), 3)
    del followed[known["recreated"]], followed[known["earlier"]]
    assert shown() == followed


# Of a row: has_fencepost_header, id, fingerprint and key. Of the record at its offset: the key in its header, whether
# it has Fencepost's header, its value, and whether it is the row's record.
RECORDS: dict[str, tuple[tuple[bool, str, bytes, str | None], tuple[str | None, bool, bytes, bool]]] = {
    "ours": ((True, "k", b"1", "k"), ("k", True, b"1", True)),
    "ours, forwarded": ((True, "k", b"1", "k"), ("k", True, b"2", True)),
    "another's": ((True, "k", b"1", "k"), ("other", True, b"1", False)),
    "bare now": ((True, "k", b"1", "k"), ("k", False, b"1", False)),
    "bare": ((False, "k", b"1", "k"), ("k", False, b"1", True)),
    "bare, named as another": ((False, "other", b"1", "k"), ("k", False, b"1", True)),
    "ours now": ((False, "k", b"1", "k"), ("k", True, b"1", False)),
    "bare, another": ((False, "k", b"1", "k"), ("other", False, b"1", False)),
    "bare, changed": ((False, "k", b"1", "k"), ("k", False, b"2", False)),
    "by an expression": ((False, "k", b"1", "k"), (None, False, b"1", True)),
    "by an expression, another": ((False, "k", b"1", "k"), (None, False, b"2", False)),
}


def test_a_record_is_matched_to_a_row_by_its_own_headers_and_content(spark: SparkSession) -> None:
    rows = []
    for name, ((stamped, id, value, key), (its_key, ours, its_value, _)) in RECORDS.items():
        headers = []
        if its_key is not None:
            headers.append((KEY_HEADER, its_key.encode()))
        if ours:
            stamp = Stamp(ids.event_id(str(its_key)), bytes(8), 1, 0, 1, 0, "a:1")
            headers.append((STAMP_HEADER, stamp.encode()))
        fp = ids.fingerprint("t", None, None, (), value)
        row = (name, ids.event_id(id), stamped, fp, key, "t", 0, 0, 1, None, its_value, headers)
        rows.append(row)
    written = spark.createDataFrame(
        rows,
        f"name string, id binary, has_fencepost_header boolean, fingerprint binary, known_key string, {source.SCHEMA}",
    )
    read = decode.with_own_identity(written.withColumnRenamed("has_fencepost_header", "was_ours"))
    its = decode.is_record_of(F.col("id"), F.col("was_ours"), F.col("fingerprint"), F.col("known_key"))
    assert {row["name"]: row["its"] for row in read.withColumn("its", its).collect()} == {
        name: case[1][3] for name, case in RECORDS.items()
    }
