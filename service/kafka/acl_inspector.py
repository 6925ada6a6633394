"""Read-only queries for `fencepost doctor`: brokers, topics, their settings, and the ACLs of the caller."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping
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
from service.kafka.admin import BROKER_RESOURCE, KafkaAdmin, any_node, coordinator
from service.kafka.metadata import Metadata, partitions_of
from service.kafka.protocol import ApiVersionsRequest, EndTxnRequest, Features

# No producer has this id. A request under this id is refused, but Kafka checks the caller's ACLs first.
UNKNOWN_PRODUCER_ID: Final = -2


class Operation(IntEnum):
    """What an ACL can allow, by Kafka's numbers (org.apache.kafka.common.acl.AclOperation)."""

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


class AclInspector(KafkaAdmin):
    """A read-only admin client. Every call raises KafkaAway where Kafka does not answer."""

    async def snapshot(self, asked: Collection[str] = ()) -> ClusterSnapshot:
        """List brokers and topics, without creating any; no topics where no broker's advertised address is reached.

        `asked`: topics to report as hidden where the caller may not describe them.
        """
        nodes = await self._nodes()
        if all(node.why_not for node in nodes):
            return ClusterSnapshot(nodes, {}, frozenset())
        responses = [await self._request(Metadata(None, with_operations=True))]
        if asked:  # Kafka reports a topic that may not be described only to a request that names it
            responses.append(await self._request(Metadata(list(asked), with_operations=True)))
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
        try:
            client = await self._connected()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise KafkaAway(f"Kafka at {self.bootstrap} does not answer: {error}") from error
        brokers = sorted(client.cluster.brokers(), key=lambda broker: broker.nodeId)
        why_not = await asyncio.gather(*(self.why_not(broker.host, broker.port) for broker in brokers))
        return tuple(
            Node(broker.nodeId, f"{broker.host}:{broker.port}", why)
            for broker, why in zip(brokers, why_not, strict=True)
        )

    async def settings_of(self, node: int) -> dict[str, str] | None:
        """Read the effective settings of a broker; None where the caller has no permission (DescribeConfigs)."""
        response = await self._request(DescribeConfigsRequest([(BROKER_RESOURCE, str(node), None)]), node)
        ((code, _, _, _, entries),) = (tuple(resource) for resource in response.resources)
        if code != errors.NoError.errno:
            return None
        return {entry[0]: entry[1] for entry in entries if entry[1] is not None}

    async def versions_of(self, node: int) -> dict[int, int]:
        """Read the newest version of each request that a broker supports, by API key."""
        response = await self._request(ApiVersionRequest(), node)
        return {key: newest for key, _, newest in (tuple(row) for row in response.api_versions)}

    async def metadata_version_of(self, node: int) -> int | None:
        """Read the newest metadata.version that a broker supports (KIP-584); None where it tells none.

        Each release has other ones. A broker that keeps its metadata in ZooKeeper tells none.
        """
        response = await self._request(_SupportedFeatures(), node)
        return supported_features(response.tags.get(0, b"")).get("metadata.version")

    async def transaction_version_of(self, node: int) -> int:
        """Read the finalized level of transaction.version, as a broker knows it (KIP-584, KIP-890); 0 for none."""
        features: Features = await self._request(ApiVersionsRequest(), node)
        return features.transaction_version

    async def may_create(self, topic: str) -> bool:
        """Check whether the caller may create a topic, by a CreateTopics request with validate_only."""
        response = await self._request_controller(
            CreateTopicsRequest([(topic, 1, -1, [], [])], self.request_timeout_ms, True)
        )
        ((_, code, *_),) = (tuple(row) for row in response.topic_errors)
        return code not in (errors.TopicAuthorizationFailedError.errno, errors.ClusterAuthorizationFailedError.errno)

    async def may_produce_as(self, transactional_id: str) -> frozenset[Operation]:
        """Check what the caller may do under a transactional id: Describe (find its coordinator) and Write.

        Write is tested by an EndTxn for a producer id that does not exist: Kafka checks the ACLs before it refuses.
        """
        refused = errors.TransactionalIdAuthorizationFailed
        try:
            async with asyncio.timeout(self.timeout_s):
                while True:
                    client = await self._connected()
                    try:
                        node = await coordinator(client, transactional_id)
                        response = await client.send(
                            node, EndTxnRequest(transactional_id, UNKNOWN_PRODUCER_ID, 0, False)
                        )
                    except refused:
                        return frozenset()
                    except errors.KafkaError as error:
                        if not error.retriable:
                            raise
                    else:
                        kind = errors.for_code(response.error_code)
                        if kind is refused:
                            return frozenset({Operation.DESCRIBE})
                        if not kind.retriable:
                            return frozenset({Operation.DESCRIBE, Operation.WRITE})
                    await asyncio.sleep(0.05)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise KafkaAway(f"no coordinator for {transactional_id}: {error!r}") from error

    async def may_with_group(self, group: str) -> frozenset[Operation]:
        """Check what the caller may do with a consumer group, which need not exist (KIP-430)."""
        try:
            async with asyncio.timeout(self.timeout_s):
                while True:
                    client = await self._connected()
                    await any_node(client)  # without a known broker, coordinator_lookup fails an assertion
                    with contextlib.suppress(errors.GroupCoordinatorNotAvailableError):
                        node = await client.coordinator_lookup(CoordinationType.GROUP, group)
                        response = await client.send(int(node), _DescribeGroups(group))
                        ((code, *_, operations),) = (tuple(row) for row in response.groups)
                        if code == errors.NoError.errno:
                            return _operations(operations)
                        if code == errors.GroupAuthorizationFailedError.errno:
                            return frozenset()
                        if not errors.for_code(code).retriable:
                            raise errors.for_code(code)(group)
                    await asyncio.sleep(0.05)
        except errors.GroupAuthorizationFailedError:
            return frozenset()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise KafkaAway(f"no coordinator for group {group}: {error!r}") from error


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
