"""Tests the steps of store recovery in order: name, fence, read through, replay, free; and the quiet time before."""

import asyncio
import time
from collections.abc import Callable

import pytest

from service.claims.keys import REPLAY_CHUNK, ServerIdentity, StoreGeneration
from service.core.problems import StoreAway, StoreLost, StoreUnanswered
from service.kafka.reader import Span
from service.slots import store_recovery
from service.slots.hanging_recovery import CLOCKS_APART_MS
from service.slots.store_recovery import REPLAY_RECORDS
from tests.durations import HOUR_MS
from tests.unit.fakes import GENERATION, NOW_MS, until
from tests.unit.slots.bed import SLOTS, Bed, item


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
    bed.kafka.ends = {1: 44}
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
