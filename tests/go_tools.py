"""Builds the pinned Go programs that tests use into the cache: `python -m tests.go_tools [NAME…]` prints their paths.

The build takes minutes on a slow machine, so a run of the tests does not start it: a test whose program is not built is
skipped, and says so. Go checks each module against its checksum database.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from deploy import places
from deploy.console import StackError, progress, run, say

_TIMEOUT_S: Final = 1800.0


class Tool(NamedTuple):
    """A Go program: its package, and its module's version."""

    package: str
    version: str


TOOLS: Final = {
    "actionlint": Tool("github.com/rhysd/actionlint/cmd/actionlint", "v1.7.12"),
    "helm": Tool("helm.sh/helm/v3/cmd/helm", "v3.22.0"),
}


def path(name: str) -> Path:
    """Return where a tool of the pinned version is kept."""
    return places.cache() / "go" / f"{name}-{TOOLS[name].version}" / name


def built(name: str) -> Path:
    """Return a tool that is built already, else the one on PATH; skips the test if there is neither."""
    if path(name).exists():
        return path(name)
    if found := shutil.which(name):
        return Path(found)
    pytest.skip(f"{name} {TOOLS[name].version} is not built (needs Go): .venv/bin/python -m tests.go_tools {name}")


def ensure(name: str) -> Path:
    """Build a tool if it is missing.

    Raises:
        StackError: there is no Go, or the build failed.
    """
    tool, program = TOOLS[name], path(name)
    if program.exists():
        return program
    if shutil.which("go") is None:
        raise StackError(f"no Go on PATH to build {name} with: please install Go 1.24 or newer")
    program.parent.parent.mkdir(parents=True, exist_ok=True)
    with (
        progress(f"building {name} {tool.version}"),
        tempfile.TemporaryDirectory(dir=program.parent.parent) as scratch,
    ):
        done = subprocess.run(
            ["go", "install", f"{tool.package}@{tool.version}"],
            env={**os.environ, "GOBIN": scratch, "GOFLAGS": "-trimpath -modcacherw", "CGO_ENABLED": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise StackError(f"{name} was not built:\n{done.stderr.strip()}")
        program.parent.mkdir(exist_ok=True)
        Path(scratch, name).replace(program)
    return program


def main() -> int:
    names = sys.argv[1:] or list(TOOLS)
    if unknown := [name for name in names if name not in TOOLS]:
        raise StackError(f"unknown: {', '.join(unknown)}; there are {', '.join(TOOLS)}")
    for name in names:
        say(str(ensure(name)))
    return 0


if __name__ == "__main__":
    run(main)
