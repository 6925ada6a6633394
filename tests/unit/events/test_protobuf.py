"""Tests JSON by Protobuf schemas: what is read back, the indexes of messages, and where a value does not fit."""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry.confluent import meta_pb2
from confluent_kafka.schema_registry.confluent.type import decimal_pb2, variant_pb2
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from service.events.avro import Misfit
from service.events.protobuf import ProtobufSchema
from service.registry import protoc, well_known
from service.registry.schema import Import, RegistryAway, Schema, SchemaType, SchemaUnusable

TEXT = """
syntax = "proto3";
package shop;
import "line.proto";
message Order {
  message A { message B { string text = 1; } }
  message C { int64 n = 1; }
  double total = 1;
  repeated Line lines = 2;
  bytes raw = 3;
  C c = 4;
  map<string, C> by_name = 5;
}
message Other { string x = 1; }
"""
LINE = Import("line.proto", Schema(SchemaType.PROTOBUF, 'syntax = "proto3"; message Line { int32 count = 1; }'))


async def test_messages_have_indexes_and_are_read_back() -> None:
    compiled = await protoc.compiled(TEXT, [LINE])
    for message, indexes, value, content in (
        ("", b"\x00", {"total": 1.5}, b"\x09" + b"\x00" * 6 + b"\xf8\x3f"),
        ("shop.Other", b"\x02\x02", {"x": "a"}, b"\x0a\x01a"),
        ("shop.Order.C", b"\x04\x00\x02", {"n": "9007199254740993"}, b"\x08\x81\x80\x80\x80\x80\x80\x80\x10"),
        ("shop.Order.A.B", b"\x06\x00\x00\x00", {"text": "t"}, b"\x0a\x01t"),
    ):
        schema = ProtobufSchema(compiled, message)
        assert (schema.name, schema.indexes) == (message or "shop.Order", indexes)
        assert schema.encode(json.loads(json.dumps(value))) == content


@pytest.mark.parametrize(
    ("value", "path", "why"),
    [
        ({"lines": [{"count": 1}, {"count": 1.5}]}, ["lines", 1, "count"], "integer: 1.5"),
        ({"lines": [{"count": "x"}]}, ["lines", "count"], "int"),
        ({"totl": 1}, ["totl"], "shop.Order has no such field"),
        ({"c": {"m": 1}}, ["c", "m"], "shop.Order.C has no such field"),
        ({"lines": [{}, {"m": 1}]}, ["lines", 1, "m"], "Line has no such field"),
        ({"raw": 1}, ["raw"], "int"),
        ({"total": []}, ["total"], "list"),
        ({"total": 10**310}, [], "a number is beyond the type of its field"),
        ([], [], "an object is wanted, for shop.Order"),
        (1, [], "an object is wanted"),
        ({"c": []}, ["c"], "an object is wanted"),
        ({"lines": {}}, ["lines"], "an array is wanted"),
        ({"lines": [[]]}, ["lines", 0], "an object is wanted"),
        ({"byName": []}, ["byName"], "for a map"),
        ({"by_name": {"a": []}}, ["by_name", "a"], "an object is wanted"),
    ],
)
async def test_a_value_that_does_not_fit_names_the_path(value: object, path: list[object], why: str) -> None:
    with pytest.raises(Misfit, match=why) as caught:
        ProtobufSchema(await protoc.compiled(TEXT, [LINE])).encode(value)
    assert [*reversed(caught.value.path)] == path


@pytest.mark.parametrize("message", ["shop.None", "Line"])
async def test_messages_that_the_schema_does_not_have(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProtobufSchema(await protoc.compiled(TEXT, [LINE]), message)


PRICED = """
syntax = "proto3";
package shop;
import "confluent/meta.proto";
import "confluent/type/decimal.proto";
import "google/protobuf/timestamp.proto";
option (confluent.file_meta).doc = "prices";
message Price {
  option (confluent.message_meta) = { params: [{ key: "a", value: "b" }] };
  confluent.type.Decimal amount = 1 [(confluent.field_meta) = { tags: ["PII"], rules: [{ name: "r", expr: "true" }] }];
  map<string, confluent.type.Decimal> by_currency = 2;
  google.protobuf.Timestamp at = 3;
}
"""


async def test_the_files_that_confluent_s_registry_brings_are_imported() -> None:
    """They are read by the library that their own vendor's files are compiled for."""
    schema = ProtobufSchema(await protoc.compiled(PRICED, []))
    amount = {"value": "MDk=", "precision": 5, "scale": 2}
    encoded = schema.encode({"amount": amount, "by_currency": {"EUR": amount}, "at": "1970-01-01T00:00:01Z"})
    assert encoded[:2] == b"\x0a\x08"
    theirs: Any = message_factory.GetMessageClass(decimal_pb2.DESCRIPTOR.message_types_by_name["Decimal"])
    decimal = theirs.FromString(encoded[2:10])
    assert (decimal.value, decimal.precision, decimal.scale) == (b"09", 5, 2)
    with pytest.raises(Misfit, match="no such field") as caught:
        schema.encode({"amount": {"unscaled": 1}})
    assert [*reversed(caught.value.path)] == ["amount", "unscaled"]


@pytest.mark.parametrize("module", [meta_pb2, decimal_pb2, variant_pb2])
async def test_a_well_known_file_is_its_vendor_s(module: Any) -> None:
    """But for the options that only generated code needs, and the names of fields in JSON, which follow from others."""
    name = module.DESCRIPTOR.name
    compiled = await protoc.compiled(well_known.FILES[name], [])
    ours = FileDescriptorSet.FromString(compiled).file[-1]
    ours.name = name
    theirs = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(theirs)
    theirs.ClearField("options")
    without_json_names = re.sub(r" *json_name: .*\n", "", str(ours))
    assert without_json_names == str(theirs)


async def test_a_reference_precedes_a_well_known_file_of_its_name() -> None:
    own = 'syntax = "proto3"; package confluent.type; message Decimal { string text = 1; }'
    compiled = await protoc.compiled(
        'syntax = "proto3"; import "confluent/type/decimal.proto"; message M { confluent.type.Decimal d = 1; }',
        [Import("confluent/type/decimal.proto", Schema(SchemaType.PROTOBUF, own))],
    )
    assert ProtobufSchema(compiled).encode({"d": {"text": "1"}}) == b"\x0a\x03\x0a\x011"


async def test_two_schemas_may_have_messages_of_one_name() -> None:
    """Each has a pool of its own."""
    older = ProtobufSchema(await protoc.compiled('syntax = "proto3"; message M { string a = 1; }', []))
    newer = ProtobufSchema(await protoc.compiled('syntax = "proto3"; message M { int32 b = 1; }', []))
    assert (older.encode({"a": "x"}), newer.encode({"b": 1})) == (b"\x0a\x01x", b"\x08\x01")


@pytest.mark.parametrize(
    ("text", "imports", "why"),
    [
        ("message {", [], "protoc refuses it: 1:9: "),
        (TEXT, [], "line.proto"),
        ("", [Import("../x.proto", LINE.schema)], "no Protobuf file with a relative path"),
        ("", [Import("/x.proto", LINE.schema)], "no Protobuf file with a relative path"),
        ("", [Import("a", LINE.schema), Import("a/b", LINE.schema)], "cannot be written"),
        ("", [Import(protoc.MAIN, LINE.schema)], "reserved"),
        ("", [Import("a", Schema(SchemaType.AVRO, ""))], "no Protobuf file"),
    ],
)
async def test_schemas_that_cannot_be_compiled(text: str, imports: list[Import], why: str) -> None:
    with pytest.raises(SchemaUnusable, match=why):
        await protoc.compiled(text, imports)


async def test_a_compiler_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protoc, "COMPILE_S", 0.001)
    with pytest.raises(RegistryAway, match="did not compile it within"):
        await protoc.compiled(TEXT, [LINE])


async def test_without_a_folder_that_can_be_written_the_schema_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", none)
    with pytest.raises(RegistryAway, match="protoc cannot run: No usable temporary directory found: let the process"):
        await protoc.compiled(TEXT, [LINE])


async def test_a_compiler_that_is_killed_refuses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(RegistryAway, match="protoc ended with -9"):
        await protoc.compiled(TEXT, [LINE])
