"""The CPU of a command with all of its processes: `python -m tests.bench.process_cpu COMMAND…`.

A process that the command leaves behind, as Python leaves Spark's JVM at its end, becomes a child of this process
(PR_SET_CHILD_SUBREAPER, prctl(2)), which waits for it. The last line of standard output is the CPU time in seconds, the
exit status that of the command.
"""

import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from deploy.places import ROOT
from tests.bench.rows import NotRealWork

PR_SET_CHILD_SUBREAPER: Final = 36


def of(command: Sequence[str], environ: Mapping[str, str], statuses: Sequence[int] = (0,)) -> float:
    """Run a command of this project; return its CPU time in seconds.

    Raises:
        NotRealWork: its exit status is none of `statuses`; with the end of its output.
    """
    measured = [sys.executable, "-m", "tests.bench.process_cpu", *command]
    ended = subprocess.run(measured, cwd=ROOT, env=dict(environ), capture_output=True, text=True, check=False)
    if ended.returncode not in statuses:
        raise NotRealWork(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr[-500:]}")
    return float(ended.stdout.splitlines()[-1])


def main() -> int:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")  # processes left behind would not count
    status = subprocess.run(sys.argv[1:], check=False).returncode
    with suppress(ChildProcessError):
        while True:
            os.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    sys.stdout.write(f"{used.ru_utime + used.ru_stime:.2f}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
