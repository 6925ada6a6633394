"""Measures the time from a 201 until consumers see the record, and for how long a killed process blocks a partition."""

import asyncio
import contextlib
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import httpx
from confluent_kafka import Consumer, TopicPartition

from deploy.stack import Service
from service.contract.wire.headers import KEY_HEADER
from tests.bench.rows import Row, quantile
from tests.bench.stage import Stage
from tests.integration.judge import wait_until_stable
from tests.integration.plan import MODULE, PLAN_ENV, Fault, Plan

EVENTS = 2_000
LEASE_TTL_MS = 3_000
DEATHS = 5


def watch(kafka: str, topic: str, partitions: int, count: int, seen: Connection) -> None:
    """Run a read_committed consumer in a process, which notes when it sees each of these keys (monotonic s)."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka,
            "group.id": "bench-visible",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 5,
            "fetch.min.bytes": 1,
        }
    )
    ends = [consumer.get_watermark_offsets(TopicPartition(topic, partition), 10)[1] for partition in range(partitions)]
    consumer.assign([TopicPartition(topic, partition, end) for partition, end in enumerate(ends)])
    seen.send("watching")
    times: dict[str, float] = {}
    while len(times) < count:
        # Returns with the first record; consume() alone would wait for more.
        first = consumer.poll(0.05)
        for message in [*([first] if first is not None else []), *consumer.consume(500, timeout=0)]:
            if message.error() is None:
                key = bytes(dict(message.headers() or [])[KEY_HEADER] or b"")  # type: ignore[arg-type]
                times[key.decode()] = time.monotonic()
    consumer.close()
    seen.send(times)


async def _post_all(url: str, topic: str, prefix: str, clients: int, count: int) -> dict[str, float]:
    """Post this many events over this many connections; returns when each was answered 201 (monotonic s)."""
    answered: dict[str, float] = {}
    left = iter(range(count))

    async def work(http: httpx.AsyncClient) -> None:
        for number in left:
            key = f"{prefix}-{number}"
            response = await http.post(
                f"{url}/events",
                content=f'{{"topic":"{topic}","key":"r{number}","value":{{"n":{number}}}}}',
                headers={"Content-Type": "application/json", "Idempotency-Key": key},
            )
            assert response.status_code == 201, response.text
            answered[key] = time.monotonic()

    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        await asyncio.gather(*(work(http) for _ in range(clients)))
    return answered


def _lags_ms(stage: Stage, service: Service, topic: str, clients: int) -> list[float]:
    count = stage.pick(100, EVENTS)
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    watcher = spawn.Process(target=watch, args=(stage.kafka.bootstrap, topic, 3, count, theirs), daemon=True)
    watcher.start()
    assert mine.recv() == "watching"
    answered = asyncio.run(_post_all(service.url, topic, f"{time.monotonic_ns()}", clients, count))
    assert mine.poll(10), "not every record became visible"
    seen: dict[str, float] = mine.recv()
    watcher.join()
    return [max(0.0, 1000 * (seen[key] - at)) for key, at in answered.items()]


def _held_up_s(stage: Stage, heir: Service, topic: str, number: int) -> float:
    """Kill a process with an open transaction; returns how long the transaction blocks a partition."""
    folder = stage.folder / f"doomed-{number}"
    folder.mkdir()
    # With a timeout of a minute, only a recovery can end the transaction this soon.
    settings: dict[str, Any] = {
        "namespace": "visible",
        "slots": 1,
        "lease_ttl_ms": LEASE_TTL_MS,
        "transaction_timeout_ms": 60_000,
    }
    doomed = stage.service(f"doomed-{number}", MODULE, **settings)
    doomed.env[PLAN_ENV] = Plan(folder, (Fault("commit", "kill"),)).encode()
    doomed.start()
    headers = {"Content-Type": "application/json", "Idempotency-Key": f"doomed-{number}"}
    with contextlib.suppress(httpx.TransportError):
        httpx.post(f"{doomed.url}/events", content=f'{{"topic":"{topic}","value":1}}', headers=headers, trust_env=False)
    died = time.monotonic()
    wait_until_stable(stage.kafka.bootstrap, [topic])
    assert heir.ready()
    return time.monotonic() - died


def measure(stage: Stage) -> list[Row]:
    stage.kafka.create_topic("visible", partitions=3)
    rows: list[Row] = []
    with stage.service("visible", namespace="visible", lease_ttl_ms=LEASE_TTL_MS) as service:
        _lags_ms(stage, service, "visible", 4)  # warm-up
        for clients in stage.pick((1,), (1, 16)):
            lags = [_lags_ms(stage, service, "visible", clients) for _ in range(stage.pick(1, 2))]
            for name, share in (("p50", 0.5), ("p99", 0.99), ("most", 1.0)):
                values = [quantile(each, share) for each in lags]
                rows.append(Row(f"visible after its 201, {clients} clients, {name}", "ms", values))
        held_s = [_held_up_s(stage, service, "visible", number) for number in range(stage.pick(1, DEATHS))]
    return [*rows, Row(f"a partition held up by a kill -9, lease of {LEASE_TTL_MS / 1000:g} s", "s", held_s)]
