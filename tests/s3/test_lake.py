"""Tests a lake on S3: what the job refuses, its lock, a suspended run, and whole runs."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from deploy import places
from deploy.install import java
from service.contract import Rules, SharedSettings
from spark import job
from spark.engine import frames, jars
from spark.engine.session import INTERPRETED
from spark.errors import AnotherRun, CannotRun
from spark.settings import Options, Settings
from spark.tables import files, lock, schemas, stores, view
from spark.tables.lake import Lake
from tests.s3 import BUCKET
from tests.s3.server import Server
from tests.spark.conftest import Audit, Ran
from tests.spark.history import History, Writer
from tests.spark.runs import BRIEF_JAVA_OPTIONS

# Whole runs: the limit of 600 s is for tests of ./tests/run. On a loaded machine three whole runs took longer, and the
# signal at the limit left py4j out of step for the tests that followed.
pytestmark = pytest.mark.timeout(1800)

ONE = Writer(0, 100, 0, "a:1")


def test_a_server_without_conditional_writes_is_refused(spark: SparkSession, server: Server, lake: str) -> None:
    stores.check(spark, lake)
    stores.check(spark, lake)
    server.ignores_conditions = True
    try:
        with pytest.raises(CannotRun, match=r"^--lake s3a:[^\n]* the server ignores If-None-Match [^\n]*$"):
            stores.check(spark, lake)
    finally:
        server.ignores_conditions = False


def test_a_bucket_that_is_not_there_is_one_line(spark: SparkSession, server: Server) -> None:
    with pytest.raises(CannotRun, match=r"^--lake s3a://nowhere/lake: [^\n]*NoSuchBucketException[^\n]*$"):
        stores.check(spark, "s3a://nowhere/lake")


def test_a_lake_on_s3_is_leased_to_one_run_at_a_time(spark: SparkSession, lake: str) -> None:
    with (
        lock.held(spark, lake),
        pytest.raises(AnotherRun, match=r"another run .* until \d\d:"),
        lock.held(spark, lake),
    ):
        pass
    killed = lock.Lease(spark, lake, seconds=0)
    killed.acquire()
    heir = lock.Lease(spark, lake)
    heir.acquire()
    with pytest.raises(AnotherRun):
        killed.acquire()


def test_two_runs_that_acquire_the_lease_at_once_are_told_apart(spark: SparkSession, lake: str, server: Server) -> None:
    """The lease is there and has expired; both have read this."""
    lock.Lease(spark, lake, seconds=0).acquire()
    rivals = [lock.Lease(spark, lake), lock.Lease(spark, lake)]

    def acquire(lease: lock.Lease) -> bool:
        try:
            lease.acquire()
        except AnotherRun:
            return False
        return True

    with ThreadPoolExecutor(2) as threads, server.holding(_object(lake, lock.TABLE, 1), 2) as held:
        results = [threads.submit(acquire, lease) for lease in rivals]
        held.wait()
        held.release()
        assert sorted(result.result(60) for result in results) == [False, True]


def test_a_suspended_run_whose_number_was_fenced_does_not_commit(
    spark: SparkSession, lake: str, server: Server
) -> None:
    suspended, heir = Lake(spark, lake), Lake(spark.newSession(), lake)
    rows = frames.rows_of(spark, schemas.of("rejects"), [{"run": 2, "topic": "t", "count": 1}])
    heir.append_once("rejects", rows, 1)
    with ThreadPoolExecutor(1) as threads, server.holding(_object(lake, "rejects", 1)) as held:
        result = threads.submit(suspended.append_once, "rejects", rows, 2)
        held.wait()
        heir.fence(["rejects"], 2)
        held.release()
        with pytest.raises(PySparkException, match="DELTA_CONCURRENT_TRANSACTION"):
            result.result(60)
    assert heir.read("rejects").count() == 1


def _object(lake: str, table: str, version: int) -> str:
    """Return the name of a version's object in Delta's log."""
    return f"{lake.removeprefix(f's3a://{BUCKET}/')}/{table}/_delta_log/{version:020}.json"


def test_a_report_on_s3_is_there_at_every_moment(spark: SparkSession, lake: str, server: Server) -> None:
    """It is replaced in one step, and not by an incomplete one."""
    name = f"{lake.removeprefix(f's3a://{BUCKET}/')}/report.html"
    files.write(spark, lake, "report.html", ["first"])
    with pytest.raises(ZeroDivisionError):
        files.write(spark, lake, "report.html", (str(1 // number) for number in (1, 0)))
    assert server.get(name) == b"first"
    files.write(spark, lake, "report.html", ["sec", "ond"])
    assert server.get(name) == b"second"
    assert (server.count("PUT", name), server.count("DELETE", name)) == (2, 0)


def test_runs_on_s3_find_what_they_find_in_a_folder(
    spark: SparkSession, history: History, audit: Audit, lake: str, server: Server, tmp_path: Path
) -> None:
    """By the command, then in this process with a view, compaction, and deletion of files."""
    topic = _deliver(history, 0)
    here = audit(history)
    _run_command(history, lake, server, tmp_path)
    assert _reported(here, lake, server, tmp_path) == here.written()
    _deliver(history, 1)
    here = audit(history, optimize=True, vacuum_h=1)
    _run_here(spark, history, lake, topic)
    assert _reported(here, lake, server, tmp_path) == here.written()
    assert spark.read.format("delta").load(f"{lake}/{view.FOLDER}/{topic}").count() == 40


def test_a_run_under_spark_submit_finds_on_s3_what_it_finds_in_a_folder(
    history: History, audit: Audit, lake: str, server: Server, tmp_path: Path
) -> None:
    """Executors have processes and class paths of their own."""
    _deliver(history, 0)
    here = audit(history)
    _run_command(history, lake, server, tmp_path, "--optimize", "--vacuum-h", "1", submitted=True)
    assert _reported(here, lake, server, tmp_path) == here.written()


def _deliver(history: History, number: int) -> str:
    """Write 20 events and a copy of one of them into the history's topic, and return the topic."""
    topic = f"{history.namespace}-t"
    if number == 0:
        history.topic(topic, 2)
    history.deliver(history.transactional(ONE), ONE, topic, [f"k-{number}-{n}" for n in range(20)])
    history.send(history.plain, topic, [f"k-{number}-3"], None, partition=1)
    return topic


def _reported(here: Ran, lake: str, server: Server, folder: Path) -> str:
    """Return findings and balance of the report on S3."""
    report = server.get(f"{lake.removeprefix(f's3a://{BUCKET}/')}-report/report.json")
    assert report is not None
    (folder / "report.json").write_bytes(report)
    return Ran(here.made, folder, folder).written()


def _run_here(spark: SparkSession, history: History, lake: str, topic: str) -> None:
    """Make a view of the topic, then run the job on two cores."""
    shared = SharedSettings(kafka=history.bootstrap, namespace=history.namespace)
    assert view.register(spark, shared, lake, topic) == 20
    options = Options(lake=lake, report=f"{lake}-report", publish=False, optimize=True, vacuum_h=1)
    settings = Settings(shared=shared, options=options, rules=Rules())
    job.run(spark, settings, lambda line: None, int(time.time() * 1000))


def _run_command(
    history: History, lake: str, server: Server, folder: Path, *options: str, submitted: bool = False
) -> None:
    """Run the job in a process of its own; `submitted`: by spark-submit, on executors with the jars of the driver."""
    settings = {
        **{f"spark.hadoop.{name}": value for name, value in server.settings().items()},
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    environment = {
        **places.hermetic_environment(),
        **java.environment(),
        "FENCEPOST_KAFKA": history.bootstrap,
        "FENCEPOST_NAMESPACE": history.namespace,
        "FENCEPOST_JARS": str(places.jars("spark")),
        "PYTHONPATH": str(places.ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [sys.executable, "-m", "spark"]
    if submitted:
        # The workers of a local cluster write to Spark's own folder.
        home = folder / "spark"
        home.mkdir()
        for part in Path(pyspark.__path__[0]).iterdir():
            (home / part.name).symlink_to(part)
        environment["SPARK_HOME"] = str(home)
        settings |= INTERPRETED | {
            "spark.driver.extraJavaOptions": BRIEF_JAVA_OPTIONS,
            "spark.executor.extraJavaOptions": BRIEF_JAVA_OPTIONS,
            "spark.sql.shuffle.partitions": "2",
            "spark.databricks.delta.snapshotPartitions": "1",
        }
        paths = [*jars.find(environment), *jars.find_s3(environment)]
        command = [str(home / "bin" / "spark-submit"), "--master", "local-cluster[2,1,1024]"]
        command += ["--jars", ",".join(map(str, paths)), "deploy/kubernetes/spark-main.py"]
    configuration = folder / "conf"
    configuration.mkdir()
    (configuration / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    environment["SPARK_CONF_DIR"] = str(configuration)
    command += ["--lake", lake, "--report", f"{lake}-report", "--no-publish", *options]
    done = subprocess.run(
        command, env=environment, cwd=places.ROOT, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 3, done.stderr[-3000:]
