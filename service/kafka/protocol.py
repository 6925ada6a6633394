"""Codecs of the requests of a transaction, in place of aiokafka's slower generic schemas.

https://kafka.apache.org/protocol: Produce 7, AddPartitionsToTxn 0 and EndTxn 0, the versions that aiokafka uses too;
and those of transactions of version 2 (KIP-890), which aiokafka lacks: Produce 12, EndTxn 5, and ApiVersions 3, by
which a broker reports that version 2 is finalized.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, Final, NamedTuple

import msgspec
from aiokafka.protocol import produce, transaction

from service.core.varint import unsigned_varint

_INT16, _INT32 = Struct(">h"), Struct(">i")
_HEAD = Struct(">ihhih")  # size, api key, version, correlation id, length of the client id
_ACKS = Struct(">hii")  # acks, timeout in ms, number of topics
_PAYLOAD = Struct(">ii")  # partition, size
_PRODUCER = Struct(">qh")  # id, epoch
_ROW = Struct(">ihqqq")  # partition, error code, offset, time of append in ms, the log's first offset
_ERROR = Struct(">ih")  # partition, error code
_ENDED = Struct(">ih")  # throttle time in ms, error code

_ENDED_BUMPED: Final = Struct(">ihqh")  # throttle time in ms, error code, producer id, epoch
_INT64 = Struct(">q")
_LEVELS = Struct(">hh")  # of a finalized feature: the highest, the lowest

_AFTER_CORRELATION_ID: Final = 4
_NO_TAGS: Final = b"\0"
# The tags of an ApiVersions response (KIP-584).
_FINALIZED_EPOCH_TAG: Final = 1
_FINALIZED_FEATURES_TAG: Final = 2
TRANSACTION_VERSION_FEATURE: Final = "transaction.version"
# The transaction.version with which a Produce adds its partitions and an EndTxn raises the epoch (KIP-890).
EPOCH_PER_TRANSACTION: Final = 2

Topics = Sequence[tuple[str, Sequence[Any]]]


# The requests are aiokafka's, which sends them itself where a broker lacks a codec's version, with the fields that the
# codecs read. `topics` are pairs of a name and its rows.


class ProduceRequest(produce.ProduceRequest):  # type: ignore[misc]  # aiokafka ships no types
    """Produce request. Rows are (partition, record batch); `timeout` is in ms."""

    def __init__(self, transactional_id: str | None, required_acks: int, timeout: int, topics: Topics) -> None:
        super().__init__(transactional_id, required_acks, timeout, topics)
        self.transactional_id, self.timeout, self.topics = transactional_id, timeout, topics


class AddPartitionsToTxnRequest(transaction.AddPartitionsToTxnRequest):  # type: ignore[misc]
    """AddPartitionsToTxn request. Rows are partitions."""

    def __init__(self, transactional_id: str | None, producer_id: int, producer_epoch: int, topics: Topics) -> None:
        super().__init__(transactional_id, producer_id, producer_epoch, topics)
        self.transactional_id, self.producer_id, self.producer_epoch = transactional_id, producer_id, producer_epoch
        self.topics = topics


class EndTxnRequest(transaction.EndTxnRequest):  # type: ignore[misc]
    """EndTxn request; `transaction_result` is whether to commit."""

    def __init__(
        self, transactional_id: str | None, producer_id: int, producer_epoch: int, transaction_result: bool
    ) -> None:
        super().__init__(transactional_id, producer_id, producer_epoch, transaction_result)
        self.transactional_id, self.producer_id, self.producer_epoch = transactional_id, producer_id, producer_epoch
        self.transaction_result = transaction_result


class ProduceAndAddRequest:
    """Produce request that also adds its partitions to the transaction (version 12). Rows as in ProduceRequest."""

    def __init__(self, transactional_id: str | None, required_acks: int, timeout: int, topics: Topics) -> None:
        self.transactional_id, self.required_acks = transactional_id, required_acks
        self.timeout, self.topics = timeout, topics


class EndTxnAndBumpRequest:
    """EndTxn request whose response has the producer id and epoch of the next transaction (version 5)."""

    def __init__(
        self, transactional_id: str | None, producer_id: int, producer_epoch: int, transaction_result: bool
    ) -> None:
        self.transactional_id, self.producer_id, self.producer_epoch = transactional_id, producer_id, producer_epoch
        self.transaction_result = transaction_result


class ApiVersionsRequest:
    """ApiVersions request whose response has the finalized features (version 3)."""


class Produced(msgspec.Struct, frozen=True, gc=False):
    """Produce response. Rows are (partition, error code, offset, time of append in ms, the log's first offset)."""

    topics: list[tuple[str, list[tuple[int, int, int, int, int]]]]
    throttle_time_ms: int


class Added(msgspec.Struct, frozen=True, gc=False):
    """AddPartitionsToTxn response. Rows are (partition, error code)."""

    throttle_time_ms: int
    errors: list[tuple[str, list[tuple[int, int]]]]


class Ended(msgspec.Struct, frozen=True, gc=False):
    """EndTxn response."""

    throttle_time_ms: int
    error_code: int


class EndedAndBumped(msgspec.Struct, frozen=True, gc=False):
    """EndTxn response of version 5: the producer id and epoch of the next transaction, -1 for an error."""

    throttle_time_ms: int
    error_code: int
    producer_id: int
    producer_epoch: int


class Features(msgspec.Struct, frozen=True, gc=False):
    """The part of an ApiVersions response that transactions need: the finalized transaction.version, 0 for none."""

    error_code: int
    transaction_version: int


class ApiCodec(NamedTuple):
    """Encoder of a request's body, in pieces so that large payloads are not copied, and decoder of its response.

    `decode` raises struct.error for a truncated response.
    """

    api_key: int
    version: int
    encode: Callable[[Any], list[bytes]]
    decode: Callable[[bytes], Any]
    header_end: bytes = b""  # of a flexible version (KIP-482): no tags

    def frame(self, request: Any, correlation_id: int, client_id: bytes) -> tuple[int, list[bytes]]:
        """Encode a request with its header: the size in bytes without the size field itself, and the pieces."""
        body, end, named = self.encode(request), self.header_end, len(client_id)
        size = _HEAD.size - _INT32.size + named + len(end) + sum(map(len, body))
        return size, [_HEAD.pack(size, self.api_key, self.version, correlation_id, named) + client_id + end, *body]


@lru_cache(maxsize=4096)
def _string(text: str | None) -> bytes:
    if text is None:
        return _INT16.pack(-1)
    encoded = text.encode()
    return _INT16.pack(len(encoded)) + encoded


def _produce(request: ProduceRequest) -> list[bytes]:
    topics = request.topics
    acks = _ACKS.pack(request.required_acks, request.timeout, len(topics))
    pieces = [_string(request.transactional_id) + acks]
    for topic, payloads in topics:
        pieces.append(_string(topic) + _INT32.pack(len(payloads)))
        for partition, payload in payloads:
            pieces += (_PAYLOAD.pack(partition, len(payload)), payload)
    return pieces


def _add(request: AddPartitionsToTxnRequest) -> list[bytes]:
    topics = request.topics
    producer = _PRODUCER.pack(request.producer_id, request.producer_epoch)
    pieces = [_string(request.transactional_id), producer, _INT32.pack(len(topics))]
    for topic, partitions in topics:
        pieces += (_string(topic), _INT32.pack(len(partitions)), *map(_INT32.pack, partitions))
    return pieces


def _end(request: EndTxnRequest) -> list[bytes]:
    producer = _PRODUCER.pack(request.producer_id, request.producer_epoch)
    return [_string(request.transactional_id), producer, b"\1" if request.transaction_result else b"\0"]


def _topics(frame: bytes, at: int, row: Struct) -> tuple[list[tuple[str, list[Any]]], int]:
    """Decode an array of topics, with a row for each partition, from offset `at` on; and the offset after the array."""
    (count,) = _INT32.unpack_from(frame, at)
    at += _INT32.size
    topics: list[tuple[str, list[Any]]] = []
    for _ in range(count):
        (length,) = _INT16.unpack_from(frame, at)
        at += _INT16.size
        name = frame[at : at + length].decode()
        (rows,) = _INT32.unpack_from(frame, at + length)
        start = at + length + _INT32.size
        at = start + rows * row.size
        topics.append((name, [row.unpack_from(frame, offset) for offset in range(start, at, row.size)]))
    return topics, at


def _produced(frame: bytes) -> Produced:
    topics, at = _topics(frame, _AFTER_CORRELATION_ID, _ROW)
    return Produced(topics, *_INT32.unpack_from(frame, at))


def _added(frame: bytes) -> Added:
    (throttle_ms,) = _INT32.unpack_from(frame, _AFTER_CORRELATION_ID)
    topics, _ = _topics(frame, _AFTER_CORRELATION_ID + _INT32.size, _ERROR)
    return Added(throttle_ms, topics)


def _ended(frame: bytes) -> Ended:
    return Ended(*_ENDED.unpack_from(frame, _AFTER_CORRELATION_ID))


# ---------------------------------------------------------------------------------- flexible versions (KIP-482)


@lru_cache(maxsize=4096)
def _compact(text: str | None) -> bytes:
    """Encode a compact nullable string, whose length is one more than its bytes."""
    if text is None:
        return b"\0"
    encoded = text.encode()
    return unsigned_varint(len(encoded) + 1) + encoded


def _produce_and_add(request: ProduceAndAddRequest) -> list[bytes]:
    topics = request.topics
    acks = _INT16.pack(request.required_acks) + _INT32.pack(request.timeout)
    pieces = [_compact(request.transactional_id) + acks + unsigned_varint(len(topics) + 1)]
    for topic, payloads in topics:
        pieces.append(_compact(topic) + unsigned_varint(len(payloads) + 1))
        for partition, payload in payloads:
            pieces += (_INT32.pack(partition) + unsigned_varint(len(payload) + 1), payload, _NO_TAGS)
        pieces.append(_NO_TAGS)
    pieces.append(_NO_TAGS)
    return pieces


def _end_and_bump(request: EndTxnAndBumpRequest) -> list[bytes]:
    producer = _PRODUCER.pack(request.producer_id, request.producer_epoch)
    return [_compact(request.transactional_id), producer, b"\1" if request.transaction_result else b"\0", _NO_TAGS]


def _ask_features(_: ApiVersionsRequest) -> list[bytes]:
    return [_compact("fencepost"), _compact("1"), _NO_TAGS]


class _Flexible:
    """Reads a response of a flexible version. Raises struct.error where it is truncated."""

    def __init__(self, frame: bytes, at: int) -> None:
        self.frame, self.at = frame, at

    def read(self, row: Struct) -> tuple[Any, ...]:
        """Read the fields of a struct."""
        found = row.unpack_from(self.frame, self.at)
        self.at += row.size
        return found

    def unsigned(self) -> int:
        """Read an unsigned varint."""
        number = shift = 0
        while True:
            if self.at >= len(self.frame):
                raise struct.error("a response ends in a varint")
            byte = self.frame[self.at]
            self.at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:  # else another byte follows
                return number
            shift += 7

    def text(self) -> str:
        """Read a compact string; "" for null."""
        return self.skip(max(0, self.unsigned() - 1)).decode()

    def skip(self, size: int) -> bytes:
        """Read so many bytes."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.frame):
            raise struct.error("a response ends in a string")
        return self.frame[start : self.at]

    def count(self) -> int:
        """Read the length of a compact array; 0 for null."""
        return max(0, self.unsigned() - 1)

    def tags(self) -> dict[int, bytes]:
        """Read the tagged fields of a struct, undecoded, by tag (KIP-482)."""
        found = {}
        for _ in range(self.unsigned()):
            tag = self.unsigned()
            found[tag] = self.skip(self.unsigned())
        return found


def _produced_and_added(frame: bytes) -> Produced:
    read = _Flexible(frame, _AFTER_CORRELATION_ID)
    read.tags()
    topics: list[tuple[str, list[Any]]] = []
    for _ in range(read.count()):
        name = read.text()
        rows = []
        for _ in range(read.count()):
            rows.append(read.read(_ROW))
            for _ in range(read.count()):  # records that the broker refuses, with the reason
                read.read(_INT32)
                read.text()
                read.tags()
            read.text()
            read.tags()
        read.tags()
        topics.append((name, rows))
    (throttle_ms,) = read.read(_INT32)
    read.tags()
    return Produced(topics, throttle_ms)


def _ended_and_bumped(frame: bytes) -> EndedAndBumped:
    read = _Flexible(frame, _AFTER_CORRELATION_ID)
    read.tags()
    ended = EndedAndBumped(*read.read(_ENDED_BUMPED))
    read.tags()
    return ended


def _features(frame: bytes) -> Features:
    """Decode an ApiVersions response, whose header has no tags in any version (KIP-511)."""
    read = _Flexible(frame, _AFTER_CORRELATION_ID)
    (code,) = read.read(_INT16)
    if code:  # a broker that lacks the version answers in version 0
        return Features(code, 0)
    for _ in range(read.count()):
        read.skip(3 * _INT16.size)
        read.tags()
    read.read(_INT32)
    return Features(code, finalized_transaction_version(read.tags()))


def finalized_transaction_version(tags: Mapping[int, bytes]) -> int:
    """Decode the level of transaction.version from the tags of an ApiVersions response (KIP-584); 0 for none."""
    epoch = _INT64.unpack(tags.get(_FINALIZED_EPOCH_TAG, _INT64.pack(-1)))[0]
    finalized = _Flexible(tags.get(_FINALIZED_FEATURES_TAG, b"\1"), 0)
    levels = {}
    for _ in range(finalized.count()):
        name = finalized.text()
        levels[name], _ = finalized.read(_LEVELS)
        finalized.tags()
    return levels.get(TRANSACTION_VERSION_FEATURE, 0) if epoch >= 0 else 0


CODECS: Final[dict[type, ApiCodec]] = {
    ProduceRequest: ApiCodec(ProduceRequest.API_KEY, 7, _produce, _produced),
    AddPartitionsToTxnRequest: ApiCodec(AddPartitionsToTxnRequest.API_KEY, 0, _add, _added),
    EndTxnRequest: ApiCodec(EndTxnRequest.API_KEY, 0, _end, _ended),
    ProduceAndAddRequest: ApiCodec(ProduceRequest.API_KEY, 12, _produce_and_add, _produced_and_added, _NO_TAGS),
    EndTxnAndBumpRequest: ApiCodec(EndTxnRequest.API_KEY, 5, _end_and_bump, _ended_and_bumped, _NO_TAGS),
    ApiVersionsRequest: ApiCodec(18, 3, _ask_features, _features, _NO_TAGS),
}
# Requests that only a codec can send: aiokafka has neither their versions nor others to use instead.
ONLY_CODECS: Final = frozenset({ProduceAndAddRequest, EndTxnAndBumpRequest, ApiVersionsRequest})
