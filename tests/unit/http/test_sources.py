"""Tests `POST /sources/{name}` over the app, with the pipeline in memory: who is let in, and what is written once."""

import asyncio
import hmac
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from service.contract import Rules
from service.core.metrics import Telemetry
from service.core.problems import NOT_WRITTEN, Problem
from service.core.settings import EVENT_BYTES_MAX, Settings
from service.events import deliveries
from service.events.deliveries import Source, read_sources
from service.events.strict_json import LONG_BYTES, check_json
from service.http.request import Bodies
from service.http.sources import SourcesEndpoint
from service.pipeline.admission import Admission
from tests.unit.fakes import World
from tests.unit.http.test_asgi import app_of
from tests.unit.http.test_events import Commits

RULES = """\
[[sources]]
name = "github"
topic = "orders"
idempotency_key = { header = "X-GitHub-Delivery" }
keep_headers = ["X-GitHub-Event"]
signature = { scheme = "github", secret_files = ["secret"] }

[[sources]]
name = "slack"
topic = "orders"
idempotency_key = { pointer = "/event_id" }
signature = { scheme = "slack", secret_files = ["secret"] }

[[sources]]
name = "open"
topic_pointer = "/type"
topics = { a = "orders", b = "other", c = "nowhere" }
idempotency_key = { pointer = "/id" }
signature = "none"

[[sources]]
name = "slow"
topic = "orders"
idempotency_key = { sha256 = "body" }
signature = "none"
rate = 1
"""
BODY = b'{"action": "opened"}'


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Source, ...]:
    (tmp_path / "secret").write_text("s3cret\n")
    return read_sources(Rules.parse(RULES, str(tmp_path / "rules.toml")))


class Client:
    """A client of the app, whose events a slot in memory writes."""

    def __init__(self, world: World, http: httpx.AsyncClient) -> None:
        self.world = world
        self._http = http

    async def post(self, name: str, body: bytes, **headers: str) -> httpx.Response:
        named = {header.replace("_", "-"): text for header, text in headers.items()}
        return await self._http.post(f"/sources/{name}", content=body, headers=named)

    async def github(self, body: bytes = BODY, key: str = "d-1", **headers: str) -> httpx.Response:
        signature = f"sha256={hmac.digest(b's3cret', body, 'sha256').hex()}"
        return await self.post(
            "github", body, **{"x_github_delivery": key, "x_hub_signature_256": signature, **headers}
        )


def with_sources(sources: tuple[Source, ...], admission: Admission | Commits) -> FastAPI:
    """Make the app's own routes, with the sources."""
    made = cast(Admission, admission)
    app = app_of(cast(Commits, admission))
    app.router.routes.append(SourcesEndpoint(sources, made, Settings(), Bodies(2**24), Telemetry()).route())
    return app


@asynccontextmanager
async def serving(sources: tuple[Source, ...], world: World) -> AsyncIterator[Client]:
    app = with_sources(sources, world.admission)
    task = world.serve(await world.slot())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        yield Client(world, http)
    task.cancel()
    await asyncio.wait([task])


@pytest.fixture
async def client(sources: tuple[Source, ...]) -> AsyncIterator[Client]:
    async with serving(sources, World()) as client:
        yield client


def problem(response: httpx.Response) -> tuple[int, str, str]:
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    return response.status_code, body["code"], body["detail"]


async def test_a_signed_delivery_is_written_once(client: Client) -> None:
    first = await client.github(content_type="application/json", x_github_event="issues")
    assert (first.status_code, first.json()["topic"]) == (201, "orders")
    assert first.headers["idempotency-key"] == "d-1"
    assert "idempotency-key-expires" in first.headers
    assert "location" not in first.headers  # no caller can ask for the state of a source's key
    again = await client.github(content_type="application/json", x_github_event="issues")
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (201, first.content, "true")
    ((record,),) = client.world.producers[0].written
    assert record.value == BODY
    headers = dict(record.headers)
    assert headers["idempotency-key"] == b"d-1"
    assert (headers["content-type"], headers["x-github-event"]) == (b"application/json", b"issues")
    assert headers["fencepost"].startswith(b"1;")


async def test_a_copy_that_comes_while_the_first_is_written_waits_for_it(client: Client) -> None:
    gate = client.world.producers[0].trouble.hold("write")
    first = asyncio.create_task(client.github())
    await client.world.producers[0].trouble.reached["write"].wait()
    second = asyncio.create_task(client.github())
    await asyncio.sleep(0.05)
    assert not second.done()
    gate.set()
    answers = [await first, await second]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].content == answers[1].content
    assert client.world.keys_written() == [["d-1"]]


async def test_a_key_with_another_body_is_refused(client: Client) -> None:
    assert (await client.github()).status_code == 201
    assert problem(await client.github(b"{}"))[:2] == (422, "fingerprint-mismatch")
    assert problem(await client.github(content_type="text/plain"))[:2] == (422, "fingerprint-mismatch")


@pytest.mark.parametrize(
    ("headers", "detail"),
    [
        (
            {"x_hub_signature_256": f"sha256={'00' * 32}"},
            "X-Hub-Signature-256: no signature fits the body and the secret",
        ),
        ({"x_hub_signature_256": "sha1=00"}, "X-Hub-Signature-256: it is not sha256= and hexadecimal digits"),
        ({"authorization": "Bearer s3cret", "x_hub_signature_256": ""}, "X-Hub-Signature-256: it is not sha256="),
    ],
)
async def test_a_delivery_with_a_bad_signature_touches_no_key(
    client: Client, headers: dict[str, str], detail: str
) -> None:
    response = await client.github(BODY, "d-1", **headers)
    status, code, text = problem(response)
    assert (status, code) == (401, "bad-signature")
    assert text.startswith(detail)
    assert response.headers["www-authenticate"] == "Signature"
    assert (await client.github()).headers.get("idempotent-replayed") is None


async def test_the_signature_is_checked_before_all_else(client: Client) -> None:
    """An answer about the key or the body would tell anybody about the rule."""
    assert problem(await client.post("github", b"{"))[1] == "bad-signature"
    missing = await client.github(key="")
    assert problem(missing) == (
        400,
        "missing-key",
        "x-github-delivery: this header has the idempotency key, and the delivery lacks it",
    )


async def test_slack_verifies_the_url_before_it_sends_events(client: Client) -> None:
    """https://docs.slack.dev/reference/events/url_verification"""

    async def post(body: dict[str, str]) -> httpx.Response:
        text, at = json.dumps(body).encode(), str(int(time.time()))
        signature = hmac.digest(b"s3cret", f"v0:{at}:".encode() + text, "sha256").hex()
        signed = {"x_slack_request_timestamp": at, "x_slack_signature": f"v0={signature}"}
        return await client.post("slack", text, **signed)

    asked = {"token": "t", "challenge": "3eZbrw1aB10FEMAGAZd4FyFQ", "type": "url_verification"}
    response = await post(asked)
    assert (response.status_code, response.text) == (200, asked["challenge"])
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert client.world.keys_written() == []
    assert problem(await client.post("slack", json.dumps(asked).encode()))[:2] == (401, "bad-signature")
    of_another = await client.post("open", json.dumps({**asked, "id": "1"}).encode())
    assert problem(of_another)[:2] == (422, "unusable-body")
    # An event whose text only mentions it is an event.
    assert (await post({"event_id": "Ev1", "type": "event_callback", "text": "url_verification"})).status_code == 201
    assert client.world.keys_written() == [["Ev1"]]


async def test_a_topic_is_chosen_for_each_delivery(client: Client) -> None:
    async def topic_of(id: str, kind: Any) -> Any:
        response = await client.post("open", json.dumps({"id": id, "type": kind}).encode())
        return response.json().get("topic") or problem(response)[:2]

    assert [await topic_of("1", "a"), await topic_of("2", "b")] == ["orders", "other"]
    assert await topic_of("3", "c") == (404, "unknown-topic")
    assert await topic_of("4", "d") == (422, "unusable-body")
    assert await topic_of("1", "b") == (422, "fingerprint-mismatch")  # a key is of the source, not of a topic
    status, code, detail = problem(await client.post("open", b"id=1&type=a"))
    assert (status, code) == (400, "invalid-json")
    assert detail.startswith("body: ")


@pytest.mark.parametrize("name", ["nobody", "github%2F", "Github", "%00", "."])
async def test_an_unknown_source(client: Client, name: str) -> None:
    response = await client.post(name, BODY)
    assert problem(response)[:2] in [(404, "unknown-source"), (404, "not-found")]


async def test_an_unknown_source_says_what_is_missing(client: Client) -> None:
    assert problem(await client.post("shop", b"")) == (
        404,
        "unknown-source",
        "/sources/shop: no [[sources]] table of the rules has this name",
    )


async def test_a_packed_body_is_refused(client: Client) -> None:
    response = await client.github(content_encoding="gzip")
    assert problem(response)[:2] == (415, "encoded-delivery")
    assert response.headers["accept-encoding"] == "identity"
    assert (await client.github(content_encoding="identity")).status_code == 201


async def test_a_sender_over_its_rate_waits_alone(client: Client) -> None:
    answers = [await client.post("slow", b"%d" % n) for n in range(3)]
    assert [answer.status_code for answer in answers] == [201, 429, 429]
    assert problem(answers[1])[2] == "source:slow may send 1 events a second"
    assert answers[1].headers["retry-after"] == "1"
    assert (await client.github()).status_code == 201


async def test_bad_signatures_spend_nothing_of_the_rate(sources: tuple[Source, ...], tmp_path: Path) -> None:
    """Else anybody could keep a sender out."""
    rules = Rules.parse(RULES.replace('["secret"] }', '["secret"] }\nrate = 1'), str(tmp_path / "rules.toml"))
    (limited, *_) = read_sources(rules)
    async with serving((limited,), World()) as other:
        for _ in range(3):
            assert (await other.post("github", BODY, x_github_delivery="d")).status_code == 401
        assert (await other.github()).status_code == 201


async def test_a_long_delivery_is_read_in_a_thread(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    where = []

    def noted(body: bytes) -> None:
        where.append(threading.current_thread().name)
        check_json(body)

    monkeypatch.setattr(deliveries, "check_json", noted)
    for id, more in (("1", ""), ("2", "x" * LONG_BYTES)):
        body = json.dumps({"id": id, "type": "a", "more": more}).encode()
        assert (await client.post("open", body)).status_code == 201
    assert where[0] == threading.current_thread().name
    assert where[1].startswith("long-json")
    assert problem(await client.post("open", b"x" * (LONG_BYTES + 1)))[:2] == (400, "invalid-json")


async def test_the_bounds_of_a_body(client: Client) -> None:
    assert (await client.github(b"x" * EVENT_BYTES_MAX)).status_code == 201
    longer = problem(await client.github(b"x" * (EVENT_BYTES_MAX + 1), "d-2"))
    assert longer == (413, "too-large", f"body: at most {EVENT_BYTES_MAX} bytes are taken")
    assert problem(await client.github(b"x" * (9 * 1024 * 1024), "d-3"))[:2] == (413, "too-large")
    assert client.world.keys_written() == [["d-1"]]


async def test_a_full_queue_refuses_before_the_signature_is_computed(sources: tuple[Source, ...]) -> None:
    admission = Commits()
    admission.overload = Problem(NOT_WRITTEN, "the queue is full")
    transport = httpx.ASGITransport(with_sources(sources, admission))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        response = await http.post("/sources/github", content=BODY)
    assert problem(response) == (503, "not-written", "the queue is full")


async def test_a_bug_is_answered_500_and_names_its_source(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.http.single_event.render_metadata", lambda *_: 1 / 0)
    with capture_logs() as lines:
        response = await client.github()
    assert problem(response)[:2] == (500, "internal")
    assert [(line["event"], line["source"]) for line in lines if line["log_level"] == "error"] == [
        ("request failed", "github")
    ]
