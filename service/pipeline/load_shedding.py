"""Load shedding: delays the 503s of a full queue, so that their cost does not slow down the admitted requests."""

import asyncio
from collections import deque
from typing import Final

# Answers for each refusal. A refusal costs nearly half as much as an event, and a client that gets one at once retries
# at once: undelayed refusals would take most of the time (tests/bench overload).
ANSWERS_EACH: Final = 8
# The number of answers that count at most: a short peak is no overload, and is refused at once.
ANSWERS_MAX: Final = 300 * ANSWERS_EACH
# The longest delay of a refusal: half of its Retry-After.
WAIT_MOST_S: Final = 0.5


class LoadShedder:
    """Delays of refusals, which end first in first out: one for every `ANSWERS_EACH` answers.

    They end several at a time, when the next refusal comes or by `end_due`, and never between the answers of a group,
    where each refusal would cost as much time as an event.
    """

    def __init__(self) -> None:
        self._delays: deque[tuple[float, asyncio.Future[None]]] = deque()  # with the arrivals
        self._answers = ANSWERS_MAX  # that have permitted no refusal yet

    def delay(self, arrived: float) -> asyncio.Future[None] | None:
        """Delay a refusal until the future is set; None if it may be sent now.

        `arrived`: when its request did, time.monotonic.
        """
        self._end_permitted()
        if self._answers >= ANSWERS_EACH:
            self._answers -= ANSWERS_EACH
            return None
        delay: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._delays.append((arrived, delay))
        return delay

    def answered(self, events: int = 1) -> None:
        """Count answers: each ANSWERS_EACH of them permit one refusal."""
        self._answers = min(self._answers + events, ANSWERS_MAX)

    def end_due(self, now: float) -> None:
        """End the delays of refusals that answers permit, and of those older than WAIT_MOST_S. Called regularly."""
        self._end_permitted()
        while self._delays and self._delays[0][0] <= now - WAIT_MOST_S:
            self._end_next()

    def _end_permitted(self) -> None:
        while self._delays and self._answers >= ANSWERS_EACH:
            self._answers -= ANSWERS_EACH
            self._end_next()

    def _end_next(self) -> None:
        _, delay = self._delays.popleft()
        delay.set_result(None)
