"""A bounded pool of connections to Redis, last in first out, that closes idle connections."""

import asyncio
import contextlib
import ssl
import time
from collections import deque
from typing import Final

from redis.asyncio import Connection, ConnectionPool, SSLConnection
from redis.exceptions import RedisError

from service.core.problems import StoreAway

# Connections of this process. A slot's group uses two or three; Redis takes 10,000 clients by default.
CONNECTIONS_MAX: Final = 128
# A connection that was idle for longer is closed and not used: a firewall may have dropped it.
IDLE_S: Final = 10.0


class Connections:
    """A connection pool. redis-py's own uses more CPU for each command, and never closes the connections of a burst."""

    def __init__(self, pool: ConnectionPool, timeout_s: float, tls: ssl.SSLContext | None) -> None:
        """Open nothing yet; redis-py's `pool` only makes connections, and holds none."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._tls = tls
        self._free = asyncio.Semaphore(CONNECTIONS_MAX)
        self._idle: deque[tuple[Connection, float]] = deque()  # with the time of last use (monotonic), oldest first

    def __repr__(self) -> str:
        return f"<Connections {len(self._idle)} idle, {CONNECTIONS_MAX - self._free._value} in use>"

    async def take(self) -> Connection:
        """Take a connected connection for one command; call `give_back`. Raises StoreAway if there is none in time."""
        if self._free.locked():
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._free.acquire()
            except TimeoutError as error:
                raise StoreAway(f"Redis: all {CONNECTIONS_MAX} connections were in use") from error
        else:
            await self._free.acquire()  # without waiting
        try:
            return await self._idle_one() or await self._new()
        except BaseException:
            self._free.release()
            raise

    async def give_back(self, connection: Connection, *, usable: bool) -> None:
        """Return a connection; it is closed if it is not usable, because its reply was not read."""
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
        """Close the connections that are not in use."""
        idle, self._idle = self._idle, deque()
        for connection, _ in idle:
            await connection.disconnect()

    async def _idle_one(self) -> Connection | None:
        """Take the connection that was used last, if the server has not closed it."""
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
            # redis-py's own context would trust the system's CAs besides the one that is set.
            connection.ssl_context.context = self._tls
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as error:
            await connection.disconnect(nowait=True)
            raise StoreAway(f"Redis does not answer: {str(error) or type(error).__name__}") from error
        return connection
