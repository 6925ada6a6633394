"""A proxy between Kafka's clients and brokers that parses requests and replies, and loses one of them as planned.

Each broker has a listener that advertises the proxy's port, so that a client which bootstraps through the proxy sends
all its requests through it:

    with Proxy() as proxy, Kafka(folder, listeners=[proxy.listener(0)]) as kafka:
        loss = proxy.plan("EndTxn", "cut")
        ...  # a client of proxy.bootstrap commits, and its connection ends before the reply
        loss.wait()

Frames are those of Kafka's protocol guide: a length of four bytes; then a request has its API key, version, correlation
id and client id, and a reply the correlation id. The proxy never changes a frame.
"""

import asyncio
import contextlib
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from deploy.stack import Listener, free_port
from tests.faults.relay import stop_serving

APIS: Final = {
    0: "Produce",
    1: "Fetch",
    2: "ListOffsets",
    3: "Metadata",
    8: "OffsetCommit",
    9: "OffsetFetch",
    10: "FindCoordinator",
    11: "JoinGroup",
    12: "Heartbeat",
    13: "LeaveGroup",
    14: "SyncGroup",
    18: "ApiVersions",
    19: "CreateTopics",
    20: "DeleteTopics",
    22: "InitProducerId",
    24: "AddPartitionsToTxn",
    25: "AddOffsetsToTxn",
    26: "EndTxn",
    28: "TxnOffsetCommit",
    32: "DescribeConfigs",
    37: "CreatePartitions",
    75: "DescribeTopicPartitions",
}

# hold: the request waits here until `let_go`, even if its client disconnects meanwhile: it then arrives late.
# delay: the request waits for `delay_ms`.
# hold-reply: the broker has replied, and the reply waits until `let_go`.
# drop-reply: the broker has replied; this reply and all later ones of the connection are dropped, because a stream has
#   no gaps: the client sees silence.
# cut: the broker has replied, and the connection ends instead of the reply.
# cut-before: the connection ends instead of the request.
Do = Literal["hold", "delay", "hold-reply", "drop-reply", "cut", "cut-before"]

_SIZE: Final = struct.Struct(">i")
_REQUEST: Final = struct.Struct(">hhih")  # API key, version, correlation id, length of the client id
_CORRELATION: Final = struct.Struct(">i")
_CALL_S: Final = 10.0


class Request(NamedTuple):
    """The header of a request's frame."""

    api: str
    correlation_id: int
    client_id: str


@dataclass(eq=False)
class Loss:
    """A planned fault. It happens to the `nth` matching request, counted from the plan on."""

    api: str
    do: Do
    nth: int
    client: str
    containing: bytes
    delay_ms: int
    broker: int | None = None  # the broker that the request was sent to
    client_id: str = ""  # the client that sent it
    seen: int = 0
    _happened: threading.Event = field(default_factory=threading.Event)
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def happened(self) -> bool:
        return self._happened.is_set()

    def wait(self, timeout_s: float = 20.0) -> None:
        """Wait until the fault has happened: the request is held, or the broker's reply is held or lost.

        Raises:
            AssertionError: it did not happen in time.
        """
        assert self._happened.wait(timeout_s), f"no such request within {timeout_s} s: {self}"

    def fits(self, request: Request, frame: bytes) -> bool:
        """Check whether this is the request; counts it if it matches."""
        if request.api != self.api or self.client not in request.client_id or self.containing not in frame:
            return False
        self.seen += 1
        return self.seen == self.nth


class Proxy:
    """A port for each of some brokers, served by a thread of its own, which ends with the `with` block."""

    def __init__(self, brokers: int = 1) -> None:
        """Prepare the ports.

        Args:
            brokers: the number of brokers.
        """
        self._doors = [(free_port(), free_port()) for _ in range(brokers)]  # the clients' port, the broker's
        self._losses: list[Loss] = []
        self._seen: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kafka-proxy", daemon=True)
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._carried: set[_Connection] = set()

    @property
    def bootstrap(self) -> str:
        """The bootstrap servers."""
        return ",".join(f"127.0.0.1:{port}" for port, _ in self._doors)

    def listener(self, broker: int) -> Listener:
        """Make the listener that a broker needs for clients that come through the proxy; brokers count from 0."""
        port, behind = self._doors[broker]
        return Listener("PROXIED", f"127.0.0.1:{behind}", f"127.0.0.1:{port}")

    def plan(
        self, api: str, do: Do, *, nth: int = 1, client: str = "", containing: bytes = b"", delay_ms: int = 0
    ) -> Loss:
        """Plan a fault for one request, or for its reply.

        Args:
            api: the name of its API, as in Kafka's protocol guide.
            do: the fault; the comment at `Do` describes each.
            nth: the number of the matching request, from now on.
            client: a part of its client id, to choose one producer.
            containing: bytes anywhere in the request: the name of a topic, or a transactional id.
            delay_ms: for `delay`, in ms.
        """
        assert api in APIS.values(), f"no such API: {api}"
        assert do in get_args(Do), f"no such fault: {do}"
        loss = Loss(api, do, nth, client, containing, delay_ms)
        self._losses.append(loss)
        return loss

    def let_go(self, loss: Loss) -> None:
        """Let all that is held go on."""
        self._loop.call_soon_threadsafe(loss._gone.set)

    def forget(self) -> None:
        """Drop all bytes of the present connections from now on, as a firewall that has forgotten them."""
        self._run(self._forget())

    async def _forget(self) -> None:
        for connection in self._carried:
            connection.forgotten = True

    def count(self, api: str) -> int:
        """Count the requests of an API so far."""
        return self._seen[api]

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_S)

    async def _open(self) -> None:
        for broker, (port, _) in enumerate(self._doors):
            self._servers.append(await asyncio.start_server(self._accept(broker), "127.0.0.1", port))

    async def _close(self) -> None:
        for server in self._servers:
            await stop_serving(server)
        for client in self._clients:  # also of a task that has not begun
            client.transport.abort()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, broker: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._clients.add(writer)
            task = self._loop.create_task(self._serve(broker, reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        return accepted

    async def _serve(self, broker: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._doors[broker][1])
        except OSError:  # the broker is down
            self._clients.discard(writer)
            writer.transport.abort()
            return
        connection = _Connection(self._choose(broker), (reader, writer), there)
        self._carried.add(connection)
        try:
            await connection.run()
        finally:
            self._carried.discard(connection)
            self._clients.discard(writer)
            there[1].transport.abort()
            writer.transport.abort()

    def _choose(self, broker: int) -> Callable[[Request, bytes], Loss | None]:
        def chosen(request: Request, frame: bytes) -> Loss | None:
            self._seen[request.api] += 1
            found = [loss for loss in self._losses if loss.fits(request, frame)]
            if not found:
                return None
            self._losses.remove(found[0])
            found[0].broker, found[0].client_id = broker, request.client_id
            return found[0]

        return chosen


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Connection:
    """A client's connection and the connection to the broker."""

    def __init__(self, choose: Callable[[Request, bytes], Loss | None], client: Stream, broker: Stream) -> None:
        self._choose = choose
        self._client = client
        self._broker = broker
        self._losses: dict[int, Loss] = {}  # by correlation id: for replies to come
        self.forgotten = False  # nothing comes through any more, in either direction

    async def run(self) -> None:
        """Forward in both directions until one side ends the connection, or a fault does."""
        requests = asyncio.create_task(self._requests())
        replies = asyncio.create_task(self._replies())
        try:
            # When the client disconnects, the broker still gets all that it has sent, and then ends the other side.
            await replies
        finally:
            requests.cancel()
            replies.cancel()
            await asyncio.gather(requests, replies, return_exceptions=True)

    async def _requests(self) -> None:
        try:
            while frame := await _frame(self._client[0]):
                if self.forgotten:
                    continue
                request = _parse(frame)
                loss = self._choose(request, frame)
                if loss is not None and not await self._before(loss, request):
                    break
                self._broker[1].write(frame)
                await self._broker[1].drain()
        except OSError:
            pass
        with contextlib.suppress(OSError):
            self._broker[1].write_eof()

    async def _before(self, loss: Loss, request: Request) -> bool:
        """Apply a fault before the broker; returns whether the request goes on."""
        if loss.do in ("hold", "delay"):
            loss._happened.set()
            await (loss._gone.wait() if loss.do == "hold" else asyncio.sleep(loss.delay_ms / 1000))
        elif loss.do == "cut-before":
            loss._happened.set()
            self._client[1].transport.abort()
            return False
        else:
            self._losses[request.correlation_id] = loss
        return True

    async def _replies(self) -> None:
        silent = False
        while frame := await _frame(self._broker[0]):
            loss = self._losses.pop(_CORRELATION.unpack_from(frame, _SIZE.size)[0], None)
            if loss is not None:
                loss._happened.set()
                if loss.do == "cut":
                    self._client[1].transport.abort()
                    return
                silent = silent or loss.do == "drop-reply"
                if loss.do == "hold-reply":
                    await loss._gone.wait()
            if not silent and not self.forgotten:
                try:
                    self._client[1].write(frame)
                    await self._client[1].drain()
                except OSError:  # the client has disconnected; one of its requests may still be held
                    silent = True


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Read the next frame with its length; empty at the end of the stream."""
    try:
        head = await reader.readexactly(_SIZE.size)
        return head + await reader.readexactly(_SIZE.unpack(head)[0])
    except (asyncio.IncompleteReadError, OSError):
        return b""


def _parse(frame: bytes) -> Request:
    key, _, correlation_id, length = _REQUEST.unpack_from(frame, _SIZE.size)
    start = _SIZE.size + _REQUEST.size
    return Request(APIS.get(key, str(key)), correlation_id, frame[start : start + max(length, 0)].decode())
