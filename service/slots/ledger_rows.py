"""What ledger records say was delivered, as the states that a replay leaves in the store; and an entry's text."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import structlog

from service.claims.redis_store import Row
from service.claims.states import Delivered, DeliveredBatch
from service.contract.wire import (
    FINGERPRINT_BYTES,
    ID_BYTES,
    LEDGER_VERSIONS,
    TOPIC_CHARS_MAX,
    WireError,
    batch_fingerprint,
)
from service.events.event import PARTITION_MOST
from service.kafka.reader import Item

log = structlog.get_logger(__name__)


_Id = Annotated[str, msgspec.Meta(min_length=2 * ID_BYTES, max_length=2 * ID_BYTES)]
_Fingerprint = Annotated[str, msgspec.Meta(min_length=2 * FINGERPRINT_BYTES, max_length=2 * FINGERPRINT_BYTES)]
_Topic = Annotated[str, msgspec.Meta(max_length=TOPIC_CHARS_MAX)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct, omit_defaults=True):
    """wire.Entry as its JSON has it."""

    id: _Id
    fp: _Fingerprint
    at: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]  # claims.lua reckons with it
    topic: _Topic
    partition: Annotated[int, msgspec.Meta(ge=0, le=PARTITION_MOST)]
    offset: _Number
    ts: _Number
    batch: _Id | None = None
    i: _Number | None = None


class _Record(msgspec.Struct):
    """wire.LedgerRecord as its JSON has it, or a begin record, which has no entries."""

    v: int
    begin: bool = False
    entries: list[_Entry] | None = None


# wire.decode_ledger takes four times as long, of the millions of keys that a store recovery reads.
_decode = msgspec.json.Decoder(_Record).decode
_encode = msgspec.json.Encoder().encode
_bytes = bytes.fromhex


def encode_entry(id: bytes, there: Delivered, batch: bytes | None = None, i: int | None = None) -> str:
    """An entry of a ledger record as JSON text, as wire.Entry has it; a member of an atomic batch has its index."""
    entry = _Entry(
        id.hex(),
        there.fp.hex(),
        there.at,
        there.topic,
        there.partition,
        there.offset,
        there.ts,
        None if batch is None else batch.hex(),
        i,
    )
    return _encode(entry).decode()


def rows_of(items: Sequence[Item]) -> list[Row]:
    """What ledger records say was delivered; one that is not Fencepost's cannot name an id of ours, and is skipped."""
    rows: list[Row] = []
    for item in items:
        try:
            record = _decode(item.value or b"")
            if record.v not in LEDGER_VERSIONS:
                raise WireError(f"ledger record of version {record.v}; this program reads {sorted(LEDGER_VERSIONS)}")
            if not record.begin:
                rows += _rows_of(record)
        except (ValueError, RecursionError) as error:  # msgspec's errors and WireError are the former
            log.error("foreign record in the ledger", partition=item.partition, offset=item.offset, why=str(error))
    return rows


def partitions_of(value: bytes | None) -> dict[tuple[str, int], int] | None:
    """The partitions of a ledger record's entries, and the first offset in each; None of a begin record.

    Of what is not Fencepost's none are known.
    """
    try:
        record = _decode(value or b"")
    except (ValueError, RecursionError):
        return {}
    if record.begin:
        return None
    found: dict[tuple[str, int], int] = {}
    for entry in record.entries or ():
        place = entry.topic, entry.partition
        found[place] = min(entry.offset, found.get(place, entry.offset))
    return found


def _rows_of(record: _Record) -> list[Row]:
    if record.entries is None:
        raise WireError("no ledger record: it has no entries")
    rows: list[Row] = [
        (_bytes(e.id), Delivered(e.at, _bytes(e.fp), e.topic, e.partition, e.offset, e.ts)) for e in record.entries
    ]
    return rows + _wholes(record.entries)


def _wholes(entries: Sequence[_Entry]) -> list[Row]:
    """The atomic batches whose members these are: one transaction holds all of a batch, so one record names all."""
    members: dict[str, list[_Entry]] = {}
    for entry in entries:
        if entry.batch is not None:
            members.setdefault(entry.batch, []).append(entry)
    rows: list[Row] = []
    for batch, of in members.items():
        of.sort(key=lambda entry: entry.i or 0)  # a record may name them in any order
        whole = DeliveredBatch(of[0].at, batch_fingerprint(_bytes(entry.fp) for entry in of), len(of))
        rows.append((_bytes(batch), whole))
    return rows
