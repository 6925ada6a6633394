"""Event loops and connections for the tests of Kafka's clients."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Final

import pytest
import uvloop

from service.kafka.client import Client
from service.kafka.connection import Connection
from tests.unit.kafka.listening_brokers import NODE, VERSIONS, Broker, Connect, client_of, listening

# Files whose tests open connections. They run on both loops: the service's is uvloop's, whose transports differ from
# asyncio's, and an application that uses the reader has either.
WITH_CONNECTIONS: Final = ("test_client", "test_connection", "test_login", "test_tokens")
LOOPS: Final = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the event loops of a test."""
    return LOOPS if item.path.stem in WITH_CONNECTIONS else {"asyncio": LOOPS["asyncio"]}


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connects clients to brokers of their own."""
    async with contextlib.AsyncExitStack() as exits:

        async def connected(versions: dict[int, tuple[int, int]] = VERSIONS) -> tuple[Client, Connection, Broker]:
            broker = Broker(versions)
            broker.port = await exits.enter_async_context(listening(broker.talk))
            client = client_of(broker.port)
            exits.push_async_callback(client.close)
            client.cluster.broker_metadata = lambda node: SimpleNamespace(host="127.0.0.1", port=broker.port)
            assert await client.ready(NODE)
            connection = client.connection(NODE)
            assert connection is not None
            return client, connection, broker

        yield connected
