"""Load on services whose logins at Kafka end again and again, and what it found."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from deploy.stack import Redis, Service
from tests.integration.client import Attempt, Client, events
from tests.integration.conftest import SETTINGS
from tests.integration.judge import ledger_faults, violations
from tests.managed import PASSWORD, SUBJECT, USER, ManagedKafka, TokenEndpoint
from tests.secured import acls_of_service

# Metrics that count what an ended connection causes.
TERMS_ENDED: Final = "fencepost_terms_ended_total"
FENCES: Final = 'fencepost_fences_total{of="slot"}'


class Fleet:
    """Two processes of one namespace: one logs in by tokens, the other by a password in a file."""

    def __init__(self, folder: Path, kafka: ManagedKafka, redis: Redis, endpoint: TokenEndpoint) -> None:
        self.namespace = f"m-{uuid.uuid4().hex[:8]}"
        self.topic = f"{self.namespace}-events"
        self.kafka = kafka
        self.password = folder / "password"
        self.password.write_text(PASSWORD + "\n")
        kafka.create_topic(self.topic, partitions=4)
        for user in (SUBJECT, USER):
            kafka.allow(user, *acls_of_service(self.namespace, self.topic))
        kafka.set_password(PASSWORD)
        own = {**SETTINGS, "FENCEPOST_NAMESPACE": self.namespace}
        self.services = [
            Service(folder, kafka="", redis=redis.url, env={**own, **login}, name=name)
            for name, login in (
                ("by-token", kafka.by_token(endpoint)),
                ("by-password", kafka.by_password(self.password)),
            )
        ]

    @property
    def urls(self) -> list[str]:
        return [service.url for service in self.services]

    async def __aenter__(self) -> "Fleet":
        await asyncio.gather(*(asyncio.to_thread(service.start) for service in self.services))
        return self

    async def __aexit__(self, *_: object) -> None:
        for service in self.services:
            await asyncio.to_thread(service.stop)

    def metrics(self) -> list[dict[str, float]]:
        """Read the metrics of each process, by name and labels."""
        return [metrics_of(url) for url in self.urls]

    def faults(self, history: Sequence[Attempt]) -> list[str]:
        """Compare topic and ledger with the clients' acknowledgements, by a client library of its own."""
        return violations(self.kafka.bootstrap, [self.topic], [*history]) + ledger_faults(
            self.kafka.bootstrap, self.namespace, [self.topic]
        )


class Run(NamedTuple):
    """What a load has seen: answers by status and code, the longest wait, and what has changed in the metrics."""

    answers: Counter[str]
    longest_s: float
    ended_terms: float
    fences: float


async def load(fleet: Fleet, client: Client, seconds: float, workers: int = 8) -> Run:
    """Post events to both processes for some time."""
    before = await asyncio.to_thread(fleet.metrics)
    ends = time.monotonic() + seconds
    answers: Counter[str] = Counter()
    waits = [0.0]

    async def work(worker: int) -> None:
        prefix, number = f"w{worker}-{uuid.uuid4().hex[:6]}", 0
        while time.monotonic() < ends:
            (asked,) = events(fleet.topic, 1, f"{prefix}-{number}")
            number += 1
            began = time.monotonic()
            attempt = await client.post(fleet.urls[number % len(fleet.urls)], asked)
            waits.append(time.monotonic() - began)
            answers[f"{attempt.status} {attempt.code}".strip()] += 1

    async with asyncio.TaskGroup() as group:
        for worker in range(workers):
            group.create_task(work(worker))
    after = await asyncio.to_thread(fleet.metrics)
    return Run(answers, max(waits), _grown(before, after, TERMS_ENDED), _grown(before, after, FENCES))


def metrics_of(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def _grown(before: list[dict[str, float]], after: list[dict[str, float]], name: str) -> float:
    """Sum up by how much the metrics of this name, with any labels, have grown in all processes."""
    return sum(
        value - earlier.get(each, 0.0)
        for earlier, later in zip(before, after, strict=True)
        for each, value in later.items()
        if each.startswith(name)
    )
