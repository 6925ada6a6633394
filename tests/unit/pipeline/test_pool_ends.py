"""Tests slots whose term has ended: their holder, the pause before the next recovery, and the metric."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from service.claims.keys import StoreGeneration
from service.claims.states import SlotEvent, SlotState
from service.contract.wire.versions import NewerVersion
from service.core.problems import (
    Fenced,
    KafkaAway,
    KafkaRefusesSetting,
    StoreAway,
    StoreBug,
    StoreLost,
    StoreUnanswered,
)
from service.kafka.outcomes import TransactionFailed, TransactionOutcome
from service.pipeline import pool as module
from service.slots.slot import Slot
from tests.unit.fakes import NOW_MS, until
from tests.unit.pipeline.held_slots import Held, for_ever
from tests.unit.scrape import sample


@contextlib.asynccontextmanager
async def holding(serve: Callable[[Slot], Awaitable[None]] | None = None, **settings: int) -> AsyncIterator[Held]:
    """Make a pool whose requests have much time, so that no slot counts as stuck."""
    held = Held(serve, **({"request_timeout_ms": 20_000} | settings))
    try:
        yield held
    finally:
        await held.end()


def failed_by(error: Exception) -> TransactionFailed:
    failed = TransactionFailed(TransactionOutcome.ABORTED, repr(error))
    failed.__cause__ = error
    return failed


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (TransactionFailed(TransactionOutcome.UNKNOWN, "no answer"), "transaction"),
        (StoreUnanswered("no answer"), "store-unanswered"),
        (StoreLost("another"), "store-lost"),
        (StoreAway("OOM"), "store-away"),
        (KafkaAway("no leader"), "kafka-away"),
        (KafkaRefusesSetting("set a smaller one"), "kafka-away"),
        (Fenced("another"), "fenced"),
        (NewerVersion("a record of version 3"), "newer-release"),
        (StoreBug("what no script says"), "bug"),
        (KeyError(0), "bug"),
        (failed_by(KeyError(0)), "bug"),
        (failed_by(KafkaConnectionError()), "transaction"),
    ],
    ids=repr,
)
async def test_the_end_of_a_term_is_counted_by_its_cause(error: Exception, name: str) -> None:
    ends = [error]

    async def serve(_: Slot) -> None:
        if ends:
            raise ends.pop()
        await asyncio.sleep(60)

    async with holding(serve) as held:
        await until(lambda: len(held.recovery.runs) == 2)
        kinds = [*module.ENDS.values(), "bug"]
        assert {kind for kind in kinds if sample(held.world.telemetry, "fencepost_terms_ended_total", why=kind)} == {
            name
        }
        assert bool(held.world.store.losses) == (name == "store-lost")
        assert held.pool.newer is (error if name == "newer-release" else None)


@pytest.mark.parametrize("lost", [True, False])
async def test_a_slot_starts_another_term_unless_another_process_has_its_lease(lost: bool) -> None:
    """Its lease has expired meanwhile; if Redis does not answer, the slot goes on, and the fence decides."""
    ends = asyncio.Event()

    async def serve(_: Slot) -> None:
        await ends.wait()
        ends.clear()
        raise StoreUnanswered("no answer")

    async with holding(serve, lease_ttl_ms=60_000, slots_max=1) as held:
        slot = await held.ready()
        producer = slot.producer
        if lost:
            held.world.keys.server.leases[slot.n] = ("another", NOW_MS + 60_000)
        else:
            held.world.keys.trouble.before["take"].append(StoreAway("OOM"))
        ends.set()
        await until(lambda: slot.n not in held.pool.slots if lost else len(held.recovery.runs) == 2)
        assert producer.closed  # type: ignore[attr-defined]
        if lost:
            assert held.world.keys.server.leases[slot.n][0] == "another"
        else:
            assert slot.state is SlotState.READY


async def test_recoveries_that_keep_failing_are_tried_less_and_less_often() -> None:
    """Each costs an epoch, and a begin record."""

    async def serve(_: Slot) -> None:
        raise TransactionFailed(TransactionOutcome.ABORTED, "no answer")

    async with holding(serve) as held:
        run = held.recovery.run
        tries = 0

        async def fail(slot: Slot, generation: Any) -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                await run(slot, generation)
            else:
                raise KafkaAway("no leader")

        held.recovery.run = fail  # type: ignore[method-assign]
        await asyncio.sleep(0.5)
        assert 3 <= tries <= 6


async def test_a_wakeup_starts_one_heartbeat_at_once_and_no_more() -> None:
    async with holding(for_ever, lease_ttl_ms=60_000) as held:
        await held.ready()
        await asyncio.sleep(0.02)
        heartbeats = held.heartbeats
        held.world.heartbeat_now.set()
        await until(lambda: held.heartbeats == heartbeats + 1)
        await asyncio.sleep(0.05)
        assert held.heartbeats == heartbeats + 1


async def test_a_stop_ends_though_redis_takes_nothing_back() -> None:
    async with holding(slots=2, slots_max=2) as held:
        await until(lambda: held.pool.ready == 2)

        async def refuse(*_: object) -> None:
            raise StoreAway("OOM")

        held.world.keys.give_back = refuse  # type: ignore[assignment,method-assign]
        held.world.keys.leave = refuse  # type: ignore[assignment,method-assign]
        await asyncio.wait_for(held.keeper.stop(), 3.0)
        assert held.pool.slots == {}


async def test_the_pool_reports_its_longest_doubt_and_its_longest_down_time() -> None:
    async with holding(for_ever, slots=2, slots_max=2) as held:
        await until(lambda: held.pool.ready == 2)
        assert (held.pool.in_doubt, held.pool.in_doubt_s, held.pool.down_s) == (0, 0.0, 0.0)
        now = asyncio.get_running_loop().time()
        for slot, ago_s in zip(held.pool.slots.values(), (10.0, 20.0), strict=True):
            slot.in_doubt, slot.in_doubt_since, slot.down_since = 3, now - ago_s, now - ago_s
        assert held.pool.in_doubt == 6
        assert 20.0 <= held.pool.in_doubt_s < 21.0
        assert 20.0 <= held.pool.down_s < 21.0


async def test_a_setting_that_kafka_refuses_is_noted_until_a_slot_is_ready() -> None:
    async with holding(slots=1, slots_max=1) as held:
        run, refused = held.recovery.run, KafkaRefusesSetting("set a smaller one")
        refusals = [refused, refused]
        noted: list[tuple[bool, KafkaRefusesSetting | None, str]] = []

        async def refuse(slot: Slot, generation: StoreGeneration) -> None:
            noted.append((held.pool.was_ready, held.pool.refused, held.pool.trouble))
            if refusals:
                slot.move(SlotEvent.FAIL)
                raise refusals.pop()
            await run(slot, generation)

        held.recovery.run = refuse  # type: ignore[method-assign]
        await held.ready()
        assert noted == [(False, None, ""), *[(False, refused, str(refused))] * 2]
        assert (held.pool.was_ready, held.pool.refused) == (True, None)
