"""Processes of the service that are forked from one process that has imported the service's modules.

These imports take about a second of processor time, and the tests of a run start some hundreds of processes. A forked
process has a session, an environment, a log and an end like any other of the stack (deploy/stack/process.py). The tests
of faults, the benchmarks, the demo, and tests that make a `Service` themselves start `python -m service`.
"""

import contextlib
import importlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from deploy import places
from deploy.stack import Service, StackError
from deploy.stack.leash import die_with_parent
from deploy.stack.process import Child
from tests.integration.plan import MODULE, stopped, until

# The modules for `python -m`, and where their `main` is.
_MAINS: Final = {"service": "service.__main__", MODULE: MODULE}
# Variables that only the service reads, and not the interpreter, the dynamic linker or a library at its import.
_READ_LATE: Final = ("FENCEPOST_", "OTEL_")
_STARTS_S: Final = 30.0
_STOPS_S: Final = 10.0

_context: Final = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__, *_MAINS.values()])
# multiprocessing reads exit codes also when it starts a process: two threads would read the same code.
_one_thread: Final = threading.Lock()


class ForkedService(Service):
    """A service process that is forked, if it runs the modules of this tree with no more than settings of its own."""

    def launch(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> Child:
        if self.argv_prefix or self.project != places.ROOT or self.module not in _MAINS or not _only_settings(env):
            return super().launch(argv, env, cwd)
        ready, begun = _context.Pipe(duplex=False)
        # A daemon: at its exit, Python ends what still runs, and does not wait for it.
        process = _context.Process(
            target=_run, args=(_MAINS[self.module], dict(env), cwd, self.log, begun), name=self.name, daemon=True
        )
        with ready:
            with begun, _one_thread:
                process.start()
            # The process closes the pipe when it has its session, to which signals go, or when it ends.
            if not ready.poll(_STARTS_S):
                process.kill()
                _Forked(process).wait(_STOPS_S)
                raise StackError(f"{self.name}: the forked process has not begun within {_STARTS_S} s")
        return _Forked(process)

    def pause(self) -> None:
        """Pause the process, which is no child of this one, and wait until it has stopped."""
        super().pause()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is gone
            until(lambda: stopped(self.pid), _STOPS_S, "the process stops")


def _only_settings(env: Mapping[str, str]) -> bool:
    """Check whether the variables are those of this process, besides settings of the service."""
    return all(
        name.startswith(_READ_LATE) or name == "PYTHONUNBUFFERED" or os.environ.get(name) == value
        for name, value in env.items()
    )


class _Forked:
    """A forked process, with the methods of `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        with _one_thread:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        # Without the lock: the sentinel stays ready, also when another thread has read the exit code.
        if not wait_for([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code


def _run(main: str, env: Mapping[str, str], cwd: Path, log: Path, begun: Connection) -> None:
    """Run a module's `main` in the forked process, as `python -m` does in a process of the stack."""
    os.setsid()
    die_with_parent()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    appended = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (sys.__stdout__, sys.__stderr__):
        assert descriptor is not None
        os.dup2(appended, descriptor.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # the log must be complete at a kill
    begun.close()
    # One of them would keep the fork server running after the process that started it, and this process with it.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.exit(importlib.import_module(main).main())
