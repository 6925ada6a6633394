"""Tests the error codes of the produce API, and that what may be not written reads as retriable."""

import json
from typing import Any

import pytest

from service.claims.states import Delivered
from service.core.metrics import Telemetry
from service.core.problems import (
    INTERNAL,
    INVALID_EVENT,
    KINDS,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    RECORD_REFUSED,
    REQUEST_TIMEOUT,
    TOO_LARGE,
    UNAUTHORIZED,
    Kind,
    Problem,
)
from service.events.produce import Format, ProduceProblem
from service.http.produce_answers import (
    V3_TYPE,
    ProduceResponder,
    error_of,
    failure_of,
    render_offsets,
    render_v2,
    render_v3,
    render_v3_end,
    rfc3339,
)
from service.http.streaming import REST_NOT_WRITTEN
from service.pipeline.request import Committed, WriteResult

THERE = Delivered(1_000, b"f" * 8, "orders", 2, 3, 4, 60)
WRITTEN = Committed(1_000, ((b"i" * 16, THERE),), replayed=False)
REPLAYED = Committed(1_000, ((b"i" * 16, THERE),), replayed=True)
REFUSED, RETRIED, UNKNOWN = (Problem(kind, kind.code) for kind in (RECORD_REFUSED, NOT_WRITTEN, OUTCOME_UNKNOWN))
WHOLE = " (send the whole request again, with its Idempotency-Key: a record's id depends on its index)"


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.code)
def test_what_is_not_known_to_be_refused_is_retriable(kind: Kind) -> None:
    """By the status and by the code of a v2 record: a client that drops the record would lose it."""
    error = error_of(Problem(kind, "field: remedy"))
    may_succeed = kind.retry_after_s is not None or kind in (INTERNAL, REQUEST_TIMEOUT)
    assert error.retriable is may_succeed
    (row,) = json.loads(b"[%b]" % render_offsets([Problem(kind, "field: remedy")]))
    wanted = 2 if may_succeed else 1
    error_text = f"field: remedy{WHOLE}" if may_succeed else "field: remedy"
    assert row == {"partition": None, "offset": None, "error_code": wanted, "error": error_text}
    (line,) = render_v3("c1", [(None, Problem(kind, "field: remedy"))]).splitlines()
    assert json.loads(line)["message"].endswith(WHOLE) is may_succeed


def test_a_stream_that_ends_early_is_sent_again_as_a_whole() -> None:
    """Its records' ids are by their index: the rest alone would get the ids of the first records."""
    for kind in (REQUEST_TIMEOUT, NOT_WRITTEN, TOO_LARGE):
        line = render_v3_end(Problem(kind, f"body: why: {REST_NOT_WRITTEN}"))
        assert json.loads(line)["message"] == f"body: why: {REST_NOT_WRITTEN}{WHOLE}"


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.code)
def test_an_error_code_is_a_status_or_begins_with_one(kind: Kind) -> None:
    error = error_of(Problem(kind, "field: remedy"))
    assert error.error_code == error.status or error.error_code // 100 in (error.status, 500)
    assert error.message == "field: remedy"


def test_a_partition_that_a_topic_lacks_is_not_found() -> None:
    assert error_of(Problem(INVALID_EVENT, "partition: orders has 3: use 0 to 2, or none"))[:2] == (404, 40402)
    assert error_of(ProduceProblem(404, 40402, "records[0].partition: use one"))[:2] == (404, 40402)


@pytest.mark.parametrize(
    ("results", "failure"),
    [
        ([WRITTEN], None),
        ([REFUSED, WRITTEN, RETRIED], None),
        ([REFUSED], REFUSED),
        ([REFUSED, RETRIED], RETRIED),
        ([REFUSED, UNKNOWN, RETRIED], UNKNOWN),
    ],
)
def test_a_request_of_which_nothing_is_written_has_the_status_of_an_error(
    results: list[WriteResult], failure: Problem | None
) -> None:
    """Of one that may succeed, if there is one: the client then sends all of them again."""
    assert failure_of(results) is failure


def test_the_offsets_of_a_v2_request() -> None:
    answer = json.loads(render_v2([render_offsets([WRITTEN, REFUSED]), render_offsets([REPLAYED])]))
    written = {"partition": 2, "offset": 3, "error_code": None, "error": None}
    refused = {"partition": None, "offset": None, "error_code": 1, "error": "record-refused"}
    assert answer == {"offsets": [written, refused, written], "key_schema_id": None, "value_schema_id": None}


def test_a_v3_error_has_no_finer_code_than_422() -> None:
    lines = render_v3("c", [(None, REFUSED), (None, RETRIED), (None, Problem(TOO_LARGE, "why"))]).split(b"\r\n")
    results: list[Any] = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == b""
    assert [each["error_code"] for each in results] == [422, 50003, 413]
    assert results[0]["message"] == "Error: 42206 : record-refused"


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (1_612_552_482_000, "2021-02-05T19:14:42Z"),
        (1_612_552_482_005, "2021-02-05T19:14:42.005Z"),
        (-1, "1969-12-31T23:59:59.999Z"),
        (2**53, "9999-12-31T23:59:59.999Z"),
    ],
)
def test_times_are_written_as_java_writes_an_instant(ms: int, text: str) -> None:
    assert rfc3339(ms) == text


def test_the_headers_of_an_answer() -> None:
    answers = ProduceResponder(Telemetry(), 3_600, V3_TYPE, "k 1")
    head = b"content-type: application/json\r\nidempotency-key: k 1\r\n"
    assert answers.lines() == head
    by_rule = b"idempotency-key-expires: Thu, 01 Jan 1970 00:01:01 GMT\r\n"
    assert answers.lines([WRITTEN, REFUSED]) == head + by_rule
    assert answers.lines([REPLAYED, REPLAYED]) == head + by_rule + b"idempotent-replayed: true\r\n"
    usual = Committed(1_000, ((b"i" * 16, Delivered(1_000, b"f" * 8, "orders", 2, 3, 4)),), replayed=False)
    assert b"Thu, 01 Jan 1970 01:00:01 GMT" in answers.lines([usual])
    assert b"00:01:01" in answers.lines([usual, WRITTEN]), "the first that expires counts"
    status, lines, _ = answers.render(RETRIED)
    assert (status, lines) == (503, b"content-type: application/json\r\nretry-after: 1\r\nidempotency-key: k 1\r\n")
    _, lines, _ = ProduceResponder(Telemetry(), 1, V3_TYPE).render(Problem(UNAUTHORIZED, "who"))
    assert lines == b"content-type: application/json\r\nwww-authenticate: Bearer\r\n"


def test_formats_with_a_schema() -> None:
    assert {format for format in Format if not format.needs_schema} == {Format.BINARY, Format.JSON, Format.STRING}
