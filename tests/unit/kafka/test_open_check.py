"""Tests that a partition is written to only after its leader has reported no open transaction of the producer id."""

import pytest
from aiokafka.errors import NotLeaderForPartitionError, RecordListTooLargeError, TopicAuthorizationFailedError
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest, EndTxnRequest
from structlog.testing import capture_logs

from service.kafka import open_check as module
from service.kafka.group_offsets import OFFSETS_TOPIC, GroupOffsets, Position, partition_of_group
from service.kafka.hanging import RecordCoordinates
from service.kafka.inspection import DescribeProducers
from service.kafka.outcomes import TransactionOutcome
from service.kafka.records import RecordMetadata
from service.slots.slot import Slot
from tests.unit.fake_brokers import GONE, LEDGER, FakeConnection, Met, failure, record, transactional, write
from tests.unit.fakes import World


async def test_a_partition_is_described_once_and_the_new_ones_of_a_group_in_one_request() -> None:
    producer, kafka = transactional(clear=False)
    for _ in range(3):
        await write(producer, record("a", 0), record("b", 1))
    await write(producer, record("a", 0), record("a", 1))
    assert [each.by_topic for each in kafka.sent(DescribeProducers)] == [
        {"a": [0], "b": [1], "ns.ledger": [0]},
        {"a": [1]},
    ]


async def test_after_another_connection_the_leader_is_asked_again() -> None:
    """The broker may have been unreachable, and lack markers of this very term."""
    producer, kafka = transactional(clear=False)
    await write(producer, record("a"))
    another = FakeConnection(kafka, 1)
    kafka.connection = lambda node: another  # type: ignore[method-assign]
    await write(producer, record("a"))
    await write(producer, record("a"))
    assert len(kafka.sent(DescribeProducers)) == 2


async def test_a_group_with_a_hanging_partition_adds_no_partition_to_its_transaction() -> None:
    producer, kafka = transactional(clear=False)
    kafka.open_in = {("a", 1): 691}
    producer.begin_early([("a", 1), LEDGER])
    failed = await failure(producer, record("a", 0), record("a", 1))
    assert (failed.outcome, set(failed.hanging), set(failed.stuck)) == (TransactionOutcome.ABORTED, {("a", 1)}, set())
    assert not kafka.sent(AddPartitionsToTxnRequest)


@pytest.mark.parametrize(
    ("states", "hangs"),
    [
        (["PrepareCommit", "PrepareCommit", "CompleteCommit"], False),
        ([], True),
        (["PrepareCommit"] * 1_000, True),
        ([NotImplementedError()], True),
    ],
)
async def test_a_marker_that_is_late_does_not_count_as_hanging(states: list[str | BaseException], hangs: bool) -> None:
    """The coordinator still writes it. What is open after that, or when the time for the sends is over, hangs.

    Brokers older than 3.0 do not tell whether they still write it.
    """
    producer, kafka = transactional(clear=False)
    await write(producer, record("b"))
    kafka.open_in, kafka.states = {("a", 0): 4}, states
    if not hangs:
        assert await write(producer, record("a")) == [RecordMetadata(4, 5)]
        return
    failed = await failure(producer, record("a"))
    assert (failed.outcome, set(failed.hanging), set(failed.stuck)) == (TransactionOutcome.ABORTED, {("a", 0)}, set())
    assert not failed.is_bug


async def test_a_late_marker_is_awaited_where_an_isolated_group_asks_its_leader() -> None:
    offsets = GroupOffsets("g", "member-1", 7, (Position("a", 0, 5),))
    of_group = OFFSETS_TOPIC, partition_of_group("g", 3)
    producer, kafka = transactional()
    await producer.commit_offsets(offsets)
    await write(producer)
    kafka.open_in, kafka.states = {of_group: 55}, ["PrepareCommit", "CompleteCommit"]
    assert await producer.commit_offsets(offsets, ask_leader=True) == RecordCoordinates(of_group, 55)
    assert not kafka.states


async def test_a_batch_follows_its_partition_to_a_new_leader_whatever_hangs_there() -> None:
    """The partition is in the transaction: to give it up would abort what this session has committed there."""
    producer, kafka = transactional(clear=False)
    await write(producer, record("a"))
    answers = [NotLeaderForPartitionError.errno]

    def moves(topic: str, partition: int) -> Met:
        kafka.leaders["a", 0] = 2
        kafka.open_in = {("a", 0): 4}  # the record of the first transaction
        return answers.pop() if answers else RecordMetadata(5, -1)

    kafka.produced = moves
    assert await write(producer, record("a")) == [RecordMetadata(5, 5)]
    assert [request.transaction_result for request in kafka.sent(EndTxnRequest)] == [True, True]


async def test_a_missing_permission_to_describe_is_logged_once_and_events_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_logged", set())
    producer, kafka = transactional(clear=False)
    kafka.refused = {("a", n): TopicAuthorizationFailedError.errno for n in range(2)}
    with capture_logs() as logs:
        assert await write(producer, record("a", 0)) == [RecordMetadata(4, 5)]
        assert await write(producer, record("a", 1)) == [RecordMetadata(4, 5)]
    assert [(each["topic"], each["why"]) for each in logs] == [("a", "the service has no permission to Read the topic")]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [(GONE, TransactionOutcome.UNKNOWN), (RecordListTooLargeError.errno, TransactionOutcome.ABORTED)],
)
async def test_a_transaction_whose_ledger_record_may_be_written_is_in_doubt(
    answer: Exception | int, verdict: TransactionOutcome
) -> None:
    """A hanging one is committed later, so it must not be answered "not written" before the recovery."""
    producer, kafka = transactional()
    kafka.of_ledger = answer
    assert (await failure(producer, record("a"))).outcome is verdict


async def test_a_slot_is_cut_off_when_a_broker_has_ended_a_connection() -> None:
    world = World()
    slot: Slot = await world.slot()
    assert not slot.cut_off
    world.producers[0].cut_off = True
    assert slot.cut_off
