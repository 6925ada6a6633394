"""Bounds that uvicorn lacks: on the number of connections, their silence, the size of a head, and the time of parsing.

A client that has shut its sending side is answered, and a stop of the server cuts nobody off.
"""

import asyncio
import resource
import socket
from types import FrameType
from typing import Any, ClassVar, Final

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.core.problems import HEAD_TOO_LARGE, INVALID_HTTP, NOT_WRITTEN, REQUEST_TIMEOUT, Problem
from service.http.responses import lines_of, render_problem

# Bytes of a head, or of trailers and chunk extensions (RFC 9112, section 7.1) between two pieces of a body.
HEAD_BYTES_MAX: Final = 64 * 1024
# Lines of a head: each takes some 200 bytes of memory, however short. CloudEvents may have 100 attributes.
HEADERS_MAX: Final = 256
# The longest silence within a request, and the time that a request has beside that of its bytes at the least rate: a
# body of 8 MiB has 14 minutes, a small one 20 s. Between requests uvicorn's keep-alive timeout holds.
SILENCE_MAX_S: Final = 20.0
LEAST_BYTES_S: Final = 10_000
# Received bytes are parsed in slices for this time, before other tasks of the loop run: 256 KiB may be 40,000 chunks of
# a body, or 6,000 requests.
SLICE_BYTES: Final = 16 * 1024
PARSE_MAX_S: Final = 0.005
# The longest time for which sent bytes may stay unread before the kernel ends the connection (RFC 5482): a close would
# wait for ever. A client that reads, if only some kilobytes a second, has no bound.
UNREAD_MAX_S: Final = 60.0

# Headers that ask for another protocol.
_UPGRADE: Final = (b"upgrade", b"http2-settings")

# The time that a client, which may still be sending, has to read the refusal that ends its connection.
LINGERING_CLOSE_S: Final = 2.0
# The most connections refused for their number that have that time; others are closed at once.
LINGERING_MAX: Final = 64
# Files left to Kafka, Redis (CONNECTIONS_MAX, 128) and the log: a quarter of those that the process may open, or this
# number if a quarter is less, but then no more than half.
FILES_KEPT: Final = 256
# Files to count with if the system sets no limit.
FILES_MOST: Final = 1 << 20
# The time after a SIGTERM in which each response ends its connection, before idle connections are closed.
LINGER_S: Final = 1.0


def connections_max(files: int) -> int:
    """Return the bound on connections for a process that may open so many files (RLIMIT_NOFILE)."""
    files = FILES_MOST if files == resource.RLIM_INFINITY else files
    return files - max(files // 4, min(FILES_KEPT, files // 2))


class BothWays(FlowControl):
    """Pause reading while the client does not read its responses, and while received bytes are not parsed."""

    parsing = False  # received bytes are still to be parsed

    def pause_writing(self) -> None:
        super().pause_writing()
        self.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.resume_reading()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            if not self.parsing:
                self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self.write_paused:
            self.read_paused = False
            if not self.parsing:
                self._transport.resume_reading()

    def set_parsing(self, parsing: bool) -> None:
        """Note whether received bytes are still to be parsed."""
        if parsing is not self.parsing:
            self.parsing = parsing
            if not self.read_paused:
                (self._transport.pause_reading if parsing else self._transport.resume_reading)()


class GuardedProtocol(HttpToolsProtocol):
    """A connection with bounds. Its timer runs only while a request is incomplete."""

    lingering = False  # of all connections: each answer is its connection's last one
    connections_max = connections_max(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _surplus: ClassVar[set["GuardedProtocol"]] = (
        set()
    )  # of all connections: those that were refused for their number, and linger
    _begun = False  # a request has come, or a part of one
    _whole = False  # no request is under way
    _in_head = True
    _head_bytes = 0  # since the last head, or piece of a body, was whole
    _unread = False  # what follows of this request is none of ours
    _anew = b""  # its head, to be read once more
    _refused = False
    _half_closed = False  # the client sends no more
    _rest = memoryview(b"")  # was read, and is still to be parsed
    _timer: asyncio.TimerHandle | None = None  # while a request is incomplete
    _running: Any = None  # the last cycle that was given to the ASGI app
    _idle_since = 0.0  # by the loop's time
    _begun_at = _heard_at = 0.0  # by the loop's time: the first byte of that, and the last one
    _received = 0  # bytes of it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: BothWays = BothWays(transport)
        self._arm()
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_MAX_S))
        if len(self.connections) > self.connections_max:
            self._refuse_connection()

    def _refuse_connection(self) -> None:
        """Refuse a connection past the bound; the connection is no longer counted, and not read."""
        self.connections.discard(self)
        self._refuse(Problem(NOT_WRITTEN, f"connection: at most {self.connections_max} are taken at a time"))
        if len(self._surplus) < LINGERING_MAX:
            self._surplus.add(self)
        else:
            self._disarm()
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._surplus.discard(self)
        self._disarm()
        if self._running is not None:  # uvicorn notifies only the last of pipelined requests
            self._running.disconnected = True
            self._running.message_event.set()
        super()._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._rest = memoryview(b"".join([self._rest, data]) if self._rest else data)
        self._parse_rest()

    def _parse_rest(self) -> None:
        """Parse received bytes for PARSE_MAX_S, but no bytes behind a request that waits for earlier ones."""
        until = self.loop.time() + PARSE_MAX_S
        while self._rest and not self.pipeline and not self._over:
            piece, self._rest = self._rest[:SLICE_BYTES], self._rest[SLICE_BYTES:]
            self._take_piece(piece)
            if self._rest and self.loop.time() >= until:
                self.loop.call_soon(self._parse_rest)
                break
        if self._over:
            self._rest = memoryview(b"")
        else:
            self.flow.set_parsing(bool(self._rest))

    def _take_piece(self, piece: memoryview) -> None:
        self._head_bytes += len(piece)
        fresh = not self._begun
        try:
            self._parse(piece)
        except httptools.HttpParserError:
            self.send_400_response("it is not HTTP/1.1")
        if self._over:
            return
        if self._whole:
            self._disarm()
        else:
            if self._timer is None:
                self._arm()
            elif fresh:  # the time of a connection that was opened in advance begins now
                self._restart()
            else:
                self._heard_at = self.loop.time()
            self._received += len(piece)
            self.wait()
        if self._head_bytes > HEAD_BYTES_MAX or len(self.headers or ()) > HEADERS_MAX:
            self._refuse_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer the whole requests of a client that has shut its sending side (RFC 9112, section 9.6).

        An incomplete request is refused, or dropped if earlier ones are unanswered.
        """
        if self._half_closed or self._refused:
            return not self._refused
        self._half_closed = True
        if self._whole or self._in_head:
            unanswered = self.cycle is not None and not self.cycle.response_complete
        else:
            unanswered = bool(self.pipeline)
            if unanswered:
                self.pipeline.popleft()
        if unanswered:
            self._disarm()
            if self._whole:
                self.cycle.keep_alive = False
        elif self._begun and not self._whole:
            self._refuse(Problem(INVALID_HTTP, "request: it ends before it is whole"))
        return unanswered

    def on_response_complete(self) -> None:
        another = bool(self.pipeline)  # which begins now
        if another or self.transport.is_closing():
            super().on_response_complete()
        else:
            self.server_state.total_requests += 1
            self.flow.resume_reading()
            self._idle_since = self.loop.time()
            if self.timeout_keep_alive_task is None:
                self._look_again_in(self.timeout_keep_alive)
        self._after_answer(another)

    def _after_answer(self, another: bool) -> None:
        """Parse the bytes behind the request that was answered; close a connection that has no more requests."""
        if self.pipeline:
            return
        self._restart()
        if self._rest:
            self.loop.call_soon(self._parse_rest)
        elif self._half_closed and not another:
            self.transport.close()

    def _parse(self, data: memoryview) -> None:
        """Feed the parser, which stops behind a head with `Upgrade` and leaves the rest to the other protocol.

        The service ignores the header (RFC 9110, section 7.8), which Java's own client sends with each request.
        """
        rest = data
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._anew:  # CONNECT was refused
                    return
                rest, head, self._anew = rest[upgrade.args[0] :], self._anew, b""
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
                self.parser.feed_data(head)

    def _skips(self) -> bool:
        """Tell whether to skip the request whose head is complete: it is refused, or its head is parsed again."""
        lines = len(self.headers)
        if (
            self._head_bytes <= HEAD_BYTES_MAX
            and lines <= HEADERS_MAX
            and not self._refused
            and not self.parser.should_upgrade()
        ):
            return False
        # Some of the bytes may belong to the body.
        size = len(self.url) + sum([len(name) + len(content) for name, content in self.headers])
        if size > HEAD_BYTES_MAX or lines > HEADERS_MAX:
            self._refuse_head()
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            kept = lines_of((name, content) for name, content in self.headers if name not in _UPGRADE)
            version = self.parser.get_http_version().encode()
            self._anew = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, kept)
        self._unread = self._refused or bool(self._anew)
        return self._unread

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP, with a problem in place of uvicorn's text."""
        self._refuse(Problem(INVALID_HTTP, f"request: {msg}"))

    def _refuse_head(self) -> None:
        most = f"{HEAD_BYTES_MAX} bytes and {HEADERS_MAX} lines"
        self._refuse(Problem(HEAD_TOO_LARGE, f"headers: at most {most} are taken"))

    def _refuse(self, problem: Problem) -> None:
        """End the connection with a problem, or without one if the client would take it for another request's."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if not self._would_mislead:
            status, headers, body = render_problem(problem)
            headers += [*self.server_state.default_headers, (b"connection", b"close")]
            headers.append((b"content-length", b"%d" % len(body)))
            self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[status], lines_of(headers), body))
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close after LINGERING_CLOSE_S: a close with unread bytes would reset the connection and lose the response."""
        self._disarm()
        if self.cycle is not None:
            self.cycle.disconnected = True  # nothing more may be written
        if self._half_closed or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._rest = memoryview(b"")
        self.flow.set_parsing(False)
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGERING_CLOSE_S, self.transport.close)

    @property
    def _would_mislead(self) -> bool:
        """Tell whether an earlier request is unanswered, or the one that is being read is answered already."""
        if self.pipeline or self.cycle is None:
            return bool(self.pipeline)
        between = self._whole or self._in_head  # else `cycle` is the one which is being read
        return self.cycle.response_complete is not between

    @property
    def _over(self) -> bool:
        """Tell whether nothing more is to be read."""
        return self._refused or self.transport.is_closing()

    @property
    def at_message_boundary(self) -> bool:
        """Tell whether the next byte begins a request."""
        return (self._whole or not self._begun) and not self._refused

    def read_whole(self) -> None:
        """Note that a whole request was read without the parser."""
        self._begun, self._whole, self._in_head, self._head_bytes = True, True, False, 0
        self._disarm()

    def on_message_begin(self) -> None:
        self._begun, self._whole, self._in_head, self._unread = True, False, True, False
        self.prepare()

    def prepare(self) -> None:
        """Prepare for the head of a request."""
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._skips():
            return
        self._in_head, self._head_bytes = False, 0
        self.begin()
        self.headers = []  # trailers are none (RFC 9110, section 6.5.1)
        if self.lingering and self.cycle is not None:
            self.cycle.keep_alive = False

    def begin(self) -> None:
        """Begin the request whose head is complete, or queue it behind earlier ones."""
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # to HTTP/1.0 it means nothing (RFC 9110, section 10.1.1)
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if not self._unread:
            self._head_bytes = 0
            self.take(body)

    def wait(self) -> None:
        """Note that the request is incomplete after a slice."""

    def take(self, body: bytes) -> None:
        """Take a piece of the body."""
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._unread:
            self._whole = True
            self.end()

    def end(self) -> None:
        """Note that the request is complete."""
        super().on_message_complete()

    def _arm(self) -> None:
        self._begun_at = self._heard_at = self.loop.time()
        self._received = 0
        self._timer = self.loop.call_later(SILENCE_MAX_S, self._look)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _restart(self) -> None:
        """Restart the time of the incomplete request, because the service has not read on."""
        if self._timer is not None:
            self._begun_at = self._heard_at = self.loop.time()
            self._received = 0

    def resume_writing(self) -> None:
        super().resume_writing()
        self._idle_since = self.loop.time()
        self._restart()

    # ---------------------------------------------------------------------- keep-alive

    def _look_again_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if not self._whole or not self.cycle.response_complete:
            return  # the response of the current request restarts the idle time
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if self.flow.write_paused:  # it is read, however slowly: what came after it waits unread, and would be lost
            self._look_again_in(self.timeout_keep_alive)
        elif left > 0:
            self._look_again_in(left)
        else:
            super().timeout_keep_alive_handler()

    def _unset_keepalive_if_required(self) -> None:
        """Keep the timer, which uvicorn would replace for each request; its handler checks the idle time."""

    # --------------------------------------------------------------------------- deadline

    def _look(self) -> None:
        """Refuse the incomplete request if its deadline has passed."""
        self._timer = None
        left = self._deadline - self.loop.time()
        if self.transport.is_closing():
            return
        if self.flow.read_paused or self.flow.parsing:  # it is we who do not read on
            self._arm()
        elif left > 0:
            self._timer = self.loop.call_later(left, self._look)
        else:
            self._hang_up()

    @property
    def _deadline(self) -> float:
        """The deadline of the incomplete request; the rest of an answered request's body gets no time for its bytes."""
        answered = not self._in_head and self.cycle is not None and self.cycle.response_complete
        needed = 0.0 if answered else self._received / LEAST_BYTES_S
        return min(self._heard_at, self._begun_at + needed) + SILENCE_MAX_S

    def _hang_up(self) -> None:
        if not self._begun:
            self.transport.close()
            return
        silent = self._heard_at <= self._begun_at + self._received / LEAST_BYTES_S
        why = f"nothing came for {SILENCE_MAX_S:g} s" if silent else f"less than {LEAST_BYTES_S} bytes a second came"
        self._refuse(Problem(REQUEST_TIMEOUT, f"request: {why}, and it is not whole: nothing of it was written"))


class LingeringServer(uvicorn.Server):
    """After the first SIGTERM, end each connection with its next response for LINGER_S, then stop as uvicorn does.

    uvicorn closes idle connections at once, and a client that is sending a request cannot know whether it was read.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or GuardedProtocol.lingering:
            super().handle_exit(sig, frame)
            return
        GuardedProtocol.lingering = True
        self._loop.call_soon_threadsafe(self._loop.call_later, LINGER_S, super().handle_exit, sig, frame)
