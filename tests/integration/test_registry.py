"""Tests events with schemas of a registry on the real stack: what consumers read, retries, a registry that is away."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.contract.wire.ids import fingerprint
from tests import registry
from tests.contract.fake_registry import FakeRegistry
from tests.integration.conftest import Stage
from tests.integration.judge import Delivered, ledger_faults, read_committed
from tests.integration.peers import WITH_REGISTRY
from tests.integration.test_produce import differing
from tests.registry import Apicurio

ORDER = {"type": "record", "name": "Order", "fields": [{"name": "total", "type": "double"}]}
NEWER = {**ORDER, "fields": [*ORDER["fields"], {"name": "more", "type": "long", "default": 7}]}
AVRO_V2 = "application/vnd.kafka.avro.v2+json"


@pytest.fixture(scope="module", params=["fake", "apicurio"])
def registry_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "fake":
        with FakeRegistry() as fake:
            yield fake.url
    else:
        if not registry.is_wanted():
            pytest.skip(registry.WHY_NOT)
        with Apicurio(tmp_path_factory.mktemp("apicurio")) as real:
            yield real.url


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20.0) as client:
        yield client


async def register(http: httpx.AsyncClient, url: str, subject: str, schema: object) -> int:
    response = await http.post(f"{url}/subjects/{subject}/versions", json={"schema": json.dumps(schema)})
    assert response.status_code == 200, response.text
    return int(response.json()["id"])


def rules_for(folder: Path, topic: str) -> Path:
    path = folder / "rules.toml"
    path.write_text(f'[[topics]]\npattern = "{topic}"\n[topics.registry]\nvalue = {{}}\n')
    return path


def read(record: Delivered, url: str) -> Any:
    with SchemaRegistryClient({"url": url}) as client:
        return AvroDeserializer(client)(record.value, SerializationContext(record.place[0], MessageField.VALUE))


async def test_events_are_encoded_and_written_once(
    stage: Stage, topic: str, tmp_path: Path, registry_url: str, http: httpx.AsyncClient
) -> None:
    first = await register(http, registry_url, f"{topic}-value", ORDER)
    one, two = (stage.service(rules=rules_for(tmp_path, topic), registry=registry_url) for _ in range(2))
    await stage.start(one, two)

    async def post(url: str, value: object, key: str) -> httpx.Response:
        return await http.post(f"{url}/events", json={"topic": topic, "value": value}, headers={"Idempotency-Key": key})

    async def v2(url: str) -> httpx.Response:
        body = {"value_schema_id": first, "records": [{"value": {"total": 2}}, {"value": {"total": 3}}]}
        headers = {"Content-Type": AVRO_V2, "Idempotency-Key": "v2"}
        return await http.post(f"{url}/topics/{topic}", content=json.dumps(body), headers=headers)

    answers = [await post(one.url, {"total": 1}, "k-1"), await v2(one.url)]
    assert [answer.status_code for answer in answers] == [201, 200], [answer.text for answer in answers]
    assert answers[1].json()["value_schema_id"] == first
    refused = await post(one.url, {"total": "1"}, "k-2")
    assert (refused.status_code, refused.json()["code"]) == (422, "schema-mismatch")
    assert refused.json()["detail"].startswith("value.total: a number is wanted: see schema ")

    one.kill()
    await register(http, registry_url, f"{topic}-value", NEWER)
    again = [await post(two.url, {"total": 1}, "k-1"), await v2(two.url)]
    assert [answer.content for answer in again] == [answer.content for answer in answers]
    assert all(answer.headers["idempotent-replayed"] == "true" for answer in again)
    newer = await post(two.url, {"total": 4}, "k-2")
    assert newer.status_code == 201

    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    assert sorted(read(record, registry_url)["total"] for record in records) == [1, 2, 3, 4]
    (last,) = (record for record in records if record.idempotency_key == "k-2")
    assert read(last, registry_url) == {"total": 4, "more": 7}
    for record in records:
        stamp = Stamp.decode(dict(record.headers)[STAMP_HEADER])
        assert stamp.fingerprint == fingerprint(topic, None, record.key, [], record.value)
    assert await asyncio.to_thread(ledger_faults, stage.kafka.bootstrap, stage.namespace, [topic]) == []


async def test_while_the_registry_is_away_schemas_that_are_known_go_on(
    stage: Stage, topic: str, tmp_path: Path, http: httpx.AsyncClient
) -> None:
    rules = rules_for(tmp_path, topic)
    with FakeRegistry() as fake:
        await register(http, fake.url, f"{topic}-value", ORDER)
        service, fresh = (stage.service(rules=rules, registry=fake.url) for _ in range(2))
        await stage.start(service, fresh)

        async def post(url: str, key: str) -> httpx.Response:
            event = {"topic": topic, "value": {"total": 1}}
            return await http.post(f"{url}/events", json=event, headers={"Idempotency-Key": key})

        assert (await post(service.url, "a")).status_code == 201
        fake.status = 503
        assert (await post(service.url, "b")).status_code == 201
        asked = len(fake.requests)
        answers = await asyncio.gather(*(post(fresh.url, f"c-{n}") for n in range(50)))
        assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {(503, "not-written")}
        assert all(1 <= int(answer.headers["retry-after"]) <= 2 for answer in answers)
        assert len(fake.requests) <= asked + 2  # one, and one more after a pause of a second
        fake.status = 0
        async with asyncio.timeout(10):
            while (await post(fresh.url, "c-1")).status_code != 201:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    assert sorted(record.idempotency_key or "" for record in records) == ["a", "b", "c-1"]


async def test_answers_are_those_of_the_peers_but_for_what_the_table_says(
    stage: Stage, topic: str, registry_url: str
) -> None:
    service = await stage.started(registry=registry_url)
    async with httpx.AsyncClient(base_url=service.url, timeout=20.0) as proxy:
        cluster = (await proxy.get("/v3/clusters")).json()["data"][0]["cluster_id"]
        for asked in WITH_REGISTRY:
            found = await differing(proxy, asked, {"topic": topic, "cluster": cluster})
            assert found == asked.differs, f"{asked.name} ({asked.origin})"
            assert bool(asked.differs) == bool(asked.why), asked.name
