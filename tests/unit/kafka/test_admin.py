"""Tests requests of the one client: another broker if one does not answer, and a new client if none does."""

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import (
    ConcurrentTransactions,
    CoordinatorLoadInProgressError,
    KafkaConnectionError,
    NodeNotReadyError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    UnknownTopicOrPartitionError,
)
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.transaction import InitProducerIdRequest

from service.core.metrics import Telemetry
from service.core.problems import KafkaAway, KafkaForbids
from service.kafka import admin as module
from service.kafka.admin import Ends, KafkaAdmin
from service.kafka.inspection import DescribeTransactions
from service.kafka.metadata import Metadata
from service.kafka.session import ProducerSession
from tests.unit.fake_brokers import topics_of
from tests.unit.fakes import until


class FakeClient(AIOKafkaClient):  # type: ignore[misc]
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


def cluster_with(client: FakeClient, timeout_ms: int = 500) -> KafkaAdmin:
    cluster = KafkaAdmin("127.0.0.1:1", client_id="test", request_timeout_ms=timeout_ms, telemetry=Telemetry())
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


async def test_a_client_to_which_no_broker_answers_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """All brokers may have other addresses: only a new bootstrap finds them."""
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.001)
    client = FakeClient(1, 2)
    cluster = cluster_with(client)
    with pytest.raises(KafkaAway):
        await cluster.partitions(["orders"])
    assert set(client.asked) == {1, 2}
    assert client.closed
    assert cluster._client is None


async def test_a_call_to_a_broker_that_hangs_fails_at_its_timeout() -> None:
    client = FakeClient()
    client.hangs = True
    cluster = cluster_with(client, timeout_ms=50)
    async with asyncio.timeout(3.0):
        with pytest.raises(KafkaAway):
            await cluster.partitions(["orders"])
    assert client.closed


@pytest.mark.parametrize("silent", [1, 2])
async def test_a_broker_that_is_silent_gets_a_share_of_the_time_only(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARE_LEAST_S", 0.01)
    client = FakeClient()
    client.silent = {silent}
    client.get_random_node = lambda: silent  # type: ignore[method-assign]
    assert await cluster_with(client).partitions(["orders"]) == {"orders": 3}
    assert client.asked == [silent, 3 - silent]


async def test_a_single_slow_broker_gets_the_whole_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_LEAST_S", 0.01)
    client = FakeClient()
    client.turn = deque([1])
    client.takes_s = 0.3
    assert await cluster_with(client, timeout_ms=1000).partitions(["orders"]) == {"orders": 3}
    assert client.asked == [1]


async def test_two_slow_brokers_are_both_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_LEAST_S", 0.01)
    client = FakeClient()
    client.takes_s = 0.4
    assert await cluster_with(client, timeout_ms=1000).partitions(["orders"]) == {"orders": 3}
    assert sorted(client.asked) == [1, 2]


async def test_a_probe_fails_at_its_own_timeout_and_its_request_continues() -> None:
    """A probe has little time; if no broker answers, the request itself ends later and bootstraps again."""
    client = FakeClient()
    client.hangs = True
    cluster = cluster_with(client, timeout_ms=100)
    for _ in range(3):
        with pytest.raises(KafkaAway, match="does not answer within"):
            await cluster.answers(0.01)
    assert sorted(client.asked) == [1, 2], "each probe asked anew"
    await until(lambda: client.closed)
    answering = cluster._answering
    await cluster.close()
    assert answering is not None


async def test_a_topic_that_may_not_be_described_is_forbidden_and_not_away() -> None:
    client = FakeClient()
    client.of_topic = TopicAuthorizationFailedError.errno
    with pytest.raises(KafkaForbids, match="no permission to describe topic orders"):
        await cluster_with(client).describe(["orders"])


async def test_a_topic_whose_settings_a_broker_does_not_know_is_kafka_away_and_not_missing() -> None:
    client = FakeClient()
    client.of_settings = UnknownTopicOrPartitionError.errno
    with pytest.raises(KafkaAway, match="UnknownTopicOrPartition"):
        await cluster_with(client).describe(["orders"])


async def test_a_second_look_up_asks_another_broker_than_the_one_that_answered_last() -> None:
    client = FakeClient()
    cluster = cluster_with(client)
    for _ in range(4):  # in either order
        client.lagging = {1, 2}
        assert await cluster.describe(["orders"]) == {}
        client.lagging = {client.asked[-1]}
        assert list(await cluster.describe(["orders"], elsewhere=True)) == ["orders"]
        client.turn.rotate()


@pytest.mark.parametrize("unlisted", [1, 3])
async def test_a_broker_that_its_controller_has_fenced_is_waited_for(unlisted: int) -> None:
    """It answers and lists no broker. Without any node, an assertion of aiokafka would fail."""
    client = FakeClient()
    cluster = cluster_with(client)
    client.unlisted = unlisted
    await cluster.fence(["ns.slot.0"], 500, lambda _: None)
    client.unlisted = unlisted
    assert await cluster.partitions(["orders"]) == {"orders": 3}
    for transactional_id in ("ns.slot.0", None):
        session = ProducerSession(cluster, "slot-0", transactional_id, 500)
        session.client = client
        client.unlisted = unlisted
        await session.start(1.0)
        assert (session.producer_id, session.epoch) == (7, 3)


async def test_a_bug_in_asking_the_controller_is_no_word_of_kafkas(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    client.controller = SimpleNamespace(nodeId=1)
    monkeypatch.setattr(client, "send", lambda *_, **__: None.none)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        await cluster_with(client).create("orders", 1, {})


async def test_create_waits_until_a_controller_is_known() -> None:
    client = FakeClient()
    client.controllers = [None, None]
    created = asyncio.create_task(cluster_with(client, 2_000).create("orders", 1, {}))
    await until(lambda: not client.controllers)
    client.controller = SimpleNamespace(nodeId=1)
    await created
    assert client.asked == [1]


async def test_a_fence_reports_the_transactional_ids_that_it_waits_for() -> None:
    client = FakeClient()
    cluster = cluster_with(client)
    client.busy = {"b", "d"}
    progress: list[list[str]] = []
    fencing = asyncio.create_task(cluster.fence(["a", "b", "c", "d"], 500, lambda left: progress.append(list(left))))
    await until(lambda: len(progress) == 3)
    assert (progress[0], progress[-1]) == (["a", "b", "c", "d"], ["b", "d"])
    client.busy = {"d"}
    await until(lambda: progress[-1] == ["d"])
    with pytest.raises(KafkaAway, match="could be fenced"):
        await fencing
    assert progress[-1] == ["d"]


@pytest.mark.parametrize(
    ("least", "replicas", "in_sync", "short"),
    [
        ("2", 3, 3, False),
        ("2", 3, 2, False),
        ("2", 3, 1, True),
        ("3", 3, 2, True),
        ("1", 3, 1, False),
        ("2", 1, 1, False),  # more than there are replicas need not be in sync (KIP-966)
    ],
)
async def test_a_partition_with_too_few_replicas_in_sync_is_reported(
    least: str, replicas: int, in_sync: int, short: bool
) -> None:
    client = FakeClient()
    client.partitions[1] = (0, 1, 1, 0, list(range(replicas)), list(range(in_sync)), [])
    client.partitions.reverse()  # in any order of the response
    client.least = least
    (topic,) = (await cluster_with(client).describe(["orders"])).values()
    assert (topic.partitions, topic.under_min_isr) == (3, frozenset({1} if short else ()))


async def test_the_producer_id_of_a_slot_whose_coordinator_loads_is_not_taken_for_unknown() -> None:
    """Else the watch would name the slot's own transaction as that of a former producer id."""
    client = FakeClient()
    cluster = cluster_with(client)
    assert await cluster.producer_ids(["fencepost.0"]) == {"fencepost.0": 7}
    client.of_transactions = CoordinatorLoadInProgressError.errno
    with pytest.raises(KafkaAway, match="LoadInProgress"):
        await cluster.producer_ids(["fencepost.0"])
    client.of_transactions = TransactionalIdAuthorizationFailed.errno
    assert await cluster.producer_ids(["fencepost.0"]) == {}


async def test_a_topic_has_its_id_in_kafka_s_base64() -> None:
    """In the form of Kafka's own tools and of the audit's client."""
    cluster = cluster_with(FakeClient())
    assert (await cluster.describe(["orders"]))["orders"].topic_id == "AAECAwQFBgcICQoLDA0ODw"


def test_a_metadata_request_is_encoded_as_the_protocol_defines_it() -> None:
    request = Metadata(["orders"]).prepare({3: (0, 13)})
    assert request.FLEXIBLE_VERSION
    assert request.encode() == b"\x02" + bytes(16) + b"\x07orders\x00" + b"\x00\x00\x00" + b"\x00"


class Leaders(FakeClient):
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
    assert (await cluster_with(client).last_offsets(["orders"])).ends == {
        ("orders", 0): Ends(3, 5),
        ("orders", 2): Ends(23, 25),
    }
    assert len(client.offsets) == 4
    only = await cluster_with(client).last_offsets(["orders"], {("orders", 2)})
    assert only.ends == {("orders", 2): Ends(23, 25)}
    assert len(client.offsets) == 6, "the leader of another partition may be silent for long"


class Many(FakeClient):
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
    found = await cluster_with(client).last_offsets(topics)
    assert found.ends == {(topic, n): Ends(5, 5) for topic in topics for n in range(12)}
    assert (
        client.sizes
        == [(Metadata, 25)] * 2 + [(Metadata, 10)] + [(OffsetRequest, 250)] * 4 + [(OffsetRequest, 220)] * 2
    )
    client.answers = 2  # then the broker goes away
    assert len((await cluster_with(client).last_offsets(topics)).ends) == 250


async def test_last_offsets_leaves_out_the_partitions_whose_leader_is_away() -> None:
    client = Leaders(2)
    client.get_random_node = lambda: 1  # type: ignore[method-assign]
    cluster = cluster_with(client)
    assert await cluster.last_offsets(["orders"]) == ({("orders", 0): Ends(3, 5)}, [], {"orders": 4})
    assert not client.closed


async def test_ends_are_asked_of_the_client_that_has_replaced_the_first_amid_the_call() -> None:
    client, other = Leaders(), Leaders()
    cluster = cluster_with(client)
    sent = client.send

    async def send_last(node_id: int, request: Any, **_: Any) -> Any:
        """Send requests up to the first one for offsets; after that another request has closed this client."""
        if cluster._client is other:
            raise NodeNotReadyError
        response = await sent(node_id, request)
        if isinstance(request, OffsetRequest):
            cluster._client = other
        return response

    client.send = send_last  # type: ignore[method-assign]
    assert (await cluster.last_offsets(["orders"])).ends.keys() == {("orders", 0), ("orders", 2)}


async def test_a_topic_is_created_by_the_client_that_has_replaced_one_without_a_controller() -> None:
    client, other = FakeClient(), FakeClient()
    client.controllers = [None]
    other.controller = SimpleNamespace(nodeId=1)
    cluster = cluster_with(client)
    created = asyncio.create_task(cluster.create("orders", 1, {}))
    await until(lambda: not client.controllers)
    cluster._client = other
    await asyncio.wait_for(created, 0.5)
    assert (client.asked, other.asked) == ([], [1])
