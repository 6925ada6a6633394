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
from tests.unit.slots.recovering import SLOTS, Recovering, item


async def test_a_store_is_named_fenced_replayed_and_freed_in_this_order(recovering: Recovering) -> None:
    recovering.keys.server.flush()
    recovering.kafka.slots = SLOTS + 1  # one more than the broker reports
    recovering.kafka.ledger = {0: [item(0, 19, 99), item(0, 20, 1, 2)], 1: [item(1, 0, 3)], 3: [item(3, 4, 4)]}
    generation = await asyncio.wait_for(recovering.store.wait_until_settled(), 3.0)
    assert generation == StoreGeneration(GENERATION.number + 1, GENERATION.store)
    assert recovering.steps == [
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
    assert recovering.kafka.spans == {
        0: Span(20, 1_000),
        1: Span(None, 1_001),
        2: Span(None, 1_002),
        3: Span(None, 1_003),
    }
    assert NOW_MS - recovering.kafka.since_ms == recovering.world.settings.key_ttl_s * 1000 + CLOCKS_APART_MS
    assert recovering.delivered() == {1, 2, 3, 4}
    assert recovering.keys.server.freed == recovering.keys.server.applied == {0: 1_000, 1: 1_001, 2: 1_002, 3: 1_003}
    assert recovering.keys.server.held == generation
    assert recovering.keys.server.nonce is None


@pytest.mark.parametrize(("by_rules_d", "earlier_d"), [(3, 0), (3, 2), (1, 3)])
async def test_the_ledger_is_read_back_as_far_as_the_keys_of_any_rule_live(
    recovering: Recovering, by_rules_d: int, earlier_d: int
) -> None:
    """Also of a rule that only an earlier process knew."""
    recovering.world.topics.longest_ttl_s = by_rules_d * 86_400
    recovering.kafka.longest_ttl_s = earlier_d * 86_400
    recovering.keys.server.flush()
    await asyncio.wait_for(recovering.store.wait_until_settled(), 3.0)
    assert NOW_MS - recovering.kafka.since_ms == 3 * 86_400_000 + CLOCKS_APART_MS


@pytest.mark.parametrize(("store_h", "brokers_h"), [(0, 0), (8, 0), (0, 8), (-8, 0), (0, -8)])
async def test_the_ledger_is_read_back_by_the_slower_clock_of_redis_and_kafka(
    recovering: Recovering, monkeypatch: pytest.MonkeyPatch, store_h: int, brokers_h: int
) -> None:
    """Not by this process's clock: if that were wrong by hours, keys would be left out that have not expired."""
    monkeypatch.setattr(time, "time_ns", lambda: (NOW_MS + 25 * HOUR_MS) * 1_000_000)
    recovering.keys.server.flush()
    recovering.keys.server.clock.now_ms = NOW_MS + store_h * HOUR_MS
    recovering.kafka.now_ms = NOW_MS + brokers_h * HOUR_MS
    await asyncio.wait_for(recovering.store.wait_until_settled(), 3.0)
    slowest_ms = NOW_MS + min(store_h, brokers_h) * HOUR_MS
    assert slowest_ms - recovering.kafka.since_ms == recovering.world.settings.key_ttl_s * 1000 + CLOCKS_APART_MS


async def test_a_redis_that_kept_its_data_has_each_partition_read_from_its_applied_offset(
    recovering: Recovering,
) -> None:
    recovering.keys.server.applied = {0: 0, 1: 44}
    recovering.kafka.ends = {1: 44}
    recovering.kafka.newest = StoreGeneration(2, GENERATION.store)  # of the same server: its recovery did not end
    await asyncio.wait_for(recovering.store.wait_until_settled(), 3.0)
    assert recovering.kafka.spans == {0: Span(0, 1_000), 1: Span(44, 1_001), 2: Span(None, 1_002)}


async def test_a_store_is_complete_only_when_every_replayed_row_is_written(
    recovering: Recovering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow Redis is; and no more is read than may wait for it."""
    monkeypatch.setattr(store_recovery, "REPLAYS_AHEAD", 4)
    recovering.keys.server.flush()
    numbers = range(1, 8 * REPLAY_RECORDS + 2)
    recovering.kafka.ledger[1] = [item(1, number, number) for number in numbers]
    gate = recovering.keys.trouble.hold("replay")
    settling = asyncio.create_task(recovering.store.wait_until_settled())
    await until(lambda: recovering.keys.writing == store_recovery.REPLAYS_AHEAD)
    await asyncio.sleep(0.02)
    assert not settling.done()
    gate.set()
    await asyncio.wait_for(settling, 3.0)
    assert recovering.keys.most == store_recovery.REPLAYS_AHEAD
    assert recovering.delivered() == set(numbers)
    assert [step for step in recovering.steps if step.startswith("write")][1:3] == [f"write {REPLAY_RECORDS}"] * 2


async def test_the_bound_of_waiting_replays_is_counted_in_keys(
    recovering: Recovering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger record has as many entries as its transaction has events, thousands with batches."""
    monkeypatch.setattr(store_recovery, "REPLAYS_AHEAD", 4)
    recovering.keys.server.flush()
    numbers = range(1, 6 * REPLAY_CHUNK + 1)
    recovering.kafka.ledger[1] = [item(1, 1, *numbers)]
    gate = recovering.keys.trouble.hold("replay")
    settling = asyncio.create_task(recovering.store.wait_until_settled())
    await until(lambda: recovering.keys.writing > 0)
    await asyncio.sleep(0.05)
    gate.set()
    await asyncio.wait_for(settling, 5.0)
    assert recovering.delivered() == set(numbers)
    writes = [step for step in recovering.steps if step.startswith("write")]
    assert writes.count(f"write {REPLAY_CHUNK}") == 6
    assert recovering.keys.most == store_recovery.REPLAYS_AHEAD


@pytest.mark.parametrize("place", [0, 3])
async def test_a_recovery_whose_write_fails_is_given_up(recovering: Recovering, place: int) -> None:
    """For any write: the first fails while the ledger is read, the last after that."""
    recovering.keys.server.flush()
    recovering.kafka.ledger[1] = [item(1, number, number) for number in range(1, 3 * REPLAY_RECORDS)]
    wrong: list[Exception | None] = [None] * 4
    wrong[place] = StoreUnanswered("no answer")

    async def enter(name: str) -> None:
        if name == "replay" and wrong and (error := wrong.pop(0)) is not None:
            raise error
        if name == "replay" and place == 0:
            await asyncio.sleep(60)

    recovering.keys.trouble.enter = enter  # type: ignore[method-assign]
    settling = asyncio.create_task(recovering.store.wait_until_settled())
    await until(lambda: "abandon" in recovering.steps)
    assert recovering.keys.writing == 0, "it writes on"
    assert recovering.keys.server.held is None
    assert not any(step.startswith("free") for step in recovering.steps)
    assert recovering.store.generation is None
    settling.cancel()
    await recovering.store.close()


async def test_a_recovery_renews_its_nonce_while_it_waits_for_a_fence(recovering: Recovering) -> None:
    recovering.keys.server.flush()
    recovering.kafka.fencing.clear()
    settling = asyncio.create_task(recovering.store.wait_until_settled())
    recovering.keys.trouble.before["renew"].extend(
        [StoreAway("OOM"), StoreUnanswered("no answer"), StoreLost("a flush")]
    )
    await until(lambda: len(recovering.keys.nonces) >= 5)
    recovering.kafka.fencing.set()
    await asyncio.wait_for(settling, 3.0)
    assert len(set(recovering.keys.nonces)) == 1
    renewed = len(recovering.keys.nonces)
    await asyncio.sleep(0.2)
    assert len(recovering.keys.nonces) == renewed, "it goes on after the recovery"


async def test_a_recovery_that_is_cut_off_lets_the_next_one_begin(recovering: Recovering) -> None:
    """A process that stops meanwhile: others need not wait until its nonce has expired."""
    recovering.keys.server.flush()
    recovering.kafka.fencing.clear()
    settling = asyncio.create_task(recovering.store.wait_until_settled())
    await until(lambda: any(step.startswith("fence") for step in recovering.steps))
    await recovering.store.close()
    assert recovering.steps[-1] == "abandon"
    assert recovering.keys.server.nonce is None
    settling.cancel()


# -------------------------------------------------------------------------------------------------- a quiet time


def another_answers(recovering: Recovering) -> None:
    recovering.keys.server.store = "run/third"


def control_names_a_third(recovering: Recovering) -> None:
    recovering.kafka.newest = StoreGeneration(9, "run/third")


def somebody_writes(recovering: Recovering) -> None:
    recovering.kafka.ends[2] = 8


@pytest.mark.parametrize("happens", [None, another_answers, control_names_a_third, somebody_writes])
async def test_another_store_is_recovered_only_after_a_quiet_lease_time(
    recovering: Recovering, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Recovering], None] | None
) -> None:
    """If control names another store, other processes may still use it."""
    recovering.kafka.newest = StoreGeneration(GENERATION.number, "run/named")
    recovering.keys.server.held = StoreGeneration(GENERATION.number, "run/named")
    paused: list[float] = []

    async def rest(identity: ServerIdentity, pause_s: float) -> None:
        paused.append(pause_s)
        await asyncio.sleep(60)

    monkeypatch.setattr(recovering.store, "_rest", rest)
    recovering.store._quiet_pause_s = 4.0
    started = time.monotonic()
    settling = asyncio.create_task(recovering.store.wait_until_settled())
    await until(lambda: recovering.store.state == "stale-store")
    await asyncio.sleep(0.02)  # of 0.06
    if happens is None:
        assert await asyncio.wait_for(settling, 3.0) == StoreGeneration(2, GENERATION.store)
        assert time.monotonic() - started > 0.06
        assert recovering.keys.resolved == 1, "the address may lead to another by now"
        assert recovering.store._quiet_pause_s == store_recovery.PAUSE_LEAST_S
        return
    happens(recovering)
    await until(lambda: bool(paused))
    assert 2.0 <= paused[0] <= 4.0
    assert recovering.store._quiet_pause_s == 8.0
    assert not any(step.startswith(("name", "fence")) for step in recovering.steps)
    settling.cancel()
    await recovering.store.close()
