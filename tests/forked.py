"""Processes of the service that are forked from one process that has imported the service's modules.

These imports take about a second of processor time, and the tests of a run start some hundreds of processes. A forked
process has a session, an environment, a log and an end like any other of the stack (deploy/stack/process.py). The tests
of faults, the benchmarks and the demo start `python -m service`.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from deploy import places
from deploy.stack import Service
from deploy.stack.leash import PR_SET_PDEATHSIG
from deploy.stack.process import Child
from tests.integration.plan import MODULE, stopped

# The modules for `python -m`, and where their `main` is.
_MAINS: Final = {"service": "service.__main__", MODULE: MODULE}
# Variables that only the service reads, and not the interpreter, the dynamic linker or a library at its import.
_READ_LATE: Final = ("FENCEPOST_", "OTEL_")
_STARTS_S: Final = 30.0
_STOPS_S: Final = 10.0
_POLL_S: Final = 0.01

_context: Final = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__, *_MAINS.values()])
# multiprocessing lets one thread at a time start processes, or ask for their exit codes.
_one_thread: Final = threading.Lock()


class ForkedService(Service):
    """A service process that is forked, if it runs the modules of this tree with no more than settings of its own."""

    def launch(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> Child:
        if self.argv_prefix or self.project != places.ROOT or self.module not in _MAINS or not _only_settings(env):
            return super().launch(argv, env, cwd)
        ready, begun = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_run, args=(_MAINS[self.module], dict(env), cwd, self.log, begun), name=self.name, daemon=True
        )
        with ready:
            with begun, _one_thread:
                process.start()
            # From then on the process has a session, to which signals go; the pipe ends, also if the process does.
            ready.poll(_STARTS_S)
        return _Forked(process)

    def pause(self) -> None:
        """Pause the process, which is no child of this one, and wait until it has stopped."""
        super().pause()
        deadline = time.monotonic() + _STOPS_S
        with contextlib.suppress(FileNotFoundError):  # it is gone
            while not stopped(self.pid) and time.monotonic() < deadline:
                time.sleep(_POLL_S)


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
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._process.name, timeout)
            time.sleep(_POLL_S)
        return code


def _run(main: str, env: Mapping[str, str], cwd: Path, log: Path, begun: Connection) -> None:
    """Run a module's `main` in the forked process, as `python -m` does in a process of the stack."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    appended = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (sys.__stdout__, sys.__stderr__):
        assert descriptor is not None
        os.dup2(appended, descriptor.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # the log must be complete at a kill
    begun.close()
    # Among these is the one that keeps the process alive from which this one was forked.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.exit(importlib.import_module(main).main())
