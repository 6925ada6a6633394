"""Tests a Redis that loses data, restarts or refuses: requests are interrupted, no event is lost or duplicated."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from service.contract.wire.names import internal_topics
from tests.integration.client import Asked, events
from tests.integration.conftest import Stage, plan_of
from tests.integration.plan import Fault, until


async def test_redis_flushed_under_load_loses_and_repeats_nothing(own_stage: Stage, topic: str) -> None:
    stage = own_stage
    services = [stage.service(), stage.service()]
    await stage.start(*services)
    urls = [service.url for service in services]
    asked = events(topic, 300)
    load = asyncio.create_task(stage.client.load(urls, asked))
    for _ in range(2):
        await asyncio.to_thread(until, has_settled(stage, len(stage.client.history) + 60))
        await asyncio.to_thread(stage.redis.flush)
    await load
    await stage.ask_again(urls, asked)
    await stage.assert_exactly_once(topic)


async def test_a_flush_is_repaired_by_the_first_readiness_probe(own_stage: Stage, topic: str) -> None:
    """Noticed by a readiness probe: no event is written, and the next heartbeat is 20 s away."""
    stage = own_stage
    service = await stage.started(lease_ttl_ms=60_000)
    known = events(topic, 10)
    await stage.client.load([service.url], known)
    stage.redis.flush()
    assert not service.ready()
    await asyncio.to_thread(service.wait_ready, 15.0)
    await stage.ask_again([service.url], known)
    await stage.assert_exactly_once(topic)


async def test_a_full_store_answers_known_keys_and_keeps_the_leases(own_stage: Stage, topic: str) -> None:
    """New events are refused; a heartbeat needs no further memory, so that all processes keep their slots."""
    stage = own_stage
    services = [
        stage.service(lease_ttl_ms=500, request_timeout_ms=1_000, transaction_timeout_ms=1_000) for _ in range(2)
    ]
    await stage.start(*services)
    urls = [service.url for service in services]
    known = events(topic, 10)
    await stage.client.load(urls, known)
    before = stage.leases()

    with stage.redis.client() as store:
        store.config_set("maxmemory", 1)
        for _ in range(2):
            for url in urls:
                answers = [await stage.client.post(url, asked) for asked in known]
                assert {(answer.status, answer.replayed) for answer in answers} == {(201, True)}
                refused = await stage.client.post(url, Asked("new", topic, b"1"))
                assert (refused.status, refused.code) == (503, "not-written")
            await asyncio.sleep(1.0)  # two leases
        assert stage.leases() == before
        store.config_set("maxmemory", 0)
    await stage.client.settle(urls, Asked("new", topic, b"1"))
    await stage.assert_exactly_once(topic)


async def test_a_flush_during_the_recovery_from_a_flush_is_recovered(own_stage: Stage, topic: str) -> None:
    """The second flush comes after the replay: without the nonce, an empty store would count as complete."""
    stage = own_stage
    service = await stage.started(faults=(Fault("store.end", "hold", first=2),))
    asked = events(topic, 20)
    await stage.client.load([service.url], asked)

    stage.redis.flush()
    await asyncio.to_thread(until, lambda: plan_of(service).happened("store.end"))
    stage.redis.flush()
    plan_of(service).let_go("store.end")

    await stage.ask_again([service.url], asked)
    await stage.assert_exactly_once(topic)


async def test_killed_in_the_middle_of_a_store_recovery(own_stage: Stage, topic: str) -> None:
    """Another process recovers the store, once the nonce of the killed one has expired."""
    stage = own_stage
    doomed = stage.service(faults=(Fault("store.replay", "kill", first=2),))
    other = stage.service(faults=(Fault("store.recover", "hold", first=1),), only_slots=(0, 1))
    await stage.start(doomed)
    asked = events(topic, 20)
    await stage.client.load([doomed.url], asked)
    stage.redis.flush()
    await stage.start(other, wait_ready=False)
    assert await asyncio.to_thread(doomed.wait, 15) == -9
    plan_of(other).let_go("store.recover")
    await asyncio.to_thread(other.wait_ready)
    await stage.ask_again([other.url], asked)
    await stage.assert_exactly_once(topic)


@pytest.mark.parametrize("how", ["SWAPDB", "DEBUG RELOAD NOSAVE"])
async def test_an_older_copy_of_the_store_in_the_same_server_run_is_recovered(
    own_stage: Stage, topic: str, how: str
) -> None:
    """Server and generation are the same. Each process has seen more than the copy holds; the ledger has the rest."""
    stage = own_stage
    with stage.redis.client() as store:
        if int(store.info("server")["redis_version"].split(".")[0]) >= 7:  # before, DEBUG is always allowed
            stage.redis.stop()
            stage.redis.args += ["--enable-debug-command", "yes"]
            stage.redis.start()
    services = [stage.service(), stage.service()]
    await stage.start(*services)
    urls = [service.url for service in services]
    await stage.client.load(urls, events(topic, 20, "before"))
    with stage.redis.client() as store:
        if how == "SWAPDB":
            for key in store.scan_iter():
                store.copy(key, key, destination_db=1)
        else:
            store.save()
        asked = events(topic, 50)
        written = await stage.client.load(urls, asked)
        await asyncio.sleep(0.5)  # a heartbeat: both processes have seen all claims
        if how == "SWAPDB":
            store.swapdb(0, 1)
        else:
            store.execute_command("DEBUG", "RELOAD", "NOSAVE")
    again = await stage.client.load(urls, asked, workers=1)
    assert {attempt.replayed for attempt in again} == {True}
    assert {attempt.body for attempt in again} == {attempt.body for attempt in written}
    await stage.assert_exactly_once(topic)


async def test_keys_that_redis_evicts_are_a_lost_store(own_stage: Stage, topic: str) -> None:
    """The policy was changed while Redis runs, and memory is short: no process is ready until it is set back."""
    stage = own_stage
    service = await stage.started()
    asked = events(topic, 400)
    written = await stage.client.load([service.url], asked)
    with stage.redis.client() as store:
        store.config_set("maxmemory-policy", "volatile-lru")
        store.config_set("maxmemory", int(store.info("memory")["used_memory"]) - 50_000)
        await asyncio.to_thread(until, lambda: int(store.info("stats")["evicted_keys"]) > 50)
        await asyncio.to_thread(until, lambda: "store lost" in service.log.read_text())
        readiness = (await stage.client.http.get(f"{service.url}/readyz")).json()
        assert (readiness["ready"], "set maxmemory-policy noeviction" in readiness["redis"]) == (False, True)
        refused = await stage.client.post(service.url, asked[0])
        assert (refused.status, refused.code) == (503, "not-written")
        store.config_set("maxmemory-policy", "noeviction")
        store.config_set("maxmemory", 0)
    again = await stage.client.load([service.url], asked)
    assert {attempt.replayed for attempt in again} == {True}
    assert {attempt.body for attempt in again} == {attempt.body for attempt in written}
    await stage.assert_exactly_once(topic)


async def test_redis_restarted_empty_under_load_loses_and_repeats_nothing(own_stage: Stage, topic: str) -> None:
    stage = own_stage
    services = [stage.service(), stage.service()]
    await stage.start(*services)
    urls = [service.url for service in services]
    asked = events(topic, 200)
    load = asyncio.create_task(stage.client.load(urls, asked))
    await asyncio.to_thread(until, has_settled(stage, 60))
    await asyncio.to_thread(restart, stage)
    await load
    await stage.ask_again(urls, asked)
    await stage.assert_exactly_once(topic)


async def test_a_service_without_a_store_answers_503_and_writes_nothing(own_stage: Stage, topic: str) -> None:
    stage = own_stage
    service = await stage.started(request_timeout_ms=1500)
    stage.redis.kill()
    answers = await asyncio.gather(*(stage.client.post(service.url, asked) for asked in events(topic, 3)))
    assert {(answer.status, answer.code) for answer in answers} == {(503, "not-written")}
    assert not await asyncio.to_thread(service.ready)
    assert (await stage.client.http.get(f"{service.url}/livez")).status_code == 200
    assert (await stage.client.http.get(f"{service.url}/events/k-0")).status_code == 503
    await stage.assert_exactly_once(topic)  # nothing is there


async def test_marks_that_fail_while_commits_succeed(stage: Stage, topic: str) -> None:
    """The events are committed, so they are answered; `applied` does not move, so that a recovery finds them."""
    doomed = stage.service(faults=(Fault("mark", "StoreAway", times=1_000_000),), slots=1, only_slots=(0,))
    await stage.start(doomed)
    asked = events(topic, 5)
    for each in asked:
        answer = await stage.client.post(doomed.url, each)
        assert (answer.status, answer.replayed) == (201, False)
    doomed.kill()
    other = await stage.started(slots=1)
    await stage.ask_again([other.url], asked)
    await stage.assert_exactly_once(topic)


async def test_a_mark_that_failed_is_made_up_for(stage: Stage, topic: str) -> None:
    service = await stage.started(faults=(Fault("mark", "StoreAway", times=2),), slots=1)
    asked = Asked("the key", topic, b"1")
    first = await stage.client.post(service.url, asked)
    assert first.status == 201

    async def state_of_key() -> str:
        return str((await stage.client.http.get(f"{service.url}/events/the key")).json().get("state"))

    deadline = time.monotonic() + 10
    while await state_of_key() != "committed":
        assert time.monotonic() < deadline
    again = await stage.client.post(service.url, asked)
    assert (again.body, again.replayed) == (first.body, True)
    await stage.assert_exactly_once(topic)


async def test_a_request_whose_claim_reply_is_lost_is_written_once(stage: Stage, topic: str) -> None:
    """The claim is in Redis and no process knows: the term ends, and the request is queued again."""
    service = await stage.started(faults=(Fault("claim.done", "StoreUnanswered"),), slots=1)
    answer = await stage.client.post(service.url, Asked("the key", topic, b"1"))
    assert (answer.status, answer.replayed) == (201, False)
    await stage.assert_exactly_once(topic)


def has_settled(stage: Stage, attempts: int) -> Callable[[], bool]:
    return lambda: len(stage.client.history) >= attempts


def restart(stage: Stage) -> None:
    stage.redis.kill()
    stage.redis.start()


async def test_a_redis_that_served_another_kafka_is_not_adopted(own_stage: Stage, topic: str) -> None:
    """Kafka was recreated, and Redis was kept. Its data are about records that do not exist, until they are deleted."""
    stage = own_stage
    service = await stage.started()
    asked = events(topic, 5)
    await stage.client.load([service.url], asked)
    await asyncio.to_thread(service.stop)

    admin = AdminClient({"bootstrap.servers": stage.kafka.bootstrap, "log_level": 0})
    mine = [topic, *internal_topics(stage.namespace)]
    for future in admin.delete_topics([name for name in mine if name in admin.list_topics(timeout=10).topics]).values():
        await asyncio.to_thread(future.result, 10)
    await asyncio.to_thread(until, lambda: not admin.list_topics(timeout=10).topics.keys() & set(mine))
    stage.kafka.create_topic(topic, partitions=3)
    stage.client.history.clear()

    service = await stage.started(wait_ready=False)
    readiness: dict[str, Any] = {}

    async def store_status() -> str:
        with contextlib.suppress(httpx.HTTPError):
            readiness.update((await stage.client.http.get(f"{service.url}/readyz")).json())
        return str(readiness.get("store", ""))

    async with asyncio.timeout(20):
        while not (await store_status()).startswith("stale-store: Redis has keys of generation"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert (await stage.client.post(service.url, asked[0])).status == 503
    prefix = f"{{{stage.namespace}:0}}"
    assert prefix in readiness["store"]
    assert (readiness["ready"], readiness["redis"], readiness["kafka"]) == (False, "ok", "ok")  # both answer
    await asyncio.to_thread(service.stop)
    with stage.redis.client() as store:
        store.delete(*store.scan_iter(f"{prefix}*"))
    service = await stage.started()
    answers = await stage.client.load([service.url], asked)
    assert {(answer.status, answer.replayed) for answer in answers} == {(201, False)}
    await stage.assert_exactly_once(topic)


async def test_a_recreated_ledger_is_not_read_from_where_the_old_one_ended(stage: Stage, topic: str) -> None:
    """With a Redis that was kept: records without a mark below the old offset would never be found.

    Recoveries that fail append nothing, or the ledger would soon be past the old offset.
    """
    service = await stage.started(slots=1, slots_max=1)
    for event in events(topic, 3):  # one transaction each
        await stage.client.settle([service.url], event)
    await asyncio.to_thread(service.stop)
    ledger = internal_topics(stage.namespace)[0]
    admin = stage.kafka.admin()
    for future in admin.delete_topics([ledger]).values():
        await asyncio.to_thread(future.result, 10)
    await asyncio.to_thread(until, lambda: ledger not in admin.list_topics(timeout=10).topics)

    service = await stage.started(slots=1, slots_max=1, wait_ready=False)  # creates the ledger again
    refusal = f"{ledger}, partition 0: Redis has applied it up to"
    await asyncio.to_thread(until, lambda: refusal in service.log.read_text())
    assert (await stage.client.post(service.url, Asked("early", topic, b"1"))).status == 503
    consumer = Consumer({"bootstrap.servers": stage.kafka.bootstrap, "group.id": "ends"})
    assert consumer.get_watermark_offsets(TopicPartition(ledger, 0), timeout=10) == (0, 0)
    consumer.close()
    await asyncio.to_thread(service.kill)
    with stage.redis.client() as store:
        store.delete(*store.scan_iter(f"{{{stage.namespace}:0}}*"))
    service = await stage.started(slots=1, slots_max=1)
    await stage.client.settle([service.url], Asked("early", topic, b"1"))
    assert stage.violations(topic) == []
