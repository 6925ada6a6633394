"""What the headers of a request say: those that matter, by their names, and what its body is."""

import re
from collections.abc import Iterable
from typing import Final

from service.core.problems import INVALID_HTTP, INVALID_KEY, UNSUPPORTED_CODING, UNSUPPORTED_TYPE, Problem

JSON: Final = "application/json"
Found = dict[bytes, str]  # the headers that matter, by lower-case name

# A parameter of a media type, its value a token or a quoted string (RFC 9110, section 5.6.6). The semicolon before it
# anchors it: a header of one long word is looked through once, not from each of its letters.
_PARAMETER: Final = re.compile(r';\s*([^\s;=]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;]*)')
_UTF8: Final = frozenset({"utf-8", "utf8"})
# Those that say how a request is to be read, whatever it is about.
OF_THE_MESSAGE: Final = frozenset({b"host", b"transfer-encoding"})
_WANTED: Final = OF_THE_MESSAGE | frozenset(
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
# A list of these could be taken for one that was sent.
_ONCE: Final = {b"idempotency-key": (INVALID_KEY, "Idempotency-Key"), b"host": (INVALID_HTTP, "Host")}


def pick(headers: Iterable[tuple[bytes, bytes]]) -> Found:
    """The headers that matter, by lower-case name; several lines are one list (RFC 9110, section 5.2).

    What is no list then says nothing that is known. Raises Problem where there are two keys, or two hosts.
    """
    found: Found = {}
    for name, content in headers:
        if name in _WANTED:
            text = content.decode("latin-1")
            if name in found:
                if name in _ONCE:
                    kind, header = _ONCE[name]
                    raise Problem(kind, f"{header}: send it once")
                text = f"{found[name]}, {text}"
            found[name] = text
    return found


def check_message(found: Found, host_needed: bool) -> None:
    """Refuse what somebody between the client and us may read otherwise. HTTP/1.0 does without a host. Raises Problem.

    RFC 9112, sections 3.2 and 6.1: of several codings the parser looks at the last one, which tells where the body ends
    and not what it is.
    """
    if host_needed and b"host" not in found:
        raise Problem(INVALID_HTTP, "Host: send this header")
    if b"transfer-encoding" in found and found[b"transfer-encoding"].strip(" \t").lower() != "chunked":
        raise Problem(UNSUPPORTED_CODING, "Transfer-Encoding: send chunked alone, or a Content-Length")


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
