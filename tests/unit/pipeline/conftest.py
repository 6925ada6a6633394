"""Fixtures of the tests of the pipeline."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from service.pipeline import lease_keeper as module
from service.slots.slot import Slot
from tests.unit.pipeline.held_slots import Held, Hold


@pytest.fixture
async def hold(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hold]:
    """Makes pools, which end with the test. No slot counts as stuck, because the request timeout is long."""
    monkeypatch.setattr(module, "STUCK_SHARE", 1_000.0)
    made: list[Held] = []

    def make(serve: Callable[[Slot], Awaitable[None]] | None = None, **settings: int) -> Held:
        made.append(Held(serve, **settings))
        return made[-1]

    yield make
    for held in made:
        await held.end()
