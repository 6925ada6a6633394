"""Tests the loop of a slot: which waiter is woken, what waits for a mark, and failures of Redis and Kafka."""

import asyncio
from collections.abc import Sequence

import pytest

from service.claims.keys import StoreGeneration
from service.claims.states import Claim, Delivered, DeliveredBatch, RequestState
from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.contract.wire.ids import event_id
from service.core.problems import OUTCOME_UNKNOWN, Fenced, KafkaAway, StoreAway
from service.kafka.outcomes import TransactionFailed, TransactionOutcome
from service.kafka.records import RecordMetadata, RecordResult
from service.pipeline import writer as module
from service.pipeline.request import Committed
from tests.unit.fakes import KEPT_S, NOW_MS, World, end_of_term, ended, kind_of, make_event, steps, until


async def test_a_superseded_slot_hands_its_wakeup_to_another_slot() -> None:
    world = World()
    stale, other = await world.slot(0), await world.slot(1)
    failing = world.serve(stale)
    await asyncio.sleep(0)
    serving = world.serve(other)
    await asyncio.sleep(0)
    stale.superseded = True
    answer = world.submit("a")  # wakes the slot that has waited longest
    assert isinstance(await end_of_term(failing), Fenced)
    assert isinstance(await asyncio.wait_for(answer, 1.0), Committed)
    assert world.keys_written(1) == [["a"]]
    await ended(serving)


async def test_a_slot_waits_for_a_slow_mark_before_it_takes_a_third_group() -> None:
    """One mark in flight at most: unmarked records are those that the slot's next recovery must read."""
    world = World()
    marking = world.keys.trouble.hold("mark")
    serving = world.serve(await world.slot())
    answers = []
    for key in "abcd":
        answers.append(world.submit(key))
        await steps()
    assert world.keys_written() == [["a"], ["b"]]
    marking.set()
    for answer in answers:
        assert isinstance(await asyncio.wait_for(answer, 1.0), Committed)
    await ended(serving)


async def test_a_slot_is_not_given_back_before_its_last_mark() -> None:
    world = World()
    slot = await world.slot()
    marking = world.keys.trouble.hold("mark")
    serving = world.serve(slot)
    answer = world.submit("a")
    await world.keys.trouble.reached["mark"].wait()
    slot.draining = True
    world.queue.notify_all()
    await asyncio.sleep(0.02)
    assert not serving.done()
    marking.set()
    assert isinstance(await answer, Committed)
    await asyncio.wait_for(serving, 1.0)
    assert not slot.has_pending_marks


async def test_a_stop_waits_for_the_marks_that_are_in_flight() -> None:
    world = World()
    await world.writer.wait_for_marks()
    marking = world.keys.trouble.hold("mark")
    serving = world.serve(await world.slot())
    answer = world.submit("a")
    await world.keys.trouble.reached["mark"].wait()
    settling = asyncio.create_task(world.writer.wait_for_marks())
    await asyncio.sleep(0.02)
    assert not settling.done()
    marking.set()
    await asyncio.wait_for(settling, 1.0)
    assert isinstance(await answer, Committed)
    await ended(serving)


@pytest.mark.parametrize("topic", ["orders", "plain.a"])
async def test_a_commit_releases_its_topics_from_isolation(topic: str) -> None:
    world = World()
    for each in (topic, "other"):
        world.queue.isolate({each})
    serving = world.serve(await world.slot())
    assert isinstance(await world.submit("a", topic), Committed)
    assert list(world.queue._isolated_names) == ["other"]
    await ended(serving)


async def test_a_finished_group_is_no_longer_in_flight() -> None:
    world = World()
    serving = world.serve(await world.slot())
    for key in ("a", "b", "a"):
        await world.submit(key)
    await until(lambda: not world.queue._in_flight)
    await ended(serving)


async def test_an_idempotent_event_begins_and_abandons_no_transaction_also_when_replayed() -> None:
    world = World()
    serving = world.serve(await world.slot())
    for _ in range(2):
        assert isinstance(await world.submit("a", "plain.a"), Committed)
    await until(lambda: not world.queue._in_flight)
    assert world.producers[0].begun_early is None
    assert world.producers[0].abandoned == 0
    await ended(serving)


@pytest.mark.parametrize("full", [False, True])
async def test_a_store_that_takes_no_claim_is_asked_again_after_a_pause(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the store refuses the call, or answers that it is full."""
    monkeypatch.setattr(module, "AWAY_PAUSE_S", 0.05)
    world = World()
    calls = 0
    claim = world.keys.claim

    async def counted(
        generation: StoreGeneration, slot: int, term: int, asked: Sequence[tuple[bytes, bytes]], ttls_s: Sequence[int]
    ) -> list[Claim]:
        nonlocal calls
        calls += 1
        return await claim(generation, slot, term, asked, ttls_s)

    monkeypatch.setattr(world.keys, "claim", counted)
    world.keys.server.full = full
    if not full:
        world.keys.trouble.before["claim"].extend(StoreAway("OOM") for _ in range(10_000))
    answer = world.submit("a")
    serving = world.serve(await world.slot())
    await asyncio.sleep(0.18)
    assert 2 <= calls <= 4
    answer.cancel()
    await ended(serving)


@pytest.mark.parametrize(("topic", "producer_id"), [("orders", 7), ("plain.a", 8)])
async def test_a_record_names_the_producer_that_wrote_it(topic: str, producer_id: int) -> None:
    """The audit distinguishes copies by it."""
    world = World()
    slot = await world.slot(1)
    serving = world.serve(slot)
    answer = await world.submit("a", topic)
    assert isinstance(answer, Committed)
    ((record,),) = world.producers[1].written or world.idempotents[1].written
    event = make_event("a", topic)
    stamp = Stamp(event.id, event.fp, answer.at, slot.n, producer_id, 0, "test")
    assert Stamp.decode(dict(record.headers)[STAMP_HEADER]) == stamp
    await ended(serving)


@pytest.mark.parametrize(
    ("results", "isolated"), [([RecordMetadata(3, NOW_MS), None], {"plain.b"}), ([None, None], set())]
)
async def test_a_topic_without_answer_is_isolated_if_others_in_its_group_were_written(
    results: list[RecordResult], isolated: set[str]
) -> None:
    """If nothing was written, the broker may be at fault."""
    world = World()
    slot = await world.slot()
    answers = [world.submit("a", "plain.a"), world.submit("b", "plain.b")]
    await steps()
    world.idempotents[0].results.append(results)
    serving = world.serve(slot)
    assert kind_of(await answers[1]) is OUTCOME_UNKNOWN
    assert set(world.queue._isolated_names) == isolated
    assert (kind_of(await answers[0]) is OUTCOME_UNKNOWN) is (not isolated)
    await ended(serving)


async def test_a_request_in_doubt_is_answered_504_at_its_deadline() -> None:
    """It may be written: a 503 would say that it is not."""
    world = World(request_timeout_ms=200)
    slot = await world.slot()
    world.producers[0].trouble.before["write"].append(TransactionFailed(TransactionOutcome.UNKNOWN, "no answer"))
    answer = world.submit("a")
    await end_of_term(world.serve(slot))
    (request,) = world.writer.unwritten.parked
    assert request.state is RequestState.IN_DOUBT
    sweeping = asyncio.create_task(world.resolver.sweep())
    assert kind_of(await asyncio.wait_for(answer, 1.0)) is OUTCOME_UNKNOWN
    await ended(sweeping)


async def test_a_claimed_request_that_was_not_sent_is_requeued_with_the_recovery() -> None:
    """No producer id was available."""
    world = World()
    slot = await world.slot()
    world.idempotents[0].trouble.before["identity"].append(KafkaAway("no producer id"))
    answer = world.submit("a", "plain.a")
    assert isinstance(await end_of_term(world.serve(slot)), KafkaAway)
    assert [request.state for request in world.writer.unwritten.parked] == [RequestState.QUEUED]
    serving = await world.serve_again(slot)
    assert isinstance(await asyncio.wait_for(answer, 1.0), Committed)
    await ended(serving)


async def test_a_batch_in_doubt_that_was_written_is_no_replay() -> None:
    world = World()
    slot = await world.slot()
    events = [make_event("a/0"), make_event("a/1")]
    for event in events:
        await world.checks.check(event, asyncio.get_running_loop().time())
    world.producers[0].trouble.before["write"].append(TransactionFailed(TransactionOutcome.UNKNOWN, "no answer"))
    whole = (b"w" * 16, b"f" * 8)
    asked = asyncio.create_task(
        world.admission.submit_atomic(events[0].key, events, whole, asyncio.get_running_loop().time())
    )
    await end_of_term(world.serve(slot))
    keys = world.keys.server.keys
    for n, event in enumerate(events):  # what the recovery finds in the ledger
        keys[event.id] = Delivered(NOW_MS, event.fp, "orders", 1, 40 + n, NOW_MS)
    keys[whole[0]] = DeliveredBatch(NOW_MS, whole[1], 2)
    serving = await world.serve_again(slot)
    answer = await asyncio.wait_for(asked, 1.0)
    assert isinstance(answer, Committed)
    assert ([delivered.offset for _, delivered in answer.deliveries], answer.replayed) == ([40, 41], False)
    assert not serving.done()
    await ended(serving)


async def test_keys_are_remembered_by_the_rule_of_their_topic_in_store_and_ledger() -> None:
    world = World()
    slot = await world.slot()
    serving = world.serve(slot)
    answers = await asyncio.gather(world.submit("a", "kept"), world.submit("b"))
    assert [answer.deliveries[0][1].ttl_s for answer in answers if isinstance(answer, Committed)] == [KEPT_S, 0]
    assert world.keys.server.ttls_ms == {event_id("a"): 1000 * KEPT_S}
    states = world.keys.server.keys
    assert [states[event_id(key)] for key in "ab"] == [answer.deliveries[0][1] for answer in answers]  # type: ignore[union-attr]
    world.keys.server.clock.pass_ms(2 * 86_400_000)
    again = await asyncio.gather(world.submit("a", "kept"), world.submit("b"))
    assert [answer.replayed for answer in again if isinstance(answer, Committed)] == [True, False]
    await ended(serving)


async def test_an_atomic_batch_is_remembered_for_the_longest_retention_of_its_topics() -> None:
    world = World()
    serving = world.serve(await world.slot())
    events = [make_event("a/0"), make_event("a/1", "kept")]
    for event in events:
        await world.checks.check(event, asyncio.get_running_loop().time())
    whole = (b"w" * 16, b"f" * 8)
    answer = await world.admission.submit_atomic(events[0].key, events, whole, asyncio.get_running_loop().time())
    assert isinstance(answer, Committed)
    ids = [whole[0], *(event.id for event in events)]
    await until(lambda: isinstance(world.keys.server.keys[whole[0]], DeliveredBatch))
    assert world.keys.server.ttls_ms == dict.fromkeys(ids, 1000 * KEPT_S)
    await ended(serving)
