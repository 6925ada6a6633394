"""Tests the throttle times of a producer's responses (KIP-219)."""

from service.kafka.throttle import Throttle


async def test_a_broker_that_throttles_less_does_not_shorten_the_time_of_another() -> None:
    """The connection to the other broker is read only after that time."""
    throttle = Throttle()
    throttle.note(60_000)
    throttle.note(10)
    assert not await throttle.wait_until_over(0.02)
    assert "by 60000 ms" in throttle.quota
    assert throttle.longest_s == 60.0


async def test_a_time_that_ends_later_replaces_the_one_before() -> None:
    throttle = Throttle()
    throttle.note(10)
    throttle.note(60_000)
    assert not await throttle.wait_until_over(0.02)
    assert "by 60000 ms" in throttle.quota
