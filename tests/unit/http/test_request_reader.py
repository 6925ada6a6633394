"""Tests the reader alone: lists of bytes in, events out, however the network splits them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.problems import HEAD_TOO_LARGE, INVALID_HTTP, REQUEST_TIMEOUT
from service.http.headers import pick
from service.http.request_reader import (
    HEAD_BYTES_MAX,
    HEAD_LINES_MAX,
    LEAST_BYTES_S,
    SILENCE_MAX_S,
    SLICE_BYTES,
    TRANSITIONS,
    Body,
    Head,
    ReaderEvent,
    ReaderState,
    Rejection,
    RequestReader,
    WholePost,
)

TARGETS = {b"/events"}
CHUNKED = b"POST /events HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"


def post(body: bytes, *lines: bytes, target: bytes = b"/events", version: bytes = b"1.1") -> bytes:
    head = [b"POST %b HTTP/%b" % (target, version), b"Host: x", *lines, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


class Connection:
    """A reader with its events; each of its requests is answered as soon as it is complete, or never."""

    def __init__(self, answers: bool = True) -> None:
        self.reader = RequestReader(0.0, TARGETS, plain_bytes_max=1_000)
        self.answers = answers
        self.events: list[ReaderEvent | WholePost] = []

    def feed(self, *pieces: bytes, now: float = 0.0) -> list[ReaderEvent | WholePost]:
        """Feed these pieces; returns the events, up to a request that waits."""
        first = len(self.events)
        for piece in pieces:
            whole = self.reader.whole_post(piece)
            self.take([whole] if whole is not None else self.reader.feed(piece, now))
            while self.reader.ready:
                self.take(self.reader.feed(b"", now))
        return self.events[first:]

    def take(self, events: Iterable[ReaderEvent | WholePost]) -> None:
        for event in events:
            self.events.append(event)
            if self.answers and (event == "complete" or isinstance(event, WholePost)):
                self.reader.answered(0.0)


def meant(events: Iterable[ReaderEvent | WholePost]) -> list[Any]:
    """Join events into whole requests, rejections, and the end, independent of the pieces."""
    said: list[Any] = []
    head: Head | None = None
    body = b""
    for event in events:
        match event:
            case Head():
                head, body = event, b""
            case Body(pieces):
                body += b"".join(pieces)
            case "complete":
                assert head is not None
                said.append((head.target, pick(head.headers), body))
            case WholePost():
                said.append((event.target, event.used, event.body))
            case Rejection(problem):
                said.append((problem.kind, problem.detail))
            case _:
                said.append(event)
    return said


REQUESTS = {
    "plain": post(b"body", b"Idempotency-Key: k"),
    "no body": post(b""),
    "elsewhere": post(b"body", target=b"http://x/events?a=b"),
    "HTTP/1.0": post(b"body", version=b"1.0"),
    "GET": b"GET /events/k HTTP/1.1\r\nHost: x\r\n\r\n",
    "asks first": post(b"body", b"Expect: 100-continue"),
    "chunks": CHUNKED + b"\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nauthorization: trailer\r\n\r\n",
    "another protocol": post(post(b"inner"), b"Connection: Upgrade", b"Upgrade: h2c"),
    "another protocol, no body": post(b"", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c"),
}
BODIES = {"no body": b"", "GET": b"", "chunks": b"abcde", "another protocol": post(b"inner")}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_read_alike_in_any_two_pieces_and_byte_by_byte(name: str) -> None:
    whole = REQUESTS[name]
    ((_, found, body),) = meant(Connection().feed(whole))
    assert found[b"host"] == "x"
    assert b"authorization" not in found, "a trailer is no header"
    assert body == BODIES.get(name, b"" if name.endswith("no body") else b"body")
    for at in range(1, len(whole)):
        assert meant(Connection().feed(whole[:at], whole[at:])) == meant(Connection().feed(whole)), at
    assert meant(Connection().feed(*(bytes([byte]) for byte in whole))) == meant(Connection().feed(whole))


MALFORMED = [
    b"\0",
    b"NONSENSE / HTTP/1.1\r\n\r\n",
    b"POST /events HTTP/1.1\r\nno colon\r\n\r\n",
    b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /events HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST /events HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    CHUNKED + b"\r\nz\r\n",
]


# Of HTTP/1.0, the last of its connection: following bytes are skipped.
KEPT_ALIVE = [whole for name, whole in REQUESTS.items() if name != "HTTP/1.0"]


@given(
    requests=st.lists(st.sampled_from([*KEPT_ALIVE, b"\r\n"]), max_size=6),
    end=st.sampled_from([b"", *MALFORMED]),
    answers=st.booleans(),
    data=st.data(),
)
def test_pipelined_requests_are_read_alike_however_they_are_cut(
    requests: Sequence[bytes], end: bytes, answers: bool, data: st.DataObject
) -> None:
    """One slice has them all, so that none of them waits unread."""
    sent = b"".join(requests) + end
    cuts = sorted({0, len(sent), *data.draw(st.lists(st.integers(0, len(sent)), max_size=8))})
    expected = [said for request in requests for said in meant(Connection().feed(request))]
    if end:
        expected.append((INVALID_HTTP, "request: it is not HTTP/1.1"))
    whole = Connection(answers)
    assert meant(whole.feed(sent)) == expected
    cut = Connection(answers)
    cut.feed(*(sent[start:stop] for start, stop in pairwise(cuts)))
    while cut.reader.unread and not cut.answers:  # behind a request that waits for an earlier one
        cut.reader.answered(0.0)
        cut.feed(b"")
    assert meant(cut.events) == expected
    assert (cut.reader.state == "rejected") is bool(end)
    if end:
        assert cut.feed(post(b"behind")) == []
    else:
        assert cut.reader.state == ("boundary" if expected else "fresh")


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_no_bytes_harm_the_reader_and_nothing_follows_a_rejection(pieces: list[bytes]) -> None:
    connection = Connection()
    connection.feed(*pieces)
    connection.take(connection.reader.end())
    rejections = [at for at, event in enumerate(connection.events) if isinstance(event, Rejection)]
    assert rejections == [] or set(connection.events[rejections[0] + 1 :]) <= {"close"}


@pytest.mark.parametrize("answered", [False, True])
def test_a_rejection_tells_whether_it_would_be_taken_for_an_earlier_request_s_answer(answered: bool) -> None:
    """There is no rejection if an earlier request waits, or if the incomplete one was answered already."""
    between = Connection(answers=answered)
    (*_, rejection) = between.feed(post(b"1"), b"\0")
    assert isinstance(rejection, Rejection)
    assert (rejection.unanswered == between.reader.unanswered) is answered

    inside = Connection()
    head, _, rejection = inside.feed(CHUNKED + b"\r\n1\r\na\r\n", b"z")
    assert isinstance(head, Head)
    assert isinstance(rejection, Rejection)
    if answered:
        inside.reader.answered(0.0)
    assert (rejection.unanswered == inside.reader.unanswered) is not answered


def growing(start: bytes, line: bytes) -> tuple[ReaderEvent | WholePost, int]:
    """Send such lines until the connection ends; returns the last event, and the number of bytes."""
    connection, sent = Connection(), len(start)
    connection.feed(start)
    while not (events := connection.feed(line)) or isinstance(events[0], Body):
        sent += len(line)
    return events[0], sent


@pytest.mark.parametrize(
    "start",
    [b"GET / HTTP/1.1\r\n", CHUNKED + b"\r\n1\r\na\r\n0\r\n"],
    ids=["a head", "trailers"],
)
def test_heads_and_trailers_have_bounds_in_bytes_and_in_lines(start: bytes) -> None:
    for line, bytes_max in ((b"x: " + b"y" * 7_995 + b"\r\n", HEAD_BYTES_MAX), (b"a:b\r\n", 5 * HEAD_LINES_MAX)):
        event, sent = growing(start, line)
        assert isinstance(event, Rejection)
        assert event.problem.kind is HEAD_TOO_LARGE
        assert abs(sent - bytes_max) <= len(start) + len(line)


def test_a_request_that_ends_behind_too_many_trailers_is_rejected_while_it_is_unanswered() -> None:
    """Otherwise its rejection would stand for a request behind it, and nothing would be answered."""
    *_, event = Connection().feed(CHUNKED + b"\r\n1\r\na\r\n0\r\n" + b"a:b\r\n" * (HEAD_LINES_MAX + 1) + b"\r\n")
    assert isinstance(event, Rejection)
    assert (event.problem.kind, event.unanswered) == (HEAD_TOO_LARGE, 1)


def test_a_target_header_chunk_extension_or_blank_line_without_end_is_rejected() -> None:
    for start, line in (
        (b"GET /", b"x" * 1000),
        (b"GET / HTTP/1.1\r\nx: ", b"y" * 1000),
        (CHUNKED + b"\r\n1;", b"x" * 1000),
        (b"", b"\r\n" * 1000),
    ):
        event, sent = growing(start, line)
        assert isinstance(event, Rejection)
        assert sent <= HEAD_BYTES_MAX + SLICE_BYTES


def test_the_bound_of_a_head_does_not_count_the_bytes_of_a_body() -> None:
    connection = Connection()
    connection.feed(CHUNKED + b"\r\n", *[b"3e8\r\n" + b"x" * 1000 + b"\r\n"] * 200, b"0\r\n\r\n")
    connection.feed(post(b"x" * 200_000), post(b"next"))
    assert [len(body) for _, _, body in meant(connection.events)] == [200_000, 200_000, 4]


def test_a_head_just_below_its_bound_is_read_with_its_body() -> None:
    lines = [b"x: " + b"y" * 8_000] * 8
    assert len(post(b"", *lines)) < HEAD_BYTES_MAX
    ((_, _, body),) = meant(Connection().feed(post(b"b" * 100_000, *lines)))
    assert len(body) == 100_000
    ((kind, _),) = meant(Connection().feed(post(b"", *lines, b"x: " + b"y" * 8_000)))
    assert kind is HEAD_TOO_LARGE


def test_the_reader_stops_after_the_slice_of_a_request_that_waits() -> None:
    waiting = Connection(answers=False)
    many = post(b"x", b"via: x") * 1_000
    waiting.feed(many)
    unanswered = waiting.reader.unanswered
    assert SLICE_BYTES // len(post(b"x", b"via: x")) <= unanswered < 1_000
    assert waiting.feed(post(b"")) == [], "one more was read"
    for _ in range(unanswered - 1):
        assert not waiting.reader.ready
        waiting.reader.answered(0.0)
    assert waiting.reader.ready


def test_a_call_reads_one_slice() -> None:
    reader = RequestReader(0.0)
    ((head, body), sent) = reader.feed(post(bytes(100_000)), 0.0), len(post(bytes(100_000)))
    assert isinstance(head, Head)
    assert isinstance(body, Body)
    assert len(reader.unread) == sent - SLICE_BYTES


def test_the_continue_of_http_1_1_is_asked_for() -> None:
    for version, expected in ((b"1.1", True), (b"1.0", False)):
        (head,) = Connection().feed(post(b"body", b"Expect: 100-Continue", version=version)[:-4])
        assert isinstance(head, Head)
        assert (head.expects_continue, head.keep_alive) == (expected, expected)


# ------------------------------------------------------------------------------------------------------------- time


def test_a_silent_connection_is_closed_without_an_answer() -> None:
    reader = RequestReader(100.0)
    assert reader.deadline == 100.0 + SILENCE_MAX_S
    assert reader.expire(100.0 + SILENCE_MAX_S - 0.1) == []
    assert reader.expire(100.0 + SILENCE_MAX_S) == ["close"]


def test_the_time_of_a_connection_that_was_opened_in_advance_begins_with_its_first_request() -> None:
    connection = Connection()
    connection.feed(b"\r\n", now=10.0)
    connection.feed(b"GET / HT", now=15.0)
    assert connection.reader.deadline == 15.0 + SILENCE_MAX_S


def test_a_request_has_the_time_of_its_bytes_at_the_least_rate() -> None:
    connection = Connection()
    connection.feed(post(bytes(2_000_000))[:100], now=0.0)
    for second in range(1, 60):
        connection.feed(bytes(2 * LEAST_BYTES_S), now=float(second))
        assert connection.reader.deadline == second + SILENCE_MAX_S, "only silence ends one that is fast enough"
    (rejection,) = connection.reader.expire(59.0 + SILENCE_MAX_S)
    assert isinstance(rejection, Rejection)
    assert rejection.problem.kind is REQUEST_TIMEOUT
    assert "nothing came for 20 s" in rejection.problem.detail


def test_a_request_below_the_least_rate_ends_though_it_is_never_silent() -> None:
    connection = Connection()
    connection.feed(post(bytes(2_000_000))[:100], now=0.0)
    for second in range(1, 60):
        connection.feed(bytes(LEAST_BYTES_S // 2), now=float(second))
        if events := connection.reader.expire(float(second)):
            break
    (rejection,) = events
    assert isinstance(rejection, Rejection)
    assert "less than 10000 bytes a second came" in rejection.problem.detail
    assert second == 2 * SILENCE_MAX_S + 1, "its 100 bytes of head came at once"


def test_a_connection_has_no_deadline_between_requests_or_while_the_reader_is_paused() -> None:
    connection = Connection(answers=False)
    connection.feed(post(b"1"))
    assert connection.reader.deadline is None
    connection.feed(post(b"22")[:-1], now=1.0)
    assert connection.reader.deadline == 1.0 + SILENCE_MAX_S
    connection.reader.answered(30.0)
    assert connection.reader.deadline == 30.0 + SILENCE_MAX_S
    connection.reader.restart(40.0)
    assert connection.reader.deadline == 40.0 + SILENCE_MAX_S


def test_the_rest_of_a_body_whose_request_is_answered_has_no_more_time_than_silence() -> None:
    connection = Connection()
    connection.feed(post(bytes(2_000_000))[:100])
    connection.reader.answered(0.0)
    connection.feed(bytes(1_000_000), now=10.0)
    assert connection.reader.deadline == SILENCE_MAX_S


# ------------------------------------------------------------------------------------- the end of what a client sends


@pytest.mark.parametrize(
    ("sent", "answers", "expected"),
    [
        (b"", True, ["close"]),
        (post(b"1"), True, ["close"]),
        (post(b"1"), False, ["last"]),
        (post(b"1") + post(b"22")[:30], True, [(INVALID_HTTP, "request: it ends before it is whole")]),
        (post(b"1") + post(b"22")[:30], False, []),
        (post(b"22")[:-1], True, [(INVALID_HTTP, "request: it ends before it is whole")]),
        (post(b"1") + post(b"22")[:-1], False, ["withdraw"]),
        (b"\0", True, ["close"]),
    ],
)
def test_the_end_comes(sent: bytes, answers: bool, expected: list[Any]) -> None:
    connection = Connection(answers)
    connection.feed(sent)
    assert meant(connection.reader.end()) == expected
    assert connection.reader.deadline is None
    if expected == ["withdraw"]:
        assert connection.reader.unanswered == 1, "what was dropped has no answer to wait for"


def test_the_end_of_a_connection_is_reported_after_its_unread_requests() -> None:
    connection = Connection(answers=False)
    many = 2 * SLICE_BYTES // len(post(b"x"))
    connection.feed(post(b"x") * many)
    assert connection.reader.end() == []
    while connection.reader.unread:
        connection.reader.answered(0.0)
        connection.feed(b"")
    assert [event == "last" for event in connection.events].index(True) == len(connection.events) - 1
    assert len(meant(connection.events)) == many + 1


# ------------------------------------------------------------------------------------------------------------- table


def test_every_state_can_be_come_to_and_has_a_row() -> None:
    assert set(TRANSITIONS) == set(get_args(ReaderState))
    reached = {"fresh", *(state for row in TRANSITIONS.values() for _, state in row.values())}
    assert reached == set(get_args(ReaderState))


def test_every_open_state_can_be_rejected_and_an_ended_state_stays_ended() -> None:
    for state, row in TRANSITIONS.items():
        over = state in ("ended", "rejected")
        for what in ("malformed", "too large", "silence", "end"):
            action, after = row[what]
            assert (action in ("reject", "close")) is (not over or action == "close")
            assert after is (state if over else "rejected")
        if over:
            assert {after for _, after in row.values()} == {state}


def test_bytes_that_were_read_do_not_stay_in_memory() -> None:
    """A connection may be idle for long after a large body: an empty view would hold all bytes of its last read."""
    connection = Connection()
    connection.feed(post(b"x" * (3 * SLICE_BYTES)))
    assert connection.events[-1] == "complete"
    assert bytes(connection.reader.unread.obj) == b""
