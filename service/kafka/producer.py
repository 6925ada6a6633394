"""The transactional producer. It ends with its first failure that is not cleanly aborted, and is then replaced."""

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import structlog
from aiokafka import errors
from aiokafka.client import AIOKafkaClient

from service.core.identity_enum import IdentityEnum
from service.core.shared_task import unwaited
from service.core.shared_timeout import SharedTimeout
from service.core.supervision import failure_of
from service.core.time_slice import yield_after
from service.kafka import outcomes
from service.kafka.admin import KafkaAdmin
from service.kafka.group_offsets import AWAY, NOT_KEPT, OFFSETS_TOPIC, GroupOffsets, OffsetCommit
from service.kafka.hanging import ActiveProducer, RecordCoordinates
from service.kafka.inspection import UNSUPPORTED, active_producers, is_ending, write_marker
from service.kafka.metadata import Partition
from service.kafka.open_check import OpenCheck
from service.kafka.outcomes import (
    OK,
    RECORD_ERRORS,
    OffsetsRefused,
    PartitionUnknown,
    RecordError,
    TransactionAbortable,
    TransactionAborted,
    TransactionFailed,
    TransactionOutcome,
    raise_if_error,
)
from service.kafka.protocol import AddPartitionsToTxnRequest, EndTxnAndBumpRequest, EndTxnRequest
from service.kafka.records import NotSent, Record, RecordBatch, RecordMetadata, own_record
from service.kafka.session import (
    ACKS_TIMEOUT_SHARE,
    CONCURRENT_TRANSACTIONS,
    MARKERS_PAUSE_MOST_S,
    MARKERS_PAUSE_S,
    METADATA_TIMEOUT_S,
    SENDS_SHARE,
    ProducerSession,
)

log = structlog.get_logger(__name__)

NOT_ATTEMPTED: Final = errors.OperationNotAttempted.errno
# Codes that are about the transaction, not about the partition that answers with them.
OF_TRANSACTION: Final = (
    errors.InvalidProducerEpoch.errno,
    outcomes.PRODUCER_FENCED,
    outcomes.TRANSACTION_ABORTABLE,
    CONCURRENT_TRANSACTIONS,
)


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

    def __init__(self, cluster: KafkaAdmin, transactional_id: str, transaction_timeout_ms: int) -> None:
        self._session = ProducerSession(cluster, transactional_id, transactional_id, transaction_timeout_ms)
        # The broker aborts a transaction at the transaction timeout, so waiting longer is useless.
        self._timeout_s = min(cluster.request_timeout_ms, transaction_timeout_ms) / 1000
        self._sends_timeout_s = self._timeout_s / SENDS_SHARE
        self._sends_timeout = SharedTimeout(self._sends_timeout_s)
        self._commit_timeout = SharedTimeout(self._timeout_s)
        self._start_timeout_s = (cluster.request_timeout_ms + transaction_timeout_ms) / 1000
        self._early_begin: tuple[dict[Partition, int], asyncio.Future[Any]] | None = None
        self._has_offsets = False  # whether the partition of a group's offsets was added to the transaction
        self._has_ended = False  # whether an EndTxn was sent, whose markers may be late
        self._open_check = OpenCheck(self._session)
        self._offset_commit = OffsetCommit(self._session)
        self._state = ProducerState.READY
        self._sent: tuple[_Write, dict[Partition, int], Partition] | None = None  # with the leaders, and the ledger
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
    def throttled_s(self) -> float:
        """The longest throttle time in a response of the last transaction, in seconds; 0 without a quota (KIP-219)."""
        return self._session.longest_throttle_s

    @property
    def client(self) -> AIOKafkaClient:
        """The connections of this session."""
        return self._session.client

    @property
    def without_marker(self) -> set[Partition]:
        """The partitions of the older producers' transaction that had no marker at the time of the fence."""
        return self._session.without_marker

    @property
    def former_ids(self) -> Collection[int]:
        """The producer ids that the transactional id had before this session, as far as the coordinator named them."""
        return self._session.former_ids

    @property
    def has_lost_connection(self) -> bool:
        """Whether a broker has ended a connection; markers may be missing from a broker that was away."""
        return self._session.client.has_lost_connection

    async def find_open_transactions(
        self, partitions: Collection[Partition]
    ) -> tuple[dict[Partition, int], set[Partition]]:
        """Find the open transactions of this producer id.

        Returns their first offset, by partition, and the partitions whose leader gave no answer. Before the first
        transaction of this session, an open one hangs: the fence has ended it for the coordinator.
        """
        return await self._open_check.ask(partitions, METADATA_TIMEOUT_S)

    async def find_transactions_of_others(
        self, partitions: Collection[Partition]
    ) -> dict[int, dict[Partition, ActiveProducer]]:
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

    async def write_marker_of_former(self, partition: Partition, former: ActiveProducer, *, commit: bool) -> str:
        """Write the marker of a transaction that hangs under a former producer id of the transactional id.

        No transaction of this session can write it, because a coordinator writes markers of the present producer id
        only. Returns why the marker was not written; "" if it was. Raises no KafkaError: the slot can go on without it.
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

    async def write_missing_markers(self, partitions: Sequence[Partition], *, commit: bool) -> Sequence[Partition]:
        """Write missing markers into partitions, by a transaction that adds the partitions and writes no data.

        Returns the partitions that have their markers now: all but those of OFFSETS_TOPIC that the service may not add,
        which is logged. Raises KafkaAway where the markers are not there in time.
        """
        ends = self.producer_id  # at its last epoch, the response to the EndTxn has another one
        try:
            async with asyncio.timeout(self._start_timeout_s):
                if not (partitions := await self._add_hanging(partitions)):
                    return partitions
                await self._end(commit)
                while (await self._open_check.ask(partitions, METADATA_TIMEOUT_S, ends)) != ({}, set()):  # noqa: ASYNC110 - Kafka sends no notification
                    await asyncio.sleep(MARKERS_PAUSE_MOST_S)
                return partitions
        except (errors.KafkaError, OSError, TimeoutError) as error:
            raise self._session.failed("end-hanging", f"{partitions}: no markers: {error!r}") from error

    async def _add_hanging(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Add partitions with a hanging transaction; returns those that were added.

        Kafka adds a partition of OFFSETS_TOPIC only by the name of a group that has its offsets there.
        """
        added = [partition for partition in partitions if partition[0] != OFFSETS_TOPIC]
        if added:
            await self._add(_Write([]), added)
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

    def begin_early(self, partitions: Sequence[Partition]) -> None:
        """Begin a transaction of these partitions without waiting; call `send` or `abandon` next.

        Does nothing where a leader is unknown, a partition may hold an open transaction, or the session of a connection
        must be renewed. `send` then does what is missing.
        """
        if self._session.client.has_due_session:
            return
        leaders = {partition: self._session.leader(partition) for partition in partitions}
        known = {
            partition: node
            for partition, node in leaders.items()
            if node is not None and self._open_check.is_clear(partition, node)
        }
        if len(known) == len(leaders):
            response = self._session.try_send(self._session.coordinator, self._request_to_add(known))
            self._early_begin = None if response is None else (known, response)

    async def abandon(self) -> None:
        """Abort the transaction that `begin_early` began, if any. Raises TransactionFailed."""
        if self._early_begin is None:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                async with asyncio.timeout(self._sends_timeout_s):
                    added = await self._await_early_begin()
                if added:
                    await self._end(commit=False)
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
        codes = _codes(self._session.note_throttle(await response))
        if CONCURRENT_TRANSACTIONS in codes.values():
            return {}
        write = _Write([])
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
        Returns the transaction's first record in this partition; None where the service may not see the partition.
        Raises OffsetsRefused after a clean abort: the transaction has written nothing into any other partition, and the
        producer is ready. Raises TransactionAborted, and TransactionFailed for any other response, also where the
        partition was added and its leader does not keep the offsets: the next transaction would wait for its marker
        there.
        """
        self._move(ProducerState.OFFSETS)
        write = _Write([])
        try:
            async with asyncio.timeout(self._sends_timeout_s):
                try:
                    return await self._send_offsets(write, offsets, ask_leader)
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
                offsets_error=self._offsets_error(failure, write),
            ) from failure
        self._move(ProducerState.READY)
        raise refused

    async def _send_offsets(self, write: "_Write", offsets: GroupOffsets, ask_leader: bool) -> RecordCoordinates | None:
        """Add the partition of the group's offsets to the transaction, commit the offsets, and look where they are.

        Raises OffsetsRefused, KafkaError, TimeoutError. `write` then names OFFSETS_TOPIC if the group's coordinator did
        not answer.
        """
        commit, early = self._offset_commit, self._early_begin
        if early is None:
            await self._session.client.renew_sessions()
        elif await self._await_early_begin():
            self._early_begin = early  # for `send`, which finds its response at once
        if (partition := await commit.partition_of(offsets.group)) is not None:
            if ask_leader:
                self._open_check.forget(partition)
            try:
                async with asyncio.timeout(self._sends_timeout_s / 2):  # there is time left for a clean abort
                    await self._check_open(write, {partition: await self._session.find_leader(partition)})
            except (TimeoutError, PartitionUnknown) as error:  # nothing was added to the transaction for the group
                raise OffsetsRefused(AWAY) from error
        adds = partition is not None and self._joining_offsets(partition)
        if not adds:
            await commit.add(offsets.group)
        self._has_offsets = True
        write.waiting_for = OFFSETS_TOPIC
        await commit.commit(offsets, partition, adds=adds)
        if partition is None and (partition := await commit.partition_of(offsets.group)) is None:
            return None
        open_from, unanswered = await self._open_check.ask([partition], METADATA_TIMEOUT_S)
        if unanswered:
            raise TimeoutError(f"no leader answered where the transaction begins in {partition}")
        write.waiting_for = ""
        return RecordCoordinates(partition, open_from[partition]) if partition in open_from else None

    def _offsets_error(self, failure: BaseException, write: "_Write") -> RecordError | None:
        """Find why a group failed the transaction of its offsets; None where another attempt may get past the failure.

        What hangs in the group's partition may be ended by the recovery only with Read on groups: without it, each
        attempt fails. A timeout while the previous transaction's markers are written is no fault of the group.
        """
        if write.hanging and all(topic == OFFSETS_TOPIC for topic, _ in write.hanging):
            return NOT_KEPT
        if write.waiting_for != OFFSETS_TOPIC or self._offset_commit.awaits_markers:
            return None
        if isinstance(failure, errors.GroupCoordinatorNotAvailableError):
            return NOT_KEPT
        return AWAY if isinstance(failure, TimeoutError) else None

    def _joining_offsets(self, partition: Partition) -> bool:
        """Whether TxnOffsetCommit adds a group's partition, by the version of its leader, the group's coordinator."""
        node = self._session.leader(partition)
        return node is not None and bool(self._joining({partition: node}))

    async def _abandon_offsets(self, group: str) -> None:
        """Abort a transaction whose offsets were refused. Raises KafkaError.

        Kafka may have kept some of the offsets: before the next ones, the leader of their partition is asked again
        whether it has the marker.
        """
        if self._has_offsets or self._early_begin is not None:
            await self._abort()
        self._early_begin, self._has_offsets = None, False
        if (partition := await self._offset_commit.partition_of(group)) is not None:
            self._open_check.forget(partition)

    async def send(self, records: Sequence[Record], ledger: Partition) -> list[RecordMetadata]:
        """Send the records of a transaction that includes the ledger's partition, and await their metadata.

        Call `commit` next. Raises TransactionAborted, and TransactionFailed for any other response that is not clean.
        """
        self._move(ProducerState.SENDING)
        write = _Write(records)
        self._session.longest_throttle_s = 0.0
        self._ends_at = asyncio.get_running_loop().time() + self._timeout_s
        try:
            with self._sends_timeout.wait():
                if self._early_begin is None and not self._has_offsets:
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
        self._has_offsets = False
        assert self._sent is not None
        (write, leaders, ledger), self._sent = self._sent, None
        of_ledger: _Write | None = None
        ends = False
        try:
            with self._commit_timeout.wait_until(self._ends_at):
                of_ledger = _Write([own_record(*ledger, None, ledger_record)])
                (metadata,) = await self._send(of_ledger, leaders)
                ends = True
                await self._end(commit=True)
        except (Exception, asyncio.CancelledError) as error:  # a bug must end the session too
            failure = failure_of(error)
            if of_ledger is not None and not ends:
                await self._abort_if_abortable(failure, write, of_ledger)
            raise self._failed(failure, write, of_ledger) from failure
        self._move(ProducerState.READY)
        return metadata.offset

    def _failed(self, error: Exception, write: "_Write", of_ledger: "_Write | None") -> TransactionFailed:
        """Make the error for a failed transaction; `of_ledger`: of the ledger record, if it may have been sent."""
        self._state = ProducerState.DEAD
        record_errors = write.record_errors | (of_ledger.record_errors if of_ledger is not None else {})
        cause = ", ".join(f"{topic}: {each.why}" for topic, each in record_errors.items())
        cause = cause or ", ".join(filter(None, (repr(error), self._session.quota)))
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

    async def _add_missing(self, write: "_Write", ledger: Partition) -> dict[Partition, int]:
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
            await self._check_open(write, added)
            joining = set() if began_early else self._joining(added)
            if to_add := added.keys() - joining:
                await self._add(write, [partition for partition in added if partition in to_add])
            self._session.joining = joining
            leaders |= added
        return leaders

    def _joining(self, leaders: Mapping[Partition, int]) -> set[Partition]:
        """Find the partitions that a Produce adds to the transaction: of leaders that have version 2.

        None where the coordinator has not: without an epoch for each transaction, a late Produce could join the next.
        """
        session = self._session
        if not session.has_version_2(session.coordinator):
            return set()
        return {partition for partition, node in leaders.items() if session.has_version_2(node)}

    async def _leaders(self, write: "_Write", partitions: Collection[Partition]) -> dict[Partition, int]:
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

    async def _check_open(self, write: "_Write", leaders: Mapping[Partition, int]) -> None:
        """Raise where a partition holds an older open transaction, which this transaction's marker would end.

        The marker of a transaction that this session has ended may only be late: a transaction hangs if it is still
        open after the coordinator has written its markers, or when the caller's time is over.
        """
        unclear = [partition for partition, node in leaders.items() if not self._open_check.is_clear(partition, node)]
        if not unclear:
            return
        write.waiting_for = unclear[0][0]
        write.hanging, unanswered = await self.find_open_transactions(unclear)
        if write.hanging and self._has_ended:
            write.waiting_for = ""
            with contextlib.suppress(*UNSUPPORTED):
                await self._await_markers()
            write.waiting_for = min(write.hanging)[0]
            write.hanging, unanswered = await self.find_open_transactions(unclear)
        if write.hanging:
            write.waiting_for = ""
            raise errors.KafkaError(f"a transaction of this producer id hangs in {sorted(write.hanging)}")
        if unanswered:
            write.waiting_for = min(unanswered)[0]
            raise TimeoutError(f"no leader answered whether a transaction is open in {sorted(unanswered)}")
        write.waiting_for = ""

    def _request_to_add(self, partitions: Iterable[Partition]) -> AddPartitionsToTxnRequest:
        """Make the AddPartitionsToTxn request of these partitions."""
        by_topic: dict[str, list[int]] = {}
        for topic, partition in partitions:
            by_topic.setdefault(topic, []).append(partition)
        session = self._session
        return AddPartitionsToTxnRequest(
            session.transactional_id, session.producer_id, session.epoch, list(by_topic.items())
        )

    async def _add(self, write: "_Write", partitions: Iterable[Partition]) -> None:
        """Add partitions to the transaction, or begin it by them.

        CONCURRENT_TRANSACTIONS means that the previous transaction's markers are still being written, and nothing was
        added: the request is repeated.
        """
        session, pause_s = self._session, MARKERS_PAUSE_S
        request = self._request_to_add(partitions)
        while True:
            codes = _codes(await session.request(session.coordinator, request))
            if CONCURRENT_TRANSACTIONS not in codes.values():
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MARKERS_PAUSE_MOST_S)
        write.check_added(codes)

    async def _send(self, write: "_Write", leaders: Mapping[Partition, int]) -> list[RecordMetadata]:
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

    async def _end(self, commit: bool) -> None:
        """Send EndTxn. After a clean response the outcome is final, and the coordinator writes the markers.

        In version 2 the session goes on with the producer id and epoch of the response. A transaction that a Produce
        has joined must not end in version 1: the version is never taken from a connection that has ended.
        """
        session = self._session
        if session.awaits_version:
            await session.connect_to_coordinator()
        session.joining = set()
        self._has_ended = True
        producer = session.transactional_id, session.producer_id, session.epoch
        if not session.has_version_2(session.coordinator):
            ended = await session.request(session.coordinator, EndTxnRequest(*producer, commit))
            raise_if_error(ended.error_code, "EndTxn")
            return
        ended = await session.request(session.coordinator, EndTxnAndBumpRequest(*producer, commit))
        raise_if_error(ended.error_code, "EndTxn")
        if ended.producer_id < 0 or ended.producer_epoch < 0:
            raise errors.KafkaError(f"EndTxn: no producer of the next transaction: {ended}")
        session.next_transaction(ended.producer_id, ended.producer_epoch)

    async def _abort(self) -> None:
        """Abort a transaction that may have no partition yet, and go on. Raises KafkaError, OSError.

        In version 2 the epoch is raised in any case, so that no late request of this transaction can join the next. The
        coordinator would call the producer fenced while it writes the previous transaction's markers.
        """
        session = self._session
        if session.awaits_version:
            await session.connect_to_coordinator()
        if session.has_version_2(session.coordinator):
            await self._await_markers()
        await self._end(commit=False)

    async def _await_markers(self) -> None:
        """Wait until the coordinator has written the markers of the last transaction. Raises KafkaError, OSError."""
        session, pause_s = self._session, MARKERS_PAUSE_S
        assert session.transactional_id is not None
        while await is_ending(session.client, session.coordinator, session.transactional_id):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MARKERS_PAUSE_MOST_S)

    async def _abort_if_abortable(self, error: Exception, *writes: "_Write") -> None:
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
                await self._abort()
        except (errors.KafkaError, OSError) as failed:
            log.warning("an abortable transaction was not aborted", why=repr(failed))
            return
        if (session.producer_id, session.epoch) == before:
            return
        # The abort may leave out markers: the leaders are asked again before the next commit writes its own there.
        self._open_check.forget_all()
        self._has_offsets, self._early_begin, self._sent = False, None, None
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


class _Write:
    """Records of a transaction that are sent together, and the topics that fail or delay the transaction."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.batches: list[RecordBatch] = []
        self.waiting_for = ""  # the topic whose leader is being looked up, or asked for open transactions
        self.record_errors: dict[str, RecordError] = {}  # by topic
        self.hanging: Collection[Partition] = ()  # partitions with an open transaction of an earlier session

    @property
    def is_answered(self) -> bool:
        """Whether each batch has a response, so that no request of this write can arrive later."""
        return all(batch.response is not None for batch in self.batches)

    @property
    def was_rejected(self) -> bool:
        """Whether the brokers have refused all batches, so that none of the records is in Kafka."""
        return bool(self.batches) and all(
            isinstance(batch.result(self.records), RecordError | NotSent) for batch in self.batches
        )

    def check_added(self, codes: Mapping[Partition, int]) -> None:
        """Note the topics that an AddPartitionsToTxn response refuses, and raise the response's error, if any."""
        for (topic, _), code in codes.items():
            if code in RECORD_ERRORS:
                self.record_errors[topic] = RECORD_ERRORS[code]
        for code in codes.values():
            if code != NOT_ATTEMPTED:  # the code of all other partitions where one is refused
                raise_if_error(code, "AddPartitionsToTxn")

    def stuck(self, timed_out: bool) -> set[str]:
        """Find the topics whose error ended the transaction, or that left a request unanswered at the timeout.

        Batches that wait for the first one of another partition are not sent yet.
        """
        failed = {
            batch.partition[0]
            for batch in self.batches
            if (
                timed_out and batch.is_sent
                if batch.response is None
                else batch.response[0] not in (OK, *OF_TRANSACTION)
            )
        }
        return failed | ({self.waiting_for} - {""})


def _codes(response: Any) -> dict[Partition, int]:
    """Extract the error code of each partition from an AddPartitionsToTxn response."""
    return {(topic, row[0]): row[1] for topic, rows in response.errors for row in rows}
