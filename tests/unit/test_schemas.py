"""Schemas of the rules: which topic has which, what they refuse, and schemas that are none."""

import json
import re
from pathlib import Path

import pytest

from service.errors import SCHEMA_MISMATCH, Problem
from service.event import Event, parse_event
from service.schemas import Schemas
from service.shared import Rules, SettingsError

ORDER = {
    "type": "object",
    "required": ["total"],
    "properties": {"total": {"type": "number", "minimum": 0}, "lines": {"items": {"type": "string"}}},
}
RULES = """
[[topics]]
pattern = "orders.draft"
[[topics]]
pattern = "orders.*"
schema = "schemas/order.json"
"""


@pytest.fixture
def schemas(tmp_path: Path) -> Schemas:
    return schemas_of(tmp_path, json.dumps(ORDER))


def schemas_of(folder: Path, schema: str) -> Schemas:
    (folder / "schemas").mkdir(exist_ok=True)
    (folder / "schemas" / "order.json").write_text(schema)
    rules = folder / "rules.toml"
    rules.write_text(RULES)
    return Schemas(Rules.read(str(rules)))


def event(value: bytes, topic: bytes = b"orders.eu") -> Event:
    return parse_event("k", b'{"topic": "%b", "key": "c", %b}' % (topic, value))


@pytest.mark.parametrize(
    ("value", "topic"),
    [
        (b'"value": {"total": 12.5, "lines": ["tea"]}', b"orders.eu"),
        (b'"value_base64": "eyJ0b3RhbCI6MX0="', b"orders.eu"),
        (b'"value": null', b"orders.eu"),
        (b'"value": 1', b"orders.draft"),
        (b'"value": 1', b"other"),
    ],
    ids=["value", "base64", "tombstone", "the first rule counts", "no rule"],
)
def test_what_a_schema_allows(schemas: Schemas, value: bytes, topic: bytes) -> None:
    schemas.check(event(value, topic))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (b'"value": {}', 'value: "total" is a required property'),
        (b'"value": {"total": "x"}', 'value.total: "x" is not of type "number"'),
        (b'"value": {"total": 1, "lines": ["a", 2]}', r'value.lines\[1\]: 2 is not of type "string"'),
        (b'"value": 7', 'value: 7 is not of type "object"'),
        (b'"value_base64": "AAEC"', "value: orders.eu has a schema and takes JSON only"),
        (b'"value_base64": "TmFO"', "has NaN, which is no JSON number"),
        (b'"value_base64": "eyJ0b3RhbCI6MSwidG90YWwiOjJ9"', "has the name 'total' twice"),
        (b'"value": 1' + 5_000 * b"0", "takes JSON only"),
    ],
    ids=["missing", "type", "place", "whole", "bytes", "NaN", "a name twice", "5,001 digits"],
)
def test_what_it_does_not_is_told_with_its_place(schemas: Schemas, value: bytes, named: str) -> None:
    with pytest.raises(Problem, match=named) as caught:
        schemas.check(event(value))
    assert caught.value.kind is SCHEMA_MISMATCH


@pytest.mark.parametrize(
    "schema",
    ["{", '{"type": "nonsense"}', '{"$ref": "http://127.0.0.1:1/other.json"}', "[]"],
    ids=["no JSON", "no type", "of another document", "no schema"],
)
def test_a_schema_that_is_none_stops_the_start(tmp_path: Path, schema: str) -> None:
    with pytest.raises(SettingsError) as told:
        schemas_of(tmp_path, schema)
    (line,) = str(told.value).splitlines()
    assert re.search(r"^FENCEPOST_RULES: schema .*order.json cannot be used: .*; name a file", line)


def test_a_schema_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        Schemas(Rules.parse('[[topics]]\npattern = "a"\nschema = "gone.json"', str(tmp_path / "rules.toml")))
