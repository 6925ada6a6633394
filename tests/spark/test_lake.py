"""The tables of the lake: idempotent writes, upgrades, and reads that do not grow with the history."""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from deploy.stack import Kafka
from service.contract import SharedSettings
from spark.engine import frames, session
from spark.engine.jvm import table_property
from spark.errors import CannotRun
from spark.reading.run_plan import Log, Plan
from spark.report import publish
from spark.rules import cross_hour, findings, hourly
from spark.rules.balance import Balance
from spark.rules.classify import gather_evidence
from spark.settings import OFFSETS_MOST
from spark.steps import finished_runs, migrations
from spark.tables import commits, hours, lake_version, lock, schemas, view
from spark.tables import deliveries as deliveries_table
from spark.tables.lake import LOG_RETENTION, Lake
from tests.spark import delta_files
from tests.spark.conftest import Audit
from tests.spark.history import History, Writer
from tests.spark.rows import NOW_MS, answer, copy, entry, name_of, reduced
from tests.spark.rows import ids as named
from tests.spark.scans import reads
from tests.spark.test_classify import plan, settings
from tests.spark.times import HOUR_MS


def _rows(spark: SparkSession, run: int, span: range, *, prefix: str = "id") -> DataFrame:
    """Reduce ten ids in each of these hours, counted back from now."""
    evidence = {
        f"{prefix}-{hour}-{n}": [copy(n, at=NOW_MS - hour * HOUR_MS), entry(n, at=NOW_MS - hour * HOUR_MS)]
        for hour in span
        for n in range(10)
    }
    return reduced(spark, named(evidence), run)


def _filled(spark: SparkSession, root: Path, length: int) -> Lake:
    lake = Lake(spark, str(root))
    lake.append_once(
        "deliveries", _rows(spark, 1, range(length)).hint("rebalance", *schemas.PARTITIONS["deliveries"]), 1
    )
    return lake


def _merge(lake: Lake, run: int) -> dict[str, Any]:
    """Merge copies of the ids of two hours, as a run does, and return Delta's metrics."""
    new = _rows(lake.spark, run, range(2)).unionByName(_rows(lake.spark, run, range(2), prefix="new"))
    new = new.localCheckpoint()
    lake.merge(new, hours.of(new), run)
    return {"version": _version(lake), **delta_files.metrics(Path(lake.path("deliveries")))}


def _version(lake: Lake, name: str = "deliveries") -> int:
    return delta_files.version(Path(lake.path(name)))


@pytest.fixture(scope="module")
def small(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return _filled(spark, tmp_path_factory.mktemp("small"), 4)


@pytest.fixture(scope="module")
def large(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return _filled(spark, tmp_path_factory.mktemp("large"), 40)


def test_a_merge_touches_the_same_files_and_rows_however_long_the_history(small: Lake, large: Lake) -> None:
    costs = []
    for lake in (small, large):
        metrics = _merge(lake, 2)
        rows = lake.read("deliveries").where(F.col("run") == 2)
        read_rows = lake.read("deliveries").where(hours.within(hours.of(rows)))
        touched = {name: metrics[name] for name in ("numTargetFilesRemoved", "numTargetRowsUpdated")}
        costs.append((touched, metrics["numTargetRowsCopied"], read_rows.count(), len(_scanned(read_rows))))
    assert costs[0] == costs[1]
    assert costs[0][0]["numTargetRowsUpdated"] == "20"
    assert len(_scanned(large.read("deliveries"))) > 10 * costs[0][3]


def _scanned(rows: DataFrame) -> set[str]:
    """Return the files that the rows are read from."""
    return {row["file"] for row in rows.select(F.input_file_name().alias("file")).distinct().collect()}


def test_a_write_is_idempotent_for_its_run(small: Lake) -> None:
    before = small.read("deliveries").agg(F.sum("entries_count")).collect()[0][0]
    assert _merge(small, 7)["version"] == _version(small)
    merged = small.read("deliveries").agg(F.sum("entries_count")).collect()[0][0]
    assert merged == before + 40
    version = _version(small)
    # Another process that has the same number.
    with pytest.raises(CannotRun, match=r"run 7 was taken over .* start the run again"):
        _merge(Lake(small.spark, small.root), 7)
    assert _version(small) == version
    assert small.read("deliveries").agg(F.sum("entries_count")).collect()[0][0] == merged
    finding = small.spark.createDataFrame([{"scope": "log", "kind": "k", "run": 1}], schemas.of("findings"))
    for lake in (small, Lake(small.spark, small.root)):
        if lake is not small:
            lake.take_over(1, ["findings"])
        lake.append_once("findings", finding, 1)
        assert delta_files.count(Path(small.path("findings"))) == 1
    for _ in range(2):
        small.replace("findings", finding, "scope = 'log'", 2)
    assert delta_files.count(Path(small.path("findings"))) == 1
    small.check_committed("findings", 2)
    late = Lake(small.spark, small.root)
    late.take_over(1, ["findings"])
    late.replace("findings", finding, "scope = 'log'", 1)
    with pytest.raises(CannotRun, match="another process has written this table since"):
        late.check_committed("findings", 1)


def test_a_small_table_is_read_once_after_each_commit(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(spark, str(tmp_path))
    assert lake.is_small("deliveries")
    assert lake.read_cached("deliveries").isEmpty()
    _filled(spark, tmp_path, 2)
    rows = lake.read_cached("deliveries")
    assert (rows.count(), _scanned(rows)) == (20, {""})
    assert lake.read_cached("deliveries") is rows
    _merge(lake, 2)
    assert rows.count() == 20
    assert lake.read_cached("deliveries").count() == 40
    monkeypatch.setattr("spark.tables.lake.SMALL_BYTES", 0)
    assert not lake.is_small("deliveries")
    _merge(lake, 3)
    assert "" not in _scanned(lake.read_cached("deliveries"))


def test_rows_in_memory_that_make_a_new_table_are_not_read_from_the_table(spark: SparkSession, tmp_path: Path) -> None:
    rows, more = (_rows(spark, run, range(run)).localCheckpoint() for run in (1, 2))
    lake = Lake(spark, str(tmp_path))
    lake.append("deliveries", rows.hint("rebalance", *schemas.PARTITIONS["deliveries"]), 1, in_memory=rows)
    assert lake.read_cached("deliveries") is rows
    stored = lake.read("deliveries")
    assert (stored.dtypes, stored.count()) == (rows.dtypes, rows.count())
    assert stored.exceptAll(rows).isEmpty()
    lake.append("deliveries", more, 2, in_memory=more)
    assert lake.read_cached("deliveries").count() == 30
    late = Lake(spark, str(tmp_path))
    late.append("deliveries", more, 1, in_memory=more)
    assert late.read_cached("deliveries").count() == 30


def test_rows_in_memory_whose_commit_was_skipped_are_read_from_the_table(spark: SparkSession, tmp_path: Path) -> None:
    rows, stale = (_rows(spark, run, range(run)).localCheckpoint() for run in (1, 2))
    first, late = (Lake(spark, str(tmp_path)) for _ in range(2))
    first.append("deliveries", rows, 2)
    late.append("deliveries", stale, 1, in_memory=stale)
    assert late.read_cached("deliveries").count() == rows.count()


def test_the_checksum_of_a_version_has_no_list_of_files(spark: SparkSession, tmp_path: Path) -> None:
    """Delta makes that list by a query in each commit."""
    _filled(spark, tmp_path, 1)
    (checksum,) = (tmp_path / "deliveries" / "_delta_log").glob("0*.crc")
    stored = json.loads(checksum.read_text())
    assert (stored["numFiles"], len(stored["setTransactions"])) == (1, 1)
    assert "allFiles" not in stored


@pytest.mark.long
def test_a_run_reads_the_same_files_and_bytes_however_long_the_history(
    spark: SparkSession, kafka: Kafka, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a table that is not small."""
    monkeypatch.setattr("spark.tables.lake.SMALL_BYTES", 0)
    costs = []
    # `reads` finds a scan by its folder, which Spark truncates to a short text by default.
    with session.settings(spark, {"spark.sql.maxMetadataStringLength": "1000"}):
        for length in (3, 30):
            history = History(kafka.bootstrap, f"long-{length}")
            writer = Writer(0, 100)
            topic = history.topic(f"{history.namespace}-t")
            producer = history.transactional(writer)
            for hour in range(length):
                at = history.now_ms - (hour + 5) * HOUR_MS
                history.deliver(producer, writer, topic, [f"old-{hour}-{n}" for n in range(4)], at=at)
            first = audit(history, later_s=3600)
            at = history.now_ms - 6 * HOUR_MS
            history.deliver(producer, writer, topic, ["new-1", "new-2", "old-1-1"], at=at)
            before = reads(spark, first.lake)
            second = audit(history, later_s=3600, skip_ids=True)
            assert second.document["balance"]["accepted"] == 4 * length + 2
            assert second.findings() == {("duplicate", "rewrite", "old-1-1")}
            after = reads(spark, first.lake)
            costs.append({name: after[name] - before[name] for name in after})
    assert costs[0]["number of files read"] == costs[1]["number of files read"] > 0
    assert costs[0]["size of files read"] == pytest.approx(costs[1]["size of files read"], rel=0.02)


def test_the_readme_has_every_column_of_every_table_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "spark" / "README.md").read_text(encoding="utf-8")
    section = text.partition("## The tables of the lake")[2].partition("\n## ")[0]
    views = {"view/<topic>": view.COLUMNS, view.TABLE: view.LISTED}
    for name, columns in {**schemas.TABLES, **views}.items():
        _, _, part = section.partition(f"\n`{name}`:")
        table = re.split(r"\n\n`(?!``)", part)[0]
        rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        listed = re.findall(r"`(\w+)`", "\n".join(rows))
        # A finding about a sink has the columns of any finding, and more.
        own = set(columns) - set(schemas.FINDING) if name == "sinks" else set(columns)
        assert sorted(listed) == sorted(own), name


def test_the_lake_has_a_column_for_each_count_of_an_hour() -> None:
    assert tuple(findings.SUMS) == schemas.HOURLY_COUNTS


# The columns of the last version without the present names.
FIRST_VERSION = {
    "deliveries": (
        "accepted_hour plain kind id topic partition offset run accepted_ms last_ms count entries_count answered_201 "
        "answered_202 answered_503 answered_504 answered_other replayed entered_ms answered_ms unsure_ms freed_ms "
        "copied_ms copied_at fp alt slot pid epoch instance stamped keyed record_key key batch topic_id reject "
        "was_past_end elsewhere"
    ),
    "progress": (
        "run frozen_ms role topic partition life audited compacted since_ms first start end last_stable "
        "high_watermark complete_ms decided_ms gaps holder options guarantees later_end heard_run mark_run mark_end "
        "first_ms leader_epoch"
    ),
}

# Columns that a lake of an earlier version lacks; they are null there.
YOUNGEST: Final = ("record_topic_id_hash", "key_ttl_s")


def test_columns_of_the_first_version_get_their_present_names(spark: SparkSession, tmp_path: Path) -> None:
    lake, of_now = Lake(spark, str(tmp_path)), plan()
    written = {
        "deliveries": reduced(spark, [copy(1), entry(1), copy(2)]),
        "progress": spark.createDataFrame(of_now.rows(), schemas.of("progress")),
    }
    for name, rows in written.items():
        old = {present: first for first, present in migrations.RENAMED[name].items()}
        # These are younger than the present names.
        first = rows.withColumnsRenamed(old).drop("skip_ids", "keep_days", "proven_lost", *YOUNGEST)
        assert sorted(first.columns) == sorted(FIRST_VERSION[name].split())
        writer = first.write.format("delta").option("txnAppId", commits.WRITER)
        parts = [old.get(column, column) for column in schemas.PARTITIONS.get(name, ())]
        writer.option("txnVersion", "1").partitionBy(*parts).save(lake.path(name))
    with pytest.raises(CannotRun, match=r"of an earlier version \(0, not 2\): run python -m spark on it once"):
        lake_version.check(lake)
    _migrate(lake)
    lake_version.check(lake)
    for name, rows in written.items():
        assert lake.read(name).columns == rows.columns
        assert lake.read(name).exceptAll(rows).isEmpty()
        assert lake.read(name).count() == rows.count()
    version = _version(lake)
    # As after a run that was killed before it stored the version.
    (tmp_path / lake_version.FILE).unlink()
    _migrate(lake)
    assert _version(lake) == version


def _migrate(lake: Lake) -> None:
    migrations.migrate(lake, lambda line: None, lambda options: None)


def test_a_lake_of_an_earlier_version_is_read_and_extended(spark: SparkSession, tmp_path: Path) -> None:
    """Its tables lack columns; an unknown column is an error."""
    lake, old = Lake(spark, str(tmp_path)), plan()
    assert old.logs
    rows = spark.createDataFrame(old.rows(), schemas.of("progress"))
    new = ("guarantees", "later_end", "caught_up_run", "behind_run", "behind_end", "first_record_ms", "leader_epoch")
    # A column that the present version does not read.
    lake.append_once("progress", rows.drop(*new).withColumn("proven_ms", F.lit(7).cast("bigint")), 1)

    def read(run: int) -> set[Log]:
        found = lake.read("progress").where(F.col("run") == run).collect()
        read = Plan.from_rows(row.asDict(recursive=True) for row in found)
        return set() if read is None else set(read.logs)

    known = {
        replace(log, guarantees=(), later_end=log.high_watermark, caught_up_run=0, first_record_ms=0, leader_epoch=-1)
        for log in old.logs
    }
    assert read(1) == known
    deliveries = reduced(spark, [copy(1), entry(1)])
    more = ["freed_ms", "record_key_hash", "batch_hash", "topic_id_hash", "was_past_end", "elsewhere", "proven_lost"]
    lake.append("deliveries", deliveries.drop(*more, *YOUNGEST), 1)
    finding = spark.createDataFrame([{"scope": "hour", "kind": "lost"}], schemas.of("findings"))
    lake.append("findings", finding.drop("run", "late_ms"), 1)
    _migrate(lake)
    marks: dict[str, Any] = {"behind_run": 1, "behind_end": 7, "first_record_ms": 8, "leader_epoch": 0}
    marked = [{**row, "run": 2, **marks} for row in old.rows()]
    lake.append_once("progress", spark.createDataFrame(marked, schemas.of("progress")), 2)
    assert read(1) == known
    assert read(2) == {replace(log, **marks) for log in old.logs}
    assert set(lake.read("deliveries").columns) == set(deliveries_table.ROW)
    assert [(row["run"], row["late_ms"]) for row in lake.read("findings").collect()] == [(None, None)]
    later = reduced(spark, [copy(1), answer(503), answer(201, 7)], 2, later_ends={("t", 0): 5})
    lake.merge(later, hours.of(deliveries), 2)
    merged = {row["offset"]: row.asDict() for row in lake.read("deliveries").collect()}
    assert (merged[1]["entries_count"], merged[1]["freed_ms"]) == (1, None)
    assert merged[None]["freed_ms"] is not None
    assert (merged[1]["was_past_end"], merged[7]["was_past_end"]) == (None, True)
    lake.append_once("runs", spark.createDataFrame([], schemas.of("runs")), 1)
    with pytest.raises(AnalysisException, match="schema"):
        lake.append_once("runs", spark.createDataFrame([], schemas.of("runs")).withColumn("more", F.lit(1)), 2)


def test_records_that_vanished_from_a_log_are_removed_from_the_lake(spark: SparkSession, tmp_path: Path) -> None:
    """Claims on its offset stay; the present record at that offset is in the same merge."""
    lake = Lake(spark, str(tmp_path))
    other: dict[str, Any] = {"id": b"o" * 16}
    known = [copy(1), entry(1), copy(2), entry(2), copy(3), entry(3), copy(4, writer=None, **other), copy(5), entry(5)]
    # And of another topic of this name, before the present one.
    earlier = reduced(spark, [copy(2, id=b"e" * 16)], topic_ids={"t": "earlier"})
    present = {"t": "one"}
    lake.append_once("deliveries", reduced(spark, known, topic_ids=present).unionByName(earlier), 1)
    # At the second offset the same id with another content; at the third another id.
    read_again = [copy(2, fingerprint=b"n" * 8), copy(3, **other)]
    merged_rows, spans = lake.read("deliveries"), {("t", 0): (2, 5)}
    read_rows = reduced(spark, read_again, 2, topic_ids=present)
    rows = deliveries_table.with_vanished(read_rows, merged_rows, spans, present, 2).localCheckpoint()
    lake.merge(rows, hours.of(rows), 2)
    found = {(bytes(row["id"])[:1], row["offset"]): row for row in lake.read("deliveries").collect()}
    counts = {at: (row["count"], row["entries_count"], row["is_clean"], row["run"]) for at, row in found.items()}
    assert counts == {
        (b"e", 2): (1, 0, 0, 1),
        (b"i", 1): (1, 1, 1, 1),
        (b"i", 2): (1, 1, 1, 2),
        (b"i", 3): (0, 1, 0, 2),
        (b"o", 3): (1, 0, 0, 2),
        (b"o", 4): (0, 0, 0, 2),
        (b"i", 5): (1, 1, 1, 1),
    }
    assert bytes(found[b"i", 2]["fingerprint"]) == b"n" * 8
    assert found[b"i", 3]["timestamp_ms"] is None
    assert found[b"i", 3]["fingerprint"] is None


def test_a_claim_past_the_end_of_a_log_that_was_blocked_is_marked_once(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, str(tmp_path))
    hour_ago: dict[str, Any] = {"at": NOW_MS - HOUR_MS}
    known = [copy(1), entry(1), entry(99), entry(100), answer(201, 120), answer(504), entry(100, topic="u")]
    blocked = {("t", 0): OFFSETS_MOST}
    lake.append_once("deliveries", reduced(spark, [*known, entry(101, **hour_ago)], later_ends=blocked), 1)
    since = hours.text_of(NOW_MS)
    lake.mark_past_end({("t", 0): 100}, since, 2)
    found = {(row["topic"], row["offset"]): row for row in lake.read("deliveries").collect()}
    marked = {at for at, row in found.items() if row["was_past_end"]}
    assert marked == {("t", 100), ("t", 120)}
    assert {at for at, row in found.items() if row["run"] == 2} == marked
    lake.mark_past_end({("t", 0): 100}, since, 3)
    assert lake.read("deliveries").where("run = 3").isEmpty()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_fenced_run_writes_no_deliveries_any_more(spark: SparkSession, tmp_path: Path, is_new: bool) -> None:
    """The next run has planned the same records again, under another number."""
    fenced, lake = (Lake(spark, str(tmp_path)) for _ in range(2))
    if not is_new:
        fenced.append("deliveries", reduced(spark, [copy(1), entry(1)]), 1)
    # A registered view whose topic has no event yet has no table.
    names = ["deliveries", "findings", "published", "view/t"]
    lake.take_over(2, names)
    lake.fence(names, 2)
    assert not lake.exists("view/t")
    assert not lake.exists("published")
    stale = reduced(spark, [entry(1), copy(2), entry(2)], 2).localCheckpoint()
    if is_new:
        fenced.append("deliveries", stale, 2)
    with pytest.raises(CannotRun, match="run 2 was taken over"):
        fenced.merge(stale, hours.of(stale), 2)
    finding = spark.createDataFrame([{"scope": "log", "kind": "k"}], schemas.of("findings"))
    fenced.replace("findings", finding, "scope = 'log'", 2)
    assert lake.read("findings").isEmpty()
    rows = reduced(spark, [entry(1), copy(2), entry(2)], 3).localCheckpoint()
    lake.merge(rows, hours.of(rows), 3)
    found = {row["offset"]: (row["entries_count"], row["run"]) for row in lake.read("deliveries").collect()}
    assert found == {1: (1 if is_new else 2, 3), 2: (1, 3)}


def test_no_commit_of_a_run_lands_after_another_process_has_taken_the_run_over(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A process that was suspended between its last check of the lease and its commit. Each commit of the process that
    has taken over lands, so that each would have changed its table."""
    late, heir = (Lake(spark, str(tmp_path)) for _ in range(2))
    doubtful = b"d" * 16
    known = [copy(1), entry(1), entry(9), answer(202, id=doubtful)]
    late.append("deliveries", reduced(spark, known, later_ends={("t", 0): OFFSETS_MOST}), 1)
    sent = spark.createDataFrame([("a", "1", True), ("b", None, False)], schemas.of("published"))
    late.append("published", sent, 1)
    a_view = spark.createDataFrame([{"topic": "t", "id": b"i" * 16}], frames.ddl(view.COLUMNS))
    late.append("view/t", a_view, 1)
    finding = spark.createDataFrame([{"scope": "log", "kind": "k", "run": 2}], schemas.of("findings"))
    verdict = spark.createDataFrame([{"run": 2, "verdict": "lost"}], schemas.of("verdicts"))
    unsent = spark.createDataFrame([("a", None), ("c", "3")], "finding_id string, value string")
    row_key = ("accepted_hour", "id", "topic", "partition", "offset")
    rows = late.read("deliveries").select(*row_key).localCheckpoint()
    touched, merged = hours.of(rows), reduced(spark, [copy(2), entry(2)], 2).localCheckpoint()
    other_id = rows.where("offset = 1").withColumn("event_id", F.lit(bytearray(b"o" * 16)))
    settled = rows.where("offset IS NULL").selectExpr("accepted_hour", "id", "true elsewhere", "1L freed_ms")
    changed = a_view.withColumn("change", F.lit("new")).withColumn("id", F.lit(bytearray(b"n" * 16)))
    commits: dict[str, tuple[str, Callable[[Lake], object]]] = {
        "append": ("view/t", lambda lake: lake.append("view/t", a_view, 2)),
        "append_once": ("verdicts", lambda lake: lake.append_once("verdicts", verdict, 2)),
        "overwrite": ("published", lambda lake: lake.overwrite("published", sent, 2)),
        "replace": ("findings", lambda lake: lake.replace("findings", finding, "scope = 'log'", 2)),
        "change_ids": ("deliveries", lambda lake: lake.change_ids(other_id, touched, 2)),
        "settle_elsewhere": ("deliveries", lambda lake: lake.settle_elsewhere(settled, touched, 2)),
        "mark_past_end": ("deliveries", lambda lake: lake.mark_past_end({("t", 0): 5}, hours.text_of(0), 2)),
        "mark_proven_lost": (
            "deliveries",
            lambda lake: lake.mark_proven_lost(rows.where("offset = 9"), touched, 2),
        ),
        "mark_unsent": ("published", lambda lake: publish.mark_unsent(lake, 2)),
        "store": ("published", lambda lake: publish.store(lake, unsent, 2)),
        "mark_sent": ("published", lambda lake: publish.mark_sent(lake, 2, with_tombstones=True)),
        "view": ("view/t", lambda lake: view.View(lake, SharedSettings(), "t").merge(changed, None, 2)),
        "merge": ("deliveries", lambda lake: lake.merge(merged, touched, 2)),
        "delete_before": ("deliveries", lambda lake: lake.delete_before(hours.text_of(2**41), 2)),
    }
    names = ["deliveries", "published", "view/t", *schemas.WRITTEN_AFTER_MERGE]
    heir.take_over(2, names)
    heir.fence(names, 2)
    for name, (table, commit) in commits.items():
        version = _version(late, table)
        with suppress(CannotRun):  # a MERGE of records says so
            commit(late)
        assert _version(late, table) == version, f"{name} landed late"
        commit(heir)
        assert _version(late, table) > version, f"{name} commits nothing"


def test_a_lake_that_is_not_held_any_more_gets_no_commit(spark: SparkSession, tmp_path: Path) -> None:
    """Every commit of spark/ goes through the lake, but those of the lease itself."""
    filled, held = _filled(spark, tmp_path, 1), True

    def check_held() -> None:
        if not held:
            raise CannotRun("taken over")

    lake = Lake(spark, str(tmp_path), check_held)
    rows, ends, first = _rows(spark, 2, range(1)), {("t", 0): 1}, hours.text_of(0)
    touched = hours.of(rows)
    commits: list[Callable[[], object]] = [
        lambda: lake.append_once("deliveries", rows, 2),
        lambda: lake.append("deliveries", rows, 2),
        lambda: lake.append_unnumbered("deliveries", rows),
        lambda: lake.replace("deliveries", rows, "true", 2),
        lambda: lake.overwrite("deliveries", rows, 2),
        lambda: lake.fence(["deliveries"], 2),
        lambda: lake.merge(rows, touched, 2),
        lambda: lake.change_ids(rows, touched, 2),
        lambda: lake.settle_elsewhere(rows, touched, 2),
        lambda: lake.mark_past_end(ends, first, 2),
        lambda: lake.mark_proven_lost(rows, touched, 2),
        lambda: lake.delete_before(hours.text_of(2**41), 2),
        lambda: lake.optimize(touched, []),
        lambda: lake.vacuum(1),
        lambda: lake.rename_columns("deliveries", {"key": "k"}, 2),
        lambda: _migrate(lake),
    ]
    held = False
    for commit in commits:
        with pytest.raises(CannotRun, match="taken over"):
            commit()
    assert _version(filled) == 0
    for path in (Path(__file__).parents[2] / "spark").rglob("*.py"):
        opens = re.findall(r"DeltaTable\.forPath|(?<!read)\.format\(.delta.\)", path.read_text(encoding="utf-8"))
        assert len(opens) == {"lake.py": 3, "lock.py": 2}.get(path.name, 0), path


@pytest.mark.parametrize("root", ["absolute", "relative, with `odd` [signs]%20"])
def test_the_log_of_a_table_is_kept_for_a_day_on_request(spark: SparkSession, tmp_path: Path, root: str) -> None:
    folder = tmp_path / root
    lake = Lake(spark, str(folder) if root == "absolute" else os.path.relpath(folder))
    lake.append("published", frames.rows_of(spark, schemas.of("published"), []), 5)
    for _ in range(2):
        lake.keep_short_logs(["published", "runs"])
    assert _version(lake, "published") == 1
    for name in ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration"):
        assert table_property(lake.read("published"), name) == LOG_RETENTION
    assert (lake.last_committed_run("published"), lake.last_committed_run("runs")) == (5, None)


def test_a_proven_loss_is_marked_without_a_new_run_and_stays_so(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, str(tmp_path))
    rows = reduced(spark, [copy(1), entry(1), entry(99), entry(100)])
    lake.append_once("deliveries", rows, 1)
    lost = rows.where("offset = 99").select("accepted_hour", "id", "topic", "partition", "offset").localCheckpoint()
    for _ in range(2):
        lake.mark_proven_lost(lost, hours.of(lost), 1)
    again = reduced(spark, [answer(201, 99), answer(201, 100)], 2)
    lake.merge(again, hours.of(again), 2)
    found = {row["offset"]: (row["proven_lost"], row["run"]) for row in lake.read("deliveries").collect()}
    assert found == {1: (None, 1), 99: (True, 2), 100: (None, 2)}


def test_a_lake_of_a_newer_release_is_refused_in_a_line(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, str(tmp_path))
    newer = lake_version.VERSION + 1
    lake_version.store(lake, newer)
    said = rf"^--lake {tmp_path} is of version {newer}, which a newer release has written: run that release [^\n]*$"
    for refuses in (_migrate, lake_version.check):
        with pytest.raises(CannotRun, match=said):
            refuses(lake)
    assert [path.name for path in tmp_path.iterdir()] == [lake_version.FILE]
    (tmp_path / lake_version.FILE).write_text("{}")
    with pytest.raises(CannotRun, match=rf"{lake_version.FILE} has no version: restore this file"):
        _migrate(lake)


def test_a_new_lake_has_the_version_of_this_release(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, str(tmp_path))
    lake_version.check(lake)
    _migrate(lake)
    assert lake_version.stored(lake) == lake_version.VERSION == migrations.MIGRATIONS[-1].version
    assert [step.version for step in migrations.MIGRATIONS] == list(range(1, lake_version.VERSION + 1))


SUMS_OF_RUN: Final[dict[str, Any]] = {
    "hours": {"2026-01-01 00:00:00": {"t": {"accepted": 2, "delivered_once": 2}, "u": {"ids": 1}}},
    "adjustment": {"2026-01-01 01:00:00": {"t": {"accepted": -1}}},
    "late_hours": {"2026-01-01 00:00:00": 5},
}
COUNTED_RECORDS: Final = {"2026-01-01 00:00:00": {"t": {"0": 7, "12": 1}, "u": {"-1": 3}}}


def _killed_at(number: int) -> lock.CheckHeld:
    """Return the check of a process that is killed before its `number`-th commit or version."""
    checks = count(1)

    def check_held() -> None:
        if next(checks) == number:
            raise CannotRun("killed")

    return check_held


def test_sums_by_hour_move_from_the_summary_of_the_last_run_to_tables(spark: SparkSession, tmp_path: Path) -> None:
    """Also with the names of the first release, and if the upgrade is interrupted after any commit."""
    lake = Lake(spark, str(tmp_path))
    planned = [{**row, "run": 2} for row in plan().rows()]
    lake.append("progress", spark.createDataFrame(planned, schemas.of("progress")), 2)
    summary = {**SUMS_OF_RUN, "cells": COUNTED_RECORDS, "shifted": True, "options": "{}"}
    rows = [
        {"run": run, "frozen_ms": NOW_MS, "verdict": "clean", "summary": json.dumps(found), "report": "{}"}
        for run, found in ((1, {"hours": {}}), (2, summary))
    ]
    lake.append("runs", spark.createDataFrame(rows, schemas.of("runs")).drop("counted_run"), 2)
    # Before it stores a version, after the new column, after one table, both tables, and the summary.
    for number in (1, 3, 2, 3, 4):
        with pytest.raises(CannotRun, match="killed"):
            _migrate(Lake(spark, str(tmp_path), _killed_at(number)))
    _migrate(Lake(spark, str(tmp_path), _killed_at(2)))
    found = finished_runs.last_finished_run(lake)
    assert found is not None
    assert {name: found[name] for name in SUMS_OF_RUN} == SUMS_OF_RUN
    assert (found["record_counts"], found["evidence_changed"]) == (COUNTED_RECORDS, True)
    assert (found["counted_run"], found["options"]) == (2, "{}")
    assert "hours" not in json.loads(lake.read("runs").where("run = 2").collect()[0]["summary"])
    # A run that has counted the same writes nothing; another one replaces the sums, and keeps those of the last run.
    balance = Balance.of(found)
    assert hourly.store(lake, balance, found, 3) == 2
    balance.hours["2026-01-01 02:00:00"] = {"t": {"accepted": 5}}
    assert hourly.store(lake, balance, found, 3) == 3
    assert hourly.load(lake, 2)["hours"] == SUMS_OF_RUN["hours"]
    assert hourly.load(lake, 3)["hours"] == balance.hours
    found |= {"counted_run": 3, **hourly.load(lake, 3)}
    balance.hours.popitem()
    assert hourly.store(lake, balance, found, 4) == 4
    assert {row["run"] for row in lake.read("hourly_balance").collect()} == {3, 4}


def test_logs_of_thousands_of_partitions_may_be_truncated_between_two_runs(spark: SparkSession) -> None:
    """As by an election of unclean leaders in the whole cluster: a run that could not drop the rows would never end."""
    merged_rows = reduced(spark, named({"kept": [copy(4, partition=2999)], "gone": [copy(5, partition=2999)]}), 1)
    spans = {("t", number): (5, 9) for number in range(3000)}
    rows = deliveries_table.with_vanished(reduced(spark, [], 2), merged_rows, spans, {}, 2).collect()
    assert [(name_of(row["id"]), row["offset"], row["vanished"]) for row in rows] == [("gone", 5, True)]


def test_the_summary_of_the_last_run_is_read_from_the_files_of_the_last_runs(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(spark, str(tmp_path))
    assert finished_runs.last_finished_run(lake) is None
    for first, length in ((1, 1), (3, 40)):
        runs = [
            {"run": run, "frozen_ms": NOW_MS, "verdict": "clean", "summary": f'{{"n": {run}}}', "report": f"{run}"}
            for run in range(first, first + length)
        ]
        lake.append_once(
            "runs", spark.createDataFrame(runs, schemas.of("runs")).repartitionByRange(length, "run"), first
        )
    with session.settings(spark, {"spark.sql.maxMetadataStringLength": "1000"}):
        reports = list(range(42, 23, -1))
        assert finished_runs.last_finished_run(lake) == {"run": 42, "n": 42, "reports": reports, "counted_run": None}
    assert reads(spark, tmp_path, "runs")["number of files read"] == finished_runs.HISTORY_RUNS
    assert len(lake.read("runs").inputFiles()) >= 2 * finished_runs.HISTORY_RUNS


def test_the_pass_over_ids_reads_narrow_columns_only(small: Lake) -> None:
    rows, seen = small.read("deliveries"), gather_evidence(plan(), settings())
    folders = set(schemas.PARTITIONS["deliveries"])
    assert _columns(cross_hour.repeated(rows)) == {"kind", "id"} | folders
    narrow = {"kind", "has_fencepost_header", "record_key_hash", "entries_count", "answered_201", "fingerprint"}
    assert _columns(cross_hour.retried(rows, seen)) == narrow | folders


@pytest.mark.parametrize("last", ["first_hour", "first_hour + INTERVAL 1 HOUR"])
def test_the_pass_over_ids_finds_an_id_in_any_spread_of_hours(small: Lake, last: str) -> None:
    """An id with two rows in every other hour, or in every hour and the next, for some months."""
    first = F.timestamp_millis(F.lit(NOW_MS // HOUR_MS * HOUR_MS) - F.col("id") * 3 * HOUR_MS)
    hour = small.spark.range(1000).select(first.alias("first_hour")).withColumn("last_hour", F.expr(last))
    several = hour.withColumn("id", F.lit("id-3-7".ljust(16)).cast("binary"))
    found = cross_hour.rows_of(small.read("deliveries"), several, cross_hour.hour_spans(several))
    assert [bytes(row["id"]) for row in found.collect()] == [b"id-3-7".ljust(16)]


def test_a_table_with_many_files_is_compacted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark.tables.lake.SMALL_FILES", 2)
    lake = Lake(spark, str(tmp_path))
    verdict = spark.createDataFrame([{"run": 1, "verdict": "lost"}], schemas.of("verdicts")).coalesce(1)
    for number, files in ((1, 1), (2, 2), (3, 1)):
        lake.append_once("verdicts", verdict, number)
        lake.optimize([], ["verdicts", "rejects"])
        assert len(lake.read("verdicts").inputFiles()) == files
    assert delta_files.count(Path(lake.path("verdicts"))) == 3


def test_vacuum_uses_few_tasks_and_no_commit(spark: SparkSession, tmp_path: Path) -> None:
    """After a commit the next run would not find its last one in the file of the lake."""
    lake = _filled(spark, tmp_path, 2)
    newest = lake.newest_commit("deliveries")
    assert newest is not None
    context = spark.sparkContext
    context.setJobGroup("vacuum", "vacuum of a small table")
    try:
        lake.vacuum(1)
    finally:
        context.setJobGroup("", "none")
    tracker = context.statusTracker()
    jobs = [info for job in tracker.getJobIdsForGroup("vacuum") if (info := tracker.getJobInfo(job))]
    tasks = [stage.numTasks for info in jobs for number in info.stageIds if (stage := tracker.getStageInfo(number))]
    assert tasks, "no job was seen"
    assert max(tasks) <= 100, tasks
    assert lake.newest_commit("deliveries") == newest


def _columns(rows: DataFrame) -> set[str]:
    """Return the columns of the single scan in the plan of rows."""
    physical_plan = rows._jdf.queryExecution().executedPlan().toString()
    (scan,) = [line for line in physical_plan.splitlines() if "FileScan" in line]
    return {column.split("#")[0] for column in scan[scan.index("[") + 1 : scan.index("]")].split(",")}
