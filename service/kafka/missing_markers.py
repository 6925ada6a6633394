"""Writes the markers that a coordinator has left out (KAFKA-20734), by a transaction that writes no data."""

import asyncio
from collections.abc import Sequence

import structlog

from service.kafka.group_offsets import OFFSETS_TOPIC
from service.kafka.metadata import Partition
from service.kafka.offset_commit import OffsetCommit
from service.kafka.open_check import OpenCheck
from service.kafka.outcomes import OffsetsRefused
from service.kafka.records import Write
from service.kafka.session import MARKERS_PAUSE_MOST_S, ProducerSession

log = structlog.get_logger(__name__)


async def end_hanging(
    session: ProducerSession,
    open_check: OpenCheck,
    offset_commit: OffsetCommit,
    partitions: Sequence[Partition],
    *,
    commit: bool,
) -> list[Partition]:
    """End hanging transactions of the session's producer id; returns the partitions that have their markers now.

    These are all but those of OFFSETS_TOPIC that the service may not add, which is logged. Raises KafkaError, OSError.
    Without an answer of a leader this waits until the caller's timeout.
    """
    added = await _add(session, offset_commit, partitions)
    ends = session.producer_id  # at its last epoch, the response to the EndTxn has another one
    if added:
        await session.end_transaction(commit)
        while (await open_check.ask(added, producer_id=ends)) != ({}, set()):  # noqa: ASYNC110 - Kafka sends no notification
            await asyncio.sleep(MARKERS_PAUSE_MOST_S)
    return added


async def _add(
    session: ProducerSession, offset_commit: OffsetCommit, partitions: Sequence[Partition]
) -> list[Partition]:
    """Add partitions with a hanging transaction; returns those that were added.

    Kafka adds a partition of OFFSETS_TOPIC only by the name of a group that has its offsets there.
    """
    added = [partition for partition in partitions if partition[0] != OFFSETS_TOPIC]
    if added:
        Write([]).check_added(await session.add_partitions(added))
    for partition in partitions:
        if partition[0] == OFFSETS_TOPIC:
            group = await offset_commit.group_of(partition)
            try:
                await offset_commit.add(group)
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
