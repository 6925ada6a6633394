"""Tests the parts of the handlers of POSTs: headers, and responses as bytes."""

import asyncio
import hashlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest

from service.claims.states import Delivered
from service.contract import CallerRule
from service.core.metrics import Telemetry
from service.core.problems import KINDS, NOT_WRITTEN, STALE_MEMBER, Problem
from service.core.settings import Settings
from service.events import event as event_module
from service.events import strict_json
from service.events.cloudevents import BATCHED, STRUCTURED
from service.events.event import NONE_IS_PLAIN, Event, parse_key
from service.events.strict_json import LONG_BYTES, check_json
from service.http import request_guard, responder
from service.http.callers import Callers
from service.http.events import EventsEndpoint
from service.http.headers import JSON, LINES, media_type, pick, unsupported
from service.http.request import OWN_BYTES, Bodies, PostRequest
from service.http.request_guard import RequestGuard
from service.http.responder import Responder
from service.http.responses import (
    committed_lines,
    echo_of,
    imf_fixdate,
    join_results,
    render_atomic,
    render_metadata,
    render_problem,
    render_results,
)
from service.pipeline.admission import Admission
from service.pipeline.load_shedding import ANSWERS_EACH, LoadShedder
from service.pipeline.request import BatchChunk, Committed, WriteResult
from tests.unit.fakes import grows_in_proportion
from tests.unit.http.test_rates import sent

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
def test_a_media_type_other_than_json_is_not_taken_for_json(content_type: str | None) -> None:
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
    """In linear time: a head may have 64 KiB."""
    assert grows_in_proportion(lambda chars: media_type(f"application/json;{piece * (chars // len(piece))}"))


def test_an_unsupported_media_type_is_answered_with_the_supported_ones() -> None:
    problem = unsupported(JSON, LINES)
    assert (problem.kind.status, problem.detail) == (
        415,
        "Content-Type: send application/json or application/x-ndjson (in UTF-8)",
    )


def test_headers_that_matter() -> None:
    found = pick(
        [(b"host", b"x"), (b"idempotency-key", b"\xe4"), (b"content-type", b"a"), (b"x-idempotency-key", b"b")]
    )
    assert found == {b"host": "x", b"idempotency-key": "ä", b"content-type": "a"}
    with pytest.raises(Problem, match="once"):
        pick([(b"idempotency-key", b"a"), (b"idempotency-key", b"a")])
    with pytest.raises(Problem, match="Host: send it once"):
        pick([(b"host", b"a"), (b"x", b"b"), (b"host", b"a")])


def test_answers_are_json() -> None:
    place = {"id": "01" * 16, "topic": "orders", "partition": 2, "offset": 12, "timestamp": 1_700_000_000_000}
    assert json.loads(render_metadata(PLACE)) == place
    answers: list[WriteResult] = [Committed(1, (PLACE,), True), Problem(KINDS["in-progress"], "wait")]
    done, busy = json.loads(join_results([render_results(answers)]))["results"]
    assert done == {"status": 201, **place, "replayed": True}
    assert (busy["status"], busy["problem"]["code"]) == (409, "in-progress")
    whole = json.loads(render_atomic(b"\x02" * 16, Committed(1, (PLACE, PLACE), False)))
    assert whole == {"id": "02" * 16, "results": [{"status": 201, **place}] * 2}
    assert render_atomic(b"\x02" * 16, Committed(1, (PLACE,), True)) == render_atomic(
        b"\x02" * 16, Committed(1, (PLACE,), False)
    )


@pytest.mark.parametrize("key", ["order-1", "a b", 'a"b\\c', '"a', '"a"', '"', " a", "a ", " ", '"\\', ' "a\\" '])
def test_the_echo_of_a_key_is_that_key(key: str) -> None:
    """As a header it must name the same event again: HTTP strips blanks, and a quote begins a string."""
    echo = echo_of(key).decode()
    assert parse_key(echo) == key
    assert (echo == key) is (key.strip() == key and key[0] != '"')
    lines = committed_lines(key, Committed(1, (PLACE,), False), 1).decode().split("\r\n")
    assert f"idempotency-key: {echo}" in lines


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.code)
def test_every_problem_is_rendered_with_its_status_code_and_type(kind: Any) -> None:
    status, headers, body = render_problem(Problem(kind, "field: remedy"))
    problem = json.loads(body)
    assert (status, problem["status"], problem["code"]) == (kind.status, kind.status, kind.code)
    assert problem["type"] == f"/problems/{kind.code}"
    assert set(problem) == {"type", "title", "status", "detail", "code"}
    assert dict(headers)[b"content-type"] == b"application/problem+json"
    # Retry-After is sent if the same request may succeed.
    may_succeed = kind.status in (409, 429, 503, 504) and kind is not STALE_MEMBER
    assert (b"retry-after" in dict(headers)) is may_succeed, kind.code


def test_a_time_is_written_as_an_http_date() -> None:
    assert imf_fixdate(784111777) == b"Sun, 06 Nov 1994 08:49:37 GMT"
    # An entry of the ledger may count in microseconds: its key is answered anyway.
    assert imf_fixdate(1_795_453_978_160_000 // 1000) == imf_fixdate(2**53) == b"Fri, 31 Dec 9999 23:59:59 GMT"


# ------------------------------------------------------------------------------------------ what a request is taken for


class FakePost(PostRequest):
    """A POST that keeps its response, without a connection."""

    bodies_bytes_max = 2**30
    was_cut = False

    def __init__(self, body: bytes, headers: dict[str, str]) -> None:
        lines = [(name.lower().encode(), text.encode("latin-1")) for name, text in headers.items()]
        super().__init__(lines, None, Bodies(self.bodies_bytes_max), keep_alive=True, chunked=True)
        self.keep(body, len(body))
        self.status, self.lines, self.said = 0, b"", b""

    def run_in_task(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    def cut(self) -> None:
        self.was_cut = True

    def answer(self, status: int, head: bytes, body: bytes) -> None:
        self.status, self.lines, self.said = status, head, body

    @property
    def detail(self) -> str:
        return str(json.loads(self.said)["detail"])


class Unread(FakePost):
    """A POST whose body must not be read."""

    @property
    def body(self) -> bytes:
        raise AssertionError("the body was read")


class Done:
    """A future that has its result already, and calls back at once."""

    def __init__(self, result: WriteResult) -> None:
        self._result = result

    def add_done_callback(self, tell: Callable[["Done"], object]) -> None:
        tell(self)

    def result(self) -> WriteResult:
        return self._result


class Commits:
    """An admission that commits every event at once."""

    overload: Problem | None = None
    ledger_bytes_max = 512 * 1024
    chunk_events = 1_000

    def new_chunk(self) -> BatchChunk:
        return BatchChunk(self.chunk_events, self.ledger_bytes_max)

    def __init__(self) -> None:
        self.checks = self
        self.load_shedder = LoadShedder()
        self.events: list[Event] = []

    def check_now(self, event: Event, fresh_key: str = "") -> bool:
        return True

    def plain_bytes_max(self, topic: str) -> int:
        return NONE_IS_PLAIN

    async def submit_chunk(self, chunk: BatchChunk) -> list[WriteResult]:
        return [Committed(1, (PLACE,), False)] * len(chunk.events)

    def submit(self, event: Event, *_: object) -> "Done":
        self.events.append(event)
        return Done(Committed(1, (PLACE,), False))


def posted(path: str, body: bytes, **headers: str) -> tuple[FakePost, list[Event]]:
    """Post a request; returns the response, and the written events. `_` in a header's name is `-`."""
    admission = Commits()
    fake = FakePost(body, {"host": "x", **{name.replace("_", "-"): text for name, text in headers.items()}})
    endpoint = EventsEndpoint(
        RequestGuard(Settings(), Callers([])), cast(Admission, admission), Telemetry(), Settings().key_ttl_s
    )
    endpoint.routes[path.encode()](fake)
    return fake, admission.events


async def test_a_request_that_finds_the_queue_full_waits_for_its_refusal_without_its_body() -> None:
    admission = Commits()
    admission.overload = Problem(NOT_WRITTEN, "the queue is full")
    endpoint = EventsEndpoint(
        RequestGuard(Settings(), Callers([])), cast(Admission, admission), Telemetry(), Settings().key_ttl_s
    )

    def post() -> FakePost:
        fake = FakePost(b"{}", {"host": "x", "content-type": "application/json"})
        endpoint.routes[b"/events"](fake)
        return fake

    while (fake := post()).status:
        assert (fake.status, fake.detail) == (503, "the queue is full")
    assert not fake.body
    for _ in range(ANSWERS_EACH):
        admission.load_shedder.answered()
    admission.load_shedder.end_due(0.0)
    await asyncio.sleep(0)
    assert (fake.status, fake.detail) == (503, "the queue is full")
    assert not admission.events


CLOUD = {"specversion": "1.0", "id": "42", "source": "/shop/7", "type": "made"}
CE_HEADERS = {f"ce_{name}": text for name, text in CLOUD.items()}


@pytest.mark.parametrize("content_type", [STRUCTURED, "Application/CloudEvents+JSON ; charset=utf-8"])
def test_a_structured_cloudevent_may_have_its_attributes_in_headers_too(content_type: str) -> None:
    """CloudEvents' HTTP binding, sections 3 and 3.2.3: the content type decides the mode."""
    body = json.dumps({**CLOUD, "data": 1}).encode()
    fake, (event,) = posted("/events", body, content_type=content_type, **CE_HEADERS)
    assert fake.status == 201
    assert (event.value, event.headers) == (body, [("content-type", STRUCTURED.encode())])


def test_a_batch_of_cloudevents_is_parsed_as_a_batch_in_spite_of_its_headers() -> None:
    fake, events = posted("/events", b"{}", content_type=BATCHED, **CE_HEADERS)
    assert (fake.status, events) == (400, [])
    assert "array" in fake.detail


def test_an_empty_batch_of_cloudevents_has_no_results() -> None:
    fake, events = posted("/events", b"[]", content_type=BATCHED)
    assert (fake.status, json.loads(fake.said), events) == (207, {"results": []}, [])


@pytest.mark.parametrize(
    "content_type",
    [None, "text/plain", "text/plain; charset=latin-1", JSON, "application/json; charset=utf-16", "application/xml;;"],
)
def test_the_data_of_a_binary_cloudevent_is_of_any_type_and_charset(content_type: str | None) -> None:
    headers = CE_HEADERS if content_type is None else {**CE_HEADERS, "content_type": content_type}
    fake, (event,) = posted("/events", b"\xe9", **headers)
    assert fake.status == 201
    assert (event.value, event.key) == (b"\xe9", "/shop/7 42")
    assert dict(event.headers).get("content-type") == (content_type and content_type.encode())


@pytest.mark.parametrize("path", ["/events", "/events/batch"])
def test_a_body_that_arrives_at_capacity_is_answered_503_with_retry_after(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakePost, "bodies_bytes_max", 0)
    fake, events = posted(path, bytes(2 * OWN_BYTES), content_type=JSON, idempotency_key="k")
    assert (fake.status, json.loads(fake.said)["code"], events) == (503, "not-written", [])
    assert b"retry-after: 1\r\n" in fake.lines


@pytest.mark.parametrize("coding", ["br", "compress", "identity, gzip", "gzip, gzip", "gzip;q=1", "x-deflate"])
@pytest.mark.parametrize("path", ["/events", "/events/batch"])
def test_a_body_in_another_coding_or_several_is_refused_with_those_that_are_taken(path: str, coding: str) -> None:
    fake, events = posted(path, b"{}", content_encoding=coding, content_type=JSON, idempotency_key="k")
    assert (fake.status, json.loads(fake.said)["code"], events) == (415, "unsupported-encoding", [])
    assert fake.detail == "Content-Encoding: send one of gzip, deflate, zstd, or none"
    assert b"accept-encoding: gzip, deflate, zstd\r\n" in fake.lines


@pytest.mark.parametrize("coding", ["identity", "Identity", " identity ", ""])
def test_a_body_with_the_identity_coding_is_accepted(coding: str) -> None:
    fake, (event,) = posted("/events", b"1", content_encoding=coding, **CE_HEADERS)
    assert (fake.status, event.value) == (201, b"1")


def test_a_415_for_the_media_type_has_no_accept_encoding() -> None:
    """RFC 9110, section 12.5.3: Accept-Encoding is only for a 415 about the coding."""
    fake, _ = posted("/events", b"1", content_type="text/plain")
    assert fake.status == 415
    assert b"accept-encoding" not in fake.lines


@pytest.mark.parametrize("name", [b"content-encoding", b"content-type", b"authorization", b"traceparent", b"prefer"])
def test_several_lines_are_one_list(name: bytes) -> None:
    """RFC 9110, section 5.2: the last of two tokens, or of two types, must not be used alone."""
    assert pick([(name, b"one"), (name, b"another")]) == {name: "one, another"}


@pytest.mark.parametrize("where", ["events.committed_lines", "single_event.render_metadata"])
def test_a_reply_that_raises_is_answered_500_and_ends_its_connection(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the client would wait for a response that never comes: the event's deadline has passed."""
    monkeypatch.setattr(f"service.http.{where}", lambda *_: 1 / 0)
    fake, events = posted("/events", b'{"topic":"t","value":1}', content_type=JSON, idempotency_key="k")
    assert len(events) == 1
    assert (fake.status, fake.keep_alive) == (500, False)


def test_an_answer_that_cannot_be_written_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(fake: FakePost, *_: object) -> None:
        fake.answered = True
        raise RuntimeError("the transport")

    monkeypatch.setattr(FakePost, "answer", breaks)
    fake, _ = posted("/events", b'{"topic":"t","value":1}', content_type=JSON, idempotency_key="k")
    assert fake.was_cut


async def test_work_that_is_cancelled_from_within_is_answered_500_and_ends_its_connection() -> None:
    """By another than the task's owner. The client must not wait for a response that never comes."""
    fake = FakePost(b"", {})

    async def work() -> None:
        awaited = asyncio.get_running_loop().create_future()
        awaited.cancel()
        await awaited

    await Responder(Telemetry(), lambda _: {}).or_fail(fake, work())
    assert (fake.status, fake.keep_alive) == (500, False)


async def test_work_whose_task_is_cancelled_is_not_answered() -> None:
    """The process ends, and the connection with it."""
    fake = FakePost(b"", {})
    working = asyncio.create_task(Responder(Telemetry(), lambda _: {}).or_fail(fake, asyncio.sleep(60)))
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert fake.status == 0


def test_the_addresses_of_the_loopback_that_are_known_have_a_bound() -> None:
    for n in range(1_000):
        assert request_guard._is_loopback(f"127.0.{n // 256}.{n % 256}")
    assert request_guard._is_loopback.cache_info().currsize <= 256
    assert not request_guard._is_loopback("10.0.0.1")


LONG = "x" * LONG_BYTES
LONG_EVENT = {"topic": "t", "value": LONG}
LONG_MEMBER = {**LONG_EVENT, "idempotency_key": "k"}


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/events", JSON, LONG_EVENT),
        ("/events", STRUCTURED, {**CLOUD, "data": LONG}),
        ("/events", BATCHED, [{**CLOUD, "data": LONG}]),
        ("/events/batch", JSON, {"events": [LONG_MEMBER], "atomic": False, "more": 1}),
        ("/events/batch", JSON, {"events": [LONG_MEMBER, {**LONG_MEMBER, "idempotency_key": None}]}),
        ("/events/batch", JSON, {"events": [LONG_EVENT, {"topic": "t"}], "atomic": True}),
    ],
    ids=["event", "structured", "batched", "refused", "batch", "atomic"],
)
def test_a_long_body_is_checked_in_a_thread(path: str, kind: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking 8 MiB on the event loop would hold it."""
    where: list[str] = []

    def noted(check: Callable[[bytes], None]) -> Callable[[bytes], None]:
        def of(text: bytes) -> None:
            if len(text) > LONG_BYTES:
                where.append(threading.current_thread().name)
            check(text)

        return of

    monkeypatch.setattr(strict_json, "check_json", noted(check_json))
    monkeypatch.setattr(event_module, "check_json", noted(check_json))
    key = {} if kind == BATCHED else {"idempotency_key": "k"}
    fake, _ = posted(path, json.dumps(body).encode(), content_type=kind, **key)
    assert fake.status
    assert where
    assert all(name.startswith("long-json") for name in where)


async def test_the_results_of_a_batch_are_rendered_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering 10,000 different problems in one step would hold the event loop."""
    rendered, between = 0, []

    async def others() -> None:
        while True:
            between.append(rendered)
            await asyncio.sleep(0)

    async def groups() -> AsyncIterator[list[WriteResult]]:
        yield [Problem(NOT_WRITTEN, f"{n}") for n in range(10_000)]
        yield []
        yield [Problem(NOT_WRITTEN, "the last")]

    monkeypatch.setattr("service.core.time_slice.SLICE_S", 0.0)
    other = asyncio.create_task(others())
    steps = []
    async for results in responder.in_steps(groups()):
        steps.append(len(results))
        rendered += len(results)
    other.cancel()
    assert steps == [responder.RENDERED_AT_ONCE] * 200 + [1]
    assert max(after - before for before, after in itertools.pairwise([0, *between, rendered])) <= max(steps)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/events", JSON), ("/events", BATCHED), ("/events/batch", JSON)],
)
async def test_a_caller_past_its_rate_is_refused_before_its_body_is_read(path: str, kind: str) -> None:
    rules = [CallerRule("shop", (hashlib.sha256(b"s3cret").hexdigest(),), rate=1)]
    callers = Callers(rules)
    assert await sent(callers.of("Bearer s3cret"), 5) == 0
    await asyncio.sleep(0.01)
    fake = Unread(b"", {"host": "x", "authorization": "Bearer s3cret", "content-type": kind, "idempotency-key": "k"})
    endpoint = EventsEndpoint(
        RequestGuard(Settings(), callers), cast(Admission, Commits()), Telemetry(), Settings().key_ttl_s
    )
    endpoint.routes[path.encode()](fake)
    assert fake.status == 429
