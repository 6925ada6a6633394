"""Tests bodies that are read as they arrive on real connections, of both transports."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from service.http import limits, request_reader, streamed_body, streamed_response
from service.http.limits import GuardedProtocol
from service.http.protocol import DirectRoutes, protocol_of
from tests.unit.http.test_asgi import app_and_posts
from tests.unit.http.test_events import Commits
from tests.unit.http.test_streaming import line

HEAD = (
    b"POST /events/batch HTTP/1.1\r\nhost: x\r\n"
    b"content-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
)
PLAIN = b'{"events":[{"topic":"orders","value":1,"idempotency_key":"k"}]}'
BATCH = b"POST /events/batch HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(PLAIN),
    PLAIN,
)


CONNECTED: list[asyncio.StreamWriter] = []  # the clients of a test, which are closed behind it


@contextlib.asynccontextmanager
async def serving(app: FastAPI, posts: DirectRoutes | None) -> AsyncIterator[int]:
    """Serve an app on a port of its own; `posts` are those that the direct transport takes."""
    listening = socket.create_server(("127.0.0.1", 0))
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # the kernel would hold megabytes of events and results
        listening.setsockopt(socket.SOL_SOCKET, buffer, 65_536)
    config = uvicorn.Config(
        app,
        http=GuardedProtocol if posts is None else protocol_of(posts),
        lifespan="off",
        log_config=None,
        access_log=False,
        loop="uvloop",
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listening]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    yield listening.getsockname()[1]
    server.should_exit = True
    async with asyncio.timeout(5.0):
        await serving


@pytest.fixture(params=["direct", "asgi"])
async def port(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[int]:
    monkeypatch.setattr(request_reader, "SILENCE_MAX_S", 1.0)
    monkeypatch.setattr(streamed_body, "SILENCE_MAX_S", 0.5)
    monkeypatch.setattr(limits, "UNREAD_MAX_S", 1.0)
    monkeypatch.setattr(streamed_response, "UNREAD_MAX_S", 1.0)
    app, posts = app_and_posts(Commits())
    direct = DirectRoutes(posts.routes, posts.guard.body_bytes_max, posts.guard.bodies, posts.streamed)
    async with serving(app, direct if request.param == "direct" else None) as port:
        yield port
        for writer in CONNECTED:
            writer.transport.abort()
        await asyncio.sleep(0)  # for the transports to be closed
        CONNECTED.clear()
    assert posts.guard.bodies.bytes == 0


class Client:
    """A connection that streams lines in chunks, each call a chunk."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, reads: bool = True) -> "Client":
        connection = socket.create_connection(("127.0.0.1", port))
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, buffer, 65_536)
        connection.setblocking(False)
        limit = 2**24 if reads else 2**16  # the stream reads on until it has twice as much
        client = cls(*await asyncio.open_connection(sock=connection, limit=limit))
        CONNECTED.append(client.writer)
        return client

    def say(self, body: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(body), body) if body else b"0\r\n\r\n")

    def break_off(self, then: bytes) -> None:
        """Send bytes that are no chunk, or, without any, the end of the connection's input."""
        if then:
            self.writer.write(then)
        else:
            self.writer.write_eof()

    async def head(self) -> bytes:
        async with asyncio.timeout(5.0):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def chunk(self) -> bytes:
        """Read a chunk of the response; empty at its end."""
        async with asyncio.timeout(5.0):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def results(self) -> list[dict[str, Any]]:
        """Read the response to its end."""
        body = b""
        while piece := await self.chunk():
            body += piece
        return [json.loads(text) for text in body.splitlines()]

    async def rest(self) -> bytes:
        async with asyncio.timeout(5.0):
            return await self.reader.read()


async def test_lines_and_results_alternate_and_the_next_request_follows(port: int) -> None:
    client = await Client.connect(port)
    client.writer.write(HEAD)
    for n in range(3):
        client.say(line(n))
        if n == 0:
            head = await client.head()
            assert head.startswith(b"HTTP/1.1 207 ")
            assert b"transfer-encoding: chunked" in head
            assert b"connection: close" not in head
        assert json.loads(await client.chunk())["status"] == 201
    client.say(b"")
    client.writer.write(BATCH + HEAD)
    client.say(line(1))
    client.say(b"")
    assert await client.chunk() == b""
    assert (await client.head()).startswith(b"HTTP/1.1 207 ")
    assert (await client.reader.readuntil(b"]}")).startswith(b'{"results":[{"status":201,')
    await client.head()
    assert [result["status"] for result in await client.results()] == [201]


async def test_a_client_may_send_many_events_before_it_reads(port: int) -> None:
    """As most libraries do: they would never get on if no more were read while the results wait for them."""
    client = await Client.connect(port, reads=False)
    client.writer.write(HEAD)
    for start in range(0, 10_000, 500):
        client.say(b"".join([line(n, "x" * 500) for n in range(start, start + 500)]))
        async with asyncio.timeout(5.0):
            await client.writer.drain()
    client.say(b"")
    await client.head()
    results = await client.results()
    assert [result["status"] for result in results] == [201] * 10_000


async def test_a_client_that_never_reads_is_cut(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_response, "UNREAD_BYTES_MAX", 100_000)
    client = await Client.connect(port, reads=False)
    client.writer.write(HEAD)
    part = b"".join(map(line, range(500)))
    with pytest.raises(ConnectionError):  # noqa: PT012
        async with asyncio.timeout(10.0):
            for _ in range(10_000):
                client.say(part)
                await client.writer.drain()


@pytest.mark.parametrize("then", [b"no chunk\r\n", b""])
async def test_a_body_that_breaks_off_cuts_its_response(port: int, then: bytes) -> None:
    """A problem of its own would stand amid the response."""
    client = await Client.connect(port)
    client.writer.write(HEAD)
    client.say(line(1))
    await client.head()
    assert json.loads(await client.chunk())["status"] == 201
    client.break_off(then)
    assert await client.rest() == b""


@pytest.mark.parametrize("then", [b"no chunk\r\n", b""])
async def test_a_body_that_breaks_off_before_the_response_gets_none(
    port: int, monkeypatch: pytest.MonkeyPatch, then: bytes
) -> None:
    """A problem would say that nothing was written, but what came before is written."""
    monkeypatch.setattr(streamed_body, "WINDOW_LINGER_S", 0.3)
    monkeypatch.setattr(streamed_body, "WINDOW_S", 0.3)
    client = await Client.connect(port)
    client.writer.write(HEAD)
    client.say(line(1))
    await asyncio.sleep(0.1)
    client.break_off(then)
    assert await client.rest() == b""


async def test_a_response_may_begin_later_than_a_whole_request_may_be_silent(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the caller is over its rate: 408 would say that nothing was written."""
    monkeypatch.setattr(streamed_body, "WINDOW_LINGER_S", 1.5)
    monkeypatch.setattr(streamed_body, "WINDOW_S", 1.5)
    client = await Client.connect(port)
    client.writer.write(HEAD)
    client.say(line(1))
    assert (await client.head()).startswith(b"HTTP/1.1 207 ")
    assert [result["status"] for result in await client.results()] == [201, 408]


async def test_a_client_that_falls_silent_is_told_so_in_a_whole_response(port: int) -> None:
    client = await Client.connect(port)
    client.writer.write(HEAD)
    client.say(line(1))
    await client.head()
    for _ in range(5):  # longer than a whole request may be silent, or trickle
        await asyncio.sleep(0.3)
        client.say(b"\n")
    results = await client.results()
    assert [result["status"] for result in results] == [201, 408]


async def test_a_client_that_sends_nothing_is_refused_as_for_any_request(port: int) -> None:
    client = await Client.connect(port)
    client.writer.write(HEAD)
    assert (await client.head()).startswith(b"HTTP/1.1 408 ")


async def test_the_client_is_told_to_send_the_body_that_it_asks_about(port: int) -> None:
    client = await Client.connect(port)
    client.writer.write(HEAD.replace(b"host: x", b"host: x\r\nexpect: 100-continue"))
    assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.say(line(1))
    client.say(b"")
    assert (await client.head()).startswith(b"HTTP/1.1 207 ")
