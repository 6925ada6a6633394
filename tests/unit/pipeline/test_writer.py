"""Tests the path of a group: which requests are answered, requeued, and never written."""

import asyncio
import gc
import time
from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from service.claims.keys import StoreGeneration
from service.claims.states import Claim, Claimed, Outcome, SlotState
from service.core.problems import (
    FINGERPRINT_MISMATCH,
    IN_PROGRESS,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    StoreAway,
    StoreLost,
    StoreUnanswered,
)
from service.kafka.outcomes import TransactionAborted, TransactionFailed, TransactionOutcome
from service.pipeline import resolver
from service.pipeline.group import Group
from service.pipeline.load_shedding import ANSWERS_EACH, ANSWERS_MAX
from service.pipeline.quota import LEAST_BYTES
from service.pipeline.request import Committed, WriteRequest
from service.slots import slot as slot_module
from tests.unit.fakes import GENERATION, NOW_MS, World, count_of, end_of_term, ended, kind_of, make_event, steps, until

# ------------------------------------------------------------------------------------------------- when all is well


async def test_a_group_is_claimed_written_marked_and_answered() -> None:
    world = World()
    asked = [world.submit("a"), world.submit("b")]
    await steps()
    serving = world.serve(await world.slot())
    first, second = await asyncio.gather(*asked)
    assert isinstance(first, Committed)
    assert isinstance(second, Committed)
    assert not first.replayed
    assert world.keys_written() == [["a", "b"]]
    assert world.keys.is_delivered("a")
    again = await world.submit("a")
    assert again == replace(first, replayed=True)
    assert world.keys_written() == [["a", "b"]]
    assert kind_of(await world.ask(make_event("a", value=b"2"))) is FINGERPRINT_MISMATCH
    assert world.journal.answers == [("a", 201), ("b", 201), ("a", 201), ("a", 422)]
    await ended(serving)


async def test_an_inconsistent_claim_is_answered_504_and_logged_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a store of another version may answer: the event may be written, and its key stays usable."""
    world = World()
    serving = world.serve(await world.slot())

    async def claim(*_: object) -> list[Claim]:
        return [Claim(Outcome.DELIVERED, Claimed(0, 1, NOW_MS, bytes(8)))]

    monkeypatch.setattr(world.keys, "claim", claim)
    with capture_logs() as lines:
        assert kind_of(await world.submit("a")) is OUTCOME_UNKNOWN
    assert [line["log_level"] for line in lines] == ["error"]
    await ended(serving)


async def test_an_unreadable_key_is_answered_504_and_the_other_events_of_its_group_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    slot = await world.slot()
    serving = world.serve(slot)
    real = world.keys.claim

    async def claim(
        generation: StoreGeneration, n: int, term: int, asked: Sequence[tuple[bytes, bytes]], ttls_s: Sequence[int]
    ) -> list[Claim]:
        found = await real(generation, n, term, asked, ttls_s)
        return [replace(found[0], outcome=Outcome.UNREADABLE), *found[1:]]

    monkeypatch.setattr(world.keys, "claim", claim)
    asked = [world.submit("a"), world.submit("b")]
    answers = await asyncio.gather(*asked)
    assert kind_of(answers[0]) is OUTCOME_UNKNOWN
    assert isinstance(answers[1], Committed)
    assert slot.state is SlotState.READY
    await ended(serving)


@pytest.mark.parametrize("known", [False, True])
async def test_the_answers_of_a_group_go_out_together(known: bool) -> None:
    """New events after their mark, and replays after their claim."""
    world = World()
    serving = world.serve(await world.slot())
    if known:
        await asyncio.gather(world.submit("a"), world.submit("b"))
    await world.checks.check(make_event("a"), time.monotonic())
    results = [world.admission.submit(make_event(key), time.monotonic()) for key in "ab"]
    known_then: list[bool] = []
    results[0].add_done_callback(lambda _: known_then.append(results[1].done()))
    await asyncio.wait(results)
    assert known_then == [True], "each was resolved in a step of the loop of its own, which wakes its client"
    await ended(serving)


async def test_a_group_of_replays_is_answered_before_the_next_group_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients of its responses send their next requests together, which a group taken meanwhile would part."""
    world = World()
    serving = world.serve(await world.slot())
    await world.submit("a")
    await world.checks.check(make_event("a"), time.monotonic())
    order: list[str] = []
    done = world.queue.done

    def record_done(group: Group) -> None:
        order.append("group done")
        done(group)

    monkeypatch.setattr(world.queue, "done", record_done)
    result = world.admission.submit(make_event("a"), time.monotonic())
    # Rendered in the callback of its future, and written in the turn after that.
    result.add_done_callback(lambda _: asyncio.get_running_loop().call_soon(order.append, "written"))
    await until(lambda: len(order) == 2)
    assert order == ["written", "group done"]
    await ended(serving)


async def test_a_transaction_is_open_when_its_claims_are_made() -> None:
    world = World()
    slot = await world.slot()
    producer = world.producers[0]
    claiming = world.keys.trouble.hold("claim")
    serving = world.serve(slot)
    answer = world.submit("a")
    await world.keys.trouble.reached["claim"].wait()
    assert producer.begun_early is not None
    assert producer.begun_early[-1] == ("fencepost.ledger", 0)
    assert [topic for topic, _ in producer.begun_early] == ["orders", "fencepost.ledger"]
    claiming.set()
    assert isinstance(await answer, Committed)
    assert not producer.abandoned
    await ended(serving)


async def test_a_replay_abandons_the_open_transaction_and_opens_no_other() -> None:
    world = World()
    slot = await world.slot()
    producer = world.producers[0]
    serving = world.serve(slot)
    for abandoned in (0, 1, 1):
        assert isinstance(await world.submit("a"), Committed)
        await until(lambda: producer.begun_early is None)
        assert producer.abandoned == abandoned
    assert isinstance(await world.submit("b"), Committed)
    assert isinstance(await world.submit("b"), Committed)
    await until(lambda: producer.abandoned == 2)
    await ended(serving)


async def test_the_throttle_time_of_a_group_bounds_the_next_ones() -> None:
    world = World()
    slot = await world.slot()
    serving = world.serve(slot)
    world.producers[0].throttle_s = 1_000.0
    await world.submit("a")
    assert world.queue.group_bytes_max == (LEAST_BYTES, LEAST_BYTES)
    await world.submit("b")  # a group that was written has no pause behind it
    assert world.admission.new_chunk().add(make_event("c", value=b"x" * LEAST_BYTES))
    await ended(serving)


async def test_after_a_group_that_failed_under_a_quota_no_other_is_written_at_once() -> None:
    world = World()
    slot = await world.slot()
    world.producers[0].throttle_s = 60.0
    failed = TransactionFailed(TransactionOutcome.UNKNOWN, "it is throttled")
    world.producers[0].trouble.before["commit"].append(failed)
    world.submit("a")
    await end_of_term(world.serve(slot))
    world.submit("b")
    assert world.queue.take() is None


async def test_the_throttle_time_of_an_aborted_group_is_kept_too() -> None:
    """Kafka counts the bytes of a transaction that is aborted, and the group is sent again."""
    world = World()
    slot = await world.slot()
    world.producers[0].throttle_s = 1_000.0
    world.producers[0].trouble.before["write"].append(TransactionAborted("a broker said so"))
    serving = world.serve(slot)
    world.submit("a")
    await until(lambda: world.queue.group_bytes_max == (LEAST_BYTES, LEAST_BYTES))
    await steps()
    assert (world.keys_written(), world.queue.events) == ([], 1)
    await ended(serving)


async def test_a_full_queue_reports_an_overload_until_its_requests_are_answered() -> None:
    world = World(queue_events_max=2)
    assert world.admission.overload is None
    asked = [world.submit("a"), world.submit("b")]
    await until(lambda: world.queue.events == 2)
    assert world.admission.overload is not None
    assert world.admission.overload.kind is NOT_WRITTEN
    serving = world.serve(await world.slot())
    await asyncio.gather(*asked)
    assert world.admission.overload is None
    await ended(serving)


async def test_the_answers_of_a_group_send_the_refusals_that_wait_in_the_load_shedder() -> None:
    world = World()
    # far more than the saved answers allow
    delays = [world.resolver.load_shedder.delay(time.monotonic()) for _ in range(ANSWERS_MAX)]
    delayed = [delay for delay in delays if delay is not None]
    assert len(delayed) == ANSWERS_MAX - ANSWERS_MAX // ANSWERS_EACH
    serving = world.serve(await world.slot())
    for n in range(ANSWERS_EACH):
        assert not any(delay.done() for delay in delayed)
        assert isinstance(await world.submit(f"a{n}"), Committed)
    assert not delayed[0].done()  # a group's answers are given first
    sweeping = asyncio.create_task(world.resolver.sweep())
    await until(delayed[0].done)
    assert not delayed[1].done()
    await until(lambda: all(delay.done() for delay in delayed))
    await ended(sweeping)
    await ended(serving)


@pytest.mark.parametrize("error", [StoreUnanswered("no answer"), StoreAway("OOM")], ids=repr)
async def test_a_failed_mark_is_no_error_of_the_event(error: Exception) -> None:
    world = World()
    slot = await world.slot()
    world.keys.trouble.before["mark"].append(error)
    serving = world.serve(slot)
    assert isinstance(await world.submit("a"), Committed)
    assert slot.has_pending_marks
    assert count_of(world.telemetry.marks_failed) == 1
    assert not world.store.losses
    assert isinstance(await world.submit("b"), Committed)  # the mark of the pending record comes first
    assert not slot.has_pending_marks
    assert world.keys.is_delivered("a")
    await ended(serving)


@pytest.mark.parametrize("error", [KeyError("a bug"), asyncio.CancelledError()], ids=repr)
async def test_an_unforeseen_end_of_a_mark_leaves_no_committed_event_without_its_answer(error: BaseException) -> None:
    world = World()
    slot = await world.slot()
    world.keys.trouble.before["mark"].append(error)
    serving = world.serve(slot)
    assert isinstance(await asyncio.wait_for(world.submit("a"), 3), Committed)
    assert slot.has_pending_marks
    await ended(serving)


async def test_a_slot_that_is_cut_off_still_has_its_committed_groups_marked_and_answered() -> None:
    """Also for the group that waits behind the previous group's mark: both are in the ledger."""
    world = World()
    slot = await world.slot()
    marking = world.keys.trouble.hold("mark")
    serving = world.serve(slot)
    first = world.submit("a")
    await world.keys.trouble.reached["mark"].wait()
    second = world.submit("b")
    await until(lambda: world.keys_written() == [["a"], ["b"]])
    await asyncio.sleep(0.01)
    await ended(serving)
    marking.set()
    await asyncio.wait_for(world.writer.wait_for_marks(), 3)
    assert world.keys.is_delivered("a")
    assert world.keys.is_delivered("b")
    async with asyncio.timeout(3):
        assert isinstance(await first, Committed)
        assert isinstance(await second, Committed)


async def test_a_slot_with_too_many_pending_marks_ends_its_term_and_takes_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its term ends instead: the recovery reads the unmarked records from the ledger."""
    monkeypatch.setattr(slot_module, "PENDING_MARKS_MAX", 3)
    world = World()
    slot = await world.slot()
    world.keys.trouble.before["mark"].extend(StoreAway("OOM") for _ in range(20))
    serving = world.serve(slot)
    for key in "abc":
        assert isinstance(await world.submit(key), Committed)
    waits = world.submit("d")
    assert isinstance(await end_of_term(serving), StoreAway)
    assert len(world.keys_written()) == 3
    assert not world.keys.is_claimed("d")
    world.keys.trouble.before["mark"].clear()
    serving = await world.serve_again(slot)
    assert isinstance(await waits, Committed)
    assert not slot.has_pending_marks
    await ended(serving)


async def test_a_mark_that_meets_another_store_reports_its_generation_as_lost() -> None:
    world = World()
    serving = world.serve(await world.slot())
    world.keys.trouble.before["mark"].append(StoreLost("another store"))
    assert isinstance(await world.submit("a"), Committed)
    assert world.store.losses == [GENERATION]
    await ended(serving)


# ------------------------------------------------------------------------------------------------------- deadlines


async def test_a_request_that_is_answered_503_during_the_release_of_others_is_not_written() -> None:
    """Nothing is awaited between the check of the deadline and the sending."""
    world = World(request_timeout_ms=200)
    slot = await world.slot()
    await world.topic_metadata.get("orders", time.monotonic())
    late, soon = world.submit("late", ago_s=0.3), world.submit("soon", ago_s=0.1)
    await steps()
    release = world.keys.trouble.hold("release")
    sweeping = asyncio.create_task(world.resolver.sweep())
    serving = asyncio.create_task(world.writer.serve(slot))
    answers = [kind_of(await late), kind_of(await soon)]
    release.set()
    await asyncio.sleep(0.02)
    assert answers == [NOT_WRITTEN, None] if world.keys_written() else answers == [NOT_WRITTEN, NOT_WRITTEN]
    assert not world.keys.is_claimed("late"), "a claim that is not wanted is given up"
    await ended(serving)
    await ended(sweeping)


async def test_a_request_that_is_answered_503_while_its_producer_starts_is_not_written() -> None:
    """The first session of an idempotent producer takes a while to start."""
    world = World(request_timeout_ms=80)
    await world.topic_metadata.get("plain.a", time.monotonic())
    slot = await world.slot()
    begun = world.idempotents[0].trouble.hold("identity")
    sweeping = asyncio.create_task(world.resolver.sweep())
    serving = world.serve(slot)
    assert kind_of(await world.submit("a", "plain.a")) is NOT_WRITTEN
    begun.set()
    await asyncio.sleep(0.02)
    assert world.keys_written() in ([], [[]])
    assert not world.keys.is_claimed("a")
    await ended(serving)
    await ended(sweeping)


async def test_an_idempotent_event_is_answered_503_while_kafka_throttles_its_producer() -> None:
    """It was not sent: a 504 would say that a repetition may write it twice."""
    world = World(request_timeout_ms=80)
    await world.topic_metadata.get("plain.a", time.monotonic())
    slot = await world.slot()
    world.idempotents[0].throttle_s = 60.0
    sweeping = asyncio.create_task(world.resolver.sweep())
    serving = world.serve(slot)
    assert kind_of(await world.submit("a", "plain.a")) is NOT_WRITTEN
    await until(lambda: not world.keys.is_claimed("a"))
    assert slot.state is SlotState.READY
    world.idempotents[0].throttle_s = 0.0
    assert isinstance(await world.submit("a", "plain.a"), Committed)
    assert world.keys_written() == [["a"]]
    await ended(serving)
    await ended(sweeping)


async def test_each_request_is_answered_at_its_own_deadline() -> None:
    """A request that arrived earlier may be admitted later: its body, or the look-up of its topic, took longer."""
    world = World(request_timeout_ms=5_000)
    sweeping = asyncio.create_task(world.resolver.sweep())
    patient = world.submit("patient")
    await steps()
    started = asyncio.get_running_loop().time()
    assert kind_of(await world.submit("urgent", ago_s=4.95)) is NOT_WRITTEN
    assert asyncio.get_running_loop().time() - started < 3.0
    assert not patient.done()
    await ended(sweeping)


async def test_at_the_deadline_a_sent_request_is_answered_504_and_a_waiting_one_503() -> None:
    world = World(request_timeout_ms=200)
    await world.topic_metadata.get("orders", time.monotonic())
    slot = await world.slot()
    world.producers[0].trouble.hold("write")
    sweeping, serving = asyncio.create_task(world.resolver.sweep()), world.serve(slot)
    sent = world.submit("sent")
    await until(lambda: slot.state is SlotState.WRITING)
    waits = world.submit("waits")
    assert kind_of(await sent) is OUTCOME_UNKNOWN
    assert kind_of(await waits) is NOT_WRITTEN
    await ended(serving)
    await ended(sweeping)


async def test_requests_that_were_answered_do_not_stay_in_the_queue() -> None:
    """Without a slot no group takes them out."""
    world = World(request_timeout_ms=50)
    await world.topic_metadata.get("orders", time.monotonic())
    sweeping = asyncio.create_task(world.resolver.sweep())
    answers = await asyncio.gather(*(world.submit(str(n)) for n in range(20)))
    assert {kind_of(answer) for answer in answers} == {NOT_WRITTEN}
    await until(lambda: not any(world.queue._waiting.values()))
    assert (world.queue.events, world.queue.bytes) == (0, 0)
    await ended(sweeping)


@pytest.mark.parametrize("won", [False, True])
async def test_a_wait_for_another_s_write_ends_with_409_in_time_without_a_slot(won: bool) -> None:
    """No slot claims it again, so nothing else would answer it. A request with a claim of its own gets no 409."""
    world = World()
    await world.topic_metadata.get("orders", time.monotonic())
    event = make_event("patient")
    world.keys.server.freed[5] = 1
    world.keys.server.keys[event.id] = Claimed(5, 1, NOW_MS, event.fp)  # another request writes it
    loop = asyncio.get_running_loop()
    serving = world.serve(await world.slot())
    began = loop.time()
    waiting = world.admission.submit(event, began, wait_s=0.5)
    await until(lambda: world.resolver.by_deadline[0].timer is not None)
    await ended(serving)
    if won:
        world.resolver.by_deadline[0].accepted_at = NOW_MS
        await asyncio.sleep(0.7)
        assert not waiting.done()
        return
    assert kind_of(await waiting) is IN_PROGRESS
    assert 0.4 < loop.time() - began < 2.0
    await until(lambda: not world.queue.events)


async def test_a_request_that_has_waited_does_not_stay_in_memory_after_its_answer() -> None:
    """Not until the end of the time for which it would have waited: the queue no longer counts its bytes."""
    world = World()
    await world.topic_metadata.get("orders", time.monotonic())
    slot, began = await world.slot(), asyncio.get_running_loop().time()
    gate = world.keys.trouble.hold("mark")
    serving, sweeping = world.serve(slot), asyncio.create_task(world.resolver.sweep())
    writing = world.admission.submit(make_event("copied"), began)
    await world.keys.trouble.reached["mark"].wait()
    copies = [world.admission.submit(make_event("copied"), began, wait_s=4.0) for _ in range(3)]
    await until(lambda: all(request.timer is not None for request in [*world.resolver.by_deadline][1:]))
    gate.set()
    assert all(isinstance(answer, Committed) for answer in await asyncio.gather(writing, *copies))
    await until(lambda: not world.resolver.by_deadline)
    # The sweep keeps the last request that it has looked at.
    await until(lambda: len(requests_in_memory("copied")) <= 1, 2.0)
    await ended(serving)
    await ended(sweeping)


async def test_a_slot_that_waits_for_a_group_does_not_keep_the_last_one_in_memory() -> None:
    """A group has up to 8 MiB of events, and the queue counts only those without an answer."""
    world = World()
    await world.topic_metadata.get("orders", time.monotonic())
    sweeping = asyncio.create_task(world.resolver.sweep())
    keys = [f"last-{n}" for n in range(3)]
    asked = [world.submit(key) for key in keys]
    await steps()
    serving = world.serve(await world.slot())
    await asyncio.gather(*asked)
    assert world.keys_written() == [keys]
    await until(lambda: not world.resolver.by_deadline)
    # The sweep keeps the last request that it has looked at.
    await until(lambda: len(requests_in_memory(*keys)) <= 1, 2.0)
    await ended(serving)
    await ended(sweeping)


def requests_in_memory(*keys: str) -> list[WriteRequest]:
    """Find the requests with these keys; those of other tests may be in memory too."""
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, WriteRequest)]
    return [each for each in found if any(event.key in keys for event in each.events)]


async def test_requests_that_were_answered_do_not_stay_in_memory_behind_a_waiting_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # less than one answer: the last does not stay either
    monkeypatch.setattr(resolver, "RESOLVED_BYTES_KEPT", 100_000)
    world = World(request_timeout_ms=60_000)
    sweeping = asyncio.create_task(world.resolver.sweep())
    await world.topic_metadata.get("orders", time.monotonic())
    patient = make_event("patient")
    world.keys.server.freed[5] = 1
    world.keys.server.keys[patient.id] = Claimed(5, 1, NOW_MS, patient.fp)  # another request writes it
    world.admission.submit(patient, asyncio.get_running_loop().time(), wait_s=50.0)
    serving = world.serve(await world.slot())
    for n in range(60):
        await world.ask(make_event(str(n), value=b"x" * 200_000))
    await until(lambda: [request.events[0].key for request in world.resolver.by_deadline] == ["patient"])
    assert (
        sum(request.size for request in world.resolver.by_deadline)
        == world.resolver.by_deadline_bytes
        == world.queue.bytes
    )
    await ended(serving)
    await ended(sweeping)
