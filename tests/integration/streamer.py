"""A client that sends NDJSON of any length on one connection, and reads the results at the same time."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from urllib.parse import urlsplit

CHUNK_BYTES = 256 * 1024


async def stream_lines(url: str, lines: Iterable[bytes], coding: str = "") -> Counter[int]:
    """Send lines, each with its line feed, to a process; count the results by status, and check that all are there."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)
    head = [
        f"POST /events/batch HTTP/1.1\r\nhost: {parts.netloc}\r\n",
        "content-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n",
        f"content-encoding: {coding}\r\n" if coding else "",
        "\r\n",
    ]
    writer.write("".join(head).encode())
    sending = asyncio.create_task(_send(writer, lines))
    answer = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert answer.startswith("HTTP/1.1 207 "), answer
    found, rest = Counter[int](), b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        *results, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n")
        found.update(json.loads(result)["status"] for result in results)
    assert rest == b""
    await sending
    writer.close()
    return found


async def _send(writer: asyncio.StreamWriter, lines: Iterable[bytes]) -> None:
    waiting, size = list[bytes](), 0
    for line in lines:
        waiting.append(line)
        size += len(line)
        if size >= CHUNK_BYTES:
            writer.write(b"%x\r\n%b\r\n" % (size, b"".join(waiting)))
            await writer.drain()
            waiting, size = [], 0
    writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"".join(waiting)) if size else b"0\r\n\r\n")
    await writer.drain()
