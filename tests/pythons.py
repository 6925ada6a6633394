"""Runs the tests that depend on Python's version on the oldest and the newest supported Python.

    python -m tests.pythons            both
    python -m tests.pythons 3.13       this version

uv finds each Python, or fetches it; the environments are kept in the cache. Exit status: 0 when the tests passed on
every version, 1 when they failed on one or there is no such Python.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from deploy import places
from deploy.console import StackError, run, say

# What runs the code of each extra: the service's and the job's own, with real parts.
TESTS: Final = (
    "tests/unit",
    "tests/contract",
    "tests/stack/test_wheel.py",
    "tests/integration/test_http_events.py",
    "tests/integration/test_follow.py",
    "tests/spark/test_classify.py",
)


def supported() -> list[str]:
    """List the supported versions by `requires-python`, oldest first."""
    text = (places.ROOT / "pyproject.toml").read_text()
    oldest, after = re.findall(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"', text, re.MULTILINE)[0]
    return [f"3.{minor}" for minor in range(int(oldest), int(after))]


def uv() -> str:
    """Find the uv on PATH, else the one that `deploy/local/bootstrap` has installed."""
    return shutil.which("uv") or str(places.cache() / "uv" / "bin" / "uv")


def environment(version: str) -> Path:
    """Make or update the environment of a version; returns its Python.

    Raises:
        StackError: uv finds and fetches no such Python, or a package has no wheel for it and was not built.
    """
    folder = places.cache() / "pythons" / version
    command = [uv(), "sync", "--frozen", "--all-extras", "--all-groups", "--python", version, "--quiet"]
    variables = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(folder)}
    if subprocess.run(command, cwd=places.ROOT, env=variables, check=False).returncode:
        raise StackError(f"no environment with Python {version}, for the reason above: please install Python {version}")
    return folder / "bin" / "python"


def passes(version: str) -> bool:
    """Run the tests on a version; returns whether all have passed."""
    say(f"Python {version} ...")
    command = [str(environment(version)), "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(command, cwd=places.ROOT, check=False).returncode == 0


def main() -> int:
    known = supported()
    wanted = sys.argv[1:] or [known[0], known[-1]]
    if unknown := [version for version in wanted if version not in known]:
        raise StackError(f"not supported: {', '.join(unknown)}; requires-python allows {', '.join(known)}")
    failed = [version for version in wanted if not passes(version)]
    say(f"failed on {', '.join(failed)}" if failed else f"passed on {', '.join(wanted)}")
    return 1 if failed else 0


if __name__ == "__main__":
    run(main)
