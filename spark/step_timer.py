"""What a run costs, and how it tells what it does."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

OnProgress = Callable[[str], None]
"""Takes progress, a line at a time."""


@dataclass
class StepTimer:
    """Where the time of a run went: seconds a step, in order; each is announced when it begins."""

    on_progress: OnProgress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        if name not in self.seconds:
            self.on_progress(name)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + round(time.monotonic() - started, 3)
