"""What a ledger record holds: the coordinates of events, and the committed offsets of a consumer group."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from service.contract.wire.json_fields import integer, text


class Entry(NamedTuple):
    """The coordinates of one event of a ledger record. `at` is accepted_at, `ts` the record's timestamp, both in ms.

    A member of an atomic batch has the batch's id in `batch`, and its index in `i`. `ttl` is the retention of the key
    by a rule, in seconds; 0, and left out of the JSON, for the service's own. Earlier releases wrote none. `refused` is
    left out but for a dead letter, an event that was refused and is in a quarantine topic: its problem's code, a space,
    and its detail. `topic` is the quarantine topic then, `fp` the fingerprint of what was asked for.
    """

    id: bytes
    fp: bytes
    at: int
    topic: str
    partition: int
    offset: int
    ts: int
    batch: bytes | None = None
    i: int | None = None
    ttl: int = 0
    refused: str = ""

    def encode(self) -> str:
        """Encode the entry as JSON text."""
        return encode_entry(*self)


def encode_entry(
    id: bytes,
    fp: bytes,
    at: int,
    topic: str,
    partition: int,
    offset: int,
    ts: int,
    batch: bytes | None = None,
    i: int | None = None,
    ttl: int = 0,
    refused: str = "",
) -> str:
    """Encode an entry as JSON text, without making an Entry; topic names need no escaping (see TOPIC)."""
    member = "" if batch is None else f',"batch":"{batch.hex()}","i":{i}'
    kept = f',"ttl":{ttl}' if ttl else ""
    why = f',"refused":{json.dumps(refused, ensure_ascii=False)}' if refused else ""
    return (
        f'{{"id":"{id.hex()}","fp":"{fp.hex()}","at":{at},"topic":"{topic}",'
        f'"partition":{partition},"offset":{offset},"ts":{ts}{member}{kept}{why}}}'
    )


class CommittedOffset(NamedTuple):
    """The offset of a group in a partition, committed by a transaction."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class LedgerOffsets:
    """The offsets of a consumer group that an atomic batch has committed in the transaction of a ledger record.

    `batch` is the batch's id, `fp` its fingerprint, `at` and `ttl` are as in Entry. `partition` of `__consumer_offsets`
    has them, where the transaction begins at `offset`; both are None if the service may not see that topic.
    """

    batch: bytes
    fp: bytes
    at: int
    group: str
    member: str
    generation: int
    positions: Sequence[CommittedOffset]
    partition: int | None = None
    offset: int | None = None
    ttl: int = 0

    def encode(self) -> str:
        """Encode them as JSON text."""
        coordinates = {} if self.partition is None else {"partition": self.partition, "offset": self.offset}
        fields = {
            "batch": self.batch.hex(),
            "fp": self.fp.hex(),
            "at": self.at,
            **({"ttl": self.ttl} if self.ttl else {}),
            "group": self.group,
            "member": self.member,
            "generation": self.generation,
            **coordinates,
            "positions": [position._asdict() for position in self.positions],
        }
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def decode_entry(body: dict[str, Any]) -> Entry:
    """Make an entry of its parsed JSON. Raises KeyError, TypeError or ValueError if it has another form."""
    batch, i = body.get("batch"), body.get("i")
    return Entry(
        bytes.fromhex(body["id"]),
        bytes.fromhex(body["fp"]),
        integer(body["at"]),
        text(body["topic"]),
        integer(body["partition"]),
        integer(body["offset"]),
        integer(body["ts"]),
        None if batch is None else bytes.fromhex(batch),
        None if i is None else integer(i),
        integer(body.get("ttl", 0)),
        text(body.get("refused", "")),
    )


def decode_offsets(body: dict[str, Any]) -> LedgerOffsets:
    """Make the offsets of their parsed JSON. Raises KeyError, TypeError or ValueError if they have another form."""
    partition, offset = body.get("partition"), body.get("offset")
    return LedgerOffsets(
        bytes.fromhex(body["batch"]),
        bytes.fromhex(body["fp"]),
        integer(body["at"]),
        text(body["group"]),
        text(body["member"]),
        integer(body["generation"]),
        [
            CommittedOffset(text(each["topic"]), integer(each["partition"]), integer(each["offset"]))
            for each in body["positions"]
        ],
        None if partition is None else integer(partition),
        None if offset is None else integer(offset),
        integer(body.get("ttl", 0)),
    )
