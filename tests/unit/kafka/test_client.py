"""Tests the clients of Kafka: the fast path of transaction requests, their connections, and the metadata of topics."""

import asyncio
import contextlib
import gc
import socket
import ssl
import struct
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from aiokafka import errors
from aiokafka.protocol.admin import ApiVersionRequest, ApiVersionResponse_v0
from aiokafka.protocol.metadata import MetadataRequest, MetadataRequest_v5, MetadataResponse_v5
from aiokafka.protocol.produce import ProduceResponse_v7
from aiokafka.protocol.transaction import AddPartitionsToTxnResponse_v0, EndTxnResponse_v0
from aiokafka.structs import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from service.contract import SharedSettings
from service.kafka import connection as module
from service.kafka.admin import RETRIABLE
from service.kafka.client import BaseClient, Client
from service.kafka.connection import Connection, ResponseReader
from service.kafka.protocol import CODECS, AddPartitionsToTxnRequest, EndTxnRequest, ProduceRequest
from service.kafka.security import Security
from tests.secured import Authority
from tests.unit.fakes import until

VERSIONS = {0: (3, 11), 3: (0, 5), 18: (0, 0), 24: (0, 5), 26: (0, 5)}
NODE = 1
END = EndTxnRequest("ns.slot.0", 7, 2, True)

names = st.text(max_size=12)
int16 = st.integers(-(2**15), 2**15 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
requests = st.one_of(
    st.builds(
        ProduceRequest,
        st.none() | names,
        int16,
        int32,
        st.lists(st.tuples(names, st.lists(st.tuples(int32, st.binary(max_size=50)), max_size=3)), max_size=3),
    ),
    st.builds(
        AddPartitionsToTxnRequest,
        names,
        int64,
        int16,
        st.lists(st.tuples(names, st.lists(int32, max_size=3)), max_size=3),
    ),
    st.builds(EndTxnRequest, names, int64, int16, st.booleans()),
)
rows = st.lists(st.tuples(names, st.lists(st.tuples(int32, int16), max_size=3)), max_size=3)
answers = st.one_of(
    st.builds(
        ProduceResponse_v7,
        st.lists(
            st.tuples(names, st.lists(st.tuples(int32, int16, int64, int64, int64), max_size=3)),
            max_size=3,
        ),
        int32,
    ),
    st.builds(AddPartitionsToTxnResponse_v0, int32, rows),
    st.builds(EndTxnResponse_v0, int32, int16),
)
KINDS: dict[type, Any] = {
    ProduceResponse_v7: ProduceRequest,
    AddPartitionsToTxnResponse_v0: AddPartitionsToTxnRequest,
    EndTxnResponse_v0: EndTxnRequest,
}


@given(request=requests, correlation_id=st.integers(0, 2**31 - 1), client_id=st.text(max_size=20))
def test_a_request_is_encoded_as_aiokafka_encodes_it(request: Any, correlation_id: int, client_id: str) -> None:
    prepared = request.prepare(VERSIONS)
    message = prepared.build_request_header(correlation_id, client_id).encode() + prepared.encode()
    form = CODECS[type(request)]
    size, pieces = form.frame(request, correlation_id, client_id)
    assert (form.api_key, form.version) == (prepared.API_KEY, prepared.API_VERSION)
    assert (size, b"".join(pieces)) == (len(message), struct.pack(">i", len(message)) + message)


@given(answer=answers, cut=st.integers(1, 1000))
def test_a_response_is_decoded_as_aiokafka_decodes_it(answer: Any, cut: int) -> None:
    encoded = b"\0\0\0\5" + answer.encode()
    form = CODECS[KINDS[type(answer)]]
    read = form.decode(encoded)
    theirs = type(answer).decode(encoded[4:])
    assert read._asdict() == {name: getattr(theirs, name) for name in theirs.SCHEMA.names}
    with pytest.raises((struct.error, UnicodeDecodeError)):
        form.decode(encoded[: -min(cut, len(encoded))])


class Broker:
    """Takes requests, and sends the planned responses; it answers ApiVersions by itself."""

    def __init__(self, versions: dict[int, tuple[int, int]]) -> None:
        self.versions = versions
        self.asked: asyncio.Queue[bytes] = asyncio.Queue()
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._forgotten: set[asyncio.StreamWriter] = set()

    def forget(self) -> None:
        """Lose all bytes of the present connections from now on, as a firewall that has forgotten them."""
        self._forgotten.update(self._writers)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                message: bytes = await reader.readexactly(size)
                if writer in self._forgotten:
                    continue
                if message[:2] == struct.pack(">h", 18):
                    answer = ApiVersionResponse_v0(0, [(key, *span) for key, span in self.versions.items()])
                    self.send(self.frame(message, answer))
                else:
                    await self.asked.put(message)
        except asyncio.IncompleteReadError:
            writer.close()

    @staticmethod
    def frame(message: bytes, answer: Any) -> bytes:
        """Frame a response to a request."""
        encoded: bytes = message[4:8] + answer.encode()
        return struct.pack(">i", len(encoded)) + encoded

    def send(self, content: bytes) -> None:
        self._writers[-1].write(content)

    def hang_up(self) -> None:
        self._writers[-1].close()

    async def next(self) -> bytes:
        async with asyncio.timeout(5):
            return await self.asked.get()


def client_of(port: int, security: Security | None = None) -> Client:
    return Client(
        bootstrap_servers=f"127.0.0.1:{port}",
        client_id="test",
        request_timeout_ms=2_000,
        security=security or Security(SharedSettings()),
    )


Connect = Callable[..., Awaitable[tuple[Client, Connection, Broker]]]
Ask = Callable[[], Awaitable[bool]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    made: list[tuple[Client, asyncio.Server]] = []

    async def connected(**versions: Any) -> tuple[Client, Connection, Broker]:
        broker = Broker(versions.get("versions", VERSIONS))
        server = await asyncio.start_server(broker.talk, "127.0.0.1", 0)
        broker.port = server.sockets[0].getsockname()[1]
        client = client_of(broker.port)
        made.append((client, server))
        client.cluster.broker_metadata = lambda node: SimpleNamespace(host="127.0.0.1", port=broker.port)
        assert await client.ready(NODE)
        connection = client.connection(NODE)
        assert connection is not None
        return client, connection, broker

    yield connected
    for client, server in made:
        await client.close()
        server.close()


@pytest.mark.parametrize("part", [1, 3, 7, 1000])
async def test_responses_are_split_however_their_bytes_arrive(connect: Connect, part: int) -> None:
    client, _, broker = await connect()
    asked = [asyncio.create_task(client.send(NODE, END)) for _ in range(3)]
    messages = [await broker.next() for _ in asked]
    content = b"".join(broker.frame(message, EndTxnResponse_v0(0, n)) for n, message in enumerate(messages))
    for start in range(0, len(content), part):
        broker.send(content[start : start + part])
        await asyncio.sleep(0.001)
    assert [answer.error_code for answer in await asyncio.gather(*asked)] == [0, 1, 2]


async def test_a_large_payload_is_sent_in_its_place_in_the_request(connect: Connect) -> None:
    client, _, broker = await connect()
    topics = [("a", [(0, b"x" * 200_000), (1, b"y" * 3)])]
    asked = asyncio.create_task(client.send(NODE, ProduceRequest(None, -1, 100, topics)))
    message = await broker.next()
    assert message.endswith(struct.pack(">ii", 1, 3) + b"yyy")
    assert message.count(b"x") == 200_000
    broker.send(broker.frame(message, ProduceResponse_v7([("a", [(0, 0, 5, -1, 0), (1, 0, 6, -1, 0)])], 9)))
    answer = await asked
    assert (answer.topics, answer.throttle_time_ms) == ([("a", [(0, 0, 5, -1, 0), (1, 0, 6, -1, 0)])], 9)


async def test_aiokafka_s_own_requests_go_between(connect: Connect) -> None:
    client, _, broker = await connect()
    first = client.try_send(NODE, END)
    assert first is not None
    other = asyncio.create_task(client.send(NODE, MetadataRequest([], allow_auto_topic_creation=False)))
    await asyncio.sleep(0)
    last = client.try_send(NODE, END)
    assert last is not None
    messages = [await broker.next() for _ in range(3)]
    assert [struct.unpack_from(">h", message)[0] for message in messages] == [26, 3, 26]
    broker.send(broker.frame(messages[0], EndTxnResponse_v0(0, 1)))
    # Metadata 5: throttle, brokers, cluster id, controller, topics
    body = messages[1][4:8] + struct.pack(">iihii", 0, 0, -1, 1, 0)
    broker.send(struct.pack(">i", len(body)) + body)
    broker.send(broker.frame(messages[2], EndTxnResponse_v0(0, 2)))
    assert (await first).error_code == 1
    assert (await other).topics == []
    assert (await last).error_code == 2


async def test_a_response_to_a_cancelled_request_is_not_taken_for_the_next(connect: Connect) -> None:
    client, _, broker = await connect()
    given_up = client.try_send(NODE, END)
    kept = client.try_send(NODE, END)
    assert given_up is not None
    assert kept is not None
    given_up.cancel()
    for code in (1, 2):
        broker.send(broker.frame(await broker.next(), EndTxnResponse_v0(0, code)))
    assert (await kept).error_code == 2


@pytest.mark.parametrize(
    "wrong",
    [
        struct.pack(">ii", 4, 77),  # of another request
        struct.pack(">ih", 2, 0),  # too short for a correlation id
    ],
)
async def test_an_invalid_response_ends_the_connection_and_fails_every_request(connect: Connect, wrong: bytes) -> None:
    client, connection, broker = await connect()
    asked = [client.try_send(NODE, END) for _ in range(2)]
    await broker.next()
    broker.send(wrong + wrong)
    for answer in asked:
        assert answer is not None
        with pytest.raises(errors.KafkaConnectionError):
            await asyncio.wait_for(answer, 5)
    assert not connection.connected()
    assert client.try_send(NODE, END) is None


async def test_an_answer_that_ends_too_soon_ends_the_connection(connect: Connect) -> None:
    client, connection, broker = await connect()
    asked = client.try_send(NODE, END)
    message = await broker.next()
    broker.send(struct.pack(">i", 6) + message[4:8] + b"\0\0")
    assert asked is not None
    with pytest.raises(errors.KafkaConnectionError):
        await asyncio.wait_for(asked, 5)
    assert not connection.connected()


async def test_a_broker_that_hangs_up_fails_every_wait(connect: Connect) -> None:
    client, connection, broker = await connect()
    asked = asyncio.create_task(client.send(NODE, END))
    await broker.next()
    broker.hang_up()
    with pytest.raises(errors.KafkaConnectionError):
        await asyncio.wait_for(asked, 5)
    assert not connection.connected()


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


async def test_a_connection_that_the_client_makes_takes_the_short_way(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, first, broker = await connect()
    where = SimpleNamespace(host="127.0.0.1", port=broker.port)
    monkeypatch.setattr(client.cluster, "broker_metadata", lambda node: where)
    first.close()
    assert client.try_send(NODE, END) is None
    asked = [asyncio.create_task(client.send(NODE, END)) for _ in range(2)]
    for _ in asked:
        broker.send(broker.frame(await broker.next(), EndTxnResponse_v0(0, 0)))
    assert [answer.error_code for answer in await asyncio.gather(*asked)] == [0, 0]
    second = client.connection(NODE)
    assert second is not None
    assert second is not first
    assert isinstance(second.writer.transport.get_protocol(), ResponseReader)


@pytest.mark.parametrize("alike", [1, 3])
async def test_an_idle_connection_that_a_firewall_forgot_is_replaced_before_it_is_used(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, alike: int
) -> None:
    """Also for callers that come during its probe."""
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    client, first, broker = await connect()
    where = SimpleNamespace(host="127.0.0.1", port=broker.port)
    monkeypatch.setattr(client.cluster, "broker_metadata", lambda node: where)
    await asyncio.sleep(0.1)
    broker.forget()
    assert client.try_send(NODE, END) is None
    asked = [asyncio.create_task(client.send(NODE, END)) for _ in range(alike)]
    for _ in asked:
        broker.send(broker.frame(await broker.next(), EndTxnResponse_v0(0, 0)))
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
    broker.send(broker.frame(message, EndTxnResponse_v0(0, 3)))
    assert (await asked).error_code == 3
    assert client.connection(NODE) is first


async def test_the_kernel_watches_over_a_connection(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    client, first, broker = await connect()
    where = SimpleNamespace(host="127.0.0.1", port=broker.port)
    monkeypatch.setattr(client.cluster, "broker_metadata", lambda node: where)
    first.close()
    assert await client.ready(NODE)
    connection = client.connection(NODE)
    assert connection is not None
    its = connection.writer.transport.get_extra_info("socket")
    assert its.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for name, value in module.TCP_OPTIONS.items():
        if hasattr(socket, name):
            assert its.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


async def test_a_connection_that_was_reset_is_replaced_and_not_written_to(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiokafka notices the end some steps later, and uvloop raises RuntimeError for writes until then."""
    client, connection, broker = await connect()
    where = SimpleNamespace(host="127.0.0.1", port=broker.port)
    monkeypatch.setattr(client.cluster, "broker_metadata", lambda node: where)
    connection.writer.transport.abort()
    assert connection.connected()
    assert client.try_send(NODE, END) is None
    assert await client.ready(NODE)  # also for aiokafka's own requests
    another = client.connection(NODE)
    assert another is not None
    assert another is not connection
    assert not another.writer.is_closing()
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
    async with await asyncio.start_server(Broker(VERSIONS).talk, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        client = client_of(port, Security(settings))
        monkeypatch.setattr(
            client.cluster, "broker_metadata", lambda node: SimpleNamespace(host="127.0.0.1", port=port)
        )
        with pytest.raises(RETRIABLE):
            await client.send(NODE, END)
        await client.close()


@pytest.mark.parametrize("steps", range(4))
def test_a_request_on_a_connection_that_was_just_reset_fails_as_one_that_is_closed(steps: int) -> None:
    """A login or a probe has steps between its look at the connection and its request. The loop is that of uvloop."""

    async def send_after_reset() -> None:
        async with await asyncio.start_server(Broker(VERSIONS).talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            connection = Connection("127.0.0.1", port, Security(SharedSettings()))
            await connection.connect()
            connection.writer.transport.abort()
            for _ in range(steps):
                await asyncio.sleep(0)
            with pytest.raises(errors.KafkaConnectionError):
                await connection.send(ApiVersionRequest())
            assert not connection.connected()

    uvloop.run(send_after_reset())


async def test_an_unreferenced_connection_is_closed_with_a_warning(connect: Connect) -> None:
    _, _, broker = await connect()
    connection = Connection("127.0.0.1", broker.port, Security(SharedSettings()))
    await connection.connect()
    ResponseReader.of(connection)
    transport = connection.writer.transport
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        del connection
        gc.collect()
    assert transport.is_closing()
    assert any("Unclosed AIOKafkaConnection" in str(each.message) for each in warned)


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
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                message: bytes = await reader.readexactly(size)
                if message[:2] == struct.pack(">h", 18):
                    answer = ApiVersionResponse_v0(0, [(key, *span) for key, span in self.versions.items()])
                else:
                    answer = self._metadata(message)
                if message[:2] == struct.pack(">h", 3) and self.held is not None:
                    held, self.held = self.held, None
                    await held.wait()
                writer.write(self.frame(message, answer))
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
    server = await asyncio.start_server(broker.talk, "127.0.0.1", 0)
    broker.port = server.sockets[0].getsockname()[1]
    client = client_of(broker.port)
    await client.bootstrap()
    broker.topics_asked.clear()
    yield client, broker
    await client.close()
    server.close()


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
    async with await asyncio.start_server(broker.talk, "127.0.0.1", 0) as server:
        broker.port = server.sockets[0].getsockname()[1]
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

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        ports = {NODE: broker.port, 2: silent.sockets[0].getsockname()[1]}
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


async def test_whoever_waits_for_metadata_is_told_that_the_client_is_closed(
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
