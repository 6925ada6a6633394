"""Runs the reconciliation job as an operator does, and reads its report."""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import places
from deploy.console import StackError
from deploy.demo.client import Place
from deploy.install import java
from deploy.stack.process import Process

_RUN_S = 600.0  # a run takes half a minute on an idle machine: this bound ends a run that hangs
_POLL_S = 0.1
_CLEAN, _FINDINGS = 0, 3
_PROGRESS = re.compile(r"^ *[\d.]+s  (.+)\n", re.MULTILINE)  # a line of the job's progress: seconds, and the step


@dataclass(frozen=True)
class Finding:
    """The fields of a finding that the demo uses."""

    kind: str
    cause: str | None
    topic: str
    id: str | None
    places: frozenset[Place]


@dataclass(frozen=True)
class Report:
    """The report of a run: findings, balance, and the path of the page."""

    findings: list[Finding]
    balance: dict[str, int]
    page: Path


class Job(Process):
    """One run of `python -m spark`."""

    def __init__(self, folder: Path, kafka: str, topics: Sequence[str]) -> None:
        super().__init__("job", folder)
        self._kafka = kafka
        self._topics = topics
        self._report = folder / "report"

    def start(self) -> None:
        """Start the run."""
        arguments: list[str | Path] = ["--lake", self.folder / "lake", "--report", self._report]
        arguments += ["--topics", ",".join(self._topics)]
        environment = {
            **places.hermetic_environment(),
            **java.environment(),
            "FENCEPOST_KAFKA": self._kafka,
            "FENCEPOST_JARS": str(places.jars("spark")),
        }
        self.spawn([sys.executable, "-m", "spark", *arguments], env=environment, cwd=places.ROOT)

    def report(self, tell: Callable[[str], None]) -> Report:
        """Wait for the run's end and read its report; `tell` is called with each line of progress.

        Raises:
            StackError: the run was not possible, or takes too long.
        """
        printed = 0
        deadline = time.monotonic() + _RUN_S
        while self.running:
            if time.monotonic() > deadline:
                raise StackError(f"the job still runs after {_RUN_S:.0f} s\n{self.tail()}")
            time.sleep(_POLL_S)
            said = _PROGRESS.findall(self.log.read_text(errors="replace"))
            for line in said[printed:]:
                tell(line)
            printed = len(said)
        if self.exit_code not in (_CLEAN, _FINDINGS):
            raise StackError(f"the job could not run (exit code {self.exit_code})\n{self.tail()}")
        body = json.loads((self._report / "report.json").read_text())
        return Report(
            findings=[_finding(each) for each in body["findings"]],
            balance={name: int(count) for name, count in body["balance"].items()},
            page=self._report / "report.html",
        )


def _finding(body: dict[str, Any]) -> Finding:
    coordinates = body.get("coordinates") or []
    return Finding(
        kind=body["kind"],
        cause=body.get("cause"),
        topic=body["topic"],
        id=body.get("id"),
        places=frozenset(Place(each["partition"], each["offset"]) for each in coordinates),
    )
