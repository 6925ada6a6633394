"""`python -m tests.bench.held`: runs the service with a task that measures for how long the event loop was held.

The task sleeps a millisecond at a time. If it runs later than that by `LEAST_S` or more, it prints a line to stdout
with the time at which it began to sleep, the duration, and the part of it for which the thread of the loop waited for a
CPU: other processes had that time, not a request. Time of waiting for Python's GIL counts as held.
"""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

from service import app
from service.__main__ import main

LEAST_S: Final = 0.003
TICK_S: Final = 0.001
MARK: Final = "loop held"


def read(log: Path, start: float, end: float) -> list[tuple[float, float]]:
    """In ms: each time for which the loop was held between two times of the monotonic clock, and its wait for a CPU."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith(MARK):
            began, gap_ms, waited_ms = map(float, line.removeprefix(MARK).split())
            if start <= began < end:
                found.append((gap_ms, waited_ms))
    return found


def longest_ms(log: Path, start: float, end: float) -> float:
    """Return the longest time for which the loop was held between two times, without its wait for a CPU."""
    return max((gap - waited for gap, waited in read(log, start, end)), default=0.0)


class _Watched(app.Service):
    """The service with that task."""

    def start(self) -> None:
        super().start()
        self._tasks.append(asyncio.create_task(_watch()))


async def _watch() -> None:
    schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    try:
        before, waited = time.monotonic(), _waited_ns(schedstat)
        while True:
            await asyncio.sleep(TICK_S)
            now, waited_now = time.monotonic(), _waited_ns(schedstat)
            if now - before > TICK_S + LEAST_S:
                print(f"{MARK} {before:.6f} {1e3 * (now - before):.2f} {1e-6 * (waited_now - waited):.2f}", flush=True)
            before, waited = now, waited_now
    finally:
        os.close(schedstat)


def _waited_ns(schedstat: int) -> int:
    """Read the time for which a thread was ready to run but had no CPU."""
    return int(os.pread(schedstat, 128, 0).split()[1])


if __name__ == "__main__":
    app.Service = _Watched  # type: ignore[misc]
    sys.exit(main())
