"""Tests the steps of the recovery of a slot in order: fence, end what hangs, begin, check, replay, free."""

import asyncio
from typing import Any

import pytest

from service.claims.keys import StoreGeneration
from service.claims.states import SlotState
from service.contract.wire import NewerVersion
from service.core.problems import Fenced, KafkaAway, StoreLost
from service.kafka.reader import Item, Span
from service.slots import recovery
from tests.unit.fakes import GENERATION, ended, until
from tests.unit.slots.bed import Bed, item


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


async def test_a_ledger_that_has_lost_records_gets_none_by_attempts_to_recover_its_slot(bed: Bed) -> None:
    """After some begin records it would be past its applied offset, and its claims would be freed."""
    bed.keys.server.applied = {1: 13}
    bed.kafka.ends = {1: 10}
    with pytest.raises(KafkaAway, match="applied it up to 13, and it ends at 10: it was created again, or has lost"):
        await bed.recover(bed.slot())
    assert "begin" not in bed.steps
    bed.kafka.silent = {1}
    with pytest.raises(KafkaAway, match="its leader does not tell where it ends"):
        await bed.recover(bed.slot())
    assert "begin" not in bed.steps


async def test_a_ledger_that_has_lost_records_gets_none_by_attempts_to_recover_the_store(bed: Bed) -> None:
    bed.keys.server.flush()
    bed.keys.server.applied = {0: 1, 1: 13}  # an older copy of Redis, which knows how far it was
    bed.kafka.ends = {1: 10}
    settling = asyncio.create_task(bed.store.wait_until_settled())
    await until(lambda: "partition 1: Redis has applied it up to 13, and it ends at 10" in bed.store.status)
    await ended(settling)
    assert "read through" not in bed.steps
    assert bed.keys.server.held is None
    await bed.store.close()


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
