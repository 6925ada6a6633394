"""Tests transactions without markers with running processes: store recovery and a slot's next write end them."""

import asyncio

import pytest

from tests.integration.client import Asked
from tests.integration.conftest import Stage
from tests.integration.hanging import leave_hanging
from tests.integration.judge import read_committed, wait_until_stable

HANGS_S = 0.5
HEALED_S = 5.0


@pytest.mark.parametrize("commit", [True, False])
async def test_store_recovery_ends_a_transaction_that_hangs_in_the_ledger(
    own_stage: Stage, topic: str, commit: bool
) -> None:
    """In a slot that no process holds, so that only store recovery ends it; no replay gets past an open transaction.

    If it is committed, its key is known from the ledger and answered with its coordinates; if it is aborted, it is
    written now.
    """
    stage = own_stage
    service = await stage.started(slots=1, slots_max=2)
    await stage.client.settle([service.url], Asked("before", topic, b"1"))
    asked = Asked("the key", topic, b"2")
    place = await leave_hanging(stage.kafka, stage.namespace, 1, asked, in_ledger=True, commit=commit)
    stage.redis.flush()
    again = await stage.client.settle([service.url], asked, HEALED_S)
    assert (again.place == place, again.replayed) == (commit, commit)
    found = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    keys = [record.idempotency_key for record in found]
    assert sorted(str(key) for key in keys) == sorted(["None" if commit else "the key", "before"])


async def test_the_next_write_of_a_slot_ends_a_transaction_that_hangs_in_its_data(own_stage: Stage, topic: str) -> None:
    """An acknowledged event of another slot is behind it, and becomes readable."""
    stage = own_stage
    idle = stage.service(only_slots=(0,), slots=1)
    other = stage.service(only_slots=(1,), slots=1)
    await stage.start(idle, other)
    asked = Asked("the key", topic, b"1")
    place = await leave_hanging(stage.kafka, stage.namespace, 0, asked, in_ledger=False, commit=True)
    behind = await stage.client.settle([other.url], Asked("behind", topic, b"2", partition=0))
    with pytest.raises(AssertionError):
        await asyncio.to_thread(wait_until_stable, stage.kafka.bootstrap, [topic], HANGS_S)

    await stage.client.settle([idle.url], Asked("next", topic, b"3"))

    await asyncio.to_thread(wait_until_stable, stage.kafka.bootstrap, [topic], HEALED_S)
    again = await stage.client.settle([idle.url], asked)
    assert (again.place, again.replayed) == (place, True)
    found = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    assert {place, behind.place} < {record.place for record in found}
    assert len(found) == 3
