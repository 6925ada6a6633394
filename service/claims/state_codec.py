"""The states of keys as claims.lua writes them: encoded, decoded, and packed for one call of the script."""

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from struct import error as StructError  # noqa: N812 - the module's own name says nothing
from typing import Final, Self

from service.claims.states import Claim, Claimed, Delivered, DeliveredBatch, Outcome, Row
from service.contract.wire.ids import ID_BYTES
from service.contract.wire.names import TOPIC_CHARS_MAX

# Entries that the script unpacks and writes at once, see AT_ONCE in claims.lua.
UNPACKED_AT_ONCE: Final = 100

AT = Struct(">Q")
_CLAIMED = Struct(">cHQQ8s")
_DELIVERED = Struct(">cQ8sIQQ")
_BATCH = Struct(">cQ8sI")
# The same with a retention by rule, in seconds.
_DELIVERED_TTL = Struct(">cQ8sIQQI")
_BATCH_TTL = Struct(">cQ8sII")
# Bound for each replay: see IdentityEnum.
_FOUND: Final = Outcome.DELIVERED


def pack(state: Claimed | Delivered | DeliveredBatch) -> bytes:
    """Encode a key's state in the format of claims.lua."""
    match state:
        case Claimed(slot, term, at, fp):
            return _CLAIMED.pack(b"C", slot, term, at, fp)
        case Delivered(at, fp, topic, partition, offset, ts, ttl_s, refused) if refused:
            tail = f"{topic}\0{refused}".encode()
            return _DELIVERED_TTL.pack(b"q", at, fp, partition, offset, ts, ttl_s) + tail
        case Delivered(at, fp, topic, partition, offset, ts, 0):
            return _DELIVERED.pack(b"D", at, fp, partition, offset, ts) + topic.encode()
        case Delivered(at, fp, topic, partition, offset, ts, ttl_s):
            return _DELIVERED_TTL.pack(b"d", at, fp, partition, offset, ts, ttl_s) + topic.encode()
        case DeliveredBatch(at, fp, count, 0):
            return _BATCH.pack(b"B", at, fp, count)
        case DeliveredBatch(at, fp, count, ttl_s):
            return _BATCH_TTL.pack(b"b", at, fp, count, ttl_s)


class CorruptState(ValueError):
    """The value of a key is none of the states that claims.lua writes."""

    @classmethod
    def of(cls, raw: bytes) -> Self:
        return cls(f"the state of a key is {raw[:40]!r} ({len(raw)} bytes), which this version does not write")


def unpack(raw: bytes) -> Claimed | Delivered | DeliveredBatch:
    """Decode what `pack` makes. Raises CorruptState for anything else."""
    try:
        match raw[:1]:
            case b"D":  # first, for replays
                _, at, fp, partition, offset, ts = _DELIVERED.unpack_from(raw)
                return Delivered(at, fp, raw[_DELIVERED.size :].decode(), partition, offset, ts)
            case b"C":
                return Claimed(*_CLAIMED.unpack(raw)[1:])
            case b"B":
                return DeliveredBatch(*_BATCH.unpack(raw)[1:])
            case b"b":
                return DeliveredBatch(*_BATCH_TTL.unpack(raw)[1:])
            case b"d":
                _, at, fp, partition, offset, ts, ttl_s = _DELIVERED_TTL.unpack_from(raw)
                return Delivered(at, fp, raw[_DELIVERED_TTL.size :].decode(), partition, offset, ts, ttl_s)
            case b"q":
                _, at, fp, partition, offset, ts, ttl_s = _DELIVERED_TTL.unpack_from(raw)
                topic, _, refused = raw[_DELIVERED_TTL.size :].decode().partition("\0")
                return Delivered(at, fp, topic, partition, offset, ts, ttl_s, refused)
    except (StructError, UnicodeDecodeError) as error:
        raise CorruptState.of(raw) from error
    raise CorruptState.of(raw)


def unpack_claim(answer: bytes, slot: int, term: int, fp: bytes) -> Claim:
    """Decode a reply to one claim, whose first byte is as in `claim` of claims.lua. Raises CorruptState."""
    match answer[:1]:
        case b"D" | b"B" | b"d" | b"b" | b"q":
            return Claim(_FOUND, unpack(answer))
        case b"N":
            return Claim(Outcome.NEW, Claimed(slot, term, AT.unpack_from(answer, 1)[0], fp))
        case b"T":
            return Claim(Outcome.TAKEN_OVER, Claimed(slot, term, AT.unpack_from(answer, 1)[0], fp))
        case b"X":
            return Claim(Outcome.CONFLICT, unpack(answer[1:]))
        case b"E":
            return Claim(Outcome.NOT_CLAIMED, Claimed(slot, term, 0, fp))
        case b"0" | b"1" as leased:
            return Claim(Outcome.IN_PROGRESS, unpack(answer[1:]), leased=leased == b"1")
    raise CorruptState.of(answer)


class RowPacker:
    """Packs rows of the ledger for the script."""

    def __init__(self, key: bytes, retention_ms: int) -> None:
        """`key` precedes each id in Redis; `retention_ms` is that of keys for which no rule sets one."""
        self._key = key
        self._retention_ms = retention_ms
        self._entry = lru_cache(maxsize=TOPIC_CHARS_MAX)(self._entry_format)  # by the length of the topic

    def packed(self, rows: Sequence[Row]) -> list[int | str | bytes]:
        """Pack rows as the script takes them.

        For each run of rows with one expiry and one length: the expiry (ms since the Unix epoch), the format for Lua's
        struct, and the packed keys and states.
        """
        groups: list[int | str | bytes] = []
        entries: list[bytes] = []
        expires = size = 0
        key = self._key

        def close() -> None:
            if entries:
                of_one = f"c{len(key) + ID_BYTES}c{size - len(key) - ID_BYTES}"
                groups.extend((expires, len(entries) * of_one, b"".join(entries)))
                entries.clear()

        topic, encoded, pack_entry = "", b"", self._entry(0).pack  # of the last row
        for id, state in rows:
            # As `pack` does, in one call: a store recovery has millions of rows.
            if isinstance(state, Delivered) and not (state.ttl_s or state.refused):
                if state.topic != topic:
                    topic, encoded = state.topic, state.topic.encode()
                    pack_entry = self._entry(len(encoded)).pack
                entry = pack_entry(key, id, b"D", state.at, state.fp, state.partition, state.offset, state.ts, encoded)
                ends = state.at + self._retention_ms
            else:
                entry = key + id + pack(state)
                ends = state.at + (state.ttl_s * 1000 or self._retention_ms)
            if ends != expires or len(entry) != size or len(entries) == UNPACKED_AT_ONCE:
                close()
                expires, size = ends, len(entry)
            entries.append(entry)
        close()
        return groups

    def _entry_format(self, topic_bytes: int) -> Struct:
        """Make the format of a key and its delivered state, whose topic has so many bytes."""
        return Struct(f">{len(self._key)}s{ID_BYTES}s{_DELIVERED.format.removeprefix('>')}{topic_bytes}s")
