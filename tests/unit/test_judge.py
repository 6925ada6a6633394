"""Tests that the judge of the integration tests finds each kind of violation, and accepts correct histories."""

import json

import pytest

from service.contract.wire.headers import Stamp
from service.contract.wire.ids import event_id
from tests.integration.client import Asked, Attempt, Kind
from tests.integration.judge import Delivered, faults_of_key, stamp_faults

ASKED = Asked("the key", "orders", b'{"a": 1}', record_key="k", headers={"h": "v"})


def attempt(kind: Kind, offset: int = 7, asked: Asked = ASKED) -> Attempt:
    place = {"topic": "orders", "partition": 0, "offset": offset}
    return Attempt(asked, kind, body=json.dumps(place).encode() if kind == "ok" else b"")


def record(
    offset: int = 7, value: bytes | None = b'{"a": 1}', key: bytes | None = b"k", name: str = "the key"
) -> Delivered:
    stamp = Stamp(event_id(name), b"f" * 8, 1, 0, 1, 0, "me").encode()
    headers = [("idempotency-key", b"the key"), ("fencepost", stamp), ("h", b"v")]
    return Delivered(("orders", 0, offset), key, value, headers, (1, 0))


def found(attempts: list[Attempt], *records: Delivered) -> str:
    return " ".join(faults_of_key("the key", attempts, records))


@pytest.mark.parametrize(
    ("kinds", "there"),
    [
        (["ok"], True),
        (["info"], True),
        (["info"], False),
        (["fail"], False),
        (["busy"], False),
        (["fail", "info", "ok", "ok"], True),
        (["info", "fail", "busy"], True),
        (["info", "fail"], False),
    ],
)
def test_a_record_that_fits_its_answers_is_right(kinds: list[Kind], there: bool) -> None:
    assert found([attempt(kind) for kind in kinds], *([record()] if there else [])) == ""


def test_a_duplicate_is_found() -> None:
    for kind in ("ok", "info", "fail"):
        assert "is there 2 times" in found([attempt(kind)], record(7), record(9))


def test_a_loss_is_found() -> None:
    assert "is lost" in found([attempt("info"), attempt("ok")])


def test_a_record_at_another_place_than_its_answer_is_a_violation() -> None:
    assert "was acknowledged at" in found([attempt("ok", 8)], record(7))


def test_answers_with_two_places_are_a_violation() -> None:
    assert "was answered with different places" in found([attempt("ok", 7), attempt("ok", 8)], record(7))


@pytest.mark.parametrize("kinds", [["fail"], ["busy"], ["fail", "busy"]])
def test_a_record_whose_answers_say_not_written_is_a_violation(kinds: list[Kind]) -> None:
    assert "nobody was left in doubt" in found([attempt(kind) for kind in kinds], record())


@pytest.mark.parametrize("wrong", [record(value=b'{"a":1}'), record(value=None), record(key=None), record(key=b"l")])
def test_a_record_with_other_bytes_is_a_violation(wrong: Delivered) -> None:
    assert "has other bytes" in found([attempt("ok")], wrong)
    assert "has other bytes" in found([attempt("info")], wrong)


def test_bytes_of_an_attempt_that_was_refused() -> None:
    other = Asked("the key", "orders", b"2", record_key="k", headers={"h": "v"})
    assert "has other bytes" in found([attempt("ok"), attempt("fail", asked=other)], record(value=b"2"))


def test_a_wrong_or_missing_fencepost_header_is_found() -> None:
    assert stamp_faults(record(), "the key") == []
    assert stamp_faults(record(name="another"), "the key") != []
    without = Delivered(("orders", 0, 7), None, None, [("idempotency-key", b"the key")], (1, 0))
    assert stamp_faults(without, "the key") != []
