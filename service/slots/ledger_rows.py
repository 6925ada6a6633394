"""Converts ledger records to the key states that a replay writes, and delivered states to ledger entries."""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import structlog

from service.claims.states import Delivered, DeliveredBatch, Row
from service.contract.settings import KEY_TTL_MOST_S
from service.contract.wire.ids import FINGERPRINT_BYTES, ID_BYTES, batch_fingerprint
from service.contract.wire.names import TOPIC_CHARS_MAX
from service.contract.wire.versions import LEDGER_VERSIONS, NewerVersion, WireError, is_newer, newer_version
from service.events.event import PARTITION_MOST
from service.kafka.group_offsets import OFFSETS_TOPIC
from service.kafka.reader import Item

log = structlog.get_logger(__name__)


_Id = Annotated[str, msgspec.Meta(min_length=2 * ID_BYTES, max_length=2 * ID_BYTES)]
_Fingerprint = Annotated[str, msgspec.Meta(min_length=2 * FINGERPRINT_BYTES, max_length=2 * FINGERPRINT_BYTES)]
# Why an event was refused, in a ledger entry: several times what dead letters of this release have.
REFUSED_CHARS_MAX: Final = 4_000
_Topic = Annotated[str, msgspec.Meta(max_length=TOPIC_CHARS_MAX)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class LedgerEntry(msgspec.Struct, omit_defaults=True, gc=False):
    """ledger_entries.Entry in JSON."""

    id: _Id
    fp: _Fingerprint
    at: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]  # claims.lua computes with it
    topic: _Topic
    partition: Annotated[int, msgspec.Meta(ge=0, le=PARTITION_MOST)]
    offset: _Number
    ts: _Number
    batch: _Id | None = None
    i: _Number | None = None
    ttl: Annotated[int, msgspec.Meta(ge=0, le=KEY_TTL_MOST_S)] = 0
    refused: Annotated[str, msgspec.Meta(max_length=REFUSED_CHARS_MAX)] = ""


class _Offsets(msgspec.Struct):
    """The fields of ledger_entries.LedgerOffsets that a recovery reads."""

    batch: _Id
    fp: _Fingerprint
    at: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    ttl: Annotated[int, msgspec.Meta(ge=0, le=KEY_TTL_MOST_S)] = 0
    partition: Annotated[int, msgspec.Meta(ge=0, le=PARTITION_MOST)] | None = None
    offset: _Number | None = None


class _Record(msgspec.Struct):
    """ledger.LedgerRecord in JSON, or a begin record, which has no entries."""

    v: int
    begin: bool = False
    entries: list[LedgerEntry] | None = None
    offsets: _Offsets | None = None


class _Producer(msgspec.Struct):
    """The producer of a ledger record or of a begin record."""

    pid: int


class _Versioned(msgspec.Struct):
    """Any record of the ledger: its other fields may be those of a later version."""

    v: int


# Faster than ledger.decode_ledger: a store recovery decodes millions of entries.
_decode = msgspec.json.Decoder(_Record).decode
_decode_producer = msgspec.json.Decoder(_Producer).decode
_decode_version = msgspec.json.Decoder(_Versioned).decode
_encode = msgspec.json.Encoder().encode
_bytes = bytes.fromhex


def encode_entries(entries: Sequence[LedgerEntry]) -> str:
    """Encode ledger entries as JSON texts with commas between them."""
    return _encode(entries)[1:-1].decode()


def rows_of(items: Sequence[Item]) -> list[Row]:
    """Convert ledger records to (id, state) rows. Records that are not Fencepost's are logged and skipped.

    Raises NewerVersion: without the rows of such a record, its events would be written a second time.
    """
    rows: list[Row] = []
    for item in items:
        try:
            record = _decode(item.value or b"")
            if record.v not in LEDGER_VERSIONS:
                raise WireError(f"ledger record of version {record.v}; this release reads {sorted(LEDGER_VERSIONS)}")
            if not record.begin:
                rows += _rows_of(record)
        except (ValueError, RecursionError) as error:  # msgspec's errors and WireError are the former
            if (newer := _newer_version(item.value, item.partition, item.offset)) is not None:
                raise newer from None
            log.error("foreign record in the ledger", partition=item.partition, offset=item.offset, why=str(error))
    return rows


def lowest_offsets(value: bytes | None, slot: int, at: int) -> dict[tuple[str, int], int] | None:
    """Find the partitions of a ledger record's transaction, and the lowest offset in each; None for a begin record.

    `at` is the record's own offset in the slot's partition of the ledger. Empty for a record that is not Fencepost's.
    Raises NewerVersion.
    """
    try:
        record = _decode(value or b"")
        if record.v not in LEDGER_VERSIONS:
            raise WireError(f"ledger record of version {record.v}")
    except (ValueError, RecursionError):
        if (newer := _newer_version(value, slot, at)) is not None:
            raise newer from None
        return {}
    if record.begin:
        return None
    found: dict[tuple[str, int], int] = {}
    for entry in record.entries or ():
        partition = entry.topic, entry.partition
        found[partition] = min(entry.offset, found.get(partition, entry.offset))
    offsets = record.offsets
    if offsets is not None and offsets.partition is not None and offsets.offset is not None:
        found[OFFSETS_TOPIC, offsets.partition] = offsets.offset
    return found


def names_producer(value: bytes | None, producer_id: int) -> bool:
    """Whether a ledger record or a begin record says that this producer id has written it."""
    try:
        return _decode_producer(value or b"").pid == producer_id
    except (ValueError, RecursionError):
        return False


def _newer_version(value: bytes | None, slot: int, offset: int) -> NewerVersion | None:
    """Make the error for a record, not decoded, of a version that only a newer release writes; None for others."""
    try:
        version = _decode_version(value or b"").v
    except (ValueError, RecursionError):
        return None
    if not is_newer(version, LEDGER_VERSIONS):
        return None
    return newer_version(f"the ledger of slot {slot} has, at offset {offset}, a record", version, LEDGER_VERSIONS)


def _rows_of(record: _Record) -> list[Row]:
    if record.entries is None:
        raise WireError("no ledger record: it has no entries")
    rows: list[Row] = [
        (_bytes(e.id), Delivered(e.at, _bytes(e.fp), e.topic, e.partition, e.offset, e.ts, e.ttl, e.refused))
        for e in record.entries
    ]
    if (offsets := record.offsets) is not None:  # of the one batch of its transaction
        whole = DeliveredBatch(offsets.at, _bytes(offsets.fp), len(record.entries), offsets.ttl)
        return [*rows, (_bytes(offsets.batch), whole)]
    return rows + _wholes(record.entries)


def _wholes(entries: Sequence[LedgerEntry]) -> list[Row]:
    """Make the rows of whole atomic batches from their members' entries, which are all in one record."""
    members: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        if entry.batch is not None:
            members.setdefault(entry.batch, []).append(entry)
    rows: list[Row] = []
    for batch, of in members.items():
        of.sort(key=lambda entry: entry.i or 0)  # a record may hold them in any order
        fp = batch_fingerprint(_bytes(entry.fp) for entry in of)
        whole = DeliveredBatch(of[0].at, fp, len(of), of[0].ttl)
        rows.append((_bytes(batch), whole))
    return rows
