"""Tests which slots a process holds: its heartbeats, what they find, and the share of each process."""

import asyncio
import time
from copy import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from service.claims.keys import Heartbeat, StoreGeneration
from service.claims.states import Claimed, SlotState
from service.contract.wire.ids import event_id
from service.core.problems import IN_PROGRESS, StoreAway, StoreLost, StoreUnanswered
from service.kafka.outcomes import TransactionFailed, TransactionOutcome
from service.pipeline import lease_keeper as module
from service.pipeline.request import Committed
from service.pipeline.slot_balance import REPLACED_LEAST
from service.slots.slot import Slot
from tests.unit.fakes import GENERATION, NOW_MS, kind_of, make_event, until
from tests.unit.pipeline.held_slots import LATER, ROWS, Hold, for_ever


async def test_a_pool_without_a_slot_sends_heartbeats_more_often(hold: Hold) -> None:
    """Slots of a killed process become free between two heartbeats, and until then nothing can be written."""
    held = hold(lease_ttl_ms=3_000)
    held.world.keys.marks_of_slots = "tt"
    await until(lambda: held.heartbeats > 2, 2.0)
    held.world.keys.marks_of_slots = ""
    await held.ready()
    seen = held.heartbeats
    await asyncio.sleep(0.5)
    assert held.heartbeats <= seen + 1


async def test_an_unforeseen_error_does_not_end_the_heartbeat(hold: Hold) -> None:
    held = hold()
    await held.ready()
    held.world.keys.trouble.before["heartbeat"].extend([KeyError(0), ValueError("a bug")])
    await held.more_beats()
    assert not held.keeping.done()


async def test_a_wakeup_during_a_heartbeat_starts_another_heartbeat_at_once(hold: Hold) -> None:
    held = hold(for_ever, lease_ttl_ms=30_000, request_timeout_ms=5_000)
    trouble = held.world.keys.trouble
    await held.ready()
    gate = trouble.hold("heartbeat")
    trouble.reached["heartbeat"].clear()
    held.world.heartbeat_now.set()
    await trouble.reached["heartbeat"].wait()
    seen = held.heartbeats
    held.world.heartbeat_now.set()
    gate.set()
    await until(lambda: held.heartbeats == seen + 2)


async def test_a_heartbeat_without_an_answer_is_given_up_and_repeated_within_the_lease(hold: Hold) -> None:
    held = hold(for_ever, lease_ttl_ms=1_000)
    await held.ready()
    trouble = held.world.keys.trouble
    gate = trouble.hold("heartbeat")
    for _ in range(3):
        trouble.reached["heartbeat"].clear()
        await asyncio.wait_for(trouble.reached["heartbeat"].wait(), 10)
    gate.set()
    await held.more_beats()


async def test_a_slot_that_ends_during_a_heartbeat_does_not_end_the_heartbeat_task(hold: Hold) -> None:
    ends = asyncio.Event()

    async def serve(slot: Slot) -> None:
        await ends.wait()
        slot.draining = True

    held = hold(serve)
    slot = await held.ready()
    gate = held.world.keys.trouble.hold("heartbeat")
    held.world.keys.trouble.reached["heartbeat"].clear()
    await held.world.keys.trouble.reached["heartbeat"].wait()
    ends.set()
    await until(lambda: slot.n not in held.pool.slots)
    held.world.keys.server.leases[slot.n] = ("another", NOW_MS + 60_000)
    gate.set()
    await held.more_beats()
    assert not held.keeping.done()


async def test_a_store_that_is_lost_while_slots_are_taken_does_not_end_the_heartbeat(hold: Hold) -> None:
    held = hold(for_ever, slots=2, lease_ttl_ms=3_000)  # time for both takes in one heartbeat
    keys, store = held.world.keys, held.world.store
    gate = keys.trouble.hold("take")
    await keys.trouble.reached["take"].wait()
    store.generation = None
    gate.set()
    await until(lambda: len(held.pool.slots) == 2)
    assert not held.keeping.done()
    store.generation = GENERATION
    await until(lambda: held.pool.ready == 2)


async def test_a_heartbeat_in_another_store_reports_the_generation_that_was_lost(hold: Hold) -> None:
    """Not the generation that is present by then."""
    held = hold(for_ever)
    await held.ready()
    gate = held.world.keys.trouble.hold("heartbeat")
    held.world.keys.trouble.reached["heartbeat"].clear()
    await held.world.keys.trouble.reached["heartbeat"].wait()
    held.world.keys.server.held = held.world.store.generation = LATER
    gate.set()
    await held.more_beats()
    assert held.world.store.losses == [GENERATION]


async def test_pending_marks_do_not_delay_the_next_heartbeat(hold: Hold) -> None:
    held = hold()
    slot = await held.ready()
    held.world.keys.trouble.before["mark"].append(StoreUnanswered("no answer"))
    with pytest.raises(StoreUnanswered):
        await slot.mark(slot.without_ledger_record(), ROWS)
    held.world.keys.trouble.reached["mark"].clear()
    gate = held.world.keys.trouble.hold("mark")
    await held.world.keys.trouble.reached["mark"].wait()  # the heartbeat's try, which Redis does not answer
    await held.more_beats()
    gate.set()
    await until(lambda: not slot.has_pending_marks)


async def test_slow_takes_do_not_delay_the_next_heartbeat(hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    passed_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    monkeypatch.setattr(module, "time", clock)
    held = hold(for_ever, slots=1, slots_max=4)
    await held.ready()
    take, heartbeat = held.world.keys.take, held.world.keys.heartbeat

    async def slow_take(generation: StoreGeneration, slot: int, token: str) -> bool:
        nonlocal passed_s
        calls.append("take")
        passed_s += held.world.settings.lease_ttl_ms / 1000 / 2
        return await take(generation, slot, token)

    async def seen_heartbeat(*of: Any) -> Heartbeat:
        calls.append("heartbeat")
        return await heartbeat(*of)

    monkeypatch.setattr(held.world.keys, "take", slow_take)
    monkeypatch.setattr(held.world.keys, "heartbeat", seen_heartbeat)
    held.world.keys.server.taken |= {0, 1, 2, 3}  # all but one are dead
    await until(lambda: calls.count("take") == 3)
    assert ("take", "take") not in pairwise(calls)


# ----------------------------------------------------------------------------------------- slots that must be recovered


async def test_an_idle_slot_of_an_earlier_generation_is_recovered_at_the_next_heartbeat(hold: Hold) -> None:
    """Not when its next group meets the fence."""
    held = hold()
    slot = await held.ready()
    held.world.keys.server.held = held.world.store.generation = LATER
    await until(lambda: slot.generation == LATER and slot.state is SlotState.READY)
    assert held.recovery.runs == [(slot.n, GENERATION), (slot.n, LATER)]
    assert LATER not in held.world.store.losses
    assert not slot.superseded


async def test_an_idle_slot_that_lost_a_connection_is_recovered_at_the_next_heartbeat(hold: Hold) -> None:
    """A transaction of it may hang, which blocks readers, and a write may never come."""
    held = hold()
    slot = await held.ready()
    held.world.producers[slot.n].cut_off = True
    await until(lambda: len(held.recovery.runs) == 2 and slot.state is SlotState.READY)
    assert not slot.cut_off


async def test_an_idle_slot_whose_term_has_passed_is_recovered_at_the_next_heartbeat(hold: Hold) -> None:
    """Another process had the slot meanwhile, and other requests may wait for events in its ledger."""
    held = hold()
    slot = await held.ready()
    held.world.keys.server.freed[slot.n] = slot.term + 5
    await until(lambda: len(held.recovery.runs) >= 2)
    assert held.recovery.runs[:2] == [(slot.n, GENERATION), (slot.n, GENERATION)]
    assert GENERATION not in held.world.store.losses


async def test_a_held_slot_is_recovered_when_that_is_asked_for(hold: Hold) -> None:
    """Although it waits for events, and nothing of it has failed."""
    held = hold()
    slot = await held.ready()
    held.keeper.recover(slot.n, [("orders", 1)])
    await until(lambda: len(held.recovery.runs) == 2 and held.pool.ready == 1)
    assert held.pool.slots[slot.n] is slot
    assert not slot.superseded


async def test_partitions_to_recover_are_kept_while_the_store_does_not_let_the_slot_be_taken(hold: Hold) -> None:
    held = hold(slots=1, slots_max=4, lease_ttl_ms=600)
    slot = await held.ready()
    idle = next(n for n in range(4) if n != slot.n)
    held.world.keys.trouble.before["take"].append(StoreAway("no answer"))
    held.keeper.recover(idle, [("orders", 1)])
    await until(lambda: idle in {n for n, _ in held.recovery.runs})
    assert not held.world.keys.trouble.before["take"]
    assert held.pool.slots[idle].maybe_hanging == {("orders", 1)}


async def test_an_unheld_slot_is_taken_when_its_recovery_is_asked_for(hold: Hold) -> None:
    """Although this process has as many as it wants. A slot that another process holds is not taken."""
    held = hold(slots=1, slots_max=4, lease_ttl_ms=600)  # between two heartbeats a busy machine takes less
    slot = await held.ready()
    idle, others = [n for n in range(4) if n != slot.n][:2]
    held.world.keys.server.leases[others] = ("another", NOW_MS + 10**9)
    held.keeper.recover(idle, [("orders", 1)])
    held.keeper.recover(others, [("orders", 1)])
    await until(lambda: idle in {n for n, _ in held.recovery.runs})
    await held.more_beats()
    assert others not in {n for n, _ in held.recovery.runs}
    assert held.world.keys.server.leases[others][0] == "another"


# ------------------------------------------------------------------------------------------------- which slots are held


async def test_a_process_takes_its_slots_and_gives_them_back(hold: Hold) -> None:
    held = hold(slots=2, slots_max=3)
    await until(lambda: held.pool.ready == 2)
    await held.keeper.stop()
    assert sorted(clean for _, clean in held.world.keys.returned) == [True, True]
    assert held.pool.slots == {}
    assert not held.world.keys.server.members


async def test_workers_that_a_server_forks_after_it_has_made_the_app_have_different_tokens(hold: Hold) -> None:
    """With one name for all, each would take the slots of the others for its own, and they would fence each other."""
    held = hold(slots=2, slots_max=4)
    worker, made = copy(held.leases), held.leases  # a fork, before the pool has run
    assert worker.token != made.token
    assert made.token == held.leases.token  # it stays the same


async def test_a_dead_slot_of_a_process_with_more_slots_is_rescued(hold: Hold) -> None:
    """In a rolling restart that raises SLOTS_MAX and stops half-way: its claims would stay in progress."""
    held = hold(slots=1, slots_max=2)
    await held.ready()
    server = held.world.keys.server
    server.freed[5] = 50
    server.keys[event_id("a")] = Claimed(5, 50, NOW_MS, make_event("a").fp)
    answer = held.world.submit("a")
    assert kind_of(await answer) is IN_PROGRESS
    server.taken |= {5}  # only now: the next heartbeat recovers it
    await until(lambda: 5 in [n for n, _ in held.recovery.runs])
    assert isinstance(await held.world.submit("a"), Committed)


async def test_a_stuck_slot_is_replaced_by_another_slot_until_it_recovers(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka ends no transaction with a partition that accepts no markers, and until then the slot begins none."""
    held = hold(slots=1, slots_max=8)
    stuck = await held.ready()
    gate = held.recovery.trouble.hold("run")
    held.world.producers[stuck.n].trouble.before["write"].append(
        TransactionFailed(TransactionOutcome.UNKNOWN, "no answer")
    )
    waiting = held.world.submit("a")
    await until(lambda: stuck.state is SlotState.DOUBT or stuck.state is SlotState.LEASED)
    await held.more_beats()
    assert list(held.pool.slots) == [stuck.n]
    monkeypatch.setattr(module, "STUCK_SHARE", 0.0)
    await until(lambda: len(held.pool.slots) == 1 + REPLACED_LEAST)
    await held.more_beats()
    assert len(held.pool.slots) == 1 + REPLACED_LEAST, "so many are replaced, however many are stuck"
    # It is well again: one slot is too many.
    monkeypatch.setattr(module, "STUCK_SHARE", 1_000.0)
    gate.set()
    await until(lambda: len(held.pool.slots) == 1 and held.pool.ready == 1)
    assert [clean for _, clean in held.world.keys.returned] == [True] * REPLACED_LEAST
    waiting.cancel()


async def test_a_new_process_gets_a_slot_although_other_processes_have_replaced_stuck_slots(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process gives away the last slot that can write."""
    broken: set[int] = set()
    mended = asyncio.Event()

    async def serve(slot: Slot) -> None:
        while not slot.draining:
            if slot.n in broken:
                raise TransactionFailed(TransactionOutcome.UNKNOWN, "no answer")
            await asyncio.sleep(0.002)

    old = hold(serve, slots=4, slots_max=4, lease_ttl_ms=90, request_timeout_ms=100)
    await until(lambda: old.pool.ready == 4)
    run = old.recovery.run

    async def recover(slot: Slot, generation: StoreGeneration) -> None:
        if slot.n in broken:
            await mended.wait()
        await run(slot, generation)

    monkeypatch.setattr(old.recovery, "run", recover)
    broken |= set(list(old.pool.slots)[:2])
    monkeypatch.setattr(module, "STUCK_SHARE", 0.5)
    await until(lambda: old.pool.ready == 2)
    await asyncio.sleep(0.1)
    new = hold(serve, slots=4, slots_max=4, lease_ttl_ms=90, request_timeout_ms=100)
    new.world.keys.server = old.world.keys.server
    await until(lambda: (old.pool.ready, new.pool.ready) == (1, 1))
    await asyncio.sleep(0.2)
    assert (old.pool.ready, new.pool.ready) == (1, 1)
    broken.clear()
    mended.set()
    await until(lambda: (old.pool.ready, new.pool.ready) == (2, 2))


@pytest.mark.parametrize("flushed", [False, True])
async def test_the_first_process_to_return_to_the_store_leaves_the_others_their_slots(
    hold: Hold, monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    """All leases have expired, or were lost with the store, and each process takes its own slots again."""
    monkeypatch.setattr(module, "STUCK_SHARE", 0.5)
    lost = False

    async def serve(slot: Slot) -> None:
        while not slot.draining:
            if lost and slot.generation == GENERATION:
                raise StoreLost("flushed")
            await asyncio.sleep(0.002)

    pools = [hold(serve, slots=2, slots_max=8, lease_ttl_ms=300, request_timeout_ms=400) for _ in range(4)]
    server = pools[0].world.keys.server
    for held in pools[1:]:
        held.world.keys.server = server
    await until(lambda: all(held.pool.ready == 2 for held in pools))
    before = [sorted(held.pool.slots) for held in pools]
    for held in pools:
        held.world.store.generation = None
    if flushed:
        lost = True
        server.flush()
    await asyncio.sleep(0.5)
    server.clock.pass_ms(4_000)
    if flushed:
        server.freed, server.held = dict.fromkeys(range(8), 0), LATER
    for held in pools:
        held.world.store.generation = LATER if flushed else GENERATION
        await asyncio.sleep(0.05)
    await until(lambda: all(held.pool.ready == 2 for held in pools))
    assert [sorted(held.pool.slots) for held in pools] == before
    assert not any(held.world.keys.returned for held in pools)


async def test_a_slot_whose_lease_is_lost_is_let_go(hold: Hold) -> None:
    held = hold(slots_max=1)
    slot = await held.ready()
    held.world.keys.server.leases[slot.n] = ("another", NOW_MS + 60_000)
    await until(lambda: not held.pool.slots)
    assert held.world.keys.server.leases[slot.n][0] == "another"


async def test_no_slot_is_taken_while_the_process_stops(hold: Hold) -> None:
    held = hold(slots=2)
    gate = held.world.keys.trouble.hold("take")
    await held.world.keys.trouble.reached["take"].wait()
    stopping = asyncio.create_task(held.keeper.stop())
    await asyncio.sleep(0.01)
    gate.set()
    await stopping
    await asyncio.sleep(0.05)
    assert held.pool.slots == {}
    assert not held.world.keys.server.leases
