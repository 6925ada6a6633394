"""Ids of idempotency keys, and fingerprints of what was asked for under them."""

import hashlib
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final

ID_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 8
ABSENT: Final = b"\xff\xff\xff\xff"
_LENGTH: Final = Struct(">I")

Header = tuple[str, bytes]


def event_id(key: str, scope: str = "") -> bytes:
    """Make the 16-byte id of an idempotency key (ASCII, unquoted) in its scope: a caller's name, or `source:NAME`."""
    return hashlib.sha256(f"{scope}\0{key}".encode()).digest()[:ID_BYTES]


def member_id(key: str, index: int | str, scope: str = "") -> bytes:
    """Make the 16-byte id of a member of the request with this key: by its index (from 0), or by a name of its own.

    A colon before a name keeps the name "0" apart from the index 0: a key may be that of both kinds of requests.
    """
    own = index if isinstance(index, int) else f":{index}"
    return hashlib.sha256(f"{scope}\0{key}\0{own}".encode()).digest()[:ID_BYTES]


def fingerprint(
    topic: str, partition: int | None, key: bytes | None, headers: Sequence[Header], value: bytes | None
) -> bytes:
    """Make the 8-byte fingerprint that distinguishes a retry from another request under the same key.

    Hashes the request's topic, partition (decimal ASCII; absent if not given), record key, the client's headers sorted
    by (name, value) as name then value, and value; each field as a 4-byte big-endian length and its bytes, an absent
    field as ffffffff.
    """
    packed = _field(topic.encode()) + (ABSENT if partition is None else _field(b"%d" % partition)) + _field(key)
    if headers:
        for name, content in sorted([(name.encode(), content) for name, content in headers]):
            packed += _field(name) + _field(content)
    return hashlib.sha256(packed + _field(value)).digest()[:FINGERPRINT_BYTES]


def _field(content: bytes | None) -> bytes:
    return ABSENT if content is None else _LENGTH.pack(len(content)) + content


def batch_fingerprint(members: Iterable[bytes]) -> bytes:
    """Make the 8-byte fingerprint of an atomic batch from its members' fingerprints in order.

    It can be computed from the ledger, which has only the members' fingerprints. If the batch commits offsets of a
    group, their fingerprint (`offsets_fingerprint`) is the last one.
    """
    return hashlib.sha256(b"".join(members)).digest()[:FINGERPRINT_BYTES]


def offsets_fingerprint(group: str, positions: Iterable[tuple[str, int, int, str]]) -> bytes:
    """Make the 8-byte fingerprint of a group's offsets; positions are (topic, partition, offset, metadata).

    Hashes the group, then each position in the order of topics and partitions; each field as in `fingerprint`. The
    member and its generation are left out: they may change between two attempts of one request.
    """
    packed = _field(group.encode())
    for topic, partition, offset, metadata in sorted(positions):
        packed += _field(topic.encode()) + _field(b"%d" % partition) + _field(b"%d" % offset)
        packed += _field(metadata.encode())
    return hashlib.sha256(packed).digest()[:FINGERPRINT_BYTES]
