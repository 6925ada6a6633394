"""Tests which web pages may call the API from a browser, on both transports."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import cast

import httpx
import pytest
from fastapi import FastAPI

from service.contract import CallerRule, CorsRule
from service.core.metrics import Telemetry
from service.core.settings import Settings
from service.events import cloudevents
from service.http.application import Application
from service.http.callers import Callers
from service.http.cors import EXPOSED_HEADERS, REQUEST_HEADERS
from service.http.events import EventsEndpoint
from service.http.protocol import DirectRoutes
from service.http.request_guard import RequestGuard
from service.pipeline.admission import Admission
from tests.unit.http.apps import add_routes
from tests.unit.http.test_asgi import EVENT, HEAD, LINES
from tests.unit.http.test_events import Commits
from tests.unit.http.test_streaming_connections import serving

SHOP, OTHER, WILD = "https://shop.example", "http://localhost:3000", "https://*.example.org"
RULES = [CorsRule((SHOP, WILD), ("X-Trace-Id",)), CorsRule((OTHER,), max_age_s=5)]
TOKEN = {"authorization": "Bearer s3cret"}


def app_of(rules: list[CorsRule]) -> tuple[FastAPI, EventsEndpoint]:
    """Make the app's routes for one caller, with CORS."""
    app = Application(rules)
    callers = Callers([CallerRule("shop", (hashlib.sha256(b"s3cret").hexdigest(),))])
    posts = EventsEndpoint(
        RequestGuard(Settings(), callers), cast(Admission, Commits()), Telemetry(), Settings().key_ttl_s
    )
    add_routes(app, posts)
    return app, posts


@pytest.fixture(params=["direct", "asgi"])
async def http(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    app, posts = app_of(RULES)
    direct = DirectRoutes(posts.routes, posts.guard.body_bytes_max, posts.guard.bodies, posts.streamed, cors=True)
    async with (
        serving(app, direct if request.param == "direct" else None) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        yield client


def asked(origin: str, headers: str = "", method: str = "POST") -> dict[str, str]:
    given = {"origin": origin, "access-control-request-method": method}
    return given | {"access-control-request-headers": headers} if headers else given


async def preflight(http: httpx.AsyncClient, path: str, **given: str) -> httpx.Response:
    return await http.options(path, headers=asked(**given))


async def test_a_preflight_needs_no_token(http: httpx.AsyncClient) -> None:
    for path in ("/events", "/events/batch", "/events/a-key", "/anything"):
        answer = await preflight(http, path, origin=SHOP, headers="authorization,idempotency-key,x-trace-id")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, SHOP)
        assert answer.headers["access-control-max-age"] == "600"
        assert "origin" in answer.headers["vary"].lower()
        assert "access-control-allow-credentials" not in answer.headers
    answer = await preflight(http, "/events", origin=OTHER, headers="content-type")
    assert (answer.status_code, answer.headers["access-control-max-age"]) == (200, "5")


@pytest.mark.parametrize(
    "given",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": f"{SHOP}:8443"},
        {"origin": f"{SHOP}.evil.example"},
        {"origin": "http://shop.example"},
        {"origin": OTHER, "headers": "x-trace-id"},  # another rule's
        {"origin": SHOP, "headers": "x-other"},
        {"origin": SHOP, "method": "DELETE"},
    ],
)
async def test_a_preflight_of_what_no_rule_allows_is_refused(http: httpx.AsyncClient, given: dict[str, str]) -> None:
    answer = await preflight(http, "/events", **given)
    assert answer.status_code == 400
    assert answer.headers.get("access-control-allow-origin") in (None, given["origin"])


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("https://a.example.org", True),
        ("https://a.b-c.example.org", True),
        ("https://example.org", False),
        ("https://evilexample.org", False),
        ("https://a.example.org:8443", False),
        ("https://a.example.org.evil.com", False),
        ("https://a.exampleXorg", False),
        ("https://evil.com/.example.org", False),
        ("https://a..example.org", False),
        ("http://a.example.org", False),
        (WILD, False),
    ],
)
async def test_an_origin_with_a_star_is_all_hosts_below_it(origin: str, allowed: bool) -> None:
    app, _ = app_of(RULES)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = await http.post("/events", content=EVENT, headers={**HEAD, **TOKEN, "origin": origin})
        assert answer.status_code == 201, "whether the page may read it is up to the browser"
        assert answer.headers.get("access-control-allow-origin") == (origin if allowed or origin == WILD else None)


async def test_answers_and_problems_may_be_read_by_the_page(http: httpx.AsyncClient) -> None:
    lines = {"content-type": "application/x-ndjson"}
    for path, content, headers, status in (
        ("/events", EVENT, {**HEAD, **TOKEN}, 201),
        ("/events", EVENT, HEAD, 401),
        ("/events", b"{", {**HEAD, **TOKEN}, 400),
        ("/events", EVENT, {**HEAD, **TOKEN, "content-encoding": "br"}, 415),
        ("/events/batch", LINES, {**lines, **TOKEN}, 207),
        ("/events/batch", LINES, lines, 401),
        ("/nowhere", b"", {}, 404),
        ("/livez", b"", {}, 405),
    ):
        answer = await http.post(path, content=content, headers={**headers, "origin": SHOP})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == SHOP
        assert answer.headers["access-control-expose-headers"].split(", ") == list(EXPOSED_HEADERS)
        assert answer.headers["vary"] == "Origin"
    gone = await http.get("/events/k", headers={**TOKEN, "origin": SHOP})  # a bug: there is no service
    assert (gone.status_code, gone.headers["access-control-allow-origin"]) == (500, SHOP)


async def test_other_clients_are_served_as_ever(http: httpx.AsyncClient) -> None:
    first, again = [await http.post("/events", content=EVENT, headers={**HEAD, **TOKEN}) for _ in range(2)]
    assert (first.status_code, again.status_code) == (201, 201)
    assert "access-control-allow-origin" not in first.headers
    both = await asyncio.gather(
        *(http.post("/events", content=EVENT, headers={**HEAD, **TOKEN, **more}) for more in ({}, {"origin": SHOP}) * 5)
    )
    assert [answer.status_code for answer in both] == [201] * 10


async def test_without_a_rule_there_is_no_cors() -> None:
    app, _ = app_of([])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = await preflight(http, "/events", origin=SHOP)
        assert (answer.status_code, answer.json()["code"]) == (405, "method-not-allowed")
        answer = await http.post("/events", content=EVENT, headers={**HEAD, **TOKEN, "origin": SHOP})
        assert answer.status_code == 201
        assert not {name for name in answer.headers if name.startswith("access-control") or name == "vary"}


def test_each_attribute_of_a_cloudevent_that_is_read_may_be_sent() -> None:
    read = set(cloudevents.CloudEvent.__struct_fields__) - {"data", "data_base64", "datacontenttype"}
    assert {f"ce-{name}" for name in read} <= set(REQUEST_HEADERS)
