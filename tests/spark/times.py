"""Durations, and points in time, of the tests of the audit."""

from typing import Final

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS
DAY_S: Final = 86_400.0

LATER_S: Final = 3600.0
"""How far the clock of a run is set ahead, so that all that was written before is past its timeouts and grace."""

WINDOW_H: Final = 168
"""The default of `--window-h`."""

FAR_FUTURE_MS: Final = 4_000_000_000_000
"""A time of the year 2096."""
