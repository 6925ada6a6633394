"""Tests rules of the protocol by leaving each out: the judge must find a violation, and none with the rule.

Each scenario is played with and without the rule, with a fixed order of events. Which process holds which slot is fixed
too, so that no other rule protects.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from deploy.stack import Redis
from tests.integration.client import Asked
from tests.integration.conftest import Stage, plan_of
from tests.integration.hanging import leave_hanging
from tests.integration.plan import Fault, stopped, until

Scenario = Callable[[Stage, str, tuple[str, ...]], Awaitable[None]]

KEY = "the key"
# No timeout may end a scenario's own order.
PATIENT: dict[str, Any] = {"request_timeout_ms": 15_000, "transaction_timeout_ms": 15_000}


async def a_transaction_fails(stage: Stage, topic: str, mutants: tuple[str, ...]) -> None:
    """aiokafka's producer, asked to abort after an error, only changes its own state: the next commit publishes all."""
    service = await stage.started(faults=(Fault("ledger", "Abortable"),), mutants=mutants, slots=1)
    await stage.client.settle([service.url], Asked(KEY, topic, b"1"))


async def a_process_is_left_with_an_old_store(stage: Stage, topic: str, mutants: tuple[str, ...]) -> None:
    """Two stores, with one process at each. Store recovery of the second fences the first one's slot."""
    left = stage.service(mutants=mutants, only_slots=(0,), slots=1)
    await stage.start(left)
    with Redis(stage.folder / "another redis") as another:
        moved = await stage.started(redis=another, only_slots=(1,), slots=1)
        asked = Asked(KEY, topic, b"1")
        await stage.client.settle([moved.url], asked)
        await stage.client.settle([left.url], asked)


async def a_process_dies_before_its_mark(stage: Stage, topic: str, mutants: tuple[str, ...]) -> None:
    """Only the ledger knows that the key was written."""
    doomed = stage.service(faults=(Fault("mark", "kill"),), only_slots=(0,), slots=1)
    heir = stage.service(mutants=mutants, only_slots=(0, 1), slots=1)
    await stage.start(doomed)
    await stage.start(heir)
    asked = Asked(KEY, topic, b"1")
    await stage.client.post(doomed.url, asked)
    assert doomed.wait(5) == -9
    await stage.client.settle([heir.url], asked)


async def a_writer_sleeps_through_a_flush(stage: Stage, topic: str, mutants: tuple[str, ...]) -> None:
    """The events of a paused process are sent, and not committed: the ledger does not have them during store recovery.

    The other process never takes the paused process's slot, so that only the fence of all slots can end its
    transaction.
    """
    sleeper = stage.service(faults=(Fault("ledger", "stop"),), only_slots=(0,), slots=1, **PATIENT)
    other = stage.service(mutants=mutants, only_slots=(1,), slots=1, **PATIENT)
    await stage.start(sleeper, other)
    asked = Asked(KEY, topic, b"1")
    sleeping = asyncio.create_task(stage.client.post(sleeper.url, asked))
    await asyncio.to_thread(until, lambda: plan_of(sleeper).happened("ledger") and stopped(sleeper.pid))
    stage.redis.flush()
    await stage.client.settle([other.url], asked)
    sleeper.resume()
    await sleeping


async def a_mark_fails_and_the_next_does_not(stage: Stage, topic: str, mutants: tuple[str, ...]) -> None:
    """Then the process is killed: the next holder must still find the record whose mark has failed."""
    doomed = stage.service(
        faults=(Fault("mark", "StoreAway"), Fault("commit.done", "kill", first=3)),
        mutants=mutants,
        only_slots=(0,),
        slots=1,
    )
    heir = stage.service(only_slots=(0, 1), slots=1)
    await stage.start(doomed)
    await stage.start(heir)
    asked = [Asked(key, topic, b"1") for key in (KEY, "the next", "the last")]
    for each in asked:
        await stage.client.post(doomed.url, each)
    assert doomed.wait(5) == -9
    for each in asked:
        await stage.client.settle([heir.url], each)


async def a_store_is_flushed_twice(stage: Stage, topic: str, mutants: tuple[str, ...]) -> None:
    """The second flush comes after the ledger was replayed, and before the store counts as complete."""
    service = await stage.started(faults=(Fault("store.end", "hold", first=2),), mutants=mutants, slots=1)
    asked = Asked(KEY, topic, b"1")
    await stage.client.settle([service.url], asked)
    stage.redis.flush()
    await asyncio.to_thread(until, lambda: plan_of(service).happened("store.end"))
    stage.redis.flush()
    plan_of(service).let_go("store.end")
    await stage.client.settle([service.url], asked)


async def an_aborted_transaction_hangs_in_the_ledger(stage: Stage, topic: str, mutants: tuple[str, ...]) -> None:
    """The marker of the next begin record would commit its ledger record, which names an event that nobody can read."""
    service = await stage.started(mutants=mutants, slots=1, slots_max=1)
    asked = Asked(KEY, topic, b"1")
    await leave_hanging(stage.kafka, stage.namespace, 0, asked, in_ledger=True, commit=False)
    await stage.client.settle([service.url], asked)


SCENARIOS: dict[str, Scenario] = {
    "producer_is_reused": a_transaction_fails,
    "control_is_not_checked": a_process_is_left_with_an_old_store,
    "ledger_is_not_replayed": a_process_dies_before_its_mark,
    "slots_are_not_fenced": a_writer_sleeps_through_a_flush,
    "marks_leave_gaps": a_mark_fails_and_the_next_does_not,
    "a_flush_ends_no_recovery": a_store_is_flushed_twice,
    "what_hangs_is_not_looked_for": an_aborted_transaction_hangs_in_the_ledger,
}
# The judge's finding, if it is not a duplicate.
FOUND = {"what_hangs_is_not_looked_for": f"{KEY} is lost"}


@pytest.mark.parametrize("mutant", SCENARIOS)
async def test_each_scenario_is_exactly_once_with_its_rule(own_stage: Stage, topic: str, mutant: str) -> None:
    await SCENARIOS[mutant](own_stage, topic, ())
    await own_stage.assert_exactly_once(topic)


@pytest.mark.parametrize("mutant", SCENARIOS)
async def test_the_judge_finds_a_violation_without_the_rule(own_stage: Stage, topic: str, mutant: str) -> None:
    await SCENARIOS[mutant](own_stage, topic, (mutant,))
    found = await asyncio.to_thread(own_stage.violations, topic)
    assert any(FOUND.get(mutant, f"{KEY} is there 2 times") in violation for violation in found), found
