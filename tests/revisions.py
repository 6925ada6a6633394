"""Unpacks and installs a revision of this repository, or this tree, in a folder, to run it there."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy import places
from deploy.console import StackError
from deploy.places import ROOT

# The previous release as long as no tag names it: the last commit of 0.1.0, before what deploy/CHANGELOG.md adds to it.
PREVIOUS: Final = "f6dd613653705a1d4b99a8b439a876c884c8805a"


@dataclass(frozen=True)
class Checkout:
    """A project to run: its folder and its commit."""

    root: Path
    commit: str


def previous_release() -> str:
    """Return the newest tag of a release before this commit, else PREVIOUS."""
    command = ["git", "describe", "--tags", "--abbrev=0", "--match=v[0-9]*", "HEAD^"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or PREVIOUS


def checkout(revision: str, folder: Path) -> Checkout:
    """Unpack a revision into a folder, and create its virtual environment there.

    Raises:
        StackError: git does not know it, or it could not be installed.
    """
    found = unpack(revision, folder)
    _install(folder)
    return found


def this_tree(folder: Path) -> Checkout:
    """Copy this tree's files, as they are, into a folder, and create a virtual environment there.

    Raises:
        StackError: it could not be installed.
    """
    listed = output_of("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # a file that is deleted here may still be in the index
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    _install(folder)
    return Checkout(folder, "this tree")


def unpack(revision: str, folder: Path) -> Checkout:
    """Read the files of a revision. Raises StackError if git does not know it."""
    commit = output_of("git", "rev-parse", "--verify", "--short=12", f"{revision}^{{commit}}", cwd=ROOT).strip()
    folder.mkdir(parents=True)
    archive = folder.with_suffix(".tar")
    output_of("git", "archive", "--format=tar", f"--output={archive}", commit, cwd=ROOT)
    output_of("tar", "-xf", str(archive), cwd=folder)
    archive.unlink()
    return Checkout(folder, commit)


def _install(folder: Path) -> None:
    output_of(_uv(), "sync", "--quiet", "--frozen", "--no-dev", "--extra=service", cwd=folder)


def output_of(*command: str, cwd: Path) -> str:
    """Run a command, and return what it prints. Raises StackError with its errors if it fails."""
    # These variables would make uv use another environment than the folder's own .venv.
    left_out = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StackError(f"{' '.join(command)} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout


def _uv() -> str:
    """Find uv: on PATH, or where the local stack has installed it."""
    found = shutil.which("uv") or str(places.cache() / "uv" / "bin" / "uv")
    if not Path(found).exists():
        raise StackError("no uv here, which installs the other revision: run ./tests/run once, or install uv")
    return found
