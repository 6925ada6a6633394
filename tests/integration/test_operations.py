"""Tests operations: a stop under load, too many connections, wrong settings; and events that a broker refuses."""

import asyncio
import contextlib
import json
import re
import time

import httpx
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its own documentation imports them from here
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from deploy.stack import Kafka, Redis, Service, StackError
from service.contract.wire.ids import event_id
from service.contract.wire.names import ledger_topic
from service.pipeline.load_shedding import ANSWERS_EACH, ANSWERS_MAX
from tests.conftest import MakeTopic
from tests.integration.client import Asked, Attempt, events
from tests.integration.conftest import Stage, plan_of
from tests.integration.judge import read_committed
from tests.integration.plan import Fault, until

FILES = 300


async def test_more_connections_than_a_process_has_files_for_are_refused_and_the_others_are_served(
    stage: Stage, topic: str
) -> None:
    """Also if they come faster than they can be refused, until no file is left (EMFILE)."""
    service = stage.service()
    service.argv_prefix = ["prlimit", f"--nofile={FILES}:{FILES}"]
    await stage.start(service)
    first, second, *_ = events(topic, 2)
    assert (await stage.client.post(service.url, first)).status == 201
    service.pause()  # all connections wait in its backlog
    opened = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(3 * FILES)]
    service.resume()
    async with asyncio.timeout(30):
        heard = await asyncio.gather(*(_first_line(reader) for reader, _ in opened[FILES // 2 :]))
    assert set(heard) <= {b"HTTP/1.1 503 Service Unavailable\r\n", b""}
    assert b"HTTP/1.1 503 Service Unavailable\r\n" in heard

    assert (await stage.client.post(service.url, second)).status == 201  # on its open connection
    for _, writer in opened:
        writer.close()
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient(trust_env=False) as newcomer:
                    if (await newcomer.get(f"{service.url}/readyz")).status_code == 200:
                        break
    assert service.running
    await stage.assert_exactly_once(topic)


async def _first_line(reader: asyncio.StreamReader) -> bytes:
    """Read the server's first line on a new connection; "" if the server ends or resets it."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""


async def test_a_graceful_stop_under_load_leaves_no_request_in_doubt(stage: Stage, topic: str) -> None:
    """No 504, and no connection is cut after its request was accepted; the leases are given back at once."""
    leaving, staying = stage.service(), stage.service()
    await stage.start(leaving, staying)
    client = stage.client
    waiting = list(reversed(events(topic, 4_000)))
    attempts: list[Attempt] = []

    async def send_until_it_is_gone() -> None:
        while waiting:
            attempts.append(await client.post(leaving.url, waiting.pop()))
            if attempts[-1].kind != "ok":
                return

    senders = [asyncio.create_task(send_until_it_is_gone()) for _ in range(10)]
    await asyncio.to_thread(until, lambda: len(attempts) >= 100)
    await asyncio.to_thread(leaving.stop)
    await asyncio.gather(*senders)

    assert leaving.exit_code == 0
    assert waiting, "the load was over before the stop"
    assert len(attempts) >= 100
    assert {answer.status for answer in attempts} <= {0, 201, 503}
    for answer in attempts:
        if answer.status == 0:
            # An idle connection was closed while the request was sent: the judge counts the event as not written.
            answer.kind = "fail"
    with stage.redis.client() as store:
        holders = {(store.get(f"{{{stage.namespace}:0}}l{slot}") or b"").split(b"/")[0] for slot in range(4)}
    assert b"service-0" not in holders
    assert stage.dead_slots() == []
    await stage.assert_exactly_once(topic)


async def in_one_group(stage: Stage, service: Service, first: Asked, asked: list[Asked]) -> list[Attempt]:
    """Post events that share one transaction: they wait while the first one's is held."""
    held = asyncio.create_task(stage.client.post(service.url, first))
    await asyncio.to_thread(until, lambda: plan_of(service).happened("write"))
    posts = [asyncio.create_task(stage.client.post(service.url, each)) for each in asked]

    async def queued() -> float:
        metrics = (await stage.client.http.get(f"{service.url}/metrics")).text
        return float(re.findall(r"^fencepost_queue_events (.*)$", metrics, re.MULTILINE)[0])

    deadline = time.monotonic() + 4
    while await queued() < len(asked) + 1:
        assert time.monotonic() < deadline
    plan_of(service).let_go("write")
    assert (await held).kind == "ok"
    return [await post for post in posts]


async def test_a_poisoned_event_is_answered_413_and_its_group_is_written(stage: Stage, make_topic: MakeTopic) -> None:
    """Its topic accepts less than the service's cached limit. The others are written, also those of its group."""
    good, poisoned = make_topic(2), make_topic(1)
    service = await stage.started(slots=1, faults=(Fault("write", "hold", first=2),))
    await stage.client.settle([service.url], Asked("before", poisoned, b"1"))
    await asyncio.to_thread(alter, stage.kafka, poisoned, "max.message.bytes", "1000")
    bad, same_topic = Asked("poison", poisoned, b'"%s"' % (b"x" * 3000)), Asked("harmless", poisoned, b"1")
    first, *asked = events(good, 21)
    answers = await in_one_group(stage, service, first, [bad, same_topic, *asked])
    assert (answers[0].status, answers[0].code) == (413, "too-large")
    assert {answer.status for answer in answers[1:]} == {201}
    after = await stage.client.settle([service.url], Asked("poison", poisoned, b'"small"'))
    assert not after.replayed
    await stage.assert_exactly_once(good, poisoned)


async def test_a_full_queue_answers_503_at_once(stage: Stage, topic: str) -> None:
    """Without parsing the request, which would take time from the queued requests."""
    service = await stage.started(slots=1, queue_events_max=1, faults=(Fault("write", "hold"),))
    url, headers = f"{service.url}/events", {"Content-Type": "application/json"}
    held = asyncio.create_task(stage.client.post(service.url, Asked("held", topic, b"1")))
    await asyncio.to_thread(until, lambda: plan_of(service).happened("write"))
    for body in (b'{"topic": "%b", "value": 1}' % topic.encode(), b"no JSON"):
        refused = await stage.client.http.post(url, content=body, headers=headers | {"Idempotency-Key": "more"})
        assert (refused.status_code, refused.json()["code"]) == (503, "not-written")
        assert refused.headers["retry-after"] == "1"
    plan_of(service).let_go("write")
    assert (await held).kind == "ok"
    again = await stage.client.http.post(url, content=b"no JSON", headers=headers | {"Idempotency-Key": "more"})
    assert again.status_code == 400


async def test_requests_beyond_the_queue_s_bound_are_refused_and_the_others_written(stage: Stage, topic: str) -> None:
    """More than are refused at once: the last refusals come in turn, or after the longest delay."""
    # The first event is held until all refusals are sent, however slow the machine is.
    service = await stage.started(
        slots=1, queue_events_max=1, request_timeout_ms=120_000, faults=(Fault("write", "hold"),)
    )
    first, *more = events(topic, 1 + ANSWERS_MAX // ANSWERS_EACH + 20)
    held = asyncio.create_task(stage.client.post(service.url, first))
    await asyncio.to_thread(until, lambda: plan_of(service).happened("write"))
    refused = await asyncio.gather(*(stage.client.post(service.url, asked) for asked in more))
    assert {answer.status for answer in refused} == {503}
    plan_of(service).let_go("write")
    assert (await held).kind == "ok"
    assert (await stage.client.settle([service.url], more[-1])).kind == "ok"
    await stage.assert_exactly_once(topic)


async def test_a_topic_that_is_deleted_meanwhile_is_answered_alone(stage: Stage, make_topic: MakeTopic) -> None:
    good, doomed = make_topic(2), make_topic(1)
    service = await stage.started(slots=1, faults=(Fault("write", "hold", first=2),))
    await stage.client.settle([service.url], Asked("before", doomed, b"1"))
    await asyncio.to_thread(delete, stage.kafka, doomed)
    stage.client.history.clear()
    first, *asked = events(good, 21)
    answers = await in_one_group(stage, service, first, [Asked("late", doomed, b"1"), *asked])
    assert (answers[0].status, answers[0].code) == (404, "unknown-topic")
    assert {answer.status for answer in answers[1:]} == {201}
    assert await asyncio.to_thread(stage.violations, good) == []


async def test_partitions_that_are_added_may_be_written_to_at_once(stage: Stage, topic: str) -> None:
    service = await stage.started()
    await stage.client.settle([service.url], Asked("before", topic, b"1"))
    refused = await stage.client.post(service.url, Asked("too early", topic, b"1", partition=40))
    assert (refused.status, refused.code) == (400, "invalid-event")
    await asyncio.to_thread(grow, stage.kafka, topic, 41)
    for partition in (40, 39):
        written = await stage.client.post(service.url, Asked(f"in {partition}", topic, b"1", partition=partition))
        assert written.place == (topic, partition, 0)


async def test_a_ledger_that_a_newer_release_has_written_ends_the_start_with_a_line(stage: Stage, topic: str) -> None:
    """Without the rows of its records, their events would be written a second time."""
    first = await stage.started(slots=1, slots_max=1)
    assert (await stage.client.post(first.url, Asked("k", topic, b"1"))).status == 201
    first.stop()
    offsets: list[int | None] = []
    newer = Producer({"bootstrap.servers": stage.kafka.bootstrap})
    newer.produce(
        ledger_topic(stage.namespace),
        b'{"v":3,"slot":0}',
        partition=0,
        on_delivery=lambda _, message: offsets.append(message.offset()),
    )
    newer.flush(30)
    older = stage.service(slots=1, slots_max=1)
    with pytest.raises(StackError):
        await stage.start(older)
    assert older.exit_code == 2
    text = older.log.read_text()
    assert [line for line in text.splitlines() if line.startswith("the ledger")] == [
        f"the ledger of slot 0 has, at offset {offsets[0]}, a record of version 3, which a newer release has written: "
        "this one reads version 2 at most; run the newer release"
    ]
    assert "Traceback" not in text


async def test_wrong_settings_end_the_start_with_a_line_each(stage: Stage) -> None:
    service = stage.service(slots="many", port="0", namespace="a b")
    service.env["FENCEPOST_REDIS"] = "http://127.0.0.1"
    with pytest.raises(StackError):
        await stage.start(service)
    assert service.exit_code == 2
    lines = service.log.read_text().splitlines()
    named = [match[0] for line in lines if (match := re.match(r"FENCEPOST_[A-Z_]+", line))]
    assert sorted(named) == ["FENCEPOST_NAMESPACE", "FENCEPOST_PORT", "FENCEPOST_REDIS", "FENCEPOST_SLOTS"]
    assert len(lines) == 4


async def refusal(stage: Stage, service: Service) -> list[str]:
    """Return the errors about settings with which a process ends with status 2."""
    with pytest.raises(StackError):
        await stage.start(service)
    assert service.exit_code == 2
    text = service.log.read_text()
    assert "Traceback" not in text
    return [line for line in text.splitlines() if line.startswith("FENCEPOST_")]


@pytest.mark.parametrize(
    ("arguments", "found", "change"),
    [
        ("--maxmemory-policy allkeys-lru", "maxmemory-policy allkeys-lru", "set maxmemory-policy noeviction: "),
        ("--replicaof 127.0.0.1 1", "role slave", "let FENCEPOST_REDIS lead to the primary "),
    ],
    ids=["evicting", "replica"],
)
async def test_a_redis_that_will_not_do_is_refused(stage: Stage, arguments: str, found: str, change: str) -> None:
    with Redis(stage.folder / "unfit", args=arguments.split()) as unfit:
        (line,) = await refusal(stage, stage.service(redis=unfit))
        assert line.startswith(f"FENCEPOST_REDIS names a server that will not do ({found}): {change}")


async def test_a_database_that_redis_does_not_have_is_refused(stage: Stage) -> None:
    service = stage.service()
    service.env["FENCEPOST_REDIS"] = f"redis://127.0.0.1:{stage.redis.port}/99"
    assert await refusal(stage, service) == ["FENCEPOST_REDIS names a database that this server does not have: set /0"]


async def test_a_client_that_disconnects_leaves_its_key_usable(stage: Stage, topic: str) -> None:
    service = await stage.started()
    body = Asked("gone", topic, b"1").body()
    head = f"POST /events HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    head += "Idempotency-Key: gone\r\n\r\n"
    stage.client.history.append(Attempt(Asked("gone", topic, b"1")))
    for sent in (head.encode() + body[:5], head.encode() + body):
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(sent)
        await writer.drain()
        writer.close()
    await stage.client.settle([service.url], Asked("gone", topic, b"1"))
    await stage.client.load([service.url], events(topic, 10))
    await stage.assert_exactly_once(topic)


def alter(kafka: Kafka, topic: str, setting: str, value: str) -> None:
    """Change one setting of a topic."""
    entry = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = kafka.admin()
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(10)


def grow(kafka: Kafka, topic: str, partitions: int) -> None:
    admin = kafka.admin()
    for future in admin.create_partitions([NewPartitions(topic, partitions)]).values():
        future.result(10)
    until(lambda: len(admin.list_topics(topic, timeout=10).topics[topic].partitions) == partitions)


def delete(kafka: Kafka, topic: str) -> None:
    admin = kafka.admin()
    for future in admin.delete_topics([topic], operation_timeout=10).values():
        future.result(10)
    until(lambda: topic not in admin.list_topics(timeout=10).topics)


async def test_own_topics_that_take_less_than_they_did(stage: Stage, topic: str) -> None:
    """Bounds on timestamps before the first start; then smaller records in ledger and journal, and a short retention.

    The records of control must have valid timestamps, and groups and flushes must become smaller.
    """
    admin, ns = stage.kafka.admin(), stage.namespace
    bounds = {"cleanup.policy": "compact", "message.timestamp.before.max.ms": "3600000"}
    made = NewTopic(f"{ns}.control", num_partitions=1, replication_factor=1, config=bounds)
    for future in admin.create_topics([made]).values():
        future.result(10)
    service = await stage.started()
    for own, most in (("ledger", "20000"), ("requests", "3000")):
        await asyncio.to_thread(alter, stage.kafka, f"{ns}.{own}", "max.message.bytes", most)
    await asyncio.to_thread(alter, stage.kafka, f"{ns}.ledger", "retention.ms", "3600000")
    batch = {"events": [{"topic": topic, "value": n, "idempotency_key": f"k{n}"} for n in range(2_000)]}
    answer = await stage.client.http.post(f"{service.url}/events/batch", json=batch)
    assert {result["status"] for result in answer.json()["results"]} == {201}

    def journaled() -> set[str]:
        records = read_committed(stage.kafka.bootstrap, [f"{ns}.requests"])
        answers = [answer for record in records for answer in json.loads(record.value or b"")["answers"]]
        return {answer["id"] for answer in answers if answer["status"] == 201}

    ids = {event_id(f"k{n}").hex() for n in range(2_000)}
    await asyncio.to_thread(until, lambda: journaled() >= ids)
    metrics = (await stage.client.http.get(f"{service.url}/metrics")).text
    assert "fencepost_journal_dropped_total 0.0" in metrics
    seen = f'fencepost_own_topic_message_bytes{{topic="{ns}.ledger"}} 20000.0'
    await asyncio.to_thread(until, lambda: seen in httpx.get(f"{service.url}/metrics").text)
    named = "retention.ms=3600000: set retention.ms="
    await asyncio.to_thread(until, lambda: named in service.log.read_text())
    assert "fencepost_own_topic_faults 1.0" in (await stage.client.http.get(f"{service.url}/metrics")).text
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    assert sorted(int(record.value or b"-1") for record in records) == list(range(2_000))
