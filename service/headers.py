"""What the headers of a POST say: those that matter, by their names, and what its body is."""

import re
from collections.abc import Iterable
from typing import Final

from service.errors import INVALID_KEY, UNSUPPORTED_TYPE, Problem

JSON: Final = "application/json"
Found = dict[bytes, str]  # the headers that matter, by lower-case name

# A parameter of a media type, its value a token or a quoted string (RFC 9110, section 5.6.6). The semicolon before it
# anchors it: a header of one long word is looked through once, not from each of its letters.
_PARAMETER: Final = re.compile(r';\s*([^\s;=]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;]*)')
_UTF8: Final = frozenset({"utf-8", "utf8"})
_WANTED: Final = frozenset(
    {
        b"content-type",
        b"content-encoding",
        b"idempotency-key",
        b"traceparent",
        b"prefer",
        b"ce-specversion",
        b"authorization",
    }
)
_LISTS: Final = frozenset({b"prefer", b"content-encoding"})  # several lines are one list


def pick(headers: Iterable[tuple[bytes, bytes]]) -> Found:
    """The headers that matter, by lower-case name. Raises Problem where there are two keys."""
    found: Found = {}
    for name, content in headers:
        if name in _WANTED:
            text = content.decode("latin-1")
            if name in found:
                if name == b"idempotency-key":
                    raise Problem(INVALID_KEY, "Idempotency-Key: send it once")
                if name in _LISTS:
                    text = f"{found[name]}, {text}"
            found[name] = text
    return found


def is_coded(content_encoding: str) -> bool:
    """Is the body something else than what it is said to be, packed? Nothing is unpacked: 1 KB may hold 1 GB."""
    return content_encoding.strip().lower() not in ("", "identity")


def media_type(content_type: str | None) -> str:
    """What a body is said to be, in lower case, in UTF-8 if it says; other parameters are as good as none.

    Raises Problem (415).
    """
    if content_type is None or content_type == JSON:
        return content_type or ""
    for name, text in _PARAMETER.findall(content_type):
        if name.lower() == "charset" and text.strip().strip('"').lower() not in _UTF8:
            raise Problem(UNSUPPORTED_TYPE, "Content-Type: send UTF-8")
    return essence(content_type)


def essence(content_type: str | None) -> str:
    """A media type in lower case and without its parameters, whatever they say."""
    return (content_type or "").partition(";")[0].strip().lower()


def unsupported(*kinds: str) -> Problem:
    """415: what a body may be here."""
    return Problem(UNSUPPORTED_TYPE, f"Content-Type: send {' or '.join(kinds)} (in UTF-8)")
