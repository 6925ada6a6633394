"""Tests events with schemas of a registry: what is written, fingerprints, subjects, refusals and their problems."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Hashable, Iterator
from typing import Any

import pytest

from service.contract import RegistryRule, Rules, SchemaRule, TopicRule
from service.contract.wire.ids import event_id, fingerprint
from service.core.bounded import Bounded
from service.core.metrics import Telemetry
from service.core.problems import Problem
from service.core.settings import Settings
from service.events import encoding as module
from service.events.encoding import Encoder
from service.events.event import Event, event_of
from service.events.schema_refs import Encoding, SchemaRef, UsedSchema
from service.registry import client as client_module
from service.registry.client import RegistryClient
from service.registry.schema import Reference, Registered, Schema, SchemaType
from tests.contract.fake_registry import FakeRegistry

LATER = 1e9
STRING = Schema(SchemaType.AVRO, '"string"')
LONG = Schema(SchemaType.AVRO, '"long"')
ORDER = Schema(
    SchemaType.AVRO,
    '{"type":"record","name":"Order","namespace":"shop","fields":[{"name":"lines","type":{"type":"array","items":"long"}}]}',
)


class EncoderAndRegistry:
    """An encoder, its client, and the registry."""

    def __init__(self, registry: FakeRegistry, **settings: Any) -> None:
        self.registry = registry
        self.settings = Settings(registry=registry.url, **settings)
        self.telemetry = Telemetry()
        self.client = RegistryClient(self.settings, self.telemetry)

    def encoder(self, key: SchemaRule | None = None, value: SchemaRule | None = None) -> Encoder:
        rules = Rules((TopicRule("orders", registry=RegistryRule(key, value)),) if key or value else ())
        return Encoder(self.client, self.settings, rules, self.telemetry)

    async def put(self, subject: str, schema: Schema) -> Registered:
        return await self.client.registered(subject, schema, register=True)

    async def by(self, ref: SchemaRef, value: object, key: SchemaRef | None = None, record_key: str = "1") -> Event:
        """Encode a value, and a JSON key, by schemas that the request names."""
        event = an_event(value, None if key is None else record_key)
        event.encoding = Encoding(key, ref, json_key=True)
        await self.encoder().encode(event, LATER)
        return event


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as fake:
        yield fake


@pytest.fixture
async def parts(registry: FakeRegistry) -> AsyncIterator[EncoderAndRegistry]:
    parts = EncoderAndRegistry(registry)
    yield parts
    await parts.client.close()


def an_event(value: object, key: str | None = None, topic: str = "orders") -> Event:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return event_of("k", event_id("k"), topic, None if key is None else key.encode(), content, [("a", b"b")], 2)


async def problem_of(encoder: Encoder, event: Event, deadline: float = LATER) -> Problem:
    with pytest.raises(Problem) as caught:
        await encoder.encode(event, deadline)
    assert event.encoded is None
    return caught.value


async def test_key_and_value_are_encoded_and_the_fingerprint_stays_that_of_what_was_sent(
    parts: EncoderAndRegistry,
) -> None:
    await parts.put("orders-key", STRING)
    value = await parts.put("orders-value", ORDER)
    encoder = parts.encoder(SchemaRule(), SchemaRule())
    event = an_event({"lines": [1, -1]}, "customer-7")
    sent = event.fp
    assert encoder.concerns(event)
    await encoder.encode(event, LATER)
    assert (event.record_key, event.value) == (b"\0\0\0\0\1\x14customer-7", b"\0\0\0\0\2\x04\x02\x01\x00")
    assert event.size == len(event.record_key or b"") + len(event.value or b"") + 2
    assert event.encoded is not None
    written = fingerprint("orders", 2, event.record_key, [("a", b"b")], event.value)
    assert (event.fp, event.encoded.fp, sent == written) == (sent, written, False)
    assert event.encoded.value == UsedSchema(SchemaType.AVRO, "orders-value", value.id, 1)
    assert not encoder.concerns(event)


async def test_a_newer_latest_version_leaves_the_request_the_same(
    parts: EncoderAndRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "FRESH_S", 0.0)
    monkeypatch.setattr(client_module, "STALE_S", 0.0)
    await parts.put("orders-value", ORDER)
    encoder = parts.encoder(None, SchemaRule())
    first, again = an_event({"lines": []}), an_event({"lines": []})
    await encoder.encode(first, LATER)
    fields = [*json.loads(ORDER.text)["fields"], {"name": "note", "type": "string", "default": "n"}]
    await parts.put("orders-value", Schema(SchemaType.AVRO, json.dumps({**json.loads(ORDER.text), "fields": fields})))
    await encoder.encode(again, LATER)
    assert again.value == b"\0\0\0\0\2\0\x02n"
    assert first.value == b"\0\0\0\0\1\0"
    assert first.fp == again.fp


async def test_tombstones_and_absent_keys_stay(parts: EncoderAndRegistry) -> None:
    await parts.put("orders-key", STRING)
    encoder = parts.encoder(SchemaRule(), SchemaRule())
    event = event_of("k", event_id("k"), "orders", b"a", None, [])
    await encoder.encode(event, LATER)
    assert (event.record_key, event.value) == (b"\0\0\0\0\1\x02a", None)
    await parts.put("orders-value", LONG)
    event = an_event(1)
    await encoder.encode(event, LATER)
    assert (event.record_key, event.value) == (None, b"\0\0\0\0\2\x02")


@pytest.mark.parametrize(
    ("schema", "json_key", "key", "content"),
    [
        ('"string"', False, "a", b"\x02a"),
        ('"string"', False, '"a"', b'\x06"a"'),
        ('"string"', True, '"a"', b"\x02a"),
        ('"long"', False, "7", b"\x0e"),
        ('"long"', True, "7", b"\x0e"),
        ('["null", "string"]', False, '"a"', b"\x02\x02a"),
    ],
)
async def test_a_key_is_a_string_where_its_schema_takes_strings_else_json(
    parts: EncoderAndRegistry, schema: str, json_key: bool, key: str, content: bytes
) -> None:
    await parts.put("orders-key", Schema(SchemaType.AVRO, schema))
    event = an_event(1, key)
    event.encoding = Encoding(json_key=json_key)
    await parts.encoder(SchemaRule()).encode(event, LATER)
    assert (event.record_key, event.value) == (b"\0\0\0\0\1" + content, b"1")


async def test_a_key_that_is_no_text_is_refused(parts: EncoderAndRegistry) -> None:
    await parts.put("orders-key", STRING)
    event = event_of("k", event_id("k"), "orders", b"\xff", b"1", [])
    problem = await problem_of(parts.encoder(SchemaRule()), event)
    assert (problem.kind.code, problem.detail) == (
        "schema-mismatch",
        "key: its schema takes strings, and it is not UTF-8",
    )


async def test_json_is_validated_and_stays_as_it_was_sent(parts: EncoderAndRegistry) -> None:
    text = json.dumps({"title": "shop.Order", "properties": {"lines": {"items": {"type": "number"}}}})
    await parts.put("orders-value", Schema(SchemaType.JSON, text))
    encoder = parts.encoder(None, SchemaRule())
    event = an_event(b'{ "lines" : [1.50] }')
    await encoder.encode(event, LATER)
    assert event.value == b'\0\0\0\0\1{ "lines" : [1.50] }'
    problem = await problem_of(encoder, an_event({"lines": [1, "a"]}))
    assert problem.detail == ('value.lines[1]: "a" is not of type "number": see schema 1 (version 1 of orders-value)')


async def test_json_schemas_refer_to_others(parts: EncoderAndRegistry) -> None:
    await parts.put("line", Schema(SchemaType.JSON, '{"type": "integer"}'))
    text = '{"$schema": "http://json-schema.org/draft-07/schema#", "items": {"$ref": "line.json"}}'
    await parts.put("orders-value", Schema(SchemaType.JSON, text, (Reference("line.json", "line", 1),)))
    encoder = parts.encoder(None, SchemaRule())
    await encoder.encode(an_event([1, 2]), LATER)
    problem = await problem_of(encoder, an_event([1, "a"]))
    assert problem.detail.startswith('value[1]: "a" is not of type "integer"')


async def test_json_schemas_with_an_id_refer_relative_to_it(parts: EncoderAndRegistry) -> None:
    await parts.put("line", Schema(SchemaType.JSON, '{"$id": "http://shop.test/line.json", "type": "integer"}'))
    text = '{"$id": "http://shop.test/order.json", "items": {"$ref": "line.json"}}'
    reference = Reference("http://shop.test/line.json", "line", 1)
    await parts.put("orders-value", Schema(SchemaType.JSON, text, (reference,)))
    encoder = parts.encoder(None, SchemaRule())
    await encoder.encode(an_event([1, 2]), LATER)
    assert (await problem_of(encoder, an_event(["a"]))).kind.code == "schema-mismatch"


async def test_patterns_of_json_schemas_take_linear_time(parts: EncoderAndRegistry) -> None:
    await parts.put("orders-value", Schema(SchemaType.JSON, '{"pattern": "^(a+)+$"}'))
    encoder = parts.encoder(None, SchemaRule())
    async with asyncio.timeout(5):
        assert (await problem_of(encoder, an_event("a" * 50_000 + "b"))).kind.code == "schema-mismatch"
    await parts.put("look", Schema(SchemaType.JSON, '{"pattern": "(?=a)"}'))
    problem = await problem_of(parts.encoder(None, SchemaRule(subject="look")), an_event("a"))
    assert problem.kind.code == "unusable-schema"


async def test_protobuf_is_encoded_behind_the_messages_indexes(parts: EncoderAndRegistry) -> None:
    text = 'syntax = "proto3"; package shop; message Line { int64 n = 1; } message Order { repeated Line lines = 1; }'
    await parts.put("orders-value", Schema(SchemaType.PROTOBUF, text))
    by_rule = parts.encoder(None, SchemaRule(message="shop.Order"))
    event = an_event({"lines": [{"n": 3}]})
    await by_rule.encode(event, LATER)
    assert event.value == b"\0\0\0\0\1\x02\x02\x0a\x02\x08\x03"
    event = an_event({"n": 3})
    await parts.encoder(None, SchemaRule()).encode(event, LATER)
    assert event.value == b"\0\0\0\0\1\0\x08\x03"
    problem = await problem_of(by_rule, an_event({"lines": [{"m": 3}]}))
    assert problem.detail.startswith("value.lines[0].m: shop.Line has no such field: see schema 1 ")
    problem = await problem_of(parts.encoder(None, SchemaRule(message="shop.None")), an_event({}))
    assert (problem.kind.code, problem.detail.rpartition(": ")[2]) == ("unusable-schema", "it has no message shop.None")


@pytest.mark.parametrize(
    ("rule", "subject"),
    [
        (SchemaRule(), "orders-value"),
        (SchemaRule("record", "shop.Order"), "shop.Order"),
        (SchemaRule("topic-record", "shop.Order"), "orders-shop.Order"),
        (SchemaRule(subject="any"), "any"),
    ],
)
async def test_subjects_of_rules(parts: EncoderAndRegistry, rule: SchemaRule, subject: str) -> None:
    await parts.put(subject, LONG)
    await parts.put(subject, STRING)
    event = an_event("a")
    await parts.encoder(None, rule).encode(event, LATER)
    assert event.value == b"\0\0\0\0\2\x02a"
    fixed = SchemaRule(rule.strategy, rule.record, rule.subject, version=1)
    event = an_event(1)
    await parts.encoder(None, fixed).encode(event, LATER)
    assert event.value == b"\0\0\0\0\1\x02"


async def test_schemas_that_a_request_names(parts: EncoderAndRegistry) -> None:
    await parts.put("orders-key", STRING)
    order = await parts.put("orders-value", ORDER)
    long = await parts.put("mine", LONG)
    event = await parts.by(SchemaRef(id=order.id), {"lines": []}, SchemaRef(), '"a"')
    assert (event.record_key, event.value) == (b"\0\0\0\0\1\x02a", b"\0\0\0\0\2\0")
    event = await parts.by(SchemaRef(subject="mine", version=1), 1)
    assert event.encoded is not None
    assert event.encoded.value == UsedSchema(SchemaType.AVRO, "mine", long.id, 1)
    event = await parts.by(SchemaRef(text=LONG.text, type=SchemaType.AVRO, subject="mine"), 1)
    assert event.encoded is not None
    assert event.encoded.value == UsedSchema(SchemaType.AVRO, "mine", long.id, 1)


@pytest.mark.parametrize(("strategy", "subject"), [("record", "shop.Order"), ("topic-record", "orders-shop.Order")])
async def test_strategies_by_the_name_of_the_schema(parts: EncoderAndRegistry, strategy: str, subject: str) -> None:
    registered = await parts.put(subject, ORDER)
    for ref in (
        SchemaRef(text=ORDER.text, type=SchemaType.AVRO, strategy=strategy),
        SchemaRef(id=registered.id, strategy=strategy),
    ):
        event = await parts.by(ref, {"lines": []})
        assert event.encoded is not None
        assert event.encoded.value == UsedSchema(SchemaType.AVRO, subject, registered.id, 1)
    event = an_event(1)
    event.encoding = Encoding(value=SchemaRef(strategy=strategy))
    assert (await problem_of(parts.encoder(), event)).kind.code == "unusable-schema"


@pytest.mark.parametrize(
    "ref",
    [
        SchemaRef(subject=".."),
        SchemaRef(text='{"title": ".."}', type=SchemaType.JSON, strategy="record"),
        SchemaRef(text=json.dumps({"title": "x" * 501}), type=SchemaType.JSON, strategy="record"),
    ],
)
async def test_subjects_that_would_change_the_path_are_refused(parts: EncoderAndRegistry, ref: SchemaRef) -> None:
    event = an_event(1)
    event.encoding = Encoding(value=ref)
    problem = await problem_of(parts.encoder(), event)
    assert (problem.kind.code, "is no subject: use 1 to 500" in problem.detail) == ("unusable-schema", True)
    assert parts.registry.requests == []


async def test_a_schema_that_a_request_brings_is_registered_if_that_is_allowed(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ABSENT_S", 0.0)
    parts, careful = EncoderAndRegistry(registry), EncoderAndRegistry(registry, registry_register=False)
    event = an_event(1)
    event.encoding = Encoding(value=SchemaRef(text=LONG.text, type=SchemaType.AVRO))
    problem = await problem_of(careful.encoder(), event)
    assert (problem.kind.code, problem.detail.partition(":")[0]) == ("unknown-schema", "value")
    assert (await parts.by(event.encoding.value or SchemaRef(), 1)).value == b"\0\0\0\0\1\x02"
    await careful.encoder().encode(event, LATER)
    assert event.value == b"\0\0\0\0\1\x02"
    await parts.client.close()
    await careful.client.close()


@pytest.mark.parametrize(
    ("ref", "code", "detail"),
    [
        (SchemaRef(), "unknown-schema", "value: the latest version of the subject orders-value: Subject"),
        (SchemaRef(version=4, subject="s"), "unknown-schema", "value: the version 4 of the subject s: Version 4"),
        (SchemaRef(id=77), "unknown-schema", "value: schema 77: Schema 77 not found"),
        (SchemaRef(id=1), "unknown-schema", "value: schema 1: Subject 'orders-value' not found"),
        (
            SchemaRef(text="{", type=SchemaType.AVRO),
            "unusable-schema",
            "value: the schema that was sent: the registry re",
        ),
        (
            SchemaRef(text='"x"', type=SchemaType.AVRO),
            "unusable-schema",
            "value: the schema that was sent: it is no Avro",
        ),
    ],
)
async def test_schemas_that_are_not_there_or_cannot_be_used(
    parts: EncoderAndRegistry, ref: SchemaRef, code: str, detail: str
) -> None:
    await parts.put("s", LONG)
    event = an_event(1)
    event.encoding = Encoding(value=ref)
    problem = await problem_of(parts.encoder(), event)
    assert (problem.kind.status, problem.kind.code) == (422, code)
    assert problem.detail.startswith(detail)


async def test_a_value_that_does_not_fit_names_the_path(parts: EncoderAndRegistry) -> None:
    await parts.put("orders-value", ORDER)
    encoder = parts.encoder(None, SchemaRule())
    problem = await problem_of(encoder, an_event({"lines": [1, None]}))
    assert (problem.kind.status, problem.kind.code) == (422, "schema-mismatch")
    assert problem.detail == ("value.lines[1]: an integer is wanted (long): see schema 1 (version 1 of orders-value)")
    problem = await problem_of(encoder, an_event(b"no JSON"))
    assert problem.detail.startswith("value: it has a schema, which takes JSON only: is not JSON")
    problem = await problem_of(encoder, an_event(b'{"lines": [1e99999]}'))
    assert "more digits" in problem.detail


async def test_a_registry_that_is_away_is_503_with_a_time(parts: EncoderAndRegistry) -> None:
    parts.registry.status = 503
    encoder = parts.encoder(None, SchemaRule())
    for _ in range(3):
        problem = await problem_of(encoder, an_event(1))
        assert (problem.kind.code, problem.retry_after_s) == ("not-written", 1)
        assert problem.detail.startswith("value: the schema registry is away (")
    assert len(parts.registry.requests) == 1
    (metric,) = parts.telemetry.schema_registry.unserved.collect()
    assert metric.samples[0].value == 3


async def test_a_silent_registry_is_waited_for_until_the_deadline(parts: EncoderAndRegistry) -> None:
    parts.registry.delay_s = 0.5
    began = asyncio.get_running_loop().time()
    problem = await problem_of(parts.encoder(None, SchemaRule()), an_event(1), began + 0.1)
    assert (problem.kind.code, problem.detail) == (
        "not-written",
        "value: its schema was not found in time: send it again",
    )
    assert asyncio.get_running_loop().time() < began + 0.4


async def test_long_values_are_encoded_off_the_event_loop(
    parts: EncoderAndRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[object] = []

    async def in_thread(work: Any, *given: Any) -> Any:
        threads.append(work)
        return work(*given)

    await parts.put("orders-value", ORDER)
    encoder = parts.encoder(None, SchemaRule())
    await encoder.encode(an_event({"lines": []}), LATER)
    monkeypatch.setattr(module, "in_thread", in_thread)
    await encoder.encode(an_event({"lines": []}), LATER)
    assert threads == []
    await encoder.encode(an_event({"lines": [1] * module.AT_ONCE_BYTES}), LATER)
    assert len(threads) == 1


async def test_an_encoded_event_is_bounded(parts: EncoderAndRegistry) -> None:
    await parts.put("orders-value", Schema(SchemaType.AVRO, '{"type": "array", "items": "double"}'))
    problem = await problem_of(parts.encoder(None, SchemaRule()), an_event([1] * 200_000))
    assert (problem.kind.status, problem.detail) == (
        413,
        "value: the event has 1600011 bytes; at most 1000000 are taken",
    )


async def test_schemas_that_are_ready_are_bounded(parts: EncoderAndRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READY_MAX", 2)
    encoder = parts.encoder()
    for n in range(5):
        event = an_event(1)
        text = json.dumps({"type": "long", "doc": "x" * n})
        event.encoding = Encoding(value=SchemaRef(text=text, type=SchemaType.AVRO))
        await encoder.encode(event, LATER)
    (metric,) = parts.telemetry.schema_registry.schemas.collect()
    assert metric.samples[0].value == 2


async def test_what_is_kept_of_a_schema_that_cannot_be_made_ready_is_short_and_counted(
    parts: EncoderAndRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[int, int]] = []  # characters of the key and of why, and the bytes that count
    put = Bounded.put

    def noted(self: Bounded[Any], key: Hashable, entry: Any, size: int) -> None:
        kept.append((len(repr(key)) + len(entry), size))
        put(self, key, entry, size)

    monkeypatch.setattr(Bounded, "put", noted)
    encoder = parts.encoder()
    for _ in range(2):
        event = an_event(1)
        event.encoding = Encoding(
            value=SchemaRef(text=json.dumps("x" * 100_000), type=SchemaType.AVRO, strategy="record")
        )
        detail = (await problem_of(encoder, event)).detail
        assert detail.startswith("value: the schema that was sent: it is no Avro schema: ")
        assert len(detail) < 400
    ((chars, size),) = kept
    assert chars < size < 1_000


async def test_a_schema_that_cannot_be_made_ready_is_not_tried_again(
    parts: EncoderAndRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    await parts.put("orders-value", Schema(SchemaType.AVRO, '"none"'))
    encoder = parts.encoder(None, SchemaRule())
    tries: list[object] = []
    made = module.AvroCodec

    def counted(*given: Any) -> object:
        tries.append(given)
        return made(*given)

    monkeypatch.setattr(module, "AvroCodec", counted)
    for _ in range(3):
        assert (await problem_of(encoder, an_event(1))).kind.code == "unusable-schema"
    assert len(tries) == 1


class SlowCodec(module.AvroCodec):
    """Counts how often a schema is made ready, which takes 0.1 s."""

    made = 0

    def __init__(self, *given: Any) -> None:
        time.sleep(0.1)
        type(self).made += 1
        super().__init__(*given)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[SlowCodec]:
    monkeypatch.setattr(SlowCodec, "made", 0)
    monkeypatch.setattr(module, "AvroCodec", SlowCodec)
    return SlowCodec


async def test_events_that_come_together_make_their_schema_ready_once(
    parts: EncoderAndRegistry, slow: type[SlowCodec]
) -> None:
    """Each in the thread for long bodies, which had no time for these meanwhile."""
    await parts.put("orders-value", LONG)
    encoder = parts.encoder(None, SchemaRule())
    await asyncio.gather(*(encoder.encode(an_event(1), LATER) for _ in range(5)))
    assert slow.made == 1


async def test_a_schema_that_takes_longer_than_a_request_is_ready_for_the_next(
    parts: EncoderAndRegistry, slow: type[SlowCodec]
) -> None:
    await parts.put("orders-value", LONG)
    encoder = parts.encoder(None, SchemaRule())
    await parts.client.by_version("orders-value", None)  # known already
    problem = await problem_of(encoder, an_event(1), asyncio.get_running_loop().time() + 0.05)
    assert problem.kind.code == "not-written"
    await encoder.encode(an_event(1), LATER)
    assert slow.made == 1


async def test_schemas_that_are_being_made_ready_are_bounded(
    parts: EncoderAndRegistry, slow: type[SlowCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAKING_MAX", 2)
    refs = [SchemaRef(text=f'{{"type": "long", "doc": "{n}"}}', type=SchemaType.AVRO) for n in range(3)]
    encoder, events = parts.encoder(), [an_event(1) for _ in refs]
    for event, ref in zip(events, refs, strict=True):
        await parts.put("orders-value", Schema(SchemaType.AVRO, ref.text))
        event.encoding = Encoding(value=ref)
    made = await asyncio.gather(*(encoder.encode(event, LATER) for event in events), return_exceptions=True)
    (refused,) = [each for each in made if isinstance(each, Problem)]
    assert refused.detail == "value: the schema registry is away (2 schemas are being made ready): send it again"
    assert refused.kind.code == "not-written"
