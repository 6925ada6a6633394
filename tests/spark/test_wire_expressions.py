"""Ids, fingerprints and decoded headers in Spark are those of the wire contract's vectors, byte for byte."""

import json
import re
from collections import Counter
from collections.abc import Callable

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract.wire.headers import STAMP_HEADER
from spark.engine import frames
from spark.errors import CannotRun
from spark.reading import decode, source, wire_expressions
from tests.spark.rows import NOW_MS
from tests.unit.contract.test_wire import content, vectors


def test_the_ids_of_keys_are_those_of_the_vectors(spark: SparkSession) -> None:
    listed = vectors("ids", "event")
    for scope in {vector["scope"] for vector in listed}:
        keys = {vector["key"]: vector["id"] for vector in listed if vector["scope"] == scope}
        rows = spark.createDataFrame([(key,) for key in keys], "key string")
        made = rows.select(
            "key", wire_expressions.event_id(wire_expressions.as_binary(F.col("key")), scope).alias("id")
        ).collect()
        assert {row["key"]: bytes(row["id"]).hex() for row in made} == keys


def test_bytes_are_written_in_lower_case_digits_without_the_case_tables_of_icu(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(bytes(range(256)),), (b"",), (None,)], "content binary")
    written = rows.select(wire_expressions.hex_digits(F.col("content")).alias("digits"))
    assert [row["digits"] for row in written.collect()] == [bytes(range(256)).hex(), "", None]
    assert "lower(" not in written._jdf.queryExecution().analyzed().toString()


def test_fingerprints_are_those_of_the_vectors(spark: SparkSession) -> None:
    listed = vectors("fingerprints", "event")
    records = [
        {
            "what": vector["what"],
            "topic": vector["topic"],
            "partition": vector["partition"],
            "key": content(vector["key"]),
            "headers": [{"key": name, "value": bytes.fromhex(value)} for name, value in vector["headers"]] or None,
            "value": content(vector["value"]),
        }
        for vector in listed
    ]
    schema = f"what string, {source.SCHEMA}"
    rows = spark.createDataFrame(records, schema)
    fields = (F.col("key"), F.col("headers"), F.col("value"))
    with_partition = wire_expressions.fingerprint(F.col("topic"), F.col("partition"), *fields)
    without_partition = wire_expressions.fingerprint(F.col("topic"), None, *fields)
    made = rows.select(
        "what", "partition", with_partition.alias("with_partition"), without_partition.alias("without_partition")
    ).collect()
    found = {row["what"]: (bytes(row["with_partition"]).hex(), bytes(row["without_partition"]).hex()) for row in made}
    for vector in listed:
        computed, computed_without = found[vector["what"]]
        assert computed == vector["fingerprint"]
        assert (computed_without == vector["fingerprint"]) == (vector["partition"] is None)


def test_record_headers_are_decoded_and_invalid_ones_count_as_missing(spark: SparkSession) -> None:
    good, bad = vectors("records", "stamp"), vectors("records", "stamp_refused")
    texts = [vector["text"] for vector in good] + bad
    records = [
        {
            "topic": "t",
            "partition": 0,
            "offset": nth,
            "timestamp_ms": NOW_MS,
            "headers": [{"key": STAMP_HEADER, "value": text.encode()}],
        }
        for nth, text in enumerate(texts)
    ]
    rows = decode.copies(spark.createDataFrame(records, source.SCHEMA), NOW_MS).orderBy("offset").collect()
    for row, vector in zip(rows, good, strict=False):
        fields = vector["fields"]
        assert (row["kind"], bytes(row["id"]).hex(), bytes(row["fingerprint"]).hex()) == (
            decode.EVENT,
            fields["id"],
            fields["fingerprint"],
        )
        assert row["accepted_ms"] == (fields["accepted_at"] or NOW_MS)
        writer = (row["slot"], row["pid"], row["epoch"], row["instance"])
        assert writer == tuple(fields[name] for name in ("slot", "producer_id", "epoch", "instance"))
    assert [row["kind"] for row in rows[len(good) :]] == [decode.REJECT] * len(bad)


def test_ledger_records_are_decoded_and_invalid_ones_are_rejected(spark: SparkSession) -> None:
    parts = ("ledger", "ledger_of_version_2", "begin")
    texts = [vector["text"] for part in parts for vector in vectors("records", part)]
    bad = list(vectors("records", "ledger_refused"))
    records = [
        {"topic": "l", "partition": 3, "offset": nth, "timestamp_ms": NOW_MS, "value": text.encode()}
        for nth, text in enumerate([*texts, *bad])
    ]
    rows = decode.ledger(spark.createDataFrame(records, source.SCHEMA), NOW_MS).collect()
    found = Counter(
        (
            *(bytes(row["id"]).hex(), row["topic"], row["partition"], row["offset"]),
            *(row["accepted_ms"], row["status"], row["topic_id_hash"], row["key_ttl_s"]),
        )
        for row in rows
        if row["reject"] is None
    )
    known = sorted(
        {id for part in parts[:2] for one in vectors("records", part) for id in one["fields"]["topic_ids"].values()}
    )
    numbers = {
        row["id"]: row["number"]
        for row in spark.createDataFrame([(id,) for id in known], "id string")
        .withColumn("number", decode.hash_of(F.col("id")))
        .collect()
    }
    assert found == Counter(
        (
            *(one["id"], one["topic"], one["partition"], one["offset"]),
            *(one["at"], decode.ENTERED, numbers.get(vector["fields"]["topic_ids"].get(one["topic"]))),
            one.get("ttl", 0),
        )
        for part in parts[:2]
        for vector in vectors("records", part)
        for one in vector["fields"]["entries"]
    )
    assert sum(row["reject"] is not None for row in rows) == len(bad)


@pytest.mark.parametrize(
    ("kind", "decoded", "what"),
    [
        ("stamp", decode.copies, "a record with a fencepost header"),
        ("ledger", decode.ledger, "a ledger record"),
        ("answers", decode.answers, "a record of the journal"),
    ],
)
def test_a_record_of_a_later_version_stops_the_run_and_is_named(
    spark: SparkSession, kind: str, decoded: Callable[[DataFrame, int], DataFrame], what: str
) -> None:
    """Whatever its other fields are. Else every event of a newer service would be a phantom."""
    texts = vectors("records", f"{kind}_newer")
    assert texts
    for text in texts:
        headers = [{"key": STAMP_HEADER, "value": text.encode()}] if kind == "stamp" else []
        record = {"topic": "t.x", "partition": 4, "offset": 7, "timestamp_ms": NOW_MS, "value": text.encode()}
        (version,) = re.findall(r"^[^0-9]*([0-9]+)", text)
        named = f"t.x[4]@7 is {what} of version {version}, which a newer release has written: "
        records = spark.createDataFrame([{**record, "headers": headers}], source.SCHEMA)
        with pytest.raises(CannotRun, match=f"^{re.escape(named)}"), decode.newer_versions_refused():
            decoded(records, NOW_MS).collect()
        # A view and `show` read rows that a run has merged, and the records between these.
        assert decode.with_own_identity(records).collect()[0]["own_id"] is None


def test_the_answers_of_the_vectors_are_decoded(spark: SparkSession) -> None:
    (listed,) = vectors("records", "answers")
    record = {"topic": "r", "partition": 0, "offset": 0, "timestamp_ms": NOW_MS, "value": listed["text"].encode()}
    without_topic = listed["text"].replace('"topic":"orders"', '"topic":null').encode()
    records = [record, {**record, "offset": 1, "value": without_topic}]
    rows = decode.answers(spark.createDataFrame(records, source.SCHEMA), NOW_MS).collect()
    refused = [row for row in rows if row["reject"] is not None]
    assert {row["offset"] for row in refused} == {1}
    assert len(refused) == sum(answer["topic"] == "orders" for answer in listed["answers"])
    rows = [row for row in rows if row["reject"] is None]
    found = {(bytes(row["id"]).hex(), row["status"], row["replayed"], row["offset"]) for row in rows}
    assert found == {
        (
            answer["id"],
            answer["status"],
            answer["replayed"],
            answer["offset"],
        )
        for answer in listed["answers"]
    }


def test_negative_coordinates_count_as_missing(spark: SparkSession) -> None:
    """A producer without an answer has the offset -1, which in a finding would break the schema of report.json."""
    named = {"id": "01" * 16, "fp": "02" * 8, "at": NOW_MS, "topic": "t", "ts": NOW_MS, "status": 201}
    coordinate_cases = [{"partition": 0, "offset": -1}, {"partition": -1, "offset": 0}, {"partition": 0, "offset": 0}]
    parts = [{**named, **coordinates} for coordinates in coordinate_cases]
    bodies = {
        "l": {"v": 1, "slot": 0, "pid": 1, "epoch": 0, "instance": "h", "entries": parts},
        "r": {"v": 1, "instance": "h", "answers": parts},
    }
    ledger, journal = (
        spark.createDataFrame(
            [{"topic": name, "partition": 0, "offset": 5, "timestamp_ms": NOW_MS, "value": json.dumps(body).encode()}],
            source.SCHEMA,
        )
        for name, body in bodies.items()
    )
    entered = [row["reject"] is None for row in decode.ledger(ledger, NOW_MS).collect()]
    assert entered == [False, False, True]
    answered = [(row["reject"], row["partition"], row["offset"]) for row in decode.answers(journal, NOW_MS).collect()]
    assert answered == [(None, None, None), (None, None, None), (None, 0, 0)]


def test_a_row_from_the_driver_may_be_longer_than_jackson_s_limit(spark: SparkSession) -> None:
    summary = "x" * 20_000_001
    (row,) = frames.rows_of(spark, "run bigint, summary string", [{"run": 1, "summary": summary}]).collect()
    assert row["summary"] == summary
