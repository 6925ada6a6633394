"""Tests that the minutes of each folder's tests are printed at the end of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import places
from tests.minutes import MinutesByFolder, folder

_CONFTEST = """
from tests.minutes import MinutesByFolder

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(MinutesByFolder())
"""


def _report(nodeid: str, when: str, seconds: float) -> pytest.TestReport:
    return pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, when, duration=seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodeid", "name"),
    [
        ("tests/unit/kafka/test_reader.py::test_a", "unit"),
        ("tests/spark/test_audit.py::test_a[x/y]", "spark"),
        ("tests/test_a.py::test_b", ""),
    ],
)
def test_a_tests_folder_is_the_one_below_tests(nodeid: str, name: str) -> None:
    assert folder(nodeid) == name


def test_setup_call_and_teardown_of_a_folders_tests_are_added_up_slowest_folder_first() -> None:
    minutes = MinutesByFolder()
    for nodeid in ("tests/unit/a/test_a.py::test_a", "tests/unit/test_b.py::test_b"):
        for when in ("setup", "call", "teardown"):
            minutes.pytest_runtest_logreport(_report(nodeid, when, 12.0))
    minutes.pytest_runtest_logreport(_report("tests/spark/test_c.py::test_c", "setup", 378.0))
    assert str(minutes) == "minutes by folder: spark 6.3, unit 1.2"


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_prints_them_once_with_and_without_xdist(processes: str, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(_CONFTEST)
    for name in ("spark", "unit"):
        file = tmp_path / "tests" / name / f"test_{name}.py"
        file.parent.mkdir()
        file.write_text("def test_it(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "--numprocesses", processes, "--rootdir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(places.ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("minutes by folder: ")]
    assert [sorted(line.removeprefix("minutes by folder: ").split(", ")) for line in lines] == [
        ["spark 0.0", "unit 0.0"]
    ], done.stdout
