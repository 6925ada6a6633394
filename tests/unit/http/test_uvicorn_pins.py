"""Pins the private names of uvicorn, httptools and uvloop that the service uses."""

import ast
import asyncio
import importlib.metadata
import inspect
from collections import deque
from types import ModuleType
from typing import Any

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from service.http import limits
from service.http import protocol as http_protocol
from service.http.flow_control import BothWays
from service.http.limits import GuardedProtocol
from service.http.protocol import HttpRequest
from service.http.server import LingeringServer


@pytest.mark.parametrize(("name", "version"), [("uvicorn", "0.54.0"), ("httptools", "0.9.0"), ("uvloop", "0.23.0")])
def test_the_versions(name: str, version: str) -> None:
    assert importlib.metadata.version(name) == version


@pytest.fixture
async def protocol() -> HttpToolsProtocol:
    """Make uvicorn's own protocol, before a connection."""
    return HttpToolsProtocol(uvicorn.Config(app=lambda: None, lifespan="off"), ServerState(), {})


async def test_a_connection_of_uvicorn_has_the_attributes_that_the_service_uses(protocol: HttpToolsProtocol) -> None:
    """Also attributes that the service assigns: uvicorn would not use them under another name."""
    assert protocol.pipeline == deque()
    for name in ("cycle", "transport", "flow", "timeout_keep_alive_task"):
        assert getattr(protocol, name) is None, name
    assert protocol.expect_100_continue is False
    assert isinstance(protocol.parser, httptools.HttpRequestParser)
    assert protocol.loop is asyncio.get_running_loop()
    assert protocol.timeout_keep_alive == 5
    assert protocol.server_state.default_headers == []
    assert {*protocol.tasks, *protocol.connections} == set()
    protocol.on_message_begin()
    assert (protocol.url, protocol.headers) == (b"", [])
    assert protocol.scope["headers"] is protocol.headers


def of_self(module: ModuleType) -> tuple[set[str], set[str]]:
    """List the names that the methods of a module's protocols read from `self` or `super()`, and their own names."""
    read: set[str] = set()
    own: set[str] = set()
    for kind in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(kind, ast.ClassDef) or "Protocol" not in kind.name:
            continue
        for line in kind.body:
            if isinstance(line, ast.AnnAssign | ast.Assign):
                targets = line.targets if isinstance(line, ast.Assign) else [line.target]
                own |= {target.id for target in targets if isinstance(target, ast.Name)}
        for node in ast.walk(kind):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                read.add(node.attr)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
                function = node.value.func
                if isinstance(function, ast.Name) and function.id == "super":
                    read.add(node.attr)
    return read, own


async def test_each_attribute_that_the_service_reads_of_a_connection_exists(protocol: HttpToolsProtocol) -> None:
    protocol.on_message_begin()
    kinds = (GuardedProtocol, http_protocol.DirectProtocol)
    ours = {name for kind in kinds for name in (*vars(kind), *kind.__annotations__)}
    for module in (limits, http_protocol):
        read, own = of_self(module)
        assert len(read) > 15
        missing = {name for name in read - own - ours if not hasattr(protocol, name)}
        assert missing == set()


@pytest.mark.parametrize(
    "name",
    [
        "connection_made",
        "connection_lost",
        "data_received",
        "on_message_begin",
        "on_headers_complete",
        "on_body",
        "on_message_complete",
        "on_response_complete",
        "resume_writing",
        "timeout_keep_alive_handler",
        "_start_asgi_task",
    ],
)
def test_methods_that_are_overridden_or_called(name: str) -> None:
    """uvicorn would never call an override of a method that it no longer has."""
    theirs, ours = (getattr(kind, name) for kind in (HttpToolsProtocol, http_protocol.DirectProtocol))
    assert len(inspect.signature(theirs).parameters) == len(inspect.signature(ours).parameters)


def test_an_http_request_has_what_uvicorn_uses_of_a_pipelined_cycle() -> None:
    """A Post replaces a cycle: it needs all that uvicorn reads or sets of one."""
    source = inspect.getsource(HttpToolsProtocol)
    used = {name for name in vars(RequestResponseCycle)["__init__"].__code__.co_names if f"cycle.{name}" in source}
    assert {"disconnected", "message_event", "response_complete"} <= used
    assert {name for name in used if not hasattr(HttpRequest, name)} <= {
        "body",
        "more_body",
    }  # of a body that it takes itself


def test_a_cycle_tells_how_far_its_response_and_body_are() -> None:
    """Without these a refusal would be written amid a response: GuardedProtocol._is_answering."""
    set_at_first = vars(RequestResponseCycle)["__init__"].__code__.co_names
    assert {"response_started", "response_complete", "more_body"} <= set(set_at_first)


def test_a_cycle_tells_whether_the_client_waits_for_100_and_ends_its_connection_if_told() -> None:
    """Without these the next request would be taken for a body that was left out: limits._last_if_unasked."""
    for method in ("receive", "send"):
        assert "self.waiting_for_100_continue = False" in inspect.getsource(getattr(RequestResponseCycle, method))
    assert "if not self.keep_alive and not has_connection_close:" in inspect.getsource(RequestResponseCycle.send)


def test_flow_control() -> None:
    for name in ("pause_writing", "resume_writing", "pause_reading", "resume_reading"):
        assert callable(getattr(FlowControl, name))
        assert callable(getattr(BothWays, name))
    assert "write_paused" in FlowControl.__init__.__code__.co_names


def test_the_server() -> None:
    assert list(inspect.signature(uvicorn.Server.handle_exit).parameters) == ["self", "sig", "frame"]
    assert "handle_exit" in inspect.getsource(uvicorn.Server.capture_signals)
    assert issubclass(LingeringServer, uvicorn.Server)
    server = uvicorn.Server(uvicorn.Config(app=lambda: None))
    assert (server.should_exit, server.started) == (False, False)
    assert callable(server._serve)
    assert STATUS_LINE[201] == b"HTTP/1.1 201 Created\r\n"


def test_the_parser() -> None:
    """An upgrade ends the parser's work; the argument of the exception is the number of parsed bytes."""

    class Heard:
        def __init__(self) -> None:
            self.urls: list[bytes] = []

        def on_url(self, url: bytes) -> None:
            self.urls.append(url)

    heard: Any = Heard()
    parser = httptools.HttpRequestParser(heard)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\n"
    with pytest.raises(httptools.HttpParserUpgrade) as upgrade:
        parser.feed_data(head + b"abc")
    assert upgrade.value.args[0] == len(head)
    assert parser.should_upgrade()
    assert (parser.get_method(), parser.get_http_version(), heard.urls) == (b"POST", "1.1", [b"/a"])
    assert issubclass(httptools.HttpParserUpgrade, Exception)
    assert not issubclass(httptools.HttpParserUpgrade, httptools.HttpParserError)
