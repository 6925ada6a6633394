"""Requests about open transactions (KIP-664), a marker that ends one, and a fetch that returns markers too.

DescribeProducers needs Read on the topic, DescribeTransactions and ListTransactions need Describe on the transactional
id, WriteTxnMarkers needs Alter on the cluster. aiokafka implements none of them.
"""

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

from aiokafka import errors
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields
from aiokafka.record.control_record import ControlRecord
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.structs import TopicPartition

from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.kafka.client import BaseClient
from service.kafka.hanging import ActiveProducer, Marker
from service.kafka.metadata import Partition
from service.kafka.nodes import RETRY_PAUSE_S
from service.kafka.outcomes import OK, raise_if_error

# Kafka's names of a transaction's states whose markers are being written.
ENDING: Final = ("PrepareCommit", "PrepareAbort", "PrepareEpochFence")
UNSUPPORTED_VERSION: Final = errors.UnsupportedVersionError.errno
# No permission to Read the topic, or a broker older than 2.8: a retry does not change these.
FINAL: Final = frozenset({errors.TopicAuthorizationFailedError.errno, UNSUPPORTED_VERSION})
# What aiokafka raises where a broker is too old for a request: the first if the broker lacks the API, the second if it
# has the API in other versions only.
UNSUPPORTED: Final = (errors.IncompatibleBrokerVersion, NotImplementedError)
# What `fetch` raises where the log starts after the offset: the record was deleted, or the topic was created again.
DELETED: Final = errors.OffsetOutOfRangeError
# Errors of a partition that no longer has the offset, is gone, or may not be read: its entries cannot be found.
UNREADABLE: Final = (DELETED, errors.TopicAuthorizationFailedError, errors.UnknownTopicOrPartitionError)
MARKERS: Final = {0: Marker.ABORT, 1: Marker.COMMIT}  # by the type in a control record's key
# The same bound as in kafka/reader.py: unpacking a larger response blocks the event loop.
FETCH_BYTES: Final = 512 * 1024
FETCH_WAIT_MS: Final = 20
# The isolation levels of a request (IsolationLevel in Kafka).
READ_UNCOMMITTED, READ_COMMITTED = 0, 1

_PARTITIONS_BY_TOPIC: Final = CompactArray(
    ("topic", CompactString("utf-8")),
    ("partitions", CompactArray(Int32)),
    ("tags", TaggedFields),
)
CODES_BY_TOPIC: Final = CompactArray(
    ("topic", CompactString("utf-8")),
    ("partitions", CompactArray(("partition", Int32), ("error_code", Int16), ("tags", TaggedFields))),
    ("tags", TaggedFields),
)


class _DescribeProducersResponse(Response):  # type: ignore[misc]  # aiokafka ships no types
    API_KEY = 61
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("error_message", CompactString("utf-8")),
                        (
                            "active_producers",
                            CompactArray(
                                ("producer_id", Int64),
                                ("producer_epoch", Int32),
                                ("last_sequence", Int32),
                                ("last_timestamp", Int64),
                                ("coordinator_epoch", Int32),
                                ("current_txn_start_offset", Int64),
                                ("tags", TaggedFields),
                            ),
                        ),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class DescribeProducers_v0(RequestStruct):  # type: ignore[misc]  # noqa: N801 - as aiokafka names its own
    FLEXIBLE_VERSION = True
    API_KEY = 61
    API_VERSION = 0
    RESPONSE_TYPE = _DescribeProducersResponse
    SCHEMA = Schema(
        ("topics", _PARTITIONS_BY_TOPIC),
        ("tags", TaggedFields),
    )


class DescribeProducers(Request[DescribeProducers_v0]):  # type: ignore[misc]
    """Asks a leader for the active producers of its partitions and the first offsets of their open transactions."""

    API_KEY = 61

    def __init__(self, partitions: Iterable[Partition]) -> None:
        self.by_topic: dict[str, list[int]] = {}
        for topic, number in partitions:
            self.by_topic.setdefault(topic, []).append(number)

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class([(topic, numbers, {}) for topic, numbers in self.by_topic.items()], {})


class _DescribeTransactionsResponse(Response):  # type: ignore[misc]
    API_KEY = 65
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "transactions",
            CompactArray(
                ("error_code", Int16),
                ("transactional_id", CompactString("utf-8")),
                ("state", CompactString("utf-8")),
                ("timeout_ms", Int32),
                ("start_time_ms", Int64),
                ("producer_id", Int64),
                ("producer_epoch", Int16),
                ("topics", _PARTITIONS_BY_TOPIC),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class DescribeTransactions_v0(RequestStruct):  # type: ignore[misc]  # noqa: N801
    FLEXIBLE_VERSION = True
    API_KEY = 65
    API_VERSION = 0
    RESPONSE_TYPE = _DescribeTransactionsResponse
    SCHEMA = Schema(
        ("transactional_ids", CompactArray(CompactString("utf-8"))),
        ("tags", TaggedFields),
    )


class DescribeTransactions(Request[DescribeTransactions_v0]):  # type: ignore[misc]
    """Asks a coordinator for the state of a transactional id and the partitions of its ongoing transaction."""

    API_KEY = 65

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class([self.transactional_id], {})


class _ListTransactionsResponse(Response):  # type: ignore[misc]
    API_KEY = 66
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("unknown_state_filters", CompactArray(CompactString("utf-8"))),
        (
            "transactions",
            CompactArray(
                ("transactional_id", CompactString("utf-8")),
                ("producer_id", Int64),
                ("state", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class ListTransactions_v0(RequestStruct):  # type: ignore[misc]  # noqa: N801
    FLEXIBLE_VERSION = True
    API_KEY = 66
    API_VERSION = 0
    RESPONSE_TYPE = _ListTransactionsResponse
    SCHEMA = Schema(
        ("states", CompactArray(CompactString("utf-8"))),
        ("producer_ids", CompactArray(Int64)),
        ("tags", TaggedFields),
    )


class ListTransactions(Request[ListTransactions_v0]):  # type: ignore[misc]
    """Asks a coordinator for the transactional ids that have these producer ids, in any state."""

    API_KEY = 66

    def __init__(self, producer_ids: Iterable[int]) -> None:
        self.producer_ids = list(producer_ids)

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class([], self.producer_ids, {})


class _WriteTxnMarkersResponse(Response):  # type: ignore[misc]
    API_KEY = 27
    API_VERSION = 1
    SCHEMA = Schema(
        (
            "markers",
            CompactArray(
                ("producer_id", Int64),
                ("topics", CODES_BY_TOPIC),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class WriteTxnMarkers_v1(RequestStruct):  # type: ignore[misc]  # noqa: N801
    FLEXIBLE_VERSION = True
    API_KEY = 27
    API_VERSION = 1
    RESPONSE_TYPE = _WriteTxnMarkersResponse
    SCHEMA = Schema(
        (
            "markers",
            CompactArray(
                ("producer_id", Int64),
                ("producer_epoch", Int16),
                ("transaction_result", Boolean),
                ("topics", _PARTITIONS_BY_TOPIC),
                ("coordinator_epoch", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class WriteTxnMarkers(Request[WriteTxnMarkers_v1]):  # type: ignore[misc]
    """Asks a leader to append a marker of an active producer, as a coordinator does and `kafka-transactions abort`."""

    API_KEY = 27

    def __init__(self, partition: Partition, producer: ActiveProducer, *, commit: bool) -> None:
        self.partition = partition
        self.producer = producer
        self.commit = commit

    def build(self, request_struct_class: Any) -> Any:
        (topic, number), producer = self.partition, self.producer
        coordinator_epoch = max(0, producer.coordinator_epoch)  # 0, as Kafka's tool, where no marker was ever written
        tags: dict[int, bytes] = {}
        topics = [(topic, [number], tags)]
        marker = producer.producer_id, producer.epoch, self.commit, topics, coordinator_epoch, tags
        return request_struct_class([marker], tags)


class Producers(NamedTuple):
    """The active producers of partitions, and the last error code of those whose leader refused."""

    active: dict[Partition, list[ActiveProducer]]
    failed: dict[Partition, int]


async def active_producers(client: BaseClient, partitions: Collection[Partition], timeout_s: float) -> Producers:
    """Ask the leaders for the active producers of partitions, until each has answered or `timeout_s` is over.

    Error codes in FINAL are not retried. A partition without a response is in neither part of the result.
    """
    found = Producers({}, {})
    left = set(partitions)
    if unknown := {topic for topic, _ in left} - client.tracked_topics:
        client.set_topics({*client.tracked_topics, *unknown})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while left := {p for p in left if p not in found.active and found.failed.get(p) not in FINAL}:
                await _ask_leaders(client, left, found)
                if not left <= found.active.keys():
                    await asyncio.sleep(RETRY_PAUSE_S)
                    await client.force_metadata_update()
    return found


async def _ask_leaders(client: BaseClient, partitions: Iterable[Partition], found: Producers) -> None:
    by_node: dict[int, list[Partition]] = {}
    for partition in partitions:
        node = client.cluster.leader_for_partition(TopicPartition(*partition))
        if node is not None and node >= 0:
            by_node.setdefault(node, []).append(partition)
    await asyncio.gather(*(_ask_leader(client, node, asked, found) for node, asked in by_node.items()))


async def _ask_leader(client: BaseClient, node: int, partitions: Sequence[Partition], found: Producers) -> None:
    try:
        response = await client.send(node, DescribeProducers(partitions))
    except UNSUPPORTED:
        found.failed.update(dict.fromkeys(partitions, UNSUPPORTED_VERSION))
        return
    except (errors.KafkaError, OSError):
        return  # `active_producers` asks the leader of that time again
    for topic, rows, _ in response.topics:
        for number, code, _message, active, _ in rows:
            if code == OK:
                found.active[topic, number] = [ActiveProducer(row[0], row[1], row[5], row[4]) for row in active]
            else:
                found.failed[topic, number] = code


class LastTransaction(NamedTuple):
    """The producer id of a transactional id, or -1, and the partitions of its ongoing transaction."""

    producer_id: int
    partitions: set[Partition]


async def last_transaction(client: BaseClient, node: int, transactional_id: str) -> LastTransaction:
    """Ask a coordinator for the producer id of a transactional id, and for the partitions of its ongoing transaction.

    (-1, empty) where the id is unknown or the broker is older than 3.0. Raises KafkaError where `node` is not the
    coordinator or still loads its log.
    """
    try:
        response = await client.send(node, DescribeTransactions(transactional_id))
    except UNSUPPORTED:
        return LastTransaction(-1, set())
    ((code, _, _state, _, _, producer_id, _, topics, _),) = response.transactions
    if code != OK and (kind := errors.for_code(code)).retriable:
        raise kind(transactional_id)
    partitions = {(topic, number) for topic, numbers, _ in topics or () for number in numbers}
    return LastTransaction(int(producer_id) if code == OK else -1, partitions)


async def transactional_ids_at(client: BaseClient, node: int, producer_ids: Iterable[int]) -> dict[int, str]:
    """Ask a broker for the transactional ids that have these producer ids, of those that it coordinates.

    Empty where the broker does not answer, still loads its log, or is older than 3.0. Kafka leaves out transactional
    ids that the caller may not Describe.
    """
    try:
        response = await client.send(node, ListTransactions(producer_ids))
    except (errors.KafkaError, OSError, *UNSUPPORTED):
        return {}
    return {producer_id: name for name, producer_id, _, _ in response.transactions}


async def is_ending(client: BaseClient, node: int, transactional_id: str) -> bool:
    """Ask a coordinator whether it still writes the markers of a transactional id's last transaction.

    Raises KafkaError where `node` is not the coordinator or still loads its log.
    """
    response = await client.send(node, DescribeTransactions(transactional_id))
    ((code, _, state, *_),) = response.transactions
    if code != OK:
        raise errors.for_code(code)(transactional_id)
    return state in ENDING


def no_leader(partition: Partition) -> Exception:
    """Make the error for a partition whose leader is unknown, or does not answer."""
    error: Exception = errors.LeaderNotAvailableError(f"{partition}")
    return error


def _leader_of(client: BaseClient, partition: Partition) -> int:
    """Find a partition's leader in the cached metadata. Raises LeaderNotAvailableError."""
    node = client.cluster.leader_for_partition(TopicPartition(*partition))
    if node is None or node < 0:
        raise no_leader(partition)
    return int(node)


async def write_marker(client: BaseClient, partition: Partition, producer: ActiveProducer, *, commit: bool) -> None:
    """Have a leader end the open transaction of a producer by a marker. Raises KafkaError for any other response."""
    node = _leader_of(client, partition)
    response = await client.send(node, WriteTxnMarkers(partition, producer, commit=commit))
    ((_, ((_, ((_, code, _),), _),), _),) = response.markers
    raise_if_error(code, f"WriteTxnMarkers for {partition}")


class LogEntry(NamedTuple):
    """A record of a partition, or a transaction marker, which has no value; `timestamp` is in ms."""

    offset: int
    producer_id: int
    epoch: int
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]
    marker: Marker | None
    timestamp: int = -1

    def stamp(self) -> Stamp:
        """Decode the record's header of Fencepost. Raises WireError where there is none, NewerVersion."""
        return Stamp.decode(dict(self.headers).get(STAMP_HEADER, b""))

    def slot(self) -> int | None:
        """Find the slot that wrote the record, by the header. Raises WireError where there is none, NewerVersion.

        None where a program that processes events has copied the header: it names another producer id then.
        """
        stamp = self.stamp()
        return stamp.slot if stamp.producer_id == self.producer_id else None


async def fetch(client: BaseClient, partition: Partition, offset: int) -> tuple[list[LogEntry], int, int]:
    """Fetch records and markers from an offset on (read_uncommitted); with the next offset and the high watermark.

    Raises KafkaError: DELETED where the log starts after the offset.
    """
    node = _leader_of(client, partition)
    topic, number = partition
    request = FetchRequest(FETCH_WAIT_MS, 1, FETCH_BYTES, READ_UNCOMMITTED, [(topic, [(number, offset, FETCH_BYTES)])])
    response = await client.send(node, request)
    ((_, (row,)),) = response.topics
    code, end, raw = row[1], row[2], row[-1]
    raise_if_error(code, f"{topic}/{number} from {offset}")
    entries: list[LogEntry] = []
    records = MemoryRecords(raw)
    while records.has_next():
        batch = records.next_batch()
        entries += [entry for entry in _entries(batch) if entry.offset >= offset]
        offset = max(offset, batch.next_offset)
        await asyncio.sleep(0)
    return entries, offset, end


def _entries(batch: Any) -> Iterable[LogEntry]:
    for record in batch:
        writer = record.offset, batch.producer_id, batch.producer_epoch
        if batch.is_control_batch:
            yield LogEntry(*writer, None, (), MARKERS.get(ControlRecord.parse(record.key).type_))
        else:
            yield LogEntry(*writer, record.value, record.headers, None, record.timestamp)
