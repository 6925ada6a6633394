"""Which runs need no Spark. The runs themselves: test_runs.py."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.errors import PySparkException

from deploy.places import ROOT
from service.contract import SharedSettings
from spark.errors import AnotherRun, CannotRun, NeedsSpark
from spark.reading.connection import for_librdkafka
from spark.reading.librdkafka_admin import LibrdkafkaAdmin
from spark.reading.run_plan import Plan, RunContext
from spark.report import document
from spark.settings import Options
from spark.silences import Silence
from spark.steps import maintenance
from spark.steps.finished_runs import Shown
from spark.tables import files, last_run_file, lock
from spark.tables.commits import Commit
from spark.without_spark import before_spark, idle
from tests.spark.test_classify import settings
from tests.spark.test_reconcile import IDLE_LAST, IDLE_RUN
from tests.spark.times import DAY_MS, HOUR_MS

NOON_MS = 1_800_000_000_000 // DAY_MS * DAY_MS + 12 * HOUR_MS
HOUR = "2027-01-15 12:00:00"
PLAN = replace(IDLE_LAST, run=2, frozen_ms=NOON_MS)
CONTEXT = RunContext(PLAN, settings(), IDLE_LAST, IDLE_RUN)
SHOWN = Shown(
    collected={},
    revised={},
    since_ms=CONTEXT.window_from,
    until_ms=None,
    judged_by=document.judged_by(CONTEXT),
    published=False,
    maintained_ms=NOON_MS - HOUR_MS,
    maintenance_options=[None, False, None],
)


@pytest.mark.parametrize(
    ("changes", "repeats"),
    [
        ({}, True),
        ({"until_ms": SHOWN.since_ms}, True),
        ({"until_ms": SHOWN.since_ms - 1}, False),
        ({"since_ms": SHOWN.since_ms - HOUR_MS}, True),
        # The clock was set back: findings may be in the window again.
        ({"since_ms": SHOWN.since_ms + HOUR_MS}, False),
        ({"judged_by": {**SHOWN.judged_by, "silences": [["lost:1", NOON_MS + 1, "known"]]}}, False),
        ({"judged_by": {**SHOWN.judged_by, "kinds": ["lost"]}}, False),
    ],
)
def test_a_report_is_repeated_while_its_window_has_the_same_findings_under_the_same_silences(
    changes: Mapping[str, Any], repeats: bool
) -> None:
    shown = SHOWN._replace(**changes)
    if repeats:
        assert idle.checked_balance(CONTEXT, shown).hours == IDLE_RUN["hours"]
    else:
        with pytest.raises(NeedsSpark):
            idle.checked_balance(CONTEXT, shown)


def test_a_silence_that_has_ended_is_another_view_of_the_findings() -> None:
    ends = replace(CONTEXT, settings=replace(CONTEXT.settings, silences=(Silence("lost:1", NOON_MS + 1, "known"),)))
    assert document.judged_by(ends)["silences"] == [["lost:1", NOON_MS + 1, "known"]]
    assert document.judged_by(replace(ends, plan=replace(PLAN, frozen_ms=NOON_MS + 1))) == SHOWN.judged_by


@pytest.mark.parametrize(
    ("options", "then", "after_ms", "with_rows", "due"),
    [
        ({}, [None, False, None], 9 * DAY_MS, [HOUR], False),
        # Options that the last run had, and this one does not.
        ({}, [8, True, 24], HOUR_MS, [HOUR], False),
        ({"vacuum_h": 24}, [None, False, None], HOUR_MS, [], True),
        ({"vacuum_h": 24}, [None, False, 24], DAY_MS - 1, [HOUR], False),
        ({"vacuum_h": 24}, [None, False, 24], DAY_MS, [], True),
        ({"keep_days": 8}, [9, False, None], HOUR_MS, [], True),
        # An hour is compacted when it is over: this one has rows, or has none.
        ({"optimize": True}, [None, True, None], HOUR_MS, [HOUR], True),
        ({"optimize": True}, [None, True, None], HOUR_MS, [], False),
        ({"optimize": True}, [None, True, None], HOUR_MS - 1, [HOUR], False),
        ({"optimize": True}, [None, True, None], HOUR_MS, ["2027-01-15 11:00:00", "2027-01-15 13:00:00"], False),
    ],
)
def test_maintenance_is_due_once_a_day_and_for_an_hour_that_is_over(
    options: Mapping[str, Any], then: list[Any], after_ms: int, with_rows: list[str], due: bool
) -> None:
    given = settings(**options).options
    assert maintenance.is_due(given, then, NOON_MS, with_rows, NOON_MS + after_ms) is due


def test_hours_are_deleted_once_a_day_by_runs_of_nothing_new() -> None:
    def kept_from(
        plan: Plan, complete_plan: Plan | None, keep_days: int | None, last_run: dict[str, Any] | None
    ) -> str:
        return maintenance.kept_from(plan, complete_plan, settings(keep_days=keep_days, window_h=1), last_run)

    last_run = {"kept_from": kept_from(PLAN, None, 2, None)}
    assert last_run["kept_from"] == "2027-01-13 12:00:00"
    later, next_day = (replace(PLAN, frozen_ms=NOON_MS + ms) for ms in (DAY_MS - HOUR_MS, DAY_MS))
    assert kept_from(later, IDLE_LAST, 2, last_run) == last_run["kept_from"]
    assert kept_from(next_day, IDLE_LAST, 2, last_run) == "2027-01-14 12:00:00"
    # The last run may have been killed before its maintenance; this one keeps fewer days; it has new records.
    assert kept_from(later, None, 2, last_run) == "2027-01-14 11:00:00"
    assert kept_from(later, IDLE_LAST, 1, last_run) == "2027-01-15 11:00:00"
    read = replace(later, logs=(replace(later.logs[0], end=10), *later.logs[1:]))
    assert kept_from(read, IDLE_LAST, 2, last_run) == "2027-01-14 11:00:00"
    assert kept_from(later, IDLE_LAST, None, last_run) == last_run["kept_from"]


@pytest.mark.parametrize(
    "error",
    [
        CannotRun("topic 'other.ledger' does not exist"),
        AnotherRun("another run is at work"),
        NeedsSpark("hours are classified"),
        PermissionError("_last_run.json"),
    ],
)
def test_whatever_ends_a_run_without_spark_is_left_to_spark_with_a_line_that_says_why(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, lines = tmp_path / "lake", list[str]()
    options = Options(lake=str(lake), report=str(tmp_path / "report"))
    known = before_spark.known(replace(settings(), options=options), {})
    assert known is not None
    monkeypatch.setattr(last_run_file, "load_local", Mock(side_effect=error))
    # A first run has no last run to repeat.
    assert (idle.run(known, lines.append), lines) == (None, [])
    files.write_local(lake, last_run_file.FILE, ["{}"])
    assert (idle.run(known, lines.append), lines) == (None, [f"starting Spark: {error}"])
    assert not (tmp_path / "report").exists()


def test_a_lock_of_a_process_without_a_jvm_keeps_the_others_out(tmp_path: Path) -> None:
    with lock.held_locally(tmp_path, "lake"):
        pass
    program = """
import sys
from pathlib import Path
from spark.errors import AnotherRun
from spark.tables import lock
try:
    with lock.held_locally(Path(sys.argv[1]), "lake"):
        print("held")
except AnotherRun as error:
    print(error)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    with lock.held_locally(tmp_path, "lake"):
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT).stdout
    assert printed == "another run is at work on --lake lake; wait for it to end\n"


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("lake", "lake"),
        ("/data/lake", "/data/lake"),
        ("file:/data/lake", "/data/lake"),
        ("file:///data/lake", "/data/lake"),
        ("file:lake", None),
        ("file://host/lake", None),
        ("s3a://bucket/lake", None),
        ("hdfs:/lake", None),
    ],
)
def test_a_folder_is_local_by_its_path_or_as_a_file_url(url: str, folder: str | None) -> None:
    assert files.local_folder(url) == (None if folder is None else Path(folder))


def test_librdkafka_has_the_connection_of_kafka_clients_and_no_tokens() -> None:
    secured = SharedSettings(
        kafka="k:9093",
        kafka_security_protocol="SASL_SSL",
        kafka_sasl_mechanism="SCRAM-SHA-512",
        kafka_sasl_username="audit",
        kafka_sasl_password="secret",
        kafka_ssl_cafile="/ca.pem",
        kafka_ssl_check_hostname=False,
    )
    assert for_librdkafka(secured) == {
        "bootstrap.servers": "k:9093",
        "security.protocol": "SASL_SSL",
        "ssl.endpoint.identification.algorithm": "none",
        "ssl.ca.location": "/ca.pem",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "audit",
        "sasl.password": "secret",
    }
    tokens = replace(secured, kafka_sasl_mechanism="OAUTHBEARER", kafka_oauth_aws_region="eu-central-1")
    with pytest.raises(NeedsSpark):
        for_librdkafka(tokens)


def test_requests_that_only_a_changed_log_needs_are_left_to_spark() -> None:
    admin = LibrdkafkaAdmin(SharedSettings(kafka="127.0.0.1:1"))
    none: dict[tuple[str, int], Any] = {}
    assert [*admin.timestamps_at(none), *admin.blocking_transactions([]), *admin.diverged({})] == []
    for refused in (
        lambda: admin.timestamps_at({("t", 0): 1}),
        lambda: admin.blocking_transactions([("t", 0)]),
        lambda: admin.diverged({("t", 0): (1, 1)}),
    ):
        with pytest.raises(NeedsSpark):
            refused()
    # Topics that only new claims name are not listed, nor are their ends.
    assert (admin.describe(["t"], strict=False), admin.ends([("t", 0)], strict=False)) == ({}, {})


def test_a_run_is_finished_without_its_file(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    lake = Mock(root="/lake")
    lake.newest_commit.return_value = Commit("id", None)
    lake.own_commit.return_value = "id"
    run = last_run_file.LastRun({}, [], [], None)
    written = Mock(side_effect=[None, PySparkException("disk full")])
    monkeypatch.setattr(files, "write", written)
    last_run_file.store(lake, run)
    assert not caplog.records
    last_run_file.store(lake, run)
    assert written.call_count == 2
    assert "/lake/_last_run.json was not written" in caplog.text
    # A process that has lost the lake has not finished its run.
    lake.check_held.side_effect = CannotRun("taken over")
    with pytest.raises(CannotRun):
        last_run_file.store(lake, run)
