"""The two kinds of producer, made of aiokafka's client and its record batches. One life each, up to the first failure.

aiokafka's own producers repeat requests inside, call some failures successes, and tell nobody (design: traps). Here a
request is sent once, and its own answer is what counts: anything else than a clean one ends the producer's life.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import structlog
from aiokafka import errors
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.structs import TopicPartition

from service.errors import KafkaAway
from service.kafka import verdict
from service.kafka.cluster import AGAIN, CODECS, Cluster, any_node, coordinator
from service.kafka.deadline import within
from service.kafka.verdict import REFUSALS, Refusal, TransactionFailed
from service.logs import Incident
from service.wire import Header

log = structlog.get_logger(__name__)

# A batch that every topic with the default max.message.bytes (1,048,588) takes.
BATCH_BYTES_MAX: Final = 1_000_000
CLOSE_PATIENCE_S: Final = 1.0
# Of the time of a request, one part for the sends: a partition that hangs leaves time to go round again without it.
PATIENCE_SHARE: Final = 3
# Of the sends' time, one part for the replicas: the broker itself says which partition they held up, before we give up.
REPLICAS_SHARE: Final = 0.8
# For the metadata of a topic that the catalogue knows.
METADATA_PATIENCE_S: Final = 1.0
# Kafka writes a transaction's markers behind its commit, which takes a millisecond or so; the next one waits for them.
MARKERS_PAUSE_S: Final = 0.001
MARKERS_PAUSE_MOST_S: Final = 0.02
MOVED_PAUSE_S: Final = 0.02

# Of ledger and journal: 0.6 µs an entry on the event loop, for a quarter of the bytes (tests/bench compression).
OWN_CODEC: Final = CODECS["zstd"]
MAGIC: Final = 2  # of record batches, since Kafka 0.11
SEQUENCES: Final = 2**31  # sequence numbers begin again at 0 (KIP-98)
OK: Final = errors.NoError.errno
CONCURRENT_TRANSACTIONS: Final = errors.ConcurrentTransactions.errno
NOT_ATTEMPTED: Final = errors.OperationNotAttempted.errno
# Clean answers after which the same batch may be sent again: its leader is another node (or none yet, of a new topic).
# Where the old one had appended it all the same, the new one knows its sequence numbers and answers with its offset.
MOVED: Final = (errors.NotLeaderForPartitionError.errno, errors.LeaderNotAvailableError.errno)


class Record(NamedTuple):
    """A record as it goes to Kafka. `timestamp` in ms; `batch_bytes_max` is what its topic takes in one batch."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    timestamp: int
    batch_bytes_max: int = BATCH_BYTES_MAX
    codec: int | None = None  # of its batch; None: as the settings say


class Place(NamedTuple):
    """Where a record is. `timestamp` is the broker's where the topic has LogAppendTime, else the record's own."""

    offset: int
    timestamp: int


# What became of a record: where it is, why the broker refused it for good, or None: nobody knows.
Fate = Place | Refusal | None
Partition = tuple[str, int]


class Batch:
    """Records of one partition on their way: their places in the caller's order, and the broker's answer to them."""

    __slots__ = ("answer", "builder", "members", "partition", "payload")

    def __init__(self, partition: Partition, builder: DefaultRecordBatchBuilder) -> None:
        self.partition = partition
        self.builder = builder
        self.members: list[int] = []
        self.payload = b""  # what is sent, once it is closed
        self.answer: tuple[int, int, int] | None = None  # error code, offset, timestamp in ms (-1: the records' own)

    def fate(self, records: Sequence[Record]) -> list[Place] | Refusal | None:
        """The places of its records, in their order; why it was refused; or None: nobody knows."""
        if self.answer is None:
            return None
        code, offset, timestamp = self.answer
        if code == OK and offset >= 0:
            return [
                Place(offset + n, timestamp if timestamp >= 0 else records[member].timestamp)
                for n, member in enumerate(self.members)
            ]
        return REFUSALS.get(code)


class _Life:
    """One producer id and epoch, from `InitProducerId` on, with connections of its own."""

    def __init__(self, cluster: Cluster, name: str, transactional_id: str | None = None, timeout_ms: int = 0) -> None:
        self.client = AIOKafkaClient(**cluster.options(name))
        self.client._topics = {"__consumer_offsets"}  # an empty set would fetch the metadata of all topics
        self.transactional_id = transactional_id
        self.producer_id = self.epoch = -1
        self.coordinator = -1
        self._cluster = cluster
        self._timeout_ms = timeout_ms
        self._sequences: dict[Partition, int] = {}

    async def start(self, patience_s: float) -> None:
        """Get the producer id and epoch. Raises KafkaAway, and is closed then."""
        try:
            async with asyncio.timeout(patience_s):
                await self.client.bootstrap()
                await self._identify()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            await self.close()
            raise self._cluster.failed("producer-id", f"no producer id: {error!r}") from error
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
                answer = await self.client.send(node, InitProducerIdRequest(self.transactional_id, self._timeout_ms))
                check(answer.error_code, "InitProducerId")
                self.coordinator, self.producer_id, self.epoch = node, answer.producer_id, answer.producer_epoch
                return
            except AGAIN:
                await asyncio.sleep(MARKERS_PAUSE_MOST_S)
                await self.client.force_metadata_update()

    def batches(self, records: Sequence[Record], leaders: Mapping[Partition, int]) -> list[Batch]:
        """The records of partitions with a leader; a new batch where the topic's limit, or ours, would be passed."""
        batches: list[Batch] = []
        open_batches: dict[Partition, Batch] = {}
        for index, (topic, number, key, value, headers, timestamp, most, codec) in enumerate(records):
            partition = topic, number
            if partition not in leaders:
                continue
            batch = open_batches.get(partition)
            if batch is None or batch.builder.append(len(batch.members), timestamp, key, value, headers) is None:
                if batch is not None:
                    self._advance(batch)
                batch = open_batches[partition] = Batch(partition, self._builder(partition, most, codec))
                batches.append(batch)
                batch.builder.append(0, timestamp, key, value, headers)
            batch.members.append(index)
        for batch in open_batches.values():
            self._advance(batch)
        return batches

    def _builder(self, partition: Partition, most: int, codec: int | None) -> DefaultRecordBatchBuilder:
        return DefaultRecordBatchBuilder(
            MAGIC,
            self._cluster.codec if codec is None else codec,
            is_transactional=self.transactional_id is not None,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=self._sequences.get(partition, 0),
            batch_size=min(BATCH_BYTES_MAX, most),
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
        answer = await self.client.send(
            node, ProduceRequest(self.transactional_id, -1, replicas_ms, list(topics.items()))
        )
        answers = {(topic, row[0]): row[1:4] for topic, rows in answer.topics for row in rows}
        for batch in batches:
            batch.answer = answers.get(batch.partition)

    def leader(self, partition: Partition) -> int | None:
        """The node that leads a partition; None where that is not known."""
        node = self.client.cluster.leader_for_partition(TopicPartition(*partition))
        return None if node is None or node < 0 else int(node)

    async def find_leader(self, partition: Partition) -> int:
        """The leader, asked for. Raises TimeoutError soon where there is none: it must not cost a group.

        Raises TransactionFailed where brokers answer, and know of no such partition.
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
                raise Refused(REFUSALS[errors.UnknownTopicOrPartitionError.errno]) from None
            raise

    async def close(self) -> None:
        """End this life, in whatever state it is. Never raises, never hangs; what is in flight fails."""
        with contextlib.suppress(Exception):
            await within(CLOSE_PATIENCE_S, self.client.close())


def _moved(batches: Sequence[Batch]) -> set[Partition]:
    """Partitions that their node does not lead, as it said of each of their batches."""
    moved = {batch.partition for batch in batches if batch.answer is not None and batch.answer[0] in MOVED}
    return moved - {batch.partition for batch in batches if batch.answer is None or batch.answer[0] not in MOVED}


class Refused(Exception):
    """There is no such partition; its argument is the Refusal."""

    @property
    def refusal(self) -> Refusal:
        refusal = self.args[0]
        assert isinstance(refusal, Refusal)
        return refusal


def check(code: int, what: str) -> None:
    """Raise the error of a code that is not OK. aiokafka does not know PRODUCER_FENCED, and calls it unknown."""
    if code == verdict.PRODUCER_FENCED:
        raise errors.ProducerFenced(what)
    if code != OK:
        raise errors.for_code(code)(what)


class TransactionalProducer:
    """One life of the producer of a transactional id, from its fence to its first failure (KIP-98).

    A transaction is four requests, each sent once: AddPartitionsToTxn for the data and the ledger, Produce of the data,
    Produce of the ledger record with their offsets, EndTxn.
    """

    def __init__(self, cluster: Cluster, transactional_id: str, transaction_timeout_ms: int) -> None:
        self._life = _Life(cluster, transactional_id, transactional_id, transaction_timeout_ms)
        # The broker aborts a transaction at its timeout; waiting for longer could only meet that.
        self._patience_s = min(cluster.request_timeout_ms, transaction_timeout_ms) / 1000
        self._start_patience_s = (cluster.request_timeout_ms + transaction_timeout_ms) / 1000

    async def start(self) -> None:
        """InitProducerId: when this returns, the fate of the older producers' transactions is final.

        Raises KafkaAway where Kafka does not answer, refuses, or keeps saying CONCURRENT_TRANSACTIONS.
        """
        await self._life.start(self._start_patience_s)

    @property
    def producer_id(self) -> int:
        return self._life.producer_id

    @property
    def epoch(self) -> int:
        return self._life.epoch

    async def write(
        self, records: Sequence[Record], ledger: Partition, ledger_record: Callable[[Sequence[Place]], bytes]
    ) -> tuple[list[Place], int]:
        """One transaction: the records, then the ledger record made from their places; answers places and its offset.

        Awaits every send before the ledger record, and that before the commit. Raises TransactionFailed for anything
        else than a clean commit; then this producer is to be closed.
        """
        group = _Group(records)
        commit_asked = False
        try:
            async with asyncio.timeout(self._patience_s):
                async with asyncio.timeout(self._patience_s / PATIENCE_SHARE):
                    leaders = await self._leaders(group, ledger)
                    await self._begin(group, leaders)
                    places = await self._send(group, leaders)
                last = _Group([Record(*ledger, None, ledger_record(places), [], 0, codec=OWN_CODEC)])
                (ledger_place,) = await self._send(last, leaders)
                commit_asked = True
                await self._commit()
        except Exception as error:  # a bug must end the life too
            cause = ", ".join(f"{topic}: {refusal.why}" for topic, refusal in group.refusals.items()) or repr(error)
            # A refusal holds up what is with it, and is what ended it.
            stuck = set() if group.refusals else group.stuck(timed_out=isinstance(error, TimeoutError))
            raise TransactionFailed(verdict.of(error, commit_asked), cause, group.refusals, stuck) from error
        return places, ledger_place.offset

    async def _leaders(self, group: "_Group", ledger: Partition) -> dict[Partition, int]:
        """The leader of each partition of the transaction."""
        leaders: dict[Partition, int] = {}
        for partition in dict.fromkeys([(record.topic, record.partition) for record in group.records] + [ledger]):
            node = self._life.leader(partition)
            if node is None:
                group.waiting_for = partition[0]
                try:
                    node = await self._life.find_leader(partition)
                except Refused as refused:
                    group.refusals[partition[0]] = refused.refusal
                    raise
                group.waiting_for = ""
            leaders[partition] = node
        return leaders

    async def _begin(self, group: "_Group", partitions: Mapping[Partition, int]) -> None:
        """Add every partition to the transaction, which begins with that.

        CONCURRENT_TRANSACTIONS says that the markers of the one before are still being written: nothing was done.
        """
        by_topic: dict[str, list[int]] = {}
        for topic, partition in partitions:
            by_topic.setdefault(topic, []).append(partition)
        life, pause_s = self._life, MARKERS_PAUSE_S
        request = AddPartitionsToTxnRequest(life.transactional_id, life.producer_id, life.epoch, list(by_topic.items()))
        while True:
            answer = await life.client.send(life.coordinator, request)
            codes = {(topic, row[0]): row[1] for topic, rows in answer.errors for row in rows}
            if CONCURRENT_TRANSACTIONS not in codes.values():
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MARKERS_PAUSE_MOST_S)
        for (topic, _), code in codes.items():
            if code in REFUSALS:
                group.refusals[topic] = REFUSALS[code]
        for code in codes.values():
            if code != NOT_ATTEMPTED:  # said of the others where one is refused
                check(code, "AddPartitionsToTxn")

    async def _send(self, group: "_Group", leaders: Mapping[Partition, int]) -> list[Place]:
        """Send a group and await every one of its batches; its places in the order of its records."""
        life = self._life
        group.batches = life.batches(group.records, leaders)
        await life.send(group.batches, leaders, int(1000 * REPLICAS_SHARE * self._patience_s / PATIENCE_SHARE))
        places = [Place(-1, -1)] * len(group.records)
        failed = None
        for batch in group.batches:
            fate = batch.fate(group.records)
            if isinstance(fate, list):
                for member, place in zip(batch.members, fate, strict=True):
                    places[member] = place
                continue
            failed = failed or batch
            if fate is not None:
                group.refusals[batch.partition[0]] = fate
        if failed is not None:
            check(failed.answer[0] if failed.answer else -1, f"Produce to {failed.partition}")
            # DuplicateSequenceNumber and the like: there, but nobody knows where.
            raise errors.KafkaError(f"{failed.partition}: no offset in the answer")
        return places

    async def _commit(self) -> None:
        """EndTxn: when it answers, the transaction is committed, and its markers will be written."""
        life = self._life
        request = EndTxnRequest(life.transactional_id, life.producer_id, life.epoch, True)
        check((await life.client.send(life.coordinator, request)).error_code, "EndTxn")

    async def close(self) -> None:
        """End this life, at once: what is in flight is fenced by the next one. Never raises, never hangs."""
        await self._life.close()


class _Group:
    """Records on their way in one transaction, and what is known of those that hold it up."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.batches: list[Batch] = []
        self.waiting_for = ""  # the topic whose leader is looked for
        self.refusals: dict[str, Refusal] = {}  # by topic

    def stuck(self, timed_out: bool) -> set[str]:
        """Topics that the transaction ended for, or that had no answer when its time was up."""
        failed = {
            batch.partition[0]
            for batch in self.batches
            if (timed_out if batch.answer is None else batch.answer[0] not in (OK, *FENCED_CODES))
        }
        return failed | ({self.waiting_for} - {""})


FENCED_CODES: Final = (errors.InvalidProducerEpoch.errno, verdict.PRODUCER_FENCED)


class IdempotentProducer:
    """A plain idempotent producer (acks=all, no transaction) that is made anew after a failure.

    A new life has a new producer id, at epoch 0: what the old one had in flight may be there twice. It carries what
    tolerates that: barriers, the journal, and events whose guarantee is `idempotent`.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._life: _Life | None = None
        self._trouble = Incident(log, "not every record was written")
        self._starting = asyncio.Lock()
        self._sending = asyncio.Lock()  # sequence numbers go out in their order

    async def identity(self) -> tuple[int, int]:
        """Producer id and epoch of the present life, which is begun where there is none. Raises KafkaAway."""
        life = await self._living()
        return life.producer_id, life.epoch

    async def send(self, topic: str, partition: int, key: bytes | None, value: bytes) -> int:
        """Write one record and await it; its offset. Raises KafkaAway: it may be there all the same."""
        (fate,) = await self.write([Record(topic, partition, key, value, [], 0, codec=OWN_CODEC)])
        if not isinstance(fate, Place):
            raise KafkaAway(f"{topic}: {fate.why if fate else 'no clean answer'}")
        return fate.offset

    async def write(self, records: Sequence[Record]) -> list[Fate]:
        """Write records and await them; the fate of each, in their order. Raises KafkaAway: nothing was sent.

        Unless all went well this life ends: its sequence numbers have a gap that the broker would refuse for ever.
        """
        async with self._sending:
            life = await self._living()
            fates: list[Fate] = [None] * len(records)
            batches: list[Batch] = []
            patience_s = self._cluster.timeout_s / PATIENCE_SHARE
            try:
                async with asyncio.timeout(patience_s):
                    leaders = await self._leaders(life, records, fates)
                    batches = life.batches(records, leaders)
                    await life.send(batches, leaders, int(1000 * REPLICAS_SHARE * patience_s))
            except Exception as error:  # each batch's own fate is in its answer
                self._trouble.goes_on(error, producer=self._name)
            for batch in batches:
                fate = batch.fate(records)
                for n, member in enumerate(batch.members):
                    fates[member] = fate[n] if isinstance(fate, list) else fate
            if not all(isinstance(fate, Place) for fate in fates):
                self._cluster.count_failure("produce")
                await self._end(life)
            elif failures := self._trouble.over():
                log.info("records are written again", producer=self._name, **failures)
            return fates

    async def _leaders(self, life: _Life, records: Sequence[Record], fates: list[Fate]) -> dict[Partition, int]:
        """The leader of each partition; records go each for itself, and what has no leader is left out."""
        leaders: dict[Partition, int] = {}
        for partition in dict.fromkeys((record.topic, record.partition) for record in records):
            node = life.leader(partition)
            if node is None:
                try:
                    node = await life.find_leader(partition)
                except TimeoutError:
                    continue
                except Refused as refused:
                    for index, record in enumerate(records):
                        if (record.topic, record.partition) == partition:
                            fates[index] = refused.refusal
                    continue
            leaders[partition] = node
        return leaders

    async def _living(self) -> _Life:
        async with self._starting:
            if self._life is None:
                life = _Life(self._cluster, self._name)
                await life.start(self._cluster.timeout_s)
                self._life = life
            return self._life

    async def _end(self, life: _Life) -> None:
        if self._life is life:
            self._life = None
        await life.close()

    async def close(self) -> None:
        if self._life is not None:
            await self._end(self._life)
