"""Start a program that dies with its parent: `python leash.py PARENT_PID PROGRAM [ARGUMENT]...`.

A test run or a demo that is killed with -9 cannot clean up, so the kernel does it: this process asks to be killed when
its parent goes, and then becomes the program (same process id). Linux only; elsewhere it just becomes the program.
It imports nothing of the project, so that it costs some 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have gone before the request was made: then the signal never comes.
        if os.getppid() != parent:
            sys.exit("the parent of this process is gone")
    os.execvp(program[0], program)  # replacing this process is the point


if __name__ == "__main__":
    main()
