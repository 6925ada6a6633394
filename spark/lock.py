"""One run at a time on a lake."""

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from spark import files
from spark.errors import AnotherRun
from spark.jvm import Py4JJavaError, jvm


@contextmanager
def held(spark: SparkSession, root: str) -> Iterator[None]:
    """Hold the lake at `root`, AnotherRun where somebody does.

    On a local disk the JVM locks a file: the system takes the lock back when the JVM dies, however it dies, and not
    before the last thread that may still write is gone. Elsewhere two runs at once meet in Delta's log: the numbers
    of their transactions are the same, and one of them is refused.
    """
    path = files.local(spark, root)
    if path is None:
        yield
        return
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
