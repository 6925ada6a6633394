"""The POSTs of events as ASGI endpoints, which any server, TestClient, middleware and instrumentation see.

FastAPI's own handling (dependencies, request and response objects) is left out, because it costs more than the rest.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from service.http.certificates import NO_CERTIFICATE, SCOPE_KEY
from service.http.request import WRITE_BYTES, Bodies, Handler, PostRequest, reading_time_s
from service.http.responses import Headers, headers_of

# A server may cancel the task of a client that has disconnected; these go on. The loop keeps no reference to a task.
_TASKS: Final[set[asyncio.Task[None]]] = set()


class AsgiEndpoint:
    """Hand the POSTs of one route to their handler."""

    def __init__(self, handler: Handler, body_bytes_max: int, bodies: Bodies) -> None:
        self._handler = handler
        self._body_bytes_max = body_bytes_max
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = AsgiRequest(scope, self._bodies)
        try:
            if not await request.read(receive, self._body_bytes_max):
                return
        except BaseException:  # a server or a middleware has cancelled the upload
            request.finish()
            raise
        self._handler(request)
        await request.respond(send)


class AsgiRequest(PostRequest):
    """A POST that an ASGI server has read: scope and messages in, response out."""

    __slots__ = ("_outcome", "_version")

    def __init__(self, scope: Scope, bodies: Bodies) -> None:
        client = scope.get("client")
        self._version: str = scope["http_version"]
        super().__init__(
            list(scope["headers"]),
            client[0] if client else None,
            bodies,
            keep_alive=True,
            chunked=self._version != "1.0",
            certificate=scope.get(SCOPE_KEY, NO_CERTIFICATE),
        )
        # The response; None if the connection ends without one.
        self._outcome: asyncio.Future[_Response | None] = asyncio.get_running_loop().create_future()

    async def read(self, receive: Receive, most: int) -> bool:
        """Read the body within its bounds; return False if the client disconnected before the body was complete.

        A body whose Content-Length exceeds `most` bytes is not awaited. A client that sent `Expect` may leave that
        body out, so the connection ends (RFC 9110, section 10.1.1).
        """
        if self.content_length > most:
            self.size = self.content_length
            self.keep_alive = not any(name == b"expect" for name, _ in self.headers)
        else:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.finish()
                    return False
                more = self.keep(message.get("body", b""), most) and message.get("more_body", False)
        self.arrived = time.monotonic()  # a deadline does not count the time of sending
        return True

    def run_in_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task. A stop of the server waits for it, because the response's own task does."""
        task = asyncio.get_running_loop().create_task(work)
        _TASKS.add(task)
        task.add_done_callback(_TASKS.discard)

    def answer(self, status: int, head: bytes, body: bytes) -> None:
        """Set the response; only the first call counts. `head` has header lines, each with its CRLF."""
        if not self.answered:
            self.finish()
            if self.rated is not None:
                head += self.rated.rate_lines()
            self._give(_Response(status, head, body))

    def cut(self) -> None:
        """End the connection without a response, which the server does if the application sends none."""
        self.finish()
        self._give(None)

    def _give(self, outcome: "_Response | None") -> None:
        if self._outcome.done():  # the server has cancelled it
            self.release_response()
        else:
            self._outcome.set_result(outcome)

    async def respond(self, send: Send) -> None:
        """Await the response and send it."""
        response = await self._outcome
        if response is not None:
            headers = headers_of(response.head)
            if not self.keep_alive and self._version.startswith("1."):  # HTTP/2 has no such header
                headers.append((b"connection", b"close"))
            try:
                await send_whole(send, response.status, headers, response.body)
            finally:
                self.release_response()


class _Response:
    """A response whose body is complete; `head` has header lines, each with its CRLF."""

    __slots__ = ("body", "head", "status")

    def __init__(self, status: int, head: bytes, body: bytes) -> None:
        self.status, self.head, self.body = status, head, body


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a response whose body is complete; each turn of the loop sends a slice of a long one.

    A client that takes longer than `reading_time_s` to read a long response gets no more of it. The server ends the
    connection then, because the response is not complete.
    """
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if len(body) <= WRITE_BYTES:
        await send({"type": "http.response.body", "body": body})
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(reading_time_s(len(body))):
            await _send_in_slices(send, body)


async def _send_in_slices(send: Send, body: bytes) -> None:
    start = 0
    while len(body) - start > WRITE_BYTES:
        piece = body[start : start + WRITE_BYTES]
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)
        start += WRITE_BYTES
    await send({"type": "http.response.body", "body": body[start:]})
