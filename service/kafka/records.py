"""Records and their batches: what a producer sends, how a batch is encoded, and what the broker's response means.

A batch is encoded by the compiled builder, or by aiokafka's, which makes the same bytes.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec
from aiokafka import errors
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from service import native
from service.contract.wire.ids import Header
from service.core.time_of_day import now_ms
from service.kafka.metadata import Partition
from service.kafka.outcomes import NOT_ATTEMPTED, OF_TRANSACTION, OK, RECORD_ERRORS, RecordError, raise_if_error

# The size of a batch that fits every topic with the default max.message.bytes (1,048,588).
BATCH_BYTES_MAX: Final = 1_000_000
MAGIC: Final = 2  # of record batches, since Kafka 0.11
# Kafka's names of compression codecs, and the codes in a record batch's attributes.
COMPRESSION_CODECS: Final = {
    "none": DefaultRecordBatch.CODEC_NONE,
    "gzip": DefaultRecordBatch.CODEC_GZIP,
    "snappy": DefaultRecordBatch.CODEC_SNAPPY,
    "lz4": DefaultRecordBatch.CODEC_LZ4,
    "zstd": DefaultRecordBatch.CODEC_ZSTD,
}
# Ledger and journal records are repetitive: level 1 compresses them as well as Kafka's default, 3, and is faster.
ZSTD_LEVEL: Final = 1
COMPRESS: Final = {
    DefaultRecordBatch.CODEC_GZIP: gzip_encode,
    DefaultRecordBatch.CODEC_SNAPPY: snappy_encode,
    DefaultRecordBatch.CODEC_LZ4: lz4_encode,
    DefaultRecordBatch.CODEC_ZSTD: partial(zstd_encode, level=ZSTD_LEVEL),
}
# Codec of ledger and journal records (tests/bench compression).
OWN_CODEC: Final = COMPRESSION_CODECS["zstd"]
# Smaller records are not compressed: a record of one entry saves little, and a single client would wait longer.
COMPRESSED_LEAST_BYTES: Final = 1_024
NOT_ENOUGH_REPLICAS: Final = errors.NotEnoughReplicasError.errno


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record to send. `timestamp` in epoch ms; `batch_bytes_max`: the largest batch that its topic accepts."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    timestamp: int
    batch_bytes_max: int = BATCH_BYTES_MAX
    codec: int | None = None  # compression of its batch; None: the configured codec


def own_record(topic: str, partition: int, key: bytes | None, value: bytes) -> Record:
    """Make a record of ledger, journal or control, compressed from COMPRESSED_LEAST_BYTES on.

    The timestamp is now, because a topic's timestamp bounds apply to these records too (KIP-937).
    """
    codec = OWN_CODEC if len(value) >= COMPRESSED_LEAST_BYTES else COMPRESSION_CODECS["none"]
    return Record(topic, partition, key, value, [], now_ms(), codec=codec)


class RecordMetadata(msgspec.Struct, frozen=True, gc=False):
    """Offset and timestamp (ms) of a written record; the broker's timestamp where the topic has LogAppendTime."""

    offset: int
    timestamp: int


class NotSent(msgspec.Struct, frozen=True):
    """The record is surely not in Kafka and may be sent again.

    `partition_failed`: its own partition is the reason, which has no leader or too few replicas in sync.
    """

    partition_failed: bool

    @property
    def why(self) -> str:
        """The reason as text, as RecordError has it."""
        return "the record could not be sent"


NOT_SENT: Final = NotSent(partition_failed=False)

# The result of sending a record: written, permanently refused, surely not written, or None: unknown.
RecordResult = RecordMetadata | RecordError | NotSent | None


class BatchBuilder(Protocol):
    """A builder of one record batch."""

    def append(self, timestamp: int, key: bytes | None, value: bytes | None, headers: list[Header]) -> bool:
        """Append a record (timestamp in ms); False where the batch is full. An empty batch accepts any record."""

    def build(self) -> bytes:
        """Close the batch and encode it."""


class RecordBatch:
    """Records of one partition in one batch: their indexes in the caller's list, and the broker's response."""

    __slots__ = ("builder", "is_sent", "members", "moved", "partition", "payload", "response")

    def __init__(self, partition: Partition, builder: BatchBuilder) -> None:
        self.partition = partition
        self.builder = builder
        self.members: list[int] = []
        self.payload = b""  # the encoded batch, once it is closed
        self.is_sent = False  # a request with the batch was written, or waits for its connection
        self.moved = False  # the batch was sent to a second node after NOT_LEADER
        self.response: tuple[int, int, int] | None = None  # error code, offset, timestamp in ms (-1: the records' own)

    def add(self, index: int, record: Record) -> bool:
        """Append the record at `index` of the caller's list; False where the batch is full."""
        if not self.builder.append(record.timestamp, record.key, record.value, record.headers):
            return False
        self.members.append(index)
        return True

    def result(self, records: Sequence[Record]) -> list[RecordMetadata] | RecordError | NotSent | None:
        """Convert the broker's response: metadata in the order of the records, an error, NotSent, or None: unknown.

        NOT_ENOUGH_REPLICAS is answered before the append (after it, the code is NOT_ENOUGH_REPLICAS_AFTER_APPEND). An
        error for a batch that was sent to two nodes is unknown: the first may have appended the batch.
        """
        if self.response is None:
            return None
        code, offset, timestamp = self.response
        if code == OK and offset >= 0:
            return [
                RecordMetadata(offset + n, timestamp if timestamp >= 0 else records[member].timestamp)
                for n, member in enumerate(self.members)
            ]
        if self.moved:
            return None
        return NotSent(partition_failed=True) if code == NOT_ENOUGH_REPLICAS else RECORD_ERRORS.get(code)


class Write:
    """Records of a transaction that are sent together, and the topics that fail or delay the transaction."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.batches: list[RecordBatch] = []
        self.waiting_for = ""  # the topic whose leader is being looked up, or asked for open transactions
        self.record_errors: dict[str, RecordError] = {}  # by topic
        self.hanging: Collection[Partition] = ()  # partitions with an open transaction of an earlier session

    @property
    def is_answered(self) -> bool:
        """Whether each batch has a response, so that no request of this write can arrive later."""
        return all(batch.response is not None for batch in self.batches)

    @property
    def was_rejected(self) -> bool:
        """Whether the brokers have refused all batches, so that none of the records is in Kafka."""
        return bool(self.batches) and all(
            isinstance(batch.result(self.records), RecordError | NotSent) for batch in self.batches
        )

    def check_added(self, codes: Mapping[Partition, int]) -> None:
        """Note the topics that an AddPartitionsToTxn response refuses, and raise the response's error, if any."""
        for (topic, _), code in codes.items():
            if code in RECORD_ERRORS:
                self.record_errors[topic] = RECORD_ERRORS[code]
        for code in codes.values():
            if code != NOT_ATTEMPTED:  # the code of all other partitions where one is refused
                raise_if_error(code, "AddPartitionsToTxn")

    def stuck(self, timed_out: bool) -> set[str]:
        """Find the topics whose error ended the transaction, or that left a request unanswered at the timeout.

        Batches that wait for the first one of another partition are not sent yet.
        """
        failed = {
            batch.partition[0]
            for batch in self.batches
            if (
                timed_out and batch.is_sent
                if batch.response is None
                else batch.response[0] not in (OK, *OF_TRANSACTION)
            )
        }
        return failed | ({self.waiting_for} - {""})


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
