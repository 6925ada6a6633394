"""A producer session: one producer id, its epochs and sequence numbers, and all requests that are made under them.

Built on aiokafka's client and record batches, not on its producers: those repeat requests internally and report some
failures as successes. Here a request is sent once, and any response that is not clean ends the session.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from aiokafka import errors
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.structs import TopicPartition

from service.core.problems import KafkaAway
from service.kafka.admin import TRANSACTIONS_1, KafkaAdmin
from service.kafka.client import Client
from service.kafka.connection import Connection
from service.kafka.deadline import within
from service.kafka.init_producer_id import remedy, timeout_refused
from service.kafka.inspection import is_ending, last_transaction
from service.kafka.metadata import Partition
from service.kafka.nodes import RETRIABLE, RETRY_PAUSE_S, any_node, coordinator
from service.kafka.outcomes import CONCURRENT_TRANSACTIONS, OK, RECORD_ERRORS, PartitionUnknown, raise_if_error
from service.kafka.protocol import (
    EPOCH_PER_TRANSACTION,
    AddPartitionsToTxnRequest,
    EndTxnAndBumpRequest,
    EndTxnRequest,
    ProduceAndAddRequest,
    ProduceRequest,
)
from service.kafka.records import BATCH_BYTES_MAX, BatchBuilder, Record, RecordBatch, builder_of
from service.kafka.throttle import Throttle

CLOSE_TIMEOUT_S: Final = 1.0
# For the metadata of a topic that TopicMetadataCache has listed as existing.
METADATA_TIMEOUT_S: Final = 1.0
NOT_LEADER_PAUSE_S: Final = 0.02
# Pauses while the markers of the previous transaction are written, which happens after its EndTxn response.
MARKERS_PAUSE_S: Final = 0.001
MARKERS_PAUSE_MOST_S: Final = 0.02

# The sends get 1/n of a request's time: after a partition that hangs, there is time to send the rest again without it.
SENDS_SHARE: Final = 3
# The share of the sends' time that the broker waits for replicas: its error names the partition, before our timeout.
ACKS_TIMEOUT_SHARE: Final = 0.8

ACKS_ALL: Final = -1
SEQUENCES: Final = 2**31  # sequence numbers begin again at 0 (KIP-98)
# The highest epoch is Kafka's own, for its fence: no later owner could fence a transaction under it (KAFKA-20090).
EPOCH_MOST: Final = 2**15 - 2
# Clean error codes after which the same batch may be sent to another leader. Where the old leader has appended the
# batch, the new leader knows its sequence numbers and answers with its offset.
NOT_LEADER: Final = (errors.NotLeaderForPartitionError.errno, errors.LeaderNotAvailableError.errno)


class ProducerSession:
    """One producer id and epoch, from `InitProducerId` on, with connections of its own."""

    def __init__(
        self,
        admin: KafkaAdmin,
        name: str,
        transactional_id: str | None = None,
        timeout_ms: int = 0,
        throttle: Throttle | None = None,
    ) -> None:
        self._asks_version = transactional_id is not None and admin.transactions != TRANSACTIONS_1
        # The session of a connection is renewed between two transactions: a refused login must not fail one.
        self.client = Client(
            **admin.options(name), renews_on_use=transactional_id is None, asks_features=self._asks_version
        )
        self.transactional_id = transactional_id
        self.producer_id = self.epoch = -1
        self.coordinator = -1
        self.without_marker: set[Partition] = set()  # of the older producers' transaction, before the fence
        self.former_ids: set[int] = set()  # producer ids of the transactional id that the fence has replaced
        self.joining: set[Partition] = set()  # partitions that the next Produce to each adds to the transaction
        self.has_ended = False  # whether an EndTxn was sent, whose markers may be late
        self._admin = admin
        self._timeout_ms = timeout_ms
        self._sequences: dict[Partition, int] = {}
        self.throttle = throttle or Throttle()

    async def start(self, timeout_s: float) -> None:
        """Connect and get the producer id and epoch. Raises KafkaAway after closing the session.

        Raises KafkaRefusesSetting, of the kind KafkaAway, where Kafka refuses the transaction timeout.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.client.bootstrap()
                await self._identify()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            await self.close()
            why = "" if self.transactional_id is None else remedy(error, self.transactional_id)
            raise self._admin.failed("producer-id", why or f"no producer id: {error!r}") from error
        except BaseException:
            await self.close()
            raise

    async def _identify(self) -> None:
        """Repeat InitProducerId while an older transaction ends (CONCURRENT_TRANSACTIONS, KIP-98)."""
        while True:
            try:
                if self.transactional_id is None:
                    node = await any_node(self.client)
                else:
                    node = await coordinator(self.client, self.transactional_id)
                    last = await last_transaction(self.client, node, self.transactional_id)
                    self.without_marker |= last.partitions
                    self.former_ids.add(last.producer_id)
                response = await self.client.send(node, InitProducerIdRequest(self.transactional_id, self._timeout_ms))
                if response.error_code == errors.InvalidTransactionTimeout.errno:
                    self._admin.count_failure("producer-id")
                    raise await timeout_refused(self.client, node, self._timeout_ms)
                raise_if_error(response.error_code, "InitProducerId")
                self.coordinator, self.producer_id, self.epoch = node, response.producer_id, response.producer_epoch
                self.former_ids -= {self.producer_id, -1}
                return
            except RETRIABLE:
                await asyncio.sleep(RETRY_PAUSE_S)
                await self.client.force_metadata_update()

    def try_send(self, node: int, request: Any) -> asyncio.Future[Any] | None:
        """Send a request if that needs no waiting. Returns a future of its response, for `note_throttle`; else None."""
        return self.client.try_send(node, request)

    async def request(self, node: int, request: Any) -> Any:
        """Send a request once and await its response. Raises KafkaError or OSError."""
        response = self.client.try_send(node, request) or self.client.send(node, request)
        return self.note_throttle(await response)

    def note_throttle(self, response: Any) -> Any:
        """Note a response's throttle time (KIP-219), and return the response."""
        if response.throttle_time_ms:
            self.throttle.note(response.throttle_time_ms)
        return response

    # ---------------------------------------------------------------------------------------- requests of a transaction

    def has_version_2(self, node: int) -> bool:
        """Check whether a broker reported, on its present connection, that transactions of version 2 are finalized."""
        return self._asks_version and _has_version_2(self.client.connection(node))

    async def _ends_in_version_2(self) -> bool:
        """Check whether the EndTxn is one of version 2, by what the coordinator reported on its present connection.

        Where its connection has ended, another is opened, on which it reports its version. Raises NodeNotReadyError.
        """
        if not self._asks_version:
            return False
        connection = self.client.connection(self.coordinator)
        if connection is None:
            if not await self.client.ready(self.coordinator):
                raise errors.NodeNotReadyError(f"the coordinator, node {self.coordinator}, cannot be reached")
            connection = self.client.connection(self.coordinator)
        return _has_version_2(connection)

    def joining_of(self, leaders: Mapping[Partition, int]) -> set[Partition]:
        """Find the partitions that a Produce adds to the transaction: of leaders that have version 2.

        The set is empty where the coordinator does not have version 2: without an epoch for each transaction, a late
        Produce could join the next.
        """
        if not self.has_version_2(self.coordinator):
            return set()
        return {partition for partition, node in leaders.items() if self.has_version_2(node)}

    def request_to_add(self, partitions: Iterable[Partition]) -> AddPartitionsToTxnRequest:
        """Make the AddPartitionsToTxn request of these partitions."""
        by_topic: dict[str, list[int]] = {}
        for topic, partition in partitions:
            by_topic.setdefault(topic, []).append(partition)
        return AddPartitionsToTxnRequest(self.transactional_id, self.producer_id, self.epoch, list(by_topic.items()))

    async def add_partitions(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Add partitions to the transaction, or begin it by them; returns the error code of each.

        CONCURRENT_TRANSACTIONS means that the previous transaction's markers are still being written, and nothing was
        added: the request is repeated.
        """
        request, pause_s = self.request_to_add(partitions), MARKERS_PAUSE_S
        while True:
            codes = codes_of_added(await self.request(self.coordinator, request))
            if CONCURRENT_TRANSACTIONS not in codes.values():
                return codes
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MARKERS_PAUSE_MOST_S)

    async def end_transaction(self, commit: bool) -> None:
        """Send EndTxn. After a clean response the outcome is final, and the coordinator writes the markers.

        In version 2 the session goes on with the producer id and epoch of the response. A transaction that a Produce
        has joined must not end in version 1: the version is never taken from a connection that has ended.
        """
        in_version_2 = await self._ends_in_version_2()
        self.joining = set()
        self.has_ended = True
        producer = self.transactional_id, self.producer_id, self.epoch
        if not in_version_2:
            ended = await self.request(self.coordinator, EndTxnRequest(*producer, commit))
            raise_if_error(ended.error_code, "EndTxn")
            return
        ended = await self.request(self.coordinator, EndTxnAndBumpRequest(*producer, commit))
        raise_if_error(ended.error_code, "EndTxn")
        if ended.producer_id < 0 or not 0 <= ended.producer_epoch <= EPOCH_MOST:
            raise errors.KafkaError(f"EndTxn: no producer of the next transaction: {ended}")
        self.producer_id, self.epoch = ended.producer_id, ended.producer_epoch
        self._sequences.clear()  # an epoch's sequence numbers begin at 0 in each partition

    async def abort_transaction(self) -> None:
        """Abort a transaction that may have no partition yet, and go on. Raises KafkaError, OSError.

        In version 2 the epoch is raised in any case, so that no late request of this transaction can join the next. The
        coordinator would call the producer fenced while it writes the previous transaction's markers.
        """
        if await self._ends_in_version_2():
            await self.await_markers()
        await self.end_transaction(commit=False)

    async def await_markers(self) -> None:
        """Wait until the coordinator has written the markers of the last transaction. Raises KafkaError, OSError."""
        assert self.transactional_id is not None
        pause_s = MARKERS_PAUSE_S
        while await is_ending(self.client, self.coordinator, self.transactional_id):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MARKERS_PAUSE_MOST_S)

    # ---------------------------------------------------------------------------------------------------------- records

    def batches(self, records: Sequence[Record], leaders: Mapping[Partition, int]) -> list[RecordBatch]:
        """Build batches of the records whose partition has a leader, up to the size limit of each topic."""
        batches: list[RecordBatch] = []
        open_batches: dict[Partition, RecordBatch] = {}
        for index, record in enumerate(records):
            partition = record.topic, record.partition
            if partition not in leaders:
                continue
            batch = open_batches.get(partition)
            if batch is None or not batch.add(index, record):
                if batch is not None:
                    self._close(batch)
                builder = self._builder(partition, record.batch_bytes_max, record.codec)
                batch = open_batches[partition] = RecordBatch(partition, builder)
                batches.append(batch)
                batch.add(index, record)  # an empty batch accepts any size: the broker refuses what is too large
        for batch in open_batches.values():
            self._close(batch)
        return batches

    def _builder(self, partition: Partition, most: int, codec: int | None) -> BatchBuilder:
        return builder_of(
            self._admin.codec if codec is None else codec,
            self.transactional_id is not None,
            self.producer_id,
            self.epoch,
            self._sequences.get(partition, 0),
            min(BATCH_BYTES_MAX, most),
        )

    def _close(self, batch: RecordBatch) -> None:
        """Encode a batch that takes no more records, and advance its partition's sequence number behind them."""
        present = self._sequences.get(batch.partition, 0)
        self._sequences[batch.partition] = (present + len(batch.members)) % SEQUENCES
        batch.payload = batch.builder.build()

    async def send(
        self, batches: Sequence[RecordBatch], leaders: Mapping[Partition, int], acks_timeout_ms: int
    ) -> None:
        """Send batches, those of a partition in their order, and wait until each has a response.

        `acks_timeout_ms`: for how long a leader waits for its in-sync replicas. Raises KafkaError or OSError where a
        request had no response; responses to other requests are kept. Batches are sent again only where the node
        answered NOT_LEADER to all batches of their partition that were sent, and while the markers of the previous
        transaction are written (CONCURRENT_TRANSACTIONS to a batch that adds its partition, which has then appended
        nothing).

        The new leader is not asked for open transactions (OpenCheck): the partition belongs to the transaction already,
        or may do so where a Produce adds it, so that it gets the transaction's marker. What hangs there is a
        transaction that this session has committed since the old leader was asked, and the commit of this one ends it
        rightly. To give this one up would abort both.
        """
        await self._send_joining(batches, leaders, acks_timeout_ms)
        while moved := _moved(batches):
            await asyncio.sleep(NOT_LEADER_PAUSE_S)
            await self.client.force_metadata_update()
            leaders = {**leaders, **{partition: await self.find_leader(partition) for partition in moved}}
            again = [batch for batch in batches if batch.partition in moved]
            for batch in again:
                batch.moved = batch.is_sent
            await self._send_joining(again, leaders, acks_timeout_ms)
            await self._send_unsent(batches, leaders, acks_timeout_ms)

    async def _send_joining(
        self, batches: Sequence[RecordBatch], leaders: Mapping[Partition, int], acks_timeout_ms: int
    ) -> None:
        """Send batches, where a partition joins the transaction by its first batch: that one before all others.

        A later batch could else be appended before the first, which waits for the previous transaction's markers. Where
        a first batch has failed, the later ones of all partitions are not sent; where it has moved, `send` sends them.
        """
        if not self.joining or self.joining.isdisjoint(batch.partition for batch in batches):
            await self._send_once(batches, leaders, acks_timeout_ms)
            return
        first: dict[Partition, RecordBatch] = {}
        for batch in batches:
            first.setdefault(batch.partition, batch)
        wave, pause_s = [*first.values()], MARKERS_PAUSE_S
        while True:
            await self._send_once(wave, leaders, acks_timeout_ms)
            wave = [batch for batch in wave if batch.response and batch.response[0] == CONCURRENT_TRANSACTIONS]
            if not wave:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MARKERS_PAUSE_MOST_S)
        await self._send_unsent(batches, leaders, acks_timeout_ms)

    async def _send_unsent(
        self, batches: Sequence[RecordBatch], leaders: Mapping[Partition, int], acks_timeout_ms: int
    ) -> None:
        """Send the batches that are not sent yet, once all others are in Kafka."""
        unsent = [batch for batch in batches if not batch.is_sent]
        if unsent and all(batch.response is not None and batch.response[0] == OK for batch in batches if batch.is_sent):
            await self._send_once(unsent, leaders, acks_timeout_ms)

    async def _send_once(
        self, batches: Sequence[RecordBatch], leaders: Mapping[Partition, int], acks_timeout_ms: int
    ) -> None:
        """Send each batch to its leader once, in as few Produce requests as can be. Raises as `send` does."""
        requests: list[tuple[int, list[RecordBatch]]] = []
        for batch in batches:  # a Produce request holds at most one batch of a partition
            node = leaders[batch.partition]
            for to, together in requests:
                if to == node and all(other.partition != batch.partition for other in together):
                    together.append(batch)
                    break
            else:
                requests.append((node, [batch]))
        if len(requests) == 1:
            await self._produce(*requests[0], acks_timeout_ms)
            return
        sends = [asyncio.ensure_future(self._produce(*request, acks_timeout_ms)) for request in requests]
        try:
            for failed in await asyncio.gather(*sends, return_exceptions=True):
                if failed is not None:
                    raise failed
        finally:
            for send in sends:
                send.cancel()

    async def _produce(self, node: int, batches: Sequence[RecordBatch], acks_timeout_ms: int) -> None:
        """Send one Produce request, of at most one batch a partition, and note the response to each batch."""
        topics: dict[str, list[tuple[int, bytes]]] = {}
        for batch in batches:
            topic, partition = batch.partition
            topics.setdefault(topic, []).append((partition, batch.payload))
            batch.is_sent = True
        joins = bool(self.joining) and any(batch.partition in self.joining for batch in batches)
        kind = ProduceAndAddRequest if joins else ProduceRequest
        response = await self.request(
            node, kind(self.transactional_id, ACKS_ALL, acks_timeout_ms, list(topics.items()))
        )
        row_of = {(topic, row[0]): row[1:4] for topic, rows in response.topics for row in rows}
        for batch in batches:
            batch.response = row_of.get(batch.partition)
            if joins and batch.response is not None and batch.response[0] == OK:
                self.joining.discard(batch.partition)

    # ---------------------------------------------------------------------------------------------------------- leaders

    def leader(self, partition: Partition) -> int | None:
        """Find a partition's leader in the cached metadata; None where it is unknown."""
        node = self.client.cluster.leader_for_partition(TopicPartition(*partition))
        return None if node is None or node < 0 else int(node)

    def request_metadata(self, partitions: Iterable[Partition]) -> None:
        """Request the metadata of all topics with an unknown leader at once; `find_leader` waits for it.

        Adding topics one by one would send one request for each. Topics that the last metadata did not have are
        tracked no more: they may have been deleted.
        """
        unknown = {partition[0] for partition in partitions if self.leader(partition) is None}
        if unknown:
            known = self.client.tracked_topics & self.client.cluster.topics(exclude_internal_topics=False)
            self.client.set_topics(known | unknown)
            self.client.refresh(unknown)

    async def find_leader(self, partition: Partition) -> int:
        """Wait for a partition's leader, for METADATA_TIMEOUT_S. Raises TimeoutError where there is none.

        Raises PartitionUnknown where brokers answer and the partition does not exist or is hidden from the service.
        """
        topic, number = partition
        answered = False
        try:
            async with asyncio.timeout(METADATA_TIMEOUT_S):
                self.client.add_topic(topic)
                while (node := self.leader(partition)) is None:
                    answered = await self.client.refresh([topic])
                    await asyncio.sleep(0.01)
                return node
        except TimeoutError:
            if answered and number not in (self.client.cluster.partitions_for_topic(topic) or ()):
                hidden = topic in self.client.cluster.unauthorized_topics
                kind = errors.TopicAuthorizationFailedError if hidden else errors.UnknownTopicOrPartitionError
                raise PartitionUnknown(RECORD_ERRORS[kind.errno]) from None
            raise

    def failed(self, operation: str, why: str) -> KafkaAway:
        """Count a failed operation and make the error to raise for it."""
        return self._admin.failed(operation, why)

    async def close(self) -> None:
        """Close the connections, in any state. Never raises, never hangs; pending requests fail."""
        with contextlib.suppress(Exception):
            await within(CLOSE_TIMEOUT_S, self.client.close())


def _has_version_2(connection: Connection | None) -> bool:
    return connection is not None and connection.transaction_version >= EPOCH_PER_TRANSACTION


def codes_of_added(response: Any) -> dict[Partition, int]:
    """Extract the error code of each partition from an AddPartitionsToTxn response."""
    return {(topic, row[0]): row[1] for topic, rows in response.errors for row in rows}


def _moved(batches: Sequence[RecordBatch]) -> set[Partition]:
    """Find the partitions all of whose batches, as far as they are sent, were answered with NOT_LEADER."""
    moved = {batch.partition for batch in batches if batch.response is not None and batch.response[0] in NOT_LEADER}
    if not moved:
        return moved
    return moved - {
        batch.partition
        for batch in batches
        if batch.is_sent and (batch.response is None or batch.response[0] not in NOT_LEADER)
    }
