"""The throttle times in the responses to one producer (KIP-219), which outlast the producer's sessions."""

import asyncio
import time


class Throttle:
    """Notes the throttle times of a quota's responses, and waits for their end. Times are by time.monotonic.

    A throttling broker answers at once and then stops reading from the connection for the throttle time. A new
    connection is not throttled before its first Produce, whose bytes the broker counts on top of the others.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0  # in the responses since the caller has set this to 0
        self._ms = 0
        self._until = 0.0

    def note(self, throttle_ms: int) -> None:
        """Note the throttle time of a response. The one that ends last counts: each broker has its own."""
        if not throttle_ms:
            return
        self.longest_s = max(self.longest_s, throttle_ms / 1000)
        until = time.monotonic() + throttle_ms / 1000
        if until > self._until:
            self._ms, self._until = throttle_ms, until

    @property
    def quota(self) -> str:
        """The reason text for a request that waits because Kafka throttles this client; else ""."""
        if self._until < time.monotonic():
            return ""
        return f"Kafka throttles this client by {self._ms} ms: raise the quota of its user or client id"

    async def wait_until_over(self, within_s: float) -> bool:
        """Wait for the end of the throttle time, for `within_s` seconds at most; return whether it is over.

        A request that is sent earlier is read only then, and may still be read when its connection was given up.
        """
        left_s = self._until - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(min(left_s, within_s))
        return left_s <= within_s
