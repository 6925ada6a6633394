"""Prints the output of the local scripts: progress, colour on a terminal, one line for an error."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, TypeVar, cast

# Work that takes longer shows its progress; without it the script would look like it hangs.
_QUIET_S = 2.0
_TICK_S = 0.5
_LINES_SHOWN = 25  # of a program that has failed
T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StackError(RuntimeError):
    """A part of the local stack failed; the text says how, and where its log is."""


def call(
    command: Sequence[str | Path],
    *,
    timeout_s: float,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program to its end in a folder (default: this one), and return what it has printed. It reads no input.

    Raises:
        StackError: it cannot be started, takes longer, or ends with another code than 0; the text has its last lines.
    """
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StackError(f"{name}: {error}") from error
    if done.returncode:
        last = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-_LINES_SHOWN:])
        raise StackError(f"{name} ended with code {done.returncode}:\n{last}")
    return done.stdout


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print one line and flush it."""
    out = stream or sys.stdout
    out.write(text + "\n")
    out.flush()


def colours(stream: TextIO | None = None) -> bool:
    """Check whether to print in colour: on a terminal, without NO_COLOR."""
    return (stream or sys.stdout).isatty() and "NO_COLOR" not in os.environ


def paint(text: str, code: str, stream: TextIO | None = None) -> str:
    """Format a text in an ANSI colour (`code` as in "32" or "1;31"), if the output is in colour."""
    return f"\x1b[{code}m{text}\x1b[0m" if colours(stream) else text


def green(text: str) -> str:
    return paint(text, "32")


def red(text: str) -> str:
    return paint(text, "1;31")


def bold(text: str) -> str:
    return paint(text, "1")


def dim(text: str) -> str:
    return paint(text, "2")


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Show that `what` goes on if the context takes longer than two seconds, and then how long it took.

    On a terminal a clock runs in the line; elsewhere (a log) there is one line at the start and one at the end.
    """
    begun = time.monotonic()
    try:
        with ticking(partial(_tick, what, begun)):
            yield
    finally:
        taken = time.monotonic() - begun
        if taken >= _QUIET_S:
            _line(f"{what} ({taken:.1f} s)", last=True)


@contextmanager
def ticking(tick: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `tick` in a thread during the context; it returns once its event is set."""
    done = threading.Event()
    ticker = threading.Thread(target=tick, args=(done,), daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


def _tick(what: str, begun: float, done: threading.Event) -> None:
    if done.wait(_QUIET_S):
        return
    _line(f"{what} ...", last=not colours(sys.stderr))
    while colours(sys.stderr) and not done.wait(_TICK_S):
        _line(f"{what} ... {time.monotonic() - begun:.0f} s", last=False)


def _line(text: str, *, last: bool) -> None:
    """Print one line to stderr; on a terminal it replaces the previous line."""
    start = "\r\x1b[K" if colours(sys.stderr) else ""
    sys.stderr.write(f"{start}{text}" + ("\n" if last else ""))
    sys.stderr.flush()


def run(main: Callable[[], int]) -> NoReturn:
    """Run a script's `main` and exit with what it returns.

    For a StackError, prints its text to stderr and exits with 1. SIGINT, SIGTERM and SIGHUP raise in `main`, so that it
    stops the processes that it started, and exit with 130, 143 and 129, as shells expect. A second signal is ignored.
    """
    _listen()
    try:
        code = main()
    except StackError as error:
        line_start = "\r\x1b[K" if colours(sys.stderr) else ""  # a live line may stand there
        say(f"{line_start}{paint('failed:', '1;31', sys.stderr)} {error}", sys.stderr)
        code = 1
    sys.exit(code)


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine within `run`; a signal cancels it.

    An exception that a signal handler raises could interrupt the event loop itself: a task that the loop was about to
    run would never run again, and the clean-up would wait for it for ever.
    """
    signals: list[signal.Signals] = []

    async def listening() -> T | None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def cancel(number: signal.Signals) -> None:
            signals.append(number)
            if task is not None and len(signals) == 1:
                task.cancel()

        for each in _SIGNALS:
            loop.add_signal_handler(each, cancel, each)
        try:
            return await main
        except asyncio.CancelledError:
            if not signals:
                raise
            return None

    result = asyncio.run(listening())
    if signals:
        raise SystemExit(128 + signals[0])
    _listen()  # the loop has removed the signal handlers
    return cast("T", result)


def _listen() -> None:
    for each in _SIGNALS:
        signal.signal(each, _stop)


def _stop(number: int, _frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)
