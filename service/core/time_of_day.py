"""This machine's time."""

import time


def now_ms() -> int:
    """Return this machine's time, ms since the Unix epoch."""
    return time.time_ns() // 1_000_000
