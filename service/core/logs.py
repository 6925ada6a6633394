"""Logging to standard error, as JSON lines or for a console; one line for each incident, and keys hashed.

A thread writes the lines: nobody may read standard error (`kubectl logs` stalls, a supervisor hangs), and a full pipe
would block the event loop.
"""

import io
import logging
import math
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import structlog

# The shortest time between two lines of one kind of failure whose text changes.
CHANGED_PAUSE_S: Final = 10.0
# Bytes of lines that wait for standard error, each with LINE_BYTES for its objects: further lines are dropped.
WAITING_BYTES_MAX: Final = 4 * 1024 * 1024
LINE_BYTES: Final = 100
# How long the end of a process waits until the last lines are written.
LAST_LINES_S: Final = 2.0


class Incident:
    """Repeated failures of one operation: a log line for each kind of failure until it succeeds, not for each try.

    A failure of the same kind with another text may have another cause: it is logged too, at most every
    `CHANGED_PAUSE_S`.
    """

    def __init__(self, log: Any, event: str, now: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._event = event
        self._now = now
        self._kinds: dict[type[Exception], tuple[str, float]] = {}  # by kind: the last text logged, and when
        self._since = 0.0
        self._times = 0

    def add(self, error: Exception, *, bug: bool = False, **fields: Any) -> None:
        """Count a failure, and log it if its kind or text is new; for a `bug` with its traceback."""
        now = self._now()
        if not self._kinds:
            self._since, self._times = now, 0
        self._times += 1
        why = str(error) or type(error).__name__
        last, logged_at = self._kinds.get(type(error), ("", -math.inf))
        if why != last and now >= logged_at + CHANGED_PAUSE_S:
            self._kinds[type(error)] = why, now
            self._log.warning(self._event, **fields, why=why, exc_info=error if bug else None)

    def end(self) -> dict[str, Any]:
        """End the incident after a success; returns log fields that sum up its failures, none without any."""
        if not self._kinds:
            return {}
        self._kinds.clear()
        return {"failures": self._times, "failing_s": round(self._now() - self._since, 3)}


class ThreadedHandler(logging.Handler):
    """Hands lines to a thread, which writes them to a file descriptor, so that no caller waits for the descriptor.

    Lines that do not fit into WAITING_BYTES_MAX are dropped, and counted in the next line that fits. A forked process
    has a thread of its own, from its first line on; the lines that wait at the fork are the parent's.

    The module logging.handlers has QueueHandler and QueueListener for this. But the listener's `stop` waits without a
    bound, and needs a place in the queue; and a bounded queue.Queue would wait for its own lock where a finalizer logs
    that garbage collection runs amid a `put`.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._begin()

    def _begin(self) -> None:
        """Begin without a thread and without lines."""
        self._process = os.getpid()
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None ends the thread
        self._thread: threading.Thread | None = None
        # The thread alone changes the first two; the others are changed under the handler's lock.
        self._written_bytes = self._failed = 0
        self._taken_bytes = self._refused = self._reported = 0

    @property
    def dropped(self) -> int:
        """How many lines were dropped, or could not be written, since the start of the process or its fork."""
        return self._refused + self._failed

    def emit(self, record: logging.LogRecord) -> None:
        """Hand over the line of a record."""
        try:
            self.write(self.format(record))
        except Exception:
            self.handleError(record)

    def write(self, text: str) -> None:
        """Hand over a line as it is."""
        assert self.lock is not None
        with self.lock:  # reentrant
            if self._process != os.getpid():
                self._begin()
            line = _encoded(text)
            waiting = self._taken_bytes - self._written_bytes
            if waiting + len(line) + LINE_BYTES > WAITING_BYTES_MAX:
                self._refused += 1
                return
            if self._thread is None and not self._start():
                self._write_at_the_end(line)
                return
            if (dropped := self.dropped) > self._reported:
                line = _encoded(self.format(_lines_dropped(dropped - self._reported))) + line
                self._reported = dropped
            self._taken_bytes += len(line) + LINE_BYTES
            self._lines.put(line)

    def _start(self) -> bool:
        """Start the thread; false at the end of the interpreter, when none starts any more."""
        if sys.is_finalizing():  # Python 3.11 would wait for ever
            return False
        thread = threading.Thread(target=self._write_lines, args=(self._lines,), name="log", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _write_at_the_end(self, line: bytes) -> None:
        """Write a line of the interpreter's end, such as that of a finalizer, if the descriptor takes it at once."""
        try:
            _write_all(self._descriptor, line, 0.0)
        except OSError:
            self._refused += 1

    def _write_lines(self, lines: "queue.SimpleQueue[bytes | None]") -> None:
        while (line := lines.get()) is not None:
            try:
                _write_all(self._descriptor, line)
            except OSError:  # the reader is gone, or the disk is full: later lines may succeed
                self._failed += 1
            self._written_bytes += len(line) + LINE_BYTES

    def close(self) -> None:
        """Write what waits, within LAST_LINES_S, and end the thread; a later line starts another."""
        thread, self._thread = self._thread, None
        if thread is not None and self._process == os.getpid():
            self._lines.put(None)
            thread.join(LAST_LINES_S)
        super().close()


def _encoded(text: str) -> bytes:
    return f"{text}\n".encode(errors="backslashreplace")


def _lines_dropped(count: int) -> logging.LogRecord:
    text = "lines of this log were dropped: nobody read it in time"
    return logging.makeLogRecord(
        {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text, "lines": count}
    )


def _write_all(descriptor: int, line: bytes, wait_s: float | None = None) -> None:
    """Write a line, and wait where nobody reads, for ever or for `wait_s` seconds. Raises OSError."""
    part = len(line) if wait_s is None else select.PIPE_BUF  # a pipe that can be written to takes as much at once
    while line:
        if wait_s is not None and not select.select((), (descriptor,), (), wait_s)[1]:
            raise TimeoutError
        try:
            line = line[os.write(descriptor, line[:part]) :]
        except BlockingIOError:  # who started the process has made the descriptor non-blocking
            select.select((), (descriptor,), ())


def stderr_handler() -> logging.Handler:
    """Make the handler for standard error; one without a descriptor is in memory, and blocks nobody."""
    try:
        return ThreadedHandler(sys.stderr.fileno())
    except (AttributeError, io.UnsupportedOperation):  # closed when the process began; replaced by a test
        return logging.StreamHandler()


def _threaded() -> list[ThreadedHandler]:
    return [each for each in logging.getLogger().handlers if isinstance(each, ThreadedHandler)]


def dropped_lines() -> int:
    """Return how many lines the log of this process has lost."""
    return sum(each.dropped for each in _threaded())


def last_line(text: str) -> None:
    """Write a line of plain text after those of the log, before the process ends; logging.shutdown waits for all."""
    for handler in _threaded():
        handler.write(text)
        return
    sys.stderr.write(f"{text}\n")


def configure_logging(form: str, keys: str) -> None:
    """Configure logging by the settings `log_format` and `log_keys`; libraries log from WARNING up.

    An idempotency key is in the field `key` of a line; hashed, it is the event's id, as in the report. At the
    end of the process, logging.shutdown writes the lines that wait.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    to_console = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if to_console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            *shared,
            *([] if keys == "plain" else [hash_key]),
            structlog.processors.format_exc_info,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = stderr_handler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(["lines"]), structlog.processors.format_exc_info],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("service").setLevel(logging.INFO)
    # aiokafka logs each disconnect at ERROR; the slot logs once what it means for events.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


def hash_key(_: Any, __: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Replace a line's `key` by the event's `id`, which the ledger and the report have too (a structlog processor)."""
    if "key" in line:
        line["key"] = f"id:{line.pop('id', None)}"
    return line
