"""Metadata version 10, the first with topic ids (KIP-516); aiokafka has older versions only.

https://kafka.apache.org/protocol: every broker since 2.8 supports this version.
"""

from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Final, NamedTuple

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    AbstractType,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

# A topic, and the number of a partition.
Partition = tuple[str, int]

# Types of resources with settings (ConfigResource.Type in Kafka).
TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4
UUID_BYTES: Final = 16
NO_ID: Final = bytes(UUID_BYTES)


class Uuid(AbstractType[bytes]):  # type: ignore[misc]
    """Kafka's uuid type: 16 raw bytes."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(UUID_BYTES)


class Partitions(NamedTuple):
    """A topic's id in Kafka's base64 form ("" where the broker sends none), and its partitions.

    `replicas`: (number of replicas, number of replicas in sync) by partition.
    """

    topic_id: str
    replicas: Mapping[int, tuple[int, int]]


def partitions_of(topic: Sequence[Any]) -> Partitions:
    """Convert one topic of a Metadata response."""
    _code, _name, topic_id, _internal, rows, *_ = topic
    return Partitions(
        "" if topic_id == NO_ID else urlsafe_b64encode(topic_id).rstrip(b"=").decode(),
        {number: (len(replicas), len(in_sync)) for _, number, _, _, replicas, in_sync, *_ in map(tuple, rows)},
    )


class _MetadataResponse(Response):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString()),
                ("port", Int32),
                ("rack", CompactString()),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString()),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("topic", CompactString()),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_authorized_operations", Int32),
        ("tags", TaggedFields),
    )


class _Metadata_v10(RequestStruct):  # type: ignore[misc]  # noqa: N801 - as aiokafka names its own
    API_KEY = 3
    API_VERSION = 10
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _MetadataResponse
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", Uuid), ("topic", CompactString()), ("tags", TaggedFields))),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class Metadata(Request[_Metadata_v10]):  # type: ignore[misc]
    """Requests the metadata of topics, or of all (None). Kafka creates none of those that do not exist."""

    API_KEY = 3

    def __init__(self, topics: Sequence[str] | None, *, with_operations: bool = False) -> None:
        """`with_operations`: with what the caller may do with each topic (KIP-430)."""
        self._topics = topics
        self._with_operations = with_operations

    def build(self, request_struct_class: Any) -> Any:
        topics: Any = None if self._topics is None else [(NO_ID, name, {}) for name in self._topics]
        return request_struct_class(topics, False, False, self._with_operations, {})


class _UndecodedResponse(_MetadataResponse):
    """The bytes of a response, which `decode_metadata` decodes: that of a cluster's topics takes long."""

    @classmethod
    def decode(cls, data: BytesIO | bytes) -> bytes:
        return data if isinstance(data, bytes) else data.read()


class _UndecodedMetadata_v10(_Metadata_v10):  # noqa: N801 - as aiokafka names its own
    RESPONSE_TYPE = _UndecodedResponse


class UndecodedMetadata(Request[_UndecodedMetadata_v10]):  # type: ignore[misc]
    """Requests what Metadata requests; `decode_metadata` decodes the response."""

    API_KEY = 3

    def __init__(self, topics: Sequence[str] | None) -> None:
        self._metadata = Metadata(topics)

    def build(self, request_struct_class: Any) -> Any:
        return self._metadata.build(request_struct_class)


def decode_metadata(response: bytes) -> Any:
    """Decode the response to an UndecodedMetadata; runs in a thread."""
    return _MetadataResponse.decode(response)
