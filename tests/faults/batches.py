"""Which producer wrote which offsets, from the record batches themselves (KIP-98): consumers do not show it.

As much of Kafka's Fetch (version 4, the oldest that brokers still take) as that needs, over one socket.
"""

import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from confluent_kafka.admin import AdminClient

_FETCH: Final = 1
_VERSION: Final = 4
_CLIENT: Final = b"checker"
_FETCH_BYTES: Final = 8 * 1024 * 1024
_ANSWER_S: Final = 10.0
# baseOffset, batchLength, partitionLeaderEpoch, magic, crc, attributes, lastOffsetDelta, baseTimestamp, maxTimestamp,
# producerId, producerEpoch, baseSequence, number of records.
_BATCH: Final = struct.Struct(">qiibIhiqqqhii")
_BEFORE_LENGTH_COUNTS: Final = 12
_CONTROL: Final = 0x20


@dataclass(frozen=True)
class Batch:
    """One record batch: its first and last offset, and who produced it."""

    first: int
    last: int
    producer_id: int
    epoch: int
    control: bool


def batches(bootstrap: str, topic: str, partition: int, end: int) -> list[Batch]:
    """Every batch of a partition below `end`, read from its leader (also aborted ones and markers)."""
    found = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}).list_topics(topic, timeout=_ANSWER_S)
    leader = found.brokers[found.topics[topic].partitions[partition].leader]
    read: list[Batch] = []
    assert leader.host is not None
    with _Broker(leader.host, int(leader.port or 0)) as broker:
        offset = 0
        while offset < end:
            more = [batch for batch in parse(broker.fetch(topic, partition, offset)) if batch.last >= offset]
            assert more, f"{topic}/{partition} has nothing at {offset}, and ends at {end}"
            read += more
            offset = more[-1].last + 1
    return read


def parse(records: bytes) -> Iterator[Batch]:
    """The batches of a Fetch response; the last may be cut off, and is then left out."""
    at = 0
    while at + _BATCH.size <= len(records):
        first, length, _, magic, _, attributes, delta, _, _, pid, epoch, _, _ = _BATCH.unpack_from(records, at)
        at += _BEFORE_LENGTH_COUNTS + length
        if at > len(records):
            return
        assert magic == 2, f"a record batch of format {magic}"
        yield Batch(first, first + delta, pid, epoch, bool(attributes & _CONTROL))


def producer_of(sorted_batches: Sequence[Batch], offset: int) -> tuple[int, int] | None:
    """Producer id and epoch of the batch that holds an offset, None where there is none."""
    low, high = 0, len(sorted_batches)
    while low < high:
        middle = (low + high) // 2
        if sorted_batches[middle].last < offset:
            low = middle + 1
        else:
            high = middle
    if low < len(sorted_batches) and sorted_batches[low].first <= offset and not sorted_batches[low].control:
        return sorted_batches[low].producer_id, sorted_batches[low].epoch
    return None


class _Broker:
    """One connection that fetches."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), _ANSWER_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fetch(self, topic: str, partition: int, offset: int) -> bytes:
        name = topic.encode()
        request = struct.pack(f">hhih{len(_CLIENT)}s", _FETCH, _VERSION, 0, len(_CLIENT), _CLIENT)
        request += struct.pack(">iiiibi", -1, 500, 1, _FETCH_BYTES, 0, 1)  # a client; read_uncommitted; one topic
        request += struct.pack(f">h{len(name)}sii", len(name), name, 1, partition)
        request += struct.pack(">qi", offset, _FETCH_BYTES)
        self._socket.sendall(struct.pack(">i", len(request)) + request)
        answer = self._read(struct.unpack(">i", self._read(4))[0])
        # Correlation id, throttle time, one topic, its name, one partition: its number, error, watermarks.
        at = 4 + 4 + 4 + 2 + len(name) + 4
        _, error, _, _, aborted = struct.unpack_from(">ihqqi", answer, at)
        assert error == 0, f"{topic}/{partition}: Fetch answered error {error}"
        at += struct.calcsize(">ihqqi") + 16 * max(aborted, 0)
        (size,) = struct.unpack_from(">i", answer, at)
        return answer[at + 4 : at + 4 + max(size, 0)]

    def _read(self, count: int) -> bytes:
        read = bytearray()
        while len(read) < count:
            more = self._socket.recv(count - len(read))
            assert more, "the broker closed the connection"
            read += more
        return bytes(read)
