"""Requests about transactions: where they hold a last stable offset, who holds it, and the fencing of their ids."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from aiokafka import errors
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.transaction import InitProducerIdRequest

from service.contract.wire.headers import Stamp
from service.contract.wire.versions import WireError
from service.kafka.admin import ASK_TRIES, UNANSWERED, KafkaAdmin
from service.kafka.hanging import ActiveProducer, RecordCoordinates
from service.kafka.init_producer_id import remedy, timeout_refused
from service.kafka.inspection import (
    FINAL,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    LogEntry,
    active_producers,
    fetch,
    last_transaction,
    transactional_ids_at,
)
from service.kafka.metadata import Metadata, Partition
from service.kafka.nodes import coordinator

# ListOffsets: the timestamp that means "the last offset".
LATEST: Final = -1
# Concurrent requests on one connection: a broker answers the requests of a connection in order, one at a time.
FENCES_AT_ONCE: Final = 16
# Topics in one Metadata request, and partitions in one ListOffsets request, where there may be thousands: a response is
# decoded in one step of the event loop, whose time grows with its partitions. A topic with hundreds of partitions makes
# the step of its Metadata response longer.
TOPICS_AT_ONCE: Final = 25
PARTITIONS_AT_ONCE: Final = 250
PARTITIONS_NAMED: Final = 8


class Ends(NamedTuple):
    """End offsets of a partition: the last stable offset (for read_committed) and the high watermark."""

    last_stable: int
    high_watermark: int


class LastOffsets(NamedTuple):
    """The ends of partitions whose leaders answered, the topics that do not exist, and how many partitions topics have.

    `partitions` has no number for a topic that does not exist or that the service may not see.
    """

    ends: Mapping[Partition, Ends]
    absent: Collection[str] = ()
    partitions: Mapping[str, int] = MappingProxyType({})


class TransactionAdmin:
    """Asks for offsets and open transactions, and fences. Every call has a deadline and raises KafkaAway at it."""

    def __init__(self, admin: KafkaAdmin) -> None:
        self._admin = admin

    async def last_offsets(self, topics: Sequence[str], only: Collection[Partition] = ()) -> LastOffsets:
        """Ask the leaders for the end offsets of the topics' partitions, or of those in `only`. Raises KafkaAway.

        Costs a Metadata request for TOPICS_AT_ONCE topics, and two ListOffsets for PARTITIONS_AT_ONCE partitions of a
        leader. The high watermark is requested before the LSO, so that an idle partition never shows an LSO below it.
        Partitions whose leader does not answer are left out.
        """
        led: dict[int, list[Partition]] = {}
        absent: list[str] = []
        counts: dict[str, int] = {}
        for start in range(0, len(topics), TOPICS_AT_ONCE):
            response = await self._admin.request(Metadata(topics[start : start + TOPICS_AT_ONCE]))
            for topic_code, name, _id, _internal, partitions, *_ in (tuple(topic) for topic in response.topics):
                if topic_code == errors.UnknownTopicOrPartitionError.errno:
                    absent.append(name)
                elif partitions:
                    counts[name] = len(partitions)
                for code, number, leader, *_ in (tuple(row) for row in partitions):
                    if code == errors.NoError.errno and leader >= 0 and (not only or (name, number) in only):
                        led.setdefault(leader, []).append((name, number))
        ends = await asyncio.gather(*(self._ends_at(node, partitions) for node, partitions in led.items()))
        return LastOffsets({partition: end for found in ends for partition, end in found.items()}, absent, counts)

    async def _ends_at(self, node: int, partitions: Sequence[Partition]) -> dict[Partition, Ends]:
        """Ask a node for the end offsets of partitions that it leads; partitions without an answer are left out.

        All requests to the node share one timeout, because the caller reads its clock before them.
        """
        found: dict[Partition, Ends] = {}
        with contextlib.suppress(*UNANSWERED):
            async with asyncio.timeout(self._admin.timeout_s):
                for start in range(0, len(partitions), PARTITIONS_AT_ONCE):
                    some = partitions[start : start + PARTITIONS_AT_ONCE]
                    high = await self._offsets_at(node, some, READ_UNCOMMITTED)
                    stable = await self._offsets_at(node, some, READ_COMMITTED)
                    found |= {partition: Ends(stable[partition], high[partition]) for partition in high.keys() & stable}
        return found

    async def _offsets_at(self, node: int, partitions: Sequence[Partition], isolation: int) -> dict[Partition, int]:
        """Ask a node for the last offsets of partitions; those with an error are left out. Raises UNANSWERED."""
        asked: dict[str, list[tuple[int, int]]] = {}
        for topic, number in partitions:
            asked.setdefault(topic, []).append((number, LATEST))
        response = await self._admin.request_once(node, OffsetRequest(-1, isolation, list(asked.items())))
        return {
            (topic, number): offset
            for topic, rows in map(tuple, response.topics)
            for number, code, _, offset in map(tuple, rows)
            if code == errors.NoError.errno
        }

    async def open_transactions(self, partitions: Collection[Partition]) -> dict[Partition, list[ActiveProducer]]:
        """Ask the leaders for the active producers of partitions; partitions without an answer are left out."""
        with self._admin.failing("metadata", "partition leaders did not describe their producers"):
            found = await active_producers(await self._admin.connected(), partitions, self._admin.timeout_s / ASK_TRIES)
        return found.active

    async def stamps_of(self, records: Iterable[RecordCoordinates]) -> dict[RecordCoordinates, Stamp]:
        """Read the headers of records that slots have written, of any namespace; records of no slot are left out."""
        found: dict[RecordCoordinates, Stamp] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._admin.timeout_s):
                for record in records:
                    with contextlib.suppress(*UNANSWERED, WireError):
                        entries, _, _ = await self.entries(*record)
                        for first in entries[:1]:
                            if first.slot() is not None:
                                found[record] = first.stamp()
        return found

    async def entries(self, partition: Partition, offset: int) -> tuple[list[LogEntry], int, int]:
        """Fetch entries of a partition, the next offset and the partition's end. Raises as `fetch` does."""
        client = await self._admin.connected()
        if partition[0] not in client.tracked_topics:
            await client.set_topics({*client.tracked_topics, partition[0]})
        return await fetch(client, partition, offset)

    async def transactional_ids(self, producer_ids: Collection[int]) -> dict[int, str]:
        """Ask all brokers for the transactional ids that have these producer ids; those that may be described.

        Ids of a broker that does not answer, or that is older than 3.0, are left out.
        """
        found: dict[int, str] = {}
        with contextlib.suppress(*UNANSWERED):
            async with asyncio.timeout(self._admin.timeout_s):
                client = await self._admin.connected()
                nodes = [broker.nodeId for broker in client.cluster.brokers()]
                for named in await asyncio.gather(*(transactional_ids_at(client, n, producer_ids) for n in nodes)):
                    found |= named
        return found

    async def producer_ids(self, transactional_ids: Iterable[str]) -> dict[str, int]:
        """Ask the coordinators for the producer ids of transactional ids; unknown ones are left out."""
        permits = asyncio.Semaphore(FENCES_AT_ONCE)

        async def ask(name: str) -> int:
            async with permits:
                client = await self._admin.connected()
                return (await last_transaction(client, await coordinator(client, name), name)).producer_id

        names = list(transactional_ids)
        with self._admin.failing("metadata", "coordinators did not describe producer ids"):
            async with asyncio.timeout(self._admin.timeout_s):
                found = await asyncio.gather(*map(ask, names))
        return {name: producer for name, producer in zip(names, found, strict=True) if producer >= 0}

    async def fence(
        self,
        transactional_ids: Sequence[str],
        transaction_timeout_ms: int,
        on_progress: Callable[[Collection[str]], None],
    ) -> None:
        """Fence every producer with one of these ids and wait until its open transaction has ended.

        `InitProducerId` raises the epoch and aborts an open transaction. Until that has ended, the coordinator answers
        CONCURRENT_TRANSACTIONS, and the request is repeated (KIP-98, KIP-360). Raises KafkaAway at the deadline, which
        is the request timeout and the transaction timeout together, and at once if Kafka refuses an id for good;
        KafkaRefusesSetting if Kafka refuses the transaction timeout.

        `on_progress` is called with the ids that are left, in order: at the start and after each fenced id.
        """
        permits = asyncio.Semaphore(FENCES_AT_ONCE)
        left = dict.fromkeys(transactional_ids)
        on_progress(left)

        async def fence_one(transactional_id: str) -> None:
            async with permits:
                await self._init_producer_id(transactional_id, transaction_timeout_ms)
            del left[transactional_id]
            on_progress(left)

        tasks = [asyncio.create_task(fence_one(transactional_id)) for transactional_id in transactional_ids]
        try:
            # A transaction may just have begun to commit: writing its markers may take up to the transaction timeout.
            timeout_s = self._admin.timeout_s + transaction_timeout_ms / 1000
            with self._admin.failing("fence", "not every transactional id could be fenced"):
                async with asyncio.timeout(timeout_s):
                    await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _init_producer_id(self, transactional_id: str, transaction_timeout_ms: int) -> None:
        """Send InitProducerId until it succeeds.

        Raises KafkaError; KafkaAway where Kafka refuses the id for good, KafkaRefusesSetting for the timeout.
        """
        request = InitProducerIdRequest(transactional_id, transaction_timeout_ms)
        try:
            response = await self._admin.request_coordinator(transactional_id, request, _error_code)
            kind = errors.for_code(response.error_code)
            if kind is errors.InvalidTransactionTimeout:
                self._admin.count_failure("fence")
                client = await self._admin.connected()
                raise await timeout_refused(client, await coordinator(client, transactional_id), transaction_timeout_ms)
            if kind is not errors.NoError:
                raise kind
        except errors.KafkaError as error:
            if why := remedy(error, transactional_id):
                raise self._admin.failed("fence", why) from error
            raise

    async def partitions_with_open_transactions(self, partitions: Collection[Partition]) -> set[Partition]:
        """Find the partitions that hold an open transaction of any producer.

        Partitions that the service may not inspect count as not open. Raises KafkaAway where a leader does not answer.
        """
        with self._admin.failing("end-hanging", "partition leaders do not answer"):
            found = await active_producers(await self._admin.connected(), partitions, self._admin.timeout_s)
        forbidden = {partition for partition, code in found.failed.items() if code in FINAL}
        if missing := set(partitions) - found.active.keys() - forbidden:
            raise self._admin.failed("end-hanging", f"no leader answers for {sorted(missing)[:PARTITIONS_NAMED]}")
        return {
            partition for partition, producers in found.active.items() if any(each.start >= 0 for each in producers)
        }


def _error_code(response: Any) -> int:
    return int(response.error_code)
