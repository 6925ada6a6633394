"""The two kinds of producer. One life each: after any failure a producer is closed and never used again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple

import aiokafka.producer.sender
import structlog
from aiokafka import AIOKafkaProducer, errors
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.structs import TopicPartition

from service.errors import KafkaAway
from service.kafka import verdict
from service.kafka.cluster import Cluster
from service.kafka.verdict import REFUSALS, Refusal, TransactionFailed
from service.wire import Header

log = structlog.get_logger(__name__)


def _retrieve(future: "asyncio.Future[Any]") -> None:
    """Look at a future's exception, so that one nobody waits for any more makes no noise."""
    if not future.cancelled():
        future.exception()


def _task_of_sender(coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    task = asyncio.get_running_loop().create_task(coroutine)
    task.add_done_callback(_retrieve)
    return task


# A sender that ends waits for one of its requests and forgets the others: their errors would be called unhandled.
aiokafka.producer.sender.create_task = _task_of_sender

# A batch that every topic with the default max.message.bytes (1,048,588) takes.
BATCH_BYTES_MAX: Final = 1_000_000
CLOSE_PATIENCE_S: Final = 1.0
# After a refusal, for what else is under way: its answers are close behind.
REFUSED_PATIENCE_S: Final = 0.1
# Of the time of a request, one part for the sends: a partition that hangs leaves time to go round again without it.
PATIENCE_SHARE: Final = 3
# For the metadata of a topic that the catalogue knows.
METADATA_PATIENCE_S: Final = 1.0

PRODUCE, ADD_PARTITIONS, END_TXN = 0, 24, 26  # API keys


class Record(NamedTuple):
    """A record as it goes to Kafka. `timestamp` in ms; `batch_bytes_max` is what its topic takes in one batch."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    timestamp: int
    batch_bytes_max: int = BATCH_BYTES_MAX


class Place(NamedTuple):
    """Where a record is. `timestamp` is the broker's where the topic has LogAppendTime, else the record's own."""

    offset: int
    timestamp: int


# What became of a record: where it is, why the broker refused it for good, or None: nobody knows.
Fate = Place | Refusal | None
Sent = list[tuple["asyncio.Future[Any]", list[int]]]


class _Life:
    """One AIOKafkaProducer, watched: aiokafka repeats within itself what must end a producer's life."""

    def __init__(self, cluster: Cluster, name: str, **options: Any) -> None:
        self.producer = AIOKafkaProducer(
            enable_idempotence=True,
            acks="all",
            max_batch_size=BATCH_BYTES_MAX,
            max_request_size=2**31 - 1,  # sizes are checked at the edge, against each topic's own limit
            **options,
            **cluster.options(name),
        )
        self._cluster = cluster
        self.tainted = ""  # the first request that had no clean answer
        self.waiting_for = ""  # the topic that is being handed over
        self.refusals: dict[tuple[str, int], Refusal] = {}  # of the present transaction, by topic and partition
        self._transactional = "transactional_id" in options
        self._scopes: set[asyncio.Timeout] = set()

    async def start(self, patience_s: float) -> None:
        """Get the producer id. Raises KafkaAway, and is closed then."""
        try:
            async with asyncio.timeout(patience_s):
                await self.producer.start()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            await self.close()
            raise self._cluster.failed("producer-id", f"no producer id: {error!r}") from error
        except BaseException:
            await self.close()
            raise
        client = self.producer.client
        send = client.send

        async def watched(node_id: int, request: Any, **group: Any) -> Any:
            try:
                response = await send(node_id, request, **group)
            except BaseException as error:
                self.tainted = self.tainted or f"{type(request).__name__} had no answer: {error!r}"
                raise
            self._look(response)
            return response

        client.send = watched

    @property
    def producer_id(self) -> int:
        return int(self.producer._txn_manager.producer_id)

    @property
    def epoch(self) -> int:
        return int(self.producer._txn_manager.producer_epoch)

    @contextlib.asynccontextmanager
    async def within(self, patience_s: float) -> AsyncIterator[None]:
        """A deadline, which a refusal brings near: aiokafka would repeat some refused requests until it comes."""
        async with asyncio.timeout(patience_s) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)

    async def post(self, records: Sequence[Record], sent: Sent) -> None:
        """Hand records to the sender, batched by partition; `sent` gets a future for each batch, and its records.

        A transaction needs all of its records, so a partition that is not to be had ends it (TimeoutError); plain
        records go each for itself, and what cannot is left out.
        """
        for (topic, partition), indexes in _by_partition(records).items():
            self.waiting_for = topic  # for its metadata, or for its batch before to be on its way
            try:
                await self._know(topic, partition)
            except TimeoutError:
                if self._transactional:
                    raise
                continue
            for builder, members in _batches(records, indexes, self._transactional):
                future = await self.producer.send_batch(builder, topic, partition=partition)
                future.add_done_callback(_retrieve)
                sent.append((future, members))
        self.waiting_for = ""

    async def _know(self, topic: str, partition: int) -> None:
        """Have the partition in the metadata; TimeoutError soon where it is not to be had: it must not cost a group."""
        cluster = self.producer.client.cluster
        if partition in (cluster.partitions_for_topic(topic) or ()):
            return
        self.waiting_for = topic
        answered = False
        try:
            async with asyncio.timeout(METADATA_PATIENCE_S):
                self.producer.client.add_topic(topic)
                while partition not in (cluster.partitions_for_topic(topic) or ()):
                    answered = await self.producer.client.force_metadata_update()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            if answered:  # brokers are there, and know of no such partition
                self.refusals[topic, partition] = REFUSALS[errors.UnknownTopicOrPartitionError.errno]
            raise
        self.waiting_for = ""

    def _look(self, response: Any) -> None:
        if response.API_KEY == END_TXN and response.error_code:
            self.tainted = self.tainted or f"EndTxn answered {errors.for_code(response.error_code).__name__}"
        elif response.API_KEY in (PRODUCE, ADD_PARTITIONS):
            rows = response.topics if response.API_KEY == PRODUCE else response.errors
            for topic, partitions in rows:
                for partition, code, *_ in partitions:
                    if code in REFUSALS:
                        self.refusals[topic, partition] = REFUSALS[code]
            if self.refusals:
                near = asyncio.get_running_loop().time() + REFUSED_PATIENCE_S
                for scope in self._scopes:
                    # Nearer, never farther: aiokafka asks again every few ms, and each refusal comes here.
                    if (when := scope.when()) is None or near < when:
                        scope.reschedule(near)

    async def close(self) -> None:
        """End this life in whatever state it is. `stop()` would flush, and may hang; nothing here is worth a flush."""
        self.producer._closed = True  # else its __del__ calls this a leak
        sender = self.producer._sender.sender_task
        await self._hang_up()  # fails what waits for an answer, so that the sender can end
        loop = asyncio.get_running_loop()
        until = loop.time() + CLOSE_PATIENCE_S
        while sender is not None and not sender.done() and loop.time() < until:
            sender.cancel()  # once for the sender itself, and once more for each task that it waits for
            await asyncio.wait([sender], timeout=0.05)
        await self._hang_up()
        waiter = self.producer._txn_manager._transaction_waiter
        if waiter is not None and waiter.done():
            _retrieve(waiter)

    async def _hang_up(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_PATIENCE_S):
                await self.producer.client.close()


class TransactionalProducer:
    """One life of the producer of a transactional id, from its fence to its first failure (KIP-98)."""

    def __init__(self, cluster: Cluster, transactional_id: str, transaction_timeout_ms: int) -> None:
        self._life = _Life(
            cluster,
            transactional_id,
            transactional_id=transactional_id,
            transaction_timeout_ms=transaction_timeout_ms,
        )
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
        self, records: Sequence[Record], ledger: tuple[str, int], ledger_record: Callable[[Sequence[Place]], bytes]
    ) -> tuple[list[Place], int]:
        """One transaction: the records, then the ledger record made from their places; answers places and its offset.

        Awaits every send before the ledger record, and that before the commit: aiokafka would commit although a send
        failed. Raises TransactionFailed for anything else than a clean commit; then this producer is to be closed.
        """
        life, producer = self._life, self._life.producer
        life.refusals = {}
        sent: Sent = []
        commit_asked = False
        try:
            async with life.within(self._patience_s):
                await producer.begin_transaction()
                # With the first data partition, so that both go in one AddPartitionsToTxn.
                producer._txn_manager.maybe_add_partition_to_txn(TopicPartition(*ledger))
                async with asyncio.timeout(self._patience_s / PATIENCE_SHARE):
                    await life.post(records, sent)
                    places = await _await_all(sent, records)
                entry, entry_sent = [Record(*ledger, None, ledger_record(places), [], 0)], Sent()
                await life.post(entry, entry_sent)
                (ledger_place,) = await _await_all(entry_sent, entry)
                commit_asked = True
                await producer.commit_transaction()
        except Exception as error:  # aiokafka's failures have no common ancestor: asserts and KeyErrors are among them
            fate = verdict.of(error, commit_asked)
            refusals = {topic: refusal for (topic, _), refusal in life.refusals.items()}
            stuck = {records[members[0]].topic for future, members in sent if not future.done() or future.cancelled()}
            stuck |= {life.waiting_for} - {""}
            if refusals or not isinstance(error, TimeoutError):
                stuck = set()  # a refusal holds up what is with it, and ends the wait for it early
            cause = ", ".join(f"{topic}: {refusal.why}" for topic, refusal in refusals.items()) or repr(error)
            raise TransactionFailed(fate, cause, refusals, stuck) from error
        if life.tainted:
            # A request was repeated inside: its first copy may still arrive in the next transaction (KAFKA-17754).
            raise TransactionFailed(verdict.Verdict.UNKNOWN, life.tainted)
        return places, ledger_place.offset

    async def close(self) -> None:
        """End this life, at once: what is in flight is fenced by the next one. Never raises, never hangs."""
        await self._life.close()


class IdempotentProducer:
    """A plain idempotent producer (acks=all, no transaction) that is made anew after a failure.

    A new life has a new producer id, at epoch 0: what the old one had in flight may be there twice. It carries what
    tolerates that: barriers, the journal, and events whose guarantee is `idempotent`.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._life: _Life | None = None
        self._starting = asyncio.Lock()

    async def identity(self) -> tuple[int, int]:
        """Producer id and epoch of the present life, which is begun where there is none. Raises KafkaAway."""
        life = await self._living()
        return life.producer_id, life.epoch

    async def send(self, topic: str, partition: int, key: bytes | None, value: bytes) -> int:
        """Write one record and await it; its offset. Raises KafkaAway: it may be there all the same."""
        (fate,) = await self.write([Record(topic, partition, key, value, [], 0)])
        if not isinstance(fate, Place):
            raise KafkaAway(f"{topic}: {fate.why if fate else 'no clean answer'}")
        return fate.offset

    async def write(self, records: Sequence[Record]) -> list[Fate]:
        """Write records and await them; the fate of each, in their order. Raises KafkaAway: nothing was sent.

        Unless all went well this life ends: its sequence numbers have a gap that the broker would refuse for ever.
        """
        life = await self._living()
        sent: Sent = []
        try:
            async with life.within(self._cluster.timeout_s / PATIENCE_SHARE):
                await life.post(records, sent)
                await asyncio.gather(*(future for future, _ in sent), return_exceptions=True)
        except Exception as error:  # each batch's own fate is read from its future
            log.warning("not every record was written", why=repr(error))
        fates: list[Fate] = [life.refusals.get((record.topic, record.partition)) for record in records]
        for future, members in sent:
            if future.done() and not future.cancelled() and future.exception() is None:
                metadata = future.result()
                for index, place in zip(members, _places(metadata, records, members), strict=True):
                    # No offset is DuplicateSequenceNumber: there, but nobody knows where.
                    fates[index] = place if metadata.offset >= 0 else None
        if not all(isinstance(fate, Place) for fate in fates):
            self._cluster.count_failure("produce")
            await self._end(life)
        return fates

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


async def _await_all(sent: Sent, records: Sequence[Record]) -> list[Place]:
    """Await every send of a transaction; the places in the order of `records`."""
    places: list[Place] = [Place(-1, -1)] * len(records)
    for metadata, (_, members) in zip(await asyncio.gather(*(future for future, _ in sent)), sent, strict=True):
        if metadata.offset < 0:
            # DuplicateSequenceNumber, which aiokafka calls a success: there, but nobody knows where.
            raise errors.KafkaError(f"{metadata.topic}-{metadata.partition}: no offset in the answer")
        for index, place in zip(members, _places(metadata, records, members), strict=True):
            places[index] = place
    return places


def _places(metadata: Any, records: Sequence[Record], members: Sequence[int]) -> list[Place]:
    """The places of a batch's records; -1 for a timestamp means that the records' own were kept."""
    return [
        Place(metadata.offset + place, metadata.timestamp if metadata.timestamp >= 0 else records[index].timestamp)
        for place, index in enumerate(members)
    ]


def _by_partition(records: Sequence[Record]) -> dict[tuple[str, int], list[int]]:
    """The indexes of the records of each partition, in order."""
    groups: dict[tuple[str, int], list[int]] = {}
    for index, record in enumerate(records):
        groups.setdefault((record.topic, record.partition), []).append(index)
    return groups


def _batches(
    records: Sequence[Record], indexes: Sequence[int], transactional: bool
) -> list[tuple[BatchBuilder, list[int]]]:
    """The batches of one partition; a new one where the topic's limit, or ours, would be passed."""
    batches: list[tuple[BatchBuilder, list[int]]] = []
    for index in indexes:
        _, _, key, value, headers, timestamp, most = records[index]
        fields = {"timestamp": timestamp, "key": key, "value": value, "headers": headers}
        if not batches or batches[-1][0].append(**fields) is None:
            builder = BatchBuilder(min(BATCH_BYTES_MAX, most), 0, is_transactional=transactional)
            builder.append(**fields)
            batches.append((builder, []))
        batches[-1][1].append(index)
    return batches
