"""Tests the bytes of a producer's requests, and the start and end of a session."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple
from unittest.mock import AsyncMock

import pytest
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    ConcurrentTransactions,
    InvalidTransactionTimeout,
    KafkaConnectionError,
    NotEnoughReplicasError,
)
from aiokafka.protocol.admin import DescribeConfigsRequest, DescribeConfigsResponse_v1
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdResponse_v0
from aiokafka.record.default_records import DefaultRecordBatch

from service.core.problems import KafkaAway, KafkaRefusesSetting
from service.kafka import admin, init_producer_id, transaction_admin
from service.kafka import session as module
from service.kafka.inspection import DescribeTransactions
from service.kafka.outcomes import TransactionOutcome
from service.kafka.producer import TransactionalProducer
from service.kafka.records import NotSent, RecordBatch, RecordMetadata
from service.kafka.session import ACKS_TIMEOUT_SHARE, SENDS_SHARE, ProducerSession
from service.kafka.transaction_admin import TransactionAdmin
from tests.unit.fake_brokers import (
    LEDGER,
    TOO_BIG,
    failure,
    fake_inside,
    idempotent,
    record,
    topics_of,
    transactional,
    write,
)
from tests.unit.fakes import unreachable_kafka

TIMEOUT_MS = 600
ACKS_TIMEOUT_MS = int(TIMEOUT_MS * ACKS_TIMEOUT_SHARE / SENDS_SHARE)


class DescribedTransactions(NamedTuple):
    """The response to a DescribeTransactions request."""

    transactions: list[tuple[Any, ...]]


def batches_of(request: Any) -> list[DefaultRecordBatch]:
    return [DefaultRecordBatch(bytes(raw)) for _, batches in topics_of(request) for _, raw in batches]


async def test_every_send_waits_for_all_replicas_and_belongs_to_the_transaction() -> None:
    """A single broker would accept acks=1, or a record outside of the transaction, too."""
    producer, kafka = transactional(TIMEOUT_MS)
    await write(producer, record("a", 0), record("a", 1))
    sends = kafka.sent(ProduceRequest)
    assert len(sends) == 2
    for request in sends:
        assert (request.transactional_id, request.required_acks, request.timeout) == (
            "ns.slot.0",
            -1,
            ACKS_TIMEOUT_MS,
        )
        for batch in batches_of(request):
            assert (batch.is_transactional, batch.producer_id, batch.producer_epoch) == (True, 7, 0)
    for request in (*kafka.sent(AddPartitionsToTxnRequest), *kafka.sent(EndTxnRequest)):
        assert (request.transactional_id, request.producer_id, request.producer_epoch) == ("ns.slot.0", 7, 0)


async def test_an_idempotent_producer_waits_for_all_replicas_and_is_in_no_transaction() -> None:
    producer, kafka = idempotent(TIMEOUT_MS)
    await producer.write([record("a", 0)])
    (request,) = kafka.sent(ProduceRequest)
    assert (request.transactional_id, request.required_acks) == (None, -1)
    assert request.timeout < 1000 * producer._admin.timeout_s / SENDS_SHARE
    (batch,) = batches_of(request)
    assert (batch.is_transactional, batch.producer_id, batch.producer_epoch) == (False, 7, 0)


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ((0, 7, -1), [RecordMetadata(7, 5), RecordMetadata(8, 5)]),
        ((0, 7, 99), [RecordMetadata(7, 99), RecordMetadata(8, 99)]),
        ((0, -1, -1), None),
        ((46, 7, -1), None),  # DuplicateSequenceNumber, with an offset that is not this batch's
        ((-1, 7, -1), None),
        ((NotEnoughReplicasError.errno, 7, -1), NotSent(partition_failed=True)),
        (None, None),
    ],
)
async def test_an_offset_counts_only_in_a_clean_answer(answer: Any, result: object) -> None:
    session = ProducerSession(unreachable_kafka(600), "plain-0")
    fake_inside(session)
    records = [record("a", 0), record("a", 0)]
    (batch,) = session.batches(records, {("a", 0): 1})
    assert isinstance(batch, RecordBatch)
    batch.response = answer
    assert batch.result(records) == result


# ----------------------------------------------------------------------------------------------------- deadlines


async def test_a_silent_partition_fails_its_transaction_after_a_third_of_the_timeout() -> None:
    producer, kafka = transactional(TIMEOUT_MS)
    kafka.produced = lambda topic, partition: None
    started = time.monotonic()
    failed = await failure(producer, record("orders"))
    took_s = time.monotonic() - started
    assert (failed.outcome, set(failed.stuck)) == (TransactionOutcome.ABORTED, {"orders"})
    assert 0.15 < took_s < 0.45, "a third of a request's time"


@pytest.mark.parametrize("hang_s", [0.0, 60.0])
async def test_silence_and_no_such_partition_is_no_refusal(hang_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """No broker has said so, and 404 would be final."""
    monkeypatch.setattr(module, "METADATA_TIMEOUT_S", 0.03)
    producer, kafka = transactional(60_000)
    kafka.unknown = {"gone"}

    async def silent() -> bool:
        await asyncio.sleep(hang_s)
        return False

    kafka.force_metadata_update = silent  # type: ignore[method-assign]
    failed = await failure(producer, record("gone"))
    assert (failed.outcome, failed.record_errors, set(failed.stuck)) == (TransactionOutcome.ABORTED, {}, {"gone"})


async def test_a_producer_that_is_closed_while_it_opens_cancels_the_open_request() -> None:
    producer, kafka = transactional(60_000)
    held = asyncio.Event()

    async def silence(node: int, request: Any) -> Any:
        held.set()
        await asyncio.sleep(60)

    kafka.send = silence  # type: ignore[method-assign]
    producer.begin_early([("a", 0), LEDGER])
    await held.wait()
    opening = producer._early_begin
    assert opening is not None
    await asyncio.wait_for(producer.close(), 1.0)
    _, answer = opening
    await asyncio.wait([answer], timeout=1.0)
    assert answer.cancelled()
    assert kafka.closed


async def test_a_producer_closes_although_its_client_fails_to_close() -> None:
    for producer, kafka in (transactional(), idempotent()):

        async def broken() -> None:
            raise RuntimeError("a bug")

        kafka.close = broken  # type: ignore[method-assign]
        await producer.close()


# ---------------------------------------------------------------------------------------------------- beginnings


def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def coordinator(client: object, transactional_id: str) -> int:
        return 5

    async def any_node(client: object) -> int:
        return 6

    monkeypatch.setattr(module, "coordinator", coordinator)
    monkeypatch.setattr(module, "any_node", any_node)


@pytest.mark.parametrize(("transactional_id", "node"), [("ns.slot.0", 5), (None, 6)])
async def test_a_session_asks_its_own_coordinator_for_its_producer_id(
    transactional_id: str | None, node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single broker is the coordinator of every id; with several each id has its own."""
    nodes(monkeypatch)
    session = ProducerSession(unreachable_kafka(600), "name", transactional_id, 4_000)
    kafka: Any = fake_inside(session)
    asked: list[tuple[int, str | None, int]] = []

    async def send(node: int, request: Any) -> Any:
        if isinstance(request, DescribeTransactions):
            assert (node, request.transactional_id, asked) == (5, "ns.slot.0", [])
            return DescribedTransactions([(0, "ns.slot.0", "Ongoing", 1, 1, 44, 2, [("orders", [1, 2], {})], {})])
        asked.append((node, request._transactional_id, request._transaction_timeout_ms))
        return InitProducerIdResponse_v0(0, 0, 44, 3)

    async def bootstrap() -> None: ...

    kafka.send, kafka.bootstrap = send, bootstrap
    await session.start(1.0)
    assert asked == [(node, transactional_id, 4_000)]
    assert (session.coordinator, session.producer_id, session.epoch) == (node, 44, 3)
    assert session.without_marker == ({("orders", 1), ("orders", 2)} if transactional_id else set())
    assert session.former_ids == set()
    assert not kafka.closed


async def test_a_fence_that_gives_another_producer_id_keeps_the_former_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the last epoch of an id the coordinator replaces it; the transaction that it ends then is of the former."""
    nodes(monkeypatch)
    session = ProducerSession(unreachable_kafka(600), "name", "ns.slot.0", 4_000)
    kafka: Any = fake_inside(session)
    codes = [ConcurrentTransactions.errno, 0]

    async def send(node: int, request: Any) -> Any:
        if isinstance(request, DescribeTransactions):
            return DescribedTransactions([(0, "ns.slot.0", "Ongoing", 1, 1, 44, 2, [("orders", [1], {})], {})])
        return InitProducerIdResponse_v0(0, codes.pop(0), 45, 0)

    async def bootstrap() -> None: ...

    kafka.send, kafka.bootstrap = send, bootstrap
    await session.start(1.0)
    assert (session.producer_id, session.former_ids, session.without_marker) == (45, {44}, {("orders", 1)})


Configs = Callable[[], Coroutine[Any, Any, Any]]


async def described() -> Any:
    return DescribeConfigsResponse_v1(
        0, [(0, "", 4, "5", [("transaction.max.timeout.ms", "5000", True, 5, False, [])])]
    )


async def forbidden() -> Any:
    return DescribeConfigsResponse_v1(0, [(ClusterAuthorizationFailedError.errno, "no", 4, "5", [])])


async def unreachable() -> Any:
    raise KafkaConnectionError


async def silent() -> Any:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("configs", "found"),
    [
        (described, ", 5000: set 5000 or less, or raise theirs"),
        (forbidden, ": set a smaller one, or raise theirs"),
        (unreachable, ": set a smaller one, or raise theirs"),
        (silent, ": set a smaller one, or raise theirs"),
    ],
)
@pytest.mark.parametrize("of", ["slot", "store"])
async def test_a_transaction_timeout_that_kafka_refuses_is_an_error_of_the_setting(
    configs: Configs, found: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers' maximum is in the text if the service may read it."""
    nodes(monkeypatch)
    for requesting in (admin, transaction_admin):
        monkeypatch.setattr(requesting, "coordinator", AsyncMock(return_value=5))
    monkeypatch.setattr(init_producer_id, "MAXIMUM_TIMEOUT_S", 0.02)
    kafka_admin = unreachable_kafka(600)
    session = ProducerSession(kafka_admin, "name", "ns.slot.0", 5_001)
    kafka: Any = fake_inside(session)
    asked: list[Any] = []

    async def send(node: int, request: Any) -> Any:
        assert node == 5
        match request:
            case DescribeTransactions():
                return DescribedTransactions([(0, "ns.slot.0", "Ongoing", 1, 1, 44, 2, [], {})])
            case DescribeConfigsRequest():
                asked.append(request._resources)
                return await configs()
        return InitProducerIdResponse_v0(0, InvalidTransactionTimeout.errno, -1, -1)

    async def bootstrap() -> None: ...

    kafka.send, kafka.bootstrap = send, bootstrap
    monkeypatch.setattr(kafka_admin, "_client", kafka)
    fencing = TransactionAdmin(kafka_admin).fence(["ns.slot.0"], 5_001, lambda _: None) if of == "store" else None
    with pytest.raises(KafkaRefusesSetting) as raised:
        await (fencing or session.start(1.0))
    assert str(raised.value) == (
        f"FENCEPOST_TRANSACTION_TIMEOUT_MS=5001 is more than the brokers' transaction.max.timeout.ms{found}"
    )
    assert asked == [[(4, "5", ["transaction.max.timeout.ms"])]]
    assert kafka.closed == (of == "slot")


async def refused() -> None:
    raise ConnectionRefusedError


@pytest.mark.parametrize("bootstrap", [silent, unreachable, refused])
async def test_a_session_that_cannot_start_closes_its_client(bootstrap: Callable[[], Any]) -> None:
    producer, fake = transactional()
    kafka: Any = fake
    kafka.bootstrap = bootstrap
    with pytest.raises(KafkaAway, match="no producer id"):
        await producer._session.start(0.02)
    assert kafka.closed


async def test_a_session_that_is_cancelled_while_it_starts_closes_its_client() -> None:
    producer, fake = transactional()
    kafka: Any = fake
    kafka.bootstrap = silent
    starting = asyncio.create_task(producer.start())
    await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert kafka.closed


async def test_concurrent_users_of_an_idempotent_producer_share_one_session_and_start_another_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sessions at once would be two producer ids, each with its own sequence numbers."""
    begun: list[ProducerSession] = []

    async def start(session: ProducerSession, timeout_s: float) -> None:
        await asyncio.sleep(0.01)
        fake_inside(session)
        begun.append(session)
        session.producer_id = len(begun)

    monkeypatch.setattr(ProducerSession, "start", start)
    producer, first = idempotent()
    await producer.close()
    await producer.close()
    assert first.closed
    assert await asyncio.gather(*(producer.identity() for _ in range(3))) == [(1, 0)] * 3
    await producer.write([record("a")])
    assert await producer.identity() == (1, 0)
    kafka: Any = begun[0].client
    kafka.produced = lambda topic, partition: TOO_BIG
    await producer.write([record("a")])
    assert kafka.closed
    assert await producer.identity() == (2, 0)


async def test_the_start_of_a_transactional_producer_waits_for_the_transaction_that_it_fences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its transaction may just have begun to commit, which takes at most the transaction timeout."""
    waited: list[float] = []

    async def start(session: ProducerSession, timeout_s: float) -> None:
        waited.append(timeout_s)

    monkeypatch.setattr(ProducerSession, "start", start)
    await TransactionalProducer(unreachable_kafka(2_000), "ns.slot.0", 7_000).start()
    assert waited == [9.0]
