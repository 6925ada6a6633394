"""Where things are: the project, and the cache outside of it."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from deploy.console import StackError

ROOT = Path(__file__).resolve().parents[1]


def cache() -> Path:
    """The folder for what is fetched once: FENCEPOST_CACHE, else the user's own cache."""
    if chosen := os.environ.get("FENCEPOST_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "fencepost"


def jars(kind: str) -> Path:
    """The folder of the broker's jars ("kafka") or of Spark's ("spark")."""
    return cache() / "jars" / kind


def hermetic_environment() -> dict[str, str]:
    """The caller's environment without any setting of Fencepost's.

    What a stack starts gets its settings from the stack alone: a FENCEPOST_KAFKA that points at another Kafka must
    never be touched by a test or a demo.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_")}


@contextlib.contextmanager
def local_folder(name: str = "", *, empty: bool = False) -> Iterator[Path]:
    """A folder for one stack's data and logs: FENCEPOST_LOCAL_DIR, else `.local` in the project, or `name` in there.

    Args:
        name: a folder within it; itself if not given.
        empty: whether what an earlier stack left in the named folder goes.

    Raises:
        StackError: another stack runs in it.
    """
    base = Path(os.environ.get("FENCEPOST_LOCAL_DIR") or ROOT / ".local").expanduser().absolute()
    folder = base / name
    base.mkdir(parents=True, exist_ok=True)
    # The lock is beside the folder, or emptying it would take the lock away.
    with (base / f"{name or 'up'}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"another stack runs in {folder}: set FENCEPOST_LOCAL_DIR to run a second one") from None
        if empty and name:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        yield folder
