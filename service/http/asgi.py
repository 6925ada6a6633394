"""The POSTs of events as ASGI endpoints, which any server, TestClient, middleware and instrumentation see.

FastAPI's own handling (dependencies, request and response objects) is left out, because it costs more than the rest.
"""

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from service.http.request import WRITE_BYTES, Bodies, Handler, PostRequest
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
        )
        # The response; None if the connection ends without one.
        self._outcome: asyncio.Future[_Whole | _Pieces | None] = asyncio.get_running_loop().create_future()

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
            self._give(_Whole(status, head, body))

    def stream(self, status: int, head: bytes) -> "_Pieces":
        """Begin a response whose body comes in pieces."""
        pieces = _Pieces(self, status, head)
        if self.chunked:
            self._give(pieces)
        return pieces

    def cut(self) -> None:
        """End the connection without a response, which the server does if the application sends none."""
        self.finish()
        self._give(None)

    def _give(self, outcome: "_Whole | _Pieces | None") -> None:
        if not self._outcome.done():  # the server may have cancelled it
            self._outcome.set_result(outcome)

    async def respond(self, send: Send) -> None:
        """Await the response and send it."""
        outcome = await self._outcome
        if isinstance(outcome, _Whole):
            await send_whole(send, outcome.status, self._headers(outcome.head), outcome.body)
        elif outcome is not None:
            await send(
                {"type": "http.response.start", "status": outcome.status, "headers": self._headers(outcome.head)}
            )
            await outcome.send(send)

    def _headers(self, head: bytes) -> Headers:
        headers = headers_of(head)
        if not self.keep_alive and self._version.startswith("1."):  # HTTP/2 has no such header
            headers.append((b"connection", b"close"))
        return headers


class _Whole:
    """A response whose body is complete; `head` has header lines, each with its CRLF."""

    __slots__ = ("body", "head", "status")

    def __init__(self, status: int, head: bytes, body: bytes) -> None:
        self.status, self.head, self.body = status, head, body


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a response whose body is complete; each turn of the loop sends a slice of a long one."""
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    start = 0
    while len(body) - start > WRITE_BYTES:
        slice = body[start : start + WRITE_BYTES]
        await send({"type": "http.response.body", "body": slice, "more_body": True})
        await asyncio.sleep(0)
        start += WRITE_BYTES
    await send({"type": "http.response.body", "body": body[start:]})


class _Pieces:
    """A response whose pieces are sent as they are written; an HTTP/1.0 client gets them together, at the end."""

    def __init__(self, request: AsgiRequest, status: int, head: bytes) -> None:
        self._request = request
        self.status, self.head = status, head
        self._unsent: deque[bytes] = deque()
        self._has_news = asyncio.Event()  # a piece was written, or the response has ended
        self._whole = self._cut = False

    def write(self, piece: bytes) -> None:
        """Write the next piece of the body."""
        if piece:
            self._unsent.append(piece)
            self._has_news.set()

    def end(self) -> None:
        """End the body."""
        if not self._request.chunked:
            self._request.answer(self.status, self.head, b"".join(self._unsent))
            return
        self._request.finish()
        self._whole = True
        self._has_news.set()

    def cut(self) -> None:
        """Abort the body: the end of the connection tells the client that the body is incomplete."""
        self._cut = True
        self._has_news.set()
        self._request.cut()

    async def send(self, send: Send) -> None:
        """Send the pieces until the body ends or is aborted."""
        while not self._cut:
            await self._has_news.wait()
            self._has_news.clear()
            while self._unsent:
                await send({"type": "http.response.body", "body": self._unsent.popleft(), "more_body": True})
            if self._whole and not self._unsent:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
