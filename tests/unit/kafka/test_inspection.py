"""Tests the marker that ends a transaction of another producer id, and whose slot a record is."""

from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.kafka import transaction_admin
from service.kafka.client import Client
from service.kafka.hanging import ActiveProducer, RecordCoordinates
from service.kafka.inspection import ListTransactions, LogEntry, WriteTxnMarkers, transactional_ids_at
from service.kafka.metadata import Partition
from service.kafka.transaction_admin import TransactionAdmin
from tests.unit.fake_brokers import transactional
from tests.unit.fakes import unreachable_kafka

FORMER = ActiveProducer(6, 32_766, 691, 3)
ORDERS = ("orders", 2)
FORBIDDEN = 31
STALE_EPOCH = 47


def test_a_request_for_a_marker_is_encoded_as_the_protocol_defines_it() -> None:
    request = WriteTxnMarkers(ORDERS, FORMER, commit=True).prepare({27: (1, 2)})
    assert request.FLEXIBLE_VERSION
    marker = bytes(7) + b"\6" + b"\x7f\xfe" + b"\1" + b"\2\7orders\2\0\0\0\2\0" + b"\0\0\0\3"
    assert request.encode() == b"\2" + marker + b"\0" + b"\0"
    read = request.RESPONSE_TYPE.decode(
        b"\2" + bytes(7) + b"\6" + b"\2\7orders\2\0\0\0\2\0\x1f\0" + b"\0" + b"\0" + b"\0"
    )
    assert read.markers == [(6, [("orders", [(2, FORBIDDEN, {})], {})], {})]


def test_a_partition_without_any_marker_gets_one_of_coordinator_epoch_0() -> None:
    request = WriteTxnMarkers(ORDERS, FORMER._replace(coordinator_epoch=-1), commit=False).prepare({27: (0, 1)})
    assert request.encode().endswith(b"\0\0\0\0" + b"\0" + b"\0")


@pytest.mark.parametrize(
    ("met", "why"),
    [
        (0, ""),
        (FORBIDDEN, "the service has no permission to Alter the cluster"),
        (STALE_EPOCH, "InvalidProducerEpoch"),
        (KafkaConnectionError(), "KafkaConnectionError"),
        (NotImplementedError("no such version"), "no such version"),
    ],
)
async def test_a_producer_says_why_the_marker_of_a_former_id_was_not_written(met: int | Exception, why: str) -> None:
    producer, kafka = transactional()
    kafka.leaders[ORDERS] = 4
    asked: list[tuple[int, Any]] = []

    async def send(node: int, request: Any) -> Any:
        asked.append((node, request))
        if isinstance(met, Exception):
            raise met
        return SimpleNamespace(markers=[(6, [("orders", [(2, met, {})], {})], {})])

    kafka.send = send  # type: ignore[method-assign]
    found = await producer.hanging.end_former(ORDERS, FORMER, commit=True)
    assert why in found
    assert bool(found) is bool(why)
    ((node, request),) = asked
    assert (node, request.partition, request.producer, request.commit) == (4, ORDERS, FORMER, True)


async def test_a_partition_without_a_leader_gets_no_marker() -> None:
    producer, kafka = transactional()
    kafka.leaderless = {"orders"}
    assert "LeaderNotAvailable" in await producer.hanging.end_former(ORDERS, FORMER, commit=True)


async def test_open_transactions_of_other_producers_are_found_by_producer_id() -> None:
    producer, kafka = transactional()
    kafka.open_in = {ORDERS: 691}  # of this producer id
    found = await producer.hanging.find_of_others([ORDERS, ("orders", 1)])
    other = ActiveProducer(8, 0, 3, 0)
    assert found == {8: {ORDERS: other, ("orders", 1): other}}


def test_a_request_for_transactional_ids_is_encoded_as_the_protocol_defines_it() -> None:
    """ListTransactionsRequest.json: StateFilters, ProducerIdFilters."""
    request = ListTransactions([6]).prepare({66: (0, 2)})
    assert request.FLEXIBLE_VERSION
    assert request.encode() == b"\1" + b"\2" + bytes(7) + b"\6" + b"\0"
    row = b"\6a.b.0" + bytes(7) + b"\6" + b"\6Empty" + b"\0"
    read = request.RESPONSE_TYPE.decode(b"\0\0\0\0" + b"\0\0" + b"\1" + b"\2" + row + b"\0")
    assert read.transactions == [("a.b.0", 6, "Empty", {})]


async def test_transactional_ids_are_those_of_the_brokers_that_answer() -> None:
    class Brokers:
        async def send(self, node: int, request: ListTransactions) -> Any:
            if node == 1:
                return SimpleNamespace(transactions=[("a.slot.0", 6, "Empty", {})])
            raise KafkaConnectionError if node == 2 else NotImplementedError("no such request")

    client: Any = Brokers()
    assert [await transactional_ids_at(client, node, [6]) for node in (1, 2, 3)] == [{6: "a.slot.0"}, {}, {}]


async def test_the_slot_of_a_record_is_read_from_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of other programs, copies by other producers, and records that cannot be read, have none."""
    stamp = Stamp(b"i" * 16, b"f" * 8, 5, 3, 6, 0, "me").encode()
    headers: dict[Partition, list[tuple[str, bytes]]] = {
        ("orders", 0): [(STAMP_HEADER, stamp)],
        ("orders", 1): [],
        ("orders", 2): [(STAMP_HEADER, b"x")],
        ("orders", 3): [(STAMP_HEADER, stamp)],
    }

    async def fetch(client: object, partition: Partition, offset: int) -> tuple[list[LogEntry], int, int]:
        if partition not in headers:
            raise KafkaConnectionError
        producer_id = 99 if partition[1] == 3 else 6
        return [LogEntry(offset, producer_id, 0, b"1", headers[partition], None)], offset + 1, offset + 1

    async def nothing(client: object, *topics: object) -> None: ...

    monkeypatch.setattr(transaction_admin, "fetch", fetch)
    monkeypatch.setattr(Client, "bootstrap", nothing)
    monkeypatch.setattr(Client, "set_topics", nothing)
    admin = unreachable_kafka()
    first, *others = [RecordCoordinates(("orders", number), 10) for number in range(5)]
    assert await TransactionAdmin(admin).stamps_of([*others, first]) == {first: Stamp.decode(stamp)}
    await admin.close()
