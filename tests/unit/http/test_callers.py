"""Tests callers: authentication and topics."""

import base64
import hashlib

import pytest

from service.contract import CallerRule
from service.core.problems import FORBIDDEN_GROUP, FORBIDDEN_TOPIC, UNAUTHORIZED, Problem
from service.http.caller import ANYBODY, Caller
from service.http.callers import Callers

DIGEST = hashlib.sha256(b"s3cret").hexdigest()


@pytest.fixture
def callers() -> Callers:
    return Callers([CallerRule("shop", (DIGEST,)), CallerRule("other", ("00" * 32,))])


@pytest.mark.parametrize("header", ["Bearer s3cret", "bearer s3cret", " Bearer  s3cret "])
def test_a_token_identifies_its_caller(callers: Callers, header: str) -> None:
    assert callers.of(header).scope == "shop"


@pytest.mark.parametrize("credentials", ["shop:s3cret", "API-KEY:s3cret", ":s3cret"])
def test_the_password_of_basic_credentials_is_the_token(callers: Callers, credentials: str) -> None:
    """As clients of Confluent Cloud send an API key and its secret."""
    encoded = base64.b64encode(credentials.encode()).decode()
    assert callers.of(f"Basic {encoded}").scope == callers.of(f"basic  {encoded} ").scope == "shop"


@pytest.mark.parametrize("credentials", [b"s3cret:shop", b"s3cret", b":", b"", b"shop:s3cre", b"shop:\xff\xfe"])
def test_basic_credentials_without_a_known_token_are_unauthorized(callers: Callers, credentials: bytes) -> None:
    for text in (f"Basic {base64.b64encode(credentials).decode()}", "Basic s3cret", "Basic é"):
        with pytest.raises(Problem, match="Authorization") as caught:
            callers.of(text)
        assert caught.value.kind is UNAUTHORIZED


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer s3cre", "Digest s3cret", "s3cret", "Bearer é"]
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
    ANYBODY.admit()
    ANYBODY.spend(10**9, 10**9)


def test_a_caller_writes_to_its_topics_only() -> None:
    caller = Caller.of_rule(CallerRule("shop", (DIGEST,), ("orders.*", "audit")))
    caller.check("orders.eu")
    caller.check("audit")
    with pytest.raises(Problem, match="shop") as caught:
        caller.check("audit.eu")
    assert caught.value.kind is FORBIDDEN_TOPIC


def test_a_caller_commits_for_the_groups_of_its_rule_only() -> None:
    """None by default: the rules of an earlier release say nothing of groups."""
    caller = Caller.of_rule(CallerRule("shop", (DIGEST,), groups=("billing-*",)))
    caller.check_group("billing-1")
    ANYBODY.check_group("any")
    for other, group in ((caller, "audit"), (Caller.of_rule(CallerRule("shop", (DIGEST,))), "billing-1")):
        with pytest.raises(Problem, match=r"offsets\.group: shop") as caught:
            other.check_group(group)
        assert caught.value.kind is FORBIDDEN_GROUP
