"""Tests requests about transactions: offsets of their leaders, producer ids of their coordinators, and fences."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import (
    CoordinatorLoadInProgressError,
    KafkaConnectionError,
    NodeNotReadyError,
    TransactionalIdAuthorizationFailed,
)
from aiokafka.protocol.offset import OffsetRequest

from service.core.problems import KafkaAway
from service.kafka.metadata import Metadata
from service.kafka.session import ProducerSession
from service.kafka.topic_admin import TopicAdmin
from service.kafka.transaction_admin import Ends, TransactionAdmin
from tests.unit.fake_brokers import topics_of
from tests.unit.fakes import until
from tests.unit.kafka.asked_brokers import ClientOfTwo, admin_with, connect, connected_client


async def test_a_fence_reports_the_transactional_ids_that_it_waits_for() -> None:
    client = ClientOfTwo()
    admin = TransactionAdmin(admin_with(client))
    client.busy = {"b", "d"}
    progress: list[list[str]] = []
    fencing = asyncio.create_task(admin.fence(["a", "b", "c", "d"], 500, lambda left: progress.append(list(left))))
    await until(lambda: len(progress) == 3)
    assert (progress[0], progress[-1]) == (["a", "b", "c", "d"], ["b", "d"])
    client.busy = {"d"}
    await until(lambda: progress[-1] == ["d"])
    with pytest.raises(KafkaAway, match="could be fenced"):
        await fencing
    assert progress[-1] == ["d"]


@pytest.mark.parametrize("unlisted", [1, 3])
async def test_a_broker_that_its_controller_has_fenced_is_waited_for(unlisted: int) -> None:
    """It answers and lists no broker. Without any node, an assertion of aiokafka would fail."""
    client = ClientOfTwo()
    admin = admin_with(client)
    client.unlisted = unlisted
    await TransactionAdmin(admin).fence(["ns.slot.0"], 500, lambda _: None)
    client.unlisted = unlisted
    assert await TopicAdmin(admin).partitions(["orders"]) == {"orders": 3}
    for transactional_id in ("ns.slot.0", None):
        session = ProducerSession(admin, "slot-0", transactional_id, 500)
        session.client = client
        client.unlisted = unlisted
        await session.start(1.0)
        assert (session.producer_id, session.epoch) == (7, 3)


async def test_the_producer_id_of_a_slot_whose_coordinator_loads_is_not_taken_for_unknown() -> None:
    """Else the watch would name the slot's own transaction as that of a former producer id."""
    client = ClientOfTwo()
    admin = TransactionAdmin(admin_with(client))
    assert await admin.producer_ids(["fencepost.0"]) == {"fencepost.0": 7}
    client.of_transactions = CoordinatorLoadInProgressError.errno
    with pytest.raises(KafkaAway, match="LoadInProgress"):
        await admin.producer_ids(["fencepost.0"])
    client.of_transactions = TransactionalIdAuthorizationFailed.errno
    assert await admin.producer_ids(["fencepost.0"]) == {}


class Leaders(ClientOfTwo):
    """Of `orders`, broker 1 leads partitions 0 and 1, broker 2 the third; the fourth has no leader."""

    def __init__(self, *down: int) -> None:
        super().__init__(*down)
        self.partitions = [(0, n, leader, 0, [leader], [leader], []) for n, leader in enumerate((1, 1, 2))]
        self.partitions.append((5, 3, -1, 0, [2], [], [2]))
        self.offsets: list[OffsetRequest] = []

    async def send(self, node_id: int, request: Any, **_: Any) -> Any:
        if not isinstance(request, OffsetRequest) or node_id in self.down:
            return await super().send(node_id, request)
        self.offsets.append(request)
        low = request._isolation_level == 1
        rows = [(n, 6 if n == 1 else 0, -1, 10 * n + (3 if low else 5)) for n, _ in topics_of(request)[0][1]]
        return SimpleNamespace(topics=[("orders", rows)])


async def test_the_ends_of_partitions_are_asked_of_their_leaders() -> None:
    """Two requests to each leader. A partition that its node does not lead, or that has no leader, is left out."""
    client = Leaders()
    assert (await TransactionAdmin(admin_with(client)).last_offsets(["orders"])).ends == {
        ("orders", 0): Ends(3, 5),
        ("orders", 2): Ends(23, 25),
    }
    assert len(client.offsets) == 4
    only = await TransactionAdmin(admin_with(client)).last_offsets(["orders"], {("orders", 2)})
    assert only.ends == {("orders", 2): Ends(23, 25)}
    assert len(client.offsets) == 6, "the leader of another partition may be silent for long"


class Many(ClientOfTwo):
    """Each topic has 12 partitions, all led by broker 1, which answers `answers` requests for offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[type[Any], int]] = []  # topics or partitions of each request
        self.answers = 10_000

    async def send(self, node_id: int, request: Any, **_: Any) -> Any:
        if isinstance(request, OffsetRequest):
            self.sizes.append((OffsetRequest, sum(len(rows) for _, rows in topics_of(request))))
            self.answers -= 1
            if self.answers < 0:
                raise KafkaConnectionError
            rows = [(name, [(n, 0, -1, 5) for n, _ in asked]) for name, asked in topics_of(request)]
            return SimpleNamespace(topics=rows)
        names = [name for _, name, _ in request.prepare({Metadata.API_KEY: (0, 13)}).topics]
        self.sizes.append((Metadata, len(names)))
        partitions: list[Any] = [(0, n, 1, 0, [1], [1], []) for n in range(12)]
        return SimpleNamespace(topics=[(0, name, bytes(16), False, partitions) for name in names])


async def test_the_ends_of_many_partitions_are_asked_in_requests_of_a_bounded_size() -> None:
    """The response to one request for 5,000 topics would hold the event loop for hundreds of milliseconds."""
    client, topics = Many(), [f"t{n}" for n in range(60)]
    found = await TransactionAdmin(admin_with(client)).last_offsets(topics)
    assert found.ends == {(topic, n): Ends(5, 5) for topic in topics for n in range(12)}
    assert (
        client.sizes
        == [(Metadata, 25)] * 2 + [(Metadata, 10)] + [(OffsetRequest, 250)] * 4 + [(OffsetRequest, 220)] * 2
    )
    client.answers = 2  # then the broker goes away
    assert len((await TransactionAdmin(admin_with(client)).last_offsets(topics)).ends) == 250


async def test_last_offsets_leaves_out_the_partitions_whose_leader_is_away() -> None:
    client = Leaders(2)
    client.get_random_node = lambda: 1  # type: ignore[method-assign]
    admin = TransactionAdmin(admin_with(client))
    assert await admin.last_offsets(["orders"]) == ({("orders", 0): Ends(3, 5)}, [], {"orders": 4})
    assert not client.closed


async def test_ends_are_asked_of_the_client_that_has_replaced_the_first_amid_the_call() -> None:
    client, other = Leaders(), Leaders()
    admin = admin_with(client)
    sent = client.send

    async def send_last(node_id: int, request: Any, **_: Any) -> Any:
        """Send requests up to the first one for offsets; after that another request has closed this client."""
        if connected_client(admin) is other:
            raise NodeNotReadyError
        response = await sent(node_id, request)
        if isinstance(request, OffsetRequest):
            connect(admin, other)
        return response

    client.send = send_last  # type: ignore[method-assign]
    assert (await TransactionAdmin(admin).last_offsets(["orders"])).ends.keys() == {("orders", 0), ("orders", 2)}
