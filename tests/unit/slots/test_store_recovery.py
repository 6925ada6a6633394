"""Tests how a process finds the store that holds the claims, and the status that it reports meanwhile."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any
from unittest.mock import AsyncMock

import pytest

from service.claims.keys import ServerIdentity, StoreGeneration
from service.contract.wire.names import transactional_id
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway, KafkaRefusesSetting, StoreAway, StoreLost, StoreUnanswered
from service.kafka.transaction_admin import TransactionAdmin
from service.slots import store_recovery
from service.slots.store_recovery import CurrentStore
from tests.unit.fakes import World, unreachable_kafka, until
from tests.unit.scrape import sample

NAMED = StoreGeneration(7, "run/primary")
OTHER = ServerIdentity("run/left-behind", StoreGeneration(7, "run/primary"))


FLUSHED = ServerIdentity("run/primary", None)


class _Keys:
    """The server at the address; `may_recover` is False if another process's nonce stands."""

    def __init__(self, identity: ServerIdentity = OTHER) -> None:
        self.identity = identity
        self.may_recover = True
        self.asked = 0
        self.resolved = self.renewed = 0
        self.errors: list[Exception] = []
        self.cannot_resolve = False

    async def who(self) -> ServerIdentity:
        self.asked += 1
        await asyncio.sleep(0.001)
        if self.errors:
            raise self.errors[0]
        return self.identity

    async def resolve_again(self) -> None:
        self.resolved += 1
        if self.cannot_resolve:
            raise RuntimeError("a bug")

    async def recover(self, seen: ServerIdentity, nonce: str) -> bool:
        return self.may_recover

    async def recover_read(self, store: str, nonce: str, slots: int) -> list[int | None]:
        self.renewed += 1
        if self.renewed == 1:
            raise RuntimeError("a bug")
        return []

    async def recover_abandon(self, store: str, nonce: str) -> None: ...


class _Control:
    """Names NAMED; an appended record comes next, and is superseded at once if a test says so."""

    def __init__(self) -> None:
        self.generation = NAMED.number
        self.superseded = False
        self.slots = 0
        self.longest_ttl_s = 0

    async def newest_generation(self, slot: int = 0) -> StoreGeneration | None:
        return None if self.generation < 0 else StoreGeneration(self.generation, NAMED.store)

    async def append(self, store: str) -> int:
        self.generation += 2 if self.superseded else 1
        return self.generation - self.superseded


class _Topics:
    ledger = "ledger"
    longest_ttl_s = 86_400

    def __init__(self, slots: int = 2) -> None:
        self._slots = slots

    async def slots(self) -> int:
        return self._slots


@contextlib.asynccontextmanager
async def settling(
    keys: _Keys,
    control: _Control,
    slots: int = 2,
    transactions: TransactionAdmin | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[tuple[CurrentStore, "asyncio.Task[StoreGeneration]"]]:
    """Settle a store, in a task."""
    world: Any = World(lease_ttl_ms=300)
    admin: Any = transactions or world.transactions
    parts: list[Any] = [
        world.kafka_admin,
        admin,
        keys,
        control,
        _Topics(slots),
        world.settings,
        telemetry or Telemetry(),
    ]
    store = CurrentStore(*parts)
    try:
        yield store, asyncio.create_task(store.wait_until_settled())
    finally:
        await store.close()


async def test_a_store_that_answers_again_is_adopted_in_the_midst_of_a_long_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long split brain makes the pauses minutes long; its end must be noticed sooner."""
    grown = itertools.count()

    async def high_watermarks(cluster: object, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        return dict.fromkeys(partitions, next(grown))

    monkeypatch.setattr(store_recovery, "high_watermarks", high_watermarks)
    keys = _Keys()
    async with settling(keys, _Control()) as (store, settled):
        store._quiet_pause_s = store_recovery.PAUSE_MOST_S
        await until(lambda: keys.asked >= 4)  # it pauses, and looks again
        assert not settled.done()
        assert store.state == "stale-store"
        keys.identity = ServerIdentity(NAMED.store, NAMED)
        assert await asyncio.wait_for(settled, 3.0) == NAMED


@pytest.mark.parametrize("generation", [-1, NAMED.number - 1])
async def test_a_redis_that_served_another_kafka_is_reported_as_stale(generation: int) -> None:
    """Kafka was recreated, and Redis was kept: its generation is higher than any new one."""
    keys, control = _Keys(ServerIdentity(NAMED.store, NAMED)), _Control()
    control.generation = generation
    async with settling(keys, control) as (store, settled):
        await until(lambda: keys.asked >= 3)
        assert store.status.startswith("stale-store: Redis has keys of generation 7")
        assert "{fencepost:0}" in store.status
        assert control.generation == generation, "it wrote one generation after the other"
        keys.identity = ServerIdentity(NAMED.store, None)  # the keys were deleted, as the status says
        control.generation = NAMED.number
        keys.may_recover = False
        await until(lambda: store.state == "recovering")
        assert not settled.done()


def another_recovers(keys: _Keys, _: _Control) -> None:
    keys.may_recover = False


def another_was_later(_: _Keys, control: _Control) -> None:
    control.superseded = True


@pytest.mark.parametrize(
    ("happens", "status"),
    [
        (another_recovers, "recovering: another process recovers the store, or has done so"),
        (another_was_later, "recovering: a later generation supersedes this recovery"),
    ],
)
async def test_a_store_that_others_recover_is_not_reported_as_stale(
    happens: Callable[[_Keys, _Control], None], status: str
) -> None:
    """`stale-store` is for another store that may be in use, which needs an operator; this ends by itself."""
    keys, control = _Keys(FLUSHED), _Control()
    happens(keys, control)
    async with settling(keys, control) as (store, settled):
        await until(lambda: store.status != "starting")
        assert store.status == status
        assert not settled.done()


class _Fencing(TransactionAdmin):
    """Has fenced all ids but these at once, and these never."""

    def __init__(self, *hanging: int) -> None:
        super().__init__(unreachable_kafka())
        self._hanging = [transactional_id("fencepost", slot) for slot in hanging]

    async def fence(
        self,
        transactional_ids: Sequence[str],
        transaction_timeout_ms: int,
        on_progress: Callable[[Collection[str]], None],
    ) -> None:
        assert set(self._hanging) <= set(transactional_ids)
        on_progress(transactional_ids)
        await asyncio.sleep(0.05)
        on_progress(self._hanging)
        await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("hanging", "status"),
    [
        ((), "64 of 64 slots fenced"),
        ((3, 9), "62 of 64 slots fenced, waiting for slots [3, 9]"),
        (tuple(range(1, 40, 2)), "44 of 64 slots fenced, waiting for slots [1, 3, 5, 7, 9, 11, 13, 15]"),
    ],
)
async def test_the_status_of_a_recovery_names_the_slots_that_it_waits_for(
    hanging: tuple[int, ...], status: str
) -> None:
    async with settling(_Keys(FLUSHED), _Control(), 64, _Fencing(*hanging)) as (store, settled):
        await until(lambda: store.status.startswith("recovering: 0 of 64"))
        assert store.status.endswith("waiting for slots [0, 1, 2, 3, 4, 5, 6, 7]")
        await until(lambda: not store.status.startswith("recovering: 0 of 64"))
        assert store.status == f"recovering: {status}"
        assert not settled.done()


async def test_slots_that_only_control_knows_are_fenced_too() -> None:
    """The broker was cut off before SLOTS_MAX was raised, and this process started before that too."""
    control = _Control()
    control.slots = 100
    async with settling(_Keys(FLUSHED), control, 64, _Fencing()) as (store, _):
        await until(lambda: store.status == "recovering: 100 of 100 slots fenced")


async def test_the_nonce_is_renewed_although_a_renewal_fails() -> None:
    """Otherwise it would expire amid a long recovery, and nobody would know why the attempt ends."""
    keys, telemetry = _Keys(FLUSHED), Telemetry()
    async with settling(keys, _Control(), 64, _Fencing(3), telemetry) as (store, _):
        await until(lambda: keys.renewed >= 2)
        assert store.state == "recovering"
        assert sample(telemetry, "fencepost_task_failures_total", task="recovery-nonce") == 1


async def test_an_unexpected_error_of_the_search_for_the_store_is_counted_though_nobody_awaits_it() -> None:
    keys, telemetry = _Keys(ServerIdentity(NAMED.store, NAMED)), Telemetry()
    async with settling(keys, _Control(), telemetry=telemetry) as (store, settled):
        await settled
        keys.errors.append(StoreAway("away"))
        keys.cannot_resolve = True
        store.lost(NAMED)
        await until(lambda: sample(telemetry, "fencepost_task_failures_total", task="settle-store") == 1)


SETTLED = ServerIdentity(NAMED.store, NAMED)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StoreAway("OOM"), "store-away: OOM"),
        (StoreUnanswered("no answer"), "store-away: no answer"),
        (StoreLost("flushed"), "store-away: flushed"),
        (KafkaAway("no leader"), "store-away: no leader"),
        (ValueError("a bug"), "store-away: ValueError('a bug')"),
    ],
    ids=repr,
)
async def test_an_error_does_not_end_the_search_for_the_store(error: Exception, status: str) -> None:
    keys = _Keys(SETTLED)
    keys.errors.append(error)
    async with settling(keys, _Control()) as (store, settled):
        await until(lambda: keys.asked >= 2)
        assert store.status == status
        assert keys.resolved >= 1, "the address may lead to another by now"
        keys.errors.clear()
        assert await asyncio.wait_for(settled, 3.0) == NAMED
        assert (store.state, store.generation_number) == ("settled", NAMED.number)


async def test_a_replica_is_neither_adopted_nor_recovered() -> None:
    keys, control = _Keys(ServerIdentity("not a primary", NAMED)), _Control()
    async with settling(keys, control) as (store, settled):
        await until(lambda: keys.asked >= 2)
        assert store.status == "store-away: the server that answers is not a primary"
        assert (control.generation, settled.done()) == (NAMED.number, False)


async def test_a_lost_store_is_settled_again_and_an_earlier_generation_is_no_loss() -> None:
    keys = _Keys(SETTLED)
    async with settling(keys, _Control()) as (store, settled):
        assert await settled == NAMED
        asked = keys.asked
        store.lost(StoreGeneration(NAMED.number - 1, NAMED.store))
        store.lost(StoreGeneration(NAMED.number, "run/another"))
        assert (store.generation, store.generation_number) == (NAMED, NAMED.number)
        assert await store.wait_until_settled() == NAMED
        assert keys.asked == asked
        store.lost(NAMED)
        store.lost(NAMED)
        assert (store.generation, store.generation_number, store.state) == (None, 0, "recovering")
        first, second = await asyncio.gather(store.wait_until_settled(), store.wait_until_settled())
        assert first == second == store.generation == NAMED
        assert keys.asked == asked + 1


@pytest.mark.parametrize("changes", [False, True])
async def test_a_rest_between_attempts_lasts_its_time_unless_the_store_changes(changes: bool) -> None:
    keys = _Keys()
    async with settling(keys, _Control()) as (store, settled):
        settled.cancel()
        await store.close()
        keys.asked = keys.resolved = 0
        started = time.monotonic()
        resting = asyncio.create_task(store._rest(OTHER, 0.7 if not changes else 60.0))
        await asyncio.sleep(0.35)  # the lease time is 0.3
        assert (keys.asked, keys.resolved, resting.done()) == (1, 1, False)
        if changes:
            keys.identity = SETTLED
        await asyncio.wait_for(resting, 1.0)
        assert 0.55 < time.monotonic() - started < 1.0
        assert keys.asked == keys.resolved == (2 if changes else 3)


async def test_a_setting_that_kafka_refuses_is_noted_until_the_store_is_settled() -> None:
    refused = KafkaRefusesSetting("set a smaller one")
    transactions = TransactionAdmin(unreachable_kafka())
    transactions.fence = AsyncMock(side_effect=refused)  # type: ignore[method-assign]
    keys, control = _Keys(FLUSHED), _Control()
    async with settling(keys, control, 2, transactions) as (store, settled):
        await until(lambda: store.refused is refused and store.status == "store-away: set a smaller one")
        control.generation = NAMED.number  # another process has recovered the store
        keys.identity = ServerIdentity(NAMED.store, NAMED)
        assert await asyncio.wait_for(settled, 3.0) == NAMED
        assert store.refused is None
