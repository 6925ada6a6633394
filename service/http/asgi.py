"""POSTs as ASGI endpoints: any server, TestClient, middleware and instrumentation see them.

Thinner than FastAPI's own handling: no dependencies, no request object, no response object.
"""

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from service.http.request import Bodies, Handler, PostRequest
from service.http.responses import headers_of

# Work goes on where a server cancels the task of a client that has gone. The loop itself keeps no task alive.
_AT_WORK: Final[set[asyncio.Task[None]]] = set()


class AsgiEndpoint:
    """Hands the POSTs of one route to its handler."""

    def __init__(self, handler: Handler, body_bytes_max: int, bodies: Bodies) -> None:
        self._handler = handler
        self._body_bytes_max = body_bytes_max
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = AsgiRequest(scope, self._bodies)
        if await request.read(receive, self._body_bytes_max):
            self._handler(request)
            await request.respond(send)


class AsgiRequest(PostRequest):
    """One POST of an ASGI server, from its scope to its answer."""

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
        # Its one answer; None where it gets none.
        self._outcome: asyncio.Future[_Whole | _Pieces | None] = asyncio.get_running_loop().create_future()

    async def read(self, receive: Receive, most: int) -> bool:
        """Read the body, up to the bounds; False where the client has gone before it was whole.

        A body that is longer than `most` by its own head is not waited for. Who asks whether to send it may leave it
        out then, so that the connection ends (RFC 9110, section 10.1.1).
        """
        if self.told_size > most:
            self.size = self.told_size
            self.keep_alive = not any(name == b"expect" for name, _ in self.headers)
        else:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.finish()
                    return False
                more = self.keep(message.get("body", b""), most) and message.get("more_body", False)
        self.arrived = time.monotonic()  # it is not late for having been sent slowly
        return True

    def apart(self, work: Coroutine[Any, Any, None]) -> None:
        """Go on in a task. A stop of the server waits for it, as the answer's own task does."""
        task = asyncio.get_running_loop().create_task(work)
        _AT_WORK.add(task)
        task.add_done_callback(_AT_WORK.discard)

    def answer(self, status: int, head: bytes, body: bytes) -> None:
        """Give the answer, once; `head` is the lines of its own headers, each with its CRLF."""
        if not self.response_complete:
            self.finish()
            self._give(_Whole(status, head, body))

    def stream(self, status: int, head: bytes) -> "_Pieces":
        """Begin an answer whose body comes in pieces."""
        pieces = _Pieces(self, status, head)
        if self.chunked:
            self._give(pieces)
        return pieces

    def cut(self) -> None:
        """No answer will ever be given: the server ends the connection of an application that gives none."""
        self.finish()
        self._give(None)

    def _give(self, outcome: "_Whole | _Pieces | None") -> None:
        if not self._outcome.done():  # who waited may have been cancelled
            self._outcome.set_result(outcome)

    async def respond(self, send: Send) -> None:
        """Send the answer, as it comes to be known."""
        outcome = await self._outcome
        if isinstance(outcome, _Whole):
            headers = self._headers(outcome.head)
            headers.append((b"content-length", b"%d" % len(outcome.body)))
            await send({"type": "http.response.start", "status": outcome.status, "headers": headers})
            await send({"type": "http.response.body", "body": outcome.body})
        elif outcome is not None:
            await send(
                {"type": "http.response.start", "status": outcome.status, "headers": self._headers(outcome.head)}
            )
            await outcome.send(send)

    def _headers(self, head: bytes) -> list[tuple[bytes, bytes]]:
        headers = headers_of(head)
        if not self.keep_alive and self._version.startswith("1."):  # HTTP/2 has no such header
            headers.append((b"connection", b"close"))
        return headers


class _Whole:
    """An answer in one piece."""

    __slots__ = ("body", "head", "status")

    def __init__(self, status: int, head: bytes, body: bytes) -> None:
        self.status, self.head, self.body = status, head, body


class _Pieces:
    """An answer in pieces, each sent as soon as it is there; to a client of HTTP/1.0 in one piece, at its end."""

    def __init__(self, request: AsgiRequest, status: int, head: bytes) -> None:
        self._request = request
        self.status, self.head = status, head
        self._unsent: deque[bytes] = deque()
        self._there = asyncio.Event()  # something is to be sent, or nothing more will be
        self._whole = self._cut = False

    def write(self, piece: bytes) -> None:
        """The next piece of the body."""
        if piece:
            self._unsent.append(piece)
            self._there.set()

    def end(self) -> None:
        """The body is whole."""
        if not self._request.chunked:
            self._request.answer(self.status, self.head, b"".join(self._unsent))
            return
        self._request.finish()
        self._whole = True
        self._there.set()

    def cut(self) -> None:
        """The body will never be whole, which the end of the connection tells."""
        self._cut = True
        self._there.set()
        self._request.cut()

    async def send(self, send: Send) -> None:
        """Send the pieces, up to the last one."""
        while not self._cut:
            await self._there.wait()
            self._there.clear()
            while self._unsent:
                await send({"type": "http.response.body", "body": self._unsent.popleft(), "more_body": True})
            if self._whole and not self._unsent:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
