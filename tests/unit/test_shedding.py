"""Who is refused hears it in turn, and never waits for what will not come."""

import pytest

from service.shedding import ANSWERS_EACH, SAVED_MOST, STALLED_S, WAITING_MOST, Shedding


class Refused:
    """Refusals by their number, and who was told so far."""

    def __init__(self) -> None:
        self.shedding = Shedding()
        self.told: list[int] = []
        self.asked = 0

    def refuse(self, times: int) -> None:
        for n in range(self.asked, self.asked + times):
            self.shedding.refuse(lambda n=n: self.told.append(n))  # type: ignore[misc]
        self.asked += times

    def answered(self, times: int) -> None:
        for _ in range(times):
            self.shedding.answered()


@pytest.fixture
def refused() -> Refused:
    return Refused()


@pytest.fixture
def spent(refused: Refused) -> Refused:
    """What was saved up is spent."""
    refused.refuse(SAVED_MOST // ANSWERS_EACH)
    assert len(refused.told) == refused.asked
    refused.told.clear()
    refused.asked = 0
    return refused


def test_a_short_peak_is_told_at_once(refused: Refused) -> None:
    refused.refuse(SAVED_MOST // ANSWERS_EACH)
    assert refused.told == list(range(SAVED_MOST // ANSWERS_EACH))


def test_one_goes_for_every_few_answers_first_come_first_served(spent: Refused) -> None:
    spent.refuse(3)
    assert not spent.told
    spent.answered(ANSWERS_EACH - 1)
    assert not spent.told
    spent.answered(1)
    assert spent.told == [0]
    spent.answered(2 * ANSWERS_EACH)
    assert spent.told == [0, 1, 2]


def test_answers_are_saved_up_and_not_for_ever(spent: Refused) -> None:
    spent.answered(3 * SAVED_MOST)
    spent.refuse(SAVED_MOST)
    assert len(spent.told) == SAVED_MOST // ANSWERS_EACH


def test_where_nothing_goes_on_all_are_told(spent: Refused) -> None:
    """Kafka is away, say: nobody's time would be saved, and who is told so late cannot turn to another process."""
    spent.answered(1)
    spent.shedding.look(100.0)
    spent.refuse(2)
    spent.shedding.look(100.0 + STALLED_S / 2)
    assert not spent.told
    spent.shedding.look(100.0 + 1.5 * STALLED_S)
    assert spent.told == [0, 1]


def test_while_something_goes_on_the_others_wait(spent: Refused) -> None:
    spent.refuse(2)
    for look in range(10):
        spent.answered(0 if look % 2 else 1)
        spent.shedding.look(100.0 + look * STALLED_S / 2)
        assert len(spent.told) == min(2, (look // 2 + 1) // ANSWERS_EACH)


def test_no_more_wait_than_there_is_room_for(spent: Refused) -> None:
    """Clients that give up and come anew, each on a new connection, must not fill the memory."""
    spent.refuse(WAITING_MOST + 2)
    assert spent.told == [0, 1]
