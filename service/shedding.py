"""Load shedding: when those are told 503 whom a full queue does not take, so that the others get the time."""

from collections import deque
from collections.abc import Callable
from typing import Final

# A refusal costs 0.4 of what an event does, and who hears it asks again: where all were told at once, clients that did
# not wait before the next try left a tenth of the time to the events (tests/bench overload). This leaves nine tenths.
ANSWERS_EACH: Final = 6
# Answers that may be saved up: a peak that is over soon is no overload, and is told at once.
SAVED_MOST: Final = 300 * ANSWERS_EACH
# More do not wait: those who went away meanwhile wait too.
WAITING_MOST: Final = 5_000
# Where no request has had its answer for so long there is no time to be saved, and nothing to wait for.
STALLED_S: Final = 0.1


class Shedding:
    """Refusals that wait to be told, first come first served: one for every `ANSWERS_EACH` answers."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._saved = SAVED_MOST
        self._goes_on = False  # there was an answer since the last look
        self._still_since = 0.0

    def refuse(self, tell: Callable[[], None]) -> None:
        """Have one told, now or in its turn."""
        self._waiting.append(tell)
        if len(self._waiting) > WAITING_MOST:
            self._waiting.popleft()()
        self._go_on()

    def answered(self) -> None:
        """A request has got its answer."""
        self._goes_on = True
        if self._saved < SAVED_MOST:
            self._saved += 1
            self._go_on()

    def look(self, now: float) -> None:
        """Every now and then, by time.monotonic: tell all of them where nothing goes on."""
        if self._goes_on:
            self._goes_on, self._still_since = False, now
        elif now - self._still_since >= STALLED_S:
            while self._waiting:
                self._waiting.popleft()()

    def _go_on(self) -> None:
        while self._waiting and self._saved >= ANSWERS_EACH:
            self._saved -= ANSWERS_EACH
            self._waiting.popleft()()
