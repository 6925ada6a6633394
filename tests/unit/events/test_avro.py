"""Tests JSON by Avro schemas: what is read back, where a value does not fit, and bounds."""

import json
from decimal import Decimal
from io import BytesIO
from typing import Any

import fastavro
import pytest

from service.events.avro import DEFAULTS_BYTES, AvroSchema, Misfit

TREE = {"type": "record", "name": "Tree", "fields": [{"name": "left", "type": ["null", "Tree"], "default": None}]}


def read(schema: Any, content: bytes) -> Any:
    return fastavro.schemaless_reader(BytesIO(content), fastavro.parse_schema(schema), None)


def encoded(schema: object, value: Any) -> bytes:
    return AvroSchema(json.dumps(schema), []).encode(value, len(json.dumps(value, default=str)))


def record(*fields: object) -> dict[str, object]:
    return {"type": "record", "name": "R", "namespace": "n", "fields": list(fields)}


@pytest.mark.parametrize(
    ("schema", "value", "found"),
    [
        ("null", None, None),
        ("boolean", True, True),
        ("int", -(2**31), -(2**31)),
        ("long", 2**63 - 1, 2**63 - 1),
        ("double", 1, 1.0),
        ("double", Decimal("0.12345678901234567"), 0.12345678901234567),
        ("float", 0.5, 0.5),
        ("string", "é€", "é€"),
        ("bytes", "\x00\xff", b"\x00\xff"),
        ({"type": "fixed", "name": "F", "size": 2}, "\x01\x02", b"\x01\x02"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "B"),
        ({"type": "array", "items": "long"}, [1, 2], [1, 2]),
        ({"type": "map", "values": "string"}, {"a": "b"}, {"a": "b"}),
        (["null", "string"], None, None),
        (["null", "string"], {"string": "a"}, "a"),
        (["null", "string"], "a", "a"),
        (["null", {"type": "array", "items": "int"}], {"array": [1]}, [1]),
        (["null", {"type": "array", "items": "int"}], [1], [1]),
        (["string", "long", {"type": "map", "values": "int"}], {"map": {"long": 1}}, {"long": 1}),
        (["string", "bytes"], {"bytes": "a"}, b"a"),
        ([{"type": "enum", "name": "E", "symbols": ["A"]}, "string"], {"E": "A"}, "A"),
        ([{"type": "enum", "name": "E", "symbols": ["A"]}, "string"], {"string": "A"}, "A"),
        (record({"name": "a", "type": "int"}, {"name": "b", "type": "int", "default": 7}), {"a": 1}, {"a": 1, "b": 7}),
        (record({"name": "a", "type": ["string", "null"], "default": "x"}), {}, {"a": "x"}),
        (record({"name": "a", "type": "bytes", "default": "\xff"}), {}, {"a": b"\xff"}),
        (["null", record({"name": "a", "type": "int"})], {"n.R": {"a": 1}}, {"a": 1}),
        (TREE, {"left": {"Tree": {"left": None}}}, {"left": {"left": None}}),
        (TREE, {"left": {"left": {"left": None}}}, {"left": {"left": {"left": None}}}),
        ({"type": "long", "logicalType": "timestamp-millis"}, 0, "1970-01-01 00:00:00+00:00"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}, "\x01\x00", "2.56"),
    ],
)
def test_values_are_read_back(schema: object, value: Any, found: Any) -> None:
    content = encoded(schema, value)
    got = read(schema, content)
    assert (str(got) if isinstance(found, str) and not isinstance(got, str) else got) == found


@pytest.mark.parametrize(
    ("schema", "value", "path", "why"),
    [
        ("null", 0, [], "null is wanted"),
        ("boolean", 1, [], "true or false is wanted"),
        ("int", 2**31, [], "beyond the type int"),
        ("int", True, [], "an integer is wanted"),
        ("int", 1.0, [], "an integer is wanted"),
        ("long", 2**63, [], "beyond the type long"),
        ("double", 10**400, [], "beyond the type double"),
        ("float", 1e39, [], "beyond the type float"),
        ("double", "1", [], "a number is wanted"),
        ("string", 1, [], "a string is wanted"),
        ("bytes", "€", [], "up to U\\+00FF"),
        ({"type": "fixed", "name": "F", "size": 2}, "a", [], "2 bytes are wanted, and these are 1"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "B", [], "one of A is wanted"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, ["A"], [], "one of A is wanted"),
        ({"type": "array", "items": "int"}, [1, "2"], [1], "an integer is wanted"),
        ({"type": "array", "items": "int"}, {}, [], "an array is wanted"),
        ({"type": "map", "values": "int"}, {"a": 1, "b": None}, ["b"], "an integer is wanted"),
        (["string", "long"], "a", [], "one of the types string, long"),
        (["null", "string"], 1, [], "a string is wanted"),
        (["null", "long"], {"long": "a"}, ["long"], "an integer is wanted"),
        (record({"name": "a", "type": "int"}), {}, ["a"], "it is missing"),
        (record({"name": "a", "type": "int"}), {"a": 1, "b": 2}, ["b"], "n.R has no such field"),
        (record({"name": "a", "type": "int"}), {"a": 1, "": 2, "b": 3}, [""], "n.R has no such field"),
        (record({"name": "a", "type": "int"}), [], [], "an object is wanted, for n.R"),
        (
            record({"name": "a", "type": {"type": "array", "items": TREE}}),
            {"a": [{"left": None}, {"left": {"left": 3}}]},
            ["a", 1, "left", "left"],
            "an object is wanted",
        ),
    ],
)
def test_a_value_that_does_not_fit_names_the_path(schema: object, value: Any, path: list[Any], why: str) -> None:
    with pytest.raises(Misfit, match=why) as caught:
        encoded(schema, value)
    assert [*reversed(caught.value.path)] == path


def test_schemas_refer_to_others() -> None:
    line = json.dumps({"type": "record", "name": "shop.Line", "fields": [{"name": "sku", "type": "string"}]})
    schema = AvroSchema('{"type": "array", "items": "shop.Line"}', [line])
    assert schema.encode([{"sku": "a"}], 10) == b"\x02\x02a\x00"


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, '"shop.Line"', '{"type": "recor"}', "1", "[]x", '{"type": "record"}']
)
def test_a_schema_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        AvroSchema(text, [])


def test_names_by_which_strategies_call_schemas() -> None:
    assert AvroSchema(json.dumps(record()), []).name == "n.R"
    assert AvroSchema('"string"', []).name == "string"
    assert AvroSchema('{"type": "string", "x": 1}', []).takes_text
    assert not AvroSchema('"long"', []).takes_text


SELF = record({"name": "next", "type": "n.R", "default": {}}, {"name": "a", "type": "int"})
INNER = {"type": "record", "name": "S", "fields": [{"name": "r", "type": "R", "default": {}}]}
MUTUAL = record({"name": "s", "type": INNER, "default": {}})


@pytest.mark.parametrize(
    ("schema", "value", "path", "why"),
    [
        (SELF, {"a": 1}, ["next"], "contains itself without end: send the field"),
        (SELF, {"a": 1, "next": {"a": 2}}, ["next", "next"], "contains itself without end"),
        (MUTUAL, {"s": {}}, ["s", "r"], "contains itself without end"),
        (record({"name": "a", "type": "string", "default": "\ud800"}), {}, ["a"], "no text in UTF-8: send the field"),
    ],
)
def test_defaults_that_cannot_be_encoded(schema: object, value: Any, path: list[Any], why: str) -> None:
    with pytest.raises(Misfit, match=why) as caught:
        encoded(schema, value)
    assert [*reversed(caught.value.path)] == path


def test_defaults_do_not_multiply_a_short_value() -> None:
    """A million fields that are left out would be gigabytes of defaults."""
    default = "x" * 1_000
    schema = {"type": "array", "items": record({"name": "a", "type": "string", "default": default})}
    assert len(encoded(schema, [{}] * 3)) > 3_000
    with pytest.raises(Misfit, match="much larger"):
        encoded(schema, [{}] * (DEFAULTS_BYTES // 1_000 + 1))
