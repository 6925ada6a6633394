"""Bounds how long a task keeps the event loop from other tasks."""

import asyncio
import time
from typing import Final

# A POST takes some ten turns of the loop, so each long task beside it adds about ten times as long to its latency.
SLICE_S: Final = 0.0005

# Turns of the loop from a result to its response on the socket: one renders the responses of a group, one writes them.
RESPONSE_TURNS: Final = 2

# Events of a group from which on a step with each of them takes the event loop for milliseconds.
STEP_EVENTS: Final = 500


class TimeSlice:
    """The time for which a task may work before other tasks run.

    Between two steps, `if slice.is_over: await slice.next()`. A step should take much less than SLICE_S.
    """

    def __init__(self) -> None:
        self._until = time.monotonic() + SLICE_S

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._until

    async def next(self) -> None:
        """Let the other tasks of the loop run, and begin another slice."""
        await asyncio.sleep(0)
        self._until = time.monotonic() + SLICE_S


async def yield_after(events: int) -> None:
    """Let the other tasks of the loop run after a step with this many events of a group, if such steps take long."""
    if events >= STEP_EVENTS:
        await asyncio.sleep(0)


async def after_responses() -> None:
    """Wait until the responses to the results that were just set are written, unless a response needs other work."""
    for _ in range(RESPONSE_TURNS):
        await asyncio.sleep(0)
