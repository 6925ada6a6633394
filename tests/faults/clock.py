"""Gives a process of the stack its own clock, which jumps an hour ahead or back while all other clocks go on.

    clock = Clock(redis)  # before its start
    redis.start()
    clock.shift(3600)     # its time of day is an hour ahead at once; timers do not change
    clock.shift(0)

A small library (clock.c) is preloaded into the process and answers its calls for the time. libfaketime works for Redis,
but a broker does not start with it within a minute, because all threads of a JVM wait for its lock. Without a C
compiler, `lacking` says what to install.
"""

import hashlib
import os
import struct
import subprocess
from pathlib import Path
from typing import Final

from deploy import places
from deploy.console import StackError
from deploy.stack.process import Process
from tests.faults.tools import lacks

_SOURCE: Final = Path(__file__).with_name("clock.c")
_SHIFT: Final = struct.Struct("=q")  # s
_CALL_S: Final = 60.0
_ENVIRONMENT: Final = ("LD_PRELOAD", "FENCEPOST_TEST_CLOCK")


def lacking() -> str:
    """Return why a clock cannot be changed here; "" if it can."""
    return lacks(_can_compile, "C compiler (cc)", "build-essential")


class Clock:
    """The time of day of one process, from its next start on."""

    def __init__(self, process: Process) -> None:
        """Give a process, which is not running, a clock that is right at first.

        Raises:
            StackError: the process runs already, or the library cannot be compiled.
        """
        if process.running:
            raise StackError(f"{process.name} runs by the machine's clock already: stop it first")
        self._process = process
        self._file = process.folder / f"{process.name}.clock"
        process.folder.mkdir(parents=True, exist_ok=True)
        self.shift(0)
        process.extra_env |= dict(zip(_ENVIRONMENT, (str(_library()), str(self._file)), strict=True))

    def shift(self, seconds: int) -> None:
        """Shift the clock by this many seconds (negative: back); 0 sets it right."""
        file = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, _SHIFT.pack(seconds), 0)  # in place, because the file is mapped
        finally:
            os.close(file)

    def remove(self) -> None:
        """Use the machine's clock again, from the next start of the process on."""
        for name in _ENVIRONMENT:
            self._process.extra_env.pop(name, None)


def _library() -> Path:
    """Compile the library, or take it from the project's cache."""
    version = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    library = places.cache() / f"clock-{version}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        done = _compile(_SOURCE.read_text(), "-shared", "-fPIC", "-o", str(new), "-ldl")
        if done.returncode:
            raise StackError(f"{_SOURCE.name} cannot be compiled: {done.stderr}")
        new.replace(library)
    return library


def _compile(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["cc", "-O2", "-Wall", "-Werror", "-x", "c", "-", *arguments]
    return subprocess.run(command, input=source, capture_output=True, text=True, timeout=_CALL_S, check=False)


def _can_compile() -> bool:
    """Check whether there is a compiler with the C library's headers."""
    try:
        return _compile("#include <stdio.h>\nint fine;\n", "-fsyntax-only").returncode == 0
    except FileNotFoundError:
        return False
