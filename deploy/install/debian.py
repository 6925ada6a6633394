"""Installs packages of Debian, if this user may."""

import os
import shutil
import subprocess

from deploy.console import StackError, progress


def installable() -> bool:
    """Check whether packages can be installed: as root, on Debian or a system derived from it."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(package: str, what: str) -> None:
    """Install a package without its recommended packages.

    Raises:
        StackError: apt-get failed; the text has its message.
    """
    with progress(f"installing {what} ({package})"):
        _apt("update")
        _apt("install", "--yes", "--no-install-recommends", package)


def _apt(*arguments: str) -> None:
    done = subprocess.run(
        ["apt-get", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise StackError(f"apt-get {' '.join(arguments)} failed:\n{done.stderr.strip()}")
