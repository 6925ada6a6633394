"""A reader for tests: follows a topic into SQLite. `python -m tests.integration.follower DATABASE KAFKA TOPIC …`."""

import argparse
import asyncio
import contextlib
import os
import signal
import sqlite3
from collections.abc import Iterator, Sequence

from service.fencepost import Overtaken, Reader, Record, Saved, id_of

END = b"end"
ENDS = 2


class Done(Exception):
    """The marker record at the end of each partition is stored: everything was read."""


class Ledger:
    """A Store in SQLite. At commit number `die_at` (from 1) the process ends between the results and the position."""

    def __init__(self, database: str, *, die_at: int = 0, torn: bool = False) -> None:
        self.path = database
        self.die_at, self.torn = die_at, torn
        self.commits = 0
        with self.opened() as opened:
            opened.execute("CREATE TABLE IF NOT EXISTS results (id TEXT, place TEXT, value BLOB)")
            opened.execute("CREATE TABLE IF NOT EXISTS place (version INTEGER, place BLOB)")

    @contextlib.contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Open the database for a call: Python 3.13 warns of a connection that nobody closes."""
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as database:
            yield database

    async def load(self) -> Saved | None:
        with self.opened() as opened:
            row = opened.execute("SELECT version, place FROM place").fetchone()
        return None if row is None else Saved(*row)

    async def commit(self, results: Sequence[tuple[str, str, bytes | None]], saved: Saved) -> None:
        self.commits += 1
        with self.opened() as opened:
            self._commit(opened, results, saved)

    def _commit(
        self, opened: sqlite3.Connection, results: Sequence[tuple[str, str, bytes | None]], saved: Saved
    ) -> None:
        opened.execute("BEGIN IMMEDIATE")
        opened.executemany("INSERT INTO results VALUES (?, ?, ?)", results)
        if self.torn:  # the wrong way: the results alone
            opened.execute("COMMIT")
            opened.execute("BEGIN IMMEDIATE")
        if self.commits == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if saved.version == 1:
            opened.execute("INSERT INTO place SELECT ?, ? WHERE NOT EXISTS (SELECT * FROM place)", saved)
        else:
            opened.execute("UPDATE place SET version = ?, place = ? WHERE version = ?", (*saved, saved.version - 1))
        if opened.execute("SELECT changes()").fetchone() != (1,):
            opened.execute("ROLLBACK")
            raise Overtaken(f"version {saved.version - 1} is not what is stored")
        opened.execute("COMMIT")
        # By coordinates: one end may be stored twice before the other is read.
        ends = opened.execute("SELECT count(DISTINCT place) FROM results WHERE value = ?", (END,))
        if ends.fetchone()[0] >= ENDS:
            raise Done

    def rows(self) -> list[tuple[str, str]]:
        """Read id and coordinates of every result."""
        with self.opened() as opened:
            return opened.execute("SELECT id, place FROM results WHERE value IS NOT ?", (END,)).fetchall()


async def results(records: Sequence[Record]) -> list[tuple[str, str, bytes | None]]:
    """Make a row for each record."""
    return [((id_of(one) or b"").hex(), f"{one.partition}@{one.offset}", one.value) for one in records]


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("database", "kafka", "topic"):
        parser.add_argument(name)
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--torn", action="store_true")
    given = parser.parse_args()
    store = Ledger(given.database, die_at=given.die_at, torn=given.torn)
    with contextlib.suppress(Done):
        await Reader(given.topic, store, records_max=20, bootstrap_servers=given.kafka).follow(results)


if __name__ == "__main__":
    asyncio.run(main())
