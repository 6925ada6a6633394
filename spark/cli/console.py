"""The progress of a run: a line that is updated on a terminal, elsewhere log lines."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final, TextIO

from pyspark.sql import SparkSession

REFRESH_S: Final = 0.5
_CLEAR: Final = "\r\x1b[K"


class Console:
    """Prints each line of progress (`step_timer.OnProgress`)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._started = time.monotonic()
        self._writing = threading.Lock()
        self._step = ""

    def __call__(self, line: str) -> None:
        """Print a line of progress; on a terminal the next lines of task counts name it as the current step."""
        self._step = line
        if self._terminal:
            self._write(f"{_CLEAR}{self._elapsed()}  {line}\n")
        else:
            now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            self._write(f"{now} INFO {line}\n")

    @contextmanager
    def watching(self, spark: SparkSession) -> Iterator[None]:
        """Show the number of finished Spark tasks in the context, on a terminal only."""
        if not self._terminal:
            yield
            return
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(spark, ended), name="progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            self._write(_CLEAR)

    def _watch(self, spark: SparkSession, ended: threading.Event) -> None:
        tracker = spark.sparkContext.statusTracker()
        while not ended.wait(REFRESH_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            done = sum(stage.numCompletedTasks for stage in stages if stage)
            tasks = sum(stage.numTasks for stage in stages if stage)
            if tasks:
                self._write(f"{_CLEAR}{self._elapsed()}  {self._step}: {done} of {tasks} tasks")

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started:6.1f}s"

    def _write(self, text: str) -> None:
        with self._writing:
            self._stream.write(text)
            self._stream.flush()
