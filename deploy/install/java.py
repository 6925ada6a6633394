"""Finds or installs a Java runtime for both Kafka 4.4 and Spark 4.2."""

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from deploy.console import StackError, say
from deploy.install import debian

OLDEST = 17
TESTED = (17, 21)  # preferred: neither program is tested with newer versions
_PACKAGE = "openjdk-17-jre-headless"
# The folders of Linux distributions, macOS and Homebrew.
_USUAL = ("usr/lib/jvm/*", "Library/Java/JavaVirtualMachines/*/Contents/Home", "opt/homebrew/opt/openjdk*")


@functools.cache
def home() -> Path:
    """Return the home folder of a Java, which is installed now if none is found.

    Raises:
        StackError: there is none and it cannot be installed; the text says what to install.
    """
    if found := find():
        return found
    if debian.installable():
        say(
            f"no Java {OLDEST} or newer found: installing {_PACKAGE} by apt-get. "
            f"To do without, stop here and set JAVA_HOME to the folder of a Java {OLDEST} or newer.",
            sys.stderr,
        )
        debian.install(_PACKAGE, "Java")
        if found := find():
            return found
    raise StackError(
        f"no Java {OLDEST} or newer here: please install one (on Debian or Ubuntu: apt-get install {_PACKAGE}) "
        "or set JAVA_HOME to its folder"
    )


def find(least: int = OLDEST) -> Path | None:
    """Find the best Java of version `least` or newer on this machine, or None.

    JAVA_HOME comes first, then PATH, then the usual folders. A broken or too old Java is skipped; a version that both
    programs are tested with is preferred to a newer one.
    """
    newer: Path | None = None
    for candidate in _candidates():
        version = version_of(candidate)
        if version is None or version < least:
            continue
        if version in TESTED:
            return candidate
        newer = newer or candidate
    return newer


def environment() -> dict[str, str]:
    """Return the environment variables by which a program runs on this Java (PySpark reads JAVA_HOME)."""
    return {"JAVA_HOME": str(home())}


def version_of(candidate: Path) -> int | None:
    """Read the major version of the Java in a home folder; None if there is none that runs."""
    program = candidate / "bin" / "java"
    if not program.is_file():
        return None
    try:
        shown = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(\d+)(?:\.(\d+))?', shown.stderr)
    if found is None:
        return None
    # Java 8 and older report 1.8.
    return int(found[2] or 0) if found[1] == "1" else int(found[1])


def _candidates() -> Iterator[Path]:
    """List home folders in order of choice, each once (/usr/lib/jvm has several links to one folder)."""
    seen: set[Path] = set()
    for place in _places():
        resolved = place.resolve()
        if resolved not in seen:
            seen.add(resolved)
            yield resolved


def _places() -> Iterator[Path]:
    if named := os.environ.get("JAVA_HOME"):
        yield Path(named)
    if on_path := shutil.which("java"):
        yield Path(on_path).resolve().parents[1]
    for pattern in _USUAL:
        yield from sorted(Path("/").glob(pattern))
