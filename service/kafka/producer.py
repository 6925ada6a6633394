"""The transactional producer. It ends with its first failure that is not cleanly aborted, and is then replaced."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import structlog
from aiokafka import errors

from service.core.identity_enum import IdentityEnum
from service.core.shared_task import unwaited
from service.core.shared_timeout import SharedTimeout
from service.core.supervision import failure_of
from service.core.time_slice import yield_after
from service.kafka import outcomes
from service.kafka.admin import KafkaAdmin
from service.kafka.group_offsets import GroupOffsets
from service.kafka.hanging import RecordCoordinates
from service.kafka.hanging_transactions import HangingTransactions
from service.kafka.metadata import Partition
from service.kafka.offset_commit import OffsetCommit
from service.kafka.open_check import OpenCheck
from service.kafka.outcomes import (
    CONCURRENT_TRANSACTIONS,
    OffsetsRefused,
    PartitionUnknown,
    RecordError,
    TransactionAbortable,
    TransactionAborted,
    TransactionFailed,
    TransactionOutcome,
    raise_if_error,
)
from service.kafka.records import Record, RecordMetadata, Write, own_record
from service.kafka.session import ACKS_TIMEOUT_SHARE, SENDS_SHARE, ProducerSession, codes_of_added

log = structlog.get_logger(__name__)


class ProducerState(IdentityEnum):
    """States of a transactional producer."""

    READY = "ready"  # no records were sent
    OFFSETS = "offsets"  # the offsets of a group are in the transaction, or on their way; no records were sent
    SENDING = "sending"
    SENT = "sent"  # the records are in Kafka, the ledger record is not
    COMMITTING = "committing"
    DEAD = "dead"  # a transaction did not end cleanly, or the producer was closed


MOVES: Final = frozenset(
    {
        (ProducerState.READY, ProducerState.SENDING),
        (ProducerState.READY, ProducerState.OFFSETS),
        (ProducerState.OFFSETS, ProducerState.READY),
        (ProducerState.OFFSETS, ProducerState.SENDING),
        (ProducerState.SENDING, ProducerState.SENT),
        (ProducerState.SENT, ProducerState.COMMITTING),
        (ProducerState.COMMITTING, ProducerState.READY),
    }
)


class TransactionalProducer:
    """The producer of a transactional id, from its InitProducerId to its first failure (KIP-98).

    A transaction is four requests, each sent once: AddPartitionsToTxn for the data and the ledger (`begin_early`, or
    else `send`), Produce of the data (`send`), Produce of the ledger record with their offsets, EndTxn (`commit`). The
    offsets of a consumer group take two more, before the data (`commit_offsets`).

    Where the brokers have finalized transactions of version 2 (KIP-890), the response to an EndTxn has the producer id
    and epoch of the next transaction: `producer_id` and `epoch` are those under which the next records are written. A
    Produce then adds its partitions where `begin_early` has not (`_add_missing`). The version of a request is the one
    that its broker reported on the connection in use, so that one transaction may have requests of both.
    """

    def __init__(self, admin: KafkaAdmin, transactional_id: str, transaction_timeout_ms: int) -> None:
        self._session = ProducerSession(admin, transactional_id, transactional_id, transaction_timeout_ms)
        # The broker aborts a transaction at the transaction timeout, so waiting longer is useless.
        self._timeout_s = min(admin.request_timeout_ms, transaction_timeout_ms) / 1000
        self._sends_timeout_s = self._timeout_s / SENDS_SHARE
        self._sends_timeout = SharedTimeout(self._sends_timeout_s)
        self._commit_timeout = SharedTimeout(self._timeout_s)
        self._start_timeout_s = (admin.request_timeout_ms + transaction_timeout_ms) / 1000
        self._early_begin: tuple[dict[Partition, int], asyncio.Future[Any]] | None = None
        self._open_check = OpenCheck(self._session)
        self._offset_commit = OffsetCommit(self._session, self._open_check)
        self.hanging = HangingTransactions(
            self._session, self._open_check, self._offset_commit, self._timeout_s, self._start_timeout_s
        )
        self._state = ProducerState.READY
        self._sent: tuple[Write, dict[Partition, int], Partition] | None = None  # with the leaders, and the ledger
        self._ends_at = 0.0  # the transaction's deadline, by the loop's time

    async def start(self) -> None:
        """Fence older producers by InitProducerId. When this returns, their transactions have ended.

        Raises KafkaAway where Kafka does not answer, refuses, or answers CONCURRENT_TRANSACTIONS until the timeout.
        """
        await self._session.start(self._start_timeout_s)

    @property
    def producer_id(self) -> int:
        return self._session.producer_id

    @property
    def epoch(self) -> int:
        return self._session.epoch

    @property
    def identity(self) -> tuple[int, int]:
        """The producer id and epoch under which the next records are written."""
        return self._session.producer_id, self._session.epoch

    @property
    def throttled_s(self) -> float:
        """The longest throttle time in a response of the last transaction, in seconds; 0 without a quota (KIP-219)."""
        return self._session.throttle.longest_s

    @property
    def has_lost_connection(self) -> bool:
        """Whether a broker has ended a connection; markers may be missing from a broker that was away."""
        return self._session.client.has_lost_connection

    def begin_early(self, partitions: Sequence[Partition]) -> None:
        """Begin a transaction of these partitions without waiting; call `send` or `abandon` next.

        Does nothing where a leader is unknown, a partition may hold an open transaction, or the session of a connection
        must be renewed. `send` then does what is missing.
        """
        if self._session.client.has_due_session:
            return
        leaders: dict[Partition, int] = {}
        for partition in partitions:
            node = self._session.leader(partition)
            if node is None or not self._open_check.is_clear(partition, node):
                return
            leaders[partition] = node
        response = self._session.try_send(self._session.coordinator, self._session.request_to_add(leaders))
        self._early_begin = None if response is None else (leaders, response)

    async def abandon(self) -> None:
        """Abort the transaction that `begin_early` began, if any. Raises TransactionFailed."""
        if self._early_begin is None:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                async with asyncio.timeout(self._sends_timeout_s):
                    added = await self._await_early_begin()
                if added:
                    await self._session.end_transaction(commit=False)
        except (Exception, asyncio.CancelledError) as error:
            failure = failure_of(error)
            self._state = ProducerState.DEAD
            raise TransactionFailed(outcomes.outcome_of(failure, may_commit=False), repr(failure)) from failure

    async def _await_early_begin(self) -> dict[Partition, int]:
        """Await the response to `begin_early`: the leaders of the added partitions; none where Kafka refused them.

        Kafka may refuse a partition that the write does not need, or still be writing the previous transaction's
        markers; `send` adds the partitions again and reports the error.
        """
        if self._early_begin is None:
            return {}
        (leaders, response), self._early_begin = self._early_begin, None
        codes = codes_of_added(self._session.note_throttle(await response))
        if not any(codes.values()):  # the usual case: no error
            return leaders
        if CONCURRENT_TRANSACTIONS in codes.values():
            return {}
        write = Write([])
        try:
            write.check_added(codes)
        except errors.KafkaError:
            if not write.record_errors:
                raise
            return {}
        return leaders

    async def commit_offsets(self, offsets: GroupOffsets, *, ask_leader: bool = False) -> RecordCoordinates | None:
        """Commit the offsets of a consumer group in the transaction of the next `send` (KIP-447).

        Call `send` next. `ask_leader`: have the leader of the group's partition answer before the partition is added.
        Returns the transaction's first record in this partition; None where the service may not see or inspect the
        partition.
        Raises OffsetsRefused after a clean abort: the transaction has written nothing into any other partition, and the
        producer is ready. Raises TransactionAborted, and TransactionFailed for any other response, also where the
        partition was added and its leader does not keep the offsets: the next transaction would wait for its marker
        there.
        """
        self._move(ProducerState.OFFSETS)
        write = Write([])
        try:
            async with asyncio.timeout(self._sends_timeout_s):
                try:
                    await self._begin_for_offsets()
                    check_timeout_s = self._sends_timeout_s / 2  # there is time left for a clean abort
                    return await self._offset_commit.run(write, offsets, ask_leader, check_timeout_s)
                except OffsetsRefused as error:
                    write.waiting_for = ""
                    await self._abandon_offsets(offsets.group)
                    refused = error
        except (Exception, asyncio.CancelledError) as error:  # a bug must end the session too
            failure = failure_of(error)
            await self._abort_if_abortable(failure)
            self._state = ProducerState.DEAD
            raise TransactionFailed(
                outcomes.outcome_of(failure, may_commit=False),
                f"offsets: {failure!r}",
                hanging=write.hanging,
                offsets_error=self._offset_commit.error_of(failure, write),
            ) from failure
        self._move(ProducerState.READY)
        raise refused

    async def _begin_for_offsets(self) -> None:
        """Await the early begin, whose response `send` then finds at once; without one, renew sessions that are due."""
        early = self._early_begin
        if early is None:
            await self._session.client.renew_sessions()
        elif await self._await_early_begin():
            self._early_begin = early

    async def _abandon_offsets(self, group: str) -> None:
        """Abort a transaction whose offsets were refused. Raises KafkaError."""
        if self._offset_commit.is_added or self._early_begin is not None:
            await self._session.abort_transaction()
        self._early_begin = None
        await self._offset_commit.forget(group)

    async def send(self, records: Sequence[Record], ledger: Partition) -> list[RecordMetadata]:
        """Send the records of a transaction that includes the ledger's partition, and await their metadata.

        Call `commit` next. Raises TransactionAborted, and TransactionFailed for any other response that is not clean.
        """
        self._move(ProducerState.SENDING)
        write = Write(records)
        self._session.throttle.longest_s = 0.0
        self._ends_at = asyncio.get_running_loop().time() + self._timeout_s
        try:
            with self._sends_timeout.wait():
                if self._early_begin is None and not self._offset_commit.is_added:
                    await self._session.client.renew_sessions()
                leaders = await self._add_missing(write, ledger)
                metadata = await self._send(write, leaders)
        except (Exception, asyncio.CancelledError) as error:  # a bug must end the session too
            failure = failure_of(error)
            await self._abort_if_abortable(failure, write)
            raise self._failed(failure, write, None) from failure
        self._sent = write, leaders, ledger
        self._move(ProducerState.SENT)
        return metadata

    async def commit(self, ledger_record: bytes) -> int:
        """Send the ledger record of a transaction whose records are sent, and commit. Returns its offset.

        Raises TransactionAborted where a broker called the transaction abortable before its EndTxn, and
        TransactionFailed for anything else but a clean commit; the caller then closes this producer.
        """
        self._move(ProducerState.COMMITTING)
        self._offset_commit.is_added = False
        assert self._sent is not None
        (write, leaders, ledger), self._sent = self._sent, None
        of_ledger: Write | None = None
        ends = False
        try:
            with self._commit_timeout.wait_until(self._ends_at):
                of_ledger = Write([own_record(*ledger, None, ledger_record)])
                (metadata,) = await self._send(of_ledger, leaders)
                ends = True
                await self._session.end_transaction(commit=True)
        except (Exception, asyncio.CancelledError) as error:  # a bug must end the session too
            failure = failure_of(error)
            if of_ledger is not None and not ends:
                await self._abort_if_abortable(failure, write, of_ledger)
            raise self._failed(failure, write, of_ledger) from failure
        self._move(ProducerState.READY)
        return metadata.offset

    def _failed(self, error: Exception, write: Write, of_ledger: Write | None) -> TransactionFailed:
        """Make the error for a failed transaction; `of_ledger`: of the ledger record, if it may have been sent."""
        self._state = ProducerState.DEAD
        record_errors = write.record_errors | (of_ledger.record_errors if of_ledger is not None else {})
        cause = ", ".join(f"{topic}: {each.why}" for topic, each in record_errors.items())
        cause = cause or ", ".join(filter(None, (repr(error), self._session.throttle.quota)))
        # A refused record ends the transaction, so topics without an answer are not to blame.
        stuck = set() if record_errors else write.stuck(timed_out=isinstance(error, TimeoutError))
        # Recovery commits a hanging transaction whose ledger record is in Kafka (service/kafka/hanging.py).
        may_commit = of_ledger is not None and not of_ledger.was_rejected
        return TransactionFailed(outcomes.outcome_of(error, may_commit), cause, record_errors, stuck, write.hanging)

    def _move(self, state: ProducerState) -> None:
        """Change the state. Raises TransactionFailed where the producer is dead, RuntimeError for an illegal move."""
        if self._state is ProducerState.DEAD:
            raise TransactionFailed(TransactionOutcome.ABORTED, "the producer is closed")
        if (self._state, state) not in MOVES:
            raise RuntimeError(f"a producer that is {self._state.value} cannot be {state.value}")
        self._state = state

    async def _add_missing(self, write: Write, ledger: Partition) -> dict[Partition, int]:
        """Add the partitions that a write needs to the transaction; returns the leaders of all its partitions.

        After an early begin, AddPartitionsToTxn adds what is missing: all partitions, if the previous transaction's
        markers were being written. This session repeats the request after MARKERS_PAUSE_S, while a broker that is to
        add the partition of a Produce tries again only after 20 ms (add.partitions.to.txn.retry.backoff.ms). Without an
        early begin, or if `commit_offsets` has found it refused, each Produce adds its partition in version 2.
        """
        began_early = self._early_begin is not None
        leaders = await self._await_early_begin()
        wanted = dict.fromkeys([(record.topic, record.partition) for record in write.records] + [ledger])
        if missing := [partition for partition in wanted if partition not in leaders]:
            added = await self._leaders(write, missing)
            await self._open_check.check(write, added)
            joining = set() if began_early else self._session.joining_of(added)
            if to_add := [partition for partition in added if partition not in joining]:
                write.check_added(await self._session.add_partitions(to_add))
            self._session.joining = joining
            leaders |= added
        return leaders

    async def _leaders(self, write: Write, partitions: Collection[Partition]) -> dict[Partition, int]:
        """Find the leader of each of these partitions. Raises PartitionUnknown, TimeoutError."""
        self._session.request_metadata(partitions)
        leaders: dict[Partition, int] = {}
        for partition in partitions:
            node = self._session.leader(partition)
            if node is None:
                write.waiting_for = partition[0]
                try:
                    node = await self._session.find_leader(partition)
                except PartitionUnknown as unknown:
                    write.record_errors[partition[0]] = unknown.error
                    raise
                write.waiting_for = ""
            leaders[partition] = node
        return leaders

    async def _send(self, write: Write, leaders: Mapping[Partition, int]) -> list[RecordMetadata]:
        """Send a write and await all of its batches; returns the records' metadata, in their order."""
        session = self._session
        write.batches = session.batches(write.records, leaders)
        await yield_after(len(write.records))
        await session.send(write.batches, leaders, int(1000 * ACKS_TIMEOUT_SHARE * self._sends_timeout_s))
        metadata = [RecordMetadata(-1, -1)] * len(write.records)
        failed = None
        for batch in write.batches:
            result = batch.result(write.records)
            if isinstance(result, list):
                for member, written in zip(batch.members, result, strict=True):
                    metadata[member] = written
                continue
            failed = failed or batch
            if isinstance(result, RecordError):
                write.record_errors[batch.partition[0]] = result
        if failed is not None:
            raise_if_error(failed.response[0] if failed.response else -1, f"Produce to {failed.partition}")
            # DuplicateSequenceNumber and the like: the record is in Kafka at an unknown offset.
            raise errors.KafkaError(f"{failed.partition}: no offset in the response")
        return metadata

    async def _abort_if_abortable(self, error: Exception, *writes: Write) -> None:
        """Abort a transaction that a broker calls abortable, where version 2 raises the epoch.

        Raises TransactionAborted after a clean abort: the producer is ready. Returns where the session has to end: for
        any other error, and where a batch has no response.
        """
        session, before = self._session, (self._session.producer_id, self._session.epoch)
        if not isinstance(error, TransactionAbortable) or not all(write.is_answered for write in writes):
            return
        if not session.has_version_2(session.coordinator):
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await session.abort_transaction()
        except (errors.KafkaError, OSError) as failed:
            log.warning("an abortable transaction was not aborted", why=repr(failed))
            return
        if (session.producer_id, session.epoch) == before:
            return
        # The abort may leave out markers: the leaders are asked again before the next commit writes its own there.
        self._open_check.forget_all()
        self._offset_commit.is_added = False
        self._early_begin = self._sent = None
        self._state = ProducerState.READY
        raise TransactionAborted(str(error)) from error

    async def close(self) -> None:
        """Close the connections without waiting for pending responses. Never raises, never hangs."""
        self._state = ProducerState.DEAD
        if self._early_begin is not None:
            _, response = self._early_begin
            if not response.cancel():
                unwaited(response)
        await self._session.close()
