"""Tests that the checker can fail: each assertion gets changed logs or topics, and correct ones pass."""

import dataclasses
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.http import Answer
from service.contract.wire.headers import Stamp
from service.contract.wire.ids import event_id, member_id
from tests.faults.batches import Batch, parse, producer_of
from tests.faults.checker import Evidence, Verdict, acknowledged, again, disagreements, judge
from tests.faults.history import Log, Request, Result, Try, read, results_of, single
from tests.integration.client import Asked, Kind
from tests.integration.judge import Delivered

TOPIC = "orders"


def asked(key: str, record_key: str | None = "r", value: bytes = b"1") -> Asked:
    return Asked(key, TOPIC, value, record_key)


def metadata_of(id: bytes, offset: int) -> str:
    return json.dumps({"id": id.hex(), "topic": TOPIC, "partition": 0, "offset": offset, "timestamp": 1})


def result(kind: Kind, id: bytes, offset: int = 0, replayed: bool = False) -> Result:
    match kind:
        case "ok":
            return Result("ok", 201, "", metadata_of(id, offset), replayed)
        case "fail":
            return Result("fail", 503, "not-written")
    return Result(kind)


def tried(request: Request, *outcomes: tuple[Kind, int], at: float = 0.0) -> Try:
    """Make a try that began at `at` and was answered a second later; an outcome is its kind and offset."""
    results = [result(kind, id, offset) for id, (kind, offset) in zip(request.ids, outcomes, strict=True)]
    return Try(request, at, at + 1, "", results)


def record(id: bytes, offset: int, *, value: bytes = b"1", record_key: bytes | None = b"r", pid: int = 5) -> Delivered:
    stamp = Stamp(id, b"f" * 8, 1, 0, pid, 0, "me").encode()
    return Delivered((TOPIC, 0, offset), record_key, value, [("fencepost", stamp)], (1, 1))


def found(tries: Sequence[Try], records: Sequence[Delivered], **more: Any) -> set[str]:
    return {kind for kind, _ in judge(Evidence({"client": tries}, records, **more)).violations}


A, B = event_id("a"), event_id("b")
WHOLE = Request("atomic", (asked("m0"), asked("m1")), "whole")
BOTH = Request("batch", (asked("a"), asked("b")))


def test_a_correct_history_has_no_violations() -> None:
    tries = [
        tried(single(asked("a")), ("info", 0), at=0),
        tried(single(asked("a")), ("ok", 3), at=2),
        tried(single(asked("b")), ("ok", 5), at=4),
        tried(single(asked("gone")), ("fail", 0), at=6),
        tried(single(asked("doubtful")), ("info", 0), at=8),
        tried(WHOLE, ("ok", 7), ("ok", 8), at=10),
    ]
    records = [record(A, 3), record(B, 5), *(record(member_id("whole", n), 7 + n) for n in (0, 1))]
    verdict = judge(Evidence({"client": tries}, records, {(TOPIC, 0): [Batch(0, 9, 5, 0, False)]}))
    assert verdict.violations == []
    figures = (verdict.keys, verdict.acknowledged, verdict.doubtful, verdict.refused, verdict.lost, verdict.duplicates)
    assert figures == (6, 4, 1, 1, 0, 0)


@pytest.mark.parametrize(
    ("kind", "records"),
    [
        ("ok", []),  # lost
        ("ok", [record(A, 4)]),  # at another offset
        ("ok", [record(A, 3), record(A, 4)]),
        ("ok", [record(A, 3, value=b"2")]),
        ("ok", [record(A, 3, record_key=None)]),
        ("info", [record(A, 3), record(A, 4)]),
        ("info", [record(A, 3, value=b"2")]),
        ("fail", [record(A, 3)]),
        ("busy", [record(A, 3)]),
    ],
)
def test_an_acknowledged_event_that_is_not_there_once_is_seen(kind: Kind, records: list[Delivered]) -> None:
    assert found([tried(single(asked("a")), (kind, 3))], records) == {"once"}


def test_a_try_without_an_end_may_be_there_once() -> None:
    open_end = Try(single(asked("a")), 0.0)
    assert found([open_end], [record(A, 3)]) == found([open_end], []) == set()
    assert found([open_end], [record(A, 3), record(A, 4)]) == {"once"}


def test_copies_on_idempotent_topics_are_counted_and_not_held_against_it() -> None:
    tries, records = [tried(single(asked("a")), ("ok", 3))], [record(A, 2), record(A, 3)]
    assert found(tries, records, repeatable=frozenset({TOPIC})) == set()
    assert found(tries, records[:1], repeatable=frozenset({TOPIC})) == {"once"}  # not at the offset of its answer
    assert judge(Evidence({"c": tries}, records, repeatable=frozenset({TOPIC}))).duplicates == 1


def test_a_record_that_nobody_sent_is_seen() -> None:
    assert found([], [record(A, 3)]) == {"stranger"}
    assert found([], [Delivered((TOPIC, 0, 3), None, b"1", [], (1, 1))]) == {"stranger"}


def test_a_part_of_an_atomic_batch_is_seen() -> None:
    assert found([tried(WHOLE, ("info", 0), ("info", 0))], [record(member_id("whole", 1), 3)]) == {"torn"}


def test_wrong_order_of_requests_that_follow_each_other_is_seen() -> None:
    tries = [tried(single(asked("a")), ("ok", 5), at=0), tried(single(asked("b")), ("ok", 4), at=2)]
    assert found(tries, [record(A, 5), record(B, 4)]) == {"order"}
    at_once = [tries[0], dataclasses.replace(tries[1], at=0.5)]
    assert found(at_once, [record(A, 5), record(B, 4)]) == set()


def test_wrong_order_within_a_batch_is_seen() -> None:
    assert found([tried(BOTH, ("ok", 5), ("ok", 4))], [record(A, 5), record(B, 4)]) == {"order"}
    again_in_parts = [tried(BOTH, ("fail", 0), ("ok", 4), at=0), tried(BOTH, ("ok", 5), ("ok", 4), at=2)]
    assert found(again_in_parts, [record(A, 5), record(B, 4)]) == set()


@pytest.mark.parametrize("batch", [Batch(0, 9, 6, 0, False), Batch(0, 9, 5, 1, False), Batch(0, 2, 5, 0, False)])
def test_a_record_of_another_producer_or_outside_of_a_transaction_is_seen(batch: Batch) -> None:
    tries = [tried(single(asked("a")), ("ok", 3))]
    assert found(tries, [record(A, 3)], batches={(TOPIC, 0): [batch]}) == {"producer"}


def test_another_answer_to_the_same_request_is_seen() -> None:
    request, was = single(asked("a")), [result("ok", A, 3)]
    same = dataclasses.replace(was[0], replayed=True)
    assert list(again(request, was, [same], "{}", "{}")) == []
    assert list(again(request, was, [same], "{}", "{ }")) != []  # byte for byte
    assert list(again(request, was, was, "{}", "{}")) != []  # written again
    for other in (result("ok", A, 4, True), result("info", A), Result("fail", 422, "fingerprint-mismatch")):
        assert list(again(request, was, [other], "", "")) != []


def test_only_what_was_acknowledged_is_posted_again() -> None:
    tries = [tried(BOTH, ("fail", 0), ("ok", 4)), tried(single(asked("c")), ("info", 0))]
    (only,) = acknowledged(tries)
    assert [event.key for event in only.request.events] == ["b"]
    assert [each.type for each in only.results] == ["ok"]


def report(*findings: tuple[str, bytes], once: int = 1) -> dict[str, Any]:
    found = [{"kind": kind, "cause": None, "id": id.hex(), "key": ""} for kind, id in findings]
    return {"findings": found, "balance": {"delivered_once": once}}


def test_the_job_and_the_checker_agree_or_it_is_said() -> None:
    once = Evidence({"c": [tried(single(asked("a")), ("ok", 3))]}, [record(A, 3)])
    assert disagreements(report(), once, Verdict()) == []
    assert disagreements(report(once=0), once, Verdict()) != []
    for kind in ("duplicate", "lost", "stuck", "conflict"):
        assert disagreements(report((kind, A)), once, Verdict()) != []
    twice = Evidence(once.tries, [record(A, 3), record(A, 4)])
    verdict = Verdict()
    assert disagreements(report(("duplicate", A), once=0), twice, verdict) == []
    assert verdict.named == 1
    assert disagreements(report(once=0), twice, Verdict()) != []
    gone = Evidence({"c": [tried(single(asked("a")), ("info", 3))]}, [])
    assert disagreements(report(("stuck", A), once=0), gone, Verdict()) == []
    # In an `idempotent` topic and in no answer, as of a killed process: the job cannot know that it was accepted.
    for topics in (frozenset[str](), frozenset({TOPIC})):
        unacknowledged = Evidence(gone.tries, [record(A, 3)], repeatable=topics)
        assert disagreements(report(), unacknowledged, Verdict()) == []
        assert bool(disagreements(report(once=0), unacknowledged, Verdict())) is not bool(topics)
        assert bool(disagreements(report(("phantom", A), once=0), unacknowledged, Verdict())) is not bool(topics)


def test_a_log_says_what_happened_also_when_it_is_cut_off(tmp_path: Path) -> None:
    log = Log(tmp_path / "client.jsonl")
    problem = Answer(503, {}, b'{"code": "not-written"}')
    body = b'{"results": [%s, {"status": 409, "problem": {"code": "in-progress"}}]}'
    member = json.loads(metadata_of(A, 3)) | {"status": 201, "replayed": True}
    log.answer(log.invoke(single(asked("a")), "x"), 503, results_of(single(asked("a")), problem), "")
    log.answer(log.invoke(BOTH, "x"), 207, results_of(BOTH, Answer(207, {}, body % json.dumps(member).encode())), "")
    log.invoke(single(asked("c")), "x")
    log.close()
    with (tmp_path / "client.jsonl").open("a") as file:
        file.write('{"type": "invoke", "n"')
    first, second, third = read(tmp_path)["client"]
    assert [each.type for each in first.results] == ["fail"]
    assert [(each.type, each.replayed) for each in second.results] == [("ok", True), ("busy", False)]
    assert third.results == []
    assert [attempt.kind for _, attempt in third.attempts()] == ["info"]


def test_the_producer_of_each_offset_is_read_from_the_batches() -> None:
    def batch(first: int, delta: int, pid: int, attributes: int = 0x10) -> bytes:
        rest = struct.pack(">ibIhiqqqhii", 0, 2, 0, attributes, delta, 0, 0, pid, 1, 0, delta + 1) + b"records"
        return struct.pack(">qi", first, len(rest)) + rest

    raw = batch(0, 2, 7) + batch(3, 0, 7, 0x30) + batch(4, 0, 8)
    read = list(parse(raw + batch(5, 0, 8)[:-1]))
    assert read == [Batch(0, 2, 7, 1, False), Batch(3, 3, 7, 1, True), Batch(4, 4, 8, 1, False)]
    assert [producer_of(read, offset) for offset in range(6)] == [(7, 1), (7, 1), (7, 1), None, (8, 1), None]
