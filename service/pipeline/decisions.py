"""Decides what happens to the requests of a group, from what was found, without I/O.

A decision takes events that need no write out of their chunk (`WriteRequest.take_out`); `start_sending` moves the
states of requests. Nothing else is changed.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

import structlog

from service.claims.states import CLAIMABLE, Claim, Claimed, Delivered, Outcome, RequestEvent, RequestState
from service.core.identity_enum import IdentityEnum
from service.core.problems import (
    FINGERPRINT_MISMATCH,
    IN_PROGRESS,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    TOO_LARGE,
    UNKNOWN_TOPIC,
    Problem,
)
from service.events.dead_letters import body_fingerprint
from service.kafka.group_offsets import OFFSETS_TOPIC, TOO_FEW_REPLICAS
from service.kafka.metadata import Partition
from service.kafka.outcomes import OUTSIDE_BOUNDS, RecordError, TransactionFailed, TransactionOutcome
from service.kafka.records import NotSent, Record, RecordMetadata, RecordResult
from service.pipeline.group import ClaimedRequest, CommittedRequest, LeftOut, committed_of
from service.pipeline.request import Delivery, Quarantined, WriteRequest, WriteResult, result_of

log = structlog.get_logger(__name__)

# A topic counts as absent at its second failure: not every broker knows a topic that was just created.
ABSENT_FAILURES: Final = 2

# Outcomes of a claim that met a key whose write has ended.
WRITE_ENDED: Final = frozenset({Outcome.DELIVERED, Outcome.CONFLICT, Outcome.UNREADABLE})
# Bound for each replay: see IdentityEnum.
_DELIVERED: Final = Outcome.DELIVERED
_CHECKING: Final = RequestState.CHECKING

NOTHING: Final[Mapping[int, Partition]] = {}

# Makes the answer of a request whose deadline has passed, by its state.
TooLate = Callable[[WriteRequest], Problem]


# ---------------------------------------------------------------------------------------------------------- claims


class Step(IdentityEnum):
    """The next step of an event that has no result yet."""

    WRITE = "write"  # its claim stands
    PARK = "park"  # its own claim stands in a term that must be recovered first: wait for the recovery
    WAIT = "wait"  # another request writes its key: wait for that write
    REQUEUE = "requeue"  # without a claim: any slot may claim it
    SPLIT = "split"  # a chunk without claims: its parts are sent one after the other


class ClaimToRelease(NamedTuple):
    """Standing claims of a request to release, and the request's next step then, unless it is answered."""

    request: WriteRequest
    ids: Sequence[bytes]
    then: Step = Step.REQUEUE


class ClaimDecision:
    """The decision after the claims of a group: write `claimed`, give `results`, and so on by the fields."""

    def __init__(self, now: float, too_late: TooLate) -> None:
        self.claimed: list[ClaimedRequest] = []
        self.results: list[tuple[WriteRequest, WriteResult]] = []
        self.to_release: list[ClaimToRelease] = []
        self.next: defaultdict[Step, list[WriteRequest]] = defaultdict(list)
        self.final_keys: list[bytes] = []  # ids whose write has ended: requests that wait for them can be answered
        self.dead_holder_met = False  # whether a claim of a slot without a lease stands
        self._now = now
        self._too_late = too_late

    def add(self, request: WriteRequest, claim: Claim, under_min_isr: Mapping[int, Partition]) -> None:
        """Decide on a request with one claim.

        `under_min_isr`: the partitions that have too few replicas in sync, by the index of the request's event.
        """
        partition = next(iter(under_min_isr.values())) if under_min_isr else None
        found = self._next(request, request.id, claim, partition)
        if found is Step.WRITE:
            self.claimed.append((request, [claim.state.at] * (len(request.events) or 1)))
        else:
            self._leave(request, claim, found)

    def add_several(
        self, request: WriteRequest, claims: Sequence[Claim], start: int, under_min_isr: Mapping[int, Partition]
    ) -> int:
        """Decide on a request of several events, whose claims begin at `start`. Returns the index after its claims."""
        if request.atomic:
            self.add(request, claims[start], under_min_isr)
            return start + 1
        end = start + len(request.events)
        own = claims[start:end]
        is_in_time = request.deadline > self._now and not request.finished
        if is_in_time and not under_min_isr and CLAIMABLE.issuperset([claim.outcome for claim in own]):
            self.claimed.append((request, [claim.state.at for claim in own]))  # the usual case
        else:
            self.add_chunk(request, own, under_min_isr)
        return end

    def add_chunk(self, request: WriteRequest, claims: Sequence[Claim], under_min_isr: Mapping[int, Partition]) -> None:
        """Decide on a chunk, which has one claim for each event."""
        pairs = zip(request.to_claim, claims, strict=True)
        found = [self._next(request, id, claim, under_min_isr.get(n)) for n, ((id, _), claim) in enumerate(pairs)]
        if with_result := [n for n, each in enumerate(found) if not isinstance(each, Step)]:
            for n, part in zip(with_result, request.take_out(with_result), strict=True):
                self._leave(part, claims[n], found[n])
            claims = [claim for claim, each in zip(claims, found, strict=True) if isinstance(each, Step)]
        steps = {each for each in found if isinstance(each, Step)}
        if steps == {Step.WRITE}:
            self.claimed.append((request, [claim.state.at for claim in claims]))
        elif steps:  # an event in doubt or without a claim holds back the others, which would overtake it
            self._hold_back(request, claims, Step.PARK if Step.PARK in steps else Step.REQUEUE)

    def _hold_back(self, request: WriteRequest, claims: Sequence[Claim], then: Step) -> None:
        """Write no event of a chunk now: release the claims that stand, and take the step `then`."""
        pairs = zip(request.to_claim, claims, strict=True)
        if stand := [id for (id, _), claim in pairs if claim.outcome in CLAIMABLE]:
            self.to_release.append(ClaimToRelease(request, stand, then))
        else:
            self.next[then].append(request)

    def _leave(self, request: WriteRequest, claim: Claim, found: Step | WriteResult) -> None:
        """Note the result or the next step of a request that is not written now."""
        if claim.outcome in WRITE_ENDED:
            self.final_keys.append(request.id)
        elif claim.outcome in CLAIMABLE:
            self.to_release.append(ClaimToRelease(request, request.claimed_ids))
        elif claim.outcome is Outcome.IN_PROGRESS:
            self.dead_holder_met |= found is not Step.PARK and not claim.leased
        if isinstance(found, Step):
            self.next[found].append(request)
        else:
            self.results.append((request, found))

    def _next(
        self, request: WriteRequest, id: bytes, claim: Claim, under_min_isr: Partition | None
    ) -> Step | WriteResult:
        """Decide what a claim means for its event: the result, or the next step."""
        outcome, state = claim.outcome, claim.state
        was_in_doubt = request.state is _CHECKING
        if outcome is _DELIVERED and isinstance(state, Delivered):
            # If the request was in doubt, its own write was found, and this is its first answer.
            return result_of((id, state), replayed=not was_in_doubt)
        if outcome in CLAIMABLE:
            if request.finished or request.deadline <= self._now:  # also after a pause of the whole process
                return self._too_late(request)
            return Step.WRITE if under_min_isr is None else _too_few_replicas(*under_min_isr)
        match outcome, state:
            case Outcome.CONFLICT, Delivered() as found if found.refused:
                return _of_quarantined_key(request, (id, found))
            case Outcome.IN_PROGRESS, Claimed(slot, term) if was_in_doubt or (slot, term) in request.claimants:
                return Step.PARK
            case Outcome.IN_PROGRESS, _:
                waits = self._now < request.wait_deadline
                return Step.WAIT if waits else Problem(IN_PROGRESS, "Idempotency-Key: send it again, with the same key")
        return Step.REQUEUE if outcome is Outcome.NOT_CLAIMED else _final(claim)


def _of_quarantined_key(request: WriteRequest, found: Delivery) -> Problem:
    """Make the result of a claim that met a dead letter with another fingerprint.

    A body from which no event could be made is the same delivery, also if the source's rule can read it now.
    """
    _, state = found
    if len(request.events) == 1 and state.fp == body_fingerprint(request.events[0].value):
        return Quarantined(found, replayed=True)
    return Problem(
        FINGERPRINT_MISMATCH,
        f"Idempotency-Key: its event was refused, and is in the quarantine topic {state.topic}: use a new key for the "
        "corrected event",
    )


def _final(claim: Claim) -> Problem:
    """Make the result of a claim that found another event under the key, or a state that cannot be read."""
    if claim.outcome is Outcome.CONFLICT:
        return Problem(FINGERPRINT_MISMATCH, "Idempotency-Key: use a new key for a new event")
    if claim.outcome is Outcome.UNREADABLE:  # logged where it was read
        why = "the stored state of this key cannot be read, so the outcome of its event is unknown"
        return Problem(OUTCOME_UNKNOWN, f"Idempotency-Key: {why}")
    # No claim has such an outcome. Its meaning is unknown, so the answer must not be final.
    log.error("bug: a claim has an impossible outcome", outcome=claim.outcome.value, state=repr(claim.state))
    return Problem(OUTCOME_UNKNOWN, "Idempotency-Key: send it again with the same key")


def _too_few_replicas(topic: str, partition: int) -> Problem:
    if topic == OFFSETS_TOPIC:
        return offsets_problem(TOO_FEW_REPLICAS)
    return Problem(NOT_WRITTEN, f"topic: partition {partition} of {topic} has too few replicas in sync: send it again")


def after_claim(
    requests: Sequence[WriteRequest], claims: Sequence[Claim], left_out: LeftOut, now: float, too_late: TooLate
) -> ClaimDecision:
    """Decide on the requests of a group by the outcomes of their claims. `now` is time.monotonic.

    An atomic batch has one claim, any other request one for each event. Events of a chunk that need no write or cannot
    be written now are taken out of the chunk. The others are written together, or none of them yet.
    """
    decision = ClaimDecision(now, too_late)
    start = 0
    claimed = decision.claimed
    for request in requests:
        claim, under_min_isr = claims[start], (left_out.get(request, NOTHING) if left_out else NOTHING)
        if len(request.events) > 1:
            start = decision.add_several(request, claims, start, under_min_isr)
            continue
        start += 1
        if claim.outcome in CLAIMABLE and not under_min_isr and request.deadline > now and not request.finished:
            claimed.append((request, (claim.state.at,)))  # the usual case, without a call
        else:
            decision.add(request, claim, under_min_isr)
    return decision


def start_sending(group: Sequence[ClaimedRequest]) -> tuple[Sequence[ClaimedRequest], list[ClaimToRelease]]:
    """Note that a claimed group is being sent: from now on the deadlines of its requests are answered 504, not 503.

    Returns what is to be sent, and the claims to release: those of requests that were answered since the claim.
    """
    late = [ClaimToRelease(request, request.claimed_ids) for request, _ in group if request.finished]
    if late:
        group = [claimed for claimed in group if not claimed[0].finished]
    send = RequestEvent.SEND
    for request, _ in group:
        request.move(send)
    return group, late


# --------------------------------------------------------------------------------------------- a failed transaction


class FailureDecision:
    """The decision after a transaction that did not commit cleanly.

    All requests are in doubt unless `is_aborted` (no commit was requested) and their claims are released. Then the
    requests in `at_once`, `later` (after a pause) and `split` (in parts) are sent again. `to_isolate` has the names of
    topics that were refused or did not answer, and of a consumer group whose coordinator failed; `failed` are the
    requests with one of them. `aborting` are the requests that may have caused the abort.
    """

    def __init__(self, requests: Sequence[WriteRequest], failure: TransactionFailed, ledger: str) -> None:
        self.results: list[tuple[WriteRequest, WriteResult]] = []
        self.at_once: list[WriteRequest] = []
        self.later: list[WriteRequest] = []
        self.split: list[WriteRequest] = []
        self.failed: list[WriteRequest] = []
        self.aborting: list[WriteRequest] = []
        self.to_isolate: dict[str, None] = {}
        self.is_aborted = failure.outcome is TransactionOutcome.ABORTED
        # If a commit was requested, a record's error did not end the transaction.
        self._record_errors = failure.record_errors if self.is_aborted else {}
        self._offsets_error = failure.offsets_error if self.is_aborted else None
        self._failing = {*failure.stuck, *self._record_errors}  # topics; the ledger's may be one of them
        self._alone = len(requests) == 1
        self.ledger_is_full = ledger in self._record_errors and self._record_errors[ledger].kind is TOO_LARGE
        for request in requests:
            self._add(request)

    def _add(self, request: WriteRequest) -> None:
        """Decide on a request of the transaction: answered, or sent again, and how."""
        if request.offsets is not None and self._offsets_error is not None:
            self.failed.append(request)
            self.to_isolate[request.offsets.isolation_name] = None
            self.results.append((request, offsets_problem(self._offsets_error)))
            return
        failing = request.topics & self._failing
        if failing:
            self.failed.append(request)
            self.to_isolate |= dict.fromkeys(failing)
        if (result := self._result_of(request, failing)) is not None:
            self.results.append((request, result))
            return
        is_too_long = self.ledger_is_full and self._alone
        is_aborting = self.is_aborted and (not self._failing or bool(failing) or is_too_long)
        if is_aborting:
            self.aborting.append(request)
        if self._is_to_be_split(request, failing):
            self.split.append(request)
        elif self._is_absent(failing) or (is_aborting and request.aborts > 0):
            self.later.append(request)
        else:
            self.at_once.append(request)

    def _result_of(self, request: WriteRequest, failing: Collection[str]) -> Problem | None:
        """Make the final answer of a request that was alone and failed; None for one that is sent again."""
        if not self._alone or request.is_chunk:
            return None
        if self.ledger_is_full and request.atomic:
            return Problem(TOO_LARGE, "events: the ledger takes fewer in one transaction")
        for topic in failing:
            if topic in self._record_errors:
                return problem_of(request, topic, self._record_errors[topic])
        return None

    def _is_to_be_split(self, request: WriteRequest, failing: Collection[str]) -> bool:
        """Whether parts of a chunk may succeed where the whole chunk failed."""
        if not request.is_chunk or not self.is_aborted:
            return False
        if self._is_absent(failing) and request.failures + 1 < ABSENT_FAILURES:
            return False
        others_too = bool(failing) and len(failing) < len(request.topics)
        return others_too or (self._alone and (bool(failing) or self.ledger_is_full))

    def _is_absent(self, failing: Collection[str]) -> bool:
        return any(
            topic in self._record_errors and self._record_errors[topic].kind is UNKNOWN_TOPIC for topic in failing
        )


class IdempotentDecision:
    """The decision after a write without a transaction, in which each record has a result of its own.

    `delivered` requests are to be marked and then answered. Claims of events that were refused or have no clean result
    are released. `requeued` are the requests with events to send again.
    """

    def __init__(
        self, group: Sequence[ClaimedRequest], records: Sequence[Record], written: Sequence[RecordResult]
    ) -> None:
        self.delivered: list[CommittedRequest] = []
        self.results: list[tuple[WriteRequest, WriteResult]] = []
        self.to_release: list[ClaimToRelease] = []
        self.requeued: list[WriteRequest] = []
        self.failed: dict[WriteRequest, None] = {}
        self.to_isolate: dict[str, None] = {}
        self._some_written = any(isinstance(each, RecordMetadata) for each in written)
        self._some_partition_failed = any(isinstance(each, NotSent) and each.partition_failed for each in written)
        self._alone = len(records) == 1
        start = 0
        for request, accepted_ats in group:
            end = start + len(request.events)
            self._add(request, accepted_ats, records[start:end], written[start:end])
            start = end

    def _add(
        self,
        request: WriteRequest,
        accepted_ats: Sequence[int],
        records: Sequence[Record],
        written: Sequence[RecordResult],
    ) -> None:
        """Decide on a request: an event with a result leaves its chunk, and the rest of the chunk is sent again."""
        metadata = [each for each in written if isinstance(each, RecordMetadata)]
        if len(metadata) == len(written):  # the usual case
            self.delivered += committed_of([(request, accepted_ats)], records, metadata)
            return
        found = [self._next(request, *each) for each in zip(records, written, strict=True)]
        if with_result := [n for n, each in enumerate(found) if not isinstance(each, Step)]:
            for n, part in zip(with_result, request.take_out(with_result), strict=True):
                self._end(part, accepted_ats[n], records[n], found[n])
        if steps := {each for each in found if isinstance(each, Step)}:
            then = Step.SPLIT if Step.SPLIT in steps else Step.REQUEUE
            self.to_release.append(ClaimToRelease(request, request.claimed_ids, then))
            self.requeued.append(request)

    def _end(
        self, part: WriteRequest, accepted_at: int, record: Record, result: RecordMetadata | Problem | Step
    ) -> None:
        """Note the result of a request with one event: where it was written, or the problem, which ends its claim."""
        if isinstance(result, RecordMetadata):
            self.delivered += committed_of([(part, [accepted_at])], [record], [result])
        elif isinstance(result, Problem):
            self.results.append((part, result))
            self.to_release.append(ClaimToRelease(part, part.claimed_ids))

    def _next(self, request: WriteRequest, record: Record, written: RecordResult) -> Step | RecordMetadata | Problem:
        """Decide what the result of a record means for its event: the event's result, or its next step."""
        if isinstance(written, RecordMetadata):
            return written
        if isinstance(written, NotSent):
            if written.partition_failed or not self._some_partition_failed:
                self._fail(request, record.topic)
            return Step.REQUEUE
        if written is None:
            if self._some_written:  # then this topic hangs, and must not delay the others again
                self._fail(request, record.topic)
            return Problem(OUTCOME_UNKNOWN, "Idempotency-Key: a retry writes it again")
        self._fail(request, record.topic)
        if request.is_chunk:
            return Step.SPLIT
        return (problem_of(request, record.topic, written) if self._alone else None) or Step.REQUEUE

    def _fail(self, request: WriteRequest, topic: str) -> None:
        self.failed[request] = None
        self.to_isolate[topic] = None


def offsets_problem(error: RecordError) -> Problem:
    """Make the answer of a batch whose offsets are refused, or kept by no coordinator."""
    return Problem(error.kind, f"offsets: {error.why}")


def problem_of(request: WriteRequest, topic: str, error: RecordError) -> Problem | None:
    """Make the answer of a request, alone in its group, whose record the broker refuses; None if it is sent again."""
    if error.kind is UNKNOWN_TOPIC and request.failures + 1 < ABSENT_FAILURES:
        return None
    if request.is_refused:  # its client has no say about the quarantine topic
        return Problem(NOT_WRITTEN, f"quarantine: {topic}: {error.why}: send it again when that is mended")
    if error is OUTSIDE_BOUNDS and any(each.topic == topic and each.timestamp is None for each in request.events):
        # The service set this timestamp, so a clock is wrong: no final answer.
        return Problem(NOT_WRITTEN, f"timestamp: {topic} does not take this machine's time now")
    return Problem(error.kind, f"topic: {topic}: {error.why}")
