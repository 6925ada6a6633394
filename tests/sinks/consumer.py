"""A consumer that fills a sink, with faults: it leaves rows out, repeats them, holds them back, and dies midway.

As a program (`python -m tests.sinks.consumer`, settings as JSON on stdin) it writes to PostgreSQL, and dies as by
`kill -9`; in a process with Spark it writes to a Delta table by the function `store`, and raises Died.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from service.contract.wire.headers import STAMP_HEADER

TIMEOUT_S: Final = 30.0
# librdkafka calls none of these retriable.
_NO_COORDINATOR_YET: Final = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)

STORED: Final = "stored"
COMMITTED: Final = "committed"
"""The steps after which a consumer dies: one that stores before it commits repeats a batch, another one loses it."""


@dataclass(frozen=True)
class Row:
    """A row of a sink, as text and numbers."""

    id: str
    topic: str
    partition: int
    offset: int
    accepted_ms: int


@dataclass
class Faults:
    """What the consumer does wrong: ids (in hexadecimal digits) to leave out, to store twice and to hold back, and ids
    with a step: once for each, it dies after this step of the batch with the id."""

    dropped: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    dies: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Feed:
    """What a consumer reads, up to the offset `last` of the only partition, in batches. The offsets of its group are
    committed before a batch is stored if `commits_first`. `journal`: a file with the ids of all rows that it has
    stored; a Row a line of those held back."""

    bootstrap: str
    topic: str
    group: str
    last: int
    journal: str
    batch: int = 20
    commits_first: bool = False
    faults: Faults = field(default_factory=Faults)

    @classmethod
    def parse(cls, text: str) -> "Feed":
        values = json.loads(text)
        faults = Faults(**values.pop("faults"))
        faults.dies = [(id, step) for id, step in faults.dies]
        return cls(**values, faults=faults)

    def text(self) -> str:
        return json.dumps(asdict(self))


class Died(Exception):
    """The consumer has died after a step of the batch with the id."""


Store = Callable[[Sequence[Row]], None]


def run(feed: Feed, store: Store, die: Callable[[str], None]) -> None:
    """Feed a sink from the group's position on, up to the last offset."""
    consumer = Consumer(
        {
            "bootstrap.servers": feed.bootstrap,
            "group.id": feed.group,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        start = _position(consumer, feed.topic)
        consumer.assign([TopicPartition(feed.topic, 0, start)])
        while start <= feed.last:
            messages = _batch(consumer, feed)
            start = (messages[-1].offset() or 0) + 1
            _handle(feed, consumer, [row_of(message) for message in messages], start, store, die)
    finally:
        consumer.close()


def _position(consumer: Consumer, topic: str) -> int:
    """Return the group's committed offset, 0 without one; the coordinator of a new broker may not be ready yet."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            (committed,) = consumer.committed([TopicPartition(topic, 0)], TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() not in _NO_COORDINATOR_YET or time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return max(committed.offset, 0)


def _batch(consumer: Consumer, feed: Feed) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < feed.batch and (not messages or (messages[-1].offset() or 0) < feed.last):
        message = consumer.poll(TIMEOUT_S)
        assert message is not None
        assert message.error() is None, message.error()
        messages.append(message)
    return messages


def _handle(
    feed: Feed, consumer: Consumer, rows: Sequence[Row], after: int, store: Store, die: Callable[[str], None]
) -> None:
    """Store a batch and commit the offset `after` it, in the order of the consumer, and die in between if planned."""

    def store_batch() -> None:
        faults = feed.faults
        kept = [row for row in rows if row.id not in (*faults.dropped, *faults.held)]
        kept += [row for row in rows if row.id in faults.repeated]
        if kept:
            store(kept)
        with Path(feed.journal).open("a") as journal:
            journal.writelines(f"{row.id}\n" for row in kept)
            journal.writelines(f"{json.dumps(asdict(row))}\n" for row in rows if row.id in faults.held)

    def commit() -> None:
        consumer.commit(offsets=[TopicPartition(feed.topic, 0, after)], asynchronous=False)

    ids = {row.id for row in rows}
    first, second = (commit, store_batch) if feed.commits_first else (store_batch, commit)
    first()
    step = COMMITTED if feed.commits_first else STORED
    for id, of_step in feed.faults.dies:
        if id in ids and of_step == step:
            die(id)
    second()


def row_of(message: Message) -> Row:
    """Make the row of a record from its header."""
    headers = dict(message.headers() or [])
    header = headers[STAMP_HEADER]
    assert isinstance(header, bytes)
    _, id, _, accepted_ms, *_ = header.decode().split(";")
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    return Row(id, topic, partition, offset, int(accepted_ms))


def _raise(id: str) -> None:
    raise Died(id)


def feed_here(feed: Feed, store: Store) -> int:
    """Feed a sink in this process, with a new consumer after each death; return how often it has died."""
    deaths = 0
    while True:
        try:
            run(feed, store, _raise)
        except Died as died:
            deaths += 1
            feed.faults.dies = [planned for planned in feed.faults.dies if planned[0] != str(died)]
        else:
            return deaths


def into_postgres(dsn: str, insert: str) -> Store:
    """Return a function that inserts rows in one transaction, by a statement with the fields of Row as parameters."""

    def store(rows: Sequence[Row]) -> None:
        with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
            cursor.executemany(insert.encode(), [asdict(row) for row in rows])

    return store


def _die(id: str) -> None:
    """End as by kill -9: nothing is closed, flushed or committed. The parent reads which death this was."""
    sys.stdout.write(id)
    sys.stdout.flush()
    os._exit(9)


if __name__ == "__main__":
    dsn_, insert_, feed_ = json.loads(sys.stdin.read())
    run(Feed.parse(feed_), into_postgres(dsn_, insert_), _die)
