"""A transport below ASGI for the POSTs of events, without a scope, a task and messages for each request.

Its cost beside that of ASGI is in tests/bench/results/simplifications.md.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, cast

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from service.http.headers import UsedHeaders, content_type_of, essence
from service.http.limits import GuardedProtocol
from service.http.request import OWN_BYTES, WRITE_BYTES, Bodies, Handler, PostRequest, StopSignal, reading_time_s
from service.http.request_reader import Head, Rejection, RequestReader, WholePost
from service.http.responses import lines_of

log = structlog.get_logger(__name__)


class ResponseBuffer:
    """Whole responses of any connections, written together in the loop's next turn, or at once if no other is expected.

    The results of a group come one after the other. Each write wakes its client, which takes the CPU from the next
    result if it runs on the same machine.
    """

    def __init__(self) -> None:
        self.expected: set[HttpRequest] = set()  # whose handlers have returned without a response
        self._waiting: list[tuple[HttpRequest, bytes]] = []

    def add(self, post: "HttpRequest", content: bytes) -> None:
        """Write a whole response: at once if `post` is the only request without one, else in the next turn."""
        is_only = self.expected == {post} and not self._waiting
        self.expected.discard(post)
        self._waiting.append((post, content))
        if is_only:
            self.write()
        elif len(self._waiting) == 1:
            post.connection.loop.call_soon(self.write)

    def write(self) -> None:
        """Write the responses now."""
        waiting, self._waiting = self._waiting, []
        for post, content in waiting:
            try:
                post.connection.write_end(post, content)
            except Exception:  # a bug must not keep the other responses
                log.exception("a response was not written")
                post.cut()


@dataclass(eq=False)
class DirectRoutes:
    """The POSTs that the direct transport hands to their handlers, by exact path; all other requests go to the app.

    A body is kept up to `body_bytes_max` bytes, and within the bound that `bodies` holds over all of them. `streamed`
    has the paths whose bodies of one media type the ASGI app reads as they arrive. With `cors` the app also takes the
    requests of web pages, and no request is read as a whole before its headers are known. `plain` has the paths whose
    POSTs may be read as a whole, whatever their headers are; connections keep a reference to it.
    """

    routes: Mapping[bytes, Handler]
    body_bytes_max: int
    bodies: Bodies
    streamed: Mapping[bytes, str] = field(default_factory=dict)
    cors: bool = False
    responses: ResponseBuffer = field(default_factory=ResponseBuffer)
    plain: set[bytes] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.replace(self.routes, cors=self.cors)

    def replace(self, routes: Mapping[bytes, Handler], *, cors: bool) -> None:
        """Hand POSTs whose heads come from now on to other handlers of the same paths, on open connections too."""
        self.routes, self.cors = routes, cors
        self.plain.clear()
        if not cors:
            self.plain.update(routes.keys() - self.streamed.keys())

    def handler_of(self, head: Head) -> Handler | None:
        """Return the handler of a request; None for a request that the ASGI app takes."""
        handler = self.routes.get(head.path) if head.method == b"POST" else None
        if head.path in self.streamed and essence(content_type_of(head.headers)) == self.streamed[head.path]:
            return None
        if self.cors and any(name == b"origin" for name, _ in head.headers):
            return None
        return handler


class HttpRequest(PostRequest):
    """One POST on its connection. It stands in for a cycle of uvicorn's in the pipeline."""

    __slots__ = (
        "_handler",
        "body_ended",
        "connection",
        "disconnected",
        "expects_continue",
        "response_complete",
        "started",
    )

    message_event: Final = asyncio.Event()  # uvicorn sets it at a disconnect; nothing awaits it

    def __init__(
        self,
        connection: "DirectProtocol",
        handler: Handler,
        headers: list[tuple[bytes, bytes]],
        keep_alive: bool = True,
        chunked: bool = True,
        expects_continue: bool = False,
    ) -> None:
        client = connection.client[0] if connection.client else None
        super().__init__(
            headers,
            client,
            connection.direct.bodies,
            keep_alive=keep_alive,
            chunked=chunked,
            certificate=connection.certificate,
        )
        self.connection = connection
        self._handler = handler
        self.started = False  # all earlier requests of the connection are answered
        self.body_ended = False  # the body is complete, or was dropped
        self.expects_continue = expects_continue
        self.disconnected = False
        self.response_complete = False  # written, as uvicorn means it: the connection's next request may begin

    def add(self, part: bytes, most: int) -> None:
        """Add a part of the body. If the part is not kept, the handler gets the request at once, and refuses it."""
        if self.body_ended:
            self.size += len(part)
        elif not self.keep(part, most):
            self.end()

    def receive_complete(self, used: UsedHeaders, body: bytes) -> None:
        """Handle a request that came whole, behind no other."""
        self.used = used
        self._content = body
        self.size = len(body)
        self.arrived = time.monotonic()
        self.started = self.body_ended = True
        self._handle()

    def reject_if_too_long(self, most: int) -> None:
        """Reject a body early whose Content-Length exceeds `most` bytes; the body is read and dropped.

        A client that sent `Expect` may leave the body out, so no other request can follow on the connection (RFC 9110,
        section 10.1.1).
        """
        if self.content_length > most:
            self.size = self.content_length
            self.keep_alive = self.keep_alive and not self.expects_continue
            self.drop_body()
            self.end()

    def start(self) -> None:
        """Start after the earlier requests; the loop calls the handler, because a response is being written now."""
        self.started = True
        self.send_continue()
        if self.body_ended:
            self.connection.loop.call_soon(self._handle)

    def send_continue(self) -> None:
        """Send 100 if the client waits for it (RFC 9110, section 10.1.1)."""
        if self.expects_continue and not self.body_ended:
            self.connection.write(self, b"HTTP/1.1 100 Continue\r\n\r\n")

    def end(self) -> None:
        """Hand the request to the handler: the body is complete, or was dropped."""
        if not self.body_ended:
            self.body_ended = True
            self.arrived = time.monotonic()  # a deadline does not count the time of sending
            if self.started:
                self._handle()

    def _handle(self) -> None:
        """Hand the request to its handler, which has it answered now or later."""
        self._handler(self)
        if not self.answered:
            self.connection.direct.responses.expected.add(self)

    def run_in_task(self, work: Coroutine[Any, Any, None]) -> None:
        tasks = self.connection.tasks
        task = self.connection.loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def answer(self, status: int, head: bytes, body: bytes) -> None:
        if not self.answered:
            if self.rated is not None:
                head += self.rated.rate_lines()
            lines = self.connection.head(self, status, head, b"content-length: %d\r\n" % len(body))
            self.finish()
            self.connection.direct.responses.add(self, lines + body)

    def cut(self) -> None:
        self.finish()
        self.connection.direct.responses.expected.discard(self)
        self.response_complete = True
        self.connection.transport.close()


class DirectProtocol(GuardedProtocol):
    """Hand POSTs to the handlers of their routes, and all other requests to the ASGI app."""

    direct: DirectRoutes
    _unwritten: tuple[HttpRequest, memoryview] | None = None  # the rest of a long response
    _reading: asyncio.TimerHandle | None = None  # for the time that the client has to read it
    _rejection: Rejection | None = None  # comes after it
    _date: ClassVar[tuple[object, bytes]] = (None, b"")

    def __init__(self, direct: DirectRoutes, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.direct = direct

    def new_reader(self) -> RequestReader:
        return RequestReader(self.loop.time(), self.direct.plain, min(OWN_BYTES, self.direct.body_bytes_max))

    def data_received(self, data: bytes) -> None:
        post = None if self.transport.is_closing() else self.reader.whole_post(data)
        if post is None:
            super().data_received(data)
            return
        self.take_post(post)  # the usual case, without an event
        if self._timer is not None:
            self._set_timer()

    def _reject(self, rejection: Rejection) -> None:
        self.direct.responses.write()  # a rejection ends the connection, and comes after the answers
        if self._unwritten is None:
            super()._reject(rejection)
        else:
            self._rejection = rejection

    def take_post(self, post: WholePost) -> None:
        request = HttpRequest(self, self.direct.routes[post.target], [])
        self.cycle = request  # type: ignore[assignment]
        request.receive_complete(post.used, post.body)

    def begin(self, head: Head) -> None:
        handler = self.direct.handler_of(head)
        if handler is None:
            super().begin(head)
            return
        existing = self.cycle
        post = HttpRequest(
            self,
            handler,
            head.headers,
            keep_alive=head.keep_alive,
            chunked=head.version != "1.0",
            expects_continue=head.expects_continue,
        )
        self.cycle = post  # type: ignore[assignment]
        if existing is None or existing.response_complete:
            post.started = True
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((post, self.app))  # type: ignore[arg-type]
        post.reject_if_too_long(self.direct.body_bytes_max)
        if post.started:
            post.send_continue()

    def on_body(self, body: bytes) -> None:
        cycle: object = self.cycle
        if not isinstance(cycle, HttpRequest):
            super().on_body(body)
        elif not cycle.answered:
            cycle.add(body, self.direct.body_bytes_max)

    def on_message_complete(self) -> None:
        cycle: object = self.cycle
        if isinstance(cycle, HttpRequest):
            cycle.end()
        else:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, HttpRequest):
            cycle.start()
        else:
            super()._start_asgi_task(cycle, app)

    def head(self, post: HttpRequest, status: int, head: bytes, framing: bytes) -> bytes:
        """Render the head of a response; `head` and `framing` are header lines, each with its CRLF."""
        post.keep_alive = post.keep_alive and not self.stopping.is_set
        end = b"\r\n" if post.keep_alive else b"connection: close\r\n\r\n"
        return b"%b%b%b%b%b" % (STATUS_LINE[status], self._dated(), head, framing, end)

    def write(self, post: HttpRequest, content: bytes | memoryview) -> bool:
        """Write a part of a response; return False if the client has gone."""
        is_connected = not post.disconnected and not self.transport.is_closing()
        if is_connected:
            self.transport.write(content)
        return is_connected

    def write_end(self, post: HttpRequest, content: bytes | memoryview) -> None:
        """Write the last part of a response, then go on with the next request of the connection.

        If the part is long, each turn of the loop writes a slice of it, as the client reads.
        """
        if len(content) > WRITE_BYTES:
            self._unwritten = post, memoryview(content)
            self._reading = self.loop.call_later(reading_time_s(len(content)), self.transport.abort)
            self._write_on()
            return
        post.response_complete = True
        if self.write(post, content):
            if not post.keep_alive:
                self.transport.close()
            self.on_response_complete()

    def _write_on(self) -> None:
        """Write the next slice of a long response, unless the client has to read the last ones first."""
        if self._unwritten is None or self.flow.write_paused:
            return
        post, content = self._unwritten
        if len(content) > WRITE_BYTES and self.write(post, content[:WRITE_BYTES]):
            self._unwritten = post, content[WRITE_BYTES:]
            if not self.flow.write_paused:
                self.loop.call_soon(self._write_on)
            return
        self._drop_unwritten()
        self.write_end(post, content[:WRITE_BYTES])
        if self._rejection is not None and not self.transport.is_closing():
            super()._reject(self._rejection)

    def _drop_unwritten(self) -> None:
        """End a long response: the rest of it is being written, or the client has gone."""
        if self._unwritten is not None:
            (post, _), self._unwritten = self._unwritten, None
            post.release_response()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unwritten is not None:
            self.loop.call_soon(self._write_on)

    def _dated(self) -> bytes:
        """Return the lines of uvicorn's default headers (Date), which uvicorn replaces each second."""
        headers = self.server_state.default_headers
        made_of, lines = DirectProtocol._date
        if made_of is not headers:
            lines = lines_of(headers)
            DirectProtocol._date = headers, lines
        return lines

    def connection_lost(self, exc: Exception | None) -> None:
        cycles: list[object] = [self.cycle, *(cycle for cycle, _ in self.pipeline)]
        for cycle in cycles:
            # A request that is being handled keeps its body until its response is produced.
            if isinstance(cycle, HttpRequest) and not (cycle.started and cycle.body_ended):
                cycle.drop_body()
        self._drop_unwritten()
        super().connection_lost(exc)


def protocol_of(direct: DirectRoutes | None, stopping: StopSignal | None = None) -> type[GuardedProtocol]:
    """Return what makes the protocol of each connection, for uvicorn, whose type for it is a class.

    Without `direct` the app gets all requests. Once `stopping` is set, each response is the last of its connection.
    """
    protocol = GuardedProtocol if direct is None else partial(DirectProtocol, direct)
    return cast("type[GuardedProtocol]", partial(protocol, stopping=stopping))
