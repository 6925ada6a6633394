"""Durations of several tests of the service."""

from typing import Final

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
DAY_S: Final = 86_400
