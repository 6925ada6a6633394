"""One state of the model: two processes, two slots, one request's keys, Kafka and the stores, as nested tuples.

All of it is immutable and hashes at the speed of tuples. Keys' states are held as small numbers; `encode` and `decode`
turn them into the values of `service.claims.states` and back, so that the service's own functions move them. What the
protocol never looks at is left out: clocks (no key expires), values, data offsets.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Final, NamedTuple, TypeVar

from service.claims.states import (
    REQUEST,
    SLOT,
    Claimed,
    Delivered,
    DeliveredBatch,
    IllegalMove,
    KeyState,
    Machine,
    RequestEvent,
    RequestState,
    SlotEvent,
    SlotState,
)

NONE: Final = -1
OLDER: Final = 1 << 30  # more than any store has
FREE: Final = -2  # the lease of a slot that was given back in order; without an owner and not in order it is NONE
REFUSED: Final = 2  # instead of a process: the request that wrote it has been answered 503
PROCESSES: Final = (0, 1)
SLOTS: Final = (0, 1)
# In a ledger partition: the record of a transaction whose marker is not there yet; it ends what may be read.
OPEN: Final = -1
# What a marker says.
ABORT, COMMIT = 0, 1

# ------------------------------------------------------------------------------------------------ states of keys

FP: Final = b"fingerpr"
RETENTION_MS: Final = 1_000
LEAST_LEFT_MS: Final = 10
ONE: Final = Delivered(0, FP, "topic", 0, 0, 0)
WHOLE: Final = DeliveredBatch(0, FP, 2)

_ABSENT, _DELIVERED, _BATCH, _CLAIMED = range(4)


def encode(state: KeyState) -> int:
    """A key's state as a number."""
    match state:
        case None:
            return _ABSENT
        case Delivered():
            return _DELIVERED
        case DeliveredBatch():
            return _BATCH
        case Claimed(slot, term):
            return _CLAIMED + slot + len(SLOTS) * term


def decode(number: int) -> KeyState:
    """The inverse of `encode`; accepted at 0 ms, which is always now."""
    if number < _CLAIMED:
        return (None, ONE, WHOLE)[number]
    return Claimed((number - _CLAIMED) % len(SLOTS), (number - _CLAIMED) // len(SLOTS), 0, FP)


# --------------------------------------------------------------------------------- states of slots and requests

_S = TypeVar("_S", bound=Enum)
_E = TypeVar("_E", bound=Enum)


def _table(machine: Machine[_S, _E], states: Iterable[_S], events: Iterable[_E]) -> dict[tuple[int, _E], int]:
    """The service's machine over the numbers of its states, by asking it for every move."""
    numbers = {state: number for number, state in enumerate(states)}
    table = {}
    for event in events:
        for state, number in numbers.items():
            try:
                table[number, event] = numbers[machine[state, event]]
            except IllegalMove:
                continue
    return table


_SLOT_STATES: Final = tuple(SlotState)
_REQUEST_STATES: Final = tuple(RequestState)
_SLOT_MOVES: Final = _table(SLOT, _SLOT_STATES, SlotEvent)
_REQUEST_MOVES: Final = _table(REQUEST, _REQUEST_STATES, RequestEvent)

VACANT, LEASED, FENCED, BEGUN, CHECKED, READY, WRITING, DOUBT = (
    _SLOT_STATES.index(state)
    for state in (
        SlotState.VACANT,
        SlotState.LEASED,
        SlotState.FENCED,
        SlotState.BEGUN,
        SlotState.CHECKED,
        SlotState.READY,
        SlotState.WRITING,
        SlotState.DOUBT,
    )
)
QUEUED, CLAIMED, SENT, IN_DOUBT = (
    _REQUEST_STATES.index(state)
    for state in (RequestState.QUEUED, RequestState.CLAIMED, RequestState.SENT, RequestState.IN_DOUBT)
)


def slot_move(state: int, *events: SlotEvent) -> int:
    """A slot's state after `events`, by the service's table. IllegalMove where it has no such move."""
    for event in events:
        if (state, event) not in _SLOT_MOVES:
            raise IllegalMove(f"{event.name} in state {_SLOT_STATES[state].name}")
        state = _SLOT_MOVES[state, event]
    return state


def request_move(state: int, *events: RequestEvent) -> int:
    """A request's state after `events`, by the service's table. IllegalMove where it has no such move."""
    for event in events:
        if (state, event) not in _REQUEST_MOVES:
            raise IllegalMove(f"{event.name} in state {_REQUEST_STATES[state].name}")
        state = _REQUEST_MOVES[state, event]
    return state


def request_state(state: int) -> RequestState:
    """The service's name of a request's state."""
    return _REQUEST_STATES[state]


# ------------------------------------------------------------------------------------------------------- the parts


class Txn(NamedTuple):
    """The transaction under way at a slot's coordinator."""

    copies: tuple[int, ...]  # events in it, by event
    record: int  # the offset of its ledger record, NONE before that is sent
    holds: int  # does the record name the events? (a begin record does not)
    by: int  # the process whose open request wrote the events, NONE or REFUSED
    decided: bool = False  # PrepareCommit: its markers are still to be written
    data: tuple[bool, ...] = ()  # which data partitions belong to it; the ledger's does with its record


class Hung(NamedTuple):
    """A transaction that its coordinator has completed, and that stays open where its marker never came.

    Each event has a data partition of its own; another key's event goes to that of the first.
    """

    copies: tuple[int, ...]  # records that are open in the data partitions
    ledger: bool  # is its ledger record open?
    record: int  # its ledger record's offset, NONE where it has none
    holds: int
    data: tuple[bool, ...]
    marker: int  # what the marker says in those of its partitions that have one: ABORT, COMMIT, or NONE
    refused: bool  # its request was answered 503 or 4xx
    named: bool  # does the next recovery of its slot know by itself of the data partitions?


class Part(NamedTuple):
    """A slot in Kafka: the coordinator of its transactional id, and its ledger partition."""

    owner: int  # the newest producer: id and epoch as one number that never comes again
    epoch: int  # its epoch alone, which does
    txn: Txn | None
    ledger: tuple[int, ...]  # by offset: OPEN, 1 (names the events) or 0 (names none of them, or was aborted)
    hung: tuple[Hung, ...] = ()


class Store(NamedTuple):
    """What a Redis holds."""

    generation: int
    named: int  # the store that the generation names
    nonce: int  # of the store recovery under way, NONE where there is none
    freed: tuple[int, ...]
    applied: tuple[int, ...]
    keys: tuple[int, ...]
    claims: int = NONE  # how many calls have claimed something; NONE where no store becomes an older copy of itself


class Debt(NamedTuple):
    """A committed ledger record that is still to be marked."""

    generation: int
    store: int
    term: int
    previous: int
    offset: int
    holds: int


class View(NamedTuple):
    """A slot as a process sees it."""

    state: int = VACANT
    owner: int = NONE  # its producer
    term: int = NONE
    generation: int = NONE
    store: int = NONE
    last: int = NONE  # the offset of its last ledger record
    owed: tuple[Debt, ...] = ()
    unwanted: bool = False  # a claim that is to be released
    checked: bool = False  # in this term nothing hung in the data partitions when it first wrote to them


# How far a request's transaction is, in SENT.
EVENTS_SENT, RECORD_SENT, COMMITTED = 1, 2, 3


class Request(NamedTuple):
    """The one open request of a process: a single event, or an atomic pair."""

    state: int = QUEUED
    slot: int = NONE
    phase: int = 0
    wrote: bool = False  # something that this request sent has been committed
    answered: bool = False  # 504 was said while its transaction was under way, which goes on


class Recovery(NamedTuple):
    """A store recovery under way; `done` counts its steps."""

    done: int
    nonce: int
    generation: int = NONE
    starts: tuple[int, ...] = ()
    through: tuple[int, ...] = ()


class Process(NamedTuple):
    """One process: the store that its address leads to, its generation, its slots, its request."""

    address: int
    generation: int
    store: int
    recovery: Recovery | None
    views: tuple[View, ...]
    request: Request | None
    claims_seen: int = NONE  # the most of the store's `claims`; OLDER + generation: an older copy was met


class World(NamedTuple):
    """Everything."""

    processes: tuple[Process, ...]
    parts: tuple[Part, ...]
    copies: tuple[int, ...]  # how often each event has been committed, without what hangs
    control: tuple[int, ...]  # the generations, by offset: the store that each names
    deposed: tuple[int, ...]  # how much of control and of each ledger partition a deposed leader shows; () for none
    stores: tuple[Store, ...]
    replica: Store | None  # what the replica holds, until it is promoted
    primary: int
    holders: tuple[int, ...]  # who has each slot's lease
    late: tuple[tuple[int, ...], ...]  # requests without an answer that may still arrive
    acknowledged: bool  # a 201 has been said
    wrong: str  # a violation that a step itself has seen
    left: tuple[int, ...]  # the faults that may still happen


T = TypeVar("T")


def put(items: tuple[T, ...], place: int, item: T) -> tuple[T, ...]:
    """The tuple with another item at `place`."""
    changed = list(items)
    changed[place] = item
    return tuple(changed)


def with_process(world: World, p: int, process: Process) -> World:
    """The world with another state of process `p`."""
    # What `_replace` would do, at half its cost: nothing runs more often.
    return tuple.__new__(World, (put(world.processes, p, process), *world[1:]))


def with_view(world: World, p: int, s: int, view: View) -> World:
    """The world with another view of slot `s` at process `p`."""
    process = world.processes[p]
    views = put(process.views, s, view)
    return with_process(world, p, tuple.__new__(Process, (*process[:4], views, *process[5:])))


def with_request(world: World, p: int, request: Request | None) -> World:
    """The world with another request at process `p`."""
    process = world.processes[p]
    return with_process(world, p, tuple.__new__(Process, (*process[:5], request, process.claims_seen)))


def with_part(world: World, s: int, part: Part) -> World:
    """The world with another state of slot `s` in Kafka."""
    return tuple.__new__(World, (world.processes, put(world.parts, s, part), *world[2:]))


def with_store(world: World, store: int, held: Store) -> World:
    """The world with other contents of a store."""
    return world._replace(stores=put(world.stores, store, held))
