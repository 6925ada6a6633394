"""Tests the headers of OASIS' Repeatable Requests 1.0: a key, and the time at which a request was first sent."""

from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest

from service.claims.states import Delivered
from service.contract.wire.ids import event_id
from service.http.responses import imf_fixdate
from tests.durations import DAY_S
from tests.unit.fakes import NOW_MS, World, ended
from tests.unit.http.test_asgi import app_of
from tests.unit.http.test_events import Commits

NOW_S = NOW_MS // 1000
ID = "Repeatability-Request-ID"
FIRST_SENT = "Repeatability-First-Sent"
RESULT = "repeatability-result"


def sent(ago_s: int) -> dict[str, str]:
    return {FIRST_SENT: imf_fixdate(NOW_S - ago_s).decode()}


class Client:
    def __init__(self, world: World, http: httpx.AsyncClient) -> None:
        self.world = world
        self._http = http

    async def event(self, headers: dict[str, str], topic: str = "orders") -> httpx.Response:
        return await self._http.post("/events", json={"topic": topic, "value": 1}, headers=headers)

    async def atomic(self, headers: dict[str, str], *topics: str) -> httpx.Response:
        body: dict[str, Any] = {"atomic": True, "events": [{"topic": topic, "value": 1} for topic in topics]}
        return await self._http.post("/events/batch", json=body, headers=headers)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    world = World()
    world.clock.read = lambda: NOW_MS
    serving = world.serve(await world.slot())
    transport = httpx.ASGITransport(app_of(cast(Commits, world.admission)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield Client(world, http)
    await ended(serving)


async def test_the_id_of_a_request_is_its_key(client: Client) -> None:
    headers = {ID: "0a1b", **sent(0)}
    first, again = [await client.event(headers) for _ in range(2)]
    assert (first.status_code, first.headers["idempotency-key"], first.headers[RESULT]) == (201, "0a1b", "accepted")
    assert (again.status_code, again.content) == (201, first.content)
    assert (again.headers["idempotent-replayed"], again.headers[RESULT]) == ("true", "accepted")
    assert client.world.keys_written() == [["0a1b"]]
    other = await client.event({"Idempotency-Key": "k", ID: "0a1b"})
    assert (other.status_code, other.headers["idempotency-key"]) == (201, "k")
    assert RESULT not in (await client.event({"Idempotency-Key": "k2"})).headers


async def test_a_batch_is_repeatable_too(client: Client) -> None:
    answers = [await client.atomic({ID: "b", **sent(0)}, "orders", "other") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].content == answers[1].content
    assert [answer.headers[RESULT] for answer in answers] == ["accepted"] * 2
    refused = await client.atomic({ID: "c", **sent(DAY_S)}, "orders")
    assert (refused.status_code, refused.json()["code"]) == (412, "key-expired")
    assert (await client.atomic({ID: "c", **sent(DAY_S)}, "orders", "kept")).status_code == 201


@pytest.mark.parametrize(
    ("topic", "ago_s", "status"),
    [
        ("orders", -DAY_S, 201),
        ("orders", DAY_S - 1, 201),
        ("orders", DAY_S, 412),
        ("kept", 2 * DAY_S, 201),
        ("kept", 3 * DAY_S, 412),
        ("filled", DAY_S, 412),  # the topic takes old keys, but this is a repetition that nothing is known of
    ],
)
async def test_a_request_that_was_first_sent_before_its_retention_is_refused(
    client: Client, topic: str, ago_s: int, status: int
) -> None:
    answer = await client.event({"Idempotency-Key": "k", **sent(ago_s)}, topic)
    assert answer.status_code == status
    assert (answer.headers.get(RESULT) == "accepted") is (status == 201)
    if status == 412:
        assert answer.json()["code"] == "key-expired"
        assert client.world.keys.server.keys == {}


async def test_an_old_request_whose_key_is_remembered_is_answered_again(client: Client) -> None:
    """It was accepted long after it was first sent."""
    first = await client.event({"Idempotency-Key": "k"})
    state = client.world.keys.server.keys[event_id("k")]
    assert isinstance(state, Delivered)
    again = await client.event({"Idempotency-Key": "k", **sent(2 * DAY_S)})
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (201, first.content, "true")


async def test_a_malformed_header_is_refused(client: Client) -> None:
    for headers in ({"Idempotency-Key": "k", FIRST_SENT: "yesterday"}, {ID: ""}, {ID: "é"}):
        raw = [(name, text.encode("latin-1")) for name, text in headers.items()]
        answer = await client.event(cast(dict[str, str], raw))
        assert answer.status_code == 400
        assert answer.json()["code"] in ("invalid-key", "missing-key")
    twice = await client.event(cast(dict[str, str], [(ID, "a"), (ID, "b")]))
    assert twice.json()["detail"] == "Repeatability-Request-ID: send it once"
    assert client.world.keys.server.keys == {}
