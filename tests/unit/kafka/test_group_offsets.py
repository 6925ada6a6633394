"""Tests the offsets of a group in a transaction: the group's partition, the request's bytes, refusals and aborts."""

import pytest
from aiokafka.protocol.transaction import AddOffsetsToTxnRequest

from service.core.problems import FORBIDDEN_GROUP, NOT_WRITTEN, OFFSETS_REFUSED, STALE_MEMBER
from service.kafka import offset_commit as module
from service.kafka.group_offsets import (
    AWAY,
    NOT_KEPT,
    OFFSETS_TOPIC,
    REFUSALS,
    GroupOffsets,
    Position,
    group_in,
    partition_of_group,
)
from service.kafka.hanging import RecordCoordinates
from service.kafka.inspection import DescribeProducers
from service.kafka.offset_commit import TxnOffsetCommit, TxnOffsetCommit_v3
from service.kafka.outcomes import OffsetsRefused, TransactionFailed, TransactionOutcome
from service.kafka.protocol import AddPartitionsToTxnRequest, EndTxnRequest
from service.kafka.session import ProducerSession
from tests.unit.fake_brokers import LEDGER, record, transactional, write

OFFSETS = GroupOffsets("g", "member-1", 7, (Position("a", 0, 5), Position("a", 1, 6, "seen"), Position("b", 0, 2**40)))
OF_GROUP = OFFSETS_TOPIC, partition_of_group("g", 3)
CONCURRENT, ILLEGAL_GENERATION, UNKNOWN_TOPIC_CODE, LOADING, FORBIDDEN, FENCED = 51, 22, 3, 14, 30, 90
NOT_AVAILABLE = 15


@pytest.mark.parametrize(
    ("group", "partition"),
    [
        ("hello", 99162322 % 50),
        ("polygenelubricants", 0),  # its hash is the least of all numbers
        ("é𝄞", (31 * (31 * 233 + 0xD834) + 0xDD1E) % 50),  # a pair of surrogates are two units
    ],
)
def test_a_groups_partition_is_that_of_javas_hash(group: str, partition: int) -> None:
    assert partition_of_group(group, 50) == partition


def test_a_group_is_found_for_each_partition() -> None:
    for partition in range(50):
        assert partition_of_group(group_in(partition, 50, "ns.slot.0."), 50) == partition


def test_the_request_has_member_and_generation() -> None:
    """As kafka-protocol's description of version 3 has it: compact texts and arrays, with tagged fields behind each."""
    request = TxnOffsetCommit("ns.slot.0", 12, 3, GroupOffsets("g", "m", 7, (Position("t", 1, 5, "x"),), "i"))
    assert request.build(TxnOffsetCommit_v3).encode() == (
        b"\x0ans.slot.0\x02g" + bytes(7) + b"\x0c\0\3\0\0\0\7\x02m\x02i"
        b"\x02\x02t\x02\0\0\0\1" + bytes(7) + b"\5\xff\xff\xff\xff\x02x\0\0\0"
    )
    without = TxnOffsetCommit("ns.slot.0", 12, 3, GroupOffsets("g", "m", 7, (Position("t", 1, 5),)))
    assert b"\x02m\x00\x02\x02t" in without.build(TxnOffsetCommit_v3).encode()


async def test_offsets_and_records_are_in_one_transaction() -> None:
    producer, kafka = transactional()
    producer.begin_early([("a", 0), LEDGER])
    place = await producer.commit_offsets(OFFSETS)
    assert place == RecordCoordinates(OF_GROUP, 55)
    await write(producer, record("a", 0))
    kinds = [type(request) for _, request in kafka.requests if not isinstance(request, DescribeProducers)]
    assert kinds.index(AddOffsetsToTxnRequest) < kinds.index(TxnOffsetCommit) < kinds.index(EndTxnRequest)
    (end,) = kafka.sent(EndTxnRequest)
    assert end.transaction_result is True
    assert len(kafka.sent(AddPartitionsToTxnRequest)) <= 2
    (commit,) = kafka.sent(TxnOffsetCommit)
    assert (commit.transactional_id, commit.producer_id, commit.epoch) == ("ns.slot.0", 7, 0)


async def test_offsets_alone_begin_the_transaction() -> None:
    producer, kafka = transactional()
    await producer.commit_offsets(OFFSETS)
    await write(producer)
    kinds = [type(request) for _, request in kafka.requests]
    assert kinds.index(AddOffsetsToTxnRequest) < kinds.index(AddPartitionsToTxnRequest)
    (end,) = kafka.sent(EndTxnRequest)
    assert end.transaction_result is True


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ILLEGAL_GENERATION, STALE_MEMBER),
        (25, STALE_MEMBER),
        (69, STALE_MEMBER),
        (82, STALE_MEMBER),
        (110, STALE_MEMBER),
        (113, STALE_MEMBER),
        (27, NOT_WRITTEN),
        (FORBIDDEN, FORBIDDEN_GROUP),
        (12, OFFSETS_REFUSED),
        (28, OFFSETS_REFUSED),
        (10, OFFSETS_REFUSED),
        (18, OFFSETS_REFUSED),
        (-1, NOT_WRITTEN),
        (UNKNOWN_TOPIC_CODE, NOT_WRITTEN),
    ],
)
async def test_a_refusal_aborts_the_transaction_and_the_producer_goes_on(code: int, kind: object) -> None:
    producer, kafka = transactional()
    kafka.offsets_committed = lambda topic, partition: code
    with pytest.raises(OffsetsRefused) as refused:
        await producer.commit_offsets(OFFSETS)
    assert refused.value.error.kind is kind
    (end,) = kafka.sent(EndTxnRequest)
    assert end.transaction_result is False
    kafka.offsets_committed = lambda topic, partition: 0
    await producer.commit_offsets(OFFSETS)
    await write(producer, record("a", 0))
    assert [end.transaction_result for end in kafka.sent(EndTxnRequest)] == [False, True]


async def test_a_group_that_may_not_be_read_begins_no_transaction() -> None:
    """EndTxn without a transaction would be refused as an invalid state."""
    producer, kafka = transactional()
    kafka.offsets_added = FORBIDDEN
    with pytest.raises(OffsetsRefused):
        await producer.commit_offsets(OFFSETS)
    assert kafka.sent(EndTxnRequest) == []
    producer.begin_early([("a", 0), LEDGER])
    with pytest.raises(OffsetsRefused):
        await producer.commit_offsets(OFFSETS)
    assert len(kafka.sent(EndTxnRequest)) == 1


async def test_if_kafka_keeps_some_of_the_offsets_the_leader_is_asked_before_the_next_ones() -> None:
    """The marker of the abort may never come there, and the next commit would then publish what was refused."""
    producer, kafka = transactional()
    kafka.offsets_committed = lambda topic, partition: UNKNOWN_TOPIC_CODE if topic == "b" else 0
    with pytest.raises(OffsetsRefused):
        await producer.commit_offsets(OFFSETS)
    kafka.open_in = {OF_GROUP: 55}
    kafka.offsets_committed = lambda topic, partition: 0
    with pytest.raises(TransactionFailed) as failed:
        await producer.commit_offsets(OFFSETS)
    assert (failed.value.outcome, set(failed.value.hanging)) == (TransactionOutcome.ABORTED, {OF_GROUP})
    assert failed.value.offsets_error is NOT_KEPT, "its next batches would end a term each, as long as it hangs"
    assert len(kafka.sent(TxnOffsetCommit)) == 1


async def test_a_group_whose_partition_has_no_leader_is_refused_and_the_producer_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    producer, kafka = transactional()

    async def without_leader(*_: object) -> int:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(ProducerSession, "find_leader", without_leader)
        with pytest.raises(OffsetsRefused) as refused:
            await producer.commit_offsets(OFFSETS)
    assert refused.value.error.kind is NOT_WRITTEN
    assert kafka.sent(AddOffsetsToTxnRequest) == kafka.sent(EndTxnRequest) == []
    await producer.commit_offsets(OFFSETS)
    await write(producer)


async def test_a_loading_coordinator_is_asked_again() -> None:
    producer, kafka = transactional()
    codes = [LOADING] * 3 + [0] * 3
    kafka.offsets_committed = lambda topic, partition: codes.pop(0)
    await producer.commit_offsets(OFFSETS)
    assert len(kafka.sent(TxnOffsetCommit)) == 2
    await write(producer)


async def test_a_producer_ends_if_the_groups_partition_belongs_to_the_transaction_and_takes_no_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kafka writes no marker there either, and the transactional id begins no other transaction until it does."""
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    producer, kafka = transactional()
    kafka.offsets_committed = lambda topic, partition: NOT_AVAILABLE
    with pytest.raises(TransactionFailed) as failed:
        await producer.commit_offsets(OFFSETS)
    assert (failed.value.outcome, failed.value.offsets_error) == (TransactionOutcome.ABORTED, NOT_KEPT)
    assert kafka.sent(EndTxnRequest) == []
    with pytest.raises(TransactionFailed):
        await write(producer)


async def test_a_coordinator_that_hangs_amid_the_request_fails_its_group() -> None:
    producer, kafka = transactional(timeout_ms=300)
    await producer.commit_offsets(OFFSETS)
    await write(producer)
    kafka.coordinator_hangs = True
    with pytest.raises(TransactionFailed) as failed:
        await producer.commit_offsets(OFFSETS)
    assert (failed.value.outcome, failed.value.offsets_error) == (TransactionOutcome.ABORTED, AWAY)


async def test_a_leader_that_must_answer_first_and_hangs_costs_no_session() -> None:
    producer, kafka = transactional(timeout_ms=300)
    await producer.commit_offsets(OFFSETS)
    await write(producer)
    kafka.coordinator_hangs = True
    with pytest.raises(OffsetsRefused) as refused:
        await producer.commit_offsets(OFFSETS, ask_leader=True)
    assert refused.value.error is AWAY
    assert len(kafka.sent(AddOffsetsToTxnRequest)) == 1
    kafka.coordinator_hangs = False
    await write(producer, record("a", 0))


async def test_a_transaction_coordinator_that_hangs_is_no_fault_of_the_group() -> None:
    producer, kafka = transactional(timeout_ms=300)
    kafka.offsets_added = None
    with pytest.raises(TransactionFailed) as failed:
        await producer.commit_offsets(OFFSETS)
    assert failed.value.offsets_error is None


@pytest.mark.parametrize(("code", "outcome"), [(FENCED, TransactionOutcome.FENCED), (48, TransactionOutcome.ABORTED)])
async def test_any_other_answer_ends_the_session(code: int, outcome: TransactionOutcome) -> None:
    producer, kafka = transactional()
    kafka.offsets_committed = lambda topic, partition: code
    with pytest.raises(TransactionFailed) as failed:
        await producer.commit_offsets(OFFSETS)
    assert failed.value.outcome is outcome
    assert kafka.sent(EndTxnRequest) == []
    with pytest.raises(TransactionFailed):
        await producer.commit_offsets(OFFSETS)


async def test_an_abort_without_an_answer_ends_the_session() -> None:
    producer, kafka = transactional()
    kafka.offsets_committed = lambda topic, partition: ILLEGAL_GENERATION
    kafka.ended = ConnectionError("lost")
    with pytest.raises(TransactionFailed):
        await producer.commit_offsets(OFFSETS)
    with pytest.raises(TransactionFailed):
        await producer.send([], LEDGER)


async def test_a_hidden_topic_of_offsets_is_asked_for_nothing() -> None:
    """With no permission to Describe it, the coordinator is looked up, and the ledger cannot name the partition."""
    producer, kafka = transactional()
    kafka.unknown = {OFFSETS_TOPIC}
    assert await producer.commit_offsets(OFFSETS) is None
    assert (0, "look-up of g") in kafka.requests
    assert kafka.sent(DescribeProducers) == []


async def test_what_hangs_in_the_topic_of_offsets_is_ended_by_a_groups_name() -> None:
    """Kafka adds no internal topic by AddPartitionsToTxn."""
    producer, kafka = transactional()
    await producer.hanging.end_own([("a", 1), OF_GROUP], commit=True)
    (add,) = kafka.sent(AddOffsetsToTxnRequest)
    assert partition_of_group(add._group_id, 3) == OF_GROUP[1]
    assert add._group_id.startswith("ns.slot.0.")
    (end,) = kafka.sent(EndTxnRequest)
    assert end.transaction_result is True


async def test_what_may_not_be_ended_there_does_not_keep_the_slot_from_its_recovery() -> None:
    producer, kafka = transactional()
    kafka.offsets_added = FORBIDDEN
    kafka.open_in = {OF_GROUP: 55}
    await producer.hanging.end_own([OF_GROUP], commit=True)
    assert kafka.sent(EndTxnRequest) == []


def test_every_refusal_says_why() -> None:
    assert all(error.why for error in REFUSALS.values())
