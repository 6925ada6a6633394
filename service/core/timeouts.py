"""Time limits for what is done over and over: `asyncio.timeout`, with one timer for all that have the same patience."""

import asyncio
from types import TracebackType
from typing import Self


class Patience:
    """How long each wait of a kind may take, in seconds. A timer that is made and ended each time costs 7 µs."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds  # the same for all that wait: they end in the order in which they began
        self._waits: dict[Wait, None] = {}  # in the order of their ends
        self._timer: asyncio.TimerHandle | None = None

    def wait(self) -> "Wait":
        """`with patience.wait():` what is awaited in it is cancelled when the time is up, and TimeoutError raised."""
        return Wait(self)

    def add(self, wait: "Wait") -> None:
        loop = asyncio.get_running_loop()
        wait.until = loop.time() + self.seconds
        self._waits[wait] = None
        if self._timer is None:
            self._timer = loop.call_at(wait.until, self._look)

    def remove(self, wait: "Wait") -> None:
        self._waits.pop(wait, None)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for wait in list(self._waits):
            if wait.until > now:
                self._timer = loop.call_at(wait.until, self._look)
                return
            del self._waits[wait]
            wait.end()


class Wait:
    """One wait of a Patience; as `asyncio.Timeout` it tells its own cancellation from one that comes from outside."""

    __slots__ = ("_cancelling", "_ended", "_patience", "_task", "until")

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._ended = False
        self.until = 0.0

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "only a task can be told that its time is up"
        self._task = task
        self._cancelling = task.cancelling()
        self._patience.add(self)
        return self

    def end(self) -> None:
        """Its time is up."""
        self._ended = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._patience.remove(self)
        if self._ended and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
