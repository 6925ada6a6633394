"""The time that each step of a run takes, and reports of its progress."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

OnProgress = Callable[[str], None]
"""Called with each line of progress."""

BETWEEN: Final = "between the steps"
"""The name of the time since the timer was made that belongs to no step."""


class StepTimer:
    """Measures the seconds of each step of a run, in order, and reports each step when it first begins.

    `before` are steps before the run, with their seconds. `on_step` is called with the name of each step when it first
    begins (default: `on_progress`); what it raises ends the run between two steps.
    """

    def __init__(
        self,
        on_progress: OnProgress,
        before: Mapping[str, float] | None = None,
        on_step: OnProgress | None = None,
    ) -> None:
        self.on_progress = on_progress
        self._on_step = on_progress if on_step is None else on_step
        self._before = dict(before or {})
        self._steps: dict[str, float] = {}
        self._made_s = time.monotonic()
        self._running: tuple[str, float] | None = None

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time of the context to the step `name`. Steps are not nested."""
        if name not in self._steps:
            self._on_step(name)
        self._running = name, time.monotonic()
        try:
            yield
        finally:
            self._steps = self._until(time.monotonic())
            self._running = None

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each step, of a running step until now, and BETWEEN: all time until now, once."""
        now_s = time.monotonic()
        steps = self._until(now_s)
        between_s = now_s - self._made_s - sum(steps.values())
        found = self._before | steps | {BETWEEN: max(0.0, between_s)}
        return {name: round(seconds, 3) for name, seconds in found.items()}

    def _until(self, now_s: float) -> dict[str, float]:
        """Return the seconds of each step of the run at a time of the monotonic clock."""
        if self._running is None:
            return self._steps
        name, started_s = self._running
        return {**self._steps, name: self._steps.get(name, 0.0) + now_s - started_s}
