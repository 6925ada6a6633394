"""Responses as bytes: header lines, each with its CRLF, and bodies."""

import json
import re
from collections.abc import Iterable
from email.utils import formatdate
from functools import lru_cache
from typing import Final
from urllib.parse import quote

import msgspec

from service.core.problems import (
    BAD_SIGNATURE,
    ENCODED_DELIVERY,
    INVALID_TOKEN,
    UNAUTHORIZED,
    UNSUPPORTED_ENCODING,
    Kind,
    Problem,
)
from service.core.time_of_day import LAST_SECOND
from service.http.headers import CODINGS
from service.pipeline.request import Committed, Delivery, Quarantined, WriteResult

Headers = list[tuple[bytes, bytes]]

PROBLEM_TYPE: Final = b"application/problem+json"
JSON_LINE: Final = b"content-type: application/json\r\n"

# Unreserved characters (RFC 3986, section 2.3). Most keys have no others, and need no percent-encoding.
_UNRESERVED: Final = re.compile(r"[A-Za-z0-9_.~-]+")


def committed_lines(key: str, answer: Committed, retention_s: int) -> bytes:
    """Render the header lines of a 201. A replay has the same lines, and `idempotent-replayed`.

    `retention_s` is the retention, in seconds, of keys for which no rule sets one. A key is printable ASCII, so it
    cannot end its line early.
    """
    return b"%blocation: %b\r\n%b" % (JSON_LINE, location_of(key), key_lines(key, answer, retention_s))


def key_lines(key: str, answer: Committed | Quarantined, retention_s: int) -> bytes:
    """Render the header lines of an answer about its key: an echo, its expiry, and whether the answer is a replay."""
    return b"idempotency-key: %b\r\nidempotency-key-expires: %b\r\n%b" % (
        echo_of(key),
        imf_fixdate(expiry_s(answer, retention_s)),
        b"idempotent-replayed: true\r\n" if answer.replayed else b"",
    )


def expiry_s(answer: Committed | Quarantined, retention_s: int) -> int:
    """Return when the key of a result expires, in seconds since 1970."""
    deliveries = answer.deliveries  # none of a batch that has only committed offsets
    return answer.at // 1000 + ((deliveries[0][1].ttl_s if deliveries else 0) or retention_s)


def location_of(key: str) -> bytes:
    """Return the target of a key's state.

    The keys `.` and `..` go into the query, because clients remove dot segments from a path (RFC 3986, section 5.2.4),
    percent-encoded ones too (URL standard).
    """
    if key in (".", ".."):
        return b"/events/?key=" + key.encode()
    if _UNRESERVED.fullmatch(key):
        return b"/events/" + key.encode()
    return b"/events/" + quote(key, safe="").encode()


def echo_of(key: str) -> bytes:
    """Render a key as the value of Idempotency-Key: quoted (RFC 8941, section 3.3.3) if it would be read otherwise."""
    if key[0] in ' "' or key[-1] == " ":
        key = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return key.encode()


class _Metadata(msgspec.Struct, gc=False):
    """The body of a 201: the metadata of the record."""

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
    """One event of a batch that is not atomic; on a line of its own, with its key."""

    replayed: bool
    idempotency_key: str | msgspec.UnsetType = msgspec.UNSET


class _Failure(msgspec.Struct, gc=False):
    """One event of a batch that is not atomic, with its problem; only a dead letter has `replayed`.

    On a line of its own, with its key, if the event could be read.
    """

    status: int
    problem: dict[str, str | int]
    replayed: bool | msgspec.UnsetType = msgspec.UNSET
    idempotency_key: str | msgspec.UnsetType = msgspec.UNSET


class _Whole(msgspec.Struct, gc=False):
    """The body of an atomic batch's 201."""

    id: str
    results: list[_Member]


_encode: Final = msgspec.json.Encoder().encode


def render_metadata(delivery: Delivery) -> bytes:
    """`{"id","topic","partition","offset","timestamp"}`."""
    id, state = delivery
    return _encode(_Metadata(id.hex(), state.topic, state.partition, state.offset, state.ts))


def join_results(pieces: Iterable[bytes]) -> bytes:
    """Join rendered results, or pieces of several with commas between them, to the body of a 207."""
    return b'{"results":[%b]}' % b",".join(pieces)


def render_results(answers: Iterable[WriteResult]) -> bytes:
    """Render the results of events of a batch, with commas between them."""
    return _encode([_result_of(answer) for answer in answers])[1:-1]


def render_line(answer: WriteResult, key: str = "") -> bytes:
    """Render the result of an event of a batch as a line, with the event's key, if it has one that could be read."""
    return _encode(_result_of(answer, key or msgspec.UNSET)) + b"\n"


def _result_of(answer: WriteResult, key: str | msgspec.UnsetType = msgspec.UNSET) -> _Result | _Failure:
    if isinstance(answer, Problem):
        replayed = answer.replayed if isinstance(answer, Quarantined) else msgspec.UNSET
        return _Failure(answer.kind.status, answer.body(), replayed, key)
    id, state = answer.deliveries[0]
    return _Result(201, id.hex(), state.topic, state.partition, state.offset, state.ts, answer.replayed, key)


def render_atomic(id: bytes, answer: Committed) -> bytes:
    """Render the body of an atomic batch's 201; a replay has the same bytes."""
    results = [
        _Member(201, member.hex(), state.topic, state.partition, state.offset, state.ts)
        for member, state in answer.deliveries
    ]
    return _encode(_Whole(id.hex(), results))


def lines_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Render headers as lines, each with its CRLF."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def headers_of(lines: bytes) -> Headers:
    """Split header lines, each with its CRLF, into names and values."""
    headers: Headers = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, content = line.partition(b": ")
        headers.append((name, content))
    return headers


def render_problem(problem: Problem) -> tuple[int, Headers, bytes]:
    """Render status, headers and body of a problem (RFC 9457); Retry-After is sent if a retry may help."""
    if isinstance(problem, Quarantined):
        return problem.kind.status, [(b"content-type", PROBLEM_TYPE)], json.dumps(problem.body()).encode()
    headers, body = _rendered(problem.kind, problem.detail, problem.retry_after_s)
    return problem.kind.status, list(headers), body


# By kind of problem, the codings that the service takes (RFC 9110, section 12.5.3).
_ACCEPTED_CODINGS: Final = {UNSUPPORTED_ENCODING: ", ".join(CODINGS).encode(), ENCODED_DELIVERY: b"identity"}
# A 401 names a scheme (RFC 9110, section 15.5.2), and what is wrong with a token (RFC 6750, section 3.1). The scheme of
# signatures is not registered: each sender has its own.
CHALLENGES: Final = {
    UNAUTHORIZED: b"Bearer",
    INVALID_TOKEN: b'Bearer error="invalid_token"',
    BAD_SIGNATURE: b"Signature",
}


@lru_cache(maxsize=256)  # a fault gives thousands of requests the same problem
def _rendered(kind: Kind, detail: str, retry_after_s: int | None) -> tuple[tuple[tuple[bytes, bytes], ...], bytes]:
    headers: Headers = [(b"content-type", PROBLEM_TYPE)]
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    if kind in CHALLENGES:
        headers.append((b"www-authenticate", CHALLENGES[kind]))
    if kind in _ACCEPTED_CODINGS:
        headers.append((b"accept-encoding", _ACCEPTED_CODINGS[kind]))
    return tuple(headers), json.dumps(Problem(kind, detail).body()).encode()


@lru_cache(maxsize=1024)
def imf_fixdate(second: int) -> bytes:
    """A time in seconds since 1970 as an IMF-fixdate (RFC 9110, section 5.6.7), whose years have four digits."""
    return formatdate(min(second, LAST_SECOND), usegmt=True).encode()
