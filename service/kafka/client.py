"""aiokafka's client on connections of its own (connection.py), with a fast path for the requests of a transaction."""

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, ClassVar, Final

import structlog
from aiokafka import AIOKafkaConsumer, errors
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.protocol.metadata import MetadataRequest

from service.kafka.connection import LOGIN_ERRORS, UNREACHABLE, Connection, ResponseReader
from service.kafka.protocol import CODECS, ONLY_CODECS, ApiVersionsRequest, Features
from service.kafka.security import Security

log = structlog.get_logger(__name__)

_BOOTSTRAP: Final = ("bootstrap", ConnectionGroup.DEFAULT)
# The time for the response to the probe of an idle connection.
PROBE_TIMEOUT_S: Final = 1.0
PROBE_SHARE: Final = 10  # a probe takes at most this fraction (1/n) of the request timeout
# A connection that is idle for longer is closed, before brokers do it (connections.max.idle.ms, 10 minutes).
CLOSE_IDLE_MS: Final = 540_000
# The metadata of all topics is fetched by the first request in this share of its highest age, and at that age.
ALL_TOPICS_SHARE: Final = 0.5

OnClose = Callable[[AIOKafkaConnection, CloseReason | None], None]


class BaseClient(AIOKafkaClient):  # type: ignore[misc]  # aiokafka ships no types
    """AIOKafkaClient that never auto-creates topics, logs in again in time and closes its connections at once.

    Connections and requests for metadata are its own: every method that would use those of AIOKafkaClient, and that
    aiokafka's consumer calls, is replaced; but `fetch_all_metadata`, of AIOKafkaConsumer.topics, which is not used.
    """

    _probes_idle: ClassVar = False  # whether `_check` probes a connection that was idle before it is used

    def __init__(
        self,
        *,
        client_id: str,
        request_timeout_ms: int,
        security: Security,
        renews_on_use: bool = True,
        **options: Any,
    ) -> None:
        """`renews_on_use`: a session is renewed by the next request, else only by `renew_sessions` or near its end."""
        super().__init__(client_id=client_id, request_timeout_ms=request_timeout_ms, **options)
        self.tracked_topics: set[str] = set()  # whose metadata is kept up to date
        self._client_options: dict[str, Any] = {"client_id": client_id, "request_timeout_ms": request_timeout_ms}
        self._security = security
        self._renews_on_use = renews_on_use
        # By node and ConnectionGroup: a broker that does not answer must not delay the connections to others.
        self._opening: defaultdict[tuple[int | str, Any], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._connections: dict[tuple[int | str, Any], Connection] = {}  # by node and ConnectionGroup
        self._is_closed = False
        self._metadata_task: asyncio.Task[None] | None = None
        self._is_wanted = asyncio.Event()  # set where metadata is requested before its highest age
        # Of the request for metadata that comes next or is under way: whether a broker answered.
        self._is_answered: asyncio.Future[bool] | None = None

    @property
    def _metadata_max_age_s(self) -> float:
        return float(self.cluster.config["metadata_max_age_ms"] / 1000)

    async def bootstrap(self) -> None:
        """Ask the bootstrap servers for the brokers, one after the other.

        Raises KafkaError if none answers: why the first one did not, or why one refuses the login.
        """
        failures: list[Exception] = []
        for host, port, _ in self.hosts:
            try:
                await self._bootstrap_from(host, port)
                break
            except UNREACHABLE as error:
                failures.append(error)
        else:
            for failure in failures:
                if isinstance(failure, LOGIN_ERRORS):
                    raise failure
            raise errors.KafkaConnectionError(str(failures[0]) or type(failures[0]).__name__) from failures[0]
        if self._metadata_task is None:
            self._metadata_task = asyncio.create_task(self._keep_metadata())

    async def _bootstrap_from(self, host: str, port: int) -> None:
        """Ask a server for the brokers. The connection is kept only if there are none yet. Raises UNREACHABLE."""
        connection = await self._connect_to(host, port)
        try:
            metadata = await connection.send(MetadataRequest([], allow_auto_topic_creation=False))
            self.cluster.update_metadata(metadata)
        except BaseException:
            connection.close()
            raise
        if self.cluster.brokers():
            connection.close()
        else:
            self._connections[_BOOTSTRAP] = connection

    def add_topic(self, topic: str) -> asyncio.Future[bool]:
        """Keep a topic's metadata up to date as well; the result is False where it is requested without a response."""
        new = {topic} - self.tracked_topics
        self.tracked_topics |= new
        return self.refresh(new)

    def set_topics(self, topics: Collection[str]) -> asyncio.Future[bool]:
        """Keep the metadata of these topics up to date, and no other; the result is as that of `add_topic`."""
        new = set(topics) - self.tracked_topics
        self.tracked_topics = set(topics)
        return self.refresh(new)

    def refresh(self, topics: Collection[str]) -> asyncio.Future[bool]:
        """Request the metadata of these topics, here with that of the others; the result is False without a response.

        Without topics nothing is requested.
        """
        if topics:
            return self.force_metadata_update()
        return _done(True)

    def force_metadata_update(self) -> asyncio.Future[bool]:
        """Request the metadata of all tracked topics; the result is False without a response."""
        return self._request_metadata()

    def _request_metadata(self) -> asyncio.Future[bool]:
        """Have metadata fetched, or join the request that is under way."""
        if self._is_closed:
            return _done(False)
        if self._is_answered is None:
            self._is_answered = asyncio.get_running_loop().create_future()
            self._is_wanted.set()
        return asyncio.shield(self._is_answered)

    async def _maybe_wait_metadata(self) -> None:
        """Await the metadata that was requested; aiokafka's consumer calls this before it assigns partitions."""
        if self._is_answered is not None:
            await asyncio.shield(self._is_answered)

    async def _keep_metadata(self) -> None:
        """Fetch metadata where it is requested, and at its highest age."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._metadata_max_age_s):
                    await self._is_wanted.wait()
            is_answered = self._is_answered = self._is_answered or asyncio.get_running_loop().create_future()
            try:
                is_fetched = await self._fetch_tracked()
            except Exception:
                log.exception("bug: the metadata of Kafka could not be read")
                is_fetched = False
            self._is_wanted.clear()
            self._is_answered = None
            is_answered.set_result(is_fetched)

    async def _fetch_tracked(self) -> bool:
        """Fetch the metadata of the tracked topics, again where others are tracked meanwhile."""
        topics: set[str] | None = None
        is_fetched = False
        while topics != self.tracked_topics:
            topics = set(self.tracked_topics)
            is_fetched = await self._fetch(self.cluster, topics)
        return is_fetched

    async def _fetch(self, known: ClusterMetadata, topics: Collection[str]) -> bool:
        """Replace what is known by the metadata of these topics, from any broker; returns whether one answered."""
        request = MetadataRequest(list(topics), allow_auto_topic_creation=False)
        nodes: list[int | str] = [broker.nodeId for broker in self.cluster.brokers()]
        if _BOOTSTRAP in self._connections:  # kept until a response lists a broker
            nodes.append(_BOOTSTRAP[0])
        random.shuffle(nodes)
        for node in nodes:
            connection = await self._ready_connection(node)
            if connection is None:
                continue
            try:
                metadata = await connection.send(request)
            except (errors.KafkaError, TimeoutError):
                continue
            if not metadata.brokers:
                return False
            known.update_metadata(metadata)
            if _BOOTSTRAP in self._connections and self.cluster.brokers():
                self._connections.pop(_BOOTSTRAP).close()
            return True
        known.failed_update(None)
        return False

    async def ready(self, node_id: int, *, group: Any = ConnectionGroup.DEFAULT) -> bool:
        """Open a connection to a node where there is none; returns whether there is one now."""
        return await self._ready_connection(node_id, group) is not None

    async def send(self, node_id: int, request: Any, *, group: Any = ConnectionGroup.DEFAULT) -> Any:
        """Send a request once and await its response. Raises KafkaError."""
        connection = await self._ready_connection(node_id, group)
        if connection is None:
            raise errors.NodeNotReadyError(f"node {node_id} cannot be reached")
        try:
            return await connection.send(request)
        except TimeoutError as error:
            connection.close(CloseReason.CONNECTION_TIMEOUT)
            raise errors.RequestTimedOutError from error

    async def _ready_connection(self, node_id: int | str, group: Any = ConnectionGroup.DEFAULT) -> Connection | None:
        """Find or open the connection to a node, replacing one that has ended; None where that fails."""
        connection = self._open_connection(node_id, group)
        if connection is not None and self._needs_check(connection):
            await self._check(connection)
            connection = self._open_connection(node_id, group)  # another may have been opened meanwhile
        return connection or await self._connect(node_id, group)

    async def _connect(self, node_id: int | str, group: Any) -> Connection | None:
        """Open a connection to a node, unless another task just did; None where that fails, and once this is closed."""
        async with self._opening[node_id, group]:
            connection = self._open_connection(node_id, group)
            if connection is not None:
                return connection
            broker = None if self._is_closed else self.cluster.broker_metadata(node_id)
            if broker is not None:
                try:
                    connection = await self._connect_to(broker.host, broker.port, self.on_connection_closed)
                except UNREACHABLE as error:
                    log.debug("no connection to a broker", node=node_id, why=str(error))
            if connection is None:
                self.force_metadata_update()  # the broker may have moved
                return None
            if self._is_closed:
                connection.abort()
                return None
            self._connections[node_id, group] = connection
            return connection

    async def _connect_to(self, host: str, port: int, on_close: OnClose | None = None) -> Connection:
        """Open a connection to an address and log in. Raises UNREACHABLE."""
        connection = Connection(
            host, port, self._security, max_idle_ms=CLOSE_IDLE_MS, on_close=on_close, **self._client_options
        )
        await connection.connect()
        if not connection.is_open:  # it may end while a thread computes the last step of SCRAM
            connection.close(CloseReason.CONNECTION_BROKEN)
            raise errors.KafkaConnectionError(f"{host}:{port} has ended the connection with its login")
        return connection

    def on_connection_closed(self, connection: AIOKafkaConnection, reason: CloseReason | None) -> None:
        """Ask for metadata after a connection has broken: the broker may be away, or have moved."""
        if reason in (CloseReason.CONNECTION_BROKEN, CloseReason.CONNECTION_TIMEOUT):
            self.force_metadata_update()

    def _is_due(self, connection: Connection, now: float) -> bool:
        """Check whether a session must be renewed before the next request; `now` is time.monotonic."""
        return now >= (connection.renew_at if self._renews_on_use else connection.ends_at)

    def _needs_check(self, connection: Connection) -> bool:
        """Check whether a connection may not be used before its check."""
        now = time.monotonic()
        if connection.check_task is not None or self._is_due(connection, now):
            return True
        return self._probes_idle and connection.is_idle(now)

    async def _check(self, connection: Connection) -> None:
        """Renew the session of a connection, which may be closed by it."""
        await connection.check_once(connection.renew)

    @property
    def has_due_session(self) -> bool:
        """Whether `renew_sessions` would log in again."""
        return bool(self._due_connections())

    async def renew_sessions(self) -> None:
        """Log in again on the connections whose sessions end soon. Call this while no transaction is open."""
        if due := self._due_connections():
            await asyncio.gather(*(connection.check_once(connection.renew) for connection in due))

    def _due_connections(self) -> list[Connection]:
        now = time.monotonic()
        return [each for each in self._connections.values() if now >= each.renew_at and each.is_open]

    def _open_connection(self, node_id: int | str, group: Any) -> Connection | None:
        """Return the connection to a node if it is open, and close one whose transport has ended.

        aiokafka hears of the end some steps later; uvloop raises RuntimeError for what is written until then.
        """
        connection = self._connections.get((node_id, group))
        if connection is None or not connection.connected():
            return None
        if connection.transport.is_closing():
            connection.close(CloseReason.CONNECTION_BROKEN, errors.KafkaConnectionError("it has just ended"))
            return None
        return connection

    async def close(self) -> None:
        """Abort every connection, without waiting for unsent data, and open none from now on.

        Who waits for metadata gets False: there is no response.
        """
        self._is_closed = True
        ended = [connection.abort() for connection in self._connections.values()]
        if self._metadata_task is not None:
            self._metadata_task.cancel()
            ended.append(self._metadata_task)
            self._metadata_task = None
        if self._is_answered is not None:
            self._is_answered.set_result(False)
            self._is_answered = None
        await asyncio.gather(*ended, return_exceptions=True)


class Consumer(AIOKafkaConsumer):  # type: ignore[misc]
    """AIOKafkaConsumer whose client is a BaseClient; `client` has the options that the two share."""

    def __init__(self, client: Mapping[str, Any], **options: Any) -> None:
        super().__init__(**options, **{name: value for name, value in client.items() if name != "security"})
        self._client = BaseClient(**client)


class Client(BaseClient):
    """BaseClient with a fast path for transaction requests, whose time limit is set by their caller."""

    _probes_idle: ClassVar = True

    def __init__(self, *, client_id: str, request_timeout_ms: int, asks_features: bool = False, **options: Any) -> None:
        """`asks_features`: each new connection asks its broker for the finalized transaction.version (KIP-584)."""
        super().__init__(client_id=client_id, request_timeout_ms=request_timeout_ms, **options)
        self._asks_features = asks_features
        self._probe_timeout_s = min(PROBE_TIMEOUT_S, request_timeout_ms / 1000 / PROBE_SHARE)
        self.has_lost_connection = False  # a connection has ended that this client did not close
        self._new_topics: set[str] = set()  # topics that the next Metadata request asks for
        self._asks_all = False  # whether it asks for all tracked topics instead
        self._asked_all_at = time.monotonic()

    def refresh(self, topics: Collection[str]) -> asyncio.Future[bool]:
        """Request the metadata of these topics only; the result is False without a response."""
        self._new_topics.update(topics)
        return self._request_metadata() if topics else super().refresh(topics)

    def force_metadata_update(self) -> asyncio.Future[bool]:
        self._asks_all = True
        return super().force_metadata_update()

    async def _fetch_tracked(self) -> bool:
        """Fetch the metadata of new topics, and keep that of the others; of all topics where asked for, or at its age.

        A session that writes to thousands of topics would else get the metadata of all of them with each new topic.
        """
        age_s = time.monotonic() - self._asked_all_at
        is_old = age_s > ALL_TOPICS_SHARE * self._metadata_max_age_s
        if (self._asks_all or is_old) and not await self._fetch_all():
            return False
        while new := self._new_topics:  # others may be asked for meanwhile
            self._new_topics, fetched = set(), ClusterMetadata()
            if not await self._fetch(fetched, new):
                self._new_topics |= new
                return False
            _merge(self.cluster, fetched, new)
        return not self._asks_all or await self._fetch_tracked()

    async def _fetch_all(self) -> bool:
        """Fetch the metadata of all tracked topics."""
        self._new_topics, asked_at = set(), time.monotonic()
        is_fetched = await self._fetch(self.cluster, self.tracked_topics)
        if is_fetched:
            self._asked_all_at = asked_at
        self._asks_all = not is_fetched  # also where it was asked for meanwhile
        return is_fetched

    def connection(self, node_id: int) -> Connection | None:
        """Find the open connection to a node, or None. A reconnect gives another object, so callers compare by `is`."""
        connection = self._connections.get((node_id, ConnectionGroup.DEFAULT))
        return connection if connection is not None and connection.is_open else None

    def on_connection_closed(self, connection: AIOKafkaConnection, reason: CloseReason | None) -> None:
        if reason is CloseReason.CONNECTION_BROKEN:
            self.has_lost_connection = True
        super().on_connection_closed(connection, reason)

    async def send(self, node_id: int, request: Any, *, group: Any = ConnectionGroup.DEFAULT) -> Any:
        """Send a request once and await its response. Raises KafkaError."""
        if type(request) in CODECS and group is ConnectionGroup.DEFAULT:
            response = self.try_send(node_id, request)
            if response is None:
                connection = await self._ready_connection(node_id)
                if connection is None:
                    raise errors.NodeNotReadyError(f"node {node_id} cannot be reached")
                response = self.try_send(node_id, request)
                if response is None and not connection.is_open:
                    raise errors.KafkaConnectionError(f"the connection to node {node_id} has just ended")
            if response is not None:
                return await response
        if type(request) in ONLY_CODECS:
            raise errors.IncompatibleBrokerVersion(f"node {node_id} lacks the version of {type(request).__name__}")
        return await super().send(node_id, request, group=group)

    def try_send(self, node_id: int, request: Any) -> asyncio.Future[Any] | None:
        """Send a transaction request without waiting. Returns a future of its response, or None where `send` is needed.

        None where there is no open connection or no codec, where the node does not support the codec's version (`send`
        negotiates one), or where the connection must be checked first (`send` does so).
        """
        connection = self._connections.get((node_id, ConnectionGroup.DEFAULT))
        if connection is None or not connection.is_open or self._needs_check(connection):
            return None
        return connection.try_send(request)

    async def _connect_to(self, host: str, port: int, on_close: OnClose | None = None) -> Connection:
        connection = await super()._connect_to(host, port, on_close)
        ResponseReader.of(connection)
        connection.enable_keepalive()
        if self._asks_features:
            await self._ask_for_features(connection)
        return connection

    async def _ask_for_features(self, connection: Connection) -> None:
        """Note the broker's finalized transaction.version. Raises UNREACHABLE after closing the connection."""
        response = connection.try_send(ApiVersionsRequest())
        if response is None:  # a broker older than 2.4 has no finalized features
            return
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                features: Features = await response
        except BaseException:
            connection.close()
            raise
        connection.transaction_version = features.transaction_version

    async def _check(self, connection: Connection) -> None:
        """Renew the session where that is due, else probe the connection; a silent connection is closed."""
        if self._is_due(connection, time.monotonic()):
            await super()._check(connection)
        else:
            await connection.check_once(partial(connection.probe, self._probe_timeout_s))


def _done(is_answered: bool) -> asyncio.Future[bool]:
    """Make the result of a request for metadata that is not sent."""
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    done.set_result(is_answered)
    return done


def _merge(known: ClusterMetadata, fetched: ClusterMetadata, topics: Collection[str]) -> None:
    """Replace the brokers, and the metadata of some topics, by what was fetched.

    `partitions_for_broker` is left as it is: only aiokafka's own producer would use it.
    """
    known._brokers, known.controller = fetched._brokers, fetched.controller
    for topic in topics:
        known._partitions.pop(topic, None)
    known._partitions.update(fetched._partitions)
    known.unauthorized_topics = known.unauthorized_topics.difference(topics) | fetched.unauthorized_topics
    known.internal_topics = known.internal_topics.difference(topics) | fetched.internal_topics
