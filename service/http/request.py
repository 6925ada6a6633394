"""The interface between an endpoint and the transport that reads a POST and writes its response."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Final

from service.core.pieces import joined
from service.core.problems import NOT_WRITTEN, TOO_LARGE, Problem
from service.http.caller import Caller
from service.http.certificates import NO_CERTIFICATE, Names
from service.http.headers import UsedHeaders
from service.http.request_reader import LEAST_BYTES_S

# Bytes of a body that do not count against the bound of all bodies, so that large bodies never block small ones.
OWN_BYTES: Final = 64 * 1024

# Of a body for which `Bodies` has no room.
BODIES_ARE_FULL: Final = "body: too many large ones are under way"
TOO_MANY_BODIES: Final = f"{BODIES_ARE_FULL}: send it again a little later"

# Bytes of a response that one turn of the loop writes: a large response as a whole takes milliseconds.
WRITE_BYTES: Final = 64 * 1024
# The longest time for which a client may acknowledge none of the bytes that were sent to it. The kernel ends the
# connection then (RFC 5482); without that, the connection of a client that has vanished would stay open for ever.
UNREAD_MAX_S: Final = 60.0


def reading_time_s(size: int) -> float:
    """Return how long a client may take to read a response of `size` bytes, in seconds."""
    return UNREAD_MAX_S + size / LEAST_BYTES_S


class Bodies:
    """The bytes in memory of all bodies, and of all responses that are not read, beyond the first OWN_BYTES of each.

    `most` is the bound of each of the two: bodies, which anybody can send, must not keep others from their responses.
    """

    __slots__ = ("bytes", "most", "unread")

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0  # of bodies
        self.unread = 0  # of responses


class Share:
    """The memory of one holder, in bytes. Beyond OWN_BYTES it is counted in `bodies`."""

    __slots__ = ("_bodies", "_counted")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._counted = 0

    def resize(self, size: int) -> bool:
        """Note that the holder has `size` bytes; return False, without a change, if `bodies` is full."""
        more = max(0, size - OWN_BYTES) - self._counted
        if more > 0 and self._bodies.bytes + more > self._bodies.most:
            return False
        self._bodies.bytes += more
        self._counted += more
        return True


class StopSignal:
    """Says to requests without an end of their own that the process is stopping."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: set[asyncio.Future[None]] = set()

    def set(self) -> None:
        """Complete all futures. Runs on the event loop."""
        self.is_set = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    def future(self) -> asyncio.Future[None]:
        """Return a future that is done once the process is stopping; the caller cancels a future it has no use for."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.is_set:
            waiting.set_result(None)
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)
        return waiting


class BodyUse:
    """Whether an app that reads a body as it arrives has a part of it, so that it may have written some of it."""

    __slots__ = ("is_begun",)

    def __init__(self) -> None:
        self.is_begun = False


BODY_USE: Final = "fencepost.body_use"
"""Where a scope of ASGI has the BodyUse of its request; absent on other servers than our own."""


class ClientGone(Exception):
    """The client has disconnected, or reads nothing: nobody waits for the results."""


class PostRequest(ABC):
    """One POST: its head, its body within the bounds of memory, and its response."""

    __slots__ = (
        "_bodies",
        "_content",
        "_held",
        "_taken",
        "answered",
        "arrived",
        "body_was_dropped",
        "certificate",
        "chunked",
        "client",
        "headers",
        "keep_alive",
        "rated",
        "size",
        "used",
    )

    def __init__(
        self,
        headers: list[tuple[bytes, bytes]],
        client: str | None,
        bodies: Bodies,
        *,
        keep_alive: bool,
        chunked: bool,
        certificate: Names = NO_CERTIFICATE,
    ) -> None:
        self._bodies = bodies
        self._content: bytes | bytearray = b""
        self._taken = 0  # bytes of the body counted in `bodies`
        self._held = 0  # bytes of the response counted there
        self.headers = headers  # names in lower case
        self.client = client  # the address of the caller; None for a Unix socket
        self.certificate = certificate  # the names of the caller's certificate
        self.used: UsedHeaders | None = None  # the headers that the service uses, if the transport has picked them
        self.keep_alive = keep_alive
        self.chunked = chunked  # the client understands a chunked response
        self.arrived = 0.0  # when the request was complete, in seconds of time.monotonic
        self.size = 0  # of the body so far, in bytes
        self.body_was_dropped = False  # the body was dropped, because `bodies` was full
        self.answered = False  # only the first answer counts
        self.rated: Caller | None = None  # the caller, if any answer says what is left of its rates

    @property
    def body(self) -> bytes:
        if isinstance(self._content, bytearray):
            self._content = bytes(self._content)
        return self._content

    def check_body(self, most: int) -> None:
        """Raise Problem if the body was dropped (503), or has more than `most` bytes (413)."""
        if self.body_was_dropped:
            raise Problem(NOT_WRITTEN, TOO_MANY_BODIES)
        if self.size > most:
            raise Problem(TOO_LARGE, f"body: at most {most} bytes are taken")

    def decode(self, body: bytes) -> None:
        """Replace the body by what it decodes to; drop it and raise Problem (503) if `bodies` is full."""
        self.drop_body()
        self.size = len(body)
        if self._has_room(len(body)):
            self._content = body
        self.check_body(len(body))

    def keep(self, part: bytes, most: int) -> bool:
        """Keep a part of the body; drop the body and return False past `most` bytes, or if `bodies` is full.

        `size` tells the first, and `body_was_dropped` the second.
        """
        self.size += len(part)
        if self.size > most or not self._has_room(len(part)):
            self.drop_body()
            return False
        self._content = joined(self._content, part)
        return True

    def _has_room(self, size: int) -> bool:
        if self.size > OWN_BYTES:
            self.body_was_dropped = self._bodies.bytes + size > self._bodies.most
            if not self.body_was_dropped:
                self._bodies.bytes += size
                self._taken += size
        return not self.body_was_dropped

    @property
    def content_length(self) -> int:
        """Return the Content-Length in bytes; 0 without one."""
        for name, content in self.headers:
            if name == b"content-length":
                return int(content)
        return 0

    def drop_body(self) -> None:
        """Release the body's memory."""
        self._content = b""
        if self._taken:
            self._bodies.bytes -= self._taken
            self._taken = 0

    def hold_response(self, size: int) -> bool:
        """Note that the response has `size` bytes so far, until `release_response`; return False if there is no room.

        If no other response is held, there is always room: otherwise one above the bound would never be answered.
        """
        more = max(0, size - OWN_BYTES) - self._held
        if more > 0 and self._bodies.unread != self._held and self._bodies.unread + more > self._bodies.most:
            return False
        self._bodies.unread += more
        self._held += more
        return True

    def release_response(self) -> None:
        """Note that the response is written, or dropped."""
        if self._held:
            self._bodies.unread -= self._held
            self._held = 0

    def finish(self) -> None:
        """Note that the request is answered, or never will be."""
        self.answered = True
        self.drop_body()

    @abstractmethod
    def run_in_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task, which a stop of the server awaits."""

    @abstractmethod
    def answer(self, status: int, head: bytes, body: bytes) -> None:
        """Write the response; only the first call counts. `head` has header lines, each with its CRLF."""

    @abstractmethod
    def cut(self) -> None:
        """Abort the response: the end of the connection tells the client."""


Handler = Callable[[PostRequest], None]
