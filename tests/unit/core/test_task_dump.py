"""Tests that the calls of a waiting task are logged."""

import asyncio
import os
import signal

import structlog

from service.core.task_dump import calls, dump_on_signal
from tests.unit.fakes import until


async def _innermost(lock: asyncio.Lock) -> None:
    async with lock:
        pass


async def _outermost(lock: asyncio.Lock) -> None:
    await _innermost(lock)


async def test_the_calls_of_a_task_that_waits() -> None:
    lock = asyncio.Lock()
    await lock.acquire()
    task = asyncio.create_task(_outermost(lock), name="stuck")
    await asyncio.sleep(0)
    waits_for = list(calls(task.get_coro()))
    assert [call.split()[1] for call in waits_for][:2] == ["_outermost", "_innermost"]
    assert waits_for[-1].endswith(" Lock.acquire")
    assert waits_for[0].startswith("test_task_dump.py:")

    dump_on_signal(asyncio.get_running_loop())
    with structlog.testing.capture_logs() as lines:
        os.kill(os.getpid(), signal.SIGUSR1)
        await until(lambda: any(line.get("name") == "stuck" for line in lines))
    asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
    (line,) = [line for line in lines if line.get("name") == "stuck"]
    assert line["waits"] == " > ".join(waits_for)
    lock.release()
    await task
