"""Parses the records of version 2 of the Confluent REST Proxy's produce API to events: pure functions of the body."""

from typing import Annotated, Final, NamedTuple

import msgspec

from service.core.problems import TOO_LARGE, Problem
from service.events.event import BATCH_EVENTS_MAX, HEADERS_MAX, Event, check_text, cut_batch, decode, event_of
from service.events.produce import (
    INVALID_SCHEMA,
    NO_SCHEMAS,
    NULL,
    NUMBER_MOST,
    SCHEMA_TYPES,
    UNPROCESSABLE,
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
from service.registry.schema import SchemaType

V2_FORMATS: Final = {
    "application/vnd.kafka.json.v2+json": Format.JSON,
    "application/vnd.kafka.binary.v2+json": Format.BINARY,
    "application/vnd.kafka.text.v2+json": Format.STRING,  # of the Strimzi Bridge
    "application/vnd.kafka.avro.v2+json": Format.AVRO,
    "application/vnd.kafka.jsonschema.v2+json": Format.JSONSCHEMA,
    "application/vnd.kafka.protobuf.v2+json": Format.PROTOBUF,
}
"""The format of the keys and values of a v2 request, by the media type of its body."""

KEY_SCHEMA_MISSING: Final = 42201
VALUE_SCHEMA_MISSING: Final = 42202


class V2Body(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a v2 request. Formats without a schema ignore the schemas, as the peers do."""

    records: list[msgspec.Raw] | None = None
    key_schema: msgspec.Raw = NULL
    key_schema_id: msgspec.Raw = NULL
    value_schema: msgspec.Raw = NULL
    value_schema_id: msgspec.Raw = NULL


class V2Header(msgspec.Struct, forbid_unknown_fields=True):
    """A header of a v2 record; the value is base64."""

    key: str
    value: str | None = None


class V2Record(msgspec.Struct, forbid_unknown_fields=True):
    """One record of a v2 request. Its partition precedes that of the path.

    `headers` and `timestamp`, in ms since 1970, are those of the Strimzi Bridge.
    """

    key: msgspec.Raw = NULL
    value: msgspec.Raw = NULL
    partition: int | None = None
    headers: list[V2Header] | None = None
    timestamp: int | None = None


_decode_id = msgspec.json.Decoder(Annotated[int, msgspec.Meta(gt=0, le=NUMBER_MOST)]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_v2_body = msgspec.json.Decoder(V2Body).decode
_decode_v2_record = msgspec.json.Decoder(V2Record, strict=False).decode  # the peers take the partition "0" for 0


def v2_format(media_type: str, schemas: SchemaUse = NO_SCHEMAS) -> Format | None:
    """Find the format of a v2 body; None for another media type. Raises Problem (422) for a format with schemas."""
    data_format = V2_FORMATS.get(media_type)
    if data_format is not None:
        check_format(data_format, schemas)
    return data_format


class V2Schemas(NamedTuple):
    """The schemas that a v2 request names; None for keys or values without one."""

    key: SchemaRef | None
    value: SchemaRef | None


NO_V2_SCHEMAS: Final = V2Schemas(None, None)


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
        return NO_V2_SCHEMAS
    type = SCHEMA_TYPES[data_format]
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
    schemas: V2Schemas = NO_V2_SCHEMAS,
    use: SchemaUse = NO_SCHEMAS,
) -> Event:
    """Make the event of record `index` of a v2 request; `partition` is that of the path.

    Raises Problem (400, 413, 422).
    """
    fields = decode(_decode_v2_record, raw)
    if fields.partition is not None:
        partition = checked_partition(fields.partition)
    headers, own = headers_of([(header.key, header.value) for header in fields.headers or []])
    value = data_of(data_format, fields.value, "value")
    record_key = data_of(data_format, fields.key, "key")
    timestamp = None if fields.timestamp is None else checked_ms(fields.timestamp)
    if data_format.needs_schema:
        _check_v2_schemas(record_key, value, schemas)
    event = event_of(*key.id_of(index, own), topic, record_key, value, headers, partition, timestamp, traceparent)
    event.encoding = encoding_of(schemas.key, schemas.value, data_format if record_key is not None else None, use)
    return event


def _check_v2_schemas(record_key: bytes | None, value: bytes | None, schemas: V2Schemas) -> None:
    """Raise Problem (422) for a record that needs a schema which its request does not name."""
    if record_key is not None and schemas.key is None:
        raise ProduceProblem(422, KEY_SCHEMA_MISSING, "key: send key_schema or key_schema_id for records with keys")
    if value is not None and schemas.value is None:
        raise ProduceProblem(422, VALUE_SCHEMA_MISSING, "value: send value_schema or value_schema_id")
