"""Tests the steps of the recovery of a slot in order: fence, end what hangs, begin, check, replay, free."""

import asyncio
from typing import Any

import pytest

from service.claims.keys import StoreGeneration
from service.claims.states import SlotState
from service.contract.wire.versions import NewerVersion
from service.core.problems import Fenced, KafkaAway, StoreLost
from service.kafka.reader import Item, Span
from service.slots import recovery
from tests.unit.fakes import GENERATION, ended, until
from tests.unit.slots.recovering import Recovering, item


async def test_a_slot_is_fenced_begun_checked_replayed_and_freed(
    recovering: Recovering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "REPLAY_CHUNK", 2)
    slot = recovering.slot()
    recovering.kafka.ledger[1] = [item(1, 4, 99), item(1, 5, 1, 2, 3), item(1, 8, 4, 5), item(1, 12), item(1, 13, 98)]
    await recovering.recover(slot)
    assert (slot.state, slot.term, slot.generation) == (SlotState.READY, 12, GENERATION)
    assert recovering.steps == [
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
    assert recovering.kafka.spans == {1: Span(5, 12)}
    assert recovering.delivered() == {1, 2, 3, 4, 5}
    assert recovering.keys.server.freed == recovering.keys.server.applied == {0: 1, 1: 12}


@pytest.mark.parametrize(
    "newest",
    [None, StoreGeneration(GENERATION.number + 1, GENERATION.store), StoreGeneration(GENERATION.number, "other/1")],
)
async def test_a_slot_is_not_freed_while_control_names_another_store(
    recovering: Recovering, newest: StoreGeneration | None
) -> None:
    slot = recovering.slot()
    monkey: Any = recovering.kafka
    monkey.newest = newest
    with pytest.raises(StoreLost):
        await recovering.recover(slot)
    assert slot.state is SlotState.DOUBT
    assert recovering.producers[0].closed
    await slot.close_producers()  # as its pool does, which does not know how far it came
    assert recovering.steps[-1] == "check 1"
    assert recovering.keys.server.freed == {0: 1, 1: 5}


@pytest.mark.parametrize(("applied", "begins"), [(None, True), (11, True), (12, True), (13, False)])
async def test_a_ledger_that_ends_before_its_applied_offset_frees_no_slot(
    recovering: Recovering, applied: int | None, begins: bool
) -> None:
    """Records that were written since would not be read."""
    recovering.keys.server.applied = {} if applied is None else {1: applied}
    slot = recovering.slot()
    if begins:
        await recovering.recover(slot)
        assert (slot.state, recovering.kafka.spans) == (SlotState.READY, {1: Span(applied, 12)})
        return
    with pytest.raises(KafkaAway, match="applied it up to 13, and it ends at 12"):
        await recovering.recover(slot)
    assert (slot.state, recovering.keys.server.freed[1]) == (SlotState.DOUBT, 5)


async def test_a_ledger_that_has_lost_records_gets_none_by_attempts_to_recover_its_slot(recovering: Recovering) -> None:
    """After some begin records it would be past its applied offset, and its claims would be freed."""
    recovering.keys.server.applied = {1: 13}
    recovering.kafka.ends = {1: 10}
    with pytest.raises(KafkaAway, match="applied it up to 13, and it ends at 10: it was created again, or has lost"):
        await recovering.recover(recovering.slot())
    assert "begin" not in recovering.steps
    recovering.kafka.silent = {1}
    with pytest.raises(KafkaAway, match="its leader does not tell where it ends"):
        await recovering.recover(recovering.slot())
    assert "begin" not in recovering.steps


async def test_a_ledger_that_has_lost_records_gets_none_by_attempts_to_recover_the_store(
    recovering: Recovering,
) -> None:
    recovering.keys.server.flush()
    recovering.keys.server.applied = {0: 1, 1: 13}  # an older copy of Redis, which knows how far it was
    recovering.kafka.ends = {1: 10}
    settling = asyncio.create_task(recovering.store.wait_until_settled())
    await until(lambda: "partition 1: Redis has applied it up to 13, and it ends at 10" in recovering.store.status)
    await ended(settling)
    assert "read through" not in recovering.steps
    assert recovering.keys.server.held is None
    await recovering.store.close()


async def test_neither_slot_nor_store_is_freed_past_a_record_of_a_later_version(recovering: Recovering) -> None:
    newer = Item(1, 9, None, b'{"v":3}')
    recovering.kafka.ledger[1] = [item(1, 8, 1), newer, item(1, 12)]
    slot = recovering.slot()
    with pytest.raises(NewerVersion, match="the ledger of slot 1 has, at offset 9, a record of version 3"):
        await recovering.recover(slot)
    assert (slot.state, recovering.producers[0].closed, recovering.keys.server.freed[1]) == (SlotState.DOUBT, True, 5)

    recovering.keys.server.flush()
    settling = asyncio.create_task(recovering.store.wait_until_settled())
    # Until the next attempt begins, after a short pause.
    await until(
        lambda: (
            recovering.store.newer is not None and recovering.store.status == f"store-away: {recovering.store.newer}"
        )
    )
    await ended(settling)
    assert recovering.keys.server.held is None
    await recovering.store.close()


async def test_a_slot_that_another_has_had_since_is_not_ready(recovering: Recovering) -> None:
    recovering.keys.server.freed[1] = 13
    slot = recovering.slot()
    with pytest.raises(Fenced):
        await recovering.recover(slot)
    assert (slot.state, recovering.producers[0].closed) == (SlotState.DOUBT, True)


async def test_a_recovery_that_is_cut_off_leaves_the_slot_in_doubt(recovering: Recovering) -> None:
    slot = recovering.slot()
    held = asyncio.Event()

    async def silence(slot: int = 0) -> StoreGeneration | None:
        held.set()
        await asyncio.sleep(60)
        return None

    recovering.kafka.newest_generation = silence  # type: ignore[method-assign]
    running = asyncio.create_task(recovering.recover(slot))
    await held.wait()
    await ended(running)
    assert (slot.state, recovering.producers[0].closed) == (SlotState.DOUBT, True)
