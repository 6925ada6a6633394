"""Writes histories to Kafka as Fencepost does, and faulty ones, with confluent-kafka."""

import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from struct import pack
from typing import Any, Final

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.cimpl import NewPartitions, NewTopic

from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER, Stamp
from service.contract.wire.ids import Header, event_id, fingerprint
from service.contract.wire.journal import encode_answer, encode_answers
from service.contract.wire.ledger import Begin, LedgerRecord
from service.contract.wire.ledger_entries import Entry
from service.contract.wire.names import findings_topic, ledger_topic, requests_topic, transactional_id

TIMEOUT_S = 30.0
MESSAGE_BYTES = 2_000_000
_TIMESTAMP_TYPE = "message.timestamp.type"
INTERNAL: Final = {_TIMESTAMP_TYPE: "LogAppendTime"}
"""The settings of the internal topics, as the service makes them."""


@dataclass(frozen=True)
class Written:
    """A written record, and its event."""

    key: str
    id: bytes
    fp: bytes
    at: int
    topic: str
    partition: int
    offset: int
    ts: int

    def entry(self, **changes: Any) -> Entry:
        values = {name: getattr(self, name) for name in ("id", "fp", "at", "topic", "partition", "offset", "ts")}
        return Entry(**(values | changes))

    def answer(self, status: int = 201, *, replayed: bool = False, **changes: Any) -> str:
        values: dict[str, Any] = {
            "id": self.id,
            "fp": self.fp,
            "at": self.at,
            "status": status,
            "code": None if status == 201 else "outcome-unknown",
            "replayed": replayed,
            "latency_ms": 3.25,
            "topic": self.topic,
            "partition": self.partition if status == 201 else None,
            "offset": self.offset if status == 201 else None,
        }
        return encode_answer(**(values | changes))


@dataclass
class Writer:
    """A producer of a slot, by the fields of the fencepost header and the ledger record."""

    slot: int
    producer_id: int
    epoch: int = 0
    instance: str = "127.0.0.1:8000"


WRITER: Final = Writer(0, 100, 0, "a:1")
OTHER_WRITER: Final = Writer(1, 200, 0, "b:1")


@dataclass
class History:
    """A namespace on a broker with its internal topics (`internal`: their settings), and methods that write to it.

    Ledger and journal begin at `begun_ms` (default: now).
    """

    bootstrap: str
    namespace: str
    slots: int = 4
    now_ms: int = field(default_factory=lambda: int(time.time() * 1000))
    internal: dict[str, str] = field(default_factory=lambda: dict(INTERNAL))
    begun_ms: int | None = None
    _plain: Producer | None = None
    _journal: list[str] = field(default_factory=list)
    _topic_ids: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.admin = AdminClient({"bootstrap.servers": self.bootstrap})
        topics = {ledger_topic(self.namespace): self.slots, requests_topic(self.namespace): 2}
        timestamps = {} if self.begun_ms is None else {_TIMESTAMP_TYPE: "CreateTime"}
        for name, partitions in topics.items():
            self.topic(name, partitions, self.internal | timestamps)
        if self.begun_ms is not None:
            self._begin(self.begun_ms)
            for name in topics:
                self.configure(name, _TIMESTAMP_TYPE, self.internal[_TIMESTAMP_TYPE])

    def topic(self, name: str, partitions: int = 1, config: dict[str, str] | None = None) -> str:
        self.admin.create_topics([NewTopic(name, partitions, 1, config=config or {})])[name].result(TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        while not self.topic_ids([name]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return name

    def configure(self, name: str, setting: str, value: str) -> None:
        """Change a setting of a topic."""
        by = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
        wanted = ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=[by])
        self.admin.incremental_alter_configs([wanted])[wanted].result(TIMEOUT_S)

    def grow(self, name: str, partitions: int) -> None:
        """Give a topic more partitions."""
        self.admin.create_partitions([NewPartitions(name, partitions)])[name].result(TIMEOUT_S)

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        """Return the ids of these topics as the service writes them to the ledger, without missing topics."""
        names = sorted(set(names))
        for name in names:
            if name not in self._topic_ids:
                with suppress(KafkaException):  # the topic does not exist
                    asked = self.admin.describe_topics(TopicCollection([name]))
                    id = asked[name].result(TIMEOUT_S).topic_id
                    # Kafka formats a topic id in URL-safe base64, librdkafka does not.
                    halves = id.get_most_significant_bits(), id.get_least_significant_bits()
                    self._topic_ids[name] = urlsafe_b64encode(pack(">qq", *halves)).rstrip(b"=").decode()
        return {name: self._topic_ids[name] for name in names if name in self._topic_ids}

    def remove(self, name: str) -> None:
        """Delete a topic, and wait until it no longer exists."""
        self._topic_ids.pop(name, None)
        self.admin.delete_topics([name])[name].result(TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        while name in self.admin.list_topics(timeout=TIMEOUT_S).topics:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @property
    def plain(self) -> Producer:
        """The idempotent producer without transactions."""
        if self._plain is None:
            self._plain = Producer(
                {
                    "bootstrap.servers": self.bootstrap,
                    "enable.idempotence": True,
                    "linger.ms": 5,
                    "acks": "all",
                    "message.max.bytes": MESSAGE_BYTES,
                }
            )
        return self._plain

    def forget_producer(self) -> None:
        """Replace the `plain` producer: the broker has lost its state."""
        self.plain.purge()
        self._plain = None

    def transactional(self, writer: Writer, *, timeout_ms: int = 600_000) -> Producer:
        """Open a transactional producer for this writer; the newest of a slot fences the others, as in the service."""
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "transactional.id": transactional_id(self.namespace, writer.slot),
                "transaction.timeout.ms": timeout_ms,
                "linger.ms": 5,
                "message.max.bytes": MESSAGE_BYTES,
            }
        )
        producer.init_transactions(TIMEOUT_S)
        return producer

    def send(
        self,
        producer: Producer,
        topic: str,
        keys: Sequence[str],
        writer: Writer | None,
        *,
        at: int | None = None,
        ts: int | None = None,
        value: bytes | None = b'{"n":1}',
        record_key: bytes | None = None,
        partition: int = 0,
        asked_partition: int | None = None,
        headers: Sequence[Header] = (),
        keyed: bool = True,
    ) -> list[Written]:
        """Send one event for each key, with the header of `writer` (None: only the key), and wait for all."""
        at = self.now_ms if at is None else at
        done: list[Written] = []

        def landed(key: str, id: bytes, fp: bytes) -> Any:
            def callback(error: Any, message: Message) -> None:
                if error is not None:
                    raise AssertionError(f"{topic}: {error}")
                coordinates = (message.topic(), message.partition(), message.offset(), message.timestamp()[1])
                done.append(Written(key, id, fp, at, *coordinates))  # type: ignore[arg-type]

            return callback

        for key in keys:
            id = event_id(key)
            content = value if value is None else value.replace(b"$key", key.encode())
            fp = fingerprint(topic, asked_partition, record_key, headers, content)
            all_headers: list[Header] = []
            if keyed:
                all_headers.append((KEY_HEADER, key.encode()))
            if writer is not None:
                header = Stamp(id, fp, at, writer.slot, writer.producer_id, writer.epoch, writer.instance)
                all_headers.append((STAMP_HEADER, header.encode()))
            all_headers += headers
            producer.produce(
                topic,
                value=content,
                key=record_key,
                headers=list(all_headers),
                partition=partition,
                on_delivery=landed(key, id, fp),
                timestamp=self.now_ms if ts is None else ts,
            )
            producer.poll(0)
        producer.flush(TIMEOUT_S)
        assert len(done) == len(keys)
        order = {event_id(key): nth for nth, key in enumerate(keys)}
        return sorted(done, key=lambda written: (order[written.id], written.offset))

    def ledger(self, producer: Producer, writer: Writer, entries: Sequence[Entry], *, topic_ids: bool = True) -> None:
        """Send a ledger record to the slot's partition, in the open transaction of the producer if there is one.

        Earlier releases wrote no `topic_ids`.
        """
        ids = self.topic_ids([one.topic for one in entries]) if topic_ids else {}
        record = LedgerRecord(writer.slot, writer.producer_id, writer.epoch, writer.instance, entries, ids)
        self.raw(producer, ledger_topic(self.namespace), record.encode(), writer.slot)

    def _begin(self, at: int) -> None:
        for slot in range(self.slots):
            record = Begin(slot, 1, 0, "first:1", 0, at)
            self.raw(self.plain, ledger_topic(self.namespace), record.encode(), slot, timestamp=at)
        self.raw(self.plain, requests_topic(self.namespace), encode_answers("first:1", []), timestamp=at)

    def begin(self, producer: Producer, writer: Writer) -> None:
        """Commit a begin record in its own transaction, as a new owner of a slot does."""
        producer.begin_transaction()
        record = Begin(writer.slot, writer.producer_id, writer.epoch, writer.instance, 0, self.now_ms)
        self.raw(producer, ledger_topic(self.namespace), record.encode(), writer.slot)
        producer.commit_transaction(TIMEOUT_S)

    def raw(self, producer: Producer, topic: str, value: bytes | None, partition: int = 0, **more: Any) -> None:
        producer.produce(topic, value=value, partition=partition, **more)
        producer.flush(TIMEOUT_S)

    def deliver(
        self,
        producer: Producer,
        writer: Writer,
        topic: str,
        keys: Sequence[str],
        *,
        answer: bool = True,
        topic_ids: bool = True,
        **more: Any,
    ) -> list[Written]:
        """Write a complete transaction: events, their ledger record, commit, and the answers in the journal."""
        producer.begin_transaction()
        written = self.send(producer, topic, keys, writer, **more)
        self.ledger(producer, writer, [one.entry() for one in written], topic_ids=topic_ids)
        producer.commit_transaction(TIMEOUT_S)
        if answer:
            self.answers([one.answer() for one in written])
        return written

    def answers(self, answers: Sequence[str], partition: int = 0, **more: Any) -> None:
        """Write one journal record; `more` is for `produce`, such as its `timestamp`."""
        record = encode_answers("127.0.0.1:8000", answers)
        self.raw(self.plain, requests_topic(self.namespace), record, partition, **more)

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """Delete the records before an offset, as retention does.

        A broker refuses that (POLICY_VIOLATION) for a compacted topic until a new cleanup.policy has reached the log.
        """
        where = TopicPartition(topic, partition, offset)
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self.admin.delete_records([where])[where].result(TIMEOUT_S)
                return
            except KafkaException as error:
                if error.args[0].code() != KafkaError.POLICY_VIOLATION or time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def published(self) -> list[tuple[str, dict[str, Any] | None]]:
        """Read all records of the topic of findings, in order: key and value (None: a tombstone)."""
        found: list[tuple[str, dict[str, Any] | None]] = []
        for message in self.records(findings_topic(self.namespace)):
            key, value = message.key(), message.value()
            assert isinstance(key, bytes)
            found.append((key.decode(), json.loads(value) if value is not None else None))
        return found

    def records(self, topic: str) -> Iterator[Message]:
        """Read all committed records of partition 0 of a topic, in order; KafkaException if the broker refuses, and
        AssertionError if it does not answer."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "none", "enable.partition.eof": True})
        try:
            consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
            while True:
                message = consumer.poll(TIMEOUT_S)
                assert message is not None, f"no record and no end of {topic} within {TIMEOUT_S} s"
                if (error := message.error()) is None:
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:
                    return
                else:
                    raise KafkaException(error)
        finally:
            consumer.close()


def report(folder: Any) -> dict[str, Any]:
    """Read report.json in a folder."""
    loaded: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return loaded
