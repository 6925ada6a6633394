"""A file of the events that are not settled, which a crash of the program or of the machine leaves complete.

It is an SQLite database in WAL mode: SQLite restores it after a crash in the middle of a write, bounds its size, and
lets one program at a time open it.
"""

import contextlib
import ctypes
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from .events import Pending

PAGE_BYTES: Final = 4096
# Room for the pages of the file itself, and for a few events.
BYTES_LEAST: Final = 64 * 1024

_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS open "
    "(n INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, body BLOB NOT NULL, stored_ms INTEGER NOT NULL)"
)
_INSERT: Final = "INSERT INTO open (key, body, stored_ms) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
_DELETE: Final = "DELETE FROM open WHERE key = ? AND body = ?"
_NEXT: Final = "SELECT n, key, body, stored_ms FROM open WHERE n > ? AND n <= ? ORDER BY n LIMIT 1"


class SpoolError(Exception):
    """The spool cannot be used; the text has its path and the remedy."""


class SpoolFull(SpoolError):
    """The spool or its disk has no room. Raised by a client: none of the events of this call was stored or sent."""


class SpoolInUse(SpoolError):
    """Another program, or another client of this one, has the spool open."""


class Spool:
    """The open events of one client, in the order in which they were added.

    Threads may share it. A process that was forked while it was open cannot use it (SpoolError).
    """

    def __init__(self, path: str | os.PathLike[str], *, bytes_max: int = 64 * 1024 * 1024) -> None:
        """Open a spool, or make one that only this user may read.

        Args:
            path: of the file; a second one, PATH-wal, is beside it while the spool is open and after a crash.
            bytes_max: the most bytes of the file; that beside it has 4 MiB, or the events of the largest call.

        Raises:
            SpoolInUse: it is open already.
            SpoolError: it cannot be opened, or is no spool.
        """
        if bytes_max < BYTES_LEAST:
            raise ValueError(f"bytes_max: a spool needs {BYTES_LEAST} bytes or more, not {bytes_max}")
        self.path = Path(path)
        self._process = os.getpid()
        self._lock = threading.Lock()
        with self._errors():
            self.path.touch(mode=0o600)
            self._db = sqlite3.connect(self.path, timeout=0.0, isolation_level=None, check_same_thread=False)
        try:
            with self._errors():
                self._prepare(bytes_max // PAGE_BYTES)
                self.inherited = len(self)
        except BaseException:
            self._db.close()
            raise
        _SPOOLS.add(self)

    def _prepare(self, pages_max: int) -> None:
        # The exclusive mode must come first: the lock is then held until the spool is closed, or its program has ended.
        for pragma in (f"page_size={PAGE_BYTES}", "locking_mode=EXCLUSIVE", "journal_mode=WAL"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("BEGIN EXCLUSIVE")
        self._db.execute(_TABLE)
        self._db.execute("COMMIT")
        self._db.execute(f"PRAGMA max_page_count={pages_max}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        with self._own():
            (count,) = self._db.execute("SELECT count(*) FROM open").fetchone()
        return int(count)

    def add(self, events: Sequence[Pending]) -> list[Pending]:
        """Store events, all or none; when it returns, they are on the disk. An event that is open already stays.

        Returns:
            The events; one that was open already has its `stored_ms`.

        Raises:
            SpoolFull: they do not fit.
            SpoolError: the disk does not take them, or another event is open under the key of one.
        """
        now_ms = time.time_ns() // 1_000_000
        with self._writing("FULL"):
            return [self._add_one(event, now_ms) for event in events]

    def _add_one(self, event: Pending, now_ms: int) -> Pending:
        if self._db.execute(_INSERT, (event.key, event.body, now_ms)).rowcount:
            return event
        body, stored_ms = self._db.execute("SELECT body, stored_ms FROM open WHERE key = ?", (event.key,)).fetchone()
        if body != event.body:
            remedy = "give each event its own key, or iterate over resume() first, which settles the open one"
            raise SpoolError(f"{self.path}: idempotency_key {event.key!r}: another event is open under it: {remedy}")
        return event._replace(stored_ms=stored_ms)

    def close_events(self, events: Sequence[Pending]) -> None:
        """Remove settled events, but none that is open under the same key with another body.

        A power failure may bring back the last ones: they are then sent again, as replays.

        Raises:
            SpoolError: the disk does not take it (SpoolFull: it is full); all of them stay.
        """
        with self._writing("NORMAL"):
            self._db.executemany(_DELETE, [(event.key, event.body) for event in events])

    @contextlib.contextmanager
    def _writing(self, synchronous: str) -> Iterator[None]:
        """A transaction."""
        with self._own(), self._db:  # the last one commits, or rolls back
            self._db.execute(f"PRAGMA synchronous={synchronous}")
            self._db.execute("BEGIN")
            yield

    def newest(self) -> int:
        """Return the number of the newest open event; 0 if there is none."""
        with self._own():
            (newest,) = self._db.execute("SELECT max(n) FROM open").fetchone()
        return newest or 0

    def next_after(self, number: int, until: int) -> tuple[int, Pending] | None:
        """Read the first event with a number above `number` and up to `until`, and its number; None without one."""
        with self._own():
            row = self._db.execute(_NEXT, (number, until)).fetchone()
        return None if row is None else (row[0], Pending(*row[1:]))

    def close(self) -> None:
        """Close the file, and let another program open it. Open events stay in it.

        Does nothing in a forked process: the parent has the file open.
        """
        if self._is_own:
            with self._lock:
                self._db.close()
            _SPOOLS.discard(self)

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        """Hold the lock, and explain errors.

        Raises SpoolError in a forked process: SQLite cannot keep its writes apart from those of the parent.
        """
        if not self._is_own:
            remedy = "open a spool of its own in each process, after the fork"
            raise SpoolError(f"{self.path}: this process is a fork of the one that opened it: {remedy}")
        with self._lock, self._errors():
            yield

    def leave_open(self) -> None:
        """Have a forked process never close the database, not even at its end.

        SQLite takes the parent's locks for its own: it would remove the log beside the file, and a crash of the parent
        would lose what it adds to the removed log (https://www.sqlite.org/howtocorrupt.html, 2.7).
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))

    def _in_use(self) -> str:
        """Say who has the file open, and the remedy."""
        path = self.path.resolve()
        if any(each is not self and each._is_own and each.path.resolve() == path for each in list(_SPOOLS)):
            return "another client of this program has it open: close() that one first, or share it between threads"
        return "another program has it open: give each program its own"

    @property
    def _is_own(self) -> bool:
        """Whether this process has opened the spool."""
        return self._process == os.getpid()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Explain errors of SQLite and of the file system."""
        try:
            yield
        except sqlite3.OperationalError as error:
            code = error.sqlite_errorcode & 0xFF  # without its details
            if code == sqlite3.SQLITE_BUSY:
                raise SpoolInUse(f"{self.path}: {self._in_use()}") from None
            if code == sqlite3.SQLITE_FULL:
                remedy = "wait until open events are settled, raise bytes_max, or free the disk"
                raise SpoolFull(f"{self.path}: no room for more events: {remedy}") from None
            raise SpoolError(f"{self.path}: {error}") from error
        except sqlite3.ProgrammingError:
            raise SpoolError(f"{self.path}: it is closed: open it again, by a new client") from None
        except sqlite3.Error as error:
            raise SpoolError(f"{self.path}: {error}: move it away if it is no spool") from error
        except OSError as error:
            raise SpoolError(
                f"{self.path}: {error.strerror}: name a file in a folder that can be written to"
            ) from error


# The spools that are open in this process, or were in its parent at the fork.
_SPOOLS: Final["weakref.WeakSet[Spool]"] = weakref.WeakSet()


def _after_fork() -> None:
    for spool in _SPOOLS:
        spool.leave_open()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
