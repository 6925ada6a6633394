"""Codecs of the three requests of a transaction, in place of aiokafka's slower generic schemas.

https://kafka.apache.org/protocol: Produce 7, AddPartitionsToTxn 0 and EndTxn 0, the versions that aiokafka uses too.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, Final, NamedTuple

from aiokafka.protocol import produce, transaction

_INT16, _INT32 = Struct(">h"), Struct(">i")
_HEAD = Struct(">ihhih")  # size, api key, version, correlation id, length of the client id
_ACKS = Struct(">hii")  # acks, timeout in ms, number of topics
_PAYLOAD = Struct(">ii")  # partition, size
_PRODUCER = Struct(">qh")  # id, epoch
_ROW = Struct(">ihqqq")  # partition, error code, offset, time of append in ms, the log's first offset
_ERROR = Struct(">ih")  # partition, error code
_ENDED = Struct(">ih")  # throttle time in ms, error code

_AFTER_CORRELATION_ID: Final = 4

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


class Produced(NamedTuple):
    """Produce response. Rows are (partition, error code, offset, time of append in ms, the log's first offset)."""

    topics: list[tuple[str, list[tuple[int, int, int, int, int]]]]
    throttle_time_ms: int


class Added(NamedTuple):
    """AddPartitionsToTxn response. Rows are (partition, error code)."""

    throttle_time_ms: int
    errors: list[tuple[str, list[tuple[int, int]]]]


class Ended(NamedTuple):
    """EndTxn response."""

    throttle_time_ms: int
    error_code: int


class ApiCodec(NamedTuple):
    """Encoder of a request's body, in pieces so that large payloads are not copied, and decoder of its response.

    `decode` raises struct.error for a truncated response.
    """

    api_key: int
    version: int
    encode: Callable[[Any], list[bytes]]
    decode: Callable[[bytes], Any]

    def frame(self, request: Any, correlation_id: int, client_id: str) -> tuple[int, list[bytes]]:
        """Encode a request with its header: the size in bytes without the size field itself, and the pieces."""
        body, named = self.encode(request), client_id.encode()
        size = _HEAD.size - _INT32.size + len(named) + sum(map(len, body))
        return size, [_HEAD.pack(size, self.api_key, self.version, correlation_id, len(named)) + named, *body]


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


CODECS: Final[dict[type, ApiCodec]] = {
    ProduceRequest: ApiCodec(ProduceRequest.API_KEY, 7, _produce, _produced),
    AddPartitionsToTxnRequest: ApiCodec(AddPartitionsToTxnRequest.API_KEY, 0, _add, _added),
    EndTxnRequest: ApiCodec(EndTxnRequest.API_KEY, 0, _end, _ended),
}
