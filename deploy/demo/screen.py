"""How the demo looks: steps with a clock, one live line for progress, and the table at the end."""

import sys
import time
from collections.abc import Sequence

from deploy.local.console import bold, colours, dim, paint, say

_LIVE_S = 0.2  # how often the live line changes on a terminal
_LOG_S = 5.0  # and how often a line is written elsewhere


class Screen:
    """Lines with the time since the start of their step."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._shown = self._begun
        self._live = colours()

    def step(self, title: str) -> None:
        """A new part of the demo; its clock starts."""
        self._begun = self._shown = time.monotonic()
        say(f"\n{bold(title)}")

    def note(self, text: str) -> None:
        """Something happened."""
        self._clear()
        say(f"  {dim(f'{self._elapsed():5.1f} s')}  {text}")

    def blow(self, text: str) -> None:
        """Something bad happened."""
        self.note(paint(text, "33"))

    def update(self, done: int, total: int, what: str) -> None:
        """How far it is: one live line on a terminal, a line now and then elsewhere."""
        if time.monotonic() < self._shown + (_LIVE_S if self._live else _LOG_S):
            return
        self._shown = time.monotonic()
        if not self._live:
            self.note(f"{done:,} of {total:,} {what}")
            return
        filled = round(24 * done / total)
        bar = "#" * filled + "." * (24 - filled)
        sys.stdout.write(f"\r\x1b[K  {dim(f'{self._elapsed():5.1f} s')}  [{bar}] {done:,} of {total:,} {what}")
        sys.stdout.flush()

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _clear(self) -> None:
        if self._live:
            sys.stdout.write("\r\x1b[K")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        return "  " + "   ".join(cells).rstrip()

    rule = dim("  " + "-" * (sum(widths) + 3 * (len(widths) - 1)))
    return "\n".join([bold(line(head)), rule, *map(line, rows)])
