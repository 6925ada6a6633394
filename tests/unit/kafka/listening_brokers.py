"""Brokers that listen on a port, and clients of theirs."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from aiokafka.protocol.admin import ApiVersionResponse_v0

from service.contract import SharedSettings
from service.kafka.client import Client
from service.kafka.connection import Connection
from service.kafka.protocol import EndTxnRequest
from service.kafka.security import Security

VERSIONS: Final = {0: (3, 11), 3: (0, 5), 18: (0, 0), 24: (0, 5), 26: (0, 5)}
NODE: Final = 1
END: Final = EndTxnRequest("ns.slot.0", 7, 2, True)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def requests_from(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Read requests, without their sizes, until the client ends the connection."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            yield await reader.readexactly(size)


def frame(message: bytes, answer: Any) -> bytes:
    """Frame a response to a request."""
    encoded: bytes = message[4:8] + answer.encode()
    return struct.pack(">i", len(encoded)) + encoded


def api_versions(versions: dict[int, tuple[int, int]]) -> ApiVersionResponse_v0:
    return ApiVersionResponse_v0(0, [(key, *span) for key, span in versions.items()])


@contextlib.asynccontextmanager
async def listening(talk: Talk, **options: Any) -> AsyncIterator[int]:
    """Listen on a free port, which this gives; `options` are those of asyncio.start_server."""
    server = await asyncio.start_server(talk, "127.0.0.1", 0, **options)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Broker:
    """Takes requests, and sends the planned responses; it answers ApiVersions by itself."""

    def __init__(self, versions: dict[int, tuple[int, int]]) -> None:
        self.versions = versions
        self.asked: asyncio.Queue[bytes] = asyncio.Queue()
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._forgotten: set[asyncio.StreamWriter] = set()

    def forget(self) -> None:
        """Lose all bytes of the present connections from now on, as a firewall that has forgotten them."""
        self._forgotten.update(self._writers)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        async for message in requests_from(reader):
            if writer in self._forgotten:
                continue
            if message[:2] == struct.pack(">h", 18):
                self.send(frame(message, api_versions(self.versions)))
            else:
                await self.asked.put(message)
        writer.close()

    def send(self, content: bytes) -> None:
        self._writers[-1].write(content)

    def hang_up(self) -> None:
        self._writers[-1].close()

    async def next(self) -> bytes:
        async with asyncio.timeout(5):
            return await self.asked.get()


def client_of(port: int, security: Security | None = None, **options: Any) -> Client:
    return Client(
        bootstrap_servers=f"127.0.0.1:{port}",
        client_id="test",
        request_timeout_ms=2_000,
        security=security or Security(SharedSettings()),
        **options,
    )


# Connects a client to a new broker, with VERSIONS or others.
Connect = Callable[..., Awaitable[tuple[Client, Connection, Broker]]]
