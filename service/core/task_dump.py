"""Logs on SIGUSR1 what each asyncio task waits for, to find out why a process hangs."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import structlog

log = structlog.get_logger(__name__)

# Attributes of a suspended coroutine, generator or asynchronous generator: its frame, and what it awaits.
_FRAMES: Final = ("cr_frame", "gi_frame", "ag_frame")
_AWAITED: Final = ("cr_await", "gi_yieldfrom", "ag_await")


def dump_on_signal(loop: asyncio.AbstractEventLoop) -> None:
    """Log the tasks of the loop at each SIGUSR1. Does nothing outside the main thread, which alone gets signals."""
    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGUSR1, log_tasks, loop)


def log_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Log a line for each task: its name, and its calls, the outermost first."""
    for task in sorted(asyncio.all_tasks(loop), key=asyncio.Task.get_name):
        log.warning("task", name=task.get_name(), waits=" > ".join(calls(task.get_coro())))


def calls(awaited: Any) -> Iterator[str]:
    """List the calls of a suspended coroutine, from the outermost to the innermost, as `file:line function`.

    The list ends at an `async for`: Python 3.11 does not show what its generator awaits.
    """
    while awaited is not None:
        frame = _first(awaited, _FRAMES)
        if frame is not None:
            yield f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_qualname}"
        awaited = _first(awaited, _AWAITED)


def _first(of: Any, names: tuple[str, ...]) -> Any:
    return next((found for name in names if (found := getattr(of, name, None)) is not None), None)
