"""Tests a producer's session with refusals, silence and partial answers of fake brokers."""

import asyncio
import contextlib
import time

import pytest
from aiokafka.errors import (
    ConcurrentTransactions,
    DuplicateSequenceNumber,
    LeaderNotAvailableError,
    NotLeaderForPartitionError,
    OperationNotAttempted,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
)
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
)
from aiokafka.record.default_records import DefaultRecordBatch
from structlog.testing import capture_logs

from service.core.metrics import Telemetry
from service.core.problems import FORBIDDEN_TOPIC, TOO_LARGE, UNKNOWN_TOPIC
from service.kafka import session as module
from service.kafka.admin import KafkaAdmin
from service.kafka.outcomes import RECORD_ERRORS, TransactionFailed, TransactionOutcome
from service.kafka.producer import TransactionalProducer
from service.kafka.records import COMPRESSED_LEAST_BYTES, COMPRESSION_CODECS, NOT_SENT, RecordMetadata
from service.kafka.session import ProducerSession
from tests.unit.fake_brokers import (
    FENCED,
    GONE,
    LEDGER,
    TOO_BIG,
    Met,
    failure,
    fake_inside,
    idempotent,
    record,
    topics_of,
    transactional,
    write,
)
from tests.unit.fakes import unreachable_kafka, until

# ------------------------------------------------------------------------------------------------- a transaction


async def test_a_transaction_is_four_requests_each_sent_once() -> None:
    producer, kafka = transactional()
    records = [record("a", 1), record("b", 0), record("a", 1), record("a", 0)]
    kafka.produced = lambda topic, partition: RecordMetadata(100 * partition, 77 if topic == "b" else -1)
    places = await producer.send(records, LEDGER)
    ledger_offset = await producer.commit(repr(places).encode())
    assert places == [RecordMetadata(100, 5), RecordMetadata(0, 77), RecordMetadata(101, 5), RecordMetadata(0, 5)]
    assert ledger_offset == 9
    assert [type(request).__name__ for _, request in kafka.requests] == [
        "AddPartitionsToTxnRequest",
        "ProduceRequest",
        "ProduceRequest",
        "EndTxnRequest",
    ]
    (add,) = kafka.sent(AddPartitionsToTxnRequest)
    assert topics_of(add) == [("a", [1, 0]), ("b", [0]), ("ns.ledger", [0])]
    (ledger,) = kafka.batches("ns.ledger")
    assert ledger == (0, 0, [repr(places).encode()])


async def test_sessions_are_renewed_between_two_transactions_and_never_amid_one() -> None:
    producer, kafka = transactional()
    producer.begin_early([("a", 0), LEDGER])
    kafka.has_due_session = True
    await write(producer, record("a", 0))
    assert "renewal" not in [request for _, request in kafka.requests]
    kafka.requests.clear()
    producer.begin_early([("a", 0), LEDGER])
    await asyncio.sleep(0.01)
    assert kafka.requests == [], "it waits for the renewal"
    await write(producer, record("a", 0))
    assert [request for _, request in kafka.requests].index("renewal") == 0
    assert len(kafka.sent(AddPartitionsToTxnRequest)) == 1


async def test_a_transaction_that_is_open_is_not_begun_again() -> None:
    producer, kafka = transactional()
    producer.begin_early([("a", 0), ("a", 1), LEDGER])
    await asyncio.sleep(0.01)
    assert [type(request).__name__ for _, request in kafka.requests] == ["AddPartitionsToTxnRequest"]
    await write(producer, record("a", 0))
    assert len(kafka.sent(AddPartitionsToTxnRequest)) == 1
    producer.begin_early([("a", 0), LEDGER])
    await write(producer, record("a", 1), record("a", 0))
    assert [topics_of(request) for request in kafka.sent(AddPartitionsToTxnRequest)[1:]] == [
        [("a", [0]), ("ns.ledger", [0])],
        [("a", [1])],
    ]
    assert [request.transaction_result for request in kafka.sent(EndTxnRequest)] == [True, True]


async def test_open_without_a_connection_leaves_the_begin_to_the_write() -> None:
    producer, kafka = transactional()
    kafka.connected = False
    producer.begin_early([("a", 0), LEDGER])
    await asyncio.sleep(0.01)
    assert not kafka.requests
    assert await write(producer, record("a")) == [RecordMetadata(4, 5)]
    assert len(kafka.sent(AddPartitionsToTxnRequest)) == 1
    producer.begin_early([("a", 0), LEDGER])
    await producer.abandon()
    assert len(kafka.sent(AddPartitionsToTxnRequest)) == 1


async def test_open_during_concurrent_transactions_is_left_to_the_write_and_needs_no_abort() -> None:
    """The markers of the previous transaction are still being written: nothing was done."""
    producer, kafka = transactional()
    concurrent = [ConcurrentTransactions.errno] * 2
    kafka.added = lambda topic, partition: concurrent.pop() if concurrent else 0
    producer.begin_early([("a", 0), LEDGER])
    await producer.abandon()
    assert len(kafka.sent(AddPartitionsToTxnRequest)) == 1
    assert not kafka.sent(EndTxnRequest)
    concurrent += [ConcurrentTransactions.errno] * 2
    producer.begin_early([("a", 0), LEDGER])
    assert await write(producer, record("a")) == [RecordMetadata(4, 5)]
    assert [topics_of(request) for request in kafka.sent(AddPartitionsToTxnRequest)[1:]] == [
        [("a", [0]), ("ns.ledger", [0])]
    ] * 2


async def test_an_opened_transaction_that_is_abandoned_is_aborted() -> None:
    producer, kafka = transactional()
    await producer.abandon()
    assert not kafka.requests
    producer.begin_early([("a", 0), LEDGER])
    await producer.abandon()
    assert [request.transaction_result for request in kafka.sent(EndTxnRequest)] == [False]


async def test_a_refused_open_is_left_to_the_write_and_needs_no_abort() -> None:
    producer, kafka = transactional()
    denied = TopicAuthorizationFailedError.errno
    kafka.added = lambda topic, partition: denied if topic == "secret" else 0
    producer.begin_early([("a", 0), ("secret", 0), LEDGER])
    await producer.abandon()
    assert not kafka.sent(EndTxnRequest)
    producer.begin_early([("a", 0), ("secret", 0), LEDGER])
    assert await write(producer, record("a")) == [RecordMetadata(4, 5)]
    producer.begin_early([("secret", 0), LEDGER])
    failed = await failure(producer, record("secret"))
    assert {topic: error.kind for topic, error in failed.record_errors.items()} == {"secret": FORBIDDEN_TOPIC}


async def test_open_does_not_wait_for_a_partition_without_a_leader() -> None:
    producer, kafka = transactional()
    kafka.leaderless = {"moves"}
    producer.begin_early([("a", 0), ("moves", 0), LEDGER])
    await producer.abandon()
    assert not kafka.requests


@pytest.mark.parametrize("last", ["write", "abandon"])
async def test_an_open_without_an_answer_aborts_the_transaction_and_sends_nothing_more(last: str) -> None:
    producer, kafka = transactional()
    kafka.added = lambda topic, partition: -1
    producer.begin_early([("a", 0), LEDGER])
    with pytest.raises(TransactionFailed) as raised:
        await (producer.abandon() if last == "abandon" else write(producer, record("a")))
    assert raised.value.outcome is TransactionOutcome.ABORTED
    assert not kafka.sent(ProduceRequest)
    assert not kafka.sent(EndTxnRequest)


async def test_each_leader_gets_a_request_of_its_own() -> None:
    producer, kafka = transactional()
    kafka.leaders = {("a", 0): 1, ("a", 1): 2, ("b", 0): 2}
    await write(producer, record("a", 0), record("a", 1), record("b", 0))
    produced = [
        (node, [topic for topic, _ in topics_of(r)]) for node, r in kafka.requests if isinstance(r, ProduceRequest)
    ]
    assert produced == [(1, ["a"]), (2, ["a", "b"]), (1, ["ns.ledger"])]


async def test_sequence_numbers_go_on_over_batches_and_writes_and_begin_again_at_their_end() -> None:
    producer, kafka = transactional()
    full = [record("a", 0, b"x" * 300, most=700) for _ in range(3)]
    assert await write(producer, *full, record("a", 1)) == [
        RecordMetadata(4, 5),
        RecordMetadata(5, 5),
        RecordMetadata(4, 5),
        RecordMetadata(4, 5),
    ]
    await write(producer, record("a", 0))
    assert [(partition, sequence) for partition, sequence, _ in kafka.batches("a")] == [(0, 0), (1, 0), (0, 2), (0, 3)]
    producer._session._sequences["a", 0] = 2**31 - 1
    await write(producer, record("a", 0), record("a", 0))
    await write(producer, record("a", 0))
    assert [sequence for _, sequence, _ in kafka.batches("a")][-2:] == [2**31 - 1, 1]


async def test_a_transaction_retries_while_the_markers_of_the_last_one_are_written() -> None:
    producer, kafka = transactional()
    answers = iter([ConcurrentTransactions.errno] * 6)
    kafka.added = lambda topic, partition: next(answers, 0)
    assert await write(producer, record("a")) == [RecordMetadata(4, 5)]
    assert len(kafka.sent(AddPartitionsToTxnRequest)) == 4, "each request adds two partitions"


# ------------------------------------------------------------------------------------------------------ refusals


async def test_a_refused_record_aborts_the_transaction_and_names_its_topic() -> None:
    producer, kafka = transactional()
    kafka.produced = lambda topic, partition: TOO_BIG if topic == "small" else RecordMetadata(1, -1)
    failed = await failure(producer, record("orders"), record("small"))
    assert {topic: error.kind for topic, error in failed.record_errors.items()} == {"small": TOO_LARGE}
    assert failed.outcome is TransactionOutcome.ABORTED
    assert not failed.stuck
    assert not kafka.sent(EndTxnRequest)


async def test_a_partition_that_may_not_be_added_blames_only_its_topic() -> None:
    """The broker then adds none of them; the others were "not attempted"."""
    producer, kafka = transactional()
    denied = TopicAuthorizationFailedError.errno
    kafka.added = lambda topic, partition: denied if topic == "secret" else OperationNotAttempted.errno
    failed = await failure(producer, record("orders"), record("secret"))
    assert {topic: error.kind for topic, error in failed.record_errors.items()} == {"secret": FORBIDDEN_TOPIC}
    assert not failed.stuck
    assert not kafka.sent(ProduceRequest)


async def test_the_leaders_of_many_topics_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, each request would ask for all topics before it too: minutes for a thousand topics."""
    monkeypatch.setattr(module, "METADATA_TIMEOUT_S", 0.03)
    for producer, kafka in (transactional(60_000), idempotent(60_000)):
        kafka.leaderless = {"a", "b"}
        records = [record("a"), record("b"), record("known")]
        with contextlib.suppress(TransactionFailed):
            await (
                write(producer, *records) if isinstance(producer, TransactionalProducer) else producer.write(records)
            )
        assert kafka.asked == [{"a", "b"}]


async def test_a_partition_that_no_broker_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METADATA_TIMEOUT_S", 0.03)
    producer, kafka = transactional(60_000)
    kafka.unknown = {"gone"}
    failed = await failure(producer, record("orders"), record("gone"))
    assert {topic: error.kind for topic, error in failed.record_errors.items()} == {"gone": UNKNOWN_TOPIC}
    assert not kafka.requests


# --------------------------------------------------------------------------------------------------------- doubt


@pytest.mark.parametrize("ended", [GONE, 51, 15, -1, RequestTimedOutError(), AssertionError()], ids=repr)
async def test_a_commit_without_a_clean_answer_is_unknown(ended: int | Exception) -> None:
    producer, kafka = transactional()
    kafka.ended = ended
    assert (await failure(producer, record("orders"))).outcome is TransactionOutcome.UNKNOWN
    assert len(kafka.sent(EndTxnRequest)) == 1


async def test_a_commit_that_is_silent_is_unknown() -> None:
    producer, kafka = transactional(150)
    kafka.ended = None
    assert (await failure(producer, record("orders"))).outcome is TransactionOutcome.UNKNOWN


@pytest.mark.parametrize(("throttle_ms", "names_quota"), [(60_000, True), (1, False), (0, False)])
async def test_a_timeout_under_a_quota_names_the_quota(throttle_ms: int, names_quota: bool) -> None:
    """Kafka answers at once, and then stops reading for the throttle time (KIP-219); the error must name the quota."""
    producer, kafka = transactional(150)
    kafka.throttle_ms, kafka.ended = throttle_ms, None
    failed = await failure(producer, record("orders"))
    by_quota = "TimeoutError(), Kafka throttles this client by 60000 ms: raise the quota of its user or client id"
    assert str(failed) == f"unknown: {by_quota if names_quota else 'TimeoutError()'}"
    assert producer.throttled_s == throttle_ms / 1000

    plain, kafka = idempotent(150)
    kafka.throttle_ms = throttle_ms
    answers: list[Met] = [RecordMetadata(4, -1), None]
    kafka.produced = lambda topic, partition: answers.pop(0)
    with capture_logs() as lines:
        for _ in range(2):
            await plain.write([record("a")])
    assert [(line["event"], "quota" in line) for line in lines] == [("not every record was written", names_quota)]


async def test_an_idempotent_producer_sends_nothing_before_the_throttle_time_is_over() -> None:
    """Kafka may read and append a request after its connection was given up: the record would be written twice."""
    plain, kafka = idempotent(600)
    kafka.throttle_ms = 60_000
    await plain.write([record("a")])
    assert plain.throttled_s == 60.0
    assert await plain.unthrottled_identity() is None
    assert await plain.write([record("b")]) == [NOT_SENT]
    assert len(kafka.sent(ProduceRequest)) == 1

    plain, kafka = idempotent(600)
    kafka.throttle_ms = 50
    await plain.write([record("a")])
    started = time.monotonic()
    (written,) = await plain.write([record("b")])
    assert isinstance(written, RecordMetadata)
    assert time.monotonic() - started > 0.04


async def test_a_failed_write_of_an_idempotent_producer_keeps_the_throttle_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection of the next session is not throttled before its first Produce, whose bytes are counted too."""

    async def start(session: ProducerSession, timeout_s: float) -> None:
        fake_inside(session)

    monkeypatch.setattr(ProducerSession, "start", start)
    plain, kafka = idempotent(600)
    kafka.throttle_ms, kafka.produced = 60_000, lambda topic, partition: TOO_BIG
    await plain.write([record("a")])
    assert kafka.closed
    assert plain.throttled_s == 60.0
    assert await plain.unthrottled_identity() is None
    assert await plain.write([record("b")]) == [NOT_SENT]

    plain, kafka = idempotent(600)
    kafka.throttle_ms, kafka.produced = 50, lambda topic, partition: TOO_BIG
    await plain.write([record("a")])
    started = time.monotonic()
    (written,) = await plain.write([record("b")])
    assert isinstance(written, RecordMetadata)
    assert time.monotonic() - started > 0.04
    assert plain.throttled_s == 0.0


@pytest.mark.parametrize("code", FENCED)
async def test_a_fencing_error_in_any_step_is_the_outcome_fenced(code: int) -> None:
    for step in ("added", "produced", "ended"):
        producer, kafka = transactional()
        if step == "ended":
            kafka.ended = code
        else:
            setattr(kafka, step, lambda topic, partition: code)
        failed = await failure(producer, record("orders"))
        assert (failed.outcome, failed.stuck) == (TransactionOutcome.FENCED, set()), step


async def test_a_false_offset_is_no_place() -> None:
    for met in (RecordMetadata(-1, -1), DuplicateSequenceNumber.errno):
        transaction, kafka = transactional()
        kafka.produced = lambda topic, partition, met=met: met  # type: ignore[misc]
        assert (await failure(transaction, record("orders"))).outcome is TransactionOutcome.ABORTED
        assert not kafka.sent(EndTxnRequest)


async def test_a_producer_refuses_a_step_out_of_order() -> None:
    producer, kafka = transactional()
    with pytest.raises(RuntimeError, match="ready cannot be committing"):
        await producer.commit(b"entries")
    await producer.send([record("orders")], LEDGER)
    with pytest.raises(RuntimeError, match="sent cannot be sending"):
        await producer.send([record("orders")], LEDGER)
    assert not kafka.sent(EndTxnRequest)
    await producer.commit(b"entries")
    assert len(kafka.sent(EndTxnRequest)) == 1


async def test_after_its_first_failure_a_producer_sends_nothing() -> None:
    """aiokafka's own producer would go on, and the next commit would publish the aborted records."""
    producer, kafka = transactional()
    kafka.produced = lambda topic, partition: DuplicateSequenceNumber.errno
    await failure(producer, record("orders"))
    sent = len(kafka.requests)
    for again in (producer.send([record("orders")], LEDGER), producer.commit(b"entries")):
        with pytest.raises(TransactionFailed) as raised:
            await again
        assert raised.value.outcome is TransactionOutcome.ABORTED
    assert len(kafka.requests) == sent


@pytest.mark.parametrize(
    ("step", "outcome"),
    [("produced", TransactionOutcome.ABORTED), ("ended", TransactionOutcome.UNKNOWN)],
)
async def test_a_cancellation_from_within_fails_the_transaction(step: str, outcome: TransactionOutcome) -> None:
    producer, kafka = transactional()
    if step == "produced":
        kafka.produced = lambda topic, partition: asyncio.CancelledError()
    else:
        kafka.ended = asyncio.CancelledError()
    failed = await failure(producer, record("orders"))
    assert (failed.outcome, failed.is_bug) == (outcome, True)
    with pytest.raises(TransactionFailed, match="the producer is closed"):
        await producer.send([record("orders")], LEDGER)


async def test_the_cancellation_of_the_caller_is_no_failed_transaction() -> None:
    producer, kafka = transactional(30_000)
    kafka.ended = None
    writing = asyncio.create_task(write(producer, record("orders")))
    await until(lambda: bool(kafka.sent(EndTxnRequest)))
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing


# --------------------------------------------------------------------------------------------------------- stuck


async def test_a_topic_without_an_answer_is_named_stuck() -> None:
    producer, kafka = transactional(150)
    kafka.leaders = {("hangs", 0): 2}
    kafka.produced = lambda topic, partition: None if topic == "hangs" else RecordMetadata(1, -1)
    failed = await failure(producer, record("orders"), record("hangs"))
    assert set(failed.stuck) == {"hangs"}
    assert failed.outcome is TransactionOutcome.ABORTED


async def test_a_batch_that_is_refused_by_a_former_leader_is_sent_to_the_new_one() -> None:
    """With the same sequence numbers: nothing of it was written."""
    producer, kafka = transactional()
    answers = iter([NotLeaderForPartitionError.errno, LeaderNotAvailableError.errno])

    def moves(topic: str, partition: int) -> Met:
        kafka.leaders["moves", 0] = 2
        return next(answers, RecordMetadata(1, -1)) if topic == "moves" else RecordMetadata(3, -1)

    kafka.produced = moves
    assert await write(producer, record("orders"), record("moves")) == [RecordMetadata(3, 5), RecordMetadata(1, 5)]
    assert [sequence for _, sequence, _ in kafka.batches("moves")] == [0, 0, 0]
    assert len(kafka.batches("orders")) == 1
    nodes = [node for node, request in kafka.requests if isinstance(request, ProduceRequest)]
    assert nodes == [1, 2, 2, 1]


async def test_a_batch_is_not_sent_again_behind_a_later_one_that_was_taken() -> None:
    """Its leader came back between the two: the first batch would follow the second."""
    producer, kafka = transactional()
    answers = iter([NotLeaderForPartitionError.errno])
    kafka.produced = lambda topic, partition: next(answers, RecordMetadata(1, -1))
    failed = await failure(producer, *[record("a", 0, b"x" * 300, most=500) for _ in range(2)])
    assert (failed.outcome, set(failed.stuck)) == (TransactionOutcome.ABORTED, {"a"})
    assert len(kafka.batches("a")) == 2


@pytest.mark.parametrize("code", [RequestTimedOutError.errno, NotLeaderForPartitionError.errno])
async def test_a_topic_whose_partition_fails_is_named_stuck(code: int) -> None:
    """The session does not send it again: until the topic is well, its events must not delay others."""
    producer, kafka = transactional()
    kafka.produced = lambda topic, partition: code if topic == "ill" else RecordMetadata(1, -1)
    failed = await failure(producer, record("orders"), record("ill"))
    assert (set(failed.stuck), failed.record_errors) == ({"ill"}, {})
    assert failed.outcome is TransactionOutcome.ABORTED


async def test_a_topic_without_a_leader_is_named_stuck_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METADATA_TIMEOUT_S", 0.03)
    producer, kafka = transactional(60_000)
    kafka.leaderless = {"hangs"}
    async with asyncio.timeout(3.0):
        failed = await failure(producer, record("orders"), record("hangs"))
    assert set(failed.stuck) == {"hangs"}


async def test_a_connection_that_breaks_blames_no_topic() -> None:
    producer, kafka = transactional()
    kafka.produced = lambda topic, partition: GONE
    failed = await failure(producer, record("orders"))
    assert (failed.outcome, failed.record_errors, set(failed.stuck)) == (TransactionOutcome.ABORTED, {}, set())


async def test_a_ledger_that_refuses_its_record_is_named_and_nothing_is_committed() -> None:
    """Its max.message.bytes was lowered: the events are not at fault, and a smaller group may fit."""
    producer, kafka = transactional()
    kafka.of_ledger = TOO_BIG
    failed = await failure(producer, record("orders"))
    assert (failed.outcome, failed.record_errors, failed.stuck) == (
        TransactionOutcome.ABORTED,
        {LEDGER[0]: RECORD_ERRORS[TOO_BIG]},
        set(),
    )
    assert not kafka.sent(EndTxnRequest)


async def test_a_ledger_that_fails_blames_no_topic() -> None:
    producer, kafka = transactional()
    kafka.leaderless = {"ns.ledger"}
    failed = await failure(producer, record("orders"))
    assert "orders" not in failed.stuck


# --------------------------------------------------------------------------------------------------- compression


@pytest.mark.parametrize("codec", list(COMPRESSION_CODECS))
async def test_a_batch_is_marked_with_its_codec(codec: str) -> None:
    compressing = KafkaAdmin(
        "127.0.0.1:1", client_id="test", request_timeout_ms=600, telemetry=Telemetry(), compression=codec
    )
    session = ProducerSession(compressing, "ns.slot.0", "ns.slot.0", 600)
    fake_inside(session)
    (batch,) = session.batches([record("a", 0, b"again and again " * 50)] * 3, {("a", 0): 1})
    made = DefaultRecordBatch(bytes(batch.payload))
    assert made.compression_type == COMPRESSION_CODECS[codec]
    assert [each.value for each in made] == [b"again and again " * 50] * 3
    assert (len(batch.payload) < 1_000) is (codec != "none")


@pytest.mark.parametrize(("size", "codec"), [(COMPRESSED_LEAST_BYTES - 1, "none"), (COMPRESSED_LEAST_BYTES, "zstd")])
async def test_a_ledger_record_is_compressed_only_where_that_pays(size: int, codec: str) -> None:
    producer, kafka = transactional()
    await producer.send([record("a", 0)], LEDGER)
    await producer.commit(b" " * size)
    *_, ledger = [request for _, request in kafka.requests if isinstance(request, ProduceRequest)]
    ((_, ((_, batch),)),) = topics_of(ledger)
    assert batch[22] & DefaultRecordBatch.CODEC_MASK == COMPRESSION_CODECS[codec]


async def test_a_look_up_asks_no_more_for_topics_that_the_metadata_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that was deleted would be in each Metadata request for as long as the session lives."""
    session = ProducerSession(unreachable_kafka(), "test")
    asked: list[set[str]] = []
    monkeypatch.setattr(session.client, "set_topics", asked.append)
    monkeypatch.setattr(session.client, "force_metadata_update", lambda: None)
    monkeypatch.setattr(session.client.cluster, "topics", lambda exclude_internal_topics: {"here", "not asked for"})
    for topic in ("deleted", "here"):
        session.client.add_topic(topic)
    session.request_metadata([("new", 0)])
    assert asked == [{"here", "new"}]
    await session.close()
