"""Logging to standard error, as JSON lines or for a console; one line for each incident, and keys hashed."""

import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import structlog

# The shortest time between two lines of one kind of failure whose text changes.
CHANGED_PAUSE_S: Final = 10.0


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


def configure_logging(form: str, keys: str) -> None:
    """Configure logging by the settings `log_format` and `log_keys`; libraries log from WARNING up.

    An idempotency key is in the field `key` of a line; hashed, it is the event's id, as in the report.
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
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
            foreign_pre_chain=[*shared, structlog.processors.format_exc_info],
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
