"""Asks sentinels, or nodes of a cluster, which server is the primary that holds the keys of the namespace.

Seeds may disagree after a failover, and one that is cut off from the others knows an old configuration. All are asked
at once, and the newest configuration counts, by its epoch. No rule of the protocol relies on the answer: each script
checks the identity of the server that runs it.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from hiredis import pack_command
from redis.asyncio import Connection, ConnectionPool, SSLConnection
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from service.contract import PREFIX
from service.core.problems import StoreAway

Address = tuple[str, int]
"""Host and port."""

# After one seed has answered, for how long the next answers are waited for: those of a majority are wanted, and
# machines often fail with a seed on them.
GRACE_S: Final = 0.3


class WronglyAddressed(StoreAway):
    """The answer of a seed shows that a setting is wrong; the text says what to set."""


@dataclass(frozen=True, slots=True)
class View:
    """The view of a seed: the primary, the servers that may take its place, and what orders the views, newest last."""

    primary: Address
    rank: tuple[int, int]
    replicas: tuple[Address, ...] = ()


class Question(Protocol):
    """The commands that a seed is sent, and how its replies are read."""

    @property
    def commands(self) -> Sequence[Sequence[str]]:
        """The commands, sent together."""

    @property
    def login(self) -> str:
        """The settings of the user and password that a seed wants."""

    def view(self, seed: Address, replies: Sequence[Any]) -> View:
        """Read the replies. Raises StoreAway, WronglyAddressed."""

    def refused(self, seed: Address, error: str) -> StoreAway:
        """Explain an error reply."""


@dataclass(frozen=True, slots=True)
class OfSentinels:
    """Asks a sentinel for the primary that it monitors under a name."""

    name: str

    @property
    def commands(self) -> Sequence[Sequence[str]]:
        # Amid a failover the first names the promoted replica already, and the second has its configuration's epoch.
        return ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name), ("SENTINEL", "MASTER", self.name)

    @property
    def login(self) -> str:
        return f"{PREFIX}REDIS_SENTINEL_USERNAME and {PREFIX}REDIS_SENTINEL_PASSWORD"

    def view(self, seed: Address, replies: Sequence[Any]) -> View:
        address, state = replies
        fields = state if isinstance(state, Mapping) else dict(zip(state[::2], state[1::2], strict=True))
        return View((address[0].decode(), int(address[1])), (0, int(fields[b"config-epoch"])))

    def refused(self, seed: Address, error: str) -> StoreAway:
        if "No such master" in error:
            return WronglyAddressed(
                f"{PREFIX}REDIS is wrong: the sentinel {_text(seed)} monitors no primary {self.name!r}; "
                "set redis+sentinel://host:port,host:port/name/db with the name of its `sentinel monitor`"
            )
        if "unknown command" in error:
            return WronglyAddressed(
                f"{PREFIX}REDIS is wrong: {_text(seed)} is no sentinel; set the addresses of sentinels, or redis://"
            )
        return StoreAway(f"the sentinel {_text(seed)}: {error}")


@dataclass(frozen=True, slots=True)
class OfCluster:
    """Asks a node of a cluster for the primary that serves a hash slot."""

    hash_slot: int

    @property
    def commands(self) -> Sequence[Sequence[str]]:
        return ("CLUSTER", "SLOTS"), ("CLUSTER", "INFO")

    @property
    def login(self) -> str:
        return f"the user and password in {PREFIX}REDIS"

    def view(self, seed: Address, replies: Sequence[Any]) -> View:
        ranges, text = replies
        info = dict(line.partition(":")[::2] for line in text.decode().splitlines())
        # A node that is cut off from the majority says `fail`.
        rank = int(info.get("cluster_state") == "ok"), int(info.get("cluster_current_epoch", 0))
        for first, last, *nodes in ranges:
            if first <= self.hash_slot <= last:
                primary, *replicas = (_node(seed, node) for node in nodes)
                return View(primary, rank, tuple(replicas))
        raise StoreAway(f"no node of the cluster serves hash slot {self.hash_slot}, says {_text(seed)}")

    def refused(self, seed: Address, error: str) -> StoreAway:
        if "cluster support disabled" in error or "unknown command" in error:
            return WronglyAddressed(
                f"{PREFIX}REDIS is wrong: {_text(seed)} is no node of a cluster; set redis://host:port/db"
            )
        return StoreAway(f"the node {_text(seed)}: {error}")


def _node(seed: Address, node: Sequence[Any]) -> Address:
    """Read a node of CLUSTER SLOTS; where it does not know its own host, that is the one that was asked."""
    host = (node[0] or b"").decode()
    return (seed[0] if host in ("", "?") else host), int(node[1])


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


@dataclass(slots=True)
class Seeds:
    """The seeds of one address, each with a connection that is kept. Concurrent calls open more, and close them."""

    pool: ConnectionPool
    addresses: Sequence[Address]
    question: Question
    timeout_s: float
    tls: ssl.SSLContext | None
    _learned: tuple[Address, ...] = ()  # servers of the newest view, which know the next one
    _connections: dict[Address, Connection] = field(default_factory=dict)

    async def newest(self) -> View:
        """Ask all seeds, and return the newest view of a majority, or of those that answer in time.

        Raises StoreAway if none answers, and WronglyAddressed if none answers and a setting is wrong.
        """
        views, errors = await self._ask_all()
        if not views:
            raise next((error for error in errors if isinstance(error, WronglyAddressed)), _none_answers(errors))
        newest = max(views, key=lambda view: view.rank)
        if isinstance(self.question, OfCluster):
            self._learned = (newest.primary, *newest.replicas)
        return newest

    async def all_views(self) -> tuple[list[View], list[StoreAway]]:
        """Ask all seeds; returns the views of those that answer, and the errors of the others."""
        return await self._ask_all(all_of_them=True)

    async def close(self) -> None:
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.disconnect(nowait=True)

    async def _ask_all(self, *, all_of_them: bool = False) -> tuple[list[View], list[StoreAway]]:
        views: list[View] = []
        errors: list[StoreAway] = []
        pending = {asyncio.create_task(self._ask(seed)) for seed in {*self.addresses, *self._learned}}
        enough = len(pending) if all_of_them else len(pending) // 2 + 1
        try:
            while pending and len(views) < enough:
                done, pending = await asyncio.wait(
                    pending, timeout=GRACE_S if views else None, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    try:
                        views.append(task.result())
                    except StoreAway as error:
                        errors.append(error)
        finally:
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending)
        return views, errors

    async def _ask(self, seed: Address) -> View:
        """Ask one seed. Raises StoreAway."""
        connection = self._connections.pop(seed, None) or self._make(seed)
        answered = False
        try:
            async with asyncio.timeout(self.timeout_s):
                if not connection.is_connected or await connection.can_read():
                    await connection.disconnect(nowait=True)
                    await connection.connect()  # type: ignore[no-untyped-call]
                packed = b"".join(pack_command(command) for command in self.question.commands)  # type: ignore[arg-type]
                await connection.send_packed_command(packed, check_health=False)
                replies = [await connection.read_response() for _ in self.question.commands]
            answered = True
            return self.question.view(seed, replies)
        except (AuthenticationError, NoPermissionError) as error:
            raise WronglyAddressed(
                f"{_text(seed)} refuses ({error}): set {self.question.login} to those that it asks for"
            ) from error
        except ResponseError as error:
            raise self.question.refused(seed, str(error)) from error
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreAway(f"{_text(seed)} does not answer: {str(error) or type(error).__name__}") from error
        finally:
            if answered and seed not in self._connections:
                self._connections[seed] = connection
            else:
                with contextlib.suppress(RedisError, OSError):
                    await connection.disconnect(nowait=True)

    def _make(self, seed: Address) -> Connection:
        return make_connection(self.pool, seed, self.tls)


def make_connection(pool: ConnectionPool, address: Address | None, tls: ssl.SSLContext | None) -> Connection:
    """Make a connection, not yet opened; to the address of the pool's URL if none is given."""
    connection: Connection = pool.make_connection()  # type: ignore[no-untyped-call]
    if address is not None:
        connection.host, connection.port = address
    if tls is not None and isinstance(connection, SSLConnection):
        # redis-py's own context would trust the system's CAs besides the one that is set.
        connection.ssl_context.context = tls
    return connection


def _none_answers(errors: Sequence[StoreAway]) -> StoreAway:
    return StoreAway(f"Redis: {'; '.join(map(str, errors))}")
