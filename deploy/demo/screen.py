"""Prints the demo: steps with a clock, one live line for progress, and the table at the end."""

import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

from deploy.console import bold, colours, dim, paint, say, ticking

_LIVE_S = 0.2  # how often the live line changes on a terminal
_LOG_S = 5.0  # how often a line is printed elsewhere
_QUIET_S = 2.0  # shorter work shows no progress
_BAR = 24  # characters


class Screen:
    """Prints lines with the time since the start of their step."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._shown = self._begun
        self._live = colours()

    def step(self, title: str) -> None:
        """Begin a step of the demo, and start its clock."""
        self._begun = self._shown = time.monotonic()
        say(f"\n{bold(title)}")

    def note(self, text: str) -> None:
        """Print an event of the step."""
        if self._live:
            sys.stdout.write("\r\x1b[K")
        say(self._clocked(text))

    def blow(self, text: str) -> None:
        """Print a fault."""
        self.note(paint(text, "33"))

    def update(self, done: int, total: int, what: str) -> None:
        """Show the progress: one live line on a terminal, a line every _LOG_S elsewhere."""
        if time.monotonic() < self._shown + (_LIVE_S if self._live else _LOG_S):
            return
        self._shown = time.monotonic()
        if self._live:
            filled = round(_BAR * done / total)
            self._show(f"[{'#' * filled}{'.' * (_BAR - filled)}] {done:,} of {total:,} {what}")
        else:
            self.note(f"{done:,} of {total:,} {what}")

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Show that work of unknown length goes on: by a clock on a terminal, else by a line."""
        return ticking(partial(self._tick, what))

    def _tick(self, what: str, done: threading.Event) -> None:
        if done.wait(_QUIET_S):
            return
        if not self._live:
            self.note(f"{what} ...")
            return
        while not done.wait(_LIVE_S):
            self._show(f"{what} ...")

    def _show(self, text: str) -> None:
        sys.stdout.write(f"\r\x1b[K{self._clocked(text)}")
        sys.stdout.flush()

    def _clocked(self, text: str) -> str:
        return f"  {dim(f'{time.monotonic() - self._begun:5.1f} s')}  {text}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a table, the first column aligned left, the others right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        return "  " + "   ".join(cells).rstrip()

    rule = dim("  " + "-" * (sum(widths) + 3 * (len(widths) - 1)))
    return "\n".join([bold(line(head)), rule, *map(line, rows)])
