"""Tests HTTPS on real sockets, with both transports: certificates, their renewal, bounds of handshakes, mutual TLS.

Kafka and Redis are unreachable: a request that is let in is answered 503.
"""

import asyncio
import contextlib
import gzip
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from hashlib import sha256
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from structlog.testing import capture_logs

from deploy.stack import free_port
from service.app import build_router
from service.contract import CallerRule, Rules
from service.core.metrics import Telemetry
from service.core.settings import HttpTls, Settings
from service.events.loaded_rules import LoadedRules
from service.events.schemas import Schemas
from service.http import limits, tls
from service.http import server as server_module
from service.http.limits import ManagementProtocol, handshakes_max
from service.http.protocol import protocol_of
from service.http.server import LingeringServer
from service.http.tls import ServerTls, made_of
from tests.secured import Authority, Certificate
from tests.unit.fakes import until
from tests.unit.scrape import sample

EVENT = b'{"topic": "orders", "value": 1}'
HEAD = {"content-type": "application/json", "idempotency-key": "k"}
SHOP, TILL = (sha256(name.encode()).hexdigest() for name in ("shop", "till"))
CALLERS = (
    CallerRule("shop", (SHOP,), certificates=("subject:CN=shop", "uri:spiffe://example.com/shop")),
    CallerRule("till", (TILL,), certificates=("dns:till.example.com",)),
)


@pytest.fixture(scope="module")
def server_certificate(authority: Authority) -> Certificate:
    return authority.issue("first", "DNS:localhost", "IP:127.0.0.1")


@pytest.fixture
def files(server_certificate: Certificate, tmp_path: Path) -> Certificate:
    """The files that the server reads."""
    mounted = Certificate(*(tmp_path / name for name in ("tls.crt", "tls.key", "tls.pem")))
    put(server_certificate, mounted)
    return mounted


def put(certificate: Certificate, mounted: Certificate) -> None:
    """Replace the files, one after the other."""
    for source, target in ((certificate.certfile, mounted.certfile), (certificate.keyfile, mounted.keyfile)):
        new = target.with_suffix(".new")
        shutil.copy(source, new)
        new.rename(target)


@dataclass
class Served:
    """A service with HTTPS, and with a management port."""

    server: LingeringServer
    context: ServerTls
    port: int
    management_port: int
    cafile: Path

    def client(self, certificate: Certificate | None = None) -> ssl.SSLContext:
        """Make a client's context."""
        context = ssl.create_default_context(cafile=str(self.cafile))
        if certificate is not None:
            context.load_cert_chain(certificate.certfile, certificate.keyfile)
        return context

    @contextlib.asynccontextmanager
    async def http(self, certificate: Certificate | None = None) -> AsyncIterator[httpx.AsyncClient]:
        base = f"https://127.0.0.1:{self.port}"
        async with httpx.AsyncClient(
            verify=self.client(certificate), base_url=base, trust_env=False, timeout=10
        ) as client:
            yield client

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.client())

    def handshakes(self, outcome: str) -> float:
        return sample(self.context.telemetry, "fencepost_http_tls_handshakes_total", outcome=outcome)

    def is_successful(self) -> bool:
        return sample(self.context.telemetry, "fencepost_http_tls_last_reload_successful") == 1


@contextlib.asynccontextmanager
async def serving(
    transport: str, files: Certificate, authority: Authority, rules: Rules | None = None, **more: str
) -> AsyncIterator[Served]:
    port, management_port = free_port(), free_port()
    settings = Settings(
        kafka="127.0.0.1:1",
        redis="redis://127.0.0.1:1/0",
        instance="test",
        rules="" if rules is None else "rules.toml",
        request_timeout_ms=100,
        management_port=management_port,
        http_tls_certfile=str(files.certfile),
        http_tls_keyfile=str(files.keyfile),
        **more,  # type: ignore[arg-type]
    )
    rules = rules or Rules()
    router = build_router(settings, LoadedRules(rules, Schemas(rules), ()), lambda _: None)
    assert settings.http_tls is not None
    context = ServerTls(settings.http_tls, 4, router.telemetry)
    protocol = protocol_of(router.direct if transport == "direct" else None)
    assert router.management is not None
    usual = {"log_config": None, "loop": "uvloop"}
    beside = uvicorn.Config(
        router.management,
        port=management_port,
        http=ManagementProtocol,
        lifespan="off",
        **usual,  # type: ignore[arg-type]
    )
    config = uvicorn.Config(router.app, port=port, http=protocol, lifespan="on", **usual)  # type: ignore[arg-type]
    server = LingeringServer(config, router.current.endpoint.guard.stopping, context, [beside])
    running = threading.Thread(target=server.run)  # on a loop of uvloop, as in production
    running.start()
    await until(lambda: server.started)
    try:
        yield Served(server, context, port, management_port, authority.cafile)
    finally:
        server.should_exit = True
        await asyncio.to_thread(running.join)


@pytest.fixture(params=["direct", "asgi"])
async def served(
    request: pytest.FixtureRequest, files: Certificate, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Served]:
    monkeypatch.setattr(tls, "LOOK_S", 0.02)
    async with serving(request.param, files, authority) as made:
        yield made


def certificate_of(writer: asyncio.StreamWriter) -> bytes:
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    assert isinstance(shown, bytes)
    return shown


def der(certificate: Certificate) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate.certfile.read_text())


# ------------------------------------------------------------------------------------------------------------ requests


async def test_requests_of_every_size_are_answered_over_tls(served: Served) -> None:
    long = b'{"topic": "orders", "value": "%b"}' % (b"x" * 700_000)
    async with served.http() as client:
        for body in (EVENT, long, EVENT):
            answer = await client.post("/events", content=body, headers=HEAD)
            assert (answer.status_code, answer.json()["code"]) == (503, "not-written")
        packed = await client.post("/events", content=gzip.compress(EVENT), headers=HEAD | {"content-encoding": "gzip"})
        lines = b'{"topic": "orders", "value": 1, "idempotency_key": "a"}\n' * 3
        streamed = await client.post("/events/batch", content=lines, headers={"content-type": "application/x-ndjson"})
    assert packed.status_code == 503
    assert [line for line in streamed.text.splitlines() if '"status":503' in line] == streamed.text.splitlines()
    assert served.handshakes("ok") == 1


async def test_a_management_port_alone_serves_health_metrics_and_documentation(served: Served) -> None:
    paths = ("/livez", "/readyz", "/startupz", "/metrics", "/docs", "/openapi.json")
    async with served.http() as client, httpx.AsyncClient(trust_env=False) as plain:
        for path in paths:
            assert (await client.get(path)).status_code == 404, path
            managed = await plain.get(f"http://127.0.0.1:{served.management_port}{path}")
            assert managed.status_code in (200, 503), path
            assert "date" in managed.headers
        assert (await client.get("/problems/not-written")).status_code == 200
        elsewhere = await plain.post(f"http://127.0.0.1:{served.management_port}/events", content=EVENT, headers=HEAD)
        assert elsewhere.status_code == 404


async def test_a_rejection_is_read_by_a_client_that_is_still_sending(served: Served) -> None:
    reader, writer = await served.open()
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000)
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in head
    writer.close()


async def test_a_client_that_ends_its_side_ends_the_connection(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio has no half of a TLS connection; the event loop must not warn each time."""
    command = ["curl", "-s", "--cacert", str(served.cafile), f"https://127.0.0.1:{served.port}/problems/not-written"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=20, check=True)
    assert b'"code":"not-written"' in done.stdout
    with caplog.at_level(logging.WARNING):
        reader, writer = await served.open()
        writer.write(b"POST /events HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf")
        writer.close()
        async with asyncio.timeout(5):
            with contextlib.suppress(ssl.SSLError):  # the server's 400 comes behind the end
                await reader.read()
    assert warnings_of(caplog) == []
    assert sample(served.context.telemetry, "fencepost_task_failures_total", task="loop") == 0


class BlockingClient:
    """A client that reads nothing between two requests, as http.client, requests and their pools."""

    def __init__(self, served: Served, receive_bytes: int = 0) -> None:
        connection = socket.socket()
        connection.settimeout(20)
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect(("127.0.0.1", served.port))
        self.socket = served.client().wrap_socket(connection, server_hostname="127.0.0.1")

    def send(self, path: str, body: bytes, key: str = "") -> None:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{key}content-length: {len(body)}\r\n"
        self.socket.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)

    def receive(self) -> bytes:
        """Read a response; returns its body. Raises HTTPException where the response breaks off."""
        response = HTTPResponse(self.socket)
        response.begin()
        return response.read()


async def test_a_stop_does_not_wait_for_clients_that_do_not_answer_the_end_of_tls(served: Served) -> None:
    client = await asyncio.to_thread(BlockingClient, served)
    try:
        await asyncio.to_thread(client.send, "/events", EVENT, "idempotency-key: k\r\n")
        await asyncio.to_thread(client.receive)
        served.server.should_exit = True
        await until(lambda: not served.server.server_state.connections, 5)
    finally:
        client.socket.close()


async def test_a_stop_lets_a_slow_client_read_its_whole_response_over_tls(served: Served) -> None:
    events = [{"topic": "orders", "value": 1, "idempotency_key": str(n)} for n in range(1_000)]
    for listening in served.server.servers[0].sockets:  # its connections have the kernel's least room too
        with socket.socket(fileno=os.dup(listening.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    client = await asyncio.to_thread(BlockingClient, served, 4_096)
    try:
        await asyncio.to_thread(client.send, "/events/batch", json.dumps({"events": events}).encode())
        await asyncio.sleep(1.0)  # the response is written as far as there is room
        served.server.should_exit = True
        await asyncio.sleep(2 * server_module.LINGER_S)
        body = await asyncio.to_thread(client.receive)
        assert len(json.loads(body)["results"]) == 1_000
        await until(lambda: not served.server.server_state.connections, 5)
    finally:
        client.socket.close()


class EndedConnection:
    """A connection whose transport has ended; connection_lost is called next. uvloop has no socket for it any more."""

    def __init__(self) -> None:
        self.transport = self
        self.looks = 0

    def is_closing(self) -> bool:
        return True

    def get_extra_info(self, _: str) -> None:
        self.looks += 1

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...


async def test_a_connection_that_has_just_ended_does_not_fail_the_stop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LINGER_S", 0.01)
    ended = EndedConnection()
    connections: set[Any] = served.server.server_state.connections
    connections.add(ended)
    served.server.should_exit = True
    try:
        await until(lambda: ended.looks > 0)
        await asyncio.sleep(0.05)
    finally:
        connections.discard(ended)
    assert sample(served.context.telemetry, "fencepost_task_failures_total", task="http-tls-end") == 0


# -------------------------------------------------------------------------------------------------------- certificates


async def test_a_renewed_certificate_is_taken_under_load_without_a_failed_request(
    served: Served, files: Certificate, authority: Authority
) -> None:
    second = authority.issue("second", "IP:127.0.0.1")
    answered: list[int] = []
    stop = asyncio.Event()

    async def post_on_new_connections() -> None:
        context = served.client()
        while not stop.is_set():
            base = f"https://127.0.0.1:{served.port}"
            async with httpx.AsyncClient(verify=context, base_url=base, trust_env=False) as client:
                answered.append((await client.post("/events", content=EVENT, headers=HEAD)).status_code)

    reader, writer = await served.open()  # a connection that stays
    assert certificate_of(writer) == der(files)
    load = [asyncio.create_task(post_on_new_connections()) for _ in range(2)]
    await until(lambda: len(answered) > 3)
    put(second, files)
    renewed = b""
    async with asyncio.timeout(10):
        while renewed != der(second):
            _, other = await served.open()
            renewed = certificate_of(other)
            other.close()
    before = len(answered)
    await until(lambda: len(answered) > before + 3)
    stop.set()
    await asyncio.gather(*load)
    assert set(answered) == {503}
    writer.write(b"GET /problems/not-written HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert (served.handshakes("failed"), served.handshakes("refused")) == (0, 0)


async def test_a_pair_that_does_not_fit_is_refused_and_the_one_before_stays(
    served: Served, files: Certificate, authority: Authority
) -> None:
    first, second = der(files), authority.issue("fits", "IP:127.0.0.1")
    assert served.is_successful()
    with capture_logs() as logged:
        shutil.copy(second.keyfile, files.keyfile)
        await until(lambda: not served.is_successful())
    (line,) = [line for line in logged if line["log_level"] == "error"]
    assert "mismatch" in line["why"].lower()
    _, writer = await served.open()
    assert certificate_of(writer) == first
    writer.close()
    files.keyfile.unlink()
    shutil.copy(second.certfile, files.certfile)
    await asyncio.sleep(0.2)
    assert not served.is_successful()
    put(second, files)
    await until(served.is_successful)
    _, writer = await served.open()
    assert certificate_of(writer) == der(second)
    writer.close()


def test_the_expiry_of_the_certificate_is_told(files: Certificate) -> None:
    settings = HttpTls(str(files.certfile), str(files.keyfile), ssl.TLSVersion.TLSv1_2, "", client_required=False)
    command = ["openssl", "x509", "-noout", "-enddate", "-in", str(files.certfile)]
    ends = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().removeprefix("notAfter=")
    assert made_of(settings).valid_until == ssl.cert_time_to_seconds(ends)


@pytest.mark.parametrize(
    ("least", "most", "is_taken"), [("1.2", "1.2", True), ("1.3", "1.2", False), ("1.3", "1.3", True)]
)
async def test_clients_below_the_least_version_are_refused(
    files: Certificate, authority: Authority, least: str, most: str, is_taken: bool
) -> None:
    async with serving("direct", files, authority, http_tls_min_version=least) as served:
        context = served.client()
        context.maximum_version = ssl.TLSVersion.TLSv1_2 if most == "1.2" else ssl.TLSVersion.TLSv1_3
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
        except OSError:
            assert not is_taken
        else:
            assert is_taken
            assert writer.get_extra_info("ssl_object").version() == f"TLSv{most}"
            writer.close()


# ---------------------------------------------------------------------------------------------------------- handshakes


@pytest.fixture
def _short_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tls, server_module):
        monkeypatch.setattr(module, "HANDSHAKE_S", 0.5)


@pytest.mark.usefixtures("_short_handshakes")
async def test_slow_handshakes_are_bounded_in_number_and_time(files: Certificate, authority: Authority) -> None:
    async with serving("direct", files, authority) as served:
        slow = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(4)]
        slow[0][1].write(b"\x16\x03\x01")  # the beginning of a hello
        await asyncio.sleep(0.05)
        with pytest.raises(OSError):  # noqa: PT011 - closed, or reset
            await served.open()
        assert served.handshakes("refused") == 1
        async with asyncio.timeout(5):
            for reader, writer in slow:
                assert await reader.read() == b""
                writer.close()
        _, writer = await served.open()
        writer.close()
        await until(lambda: served.handshakes("ok") == 1)
        await until(lambda: not served.server.server_state.connections)


async def test_what_is_no_handshake_ends_its_connection_without_an_error(
    files: Certificate, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving("direct", files, authority) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                assert b"HTTP" not in await reader.read()
        writer.close()
        assert served.handshakes("failed") == 1
        assert sample(served.context.telemetry, "fencepost_task_failures_total", task="loop") == 0
    assert warnings_of(caplog) == []


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the warnings and errors, without the one that Kafka is unreachable, which comes when its connect ends."""
    return [line for line in caplog.records if line.levelno > logging.INFO and "not up yet" not in line.getMessage()]


class Moment(float):
    """A time that counts how often a time is compared."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        Moment.compared += 1
        return float(self) < other


def test_a_refused_handshake_costs_the_same_however_many_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(tls, "time", SimpleNamespace(monotonic=lambda: Moment(now)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    slow = [context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(50)]
    handshakes = tls.Handshakes(len(slow), Telemetry())
    for each in slow:
        handshakes.begin(each)
    with pytest.raises(ConnectionRefusedError):
        handshakes.check()
    assert Moment.compared <= 2
    now += tls.HANDSHAKE_S + 1  # all their connections have ended
    handshakes.check()
    for each in slow:
        handshakes.begin(each)
    with pytest.raises(ConnectionRefusedError):
        handshakes.check()


def test_the_bound_of_handshakes_leaves_files_to_kafka_and_redis() -> None:
    for files in (8, 300, 1024, 20_000, 1 << 20):
        assert 1 <= handshakes_max(files) <= max(1, (files - limits.connections_max(files)) // 4)
    assert handshakes_max(1024) == 64


# ---------------------------------------------------------------------------------------------------------- mutual TLS


@pytest.fixture(scope="module")
def clients(authority: Authority) -> dict[str, Certificate | None]:
    return {
        "none": None,
        "shop": authority.issue("shop", "DNS:shop.example.com"),
        "shop-by-uri": authority.issue("pod-7", "URI:spiffe://example.com/shop"),
        "till": authority.issue("cashier", "DNS:till.example.com"),
        "shop-prefix": authority.issue("shop2", "URI:spiffe://example.com/shop/other", "DNS:a.till.example.com"),
        "mesh": authority.issue("pod-8", "URI:spiffe://example.com/pod-8"),
        "both": authority.issue("shop-", "URI:spiffe://example.com/shop", "DNS:till.example.com"),
    }


# By certificate and token: the caller, or None for 401.
IDENTITIES: dict[tuple[str, str], str | None] = {
    ("none", ""): None,
    ("none", "shop"): "shop",
    ("none", "wrong"): None,
    ("shop", ""): "shop",
    ("shop", "shop"): "shop",
    ("shop", "till"): None,
    ("shop", "wrong"): None,
    ("shop-by-uri", ""): "shop",
    ("till", ""): "till",
    ("shop-prefix", ""): None,
    ("shop-prefix", "till"): "till",
    ("mesh", ""): None,
    ("mesh", "shop"): "shop",
    ("both", ""): None,
    ("both", "shop"): None,
}
OTHER = b'{"topic": "other", "value": 1, "idempotency_key": "a"}'
# Requests that are answered without Kafka and Redis once their caller is known: 400, 403, 404 or 503.
REQUESTS = (
    ("POST", "/events", "application/json", b'{"topic": "other", "value": 1}'),
    ("POST", "/events/batch", "application/json", b"["),
    ("POST", "/events/batch", "application/x-ndjson", OTHER),
    ("POST", "/topics/other", "application/vnd.kafka.json.v2+json", b'{"records": [{"value": 1}]}'),
    ("GET", "/events/k", "", b""),
    ("GET", "/topics/no%20topic", "", b""),
)


@pytest.mark.parametrize("transport", ["direct", "asgi"])
async def test_certificates_and_tokens_identify_callers_on_every_route(
    transport: str, files: Certificate, authority: Authority, clients: dict[str, Certificate | None]
) -> None:
    own = {"http_tls_client_cafile": str(authority.cafile), "http_tls_client_auth": "optional"}
    rules = Rules(callers=tuple(replace(caller, topics=("orders",)) for caller in CALLERS))
    async with serving(transport, files, authority, rules, **own) as served:
        for certificate in clients:
            async with served.http(clients[certificate]) as client:
                for (of, token), caller in IDENTITIES.items():
                    for method, path, kind, body in REQUESTS if of == certificate else ():
                        headers = {"content-type": kind} if kind else {}
                        headers |= {"idempotency-key": "k"} if path == "/events" else {}
                        headers |= {"authorization": f"Bearer {token}"} if token else {}
                        answer = await client.request(method, path, content=body, headers=headers)
                        assert (answer.status_code != 401) is (caller is not None), (of, token, method, path)
                        if caller is not None and "other" in path + body.decode():
                            assert f"{caller} may not write to other" in answer.text, (of, token, method, path)


async def test_a_required_certificate_must_be_signed_by_the_clients_authority(
    files: Certificate, authority: Authority, clients: dict[str, Certificate | None], tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "stranger").issue("shop")
    ca = str(authority.cafile)
    async with serving("direct", files, authority, Rules(callers=CALLERS), http_tls_client_cafile=ca) as served:
        for certificate in (None, stranger):
            async with served.http(certificate) as client:
                with pytest.raises(httpx.TransportError):
                    await client.post("/events", content=EVENT, headers=HEAD)
        async with served.http(clients["shop"]) as client:
            assert (await client.post("/events", content=EVENT, headers=HEAD)).status_code == 503
        async with httpx.AsyncClient(trust_env=False) as plain:  # a probe has no certificate
            assert (await plain.get(f"http://127.0.0.1:{served.management_port}/livez")).status_code == 200
