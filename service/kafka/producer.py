"""The two kinds of producer. One life each: after any failure a producer is closed and never used again."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaProducer, errors
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.structs import TopicPartition

from service.errors import KafkaAway
from service.kafka import verdict
from service.kafka.cluster import Cluster
from service.kafka.verdict import REFUSALS, Refusal, TransactionFailed
from service.wire import Header

# A batch that every topic with the default max.message.bytes (1,048,588) takes.
BATCH_BYTES_MAX: Final = 1_000_000
CLOSE_PATIENCE_S: Final = 1.0

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


class TransactionalProducer:
    """One life of the producer of a transactional id, from its fence to its first failure (KIP-98)."""

    def __init__(self, cluster: Cluster, transactional_id: str, transaction_timeout_ms: int) -> None:
        self._producer = AIOKafkaProducer(
            transactional_id=transactional_id,
            transaction_timeout_ms=transaction_timeout_ms,
            enable_idempotence=True,
            acks="all",
            max_batch_size=BATCH_BYTES_MAX,
            max_request_size=2**31 - 1,  # sizes are checked at the edge, against each topic's own limit
            **cluster.options(transactional_id),
        )
        # The broker aborts a transaction at its timeout; waiting for longer could only meet that.
        self._patience_s = min(cluster.request_timeout_ms, transaction_timeout_ms) / 1000
        self._start_patience_s = (cluster.request_timeout_ms + transaction_timeout_ms) / 1000
        self._scope: asyncio.Timeout | None = None
        self._tainted = ""
        self._refusals: dict[str, Refusal] = {}

    async def start(self) -> None:
        """InitProducerId: when this returns, the fate of the older producers' transactions is final.

        Raises KafkaAway where Kafka does not answer, refuses, or keeps saying CONCURRENT_TRANSACTIONS.
        """
        try:
            async with asyncio.timeout(self._start_patience_s):
                await self._producer.start()
        except (errors.KafkaError, OSError, TimeoutError) as error:
            await self.close()
            raise KafkaAway(f"no producer id: {error!r}") from error
        except BaseException:
            await self.close()
            raise
        self._watch()

    @property
    def producer_id(self) -> int:
        return int(self._producer._txn_manager.producer_id)

    @property
    def epoch(self) -> int:
        return int(self._producer._txn_manager.producer_epoch)

    async def write(
        self, records: Sequence[Record], ledger: tuple[str, int], ledger_record: Callable[[Sequence[Place]], bytes]
    ) -> tuple[list[Place], int]:
        """One transaction: the records, then the ledger record made from their places; answers places and its offset.

        Awaits every send before the ledger record, and that before the commit: aiokafka would commit although a send
        failed. Raises TransactionFailed for anything else than a clean commit; then this producer is to be closed.
        """
        commit_asked = False
        try:
            async with asyncio.timeout(self._patience_s) as self._scope:
                await self._producer.begin_transaction()
                # With the first data partition, so that both go in one AddPartitionsToTxn.
                self._producer._txn_manager.maybe_add_partition_to_txn(TopicPartition(*ledger))
                places = await self._send(records)
                (ledger_place,) = await self._send([Record(*ledger, None, ledger_record(places), [], 0)])
                commit_asked = True
                await self._producer.commit_transaction()
            if self._tainted:
                # A request was repeated inside: its first copy may still arrive in the next transaction (KAFKA-17754).
                raise TransactionFailed(verdict.Verdict.UNKNOWN, self._tainted, self._refusals)
        except TransactionFailed:
            raise
        except Exception as error:  # aiokafka's failures have no common ancestor: asserts and KeyErrors are among them
            cause = ", ".join(f"{topic}: {refusal.why}" for topic, refusal in self._refusals.items()) or repr(error)
            raise TransactionFailed(verdict.of(error, commit_asked), cause, self._refusals) from error
        finally:
            self._scope = None
        return places, ledger_place.offset

    async def _send(self, records: Sequence[Record]) -> list[Place]:
        """Send records, batched by partition, and await them all; their places in the order of `records`."""
        places: list[Place] = [Place(-1, -1)] * len(records)
        sent: list[tuple[Any, list[int]]] = []
        for (topic, partition), indexes in _by_partition(records).items():
            for builder, members in _batches(records, indexes):
                sent.append((await self._producer.send_batch(builder, topic, partition=partition), members))
        for future, _ in sent:
            future.add_done_callback(_retrieve)
        for metadata, (_, members) in zip(await asyncio.gather(*(future for future, _ in sent)), sent, strict=True):
            if metadata.offset < 0:
                # DuplicateSequenceNumber, which aiokafka calls a success: there, but nobody knows where.
                raise errors.KafkaError(f"{metadata.topic}-{metadata.partition}: no offset in the answer")
            for place, index in enumerate(members):
                timestamp = metadata.timestamp if metadata.timestamp >= 0 else records[index].timestamp
                places[index] = Place(metadata.offset + place, timestamp)
        return places

    def _watch(self) -> None:
        """Look at each request and answer: aiokafka repeats within itself what must end this producer's life."""
        client = self._producer.client
        send = client.send

        async def watched(node_id: int, request: Any, **group: Any) -> Any:
            try:
                response = await send(node_id, request, **group)
            except BaseException as error:
                self._tainted = self._tainted or f"{type(request).__name__} had no answer: {error!r}"
                raise
            self._look(response)
            return response

        client.send = watched

    def _look(self, response: Any) -> None:
        if response.API_KEY == END_TXN and response.error_code:
            self._tainted = self._tainted or f"EndTxn answered {errors.for_code(response.error_code).__name__}"
        elif response.API_KEY in (PRODUCE, ADD_PARTITIONS):
            rows = response.topics if response.API_KEY == PRODUCE else response.errors
            for topic, partitions in rows:
                for _, code, *_ in partitions:
                    if code in REFUSALS:
                        self._refusals[topic] = REFUSALS[code]
            if self._refusals and self._scope is not None:
                # aiokafka would repeat some of these until the deadline, at the cost of everyone in the group.
                self._scope.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """End this life, at once: what is in flight is fenced by the next one. Never raises, never hangs."""
        await _bury(self._producer)


class IdempotentProducer:
    """A plain idempotent producer (acks=all, no transaction) that is made anew after a failure.

    A new life has a new producer id: what the old one had in flight may be there twice. It carries what tolerates
    that: barriers and the journal.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._producer: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()

    async def send(self, topic: str, partition: int | None, key: bytes | None, value: bytes) -> int:
        """Write one record and await it; its offset. Raises KafkaAway: it may be there all the same."""
        try:
            async with asyncio.timeout(self._cluster.timeout_s):
                producer = await self._started()
                sent = await producer.send(topic, value=value, key=key, partition=partition)
                sent.add_done_callback(_retrieve)
                metadata = await sent
        except (errors.KafkaError, OSError, TimeoutError, AssertionError) as error:
            await self.close()
            raise KafkaAway(f"{topic}: {error!r}") from error
        if metadata.offset < 0:
            await self.close()
            raise KafkaAway(f"{topic}: no offset in the answer")
        return int(metadata.offset)

    async def _started(self) -> AIOKafkaProducer:
        async with self._starting:
            if self._producer is None:
                producer = AIOKafkaProducer(
                    enable_idempotence=True,
                    acks="all",
                    max_batch_size=BATCH_BYTES_MAX,
                    max_request_size=BATCH_BYTES_MAX,
                    **self._cluster.options(self._name),
                )
                try:
                    await producer.start()
                except BaseException:
                    await _bury(producer)
                    raise
                self._producer = producer
            return self._producer

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await _bury(producer)


def _by_partition(records: Sequence[Record]) -> dict[tuple[str, int], list[int]]:
    """The indexes of the records of each partition, in order."""
    groups: dict[tuple[str, int], list[int]] = {}
    for index, record in enumerate(records):
        groups.setdefault((record.topic, record.partition), []).append(index)
    return groups


def _batches(records: Sequence[Record], indexes: Sequence[int]) -> list[tuple[BatchBuilder, list[int]]]:
    """The batches of one partition; a new one where the topic's limit, or ours, would be passed."""
    batches: list[tuple[BatchBuilder, list[int]]] = []
    for index in indexes:
        record = records[index]
        fields = {
            "timestamp": record.timestamp,
            "key": record.key,
            "value": record.value,
            "headers": record.headers,
        }
        if not batches or batches[-1][0].append(**fields) is None:
            builder = BatchBuilder(min(BATCH_BYTES_MAX, record.batch_bytes_max), 0, is_transactional=True)
            builder.append(**fields)
            batches.append((builder, []))
        batches[-1][1].append(index)
    return batches


def _retrieve(future: "asyncio.Future[Any]") -> None:
    """Look at a future's exception, so that one nobody waits for any more makes no noise."""
    if not future.cancelled():
        future.exception()


async def _bury(producer: AIOKafkaProducer) -> None:
    """Close a producer that may be in any state. `stop()` would flush, and may hang; nothing here is worth a flush."""
    producer._closed = True  # else its __del__ calls this a leak
    sender = producer._sender.sender_task
    with contextlib.suppress(Exception):
        async with asyncio.timeout(CLOSE_PATIENCE_S):
            await producer.client.close()  # fails what waits for an answer, so that the sender can end
    loop = asyncio.get_running_loop()
    until = loop.time() + CLOSE_PATIENCE_S
    while sender is not None and not sender.done() and loop.time() < until:
        sender.cancel()  # once for the sender itself, and once more for each task that it waits for
        await asyncio.wait([sender], timeout=0.05)
    with contextlib.suppress(Exception):
        async with asyncio.timeout(CLOSE_PATIENCE_S):
            await producer.client.close()
    manager = producer._txn_manager
    if manager is not None and manager._transaction_waiter is not None and manager._transaction_waiter.done():
        _retrieve(manager._transaction_waiter)
