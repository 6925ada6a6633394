"""Converts CloudEvents 1.0 from the HTTP binding to events, in the format of the Kafka binding.

Binary mode: the attributes are headers, the body is the data. Structured mode: the body is the event's JSON, and
becomes the record's value. The topic is the extension attribute `topic`, else the event's `type`. The record key is
`partitionkey` (the partitioning extension). The idempotency key is `source` and `id`, which together identify an event,
unless a header names a key.
"""

import re
from collections.abc import Iterable
from datetime import date
from typing import Final
from urllib.parse import unquote

import msgspec

from service.contract.wire.ids import Header, event_id
from service.core.problems import INVALID_KEY, Problem
from service.events.base64_text import decode_base64
from service.events.event import (
    HEADERS_MAX,
    Event,
    check_count,
    check_key,
    check_text,
    cut_batch,
    decode,
    event_of,
    invalid,
    parse_key,
    too_many,
)
from service.events.strict_json import in_thread, strictly

STRUCTURED: Final = "application/cloudevents+json"
BATCHED: Final = "application/cloudevents-batch+json"
# A body of these types holds all attributes, also if headers of the binary mode come with it (HTTP binding, sections 3
# and 3.2.3).
WHOLE: Final = frozenset({STRUCTURED, BATCHED})
VERSION: Final = "1.0"

# Members of an event's JSON: as many attributes as in the binary mode, and the data.
MEMBERS_MAX: Final = HEADERS_MAX
_PREFIX: Final = b"ce-"
# RFC 3339, section 5.6; whether the day exists is checked separately.
_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt]([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII
)
_ATTRIBUTE: Final = re.compile(r"[a-z0-9]{1,64}")
# Attributes that the binary mode has elsewhere: a header could contradict it.
_NO_HEADERS: Final = {
    "data": "send the data as the body",
    "datacontenttype": "send Content-Type instead: it is this attribute",
}
# A quoted string (RFC 9110, section 5.6.4).
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_ESCAPED: Final = re.compile(r"\\(.)")


class CloudEvent(msgspec.Struct):
    """The attributes that the service reads. The data and all other attributes are passed on unchanged."""

    specversion: str
    id: str
    source: str
    type: str
    topic: str | None = None
    partitionkey: str | None = None
    time: str | None = None
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data_base64: str | None = None


_TYPED: Final = frozenset(CloudEvent.__struct_fields__)
_decode: Final = msgspec.json.Decoder(CloudEvent).decode
_decode_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_batch: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


def from_binary(
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes,
    key: str | None,
    traceparent: bytes | None = None,
    scope: str = "",
) -> Event:
    """Make an event from `ce-` headers (names in lower case) and a body. Raises Problem (400, 413)."""
    attributes, content_type = _attributes_of(headers)
    event = CloudEvent(
        attributes["specversion"],
        attributes["id"],
        attributes["source"],
        attributes["type"],
        attributes.get("topic"),
        attributes.get("partitionkey"),
        attributes.get("time"),
    )
    carried: list[Header] = [] if content_type is None else [("content-type", content_type)]
    carried += [(f"ce_{name}", text.encode()) for name, text in attributes.items()]
    return _event(event, "ce-", carried, body, key, traceparent, scope)


def _attributes_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[dict[str, str], bytes | None]:
    """Read the attributes of an event, and its content type, from the headers of a request. Raises Problem (400)."""
    attributes: dict[str, str] = {}
    content_type = None
    for name, content in headers:
        if name == b"content-type":
            content_type = content
        if not name.startswith(_PREFIX):
            continue
        attribute = name.removeprefix(_PREFIX).decode("latin-1")
        _check_name(attribute, "ce-")
        if attribute in _NO_HEADERS:
            raise invalid(f"ce-{attribute}", _NO_HEADERS[attribute])
        if attribute in attributes:
            raise invalid(f"ce-{attribute}", "send each attribute once")
        try:
            attributes[attribute] = _text_of(content.decode("ascii"))
        except ValueError:
            raise invalid(f"ce-{attribute}", "percent-encode what is not ASCII, as UTF-8") from None
    if len(attributes) >= HEADERS_MAX:
        raise too_many("ce-", HEADERS_MAX - 1)
    for required in ("specversion", "id", "source", "type"):
        if required not in attributes:
            raise invalid(f"ce-{required}", "send this header: every CloudEvent has the attribute")
    return attributes, content_type


def _text_of(content: str) -> str:
    """Decode an attribute's value in a header (HTTP binding, section 3.1.3.2). Raises ValueError if it is not UTF-8.

    Older senders quote values that are percent-encoded now. Surrounding blanks are not part of the value.
    """
    content = content.strip(" \t")
    if _QUOTED.fullmatch(content):
        content = _ESCAPED.sub(r"\1", content[1:-1])
    return unquote(content, errors="strict")


def from_structured(
    body: bytes | msgspec.Raw, key: str | None, traceparent: bytes | None = None, scope: str = ""
) -> Event:
    """Make an event from a body that has been checked to be JSON. Raises Problem (400, 413)."""
    carried = [("content-type", STRUCTURED.encode())]
    fields = decode(_decode, body)
    event = _event(fields, "", carried, bytes(body), key, traceparent, scope)
    if fields.data is not msgspec.UNSET and fields.data_base64 is not None:
        raise invalid("data_base64", "send one of data and data_base64")
    if fields.data_base64 is not None and decode_base64(fields.data_base64) is None:
        raise invalid("data_base64", "it is no base64 (RFC 4648, section 4): encode the data so, padded")
    _check_members(body)
    return event


async def from_long_structured(
    body: bytes | msgspec.Raw, key: str | None, traceparent: bytes | None = None, scope: str = ""
) -> Event:
    """Make an event from an unchecked body of any length, which is checked in a thread. Raises Problem (400, 413)."""
    await check_text(body, b"", MEMBERS_MAX)
    return from_structured(body, key, traceparent, scope)


def _check_members(body: bytes | msgspec.Raw) -> None:
    """Check the names and types of the attributes (JSON format, section 2.2). Raises Problem (400)."""
    members = decode(_decode_members, body)
    if len(members) > MEMBERS_MAX:
        raise too_many("", MEMBERS_MAX)
    for name, content in members.items():
        if name in _TYPED:
            continue
        _check_name(name)
        if bytes(content).startswith((b"{", b"[")):
            raise invalid(name, "an attribute is a string, a number, true or false: send what has parts in data")


def _check_name(name: str, prefix: str = "") -> None:
    if _ATTRIBUTE.fullmatch(name) is None:
        raise invalid(f"{prefix}{name}", "use 1 to 64 lower-case letters and digits in the name of an attribute")


def parse_batch(body: bytes) -> list[msgspec.Raw]:
    """Cut a short batch into the JSON of its events. Raises Problem (400, 413)."""
    return strictly(body, _batch_of)


def _batch_of(body: bytes) -> list[msgspec.Raw]:
    events = decode(_decode_batch, body)
    if events:  # a batch may be empty (HTTP binding, section 3.3.2)
        check_count(len(events), "body")
    return events


async def parse_long_batch(body: bytes) -> list[msgspec.Raw]:
    """Cut a batch of any length, which is checked in a thread, as `parse_batch` does."""
    frame, texts = await in_thread(cut_batch, body, "")
    events = _batch_of(frame)
    return texts or events


def _event(
    event: CloudEvent,
    prefix: str,
    headers: list[Header],
    value: bytes,
    key: str | None,
    traceparent: bytes | None,
    scope: str,
) -> Event:
    if event.specversion != VERSION:
        raise invalid(f"{prefix}specversion", f"this is {event.specversion!r}: send {VERSION}")
    for name in ("id", "source", "type"):
        if not getattr(event, name):
            raise invalid(f"{prefix}{name}", "it must not be empty")
    if " " in event.source:
        raise invalid(f"{prefix}source", "a URI reference has no spaces: percent-encode them")
    if event.time is not None and not _is_time(event.time):
        raise invalid(f"{prefix}time", f"this is {event.time!r}: send it as RFC 3339 has it, like 2026-11-22T03:00:00Z")
    key = key_of(event, prefix) if key is None else parse_key(key)
    record_key = None if event.partitionkey is None else event.partitionkey.encode()
    topic = event.type if event.topic is None else event.topic
    return event_of(key, event_id(key, scope), topic, record_key, value, headers, traceparent=traceparent)


def _is_time(text: str) -> bool:
    found = _TIME.fullmatch(text)
    if found is None:
        return False
    try:
        date.fromisoformat(found[1])
    except ValueError:
        return False
    return True


def key_of(event: CloudEvent, prefix: str = "") -> str:
    """Make the key from `source` and `id` with a space, which no source (a URI reference) has. Raises Problem (400)."""
    try:
        return check_key(f"{event.source} {event.id}")
    except Problem:
        raise Problem(
            INVALID_KEY,
            f"{prefix}source and {prefix}id do not form a key (1 to 255 printable ASCII characters): "
            "send an Idempotency-Key header",
        ) from None
