"""What every task of this process waits for, written to the log on SIGUSR1: why does it hang?"""

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import structlog

log = structlog.get_logger(__name__)

# Where a suspended coroutine, generator or asynchronous generator stands, and what it awaits.
_FRAMES: Final = ("cr_frame", "gi_frame", "ag_frame")
_AWAITED: Final = ("cr_await", "gi_yieldfrom", "ag_await")


def dump_on_signal(loop: asyncio.AbstractEventLoop) -> None:
    """From now on SIGUSR1 makes a line for each task; nothing outside of the main thread, which alone has signals."""
    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGUSR1, tell, loop)


def tell(loop: asyncio.AbstractEventLoop) -> None:
    """One line for each task: its name, and the calls that it is in, the outermost first."""
    for task in sorted(asyncio.all_tasks(loop), key=asyncio.Task.get_name):
        log.warning("task", name=task.get_name(), waits=" > ".join(calls(task.get_coro())))


def calls(awaited: Any) -> Iterator[str]:
    """The calls of a suspended coroutine, from the outermost to the one that waits, as `file:line function`.

    They end at an `async for`: Python 3.11 does not tell what the generator behind it waits for.
    """
    while awaited is not None:
        frame = _first(awaited, _FRAMES)
        if frame is not None:
            yield f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_qualname}"
        awaited = _first(awaited, _AWAITED)


def _first(of: Any, names: tuple[str, ...]) -> Any:
    return next((found for name in names if (found := getattr(of, name, None)) is not None), None)
