"""What a group meets at the key store, and what becomes of events whose guarantee is `idempotent`."""

import asyncio

import pytest

from service import ingest as module
from service.errors import IN_PROGRESS, OUTCOME_UNKNOWN, TOO_LARGE, KafkaAway, StoreAway, StoreUnanswered
from service.kafka.life import Place
from service.kafka.verdict import Refusal
from service.request import Committed
from service.states import SlotState
from tests.unit.fakes import NOW_MS, World, end_of_term, ended, kind_of, make_event, until

BIG = Refusal(TOO_LARGE, "it is too large")


# ------------------------------------------------------------------------------------------------- the store's faults


async def test_a_store_that_refuses_keeps_the_term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STORE_AWAY_PAUSE_S", 0.01)
    world = World()
    slot = await world.slot()
    world.keys.trouble.before["claim"].extend([StoreAway("OOM"), StoreAway("OOM")])
    serving = world.serve(slot)
    assert isinstance(await world.submit("a"), Committed)
    assert slot.state is SlotState.READY
    assert not serving.done()
    await ended(serving)


async def test_a_request_is_not_refused_because_of_its_own_ghost() -> None:
    """A claim without an answer may have run: the request waits for the slot's recovery, and is no stranger to it."""
    world = World()
    slot = await world.slot(0)
    world.keys.trouble.after["claim"].append(StoreUnanswered("no answer"))
    answer = world.submit("a")
    assert isinstance(await end_of_term(world.serve(slot)), StoreUnanswered)
    assert world.keys.is_claimed("a")
    other = world.serve(await world.slot(1))
    await asyncio.sleep(0.02)
    world.ingest.recovered()  # the other slot's beat: the claim still stands
    await asyncio.sleep(0.02)
    assert not answer.done()
    await world.recover(slot)
    world.ingest.recovered()
    assert isinstance(await answer, Committed)
    await ended(other)


async def test_two_ghosts_of_one_request_are_both_its_own() -> None:
    """The second claim had no answer either, and it is the first one that ran."""
    world = World()
    slots = [await world.slot(0), await world.slot(1), await world.slot(2)]
    answer = world.submit("a")
    world.keys.trouble.after["claim"].append(StoreUnanswered("no answer"))
    await end_of_term(world.serve(slots[0]))
    world.keys.trouble.before["claim"].append(StoreUnanswered("no answer"))
    world.ingest.recovered()
    await end_of_term(world.serve(slots[1]))
    world.ingest.recovered()
    serving = world.serve(slots[2])
    await asyncio.sleep(0.02)
    assert not answer.done()
    await world.recover(slots[0])
    world.ingest.recovered()
    assert isinstance(await answer, Committed)
    await ended(serving)


async def test_the_claim_of_another_is_in_progress() -> None:
    world = World()
    other = await world.slot(1)
    await other.claim([(make_event("a").id, make_event("a").fp)])
    hurries: list[bool] = []
    world.ingest.hurry = lambda: hurries.append(True)
    serving = world.serve(await world.slot(0))
    assert kind_of(await world.submit("a")) is IN_PROGRESS
    assert hurries == [True], "nobody holds that slot's lease: it is to be recovered at once"
    await ended(serving)


async def test_an_unforeseen_error_lets_the_group_wait_again() -> None:
    world = World()
    slot = await world.slot()
    answer = world.submit("a")
    await asyncio.sleep(0.01)
    known = world.catalogue._last
    world.catalogue._last = {}
    assert isinstance(await end_of_term(world.serve(slot)), KeyError)
    assert not answer.done()
    world.catalogue._last = known
    await world.recover(slot)
    world.ingest.recovered()
    serving = world.serve(slot)
    assert isinstance(await answer, Committed)
    await ended(serving)


async def test_a_topic_that_vanished_does_not_fail_what_was_let_in() -> None:
    """Somebody asked for it again meanwhile, and there was none: the broker is to say so, for this event alone."""
    world = World()
    answer = world.submit("a")
    await asyncio.sleep(0.01)
    del world.cluster.topics["orders"]
    world.catalogue.doubt("orders")
    assert await world.catalogue.get("orders") is None
    serving = world.serve(await world.slot())
    assert isinstance(await answer, Committed)
    await ended(serving)


# ------------------------------------------------------------------------------------------------------ idempotent


async def test_what_was_written_is_answered_although_the_release_fails() -> None:
    world = World()
    slot = await world.slot()
    written, lost = world.submit("written", "plain.a"), world.submit("lost", "plain.b")
    await asyncio.sleep(0.01)
    world.plains[0].fates.append([Place(3, NOW_MS), None])
    world.keys.trouble.before["release"].append(StoreUnanswered("no answer"))
    assert isinstance(await end_of_term(world.serve(slot)), StoreUnanswered)
    answer = await asyncio.wait_for(written, 3.0)
    assert isinstance(answer, Committed)
    assert answer.places[0][1].offset == 3
    assert world.keys.is_delivered("written")
    assert kind_of(await lost) is OUTCOME_UNKNOWN


async def test_a_refused_idempotent_event_is_released_and_tried_alone() -> None:
    world = World()
    slot = await world.slot()
    good, poison = world.submit("good", "plain.a"), world.submit("poison", "plain.b")
    await asyncio.sleep(0.01)
    world.plains[0].fates.extend([[Place(3, NOW_MS), BIG], [BIG]])
    serving = world.serve(slot)
    assert isinstance(await good, Committed)
    assert kind_of(await poison) is TOO_LARGE
    assert world.keys_written() == [["good", "poison"], ["poison"]]
    await until(lambda: not world.keys.is_claimed("poison"))
    await ended(serving)


async def test_an_idempotent_group_that_was_not_sent_waits_again() -> None:
    world = World()
    slot = await world.slot()
    world.plains[0].trouble.before["write"].append(KafkaAway("no producer id"))
    answer = world.submit("a", "plain.a")
    assert isinstance(await end_of_term(world.serve(slot)), KafkaAway)
    assert not answer.done()
    await world.recover(slot)
    world.ingest.recovered()
    serving = world.serve(slot)
    assert isinstance(await answer, Committed)
    await ended(serving)
