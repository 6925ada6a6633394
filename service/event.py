"""One event as it is asked for: strict JSON in, checked fields out. Everything here needs no state but its topic's."""

import base64
import binascii
import json
import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec

from service.errors import (
    INVALID_EVENT,
    INVALID_JSON,
    INVALID_KEY,
    MISSING_KEY,
    RECORD_REFUSED,
    TOO_LARGE,
    Problem,
)
from service.kafka.cluster import Topic
from service.kafka.partitioner import partition_of_key
from service.settings import EVENT_BYTES_MAX
from service.wire import RESERVED_HEADERS, TOPIC, TRACE_HEADER, Header, event_id, fingerprint

DEPTH_MAX: Final = 64
HEADERS_MAX: Final = 100
BATCH_EVENTS_MAX: Final = 10_000
TIMESTAMP_MOST: Final = 2**53 - 1
PARTITION_MOST: Final = 2**31 - 1
# Most that a batch of one record needs beside key, value and the client's headers: the batch's head (61), the record's
# own fields (21) and our two headers.
OVERHEAD_BYTES: Final = 61 + 21 + 64 + 16 + 255 + 16 + 180
# A ledger entry without its topic's name: hex id and fingerprint, five numbers and their names.
ENTRY_BYTES: Final = 180

_KEY: Final = re.compile(r"[\x20-\x7e]{1,255}")
_QUOTED: Final = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{1,200})?")
_LONE_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
_SURROGATE_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


class EventBody(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of one event. `value` keeps the bytes as they were sent."""

    topic: str
    key: str | None = None
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    value_base64: str | None = None
    headers: dict[str, str] | None = None
    partition: int | None = None
    timestamp: int | None = None


_decode_event = msgspec.json.Decoder(EventBody).decode
T = TypeVar("T")


class Event(msgspec.Struct, eq=False, gc=False):
    """What is to be written, with the identity that the caller gave it. `event_of` makes one."""

    key: str
    id: bytes
    topic: str
    record_key: bytes | None
    value: bytes | None
    headers: list[Header]
    partition: int | None
    timestamp: int | None
    traceparent: bytes | None  # of the HTTP request: not part of what was asked for
    fp: bytes
    size: int  # in bytes
    entry_bytes: int  # of its entry in the ledger, but for what a member of an atomic batch has more


def event_of(
    key: str,
    id: bytes,
    topic: str,
    record_key: bytes | None,
    value: bytes | None,
    headers: list[Header],
    partition: int | None = None,
    timestamp: int | None = None,
    traceparent: bytes | None = None,
) -> Event:
    """An event that keeps the rules that hold for every one, however it came. Raises Problem (400, 413)."""
    if not _is_topic(topic):
        raise invalid("topic", "use 1 to 249 of letters, digits, '.', '_' and '-'")
    if value is None and record_key is None:
        raise invalid("value", "null writes a tombstone, which needs a key: send one")
    size = len(value or b"") + len(record_key or b"")
    if headers:
        size += sum([len(name) + len(content) for name, content in headers])
        if traceparent is not None and any(name == TRACE_HEADER for name, _ in headers):
            traceparent = None  # the client's own goes with the event, once
    if size > EVENT_BYTES_MAX:
        raise Problem(TOO_LARGE, f"value: the event has {size} bytes; at most {EVENT_BYTES_MAX} are taken")
    fp = fingerprint(topic, partition, record_key, headers, value)
    entry = ENTRY_BYTES + len(topic)
    return Event(key, id, topic, record_key, value, headers, partition, timestamp, traceparent, fp, size, entry)


def parse_key(raw: str | None) -> str:
    """The key that a header names; quoted (a Structured Fields string, RFC 8941) and bare are the same key."""
    if raw is None or not raw.strip():
        raise Problem(MISSING_KEY, "Idempotency-Key: send this header with a key of your own, the same for each retry")
    raw = raw.strip()
    if raw.startswith('"'):
        quoted = _QUOTED.fullmatch(raw)
        if quoted is None:
            raise Problem(INVALID_KEY, 'Idempotency-Key: a quoted key ends with " and escapes only " and \\')
        raw = re.sub(r"\\(.)", r"\1", quoted[1])
    return check_key(raw)


def check_key(key: str, field: str = "Idempotency-Key") -> str:
    """A key as it stands: in JSON or a path, quotes and spaces are part of it. Raises Problem (400)."""
    if _KEY.fullmatch(key) is None:
        raise Problem(INVALID_KEY, f"{field}: use 1 to 255 printable ASCII characters")
    return key


def parse_traceparent(raw: str | None) -> bytes | None:
    """The trace context to pass on (W3C Trace Context); one that is malformed is dropped, as the standard says."""
    return None if raw is None or _TRACEPARENT.fullmatch(raw) is None else raw.encode()


def parse_event(key: str, body: bytes, traceparent: bytes | None = None, scope: str = "") -> Event:
    """An event from its JSON. Raises Problem (400, 413) that names the field."""
    check_json(body)
    return make_event(key, event_id(key, scope), decode(_decode_event, body), traceparent)


def decode(decoder: Callable[[bytes], T], body: bytes | msgspec.Raw) -> T:
    """Typed fields from JSON that is known to be JSON. Raises Problem (400) that names the field."""
    try:
        return decoder(body)
    except msgspec.ValidationError as error:
        raise Problem(INVALID_EVENT, _explain(error)) from None
    except msgspec.DecodeError as error:
        raise Problem(INVALID_JSON, f"body: {error}") from None


def make_event(key: str, id: bytes, fields: EventBody, traceparent: bytes | None = None) -> Event:
    """An event from decoded fields; the rules that no type can say."""
    record_key = None if fields.key is None else fields.key.encode()
    value = _value(fields)
    if fields.partition is not None and not 0 <= fields.partition <= PARTITION_MOST:
        raise invalid("partition", "use a partition's number, from 0")
    if fields.timestamp is not None and not 0 <= fields.timestamp <= TIMESTAMP_MOST:
        raise invalid("timestamp", "use milliseconds since 1970, 0 or more")
    headers = _headers(fields)
    return event_of(key, id, fields.topic, record_key, value, headers, fields.partition, fields.timestamp, traceparent)


@lru_cache(maxsize=1024)
def _is_topic(name: str) -> bool:
    return TOPIC.fullmatch(name) is not None and name not in (".", "..")


def _value(fields: EventBody) -> bytes | None:
    if (fields.value is msgspec.UNSET) == (fields.value_base64 is None):
        raise invalid("value", "send exactly one of value and value_base64")
    if isinstance(fields.value, msgspec.Raw):
        raw = bytes(fields.value)
        return None if raw == b"null" else raw
    try:
        return base64.b64decode(fields.value_base64 or "", validate=True)
    except (binascii.Error, ValueError):
        raise invalid("value_base64", "use standard base64 (RFC 4648, section 4) with its padding") from None


def _headers(fields: EventBody) -> list[Header]:
    headers = fields.headers
    if not headers:
        return []
    if len(headers) > HEADERS_MAX:
        raise invalid("headers", f"at most {HEADERS_MAX} are taken")
    for name in headers:
        if name.lower() in RESERVED_HEADERS:
            raise invalid(f"headers.{name}", "this name is reserved for Fencepost: use another")
    return [(name, content.encode()) for name, content in headers.items()]


def check_topic(event: Event, topic: Topic) -> None:
    """What the topic's own settings refuse, before the key is touched. Raises Problem (400, 413, 422)."""
    if event.partition is not None and event.partition >= topic.partitions:
        raise invalid("partition", f"{topic.name} has {topic.partitions}: use 0 to {topic.partitions - 1}, or none")
    settings = topic.settings
    whole, most = event.size + OVERHEAD_BYTES, topic.message_bytes_max
    if whole > most:
        raise Problem(TOO_LARGE, f"value: with headers the record has up to {whole} bytes; {topic.name} takes {most}")
    if event.record_key is None and "compact" in settings.get("cleanup.policy", ""):
        raise Problem(RECORD_REFUSED, f"key: {topic.name} is compacted, so each event needs a key: send one")
    if event.timestamp is not None:
        check_timestamp(event.timestamp, topic)


def check_timestamp(timestamp: int, topic: Topic) -> None:
    """Kafka's bounds on a client's timestamps (KIP-937); no bounds hold where the broker sets the time."""
    settings = topic.settings
    if settings.get("message.timestamp.type") == "LogAppendTime":
        return
    now = time.time_ns() // 1_000_000
    before = int(settings.get("message.timestamp.before.max.ms", 2**63 - 1))
    after = int(settings.get("message.timestamp.after.max.ms", 2**63 - 1))
    if timestamp < now - before or timestamp > now + after:
        raise Problem(
            RECORD_REFUSED, f"timestamp: {topic.name} takes no time more than {before} ms ago or {after} ms ahead"
        )


def partition_of(event: Event, partitions: int) -> int | None:
    """The partition that was asked for, else the key's by murmur2, as Java clients do; None leaves the choice open."""
    if event.partition is not None:
        return event.partition
    if event.record_key is None:
        return None
    return partition_of_key(event.record_key, partitions)


# ---------------------------------------------------------------------------------------------------- strict JSON


def check_json(body: bytes) -> None:
    """RFC 8259, strictly: UTF-8 without a BOM, no NaN, no duplicate names, no lone surrogates, at most 64 levels.

    Raises Problem (400). The value is passed on byte for byte, so whoever reads it must be able to trust it.
    """
    if not _is_plain(body):
        _check_each(body)


def _is_plain(body: bytes) -> bool:
    """Is it, but for blanks, what an encoder makes of its own decoding? An encoder writes strict JSON and nothing else.

    Most bodies were made by one. It often costs half of `_check_each`, which looks at every name, or less.
    """
    # A run of 1,024 digits shows in this sample of the body; to read it as a number takes the square of its length.
    if _MANY_DIGITS.search(body[::16]):
        return False
    try:
        decoded = _decode(body)
        again = _encode(decoded)
        plain = again == body or again == msgspec.json.format(body, indent=-1)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return plain and not _is_deep(body, decoded)


def _is_deep(body: bytes, decoded: Any) -> bool:
    """Is it nested deeper than `DEPTH_MAX`?"""
    return body.count(b"{") + body.count(b"[") > DEPTH_MAX and _is_deeper(decoded, DEPTH_MAX)


def _check_each(body: bytes) -> None:
    if body.startswith(b"\xef\xbb\xbf"):
        raise _not_json("begins with a byte order mark: send UTF-8 without one")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _not_json(f"is not UTF-8 (byte {error.start})") from None
    try:
        parsed, end = _scan(text, len(text) - len(text.lstrip(_BLANKS)))
    except json.JSONDecodeError as error:
        raise _not_json(f"is not JSON: {error.msg} at character {error.pos}") from None
    except StopIteration as error:  # the scanner's own way to say that no value begins here
        raise _not_json(f"is not JSON: Expecting value at character {error.value}") from None
    except RecursionError:  # far deeper: the scanner itself gives up at some 1,000 levels
        raise _not_json(_TOO_DEEP) from None
    if _is_deep(body, parsed):
        raise _not_json(_TOO_DEEP)
    if end != len(text.rstrip(_BLANKS)):
        raise _not_json(f"is not JSON: Extra data at character {end}")
    if _SURROGATE_ESCAPE.search(body) and _has_lone_surrogate(parsed):
        raise _not_json("has a lone surrogate (\\ud800 to \\udfff without its pair)")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _not_json(f"has the name {name!r} twice in one object")
            seen.add(name)
    return members


def _no_constant(name: str) -> Any:
    raise _not_json(f"has {name}, which is no JSON number")


# A fraction stays the text that it is: to read 1e-320 as a number takes 7 µs, and a body may have a million of them.
_decode: Final = msgspec.json.Decoder(float_hook=msgspec.Raw).decode
_encode: Final = msgspec.json.Encoder().encode
_MANY_DIGITS: Final = re.compile(rb"[0-9]{64}")
# Numbers stay text: their size is not ours to judge, and an integer of 5,000 digits is JSON.
# Its scanner itself: `decode` around it costs as much again for a small body, and does no more than find the end.
_scan = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=str, parse_float=str
).scan_once  # type: ignore[attr-defined]
_NODES: Final = frozenset({dict, list})
_BLANKS: Final = " \t\n\r"
_TOO_DEEP: Final = f"is nested deeper than {DEPTH_MAX} levels"


def _is_deeper(parsed: Any, most: int) -> bool:
    """Has it more levels of objects and arrays than that? A level at a time."""
    level = [parsed]
    for _ in range(most):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node if type(node) is list else ())
            if type(child) in _NODES
        ]
        if not level:
            return False
    return True


def _has_lone_surrogate(parsed: Any) -> bool:
    match parsed:
        case str():
            return _LONE_SURROGATE.search(parsed) is not None
        case Mapping():
            return any(_has_lone_surrogate(name) or _has_lone_surrogate(item) for name, item in parsed.items())
        case list():
            return any(map(_has_lone_surrogate, parsed))
    return False


def _not_json(why: str) -> Problem:
    return Problem(INVALID_JSON, f"body: {why}")


def check_count(events: int, field: str) -> None:
    """A batch, whose events are in `field`, has at least one and not too many. Raises Problem (400, 413)."""
    if not events:
        raise invalid(field, "send at least one event")
    if events > BATCH_EVENTS_MAX:
        raise Problem(TOO_LARGE, f"{field}: there are {events} events; at most {BATCH_EVENTS_MAX} are taken")


def invalid(field: str, remedy: str) -> Problem:
    """400: a field of the event is malformed."""
    return Problem(INVALID_EVENT, f"{field}: {remedy}")


def _explain(error: msgspec.ValidationError) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.partition`" with the field first."""
    what, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".") or "body"
    return f"{field}: {what}"
