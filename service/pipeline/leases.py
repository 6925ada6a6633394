"""The leases of this process's slots in Redis, under the process's token."""

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Final

from service.claims.keys import Heartbeat, Keys, StoreGeneration
from service.core.problems import StoreAway, StoreLost, StoreUnanswered
from service.core.settings import Settings
from service.slots.store_recovery import CurrentStore

# A heartbeat without an answer in this share of a lease is sent again at once, over another connection.
HEARTBEAT_TIMEOUT_SHARE: Final = 1 / 6


class Leases:
    """Renews, takes and returns leases. A lease saves work and proves nothing: the fence of a slot decides."""

    def __init__(self, keys: Keys, store: CurrentStore, settings: Settings) -> None:
        self._keys = keys
        self._store = store
        self._name = settings.name
        self._slots_max = settings.slots_max
        self._timeout_s = settings.lease_ttl_ms / 1000 * HEARTBEAT_TIMEOUT_SHARE

    @cached_property
    def token(self) -> str:
        """The name of this process in its leases.

        It is made at its first use: a server may make the app before it forks its workers (gunicorn's `preload_app`),
        and workers of one name would take each other's slots for their own.
        """
        return f"{self._name}/{secrets.token_hex(6)}"

    async def renew(self, generation: StoreGeneration, applied: Mapping[int, int]) -> Heartbeat:
        """Send a heartbeat, with `applied` of each held slot. Raises as Keys.heartbeat does, and TimeoutError."""
        async with asyncio.timeout(self._timeout_s):
            return await self._keys.heartbeat(generation, self.token, self._slots_max, applied)

    async def take(self, generation: StoreGeneration, n: int) -> bool:
        """Take the lease of a slot; False if another process has it. Raises as Keys.take does."""
        return await self._keys.take(generation, n, self.token)

    async def may_keep(self, n: int) -> bool:
        """Whether the lease is still this process's, or could be taken again; True if Redis does not answer."""
        try:
            return self._store.generation is None or await self.take(self._store.generation, n)
        except (StoreAway, StoreUnanswered, StoreLost):
            return True

    async def give_back(self, n: int, *, clean: bool) -> None:
        """Return the lease of a slot as Keys.give_back does; if Redis does not answer, the lease expires."""
        if self._store.generation is not None:
            with contextlib.suppress(StoreAway, StoreUnanswered, StoreLost):
                await self._keys.give_back(self._store.generation, n, self.token, clean)

    async def leave(self) -> None:
        """Count this process no longer among the live ones."""
        if self._store.generation is not None:
            with contextlib.suppress(StoreAway, StoreUnanswered, StoreLost):
                await self._keys.leave(self._store.generation, self.token)
