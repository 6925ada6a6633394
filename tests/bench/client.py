"""One client that waits for each answer, over a blocking socket, so that its own time is small."""

import socket
import time
from types import TracebackType
from typing import Self

from tests.bench.rows import NotRealWork


class OneClient:
    """A connection that stays open."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def send(self, key: str, body: bytes) -> None:
        """Send POST /events, without waiting for the answer."""
        head = (
            f"POST /events HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Idempotency-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)

    def receive(self) -> int:
        """Read the next answer completely, and return its status.

        Raises:
            NotRealWork: the connection ended.
        """
        raw = b""
        while (end := raw.find(b"\r\n\r\n")) < 0:
            raw += self._more()
        head = raw[:end].lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        while len(raw) < end + 4 + length:
            raw += self._more()
        return int(raw[9:12])

    def post(self, key: str, body: bytes) -> tuple[int, float]:
        """Send one event; returns the status, and the time to the answer in ms."""
        started = time.perf_counter()
        self.send(key, body)
        status = self.receive()
        return status, 1000 * (time.perf_counter() - started)

    def _more(self) -> bytes:
        found = self._socket.recv(65_536)
        if not found:
            raise NotRealWork("the service closed the connection")
        return found


def body_of(topic: str, number: int, size: int = 250) -> bytes:
    """Make an event of about this many bytes, as load.lua does."""
    head = f'{{"topic":"{topic}","key":"c{number % 1000}","value":{{"n":{number},"pad":"'
    return f'{head}{"x" * max(0, size - len(head) - 3)}"}}}}'.encode()
