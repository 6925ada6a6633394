"""Tests the client of the Schema Registry: caches and their bounds, single flight, pauses, and wrong answers."""

import asyncio
import gc
import json
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from prometheus_client import Counter

from service.core.bounded import Bounded
from service.core.metrics import Telemetry
from service.core.settings import Settings
from service.registry import client as module
from service.registry.client import Breaker, RegistryClient, refusal_of
from service.registry.schema import Reference, RegistryAway, Schema, SchemaAbsent, SchemaType, SchemaUnusable
from tests.contract.fake_registry import FakeRegistry

STRING = Schema(SchemaType.AVRO, '"string"')
LONG = Schema(SchemaType.AVRO, '"long"')


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry("svc", "secret") as fake:
        yield fake


def made(registry: FakeRegistry, **settings: Any) -> RegistryClient:
    given = {"registry": registry.url, "registry_username": "svc", "registry_password": "secret", **settings}
    return RegistryClient(Settings(**given), Telemetry())


@pytest.fixture
async def client(registry: FakeRegistry) -> AsyncIterator[RegistryClient]:
    client = made(registry)
    yield client
    await client.close()


async def test_each_schema_is_asked_for_once_by_many_at_a_time(registry: FakeRegistry, client: RegistryClient) -> None:
    first = await client.registered("s", STRING, register=True)
    registry.requests.clear()
    registry.delay_s = 0.05
    found = await asyncio.gather(*(client.by_id(first.id) for _ in range(50)))
    assert set(found) == {STRING}
    assert [await client.by_version("s", 1), await client.by_version("s", None)] == [first, first]
    await asyncio.gather(*(client.by_version("s", None) for _ in range(50)))
    assert registry.requests == [
        f"GET /schemas/ids/{first.id}",
        "GET /subjects/s/versions/1",
        "GET /subjects/s/versions/latest",
    ]


async def test_the_latest_version_is_asked_for_again_in_the_background(
    registry: FakeRegistry, client: RegistryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await client.registered("s", STRING, register=True)
    assert await client.by_version("s", None) == first
    second = await client.registered("s", LONG, register=True)
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    registry.delay_s = 0.05
    assert await client.by_version("s", None) == first  # nobody waits
    async with asyncio.timeout(5):
        while await client.by_version("s", None) != second:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_while_the_registry_is_away_what_it_has_told_goes_on(
    registry: FakeRegistry, client: RegistryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await client.registered("s", STRING, register=True)
    assert await client.by_version("s", None) == first
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    monkeypatch.setattr(module, "STALE_S", 0.0)
    registry.status = 503
    for _ in range(3):
        assert await client.by_version("s", None) == first
    with pytest.raises(RegistryAway):
        await client.by_version("t", None)
    registry.status = 0


async def test_an_absent_subject_is_asked_for_once_a_second(
    registry: FakeRegistry, client: RegistryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(20):
        with pytest.raises(SchemaAbsent, match="not found"):
            await client.by_version("s", None)
    assert len(registry.requests) == 1
    await client.registered("s", STRING, register=True)
    later = time.monotonic() + module.ABSENT_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert (await client.by_version("s", None)).version == 1


async def test_a_deleted_subject_is_absent_and_not_the_last_known(
    registry: FakeRegistry, client: RegistryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.registered("s", STRING, register=True)
    await client.by_version("s", None)
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    monkeypatch.setattr(module, "STALE_S", 0.0)
    registry.forget("s")
    for _ in range(2):
        with pytest.raises(SchemaAbsent):
            await client.by_version("s", None)


@pytest.mark.parametrize("failure", ["status", "silence", "closed"])
async def test_a_failure_is_followed_by_a_pause_and_not_by_a_storm(
    registry: FakeRegistry, client: RegistryClient, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    if failure == "status":
        registry.status = 502
    elif failure == "silence":
        monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.2)
        registry.delay_s = 1.0
    else:
        registry.closes = True
    with pytest.raises(RegistryAway):
        await client.by_version("first", None)
    sent = len(registry.requests)
    began = asyncio.get_running_loop().time()
    for n in range(200):
        with pytest.raises(RegistryAway) as caught:
            await client.by_version(f"subject-{n}", None)
        assert 0 < caught.value.retry_after_s <= module.PAUSE_S
    assert len(registry.requests) == sent
    assert asyncio.get_running_loop().time() - began < module.PAUSE_S


def test_pauses_double_and_one_request_ends_them() -> None:
    now = [0.0]
    breaker = Breaker(Telemetry(), lambda: now[0])
    pauses = []
    for _ in range(7):
        breaker.begin()
        breaker.fail(RegistryAway("no", 0))
        breaker.end()
        with pytest.raises(RegistryAway) as caught:
            breaker.check()
        pauses.append(caught.value.retry_after_s)
        now[0] += caught.value.retry_after_s
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    breaker.begin()  # the one that finds out
    with pytest.raises(RegistryAway, match="no"):
        breaker.check()
    breaker.succeed()
    breaker.check()
    breaker.end()


def test_failures_of_requests_that_were_sent_together_begin_one_pause() -> None:
    breaker = Breaker(Telemetry(), lambda: 0.0)
    for _ in range(4):
        breaker.begin()
    for _ in range(4):
        breaker.fail(RegistryAway("no", 0))
        breaker.end()
    with pytest.raises(RegistryAway) as caught:
        breaker.check()
    assert caught.value.retry_after_s == 1


@pytest.mark.parametrize(
    ("status", "body", "kind", "everywhere"),
    [
        (404, b'{"error_code": 40401, "message": "Subject not found"}', SchemaAbsent, None),
        (404, b"<html>no such page</html>", RegistryAway, True),
        (409, b'{"error_code": 409, "message": "incompatible"}', SchemaUnusable, None),
        (422, b'{"error_code": 42201, "message": "Invalid schema"}', SchemaUnusable, None),
        (422, b"", RegistryAway, False),
        (401, b"", RegistryAway, True),
        (403, b"", RegistryAway, False),
        (500, b'{"error_code": 50001}', RegistryAway, False),
        (301, b"", RegistryAway, True),
        (503, b"", RegistryAway, True),
    ],
)
def test_answers_that_are_errors(status: int, body: bytes, kind: type, everywhere: bool | None) -> None:
    refusal = refusal_of(status, "", body, "/subjects/s")
    assert type(refusal) is kind
    assert getattr(refusal, "everywhere", None) is everywhere


def test_the_registry_tells_how_long_to_wait() -> None:
    for text, seconds in (("7", 7.0), ("soon", 1.0), ("", 1.0)):
        refusal = refusal_of(429, text, b"", "/")
        assert isinstance(refusal, RegistryAway)
        assert refusal.retry_after_s == seconds


@pytest.mark.parametrize("subject", [".", "..", "", "x" * 501])
async def test_subjects_that_would_change_the_path_are_refused_unsent(
    registry: FakeRegistry, client: RegistryClient, subject: str
) -> None:
    schema = Schema(SchemaType.AVRO, "", (Reference("a", subject, 1),))
    for look_up in (
        client.by_version(subject, None),
        client.by_version(subject, 1),
        client.registered(subject, STRING, register=False),
        client.registered(subject, STRING, register=True),
        client.imports(schema),
    ):
        with pytest.raises(SchemaUnusable, match="is no subject: use 1 to 500 characters"):
            await look_up
    assert registry.requests == []
    assert (await client.registered("x" * 500, STRING, register=True)).version == 1  # nothing is paused


class Held:
    """Stands for the event of a caller."""


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"schema": "' + b"x" * (module.SCHEMA_BYTES_MAX + 1) + b'"}'])
async def test_a_refusal_that_is_kept_holds_nothing_of_its_callers(
    registry: FakeRegistry, client: RegistryClient, answer: bytes
) -> None:
    if answer:  # else there is no such schema
        registry.answers["/schemas/ids/7"] = answer
    callers: list[weakref.ref[Held]] = []
    texts: list[str] = []

    async def refused() -> None:
        held = Held()
        callers.append(weakref.ref(held))
        await client.by_id(7)

    for _ in range(2):
        try:
            await refused()
        except (SchemaAbsent, SchemaUnusable, RegistryAway) as refusal:
            texts.append(f"{type(refusal)} {refusal} {getattr(refusal, 'everywhere', '')}")
    gc.collect()
    assert registry.requests == ["GET /schemas/ids/7"]
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert [caller() for caller in callers] == [None, None]


@pytest.mark.parametrize(("status", "code"), [(404, 40401), (422, 42201), (500, 50001)])
def test_messages_of_the_registry_are_cut(status: int, code: int) -> None:
    body = json.dumps({"error_code": code, "message": "x" * 100_000}).encode()
    assert module.MESSAGE_CHARS <= len(str(refusal_of(status, "", body, "/subjects/s"))) < 400


async def test_wrong_credentials_are_a_failure(registry: FakeRegistry) -> None:
    client = made(registry, registry_password="other")
    with pytest.raises(RegistryAway, match="401"):
        await client.by_id(1)
    await client.close()


@pytest.mark.parametrize(
    "answer", [b"[]", b"{", b'{"id": 1}', b'{"schema": 1}', b'{"schema": "a", "schemaType": "THRIFT"}', b"\xff"]
)
async def test_an_answer_of_another_form_concerns_its_schema_only(
    registry: FakeRegistry, client: RegistryClient, answer: bytes
) -> None:
    good = await client.registered("s", STRING, register=True)
    registry.answers["/schemas/ids/7"] = answer
    for _ in range(2):
        with pytest.raises(RegistryAway):
            await client.by_id(7)
    assert registry.requests.count("GET /schemas/ids/7") == 1
    assert await client.by_id(good.id) == STRING


async def test_what_the_registry_sends_is_bounded(registry: FakeRegistry, client: RegistryClient) -> None:
    for size, why in ((module.ANSWER_BYTES_MAX, "bytes"), (module.SCHEMA_BYTES_MAX, "characters")):
        registry.answers[f"/schemas/ids/{size}"] = json.dumps({"schema": "x" * (size + 1)}).encode()
        with pytest.raises(SchemaUnusable, match=f"more than {size} {why}"):
            await client.by_id(size)


async def test_references_are_bounded_and_their_cycles_end(registry: FakeRegistry, client: RegistryClient) -> None:
    def version(subject: str, *references: tuple[str, str]) -> bytes:
        named = [{"name": name, "subject": to, "version": 1} for name, to in references]
        return json.dumps({"subject": subject, "id": 9, "version": 1, "schema": "1", "references": named}).encode()

    registry.answers["/subjects/a/versions/1"] = version("a", ("b", "b"))
    registry.answers["/subjects/b/versions/1"] = version("b", ("a", "a"))
    found = await client.imports(Schema(SchemaType.AVRO, "", (Reference("a", "a", 1),)))
    assert [each.name for each in found] == ["b", "a"]
    two = Schema(SchemaType.AVRO, "", (Reference("a", "a", 1), Reference("b", "c", 1)))
    with pytest.raises(SchemaUnusable, match="for two schemas"):
        await client.imports(two)
    for n in range(40):
        registry.answers[f"/subjects/n{n}/versions/1"] = version(f"n{n}")
    many = Schema(SchemaType.AVRO, "", tuple(Reference(f"n{n}", f"n{n}", 1) for n in range(40)))
    with pytest.raises(SchemaUnusable, match="more than 32 references"):
        await client.imports(many)


async def test_look_ups_under_way_are_bounded(
    registry: FakeRegistry, client: RegistryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNDER_WAY_MAX", 3)
    registry.delay_s = 0.1
    results = await asyncio.gather(*(client.by_id(n) for n in range(1, 11)), return_exceptions=True)
    assert [type(result) for result in results] == [SchemaAbsent] * 3 + [RegistryAway] * 7


async def test_a_look_up_that_the_close_cancels_is_a_failure_of_the_registry(
    registry: FakeRegistry, client: RegistryClient
) -> None:
    registry.delay_s = 0.5
    asked = asyncio.create_task(client.by_id(1))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(RegistryAway, match="was cancelled"):
        await asked


async def test_metrics(registry: FakeRegistry) -> None:
    telemetry = Telemetry()
    client = RegistryClient(
        Settings(registry=registry.url, registry_username="svc", registry_password="secret"), telemetry
    )
    await client.registered("s", STRING, register=True)
    with pytest.raises(SchemaAbsent):
        await client.by_id(99)
    registry.status = 503
    with pytest.raises(RegistryAway):
        await client.by_id(98)
    await client.close()
    assert counts(telemetry.schema_registry.requests) == {"ok": 2, "absent": 2, "away": 1}


def counts(counter: Counter) -> dict[str, float]:
    (metric,) = counter.collect()
    return {each.labels["outcome"]: each.value for each in metric.samples if each.name.endswith("total")}


def test_a_cache_forgets_what_was_unused_for_longest() -> None:
    cache: Bounded[str] = Bounded(3, 100)
    for name in "abc":
        cache.put(name, name, 10)
    assert cache.get("a") == "a"
    cache.put("d", "d", 10)
    assert [cache.get(name) for name in "abcd"] == ["a", None, "c", "d"]
    cache.put("e", "e", 85)
    assert ([cache.get(name) for name in "acde"], cache.bytes, len(cache)) == ([None, None, "d", "e"], 95, 2)
    cache.put("f", "f", 101)
    cache.put("e", "e", 1)
    assert (cache.get("f"), cache.bytes) == (None, 11)
