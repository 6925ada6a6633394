"""Tests that bodies have the bytes of a plain JSON encoder for the same members in the same order, and the expiry."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.claims.states import Delivered
from service.core.problems import NOT_WRITTEN, Problem
from service.http.responses import (
    committed_lines,
    join_results,
    render_atomic,
    render_line,
    render_metadata,
    render_results,
)
from service.pipeline.request import Committed, Delivery
from tests.unit.strategies import deliveries

NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2**53)
PLACES = deliveries(NUMBERS)


def members_of(place: Delivery) -> dict[str, Any]:
    id, delivered = place
    return {
        "id": id.hex(),
        "topic": delivered.topic,
        "partition": delivered.partition,
        "offset": delivered.offset,
        "timestamp": delivered.ts,
    }


def text(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))


@given(PLACES, st.booleans())
def test_results_are_rendered_with_their_id_place_and_replayed(places: list[Delivery], replayed: bool) -> None:
    results = [{"status": 201, **members_of(place), "replayed": replayed} for place in places]
    answers = [Committed(1, (place,), replayed) for place in places]
    assert render_metadata(places[0]).decode() == text(members_of(places[0]))
    for answer, result in zip(answers, results, strict=True):
        assert render_line(answer).decode() == f"{text(result)}\n"
        assert render_line(answer, 'a"b').decode() == text({**result, "idempotency_key": 'a"b'}) + "\n"
    assert join_results([render_results(answers)]).decode() == text({"results": results})
    assert join_results(render_results([each]) for each in answers).decode() == text({"results": results})
    whole = {"id": "02" * 16, "results": [{"status": 201, **members_of(place)} for place in places]}
    assert render_atomic(b"\x02" * 16, Committed(1, tuple(places), replayed)).decode() == text(whole)


def test_a_problem_among_results_is_its_own_body() -> None:
    problem = Problem(NOT_WRITTEN, "why é")
    result = {"status": 503, "problem": problem.body()}
    assert json.loads(join_results([render_results([problem, problem])])) == {"results": [result, result]}
    assert json.loads(render_line(problem)) == result
    assert json.loads(render_line(problem, "k")) == {**result, "idempotency_key": "k"}


def test_a_name_of_a_topic_from_a_foreign_record_is_escaped() -> None:
    delivered = Delivered(0, b"f" * 8, 'a"\n\\b', 0, 1, 2)
    assert json.loads(render_metadata((b"i" * 16, delivered)))["topic"] == delivered.topic


@pytest.mark.parametrize(
    ("ttl_s", "expires"), [(0, b"Thu, 01 Jan 1970 00:01:41 GMT"), (7, b"Thu, 01 Jan 1970 00:00:08 GMT")]
)
def test_the_expiry_is_that_of_the_key_by_its_rule_else_by_the_setting(ttl_s: int, expires: bytes) -> None:
    delivered = Delivered(1_000, b"f" * 8, "orders", 0, 1, 2, ttl_s)
    lines = committed_lines("key", Committed(1_000, ((b"i" * 16, delivered),), replayed=False), 100)
    assert b"idempotency-key-expires: %b\r\n" % expires in lines
