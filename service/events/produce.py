"""Parses the records of the Confluent REST Proxy's produce API, v2 and v3, to events. Pure functions of the body.

https://docs.confluent.io/platform/current/kafka-rest/api.html; Karapace and the Strimzi Bridge serve v2 as well.
Where these differ, the tables in tests/integration/peers.py say which one is followed.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from service.contract.registry_rules import LATEST, SUBJECT_CHARS_MAX
from service.contract.wire import KEY_HEADER, RESERVED_HEADERS, Header, event_id, member_id
from service.core.problems import INVALID_EVENT, INVALID_KEY, MISSING_KEY, TOO_LARGE, Problem
from service.core.settings import EVENT_BYTES_MAX
from service.events.base64_text import decode_base64
from service.events.event import (
    BATCH_EVENTS_MAX,
    HEADERS_MAX,
    PARTITION_MOST,
    TIMESTAMP_MOST,
    Event,
    check_key,
    check_text,
    cut_batch,
    decode,
    event_of,
    invalid,
    too_many,
)
from service.events.schema_refs import Encoding, SchemaRef
from service.events.strict_json import LONG_BYTES, in_thread, strictly
from service.registry.schema import SchemaType

# A longer JSON key is written as it was sent: encoding it again would hold the event loop for milliseconds.
COMPACTED_BYTES: Final = LONG_BYTES


class Format(Enum):
    """The form of a key or value in the request, by its name in v3."""

    BINARY = "BINARY"
    JSON = "JSON"
    STRING = "STRING"
    AVRO = "AVRO"
    JSONSCHEMA = "JSONSCHEMA"
    PROTOBUF = "PROTOBUF"

    @property
    def needs_schema(self) -> bool:
        return self in (Format.AVRO, Format.JSONSCHEMA, Format.PROTOBUF)


V2_FORMATS: Final = {
    "application/vnd.kafka.json.v2+json": Format.JSON,
    "application/vnd.kafka.binary.v2+json": Format.BINARY,
    "application/vnd.kafka.text.v2+json": Format.STRING,  # of the Strimzi Bridge
    "application/vnd.kafka.avro.v2+json": Format.AVRO,
    "application/vnd.kafka.jsonschema.v2+json": Format.JSONSCHEMA,
    "application/vnd.kafka.protobuf.v2+json": Format.PROTOBUF,
}
"""The format of the keys and values of a v2 request, by the media type of its body."""

PARTITION_NOT_FOUND: Final = 40402
KEY_SCHEMA_MISSING: Final = 42201
VALUE_SCHEMA_MISSING: Final = 42202
INVALID_SCHEMA: Final = 42205
INVALID_PAYLOAD: Final = 42206
INVALID_BATCH: Final = 42208
UNPROCESSABLE: Final = 422
# Entries of a v3 batch: kafka-rest's default (api.v3.produce.batch.maximum.entries).
ENTRIES_MAX: Final = 10
# Characters of a schema that a request brings.
SCHEMA_CHARS_MAX: Final = 256 * 1024
# Ids and versions of schemas are integers of 4 bytes.
NUMBER_MOST: Final = 2**31 - 1
NUMBER_DIGITS: Final = 10
_TYPES: Final = {
    Format.AVRO: SchemaType.AVRO,
    Format.JSONSCHEMA: SchemaType.JSON,
    Format.PROTOBUF: SchemaType.PROTOBUF,
}
FORMATS: Final = {type: data_format for data_format, type in _TYPES.items()}
"""The format of keys and values by the type of their schema."""
_STRATEGIES: Final = {"TOPIC_NAME": "topic", "RECORD_NAME": "record", "TOPIC_RECORD_NAME": "topic-record"}
JSON_KEY: Final = Encoding(json_key=True)
_NULL: Final = msgspec.Raw(b"null")
_NUMBER: Final = re.compile(rb"-?[0-9]")
_ENTRY_ID: Final = re.compile(r"[0-9A-Za-z_-]{1,80}")
_ENTRY_ID_BYTES: Final = 2 + 6 * 80  # in JSON, each character escaped
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class ProduceProblem(Problem):
    """A problem for which the produce API has an error code of its own; `status` is that of its HTTP answer."""

    def __init__(self, status: int, error_code: int, detail: str) -> None:
        super().__init__(INVALID_EVENT, detail)
        self.status = status
        self.error_code = error_code


class RequestKey(msgspec.Struct, frozen=True):
    """The idempotency key of a produce request in its scope; record i has the id of member i of an atomic batch.

    So a request is sent again as a whole: in one with fewer records, a record would get the id of another. The entries
    of a v3 batch have ids of their own instead of an index: some of them can be sent again alone.
    `key` is the request's, else one that the service has made. It is None where a rule refuses that: then each record
    needs a key of its own. `is_old`: when the request began, the key was older than its retention.
    """

    key: str | None
    scope: str
    is_old: bool = False

    @property
    def fresh(self) -> str:
        """The key, if it was not old when the request began; else ""."""
        return "" if self.key is None or self.is_old else self.key

    def id_of(self, index: int | str, own: bytes | None) -> tuple[str, bytes]:
        """Return the key and the id of a record; `own` is the record's own key. Raises Problem (400).

        `index` is the record's, from 0, or the id of an entry.
        """
        if own is not None:
            key = check_key(own.decode("latin-1"), f"headers.{KEY_HEADER}")
            return key, event_id(key, self.scope)
        if self.key is None:
            raise Problem(
                MISSING_KEY, "Idempotency-Key: the topic's rule refuses requests without one: send this header"
            )
        return self.key, member_id(self.key, index, self.scope)


# ------------------------------------------------------------------------------------------------------------------ v2


class V2Body(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a v2 request. Formats without a schema ignore the schemas, as the peers do."""

    records: list[msgspec.Raw] | None = None
    key_schema: msgspec.Raw = _NULL
    key_schema_id: msgspec.Raw = _NULL
    value_schema: msgspec.Raw = _NULL
    value_schema_id: msgspec.Raw = _NULL


class V2Header(msgspec.Struct, forbid_unknown_fields=True):
    """A header of a v2 record; the value is base64."""

    key: str
    value: str | None = None


class V2Record(msgspec.Struct, forbid_unknown_fields=True):
    """One record of a v2 request. Its partition precedes that of the path.

    `headers` and `timestamp`, in ms since 1970, are those of the Strimzi Bridge.
    """

    key: msgspec.Raw = _NULL
    value: msgspec.Raw = _NULL
    partition: int | None = None
    headers: list[V2Header] | None = None
    timestamp: int | None = None


_decode_id = msgspec.json.Decoder(Annotated[int, msgspec.Meta(gt=0, le=NUMBER_MOST)]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_v2_body = msgspec.json.Decoder(V2Body).decode
_decode_v2_record = msgspec.json.Decoder(V2Record, strict=False).decode  # the peers take the partition "0" for 0


class SchemaUse(NamedTuple):
    """Whether there is a schema registry, and whether the topic's rule encodes the keys of records."""

    has_registry: bool = False
    encodes_keys: bool = False


NO_SCHEMAS: Final = SchemaUse()


def v2_format(media_type: str, schemas: SchemaUse = NO_SCHEMAS) -> Format | None:
    """Find the format of a v2 body; None for another media type. Raises Problem (422) for a format with schemas."""
    data_format = V2_FORMATS.get(media_type)
    if data_format is not None:
        check_format(data_format, schemas)
    return data_format


def check_format(data_format: Format, schemas: SchemaUse = NO_SCHEMAS) -> None:
    """Raise Problem (422) for a format whose values need a schema, if there is no registry."""
    if data_format.needs_schema and not schemas.has_registry:
        raise ProduceProblem(
            422,
            INVALID_PAYLOAD,
            f"{data_format.value}: no schema registry is configured, so that only BINARY, JSON and STRING are taken",
        )


class V2Schemas(NamedTuple):
    """The schemas that a v2 request names; None for keys or values without one."""

    key: SchemaRef | None
    value: SchemaRef | None


async def parse_v2(body: bytes, data_format: Format) -> tuple[list[msgspec.Raw], V2Schemas]:
    """Parse the records of a v2 body, which a thread checks if it is long, and its schemas.

    Raises Problem (400, 413, 422).
    """
    if body.strip() in (b"", b"null"):
        raise ProduceProblem(422, UNPROCESSABLE, "body: is empty: send records")
    if len(body) > LONG_BYTES:
        frame, texts = await in_thread(cut_batch, body, "records")
        fields = decode(_decode_v2_body, frame)
        records = texts or fields.records
    else:
        fields = strictly(body, lambda body: decode(_decode_v2_body, body))
        records = fields.records
    if not records:
        raise ProduceProblem(422, UNPROCESSABLE, "records: send at least one record")
    if len(records) > BATCH_EVENTS_MAX:
        raise Problem(TOO_LARGE, f"records: there are {len(records)}; at most {BATCH_EVENTS_MAX} are taken")
    return records, _v2_schemas(fields, data_format)


def _v2_schemas(fields: V2Body, data_format: Format) -> V2Schemas:
    """Read the schemas of a v2 request in a format that needs them. Raises Problem (422)."""
    if not data_format.needs_schema:
        return V2Schemas(None, None)
    type = _TYPES[data_format]
    return V2Schemas(
        _v2_schema("key_schema", fields.key_schema, fields.key_schema_id, type),
        _v2_schema("value_schema", fields.value_schema, fields.value_schema_id, type),
    )


def _v2_schema(name: str, text: msgspec.Raw, id: msgspec.Raw, type: SchemaType) -> SchemaRef | None:
    if bytes(text) == bytes(id) == b"null":
        return None
    try:
        if bytes(text) == b"null":
            return SchemaRef(id=_decode_id(id), type=type)
        if bytes(id) == b"null":
            return SchemaRef(text=checked_schema(_decode_text(text), name), type=type)
    except msgspec.ValidationError:
        pass
    remedy = "send the text of a schema, or its number as the id, and one of them"
    raise ProduceProblem(422, INVALID_SCHEMA, f"{name}: {remedy}")


def checked_schema(text: str, name: str) -> str:
    """Check the length of a schema's text. Raises Problem (422)."""
    if 0 < len(text) <= SCHEMA_CHARS_MAX:
        return text
    raise ProduceProblem(422, INVALID_SCHEMA, f"{name}: send a schema of 1 to {SCHEMA_CHARS_MAX} characters")


async def check_long_v2(raw: msgspec.Raw) -> None:
    """Check in a thread the JSON of a v2 record, of any length, so that `v2_event` may parse it on the event loop.

    Raises Problem (400, 413).
    """
    await check_text(raw, b"headers", HEADERS_MAX)


def v2_event(
    raw: msgspec.Raw,
    index: int,
    data_format: Format,
    topic: str,
    partition: int | None,
    key: RequestKey,
    traceparent: bytes | None,
    schemas: V2Schemas = V2Schemas(None, None),  # noqa: B008 - it is immutable
    use: SchemaUse = NO_SCHEMAS,
) -> Event:
    """Make the event of record `index` of a v2 request; `partition` is that of the path.

    Raises Problem (400, 413, 422).
    """
    fields = decode(_decode_v2_record, raw)
    if fields.partition is not None:
        partition = _partition_of(fields.partition)
    headers, own = _headers_of([(header.key, header.value) for header in fields.headers or []])
    value = _data_of(data_format, fields.value, "value")
    record_key = _data_of(data_format, fields.key, "key")
    timestamp = None if fields.timestamp is None else _checked_ms(fields.timestamp)
    if data_format.needs_schema:
        _check_v2_schemas(record_key, value, schemas)
    event = event_of(*key.id_of(index, own), topic, record_key, value, headers, partition, timestamp, traceparent)
    event.encoding = _encoding_of(schemas.key, schemas.value, data_format if record_key is not None else None, use)
    return event


def _check_v2_schemas(record_key: bytes | None, value: bytes | None, schemas: V2Schemas) -> None:
    """Raise Problem (422) for a record that needs a schema which its request does not name."""
    if record_key is not None and schemas.key is None:
        raise ProduceProblem(422, KEY_SCHEMA_MISSING, "key: send key_schema or key_schema_id for records with keys")
    if value is not None and schemas.value is None:
        raise ProduceProblem(422, VALUE_SCHEMA_MISSING, "value: send value_schema or value_schema_id")


# ------------------------------------------------------------------------------------------------------------------ v3


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
        _partition_of(fields.partition_id)
    headers, own = _headers_of([(header.name, header.value) for header in fields.headers or []])
    key_format, record_key, key_schema = _v3_data(fields.key, "key", use)
    value_format, value, value_schema = _v3_data(fields.value, "value", use)
    timestamp = None if fields.timestamp is None else _ms_of(fields.timestamp)
    event = event_of(
        *key.id_of(index, own), topic, record_key, value, headers, fields.partition_id, timestamp, traceparent
    )
    event.encoding = _encoding_of(key_schema, value_schema, key_format, use)
    return V3Event(event, key_format, value_format)


class V3Batch(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a v3 batch."""

    entries: list[msgspec.Raw] | None = None


class V3Entry(V3Record, forbid_unknown_fields=True):
    """One record of a v3 batch. `id` is a string that no other entry of the batch has."""

    id: str | None = None


class _EntryId(msgspec.Struct):
    """The id of an entry, whatever else it has."""

    id: msgspec.Raw = _NULL


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
        return given.type, _data_of(Format.AVRO, given.data, f"{field}.data"), _v3_schema(given, field)
    if names_one:
        raise invalid(field, f"the type {given.type.value} has no schema: send type and data only")
    return given.type, _data_of(given.type, given.data, f"{field}.data"), None


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
        return replace(ref, text=checked_schema(given.schema, f"{field}.schema"), type=_TYPES[given.type])
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


def _encoding_of(
    key: SchemaRef | None, value: SchemaRef | None, key_format: Format | None, use: SchemaUse
) -> Encoding | None:
    """Return what a record says about its schemas; None if it says nothing, or nothing that counts."""
    json_key = key_format is None or key_format is Format.JSON or key_format.needs_schema
    if key is not None or value is not None:
        return Encoding(key, value, json_key)
    return JSON_KEY if use.encodes_keys and key_format is not None and json_key else None


def _headers_of(given: list[tuple[str, str | None]]) -> tuple[list[Header], bytes | None]:
    """Return the headers to write, and the record's own idempotency key, which a header of that name has."""
    if len(given) > HEADERS_MAX:
        raise too_many("headers", HEADERS_MAX)
    headers: list[Header] = []
    own: bytes | None = None
    for name, text in given:
        # Kafka knows headers without a value; they are written with an empty one.
        content = b"" if text is None else _base64(text, f"headers.{name}")
        if name.lower() == KEY_HEADER:
            if own is not None:
                raise Problem(INVALID_KEY, f"headers.{KEY_HEADER}: send it once")
            own = content
        elif name.lower() in RESERVED_HEADERS:
            raise invalid(f"headers.{name}", "this name is reserved for Fencepost: use another")
        else:
            headers.append((name, content))
    return headers, own


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
    return _checked_ms(ms)


# ---------------------------------------------------------------------------------------------------------------- both


def _checked_ms(ms: float) -> int:
    if not 0 <= ms <= TIMESTAMP_MOST:
        raise invalid("timestamp", "send a time since 1970: of v3 as in 2021-02-05T19:14:42.123Z, of v2 in ms")
    return int(ms)


def _partition_of(partition: int) -> int:
    if not 0 <= partition <= PARTITION_MOST:
        raise ProduceProblem(404, PARTITION_NOT_FOUND, "partition: use a partition's number, from 0")
    return partition


def _data_of(data_format: Format, given: msgspec.Raw, field: str) -> bytes | None:
    """Return the bytes to write for a key or a value; None for null.

    A JSON value is written as it was sent. A JSON key is written without blanks and escapes, as the peers write it, so
    that equal keys get one partition.
    """
    raw = bytes(given)
    if raw == b"null":
        return None
    if data_format is Format.JSON or data_format.needs_schema:
        return _compact(raw) if field.startswith("key") else raw
    if not raw.startswith(b'"'):
        raise invalid(field, "send a string of base64" if data_format is Format.BINARY else "send a string")
    text = msgspec.json.decode(raw, type=str)
    return _base64(text, field) if data_format is Format.BINARY else text.encode()


def _compact(text: bytes) -> bytes:
    if len(text) > COMPACTED_BYTES or _NUMBER.match(text):  # a number keeps its form
        return text
    try:
        return msgspec.json.encode(msgspec.json.decode(text))
    except msgspec.DecodeError:  # a number in it that no double can hold
        return text


def _base64(text: str, field: str) -> bytes:
    """Decode standard base64 (RFC 4648, section 4), whose padding may be missing. Raises Problem (400, 413)."""
    if len(text) // 4 * 3 > EVENT_BYTES_MAX + 2:  # + 2 bytes of padding
        raise Problem(TOO_LARGE, f"{field}: at most {EVENT_BYTES_MAX} bytes are taken")
    content = decode_base64(text + "=" * (-len(text) % 4))
    if content is None:
        raise invalid(field, "use standard base64 (RFC 4648, section 4)")
    return content
