"""Checks with another client library that the work was real: every key once in the topic, and the ledger complete."""

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from service.contract.wire.headers import KEY_HEADER
from service.contract.wire.names import ledger_topic
from tests.bench.rows import NotRealWork
from tests.integration.judge import wait_until_stable

SILENCE_S: Final = 10.0
TOUCH_HEADER: Final = "touch"

Place = tuple[str, int, int]


def committed(bootstrap: str, topics: Sequence[str]) -> Iterator[Any]:
    """Read every committed message of the topics, up to their present ends.

    Raises:
        NotRealWork: the broker stopped before the end.
    """
    ends = wait_until_stable(bootstrap, topics)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"bench-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 20,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in ends])
        unread = set(ends)
        while unread:
            messages = consumer.consume(10_000, timeout=0.2) or consumer.consume(1, timeout=SILENCE_S)
            if not messages:
                raise NotRealWork(f"not read to the end: {sorted(unread)[:5]}")
            for message in messages:
                if error := message.error():
                    if error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    unread.discard((message.topic(), message.partition()))
                else:
                    yield message
    finally:
        consumer.close()


def keys_of(bootstrap: str, topics: Sequence[str]) -> dict[Place, bytes]:
    """Read the idempotency key at each offset of the topics, except records that a benchmark wrote to warm their files.

    Raises:
        NotRealWork: a key occurs twice.
    """
    places: dict[Place, bytes] = {}
    for message in committed(bootstrap, topics):
        headers = dict(message.headers() or ())
        if TOUCH_HEADER not in headers:
            places[message.topic(), message.partition(), message.offset()] = headers.get(KEY_HEADER, b"")
    if len(set(places.values())) != len(places):
        raise NotRealWork(f"{len(places) - len(set(places.values()))} of {len(places)} records repeat a key")
    return places


def entries_of(bootstrap: str, namespace: str) -> set[Place]:
    """Read the coordinates that the ledger names.

    Raises:
        NotRealWork: the ledger names coordinates twice.
    """
    places: set[Place] = set()
    count = 0
    for message in committed(bootstrap, [ledger_topic(namespace)]):
        for entry in json.loads(message.value()).get("entries", ()):
            places.add((entry["topic"], entry["partition"], entry["offset"]))
            count += 1
    if count != len(places):
        raise NotRealWork(f"the ledger names {count - len(places)} places twice")
    return places


def exactly_once(bootstrap: str, namespace: str, topics: Sequence[str], answered: int, cut: int) -> None:
    """Check that every answered event is in the topics once, and in the ledger.

    Args:
        bootstrap: the brokers.
        namespace: the namespace of the ledger.
        topics: all topics that were written to.
        answered: the number of events that were answered with success.
        cut: how many more events are allowed: wrk ends without waiting for its last answers.

    Raises:
        NotRealWork: an event is missing or duplicated.
    """
    found = keys_of(bootstrap, topics)
    if not answered <= len(found) <= answered + cut:
        raise NotRealWork(f"{answered} events were answered (and {cut} cut off), the topics have {len(found)}")
    named = entries_of(bootstrap, namespace)
    if named != found.keys():
        missing, nowhere = len(found.keys() - named), len(named - found.keys())
        raise NotRealWork(f"{missing} records are not in the ledger, and {nowhere} of its places have none")
