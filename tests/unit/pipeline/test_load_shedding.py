"""Tests delayed refusals: they are sent in turn, and at the latest after the longest delay."""

import asyncio

import pytest

from service.pipeline.load_shedding import ANSWERS_EACH, ANSWERS_MAX, WAIT_MOST_S, LoadShedder


class Refused:
    """Refusals by number, and those that were sent so far."""

    def __init__(self) -> None:
        self.load_shedder = LoadShedder()
        self.delays: list[asyncio.Future[None] | None] = []

    def refuse(self, times: int, arrived: float = 100.0) -> None:
        for _ in range(times):
            self.delays.append(self.load_shedder.delay(arrived))

    @property
    def sent(self) -> list[int]:
        return [n for n, delay in enumerate(self.delays) if delay is None or delay.done()]

    def answered(self, times: int) -> None:
        """Note this many answers, and then look, before any refusal has waited long."""
        for _ in range(times):
            sent = len(self.sent)
            self.load_shedder.answered()
            assert len(self.sent) == sent  # not in between: see service.pipeline.load_shedding
        self.load_shedder.end_due(100.0)


@pytest.fixture
async def refused() -> Refused:
    return Refused()


@pytest.fixture
async def spent(refused: Refused) -> Refused:
    """Use up the saved answers."""
    refused.refuse(ANSWERS_MAX // ANSWERS_EACH)
    assert len(refused.sent) == len(refused.delays)
    refused.delays.clear()
    return refused


async def test_refusals_of_a_short_peak_are_sent_at_once(refused: Refused) -> None:
    refused.refuse(ANSWERS_MAX // ANSWERS_EACH)
    assert refused.sent == list(range(ANSWERS_MAX // ANSWERS_EACH))


async def test_a_refusal_is_sent_for_every_few_answers_in_order_of_arrival(spent: Refused) -> None:
    spent.refuse(3)
    assert not spent.sent
    spent.answered(ANSWERS_EACH - 1)
    assert not spent.sent
    spent.answered(1)
    assert spent.sent == [0]
    spent.answered(2 * ANSWERS_EACH)
    assert spent.sent == [0, 1, 2]


async def test_a_refusal_that_follows_enough_answers_is_sent_at_once(spent: Refused) -> None:
    """Together with those that have waited."""
    spent.refuse(1)
    for _ in range(2 * ANSWERS_EACH):
        spent.load_shedder.answered()
    assert not spent.sent
    spent.refuse(1)
    assert spent.sent == [0, 1]


async def test_answers_of_several_events_count_as_many(spent: Refused) -> None:
    spent.refuse(3)
    spent.load_shedder.answered(2 * ANSWERS_EACH)
    spent.load_shedder.end_due(100.0)
    assert spent.sent == [0, 1]


async def test_answers_permit_later_refusals_up_to_a_number(spent: Refused) -> None:
    spent.answered(3 * ANSWERS_MAX)
    spent.refuse(ANSWERS_MAX)
    assert len(spent.sent) == ANSWERS_MAX // ANSWERS_EACH


async def test_a_refusal_is_sent_after_its_longest_wait_without_any_answers(spent: Refused) -> None:
    """For example if Kafka is unreachable, or there are more clients than answers."""
    spent.refuse(2, arrived=100.0)
    spent.refuse(1, arrived=100.2)
    spent.load_shedder.end_due(100.1 + WAIT_MOST_S / 2)
    assert not spent.sent
    spent.load_shedder.end_due(100.1 + WAIT_MOST_S)
    assert spent.sent == [0, 1]
    spent.load_shedder.end_due(100.3 + WAIT_MOST_S)
    assert spent.sent == [0, 1, 2]


async def test_a_refusal_that_was_sent_for_its_wait_uses_up_no_answers(spent: Refused) -> None:
    spent.refuse(1, arrived=100.0)
    for _ in range(ANSWERS_EACH - 1):
        spent.load_shedder.answered()
    spent.load_shedder.end_due(101.0 + WAIT_MOST_S)
    spent.answered(1)
    spent.refuse(2)
    assert spent.sent == [0, 1]
