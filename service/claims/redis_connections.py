"""Bounded pools of connections to Redis, last in first out, that close idle connections."""

import asyncio
import ssl
import time
from collections import deque
from typing import Final

import structlog
from redis.asyncio import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisError

from service.claims.redis_seeds import Address, OfCluster, OfSentinels, Seeds, make_connection
from service.contract import PREFIX, SettingsError
from service.core.problems import StoreAway
from service.core.redis_address import RedisAddress

log = structlog.get_logger(__name__)

# Connections of this process. A slot's group uses two or three; Redis takes 10,000 clients by default.
CONNECTIONS_MAX: Final = 128
# A connection that was idle for longer is closed and not used: a firewall may have dropped it.
IDLE_S: Final = 10.0
# For an answer of sentinels or nodes while a primary is known: less than a probe of the readiness waits.
REFRESH_S: Final = 1.0
NOBODY: Final = "Redis: no sentinel or node names the primary in time"


class Connections:
    """Connections to one server, or to one name that leads to it.

    redis-py's own pool uses more CPU for each command, and never closes the connections of a burst.
    """

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

    async def close(self) -> None:
        await self._close_idle()

    async def _close_idle(self) -> None:
        """Close the connections that are not in use."""
        idle, self._idle = self._idle, deque()
        for connection, _ in idle:
            await connection.disconnect()

    async def resolve_again(self) -> None:
        """Have the next calls resolve the address of the primary again."""
        await self._close_idle()

    async def refresh(self) -> None:
        """Find out whether another server is the primary now; nobody tells this of a single server."""

    async def lead_to(self, primary: Address) -> bool:
        """Connect to this server from now on; False where the connections have one address."""
        return False

    async def _idle_one(self) -> Connection | None:
        """Take the connection that was used last, if the server has not closed it."""
        while self._idle:
            connection, since = self._idle.pop()
            if since > time.monotonic() - IDLE_S and await _is_usable(connection):
                return connection
            await connection.disconnect(nowait=True)
        return None

    async def _new(self) -> Connection:
        return await self._connect(None)

    async def _connect(self, address: Address | None) -> Connection:
        """Open a connection to an address, or to that of the pool's URL. Raises StoreAway."""
        connection = make_connection(self._pool, address, self._tls)
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as error:
            await connection.disconnect(nowait=True)
            raise StoreAway(f"Redis does not answer: {str(error) or type(error).__name__}") from error
        return connection


class FollowingConnections(Connections):
    """Connections to the present primary, as sentinels or the nodes of a cluster name it."""

    def __init__(self, pool: ConnectionPool, timeout_s: float, tls: ssl.SSLContext | None, seeds: Seeds) -> None:
        super().__init__(pool, timeout_s, tls)
        self.seeds = seeds
        self._primary: Address | None = None  # None: to be asked before the next connection
        self._finding = asyncio.Lock()

    async def give_back(self, connection: Connection, *, usable: bool) -> None:
        """As for one server; a connection to an earlier primary is closed."""
        await super().give_back(connection, usable=usable and (connection.host, connection.port) == self._primary)

    async def close(self) -> None:
        await super().close()
        await self.seeds.close()

    async def refresh(self) -> None:
        """Ask the seeds for the primary, and leave an earlier one. Raises StoreAway if none is known.

        Without an answer the known primary is used on: the keys may be there although all sentinels are away.
        """
        known = self._primary
        try:
            primary = await self._named(self._timeout_s if known is None else REFRESH_S)
        except StoreAway:
            if known is None:
                raise
            return
        await self.lead_to(primary)

    async def lead_to(self, primary: Address) -> bool:
        """Connect to this server from now on, and close the idle connections to another one."""
        if self._primary != primary:
            log.info("primary of Redis", host=primary[0], port=primary[1])
            self._primary = primary
            await self._close_idle()
        return True

    async def _new(self) -> Connection:
        address = self._primary
        if address is None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    address = await self._find()
            except TimeoutError as error:
                raise StoreAway(NOBODY) from error
        try:
            return await self._connect(address)
        except StoreAway:
            if self._primary == address:
                self._primary = None
            raise

    async def _find(self) -> Address:
        """Find the primary, once for all connections that wait for it. Raises StoreAway."""
        async with self._finding:
            if self._primary is not None:
                return self._primary
            primary = await self._named(self._timeout_s)
            await self.lead_to(primary)
            return primary

    async def _named(self, timeout_s: float) -> Address:
        """Ask the seeds for the primary. Raises StoreAway."""
        try:
            async with asyncio.timeout(timeout_s):
                return (await self.seeds.newest()).primary
        except TimeoutError as error:
            raise StoreAway(NOBODY) from error


async def _is_usable(connection: Connection) -> bool:
    """Check that the server has neither closed a connection, nor sent anything on it."""
    try:
        return connection.is_connected and not await connection.can_read()
    except RedisError:
        return False


def check_url(url: str) -> None:
    """Raise SettingsError for a URL with a query that redis-py does not take."""
    _pool_of(RedisAddress.parse(url).url, None)


def connections_of(
    url: str, prefix: str, timeout_s: float, tls: ssl.SSLContext | None, sentinel_login: tuple[str, str]
) -> Connections:
    """Make the connections to an address, for keys with a prefix. Raises SettingsError."""
    address = RedisAddress.parse(url)
    pool = _pool_of(address.url, timeout_s)
    match address.kind:
        case "server":
            return Connections(pool, timeout_s, tls)
        case "cluster":
            question = OfCluster(key_slot(prefix.encode()))
            return FollowingConnections(pool, timeout_s, tls, Seeds(pool, address.seeds, question, timeout_s, tls))
        case "sentinel":
            # Sentinels have users and passwords of their own, and no databases.
            asking = _pool_of(address.url, timeout_s)
            username, password = sentinel_login
            asking.connection_kwargs |= {"username": username or None, "password": password or None, "db": 0}
            seeds = Seeds(asking, address.seeds, OfSentinels(address.name), timeout_s, tls)
            return FollowingConnections(pool, timeout_s, tls, seeds)


def _pool_of(url: str, connect_timeout_s: float | None) -> ConnectionPool:
    """Make a redis-py pool that makes connections for a URL; none is opened. Raises SettingsError."""
    try:
        pool = ConnectionPool.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=None, socket_connect_timeout=connect_timeout_s
        )
        pool.make_connection()  # type: ignore[no-untyped-call]
    except (TypeError, ValueError, AttributeError, RedisError):  # its text may contain a part of a password
        raise SettingsError(
            f"{PREFIX}REDIS is wrong: set after its ? only what redis-py takes in a URL, with values of its kind"
        ) from None
    # Set after the URL's own options: no command is sent twice, and replies are bytes.
    pool.connection_kwargs |= {"retry_on_error": [], "retry_on_timeout": False, "decode_responses": False}
    return pool
