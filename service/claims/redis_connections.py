"""Connections to Redis: so many at most, the one that was used last first, and closed once they were idle a while."""

import asyncio
import contextlib
import ssl
import time
from collections import deque
from typing import Final

from redis.asyncio import Connection, ConnectionPool, SSLConnection
from redis.exceptions import RedisError

from service.core.problems import StoreAway

# Open at once, whatever is asked of the process: one group of a slot uses two or three, and Redis takes 10,000 of all.
CONNECTIONS_MAX: Final = 128
# One that was idle for longer is closed, and never used again: a firewall on the way may have forgotten it.
IDLE_S: Final = 10.0


class Connections:
    """A pool. redis-py's own costs each command twice as much CPU, and never closes what a burst has opened."""

    def __init__(self, pool: ConnectionPool, timeout_s: float, tls: ssl.SSLContext | None) -> None:
        """Prepare one; `pool` makes the connections, and holds none of them."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._tls = tls
        self._free = asyncio.Semaphore(CONNECTIONS_MAX)
        self._idle: deque[tuple[Connection, float]] = deque()  # with the times of their last use, the oldest first

    def __repr__(self) -> str:
        return f"<Connections {len(self._idle)} idle, {CONNECTIONS_MAX - self._free._value} in use>"

    async def take(self) -> Connection:
        """One for one command, connected; to be given back. Raises StoreAway where there is none in time."""
        if self._free.locked():
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._free.acquire()
            except TimeoutError as error:
                raise StoreAway(f"Redis: all {CONNECTIONS_MAX} connections were in use") from error
        else:
            await self._free.acquire()  # at once
        try:
            return await self._idle_one() or await self._new()
        except BaseException:
            self._free.release()
            raise

    async def give_back(self, connection: Connection, *, usable: bool) -> None:
        """Keep a connection for the next command, unless its answer is still to come."""
        self._free.release()
        now = time.monotonic()
        if usable:
            self._idle.append((connection, now))
        else:
            await connection.disconnect(nowait=True)
        while self._idle and self._idle[0][1] < now - IDLE_S:
            old, _ = self._idle.popleft()
            await old.disconnect(nowait=True)

    async def close_idle(self) -> None:
        """Close those that are not in use."""
        idle, self._idle = self._idle, deque()
        for connection, _ in idle:
            await connection.disconnect()

    async def _idle_one(self) -> Connection | None:
        """The one that was used last, if it is not at its end."""
        while self._idle:
            connection, since = self._idle.pop()
            with contextlib.suppress(RedisError):
                if since > time.monotonic() - IDLE_S and connection.is_connected and not await connection.can_read():
                    return connection
            await connection.disconnect(nowait=True)
        return None

    async def _new(self) -> Connection:
        connection: Connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        if self._tls is not None and isinstance(connection, SSLConnection):
            # redis-py's own would believe the system's authorities besides the one that was set.
            connection.ssl_context.context = self._tls
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as error:
            await connection.disconnect(nowait=True)
            raise StoreAway(f"Redis does not answer: {str(error) or type(error).__name__}") from error
        return connection
