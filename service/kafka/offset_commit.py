"""Commits the offsets of a consumer group in a transaction (KIP-98, KIP-447): the requests, and their order.

aiokafka's TxnOffsetCommit has no member and no generation, so the broker could not refuse a member that a rebalance has
replaced. Version 3 of the request has them.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Final

from aiokafka import errors
from aiokafka.client import CoordinationType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.transaction import AddOffsetsToTxnRequest
from aiokafka.protocol.types import CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

from service.kafka.group_offsets import (
    AWAY,
    COORDINATOR_FAILED,
    NOT_KEPT,
    OFFSETS_TOPIC,
    REFUSALS,
    GroupOffsets,
    group_in,
    partition_of_group,
)
from service.kafka.hanging import RecordCoordinates
from service.kafka.inspection import CODES_BY_TOPIC
from service.kafka.metadata import Partition
from service.kafka.nodes import RETRY_PAUSE_S, coordinator
from service.kafka.open_check import OpenCheck
from service.kafka.outcomes import (
    CONCURRENT_TRANSACTIONS,
    OK,
    OffsetsRefused,
    PartitionUnknown,
    RecordError,
    raise_if_error,
)
from service.kafka.records import Write
from service.kafka.session import MARKERS_PAUSE_MOST_S, MARKERS_PAUSE_S, ProducerSession

# How long a group's coordinator may be moving or loading: the slot writes nothing else meanwhile.
RETRY_S: Final = 1.0
# Codes of a coordinator that moves or loads. It may have kept the offsets: it also names replicas that are not in sync
# by them.
RETRIED: Final = frozenset(
    {
        errors.GroupLoadInProgressError.errno,
        errors.GroupCoordinatorNotAvailableError.errno,
        errors.NotCoordinatorForGroupError.errno,
    }
)


class _TxnOffsetCommitResponse(Response):  # type: ignore[misc]  # aiokafka ships no types
    API_KEY = 28
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("topics", CODES_BY_TOPIC),
        ("tags", TaggedFields),
    )


class TxnOffsetCommit_v3(RequestStruct):  # type: ignore[misc]  # noqa: N801 - as aiokafka names its own
    FLEXIBLE_VERSION = True
    API_KEY = 28
    API_VERSION = 3
    RESPONSE_TYPE = _TxnOffsetCommitResponse
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
    RESPONSE_TYPE = _TxnOffsetCommitResponse
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
    """Commits the offsets of groups in the transactions of a session."""

    def __init__(self, session: ProducerSession, open_check: OpenCheck) -> None:
        self._session = session
        self._open_check = open_check
        self.is_added = False  # whether the partition of a group's offsets was added to the transaction, or may be
        self._awaits_markers = False  # the last answer to `commit`: the previous transaction's markers are not written

    async def run(
        self, write: Write, offsets: GroupOffsets, ask_leader: bool, check_timeout_s: float
    ) -> RecordCoordinates | None:
        """Add the partition of the group's offsets to the transaction, commit the offsets, and look where they are.

        `ask_leader`: have the leader of the group's partition answer before the partition is added; it has
        `check_timeout_s` for that. Returns the transaction's first record in this partition; None where the service may
        not see or inspect the partition. Raises OffsetsRefused, KafkaError, TimeoutError. `write` then names
        OFFSETS_TOPIC if the group's coordinator did not answer.
        """
        if (partition := await self.partition_of(offsets.group)) is not None:
            if ask_leader:
                self._open_check.forget(partition)
            try:
                async with asyncio.timeout(check_timeout_s):
                    leader = await self._session.find_leader(partition)
                    await self._open_check.check(write, {partition: leader})
            except (TimeoutError, PartitionUnknown) as error:  # nothing was added to the transaction for the group
                raise OffsetsRefused(AWAY) from error
        adds = partition is not None and self._joins(partition)
        if not adds:
            await self.add(offsets.group)
        self.is_added = True
        write.waiting_for = OFFSETS_TOPIC
        await self.commit(offsets, partition, adds=adds)
        if partition is None and (partition := await self.partition_of(offsets.group)) is None:
            return None
        open_from, unanswered = await self._open_check.ask([partition])
        if unanswered:
            raise TimeoutError(f"no leader answered where the transaction begins in {partition}")
        write.waiting_for = ""
        return RecordCoordinates(partition, open_from[partition]) if partition in open_from else None

    async def forget(self, group: str) -> None:
        """Note that the transaction was aborted after a refusal.

        Kafka may have kept some of the offsets: before the next ones, the leader of their partition is asked again
        whether it has the marker.
        """
        self.is_added = False
        if (partition := await self.partition_of(group)) is not None:
            self._open_check.forget(partition)

    def error_of(self, failure: BaseException, write: Write) -> RecordError | None:
        """Find why a group failed the transaction of its offsets; None where another attempt may get past the failure.

        What hangs in the group's partition may be ended by the recovery only with Read on groups: without it, each
        attempt fails. A timeout while the previous transaction's markers are written is no fault of the group.
        """
        if write.hanging and all(topic == OFFSETS_TOPIC for topic, _ in write.hanging):
            return NOT_KEPT
        if write.waiting_for != OFFSETS_TOPIC or self._awaits_markers:
            return None
        if isinstance(failure, errors.GroupCoordinatorNotAvailableError):
            return NOT_KEPT
        return AWAY if isinstance(failure, TimeoutError) else None

    def _joins(self, partition: Partition) -> bool:
        """Whether TxnOffsetCommit adds a group's partition, by the version of its leader, the group's coordinator."""
        node = self._session.leader(partition)
        return node is not None and bool(self._session.joining_of({partition: node}))

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
            self._awaits_markers = False  # a coordinator that does not answer is to blame
            codes = await self._codes(request, partition)
            self._awaits_markers = adds and CONCURRENT_TRANSACTIONS in codes
            if self._awaits_markers:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MARKERS_PAUSE_MOST_S)
                continue
            if RETRIED.isdisjoint(codes):
                if errors.UnknownError.errno in codes:
                    raise OffsetsRefused(COORDINATOR_FAILED)
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
            try:
                node = await coordinator(session.client, request.offsets.group, CoordinationType.GROUP)
            except errors.BrokerResponseError as error:
                return {error.errno}
        response = await session.request(node, request)
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
