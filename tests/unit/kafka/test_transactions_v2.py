"""Tests transactions of version 2 (KIP-890): the bytes of their requests, and a producer's session with them."""

import asyncio
import struct
from typing import Any

import pytest
from aiokafka.errors import ConcurrentTransactions, NotLeaderForPartitionError
from aiokafka.protocol.transaction import AddOffsetsToTxnRequest
from aiokafka.record.default_records import DefaultRecordBatch

from service.kafka.admin import TRANSACTIONS_AUTO
from service.kafka.group_offsets import OFFSETS_TOPIC, GroupOffsets, Position, partition_of_group
from service.kafka.hanging import RecordCoordinates
from service.kafka.inspection import DescribeProducers, DescribeTransactions
from service.kafka.offset_commit import TxnOffsetCommit, TxnOffsetCommit_v5, TxnOffsetCommitAndAdd
from service.kafka.outcomes import (
    TRANSACTION_ABORTABLE,
    OffsetsRefused,
    TransactionAborted,
    TransactionFailed,
    TransactionOutcome,
)
from service.kafka.producer import TransactionalProducer
from service.kafka.protocol import (
    CODECS,
    AddPartitionsToTxnRequest,
    ApiVersionsRequest,
    EndedAndBumped,
    EndTxnAndBumpRequest,
    EndTxnRequest,
    Features,
    ProduceAndAddRequest,
    Produced,
    ProduceRequest,
)
from service.kafka.records import RecordMetadata
from tests.unit.fake_brokers import GONE, LEDGER, FakeClient, Met, failure, record, topics_of, transactional, write

CONCURRENT: int = ConcurrentTransactions.errno
NOT_LEADER: int = NotLeaderForPartitionError.errno
OFFSETS = GroupOffsets("g", "member-1", 7, (Position("a", 0, 5),))
OF_GROUP = OFFSETS_TOPIC, partition_of_group("g", 3)
ILLEGAL_GENERATION = 22
INVALID_EPOCH, INVALID_TXN_STATE, INVALID_ID_MAPPING = 47, 48, 49
# Requests in the 200 ms of the sends' timeout, with pauses of 1, 2, 4, 8, 16 ms, then 20 ms each.
REPEATED_MOST = 5 + (200 - 31) // 20 + 2

# ------------------------------------------------------------------------------------------------------- the bytes


def framed(request: Any) -> bytes:
    size, pieces = CODECS[type(request)].frame(request, 5, b"me")
    message = b"".join(pieces)
    assert struct.unpack(">i", message[:4]) == (size,) == (len(message) - 4,)
    return message[4:]


def head(api_key: int, version: int) -> bytes:
    """Make a request header of version 2: the client id is no compact string, and no tags follow."""
    return struct.pack(">hhi", api_key, version, 5) + b"\0\2me" + b"\0"


def test_a_produce_of_version_12_has_compact_fields_and_tags() -> None:
    """ProduceRequest.json: TransactionalId, Acks, TimeoutMs, TopicData [Name, PartitionData [Index, Records]]."""
    request = ProduceAndAddRequest("ns.slot.0", -1, 200, [("t", [(1, b"abc"), (2, bytes(200))])])
    assert framed(request) == head(0, 12) + (
        b"\x0ans.slot.0" + b"\xff\xff" + b"\0\0\0\xc8" + b"\2"
        b"\2t" + b"\3" + b"\0\0\0\1" + b"\4abc" + b"\0" + b"\0\0\0\2" + b"\xc9\1" + bytes(200) + b"\0" + b"\0" + b"\0"
    )


def test_an_end_txn_of_version_5_has_a_compact_name_and_tags() -> None:
    """EndTxnRequest.json: TransactionalId, ProducerId, ProducerEpoch, Committed."""
    for commit, encoded in ((True, b"\1"), (False, b"\0")):
        request = EndTxnAndBumpRequest("ns.slot.0", 12, 3, commit)
        assert framed(request) == head(26, 5) + b"\x0ans.slot.0" + bytes(7) + b"\x0c" + b"\0\3" + encoded + b"\0"


def test_an_api_versions_request_names_the_client() -> None:
    """ApiVersionsRequest.json: ClientSoftwareName, ClientSoftwareVersion."""
    assert framed(ApiVersionsRequest()) == head(18, 3) + b"\x0afencepost" + b"\x021" + b"\0"


def test_offsets_of_version_5_have_the_fields_of_version_3() -> None:
    request = TxnOffsetCommitAndAdd("ns.slot.0", 12, 3, GroupOffsets("g", "m", 7, (Position("t", 1, 5, "x"),), "i"))
    prepared = request.prepare({28: (0, 5)})
    assert (prepared.API_KEY, prepared.API_VERSION) == (28, 5)
    assert request.build(TxnOffsetCommit_v5).encode() == (
        b"\x0ans.slot.0\x02g" + bytes(7) + b"\x0c\0\3\0\0\0\7\x02m\x02i"
        b"\x02\x02t\x02\0\0\0\1" + bytes(7) + b"\5\xff\xff\xff\xff\x02x\0\0\0"
    )


ROW = struct.pack(">ihqqq", 1, 0, 77, 99, 3)
# Responses: correlation id and tags of the header, then the body.
PRODUCED = (
    b"\0\0\0\5" + b"\0" + b"\2" + b"\2t" + b"\3"
    + ROW + b"\1" + b"\0" + b"\0"
    + struct.pack(">ihqqq", 2, 87, -1, -1, -1)
    + b"\2" + b"\0\0\0\0" + b"\4bad" + b"\0" + b"\4why" + b"\1\0\5" + bytes(5)
    + b"\0" + b"\0\0\0\x09" + b"\0"
)  # fmt: skip
ENDED = b"\0\0\0\5" + b"\0" + struct.pack(">ihqh", 9, 0, 12, 4) + b"\0"
# Tags 0 to 2: the supported features, the epoch of the finalized ones, and these.
FINALIZED = b"\3" + b"\x11metadata.version" + b"\0\x1d\0\x1d\0" + b"\x14transaction.version" + b"\0\2\0\0\0"
VERSIONS = (
    b"\0\0\0\5" + b"\0\0" + b"\3" + struct.pack(">hhh", 0, 0, 13) + b"\0" + struct.pack(">hhh", 26, 0, 5) + b"\0"
    + b"\0\0\0\0" + b"\3" + b"\0\1\1" + b"\1\x08" + struct.pack(">q", 4) + b"\2" + bytes([len(FINALIZED)]) + FINALIZED
)  # fmt: skip


def test_responses_of_flexible_versions_are_decoded() -> None:
    produced = CODECS[ProduceAndAddRequest].decode(PRODUCED)
    assert produced == Produced([("t", [(1, 0, 77, 99, 3), (2, 87, -1, -1, -1)])], 9)
    assert CODECS[EndTxnAndBumpRequest].decode(ENDED) == EndedAndBumped(9, 0, 12, 4)
    assert CODECS[ApiVersionsRequest].decode(VERSIONS) == Features(0, 2)


def test_features_without_an_epoch_are_unknown_and_an_older_broker_answers_in_version_0() -> None:
    decode = CODECS[ApiVersionsRequest].decode
    assert decode(VERSIONS.replace(struct.pack(">q", 4), struct.pack(">q", -1))) == Features(0, 0)
    assert decode(b"\0\0\0\5" + b"\0\0" + b"\1" + b"\0\0\0\0" + b"\0") == Features(0, 0)
    assert decode(b"\0\0\0\5" + struct.pack(">hihhh", 35, 1, 18, 0, 2)) == Features(35, 0)


@pytest.mark.parametrize(
    ("kind", "response"),
    [(ProduceAndAddRequest, PRODUCED), (EndTxnAndBumpRequest, ENDED), (ApiVersionsRequest, VERSIONS)],
)
def test_a_truncated_response_is_an_error(kind: type, response: bytes) -> None:
    for cut in range(4, len(response)):
        with pytest.raises((struct.error, UnicodeDecodeError)):
            CODECS[kind].decode(response[:cut])


# ----------------------------------------------------------------------------------------------------- the session


def version_2(*nodes: int, epoch: int = 0) -> tuple[TransactionalProducer, FakeClient]:
    """Make a producer; its coordinator, node 1, and these nodes have finalized transactions of version 2."""
    producer, kafka = transactional(epoch=epoch, transactions=TRANSACTIONS_AUTO)
    kafka.versions = dict.fromkeys({1, *nodes}, 2)
    return producer, kafka


def kinds(kafka: FakeClient) -> list[type]:
    return [type(request) for _, request in kafka.requests if not isinstance(request, DescribeProducers)]


def writers(kafka: FakeClient) -> list[tuple[int, int, int]]:
    """List the producer id, epoch and base sequence of each batch that was sent."""
    found = []
    for request in kafka.sent((ProduceRequest, ProduceAndAddRequest)):
        for _, batches in topics_of(request):
            for _, raw in batches:
                batch = DefaultRecordBatch(bytes(raw))
                found.append((batch.producer_id, batch.producer_epoch, batch.base_sequence))
    return found


EARLY = [AddPartitionsToTxnRequest, ProduceRequest, ProduceRequest, EndTxnAndBumpRequest]
JOINING = [ProduceAndAddRequest, ProduceAndAddRequest, EndTxnAndBumpRequest]


@pytest.mark.parametrize("requests", [EARLY, JOINING])
async def test_the_epoch_rises_with_each_commit_however_its_partitions_were_added(requests: list[type]) -> None:
    """Each epoch's sequence numbers begin at 0, and its own commit names it.

    A transaction that began early has one request that adds partitions, and no Produce that does.
    """
    producer, kafka = version_2()
    for epoch in range(3):
        assert producer.epoch == epoch
        if requests is EARLY:
            producer.begin_early([("a", 0), LEDGER])
        await write(producer, record("a", 0), record("a", 0))
    assert kinds(kafka) == requests * 3
    assert [request.producer_epoch for request in kafka.sent(AddPartitionsToTxnRequest)] == (
        [0, 1, 2] if requests is EARLY else []
    )
    assert writers(kafka) == [(7, epoch, 0) for epoch in range(3) for _ in "ab"]
    assert [request.producer_epoch for request in kafka.sent(EndTxnAndBumpRequest)] == [0, 1, 2]


async def test_what_the_early_begin_has_not_added_is_added_by_a_request_of_its_own() -> None:
    producer, kafka = version_2()
    producer.begin_early([("a", 0), LEDGER])
    await write(producer, record("a", 0), record("b", 0))
    assert kinds(kafka) == [AddPartitionsToTxnRequest, *EARLY]
    assert [topics_of(add) for add in kafka.sent(AddPartitionsToTxnRequest)] == [
        [("a", [0]), (LEDGER[0], [0])],
        [("b", [0])],
    ]


async def test_an_early_begin_that_meets_the_markers_of_the_last_transaction_is_sent_again() -> None:
    """Each Produce would wait for them in the broker, which pauses for 20 ms before it tries again."""
    producer, kafka = version_2()
    concurrent = [CONCURRENT] * 4
    kafka.added = lambda topic, partition: concurrent.pop() if concurrent else 0
    producer.begin_early([("a", 0), LEDGER])
    await write(producer, record("a", 0))
    assert kinds(kafka) == [AddPartitionsToTxnRequest] * 2 + EARLY


async def test_an_early_begin_that_is_abandoned_is_aborted_under_an_epoch_of_its_own() -> None:
    producer, kafka = version_2()
    producer.begin_early([("a", 0), LEDGER])
    await producer.abandon()
    assert [end.transaction_result for end in kafka.sent(EndTxnAndBumpRequest)] == [False]
    await write(producer, record("a"))
    assert writers(kafka) == [(7, 1, 0)] * 2


async def test_a_new_producer_id_comes_with_the_last_epoch_s_commit() -> None:
    producer, kafka = version_2(epoch=32_766)
    kafka.next_producer = (8, 0)
    await write(producer, record("a"))
    assert (producer.producer_id, producer.epoch) == (8, 0)
    kafka.next_producer = None
    await write(producer, record("a"))
    assert writers(kafka) == [(7, 32_766, 0)] * 2 + [(8, 0, 0)] * 2
    assert kafka.sent(EndTxnAndBumpRequest)[1].producer_id == 8


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_an_end_takes_its_version_from_the_coordinator_s_next_connection_where_one_has_ended(
    is_allowed: bool,
) -> None:
    """EndTxn of version 1 would leave the epoch to the next transaction, which a late Produce could then join."""
    producer, kafka = version_2() if is_allowed else transactional()
    await producer.send([record("a")], LEDGER)
    kafka.connected = False
    await producer.commit(b"entries")
    assert kinds(kafka)[-1] is (EndTxnAndBumpRequest if is_allowed else EndTxnRequest)
    assert (producer.epoch, kafka.connected) == ((1, True) if is_allowed else (0, False))


async def test_an_abort_waits_for_the_last_markers_also_where_the_coordinator_s_connection_has_ended() -> None:
    producer, kafka = version_2()

    def refuses(topic: str, partition: int) -> int:
        kafka.connected = False
        return ILLEGAL_GENERATION

    kafka.offsets_committed = refuses
    kafka.states = ["PrepareCommit", "CompleteCommit"]
    with pytest.raises(OffsetsRefused):
        await producer.commit_offsets(OFFSETS)
    assert kinds(kafka)[1:] == [DescribeTransactions, DescribeTransactions, EndTxnAndBumpRequest]


async def test_an_end_without_the_next_producer_is_unknown() -> None:
    producer, kafka = version_2()
    kafka.next_producer = (-1, -1)
    failed = await failure(producer, record("a"))
    assert failed.outcome is TransactionOutcome.UNKNOWN


async def test_an_epoch_that_no_coordinator_could_fence_ends_the_session() -> None:
    """Brokers without KAFKA-20090 may name it, to an abort that comes after their own at the transaction's timeout."""
    producer, kafka = version_2(epoch=32_766)
    kafka.next_producer = (7, 32_767)
    producer.begin_early([("a", 0), LEDGER])
    with pytest.raises(TransactionFailed):
        await producer.abandon()
    with pytest.raises(TransactionFailed, match="closed"):
        await producer.send([record("a")], LEDGER)


async def test_a_partition_of_a_broker_without_version_2_is_added_by_the_coordinator() -> None:
    """During a roll, or where a connection is older than the finalized feature."""
    producer, kafka = version_2()
    kafka.leaders["b", 0] = 3
    await write(producer, record("a"), record("b"))
    (add,) = kafka.sent(AddPartitionsToTxnRequest)
    assert topics_of(add) == [("b", [0])]
    kinds_of_produce = (ProduceAndAddRequest, ProduceRequest)
    produced = [(node, type(request)) for node, request in kafka.requests if isinstance(request, kinds_of_produce)]
    assert produced[:2] == [(1, ProduceAndAddRequest), (3, ProduceRequest)]


async def test_without_a_coordinator_of_version_2_every_partition_is_added_and_the_epoch_stays() -> None:
    producer, kafka = transactional(transactions=TRANSACTIONS_AUTO)
    kafka.versions = {3: 2}
    kafka.leaders["a", 0] = 3
    await write(producer, record("a"))
    await write(producer, record("a"))
    assert kinds(kafka) == [AddPartitionsToTxnRequest, ProduceRequest, ProduceRequest, EndTxnRequest] * 2
    assert writers(kafka) == [(7, 0, 0), (7, 0, 0), (7, 0, 1), (7, 0, 1)]


async def test_a_producer_goes_over_to_version_2_with_the_next_transaction_after_a_reconnect() -> None:
    """And back: the next one goes on with the epoch and the sequence numbers that an EndTxn of version 1 has left."""
    producer, kafka = transactional(transactions=TRANSACTIONS_AUTO)
    await write(producer, record("a"))
    kafka.versions = {1: 2}
    await write(producer, record("a"))
    kafka.versions = {}
    await write(producer, record("a"))
    await write(producer, record("a"))
    assert writers(kafka) == [(7, 0, 0)] * 2 + [(7, 0, 1)] * 2 + [(7, 1, 0)] * 2 + [(7, 1, 1)] * 2


async def test_a_batch_waits_while_the_markers_of_the_last_transaction_are_written() -> None:
    """The same bytes again: the broker has appended nothing of a batch whose partition it could not add."""
    producer, kafka = version_2()
    waits = {("a", 0): 3, ("b", 0): 0}

    def produced(topic: str, partition: int) -> Met:
        if waits[topic, partition]:
            waits[topic, partition] -= 1
            return CONCURRENT
        return RecordMetadata(4, -1)

    kafka.produced = produced
    assert await write(producer, record("a"), record("b")) == [RecordMetadata(4, 5)] * 2
    assert [len(kafka.batches(topic)) for topic in ("a", "b")] == [4, 1]
    assert {sequence for _, sequence, _ in kafka.batches("a")} == {0}


async def test_the_first_batch_of_a_partition_is_taken_before_its_others_are_sent() -> None:
    """A later one could be appended before it: the first would then be out of sequence."""
    producer, kafka = version_2()
    codes = [CONCURRENT, CONCURRENT]
    kafka.produced = lambda topic, partition: codes.pop() if codes else RecordMetadata(4, -1)
    await write(producer, *[record("a", 0, b"x" * 300, most=500) for _ in range(3)])
    assert [sequence for _, sequence, _ in kafka.batches("a")] == [0, 0, 0, 1, 2]
    assert kinds(kafka) == [ProduceAndAddRequest] * 3 + [ProduceRequest] * 2 + [
        ProduceAndAddRequest,
        EndTxnAndBumpRequest,
    ]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_topic_is_not_to_blame_for_markers_of_the_last_transaction_that_do_not_come(hangs: bool) -> None:
    """Nor for batches that wait, unsent, for those markers: healthy topics would be isolated for nothing."""
    producer, kafka = version_2(2, 3)
    kafka.leaders |= {("b", 0): 2, ("orders", 0): 3}
    answers: dict[str, Met] = {"a": CONCURRENT, "b": RecordMetadata(4, -1), "orders": None if hangs else CONCURRENT}
    kafka.produced = lambda topic, partition: answers[topic]
    failed = await failure(producer, *[record(topic, 0, b"x" * 300, most=500) for topic in answers for _ in "12"])
    assert (failed.outcome, set(failed.stuck)) == (TransactionOutcome.ABORTED, {"orders"} if hangs else set())


@pytest.mark.parametrize("code", [INVALID_EPOCH, INVALID_TXN_STATE, INVALID_ID_MAPPING])
async def test_a_topic_is_not_to_blame_for_a_producer_that_has_lost_its_transaction(code: int) -> None:
    """Another producer id has replaced its own, or the coordinator has aborted the transaction at its timeout.

    A partition that is added answers the first with INVALID_PRODUCER_ID_MAPPING; brokers without KAFKA-19690 answer the
    second with INVALID_TXN_STATE.
    """
    producer, kafka = version_2()
    kafka.produced = lambda topic, partition: code
    failed = await failure(producer, record("a"))
    assert not failed.stuck


async def test_a_first_batch_that_fails_is_followed_by_no_other() -> None:
    producer, kafka = version_2()
    kafka.produced = lambda topic, partition: 7
    failed = await failure(producer, *[record("a", 0, b"x" * 300, most=500) for _ in range(3)])
    assert (failed.outcome, set(failed.stuck)) == (TransactionOutcome.ABORTED, {"a"})
    assert len(kafka.batches("a")) == 1


async def test_a_batch_joins_at_the_new_leader_where_the_former_one_refused_it() -> None:
    producer, kafka = version_2()

    def moves(topic: str, partition: int) -> Met:
        first = kafka.leaders.setdefault(("a", 0), 2) and len(kafka.batches("a")) == 1
        return NOT_LEADER if first else RecordMetadata(1, -1)

    kafka.produced = moves
    await write(producer, record("a"))
    sends = [(node, type(each)) for node, each in kafka.requests if isinstance(each, ProduceAndAddRequest)]
    assert sends == [(1, ProduceAndAddRequest), (2, ProduceAndAddRequest), (1, ProduceAndAddRequest)]
    assert not kafka.sent(ProduceRequest), "a former leader adds no partition"


@pytest.mark.parametrize(("of_a", "of_b"), [(2, 1), (1, 2), (3, 3)])
async def test_batches_that_wait_for_the_first_ones_follow_a_leader_that_moves(of_a: int, of_b: int) -> None:
    """No batch is sent beside a first one that has not joined."""
    producer, kafka = version_2(2, 3)
    kafka.leaders["b", 0] = 2

    def moves(topic: str, partition: int) -> Met:
        if topic == "b" and kafka.leaders["b", 0] == 2:
            kafka.leaders["b", 0] = 3
            return NOT_LEADER
        return RecordMetadata(4, -1)

    kafka.produced = moves
    await write(producer, *[record(topic, 0, b"x" * 300, most=500) for topic in of_a * "a" + of_b * "b"])
    assert [sequence for _, sequence, _ in kafka.batches("a")] == [*range(of_a)]
    assert [sequence for _, sequence, _ in kafka.batches("b")] == [0, *range(of_b)]
    firsts = [(node, topics_of(each)[0][0]) for node, each in kafka.requests if isinstance(each, ProduceAndAddRequest)]
    assert firsts == [(1, "a"), (2, "b"), (3, "b"), (1, LEDGER[0])]


async def test_missing_markers_are_waited_for_under_the_id_that_lacks_them_though_the_last_epoch_gives_another() -> (
    None
):
    producer, kafka = version_2(epoch=32_766)
    kafka.next_producer = (9, 0)
    answers = kafka.send
    late = [{("a", 0): 5}] * 3  # open after the EndTxn, until this many requests were answered

    async def send(node: int, request: Any) -> Any:
        if isinstance(request, DescribeProducers):
            kafka.open_in = late.pop() if late else {}
        return await answers(node, request)

    kafka.send = send  # type: ignore[method-assign]
    assert await producer.hanging.end_own([("a", 0)], commit=True) == [("a", 0)]
    assert (producer.producer_id, late) == (9, [])


async def test_a_commit_without_an_answer_is_unknown_and_the_producer_is_dead() -> None:
    producer, kafka = version_2()
    kafka.ended = GONE
    failed = await failure(producer, record("a"))
    assert failed.outcome is TransactionOutcome.UNKNOWN
    assert producer.epoch == 0
    again = await failure(producer, record("a"))
    assert "closed" in str(again)
    assert len(kafka.sent(EndTxnAndBumpRequest)) == 1


async def test_a_hanging_transaction_is_ended_by_a_transaction_that_adds_its_partitions() -> None:
    """No Produce adds a partition to a transaction without data."""
    producer, kafka = version_2()
    kafka.open_in = {("a", 0): 3}
    await producer.hanging.end_own([("a", 0)], commit=True)
    assert kinds(kafka)[:2] == [AddPartitionsToTxnRequest, EndTxnAndBumpRequest]
    assert producer.epoch == 1


# -------------------------------------------------------------------------------------------- offsets of a group


async def test_offsets_add_their_partition_by_themselves() -> None:
    producer, kafka = version_2()
    assert await producer.commit_offsets(OFFSETS) == RecordCoordinates(OF_GROUP, 55)
    await write(producer, record("a"))
    assert kinds(kafka) == [TxnOffsetCommitAndAdd, ProduceAndAddRequest, ProduceAndAddRequest, EndTxnAndBumpRequest]
    (commit,) = kafka.sent(TxnOffsetCommitAndAdd)
    assert commit.epoch == 0


async def test_offsets_join_a_transaction_that_began_early() -> None:
    producer, kafka = version_2()
    producer.begin_early([("a", 0), LEDGER])
    assert await producer.commit_offsets(OFFSETS) == RecordCoordinates(OF_GROUP, 55)
    await write(producer, record("a"))
    assert kinds(kafka) == [AddPartitionsToTxnRequest, TxnOffsetCommitAndAdd, *EARLY[1:]]


async def test_offsets_begin_the_transaction_whose_early_begin_met_the_markers_of_the_last_one() -> None:
    """They wait for the markers, so that no Produce does: each may add its own partition."""
    producer, kafka = version_2()
    kafka.added = lambda topic, partition: CONCURRENT
    producer.begin_early([("a", 0), LEDGER])
    await producer.commit_offsets(OFFSETS)
    await write(producer, record("a"))
    assert kinds(kafka) == [AddPartitionsToTxnRequest, TxnOffsetCommitAndAdd, *JOINING]


async def test_offsets_wait_for_the_markers_of_the_last_transaction() -> None:
    producer, kafka = version_2()
    codes = [CONCURRENT, CONCURRENT]
    kafka.offsets_committed = lambda topic, partition: codes.pop() if codes else 0
    await producer.commit_offsets(OFFSETS)
    assert len(kafka.sent(TxnOffsetCommitAndAdd)) == 3


@pytest.mark.parametrize("hangs", ["never", "at first", "later"])
async def test_a_group_is_not_to_blame_for_markers_of_the_last_transaction_that_do_not_come(hangs: str) -> None:
    """Its next batches would be isolated for nothing. The broker gets the request with pauses that grow."""
    producer, kafka = version_2()
    await producer.commit_offsets(OFFSETS)
    await write(producer)
    before = len(kafka.sent(TxnOffsetCommitAndAdd))

    def committed(topic: str, partition: int) -> int:
        kafka.coordinator_hangs = hangs == "later"
        return CONCURRENT

    kafka.offsets_committed = committed
    kafka.coordinator_hangs = hangs == "at first"
    with pytest.raises(TransactionFailed) as failed:
        await producer.commit_offsets(OFFSETS)
    assert (failed.value.offsets_error is None) is (hangs == "never")
    assert len(kafka.sent(TxnOffsetCommitAndAdd)) - before <= REPEATED_MOST


async def test_an_abort_asks_with_growing_pauses_for_the_markers_of_the_last_transaction() -> None:
    producer, kafka = version_2()
    kafka.offsets_committed = lambda topic, partition: ILLEGAL_GENERATION
    kafka.states = ["PrepareCommit"] * 1_000
    with pytest.raises(TransactionFailed):
        await producer.commit_offsets(OFFSETS)
    assert 1 < len(kafka.sent(DescribeTransactions)) <= REPEATED_MOST


async def test_a_group_whose_coordinator_lacks_version_2_is_added_by_the_transaction_s() -> None:
    producer, kafka = version_2()
    kafka.leaders[OF_GROUP] = 3
    await producer.commit_offsets(OFFSETS)
    assert kinds(kafka)[:2] == [AddOffsetsToTxnRequest, TxnOffsetCommit]


async def test_refused_offsets_are_aborted_under_an_epoch_of_their_own() -> None:
    """A late request of them cannot join the next transaction, also if it had not joined this one."""
    producer, kafka = version_2()
    kafka.offsets_committed = lambda topic, partition: ILLEGAL_GENERATION
    kafka.states = ["PrepareCommit", "PrepareCommit", "CompleteCommit"]
    with pytest.raises(OffsetsRefused):
        await producer.commit_offsets(OFFSETS)
    assert kinds(kafka) == [TxnOffsetCommitAndAdd, *[DescribeTransactions] * 3, EndTxnAndBumpRequest]
    (end,) = kafka.sent(EndTxnAndBumpRequest)
    assert end.transaction_result is False
    assert producer.epoch == 1
    await write(producer, record("a"))
    assert writers(kafka) == [(7, 1, 0)] * 2


# --------------------------------------------------------------------------------------------- TRANSACTION_ABORTABLE


@pytest.mark.parametrize("step", ["data", "ledger", "offsets"])
async def test_an_abortable_transaction_is_aborted_and_the_session_goes_on(step: str) -> None:
    """Before the next write the leaders are asked again: the abort may have left out a marker."""
    producer, kafka = version_2()
    if step == "data":
        kafka.produced = lambda topic, partition: TRANSACTION_ABORTABLE
    elif step == "ledger":
        kafka.of_ledger = TRANSACTION_ABORTABLE
    else:
        kafka.offsets_committed = lambda topic, partition: TRANSACTION_ABORTABLE
    with pytest.raises(TransactionAborted):
        await (producer.commit_offsets(OFFSETS) if step == "offsets" else write(producer, record("a")))
    assert [end.transaction_result for end in kafka.sent(EndTxnAndBumpRequest)] == [False]
    asked = len(kafka.sent(DescribeProducers))
    kafka.produced, kafka.of_ledger = lambda topic, partition: RecordMetadata(4, -1), RecordMetadata(9, -1)
    await write(producer, record("a"))
    assert [end.transaction_result for end in kafka.sent(EndTxnAndBumpRequest)] == [False, True]
    assert producer.epoch == 2
    assert len(kafka.sent(DescribeProducers)) > asked


async def test_a_late_marker_of_an_abort_is_awaited_before_the_next_write() -> None:
    producer, kafka = version_2()
    kafka.of_ledger = TRANSACTION_ABORTABLE
    with pytest.raises(TransactionAborted):
        await write(producer, record("a"))
    kafka.of_ledger = RecordMetadata(9, -1)
    kafka.open_in, kafka.states = {("a", 0): 3}, ["PrepareAbort", "CompleteAbort"]
    await write(producer, record("a"))
    assert (producer.epoch, kafka.states) == (2, [])


async def test_what_an_abort_left_open_is_met_before_the_next_commit() -> None:
    producer, kafka = version_2()
    kafka.produced = lambda topic, partition: TRANSACTION_ABORTABLE
    with pytest.raises(TransactionAborted):
        await write(producer, record("a"))
    kafka.open_in = {("a", 0): 3}
    failed = await failure(producer, record("a"))
    assert set(failed.hanging) == {("a", 0)}


@pytest.mark.parametrize("why", ["version 1", "a batch without an answer", "the abort fails", "the commit"])
async def test_an_abortable_transaction_ends_the_session_unless_its_abort_is_clean(why: str) -> None:
    producer, kafka = version_2(2)
    kafka.leaders["b", 0] = 2
    kafka.produced = lambda topic, partition: TRANSACTION_ABORTABLE
    match why:
        case "version 1":
            kafka.versions = {}
        case "a batch without an answer":
            kafka.produced = lambda topic, partition: GONE if topic == "b" else TRANSACTION_ABORTABLE
        case "the abort fails":
            kafka.ended = GONE
        case "the commit":
            kafka.produced = lambda topic, partition: RecordMetadata(4, -1)
            kafka.ended = TRANSACTION_ABORTABLE
    with pytest.raises(TransactionFailed) as failed:
        await write(producer, record("a"), record("b"))
    assert not failed.value.stuck or why == "a batch without an answer"
    expected = TransactionOutcome.UNKNOWN if why == "the commit" else TransactionOutcome.ABORTED
    assert failed.value.outcome is expected
    with pytest.raises(TransactionFailed, match="closed"):
        await write(producer, record("a"))


async def test_a_silent_abort_of_an_abortable_transaction_ends_the_session() -> None:
    producer, kafka = version_2()
    kafka.produced = lambda topic, partition: TRANSACTION_ABORTABLE
    kafka.ended = None
    async with asyncio.timeout(5):
        failed = await failure(producer, record("a"))
    assert failed.outcome is TransactionOutcome.ABORTED
