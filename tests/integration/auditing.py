"""Runs the reconciliation job as an operator does."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from deploy import places
from deploy.install import java
from deploy.stack import Process
from spark.engine.session import INTERPRETED

FINDINGS: Final = 3
IDLE_S: Final = 300.0  # without output or CPU use


def brief(folder: Path) -> dict[str, str]:
    """The environment of a run over few records, whose time is mostly that of Java's compiler and of Spark."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in INTERPRETED.items()))
    return {"SPARK_CONF_DIR": str(folder), "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}


class Audit(Process):
    """One run over topics, with lake and report in `folder`."""

    def __init__(
        self,
        bootstrap: str,
        namespace: str,
        folder: Path,
        topics: Sequence[str],
        *options: str,
        rules: Path | None = None,
        small: bool = True,
    ) -> None:
        """Prepare a run; `small`: over some thousand records."""
        super().__init__("audit", folder.absolute())
        self.lake = self.folder / "lake"
        self.report = self.folder / "report" / "report.json"
        # Each audit of a namespace has a lake of its own.
        arguments = ["--lake", str(self.lake), "--report", str(self.report.parent), "--topics", ",".join(topics)]
        arguments.append("--replace-findings")
        self._command = [sys.executable, "-m", "spark", *arguments, *options]
        self._environment = {
            **places.hermetic_environment(),
            **java.environment(),
            "FENCEPOST_KAFKA": bootstrap,
            "FENCEPOST_NAMESPACE": namespace,
            "FENCEPOST_JARS": str(places.jars("spark")),
            "FENCEPOST_RULES": str(rules or ""),
            **(brief(self.folder / "conf") if small else {}),
        }

    def start(self) -> None:
        """Start the run, without waiting."""
        self.spawn(self._command, env=self._environment, cwd=places.ROOT)

    def carry_out(self) -> tuple[int, dict[str, Any]]:
        """Run to the end; returns the exit status and the report."""
        self.start()
        try:
            status = self.wait_while_working(IDLE_S)
        finally:
            self.kill()
        assert status in (0, FINDINGS), self.tail(40)
        return status, json.loads(self.report.read_text())
