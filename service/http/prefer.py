"""What a client would rather have (RFC 7240): `Prefer: wait=N` and `Prefer: respond-async`."""

import re
from typing import Final, NamedTuple

# A preference's name, and its value, a token or a quoted string; parameters behind it mean nothing here. The comma
# before it anchors it, and nothing is tried twice: one long blank is looked through once, not from each of its places.
_PREFERENCE: Final = re.compile(r"(?:^|,)\s*+([\w-]++)\s*+(?:=\s*+(?:\"([^\"]*)\"|([^\s;,]*)))?")
_SECONDS: Final = re.compile(r"[0-9]{1,9}")


class Preference(NamedTuple):
    """`wait_s`: for how long to wait for another's write of the same key; `applied`: the header line that says so."""

    wait_s: int = 0
    respond_async: bool = False
    applied: bytes = b""


NONE: Final = Preference()


def parse_prefer(raw: str | None) -> Preference:
    """The preferences of a request. What is unknown or malformed is as if it were not there, as the RFC says."""
    if raw is None:
        return NONE
    found: dict[str, str] = {}
    for name, quoted, token in _PREFERENCE.findall(raw):
        found.setdefault(name.lower(), quoted or token)  # of one that comes twice the first counts
    wait = found.get("wait", "")
    wait_s = int(wait) if _SECONDS.fullmatch(wait) else 0
    applied = b"preference-applied: wait=%d\r\n" % wait_s if wait_s else b""
    return Preference(wait_s, "respond-async" in found, applied)
