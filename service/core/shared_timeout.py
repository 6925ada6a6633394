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
        self.waits: dict[TimedWait, None] = {}  # in the order of their ends
        self.timer: asyncio.TimerHandle | None = None  # for the end of a wait that was the first

    def __repr__(self) -> str:
        return f"<SharedTimeout {len(self.waits)} waits, timer {'not ' if self.timer is None else ''}set>"

    def wait(self) -> "TimedWait":
        """Make a wait that ends after the time of all."""
        return TimedWait(self, asyncio.get_running_loop().time() + self._seconds)

    def wait_until(self, ends_at: float) -> "TimedWait":
        """Make a wait that ends at another time, by the loop's clock, but not before those that began earlier."""
        return TimedWait(self, ends_at)

    def set_timer(self, ends_at: float) -> None:
        """Set the timer for the end of the first wait, by the loop's clock."""
        self.timer = asyncio.get_running_loop().call_at(ends_at, self._expire)

    def _expire(self) -> None:
        """End the waits whose time is up, and set the timer for the first of the others."""
        self.timer = None
        now = asyncio.get_running_loop().time()
        for wait in list(self.waits):
            if wait.ends_at > now:
                self.set_timer(wait.ends_at)
                return
            del self.waits[wait]
            wait.end()


class TimedWait:
    """One wait of a SharedTimeout, which ends no sooner than those before it.

    Tells its own cancellation from one that comes from outside, as asyncio.Timeout.
    """

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
        self._of.waits[self] = None
        if self._of.timer is None:
            self._of.set_timer(self.ends_at)
        return self

    def end(self) -> None:
        """Cancel what is awaited."""
        self._ended = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._of.waits.pop(self, None)
        if self._ended and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
