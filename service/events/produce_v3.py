"""Parses the records of version 3 of the Confluent REST Proxy's produce API to events: pure functions of the body."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from msgspec.structs import replace

from service.contract.registry_rules import LATEST, SUBJECT_CHARS_MAX
from service.core.problems import Problem
from service.events.event import HEADERS_MAX, Event, check_text, cut_batch, decode, event_of, invalid
from service.events.produce import (
    INVALID_PAYLOAD,
    NO_SCHEMAS,
    NULL,
    NUMBER_MOST,
    SCHEMA_TYPES,
    Format,
    ProduceProblem,
    RequestKey,
    SchemaUse,
    check_format,
    checked_ms,
    checked_partition,
    checked_schema,
    data_of,
    encoding_of,
    headers_of,
)
from service.events.schema_refs import SchemaRef
from service.events.strict_json import LONG_BYTES, in_thread, strictly

INVALID_BATCH: Final = 42208
# Entries of a v3 batch: kafka-rest's default (api.v3.produce.batch.maximum.entries).
ENTRIES_MAX: Final = 10
NUMBER_DIGITS: Final = 10
_STRATEGIES: Final = {"TOPIC_NAME": "topic", "RECORD_NAME": "record", "TOPIC_RECORD_NAME": "topic-record"}
_ENTRY_ID: Final = re.compile(r"[0-9A-Za-z_-]{1,80}")
_ENTRY_ID_BYTES: Final = 2 + 6 * 80  # in JSON, each character escaped
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class V3Data(msgspec.Struct, forbid_unknown_fields=True):
    """The key or the value of a v3 record. A schema, or no type, needs a schema registry."""

    data: msgspec.Raw
    type: Format | None = None
    subject: str | None = None
    subject_name_strategy: str | None = None
    schema_id: int | None = None
    schema_version: int | str | None = None
    schema: str | None = None


class V3Header(msgspec.Struct, forbid_unknown_fields=True):
    """A header of a v3 record; the value is base64."""

    name: str
    value: str | None = None


class V3Record(msgspec.Struct, forbid_unknown_fields=True):
    """One record of a v3 request. `timestamp` is RFC 3339, or seconds since 1970."""

    partition_id: int | None = None
    headers: list[V3Header] | None = None
    key: V3Data | None = None
    value: V3Data | None = None
    timestamp: str | int | float | None = None


class V3Event(msgspec.Struct, frozen=True):
    """The event of a v3 record, and the formats of its key and value, which the answer repeats."""

    event: Event
    key_format: Format | None
    value_format: Format | None


_decode_text = msgspec.json.Decoder(str).decode
_decode_v3_record = msgspec.json.Decoder(V3Record, strict=False).decode


def decode_v3(text: bytes) -> V3Record:
    """Check and decode a v3 record of at most LONG_BYTES. Raises Problem (400, 413)."""
    return strictly(text, lambda text: decode(_decode_v3_record, text))


async def decode_long_v3(text: bytes) -> V3Record:
    """Check in a thread and decode a v3 record of any length. Raises as `decode_v3`."""
    await check_text(text, b"headers", HEADERS_MAX)
    return decode(_decode_v3_record, text)


def v3_event(
    fields: V3Record,
    index: int | str,
    topic: str,
    key: RequestKey,
    traceparent: bytes | None,
    use: SchemaUse = NO_SCHEMAS,
) -> V3Event:
    """Make the event of record `index` of a v3 request, or of the entry of a batch with this id.

    Raises Problem (400, 404, 413, 422).
    """
    if fields.partition_id is not None:
        checked_partition(fields.partition_id)
    headers, own = headers_of([(header.name, header.value) for header in fields.headers or []])
    key_format, record_key, key_schema = _v3_data(fields.key, "key", use)
    value_format, value, value_schema = _v3_data(fields.value, "value", use)
    timestamp = None if fields.timestamp is None else _ms_of(fields.timestamp)
    event = event_of(
        *key.id_of(index, own), topic, record_key, value, headers, fields.partition_id, timestamp, traceparent
    )
    event.encoding = encoding_of(key_schema, value_schema, key_format, use)
    return V3Event(event, key_format, value_format)


class V3Batch(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a v3 batch."""

    entries: list[msgspec.Raw] | None = None


class V3Entry(V3Record, forbid_unknown_fields=True):
    """One record of a v3 batch. `id` is a string that no other entry of the batch has."""

    id: str | None = None


class _EntryId(msgspec.Struct):
    """The id of an entry, whatever else it has."""

    id: msgspec.Raw = NULL


_decode_v3_batch = msgspec.json.Decoder(V3Batch).decode
_decode_v3_entry = msgspec.json.Decoder(V3Entry, strict=False).decode
_decode_entry_id = msgspec.json.Decoder(_EntryId).decode


async def parse_v3_batch(body: bytes) -> list[tuple[str, msgspec.Raw]]:
    """Parse the entries of a v3 batch, which a thread checks if the body is long: the id and the JSON of each.

    Raises Problem (400, 413, 422).
    """
    if body.strip() in (b"", b"null"):
        raise ProduceProblem(422, INVALID_BATCH, "body: is empty: send entries")
    if len(body) > LONG_BYTES:
        frame, texts = await in_thread(cut_batch, body, "entries")
        entries = decode(_decode_v3_batch, frame).entries
        entries = texts or entries
    else:
        entries = strictly(body, lambda body: decode(_decode_v3_batch, body)).entries
    if not entries:
        raise ProduceProblem(422, INVALID_BATCH, "entries: send at least one entry")
    if len(entries) > ENTRIES_MAX:
        detail = f"entries: there are {len(entries)}; at most {ENTRIES_MAX} are taken: send several batches, or records"
        raise ProduceProblem(422, INVALID_BATCH, detail)
    return [*zip(_ids_of(entries), entries, strict=True)]


def _ids_of(entries: Sequence[msgspec.Raw]) -> list[str]:
    """Read the ids of the entries of a batch. Raises Problem (400, 422)."""
    ids: list[str] = []
    for number, raw in enumerate(entries):
        try:
            text = decode(_decode_entry_id, raw).id
        except Problem:  # it is JSON, but no object
            raise invalid(f"entries[{number}]", "send an object") from None
        id = _entry_id_of(text)
        if id is None:
            remedy = "send a string of 1 to 80 letters, digits, '-' and '_'"
            raise ProduceProblem(422, INVALID_BATCH, f"entries[{number}].id: {remedy}")
        if id in ids:
            raise ProduceProblem(422, INVALID_BATCH, f"entries[{number}].id: another entry has {id}: use each id once")
        ids.append(id)
    return ids


def _entry_id_of(text: msgspec.Raw) -> str | None:
    """Read the id of an entry from its JSON; None for what is no id."""
    if len(text) > _ENTRY_ID_BYTES:
        return None
    try:
        id = _decode_text(text)
    except msgspec.ValidationError:
        return None
    return id if _ENTRY_ID.fullmatch(id) else None


async def parse_v3_entry(raw: msgspec.Raw) -> V3Entry:
    """Parse an entry, whose JSON a thread checks if it is long. Raises Problem (400, 413)."""
    if len(raw) > LONG_BYTES:
        await check_text(raw, b"headers", HEADERS_MAX)
    return decode(_decode_v3_entry, raw)


def _v3_data(given: V3Data | None, field: str, use: SchemaUse) -> tuple[Format | None, bytes | None, SchemaRef | None]:
    """Read the key or the value of a v3 record: its format (None without a type), its content, and its schema."""
    if given is None:
        return None, None, None
    schema = (given.subject, given.subject_name_strategy, given.schema_id, given.schema_version, given.schema)
    names_one = schema != (None,) * len(schema)
    if (given.type is None or names_one) and not use.has_registry:
        raise ProduceProblem(
            422,
            INVALID_PAYLOAD,
            f"{field}: no schema registry is configured: send type (BINARY, JSON or STRING) and data only",
        )
    if given.type is None or given.type.needs_schema:
        if given.type is not None:
            check_format(given.type, use)
        return given.type, data_of(Format.AVRO, given.data, f"{field}.data"), _v3_schema(given, field)
    if names_one:
        raise invalid(field, f"the type {given.type.value} has no schema: send type and data only")
    return given.type, data_of(given.type, given.data, f"{field}.data"), None


def _v3_schema(given: V3Data, field: str) -> SchemaRef:
    """Read how a v3 record names its schema: by a text with its type, an id, a version, or only a subject.

    Raises Problem (400, 422).
    """
    named = (given.schema_id, given.schema_version, given.schema)
    if sum(each is not None for each in named) > 1:
        raise invalid(field, "send one of schema_id, schema_version and schema")
    if given.subject is not None and given.subject_name_strategy is not None:
        raise invalid(field, "send one of subject and subject_name_strategy")
    if (given.type is None) != (given.schema is None):
        raise invalid(field, "type and schema go together: a schema_id or a schema_version has its own type")
    subject = "" if given.subject is None else given.subject
    if given.subject is not None and not 0 < len(subject) <= SUBJECT_CHARS_MAX:
        raise invalid(f"{field}.subject", f"use 1 to {SUBJECT_CHARS_MAX} characters")
    strategy = _STRATEGIES.get(given.subject_name_strategy or "TOPIC_NAME")
    if strategy is None:
        raise invalid(f"{field}.subject_name_strategy", f"use one of {', '.join(_STRATEGIES)}")
    ref = SchemaRef(subject, strategy)
    if given.schema is not None and given.type is not None:
        return replace(ref, text=checked_schema(given.schema, f"{field}.schema"), type=SCHEMA_TYPES[given.type])
    if given.schema_id is not None:
        return replace(ref, id=_checked_number(given.schema_id, f"{field}.schema_id"))
    return replace(ref, version=_version_of(given.schema_version, f"{field}.schema_version"))


def _version_of(version: int | str | None, field: str) -> int | None:
    """Read a version: a number, also as text; None for the latest. Raises Problem (400)."""
    if version is None or version == LATEST:
        return None
    if isinstance(version, str):
        digits = version.isascii() and version.isdecimal() and len(version) <= NUMBER_DIGITS
        version = int(version) if digits else 0
    return _checked_number(version, field)


def _checked_number(number: int, field: str) -> int:
    if not 0 < number <= NUMBER_MOST:
        raise invalid(field, f"use a number from 1 to {NUMBER_MOST}")
    return number


def _ms_of(timestamp: str | int | float) -> int:
    """Convert a timestamp to ms since 1970: RFC 3339 with its offset, or a number of seconds."""
    ms: float
    try:
        if isinstance(timestamp, str):
            moment = datetime.fromisoformat(timestamp)
            ms = (moment - _EPOCH) // timedelta(milliseconds=1)  # TypeError without an offset
        else:
            ms = timestamp * 1000
    except (ValueError, TypeError, OverflowError):
        ms = -1
    return checked_ms(ms)
