"""A POST as its endpoint sees it, whichever transport has read it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from service.http.headers import Found

# Of a body, what each request may have for itself: so that who sends little never waits for who sends much.
OWN_BYTES: Final = 64 * 1024


class Bodies:
    """How many bytes the bodies of all requests have in memory, beside what each may have for itself."""

    __slots__ = ("bytes", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0


class Stream(Protocol):
    """An answer in pieces; to a client of HTTP/1.0 in one piece, at its end."""

    def write(self, piece: bytes) -> None:
        """The next piece of the body."""

    def end(self) -> None:
        """The body is whole."""

    def cut(self) -> None:
        """The body will never be whole, which the end of the connection tells."""


class PostRequest(ABC):
    """One POST: its head, its body within the bounds of memory, and the one answer that it gets."""

    __slots__ = (
        "_bodies",
        "_content",
        "_taken",
        "arrived",
        "at_capacity",
        "chunked",
        "client",
        "found",
        "headers",
        "keep_alive",
        "response_complete",
        "size",
    )

    def __init__(
        self,
        headers: list[tuple[bytes, bytes]],
        client: str | None,
        bodies: Bodies,
        *,
        keep_alive: bool,
        chunked: bool,
    ) -> None:
        self._bodies = bodies
        self._content: bytes | bytearray = b""  # of pieces one array: an object for each would be many times their size
        self._taken = 0  # of the bytes that all bodies share
        self.headers = headers  # names in lower case
        self.client = client  # the caller's address; None for a connection that has none
        self.found: Found | None = None  # those that matter, where nobody has to look for them any more
        self.keep_alive = keep_alive
        self.chunked = chunked  # the client understands an answer in pieces
        self.arrived = 0.0  # when it was whole, by time.monotonic
        self.size = 0  # of the body so far, in bytes
        self.at_capacity = False  # there was no room for its body
        self.response_complete = False

    @property
    def body(self) -> bytes:
        if isinstance(self._content, bytearray):
            self._content = bytes(self._content)
        return self._content

    def keep(self, part: bytes, most: int) -> bool:
        """Keep more of the body; False where nothing of it is kept any more.

        That is so past `most` bytes, which `size` tells, and where there is no room, which `at_capacity` tells.
        """
        self.size += len(part)
        if self.size > most or not self._has_room(len(part)):
            self.drop_body()
            return False
        if not self._content:
            self._content = part
        elif isinstance(self._content, bytearray):
            self._content += part
        else:
            self._content = bytearray(self._content) + part
        return True

    def _has_room(self, size: int) -> bool:
        if self.size > OWN_BYTES:
            self.at_capacity = self._bodies.bytes + size > self._bodies.most
            if not self.at_capacity:
                self._bodies.bytes += size
                self._taken += size
        return not self.at_capacity

    @property
    def told_size(self) -> int:
        """The size of the body as the head tells it; 0 where it does not."""
        return next((int(content) for name, content in self.headers if name == b"content-length"), 0)

    def drop_body(self) -> None:
        """Its body is needed no more."""
        self._content = b""
        if self._taken:
            self._bodies.bytes -= self._taken
            self._taken = 0

    def finish(self) -> None:
        """All of its answer is given, or will never be."""
        self.response_complete = True
        self.drop_body()

    @abstractmethod
    def apart(self, work: Coroutine[Any, Any, None]) -> None:
        """Go on in a task, which a stop of the server waits for."""

    @abstractmethod
    def answer(self, status: int, head: bytes, body: bytes) -> None:
        """Write the answer, once; `head` is the lines of its own headers, each with its CRLF."""

    @abstractmethod
    def stream(self, status: int, head: bytes) -> Stream:
        """Begin an answer whose body comes in pieces."""

    @abstractmethod
    def cut(self) -> None:
        """No answer, or no more of it, will ever be given: the end of the connection tells so."""


Handler = Callable[[PostRequest], None]
