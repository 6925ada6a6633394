"""Tests POSTs as ASGI endpoints of the app: with an ASGI client, and message by message like a server."""

import asyncio
import json
import random
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from service.app import build_router, create_app
from service.contract import CallerRule, Rules, SettingsError
from service.core.metrics import Telemetry
from service.core.problems import Problem
from service.core.settings import Settings
from service.events.deliveries import read_sources
from service.events.event import BATCH_EVENTS_MAX
from service.events.loaded_rules import LoadedRules
from service.events.schemas import Schemas
from service.http import asgi as module
from service.http.asgi import AsgiEndpoint, AsgiRequest
from service.http.callers import Callers
from service.http.events import EventsEndpoint
from service.http.request import OWN_BYTES, Bodies, PostRequest
from service.http.request_guard import RequestGuard
from service.pipeline.admission import Admission
from tests.unit.fakes import Turns, until
from tests.unit.http.apps import add_routes
from tests.unit.http.test_encodings import ENCODERS
from tests.unit.http.test_events import Commits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Starlette prefers another version of httpx
    from starlette.testclient import TestClient

EVENT = b'{"topic":"orders","value":1}'
HEAD = {"content-type": "application/json", "idempotency-key": "k"}
LINES = b"".join(b'{"topic":"orders","value":%d,"idempotency_key":"k%d"}\n' % (n, n) for n in range(3))


def app_and_posts(admission: Commits, settings: Settings | None = None) -> tuple[FastAPI, EventsEndpoint]:
    """Make the app's own routes with an admission that commits."""
    app = FastAPI()
    settings = settings or Settings()
    callers = Callers([])
    endpoint = EventsEndpoint(
        RequestGuard(settings, callers), cast(Admission, admission), Telemetry(), settings.key_ttl_s
    )
    add_routes(app, endpoint)
    return app, endpoint


def app_of(admission: Commits, settings: Settings | None = None) -> FastAPI:
    return app_and_posts(admission, settings)[0]


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app_of(Commits(), Settings(body_bytes_max=1_000)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_an_event_is_posted_through_the_app(http: httpx.AsyncClient) -> None:
    response = await http.post("/events", content=EVENT, headers=HEAD)
    assert (response.status_code, response.json()["topic"]) == (201, "orders")
    assert response.headers["location"] == "/events/k"
    assert int(response.headers["content-length"]) == len(response.content)
    assert response.headers.get_list("content-type") == ["application/json"]


async def test_a_batch_is_posted_through_the_app(http: httpx.AsyncClient) -> None:
    response = await http.post("/events/batch", content=LINES, headers={"content-type": "application/x-ndjson"})
    assert response.status_code == 207
    assert [json.loads(line)["status"] for line in response.text.splitlines()] == [201] * 3
    whole = json.dumps({"events": [{"topic": "orders", "value": 1, "idempotency_key": "k"}]})
    response = await http.post("/events/batch", content=whole, headers={"content-type": "application/json"})
    assert (response.status_code, len(response.json()["results"])) == (207, 1)


@pytest.mark.parametrize("header", ["Idempotency-Key", "Repeatability-Request-ID"])
async def test_a_key_of_a_request_whose_events_have_keys_is_refused(http: httpx.AsyncClient, header: str) -> None:
    """A client that repeats its request would rely on it, also if it makes new keys for the events."""
    plain = {"topic": "orders", "value": 1, "idempotency_key": "k"}
    for content_type, body in (
        ("application/x-ndjson", LINES),
        ("application/json", json.dumps({"events": [plain]}).encode()),
        ("application/json", json.dumps({"events": [{**plain, "headers": {"é": "a"}}], "atomic": False}).encode()),
    ):
        response = await http.post("/events/batch", content=body, headers={"content-type": content_type, header: "q"})
        assert (response.status_code, response.json()["code"]) == (400, "invalid-key")
        assert response.json()["detail"].startswith(f"{header}: each event of this batch has a key of its own")


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (EVENT, {**HEAD, "content-type": "text/plain"}, 415, "unsupported-media-type"),
        (EVENT, {"content-type": "application/json"}, 400, "missing-key"),
        (b"{", HEAD, 400, "invalid-json"),
        (b" " * 1_001, HEAD, 413, "too-large"),
        (EVENT, {**HEAD, "content-encoding": "gzip"}, 400, "invalid-encoding"),
        (EVENT, {**HEAD, "host": ""}, 201, ""),
    ],
)
async def test_refusals_are_problems(
    http: httpx.AsyncClient, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    response = await http.post("/events", content=content, headers=headers)
    assert response.status_code == status
    if code:
        assert (response.json()["code"], response.headers["content-type"]) == (code, "application/problem+json")


@pytest.mark.parametrize("coding", ENCODERS)
@pytest.mark.parametrize("size", [0, 900, 100_000, 900_000])
async def test_a_coded_body_is_the_event_that_it_decodes_to(coding: str, size: int) -> None:
    """The fingerprint is that of the plain body: a retry may be compressed, or not."""
    admission = Commits()
    body = b'{"topic":"orders","value":"%b"}' % (b"x" * size)
    app, posts = app_and_posts(admission)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        plain = await client.post("/events", content=body, headers=HEAD)
        headers = {**HEAD, "content-encoding": coding}
        coded = await client.post("/events", content=ENCODERS[coding](body), headers=headers)
    assert (plain.status_code, coded.status_code) == (201, 201)
    one, other = admission.events
    assert (one.value, one.fp) == (other.value, other.fp)
    assert posts.guard.bodies.bytes == 0


async def test_a_decoded_body_has_the_bounds_of_a_plain_one() -> None:
    app, posts = app_and_posts(Commits(), Settings(body_bytes_max=300_000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for size, status in ((299_000, 201), (301_000, 413), (4_000_000, 413)):
            body = b'{"topic":"orders","value":"%b"}' % random.Random(1).randbytes(size // 2).hex().encode()
            headers = {**HEAD, "content-encoding": "zstd"}
            response = await client.post("/events", content=ENCODERS["zstd"](body), headers=headers)
            assert (response.status_code, response.json().get("code", "")) == (status, "too-large" * (status == 413))
    assert posts.guard.bodies.bytes == 0


async def test_a_decoded_body_is_counted_in_place_of_the_one_that_was_sent() -> None:
    bodies = Bodies(4 * OWN_BYTES)
    request = AsgiRequest({"client": None, "headers": [], "http_version": "1.1"}, bodies)
    assert request.keep(bytes(2 * OWN_BYTES), 10 * OWN_BYTES)
    request.decode(b"x" * 3 * OWN_BYTES)
    assert (request.body, request.size, bodies.bytes) == (b"x" * 3 * OWN_BYTES, 3 * OWN_BYTES, 3 * OWN_BYTES)
    with pytest.raises(Problem, match="body: too many large ones are under way"):
        request.decode(bytes(5 * OWN_BYTES))
    assert (request.body, bodies.bytes) == (b"", 0)


async def test_a_long_answer_is_sent_in_slices_between_which_other_tasks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_BYTES", 100)
    body = bytes(range(250))
    endpoint = AsgiEndpoint(lambda post: post.answer(200, b"", body), 1_000, Bodies(0))
    sent: list[Any] = []
    turns = Turns()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append((turns.count, message))

    with turns:
        await endpoint({"type": "http", "http_version": "1.1", "headers": [], "client": None}, receive, send)
    (_, start), *slices = sent
    assert start["headers"] == [(b"content-length", b"250")]
    assert [len(message["body"]) for _, message in slices] == [100, 100, 50]
    assert b"".join(message["body"] for _, message in slices) == body
    assert [message.get("more_body", False) for _, message in slices] == [True, True, False]
    assert len({turn for turn, _ in slices}) == 3


@pytest.mark.parametrize("cancelled", ["not", "while it waits", "while it is sent"])
async def test_a_long_answer_counts_until_it_is_sent(cancelled: str) -> None:
    bodies, held, waits = Bodies(OWN_BYTES), list[PostRequest](), asyncio.Event()
    seen: list[int] = []

    async def send(message: Any) -> None:
        seen.append(bodies.unread)
        if cancelled == "while it is sent":
            await waits.wait()

    server = Server(part(b"", more=False))
    server.send = send  # type: ignore[method-assign]
    serving = asyncio.create_task(server.serve(endpoint_of(held.append, bodies)))
    await until(lambda: bool(held))
    if cancelled == "while it waits":
        serving.cancel()
        await asyncio.wait([serving])
    assert held[0].hold_response(3 * OWN_BYTES)
    assert bodies.unread == 2 * OWN_BYTES
    held[0].answer(201, b"", bytes(3 * OWN_BYTES))
    if cancelled == "while it is sent":
        await until(lambda: bool(seen))
        serving.cancel()
    await asyncio.wait([serving])
    assert bodies.unread == 0
    assert all(size == 2 * OWN_BYTES for size in seen)


async def test_a_client_that_reads_too_slowly_gets_no_more_of_a_long_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "reading_time_s", lambda size: 0.1)
    bodies = Bodies(OWN_BYTES)

    def long(request: PostRequest) -> None:
        assert request.hold_response(9 * OWN_BYTES)
        request.answer(201, b"", bytes(9 * OWN_BYTES))

    server = Server(part(b"", more=False))
    keep = server.send

    async def send(message: Any) -> None:
        await keep(message)
        await asyncio.sleep(0.04)

    server.send = send  # type: ignore[method-assign]
    await server.serve(endpoint_of(long, bodies))
    assert 0 < len(server.body) < 9 * OWN_BYTES
    assert server.sent[-1]["more_body"]
    assert bodies.unread == 0


async def test_a_response_for_which_there_is_no_room_is_answered_504_and_later_as_it_is() -> None:
    app, posts = app_and_posts(Commits())
    body = b'{"events":[%b]}' % b",".join([b"0"] * BATCH_EVENTS_MAX)  # 20 KB, with 2 MB of results
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:

        async def answer() -> tuple[int, int, str]:
            response = await client.post("/events/batch", content=body, headers={"content-type": "application/json"})
            return response.status_code, len(response.content), response.json().get("code", "")

        posts.guard.bodies.unread += 1  # somebody else holds some, and there is no room
        most, posts.guard.bodies.most = posts.guard.bodies.most, 100_000
        assert (await answer())[::2] == (504, "outcome-unknown")
        assert posts.guard.bodies.unread == 1
        posts.guard.bodies.most = most
        posts.guard.bodies.bytes = most  # bodies, which anybody can send, keep nobody from a response
        status, size, _ = await answer()
        assert status == 207
        assert size > 1_000_000
        posts.guard.bodies.bytes = 0
        posts.guard.bodies.most, posts.guard.bodies.unread = 100_000, 0
        assert await answer() == (207, size, ""), "alone it has room, or it would never be answered"
    assert posts.guard.bodies.unread == 0


async def test_a_percent_encoded_path_is_decoded_before_it_is_matched(http: httpx.AsyncClient) -> None:
    assert (await http.post("/%65vents", content=EVENT, headers=HEAD)).status_code == 201


async def test_middleware_sees_the_posts() -> None:
    app, seen = app_of(Commits()), list[tuple[str, int]]()

    @app.middleware("http")
    async def see(request: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        response = await call_next(request)
        seen.append((request.url.path, response.status_code))
        return response

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        await client.post("/events", content=EVENT, headers=HEAD)
        await client.post("/events/batch", content=b"", headers=HEAD)
    assert seen == [("/events", 201), ("/events/batch", 400)]


def test_the_whole_app_answers_a_test_client() -> None:
    """Kafka and Redis are unreachable, so that only early refusals are answered at once."""
    settings = Settings(kafka="127.0.0.1:1", redis="redis://127.0.0.1:1/0", instance="test", request_timeout_ms=1_000)
    app = build_router(settings, LoadedRules(Rules(), Schemas(Rules()), ()), lambda _: None).app
    with TestClient(app, client=("127.0.0.1", 50_000)) as client:
        assert client.get("/livez").status_code == 200
        assert client.post("/events", content=EVENT, headers=HEAD).json()["code"] == "not-written"
        assert client.post("/events", content=EVENT).json()["code"] == "unsupported-media-type"
        assert client.get("/events").status_code == 405
        assert 'fencepost_requests_total{code="not-written",status="503"} 1.0' in client.get("/metrics").text


def test_a_client_without_a_loopback_address_is_refused() -> None:
    """A server may take the address from a header."""
    app = app_of(Commits())
    for address, status in (("testclient", 403), ("10.0.0.1", 403), ("127.0.0.1", 201), ("::1", 201)):
        client = TestClient(app, client=(address, 1))
        assert client.post("/events", content=EVENT, headers=HEAD).status_code == status, address


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/events"),
        ("POST", "/events/batch"),
        ("POST", "/topics/orders"),
        ("POST", "/v3/clusters/c/topics/orders/records"),
        ("GET", "/topics"),
        ("GET", "/v3/clusters"),
    ],
)
def test_rules_with_sources_only_open_nothing_but_the_sources(method: str, path: str) -> None:
    text = '[[sources]]\nname = "ci"\nsignature = "none"\nidempotency_key = { header = "id" }\ntopic = "orders"\n'
    rules, settings = Rules.parse(text), Settings(kafka="127.0.0.1:1", rules="rules.toml")
    loaded = LoadedRules(rules, Schemas(rules), tuple(read_sources(rules)))
    app = build_router(settings, loaded, lambda _: None).app
    client = TestClient(app, client=("10.0.0.1", 1))
    answer = client.request(method, path, headers={"content-type": "application/json"})
    assert answer.status_code == 403
    assert "add [[callers]]" in answer.text
    assert client.post("/sources/nobody").json()["code"] == "unknown-source"


def test_the_factory_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_SLOTS", "none")
    with pytest.raises(SettingsError, match="FENCEPOST_SLOTS"):
        create_app()
    monkeypatch.setenv("FENCEPOST_SLOTS", "1")
    assert create_app().title == "Fencepost"


# ------------------------------------------------------------------------------------------------ message by message


class Server:
    """Hands one POST to the app, and keeps the messages that it gets."""

    def __init__(self, *messages: dict[str, Any], headers: dict[bytes, bytes] | None = None, version: str = "1.1"):
        self.messages = list(messages)
        self.sent: list[dict[str, Any]] = []
        self.scope = {
            "type": "http",
            "http_version": version,
            "method": "POST",
            "path": "/",
            "client": None,
            "headers": [(b"host", b"x"), *(headers or {}).items()],
        }

    async def receive(self) -> dict[str, Any]:
        return self.messages.pop(0)

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def serve(self, endpoint: AsgiEndpoint) -> None:
        async with asyncio.timeout(5.0):
            await endpoint(self.scope, cast(Any, self.receive), self.send)

    @property
    def head(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def echo(request: PostRequest) -> None:
    request.answer(503 if request.body_was_dropped else 201, b"x-size: %d\r\n" % request.size, request.body)


def endpoint_of(handler: Callable[[PostRequest], None], bodies: Bodies | None = None) -> AsgiEndpoint:
    return AsgiEndpoint(handler, 4 * OWN_BYTES, bodies or Bodies(4 * OWN_BYTES))


async def test_a_body_comes_in_parts() -> None:
    server = Server(part(b"ab"), part(b""), part(b"c", more=False))
    await server.serve(endpoint_of(echo))
    assert (server.sent[0]["status"], server.body) == (201, b"abc")
    assert server.head == {b"x-size": b"3", b"content-length": b"3"}


async def test_a_body_whose_content_length_is_too_large_is_not_read() -> None:
    too_long = {b"content-length": b"%d" % (4 * OWN_BYTES + 1)}
    server = Server(headers=too_long)
    await server.serve(endpoint_of(echo))
    assert (server.head[b"x-size"], server.body) == (too_long[b"content-length"], b"")
    assert b"connection" not in server.head
    server = Server(headers={**too_long, b"expect": b"100-continue"})
    await server.serve(endpoint_of(echo))
    assert server.head[b"connection"] == b"close", "what comes next may be its body, or a request"


async def test_a_body_is_read_up_to_the_bound() -> None:
    server = Server(*[part(bytes(OWN_BYTES))] * 9)
    await server.serve(endpoint_of(echo))
    assert (int(server.head[b"x-size"]), server.body) == (5 * OWN_BYTES, b"")
    assert len(server.messages) == 4


async def test_bodies_share_a_bound_and_free_their_bytes_when_they_are_answered() -> None:
    bodies = Bodies(3 * OWN_BYTES)
    held = list[PostRequest]()
    first = Server(*[part(bytes(OWN_BYTES))] * 3, part(b"", more=False))
    serving = asyncio.create_task(first.serve(endpoint_of(held.append, bodies)))
    while not held:  # noqa: ASYNC110
        await asyncio.sleep(0)
    second = Server(*[part(bytes(OWN_BYTES))] * 3, part(b"", more=False))
    await second.serve(endpoint_of(echo, bodies))
    assert second.sent[0]["status"] == 503
    held[0].answer(201, b"", b"")
    await serving
    assert bodies.bytes == 0


async def test_a_request_that_is_disconnected_amid_its_body_is_not_handled() -> None:
    bodies, handled = Bodies(4 * OWN_BYTES), list[PostRequest]()
    server = Server(part(bytes(2 * OWN_BYTES)), {"type": "http.disconnect"})
    await server.serve(endpoint_of(handled.append, bodies))
    assert (handled, server.sent, bodies.bytes) == ([], [], 0)


async def test_a_body_whose_upload_breaks_off_counts_no_more() -> None:
    """As when a server or a middleware cancels it."""
    bodies, handled = Bodies(4 * OWN_BYTES), list[PostRequest]()
    with pytest.raises(IndexError):
        await Server(part(bytes(2 * OWN_BYTES))).serve(endpoint_of(handled.append, bodies))
    assert (handled, bodies.bytes) == ([], 0)


async def test_work_continues_although_the_server_cancels_the_request() -> None:
    """Some servers do so when the client disconnects. Work that has begun, such as a batch, is finished."""
    done, started = asyncio.Event(), asyncio.Event()

    def handler(request: PostRequest) -> None:
        async def work() -> None:
            started.set()
            await asyncio.sleep(0.01)
            request.answer(201, b"", b"")
            done.set()

        request.run_in_task(work())

    serving = asyncio.create_task(Server(part(b"", more=False)).serve(endpoint_of(handler)))
    await started.wait()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    async with asyncio.timeout(5.0):
        await done.wait()


async def test_a_connection_header_is_sent_for_http_1_1_and_not_for_http_2() -> None:
    def handler(request: PostRequest) -> None:
        request.keep_alive = False
        echo(request)

    for version, there in (("2", False), ("1.1", True)):
        server = Server(part(b"", more=False), version=version)
        await server.serve(endpoint_of(handler))
        assert (b"connection" in server.head) is there


async def test_a_request_with_an_unknown_token_is_answered_401() -> None:
    rule = CallerRule(name="a", token_sha256=("0" * 64,), topics=("*",), rate=None)
    endpoint = EventsEndpoint(
        RequestGuard(Settings(), Callers([rule])), cast(Admission, Commits()), Telemetry(), Settings().key_ttl_s
    )
    server = Server(part(EVENT, more=False), headers={b"authorization": b"Bearer x"})
    await server.serve(AsgiEndpoint(endpoint.routes[b"/events"], 1_000, Bodies(1_000)))
    assert server.sent[0]["status"] == 401
    assert server.head[b"www-authenticate"] == b"Bearer"
