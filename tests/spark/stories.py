"""Stories that share the runs of one lake, because most of a run's time does not depend on its records.

A story is a generator with keys, topics and slots of its own. Each `yield` gives it the next run, and it checks the
report of that run about its topics.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import pytest

from tests.spark.conftest import Audit
from tests.spark.history import INTERNAL, History, Writer
from tests.spark.runs import Ran

Story = Generator[None, Ran, None]

SLOTS: Final = 16
"""Slots of a stage: more than its stories take."""

# pytest.fail raises a BaseException.
_ERRORS = (Exception, pytest.fail.Exception)


class Stories:
    """Stories that share runs; `check` raises the error of a story, or of a run that the story waited for."""

    def __init__(self, stories: Mapping[str, Story]) -> None:
        self._going = dict(stories)
        self._failed: dict[str, BaseException] = {}

    def run(self, audit: Callable[..., Ran], runs: Sequence[Mapping[str, Any]]) -> None:
        """Run the job once with each of these options, between the parts of the stories."""
        for name in list(self._going):
            self._go_on(name, None)
        for options in runs:
            try:
                ran = audit(**options)
            except _ERRORS as error:
                self._failed |= dict.fromkeys(self._going, error)
                self._going.clear()
                return
            for name in list(self._going):
                self._go_on(name, ran)

    def check(self, name: str) -> None:
        """Raise the exception that ended a story; a story that waits for one more run has failed too."""
        if name in self._failed:
            raise self._failed[name]
        assert name not in self._going, "there were too few runs"

    def _go_on(self, name: str, ran: Ran | None) -> None:
        story = self._going[name]
        try:
            if ran is None:
                next(story)
            else:
                story.send(ran)
        except StopIteration:
            del self._going[name]
        except _ERRORS as error:
            self._failed[name] = error
            del self._going[name]


class Stage(ABC):
    """The history that stories share, in a namespace of its own; each story has topics and slots of its own.

    `internal` are the settings of the internal topics.
    """

    def __init__(self, bootstrap: str, internal: Mapping[str, str] = INTERNAL) -> None:
        self.history = History(bootstrap, f"t-{uuid.uuid4().hex[:12]}", slots=SLOTS, internal=dict(internal))
        self._slots = iter(range(SLOTS))

    @property
    @abstractmethod
    def runs(self) -> Sequence[Mapping[str, Any]]:
        """The options of each run."""

    def run(self, stories: Sequence[Callable[..., Story]], audit: Audit) -> Stories:
        """Start each story on this stage, and run the job for all of them; a story has the name of its function."""
        started = Stories({story.__name__: story(self) for story in stories})
        started.run(partial(audit, self.history), self.runs)
        return started

    def writer(self) -> Writer:
        """Return a writer on a slot that no other story has."""
        slot = next(self._slots)
        return Writer(slot, 100 * (slot + 1), 0, f"host-{slot}:1")

    def topics(self, *names: str) -> list[str]:
        """Make topics with one partition, whose names begin with the namespace."""
        return [self.history.topic(f"{self.history.namespace}-{name}") for name in names]
