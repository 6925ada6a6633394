"""Tests the parsing of the records of Confluent's produce API: the events that they are, and the refusals."""

import base64
import json
from typing import Any

import pytest

from service import native
from service.contract.wire.ids import event_id, fingerprint, member_id
from service.core.problems import Problem
from service.core.settings import EVENT_BYTES_MAX
from service.events.event import BATCH_EVENTS_MAX, Event, parse_event
from service.events.produce import COMPACTED_BYTES, Format, ProduceProblem, RequestKey
from service.events.produce_v2 import parse_v2, v2_event, v2_format
from service.events.produce_v3 import V3Event, decode_long_v3, decode_v3, v3_event
from service.events.strict_json import LONG_BYTES

KEY = RequestKey("k", "shop")


async def v2(record: str, format: Format = Format.JSON, partition: int | None = None) -> Event:
    (raw,), _ = await parse_v2(b'{"records":[%b]}' % record.encode(), Format.JSON)
    return v2_event(raw, 3, format, "orders", partition, KEY, None)


def v3(key: RequestKey = KEY, /, **fields: Any) -> V3Event:
    return v3_event(decode_v3(json.dumps(fields).encode()), 3, "orders", key, None)


def data(type: str, content: object) -> dict[str, object]:
    return {"type": type, "data": content}


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


async def refusal(record: str, format: Format = Format.JSON) -> Problem:
    with pytest.raises(Problem) as caught:
        await v2(record, format)
    return caught.value


def v3_refusal(key: RequestKey = KEY, /, **fields: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        v3(key, **fields)
    return caught.value


async def test_a_record_is_the_event_that_post_events_would_make_of_its_content() -> None:
    body = b'{"topic":"orders","key":"customer-7","value":{"n": 1},"headers":{"a":"b"},"partition":2}'
    posted = parse_event("k", body, scope="shop")
    record = v3(
        partition_id=2,
        headers=[{"name": "a", "value": b64(b"b")}],
        key=data("STRING", "customer-7"),
        value={"type": "JSON", "data": {"n": 1}},
    ).event
    for name in ("topic", "record_key", "value", "headers", "partition", "fp", "size", "entry_bytes"):
        assert getattr(record, name) == getattr(posted, name)
    assert (record.key, record.id) == ("k", member_id("k", 3, "shop"))


# ------------------------------------------------------------------------------------------------------------------ v2


@pytest.mark.parametrize("value", ['{"a": 1,  "b":[ ]}', '"x\\u00e9"', "1.50", "true", '""', "[1, 2]"])
async def test_a_json_value_is_written_as_it_was_sent(value: str) -> None:
    event = await v2(f'{{"value": {value}}}')
    assert event.value == value.encode()
    assert event.fp == fingerprint("orders", None, None, [], value.encode())


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ('"k"', '"k"'),
        ('"\\u00e9\\/"', '"é/"'),
        ('{"a": 1, "b" : [1, 2]}', '{"a":1,"b":[1,2]}'),
        ("1.50", "1.50"),
        ("-7", "-7"),
        ("[1e400]", "[1e400]"),
        ("true", "true"),
    ],
)
async def test_a_json_key_is_written_compactly_so_that_equal_keys_have_one_partition(key: str, written: str) -> None:
    assert (await v2(f'{{"key": {key}, "value": 1}}')).record_key == written.encode()


async def test_a_long_json_key_is_written_as_it_was_sent() -> None:
    key = f'["{"x" * COMPACTED_BYTES}" ]'
    assert (await v2(f'{{"key":{key},"value":1}}')).record_key == key.encode()


@pytest.mark.parametrize(
    ("text", "written"), [("Zm9v", b"foo"), ("", b""), ("Zg==", b"f"), ("Zg", b"f"), ("+/8=", b"\xfb\xff")]
)
async def test_binary_is_base64_whose_padding_may_be_missing(text: str, written: bytes) -> None:
    event = await v2(json.dumps({"key": text, "value": text}), Format.BINARY)
    assert (event.record_key, event.value) == (written, written)


@pytest.mark.parametrize("text", ["fooba", "not base64", "_-8=", "Zm9v\n", "Zg===", "é"])
async def test_what_is_not_base64_is_refused(text: str) -> None:
    problem = await refusal(json.dumps({"value": text}), Format.BINARY)
    assert (problem.kind.status, problem.detail) == (400, "value: use standard base64 (RFC 4648, section 4)")


@pytest.mark.parametrize("value", ["1", '{"a":1}', "true", "[]"])
@pytest.mark.parametrize("format", [Format.BINARY, Format.STRING])
async def test_a_string_is_needed_where_the_format_says_so(value: str, format: Format) -> None:
    problem = await refusal(f'{{"value":{value}}}', format)
    assert problem.detail.startswith("value: send a string")


async def test_text_of_the_strimzi_bridge_is_utf8() -> None:
    event = await v2('{"key":"\\u00e9","value":"a\\"b"}', Format.STRING)
    assert (event.record_key, event.value) == ("é".encode(), b'a"b')


@pytest.mark.parametrize("record", ['{"key":"a","value":null}', '{"key":"a"}'])
async def test_a_null_value_is_a_tombstone(record: str) -> None:
    assert (await v2(record)).value is None


async def test_a_tombstone_needs_a_key() -> None:
    assert "tombstone" in (await refusal('{"value":null}')).detail


@pytest.mark.parametrize(("own", "path", "used"), [("1", 2, 1), ('"1"', 2, 1), ("null", 2, 2), ("null", None, None)])
async def test_the_partition_of_a_record_precedes_that_of_the_path(
    own: str, path: int | None, used: int | None
) -> None:
    assert (await v2(f'{{"value":1,"partition":{own}}}', Format.JSON, path)).partition == used


async def test_a_v2_record_may_have_headers_and_a_timestamp_as_with_the_strimzi_bridge() -> None:
    event = await v2('{"value":1,"headers":[{"key":"a","value":"Yg=="},{"key":"c"}],"timestamp":1612552482123}')
    assert (event.headers, event.timestamp) == ([("a", b"b"), ("c", b"")], 1_612_552_482_123)
    keyed = await v2('{"value":1,"headers":[{"key":"idempotency-key","value":"b3du"}]}')
    assert (keyed.key, keyed.id, keyed.headers) == ("own", event_id("own", "shop"), [])
    for wrong in ('"timestamp":-1', '"headers":[{"name":"a"}]', '"headers":[{"key":"fencepost","value":""}]'):
        assert (await refusal(f'{{"value":1,{wrong}}}')).kind.status == 400


async def test_a_negative_partition_is_not_found() -> None:
    problem = await refusal('{"value":1,"partition":-1}')
    assert isinstance(problem, ProduceProblem)
    assert (problem.status, problem.error_code) == (404, 40402)


@pytest.mark.parametrize(
    "body", [b"", b"null\n", b"{}", b'{"records":[]}', b'{"records":null}', b'{"value_schema_id":1}']
)
async def test_a_body_without_records_is_unprocessable(body: bytes) -> None:
    with pytest.raises(ProduceProblem) as caught:
        await parse_v2(body, Format.JSON)
    assert (caught.value.status, caught.value.error_code) == (422, 422)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"foo":"bar"}', 400),
        (b'{"records":"an array"}', 400),
        (b"foobar", 400),
        (b"1", 400),
        (b'{"records":[{"value":NaN}]}', 400),
        (b'{"records":[%b]}' % b",".join([b"{}"] * (BATCH_EVENTS_MAX + 1)), 413),
        (b'{"records":[%b]}' % b",".join([b'{"value":1 }'] * (BATCH_EVENTS_MAX + 1)), 413),
    ],
)
async def test_a_malformed_body_is_refused(body: bytes, status: int) -> None:
    with pytest.raises(Problem) as caught:
        await parse_v2(body, Format.JSON)
    assert caught.value.kind.status == status


@pytest.mark.parametrize("record", ['{"valur":1}', '["value"]', '"value"', '{"value":1,"partition":"x"}'])
async def test_a_malformed_record_is_refused(record: str) -> None:
    assert (await refusal(record)).kind.status == 400


async def test_a_long_body_gives_the_same_records() -> None:
    value = json.dumps({"x": "y" * 1_000})
    body = b'{"value_schema_id":null,"records":[%b]}' % b",".join([b'{"value":%b}' % value.encode()] * 100)
    assert len(body) > LONG_BYTES
    records, _ = await parse_v2(body, Format.JSON)
    events = [v2_event(raw, n, Format.JSON, "orders", None, KEY, None) for n, raw in enumerate(records)]
    assert [event.value for event in events] == [value.encode()] * 100
    assert [event.id for event in events] == [member_id("k", n, "shop") for n in range(100)]


def test_the_format_of_a_v2_body_is_in_its_media_type() -> None:
    assert v2_format("application/vnd.kafka.json.v2+json") is Format.JSON
    assert v2_format("application/vnd.kafka.binary.v2+json") is Format.BINARY
    assert v2_format("application/json") is None
    for name in ("avro", "protobuf", "jsonschema"):
        with pytest.raises(ProduceProblem, match="no schema registry is configured") as caught:
            v2_format(f"application/vnd.kafka.{name}.v2+json")
        assert (caught.value.status, caught.value.error_code) == (422, 42206)


# ------------------------------------------------------------------------------------------------------------------ v3


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (data("BINARY", "Zm9v"), b"foo"),
        (data("STRING", "é"), "é".encode()),
        (data("STRING", ""), b""),
        (data("JSON", [1, "é"]), b'[1, "\\u00e9"]'),
        (data("JSON", "x"), b'"x"'),
    ],
)
def test_v3_values(given: dict[str, object], written: bytes) -> None:
    record = v3(value=given)
    assert record.event.value == written
    assert (record.key_format, record.value_format) == (None, Format(given["type"]))


@pytest.mark.parametrize("type", ["BINARY", "JSON", "STRING"])
def test_null_data_is_no_key_and_no_value(type: str) -> None:
    record = v3(key=data("STRING", "a"), value=data(type, None))
    assert (record.event.value, record.value_format) == (None, Format(type))
    assert v3(key=data(type, None), value=data("STRING", "a")).event.record_key is None


@pytest.mark.parametrize(
    ("timestamp", "ms"),
    [
        ("2021-02-05T19:14:42Z", 1_612_552_482_000),
        ("2021-02-05T19:14:42.123456789Z", 1_612_552_482_123),
        ("2021-02-05T21:14:42.5+02:00", 1_612_552_482_500),
        ("1970-01-01T00:00:01Z", 1_000),
        (1_612_552_482, 1_612_552_482_000),
        (1.5, 1_500),
        (None, None),
    ],
)
def test_timestamps(timestamp: object, ms: int | None) -> None:
    assert v3(value=data("STRING", "a"), timestamp=timestamp).event.timestamp == ms


@pytest.mark.parametrize("timestamp", ["yesterday", "2021-02-05T19:14:42", "1969-12-31T23:59:59Z", -1, 1e300, "", []])
def test_a_timestamp_that_is_none_is_refused(timestamp: object) -> None:
    assert v3_refusal(value=data("STRING", "a"), timestamp=timestamp).detail.startswith("timestamp: ")


def test_headers_keep_their_order_and_may_repeat_a_name() -> None:
    headers = [("b", b"1"), ("a", b"\xff"), ("b", b"2")]
    given = [{"name": name, "value": b64(content)} for name, content in headers]
    assert v3(value=data("STRING", "a"), headers=[*given, {"name": "c"}]).event.headers == [*headers, ("c", b"")]


@pytest.mark.parametrize("name", ["idempotency-key", "Idempotency-Key"])
def test_a_record_header_is_the_key_of_its_record_as_with_post_events(name: str) -> None:
    """Also where the request has a key, or must have one."""
    header = {"name": name, "value": b64(b"own 1")}
    for key in (KEY, RequestKey(None, "shop")):
        event = v3(key, headers=[header, {"name": "a", "value": ""}], value=data("STRING", "a")).event
        assert (event.key, event.id, event.headers) == ("own 1", event_id("own 1", "shop"), [("a", b"")])


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([("idempotency-key", b"")], "invalid-key"),
        ([("idempotency-key", b"\xe9")], "invalid-key"),
        ([("idempotency-key", b"x" * 256)], "invalid-key"),
        ([("idempotency-key", b"a"), ("Idempotency-Key", b"b")], "invalid-key"),
        ([("Fencepost", b"a")], "invalid-event"),
        ([("a", b"b")] * 101, "invalid-event"),
    ],
)
def test_headers_that_are_refused(headers: list[tuple[str, bytes]], code: str) -> None:
    given = [{"name": name, "value": b64(content)} for name, content in headers]
    assert v3_refusal(headers=given, value=data("STRING", "a")).kind.code == code


def test_a_record_without_any_key_is_refused_where_the_rule_says_so() -> None:
    problem = v3_refusal(RequestKey(None, ""), value=data("STRING", "a"))
    assert problem.kind.code == "missing-key"
    assert "Idempotency-Key" in problem.detail


@pytest.mark.parametrize(
    "fields",
    [
        {"records": {"subject": "foobar"}},
        {"value": {"type": "binary", "data": "Zm9v"}},
        {"value": {"type": "STRING"}},
        {"value": "a"},
        {"value": data("STRING", 1)},
        {"value": data("BINARY", 1)},
        {"headers": [{"value": ""}], "value": data("STRING", "a")},
        {"headers": [{"name": "a", "value": "?"}], "value": data("STRING", "a")},
        {"partition_id": "x", "value": data("STRING", "a")},
        {},
    ],
)
def test_malformed_v3_records(fields: dict[str, object]) -> None:
    assert v3_refusal(**fields).kind.status == 400


@pytest.mark.parametrize(
    "value",
    [
        {"data": "a"},
        {"schema_id": 1, "data": "a"},
        {"schema_version": "latest", "data": "a"},
        {"type": "AVRO", "schema": '"string"', "data": "a"},
        {"type": "PROTOBUF", "data": "a"},
        {"type": "JSON", "subject": "s", "data": "a"},
    ],
)
def test_a_schema_needs_a_registry(value: dict[str, object]) -> None:
    problem = v3_refusal(value=value)
    assert isinstance(problem, ProduceProblem)
    assert (problem.status, problem.error_code) == (422, 42206)
    assert "no schema registry is configured" in problem.detail


def test_a_record_is_bounded() -> None:
    assert v3_refusal(value=data("BINARY", b64(bytes(EVENT_BYTES_MAX + 3)))).kind.status == 413
    assert v3_refusal(value=data("STRING", "x" * (EVENT_BYTES_MAX + 1))).kind.status == 413


async def test_a_long_record_is_parsed_as_a_short_one() -> None:
    text = json.dumps({"key": data("STRING", "a"), "value": data("STRING", "x" * LONG_BYTES)}).encode()
    assert await decode_long_v3(text) == decode_v3(text)


@pytest.mark.skipif(not native.COMPILED, reason="the compiled code counts them before they are decoded")
async def test_the_headers_of_a_long_record_are_counted_before_it_is_decoded() -> None:
    many = json.dumps({"headers": [{"name": "a", "value": "x" * 800}] * 101}).encode()
    with pytest.raises(Problem, match="headers: at most 100"):
        await decode_long_v3(many)
