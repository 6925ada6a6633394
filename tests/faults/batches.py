"""Reads the producer of each offset from the record batches (KIP-98), because consumers do not return it."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from confluent_kafka.admin import AdminClient

from tests.faults.wire import Broker

_ANSWER_S: Final = 10.0
# baseOffset, batchLength, partitionLeaderEpoch, magic, crc, attributes, lastOffsetDelta, baseTimestamp, maxTimestamp,
# producerId, producerEpoch, baseSequence, number of records.
_BATCH: Final = struct.Struct(">qiibIhiqqqhii")
_BEFORE_LENGTH_COUNTS: Final = 12
_CONTROL: Final = 0x20


@dataclass(frozen=True)
class Batch:
    """A record batch: its first and last offset, and its producer."""

    first: int
    last: int
    producer_id: int
    epoch: int
    control: bool


def batches(bootstrap: str, topic: str, partition: int, end: int = 0) -> list[Batch]:
    """Read every batch of a partition, at least up to `end`, from its leader (also aborted ones and markers)."""
    found = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}).list_topics(topic, timeout=_ANSWER_S)
    leader = found.brokers[found.topics[topic].partitions[partition].leader]
    read: list[Batch] = []
    assert leader.host is not None
    with Broker(leader.host, int(leader.port or 0)) as broker:
        offset = 0
        while more := [batch for batch in parse(broker.fetch(topic, partition, offset)) if batch.last >= offset]:
            read += more
            offset = more[-1].last + 1
    assert offset >= end, f"{topic}/{partition} has nothing at {offset}, and ends at {end}"
    return read


def parse(records: bytes) -> Iterator[Batch]:
    """Parse the batches of a Fetch response; a last batch that is cut off is left out."""
    at = 0
    while at + _BATCH.size <= len(records):
        first, length, _, magic, _, attributes, delta, _, _, pid, epoch, _, _ = _BATCH.unpack_from(records, at)
        at += _BEFORE_LENGTH_COUNTS + length
        if at > len(records):
            return
        assert magic == 2, f"a record batch of format {magic}"
        yield Batch(first, first + delta, pid, epoch, bool(attributes & _CONTROL))


def producer_of(sorted_batches: Sequence[Batch], offset: int) -> tuple[int, int] | None:
    """Find the producer id and epoch of the batch that contains an offset; None if there is none."""
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
