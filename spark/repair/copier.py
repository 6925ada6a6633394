"""Reads single records, and copies records into another topic each once (RecordCopier.java), through kafka-clients."""

import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession

from service.contract import SharedSettings
from service.contract.wire import ids
from service.contract.wire.headers import RESERVED_HEADERS, STAMP_HEADER, TRACE_HEADER, Stamp
from service.contract.wire.versions import WireError
from spark.engine.jvm import Py4JJavaError, gateway, jvm, reason
from spark.errors import CannotRun
from spark.reading import connection
from spark.reading.kafka_admin import CALL_MS, POLL_MS, KafkaAdmin, TopicPartition
from spark.reading.source import Span
from spark.repair.entries import Coordinates

SOURCE: Final = Path(__file__).with_name("RecordCopier.java")
CLASS: Final = "fencepost.RecordCopier"

RECORDS_A_TRANSACTION: Final = 1_000
BYTES_A_TRANSACTION: Final = 8 << 20
# A transaction is committed after that time whatever its size: its records may lie far apart in the source.
OPEN_MS: Final = 15_000
# Longer than that, and than a commit takes; the broker ends the transaction of a killed process after it.
TRANSACTION_MS: Final = 60_000
# How long the markers of an ended transaction may take.
MARKERS_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Record:
    """A record of Kafka; `timestamp` is in ms."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]

    @property
    def coordinates(self) -> Coordinates:
        return self.topic, self.partition, self.offset


@dataclass(frozen=True, slots=True)
class Part:
    """What a partition of the target gets: spans of source topics in this order, from its offset `base` on.

    `exact`: each offset of the spans has a record (else some may be transaction markers).
    """

    base: int
    spans: tuple[tuple[str, tuple[Span, ...]], ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class Copied:
    """How many records an earlier attempt had written, and how many this one has."""

    before: int
    now: int

    @property
    def all(self) -> int:
        return self.before + self.now


def transactional_id(namespace: str, target: str) -> str:
    """Name the transactional id of the producer that copies into a topic."""
    return f"{namespace}.repair.{target}"


def _config(spark: SparkSession, shared: SharedSettings, more: Mapping[str, str]) -> Any:
    config = jvm(spark).java.util.HashMap()
    for name, value in {**connection.for_kafka_clients(shared), **more}.items():
        config.put(name, value)
    return config


def _consumer_config(spark: SparkSession, shared: SharedSettings, **more: str) -> Any:
    of_bytes = "org.apache.kafka.common.serialization.ByteArrayDeserializer"
    settings = {
        "isolation.level": "read_committed",
        "enable.auto.commit": "false",
        "auto.offset.reset": "none",
        "key.deserializer": of_bytes,
        "value.deserializer": of_bytes,
    }
    return _config(spark, shared, {**settings, **more})


def _called(call: Callable[[], Any], doing: str) -> Any:
    """Call into kafka-clients; CannotRun, with the message of the innermost cause, if the call fails."""
    try:
        return call()
    except Py4JJavaError as error:
        raise CannotRun(f"{doing}: {reason(error)}") from error


def records_at(spark: SparkSession, shared: SharedSettings, wanted: Sequence[Coordinates]) -> Iterator[Record]:
    """Read the committed records at these coordinates, by topic, partition and offset; absent ones are left out."""
    by_partition: dict[TopicPartition, list[int]] = {}
    for topic, partition, offset in sorted(set(wanted)):
        by_partition.setdefault((topic, partition), []).append(offset)
    with closing(KafkaAdmin(spark, shared)) as admin:
        topics = admin.describe(sorted({topic for topic, _ in by_partition}))
        known = [(name, number) for name, number in by_partition if name in topics and number < topics[name].partitions]
        bounds = {at: (ends.log_start, ends.last_stable) for at, ends in admin.ends(known).items()} if known else {}
    kafka: Any = jvm(spark).org.apache.kafka
    config = _consumer_config(spark, shared, **{"max.poll.records": "1", "max.partition.fetch.bytes": "65536"})
    consumer = _called(lambda: kafka.clients.consumer.KafkaConsumer(config), "reading records")
    try:
        for (topic, partition), (start, end) in sorted(bounds.items()):
            handle = kafka.common.TopicPartition(topic, partition)
            consumer.assign(jvm(spark).java.util.Collections.singletonList(handle))
            for offset in by_partition[topic, partition]:
                if start <= offset < end and (record := _record_at(spark, consumer, handle, offset)) is not None:
                    yield record
    finally:
        consumer.close(jvm(spark).java.time.Duration.ofMillis(1000))


def _record_at(spark: SparkSession, consumer: Any, handle: Any, offset: int) -> Record | None:
    """Read the record at an offset of the assigned partition; None if the offset has none."""
    doing = f"reading {handle.topic()}[{handle.partition()}]@{offset}"
    wait = jvm(spark).java.time.Duration.ofMillis(POLL_MS)
    consumer.seek(handle, offset)
    deadline = time.monotonic() + CALL_MS / 1000
    while time.monotonic() < deadline:
        polled = _called(lambda: consumer.poll(wait), doing).records(handle)
        if polled.size():
            record = polled.get(0)
            return _record_of(record) if record.offset() == offset else None
        if _called(lambda: consumer.position(handle), doing) > offset:
            return None
    raise CannotRun(f"{doing}: no record within {CALL_MS // 1000} s; check that the brokers are up")


def _record_of(record: Any) -> Record:
    headers = tuple((str(header.key()), header.value()) for header in record.headers().toArray())
    return Record(
        str(record.topic()),
        int(record.partition()),
        int(record.offset()),
        int(record.timestamp()),
        record.key(),
        record.value(),
        headers,
    )


def is_record_of(record: Record, id: str, fingerprint: str | None, *, has_header: bool) -> bool:
    """Check whether a record is the one that the audit has read of an id, by the ids and fingerprints (hexadecimal).

    With Fencepost's header the header's id and fingerprint are compared, without it the fingerprint of the content. The
    consumer has checked the checksum of the record's batch (`check.crcs`).
    """
    stamps = [value for name, value in record.headers if name == STAMP_HEADER and value is not None]
    if has_header:
        try:
            stamp = Stamp.decode(stamps[0]) if stamps else None
        except WireError:
            return False
        return stamp is not None and (stamp.id.hex(), stamp.fingerprint.hex()) == (id, fingerprint)
    own = (*RESERVED_HEADERS, TRACE_HEADER)
    headers = [(name, value or b"") for name, value in record.headers if name not in own]
    content = ids.fingerprint(record.topic, None, record.key, headers, record.value)
    return not stamps and content.hex() == fingerprint


class Copier:
    """Copies records into a topic: `init` fences an earlier producer of the topic's transactional id, then `copy`."""

    def __init__(self, spark: SparkSession, shared: SharedSettings, target: str) -> None:
        of_bytes = "org.apache.kafka.common.serialization.ByteArraySerializer"
        producer = {
            "transactional.id": transactional_id(shared.namespace, target),
            "transaction.timeout.ms": str(TRANSACTION_MS),
            "key.serializer": of_bytes,
            "value.serializer": of_bytes,
            "max.request.size": str(64 << 20),
        }
        self._doing = f"copying into {target!r}"
        kind = _compiled(spark)
        parameters = (
            _consumer_config(spark, shared),
            _config(spark, shared, producer),
            target,
            RECORDS_A_TRANSACTION,
            BYTES_A_TRANSACTION,
            OPEN_MS,
            CALL_MS,
        )
        array = gateway(spark).new_array(jvm(spark).java.lang.Object, len(parameters))
        for nth, parameter in enumerate(parameters):
            array[nth] = parameter
        self._copier = _called(lambda: kind.getConstructors()[0].newInstance(array), self._doing)

    def init(self) -> None:
        """Fence the producer of an earlier attempt, and end its transaction; CannotRun without the permission."""
        _called(self._copier.init, self._doing)

    def copy(self, parts: Mapping[int, Part], ends: Mapping[int, int]) -> Copied:
        """Write what the partitions lack of their parts. `ends` are the ends of the target's partitions.

        CannotRun if the target has other records there than an earlier attempt at the same parts has written.
        """
        for partition, part in sorted(parts.items()):
            _called(partial(self._copy_part, partition, part, ends[partition]), self._doing)
        return Copied(int(self._copier.compared()), int(self._copier.sent()))

    def _copy_part(self, partition: int, part: Part, end: int) -> None:
        self._copier.begin(partition, part.base, end)
        for topic, spans in part.spans:
            packed = b"".join(struct.pack(">qq", *span) for span in spans)
            found = self._copier.copy(topic, packed)
            wanted = sum(last - first for first, last in spans)
            if part.exact and found != wanted:
                raise CannotRun(f"{self._doing}: {topic}[{partition}] has {found} of {wanted} records: make a new plan")
        self._copier.end()

    def close(self) -> None:
        """Close the connections."""
        self._copier.close()


# By JVM. py4j looks up a method once for each name of a class, so that a class must be compiled once.
_CLASSES: Final[WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()


def _compiled(spark: SparkSession) -> Any:
    """Compile the copier's source with Janino, with the class path of kafka-clients; once for each JVM.

    The log store for S3 is compiled when it is installed (deploy/install/s3.py), since Delta loads that class by its
    name from the class path. This class is loaded here only, so that no installation or cluster needs a jar for it.
    """
    if gateway(spark) not in _CLASSES:
        kafka_class = jvm(spark).org.apache.kafka.common.TopicPartition("t", 0).getClass()
        compiler = jvm(spark).org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(kafka_class.getClassLoader())
        _called(lambda: compiler.cook(SOURCE.read_text(encoding="utf-8")), f"compiling {SOURCE.name}")
        _CLASSES[gateway(spark)] = compiler.getClassLoader().loadClass(CLASS)
    return _CLASSES[gateway(spark)]


def await_decided(admin: KafkaAdmin, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
    """Wait until no transaction is open in these partitions, and return their ends; CannotRun after MARKERS_S."""
    deadline = time.monotonic() + MARKERS_S
    while True:
        ends = admin.ends(partitions)
        blocked = [at for at in partitions if ends[at].last_stable < ends[at].high_watermark]
        if not blocked:
            return {at: ends[at].last_stable for at in partitions}
        if time.monotonic() > deadline:
            names = ", ".join(f"{topic}[{number}]" for topic, number in blocked)
            raise CannotRun(f"a transaction is open in {names}: only a repair may write there; wait until it has ended")
        time.sleep(0.2)
