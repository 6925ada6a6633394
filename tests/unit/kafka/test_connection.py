"""Tests a connection to a broker: the fast path beside aiokafka's own requests, and its end."""

import asyncio
import gc
import socket
import struct
import warnings

import pytest
from aiokafka import errors
from aiokafka.protocol.admin import ApiVersionRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceResponse_v7
from aiokafka.protocol.transaction import EndTxnResponse_v0

from service.contract import SharedSettings
from service.kafka import connection as module
from service.kafka.connection import Connection, ResponseReader
from service.kafka.protocol import ProduceRequest
from service.kafka.security import Security
from tests.unit.kafka.listening_brokers import END, NODE, Broker, Connect, frame


@pytest.mark.parametrize("part", [1, 3, 7, 1000])
async def test_responses_are_split_however_their_bytes_arrive(connect: Connect, part: int) -> None:
    client, _, broker = await connect()
    asked = [asyncio.create_task(client.send(NODE, END)) for _ in range(3)]
    messages = [await broker.next() for _ in asked]
    content = b"".join(frame(message, EndTxnResponse_v0(0, n)) for n, message in enumerate(messages))
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
    broker.send(frame(message, ProduceResponse_v7([("a", [(0, 0, 5, -1, 0), (1, 0, 6, -1, 0)])], 9)))
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
    broker.send(frame(messages[0], EndTxnResponse_v0(0, 1)))
    # Metadata 5: throttle, brokers, cluster id, controller, topics
    body = messages[1][4:8] + struct.pack(">iihii", 0, 0, -1, 1, 0)
    broker.send(struct.pack(">i", len(body)) + body)
    broker.send(frame(messages[2], EndTxnResponse_v0(0, 2)))
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
        broker.send(frame(await broker.next(), EndTxnResponse_v0(0, code)))
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


async def test_the_kernel_watches_over_a_connection(connect: Connect) -> None:
    _, connection, _ = await connect()
    its = connection.transport.get_extra_info("socket")
    assert its.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for name, value in module.TCP_OPTIONS.items():
        if hasattr(socket, name):
            assert its.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


async def connected_to(broker: Broker) -> Connection:
    """Open a connection of no client."""
    connection = Connection("127.0.0.1", broker.port, Security(SharedSettings()))
    await connection.connect()
    return connection


@pytest.mark.parametrize("steps", range(4))
async def test_a_request_on_a_connection_that_was_just_reset_fails_as_one_that_is_closed(
    connect: Connect, steps: int
) -> None:
    """A login or a probe has steps between its look at the connection and its request."""
    connection = await connected_to((await connect())[2])
    connection.transport.abort()
    for _ in range(steps):
        await asyncio.sleep(0)
    with pytest.raises(errors.KafkaConnectionError):
        await connection.send(ApiVersionRequest())
    assert not connection.connected()


async def test_an_unreferenced_connection_is_closed_with_a_warning(connect: Connect) -> None:
    connection = await connected_to((await connect())[2])
    ResponseReader.of(connection)
    transport = connection.transport
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        del connection
        gc.collect()
    assert transport.is_closing()
    assert any("Unclosed AIOKafkaConnection" in str(each.message) for each in warned)
