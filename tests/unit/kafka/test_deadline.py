"""Tests waiting with a timeout: results, errors, timeouts, and cancellations by the caller and by others."""

import asyncio
from typing import Any, cast

import pytest

from service.claims.keys import Keys, ServerIdentity, StoreGeneration
from service.core.metrics import Telemetry
from service.kafka.deadline import Abandoned, shared, within
from service.slots.generation_log import Control
from service.slots.store_recovery import CurrentStore
from tests.unit.fakes import World

SOON_S = 5.0
GENERATION = StoreGeneration(3, "run/replid")


async def test_within_answers_raises_and_passes_a_cancellation_on() -> None:
    async def answer() -> int:
        return 1

    async def fail() -> None:
        raise ValueError("a fault")

    assert await within(1, answer()) == 1
    with pytest.raises(ValueError, match="a fault"):
        await within(1, fail())
    cancelled = asyncio.Event()

    async def until_cancelled() -> None:
        try:
            await asyncio.sleep(SOON_S)
        finally:
            cancelled.set()

    waiting = asyncio.create_task(within(SOON_S, until_cancelled()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(cancelled.wait(), 1)


async def cancelled_from_within() -> None:
    """As aiokafka's consumer in `stop`: cancels a task of its own, and awaits it."""
    fetch = asyncio.create_task(asyncio.sleep(SOON_S))
    fetch.cancel()
    await fetch


async def test_a_cancellation_from_within_raises_abandoned() -> None:
    with pytest.raises(Abandoned):
        await within(1, cancelled_from_within())
    task = asyncio.create_task(cancelled_from_within())
    for _ in range(2):
        with pytest.raises(Abandoned):
            await shared(task)


class _Keys:
    async def who(self) -> ServerIdentity:
        return ServerIdentity(GENERATION.store, GENERATION)

    async def resolve_again(self) -> None: ...


class _Control:
    """Its first read is cancelled from within."""

    def __init__(self) -> None:
        self.readings = 0

    async def newest_generation(self, slot: int = 0) -> StoreGeneration | None:
        self.readings += 1
        if self.readings == 1:
            await cancelled_from_within()
        return StoreGeneration(GENERATION.number, GENERATION.store)


async def test_a_store_is_settled_after_a_reading_that_was_cancelled_from_within() -> None:
    world: Any = World()
    keys, control = cast(Keys, _Keys()), cast(Control, _Control())
    store = CurrentStore(
        world.kafka_admin, world.transactions, keys, control, world.topics, world.settings, Telemetry()
    )
    with pytest.raises(Abandoned):
        await store.wait_until_settled()
    assert await asyncio.wait_for(store.wait_until_settled(), SOON_S) == GENERATION
    await store.close()
