"""Tests Confluent's produce API on the app: writes, replays, keys and refusals, with Kafka and Redis in memory."""

import asyncio
import base64
import gzip
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.contract import CallerRule, Rules, TopicRule
from service.contract.wire.ids import event_id, member_id
from service.core.problems import NOT_WRITTEN, Problem
from service.http import produce_v3 as module
from service.http.callers import Callers
from service.http.headers import JSON
from service.http.produce import ProduceRequests, new_key
from service.http.request import OWN_BYTES
from service.http.request_guard import RequestGuard
from service.http.responses import imf_fixdate
from tests.durations import DAY_MS
from tests.unit.fakes import NOW_MS, World, ended
from tests.unit.http.apps import produce_routes

JSON_V2 = "application/vnd.kafka.json.v2+json"
BINARY_V2 = "application/vnd.kafka.binary.v2+json"
ANSWER_V2 = "application/vnd.kafka.v2+json"
V3 = "/v3/clusters/c1/topics/orders/records"
BATCH = f"{V3}:batch"
EXPIRES = imf_fixdate(NOW_MS // 1000 + 86_400).decode()
TOKEN_SHA256 = "3c469e9d6c5875d37a43f353d4f88e61fcf812c66eee3457465a40b0da4153e0"  # of "token"
RULES = Rules((TopicRule("other", keyless="refuse"),))


class ServiceClient:
    """A client of a service that is in memory."""

    def __init__(self, world: World, client: httpx.AsyncClient) -> None:
        self.world = world
        self.client = client

    async def v2(
        self, *records: object, path: str = "/topics/orders", type: str = JSON_V2, **headers: str
    ) -> httpx.Response:
        body = json.dumps({"records": records}).encode()
        return await self.post(path, body, type, **headers)

    async def v3(self, *records: dict[str, Any], path: str = V3, **headers: str) -> httpx.Response:
        return await self.post(path, b"\n".join(json.dumps(record).encode() for record in records), **headers)

    async def batch(self, *entries: object, path: str = BATCH, **headers: str) -> httpx.Response:
        return await self.post(path, json.dumps({"entries": entries}).encode(), **headers)

    async def post(self, path: str, body: bytes, type: str = JSON, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return await self.client.post(path, content=body, headers={"content-type": type, **named})

    @property
    def written(self) -> list[tuple[str, bytes | None, bytes | None]]:
        """List the records in Kafka: the idempotency key, the record's key and its value."""
        groups = self.world.producers[0].written
        return [(each.headers[0][1].decode(), each.key, each.value) for group in groups for each in group]


def app_of(world: World, rules: Rules = RULES, guard: RequestGuard | None = None) -> FastAPI:
    app = FastAPI()
    guard = guard or RequestGuard(world.settings, Callers(rules.callers))
    produce = ProduceRequests(guard, world.admission, world.telemetry, rules, world.settings.key_ttl_s)
    app.router.routes += produce_routes(produce)
    return app


def proxied(world: World, rules: Rules = RULES, guard: RequestGuard | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app_of(world, rules, guard), client=("127.0.0.1", 1))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def service_client() -> AsyncIterator[ServiceClient]:
    world = World()
    serving = world.serve(await world.slot())
    async with proxied(world) as client:
        yield ServiceClient(world, client)
    await ended(serving)


def answers(response: httpx.Response) -> list[dict[str, Any]]:
    """Read the answers of a v3 request."""
    assert response.headers["content-type"] == "application/json"
    lines = response.text.split("\r\n")
    assert lines.pop() == ""
    return [json.loads(line) for line in lines]


def string(text: str) -> dict[str, Any]:
    return {"value": {"type": "STRING", "data": text}}


def entry(id: object, text: str = "a", **more: object) -> dict[str, Any]:
    return {"id": id, **string(text), **more}


def keyed(text: str) -> dict[str, Any]:
    """Make a record with a key of its own, its text."""
    own = base64.b64encode(text.encode()).decode()
    return {"headers": [{"name": "idempotency-key", "value": own}], **string(text)}


def assert_error(response: httpx.Response, status: int, error_code: int) -> str:
    answer = response.json()
    assert (response.status_code, answer["error_code"], answer.keys()) == (
        status,
        error_code,
        {"error_code", "message"},
    )
    return str(answer["message"])


# ------------------------------------------------------------------------------------------------------------------ v2


async def test_v2_records_are_written_in_their_order(service_client: ServiceClient) -> None:
    response = await service_client.v2({"value": {"a": 1}}, {"key": "k", "value": "x"}, {"value": 2, "partition": 1})
    assert (response.status_code, response.headers["content-type"]) == (200, ANSWER_V2)
    answer = response.json()
    assert (answer["key_schema_id"], answer["value_schema_id"]) == (None, None)
    assert [each.keys() for each in answer["offsets"]] == [{"partition", "offset", "error_code", "error"}] * 3
    assert [(each["offset"], each["error_code"], each["error"]) for each in answer["offsets"]] == [
        (offset, None, None) for offset in (12, 13, 14)
    ]
    assert answer["offsets"][2]["partition"] == 1
    assert [(key, value) for _, key, value in service_client.written] == [
        (None, b'{"a": 1}'),
        (b'"k"', b'"x"'),
        (None, b"2"),
    ]


async def test_the_partition_of_the_path_is_that_of_the_records(service_client: ServiceClient) -> None:
    response = await service_client.v2(
        {"value": "Zm9v"}, {"value": "YmFy"}, path="/topics/orders/partitions/2", type=BINARY_V2
    )
    assert [each["partition"] for each in response.json()["offsets"]] == [2, 2]
    for path in ("/topics/orders/partitions/3", "/topics/orders/partitions/x", "/topics/orders/partitions/-1"):
        assert assert_error(await service_client.v2({"value": 1}, path=path), 404, 40402).startswith(
            ("partition: ", "records")
        )


async def test_a_request_that_is_sent_again_with_its_key_is_answered_byte_for_byte(
    service_client: ServiceClient,
) -> None:
    records = {"value": 1}, {"key": "k", "value": 2}
    first = await service_client.v2(*records, idempotency_key="q 1")
    again = await service_client.v2(*records, idempotency_key='"q 1"')
    assert (first.content, first.status_code) == (again.content, again.status_code)
    assert (first.headers["idempotency-key"], again.headers["idempotency-key"]) == ("q 1", "q 1")
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert first.headers["idempotency-key-expires"] == again.headers["idempotency-key-expires"] == EXPIRES
    assert [key for key, _, _ in service_client.written] == ["q 1", "q 1"]
    assert set(service_client.world.keys.server.keys) == {member_id("q 1", 0), member_id("q 1", 1)}


async def test_records_that_are_added_to_a_request_are_written_alone(service_client: ServiceClient) -> None:
    """Each record stands for itself: the second request finds the first's records written."""
    await service_client.v2({"value": 1}, idempotency_key="q")
    response = await service_client.v2({"value": 1}, {"value": 2}, idempotency_key="q")
    assert "idempotent-replayed" not in response.headers
    assert [value for _, _, value in service_client.written] == [b"1", b"2"]


async def test_a_key_that_was_used_for_another_record_is_refused(service_client: ServiceClient) -> None:
    await service_client.v2({"value": 1}, idempotency_key="q")
    assert_error(await service_client.v2({"value": 2}, idempotency_key="q"), 422, 42206)
    response = await service_client.v2({"value": 2}, {"value": 3}, idempotency_key="q")
    conflict, written = response.json()["offsets"]
    assert (response.status_code, conflict["error_code"], conflict["offset"]) == (200, 1, None)
    assert written["error_code"] is None


async def test_a_request_without_a_key_is_told_the_key_that_was_made_for_it(service_client: ServiceClient) -> None:
    records = {"value": 1}, {"value": 1}
    first = await service_client.v2(*records)
    made = first.headers["idempotency-key"]
    assert uuid.UUID(made).version == 7
    again = await service_client.v2(*records, idempotency_key=made)
    assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
    assert (await service_client.v2(*records)).headers["idempotency-key"] != made
    assert len(service_client.written) == 4


async def test_the_time_of_a_made_key_is_the_brokers(service_client: ServiceClient) -> None:
    """A key that tells that it is older than its retention is refused: a machine's own clock could be behind."""
    service_client.world.clock.read = lambda: NOW_MS + 3_600_000
    for response in (await service_client.v2({"value": 1}), await service_client.v3(string("a"))):
        assert uuid.UUID(response.headers["idempotency-key"]).int >> 80 == NOW_MS + 3_600_000


async def test_a_rule_may_refuse_requests_without_a_key(service_client: ServiceClient) -> None:
    message = assert_error(await service_client.v2({"value": 1}, path="/topics/other"), 400, 40001)
    assert "send this header" in message
    assert (await service_client.v2({"value": 1}, path="/topics/other", idempotency_key="q")).status_code == 200
    path = V3.replace("orders", "other")
    assert_error(await service_client.v3(string("a"), path=path), 400, 40001)
    own = {"name": "idempotency-key", "value": base64.b64encode(b"own").decode()}
    assert_error(await service_client.v3({**string("a"), "headers": [own]}, string("b"), path=path), 400, 40001)
    (answer,) = answers(await service_client.v3({**string("a"), "headers": [own]}, path=path))
    assert answer["error_code"] == 200
    assert len(service_client.written) == 2


@pytest.mark.parametrize(
    ("body", "type", "status", "error_code"),
    [
        (b"{}", JSON_V2, 422, 422),
        (b'{"records":[]}', BINARY_V2, 422, 422),
        (b"", JSON_V2, 422, 422),
        (b"foobar", JSON_V2, 400, 400),
        (b'{"records":[{"value":"?"}]}', BINARY_V2, 400, 400),
        (b'{"records":[{"value":1},{"valur":1}]}', JSON_V2, 400, 400),
        (b'{"records":[{"value":1},{"value":1,"partition":-1}]}', JSON_V2, 404, 40402),
        (b'{"records":[{"value":1}]}', "application/vnd.kafka.avro.v2+json", 422, 42206),
        (b'{"records":[{"value":1}]}', "application/json", 415, 415),
        (b'{"records":[{"value":1}]}', "text/plain", 415, 415),
    ],
)
async def test_a_malformed_v2_request_writes_nothing(
    service_client: ServiceClient, body: bytes, type: str, status: int, error_code: int
) -> None:
    response = await service_client.post("/topics/orders", body, type)
    assert_error(response, status, error_code)
    assert response.headers["content-type"] == ANSWER_V2
    assert service_client.written == []


async def test_the_message_names_the_record(service_client: ServiceClient) -> None:
    message = assert_error(await service_client.v2({"value": "Zg=="}, {"value": "?"}, type=BINARY_V2), 400, 400)
    assert message == "records[1].value: use standard base64 (RFC 4648, section 4)"


async def test_an_unknown_topic_is_not_found(service_client: ServiceClient) -> None:
    assert_error(await service_client.v2({"value": 1}, path="/topics/nowhere"), 404, 40401)
    assert_error(await service_client.v2({"value": 1}, path="/topics/fencepost.ledger"), 403, 40301)


async def test_a_record_that_is_too_large_fails_alone(service_client: ServiceClient) -> None:
    large = {"value": "x" * 1_000_000}
    response = await service_client.v2({"value": 1}, large, {"value": 2})
    first, refused, last = response.json()["offsets"]
    assert (first["error_code"], refused["error_code"], last["error_code"]) == (None, 1, None)
    assert refused["error"].startswith("value: the event has 1000002 bytes")
    assert_error(await service_client.v2(large), 413, 413)


async def test_a_record_that_is_not_written_is_retriable(service_client: ServiceClient) -> None:
    """By the status, where none of the request's records is written, and with the key to send it again."""
    service_client.world.store.generation = None
    response = await service_client.v2({"value": 1}, {"value": 2})
    assert_error(response, 503, 50003)
    assert response.headers["retry-after"] == "1"
    assert uuid.UUID(response.headers["idempotency-key"]).version == 7
    (answer,) = answers(await service_client.v3(string("a")))
    assert answer["error_code"] == 50003


async def test_a_request_that_finds_the_queue_full_is_refused(
    service_client: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Problem(NOT_WRITTEN, "the queue is full")
    monkeypatch.setattr(type(service_client.world.admission), "overload", property(lambda _: full))
    for response in (
        await service_client.v2({"value": 1}, idempotency_key="q"),
        await service_client.v3(string("a"), idempotency_key="q"),
    ):
        assert_error(response, 503, 50003)
        assert response.headers["idempotency-key"] == "q"
    assert service_client.written == []


async def test_an_outcome_that_is_not_known_is_a_timeout_that_names_the_remedy() -> None:
    world = World(request_timeout_ms=300, transaction_timeout_ms=300)
    serving = world.serve(await world.slot())
    sweeping = asyncio.create_task(world.resolver.sweep())
    world.producers[0].trouble.hold("commit")
    async with proxied(world) as client:
        service_client = ServiceClient(world, client)
        response, stream = await asyncio.gather(service_client.v2({"value": 1}), service_client.v3(string("a")))
        message = assert_error(response, 408, 40801)
        assert "send it again with the same key" in message
        assert uuid.UUID(response.headers["idempotency-key"]).version == 7
        assert [each["error_code"] for each in answers(stream)] == [40801]
    await ended(serving)
    await ended(sweeping)


async def test_callers_are_known_by_their_tokens() -> None:
    world = World()
    serving = world.serve(await world.slot())
    rules = Rules(callers=(CallerRule("shop", (TOKEN_SHA256,), ("orders",), rate=0.001),))
    async with proxied(world, rules) as client:
        service_client = ServiceClient(world, client)
        response = await service_client.v2({"value": 1})
        assert_error(response, 401, 40101)
        assert response.headers["www-authenticate"] == "Bearer"
        token = {"authorization": "Bearer token"}
        assert_error(await service_client.v2({"value": 1}, path="/topics/other", **token), 403, 40301)
        basic = {"authorization": f"Basic {base64.b64encode(b'API-KEY:token').decode()}"}
        assert_error(await service_client.v2({"value": 1}, path="/topics/other", **basic), 403, 40301)
        assert_error(await service_client.v3(string("a"), path=V3.replace("orders", "other"), **token), 403, 40301)
        assert (await service_client.v2({"value": 1}, idempotency_key="q", **token)).status_code == 200
        assert set(world.keys.server.keys) == {member_id("q", 0, "shop")}
        response = await service_client.v2({"value": 1}, **token)
        assert_error(response, 429, 42901)
        assert int(response.headers["retry-after"]) > 1
    await ended(serving)


@pytest.mark.parametrize("name", ["x" * 250, "x" * 60_000, "a%20b"])
async def test_a_name_that_no_topic_can_have_is_looked_up_nowhere(name: str) -> None:
    """Whatever the caller's rights are: those, and the topics' rules, are cached by name."""
    world = World()
    rules = Rules(callers=(CallerRule("shop", (TOKEN_SHA256,), ("orders",)),))
    path = V3.replace("orders", name)
    async with proxied(world, rules) as client:
        service_client, token = ServiceClient(world, client), {"authorization": "Bearer token"}
        for response in (
            await service_client.v2({"value": 1}, path=f"/topics/{name}/partitions/0", **token),
            await service_client.v3(string("a"), path=path, **token),
            await client.post(path, content=streamed(b"{}"), headers={"content-type": JSON, **token}),
        ):
            assert assert_error(response, 400, 400).startswith("topic: use 1 to 249 of letters")


# ------------------------------------------------------------------------------------------------------------------ v3


async def test_a_v3_record_is_written_and_described(service_client: ServiceClient) -> None:
    record = {
        "partition_id": 1,
        "headers": [{"name": "a", "value": "Yg=="}],
        "key": {"type": "BINARY", "data": "Zm9vYmFy"},
        "value": {"type": "JSON", "data": {"foo": "bar"}},
        "timestamp": "2023-11-14T22:13:20Z",
    }
    response = await service_client.v3(record)
    assert response.status_code == 200
    assert answers(response) == [
        {
            "error_code": 200,
            "cluster_id": "c1",
            "topic_name": "orders",
            "partition_id": 1,
            "offset": 12,
            "timestamp": "2023-11-14T22:13:20Z",
            "key": {"type": "BINARY", "size": 6},
            "value": {"type": "JSON", "size": 14},
        }
    ]
    ((written,),) = service_client.world.producers[0].written
    assert (written.partition, written.key, written.value) == (1, b"foobar", b'{"foo": "bar"}')
    assert (written.timestamp, written.headers[-1]) == (1_700_000_000_000, ("a", b"b"))


async def test_what_a_v3_record_lacks_is_not_in_its_answer(service_client: ServiceClient) -> None:
    only_value, only_key, null_key = answers(
        await service_client.v3(
            string("a"),
            {"key": {"type": "STRING", "data": "a"}},
            {"key": {"type": "BINARY", "data": None}, **string("")},
        )
    )
    assert (only_value.get("key"), only_value["value"]) == (None, {"type": "STRING", "size": 1})
    assert (only_key["key"], only_key.get("value")) == ({"type": "STRING", "size": 1}, None)
    assert (null_key["key"], null_key["value"]) == ({"type": "BINARY", "size": -1}, {"type": "STRING", "size": 0})
    assert [(key, value) for _, key, value in service_client.written] == [(None, b"a"), (b"a", None), (None, b"")]


async def test_v3_records_are_answered_in_their_order_and_fail_alone(service_client: ServiceClient) -> None:
    bad = {"value": {"type": "BINARY", "data": 1}}
    schema = {"value": {"schema_id": 1, "data": 1}}
    nowhere = {"partition_id": 7, **string("x")}
    response = await service_client.v3(
        string("a"), bad, string("b"), schema, {"partition_id": -1, **string("x")}, nowhere
    )
    results = answers(response)
    assert [each["error_code"] for each in results] == [200, 400, 200, 422, 40402, 40402]
    assert [each.get("offset") for each in results] == [12, None, 13, None, None, None]
    assert all(each.keys() == {"error_code", "message"} for each in results if each["error_code"] != 200)
    assert results[1]["message"] == "value.data: send a string of base64"
    assert results[3]["message"].startswith("Error: 42206 : value: no schema registry is configured")


async def test_text_that_is_no_json_ends_a_v3_request(service_client: ServiceClient) -> None:
    """As with the peer: what comes before is written and answered."""
    record = json.dumps(string("a")).encode()
    for rest in (b"foobar", b'{"value":', b"[" + record + b"]"):
        results = answers(await service_client.post(V3, record + rest))
        assert [each["error_code"] for each in results] == [200, 400]
    results = answers(await service_client.post(V3, b'{"value":{"type":"JSON","data":NaN}}' + record))
    assert [each["error_code"] for each in results] == [400, 200], "it is known where the record ends"
    assert len(service_client.written) == 4
    for body in (b"", b" \n"):
        assert_error(await service_client.post(V3, body), 422, 422)
    assert_error(await service_client.post(V3, record, "text/plain"), 415, 415)


async def test_v3_requests_are_replayed_byte_for_byte(service_client: ServiceClient) -> None:
    records = string("a"), {"key": {"type": "JSON", "data": {"n": 1}}, **string("b")}
    first = await service_client.v3(*records, idempotency_key="q")
    again = await service_client.v3(*records, idempotency_key="q")
    assert (first.content, again.headers["idempotent-replayed"]) == (again.content, "true")
    assert set(service_client.world.keys.server.keys) == {member_id("q", 0), member_id("q", 1)}
    made = (await service_client.v3(*records)).headers["idempotency-key"]
    assert answers(await service_client.v3(*records, idempotency_key=made))[0]["offset"] == 16
    assert len(service_client.written) == 4


async def test_a_record_with_a_key_of_its_own_is_written_once_in_any_request(service_client: ServiceClient) -> None:
    first = answers(await service_client.v3(keyed("a"), keyed("b")))
    again = answers(await service_client.v3(string("x"), keyed("b"), keyed("a"), keyed("a"), idempotency_key="q"))
    assert again[1:] == [first[1], first[0], first[0]]
    assert set(service_client.world.keys.server.keys) == {event_id("a"), event_id("b"), member_id("q", 0)}


async def test_a_short_v3_body_has_a_bounded_number_of_records(
    service_client: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_EVENTS_MAX", 20)
    assert len(answers(await service_client.v3(*[string("a")] * 20))) == 20
    assert "unless it is streamed" in assert_error(await service_client.v3(*[string("a")] * 21), 413, 413)


@pytest.mark.parametrize("version", ["v2", "v3", "v3, and its records are none"])
async def test_a_response_for_which_there_is_no_room_is_a_timeout_that_names_the_remedy(version: str) -> None:
    world = World()
    serving = world.serve(await world.slot())
    guard = RequestGuard(world.settings, Callers(RULES.callers))
    async with proxied(world, guard=guard) as client:
        count = 2_000
        if version == "v2":
            content, kind, path = json.dumps({"records": [{"value": 1}] * count}).encode(), JSON_V2, "/topics/orders"
        else:
            record = b"{}" if "none" in version else b'{"value":{"type":"JSON","data":1}}'
            content, kind, path = record * min(count, 1_900), JSON, V3
        headers = {"content-type": kind, "idempotency-key": "k"}
        guard.bodies.unread, guard.bodies.most = 1, 30_000
        response = await client.post(path, content=content, headers=headers)
        if "none" in version:
            assert_error(response, 503, 50003)
        else:
            assert assert_error(response, 408, 40801).startswith("response: too many large ones are not read yet")
        assert guard.bodies.unread == 1
        guard.bodies.most = 10_000_000
        response = await client.post(path, content=content, headers=headers)
        assert response.status_code == 200
        assert len(response.content) > OWN_BYTES
        assert guard.bodies.unread == 1
    await ended(serving)


# ----------------------------------------------------------------------------------------------------------- v3 batch


async def test_the_entries_of_a_batch_are_written_and_answered_each_for_itself(service_client: ServiceClient) -> None:
    bad = {"id": "b", "key": {"type": "BINARY", "data": 1}}
    schema = {"id": "c", "value": {"type": "AVRO", "schema": "{}", "data": 1}}
    full: dict[str, Any] = entry("0-9_a-z_A-Z", partition_id=2, timestamp="2023-11-14T22:13:20Z")
    full["key"] = {"type": "JSON", "data": {"n": 1}}
    entries = [entry("a", "x" * 70_000), bad, schema, full, entry("e", partition_id=7)]
    response = await service_client.batch(*entries, {"id": "f"}, idempotency_key="q")
    assert (response.status_code, response.headers["content-type"]) == (207, "application/json")
    assert (response.headers["idempotency-key"], response.headers["idempotency-key-expires"]) == ("q", EXPIRES)
    answer = response.json()
    assert answer["successes"] == [
        {
            "id": "a",
            "cluster_id": "c1",
            "topic_name": "orders",
            "partition_id": answer["successes"][0]["partition_id"],
            "offset": 12,
            "timestamp": answer["successes"][0]["timestamp"],
            "value": {"type": "STRING", "size": 70_000},
        },
        {
            "id": "0-9_a-z_A-Z",
            "cluster_id": "c1",
            "topic_name": "orders",
            "partition_id": 2,
            "offset": 13,
            "timestamp": "2023-11-14T22:13:20Z",
            "key": {"type": "JSON", "size": 7},
            "value": {"type": "STRING", "size": 1},
        },
    ]
    assert [(each["id"], each["error_code"]) for each in answer["failures"]] == [
        ("b", 400),
        ("c", 422),
        ("e", 40402),
        ("f", 400),
    ]
    assert all(each.keys() == {"id", "error_code", "message"} for each in answer["failures"])
    assert answer["failures"][1]["message"].startswith("Error: 42206 : ")
    assert [(key, value) for _, key, value in service_client.written] == [(None, b"x" * 70_000), (b'{"n":1}', b"a")]


async def test_a_batch_is_replayed_byte_for_byte_and_its_entries_also_alone(service_client: ServiceClient) -> None:
    """A client that sends only the failures again must find its entry, not the one that had its index before."""
    entries = entry("a", "x"), entry("b", "x"), entry("c", "x")
    first = await service_client.batch(*entries, idempotency_key="q")
    again = await service_client.batch(*entries, path=f"/kafka{BATCH}", idempotency_key="q")
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (207, first.content, "true")
    alone = await service_client.batch(entries[2], entry("d"), idempotency_key="q")
    assert "idempotent-replayed" not in alone.headers
    assert [each["offset"] for each in alone.json()["successes"]] == [14, 17]  # 15 and 16 are the markers
    assert alone.json()["successes"][0] == first.json()["successes"][2]
    assert set(service_client.world.keys.server.keys) == {member_id("q", id) for id in "abcd"}
    conflict = await service_client.batch(entry("a", "y"), idempotency_key="q")
    assert [(each["id"], each["error_code"]) for each in conflict.json()["failures"]] == [("a", 422)]
    assert len(service_client.written) == 4


async def test_keys_of_a_batch_are_made_or_of_its_entries_as_those_of_records(service_client: ServiceClient) -> None:
    made = (await service_client.batch(entry("a"))).headers["idempotency-key"]
    assert uuid.UUID(made).version == 7
    assert (await service_client.batch(entry("a"), idempotency_key=made)).headers["idempotent-replayed"] == "true"
    (record,) = answers(await service_client.v3(keyed("own")))
    (success,) = (await service_client.batch({"id": "z", **keyed("own")})).json()["successes"]
    assert success["offset"] == record["offset"]
    path = BATCH.replace("orders", "other")
    assert_error(await service_client.batch({"id": "z", **keyed("o")}, entry("a"), path=path), 400, 40001)
    assert (await service_client.batch({"id": "z", **keyed("o")}, path=path)).status_code == 207
    assert len(service_client.written) == 3


@pytest.mark.parametrize(
    ("body", "status", "error_code", "message"),
    [
        (b"", 422, 42208, "body: is empty"),
        (b"null", 422, 42208, "body: is empty"),
        (b"{}", 422, 42208, "entries: send at least one"),
        ({"entries": []}, 422, 42208, "entries: send at least one"),
        ({"entries": [entry(f"{n}") for n in range(11)]}, 422, 42208, "entries: there are 11; at most 10"),
        ({"entries": [entry("a"), entry("b"), entry("a")]}, 422, 42208, "entries[2].id: another entry has a"),
        ({"entries": [entry("a"), string("b")]}, 422, 42208, "entries[1].id: send a string of 1 to 80"),
        ({"entries": [entry(0)]}, 422, 42208, "entries[0].id: "),
        ({"entries": [entry(None)]}, 422, 42208, "entries[0].id: "),
        ({"entries": [entry("")]}, 422, 42208, "entries[0].id: "),
        ({"entries": [entry("a" * 81)]}, 422, 42208, "entries[0].id: "),
        ({"entries": [entry("€")]}, 422, 42208, "entries[0].id: "),
        ({"entries": [entry("a" * 100_000)]}, 422, 42208, "entries[0].id: "),
        ({"entries": [entry("a"), 1]}, 400, 400, "entries[1]: send an object"),
        ({"entries": [entry("a"), entry("b", valur=1)]}, 400, 400, "entries[1]."),
        ({"entries": [entry("a"), {"id": "b", "value": {"type": "XML", "data": 1}}]}, 400, 400, "entries[1].value"),
        ({"entries": [entry("a"), entry("b", "x" * 2_000_001)]}, 413, 413, "entries[1].body: the event's JSON has"),
        ({"records": [string("a")]}, 400, 400, ""),
        (b'{"entries":[{"id":"a","value":{"type":"JSON","data":NaN}}]}', 400, 400, ""),
        (b"foobar", 400, 400, ""),
    ],
)
async def test_a_malformed_batch_writes_nothing(
    service_client: ServiceClient, body: object, status: int, error_code: int, message: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert assert_error(await service_client.post(BATCH, content), status, error_code).startswith(message)
    assert service_client.written == []


async def test_a_batch_is_refused_as_other_requests_are(
    service_client: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_error(await service_client.post(BATCH, b"{}", "text/plain"), 415, 415)
    assert_error(await service_client.batch(entry("a"), idempotency_key="x" * 256), 400, 40001)
    assert_error(await service_client.batch(entry("a"), path=BATCH.replace("c1", "c" * 256)), 404, 404)
    nowhere = (await service_client.batch(entry("a"), path=BATCH.replace("orders", "nowhere"))).json()
    assert [each["error_code"] for each in nowhere["failures"]] == [40401]
    service_client.world.store.generation = None
    (failure,) = (await service_client.batch(entry("a"))).json()["failures"]
    assert (failure["error_code"], "send the entry again, with its id" in failure["message"]) == (50003, True)
    full = Problem(NOT_WRITTEN, "the queue is full")
    monkeypatch.setattr(type(service_client.world.admission), "overload", property(lambda _: full))
    assert_error(await service_client.batch(entry("a"), idempotency_key="q"), 503, 50003)
    assert service_client.written == []


async def test_the_paths_of_confluent_server_are_served(service_client: ServiceClient) -> None:
    record = json.dumps(string("a")).encode()
    first = await service_client.post(f"/kafka{V3}", record, idempotency_key="q")
    stream = await service_client.client.post(
        f"/kafka{V3}", content=streamed(record), headers={"content-type": JSON, "idempotency-key": "q"}
    )
    assert first.content == stream.content == (await service_client.v3(string("a"), idempotency_key="q")).content
    assert len(service_client.written) == 1


# ---------------------------------------------------------------------------------------------------------------- both


async def test_bodies_may_be_compressed(service_client: ServiceClient) -> None:
    records = [string("x" * 70_000), string("a")]
    body = gzip.compress(b"".join(json.dumps(each).encode() for each in records))
    results = answers(await service_client.post(V3, body, content_encoding="gzip"))
    assert [each["value"]["size"] for each in results] == [70_000, 1]
    v2 = gzip.compress(json.dumps({"records": [{"value": 1}]}).encode())
    assert (await service_client.post("/topics/orders", v2, JSON_V2, content_encoding="gzip")).status_code == 200
    assert_error(await service_client.post("/topics/orders", v2[:9], JSON_V2, content_encoding="gzip"), 400, 400)
    assert_error(await service_client.post("/topics/orders", v2, JSON_V2, content_encoding="br"), 415, 415)


async def streamed(*texts: bytes) -> AsyncIterator[bytes]:
    for text in texts:
        yield text


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_long_v3_body_or_one_of_unknown_length_is_streamed(service_client: ServiceClient, size: int) -> None:
    records = [string("a" * 100), {"value": {"type": "BINARY", "data": 1}}, string("x" * 70_000), string("é")]
    body = "\n".join(json.dumps(each, ensure_ascii=False) for each in records).encode()
    parts = [body[start : start + size] for start in range(0, len(body), size)] if size > 1 else [body]
    headers = {"content-type": "application/json", "idempotency-key": "q"}
    first = await service_client.client.post(V3, content=body, headers=headers)
    again = await service_client.client.post(V3, content=streamed(*parts), headers=headers)
    assert (first.status_code, first.headers["idempotency-key"]) == (200, "q")
    assert again.content == first.content
    results = answers(first)
    assert [each.get("value", {}).get("size") for each in results] == [100, None, 70_000, 2]
    assert set(service_client.world.keys.server.keys) == {member_id("q", index) for index in (0, 2, 3)}


async def test_a_stream_without_a_key_is_told_the_key_before_its_records_are_written(
    service_client: ServiceClient,
) -> None:
    record = json.dumps(string("a")).encode()
    first = await service_client.client.post(
        V3, content=streamed(record, b"\n", record), headers={"content-type": JSON}
    )
    made = first.headers["idempotency-key"]
    assert uuid.UUID(made).version == 7
    headers = {"content-type": JSON, "idempotency-key": made}
    assert (
        await service_client.client.post(V3, content=streamed(record + record), headers=headers)
    ).content == first.content
    assert len(service_client.written) == 2


@pytest.mark.parametrize(
    ("key_age_ms", "own_key", "last"),
    [(None, False, 200), (0, False, 200), (DAY_MS - 1, False, 200), (DAY_MS, False, 412), (0, True, 412)],
    ids=["made by the service", "of the client", "old soon", "old at the beginning", "of the record"],
)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_key_that_becomes_old_during_its_request_is_good_for_it(
    service_client: ServiceClient, key_age_ms: int | None, own_key: bool, last: int, is_streamed: bool
) -> None:
    """A stream may last for days. A record's own key is as old as it is when the record comes."""
    now_ms = NOW_MS
    service_client.world.clock.read = lambda: now_ms
    record = string("a")
    if own_key:
        record["headers"] = [{"name": "idempotency-key", "value": base64.b64encode(new_key(NOW_MS).encode()).decode()}]
    text = json.dumps(record).encode()

    async def days() -> AsyncIterator[bytes]:
        nonlocal now_ms
        for _ in range(3):
            now_ms += DAY_MS
            yield text

    headers = {"content-type": JSON}
    if key_age_ms is not None:
        headers["idempotency-key"] = new_key(NOW_MS - key_age_ms)
    if not is_streamed:
        now_ms += DAY_MS if own_key else 0
    response = await service_client.client.post(V3, content=days() if is_streamed else text, headers=headers)
    results = answers(response)
    assert len(results) == (3 if is_streamed else 1)
    assert results[-1]["error_code"] == last


async def test_a_stream_refuses_records_without_a_key_where_the_rule_says_so(service_client: ServiceClient) -> None:
    own = {"name": "idempotency-key", "value": base64.b64encode(b"own").decode()}
    texts = [json.dumps(each).encode() for each in (string("a"), {**string("b"), "headers": [own]})]
    path = V3.replace("orders", "other")
    response = await service_client.client.post(path, content=streamed(*texts), headers={"content-type": JSON})
    assert [each["error_code"] for each in answers(response)] == [40001, 200]
    assert "idempotency-key" not in response.headers


async def test_a_stream_is_refused_in_the_api_s_form(service_client: ServiceClient) -> None:
    for path, type, key, status, error_code in (
        (V3, "text/plain", "q", 415, 415),
        (V3, JSON, "é", 400, 40001),
        (V3, JSON, "q", 400, 400),
    ):
        headers = {b"content-type": type.encode(), b"idempotency-key": key.encode()}
        response = await service_client.client.post(path, content=streamed(b" "), headers=headers)
        assert_error(response, status, error_code)
        assert response.headers["content-type"] == JSON
    record = json.dumps(string("a")).encode()
    response = await service_client.client.post(
        V3, content=streamed(record, b"?", record), headers={"content-type": JSON}
    )
    assert [each["error_code"] for each in answers(response)] == [200, 400]


async def test_a_record_of_a_stream_is_answered_before_the_next_one_is_sent() -> None:
    """As a client needs it that sends a record when something happens: both directions stay open."""
    world = World()
    serving = world.serve(await world.slot())
    coming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    headers = [(b"host", b"x"), (b"content-type", JSON.encode()), (b"transfer-encoding", b"chunked")]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": V3,
        "client": None,
        "headers": headers,
        "query_string": b"",
    }
    posting = asyncio.create_task(app_of(world)(scope, coming.get, sent.put))
    for n in range(3):
        coming.put_nowait({"type": "http.request", "body": json.dumps(string(f"{n}")).encode(), "more_body": True})
        async with asyncio.timeout(5.0):
            message = await sent.get()
            if n == 0:
                assert (message["type"], message["status"]) == ("http.response.start", 200)
                message = await sent.get()
        assert json.loads(message["body"])["offset"] == 12 + 2 * n + n
    coming.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    await posting
    assert sent.get_nowait() == {"type": "http.response.body", "body": b"", "more_body": False}
    await ended(serving)


async def test_a_v2_record_has_the_bounds_of_an_event_s_json(service_client: ServiceClient) -> None:
    """A long record is checked in a thread: the event loop must not decode hundreds of thousands of headers."""
    padded = b'{"records":[{"value":1%b},{"value":2}]}' % (b" " * 2_000_000)
    offsets = (await service_client.post("/topics/orders", padded, JSON_V2)).json()["offsets"]
    assert [each["error_code"] for each in offsets] == [1, None]
    assert "at most 2000000 are taken" in offsets[0]["error"]
    headers = b",".join([b'{"key":""}'] * 20_000)
    response = await service_client.post(
        "/topics/orders", b'{"records":[{"value":1,"headers":[%b]}]}' % headers, JSON_V2
    )
    assert "at most 100" in assert_error(response, 400, 400)
    assert [value for _, _, value in service_client.written] == [b"2"]


async def test_a_cluster_s_id_which_each_answer_repeats_has_a_bound(service_client: ServiceClient) -> None:
    """Else a request of 64 KiB with a long path would be answered with a hundred megabytes."""
    record = json.dumps(string("a")).encode()
    for body in (record, streamed(record)):
        response = await service_client.client.post(
            V3.replace("c1", "c" * 256), content=body, headers={"content-type": JSON}
        )
        assert "cluster: at most 255" in assert_error(response, 404, 404)
        response = await service_client.client.post(
            V3.replace("c1", "c" * 255), content=body, headers={"content-type": JSON}
        )
        assert [each["error_code"] for each in answers(response)] == [200]


def test_a_made_key_is_a_uuid_of_the_time() -> None:
    """RFC 9562, section 5.7."""
    made = [uuid.UUID(new_key(1_700_000_000_123)) for _ in range(100)]
    assert {(each.version, each.variant, each.int >> 80) for each in made} == {(7, uuid.RFC_4122, 1_700_000_000_123)}
    assert len(set(made)) == 100
