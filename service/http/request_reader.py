"""Read the requests of one HTTP/1.1 connection: bytes in, events out, without I/O and without a clock.

httptools finds the parts of a message, and `service.native` reads a plain POST that comes whole. TRANSITIONS has an
action and a next state for each part in each state. `service.http.limits` moves bytes, times and answers between a
reader and its connection. The reader counts the unanswered requests, because responses keep the order of requests (RFC
9112, section 9.3.2): while one waits nothing more is read, and a rejection would be taken for the answer of an earlier
request.
"""

from collections.abc import Container, Mapping
from typing import Any, Final, Literal, get_args

import httptools
import msgspec

from service import native
from service.core.problems import HEAD_TOO_LARGE, INVALID_HTTP, REQUEST_TIMEOUT, Kind, Problem
from service.http.headers import UsedHeaders
from service.http.responses import lines_of

# Bytes of a head, or of trailers and chunk extensions (RFC 9112, section 7.1) between two pieces of a body.
HEAD_BYTES_MAX: Final = 64 * 1024
# Lines of a head: each takes some 200 bytes of memory, however short. CloudEvents may have 100 attributes.
HEAD_LINES_MAX: Final = 256
# The longest silence within a request, and the time that a request has beside that of its bytes at the least rate: a
# body of 8 MiB has 14 minutes, a small one 20 s. Between requests uvicorn's keep-alive timeout holds.
SILENCE_MAX_S: Final = 20.0
LEAST_BYTES_S: Final = 10_000
# Bytes that one call of `feed` parses: 256 KiB may be 40,000 chunks of a body, or 6,000 requests.
SLICE_BYTES: Final = 16 * 1024

# Headers that ask for another protocol.
_UPGRADE: Final = (b"upgrade", b"http2-settings")


class Head(msgspec.Struct, gc=False):
    """The head of a request. Its body follows."""

    method: bytes
    target: bytes
    path: bytes
    version: str
    headers: list[tuple[bytes, bytes]]  # names in lower case
    keep_alive: bool
    expects_continue: bool  # the client asks whether to send the body (RFC 9110, section 10.1.1)


class WholePost(msgspec.Struct, gc=False):
    """A whole POST; `used` has the headers that the service uses."""

    target: bytes
    used: UsedHeaders
    body: bytes


class Body(msgspec.Struct, gc=False):
    """More of the body of the last request."""

    pieces: list[bytes]


class Rejection(msgspec.Struct, gc=False):
    """The end of the connection. `problem` is sent if exactly `unanswered` requests wait for an answer.

    If more wait, the client would take the problem for the answer of an earlier request.
    """

    problem: Problem
    unanswered: int


# The part of a message that is being read. "upgrade": a head asked for another protocol, and is parsed again without
# that. "boundary": the last request is complete, and no other has begun. "ended" and "rejected" read nothing more: the
# client has shut its sending side, or the reader has ended the connection.
ReaderState = Literal["fresh", "head", "upgrade", "body", "boundary", "ended", "rejected"]
# The inputs of the table: the first byte of a request, its head, a head that asks for another protocol, a piece of a
# body, the last byte of a request; a fault; the deadline; the end of the client's sending side, "behind" a request that
# is unanswered.
Input = Literal[
    "begin", "head", "upgrade", "piece", "complete", "malformed", "too large", "silence", "end", "end behind"
]
# What the reader does. "skip": nothing. "emit", "reject": emit the event that describes the input. The others are
# events: "complete", of the last request; "withdraw", the last request, which was not begun and will never be complete;
# "last", the last request is the last of the connection; "close", the connection, without a response.
Action = Literal["skip", "emit", "reject", "complete", "withdraw", "last", "close"]
ReaderEvent = Head | Body | Rejection | Action
Row = Mapping[Input, tuple[Action, ReaderState]]

_NOTHING: Final = memoryview(b"")

_REJECTIONS: Final[Row] = {
    "malformed": ("reject", "rejected"),
    "too large": ("reject", "rejected"),
    "silence": ("reject", "rejected"),
    "end": ("reject", "rejected"),
}
_EACH: Final[tuple[Input, ...]] = get_args(Input)

# A pair that is missing would be a fault of the parser, and is rejected as malformed.
TRANSITIONS: Final[Mapping[ReaderState, Row]] = {
    "fresh": {**_REJECTIONS, "begin": ("skip", "head"), "silence": ("close", "rejected"), "end": ("close", "rejected")},
    "head": {**_REJECTIONS, "head": ("emit", "body"), "upgrade": ("skip", "upgrade"), "end behind": ("skip", "ended")},
    "upgrade": {**_REJECTIONS, "complete": ("skip", "upgrade"), "begin": ("skip", "head")},
    "body": {
        **_REJECTIONS,
        "piece": ("emit", "body"),
        "complete": ("complete", "boundary"),
        "end behind": ("withdraw", "ended"),
    },
    "boundary": {
        **_REJECTIONS,
        "begin": ("skip", "head"),
        "end": ("close", "rejected"),
        "end behind": ("last", "ended"),
    },
    "ended": dict.fromkeys(_EACH, ("skip", "ended")),
    "rejected": {
        **dict.fromkeys(_EACH, ("skip", "rejected")),
        "end": ("close", "rejected"),
        "end behind": ("close", "rejected"),
    },
}


class RequestReader:
    """Read the requests of one connection. Times are in seconds of the caller's clock.

    `whole_post` reads a plain POST to one of `targets` that comes whole, in at most `plain_bytes_max` bytes, and `feed`
    reads all else.
    """

    def __init__(self, now: float, targets: Container[bytes] = (), plain_bytes_max: int = 0) -> None:
        self._targets = targets
        self._plain_bytes_max = plain_bytes_max if native.COMPILED else 0
        self._parser: Any = self._new_parser()
        self._events: list[ReaderEvent] = []
        self.state: ReaderState = "fresh"
        self.unread = _NOTHING  # bytes for the next call of `feed`
        self.unanswered = 0  # requests whose heads were emitted
        self.ended = False  # the client has shut its sending side
        self._target = b""
        self._lines: list[tuple[bytes, bytes]] = []  # of the head, or of the trailers
        self._expects_continue = False
        self._replayed = b""  # the head to parse again, without the request for another protocol
        self._head_bytes = 0  # since the end of the last head or piece of a body
        # Of the incomplete request: the times of its first and last bytes, and their number.
        self._begun_at = self._heard_at = now
        self._received = 0

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        return parser

    @property
    def ready(self) -> bool:
        """Whether to call `feed` again: bytes are unread, and no request waits for an earlier one."""
        return self.unanswered <= 1 and self.state != "rejected" and bool(self.unread)

    @property
    def idle(self) -> bool:
        """Whether all requests are answered, and no other has begun."""
        return self.state == "boundary" and not self.unanswered

    @property
    def deadline(self) -> float | None:
        """The time to call `expire`, while a request is incomplete or none has come; else None.

        The rest of a body whose request is answered gets no time for its bytes.
        """
        if self.state in ("boundary", "ended", "rejected"):
            return None
        answered = self.state == "body" and not self.unanswered
        needed = 0.0 if answered else self._received / LEAST_BYTES_S
        return min(self._heard_at, self._begun_at + needed) + SILENCE_MAX_S

    def feed(self, data: bytes, now: float) -> list[ReaderEvent]:
        """Take bytes, and parse one slice of the unread ones."""
        if self.state == "rejected":
            return []
        if not self.unread:
            self.unread = memoryview(data)
        elif data:
            self.unread = memoryview(b"".join([self.unread, data]))
        if not self.ready:
            return []
        # An empty view of the bytes would keep them in memory for as long as the connection is idle.
        piece, self.unread = self.unread[:SLICE_BYTES], self.unread[SLICE_BYTES:] or _NOTHING
        self._heard_at = now
        if self.state == "fresh":  # a client may open a connection in advance
            self._begun_at = now
        self._head_bytes += len(piece)
        self._parse(piece)
        self._received += len(piece)
        if self._head_bytes > HEAD_BYTES_MAX or len(self._lines) > HEAD_LINES_MAX:
            self._reject_head()
        return self.end() if self.ended and not self.unread else self._take_events()

    def end(self) -> list[ReaderEvent]:
        """Note that the client has shut its sending side; its whole requests are answered (RFC 9112, section 9.6)."""
        self.ended = True
        if not self.unread:
            behind = self.unanswered > (self.state == "body")
            self._reject("end behind" if behind else "end", INVALID_HTTP, "request: it ends before it is whole")
        return self._take_events()

    def answered(self, now: float) -> None:
        """Note that the first of the unanswered requests has its answer."""
        self.unanswered -= 1
        if self.unanswered <= 1:
            self.restart(now)

    def restart(self, now: float) -> None:
        """Restart the time of the incomplete request, because the service has not read on."""
        self._begun_at = self._heard_at = now
        self._received = 0

    def expire(self, now: float) -> list[ReaderEvent]:
        """Reject the incomplete request if its deadline has passed."""
        deadline = self.deadline
        if deadline is not None and now >= deadline:
            silent = self._heard_at <= self._begun_at + self._received / LEAST_BYTES_S
            why = (
                f"nothing came for {SILENCE_MAX_S:g} s" if silent else f"less than {LEAST_BYTES_S} bytes a second came"
            )
            detail = f"request: {why}, and it is not whole: nothing of it was written"
            self._reject("silence", REQUEST_TIMEOUT, detail)
        return self._take_events()

    def stop(self) -> None:
        """Read nothing more."""
        self.state = "rejected"
        self.unread = _NOTHING
        self._parser = None  # a reference cycle

    def _take_events(self) -> list[ReaderEvent]:
        events, self._events = self._events, []
        return events

    def whole_post(self, data: bytes) -> WholePost | None:
        """Read a plain POST that is whole and alone; None for all else."""
        if self.unanswered or self.unread or not 0 < len(data) <= self._plain_bytes_max:
            return None
        if self.state != "boundary" and self.state != "fresh":
            return None
        read = native.heads.read_post(data)
        if read is None or read[0] not in self._targets:
            return None
        self.state, self._head_bytes = "boundary", 0
        self.unanswered += 1
        return WholePost(*read)

    def _transition(self, what: Input, event: ReaderEvent | None = None) -> None:
        """Make the table's transition for an input; `event` describes the input."""
        action, self.state = TRANSITIONS[self.state][what]
        if action == "skip":
            return
        self._events.append(event if event is not None and action in ("emit", "reject") else action)
        if action == "withdraw":
            self.unanswered -= 1

    def _reject(self, what: Input, kind: Kind, detail: str) -> None:
        self._transition(what, Rejection(Problem(kind, detail), int(self.state == "body")))

    def _reject_head(self) -> None:
        most = f"{HEAD_BYTES_MAX} bytes and {HEAD_LINES_MAX} lines"
        self._reject("too large", HEAD_TOO_LARGE, f"headers: at most {most} are taken")

    def _reject_malformed(self) -> None:
        self._reject("malformed", INVALID_HTTP, "request: it is not HTTP/1.1")

    def _parse(self, data: memoryview) -> None:
        """Feed the parser, which stops behind a head with `Upgrade` and leaves the rest to the other protocol.

        The service ignores the header (RFC 9110, section 7.8), which Java's own client sends with each request.
        """
        try:
            while data:
                try:
                    self._parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    if self.state != "upgrade":  # CONNECT was rejected
                        return
                    data = data[upgrade.args[0] :]
                    self._parser = self._new_parser()
                    self._parser.feed_data(self._replayed)
        except httptools.HttpParserError:
            self._reject_malformed()

    # ------------------------------------------------------------------------------------------ callbacks of the parser

    def on_message_begin(self) -> None:
        self._transition("begin")
        self._target, self._lines, self._expects_continue = b"", [], False
        self._begun_at, self._received = self._heard_at, 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, content: bytes) -> None:
        name = name.lower()
        if name == b"expect" and content.lower() == b"100-continue":
            self._expects_continue = True
        self._lines.append((name, content))

    def on_headers_complete(self) -> None:
        if self.state != "head":  # rejected
            return
        path = self._path()
        if self._head_is_too_large():
            self._reject_head()
        elif path is None:
            self._reject_malformed()
        elif self._parser.should_upgrade():
            kept = lines_of((name, content) for name, content in self._lines if name not in _UPGRADE)
            method, version = self._parser.get_method(), self._parser.get_http_version().encode()
            self._replayed = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._target, version, kept)
            self._transition("upgrade")
        else:
            self._emit_head(path)

    def _head_is_too_large(self) -> bool:
        if len(self._lines) > HEAD_LINES_MAX:
            return True
        if self._head_bytes <= HEAD_BYTES_MAX:
            return False
        # Some of the bytes may belong to the body.
        size = len(self._target) + sum([len(name) + len(content) for name, content in self._lines])
        return size > HEAD_BYTES_MAX

    def _path(self) -> bytes | None:
        """Return the path of the target; None if the target has none."""
        if self._target in self._targets:
            return self._target
        try:
            path: bytes | None = httptools.parse_url(self._target).path
        except httptools.HttpParserError:
            return None
        return path

    def _emit_head(self, path: bytes) -> None:
        version = self._parser.get_http_version()
        is_old = version == "1.0"  # to HTTP/1.0 `Expect` means nothing
        keep_alive = not is_old and self._parser.should_keep_alive()
        expects = not is_old and self._expects_continue
        head = Head(self._parser.get_method(), self._target, path, version, self._lines, keep_alive, expects)
        self._head_bytes, self._lines = 0, []  # trailers are no headers (RFC 9110, section 6.5.1)
        self.unanswered += 1
        self._transition("head", head)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        last = self._events[-1] if self._events else None
        if isinstance(last, Body):
            last.pieces.append(body)
        else:
            self._transition("piece", Body([body]))

    def on_message_complete(self) -> None:
        if len(self._lines) > HEAD_LINES_MAX:  # of trailers, while the request is the one to answer
            self._reject_head()
        self._transition("complete")
