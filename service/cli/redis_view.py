"""A read-only view of the keys in Redis and of the server, for the command line."""

from collections.abc import Mapping
from dataclasses import dataclass

from service.claims.redis_connections import FollowingConnections
from service.claims.redis_requirements import SECTIONS
from service.claims.redis_seeds import View
from service.claims.redis_store import RedisKeys
from service.core.problems import StoreAway


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot's state in Redis: `holder` has its lease for another `lease_ms`. A slot taken and not held is dead."""

    slot: int
    holder: str | None
    lease_ms: int
    taken: bool
    freed: int | None
    applied: int | None

    @property
    def state(self) -> str:
        """held, dead (the lease ran out before it was given back) or free."""
        if self.holder is not None:
            return "held"
        return "dead" if self.taken else "free"


class KeysView(RedisKeys):
    """RedisKeys, and reads of INFO and of the slots. Raises StoreAway and StoreUnanswered."""

    async def info(self) -> Mapping[str, str]:
        """Read the fields of INFO, by their names."""
        return await self._info(*SECTIONS, "persistence", "keyspace")

    async def seeds(self) -> tuple[list[View], list[StoreAway]]:
        """Ask all sentinels, or all listed nodes of the cluster: their views, and the errors of the others.

        Both are empty where FENCEPOST_REDIS names one server.
        """
        connections = self._connections
        return await connections.seeds.all_views() if isinstance(connections, FollowingConnections) else ([], [])

    async def slots(self, count: int) -> list[SlotView]:
        """Read the state of all slots, not atomically."""
        numbers = [str(slot) for slot in range(count)]
        freed = await self._send("HMGET", f"{self._prefix}f", *numbers)
        applied = await self._send("HMGET", f"{self._prefix}a", *numbers)
        taken = await self._send("SMISMEMBER", f"{self._prefix}o", *numbers)
        holders = await self._send("MGET", *(f"{self._prefix}l{slot}" for slot in numbers))
        views: list[SlotView] = []
        for slot, holder in enumerate(holders):
            lease_ms = 0 if holder is None else max(0, int(await self._send("PTTL", f"{self._prefix}l{slot}")))
            # A token is the instance's name and, after the last slash, a random part for each start.
            name = None if holder is None else holder.decode().rpartition("/")[0]
            views.append(
                SlotView(slot, name, lease_ms, bool(taken[slot]), _number(freed[slot]), _number(applied[slot]))
            )
        return views


def _number(raw: bytes | None) -> int | None:
    return None if raw is None else int(raw)
