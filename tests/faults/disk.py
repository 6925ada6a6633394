"""Mounts a small disk under a server's folder, which a test can fill, and empty again.

    with Disk(folder, megabytes=64) as disk:  # has the folder's contents; the server must not run
        server.start()
        disk.fill()                           # from now on: No space left on device
        disk.free()
        server.stop()                         # before the disk is unmounted, and its contents are copied back

The disk is a tmpfs, which needs root. If it is not possible, `lacking` says why.
"""

import errno
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from deploy.console import StackError
from tests.faults.tools import lacks_root

_FILLER: Final = "filler"
_CALL_S: Final = 60.0
_PAGE_BYTES: Final = 4096


def lacking() -> str:
    """Return why a disk cannot be mounted here; "" if it can."""
    if why := lacks_root():
        return why
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True, check=False
    )
    return f"no mounts here (a container needs CAP_SYS_ADMIN): {tried.stderr}" if tried.returncode else ""


class Disk:
    """A tmpfs mounted on a folder; the folder's contents are copied onto it, and back at the end."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        self._megabytes = megabytes
        self._aside = folder.with_name(f"{folder.name}.aside")

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.rename(self._aside)
        self.folder.mkdir()
        try:
            _run("mount", "-t", "tmpfs", "-o", f"size={self._megabytes}m", "tmpfs", str(self.folder))
            _copy(self._aside, self.folder)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.free()
        _run("rm", "-rf", str(self._aside))
        _copy(self.folder, self._aside)
        self._leave()

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        with (self.folder / _FILLER).open("ab", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(_PAGE_BYTES))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        """Free the space again."""
        (self.folder / _FILLER).unlink(missing_ok=True)

    def _leave(self) -> None:
        if os.path.ismount(self.folder):
            _run("umount", str(self.folder))
        self.folder.rmdir()
        self._aside.rename(self.folder)


def _copy(there: Path, here: Path) -> None:
    """Copy a folder's contents with their holes: Kafka's index files are large and mostly empty."""
    _run("cp", "--archive", "--sparse=always", f"{there}/.", str(here))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CALL_S, check=False)
    if done.returncode:
        raise StackError(f"{' '.join(command)}: {done.stderr.strip()}")
