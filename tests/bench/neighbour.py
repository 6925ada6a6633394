"""How much slower a core is beside a busy one: two that are threads of one core share what they reckon with.

Where that is much, an answer costs the more CPU, the more its broker has to do: a part of it is the machine's.
"""

import subprocess
import sys
import time
from statistics import median
from typing import Final

ROUNDS: Final = 3
LOOP_S: Final = 0.1
_BUSY: Final = "while True: pass"


def slowdown() -> float:
    """The time of some work beside a busy process, over the time that it takes alone: 1 on cores of their own."""
    factors = []
    for _ in range(ROUNDS):
        alone = _loops()
        busy = subprocess.Popen([sys.executable, "-c", _BUSY])
        try:
            time.sleep(LOOP_S)  # until it runs
            factors.append(alone / _loops())
        finally:
            busy.kill()
            busy.wait()
    return round(median(factors), 2)


def _loops() -> int:
    """How often a small piece of work is done in LOOP_S."""
    count, end = 0, time.perf_counter() + LOOP_S
    while time.perf_counter() < end:
        sum(range(500))
        count += 1
    return count
