"""Installs packages of Debian, if this user may."""

import os
import shutil

from deploy.console import call, progress

_TIMEOUT_S = 900.0  # for 200 MB over a slow network


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
    call(["apt-get", *arguments], timeout_s=_TIMEOUT_S, environment={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
