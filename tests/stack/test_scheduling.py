"""Tests which process of a run of the tests gets which files."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from deploy import places
from tests.conftest import LONG_SPARK_FILES, pytest_collection_modifyitems, pytest_xdist_make_scheduler

ALONE = [f"tests/faults/test_clock.py::test_{n}" for n in range(9)]
EARLY = [f"tests/unit/test_{name}.py::test_{n}" for name in "ab" for n in range(4)]
SPARK = [
    f"tests/spark/{name}.py::test_{n}" for name in ("test_short", *reversed(LONG_SPARK_FILES[:6])) for n in range(3)
]


class _Process:
    """A process of xdist. It runs a test once it has the next one, or has learned that no other follows."""

    def __init__(self, name: str) -> None:
        self.queue: list[int] = []
        self.ran: list[str] = []
        self.seconds = 0.0
        self.shutting_down = False
        self.gateway = Mock(id=name)

    def send_runtest_some(self, indices: list[int]) -> None:
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def is_able(self) -> bool:
        return len(self.queue) > 1 or (self.shutting_down and bool(self.queue))


def _seconds(nodeid: str) -> float:
    """Tests of Spark take the longest; those of `test_b` so long that the process with the others is asked first."""
    return 9.0 if nodeid in SPARK else 3.5 if "test_b" in nodeid else 1.0


def _run(monkeypatch: pytest.MonkeyPatch) -> list[_Process]:
    monkeypatch.setattr("xdist.scheduler.loadscope.parse_tx_spec_config", lambda config: [None] * 3)
    config, tests = Mock(), [*EARLY, *ALONE, *SPARK]
    config.option.loadscopereorder = False
    scheduler, processes = pytest_xdist_make_scheduler(config, Mock()), [_Process(f"gw{n}") for n in range(3)]
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, tests)
    scheduler.schedule()
    while able := [process for process in processes if process.is_able]:
        process = min(able, key=lambda one: one.seconds + _seconds(tests[one.queue[0]]))
        at = process.queue.pop(0)
        process.ran.append(tests[at])
        process.seconds += _seconds(tests[at])
        scheduler.mark_test_complete(process, at)
    assert sorted(test for process in processes for test in process.ran) == sorted(tests)
    return processes


def test_the_process_that_has_no_work_first_helps_with_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that has the tests which run alone: it would begin when they have ended."""
    first, alone, helper = sorted(
        _run(monkeypatch), key=lambda one: (one.ran[0] not in SPARK, one.ran[-1] not in ALONE)
    )
    assert set(first.ran) <= set(SPARK)
    assert not set(alone.ran) & set(SPARK)
    assert set(helper.ran) & set(SPARK)
    assert alone.seconds < helper.seconds


def test_long_files_of_spark_run_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for process in _run(monkeypatch):
        files = [Path(test.partition("::")[0]).stem for test in process.ran if test in SPARK]
        places_in_list = [LONG_SPARK_FILES.index(file) for file in files if file in LONG_SPARK_FILES]
        assert places_in_list == sorted(places_in_list)
        assert "test_short" not in files[: len(places_in_list)]


def test_a_slow_test_has_a_limit_of_half_an_hour_and_a_test_with_its_own_keeps_it(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def item(name: str, *marks: pytest.MarkDecorator) -> pytest.Item:
        function = pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None)
        for mark in marks:
            function.add_marker(mark)
        return function

    long, own = pytest.mark.long, pytest.mark.timeout(60)
    items = [item("fast"), item("slow", long), item("slow_with_its_own", long, own)]
    monkeypatch.setattr("tests.conftest.LONG", True)
    pytest_collection_modifyitems(request.config, items)
    limits = {one.name: mark.args for one in items if (mark := one.get_closest_marker("timeout")) is not None}
    assert limits == {"slow": (1800,), "slow_with_its_own": (60,)}


def test_the_long_files_of_spark_are_there_and_each_has_another_place() -> None:
    files = {path.stem for path in (places.ROOT / "tests" / "spark").glob("test_*.py")}
    assert set(LONG_SPARK_FILES) <= files
    assert len(set(LONG_SPARK_FILES)) == len(LONG_SPARK_FILES)
