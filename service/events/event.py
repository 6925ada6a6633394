"""One event as it is asked for: strict JSON in, checked fields out. Everything here needs no state but its topic's."""

import base64
import binascii
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from service import native
from service.contract.wire import RESERVED_HEADERS, TOPIC, TOPIC_CHARS_MAX, TRACE_HEADER, Header, event_id, fingerprint
from service.core.problems import (
    INVALID_EVENT,
    INVALID_KEY,
    MISSING_KEY,
    RECORD_REFUSED,
    TOO_LARGE,
    Problem,
)
from service.core.settings import EVENT_BYTES_MAX
from service.events.strict_json import TOO_DEEP, check_json, in_thread, not_json, strictly
from service.kafka.admin import Topic
from service.kafka.partitioner import partition_of_key

HEADERS_MAX: Final = 100
# The JSON of one event: its value in base64 and its names find room, and nobody reads 8 MiB to find it too large.
EVENT_TEXT_BYTES_MAX: Final = 2 * EVENT_BYTES_MAX
BATCH_EVENTS_MAX: Final = 10_000
TIMESTAMP_MOST: Final = 2**53 - 1
PARTITION_MOST: Final = 2**31 - 1
TRACE_BYTES: Final = 55  # of a trace context
# Most that a batch of one record needs beside its key, its value, the client's headers and its idempotency key: the
# batch's head (61), the record's own fields (21), our headers with their names, a trace context, which tracing adds.
OVERHEAD_BYTES: Final = 61 + 21 + 18 + 16 + 180 + 16 + TRACE_BYTES
# The lengths of a header's name and content, as a record has them.
HEADER_BYTES: Final = 8
# A ledger entry without its topic's name: hex id and fingerprint, five numbers and their names.
ENTRY_BYTES: Final = 180

_KEY: Final = re.compile(r"[\x20-\x7e]{1,255}")
_QUOTED: Final = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
# Of its versions 00 ends with the flags, and ff is none; an id of zeros is none either.
_TRACEPARENT: Final = re.compile(
    r"(?!ff|00-.{52}-|...0{32}|.{36}0{16})[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{1,200})?"
)


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


# Takes what is plain in one go; what it leaves is for all the rest here.
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
    """An event that keeps the rules that hold for every one, however it came. Raises Problem (400, 413)."""
    if not _is_topic(topic):
        raise invalid("topic", "use 1 to 249 of letters, digits, '.', '_' and '-'")
    if value is None and record_key is None:
        raise invalid("value", "null writes a tombstone, which needs a key: send one")
    size = len(value or b"") + len(record_key or b"")
    if headers:
        size += sum([len(name.encode()) + len(content) for name, content in headers])
        if traceparent is not None and any(name == TRACE_HEADER for name, _ in headers):
            traceparent = None  # the client's own goes with the event, once
    if size > EVENT_BYTES_MAX:
        raise too_large(size)
    fp = fingerprint(topic, partition, record_key, headers, value)
    entry = ENTRY_BYTES + len(topic)
    return Event(key, id, topic, record_key, value, headers, partition, timestamp, traceparent, fp, size, entry)


def parse_key(raw: str | None) -> str:
    """The key that a header names; quoted (a Structured Fields string, RFC 8941) and bare are the same key."""
    raw = "" if raw is None else raw.strip(" \t")  # of other blanks HTTP knows nothing (RFC 9110, section 5.6.3)
    if not raw:
        raise Problem(MISSING_KEY, "Idempotency-Key: send this header with a key of your own, the same for each retry")
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
    """An event from its JSON, which is not long. Raises Problem (400, 413) that names the field."""
    if READER is not None and (event := READER.event(body, key, scope, traceparent)) is not None:
        return event

    def parse(body: bytes) -> Event:
        return make_event(key, event_id(key, scope), decode(_decode_event, body), traceparent)

    return strictly(body, parse)


async def parse_long_event(key: str, body: bytes, traceparent: bytes | None = None, scope: str = "") -> Event:
    """As `parse_event`, for a body of any length: it is checked in a thread."""
    await check_text(body, b"headers", HEADERS_MAX)
    return make_event(key, event_id(key, scope), decode(_decode_event, body), traceparent)


async def check_text(text: bytes | msgspec.Raw, counted: bytes, most: int) -> None:
    """The JSON of one event, however long, may be decoded on the event loop. Raises Problem (400, 413).

    `counted` is its field with members by the name, at `most` so many; or it is all of it, where that is empty.
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
    """400: a field, or the event, has too many members."""
    return invalid(field or "body", f"at most {most} {'' if field else 'members '}are taken")


def decode(decoder: Callable[[bytes], T], body: bytes | msgspec.Raw) -> T:
    """Typed fields from JSON. Raises Problem (400) that names the field."""
    try:
        return decoder(body)
    except msgspec.ValidationError as error:
        raise Problem(INVALID_EVENT, _explain(error)) from None
    except msgspec.DecodeError as error:
        raise not_json(str(error)) from None
    except UnicodeDecodeError:  # which msgspec does not take for an error of its own
        raise not_json("is not UTF-8") from None
    except RecursionError:  # deeper by far than is taken
        raise not_json(TOO_DEEP) from None


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


def _is_topic(name: str) -> bool:
    return len(name) <= TOPIC_CHARS_MAX and _is_topic_name(name)


@lru_cache(maxsize=1024)  # of names of 249 characters at most: 1.5 MB
def _is_topic_name(name: str) -> bool:
    return TOPIC.fullmatch(name) is not None and name not in (".", "..")


def _value(fields: EventBody) -> bytes | None:
    if (fields.value is msgspec.UNSET) == (fields.value_base64 is None):
        raise invalid("value", "send exactly one of value and value_base64")
    if isinstance(fields.value, msgspec.Raw):
        raw = bytes(fields.value)
        return None if raw == b"null" else raw
    text = fields.value_base64 or ""
    if len(text) // 4 * 3 > EVENT_BYTES_MAX + 2:  # with the two bytes that padding may stand for
        raise too_large(len(text) // 4 * 3)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid("value_base64", "use standard base64 (RFC 4648, section 4) with its padding") from None


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


def check_topic(event: Event, topic: Topic, now_ms: int) -> None:
    """What the topic's own settings refuse, before the key is touched. Raises Problem (400, 413, 422)."""
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
        check_timestamp(event.timestamp, topic, now_ms)


def check_timestamp(timestamp: int, topic: Topic, now_ms: int) -> None:
    """Kafka's bounds on a client's timestamps (KIP-937); no bounds hold where the broker sets the time."""
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
    """The partition that was asked for, else the key's by murmur2, as Java clients do; None leaves the choice open."""
    if event.partition is not None:
        return event.partition
    if event.record_key is None:
        return None
    return partition_of_key(event.record_key, partitions)


def cut_batch(body: bytes, field: str) -> tuple[bytes, list[msgspec.Raw]]:
    """The JSON of each event of a long batch, and before them the batch with a number in their place. For a thread.

    They are counted before the rest is looked at. Raises Problem (400, 413).
    """
    places = native.bodies.elements(body, field.encode(), BATCH_EVENTS_MAX) if native.COMPILED else []
    if len(places) > BATCH_EVENTS_MAX:
        raise Problem(TOO_LARGE, f"{field or 'body'}: at most {BATCH_EVENTS_MAX} events are taken")
    check_json(body)
    if not places:  # it has none, or whoever decodes it finds them
        return body, []
    view = memoryview(body)
    texts = [msgspec.Raw(view[start:end]) for start, end in places]
    return body[: places[0][0]] + b"0" + body[places[-1][1] :], texts


def check_count(events: int, field: str) -> None:
    """A batch, whose events are in `field`, has at least one and not too many. Raises Problem (400, 413)."""
    if not events:
        raise invalid(field, "send at least one event")
    if events > BATCH_EVENTS_MAX:
        raise Problem(TOO_LARGE, f"{field}: there are {events} events; at most {BATCH_EVENTS_MAX} are taken")


def too_large(size: int) -> Problem:
    """413: an event of so many bytes."""
    return Problem(TOO_LARGE, f"value: the event has {size} bytes; at most {EVENT_BYTES_MAX} are taken")


def invalid(field: str, remedy: str) -> Problem:
    """400: a field of the event is malformed."""
    return Problem(INVALID_EVENT, f"{field}: {remedy}")


def _explain(error: msgspec.ValidationError) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.partition`" with the field first."""
    what, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".") or "body"
    return f"{field}: {what}"
