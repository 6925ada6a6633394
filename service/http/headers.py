"""Headers of a request: those that the service uses, by name, and the media type of the body."""

import re
from collections.abc import Iterable
from typing import Final

from service.core.problems import (
    INVALID_HTTP,
    INVALID_KEY,
    UNSUPPORTED_CODING,
    UNSUPPORTED_TYPE,
    Problem,
)
from service.events.key_time import parse_first_sent

# Of an answer that is the same for each repetition of a request of Repeatable Requests.
REPEATABLE: Final = b"repeatability-result: accepted\r\n"
JSON: Final = "application/json"
# A batch with each event on a line of its own (newline-delimited JSON).
LINES: Final = "application/x-ndjson"
# The content codings of a body: service.http.encodings.
CODINGS: Final = ("gzip", "deflate", "zstd")
UsedHeaders = dict[bytes, str]  # the headers that the service uses, by lower-case name

# A parameter of a media type, its value a token or a quoted string (RFC 9110, section 5.6.6). The leading semicolon is
# an anchor: a search in a header of one long word is linear.
_PARAMETER: Final = re.compile(r';\s*([^\s;=]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;]*)')
_UTF8: Final = frozenset({"utf-8", "utf8"})
# Headers about the message, which are checked for every request.
OF_THE_MESSAGE: Final = frozenset({b"host", b"transfer-encoding"})
_WANTED: Final = OF_THE_MESSAGE | frozenset(
    {
        b"content-type",
        b"content-encoding",
        b"idempotency-key",
        b"repeatability-request-id",
        b"repeatability-first-sent",
        b"traceparent",
        b"prefer",
        b"ce-specversion",
        b"authorization",
    }
)
# Headers that may come once: several lines joined to a list could pass for a valid value.
_ONCE: Final = {
    b"idempotency-key": (INVALID_KEY, "Idempotency-Key"),
    b"repeatability-request-id": (INVALID_KEY, "Repeatability-Request-ID"),
    b"repeatability-first-sent": (INVALID_KEY, "Repeatability-First-Sent"),
    b"host": (INVALID_HTTP, "Host"),
}
_KEYS_OF_REQUESTS: Final = {
    b"idempotency-key": "Idempotency-Key",
    b"repeatability-request-id": "Repeatability-Request-ID",
}


def pick(headers: Iterable[tuple[bytes, bytes]]) -> UsedHeaders:
    """Return the headers that the service uses; lines of one name are joined to a list (RFC 9110, section 5.2).

    A header that takes no list then has an unknown value. Raises Problem (400) for two keys or two hosts.
    """
    used: UsedHeaders = {}
    for name, content in headers:
        if name in _WANTED:
            text = content.decode("latin-1")
            if name in used:
                if name in _ONCE:
                    kind, header = _ONCE[name]
                    raise Problem(kind, f"{header}: send it once")
                text = f"{used[name]}, {text}"
            used[name] = text
    return used


def raw_key_of(used: UsedHeaders) -> str | None:
    """Return the idempotency key as it was sent; without one the id of OASIS' Repeatable Requests; None without both.

    https://docs.oasis-open.org/odata/repeatable-requests/v1.0/repeatable-requests-v1.0.html
    """
    key = used.get(b"idempotency-key")
    return used.get(b"repeatability-request-id") if key is None else key


def check_no_key(used: UsedHeaders) -> None:
    """Raise Problem (400) for a request with a key whose events have keys of their own.

    A key that is ignored would promise too much: that the request is one transaction, or that its repetition under this
    key writes nothing, whatever the keys of its events are.
    """
    for name, header in _KEYS_OF_REQUESTS.items():
        if name in used:
            raise Problem(
                INVALID_KEY,
                f"{header}: each event of this batch has a key of its own, as idempotency_key: leave this header out, "
                'or send JSON with "atomic": true, which is written in one transaction under this key',
            )


def sent_at_ms(used: UsedHeaders) -> int | None:
    """Return when a request was first sent, as it tells, ms since the Unix epoch. Raises Problem (400)."""
    raw = used.get(b"repeatability-first-sent")
    return None if raw is None else parse_first_sent(raw)


def check_message(used: UsedHeaders, host_needed: bool) -> None:
    """Refuse a message that an intermediary may read otherwise. Raises Problem (400, 501).

    RFC 9112, sections 3.2 and 6.1: HTTP/1.0 needs no Host. If there are several transfer codings, the parser looks at
    the last one, which delimits the body; the others would be left undecoded.
    """
    if host_needed and b"host" not in used:
        raise Problem(INVALID_HTTP, "Host: send this header")
    if b"transfer-encoding" in used and used[b"transfer-encoding"].strip(" \t").lower() != "chunked":
        raise Problem(UNSUPPORTED_CODING, "Transfer-Encoding: send chunked alone, or a Content-Length")


def content_type_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the Content-Type of a request as `pick` does, several lines joined to a list; "" without one."""
    return ", ".join([content.decode("latin-1") for name, content in headers if name == b"content-type"])


def media_type(content_type: str | None) -> str:
    """Return the media type in lower case, without parameters. Raises Problem (415) for a charset other than UTF-8."""
    if content_type is None or content_type == JSON:
        return content_type or ""
    for name, text in _PARAMETER.findall(content_type):
        if name.lower() == "charset" and text.strip().strip('"').lower() not in _UTF8:
            raise Problem(UNSUPPORTED_TYPE, "Content-Type: send UTF-8")
    return essence(content_type)


def essence(content_type: str | None) -> str:
    """Return the media type in lower case, without parameters; the charset is not checked."""
    return (content_type or "").partition(";")[0].strip().lower()


def unsupported(*kinds: str) -> Problem:
    """Return the Problem (415) that names the supported media types."""
    return Problem(UNSUPPORTED_TYPE, f"Content-Type: send {' or '.join(kinds)} (in UTF-8)")
