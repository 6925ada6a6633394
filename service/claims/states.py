"""The states of a key, a slot and a request: the rules of the first, and the tables by which the others move.

The rules for keys are pure functions over small values. `claims.lua` says the same in Redis (held to it by one suite of
vectors and one contract suite), the in-memory store of the tests runs them as they are, and so does the model. The
values are msgspec's, as elsewhere on the path: one costs a fifth of a NamedTuple, and the collector skips it.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final, Generic, TypeVar

import msgspec


class _Name(Enum):
    """Names of states and moves. One is equal to itself only, so its identity is its hash: Enum's own is slower."""

    __hash__ = object.__hash__


# ---------------------------------------------------------------------------------------------------------- keys


class Claimed(msgspec.Struct, frozen=True, gc=False):
    """ "Slot `slot` in term `term` is writing this id": accepted at `at` (ms, Redis's clock)."""

    slot: int
    term: int
    at: int
    fp: bytes


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """The id is in Kafka, here. `at` is accepted_at, `ts` the record's timestamp, both in ms."""

    at: int
    fp: bytes
    topic: str
    partition: int
    offset: int
    ts: int


class DeliveredBatch(msgspec.Struct, frozen=True, gc=False):
    """An atomic batch of `count` members is in Kafka; each member is Delivered under an id of its own.

    `fp` is over the fingerprints of the members in their order, so that the ledger tells it too.
    """

    at: int
    fp: bytes
    count: int


KeyState = Claimed | Delivered | DeliveredBatch | None


class Outcome(_Name):
    """What a claim found."""

    NEW = "new"  # nothing was there: the claim stands, produce
    TAKEN_OVER = "taken over"  # a dead claim was there, its write never happened: the claim stands, produce
    DELIVERED = "delivered"  # it is in Kafka: replay the answer
    CONFLICT = "conflict"  # it is in Kafka, but was another event
    IN_PROGRESS = "in progress"  # somebody may be writing it
    UNREADABLE = "unreadable"  # it holds what no script writes: nothing is known of the key, and nothing stands
    REFUSED = "refused"  # the store takes no more writes, and has nothing to tell of it: nothing stands


CLAIMABLE: Final = frozenset({Outcome.NEW, Outcome.TAKEN_OVER})


class Claim(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one claim and the state that it left; `leased` tells of an IN_PROGRESS whether its slot lives."""

    outcome: Outcome
    state: Claimed | Delivered | DeliveredBatch
    leased: bool = True


def claim(
    state: KeyState, wanted: Claimed, freed: Callable[[int], int], retention_ms: int, least_left_ms: int
) -> Claim:
    """Step 2 of writing. `wanted.at` is the store's time now; a claim of term t is dead once `freed` of its slot > t.

    A claim taken over keeps its accepted_at, so that a retry lands in the same hour of the audit, unless less than
    `least_left_ms` of its retention is left: it must not expire under the new write.
    """
    match state:
        case None:
            return Claim(Outcome.NEW, wanted)
        case Delivered(fp=fp) | DeliveredBatch(fp=fp):
            return Claim(Outcome.DELIVERED if fp == wanted.fp else Outcome.CONFLICT, state)
        case Claimed(slot, term, at):
            if freed(slot) <= term:
                return Claim(Outcome.IN_PROGRESS, state)
            kept = at if at + retention_ms - wanted.at >= least_left_ms else wanted.at
            return Claim(Outcome.TAKEN_OVER, Claimed(wanted.slot, wanted.term, kept, wanted.fp))


def claim_all(
    states: Sequence[KeyState],
    wanted: Sequence[Claimed],
    freed: Callable[[int], int],
    retention_ms: int,
    least_left_ms: int,
) -> tuple[Claim, list[Claimed]]:
    """Claim an atomic batch, the whole first and then its members: every claim stands, or none does.

    Answers the whole's claim and the states to write (none where it cannot be claimed). All get one accepted_at, so
    that they expire as one. A member that lives without its whole keeps the batch from being claimed.
    """
    claims = [
        claim(state, each, freed, retention_ms, least_left_ms) for state, each in zip(states, wanted, strict=True)
    ]
    blocking = next((c for c in claims if c.outcome not in CLAIMABLE), None)
    if blocking is None:
        at = min((state.at for state in states if state is not None), default=wanted[0].at)
        kept = at if at + retention_ms - wanted[0].at >= least_left_ms else wanted[0].at
        written = [Claimed(each.slot, each.term, kept, each.fp) for each in wanted]
        return Claim(claims[0].outcome, written[0]), written
    if claims[0].outcome in CLAIMABLE and blocking.outcome is not Outcome.IN_PROGRESS:
        return Claim(Outcome.CONFLICT, blocking.state), []
    return blocking, []


def mark(state: KeyState, slot: int, term: int, delivered: Delivered | DeliveredBatch) -> KeyState:
    """Step 4 of writing: a claim becomes delivered only if it is of this slot and term; an expired one comes back."""
    if state is None or _is_claim_of(state, slot, term):
        return delivered
    return state


def release(state: KeyState, slot: int, term: int) -> KeyState:
    """A claim that was never sent is given up, only by the slot and term that made it."""
    return None if _is_claim_of(state, slot, term) else state


def _is_claim_of(state: KeyState, slot: int, term: int) -> bool:
    return isinstance(state, Claimed) and (state.slot, state.term) == (slot, term)


def replay(state: KeyState, delivered: Delivered | DeliveredBatch, now_ms: int, retention_ms: int) -> KeyState:
    """A ledger entry read during recovery: an expired one is skipped, and none replaces an answer with a newer `at`.

    A claim always gives way, also a newer one: it was made in a store that did not know of this record.
    """
    newer = state is not None and not isinstance(state, Claimed) and state.at > delivered.at
    if newer or delivered.at + retention_ms <= now_ms:
        return state
    return delivered


# ------------------------------------------------------------------------------------------------ slots, requests

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalMove(AssertionError):
    """A state machine was asked for a move that its table does not have: a bug, and never guessed around."""


class Machine(dict[tuple[S, E], S], Generic[S, E]):
    """A table of moves: `machine[state, event]` is the state after the event; IllegalMove where there is none."""

    def __init__(self, moves: Mapping[tuple[S, E], S]) -> None:  # dict's own leaves mypy to guess a literal's types
        super().__init__(moves)

    def __missing__(self, move: tuple[S, E]) -> S:
        state, event = move
        raise IllegalMove(f"{event.name} in state {state.name}")


class SlotState(_Name):
    """A slot as its holder sees it, in the order in which recovery goes through it."""

    VACANT = "vacant"  # not this process's
    LEASED = "leased"  # 1: the lease is taken, nothing is proved
    FENCED = "fenced"  # 2: InitProducerId has returned: the old owner can never commit again
    BEGUN = "begun"  # 3: the begin record is committed: the term is known
    CHECKED = "checked"  # 4: control, read through a barrier, names the store that Redis is
    READY = "ready"  # 5, 6: the ledger is replayed and `freed` raised: claims may be made
    WRITING = "writing"  # a transaction is under way
    DOUBT = "doubt"  # the term has ended without a clean commit: recovery comes next


class SlotEvent(_Name):
    LEASE = "lease"
    FENCE = "fence"
    BEGIN = "begin"
    CHECK = "check"
    FREE = "free"
    WRITE = "write"
    COMMIT = "commit"
    FAIL = "fail"
    RECOVER = "recover"
    GIVE_BACK = "give back"


SLOT: Final = Machine[SlotState, SlotEvent](
    {
        (SlotState.VACANT, SlotEvent.LEASE): SlotState.LEASED,
        (SlotState.LEASED, SlotEvent.FENCE): SlotState.FENCED,
        (SlotState.FENCED, SlotEvent.BEGIN): SlotState.BEGUN,
        (SlotState.BEGUN, SlotEvent.CHECK): SlotState.CHECKED,
        (SlotState.CHECKED, SlotEvent.FREE): SlotState.READY,
        (SlotState.READY, SlotEvent.WRITE): SlotState.WRITING,
        (SlotState.WRITING, SlotEvent.COMMIT): SlotState.READY,
        # There is no way from DOUBT to READY but through the fence.
        (SlotState.DOUBT, SlotEvent.RECOVER): SlotState.LEASED,
        **{(state, SlotEvent.FAIL): SlotState.DOUBT for state in SlotState if state is not SlotState.VACANT},
        **{
            (state, SlotEvent.GIVE_BACK): SlotState.VACANT
            for state in SlotState
            if state not in (SlotState.VACANT, SlotState.WRITING)
        },
    }
)


class RequestState(_Name):
    """One request for one event, as far as this process knows."""

    QUEUED = "queued"  # surely not written
    CLAIMING = "claiming"  # a claim is under way; without an answer it ends the slot's term, so nothing is sent
    CLAIMED = "claimed"  # claimed and not sent
    SENT = "sent"  # in a transaction
    IN_DOUBT = "in doubt"  # was sent; a new claim will tell, after the recovery
    CHECKING = "checking"  # in doubt, and claimed anew: the claim tells what happened
    FOUND = "found"  # an atomic batch that is written: where its events are is being looked up
    ANSWERED = "answered"


class RequestEvent(_Name):
    CLAIM = "claim"
    WIN = "win"  # the claim stands
    SEND = "send"
    FIND = "find"  # the claim found it written
    QUEUE = "queue"  # back to the queue: its claim is dead, or was never made
    REFUSE = "refuse"  # refused, or no commit was asked for, and its claim was given up: surely not written
    DOUBT = "doubt"  # its transaction did not end with a clean commit
    ANSWER = "answer"


REQUEST: Final = Machine[RequestState, RequestEvent](
    {
        (RequestState.QUEUED, RequestEvent.CLAIM): RequestState.CLAIMING,
        (RequestState.CLAIMING, RequestEvent.WIN): RequestState.CLAIMED,
        (RequestState.CLAIMING, RequestEvent.FIND): RequestState.FOUND,
        (RequestState.CLAIMING, RequestEvent.QUEUE): RequestState.QUEUED,
        (RequestState.CLAIMED, RequestEvent.SEND): RequestState.SENT,
        (RequestState.CLAIMED, RequestEvent.QUEUE): RequestState.QUEUED,
        (RequestState.SENT, RequestEvent.DOUBT): RequestState.IN_DOUBT,
        (RequestState.SENT, RequestEvent.REFUSE): RequestState.QUEUED,
        (RequestState.IN_DOUBT, RequestEvent.CLAIM): RequestState.CHECKING,
        (RequestState.CHECKING, RequestEvent.WIN): RequestState.CLAIMED,
        (RequestState.CHECKING, RequestEvent.FIND): RequestState.FOUND,
        (RequestState.CHECKING, RequestEvent.QUEUE): RequestState.IN_DOUBT,
        **{
            (state, RequestEvent.ANSWER): RequestState.ANSWERED
            for state in RequestState
            if state is not RequestState.ANSWERED
        },
    }
)

# What the deadline finds: an event in one of these may be in Kafka (504), in any other it is surely not (503).
MAYBE_WRITTEN: Final = frozenset({RequestState.SENT, RequestState.IN_DOUBT, RequestState.CHECKING, RequestState.FOUND})
# What the end of a term finds that was not sent in it.
UNSENT: Final = frozenset({RequestState.CLAIMING, RequestState.CHECKING, RequestState.CLAIMED})
