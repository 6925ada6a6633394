"""Tests requests that are refused before their key is used: each answer of the HTTP contract."""

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.stack import Kafka, Service
from tests.conftest import MakeTopic
from tests.durations import HOUR_MS
from tests.integration.client import Asked, Client
from tests.integration.judge import read_committed

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Refusal:
    """A request, its status and code. `TOPIC` in the body is replaced by the test's topic."""

    body: bytes
    status: int
    code: str
    content_type: str | None = "application/json"


def value(text: str) -> bytes:
    return b'{"topic": "TOPIC", "value": ' + text.encode() + b"}"


REFUSALS: dict[str, Refusal] = {
    "no body": Refusal(b"", 400, "invalid-json"),
    "half of it": Refusal(b'{"topic": "TOPIC", "val', 400, "invalid-json"),
    "something behind it": Refusal(value("1") + b" 2", 400, "invalid-json"),
    "no object": Refusal(b'["TOPIC"]', 400, "invalid-event"),
    "NaN": Refusal(value("NaN"), 400, "invalid-json"),
    "Infinity, deep inside": Refusal(value('{"a": [-Infinity]}'), 400, "invalid-json"),
    "a name twice": Refusal(b'{"topic": "TOPIC", "topic": "TOPIC", "value": 1}', 400, "invalid-json"),
    "a name twice in the value": Refusal(value('[{"a": 1, "\\u0061": 2}]'), 400, "invalid-json"),
    "a lone surrogate": Refusal(value('"\\ud800"'), 400, "invalid-json"),
    "a lone low surrogate in a name": Refusal(value('{"\\uDC00x": 1}'), 400, "invalid-json"),
    "a byte order mark": Refusal(b"\xef\xbb\xbf" + value("1"), 400, "invalid-json"),
    "65 levels": Refusal(value("[" * 64 + "]" * 64), 400, "invalid-json"),
    "not UTF-8": Refusal(b'{"topic": "TOPIC", "value": "\xff"}', 400, "invalid-json"),
    "UTF-16": Refusal(value("1").decode().encode("utf-16"), 400, "invalid-json"),
    "a single quote": Refusal(value("'a'"), 400, "invalid-json"),
    "a comma too many": Refusal(value("[1,]"), 400, "invalid-json"),
    "a leading zero": Refusal(value("01"), 400, "invalid-json"),
    "a control character": Refusal(value('"\n"'), 400, "invalid-json"),
    "no topic": Refusal(b'{"value": 1}', 400, "invalid-event"),
    "a topic's name that Kafka does not take": Refusal(b'{"topic": "a b", "value": 1}', 400, "invalid-event"),
    "an unknown field": Refusal(b'{"topic": "TOPIC", "value": 1, "valeu": 1}', 400, "invalid-event"),
    "no value": Refusal(b'{"topic": "TOPIC"}', 400, "invalid-event"),
    "two values": Refusal(b'{"topic": "TOPIC", "value": 1, "value_base64": ""}', 400, "invalid-event"),
    "no base64": Refusal(b'{"topic": "TOPIC", "value_base64": "a"}', 400, "invalid-event"),
    "base64 for URLs": Refusal(b'{"topic": "TOPIC", "value_base64": "_-8="}', 400, "invalid-event"),
    "a number as key": Refusal(b'{"topic": "TOPIC", "key": 7, "value": 1}', 400, "invalid-event"),
    "a number as header": Refusal(b'{"topic": "TOPIC", "headers": {"a": 1}, "value": 1}', 400, "invalid-event"),
    "a reserved header": Refusal(
        b'{"topic": "TOPIC", "headers": {"fencepost": "1"}, "value": 1}', 400, "invalid-event"
    ),
    "another reserved header": Refusal(
        b'{"topic": "TOPIC", "headers": {"Idempotency-Key": "1"}, "value": 1}', 400, "invalid-event"
    ),
    "a tombstone without key": Refusal(value("null"), 400, "invalid-event"),
    "a negative partition": Refusal(b'{"topic": "TOPIC", "partition": -1, "value": 1}', 400, "invalid-event"),
    "a partition that is not there": Refusal(b'{"topic": "TOPIC", "partition": 3, "value": 1}', 400, "invalid-event"),
    "a negative time": Refusal(b'{"topic": "TOPIC", "timestamp": -1, "value": 1}', 400, "invalid-event"),
    "a time of text": Refusal(b'{"topic": "TOPIC", "timestamp": "now", "value": 1}', 400, "invalid-event"),
    "a time far ahead": Refusal(
        b'{"topic": "TOPIC", "timestamp": 9007199254740991, "value": 1}', 422, "record-refused"
    ),
    "an internal topic": Refusal(b'{"topic": "__consumer_offsets", "value": 1}', 403, "forbidden-topic"),
    "a topic that is not there": Refusal(b'{"topic": "TOPIC-not", "value": 1}', 404, "unknown-topic"),
    "an event of more than a megabyte": Refusal(value(f'"{"x" * MEGABYTE}"'), 413, "too-large"),
    "a body over the limit": Refusal(value(f'"{"x" * 2 * MEGABYTE}"'), 413, "too-large"),
    "no content type": Refusal(value("1"), 415, "unsupported-media-type", None),
    "text": Refusal(value("1"), 415, "unsupported-media-type", "text/plain"),
    "another charset": Refusal(value("1"), 415, "unsupported-media-type", "application/json; charset=latin-1"),
}


@pytest.fixture(scope="module", params=["direct", "asgi"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def post(client: Client, service: Service, body: bytes, headers: Mapping[str, str | bytes]) -> Any:
    named = [
        (name.encode(), content.encode() if isinstance(content, str) else content) for name, content in headers.items()
    ]
    return await client.http.post(f"{service.url}/events", content=body, headers=named)


def assert_problem(response: Any, status: int, code: str) -> None:
    problem = response.json()
    assert (response.status_code, problem["code"]) == (status, code), problem
    assert response.headers["content-type"] == "application/problem+json"
    assert problem["type"] == f"/problems/{code}"
    assert problem["status"] == status
    assert problem["title"]
    assert ": " in problem["detail"], "the detail names what is wrong, and the remedy"


@pytest.fixture(scope="module")
def wide_topic(kafka: Kafka, transport: str) -> str:
    """A topic with higher limits than the service, so that the service's own limits apply."""
    name = f"topic-{uuid.uuid4().hex[:12]}"
    kafka.create_topic(name, partitions=3, config={"max.message.bytes": "5000000"})
    return name


async def test_each_refusal_leaves_the_key_free(served: Service, wide_topic: str, client: Client, kafka: Kafka) -> None:
    """With one topic for all: in the end it has only the correct events under the same keys."""
    for number, (name, refusal) in enumerate(REFUSALS.items()):
        headers = {"Idempotency-Key": f"key-{number}"}
        if refusal.content_type:
            headers["Content-Type"] = refusal.content_type
        body = refusal.body.replace(b"TOPIC", wide_topic.encode())
        response = await post(client, served, body, headers)
        assert response.status_code == refusal.status, f"{name}: {response.text}"
        assert_problem(response, refusal.status, refusal.code)
        again = await client.post(served.url, Asked(f"key-{number}", wide_topic, b"%d" % number))
        assert (again.status, again.replayed) == (201, False), name
    found = await asyncio.to_thread(read_committed, kafka.bootstrap, [wide_topic])
    assert sorted(int(record.value or b"") for record in found) == list(range(len(REFUSALS)))


@pytest.mark.parametrize(
    "key", [None, "", '""', "a" * 256, "tab\there", "ü".encode(), b"\xff", '"open', '"a"b"', '"a\\n"']
)
async def test_a_missing_or_malformed_key_is_refused(
    served: Service, wide_topic: str, client: Client, key: str | bytes | None
) -> None:
    headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
    if key is not None:
        headers["Idempotency-Key"] = key
    body = b'{"topic": "%s", "value": 1}' % wide_topic.encode()
    code = "missing-key" if key is None or not key.strip() else "invalid-key"
    assert_problem(await post(client, served, body, headers), 400, code)


async def test_two_keys_are_refused(served: Service, wide_topic: str, client: Client) -> None:
    headers = [("Content-Type", "application/json"), ("Idempotency-Key", "a"), ("Idempotency-Key", "a")]
    body = b'{"topic": "%s", "value": 1}' % wide_topic.encode()
    assert_problem(await client.http.post(f"{served.url}/events", content=body, headers=headers), 400, "invalid-key")


async def test_a_compacted_topic_needs_a_key(served: Service, make_topic: MakeTopic, client: Client) -> None:
    topic = make_topic(1, {"cleanup.policy": "compact"})
    asked = Asked("compacted", topic, b"1")
    refused = await client.post(served.url, asked)
    assert (refused.status, refused.code) == (422, "record-refused")
    assert (await client.post(served.url, Asked("compacted", topic, b"1", record_key="k"))).status == 201


async def test_a_topic_takes_less_than_the_service(served: Service, make_topic: MakeTopic, client: Client) -> None:
    topic = make_topic(1, {"max.message.bytes": "2000"})
    refused = await client.post(served.url, Asked("narrow", topic, b'"%s"' % (b"x" * 2000)))
    assert (refused.status, refused.code) == (413, "too-large")
    assert (await client.post(served.url, Asked("narrow", topic, b'"x"'))).status == 201


async def test_the_times_that_a_topic_takes(served: Service, make_topic: MakeTopic, client: Client) -> None:
    topic = make_topic(1, {"message.timestamp.before.max.ms": str(HOUR_MS)})
    body = b'{"topic": "%s", "value": 1, "timestamp": 1000}' % topic.encode()
    headers = {"Content-Type": "application/json", "Idempotency-Key": "1970"}
    assert_problem(await post(client, served, body, headers), 422, "record-refused")


async def test_a_topic_is_never_made_by_asking(
    stage: Any, tmp_path_factory: pytest.TempPathFactory, client: Client
) -> None:
    """Also if the broker creates topics automatically."""
    folder = tmp_path_factory.mktemp("auto")
    with Kafka(folder, settings={"auto.create.topics.enable": "true"}) as eager:
        service = await stage.started(kafka=eager)
        answer = await client.post(service.url, Asked("the key", "not-there", b"1"))
        assert (answer.status, answer.code) == (404, "unknown-topic")
        again = await client.post(service.url, Asked("the key", "not-there", b"1"))
        assert (again.status, again.code) == (404, "unknown-topic")
        assert "not-there" not in eager.admin().list_topics(timeout=10).topics

        eager.create_topic("not-there")
        assert (await client.post(service.url, Asked("another", "not-there", b"1"))).status == 201


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("DELETE", "/events/k", 405), ("GET", "/events", 405), ("GET", "/problems/none", 404)],
)
async def test_other_routes_answer_with_problems_too(
    served: Service, client: Client, method: str, path: str, status: int
) -> None:
    response = await client.http.request(method, f"{served.url}{path}")
    assert response.status_code == status
    assert response.json()["status"] == status
    assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("code", sorted({refusal.code for refusal in REFUSALS.values()}))
async def test_a_problem_s_type_can_be_read(served: Service, client: Client, code: str) -> None:
    assert (await client.http.get(f"{served.url}/problems/{code}")).json()["code"] == code
