"""Supervised background tasks: failures are logged and counted, and tasks that must go on are started again."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog

from service.core.logs import Incident
from service.core.metrics import Telemetry

log = structlog.get_logger(__name__)

# Between two starts of a task: short at first, as no deadline is answered meanwhile, then doubled, to save CPU.
PAUSE_LEAST_S: Final = 0.05
PAUSE_MOST_S: Final = 1.0
# A task that ran for so long has recovered from its last failure.
CALM_S: Final = 60.0


class Cancelled(Exception):
    """Something that a task awaited was cancelled, while the task itself was not."""


def supervise(name: str, work: Callable[[], Awaitable[None]], telemetry: Telemetry) -> asyncio.Task[None]:
    """Run `work` in a task of this name until it returns, again after each failure. Failures are counted."""
    return asyncio.create_task(_keep_running(name, work, telemetry), name=name)


async def _keep_running(name: str, work: Callable[[], Awaitable[None]], telemetry: Telemetry) -> None:
    trouble = Incident(log, "task failed")
    pause_s = PAUSE_LEAST_S
    while True:
        started = time.monotonic()
        try:
            await work()
            return
        except (Exception, asyncio.CancelledError) as error:
            failed = failure_of(error)
        telemetry.task_failures.labels(name).inc()
        if time.monotonic() - started > CALM_S:
            trouble.end()
            pause_s = PAUSE_LEAST_S
        trouble.add(failed, bug=True, task=name)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MOST_S)


def failure_of(error: Exception | asyncio.CancelledError) -> Exception:
    """Return the failure of a step of this task. Raises `error` if it is a cancellation of the task itself.

    A cancellation from within, of a future or a task that the step awaited, is a failure like others: Cancelled.
    """
    if isinstance(error, Exception):
        return error
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    failed = Cancelled("cancelled from within")
    failed.__cause__ = error
    return failed


def log_failure(task: asyncio.Task[Any], name: str, telemetry: Telemetry) -> None:
    """Log and count a failure of a task that may not be awaited; the task is not started again."""

    def ended(task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            telemetry.task_failures.labels(name).inc()
            log.error("task failed", task=task.get_name(), why=repr(error), exc_info=error)

    task.add_done_callback(ended)


def log_loop_errors(loop: asyncio.AbstractEventLoop, telemetry: Telemetry) -> None:
    """Log and count the event loop's errors: failed callbacks, and failed tasks that nobody awaits."""

    def handle(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError):  # an ended connection, which its owner handles
            telemetry.task_failures.labels("loop").inc()
        log.error("event loop", why=context.get("message"), exc_info=error)

    loop.set_exception_handler(handle)
