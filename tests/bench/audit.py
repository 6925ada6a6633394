"""Measures the audit: a first run against a bare Spark read of the same topics, its steps, and later runs by history.

The bare read, in the same warm session, reads data, ledger and journal, extracts the ids, counts the records, entries
and answers of each, and checks the totals. A second bare read without a goal counts the ids of the records only, and
the bytes of ledger and journal. Small runs are compared as whole cold processes, by their CPU.
"""

import json
import os
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Producer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from deploy import places
from deploy.install import java
from deploy.stack import Kafka
from service.contract import SharedSettings
from service.contract.wire.headers import KEY_HEADER
from service.contract.wire.ids import FINGERPRINT_BYTES, ID_BYTES
from service.contract.wire.names import ledger_topic, requests_topic
from spark import job
from spark.engine import class_data
from spark.engine.session import open_session
from spark.reading import decode
from spark.report.document import EXIT_FINDINGS, Report
from spark.settings import Options, Settings
from spark.tables import deliveries, schemas
from tests.bench import bare_read, process_cpu
from tests.bench.records import HOUR_MS, Records
from tests.bench.rows import Goal, NotRealWork, Row, ratios
from tests.bench.stage import Stage

WARM: Final = 40_000
LATER_MS: Final = HOUR_MS
# The age of records whose verdicts are all final.
SETTLED_MS: Final = 3 * HOUR_MS
# Hours of history, and ids in each, before a run with few new records; and ten times as many hours.
HISTORY: Final = (24, 240)
IDS_AN_HOUR: Final = 20_000
# More than two years of hours; as many small headers as fit into a record.
STRANGE_RECORDS: Final = 20_000
STRANGE_HEADERS: Final = 150_000


def measure(stage: Stage) -> list[Row]:
    spark = open_session({"FENCEPOST_JARS": str(places.jars("spark")), **java.environment()})
    try:
        sizes = stage.records or stage.pick((WARM,), (1_000_000,), (1_000_000, 5_000_000, 10_000_000))
        _first(spark, stage, _written(spark, stage.kafka, WARM))
        found: list[Row] = []
        for size in sizes:
            found += _first(spark, stage, _written(spark, stage.kafka, size))
        small = _written(spark, stage.kafka, WARM, SETTLED_MS)
        found += _with_history(spark, stage) + _with_strangers(spark, stage)
    finally:
        spark.stop()
    return found + _as_processes(stage, small)


def _written(spark: SparkSession, kafka: Kafka, count: int, age_ms: int = 0) -> Records:
    records = Records(f"a-{uuid.uuid4().hex[:7]}", count, int(time.time() * 1000) - age_ms)
    records.write(spark, kafka)
    return records


def _run(spark: SparkSession, kafka: Kafka, namespace: str, folder: Path, now_ms: int, **options: Any) -> Report:
    given = Options(lake=str(folder / "lake"), report=str(folder / "report"), **options)
    shared = SharedSettings(kafka=kafka.bootstrap, namespace=namespace)
    return job.run(spark, Settings(shared=shared, options=given), lambda line: None, now_ms)


def _first(spark: SparkSession, stage: Stage, records: Records) -> list[Row]:
    """Measure a first run over all records, and the bare read."""
    count = f"{records.count:,} records"
    shared = SharedSettings(kafka=stage.kafka.bootstrap, namespace=records.namespace)
    rounds = range(stage.pick(1, 2))
    bare_s = [bare_read.seconds(spark, shared, records) for _ in rounds]
    bytes_s = [bare_read.seconds(spark, shared, records, decoded=False) for _ in rounds]
    folder = stage.folder / records.namespace
    started = time.monotonic()
    report = _run(spark, stage.kafka, records.namespace, folder, records.now_ms + LATER_MS)
    took_s = time.monotonic() - started
    files = list((folder / "lake" / "deliveries").rglob("*.parquet"))
    stored = sum(file.stat().st_size for file in files)
    shutil.rmtree(folder)
    balance = report.document["balance"]
    sound = (records.count - records.copies, records.copies, records.count + records.copies)
    if (balance["delivered_once"], balance["duplicated"], balance["records"]) != sound:
        raise NotRealWork(f"the run's balance is {balance}")
    seconds: dict[str, float] = report.document["cost"]["seconds"]
    return [
        Row(f"{count}: bare read and count by id", "s", bare_s),
        Row(f"{count}: bare read, count by id of the data alone", "s", bytes_s),
        Row(f"{count}: first run", "s", [took_s]),
        Row(f"{count}: first run ÷ bare read", "x", ratios([took_s], [min(bare_s)]), Goal(most=3)),
        Row(f"{count}: first run ÷ bare read of the data's ids alone", "x", ratios([took_s], [min(bytes_s)])),
        Row("first run, records a second", "1/s", [records.count / took_s], series="first run", at=records.count),
        *(Row(f"{count}: step {name}", "s", [value]) for name, value in seconds.items()),
        Row(f"{count}: pass over ids, for 10 million", "s", [seconds["compare ids"] * 1e7 / records.count]),
        Row(f"{count}: lake, bytes a record", "B", [stored / records.count]),
        Row(f"{count}: lake, files", "", [len(files)]),
    ]


def _as_processes(stage: Stage, records: Records) -> list[Row]:
    """Measure the CPU of whole processes: the bare read, a first run over the same records, a run of nothing new.

    The bare read has a JVM with all its compilers that reads all its classes, and that of a small run for comparison.
    The first small run on a machine records its classes (spark.engine.class_data), and is measured by itself.
    """
    environ = {**os.environ, "FENCEPOST_JARS": str(places.jars("spark")), **java.environment()}
    environ |= {"FENCEPOST_KAFKA": stage.kafka.bootstrap, "FENCEPOST_NAMESPACE": records.namespace}
    bare = [sys.executable, "-m", "tests.bench.bare_read", stage.kafka.bootstrap, records.namespace, str(records.count)]
    bare_s, small_jvm_s, first_s, nothing_s = [], [], [], []

    def audit_in(folder: Path) -> list[str]:
        # The broker has other topics with millions of records, which a first run without the option might have to read.
        folders = ["--lake", f"{folder}/lake", "--report", f"{folder}/report"]
        return [sys.executable, "-m", "spark", *folders, "--topics", records.topic]

    if (archive := class_data.archive(environ)) is not None:
        archive.unlink(missing_ok=True)
    records_classes = [*audit_in(stage.folder / "process"), "--replace-findings"]
    recording_s = process_cpu.of(records_classes, environ, (EXIT_FINDINGS,))
    for nth in range(stage.pick(1, 3)):
        folder = stage.folder / f"process-{nth}"
        audit = audit_in(folder)
        bare_s.append(process_cpu.of(bare, environ))
        small_jvm_s.append(process_cpu.of([*bare, "small"], environ))
        first_s.append(process_cpu.of([*audit, "--replace-findings"], environ, (EXIT_FINDINGS,)))
        nothing_s.append(process_cpu.of(audit, environ, (EXIT_FINDINGS,)))
        document = json.loads((folder / "report" / "report.json").read_text())
        found = document["run"]["number"], document["cost"]["offsets"], document["balance"]["duplicated"]
        if found != (2, 0, records.copies):
            raise NotRealWork(f"run, offsets and duplicates of the second process are {found}")
    count = f"{records.count:,} records"
    return [
        Row(f"CPU of a cold process: {count}, bare read and count by id", "s", bare_s),
        Row(f"CPU of a cold process: {count}, bare read in the JVM of a small run", "s", small_jvm_s),
        Row(f"CPU of a cold process: {count}, first run, which records its classes", "s", [recording_s]),
        Row(f"CPU of a cold process: {count}, first run", "s", first_s),
        Row("CPU of a cold process: run of nothing new", "s", nothing_s),
        Row(f"cold processes: first run ÷ bare read, {count}", "x", ratios(first_s, bare_s), Goal(most=1.8)),
        Row(f"cold processes: first run ÷ bare read in its JVM, {count}", "x", ratios(first_s, small_jvm_s)),
        Row("cold processes: run of nothing new ÷ bare read", "x", ratios(nothing_s, bare_s), Goal(most=1.2)),
    ]


def _with_history(spark: SparkSession, stage: Stage) -> list[Row]:
    """Merge the same new records into a lake with a history, and into one with ten times that history."""
    hours = stage.pick((2, 20), HISTORY)
    took: dict[int, list[float]] = {length: [] for length in hours}
    ids_s: dict[int, float] = {}
    records = _written(spark, stage.kafka, WARM)
    for length in hours:
        folder = stage.folder / f"history-{length}"
        _run(spark, stage.kafka, records.namespace, folder, records.now_ms + LATER_MS, max_records=WARM // 2)
        _grow(spark, folder, records, length)
        for nth in range(stage.pick(1, 3)):
            copy = folder.with_name(f"{folder.name}-{nth}")
            shutil.copytree(folder, copy)
            started = time.monotonic()
            _run(spark, stage.kafka, records.namespace, copy, records.now_ms + LATER_MS, skip_ids=True)
            took[length].append(time.monotonic() - started)
        report = _run(spark, stage.kafka, records.namespace, folder, records.now_ms + LATER_MS)
        ids_s[length] = report.document["cost"]["seconds"]["compare ids"]
    short, long = hours
    new_ids = (long - short) * IDS_AN_HOUR
    return [
        *(Row(f"{length} hours of history: run without the pass over ids", "s", took[length]) for length in hours),
        Row("ten times the history ÷ the history", "x", ratios(took[long], took[short]), Goal(most=1.2)),
        Row(
            "each further 10 million ids of history: pass over ids", "s", [(ids_s[long] - ids_s[short]) / new_ids * 1e7]
        ),
    ]


def _with_strangers(spark: SparkSession, stage: Stage) -> list[Row]:
    """Measure a run over records that a foreign writer may put into an audited topic.

    Each record is in a past hour of its own, or one has as many headers as a record can hold. The comparison has as
    many records in one hour.
    """
    count = stage.pick(1_000, STRANGE_RECORDS)
    wild = _strangers_s(spark, stage, count, HOUR_MS, STRANGE_HEADERS)
    tame = _strangers_s(spark, stage, count, 0, 1)
    told = f"{count:,} strangers' records"
    return [
        Row(f"{told} in as many hours, one with {STRANGE_HEADERS:,} headers: first run", "s", [wild]),
        Row(f"{told} in one hour: first run", "s", [tame]),
        Row("strangers' hours and headers ÷ neither", "x", ratios([wild], [tame]), Goal(most=5)),
    ]


def _strangers_s(spark: SparkSession, stage: Stage, count: int, apart_ms: int, headers: int) -> float:
    namespace = f"a-{uuid.uuid4().hex[:7]}"
    topic, now_ms = f"{namespace}-orders", int(time.time() * 1000)
    for name in (topic, ledger_topic(namespace), requests_topic(namespace)):
        stage.kafka.create_topic(name, 1, {"retention.ms": "-1"})
    producer = Producer({"bootstrap.servers": stage.kafka.bootstrap, "linger.ms": 5, "message.max.bytes": 2_000_000})
    for nth in range(count):
        many: list[tuple[str, str | bytes | None]] = [("h", b"") for _ in range(headers if nth == 0 else 1)]
        key = (KEY_HEADER, b"k%d" % nth)
        ts = now_ms - HOUR_MS - nth * apart_ms
        producer.produce(topic, b"x", headers=[key, *many], timestamp=ts, partition=0)
        producer.poll(0)
    producer.flush(60)
    started = time.monotonic()
    folder = stage.folder / namespace
    report = _run(spark, stage.kafka, namespace, folder, now_ms + LATER_MS, topics=(topic,), publish=False)
    took_s = time.monotonic() - started
    if report.document["cost"]["offsets"] != count:
        raise NotRealWork(f"the run read {report.document['cost']['offsets']} offsets, not {count}")
    shutil.rmtree(folder)
    return took_s


def _grow(spark: SparkSession, folder: Path, records: Records, hours: int) -> None:
    """Write healthy hours into a lake, before its own."""
    nth = F.col("id")
    at = F.lit(records.now_ms - (hours + 24) * HOUR_MS) + F.floor(nth / IDS_AN_HOUR) * HOUR_MS
    made = spark.range(hours * IDS_AN_HOUR).select(at.alias("at"), nth)
    digest = F.unhex(F.sha2(F.col("id").cast("string"), 256))
    columns = {
        "accepted_hour": deliveries.hour_of(F.col("at")),
        "is_clean": F.lit(1),
        "kind": F.lit(decode.EVENT),
        "id": F.substring(digest, 1, ID_BYTES),
        "fingerprint": F.substring(digest, 17, FINGERPRINT_BYTES),
        "topic": F.lit(records.topic),
        "partition": F.lit(0),
        "offset": -nth,
        "run": F.lit(0),
        **{
            name: F.col("at")
            for name in (
                "accepted_ms",
                "last_ms",
                "entry_seen_ms",
                "answer_seen_ms",
                "timestamp_ms",
                "record_accepted_ms",
            )
        },
        **dict.fromkeys(deliveries.COUNTS, F.lit(0)),
        **{name: F.lit(1) for name in ("count", "entries_count", "answered_201")},
    }
    rows = made.select(
        *(columns.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in deliveries.ROW.items())
    )
    writer = rows.hint("rebalance", "accepted_hour").write.format("delta").mode("append")
    writer.partitionBy(*schemas.PARTITIONS["deliveries"]).save(str(folder / "lake" / "deliveries"))
