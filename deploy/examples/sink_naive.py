"""Fills a table of PostgreSQL without the transaction of `sink_postgres.py`: a crash repeats or loses rows.

    python -m deploy.examples.sink_naive store-first TOPIC TABLE      # stores rows, then commits the offset
    python -m deploy.examples.sink_naive commit-first TOPIC TABLE     # commits the offset, then stores rows

What most consumers do. The rows are in the database and the offset is in Kafka, so that one of them comes first.
"""

import asyncio
import os
import sys
from collections.abc import Sequence

import psycopg
from aiokafka import AIOKafkaConsumer

from deploy.examples.sink_postgres import RECORDS_MAX, Row, Table, row_of

POLL_MS = 500


async def store(table: Table, rows: Sequence[Row]) -> None:
    """Commit rows in a transaction of their own."""
    async with await psycopg.AsyncConnection.connect() as connection:
        await table.insert(connection, rows)


async def main(order: str, topic: str, name: str) -> None:
    table = Table(name)
    await table.create()
    async with AIOKafkaConsumer(
        topic,
        bootstrap_servers=os.environ.get("FENCEPOST_KAFKA", "127.0.0.1:9092"),
        group_id=name,
        group_instance_id=name,  # started again, the program gets its partitions at once (KIP-345)
        isolation_level="read_committed",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    ) as consumer:
        while True:
            batches = await consumer.getmany(timeout_ms=POLL_MS, max_records=RECORDS_MAX)
            rows = [row_of(record) for records in batches.values() for record in records]
            if not rows:
                continue
            if order == "store-first":
                await store(table, rows)
                await consumer.commit()  # killed before this: the batch is stored again
            else:
                await consumer.commit()
                await store(table, rows)  # killed before this: the batch is never stored


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
