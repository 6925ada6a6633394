"""A timeout for waits that are made over and over, with one timer for all of them."""

import asyncio
from types import TracebackType
from typing import Self


class SharedTimeout:
    """`asyncio.timeout` for waits that end in the order in which they begin, because each may take `seconds`.

    `with timeout.wait():` cancels what is awaited in it when the time is up, and raises TimeoutError. A timer that is
    made and cancelled for each wait costs more than the rest (tests/bench/results/simplifications.md).
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waits: dict[TimedWait, None] = {}  # in the order of their ends
        self._timer: asyncio.TimerHandle | None = None  # for the end of a wait that was the first

    def __repr__(self) -> str:
        return f"<SharedTimeout {len(self._waits)} waits, timer {'not ' if self._timer is None else ''}set>"

    def wait(self) -> "TimedWait":
        """Make a wait that ends after the time of all."""
        return TimedWait(self, asyncio.get_running_loop().time() + self._seconds)

    def wait_until(self, ends_at: float) -> "TimedWait":
        """Make a wait that ends at another time, by the loop's clock, but not before those that began earlier."""
        return TimedWait(self, ends_at)

    def add(self, wait: "TimedWait") -> None:
        """Note a wait that begins; it ends no sooner than those before it."""
        self._waits[wait] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(wait.ends_at, self._expire)

    def remove(self, wait: "TimedWait") -> None:
        """Forget a wait that has ended."""
        self._waits.pop(wait, None)

    def _expire(self) -> None:
        """End the waits whose time is up, and set the timer for the first of the others."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for wait in list(self._waits):
            if wait.ends_at > now:
                self._timer = loop.call_at(wait.ends_at, self._expire)
                return
            del self._waits[wait]
            wait.end()


class TimedWait:
    """One wait of a SharedTimeout. Tells its own cancellation from one that comes from outside, as asyncio.Timeout."""

    __slots__ = ("_cancelling", "_ended", "_of", "_task", "ends_at")

    def __init__(self, timeout: SharedTimeout, ends_at: float) -> None:
        self._of = timeout
        self._ended = False
        self.ends_at = ends_at  # by the loop's clock

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "only a task can be cancelled"
        self._task = task
        self._cancelling = task.cancelling()
        self._of.add(self)
        return self

    def end(self) -> None:
        """Cancel what is awaited."""
        self._ended = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._of.remove(self)
        if self._ended and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
