"""Answers as bytes: header lines, each with its CRLF, and bodies."""

import json
import re
from collections.abc import Iterable
from email.utils import formatdate
from functools import lru_cache
from typing import Final
from urllib.parse import quote

import msgspec

from service.core.problems import UNAUTHORIZED, Kind, Problem
from service.pipeline.request import Committed, Delivery, WriteResult

Headers = list[tuple[bytes, bytes]]

PROBLEM_TYPE: Final = b"application/problem+json"
JSON_LINE: Final = b"content-type: application/json\r\n"

# What a path may have as it is (RFC 3986, section 2.3): most keys are of nothing else.
_UNRESERVED: Final = re.compile(r"[A-Za-z0-9_.~-]+")
# The last that a date can name: an entry of the ledger may have been accepted, by its own word, at any time.
LAST_SECOND: Final = 253_402_300_799


def committed_lines(key: str, answer: Committed, retention_s: int) -> bytes:
    """The header lines of a 201: the same each time, but for the one that tells of a replay.

    A key is printable ASCII and an expiry is made here, so neither can end its line early.
    """
    return b"%blocation: %b\r\nidempotency-key: %b\r\nidempotency-key-expires: %b\r\n%b" % (
        JSON_LINE,
        location_of(key),
        echo_of(key),
        imf_fixdate(answer.at // 1000 + retention_s),
        b"idempotent-replayed: true\r\n" if answer.replayed else b"",
    )


def location_of(key: str) -> bytes:
    """Where the state of a key is told. As part of a path, a client takes dots away (RFC 3986, section 5.2.4).

    Percent-encoded ones too, by the URL standard.
    """
    if key in (".", ".."):
        return b"/events/?key=" + key.encode()
    if _UNRESERVED.fullmatch(key):
        return b"/events/" + key.encode()
    return b"/events/" + quote(key, safe="").encode()


def echo_of(key: str) -> bytes:
    """A key as a header that means it: quoted (RFC 8941, section 3.3.3) where its bare form would be read otherwise."""
    if key[0] in ' "' or key[-1] == " ":
        key = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return key.encode()


class _Metadata(msgspec.Struct, gc=False):
    """The body of a 201: where an event is."""

    id: str
    topic: str
    partition: int
    offset: int
    timestamp: int


class _Member(msgspec.Struct, gc=False):
    """One event of an atomic batch."""

    status: int
    id: str
    topic: str
    partition: int
    offset: int
    timestamp: int


class _Result(_Member, gc=False):
    """One event of several, each of which is written for itself."""

    replayed: bool


class _Whole(msgspec.Struct, gc=False):
    """The body of an atomic batch's 201."""

    id: str
    results: list[_Member]


_encode: Final = msgspec.json.Encoder().encode


def render_place(place: Delivery) -> bytes:
    """`{"id","topic","partition","offset","timestamp"}`."""
    id, there = place
    return _encode(_Metadata(id.hex(), there.topic, there.partition, there.offset, there.ts))


def render_results(answers: Iterable[WriteResult]) -> bytes:
    """The body of a 207: one result an event, in order."""
    return join_results(map(render_result, answers))


def join_results(results: Iterable[str]) -> bytes:
    """The body of a 207 whose results have been rendered."""
    return f'{{"results":[{",".join(results)}]}}'.encode()


def render_result(answer: WriteResult) -> str:
    """What is told of one event of several."""
    if isinstance(answer, Problem):
        return f'{{"status":{answer.kind.status},"problem":{json.dumps(answer.body())}}}'
    id, there = answer.deliveries[0]
    result = _Result(201, id.hex(), there.topic, there.partition, there.offset, there.ts, answer.replayed)
    return _encode(result).decode()


def render_whole(id: bytes, answer: Committed) -> bytes:
    """The body of an atomic batch's 201, the same bytes each time."""
    results = [
        _Member(201, member.hex(), there.topic, there.partition, there.offset, there.ts)
        for member, there in answer.deliveries
    ]
    return _encode(_Whole(id.hex(), results))


def lines_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers as they are sent, each with its CRLF."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def headers_of(lines: bytes) -> Headers:
    """Header lines, each with its CRLF, as names and contents."""
    headers: Headers = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, content = line.partition(b": ")
        headers.append((name, content))
    return headers


def render_problem(problem: Problem) -> tuple[int, Headers, bytes]:
    """`application/problem+json` (RFC 9457), with Retry-After where another try may help."""
    headers, body = _rendered(problem.kind, problem.detail, problem.retry_after_s)
    return problem.kind.status, list(headers), body


@lru_cache(maxsize=256)  # what thousands are told at once is made once
def _rendered(kind: Kind, detail: str, retry_after_s: int | None) -> tuple[tuple[tuple[bytes, bytes], ...], bytes]:
    headers: Headers = [(b"content-type", PROBLEM_TYPE)]
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    if kind is UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    return tuple(headers), json.dumps(Problem(kind, detail).body()).encode()


@lru_cache(maxsize=1024)
def imf_fixdate(second: int) -> bytes:
    """A time in seconds since 1970 as an IMF-fixdate (RFC 9110, section 5.6.7), whose years have four digits."""
    return formatdate(min(second, LAST_SECOND), usegmt=True).encode()
