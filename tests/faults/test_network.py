"""Tests cuts in one direction or both, and lost packets, for a process in a network of its own."""

import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.stack import Redis, free_port
from tests.faults.network import Direction, Network, lacking

# Adds members to a set, with a timeout of half a second each, and prints each result. A set, because TCP may still
# deliver what the client has given up, once packets come through again.
TALK = """
import sys, redis
store = redis.Redis(port=int(sys.argv[1]), socket_timeout=0.5, socket_connect_timeout=0.5, retry=None)
for line in sys.stdin:
    try:
        store.sadd(sys.argv[2], line.strip())
        print("ok", flush=True)
    except redis.RedisError as error:
        store.connection_pool.disconnect()
        print(type(error).__name__, flush=True)
"""
# Tells one client its own address.
ANSWER = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    print("ready", flush=True)
    client, (host, _) = server.accept()
    with client:
        client.sendall(host.encode())
"""


@pytest.fixture(scope="module")
def network(redis: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    if why := lacking():
        pytest.skip(why)
    with Network(tmp_path_factory.mktemp("network"), {"redis": [redis.port], "nobody": [1]}) as network:
        yield network


class Talker:
    """A client inside, which writes what the test sends to its standard input."""

    def __init__(self, network: Network, redis: Redis) -> None:
        self.redis = redis
        self._name = f"said-{uuid.uuid4().hex}"
        self._run = subprocess.Popen(
            [*network.prefix, sys.executable, "-c", TALK, str(redis.port), self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self, value: str) -> str:
        assert self._run.stdin is not None
        assert self._run.stdout is not None
        self._run.stdin.write(f"{value}\n")
        self._run.stdin.flush()
        return self._run.stdout.readline().strip()

    def was_heard(self, value: str) -> bool:
        with self.redis.client() as client:
            return bool(client.sismember(self._name, value))

    def close(self) -> None:
        self._run.communicate()


@pytest.fixture
def talker(network: Network, redis: Redis) -> Iterator[Talker]:
    talker = Talker(network, redis)
    assert talker.says("hello") == "ok"
    yield talker
    network.mend()
    talker.close()


def test_servers_outside_are_where_they_always_are(talker: Talker) -> None:
    assert talker.was_heard("hello")


@pytest.mark.parametrize(("direction", "arrives"), [("both", False), ("out", False), ("in", True)])
def test_a_cut_drops_what_is_sent_in_its_direction(
    network: Network, talker: Talker, direction: Direction, arrives: bool
) -> None:
    """The client gets no answer in any case; if only replies are cut, the command was executed."""
    network.cut("redis", direction=direction)
    assert talker.says(direction) == "TimeoutError"
    assert talker.was_heard(direction) is arrives
    assert network.dropped() > 0
    network.mend()
    assert talker.says("mended") == "ok"
    assert talker.was_heard("mended")


def test_a_cut_from_another_server_changes_nothing(network: Network, talker: Talker) -> None:
    network.cut("nobody")
    assert talker.says("as ever") == "ok"
    assert network.dropped() == 0


def test_a_forgotten_connection_is_silent_and_a_new_one_works(network: Network, talker: Talker) -> None:
    network.forget("redis")
    assert talker.says("forgotten") == "TimeoutError"
    assert not talker.was_heard("forgotten")
    assert network.dropped() > 0
    assert talker.says("on a new connection") == "ok"


def test_a_third_of_all_packets_lost(network: Network, talker: Talker) -> None:
    """Some commands succeed: TCP sends lost packets again."""
    network.lose(0.3, "redis")
    replies = [talker.says(f"{number}") for number in range(8)]
    assert network.dropped() > 0
    assert "ok" in replies


def test_a_server_inside_is_reached_at_its_port(network: Network) -> None:
    """The server sees its clients at 127.0.0.1."""
    port = free_port()
    command = [sys.executable, "-c", ANSWER, str(port)]
    with subprocess.Popen([*network.prefix, *command], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        network.admit(port)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            assert client.recv(100) == b"127.0.0.1"


def test_nothing_of_it_is_left(tmp_path: Path) -> None:
    if why := lacking():
        pytest.skip(why)
    links = Path("/sys/class/net")
    before = {link.name for link in links.iterdir()}
    with Network(tmp_path, {}) as network:
        assert {link.name for link in links.iterdir()} > before
        network.kill()
        deadline = time.monotonic() + 5
        while {link.name for link in links.iterdir()} != before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
