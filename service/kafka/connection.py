"""aiokafka's client, with a shorter way for the requests of a transaction: it saves a fifth of what one event costs.

Its connections are made, logged in and closed by aiokafka. But what it sends is written as service/kafka/protocol.py
has it, and what comes is cut into answers as it comes, where aiokafka wakes a task twice for each.
"""

import asyncio
import random
import socket
import struct
import time
import weakref
from collections.abc import Collection, Mapping
from typing import Any, Final

import structlog
from aiokafka import AIOKafkaConsumer, errors
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.protocol.admin import ApiVersionRequest
from aiokafka.protocol.metadata import MetadataRequest

from service.kafka.deadline import shared
from service.kafka.protocol import CODECS, ApiCodec

log = structlog.get_logger(__name__)

# An answer that is none, or ends too soon.
BROKEN: Final = (errors.KafkaError, OSError, ValueError, struct.error)
_BOOTSTRAP: Final = ("bootstrap", ConnectionGroup.DEFAULT)
_SIZE_BYTES: Final = 4
# What is larger is not copied into one piece with its head.
_JOINED_MOST_BYTES: Final = 32 * 1024
# A firewall that has forgotten an idle connection drops its packets and tells nobody. So a connection that was idle for
# longer is asked for its versions before it is used, and replaced where no answer comes in time.
IDLE_S: Final = 5.0
PROBE_PATIENCE_S: Final = 1.0
PROBE_SHARE: Final = 10  # where a request has less time, the probe gets one part of it
# The kernel's part, by the names of its options: probes while a connection is idle, which also keep firewalls from
# forgetting it, and the end of a connection whose packets nobody has acknowledged. A slow broker acknowledges them.
TCP_OPTIONS: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4_000}


class BaseClient(AIOKafkaClient):  # type: ignore[misc]  # aiokafka ships no types
    """AIOKafkaClient that makes no topics, and closes its connections at once."""

    async def _metadata_update(self, cluster_metadata: ClusterMetadata, topics: Collection[str] | None) -> bool:
        """Ask any broker for the metadata of these topics, of none where there are none.

        aiokafka's own asks so that a topic which is not there is made, and without topics for all that there are.
        """
        request = MetadataRequest(list(topics or ()), allow_auto_topic_creation=False)
        nodes = [broker.nodeId for broker in self.cluster.brokers()]
        if _BOOTSTRAP in self._conns:  # kept for as long as it named no broker
            nodes.append(_BOOTSTRAP[0])
        random.shuffle(nodes)
        for node in nodes:
            connection = await self._get_conn(node)
            if connection is None:
                continue
            try:
                metadata = await connection.send(request)
            except (errors.KafkaError, TimeoutError):
                continue
            if not metadata.brokers:
                return False
            cluster_metadata.update_metadata(metadata)
            if _BOOTSTRAP in self._conns and self.cluster.brokers():
                self._conns.pop(_BOOTSTRAP).close()
            return True
        cluster_metadata.failed_update(None)
        return False

    async def close(self) -> None:
        """End every connection. Nothing that is still to be sent is worth waiting for.

        With TLS one takes leave, and waits for the broker's. Every other time uvloop does not see that come, and waits
        for 30 s, which cost each recovery of a slot the seconds after which its consumers are given up.
        """
        for connection in self._conns.values():
            writer = connection._writer
            connection.close(reason=CloseReason.SHUTDOWN)
            if writer is not None:
                writer.transport.abort()
        await super().close()


class Consumer(AIOKafkaConsumer):  # type: ignore[misc]
    """AIOKafkaConsumer whose client is a BaseClient; `client` are the options that both of them take."""

    def __init__(self, client: Mapping[str, Any], **options: Any) -> None:
        super().__init__(**options, **client)
        self._client = BaseClient(**client)


class Client(BaseClient):
    """BaseClient. Where its requests of a transaction go the short way, their time limit is their caller's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lost = False  # a connection has ended that nobody here closed
        self._probes: dict[AIOKafkaConnection, asyncio.Task[None]] = {}  # under way

    def connection(self, node_id: int) -> AIOKafkaConnection | None:
        """The open connection to a node. The next one is another object: what the node said before may have passed."""
        connection = self._conns.get((node_id, ConnectionGroup.DEFAULT))
        return connection if connection is not None and _is_open(connection) else None

    def _on_connection_closed(self, conn: AIOKafkaConnection, reason: CloseReason | None) -> None:
        if reason is CloseReason.CONNECTION_BROKEN:
            self.lost = True
        super()._on_connection_closed(conn, reason)

    async def send(self, node_id: int, request: Any, *, group: Any = ConnectionGroup.DEFAULT) -> Any:
        """The answer to a request, sent once. Raises KafkaError."""
        if type(request) in CODECS and group is ConnectionGroup.DEFAULT:
            answer = self.send_now(node_id, request)
            if answer is None:
                connection = await self._get_conn(node_id)
                if connection is None:
                    raise errors.NodeNotReadyError(f"node {node_id} cannot be reached")
                answer = self.send_now(node_id, request)
                if answer is None and not _is_open(connection):
                    raise errors.KafkaConnectionError(f"the connection to node {node_id} has just ended")
            if answer is not None:
                return await answer
        return await super().send(node_id, request, group=group)

    def send_now(self, node_id: int, request: Any) -> asyncio.Future[Any] | None:
        """Send a request of a transaction; its answer. None where there is no connection on which it could go at once.

        Nor is it sent where the node does not know the version that we speak: `send` finds one that it knows; or where
        the connection was idle for so long that it may be dead: `send` probes it.
        """
        connection = self._conns.get((node_id, ConnectionGroup.DEFAULT))
        if connection is None or not _is_open(connection) or self._may_be_dead(connection):
            return None
        form = CODECS[type(request)]
        least, most = connection._versions.get(form.api_key, (0, -1))
        return _ask(connection, form, request) if least <= form.version <= most else None

    async def _get_conn(
        self, node_id: int, *, group: Any = ConnectionGroup.DEFAULT, no_hint: bool = False
    ) -> AIOKafkaConnection | None:
        """The connection to a node, made where there is none or a dead one; None where that fails."""
        connection = self._conns.get((node_id, group))
        if connection is not None and connection.connected() and self._may_be_dead(connection):
            await self._probe(connection)
            connection = self._conns.get((node_id, group))  # another may have been made meanwhile
        if connection is None or not connection.connected():
            connection = await super()._get_conn(node_id, group=group, no_hint=no_hint)
            # Who made it is here first: nothing has been asked on it since its login. It may have ended since.
            if connection is not None and connection.connected() and not connection._requests:
                ResponseReader.of(connection)
                _watch_over(connection)
        return connection

    def _may_be_dead(self, connection: AIOKafkaConnection) -> bool:
        """Was the connection idle for so long that it is to be probed before it is used? Not while an answer is due."""
        if connection in self._probes:
            return True
        return not connection._requests and time.monotonic() - connection._last_action > IDLE_S

    async def _probe(self, connection: AIOKafkaConnection) -> None:
        """Close a connection on which no answer comes in time. Callers of one time share its probe."""
        probe = self._probes.get(connection)
        if probe is None:
            probe = self._probes[connection] = asyncio.create_task(_ask_for_versions(connection))
            probe.add_done_callback(lambda _: self._probes.pop(connection, None))
        await shared(probe)


def _is_open(connection: AIOKafkaConnection) -> bool:
    """Can it be written to? After a reset, what aiokafka itself goes by tells so only some steps later."""
    return connection.connected() and not connection._writer.is_closing()


async def _ask_for_versions(connection: AIOKafkaConnection) -> None:
    """Close a connection that does not answer the cheapest of all requests in time."""
    try:
        async with asyncio.timeout(min(PROBE_PATIENCE_S, connection._request_timeout / PROBE_SHARE)):
            await connection.send(ApiVersionRequest())
    except (errors.KafkaError, OSError) as error:  # OSError: also that the time is up
        connection.close(CloseReason.IDLE_DROP, error)


def _watch_over(connection: AIOKafkaConnection) -> None:
    """Have the kernel probe a connection while it is idle, and end it where its packets are not acknowledged."""
    transport = connection._writer.transport.get_extra_info("socket")
    transport.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_OPTIONS.items():
        if (option := getattr(socket, name, None)) is not None:  # what this system has of them
            transport.setsockopt(socket.IPPROTO_TCP, option, value)


def _ask(connection: AIOKafkaConnection, form: ApiCodec, request: Any) -> asyncio.Future[Any]:
    """Send a request; its answer."""
    correlation_id = connection._next_correlation_id()
    size, pieces = form.frame(request, correlation_id, connection._client_id)
    if size <= _JOINED_MOST_BYTES:
        connection._writer.write(b"".join(pieces))
    else:
        connection._writer.writelines(pieces)
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    connection._requests.append((correlation_id, form, answer))
    return answer


class ResponseReader(asyncio.Protocol):
    """Takes what a connection receives, in place of aiokafka's stream, which goes on to see its end.

    As its reader does, this leaves a connection that nobody knows any more to be collected, and so closed.
    """

    def __init__(self, connection: AIOKafkaConnection) -> None:
        self._connection = weakref.ref(connection)
        self._stream = connection._protocol
        self._parts: list[bytes] = []
        self._have = 0
        self._need = _SIZE_BYTES  # before there is another answer to cut off

    @classmethod
    def of(cls, connection: AIOKafkaConnection) -> None:
        """Take what this one receives from now on, where none does so yet."""
        transport = connection._writer.transport
        if not isinstance(transport.get_protocol(), cls):
            transport.set_protocol(cls(connection))

    def data_received(self, data: bytes) -> None:
        if not self._parts and len(data) == _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "big"):
            self._take(data[_SIZE_BYTES:])  # nearly always
            return
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return
        whole = data if len(self._parts) == 1 else b"".join(self._parts)
        start, self._need = 0, _SIZE_BYTES
        while len(whole) - start >= _SIZE_BYTES:
            size = int.from_bytes(whole[start : start + _SIZE_BYTES], "big")
            end = start + _SIZE_BYTES + size
            if end > len(whole):
                self._need = end - start
                break
            self._take(whole[start + _SIZE_BYTES : end])
            start = end
        rest = whole[start:]
        self._parts, self._have = [rest] if rest else [], len(rest)

    def _take(self, frame: bytes) -> None:
        connection = self._connection()
        if connection is None or not connection.connected():
            return  # ended by an answer before this one, or forgotten
        try:
            correlation_id, form, answer = connection._requests[0]
            if not isinstance(form, ApiCodec):
                connection._handle_frame(frame)
                return
            if int.from_bytes(frame[:4], "big") != correlation_id:
                raise errors.CorrelationIdError(f"the answer is not to request {correlation_id}")
            if not answer.done():  # nobody waits for it any more
                answer.set_result(form.decode(frame))
            connection._last_action = time.monotonic()
            connection._requests.popleft()
        except Exception as error:  # whatever it is, what comes after it cannot be told apart
            if not isinstance(error, BROKEN):
                log.exception("bug: an answer of Kafka could not be taken")
            connection.close(CloseReason.OUT_OF_SYNC, error)

    def eof_received(self) -> bool | None:
        return self._stream.eof_received()  # type: ignore[no-any-return]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream.connection_lost(exc)

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()
