"""A minimal HTTP/1.1 client for a load: POST over connections that stay open.

httpx takes 5 ms of CPU for each request with many connections, so that the demo would measure the client.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit


class NoAnswer(Exception):
    """No complete response came: the request may have been carried out or not."""


@dataclass(frozen=True)
class Answer:
    """A response. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Connection:
    """One connection to one server, opened when needed. Only one task at a time may use it."""

    url: str
    timeout_s: float
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = field(default=None, init=False)

    async def post(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send one request and read its response.

        Raises:
            NoAnswer: the connection was refused, ended or timed out, or the response is not HTTP; it is closed now.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                reader, writer = await self._open()
                writer.write(self._request(path, headers, body))
                answer = await _read_answer(reader)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            await self.close()
            raise NoAnswer(str(error) or type(error).__name__) from error
        if answer.headers.get("connection", "").lower() == "close":
            await self.close()
        return answer

    async def close(self) -> None:
        """Close the connection, if it is open."""
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            parts = urlsplit(self.url)
            self._streams = await asyncio.open_connection(parts.hostname, parts.port)
        return self._streams

    def _request(self, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        lines = [f"POST {path} HTTP/1.1", f"Host: {urlsplit(self.url).netloc}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body


async def _read_answer(reader: asyncio.StreamReader) -> Answer:
    """Read the status, the headers, and a body of the length that the headers give.

    Raises:
        EOFError: the server closed the connection before the end.
        ValueError: this is not HTTP.
    """
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers["content-length"]) if "content-length" in headers else 0)
    return Answer(int(first.split()[1]), headers, body)
