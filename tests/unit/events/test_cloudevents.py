"""Tests CloudEvents 1.0: key, topic, headers and value of the event, and refusals."""

import json
import re
from typing import Any

import pytest

from service import native
from service.contract.wire.ids import event_id
from service.core.problems import INVALID_EVENT, INVALID_JSON, INVALID_KEY, TOO_LARGE, Problem
from service.events import cloudevents
from service.events.event import BATCH_EVENTS_MAX, Event

ATTRIBUTES = {
    "specversion": "1.0",
    "id": "42",
    "source": "/shop/7",
    "type": "com.example.order.made",
}


def binary(key: str | None = None, body: bytes = b"data", **attributes: str | None) -> Event:
    merged = {**ATTRIBUTES, **attributes}
    headers = [(f"ce-{name}".encode(), text.encode("latin-1")) for name, text in merged.items() if text is not None]
    return cloudevents.from_binary([(b"host", b"x"), *headers, (b"content-type", b"text/plain")], body, key)


def structured(key: str | None = None, **attributes: Any) -> Event:
    merged = {name: content for name, content in {**ATTRIBUTES, **attributes}.items() if content is not None}
    return cloudevents.from_structured(json.dumps(merged).encode(), key)


def test_a_binary_cloudevent_follows_the_kafka_binding() -> None:
    event = binary(partitionkey="c7", subject="caf%C3%A9%20%25", time="2026-11-22T03:00:00Z")
    assert (event.key, event.topic, event.record_key, event.value) == (
        "/shop/7 42",
        "com.example.order.made",
        b"c7",
        b"data",
    )
    assert dict(event.headers) == {
        "content-type": b"text/plain",
        "ce_specversion": b"1.0",
        "ce_id": b"42",
        "ce_source": b"/shop/7",
        "ce_type": b"com.example.order.made",
        "ce_partitionkey": b"c7",
        "ce_subject": "café %".encode(),
        "ce_time": b"2026-11-22T03:00:00Z",
    }
    assert event.id == event_id("/shop/7 42")


def test_structured_is_passed_on_byte_for_byte() -> None:
    body = b'{ "specversion":"1.0","id":"42","source":"/shop/7", "type":"a.b","data":{"n":1.50}, "ext":7 }'
    event = cloudevents.from_structured(body, None)
    assert (event.key, event.topic, event.record_key, event.value) == ("/shop/7 42", "a.b", None, body)
    assert event.headers == [("content-type", b"application/cloudevents+json")]


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ('"42"', "42"),
        (' "42" \t', "42"),
        (r'"my \"own\" \\ \n"', 'my "own" \\ n'),
        ('"Euro %E2%82%AC"', "Euro €"),
        ("%22quoted%22", '"quoted"'),
        (r'"%5C"', "\\"),
        ("%2541", "%41"),
        ('""', ""),
        ('5" wide', '5" wide'),
        ('"a" "b"', '"a" "b"'),
        ('"open', '"open'),
        (r'"open\"', r'"open\"'),
        ('"', '"'),
    ],
)
def test_a_quoted_header_is_unquoted_and_then_percent_decoded_once(header: str, text: str) -> None:
    """HTTP binding, section 3.1.3.2; a value that is not one quoted string stays as it is."""
    assert dict(binary(subject=header).headers)["ce_subject"] == text.encode()


def test_quoted_and_bare_attributes_make_the_same_event() -> None:
    attributes: dict[str, Any] = {name: f'"{text}"' for name, text in ATTRIBUTES.items()}
    quoted = binary(**attributes)
    assert (quoted.id, quoted.fp) == (binary().id, binary().fp)


@pytest.mark.parametrize("make", [binary, structured])
def test_a_cloudevent_takes_its_topic_and_key_from_the_headers_or_its_attributes(make: Any) -> None:
    assert make(topic="orders").topic == "orders"
    assert make("mine").key == "mine"
    assert make('"my \\"own\\" key"').key == 'my "own" key'
    assert make().fp == make().fp
    assert make().fp != make(type="other").fp


def test_binary_without_data_is_an_empty_record_and_no_tombstone() -> None:
    assert binary(body=b"").value == b""


@pytest.mark.parametrize("make", [binary, structured])
@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"specversion": "0.3"}, "specversion"),
        ({"id": ""}, "id"),
        ({"id": None}, "id"),
        ({"source": None}, "source"),
        ({"source": "a b"}, "source"),
        ({"type": None}, "type"),
        ({"type": "no topic/at all"}, "topic"),
        ({"topic": ".."}, "topic"),
        ({"time": "yesterday"}, "time: .* send it as RFC 3339 has it"),
        ({"time": "2026-11-22"}, "time"),
        ({"time": "2026-11-22T03:00:00"}, "time"),  # without a time zone
        ({"time": "2026-02-30T03:00:00Z"}, "time"),
        ({"time": "2026-11-22T24:00:00Z"}, "time"),
        ({"time": ""}, "time"),
    ],
    ids=str,
)
def test_an_invalid_binary_cloudevent_is_refused_and_names_the_attribute(
    make: Any, attributes: dict[str, str | None], named: str
) -> None:
    with pytest.raises(Problem, match=named) as caught:
        make(**attributes)
    assert caught.value.kind is INVALID_EVENT


@pytest.mark.parametrize("make", [binary, structured])
def test_a_source_and_id_that_make_no_key_need_a_header(make: Any) -> None:
    with pytest.raises(Problem, match="Idempotency-Key") as caught:
        make(id="x" * 250)
    assert caught.value.kind is INVALID_KEY
    assert make("mine", id="x" * 250).key == "mine"


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ([(b"ce-id", b"1")], "ce-id"),
        ([(b"ce-my_own", b"1")], "ce-my_own"),
        ([(b"ce-subject", b"\xe9")], "ce-subject"),
        ([(b"ce-subject", b"%ff")], "ce-subject"),
        ([(b"ce-a%d" % n, b"1") for n in range(100)], "99"),
        ([(b"ce-datacontenttype", b"text/plain")], "ce-datacontenttype: send Content-Type"),
        ([(b"ce-data", b"1")], "ce-data: send the data as the body"),
        ([(b"ce-data_base64", b"MQ==")], "ce-data_base64"),
    ],
    ids=["twice", "its name", "not ASCII", "not UTF-8", "too many", "its data's type", "its data", "and packed"],
)
def test_bad_headers_are_refused_by_name(headers: list[tuple[bytes, bytes]], named: str) -> None:
    good = [(f"ce-{name}".encode(), text.encode()) for name, text in ATTRIBUTES.items()]
    with pytest.raises(Problem, match=named):
        cloudevents.from_binary([*good, *headers], b"", None)


@pytest.mark.parametrize(
    ("members", "detail"),
    [
        ({"data": 1, "data_base64": "MQ=="}, "data_base64: send one of data and data_base64"),
        ({"data": None, "data_base64": ""}, "data_base64: send one of data and data_base64"),
        ({"data_base64": 1}, "data_base64: Expected `str | null`, got `int`"),
        ({"data_base64": "MQ"}, "data_base64: it is no base64"),
        ({"data_base64": "M-_="}, "data_base64: it is no base64"),
        ({"data_base64": "MQ==\n"}, "data_base64: it is no base64"),
        ({"data_base64": "é"}, "data_base64: it is no base64"),
        ({"time": 1}, "time: Expected `str | null`, got `int`"),
        ({"Subject": "a"}, "Subject: use 1 to 64 lower-case letters and digits"),
        ({"my_own": 1}, "my_own: use"),
        ({"my-own": 1}, "my-own: use"),
        ({"é": 1}, "é: use"),
        ({"": 1}, ": use"),
        ({"a" * 65: 1}, "aaa: use"),
        ({"ext": {"a": 1}}, "ext: an attribute is a string, a number, true or false"),
        ({"ext": []}, "ext: an attribute is"),
        ({"subject": ["a"]}, "subject: an attribute is"),
        ({"traceparent": {}}, "traceparent: an attribute is"),
    ],
    ids=str,
)
def test_an_invalid_structured_cloudevent_is_refused_and_names_the_member(members: dict[str, Any], detail: str) -> None:
    merged = {**ATTRIBUTES, **members}
    for body in (json.dumps(merged), json.dumps(merged, indent=2, separators=(" , ", " : "))):
        with pytest.raises(Problem, match=re.escape(detail)) as caught:
            cloudevents.from_structured(body.encode(), None)
        assert caught.value.kind is INVALID_EVENT


@pytest.mark.parametrize(
    "members",
    [
        {"data": {"Any": [{"thing": {}}]}},
        {"data": []},
        {"data_base64": "MQ=="},
        {"data_base64": "", "time": None},
        {"time": "2026-11-22T03:00:00Z"},
        {"time": "1985-04-12t23:20:50.52z"},
        {"time": "1990-12-31T15:59:60-08:00"},
        {"data": 1, "data_base64": None},
        {"subject": None, "ext1": 7, "ext2": True, "ext3": "[]", "0": "{}", "a" * 64: -1},
    ],
    ids=str,
)
def test_data_may_be_any_json_and_an_extension_a_simple_value(members: dict[str, Any]) -> None:
    body = json.dumps({**ATTRIBUTES, **members}).encode()
    assert cloudevents.from_structured(body, None).value == body


def test_the_members_of_a_too_large_cloudevent_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloudevents, "_check_members", None)
    with pytest.raises(Problem) as caught:
        structured(data="x" * 1_000_000)
    assert caught.value.kind is TOO_LARGE


@pytest.mark.parametrize("long", [False, True])
async def test_the_members_of_a_cloudevent_have_a_bound(long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """99 attributes, as in the binary mode, and the data; those of a long event are counted before they are decoded."""

    async def made(attributes: int) -> Event:
        more = {f"a{n}": 1 for n in range(attributes - len(ATTRIBUTES))}
        body = json.dumps({**ATTRIBUTES, **more, "data": "x"}).encode()
        return await cloudevents.from_long_structured(body, None) if long else cloudevents.from_structured(body, None)

    assert (await made(99)).key == "/shop/7 42"
    if long and native.COMPILED:
        monkeypatch.setattr(cloudevents, "decode", None)
    for attributes in (100, 10_000):
        with pytest.raises(Problem, match="body: at most 100 members are taken") as caught:
            await made(attributes)
        assert caught.value.kind is INVALID_EVENT


def test_a_batch_may_be_empty() -> None:
    assert cloudevents.parse_batch(b" [ ]") == []


def test_a_batch_is_split_into_the_bytes_of_its_events() -> None:
    one, two = b'{"id": 1}', b'{ "id":2}'
    assert [bytes(part) for part in cloudevents.parse_batch(b"[" + one + b", " + two + b"]")] == [one, two]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{}", INVALID_EVENT),
        (b"[", INVALID_JSON),
        (b"[%b1]" % (b"1," * BATCH_EVENTS_MAX), TOO_LARGE),
    ],
    ids=["no list", "no JSON", "many"],
)
def test_an_invalid_batch_is_refused(body: bytes, kind: Any) -> None:
    with pytest.raises(Problem) as caught:
        cloudevents.parse_batch(body)
    assert caught.value.kind is kind
