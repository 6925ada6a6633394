"""Tests callers: authentication, topics, rates."""

import hashlib

import pytest

from service.contract import CallerRule
from service.core.problems import FORBIDDEN_TOPIC, RATE_LIMITED, UNAUTHORIZED, Problem
from service.http.callers import ANYBODY, Caller, Callers

DIGEST = hashlib.sha256(b"s3cret").hexdigest()


@pytest.fixture
def callers() -> Callers:
    return Callers([CallerRule("shop", (DIGEST,)), CallerRule("other", ("00" * 32,))])


@pytest.mark.parametrize("header", ["Bearer s3cret", "bearer s3cret", " Bearer  s3cret "])
def test_a_token_identifies_its_caller(callers: Callers, header: str) -> None:
    assert callers.of(header).scope == "shop"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer s3cre", "Basic s3cret", "Digest s3cret", "s3cret", "Bearer é"]
)
def test_a_request_without_a_known_token_is_unauthorized(callers: Callers, header: str | None) -> None:
    with pytest.raises(Problem, match="Authorization") as caught:
        callers.of(header)
    assert caught.value.kind is UNAUTHORIZED


def test_all_tokens_of_a_caller_have_its_scope_and_share_its_rate() -> None:
    new = hashlib.sha256(b"n3w").hexdigest()
    callers = Callers([CallerRule("shop", (DIGEST, new), rate=1)])
    old = callers.of("Bearer s3cret")
    assert old.scope == "shop"
    assert callers.of("Bearer n3w") is old


def test_without_rules_every_request_has_the_same_unlimited_caller() -> None:
    assert Callers([]).of(None) is Callers([]).of("Bearer any") is ANYBODY
    ANYBODY.check("anything")
    ANYBODY.spend(10**9, 0.0)


def test_a_caller_writes_to_its_topics_only() -> None:
    caller = Caller.of_rule(CallerRule("shop", (DIGEST,), ("orders.*", "audit")))
    caller.check("orders.eu")
    caller.check("audit")
    with pytest.raises(Problem, match="shop") as caught:
        caller.check("audit.eu")
    assert caught.value.kind is FORBIDDEN_TOPIC


def spent(caller: Caller, events: int, now: float) -> int | None:
    """Spend events; returns 0 if they are admitted, else Retry-After in seconds."""
    try:
        caller.spend(events, now)
    except Problem as problem:
        return problem.retry_after_s if problem.kind is RATE_LIMITED else -1
    return 0


def test_a_rate_lets_a_second_of_events_through_at_once_and_then_as_many_a_second() -> None:
    caller = Caller.of_rule(CallerRule("shop", (DIGEST,), rate=10))
    assert [spent(caller, 1, 100.0) for _ in range(12)] == [0] * 10 + [1, 1]
    assert [spent(caller, 1, 100.35) for _ in range(4)] == [0, 0, 0, 1]
    assert [spent(caller, 1, 500.0) for _ in range(11)] == [0] * 10 + [1]


def test_a_batch_above_the_rate_passes_and_the_next_event_waits_for_it() -> None:
    caller = Caller.of_rule(CallerRule("shop", (DIGEST,), rate=10))
    assert spent(caller, 40, 100.0) == 0
    assert spent(caller, 1, 100.0) == 4  # the time of 31 events
    assert spent(caller, 1, 103.0) == 1
    assert spent(caller, 1, 103.2) == 0


def test_a_rate_of_less_than_one_a_second() -> None:
    caller = Caller.of_rule(CallerRule("shop", (DIGEST,), rate=0.5))
    assert [spent(caller, 1, now) for now in (10.0, 10.0, 11.0, 12.0)] == [0, 2, 1, 0]


def test_an_event_that_arrived_earlier_is_counted_at_the_time_of_the_latest() -> None:
    """It may have been pipelined behind a slow response."""
    caller = Caller.of_rule(CallerRule("shop", (DIGEST,), rate=10))
    assert spent(caller, 1, 104.5) == 0
    assert spent(caller, 1, 100.0) == 0
    assert [spent(caller, 1, 104.5) for _ in range(9)] == [0] * 8 + [1]
