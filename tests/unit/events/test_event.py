"""Tests the parsing of one event from JSON: values that are kept as they are, and refusals that name the field."""

import base64
import gc
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from service import native
from service.contract import Guarantee
from service.contract.wire.headers import stamp_writer
from service.contract.wire.ids import Header, event_id, fingerprint
from service.core.problems import Problem
from service.events import cloudevents, strict_json
from service.events import event as module
from service.events.event import (
    Event,
    EventBody,
    check_key,
    check_topic,
    event_of,
    is_plain,
    make_event,
    parse_event,
    parse_key,
    parse_long_event,
    parse_traceparent,
    partition_of,
    plain_bytes_max,
)
from service.http import batch
from service.kafka.partitioner import partition_of_key
from service.kafka.topic_admin import Topic
from service.pipeline.group import records_of
from service.pipeline.request import WriteRequest
from tests.durations import HOUR_MS
from tests.unit.fakes import NOW_MS


def parse(body: bytes | str | dict[str, Any], traceparent: bytes | None = None) -> Event:
    if isinstance(body, dict):
        body = json.dumps(body)
    return parse_event("key", body.encode() if isinstance(body, str) else body, traceparent)


def refused(body: bytes | str | dict[str, Any]) -> tuple[str, str]:
    """Return the code and the first word of the detail: the field."""
    with pytest.raises(Problem) as caught:
        parse(body)
    return caught.value.kind.code, caught.value.detail.partition(":")[0]


# ------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ("a", "a"),
        (" a b ", "a b"),
        ('"a"', "a"),
        ('" a "', " a "),
        (r'"a\"b\\c"', r'a"b\c'),
        (r"a\b", r"a\b"),
        ('a"b', 'a"b'),
        ("~" * 255, "~" * 255),
        ('"' + "~" * 255 + '"', "~" * 255),
    ],
)
def test_a_key_is_taken_with_and_without_quotes(raw: str, key: str) -> None:
    assert parse_key(raw) == key


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (None, "missing-key"),
        ("", "missing-key"),
        ("   ", "missing-key"),
        ('""', "invalid-key"),
        ('"', "invalid-key"),
        ('"a', "invalid-key"),
        ('"a"b', "invalid-key"),
        (r'"a\b"', "invalid-key"),
        ("x" * 256, "invalid-key"),
        ('"' + "x" * 256 + '"', "invalid-key"),
        ("ä", "invalid-key"),
        ("a\tb", "invalid-key"),
        ("a\x7f", "invalid-key"),
        ("a\xa0", "invalid-key"),
        ("\x85a", "invalid-key"),
        ("\x1f", "invalid-key"),
    ],
)
def test_a_missing_or_malformed_key_is_refused(raw: str | None, code: str) -> None:
    with pytest.raises(Problem) as caught:
        parse_key(raw)
    assert caught.value.kind.code == code


@pytest.mark.parametrize("key", [" a", '"a"', "   ", '"', "~" * 255])
def test_a_key_outside_a_header_is_taken_as_it_is(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize("key", ["", "x" * 256, "ä", "a\tb"])
def test_an_invalid_key_outside_a_header_is_refused(key: str) -> None:
    with pytest.raises(Problem) as caught:
        check_key(key)
    assert caught.value.kind.code == "invalid-key"


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255))
def test_a_quoted_key_and_a_bare_key_are_the_same(key: str) -> None:
    quoted = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert parse_key(quoted) == key
    if key.strip() == key and not key.startswith('"'):
        assert parse_key(key) == key


# ------------------------------------------------------------------------------------------------------ strict JSON

DEEP = "[" * 63 + "]" * 63


LONG_INTEGERS = pytest.mark.skipif(not native.COMPILED, reason="jiter takes no integer of more than 4,300 digits")


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "-0.0e-10",
        '"\\u0000"',
        '"\\ud83d\\ude00"',
        '"\\\\ud800"',
        "[]",
        "{}",
        '{"": {"": []}}',
        DEEP,
        '"' + "[" * 500 + '"',
        "[" + ",".join(["[]"] * 500) + "]",
        pytest.param("1" * 5000, marks=LONG_INTEGERS),
        '{"\\ud83d\\ude00": 1}',
        "true",
    ],
)
def test_a_value_is_kept_byte_for_byte(text: str) -> None:
    event = parse(f'{{"value" :  {text}\n, "topic":"t"}}')
    assert event.value == text.encode()


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "[Infinity]",
        "-Infinity",
        "01",
        "1.",
        ".5",
        "+1",
        "0x1",
        "'a'",
        '"\t"',
        '"\\x00"',
        '"\\ud800"',
        '"\\udc00\\ud800"',
        '["\\uDBFF"]',
        '{"\\ud800": 1}',
        '{"a": {"b": 1, "b": 1}}',
        '[{"a": 1, "\\u0061": 2}]',
        "[1,]",
        '{"a": 1,}',
        "[" + DEEP + "]",
        "[" * 1_000 + "]" * 1_000,  # deeper than the decoder itself accepts
        "[" * 100_000 + "]" * 100_000,
        "/* a */ 1",
        "",
        "[",
        "\\u0031",
    ],
)
def test_a_value_that_is_no_json_is_refused(text: str) -> None:
    assert refused(f'{{"topic":"t","value":{text}}}') == ("invalid-json", "body")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b'\xef\xbb\xbf{"topic":"t","value":1}',
        b'{"topic":"t","value":"\xff"}',
        b'{"topic":"\xff","value":1}',
        b'{"topic":"t","value":1,"key":"\xe4"}',
        b'{"topic":"t","value":1,"headers":{"a":"\xff"}}',
        b'{"topic":"t","value":1,"headers":{"\xff":"a"}}',
        b'{"topic":"t","value_base64":"\xff"}',
        b'{"topic":"t","value":1,"\xff":1}',
        b'{"topic":"t","value":"\xed\xa0\x80"}',
        b'{"topic":"t","value":"\xc0\x80"}',
        b'{"topic":"t","value":1}{}',
        b'{"topic":"t","value":1}\x00',
        '{"topic":"t","value":1}'.encode("utf-16"),
        b'{"topic":"t","value":1,"value":1}',
        b"[" * 60_000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    assert refused(body) == ("invalid-json", "body")


# Values of the headers of a trace context (W3C Trace Context, section 3.2).
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize("raw", [TRACE, f"01-{TRACE[3:]}-more", f"cc-{TRACE[3:]}"])
def test_a_trace_is_passed_on(raw: str) -> None:
    assert parse_traceparent(raw) == raw.encode()


@pytest.mark.parametrize(
    "raw",
    [
        "",
        TRACE.upper(),
        TRACE[:-1],
        f"{TRACE}-more",
        f"ff-{TRACE[3:]}",
        TRACE.replace("a", "0"),
        TRACE.replace("b", "0"),
        f"{TRACE}, {TRACE}",
    ],
)
def test_an_invalid_traceparent_is_dropped(raw: str) -> None:
    assert parse_traceparent(raw) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, st.booleans())
def test_any_json_but_a_lone_surrogate_is_taken_as_it_is(value: Any, ascii_only: bool) -> None:
    try:
        text = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8
        return
    body = b'{"topic":"t","key":"k","value":' + text + b"}"
    lone = any(0xD800 <= ord(character) < 0xE000 for character in json.dumps(value, ensure_ascii=False))
    if lone:
        assert refused(body) == ("invalid-json", "body")
    else:
        assert parse(body).value == (None if value is None else text)


# ------------------------------------------------------------------------------------------------------------ fields


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"topic": 1, "value": 1}, "topic"),
        ({"topic": "", "value": 1}, "topic"),
        ({"topic": "..", "value": 1}, "topic"),
        ({"topic": "a/b", "value": 1}, "topic"),
        ({"topic": "x" * 250, "value": 1}, "topic"),
        ({"topic": "t"}, "value"),
        ({"topic": "t", "value": None}, "value"),
        ({"topic": "t", "value": 1, "value_base64": "YQ=="}, "value"),
        ({"topic": "t", "value_base64": "YQ"}, "value_base64"),
        ({"topic": "t", "value_base64": "Y Q=="}, "value_base64"),
        ({"topic": "t", "value_base64": "ä"}, "value_base64"),
        ({"topic": "t", "value_base64": 1}, "value_base64"),
        ({"topic": "t", "value": 1, "key": 1}, "key"),
        ({"topic": "t", "value": 1, "partition": -1}, "partition"),
        ({"topic": "t", "value": 1, "partition": 2**31}, "partition"),
        ({"topic": "t", "value": 1, "partition": "0"}, "partition"),
        ({"topic": "t", "value": 1, "partition": True}, "partition"),
        ({"topic": "t", "value": 1, "timestamp": -1}, "timestamp"),
        ({"topic": "t", "value": 1, "timestamp": 2**53}, "timestamp"),
        ({"topic": "t", "value": 1, "timestamp": 1.5}, "timestamp"),
        ({"topic": "t", "value": 1, "headers": []}, "headers"),
        ({"topic": "t", "value": 1, "headers": {f"h{n}": "" for n in range(101)}}, "headers"),
        ({"topic": "t", "value": 1, "headers": {"FencePost": ""}}, "headers.FencePost"),
        ({"topic": "t", "value": 1, "headers": {"idempotency-key": ""}}, "headers.idempotency-key"),
    ],
)
def test_each_wrong_field_is_named(fields: dict[str, Any], field: str) -> None:
    assert refused(fields) == ("invalid-event", field)


def test_the_largest_and_smallest_allowed_values_are_taken() -> None:
    for timestamp in (0, 2**53 - 1):
        assert parse({"topic": "t", "value": 1, "timestamp": timestamp}).timestamp == timestamp
    for partition in (0, 2**31 - 1):
        assert parse({"topic": "t", "value": 1, "partition": partition}).partition == partition
    assert len(parse({"topic": "t", "value": 1, "headers": {f"h{n}": "" for n in range(100)}}).headers) == 100
    assert len(batch.parse_batch(b'{"events":[%b{}]}' % (b"{}," * 9_999)).events) == 10_000


def test_a_missing_and_an_unknown_field_are_named() -> None:
    with pytest.raises(Problem, match="topic"):
        parse({"value": 1})
    with pytest.raises(Problem, match="valeu"):
        parse({"topic": "t", "value": 1, "valeu": 1})


def test_every_field_of_an_event_is_read() -> None:
    event = parse(
        {"topic": "t", "key": "k", "value": 1, "headers": {"b": "2", "a": "ü"}, "partition": 3, "timestamp": 4},
        b"00-trace",
    )
    headers = [("b", b"2"), ("a", "ü".encode())]
    assert (event.topic, event.record_key, event.value, event.headers) == ("t", b"k", b"1", headers)
    assert (event.partition, event.timestamp, event.traceparent) == (3, 4, b"00-trace")
    assert event.id == event_id("key")
    assert event.fp == fingerprint("t", 3, b"k", headers, b"1")
    assert event.size == 1 + 1 + 2 + 3


def test_a_traceparent_header_of_the_event_replaces_that_of_the_request() -> None:
    assert parse({"topic": "t", "value": 1, "headers": {"traceparent": "x"}}, b"00-trace").traceparent is None


def test_base64_is_decoded_and_null_is_a_tombstone() -> None:
    assert parse({"topic": "t", "value_base64": base64.b64encode(b"\x00\xff").decode()}).value == b"\x00\xff"
    assert parse({"topic": "t", "value_base64": ""}).value == b""
    assert parse({"topic": "t", "key": "k", "value": None}).value is None
    assert parse({"topic": "t", "value": "null"}).value == b'"null"'


def test_an_event_has_at_most_a_megabyte() -> None:
    assert parse({"topic": "t", "value": "x" * 999_998}).size == 1_000_000
    assert refused({"topic": "t", "value": "x" * 999_999})[0] == "too-large"
    assert refused({"topic": "t", "value": "x" * 999_998, "headers": {"a": ""}})[0] == "too-large"


async def test_a_too_large_body_is_refused_before_its_json_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check takes a hundred times as long."""
    monkeypatch.setattr(strict_json, "check_json", None)
    assert refused({"topic": "t", "value": [0] * 500_000})[0] == "too-large"
    with pytest.raises(Problem, match="at most 10000"):
        batch.parse_batch(b'{"events":[%b{}]}' % (b"{}," * 10_000))
    with pytest.raises(Problem, match="at most 10000"):
        cloudevents.parse_batch(b"[%b{}]" % (b"{}," * 10_000))
    monkeypatch.setattr(module, "check_json", None)
    with pytest.raises(Problem, match="at most 2000000"):
        await parse_long_event("key", b'{"topic":"t","value":"%b"}' % (b"x" * 2_000_000))


def test_base64_that_is_too_large_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    text = base64.b64encode(bytes(1_000_000)).decode()
    assert parse({"topic": "t", "value_base64": text}).size == 1_000_000
    assert refused({"topic": "t", "value_base64": text[:-4] + "AAAA"})[0] == "too-large"
    monkeypatch.setattr(base64, "b64decode", None)
    assert refused({"topic": "t", "value_base64": text + "AAAA"})[0] == "too-large"


@pytest.mark.skipif(not native.COMPILED, reason="counted beforehand only where service.native is compiled")
@pytest.mark.parametrize("name", ["headers", "h\\u0065aders"])
async def test_headers_are_counted_before_they_are_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding 8 MiB of headers would hold the event loop."""

    def long(headers: int) -> bytes:
        members = ",".join(f'"{n}":""' for n in range(headers))
        return f'{{"topic":"t","value":"{"x" * 100_000}","{name}":{{{members}}}}}'.encode()

    assert len((await parse_long_event("key", long(100))).headers) == 100
    monkeypatch.setattr(module, "decode", None)
    for headers in (101, 100_000):
        with pytest.raises(Problem, match="headers: at most 100 are taken"):
            await parse_long_event("key", long(headers))


async def test_a_long_event_is_parsed_as_a_short_one_is() -> None:
    for body in (b'{"topic":"t","value":[1, {"a":null}],"headers":{"a":"b"}}', b'{"topic":"t","value_base64":"AA=="}'):
        long, short = await parse_long_event("key", body, scope="s"), parse_event("key", body, scope="s")
        assert msgspec.structs.astuple(long) == msgspec.structs.astuple(short)
    for body in (b'{"topic":"t","value":1,"value":1}', b'{"topic":"t"}', b'{"topic":"t","value":[1}', b""):
        with pytest.raises(Problem) as short_problem:
            parse_event("key", body)
        with pytest.raises(Problem) as long_problem:
            await parse_long_event("key", body)
        assert str(long_problem.value) == str(short_problem.value)


# ----------------------------------------------------------------------------------------------------- and its topic


def checked(event: Event, partitions: int = 3, **settings: str) -> str:
    """Return the code with which the topic refuses the event, "" if it does not."""
    try:
        named = {name.replace("_", "."): text for name, text in settings.items()}
        check_topic(event, Topic("t", partitions, named), lambda: NOW_MS)
    except Problem as problem:
        return problem.kind.code
    return ""


def test_an_event_that_its_topic_would_refuse_is_refused_by_the_check() -> None:
    plain, keyed = parse({"topic": "t", "value": 1}), parse({"topic": "t", "key": "k", "value": 1})
    assert checked(plain) == ""
    assert checked(plain, cleanup_policy="compact,delete") == "record-refused"
    assert checked(keyed, cleanup_policy="compact") == ""
    assert checked(parse({"topic": "t", "value": 1, "partition": 3})) == "invalid-event"
    assert checked(parse({"topic": "t", "value": 1, "partition": 2})) == ""
    assert checked(parse({"topic": "t", "value": "x" * 1000}), max_message_bytes="1000") == "too-large"


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
@pytest.mark.parametrize("record_key", [None, b"r"])
@pytest.mark.parametrize("headers", [[], [("a", b"b")]])
@pytest.mark.parametrize(("partition", "timestamp"), [(None, None), (3, None), (None, 0)])
def test_a_plain_event_is_one_that_its_topic_takes(
    policy: str, record_key: bytes | None, headers: list[Header], partition: int | None, timestamp: int | None
) -> None:
    """With the longest key and trace context, which `plain_bytes_max` does not look at."""
    bounds = {"cleanup.policy": policy, "max.message.bytes": "2000", "message.timestamp.before.max.ms": "1"}
    topic = Topic("t", 3, bounds)
    for size in range(1, 2000):
        event = event_of("k" * 255, b"i" * 16, "t", record_key, b"v" * size, headers, partition, timestamp, b"t" * 256)
        if is_plain(event, plain_bytes_max(topic)):
            check_topic(event, topic, lambda: NOW_MS)
    plain = policy == "delete" and not headers and partition is None and timestamp is None
    small = event_of("k", b"i" * 16, "t", record_key, b"v", headers, partition, timestamp)
    assert is_plain(small, plain_bytes_max(topic)) is plain
    aged = event_of(
        "01890a5d-ac96-774b-bcce-b302099a8057", b"i" * 16, "t", record_key, b"v", headers, partition, timestamp
    )
    assert not is_plain(aged, plain_bytes_max(topic)), "its key tells when it was made, so that it may be too old"


@pytest.mark.parametrize("key", ["k", "k" * 255])
@pytest.mark.parametrize("instance", ["i", "i" * 64])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "headers", [{}, {"a": "b"}, {f"{n:02}": "" for n in range(99)}, {f"{n:02}": "x" * 9_000 for n in range(99)}]
)
@pytest.mark.parametrize("name", ["n", "\U0001f600" * 200])
def test_a_record_is_refused_only_where_it_may_not_fit(
    key: str, instance: str, traced: bool, headers: dict[str, str], name: str
) -> None:
    """A record of the largest size must fit if the check lets it pass, and the check must not be much stricter."""
    event = make_event(key, b"i" * 16, EventBody("t", "k", msgspec.Raw(b"1"), headers={**headers, name: "1"}))
    if traced:  # known only after the check
        event.traceparent = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
    most = 2**63 - 1
    request = WriteRequest.for_event(event, 0.0, 1.0, Guarantee.EXACTLY_ONCE)
    request.partitions = [0]
    writer = stamp_writer(65_535, most, 32_767, instance)
    (record,) = records_of([(request, [1_700_000_000_000])], lambda _: Topic("t", 1, {}), writer, 0)
    batch = DefaultRecordBatchBuilder(
        2, 0, is_transactional=True, producer_id=most, producer_epoch=1, base_sequence=0, batch_size=10**6
    )
    batch.append(0, record.timestamp, record.key, record.value, record.headers)
    size = len(batch.build())
    event.traceparent = None
    assert checked(event, max_message_bytes=str(size - 1)) == "too-large"
    assert checked(event, max_message_bytes=str(size + 220 + 7 * len(event.headers))) == ""


@pytest.mark.parametrize(
    ("ago_ms", "code"),
    [(0, ""), (HOUR_MS - 5_000, ""), (HOUR_MS + 5_000, "record-refused"), (-5_000, "record-refused")],
)
def test_the_times_that_a_topic_takes(ago_ms: int, code: str) -> None:
    event = parse({"topic": "t", "value": 1, "timestamp": NOW_MS - ago_ms})
    bounds: dict[str, Any] = {"message_timestamp_before_max_ms": str(HOUR_MS), "message_timestamp_after_max_ms": "1000"}
    assert checked(event, **bounds) == code
    assert checked(event, **bounds, message_timestamp_type="LogAppendTime") == ""


@pytest.mark.parametrize(
    ("key", "murmur2"),
    [  # from Kafka's own UtilsTest
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_partitions_as_java_chooses_them(key: bytes, murmur2: int) -> None:
    for partitions in (1, 3, 12, 1000):
        assert partition_of_key(key, partitions) == (murmur2 & 0x7FFFFFFF) % partitions


def test_the_named_partition_counts_and_else_the_one_of_the_key() -> None:
    assert partition_of(parse({"topic": "t", "key": "21", "value": 1, "partition": 9}), 12) == 9
    assert partition_of(parse({"topic": "t", "key": "21", "value": 1}), 12) == partition_of_key(b"21", 12)
    assert partition_of(parse({"topic": "t", "value": 1}), 12) is None


def kept_by(work: Callable[[int], object], times: int) -> int:
    """Measure the bytes of memory that stay in use after the work was repeated."""
    tracemalloc.start()
    try:
        for n in range(times):
            work(n)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_a_topic_that_is_refused_for_its_length_is_not_remembered() -> None:
    """Names of megabytes must not stay in the cache of names."""

    def refuse(n: int) -> None:
        with pytest.raises(Problem, match="topic"):
            event_of("k", b"i" * 16, f"{n}" + "t" * 400_000, None, b"1", [])

    assert kept_by(refuse, 20) < 100_000
