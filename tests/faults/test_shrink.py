"""Tests that shrinking finds the fewest causes, also if several are needed together."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults.shrink import OutOfTime, shrink


@given(st.sets(st.integers(0, 39), max_size=5))
def test_the_fewest_faults_that_are_needed_are_found(needed: set[int]) -> None:
    assert shrink(range(40), lambda some: needed <= set(some)) == sorted(needed)


@pytest.mark.parametrize("needed", [{3}, {0, 39}])
def test_shrinking_forty_elements_asks_fewer_than_sixty_times(needed: set[int]) -> None:
    asked = []

    def fails(some: Sequence[int]) -> bool:
        asked.append(some)
        return needed <= set(some)

    shrink(range(40), fails)
    assert len(asked) < 60


def test_out_of_time_the_best_so_far_is_the_answer() -> None:
    asked = []

    def fails(some: Sequence[int]) -> bool:
        asked.append(some)
        if len(asked) > 3:
            raise OutOfTime
        return 5 in some

    assert 5 in shrink(range(40), fails)
    assert len(shrink(range(40), lambda some: 5 in some)) == 1
