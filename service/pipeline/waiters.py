"""Requests that wait for another's write of their key: of those with one key, one asks for all, ever more rarely."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from service.pipeline.request import WriteRequest

# A write takes some milliseconds; one that waits for a recovery, a second or so.
PAUSE_LEAST_S: Final = 0.05
PAUSE_MOST_S: Final = 0.5


class Waiters:
    """Redis tells nobody of itself that a key was written, so a waiting request claims its key again now and then."""

    def __init__(self, ask: Callable[[Sequence[WriteRequest]], None]) -> None:
        self._ask = ask  # has requests claimed again
        self._waiting: dict[bytes, _Waiting] = {}  # by event id

    def __len__(self) -> int:
        """For how many keys somebody waits."""
        return len(self._waiting)

    def wait(self, request: WriteRequest) -> None:
        """Have a request wait whose key another writes: it, or one that waits with it, asks again after a pause."""
        id = request.asked[0][0]
        waiting = self._waiting.get(id)
        if waiting is None:
            waiting = self._waiting[id] = _Waiting()
            self._look_later(id, waiting)
        if waiting.asker is request:
            waiting.asker = None
        waiting.requests[request] = None

    def release(self, id: bytes) -> None:
        """The key is written, or will not be as they asked for it: all who wait for it claim it, and are answered."""
        waiting = self._waiting.pop(id, None)
        if waiting is not None:
            waiting.timer.cancel()
            self._ask([request for request in waiting.requests if not request.answered])

    def _look_later(self, id: bytes, waiting: "_Waiting") -> None:
        waiting.timer = asyncio.get_running_loop().call_later(waiting.pause_s, self._look, id, waiting)
        waiting.pause_s = min(2 * waiting.pause_s, PAUSE_MOST_S)

    def _look(self, id: bytes, waiting: "_Waiting") -> None:
        """Have one of them ask, unless one is asking already."""
        waiting.requests = {request: None for request in waiting.requests if not request.answered}
        asker = waiting.asker
        if asker is None or asker.answered or asker.accepted_at:  # accepted: it writes the key itself now
            asker = waiting.asker = next(iter(waiting.requests), None)
            if asker is None:
                del self._waiting[id]
                return
            del waiting.requests[asker]
            self._ask((asker,))
        self._look_later(id, waiting)


class _Waiting:
    """Who waits for one key. `asker` is the one whose claim is under way; the others are in `requests`."""

    timer: asyncio.TimerHandle

    def __init__(self) -> None:
        self.asker: WriteRequest | None = None
        self.requests: dict[WriteRequest, None] = {}
        self.pause_s = PAUSE_LEAST_S
