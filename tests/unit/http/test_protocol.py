"""Tests POSTs below ASGI: bodies in parts, responses in order, and clients that disconnect in between."""

import asyncio
import contextlib
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from deploy.stack import free_port
from service.http import asgi, limits, protocol, request_reader
from service.http import request as request_module
from service.http.asgi import AsgiEndpoint
from service.http.limits import GuardedProtocol
from service.http.protocol import DirectProtocol, DirectRoutes, HttpRequest, protocol_of
from service.http.request import Bodies, Handler, PostRequest
from tests.unit.fakes import until

BODY_BYTES_MAX = 1000
BODIES_BYTES_MAX = 1900  # of all connections, beyond the own bytes of each
OWN_BYTES = 100
LONG_BYTES = 20_000_000


only_direct = pytest.mark.parametrize("server", ["direct"], indirect=True)


class KeptRequests:
    """Keeps requests until the test answers them; `/now` is answered at once, with its own body."""

    def __init__(self) -> None:
        self.posts: list[PostRequest] = []
        self.finished: list[str] = []
        self.bodies = Bodies(BODIES_BYTES_MAX)

    def later(self, post: PostRequest) -> None:
        self.posts.append(post)

    def now(self, post: PostRequest) -> None:
        post.answer(503 if post.body_was_dropped else 201, b"x-size: %d\r\n" % post.size, post.body)

    def long(self, post: PostRequest) -> None:
        assert post.hold_response(LONG_BYTES)
        post.answer(201, b"", bytes(LONG_BYTES))

    def names(self, post: PostRequest) -> None:
        post.answer(201, b"", b" ".join(name for name, _ in post.headers))

    def apart(self, post: PostRequest) -> None:
        async def work() -> None:
            await asyncio.sleep(0.3)  # longer than uvicorn takes to notice that it must stop
            self.finished.append(post.body.decode())
            post.answer(201, b"", b"late")

        post.run_in_task(work())

    async def waiting(self, count: int) -> list[PostRequest]:
        async with asyncio.timeout(2.0):
            while len(self.posts) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return self.posts


LEFT = set[str]()  # paths whose client's disconnect the app has seen


async def app(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if scope["path"] == "/waits":
        assert (await receive())["type"] == "http.disconnect"
        LEFT.add(scope["path"])
        return
    text = f"{scope['method']} {scope['path']} ".encode() + body
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


@pytest.fixture
def kept() -> KeptRequests:
    return KeptRequests()


def by_asgi(routes: dict[bytes, Handler], bodies: Bodies) -> Any:
    """Make the app with the handlers as its own endpoints."""
    endpoints = {path.decode(): AsgiEndpoint(handler, BODY_BYTES_MAX, bodies) for path, handler in routes.items()}

    async def routed(scope: Any, receive: Any, send: Any) -> None:
        endpoint = endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        await (endpoint or app)(scope, receive, send)

    return routed


@pytest.fixture(params=["direct", "asgi"])
async def server(
    kept: KeptRequests, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[uvicorn.Server]:
    monkeypatch.setattr(request_reader, "SILENCE_MAX_S", 1.0)
    monkeypatch.setattr(limits, "UNREAD_MAX_S", 1.0)
    monkeypatch.setattr(limits, "LINGERING_CLOSE_S", 0.1)
    for module in (request_module, protocol):
        monkeypatch.setattr(module, "OWN_BYTES", OWN_BYTES)
    routes: dict[bytes, Handler] = {
        b"/later": kept.later,
        b"/now": kept.now,
        b"/apart": kept.apart,
        b"/names": kept.names,
        b"/long": kept.long,
    }
    bodies = kept.bodies
    direct = request.param == "direct"
    config = uvicorn.Config(
        app if direct else by_asgi(routes, bodies),
        port=free_port(),
        http=protocol_of(DirectRoutes(routes, BODY_BYTES_MAX, bodies)) if direct else GuardedProtocol,
        lifespan="off",
        log_config=None,
        access_log=False,
        loop="uvloop",
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    yield server
    server.should_exit = True
    while not serving.done():
        for one in kept.posts:  # as their deadline would: a client that is gone may only have shut its sending side
            one.answer(503, b"", b"")
        await asyncio.wait([serving], timeout=0.05)
    await serving


class Caller:
    """One connection, driven by the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: uvicorn.Server) -> None:
        self.reader = reader
        self.writer = writer
        self.server = server

    async def say(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0.02)

    def reset(self) -> None:
        """Reset the connection: a client that only shuts its sending side waits for the answers."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    async def hear(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(2.0):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(first.split()[1]), headers, body


@pytest.fixture
async def caller(server: uvicorn.Server) -> AsyncIterator[Caller]:
    async with another(server) as caller:
        yield caller


@contextlib.asynccontextmanager
async def another(server: uvicorn.Server) -> AsyncIterator[Caller]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.config.port)
    await asyncio.sleep(0)
    yield Caller(reader, writer, server)
    writer.close()


def post(path: bytes, body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"POST %b HTTP/%b" % (path, version), b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def test_an_answer_has_a_date_its_own_headers_and_its_length(caller: Caller) -> None:
    await caller.say(post(b"/now", b"hello"))
    status, headers, body = await caller.hear()
    assert (status, headers["x-size"], headers["content-length"], body) == (201, "5", "5", b"hello")
    assert headers["date"].endswith("GMT")
    assert "connection" not in headers


async def test_a_body_in_parts_and_in_chunks(caller: Caller) -> None:
    whole = post(b"/now", b"0123456789")
    await caller.say(*(whole[i : i + 7] for i in range(0, len(whole), 7)))
    assert (await caller.hear())[2] == b"0123456789"
    await caller.say(
        b"POST /now HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"
    )
    assert (await caller.hear())[2] == b"abcde"
    await caller.say(post(b"/now", b""))
    assert (await caller.hear())[2] == b""


CHUNKED = b"POST /%b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"


async def test_trailers_are_no_headers(caller: Caller) -> None:
    """RFC 9110, section 6.5.1: code that reads the head must have seen all headers that count."""
    await caller.say(CHUNKED % b"names" + b"authorization: Bearer other\r\nidempotency-key: other\r\n\r\n")
    assert (await caller.hear())[2] == b"host transfer-encoding"
    await caller.say(CHUNKED % b"elsewhere" + b"x: y\r\n\r\n", post(b"/now", b"next"))
    assert [(await caller.hear())[2] for _ in range(2)] == [b"POST /elsewhere a", b"next"]


@pytest.mark.parametrize("end", [b"\r\n", b""], ids=["many trailers", "one that never ends"])
@pytest.mark.parametrize("path", [b"now", b"elsewhere"])
async def test_trailers_that_grow_are_refused(caller: Caller, path: bytes, end: bytes) -> None:
    await caller.say(CHUNKED % path + b"x: ", *[b"y" * 8_000 + end + (b"x: " if end else b"")] * 9)
    status, headers, body = await caller.hear()
    assert (status, headers["connection"]) == (431, "close")
    assert b"head-too-large" in body


async def test_trailers_behind_an_answer_end_the_connection_without_another(caller: Caller) -> None:
    whole = b"POST /now HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n7d0\r\n%b\r\n0\r\n" % (b"b" * 2000)
    await caller.say(whole)  # more than is accepted, and so answered before its end
    assert (await caller.hear())[0] == 201
    await caller.say(*[b"x: " + b"y" * 8_000 + b"\r\n"] * 9)
    assert await caller.reader.read() == b""


async def test_a_target_with_a_query_or_in_absolute_form_is_served_by_its_path(caller: Caller) -> None:
    for target in (b"/now?a=b", b"http://host:1/now"):
        await caller.say(post(target, b"1"))
        assert (await caller.hear())[0] == 201


UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_request_to_upgrade_is_served_in_http_1_1(caller: Caller, size: int) -> None:
    """Java's own client asks for HTTP/2 in each request. The body is not taken for another request."""
    inner = post(b"/now", b"smuggled")
    chunked = b"POST /now HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: upgrade\r\nupgrade: x\r\n"
    whole = [
        post(b"/now", inner, *UPGRADE),
        post(b"/app", b"body", *UPGRADE),
        chunked + b"\r\n3\r\nabc\r\n0\r\n\r\n",
        post(b"/now", b"", *UPGRADE),
        post(b"/names", b"", *UPGRADE, b"last: 1"),
        post(b"/now", b"plain"),
    ]
    text = b"".join(whole)
    heard = asyncio.create_task(_hear_all(caller, len(whole)))
    for at in range(0, len(text), size):
        caller.writer.write(text[at : at + size])
        await asyncio.sleep(0)
    assert await heard == [inner, b"POST /app body", b"abc", b"", b"host content-length connection last", b"plain"]


async def _hear_all(caller: Caller, count: int) -> list[bytes]:
    return [(await caller.hear())[2] for _ in range(count)]


async def test_an_upgrade_header_leaves_an_http_1_0_request_at_its_version(caller: Caller) -> None:
    await caller.say(post(b"/now", b"x", *UPGRADE, version=b"1.0"))
    status, headers, body = await caller.hear()
    assert (status, headers["connection"], body) == (201, "close", b"x")


async def test_the_length_of_a_head_is_bounded_however_it_is_cut(caller: Caller, kept: KeptRequests) -> None:
    lines = [b"x-%d: %b" % (n, b"y" * 8000) for n in range(9)]
    await caller.say(post(b"/later", b"x" * 500, *lines[:8]), post(b"/later", b"x", *lines) + post(b"/later", b"x"))
    (first,) = await kept.waiting(1)
    await asyncio.sleep(0.05)
    assert kept.posts == [first], "what comes behind a head that is refused was taken"
    assert first.body == b"x" * 500


async def test_a_head_that_is_too_long_is_refused_although_it_came_at_once(caller: Caller) -> None:
    await caller.say(post(b"/now", b"x", b"x: " + b"y" * 70_000))
    status, headers, _ = await caller.hear()
    assert (status, headers["connection"]) == (431, "close")


async def test_blank_lines_between_requests_never_become_a_head_that_is_too_long(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may send one after each request (RFC 9112, section 2.2), for as long as its connection lasts."""
    monkeypatch.setattr(request_reader, "HEAD_BYTES_MAX", 100)
    for _ in range(60):
        caller.writer.write(b"POST /now HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx")
        assert (await caller.hear())[0] == 201
        caller.writer.write(b"\r\n")
        await asyncio.sleep(0.002)


async def test_the_arrival_of_a_request_is_the_time_of_its_last_byte(caller: Caller, kept: KeptRequests) -> None:
    """The deadline begins then, however slowly the request was sent."""
    whole = post(b"/later", b"12")
    await caller.say(whole[:-1])
    await asyncio.sleep(0.2)
    before = time.monotonic()
    await caller.say(whole[-1:])
    (one,) = await kept.waiting(1)
    assert one.arrived >= before


async def test_requests_for_other_routes_or_methods_go_to_the_app(caller: Caller) -> None:
    await caller.say(post(b"/other", b"body"), b"GET /now HTTP/1.1\r\nhost: x\r\n\r\n", post(b"/now", b"mine"))
    assert (await caller.hear())[2] == b"POST /other body"
    assert (await caller.hear())[2] == b"GET /now "
    assert (await caller.hear())[2] == b"mine"


async def test_pipelined_requests_are_answered_in_their_order(caller: Caller, kept: KeptRequests) -> None:
    """Also if the app handles one of them, and if the last could have been answered first."""
    await caller.say(post(b"/later", b"1") + post(b"/other", b"2") + post(b"/later", b"3") + post(b"/now", b"4"))
    (first,) = await kept.waiting(1)
    await asyncio.sleep(0.05)
    assert len(kept.posts) == 1, "the third was begun before the first was answered"
    first.answer(201, b"", b"one")
    assert (await caller.hear())[2] == b"one"
    assert (await caller.hear())[2] == b"POST /other 2"
    (await kept.waiting(2))[1].answer(201, b"", b"three")
    assert (await caller.hear())[2] == b"three"
    assert (await caller.hear())[2] == b"4"


async def test_a_pipelined_request_waits_for_the_one_before_it_though_the_first_was_answered_at_once(
    caller: Caller, kept: KeptRequests
) -> None:
    """The first is answered before the second is read, and its response is written after that."""
    await caller.say(post(b"/now", b"1") + post(b"/later", b"2") + post(b"/now", b"3"))
    assert (await caller.hear())[2] == b"1"
    (second,) = await kept.waiting(1)
    await asyncio.sleep(0.05)
    second.answer(201, b"", b"two")
    assert (await caller.hear())[2] == b"two"
    assert (await caller.hear())[2] == b"3"


@only_direct  # by ASGI the answer comes later, and the connection ends without it
async def test_a_request_is_answered_though_what_follows_it_is_no_http(caller: Caller) -> None:
    await caller.say(post(b"/now", b"1") + b"no request\r\n\r\n")
    assert (await caller.hear())[2] == b"1"
    assert (await caller.hear())[0] == 400


async def test_a_body_is_not_kept_past_its_limit(caller: Caller) -> None:
    """It is handed over as soon as it is too long, which its size shows."""
    head = post(b"/now", b"x" * 5000)
    await caller.say(head[:2000])
    status, headers, body = await caller.hear()
    assert (status, body) == (201, b"")
    assert int(headers["x-size"]) > BODY_BYTES_MAX
    await caller.say(head[2000:], post(b"/now", b"next"))
    assert (await caller.hear())[2] == b"next"


async def test_a_body_whose_content_length_is_too_large_is_not_waited_for(caller: Caller) -> None:
    whole = post(b"/now", b"x" * 5000)
    await caller.say(whole[:-5000])
    status, headers, body = await caller.hear()
    assert (status, headers["x-size"], body) == (201, "5000", b"")
    await caller.say(whole[-5000:], post(b"/now", b"next"))
    assert (await caller.hear())[2] == b"next"


async def test_a_client_that_expects_100_continue_for_a_too_long_body_gets_no_100_and_is_closed(
    caller: Caller, kept: KeptRequests
) -> None:
    """It may leave the body out, and following bytes would be taken for the body, so the connection ends."""
    whole = post(b"/now", b"x" * 5000, b"expect: 100-continue")
    await caller.say(post(b"/later", b"1") + whole[:-5000])
    (await kept.waiting(1))[0].answer(201, b"", b"one")
    assert (await caller.hear())[2] == b"one"
    status, headers, _ = await caller.hear()
    assert (status, headers["x-size"], headers["connection"]) == (201, "5000", "close")
    assert await caller.reader.read() == b""


async def test_bodies_that_come_slowly_have_a_bound_together(server: uvicorn.Server, caller: Caller) -> None:
    """Otherwise many connections could use all memory before any caller is checked."""
    large, small = post(b"/now", b"x" * BODY_BYTES_MAX), post(b"/now", b"y" * OWN_BYTES)
    slow = [await asyncio.open_connection("127.0.0.1", server.config.port) for _ in range(2)]
    for _, writer in slow:
        writer.write(large[:-200])
    await caller.say(large[:-200])
    status, _, body = await caller.hear()
    assert (status, body) == (503, b"")
    await caller.say(large[-200:], small)
    assert (await caller.hear())[0] == 201
    first, second = slow
    first[1].close()  # it has disconnected; the other is answered
    second[1].write(large[-200:])
    assert (await Caller(*second, server).hear())[0] == 201
    for _ in range(3):
        await caller.say(large[:-1], large[-1:])
        assert (await caller.hear())[0] == 201
    second[1].close()


@only_direct  # of a request that waits for another, uvicorn itself reads at most 64 KiB
async def test_an_unread_body_behind_a_waiting_request_counts_against_the_bound(
    server: uvicorn.Server, caller: Caller, kept: KeptRequests
) -> None:
    large = b"x" * BODY_BYTES_MAX
    _, writer = await asyncio.open_connection("127.0.0.1", server.config.port)
    writer.write(post(b"/later", b"1") + post(b"/later", large)[:-1])
    await kept.waiting(1)
    await caller.say(post(b"/now", large))
    assert (await caller.hear())[0] == 503
    kept.posts[0].answer(201, b"", b"")  # until then nothing more is read, and the connection does not count as silent
    async with asyncio.timeout(3.0):
        while len(server.server_state.connections) > 1:  # noqa: ASYNC110 - it is ended for its silence
            await asyncio.sleep(0.02)
    await caller.say(post(b"/now", large))
    assert (await caller.hear())[0] == 201
    writer.close()


async def test_a_client_that_expects_100_continue_gets_it(caller: Caller) -> None:
    whole = post(b"/now", b"body", b"expect: 100-continue")
    await caller.say(whole[:-4])
    assert (await caller.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    await caller.say(whole[-4:])
    assert (await caller.hear())[2] == b"body"


async def test_http_1_0_knows_of_no_going_ahead(caller: Caller) -> None:
    """RFC 9110, section 10.1.1: such a client would take the 100 for the response."""
    whole = post(b"/now", b"body", b"expect: 100-continue", version=b"1.0")
    await caller.say(whole[:-4], whole[-4:])
    status, _, body = await caller.hear()
    assert (status, body) == (201, b"body")


async def test_the_last_request_of_a_connection(server: uvicorn.Server, caller: Caller) -> None:
    await caller.say(post(b"/now", b"1", b"connection: close"))
    status, headers, _ = await caller.hear()
    assert (status, headers["connection"]) == (201, "close")
    assert await caller.reader.read() == b""

    reader, writer = await asyncio.open_connection("127.0.0.1", server.config.port)
    old = Caller(reader, writer, server)
    await old.say(post(b"/now", b"1", version=b"1.0"))
    assert (await old.hear())[1]["connection"] == "close"
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    "garbage", [b"\0", b"GET /other HTTP/1.1\r\nno colon\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 160_000]
)
async def test_garbage_behind_a_waiting_request_gets_no_answer(
    caller: Caller, kept: KeptRequests, garbage: bytes
) -> None:
    """A refusal would say that its key is not used, and it may be written."""
    await caller.say(post(b"/later", b"1"), garbage[:80_000], garbage[80_000:])
    await kept.waiting(1)
    async with asyncio.timeout(2.0):
        with contextlib.suppress(ConnectionResetError):
            assert await caller.reader.read() == b""


async def test_the_app_gets_a_disconnect_when_a_client_goes_away_with_pipelined_requests(caller: Caller) -> None:
    """uvicorn notifies only the last of them. The app's later response would then raise an exception in the log."""
    LEFT.clear()
    await caller.say(b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n" + post(b"/later", b"1"))
    caller.reset()
    async with asyncio.timeout(2.0):
        while not LEFT:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_request_whose_client_went_away_is_answered_without_an_error(
    caller: Caller, kept: KeptRequests
) -> None:
    await caller.say(post(b"/later", b"1"))
    (gone,) = await kept.waiting(1)
    caller.reset()
    await asyncio.sleep(0.05)
    assert not caller.server.server_state.connections
    gone.answer(201, b"", b"nobody hears this")


async def test_an_answer_is_given_once(caller: Caller, kept: KeptRequests) -> None:
    await caller.say(post(b"/later", b"1"))
    (one,) = await kept.waiting(1)
    one.answer(201, b"", b"first")
    one.answer(500, b"", b"second")
    assert (await caller.hear())[2] == b"first"
    await caller.say(post(b"/now", b"x"))
    assert (await caller.hear())[2] == b"x"


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(server: uvicorn.Server, caller: Caller) -> None:
    server.config.timeout_keep_alive = 1
    reader, writer = await asyncio.open_connection("127.0.0.1", server.config.port)
    busy = Caller(reader, writer, server)
    started = asyncio.get_running_loop().time()
    for _ in range(6):
        await busy.say(post(b"/now", b"x"))
        await busy.hear()
        await asyncio.sleep(0.25)
    assert asyncio.get_running_loop().time() - started > 1.5
    async with asyncio.timeout(3.0):
        assert await reader.read() == b""
    writer.close()


@only_direct
async def test_the_keep_alive_timer_is_set_again_for_a_connection_that_was_not_idle(caller: Caller) -> None:
    """Otherwise a connection whose request is answered before its body is complete would never be closed."""
    whole = post(b"/now", b"x" * 5000)
    await caller.say(whole[:-1])
    assert (await caller.hear())[0] == 201
    connection = next(iter(caller.server.server_state.connections))
    assert isinstance(connection, DirectProtocol)
    connection.timeout_keep_alive_handler()
    assert connection.timeout_keep_alive_task is not None


async def test_a_connection_that_is_idle_after_pipelined_requests_is_closed(server: uvicorn.Server) -> None:
    server.config.timeout_keep_alive = 1
    reader, writer = await asyncio.open_connection("127.0.0.1", server.config.port)
    caller = Caller(reader, writer, server)
    for _ in range(2):  # the timer runs when the second burst comes
        await caller.say(3 * post(b"/now", b"x"))
        assert [(await caller.hear())[0] for _ in range(3)] == [201] * 3
    async with asyncio.timeout(3.0):
        assert await reader.read() == b""
    writer.close()


@only_direct
async def test_the_keep_alive_timer_ends_with_its_connection(caller: Caller) -> None:
    await caller.say(post(b"/now", b"x"))
    assert (await caller.hear())[0] == 201
    connection = next(iter(caller.server.server_state.connections))
    assert isinstance(connection, DirectProtocol)
    timer = connection.timeout_keep_alive_task
    assert timer is not None
    connection.connection_lost(ConnectionResetError())
    assert timer.cancelled()


@contextlib.asynccontextmanager
async def narrow(server: uvicorn.Server) -> AsyncIterator[socket.socket]:
    """A connection whose client reads little at a time, and only when the test says so."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.config.port))
        yield client


@only_direct
async def test_a_long_answer_is_written_in_slices_between_which_other_tasks_run(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = 0
    written: list[tuple[int, int]] = []  # the turn of the loop, and the bytes
    write = DirectProtocol.write

    def seen(self: DirectProtocol, request: Any, content: bytes | memoryview) -> bool:
        written.append((turn, len(content)))
        return write(self, request, content)

    monkeypatch.setattr(DirectProtocol, "write", seen)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await caller.say(post(b"/long", b"") + post(b"/now", b"next"))
    assert (await caller.hear())[2] == bytes(LONG_BYTES)
    assert (await caller.hear())[2] == b"next"
    counting.cancel()
    slices = [each for each in written if each[1] > 1_000]
    assert max(size for _, size in slices) <= request_module.WRITE_BYTES
    assert len({turn for turn, _ in slices}) == len(slices) == -(-LONG_BYTES // request_module.WRITE_BYTES)


@only_direct
async def test_the_answer_to_the_only_request_is_written_at_once(caller: Caller, kept: KeptRequests) -> None:
    await caller.say(post(b"/later", b"1"))
    (only,) = await kept.waiting(1)
    only.answer(201, b"", b"1")
    assert isinstance(only, HttpRequest)
    assert only.response_complete
    assert (await caller.hear())[2] == b"1"


@only_direct
async def test_answers_are_written_together_while_several_requests_wait(caller: Caller, kept: KeptRequests) -> None:
    async with another(caller.server) as other:
        await caller.say(post(b"/later", b"1"))
        await other.say(post(b"/later", b"2"))
        for one in await kept.waiting(2):
            one.answer(201, b"", one.body)
        assert not any(isinstance(one, HttpRequest) and one.response_complete for one in kept.posts)
        assert [(await each.hear())[2] for each in (caller, other)] == [b"1", b"2"]
        await caller.say(post(b"/later", b"3"))
        *_, only = await kept.waiting(3)
        only.answer(201, b"", b"3")
        assert isinstance(only, HttpRequest)
        assert only.response_complete, "the others have their answers"


@only_direct
async def test_a_refusal_comes_after_all_slices_of_the_answer_before_it(caller: Caller) -> None:
    protocol = next(iter(caller.server.server_state.connections))
    assert isinstance(protocol, DirectProtocol)
    protocol.data_received(post(b"/long", b""))
    await asyncio.sleep(0)  # the first slice is written
    protocol.data_received(b"no request\r\n\r\n")
    assert (await caller.hear())[2] == bytes(LONG_BYTES)
    assert (await caller.hear())[0] == 400


@pytest.mark.parametrize("rest", [b"", b"POST /no"])
async def test_a_client_that_does_not_read_its_answers_is_no_longer_read_and_is_closed(
    server: uvicorn.Server, rest: bytes
) -> None:
    """Neither its responses nor its connection may stay in the service."""
    server.config.timeout_keep_alive = 1
    loop = asyncio.get_running_loop()
    async with narrow(server) as client:
        many, sent = post(b"/now", b"x" * BODY_BYTES_MAX) * 1000, 0
        with contextlib.suppress(TimeoutError):
            while sent < 60:
                async with asyncio.timeout(0.7):
                    await loop.sock_sendall(client, many)
                sent += 1
        assert sent < 60
        with contextlib.suppress(BlockingIOError):
            client.send(rest)
        (connection,) = server.server_state.connections
        assert connection.transport.get_write_buffer_size() < 4_000_000
        async with asyncio.timeout(10.0):
            while server.server_state.connections:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.05)


async def test_a_long_answer_is_in_memory_only_as_far_as_it_is_counted(
    server: uvicorn.Server, kept: KeptRequests
) -> None:
    """What the transport has is not: a client that reads nothing must not get the rest of the answer into it."""
    loop = asyncio.get_running_loop()
    async with narrow(server) as client:
        await loop.sock_sendall(client, post(b"/long", b""))
        async with asyncio.timeout(5.0):
            await loop.sock_recv(client, 1)
            await asyncio.sleep(0.3)
        (connection,) = server.server_state.connections
        assert connection.transport.get_write_buffer_size() <= 3 * request_module.WRITE_BYTES
        assert kept.bodies.unread == LONG_BYTES - OWN_BYTES
        heard = 1
        while heard < LONG_BYTES:
            heard += len(await loop.sock_recv(client, 1 << 20))
    await until(lambda: kept.bodies.unread == 0)


async def test_a_long_answer_counts_no_more_when_its_client_has_gone(caller: Caller, kept: KeptRequests) -> None:
    await caller.say(post(b"/long", b""))
    caller.reset()
    await until(lambda: kept.bodies.unread == 0)


async def test_a_client_that_reads_a_long_answer_below_the_least_rate_is_closed(
    server: uvicorn.Server, kept: KeptRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (protocol, asgi):
        monkeypatch.setattr(module, "reading_time_s", lambda size: size / LONG_BYTES / 2)
    loop = asyncio.get_running_loop()
    async with narrow(server) as client, asyncio.timeout(10.0):
        await loop.sock_sendall(client, post(b"/long", b""))
        heard = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := await loop.sock_recv(client, 4096):
                heard += len(piece)
                await asyncio.sleep(0.001)
        assert 0 < heard < LONG_BYTES
    assert kept.bodies.unread == 0


async def test_requests_behind_a_long_answer_are_not_read_as_it_is_written(server: uvicorn.Server) -> None:
    """Each slice that the client reads would let in some more of them."""
    loop = asyncio.get_running_loop()
    async with narrow(server) as client:
        await loop.sock_sendall(client, post(b"/long", b""))

        async def send_on() -> None:
            while True:
                await loop.sock_sendall(client, post(b"/now", b"x" * 100) * 1_000)

        sending = asyncio.create_task(send_on())
        heard = 0
        while heard < LONG_BYTES // 2:
            heard += len(await loop.sock_recv(client, 1 << 16))
        (connection,) = server.server_state.connections
        assert isinstance(connection, GuardedProtocol)
        assert len(connection.reader.unread) < 1_000_000
        sending.cancel()
        await asyncio.wait([sending])


async def test_a_client_that_reads_slowly_gets_the_whole_answer(
    server: uvicorn.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than an idle connection is kept."""
    monkeypatch.setattr(limits, "UNREAD_MAX_S", 60.0)  # on a busy machine the client may read nothing for a second
    server.config.timeout_keep_alive = 1
    loop = asyncio.get_running_loop()
    async with narrow(server) as client:
        await loop.sock_sendall(client, post(b"/long", b""))
        await asyncio.sleep(0.1)
        await loop.sock_sendall(client, post(b"/now", b"next"))  # nothing of it is read meanwhile
        heard = 0
        until = loop.time() + 3.0
        while heard < LONG_BYTES:
            piece = await loop.sock_recv(client, 65536)
            assert piece, f"cut after {heard} bytes"
            heard += len(piece)
            if loop.time() < until:
                await asyncio.sleep(0.1)
        while not piece.endswith(b"next"):
            piece = await loop.sock_recv(client, 65536)
            assert piece, "the next request was lost"


async def test_a_stop_waits_for_the_requests_under_way(
    server: uvicorn.Server, caller: Caller, kept: KeptRequests
) -> None:
    await caller.say(post(b"/apart", b"work"))
    server.should_exit = True
    status, headers, body = await caller.hear()
    assert (status, headers["connection"], body) == (201, "close", b"late")
    assert kept.finished == ["work"]


async def test_a_client_that_sends_no_more_is_answered(caller: Caller, kept: KeptRequests) -> None:
    """All that it has sent is answered, in order, and then its connection is closed (RFC 9112, section 9.6)."""
    caller.writer.write(post(b"/later", b"1") + post(b"/now", b"2") + b"GET /3 HTTP/1.1\r\nhost: x\r\n\r\n")
    caller.writer.write_eof()
    (first,) = await kept.waiting(1)
    await asyncio.sleep(0.05)
    first.answer(201, b"", b"1")
    assert [(await caller.hear())[2] for _ in range(3)] == [b"1", b"2", b"GET /3 "]
    async with asyncio.timeout(2.0):
        assert await caller.reader.read() == b""


async def test_a_body_in_tiny_pieces_has_its_own_size_in_memory(caller: Caller, kept: KeptRequests) -> None:
    """An object for each piece would take 24 times the memory."""
    pieces = BODY_BYTES_MAX // 2
    head = b"POST /later HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    await caller.say(head + pieces * b"2\r\nab\r\n" + b"0\r\n\r\n")
    (whole,) = await kept.waiting(1)
    assert sys.getsizeof(whole._content) < 2 * BODY_BYTES_MAX
    assert whole.body == pieces * b"ab"


@only_direct
@pytest.mark.parametrize("kind", ["chunks", "requests"])
async def test_a_large_read_is_parsed_in_slices(caller: Caller, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 KiB may be 40,000 chunks of a body, or 3,000 requests: between slices other tasks run."""
    monkeypatch.setattr(limits, "PARSE_MAX_S", 0.0)
    head = b"POST /now HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    sent = head + 40_000 * b"1\r\na\r\n" if kind == "chunks" else 3_000 * post(b"/now", b"x", b"via: x")
    protocol = next(iter(caller.server.server_state.connections))
    assert isinstance(protocol, DirectProtocol)
    protocol.data_received(sent)
    assert len(protocol.reader.unread) == len(sent) - request_reader.SLICE_BYTES
    async with asyncio.timeout(5.0):
        while protocol.reader.unread:
            assert len(protocol.pipeline) < 1_000
            await asyncio.sleep(0)


@only_direct
async def test_after_a_large_read_other_tasks_run_before_the_next_read(caller: Caller) -> None:
    """Also while the body of a refused request is dropped."""
    protocol = next(iter(caller.server.server_state.connections))
    assert isinstance(protocol, DirectProtocol)
    protocol.data_received(b"POST /now HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
    assert protocol.transport.is_reading()
    protocol.data_received(limits.READ_BYTES * b"x")
    assert not protocol.transport.is_reading()
    await asyncio.sleep(0)
    assert protocol.transport.is_reading()


@only_direct
async def test_pipelined_requests_that_are_answered_at_once_are_read_one_slice_a_turn(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn of the loop reads one slice at most, however many requests of the last slice are answered."""
    monkeypatch.setattr(limits, "PARSE_MAX_S", 0.0)
    protocol = next(iter(caller.server.server_state.connections))
    assert isinstance(protocol, DirectProtocol)
    protocol.data_received(3_000 * post(b"/now", b"x", b"via: x"))
    unread = len(protocol.reader.unread)
    read: list[int] = []
    while sum(read) < 2 * request_reader.SLICE_BYTES:
        await asyncio.sleep(0)
        before, unread = unread, len(protocol.reader.unread)
        read.append(before - unread)
    assert set(read) == {0, request_reader.SLICE_BYTES}
