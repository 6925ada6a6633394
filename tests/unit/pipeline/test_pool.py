"""Tests the slots of a process: the ends of their terms, pending marks, doubts, and the stop."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from service.claims.states import SlotEvent, SlotState
from service.contract.wire.ids import event_id
from service.core.problems import KafkaAway, StoreLost, StoreUnanswered
from service.http.routes import describe
from service.kafka.outcomes import TransactionFailed, TransactionOutcome
from service.pipeline.request import Committed
from service.slots.slot import LedgerPosition, Slot
from tests.unit.fakes import GENERATION, NOW_MS, FakeProducer, World, make_event, steps, until
from tests.unit.pipeline.held_slots import LATER, ROWS, Hold, for_ever
from tests.unit.scrape import sample


async def test_a_cancellation_from_within_ends_a_term_and_not_the_slot(hold: Hold) -> None:
    ends: list[BaseException] = [asyncio.CancelledError()]

    async def serve(_: Slot) -> None:
        if ends:
            raise ends.pop()
        await asyncio.sleep(60)

    held = hold(serve, lease_ttl_ms=30_000)
    slot = await held.ready()
    await until(lambda: len(held.recovery.runs) == 2)
    assert list(held.pool.slots.values()) == [slot]


async def test_a_slot_task_that_fails_is_counted(hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold(slots_max=1)
    slot = await held.ready()
    monkeypatch.setattr(held.pool, "_give_back", AsyncMock(side_effect=KeyError("a bug")))
    await held.cut_off(slot)
    await until(lambda: sample(held.world.telemetry, "fencepost_task_failures_total", task="slot") >= 1)


# -------------------------------------------------------------------------------------------------------- pending marks


async def test_a_slot_with_a_pending_mark_is_not_given_back_as_clean(hold: Hold) -> None:
    held = hold()
    slot = await held.ready()
    held.world.keys.trouble.before["mark"].extend(StoreUnanswered("no answer") for _ in range(1_000))
    with pytest.raises(StoreUnanswered):
        await slot.mark(slot.without_ledger_record(), ROWS)
    await held.keeper.stop()
    assert held.world.keys.returned == [(slot.n, False)]


async def test_a_slot_that_is_cut_off_in_a_claim_is_not_given_back_as_clean(hold: Hold) -> None:
    """The claim may stand, and a transaction be open: a process must recover the slot."""
    held = hold(slots=1, slots_max=2)
    slot = await held.ready()
    gate = held.world.keys.trouble.hold("claim")
    waiting = held.world.submit("a")
    await held.world.keys.trouble.reached["claim"].wait()
    await held.cut_off(slot)
    assert held.world.keys.returned == [(slot.n, False)]
    assert [request.claimants for request in held.world.writer.unwritten.parked] == [((slot.n, slot.term),)]
    gate.set()
    waiting.cancel()


async def test_a_heartbeat_flushes_the_pending_marks_of_its_slots(hold: Hold) -> None:
    held = hold()
    slot = await held.ready()
    held.world.keys.trouble.before["mark"].append(StoreUnanswered("no answer"))
    with pytest.raises(StoreUnanswered):
        await slot.mark(slot.without_ledger_record(), ROWS)
    await until(lambda: not slot.has_pending_marks)
    assert ROWS[0][0] in held.world.keys.server.keys


async def test_a_flush_that_finds_another_store_has_the_store_made_complete(hold: Hold) -> None:
    held = hold()
    slot = await held.ready()
    held.world.keys.trouble.before["mark"] += [StoreUnanswered("no answer"), StoreLost("another store answers")]
    with pytest.raises(StoreUnanswered):
        await slot.mark(slot.without_ledger_record(), ROWS)
    await until(lambda: held.world.store.losses == [GENERATION])


async def test_a_pending_mark_of_an_earlier_generation_does_not_lose_the_present_store(hold: Hold) -> None:
    held = hold(for_ever)
    slot = await held.ready()
    held.world.keys.trouble.before["mark"].append(StoreUnanswered("no answer"))
    with pytest.raises(StoreUnanswered):
        await slot.mark(LedgerPosition(GENERATION, slot.term, slot.term, slot.term + 3), ROWS)
    held.world.keys.server.held = held.world.store.generation = LATER
    await held.more_beats()
    assert slot.has_pending_marks
    assert LATER not in held.world.store.losses


async def test_a_recovery_drops_the_pending_marks_that_the_ledger_replays_and_keeps_the_others() -> None:
    world = World()
    slot = await world.slot()
    with_record = LedgerPosition(GENERATION, slot.term, slot.term, slot.term + 3)
    for position in (with_record, slot.without_ledger_record()):
        world.keys.trouble.before["mark"].append(StoreUnanswered("no answer"))
        with pytest.raises(StoreUnanswered):
            await slot.mark(position, ROWS)
    world.keys.marks.clear()
    term = slot.term
    await world.recover(slot)
    await slot.flush_marks()
    assert [(position.term, position.offset) for position, _ in world.keys.marks] == [(term, -2)]


async def test_a_pending_mark_is_dropped_with_its_generation() -> None:
    world = World()
    slot = await world.slot()
    world.keys.trouble.before["mark"].append(StoreUnanswered("no answer"))
    with pytest.raises(StoreUnanswered):
        await slot.mark(slot.without_ledger_record(), ROWS)
    world.keys.server.held = LATER
    await world.recover(slot, LATER)
    assert not slot.has_pending_marks


async def test_a_mark_that_waited_for_another_is_not_pending_in_the_next_generation() -> None:
    """It would be refused for ever, and report each time that the present store was lost."""
    world = World()
    slot = await world.slot()
    gate = world.keys.trouble.hold("mark")
    first = asyncio.create_task(slot.mark(slot.without_ledger_record(), ROWS))
    await world.keys.trouble.reached["mark"].wait()
    second = asyncio.create_task(slot.mark(LedgerPosition(GENERATION, slot.term, slot.term, slot.term + 3), ROWS))
    await asyncio.sleep(0)
    world.keys.server.held = LATER
    await world.recover(slot, LATER)
    gate.set()
    for mark in (first, second):
        with pytest.raises(StoreLost):
            await mark
    assert not slot.has_pending_marks


async def test_a_mark_of_an_ended_term_does_not_move_applied_in_the_next_term() -> None:
    """Redis moves `applied` only from one record to the next: after a gap, the heartbeat would find an older copy."""
    world = World()
    slot = await world.slot()
    gate = world.keys.trouble.hold("mark")
    world.keys.trouble.before["mark"].append(StoreUnanswered("no answer"))
    records = [LedgerPosition(GENERATION, slot.term, slot.term + n, slot.term + n + 3) for n in (0, 3)]
    first, second = [asyncio.create_task(slot.mark(position, ROWS)) for position in records]
    await world.keys.trouble.reached["mark"].wait()
    for event in (SlotEvent.FAIL, SlotEvent.RECOVER):
        slot.move(event)
    slot.enter(GENERATION, FakeProducer())
    gate.set()
    with pytest.raises(StoreUnanswered):
        await first
    await second
    assert not slot.has_pending_marks
    assert ROWS[0][0] in world.keys.server.keys
    await world.keys.heartbeat(GENERATION, "token", 2, {slot.n: slot.applied})


async def test_a_mark_in_flight_at_the_end_of_its_term_does_not_move_applied_in_the_next_term() -> None:
    """The ledger's partition may have been created again: then the old offset is past all new ones."""
    world = World()
    slot = await world.slot()
    gate = world.keys.trouble.hold("mark")
    marking = asyncio.create_task(slot.mark(LedgerPosition(GENERATION, slot.term, slot.term, slot.term + 999), ROWS))
    await world.keys.trouble.reached["mark"].wait()
    await world.recover(slot)
    before = slot.applied
    gate.set()
    await marking
    assert slot.applied == before


# ---------------------------------------------------------------------------------------------------- ends of terms


async def test_a_slot_is_recovered_after_each_end_of_a_term(hold: Hold) -> None:
    ends: list[Exception] = [StoreLost("another store"), StoreUnanswered("no answer"), RuntimeError("a bug")]

    async def serve(_: Slot) -> None:
        if ends:
            raise ends.pop(0)
        await asyncio.sleep(60)

    held = hold(serve)
    await until(lambda: len(held.recovery.runs) == 4)
    await until(lambda: held.pool.ready == 1)
    assert held.world.store.losses == [GENERATION]


async def test_a_pool_says_why_no_slot_can_be_recovered(hold: Hold) -> None:
    """As where the brokers' transaction.max.timeout.ms was lowered: Kafka and Redis answer, and nothing is written."""
    held = hold(for_ever, slots=1, slots_max=1)
    held.recovery.trouble.before["run"].append(KafkaAway("the timeout is too long: set a smaller one"))
    await until(lambda: held.pool.trouble == "the timeout is too long: set a smaller one")
    await held.ready()
    assert held.pool.trouble == ""


# ------------------------------------------------------------------------------------------------ the state of a key


async def test_a_key_is_in_doubt_until_its_slot_has_been_recovered(hold: Hold) -> None:
    held = hold(request_timeout_ms=5_000)
    world = held.world
    slot = await held.ready()

    async def state_of(key: str) -> object:
        found = await world.keys.find(GENERATION, event_id(key))
        return describe(event_id(key), found, held.pool.doubts)["state"]

    assert isinstance(slot.producer, FakeProducer)
    commit = slot.producer.trouble.hold("write")
    slot.producer.trouble.before["write"].append(TransactionFailed(TransactionOutcome.UNKNOWN, "no answer to EndTxn"))
    recovery = held.recovery.trouble.hold("run")
    asked = world.submit("mine")
    await slot.producer.trouble.reached["write"].wait()
    assert await state_of("mine") == "in_progress"  # a clean result may still come
    commit.set()
    await until(lambda: slot.state is SlotState.LEASED)
    assert await state_of("mine") == "in_doubt"

    other = await world.slot(1 - slot.n)  # another process's
    world.keys.server.leases[other.n] = ("another", NOW_MS + 60_000)
    theirs = make_event("theirs")
    await other.claim([(theirs.id, theirs.fp)])
    assert await state_of("theirs") == "in_progress"
    assert not held.pool.doubts(slot.n, slot.term + 1), "who has taken the slot since may be writing"

    recovery.set()
    await until(lambda: slot.state is SlotState.READY)
    world.writer.unwritten.recovered()
    assert isinstance(await asked, Committed)
    assert await state_of("mine") == "committed"
    assert not held.pool.doubts(slot.n, slot.term)


# --------------------------------------------------------------------------------------------------------- the stop


async def test_no_heartbeat_takes_a_lease_again_that_a_stop_has_returned(hold: Hold) -> None:
    """Redis may run a heartbeat that is under way behind the return of the slots that the heartbeat names."""
    held = hold(lease_ttl_ms=30_000, request_timeout_ms=5_000)
    slot = await held.ready()
    trouble = held.world.keys.trouble
    gate = trouble.hold("heartbeat")
    trouble.reached["heartbeat"].clear()
    held.world.heartbeat_now.set()
    await trouble.reached["heartbeat"].wait()
    stopping = asyncio.create_task(held.keeper.stop())
    await steps()
    gate.set()
    await asyncio.gather(stopping, held.keeping)
    assert held.world.keys.returned == [(slot.n, True)]
    assert not held.world.keys.server.leases
    assert not held.world.keys.server.members


async def test_a_stop_ends_although_a_slot_waits_for_a_store(hold: Hold) -> None:
    ends = asyncio.Event()

    async def serve(_: Slot) -> None:
        await ends.wait()
        raise StoreLost("another store")

    held = hold(serve)
    slot = await held.ready()
    held.world.store.generation = None
    ends.set()
    await until(lambda: held.world.store.waiting == 2)  # the slot, and the heartbeat
    assert slot.state is SlotState.DOUBT
    async with asyncio.timeout(3.0):
        await held.keeper.stop()
    assert held.pool.slots == {}


async def test_a_stop_does_not_wait_for_slots_that_cannot_write(hold: Hold) -> None:
    """While Kafka or Redis is away, their recoveries would hold up the process for all of its timeouts."""
    held = hold(request_timeout_ms=30_000, transaction_timeout_ms=30_000)
    held.recovery.trouble.hold("run")
    await held.recovery.trouble.reached["run"].wait()
    (slot,) = held.pool.slots.values()
    async with asyncio.timeout(3.0):
        await held.keeper.stop()
    assert held.world.keys.returned == [(slot.n, False)], "another process is to recover it"


async def test_a_stop_ends_although_a_transaction_hangs(hold: Hold) -> None:
    async def serve(slot: Slot) -> None:
        slot.move(SlotEvent.WRITE)
        await asyncio.sleep(60)

    held = hold(serve)
    slot = await held.ready()
    producer = slot.producer
    async with asyncio.timeout(3.0):
        await held.keeper.stop()
    assert held.world.keys.returned == [(slot.n, False)], "another process is to recover it"
    assert isinstance(producer, FakeProducer)
    assert producer.closed
