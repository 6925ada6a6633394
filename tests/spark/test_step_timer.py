"""The time of a run by step, in its report."""

from types import SimpleNamespace

import pytest

from spark import step_timer
from spark.step_timer import BETWEEN, StepTimer


def test_the_seconds_of_the_steps_and_between_them_are_all_time_until_now(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s, lines = [100.0], list[str]()
    monkeypatch.setattr(step_timer, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    timer = StepTimer(lines.append, {"start Spark": 8.0})
    clock_s[0] += 1
    for name, took_s in (("plan", 2.0), ("read", 3.0), ("plan", 4.0)):
        with timer.step(name):
            clock_s[0] += took_s
        clock_s[0] += 0.25
    with timer.step("write"):
        clock_s[0] += 5
        # The report is written in a step, whose own time it tells until then.
        assert timer.seconds() == {"start Spark": 8, "plan": 6, "read": 3, "write": 5, BETWEEN: 1.75}
        clock_s[0] += 1
    assert timer.seconds() == {"start Spark": 8, "plan": 6, "read": 3, "write": 6, BETWEEN: 1.75}
    assert lines == ["plan", "read", "write"]
