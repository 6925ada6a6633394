"""Records of the ledger topic: begin records, and those that name the events and offsets of a transaction."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from service.contract.wire.json_fields import integer, text
from service.contract.wire.ledger_entries import Entry, LedgerOffsets, decode_entry, decode_offsets
from service.contract.wire.versions import LEDGER_VERSIONS, VERSION, NewerVersion, WireError, check_version


@dataclass(frozen=True, slots=True)
class Begin:
    """The begin record, which a process commits when it takes a slot. Its offset is the term; `at` is in ms."""

    slot: int
    producer_id: int
    epoch: int
    instance: str
    generation: int
    at: int

    def encode(self) -> bytes:
        """Encode the record as JSON."""
        return (
            f'{{"v":{VERSION},"begin":true,"slot":{self.slot},"pid":{self.producer_id},"epoch":{self.epoch},'
            f'"instance":"{self.instance}","generation":{self.generation},"at":{self.at}}}'
        ).encode()


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """The events of one transaction; without entries, the record through which a store recovery reads a partition.

    `offsets`: those that the transaction has committed too; it then holds one atomic batch, perhaps without events.

    `topic_ids`: the known ids (KIP-516) of the entries' topics, by name. A topic that was deleted and created again has
    another id. Earlier releases wrote no ids.
    """

    slot: int
    producer_id: int
    epoch: int
    instance: str
    entries: Sequence[Entry]
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    offsets: LedgerOffsets | None = None

    def encode(self) -> bytes:
        """Encode the record as JSON."""
        head = self.slot, self.producer_id, self.epoch, self.instance
        offsets = "" if self.offsets is None else self.offsets.encode()
        return encode_ledger(*head, map(Entry.encode, self.entries), self.topic_ids, offsets)


def encode_ledger(
    slot: int,
    producer_id: int,
    epoch: int,
    instance: str,
    entries: Iterable[str],
    topic_ids: Mapping[str, str] = MappingProxyType({}),
    offsets: str = "",
) -> bytes:
    """Encode a ledger record from entries, and a group's offsets, that are JSON text already.

    `topic_ids` has the known ids of the entries' topics, by name. It and `offsets` are left out if they are empty.
    """
    topics = ",".join([f'"{name}":"{topic_id}"' for name, topic_id in topic_ids.items()])
    known = f'"topic_ids":{{{topics}}},' if topics else ""
    committed = f',"offsets":{offsets}' if offsets else ""
    return (
        f'{{"v":{VERSION},"slot":{slot},"pid":{producer_id},"epoch":{epoch},"instance":"{instance}",'
        f'{known}"entries":[{",".join(entries)}]{committed}}}'
    ).encode()


def decode_ledger(raw: bytes | None) -> Begin | LedgerRecord:
    """Decode a record of the ledger topic. Raises WireError if it is not one of LEDGER_VERSIONS, or NewerVersion."""
    try:
        body = json.loads(raw or b"")
        check_version(body["v"], LEDGER_VERSIONS, "a ledger record")
        head = (integer(body["slot"]), integer(body["pid"]), integer(body["epoch"]), text(body["instance"]))
        if body.get("begin"):
            return Begin(*head, generation=integer(body["generation"]), at=integer(body["at"]))
        topic_ids = {name: text(topic_id) for name, topic_id in body.get("topic_ids", {}).items()}
        entries = [decode_entry(entry) for entry in body["entries"]]
        return LedgerRecord(*head, entries, topic_ids, decode_offsets(body["offsets"]) if "offsets" in body else None)
    except NewerVersion:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"no ledger record: {(raw or b'')[:200]!r} ({error})") from error
