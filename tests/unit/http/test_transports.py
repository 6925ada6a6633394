"""Tests that both transports see the same requests in the same bytes: none may take for a body what is a request."""

import asyncio
import contextlib
import random
import re

from tests.unit.http.whole_service import serving

LINES = [
    b"POST /events",
    b"POST /events?a=b",
    b"POST /event%73",
    b"POST /events/batch",
    b"POST /topics/t",
    b"POST /v3/clusters/c/topics/t/records",
    b"POST /sources/s",
    b"POST /nowhere",
    b"PUT /events",
    b"GET /livez",
]
HOSTS = [b"host: x\r\n"] * 9 + [b"", b"host: x\r\nhost: y\r\n"]
TYPES = [b"content-type: text/plain\r\n", b"content-type: application/json\r\nidempotency-key: k\r\n", b""]
# Heads and bodies that hold a request, which is none.
INNER = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
LENGTH = b"content-length: %d\r\n" % len(INNER)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)
FRAMES = [
    (b"", b""),
    (LENGTH, INNER),
    (b"Content-Length : 5\r\n", b"abcde"),
    (b"content-length: +5\r\n", b"abcde"),
    (b"content-length: 5\r\ncontent-length: 5\r\n", b"abcde"),
    (CHUNKED, CHUNKS),
    (CHUNKED, b"3;a=b\r\nabc\r\n0\r\nx: y\r\n\r\n"),
    (CHUNKED, b"0x3\r\nabc\r\n0\r\n\r\n"),
    (LENGTH + CHUNKED, CHUNKS),
    (b"transfer-encoding: gzip, chunked\r\n", CHUNKS),
    (b"transfer-encoding: x\r\n", CHUNKS),
    (b"expect: 100-continue\r\n" + LENGTH, INNER),
    (b"expect: 100-continue\r\n" + CHUNKED, CHUNKS),
    (b"x: a\r\n b\r\n" + LENGTH, INNER),
    (b"x:\x00\r\n" + LENGTH, INNER),
    (b"connection: upgrade\r\nupgrade: h2c\r\n" + LENGTH, INNER),
]
LAST = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def some_requests(dice: random.Random) -> list[bytes]:
    """Make one to three requests, in parts; the last part ends the connection."""
    parts = []
    for _ in range(dice.randrange(1, 4)):
        frame, body = dice.choice(FRAMES)
        version = dice.choice([b"HTTP/1.1"] * 9 + [b"HTTP/1.0"])
        head = b"%b %b\r\n%b%b%b\r\n" % (dice.choice(LINES), version, dice.choice(HOSTS), dice.choice(TYPES), frame)
        parts += [head, body] if dice.random() < 0.5 else [head + body]
    return [*parts, LAST] if dice.random() < 0.5 else [b"".join([*parts, LAST])]


async def answers(port: int, parts: list[bytes]) -> list[bytes]:
    """Send requests; returns the statuses of all answers but 100, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.002)
    found = b""
    async with asyncio.timeout(10.0):
        with contextlib.suppress(ConnectionError):
            while more := await reader.read(65_536):
                found += more
    writer.close()
    return re.findall(rb"HTTP/1\.1 ([2-5]..) ", found)


async def test_both_transports_find_the_same_requests_in_the_same_bytes() -> None:
    """Either may close a connection earlier: behind what is not HTTP, or that an unanswered request is before."""
    dice = random.Random(11)
    compared = 0
    async with serving("direct") as direct, serving("asgi") as asgi:
        for _ in range(300):
            parts = some_requests(dice)
            pairs = [*zip(*await asyncio.gather(answers(direct, parts), answers(asgi, parts)), strict=False)]
            assert [ours for ours, _ in pairs] == [theirs for _, theirs in pairs], parts
            compared += len(pairs)
    assert compared > 300
