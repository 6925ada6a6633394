"""How an event names the schemas by which its key and value are to be encoded, and by which they were."""

from typing import Final

import msgspec

from service.registry.schema import SchemaType

# The parts of an event that may have a schema.
KEY: Final = "key"
VALUE: Final = "value"


class SchemaRef(msgspec.Struct, frozen=True):
    """How a schema is named: by `id`, by its `text` and type, or by a `version` of its subject (None: the latest).

    The subject is `subject`, or made by `strategy` (SchemaRule): by `record`, else by the name that the schema has.
    `type` is the type that the client says, None if it says none. `message` names a Protobuf message, else the first.
    """

    subject: str = ""
    strategy: str = "topic"
    record: str = ""
    version: int | None = None
    id: int | None = None
    text: str = ""
    type: SchemaType | None = None
    message: str = ""


class Encoding(msgspec.Struct, frozen=True):
    """The schemas that a request names for an event; where it names none, the topic's rule counts.

    `json_key`: the key is a JSON text; else it is a string, which a schema for other types takes for a JSON text.
    """

    key: SchemaRef | None = None
    value: SchemaRef | None = None
    json_key: bool = False


class UsedSchema(msgspec.Struct, frozen=True):
    """The schema by which a key or value was encoded. Subject and version are empty and 0 where only an id is known."""

    type: SchemaType
    subject: str
    id: int
    version: int


class Encoded(msgspec.Struct, frozen=True):
    """How an event was encoded: the schemas, and the fingerprint (8 bytes) of the record that is written."""

    key: UsedSchema | None
    value: UsedSchema | None
    fp: bytes
