"""Names of the headers of records, and the `fencepost` header: the stamp of an event."""

import re
from typing import Final, NamedTuple

from service.contract.wire.ids import FINGERPRINT_BYTES, ID_BYTES
from service.contract.wire.versions import VERSION, WireError, is_newer, newer_version

KEY_HEADER: Final = "idempotency-key"
STAMP_HEADER: Final = "fencepost"
TRACE_HEADER: Final = "traceparent"
CODE_HEADER: Final = "fencepost-code"
DETAIL_HEADER: Final = "fencepost-detail"
TOPIC_HEADER: Final = "fencepost-topic"
PARTITION_HEADER: Final = "fencepost-partition"
TIMESTAMP_HEADER: Final = "fencepost-timestamp"
CALLER_HEADER: Final = "fencepost-caller"
"""Headers of a dead letter, behind the event's own: why it was refused, what was asked for, and by whom."""
RESERVED_HEADERS: Final = frozenset({KEY_HEADER, STAMP_HEADER})

_VERSION: Final = str(VERSION)  # to format a text takes less than to format a number
STAMP_VERSION: Final = r"([1-9][0-9]{0,3});"
"""The begin of a `fencepost` header of any version: a regular expression for Python, Java and Spark."""
_STAMP_VERSION: Final = re.compile(STAMP_VERSION.encode())


class Stamp(NamedTuple):
    """The `fencepost` header of an event: its claim, and its producer. `accepted_at` is in ms since the Unix epoch.

    `fingerprint` is that of the claim; where a schema of a registry encoded key and value, that of the encoded record.
    """

    id: bytes
    fingerprint: bytes
    accepted_at: int
    slot: int
    producer_id: int
    epoch: int
    instance: str

    def encode(self) -> bytes:
        """Encode the header: ASCII, `;`-separated, the version first."""
        writer = stamp_writer(self.slot, self.producer_id, self.epoch, self.instance)
        return encode_stamp(self.id, self.fingerprint, stamp_end(self.accepted_at, writer))

    @classmethod
    def decode(cls, raw: bytes) -> "Stamp":
        """Decode a header. Raises WireError if it is not one of this version, NewerVersion for one of a later."""
        found = _STAMP_VERSION.match(raw)
        if found is not None and is_newer(int(found[1]), (VERSION,)):
            raise newer_version(f"a {STAMP_HEADER} header", int(found[1]), (VERSION,))
        try:
            version, id_hex, fp_hex, at, slot, pid, epoch, instance = raw.decode("ascii").split(";")
            stamp = cls(
                bytes.fromhex(id_hex), bytes.fromhex(fp_hex), int(at), int(slot), int(pid), int(epoch), instance
            )
        except ValueError as error:
            raise WireError(f"no {STAMP_HEADER} header of version {VERSION}: {raw[:200]!r}") from error
        if version != str(VERSION) or len(stamp.id) != ID_BYTES or len(stamp.fingerprint) != FINGERPRINT_BYTES:
            raise WireError(f"no {STAMP_HEADER} header of version {VERSION}: {raw[:200]!r}")
        return stamp


def stamp_writer(slot: int, producer_id: int, epoch: int, instance: str) -> str:
    """Encode the part of the header that is the same for all records of a transaction."""
    return f"{slot};{producer_id};{epoch};{instance}"


def stamp_end(accepted_at: int, writer: str) -> str:
    """Encode the part of the header that is the same for all records of a transaction with this `accepted_at`."""
    return f"{accepted_at};{writer}"


def encode_stamp(id: bytes, fingerprint: bytes, end: str) -> bytes:
    """Encode a `fencepost` header, without making a Stamp; `end` comes from `stamp_end`."""
    return f"{_VERSION};{id.hex()};{fingerprint.hex()};{end}".encode()
