"""The states of a key, a slot and a request: rules for keys, and transition tables for slots and requests.

The rules for keys are pure functions. `claims.lua` implements them in Redis, which one suite of test vectors and one
contract suite check. The tests' in-memory store and the model call the functions themselves. Values are msgspec Structs
without garbage collection, because many are made for each group.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final, Generic, TypeVar

import msgspec

from service.core.identity_enum import IdentityEnum

# ---------------------------------------------------------------------------------------------------------- keys


class Claimed(msgspec.Struct, frozen=True, gc=False):
    """Slot `slot` in term `term` is writing this id. `at` is accepted_at, ms by Redis's clock."""

    slot: int
    term: int
    at: int
    fp: bytes


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """The id is in Kafka at these coordinates. `at` is accepted_at, `ts` the record's timestamp, both in ms.

    `ttl_s` is the key's retention by a rule, in seconds; 0 for the service's own. `refused` says why the event was
    refused, if it is in a quarantine topic (ledger_entries.Entry), else it is empty.
    """

    at: int
    fp: bytes
    topic: str
    partition: int
    offset: int
    ts: int
    ttl_s: int = 0
    refused: str = ""


class DeliveredBatch(msgspec.Struct, frozen=True, gc=False):
    """An atomic batch of `count` members is in Kafka; each member is Delivered under an id of its own.

    `fp` is made of the members' fingerprints in their order, so that it can be computed from the ledger too. `ttl_s` is
    that of the members.
    """

    at: int
    fp: bytes
    count: int
    ttl_s: int = 0


KeyState = Claimed | Delivered | DeliveredBatch | None
# An id, and what was delivered under it.
Row = tuple[bytes, Delivered | DeliveredBatch]


class Outcome(IdentityEnum):
    """The outcome of a claim. A claim stands only for NEW and TAKEN_OVER."""

    NEW = "new"  # the key had no state
    TAKEN_OVER = "taken over"  # the key had a dead claim, whose event was never written
    DELIVERED = "delivered"  # the event is in Kafka: replay the answer
    CONFLICT = "conflict"  # another event is in Kafka under this key
    IN_PROGRESS = "in progress"  # another claim stands: its holder may be writing the event
    UNREADABLE = "unreadable"  # the key's state cannot be decoded, so nothing is known of its event
    NOT_CLAIMED = "not claimed"  # the store takes no more writes, and the key has no state


CLAIMABLE: Final = frozenset({Outcome.NEW, Outcome.TAKEN_OVER})


class Claim(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one claim and the key's state then. `leased`: for IN_PROGRESS, whether the holder's slot is."""

    outcome: Outcome
    state: Claimed | Delivered | DeliveredBatch
    leased: bool = True


def claim(
    state: KeyState, wanted: Claimed, freed: Callable[[int], int], retention_ms: int, least_left_ms: int
) -> Claim:
    """Claim a key with this state. `wanted.at` is the store's time now; a claim of term t is dead if `freed` > t.

    A claim that is taken over keeps its accepted_at, so that the audit counts a retry in the same hour, unless less
    than `least_left_ms` of its retention is left: it must not expire during the new write.
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
    """Claim an atomic batch, all or nothing; the whole comes first in `states` and `wanted`, then its members.

    Returns the whole's claim and the states to write, none if the batch cannot be claimed. All get one accepted_at, so
    that they expire together. A delivered member whose whole has no state is a conflict.
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
    """Mark a key delivered if it holds a claim of this slot and term, or expired; else keep its state."""
    if state is None or _is_claim_of(state, slot, term):
        return delivered
    return state


def release(state: KeyState, slot: int, term: int) -> KeyState:
    """Remove a claim of this slot and term, whose event was not sent; else keep the state."""
    return None if _is_claim_of(state, slot, term) else state


def _is_claim_of(state: KeyState, slot: int, term: int) -> bool:
    return isinstance(state, Claimed) and (state.slot, state.term) == (slot, term)


def replay(state: KeyState, delivered: Delivered | DeliveredBatch, now_ms: int, retention_ms: int) -> KeyState:
    """Replay a ledger entry: an expired one is skipped, and it does not replace a delivered state with a newer `at`.

    Any claim is replaced, also a newer one: it was made in a store without this record.
    """
    newer = state is not None and not isinstance(state, Claimed) and state.at > delivered.at
    if newer or delivered.at + retention_ms <= now_ms:
        return state
    return delivered


# ------------------------------------------------------------------------------------------------ slots, requests

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalMove(AssertionError):
    """A move that the table of a state machine does not have: a bug."""


class Machine(dict[tuple[S, E], S], Generic[S, E]):
    """A table of moves: `machine[state, event]` is the state after the event; IllegalMove where there is none."""

    def __init__(self, moves: Mapping[tuple[S, E], S]) -> None:  # for mypy, which infers too narrow types without it
        super().__init__(moves)

    def __missing__(self, move: tuple[S, E]) -> S:
        state, event = move
        raise IllegalMove(f"{event.name} in state {state.name}")


class SlotState(IdentityEnum):
    """States of a slot for its holder, in the order of recovery."""

    VACANT = "vacant"  # not held by this process
    LEASED = "leased"  # the lease is taken
    FENCED = "fenced"  # InitProducerId has returned: the old owner can never commit again
    BEGUN = "begun"  # the begin record is committed: the term is known
    CHECKED = "checked"  # control, read through a barrier, names this Redis server as the store
    READY = "ready"  # the ledger is replayed and `freed` raised: claims may be made
    WRITING = "writing"  # a transaction is open
    DOUBT = "doubt"  # the term has ended without a clean commit: recovery is next


class SlotEvent(IdentityEnum):
    LEASE = "lease"
    FENCE = "fence"
    BEGIN = "begin"
    CHECK = "check"
    FREE = "free"
    WRITE = "write"
    COMMIT = "commit"
    ABORT = "abort"  # cleanly, and without an end of the term
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
        (SlotState.WRITING, SlotEvent.ABORT): SlotState.READY,
        # From DOUBT, READY is reached only through the fence.
        (SlotState.DOUBT, SlotEvent.RECOVER): SlotState.LEASED,
        **{(state, SlotEvent.FAIL): SlotState.DOUBT for state in SlotState if state is not SlotState.VACANT},
        **{
            (state, SlotEvent.GIVE_BACK): SlotState.VACANT
            for state in SlotState
            if state not in (SlotState.VACANT, SlotState.WRITING)
        },
    }
)


class RequestState(IdentityEnum):
    """States of a request in this process."""

    QUEUED = "queued"  # surely not written
    CLAIMING = "claiming"  # its claim is in flight; if that fails, the slot's term ends and nothing is sent
    CLAIMED = "claimed"  # claimed and not sent
    SENT = "sent"  # in a transaction
    IN_DOUBT = "in doubt"  # was sent; a new claim after the recovery will find the outcome
    CHECKING = "checking"  # in doubt, and the new claim is in flight
    FOUND = "found"  # an atomic batch that is written: its members' coordinates are being looked up
    ANSWERED = "answered"
    SPLIT = "split"  # a chunk whose events continue in other requests


class RequestEvent(IdentityEnum):
    CLAIM = "claim"
    WIN = "win"  # the claim stands
    SEND = "send"
    FIND = "find"  # the claim found it written
    QUEUE = "queue"  # back to the queue: its claim is dead, or was not made
    RETURN = "return"  # its claim was released after a refusal or an abort: surely not written
    DOUBT = "doubt"  # its transaction did not end with a clean commit
    ANSWER = "answer"
    SPLIT = "split"


# States that a request does not leave.
FINISHED: Final = frozenset({RequestState.ANSWERED, RequestState.SPLIT})

REQUEST: Final = Machine[RequestState, RequestEvent](
    {
        (RequestState.QUEUED, RequestEvent.CLAIM): RequestState.CLAIMING,
        (RequestState.CLAIMING, RequestEvent.WIN): RequestState.CLAIMED,
        (RequestState.CLAIMING, RequestEvent.FIND): RequestState.FOUND,
        (RequestState.CLAIMING, RequestEvent.QUEUE): RequestState.QUEUED,
        (RequestState.CLAIMED, RequestEvent.SEND): RequestState.SENT,
        (RequestState.CLAIMED, RequestEvent.QUEUE): RequestState.QUEUED,
        (RequestState.SENT, RequestEvent.DOUBT): RequestState.IN_DOUBT,
        (RequestState.SENT, RequestEvent.RETURN): RequestState.QUEUED,
        (RequestState.IN_DOUBT, RequestEvent.CLAIM): RequestState.CHECKING,
        (RequestState.CHECKING, RequestEvent.WIN): RequestState.CLAIMED,
        (RequestState.CHECKING, RequestEvent.FIND): RequestState.FOUND,
        (RequestState.CHECKING, RequestEvent.QUEUE): RequestState.IN_DOUBT,
        **{(state, RequestEvent.ANSWER): RequestState.ANSWERED for state in RequestState if state not in FINISHED},
        # A chunk is split before or after its claims, or after a write without a transaction; never while in doubt.
        (RequestState.QUEUED, RequestEvent.SPLIT): RequestState.SPLIT,
        (RequestState.CLAIMING, RequestEvent.SPLIT): RequestState.SPLIT,
        (RequestState.CHECKING, RequestEvent.SPLIT): RequestState.SPLIT,
        (RequestState.SENT, RequestEvent.SPLIT): RequestState.SPLIT,
    }
)

# States of a request whose event may be in Kafka: its deadline answers 504, in any other state 503.
MAYBE_WRITTEN: Final = frozenset({RequestState.SENT, RequestState.IN_DOUBT, RequestState.CHECKING, RequestState.FOUND})
# States of a request that was not sent when its term ended.
UNSENT: Final = frozenset({RequestState.CLAIMING, RequestState.CHECKING, RequestState.CLAIMED})
