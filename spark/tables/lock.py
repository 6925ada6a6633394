"""The lock that lets one run at a time work on a lake."""

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

from delta.tables import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark.errors import AnotherRun, CannotRun
from spark.reading import wire_expressions
from spark.reading.jvm import Py4JJavaError, jvm
from spark.tables import files

# A killed run keeps a lake on an object store locked for this long. The drivers' clocks may differ by half of that.
LEASE_S: Final = 120.0
RENEWALS: Final = 4
"""How often a lease is renewed in its time: three renewals in a row may fail."""

TABLE: Final = "lease"
"""The table of the lease in the lake."""

_LEASE: Final = "name string, token string, holder string, until_ms bigint"


@contextmanager
def held(spark: SparkSession, root: str) -> Iterator[None]:
    """Hold the lock of the lake at `root`; AnotherRun if another process holds that lock.

    On a local disk the JVM locks a file: the operating system releases that lock when the JVM dies, and not before its
    last writing thread has ended. Elsewhere the lock is a lease: a row in a Delta table, and Delta lets only one of two
    concurrent commits succeed. If a run outlives its lease, the next run either resumes it, so that both write with the
    same transaction number (`txnVersion`) and Delta skips the second write, or fences it (`Lake.fence`) before it plans
    the same records again.
    """
    path = files.local(spark, root)
    with _locked(spark, root, path) if path is not None else _leased(spark, root):
        yield


@contextmanager
def _locked(spark: SparkSession, root: str, path: str) -> Iterator[None]:
    """Hold a lock on the file `_lock` in a local folder."""
    java = jvm(spark).java
    folder = java.io.File(path)
    folder.mkdirs()
    file = java.io.RandomAccessFile(java.io.File(folder, "_lock"), "rw")
    try:
        lock = None
        try:
            lock = file.getChannel().tryLock()
        except Py4JJavaError as error:
            if "OverlappingFileLockException" not in str(error.java_exception.toString()):
                raise
        if lock is None:
            raise AnotherRun(f"another run is at work on --lake {root}; wait for it to end")
        yield
    finally:
        file.close()


@contextmanager
def _leased(spark: SparkSession, root: str) -> Iterator[None]:
    """Hold the lease, renewed by a thread; a lost lease cancels Spark's jobs and raises CannotRun."""
    lease = Lease(spark, root)
    lease.acquire()
    ended = threading.Event()
    lost = threading.Event()

    def renew() -> None:
        while not ended.wait(LEASE_S / RENEWALS):
            try:
                lease.acquire()
            except AnotherRun:
                lost.set()
                spark.sparkContext.cancelAllJobs()
                return
            except (PySparkException, Py4JJavaError):
                continue  # the next renewal may succeed

    keeper = threading.Thread(target=renew, name="lease", daemon=True)
    keeper.start()
    taken_over = CannotRun(f"another run took over --lake {root}: this run did not renew its lease in time")
    try:
        yield
        if lost.is_set():  # when no job of Spark's was running, which the loss would have cancelled
            raise taken_over
    except (PySparkException, Py4JJavaError) as error:
        if lost.is_set():
            raise taken_over from error
        raise
    finally:
        ended.set()
        keeper.join()
        if not lost.is_set():
            lease.release()


class Lease:
    """The row that names the run that holds a lake, and until when. Each commit to the row is a compare-and-set."""

    def __init__(self, spark: SparkSession, root: str, seconds: float = LEASE_S) -> None:
        # A session of its own: the settings of a run's commits must not apply to the commits of the lease.
        self._spark = spark.newSession()
        self._root = root
        self._path = f"{root}/{TABLE}"
        self._token = uuid.uuid4().hex
        self._holder = f"{socket.gethostname()}, process {os.getpid()}"
        self._ms = int(seconds * 1000)

    def acquire(self) -> None:
        """Acquire or renew the lease; AnotherRun if another process holds the lease."""
        self._commit(int(time.time() * 1000) + self._ms)
        row = self._spark.read.format("delta").load(self._path).collect()[0]
        if row["token"] != self._token:
            until = datetime.fromtimestamp(row["until_ms"] / 1000, UTC).strftime("%H:%M:%S UTC")
            raise AnotherRun(
                f"another run is at work on --lake {self._root} ({row['holder']}); wait for it to end, or, if it "
                f"was killed, until {until}"
            )

    def release(self) -> None:
        """Expire the lease, so that the next run can begin at once."""
        self._commit(0)

    def _commit(self, until_ms: int) -> None:
        row = {"name": "run", "token": self._token, "holder": self._holder, "until_ms": until_ms}
        rows = wire_expressions.rows_of(self._spark, _LEASE, [row])
        try:
            if not DeltaTable.isDeltaTable(self._spark, self._path):
                rows.write.format("delta").save(self._path)
                return
            free = f"old.token = '{self._token}' OR old.until_ms < {int(time.time() * 1000)}"
            (
                DeltaTable.forPath(self._spark, self._path)
                .alias("old")
                .merge(rows.alias("new"), F.expr("old.name = new.name"))
                .whenMatchedUpdateAll(F.expr(free))
                .whenNotMatchedInsertAll()
                .execute()
            )
        except (PySparkException, Py4JJavaError) as error:
            # After a conflict another commit came first; the caller reads from the row which process holds the lease.
            if not _is_conflict(error):
                raise


def _is_conflict(error: Exception) -> bool:
    """Check whether a Delta commit failed because a concurrent commit came first."""
    message = str(error)
    return any(
        name in message for name in ("Concurrent", "DELTA_CONCURRENT", "DELTA_PATH_EXISTS", "PATH_ALREADY_EXISTS")
    )
