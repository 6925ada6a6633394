"""The time that each step of a run takes, and reports of its progress."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

OnProgress = Callable[[str], None]
"""Called with each line of progress."""


@dataclass
class StepTimer:
    """Measures the seconds of each step of a run, in order, and reports each step when it first begins."""

    on_progress: OnProgress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time of the context to the step `name`."""
        started = time.monotonic()
        if name not in self.seconds:
            self.on_progress(name)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + round(time.monotonic() - started, 3)
