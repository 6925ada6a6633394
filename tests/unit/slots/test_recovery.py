"""Tests the steps of recovery in order: of one slot, and of the store with all its slots."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, cast

import pytest

from service.claims.keys import REPLAY_CHUNK, ServerIdentity, StoreGeneration
from service.claims.states import Delivered, Row, SlotEvent, SlotState
from service.contract.wire import Entry, LedgerRecord, NewerVersion, decode_ledger
from service.core.metrics import Telemetry
from service.core.problems import Fenced, KafkaAway, StoreAway, StoreLost, StoreUnanswered
from service.kafka.metadata import Partition
from service.kafka.reader import Item, Span
from service.kafka.records import RecordMetadata
from service.slots import recovery, store_recovery
from service.slots.hanging_recovery import CLOCKS_APART_MS
from service.slots.recovery import SlotRecovery
from service.slots.slot import Slot
from service.slots.store_recovery import REPLAY_RECORDS, CurrentStore
from tests.unit.fakes import (
    GENERATION,
    NOW_MS,
    FakeCluster,
    FakeIdempotent,
    FakeKeys,
    FakeProducer,
    World,
    ended,
    until,
)

SLOTS = 3
HOUR_MS = 3_600_000


def entry(number: int) -> Entry:
    return Entry(number.to_bytes(16), b"f" * 8, NOW_MS - 1_000, "orders", 0, number, NOW_MS)


def item(partition: int, offset: int, *numbers: int) -> Item:
    """Make a ledger record of these events."""
    return Item(partition, offset, None, LedgerRecord(partition, 7, 0, "me", [entry(n) for n in numbers]).encode())


class Kafka(FakeCluster):
    """Ledger and control; `steps` lists the calls to it, and to the key store, in order."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
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

    async def fence(
        self, transactional_ids: Sequence[str], transaction_timeout_ms: int, tell: Callable[[Collection[str]], None]
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


class Bed:
    """All that recovery needs, in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self.world: Any = World(lease_ttl_ms=60, slots_max=SLOTS)
        self.keys, self.kafka = Keys(self.steps), Kafka(self.steps)
        self.keys.server.freed = {0: 1, 1: 5}
        self.keys.server.applied = {0: 1, 1: 5}
        self.producers: list[FakeProducer] = []
        bed = self

        class Producer(FakeProducer):
            def __init__(self, cluster: object, name: str, timeout_ms: int) -> None:
                super().__init__()
                bed.producers.append(self)
                self._fence = f"fence {name} {timeout_ms}"

            async def start(self) -> None:
                bed.steps.append(self._fence)

            async def send(self, *arguments: Any) -> Any:
                bed.steps.append("begin")
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

        monkeypatch.setattr(self.kafka, "partitions", slots)
        monkeypatch.setattr(recovery, "TransactionalProducer", Producer)
        monkeypatch.setattr(store_recovery, "TransactionalProducer", Producer)
        monkeypatch.setattr(recovery, "HangingRecovery", functools.partial(Settled, self.steps))
        monkeypatch.setattr(store_recovery, "HangingRecovery", functools.partial(Settled, self.steps))
        monkeypatch.setattr(recovery, "read_through", self.kafka.read_through)
        monkeypatch.setattr(store_recovery, "read_through", self.kafka.read_through)
        monkeypatch.setattr(store_recovery, "high_watermarks", high_watermarks)
        monkeypatch.setattr(store_recovery, "offsets_since", offsets_since)
        self.world.topics._cluster = self.kafka
        parts = (self.kafka, self.keys, self.kafka, self.world.topics, self.world.settings, Telemetry())
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


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


# ----------------------------------------------------------------------------------------------------------- a slot


async def test_a_slot_is_fenced_begun_checked_replayed_and_freed(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "REPLAY_CHUNK", 2)
    slot = bed.slot()
    bed.kafka.ledger[1] = [item(1, 4, 99), item(1, 5, 1, 2, 3), item(1, 8, 4, 5), item(1, 12), item(1, 13, 98)]
    await bed.recover(slot)
    assert (slot.state, slot.term, slot.generation) == (SlotState.READY, 12, GENERATION)
    assert bed.steps == [
        "fence fencepost.slot.1 10000",
        "applied",
        "settle 1 from 5",
        "begin",
        "check 1",
        "applied",
        "read",
        "replay 2",
        "replay 2",
        "replay 1 and free (1, 12)",
    ]
    assert bed.kafka.spans == {1: Span(5, 12)}
    assert bed.delivered() == {1, 2, 3, 4, 5}
    assert bed.keys.server.freed == bed.keys.server.applied == {0: 1, 1: 12}


@pytest.mark.parametrize(
    "newest",
    [None, StoreGeneration(GENERATION.number + 1, GENERATION.store), StoreGeneration(GENERATION.number, "other/1")],
)
async def test_a_slot_is_not_freed_while_control_names_another_store(bed: Bed, newest: StoreGeneration | None) -> None:
    slot = bed.slot()
    monkey: Any = bed.kafka
    monkey.newest = newest
    with pytest.raises(StoreLost):
        await bed.recover(slot)
    assert slot.state is SlotState.DOUBT
    assert bed.producers[0].closed
    await slot.close_producers()  # as its pool does, which does not know how far it came
    assert bed.steps[-1] == "check 1"
    assert bed.keys.server.freed == {0: 1, 1: 5}


@pytest.mark.parametrize(("applied", "begins"), [(None, True), (11, True), (12, True), (13, False)])
async def test_a_ledger_that_ends_before_its_applied_offset_frees_no_slot(
    bed: Bed, applied: int | None, begins: bool
) -> None:
    """Records that were written since would not be read."""
    bed.keys.server.applied = {} if applied is None else {1: applied}
    slot = bed.slot()
    if begins:
        await bed.recover(slot)
        assert (slot.state, bed.kafka.spans) == (SlotState.READY, {1: Span(applied, 12)})
        return
    with pytest.raises(KafkaAway, match="applied it up to 13, and it ends at 12"):
        await bed.recover(slot)
    assert (slot.state, bed.keys.server.freed[1]) == (SlotState.DOUBT, 5)


async def test_neither_slot_nor_store_is_freed_past_a_record_of_a_later_version(bed: Bed) -> None:
    newer = Item(1, 9, None, b'{"v":3}')
    bed.kafka.ledger[1] = [item(1, 8, 1), newer, item(1, 12)]
    slot = bed.slot()
    with pytest.raises(NewerVersion, match="the ledger of slot 1 has, at offset 9, a record of version 3"):
        await bed.recover(slot)
    assert (slot.state, bed.producers[0].closed, bed.keys.server.freed[1]) == (SlotState.DOUBT, True, 5)

    bed.keys.server.flush()
    settling = asyncio.create_task(bed.store.wait_until_settled())
    # Until the next attempt begins, after a short pause.
    await until(lambda: bed.store.newer is not None and bed.store.status == f"store-away: {bed.store.newer}")
    await ended(settling)
    assert bed.keys.server.held is None
    await bed.store.close()


async def test_a_slot_that_another_has_had_since_is_not_ready(bed: Bed) -> None:
    bed.keys.server.freed[1] = 13
    slot = bed.slot()
    with pytest.raises(Fenced):
        await bed.recover(slot)
    assert (slot.state, bed.producers[0].closed) == (SlotState.DOUBT, True)


async def test_a_recovery_that_is_cut_off_leaves_the_slot_in_doubt(bed: Bed) -> None:
    slot = bed.slot()
    held = asyncio.Event()

    async def silence(slot: int = 0) -> StoreGeneration | None:
        held.set()
        await asyncio.sleep(60)
        return None

    bed.kafka.newest_generation = silence  # type: ignore[method-assign]
    recovering = asyncio.create_task(bed.recover(slot))
    await held.wait()
    await ended(recovering)
    assert (slot.state, bed.producers[0].closed) == (SlotState.DOUBT, True)


# -------------------------------------------------------------------------------------------------------- the store


async def test_a_store_is_named_fenced_replayed_and_freed_in_this_order(bed: Bed) -> None:
    bed.keys.server.flush()
    bed.kafka.slots = SLOTS + 1  # one more than the broker reports
    bed.kafka.ledger = {0: [item(0, 19, 99), item(0, 20, 1, 2)], 1: [item(1, 0, 3)], 3: [item(3, 4, 4)]}
    generation = await asyncio.wait_for(bed.store.wait_until_settled(), 3.0)
    assert generation == StoreGeneration(GENERATION.number + 1, GENERATION.store)
    assert bed.steps == [
        "check 0",
        f"name {GENERATION.store}",
        "check 0",
        "fence fencepost.slot.0 fencepost.slot.1 fencepost.slot.2 fencepost.slot.3",
        "hanging in 4",
        "read through",
        "read",
        "write 2",
        "write 1",
        "write 0",
        "write 1",
        "free [1000, 1001, 1002, 1003] in 2",
    ]
    assert bed.kafka.spans == {0: Span(20, 1_000), 1: Span(None, 1_001), 2: Span(None, 1_002), 3: Span(None, 1_003)}
    assert NOW_MS - bed.kafka.since_ms == bed.world.settings.key_ttl_s * 1000 + CLOCKS_APART_MS
    assert bed.delivered() == {1, 2, 3, 4}
    assert bed.keys.server.freed == bed.keys.server.applied == {0: 1_000, 1: 1_001, 2: 1_002, 3: 1_003}
    assert bed.keys.server.held == generation
    assert bed.keys.server.nonce is None


@pytest.mark.parametrize(("by_rules_d", "earlier_d"), [(3, 0), (3, 2), (1, 3)])
async def test_the_ledger_is_read_back_as_far_as_the_keys_of_any_rule_live(
    bed: Bed, by_rules_d: int, earlier_d: int
) -> None:
    """Also of a rule that only an earlier process knew."""
    bed.world.topics.longest_ttl_s = by_rules_d * 86_400
    bed.kafka.longest_ttl_s = earlier_d * 86_400
    bed.keys.server.flush()
    await asyncio.wait_for(bed.store.wait_until_settled(), 3.0)
    assert NOW_MS - bed.kafka.since_ms == 3 * 86_400_000 + CLOCKS_APART_MS


@pytest.mark.parametrize(("store_h", "brokers_h"), [(0, 0), (8, 0), (0, 8), (-8, 0), (0, -8)])
async def test_the_ledger_is_read_back_by_the_slower_clock_of_redis_and_kafka(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, store_h: int, brokers_h: int
) -> None:
    """Not by this process's clock: if that were wrong by hours, keys would be left out that have not expired."""
    monkeypatch.setattr(time, "time_ns", lambda: (NOW_MS + 25 * HOUR_MS) * 1_000_000)
    bed.keys.server.flush()
    bed.keys.server.clock.now_ms = NOW_MS + store_h * HOUR_MS
    bed.kafka.now_ms = NOW_MS + brokers_h * HOUR_MS
    await asyncio.wait_for(bed.store.wait_until_settled(), 3.0)
    slowest_ms = NOW_MS + min(store_h, brokers_h) * HOUR_MS
    assert slowest_ms - bed.kafka.since_ms == bed.world.settings.key_ttl_s * 1000 + CLOCKS_APART_MS


async def test_a_redis_that_kept_its_data_has_each_partition_read_from_its_applied_offset(bed: Bed) -> None:
    bed.keys.server.applied = {0: 0, 1: 44}
    bed.kafka.newest = StoreGeneration(2, GENERATION.store)  # of the same server: its recovery did not end
    await asyncio.wait_for(bed.store.wait_until_settled(), 3.0)
    assert bed.kafka.spans == {0: Span(0, 1_000), 1: Span(44, 1_001), 2: Span(None, 1_002)}


async def test_a_store_is_complete_only_when_every_replayed_row_is_written(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow Redis is; and no more is read than may wait for it."""
    monkeypatch.setattr(store_recovery, "REPLAYS_AHEAD", 4)
    bed.keys.server.flush()
    numbers = range(1, 8 * REPLAY_RECORDS + 2)
    bed.kafka.ledger[1] = [item(1, number, number) for number in numbers]
    gate = bed.keys.trouble.hold("replay")
    settling = asyncio.create_task(bed.store.wait_until_settled())
    await until(lambda: bed.keys.writing == store_recovery.REPLAYS_AHEAD)
    await asyncio.sleep(0.02)
    assert not settling.done()
    gate.set()
    await asyncio.wait_for(settling, 3.0)
    assert bed.keys.most == store_recovery.REPLAYS_AHEAD
    assert bed.delivered() == set(numbers)
    assert [step for step in bed.steps if step.startswith("write")][1:3] == [f"write {REPLAY_RECORDS}"] * 2


async def test_the_bound_of_waiting_replays_is_counted_in_keys(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger record has as many entries as its transaction has events, thousands with batches."""
    monkeypatch.setattr(store_recovery, "REPLAYS_AHEAD", 4)
    bed.keys.server.flush()
    numbers = range(1, 6 * REPLAY_CHUNK + 1)
    bed.kafka.ledger[1] = [item(1, 1, *numbers)]
    gate = bed.keys.trouble.hold("replay")
    settling = asyncio.create_task(bed.store.wait_until_settled())
    await until(lambda: bed.keys.writing > 0)
    await asyncio.sleep(0.05)
    gate.set()
    await asyncio.wait_for(settling, 5.0)
    assert bed.delivered() == set(numbers)
    writes = [step for step in bed.steps if step.startswith("write")]
    assert writes.count(f"write {REPLAY_CHUNK}") == 6
    assert bed.keys.most == store_recovery.REPLAYS_AHEAD


@pytest.mark.parametrize("place", [0, 3])
async def test_a_recovery_whose_write_fails_is_given_up(bed: Bed, place: int) -> None:
    """For any write: the first fails while the ledger is read, the last after that."""
    bed.keys.server.flush()
    bed.kafka.ledger[1] = [item(1, number, number) for number in range(1, 3 * REPLAY_RECORDS)]
    wrong: list[Exception | None] = [None] * 4
    wrong[place] = StoreUnanswered("no answer")

    async def enter(name: str) -> None:
        if name == "replay" and wrong and (error := wrong.pop(0)) is not None:
            raise error
        if name == "replay" and place == 0:
            await asyncio.sleep(60)

    bed.keys.trouble.enter = enter  # type: ignore[method-assign]
    settling = asyncio.create_task(bed.store.wait_until_settled())
    await until(lambda: "abandon" in bed.steps)
    assert bed.keys.writing == 0, "it writes on"
    assert bed.keys.server.held is None
    assert not any(step.startswith("free") for step in bed.steps)
    assert bed.store.generation is None
    settling.cancel()
    await bed.store.close()


async def test_a_recovery_renews_its_nonce_while_it_waits_for_a_fence(bed: Bed) -> None:
    bed.keys.server.flush()
    bed.kafka.fencing.clear()
    settling = asyncio.create_task(bed.store.wait_until_settled())
    bed.keys.trouble.before["renew"].extend([StoreAway("OOM"), StoreUnanswered("no answer"), StoreLost("a flush")])
    await until(lambda: len(bed.keys.nonces) >= 5)
    bed.kafka.fencing.set()
    await asyncio.wait_for(settling, 3.0)
    assert len(set(bed.keys.nonces)) == 1
    renewed = len(bed.keys.nonces)
    await asyncio.sleep(0.2)
    assert len(bed.keys.nonces) == renewed, "it goes on after the recovery"


async def test_a_recovery_that_is_cut_off_lets_the_next_one_begin(bed: Bed) -> None:
    """A process that stops meanwhile: others need not wait until its nonce has expired."""
    bed.keys.server.flush()
    bed.kafka.fencing.clear()
    settling = asyncio.create_task(bed.store.wait_until_settled())
    await until(lambda: any(step.startswith("fence") for step in bed.steps))
    await bed.store.close()
    assert bed.steps[-1] == "abandon"
    assert bed.keys.server.nonce is None
    settling.cancel()


# -------------------------------------------------------------------------------------------------- a quiet time


def another_answers(bed: Bed) -> None:
    bed.keys.server.store = "run/third"


def control_names_a_third(bed: Bed) -> None:
    bed.kafka.newest = StoreGeneration(9, "run/third")


def somebody_writes(bed: Bed) -> None:
    bed.kafka.ends[2] = 8


@pytest.mark.parametrize("happens", [None, another_answers, control_names_a_third, somebody_writes])
async def test_another_store_is_recovered_only_after_a_quiet_lease_time(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Bed], None] | None
) -> None:
    """If control names another store, other processes may still use it."""
    bed.kafka.newest = StoreGeneration(GENERATION.number, "run/named")
    bed.keys.server.held = StoreGeneration(GENERATION.number, "run/named")
    paused: list[float] = []

    async def rest(identity: ServerIdentity, pause_s: float) -> None:
        paused.append(pause_s)
        await asyncio.sleep(60)

    monkeypatch.setattr(bed.store, "_rest", rest)
    bed.store._quiet_pause_s = 4.0
    started = time.monotonic()
    settling = asyncio.create_task(bed.store.wait_until_settled())
    await until(lambda: bed.store.state == "stale-store")
    await asyncio.sleep(0.02)  # of 0.06
    if happens is None:
        assert await asyncio.wait_for(settling, 3.0) == StoreGeneration(2, GENERATION.store)
        assert time.monotonic() - started > 0.06
        assert bed.keys.resolved == 1, "the address may lead to another by now"
        assert bed.store._quiet_pause_s == store_recovery.PAUSE_LEAST_S
        return
    happens(bed)
    await until(lambda: bool(paused))
    assert 2.0 <= paused[0] <= 4.0
    assert bed.store._quiet_pause_s == 8.0
    assert not any(step.startswith(("name", "fence")) for step in bed.steps)
    settling.cancel()
    await bed.store.close()
