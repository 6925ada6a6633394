"""Tests quarantine over the app, with the pipeline in memory: what is refused is written once, and stays refused."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from service.claims.keys import Found
from service.claims.states import Delivered
from service.contract import Rules, TopicRule
from service.contract.wire.ids import event_id
from service.core.metrics import Telemetry
from service.core.problems import RECORD_REFUSED
from service.events.deliveries import Source, read_sources
from service.http.produce import ProduceRequests
from service.http.request import Bodies
from service.http.routes import describe
from service.http.sources import SourcesEndpoint
from service.kafka.outcomes import RecordError, TransactionFailed, TransactionOutcome
from service.kafka.records import Record
from service.kafka.topic_admin import Topic
from tests.unit.fakes import NOW_MS, World, count_of, ended, until
from tests.unit.http.apps import produce_routes
from tests.unit.http.test_asgi import app_and_posts
from tests.unit.http.test_events import Commits
from tests.unit.scrape import sample

SCHEMA = '{"type": "object", "required": ["total"]}'
SOURCES = """\
[[sources]]
name = "shop"
topic_pointer = "/type"
topics = { a = "ordered", b = "other", c = "compacted" }
idempotency_key = { pointer = "/id" }
signature = "none"
key_ttl_s = 1000
quarantine = "letters"

[[sources]]
name = "plain"
topic = "ordered"
idempotency_key = { header = "X-Id" }
signature = "none"

[[sources]]
name = "signed"
topic = "other"
idempotency_key = { header = "webhook-id" }
signature = { scheme = "stripe", secret_files = ["secret"], tolerance_s = 600000 }
key_ttl_s = 2000
"""
BAD, GOOD = {"sum": 1}, {"total": 1}


class Client:
    """A client of the app, whose events a slot in memory writes."""

    def __init__(self, world: World, http: httpx.AsyncClient, telemetry: Telemetry) -> None:
        self.world = world
        self.http = http
        self.telemetry = telemetry

    async def event(self, value: Any, key: str = "k", topic: str = "ordered", **more: Any) -> httpx.Response:
        body = {"topic": topic, "value": value, **more}
        return await self.http.post("/events", json=body, headers={"idempotency-key": key})

    async def deliver(self, source: str, body: bytes | Mapping[str, Any], **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {header.replace("_", "-"): text for header, text in headers.items()}
        return await self.http.post(f"/sources/{source}", content=content, headers=named)

    @property
    def written(self) -> list[Record]:
        return [record for group in self.world.producers[0].written for record in group]

    def outcomes(self, source: str) -> dict[str, float]:
        found = {name: count_of(counter) for name, counter in self.telemetry.of_source(source).items()}
        return {name: count for name, count in found.items() if count}


@asynccontextmanager
async def connected(world: World, sources: tuple[Source, ...]) -> AsyncIterator[Client]:
    """Make an app and its client; a slot of the world must be served elsewhere."""
    app, posts = app_and_posts(cast(Commits, world.admission))
    app.router.routes += produce_routes(
        ProduceRequests(posts.guard, posts.admission, posts.telemetry, world.rules, 86_400)
    )
    telemetry = Telemetry()
    app.router.routes.append(
        SourcesEndpoint(sources, world.admission, world.settings, Bodies(2**24), telemetry).route()
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        yield Client(world, http, telemetry)


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "order.json"
    path.write_text(SCHEMA)
    return path


@pytest.fixture
def settings() -> dict[str, int]:
    """The settings of the world; a test may have others."""
    return {}


@pytest.fixture
def world(schema: Path, settings: dict[str, int]) -> World:
    made = World(
        TopicRule("ordered", schema=str(schema), quarantine="letters", key_ttl_s=500),
        TopicRule("strict", schema=str(schema)),
        TopicRule("plain.b", schema=str(schema), quarantine="letters"),
        **settings,
    )
    made.topic_admin.topics |= {name: Topic(name, 3, {}) for name in ("ordered", "strict")}
    made.topic_admin.topics["compacted"] = Topic("compacted", 3, {"cleanup.policy": "compact"})
    return made


@pytest.fixture
async def client(world: World, tmp_path: Path) -> AsyncIterator[Client]:
    (tmp_path / "secret").write_text("s3cret")
    task = world.serve(await world.slot())
    async with connected(world, read_sources(Rules.parse(SOURCES, str(tmp_path / "rules.toml")))) as client:
        yield client
    task.cancel()
    await asyncio.wait([task])


def change(client: Client, schema: Path, text: str) -> None:
    """Change the schema as a restart of the process does."""
    schema.write_text(text)
    client.world.schemas.__init__(client.world.rules)  # type: ignore[misc]


async def test_an_event_that_its_schema_refuses_is_written_once_and_stays_refused(client: Client) -> None:
    first = await client.event(BAD, key="k", headers={"a": "b"}, partition=2, timestamp=5)
    problem = first.json()
    letter = client.world.keys.server.keys[event_id("k")]
    assert isinstance(letter, Delivered)
    assert first.status_code == 422
    assert first.headers["content-type"] == "application/problem+json"
    assert problem == {
        "type": "/problems/schema-mismatch",
        "title": "The value is not what the topic's schema allows",
        "status": 422,
        "detail": 'value: "total" is a required property: see the schema of ordered',
        "code": "schema-mismatch",
        "quarantined": True,
        "id": event_id("k").hex(),
        "topic": "letters",
        "partition": letter.partition,
        "offset": letter.offset,
        "timestamp": letter.ts,
    }
    assert (first.headers["idempotency-key"], "idempotent-replayed" in first.headers) == ("k", False)
    assert "retry-after" not in first.headers
    again = await client.event(BAD, key="k", headers={"a": "b"}, partition=2, timestamp=5)
    assert (again.status_code, again.content) == (422, first.content)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["idempotency-key-expires"] == first.headers["idempotency-key-expires"]
    (record,) = client.written
    assert (record.topic, record.value, record.timestamp > 5) == ("letters", b'{"sum":1}', True)
    headers = dict(record.headers)
    assert (headers["idempotency-key"], headers["a"]) == (b"k", b"b")
    assert headers["fencepost"].split(b";")[1].decode() == event_id("k").hex()
    assert {name: content for name, content in record.headers if name.startswith("fencepost-")} == {
        "fencepost-topic": b"ordered",
        "fencepost-partition": b"2",
        "fencepost-timestamp": b"5",
        "fencepost-code": b"schema-mismatch",
        "fencepost-detail": problem["detail"].encode(),
        "fencepost-caller": b"",
    }
    assert client.world.journal.answers == [("k", 422), ("k", 422)]
    assert sample(client.world.telemetry, "fencepost_replays_total") == 1
    assert letter.ttl_s == 500, "the retention is that of the topic that was asked for"


async def test_a_corrected_event_needs_a_new_key(client: Client) -> None:
    await client.event(BAD)
    corrected = await client.event(GOOD)
    assert corrected.json()["code"] == "fingerprint-mismatch"
    assert corrected.json()["detail"] == (
        "Idempotency-Key: its event was refused, and is in the quarantine topic letters: use a new key for the "
        "corrected event"
    )
    assert (await client.event(GOOD, key="new")).status_code == 201


async def test_a_retry_after_the_schema_was_mended_is_still_refused(client: Client, schema: Path) -> None:
    """Its dead letter may have been dealt with: were the event written now, it would be there twice."""
    first = await client.event(BAD)
    change(client, schema, "{}")
    again = await client.event(BAD)
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (422, first.content, "true")
    assert (await client.event(BAD, key="new")).status_code == 201


async def test_a_retry_of_a_written_event_is_answered_201_after_the_schema_has_become_stricter(
    client: Client, schema: Path
) -> None:
    first = await client.event(GOOD)
    change(client, schema, '{"type": "object", "required": ["total", "currency"]}')
    again = await client.event(GOOD)
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (201, first.content, "true")
    assert len(client.written) == 1


async def test_without_a_quarantine_topic_a_refusal_uses_up_no_key(client: Client) -> None:
    refused = await client.event(BAD, topic="strict")
    assert (refused.status_code, "quarantined" in refused.json()) == (422, False)
    assert "idempotency-key-expires" not in refused.headers
    assert (await client.event(GOOD, topic="strict")).status_code == 201


async def test_a_topic_with_the_lesser_guarantee_has_exact_dead_letters(client: Client) -> None:
    first = await client.event(BAD, topic="plain.b")
    assert first.json()["quarantined"] is True
    assert [record.topic for record in client.written] == ["letters"]
    assert (await client.event(BAD, topic="plain.b")).content == first.content


@pytest.mark.parametrize("why", ["missing", "compacted", "small", "forbidden"])
async def test_a_dead_letter_that_cannot_be_written_is_answered_503(client: Client, why: str) -> None:
    """The event must not be lost: its sender is to send it again."""
    assert (await client.event(GOOD, key="before")).status_code == 201
    topics = client.world.topic_admin.topics
    there = topics.pop("letters")
    settings: dict[str, dict[str, str]] = {
        "compacted": {"cleanup.policy": "compact"},
        "small": {"max.message.bytes": "300"},
    }
    if why in settings:
        topics["letters"] = Topic("letters", 3, settings[why])
    client.world.topic_admin.forbids = why == "forbidden"
    refused = await client.event(BAD)
    assert (refused.status_code, refused.json()["code"]) == (503, "not-written")
    assert refused.json()["detail"].startswith("quarantine: ")
    assert refused.headers["retry-after"] == "1"
    assert event_id("k") not in client.world.keys.server.keys
    client.world.topic_admin.forbids = False
    topics["letters"] = there
    client.world.topic_metadata.invalidate("letters")
    assert (await client.event(BAD)).json().get("quarantined")


@pytest.mark.parametrize("settings", [{"request_timeout_ms": 300}])
async def test_a_dead_letter_of_which_nothing_is_known_is_answered_504(client: Client) -> None:
    client.world.producers[0].trouble.hold("commit")
    sweep = asyncio.create_task(client.world.resolver.sweep())
    answer = await client.event(BAD)
    sweep.cancel()
    assert (answer.status_code, answer.json()["code"]) == (504, "outcome-unknown")
    client.world.producers[0].trouble.gates.pop("commit").set()
    await until(lambda: client.world.keys.is_delivered("k"))
    assert (await client.event(BAD)).headers["idempotent-replayed"] == "true"


async def test_the_client_of_a_dead_letter_waits_for_its_answer(client: Client) -> None:
    body: dict[str, Any] = {"topic": "ordered", "value": BAD}
    headers = {"idempotency-key": "k", "prefer": "respond-async"}
    assert (await client.http.post("/events", json=body, headers=headers)).status_code == 422


async def test_refused_events_of_a_batch_are_quarantined_together(client: Client) -> None:
    values = [GOOD, BAD, GOOD, BAD]
    events: list[dict[str, Any]] = [
        {"topic": "ordered", "value": value, "idempotency_key": f"k{n}"} for n, value in enumerate(values)
    ]
    events.append({"topic": "letters", "value": 1, "idempotency_key": "own"})
    answers = [(await client.http.post("/events/batch", json={"events": events})).json()["results"] for _ in range(2)]
    statuses = [result["status"] for result in answers[0]]
    assert statuses == [201, 422, 201, 422, 201]
    letters = [result["problem"] for result in answers[0] if result["status"] == 422]
    assert [letter["topic"] for letter in letters] == ["letters"] * 2
    assert [result["replayed"] for each in answers for result in each] == [False] * 5 + [True] * 5
    assert [{**result, "replayed": False} for result in answers[1]] == answers[0]
    groups = [[record.topic for record in group] for group in client.world.producers[0].written]
    assert sorted(groups) == [["letters"], ["letters", "letters"], ["ordered", "ordered"]]
    states = [client.world.keys.server.keys[event_id(key)] for key in ("k0", "k1", "own")]
    assert [(state.ttl_s, bool(state.refused)) for state in states if isinstance(state, Delivered)] == [
        (500, False),
        (500, True),
        (0, False),
    ]
    lines = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events)
    streamed = await client.http.post("/events/batch", content=lines, headers={"content-type": "application/x-ndjson"})
    keyed = [{**result, "idempotency_key": f"k{n}"} for n, result in enumerate(answers[1][:4])]
    keyed.append({**answers[1][4], "idempotency_key": "own"})
    assert [json.loads(line) for line in streamed.text.splitlines()] == keyed


async def test_an_atomic_batch_with_a_refused_event_is_refused_as_a_whole(client: Client) -> None:
    body = {"atomic": True, "events": [{"topic": "ordered", "value": value} for value in (GOOD, BAD)]}
    refused = await client.http.post("/events/batch", json=body, headers={"idempotency-key": "k"})
    assert (refused.status_code, "quarantined" in refused.json()) == (422, False)
    assert client.written == []


async def test_a_long_value_and_a_cloudevent_are_quarantined_too(client: Client) -> None:
    long = await client.event({"sum": "x" * 100_000})
    assert (long.json()["quarantined"], long.json()["topic"]) == (True, "letters")
    headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "ordered"}
    cloud = await client.http.post("/events", content=b"{}", headers=headers | {"content-type": "application/json"})
    assert cloud.json()["quarantined"] is True
    assert dict(client.written[1].headers)["ce_id"] == b"1"


async def test_a_record_of_the_produce_api_is_quarantined(client: Client) -> None:
    """Each record by itself, and the answer says where; its codes are those of a refusal."""

    async def twice(key: str, *values: Any) -> list[httpx.Response]:
        body = json.dumps({"records": [{"value": value} for value in values]})
        headers = {"content-type": "application/vnd.kafka.json.v2+json", "idempotency-key": key}
        return [await client.http.post("/topics/ordered", content=body, headers=headers) for _ in range(2)]

    first, again = await twice("r", BAD, GOOD)
    alone = await twice("s", BAD)
    bad, good = first.json()["offsets"]
    assert (bad["error_code"], good["error_code"]) == (1, None)
    assert "(quarantined: letters, partition " in bad["error"]
    assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
    assert [answer.status_code for answer in alone] == [422, 422]
    assert alone[0].json()["error_code"] == 42207
    assert (alone[1].content, alone[1].headers["idempotent-replayed"]) == (alone[0].content, "true")
    entries = [{"id": f"e{n}", "value": {"type": "JSON", "data": value}} for n, value in enumerate((GOOD, BAD))]
    path = "/v3/clusters/c/topics/ordered/records:batch"
    batches = [
        await client.http.post(path, json={"entries": entries}, headers={"idempotency-key": "b"}) for _ in range(2)
    ]
    (failure,) = batches[0].json()["failures"]
    assert (failure["id"], failure["error_code"], "(quarantined: letters, " in failure["message"]) == ("e1", 422, True)
    assert (batches[1].content, batches[1].headers["idempotent-replayed"]) == (batches[0].content, "true")


# ------------------------------------------------------------------------------------------------------- deliveries


async def test_a_delivery_that_cannot_be_used_is_written_once(client: Client) -> None:
    for number, (body, code, status) in enumerate(
        [
            (b"no json", "invalid-json", 400),
            (b'{"type": "a"}', "missing-key", 400),
            (b'{"id": "u", "type": "x"}', "unusable-body", 422),
            (b'{"id": "s", "type": "a"}', "schema-mismatch", 422),
            (b'{"id": "c", "type": "c"}', "record-refused", 422),
        ]
    ):
        first = await client.deliver("shop", body)
        problem = first.json()
        assert (first.status_code, problem["code"], problem["quarantined"], problem["topic"]) == (
            status,
            code,
            True,
            "letters",
        )
        again = await client.deliver("shop", body)
        assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (
            status,
            first.content,
            "true",
        )
        assert again.headers["idempotency-key-expires"] == first.headers["idempotency-key-expires"]
        record = client.written[number]
        assert (record.topic, record.value) == ("letters", body)
        assert dict(record.headers)["fencepost-caller"] == b"source:shop"
    assert len(client.written) == 5
    states = client.world.keys.server.keys.values()
    assert [state.ttl_s for state in states if isinstance(state, Delivered)] == [1000] * 5
    assert client.outcomes("shop") == {"quarantined": 5, "duplicate": 5}


async def test_a_delivery_is_the_same_after_its_rule_was_mended(client: Client, tmp_path: Path) -> None:
    body = b'{"id": "u", "type": "x"}'
    first = await client.deliver("shop", body)
    mended = Rules.parse(SOURCES.replace('c = "compacted"', 'x = "other"'), str(tmp_path / "rules.toml"))
    async with connected(client.world, read_sources(mended)) as later:
        again = await later.deliver("shop", body)
        assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (422, first.content, "true")
        other = await later.deliver("shop", b'{"id": "u", "type": "x", "n": 1}')
        assert other.json()["code"] == "fingerprint-mismatch"
        assert "letters" in other.json()["detail"]


async def test_a_delivery_without_a_key_is_the_same_after_its_rule_has_found_it(client: Client, tmp_path: Path) -> None:
    """Its dead letter may have been dealt with under the key of its body."""
    body = b'{"key": "u", "type": "b"}'
    first = await client.deliver("shop", body)
    assert (first.json()["code"], first.json()["quarantined"]) == ("missing-key", True)
    mended = Rules.parse(SOURCES.replace("/id", "/key", 1), str(tmp_path / "rules.toml"))
    async with connected(client.world, read_sources(mended)) as later:
        again = await later.deliver("shop", body)
        assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (400, first.content, "true")
        assert again.headers["idempotency-key"] == first.headers["idempotency-key"]
        assert later.outcomes("shop") == {"duplicate": 1}
        assert (await later.deliver("shop", b'{"key": "u", "type": "b", "n": 1}')).status_code == 201
        client.world.store.generation = None
        assert (await later.deliver("shop", body)).status_code == 503
    assert [record.topic for record in client.written] == ["letters", "other"]


async def test_a_delivery_with_a_key_in_its_header_is_another_one_than_that_without(
    client: Client, tmp_path: Path
) -> None:
    """Two deliveries may have one body, and no more tells them apart."""
    quarantined = SOURCES.replace('name = "plain"', 'name = "plain"\nquarantine = "letters"')
    async with connected(client.world, read_sources(Rules.parse(quarantined, str(tmp_path / "r.toml")))) as mended:
        assert (await mended.deliver("plain", GOOD)).json()["quarantined"] is True
        assert (await mended.deliver("plain", GOOD, x_id="a")).status_code == 201


async def test_a_delivery_that_the_broker_refuses_is_written_once_into_the_quarantine(client: Client) -> None:
    world = client.world
    refused = RecordError(RECORD_REFUSED, "the record violates the broker's policy")
    failed = TransactionFailed(TransactionOutcome.ABORTED, "refused", {"other": refused})
    world.producers[0].trouble.before["write"].append(failed)
    delivering = asyncio.create_task(client.deliver("shop", {"id": "1", "type": "b"}))
    await world.producers[0].trouble.reached["write"].wait()
    serving = world.serve(await world.slot(1))
    first = await delivering
    assert (first.status_code, first.json()["code"]) == (422, "record-refused")
    assert (first.json()["quarantined"], first.json()["topic"]) == (True, "letters")
    assert first.json()["detail"] == "topic: other: the record violates the broker's policy"
    again = await client.deliver("shop", {"id": "1", "type": "b"})
    assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
    ((record,),) = world.producers[1].written
    assert (record.topic, record.value) == ("letters", b'{"id": "1", "type": "b"}')
    assert dict(record.headers)["fencepost-topic"] == b"other"
    assert client.outcomes("shop") == {"quarantined": 1, "duplicate": 1}
    await ended(serving)


async def test_a_source_without_a_quarantine_uses_that_of_its_topic(client: Client) -> None:
    refused = await client.deliver("plain", {"sum": 1}, x_id="a")
    assert (refused.json()["code"], refused.json()["quarantined"]) == ("schema-mismatch", True)
    unusable = await client.deliver("plain", b"{}")
    assert (unusable.json()["code"], "quarantined" in unusable.json()) == ("missing-key", False)
    assert client.outcomes("plain") == {"quarantined": 1, "refused": 1}


async def test_the_keys_of_a_source_have_its_retention(client: Client) -> None:
    answer = await client.deliver("shop", {"id": "1", "type": "b"})
    state = client.world.keys.server.keys[event_id("1", "source:shop")]
    assert isinstance(state, Delivered)
    assert (answer.status_code, state.ttl_s) == (201, 1000)
    assert client.world.keys.server.ttls_ms[event_id("1", "source:shop")] == 1_000_000
    kept = await client.deliver("plain", {"total": 1}, x_id="a")
    state = client.world.keys.server.keys[event_id("a", "source:plain")]
    assert isinstance(state, Delivered)
    assert (kept.status_code, state.ttl_s) == (201, 500), "without one, it is that of the topic"


@pytest.mark.parametrize(("age_s", "status"), [(1_990, 201), (2_010, 412)])
async def test_a_delivery_that_was_signed_before_its_retention_is_refused(
    client: Client, age_s: int, status: int
) -> None:
    """Whoever has seen it could send it again, while its timestamp is within the tolerance."""
    at = int(time.time()) - age_s
    signature = hmac.digest(b"s3cret", b"%d.{}" % at, "sha256").hex()
    answer = await client.deliver("signed", b"{}", stripe_signature=f"t={at},v1={signature}", webhook_id="a")
    assert answer.status_code == status
    assert (answer.json().get("code") == "key-expired") is (status == 412)


async def test_requests_to_a_source_are_counted_by_outcome(client: Client) -> None:
    await client.deliver("signed", b"{}")
    for _ in range(3):
        await client.deliver("plain", {"total": 1}, x_id="a")
    client.world.store.generation = None
    await client.deliver("plain", {"total": 1}, x_id="b")
    assert client.outcomes("signed") == {"bad_signature": 1}
    assert client.outcomes("plain") == {"written": 1, "duplicate": 2, "failed": 1}
    text = client.telemetry.render().decode()
    assert 'fencepost_source_requests_total{outcome="duplicate",source="plain"} 2.0' in text


def test_the_state_of_a_quarantined_key() -> None:
    letter = Delivered(NOW_MS, b"f" * 8, "letters", 1, 7, NOW_MS, 0, "schema-mismatch value: no")
    described = describe(b"i" * 16, Found(letter), lambda *_: False)
    assert described == {
        "state": "quarantined",
        "id": (b"i" * 16).hex(),
        "topic": "letters",
        "partition": 1,
        "offset": 7,
        "timestamp": NOW_MS,
        "problem": described["problem"],
    }
    assert (described["problem"]["code"], described["problem"]["status"]) == ("schema-mismatch", 422)
