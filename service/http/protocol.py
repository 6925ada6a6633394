"""POSTs that are answered below ASGI: no scope, no task and no messages for the requests that come by the thousand.

An empty ASGI application costs uvicorn some 25 µs a request on one core, FastAPI 100 more; this is about 10, and about
half of that where service.native reads the head.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from service import native
from service.http.headers import Found
from service.http.limits import GuardedProtocol
from service.http.request import OWN_BYTES, Bodies, Handler, PostRequest
from service.http.responses import lines_of


class HttpRequest(PostRequest):
    """One POST on its connection, from its head to its answer. uvicorn's pipeline takes it for a cycle of its own."""

    __slots__ = ("_connection", "_handler", "disconnected", "started", "whole")

    message_event: Final = asyncio.Event()  # uvicorn sets it when the client goes away; nobody waits for it here

    def __init__(
        self,
        connection: "PostsProtocol",
        handler: Handler,
        headers: list[tuple[bytes, bytes]],
        keep_alive: bool,
        chunked: bool,
    ) -> None:
        client = connection.client[0] if connection.client else None
        super().__init__(headers, client, connection.bodies, keep_alive=keep_alive, chunked=chunked)
        self._connection = connection
        self._handler = handler
        self.started = False  # no earlier request of this connection waits for its answer
        self.whole = False  # all of it is here, or more than is taken
        self.disconnected = False

    def add(self, part: bytes, most: int) -> None:
        """More of the body; where it is not kept, the handler has the request now and refuses it."""
        if self.whole:
            self.size += len(part)
        elif not self.keep(part, most):
            self.end()

    def receive_complete(self, found: Found, body: bytes) -> None:
        """All of it at once, its turn having come."""
        self.found = found
        self._content = body
        self.size = len(body)
        self.arrived = time.monotonic()
        self.started = self.whole = True
        self._handler(self)

    def reject_if_too_long(self, most: int, asks: bool) -> None:
        """Nobody waits for a body that is longer than `most` by its own head: `size` tells that at once.

        One that `asks` whether to send it may not send it then, so that nothing can follow (RFC 9110, section 10.1.1).
        """
        if not self.whole and self.told_size > most:
            self.size = self.told_size
            self.keep_alive = self.keep_alive and not asks
            self.drop_body()
            self.end()

    def start(self) -> None:
        """Its turn has come. From the loop: an earlier answer is just being given."""
        self.started = True
        self._connection.send_continue()
        if self.whole:
            self._connection.loop.call_soon(self._handler, self)

    def end(self) -> None:
        """The body has ended, or is longer than any that is taken."""
        if not self.whole:
            self.whole = True
            self.arrived = time.monotonic()  # it is not late for having been sent slowly
            if self.started:
                self._handler(self)

    def apart(self, work: Coroutine[Any, Any, None]) -> None:
        tasks = self._connection.tasks
        task = self._connection.loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def answer(self, status: int, head: bytes, body: bytes) -> None:
        if not self.response_complete:
            lines = self._connection.head(self, status, head, b"content-length: %d\r\n" % len(body))
            self.finish()
            self._connection.finish(self, lines + body)

    def cut(self) -> None:
        self.finish()
        self._connection.transport.close()

    def stream(self, status: int, head: bytes) -> "Chunks":
        return Chunks(self, self._connection, status, head)


class Chunks:
    """An answer in pieces (chunked, RFC 9112 section 7.1); to a client of HTTP/1.0 in one piece, at its end."""

    def __init__(self, post: HttpRequest, connection: "PostsProtocol", status: int, head: bytes) -> None:
        self._post = post
        self._connection = connection
        self._whole: list[bytes] | None = None
        self._status, self._head = status, head
        if post.chunked:
            connection.write(post, connection.head(post, status, head, b"transfer-encoding: chunked\r\n"))
        else:
            self._whole = []

    def write(self, piece: bytes) -> None:
        """The next piece of the body."""
        if self._whole is not None:
            self._whole.append(piece)
        elif piece:  # an empty chunk would be the end
            self._connection.write(self._post, b"%x\r\n%b\r\n" % (len(piece), piece))

    def end(self) -> None:
        """The body is whole."""
        if self._whole is not None:
            self._post.answer(self._status, self._head, b"".join(self._whole))
            return
        self._post.finish()
        self._connection.finish(self._post, b"0\r\n\r\n")

    def cut(self) -> None:
        """The body will never be whole, which the end of the connection tells."""
        self._post.cut()


class PostsProtocol(GuardedProtocol):
    """Hands POSTs to its routes' handlers, and everything else to the ASGI app."""

    # By exact path; set by `protocol_of`.
    routes: ClassVar[Mapping[bytes, Handler]] = {}
    body_bytes_max: ClassVar[int] = 0
    bodies: ClassVar[Bodies] = Bodies(0)
    _date: ClassVar[tuple[object, bytes]] = (None, b"")

    def data_received(self, data: bytes) -> None:
        if not (self.at_message_boundary and len(data) <= OWN_BYTES and native.COMPILED and self._take_whole(data)):
            super().data_received(data)

    def _take_whole(self, data: bytes) -> bool:
        """Read a POST that came in one piece, and is plain; False for all else, which the parser is to read."""
        existing: Any = self.cycle
        if existing is not None and not existing.response_complete:
            return False
        read = native.heads.read_post(data)
        if read is None:
            return False
        target, found, body = read
        handler = self.routes.get(target)
        if handler is None or len(body) > self.body_bytes_max:
            return False
        self.read_whole()
        post = HttpRequest(self, handler, [], keep_alive=True, chunked=True)
        self.cycle = post  # type: ignore[assignment]
        post.receive_complete(found, body)
        return True

    def prepare(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def begin(self) -> None:
        handler = self._handler()
        if handler is None:
            # Not ours: what uvicorn does at the beginning of a message is made up for.
            url, headers, expect = self.url, self.headers, self.expect_100_continue
            super().prepare()
            self.url, self.expect_100_continue = url, expect
            self.headers += headers
            super().begin()
            return
        existing, parser = self.cycle, self.parser
        chunked = parser.get_http_version() != "1.0"
        post = HttpRequest(self, handler, self.headers, chunked and parser.should_keep_alive(), chunked)
        self.cycle = post  # type: ignore[assignment]
        if existing is None or existing.response_complete:
            post.started = True
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((post, self.app))  # type: ignore[arg-type]
        if self.expect_100_continue:
            post.reject_if_too_long(self.body_bytes_max, asks=True)
            self.expect_100_continue = chunked and not post.whole  # to HTTP/1.0 it means nothing (section 10.1.1)
            if post.started:
                self.send_continue()

    def wait(self) -> None:
        cycle: object = self.cycle
        if isinstance(cycle, HttpRequest):
            cycle.reject_if_too_long(self.body_bytes_max, asks=False)

    def _handler(self) -> Handler | None:
        if self.parser.get_method() != b"POST":
            return None
        return self.routes.get(self.url) or self.routes.get(httptools.parse_url(self.url).path)

    def take(self, body: bytes) -> None:
        cycle: object = self.cycle
        if not isinstance(cycle, HttpRequest):
            super().take(body)
        elif not cycle.response_complete:
            cycle.add(body, self.body_bytes_max)

    def end(self) -> None:
        cycle: object = self.cycle
        if isinstance(cycle, HttpRequest):
            cycle.end()
        else:
            super().end()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, HttpRequest):
            cycle.start()
        else:
            super()._start_asgi_task(cycle, app)

    def send_continue(self) -> None:
        """A client that asked whether to send its body is told so (RFC 9110, section 10.1.1)."""
        if self.expect_100_continue and not self._whole:
            self.expect_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def head(self, post: HttpRequest, status: int, head: bytes, framing: bytes) -> bytes:
        """The head of an answer: `head` and `framing` are lines with their CRLF."""
        post.keep_alive = post.keep_alive and not self.lingering
        end = b"\r\n" if post.keep_alive else b"connection: close\r\n\r\n"
        return b"%b%b%b%b%b" % (STATUS_LINE[status], self._dated(), head, framing, end)

    def write(self, post: HttpRequest, content: bytes) -> bool:
        """Write a part of an answer, unless nobody is there to read it."""
        there = not post.disconnected and not self.transport.is_closing()
        if there:
            self.transport.write(content)
        return there

    def finish(self, post: HttpRequest, content: bytes) -> None:
        """Write all, or the last part, of an answer; then comes what is next on this connection."""
        if self.write(post, content):
            if not post.keep_alive:
                self.transport.close()
            self.on_response_complete()

    def _dated(self) -> bytes:
        """uvicorn's own headers (Date), which it makes anew each second."""
        headers = self.server_state.default_headers
        made_of, lines = PostsProtocol._date
        if made_of is not headers:
            lines = lines_of(headers)
            PostsProtocol._date = headers, lines
        return lines

    def connection_lost(self, exc: Exception | None) -> None:
        cycles: list[object] = [self.cycle, *(cycle for cycle, _ in self.pipeline)]
        for cycle in cycles:
            # Whose turn has come is forgotten with its answer, though nobody hears it.
            if isinstance(cycle, HttpRequest) and not (cycle.started and cycle.whole):
                cycle.drop_body()
        super().connection_lost(exc)


def protocol_of(routes: Mapping[bytes, Handler], body_bytes_max: int, bodies: Bodies) -> type[PostsProtocol]:
    """A protocol that hands POSTs of these paths to these handlers.

    No body is kept past `body_bytes_max`, nor all of them together past what `bodies` may have.
    """
    own = {"routes": routes, "body_bytes_max": body_bytes_max, "bodies": bodies}
    return type("Protocol", (PostsProtocol,), own)
