"""Tests that a forked process of the service starts, says why it ends, and ends, as `python -m service` does."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest

from deploy import places
from deploy.stack import Service, StackError, leash
from tests.bench import process_cpu
from tests.forked import ForkedService
from tests.integration.plan import stopped, until

# Starts a process, and is killed.
KILLED = """
import os, pathlib, signal, sys
from tests.forked import ForkedService
service = ForkedService(pathlib.Path(sys.argv[1]), kafka="127.0.0.1:1", redis="redis://127.0.0.1:1")
service.start(wait_ready=False)
(service.folder / "pid").write_text(str(service.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
WRONG = {"FENCEPOST_SLOTS": "no number"}


def command_line(pid: int) -> list[bytes]:
    """Return the command line of a process, which is empty for a moment during an exec, and of an ended process."""
    deadline = time.monotonic() + 10
    while not (line := Path(f"/proc/{pid}/cmdline").read_bytes()):
        assert time.monotonic() < deadline, f"process {pid} has no command line"
        time.sleep(0.01)
    return line.split(b"\0")


def test_a_wrong_setting_ends_a_forked_process_with_the_same_code_and_log(tmp_path: Path) -> None:
    ended = {}
    for kind in (Service, ForkedService):
        service = kind(tmp_path / kind.__name__, kafka="127.0.0.1:1", redis="redis://127.0.0.1:1", env=WRONG)
        service.start(wait_ready=False)
        ended[kind] = (service.wait(30), service.log.read_text())
    assert ended[ForkedService] == ended[Service]
    assert ended[Service][0] == 2
    assert "FENCEPOST_SLOTS" in ended[Service][1]


def test_a_forked_process_is_paused_resumed_and_killed_in_a_session_of_its_own(tmp_path: Path) -> None:
    service = ForkedService(tmp_path, kafka="127.0.0.1:1", redis="redis://127.0.0.1:1")
    service.start(wait_ready=False)
    assert os.getsid(service.pid) == service.pid
    service.pause()
    assert stopped(service.pid)
    service.resume()
    assert service.running
    service.kill()
    assert (service.running, service.exit_code) == (False, -signal.SIGKILL)


def test_a_variable_that_python_reads_at_its_start_is_given_to_a_new_interpreter(tmp_path: Path) -> None:
    service = ForkedService(tmp_path, kafka="127.0.0.1:1", redis="redis://127.0.0.1:1")
    command_lines = []
    for variables in ({}, {"PYTHONDEVMODE": "1"}):
        service.extra_env = variables
        service.start(wait_ready=False)
        command_lines.append(command_line(service.pid))
        service.kill()
    assert [b"service" in each for each in command_lines] == [False, True]


def test_a_forked_process_that_does_not_begin_in_time_is_an_error_and_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = ForkedService(tmp_path, kafka="127.0.0.1:1", redis="redis://127.0.0.1:1")
    monkeypatch.setattr(Connection, "poll", lambda *_: False)
    with pytest.raises(StackError, match=r"the forked process has not begun within 30\.0 s"):
        service.start(wait_ready=False)
    assert [each for each in multiprocessing.active_children() if each.name == service.name] == []


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("of", [leash.die_with_parent, process_cpu.main])
def test_what_the_kernel_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch, of: Callable[[], object]) -> None:
    """Processes would be left behind, or their CPU would not be counted."""
    monkeypatch.setattr(ctypes, "CDLL", Mock(return_value=Mock(prctl=Mock(return_value=-1))))
    with pytest.raises(OSError, match=r"prctl\(PR_SET_"):
        of()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_forked_process_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=places.ROOT, check=False)
    stat = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    until(lambda: not stat.exists(), 10, "the process ends")
