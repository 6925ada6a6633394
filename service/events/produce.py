"""The common parts of versions 2 and 3 of the Confluent REST Proxy's produce API: keys, formats, schemas, headers.

https://docs.confluent.io/platform/current/kafka-rest/api.html; Karapace and the Strimzi Bridge serve v2 as well.
Where these differ, the tables in tests/integration/peers.py say which one is followed.
"""

import re
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from service.contract.wire.headers import KEY_HEADER, RESERVED_HEADERS
from service.contract.wire.ids import Header, event_id, member_id
from service.core.problems import INVALID_EVENT, INVALID_KEY, MISSING_KEY, TOO_LARGE, Problem
from service.core.settings import EVENT_BYTES_MAX
from service.events.base64_text import decode_base64
from service.events.event import HEADERS_MAX, PARTITION_MOST, TIMESTAMP_MOST, check_key, invalid, too_many
from service.events.schema_refs import Encoding, SchemaRef
from service.events.strict_json import LONG_BYTES
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


PARTITION_NOT_FOUND: Final = 40402
INVALID_SCHEMA: Final = 42205
INVALID_PAYLOAD: Final = 42206
UNPROCESSABLE: Final = 422
# Characters of a schema that a request brings.
SCHEMA_CHARS_MAX: Final = 256 * 1024
# Ids and versions of schemas are integers of 4 bytes.
NUMBER_MOST: Final = 2**31 - 1
SCHEMA_TYPES: Final = {
    Format.AVRO: SchemaType.AVRO,
    Format.JSONSCHEMA: SchemaType.JSON,
    Format.PROTOBUF: SchemaType.PROTOBUF,
}
FORMATS: Final = {type: data_format for data_format, type in SCHEMA_TYPES.items()}
"""The format of keys and values by the type of their schema."""
JSON_KEY: Final = Encoding(json_key=True)
NULL: Final = msgspec.Raw(b"null")
_NUMBER: Final = re.compile(rb"-?[0-9]")


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


class SchemaUse(NamedTuple):
    """Whether there is a schema registry, and whether the topic's rule encodes the keys of records."""

    has_registry: bool = False
    encodes_keys: bool = False


NO_SCHEMAS: Final = SchemaUse()


def check_format(data_format: Format, schemas: SchemaUse = NO_SCHEMAS) -> None:
    """Raise Problem (422) for a format whose values need a schema, if there is no registry."""
    if data_format.needs_schema and not schemas.has_registry:
        raise ProduceProblem(
            422,
            INVALID_PAYLOAD,
            f"{data_format.value}: no schema registry is configured, so that only BINARY, JSON and STRING are taken",
        )


def checked_schema(text: str, name: str) -> str:
    """Check the length of a schema's text. Raises Problem (422)."""
    if 0 < len(text) <= SCHEMA_CHARS_MAX:
        return text
    raise ProduceProblem(422, INVALID_SCHEMA, f"{name}: send a schema of 1 to {SCHEMA_CHARS_MAX} characters")


def encoding_of(
    key: SchemaRef | None, value: SchemaRef | None, key_format: Format | None, use: SchemaUse
) -> Encoding | None:
    """Return what a record says about its schemas; None if it says nothing, or nothing that counts."""
    json_key = key_format is None or key_format is Format.JSON or key_format.needs_schema
    if key is not None or value is not None:
        return Encoding(key, value, json_key)
    return JSON_KEY if use.encodes_keys and key_format is not None and json_key else None


def headers_of(given: list[tuple[str, str | None]]) -> tuple[list[Header], bytes | None]:
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


def checked_ms(ms: float) -> int:
    """Return a timestamp in whole ms since the Unix epoch. Raises Problem (400) if Kafka has none such."""
    if not 0 <= ms <= TIMESTAMP_MOST:
        raise invalid("timestamp", "send a time since 1970: of v3 as in 2021-02-05T19:14:42.123Z, of v2 in ms")
    return int(ms)


def checked_partition(partition: int) -> int:
    """Return a partition's number. Raises Problem (404) if no partition can have it."""
    if not 0 <= partition <= PARTITION_MOST:
        raise ProduceProblem(404, PARTITION_NOT_FOUND, "partition: use a partition's number, from 0")
    return partition


def data_of(data_format: Format, given: msgspec.Raw, field: str) -> bytes | None:
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
