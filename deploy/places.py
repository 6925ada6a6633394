"""Paths of the project, of the user's cache, and of a stack's data."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from deploy.console import StackError

ROOT = Path(__file__).resolve().parents[1]


def cache() -> Path:
    """Return the folder of fetched files: FENCEPOST_CACHE, else one in the user's cache."""
    if chosen := os.environ.get("FENCEPOST_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "fencepost"


def jars(kind: str) -> Path:
    """Return the folder of the broker's jars ("kafka") or of Spark's ("spark")."""
    return cache() / "jars" / kind


# Prefixes of the variables by which a caller chooses other servers, or another Spark than the one in .venv.
OTHERS = ("FENCEPOST_", "SPARK_", "PYSPARK_", "HADOOP_")


def hermetic_environment() -> dict[str, str]:
    """Return the caller's environment without any setting of Fencepost, Spark and Hadoop.

    Processes of a stack get their settings from the stack alone: a test or a demo must never connect to the Kafka of
    the caller's FENCEPOST_KAFKA, or run on the Spark of the caller's SPARK_HOME.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}


@contextlib.contextmanager
def local_folder(name: str = "", *, empty: bool = False) -> Iterator[Path]:
    """Return and lock a folder for one stack's data and logs: FENCEPOST_LOCAL_DIR, else `.local` in the project.

    Args:
        name: a folder within that folder; default: the folder itself.
        empty: whether to delete what an earlier stack left in the named folder.

    Raises:
        StackError: another stack runs in the folder.
    """
    base = Path(os.environ.get("FENCEPOST_LOCAL_DIR") or ROOT / ".local").expanduser().absolute()
    folder = base / name
    base.mkdir(parents=True, exist_ok=True)
    # The lock file is beside the folder, because emptying the folder would delete it.
    with (base / f"{name or 'up'}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"another stack runs in {folder}: set FENCEPOST_LOCAL_DIR to run a second one") from None
        if empty and name:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        yield folder
