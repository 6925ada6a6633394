"""Tests what a lake refuses, its file systems, and its lock. Over time: test_changing_logs.py."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from deploy import places
from deploy.install import java
from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER
from service.contract.wire.names import ledger_topic
from spark.engine.jvm import Py4JJavaError, hadoop_configuration
from spark.engine.session import INTERPRETED
from spark.errors import AnotherRun, CannotRun
from spark.reading import decode
from spark.tables import lake, lock
from tests.spark.conftest import Audit, Ran
from tests.spark.history import WRITER, History
from tests.spark.runs import BRIEF_JAVA_OPTIONS


@pytest.mark.parametrize("part", ["ledger", "header"])
def test_an_older_job_refuses_the_records_of_a_newer_service_and_merges_nothing(
    spark: SparkSession, history: History, audit: Audit, tmp_path: Path, part: str
) -> None:
    topic = history.topic(f"{history.namespace}-t")
    history.send(history.plain, topic, ["own"], None)
    if part == "ledger":
        history.raw(history.plain, ledger_topic(history.namespace), b'{"v":3}')
        what = f"{ledger_topic(history.namespace)}[0]@0 is a ledger record of version 3"
    else:
        history.raw(history.plain, topic, b"x", headers=[(STAMP_HEADER, b"2;x"), (KEY_HEADER, b"k")])
        what = f"{topic}[0]@1 is a record with a fencepost header of version 2"
    with pytest.raises(CannotRun, match=f"^{re.escape(what)}, which a newer release has written: "):
        audit(history, topics=(topic,), lake=str(tmp_path / "lake"))
    assert not lake.Lake(spark, str(tmp_path / "lake")).exists("deliveries")


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("kye", "kye"),
        ("key +", "Syntax error"),
        ("count(*)", "count"),
        ("explode(headers)", "explode"),
        ("cast(rand() as string)", "another id each time"),
    ],
)
def test_a_wrong_expression_stops_the_start(spark: SparkSession, expression: str, why: str) -> None:
    with pytest.raises(CannotRun, match=r"^--identity t='[^\n]*$") as caught:
        decode.check_identities(spark, {"good": "cast(key as string)", "t": expression})
    assert why in str(caught.value)


@pytest.mark.parametrize("root", ["s3://bucket/lake", "S3N://bucket/lake", "oss://bucket/lake", "/lake"])
def test_a_lake_where_two_runs_could_both_commit_is_refused_before_it_is_opened(spark: SparkSession, root: str) -> None:
    """A folder without a scheme lies on Hadoop's default file system."""
    configuration = hadoop_configuration(spark)
    before = configuration.get("fs.defaultFS")
    configuration.set("fs.defaultFS", "cosn://bucket")
    try:
        with (
            pytest.raises(CannotRun, match=r"^--lake [^\n]* begins with file:, [^\n]* or s3a:$"),
            lock.held(spark, root),
        ):
            pass
    finally:
        configuration.set("fs.defaultFS", before)


def test_a_lake_on_s3_without_the_jars_for_it_is_refused(spark: SparkSession) -> None:
    with (
        pytest.raises(CannotRun, match=r"^--lake s3a:[^\n]* lacks the jars for S3; python -m deploy\.[^\n]*$"),
        lock.held(spark, "s3a://bucket/lake"),
    ):
        pass


@pytest.fixture
def elsewhere(spark: SparkSession, tmp_path: Path) -> str:
    """Return a folder that is not local for Hadoop."""
    name = f"{tmp_path.name.replace('_', '-')}".lower()
    spark.sparkContext._jsc.hadoopConfiguration().set(f"fs.viewfs.mounttable.{name}.link./data", tmp_path.as_uri())
    return f"viewfs://{name}/data/lake"


def test_a_lake_elsewhere_is_leased_to_one_run_at_a_time(spark: SparkSession, elsewhere: str) -> None:
    with (
        lock.held(spark, elsewhere),
        pytest.raises(AnotherRun, match=r"another run .* until \d\d:"),
        lock.held(spark, elsewhere),
    ):
        pass
    with lock.held(spark, elsewhere):
        pass
    # The killed run does not release the lease, which must expire.
    killed = lock.Lease(spark, elsewhere, seconds=0)
    killed.acquire()
    heir = lock.Lease(spark, elsewhere)
    heir.acquire()
    heir.renew()
    heir.check_held()
    with pytest.raises(AnotherRun):
        killed.acquire()
    heir.release()
    lock.Lease(spark, elsewhere).acquire()


def test_a_lease_that_another_run_had_in_the_meantime_is_lost(
    spark: SparkSession, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that run has ended: it may have planned and merged the same records."""
    paused, heir = lock.Lease(spark, elsewhere, seconds=0), lock.Lease(spark, elsewhere)
    paused.acquire()
    heir.acquire()
    heir.release()
    with pytest.raises(CannotRun, match="another run took over"):
        paused.check_held()
    paused.renew()
    paused.release()
    assert paused.is_lost

    # A renewal that is late, since other jobs occupied the executors, is made up for; one that fails is not.
    late = lock.Lease(spark, elsewhere)
    late.acquire()
    # The machine was suspended: `monotonic` stood still, and the time of day shows that the lease may have expired.
    suspended_s = time.time() + lock.LEASE_S / 2 + 1
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: suspended_s)
        patch.setattr(late, "renew", lambda: None)
        with pytest.raises(CannotRun, match="another run took over"):
            late.check_held()
        patch.undo()
        patch.setattr(time, "time", lambda: suspended_s)
        late.check_held()
    clock_s = time.monotonic() + lock.LEASE_S / 2 + 1
    monkeypatch.setattr(time, "monotonic", lambda: clock_s)
    late.check_held()
    clock_s += lock.LEASE_S / 2 + 1
    monkeypatch.setattr(late, "renew", lambda: None)
    with pytest.raises(CannotRun, match="another run took over"):
        late.check_held()


def _lose_lease(
    monkeypatch: pytest.MonkeyPatch, check_held: lock.CheckHeld, then: Callable[[], None] = lambda: None
) -> None:
    """Let the next renewal of the held lease find another run's, wait for it, and call `then`."""
    lost = threading.Event()

    def taken_over(lease: lock.Lease) -> None:
        lease.is_lost = True
        lost.set()

    monkeypatch.setattr(lock.Lease, "renew", taken_over)
    assert lost.wait(30)
    with pytest.raises(CannotRun, match="did not renew its lease in time"):
        check_held()
    then()


def test_a_run_whose_lease_was_taken_over_while_no_job_ran_does_not_end_well(
    spark: SparkSession, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LEASE_S", 0.3)
    with pytest.raises(CannotRun, match="did not renew its lease in time"), lock.held(spark, elsewhere) as check_held:
        _lose_lease(monkeypatch, check_held)


def test_the_jobs_of_a_run_whose_lease_was_taken_over_are_cancelled_however_many_the_driver_starts(
    spark: SparkSession, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LEASE_S", 0.3)

    def start_jobs() -> None:
        for _ in range(2):
            with pytest.raises((PySparkException, Py4JJavaError), match="cancelled"):
                spark.range(10**10).selectExpr("sum(id % 7)").collect()

    with pytest.raises(CannotRun, match="did not renew its lease in time"), lock.held(spark, elsewhere) as check_held:
        _lose_lease(monkeypatch, check_held, start_jobs)


def test_a_lease_that_cannot_be_released_does_not_fail_a_finished_run(
    spark: SparkSession, elsewhere: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(lease: lock.Lease) -> None:
        raise PySparkException("no space left")

    monkeypatch.setattr(lock.Lease, "release", fail)
    with lock.held(spark, elsewhere):
        pass
    assert "was not released, and expires within 120 s: no space left" in caplog.text


@pytest.mark.long
def test_the_job_runs_under_spark_submit_on_a_cluster_with_a_remote_lake(
    history: History, audit: Audit, tmp_path: Path
) -> None:
    topic = history.topic(f"{history.namespace}-t", 2)
    producer = history.transactional(WRITER)
    history.deliver(producer, WRITER, topic, [f"k-{n}" for n in range(20)])
    history.send(history.plain, topic, ["k-3"], None, partition=1)
    here = audit(history)
    folder = places.jars("spark")
    # The workers of a local cluster write to Spark's own folder.
    home = tmp_path / "spark"
    home.mkdir()
    for part in Path(pyspark.__path__[0]).iterdir():
        (home / part.name).symlink_to(part)
    settings = {
        **INTERPRETED,
        "spark.driver.extraJavaOptions": BRIEF_JAVA_OPTIONS,
        "spark.executor.extraJavaOptions": BRIEF_JAVA_OPTIONS,
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.hadoop.fs.viewfs.mounttable.far.link./data": tmp_path.as_uri(),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    command = [str(home / "bin" / "spark-submit"), "--master", "local-cluster[2,1,1024]"]
    command += ["--jars", ",".join(map(str, sorted(folder.glob("*.jar"))))]
    command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    command += [
        "deploy/kubernetes/spark-main.py",
        "--lake",
        "viewfs://far/data/lake",
        "--report",
        "viewfs://far/data/report",
    ]
    environment = {
        **places.hermetic_environment(),
        **java.environment(),
        "FENCEPOST_KAFKA": history.bootstrap,
        "FENCEPOST_NAMESPACE": history.namespace,
        "PYTHONPATH": str(places.ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        command, env=environment, cwd=places.ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == here.made.status == 3, done.stderr[-3000:]
    there = Ran(here.made, tmp_path / "lake", tmp_path / "report")
    assert there.written() == here.written()
    # spark-submit writes both outputs of a driver in Python to standard output.
    lines = [line for line in done.stdout.splitlines() if " INFO run 1: " in line]
    assert len(lines) == 1, "where nobody looks on, progress is lines of a log"
