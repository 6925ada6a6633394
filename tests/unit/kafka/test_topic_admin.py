"""Tests requests about topics: what is described, what is created, and what is not there."""

import asyncio
from types import SimpleNamespace

import pytest
from aiokafka.errors import (
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from service.core.problems import KafkaAway, KafkaForbids
from service.kafka.metadata import Metadata
from service.kafka.topic_admin import TopicAdmin
from tests.unit.fakes import until
from tests.unit.kafka.asked_brokers import ClientOfTwo, admin_with, connect


async def test_a_topic_that_may_not_be_described_is_forbidden_and_not_away() -> None:
    client = ClientOfTwo()
    client.of_topic = TopicAuthorizationFailedError.errno
    with pytest.raises(KafkaForbids, match="no permission to describe topic orders"):
        await TopicAdmin(admin_with(client)).describe(["orders"])


async def test_a_topic_whose_settings_a_broker_does_not_know_is_kafka_away_and_not_missing() -> None:
    client = ClientOfTwo()
    client.of_settings = UnknownTopicOrPartitionError.errno
    with pytest.raises(KafkaAway, match="UnknownTopicOrPartition"):
        await TopicAdmin(admin_with(client)).describe(["orders"])


async def test_a_second_look_up_asks_another_broker_than_the_one_that_answered_last() -> None:
    client = ClientOfTwo()
    admin = TopicAdmin(admin_with(client))
    for _ in range(4):  # in either order
        client.lagging = {1, 2}
        assert await admin.describe(["orders"]) == {}
        client.lagging = {client.asked[-1]}
        assert list(await admin.describe(["orders"], elsewhere=True)) == ["orders"]
        client.turn.rotate()


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
    client = ClientOfTwo()
    client.partitions[1] = (0, 1, 1, 0, list(range(replicas)), list(range(in_sync)), [])
    client.partitions.reverse()  # in any order of the response
    client.least = least
    (topic,) = (await TopicAdmin(admin_with(client)).describe(["orders"])).values()
    assert (topic.partitions, topic.under_min_isr) == (3, frozenset({1} if short else ()))


async def test_a_topic_has_its_id_in_kafka_s_base64() -> None:
    """In the form of Kafka's own tools and of the audit's client."""
    admin = TopicAdmin(admin_with(ClientOfTwo()))
    assert (await admin.describe(["orders"]))["orders"].topic_id == "AAECAwQFBgcICQoLDA0ODw"


def test_a_metadata_request_is_encoded_as_the_protocol_defines_it() -> None:
    request = Metadata(["orders"]).prepare({3: (0, 13)})
    assert request.FLEXIBLE_VERSION
    assert request.encode() == b"\x02" + bytes(16) + b"\x07orders\x00" + b"\x00\x00\x00" + b"\x00"


async def test_a_bug_in_asking_the_controller_is_no_word_of_kafkas(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ClientOfTwo()
    client.controller = SimpleNamespace(nodeId=1)
    monkeypatch.setattr(client, "send", lambda *_, **__: None.none)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        await TopicAdmin(admin_with(client)).create("orders", 1, {})


async def test_create_waits_until_a_controller_is_known() -> None:
    client = ClientOfTwo()
    client.controllers = [None, None]
    created = asyncio.create_task(TopicAdmin(admin_with(client, 2_000)).create("orders", 1, {}))
    await until(lambda: not client.controllers)
    client.controller = SimpleNamespace(nodeId=1)
    await created
    assert client.asked == [1]


async def test_a_topic_is_created_by_the_client_that_has_replaced_one_without_a_controller() -> None:
    client, other = ClientOfTwo(), ClientOfTwo()
    client.controllers = [None]
    other.controller = SimpleNamespace(nodeId=1)
    admin = admin_with(client)
    created = asyncio.create_task(TopicAdmin(admin).create("orders", 1, {}))
    await until(lambda: not client.controllers)
    connect(admin, other)
    await asyncio.wait_for(created, 0.5)
    assert (client.asked, other.asked) == ([], [1])
