"""POSTs whose bodies are read as they arrive: any number of events in, and one result for each out, as it is known.

A stream has the memory of one window of events, of one incomplete event, and of UNREAD_BYTES_MAX of results. It reads
the next window when the events of the last one have their results, and stops reading while the client does not read.
Each event has the deadlines of a request of its own.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.core.metrics import Telemetry
from service.core.problems import INTERNAL, NOT_WRITTEN, REQUEST_TIMEOUT, TOO_LARGE, Problem
from service.core.time_slice import TimeSlice
from service.events.event import Event, invalid, parse_traceparent
from service.http.asgi import send_whole
from service.http.batch import write_each
from service.http.caller import Caller
from service.http.certificates import NONE as NO_CERTIFICATE
from service.http.certificates import SCOPE_KEY, Names
from service.http.encodings import Decoder, coding_of
from service.http.headers import UsedHeaders, content_type_of, essence, pick
from service.http.request import BODIES_ARE_FULL, OWN_BYTES, UNREAD_MAX_S, WRITE_BYTES, Bodies, Share, StopSignal
from service.http.request_guard import RequestGuard
from service.http.request_reader import LEAST_BYTES_S, SILENCE_MAX_S
from service.http.responder import in_steps
from service.http.responses import Headers, headers_of, render_problem
from service.pipeline.admission import Admission
from service.pipeline.request import CHUNK_EVENTS_MAX, WriteResult

log = structlog.get_logger(__name__)

# Bytes and events of a window, which are read before the first of them is written: enough for a whole transaction of
# events of 1 KB.
WINDOW_BYTES: Final = 1024 * 1024
WINDOW_EVENTS: Final = CHUNK_EVENTS_MAX
# The time to wait for more of the body before a window that is not full is written: a client that sends one event and
# waits for its result waits so much longer. No window is open for longer than WINDOW_S.
WINDOW_LINGER_S: Final = 0.001
WINDOW_S: Final = 0.01
# Bytes of results that wait for a client that does not read: those of 10,000 events and more, so that a client that
# reads nothing before it has sent all may send as many.
UNREAD_BYTES_MAX: Final = 4 * 1024 * 1024
# The longest pause of a stream whose caller is over its rate: proxies close a connection without bytes after a minute.
# Only a rate of less than one event in it needs a longer one, or the debt of several streams of one caller.
RATE_PAUSE_MAX_S: Final = 60.0
# The longest time that a stream waits while the queue is full; then its events get 503.
OVERLOAD_WAIT_S: Final = 10.0
OVERLOAD_PAUSE_S: Final = 0.05
# The longest time without an event in a stream whose decoder holds a window, which counts in the memory of all bodies.
IDLE_WINDOW_MAX_S: Final = 60.0

# Of results for an HTTP/1.0 client, for which there is no room.
RESPONSES_ARE_FULL: Final = "response: too many large ones are in memory"
# In the last line of a stream whose body could not be read to its end. `Exchange.render_end` adds what to send then,
# which depends on the keys.
REST_NOT_WRITTEN: Final = "what is behind the last result was not written"

# The text of one event, or the problem that takes its place.
Text = bytes | Problem


class ClientGone(Exception):
    """The client has disconnected, or reads nothing: nobody waits for the results."""


class Splitter(Protocol):
    """Cuts a body that arrives in parts into the texts of its events."""

    @property
    def held(self) -> int:
        """The bytes in memory."""

    @property
    def is_over(self) -> bool:
        """Whether what follows in the body cannot be cut, as behind a syntax error; the stream ends then."""

    @property
    def has_unread(self) -> bool:
        """Whether `next` has not looked at all of the last part, so that a call may return a text after None."""

    def feed(self, data: bytes) -> None:
        """Take the next part of the body, after `next` has returned None and nothing is unread."""

    def next(self) -> Text | None:
        """Return the next text, or the problem that takes its place; None without a whole one."""

    def drop(self, problem: Problem) -> None:
        """Drop the incomplete text, as far as it has come and what is still to come: `problem` is its result.

        Between two texts nothing is dropped.
        """

    def end(self) -> None:
        """Note that the body has ended; `next` may return a last text."""


async def next_text(splitter: Splitter, time_slice: TimeSlice) -> Text | None:
    """Search what the splitter was fed for the next text, in time slices; return None without a whole text."""
    while True:
        if time_slice.is_over:
            await time_slice.next()
        text = splitter.next()
        if text is not None or not splitter.has_unread:
            return text


@dataclass(frozen=True, slots=True)
class StreamHead:
    """The head of a request whose body is to be read as it arrives; its caller is known."""

    used: UsedHeaders
    path_params: Mapping[str, Any]
    caller: Caller
    traceparent: bytes | None
    certificate: Names = NO_CERTIFICATE  # that which names the caller; none where a token does

    def check_validity(self) -> None:
        """Raise Problem if the token or the certificate that names the caller is not valid any more."""
        self.caller.check_validity()
        self.certificate.check_validity()


@dataclass(frozen=True, slots=True)
class Exchange:
    """What an API makes of one stream: how its body is cut, parsed and answered.

    `parse` and `render` are called once for each text, in the order of the body. `render_end` renders the last line of
    a stream whose body could not be read to its end, and says what to send then.
    """

    splitter: Splitter
    parse: Callable[[Text], Event | Awaitable[Event]]
    render: Callable[[WriteResult], str]
    render_end: Callable[[Problem], str]
    status: int
    head: bytes  # header lines of the response, each with its CRLF
    fresh_key: str = ""  # the key of several events, if it was not old when the request began


Begin = Callable[[StreamHead], Exchange]
"""Begins the exchange of a request, or refuses the request by raising a Problem."""
RenderProblem = Callable[[Problem], tuple[int, Headers, bytes]]
"""Renders the status, headers and body of a problem, before a response has begun."""


class StreamEndpoint:
    """An ASGI endpoint for the POSTs of one route whose bodies are read as they arrive."""

    def __init__(
        self,
        guard: RequestGuard,
        admission: Admission,
        telemetry: Telemetry,
        begin: Begin,
        render: RenderProblem = render_problem,
    ) -> None:
        self._guard = guard
        self._admission = admission
        self._telemetry = telemetry
        self._begin = begin
        self._render_problem = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = StreamedBody(receive, self._guard.stopping, self._guard.bodies)
        response = StreamedResponse(send, scope["http_version"], self._guard.bodies)
        try:
            try:
                head = await self._head(scope)
                body.decoder = Decoder(coding_of(head.used))
                exchange = self._begin(head)
            except Problem as problem:
                await self._refuse(scope, send, body, problem)
                return
            try:
                await self._write(head, exchange, body, response)
            except Problem as problem:
                if response.started:
                    end = Problem(problem.kind, f"{problem.detail}: {REST_NOT_WRITTEN}", problem.retry_after_s)
                    response.write(exchange.render_end(end).encode())
                    await response.end()
                else:
                    await self._refuse(scope, send, body, problem)
        except ClientGone:
            pass  # the server ends the connection of a response that is not complete
        except Exception:  # a bug, after which the outcome of events is unknown
            log.exception("request failed")
            if not response.started:
                await self._refuse(scope, send, body, Problem(INTERNAL, "send it again, with the same keys"))
        finally:
            await response.close()
            await body.close()

    async def _head(self, scope: Scope) -> StreamHead:
        """Check the head of a request. Raises Problem (400, 401, 403, 429, 501, 503)."""
        used = pick(scope["headers"])
        client = scope.get("client")
        needs_host, certificate = scope["http_version"] != "1.0", scope.get(SCOPE_KEY, NO_CERTIFICATE)
        caller = await self._guard.find_caller(
            client and client[0], used, host_needed=needs_host, certificate=certificate
        )
        if caller.is_rated:
            await caller.wait_s()  # asks for a slice, so that who is over the rate is refused before its body is read
            caller.check_rate()
        traceparent = parse_traceparent(used.get(b"traceparent"))
        if not caller.scope or b"authorization" in used:
            certificate = NO_CERTIFICATE
        return StreamHead(used, scope.get("path_params", {}), caller, traceparent, certificate)

    async def _refuse(self, scope: Scope, send: Send, body: "StreamedBody", problem: Problem) -> None:
        """Answer with a problem before a response has begun.

        The connection is closed where its next bytes may belong to the body or to another request: the client may leave
        out a body that it asked about (RFC 9110, section 10.1.1), and a late body may never come.
        """
        status, headers, content = self._render_problem(problem)
        asked = not body.begun and any(name == b"expect" for name, _ in scope["headers"])
        if (asked or problem.kind is REQUEST_TIMEOUT) and scope["http_version"].startswith("1."):
            headers = [*headers, (b"connection", b"close")]
        self._telemetry.requested(status, problem.kind.code)
        await send_whole(send, status, headers, content)

    async def _write(
        self, head: StreamHead, exchange: Exchange, body: "StreamedBody", response: "StreamedResponse"
    ) -> None:
        """Write the events of a body, window by window. Raises Problem where the body cannot be read on."""
        admission, caller = self._admission, head.caller
        # A larger window would be a debt of many seconds.
        events_max = min(WINDOW_EVENTS, caller.burst or WINDOW_EVENTS)
        bytes_max = min(WINDOW_BYTES, caller.burst_bytes or WINDOW_BYTES)
        while window := await body.next_window(exchange.splitter, events_max, bytes_max):
            head.check_validity()
            await _wait_for_rate(caller, len(window), sum(map(_size_of, window)), body)
            await self._wait_for_queue(body)
            if not response.started:
                self._telemetry.requested(exchange.status, "")
                response.start(exchange.status, headers_of(exchange.head + caller.rate_lines()))
            writing = write_each(admission, window, exchange.parse, time.monotonic(), caller, exchange.fresh_key)
            async for results in in_steps(writing):
                response.write("".join(map(exchange.render, results)).encode())
            await response.room()
        if not response.started:
            raise invalid("body", "send at least one event")
        await response.end()

    async def _wait_for_queue(self, body: "StreamedBody") -> None:
        """Wait, for OVERLOAD_WAIT_S at most, until the queue takes events. Raises what StreamedBody.pause does."""
        until = time.monotonic() + OVERLOAD_WAIT_S
        while self._admission.overload is not None and time.monotonic() < until:
            await body.pause(OVERLOAD_PAUSE_S)


def _size_of(text: Text) -> int:
    return 0 if isinstance(text, Problem) else len(text)


async def _wait_for_rate(caller: Caller, events: int, size: int, body: "StreamedBody") -> None:
    """Wait until the caller may send events, and count them with the bytes of their texts.

    Raises Problem (429) if that would take too long, and what StreamedBody.pause does.
    """
    while (wait_s := await caller.wait_s()) > 0:
        if wait_s > RATE_PAUSE_MAX_S:
            break
        await body.pause(wait_s)
    caller.spend(events, size)


class ByContentType:
    """An ASGI endpoint that hands requests with one media type to an endpoint, and all others to another."""

    def __init__(self, kind: str, streamed: ASGIApp, others: ASGIApp) -> None:
        self._kind = kind
        self._streamed = streamed
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_streamed = essence(content_type_of(scope["headers"])) == self._kind
        await (self._streamed if is_streamed else self._others)(scope, receive, send)


class StreamedBody:
    """The body of a request as it arrives, decoded. The server's next message is awaited when there is room for it."""

    def __init__(self, receive: Receive, stopping: StopSignal, bodies: Bodies) -> None:
        self._receive = receive
        self._stopping = stopping
        self._stopped: asyncio.Future[None] | None = None
        self._coming: asyncio.Task[Message] | None = None  # the next message, if it was asked for
        self._memory = Share(bodies)
        self._waited_s = 0.0  # for the text that is incomplete
        self._idle_s = 0.0  # waited since the last text
        self._fault: Problem | None = None  # of the body, raised after the window that was read before it
        self.decoder = Decoder("")  # for the content coding of the body
        self._complete = False  # the server has sent all of it
        self._ended = False  # the end was passed on to decoder and splitter
        self.begun = False  # a message was asked for, at which a server sends 100 Continue

    async def next_window(self, splitter: Splitter, events_max: int, bytes_max: int) -> list[Text]:
        """Return the next texts: those that are there without waiting, or else the next one.

        They are at most `events_max`, and none follows that with which they have `bytes_max` bytes.
        Returns nothing at the end of the body. Raises Problem (408, 503) if the body cannot be read on, and ClientGone.
        """
        if self._fault is not None:
            raise self._fault
        window = _Window(events_max, bytes_max)
        try:
            await self._fill(window, splitter)
        except Problem as problem:
            if not window.texts:
                raise
            self._fault = problem
        return window.texts

    async def _fill(self, window: "_Window", splitter: Splitter) -> None:
        """Add texts to a window, until it is full, or no more of the body is there. Raises what next_window does."""
        time_slice = TimeSlice()
        while not window.is_full and not splitter.is_over:
            text = await next_text(splitter, time_slice)
            if text is not None:
                window.add(text)
                self._waited_s = self._idle_s = 0.0
            elif not await self._feed(window, splitter):
                return

    async def _feed(self, window: "_Window", splitter: Splitter) -> bool:
        """Feed the splitter or the decoder with more of the body; return False to write the window without more.

        An empty window is fed until the body ends.
        """
        piece = self.decoder.next()
        if piece is not None:
            splitter.feed(piece)
            return True
        if self._complete:
            return self._end(splitter)
        if not self._memory.resize(self.decoder.held + splitter.held + window.bytes):
            if not window.texts:
                _drop_incomplete(splitter)
            return not window.texts
        if window.texts and not await self._is_there(window.time_left):
            return False
        self.decoder.feed(await self._read(splitter.held))
        return True

    def _end(self, splitter: Splitter) -> bool:
        """Tell decoder and splitter that the body has ended; return False if they know it."""
        if self._ended:
            return False
        self._ended = True
        self.decoder.end()
        splitter.end()
        return True

    def _ask(self) -> "asyncio.Task[Message]":
        """Ask the server for the next message, once."""
        if self._coming is None:
            self.begun = True
            self._coming = asyncio.get_running_loop().create_task(_received(self._receive))
        return self._coming

    async def pause(self, seconds: float) -> None:
        """Wait for a time, or until the next message comes. Raises Problem (503) for a stop, and ClientGone."""
        coming = self._ask()
        waiting: set[asyncio.Future[Any]] = {self._stop} if coming.done() else {self._stop, coming}
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_stopping()
        if coming.done() and coming.result()["type"] == "http.disconnect":
            raise ClientGone

    @property
    def _stop(self) -> asyncio.Future[None]:
        """A future that is done once the process is stopping."""
        self._stopped = self._stopped or self._stopping.future()
        return self._stopped

    def _raise_if_stopping(self) -> None:
        if self._stop.done():
            raise Problem(NOT_WRITTEN, "this process is stopping")

    async def _is_there(self, within_s: float) -> bool:
        """Tell whether the next message comes within a time."""
        await asyncio.wait({self._ask()}, timeout=within_s)
        return self._ask().done()

    async def _read(self, held: int) -> bytes:
        """Return the next part of the body, which may be empty; `held` bytes of an incomplete text were read before.

        Raises Problem (408, 503), and ClientGone.
        """
        coming, since = self._ask(), time.monotonic()
        either: set[asyncio.Future[Any]] = {coming, self._stop}
        self._waited_s = self._waited_s if held else 0.0
        left_s = min(SILENCE_MAX_S, SILENCE_MAX_S + held / LEAST_BYTES_S - self._waited_s)
        await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_stopping()
        if not coming.done():
            raise Problem(REQUEST_TIMEOUT, _silence(left_s))
        waited_s = time.monotonic() - since
        self._waited_s += waited_s
        self._idle_s += waited_s
        if not held and self._idle_s > IDLE_WINDOW_MAX_S and self.decoder.held > OWN_BYTES:
            why = f"no event came for {IDLE_WINDOW_MAX_S:g} s within a frame: end the frame before a pause"
            raise Problem(REQUEST_TIMEOUT, f"body: {why}")
        self._coming = None
        message = coming.result()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._complete = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    async def close(self) -> None:
        """Read nothing more, and hold nothing."""
        self._memory.resize(0)
        if self._stopped is not None:
            self._stopped.cancel()
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.wait({self._coming})


def _drop_incomplete(splitter: Splitter) -> None:
    """Drop the incomplete text; raise Problem (503) if there is none, and it is the decoder that has the memory."""
    if not splitter.held:
        raise Problem(NOT_WRITTEN, BODIES_ARE_FULL)
    splitter.drop(Problem(NOT_WRITTEN, f"{BODIES_ARE_FULL}: send this event again"))


async def _received(receive: Receive) -> Message:
    return await receive()


def _silence(left_s: float) -> str:
    """Explain a 408: a text that has had its time at the least rate may be silent for less than SILENCE_MAX_S."""
    why = (
        f"nothing came for {SILENCE_MAX_S:g} s"
        if left_s == SILENCE_MAX_S
        else f"less than {LEAST_BYTES_S} bytes a second of an event came"
    )
    return f"body: {why}"


class _Window:
    """The next texts of a body, and their bounds."""

    def __init__(self, events_max: int, bytes_max: int) -> None:
        self.texts: list[Text] = []
        self.bytes = 0
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._opened_at = 0.0  # when the first text was added

    def add(self, text: Text) -> None:
        if not self.texts:
            self._opened_at = time.monotonic()
        self.texts.append(text)
        self.bytes += len(text) if isinstance(text, bytes) else 0

    @property
    def is_full(self) -> bool:
        return len(self.texts) >= self._events_max or self.bytes >= self._bytes_max

    @property
    def time_left(self) -> float:
        """The time, in seconds, to wait for more of the body."""
        return min(WINDOW_LINGER_S, max(0.0, self._opened_at + WINDOW_S - time.monotonic()))


class StreamedResponse:
    """A response that is written in pieces, which wait in memory until the client reads them.

    An HTTP/1.0 client, to which no response of unknown length can be sent on, gets them together, at the end.
    """

    def __init__(self, send: Send, version: str, bodies: Bodies) -> None:
        self._send = send
        self._is_whole = version == "1.0"
        self._memory = Share(bodies)
        self._status, self._headers = 0, Headers()
        self._unsent: deque[bytes] = deque()
        self._bytes = 0
        self._written = asyncio.Event()  # there is more to send, or the end
        self._read = asyncio.Event()  # a piece was sent, or none will be
        self._ended = False
        self._sending: asyncio.Task[None] | None = None
        self.started = False

    def start(self, status: int, headers: Headers) -> None:
        """Begin the response."""
        self.started = True
        self._status, self._headers = status, headers
        if not self._is_whole:
            self._sending = asyncio.get_running_loop().create_task(self._send_all())

    def write(self, piece: bytes) -> None:
        """Write the next piece of the body."""
        self._unsent.append(piece)
        self._bytes += len(piece)
        self._written.set()

    async def room(self) -> None:
        """Wait until the client has read enough to be sent more.

        Raises Problem (413, 503) for an HTTP/1.0 client that would get too much at once, and ClientGone.
        """
        while self._bytes > OWN_BYTES and (self._bytes > UNREAD_BYTES_MAX or not self._memory.resize(self._bytes)):
            if self._sending is None:
                if self._bytes <= UNREAD_BYTES_MAX:  # there is room at another time
                    raise Problem(NOT_WRITTEN, RESPONSES_ARE_FULL)
                raise Problem(TOO_LARGE, "body: HTTP/1.0 takes no more results at once: use HTTP/1.1")
            if self._sending.done():  # it has failed, perhaps before this wait
                raise ClientGone
            self._read.clear()
            await self._read.wait()

    async def end(self) -> None:
        """End the body, and wait until it is sent. Raises ClientGone if the client does not read it."""
        self._ended = True
        if self._sending is None:
            await send_whole(self._send, self._status, self._headers, b"".join(self._unsent))
        else:
            self._written.set()
            await self._sending

    async def _send_all(self) -> None:
        """Send the pieces until the end. Raises ClientGone if the client has read nothing for UNREAD_MAX_S."""
        try:
            await self._send_soon({"type": "http.response.start", "status": self._status, "headers": self._headers})
            while self._unsent or not self._ended:
                await self._written.wait()
                self._written.clear()
                while self._unsent:
                    piece = self._next_piece()
                    await self._send_soon({"type": "http.response.body", "body": piece, "more_body": True})
                    self._bytes -= len(piece)
                    self._memory.resize(self._bytes)
                    self._read.set()
            await self._send_soon({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._read.set()

    def _next_piece(self) -> bytes:
        pieces, size = [self._unsent.popleft()], 0
        while self._unsent and (size := size + len(pieces[-1])) < WRITE_BYTES:
            pieces.append(self._unsent.popleft())
        return b"".join(pieces)

    async def _send_soon(self, message: Message) -> None:
        try:
            async with asyncio.timeout(UNREAD_MAX_S):
                await self._send(message)
        except TimeoutError:
            raise ClientGone from None

    async def close(self) -> None:
        """Send nothing more, and hold nothing."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        self._memory.resize(0)
