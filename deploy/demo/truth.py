"""Reads what is in a topic, with another client library than the service's and the job's."""

import contextlib
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # its stubs forget the latter

from deploy.console import StackError
from deploy.demo.client import Place

_SETTLE_S = 30.0  # markers come milliseconds after a commit; the broker aborts an open transaction after 10 s
_READ_S = 60.0
_POLL_S = 0.1
_LIVE_S = 0.02
_CALL_S = 10.0
# Log level of librdkafka: warnings and worse. Lines about a closed client's last events would only confuse.
_LOG_LEVEL = 4


@dataclass
class Topic:
    """The coordinates of each key's records, and the number of records without a key."""

    places: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))
    unkeyed: int = 0

    @property
    def repeated(self) -> dict[str, list[Place]]:
        """The keys with more than one record."""
        return {key: places for key, places in self.places.items() if len(places) > 1}

    @property
    def records(self) -> int:
        return sum(map(len, self.places.values())) + self.unkeyed


def read(kafka: str, topic: str) -> Topic:
    """Read the whole topic, read_committed.

    Raises:
        StackError: a transaction stays open, or reading takes too long.
    """
    found = Topic()
    with _reading(kafka, topic) as consumer:
        for message in _all(consumer, topic, _settled_ends(kafka, topic)):
            _note(found, message)
    return found


def values(kafka: str, topic: str) -> list[bytes]:
    """Read the values of the whole topic, read_committed.

    Raises:
        StackError: a transaction stays open, or reading takes too long.
    """
    with _reading(kafka, topic) as consumer:
        return [_value(message) for message in _all(consumer, topic, _settled_ends(kafka, topic))]


@contextlib.contextmanager
def follow(kafka: str, topic: str) -> Iterator[Callable[[], list[bytes]]]:
    """Read a topic while it is written: the function that is given returns the values that have come since."""
    with _reading(kafka, topic) as consumer:

        def come() -> list[bytes]:
            return [_value(message) for message in consumer.consume(1_000, timeout=_LIVE_S) if not message.error()]

        yield come


@contextlib.contextmanager
def _reading(kafka: str, topic: str) -> Iterator[Consumer]:
    """A consumer of the whole topic, from its beginning."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": f"truth-{uuid.uuid4()}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    try:
        partitions = consumer.list_topics(topic, timeout=_CALL_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
        yield consumer
    finally:
        consumer.close()


def _all(consumer: Consumer, topic: str, ends: dict[int, int]) -> Iterator[Message]:
    """Read the records below `ends`. Raises StackError if that takes too long."""
    open_partitions = {partition for partition, end in ends.items() if end > 0}
    deadline = time.monotonic() + _READ_S
    while open_partitions:
        if time.monotonic() > deadline:
            raise StackError(f"{topic} was not read to its end within {_READ_S:.0f} s")
        for message in consumer.consume(1_000, timeout=_POLL_S):
            partition, offset = _at(message)
            error = message.error()
            if error is None:
                yield message
            elif error.code() != KafkaError._PARTITION_EOF:
                raise KafkaException(error)
            elif offset >= ends[partition]:
                open_partitions.discard(partition)


def _value(message: Message) -> bytes:
    value = message.value()
    return value if isinstance(value, bytes) else b""


def _note(found: Topic, message: Message) -> None:
    key = dict(message.headers() or ()).get("idempotency-key")
    if key is None:
        found.unkeyed += 1
    else:
        found.places[key.decode() if isinstance(key, bytes) else key].append(Place(*_at(message)))


def _at(message: Message) -> tuple[int, int]:
    partition, offset = message.partition(), message.offset()
    if partition is None or offset is None:
        raise StackError(f"a message without a place: {message}")
    return partition, offset


def _settled_ends(kafka: str, topic: str) -> dict[int, int]:
    """Look up the end of each partition, once no transaction is open below it.

    Raises:
        StackError: a transaction stays open.
    """
    admin = AdminClient({"bootstrap.servers": kafka, "log_level": _LOG_LEVEL})
    deadline = time.monotonic() + _SETTLE_S
    while True:
        written = _ends(admin, topic, IsolationLevel.READ_UNCOMMITTED)
        if _ends(admin, topic, IsolationLevel.READ_COMMITTED) == written:
            return written
        if time.monotonic() > deadline:
            raise StackError(f"a transaction in {topic} is still open after {_SETTLE_S:.0f} s")
        time.sleep(_POLL_S)


def _ends(admin: AdminClient, topic: str, isolation: IsolationLevel) -> dict[int, int]:
    partitions = admin.list_topics(topic, timeout=_CALL_S).topics[topic].partitions
    latest = {TopicPartition(topic, partition): OffsetSpec.latest() for partition in partitions}  # type: ignore[no-untyped-call]
    found = admin.list_offsets(latest, isolation_level=isolation, request_timeout=_CALL_S)
    return {place.partition: future.result(_CALL_S).offset for place, future in found.items()}
