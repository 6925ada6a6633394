"""The lock that lets one run at a time work on a lake."""

import fcntl
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from delta.tables import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import Column, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark.engine import frames
from spark.engine.jvm import Py4JJavaError, jvm, reason
from spark.errors import AnotherRun, CannotRun
from spark.tables import files, stores

# A killed run keeps a lake on an object store locked for this long. The drivers' clocks may differ by half of that.
LEASE_S: Final = 120.0
RENEWALS: Final = 8
"""How often a lease is renewed in its time: within the half that a run counts on, three renewals in a row may fail."""

CANCEL_S: Final = 1.0
"""How often Spark's jobs are cancelled once the lease is lost: the driver may start further jobs."""

TABLE: Final = "lease"
"""The table of the lease in the lake."""

FILE: Final = "_lock"
"""The file of a lake in a local folder that a run locks."""

_LEASE: Final = "name string, token string, holder string, until_ms bigint"

_LOG: Final = logging.getLogger(__name__)

CheckHeld = Callable[[], None]
"""Raises CannotRun if this process does not hold the lake any more; called before each commit (`lake.Lake`)."""


def unchecked() -> None:
    """Check nothing: for a reader of a lake, and for a lock that cannot be lost."""


@contextmanager
def held(spark: SparkSession, root: str) -> Iterator[CheckHeld]:
    """Hold the lock of the lake at `root`; AnotherRun if another process holds it, CannotRun if the lake is not safe.

    On a `file:` path the JVM locks a file: the operating system releases that lock when the JVM dies, and not before
    its last writing thread has ended. On a mount of several machines this is as safe as its POSIX locks. Elsewhere the
    lock is a lease: a row in a Delta table, and Delta lets only one of two concurrent commits succeed. A run that
    outlives its lease fails at its next commit. A commit that was already under way is skipped by Delta, since the next
    run fences the interrupted run's number (`Lake.fence`) before it plans the same records again.
    """
    stores.check(spark, root)
    path = files.local(spark, root)
    with _locked(spark, root, path) if path is not None else _leased(spark, root) as check_held:
        yield check_held


@contextmanager
def _locked(spark: SparkSession, root: str, path: str) -> Iterator[CheckHeld]:
    """Hold a lock on the file `_lock` in a local folder."""
    java = jvm(spark).java
    folder = java.io.File(path)
    folder.mkdirs()
    try:
        file = java.io.RandomAccessFile(java.io.File(folder, FILE), "rw")
    except Py4JJavaError as error:
        raise CannotRun(f"--lake {root}: {reason(error)}; set a folder that this user may write to") from error
    try:
        lock = None
        try:
            lock = file.getChannel().tryLock()
        except Py4JJavaError as error:
            if "OverlappingFileLockException" not in str(error.java_exception.toString()):
                raise
        if lock is None:
            raise _at_work(root)
        yield unchecked
    finally:
        file.close()


@contextmanager
def held_locally(folder: Path, root: str) -> Iterator[None]:
    """Hold the lock of the lake at `root`, which is in this folder, without a JVM; AnotherRun if another process holds
    it. The lock is the same: Java's `FileChannel.tryLock` and `lockf` are both POSIX's lock of the whole file."""
    with (folder / FILE).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _at_work(root) from None
        yield


def _at_work(root: str) -> AnotherRun:
    return AnotherRun(f"another run is at work on --lake {root}; wait for it to end")


@contextmanager
def _leased(spark: SparkSession, root: str) -> Iterator[CheckHeld]:
    """Hold the lease, renewed by a thread; a lost lease cancels Spark's jobs and raises CannotRun."""
    lease = Lease(spark, root, LEASE_S)
    lease.acquire()
    ended = threading.Event()
    keeper = threading.Thread(target=_keep, args=(spark, lease, ended), name="lease", daemon=True)
    keeper.start()
    try:
        yield lease.check_held
        lease.check_held()
    except (PySparkException, Py4JJavaError) as error:
        if lease.is_lost:
            raise lease.taken_over() from error
        raise
    finally:
        ended.set()
        keeper.join()
        _release(lease)


def _keep(spark: SparkSession, lease: "Lease", ended: threading.Event) -> None:
    """Renew the lease until `ended`; once the lease is lost, cancel Spark's jobs."""
    while not ended.wait(CANCEL_S if lease.is_lost else lease.seconds / RENEWALS):
        with suppress(PySparkException, Py4JJavaError):  # the next renewal may succeed
            lease.renew()
        if lease.is_lost:
            spark.sparkContext.cancelAllJobs()


def _release(lease: "Lease") -> None:
    """Release the lease. A failure is logged, since the run has its outcome: the lease expires by itself."""
    try:
        lease.release()
    except (PySparkException, Py4JJavaError) as error:
        _LOG.warning("the lease of the lake was not released, and expires within %g s: %s", lease.seconds, error)


class Lease:
    """The row that names the run that holds a lake, and until when. Each commit to the row is a compare-and-set.

    `seconds` is how long the lease is valid after a renewal; `is_lost`: another run has taken the lease over.
    """

    def __init__(self, spark: SparkSession, root: str, seconds: float = LEASE_S) -> None:
        # A session of its own: the settings of a run's commits must not apply to the commits of the lease.
        self._spark = spark.newSession()
        self._root = root
        self._path = f"{root}/{TABLE}"
        self._token = uuid.uuid4().hex
        self._holder = f"{socket.gethostname()}, process {os.getpid()}"
        self.seconds = seconds
        self.is_lost = False
        self._renewing = threading.Lock()
        self._renewed_s = 0.0
        self._until_ms = 0

    def acquire(self) -> None:
        """Acquire the lease; AnotherRun if another process holds the lease."""
        row = self._commit(self.seconds, f"token = '{self._token}' OR until_ms < {_now_ms()}")
        if row["token"] != self._token:
            until = datetime.fromtimestamp(row["until_ms"] / 1000, UTC).strftime("%H:%M:%S UTC")
            raise AnotherRun(
                f"another run is at work on --lake {self._root} ({row['holder']}); wait for it to end, or, if it "
                f"was killed, until {until}"
            )

    def renew(self) -> None:
        """Renew the lease, unless another run has acquired it since, also if that run has ended."""
        with self._renewing:
            if not self.is_lost:
                self.is_lost = self._commit(self.seconds, f"token = '{self._token}'")["token"] != self._token

    def check_held(self) -> None:
        """Check that no other run can have acquired the lease; CannotRun otherwise.

        For half of its time after a renewal nothing is read: the drivers' clocks differ by less than the other half.
        A renewal may be late because other jobs occupy the executors, so a late lease is renewed here.
        """
        if self._is_late():
            self.renew()
        if self.is_lost or self._is_late():
            raise self.taken_over()

    def taken_over(self) -> CannotRun:
        """Return the error of a run that has lost its lease."""
        return CannotRun(f"another run took over --lake {self._root}: this run did not renew its lease in time")

    def release(self) -> None:
        """Expire the lease, so that the next run can begin at once; nothing is changed if another run has it."""
        self._commit(0, f"token = '{self._token}'")

    def _is_late(self) -> bool:
        """Check whether the half of the lease has passed by either clock: `monotonic` stands still while the machine is
        suspended, the time of day may be set back."""
        half_s = self.seconds / 2
        return time.monotonic() - self._renewed_s > half_s or _now_ms() > self._until_ms - half_s * 1000

    def _commit(self, seconds: float, condition: str) -> Row:
        """Write the row, valid for `seconds` (0: expired), if the present row meets a condition; return the row."""
        began_s = time.monotonic()
        until_ms = _now_ms() + int(seconds * 1000) if seconds else 0
        row = {"name": "run", "token": self._token, "holder": self._holder, "until_ms": until_ms}
        try:
            if DeltaTable.isDeltaTable(self._spark, self._path):
                # The commit that created the table wrote its only row.
                written: dict[str, str | Column] = {name: F.lit(value) for name, value in row.items()}
                DeltaTable.forPath(self._spark, self._path).update(condition, written)
            else:
                frames.rows_of(self._spark, _LEASE, [row]).write.format("delta").save(self._path)
        except (PySparkException, Py4JJavaError) as error:
            # After a conflict another commit came first; the row says which process holds the lease.
            if not _is_conflict(error):
                raise
        stored: Row = self._spark.read.format("delta").load(self._path).collect()[0]
        if (stored["token"], stored["until_ms"]) == (self._token, until_ms):
            self._renewed_s, self._until_ms = began_s, until_ms
        return stored


def _now_ms() -> int:
    return int(time.time() * 1000)


def _is_conflict(error: Exception) -> bool:
    """Check whether a Delta commit failed because a concurrent commit came first."""
    message = str(error)
    return any(
        name in message for name in ("Concurrent", "DELTA_CONCURRENT", "DELTA_PATH_EXISTS", "PATH_ALREADY_EXISTS")
    )
