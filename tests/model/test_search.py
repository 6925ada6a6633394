"""Tests the protocol by a complete search within the bounds of each configuration."""

import pytest

from service.claims.states import IllegalMove, RequestEvent, SlotEvent
from tests.model.configurations import DEFAULT, IDLE_HOLDER, MISSING, MUTANTS
from tests.model.rules import Configuration, Faults
from tests.model.search import search
from tests.model.world import DOUBT, QUEUED, READY, VACANT, decode, encode, request_move, slot_move

# The largest of DEFAULT. Other configurations, and test_rules, have each of its faults.
LARGE = {
    "a failed send, whose claim is let go",
    "a pair, a crash and a fence from outside",
    "a failover and a flush",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LARGE else name for name in DEFAULT]
)
def test_nothing_goes_wrong_and_every_state_leads_to_an_answer(name: str) -> None:
    result = search(DEFAULT[name])
    print(f"{name}: {result}")  # noqa: T201 - the figures, under -s
    assert not result.violation, str(result)
    # A model that does little would find nothing either.
    assert result.states > 1_000


@pytest.mark.long
def test_an_idle_holder_of_a_passed_term_keeps_nobody_waiting() -> None:
    """The heartbeat notices that the term has ended; otherwise a claim could stay in progress at an idle holder."""
    result = search(IDLE_HOLDER._replace(watchful=True))
    print(result)  # noqa: T201 - the figures, under -s
    assert not result.violation, str(result)
    assert search(IDLE_HOLDER).violation


def test_an_abort_at_a_new_leader_ends_what_hangs_there() -> None:
    """A limit (service/PROTOCOL.md): the partition was added before its old leader answered NOT_LEADER."""
    result = search(Configuration(Faults(skip_marker=1, move=1, other=1, lose_send=1)))
    assert result.violation == MISSING, str(result)


def test_without_faults_one_write_takes_six_steps() -> None:
    result = search(Configuration(Faults()))
    assert not result.violation, str(result)
    assert result.depth == 6


def test_every_large_configuration_is_one() -> None:
    assert set(DEFAULT) >= LARGE


def test_the_model_moves_by_the_tables_of_the_service() -> None:
    assert slot_move(DOUBT, SlotEvent.GIVE_BACK) == VACANT
    with pytest.raises(IllegalMove, match="RECOVER in state READY"):
        slot_move(READY, SlotEvent.RECOVER)
    with pytest.raises(IllegalMove, match="SEND in state QUEUED"):
        request_move(QUEUED, RequestEvent.SEND)


def test_states_of_keys_are_numbers_and_back() -> None:
    assert [encode(decode(number)) for number in range(20)] == list(range(20))


def test_every_fault_is_in_some_search() -> None:
    configurations = [*DEFAULT.values(), *(mutant.configuration for mutant in MUTANTS.values())]
    for number, fault in enumerate(Faults._fields):
        assert any(configuration.faults[number] for configuration in configurations), fault
