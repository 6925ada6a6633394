"""Tests a hanging transaction of an idle slot, which only the watch over LSOs finds."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from confluent_kafka.admin import (  # type: ignore[attr-defined] # its own documentation imports them from here
    AclOperation,
    ResourcePatternType,
    ResourceType,
)

from service.contract import SharedSettings
from service.contract.wire.names import ledger_topic, transactional_id
from service.core.metrics import Telemetry
from service.kafka.admin import KafkaAdmin
from service.kafka.hanging import ActiveProducer
from service.kafka.producer import TransactionalProducer
from service.kafka.security import Security
from tests.integration.client import Asked
from tests.integration.conftest import Stage
from tests.integration.hanging import HangingProducer
from tests.integration.judge import read_committed, wait_until_stable
from tests.secured import PASSWORD, SecuredKafka, acls_of_service, sockets_closed

# Until a look that finds the LSO where it was before the bound (12 s), and the recovery.
WATCHED_S = 30.0
IDS = [bytes([n]) * 16 for n in range(3)]


async def test_a_hanging_transaction_is_ended_without_any_write(stage: Stage, secured_kafka: SecuredKafka) -> None:
    """One of a slot that the process holds, and one of a slot that no process holds. Both are committed, by the ledger.

    The third hangs under a producer id that its slot no longer has. A partition knows a transaction by the producer id
    only, so that of another transactional id does as well. The broker does not verify transactions: it accepts records
    for partitions that the coordinator does not know of.
    """
    kafka, topic = secured_kafka, f"{stage.namespace}-events"
    kafka.create_topic(topic, partitions=3)
    service = await stage.started(
        kafka=kafka, slots=1, slots_max=3, transaction_timeout_ms=2_000, request_timeout_ms=2_000
    )
    assert (await stage.client.post(service.url, Asked("before", topic, b"1"))).status == 201
    cluster = KafkaAdmin(kafka.bootstrap, client_id="hanging_producer", request_timeout_ms=5_000, telemetry=Telemetry())
    names = [*(transactional_id(stage.namespace, n) for n in range(2)), f"former-of-{stage.namespace}"]
    for n, name in enumerate(names):
        ledger = ledger_topic(stage.namespace), n
        hanging_producer = HangingProducer(cluster, name, ledger)
        await hanging_producer.write(
            [((topic, n), IDS[n])], marked=[ledger], commit=True, accepted_at=time.time_ns() // 1_000_000
        )
    await cluster.close()

    await asyncio.to_thread(wait_until_stable, kafka.bootstrap, [topic], WATCHED_S)

    seen = events(service.log, "last stable offset stands still")
    assert {(line["partition"], line["of"], *line["slots"]) for line in seen} == {
        (0, "slot", 0),
        (1, "slot", 1),
        (2, "former", 2),
    }
    assert (await stage.client.post(service.url, Asked("after", topic, b"2"))).status == 201
    found = await asyncio.to_thread(read_committed, kafka.bootstrap, [topic])
    assert {record.value for record in found} == {b"1", *IDS, b"2"}


async def test_a_transaction_of_another_namespace_is_named_and_ends_no_term_of_a_slot(
    stage: Stage, secured_kafka: SecuredKafka
) -> None:
    """The slot of the other namespace has the same number, and its records the same header."""
    kafka, topic, others = secured_kafka, f"{stage.namespace}-events", f"others-of-{stage.namespace}"
    kafka.create_topic(topic)
    kafka.create_topic(ledger_topic(others))
    service = await stage.started(
        kafka=kafka, slots=1, slots_max=1, transaction_timeout_ms=2_000, request_timeout_ms=2_000
    )
    assert (await stage.client.post(service.url, Asked("before", topic, b"1"))).status == 201
    cluster = KafkaAdmin(kafka.bootstrap, client_id="hanging_producer", request_timeout_ms=5_000, telemetry=Telemetry())
    name, ledger = transactional_id(others, 0), (ledger_topic(others), 0)
    await HangingProducer(cluster, name, ledger).write([((topic, 0), IDS[0])], marked=[ledger], commit=True)

    async with asyncio.timeout(WATCHED_S):
        while not (seen := events(service.log, "last stable offset stands still")):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert [(line["partition"], line["of"], line["slots"], line["transactional_ids"]) for line in seen] == [
        (0, "other", [], [name])
    ]
    assert (await stage.client.post(service.url, Asked("after", topic, b"2"))).status == 201
    assert not events(service.log, "term ended")
    producer = TransactionalProducer(cluster, name, 5_000)
    await producer.start()
    await producer.hanging.end_own([(topic, 0)], commit=True)
    await producer.close()
    await cluster.close()


def events(log: Path, name: str) -> list[dict[str, Any]]:
    """Read the lines of a log with this name."""
    return [line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == name]


async def test_the_marker_of_a_former_producer_id_needs_alter_on_the_cluster(
    secured_kafka: SecuredKafka, namespace: str
) -> None:
    kafka, topic, user = secured_kafka, f"{namespace}-events", f"user-of-{namespace}"
    kafka.create_topic(topic)
    kafka.add_user(user, PASSWORD)
    kafka.allow(user, *acls_of_service(namespace, topic))
    settings = SharedSettings.from_env(kafka.environment(user))
    async with sockets_closed():
        cluster = KafkaAdmin(
            kafka.secured,
            client_id="user",
            request_timeout_ms=5_000,
            telemetry=Telemetry(),
            security=Security(settings),
        )
        producer = TransactionalProducer(cluster, transactional_id(namespace, 0), 5_000)
        await producer.start()
        await producer.hanging.client.set_topics([topic])
        former = ActiveProducer(producer.producer_id + 1_000_000, 0, 0)
        refused = await producer.hanging.end_former((topic, 0), former, commit=False)
        assert refused == "the service has no permission to Alter the cluster"
        literal, alter = ResourcePatternType.LITERAL, (AclOperation.ALTER,)
        kafka.allow(user, (ResourceType.BROKER, "kafka-cluster", literal, alter))
        async with asyncio.timeout(WATCHED_S):
            while await producer.hanging.end_former((topic, 0), former, commit=False):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await producer.close()
        await cluster.close()
