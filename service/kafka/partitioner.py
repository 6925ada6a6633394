"""The partition of a record key, as Java clients choose it (murmur2; KIP-480 leaves keyed records as they were)."""

from collections.abc import Callable
from typing import Final

from aiokafka import partitioner

from service import native

_murmur2: Final[Callable[[bytes], int]] = native.records.murmur2 if native.COMPILED else partitioner.murmur2


def partition_of_key(key: bytes, partitions: int) -> int:
    """The partition, from 0, of a key in a topic with so many."""
    return (_murmur2(key) & 0x7FFFFFFF) % partitions
