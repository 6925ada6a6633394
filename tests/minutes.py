"""Adds up the time of the tests of each folder, with setup and teardown, and prints it at the end of a run.

With xdist the controller gets all reports, so that the minutes are those of all processes together.
"""

from collections import Counter

import pytest


def folder(nodeid: str) -> str:
    """Return FOLDER of `tests/FOLDER/FILE::TEST`; empty for a file beside the folders."""
    return nodeid.split("/")[1] if nodeid.count("/") > 1 else ""


class MinutesByFolder:
    """A pytest plugin, which one process of a run registers."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[folder(report.nodeid) or "tests"] += report.duration  # type: ignore[assignment] # typed as int

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._seconds:
            terminalreporter.write_line(str(self))

    def __str__(self) -> str:
        """Format the printed line, slowest folder first."""
        minutes = (f"{name} {seconds / 60:.1f}" for name, seconds in self._seconds.most_common())
        return f"minutes by folder: {', '.join(minutes)}"
