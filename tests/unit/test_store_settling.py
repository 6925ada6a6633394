"""How a process finds the store that holds the claims, where control names another than the one that answers."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, cast

import pytest

from service import recovery
from service.control import Control, Newest
from service.keys import Epoch, Identity, KeyStore
from service.recovery import Store
from service.telemetry import Telemetry
from tests.unit.fakes import World, until

NAMED = Epoch(7, "run/primary")
OTHER = Identity("run/left-behind", Epoch(7, "run/primary"))


class _Keys:
    """Where the address leads."""

    def __init__(self) -> None:
        self.identity = OTHER
        self.asked = 0

    async def who(self) -> Identity:
        self.asked += 1
        return self.identity

    async def resolve_anew(self) -> None: ...


class _Control:
    async def newest(self, slot: int = 0) -> Newest | None:
        return Newest(NAMED.generation, NAMED.store)


async def test_a_store_that_answers_again_is_adopted_in_the_midst_of_a_long_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A split brain that has lasted makes the pauses minutes long; its end must not be waited for as long."""
    grown = itertools.count()

    async def ends(cluster: object, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        return dict.fromkeys(partitions, next(grown))

    class Topics:
        ledger = "ledger"

        async def slots(self) -> int:
            return 2

    monkeypatch.setattr(recovery, "ends", ends)
    world: Any = World(lease_ttl_ms=300)
    keys, control = _Keys(), cast(Control, _Control())
    store = Store(world.cluster, cast(KeyStore, keys), control, cast(Any, Topics()), world.settings, Telemetry())
    store._quiet_pause_s = recovery.PAUSE_MOST_S
    settling = asyncio.create_task(store.settled())
    await until(lambda: keys.asked >= 4)  # it rests, and looks again
    assert not settling.done()
    keys.identity = Identity(NAMED.store, NAMED)
    assert await asyncio.wait_for(settling, 3.0) == NAMED
    await store.close()
