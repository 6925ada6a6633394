"""Load shedding: delays the 503s of a full queue, so that their cost does not slow down the admitted requests."""

from collections import deque
from collections.abc import Callable
from typing import Final

# Answers for each refusal. A refusal costs nearly half as much as an event, and a client that gets one at once retries
# at once: undelayed refusals would take most of the time (tests/bench overload).
ANSWERS_EACH: Final = 8
# Answers that may be saved up for refusals: a short peak is no overload, and is refused at once.
SAVED_MOST: Final = 300 * ANSWERS_EACH
# The longest delay of a refusal: half of its Retry-After.
WAIT_MOST_S: Final = 0.5


class LoadShedder:
    """Refusals to send, first in first out: one for every `ANSWERS_EACH` answers.

    They are sent several at a time, when the next one comes or by `look`, and never between the answers of a group,
    where each would cost as much time as an event.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._saved = SAVED_MOST

    def refuse(self, arrived: float, send: Callable[[], None]) -> None:
        """Send a refusal, now or later. `arrived`: when its request did, time.monotonic."""
        self._waiting.append((arrived, send))
        self._go_on()

    def answered(self, events: int = 1) -> None:
        """Count answers, which pay for refusals."""
        self._saved = min(self._saved + events, SAVED_MOST)

    def look(self, now: float) -> None:
        """Send the refusals that are paid for, and those older than WAIT_MOST_S. Called regularly."""
        self._go_on()
        while self._waiting and self._waiting[0][0] <= now - WAIT_MOST_S:
            self._send_next()

    def _go_on(self) -> None:
        while self._waiting and self._saved >= ANSWERS_EACH:
            self._saved -= ANSWERS_EACH
            self._send_next()

    def _send_next(self) -> None:
        _, send = self._waiting.popleft()
        send()
