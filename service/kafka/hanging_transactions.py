"""Finds and ends hanging transactions: those whose markers a coordinator has left out (KAFKA-20734)."""

import asyncio
from collections.abc import Collection, Sequence

import structlog
from aiokafka import errors

from service.kafka.client import Client
from service.kafka.group_offsets import OFFSETS_TOPIC
from service.kafka.hanging import ActiveProducer
from service.kafka.inspection import UNSUPPORTED, active_producers, write_marker
from service.kafka.metadata import Partition
from service.kafka.offset_commit import OffsetCommit
from service.kafka.open_check import OpenCheck
from service.kafka.outcomes import OffsetsRefused
from service.kafka.records import Write
from service.kafka.session import MARKERS_PAUSE_MOST_S, METADATA_TIMEOUT_S, ProducerSession

log = structlog.get_logger(__name__)


class HangingTransactions:
    """The transactions that hang in partitions of a transactional id whose producers its session has fenced.

    Use this after the fence and before the session's first transaction. An open transaction of the session's own
    producer id hangs then: the fence has ended it for the coordinator.
    """

    def __init__(
        self,
        session: ProducerSession,
        open_check: OpenCheck,
        offset_commit: OffsetCommit,
        timeout_s: float,
        markers_timeout_s: float,
    ) -> None:
        """`markers_timeout_s` is the time for the markers of a transaction, `timeout_s` that for one marker."""
        self._session = session
        self._open_check = open_check
        self._offset_commit = offset_commit
        self._timeout_s = timeout_s
        self._markers_timeout_s = markers_timeout_s

    @property
    def client(self) -> Client:
        """The connections of the session."""
        return self._session.client

    @property
    def producer_id(self) -> int:
        return self._session.producer_id

    @property
    def former_ids(self) -> Collection[int]:
        """The producer ids that the transactional id had before this session, as far as the coordinator named them."""
        return self._session.former_ids

    @property
    def without_marker(self) -> set[Partition]:
        """The partitions of the older producers' transaction that had no marker at the time of the fence."""
        return self._session.without_marker

    async def find_own(self, partitions: Collection[Partition]) -> tuple[dict[Partition, int], set[Partition]]:
        """Find the open transactions of the session's producer id.

        Returns their first offset, by partition, and the partitions whose leader gave no answer.
        """
        return await self._open_check.ask(partitions)

    async def find_of_others(self, partitions: Collection[Partition]) -> dict[int, dict[Partition, ActiveProducer]]:
        """Find the open transactions of other producer ids, of any program, by producer id and partition.

        Partitions whose leader gave no answer, or may not be asked, are left out.
        """
        found = await active_producers(self._session.client, partitions, METADATA_TIMEOUT_S)
        others: dict[int, dict[Partition, ActiveProducer]] = {}
        for partition, active in found.active.items():
            for each in active:
                if each.start >= 0 and each.producer_id != self.producer_id:
                    others.setdefault(each.producer_id, {})[partition] = each
        return others

    async def end_own(self, partitions: Sequence[Partition], *, commit: bool) -> Sequence[Partition]:
        """End the hanging transactions of the session's producer id, by one that adds the partitions and has no data.

        Returns the partitions that have their markers now: all but those of OFFSETS_TOPIC that the service may not add,
        which is logged. Raises KafkaAway where the markers are not there in time.
        """
        try:
            async with asyncio.timeout(self._markers_timeout_s):
                return await self._end_own(partitions, commit=commit)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self._session.failed("end-hanging", f"{partitions}: no markers: {error!r}") from error

    async def end_former(self, partition: Partition, former: ActiveProducer, *, commit: bool) -> str:
        """End a transaction that hangs under a former producer id of the transactional id, by its marker.

        No transaction of this session can do so, because a coordinator writes markers of the present producer id only.
        Returns why the marker was not written; "" if it was. Raises no KafkaError: the slot can go on without it.
        """
        assert former.producer_id != self.producer_id
        try:
            async with asyncio.timeout(self._timeout_s):
                await write_marker(self._session.client, partition, former, commit=commit)
                return ""
        except errors.ClusterAuthorizationFailedError:
            return "the service has no permission to Alter the cluster"
        except (errors.KafkaError, OSError, *UNSUPPORTED) as error:
            return repr(error)

    async def _end_own(self, partitions: Sequence[Partition], *, commit: bool) -> list[Partition]:
        added = await self._add(partitions)
        ends = self.producer_id  # at its last epoch, the response to the EndTxn has another one
        if added:
            await self._session.end_transaction(commit)
            while (await self._open_check.ask(added, producer_id=ends)) != ({}, set()):  # noqa: ASYNC110 - Kafka sends no notification
                await asyncio.sleep(MARKERS_PAUSE_MOST_S)
        return added

    async def _add(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Add partitions with a hanging transaction to one of this session; returns those that were added.

        Kafka adds a partition of OFFSETS_TOPIC only by the name of a group that has its offsets there.
        """
        added = [partition for partition in partitions if partition[0] != OFFSETS_TOPIC]
        if added:
            Write([]).check_added(await self._session.add_partitions(added))
        for partition in partitions:
            if partition[0] == OFFSETS_TOPIC:
                group = await self._offset_commit.group_of(partition)
                try:
                    await self._offset_commit.add(group)
                    added.append(partition)
                except OffsetsRefused as refused:
                    log.warning(
                        "hanging transaction not ended",
                        topic=partition[0],
                        partition=partition[1],
                        group=group,
                        why=refused.error.why,
                    )
        return added
