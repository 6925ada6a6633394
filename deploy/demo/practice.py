"""Runs the usual practice without Fencepost: the plain producer is killed half-way and started again."""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deploy import places
from deploy.stack.process import Process

_POLL_S = 0.02
_RUN_S = 120.0
# The crash comes at a random time between two savings of the progress.
_MOMENT_S = (0.05, 0.15)

Say = Callable[[str], None]


class Practice(Process):
    """`python -m deploy.demo.plain` for a slice of the flights."""

    def __init__(self, folder: Path, kafka: str, topic: str, first: int, count: int) -> None:
        super().__init__("plain", folder)
        self._journal = folder / "plain.journal"
        self._arguments = ["--kafka", kafka, "--topic", topic, "--start", str(first), "--count", str(count)]
        self._count = count

    def start(self) -> None:
        """Start the program, which continues where its journal ends."""
        arguments = [*self._arguments, "--journal", str(self._journal)]
        command = [sys.executable, "-m", "deploy.demo.plain", *arguments]
        self.spawn(command, env=places.hermetic_environment(), cwd=places.ROOT)

    def answered(self) -> int:
        """Count the events in the journal."""
        return self._journal.read_bytes().count(b"\n") if self._journal.exists() else 0

    def crash_and_go_on(self, say: Say, update: Callable[[int], None]) -> None:
        """Run the program, kill it about half-way, and run it again to its end.

        Raises:
            StackError: the program failed, or takes too long.
        """
        with self:
            self.wait_until(lambda: self._reached(self._count // 2, update), _RUN_S)
            time.sleep(random.uniform(*_MOMENT_S))
            self.kill()
            say(f"the producer killed with -9; its journal has {self.answered():,} events")
            self.start()
            say("started again: it sends what it has no answer for")
            self.wait_until(lambda: self._reached(self._count, update), _RUN_S)
            self.wait(_RUN_S)

    def _reached(self, count: int, update: Callable[[int], None]) -> bool:
        answered = self.answered()
        update(answered)
        return answered >= count
