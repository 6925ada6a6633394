"""The path of an event: claim → send → commit → mark → resolve, for a group at a time. Read `Writer.serve` first.

What a group leaves unwritten goes to unwritten.py.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from service.claims.keys import Keys
from service.claims.states import Claim, Delivered, Outcome, RequestEvent, RequestState
from service.contract import Guarantee
from service.contract.wire.headers import stamp_writer
from service.contract.wire.names import ledger_topic
from service.core.metrics import Telemetry
from service.core.problems import (
    OUTCOME_UNKNOWN,
    Fenced,
    KafkaAway,
    Problem,
    StoreAway,
    StoreLost,
    StoreUnanswered,
)
from service.core.settings import Settings
from service.core.supervision import failure_of, log_failure
from service.core.time_of_day import now_ms
from service.core.time_slice import after_responses, yield_after
from service.kafka.group_offsets import OFFSETS_TOPIC
from service.kafka.outcomes import OffsetsRefused, TransactionAborted, TransactionFailed, TransactionOutcome
from service.kafka.records import Record
from service.kafka.topics import TopicMetadataCache
from service.pipeline.attempt import Attempt
from service.pipeline.decisions import (
    ClaimDecision,
    ClaimToRelease,
    IdempotentDecision,
    Step,
    after_claim,
    start_sending,
)
from service.pipeline.group import (
    ClaimedRequest,
    CommittedRequest,
    Group,
    committed_of,
    entries_of,
    ledger_offsets_of,
    records_of,
    route,
    rows_to_mark,
    topic_ids_of,
)
from service.pipeline.queue import Queue
from service.pipeline.request import Committed, WriteRequest
from service.pipeline.resolver import Resolver
from service.pipeline.unwritten import Unwritten
from service.slots.slot import LedgerPosition, Slot
from service.slots.store_recovery import CurrentStore

if TYPE_CHECKING:  # OpenTelemetry is imported only where it is asked for
    from service.pipeline.tracing import Tracing

AWAY_PAUSE_S: Final = 0.1
# A producer id and its epoch.
ProducerIdentity = tuple[int, int]
UNTRACED: Final = contextlib.nullcontext()


class Writer:
    """Runs groups of requests through slots, and gives each request its result."""

    def __init__(
        self,
        settings: Settings,
        keys: Keys,
        store: CurrentStore,
        queue: Queue,
        topic_metadata: TopicMetadataCache,
        resolver: Resolver,
        heartbeat_now: asyncio.Event,
        telemetry: Telemetry,
        tracing: "Tracing | None" = None,
        now_ms: Callable[[], int] = now_ms,
    ) -> None:
        self.unwritten = Unwritten(queue, topic_metadata, resolver, ledger_topic(settings.namespace))
        self._settings = settings
        self._keys = keys
        self._store = store
        self._queue = queue
        self._topic_metadata = topic_metadata
        self._resolver = resolver
        self._telemetry = telemetry
        self._tracing = tracing
        self._now_ms = now_ms  # the brokers' time, ms since the Unix epoch
        self._marking: set[asyncio.Task[None]] = set()
        self._heartbeat_now = heartbeat_now  # set where a claim's slot has no lease: the heartbeat recovers the slot

    async def serve(self, slot: Slot) -> None:
        """Write groups through a READY slot until the slot drains. Raises the error that ends its term."""
        marking: asyncio.Task[None] | None = None  # of the previous group
        while not slot.draining:
            marking = await self._serve_next(slot, marking)
        if marking is not None:
            await asyncio.shield(marking)

    async def _serve_next(self, slot: Slot, marking: asyncio.Task[None] | None) -> asyncio.Task[None] | None:
        """Await the next group, and write it. Returns the task that marks the last written group, at first `marking`.

        The next call waits for another group, perhaps for long: nothing may hold this one's events by then.
        """
        group = await self._next_group(slot)
        if group is None:
            return marking
        attempt = Attempt(slot, group)
        try:
            await self._claim(attempt)
            await self._write(attempt)
            marking = await self._start_mark(attempt, marking)
            if to_release := attempt.to_release:
                await self.unwritten.release(slot, to_release)
        except BaseException as error:
            await self.unwritten.end_term(attempt, error)
            raise
        finally:
            self._queue.done(group)
        if attempt.wrote_nothing_and_retries:
            await asyncio.sleep(AWAY_PAUSE_S)
        return marking

    def recovered(self) -> None:
        """Claim parked requests again, after the recovery of a slot or a heartbeat."""
        self.unwritten.recovered()

    async def _next_group(self, slot: Slot) -> Group | None:
        """Await the next group for a slot; None if another slot was faster.

        Raises Fenced where the slot is superseded, and what `flush_marks` raises.
        """
        if slot.superseded:
            self._queue.notify()  # this slot may have been woken for requests that another slot can take
            raise Fenced("its term, its generation, or a connection of it has ended")
        group = await self._queue.next_group(slot)
        if group is None and slot.has_too_many_pending_marks:
            await slot.flush_marks()
        return group

    # ----------------------------------------------------------------------------------------------------- claims

    async def _claim(self, attempt: Attempt) -> None:
        """Claim a group for the slot and its term, and answer the requests that need no write or cannot be written now.

        Whatever this raises, nothing of the group was sent.
        """
        slot, group = attempt.slot, attempt.group
        started = time.perf_counter()
        waited_s = time.monotonic() - group.requests[0].arrived
        claim = RequestEvent.CLAIM
        for request in group.requests:
            request.move(claim)
        if group.isolated:
            topics = {topic for request in group.requests for topic in request.topics}
            await self._topic_metadata.refresh(topics if group.offsets is None else {*topics, OFFSETS_TOPIC})
        offsets_topic = None if group.offsets is None else self._topic_metadata.last_found(OFFSETS_TOPIC)
        partitions, left_out = route(group.requests, self._topic_metadata.last_known, offsets_topic)
        if partitions and group.guarantee is Guarantee.EXACTLY_ONCE:
            slot.begin_early(partitions)
        self._telemetry.stages.observe(waited_s, "queue")  # after `begin_early`, whose response takes longest
        try:
            claims = await self._claims_of(slot, group)
        except StoreAway:  # nothing was claimed: the term goes on
            self.unwritten.requeue(group.requests)
            await asyncio.sleep(AWAY_PAUSE_S)
            return
        self._telemetry.stages.observe(time.perf_counter() - started, "claim")
        if group.atomic and claims[0].outcome is Outcome.DELIVERED:
            await self._answer_members(group.requests[0], claims[0])
            return
        decision = after_claim(group.requests, claims, left_out, time.monotonic(), self._resolver.too_late)
        self._carry_out(decision)
        # Before the pause: the end of a term parks what the attempt has to release.
        attempt.claimed, attempt.not_sent = decision.claimed, decision.to_release
        if decision.next[Step.REQUEUE] and not decision.claimed:
            await asyncio.sleep(AWAY_PAUSE_S)

    async def _claims_of(self, slot: Slot, group: Group) -> list[Claim]:
        """Claim the events of a group, in order; an atomic batch has one claim for the whole."""
        if group.atomic:
            return [await slot.claim_all(group.requests[0].to_claim, group.requests[0].ttl_s)]
        pairs = [pair for request in group.requests for pair in request.to_claim]
        if not any(request.ttl_s for request in group.requests):
            return await slot.claim(pairs)
        return await slot.claim(pairs, [request.ttl_s for request in group.requests for _ in request.to_claim])

    def _carry_out(self, decision: ClaimDecision) -> None:
        """Carry out a decision, except for writing and releasing."""
        unwritten = self.unwritten
        unwritten.waiters.wake_all(decision.final_keys)
        if decision.results:
            self._resolver.resolve_all(decision.results)
        if decision.next or decision.to_release:
            unwritten.take(decision)
        if decision.dead_holder_met:
            self._heartbeat_now.set()
        self._note_claimed(decision.claimed)

    def _note_claimed(self, claimed: Sequence[ClaimedRequest]) -> None:
        """Note that the claims of these requests stand."""
        win = RequestEvent.WIN
        for request, accepted_ats in claimed:
            request.accepted_at = accepted_ats[0]
            request.move(win)
            if request.on_claim is not None:
                self._resolver.resolve_claim(request)

    async def _answer_members(self, request: WriteRequest, claim: Claim) -> None:
        """Answer an atomic batch that is delivered, with the coordinates of its members."""
        was_in_doubt = request.state is RequestState.CHECKING
        request.move(RequestEvent.FIND)  # from here on its deadline answers 504
        again = Problem(OUTCOME_UNKNOWN, "Idempotency-Key: it is written; send it again to learn where")
        try:
            generation = await asyncio.wait_for(
                self._store.wait_until_settled(), self._settings.request_timeout_ms / 1000
            )
            ids = [event.id for event in request.events]
            states = await self._keys.find_all(generation, ids) if ids else []
        except (StoreLost, StoreAway, StoreUnanswered, TimeoutError):
            self._resolver.resolve(request, again)
            return
        pairs = zip(request.events, states, strict=True)
        deliveries = tuple((event.id, state) for event, state in pairs if isinstance(state, Delivered))
        committed = Committed(claim.state.at, deliveries, replayed=not was_in_doubt)
        self._resolver.resolve(request, committed if len(deliveries) == len(request.events) else again)

    # ------------------------------------------------------------------------------------------------------ writing

    async def _write(self, attempt: Attempt) -> None:
        """Write the claimed requests of a group; if there are none, abandon the transaction that was begun for it."""
        await yield_after(attempt.group.size)
        identity = await self._identity(attempt)
        if identity is None:
            self._hold_back(attempt)
        attempt.claimed, late = start_sending(attempt.claimed)
        attempt.not_sent = [*attempt.not_sent, *late]
        exactly_once = attempt.group.guarantee is Guarantee.EXACTLY_ONCE
        if not attempt.claimed:
            if exactly_once:
                await attempt.slot.abandon()
            # The clients' next requests then come together, into one group instead of two.
            await after_responses()
            return
        started = time.perf_counter()
        events = sum([len(request.events) for request, _ in attempt.claimed])
        assert identity is not None
        with self._traced(attempt):
            if exactly_once:
                await self._write_exactly_once(attempt, identity)
            else:
                await self._write_idempotent(attempt, identity)
        self._telemetry.stages.observe(time.perf_counter() - started, "kafka")
        self._telemetry.groups.observe(events)

    @staticmethod
    async def _identity(attempt: Attempt) -> ProducerIdentity | None:
        """Return the producer id and epoch under which a group is written; None while Kafka throttles the producer.

        Raises KafkaAway. A transaction needs no wait: the broker has read its last request when the throttle was over.
        """
        if attempt.claimed and attempt.group.guarantee is Guarantee.IDEMPOTENT:
            return await attempt.slot.idempotent.unthrottled_identity()
        return attempt.slot.producer.identity

    @staticmethod
    def _hold_back(attempt: Attempt) -> None:
        """Write nothing of a group now: its claims are released, and its requests queued again."""
        for request, _ in attempt.claimed:
            request.move(RequestEvent.QUEUE)
        attempt.not_sent = [*attempt.not_sent, *(ClaimToRelease(each, each.claimed_ids) for each, _ in attempt.claimed)]
        attempt.claimed = []

    def _traced(self, attempt: Attempt) -> contextlib.AbstractContextManager[None]:
        """Make the context in which the write of a group is a span, if the process traces."""
        if self._tracing is None:
            return UNTRACED
        return self._tracing.sending(attempt.slot.n, [request for request, _ in attempt.claimed])

    async def _write_exactly_once(self, attempt: Attempt, identity: ProducerIdentity) -> None:
        """Write a group in one transaction. Raises TransactionFailed when `Unwritten.fail` has dealt with the group.

        The offsets of a group come first: if Kafka refuses them, the transaction has no records yet.
        """
        slot, claimed, offsets = attempt.slot, attempt.claimed, attempt.group.offsets
        try:
            first_record = None
            if offsets is not None:
                first_record = await slot.commit_offsets(offsets, ask_leader=attempt.group.isolated)
            records = self._records(attempt, identity)
            await yield_after(len(records))
            metadata = await slot.send(records)
            committed = committed_of(claimed, records, metadata)
            await yield_after(len(records))
            topic_ids = topic_ids_of(records, self._topic_metadata.last_known)
            of_group = "" if offsets is None else ledger_offsets_of(committed, first_record).encode()
            position = await slot.commit(entries_of(committed), topic_ids, of_group)
        except OffsetsRefused as refused:
            ((request, _),) = claimed
            await self.unwritten.refuse_offsets(slot, request, refused)
            return
        except TransactionAborted:
            self._queue.note_throttle(attempt.group, slot.throttled_s, failed=True)
            await self.unwritten.send_again(slot, [request for request, _ in claimed])
            return
        except (Exception, asyncio.CancelledError) as error:
            self._queue.note_throttle(attempt.group, slot.throttled_s, failed=True)
            cause = failure_of(error)
            failure = cause if isinstance(cause, TransactionFailed) else self._bug(slot, cause)
            await self.unwritten.fail(slot, [request for request, _ in claimed], failure)
            if failure is error:
                raise
            raise failure from cause
        self._queue.note_throttle(attempt.group, slot.throttled_s)
        attempt.delivered, attempt.position = committed, position

    @staticmethod
    def _bug(slot: Slot, error: Exception) -> TransactionFailed:
        """Turn a bug between the steps of a transaction into a failure of unknown outcome, which is always safe."""
        failure = TransactionFailed(TransactionOutcome.UNKNOWN, repr(error))
        slot.fail(failure)
        return failure

    async def _write_idempotent(self, attempt: Attempt, identity: ProducerIdentity) -> None:
        """Write events whose guarantee is `idempotent`, without a transaction and without a ledger record.

        An event without a clean result is answered 504 at once and its claim is released: a retry writes it again. An
        event that was surely not appended is sent again.
        """
        slot, claimed = attempt.slot, attempt.claimed
        records = self._records(attempt, identity)
        try:
            results = await slot.idempotent.write(records)
        except KafkaAway:  # nothing was sent
            for request, _ in claimed:
                request.move(RequestEvent.RETURN)
            self.unwritten.park(slot, [request for request, _ in claimed])
            raise
        self._queue.note_throttle(attempt.group, slot.idempotent.throttled_s)
        decision = IdempotentDecision(claimed, records, results)
        self.unwritten.note_failures(decision.failed, decision.to_isolate)
        self._resolver.resolve_all(decision.results)
        for request in decision.requeued:
            request.move(RequestEvent.RETURN)
        attempt.delivered, attempt.position = decision.delivered, slot.without_ledger_record()
        attempt.not_delivered = decision.to_release

    def _records(self, attempt: Attempt, identity: ProducerIdentity) -> list[Record]:
        """Make the records of the claimed requests; each names the producer that writes it in its header."""
        writer = stamp_writer(attempt.slot.n, *identity, self._settings.name)
        return records_of(attempt.claimed, self._topic_metadata.last_known, writer, self._now_ms())

    async def _start_mark(self, attempt: Attempt, before: asyncio.Task[None] | None) -> asyncio.Task[None] | None:
        """Start the task that marks and answers a written group, while the slot goes on with the next group.

        Waits for `before`, the previous group's task: with one mark at a time, a slow store slows the slot.
        """
        slot, position = attempt.slot, attempt.position
        if position is None:
            return before
        try:
            if before is not None:
                await (before if before.done() else asyncio.shield(before))
        finally:  # also if the slot is cancelled, because the group is committed
            if attempt.delivered:
                before = asyncio.create_task(self._mark(slot, position, attempt.delivered), name=f"mark-{slot.n}")
                self._marking.add(before)
                before.add_done_callback(self._marking.discard)
                log_failure(before, "mark", self._telemetry)
        return before

    async def _mark(self, slot: Slot, position: LedgerPosition, delivered: Sequence[CommittedRequest]) -> None:
        """Mark written requests as delivered, then answer them, however the mark ends."""
        started = time.perf_counter()
        rows = rows_to_mark(delivered)
        try:
            await slot.mark(position, rows)
            self.unwritten.waiters.wake_all(id for id, _ in rows)
        except (StoreLost, StoreAway, StoreUnanswered) as error:
            # The events are committed and in the ledger, whatever Redis holds.
            self._telemetry.marks_failed.inc()
            if isinstance(error, StoreLost):
                self._store.lost(position.generation)
        finally:  # a bug in the mark changes nothing of the commit either
            self._telemetry.stages.observe(time.perf_counter() - started, "mark")
            self._queue.release(name for request, _ in delivered for name in request.dependencies)
            self._resolver.resolve_all(delivered)

    async def wait_for_marks(self) -> None:
        """Wait for the marks that are in flight, also those of slots that were cancelled."""
        if self._marking:
            await asyncio.wait(self._marking)
