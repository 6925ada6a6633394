"""How the one client asks: another broker where one does not answer, and a new start where none does."""

import asyncio
from collections import deque
from typing import Any

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError, NodeNotReadyError

from service.errors import KafkaAway
from service.kafka import cluster as module
from service.kafka.cluster import Cluster
from service.telemetry import Telemetry


class FakeClient(AIOKafkaClient):  # type: ignore[misc]
    """A client of brokers 1 and 2, asked in turn; those in `down` do not answer."""

    def __init__(self, *down: int) -> None:
        self.down = down
        self.turn = deque([1, 2])
        self.asked: list[int] = []
        self.closed = False
        self.hangs = False

    def get_random_node(self) -> int:
        self.turn.rotate()
        return self.turn[0]

    async def send(self, node_id: int, request: Any, **_: Any) -> Any:
        self.asked.append(node_id)
        if self.hangs:
            await asyncio.sleep(60)
        if node_id in self.down:
            raise NodeNotReadyError if node_id == 1 else KafkaConnectionError
        return type("Answer", (), {"topics": [(0, "orders", False, [None] * 3)]})

    async def close(self) -> None:
        self.closed = True


def cluster_with(client: FakeClient, timeout_ms: int = 500) -> Cluster:
    cluster = Cluster("127.0.0.1:1", client_id="test", request_timeout_ms=timeout_ms, telemetry=Telemetry())
    cluster._client = client
    return cluster


@pytest.mark.parametrize("down", [1, 2])
async def test_another_broker_is_asked_where_one_does_not_answer(monkeypatch: pytest.MonkeyPatch, down: int) -> None:
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.001)
    client = FakeClient(down)
    cluster = cluster_with(client)
    for _ in range(2):
        assert await cluster.partitions(["orders"]) == {"orders": 3}
    assert down in client.asked
    assert not client.closed


async def test_where_no_broker_answers_the_client_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The brokers may all have moved: only bootstrapping again finds them."""
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.001)
    client = FakeClient(1, 2)
    cluster = cluster_with(client)
    with pytest.raises(KafkaAway):
        await cluster.partitions(["orders"])
    assert set(client.asked) == {1, 2}
    assert client.closed
    assert cluster._client is None


async def test_a_broker_that_hangs_does_not_hang_its_caller() -> None:
    client = FakeClient()
    client.hangs = True
    cluster = cluster_with(client, timeout_ms=50)
    async with asyncio.timeout(3.0):
        with pytest.raises(KafkaAway):
            await cluster.answers()
    assert client.closed
