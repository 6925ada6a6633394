"""The schemas of a Schema Registry, and the errors of its client."""

import hashlib
from enum import Enum
from typing import NamedTuple

import msgspec


class SchemaType(Enum):
    """The language of a schema, by its name in the registry's API."""

    AVRO = "AVRO"
    JSON = "JSON"
    PROTOBUF = "PROTOBUF"


class Reference(msgspec.Struct, frozen=True):
    """A reference of a schema to another one: under `name` it finds a version of a subject."""

    name: str
    subject: str
    version: int


class Schema(msgspec.Struct, frozen=True):
    """The text of a schema."""

    type: SchemaType
    text: str
    references: tuple[Reference, ...] = ()


def digest_of(schema: Schema) -> bytes:
    """Return 32 bytes (SHA-256) that stand for a schema as the key of a cache, in place of its text."""
    return hashlib.sha256(msgspec.json.encode(schema)).digest()


class Registered(msgspec.Struct, frozen=True):
    """A schema as a version of a subject has it. `id` is the one that encoded keys and values begin with."""

    subject: str
    id: int
    version: int
    schema: Schema


class Import(NamedTuple):
    """A schema that another one refers to, directly or through others, and the name by which it does."""

    name: str
    schema: Schema


class RegistryAway(Exception):
    """The registry did not answer, or refused for a reason that may pass: nothing is known of the schema.

    `everywhere`: whether requests for other schemas would fail too.
    """

    def __init__(self, why: str, retry_after_s: float = 1.0, *, everywhere: bool = True) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s
        self.everywhere = everywhere


class SchemaAbsent(Exception):
    """The registry answered that it has no such subject, version or id."""


class SchemaUnusable(Exception):
    """The registry refused the schema, or the schema cannot be used; the text says why."""
