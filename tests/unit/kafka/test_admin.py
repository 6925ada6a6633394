"""Tests requests of the one client: another broker if one does not answer, and a new client if none does."""

import asyncio
from collections import deque
from typing import Any

import pytest

from service.core.problems import KafkaAway
from service.kafka import admin as module
from service.kafka.topic_admin import TopicAdmin
from tests.unit.fakes import until
from tests.unit.kafka.asked_brokers import ClientOfTwo, admin_with, connect, connected_client


@pytest.mark.parametrize("down", [1, 2])
async def test_another_broker_is_asked_where_one_does_not_answer(monkeypatch: pytest.MonkeyPatch, down: int) -> None:
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.001)
    client = ClientOfTwo(down)
    admin = admin_with(client)
    for _ in range(2):
        assert await TopicAdmin(admin).partitions(["orders"]) == {"orders": 3}
    assert down in client.asked
    assert not client.closed


async def test_a_client_to_which_no_broker_answers_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """All brokers may have other addresses: only a new bootstrap finds them."""
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.001)
    client = ClientOfTwo(1, 2)
    admin = admin_with(client)
    with pytest.raises(KafkaAway):
        await TopicAdmin(admin).partitions(["orders"])
    assert set(client.asked) == {1, 2}
    assert client.closed
    assert connected_client(admin) is None


async def test_a_call_to_a_broker_that_hangs_fails_at_its_timeout() -> None:
    client = ClientOfTwo()
    client.hangs = True
    admin = admin_with(client, timeout_ms=50)
    async with asyncio.timeout(3.0):
        with pytest.raises(KafkaAway):
            await TopicAdmin(admin).partitions(["orders"])
    assert client.closed


@pytest.mark.parametrize("silent", [1, 2])
async def test_a_broker_that_is_silent_gets_a_share_of_the_time_only(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARE_LEAST_S", 0.01)
    client = ClientOfTwo()
    client.silent = {silent}
    client.get_random_node = lambda: silent  # type: ignore[method-assign]
    assert await TopicAdmin(admin_with(client)).partitions(["orders"]) == {"orders": 3}
    assert client.asked == [silent, 3 - silent]


async def test_a_single_slow_broker_gets_the_whole_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_LEAST_S", 0.01)
    client = ClientOfTwo()
    client.turn = deque([1])
    client.takes_s = 0.3
    assert await TopicAdmin(admin_with(client, timeout_ms=1000)).partitions(["orders"]) == {"orders": 3}
    assert client.asked == [1]


async def test_two_slow_brokers_are_both_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_LEAST_S", 0.01)
    client = ClientOfTwo()
    client.takes_s = 0.4
    assert await TopicAdmin(admin_with(client, timeout_ms=1000)).partitions(["orders"]) == {"orders": 3}
    assert sorted(client.asked) == [1, 2]


async def test_a_probe_fails_at_its_own_timeout_and_its_request_continues() -> None:
    """A probe has little time; if no broker answers, the request itself ends later and bootstraps again."""
    client = ClientOfTwo()
    client.hangs = True
    admin = admin_with(client, timeout_ms=100)
    for _ in range(3):
        with pytest.raises(KafkaAway, match="does not answer within"):
            await admin.answers(0.01)
    assert sorted(client.asked) == [1, 2], "each probe sent a request of its own"
    await until(lambda: client.closed)
    answering = admin._answering
    await admin.close()
    assert answering is not None


async def test_a_request_that_fails_leaves_the_client_that_replaced_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another request has connected it since, and others have requests under way on it."""
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.001)
    client, other = ClientOfTwo(1, 2), ClientOfTwo()
    admin = admin_with(client)
    sent = client.send

    async def send(node_id: int, request: Any, **_: Any) -> Any:
        if len(client.asked) == module.ASK_TRIES - 1:  # the last try
            connect(admin, other)
        return await sent(node_id, request)

    client.send = send  # type: ignore[method-assign]
    with pytest.raises(KafkaAway):
        await TopicAdmin(admin).partitions(["orders"])
    assert not other.closed
    assert await TopicAdmin(admin).partitions(["orders"]) == {"orders": 3}
    assert len(other.asked) == 1
