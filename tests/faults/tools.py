"""Installs programs and libraries that some faults need, if they are missing."""

import os
import shutil
from collections.abc import Callable

from deploy.console import StackError
from deploy.install import debian

ROOT_WANTED = "needs root: run the tests as root, as in a container"


def lacks_program(name: str, package: str) -> str:
    """Return why a program is not available; "" if it is, perhaps installed just now."""
    return lacks(lambda: shutil.which(name) is not None, name, package)


def lacks(found: Callable[[], bool], what: str, package: str) -> str:
    """Return why a part of a Debian package is not available; "" if it is, perhaps installed just now."""
    if found():
        return ""
    advice = f"no {what} here: please install it (on Debian or Ubuntu: apt-get install {package})"
    if not debian.installable():
        return advice
    try:
        debian.install(package, what)
    except StackError as error:
        return f"{advice}; {error}"
    return "" if found() else advice


def lacks_root() -> str:
    """Return why this user may not set up networks and mounts; "" if it may."""
    return "" if os.geteuid() == 0 else ROOT_WANTED
