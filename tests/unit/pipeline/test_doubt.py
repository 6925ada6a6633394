"""Tests groups without a clean commit: which requests are answered, requeued, or parked until the recovery."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from service.claims.keys import StoreGeneration
from service.claims.states import Claimed, Delivered, SlotState
from service.contract.wire.headers import KEY_HEADER
from service.core.problems import (
    IN_PROGRESS,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    TOO_LARGE,
    UNKNOWN_TOPIC,
    Problem,
    StoreAway,
    StoreLost,
    StoreUnanswered,
)
from service.kafka.outcomes import RecordError, TransactionAborted, TransactionFailed, TransactionOutcome
from service.kafka.records import Record, RecordMetadata
from service.kafka.topic_admin import Topic
from service.pipeline.request import Committed
from service.pipeline.unwritten import ABORTED_PAUSE_S
from tests.unit.fakes import NOW_MS, FakeProducer, World, end_of_term, ended, kind_of, make_event, steps, until

GONE = RecordError(UNKNOWN_TOPIC, "it is not there")
BIG = RecordError(TOO_LARGE, "it is too large")


@pytest.mark.parametrize("verdict", [TransactionOutcome.UNKNOWN, TransactionOutcome.FENCED])
async def test_a_refusal_is_no_answer_where_a_commit_was_asked_for(verdict: TransactionOutcome) -> None:
    """The error was overcome by a retry: the event may be in Kafka."""
    world = World()
    slot = await world.slot()
    world.producers[0].trouble.before["write"].append(TransactionFailed(verdict, "late", {"orders": BIG}))
    answer = world.submit("a")
    await end_of_term(world.serve(slot))
    assert not answer.done()
    serving = await world.serve_again(slot)
    assert isinstance(await answer, Committed)
    await ended(serving)


async def test_a_refused_event_that_was_alone_in_its_group_is_answered() -> None:
    world = World()
    slot = await world.slot()
    world.producers[0].trouble.before["write"].append(
        TransactionFailed(TransactionOutcome.ABORTED, "no", {"orders": BIG})
    )
    answer = world.submit("a")
    await end_of_term(world.serve(slot))
    assert kind_of(await answer) is TOO_LARGE


async def test_the_refusal_of_an_atomic_batch_names_the_refused_topic() -> None:
    world = World()
    slot = await world.slot()
    world.producers[0].trouble.before["write"].append(
        TransactionFailed(TransactionOutcome.ABORTED, "refused", {"other": BIG})
    )
    serving = world.serve(slot)
    events = [make_event("a/0", "orders"), make_event("a/1", "other")]
    for event in events:
        await world.checks.check(event, time.monotonic())
    answer = await world.admission.submit_atomic(events[0].key, events, (b"w" * 16, b"f" * 8), time.monotonic())
    assert isinstance(answer, Problem)
    assert answer.detail == "topic: other: it is too large"
    await end_of_term(serving)


async def test_a_poisoned_event_is_answered_after_a_try_alone_and_the_other_event_is_written() -> None:
    world = World()
    slot = await world.slot()
    poison, good = world.submit("poison", "orders"), world.submit("good", "other")
    await steps()
    world.producers[0].trouble.before["write"].append(
        TransactionFailed(TransactionOutcome.ABORTED, "no", {"orders": BIG})
    )
    await end_of_term(world.serve(slot))
    assert not poison.done()
    await world.recover(slot)
    world.producers[0].trouble.before["write"].append(
        TransactionFailed(TransactionOutcome.ABORTED, "no", {"orders": BIG})
    )
    world.writer.unwritten.recovered()
    await end_of_term(world.serve(slot))
    assert kind_of(await poison) is TOO_LARGE
    await world.recover(slot)
    serving = world.serve(slot)
    assert isinstance(await good, Committed)
    await ended(serving)


async def test_an_event_is_retried_before_a_missing_topic_is_answered_404() -> None:
    """Not every broker knows a new topic yet."""
    world = World()
    slot = await world.slot()
    answer = world.submit("a")
    world.producers[0].trouble.before["write"].append(
        TransactionFailed(TransactionOutcome.ABORTED, "no", {"orders": GONE})
    )
    await end_of_term(world.serve(slot))
    assert not answer.done()
    await world.recover(slot)
    world.producers[0].trouble.before["write"].append(
        TransactionFailed(TransactionOutcome.ABORTED, "no", {"orders": GONE})
    )
    world.writer.unwritten.recovered()
    await end_of_term(world.serve(slot))
    assert kind_of(await answer) is UNKNOWN_TOPIC


async def test_the_retry_for_a_missing_topic_leaves_time_for_a_new_topic_to_reach_every_broker() -> None:
    """Another slot would ask within some milliseconds, and 404 is final for a client."""
    world = World(request_timeout_ms=2_000)
    slot, other = await world.slot(), await world.slot(1)
    for n in (0, 1):
        world.producers[n].trouble.before["write"].append(
            TransactionFailed(TransactionOutcome.ABORTED, "no", {"orders": GONE})
        )
    answer = world.submit("a")
    failing, serving = world.serve(slot), world.serve(other)
    await asyncio.wait([failing, serving], return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.1)
    for producer in world.producers.values():  # by now every broker knows the topic
        producer.trouble.before["write"].clear()
    assert isinstance(await answer, Committed)
    await ended(failing)
    await ended(serving)


@pytest.mark.parametrize("kind", [BIG, GONE])
async def test_the_key_of_a_refused_event_is_released_before_its_slot_is_recovered(kind: RecordError) -> None:
    world = World()
    slot, other = await world.slot(), await world.slot(1)
    failed = TransactionFailed(TransactionOutcome.ABORTED, "no", {"orders": kind})
    world.producers[0].trouble.before["write"].append(failed)
    world.producers[1].trouble.before["write"].append(failed)
    answer = world.submit("a")
    await end_of_term(world.serve(slot))
    if kind is GONE:
        await end_of_term(world.serve(other))
    else:
        world.producers[1].trouble.before["write"].clear()
    assert kind_of(await answer) is kind.kind
    assert not world.keys.is_claimed("a")
    assert slot.in_doubt == other.in_doubt == 0
    third = await world.slot(2)
    serving = world.serve(third)
    assert isinstance(await asyncio.wait_for(world.ask(make_event("a", "other")), 3.0), Committed)
    await ended(serving)


async def test_an_event_that_keeps_failing_is_tried_a_few_times_and_the_others_of_its_topic_are_written() -> None:
    """An error of one record, or a partition without a leader: no broker says that this event is to blame."""
    world = World(request_timeout_ms=1_500)
    sweeping = asyncio.create_task(world.resolver.sweep())
    poison = world.submit("poison")
    others = [world.submit(str(n)) for n in range(5)]
    await steps()
    tries = 0

    def meet_poison(n: int) -> None:
        producer: Any = world.producers[n]
        send = producer.send

        async def fail(records: Sequence[Record], *rest: Any) -> list[RecordMetadata]:
            nonlocal tries
            if any((KEY_HEADER, b"poison") in record.headers for record in records):
                tries += 1
                await asyncio.sleep(0.005)
                raise TransactionFailed(TransactionOutcome.ABORTED, "UnknownError()", stuck={"orders"})
            places: list[RecordMetadata] = await send(records, *rest)
            return places

        producer.send = fail

    async def live(n: int) -> None:
        slot = await world.slot(n)
        while True:
            meet_poison(n)
            with contextlib.suppress(TransactionFailed):
                await world.writer.serve(slot)
            await asyncio.sleep(0.1)
            await world.recover(slot)
            world.writer.unwritten.recovered()

    slots = [asyncio.create_task(live(n)) for n in range(3)]
    for answer in others:
        assert isinstance(await asyncio.wait_for(answer, 0.5), Committed)
    assert kind_of(await poison) is NOT_WRITTEN
    assert tries <= 5
    for task in (*slots, sweeping):
        await ended(task)


@pytest.mark.parametrize("given_up", [True, False])
async def test_a_request_that_fails_repeatedly_is_requeued_after_a_pause_or_with_the_recovery(given_up: bool) -> None:
    """Or with the recovery, if its claim may stand: once, in either case."""
    world = World()
    answer = world.submit("a")
    await steps()
    (request,) = world.resolver.by_deadline
    slots = [await world.slot(n) for n in range(4)]
    for n, verdict in enumerate((TransactionOutcome.UNKNOWN, TransactionOutcome.ABORTED, TransactionOutcome.ABORTED)):
        world.producers[n].trouble.before["write"].append(TransactionFailed(verdict, "no answer"))
        if n == 2 and not given_up:
            world.keys.trouble.before["release"].append(StoreUnanswered("no answer"))
        await end_of_term(world.serve(slots[n]))
        assert request.aborts == n
        if verdict is TransactionOutcome.UNKNOWN:
            await world.recover(slots[n])
            world.writer.unwritten.recovered()
    serving = world.serve(slots[3])
    await asyncio.sleep(0.2)
    assert not answer.done()
    assert world.writer.unwritten.parked == ([] if given_up else [request])
    if not given_up:
        await asyncio.sleep(0.3)
        assert not any(world.queue._waiting.values())
        await world.recover(slots[2])
        world.writer.unwritten.recovered()
    assert isinstance(await asyncio.wait_for(answer, 1.0), Committed)
    assert not serving.done()
    await ended(serving)


async def test_a_request_from_groups_that_failed_for_another_topic_is_retried_without_a_pause() -> None:
    world = World()
    slots = [await world.slot(n) for n in range(3)]
    fine = world.submit("fine", "other")
    for n, topic in enumerate(("orders", "third")):
        world.submit(f"hangs-{n}", topic)
        await steps()
        stuck = TransactionFailed(TransactionOutcome.ABORTED, "NotEnoughReplicas", stuck={topic})
        world.producers[n].trouble.before["write"].append(stuck)
        world.queue._isolated.clear()
        await end_of_term(world.serve(slots[n]))
    world.queue._isolated.clear()
    serving = world.serve(slots[2])
    assert isinstance(await asyncio.wait_for(fine, 0.1), Committed)
    await ended(serving)


async def test_a_stuck_topic_is_isolated_and_the_other_topics_are_written_by_another_slot() -> None:
    world = World()
    slot = await world.slot()
    hangs, fine = world.submit("hangs", "orders"), world.submit("fine", "other")
    await steps()
    stuck = TransactionFailed(TransactionOutcome.ABORTED, "TimeoutError()", stuck={"orders"})
    world.producers[0].trouble.before["write"].append(stuck)
    await end_of_term(world.serve(slot))
    await world.recover(slot)
    world.writer.unwritten.recovered()
    hung = world.producers[0].trouble.hold("write")
    first, second = await world.slot(1), slot
    serving = [world.serve(second), world.serve(first)]  # one is blocked by the hanging transaction, the other is not
    assert isinstance(await asyncio.wait_for(fine, 3.0), Committed)
    assert not hangs.done()
    assert world.keys_written(1) == [["fine"]]
    hung.set()
    assert isinstance(await hangs, Committed)
    assert world.keys_written(0) == [["hangs"]]
    for task in serving:
        await ended(task)


@pytest.mark.parametrize("stuck", [{"orders"}, {"orders", "other"}, set[str]()])
async def test_requests_of_a_transaction_that_was_aborted_before_its_commit_are_retried_without_the_recovery(
    stuck: set[str],
) -> None:
    """The recovery may take hours: the abort markers of a partition need its replicas."""
    world = World()
    slot, other = await world.slot(), await world.slot(1)
    hangs, fine, gone = world.submit("hangs", "orders"), world.submit("fine", "other"), world.submit("gone", "other")
    await steps()
    hung = world.producers[0].trouble.hold("write")
    failing = world.serve(slot)
    await until(lambda: world.keys.is_claimed("gone"))
    requests = {request.events[0].key: request for request in world.resolver.by_deadline}
    world.resolver.resolve(requests["gone"], Problem(OUTCOME_UNKNOWN, "its deadline"))
    failed = TransactionFailed(TransactionOutcome.ABORTED, "NotEnoughReplicas", stuck=stuck)
    world.producers[0].trouble.before["write"].append(failed)
    hung.set()
    await end_of_term(failing)
    assert kind_of(await gone) is OUTCOME_UNKNOWN
    assert not any(world.keys.is_claimed(key) for key in ("hangs", "fine", "gone"))
    assert slot.in_doubt == 0
    serving = world.serve(other)
    for answer in (hangs, fine):
        assert isinstance(await asyncio.wait_for(answer, 3.0), Committed)
    again = await asyncio.wait_for(world.submit("gone", "other"), 3.0)
    assert isinstance(again, Committed)
    assert not again.replayed
    written = [key for keys in world.keys_written(1) for key in keys]
    assert sorted(written) == ["fine", "gone", "hangs"]
    await ended(serving)


@pytest.mark.parametrize("step", ["write", "commit"])
async def test_a_group_whose_transaction_was_abortable_is_sent_again_in_the_same_term(step: str) -> None:
    world = World()
    slot = await world.slot()
    term = slot.term
    world.producers[0].trouble.before[step].append(TransactionAborted("a broker said so"))
    serving = world.serve(slot)
    assert isinstance(await world.submit("a"), Committed)
    assert (slot.term, slot.state, len(world.producers)) == (term, SlotState.READY, 1)
    assert world.keys_written() == [["a"]]
    await ended(serving)


async def test_a_group_whose_transaction_was_abortable_waits_for_the_recovery_if_its_claims_may_stand() -> None:
    world = World()
    slot = await world.slot()
    world.producers[0].trouble.before["write"].append(TransactionAborted("a broker said so"))
    world.keys.trouble.before["release"].append(StoreAway("a test"))
    answer = world.submit("a")
    assert isinstance(await end_of_term(world.serve(slot)), StoreUnanswered)
    assert not answer.done()
    serving = await world.serve_again(slot)
    assert isinstance(await answer, Committed)
    await ended(serving)


async def test_a_request_whose_transaction_was_aborted_is_answered_503_at_its_deadline() -> None:
    world = World(request_timeout_ms=200)
    sweeping = asyncio.create_task(world.resolver.sweep())
    slot = await world.slot()
    answer = world.submit("a")
    world.producers[0].trouble.before["write"].append(TransactionFailed(TransactionOutcome.ABORTED, "TimeoutError()"))
    await end_of_term(world.serve(slot))
    assert not answer.done()
    assert kind_of(await answer) is NOT_WRITTEN
    await ended(sweeping)


async def test_a_wait_for_another_s_write_ends_with_409_in_time_also_after_an_abort() -> None:
    """The claim of its own that stood before was released with the abort."""
    world = World()
    await world.topic_metadata.get("orders", time.monotonic())
    slot, other = await world.slot(), await world.slot(1)
    event = make_event("patient")
    began = asyncio.get_running_loop().time()
    answer = world.admission.submit(event, began, wait_s=1.0)
    world.producers[0].trouble.before["write"].append(TransactionFailed(TransactionOutcome.ABORTED, "TimeoutError()"))
    await end_of_term(world.serve(slot))
    world.keys.server.freed[5] = 1
    world.keys.server.keys[event.id] = Claimed(5, 1, NOW_MS, event.fp)  # another process has claimed it since
    serving = world.serve(other)
    await until(lambda: world.resolver.by_deadline[0].timer is not None)
    await ended(serving)
    assert kind_of(await asyncio.wait_for(answer, 3.0)) is IN_PROGRESS


async def test_a_released_request_is_requeued_once_even_if_another_slot_recovers_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    slot, other = await world.slot(), await world.slot(1)
    answers = [world.submit("hangs", "orders"), world.submit("fine", "other")]
    await steps()
    released, proceed = asyncio.Event(), asyncio.Event()
    release = world.keys.release

    async def late(generation: StoreGeneration, slot: int, term: int, ids: Sequence[bytes]) -> None:
        await release(generation, slot, term, ids)
        released.set()
        await proceed.wait()

    monkeypatch.setattr(world.keys, "release", late)
    stuck = TransactionFailed(TransactionOutcome.ABORTED, "NotEnoughReplicas", stuck={"orders"})
    world.producers[0].trouble.before["write"].append(stuck)
    failing = world.serve(slot)
    await released.wait()
    world.writer.unwritten.recovered()  # another slot was recovered meanwhile
    hung = world.producers[1].trouble.hold("write")
    serving = world.serve(other)
    await asyncio.sleep(0.05)
    proceed.set()
    await end_of_term(failing)
    monkeypatch.undo()
    await world.recover(slot)
    third = world.serve(slot)
    await asyncio.sleep(0.1)
    hung.set()
    assert isinstance(await asyncio.wait_for(answers[1], 3.0), Committed)
    assert [await ended(third), await ended(serving)] == [None, None]
    assert [*world.keys_written(0), *world.keys_written(1)].count(["fine"]) == 1


@pytest.mark.parametrize(
    ("verdict", "stuck"),
    [
        (TransactionOutcome.UNKNOWN, {"orders"}),
        (TransactionOutcome.FENCED, {"orders"}),
        (TransactionOutcome.UNKNOWN, set[str]()),
    ],
)
async def test_requests_of_a_transaction_whose_commit_may_have_run_wait_for_the_recovery(
    verdict: TransactionOutcome, stuck: set[str]
) -> None:
    world = World()
    slot, other = await world.slot(), await world.slot(1)
    answers = [world.submit("a", "orders"), world.submit("b", "other")]
    await steps()
    world.producers[0].trouble.before["write"].append(TransactionFailed(verdict, "it ended", stuck=stuck))
    await end_of_term(world.serve(slot))
    serving = world.serve(other)
    await asyncio.sleep(0.1)
    assert not any(answer.done() for answer in answers)
    assert world.producers[1].written == []
    assert world.keys.is_claimed("b")
    await ended(serving)


@pytest.mark.parametrize("step", ["write", "commit"])
async def test_a_cancellation_from_within_a_write_leaves_its_requests_to_the_recovery(step: str) -> None:
    world = World()
    slot = await world.slot()
    world.producers[0].trouble.before[step].append(asyncio.CancelledError())
    answer = world.submit("a")
    assert isinstance(await end_of_term(world.serve(slot)), TransactionFailed)
    assert slot.in_doubt == 1
    serving = await world.serve_again(slot)
    assert isinstance(await asyncio.wait_for(answer, 3), Committed)
    await ended(serving)


async def test_a_bug_while_the_records_are_made_leaves_the_requests_to_the_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    slot = await world.slot()
    with monkeypatch.context() as patched:
        patched.setattr("service.pipeline.writer.records_of", lambda *_: dict[str, int]()["of ours"])
        answer = world.submit("a")
        assert isinstance(await end_of_term(world.serve(slot)), TransactionFailed)
    serving = await world.serve_again(slot)
    assert isinstance(await asyncio.wait_for(answer, 3), Committed)
    await ended(serving)


@pytest.mark.parametrize("error", [StoreLost("another"), StoreAway("OOM"), StoreUnanswered("no answer")], ids=repr)
async def test_requests_whose_claims_cannot_be_released_wait_for_the_recovery(error: Exception) -> None:
    world = World()
    slot, other = await world.slot(), await world.slot(1)
    answers = [world.submit("a", "orders"), world.submit("b", "other")]
    await steps()
    stuck = TransactionFailed(TransactionOutcome.ABORTED, "NotEnoughReplicas", stuck={"orders"})
    world.producers[0].trouble.before["write"].append(stuck)
    world.keys.trouble.before["release"].append(error)
    silence = world.keys.trouble.hold("release")
    failing = world.serve(slot)
    await asyncio.sleep(0.05)
    world.writer.unwritten.recovered()  # another slot was recovered meanwhile: what waited for that is requeued
    silence.set()
    assert isinstance(await end_of_term(failing), TransactionFailed)
    meanwhile = world.serve(other)
    await asyncio.sleep(0.02)
    assert not any(answer.done() for answer in answers), "their own claims are no stranger's"
    assert slot.in_doubt == 2
    await ended(meanwhile)
    serving = await world.serve_again(slot)
    for answer in answers:
        assert isinstance(await asyncio.wait_for(answer, 3.0), Committed)
    await ended(serving)


async def test_a_partition_with_too_few_replicas_is_in_no_transaction() -> None:
    """Its markers could not be written, and the slot could begin no other transaction."""
    world = World()
    slot = await world.slot()
    serving = world.serve(slot)
    known = await world.ask(make_event("known", partition=1))
    world.topic_admin.topics["orders"] = Topic("orders", 3, {}, frozenset({1, 2}))
    world.topic_metadata.invalidate("orders")
    await world.topic_metadata.get("orders", time.monotonic())
    asked = [make_event("good", partition=0), make_event("short", partition=1), make_event("any")]
    answers = [world.ask(event) for event in (*asked, make_event("known", partition=1))]
    good, short, anywhere, again = [await answer for answer in answers]
    assert isinstance(good, Committed)
    assert isinstance(anywhere, Committed)
    assert [delivered.partition for _, delivered in anywhere.deliveries] == [0]
    assert isinstance(short, Problem)
    assert (short.kind, "partition 1 of orders has too few replicas" in short.detail) == (NOT_WRITTEN, True)
    assert isinstance(known, Committed)
    assert again == replace(known, replayed=True)
    await until(lambda: not world.keys.is_claimed("short"))
    assert {record.partition for records in world.producers[0].written[1:] for record in records} == {0}
    # It is the only request, so no transaction is begun.
    world.producers[0].begun_early = None
    assert kind_of(await world.ask(make_event("short", partition=2))) is NOT_WRITTEN
    assert world.producers[0].begun_early is None
    await ended(serving)


@pytest.mark.parametrize("verdict", [TransactionOutcome.ABORTED, TransactionOutcome.UNKNOWN])
async def test_the_key_of_an_event_that_was_left_out_is_released_before_the_slot_is_recovered(
    verdict: TransactionOutcome,
) -> None:
    """It was answered 503, and was in no transaction: a retry must not get 409 until the recovery."""
    world = World()
    slot = await world.slot()
    answers = [world.submit("short", "other"), world.submit("hangs", "orders")]
    await steps()
    world.topic_admin.topics["other"] = Topic("other", 3, {}, under_min_isr=frozenset({0, 1, 2}))
    await world.topic_metadata.get("other", time.monotonic(), after_arrival=True)
    world.producers[0].trouble.before["write"].append(TransactionFailed(verdict, "TimeoutError()"))
    await end_of_term(world.serve(slot))
    assert kind_of(await answers[0]) is NOT_WRITTEN
    assert not world.keys.is_claimed("short")
    assert world.keys.is_claimed("hangs") == (verdict is TransactionOutcome.UNKNOWN)
    answers[1].cancel()


async def test_a_topic_that_failed_is_looked_up_before_it_is_written_again() -> None:
    world = World()
    slot = await world.slot()
    await world.topic_metadata.get("orders", time.monotonic())
    refused = TransactionFailed(TransactionOutcome.ABORTED, "NotEnoughReplicas", stuck={"orders"})
    world.producers[0].trouble.before["write"].append(refused)
    failing = world.serve(slot)
    answer = world.ask(make_event("a", partition=1))
    await end_of_term(failing)
    world.topic_admin.topics["orders"] = Topic("orders", 3, {}, frozenset({1}))
    serving = await world.serve_again(slot)
    assert kind_of(await answer) is NOT_WRITTEN
    assert world.producers[0].written == []
    await ended(serving)


async def test_an_event_in_doubt_that_was_written_is_no_replay() -> None:
    """The recovery's replay of the ledger found it: this is the request's own first answer."""
    world = World()
    slot = await world.slot()
    answer = world.submit("a")
    world.producers[0].trouble.before["write"].append(TransactionFailed(TransactionOutcome.UNKNOWN, "no answer"))
    await end_of_term(world.serve(slot))
    mark = world.keys.server.keys[make_event("a").id]
    world.keys.server.keys[make_event("a").id] = Delivered(mark.at, mark.fp, "orders", 1, 44, NOW_MS)
    serving = await world.serve_again(slot)
    found = await answer
    assert isinstance(found, Committed)
    assert (found.deliveries[0][1].offset, found.replayed) == (44, False)
    assert world.keys_written() == []
    await ended(serving)


LEDGER = {"fencepost.ledger": BIG}


class Narrow(FakeProducer):
    """A slot whose ledger accepts this many entries at most."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    async def commit(self, ledger_record: bytes) -> int:
        if len(self.records_sent) > self.most:
            raise TransactionFailed(TransactionOutcome.ABORTED, "the ledger's record is too large", LEDGER)
        return await super().commit(ledger_record)


async def test_a_group_that_is_too_large_for_the_ledger_is_split_and_all_its_events_are_written() -> None:
    """Its max.message.bytes was lowered: otherwise all requests of the group would get 503 for ever."""
    world = World()
    slot = await world.slot()
    asked = [world.submit(f"k{n}") for n in range(40)]
    await asyncio.sleep(0.02)
    groups: list[list[str]] = []
    for _ in range(10):
        slot._producer = world.producers[0] = Narrow(7)
        serving = world.serve(slot)
        pending = {answer for answer in asked if not answer.done()}
        await asyncio.wait([serving, asyncio.create_task(asyncio.wait(pending))], return_when=asyncio.FIRST_COMPLETED)
        groups += world.keys_written()
        if all(answer.done() for answer in asked):
            break
        await world.recover(slot)
    assert all(isinstance(answer.result(), Committed) for answer in asked)
    assert sum(map(len, groups)) == 40
    assert len(groups) <= 10, "more groups than it takes"
    await ended(serving)


async def test_an_atomic_batch_that_the_ledger_does_not_take_is_refused() -> None:
    """It cannot be split, and would be refused again."""
    world = World()
    slot = await world.slot()
    slot._producer = Narrow(1)
    events = [make_event("w/0"), make_event("w/1")]
    await world.checks.check(events[0], time.monotonic())
    answer = asyncio.create_task(
        world.admission.submit_atomic(events[0].key, events, (b"w" * 16, b"f" * 8), time.monotonic())
    )
    await end_of_term(world.serve(slot))
    assert kind_of(await answer) is TOO_LARGE
    assert not world.keys.is_claimed("w/0")


async def test_a_single_event_that_the_ledger_does_not_take_is_retried_until_the_ledger_takes_it() -> None:
    """And ends a term now and then, not one after the other."""
    world = World()
    slot = await world.slot()
    answer = world.submit("a")
    most, terms = 0, 0
    started = time.monotonic()
    while not answer.done():
        if terms == 3:
            most = 1
        slot._producer = Narrow(most)
        serving = world.serve(slot)
        await asyncio.wait([serving, answer], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            break
        assert isinstance(serving.exception(), TransactionFailed)
        terms += 1
        await world.recover(slot)
    assert isinstance(answer.result(), Committed)
    assert terms == 3
    assert time.monotonic() > started + 3 * ABORTED_PAUSE_S
    await ended(serving)
