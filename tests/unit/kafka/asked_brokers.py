"""Brokers that answer admin requests, in memory."""

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import (
    ConcurrentTransactions,
    KafkaConnectionError,
    NodeNotReadyError,
    UnknownTopicOrPartitionError,
)
from aiokafka.protocol.transaction import InitProducerIdRequest

from service.core.metrics import Telemetry
from service.kafka.admin import KafkaAdmin
from service.kafka.inspection import DescribeTransactions


class ClientOfTwo(AIOKafkaClient):  # type: ignore[misc]
    """A client of brokers 1 and 2, asked in turn; those in `down` do not answer."""

    def __init__(self, *down: int) -> None:
        self.down = down
        self.turn = deque([1, 2])
        self.asked: list[int] = []
        self.closed = False
        self.hangs = False
        self.takes_s = 0.0
        self.silent: set[int] = set()  # brokers that take a request and never answer
        self.lagging: set[int] = set()  # brokers that know no topic yet
        self.of_topic = self.of_settings = self.of_transactions = 0  # error codes
        self.cluster = self
        self.busy: set[str] = set()  # transactional ids whose markers are not written yet
        self.unlisted = 0  # this many of the next responses list no broker
        # Of a topic: error code, number, leader and its epoch, replicas, those in sync, those offline.
        self.partitions: list[tuple[Any, ...]] = [(0, number, 1, 0, [1, 2, 3], [1, 2, 3], []) for number in range(3)]
        self.least = "2"
        self.controller: SimpleNamespace | None = None
        self.controllers: list[None] = []  # this many of the next responses name no controller

    def get_random_node(self) -> int | None:
        if self.unlisted:
            return None
        self.turn.rotate()
        return self.turn[0]

    def brokers(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(nodeId=n) for n in self.turn]

    async def bootstrap(self) -> None:
        pass

    async def force_metadata_update(self) -> bool:
        self.unlisted = max(0, self.unlisted - 1)
        if self.controllers:
            self.controllers.pop()
        return True

    async def send(self, node_id: int, request: Any, **_: Any) -> Any:
        assert node_id is not None
        self.asked.append(node_id)
        await asyncio.sleep(60 if self.hangs or node_id in self.silent else self.takes_s)
        if node_id in self.down:
            raise NodeNotReadyError if node_id == 1 else KafkaConnectionError
        if isinstance(request, DescribeTransactions):
            return SimpleNamespace(transactions=[(self.of_transactions, "", "Empty", 0, 0, 7, 2, [], {})])
        concurrent = isinstance(request, InitProducerIdRequest) and request._transactional_id in self.busy
        identity = {
            "error_code": ConcurrentTransactions.errno if concurrent else 0,
            "coordinator_id": 1,
            "producer_id": 7,
            "producer_epoch": 3,
        }
        configs = [(self.of_settings, None, 2, "orders", [("min.insync.replicas", self.least)])]
        unknown = UnknownTopicOrPartitionError.errno if node_id in self.lagging else self.of_topic
        metadata = [(unknown, "orders", bytes(range(16)), False, [] if unknown else self.partitions)]
        made = [("orders", 0, None)]
        return type("Answer", (), {"topics": metadata, "resources": configs, "topic_errors": made, **identity})

    async def close(self) -> None:
        self.closed = True


def admin_with(client: ClientOfTwo, timeout_ms: int = 500) -> KafkaAdmin:
    """Make an admin client that is connected by this client."""
    admin = KafkaAdmin("127.0.0.1:1", client_id="test", request_timeout_ms=timeout_ms, telemetry=Telemetry())
    connect(admin, client)
    return admin


def connect(admin: KafkaAdmin, client: ClientOfTwo) -> None:
    """Replace the client, as another request does that connects one."""
    admin._client = client


def connected_client(admin: KafkaAdmin) -> object:
    return admin._client
