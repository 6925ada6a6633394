"""The bound of a group's bytes under a quota of Kafka."""

from service.core.settings import GROUP_EVENT_BYTES_MAX
from service.pipeline.quota import BEARABLE_S, COUNTED_S, LEAST_BYTES, QuotaBound, pause_after


def test_a_group_that_is_throttled_for_long_bounds_the_next_ones_in_proportion() -> None:
    bound = QuotaBound()
    bound.note(500_000, 50.0, started=1.0, now=2.0)
    assert bound.bytes_max == 10_000
    bound.note(500_000, 100.0, started=1.0, now=2.5)  # it was in flight too
    assert bound.bytes_max == 5_000


def test_a_group_that_starts_while_larger_ones_are_counted_does_not_lower_the_bound() -> None:
    bound = QuotaBound()
    bound.note(500_000, 50.0, started=1.0, now=2.0)
    bound.note(10_000, 40.0, started=3.0, now=4.0)
    assert bound.bytes_max == 10_000
    bound.note(10_000, 1.25, started=2.0 + COUNTED_S, now=15.0)
    assert bound.bytes_max == 8_000


def test_the_bound_is_never_too_small_and_not_lowered_by_a_quota_of_requests() -> None:
    bound = QuotaBound()
    bound.note(500_000, BEARABLE_S, started=1.0, now=2.0)
    assert bound.bytes_max == GROUP_EVENT_BYTES_MAX
    bound.note(5_000, 1_000.0, started=1.0, now=2.0)
    assert bound.bytes_max == LEAST_BYTES


def test_the_bound_is_doubled_once_in_a_counted_time_by_groups_that_fill_it_without_being_throttled() -> None:
    bound = QuotaBound()
    bound.note(500_000, 50.0, started=1.0, now=2.0)
    later = 2.0 + 2 * COUNTED_S
    bound.note(10_000, 0.0, started=later - 2, now=later - 1)
    bound.note(4_000, 0.0, started=later, now=later)
    assert bound.bytes_max == 10_000
    bound.note(10_000, 0.0, started=later, now=later)
    bound.note(20_000, 0.0, started=later, now=later + COUNTED_S - 1)
    assert bound.bytes_max == 20_000
    for n in range(1, 20):
        bound.note(bound.bytes_max, 0.0, started=later, now=later + n * COUNTED_S)
    assert bound.bytes_max == GROUP_EVENT_BYTES_MAX


def test_a_failed_group_has_no_other_follow_until_its_bytes_are_counted_no_more() -> None:
    assert [pause_after(throttled_s) for throttled_s in (0.0, BEARABLE_S, 3.0, 60.0)] == [0.0, 0.0, 3.0, COUNTED_S]
