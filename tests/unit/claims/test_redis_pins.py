"""Pins the private names of redis-py and hiredis that service/claims uses."""

import importlib.metadata
import inspect
import ssl

import pytest
from hiredis import pack_command
from redis.asyncio import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)


@pytest.mark.parametrize(("name", "version"), [("redis", "8.1.0"), ("hiredis", "3.5.0")])
def test_the_pinned_versions_are_installed(name: str, version: str) -> None:
    assert importlib.metadata.version(name) == version


def test_hiredis_packs_a_command_as_bytes() -> None:
    assert pack_command(("GET", b"\x00", 7)) == b"*3\r\n$3\r\nGET\r\n$1\r\n\x00\r\n$1\r\n7\r\n"  # type: ignore[arg-type]


def test_a_connection_has_the_methods_that_are_called() -> None:
    for name, parameters in {
        "connect": {"self"},
        "can_read": {"self"},
        "read_response": {"self"},
        "send_packed_command": {"self", "command", "check_health"},
        "disconnect": {"self", "nowait"},
    }.items():
        method = getattr(Connection, name)
        assert inspect.iscoroutinefunction(method), name
        assert parameters <= inspect.signature(method).parameters.keys(), name
    assert isinstance(Connection.is_connected, property)


def test_a_pool_makes_connections_that_repeat_nothing() -> None:
    pool = ConnectionPool.from_url(
        "redis://127.0.0.1:1/3", retry=Retry(NoBackoff(), 0), socket_timeout=None, socket_connect_timeout=1.0
    )
    # As after `_connections`: a URL cannot change these.
    pool.connection_kwargs |= {"retry_on_error": [], "retry_on_timeout": False, "decode_responses": False}
    connection = pool.make_connection()  # type: ignore[no-untyped-call]
    assert isinstance(connection, Connection)
    assert not connection.is_connected
    assert (connection.db, connection.retry_on_timeout, connection.retry_on_error) == (3, False, [])
    assert connection.retry.get_retries() == 0


def test_the_ssl_context_of_a_tls_connection_can_be_set() -> None:
    connection = ConnectionPool.from_url("rediss://127.0.0.1:1/0").make_connection()  # type: ignore[no-untyped-call]
    assert isinstance(connection, SSLConnection)
    context = ssl.create_default_context()
    connection.ssl_context.context = context
    assert connection.ssl_context.get() is context


def test_host_and_port_of_a_connection_can_be_set() -> None:
    connection = ConnectionPool.from_url("redis://localhost:6379/0").make_connection()  # type: ignore[no-untyped-call]
    connection.host, connection.port = "elsewhere", 7
    assert connection._connection_arguments() == {"host": "elsewhere", "port": 7}


def test_the_hash_slot_of_a_key_is_that_of_its_tag() -> None:
    assert key_slot(b"{fencepost:0}kabc") == key_slot(b"fencepost:0") == 10955


def test_a_redirection_has_host_and_port() -> None:
    moved = MovedError("10955 10.0.0.1:7000")
    assert (moved.host, moved.port) == ("10.0.0.1", 7000)


def test_redis_errors_have_the_classes_that_the_service_distinguishes() -> None:
    assert all(issubclass(kind, RedisError) for kind in (BusyLoadingError, MasterDownError, AuthenticationError))
    refusals = (NoScriptError, ReadOnlyError, AskError, TryAgainError, ClusterDownError, NoPermissionError)
    assert all(issubclass(kind, ResponseError) for kind in refusals)
    assert issubclass(MovedError, AskError)
    assert issubclass(MasterDownError, ClusterDownError)
