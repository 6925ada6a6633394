"""The log: JSON lines or a console's to standard error, one line an incident, and no key in the clear unless asked."""

import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import structlog

# A kind of failure whose text changes with each try has a line every so often.
CHANGED_PAUSE_S: Final = 10.0


class Incident:
    """Something that fails again and again: one line for each kind of failure until it goes well, not one a try.

    A failure of a known kind with another text is another cause: its line comes too, at most every `CHANGED_PAUSE_S`.
    """

    def __init__(self, log: Any, event: str, now: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._event = event
        self._now = now
        self._kinds: dict[type[Exception], tuple[str, float]] = {}  # what was told of each last, and when
        self._since = 0.0
        self._times = 0

    def add(self, error: Exception, *, bug: bool = False, **fields: Any) -> None:
        """It failed (again); a bug has its traceback in the line."""
        now = self._now()
        if not self._kinds:
            self._since, self._times = now, 0
        self._times += 1
        why = str(error) or type(error).__name__
        last, told_at = self._kinds.get(type(error), ("", -math.inf))
        if why != last and now >= told_at + CHANGED_PAUSE_S:
            self._kinds[type(error)] = why, now
            self._log.warning(self._event, **fields, why=why, exc_info=error if bug else None)

    def end(self) -> dict[str, Any]:
        """It went well: what the line that says so should tell of the failures before it; nothing without any."""
        if not self._kinds:
            return {}
        self._kinds.clear()
        return {"failures": self._times, "failing_s": round(self._now() - self._since, 3)}


def configure_logging(form: str, keys: str) -> None:
    """Set the log up by the settings `log_format` and `log_keys`; libraries speak from WARNING up.

    Where a line names an idempotency key, it is the field `key`; hashed, it is the event's id, as in the report.
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
    # aiokafka tells of each disconnect at ERROR; what it means for an event is told by the slot, once.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


def hash_key(_: Any, __: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A line's `key` becomes the event's `id`: enough to find it in the ledger and in the report."""
    if "key" in line:
        line["key"] = f"id:{line.pop('id', None)}"
    return line
