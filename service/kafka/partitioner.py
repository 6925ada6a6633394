"""The partition of a record key, as Java clients choose it (murmur2; KIP-480 leaves keyed records as they were)."""

from functools import lru_cache
from typing import Final

from aiokafka import partitioner

from service import native

_murmur2 = native.records.murmur2 if native.COMPILED else partitioner.murmur2

# Keys are cached by their content, which clients choose: 16,384 of these lengths have 5 MB at most.
CACHED_KEYS: Final = 16_384
CACHED_KEY_BYTES: Final = 64


def partition_of_key(key: bytes, partitions: int) -> int:
    """The partition, from 0, of a key in a topic with so many."""
    return _cached(key, partitions) if len(key) <= CACHED_KEY_BYTES else _partition(key, partitions)


def _partition(key: bytes, partitions: int) -> int:
    return int((_murmur2(key) & 0x7FFFFFFF) % partitions)


_cached = lru_cache(maxsize=CACHED_KEYS)(_partition)  # aiokafka's is written in Python, and keys come again
