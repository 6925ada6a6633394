"""The path of an event: claim → send → commit → mark → resolve, for a group at a time. Read `Writer.serve` first."""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from service.claims.redis_store import KeyStore
from service.claims.states import UNSENT, Claim, Delivered, Outcome, RequestEvent, RequestState
from service.contract import Guarantee
from service.contract.wire import ledger_topic, stamp_writer
from service.core.metrics import Telemetry
from service.core.problems import (
    IN_PROGRESS,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    Fenced,
    KafkaAway,
    Problem,
    StoreAway,
    StoreLost,
    StoreUnanswered,
)
from service.core.settings import Settings
from service.core.supervision import log_failure
from service.kafka.outcomes import TransactionFailed, TransactionOutcome
from service.kafka.session import Record
from service.kafka.topics import TopicMetadataCache
from service.pipeline.admission import Admission
from service.pipeline.decisions import (
    ClaimDecision,
    ClaimToRelease,
    FailureDecision,
    IdempotentDecision,
    Step,
    after_claim,
)
from service.pipeline.group import (
    ClaimedRequest,
    CommittedRequest,
    Group,
    entries_of,
    placed_all,
    records_of,
    route,
    rows_of,
    topic_ids_of,
)
from service.pipeline.queue import Queue
from service.pipeline.request import Committed, WriteRequest
from service.pipeline.waiters import Waiters
from service.slots.recovery import Store
from service.slots.slot import Link, Slot

if TYPE_CHECKING:  # OpenTelemetry is imported only where it is asked for
    from service.pipeline.tracing import Tracing

log = structlog.get_logger(__name__)

AWAY_PAUSE_S: Final = 0.1
# As long as a slot's recovery takes, or a broker to hear of a new topic; then twice as long each time.
ABORTED_PAUSE_S: Final = 0.1
ABORTED_PAUSE_MOST_S: Final = 1.0
UNTRACED: Final = contextlib.nullcontext()


class ClaimedGroup(NamedTuple):
    """What is to be written of a group, and claims that are not wanted."""

    requests: Sequence[ClaimedRequest] = ()
    to_release: Sequence[ClaimToRelease] = ()


class Written(NamedTuple):
    """What was written of a group and is to be marked, for which ledger record, and claims that are to be given up."""

    delivered: Sequence[CommittedRequest] = ()
    link: Link | None = None
    to_release: Sequence[ClaimToRelease] = ()

    @property
    def nothing_written(self) -> bool:
        """Nothing was, and some of it is sent again: not at once, as each try may cost a producer id."""
        return not self.delivered and any(not each.request.answered for each in self.to_release)


class Writer:
    """Runs groups of requests through slots, and gives each request its result."""

    def __init__(
        self,
        settings: Settings,
        keys: KeyStore,
        store: Store,
        queue: Queue,
        topic_metadata: TopicMetadataCache,
        admission: Admission,
        heartbeat_now: asyncio.Event,
        telemetry: Telemetry,
        tracing: "Tracing | None" = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger_topic(settings.namespace)
        self._keys = keys
        self._store = store
        self._queue = queue
        self._topic_metadata = topic_metadata
        self._admission = admission
        self._telemetry = telemetry
        self._tracing = tracing
        self._parked: list[WriteRequest] = []  # in doubt, until a slot has been recovered
        self._waiters = Waiters(queue.put_back)
        self._marking: set[asyncio.Task[None]] = set()
        self._heartbeat_now = heartbeat_now  # set where a claim of a slot without a lease is met: it is to be recovered

    async def serve(self, slot: Slot) -> None:
        """Run groups through a READY slot until its term ends (an error is raised) or it is to be given back."""
        marking: asyncio.Task[None] | None = None  # of the group before
        while not slot.draining:
            group = await self._next_group(slot)
            if group is None:
                continue
            claimed, written = ClaimedGroup(), Written()
            try:
                claimed = await self._claim(slot, group)
                written = await self._write(slot, claimed.requests)
                marking = await self._mark_apart(slot, written, marking)
                await self._release(slot, [*claimed.to_release, *written.to_release])
            except BaseException as error:
                await self._end_term(slot, group, [*claimed.to_release, *written.to_release], error)
                raise
            finally:
                self._queue.done(group)
            if written.nothing_written:
                await asyncio.sleep(AWAY_PAUSE_S)
        if marking is not None:
            await asyncio.shield(marking)

    async def _next_group(self, slot: Slot) -> Group | None:
        """The next group for a slot; None where there is none after all. Raises Fenced, and as `flush_marks` does."""
        if slot.superseded:
            self._queue.notify()  # it may be this slot that was woken for what another can take
            raise Fenced("its term, its generation, or a connection of it has ended")
        group = await self._queue.next_group(slot)
        if group is None and slot.has_too_many_pending_marks:
            await slot.flush_marks()
        return group

    # ----------------------------------------------------------------------------------------------------- claims

    async def _claim(self, slot: Slot, group: Group) -> ClaimedGroup:
        """Claim a group for the slot in its term. Whatever this raises, nothing of the group was sent.

        What needs no writing gets its answer, and so does what cannot be written now.
        """
        started = time.perf_counter()
        waited_s = time.monotonic() - group.requests[0].arrived
        for request in group.requests:
            request.move(RequestEvent.CLAIM)
        if group.quarantined:
            await self._topic_metadata.refresh({topic for request in group.requests for topic in request.topics})
        partitions, left_out = route(group.requests, self._topic_metadata.last_known)
        if partitions and group.guarantee is Guarantee.EXACTLY_ONCE:
            slot.open(partitions)
        self._telemetry.stage_queue.observe(waited_s)  # only now: `open` waits longest for its answer
        try:
            claims = await self._ask(slot, group)
        except StoreAway:  # nothing was claimed: the term goes on
            self._requeue(group.requests)
            await asyncio.sleep(AWAY_PAUSE_S)
            return ClaimedGroup()
        self._telemetry.stage_claim.observe(time.perf_counter() - started)
        if group.atomic and claims[0].outcome is Outcome.DELIVERED:
            await self._answer_members(group.requests[0], claims[0])
            return ClaimedGroup()
        # From here to the sending nothing is awaited: a deadline cannot pass in between and be answered 503.
        decision = after_claim(group.requests, claims, left_out, time.monotonic(), self._admission.too_late)
        self._carry_out(decision)
        if decision.next[Step.REQUEUE] and not decision.claimed:
            await asyncio.sleep(AWAY_PAUSE_S)
        return ClaimedGroup(decision.claimed, decision.to_release)

    async def _ask(self, slot: Slot, group: Group) -> list[Claim]:
        if group.atomic:
            return [await slot.claim_all(group.requests[0].asked)]
        return await slot.claim([pair for request in group.requests for pair in request.asked])

    def _carry_out(self, decision: ClaimDecision) -> None:
        """Do what was decided after the claims of a group, but for writing and releasing."""
        if self._waiters:
            for id in decision.settled_keys:
                self._waiters.release(id)
        for request, result in decision.results:
            self._admission.answer(request, result)
        for request in decision.next[Step.PARK]:
            request.move(RequestEvent.QUEUE)
            self._parked.append(request)
        for request in decision.next[Step.WAIT]:
            self._wait_for_another(request)
        self._requeue(decision.next[Step.REQUEUE])
        for each in decision.to_release:
            if not each.request.answered:
                each.request.move(RequestEvent.QUEUE)
        if decision.dead_holder_met:
            self._heartbeat_now.set()
        self._note_won(decision.claimed)

    def _note_won(self, claimed: Sequence[ClaimedRequest]) -> None:
        """The claims of these requests stand."""
        for request, accepted in claimed:
            request.accepted_at = accepted[0]
            request.move(RequestEvent.WIN)
            if request.accepted is not None:
                self._admission.accept(request)

    def _requeue(self, requests: Sequence[WriteRequest]) -> None:
        """Redis took no claim of these: it is made anew, by whoever comes first."""
        if requests:
            for request in requests:
                request.move(RequestEvent.QUEUE)
            self._queue.put_back(requests)

    async def _release(self, slot: Slot, to_release: Sequence[ClaimToRelease]) -> None:
        """Give up claims that are not wanted; without an answer the release may run late, which ends the term.

        What has no answer yet is claimed again.
        """
        if not to_release:
            return
        try:
            await slot.release([id for each in to_release for id in each.ids])
        except (StoreLost, StoreAway, StoreUnanswered) as error:
            raise StoreUnanswered(f"a release is open: {error}") from error
        self._queue.put_back([each.request for each in to_release if each.then is Step.REQUEUE])
        self._parked += [each.request for each in to_release if each.then is Step.PARK]
        self._split(each.request for each in to_release if each.then is Step.SPLIT)

    def _split(self, chunks: Iterable[WriteRequest]) -> None:
        """Have the coroutine of their batch send chunks again in parts."""
        for chunk in chunks:
            if not chunk.answered and (chunk.collector is None or not chunk.collector.send_again(chunk)):
                self._admission.answer(chunk, Problem(NOT_WRITTEN, "its batch was given up: send it again"))

    def _wait_for_another(self, request: WriteRequest) -> None:
        """Another writes the request's key: it is claimed again later."""
        request.move(RequestEvent.QUEUE)
        self._waiters.wait(request)
        if not request.waits:
            request.waits = True
            asyncio.get_running_loop().call_at(request.wait_deadline, self._wait_no_longer, request)

    def _wait_no_longer(self, request: WriteRequest) -> None:
        """Its time to wait is over, and maybe no slot is there that would claim it again and tell."""
        won = request.accepted_at != 0  # since, a claim of its own: it waits for nobody
        if request.state is RequestState.QUEUED and not won:
            self._admission.answer(request, Problem(IN_PROGRESS, "Idempotency-Key: send it again, with the same key"))

    async def _answer_members(self, request: WriteRequest, claim: Claim) -> None:
        """The stored answer of an atomic batch: where each member is."""
        was_in_doubt = request.state is RequestState.CHECKING
        request.move(RequestEvent.FIND)  # no deadline may say from here on that it is not written
        again = Problem(OUTCOME_UNKNOWN, "Idempotency-Key: it is written; send it again to learn where")
        try:
            generation = await asyncio.wait_for(self._store.settled(), self._settings.request_timeout_ms / 1000)
            states = await self._keys.find_all(generation, [event.id for event in request.events])
        except (StoreLost, StoreAway, StoreUnanswered, TimeoutError):
            self._admission.answer(request, again)
            return
        pairs = zip(request.events, states, strict=True)
        places = tuple((event.id, state) for event, state in pairs if isinstance(state, Delivered))
        whole = len(places) == len(request.events)
        self._admission.answer(
            request, Committed(claim.state.at, places, replayed=not was_in_doubt) if whole else again
        )

    # ------------------------------------------------------------------------------------------------------ writing

    async def _write(self, slot: Slot, group: Sequence[ClaimedRequest]) -> Written:
        """Write a claimed group as its guarantee says; end the transaction that was begun for it where it is empty."""
        if not group:
            await slot.abandon()
            return Written()
        started = time.perf_counter()
        exactly_once = group[0][0].guarantee is Guarantee.EXACTLY_ONCE
        write = self._write_exactly_once if exactly_once else self._write_idempotent
        with self._traced(slot, group):
            written = await write(slot, group)
        self._telemetry.stage_kafka.observe(time.perf_counter() - started)
        self._telemetry.groups.observe(sum(len(request.events) for request, _ in group))
        return written

    def _traced(self, slot: Slot, group: Sequence[ClaimedRequest]) -> contextlib.AbstractContextManager[None]:
        if self._tracing is None:
            return UNTRACED
        return self._tracing.sending(slot.n, [request for request, _ in group])

    async def _write_exactly_once(self, slot: Slot, group: Sequence[ClaimedRequest]) -> Written:
        """Write a group in one transaction. Raises TransactionFailed: all of it is in doubt, see `_fail`."""
        records = self._records(slot, group, slot.producer.producer_id, slot.producer.epoch)
        for request, _ in group:
            request.move(RequestEvent.SEND)
        try:
            places = await slot.send(records)
            committed = list(placed_all(group, records, places))
            topic_ids = topic_ids_of(records, self._topic_metadata.last_known)
            link = await slot.commit(entries_of(committed), topic_ids)
        except Exception as error:
            failure = error if isinstance(error, TransactionFailed) else self._bug(slot, error)
            await self._fail(slot, [request for request, _ in group], failure)
            if failure is error:
                raise
            raise failure from error
        return Written(committed, link)

    @staticmethod
    def _bug(slot: Slot, error: Exception) -> TransactionFailed:
        """A transaction ended for something that Kafka has no part in. It is in doubt: that is safe in any case."""
        failure = TransactionFailed(TransactionOutcome.UNKNOWN, repr(error))
        slot.fail(failure)
        return failure

    async def _write_idempotent(self, slot: Slot, group: Sequence[ClaimedRequest]) -> Written:
        """Write events whose guarantee is `idempotent`: no transaction and no ledger.

        What has no clean answer is in doubt at once (504), and its claim is released: a retry writes it again. What was
        surely not appended is sent again.
        """
        identity = await slot.idempotent.identity()
        late = [ClaimToRelease(request, [id for id, _ in request.asked]) for request, _ in group if request.answered]
        group = [(request, accepted) for request, accepted in group if not request.answered]
        records = self._records(slot, group, *identity)
        for request, _ in group:
            request.move(RequestEvent.SEND)
        try:
            results = await slot.idempotent.write(records)
        except KafkaAway:  # nothing was sent
            for request, _ in group:
                request.move(RequestEvent.REFUSE)
            self._park(slot, [request for request, _ in group])
            raise
        decision = IdempotentDecision(group, records, results)
        self._note_failures(decision.failed, decision.blamed_topics)
        for request, result in decision.results:
            self._admission.answer(request, result)
        for request in decision.requeued:
            request.move(RequestEvent.REFUSE)
        return Written(decision.delivered, slot.unlinked(), [*late, *decision.to_release])

    def _records(self, slot: Slot, group: Sequence[ClaimedRequest], producer_id: int, epoch: int) -> list[Record]:
        writer = stamp_writer(slot.n, producer_id, epoch, self._settings.name)
        return records_of(group, self._topic_metadata.last_known, writer, self._admission.now_ms())

    async def _mark_apart(
        self, slot: Slot, written: Written, before: asyncio.Task[None] | None
    ) -> asyncio.Task[None] | None:
        """Mark and answer a committed group while the slot goes on with the next.

        One mark is under way at most: a slow store slows the slot.
        """
        try:
            if before is not None and written.link is not None:
                await asyncio.shield(before)
        finally:  # also where the slot is cancelled: the group is committed
            if written.link is not None and written.delivered:
                before = asyncio.create_task(self._mark(slot, written.link, written.delivered), name=f"mark-{slot.n}")
                self._marking.add(before)
                before.add_done_callback(self._marking.discard)
                log_failure(before, "mark", self._telemetry)
        return before

    async def _mark(self, slot: Slot, link: Link, delivered: Sequence[CommittedRequest]) -> None:
        started = time.perf_counter()
        rows = rows_of(delivered)
        try:
            await slot.mark(link, rows)
            if self._waiters:
                for id, _ in rows:
                    self._waiters.release(id)
        except (StoreLost, StoreAway, StoreUnanswered) as error:
            # The ledger has it: the events are committed, whatever Redis knows of them by now.
            self._telemetry.marks_failed.inc()
            if isinstance(error, StoreLost):
                self._store.lost(link.generation)
        self._telemetry.stage_mark.observe(time.perf_counter() - started)
        self._queue.release(there.topic for _, committed in delivered for _, there in committed.places)
        for request, committed in delivered:
            self._admission.answer(request, committed)

    # ----------------------------------------------------------------------------------------------------- failures

    async def _fail(self, slot: Slot, requests: Sequence[WriteRequest], failure: TransactionFailed) -> None:
        """A group did not commit cleanly. Its poison is answered if it was alone; the others are sent again.

        They wait for the recovery if a commit may have been asked for. If it was not, their claims are given up, and
        they go at once, the first time. What goes on failing would end the term of one slot after the other: from then
        on it pauses, if nobody else is to blame; and so does what is for a topic that may have been made just now. A
        chunk that is to blame is sent again in parts.
        """
        decision = FailureDecision(requests, failure, self._ledger)
        if decision.ledger_is_full:  # it takes less than it did
            self._queue.ledger_bytes_max = max(1, sum(request.ledger_bytes for request in requests) // 2)
        self._note_failures(decision.failed, decision.blamed_topics)
        for request in decision.blamed:
            request.aborts += 1
        for request, result in decision.results:
            self._admission.answer(request, result)
        given_up = False
        try:
            given_up = decision.is_aborted and await self._give_up(slot, requests)
        finally:
            for request in requests:
                request.move(RequestEvent.REFUSE if given_up else RequestEvent.DOUBT)
            if not given_up:
                self._parked += requests
        if given_up:
            self._queue.put_back(decision.at_once)
            self._put_back_later(decision.later)
            self._split(decision.split)

    def _put_back_later(self, requests: Sequence[WriteRequest]) -> None:
        if requests:
            pause_s = min(ABORTED_PAUSE_S * 2 ** max(each.aborts for each in requests), ABORTED_PAUSE_MOST_S)
            asyncio.get_running_loop().call_later(pause_s, self._queue.put_back, requests)

    async def _give_up(self, slot: Slot, requests: Sequence[WriteRequest]) -> bool:
        """Give up the claims of requests that were sent, so that any slot may write them now; False: they may stand.

        No commit was asked for, and none will be: nothing of their transaction can ever be there, whatever becomes of
        the slot, whose recovery may wait for a partition's replicas for hours (its abort markers need them). Whose
        partition that is cannot always be told: until a dead broker is out of the ISR, all that it followed hang alike.
        """
        try:
            await slot.release([id for request in requests for id, _ in request.asked])
        except (StoreLost, StoreAway, StoreUnanswered):
            return False
        slot.in_doubt = 0
        return True

    def _note_failures(self, requests: Iterable[WriteRequest], topics: Iterable[str]) -> None:
        """These topics failed a group, and these requests were in it: they go in groups of their own from here on."""
        for request in requests:
            request.failures += 1
        for topic in topics:
            self._queue.quarantine(topic)
            self._topic_metadata.invalidate(topic)

    async def _end_term(
        self, slot: Slot, group: Group, to_release: Sequence[ClaimToRelease], error: BaseException
    ) -> None:
        """The term has ended: what was not sent waits for the slot's recovery, for its own claim may stand there.

        So does that whose claims were not wanted, and could not be given up in time.
        """
        try:
            if to_release and isinstance(error, TransactionFailed):
                # They were not even sent, and the slot's recovery may take long.
                with contextlib.suppress(StoreUnanswered):
                    await self._release(slot, to_release)
                    to_release = ()
        finally:
            unsent = [
                request
                for request in group.requests
                if request.state in UNSENT and request.group_number == group.number  # else a later group has it
            ]
            for request in unsent:
                request.move(RequestEvent.QUEUE)
            self._park(slot, unsent + [each.request for each in to_release if not each.request.answered])

    def _park(self, slot: Slot, requests: Sequence[WriteRequest]) -> None:
        """Keep requests until a recovery: a claim of them may stand in the slot's term, and is not somebody else's."""
        for request in requests:
            request.claimants += ((slot.n, slot.term),)
        self._parked += requests

    def recovered(self) -> None:
        """A slot has been recovered, or time has passed: what waits for that is claimed anew, which tells its fate."""
        parked, self._parked = self._parked, []
        self._queue.put_back(parked)

    async def settle(self) -> None:
        """Wait for the marks that are under way, also those of slots that were cancelled."""
        if self._marking:
            await asyncio.wait(self._marking)
