"""One state of the model: two processes, two slots, one request's keys, Kafka and the stores, as nested tuples.

All of it is immutable, and hashes as fast as tuples. States of keys are small numbers; `encode` and `decode` convert
them to the values of `service.claims.states` and back, so that the service's own functions move them. The model leaves
out what the protocol does not use: clocks (no key expires), values, data offsets.
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
FREE: Final = -2  # the lease of a slot that was given back clean; NONE without an owner, not clean
REFUSED: Final = 2  # instead of a process: the request that wrote it was answered 503
PROCESSES: Final = (0, 1)
SLOTS: Final = (0, 1)
# In a ledger partition: the record of a transaction without a marker yet; reads end before it.
OPEN: Final = -1
# The kinds of a marker.
ABORT, COMMIT = 0, 1

# ------------------------------------------------------------------------------------------------ states of keys

FP: Final = b"fingerpr"
RETENTION_MS: Final = 1_000
LEAST_LEFT_MS: Final = 10
ONE: Final = Delivered(0, FP, "topic", 0, 0, 0)
WHOLE: Final = DeliveredBatch(0, FP, 2)

_ABSENT, _DELIVERED, _BATCH, _CLAIMED = range(4)


def encode(state: KeyState) -> int:
    """Encode a key's state as a number."""
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
    """Decode a number of `encode`; accepted at 0 ms, which is always now."""
    if number < _CLAIMED:
        return (None, ONE, WHOLE)[number]
    return Claimed((number - _CLAIMED) % len(SLOTS), (number - _CLAIMED) // len(SLOTS), 0, FP)


# --------------------------------------------------------------------------------- states of slots and requests

_S = TypeVar("_S", bound=Enum)
_E = TypeVar("_E", bound=Enum)


def _table(machine: Machine[_S, _E], states: Iterable[_S], events: Iterable[_E]) -> dict[tuple[int, _E], int]:
    """Convert a state machine of the service to numbers, by looking up every move."""
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
    """Return a slot's state after `events`, by the service's table. IllegalMove if the table has no such move."""
    for event in events:
        if (state, event) not in _SLOT_MOVES:
            raise IllegalMove(f"{event.name} in state {_SLOT_STATES[state].name}")
        state = _SLOT_MOVES[state, event]
    return state


def request_move(state: int, *events: RequestEvent) -> int:
    """Return a request's state after `events`, by the service's table. IllegalMove if the table has no such move."""
    for event in events:
        if (state, event) not in _REQUEST_MOVES:
            raise IllegalMove(f"{event.name} in state {_REQUEST_STATES[state].name}")
        state = _REQUEST_MOVES[state, event]
    return state


def request_state(state: int) -> RequestState:
    """Return the service's name of a request's state."""
    return _REQUEST_STATES[state]


# ------------------------------------------------------------------------------------------------------- the parts


class Txn(NamedTuple):
    """The transaction in progress at a slot's coordinator."""

    copies: tuple[int, ...]  # its events, by event
    record: int  # the offset of its ledger record, NONE before that is sent
    holds: int  # whether the record names the events (a begin record does not)
    by: int  # the process whose open request wrote the events, NONE or REFUSED
    decided: bool = False  # PrepareCommit: its markers are not written yet
    data: tuple[bool, ...] = ()  # its data partitions; the ledger's belongs to it with its record
    producer_id: int = 0  # an end at the last epoch replaces the slot's, and its markers still have this one


class Hung(NamedTuple):
    """A transaction that its coordinator has completed, and that stays open in the partitions without its marker.

    Each event has a data partition of its own; another key's event goes to that of the first.
    """

    copies: tuple[int, ...]  # open records in the data partitions
    ledger: bool  # whether its ledger record is open
    record: int  # its ledger record's offset, NONE without one
    holds: int
    data: tuple[bool, ...]
    marker: int  # the marker in those of its partitions that have one: ABORT, COMMIT, or NONE
    refused: bool  # its request was answered 503 or 4xx
    named: bool  # whether the next recovery of its slot knows the data partitions
    producer_id: int = 0  # only markers of this producer id end it


class Part(NamedTuple):
    """A slot in Kafka: the coordinator of its transactional id, and its ledger partition."""

    owner: int  # the newest producer: id and epoch as one number, which never repeats
    epoch: int  # its epoch alone, which repeats
    txn: Txn | None
    ledger: tuple[int, ...]  # by offset: OPEN, 1 (names the events) or 0 (names none of them, or was aborted)
    hung: tuple[Hung, ...] = ()
    bumps: bool = False  # transactions are of version 2: each end raises the epoch
    producer_id: int = 0


class Store(NamedTuple):
    """The data of a Redis."""

    generation: int
    named: int  # the store that the generation names
    nonce: int  # of the store recovery in progress, NONE without one
    freed: tuple[int, ...]
    applied: tuple[int, ...]
    keys: tuple[int, ...]
    claims: int = NONE  # the number of claiming calls; NONE in searches without older copies


class Debt(NamedTuple):
    """A committed ledger record that is not marked yet."""

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
    unwanted: bool = False  # a claim to release
    checked: bool = False  # in this term nothing hung in the data partitions before the first write
    trusts: bool = False  # it writes without another check after an abort (only without the rule `abort_rechecked`)
    producer_id: int = 0


# The progress of a request's transaction, in SENT.
EVENTS_SENT, RECORD_SENT, COMMITTED = 1, 2, 3
# Before it, only of a batch with offsets: these are in the transaction.
OFFSETS_SENT = 4


class Request(NamedTuple):
    """The one open request of a process: a single event, or an atomic pair."""

    state: int = QUEUED
    slot: int = NONE
    phase: int = 0
    wrote: bool = False  # something that this request sent has been committed
    answered: bool = False  # it was answered 504 during its transaction, which goes on


class Recovery(NamedTuple):
    """A store recovery in progress; `done` counts its steps."""

    done: int
    nonce: int
    generation: int = NONE
    starts: tuple[int, ...] = ()
    through: tuple[int, ...] = ()


class Process(NamedTuple):
    """One process: the store at its address, its generation, its slots, its request."""

    address: int
    generation: int
    store: int
    recovery: Recovery | None
    views: tuple[View, ...]
    request: Request | None
    claims_seen: int = NONE  # the highest `claims` that it has seen; OLDER + generation: it has met an older copy


class World(NamedTuple):
    """The whole state."""

    processes: tuple[Process, ...]
    parts: tuple[Part, ...]
    copies: tuple[int, ...]  # how often each event has been committed, without hanging transactions
    control: tuple[int, ...]  # the generations, by offset: the store that each names
    # the records of control and of each ledger partition that a deposed leader has; () for none
    deposed: tuple[int, ...]
    stores: tuple[Store, ...]
    replica: Store | None  # the data of the replica, until it is promoted
    primary: int
    holders: tuple[int, ...]  # the holder of each slot's lease
    late: tuple[tuple[int, ...], ...]  # requests without an answer that may still arrive
    acknowledged: bool  # whether a 201 was sent
    wrong: str  # a violation that a step itself has found
    left: tuple[int, ...]  # the faults that may still happen; the last field (`spend`)


T = TypeVar("T")


def has_offsets(world: World) -> bool:
    """Check whether the second event stands for the offsets of a group, which have no key."""
    return len(world.copies) == len(world.stores[0].keys) == 2


def put(items: tuple[T, ...], place: int, item: T) -> tuple[T, ...]:
    """Return the tuple with another item at `place`."""
    changed = list(items)
    changed[place] = item
    return tuple(changed)


def with_process(world: World, p: int, process: Process) -> World:
    """Return the world with another state of process `p`."""
    # As `_replace`, at half its cost: no function runs more often.
    return tuple.__new__(World, (put(world.processes, p, process), *world[1:]))


def with_view(world: World, p: int, s: int, view: View) -> World:
    """Return the world with another view of slot `s` at process `p`."""
    process = world.processes[p]
    views = put(process.views, s, view)
    return with_process(world, p, tuple.__new__(Process, (*process[:4], views, *process[5:])))


def with_request(world: World, p: int, request: Request | None) -> World:
    """Return the world with another request at process `p`."""
    process = world.processes[p]
    return with_process(world, p, tuple.__new__(Process, (*process[:5], request, process.claims_seen)))


def with_part(world: World, s: int, part: Part) -> World:
    """Return the world with another state of slot `s` in Kafka."""
    return tuple.__new__(World, (world.processes, put(world.parts, s, part), *world[2:]))


def with_store(world: World, store: int, held: Store) -> World:
    """Return the world with other data in a store."""
    return world._replace(stores=put(world.stores, store, held))
