"""One run of the reconciliation job, as an operator would run it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from deploy.local import java, places

FINDINGS: Final = 3
RUN_S: Final = 280


def audit(
    bootstrap: str, namespace: str, folder: Path, topics: Sequence[str], *options: str
) -> tuple[int, dict[str, Any]]:
    """Run the job over the topics, with lake and report in `folder`: its exit status and its report."""
    arguments = ["--lake", str(folder / "lake"), "--report", str(folder / "report"), "--topics", ",".join(topics)]
    environment = {
        **places.hermetic_environment(),
        **java.environment(),
        "FENCEPOST_KAFKA": bootstrap,
        "FENCEPOST_NAMESPACE": namespace,
        "FENCEPOST_JARS": str(places.jars("spark")),
    }
    run = subprocess.run(
        [sys.executable, "-m", "spark", *arguments, *options],
        env=environment,
        cwd=places.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )
    assert run.returncode in (0, FINDINGS), run.stderr[-3000:]
    return run.returncode, json.loads((folder / "report" / "report.json").read_text())
