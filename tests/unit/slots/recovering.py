"""A ledger, a control topic and a key store in memory, with all that the recovery of a slot and of the store needs."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, cast

import pytest

from service.claims.keys import StoreGeneration
from service.claims.states import Delivered, Row, SlotEvent
from service.contract.wire.ledger import LedgerRecord, decode_ledger
from service.contract.wire.ledger_entries import Entry
from service.core.metrics import Telemetry
from service.kafka.metadata import Partition
from service.kafka.reader import Item, Span
from service.kafka.records import RecordMetadata
from service.kafka.transaction_admin import Ends, LastOffsets, TransactionAdmin
from service.slots import recovery, store_recovery
from service.slots.recovery import SlotRecovery
from service.slots.slot import Slot
from service.slots.store_recovery import CurrentStore
from tests.unit.fakes import (
    GENERATION,
    NOW_MS,
    FakeIdempotent,
    FakeKeys,
    FakeProducer,
    World,
    unreachable_kafka,
)

SLOTS = 3


def entry(number: int) -> Entry:
    return Entry(number.to_bytes(16), b"f" * 8, NOW_MS - 1_000, "orders", 0, number, NOW_MS)


def item(partition: int, offset: int, *numbers: int) -> Item:
    """Make a ledger record of these events."""
    return Item(partition, offset, None, LedgerRecord(partition, 7, 0, "me", [entry(n) for n in numbers]).encode())


class Kafka(TransactionAdmin):
    """Ledger and control; `steps` lists the calls to it, and to the key store, in order."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__(unreachable_kafka())
        self.ledger: dict[int, list[Item]] = {}
        self.steps = steps
        self.spans: dict[int, Span] = {}
        self.newest = StoreGeneration(GENERATION.number, GENERATION.store)
        self.slots = 0  # the number of slots in control
        self.longest_ttl_s = 0  # the longest retention in control
        self.closed: list[FakeProducer] = []
        self.fencing = asyncio.Event()  # set when the fencing may end
        self.fencing.set()
        self.ends: dict[int, int] = {}
        self.silent: set[int] = set()  # ledger partitions whose leaders do not tell where they end
        self.since_ms = 0
        self.hanging: set[Partition] = set()
        self.now_ms = NOW_MS

    async def read_through(
        self, cluster: object, topic: str, spans: Mapping[int, Span], isolation: str, timeout_s: float
    ) -> AsyncIterator[list[Item]]:
        assert (topic, isolation, timeout_s) == ("fencepost.ledger", "read_committed", 15.0)
        self.steps.append("read")
        self.spans = dict(spans)
        for partition, span in spans.items():
            found = [each for each in self.ledger.get(partition, []) if span.start is None or each.offset >= span.start]
            if found:
                yield [each for each in found if each.offset <= span.through]

    async def newest_generation(self, slot: int = 0) -> StoreGeneration | None:
        self.steps.append(f"check {slot}")
        return self.newest

    async def append(self, store: str) -> int:
        self.steps.append(f"name {store}")
        self.newest = StoreGeneration(self.newest.number + 1, store)
        return self.newest.number

    async def last_offsets(self, topics: Sequence[str], only: Collection[Partition] = ()) -> LastOffsets:
        assert {topic for topic, _ in only} == {*topics}
        ends = {(topic, slot): self.ends.get(slot, 12) for topic, slot in only if slot not in self.silent}
        return LastOffsets({partition: Ends(end, end) for partition, end in ends.items()})

    async def fence(
        self,
        transactional_ids: Sequence[str],
        transaction_timeout_ms: int,
        on_progress: Callable[[Collection[str]], None],
    ) -> None:
        self.steps.append(f"fence {' '.join(transactional_ids)}")
        await self.fencing.wait()

    async def partitions_with_open_transactions(self, partitions: Collection[Partition]) -> set[Partition]:
        self.steps.append(f"hanging in {len(partitions)}")
        return self.hanging

    async def send_all(self, topic: str, contents: Sequence[tuple[int, bytes | None, bytes]]) -> list[RecordMetadata]:
        """Append a record to each partition."""
        self.steps.append("read through")
        assert [partition for partition, *_ in contents] == list(range(len(contents)))
        for partition, _, value in contents:
            record = decode_ledger(value)
            assert isinstance(record, LedgerRecord)
            assert (record.slot, record.entries) == (partition, [])
            self.ledger.setdefault(partition, []).append(Item(partition, 1_000 + partition, None, value))
        return [RecordMetadata(1_000 + partition, self.now_ms + partition) for partition, *_ in contents]

    async def close(self) -> None: ...


class Keys(FakeKeys):
    """A key store that lists its steps; writes of a store recovery may be held."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps
        self.nonces: list[str] = []
        self.writing = self.most = self.resolved = 0

    async def applied(self, generation: StoreGeneration, slot: int) -> int | None:
        self.steps.append("applied")
        return await super().applied(generation, slot)

    async def replay(
        self, generation: StoreGeneration, rows: Sequence[Row], free: tuple[int, int] | None = None
    ) -> None:
        self.steps.append(f"replay {len(rows)}" + (f" and free {free}" if free else ""))
        await super().replay(generation, rows, free)

    async def resolve_again(self) -> None:
        self.resolved += 1

    async def recover_read(self, store: str, nonce: str, slots: int) -> list[int | None]:
        self.nonces.append(nonce)
        if slots == 0:
            await self.trouble.enter("renew")
        return await super().recover_read(store, nonce, slots)

    async def recover_replay(self, store: str, nonce: str, rows: Sequence[Row]) -> None:
        self.steps.append(f"write {len(rows)}")
        self.writing += 1
        self.most = max(self.most, self.writing)
        try:
            await self.trouble.enter("replay")
            await super().recover_replay(store, nonce, rows)
        finally:
            self.writing -= 1

    async def recover_end(self, store: str, nonce: str, generation: int, freed: Sequence[int]) -> None:
        assert not self.writing, "it is complete while something is still to be written"
        self.steps.append(f"free {[*freed]} in {generation}")
        await super().recover_end(store, nonce, generation, freed)

    async def recover_abandon(self, store: str, nonce: str) -> None:
        self.steps.append("abandon")
        await super().recover_abandon(store, nonce)


class Settled:
    """A slot without hanging transactions."""

    def __init__(
        self, steps: list[str], cluster: object, ledger: Partition, producer: object, timeout_s: float, ended: object
    ) -> None:
        self._steps = steps
        self._ledger = ledger

    async def run(self, applied: int | None, maybe_hanging: Collection[Partition]) -> set[Partition]:
        self._steps.append(f"settle {self._ledger[1]} from {applied}")
        return set(maybe_hanging)


class Recovering:
    """All that recovery needs, in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self.world: Any = World(lease_ttl_ms=60, slots_max=SLOTS)
        self.keys, self.kafka = Keys(self.steps), Kafka(self.steps)
        self.keys.server.freed = {0: 1, 1: 5}
        self.keys.server.applied = {0: 1, 1: 5}
        self.producers: list[FakeProducer] = []
        recovering = self

        class Producer(FakeProducer):
            def __init__(self, cluster: object, name: str, timeout_ms: int) -> None:
                super().__init__()
                self.hanging = cast("Any", None)  # not called by Settled
                recovering.producers.append(self)
                self._fence = f"fence {name} {timeout_ms}"

            async def start(self) -> None:
                recovering.steps.append(self._fence)

            async def send(self, *arguments: Any) -> Any:
                recovering.steps.append("begin")
                return await super().send(*arguments)

        async def slots(names: Sequence[str]) -> dict[str, int]:
            return dict.fromkeys(names, SLOTS)

        async def high_watermarks(cluster: object, topic: str, partitions: Sequence[int]) -> dict[int, int]:
            return {partition: self.kafka.ends.get(partition, 7) for partition in partitions}

        async def offsets_since(
            cluster: object, topic: str, partitions: Sequence[int], since_ms: int
        ) -> dict[int, int | None]:
            self.kafka.since_ms = since_ms
            return {partition: 20 if partition == 0 else None for partition in partitions}

        monkeypatch.setattr(self.world.topic_admin, "partitions", slots)
        monkeypatch.setattr(recovery, "TransactionalProducer", Producer)
        monkeypatch.setattr(store_recovery, "TransactionalProducer", Producer)
        monkeypatch.setattr(recovery, "HangingRecovery", functools.partial(Settled, self.steps))
        monkeypatch.setattr(store_recovery, "HangingRecovery", functools.partial(Settled, self.steps))
        monkeypatch.setattr(recovery, "read_through", self.kafka.read_through)
        monkeypatch.setattr(store_recovery, "read_through", self.kafka.read_through)
        monkeypatch.setattr(store_recovery, "high_watermarks", high_watermarks)
        monkeypatch.setattr(store_recovery, "offsets_since", offsets_since)
        of_kafka = self.world.kafka_admin, self.kafka
        parts = (*of_kafka, self.keys, self.kafka, self.world.topics, self.world.settings, Telemetry())
        self.parts = cast("tuple[Any, ...]", parts)
        self.store: Any = CurrentStore(*self.parts)
        self.store._barriers = cast("Any", self.kafka)

    def slot(self) -> Slot:
        slot = Slot(1, self.keys, "fencepost.ledger", "test", FakeIdempotent())
        slot.move(SlotEvent.LEASE)
        return slot

    async def recover(self, slot: Slot) -> None:
        await SlotRecovery(*self.parts).run(slot, GENERATION)

    def delivered(self) -> set[int]:
        """List the numbers of the events that the key store has."""
        return {int.from_bytes(id) for id, state in self.keys.server.keys.items() if isinstance(state, Delivered)}
