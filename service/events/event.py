"""Parses and checks one event: strict JSON in, checked fields out. Pure functions of the body and the topic."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from service import native
from service.contract.wire.headers import RESERVED_HEADERS, TRACE_HEADER
from service.contract.wire.ids import Header, event_id, fingerprint
from service.contract.wire.names import TOPIC, TOPIC_CHARS_MAX
from service.core.problems import (
    INVALID_EVENT,
    INVALID_KEY,
    MISSING_KEY,
    RECORD_REFUSED,
    TOO_LARGE,
    Problem,
)
from service.core.settings import EVENT_BYTES_MAX
from service.events.base64_text import decode_base64
from service.events.key_time import made_at_ms
from service.events.schema_refs import Encoded, Encoding
from service.events.strict_json import TOO_DEEP, check_json, in_thread, not_json, strictly
from service.kafka.partitioner import partition_of_key
from service.kafka.topic_admin import Topic

HEADERS_MAX: Final = 100
# The JSON of one event: enough for the largest value in base64 and its names.
EVENT_TEXT_BYTES_MAX: Final = 2 * EVENT_BYTES_MAX
BATCH_EVENTS_MAX: Final = 10_000
TIMESTAMP_MOST: Final = 2**53 - 1
PARTITION_MOST: Final = 2**31 - 1
KEY_CHARS_MAX: Final = 255
TRACE_BYTES: Final = 55  # of a trace context
TRACEPARENT_BYTES_MAX: Final = TRACE_BYTES + 1 + 200  # of a trace context of a later version
# The most bytes of a batch of one record beside its key, value, client's headers and idempotency key: the batch's
# header (61), the record's fields (21), our headers with their names, and a trace context, which tracing adds.
OVERHEAD_BYTES: Final = 61 + 21 + 18 + 16 + 180 + 16 + TRACE_BYTES
# Bytes for the lengths of a header's name and content in a record.
HEADER_BYTES: Final = 8
# Bytes of a ledger entry without its topic: hex id and fingerprint, five numbers, and the names of the fields.
ENTRY_BYTES: Final = 180
# In place of `plain_bytes_max` where each event must be checked by itself.
NONE_IS_PLAIN: Final = -1

_KEY: Final = re.compile(r"[\x20-\x7e]{1,255}")
_QUOTED: Final = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
# W3C Trace Context: version 00 ends with the flags, version ff is invalid, and so are ids of zeros.
_TRACEPARENT: Final = re.compile(
    r"(?!ff|00-.{52}-|...0{32}|.{36}0{16})[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{1,200})?"
)


class EventBody(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of one event. `value` holds the bytes as they were sent."""

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
    """An event to write, with its key, id and fingerprint. Made by `event_of`. `timestamp` is in ms.

    Where a schema of a registry encodes its key and value, `fp` stays the fingerprint of what was sent.
    """

    key: str
    id: bytes
    topic: str
    record_key: bytes | None
    value: bytes | None
    headers: list[Header]
    partition: int | None
    timestamp: int | None
    traceparent: bytes | None  # of the HTTP request; not part of the fingerprint
    fp: bytes
    size: int  # in bytes
    entry_bytes: int  # of its ledger entry, without the fields of an atomic batch's member
    encoding: Encoding | None = None  # the schemas that the request names
    encoded: Encoded | None = None  # once its key and value are encoded


# Parses the common forms of an event in C; the functions below parse all others.
READER: Final = (
    native.bodies.EventReader(
        Event, fingerprint, RESERVED_HEADERS, TRACE_HEADER, EVENT_BYTES_MAX, ENTRY_BYTES, BATCH_EVENTS_MAX
    )
    if native.COMPILED
    else None
)


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
    """Make an event, and check the rules for all events, also CloudEvents. Raises Problem (400, 413)."""
    check_topic_name(topic)
    if value is None and record_key is None:
        raise invalid("value", "null writes a tombstone, which needs a key: send one")
    size = len(value or b"") + len(record_key or b"")
    if headers:
        size += sum([len(name.encode()) + len(content) for name, content in headers])
        if traceparent is not None and any(name == TRACE_HEADER for name, _ in headers):
            traceparent = None  # the client's own header is written instead
    if size > EVENT_BYTES_MAX:
        raise too_large(size)
    fp = fingerprint(topic, partition, record_key, headers, value)
    entry = ENTRY_BYTES + len(topic)
    return Event(key, id, topic, record_key, value, headers, partition, timestamp, traceparent, fp, size, entry)


def parse_key(raw: str | None) -> str:
    """Parse the Idempotency-Key header; quoted (RFC 8941) and bare are the same key. Raises Problem (400)."""
    raw = "" if raw is None else raw.strip(" \t")  # the whitespace of HTTP (RFC 9110, section 5.6.3)
    if not raw:
        raise Problem(MISSING_KEY, "Idempotency-Key: send this header with a key of your own, the same for each retry")
    if raw.startswith('"'):
        quoted = _QUOTED.fullmatch(raw)
        if quoted is None:
            raise Problem(INVALID_KEY, 'Idempotency-Key: a quoted key ends with " and escapes only " and \\')
        raw = re.sub(r"\\(.)", r"\1", quoted[1])
    return check_key(raw)


def check_key(key: str, field: str = "Idempotency-Key") -> str:
    """Check a key from JSON or a path, where quotes and spaces are part of it. Raises Problem (400)."""
    if _KEY.fullmatch(key) is None:
        raise Problem(INVALID_KEY, f"{field}: use 1 to 255 printable ASCII characters")
    return key


def parse_traceparent(raw: str | None) -> bytes | None:
    """Parse a trace context (W3C Trace Context); None for a malformed one, as the standard demands."""
    return None if raw is None or _TRACEPARENT.fullmatch(raw) is None else raw.encode()


def parse_event(key: str, body: bytes, traceparent: bytes | None = None, scope: str = "") -> Event:
    """Parse an event from short JSON. Raises Problem (400, 413) that names the field."""
    if READER is not None and (event := READER.event(body, key, scope, traceparent)) is not None:
        return event

    def parse(body: bytes) -> Event:
        return make_event(key, event_id(key, scope), decode(_decode_event, body), traceparent)

    return strictly(body, parse)


async def parse_long_event(key: str, body: bytes, traceparent: bytes | None = None, scope: str = "") -> Event:
    """Parse an event from JSON of any length, which is checked in a thread. Raises as `parse_event`."""
    await check_text(body, b"headers", HEADERS_MAX)
    return make_event(key, event_id(key, scope), decode(_decode_event, body), traceparent)


async def check_text(text: bytes | msgspec.Raw, counted: bytes, most: int) -> None:
    """Check in a thread the JSON of one event, of any length, so that it may be decoded on the event loop.

    `counted` is the field whose members are counted, at most `most`; if it is empty, the event's own members are.
    Raises Problem (400, 413).
    """
    if len(text) > EVENT_TEXT_BYTES_MAX:
        raise Problem(
            TOO_LARGE, f"body: the event's JSON has {len(text)} bytes; at most {EVENT_TEXT_BYTES_MAX} are taken"
        )
    await in_thread(_check_text, bytes(text), counted, most)


def _check_text(text: bytes, counted: bytes, most: int) -> None:
    check_json(text)
    if native.COMPILED and len(native.bodies.elements(text, counted, most)) > most:
        raise too_many(counted.decode(), most)


def too_many(field: str, most: int) -> Problem:
    """Make the problem (400) of a field, or an event, with too many members."""
    return invalid(field or "body", f"at most {most} {'' if field else 'members '}are taken")


def decode(decoder: Callable[[bytes], T], body: bytes | msgspec.Raw) -> T:
    """Decode typed fields from JSON. Raises Problem (400) that names the field."""
    try:
        return decoder(body)
    except msgspec.ValidationError as error:
        raise Problem(INVALID_EVENT, _explain(error)) from None
    except msgspec.DecodeError as error:
        raise not_json(str(error)) from None
    except UnicodeDecodeError:  # not a DecodeError of msgspec
        raise not_json("is not UTF-8") from None
    except RecursionError:  # far deeper than DEPTH_MAX
        raise not_json(TOO_DEEP) from None


def make_event(key: str, id: bytes, fields: EventBody, traceparent: bytes | None = None) -> Event:
    """Make an event from decoded fields, and check the rules that types cannot express."""
    record_key = None if fields.key is None else fields.key.encode()
    value = _value(fields)
    if fields.partition is not None and not 0 <= fields.partition <= PARTITION_MOST:
        raise invalid("partition", "use a partition's number, from 0")
    if fields.timestamp is not None and not 0 <= fields.timestamp <= TIMESTAMP_MOST:
        raise invalid("timestamp", "use milliseconds since 1970, 0 or more")
    headers = _headers(fields)
    return event_of(key, id, fields.topic, record_key, value, headers, fields.partition, fields.timestamp, traceparent)


def check_topic_name(name: str) -> None:
    """Raise Problem (400) for a name that no topic can have, of any length: caches of names are asked behind this."""
    if len(name) > TOPIC_CHARS_MAX or not _is_topic_name(name):
        raise invalid("topic", "use 1 to 249 of letters, digits, '.', '_' and '-'")


@lru_cache(maxsize=1024)  # at most 1.5 MB of names
def _is_topic_name(name: str) -> bool:
    return TOPIC.fullmatch(name) is not None and name not in (".", "..")


def _value(fields: EventBody) -> bytes | None:
    if (fields.value is msgspec.UNSET) == (fields.value_base64 is None):
        raise invalid("value", "send exactly one of value and value_base64")
    if isinstance(fields.value, msgspec.Raw):
        raw = bytes(fields.value)
        return None if raw == b"null" else raw
    text = fields.value_base64 or ""
    if len(text) // 4 * 3 > EVENT_BYTES_MAX + 2:  # + 2 bytes of padding
        raise too_large(len(text) // 4 * 3)
    value = decode_base64(text)
    if value is None:
        raise invalid("value_base64", "use standard base64 (RFC 4648, section 4) with its padding")
    return value


def _headers(fields: EventBody) -> list[Header]:
    headers = fields.headers
    if not headers:
        return []
    if len(headers) > HEADERS_MAX:
        raise too_many("headers", HEADERS_MAX)
    for name in headers:
        if name.lower() in RESERVED_HEADERS:
            raise invalid(f"headers.{name}", "this name is reserved for Fencepost: use another")
    return [(name, content.encode()) for name, content in headers.items()]


def check_topic(event: Event, topic: Topic, now_ms: Callable[[], int]) -> None:
    """Check an event against its topic's settings, before its claim; `now_ms` reads the brokers' clock.

    Raises Problem (400, 413, 422).
    """
    if event.partition is not None and event.partition >= topic.partitions:
        raise invalid("partition", f"{topic.name} has {topic.partitions}: use 0 to {topic.partitions - 1}, or none")
    settings = topic.settings
    ours = OVERHEAD_BYTES + len(event.key) + max(0, len(event.traceparent or b"") - TRACE_BYTES)
    whole, most = event.size + HEADER_BYTES * len(event.headers) + ours, topic.message_bytes_max
    if whole > most:
        raise Problem(TOO_LARGE, f"value: with headers the record has up to {whole} bytes; {topic.name} takes {most}")
    if event.record_key is None and "compact" in settings.get("cleanup.policy", ""):
        raise Problem(RECORD_REFUSED, f"key: {topic.name} is compacted, so each event needs a key: send one")
    if event.timestamp is not None:
        check_timestamp(event.timestamp, topic, now_ms())


def plain_bytes_max(topic: Topic) -> int:
    """Return the size (bytes) up to which `check_topic` refuses no plain event of a topic; NONE_IS_PLAIN if compacted.

    So that the events of a batch need not be checked one by one.
    """
    if "compact" in topic.settings.get("cleanup.policy", ""):
        return NONE_IS_PLAIN
    return topic.message_bytes_max - OVERHEAD_BYTES - KEY_CHARS_MAX - (TRACEPARENT_BYTES_MAX - TRACE_BYTES)


def is_plain(event: Event, bytes_max: int) -> bool:
    """Whether an event is of at most `bytes_max` bytes, and names no headers, partition, timestamp, schema or time."""
    plain = not event.headers and event.partition is None and event.timestamp is None and event.encoding is None
    return plain and event.size <= bytes_max and made_at_ms(event.key) is None


def check_timestamp(timestamp: int, topic: Topic, now_ms: int) -> None:
    """Check a client's timestamp (ms) against the topic's bounds (KIP-937), unless the broker sets timestamps."""
    settings = topic.settings
    if settings.get("message.timestamp.type") == "LogAppendTime":
        return
    before = int(settings.get("message.timestamp.before.max.ms", 2**63 - 1))
    after = int(settings.get("message.timestamp.after.max.ms", 2**63 - 1))
    if timestamp < now_ms - before or timestamp > now_ms + after:
        raise Problem(
            RECORD_REFUSED, f"timestamp: {topic.name} takes no time more than {before} ms ago or {after} ms ahead"
        )


def partition_of(event: Event, partitions: int) -> int | None:
    """Return the event's partition, else the key's by murmur2, as Java clients do; None for an event without both."""
    if event.partition is not None:
        return event.partition
    if event.record_key is None:
        return None
    return partition_of_key(event.record_key, partitions)


def cut_batch(body: bytes, field: str) -> tuple[bytes, list[msgspec.Raw]]:
    """Cut the events out of a long batch: the batch with 0 in place of its events, and each event's JSON.

    Runs in a thread. Counts the events before it checks them. Raises Problem (400, 413).
    """
    spans = native.bodies.elements(body, field.encode(), BATCH_EVENTS_MAX) if native.COMPILED else []
    if len(spans) > BATCH_EVENTS_MAX:
        raise Problem(TOO_LARGE, f"{field or 'body'}: at most {BATCH_EVENTS_MAX} events are taken")
    check_json(body)
    if not spans:  # none, or not compiled: decoding the batch finds them
        return body, []
    view = memoryview(body)
    texts = [msgspec.Raw(view[start:end]) for start, end in spans]
    return body[: spans[0][0]] + b"0" + body[spans[-1][1] :], texts


def check_count(events: int, field: str) -> None:
    """Check the number of events of a batch, in its `field`. Raises Problem (400, 413)."""
    if not events:
        raise invalid(field, "send at least one event")
    if events > BATCH_EVENTS_MAX:
        raise Problem(TOO_LARGE, f"{field}: there are {events} events; at most {BATCH_EVENTS_MAX} are taken")


def too_large(size: int) -> Problem:
    """Make the problem (413) of an event of `size` bytes."""
    return Problem(TOO_LARGE, f"value: the event has {size} bytes; at most {EVENT_BYTES_MAX} are taken")


def invalid(field: str, remedy: str) -> Problem:
    """Make the problem (400) of a malformed field."""
    return Problem(INVALID_EVENT, f"{field}: {remedy}")


def _explain(error: msgspec.ValidationError) -> str:
    """Reformat msgspec's "Expected `int`, got `str` - at `$.partition`" with the field first."""
    what, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".") or "body"
    return f"{field}: {what}"
