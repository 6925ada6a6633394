"""This machine's time."""

import time
from typing import Final

# The last second of the year 9999, the last year of the formats of time. A ledger entry may hold a later time.
LAST_SECOND: Final = 253_402_300_799


def now_ms() -> int:
    """Return this machine's time, ms since the Unix epoch."""
    return time.time_ns() // 1_000_000
