"""The two kinds of producer. A life ends with its first failure; the next one has an id or an epoch of its own."""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import structlog
from aiokafka import errors
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest, EndTxnRequest

from service.core.logs import Incident
from service.core.problems import KafkaAway
from service.kafka import outcomes
from service.kafka.admin import CODECS, KafkaAdmin
from service.kafka.deadline import unwaited
from service.kafka.open_check import OpenCheck
from service.kafka.outcomes import (
    REFUSALS,
    RecordError,
    RecordRefused,
    Refused,
    TransactionFailed,
    TransactionOutcome,
)
from service.kafka.session import (
    METADATA_PATIENCE_S,
    NOT_SENT,
    OK,
    Batch,
    NotSent,
    Partition,
    ProducerSession,
    Record,
    RecordMetadata,
    RecordResult,
    check,
)

log = structlog.get_logger(__name__)

# Of the time of a request, one part for the sends: a partition that hangs leaves time to go round again without it.
SENDS_SHARE: Final = 3
# Of the sends' time, one part for the replicas: the broker itself says which partition they held up, before we give up.
REPLICAS_SHARE: Final = 0.8
# Kafka writes a transaction's markers behind its commit, which takes a millisecond or so; the next one waits for them.
MARKERS_PAUSE_S: Final = 0.001
MARKERS_PAUSE_MOST_S: Final = 0.02

# Of ledger and journal: 0.6 µs an entry on the event loop, for a quarter of the bytes (tests/bench compression).
OWN_CODEC: Final = CODECS["zstd"]
# Of one entry it saves a quarter of the bytes. With one client at a time, where each has a record of its own, to begin
# with it took 6 % of the CPU of service and broker, and 8 % of the time to the answer.
COMPRESSED_LEAST_BYTES: Final = 1_024
CONCURRENT_TRANSACTIONS: Final = errors.ConcurrentTransactions.errno
NOT_ATTEMPTED: Final = errors.OperationNotAttempted.errno


def own_record(topic: str, partition: int, key: bytes | None, value: bytes) -> Record:
    """A record of Fencepost's own, compressed where that pays.

    Its time is now: a topic's bounds on timestamps hold for it too (KIP-937), and 0 is beyond any.
    """
    codec = OWN_CODEC if len(value) >= COMPRESSED_LEAST_BYTES else CODECS["none"]
    return Record(topic, partition, key, value, [], time.time_ns() // 1_000_000, codec=codec)


class State(Enum):
    """Where a transactional producer is with its transaction."""

    READY = "ready"  # no records were sent
    SENDING = "sending"
    SENT = "sent"  # its records are in Kafka, its ledger record is not
    COMMITTING = "committing"
    DEAD = "dead"  # a transaction did not end cleanly, or the producer was closed


MOVES: Final = frozenset(
    {
        (State.READY, State.SENDING),
        (State.SENDING, State.SENT),
        (State.SENT, State.COMMITTING),
        (State.COMMITTING, State.READY),
    }
)


class TransactionalProducer:
    """One life of the producer of a transactional id, from its fence to its first failure (KIP-98).

    A transaction is four requests, each sent once: AddPartitionsToTxn for the data and the ledger (`open`, or at the
    latest `send`), Produce of the data (`send`), Produce of the ledger record with their offsets, EndTxn (`commit`).
    """

    def __init__(self, cluster: KafkaAdmin, transactional_id: str, transaction_timeout_ms: int) -> None:
        self._life = ProducerSession(cluster, transactional_id, transactional_id, transaction_timeout_ms)
        # The broker aborts a transaction at its timeout; waiting for longer could only meet that.
        self._timeout_s = min(cluster.request_timeout_ms, transaction_timeout_ms) / 1000
        self._sends_timeout_s = self._timeout_s / SENDS_SHARE
        self._start_patience_s = (cluster.request_timeout_ms + transaction_timeout_ms) / 1000
        self._opening: tuple[dict[Partition, int], asyncio.Future[Any]] | None = None
        self._open_check = OpenCheck(self._life)
        self._state = State.READY
        self._sent: tuple[_Group, dict[Partition, int], Partition] | None = None  # with the leaders, and the ledger
        self._ends_at = 0.0  # the transaction's deadline, by the loop's time

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

    @property
    def client(self) -> AIOKafkaClient:
        """The connections of this life."""
        return self._life.client

    @property
    def unended(self) -> set[Partition]:
        """The partitions of the older producers' transaction that had no marker before the fence."""
        return self._life.unended

    @property
    def lost(self) -> bool:
        """Whether a broker has ended a connection: as long as it was away, it may have missed markers."""
        return self._life.client.lost

    async def find_open(self, partitions: Collection[Partition]) -> tuple[dict[Partition, int], set[Partition]]:
        """Where a transaction of this producer id is open, and from which offset on; and partitions without answer.

        Before the first transaction of this life, what is open hangs: it was ended by the fence, at the latest.
        """
        return await self._open_check.ask(partitions, METADATA_PATIENCE_S)

    async def end_open(self, partitions: Sequence[Partition], *, commit: bool) -> None:
        """Write the missing markers into partitions, by a transaction that holds them and no data.

        Raises KafkaAway where that did not come about in time.
        """
        try:
            async with asyncio.timeout(self._start_patience_s):
                await self._begin(_Group([]), partitions)
                await self._end(commit)
                while (await self.find_open(partitions)) != ({}, set()):  # noqa: ASYNC110 - Kafka tells nobody
                    await asyncio.sleep(MARKERS_PAUSE_MOST_S)
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self._life.failed("settle", f"{partitions}: no markers: {error!r}") from error

    def open(self, partitions: Sequence[Partition]) -> None:
        """Begin a transaction of these partitions while the caller waits for something else; then `send` or `abandon`.

        What `send` does not find in it, it adds itself; it also looks for the leaders that are not known, and asks
        those of partitions that may hold an open transaction.
        """
        leaders = {partition: self._life.leader(partition) for partition in partitions}
        known = {
            partition: node
            for partition, node in leaders.items()
            if node is not None and self._open_check.is_clear(partition, node)
        }
        if len(known) == len(leaders):
            answer = self._life.try_send(self._life.coordinator, self._add_partitions(known))
            self._opening = None if answer is None else (known, answer)

    async def abandon(self) -> None:
        """End what `open` began, if it did: there is nothing to write. Raises TransactionFailed."""
        if self._opening is None:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                async with asyncio.timeout(self._sends_timeout_s):
                    opened = await self._opened()
                if opened:
                    await self._end(commit=False)
        except Exception as error:
            self._state = State.DEAD
            raise TransactionFailed(outcomes.of(error, may_commit=False), repr(error)) from error

    async def _opened(self) -> dict[Partition, int]:
        """What `open` has added to the transaction, with the leaders; nothing where Kafka would not (`send` meets it).

        It refuses a partition, which the write may not need; or the markers of the transaction before are still being
        written.
        """
        if self._opening is None:
            return {}
        (leaders, answer), self._opening = self._opening, None
        codes = _codes(self._life.note_throttle(await answer))
        if CONCURRENT_TRANSACTIONS in codes.values():
            return {}
        group = _Group([])
        try:
            group.check_added(codes)
        except errors.KafkaError:
            if not group.refusals:
                raise
            return {}
        return leaders

    async def send(self, records: Sequence[Record], ledger: Partition) -> list[RecordMetadata]:
        """Send the records of a transaction, which holds the ledger's partition too, and await every answer; places.

        `commit` comes next. Raises TransactionFailed for anything else than clean answers.
        """
        self._move(State.SENDING)
        group = _Group(records)
        self._ends_at = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout(self._sends_timeout_s):
                leaders = await self._join(group, ledger)
                places = await self._send(group, leaders)
        except Exception as error:  # a bug must end the life too
            raise self._failed(error, group, None) from error
        self._sent = group, leaders, ledger
        self._move(State.SENT)
        return places

    async def commit(self, ledger_record: bytes) -> int:
        """Send the ledger record of a transaction whose records are sent, await its answer, and commit; its offset.

        Raises TransactionFailed for anything else than a clean commit; then this producer is to be closed.
        """
        self._move(State.COMMITTING)
        assert self._sent is not None
        (group, leaders, ledger), self._sent = self._sent, None
        last: _Group | None = None
        try:
            async with asyncio.timeout_at(self._ends_at):
                last = _Group([own_record(*ledger, None, ledger_record)])
                (place,) = await self._send(last, leaders)
                await self._end(commit=True)
        except Exception as error:  # a bug must end the life too
            raise self._failed(error, group, last) from error
        self._move(State.READY)
        return place.offset

    def _failed(self, error: Exception, group: "_Group", last: "_Group | None") -> TransactionFailed:
        """What ended the transaction of a group; `last` is its ledger record, if that may have been sent."""
        self._state = State.DEAD
        refusals = group.refusals | (last.refusals if last is not None else {})
        cause = ", ".join(f"{topic}: {refusal.why}" for topic, refusal in refusals.items())
        cause = cause or ", ".join(filter(None, (repr(error), self._life.quota)))
        # A refusal holds up what is with it, and is what ended it.
        stuck = set() if refusals else group.stuck(timed_out=isinstance(error, TimeoutError))
        # With a ledger record in Kafka, a transaction without markers is committed (service/kafka/hanging.py).
        may_commit = last is not None and not last.is_refused
        return TransactionFailed(outcomes.of(error, may_commit), cause, refusals, stuck, group.hanging)

    def _move(self, state: "State") -> None:
        """Change the state. Raises TransactionFailed where the life is over, RuntimeError for a bug."""
        if self._state is State.DEAD:
            raise TransactionFailed(TransactionOutcome.ABORTED, "the producer's life is over")
        if (self._state, state) not in MOVES:
            raise RuntimeError(f"a producer that is {self._state.value} cannot be {state.value}")
        self._state = state

    async def _join(self, group: "_Group", ledger: Partition) -> dict[Partition, int]:
        """The leaders of the transaction's partitions, after each that the group needs has been added to it."""
        leaders = await self._opened()
        wanted = dict.fromkeys([(record.topic, record.partition) for record in group.records] + [ledger])
        if missing := [partition for partition in wanted if partition not in leaders]:
            added = await self._leaders(group, missing)
            await self._check_open(group, added)
            await self._begin(group, added)
            leaders |= added
        return leaders

    async def _leaders(self, group: "_Group", partitions: Collection[Partition]) -> dict[Partition, int]:
        """The leader of each of these partitions."""
        self._life.look_up(partitions)
        leaders: dict[Partition, int] = {}
        for partition in partitions:
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

    async def _check_open(self, group: "_Group", leaders: Mapping[Partition, int]) -> None:
        """Raise where a partition holds an open transaction, which this one would end: its recovery comes first."""
        unclear = [partition for partition, node in leaders.items() if not self._open_check.is_clear(partition, node)]
        if not unclear:
            return
        group.waiting_for = unclear[0][0]
        group.hanging, unanswered = await self.find_open(unclear)
        if group.hanging:
            group.waiting_for = ""
            raise errors.KafkaError(f"a transaction of this producer id hangs in {sorted(group.hanging)}")
        if unanswered:
            group.waiting_for = min(unanswered)[0]
            raise TimeoutError(f"no leader tells whether a transaction is open in {sorted(unanswered)}")
        group.waiting_for = ""

    def _add_partitions(self, partitions: Iterable[Partition]) -> AddPartitionsToTxnRequest:
        by_topic: dict[str, list[int]] = {}
        for topic, partition in partitions:
            by_topic.setdefault(topic, []).append(partition)
        life = self._life
        return AddPartitionsToTxnRequest(life.transactional_id, life.producer_id, life.epoch, list(by_topic.items()))

    async def _begin(self, group: "_Group", partitions: Iterable[Partition]) -> None:
        """Add partitions to the transaction, which begins with the first ones.

        CONCURRENT_TRANSACTIONS says that the markers of the one before are still being written: nothing was done.
        """
        life, pause_s = self._life, MARKERS_PAUSE_S
        request = self._add_partitions(partitions)
        while True:
            codes = _codes(await life.request(life.coordinator, request))
            if CONCURRENT_TRANSACTIONS not in codes.values():
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MARKERS_PAUSE_MOST_S)
        group.check_added(codes)

    async def _send(self, group: "_Group", leaders: Mapping[Partition, int]) -> list[RecordMetadata]:
        """Send a group and await every one of its batches; its places in the order of its records."""
        life = self._life
        group.batches = life.batches(group.records, leaders)
        await life.send(group.batches, leaders, int(1000 * REPLICAS_SHARE * self._sends_timeout_s))
        places = [RecordMetadata(-1, -1)] * len(group.records)
        failed = None
        for batch in group.batches:
            fate = batch.fate(group.records)
            if isinstance(fate, list):
                for member, place in zip(batch.members, fate, strict=True):
                    places[member] = place
                continue
            failed = failed or batch
            if isinstance(fate, RecordError):
                group.refusals[batch.partition[0]] = fate
        if failed is not None:
            check(failed.answer[0] if failed.answer else -1, f"Produce to {failed.partition}")
            # DuplicateSequenceNumber and the like: there, but nobody knows where.
            raise errors.KafkaError(f"{failed.partition}: no offset in the answer")
        return places

    async def _end(self, commit: bool) -> None:
        """EndTxn: when it answers, the transaction's fate is decided, and its markers will be written."""
        life = self._life
        request = EndTxnRequest(life.transactional_id, life.producer_id, life.epoch, commit)
        check((await life.request(life.coordinator, request)).error_code, "EndTxn")

    async def close(self) -> None:
        """End this life, at once: what is in flight is fenced by the next one. Never raises, never hangs."""
        self._state = State.DEAD
        if self._opening is not None:
            _, answer = self._opening
            if not answer.cancel():
                unwaited(answer)
        await self._life.close()


class _Group:
    """Records on their way in one transaction, and what is known of those that hold it up."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.batches: list[Batch] = []
        self.waiting_for = ""  # the topic whose leader is looked for, or asked
        self.refusals: dict[str, RecordError] = {}  # by topic
        self.hanging: Collection[Partition] = ()  # where a transaction is open that none of this life's has begun

    @property
    def is_refused(self) -> bool:
        """Whether the brokers have said of its records that they are not there."""
        return bool(self.batches) and all(
            isinstance(batch.fate(self.records), RecordError | NotSent) for batch in self.batches
        )

    def check_added(self, codes: Mapping[Partition, int]) -> None:
        """Raise the error of an answer to AddPartitionsToTxn, if it is one, and note which topics it refuses."""
        for (topic, _), code in codes.items():
            if code in REFUSALS:
                self.refusals[topic] = REFUSALS[code]
        for code in codes.values():
            if code != NOT_ATTEMPTED:  # said of the others where one is refused
                check(code, "AddPartitionsToTxn")

    def stuck(self, timed_out: bool) -> set[str]:
        """Topics that the transaction ended for, or that had no answer when its time was up."""
        failed = {
            batch.partition[0]
            for batch in self.batches
            if (timed_out if batch.answer is None else batch.answer[0] not in (OK, *FENCED_CODES))
        }
        return failed | ({self.waiting_for} - {""})


def _codes(answer: Any) -> dict[Partition, int]:
    """What an answer to AddPartitionsToTxn says of each partition."""
    return {(topic, row[0]): row[1] for topic, rows in answer.errors for row in rows}


FENCED_CODES: Final = (errors.InvalidProducerEpoch.errno, outcomes.PRODUCER_FENCED)


class IdempotentProducer:
    """A plain idempotent producer (acks=all, no transaction) that is made anew after a failure.

    A new life has a new producer id, at epoch 0: what the old one had in flight may be there twice. It carries what
    tolerates that: barriers, the journal, and events whose guarantee is `idempotent`.
    """

    def __init__(self, cluster: KafkaAdmin, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._timeout_s = cluster.timeout_s / SENDS_SHARE
        self._life: ProducerSession | None = None
        self._trouble = Incident(log, "not every record was written")
        self._starting = asyncio.Lock()
        self._sending = asyncio.Lock()  # sequence numbers go out in their order

    async def identity(self) -> tuple[int, int]:
        """Producer id and epoch of the present life, which is begun where there is none. Raises KafkaAway."""
        life = await self._living()
        return life.producer_id, life.epoch

    async def send(self, topic: str, partition: int, key: bytes | None, value: bytes) -> int:
        """Write one record and await it; its offset. Raises KafkaAway: it may be there all the same."""
        (place,) = await self.send_all(topic, [(partition, key, value)])
        return place.offset

    async def send_all(self, topic: str, contents: Sequence[tuple[int, bytes | None, bytes]]) -> list[RecordMetadata]:
        """Write records of (partition, key, value) and await them; their places. Raises KafkaAway as `send` does.

        RecordRefused where the broker refuses one for good.
        """
        records = [own_record(topic, *content) for content in contents]
        places: list[RecordMetadata] = []
        for fate in await self.write(records):
            if not isinstance(fate, RecordMetadata):
                failed = KafkaAway(f"{topic}: {fate.why if fate else 'no clean answer'}")
                if isinstance(fate, RecordError):  # for good: nobody else tells of it
                    failed = RecordRefused(str(failed), fate)
                    self._trouble.goes_on(failed, producer=self._name)
                raise failed
            places.append(fate)
        return places

    async def write(self, records: Sequence[Record]) -> list[RecordResult]:
        """Write records and await them; the fate of each, in their order. Raises KafkaAway: nothing was sent.

        Unless all went well this life ends: its sequence numbers have a gap that the broker would refuse for ever.
        """
        async with self._sending:
            life = await self._living()
            fates: list[RecordResult] = [NOT_SENT] * len(records)  # until it is in a batch
            batches: list[Batch] = []
            try:
                async with asyncio.timeout(self._timeout_s):
                    leaders = await self._leaders(life, records, fates)
                    batches = life.batches(records, leaders)
                    await life.send(batches, leaders, int(1000 * REPLICAS_SHARE * self._timeout_s))
            except Exception as error:  # each batch's own fate is in its answer
                told: dict[str, Any] = {"quota": life.quota} if life.quota else {}
                self._trouble.goes_on(error, bug=outcomes.is_bug(error), producer=self._name, **told)
            for batch in batches:
                fate = batch.fate(records)
                for n, member in enumerate(batch.members):
                    fates[member] = fate[n] if isinstance(fate, list) else fate
            if not all(isinstance(fate, RecordMetadata) for fate in fates):
                self._cluster.count_failure("produce")
                await self._end(life)
            elif failures := self._trouble.over():
                log.info("records are written again", producer=self._name, **failures)
            return fates

    async def _leaders(
        self, life: ProducerSession, records: Sequence[Record], fates: list[RecordResult]
    ) -> dict[Partition, int]:
        """The leader of each partition; records go each for itself, and what has no leader is left out."""
        leaders: dict[Partition, int] = {}
        partitions = dict.fromkeys((record.topic, record.partition) for record in records)
        life.look_up(partitions)
        for partition in partitions:
            node = life.leader(partition)
            if node is None:
                fate: RecordResult = NotSent(itself=True)
                try:
                    node = await life.find_leader(partition)
                except TimeoutError:
                    pass
                except Refused as refused:
                    fate = refused.refusal
                if node is None:
                    for index, record in enumerate(records):
                        if (record.topic, record.partition) == partition:
                            fates[index] = fate
                    continue
            leaders[partition] = node
        return leaders

    async def _living(self) -> ProducerSession:
        async with self._starting:
            if self._life is None:
                life = ProducerSession(self._cluster, self._name)
                await life.start(self._cluster.timeout_s)
                self._life = life
            return self._life

    async def _end(self, life: ProducerSession) -> None:
        if self._life is life:
            self._life = None
        await life.close()

    async def close(self) -> None:
        if self._life is not None:
            await self._end(self._life)
