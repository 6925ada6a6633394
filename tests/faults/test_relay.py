"""Tests that the relay leads to its target, holds bytes on request, and loses held bytes when its target changes."""

import contextlib
import gc
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from deploy.stack import free_port
from tests.faults.proxy import Proxy
from tests.faults.relay import Relay


@contextmanager
def server(name: bytes) -> Iterator[int]:
    """Serve connections: answers each byte with its name."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as connections:

        def answer(connection: socket.socket) -> None:
            with connection:
                while connection.recv(1):
                    connection.sendall(name)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                thread = threading.Thread(target=answer, args=(connection,), daemon=True)
                thread.start()
                connections.callback(thread.join, 5)

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield int(listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join(5)


def ask(client: socket.socket) -> bytes | None:
    with contextlib.suppress(OSError):  # cut: the answer shows it
        client.sendall(b"?")
    return answer_of(client)


def answer_of(client: socket.socket) -> bytes | None:
    """Return the answer; None if the connection was cut."""
    with contextlib.suppress(ConnectionResetError):
        return client.recv(1) or None
    return None


def test_a_relay_led_to_another_server_cuts_its_open_connections() -> None:
    with server(b"a") as first, server(b"b") as second, Relay(first) as relay:
        with socket.create_connection(("127.0.0.1", relay.port), 5) as client:
            assert ask(client) == b"a"
            relay.lead_to(second)
            assert ask(client) is None
        with socket.create_connection(("127.0.0.1", relay.port), 5) as client:
            assert ask(client) == b"b"


def test_bytes_that_a_relay_holds_arrive_late_or_never() -> None:
    with server(b"a") as there, Relay(there) as relay:
        for lost in (False, True):
            with socket.create_connection(("127.0.0.1", relay.port), 5) as client:
                assert ask(client) == b"a"
                relay.hold()
                client.sendall(b"?")
                client.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                client.settimeout(5)
                if lost:
                    relay.lead_to(there)
                    assert answer_of(client) is None
                else:
                    relay.let_go()
                    assert answer_of(client) == b"a"


def test_a_relay_with_nobody_behind_it_hangs_up() -> None:
    with server(b"a") as gone:
        pass
    with Relay(gone) as relay, socket.create_connection(("127.0.0.1", relay.port), 5) as client:
        assert answer_of(client) is None


def relay_to_nowhere() -> Relay:
    return Relay(free_port())


@pytest.mark.parametrize("made", [relay_to_nowhere, Proxy])
def test_a_relay_that_ends_leaves_no_connection_of_new_clients_open(made: Callable[[], Relay | Proxy]) -> None:
    """Otherwise a later test would fail, when the garbage collector finds the open connection."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(10):
            with ExitStack() as clients, made() as opened:
                port = opened.port if isinstance(opened, Relay) else int(opened.bootstrap.rpartition(":")[2])
                for _ in range(4):
                    clients.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
