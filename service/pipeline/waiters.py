"""Requests that wait for another request's write of their key. One for each key claims again, ever less often."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from service.pipeline.request import WriteRequest

# Between two claims of a key, doubled each time. A write takes milliseconds, with a recovery a second or so.
PAUSE_LEAST_S: Final = 0.05
PAUSE_MOST_S: Final = 0.5


class Waiters:
    """Requests by the key whose write they wait for. Redis sends no notification: one request claims the key again."""

    def __init__(self, claim_again: Callable[[Sequence[WriteRequest]], None]) -> None:
        self._claim_again = claim_again
        self._waiting: dict[bytes, _Waiting] = {}  # by event id

    def __len__(self) -> int:
        """How many keys requests wait for."""
        return len(self._waiting)

    def wait(self, request: WriteRequest) -> None:
        """Let a request wait whose key another writes. One of the key's requests claims the key again after a pause."""
        id = request.id
        waiting = self._waiting.get(id)
        if waiting is None:
            waiting = self._waiting[id] = _Waiting()
            self._schedule(id, waiting)
        if waiting.prober is request:
            waiting.prober = None
        waiting.requests[request] = None

    def wake(self, id: bytes) -> None:
        """Claim a key for all requests that wait for it, because its write has ended."""
        waiting = self._waiting.pop(id, None)
        if waiting is not None:
            waiting.timer.cancel()
            self._claim_again([request for request in waiting.requests if not request.finished])

    def wake_all(self, ids: Iterable[bytes]) -> None:
        """Claim these keys for all requests that wait for them."""
        if self._waiting:
            for id in ids:
                self.wake(id)

    def _schedule(self, id: bytes, waiting: "_Waiting") -> None:
        waiting.timer = asyncio.get_running_loop().call_later(waiting.pause_s, self._claim_one, id, waiting)
        waiting.pause_s = min(2 * waiting.pause_s, PAUSE_MOST_S)

    def _claim_one(self, id: bytes, waiting: "_Waiting") -> None:
        """Have a request claim the key, unless the claim of another one is in flight."""
        waiting.requests = {request: None for request in waiting.requests if not request.finished}
        prober = waiting.prober
        if prober is None or prober.finished or prober.accepted_at:  # accepted_at: the prober itself writes the key
            prober = waiting.prober = next(iter(waiting.requests), None)
            if prober is None:
                del self._waiting[id]
                return
            del waiting.requests[prober]
            self._claim_again((prober,))
        self._schedule(id, waiting)


class _Waiting:
    """The requests that wait for one key. `prober`'s claim is in flight; the others are in `requests`."""

    timer: asyncio.TimerHandle

    def __init__(self) -> None:
        self.prober: WriteRequest | None = None
        self.requests: dict[WriteRequest, None] = {}
        self.pause_s = PAUSE_LEAST_S
