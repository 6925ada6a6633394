"""Tests events, batches and produce requests with schemas of a registry on the app, with Kafka and Redis in memory."""

import base64
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from service.contract import RegistryRule, Rules, SchemaRule, TopicRule
from service.contract.source_rules import KeyLocation, SourceRule
from service.contract.wire.ids import event_id, fingerprint
from service.events.deliveries import Source
from service.http.asgi import AsgiEndpoint
from service.http.callers import Callers
from service.http.events import EventsEndpoint
from service.http.produce import ProduceRequests
from service.http.request_guard import RequestGuard
from service.http.sources import SourcesEndpoint
from service.kafka.topic_admin import Topic
from service.registry import client
from service.registry.schema import Schema, SchemaType
from tests.contract.fake_registry import FakeRegistry
from tests.unit.fakes import World, ended
from tests.unit.http.apps import produce_routes

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "total", "type": "long"}, {"name": "note", "type": ["null", "string"], "default": None}],
}
RULES = (
    TopicRule("orders", registry=RegistryRule(SchemaRule(subject="key"), SchemaRule())),
    TopicRule("third", registry=RegistryRule(value=SchemaRule(subject="orders-value")), quarantine="other"),
    TopicRule("kept", registry=RegistryRule(value=SchemaRule(subject="none")), quarantine="other"),
)
V3 = "/v3/clusters/c1/topics/{topic}/records"
AVRO_V2 = "application/vnd.kafka.avro.v2+json"
JSON = "application/json"


class ServiceClient:
    """A client of a service that is in memory, and the service's registry."""

    def __init__(self, world: World, registry: FakeRegistry, http: httpx.AsyncClient) -> None:
        self.world = world
        self.registry = registry
        self.http = http

    async def put(self, subject: str, schema: object) -> int:
        assert self.world.client is not None
        text = json.dumps(schema)
        return (await self.world.client.registered(subject, Schema(SchemaType.AVRO, text), register=True)).id

    async def post(self, path: str, *bodies: object, type: str = JSON, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        content = b"\n".join(json.dumps(body).encode() for body in bodies)
        return await self.http.post(path, content=content, headers={"content-type": type, **named})

    async def event(self, value: object, key: str = "k", **fields: object) -> httpx.Response:
        return await self.post("/events", {"topic": "orders", "value": value, **fields}, idempotency_key=key)

    async def v2(self, *records: object, topic: str = "orders", key: str = "q", **fields: object) -> httpx.Response:
        return await self.post(f"/topics/{topic}", {"records": records, **fields}, type=AVRO_V2, idempotency_key=key)

    async def v3(self, *records: object, topic: str = "other", key: str = "q") -> list[dict[str, Any]]:
        response = await self.post(V3.format(topic=topic), *records, idempotency_key=key)
        return [json.loads(line) for line in response.text.splitlines()]

    @property
    def written(self) -> list[tuple[bytes | None, bytes | None]]:
        """List the keys and values of the records in Kafka."""
        return [(each.key, each.value) for group in self.world.producers[0].written for each in group]


class WithRegistry(World):
    """A world whose topic `orders` has schemas."""

    def __init__(self, url: str) -> None:
        self.registry = url
        super().__init__(*RULES)


def app_of(world: World) -> FastAPI:
    app = FastAPI()
    rules = Rules(RULES)
    posts = EventsEndpoint(
        RequestGuard(world.settings, Callers(())), world.admission, world.telemetry, world.settings.key_ttl_s
    )
    for path, handler in posts.routes.items():
        endpoint = AsgiEndpoint(handler, posts.guard.body_bytes_max, posts.guard.bodies)
        app.router.routes.append(Route(path.decode(), endpoint, methods=["POST"]))
    produce = ProduceRequests(
        posts.guard, posts.admission, posts.telemetry, rules, world.settings.key_ttl_s, has_registry=True
    )
    app.router.routes += produce_routes(produce)
    rule = SourceRule("hooks", KeyLocation.HEADER, "x-id", None, topic="orders")
    sources = SourcesEndpoint(
        [Source(rule, None)], world.admission, world.settings, posts.guard.bodies, world.telemetry
    )
    app.router.routes.append(sources.route())
    return app


@pytest.fixture(autouse=True)
def _asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the service ask for the latest version each time."""
    monkeypatch.setattr(client, "FRESH_S", 0.0)
    monkeypatch.setattr(client, "STALE_S", 0.0)


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as fake:
        yield fake


@pytest.fixture
async def service_client(registry: FakeRegistry) -> AsyncIterator[ServiceClient]:
    world = WithRegistry(registry.url)
    serving = world.serve(await world.slot())
    transport = httpx.ASGITransport(app_of(world), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        service_client = ServiceClient(world, registry, http)
        await service_client.put("key", "string")
        await service_client.put("orders-value", ORDER)
        yield service_client
    await ended(serving)
    assert world.client is not None
    await world.client.close()


KEY = b"\0\0\0\0\1\x02c"


def order(total: int, id: int = 2, note: bytes = b"\0") -> bytes:
    return b"\0\0\0\0" + bytes([id, 2 * total]) + note


def problem(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()
    return response.status_code, body["code"], body["detail"]


async def test_each_way_into_a_topic_of_the_rules_is_encoded(service_client: ServiceClient) -> None:
    events = [{"topic": "orders", "value": {"total": n}, "idempotency_key": f"b-{n}"} for n in (2, 3)]
    cloudevent = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "s", "ce-type": "orders", "ce-partitionkey": "c"}
    responses = [
        await service_client.post(
            "/events", {"topic": "orders", "key": "c", "value": {"total": 1}}, idempotency_key="e"
        ),
        await service_client.post("/events/batch", {"events": events}),
        await service_client.post(
            "/events/batch",
            {"atomic": True, "events": [{"topic": "orders", "value": {"total": 4}}]},
            idempotency_key="whole",
        ),
        await service_client.post("/events", {"total": 5}, **cloudevent),
        await service_client.post("/sources/hooks", {"total": 6}, x_id="delivery"),
        await service_client.post(
            "/topics/orders",
            {"records": [{"key": "c", "value": {"total": 7}}]},
            type="application/vnd.kafka.json.v2+json",
        ),
    ]
    (v3,) = await service_client.v3({"value": {"type": "JSON", "data": {"total": 8}}}, topic="orders")
    assert [response.status_code for response in responses] == [201, 207, 201, 201, 201, 200]
    assert v3["value"] == {"type": "AVRO", "size": 7, "subject": "orders-value", "schema_id": 2, "schema_version": 1}
    assert service_client.written == [
        (KEY, order(1)),
        (None, order(2)),
        (None, order(3)),
        (None, order(4)),
        (KEY, order(5)),
        (None, order(6)),
        (KEY, order(7)),
        (None, order(8)),
    ]


async def test_the_header_of_a_record_has_the_fingerprint_of_what_is_written(service_client: ServiceClient) -> None:
    await service_client.event({"total": 1})
    ((record,),) = service_client.world.producers[0].written
    stamp = dict(record.headers)["fencepost"].split(b";")
    assert stamp[2] == fingerprint("orders", None, None, [], record.value).hex().encode()
    sent = fingerprint("orders", None, None, [], b'{"total": 1}')
    (_, rows), *_ = service_client.world.keys.marks
    assert [(id, state.fp) for id, state in rows] == [(event_id("k"), sent)]


async def test_a_retry_under_a_newer_latest_version_is_the_same_request(service_client: ServiceClient) -> None:
    first = await service_client.event({"total": 1})
    newer = {**ORDER, "fields": [*ORDER["fields"], {"name": "more", "type": "long", "default": 3}]}
    await service_client.put("orders-value", newer)
    again = await service_client.event({"total": 1})
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["idempotent-replayed"] == "true"
    other = await service_client.event({"total": 2})
    assert problem(other)[:2] == (422, "fingerprint-mismatch")
    assert (await service_client.event({"total": 1}, key="new")).status_code == 201
    assert service_client.written == [(None, order(1)), (None, order(1, 3) + b"\x06")]


async def test_a_retry_that_the_newest_version_refuses_has_the_answer_of_its_event(
    service_client: ServiceClient,
) -> None:
    """Another event that it refuses is 422, and so is another value under the key."""
    first = await service_client.event({"total": 1})
    batch = {"atomic": True, "events": [{"topic": "orders", "value": {"total": n}} for n in (2, 3)]}
    whole = await service_client.post("/events/batch", batch, idempotency_key="whole")
    await service_client.post("/sources/hooks", {"total": 4}, x_id="delivery")
    v2 = await service_client.v2({"value": {"total": 5}}, value_schema_id=2)
    assert [first.status_code, whole.status_code, v2.status_code] == [201, 201, 200]
    await service_client.put("orders-value", "string")
    again = await service_client.event({"total": 1})
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (201, first.content, "true")
    again = await service_client.post("/events/batch", batch, idempotency_key="whole")
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (201, whole.content, "true")
    again = await service_client.post("/sources/hooks", {"total": 4}, x_id="delivery")
    assert (again.status_code, again.headers["idempotent-replayed"]) == (201, "true")
    each = {"topic": "orders", "value": {"total": 1}, "idempotency_key": "k"}
    batch = {"events": [each | {"idempotency_key": "none"}, each, {**each, "value": "fits", "idempotency_key": "new"}]}
    results = (await service_client.post("/events/batch", batch)).json()["results"]
    assert [(each["status"], each.get("replayed")) for each in results] == [(422, None), (201, True), (201, False)]
    for key, value in (("none", {"total": 1}), ("k", {"total": 9})):
        assert problem(await service_client.event(value, key=key))[:2] == (422, "schema-mismatch")


async def test_a_retry_whose_newest_record_is_too_large_has_the_answer_of_its_event(
    service_client: ServiceClient,
) -> None:
    """The default of a field that a newer version adds makes each record larger than its topic takes."""
    service_client.world.topic_admin.topics["orders"] = Topic("orders", 3, {"max.message.bytes": "2000"})
    first = await service_client.event({"total": 1})
    batch = {"atomic": True, "events": [{"topic": "orders", "value": {"total": n}} for n in (2, 3)]}
    whole = await service_client.post("/events/batch", batch, idempotency_key="whole")
    assert [first.status_code, whole.status_code] == [201, 201]
    padded = {"name": "more", "type": "string", "default": "x" * 3000}
    await service_client.put("orders-value", {**ORDER, "fields": [*ORDER["fields"], padded]})
    again = await service_client.event({"total": 1})
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (201, first.content, "true")
    again = await service_client.post("/events/batch", batch, idempotency_key="whole")
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (201, whole.content, "true")
    for key, value in (("none", {"total": 1}), ("k", {"total": 9})):
        assert problem(await service_client.event(value, key=key))[:2] == (413, "too-large")


async def test_refusals_use_up_no_key(service_client: ServiceClient) -> None:
    assert problem(await service_client.event({"total": "1"})) == (
        422,
        "schema-mismatch",
        "value.total: an integer is wanted (long): see schema 2 (version 1 of orders-value)",
    )
    whole = {"atomic": True, "events": [{"topic": "orders", "value": {"total": n}} for n in (1, "2")]}
    refused = await service_client.post("/events/batch", whole, idempotency_key="k")
    assert problem(refused)[2].startswith("events[1].value.total: an integer is wanted")
    assert (await service_client.event({"total": 1})).status_code == 201


async def test_a_registry_that_is_away_is_not_written(service_client: ServiceClient) -> None:
    service_client.registry.status = 503
    response = await service_client.event({"total": 1})
    status, code, detail = problem(response)
    assert (status, code, response.headers["retry-after"]) == (503, "not-written", "1")
    assert detail.startswith("value: the schema registry is away")
    (v3,) = await service_client.v3({"value": {"schema_version": 1, "data": 1}})
    assert (v3["error_code"], v3["message"].startswith("value: the schema registry is away")) == (50003, True)
    v2 = await service_client.v2({"value": 1}, topic="other", value_schema='"long"')
    assert (v2.status_code, v2.json()["error_code"]) == (503, 50003)
    assert service_client.written == []


async def test_nothing_is_looked_up_for_a_topic_that_does_not_exist(service_client: ServiceClient) -> None:
    service_client.registry.requests.clear()
    v2 = await service_client.v2({"value": 1}, topic="nowhere", value_schema='"long"')
    assert (v2.status_code, v2.json()["error_code"], service_client.registry.requests) == (404, 40401, [])


async def test_what_a_schema_refuses_goes_to_the_quarantine_topic_as_it_was_sent(service_client: ServiceClient) -> None:
    first = await service_client.event({"total": 1}, topic="third")
    refused = await service_client.event({"total": "a"}, key="bad", topic="third")
    unknown = await service_client.event({"total": 2}, key="unknown", topic="kept")
    assert [(each.status_code, each.json().get("code")) for each in (first, refused, unknown)] == [
        (201, None),
        (422, "schema-mismatch"),
        (422, "unknown-schema"),
    ]
    assert refused.json()["quarantined"] is unknown.json()["quarantined"] is True
    assert service_client.written == [(None, order(1)), (None, b'{"total": "a"}'), (None, b'{"total": 2}')]
    await service_client.put("orders-value", "string")
    again = [
        await service_client.event({"total": 1}, topic="third"),
        await service_client.event({"total": "a"}, key="bad", topic="third"),
    ]
    assert [each.content for each in again] == [first.content, refused.content]
    assert all(each.headers["idempotent-replayed"] == "true" for each in again)
    assert len(service_client.written) == 3


# ------------------------------------------------------------------------------------------------ v2 and v3 formats


async def test_v2_answers_with_the_ids_of_its_schemas(service_client: ServiceClient) -> None:
    value = await service_client.put("other-value", "long")
    response = await service_client.v2(
        {"key": 7, "value": 1}, {"value": 2}, topic="other", key_schema='"long"', value_schema_id=value
    )
    answer = response.json()
    assert (answer["key_schema_id"], answer["value_schema_id"]) == (value, value)
    assert service_client.written == [(b"\0\0\0\0\3\x0e", b"\0\0\0\0\3\x02"), (None, b"\0\0\0\0\3\x04")]
    response = await service_client.v2({"value": 3}, topic="other", key="r", value_schema='"long"')
    answer = response.json()
    assert (answer["key_schema_id"], answer["value_schema_id"]) == (None, value)


@pytest.mark.parametrize(
    ("records", "fields", "code"),
    [
        ([{"key": 1, "value": 1}], {"value_schema": '"long"'}, 42201),
        ([{"value": 1}], {}, 42202),
        ([{"value": 1}], {"value_schema": "{"}, 42205),
        ([{"value": 1}], {"value_schema": 1}, 42205),
        ([{"value": 1}], {"value_schema": ""}, 42205),
        ([{"value": 1}], {"value_schema_id": "x"}, 42205),
        ([{"value": 1}], {"value_schema_id": 0}, 42205),
        ([{"value": 1}], {"value_schema_id": 1, "value_schema": '"long"'}, 42205),
        ([{"value": 1}], {"value_schema_id": 77}, 42207),
        ([{"value": "a"}], {"value_schema": '"long"'}, 42207),
    ],
)
async def test_v2_errors(
    service_client: ServiceClient, records: list[object], fields: dict[str, Any], code: int
) -> None:
    response = await service_client.v2(*records, topic="other", **fields)
    assert (response.status_code, response.json()["error_code"]) == (422, code)
    assert service_client.written == []


async def test_v3_records_name_schemas_in_each_way(service_client: ServiceClient) -> None:
    long = await service_client.put("other-value", "long")
    mine = await service_client.put("mine", "string")
    text = {"type": "AVRO", "schema": '{"type":"fixed","name":"n.F","size":1}', "data": "a"}
    answers = await service_client.v3(
        {"value": {"data": 1}},
        {"value": {"schema_id": long, "data": 2}},
        {"value": {"schema_version": 1, "data": 3}},
        {"value": {"subject": "mine", "data": "a"}},
        {"key": {"subject": "mine", "schema_id": mine, "data": "b"}, "value": {"type": "BINARY", "data": "AA=="}},
        {"value": {**text, "subject_name_strategy": "RECORD_NAME"}},
        {"value": {**text, "subject_name_strategy": "TOPIC_RECORD_NAME"}},
    )
    assert [answer["error_code"] for answer in answers] == [200] * 7, answers
    schemas = [(each["value"].get("subject"), each["value"].get("schema_id")) for each in answers]
    fixed = schemas[5][1]
    assert schemas == [
        ("other-value", long),
        ("other-value", long),
        ("other-value", long),
        ("mine", mine),
        (None, None),
        ("n.F", fixed),
        ("other-n.F", fixed),
    ]
    assert answers[0]["value"] == {
        "type": "AVRO",
        "size": 6,
        "subject": "other-value",
        "schema_id": long,
        "schema_version": 1,
    }
    assert answers[4]["key"] == {"type": "AVRO", "size": 7, "subject": "mine", "schema_id": mine, "schema_version": 1}
    assert service_client.written[4] == (b"\0\0\0\0" + bytes([mine]) + b"\x02b", b"\0")


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ({"schema_id": 1, "schema_version": 1, "data": 1}, 400),
        ({"subject": "a", "subject_name_strategy": "TOPIC_NAME", "data": 1}, 400),
        ({"subject": "", "data": 1}, 400),
        ({"subject_name_strategy": "OTHER", "data": 1}, 400),
        ({"type": "AVRO", "data": 1}, 400),
        ({"schema": '"long"', "data": 1}, 400),
        ({"type": "AVRO", "schema_id": 1, "data": 1}, 400),
        ({"type": "JSON", "schema_id": 1, "data": 1}, 400),
        ({"schema_id": 0, "data": 1}, 400),
        ({"schema_version": "x", "data": 1}, 400),
        ({"schema_version": "99999999999", "data": 1}, 400),
        ({"type": "AVRO", "schema": "", "data": 1}, 422),
        ({"schema_version": "latest", "data": 1}, 422),
        ({"schema_id": 77, "data": 1}, 422),
    ],
)
async def test_v3_errors(service_client: ServiceClient, value: dict[str, object], status: int) -> None:
    (answer,) = await service_client.v3({"value": value})
    assert answer["error_code"] == status, answer
    assert service_client.written == []


async def test_a_replay_of_a_schema_form_is_the_same_answer(service_client: ServiceClient) -> None:
    """Also with the id in place of the text: the schema is no part of the fingerprint."""
    first = await service_client.v2({"value": 1}, topic="other", value_schema='"long"')
    id = first.json()["value_schema_id"]
    again = await service_client.v2({"value": 1}, topic="other", value_schema_id=id)
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (200, first.content, "true")
    own = [{"name": "idempotency-key", "value": base64.b64encode(b"mine").decode()}]
    record = {"headers": own, "value": {"schema_version": 1, "data": 1}}
    answers = [await service_client.v3(record, key=key) for key in ("a", "b")]
    assert answers[0] == answers[1]
    assert len(service_client.written) == 2
