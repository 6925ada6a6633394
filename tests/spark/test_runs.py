"""Tests runs after one another: each counts once, also after interruptions."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import unittest.mock
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import pytest
from confluent_kafka import Producer
from pyspark.sql import Row, SparkSession

from deploy import places
from deploy.stack import Kafka
from service.contract import SharedSettings
from service.contract.wire.names import ledger_topic
from spark import job
from spark.__main__ import main
from spark.engine.jvm import checkpointed_ids
from spark.errors import AnotherRun, CannotRun
from spark.follow import Follower
from spark.reading import planning, source
from spark.reading.kafka_admin import KafkaAdmin
from spark.reading.librdkafka_admin import LibrdkafkaAdmin
from spark.reading.run_plan import Plan
from spark.report import document, publish, terminal
from spark.rules import balance
from spark.rules.classify import CATEGORIES
from spark.settings import Options, Settings, Webhook
from spark.silences import Silence
from spark.steps import finished_runs, maintenance
from spark.tables import files, hours, last_run_file, lock, schemas, view
from spark.tables.lake import Lake
from spark.without_spark import before_spark, idle, small_run
from tests.kubernetes.alerting import NOTHING, Scrape, check_metrics, parse
from tests.kubernetes.alerting import Rules as AlertRules
from tests.kubernetes.rendering import HERE, Rendered, render
from tests.spark.conftest import Audit
from tests.spark.history import OTHER_WRITER, TIMEOUT_S, WRITER, History
from tests.spark.layouts import without_version
from tests.spark.receiver import Receiver, receiving
from tests.spark.runs import Cut, Ran, cut, run, run_idle, settings_of
from tests.spark.test_classify import plan as a_plan
from tests.spark.times import DAY_S, HOUR_MS, LATER_S

MINUTE_S, HOUR_S = 60, 3600


def _two_stages(history: History) -> None:
    """Write events that are clean for the first run; `_second_stage` adds faults to the same ids and hours."""
    history.topic(f"{history.namespace}-t", 2)
    producer = history.transactional(WRITER)
    history.deliver(producer, WRITER, f"{history.namespace}-t", [f"k-{n}" for n in range(50)], value=b'"$key"')


def _second_stage(history: History) -> None:
    topic = f"{history.namespace}-t"
    producer = history.transactional(OTHER_WRITER)
    history.deliver(producer, OTHER_WRITER, topic, [f"k-{n}" for n in range(5, 12)], value=b'"$key"')
    history.deliver(producer, OTHER_WRITER, topic, [f"k-{n}" for n in range(45, 60)], value=b'"changed"')
    history.send(history.plain, topic, ["k-1", "k-1", "k-2"], WRITER, value=b'"$key"', partition=1)
    history.raw(history.plain, topic, b"no key")
    history.raw(history.plain, ledger_topic(history.namespace), b"no entry")


# Options of a run of nothing new that cannot do without Spark.
NEEDING_SPARK: Final[tuple[dict[str, Any], ...]] = (
    {"publish": True},
    {"grace_s": 7200},
    {"topics": ("*",)},
    {"keep_days": 1},
    {"vacuum_h": 24},
    {"follow": True},
    {"silences": (Silence("lost:*", 2**42, "known"),)},
)


class Stages(NamedTuple):
    """Both stages: the history, the run after each, and the folder of a lake with only the first.

    `again` is a run with nothing new after the first stage, `idle` one without Spark on the lake of `whole`.
    """

    history: History
    first: Ran
    again: Ran
    idle: Ran
    whole: Ran
    clean: Path

    def lake(self, name: str) -> str:
        """Copy that lake under this name; returns the name."""
        shutil.copytree(self.clean, self.clean.with_name(name))
        return name


@pytest.fixture(scope="module")
def stages(kafka: Kafka, audit: Audit) -> Stages:
    history = History(kafka.bootstrap, f"t-{uuid.uuid4().hex[:12]}")
    _two_stages(history)
    first = audit(history, later_s=LATER_S)
    assert first.made.status == 0
    clean = first.lake.with_name("clean")
    shutil.copytree(first.lake, clean)
    shutil.copytree(clean, clean.with_name("again"))
    again = audit(history, later_s=2 * LATER_S, lake="again")
    later_ms = int((time.time() + 2 * LATER_S) * 1000)
    idle = run_idle(history, first.lake.parent, later_ms - int((LATER_S - 10 * MINUTE_S) * 1000))
    assert idle is not None
    shutil.copytree(again.lake, again.lake.with_name("without-spark"))
    assert run_idle(history, first.lake.parent, later_ms, lake="without-spark") is not None
    for needs_spark in NEEDING_SPARK:
        assert run_idle(history, first.lake.parent, later_ms, lake="again", **needs_spark) is None, needs_spark
    _second_stage(history)
    # An open transaction.
    lasting = {"transactional.id": f"{history.namespace}-foreign", "transaction.timeout.ms": 600_000}
    hanging = Producer({"bootstrap.servers": history.bootstrap, **lasting})
    hanging.init_transactions(TIMEOUT_S)
    hanging.begin_transaction()
    history.raw(hanging, f"{history.namespace}-t", b"no end", 1, headers=[("idempotency-key", b"z")])
    whole = audit(history, later_s=LATER_S + 20 * MINUTE_S)
    hanging.abort_transaction(TIMEOUT_S)
    return Stages(history, first, again, idle, whole, clean)


@pytest.fixture(scope="module")
def alert_rules(tmp_path_factory: pytest.TempPathFactory) -> AlertRules:
    return AlertRules(
        Rendered("prod", render(HERE / "overlays" / "prod")), "fencepost-audit", tmp_path_factory.mktemp("a")
    )


def _metrics_of(ran: Ran) -> Scrape:
    """Make the scrape of some seconds after a run."""
    text = (ran.report / "metrics.prom").read_text()
    frozen = parse(text, 0, {}).value("fencepost_audit_frozen_timestamp_seconds")
    assert frozen is not None
    return parse(text, frozen + 5, {"namespace": "fencepost"})


def test_the_audits_alerts_fire_on_the_metrics_of_runs(stages: Stages, alert_rules: AlertRules) -> None:
    healthy, found = _metrics_of(stages.first), _metrics_of(stages.whole)
    assert check_metrics((stages.first.report / "metrics.prom").read_text()) == ""
    alert_rules.assert_firing([], healthy, (healthy, healthy), HOUR_S)
    # No run comes any more; or its report is not served.
    alert_rules.assert_firing(["FencepostAuditLate"], healthy, (healthy, healthy), 3 * HOUR_S)
    alert_rules.assert_firing(["FencepostAuditLate"], healthy, (NOTHING, NOTHING), 30 * MINUTE_S)
    # Copies, a record without a key, and an open transaction.
    assert found.value("fencepost_audit_held_up_partitions") == 1
    alerts = ["FencepostDuplicatesOrLossesStand", "FencepostAuditFindings", "FencepostPartitionStandsStill"]
    alert_rules.assert_firing([*alerts, "FencepostDuplicatesOrLosses"], healthy, (found, found), 10 * MINUTE_S)
    alert_rules.assert_firing(alerts, healthy, (found, found), 90 * MINUTE_S)  # the findings are not new any more


def test_the_file_of_the_last_run_repeats_what_the_tables_say(spark: SparkSession, stages: Stages) -> None:
    for folder in (stages.clean, stages.again.lake, stages.whole.lake):
        lake = Lake(spark, str(folder))
        kept = last_run_file.load(lake)
        assert kept is not None
        assert kept.finished == finished_runs.last_finished_run(lake)
        number = kept.finished["run"]
        rows = lake.read("progress").where(f"run = {number}").collect()
        stored, plan = (Plan.from_rows(found) for found in ([row.asDict(recursive=True) for row in rows], kept.plan))
        assert stored is not None
        assert plan is not None
        assert stored.logs_by_partition == plan.logs_by_partition
        assert dataclasses.replace(stored, logs=()) == dataclasses.replace(plan, logs=())
    # After any other commit the tables are read.
    for name in ("hourly_balance", "hourly_records", "progress", "runs"):
        lake = Lake(spark, str(stages.clean.with_name(stages.lake(f"after-{name}"))))
        lake.append(name, lake.read(name).limit(0), 9)
        assert last_run_file.load(lake) is None
    lake = Lake(spark, str(stages.clean.with_name(stages.lake("damaged"))))
    for damaged in ("", "{", "[]", '{"version": 1}', '{"version": 2}'):
        files.write(spark, lake.root, last_run_file.FILE, [damaged])
        assert last_run_file.load(lake) is None


def test_a_run_of_nothing_new_skips_steps_and_ends_with_the_same_report(spark: SparkSession, stages: Stages) -> None:
    first, again = stages.first.document, stages.again.document
    skipped = first["cost"]["seconds"].keys() - again["cost"]["seconds"].keys()
    assert {"classify ids", "compare ids", "settle doubts", "write findings", "write verdicts"} <= skipped
    assert (first["run"]["number"], again["run"]["number"]) == (1, 2)
    assert again["balance"]["delivered_once"] == 50
    for part in ("balance", "topics", "kinds", "causes", "map", "timeline", "findings", "verdicts", "requests"):
        assert again[part] == first[part], part
    lakes = [Lake(spark, str(folder)) for folder in (stages.clean, stages.again.lake)]
    for name, of_run in (("deliveries", 0), ("findings", 0), ("verdicts", 0), ("runs", 1)):
        before, after = (lake.read(name).count() for lake in lakes)
        assert after == before + of_run, name


def test_a_run_without_spark_repeats_the_last_run_and_the_next_one_stores_it(
    spark: SparkSession, stages: Stages
) -> None:
    idle, again = stages.idle.document, stages.again.document
    assert idle.keys() == again.keys()
    assert (idle["run"]["number"], idle["cost"]["offsets"], stages.idle.made.status) == (2, 0, 0)
    same = idle.keys() - {"run", "cost", "history"}
    assert {name: idle[name] for name in same} == {name: again[name] for name in same}
    of_time = {"frozen_at", "window_from", "lake"}
    assert {name: idle["run"][name] for name in idle["run"].keys() - of_time} == {
        name: again["run"][name] for name in again["run"].keys() - of_time
    }
    assert [run["number"] for run in idle["history"]] == [2, 1]
    for name in ("report.html", "report.json", "metrics.prom"):
        assert (stages.idle.report / name).stat().st_size > 0
    assert json.loads((stages.idle.report / "report.json").read_text()) == idle
    # Not with what has come since.
    assert run_idle(stages.history, stages.clean.parent, int(time.time() * 1000), lake=stages.lake("not-idle")) is None
    # The run after it has found it, and has added its row.
    whole = stages.whole.document
    assert [run["number"] for run in whole["history"]] == [3, 2, 1]
    rows = Lake(spark, str(stages.whole.lake)).read("runs").select("run", "frozen_ms").collect()
    assert {row["run"] for row in rows} == {1, 2, 3}


def test_kafka_is_asked_once_about_a_run_that_needs_spark(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(stages.history, stages.clean.parent, stages.lake("asked-once"), "", {})
    known = before_spark.known(settings, {})
    assert known is not None
    lines: list[str] = []
    assert idle.run(known, lines.append) is None
    assert len(lines) == 1, "it needs Spark"
    asked = unittest.mock.Mock(side_effect=AssertionError("asked again"))
    for request in ("names", "describe", "ends"):
        monkeypatch.setattr(LibrdkafkaAdmin, request, asked)
    assert small_run.is_small(known)
    assert known.admin.listed.keys() >= {(ledger_topic(settings.shared.namespace), slot) for slot in range(4)}


def test_both_clients_of_kafka_give_the_same_answers(spark: SparkSession, stages: Stages) -> None:
    shared = SharedSettings(kafka=stages.history.bootstrap, namespace=stages.history.namespace)
    topic, ledger = f"{shared.namespace}-t", ledger_topic(shared.namespace)
    one = LibrdkafkaAdmin(shared)
    with closing(KafkaAdmin(spark, shared)) as other:
        topics = one.describe([topic, ledger, "none"])
        assert topics == other.describe([topic, ledger, "none"])
        assert topics.keys() == {topic, ledger} <= set(one.names())
        assert one.compacted([topic, ledger]) == other.compacted([topic, ledger])
        partitions = planning.partitions_of(topics.values())
        ends = one.ends(partitions)
        assert ends == dict(other.ends(partitions))
        assert ends[topic, 1].high_watermark > 0


class Step(NamedTuple):
    """A step of a run, before or after which the run is cut off; `only` is the table of the step. A run that is cut off
    there has `posted` to the webhook. A `long` one is left to the long test: a later step is cut off in its place, and
    the resumed run repeats both."""

    owner: Any
    name: str
    after: bool = True
    only: str | None = None
    posted: bool = False
    long: bool = False


# In this order: one lake goes through all of them, run after run.
CUTS: Final = (
    Step(Lake, "append_once", only="progress"),
    # The second of the two fences before a plan.
    Step(view, "of_topics", long=True),
    Step(planning, "freeze", after=False, long=True),
    Step(planning, "check_read", after=False),
    Step(Lake, "merge"),
    # The view of a topic is registered, and has no table yet.
    Step(view.View, "advance", after=False, long=True),
    Step(view.View, "advance"),
    Step(Lake, "append_once", only="rejects", long=True),
    Step(Lake, "replace", only="findings"),
    Step(Lake, "append_once", only="verdicts", long=True),
    Step(document, "write", posted=True, long=True),
    Step(Lake, "replace", only="hourly_balance", posted=True),
    Step(Lake, "append_once", after=False, only="runs", posted=True, long=True),
)


@pytest.fixture
def receiver() -> Iterator[tuple[Receiver, Webhook]]:
    with receiving() as found:
        yield found


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every"])
def test_a_run_that_is_resumed_after_any_step_ends_with_the_same_report(
    spark: SparkSession,
    stages: Stages,
    audit: Audit,
    monkeypatch: pytest.MonkeyPatch,
    receiver: tuple[Receiver, Webhook],
    *,
    every: bool,
) -> None:
    history, whole = stages.history, stages.whole
    assert whole.document["balance"] == {
        "accepted": 60,
        "delivered_once": 50 - 2 - 7 - 5 + 10,
        "duplicated": 2 + 7,
        "conflicted": 5,
        "lost": 0,
        "pending": 0,
        "stuck": 0,
        "unprovable": 0,
        "phantom": 0,
        "records": 50 + 7 + 15 + 3,
    }
    text = terminal.text_of(whole.made, "somewhere")
    assert "accepted 60 = delivered_once 46  duplicated 9  conflicted 5" in text
    assert "duplicate/foreign_writer" in text
    assert "somewhere/report.html" in text
    name = f"cut-{every}"
    cut_lake, whole_lake = (whole.lake.with_name(each) for each in (name, f"whole-{every}"))
    stages.lake(name)
    made, hook = receiver
    shutil.copytree(whole.lake, whole_lake)
    shared, topic = SharedSettings(kafka=history.bootstrap, namespace=history.namespace), f"{history.namespace}-t"
    with cut(monkeypatch, view.View, "advance", after=False):
        view.register(spark, shared, str(cut_lake), topic)
    assert not (cut_lake / view.FOLDER).exists()
    without_version(spark, cut_lake)
    steps = [step for step in CUTS if every or not step.long]
    for step in steps:
        with cut(monkeypatch, step.owner, step.name, after=step.after, only=step.only):
            audit(history, later_s=LATER_S, lake=name, webhook=hook)
        if step.only == "progress":
            # This run has fenced the interrupted one, when it finds that it cannot make a plan.
            with pytest.raises(CannotRun, match="matches no topic"):
                audit(history, lake=name, topics=("mistyped",))
    again = audit(history, later_s=2 * LATER_S, lake=name, webhook=hook)
    # Sent by some interrupted runs, and by the last run: one request for its receiver.
    sent = 1 + sum(step.posted for step in steps)
    assert (len(made.received), len({key for _, key, _ in made.received})) == (sent, 1)
    # Runs 2 and 3 were interrupted before their merge, and replaced.
    assert (again.document["run"]["resumed"], again.document["run"]["number"]) == (True, 4)
    assert again.written() == whole.written()
    # The sums that the lake of an earlier release had in its summary are right.
    assert not again.document["run"]["recounted"]
    assert view.register(spark, shared, str(whole_lake), topic) == 60
    views = [
        {(bytes(row["id"]), row["partition"], row["offset"]) for row in _view(spark, root, topic)}
        for root in (cut_lake, whole_lake)
    ]
    assert views[0] == views[1]
    assert _balance_by_sql(spark, cut_lake) == _balance_by_sql(spark, whole_lake) == whole.document["balance"]
    for table in ("rejects", "findings", "verdicts", "hourly_balance", "hourly_records"):
        rows = [Lake(spark, str(ran.lake)).read(table) for ran in (whole, again)]
        assert rows[0].count() == rows[1].count() > 0, table


def _view(spark: SparkSession, root: Path, topic: str) -> list[Row]:
    return spark.read.format("delta").load(f"{root}/{view.FOLDER}/{topic}").collect()


def _balance_by_sql(spark: SparkSession, root: Path) -> dict[str, int]:
    """Sum up the hours as spark/README.md says."""
    names = ("accepted", *CATEGORIES, "phantom", "records")
    sums = ", ".join(f"sum({name}) AS {name}" for name in names)
    counted_run = f"SELECT max_by(counted_run, run) FROM delta.`{root}/runs`"
    (row,) = spark.sql(f"SELECT {sums} FROM delta.`{root}/hourly_balance` WHERE run = ({counted_run})").collect()
    return row.asDict()


@pytest.mark.long
def test_a_run_that_replaces_interrupted_runs_writes_its_own_rows(
    spark: SparkSession, history: History, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = history.topic(f"{history.namespace}-t", 1)
    producer = history.transactional(WRITER)
    (there,) = history.deliver(producer, WRITER, topic, ["there"])
    history.answers([there.answer(id=b"l" * 16, offset=1000)])
    first = audit(history, later_s=LATER_S, grace_s=7200)
    assert first.document["balance"]["pending"] == 1
    # Without new records, so that nothing is merged: interrupted twice, with other options each time.
    for grace_s in (7200, 7201):
        with cut(monkeypatch, Lake, "replace", after=True, only="findings"):
            audit(history, later_s=LATER_S, grace_s=grace_s)
    last = audit(history, later_s=LATER_S)
    assert last.findings() == {("lost", "answer", None)}
    assert (last.document["run"]["number"], last.document["run"]["resumed"]) == (4, False)
    lake = Lake(spark, str(last.lake))
    assert {row["run"] for row in lake.read("runs").collect()} == {1, 4}
    assert lake.read("verdicts").where("verdict = 'lost'").count() == 1


@pytest.mark.long
def test_the_run_after_an_interrupted_one_drops_the_expired_hours(
    spark: SparkSession, stages: Stages, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = stages.lake("expired")
    with cut(monkeypatch, maintenance, "carry_out", after=False):
        audit(stages.history, later_s=3 * DAY_S, lake=name, keep_days=1)
    last = audit(stages.history, later_s=3 * DAY_S + LATER_S, lake=name, keep_days=1)
    assert (last.document["run"]["number"], last.document["run"]["resumed"]) == (3, False)
    assert (last.findings(), last.document["balance"]["accepted"]) == (set(), 0)
    assert Lake(spark, str(last.lake)).read("deliveries").isEmpty()


# A process that holds a file as the JVM of another run does, until its standard input ends.
HOLDER = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_on_a_lake_that_another_process_holds_exits_with_2(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "lake"
    root.mkdir()
    monkeypatch.setattr("spark.__main__.open_session", lambda **_: spark)
    monkeypatch.setattr("sys.argv", ["spark", "--lake", str(root), "--report", str(tmp_path / "report")])
    monkeypatch.setenv("FENCEPOST_KAFKA", "127.0.0.1:1")
    command = [sys.executable, "-c", HOLDER, str(root / "_lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert main() == 2
    assert f"cannot run: another run is at work on --lake {root}" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


@pytest.mark.long
def test_a_run_that_is_killed_holds_the_lake_until_then_and_is_taken_up(
    stages: Stages, audit: Audit, tmp_path: Path
) -> None:
    history, whole = stages.history, stages.whole
    killed = whole.lake.with_name("killed")
    environment = {
        **os.environ,
        "FENCEPOST_KAFKA": history.bootstrap,
        "FENCEPOST_NAMESPACE": history.namespace,
        "FENCEPOST_JARS": str(places.jars("spark")),
    }
    command = [sys.executable, "-m", "spark", "--lake", str(killed), "--report", str(tmp_path / "report")]
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(command, env=environment, cwd=places.ROOT, stderr=err)
        try:
            _wait_for(lambda: "offsets to read" in (tmp_path / "err").read_text(), process)
            with pytest.raises(AnotherRun, match="another run is at work on --lake"):
                audit(history, lake="killed")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    # The JVM ends when its driver has ended; until then it may write, and so it holds the lock of the lake.
    again = _patiently(lambda: audit(history, lake="killed"))
    assert again.document["run"]["number"] == 1
    assert again.findings() == whole.findings()
    assert again.document["balance"] == whole.document["balance"]


def _wait_for(there: Any, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert process.poll() is None, "the job ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _patiently(run: Any) -> Ran:
    deadline = time.monotonic() + 30
    while True:
        try:
            ran: Ran = run()
        except AnotherRun:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        else:
            return ran


def test_a_lake_is_held_by_one_run_at_a_time(spark: SparkSession, tmp_path: Path) -> None:
    root = str(tmp_path / "lake")
    with lock.held(spark, root), pytest.raises(AnotherRun, match="another run"), lock.held(spark, root):
        pass
    with lock.held(spark, root):
        pass
    (tmp_path / "file").touch()
    below = f"{tmp_path}/file/lake"
    with pytest.raises(CannotRun, match=r"Not a directory.*; set a folder that this"), lock.held(spark, below):
        pass


@pytest.mark.long
def test_capped_runs_end_with_the_same_findings_and_report_nothing_lost_before(
    stages: Stages, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, whole = stages.history, stages.whole
    # A run that is too large is killed before its merge; the next one has a limit.
    with cut(monkeypatch, job._Run, "_merge", after=False):
        audit(history, later_s=LATER_S, lake="capped")
    for number in range(1, 6):
        part = audit(history, later_s=LATER_S, lake="capped", max_records=45)
        assert {kind for kind, _, _ in part.findings()} <= {"duplicate", "conflict", "unkeyed", "evidence_gap"}
        if part.document["run"]["caught_up"]:
            break
        assert part.document["balance"]["pending"] > 0 or number > 1
    assert number > 1
    assert part.document["run"]["caught_up"]
    assert part.findings() == whole.findings()
    assert part.document["balance"] == whole.document["balance"]


def test_a_long_span_is_divided_among_tasks_that_read_each_record_once(spark: SparkSession, stages: Stages) -> None:
    """Spans begin and end at markers and aborted records too."""
    topic = f"{stages.history.namespace}-t"
    shared = SharedSettings(kafka=stages.history.bootstrap)
    with closing(KafkaAdmin(spark, shared)) as admin:
        ends = admin.ends([(topic, 0), (topic, 1)])
    spans = {partition: (found.log_start, found.last_stable) for partition, found in ends.items()}
    whole, divided = (source.read(spark, shared, spans, tasks=tasks) for tasks in (None, 9))
    read = [sorted(map(tuple, one.select("partition", "offset", "value").collect())) for one in (whole, divided)]
    assert read[0] == read[1]
    assert len(read[0]) > 60
    assert (whole.rdd.getNumPartitions(), divided.rdd.getNumPartitions() >= 9) == (2, True)


def _files(folder: Path) -> dict[Path, float]:
    return {path: path.stat().st_mtime for path in folder.rglob("*")}


def test_turns_in_one_session_find_what_runs_find_and_write_nothing_without_a_reason(
    spark: SparkSession, stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, steps, kept = stages.clean.with_name(stages.lake("followed")), list[str](), checkpointed_ids(spark)
    shared = SharedSettings(kafka=stages.history.bootstrap, namespace=stages.history.namespace)
    options = Options(lake=str(folder), report=str(tmp_path), publish=False, follow=True)
    # The following minutes lie in one hour.
    now_ms = int((time.time() + LATER_S + 20 * MINUTE_S) * 1000)
    left_ms = HOUR_MS - now_ms % HOUR_MS
    if left_ms < 15 * MINUTE_S * 1000:
        now_ms += left_ms

    def follower() -> Follower:
        return Follower(spark, lambda: Settings(shared=shared, options=options), lambda line: None, steps.append)

    # Killed when the last run's records are merged and judged: another process goes on.
    with cut(monkeypatch, job._Run, "_finish", after=False):
        follower().turn(now_ms)
    following = follower()
    reason, finished = following.turn(now_ms + MINUTE_S * 1000)
    assert finished is not None
    document = finished.report.document
    assert (reason, document["run"]["number"], document["run"]["resumed"]) == ("start", 2, True)
    assert Ran(finished.report, folder, tmp_path).written() == stages.whole.written()
    # At rest Spark reads nothing, and nothing is written.
    before, taken = _files(folder), len(steps)
    for minute in range(2, 6):
        assert following.turn(now_ms + minute * MINUTE_S * 1000) == (None, None)
    assert (_files(folder), len(steps)) == (before, taken)
    # Turns leave no checkpoint in memory.
    assert checkpointed_ids(spark) <= kept
    # What the decision takes for the last run is what the next process reads.
    lake = Lake(spark, str(folder))
    read = finished_runs.last_finished_run(lake)
    assert read is not None
    assert finished.last_run == {name: value for name, value in read.items() if name != "reports"}
    # Another process has begun a run.
    lake.append("progress", lake.read("progress").limit(0), 3)
    monkeypatch.setattr(job, "finish_run", unittest.mock.Mock(side_effect=Cut))
    with pytest.raises(Cut):
        following.turn(now_ms + 7 * MINUTE_S * 1000)


def test_a_missing_ledger_or_an_unreachable_kafka_is_reported_in_a_line(
    history: History, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = History.__new__(History)
    away.bootstrap, away.namespace = history.bootstrap, f"{history.namespace}-not-there"
    with pytest.raises(CannotRun, match=r"not-there\.ledger' does not exist.*FENCEPOST_NAMESPACE"):
        audit(away)
    monkeypatch.setattr("spark.reading.kafka_admin.CALL_MS", 1000)
    away.bootstrap = "127.0.0.1:1"
    with pytest.raises(CannotRun, match=r"FENCEPOST_KAFKA='127.0.0.1:1' did not answer"):
        audit(away)


def test_a_lake_is_of_one_namespace(
    spark: SparkSession, stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another namespace's ledger, all records in the lake would be phantoms."""
    history, topic = stages.history, f"{stages.history.namespace}-t"
    other = History(history.bootstrap, f"{history.namespace}-other")
    now_ms = history.now_ms + int(LATER_S * 1000)
    # Before its merge a run leaves nothing that belongs to its namespace; after it the lake does.
    with cut(monkeypatch, job._Run, "_merge", after=False):
        run(spark, other, tmp_path, now_ms, topics=(topic,))
    with cut(monkeypatch, job._Run, "_merge", after=True):
        run(spark, history, tmp_path, now_ms)
    of_history = rf"of namespace '{history.namespace}', not '{other.namespace}'.*FENCEPOST_NAMESPACE"
    for lake_of_history in ("lake", str(stages.clean)):
        with pytest.raises(CannotRun, match=of_history):
            run(spark, other, tmp_path, now_ms, lake=lake_of_history)


def test_a_topic_that_fails_does_not_hide_the_other_topics_of_a_call(
    spark: SparkSession, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = history.topic(f"{history.namespace}-t", 2)
    with closing(KafkaAdmin(spark, SharedSettings(kafka=history.bootstrap))) as broker:
        places = [(topic, 0), ("not-there", 0), (topic, 1)]
        assert broker.ends(places, strict=False).keys() == {(topic, 0), (topic, 1)}
        with pytest.raises(CannotRun, match=r"refused a request: .*UnknownTopicOrPartition"):
            broker.ends(places)
        monkeypatch.setattr(broker, "names", lambda: [topic, "not-there"])
        assert broker.describe([topic, "not-there"], strict=False).keys() == {topic}
        with pytest.raises(CannotRun, match="UnknownTopicOrPartition"):
            broker.describe([topic, "not-there"])


def test_the_first_records_of_logs_are_read_also_past_transaction_markers(
    spark: SparkSession, history: History
) -> None:
    topic = history.topic(f"{history.namespace}-t", 2)
    producer = history.transactional(WRITER)
    (one,) = history.deliver(producer, WRITER, topic, ["one"])
    with closing(KafkaAdmin(spark, SharedSettings(kafka=history.bootstrap))) as broker:
        # The other partition is empty.
        assert broker.timestamps_at({(topic, 0): 0, (topic, 1): 0}) == {(topic, 0): one.ts}
        # The offset of the transaction's marker, and the end of the log.
        assert broker.timestamps_at({(topic, 0): one.offset + 1}) == {}
        assert broker.timestamps_at({(topic, 0): one.offset + 2}) == {}
        (two,) = history.deliver(producer, WRITER, topic, ["two"], ts=one.ts + 1)
        assert broker.timestamps_at({(topic, 0): one.offset + 1}) == {(topic, 0): two.ts}


def test_the_time_of_a_run_is_that_of_its_plan_also_after_another_run_in_the_process(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that is recreated while an interrupted run is finished would count as complete since before."""
    clock_s, planned_at = [1_700_000_000], []

    def freeze(admin: Any, settings: Settings, last_plan: Any, now_ms: int, *more: Any) -> Any:
        planned_at.append(now_ms)
        raise Cut

    monkeypatch.setattr(planning, "freeze", freeze)
    monkeypatch.setattr(planning, "time", SimpleNamespace(time=lambda: clock_s[0]))

    def finish_interrupted(self: Any) -> Any:
        if self.finished_first is not None:
            return carry_out(self)
        # The interrupted run had other options, and finishing it took an hour.
        clock_s[0] += 3600
        return SimpleNamespace(plan=SimpleNamespace(run=7), settings=None)

    carry_out = job._Run.carry_out
    monkeypatch.setattr(job._Run, "carry_out", finish_interrupted)
    settings = Settings(shared=SharedSettings(), options=Options(lake=str(tmp_path / "lake"), report=str(tmp_path)))
    with pytest.raises(Cut):
        job.run(spark, settings, lambda line: None)
    assert planned_at == [1_700_003_600_000]


def test_a_run_whose_number_another_run_has_used_for_its_plan_stops(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found the same last run, since one of them paused for longer than its lease; Delta skips the second plan."""
    lake, ours = Lake(spark, str(tmp_path)), a_plan()

    def freeze(*_: Any) -> Plan:
        theirs = dataclasses.replace(ours, frozen_ms=ours.frozen_ms - 1)
        lake.append_once("progress", spark.createDataFrame(theirs.rows(), schemas.of("progress")), ours.run)
        return ours

    monkeypatch.setattr(planning, "freeze", freeze)
    options = Options(lake=str(tmp_path), report=str(tmp_path), publish=False)
    settings = Settings(shared=SharedSettings(kafka="127.0.0.1:1"), options=options)
    with pytest.raises(CannotRun, match=rf"run {ours.run} was taken over by another run on --lake {tmp_path}"):
        job.run(spark, settings, lambda line: None)


def test_a_balance_that_does_not_close_is_counted_again(spark: SparkSession, stages: Stages, audit: Audit) -> None:
    """The sums of earlier hours are carried over from the last run."""
    name = stages.lake("recounted")
    lake = Lake(spark, str(stages.clean.with_name(name)))
    # An hour that this run does not classify.
    hour = hours.at(hours.text_of(stages.history.now_ms - 5 * HOUR_S * 1000))
    wrong = {"run": 1, "accepted_hour": hour, "topic": "t", "is_adjustment": False, "accepted": 1}
    lake.append_unnumbered("hourly_balance", spark.createDataFrame([wrong], schemas.of("hourly_balance")))
    ran = audit(stages.history, later_s=LATER_S, lake=name)
    assert ran.document["run"]["recounted"]
    assert not stages.whole.document["run"]["recounted"]
    assert ran.written() == stages.whole.written()


@pytest.mark.long
def test_a_balance_that_does_not_close_fails_the_report(
    stages: Stages, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = stages.lake("balance")
    monkeypatch.setattr(balance, "by_topic", lambda hours: {"t": {"accepted": 2, "delivered_once": 1}})
    published = unittest.mock.Mock()
    monkeypatch.setattr(publish, "publish", published)
    with pytest.raises(CannotRun, match="the balance does not close: accepted 2, delivered_once 1"):
        audit(stages.history, later_s=LATER_S, lake=name)
    published.assert_not_called()
