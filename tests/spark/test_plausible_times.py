"""Implausible times: of clocks with another unit, and in forged headers."""

import json
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from service.contract import SharedSettings
from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER, Stamp
from service.contract.wire.ids import event_id
from service.contract.wire.journal import encode_answer, encode_answers
from service.contract.wire.ledger import LedgerRecord
from service.contract.wire.ledger_entries import Entry
from spark import job
from spark.reading import decode, source
from spark.settings import Options, Settings
from spark.tables import view
from tests.spark.conftest import Audit
from tests.spark.history import WRITER, History
from tests.spark.rows import NOW_MS
from tests.spark.runs import run
from tests.spark.times import DAY_MS, FAR_FUTURE_MS, HOUR_MS

# timestamp, acceptance in the header (None: only a key) → acceptance, time to order by, time of the run that read it
TIMES: dict[str, tuple[int, int | None, tuple[int, int, int | None]]] = {
    "usual": (NOW_MS - 9, NOW_MS - 10, (NOW_MS - 10, NOW_MS - 9, None)),
    "client's own": (NOW_MS - 1000 * HOUR_MS, NOW_MS, (NOW_MS, NOW_MS - 1000 * HOUR_MS, None)),
    "ahead": (NOW_MS, NOW_MS + DAY_MS, (NOW_MS + DAY_MS, NOW_MS, None)),
    "forged": (NOW_MS - 9, NOW_MS + DAY_MS + 1, (NOW_MS - 9, NOW_MS - 9, None)),
    "2096": (NOW_MS - 9, FAR_FUTURE_MS, (NOW_MS - 9, NOW_MS - 9, None)),
    "1970": (NOW_MS - 9, 5, (NOW_MS - 9, NOW_MS - 9, None)),
    "wild": (FAR_FUTURE_MS, NOW_MS - 10, (NOW_MS - 10, FAR_FUTURE_MS, NOW_MS)),
    "both": (FAR_FUTURE_MS, FAR_FUTURE_MS, (NOW_MS, FAR_FUTURE_MS, NOW_MS)),
    "bare": (NOW_MS + DAY_MS, None, (NOW_MS + DAY_MS, NOW_MS + DAY_MS, None)),
    "bare wild": (NOW_MS + DAY_MS + 1, None, (NOW_MS, NOW_MS + DAY_MS + 1, NOW_MS)),
    "microseconds": (NOW_MS * 1000, None, (NOW_MS, decode.PLAUSIBLE_MS[1], NOW_MS)),
    "seconds": (NOW_MS // 1000, None, (NOW_MS, decode.PLAUSIBLE_MS[0], NOW_MS)),
    "none": (-1, None, (NOW_MS, decode.PLAUSIBLE_MS[0], NOW_MS)),
}


def _record(nth: int, name: str) -> dict[str, Any]:
    timestamp_ms, at, _ = TIMES[name]
    headers = [{"key": KEY_HEADER, "value": name.encode()}]
    if at is not None:
        stamp = Stamp(event_id(name), bytes(8), at, 0, 1, 0, "a:1")
        headers.append({"key": STAMP_HEADER, "value": stamp.encode()})
    return {"topic": "t", "partition": 0, "offset": nth, "timestamp_ms": timestamp_ms, "headers": headers}


def test_an_implausible_time_is_replaced(spark: SparkSession) -> None:
    records = spark.createDataFrame([_record(nth, name) for nth, name in enumerate(TIMES)], source.SCHEMA)
    rows = decode.copies(records, NOW_MS).orderBy("offset").collect()
    found = {
        name: (row["accepted_ms"], row["timestamp_ms"], row["observed_ms"])
        for name, row in zip(TIMES, rows, strict=True)
    }
    assert found == {name: expected for name, (_, _, expected) in TIMES.items()}


@pytest.mark.parametrize("later_ms", [0, 1000 * HOUR_MS], ids=["at once", "much later"])
def test_a_record_and_its_claims_have_the_same_acceptance_whatever_it_is(spark: SparkSession, later_ms: int) -> None:
    """The clock that sets it may be days ahead, and the run may read them much later."""
    frozen_ms, ts = NOW_MS + later_ms, NOW_MS - 9
    times = (NOW_MS - 10, frozen_ms + DAY_MS, frozen_ms + DAY_MS + 1, ts + DAY_MS + 5, FAR_FUTURE_MS, 5)
    entries, answers, headers = [], [], []
    for nth, at in enumerate(times):
        id, fp = b"%d" % nth * 16, bytes(8)
        headers.append({"key": STAMP_HEADER, "value": Stamp(id, fp, at, 0, 1, 0, "a:1").encode()})
        entries.append(Entry(id, fp, at, "t", 0, nth, ts))
        answers.append(encode_answer(id, fp, at, 201, None, False, 1.0, "t", 0, nth))

    def records(*values: bytes, timestamp_ms: int) -> DataFrame:
        rows = [
            {"topic": "t", "partition": 0, "offset": nth, "timestamp_ms": timestamp_ms, "value": value}
            for nth, value in enumerate(values)
        ]
        with_headers = [{**row, "headers": [header]} for row, header in zip(rows, headers, strict=False)]
        return spark.createDataFrame(with_headers, source.SCHEMA)

    def acceptances(decoded: DataFrame) -> list[int]:
        return [row["accepted_ms"] for row in decoded.orderBy("id").collect()]

    copies = acceptances(decode.copies(records(*(b"" for _ in times), timestamp_ms=ts), frozen_ms))
    # An entry has the timestamp of its record, an answer does not.
    ledger = records(LedgerRecord(0, 1, 0, "a:1", entries).encode(), timestamp_ms=NOW_MS + HOUR_MS)
    assert acceptances(decode.ledger(ledger, frozen_ms)) == copies
    journal = records(encode_answers("a:1", answers), timestamp_ms=ts)
    assert acceptances(decode.answers(journal, frozen_ms)) == copies
    assert copies[:3] == [times[0], times[1], ts]


def test_an_entry_and_its_record_have_the_same_acceptance_also_if_no_time_is_plausible(spark: SparkSession) -> None:
    id, fp, frozen_ms = bytes(16), bytes(8), NOW_MS + HOUR_MS
    stamp = Stamp(id, fp, FAR_FUTURE_MS, 0, 1, 0, "a:1")
    entry = Entry(id, fp, FAR_FUTURE_MS, "t", 0, 0, FAR_FUTURE_MS)
    common = {"topic": "t", "partition": 0, "offset": 0}
    header = {"key": STAMP_HEADER, "value": stamp.encode()}
    record = {**common, "timestamp_ms": FAR_FUTURE_MS, "headers": [header]}
    ledger = {**common, "timestamp_ms": NOW_MS, "value": LedgerRecord(0, 1, 0, "a:1", [entry]).encode()}
    (copied,) = decode.copies(spark.createDataFrame([record], source.SCHEMA), frozen_ms).collect()
    (entered,) = decode.ledger(spark.createDataFrame([ledger], source.SCHEMA), frozen_ms).collect()
    assert copied["accepted_ms"] == entered["accepted_ms"] == frozen_ms


@pytest.mark.long
def test_a_view_of_implausible_times_is_the_same_in_one_run_and_in_many(
    spark: SparkSession, history: History, audit: Audit
) -> None:
    topic = history.topic(f"{history.namespace}-t", 1, {"message.timestamp.after.max.ms": str(2**62)})
    times = [
        history.now_ms * 1000,
        FAR_FUTURE_MS,
        history.now_ms,
        history.now_ms // 1000,
        FAR_FUTURE_MS + 1,
        history.now_ms + 5,
    ]
    shared = SharedSettings(kafka=history.bootstrap, namespace=history.namespace)
    later_s = 3600.0
    for nth, ts in enumerate(times):
        # The same id again, another id, and a copy that is after every later one.
        back = times[-1 - nth]
        history.send(history.plain, topic, ["again", f"single-{nth}"], None, ts=ts, value=b"%d" % nth)
        history.send(history.plain, topic, ["back"], WRITER, ts=back, value=b"%d" % nth)
        ran = audit(history, later_s=later_s, topics=(topic,), lake="many")
        if nth == 0:
            view.register(spark, shared, str(ran.lake), topic)
        later_s += 7200
    once = audit(history, later_s=later_s, topics=(topic,), lake="once")
    view.register(spark, shared, str(once.lake), topic)
    expected = []
    for lake in (ran.lake, once.lake):
        rows = spark.read.format("delta").load(str(lake / view.FOLDER / topic))
        columns = ["id", "offset", "value", "unix_millis(timestamp) AS ts", "unix_millis(accepted_at) AS at"]
        expected.append(sorted(map(str, rows.selectExpr(*columns).collect())))
    assert len(expected[0]) == len(times) + 2
    assert expected[0] == expected[1]


@pytest.mark.long
def test_a_changed_identity_is_reported_once(
    spark: SparkSession, history: History, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change applies to records that are read from now on; earlier records keep their ids."""
    topic = history.topic(f"{history.namespace}-t")
    history.raw(history.plain, topic, b'{"id":"a"}')
    now_ms = history.now_ms + HOUR_MS
    identity = {topic: "get_json_object(cast(value as string), '$.id')"}
    first = run(spark, history, tmp_path, now_ms, topics=(topic,))
    assert first.findings() == {("unkeyed", None, f"{topic}[0]")}
    for value in (b'{"id":"a"}', b'{"id":"a"}'):
        history.raw(history.plain, topic, value)
    for given, count in ((identity, 1), (identity, 0)):
        lines: list[str] = []
        options = Options(
            lake=str(first.lake), report=str(tmp_path / "r"), topics=(topic,), identity=given, publish=False
        )
        shared = SharedSettings(kafka=history.bootstrap, namespace=history.namespace)
        report = job.run(spark, Settings(shared=shared, options=options), lines.append, now_ms)
        expected = [line for line in lines if line.startswith(f"--identity of {topic} is another one")]
        assert (len(expected), all("keeps its ids" in line for line in expected)) == (count, True)
    kinds = sorted((one["kind"], one["count"]) for one in report.document["findings"])
    assert kinds == [("duplicate", 2), ("unkeyed", 1)], json.dumps(report.document["findings"])
