"""Processes that come and go under load, 1 → 8 → 2: how long a slot takes to move, and that nothing is in doubt."""

import asyncio
import time
from collections import Counter

from deploy.local.stack import Service
from tests.bench.stage import Bench, bench, keep
from tests.integration.client import Client, events
from tests.integration.judge import violations
from tests.integration.plan import until

SLOTS_MAX = 16
LEASE_TTL_MS = 3_000
EVENTS = 8_000


def _held(stage: Bench) -> Counter[str]:
    """Slots by the process that holds them."""
    with stage.redis.client() as store:
        tokens = [store.get(f"{{fencepost:0}}l{slot}") for slot in range(SLOTS_MAX)]
    names = [(token.decode() if isinstance(token, bytes) else str(token)) for token in tokens if token is not None]
    return Counter(name.partition("/")[0] for name in names)


def _moved(stage: Bench, processes: int) -> float:
    """Wait until each of so many processes holds its share; how long it took, in seconds."""
    started = time.monotonic()
    share = min(4, SLOTS_MAX // processes)
    until(lambda: sorted(_held(stage).values()) == [share] * processes, 60, f"{processes} processes hold {share} each")
    return time.monotonic() - started


async def _run(stage: Bench, client: Client) -> dict[str, object]:
    def process(number: int) -> Service:
        name = f"process-{number}"
        return stage.service(name, instance=name, slots_max=SLOTS_MAX, slots=4, lease_ttl_ms=LEASE_TTL_MS)

    running = [process(0)]
    await asyncio.to_thread(running[0].start)
    urls = [running[0].url]
    load = asyncio.create_task(client.load(urls, events("moving", EVENTS), workers=12, pace_s=0.05))
    took: dict[str, object] = {}
    for number in range(1, 8):
        running.append(process(number))
        await asyncio.to_thread(running[-1].start, True, 90.0)
        urls.append(running[-1].url)
    took["1 → 8: each has its share after the last is ready, s"] = round(await asyncio.to_thread(_moved, stage, 8), 2)
    for leaver in running[2:]:
        urls.remove(leaver.url)
        await asyncio.to_thread(leaver.stop)
    took["8 → 2: each has its share after the last has left, s"] = round(await asyncio.to_thread(_moved, stage, 2), 2)
    await load
    for service in running[:2]:
        await asyncio.to_thread(service.stop)
    kinds = Counter(attempt.kind if attempt.status != 409 else "busy" for attempt in client.history)
    took["attempts by outcome"] = dict(kinds)
    assert kinds["info"] == 0, "an answer was left in doubt"
    wrong = violations(stage.kafka.bootstrap, ["moving"], client.history)
    assert wrong == [], wrong[:5]
    took["events, each exactly once where its answer said"] = EVENTS
    return took


def main() -> None:
    with bench() as stage:
        stage.kafka.create_topic("moving", partitions=4)

        async def run() -> dict[str, object]:
            async with Client() as client:
                return await _run(stage, client)

        figures = asyncio.run(run())
        keep("moving", stage.redis, {"two lease times, s": 2 * LEASE_TTL_MS / 1000, **figures})
