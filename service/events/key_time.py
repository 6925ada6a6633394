"""When an idempotency key was made, if it tells that (UUIDs of version 7, ULIDs), or its request was first sent."""

import re
from email.utils import parsedate_to_datetime
from typing import Final

from service.core.problems import INVALID_KEY, Problem

_UUID7: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)
_UUID7_CHARS: Final = 36
_ULID: Final = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}", re.IGNORECASE)
_ULID_CHARS: Final = 26
_ULID_TIME_CHARS: Final = 10
_CROCKFORD: Final = {char: value for value, char in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}
# The year 2016, in which ULIDs were specified: 26 characters that tell an earlier time are another kind of key.
_ULIDS_SINCE_MS: Final = 1_451_606_400_000


# IMF-fixdate (RFC 9110, section 5.6.7).
_FIXDATE: Final = re.compile(
    r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d [A-Z][a-z]{2} [1-9]\d{3} \d\d:\d\d:\d\d GMT", re.ASCII
)


def parse_first_sent(raw: str) -> int:
    """Parse the header Repeatability-First-Sent (OASIS Repeatable Requests 1.0): ms since the Unix epoch.

    Raises Problem (400).
    """
    text = raw.strip(" \t")
    try:
        if _FIXDATE.fullmatch(text):
            return 1000 * int(parsedate_to_datetime(text).timestamp())
    except ValueError:  # no such month, or a day that its month does not have
        pass
    raise Problem(
        INVALID_KEY,
        "Repeatability-First-Sent: send when the request was first sent, as in Thu, 26 Nov 2026 11:52:01 GMT",
    )


def made_at_ms(key: str) -> int | None:
    """Read when a key was made, ms since the Unix epoch by its maker's clock; None for a key that does not tell it.

    Sources: RFC 9562, section 5.7 (UUID of version 7); https://github.com/ulid/spec (ULID).
    """
    if len(key) == _UUID7_CHARS and key[14] == "7" and _UUID7.fullmatch(key):
        return int(key[:8] + key[9:13], 16)
    if len(key) == _ULID_CHARS and _ULID.fullmatch(key):
        made_ms = 0
        for char in key[:_ULID_TIME_CHARS].upper():
            made_ms = 32 * made_ms + _CROCKFORD[char]
        return made_ms if made_ms >= _ULIDS_SINCE_MS else None
    return None
