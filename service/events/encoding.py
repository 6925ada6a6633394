"""Encodes the keys and values of events by schemas of a Schema Registry, to Confluent's wire format.

An encoded key or value is a byte 0, the schema's id (4 bytes, big-endian), for Protobuf the indexes of the message, and
the data: Avro's or Protobuf's binary encoding, or the JSON as it was sent.
https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/index.html#wire-format
"""

import asyncio
import json
import math
import struct
from collections.abc import Callable, Hashable
from copy import copy
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

import jsonschema_rs

from service.contract import RegistryRule, Rules, SchemaRule
from service.contract.registry_rules import subject_by
from service.contract.wire.ids import fingerprint
from service.core.bounded import Bounded
from service.core.metrics import Telemetry
from service.core.problems import NOT_WRITTEN, SCHEMA_MISMATCH, UNKNOWN_SCHEMA, UNUSABLE_SCHEMA, Problem
from service.core.settings import EVENT_BYTES_MAX, TOPICS_MAX, Settings
from service.core.shared_task import shared, unwaited
from service.events.avro import AvroSchema, Misfit
from service.events.dead_letters import DeadLetter
from service.events.event import Event, too_large
from service.events.protobuf import ProtobufSchema
from service.events.schema_refs import KEY, VALUE, Encoded, Encoding, SchemaRef, UsedSchema
from service.events.schemas import JsonValidator, parse_schema, parse_value, path_of
from service.events.strict_json import in_thread, without_collections
from service.registry.client import RegistryClient
from service.registry.schema import (
    Import,
    Registered,
    RegistryAway,
    Schema,
    SchemaAbsent,
    SchemaType,
    SchemaUnusable,
    digest_of,
)

MAGIC: Final = 0
_PREFIX: Final = struct.Struct(">BI")
# A longer key and value are encoded in a thread; shorter ones take some milliseconds at most.
AT_ONCE_BYTES: Final = 2 * 1024
# Schemas ready to encode. Each is counted with the bytes of its text and its references' texts, and takes some 20 times
# as many.
READY_MAX: Final = 500
READY_BYTES_MAX: Final = 2 * 1024 * 1024
READY_ENTRY_BYTES: Final = 500
# Schemas that are being made ready at a time; one thread makes them, one after the other.
MAKING_MAX: Final = 200
# Characters of the reason why a schema cannot be made ready, kept and answered: fastavro's messages quote the schema.
WHY_CHARS: Final = 300
RETRY_MOST_S: Final = 60


class Codec(Protocol):
    """A schema that is ready to encode."""

    @property
    def name(self) -> str:
        """The name of its type, by which strategies make subjects."""

    @property
    def takes_text(self) -> bool:
        """Whether its values are strings."""

    def encode(self, text: bytes, value: Any) -> bytes:
        """Encode a value of JSON, whose text is `text`, behind the id. Raises Misfit."""


class AvroCodec:
    """Encodes by an Avro schema."""

    def __init__(self, text: str, imports: list[Import]) -> None:
        self._schema = AvroSchema(text, [each.schema.text for each in imports])
        self.name, self.takes_text = self._schema.name, self._schema.takes_text

    def encode(self, text: bytes, value: Any) -> bytes:
        return self._schema.encode(value, len(text))


class JsonCodec:
    """Validates by a JSON Schema; the data is the JSON as it was sent."""

    def __init__(self, text: str, imports: list[Import]) -> None:
        schema = parse_schema(text)
        self._validator = JsonValidator(text, _by_uri(schema, imports), trusted=False)
        described = schema if isinstance(schema, dict) else {}
        self.name = str(described.get("title", ""))
        self.takes_text = described.get("type") == "string"

    def encode(self, text: bytes, value: Any) -> bytes:
        violation = self._validator.violation(value, len(text))
        if violation is not None:
            path, why = violation
            raise Misfit(why, *reversed(path))
        return text


def _by_uri(schema: Any, imports: list[Import]) -> list[tuple[str, Any]]:
    """Name imports by the URIs to which references to their names resolve: relative to the schema's own."""
    return [(each.name, parse_schema(each.schema.text)) for each in imports]


class ProtobufCodec:
    """Encodes by a message of a Protobuf schema."""

    takes_text = False

    def __init__(self, descriptors: bytes, message: str) -> None:
        self._schema = ProtobufSchema(descriptors, message)
        self.name = self._schema.name

    def encode(self, text: bytes, value: Any) -> bytes:
        return self._schema.indexes + self._schema.encode(value)


class _Ready(NamedTuple):
    """A schema that was looked up and is ready to encode."""

    used: UsedSchema
    codec: Codec


class _Parts(NamedTuple):
    """The encoded parts of an event; a part is None where it is absent or stays as it was sent."""

    key: _Ready | None
    value: _Ready | None


class Encoder:
    """Encodes events by the schemas that the rules and the requests name."""

    def __init__(self, client: RegistryClient, settings: Settings, rules: Rules, telemetry: Telemetry) -> None:
        self._client = client
        self._register = settings.registry_register
        self._telemetry = telemetry
        self._rule = _encodings_by(rules)
        self._codecs: Bounded[Codec] = Bounded(READY_MAX, READY_BYTES_MAX)
        self._unusable: Bounded[str] = Bounded(READY_MAX, READY_BYTES_MAX)  # why a schema cannot be made ready
        self._making: dict[Hashable, asyncio.Task[Codec]] = {}  # schemas that are being made ready

    def with_rules(self, rules: Rules) -> "Encoder":
        """Return an encoder by other rules, with the same schemas ready."""
        other = copy(self)
        other._rule = _encodings_by(rules)
        return other

    def has_rule_for(self, topic: str) -> bool:
        """Whether a rule names schemas for the events of a topic."""
        return self._rule(topic) is not None

    def concerns(self, event: Event) -> bool:
        """Whether an event is to be encoded, and is not yet. A dead letter has what was sent."""
        if event.encoded is not None or isinstance(event, DeadLetter):
            return False
        return _names_any(event.encoding) or self.has_rule_for(event.topic)

    async def encode(self, event: Event, deadline: float) -> None:
        """Encode an event's key and value, looking up their schemas until `deadline` (time.monotonic).

        Raises Problem: 422 for what a schema refuses, 413, and 503 where the registry does not answer.
        """
        parts = await self._parts_of(event, deadline)
        json_key = event.encoding is not None and event.encoding.json_key
        if len(event.value or b"") + len(event.record_key or b"") > AT_ONCE_BYTES:
            key, value = await in_thread(_encoded_long, event, parts, json_key)
        else:
            key, value = _encoded(event, parts, json_key)
        size = event.size - len(event.record_key or b"") - len(event.value or b"") + len(key or b"") + len(value or b"")
        if size > EVENT_BYTES_MAX:
            raise too_large(size)
        event.record_key, event.value, event.size = key, value, size
        fp = fingerprint(event.topic, event.partition, key, event.headers, value)
        used_key, used_value = (None if part is None else part.used for part in parts)
        event.encoded = Encoded(used_key, used_value, fp)

    async def _parts_of(self, event: Event, deadline: float) -> _Parts:
        """Look up the schemas for the parts of an event that are there."""
        asked, by_rule = event.encoding or Encoding(), self._rule(event.topic) or Encoding()
        found: dict[str, _Ready | None] = {KEY: None, VALUE: None}
        for part, content, ref in (
            (KEY, event.record_key, asked.key or by_rule.key),
            (VALUE, event.value, asked.value or by_rule.value),
        ):
            if content is None or ref is None:
                continue
            try:
                async with asyncio.timeout_at(deadline):
                    found[part] = await self._ready(ref, event.topic, part)
            except SchemaAbsent as error:
                raise Problem(UNKNOWN_SCHEMA, f"{part}: {_named(ref, event.topic, part)}: {error}") from None
            except (SchemaUnusable, ValueError) as error:
                raise Problem(UNUSABLE_SCHEMA, f"{part}: {_named(ref, event.topic, part)}: {error}") from None
            except (RegistryAway, TimeoutError) as error:
                self._telemetry.schema_registry.unserved.inc()
                raise _away(part, error) from None
        return _Parts(found[KEY], found[VALUE])

    async def _ready(self, ref: SchemaRef, topic: str, part: str) -> _Ready:
        """Look up a schema and make it ready. Raises what RegistryClient does, and ValueError for an unusable one."""
        if ref.id is not None:
            schema = await self._client.by_id(ref.id)
            codec = await self._codec(ref.id, schema, ref.message)
            subject = _subject(ref, topic, part, codec)
            registered = await self._client.registered(subject, schema, register=False)
            return _ready(Registered(subject, ref.id, registered.version, schema), codec)
        if ref.text:
            assert ref.type is not None
            schema = Schema(ref.type, ref.text)
            subject = ref.subject or await self._subject_of_text(ref, topic, part, schema)
            registered = await self._client.registered(subject, schema, register=self._register)
        else:
            registered = await self._client.by_version(_subject(ref, topic, part, None), ref.version)
        return _ready(registered, await self._codec(registered.id, registered.schema, ref.message))

    async def _subject_of_text(self, ref: SchemaRef, topic: str, part: str, schema: Schema) -> str:
        if ref.strategy == "topic":
            return _subject(ref, topic, part, None)
        return _subject(ref, topic, part, await self._codec(None, schema, ref.message))

    async def _codec(self, id: int | None, schema: Schema, message: str) -> Codec:
        """Return a schema that is ready, or make it ready, once for all events that wait for it.

        `id` is None while the schema is not registered. Raises ValueError if it cannot be used, and what RegistryClient
        does. The work goes on after the deadline of an event: a later one finds the schema ready.
        """
        key = digest_of(schema) if id is None else id, message
        codec = self._codecs.get(key)
        if codec is not None:
            return codec
        if (why := self._unusable.get(key)) is not None:
            raise ValueError(why)
        making = self._making.get(key)
        if making is None:
            if len(self._making) >= MAKING_MAX:
                raise RegistryAway(f"{MAKING_MAX} schemas are being made ready", everywhere=False)
            making = self._making[key] = asyncio.create_task(self._make(key, id, schema, message))
            making.add_done_callback(lambda _: self._making.pop(key, None))
            making.add_done_callback(unwaited)
        return await shared(making)

    async def _make(self, key: Hashable, id: int | None, schema: Schema, message: str) -> Codec:
        """Make a schema ready and keep it, or why it cannot be used. Raises as `_codec`."""
        try:
            codec, size = await self._made(id, schema, message)
        except ValueError as error:
            why = str(error)[:WHY_CHARS]
            self._unusable.put(key, why, READY_ENTRY_BYTES + len(why) + len(message))
            raise ValueError(why) from None
        self._codecs.put(key, codec, READY_ENTRY_BYTES + size)
        self._telemetry.schema_registry.schemas.set(len(self._codecs))
        self._telemetry.schema_registry.schema_bytes.set(self._codecs.bytes)
        return codec

    async def _made(self, id: int | None, schema: Schema, message: str) -> tuple[Codec, int]:
        """Make a schema ready to encode; return it, and the bytes of its text with those of its references."""
        imports = await self._client.imports(schema)
        size = len(schema.text) + sum(len(each.schema.text) for each in imports)
        if schema.type is SchemaType.PROTOBUF:
            descriptors = await self._client.descriptors(id or 0, schema)
            return await in_thread(ProtobufCodec, descriptors, message), size
        if schema.type is SchemaType.AVRO:
            return await in_thread(AvroCodec, schema.text, imports), size
        try:
            return await in_thread(JsonCodec, schema.text, imports), size
        except jsonschema_rs.ReferencingError as error:
            raise ValueError(str(error)) from None


def _ready(registered: Registered, codec: Codec) -> _Ready:
    used = UsedSchema(registered.schema.type, registered.subject, registered.id, registered.version)
    return _Ready(used, codec)


def _names_any(encoding: Encoding | None) -> bool:
    return encoding is not None and (encoding.key is not None or encoding.value is not None)


def _encodings_by(rules: Rules) -> Callable[[str], Encoding | None]:
    return lru_cache(maxsize=TOPICS_MAX)(lambda topic: _encoding_of(rules.rule(topic).registry, topic))


def _encoding_of(rule: RegistryRule | None, topic: str) -> Encoding | None:
    if rule is None:
        return None
    return Encoding(_ref_of(rule.key, topic, KEY), _ref_of(rule.value, topic, VALUE))


def _ref_of(rule: SchemaRule | None, topic: str, part: str) -> SchemaRef | None:
    if rule is None:
        return None
    return SchemaRef(rule.subject_of(topic, part), version=rule.version, message=rule.message)


def _subject(ref: SchemaRef, topic: str, part: str, codec: Codec | None) -> str:
    """Make the subject of a schema. Raises ValueError if that needs the name of a schema that is not known."""
    if ref.subject or ref.strategy == "topic":
        return ref.subject or subject_by("topic", topic, part, "")
    name = ref.record or (codec.name if codec is not None else "")
    if not name:
        raise ValueError("the subject cannot be made without a name of the schema: send subject, schema_id or schema")
    return subject_by(ref.strategy, topic, part, name)


def _named(ref: SchemaRef, topic: str, part: str) -> str:
    """Describe how a schema is named, for a message."""
    if ref.id is not None:
        return f"schema {ref.id}"
    if ref.text:
        return "the schema that was sent"
    subject = ref.subject or subject_by("topic", topic, part, "")
    return f"the {f'version {ref.version}' if ref.version else 'latest version'} of the subject {subject}"


def _away(part: str, error: Exception) -> Problem:
    """Make the problem (503) of a registry that does not answer."""
    if isinstance(error, RegistryAway):
        retry_s = min(max(1, math.ceil(error.retry_after_s)), RETRY_MOST_S)
        return Problem(NOT_WRITTEN, f"{part}: the schema registry is away ({error}): send it again", retry_s)
    return Problem(NOT_WRITTEN, f"{part}: its schema was not found in time: send it again")


def _encoded(event: Event, parts: _Parts, json_key: bool) -> tuple[bytes | None, bytes | None]:
    """Encode the parts of an event that have a schema; the others stay. Raises Problem (422)."""
    key, value = event.record_key, event.value
    if parts.key is not None and key is not None:
        if not json_key and parts.key.codec.takes_text:
            key = _part(KEY, parts.key, _as_json(key))
        else:
            key = _part(KEY, parts.key, key)
    if parts.value is not None and value is not None:
        value = _part(VALUE, parts.value, value)
    return key, value


def _encoded_long(event: Event, parts: _Parts, json_key: bool) -> tuple[bytes | None, bytes | None]:
    """Encode the parts of an event of any length."""
    with without_collections():
        return _encoded(event, parts, json_key)


def _as_json(key: bytes) -> bytes:
    """Write a key that is a string as the JSON of that string. Raises Problem (422)."""
    try:
        return json.dumps(key.decode(), ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise Problem(SCHEMA_MISMATCH, "key: its schema takes strings, and it is not UTF-8") from None


def _part(part: str, ready: _Ready, text: bytes) -> bytes:
    """Encode a key or value from its JSON. Raises Problem (422) with the path to what does not fit."""
    used = ready.used
    schema = f"see schema {used.id} (version {used.version} of {used.subject})"
    try:
        value = parse_value(text)
    except ValueError as error:
        raise Problem(SCHEMA_MISMATCH, f"{part}: it has a schema, which takes JSON only: {error}: {schema}") from None
    try:
        return _PREFIX.pack(MAGIC, used.id) + ready.codec.encode(text, value)
    except Misfit as misfit:
        where = path_of(reversed(misfit.path))
        raise Problem(SCHEMA_MISMATCH, f"{part}{where}: {misfit}: {schema}") from None
