"""Runs wrk, the load generator, with a script that makes a new key for each request (load.lua)."""

import functools
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from deploy.console import StackError

_SCRIPT = Path(__file__).with_name("load.lua")
_TIMEOUT_S = 30  # of one request; with wrk's own 2 s a slow answer would count as none


@dataclass(frozen=True)
class Loaded:
    """The result of one run of wrk: `refused` answers were not 2xx or 3xx, `broken` requests had no answer."""

    requests: int
    seconds: float
    refused: int
    broken: int
    p50_ms: float
    p99_ms: float
    most_ms: float

    @property
    def answered(self) -> int:
        """Requests that were answered with success."""
        return self.requests - self.refused

    @property
    def rate(self) -> float:
        """Successful answers a second."""
        return self.answered / self.seconds


@functools.cache
def find() -> str:
    """Find wrk on PATH, or install it from Debian's packages if this user may.

    Raises:
        StackError: wrk is not available; the text says how to install it.
    """
    if shutil.which("wrk") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["apt-get", "update"], ["apt-get", "install", "--yes", "--no-install-recommends", "wrk"]):
            subprocess.run(command, capture_output=True, check=False)
    found = shutil.which("wrk")
    if found is None:
        raise StackError("no wrk here, which makes the load: please install it (Debian, Ubuntu: apt-get install wrk)")
    return found


def run(url: str, seconds: float, connections: int, **arguments: object) -> Loaded:
    """Run wrk once with one thread; `arguments` are those of load.lua. wrk counts whole seconds, so at least one.

    Raises:
        StackError: wrk failed.
    """
    command = [find(), "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", f"--timeout={_TIMEOUT_S}s"]
    command += ["-s", str(_SCRIPT), url, "--", *(f"{name}={value}" for name, value in arguments.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise StackError(f"wrk failed: {done.stdout[-500:]} {done.stderr[-500:]}")
    return Loaded(**json.loads(lines[-1]))
