"""Tests the processors of deploy/examples: killed and rebalanced at random, in one group, on a real broker and service.

The processor in Go takes part if it is built: `python -m tests.go_tools process_orders`.
"""

import asyncio
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from deploy.stack import Kafka, Service
from service.fencepost import AsyncClient, Event, GroupReader, KeyReused, Offsets, SendError, WrittenBatch
from tests import go_tools
from tests.conftest import MakeTopic
from tests.integration.conftest import Stage, plan_of
from tests.integration.judge import read_committed
from tests.integration.plan import Fault, until
from tests.integration.processor import Processor

PARTITIONS: Final = 4
ORDERS: Final = 2_400
FEED_S: Final = 12.0
SEED: Final = 35
# A killed member's partitions move after its session; the broker's least is that of deploy/stack/kafka.py.
SESSION_MS: Final = 2_000
RECORDS_MAX: Final = 20
PAUSE_S: Final = (0.4, 1.2)
ALL_S: Final = 60.0
GROUP: Final = "billing"
HELD_MS: Final = 20_000  # a transaction that is held is not aborted meanwhile


def feed(bootstrap: str, topic: str, cents: Sequence[int]) -> None:
    """Write an order for each amount, at a steady rate."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 20})
    begun = time.monotonic()
    for number, each in enumerate(cents):
        time.sleep(max(0.0, begun + FEED_S * number / len(cents) - time.monotonic()))
        producer.produce(topic, json.dumps({"order": number, "cents": each}), partition=number % PARTITIONS)
        producer.poll(0)
    assert producer.flush(30) == 0


def committed(admin: AdminClient, topic: str) -> dict[int, int]:
    """Read the group's offsets by partition."""
    partitions = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    (future,) = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(GROUP, partitions)]).values()
    return {each.partition: each.offset for each in future.result(10).topic_partitions}


def torment(processors: Sequence[Processor], until: threading.Event) -> Counter[str]:
    """Kill processors, or end them by SIGTERM, and start them again, one after the other, until the end."""
    chance, ends = random.Random(SEED), Counter[str]()
    while not until.is_set():
        time.sleep(chance.uniform(*PAUSE_S))
        victim = chance.choice(processors)
        how = chance.choice(["kill", "kill", "stop"])
        victim.kill() if how == "kill" else victim.stop()
        ends[how] += 1
        time.sleep(chance.uniform(0.0, PAUSE_S[1]))
        victim.start()
    return ends


@dataclass
class Story:
    """What the orders were, what was made of them, and how often each processor wrote and was ended."""

    cents: list[int]
    invoices: list[dict[str, int]]
    ends: Counter[str]
    written: dict[str, int]


@pytest.fixture(scope="module")
def story(served: Service, kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Story:
    source, result = (f"{name}-{time.time_ns()}" for name in ("orders", "invoices"))
    for topic in (source, result):
        kafka.create_topic(topic, partitions=PARTITIONS)
    options = ["--group", GROUP, "--records-max", f"{RECORDS_MAX}", "--session-ms", f"{SESSION_MS}"]
    python: list[str | Path] = [sys.executable, "-m", "deploy.examples.process_orders", *options, source, result]
    go: list[str | Path] = [go_tools.path("process_orders"), *options, source, result]
    kinds = {"python-1": python, "python-2": python}
    kinds |= {"go-1": go, "go-2": go} if go_tools.path("process_orders").exists() else {"python-3": python}
    folder = tmp_path_factory.mktemp("processors")
    processors = [Processor(name, folder, argv, served.url, kafka.bootstrap) for name, argv in kinds.items()]
    chance = random.Random(SEED)
    cents = [chance.randrange(100_000) for _ in range(ORDERS)]
    fed = threading.Event()
    try:
        for each in processors:
            each.start()
        with ThreadPoolExecutor() as pool:
            tormenting = pool.submit(torment, processors, fed)
            try:
                feed(kafka.bootstrap, source, cents)
            finally:
                fed.set()
            ends = tormenting.result()
        admin = kafka.admin()
        ends_at = time.monotonic() + ALL_S
        wanted = dict.fromkeys(range(PARTITIONS), ORDERS // PARTITIONS)
        while (found := committed(admin, source)) != wanted:
            assert time.monotonic() < ends_at, f"{found}\n" + "\n".join(each.tail() for each in processors)
            assert all(each.running for each in processors), "\n".join(each.tail() for each in processors)
            time.sleep(0.1)
    finally:
        for each in processors:
            each.kill()
    records = read_committed(kafka.bootstrap, [result])
    invoices = [json.loads(record.value or b"") for record in records]
    return Story(cents, invoices, ends, {each.name: each.count("written") for each in processors})


def test_processors_that_are_killed_and_rebalanced_make_one_invoice_of_each_order(story: Story) -> None:
    times = Counter(invoice["order"] for invoice in story.invoices)
    assert {order: count for order, count in times.items() if count > 1} == {}
    assert times.keys() == set(range(ORDERS))
    assert sum(invoice["cents"] for invoice in story.invoices) == sum(story.cents)
    assert sum(invoice["vat"] for invoice in story.invoices) == sum(cents * 19 // 100 for cents in story.cents)
    assert story.ends["kill"] >= 3, story.ends
    assert all(count for name, count in story.written.items() if name.startswith("python")), story.written


def test_the_processor_in_go_took_part(story: Story) -> None:
    go_tools.have("process_orders")
    assert story.written["go-1"] + story.written["go-2"] > 0, story.written


# ------------------------------------------------------------------------------------- the reader, beside its successor


class NotingClient:
    """Sends as `client` does, and notes how often, and the errors."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.sent = 0
        self.errors: list[type[SendError]] = []

    async def send_atomic(self, key: str, events: Iterable[Event], offsets: Offsets | None = None) -> WrittenBatch:
        self.sent += 1
        try:
            return await self.client.send_atomic(key, events, offsets)
        except SendError as error:
            self.errors.append(type(error))
            raise


async def copy(reader: GroupReader, client: NotingClient, topic: str) -> None:
    """Write each record's value into a topic."""
    async with reader:
        async for batch in reader:
            await batch.send(client, [Event(topic, json.loads(record.value)) for record in batch.records])


async def test_a_member_that_is_told_an_offset_before_an_open_transaction_meets_its_key(
    stage: Stage, make_topic: MakeTopic
) -> None:
    """aiokafka cannot ask for stable offsets only (KIP-447): the key alone excludes a second result."""
    source, result = make_topic(1), make_topic(1)
    held = (Fault("commit", "hold"),)
    service = await stage.started(faults=held, request_timeout_ms=HELD_MS, transaction_timeout_ms=HELD_MS)
    producer = Producer({"bootstrap.servers": stage.kafka.bootstrap})
    for number in range(6):
        producer.produce(source, f"{number}")
    await asyncio.to_thread(producer.flush, 10)
    async with AsyncClient(service.url) as http, asyncio.TaskGroup() as tasks:

        def process(records_max: int) -> tuple[NotingClient, asyncio.Task[None]]:
            client = NotingClient(http)
            options: dict[str, Any] = {"records_max": records_max, "bootstrap_servers": stage.kafka.bootstrap}
            reader = GroupReader(source, f"group-of-{source}", finish_s=0.0, **options)
            return client, tasks.create_task(copy(reader, client, result))

        _, first = process(2)
        await asyncio.to_thread(until, lambda: plan_of(service).happened("commit"))
        first.cancel()
        client, second = process(4)
        await asyncio.to_thread(until, lambda: client.sent > 0)
        await asyncio.sleep(0.5)  # answered 409 in-progress, and sent again
        plan_of(service).let_go("commit")
        await asyncio.to_thread(until, lambda: KeyReused in client.errors)
        await asyncio.to_thread(until, lambda: len(read_committed(stage.kafka.bootstrap, [result])) >= 6)
        second.cancel()
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [result])
    assert sorted(record.value or b"" for record in records) == [b"%d" % number for number in range(6)]
    # What is read back for the ids ends a batch, so the second member's first batch has two records too.
    keys = Counter(record.idempotency_key for record in records)
    assert keys == {f"group-of-{source}/{source}/0/{first}": 2 for first in (0, 2, 4)}
