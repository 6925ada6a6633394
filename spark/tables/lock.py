"""One run at a time on a lake."""

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

# A run that was killed holds a lake on an object store for this long. Clocks of drivers may be apart by half of it.
LEASE_S: Final = 120.0
RENEWALS: Final = 4
"""How often a lease is renewed in its time: three in a row may fail."""

TABLE: Final = "lease"
"""The table that has it, in the lake."""

_LEASE: Final = "name string, token string, holder string, until_ms bigint"


@contextmanager
def held(spark: SparkSession, root: str) -> Iterator[None]:
    """Hold the lake at `root`, AnotherRun where somebody does.

    On a local disk the JVM locks a file: the system takes the lock back when the JVM dies, however it dies, and not
    before the last thread that may still write is gone. Elsewhere there is a lease, a row in a Delta table: only one
    of two commits at once goes through. Should a run outlive its lease, it meets the other in Delta's log: the numbers
    of their transactions are the same, and one of them is left out.
    """
    path = files.local(spark, root)
    with _locked(spark, root, path) if path is not None else _leased(spark, root):
        yield


@contextmanager
def _locked(spark: SparkSession, root: str, path: str) -> Iterator[None]:
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
    lease = Lease(spark, root)
    lease.take()
    ended = threading.Event()
    lost = threading.Event()

    def renew() -> None:
        while not ended.wait(LEASE_S / RENEWALS):
            try:
                lease.take()
            except AnotherRun:
                lost.set()
                spark.sparkContext.cancelAllJobs()
                return
            except (PySparkException, Py4JJavaError):
                continue  # the next one may go through

    keeper = threading.Thread(target=renew, name="lease", daemon=True)
    keeper.start()
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        if lost.is_set():
            raise CannotRun(f"another run took --lake {root} over: this one was not heard of for too long") from error
        raise
    finally:
        ended.set()
        keeper.join()
        if not lost.is_set():
            lease.give_back()


class Lease:
    """The row that says who holds a lake, and until when. Each of its commits is a compare-and-set."""

    def __init__(self, spark: SparkSession, root: str, seconds: float = LEASE_S) -> None:
        # A session of its own: what a run sets for its own commits must not reach these.
        self._spark = spark.newSession()
        self._root = root
        self._path = f"{root}/{TABLE}"
        self._token = uuid.uuid4().hex
        self._holder = f"{socket.gethostname()}, process {os.getpid()}"
        self._ms = int(seconds * 1000)

    def take(self) -> None:
        """Have the lease, or have it for longer; AnotherRun where somebody else does."""
        self._commit(int(time.time() * 1000) + self._ms)
        row = self._spark.read.format("delta").load(self._path).collect()[0]
        if row["token"] != self._token:
            until = datetime.fromtimestamp(row["until_ms"] / 1000, UTC).strftime("%H:%M:%S UTC")
            raise AnotherRun(
                f"another run is at work on --lake {self._root} ({row['holder']}); wait for it to end, or, where it "
                f"was killed, until {until}"
            )

    def give_back(self) -> None:
        """Let the next run begin at once."""
        self._commit(0)

    def _commit(self, until_ms: int) -> None:
        row = {"name": "run", "token": self._token, "holder": self._holder, "until_ms": until_ms}
        mine = wire_expressions.rows_of(self._spark, _LEASE, [row])
        try:
            if not DeltaTable.isDeltaTable(self._spark, self._path):
                mine.write.format("delta").save(self._path)
                return
            free = f"there.token = '{self._token}' OR there.until_ms < {int(time.time() * 1000)}"
            (
                DeltaTable.forPath(self._spark, self._path)
                .alias("there")
                .merge(mine.alias("new"), F.expr("there.name = new.name"))
                .whenMatchedUpdateAll(F.expr(free))
                .whenNotMatchedInsertAll()
                .execute()
            )
        except (PySparkException, Py4JJavaError) as error:
            # Somebody else's commit came first: whose it is, the row tells.
            if not _beaten(error):
                raise


def _beaten(error: Exception) -> bool:
    message = str(error)
    return any(
        name in message for name in ("Concurrent", "DELTA_CONCURRENT", "DELTA_PATH_EXISTS", "PATH_ALREADY_EXISTS")
    )
