"""Keeps the last result of each benchmark, with the commit, the machine and the servers that it was measured on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiokafka

from deploy.places import ROOT
from service import native
from tests.bench.redis_servers import described
from tests.bench.rows import Row
from tests.bench.stage import Stage

KEPT = Path(__file__).parent / "results"


def describe(stage: Stage) -> dict[str, Any]:
    """Describe the conditions of a result: commit, time, machine, versions."""
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "status", "--porcelain", "--", "service")
    lock = (ROOT / "deploy" / "install" / "kafka.lock").read_text()
    broker = next((line.rpartition(":")[2] for line in lock.splitlines() if ":kafka_2.13:" in line), "?")
    return {
        "commit": commit + (" with changes in service" if changed else ""),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "depth": stage.depth,
        "cores": os.cpu_count(),
        "machine": _machine(),
        "load": round(os.getloadavg()[0], 2),
        "python": sys.version.split()[0],
        "compiled": "yes" if native.COMPILED else "no",  # service.native
        "kafka": broker,
        "aiokafka": aiokafka.__version__,
        "redis": described(stage.redis),
    }


def keep(folder: Path, name: str, where: dict[str, Any], rows: Sequence[Row], failed: str = "") -> None:
    """Write a result over the last one of its name; a failed one has a reason and no rows."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "name": name,
        **where,
        **({"failed": failed} if failed else {}),
        "rows": [row.as_json() for row in rows],
    }
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """Read all results of a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
