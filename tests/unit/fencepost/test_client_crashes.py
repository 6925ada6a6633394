"""Tests programs that end at any step: what their spool has stored is written once."""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.fencepost.client import Client, Event, Spool
from service.fencepost.client.events import Pending
from tests.unit.fencepost.clients import URL, patched
from tests.unit.fencepost.fakes import FAULTS, FakeService


class Crash(BaseException):
    """The program ends here."""


class Steps:
    """The points at which a program may end, each counted when it is passed; number `crash_at` raises Crash."""

    def __init__(self, crash_at: int) -> None:
        self.crash_at = crash_at
        self.count = 0

    def passed(self) -> None:
        self.count += 1
        if self.count == self.crash_at:
            raise Crash


class CrashingSpool(Spool):
    """A spool whose program may end before and after each write; `stored` has the keys that it was given before."""

    def __init__(self, path: Path, steps: Steps) -> None:
        super().__init__(path)
        self._steps = steps
        self.stored: set[str] = set()

    def add(self, events: Sequence[Pending]) -> list[Pending]:
        self._steps.passed()
        added = super().add(events)
        self.stored |= {event.key for event in events}
        self._steps.passed()
        return added

    def close_events(self, events: Sequence[Pending]) -> None:
        self._steps.passed()
        super().close_events(events)
        self._steps.passed()


class Program:
    """A program with a spool, run after run: each run finds on its disk what the last one has left, when it crashed."""

    def __init__(self, folder: Path, fake: FakeService) -> None:
        self._folder, self._fake = folder, fake
        self.stored: set[str] = set()
        self.made: dict[str, Event] = {}
        self._disk = folder / "0"
        self._disk.mkdir()

    def run(self, crash_at: int, work: Callable[[Client], object]) -> int:
        """Run `work` up to the step `crash_at`; returns the number of events in the spool at the end."""
        steps = Steps(crash_at)

        def answer(request: httpx.Request) -> httpx.Response:
            steps.passed()
            try:
                return self._fake(request)
            finally:
                steps.passed()

        with CrashingSpool(self._disk / "s", steps) as spool:
            with contextlib.suppress(Crash):
                work(Client(URL, transport=httpx.MockTransport(answer), spool=spool, deadline_s=1e6))
            self.stored |= spool.stored
            # The next run finds the files as they are now: a crash closes nothing.
            self._disk = shutil.copytree(self._disk, self._folder / f"{int(self._disk.name) + 1}")
            return len(spool)

    def send(self, client: Client, sizes: Sequence[int]) -> None:
        for size in sizes:
            events = [Event("t", f"{len(self.made) + n}") for n in range(size)]
            self.made.update({event.idempotency_key: event for event in events})
            client.send_many(events)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    faults=st.lists(st.sampled_from(FAULTS), max_size=8),
    crash_at=st.integers(1, 30),
    crash_of_resume_at=st.integers(1, 12),
)
def test_each_event_that_was_stored_is_written_once_whatever_step_the_program_ends_at(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    faults: list[str],
    crash_at: int,
    crash_of_resume_at: int,
) -> None:
    fake = FakeService(faults)
    program = Program(tmp_path_factory.mktemp("program"), fake)
    with pytest.MonkeyPatch.context() as monkeypatch:
        patched(monkeypatch)
        program.run(crash_at, lambda client: program.send(client, sizes))
        program.run(crash_of_resume_at, lambda client: list(client.resume()))
        fake.faults = iter(())
        assert program.run(0, lambda client: list(client.resume())) == 0
    # Nothing but what was stored was sent, and all of it was written, once.
    assert fake.copies == Counter(json.dumps(program.made[key].value) for key in program.stored)
