"""The offsets of a consumer group, committed in a transaction together with its records (KIP-98, KIP-447).

aiokafka's TxnOffsetCommit has no member and no generation, so the broker could not refuse a member that a rebalance has
replaced. Version 3 of the request has them.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from aiokafka import errors
from aiokafka.client import CoordinationType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.transaction import AddOffsetsToTxnRequest
from aiokafka.protocol.types import CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

from service.core.problems import (
    FORBIDDEN_GROUP,
    FORBIDDEN_TOPIC,
    NOT_WRITTEN,
    OFFSETS_REFUSED,
    STALE_MEMBER,
)
from service.kafka.admin import any_node
from service.kafka.metadata import Partition
from service.kafka.outcomes import OK, OffsetsRefused, RecordError, raise_if_error
from service.kafka.session import CONCURRENT_TRANSACTIONS, MARKERS_PAUSE_MOST_S, MARKERS_PAUSE_S, ProducerSession

OFFSETS_TOPIC: Final = "__consumer_offsets"
# How long a group's coordinator may be moving or loading: the slot writes nothing else meanwhile.
RETRY_S: Final = 1.0
RETRY_PAUSE_S: Final = 0.02
# Codes of a coordinator that moves or loads. It may have kept the offsets: it also names replicas that are not in sync
# by them.
RETRIED: Final = frozenset(
    {
        errors.GroupLoadInProgressError.errno,
        errors.GroupCoordinatorNotAvailableError.errno,
        errors.NotCoordinatorForGroupError.errno,
    }
)
# Codes that aiokafka does not know (KIP-345, KIP-848); the last two are of groups of the newer protocol.
FENCED_INSTANCE_ID: Final = 82
FENCED_MEMBER_EPOCH: Final = 110
STALE_MEMBER_EPOCH: Final = 113

_GONE: Final = RecordError(STALE_MEMBER, "the group has no such member in this generation: rejoin it")
AWAY: Final = RecordError(NOT_WRITTEN, "the group's coordinator cannot be reached: send it again")
NOT_KEPT: Final = RecordError(NOT_WRITTEN, "the group's coordinator does not keep the offsets: send it again")
TOO_FEW_REPLICAS: Final = RecordError(
    NOT_WRITTEN, "the partition of the group has too few replicas in sync: send it again"
)
_TOO_LARGE: Final = RecordError(
    OFFSETS_REFUSED, f"the positions are larger than a record batch of {OFFSETS_TOPIC}: send fewer"
)
# Newer coordinators answer with it whatever has no code of its own, as a batch that is too large.
_UNNAMED: Final = RecordError(NOT_WRITTEN, "the group's coordinator failed: send it again, with fewer positions")
# By error code, why offsets are refused. The broker has kept none of the partition's offsets.
REFUSALS: Final[Mapping[int, RecordError]] = {
    errors.IllegalGenerationError.errno: _GONE,
    errors.UnknownMemberIdError.errno: _GONE,
    errors.GroupIdNotFound.errno: _GONE,
    FENCED_INSTANCE_ID: RecordError(STALE_MEMBER, "another member has its group.instance.id"),
    FENCED_MEMBER_EPOCH: _GONE,
    STALE_MEMBER_EPOCH: _GONE,
    errors.RebalanceInProgressError.errno: RecordError(NOT_WRITTEN, "the group rebalances: send it again"),
    errors.GroupAuthorizationFailedError.errno: RecordError(
        FORBIDDEN_GROUP, "the service has no permission to Read the group"
    ),
    errors.TopicAuthorizationFailedError.errno: RecordError(
        FORBIDDEN_TOPIC, "the service has no permission to Read a topic of the positions"
    ),
    # Admission has found the topics: the coordinator has older metadata, or a topic was deleted since, and then
    # admission refuses the next attempt.
    errors.UnknownTopicOrPartitionError.errno: RecordError(
        NOT_WRITTEN, "the group's coordinator does not know a topic of the positions: send it again"
    ),
    errors.OffsetMetadataTooLargeError.errno: RecordError(
        OFFSETS_REFUSED, "metadata is longer than the brokers' offset.metadata.max.bytes"
    ),
    errors.InvalidCommitOffsetSizeError.errno: _TOO_LARGE,
    errors.MessageSizeTooLargeError.errno: _TOO_LARGE,
    errors.RecordListTooLargeError.errno: _TOO_LARGE,
    errors.InvalidGroupIdError.errno: RecordError(OFFSETS_REFUSED, "Kafka does not allow the group's name"),
}


# The most bytes in a ledger record of what has no bound of its own: ids, numbers and names of fields; a position's.
LEDGER_BYTES: Final = 300
POSITION_BYTES: Final = 75
# The most bytes of a character in JSON text: a control character's.
_JSON_BYTES_MAX: Final = 6


class Position(msgspec.Struct, frozen=True, gc=False):
    """The next offset that a group reads in a partition, and the metadata that is stored with the offset."""

    topic: str
    partition: int
    offset: int
    metadata: str = ""


class GroupOffsets(msgspec.Struct, frozen=True, gc=False):
    """Positions of a group, and the member that commits them, in its generation; `instance`: its group.instance.id."""

    group: str
    member: str
    generation: int
    positions: tuple[Position, ...]
    instance: str | None = None

    @property
    def ledger_bytes(self) -> int:
        """An upper bound of the bytes of wire.LedgerOffsets."""
        texts = _JSON_BYTES_MAX * (len(self.group) + len(self.member))
        return LEDGER_BYTES + texts + sum(len(each.topic) + POSITION_BYTES for each in self.positions)

    @property
    def size(self) -> int:
        """The share of the queue's bytes: about what they take in memory beside their objects."""
        return self.ledger_bytes + sum(len(each.metadata) for each in self.positions)

    @property
    def isolation_name(self) -> str:
        """The name under which the queue isolates the group; no topic can have it."""
        return f"group {self.group}"

    @property
    def topics(self) -> list[tuple[str, list[Position]]]:
        """The positions by topic, in their order."""
        by_topic: dict[str, list[Position]] = {}
        for position in self.positions:
            by_topic.setdefault(position.topic, []).append(position)
        return list(by_topic.items())


def partition_of_group(group: str, partitions: int) -> int:
    """Find the partition of OFFSETS_TOPIC, of so many, that has a group's offsets.

    Kafka hashes the group's name as Java hashes strings: by its units of UTF-16.
    """
    units = group.encode("utf-16-be")
    found = 0
    for at in range(0, len(units), 2):
        found = (31 * found + int.from_bytes(units[at : at + 2], "big")) % 2**32
    signed = found - 2**32 if found >= 2**31 else found
    return abs(signed) % 2**31 % partitions  # the absolute value of the least number is 0, as in Kafka's Utils.abs


def group_in(partition: int, partitions: int, prefix: str) -> str:
    """Find a group name with a prefix whose offsets would be in a partition of OFFSETS_TOPIC, of so many."""
    number = 0
    while partition_of_group(f"{prefix}{number}", partitions) != partition:
        number += 1
    return f"{prefix}{number}"


# ----------------------------------------------------------------------------------------------------- TxnOffsetCommit


class _TxnOffsetCommitAnswer(Response):  # type: ignore[misc]  # aiokafka ships no types
    API_KEY = 28
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(("partition", Int32), ("error_code", Int16), ("tags", TaggedFields)),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class TxnOffsetCommit_v3(RequestStruct):  # type: ignore[misc]  # noqa: N801 - as aiokafka names its own
    FLEXIBLE_VERSION = True
    API_KEY = 28
    API_VERSION = 3
    RESPONSE_TYPE = _TxnOffsetCommitAnswer
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("group_id", CompactString("utf-8")),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("generation_id", Int32),
        ("member_id", CompactString("utf-8")),
        ("group_instance_id", CompactString("utf-8")),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", CompactString("utf-8")),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class TxnOffsetCommit(Request[TxnOffsetCommit_v3]):  # type: ignore[misc]
    """Asks a group's coordinator to commit the group's offsets with a transaction (KIP-447)."""

    API_KEY = 28

    def __init__(self, transactional_id: str, producer_id: int, epoch: int, offsets: GroupOffsets) -> None:
        self.transactional_id, self.producer_id, self.epoch = transactional_id, producer_id, epoch
        self.offsets = offsets

    def build(self, request_struct_class: Any) -> Any:
        offsets = self.offsets
        topics: list[tuple[str, list[Any], dict[int, bytes]]] = [
            (topic, [(each.partition, each.offset, -1, each.metadata, {}) for each in positions], {})
            for topic, positions in offsets.topics
        ]
        head = self.transactional_id, offsets.group, self.producer_id, self.epoch
        return request_struct_class(*head, offsets.generation, offsets.member, offsets.instance, topics, {})


class TxnOffsetCommit_v5(RequestStruct):  # type: ignore[misc]  # noqa: N801
    FLEXIBLE_VERSION = True
    API_KEY = 28
    API_VERSION = 5
    RESPONSE_TYPE = _TxnOffsetCommitAnswer
    SCHEMA = TxnOffsetCommit_v3.SCHEMA


class TxnOffsetCommitAndAdd(Request[TxnOffsetCommit_v5]):  # type: ignore[misc]
    """TxnOffsetCommit that also adds the partition of the group's offsets to the transaction (KIP-890).

    No subclass of TxnOffsetCommit: aiokafka takes the versions of a request from its only base class.
    """

    API_KEY = 28

    def __init__(self, transactional_id: str, producer_id: int, epoch: int, offsets: GroupOffsets) -> None:
        self.transactional_id, self.producer_id, self.epoch = transactional_id, producer_id, epoch
        self.offsets = offsets

    def build(self, request_struct_class: Any) -> Any:
        same = TxnOffsetCommit(self.transactional_id, self.producer_id, self.epoch, self.offsets)
        return same.build(request_struct_class)


class OffsetCommit:
    """The requests by which a session's transaction commits the offsets of groups."""

    def __init__(self, session: ProducerSession) -> None:
        self._session = session
        self.awaits_markers = False  # the last answer to `commit`: the previous transaction's markers are not written

    async def partition_of(self, group: str) -> Partition | None:
        """Find the partition of a group's offsets; None where the topic is not there yet, or hidden from the service.

        Raises KafkaError where no broker answers.
        """
        partitions = await self._partitions()
        return None if not partitions else (OFFSETS_TOPIC, partition_of_group(group, partitions))

    async def group_of(self, partition: Partition) -> str:
        """Make a group name with the transactional id as its prefix whose offsets would be in a partition.

        Raises KafkaError where the topic does not have the partition.
        """
        partitions = await self._partitions()
        if partition[1] >= partitions:
            raise errors.UnknownTopicOrPartitionError(f"{partition}")
        return group_in(partition[1], partitions, f"{self._session.transactional_id}.")

    async def _partitions(self) -> int:
        """Count the partitions of OFFSETS_TOPIC; 0 where it is not there yet, or hidden. Raises KafkaError."""
        client = self._session.client
        if not client.cluster.partitions_for_topic(OFFSETS_TOPIC):
            client.add_topic(OFFSETS_TOPIC)
            if not await client.refresh([OFFSETS_TOPIC]):
                raise errors.NodeNotReadyError("no broker answers with the metadata of its topics")
        return len(client.cluster.partitions_for_topic(OFFSETS_TOPIC) or ())

    async def add(self, group: str) -> None:
        """Add the partition of a group's offsets to the transaction, or begin it by the partition (AddOffsetsToTxn).

        CONCURRENT_TRANSACTIONS means that the previous transaction's markers are still being written. Raises
        OffsetsRefused, KafkaError.
        """
        session = self._session
        request = AddOffsetsToTxnRequest(session.transactional_id, session.producer_id, session.epoch, group)
        while True:
            code = (await session.request(session.coordinator, request)).error_code
            if code != CONCURRENT_TRANSACTIONS:
                break
            await asyncio.sleep(RETRY_PAUSE_S)
        _raise_if_refused([code], "AddOffsetsToTxn")

    async def commit(self, offsets: GroupOffsets, partition: Partition | None, *, adds: bool = False) -> None:
        """Send the offsets to the group's coordinator, the leader of `partition`, and again while it moves or loads.

        `adds`: the request also adds the partition to the transaction (KIP-890), and is sent again while the markers of
        the previous transaction are written.
        Raises OffsetsRefused, KafkaError; GroupCoordinatorNotAvailableError after RETRY_S, for too few replicas in sync
        too. The marker of the transaction, to which the partition belongs, may then be missing for as long.
        """
        session = self._session
        assert session.transactional_id is not None
        kind = TxnOffsetCommitAndAdd if adds else TxnOffsetCommit
        request = kind(session.transactional_id, session.producer_id, session.epoch, offsets)
        give_up_at, pause_s = time.monotonic() + RETRY_S, MARKERS_PAUSE_S
        while True:
            self.awaits_markers = False  # a coordinator that does not answer is to blame
            codes = await self._codes(request, partition)
            self.awaits_markers = adds and CONCURRENT_TRANSACTIONS in codes
            if self.awaits_markers:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MARKERS_PAUSE_MOST_S)
                continue
            if RETRIED.isdisjoint(codes):
                if errors.UnknownError.errno in codes:
                    raise OffsetsRefused(_UNNAMED)
                _raise_if_refused(codes, "TxnOffsetCommit")
                return
            if time.monotonic() >= give_up_at:
                raise errors.GroupCoordinatorNotAvailableError(f"TxnOffsetCommit: error codes {sorted(codes)}")
            await asyncio.sleep(RETRY_PAUSE_S)
            await session.client.force_metadata_update()

    async def _codes(self, request: TxnOffsetCommit | TxnOffsetCommitAndAdd, partition: Partition | None) -> set[int]:
        """Send the request once; returns the error codes of its partitions, or that of the search for a coordinator."""
        session = self._session
        node = None if partition is None else session.leader(partition)
        if node is None:
            await any_node(session.client)  # without a known broker, coordinator_lookup fails an assertion
            try:
                node = await session.client.coordinator_lookup(CoordinationType.GROUP, request.offsets.group)
            except errors.BrokerResponseError as error:
                return {error.errno}
        response = await session.request(int(node), request)
        codes = [row[1] for _, rows, _ in response.topics for row in rows]
        if len(codes) < len(request.offsets.positions):
            raise errors.KafkaError("TxnOffsetCommit: the response lacks partitions")
        return set(codes)


def _raise_if_refused(codes: Iterable[int], what: str) -> None:
    """Raise OffsetsRefused for the first code in REFUSALS, and KafkaError for any other that is not OK."""
    failed = sorted(code for code in codes if code != OK)
    for code in failed:
        if code not in REFUSALS:
            raise_if_error(code, what)
    if failed:
        raise OffsetsRefused(REFUSALS[failed[0]])
