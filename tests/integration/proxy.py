"""A proxy on the loopback interface whose connections end as a test says."""

import asyncio
import json
import time
from collections.abc import Mapping
from enum import Enum
from typing import Self

from service.core.problems import NOT_WRITTEN, Problem


class Fault(Enum):
    """What happens to a connection; without any, the proxy passes all that comes."""

    BUSY = "its request is answered 503, and does not reach the service"
    CUT = "it ends when the service has answered, before the answer has come"
    HELD_BEFORE = "its request waits, and does not reach the service"
    HELD_AFTER = "the answer waits, and does not reach the client"


RETRY_AFTER_S = 1
END_S = 5.0  # for connections whose clients have ended
_BODY = json.dumps(Problem(NOT_WRITTEN, "as the test says").body()).encode()
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\nConnection: close\r\n"
    b"Retry-After: %d\r\nContent-Length: %d\r\n\r\n%b" % (RETRY_AFTER_S, len(_BODY), _BODY)
)


class Proxy:
    """Passes connections to a port. `arrivals` has the time of each, `posts` counts the requests in them.

    `held` is set when a connection waits; it waits until the client has ended.
    """

    def __init__(self, port: int, faults: Mapping[int, Fault]) -> None:
        self._target, self._faults = port, faults
        self.port = 0
        self.arrivals: list[float] = []
        self.posts = 0
        self.held = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()  # a loop keeps no references to its tasks

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        if self._connections:  # of programs that have ended
            _ended, left = await asyncio.wait(self._connections, timeout=END_S)
            assert not left

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = self._faults.get(len(self.arrivals))
        self.arrivals.append(time.monotonic())
        try:
            if fault in (Fault.BUSY, Fault.HELD_BEFORE):
                await self._read_request(reader)
                if fault is Fault.BUSY:
                    writer.write(_BUSY)
                    await writer.drain()
                else:
                    await self._hold(reader)
            else:
                await self._pass(reader, writer, fault)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            if fault is Fault.CUT:
                writer.transport.abort()
            writer.close()

    async def _read_request(self, reader: asyncio.StreamReader) -> None:
        self.posts += 1
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"\r\ntransfer-encoding: chunked\r\n" in head:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            await reader.readexactly(int(head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]))

    async def _hold(self, reader: asyncio.StreamReader) -> None:
        self.held.set()
        await reader.read()  # until the client's end

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None) -> None:
        from_service, to_service = await asyncio.open_connection("127.0.0.1", self._target)
        sending = asyncio.create_task(self._forward(reader, to_service))
        try:
            answer = await from_service.read(65536)
            if fault is Fault.HELD_AFTER:
                self.held.set()
                await sending  # until the client's end
            while answer and fault is None:
                writer.write(answer)
                await writer.drain()
                answer = await from_service.read(65536)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.posts += data.count(b"POST /")
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()  # which ends the reading of the answer too
