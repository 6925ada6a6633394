"""Rates of callers and sources: a token bucket of events."""

import math

from service.core.problems import RATE_LIMITED, Problem


class TokenBucket:
    """The events that may be sent now: those of one second, at least one; a batch may take more."""

    def __init__(self, rate: float) -> None:
        """`rate` is in events a second."""
        self._rate = rate
        self._most = max(rate, 1.0)  # the largest burst, in events
        self._left = self._most  # tokens of the bucket: events; negative after a batch that was larger
        self._at = 0.0  # when `_left` was computed, in seconds of the loop's time

    @property
    def burst(self) -> int:
        """The most events that may be sent at once within the rate."""
        return int(self._most)

    def spend(self, whose: str, events: int, now: float) -> None:
        """Take events at `now`, in seconds. Raise Problem (429) if the bucket is empty.

        A batch may take more than the bucket has: later requests wait for longer.
        """
        now = max(now, self._at)  # a pipelined request is counted later than it arrived
        left = self._tokens(now)
        if left < 1:
            wait_s = math.ceil((1 - left) / self._rate)
            raise Problem(RATE_LIMITED, f"{whose} may send {self._rate:g} events a second", retry_after_s=wait_s)
        self._left, self._at = left - events, now

    def wait_s(self, now: float) -> float:
        """Return the time, in seconds, after which `spend` will take events; 0 if it does at `now`."""
        return max(0.0, (1 - self._tokens(max(now, self._at))) / self._rate)

    def _tokens(self, now: float) -> float:
        """Return the events in the bucket at `now`, which is not before the last call of `spend`."""
        return min(self._most, self._left + (now - self._at) * self._rate)
