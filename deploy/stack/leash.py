"""Runs a program that is killed when its parent ends: `python leash.py PARENT_PID PROGRAM [ARGUMENT]...`.

A test run or a demo that is killed with -9 cannot clean up. This process asks the kernel to be killed when its parent
ends (PR_SET_PDEATHSIG, Linux only), and then executes the program under the same process id. It imports nothing of the
project, so that it starts in some 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, on Linux. Raises OSError if the kernel refuses."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        die_with_parent()
        # If the parent had ended before that request, the signal would never come.
        if os.getppid() != parent:
            sys.exit("the parent of this process is gone")
    os.execvp(program[0], program)  # replaces this process


if __name__ == "__main__":
    main()
