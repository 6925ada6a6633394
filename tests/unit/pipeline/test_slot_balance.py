"""Tests how the slots are divided among processes: which ones a process takes, and how many it gives up."""

import pytest

from service.pipeline.slot_balance import REPLACED_LEAST, SlotShare, balance, fair_share


@pytest.mark.parametrize(
    ("marks", "held", "to_take", "excess"),
    [
        ("fff", 0, 2, -4),  # up to its share
        ("ttf", 2, 0, -2),  # has its share, and others may still come for the free slot
        ("ttd", 2, 1, -2),  # the dead slot is taken on top
        ("ttt", 4, 0, 2),  # none is left for another process
        ("dff", 1, 1, -3),  # the dead slot is its share
    ],
)
def test_a_process_takes_its_share_and_all_dead_slots(marks: str, held: int, to_take: int, excess: int) -> None:
    others = dict(enumerate(marks, start=10))
    decision = balance(others, held, SlotShare(slots=2, most=4), ())
    assert (len(decision.to_take), decision.excess) == (to_take, excess)
    assert {n for n, mark in others.items() if mark == "d"} <= set(decision.to_take)


def test_a_free_slot_with_an_open_transaction_is_taken_first() -> None:
    assert balance({1: "f", 2: "t", 3: "f"}, 2, SlotShare(2, 2), {3}).to_take == [3]


@pytest.mark.parametrize(
    ("wanted", "members", "stuck", "share"),
    [
        (4, 1, 0, (4, 4)),
        (4, 4, 0, (2, 4)),
        (4, 20, 0, (1, 4)),
        (1, 1, 1, (2, 2)),
        (1, 1, 9, (1 + REPLACED_LEAST, 1 + REPLACED_LEAST)),
        (4, 1, 9, (8, 8)),
        (4, 2, 3, (4, 7)),
    ],
)
def test_a_fair_share_is_what_is_wanted_or_less_and_replaces_stuck_slots(
    wanted: int, members: int, stuck: int, share: tuple[int, int]
) -> None:
    assert fair_share(wanted, 8, members, stuck) == share
