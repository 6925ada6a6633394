"""Which runs are small, so that their JVM does without C2. The runs themselves: test_runs.py."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from service.contract import Rules, SharedSettings
from spark import __main__ as command
from spark.engine import class_data
from spark.engine.session import INTERPRETED_RECORDS, JAVA_OPTIONS, SMALL_RUN_JAVA_OPTIONS
from spark.errors import CannotRun, NeedsSpark
from spark.reading import librdkafka_admin
from spark.reading.librdkafka_admin import LibrdkafkaAdmin
from spark.settings import Settings
from spark.tables import files, last_run_file
from spark.tables.lake import SMALL_BYTES
from spark.without_spark import before_spark, small_run
from tests.spark.fake_cluster import LEDGER_TOPIC, FakeAdmin, ends, fake_cluster, freeze, settings

SINK = """
[[sinks]]
name = "table"
format = "delta"
path = "/table"
topics = ["orders"]
id = "id"
event_time = "event_time"
late_s = 60
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    """A cluster with few records."""
    cluster = fake_cluster()
    monkeypatch.setattr(before_spark, "LibrdkafkaAdmin", lambda shared: cluster)
    return cluster


def given(lake: Path, **options: Any) -> Settings:
    found = settings(**options)
    return replace(found, options=replace(found.options, lake=str(lake)))


def is_small(given: Settings, environ: Mapping[str, str] | None = None) -> bool:
    known = before_spark.known(given, environ or {})
    return known is not None and small_run.is_small(known)


def test_a_first_run_over_few_records_is_small(cluster: FakeAdmin, tmp_path: Path) -> None:
    assert is_small(given(tmp_path))
    cluster.topics["orders"] = ends(INTERPRETED_RECORDS)
    assert not is_small(given(tmp_path))
    assert is_small(given(tmp_path, max_records=INTERPRETED_RECORDS))


def test_a_later_run_is_small_if_few_records_are_new(
    cluster: FakeAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.topics["orders"] = ends(100 * INTERPRETED_RECORDS)
    plan = freeze(cluster, named={"orders"})
    last_run = last_run_file.LastRun({}, plan.rows(), [], None)
    monkeypatch.setattr(last_run_file, "load_local", lambda folder: last_run_file.LocalFile(last_run, {}))
    cluster.topics[LEDGER_TOPIC] = ends(9)
    assert is_small(given(tmp_path))
    # The last run is not known, as after one that was interrupted.
    monkeypatch.setattr(last_run_file, "load_local", lambda folder: None)
    assert not is_small(given(tmp_path))


@pytest.mark.parametrize(
    ("checksums", "small"),
    [
        ({"00000000000000000000.crc": SMALL_BYTES + 1, "00000000000000000001.crc": SMALL_BYTES}, True),
        ({"00000000000000000000.crc": 0, "00000000000000000001.crc": SMALL_BYTES + 1}, False),
        # Delta could not write any.
        ({}, False),
        ({".00000000000000000000.json.crc": 0}, False),
    ],
)
def test_a_run_on_a_large_lake_is_not_small(
    checksums: Mapping[str, int], small: bool, cluster: FakeAdmin, tmp_path: Path
) -> None:
    log = tmp_path / "deliveries" / "_delta_log"
    log.mkdir(parents=True)
    for name, size in checksums.items():
        files.write_local(log, name, [json.dumps({"tableSizeBytes": size})])
    assert is_small(given(tmp_path)) is small


def test_a_run_whose_size_is_not_known_is_not_small(
    cluster: FakeAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = given(tmp_path)
    assert is_small(few, {"HADOOP_CONF_DIR": ""})
    assert not is_small(few, {"HADOOP_CONF_DIR": "/etc/hadoop"})
    assert not is_small(few, {"PYSPARK_GATEWAY_PORT": "7077"})
    assert not is_small(given(tmp_path, follow=True))
    assert not is_small(replace(few, rules=Rules.parse(SINK)))
    assert not is_small(replace(few, options=replace(few.options, lake="s3a://bucket/lake")))
    for error in (CannotRun("no leader"), NeedsSpark("no answer"), PermissionError("_last_run.json")):

        def fails(shared: object, error: Exception = error) -> FakeAdmin:
            raise error

        monkeypatch.setattr(before_spark, "LibrdkafkaAdmin", fails)
        assert not is_small(few)


def test_the_ends_that_were_listed_for_a_run_without_spark_are_not_listed_again(
    cluster: FakeAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = before_spark.known(given(tmp_path), {})
    assert known is not None
    cluster.listed = {("orders", 0): ends(INTERPRETED_RECORDS), (LEDGER_TOPIC, 0): ends(0)}
    monkeypatch.setattr(FakeAdmin, "names", Mock(side_effect=AssertionError("Kafka was asked again")))
    assert small_run.is_small(known)
    # Its own topics are not audited.
    cluster.listed["fencepost.findings", 0] = ends(1)
    assert small_run.is_small(known)
    cluster.listed[LEDGER_TOPIC, 0] = ends(1)
    assert not small_run.is_small(known)


def test_a_run_is_not_small_if_kafka_has_not_answered_the_run_without_spark(
    cluster: FakeAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = before_spark.known(given(tmp_path), {})
    assert known is not None
    assert small_run.is_small(known)
    cluster.has_failed = True
    monkeypatch.setattr(FakeAdmin, "names", Mock(side_effect=AssertionError("Kafka was asked again")))
    assert not small_run.is_small(known)


def test_a_request_that_is_not_answered_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(librdkafka_admin, "CALL_S", 0.1)
    admin = LibrdkafkaAdmin(SharedSettings(kafka="127.0.0.1:1"))
    assert not admin.has_failed
    with pytest.raises(NeedsSpark):
        admin.names()
    assert admin.has_failed


@pytest.mark.parametrize(
    ("small", "java_options", "sharing"),
    [
        (True, SMALL_RUN_JAVA_OPTIONS, class_data.options_or_recording),
        (False, JAVA_OPTIONS, class_data.options),
    ],
    ids=["small", "large"],
)
def test_the_jvm_of_a_small_run_has_only_c1_and_records_its_classes(
    small: bool, java_options: str, sharing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, Any]] = []

    def open_session(*, urls: object, **given: Any) -> None:
        opened.append(given)
        raise CannotRun("seen")

    monkeypatch.setattr(small_run, "is_small", lambda known: small)
    monkeypatch.setattr(command, "open_session", open_session)
    monkeypatch.setattr(sys, "argv", ["spark", "--lake", str(tmp_path / "lake"), "--report", str(tmp_path / "report")])
    assert command.main() == command.EXIT_CANNOT_RUN
    assert opened == [{"java_options": java_options, "sharing": sharing}]
