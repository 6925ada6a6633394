"""Measures the others' throughput beside a caller who sends only events that the broker refuses."""

import asyncio
import itertools
import time

import httpx

from tests.bench.rows import NotRealWork, Row, ratios
from tests.bench.stage import Stage

SECONDS = 6.0
CLIENTS = 32
ROUNDS = 3


async def _others(url: str, prefix: str, until: float) -> tuple[int, list[int]]:
    """Write events of other callers; returns their number, and the statuses other than 201."""
    written = 0
    strange: list[int] = []
    numbers = itertools.count()

    async def work(http: httpx.AsyncClient) -> None:
        nonlocal written
        while time.monotonic() < until:
            headers = {"Content-Type": "application/json", "Idempotency-Key": f"{prefix}-{next(numbers)}"}
            response = await http.post(f"{url}/events", content=b'{"topic":"good","value":1}', headers=headers)
            if response.status_code == 201:
                written += 1
            else:
                strange.append(response.status_code)

    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        await asyncio.gather(*(work(http) for _ in range(CLIENTS)))
    return written, strange


async def _poison(url: str, prefix: str, until: float) -> int:
    """Send events that are too large for their topic, from four connections; returns how many were refused."""
    refused = 0
    numbers = itertools.count()

    async def work(http: httpx.AsyncClient) -> None:
        nonlocal refused
        while time.monotonic() < until:
            headers = {"Content-Type": "application/json", "Idempotency-Key": f"{prefix}-{next(numbers)}"}
            body = b'{"topic":"poisoned","value":"' + b"x" * 4_000 + b'"}'
            response = await http.post(f"{url}/events", content=body, headers=headers)
            refused += response.status_code == 413

    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        await asyncio.gather(*(work(http) for _ in range(4)))
    return refused


async def _round(url: str, number: int, seconds: float) -> tuple[int, int, int, list[int]]:
    alone, strange = await _others(url, f"alone-{number}", time.monotonic() + seconds)
    until = time.monotonic() + seconds
    (beside, more), refused = await asyncio.gather(
        _others(url, f"beside-{number}", until), _poison(url, f"poison-{number}", until)
    )
    return alone, beside, refused, strange + more


def measure(stage: Stage) -> list[Row]:
    stage.kafka.create_topic("good", partitions=3)
    stage.kafka.create_topic("poisoned", partitions=1, config={"max.message.bytes": "1000"})
    # The service's own check of the size is off, so that the broker refuses the events.
    with stage.service("poison", module="tests.bench.blind", namespace="poison") as service:
        seconds, count = stage.pick(1.0, SECONDS), stage.pick(1, ROUNDS)
        rounds = [asyncio.run(_round(service.url, number, seconds)) for number in range(count)]
    alone, beside, refused, strange = zip(*rounds, strict=True)
    if others := list(itertools.chain.from_iterable(strange)):
        raise NotRealWork(f"others were answered {sorted(set(others))}")
    return [
        Row("others' throughput beside poison over that without", "x", ratios(beside, alone)),
        Row("poisoned events refused", "", refused),
    ]
