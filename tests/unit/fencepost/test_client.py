"""Tests the client for applications: what it sends, repeats and concludes, for threads and for asyncio alike."""

import asyncio
import contextlib
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.problems import KINDS
from service.events.key_time import made_at_ms
from service.fencepost.client import (
    AsyncClient,
    Client,
    Event,
    KeyExpired,
    KeyReused,
    NotAccepted,
    Refused,
    Result,
    SendError,
    Spool,
    SpoolError,
    SpoolFull,
    Unsettled,
    Written,
    new_key,
)
from service.fencepost.client.answers import PAGE_BYTES, PAGE_EVENTS, Problem
from service.fencepost.client.client import FIRST_PAUSE_S, PAUSE_MAX_S
from service.fencepost.client.events import Pending
from tests.unit.fencepost.fakes import (
    CONNECT,
    CUT,
    CUT_AMID,
    EXPIRED,
    FATES,
    LOST,
    RETENTION_S,
    UNKNOWN,
    UNKNOWN_NAME,
    FakeService,
    FakeTime,
    problem_response,
)

URL = "http://fencepost.test"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return patched(monkeypatch)


def patched(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr("service.fencepost.client.client.time", clock)
    monkeypatch.setattr("service.fencepost.client.answers.time", clock)
    monkeypatch.setattr("service.fencepost.client.spool.time", clock)
    monkeypatch.setattr(asyncio, "sleep", clock.asyncio_sleep)
    return clock


def transport(fake: Any) -> httpx.MockTransport:
    return httpx.MockTransport(fake)


class Threads:
    """A client, by the calls that a test makes of either."""

    def __init__(self, fake: Any, **options: Any) -> None:
        self.fake, self.options = fake, options

    def send_many(self, *events: Event) -> list[Result]:
        with Client(URL, transport=transport(self.fake), **self.options) as client:
            return client.send_many(events)

    def send(self, event: Event) -> Written:
        with Client(URL, transport=transport(self.fake), **self.options) as client:
            return client.send(event)

    def resume(self) -> list[Result]:
        with Client(URL, transport=transport(self.fake), **self.options) as client:
            return list(client.resume())


class Asyncio(Threads):
    """The same calls, of the client for asyncio."""

    def send_many(self, *events: Event) -> list[Result]:
        async def run() -> list[Result]:
            async with AsyncClient(URL, transport=transport(self.fake), **self.options) as client:
                return await client.send_many(events)

        return asyncio.run(run())

    def send(self, event: Event) -> Written:
        async def run() -> Written:
            async with AsyncClient(URL, transport=transport(self.fake), **self.options) as client:
                return await client.send(event)

        return asyncio.run(run())

    def resume(self) -> list[Result]:
        async def run() -> list[Result]:
            async with AsyncClient(URL, transport=transport(self.fake), **self.options) as client:
                return [result async for result in client.resume()]

        return asyncio.run(run())


@pytest.fixture(params=[Threads, Asyncio])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def raised(result: Result | None) -> SendError:
    assert isinstance(result, SendError)
    return result


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


@pytest.mark.parametrize("fate", [fate for fate in FATES if fate != CUT_AMID])
def test_an_attempt_without_a_final_answer_is_repeated_under_the_same_key(
    kind: Any, clock: FakeTime, fate: str
) -> None:
    fake = FakeService([fate, fate])
    event = Event("t", 1)
    written = kind(fake).send(event)
    assert fake.written == [1]
    assert {request.headers["idempotency-key"] for request in fake.requests} == {f'"{event.idempotency_key}"'}
    assert len(fake.requests) == (1 if fate == "ok" else 3)
    assert written.replayed == (fate in (CUT, UNKNOWN))
    least_s = 1.0 if fate in ("503", "429", "409", UNKNOWN) else 0.0  # Retry-After
    assert all(least_s + FIRST_PAUSE_S / 2 <= pause <= least_s + 2 * FIRST_PAUSE_S for pause in clock.pauses)


@pytest.mark.parametrize("fate", FATES)
def test_a_batch_is_repeated_for_the_events_without_a_result(kind: Any, clock: FakeTime, fate: str) -> None:
    fake = FakeService([fate])
    events = [Event("t", n) for n in range(4)]
    results = kind(fake).send_many(*events)
    assert [result.idempotency_key for result in results] == [event.idempotency_key for event in events]
    assert fake.written == [0, 1, 2, 3]
    if fate == CUT_AMID:  # the results of the first lines have come
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


# ------------------------------------------------------------------------------------------------------------ spool


def test_what_a_deadline_has_left_is_sent_by_the_next_run_under_its_key(
    kind: Any, clock: FakeTime, tmp_path: Path
) -> None:
    spool = tmp_path / "s"
    fake = FakeService([CUT, LOST])
    events = [Event("t", n) for n in range(3)]
    assert [type(each) for each in kind(fake, spool=spool, deadline_s=0.15).send_many(*events)] == [Unsettled] * 3
    assert fake.written == [0, 1, 2]
    with pytest.raises(SpoolError, match=r"3 events of an earlier run are open: iterate over resume\(\) first"):
        kind(fake, spool=spool).send(Event("t", 3))
    results = kind(fake, spool=spool).resume()
    assert [(each.idempotency_key, each.replayed) for each in results] == [
        (each.idempotency_key, True) for each in events
    ]
    assert fake.written == [0, 1, 2]
    assert kind(fake, spool=spool).resume() == []
    assert kind(fake, spool=spool).send(Event("t", 3)).offset == 3


def test_a_spool_that_is_older_than_its_keys_is_told_and_not_written_again(
    kind: Any, clock: FakeTime, tmp_path: Path
) -> None:
    old = [Event("t", n, idempotency_key=f"{n}" if n else EXPIRED) for n in range(3)] + [Event(UNKNOWN_NAME, 3)]
    kind(FakeService([LOST] * 9), spool=tmp_path / "s", deadline_s=0.1).send_many(*old)
    fake = FakeService()
    first, *others, last = kind(fake, spool=tmp_path / "s").resume()
    assert [type(each) for each in others] == [Written] * 2
    assert (type(last), last.may_be_written) == (Refused, True)  # an attempt of the earlier run may have written it
    assert (type(first), first.may_be_written, first.body) == (KeyExpired, True, old[0].encode())
    assert fake.written == [1, 2]
    assert kind(fake, spool=tmp_path / "s").resume() == []  # it was told


def test_a_result_of_resume_that_was_not_taken_comes_again(clock: FakeTime, tmp_path: Path) -> None:
    Threads(FakeService([LOST] * 9), spool=tmp_path / "s", deadline_s=0.1).send_many(Event("t", 1), Event("t", 2))
    fake = FakeService()
    with Client(URL, transport=transport(fake), spool=tmp_path / "s") as client:
        taken = next(iter(client.resume()))
        assert isinstance(taken, Written)
        with pytest.raises(SpoolError, match="iterate over resume"):
            client.send(Event("t", 3))
    again = Threads(fake, spool=tmp_path / "s").resume()
    assert again[0].idempotency_key == taken.idempotency_key
    assert fake.written == [1, 2]


async def test_a_result_of_resume_that_was_not_taken_comes_again_to_asyncio_too(
    clock: FakeTime, tmp_path: Path
) -> None:
    fake = FakeService([LOST] * 9)
    async with AsyncClient(URL, transport=transport(fake), spool=tmp_path / "s", deadline_s=0.1) as client:
        await client.send_many([Event("t", 1), Event("t", 2)])
    fake.fates = iter(())
    taken = list[str]()
    for _ in range(2):
        async with AsyncClient(URL, transport=transport(fake), spool=tmp_path / "s") as client:
            async for result in client.resume():
                taken.append(result.idempotency_key)
                break
    assert taken[0] == taken[1]
    assert fake.written == [1]


def test_resume_ends_behind_an_open_event_and_the_client_may_go_on(clock: FakeTime, tmp_path: Path) -> None:
    lost = [Event("t", n) for n in range(5)]
    Threads(FakeService([LOST] * 9), spool=tmp_path / "s", deadline_s=0.1).send_many(*lost)
    fake = FakeService(["ok", LOST, LOST])
    with Client(URL, transport=transport(fake), spool=tmp_path / "s", deadline_s=0.1) as client:
        assert [type(each) for each in client.resume()] == [Written, Unsettled]
        assert client.send(Event("t", "new")).offset == 1
        assert [type(each) for each in client.resume()] == [Written] * 4
    assert fake.copies == Counter({json.dumps("new"): 1, **{f"{n}": 1 for n in range(5)}})


def test_a_key_of_any_form_that_is_older_than_its_retention_is_told(kind: Any, clock: FakeTime, tmp_path: Path) -> None:
    """The spool tells when it has stored the event, because a key such as an order's number does not."""
    fake = FakeService(clock=clock)
    orders = [Event("t", n, idempotency_key=f"order-{n}") for n in range(3)]
    fake.fates = iter([CUT])
    kind(fake, spool=tmp_path / "s", deadline_s=0.01).send_many(orders[0])
    clock.now += RETENTION_S - 1_000
    with Spool(tmp_path / "s") as spool:
        spool.add([Pending(order.idempotency_key, order.encode()) for order in orders[1:]])
    del fake.places["order-0"]  # forgotten
    clock.now += 2_000
    results = kind(fake, spool=tmp_path / "s").resume()
    assert [type(each) for each in results] == [KeyExpired, Written, Written]
    assert fake.written == [0, 1, 2]


def test_a_stored_key_that_cannot_be_sent_is_refused_and_resume_goes_on(
    kind: Any, clock: FakeTime, tmp_path: Path
) -> None:
    """A spool of a program that has stored such keys."""
    keys = ["commande-é", "order-1", "a\nb", "order-2"]
    with Spool(tmp_path / "s") as spool:
        spool.add([Pending(key, Event("t", n).encode()) for n, key in enumerate(keys)])
    fake = FakeService()
    results = kind(fake, spool=tmp_path / "s").resume()
    assert [type(each) for each in results] == [Refused, Written, Refused, Written]
    assert [each.idempotency_key for each in results] == keys
    assert (results[0].status, results[0].code, results[0].may_be_written) == (0, "invalid-key", False)
    assert fake.written == [1, 3]
    assert clock.pauses == []
    assert kind(fake, spool=tmp_path / "s").send(Event("t", 4)).offset == 2  # and the client sends again


@pytest.mark.parametrize("remedied", [True, False])
def test_a_disk_that_is_full_at_the_end_of_a_call_takes_no_result(
    kind: Any,
    clock: FakeTime,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    remedied: bool,
) -> None:
    def full(*_: object) -> None:
        raise SpoolFull("s: no room for more events")

    fake = FakeService()
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "close_events", full)
        results = kind(fake, spool=tmp_path / "s").send_many(Event("t", 1), Event("t", 2), Event(UNKNOWN_NAME, 3))
        assert [type(each) for each in results] == [Written, Written, Refused]
        assert "3 settled events stay in the spool, and resume() sends them again: s: no room" in caplog.text
        if not remedied:
            assert [type(each) for each in kind(fake, spool=tmp_path / "s").resume()] == [Written, Written, Refused]
    again = kind(fake, spool=tmp_path / "s").resume()
    assert [getattr(each, "replayed", None) for each in again] == [True, True, None]
    assert fake.written == [1, 2]
    assert kind(fake, spool=tmp_path / "s").resume() == []


def test_another_event_under_an_open_key_is_not_sent(clock: FakeTime, tmp_path: Path) -> None:
    first, other = (Event("t", n, idempotency_key="order-1") for n in range(2))
    fake = FakeService([LOST, LOST])
    with Client(URL, transport=transport(fake), spool=tmp_path / "s", deadline_s=0.1) as client:
        with pytest.raises(Unsettled):
            client.send(first)
        sent = len(fake.requests)
        with pytest.raises(SpoolError, match="idempotency_key 'order-1': another event is open under it"):
            client.send_many([Event("t", 2), other])
        assert len(fake.requests) == sent
        fake.fates = iter(())
        assert [type(each) for each in client.resume()] == [Written]
        with pytest.raises(KeyReused):
            client.send(other)
    assert fake.written == [0]


def test_the_same_object_sent_again_tells_its_age(clock: FakeTime, tmp_path: Path) -> None:
    fake = FakeService([CUT, CUT], clock=clock)
    order = Event("t", 0, idempotency_key="order-1")
    with Client(URL, transport=transport(fake), spool=tmp_path / "s", deadline_s=0.1) as client:
        with pytest.raises(Unsettled):
            client.send(order)
        fake.fates = iter(())
        fake.places.clear()  # forgotten
        clock.now += RETENTION_S + 3_600
        first, expired, *last = client.send_many([Event("t", 1), order, Event("t", 2), Event("t", 3)])
        assert (type(first), type(expired)) == (Written, KeyExpired)
        assert raised(expired).may_be_written
        assert [type(each) for each in last] == [Written] * 2
        assert [type(each) for each in client.resume()] == []  # it was told
    assert fake.written == [0, 1, 2, 3]
    assert [request.url.path for request in fake.requests[-3:]] == ["/events", "/events", "/events/batch"]


def test_an_open_event_that_is_sent_again_and_refused_may_have_been_written(clock: FakeTime, tmp_path: Path) -> None:
    fake = FakeService([CUT, CUT], clock=clock)
    event = Event(UNKNOWN_NAME, 0)
    with Client(URL, transport=transport(fake), spool=tmp_path / "s", deadline_s=0.1) as client:
        with pytest.raises(Unsettled):
            client.send(event)
        fake.fates = iter(())
        with pytest.raises(Refused) as caught:
            client.send(event)
    assert caught.value.may_be_written


async def test_a_cancelled_call_leaves_its_event_in_the_spool(clock: FakeTime, tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def hang(request: httpx.Request) -> httpx.Response:
        begun.set()
        await asyncio.Future[None]()
        raise AssertionError

    fake = FakeService()
    async with AsyncClient(URL, transport=httpx.MockTransport(hang), spool=tmp_path / "s") as client:
        sending = asyncio.create_task(client.send(Event("t", 1)))
        await begun.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    async with AsyncClient(URL, transport=transport(fake), spool=tmp_path / "s") as client:
        assert [type(each) async for each in client.resume()] == [Written]
    assert fake.written == [1]


# ---------------------------------------------------------------------------------------------------------- crashes


class Crash(BaseException):
    """The program ends here."""


class Steps:
    """The points at which a program may end, each counted when it is passed; number `crash_at` raises Crash."""

    def __init__(self, crash_at: int) -> None:
        self.crash_at = crash_at
        self.count = 0

    def passed(self) -> None:
        self.count += 1
        if self.count == self.crash_at:
            raise Crash


class CrashingSpool(Spool):
    """A spool whose program may end before and after each write; `stored` has the keys that it was given before."""

    def __init__(self, path: Path, steps: Steps) -> None:
        super().__init__(path)
        self._steps = steps
        self.stored: set[str] = set()

    def add(self, events: Sequence[Pending]) -> list[Pending]:
        self._steps.passed()
        added = super().add(events)
        self.stored |= {event.key for event in events}
        self._steps.passed()
        return added

    def close_events(self, events: Sequence[Pending]) -> None:
        self._steps.passed()
        super().close_events(events)
        self._steps.passed()


class Program:
    """A program with a spool, run after run: each run finds on its disk what the last one has left, when it crashed."""

    def __init__(self, folder: Path, fake: FakeService) -> None:
        self._folder, self._fake = folder, fake
        self.stored: set[str] = set()
        self.made: dict[str, Event] = {}
        self._disk = folder / "0"
        self._disk.mkdir()

    def run(self, crash_at: int, work: Callable[[Client], object]) -> int:
        """Run `work` up to the step `crash_at`; returns the number of events in the spool at the end."""
        steps = Steps(crash_at)

        def answer(request: httpx.Request) -> httpx.Response:
            steps.passed()
            try:
                return self._fake(request)
            finally:
                steps.passed()

        with CrashingSpool(self._disk / "s", steps) as spool:
            with contextlib.suppress(Crash):
                work(Client(URL, transport=httpx.MockTransport(answer), spool=spool, deadline_s=1e6))
            self.stored |= spool.stored
            # The next run finds the files as they are now: a crash closes nothing.
            self._disk = shutil.copytree(self._disk, self._folder / f"{int(self._disk.name) + 1}")
            return len(spool)

    def send(self, client: Client, sizes: Sequence[int]) -> None:
        for size in sizes:
            events = [Event("t", f"{len(self.made) + n}") for n in range(size)]
            self.made.update({event.idempotency_key: event for event in events})
            client.send_many(events)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    fates=st.lists(st.sampled_from(FATES), max_size=8),
    crash_at=st.integers(1, 30),
    crash_of_resume_at=st.integers(1, 12),
)
def test_each_event_that_was_stored_is_written_once_whatever_step_the_program_ends_at(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    fates: list[str],
    crash_at: int,
    crash_of_resume_at: int,
) -> None:
    fake = FakeService(fates)
    program = Program(tmp_path_factory.mktemp("program"), fake)
    with pytest.MonkeyPatch.context() as monkeypatch:
        patched(monkeypatch)
        program.run(crash_at, lambda client: program.send(client, sizes))
        program.run(crash_of_resume_at, lambda client: list(client.resume()))
        fake.fates = iter(())
        assert program.run(0, lambda client: list(client.resume())) == 0
    # Nothing but what was stored was sent, and all of it was written, once.
    assert fake.copies == Counter(json.dumps(program.made[key].value) for key in program.stored)
