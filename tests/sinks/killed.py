"""`python -m tests.sinks.killed PROGRAM STEP TOPIC TABLE`: an example that fills a table, and kills itself with -9.

It does so in its second batch, at one of the STEPS of the program; STEP `never`: not at all.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, Final

from aiokafka import AIOKafkaConsumer

from deploy.examples import sink_naive, sink_postgres

BATCH: Final = 20
NEVER: Final = "never"
# What is called, and whether the program dies after the call, or before it.
STEPS: Final[dict[str, dict[str, tuple[Any, str, bool]]]] = {
    "transaction": {
        "rows are inserted, the position is not": (sink_postgres.Table, "insert", True),
        "rows and position are committed": (sink_postgres.Table, "commit", True),
    },
    "store-first": {"rows are stored, the offset is not": (AIOKafkaConsumer, "commit", False)},
    "commit-first": {"the offset is committed, rows are not": (sink_naive, "store", False)},
}
"""By program the moments at which a crash shows whether rows are lost or repeated."""


def _die_in_second_call(owner: Any, name: str, *, after: bool) -> None:
    original, calls = getattr(owner, name), 0

    async def counted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = await original(*given)
        if calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


def _main(program: str, step: str, topic: str, table: str) -> Coroutine[Any, Any, None]:
    for module in (sink_naive, sink_postgres):
        module.RECORDS_MAX = BATCH  # type: ignore[attr-defined]
    if step != NEVER:
        owner, name, after = STEPS[program][step]
        _die_in_second_call(owner, name, after=after)
    return sink_postgres.main(topic, table) if program == "transaction" else sink_naive.main(program, topic, table)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
