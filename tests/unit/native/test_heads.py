"""Tests that service.native reads heads as httptools does, and reads the common ones."""

import random

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import native
from service.http.headers import pick
from service.http.request_reader import HEAD_LINES_MAX

pytestmark = pytest.mark.skipif(not native.COMPILED, reason="installed without a compiler")

PLAIN = (
    b"POST /events HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Type: application/json\r\nIdempotency-Key: order-1\r\n"
    b"Content-Length: 4\r\n\r\nbody"
)


class Heard:
    """The callbacks of httptools for some bytes."""

    def __init__(self, data: bytes) -> None:
        self.url, self.body = b"", b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.begun = self.complete = 0
        self.parser = httptools.HttpRequestParser(self)
        self.failed = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.failed = True

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, content: bytes) -> None:
        self.headers.append((name.lower(), content))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete += 1


def agree(data: bytes) -> bool:
    """Check whether C reads a request, and then that httptools finds the same whole request."""
    read = native.heads.read_post(data)
    if read is None:
        return False
    heard = Heard(data)
    assert (heard.failed, heard.begun, heard.complete) == (False, 1, 1), data
    parser = heard.parser
    assert (parser.get_method(), parser.get_http_version(), parser.should_upgrade()) == (b"POST", "1.1", False)
    assert parser.should_keep_alive()
    assert read == (heard.url, pick(heard.headers), heard.body), data
    return True


def with_lines(*lines: bytes) -> bytes:
    return PLAIN.replace(b"\r\n\r\n", b"\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n")


@pytest.mark.parametrize(
    "data",
    [
        PLAIN,
        PLAIN.replace(b"/events", b"/events/batch?a=b%20c"),
        PLAIN.replace(b"Content-Length: 4", b"content-LENGTH:    4"),
        PLAIN.replace(b"order-1", b'"an order, of many words"'),
        PLAIN.replace(b"Content-Length: 4\r\n\r\nbody", b"Content-Length: 0\r\n\r\n"),
        with_lines(b"Connection: Keep-Alive", b"Accept: */*", b"User-Agent: x", b"!#$%&'*+-.^_`|~: 1"),
        with_lines(b"Prefer: wait=5", b"Authorization: Bearer x", b"Content-Encoding: identity", b"traceparent: 00"),
        with_lines(b"Repeatability-Request-ID: a", b"repeatability-FIRST-sent: Sun, 06 Nov 1994 08:49:37 GMT"),
        with_lines(b"x-" + b"y" * 5_000 + b": " + b"z" * 5_000, b"Accept: 1", b"Accept: 2"),
    ],
)
def test_a_plain_head_is_read_by_c_as_by_the_parser(data: bytes) -> None:
    assert agree(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\r\n" + PLAIN,
        PLAIN + b"x",
        PLAIN + PLAIN,
        PLAIN[:-1],
        PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PLAIN.replace(b"POST /", b"POST  /"),
        PLAIN.replace(b"POST /", b"POST http://x/"),
        PLAIN.replace(b"Content-Length: 4\r\n", b""),
        PLAIN.replace(b"Content-Length: 4", b"Content-Length: 04x"),
        PLAIN.replace(b"Content-Length: 4", b"Content-Length: +4"),
        PLAIN.replace(b"Content-Length: 4", b"Content-Length: 4 "),
        PLAIN.replace(b"Content-Length: 4", b"Content-Length : 4"),
        PLAIN.replace(b"Content-Length: 4", b"Content-Length: 00000004"),
        PLAIN.replace(b"Content-Length: 4", b"Content-Length: 18446744073709551620"),
        with_lines(b"Content-Length: 4"),
        with_lines(b"Content-Length: 5"),
        with_lines(b"Transfer-Encoding: chunked"),
        with_lines(b"Transfer-Encoding: identity"),
        with_lines(b"Connection: close"),
        with_lines(b"Connection: upgrade"),
        with_lines(b"Connection: keep-alive, close"),
        with_lines(b"Upgrade: h2c"),
        with_lines(b"Expect: 100-continue"),
        with_lines(b"Host: another"),
        with_lines(b"Idempotency-Key: another"),
        with_lines(b"Repeatability-Request-ID: a", b"Repeatability-Request-ID: a"),
        with_lines(b"Content-Type: text/plain"),
        with_lines(b"ce-specversion: 1.0"),
        with_lines(b" folded"),
        with_lines(b": nameless"),
        with_lines(b"no colon"),
        with_lines(b"a b: 1"),
        with_lines(b"a: \x00"),
        with_lines(b"a: \x7f"),
        with_lines(b"a: \xe9"),
        with_lines(b"a: b\nTransfer-Encoding: chunked"),
        with_lines(b"a: b\rc"),
        with_lines(b"\xc3\xa9: 1"),
        PLAIN.replace(b"\r\n", b"\n"),
    ],
)
def test_a_head_that_needs_more_checks_is_left_to_the_parser(data: bytes) -> None:
    assert native.heads.read_post(data) is None


PIECES = [
    *(
        b"\r",
        b"\n",
        b"\r\n",
        b"\r\n\r\n",
        b" ",
        b"\t",
        b":",
        b",",
        b"\x00",
        b"\x7f",
        b"\xff",
        b"4",
        b"0",
        b"x",
        b"HTTP/1.1",
    ),
    *(
        b"Content-Length: 4\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: close\r\n",
        b"Host: b\r\n",
        b"POST / ",
    ),
    *(
        b"Keep-Alive: 5\r\n",
        b"Expect: x\r\n",
        b"Accept: *\r\n",
        b"Upgrade: websocket\r\nConnection: upgrade\r\n",
        PLAIN,
    ),
]


@given(st.randoms(use_true_random=False))
def test_c_and_the_parser_read_the_same_request(chance: random.Random) -> None:
    """A request with pieces exchanged, removed or inserted."""
    data = chance.choice((PLAIN, with_lines(b"Connection: keep-alive"), with_lines(b"Accept: */*", b"Prefer: wait=1")))
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data) + 1)
        data = data[:at] + chance.choice([b"", *PIECES]) + data[at + chance.choice((0, 0, 1, 2, 19)) :]
        agree(data)


def test_a_head_of_more_lines_than_are_taken_is_left_to_the_parser() -> None:
    """The parser refuses it (service.http.limits)."""
    line, end = b"POST /events HTTP/1.1\r\n", b"content-length: 4\r\n\r\nbody"
    assert native.heads.read_post(line + (HEAD_LINES_MAX - 1) * b"a: b\r\n" + end) is not None
    assert native.heads.read_post(line + HEAD_LINES_MAX * b"a: b\r\n" + end) is None
