"""Checks how far the clocks of Kafka and Redis are from this machine's."""

from dataclasses import dataclass
from typing import Final

from service.cli.finding import Finding, Level, judged

# From here on, times in answers and logs are misleading.
APART_WARNING_MS: Final = 1_000
# The audit's grace (--grace-s): beyond it, the audit may report a late event as lost.
APART_ERROR_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How many ms a clock is ahead of this machine's, and the uncertainty."""

    ahead_ms: float
    give_or_take_ms: float


def clock(check: str, whose: str, seen: ClockOffset) -> Finding:
    """Check one clock against this machine's."""
    apart_ms = max(0.0, abs(seen.ahead_ms) - seen.give_or_take_ms)
    side = "ahead of" if seen.ahead_ms > 0 else "behind"
    text = f"{abs(seen.ahead_ms):.0f} ms {side} this machine's, give or take {max(1.0, seen.give_or_take_ms):.0f} ms"
    otherwise = Level.ERROR if apart_ms > APART_ERROR_MS else Level.WARNING
    change = f"keep {whose} clock and this machine's by NTP: the audit waits {APART_ERROR_MS // 1000} s at most"
    return judged(check, apart_ms <= APART_WARNING_MS, text, change, otherwise)
