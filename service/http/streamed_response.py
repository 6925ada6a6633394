"""The response of a stream: written in pieces, which wait in memory within bounds until the client reads them."""

import asyncio
from collections import deque
from typing import Final

from starlette.types import Message, Send

from service.core.problems import NOT_WRITTEN, TOO_LARGE, Problem
from service.http.asgi import send_whole
from service.http.request import OWN_BYTES, UNREAD_MAX_S, WRITE_BYTES, Bodies, ClientGone, Share
from service.http.responses import Headers

# Bytes of results that wait for a client that does not read: those of 10,000 events and more, so that a client that
# reads nothing before it has sent all may send as many.
UNREAD_BYTES_MAX: Final = 4 * 1024 * 1024
# Of results for an HTTP/1.0 client, for which there is no room.
RESPONSES_ARE_FULL: Final = "response: too many large ones are in memory"


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
