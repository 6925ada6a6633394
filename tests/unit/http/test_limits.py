"""Tests that silent connections and incomplete heads are ended, and that complete requests meet no timer."""

import asyncio
import contextlib
import json
import resource
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from deploy.stack import free_port
from service.http import limits, request_reader
from service.http import server as server_module
from service.http.limits import GuardedProtocol, connections_max
from service.http.protocol import protocol_of
from service.http.request import StopSignal
from service.http.server import LingeringServer

REQUEST = b"POST /events HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody"


async def app(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(request_reader, "SILENCE_MAX_S", 0.3)
    monkeypatch.setattr(limits, "LINGERING_CLOSE_S", 1.0)
    port = free_port()
    config = uvicorn.Config(
        app,
        port=port,
        http=GuardedProtocol,
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=1,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    yield port
    server.should_exit = True
    await serving


async def ask(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send the parts with pauses between them; returns all bytes until the server closes, or for a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(1.0):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_silent_connection_is_ended(port: int) -> None:
    assert await ask(port) == b""


@pytest.mark.parametrize("sent", [REQUEST[:30], REQUEST[:-2]], ids=["head", "body"])
async def test_a_request_that_falls_silent_is_answered_408(port: int, sent: bytes) -> None:
    answer = await ask(port, sent)
    assert problem_of(answer) == (408, "request-timeout")
    assert b"nothing came for 0.3 s" in answer


def slow(pieces: int, size: int) -> list[bytes]:
    """Make a request whose body has this many pieces of this size."""
    head = b"POST /events HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (pieces * size)
    return [head, *[bytes(size)] * pieces]


async def test_a_slow_request_has_as_much_time_as_the_least_rate_gives_it(port: int) -> None:
    """Twice the time of a silent request, at twice the least rate."""
    answer = await ask(port, *slow(12, 2 * request_reader.LEAST_BYTES_S // 20), pause_s=0.05)
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_a_request_below_the_least_rate_is_answered_408(port: int) -> None:
    answer = await ask(port, *slow(16, 20), pause_s=0.05)
    assert problem_of(answer) == (408, "request-timeout")
    assert b"less than 10000 bytes a second" in answer


async def test_a_head_of_too_many_lines_is_refused(port: int) -> None:
    """Each line costs 200 bytes of memory, so that a head of 64 KiB could cost 3 MB."""
    head = b"POST /events HTTP/1.1\r\nhost: x\r\n"
    assert problem_of(await ask(port, head + 10_000 * b"a:b\r\n")) == (431, "head-too-large")
    assert problem_of(await ask(port, head + 300 * b"a:b\r\n" + b"\r\n")) == (431, "head-too-large")
    assert b" 200 " in await ask(port, head + 200 * b"a:b\r\n" + b"connection: close\r\n\r\n")


async def half_closed(port: int, sent: bytes) -> bytes:
    """Send bytes and shut the sending side; returns all that is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(2.0):
            return await reader.read()
    finally:
        writer.close()


async def test_a_client_that_sends_no_more_is_answered(port: int) -> None:
    """And its connection is closed (RFC 9112, section 9.6): `nc -N` and many proxies do so."""
    answer = await half_closed(port, REQUEST)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"body")
    assert await half_closed(port, b"") == b""
    assert (await half_closed(port, 3 * REQUEST)).count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("sent", [REQUEST[:30], REQUEST[:-2]], ids=["head", "body"])
async def test_a_client_that_closes_amid_a_request_is_answered_400(port: int, sent: bytes) -> None:
    assert problem_of(await half_closed(port, sent)) == (400, "invalid-http")
    both = await half_closed(port, REQUEST + sent)
    assert both.startswith(b"HTTP/1.1 200 ")


async def test_a_head_that_grows_is_refused(port: int) -> None:
    head = b"POST /events HTTP/1.1\r\nhost: x\r\n"
    lines = [b"x-%d: %s\r\n" % (n, b"y" * 8000) for n in range(9)]  # the last one is too much, and nothing follows
    assert problem_of(await ask(port, head, *lines, pause_s=0.01)) == (431, "head-too-large")


async def test_a_request_that_is_not_http_is_answered_400(port: int) -> None:
    assert problem_of(await ask(port, b"POST /events HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n")) == (400, "invalid-http")
    assert problem_of(await ask(port, b"NONSENSE /events HTTP/1.1\r\nhost: x\r\n\r\n")) == (400, "invalid-http")


def problem_of(answer: bytes) -> tuple[int, str]:
    """Return status and code of a whole response, which is a problem and the connection's last response."""
    head, _, body = answer.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert headers["content-type"] == "application/problem+json"
    assert (headers["connection"], headers["content-length"]) == ("close", str(len(body)))
    assert "date" in headers
    problem = json.loads(body)
    assert set(problem) == {"type", "title", "status", "detail", "code"}
    assert problem["status"] == int(first.split()[1])
    return problem["status"], problem["code"]


async def test_whole_requests_go_on_past_the_bound(port: int) -> None:
    """Also in pieces, and one after the other for longer than the bound of one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(5):
        for part in (REQUEST[:20], REQUEST[20:-2], REQUEST[-2:]):
            writer.write(part)
            await asyncio.sleep(0.04)
        async with asyncio.timeout(1.0):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(4) == b"body"
    writer.close()


@contextlib.asynccontextmanager
async def many_open(port: int, count: int) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Open connections that a server has accepted and that are idle after a response."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for reader, writer in opened:
        writer.write(REQUEST)
        await reader.readuntil(b"body")
    yield opened
    for _, writer in opened:
        writer.close()


async def test_a_connection_past_the_bound_is_answered_503_and_the_open_ones_continue(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedProtocol, "connections_max", 3)
    async with many_open(port, 3) as opened:
        for sent in (b"", REQUEST):
            answer = await ask(port, sent)
            assert problem_of(answer) == (503, "not-written")
            assert b"retry-after: 1\r\n" in answer
        reader, writer = opened.pop(0)
        writer.write(REQUEST)
        await reader.readuntil(b"body")
        writer.close()
        answer = await until_answered(port)
        assert answer.startswith(b"HTTP/1.1 200 ")


async def until_answered(port: int) -> bytes:
    """Try again after each 503, until the server has noticed that another connection was closed."""
    async with asyncio.timeout(30):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            if not head.startswith(b"HTTP/1.1 503 "):
                return head


async def test_refused_connections_that_stay_open_are_bounded_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would use a file for the time of lingering; past a few they are closed at once."""
    monkeypatch.setattr(limits, "LINGERING_CLOSE_S", 60.0)
    monkeypatch.setattr(limits, "LINGERING_MAX", 2)
    monkeypatch.setattr(GuardedProtocol, "connections_max", 1)
    async with many_open(port, 1):
        refused = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for reader, _ in refused:
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        # The server's side of the first two is still open and reads what they send; that of the others is closed.
        ended: list[bool] = []
        for _, writer in refused:
            with contextlib.suppress(ConnectionError):
                while not writer.transport.is_closing():
                    writer.write(b"x")
                    await asyncio.sleep(0.01)
                    if len(ended) < 2:
                        break
            ended.append(writer.transport.is_closing())
            writer.close()
        assert ended == [False, False, True, True]


@pytest.mark.parametrize(
    ("files", "connections"), [(1024, 768), (20_000, 15_000), (300, 150), (8, 4), (resource.RLIM_INFINITY, 786_432)]
)
def test_a_share_of_the_files_that_a_process_may_open_is_left_to_kafka_and_redis(files: int, connections: int) -> None:
    assert connections_max(files) == connections


async def test_a_stop_lets_clients_leave_by_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was idle at the signal gets its next request answered, and is then closed."""
    monkeypatch.setattr(server_module, "LINGER_S", 0.5)
    port, stopping = free_port(), StopSignal()
    protocol = protocol_of(None, stopping)
    config = uvicorn.Config(app, port=port, http=protocol, lifespan="off", log_config=None, access_log=False)
    server = LingeringServer(config, stopping)
    monkeypatch.setattr(server, "capture_signals", contextlib.nullcontext)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    await reader.readuntil(b"body")

    assert not stopping.is_set
    server.handle_exit(signal.SIGTERM, None)
    await asyncio.sleep(0.1)
    assert stopping.is_set
    writer.write(REQUEST)
    async with asyncio.timeout(2.0):
        last = await reader.read()
        assert last.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in last.lower()
        await serving
    writer.close()


# What a slow client sends at first, and in each twentieth of a second: the head of a request, a body, nothing while it
# reads none of its answer, nothing after its answer.
SLOW = {
    "head": (REQUEST[:-20], b"x"),
    "body": (REQUEST[:-2], b""),
    "reader": (REQUEST.replace(b": 4", b": 400000") + bytes(400_000 - 4), b"\n"),
    "idle": (REQUEST, b""),
}


async def slow_until_ended(port: int, kind: str) -> None:
    """Go on slowly, with small buffers in the kernel, until the server ends the connection."""
    begin, drip = SLOW[kind]
    loop = asyncio.get_running_loop()
    with socket.socket() as client, contextlib.suppress(ConnectionError):
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, begin)
        while drip:
            await asyncio.sleep(0.05)
            await loop.sock_sendall(client, drip)
        while await loop.sock_recv(client, 65_536):
            pass


async def test_slow_clients_of_every_kind_end_and_good_ones_are_answered_meanwhile(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UNREAD_MAX_S", 0.5)
    slow = [asyncio.create_task(slow_until_ended(port, kind)) for kind in SLOW for _ in range(25)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(15.0):
        answered = 0
        while not all(task.done() for task in slow):
            writer.write(REQUEST)
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (ConnectionError, asyncio.IncompleteReadError):  # on a slow machine it was idle for too long
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                continue
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(4) == b"body"
            answered += 1
            await asyncio.sleep(0.01)
    writer.close()
    assert answered > 10
    await asyncio.gather(*slow)
