"""Record batch builders: the compiled one, and aiokafka's, which makes the same bytes."""

from functools import partial
from typing import Final, Protocol

from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from service import native
from service.contract.wire import Header

MAGIC: Final = 2  # of record batches, since Kafka 0.11
# Ledger and journal records are repetitive: level 1 compresses them as well as Kafka's default, 3, and is faster.
ZSTD_LEVEL: Final = 1
COMPRESS: Final = {
    DefaultRecordBatch.CODEC_GZIP: gzip_encode,
    DefaultRecordBatch.CODEC_SNAPPY: snappy_encode,
    DefaultRecordBatch.CODEC_LZ4: lz4_encode,
    DefaultRecordBatch.CODEC_ZSTD: partial(zstd_encode, level=ZSTD_LEVEL),
}


class BatchBuilder(Protocol):
    """A builder of one record batch."""

    def append(self, timestamp: int, key: bytes | None, value: bytes | None, headers: list[Header]) -> bool:
        """Append a record (timestamp in ms); False where the batch is full. An empty batch accepts any record."""

    def build(self) -> bytes:
        """Close the batch and encode it."""


def builder_of(codec: int, transactional: bool, producer_id: int, epoch: int, sequence: int, most: int) -> BatchBuilder:
    """Make a builder of up to `most` bytes before compression; `sequence` is the base sequence number (KIP-98)."""
    if native.COMPILED:
        compress = COMPRESS.get(codec)
        return native.records.BatchBuilder(
            codec, transactional, producer_id, epoch, sequence, most, compress, calc_crc32c
        )
    return LibraryBuilder(codec, transactional, producer_id, epoch, sequence, most)


class LibraryBuilder:
    """A BatchBuilder on aiokafka's DefaultRecordBatchBuilder."""

    def __init__(self, codec: int, transactional: bool, producer_id: int, epoch: int, sequence: int, most: int) -> None:
        self._builder = DefaultRecordBatchBuilder(
            MAGIC,
            codec,
            is_transactional=transactional,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            batch_size=most,
        )
        self._count = 0

    def append(self, timestamp: int, key: bytes | None, value: bytes | None, headers: list[Header]) -> bool:
        if self._builder.append(self._count, timestamp, key, value, headers) is None:
            return False
        self._count += 1
        return True

    def build(self) -> bytes:
        return bytes(self._builder.build())
