"""Read-only queries for `fencepost doctor`: brokers, topics, their settings, and the ACLs of the caller."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from io import BytesIO
from typing import Any, Final

from aiokafka import errors
from aiokafka.client import CoordinationType
from aiokafka.protocol.admin import (
    ApiVersionRequest,
    CreateTopicsRequest,
    DescribeConfigsRequest,
    DescribeGroupsRequest_v3,
    DescribeGroupsResponse_v3,
)
from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.types import (
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

from service.core.problems import KafkaAway
from service.kafka.admin import UNANSWERED, KafkaAdmin
from service.kafka.connection import UNREACHABLE, Connection
from service.kafka.metadata import BROKER_RESOURCE, Metadata, partitions_of
from service.kafka.protocol import ApiVersionsRequest, EndTxnRequest, Features

# No producer has this id. A request under this id is refused, but Kafka checks the caller's ACLs first.
UNKNOWN_PRODUCER_ID: Final = -2


class Operation(IntEnum):
    """The operations that an ACL can allow, by Kafka's numbers (org.apache.kafka.common.acl.AclOperation)."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


@dataclass(frozen=True, slots=True)
class Node:
    """A broker and its advertised address; `why_not` is the reason why no connection to it succeeds, or ""."""

    id: int
    address: str
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class VisibleTopic:
    """A topic and what the caller may do with it. `replication` is that of its worst partition."""

    name: str
    partitions: int
    replication: int
    may: frozenset[Operation]


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All brokers and the topics that the caller may describe; `hidden`: requested topics without that permission."""

    nodes: tuple[Node, ...]
    topics: Mapping[str, VisibleTopic]
    hidden: frozenset[str]


class AclInspector:
    """Asks what the caller may see and do, and changes nothing. Every call raises KafkaAway without an answer."""

    def __init__(self, admin: KafkaAdmin) -> None:
        self._admin = admin

    async def snapshot(self, asked: Collection[str] = ()) -> ClusterSnapshot:
        """List brokers and topics, without creating any; no topics where no broker's advertised address is reached.

        `asked`: topics to report as hidden where the caller may not describe them.
        """
        nodes = await self._nodes()
        if all(node.why_not for node in nodes):
            return ClusterSnapshot(nodes, {}, frozenset())
        responses = [await self._admin.request(Metadata(None, with_operations=True))]
        if asked:  # Kafka reports a topic that may not be described only to a request that names it
            responses.append(await self._admin.request(Metadata(list(asked), with_operations=True)))
        topics: dict[str, VisibleTopic] = {}
        hidden: set[str] = set()
        for topic in (tuple(row) for response in responses for row in response.topics):
            code, name, *_, operations, _ = topic
            if code == errors.TopicAuthorizationFailedError.errno:
                hidden.add(name)
            elif code == errors.NoError.errno:
                replicas = partitions_of(topic).replicas.values()
                replication = min((count for count, _ in replicas), default=0)
                topics[name] = VisibleTopic(name, len(replicas), replication, _operations(operations))
        return ClusterSnapshot(nodes, topics, frozenset(hidden))

    async def _nodes(self) -> tuple[Node, ...]:
        with self._admin.failing("metadata", f"Kafka at {self._admin.bootstrap} does not answer"):
            client = await self._admin.connected()
        brokers = sorted(client.cluster.brokers(), key=lambda broker: broker.nodeId)
        why_not = await asyncio.gather(*(self._why_not(broker.host, broker.port) for broker in brokers))
        return tuple(
            Node(broker.nodeId, f"{broker.host}:{broker.port}", why)
            for broker, why in zip(brokers, why_not, strict=True)
        )

    async def _why_not(self, host: str, port: int) -> str:
        """Say why a connection to an address fails; "" where it succeeds."""
        admin = self._admin
        connection = Connection(host, port, admin.security, request_timeout_ms=admin.request_timeout_ms)
        try:
            await connection.connect()
        except UNREACHABLE as error:
            return str(error) or type(error).__name__
        finally:
            connection.close()
        return ""

    async def settings_of(self, node: int) -> dict[str, str] | None:
        """Read the effective settings of a broker; None where the caller has no permission (DescribeConfigs)."""
        response = await self._admin.request(DescribeConfigsRequest([(BROKER_RESOURCE, str(node), None)]), node)
        ((code, _, _, _, entries),) = (tuple(resource) for resource in response.resources)
        if code != errors.NoError.errno:
            return None
        return {entry[0]: entry[1] for entry in entries if entry[1] is not None}

    async def versions_of(self, node: int) -> dict[int, int]:
        """Read the newest version of each request that a broker supports, by API key."""
        response = await self._admin.request(ApiVersionRequest(), node)
        return {key: newest for key, _, newest in (tuple(row) for row in response.api_versions)}

    async def metadata_version_of(self, node: int) -> int | None:
        """Read the newest metadata.version that a broker supports (KIP-584); None where it tells none.

        Each release has other ones. A broker that keeps its metadata in ZooKeeper tells none.
        """
        response = await self._admin.request(_SupportedFeatures(), node)
        return supported_features(response.tags.get(0, b"")).get("metadata.version")

    async def transaction_version_of(self, node: int) -> int:
        """Read the finalized level of transaction.version, as a broker knows it (KIP-584, KIP-890); 0 for none."""
        features: Features = await self._admin.request(ApiVersionsRequest(), node)
        return features.transaction_version

    async def may_create(self, topic: str) -> bool:
        """Check whether the caller may create a topic, by a CreateTopics request with validate_only."""
        response = await self._admin.request_controller(
            CreateTopicsRequest([(topic, 1, -1, [], [])], self._admin.request_timeout_ms, True)
        )
        ((_, code, *_),) = (tuple(row) for row in response.topic_errors)
        return code not in (errors.TopicAuthorizationFailedError.errno, errors.ClusterAuthorizationFailedError.errno)

    async def may_produce_as(self, transactional_id: str) -> frozenset[Operation]:
        """Check what the caller may do under a transactional id: Describe (find its coordinator) and Write.

        Write is tested by an EndTxn for a producer id that does not exist: Kafka checks the ACLs before it refuses.
        """
        refused = errors.TransactionalIdAuthorizationFailed
        request = EndTxnRequest(transactional_id, UNKNOWN_PRODUCER_ID, 0, False)
        try:
            response = await self._of_coordinator(transactional_id, request, lambda answer: answer.error_code)
        except refused:
            return frozenset()
        if errors.for_code(response.error_code) is refused:
            return frozenset({Operation.DESCRIBE})
        return frozenset({Operation.DESCRIBE, Operation.WRITE})

    async def may_with_group(self, group: str) -> frozenset[Operation]:
        """Check what the caller may do with a consumer group, which need not exist (KIP-430)."""
        refused = errors.GroupAuthorizationFailedError
        try:
            response = await self._of_coordinator(
                group, _DescribeGroups(group), lambda answer: answer.groups[0][0], CoordinationType.GROUP
            )
        except refused:
            return frozenset()
        ((code, *_, operations),) = (tuple(row) for row in response.groups)
        if code == errors.NoError.errno:
            return _operations(operations)
        if code == refused.errno:
            return frozenset()
        raise KafkaAway(f"no coordinator for {group}: {errors.for_code(code).__name__}")

    async def _of_coordinator(
        self,
        name: str,
        request: Any,
        code_of: Callable[[Any], int],
        kind: CoordinationType = CoordinationType.TRANSACTION,
    ) -> Any:
        """Ask the coordinator of a name. Raises KafkaAway, and the two authorization errors as they are."""
        try:
            async with asyncio.timeout(self._admin.timeout_s):
                return await self._admin.request_coordinator(name, request, code_of, kind)
        except (errors.TransactionalIdAuthorizationFailed, errors.GroupAuthorizationFailedError):
            raise
        except UNANSWERED as error:
            raise KafkaAway(f"no coordinator for {name}: {error!r}") from error


def supported_features(content: bytes) -> dict[str, int]:
    """Decode SupportedFeatures, a tagged field of ApiVersions responses: the newest version by the feature's name."""
    if not content:
        return {}
    rows = _SUPPORTED_FEATURES.decode(BytesIO(content))
    return {name: newest for name, _, newest, _ in (tuple(row) for row in rows)}


def _operations(bits: int) -> frozenset[Operation]:
    return frozenset(operation for operation in Operation if bits >> operation & 1)


# ------------------------------------------------------------------------------------------------ request schemas
# ApiVersions version 3, which reports the features that a broker supports (KIP-584). Its response has a header of
# version 0, so that clients can read it before they know the broker's versions.

_SUPPORTED_FEATURES: Final = CompactArray(
    ("name", CompactString("utf-8")), ("min_version", Int16), ("max_version", Int16), ("tags", TaggedFields)
)


class _SupportedFeaturesResponse(Response):  # type: ignore[misc]
    API_KEY = 18
    API_VERSION = 3
    SCHEMA = Schema(
        ("error_code", Int16),
        (
            "api_versions",
            CompactArray(("api_key", Int16), ("min_version", Int16), ("max_version", Int16), ("tags", TaggedFields)),
        ),
        ("throttle_time_ms", Int32),
        ("tags", TaggedFields),
    )


class _SupportedFeatures_v3(RequestStruct):  # type: ignore[misc]  # noqa: N801 - as aiokafka names its own
    FLEXIBLE_VERSION = True
    API_KEY = 18
    API_VERSION = 3
    RESPONSE_TYPE = _SupportedFeaturesResponse
    SCHEMA = Schema(
        ("client_software_name", CompactString("utf-8")),
        ("client_software_version", CompactString("utf-8")),
        ("tags", TaggedFields),
    )

    def parse_response_header(self, read_buffer: BytesIO) -> Any:
        return ResponseHeader_v0.decode(read_buffer)


class _SupportedFeatures(Request[_SupportedFeatures_v3]):  # type: ignore[misc]
    API_KEY = 18

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class("fencepost", "1", {})


# DescribeGroups version 3; aiokafka decodes its response as one of version 2, without the authorized operations.


class _DescribeGroups_v3(DescribeGroupsRequest_v3):  # type: ignore[misc]  # noqa: N801
    RESPONSE_TYPE = DescribeGroupsResponse_v3


class _DescribeGroups(Request[_DescribeGroups_v3]):  # type: ignore[misc]
    API_KEY = 15

    def __init__(self, group: str) -> None:
        self._group = group

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class([self._group], True)
