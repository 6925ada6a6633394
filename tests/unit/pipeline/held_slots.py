"""A process that holds slots, in memory, for the tests of the pool and of its keeper."""

import asyncio
from collections.abc import Awaitable, Callable

from service.claims.keys import StoreGeneration
from service.claims.states import Delivered, Row
from service.pipeline.lease_keeper import LeaseKeeper
from service.pipeline.leases import Leases
from service.pipeline.pool import Pool
from service.slots.recovery import SlotRecovery
from service.slots.slot import Slot
from tests.unit.fakes import GENERATION, NOW_MS, FakeIdempotent, Trouble, World, ended, until

LATER = StoreGeneration(2, GENERATION.store)
ROWS: list[Row] = [(b"i" * 16, Delivered(NOW_MS, b"f" * 8, "orders", 0, 3, NOW_MS))]


class FakeRecovery(SlotRecovery):
    """Brings a slot to READY with fakes; notes the generations in which it did."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.runs: list[tuple[int, StoreGeneration]] = []
        self.trouble = Trouble()

    async def run(self, slot: Slot, generation: StoreGeneration) -> None:
        await self.trouble.enter("run")
        await self._world.bring_up(slot, generation)
        self.runs.append((slot.n, generation))

    def new_slot(self, n: int) -> Slot:
        return Slot(n, self._world.keys, self._world.topics.ledger, "test", FakeIdempotent())


class Held:
    """A pool, its keeper and what they need; `serve` is the work of slots, `heartbeats` the number of heartbeats."""

    def __init__(self, serve: Callable[[Slot], Awaitable[None]] | None = None, **settings: int) -> None:
        timing = {"lease_ttl_ms": 30, "request_timeout_ms": 50, "transaction_timeout_ms": 50}
        self.world = World(**(timing | settings))
        self.recovery = FakeRecovery(self.world)
        self.heartbeats = 0
        self._serve = serve or self.world.writer.serve
        self.leases = Leases(self.world.keys, self.world.store, self.world.settings)
        self.pool = Pool(self.leases, self.world.store, self.recovery, self, self.world.queue, self.world.telemetry)
        self.keeper = LeaseKeeper(
            self.world.settings, self.leases, self.world.store, self.pool, self.world.heartbeat_now
        )
        self.world.keys.server.freed = dict.fromkeys(range(self.world.settings.slots_max), 0)
        self.keeping = asyncio.create_task(self.keeper.keep())

    async def serve(self, slot: Slot) -> None:
        await self._serve(slot)

    def recovered(self) -> None:
        self.heartbeats += 1

    async def ready(self) -> Slot:
        await until(lambda: self.pool.ready > 0)
        return next(iter(self.pool.slots.values()))

    async def cut_off(self, slot: Slot) -> None:
        """Cancel the task of a slot, and await its end."""
        await ended(self.pool._tasks[slot.n])

    async def end(self) -> None:
        """Cancel the heartbeats and all slots."""
        await ended(self.keeping)
        for task in list(self.pool._tasks.values()):
            await ended(task)

    async def more_beats(self) -> None:
        seen = self.heartbeats
        await until(lambda: self.heartbeats > seen + 2)


Hold = Callable[..., Held]


async def for_ever(_: Slot) -> None:
    await asyncio.sleep(60)
