"""`fencepost slots` and `fencepost key`: show what Redis and the ledger hold now."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from service.claims.keys import Found
from service.claims.states import Claimed, Delivered, DeliveredBatch
from service.cli.parts import kafka_admin, keys_view
from service.cli.redis_view import SlotView
from service.contract.wire.ledger import Begin, LedgerRecord, decode_ledger
from service.contract.wire.ledger_entries import Entry, LedgerOffsets
from service.contract.wire.names import ledger_topic
from service.contract.wire.versions import NewerVersion, WireError
from service.core.settings import Settings
from service.kafka.admin import KafkaAdmin
from service.kafka.reader import high_watermarks, offsets_since, read_between
from service.kafka.topic_admin import TopicAdmin
from service.slots.hanging_recovery import CLOCKS_APART_MS

# Offsets to search from `freed` on: the begin record is the first record of its term.
BEGIN_WITHIN: Final = 50


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot: its state in Redis, its newest begin record with its offset, and the end of its ledger partition."""

    view: SlotView
    begun: tuple[Begin, int] | None
    end: int

    @property
    def begin(self) -> Begin | None:
        return self.begun[0] if self.begun else None

    @property
    def term(self) -> int | None:
        return self.begun[1] if self.begun else None

    def document(self) -> dict[str, Any]:
        """Make the JSON document of the slot."""
        begin = self.begin
        return {
            "slot": self.view.slot,
            "state": self.view.state,
            "owner": self.view.holder,
            "lease_ms": self.view.lease_ms,
            "term": self.term,
            "producer_id": begin.producer_id if begin else None,
            "producer_epoch": begin.epoch if begin else None,
            "begun_by": begin.instance if begin else None,
            "applied": self.view.applied,
            "freed": self.view.freed,
            "ledger_end": self.end,
        }


@dataclass(frozen=True, slots=True)
class SlotsView:
    """All slots, the store that answers, and its generation's number (None: it has none, or lost it)."""

    store: str
    generation: int | None
    rows: list[SlotRow]


async def slots(settings: Settings) -> SlotsView:
    """Read the state of all slots. Raises KafkaAway, StoreAway and StoreUnanswered."""
    ledger = ledger_topic(settings.namespace)
    async with kafka_admin(settings) as kafka, keys_view(settings) as keys:
        count = (await TopicAdmin(kafka).partitions([ledger])).get(ledger, 0)
        if not count:
            return SlotsView((await keys.who()).store, None, [])
        until = await high_watermarks(kafka, ledger, range(count))
        identity = await keys.who()
        views = await keys.slots(count)
        begins = await _begins(kafka, ledger, {v.slot: v.freed for v in views if v.freed is not None}, until)
        generation = identity.generation.number if identity.generation else None
        rows = [SlotRow(view, begins.get(view.slot), until[view.slot]) for view in views]
        return SlotsView(identity.store, generation, rows)


async def _begins(
    kafka: KafkaAdmin, ledger: str, freed: Mapping[int, int], until: Mapping[int, int]
) -> dict[int, tuple[Begin, int]]:
    """Find the newest begin record at or soon after `freed` of each slot, and its offset, the term."""
    spans = {slot: (offset, min(until[slot], offset + BEGIN_WITHIN)) for slot, offset in freed.items()}
    found: dict[int, tuple[Begin, int]] = {}
    async for items in read_between(kafka, ledger, spans, kafka.timeout_s):
        for item in items:
            record = _decoded(item.value)
            if isinstance(record, Begin):
                found[item.partition] = record, item.offset
    return found


def _decoded(value: bytes | None) -> Begin | LedgerRecord | None:
    """Decode a ledger record; None for one that is not Fencepost's. Raises NewerVersion."""
    try:
        return decode_ledger(value)
    except NewerVersion:
        raise
    except WireError:
        return None


@dataclass(frozen=True, slots=True)
class CommittedAt:
    """A ledger entry of an id, or of a batch with that id, and its record's coordinates and producer."""

    slot: int
    offset: int
    producer_id: int
    epoch: int
    instance: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class OffsetsAt:
    """The offsets of a consumer group that a batch has committed, and their record's coordinates and producer."""

    slot: int
    offset: int
    producer_id: int
    epoch: int
    instance: str
    offsets: LedgerOffsets

    def document(self) -> dict[str, Any]:
        """Make the JSON document of the offsets, and of the record that has them."""
        return {
            "slot": self.slot,
            "offset": self.offset,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
            "instance": self.instance,
            "group": self.offsets.group,
            "member": self.offsets.member,
            "generation": self.offsets.generation,
            "accepted_at": self.offsets.at,
            "positions": [position._asdict() for position in self.offsets.positions],
        }


@dataclass(frozen=True, slots=True)
class KeyView:
    """A key's state in Redis and its ledger entries. `store` says why Redis was not read; empty if it was."""

    id: bytes
    found: Found
    store: str
    written: list[CommittedAt]
    offsets: list[OffsetsAt]

    @property
    def known(self) -> bool:
        return self.found.state is not None or bool(self.written) or bool(self.offsets)

    def document(self) -> dict[str, Any]:
        """Make the JSON document of the key."""
        return {
            "id": self.id.hex(),
            "redis": state_document(self.found),
            "store": self.store,
            "ledger": [
                {
                    "slot": one.slot,
                    "offset": one.offset,
                    "producer_id": one.producer_id,
                    "producer_epoch": one.epoch,
                    "instance": one.instance,
                    "topic": one.entry.topic,
                    "partition": one.entry.partition,
                    "record_offset": one.entry.offset,
                    "accepted_at": one.entry.at,
                    "timestamp": one.entry.ts,
                    "member": one.entry.i,
                    **({"refused": one.entry.refused} if one.entry.refused else {}),
                }
                for one in self.written
            ],
            **({"offsets": [one.document() for one in self.offsets]} if self.offsets else {}),
        }


def state_document(found: Found) -> dict[str, Any] | None:
    """Make the JSON document of a key's state in Redis; None if it has none."""
    match found.state:
        case Claimed(slot, term, at, _):
            return {
                "state": "claimed",
                "slot": slot,
                "term": term,
                "accepted_at": at,
                "never_written": found.dead,
                "leased": found.leased,
            }
        case Delivered(at, _, topic, partition, offset, ts, _, refused):
            coordinates = {"topic": topic, "partition": partition, "offset": offset, "timestamp": ts}
            why = {"refused": refused} if refused else {}
            return {"state": "quarantined" if refused else "delivered", "accepted_at": at, **coordinates, **why}
        case DeliveredBatch(at, _, count):
            return {"state": "delivered", "accepted_at": at, "members": count}
    return None


async def key(
    settings: Settings,
    longest_ttl_s: int,
    id: bytes,
    now_ms: float,
    on_progress: Callable[[int, int], None],
) -> KeyView:
    """Look for the id of a key in Redis, and in the part of the ledger that may name a key that has not expired.

    `longest_ttl_s` is the longest retention of keys by a rule, in seconds, 0 without any. `on_progress` is called with
    the numbers of records read and to be read. Raises KafkaAway, StoreAway and StoreUnanswered.
    """
    async with kafka_admin(settings) as kafka, keys_view(settings) as keys:
        identity = await keys.who()
        if identity.generation is None or identity.generation.store != identity.store:
            found, store = Found(None), "Redis holds no generation: it may lack keys"
        else:
            found, store = await keys.find(identity.generation, id), ""
        since_ms = int(now_ms) - 1000 * max(settings.key_ttl_s, longest_ttl_s) - CLOCKS_APART_MS
        return KeyView(id, found, store, *await _written(kafka, settings, id, since_ms, on_progress))


async def _written(
    kafka: KafkaAdmin, settings: Settings, id: bytes, since_ms: int, on_progress: Callable[[int, int], None]
) -> tuple[list[CommittedAt], list[OffsetsAt]]:
    """Find the ledger entries of an id since a time, in ms, and the offsets of a consumer group under the id."""
    ledger = ledger_topic(settings.namespace)
    count = (await TopicAdmin(kafka).partitions([ledger])).get(ledger, 0)
    if not count:
        return [], []
    until = await high_watermarks(kafka, ledger, range(count))
    since = await offsets_since(kafka, ledger, range(count), since_ms)
    spans = {n: (start, until[n]) for n, start in since.items() if start is not None}
    found: list[CommittedAt] = []
    offsets: list[OffsetsAt] = []
    needle = id.hex().encode()
    done = {n: start for n, (start, _) in spans.items()}
    total = sum(end - start for start, end in spans.values())
    async for items in read_between(kafka, ledger, spans, kafka.timeout_s):
        for item in items:
            if item.value is not None and needle in item.value:
                entries, committed = in_record(item.partition, item.offset, item.value, id)
                found += entries
                offsets += committed
            done[item.partition] = item.offset + 1
        on_progress(sum(done.values()) - sum(start for start, _ in spans.values()), total)
    return found, offsets


def in_record(slot: int, offset: int, value: bytes, id: bytes) -> tuple[list[CommittedAt], list[OffsetsAt]]:
    """Find an id's entries in a ledger record, and the offsets that were committed under the id."""
    record = _decoded(value)
    if not isinstance(record, LedgerRecord):
        return [], []
    of_record = slot, offset, record.producer_id, record.epoch, record.instance
    entries = [CommittedAt(*of_record, entry) for entry in record.entries if id in (entry.id, entry.batch)]
    offsets = record.offsets
    return entries, [OffsetsAt(*of_record, offsets)] if offsets is not None and offsets.batch == id else []
