"""Starts, watches, pauses, kills and stops one process of the local stack, and keeps its log."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from deploy.console import StackError

_LEASH = Path(__file__).with_name("leash.py")
_STOP_S = 15.0  # a broker closes its logs in one or two seconds; a service may finish requests for 10 s
_KILL_S = 10.0  # for the kernel to end a killed process
_POLL_S = 0.02
# Fields of /proc/PID/stat (proc(5)), counted from the state on: the session's leader; user and system time.
_SESSION, _CPU_TICKS = 3, (11, 12)
# The share of a CPU that separates a working process, even on a busy machine, from an idle JVM.
_WORKING_SHARE = 0.01

# Linux sends the parent-death signal when the *thread* that started a child ends, not the process. All children are
# therefore started from this one thread, which lives as long as the interpreter.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stack-starter")


class Child(Protocol):
    """A started process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Process(ABC):
    """A process in a session of its own, which ends with this process at the latest. Subclasses define `start`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.log = folder / f"{name}.log"
        self.extra_env: dict[str, str] = {}  # overrides the environment of the next start
        self._child: Child | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {'pid ' + str(self.pid) if self.running else 'not running'}>"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # such as a signal during the start: __exit__ will not be called
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @abstractmethod
    def start(self) -> None:
        """Start the process and wait until it answers."""

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int:
        """The process id.

        Raises:
            StackError: the process was never started.
        """
        if self._child is None:
            raise StackError(f"{self.name} was not started")
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code (negative: the signal); None while the process runs, or before its start."""
        return None if self._child is None else self._child.poll()

    def spawn(self, argv: Sequence[str | Path], *, env: Mapping[str, str], cwd: Path | None = None) -> None:
        """Start `argv` with only `env` and `extra_env`; its output is appended to the log.

        Raises:
            StackError: the process is running already.
        """
        if self.running:
            raise StackError(f"{self.name} is running already (pid {self.pid})")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._child = self.launch(list(map(str, argv)), {**env, **self.extra_env}, cwd or self.folder)

    def launch(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> Child:
        """Start a program in a session of its own, which is killed when this process ends; called by `spawn`."""
        leashed = [sys.executable, "-I", "-S", str(_LEASH), str(os.getpid()), *argv]

        def popen() -> subprocess.Popen[bytes]:
            with self.log.open("ab") as log:
                return subprocess.Popen(  # the stack's own programs
                    leashed,
                    env=env,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

        return _starter.submit(popen).result()

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll `ready` until it holds.

        Raises:
            StackError: the process ended, or `timeout_s` ran out (then it is killed).
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.running:
                raise StackError(f"{self.name} ended with code {self.exit_code} at its start\n{self.tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise StackError(f"{self.name} gave no answer within {timeout_s:.0f} s\n{self.tail()}")
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float) -> int:
        """Wait until the process ends by itself, and return its exit code.

        Raises:
            StackError: it still runs after `timeout_s`.
        """
        try:
            return self._wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise StackError(f"{self.name} still runs after {timeout_s:.0f} s\n{self.tail()}") from None

    def wait_while_working(self, idle_s: float) -> int:
        """Wait until the process ends by itself, however slow the machine is, and return its exit code.

        Raises:
            StackError: for `idle_s` it has neither written to its log nor used noticeable CPU time.
        """
        while True:
            logged, used_s = self._log_bytes(), self._cpu_s()
            try:
                return self.wait(idle_s)
            except StackError:
                if self._log_bytes() == logged and self._cpu_s() - used_s < idle_s * _WORKING_SHARE:
                    raise

    def _log_bytes(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def _cpu_s(self) -> float:
        """Read the CPU time of the program and its children, in seconds; 0 without /proc."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has just ended
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[_SESSION]) == self.pid:
                    ticks += sum(int(fields[field]) for field in _CPU_TICKS)
        return ticks / os.sysconf("SC_CLK_TCK")

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of the log, and its path."""
        if not self.log.exists():
            return f"no log at {self.log}"
        with self.log.open(errors="replace") as log:
            last = deque(log, maxlen=lines)
        return "".join(f"  {line.rstrip()}\n" for line in last) + f"the whole log: {self.log}"

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """Stop the process: SIGTERM, then SIGKILL after `timeout_s`. No error if it is not running."""
        if not self.running:
            return
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a paused process gets SIGTERM only now
        try:
            self._wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the process (SIGKILL), and wait until it has ended. No error if it is not running."""
        if self.running:
            self._signal(signal.SIGKILL)
            self._wait(_KILL_S)

    def pause(self) -> None:
        """Pause the process (SIGSTOP), and wait until it has stopped."""
        self._signal(signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):  # it is gone
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Continue a paused process (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        # To the process group, so that helpers of the program get the signal too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _wait(self, timeout_s: float) -> int:
        if self._child is None:
            raise StackError(f"{self.name} was not started")
        return self._child.wait(timeout_s)
