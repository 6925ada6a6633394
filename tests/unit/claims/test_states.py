"""Tests the state tables (every move that they have, none that they lack), and the rules for keys at their edges."""

from enum import Enum
from typing import Any

import pytest

from service.claims import states
from service.claims.states import (
    FINISHED,
    MAYBE_WRITTEN,
    REQUEST,
    SLOT,
    UNSENT,
    Claimed,
    Delivered,
    DeliveredBatch,
    IllegalMove,
    Machine,
    Outcome,
    RequestEvent,
    RequestState,
    SlotEvent,
    SlotState,
)
from tests.durations import DAY_MS

MACHINES: list[tuple[Machine[Any, Any], type[Enum], type[Enum], Enum]] = [
    (SLOT, SlotState, SlotEvent, SlotState.VACANT),
    (REQUEST, RequestState, RequestEvent, RequestState.QUEUED),
]
FP, FP2 = b"f" * 8, b"2" * 8


@pytest.mark.parametrize(("machine", "state_kind", "event_kind", "first"), MACHINES)
def test_each_transition_is_in_the_table_or_illegal(
    machine: Machine[Any, Any], state_kind: type[Enum], event_kind: type[Enum], first: Enum
) -> None:
    illegal = 0
    for state in state_kind:
        for event in event_kind:
            if (state, event) in machine:
                assert isinstance(machine[state, event], state_kind)
            else:
                illegal += 1
                with pytest.raises(IllegalMove, match=f"{event.name} in state {state.name}"):
                    machine[state, event]
    assert illegal > 0


@pytest.mark.parametrize(("machine", "state_kind", "event_kind", "first"), MACHINES)
def test_every_state_can_be_reached_and_every_event_happens(
    machine: Machine[Any, Any], state_kind: type[Enum], event_kind: type[Enum], first: Enum
) -> None:
    reached, new = {first}, {first}
    while new:
        new = {to for (state, _), to in machine.items() if state in new} - reached
        reached |= new
    assert reached == set(state_kind)
    assert {event for _, event in machine} == set(event_kind)


def test_a_slot_in_doubt_becomes_ready_only_through_the_fence() -> None:
    ways = {SlotState.DOUBT}
    for _ in SlotState:
        ways |= {to for (state, event), to in SLOT.items() if state in ways and event is not SlotEvent.FENCE}
    assert SlotState.READY not in ways


def test_an_answer_is_given_once_and_never_to_a_request_that_was_split() -> None:
    finished = {RequestState.ANSWERED, RequestState.SPLIT}
    assert finished == FINISHED
    assert finished.isdisjoint(state for state, _ in REQUEST)
    assert all((state, RequestEvent.ANSWER) in REQUEST for state in set(RequestState) - finished)


def test_a_request_that_may_be_written_was_sent_or_found() -> None:
    """Or its claim found it written. A state that is answered 503 can be reached without either."""
    unsent = {RequestState.QUEUED}
    for _ in RequestState:
        unsent |= {
            to for (state, event), to in REQUEST.items() if state in unsent and event.name not in ("SEND", "FIND")
        }
    assert MAYBE_WRITTEN.isdisjoint(unsent)
    assert {RequestState.CHECKING} == UNSENT & MAYBE_WRITTEN


def claim_of(state: states.KeyState, freed: int, now: int = DAY_MS) -> states.Claim:
    return states.claim(state, Claimed(1, 50, now, FP), lambda _: freed, DAY_MS, 1_000)


@pytest.mark.parametrize(
    ("freed", "outcome"), [(9, Outcome.IN_PROGRESS), (10, Outcome.IN_PROGRESS), (11, Outcome.TAKEN_OVER)]
)
def test_a_claim_is_dead_once_its_slot_is_freed_past_its_term(freed: int, outcome: Outcome) -> None:
    assert claim_of(Claimed(0, 10, DAY_MS - 5, FP2), freed).outcome is outcome


@pytest.mark.parametrize(("left_ms", "kept"), [(1_001, True), (1_000, True), (999, False), (0, False)])
def test_a_claim_taken_over_keeps_its_time_unless_it_would_expire_under_the_write(left_ms: int, kept: bool) -> None:
    at, now = 7, 7 + DAY_MS - left_ms
    state = claim_of(Claimed(0, 10, at, FP2), 11, now).state
    assert state == Claimed(1, 50, at if kept else now, FP)
    # The oldest of an atomic batch's claims counts, and all get one time.
    present, wanted = [None, Claimed(0, 10, at + 3, FP2), Claimed(0, 10, at, FP2)], Claimed(1, 50, now, FP)
    _, written = states.claim_all(present, [wanted] * 3, lambda _: 11, DAY_MS, 1_000)
    assert [state.at for state in written] == [at if kept else now] * 3


def test_a_delivered_key_is_never_claimed() -> None:
    for state in (Delivered(1, FP, "t", 0, 0, 1), DeliveredBatch(1, FP, 2)):
        assert claim_of(state, 10**9) == states.Claim(Outcome.DELIVERED, state)
        assert states.claim(state, Claimed(1, 50, 2, FP2), lambda _: 10**9, DAY_MS, 1_000).outcome is Outcome.CONFLICT


def test_a_replay_gives_way_only_to_a_newer_answer() -> None:
    entry = Delivered(100, FP, "t", 0, 5, 100)
    newer, older = Delivered(101, FP2, "t", 0, 9, 101), Delivered(99, FP2, "t", 0, 1, 99)
    for present, wanted in (
        (None, entry),
        (newer, newer),
        (DeliveredBatch(101, FP, 2), DeliveredBatch(101, FP, 2)),
        (older, entry),
        (Claimed(0, 10, 50, FP), entry),
        (Claimed(0, 10, 150, FP), entry),  # made in a store that did not have the entry
    ):
        assert states.replay(present, entry, 200, DAY_MS) == wanted
    assert states.replay(None, entry, 100 + DAY_MS - 1, DAY_MS) == entry
    assert states.replay(None, entry, 100 + DAY_MS, DAY_MS) is None
