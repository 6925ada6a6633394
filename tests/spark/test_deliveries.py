"""The rows of `deliveries`: reduced from evidence, merged, and gathered by id."""

import json
import random
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark.reading import decode, source
from spark.tables import deliveries
from tests.spark.rows import NOW_MS, answer, copy, entry, ids, name_of, reduced, states
from tests.spark.times import HOUR_MS


def _history(seed: int) -> list[Any]:
    """Evidence of many ids in one hour, some with far more copies than every cap."""
    chance = random.Random(seed)
    rows: list[Any] = []
    for nth in range(40):
        many = chance.choice([1, 1, 1, 2, 5, 300 if nth < 3 else 3])
        for offset in range(many):
            kind = chance.choice(["copy", "bare", "entry", "201", "504", "503"])
            at = NOW_MS + chance.randrange(1000)
            id = f"id-{nth}".encode().ljust(16)
            if kind == "copy":
                one = copy(
                    offset, at=at, fingerprint=bytes([chance.randrange(3)]) * 8, has_record_key=chance.random() < 0.5
                )
            elif kind == "bare":
                one = copy(offset, at=at, writer=None, alternative_fingerprints=bytes([chance.randrange(3)]) * 8)
            elif kind == "entry":
                one = entry(offset, at=at)
            elif kind == "201":
                one = answer(201, offset, at=at, replayed=chance.random() < 0.5)
            else:
                one = answer(int(kind), at=at, timestamp_ms=NOW_MS + 5000 + len(rows))
            rows.append({**one, "id": id})
    return rows


def _merged(old: DataFrame, new: DataFrame) -> DataFrame:
    """Merge two sets of rows as the MERGE does."""
    one = deliveries.merged()
    there, fresh = old.alias("old"), new.alias("new")
    same = F.lit(True)
    for name in deliveries.ROW_KEY:
        same = same & F.col(f"old.{name}").eqNullSafe(F.col(f"new.{name}"))
    both = there.join(fresh, same).select(
        *(
            (one[name] if name in one else F.col(f"old.{name}")).cast(kind).alias(name)
            for name, kind in deliveries.ROW.items()
        )
    )
    return both.unionByName(there.join(fresh, same, "left_anti")).unionByName(fresh.join(there, same, "left_anti"))


def _as_text(rows: DataFrame) -> set[str]:
    """Format rows as text, without the run."""
    return {
        json.dumps(row.asDict(recursive=True) | {"run": None}, default=str, sort_keys=True) for row in rows.collect()
    }


def test_evidence_that_is_read_in_two_runs_makes_the_same_rows_as_in_one(spark: SparkSession) -> None:
    rows = _history(7)
    random.Random(8).shuffle(rows)
    half = len(rows) // 2
    first, second = (reduced(spark, part, run) for run, part in enumerate((rows[:half], rows[half:])))
    whole, parts = reduced(spark, rows, 1), _merged(first, second)
    assert _as_text(parts) == _as_text(whole)
    assert _as_text(deliveries.gathered(parts).drop("run")) == _as_text(deliveries.gathered(whole).drop("run"))


def test_a_single_row_of_an_id_is_gathered_as_several_are(spark: SparkSession) -> None:
    named = {
        "both": [copy(1), entry(1), answer(201, 1)],
        "copy": [copy(1)],
        "bare": [copy(1, writer=None, alternative_fingerprints=b"x" * 8)],
        "entry": [entry(1)],
        "answered": [answer(201, 1), answer(201, 1, replayed=True)],
        "in-doubt": [answer(504), answer(503)],
    }
    rows = reduced(spark, ids(named))
    assert _as_text(deliveries.gathered_single(rows)) == _as_text(deliveries.gathered(rows))


def test_rows_of_an_id_in_several_hours_are_gathered_from_all_its_evidence(spark: SparkSession) -> None:
    early, late = (
        [copy(1), entry(1), answer(201, 1)],
        [copy(2, at=NOW_MS + 2 * HOUR_MS), answer(504, at=NOW_MS + HOUR_MS)],
    )
    (row,) = deliveries.gathered(reduced(spark, ids({"x": early + late})), by_hour=False).collect()
    assert (row["count"], row["entries_count"], row["answered_201"], row["answered_504"]) == (2, 1, 1, 1)
    assert [one["offset"] for one in row["coordinates"]] == [1, 2]
    assert (row["accepted_ms"], row["rows"], row["is_clean"]) == (NOW_MS, 3, 0)
    assert row["accepted_hour"].hour == (NOW_MS // HOUR_MS + 2) % 24


def test_a_row_counts_the_copies_beyond_the_cap_of_its_coordinates(spark: SparkSession) -> None:
    rows = [copy(n, at=NOW_MS + n, fingerprint=b"a" * 8) for n in range(1000)] + [
        copy(1000, at=NOW_MS + 1000, fingerprint=b"b" * 8)
    ]
    (row,) = states(spark, {"x": rows}).collect()
    assert row["count"] == 1001
    assert [one["offset"] for one in row["coordinates"]] == list(range(deliveries.COORDINATES_MAX))
    assert {bytes(one["fingerprint"]) for one in row["fingerprints"]} == {b"a" * 8, b"b" * 8}


def test_copies_in_the_ledger_or_with_the_header_are_kept_within_the_cap(spark: SparkSession) -> None:
    """The first copy is one in the ledger, and a phantom shows in a copy with Fencepost's header."""
    cap = deliveries.COORDINATES_MAX
    foreign = [copy(n, at=NOW_MS + n, writer=None) for n in range(cap + 2)]
    ours = [copy(1000 + n, at=NOW_MS + 1000 + n) for n in range(2)]
    entered = [copy(2000, at=NOW_MS + 2000), entry(2000, at=NOW_MS + 2000)]
    (row,) = states(spark, {"x": [*foreign, *ours, *entered, entry(3000)]}).collect()
    assert [one["offset"] for one in row["coordinates"]] == [*range(cap - 3), 1000, 1001, 2000]
    assert ([one["offset"] for one in row["entries"]], row["count"]) == ([2000], cap + 5)


def test_a_record_that_is_written_back_to_its_offset_counts_once(spark: SparkSession) -> None:
    """The topic was recreated from a copy of it within an hour, so that the rows of two runs are merged."""
    unkeyed = copy(3, kind=decode.UNKEYED, writer=None)
    evidence = {"restored": [copy(1), entry(1), answer(201, 1)], "foreign": [copy(2, writer=None)]}
    again = {"restored": [copy(1)], "foreign": [copy(2, writer=None)]}
    first, second = (
        reduced(spark, [*ids(named), unkeyed], run) for run, named in enumerate((evidence, again), start=1)
    )
    assert {
        (row["kind"], row["offset"], row["count"], row["is_clean"]) for row in _merged(first, second).collect()
    } == {
        (decode.EVENT, 1, 1, 1),
        (decode.EVENT, 2, 1, 1),
        (decode.UNKEYED, 3, 1, 0),
    }


def test_records_without_id_have_a_row_each(spark: SparkSession) -> None:
    block = decode.BLOCK_OFFSETS
    records = [
        {"topic": "t", "partition": 1, "offset": offset, "timestamp_ms": NOW_MS, "value": b"x"}
        for offset in (3, block - 1, block)
    ]
    copies = decode.copies(spark.createDataFrame(records, source.SCHEMA), NOW_MS)
    rows = deliveries.reduce(copies, deliveries.summarize(spark.createDataFrame([], decode.CLAIMS)), 1).collect()
    found = {(bytes(row["id"]).decode(), row["offset"], row["count"], row["is_clean"]) for row in rows}
    assert found == {("t/1/0", 3, 1, 0), ("t/1/0", block - 1, 1, 0), ("t/1/1", block, 1, 0)}
    assert {row["kind"] for row in rows} == {decode.UNKEYED}


def test_undecodable_parts_of_a_record_have_a_row_each(spark: SparkSession) -> None:
    """A MERGE accepts one row for each key; a recreated journal may have the same offsets."""
    twelve, thirteen = ({"id": id, "fp": "", "at": 1, "status": 201} for id in ("12", "13"))
    bodies = [
        {"v": 1, "instance": "a:1", "answers": [twelve, thirteen, thirteen, None]},
        {"v": 1, "slot": 0, "pid": 1, "epoch": 0, "instance": "a:1", "entries": [twelve, None, thirteen]},
    ]
    journal, ledger = (
        spark.createDataFrame(
            [{"topic": name, "partition": 0, "offset": 0, "timestamp_ms": NOW_MS, "value": json.dumps(body).encode()}],
            source.SCHEMA,
        )
        for name, body in zip(("journal", "ledger"), bodies, strict=True)
    )
    claims = deliveries.summarize(decode.answers(journal, NOW_MS).unionByName(decode.ledger(ledger, NOW_MS)))
    rows = deliveries.reduce(spark.createDataFrame([], decode.COPIES), claims, 1)
    assert sorted((row["topic"], row["count"]) for row in rows.collect()) == (
        [("journal", 1), ("journal", 1), ("journal", 2), ("ledger", 1), ("ledger", 1), ("ledger", 1)]
    )
    assert rows.count() == rows.select(*deliveries.ROW_KEY).distinct().count()


def test_the_last_evidence_of_a_record_with_an_old_timestamp_is_its_arrival(spark: SparkSession) -> None:
    old = NOW_MS - 1000 * HOUR_MS
    named = {
        "retried": [copy(1, timestamp_ms=old)],
        "replayed": [copy(2, at=old, writer=None, partition=2)],
        "unknown": [copy(3, at=old, writer=None, partition=1)],
        "beyond": [copy(4, at=old, writer=None, partition=3)],
        "other-topic": [copy(5, at=old, writer=None, topic="u")],
        "claimed": [entry(6, at=old, partition=2)],
        "new": [copy(7, partition=2)],
    }
    rows = reduced(spark, ids(named), arrived={("t", 0): NOW_MS - 9, ("t", 2): NOW_MS - 7}).collect()
    assert {name_of(row["id"]): row["last_ms"] for row in rows} == {
        "retried": NOW_MS,
        "replayed": NOW_MS - 7,
        **dict.fromkeys(("unknown", "beyond", "other-topic", "claimed"), old + 5),
        "new": NOW_MS + 5,
    }


def test_a_topic_counts_as_written_if_the_ledger_or_an_answer_without_a_refusal_names_it(
    spark: SparkSession,
) -> None:
    evidence = [answer(status, topic=f"t-{status}") for status in (decode.ENTERED, 201, 202, 409, 422, 503, 504)]
    written = {"t-0", "t-201", "t-202", "t-504"}
    claims = spark.createDataFrame(evidence, decode.CLAIMS)
    assert {row["topic"] for row in deliveries.summarize(claims).where(deliveries.WRITTEN).collect()} == written
    rows = reduced(spark, [*ids({"answered": evidence}), copy(1, topic="foreign", writer=None)])
    assert {row["topic"] for row in rows.where(deliveries.WRITTEN).collect()} == written


def test_an_implausible_timestamp_counts_as_the_time_of_the_run(spark: SparkSession) -> None:
    records = [
        {
            "topic": "t",
            "partition": 0,
            "offset": nth,
            "timestamp_ms": ms,
            "headers": [{"key": "idempotency-key", "value": b"k%d" % nth}],
        }
        for nth, ms in enumerate((-1, 0, 10**17, NOW_MS - HOUR_MS))
    ]
    rows = decode.copies(spark.createDataFrame(records, source.SCHEMA), NOW_MS).orderBy("offset").collect()
    assert [row["accepted_ms"] for row in rows] == [NOW_MS, NOW_MS, NOW_MS, NOW_MS - HOUR_MS]


def test_the_helper_ids_gives_each_row_its_named_id() -> None:
    assert [name_of(one["id"]) for one in ids({"a": [copy(1)], "b": [copy(2), copy(3)]})] == ["a", "b", "b"]
