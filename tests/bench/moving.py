"""Measures how long slots take to move while processes start and stop under load (1 → 8 → 2), without doubts."""

import asyncio
import time
from collections import Counter

from deploy.stack import Service
from tests.bench.rows import Goal, NotRealWork, Row
from tests.bench.stage import Stage
from tests.integration.client import Client, events
from tests.integration.judge import violations
from tests.integration.plan import until

NAMESPACE = "moving"
SLOTS_MAX = 16
LEASE_TTL_MS = 3_000
EVENTS = 8_000


def _held(stage: Stage) -> Counter[str]:
    """List the slots by the process that holds them."""
    with stage.redis.client() as store:
        tokens = [store.get(f"{{{NAMESPACE}:0}}l{slot}") for slot in range(SLOTS_MAX)]
    names = [(token.decode() if isinstance(token, bytes) else str(token)) for token in tokens if token is not None]
    return Counter(name.partition("/")[0] for name in names)


def _moved(stage: Stage, processes: int) -> float:
    """Wait until each of this many processes holds its share; returns the seconds that this took."""
    started = time.monotonic()
    share = min(4, SLOTS_MAX // processes)
    until(lambda: sorted(_held(stage).values()) == [share] * processes, 60, f"{processes} processes hold {share} each")
    return time.monotonic() - started


async def _run(stage: Stage, client: Client) -> list[Row]:
    def process(number: int) -> Service:
        name = f"process-{number}"
        return stage.service(
            name, namespace=NAMESPACE, instance=name, slots_max=SLOTS_MAX, slots=4, lease_ttl_ms=LEASE_TTL_MS
        )

    most, count = stage.pick((3, 1_000), (8, EVENTS))
    running = [process(0)]
    await asyncio.to_thread(running[0].start)
    urls = [running[0].url]
    load = asyncio.create_task(client.load(urls, events("moving", count), workers=12, pace_s=0.05))
    for number in range(1, most):
        running.append(process(number))
        await asyncio.to_thread(running[-1].start, True, 90.0)
        urls.append(running[-1].url)
    grown_s = await asyncio.to_thread(_moved, stage, most)
    for leaver in running[2:]:
        urls.remove(leaver.url)
        await asyncio.to_thread(leaver.stop)
    shrunk_s = await asyncio.to_thread(_moved, stage, 2)
    await load
    for service in running[:2]:
        await asyncio.to_thread(service.stop)
    kinds = Counter(attempt.kind for attempt in client.history)
    if kinds["info"]:
        raise NotRealWork(f"{kinds['info']} answers were left in doubt")
    if wrong := violations(stage.kafka.bootstrap, ["moving"], client.history):
        raise NotRealWork("; ".join(wrong[:3]))
    goal = Goal(most=2 * LEASE_TTL_MS / 1000)
    return [
        Row(f"1 → {most} processes: each has its share after the last is ready", "s", [grown_s], goal),
        Row(f"{most} → 2 processes: each has its share after the last has left", "s", [shrunk_s], goal),
        Row("events, each exactly once where its answer said", "", [count]),
    ]


def measure(stage: Stage) -> list[Row]:
    stage.kafka.create_topic("moving", partitions=4)

    async def run() -> list[Row]:
        async with Client() as client:
            return await _run(stage, client)

    return asyncio.run(run())
