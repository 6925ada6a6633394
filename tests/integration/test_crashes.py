"""Tests processes that are killed or paused at each point of a write: every event is there exactly once."""

import asyncio
import time

from tests.integration.client import Asked, events
from tests.integration.conftest import Stage, plan_of
from tests.integration.judge import read_committed, wait_until_stable
from tests.integration.plan import Fault, stopped, until

# The points between a claim and its answer, in order.
DEATHS = ("claim.done", "write", "ledger", "commit", "commit.done", "mark.done")
COMMITTED = ("commit.done", "mark.done")


async def test_killed_anywhere_and_finished_by_another(stage: Stage, topic: str) -> None:
    """Processes are killed at each point in turn; their event is there once, and a committed one is replayed."""
    other = await stage.started(slots=1)
    for place in DEATHS:
        doomed = await stage.started(faults=(Fault(place, "kill"),), slots=1)
        asked = Asked(f"killed at {place}", topic, b'{"n": 1}')
        assert (await stage.client.post(doomed.url, asked)).kind == "info"
        assert doomed.wait(5) == -9
        again = await stage.client.settle([other.url], asked)
        assert again.replayed is (place in COMMITTED), place
    await stage.assert_exactly_once(topic)


async def test_a_zombie_that_wakes_up_cannot_write(stage: Stage, topic: str) -> None:
    """A process is paused with a group in flight, past its lease; another takes its slot and writes the key."""
    zombie = stage.service(faults=(Fault("commit", "stop"),), slots=1)
    other = stage.service(slots=1)
    await stage.start(zombie, other)
    asked = Asked("the key", topic, b'"v"')

    sleeping = asyncio.create_task(stage.client.post(zombie.url, asked))
    await asyncio.to_thread(until, lambda: plan_of(zombie).happened("commit") and stopped(zombie.pid))
    assert (await stage.client.settle([other.url], asked)).kind == "ok"
    zombie.resume()
    woken = await sleeping

    assert woken.kind in ("ok", "info"), woken  # it finds the other's event, or its deadline has passed
    await stage.assert_exactly_once(topic)
    await asyncio.to_thread(zombie.wait_ready)
    await stage.client.load([zombie.url], events(topic, 20, "later"))
    await stage.assert_exactly_once(topic)


async def test_slots_of_the_dead_are_taken_over_within_two_lease_times(stage: Stage, topic: str) -> None:
    """Without any request, because an open transaction blocks every reader."""
    dead = stage.service(faults=(Fault("commit", "kill"),), transaction_timeout_ms=60_000)
    heir = stage.service(slots=1)
    await stage.start(dead, heir)
    await stage.client.post(dead.url, Asked("the key", topic, b"1"))
    assert dead.wait(5) == -9

    started = time.monotonic()
    await asyncio.to_thread(until, lambda: stage.holders() == {heir.name}, 5)
    await asyncio.to_thread(wait_until_stable, stage.kafka.bootstrap, [topic])
    took_s = time.monotonic() - started

    assert took_s < 2 * 1.0 + 2.0, took_s  # two leases of a second, and the recovery on a busy machine
    await stage.assert_exactly_once(topic)


async def test_kill_and_restart_under_load(stage: Stage, topic: str) -> None:
    services = [stage.service(), stage.service()]
    await stage.start(*services)
    asked = events(topic, 300)
    load = asyncio.create_task(stage.client.load([service.url for service in services], asked, workers=10))
    for service in services:
        await asyncio.sleep(0.3)
        service.kill()
        await stage.start(service)
    await load
    await stage.ask_again([service.url for service in services], asked)
    await stage.assert_exactly_once(topic)


async def test_a_paused_broker_leaves_unsent_events_503_and_sent_ones_504(stage: Stage, topic: str) -> None:
    """503 for what was not sent, 504 for what may be there; then each is there once."""
    faults = (Fault("commit", "hold", first=11),)
    service = await stage.started(faults=faults, request_timeout_ms=2_000, transaction_timeout_ms=2_000)
    asked = events(topic, 30)
    for each in asked[:10]:
        await stage.client.settle([service.url], each)
    committing = asyncio.create_task(stage.client.post(service.url, asked[10]))
    await asyncio.to_thread(until, lambda: plan_of(service).happened("commit"))
    stage.kafka.pause()
    try:
        plan_of(service).let_go("commit")
        attempts = await asyncio.gather(committing, *(stage.client.post(service.url, each) for each in asked[11:]))
    finally:
        stage.kafka.resume()
    assert attempts[0].status == 504
    assert {attempt.status for attempt in attempts[1:]} <= {503, 504}
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    there = {record.idempotency_key for record in records}
    assert len(there) >= 10
    assert there.isdisjoint(attempt.asked.key for attempt in attempts if attempt.status == 503)
    await stage.client.load([service.url], asked)
    await stage.assert_exactly_once(topic)
