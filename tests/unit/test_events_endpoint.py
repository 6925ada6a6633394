"""The pieces of the hot route: headers, and answers as bytes."""

import json
import time
from typing import Any

import pytest

from service.batch import LINES
from service.errors import KINDS, Problem
from service.events_endpoint import JSON, media_type, pick, unsupported
from service.rendering import imf_fixdate, render_place, render_problem, render_results, render_whole
from service.request import Answer, Committed
from service.states import Delivered

PLACE = (b"\x01" * 16, Delivered(1_700_000_000_000, b"\x02" * 8, "orders", 2, 12, 1_700_000_000_000))


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
        " application/json ;",
        "application/json; charset=utf8",
        "application/json; Charset=Utf-8",
        "application/json; foo=bar",
        "application/json; charset=utf-8; v=1",
        'application/json;v="1";charset="utf8" ; w',
        r'application/json; v="; charset=\"latin-1"; charset=utf-8',
    ],
)
def test_media_types(content_type: str) -> None:
    assert media_type(content_type) == JSON


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/jsonx", "json"])
def test_other_media_types(content_type: str | None) -> None:
    assert media_type(content_type) != JSON


@pytest.mark.parametrize(
    "parameters",
    [
        "charset=utf-16",
        'CHARSET="latin-1"',
        "v=1; charset=us-ascii",
        "charset=utf-8; charset=utf-16",
        'v="open; charset=latin-1',
    ],
)
def test_media_types_in_another_charset(parameters: str) -> None:
    with pytest.raises(Problem, match="UTF-8") as caught:
        media_type(f"application/json; {parameters}")
    assert caught.value.kind.status == 415


@pytest.mark.parametrize("piece", ["a", " ", ";", ";a", '"', "=", ';a="', ';a="\\"', "\\"])
def test_a_media_type_of_any_length_is_read_at_once(piece: str) -> None:
    """A head may have 64 KiB: what grows with its square would hold up everybody else for seconds."""
    started = time.perf_counter()
    media_type(f"application/json;{piece * (60_000 // len(piece))}")
    assert time.perf_counter() - started < 0.2


def test_what_is_taken_is_named() -> None:
    problem = unsupported(JSON, LINES)
    assert (problem.kind.status, problem.detail) == (
        415,
        "Content-Type: send application/json or application/x-ndjson (in UTF-8)",
    )


def test_headers_that_matter() -> None:
    found = pick(
        [(b"host", b"x"), (b"idempotency-key", b"\xe4"), (b"content-type", b"a"), (b"x-idempotency-key", b"b")]
    )
    assert found == {b"idempotency-key": "ä", b"content-type": "a"}
    with pytest.raises(Problem, match="once"):
        pick([(b"idempotency-key", b"a"), (b"idempotency-key", b"a")])


def test_answers_are_json() -> None:
    place = {"id": "01" * 16, "topic": "orders", "partition": 2, "offset": 12, "timestamp": 1_700_000_000_000}
    assert json.loads(render_place(PLACE)) == place
    answers: list[Answer] = [Committed(1, (PLACE,), True), Problem(KINDS["in-progress"], "wait")]
    done, busy = json.loads(render_results(answers))["results"]
    assert done == {"status": 201, **place, "replayed": True}
    assert (busy["status"], busy["problem"]["code"]) == (409, "in-progress")
    whole = json.loads(render_whole(b"\x02" * 16, Committed(1, (PLACE, PLACE), False)))
    assert whole == {"id": "02" * 16, "results": [{"status": 201, **place}] * 2}
    assert render_whole(b"\x02" * 16, Committed(1, (PLACE,), True)) == render_whole(
        b"\x02" * 16, Committed(1, (PLACE,), False)
    )


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.code)
def test_every_problem_can_be_told(kind: Any) -> None:
    status, headers, body = render_problem(Problem(kind, "field: remedy"))
    told = json.loads(body)
    assert (status, told["status"], told["code"]) == (kind.status, kind.status, kind.code)
    assert told["type"] == f"/problems/{kind.code}"
    assert set(told) == {"type", "title", "status", "detail", "code"}
    assert dict(headers)[b"content-type"] == b"application/problem+json"
    # Who may succeed with the very same request is told when to send it.
    assert (b"retry-after" in dict(headers)) is (kind.status in (409, 429, 503, 504)), kind.code


def test_a_time_as_http_writes_it() -> None:
    assert imf_fixdate(784111777) == b"Sun, 06 Nov 1994 08:49:37 GMT"
