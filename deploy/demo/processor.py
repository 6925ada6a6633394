"""Runs the processor of the demo: it is killed twice, and started again at once."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from deploy import places
from deploy.demo import truth
from deploy.demo.delays import totals
from deploy.stack.process import Process

_RUN_S = 120.0
_KILLED_AT = (1 / 3, 2 / 3)  # of the flights

Say = Callable[[str], None]


class Processor(Process):
    """`python -m deploy.demo.delays`, and what it has written."""

    def __init__(self, folder: Path, kafka: str, url: str, source: str, topic: str) -> None:
        super().__init__("processor", folder)
        self._kafka, self._topic = kafka, topic
        self._arguments = ["--kafka", kafka, "--url", url, "--source", source, "--topic", topic]
        self._counted = 0

    def start(self) -> None:
        """Start the program, which reads on from the committed offsets of its group."""
        command = [sys.executable, "-m", "deploy.demo.delays", *self._arguments]
        self.spawn(command, env=places.hermetic_environment(), cwd=places.ROOT)

    def crash_and_go_on(self, flights: int, say: Say, update: Callable[[int], None]) -> None:
        """Run the program until all flights are counted; kill it at a third and at two thirds, and run it again.

        Raises:
            StackError: the program failed, or takes too long.
        """
        with self, truth.follow(self._kafka, self._topic) as results:

            def reached(count: int) -> bool:
                self._counted += sum(each.flights for each in totals(results()).values())
                update(self._counted)
                return self._counted >= count

            for share in _KILLED_AT:
                self.wait_until(partial(reached, int(flights * share)), _RUN_S)
                self.kill()
                say(f"the processor killed with -9; {self._counted:,} flights are counted")
                self.start()
            self.wait_until(partial(reached, flights), _RUN_S)
