"""Measures one stream of NDJSON to POST /events/batch: its rate, and the memory that the process takes for it.

One client sends 1 GB of events of 1 KB on one connection, and reads the results at the same time. The growth of the
process's resident memory is measured from behind a first, short stream to the highest value within the long one.
"""

import asyncio
import threading
import time
from collections.abc import Iterator

from tests.bench.rows import Goal, NotRealWork, Row
from tests.bench.stage import Stage, Target, memory_bytes
from tests.integration.streamer import stream_lines

EVENT_BYTES = 1_000
WARM_BYTES = 16_000_000
LOOK_S = 0.05
GROWTH = Goal(most=32.0)


def measure(stage: Stage) -> list[Row]:
    size = stage.pick(64_000_000, 1_000_000_000)
    rounds = stage.pick(1, 1, 3)
    rates: list[float] = []
    growth: list[float] = []
    with stage.target() as target:
        _stream(target, WARM_BYTES, "warm")
        for number in range(rounds):
            before = memory_bytes(target.service.pid)
            seconds, most = _stream(target, size, f"{number}")
            rates.append(size / seconds / 1e6)
            growth.append((most - before) / 1e6)
        target.check()
    return [
        Row(f"memory while {size / 1e9:g} GB stream through", "MB", growth, GROWTH),
        Row("events of 1 KB on one connection", "MB/s", rates),
    ]


def _stream(target: Target, size: int, prefix: str) -> tuple[float, int]:
    """Send a stream of so many bytes; returns the seconds that it took, and the most memory of the process."""
    events = size // EVENT_BYTES
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(LOOK_S):
            most = max(most, memory_bytes(target.service.pid))

    watching = threading.Thread(target=watch)
    watching.start()
    started = time.monotonic()
    try:
        found = asyncio.run(stream_lines(target.service.url, _events(target, events, prefix)))
    finally:
        over.set()
        watching.join()
    if found != {201: events}:
        raise NotRealWork(f"of {events} events: {dict(found)}")
    target.answered += events
    return time.monotonic() - started, most


def _events(target: Target, count: int, prefix: str) -> Iterator[bytes]:
    event = '{"topic":"%s","value":"","idempotency_key":"%s-%s-%09d"}\n'
    pad = "x" * (EVENT_BYTES - len(event % (target.topic, target.namespace, prefix, 0)))
    event = event.replace('"value":""', f'"value":"{pad}"')
    for number in range(count):
        yield (event % (target.topic, target.namespace, prefix, number)).encode()
