"""Tests decisions on a group, without I/O."""

import asyncio

import pytest

from service.claims.states import RequestEvent, RequestState
from service.contract import Guarantee
from service.core.problems import NOT_WRITTEN, Problem
from service.kafka.outcomes import TransactionFailed, TransactionOutcome
from service.pipeline.decisions import ClaimToRelease, start_sending
from service.pipeline.request import Committed, WriteRequest
from tests.unit.fakes import World, ended, kind_of, make_event, steps


def claimed(key: str) -> WriteRequest:
    request = WriteRequest.for_event(make_event(key), 0.0, 10.0, Guarantee.EXACTLY_ONCE)
    request.move(RequestEvent.CLAIM)
    request.move(RequestEvent.WIN)
    return request


def test_what_was_answered_since_its_claim_is_not_sent_and_its_claim_is_released() -> None:
    late, open = claimed("late"), claimed("open")
    late.resolve(Problem(NOT_WRITTEN, "its deadline has passed"))
    sent, to_release = start_sending([(late, [1]), (open, [2])])
    assert sent == [(open, [2])]
    assert to_release == [ClaimToRelease(late, [make_event("late").id])]
    assert open.state is RequestState.SENT


async def test_other_tasks_run_between_the_claim_and_the_writing_of_a_large_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.core.time_slice.STEP_EVENTS", 1)
    world = World()
    serving = world.serve(await world.slot())
    on_claim = asyncio.get_running_loop().create_future()
    is_sent: list[bool] = []
    on_claim.add_done_callback(lambda _: is_sent.append(world.producers[0].begun_early is None))
    arrived = asyncio.get_running_loop().time()
    await world.checks.check(make_event("a"), arrived)
    result = world.admission.submit(make_event("a"), arrived, on_claim=on_claim)
    await steps()
    assert isinstance(await result, Committed)
    assert is_sent == [False]
    await ended(serving)


async def test_a_claim_of_a_request_answered_before_the_sending_is_released_though_the_transaction_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its retry would be refused until the slot has been recovered, which may take long."""
    world = World()
    slot = await world.slot()
    world.producers[0].trouble.before["write"].append(TransactionFailed(TransactionOutcome.ABORTED, "no broker"))

    def late(request: WriteRequest) -> None:
        world.resolver.resolve(request, Problem(NOT_WRITTEN, "its deadline has passed"))

    monkeypatch.setattr(world.resolver, "resolve_claim", late)
    arrived = asyncio.get_running_loop().time()
    await world.checks.check(make_event("late"), arrived)
    on_claim = asyncio.get_running_loop().create_future()
    refused = world.admission.submit(make_event("late"), arrived, on_claim=on_claim)
    world.submit("other")
    await steps()
    serving = world.serve(slot)
    with pytest.raises(TransactionFailed):
        await serving
    assert kind_of(await refused) is NOT_WRITTEN
    assert not world.keys.is_claimed("late")
