"""The partition of a record key, as Java clients choose it (murmur2; KIP-480 leaves keyed records as they were)."""

from functools import lru_cache

from aiokafka.partitioner import murmur2


@lru_cache(maxsize=16_384)  # it is written in Python, and keys come again
def partition_of_key(key: bytes, partitions: int) -> int:
    """The partition, from 0, of a key in a topic with so many."""
    return int((murmur2(key) & 0x7FFFFFFF) % partitions)
