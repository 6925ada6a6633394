"""Tests that service.native reads bodies as Python does, and reads the common ones."""

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service import native
from service.core.problems import Problem
from service.events import event as module
from service.events.event import BATCH_EVENTS_MAX, READER, Event, parse_event
from service.http.batch import member_of, parse_batch

pytestmark = pytest.mark.skipif(not native.COMPILED, reason="installed without a compiler")

PLAIN = b'{"topic": "orders", "key": "customer-7", "value": {"total": 12.50, "of": [1, "two", null, true]}}'
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def in_python(body: bytes, key: str = "k", scope: str = "", traceparent: bytes | None = None) -> Event | None:
    """Parse a body in Python; None if it is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "READER", None)
        try:
            return parse_event(key, body, traceparent, scope)
        except Problem:
            return None


def in_c(body: bytes, key: str = "k", scope: str = "", traceparent: bytes | None = None) -> Event | None:
    assert READER is not None
    return READER.event(body, key, scope, traceparent)


def fields_of(event: Event) -> tuple[Any, ...]:
    return msgspec.structs.astuple(event)


def agree(body: bytes) -> None:
    """Check that Python accepts a body that C accepts, with the same event."""
    taken = in_c(body, traceparent=TRACE)
    if taken is not None:
        expected = in_python(body, traceparent=TRACE)
        assert expected is not None, body
        assert fields_of(taken) == fields_of(expected)


@pytest.mark.parametrize(
    "body",
    [
        PLAIN,
        b' {"value":1,"topic":"a"}\n',
        b'{"topic":"a","value":null,"key":"k"}',
        b'{"topic":"a","value":"","key":""}',
        b'{"topic":"a","value":[],"key":null,"headers":null,"partition":null,"timestamp":null}',
        b'{"topic":"a","value":{},"headers":{},"partition":0,"timestamp":1795275306678}',
        b'{"topic":"A.b_c-9","value":-0.5e+7,"headers":{"b":"2","a":"","\xc3\xa9":"\xe2\x82\xac"},"partition":2147483647}',
        b'{"topic":"a","value":"\\u00e9\\n\\"\\\\\\/","headers":{"traceparent":"their own"}}',
        b'{"topic":"a","value":"\xf0\x9f\x98\x80","key":"\xc3\xa9"}',
        b'{"topic":"a","value":' + b"[" * 63 + b"]" * 63 + b"}",
        b'{"topic":"a","value":{' + b",".join(b'"%d":0' % n for n in range(32)) + b"}}",
        b'{"topic":"a","value":{' + b",".join(b'"%d":0' % n for n in range(1_000)) + b"}}",
        b'{"topic":"a","value":[{"\\u0061":1,"b":{"\\ud83d\\ude00":2}}]}',
        b'{"topic":"a","key":"' + b"k" * 40_000 + b'","value":"' + b"x" * 40_000 + b'","partition":7}',
        b'{"topic":"a","key":"' + b"k" * 40_000 + b'","value":null}',
        b'{"topic":"a","value":"' + b"x" * 32_766 + b'"}',
        b'{"topic":"a","value":"' + b"x" * 32_767 + b'"}',
        b'{"topic":"' + b"t" * 249 + b'","value":' + b"9" * 500 + b"}",
    ],
)
def test_a_plain_event_is_read_by_c_as_by_python(body: bytes) -> None:
    for scope, traceparent in (("", None), ("caller", TRACE)):
        taken, expected = (read(body, "the key", scope, traceparent) for read in (in_c, in_python))
        assert taken is not None
        assert expected is not None
        assert fields_of(taken) == fields_of(expected)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'\xef\xbb\xbf{"topic":"a","value":1}',
        b'{"topic":"a","value":1}{}',
        b'{"topic":"a","value":1,}',
        b'{"topic":"a","value":1',
        b'{"topic":"a"}',
        b'{"value":1}',
        b'{"topic":"a","value":null}',
        b'{"topic":"","value":1}',
        b'{"topic":"..","value":1}',
        b'{"topic":"a b","value":1}',
        b'{"topic":"\xc3\xa9","value":1}',
        b'{"topic":null,"value":1}',
        b'{"topic":"' + b"t" * 250 + b'","value":1}',
        b'{"topic":"a","value":1,"value":1}',
        b'{"topic":"a","value":1,"topic":"a"}',
        b'{"topic":"a","value":{"b":1,"b":2}}',
        b'{"topic":"a","value":[{"":1,"":2}]}',
        b'{"topic":"a","value":{"b":1,"\\u0062":2}}',
        b'{"topic":"a","value":{' + b",".join(b'"%d":0' % n for n in (*range(500), 250)) + b"}}",
        b'{"topic":"a","value":{' + b",".join(b'"%d":0' % n for n in range(2_000)) + b"}}",
        b'{"topic":"a","value":NaN}',
        b'{"topic":"a","value":-}',
        b'{"topic":"a","value":01}',
        b'{"topic":"a","value":1.}',
        b'{"topic":"a","value":.5}',
        b'{"topic":"a","value":1e}',
        b'{"topic":"a","value":+1}',
        b'{"topic":"a","value":truex}',
        b'{"topic":"a","value":"\x01"}',
        b'{"topic":"a","value":"\\x"}',
        b'{"topic":"a","value":"\\u12g4"}',
        b'{"topic":"a","value":"\\ud800"}',
        b'{"topic":"a","value":"\xff"}',
        b'{"topic":"a","value":"\xed\xa0\x80"}',
        b'{"topic":"a","value":1,"key":"\xff"}',
        b'{"topic":"a","value":1,"key":1}',
        b'{"topic":"a","value":1,"headers":{"\xff":"1"}}',
        b'{"topic":"a","value":1,"headers":{"a":"\xff"}}',
        b'{"topic":"a","value":1,"headers":{"a":1}}',
        b'{"topic":"a","value":1,"headers":{"a":"1","a":"1"}}',
        b'{"topic":"a","value":1,"headers":{"Fencepost":"1"}}',
        b'{"topic":"a","value":1,"headers":{"idempotency-key":"1"}}',
        b'{"topic":"a","value":1,"partition":-1}',
        b'{"topic":"a","value":1,"partition":1.0}',
        b'{"topic":"a","value":1,"partition":1e0}',
        b'{"topic":"a","value":1,"partition":00}',
        b'{"topic":"a","value":1,"partition":2147483648}',
        b'{"topic":"a","value":1,"timestamp":"1"}',
        b'{"topic":"a","value":1,"other":1}',
        b'{"topic":"a","value":1,"idempotency_key":"k"}',
        b'{"topic":"a","value":1,"value_base64":"MQ=="}',
        b'{"topic":"a","value":' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"topic":"a","value":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"topic":"a","value":"' + b"x" * 1_000_001 + b'"}',
    ],
)
def test_an_event_that_needs_more_checks_is_left_to_python(body: bytes) -> None:
    assert in_c(body) is None


def test_every_beginning_of_a_body_is_left() -> None:
    assert in_c(PLAIN) is not None
    assert not any(in_c(PLAIN[:end]) for end in range(len(PLAIN)))


# Pieces of documents that are nearly correct.
PIECES = [
    *(c.encode() for c in '{}[]:,"\\ \n0123456789-+.eEutfnbaid'),
    *(
        b'"topic"',
        b'"orders"',
        b'"key"',
        b'"value"',
        b'"headers"',
        b'"partition"',
        b'"timestamp"',
        b'"a"',
        b'"\\u0061"',
    ),
    *(
        b"null",
        b"true",
        b"false",
        b"NaN",
        b"\xc3\xa9",
        b"\xff",
        b"\xed\xa0\x80",
        b"\x00",
        b"\\ud83d\\ude00",
        b"\\udc00",
    ),
    *(
        b'"topic":"orders"',
        b'"value":1',
        b'"key":"k"',
        b'"headers":{"a":"b"}',
        b',"partition":1',
        b"1e5",
        b"1795275306678",
    ),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
EVENTS = st.fixed_dictionaries(
    {"topic": st.sampled_from(["orders", "a.b", "é", ""]), "value": VALUES},
    optional={
        "key": st.none() | st.text(max_size=5),
        "headers": st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=4),
        "partition": st.none() | st.integers(-1, 2**33),
        "timestamp": st.none() | st.integers(-1, 2**60),
    },
)


@given(EVENTS, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
@example({"topic": "orders", "value": "\ud800"}, True, False, random.Random(0))
def test_c_and_python_read_the_same_event(
    event: dict[str, Any], ascii: bool, spaced: bool, chance: random.Random
) -> None:
    """A document by some encoder, with a piece exchanged, removed or inserted."""
    text = json.dumps(event, ensure_ascii=ascii, separators=None if spaced else (",", ":"))
    body = text.encode("utf-8", "surrogatepass")
    agree(body)
    for _ in range(8):
        at, end = sorted((chance.randrange(len(body) + 1), chance.randrange(len(body) + 1)))
        end = min(end, at + chance.choice((0, 1, 1, 8)))
        agree(body[:at] + chance.choice([b"", *PIECES]) + body[end:])


@given(st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join))
def test_c_and_python_read_nearly_valid_json_alike(inner: bytes) -> None:
    agree(inner)
    agree(b'{"topic":"orders","value":' + inner + b"}")
    agree(b'{"topic":"orders","value":1,' + inner + b"}")


@pytest.mark.parametrize("odd", [None, "text", bytearray(b"{}")])
def test_a_body_that_is_not_bytes_raises_a_type_error(odd: Any) -> None:
    assert READER is not None
    for read in (
        lambda: READER.event(odd, "k", "", None),
        lambda: READER.member(odd, "", None),
        lambda: READER.batch(odd, "", None),
    ):
        with pytest.raises(TypeError):
            read()


def test_an_event_on_its_own_line_is_read_by_c_as_by_python() -> None:
    assert READER is not None
    for line in (member("a"), b" %b " % member("é", key="é"), member("a", key="c", headers={"a": "b"}, partition=1)):
        taken = READER.member(line, "caller", TRACE)
        try:
            expected = member_of(line, TRACE, "caller")
        except Problem:
            assert taken is None
        else:
            assert taken is not None
            assert fields_of(taken) == fields_of(expected)
    for line in (PLAIN, member(""), member("a")[:-1], member("a") + b"{}", member("a", more=1)):
        assert READER.member(line, "", None) is None


# ----------------------------------------------------------------------------------------------------- a batch


def batch_in_python(body: bytes, scope: str = "") -> list[Event] | None:
    try:
        batch = parse_batch(body)
        return None if batch.atomic else [member_of(raw, TRACE, scope) for raw in batch.events]
    except Problem:
        return None


def agree_on_batch(body: bytes, scope: str = "") -> bool:
    """Check whether C reads a batch, and then that Python makes the same events."""
    assert READER is not None
    found = []
    for step in (len(body) + 1, 1, 100):
        batch = READER.batch(body, scope, TRACE)
        while (plain := batch.read(step)) and not batch.whole:
            pass
        found.append([fields_of(event) for event in batch.events] if plain else None)
    taken = found[0]
    assert found == [taken] * 3, "in steps of any length it is the same"
    if taken is None:
        return False
    expected = batch_in_python(body, scope)
    assert expected is not None, body
    assert taken == [fields_of(event) for event in expected]
    return True


def test_a_batch_is_read_in_steps_of_so_many_bytes() -> None:
    assert READER is not None
    events = [member(f"k-{n}") for n in range(100)]
    batch = READER.batch(b'{"events": [' + b",".join(events) + b"]}", "", None)
    for n in range(1, 100):
        assert batch.read(len(events[n]) // 2)
        assert (len(batch.events), batch.whole) == (n, False)
    assert batch.read(1)
    assert (len(batch.events), batch.whole) == (100, True)


def member(name: str, **more: object) -> bytes:
    """Encode an event with the idempotency key `name`."""
    return json.dumps({"topic": "orders", "value": {"n": 1}, "idempotency_key": name, **more}).encode()


def test_a_plain_batch_is_taken() -> None:
    events = b",".join(member(f"k-{n}", key=f"c{n % 3}", topic=f"t{n % 2}") for n in range(50))
    assert agree_on_batch(b'{"events": [' + events + b"]}")
    assert agree_on_batch(b' { "atomic" : false , "events" : [ ' + events + b" ] } ", "caller")
    assert agree_on_batch(b'{"events":[' + events + b'],"atomic":false}')


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"events":[]}',
        b'{"events":[%b],"atomic":true}' % member("a"),
        b'{"events":[%b],"atomic":false,"atomic":false}' % member("a"),
        b'{"events":[%b],"events":[%b]}' % (member("a"), member("b")),
        b'{"events":[%b],"more":1}' % member("a"),
        b'{"events":[%b,]}' % member("a"),
        b'{"events":[%b]}}' % member("a"),
        b'{"events":[%b' % member("a"),
        b'{"events":[%b,{"topic":"a","value":1}]}' % member("a"),
        b'{"events":[%b]}' % member(""),
        b'{"events":[%b]}' % member("é"),
        b'{"events":[%b]}' % member("k" * 256),
        b'{"events":[%b,%b]}' % (member("a"), member("b", topic="..")),
        b'{"events":[{"topic":"a","value":1,"idempotency_key":"a","key":"\xff"}]}',
        b'{"events":[{"topic":"a","idempotency_key":"a","value":' + b"[" * 62 + b"]" * 62 + b"}]}",
        b'{"events":[' + b",".join([member("a")] * (BATCH_EVENTS_MAX + 1)) + b"]}",
    ],
)
def test_a_batch_that_needs_more_checks_is_left_to_python(body: bytes) -> None:
    assert not agree_on_batch(body)


def test_a_batch_may_be_as_deep_and_as_long_as_any() -> None:
    deep = b'{"topic":"a","idempotency_key":"a","value":' + b"[" * 61 + b"]" * 61 + b"}"
    assert agree_on_batch(b'{"events":[' + deep + b"]}")
    assert agree_on_batch(b'{"events":[' + b",".join([member("a")] * BATCH_EVENTS_MAX) + b"]}")


@given(st.lists(EVENTS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_c_and_python_read_the_same_batch(events: list[dict[str, Any]], chance: random.Random) -> None:
    made = [event | {"idempotency_key": f"k{n}"} for n, event in enumerate(events)]
    body = json.dumps({"events": made}).encode()
    agree_on_batch(body)
    for _ in range(8):
        at, end = sorted((chance.randrange(len(body) + 1), chance.randrange(len(body) + 1)))
        end = min(end, at + chance.choice((0, 1, 1, 8)))
        agree_on_batch(body[:at] + chance.choice([b"", *PIECES]) + body[end:])


# ------------------------------------------------------------------------------------------ where its elements are


@pytest.mark.parametrize(
    ("body", "name", "found"),
    [
        (b'{"events":[1, {"a":[2]} ,"3"]}', b"events", [b"1", b'{"a":[2]}', b'"3"']),
        (b' { "x" : [0] , "events" : [ 1 ] , "events": [2] } ', b"events", [b"1"]),
        (b'{"ev\\u0065nts":[1,2]}', b"events", [b"1", b"2"]),
        (b'{"events":{"a":1,"b":"c"}}', b"events", [b"1", b'"c"']),
        (b'{"events":[]}', b"events", []),
        (b'{"events":1}', b"events", []),
        (b'{"other":[1]}', b"events", []),
        (b'{"events":[1,2', b"events", []),
        (b'{"events":[1 2]}', b"events", []),
        (b'{"events":[1,2,3,4,', b"events", [b"1", b"2", b"3", b"4"]),
        (b"[1,[2]]", b"", [b"1", b"[2]"]),
        (b'{"a":1,"":null}', b"", [b"1", b"null"]),
        (b"1", b"", []),
        (b"", b"", []),
    ],
)
def test_elements_are_found_up_to_one_more_than_are_taken(body: bytes, name: bytes, found: list[bytes]) -> None:
    assert [body[start:end] for start, end in native.bodies.elements(body, name, 3)] == found
