"""Bounds the bytes of a group while a quota of Kafka throttles this process (KIP-219).

A broker answers the Produce that exceeds a quota at once, and reads nothing more from its connection for the throttle
time. The ledger record and the EndTxn of the transaction wait for so long, and the throttle time grows with the bytes
of the group: a large group would exceed the request timeout each time that it is sent.
"""

from typing import Final

from service.core.settings import GROUP_EVENT_BYTES_MAX

# Each group may be throttled for so long. A quota of requests throttles for one window of 1 s at most
# (quota.window.size.seconds), whatever the bytes of a group are.
BEARABLE_S: Final = 1.0
# A broker forgets what it has counted after 11 windows (quota.window.num).
COUNTED_S: Final = 11.0
# The least bound: smaller groups would write more of their batches' and records' heads than of their events.
LEAST_BYTES: Final = 4 * 1024


def pause_after(throttled_s: float) -> float:
    """Return how long to write nothing after a group that was throttled for longer than it could wait, in seconds.

    The broker has appended what it throttles, and a new connection is not throttled before its first Produce: without a
    pause the bytes of each further attempt would be counted too.
    """
    return min(throttled_s, COUNTED_S) if throttled_s > BEARABLE_S else 0.0


class QuotaBound:
    """The most bytes of a group's events, and of their ledger entries, by the throttle times of earlier groups."""

    def __init__(self) -> None:
        self.bytes_max = GROUP_EVENT_BYTES_MAX
        # Between these, by time.monotonic, a throttle time may be that of the groups before the bound was lowered.
        self._lowered_at = self._counts_until = 0.0
        self._grows_at = 0.0  # time.monotonic, from when on the bound may be raised

    def note(self, written: int, throttled_s: float, started: float, now: float) -> None:
        """Note a group of so many bytes, of events or of entries, and its longest throttle time, in seconds.

        `started` and `now` are time.monotonic. The throttle time of a group that was started while earlier, larger
        ones are still counted tells nothing about its own bytes. The bound is doubled at most once in the time for
        which a broker counts: until then the broker may throttle no group.
        """
        if throttled_s > BEARABLE_S:
            if not self._lowered_at <= started < self._counts_until:
                bearable = int(written * BEARABLE_S / throttled_s)
                self.bytes_max = max(LEAST_BYTES, min(self.bytes_max, bearable))
                self._lowered_at, self._counts_until = now, now + COUNTED_S
            self._grows_at = self._counts_until + COUNTED_S
        elif throttled_s < BEARABLE_S / 2:
            if now < self._grows_at or 2 * written < self.bytes_max:
                return
            self.bytes_max = min(GROUP_EVENT_BYTES_MAX, 2 * self.bytes_max)
            self._grows_at = now + COUNTED_S
