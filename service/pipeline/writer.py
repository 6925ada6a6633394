"""The path of an event: claim → deliver → mark → answer, for a group at a time. Read `Writer.serve` first."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import structlog

from service.claims.redis_store import KeyStore
from service.claims.states import (
    CLAIMABLE,
    UNSENT,
    Claim,
    Claimed,
    Delivered,
    Outcome,
    RequestEvent,
    RequestState,
)
from service.contract import Guarantee
from service.contract.wire import ledger_topic, stamp_writer
from service.core.metrics import Telemetry
from service.core.problems import (
    FINGERPRINT_MISMATCH,
    IN_PROGRESS,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    TOO_LARGE,
    UNKNOWN_TOPIC,
    Fenced,
    KafkaAway,
    Problem,
    StoreAway,
    StoreLost,
    StoreUnanswered,
)
from service.core.settings import Settings
from service.core.supervision import heard
from service.kafka.outcomes import OUTSIDE_BOUNDS, RecordError, TransactionFailed, TransactionOutcome
from service.kafka.session import NotSent, Partition, Record, RecordMetadata
from service.kafka.topics import TopicMetadataCache
from service.pipeline.admission import Admission
from service.pipeline.group import (
    ClaimedRequest,
    CommittedRequest,
    Written,
    entries_of,
    part_mixed,
    parted,
    placed_all,
    records_of,
    route,
    rows_of,
    topic_ids_of,
)
from service.pipeline.queue import Queue
from service.pipeline.request import BatchChunk, Committed, WriteRequest
from service.pipeline.waiters import Waiters
from service.slots.recovery import Store
from service.slots.slot import Slot

if TYPE_CHECKING:  # OpenTelemetry is imported only where it is asked for
    from service.pipeline.tracing import Tracing

log = structlog.get_logger(__name__)

AWAY_PAUSE_S: Final = 0.1
# As long as a slot's recovery takes, or a broker to hear of a new topic; then twice as long each time.
ABORTED_PAUSE_S: Final = 0.1
ABORTED_PAUSE_MOST_S: Final = 1.0
UNTRACED: Final = contextlib.nullcontext()


class Writer:
    """Runs groups of requests through slots, and tells the admission what became of each."""

    def __init__(
        self,
        settings: Settings,
        keys: KeyStore,
        store: Store,
        queue: Queue,
        topic_metadata: TopicMetadataCache,
        admission: Admission,
        telemetry: Telemetry,
        tracing: "Tracing | None" = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger_topic(settings.namespace)
        self._keys = keys
        self._store = store
        self._queue = queue
        self._topic_metadata = topic_metadata
        self._answer, self._accept, self._too_late = admission.answer, admission.accept, admission.too_late
        self._response_buffer = admission.response_buffer
        self._now_ms = admission.now_ms
        self._telemetry = telemetry
        self._tracing = tracing
        self._parked: list[WriteRequest] = []  # in doubt, until a slot has been recovered
        self._waiters = Waiters(queue.put_back)
        self._finishing: set[asyncio.Task[None]] = set()
        # Called where a claim of a slot without a lease is met: who looks after slots need not wait for its next beat.
        self.hurry: Callable[[], None] = lambda: None

    async def serve(self, slot: Slot) -> None:
        """Run groups through a READY slot until its term ends (an error is raised) or it is to be given back."""
        finishing: asyncio.Task[None] | None = None
        while not slot.draining:
            if not slot.superseded:
                await self._queue.wait()
            if slot.superseded:
                self._queue.notify()  # it may be this slot that was woken for what another can take
                raise Fenced("its term, its generation, or a connection of it has ended")
            if slot.has_too_many_pending_marks:
                self._queue.notify()  # another slot may take what is there
                await slot.flush_marks()
            requests = [] if slot.draining else self._queue.take()
            if not requests:
                continue
            group_number, claims_to_release, written = requests[0].group_number, list[WriteRequest](), None
            try:
                group, claims_to_release = await self._claim(slot, requests)
                if group:
                    written = await self._deliver(slot, group)
                    claims_to_release += written.claims_to_release
                    try:
                        if finishing is not None:  # one mark under way at most: a slow store slows the slot
                            await asyncio.shield(finishing)
                    finally:  # also where the slot is cancelled: the group is committed
                        finishing = self._finish_apart(slot, written)
                else:
                    await slot.abandon()
                if claims_to_release:
                    await self._release(slot, claims_to_release)
            except BaseException as error:
                try:
                    if claims_to_release and isinstance(error, TransactionFailed):
                        # They were not even sent, and the slot's recovery may take long.
                        with contextlib.suppress(StoreUnanswered):
                            await self._release(slot, claims_to_release)
                            claims_to_release = []
                finally:
                    self._wait_again(
                        slot,
                        [request for request in requests if request.group_number == group_number],
                        claims_to_release,
                    )
                raise
            finally:
                self._queue.returned(requests)
            if written is not None and written.nothing_written:
                await asyncio.sleep(AWAY_PAUSE_S)
        if finishing is not None:
            await asyncio.shield(finishing)

    async def _claim(self, slot: Slot, requests: list[WriteRequest]) -> tuple[list[ClaimedRequest], list[WriteRequest]]:
        """Claim a group for the slot in its term; answers what is to be written, and claims that are not wanted.

        What needs no writing gets its answer, and so does what cannot be written now. Whatever this raises, nothing of
        the group was sent.
        """
        started = time.perf_counter()
        waited_s = time.monotonic() - requests[0].arrived
        for request in requests:
            request.move(RequestEvent.CLAIM)
        if self._queue.suspects(requests):
            await self._topic_metadata.refresh({event.topic for request in requests for event in request.events})
        partitions, left_out = route(requests, self._topic_metadata.last_known)
        if any(request.is_whole for request in left_out):
            requests[:] = parted(requests, left_out.__contains__)
            partitions, left_out = route(requests, self._topic_metadata.last_known)
        if partitions and requests[0].guarantee is Guarantee.EXACTLY_ONCE:
            slot.open(partitions)
        self._telemetry.stage_queue.observe(waited_s)  # only now: `open` waits longest for its answer
        try:
            if requests[0].atomic:
                claims = [await slot.claim_all(requests[0].asked)]
            else:
                claims = await slot.claim([pair for request in requests for pair in request.asked])
                if len(claims) > len(requests):
                    claims = part_mixed(requests, claims)
        except StoreAway:  # nothing was claimed: the term goes on
            self._queue_again(requests)
            await asyncio.sleep(AWAY_PAUSE_S)
            return [], []
        self._telemetry.stage_claim.observe(time.perf_counter() - started)
        if requests[0].atomic and claims[0].outcome is Outcome.DELIVERED:
            await self._answer_members(requests[0], claims[0])
            return [], []
        # From here to the sending nothing is awaited: a deadline cannot pass in between and be answered 503.
        with self._response_buffer.together(len(requests)):
            group, claims_to_release, refused = self._sort(requests, claims, left_out)
        if refused:
            self._queue_again(refused)
            if not group:
                await asyncio.sleep(AWAY_PAUSE_S)
        return group, claims_to_release

    def _sort(
        self, requests: Sequence[WriteRequest], claims: Sequence[Claim], left_out: Mapping[WriteRequest, Partition]
    ) -> tuple[list[ClaimedRequest], list[WriteRequest], list[WriteRequest]]:
        """What claims found: to be written, claims that are not wanted, and what the store took no claim of."""
        now = time.monotonic()
        group: list[ClaimedRequest] = []
        claims_to_release: list[WriteRequest] = []
        refused: list[WriteRequest] = []
        ahead: set[tuple[BatchChunk, str]] = set()  # trains, and topics of theirs, of which one goes round again
        for request, claim in zip(requests, claims, strict=True):
            if claim.outcome is Outcome.REFUSED:
                refused.append(request)
            elif claim.outcome not in CLAIMABLE:
                self._settle(request, claim, now)
                if request.train is not None and not request.answered:
                    ahead.add((request.train, request.topic))
            elif request.answered or request.deadline <= now:  # also after a pause of the whole process: never sent
                self._answer(request, self._too_late(request))
                claims_to_release.append(request)
            elif request in left_out:
                self._answer(request, _too_few_replicas(*left_out[request]))
                claims_to_release.append(request)
            elif ahead and (request.train, request.topic) in ahead:
                request.move(RequestEvent.QUEUE)
                claims_to_release.append(request)
            else:
                assert isinstance(claim.state, Claimed)
                request.accepted_at = claim.state.at
                request.move(RequestEvent.WIN)
                group.append((request, claim.state))
                if request.accepted is not None:
                    self._accept(request)
        return group, claims_to_release, refused

    def _queue_again(self, requests: Sequence[WriteRequest]) -> None:
        """Redis took no claim of these: it is made anew, by whoever comes first."""
        for request in requests:
            request.move(RequestEvent.QUEUE)
        self._queue.put_back(requests)

    async def _release(self, slot: Slot, claims_to_release: Sequence[WriteRequest]) -> None:
        """Give up claims that are not to be written now; without an answer it may run late, which ends the term.

        What has no answer yet goes round again.
        """
        try:
            await slot.release([id for request in claims_to_release for id, _ in request.asked])
        except (StoreLost, StoreAway, StoreUnanswered) as error:
            raise StoreUnanswered(f"a release is open: {error}") from error
        self._queue.put_back(claims_to_release)

    def _settle(self, request: WriteRequest, claim: Claim, now: float) -> None:
        """What a claim found that leaves nothing to write; `now` by time.monotonic."""
        doubtful = request.state is RequestState.CHECKING
        if self._waiters and claim.outcome is not Outcome.IN_PROGRESS:
            self._waiters.release(request.asked[0][0])
        match claim.outcome, claim.state:
            case Outcome.DELIVERED, Delivered() as found:
                # In doubt before: it was this very request's own writing, so this is its first answer.
                places = ((request.events[0].id, found),)
                self._answer(request, Committed(found.at, places, replayed=not doubtful))
            case Outcome.IN_PROGRESS, Claimed(slot, term) if doubtful or (slot, term) in request.claimants:
                request.move(RequestEvent.QUEUE)
                self._parked.append(request)  # its own claim, in a term that is still to be recovered
            case Outcome.IN_PROGRESS, _:
                if not claim.leased:
                    self.hurry()
                if now < request.wait_deadline:
                    self._wait_for_another(request)
                    return
                self._answer(request, _in_progress())
            case Outcome.CONFLICT, _:
                self._answer(request, Problem(FINGERPRINT_MISMATCH, "Idempotency-Key: use a new key for a new event"))
            case _:  # that no claim finds: what it means is not known, so nothing final may be told
                log.error("bug: a claim found what it cannot", outcome=claim.outcome.value, state=repr(claim.state))
                self._answer(request, Problem(OUTCOME_UNKNOWN, "Idempotency-Key: send it again with the same key"))

    def _wait_for_another(self, request: WriteRequest) -> None:
        """Another writes the request's key: it is claimed again later."""
        request.move(RequestEvent.QUEUE)
        self._waiters.wait(request)
        if not request.waits:
            request.waits = True
            asyncio.get_running_loop().call_at(request.wait_deadline, self._wait_no_longer, request)

    def _wait_no_longer(self, request: WriteRequest) -> None:
        """Its patience is over, and maybe no slot is there that would claim it again and tell."""
        won = request.accepted_at != 0  # since, a claim of its own: it waits for nobody
        if request.state is RequestState.QUEUED and not won:
            self._answer(request, _in_progress())

    async def _answer_members(self, request: WriteRequest, claim: Claim) -> None:
        """The stored answer of an atomic batch: where each member is."""
        doubtful = request.state is RequestState.CHECKING
        request.move(RequestEvent.FIND)  # no deadline may say from here on that it is not written
        again = Problem(OUTCOME_UNKNOWN, "Idempotency-Key: it is written; send it again to learn where")
        try:
            epoch = await asyncio.wait_for(self._store.settled(), self._settings.request_timeout_ms / 1000)
            states = await self._keys.find_all(epoch, [event.id for event in request.events])
        except (StoreLost, StoreAway, StoreUnanswered, TimeoutError):
            self._answer(request, again)
            return
        pairs = zip(request.events, states, strict=True)
        places = tuple((event.id, state) for event, state in pairs if isinstance(state, Delivered))
        whole = len(places) == len(request.events)
        self._answer(request, Committed(claim.state.at, places, replayed=not doubtful) if whole else again)

    async def _deliver(self, slot: Slot, group: Sequence[ClaimedRequest]) -> Written:
        """Write a claimed group as its guarantee says."""
        started = time.perf_counter()
        exactly_once = group[0][0].guarantee is Guarantee.EXACTLY_ONCE
        with self._traced(slot, group):
            written = await (self._deliver_once(slot, group) if exactly_once else self._deliver_plain(slot, group))
        self._telemetry.stage_kafka.observe(time.perf_counter() - started)
        self._telemetry.groups.observe(sum(len(request.events) for request, _ in group))
        return written

    def _traced(self, slot: Slot, group: Sequence[ClaimedRequest]) -> contextlib.AbstractContextManager[None]:
        if self._tracing is None:
            return UNTRACED
        return self._tracing.sending(slot.n, [request for request, _ in group])

    async def _deliver_once(self, slot: Slot, group: Sequence[ClaimedRequest]) -> Written:
        """Write a group in one transaction. Raises TransactionFailed: all of it is in doubt, see `_doubt`."""
        records = self._records(slot, group, slot.producer.producer_id, slot.producer.epoch)
        delivered: list[CommittedRequest] = []
        for request, _ in group:
            request.move(RequestEvent.SEND)

        def entries(places: Sequence[RecordMetadata]) -> Iterator[str]:
            delivered.extend(placed_all(group, records, places))
            return entries_of(delivered)

        try:
            link = await slot.write(records, entries, topic_ids_of(records, self._topic_metadata.last_known))
        except TransactionFailed as failed:
            await self._doubt(slot, [request for request, _ in group], failed)
            raise
        return Written(delivered, link, [])

    async def _deliver_plain(self, slot: Slot, group: Sequence[ClaimedRequest]) -> Written:
        """Write events whose guarantee is `idempotent`: no transaction and no ledger.

        What has no clean answer is in doubt at once (504), and its claim is released: a retry writes it again. What was
        surely not appended goes round again.
        """
        identity = await slot.plain.identity()
        written = Written([], slot.unlinked(), [request for request, _ in group if request.answered])
        group = [(request, claim) for request, claim in group if not request.answered]
        records = self._records(slot, group, *identity)
        for request, _ in group:
            request.move(RequestEvent.SEND)
        try:
            fates = await slot.plain.write(records)
        except KafkaAway:  # nothing was sent
            for request, _ in group:
                request.move(RequestEvent.REFUSE)
            self._park(slot, [request for request, _ in group])
            raise
        others_went = any(isinstance(fate, RecordMetadata) for fate in fates)
        blamed = any(isinstance(fate, NotSent) and fate.itself for fate in fates)
        for (request, claim), record, fate in zip(group, records, fates, strict=True):
            if isinstance(fate, RecordMetadata):
                written.delivered.extend(placed_all([(request, claim)], [record], [fate]))
                continue
            written.claims_to_release.append(request)
            if isinstance(fate, NotSent):
                if fate.itself or not blamed:
                    self._set_apart(request)
                request.move(RequestEvent.REFUSE)
            elif fate is None:
                if others_went:  # what hangs is its topic, which must not hold up the others again
                    self._set_apart(request)
                self._answer(request, Problem(OUTCOME_UNKNOWN, "Idempotency-Key: a retry writes it again"))
            elif self._travels_on(request, request.topic, fate, alone=len(group) == 1):
                request.move(RequestEvent.REFUSE)
        return written

    def _records(self, slot: Slot, group: Sequence[ClaimedRequest], producer_id: int, epoch: int) -> list[Record]:
        writer = stamp_writer(slot.n, producer_id, epoch, self._settings.name)
        return records_of(group, self._topic_metadata.last_known, writer, self._now_ms())

    def _finish_apart(self, slot: Slot, written: Written) -> asyncio.Task[None]:
        """Mark and answer a committed group while the slot goes on with the next."""
        task: asyncio.Task[None] = asyncio.create_task(self._finish(slot, written), name=f"mark-{slot.n}")
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        heard(task, "mark", self._telemetry)
        return task

    async def _finish(self, slot: Slot, written: Written) -> None:
        started = time.perf_counter()
        rows = rows_of(written.delivered)
        if not rows:
            return
        try:
            await slot.mark(written.link, rows)
            if self._waiters:
                for id, _ in rows:
                    self._waiters.release(id)
        except (StoreLost, StoreAway, StoreUnanswered) as error:
            # The ledger has it: the events are committed, whatever Redis knows of them by now.
            self._telemetry.marks_failed.inc()
            if isinstance(error, StoreLost):
                self._store.lost(written.link.epoch)
        self._telemetry.stage_mark.observe(time.perf_counter() - started)
        self._queue.release(there.topic for _, committed in written.delivered for _, there in committed.places)
        with self._response_buffer.together(len(written.delivered)):
            for request, committed in written.delivered:
                self._answer(request, committed)

    # ----------------------------------------------------------------------------------------------------- doubt

    async def _doubt(self, slot: Slot, requests: Sequence[WriteRequest], failed: TransactionFailed) -> None:
        """A group did not commit cleanly. Its poison is answered if it was alone; the others go round again.

        They wait for the recovery if a commit may have been asked for. If it was not, their claims are given up, and
        they go at once, the first time. What goes on failing would end the term of one slot after the other: from then
        on it pauses, if nobody else is to blame; and so does what is for a topic that may have been made just now.
        """
        requests = parted(requests)
        aborted = failed.verdict is TransactionOutcome.ABORTED
        # Where a commit was asked for, what was refused on the way has been overcome, or is not what ended it.
        refusals = failed.refusals if aborted else {}
        culprits = {*failed.stuck, *refusals}
        ledger_full = self._ledger in refusals and refusals[self._ledger].kind is TOO_LARGE
        if ledger_full:  # it takes less than it did
            self._queue.ledger_bytes_max = max(1, sum(request.ledger_bytes for request in requests) // 2)
        at_once: list[WriteRequest] = []
        later: list[WriteRequest] = []
        for request in requests:
            topics = {event.topic for event in request.events}
            refused = next((topic for topic in topics if topic in refusals), None)
            alone = len(requests) == 1
            if ledger_full and alone and request.atomic:
                self._answer(request, Problem(TOO_LARGE, "events: the ledger takes fewer in one transaction"))
                continue
            if refused is not None and not self._travels_on(request, refused, refusals[refused], alone):
                continue
            if not topics.isdisjoint(failed.stuck):
                self._set_apart(request)
            blamed = aborted and (not culprits or not topics.isdisjoint(culprits) or (ledger_full and alone))
            request.aborts += blamed
            absent = refused is not None and refusals[refused].kind is UNKNOWN_TOPIC
            (later if absent or (blamed and request.aborts > 1) else at_once).append(request)
        given_up = False
        try:
            given_up = aborted and await self._give_up(slot, requests)
        finally:
            for request in requests:
                request.move(RequestEvent.REFUSE if given_up else RequestEvent.DOUBT)
            if not given_up:
                self._parked += requests
        if given_up:
            self._queue.put_back(at_once)
        if given_up and later:
            pause_s = min(ABORTED_PAUSE_S * 2 ** max(each.aborts for each in later), ABORTED_PAUSE_MOST_S)
            asyncio.get_running_loop().call_later(pause_s, self._queue.put_back, later)

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
        slot.doubtful = 0
        return True

    def _travels_on(self, request: WriteRequest, topic: str, refusal: RecordError, alone: bool) -> bool:
        """The broker refuses a record of a request, for this topic: answer it if it was alone, else let it travel so.

        That a topic is not there is believed at the second time: one that was just made is not known everywhere yet.
        """
        self._set_apart(request)
        if not alone or (refusal.kind is UNKNOWN_TOPIC and request.failures < 2):
            return True
        if refusal is OUTSIDE_BOUNDS and any(each.topic == topic and each.timestamp is None for each in request.events):
            # The time was given here, so that the clocks are at fault, which is no final answer to anybody.
            self._answer(request, Problem(NOT_WRITTEN, f"timestamp: {topic} does not take this machine's time now"))
            return False
        self._answer(request, Problem(refusal.kind, f"topic: {topic}: {refusal.why}"))
        return False

    def _set_apart(self, request: WriteRequest) -> None:
        request.failures += 1
        for topic in {event.topic for event in request.events}:
            self._queue.quarantine(topic)
            self._topic_metadata.invalidate(topic)

    def recovered(self) -> None:
        """A slot has been recovered, or time has passed: what waits for that is claimed anew, which tells its fate."""
        parked, self._parked = self._parked, []
        self._queue.put_back(parked)

    def _wait_again(
        self, slot: Slot, requests: Sequence[WriteRequest], claims_to_release: Sequence[WriteRequest]
    ) -> None:
        """The term has ended: what was not sent waits for the slot's recovery, for its own claim may stand there.

        So do those whose claims were not wanted, and could not be given up in time.
        """
        unsent = [request for request in requests if request.state in UNSENT]
        for request in unsent:
            request.move(RequestEvent.QUEUE)
        self._park(slot, unsent + [request for request in claims_to_release if not request.answered])

    def _park(self, slot: Slot, requests: Sequence[WriteRequest]) -> None:
        """Keep requests until a recovery: a claim of them may stand in the slot's term, and is not somebody else's."""
        for request in requests:
            request.claimants += ((slot.n, slot.term),)
        self._parked += requests

    async def settle(self) -> None:
        """Wait for the marks that are under way, also those of slots that were cancelled."""
        if self._finishing:
            await asyncio.wait(self._finishing)


def _in_progress() -> Problem:
    return Problem(IN_PROGRESS, "Idempotency-Key: send it again, with the same key")


def _too_few_replicas(topic: str, partition: int) -> Problem:
    return Problem(NOT_WRITTEN, f"topic: partition {partition} of {topic} has too few replicas in sync: send it again")
