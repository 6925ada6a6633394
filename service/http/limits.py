"""Bounds that uvicorn lacks: on the number of connections, their silence, and the time that parsing takes in one go.

A client that has shut its sending side is answered.
"""

import asyncio
import resource
import socket
from collections.abc import Iterable
from typing import Any, ClassVar, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.core.problems import NOT_WRITTEN, Problem
from service.http.certificates import NO_CERTIFICATE, SCOPE_KEY, Names, names_of
from service.http.flow_control import BothWays
from service.http.request import BODY_USE, UNREAD_MAX_S, BodyUse, StopSignal
from service.http.request_reader import Action, Body, Head, ReaderEvent, Rejection, RequestReader
from service.http.responses import lines_of, render_problem

# The longest time to parse the bytes of one connection, slice by slice, before other tasks of the loop run.
PARSE_MAX_S: Final = 0.005
# After a read of this many bytes, other tasks of the loop run before the connection is read again. Without that, libuv
# reads up to 32 times in a row from a client that sends fast enough: 8 MB.
READ_BYTES: Final = 1 << 16
# The time that a client, which may still be sending, has to read the rejection that ends its connection.
LINGERING_CLOSE_S: Final = 2.0
# The most connections rejected for their number that have that time; others are closed at once.
LINGERING_MAX: Final = 64
# Files left to Kafka, Redis (CONNECTIONS_MAX, 128) and the log: a quarter of those that the process may open, or this
# number if a quarter is less, but then no more than half.
FILES_KEPT: Final = 256
# Files to count with if the system sets no limit.
FILES_MOST: Final = 1 << 20


def connections_max(files: int) -> int:
    """Return the bound on connections for a process that may open so many files (RLIMIT_NOFILE)."""
    files = FILES_MOST if files == resource.RLIM_INFINITY else files
    return files - max(files // 4, min(FILES_KEPT, files // 2))


def handshakes_max(files: int) -> int:
    """Return the bound on TLS handshakes at a time: a quarter of the files left to Kafka, Redis and the log."""
    files = FILES_MOST if files == resource.RLIM_INFINITY else files
    return max(1, (files - connections_max(files)) // 4)


class HeadParser:
    """The head of a request behind the methods of httptools' parser that uvicorn calls."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def get_method(self) -> bytes:
        return self._head.method

    def get_http_version(self) -> str:
        return self._head.version

    def should_keep_alive(self) -> bool:
        return self._head.keep_alive

    def should_upgrade(self) -> bool:
        return False


class GuardedProtocol(HttpToolsProtocol):
    """Move bytes, deadlines and responses between a connection and its reader; hand the requests to the ASGI app."""

    connections_max = connections_max(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _surplus: ClassVar[set["GuardedProtocol"]] = set()  # connections that were rejected for their number
    stopping: StopSignal  # once it is set, each response is the last one of its connection
    reader: RequestReader
    _again: asyncio.Handle | None = None  # to read the unread bytes
    _timer: asyncio.TimerHandle | None = None  # for the deadline of the reader
    _closing: asyncio.TimerHandle | None = None  # to close a connection that was rejected
    _running: Any = None  # the last cycle that was given to the ASGI app
    _idle_since = 0.0  # by the loop's time
    _is_tls = False
    certificate: Names = NO_CERTIFICATE  # the names of the client's certificate

    def __init__(self, *arguments: Any, stopping: StopSignal | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.stopping = stopping or StopSignal()

    def new_reader(self) -> RequestReader:
        return RequestReader(self.loop.time())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        if self._is_tls:
            self.certificate = names_of(transport.get_extra_info("peercert"))
        self.flow: BothWays = BothWays(transport)
        self.reader = self.new_reader()
        self._set_timer()
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_MAX_S))
        if len(self.connections) > self.connections_max:
            self._reject_connection()

    def _reject_connection(self) -> None:
        """Reject a connection past the bound; the connection is no longer counted, and not read."""
        self.connections.discard(self)
        detail = f"connection: at most {self.connections_max} are taken at a time"
        self._reject(Rejection(Problem(NOT_WRITTEN, detail), 0))
        if len(self._surplus) < LINGERING_MAX:
            self._surplus.add(self)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._surplus.discard(self)
        self.reader.stop()
        self._set_timer()
        if self._closing is not None:
            self._closing.cancel()
        if self._running is not None:  # uvicorn notifies only the last of pipelined requests
            self._running.disconnected = True
            self._running.message_event.set()
        if self.timeout_keep_alive_task is not None:  # uvicorn cancels it only where the connection has no error
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        reader, now = self.reader, self.loop.time()
        self._handle_events(reader.feed(data, now))
        if len(data) >= READ_BYTES and not self.transport.is_closing():
            self.flow.set_parsing(True)
            self._read_soon()
        elif reader.unread or self.flow.parsing:
            self._read_rest(now + PARSE_MAX_S)
        self._set_timer()

    def _read_rest(self, until: float) -> None:
        reader = self.reader
        while reader.ready and not self.transport.is_closing():
            now = self.loop.time()
            if now >= until:
                self._read_soon()
                break
            self._handle_events(reader.feed(b"", now))
        if not self.transport.is_closing():
            self.flow.set_parsing(bool(reader.unread))

    def _read_soon(self) -> None:
        """Read on in the next iteration of the loop, once, however many requests are answered until then."""
        if self._again is None:
            self._again = self.loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        self._again = None
        self.data_received(b"")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer what is whole, unless the connection has TLS: asyncio closes it when its client ends its side."""
        self._handle_events(self.reader.end())
        self._set_timer()
        return not self._is_tls and not self.transport.is_closing()

    def _handle_events(self, events: Iterable[ReaderEvent]) -> None:
        for event in events:
            if self.transport.is_closing():
                return
            match event:
                case Head():
                    self.begin(event)
                case Body(pieces):
                    self.on_body(b"".join(pieces))
                case "complete":
                    self.on_message_complete()
                case Rejection():
                    self._reject(event)
                case _:
                    self._end(event)

    def begin(self, head: Head) -> None:
        """Give a request to the ASGI app, or queue the request behind earlier ones."""
        self.parser = HeadParser(head)  # type: ignore[assignment]
        self.on_message_begin()
        self.url, self.expect_100_continue = head.target, head.expects_continue
        self.headers += head.headers
        if self.certificate:
            self.scope[SCOPE_KEY] = self.certificate  # type: ignore[typeddict-unknown-key]
        self.scope[BODY_USE] = BodyUse()  # type: ignore[typeddict-unknown-key]
        self.on_headers_complete()
        if self.stopping.is_set:
            self.cycle.keep_alive = False

    def _end(self, action: Action) -> None:
        if action == "withdraw":
            self.pipeline.popleft()
        elif action == "last":
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Whether the ASGI app has begun a response and not ended it."""
        running = self._running
        return running is not None and running.response_started and not running.response_complete

    @property
    def _is_exchanging(self) -> bool:
        """Whether the ASGI app may be acting on a part of the body: it answers, or reads the body as it arrives."""
        running = self._running
        if running is None or running.response_complete:
            return False
        use: BodyUse = running.scope[BODY_USE]
        return bool(running.response_started) or use.is_begun

    def pause_writing(self) -> None:
        self.flow.set_duplex(self._is_answering and self._running.more_body)
        super().pause_writing()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        if cycle.waiting_for_100_continue:
            app = _last_if_unasked(cycle, app)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        reader, now = self.reader, self.loop.time()
        reader.answered(now)
        self.flow.set_duplex(False)
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
        else:
            self.server_state.total_requests += 1
            self.flow.resume_reading()
            self._idle_since = now
            if self.timeout_keep_alive_task is None:
                self._check_idle_in(self.timeout_keep_alive)
        if reader.unread:
            self._read_soon()
        elif reader.ended and not reader.unanswered:
            self.transport.close()

    def _reject(self, rejection: Rejection) -> None:
        """End the connection with a problem.

        The problem is left out where the client would take it for the answer to another request, or for a part of a
        response that has begun, and where it would say that nothing was written, and the app may have written a part.
        """
        if self.reader.unanswered != rejection.unanswered or self._is_exchanging:
            self.transport.close()
            return
        status, headers, body = render_problem(rejection.problem)
        headers += [*self.server_state.default_headers, (b"connection", b"close")]
        headers.append((b"content-length", b"%d" % len(body)))
        self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[status], lines_of(headers), body))
        self._linger()

    def _linger(self) -> None:
        """Close after LINGERING_CLOSE_S: a close with unread bytes would reset the connection and lose the response."""
        self.reader.stop()
        if self.cycle is not None:
            self.cycle.disconnected = True  # nothing more may be written
        if self.reader.ended:
            self.transport.close()
            return
        if self.transport.can_write_eof():  # with TLS the length of the response alone tells its end
            self.transport.write_eof()
        self.flow.set_parsing(False)
        self.flow.resume_reading()
        self._closing = self.loop.call_later(LINGERING_CLOSE_S, self.transport.close)

    # ---------------------------------------------------------------------- keep-alive

    def _check_idle_in(self, seconds: float) -> None:
        """Set the timer of an idle connection. Responses leave it as it is: the handler checks the idle time."""
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        # A client may still send the body of an answered request, or read the response to it.
        if not self.reader.idle or self.flow.write_paused:
            self._check_idle_in(self.timeout_keep_alive)
        elif left > 0:
            self._check_idle_in(left)
        else:
            super().timeout_keep_alive_handler()

    # --------------------------------------------------------------------------- deadline

    def resume_writing(self) -> None:
        super().resume_writing()
        self._idle_since = self.loop.time()
        self.reader.restart(self._idle_since)

    def _set_timer(self) -> None:
        """Set or cancel the timer of the reader's deadline; a timer that fires early is set again."""
        deadline = self.reader.deadline
        if self._timer is None:
            if deadline is not None:
                self._timer = self.loop.call_at(deadline, self._check_deadline)
        elif deadline is None:
            self._timer.cancel()
            self._timer = None

    def _check_deadline(self) -> None:
        """Reject the incomplete request if its deadline has passed.

        An app that reads a body as it arrives has deadlines of its own, for each event of the body.
        """
        self._timer = None
        now = self.loop.time()
        if self.flow.read_paused or self.flow.parsing or self._is_exchanging:
            self.reader.restart(now)
        self._handle_events(self.reader.expire(now))
        self._set_timer()


class ManagementProtocol(GuardedProtocol):
    """A connection of the management port, whose number has a bound of its own: a full service must show its health."""

    connections_max = 100


def _last_if_unasked(cycle: Any, app: ASGIApp) -> ASGIApp:
    """Make a request the last of its connection if it is answered before its body was asked for.

    A client that sent `Expect` may leave the body out then, so that its next bytes may belong to the body or to another
    request (RFC 9110, section 10.1.1).
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_checked(message: Message) -> None:
            if cycle.waiting_for_100_continue:  # until the first call of `receive`, or the start of a response
                cycle.keep_alive = False
            await send(message)

        await app(scope, receive, send_checked)

    return answer
