"""Tests the clients of Kafka: which connections they open, use and replace, and the metadata of topics."""

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors
from aiokafka.protocol.metadata import MetadataRequest_v5, MetadataResponse_v5
from aiokafka.protocol.transaction import EndTxnResponse_v0
from aiokafka.structs import TopicPartition

from service.contract import SharedSettings
from service.kafka import connection as module
from service.kafka.client import BaseClient, Client
from service.kafka.connection import Connection, ResponseReader
from service.kafka.nodes import RETRIABLE
from service.kafka.protocol import ProduceRequest
from service.kafka.security import Security
from tests.secured import Authority
from tests.unit.fakes import until
from tests.unit.kafka.listening_brokers import (
    END,
    NODE,
    VERSIONS,
    Broker,
    Connect,
    api_versions,
    client_of,
    frame,
    listening,
    requests_from,
)

Ask = Callable[[], Awaitable[bool]]


async def test_a_broker_that_speaks_another_version_is_asked_by_aiokafka(connect: Connect) -> None:
    client, _, broker = await connect(versions={**VERSIONS, 0: (0, 3)})
    request = ProduceRequest("t", -1, 100, [("a", [(0, b"batch")])])
    assert client.try_send(NODE, request) is None
    asked = asyncio.create_task(client.send(NODE, request))
    message = await broker.next()
    assert struct.unpack_from(">hh", message) == (0, 3)
    body = message[4:8] + struct.pack(">ih1siihqqi", 1, 1, b"a", 1, 0, 0, 5, -1, 0)
    broker.send(struct.pack(">i", len(body)) + body)
    (topic,) = (await asked).topics
    assert topic[1][0][:3] == (0, 0, 5)


async def test_a_connection_that_the_client_makes_takes_the_short_way(connect: Connect) -> None:
    client, first, broker = await connect()
    first.close()
    assert client.try_send(NODE, END) is None
    asked = [asyncio.create_task(client.send(NODE, END)) for _ in range(2)]
    for _ in asked:
        broker.send(frame(await broker.next(), EndTxnResponse_v0(0, 0)))
    assert [answer.error_code for answer in await asyncio.gather(*asked)] == [0, 0]
    second = client.connection(NODE)
    assert second is not None
    assert second is not first
    assert isinstance(second.transport.get_protocol(), ResponseReader)


@pytest.mark.parametrize("alike", [1, 3])
async def test_an_idle_connection_that_a_firewall_forgot_is_replaced_before_it_is_used(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, alike: int
) -> None:
    """Also for callers that come during its probe."""
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    client, first, broker = await connect()
    await asyncio.sleep(0.1)
    broker.forget()
    assert client.try_send(NODE, END) is None
    asked = [asyncio.create_task(client.send(NODE, END)) for _ in range(alike)]
    for _ in asked:
        broker.send(frame(await broker.next(), EndTxnResponse_v0(0, 0)))
    assert [answer.error_code for answer in await asyncio.gather(*asked)] == [0] * alike
    assert not first.connected()


async def test_an_idle_connection_that_answers_its_probe_is_used(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, first, broker = await connect()
    await asyncio.sleep(0.1)
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    assert client.try_send(NODE, END) is None
    asked = asyncio.create_task(client.send(NODE, END))
    message = await broker.next()
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    assert client.try_send(NODE, END) is not None, "an answer is due: it is not idle"
    broker.send(frame(message, EndTxnResponse_v0(0, 3)))
    assert (await asked).error_code == 3
    assert client.connection(NODE) is first


async def test_a_connection_that_was_reset_is_replaced_and_not_written_to(connect: Connect) -> None:
    """aiokafka notices the end some steps later, and uvloop raises RuntimeError for writes until then."""
    client, connection, _ = await connect()
    connection.transport.abort()
    assert connection.connected()
    assert client.try_send(NODE, END) is None
    assert await client.ready(NODE)  # also for aiokafka's own requests
    another = client.connection(NODE)
    assert another is not None
    assert another is not connection
    assert not another.transport.is_closing()
    assert client.has_lost_connection


async def test_a_connection_that_ends_with_its_login_is_a_failure_that_is_tried_again(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader may close a connection between its login and its first use."""
    client, connection, _ = await connect()
    connection.close()
    opened = Connection.connect

    async def open_and_close(self: Connection) -> Any:
        streams = await opened(self)
        self.close()
        return streams

    monkeypatch.setattr(Connection, "connect", open_and_close)
    with pytest.raises(RETRIABLE):
        await client.send(NODE, END)


async def test_a_tls_connection_that_is_gone_when_its_login_ends_is_a_failure_that_is_tried_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of SCRAM is one in a thread, in which a broker may reset the connection."""
    issued = authority.issue("broker", "IP:127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(issued.certfile, issued.keyfile)
    settings = SharedSettings(kafka_security_protocol="SSL", kafka_ssl_cafile=str(authority.cafile))
    opened = Connection.connect

    async def open_and_lose(self: Connection) -> Any:
        streams = await opened(self)
        await self.abort()
        return streams

    monkeypatch.setattr(Connection, "connect", open_and_lose)
    async with listening(Broker(VERSIONS).talk, ssl=context) as port:
        client = client_of(port, Security(settings))
        node = SimpleNamespace(host="127.0.0.1", port=port)
        monkeypatch.setattr(client.cluster, "broker_metadata", lambda _: node)
        with pytest.raises(RETRIABLE):
            await client.send(NODE, END)
        await client.close()


async def test_try_send_without_a_connection_sends_nothing_and_an_unknown_node_is_not_ready() -> None:
    client = client_of(1)
    assert client.try_send(NODE, END) is None
    with pytest.raises(errors.NodeNotReadyError):
        await client.send(NODE, END)
    await client.close()


class MetadataBroker(Broker):
    """Answers each Metadata request, and keeps the topics that it asked for; partition 0 of each is led by NODE."""

    def __init__(self) -> None:
        super().__init__(VERSIONS)
        self.topics_asked: list[set[str]] = []
        self.absent: set[str] = set()
        self.held: asyncio.Event | None = None  # the next response waits for it

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for message in requests_from(reader):
            if message[:2] == struct.pack(">h", 18):
                writer.write(frame(message, api_versions(self.versions)))
                continue
            answer = self._metadata(message)
            if self.held is not None:
                held, self.held = self.held, None
                await held.wait()
            writer.write(frame(message, answer))
        writer.close()

    def _metadata(self, message: bytes) -> MetadataResponse_v5:
        (length,) = struct.unpack_from(">h", message, 8)
        topics, allows_creation = MetadataRequest_v5.SCHEMA.decode(BytesIO(message[10 + length :]))
        assert not allows_creation
        self.topics_asked.append(set(topics))
        rows: list[Any] = [
            (3, name, False, []) if name in self.absent else (0, name, False, [(0, 0, NODE, [NODE], [NODE], [])])
            for name in topics
        ]
        return MetadataResponse_v5(0, [(NODE, "127.0.0.1", self.port, None)], "cluster", NODE, rows)


@pytest.fixture
async def knowing() -> AsyncIterator[tuple[Client, MetadataBroker]]:
    """A client that is connected, and has asked for no topic."""
    broker = MetadataBroker()
    async with listening(broker.talk) as broker.port:
        client = client_of(broker.port)
        await client.bootstrap()
        broker.topics_asked.clear()
        yield client, broker
        await client.close()


def led(client: BaseClient, topics: Collection[str]) -> set[str]:
    return {topic for topic in topics if client.cluster.leader_for_partition(TopicPartition(topic, 0)) == NODE}


async def test_the_metadata_of_a_new_topic_is_requested_without_that_of_the_others(
    knowing: tuple[Client, MetadataBroker],
) -> None:
    """Thousands of new topics, one after the other, would else cost the square of their number."""
    client, broker = knowing
    names = [f"topic-{number}" for number in range(50)]
    for known, name in enumerate(names):
        await (client.add_topic(name) if known % 2 else client.set_topics({*names[:known], name}))
    assert broker.topics_asked == [{name} for name in names]
    assert led(client, names) == set(names)
    await client.force_metadata_update()
    assert broker.topics_asked[50:] == [set(names)]


async def test_topics_that_are_asked_for_amid_a_request_come_with_the_next(
    knowing: tuple[Client, MetadataBroker],
) -> None:
    client, broker = knowing
    held = broker.held = asyncio.Event()
    first = client.set_topics({"a"})
    await until(lambda: bool(broker.topics_asked))
    second, third = client.refresh({"a"}), client.set_topics({"a", "b"})
    held.set()
    assert all(await asyncio.gather(first, second, third))
    assert broker.topics_asked == [{"a"}, {"a", "b"}]
    assert led(client, ("a", "b")) == {"a", "b"}


async def amid_request(broker: MetadataBroker, first: Ask, second: Ask) -> None:
    """Make a second request for metadata while the broker holds the response to the first, and await both."""
    broker.topics_asked.clear()
    held = broker.held = asyncio.Event()
    asked = first()
    await until(lambda: bool(broker.topics_asked))
    asked_next = second()
    held.set()
    assert all(await asyncio.gather(asked, asked_next))


async def test_all_topics_that_are_asked_for_amid_the_request_of_a_new_one_are_asked_for_too(
    knowing: tuple[Client, MetadataBroker],
) -> None:
    """A leader may have moved."""
    client, broker = knowing
    await client.set_topics({"a"})
    await amid_request(broker, lambda: client.set_topics({"a", "b"}), client.force_metadata_update)
    assert broker.topics_asked == [{"b"}, {"a", "b"}]


async def test_a_topic_that_a_refresh_does_not_find_is_known_no_more(knowing: tuple[Client, MetadataBroker]) -> None:
    client, broker = knowing
    await client.set_topics({"a", "b"})
    broker.absent = {"a", "b"}
    await client.refresh({"a"})
    assert client.cluster.topics(exclude_internal_topics=False) == {"b"}
    assert client.cluster.partitions_for_topic("a") is None
    assert broker.topics_asked == [{"a", "b"}, {"a"}]


async def test_the_metadata_of_all_topics_is_not_kept_beyond_its_age_while_new_ones_come(
    knowing: tuple[Client, MetadataBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, broker = knowing
    await client.set_topics({"a"})
    monkeypatch.setitem(client.cluster.config, "metadata_max_age_ms", 0)
    await client.set_topics({"a", "b"})
    assert broker.topics_asked == [{"a"}, {"a", "b"}]
    monkeypatch.undo()
    await client.set_topics({"a", "b", "c"})
    assert broker.topics_asked[2:] == [{"c"}]


async def test_metadata_that_cannot_be_read_is_requested_again(
    knowing: tuple[Client, MetadataBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = knowing
    await client.add_topic("a")

    def unreadable(_: object) -> None:
        raise ValueError("not a response")

    monkeypatch.setattr(client.cluster, "update_metadata", unreadable)
    assert not await asyncio.wait_for(client.force_metadata_update(), 5)
    monkeypatch.undo()
    assert await asyncio.wait_for(client.force_metadata_update(), 5)
    assert led(client, "a") == {"a"}


async def test_a_topic_that_is_added_amid_the_request_for_all_is_requested_next(
    knowing: tuple[Client, MetadataBroker],
) -> None:
    client, broker = knowing
    await client.set_topics({"a"})
    await amid_request(broker, client.force_metadata_update, lambda: client.add_topic("b"))
    assert broker.topics_asked == [{"a"}, {"b"}]
    assert led(client, "ab") == {"a", "b"}


async def test_the_client_of_a_consumer_requests_all_its_topics_again_where_they_change_meanwhile() -> None:
    """A request for no topics must not return all, and none may create a topic (MetadataBroker)."""
    broker = MetadataBroker()
    async with listening(broker.talk) as broker.port:
        security = Security(SharedSettings())
        address = f"127.0.0.1:{broker.port}"
        client = BaseClient(bootstrap_servers=address, client_id="test", request_timeout_ms=2_000, security=security)
        await client.bootstrap()
        assert await client.force_metadata_update()
        assert broker.topics_asked == [set(), set()]
        await amid_request(broker, lambda: client.set_topics({"a"}), lambda: client.add_topic("b"))
        assert broker.topics_asked == [{"a"}, {"a", "b"}]
        assert led(client, "ab") == {"a", "b"}
        await client.close()


async def test_a_new_topic_without_a_response_is_requested_again(
    knowing: tuple[Client, MetadataBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, broker = knowing
    await client.set_topics({"a"})
    monkeypatch.setattr(client.cluster, "brokers", lambda: set())
    assert not await client.set_topics({"a", "b"})
    monkeypatch.undo()
    assert await client.refresh({"c"})
    assert broker.topics_asked == [{"a"}, {"b", "c"}]


async def test_a_broker_that_does_not_answer_delays_no_connection_to_another(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, first, broker = await connect()
    first.close()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with listening(say_nothing) as silent_port:
        ports = {NODE: broker.port, 2: silent_port}
        nodes = {node: SimpleNamespace(host="127.0.0.1", port=port) for node, port in ports.items()}
        monkeypatch.setattr(client.cluster, "broker_metadata", nodes.get)
        slow = asyncio.create_task(client.ready(2))
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(client.ready(NODE), 1)
        assert not slow.done()
        slow.cancel()
        await asyncio.wait({slow})


async def test_a_closed_client_opens_no_connection(connect: Connect) -> None:
    """A session that has ended must send nothing more, and nobody would close the connection."""
    client, _, _ = await connect()
    await client.close()
    assert not await client.ready(NODE)
    with pytest.raises(errors.NodeNotReadyError):
        await client.send(NODE, END)


async def test_a_connection_that_opens_while_its_client_is_closed_is_closed_too(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, first, _ = await connect()
    first.close()
    opened: list[Connection] = []
    is_closed = asyncio.Event()
    connect_first = Connection.connect

    async def connect_late(self: Connection) -> Any:
        streams = await connect_first(self)
        opened.append(self)
        await is_closed.wait()
        return streams

    monkeypatch.setattr(Connection, "connect", connect_late)
    opening = asyncio.create_task(client.ready(NODE))
    await until(lambda: bool(opened))
    await client.close()
    is_closed.set()
    assert not await opening
    assert not opened[0].connected()


async def test_a_wait_for_metadata_ends_without_a_response_when_the_client_is_closed(
    knowing: tuple[Client, MetadataBroker],
) -> None:
    client, broker = knowing
    held = broker.held = asyncio.Event()
    asked = client.force_metadata_update()
    await until(lambda: bool(broker.topics_asked))
    await client.close()
    held.set()
    assert not await asyncio.wait_for(asked, 1)
    assert not await asyncio.wait_for(client.refresh({"a"}), 1)


async def test_a_closed_connection_has_no_session_that_is_due(connect: Connect) -> None:
    """The last step of a login may end after the connection has."""
    client, connection, _ = await connect()
    connection.renew_at = 0.0
    assert client.has_due_session
    connection.close()
    connection.renew_at = 0.0
    assert not client.has_due_session
