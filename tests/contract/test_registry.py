"""Tests what a Schema Registry does for the service, on the fake of the unit tests and on a real one.

The real one is Apicurio Registry with Confluent's API, which `python -m tests.registry` fetches.
"""

import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from service.contract import RegistryRule, Rules, SchemaRule, TopicRule
from service.contract.wire.ids import event_id
from service.core.metrics import Telemetry
from service.core.settings import Settings
from service.events.encoding import Encoder
from service.events.event import Event, event_of
from service.registry import protoc
from service.registry.client import RegistryClient
from service.registry.schema import Reference, Registered, Schema, SchemaAbsent, SchemaType, SchemaUnusable
from tests import registry
from tests.contract.fake_registry import FakeRegistry
from tests.registry import Apicurio

ORDER: Final = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "total", "type": "double"},
        {"name": "lines", "type": {"type": "array", "items": "string"}},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
NEWER: Final = {**ORDER, "fields": [*ORDER["fields"], {"name": "priority", "type": "int", "default": 3}]}
LINE_PROTO: Final = 'syntax = "proto3";\npackage shop;\nmessage Line {\n  string sku = 1;\n  int32 count = 2;\n}\n'
ORDER_PROTO: Final = """syntax = "proto3";
package shop;
import "line.proto";
import "google/protobuf/timestamp.proto";
message Other { string x = 1; }
message Order {
  message Detail { string text = 1; }
  double total = 1;
  repeated Line lines = 2;
  google.protobuf.Timestamp at = 3;
  Detail detail = 4;
}
"""
DEADLINE: Final = 1e9


@pytest.fixture(scope="module", params=["fake", "apicurio"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    if request.param == "fake":
        with FakeRegistry() as fake:
            yield Settings(registry=fake.url)
    else:
        if not registry.is_wanted():
            pytest.skip(registry.WHY_NOT)
        with Apicurio(tmp_path_factory.mktemp("apicurio")) as real:
            yield Settings(registry=real.url)


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[RegistryClient]:
    async with connected(settings) as made:
        yield made


@pytest.fixture
def readers(settings: Settings) -> Iterator[SchemaRegistryClient]:
    """The client of the other library."""
    with SchemaRegistryClient({"url": settings.registry}) as client:
        yield client


@asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[RegistryClient]:
    """Make a client, and close it at the end."""
    client = RegistryClient(settings, Telemetry())
    try:
        yield client
    finally:
        await client.close()


def avro(schema: object, *references: Reference) -> Schema:
    return Schema(SchemaType.AVRO, json.dumps(schema), references)


def new_subject() -> str:
    return f"subject {uuid.uuid4().hex[:12]}/é-value"


async def test_what_is_not_there_is_absent(client: RegistryClient) -> None:
    subject = new_subject()
    lookups: list[Callable[[], Awaitable[object]]] = [
        lambda: client.by_version(subject, None),
        lambda: client.by_version(subject, 1),
        lambda: client.by_id(2_000_000_000),
        lambda: client.registered(subject, avro(ORDER), register=False),
    ]
    for look_up in lookups:
        with pytest.raises(SchemaAbsent):
            await look_up()


async def test_a_schema_is_registered_once_and_found_by_each_name(client: RegistryClient, settings: Settings) -> None:
    subject = new_subject()
    first = await client.registered(subject, avro(ORDER), register=True)
    second = await client.registered(subject, avro(NEWER), register=True)
    assert (first.version, second.version) == (1, 2)
    assert first.id != second.id
    async with connected(settings) as other:
        assert await other.registered(subject, avro(ORDER), register=False) == first
        assert (await other.by_version(subject, 1)).id == first.id
        latest = await other.by_version(subject, None)
        assert (latest.id, latest.version, latest.schema.type) == (second.id, 2, SchemaType.AVRO)
        assert json.loads((await other.by_id(first.id)).text) == ORDER
        with pytest.raises(SchemaAbsent):
            await other.by_version(subject, 3)


async def test_a_schema_that_is_none_is_refused(client: RegistryClient) -> None:
    with pytest.raises(SchemaUnusable):
        await client.registered(new_subject(), Schema(SchemaType.AVRO, '{"type": "recor'), register=True)


async def test_references_are_resolved(client: RegistryClient, settings: Settings) -> None:
    line, order = new_subject(), new_subject()
    a_line = {"type": "record", "name": "Line", "namespace": "shop", "fields": [{"name": "sku", "type": "string"}]}
    await client.registered(line, avro(a_line), register=True)
    fields = [{"name": "lines", "type": {"type": "array", "items": "shop.Line"}}]
    whole = avro(
        {"type": "record", "name": "Order", "namespace": "shop", "fields": fields}, Reference("shop.Line", line, 1)
    )
    registered = await client.registered(order, whole, register=True)
    async with connected(settings) as other:
        found = await other.by_id(registered.id)
        assert found.references == whole.references
        assert [(each.name, json.loads(each.schema.text)) for each in await other.imports(found)] == [
            ("shop.Line", a_line)
        ]


async def test_types_are_told(client: RegistryClient) -> None:
    assert set(await client.types()) >= {"AVRO", "JSON", "PROTOBUF"}


# ------------------------------------------------------------------------------------- what is written is read again


def encoder_of(client: RegistryClient, settings: Settings, key: SchemaRule | None, value: SchemaRule) -> Encoder:
    rules = Rules((TopicRule("orders", registry=RegistryRule(key, value)),))
    return Encoder(client, settings, rules, Telemetry())


def an_event(value: object, key: str | None = None) -> Event:
    record_key = None if key is None else key.encode()
    return event_of("k", event_id("k"), "orders", record_key, json.dumps(value).encode(), [])


async def encoded(client: RegistryClient, settings: Settings, rule: SchemaRule, value: object) -> bytes:
    event = an_event(value)
    await encoder_of(client, settings, None, rule).encode(event, DEADLINE)
    assert event.value is not None
    return event.value


def context(field: MessageField = MessageField.VALUE) -> SerializationContext:
    return SerializationContext("orders", field)


async def test_avro_is_read_by_another_library(
    client: RegistryClient, settings: Settings, readers: SchemaRegistryClient
) -> None:
    key, value = new_subject(), new_subject()
    await client.registered(key, avro("string"), register=True)
    await client.registered(value, avro(NEWER), register=True)
    event = an_event({"total": 12.5, "lines": ["tea", "cup"], "note": {"string": "soon"}}, "customer-7")
    await encoder_of(client, settings, SchemaRule(subject=key), SchemaRule(subject=value)).encode(event, DEADLINE)
    read = AvroDeserializer(readers)
    assert read(event.value, context()) == {"total": 12.5, "lines": ["tea", "cup"], "note": "soon", "priority": 3}
    assert read(event.record_key, context(MessageField.KEY)) == "customer-7"


async def test_a_json_schema_is_read_by_another_library(
    client: RegistryClient, settings: Settings, readers: SchemaRegistryClient
) -> None:
    subject = new_subject()
    text = json.dumps({"title": "Order", "type": "object", "properties": {"total": {"type": "number"}}})
    await client.registered(subject, Schema(SchemaType.JSON, text), register=True)
    content = await encoded(client, settings, SchemaRule(subject=subject), {"total": 12.5})
    assert content[5:] == b'{"total": 12.5}'
    assert JSONDeserializer(None, schema_registry_client=readers)(content, context()) == {"total": 12.5}


async def registered_proto(client: RegistryClient) -> tuple[str, Registered]:
    line, order = new_subject(), new_subject()
    await client.registered(line, Schema(SchemaType.PROTOBUF, LINE_PROTO), register=True)
    whole = Schema(SchemaType.PROTOBUF, ORDER_PROTO, (Reference("line.proto", line, 1),))
    return order, await client.registered(order, whole, register=True)


async def test_protobuf_is_read_by_another_library(client: RegistryClient, settings: Settings) -> None:
    subject, registered = await registered_proto(client)
    pool = descriptor_pool.DescriptorPool()
    compiled = await protoc.compiled(ORDER_PROTO, await client.imports(registered.schema))
    for file in FileDescriptorSet.FromString(compiled).file:
        pool.Add(file)
    values: list[tuple[str, dict[str, object], bytes]] = [
        ("shop.Other", {"x": "y"}, b"\x00"),  # the first message has a short form
        ("shop.Order", {"total": 2.5, "lines": [{"sku": "a"}], "at": "2026-11-26T15:00:00Z"}, b"\x02\x02"),
        ("shop.Order.Detail", {"text": "t"}, b"\x04\x02\x00"),
    ]
    for name, value, indexes in values:
        content = await encoded(client, settings, SchemaRule(subject=subject, message=name), value)
        assert content[:1] + content[5 : 5 + len(indexes)] == b"\x00" + indexes
        message = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
        read = ProtobufDeserializer(message, {"use.deprecated.format": False})
        (field, wanted), *_ = value.items()
        assert getattr(read(content, context()), field) == wanted
