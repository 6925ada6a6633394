"""Tests that a forked process of the service starts, says why it ends, and ends, as `python -m service` does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy import places
from deploy.stack import Service
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


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_forked_process_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=places.ROOT, check=False)
    stat = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    until(lambda: not stat.exists(), 10, "the process ends")
