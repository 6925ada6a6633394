"""Tests the logins of a connection: the session that a broker grants, and its renewal before it ends (KIP-368)."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from aiokafka import errors
from aiokafka.protocol.admin import (
    SaslAuthenticateResponse_v1,
    SaslHandShakeResponse_v1,
)
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.transaction import EndTxnResponse_v0

from service.contract import SharedSettings
from service.kafka import connection as module
from service.kafka.client import Client
from service.kafka.connection import Connection
from service.kafka.security import Security
from service.kafka.tokens import TokenError, TokenSource
from tests.unit.kafka.listening_brokers import END, NODE, api_versions, client_of, frame, listening, requests_from

VERSIONS: Final = {3: (0, 5), 17: (0, 1), 18: (0, 0), 26: (0, 5), 36: (0, 1)}
METADATA, HANDSHAKE, API_VERSIONS, END_TXN, AUTHENTICATE = 3, 17, 18, 26, 36
LOGIN: Final = [HANDSHAKE, AUTHENTICATE]
REFUSED: Final = errors.SaslAuthenticationFailed.errno
LIFETIME_MS: Final = 400


class Broker:
    """Logs clients in, notes their requests and the contents of their logins, and answers EndTxn."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[int] = []  # API keys, over all connections
        self.logins: list[bytes] = []
        self.connections = 0
        self.lifetime_ms = 0
        self.refusal = b""  # of OAUTHBEARER: an answer to which the client must reply
        self.error_code = 0  # of a login
        self.handshake_code = 0
        self.slow_s = 0.0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        async for message in requests_from(reader):
            key = int.from_bytes(message[:2], "big")
            self.requests.append(key)
            answer = self.answer(key, message)
            await asyncio.sleep(self.slow_s)
            writer.write(frame(message, answer))
        writer.close()

    def answer(self, key: int, message: bytes) -> Any:
        if key == API_VERSIONS:
            return api_versions(VERSIONS)
        if key == HANDSHAKE:
            return SaslHandShakeResponse_v1(self.handshake_code, ["PLAIN", "OAUTHBEARER"])
        if key == END_TXN:
            return EndTxnResponse_v0(0, 0)
        assert key == AUTHENTICATE
        client_id_bytes = int.from_bytes(message[8:10], "big")
        content = message[10 + client_id_bytes + 4 :]
        self.logins.append(content)
        if content == b"\x01":  # the client has read the refusal
            return SaslAuthenticateResponse_v1(REFUSED, '{"status":"invalid_token"}', b"", 0)
        return SaslAuthenticateResponse_v1(self.error_code, None, self.refusal, self.lifetime_ms)


class Tokens(TokenSource):
    """A source whose state the test sets."""

    def __init__(self) -> None:
        super().__init__("the test", {"logicalCluster": "lkc-1"})
        self.value = "a.b.c"
        self.ready = True
        self.renewals = 0

    @property
    def is_ready(self) -> bool:
        return self.ready

    def start_renewal(self) -> None:
        self.renewals += 1

    async def token(self) -> str:
        if not self.value:
            raise TokenError("the endpoint is away")
        return self.value


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    broker = Broker()
    async with listening(broker.talk) as broker.port:
        yield broker


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of a test are shorter than Kafka allows."""
    monkeypatch.setattr(module, "AGAIN_LEAST_S", 0.0)


def plain(**changes: Any) -> SharedSettings:
    return SharedSettings(
        kafka_security_protocol="SASL_PLAINTEXT",
        kafka_sasl_mechanism="PLAIN",
        kafka_sasl_username="me",
        **{"kafka_sasl_password": "first", **changes},
    )


BEARER: Final = SharedSettings(kafka_security_protocol="SASL_PLAINTEXT", kafka_sasl_mechanism="OAUTHBEARER")


async def connected(broker: Broker, security: Security, **options: Any) -> Client:
    """Make a client whose connection to NODE is open."""
    client = client_of(broker.port, security, **options)
    client.cluster.broker_metadata = lambda node: SimpleNamespace(host="127.0.0.1", port=broker.port)
    await client.send(NODE, END)
    return client


def connection_of(client: Client) -> Connection:
    connection = client.connection(NODE)
    assert connection is not None
    return connection


async def until_due(connection: Connection) -> None:
    await asyncio.sleep(connection.renew_at - time.monotonic() + 0.005)


async def test_a_session_without_an_end_is_not_renewed(broker: Broker) -> None:
    client = await connected(broker, Security(plain()))
    assert (connection_of(client).renew_at, client.has_due_session) == (math.inf, False)
    await client.renew_sessions()
    await client.close()
    assert broker.requests == [API_VERSIONS, *LOGIN, END_TXN]


async def test_a_session_is_renewed_on_the_same_connection_before_it_ends(broker: Broker) -> None:
    broker.lifetime_ms = LIFETIME_MS
    client = await connected(broker, Security(plain()))
    connection = connection_of(client)
    await client.send(NODE, END)
    assert broker.requests == [API_VERSIONS, *LOGIN, END_TXN, END_TXN]
    await until_due(connection)
    assert connection.ends_at > time.monotonic()
    await client.send(NODE, END)
    await client.close()
    assert broker.requests[5:] == [*LOGIN, END_TXN]
    assert (broker.connections, connection.renew_at) == (1, math.inf)


async def test_nothing_is_sent_amid_a_login(broker: Broker) -> None:
    broker.lifetime_ms = LIFETIME_MS
    client = await connected(broker, Security(plain()))
    await until_due(connection_of(client))
    broker.slow_s = 0.02
    await asyncio.gather(*(client.send(NODE, END) for _ in range(5)))
    await client.close()
    assert broker.requests[4:] == [*LOGIN, *[END_TXN] * 5]


async def test_a_session_of_a_transaction_is_renewed_only_between_two_or_at_its_end(broker: Broker) -> None:
    broker.lifetime_ms = LIFETIME_MS
    client = await connected(broker, Security(plain()), renews_on_use=False)
    connection = connection_of(client)
    await until_due(connection)
    await client.send(NODE, END)
    assert client.has_due_session
    assert broker.requests[4:] == [END_TXN]
    await client.renew_sessions()
    assert not client.has_due_session
    assert broker.requests[5:] == LOGIN
    await asyncio.sleep(connection.ends_at - time.monotonic() + 0.005)
    await client.send(NODE, END)
    await client.close()
    assert broker.requests[7:] == [*LOGIN, END_TXN]
    assert broker.connections == 1


async def test_a_renewal_that_is_refused_ends_the_connection_and_the_next_one_logs_in_anew(
    broker: Broker, tmp_path: Path
) -> None:
    """By the password as it is in the file then."""
    broker.lifetime_ms = LIFETIME_MS
    file = tmp_path / "password"
    file.write_text("first\n")
    security = Security(plain(secret_files={"kafka_sasl_password": str(file)}))
    client = await connected(broker, security)
    first = connection_of(client)
    file.write_text("second\n")
    await until_due(first)
    await client.send(NODE, END)
    broker.error_code = REFUSED
    await until_due(first)
    with pytest.raises(errors.NodeNotReadyError):
        await client.send(NODE, END)
    assert not first.connected()
    assert not client.has_due_session, "a closed connection has no session"
    broker.error_code = 0
    file.unlink()  # what was read last stays in use
    await client.send(NODE, END)
    assert connection_of(client) is not first
    await client.close()
    assert broker.logins == [b"\0".join((b"me", b"me", password)) for password in (b"first", *[b"second"] * 4)]
    assert not client.has_lost_connection


async def test_an_idle_connection_whose_session_is_due_is_replaced(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be dead, and a probe would end it, if its session has ended already."""
    broker.lifetime_ms = LIFETIME_MS
    client = await connected(broker, Security(plain()), renews_on_use=False)
    first = connection_of(client)
    await until_due(first)
    monkeypatch.setattr(module, "IDLE_S", 0.1)
    await client.renew_sessions()
    assert not first.connected()
    await client.send(NODE, END)
    await client.close()
    assert broker.requests[4:] == [API_VERSIONS, *LOGIN, END_TXN]
    assert (broker.connections, client.has_lost_connection) == (2, False)


async def test_a_token_and_its_extensions_are_sent_as_the_mechanism_defines_it(broker: Broker) -> None:
    client = await connected(broker, Security(BEARER, Tokens()))
    await client.close()
    assert broker.logins == [b"n,,\x01auth=Bearer a.b.c\x01logicalCluster=lkc-1\x01\x01"]


async def test_a_refused_token_is_an_error_with_the_brokers_words(broker: Broker) -> None:
    """The broker answers without an error code, and tells the error when the client has replied (RFC 7628)."""
    broker.refusal = b'{"status":"invalid_token"}'
    client = client_of(broker.port, Security(BEARER, Tokens()))
    with pytest.raises(errors.SaslAuthenticationFailed, match="invalid_token"):
        await client.bootstrap()
    await client.close()
    assert broker.logins[1:] == [b"\x01"]


async def test_a_mechanism_that_the_broker_lacks_is_an_error_that_names_what_the_broker_has(broker: Broker) -> None:
    broker.handshake_code = errors.UnsupportedSaslMechanismError.errno
    client = client_of(broker.port, Security(replace(plain(), kafka_sasl_mechanism="SCRAM-SHA-512")))
    with pytest.raises(errors.UnsupportedSaslMechanismError, match=r"SCRAM-SHA-512 .* PLAIN, OAUTHBEARER"):
        await client.bootstrap()
    await client.close()
    assert broker.requests == [API_VERSIONS, HANDSHAKE]


async def test_a_renewal_waits_for_a_new_token_as_long_as_the_session_lasts(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POSTPONED_S", 0.001)
    broker.lifetime_ms = LIFETIME_MS
    tokens = Tokens()
    client = await connected(broker, Security(BEARER, tokens))
    connection = connection_of(client)
    tokens.ready, tokens.value = False, ""
    await until_due(connection)
    await client.send(NODE, END)
    assert tokens.renewals == 1
    assert broker.requests[4:] == [END_TXN]
    tokens.ready, tokens.value = True, "d.e.f"
    await until_due(connection)
    await client.send(NODE, END)
    assert broker.requests[5:] == [*LOGIN, END_TXN]
    tokens.ready, tokens.value = False, ""
    await asyncio.sleep(connection.ends_at - time.monotonic() + 0.005)
    with pytest.raises(errors.NodeNotReadyError):  # Kafka is away
        await client.send(NODE, END)
    assert not connection.connected()
    await client.close()


async def test_a_bootstrap_goes_on_to_the_next_server_and_names_the_first_failure(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Answered:
        async def send(self, request: MetadataRequest) -> Any:
            return SimpleNamespace(brokers=[])

        def close(self) -> None:
            pass

    async def connect_to(host: str, port: int, on_close: object = None) -> Any:
        asked.append(port)
        if port != 3:
            raise OSError(f"port {port} is closed")
        return Answered()

    def client_for(*ports: int) -> Client:
        servers = [("127.0.0.1", port, None) for port in ports]
        client = Client(client_id="t", request_timeout_ms=500, security=Security(SharedSettings()))
        monkeypatch.setattr(type(client), "hosts", property(lambda _: servers))
        monkeypatch.setattr(client, "_connect_to", connect_to)
        monkeypatch.setattr(client.cluster, "update_metadata", lambda _: None)
        monkeypatch.setattr(client.cluster, "brokers", lambda: {NODE})
        return client

    with pytest.raises(errors.KafkaConnectionError, match="port 1 is closed"):
        await client_for(1, 2).bootstrap()
    client = client_for(2, 3)
    await client.bootstrap()
    await client.close()
    assert asked == [1, 2, 2, 3]
