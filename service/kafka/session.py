"""One life of a producer: its producer id and epoch, its sequence numbers, and the batches that it sends.

Made of aiokafka's client and its record batches: aiokafka's own producers repeat requests inside, call some failures
successes, and tell nobody. Here a request is sent once, and its own answer is what counts: anything else than a clean
one ends the life.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from aiokafka import errors
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.structs import TopicPartition

from service.contract.wire import Header
from service.core.problems import KafkaAway
from service.kafka import outcomes
from service.kafka.admin import RETRIABLE, KafkaAdmin, any_node, coordinator, remedy
from service.kafka.connection import Client
from service.kafka.deadline import within
from service.kafka.inspection import open_partitions
from service.kafka.outcomes import REFUSALS, RecordError, Refused
from service.kafka.record_batch import BatchBuilder, builder_of

# A batch that every topic with the default max.message.bytes (1,048,588) takes.
BATCH_BYTES_MAX: Final = 1_000_000
CLOSE_PATIENCE_S: Final = 1.0
# For the metadata of a topic that the topic_metadata knows.
METADATA_PATIENCE_S: Final = 1.0
AGAIN_PAUSE_S: Final = 0.02
MOVED_PAUSE_S: Final = 0.02

SEQUENCES: Final = 2**31  # sequence numbers begin again at 0 (KIP-98)
OK: Final = errors.NoError.errno
NOT_ENOUGH_REPLICAS: Final = errors.NotEnoughReplicasError.errno
# Clean answers after which the same batch may be sent again: its leader is another node (or none yet, of a new topic).
# Where the old one had appended it all the same, the new one knows its sequence numbers and answers with its offset.
NOT_LEADER: Final = (errors.NotLeaderForPartitionError.errno, errors.LeaderNotAvailableError.errno)


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record as it goes to Kafka. `timestamp` in ms; `batch_bytes_max` is what its topic takes in one batch."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    timestamp: int
    batch_bytes_max: int = BATCH_BYTES_MAX
    codec: int | None = None  # of its batch; None: as the settings say


class RecordMetadata(msgspec.Struct, frozen=True, gc=False):
    """Where a record is. `timestamp` is the broker's where the topic has LogAppendTime, else the record's own."""

    offset: int
    timestamp: int


class NotSent(msgspec.Struct, frozen=True):
    """It surely is not in Kafka, and may go there yet. `itself`: its own partition is the reason."""

    itself: bool

    @property
    def why(self) -> str:
        """As a Refusal's."""
        return "it could not be sent"


NOT_SENT: Final = NotSent(itself=False)

# What became of a record: where it is, why the broker refused it for good, that it is not there, or None: nobody knows.
RecordResult = RecordMetadata | RecordError | NotSent | None
Partition = tuple[str, int]


class Batch:
    """Records of one partition on their way: their places in the caller's order, and the broker's answer to them."""

    __slots__ = ("answer", "builder", "members", "moved", "partition", "payload")

    def __init__(self, partition: Partition, builder: BatchBuilder) -> None:
        self.partition = partition
        self.builder = builder
        self.members: list[int] = []
        self.payload = b""  # what is sent, once it is closed
        self.moved = False  # it was sent to one node, and then to another
        self.answer: tuple[int, int, int] | None = None  # error code, offset, timestamp in ms (-1: the records' own)

    def add(self, index: int, record: Record) -> bool:
        """Append a record, which is the caller's at `index`; False where there is no room for it."""
        if not self.builder.append(record.timestamp, record.key, record.value, record.headers):
            return False
        self.members.append(index)
        return True

    def fate(self, records: Sequence[Record]) -> list[RecordMetadata] | RecordError | NotSent | None:
        """The places of its records, in their order; why it was refused; that it is not there; or None: nobody knows.

        That too few replicas would have it is said before it is appended; that too few have it is another code. Of one
        that was sent to two nodes, the first may have appended it, whatever the second says against it.
        """
        if self.answer is None:
            return None
        code, offset, timestamp = self.answer
        if code == OK and offset >= 0:
            return [
                RecordMetadata(offset + n, timestamp if timestamp >= 0 else records[member].timestamp)
                for n, member in enumerate(self.members)
            ]
        if self.moved:
            return None
        return NotSent(itself=True) if code == NOT_ENOUGH_REPLICAS else REFUSALS.get(code)


class ProducerSession:
    """One producer id and epoch, from `InitProducerId` on, with connections of its own."""

    def __init__(
        self, cluster: KafkaAdmin, name: str, transactional_id: str | None = None, timeout_ms: int = 0
    ) -> None:
        self.client = Client(**cluster.options(name))
        self.transactional_id = transactional_id
        self.producer_id = self.epoch = -1
        self.coordinator = -1
        self.unended: set[Partition] = set()  # of the older producers' transaction, as the coordinator had it
        self._cluster = cluster
        self._timeout_ms = timeout_ms
        self._sequences: dict[Partition, int] = {}
        self._throttled_ms = 0
        self._throttled_until = 0.0  # by time.monotonic

    async def start(self, patience_s: float) -> None:
        """Get the producer id and epoch. Raises KafkaAway, and is closed then."""
        try:
            async with asyncio.timeout(patience_s):
                await self.client.bootstrap()
                await self._identify()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            await self.close()
            why = "" if self.transactional_id is None else remedy(error, self.transactional_id, self._timeout_ms)
            raise self._cluster.failed("producer-id", why or f"no producer id: {error!r}") from error
        except BaseException:
            await self.close()
            raise

    async def _identify(self) -> None:
        """InitProducerId, until it has an answer: CONCURRENT_TRANSACTIONS while an older transaction ends (KIP-98)."""
        while True:
            try:
                if self.transactional_id is None:
                    node = await any_node(self.client)
                else:
                    node = await coordinator(self.client, self.transactional_id)
                    self.unended |= await open_partitions(self.client, node, self.transactional_id)
                answer = await self.client.send(node, InitProducerIdRequest(self.transactional_id, self._timeout_ms))
                check(answer.error_code, "InitProducerId")
                self.coordinator, self.producer_id, self.epoch = node, answer.producer_id, answer.producer_epoch
                return
            except RETRIABLE:
                await asyncio.sleep(AGAIN_PAUSE_S)
                await self.client.force_metadata_update()

    def try_send(self, node: int, request: Any) -> asyncio.Future[Any] | None:
        """Send a request, where that can be done at once; its answer is to be heeded."""
        return self.client.send_now(node, request)

    async def request(self, node: int, request: Any) -> Any:
        """The answer to a request, sent once. Raises KafkaError or OSError."""
        return self.note_throttle(await self.client.send(node, request))

    def note_throttle(self, answer: Any) -> Any:
        """Note what an answer says beside what was asked; the answer."""
        if answer.throttle_time_ms:
            self._throttled_ms = answer.throttle_time_ms
            self._throttled_until = time.monotonic() + answer.throttle_time_ms / 1000
        return answer

    @property
    def quota(self) -> str:
        """What there is to say of a request that has no answer now, as Kafka lets this client wait; else "" (KIP-219).

        It answers at once, and then reads no more from the connection until the time that the answer told is over.
        """
        if self._throttled_until < time.monotonic():
            return ""
        return f"Kafka throttles this client by {self._throttled_ms} ms: raise the quota of its user or client id"

    def batches(self, records: Sequence[Record], leaders: Mapping[Partition, int]) -> list[Batch]:
        """The records of partitions with a leader; a new batch where the topic's limit, or ours, would be passed."""
        batches: list[Batch] = []
        open_batches: dict[Partition, Batch] = {}
        for index, record in enumerate(records):
            partition = record.topic, record.partition
            if partition not in leaders:
                continue
            batch = open_batches.get(partition)
            if batch is None or not batch.add(index, record):
                if batch is not None:
                    self._advance(batch)
                builder = self._builder(partition, record.batch_bytes_max, record.codec)
                batch = open_batches[partition] = Batch(partition, builder)
                batches.append(batch)
                batch.add(index, record)  # an empty one takes any: what is too large is the broker's to refuse
        for batch in open_batches.values():
            self._advance(batch)
        return batches

    def _builder(self, partition: Partition, most: int, codec: int | None) -> BatchBuilder:
        return builder_of(
            self._cluster.codec if codec is None else codec,
            self.transactional_id is not None,
            self.producer_id,
            self.epoch,
            self._sequences.get(partition, 0),
            min(BATCH_BYTES_MAX, most),
        )

    def _advance(self, batch: Batch) -> None:
        present = self._sequences.get(batch.partition, 0)
        self._sequences[batch.partition] = (present + len(batch.members)) % SEQUENCES
        batch.payload = batch.builder.build()

    async def send(self, batches: Sequence[Batch], leaders: Mapping[Partition, int], replicas_ms: int) -> None:
        """Send batches, those of a partition in their order, and wait until each has its answer.

        Raises KafkaError or OSError where a request had none; the answers that came are there all the same. A batch is
        sent again only where a broker has said of all of its partition's that it does not lead it (any more).
        """
        await self._send_once(batches, leaders, replicas_ms)
        while moved := _moved(batches):
            await asyncio.sleep(MOVED_PAUSE_S)
            await self.client.force_metadata_update()
            leaders = {partition: await self.find_leader(partition) for partition in moved}
            batches = [batch for batch in batches if batch.partition in moved]
            for batch in batches:
                batch.moved = True
            await self._send_once(batches, leaders, replicas_ms)

    async def _send_once(self, batches: Sequence[Batch], leaders: Mapping[Partition, int], replicas_ms: int) -> None:
        requests: list[tuple[int, list[Batch]]] = []
        for batch in batches:  # a request holds one batch of a partition at most
            node = leaders[batch.partition]
            for to, together in requests:
                if to == node and all(other.partition != batch.partition for other in together):
                    together.append(batch)
                    break
            else:
                requests.append((node, [batch]))
        if len(requests) == 1:
            await self._produce(*requests[0], replicas_ms)
            return
        sends = [asyncio.ensure_future(self._produce(*request, replicas_ms)) for request in requests]
        try:
            for failed in await asyncio.gather(*sends, return_exceptions=True):
                if failed is not None:
                    raise failed
        finally:
            for send in sends:
                send.cancel()

    async def _produce(self, node: int, batches: Sequence[Batch], replicas_ms: int) -> None:
        topics: dict[str, list[tuple[int, bytes]]] = {}
        for batch in batches:
            topic, partition = batch.partition
            topics.setdefault(topic, []).append((partition, batch.payload))
        answer = await self.request(node, ProduceRequest(self.transactional_id, -1, replicas_ms, list(topics.items())))
        answers = {(topic, row[0]): row[1:4] for topic, rows in answer.topics for row in rows}
        for batch in batches:
            batch.answer = answers.get(batch.partition)

    def leader(self, partition: Partition) -> int | None:
        """The node that leads a partition; None where that is not known."""
        node = self.client.cluster.leader_for_partition(TopicPartition(*partition))
        return None if node is None or node < 0 else int(node)

    def look_up(self, partitions: Iterable[Partition]) -> None:
        """Ask for the leaders that are not known, all in one request; `find_leader` waits for them.

        One by one, each would be a request that answers for every topic before it too.
        """
        unknown = {partition[0] for partition in partitions if self.leader(partition) is None}
        if unknown:
            self.client.set_topics({*self.client._topics, *unknown})

    async def find_leader(self, partition: Partition) -> int:
        """The leader, asked for. Raises TimeoutError soon where there is none: it must not cost a group.

        Raises Refused where brokers answer, and know of no such partition or do not let it be seen.
        """
        topic, number = partition
        answered = False
        try:
            async with asyncio.timeout(METADATA_PATIENCE_S):
                self.client.add_topic(topic)
                while (node := self.leader(partition)) is None:
                    answered = await self.client.force_metadata_update()
                    await asyncio.sleep(0.01)
                return node
        except TimeoutError:
            if answered and number not in (self.client.cluster.partitions_for_topic(topic) or ()):
                hidden = topic in self.client.cluster.unauthorized_topics
                kind = errors.TopicAuthorizationFailedError if hidden else errors.UnknownTopicOrPartitionError
                raise Refused(REFUSALS[kind.errno]) from None
            raise

    def failed(self, operation: str, why: str) -> KafkaAway:
        """The error to raise for an operation that failed, which is counted."""
        return self._cluster.failed(operation, why)

    async def close(self) -> None:
        """End this life, in whatever state it is. Never raises, never hangs; what is in flight fails."""
        with contextlib.suppress(Exception):
            await within(CLOSE_PATIENCE_S, self.client.close())


def _moved(batches: Sequence[Batch]) -> set[Partition]:
    """Partitions that their node does not lead, as it said of each of their batches."""
    moved = {batch.partition for batch in batches if batch.answer is not None and batch.answer[0] in NOT_LEADER}
    if not moved:
        return moved
    return moved - {batch.partition for batch in batches if batch.answer is None or batch.answer[0] not in NOT_LEADER}


def check(code: int, what: str) -> None:
    """Raise the error of a code that is not OK. aiokafka does not know PRODUCER_FENCED, and calls it unknown."""
    if code == outcomes.PRODUCER_FENCED:
        raise errors.ProducerFenced(what)
    if code != OK:
        raise errors.for_code(code)(what)
