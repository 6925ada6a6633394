"""The preferences of a client (RFC 7240): `Prefer: wait=N` and `Prefer: respond-async`."""

import re
from typing import Final, NamedTuple

# The name of a preference and its value, a token or a quoted string; parameters are ignored. The leading comma is an
# anchor and the quantifiers are possessive, so that a search is linear, also in one long blank.
_PREFERENCE: Final = re.compile(r"(?:^|,)\s*+([\w-]++)\s*+(?:=\s*+(?:\"([^\"]*)\"|([^\s;,]*)))?")
_SECONDS: Final = re.compile(r"[0-9]{1,9}")


class Preference(NamedTuple):
    """`wait_s`: seconds to wait for another request's write of the same key; `applied`: its Preference-Applied line.

    `repeatable` is the header line of an answer that each repetition of a request has, if it asks for one (OASIS
    Repeatable Requests 1.0).
    """

    wait_s: float = 0
    respond_async: bool = False
    applied: bytes = b""
    repeatable: bytes = b""


NO_PREFERENCE: Final = Preference()


def parse_prefer(raw: str | None) -> Preference:
    """Parse the preferences of a request. Unknown and malformed ones are ignored, as the RFC says."""
    if raw is None:
        return NO_PREFERENCE
    found: dict[str, str] = {}
    for name, quoted, token in _PREFERENCE.findall(raw):
        found.setdefault(name.lower(), quoted or token)  # the first of several counts
    wait = found.get("wait", "")
    wait_s = int(wait) if _SECONDS.fullmatch(wait) else 0
    applied = b"preference-applied: wait=%d\r\n" % wait_s if wait_s else b""
    return Preference(wait_s, "respond-async" in found, applied)
