"""A transport below ASGI for the POSTs of events, without a scope, a task and messages for each request.

Its cost beside that of ASGI is in tests/bench/results/simplifications.md.
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
    """One POST on its connection. It stands in for a cycle of uvicorn's in the pipeline."""

    __slots__ = ("_connection", "_handler", "disconnected", "started", "whole")

    message_event: Final = asyncio.Event()  # uvicorn sets it at a disconnect; nothing awaits it

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
        self.started = False  # all earlier requests of the connection are answered
        self.whole = False  # the body is complete, or was dropped
        self.disconnected = False

    def add(self, part: bytes, most: int) -> None:
        """Add a part of the body. If the part is not kept, the handler gets the request at once, and refuses it."""
        if self.whole:
            self.size += len(part)
        elif not self.keep(part, most):
            self.end()

    def receive_complete(self, found: Found, body: bytes) -> None:
        """Handle a request that came whole, behind no other."""
        self.found = found
        self._content = body
        self.size = len(body)
        self.arrived = time.monotonic()
        self.started = self.whole = True
        self._handler(self)

    def reject_if_too_long(self, most: int, asks: bool) -> None:
        """Reject a body early whose Content-Length exceeds `most`.

        A client that `asks` whether to send it may leave it out, so that nothing can follow (RFC 9110, section 10.1.1).
        """
        if not self.whole and self.told_size > most:
            self.size = self.told_size
            self.keep_alive = self.keep_alive and not asks
            self.drop_body()
            self.end()

    def start(self) -> None:
        """Start after the earlier requests; the loop calls the handler, because a response is being written now."""
        self.started = True
        self._connection.send_continue()
        if self.whole:
            self._connection.loop.call_soon(self._handler, self)

    def end(self) -> None:
        """Hand the request to the handler: the body is complete, or was dropped."""
        if not self.whole:
            self.whole = True
            self.arrived = time.monotonic()  # a deadline does not count the time of sending
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
    """A chunked response (RFC 9112, section 7.1); an HTTP/1.0 client gets the pieces together, at the end."""

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
        """Write the next piece of the body."""
        if self._whole is not None:
            self._whole.append(piece)
        elif piece:  # an empty chunk would be the end
            self._connection.write(self._post, b"%x\r\n%b\r\n" % (len(piece), piece))

    def end(self) -> None:
        """End the body."""
        if self._whole is not None:
            self._post.answer(self._status, self._head, b"".join(self._whole))
            return
        self._post.finish()
        self._connection.finish(self._post, b"0\r\n\r\n")

    def cut(self) -> None:
        """Abort the body: the end of the connection tells the client that the body is incomplete."""
        self._post.cut()


class PostsProtocol(GuardedProtocol):
    """Hand POSTs to the handlers of their routes, and all other requests to the ASGI app."""

    # By exact path; set by `protocol_of`.
    routes: ClassVar[Mapping[bytes, Handler]] = {}
    body_bytes_max: ClassVar[int] = 0
    bodies: ClassVar[Bodies] = Bodies(0)
    _date: ClassVar[tuple[object, bytes]] = (None, b"")

    def data_received(self, data: bytes) -> None:
        if not (self.at_message_boundary and len(data) <= OWN_BYTES and native.COMPILED and self._take_whole(data)):
            super().data_received(data)

    def _take_whole(self, data: bytes) -> bool:
        """Read a plain POST that came in one piece; return False for all else, which the parser reads."""
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
            # The ASGI app's: uvicorn's own preparation, which `prepare` left out, is made up for.
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
        """Send 100 to a client that waits for it (RFC 9110, section 10.1.1)."""
        if self.expect_100_continue and not self._whole:
            self.expect_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def head(self, post: HttpRequest, status: int, head: bytes, framing: bytes) -> bytes:
        """Render the head of a response; `head` and `framing` are header lines, each with its CRLF."""
        post.keep_alive = post.keep_alive and not self.lingering
        end = b"\r\n" if post.keep_alive else b"connection: close\r\n\r\n"
        return b"%b%b%b%b%b" % (STATUS_LINE[status], self._dated(), head, framing, end)

    def write(self, post: HttpRequest, content: bytes) -> bool:
        """Write a part of a response; return False if the client has gone."""
        there = not post.disconnected and not self.transport.is_closing()
        if there:
            self.transport.write(content)
        return there

    def finish(self, post: HttpRequest, content: bytes) -> None:
        """Write the last part of a response, then go on with the next request of the connection."""
        if self.write(post, content):
            if not post.keep_alive:
                self.transport.close()
            self.on_response_complete()

    def _dated(self) -> bytes:
        """Return the lines of uvicorn's default headers (Date), which uvicorn replaces each second."""
        headers = self.server_state.default_headers
        made_of, lines = PostsProtocol._date
        if made_of is not headers:
            lines = lines_of(headers)
            PostsProtocol._date = headers, lines
        return lines

    def connection_lost(self, exc: Exception | None) -> None:
        cycles: list[object] = [self.cycle, *(cycle for cycle, _ in self.pipeline)]
        for cycle in cycles:
            # A request that is being handled keeps its body until its response is produced.
            if isinstance(cycle, HttpRequest) and not (cycle.started and cycle.whole):
                cycle.drop_body()
        super().connection_lost(exc)


def protocol_of(routes: Mapping[bytes, Handler], body_bytes_max: int, bodies: Bodies) -> type[PostsProtocol]:
    """Return a protocol class that hands POSTs of these paths to their handlers.

    A body is kept up to `body_bytes_max` bytes, and within the bound that `bodies` holds over all of them.
    """
    own = {"routes": routes, "body_bytes_max": body_bytes_max, "bodies": bodies}
    return type("Protocol", (PostsProtocol,), own)
