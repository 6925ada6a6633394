"""The requests of a group that are not written now: they are requeued, parked, split, or wait for another's write.

A request is parked while its claim may stand, until the recovery of a slot or a heartbeat has settled the claim.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Final

from service.claims.states import UNSENT, RequestEvent, RequestState
from service.core.problems import IN_PROGRESS, NOT_WRITTEN, Problem, StoreAway, StoreLost, StoreUnanswered
from service.kafka.group_offsets import AWAY, OFFSETS_TOPIC
from service.kafka.outcomes import OffsetsRefused, TransactionFailed
from service.kafka.topics import TopicMetadataCache
from service.pipeline.attempt import Attempt
from service.pipeline.decisions import ClaimDecision, ClaimToRelease, FailureDecision, Step, offsets_problem
from service.pipeline.queue import Queue
from service.pipeline.request import WriteRequest
from service.pipeline.resolver import Resolver
from service.pipeline.waiters import Waiters
from service.slots.slot import Slot

# The pause before an aborted request is sent again, doubled with each abort. A slot's recovery takes about as long, as
# does a broker until it knows a new topic.
ABORTED_PAUSE_S: Final = 0.1
ABORTED_PAUSE_MOST_S: Final = 1.0


class Unwritten:
    """Takes back what the writer has not written, and has it claimed again when that is safe."""

    def __init__(self, queue: Queue, topic_metadata: TopicMetadataCache, resolver: Resolver, ledger: str) -> None:
        """`ledger` is the name of the ledger's topic."""
        self.parked: list[WriteRequest] = []
        self.waiters = Waiters(queue.put_back)
        self._queue = queue
        self._topic_metadata = topic_metadata
        self._resolver = resolver
        self._ledger = ledger

    # ------------------------------------------------------------------------------------------------ after the claim

    def take(self, decision: ClaimDecision) -> None:
        """Park, requeue or let wait the requests that are not written now; `release` puts back those with claims."""
        for request in decision.next[Step.PARK]:
            request.move(RequestEvent.QUEUE)
            self.parked.append(request)
        for request in decision.next[Step.WAIT]:
            self._wait_for_another(request)
        self.requeue(decision.next[Step.REQUEUE])
        for each in decision.to_release:
            if not each.request.finished:
                each.request.move(RequestEvent.QUEUE)

    def requeue(self, requests: Sequence[WriteRequest]) -> None:
        """Put requests without a claim back into the queue; any slot may claim them."""
        if requests:
            for request in requests:
                request.move(RequestEvent.QUEUE)
            self._queue.put_back(requests)

    async def release(self, slot: Slot, to_release: Sequence[ClaimToRelease]) -> None:
        """Release claims, and requeue, park or split their requests.

        Raises StoreUnanswered, which ends the term: a release that runs later could remove a newer claim of this term.
        """
        await _release(slot, [id for each in to_release for id in each.ids])
        self._queue.put_back([each.request for each in to_release if each.then is Step.REQUEUE])
        self.parked += [each.request for each in to_release if each.then is Step.PARK]
        self._split(each.request for each in to_release if each.then is Step.SPLIT)

    def _split(self, chunks: Iterable[WriteRequest]) -> None:
        """Have the coroutine of each chunk's batch send the chunk again in parts."""
        for chunk in chunks:
            if not chunk.finished and (chunk.collector is None or not chunk.collector.send_again(chunk)):
                self._resolver.resolve(chunk, Problem(NOT_WRITTEN, "its batch was given up: send it again"))

    def _wait_for_another(self, request: WriteRequest) -> None:
        """Claim a request again later, because another request writes its key now."""
        request.move(RequestEvent.QUEUE)
        request.accepted_at = 0  # a claim of its own that stood before was released
        self.waiters.wait(request)
        if request.timer is None:
            request.timer = asyncio.get_running_loop().call_at(request.wait_deadline, self._end_wait, request)

    def _end_wait(self, request: WriteRequest) -> None:
        """Answer 409 at the wait deadline, also when no slot is there to claim the request again."""
        is_claimed = request.accepted_at != 0  # by this request since its last wait: then it waits for no other write
        if request.state is RequestState.QUEUED and not is_claimed:
            self._resolver.resolve(request, Problem(IN_PROGRESS, "Idempotency-Key: send it again, with the same key"))

    # ------------------------------------------------------------------------------------- after a transaction failed

    async def fail(self, slot: Slot, requests: Sequence[WriteRequest], failure: TransactionFailed) -> None:
        """Answer, requeue or park the requests of a transaction that did not commit cleanly.

        If a commit may have been requested, all are parked until the recovery. If not, their claims are released and
        they are sent again: at once the first time, later with a pause, because a request that fails each time would
        end the terms of all slots. A request for a topic that may be new waits too. A chunk with a topic that failed is
        split.
        """
        decision = FailureDecision(requests, failure, self._ledger)
        if decision.ledger_is_full:  # its topic takes smaller records than before
            self._queue.ledger_was_full(requests)
        self.note_failures(decision.failed, decision.to_isolate)
        if failure.offsets_error is not None:
            self._topic_metadata.invalidate(OFFSETS_TOPIC)
        for request in decision.aborting:
            request.aborts += 1
        self._resolver.resolve_all(decision.results)
        if await self._release_or_park(slot, requests, is_aborted=decision.is_aborted):
            self._queue.put_back(decision.at_once)
            self._requeue_later(decision.later)
            self._split(decision.split)

    async def send_again(self, slot: Slot, requests: Sequence[WriteRequest]) -> None:
        """Release the claims of a group whose transaction is aborted, and send it again after a pause, in any slot.

        Raises StoreUnanswered where the claims may still stand: its requests wait for the slot's recovery.
        """
        for request in requests:
            request.aborts += 1
        if not await self._release_or_park(slot, requests, is_aborted=True):
            raise StoreUnanswered("a release of an aborted transaction is open")
        self._requeue_later(requests)

    async def refuse_offsets(self, slot: Slot, request: WriteRequest, refused: OffsetsRefused) -> None:
        """Release the claims of the batch whose offsets Kafka has refused, then answer it: its transaction is aborted.

        Raises StoreUnanswered, after the answer, where the claims may still stand.
        """
        assert request.offsets is not None
        request.move(RequestEvent.RETURN)
        if refused.error.kind is NOT_WRITTEN:
            self._topic_metadata.invalidate(OFFSETS_TOPIC)  # its replicas may be out of sync by now
        if refused.error is AWAY:
            self.note_failures([request], [request.offsets.isolation_name])
        else:  # the group's coordinator answers
            self._queue.release([request.offsets.isolation_name])
        try:
            await _release(slot, request.claimed_ids)
        finally:
            self._resolver.resolve(request, offsets_problem(refused.error))

    def _requeue_later(self, requests: Sequence[WriteRequest]) -> None:
        """Put aborted requests back into the queue after the pause of the one with the most aborts."""
        if requests:
            pause_s = min(ABORTED_PAUSE_S * 2 ** max(each.aborts for each in requests), ABORTED_PAUSE_MOST_S)
            asyncio.get_running_loop().call_later(pause_s, self._queue.put_back, requests)

    async def _release_or_park(self, slot: Slot, requests: Sequence[WriteRequest], *, is_aborted: bool) -> bool:
        """Release the claims of a failed transaction's requests; False: they may stand, and the recovery settles them.

        `is_aborted`: no commit was requested. Otherwise nothing is released.
        """
        is_released = False
        try:
            is_released = is_aborted and await self._release_aborted(slot, requests)
        finally:
            for request in requests:
                request.move(RequestEvent.RETURN if is_released else RequestEvent.DOUBT)
            if not is_released:
                self.parked += requests
        return is_released

    async def _release_aborted(self, slot: Slot, requests: Sequence[WriteRequest]) -> bool:
        """Release the claims of an aborted transaction, so that any slot may write its requests; False: they may stand.

        The transaction can never commit, because no commit was requested. The slot's own recovery may take hours: abort
        markers need the replicas of every partition, and until a dead broker leaves the ISR all its partitions hang.
        """
        try:
            await slot.release([id for request in requests for id in request.claimed_ids])
        except (StoreLost, StoreAway, StoreUnanswered):
            return False
        slot.in_doubt = 0
        return True

    def note_failures(self, requests: Iterable[WriteRequest], to_isolate: Iterable[str]) -> None:
        """Isolate what failed a group, by name, and count the failure of the requests that depend on it."""
        for request in requests:
            request.failures += 1
        names = set(to_isolate)
        self._queue.isolate(names)
        for name in names:
            self._topic_metadata.invalidate(name)

    # ------------------------------------------------------------------------------------------ after the end of a term

    async def end_term(self, attempt: Attempt, error: BaseException) -> None:
        """Park the requests of a group whose term has ended and that were not sent: their claims may stand.

        Requests with claims to release are parked too, unless the release succeeds.
        """
        slot, group, to_release = attempt.slot, attempt.group, attempt.to_release
        try:
            if to_release and isinstance(error, TransactionFailed):
                # Released now: the slot's recovery may take long, and these requests were not sent.
                with contextlib.suppress(StoreUnanswered):
                    await self.release(slot, to_release)
                    to_release = []
        finally:
            unsent = [
                request
                for request in group.requests
                if request.state in UNSENT and request.group_number == group.number  # else it is in a later group
            ]
            for request in unsent:
                request.move(RequestEvent.QUEUE)
            self.park(slot, unsent + [each.request for each in to_release if not each.request.finished])

    def park(self, slot: Slot, requests: Sequence[WriteRequest]) -> None:
        """Keep requests until a recovery. A claim of the slot's current term that they meet later is their own."""
        for request in requests:
            request.claimants += ((slot.n, slot.term),)
        self.parked += requests

    def recovered(self) -> None:
        """Claim the parked requests again, after the recovery of a slot or a heartbeat: the claim finds the outcome."""
        parked, self.parked = self.parked, []
        self._queue.put_back(parked)


async def _release(slot: Slot, ids: Sequence[bytes]) -> None:
    """Release claims of the slot's term. Raises StoreUnanswered for any release that may still come."""
    try:
        await slot.release(ids)
    except (StoreLost, StoreAway, StoreUnanswered) as error:
        raise StoreUnanswered(f"a release is open: {error}") from error
