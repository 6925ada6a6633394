"""Load load_shedder: when those are told 503 whom a full queue does not take, so that the others get the time."""

from collections import deque
from collections.abc import Callable
from typing import Final

# A refusal costs 0.4 of what an event does, and who hears it asks again: where all were told at once, clients that did
# not wait before the next try left a tenth of the time to the events (tests/bench overload). This leaves all but all.
ANSWERS_EACH: Final = 8
# Answers that may be saved up: a peak that is over soon is no overload, and is told at once.
SAVED_MOST: Final = 300 * ANSWERS_EACH
# For so long, in seconds, one waits at most: half of what Retry-After will ask for.
WAIT_MOST_S: Final = 0.5


class LoadShedder:
    """Refusals that wait to be told, first come first served: one for every `ANSWERS_EACH` answers.

    They are told several at a time, when the next one comes or at a look, and never between the answers of a group:
    there each cost as much time as an event (17 % of the goodput, at one for every six).
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._saved = SAVED_MOST

    def refuse(self, arrived: float, tell: Callable[[], None]) -> None:
        """Have one told, now or in its turn; it has `arrived` at that time, by time.monotonic."""
        self._waiting.append((arrived, tell))
        self._go_on()

    def answered(self, events: int = 1) -> None:
        """So many events have got their answer."""
        self._saved = min(self._saved + events, SAVED_MOST)

    def look(self, now: float) -> None:
        """Every now and then: tell those whose turn has come, and those that have waited long enough."""
        self._go_on()
        while self._waiting and self._waiting[0][0] <= now - WAIT_MOST_S:
            self._tell()

    def _go_on(self) -> None:
        while self._waiting and self._saved >= ANSWERS_EACH:
            self._saved -= ANSWERS_EACH
            self._tell()

    def _tell(self) -> None:
        _, tell = self._waiting.popleft()
        tell()
