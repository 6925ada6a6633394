"""Fills a table of PostgreSQL from a topic: rows and position are committed in one transaction of the database.

    FENCEPOST_KAFKA=127.0.0.1:9092 PGHOST=127.0.0.1 python -m deploy.examples.sink_postgres TOPIC TABLE

Whatever crashes, the table has each event once. `psycopg` finds the database by the variables of libpq (PGHOST, PGUSER,
PGPASSFILE, …). `sink_naive.py` has what goes wrong without that transaction.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg import sql

# In a program of your own: from fencepost import …
from service.fencepost import Overtaken, Reader, Record, Saved, id_of

RECORDS_MAX = 500
CREATION_LOCK = 40_771  # any number that no other program of the database locks
Row = tuple[bytes | None, datetime, str | None]


class Table:
    """A table of events, and the position of its reader in the table `positions` of the same database."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def create(self) -> None:
        """Create both tables where they are missing.

        One program at a time: PostgreSQL may refuse a CREATE TABLE IF NOT EXISTS beside another one.
        """
        async with await psycopg.AsyncConnection.connect() as connection:
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", (CREATION_LOCK,))
            await connection.execute(
                sql.SQL(
                    "CREATE TABLE IF NOT EXISTS {} (event_id bytea, created_at timestamptz NOT NULL, value jsonb, "
                    "loaded_at timestamptz NOT NULL DEFAULT now())"
                ).format(sql.Identifier(self.name))
            )
            await connection.execute(
                "CREATE TABLE IF NOT EXISTS positions (reader text PRIMARY KEY, version bigint, position bytea)"
            )

    async def insert(self, connection: psycopg.AsyncConnection[Any], rows: Sequence[Row]) -> None:
        """Insert rows in the open transaction of the connection."""
        statement = sql.SQL("INSERT INTO {} (event_id, created_at, value) VALUES (%s, %s, %s)")
        async with connection.cursor() as cursor:
            await cursor.executemany(statement.format(sql.Identifier(self.name)), rows)

    async def load(self) -> Saved | None:
        """Return the position that was committed last."""
        async with await psycopg.AsyncConnection.connect() as connection:
            found = await connection.execute("SELECT version, position FROM positions WHERE reader = %s", (self.name,))
            row = await found.fetchone()
        return None if row is None else Saved(*row)

    async def commit(self, results: Sequence[Row], saved: Saved) -> None:
        """Commit rows and position, or neither. Raises Overtaken if another reader has moved the position."""
        async with await psycopg.AsyncConnection.connect() as connection:  # commits at its end, or rolls back
            await self.insert(connection, results)
            moved = await connection.execute(
                "INSERT INTO positions AS stored VALUES (%(reader)s, %(version)s, %(position)s) "
                "ON CONFLICT (reader) DO UPDATE SET version = %(version)s, position = %(position)s "
                "WHERE stored.version = %(version)s - 1",
                {"reader": self.name, "version": saved.version, "position": saved.position},
            )
            if moved.rowcount != 1:
                raise Overtaken(f"another reader of {self.name} has stored version {saved.version}")


def row_of(record: Record) -> Row:
    """Make the row of an event: its id, and the time of its record, by which the audit finds the row."""
    value = None if record.value is None else json.dumps(json.loads(record.value))
    return id_of(record), datetime.fromtimestamp(record.timestamp / 1000, UTC), value


async def rows_of(records: Sequence[Record]) -> list[Row]:
    return [row_of(record) for record in records]


async def main(topic: str, name: str) -> None:
    table = Table(name)
    await table.create()
    kafka = os.environ.get("FENCEPOST_KAFKA", "127.0.0.1:9092")
    await Reader(topic, table, records_max=RECORDS_MAX, bootstrap_servers=kafka).follow(rows_of)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
