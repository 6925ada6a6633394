"""POSTs whose bodies are read as they arrive: any number of events in, and one result for each out, as it is known.

A stream has the memory of one window of events, of one incomplete event, and of UNREAD_BYTES_MAX of results. It reads
the next window when the events of the last one have their results, and stops reading while the client does not read.
Each event has the deadlines of a request of its own.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from service.core.metrics import Telemetry
from service.core.problems import INTERNAL, REQUEST_TIMEOUT, Problem
from service.events.event import Event, invalid, parse_traceparent
from service.http.asgi import send_whole
from service.http.batch import write_each
from service.http.caller import Caller
from service.http.certificates import NO_CERTIFICATE, SCOPE_KEY, Names
from service.http.encodings import Decoder, coding_of
from service.http.headers import UsedHeaders, content_type_of, essence, pick
from service.http.request import BODY_USE, BodyUse, ClientGone
from service.http.request_guard import RequestGuard
from service.http.responder import in_steps
from service.http.responses import Headers, headers_of, render_problem
from service.http.streamed_body import WINDOW_BYTES, WINDOW_EVENTS, Splitter, StreamedBody, Text
from service.http.streamed_response import StreamedResponse
from service.pipeline.admission import Admission
from service.pipeline.request import WriteResult

log = structlog.get_logger(__name__)

# The longest pause of a stream whose caller is over its rate: proxies close a connection without bytes after a minute.
# Only a rate of less than one event in it needs a longer one, or the debt of several streams of one caller.
RATE_PAUSE_MAX_S: Final = 60.0
# The longest time that a stream waits while the queue is full; then its events get 503.
OVERLOAD_WAIT_S: Final = 10.0
OVERLOAD_PAUSE_S: Final = 0.05
# In the last line of a stream whose body could not be read to its end. `Exchange.render_end` adds what to send then,
# which depends on the keys.
REST_NOT_WRITTEN: Final = "what is behind the last result was not written"


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
    """One stream in the form of its API: how its body is cut, parsed and answered.

    `parse` and `render` are called once for each text, in the order of the body. `render_end` renders the last line of
    a stream whose body could not be read to its end, and says what to send then.
    """

    splitter: Splitter
    parse: Callable[[Text], Event | Awaitable[Event]]
    render: Callable[[WriteResult], bytes]
    render_end: Callable[[Problem], bytes]
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
        body = StreamedBody(receive, self._guard.stopping, self._guard.bodies, scope.get(BODY_USE) or BodyUse())
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
                    response.write(exchange.render_end(end))
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

    async def _refuse(self, scope: Scope, send: Send, body: StreamedBody, problem: Problem) -> None:
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
        self, head: StreamHead, exchange: Exchange, body: StreamedBody, response: StreamedResponse
    ) -> None:
        """Write the events of a body, window by window. Raises Problem where the body cannot be read on."""
        while await self._write_window(head, exchange, body, response):
            pass
        if not response.started:
            raise invalid("body", "send at least one event")
        await response.end()

    async def _write_window(
        self, head: StreamHead, exchange: Exchange, body: StreamedBody, response: StreamedResponse
    ) -> bool:
        """Await the next window and write its events; return False at the end of the body. Raises as `_write`.

        The next call may wait for long: nothing may hold the texts of this window by then.
        """
        admission, caller = self._admission, head.caller
        # A larger window would be a debt of many seconds.
        events_max = min(WINDOW_EVENTS, caller.burst or WINDOW_EVENTS)
        bytes_max = min(WINDOW_BYTES, caller.burst_bytes or WINDOW_BYTES)
        window = await body.next_window(exchange.splitter, events_max, bytes_max)
        if not window:
            return False
        head.check_validity()
        await _wait_for_rate(caller, len(window), sum(map(_size_of, window)), body)
        await self._wait_for_queue(body)
        if not response.started:
            self._telemetry.requested(exchange.status, "")
            response.start(exchange.status, headers_of(exchange.head + caller.rate_lines()))
        writing = write_each(admission, window, exchange.parse, time.monotonic(), caller, exchange.fresh_key)
        async for results in in_steps(writing):
            response.write(b"".join(map(exchange.render, results)))
        await response.room()
        return True

    async def _wait_for_queue(self, body: StreamedBody) -> None:
        """Wait, for OVERLOAD_WAIT_S at most, until the queue takes events. Raises what StreamedBody.pause does."""
        until = time.monotonic() + OVERLOAD_WAIT_S
        while self._admission.overload is not None and time.monotonic() < until:
            await body.pause(OVERLOAD_PAUSE_S)


def _size_of(text: Text) -> int:
    return 0 if isinstance(text, Problem) else len(text)


async def _wait_for_rate(caller: Caller, events: int, size: int, body: StreamedBody) -> None:
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
