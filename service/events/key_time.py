"""The time at which an idempotency key was made, for keys that tell it: UUIDs of version 7, and ULIDs."""

import re
from typing import Final

_UUID7: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)
_UUID7_CHARS: Final = 36
_ULID: Final = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}", re.IGNORECASE)
_ULID_CHARS: Final = 26
_ULID_TIME_CHARS: Final = 10
_CROCKFORD: Final = {char: value for value, char in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}
# The year 2016, in which ULIDs were specified: 26 characters that tell an earlier time are another kind of key.
_ULIDS_SINCE_MS: Final = 1_451_606_400_000


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
