"""Tests processes of the stack: they end with their parent, stop cleanly, and report why a start failed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from deploy import places
from deploy.stack import StackError
from deploy.stack.process import Process


class Script(Process):
    """A Python program that writes `up` to its log when it runs."""

    def __init__(self, folder: Path, code: str, name: str = "script") -> None:
        super().__init__(name, folder)
        self.code = code

    def start(self) -> None:
        self.spawn([sys.executable, "-u", "-c", self.code], env=places.hermetic_environment())
        self.wait_until(lambda: "up" in self.log.read_text(), timeout_s=10)


SLEEP = "import time; print('up'); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(60)"


def _state(pid: int) -> str:
    """Read the kernel's letter for the state of a process; X without the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def test_stop_is_sigterm_and_kill_is_sigkill(tmp_path: Path) -> None:
    with Script(tmp_path, SLEEP) as script:
        script.stop()
        assert script.exit_code == -signal.SIGTERM
        script.start()
        script.kill()
        assert script.exit_code == -signal.SIGKILL


def test_a_process_that_ignores_sigterm_is_killed_in_the_end(tmp_path: Path) -> None:
    with Script(tmp_path, STUBBORN) as script:
        script.stop(timeout_s=0.2)
        assert script.exit_code == -signal.SIGKILL


def test_a_paused_process_stands_still_and_can_be_stopped(tmp_path: Path) -> None:
    with Script(tmp_path, SLEEP) as script:
        script.pause()
        assert _state(script.pid) == "T"
        script.resume()
        assert _state(script.pid) != "T"
        script.pause()
        script.stop()
        assert script.exit_code == -signal.SIGTERM


def test_a_failed_start_shows_the_log_and_where_it_is(tmp_path: Path) -> None:
    with (
        pytest.raises(StackError, match="no such luck") as raised,
        Script(tmp_path, "raise SystemExit('no such luck')"),
    ):
        pytest.fail("it must not start")
    assert str(tmp_path / "script.log") in str(raised.value)


def test_a_start_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    script = Script(tmp_path, SLEEP)
    script.spawn([sys.executable, "-c", SLEEP], env={})
    with pytest.raises(StackError, match="no answer within"):
        script.wait_until(lambda: False, timeout_s=0.1)
    assert not script.running


BUSY = "print('up', flush=True)\nfor _ in range(3 * 10**7): pass"
TALKING = "import time\nfor _ in range(100): print('up', flush=True); time.sleep(0.05)"


@pytest.mark.parametrize(("code", "ends"), [(SLEEP, False), (TALKING, True), (BUSY, True)])
def test_a_working_process_is_waited_for_beyond_the_timeout(tmp_path: Path, code: str, ends: bool) -> None:
    with Script(tmp_path, code) as script:
        if ends:
            assert script.wait_while_working(1.0) == 0
        else:
            with pytest.raises(StackError, match="still runs after 1 s"):
                script.wait_while_working(1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_process_dies_with_its_parent_but_not_with_the_thread_that_started_it(tmp_path: Path) -> None:
    parent = textwrap.dedent(f"""
        import pathlib, threading, time
        from tests.stack.test_process import SLEEP, Script
        script = Script(pathlib.Path({str(tmp_path)!r}), SLEEP)
        thread = threading.Thread(target=script.start)
        thread.start()
        thread.join()
        print(script.pid, flush=True)
        time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, cwd=places.ROOT) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        time.sleep(0.1)  # the thread has ended by now
        assert _state(child) == "S"
        process.kill()
        process.wait()
    _wait_until_gone(child)


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 5
    # Z: ended, and not yet waited for by its new parent.
    while _state(pid) not in "XZ":
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def test_no_setting_of_the_caller_reaches_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does another Spark: an installed one has set SPARK_HOME, and the job runs on the one in .venv."""
    theirs = ("FENCEPOST_KAFKA", "SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_DRIVER_PYTHON", "HADOOP_CONF_DIR")
    for name in theirs:
        monkeypatch.setenv(name, "somebody.elses:9092")
    environment = places.hermetic_environment()
    assert environment.keys().isdisjoint(theirs)
    assert environment["PATH"] == os.environ["PATH"]
