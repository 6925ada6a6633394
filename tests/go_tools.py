"""Gets what tests use of Go into the cache, of pinned versions: `python -m tests.go_tools [NAME…]` prints the paths.

Programs are built, which takes minutes on a slow machine; of other modules the files are used. So a run of the tests
does not get them: a test that lacks one is skipped, and says so. Go checks each module against its checksum database.
"""

import fcntl
import hashlib
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

# For the programs that tests let `go run` compile: without optimisation and without C, Go compiles its library in two
# thirds of the time.
QUICK: Final = {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": "'-gcflags=all=-N -l'"}
# What these programs import of the library, with what that imports.
_LIBRARY: Final = ("encoding/json", "net/http", "net/http/httptrace")


class Package(NamedTuple):
    """A package or module of Go, and its module's version."""

    name: str
    version: str


# Programs.
TOOLS: Final = {
    "actionlint": Package("github.com/rhysd/actionlint/cmd/actionlint", "v1.7.12"),
    "helm": Package("helm.sh/helm/v3/cmd/helm", "v3.22.0"),
}
# Programs of this project, by their folders.
PROGRAMS: Final = {"process_orders": places.ROOT / "deploy" / "examples" / "process_orders"}
# Modules with files that tests read: the CustomResourceDefinitions of the Gateway API.
MODULES: Final = {"gateway-api": Package("sigs.k8s.io/gateway-api", "v1.6.3")}


def path(name: str) -> Path:
    """Return where a program, or the folder of a module, is kept."""
    if name in PROGRAMS:
        sources = [each.read_bytes() for each in sorted(PROGRAMS[name].iterdir())]
        return places.cache() / "go" / f"{name}-{hashlib.sha256(b''.join(sources)).hexdigest()[:16]}" / name
    package, version = (TOOLS | MODULES)[name]
    folder = places.cache() / "go"
    return folder / f"{name}-{version}" / name if name in TOOLS else folder / "mod" / f"{package}@{version}"


def have(name: str) -> Path:
    """Return what is in the cache, else the program on PATH; skips the test if there is neither."""
    if path(name).exists():
        return path(name)
    if found := shutil.which(name):
        return Path(found)
    pytest.skip(f"{name} is not in the cache (needs Go): .venv/bin/python -m tests.go_tools {name}")


def compile_library(go: str | Path = "go") -> None:
    """Compile what `go run` with the variables QUICK needs of Go's library, if Go has not kept that.

    One process at a time: two that need a package at the same time would both compile it.

    Raises:
        StackError: Go failed.
    """
    folder = places.cache() / "go"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "library.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _go(folder, "build", *_LIBRARY, program=go, **QUICK)


def ensure(name: str) -> Path:
    """Build a program, or download a module, if it is missing.

    Raises:
        StackError: there is no Go, or it failed.
    """
    found = path(name)
    if found.exists():
        return found
    if shutil.which("go") is None:
        raise StackError(f"no Go on PATH to get {name} with: please install Go 1.26 or newer")
    folder = places.cache() / "go"
    folder.mkdir(parents=True, exist_ok=True)
    with progress(f"getting {name}"), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if name in PROGRAMS:
            modules = str(folder / "mod")
            _go(scratch, "build", "-C", str(PROGRAMS[name]), "-o", f"{scratch}/{name}", ".", GOMODCACHE=modules)
            found.parent.mkdir(exist_ok=True)
            Path(scratch, name).replace(found)
            return found
        package, version = (TOOLS | MODULES)[name]
        if name in TOOLS:
            _go(scratch, "install", f"{package}@{version}", GOBIN=scratch)
            found.parent.mkdir(exist_ok=True)
            Path(scratch, name).replace(found)
        else:
            _go(scratch, "mod", "download", f"{package}@{version}", GOMODCACHE=str(folder / "mod"))
    return found


def _go(folder: str | Path, *arguments: str, program: str | Path = "go", **variables: str) -> None:
    done = subprocess.run(
        [program, *arguments],
        cwd=folder,
        env={**os.environ, "GOFLAGS": "-trimpath -modcacherw", "CGO_ENABLED": "0", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise StackError(f"go {' '.join(arguments)} failed:\n{done.stderr.strip()}")


def main() -> int:
    known = [*TOOLS, *PROGRAMS, *MODULES]
    names = sys.argv[1:] or known
    if unknown := [name for name in names if name not in known]:
        raise StackError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    for name in names:
        say(str(ensure(name)))
    return 0


if __name__ == "__main__":
    run(main)
