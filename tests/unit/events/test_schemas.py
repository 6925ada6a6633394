"""Tests the schemas of the rules: which topic has which, refusals, and invalid schemas."""

import json
import re
import threading
from pathlib import Path

import pytest

from service import native
from service.contract import Rules, SettingsError
from service.core.problems import SCHEMA_MISMATCH, Problem
from service.events import schemas as module
from service.events.event import Event, parse_event
from service.events.schemas import LONG_VALUE_BYTES, Schemas

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
def test_a_value_that_its_schema_allows_is_accepted(schemas: Schemas, value: bytes, topic: bytes) -> None:
    schemas.check_now(event(value, topic))


def test_a_topic_has_the_schema_of_its_first_rule(schemas: Schemas) -> None:
    assert [schemas.has_one_for(topic) for topic in ("orders.eu", "orders.draft", "other")] == [True, False, False]
    assert not Schemas(Rules()).has_one_for("orders.eu")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (b'"value": {}', 'value: "total" is a required property'),
        (b'"value": {"total": "x"}', 'value.total: "x" is not of type "number"'),
        (b'"value": {"total": 1, "lines": ["a", 2]}', r'value.lines\[1\]: 2 is not of type "string"'),
        (b'"value": 7', 'value: 7 is not of type "object"'),
        (b'"value_base64": "AAEC"', "value: orders.eu has a schema and takes JSON only"),
        (b'"value_base64": "TmFO"', "is not JSON: expected value at line 1 column 1"),
        (b'"value_base64": "eyJ0b3RhbCI6MSwidG90YWwiOjJ9"', "has the name 'total' twice"),
        pytest.param(
            b'"value": {"total": 1' + 5_000 * b"0" + b"}",
            "value: its numbers have more digits than can be compared",
            marks=pytest.mark.skipif(not native.COMPILED, reason="jiter takes no integer of more than 4,300 digits"),
        ),
        (b'"value": {"total": 1e99999}', "more digits than can be compared"),
        (b'"value": {"total": 1e9999999999999999999999}', "more digits than can be compared"),
        (b'"value": {"total": 1, "more": [%b]}' % b",".join(100 * [b"1e-900"]), "more digits than can be compared"),
        (b'"value": {"total": -1e-400}', "-1e-400 is less than the minimum of 0"),
    ],
    ids=[
        "missing",
        "type",
        "place",
        "whole",
        "bytes",
        "NaN",
        "a name twice",
        "5,001 digits",
        "far",
        "farther",
        "many",
        "negative",
    ],
)
def test_a_value_that_its_schema_does_not_allow_is_refused_with_its_place(
    schemas: Schemas, value: bytes, named: str
) -> None:
    with pytest.raises(Problem, match=named) as caught:
        schemas.check_now(event(value))
    assert caught.value.kind is SCHEMA_MISMATCH


@pytest.mark.parametrize(
    ("rule", "number", "allowed"),
    [
        ({"type": "number"}, "1e400", True),
        ({"type": "number", "exclusiveMinimum": 0}, "1e-400", True),
        ({"type": "integer"}, "1e400", True),
        ({"maximum": 1e300}, "1e400", False),
        ({"maximum": 0.3}, "0.30000000000000000001", False),
        ({"maximum": 0.3}, "0.3", True),
        ({"maximum": 0.3}, "3e-1", True),
        ({"const": 9007199254740993}, "9007199254740993", True),
        ({"const": 9007199254740993}, "9007199254740992", False),
        ({"const": 9007199254740993}, "9007199254740993.0", True),
        ({"multipleOf": 0.01}, "12.34", True),
        ({"multipleOf": 0.01}, "123456789012345678901234567890.12", True),
        ({"multipleOf": 0.01}, "12.345", False),
        ({"enum": [0.1]}, "0.10", True),
        ({"enum": [0.1]}, "0.1000000000000000055511151231257827", False),
        ({"type": "integer"}, "1" + 3_999 * "0", True),
        ({"minimum": 0}, "0e5", True),
    ],
)
def test_a_number_is_compared_as_it_is_written(tmp_path: Path, rule: object, number: str, allowed: bool) -> None:
    """As a double, 1e400 would be null and 1e-400 would be 0."""
    schemas = schemas_of(tmp_path, json.dumps({"properties": {"of": rule}}))
    asked = event(b'"value": {"of": %b}' % number.encode())
    if allowed:
        schemas.check_now(asked)
        return
    with pytest.raises(Problem) as caught:
        schemas.check_now(asked)
    assert caught.value.kind is SCHEMA_MISMATCH


def test_a_bound_is_read_as_it_is_written(tmp_path: Path) -> None:
    schemas = schemas_of(tmp_path, '{"properties": {"of": {"maximum": 1e400, "exclusiveMinimum": 1e-400}}}')
    schemas.check_now(event(b'"value": {"of": 1e399}'))
    for number in (b"1e401", b"1e-401"):
        with pytest.raises(Problem, match="1e"):
            schemas.check_now(event(b'"value": {"of": %b}' % number))


MANY = b"[" + b",".join([b"1"] * 20_000) + b"]"


@pytest.mark.parametrize(
    ("rule", "value", "why"),
    [
        ({"items": {"type": "string"}}, MANY, "value: it is not allowed .* up to 16384 bytes"),
        ({"items": {"type": "string"}}, MANY[:10_000] + b"]", r"value\[0\]: 1 is not of type"),
        ({"oneOf": [{"items": {"type": "string"}}] * 5}, MANY[:1_998] + b"]", r"value: \[1,1,1"),
        ({"oneOf": [{"items": {"type": "string"}}] * 5}, MANY[:10_000] + b"]", "value: it is not .* up to 2000 bytes"),
    ],
)
async def test_a_value_is_explained_where_that_does_not_take_long(
    tmp_path: Path, rule: object, value: bytes, why: str
) -> None:
    """Explaining all violations of a value of 1 MB would take seconds."""
    schemas = schemas_of(tmp_path, json.dumps(rule))
    with pytest.raises(Problem, match=why) as caught:
        await schemas.check(event(b'"value": ' + value))
    assert caught.value.kind is SCHEMA_MISMATCH


async def test_a_long_value_is_checked_in_a_thread(schemas: Schemas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the exact numbers of a value of 1 MB would hold the event loop."""
    where: list[str] = []

    def noted(value: bytes) -> None:
        where.append(threading.current_thread().name)

    monkeypatch.setattr(module, "check_json", noted)
    short, long = (event(b'"value": {"total": 1, "more": "%b"}' % (b"x" * size)) for size in (100, LONG_VALUE_BYTES))
    assert schemas.check_now(short)
    assert not schemas.check_now(long)
    assert where == [threading.current_thread().name]
    await schemas.check(long)
    assert where[1].startswith("long-json")


@pytest.mark.parametrize(
    "schema",
    ["{", '{"type": "nonsense"}', '{"$ref": "http://127.0.0.1:1/other.json"}', "[]"],
    ids=["no JSON", "no type", "of another document", "no schema"],
)
def test_an_invalid_schema_stops_the_start(tmp_path: Path, schema: str) -> None:
    with pytest.raises(SettingsError) as raised:
        schemas_of(tmp_path, schema)
    (line,) = str(raised.value).splitlines()
    assert re.search(r"^FENCEPOST_RULES: schema .*order.json cannot be used: .*; name a file", line)


def test_a_schema_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        Schemas(Rules.parse('[[topics]]\npattern = "a"\nschema = "gone.json"', str(tmp_path / "rules.toml")))
