"""What uvicorn lacks: a connection may not stay silent, a head may not grow, and a stop cuts nobody off."""

import asyncio
import socket
from types import FrameType
from typing import Final

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import HEAD_TOO_LARGE, INVALID_HTTP, Problem
from service.rendering import lines_of, render_problem

# Of a head, and of what comes beside a body: trailers (RFC 9112, section 7.1.2), extensions of chunks.
HEAD_BYTES_MAX: Final = 64 * 1024
# From the connection, or a request's first byte, to its last one. Between requests uvicorn's keep-alive bound holds.
SILENCE_MAX_S: Final = 20.0
# For so long the kernel keeps what a client does not read, or its network does not carry, and then ends the connection
# (RFC 5482); a close would wait for it for ever. Who reads on, if only some kilobytes a second, has all the time.
UNREAD_MAX_S: Final = 60.0

# Headers that ask for another protocol.
_UPGRADE: Final = (b"upgrade", b"http2-settings")

# After a SIGTERM: clients that use their connections more often than this leave them by an answer.
LINGER_S: Final = 1.0


class BothWays(FlowControl):
    """Who does not read its answers is not read either: both would pile up."""

    def pause_writing(self) -> None:
        super().pause_writing()
        self.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self.write_paused:
            super().resume_reading()


class GuardedProtocol(HttpToolsProtocol):
    """Costs nothing for a request that comes in one piece: the timer runs only while one is incomplete."""

    lingering = False  # of all connections: each answer is its connection's last one
    _begun = False  # a request has come, or a part of one
    _whole = False  # no request is under way
    _in_head = True
    _head_bytes = 0  # since the last head, or piece of a body, was whole
    _unread = False  # what follows of this request is none of ours
    _anew = b""  # its head, to be read once more
    _refused = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = BothWays(transport)
        self._arm()
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_MAX_S))

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("it is not HTTP/1.1")
        if self._whole:
            self._disarm()
        else:
            if self._timer is None:
                self._arm()
            self.wait()
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse_head()

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which would leave the body of a request with `Upgrade` to the protocol that it asks for.

        Here it is none but HTTP/1.1 (RFC 9110, section 7.8). Java's own client asks for HTTP/2 at each request.
        """
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._anew:  # of CONNECT, which has its answer
                    return
                rest, head, self._anew = rest[upgrade.args[0] :], self._anew, b""
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
                self.parser.feed_data(head)

    def _skips(self) -> bool:
        """Is the request whose head is whole not to be carried out? That is refused, or is read anew."""
        if self._head_bytes <= HEAD_BYTES_MAX and not self._refused and not self.parser.should_upgrade():
            return False
        if self._head_bytes > HEAD_BYTES_MAX:  # much of that may be its body
            size = len(self.url) + sum([len(name) + len(content) for name, content in self.headers])
            if size > HEAD_BYTES_MAX:
                self._refuse_head()
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            kept = lines_of((name, content) for name, content in self.headers if name not in _UPGRADE)
            version = self.parser.get_http_version().encode()
            self._anew = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, kept)
        self._unread = self._refused or bool(self._anew)
        return self._unread

    def send_400_response(self, msg: str) -> None:
        """uvicorn's word on what its parser does not take, as a problem."""
        self._refuse(Problem(INVALID_HTTP, f"request: {msg}"))

    def _refuse_head(self) -> None:
        self._refuse(Problem(HEAD_TOO_LARGE, f"headers: at most {HEAD_BYTES_MAX} bytes are taken"))

    def _refuse(self, problem: Problem) -> None:
        """End the connection with this answer; without one where it would be taken for that of another request."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if not self._would_mislead:
            status, headers, body = render_problem(problem)
            headers += [*self.server_state.default_headers, (b"connection", b"close")]
            headers.append((b"content-length", b"%d" % len(body)))
            self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[status], lines_of(headers), body))
        self.transport.close()

    @property
    def _would_mislead(self) -> bool:
        """Does an earlier request wait for its answer, or has the one that is being read got its own already?"""
        if self.pipeline or self.cycle is None:
            return bool(self.pipeline)
        between = self._whole or self._in_head  # else `cycle` is the one which is being read
        return self.cycle.response_complete is not between

    @property
    def between(self) -> bool:
        """Is what comes now the beginning of a request?"""
        return (self._whole or not self._begun) and not self._refused

    def read_whole(self) -> None:
        """A request has come that the parser has not seen, and need not."""
        self._begun, self._whole, self._in_head, self._head_bytes = True, True, False, 0
        self._disarm()

    def on_message_begin(self) -> None:
        self._begun, self._whole, self._in_head, self._unread = True, False, True, False
        self.prepare()

    def prepare(self) -> None:
        """Make room for what the head of a request will say."""
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
        """The head of a request is whole: let it begin, or wait for those before it."""
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._unread:
            self._head_bytes = 0
            self.take(body)

    def wait(self) -> None:
        """Something of the request is still to come."""

    def take(self, body: bytes) -> None:
        """A piece of the request's body."""
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._unread:
            self._whole = True
            self.end()

    def end(self) -> None:
        """The request is whole."""
        super().on_message_complete()

    def _arm(self) -> None:
        self._timer = self.loop.call_later(SILENCE_MAX_S, self._hang_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        self._timer = None
        if self.flow.write_paused:  # it is we who do not read on
            self._arm()
        elif not self.transport.is_closing():
            self.transport.close()


class LingeringServer(uvicorn.Server):
    """After the first SIGTERM each answer ends its connection, for LINGER_S, before uvicorn closes the idle ones.

    Else a client that is just sending its next request is cut off, and cannot know whether that was read.
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
