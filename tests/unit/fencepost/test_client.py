"""Tests the client for applications: what it sends, repeats and concludes, for threads and for asyncio alike."""

import asyncio
import json
import math
import pickle
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from deploy.places import ROOT
from service.core.problems import KINDS
from service.events.key_time import made_at_ms
from service.events.offsets import parse_offsets
from service.fencepost.client import (
    AsyncClient,
    Client,
    Event,
    KeyExpired,
    KeyReused,
    NotAccepted,
    Offsets,
    Refused,
    SendError,
    Spool,
    SpoolError,
    StaleMember,
    Unsettled,
    Written,
    WrittenBatch,
    new_key,
)
from service.fencepost.client.answers import PAGE_BYTES, PAGE_EVENTS, Problem
from service.fencepost.client.client import FIRST_PAUSE_S, PAUSE_MAX_S
from service.fencepost.client.events import Pending
from service.http.batch import parse_batch
from service.http.responses import echo_of
from service.kafka.group_offsets import GroupOffsets, Position
from tests.unit.fencepost.clients import raised, transport
from tests.unit.fencepost.fakes import (
    CONNECT,
    CUT,
    CUT_AMID,
    EXPIRED,
    FAULTS,
    LOST,
    UNKNOWN,
    UNKNOWN_NAME,
    FakeService,
    FakeTime,
    problem_response,
)

# --------------------------------------------------------------------------------------------------------- requests


def test_a_key_is_a_uuid_of_version_7_that_tells_when_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr("service.fencepost.client.events.time", clock)
    clock.now = 1_795_000_000.123
    keys = {new_key() for _ in range(1_000)}
    assert len(keys) == 1_000
    assert {made_at_ms(key) for key in keys} == {clock.time_ns() // 1_000_000}
    assert {(uuid.UUID(key).version, uuid.UUID(key).variant) for key in keys} == {(7, uuid.RFC_4122)}
    assert len({key[15:18] for key in keys}) > 100  # the random bits before the variant
    first, second = Event("t", 1).idempotency_key, Event("t", 1).idempotency_key
    assert first != second
    assert made_at_ms(first) == made_at_ms(second) == clock.time_ns() // 1_000_000


def test_an_event_is_encoded_as_the_service_reads_it() -> None:
    event = Event("t", {"é": [1, None]}, key="k", headers={"a": "b"}, partition=0, timestamp=0)
    assert json.loads(event.encode()) == {
        "topic": "t",
        "value": {"é": [1, None]},
        "key": "k",
        "headers": {"a": "b"},
        "partition": 0,
        "timestamp": 0,
    }
    assert Event("t", {"é": 1}).encode() == '{"topic":"t","value":{"é":1}}'.encode()
    assert json.loads(Event("t", b"\xff").encode()) == {"topic": "t", "value_base64": "/w=="}
    assert json.loads(Event("t", None, key="k").encode()) == {"topic": "t", "value": None, "key": "k"}
    for value in (float("nan"), object(), "\ud800"):
        with pytest.raises((TypeError, ValueError)):
            Event("t", value).encode()


@pytest.mark.parametrize("key", ["order-1", 'a"b\\c', '"', " spaces "])
def test_any_key_arrives_as_it_is(kind: Any, clock: FakeTime, key: str) -> None:
    fake = FakeService()
    kind(fake).send(Event("t", 1, idempotency_key=key))
    kind(fake).send_many(Event("t", 1, idempotency_key=key), Event("t", 2))
    assert next(iter(fake.places)) == key
    assert fake.written == [1, 2]


@pytest.mark.parametrize("key", ["commande-é", "a\nb", "a\n", "", "\x7f", "\ud800", "k" * 256])
def test_a_key_that_the_service_does_not_take_is_refused_before_it_is_stored(key: str) -> None:
    with pytest.raises(ValueError, match="idempotency_key: use 1 to 255 printable ASCII characters, not '"):
        Event("t", 1, idempotency_key=key)
    assert Event("t", 1, idempotency_key="k" * 255).idempotency_key == "k" * 255


def test_the_caller_s_token_and_options_reach_httpx(kind: Any, clock: FakeTime) -> None:
    fake = FakeService()
    kind(fake, token="secret", headers={"X-Trace": "1"}).send(Event("t", 1))
    (request,) = fake.requests
    assert (request.headers["authorization"], request.headers["x-trace"]) == ("Bearer secret", "1")
    assert request.extensions["timeout"] == {"connect": 5.0, "read": 15.0, "write": 15.0, "pool": 15.0}
    with pytest.raises(ValueError, match="url: write http:// or https://"):
        Client("localhost:8000")
    with Client("https://host/prefix/", transport=transport(fake)) as client:
        client.send(Event("t", 1))
    assert str(fake.requests[-1].url) == "https://host/prefix/events"


@pytest.mark.parametrize("key", [5, uuid.UUID(int=7), b"order-1", None])
def test_a_key_that_is_no_text_is_refused_with_the_field_s_name(key: Any) -> None:
    """As the primary key of a row."""
    for made in (lambda: Event("t", 1, idempotency_key=key), lambda: Client("http://h").send_atomic(key, [])):
        with pytest.raises(ValueError, match="idempotency_key: use 1 to 255 printable ASCII characters, not "):
            made()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "http://h:8000 ",
        " http://h",
        "http://h\n",
        "http://h:port",
        "http://h?a=b",
        "http://h#a",
    ],
)
def test_an_address_that_cannot_be_one_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ValueError, match="url: write http:// or https:// and the service's address, not '"):
        Client(url)


@pytest.mark.parametrize("deadline_s", [0, -1.0, math.nan])
def test_a_deadline_that_leaves_no_time_is_refused(deadline_s: float) -> None:
    with pytest.raises(ValueError, match="deadline_s: write seconds above 0, not "):
        Client("http://h", deadline_s=deadline_s)


def test_a_call_without_any_deadline_has_no_timeouts_that_a_socket_refuses(kind: Any, clock: FakeTime) -> None:
    fake = FakeService()
    kind(fake, deadline_s=math.inf, timeout=None).send(Event("t", 1))
    assert set(fake.requests[0].extensions["timeout"].values()) == {None}


@pytest.mark.parametrize("token", ["", "abc\n", "abc def", "\u00e9"])
def test_a_token_that_no_header_carries_is_refused_before_anything_is_sent(token: str) -> None:
    """As read from a file with its line break. httpx would call each attempt a lost connection."""
    with pytest.raises(ValueError, match="token: it is empty, or has"):
        Client("http://fencepost.test", token=token)


def test_many_events_are_sent_in_requests_within_the_bounds_and_in_order(kind: Any, clock: FakeTime) -> None:
    fake = FakeService()
    many = [Event("t", n) for n in range(PAGE_EVENTS + 1)]
    results = kind(fake).send_many(*many)
    assert [result.offset for result in results] == list(range(PAGE_EVENTS + 1))
    assert [result.idempotency_key for result in results] == [event.idempotency_key for event in many]
    assert [request.url.path for request in fake.requests] == ["/events/batch", "/events"]
    large = [Event("t", "x" * (PAGE_BYTES // 3)) for _ in range(5)]
    kind(fake).send_many(*large)
    assert [len(request.content) // (PAGE_BYTES // 3) for request in fake.requests[2:]] == [2, 2, 1]
    assert kind(fake).send_many() == []
    assert len(fake.requests) == 5


# ---------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != CUT_AMID])
def test_an_attempt_without_a_final_answer_is_repeated_under_the_same_key(
    kind: Any, clock: FakeTime, fault: str
) -> None:
    fake = FakeService([fault, fault])
    event = Event("t", 1)
    written = kind(fake).send(event)
    assert fake.written == [1]
    assert {request.headers["idempotency-key"] for request in fake.requests} == {f'"{event.idempotency_key}"'}
    assert len(fake.requests) == (1 if fault == "ok" else 3)
    assert written.replayed == (fault in (CUT, UNKNOWN))
    least_s = 1.0 if fault in ("503", "429", "409", UNKNOWN) else 0.0  # Retry-After
    assert all(least_s + FIRST_PAUSE_S / 2 <= pause <= least_s + 2 * FIRST_PAUSE_S for pause in clock.pauses)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_batch_is_repeated_for_the_events_without_a_result(kind: Any, clock: FakeTime, fault: str) -> None:
    fake = FakeService([fault])
    events = [Event("t", n) for n in range(4)]
    results = kind(fake).send_many(*events)
    assert [result.idempotency_key for result in results] == [event.idempotency_key for event in events]
    assert fake.written == [0, 1, 2, 3]
    if fault == CUT_AMID:  # the results of the first lines have come
        assert fake.requests[1].content.count(b"\n") in (2, 3)


def test_a_refused_event_is_final_and_leaves_the_others(kind: Any, clock: FakeTime) -> None:
    fake = FakeService([UNKNOWN])
    same = new_key()
    events = [
        Event("t", 0),
        Event(UNKNOWN_NAME, 1),
        Event("t", 2, idempotency_key=same),
        Event("t", 3, idempotency_key=same),
        Event("t", 4, idempotency_key=EXPIRED),
    ]
    results = kind(fake).send_many(*events)
    assert [type(result) for result in results] == [Written, Refused, Written, KeyReused, KeyExpired]
    refused, reused, expired = (raised(results[n]) for n in (1, 3, 4))
    assert (refused.status, refused.code, refused.detail) == (404, "unknown-topic", "topic: as the test says")
    assert refused.body == events[1].encode()
    assert (reused.code, expired.code) == ("fingerprint-mismatch", "key-expired")
    assert [each.may_be_written for each in (refused, expired)] == [True, True]  # 504 came first; 412 says so itself
    assert fake.written == [0, 2]
    assert len(fake.requests) == 2
    with pytest.raises(KeyExpired, match="412 key-expired"):
        kind(fake).send(events[4])
    with pytest.raises(Refused) as caught:
        kind(fake).send(events[1])
    assert not caught.value.may_be_written


def test_events_and_results_can_be_pickled() -> None:
    """As for a pool of processes, or the results of a task queue."""
    written = Written("k", "ab", "t", 0, 3, 4, True)
    for each in (
        Event("t", {"a": 1}, headers={"b": "c"}),
        written,
        WrittenBatch("k", "cd", (written,), False),
        OFFSETS,
    ):
        assert pickle.loads(pickle.dumps(each)) == each
    for error_type in (Refused, KeyExpired, KeyReused, StaleMember, Unsettled, NotAccepted):
        error = error_type(Pending("k", b"{}"), 422, "code", "why", True)
        error.add_note("a note")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (error_type, str(error), vars(error))
        assert isinstance(again, SendError)
    for client in (Client("http://h"), AsyncClient("http://h")):
        with pytest.raises(TypeError, match=f"^{type(client).__name__}: .* make a client in each process"):
            pickle.dumps(client)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (problem_response(KINDS["unauthorized"]), "401 unauthorized"),
        (problem_response(KINDS["forbidden-caller"]), "403 forbidden-caller"),
        (httpx.Response(404, text="<h1>nginx"), "404 : not an answer of Fencepost: <h1>nginx"),
        (httpx.Response(301, headers={"location": "https://x"}), "301"),
        (httpx.Response(200, json=[]), r"200 : not an answer of Fencepost: \[\]"),
        (httpx.Response(201, json={"id": 1}), "201 : not an answer of Fencepost"),
        (httpx.Response(422, json={"code": "x", "type": "y"}), "422"),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_refused_request_refuses_no_event(
    kind: Any, clock: FakeTime, tmp_path: Path, answer: httpx.Response, message: str, count: int
) -> None:
    events = [Event("t", n) for n in range(count)]
    sender = kind(lambda request: httpx.Response(answer.status_code, headers=answer.headers, content=answer.content))
    sender.options["spool"] = tmp_path / "s"
    results = sender.send_many(*events)
    assert [type(result) for result in results] == [NotAccepted] * count
    assert clock.pauses == []
    with pytest.raises(NotAccepted, match=message):
        raise raised(results[0])
    fake = FakeService()  # after the token or the address was corrected
    assert [type(each) for each in kind(fake, spool=tmp_path / "s").resume()] == [Written] * count
    assert fake.written == list(range(count))


def test_a_line_that_is_no_result_leaves_its_event_open(kind: Any, clock: FakeTime) -> None:
    sender = kind(lambda request: httpx.Response(207, content=b'{"status":[]}\n{"status":201}\n'), deadline_s=0.04)
    results = sender.send_many(Event("t", 1), Event("t", 2))
    assert [(raised(each).status, raised(each).may_be_written) for each in results] == [(0, True), (201, True)]


def test_each_problem_that_the_service_has_is_repeated_or_final_as_it_says() -> None:
    event = Pending("k", b"{}")
    found = {code: Problem(kind.status, code, "").error(event, False) for code, kind in KINDS.items()}
    repeated = {code for code, kind in KINDS.items() if kind.retry_after_s or kind.status in (408, 500)}
    assert {code for code, error in found.items() if type(error) is Unsettled} == repeated
    # These refuse the event; a newer service may have more of them.
    assert {
        "invalid-event",
        "fingerprint-mismatch",
        "forbidden-topic",
        "invalid-key",
        "key-expired",
        "record-refused",
        "schema-mismatch",
        "too-large",
        "unknown-topic",
    } <= {code for code, error in found.items() if isinstance(error, Refused)}
    of_request = {"unauthorized", "forbidden-caller", "not-found", "method-not-allowed", "unsupported-media-type"}
    assert of_request <= {code for code, error in found.items() if isinstance(error, NotAccepted)}


# -------------------------------------------------------------------------------------------------- atomic batches

OFFSETS = Offsets("g", "m", 7, {("orders", 1): 6, ("orders", 0): 5})
ROW = {"status": 201, "id": "ab", "topic": "t", "partition": 0, "offset": 3, "timestamp": 4}


class Answers:
    """A service that gives these answers, one after the other."""

    def __init__(self, *answers: httpx.Response) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.answers.pop(0)


def test_an_atomic_batch_is_repeated_with_its_key_and_offsets_until_it_is_written(kind: Any, clock: FakeTime) -> None:
    answer = httpx.Response(201, json={"id": "cd", "results": [ROW]}, headers={"idempotent-replayed": "true"})
    fake = Answers(problem_response(KINDS["not-written"]), problem_response(KINDS["outcome-unknown"]), answer)
    written = kind(fake).send_atomic("k 1", Event("t", 1, key="c"), offsets=OFFSETS)
    assert written == WrittenBatch("k 1", "cd", (Written("k 1", "ab", "t", 0, 3, 4, True),), True)
    first, *others = fake.requests
    assert all((other.url, other.content) == (first.url, first.content) for other in others)
    assert (first.url.path, first.headers["idempotency-key"]) == ("/events/batch", '"k 1"')
    body = parse_batch(first.content)
    assert (body.atomic, len(body.events)) == (True, 1)
    positions = (Position("orders", 0, 5), Position("orders", 1, 6))
    assert parse_offsets(body.offsets) == GroupOffsets("g", "m", 7, positions)


def test_a_stale_member_is_told_at_once(kind: Any, clock: FakeTime) -> None:
    with pytest.raises(StaleMember) as stale:
        kind(Answers(problem_response(KINDS["stale-member"]))).send_atomic("k", offsets=OFFSETS)
    assert (stale.value.may_be_written, clock.pauses) == (False, [])
    with pytest.raises(NotAccepted):
        kind(Answers(httpx.Response(201, json={"id": "cd", "results": [{}]}))).send_atomic("k", Event("t", 1))
    with pytest.raises(ValueError, match="idempotency_key"):
        kind(Answers()).send_atomic("é")


# ------------------------------------------------------------------------------------------------- pauses, deadline


@pytest.mark.parametrize(
    ("raw", "least_s"),
    [
        ("7", 7),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10),  # the clock is at 1,000 s
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("soon", 0),
        ("-1", 0),
        ("", 0),
    ],
)
def test_retry_after_is_kept_as_seconds_and_as_a_date(kind: Any, clock: FakeTime, raw: str, least_s: float) -> None:
    answers = iter([httpx.Response(503, headers={"retry-after": raw})])
    fake = FakeService()
    kind(lambda request: next(answers, None) or fake(request)).send(Event("t", 1))
    (pause_s,) = clock.pauses
    assert least_s + FIRST_PAUSE_S / 2 <= pause_s <= least_s + FIRST_PAUSE_S


def test_pauses_double_up_to_a_bound_and_end_with_the_deadline(kind: Any, clock: FakeTime) -> None:
    fake = FakeService([CONNECT] * 100)
    event = Event("t", 1)
    with pytest.raises(Unsettled, match="no answer no-connection: ConnectError: refused") as caught:
        kind(fake, deadline_s=60.0).send(event)
    assert not caught.value.may_be_written
    bounds = [min(PAUSE_MAX_S, FIRST_PAUSE_S * 2**n) for n in range(len(clock.pauses))]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(clock.pauses, bounds, strict=True))
    assert 60.0 - PAUSE_MAX_S <= sum(clock.pauses) < 60.0
    assert len(fake.requests) == len(clock.pauses) + 1
    # No step of an attempt may take longer than is left.
    assert fake.requests[-1].extensions["timeout"]["read"] == pytest.approx(1_060.0 - clock.now)


def test_a_retry_after_behind_the_deadline_ends_the_call_at_once(kind: Any, clock: FakeTime) -> None:
    fake = FakeService(["503"])
    results = kind(fake, deadline_s=0.5).send_many(Event("t", 1), Event("t", 2))
    assert [(raised(each).code, raised(each).may_be_written) for each in results] == [("not-written", False)] * 2
    assert clock.pauses == []


def test_what_the_deadline_leaves_no_time_for_is_not_sent(kind: Any, clock: FakeTime) -> None:
    fake = FakeService([LOST] * 100)
    results = kind(fake, deadline_s=3.0).send_many(*[Event("t", n) for n in range(PAGE_EVENTS + 1)])
    first, last = raised(results[0]), raised(results[-1])
    assert (first.code, first.may_be_written) == ("no-answer", True)
    assert fake.written == []
    assert last.code in ("not-sent", "no-answer")  # the first request leaves at most a pause for the second one


@pytest.mark.parametrize("key", ["mine", ' "mine\\" '])
def test_an_answer_for_another_key_does_not_settle_an_event(kind: Any, clock: FakeTime, key: str) -> None:
    """As from a proxy that mixes up the answers of a connection: the event would be taken for written."""
    fake, echoes = FakeService(), iter([b"another", b'"another"', echo_of(key)])

    def answered(request: httpx.Request) -> httpx.Response:
        response = fake(request)
        response.headers["idempotency-key"] = next(echoes).decode()
        return response

    assert kind(answered).send(Event("t", 1, idempotency_key=key)).replayed
    assert next(echoes, None) is None
    with pytest.raises(Unsettled, match="for another key, 'another'") as caught:
        kind(lambda request: httpx.Response(201, headers={"idempotency-key": "another"}), deadline_s=3.0).send(
            Event("t", 1)
        )
    assert caught.value.may_be_written


def test_a_result_of_a_batch_that_is_for_another_key_does_not_settle_an_event(kind: Any, clock: FakeTime) -> None:
    fake = FakeService()
    events = [Event("t", 0), Event("t", 1), Event("t", 2), Event(UNKNOWN_NAME, 3)]

    def answered(request: httpx.Request) -> httpx.Response:
        response = fake(request)
        first = len(fake.requests) == 1
        lines = response.content.splitlines(keepends=True)
        return httpx.Response(207, content=b"".join([lines[0], *(reversed(lines[1:]) if first else lines[1:])]))

    results = kind(answered).send_many(*events)
    assert [(type(each), each.idempotency_key) for each in results] == [
        (kind_of, event.idempotency_key) for kind_of, event in zip([Written] * 3 + [Refused], events, strict=True)
    ]
    assert [each.offset for each in results[:3]] == [0, 1, 2]
    assert [len(request.content.splitlines()) for request in fake.requests] == [4, 2]  # in the middle is its own


def test_results_without_keys_are_those_of_an_earlier_release(kind: Any, clock: FakeTime) -> None:
    lines = b"".join(json.dumps({**ROW, "offset": n, "replayed": False}).encode() + b"\n" for n in range(2))
    results = kind(Answers(httpx.Response(207, content=lines))).send_many(Event("t", 1), Event("t", 2))
    assert [each.offset for each in results] == [0, 1]


class Trickling(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body without end, a line a second."""

    def __init__(self, clock: FakeTime, line: bytes) -> None:
        self._clock, self._line = clock, line

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self._clock.now += 1.0
            yield self._line

    async def __aiter__(self) -> Any:
        for part in self:
            yield part


@pytest.mark.parametrize("line", [b"\n", b"x" * 1024 * 1024], ids=["slow", "large"])
def test_an_answer_without_end_ends_with_the_deadline_or_its_bound(kind: Any, clock: FakeTime, line: bytes) -> None:
    sender = kind(lambda request: httpx.Response(201, stream=Trickling(clock, line)), deadline_s=10.0)
    with pytest.raises(Unsettled, match="the answer did not end in time") as caught:
        sender.send(Event("t", 1))
    assert caught.value.may_be_written
    assert clock.now <= 1_000.0 + 11.0


# ---------------------------------------------------------------------------------------- processes and event loops


def test_another_event_loop_is_told_to_have_a_client_of_its_own(tmp_path: Path) -> None:
    """Its connections end with the loop: httpx would find them open, and fail with "Event loop is closed"."""
    client = AsyncClient("http://127.0.0.1:1", spool=Spool(tmp_path / "s"), deadline_s=0.01)
    with pytest.raises(Unsettled):
        asyncio.run(client.send(Event("t", 1)))
    calls: list[Callable[[], Coroutine[Any, Any, object]]] = [lambda: client.send(Event("t", 2)), client.aclose]
    for call in calls:
        with pytest.raises(RuntimeError, match="event loop of its first call: make a client in each loop"):
            asyncio.run(call())
    with Spool(tmp_path / "s") as spool:  # closed, and the second event is not in it
        assert len(spool) == 1


def test_a_client_with_a_transport_of_the_program_may_change_loops() -> None:
    """As in tests, whose transport has no connections."""
    fake = FakeService()
    client = AsyncClient("http://h", transport=transport(fake))
    for n in range(2):
        assert asyncio.run(client.send(Event("t", n))).offset == n


def test_a_closed_client_sends_no_more_and_says_so(tmp_path: Path) -> None:
    with Client("http://h", transport=transport(FakeService()), spool=tmp_path / "s") as client:
        client.close()
    with pytest.raises(SpoolError, match="it is closed: open it again, by a new client"):
        client.send(Event("t", 1))
    with Client("http://h", transport=transport(FakeService())) as client:
        client.close()
    with pytest.raises(RuntimeError, match="the client has been closed"):
        client.send(Event("t", 1))


class Answering(BaseHTTPRequestHandler):
    """A service that keeps its connections; `ports` has the client's port of each request."""

    protocol_version = "HTTP/1.1"
    ports: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.ports.append(self.client_address[1])
        body = json.dumps({"id": "00", "topic": "t", "partition": 0, "offset": 1, "timestamp": 2}).encode()
        self.send_response(201)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


FORKS = """
import os, sys
import httpx
from service.fencepost.client import Client, Event

with Client(sys.argv[1], **eval(sys.argv[2])) as client:
    client.send(Event("t", 1))
    if os.fork() == 0:
        client.send(Event("t", 2))
        sys.exit()
    os.wait()
    client.send(Event("t", 3))
"""


@pytest.mark.parametrize(
    ("options", "said"), [("{}", ""), ("{'transport': httpx.HTTPTransport()}", "RuntimeError: transport: ")]
)
def test_a_forked_process_has_connections_of_its_own_or_none(options: str, said: str) -> None:
    """On one that is shared, each process may read the answer to a request of the other."""
    Answering.ports.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            program = subprocess.run(
                [sys.executable, "-c", FORKS, url, options], cwd=ROOT, capture_output=True, timeout=60
            )
        finally:
            server.shutdown()
            serving.join()
    assert program.returncode == 0
    last_line = program.stderr.decode().rstrip().rpartition("\n")[2]
    assert last_line.startswith(said)
    assert bool(last_line) is bool(said)
    first, *forked, last = Answering.ports
    assert first == last
    assert bool(forked) is not bool(said)
    assert first not in forked
