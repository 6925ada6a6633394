"""The judge: reads whole topics read_committed with another client library, and compares them with clients' logs."""

import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its own documentation imports it from here
    AdminClient,
    OffsetSpec,
)

from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER, Stamp
from service.contract.wire.ids import event_id
from service.contract.wire.ledger import LedgerRecord, decode_ledger
from service.contract.wire.names import ledger_topic
from tests.integration.client import Attempt

ANSWER_S: Final = 10.0
# An open transaction of a killed process lives until its timeout, for which the broker looks every 10 s.
STABLE_S: Final = 25.0

Place = tuple[str, int, int]


@dataclass(frozen=True)
class Delivered:
    """One record as a consumer sees it."""

    place: Place
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    timestamp: tuple[int, int]  # its type, its ms

    @property
    def idempotency_key(self) -> str | None:
        found = [content for name, content in self.headers if name == KEY_HEADER]
        return found[0].decode() if len(found) == 1 else None


def read_committed(bootstrap: str, topics: Sequence[str], read_s: float = ANSWER_S) -> list[Delivered]:
    """Read every committed record of the topics, after waiting until no transaction is open in them.

    AssertionError if no further record comes for `read_s`.
    """
    ends = wait_until_stable(bootstrap, topics)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"judge-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 20,
        }
    )
    found: list[Delivered] = []
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in ends])
        unread = set(ends)
        deadline = time.monotonic() + read_s
        while unread:
            assert time.monotonic() < deadline, f"not read to the end: {unread}"
            for message in consumer.consume(1000, timeout=0.2):
                topic, partition, offset = message.topic(), message.partition(), message.offset()
                assert topic is not None
                assert partition is not None
                assert offset is not None
                if error := message.error():
                    if error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    if offset >= ends[topic, partition]:
                        unread.discard((topic, partition))
                    continue
                found.append(_delivered((topic, partition, offset), message))
                deadline = time.monotonic() + read_s
    finally:
        consumer.close()
    return found


def _delivered(place: Place, message: Any) -> Delivered:
    headers = [(name, content or b"") for name, content in message.headers() or []]
    return Delivered(place, message.key(), message.value(), headers, message.timestamp())


def wait_until_stable(bootstrap: str, topics: Sequence[str], stable_s: float = STABLE_S) -> dict[tuple[str, int], int]:
    """Wait until the last stable offset of each partition is its high watermark; returns these offsets."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    places = [
        TopicPartition(topic, partition)
        for topic in topics
        for partition in admin.list_topics(topic, timeout=ANSWER_S).topics[topic].partitions
    ]
    deadline = time.monotonic() + stable_s
    while True:
        stable, high = (
            _ends(admin, places, isolation)
            for isolation in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
        )
        if stable == high:
            return stable
        standing = [f"{place}: {stable[place]} of {end}" for place, end in high.items() if stable[place] < end]
        assert time.monotonic() < deadline, f"transactions stay open: {standing}"
        time.sleep(0.05)


def _ends(
    admin: AdminClient, places: Iterable[TopicPartition], isolation: IsolationLevel
) -> dict[tuple[str, int], int]:
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    futures = admin.list_offsets(dict.fromkeys(places, latest), isolation_level=isolation)
    return {(place.topic, place.partition): future.result(ANSWER_S).offset for place, future in futures.items()}


def violations(bootstrap: str, topics: Sequence[str], history: Sequence[Attempt]) -> list[str]:
    """List the differences between the topics and the clients' answers."""
    by_key: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in history:
        by_key[attempt.asked.key].append(attempt)
    delivered: dict[str, list[Delivered]] = defaultdict(list)
    wrong: list[str] = []
    for record in read_committed(bootstrap, topics):
        key = record.idempotency_key
        if key is None or key not in by_key:
            wrong.append(f"nobody sent what is at {record.place}: {key}")
        else:
            delivered[key].append(record)
            wrong += stamp_faults(record, key)
    for key, attempts in by_key.items():
        wrong += faults_of_key(key, attempts, delivered[key])
    return wrong


def faults_of_key(key: str, attempts: Sequence[Attempt], records: Sequence[Delivered]) -> list[str]:
    places = [record.place for record in records]
    if len(places) > 1:
        return [f"{key} is there {len(places)} times: {places}"]
    oks = [attempt for attempt in attempts if attempt.kind == "ok"]
    if len({attempt.body for attempt in oks}) > 1:
        return [f"{key} was answered with different places: {[attempt.body for attempt in oks]}"]
    if oks and not places:
        return [f"{key} is lost: it was acknowledged at {oks[0].place}"]
    if oks and places != [oks[0].place]:
        return [f"{key} is at {places[0]}, and was acknowledged at {oks[0].place}"]
    if places and all(attempt.kind in ("fail", "busy") for attempt in attempts):
        return [f"{key} is at {places[0]}, and nobody was left in doubt: {[a.status for a in attempts]}"]
    possible = oks or [attempt for attempt in attempts if attempt.kind in ("info", "busy")]
    if records and not any(_is(records[0], attempt) for attempt in possible):
        return [f"{key} at {places[0]} has other bytes than were sent: {records[0]}"]
    return []


def _is(record: Delivered, attempt: Attempt) -> bool:
    asked = attempt.asked
    value = None if asked.value == b"null" else asked.value
    own = [(name, content) for name, content in record.headers if name not in (KEY_HEADER, STAMP_HEADER, "traceparent")]
    return (
        record.value == value
        and record.key == (None if asked.record_key is None else asked.record_key.encode())
        and own == [(name, content.encode()) for name, content in asked.headers.items()]
    )


def stamp_faults(record: Delivered, key: str) -> list[str]:
    stamps = [content for name, content in record.headers if name == STAMP_HEADER]
    if len(stamps) != 1 or Stamp.decode(stamps[0]).id != event_id(key):
        return [f"{record.place} has not the one stamp of {key}: {stamps}"]
    return []


def ledger_faults(bootstrap: str, namespace: str, topics: Sequence[str], read_s: float = ANSWER_S) -> list[str]:
    """List the differences between ledger and topics: each record has one entry, each entry its record."""
    entries: dict[Place, bytes] = {}
    wrong: list[str] = []
    for raw in read_committed(bootstrap, [ledger_topic(namespace)], read_s):
        record = decode_ledger(raw.value)
        if record.slot != raw.place[1]:
            wrong.append(f"a record of slot {record.slot} is in the ledger's partition {raw.place[1]}")
        for entry in record.entries if isinstance(record, LedgerRecord) else ():
            place = (entry.topic, entry.partition, entry.offset)
            if place in entries:
                wrong.append(f"the ledger has {place} twice")
            if entry.topic in topics:
                entries[place] = entry.id
    found = {
        record.place: Stamp.decode(dict(record.headers)[STAMP_HEADER]).id
        for record in read_committed(bootstrap, topics, read_s)
    }
    wrong += [f"the ledger lacks {place}" for place in found.keys() - entries.keys()]
    wrong += [f"the ledger names {place}, where nothing is" for place in entries.keys() - found.keys()]
    return wrong + [
        f"another id is at {place}" for place in found.keys() & entries.keys() if found[place] != entries[place]
    ]
