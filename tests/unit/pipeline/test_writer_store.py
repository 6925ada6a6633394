"""Tests failures of the key store for a group, and events with the guarantee `idempotent`."""

import asyncio
import time
from collections.abc import Iterable, Sequence

import pytest
from msgspec.structs import replace

from service.claims.states import SlotState
from service.contract import Guarantee
from service.core.problems import (
    IN_PROGRESS,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    TOO_LARGE,
    Fenced,
    KafkaAway,
    StoreAway,
    StoreUnanswered,
)
from service.kafka.outcomes import RecordError, TransactionFailed, TransactionOutcome
from service.kafka.records import NOT_SENT, NotSent, RecordMetadata
from service.pipeline import writer as module
from service.pipeline.decisions import ClaimDecision, ClaimToRelease, Step
from service.pipeline.request import Committed, WriteRequest
from tests.unit.fakes import GENERATION, NOW_MS, World, end_of_term, ended, kind_of, make_event, steps, until

BIG = RecordError(TOO_LARGE, "it is too large")


# ------------------------------------------------------------------------------------------------- the store's faults


async def test_a_store_that_refuses_keeps_the_term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AWAY_PAUSE_S", 0.01)
    world = World()
    slot = await world.slot()
    world.keys.trouble.before["claim"].extend([StoreAway("OOM"), StoreAway("OOM")])
    serving = world.serve(slot)
    assert isinstance(await world.submit("a"), Committed)
    assert slot.state is SlotState.READY
    assert not serving.done()
    await ended(serving)


async def test_a_full_store_s_replays_are_answered_and_new_events_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AWAY_PAUSE_S", 0.01)
    world = World()
    serving = world.serve(await world.slot())
    first = await world.submit("known")
    world.keys.server.full = True
    new, known = world.submit("new"), world.submit("known")
    again = await known
    assert isinstance(first, Committed)
    assert again == replace(first, replayed=True)
    await asyncio.sleep(0.05)
    assert not new.done()
    world.keys.server.full = False
    assert isinstance(await new, Committed)
    assert not serving.done()
    await ended(serving)


async def test_a_request_that_another_slot_has_taken_is_not_put_back_when_the_term_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slot's term ends while another slot claims requests that it has given back."""
    monkeypatch.setattr(module, "AWAY_PAUSE_S", 0.01)
    world = World()
    one, other = await world.slot(0), await world.slot(1)
    let_go = asyncio.Event()

    async def fail() -> None:
        await let_go.wait()
        raise TransactionFailed(TransactionOutcome.ABORTED, "it could not be opened")

    monkeypatch.setattr(world.producers[0], "abandon", fail)
    world.keys.trouble.before["claim"].append(StoreAway("it is full"))
    failing = world.serve(one)
    answers = [world.submit("a"), world.submit("b")]
    await until(lambda: len(world.queue._waiting[Guarantee.EXACTLY_ONCE]) == 2)
    world.keys.trouble.reached["claim"].clear()
    claim = world.keys.trouble.hold("claim")
    going_on = world.serve(other)
    await world.keys.trouble.reached["claim"].wait()
    let_go.set()
    assert isinstance(await end_of_term(failing), TransactionFailed)
    claim.set()
    assert [kind_of(await answer) for answer in answers] == [None, None]
    assert not going_on.done()
    await ended(going_on)


async def test_a_term_that_is_cancelled_in_the_pause_after_its_claims_parks_what_it_has_to_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The claim of one request stands, but it cannot be written now; the other was not claimed."""
    world = World()
    answers = [world.submit("claimed"), world.submit("refused")]
    await steps()

    def decide(requests: Sequence[WriteRequest], *_: object) -> ClaimDecision:
        decision = ClaimDecision(time.monotonic(), world.resolver.too_late)
        claimed, refused = requests
        decision.to_release.append(ClaimToRelease(claimed, claimed.claimed_ids))
        decision.next[Step.REQUEUE].append(refused)
        return decision

    monkeypatch.setattr(module, "after_claim", decide)
    monkeypatch.setattr(module, "AWAY_PAUSE_S", 60.0)
    serving = world.serve(await world.slot())
    await until(lambda: len(world.queue._waiting[Guarantee.EXACTLY_ONCE]) == 1)
    await ended(serving)
    assert [request.events[0].key for request in world.writer.unwritten.parked] == ["claimed"]
    for answer in answers:
        answer.cancel()


async def test_a_slot_that_is_to_be_recovered_waits_for_no_group() -> None:
    """It would be woken for requests of others, and no other slot would be."""
    world = World()
    stale, other = await world.slot(0), await world.slot(1)
    gate = world.producers[0].trouble.hold("write")
    failing = world.serve(stale)
    first = world.submit("a")
    await world.producers[0].trouble.reached["write"].wait()
    stale.superseded = True  # as a heartbeat finds
    world.queue.notify_all()
    gate.set()
    assert isinstance(await first, Committed)
    serving = world.serve(other)
    assert isinstance(await end_of_term(failing), Fenced)
    async with asyncio.timeout(1.0):
        assert isinstance(await world.submit("b"), Committed)
    await ended(serving)


async def test_a_request_waits_for_the_recovery_of_its_own_unanswered_claim() -> None:
    """A claim without a reply may have run: the request waits for the recovery, and knows the claim as its own."""
    world = World()
    slot = await world.slot(0)
    world.keys.trouble.after["claim"].append(StoreUnanswered("no answer"))
    answer = world.submit("a")
    assert isinstance(await end_of_term(world.serve(slot)), StoreUnanswered)
    assert world.keys.is_claimed("a")
    other = world.serve(await world.slot(1))
    await asyncio.sleep(0.02)
    world.writer.unwritten.recovered()  # the other slot's heartbeat: the claim still stands
    await asyncio.sleep(0.02)
    assert not answer.done()
    await world.recover(slot)
    world.writer.unwritten.recovered()
    assert isinstance(await answer, Committed)
    await ended(other)


async def test_a_request_with_two_unanswered_claims_waits_for_the_recovery_of_the_one_that_ran() -> None:
    """The second claim had no reply either, and the first one has run."""
    world = World()
    slots = [await world.slot(0), await world.slot(1), await world.slot(2)]
    answer = world.submit("a")
    world.keys.trouble.after["claim"].append(StoreUnanswered("no answer"))
    await end_of_term(world.serve(slots[0]))
    world.keys.trouble.before["claim"].append(StoreUnanswered("no answer"))
    world.writer.unwritten.recovered()
    await end_of_term(world.serve(slots[1]))
    world.writer.unwritten.recovered()
    serving = world.serve(slots[2])
    await asyncio.sleep(0.02)
    assert not answer.done()
    await world.recover(slots[0])
    world.writer.unwritten.recovered()
    assert isinstance(await answer, Committed)
    await ended(serving)


async def test_the_claim_of_another_is_in_progress() -> None:
    world = World()
    other = await world.slot(1)
    await other.claim([(make_event("a").id, make_event("a").fp)])
    serving = world.serve(await world.slot(0))
    assert kind_of(await world.submit("a")) is IN_PROGRESS
    assert world.heartbeat_now.is_set(), "nobody holds that slot's lease: it is to be recovered at once"
    world.heartbeat_now.clear()
    assert await world.keys.take(GENERATION, 1, "another")
    assert kind_of(await world.submit("a")) is IN_PROGRESS
    assert not world.heartbeat_now.is_set(), "its holder lives, and may be writing"
    await ended(serving)


async def test_an_unforeseen_error_lets_the_group_wait_again() -> None:
    world = World()
    slot = await world.slot()
    answer = world.submit("a")
    await steps()
    known = world.topic_metadata._last
    world.topic_metadata._last = {}
    assert isinstance(await end_of_term(world.serve(slot)), KeyError)
    assert not answer.done()
    world.topic_metadata._last = known
    serving = await world.serve_again(slot)
    assert isinstance(await answer, Committed)
    await ended(serving)


async def test_a_topic_that_vanished_from_the_cache_does_not_fail_an_admitted_event() -> None:
    """Another request looked it up meanwhile, and it was absent: the broker decides, for this event alone."""
    world = World()
    answer = world.submit("a")
    await steps()
    del world.topic_admin.topics["orders"]
    world.topic_metadata.invalidate("orders")
    assert await world.topic_metadata.get("orders", time.monotonic()) is None
    serving = world.serve(await world.slot())
    assert isinstance(await answer, Committed)
    await ended(serving)


# ------------------------------------------------------------------------------------------------------ idempotent


async def test_a_written_event_is_answered_although_the_release_of_another_fails() -> None:
    world = World()
    slot = await world.slot()
    written, lost = world.submit("written", "plain.a"), world.submit("lost", "plain.b")
    await steps()
    world.idempotents[0].results.append([RecordMetadata(3, NOW_MS), None])
    world.keys.trouble.before["release"].append(StoreUnanswered("no answer"))
    assert isinstance(await end_of_term(world.serve(slot)), StoreUnanswered)
    answer = await asyncio.wait_for(written, 3.0)
    assert isinstance(answer, Committed)
    assert answer.deliveries[0][1].offset == 3
    assert world.keys.is_delivered("written")
    assert kind_of(await lost) is OUTCOME_UNKNOWN


async def test_an_idempotent_event_that_was_not_sent_is_requeued_and_not_in_doubt() -> None:
    """Its partition had no leader: with 504 the client would wait for an outcome that never comes."""
    world = World()
    slot = await world.slot()
    good, bad = world.submit("good", "plain.a"), world.submit("bad", "plain.b")
    await steps()
    world.idempotents[0].results.append([RecordMetadata(3, NOW_MS), NOT_SENT])
    serving = world.serve(slot)
    for answer in (good, bad):
        assert isinstance(await asyncio.wait_for(answer, 3.0), Committed)
    assert world.keys_written() == [["good", "bad"], ["bad"]]
    await ended(serving)


@pytest.mark.parametrize(("itself", "blamed"), [(True, ["plain.a"]), (False, ["plain.a", "plain.b"])])
async def test_a_topic_that_was_not_sent_for_its_own_fault_is_isolated(
    itself: bool, blamed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only the time ran out, all are isolated; otherwise they would delay each other until their deadlines."""
    world = World()
    slot = await world.slot()
    answers = [world.submit("ill", "plain.a"), world.submit("well", "plain.b")]
    await steps()
    world.idempotents[0].results.append([NotSent(itself), NOT_SENT])
    isolated: list[str] = []
    isolate = world.queue.isolate

    def note(topics: Iterable[str]) -> None:
        isolated.extend(sorted(topics))
        isolate(topics)

    monkeypatch.setattr(world.queue, "isolate", note)
    serving = world.serve(slot)
    for answer in answers:
        assert isinstance(await asyncio.wait_for(answer, 3.0), Committed)
    assert isolated == blamed
    await ended(serving)


async def test_a_slot_that_ends_in_the_pause_after_a_failed_try_leaves_the_request_in_the_queue_once() -> None:
    """Its claim was released, and it waits for another slot: it must not wait for a recovery too."""
    world = World()
    slot = await world.slot()
    answer = world.submit("bad", "plain.b")
    await steps()
    world.idempotents[0].results.append([NOT_SENT])
    serving = world.serve(slot)
    await until(lambda: bool(world.idempotents[0].written) and not world.keys.is_claimed("bad"))
    await asyncio.sleep(0.01)
    await ended(serving)
    assert world.writer.unwritten.parked == []
    group = world.queue.take()
    assert group is not None
    assert [request.events[0].key for request in group.requests] == ["bad"]
    assert world.queue.take() is None
    answer.cancel()


async def test_an_idempotent_event_that_never_could_be_sent_is_surely_not_written() -> None:
    world = World(request_timeout_ms=300)
    slot = await world.slot()
    answer = world.submit("bad", "plain.b")
    await steps()
    world.idempotents[0].results.extend([[NOT_SENT]] * 1_000)
    serving = world.serve(slot)
    assert kind_of(await asyncio.wait_for(answer, 3.0)) is NOT_WRITTEN
    await until(lambda: not world.keys.is_claimed("bad"))
    await ended(serving)


async def test_a_refused_idempotent_event_is_released_and_tried_alone() -> None:
    world = World()
    slot = await world.slot()
    good, poison = world.submit("good", "plain.a"), world.submit("poison", "plain.b")
    await steps()
    world.idempotents[0].results.extend([[RecordMetadata(3, NOW_MS), BIG], [BIG]])
    serving = world.serve(slot)
    assert isinstance(await good, Committed)
    assert kind_of(await poison) is TOO_LARGE
    assert world.keys_written() == [["good", "poison"], ["poison"]]
    await until(lambda: not world.keys.is_claimed("poison"))
    await ended(serving)


async def test_an_idempotent_group_that_was_not_sent_waits_again() -> None:
    world = World()
    slot = await world.slot()
    world.idempotents[0].trouble.before["write"].append(KafkaAway("no producer id"))
    answer = world.submit("a", "plain.a")
    assert isinstance(await end_of_term(world.serve(slot)), KafkaAway)
    assert not answer.done()
    serving = await world.serve_again(slot)
    assert isinstance(await answer, Committed)
    await ended(serving)
