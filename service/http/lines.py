"""Newline-delimited JSON: a batch of any length, with one event on each line and one result on each line."""

import re
from collections.abc import Awaitable
from functools import partial
from typing import Final

from service.core.pieces import joined
from service.core.problems import TOO_LARGE, Problem
from service.events.event import EVENT_TEXT_BYTES_MAX, READER, Event
from service.events.strict_json import strictly
from service.http.batch import long_member_of, member_of
from service.http.events import by_length
from service.http.headers import LINES, media_type, unsupported
from service.http.responses import render_lines
from service.http.streaming import Exchange, StreamHead, Text
from service.pipeline.request import WriteResult

# Blank lines, and blanks before an event, also those of lines that end with CRLF.
_BLANKS: Final = re.compile(rb"[ \t\r\n]*")
_HEAD: Final = b"content-type: %b\r\n" % LINES.encode()


class Lines:
    """Cuts a body into its lines, without the blank ones. A line ends with a line feed, or with the body."""

    is_over: Final = False  # whatever a line is, another may follow

    def __init__(self, most: int = EVENT_TEXT_BYTES_MAX) -> None:
        self._most = most
        self._data = b""  # the last part of the body; what is before `_start` is cut
        self._start = 0
        self._begun: bytes | bytearray = b""  # the incomplete line, from earlier parts of the body
        self._problem: Problem | None = None  # of the incomplete line, whose bytes are dropped

    @property
    def held(self) -> int:
        """The bytes in memory."""
        return len(self._begun) + len(self._data) - self._start

    @property
    def has_unread(self) -> bool:
        """Whether `next` stopped before the end of the last part: a line's end is looked for in all of it."""
        return False

    def feed(self, data: bytes) -> None:
        """Take the next part of the body, after `next` has returned None."""
        self._data, self._start = data, 0

    def next(self) -> Text | None:
        """Return the next line, or the problem of one that is too long; None without a whole line."""
        if not self._begun and self._problem is None:
            blanks = _BLANKS.match(self._data, self._start)
            self._start = self._start if blanks is None else blanks.end()
        end = self._data.find(b"\n", self._start)
        self._keep(self._data[self._start : end if end >= 0 else len(self._data)])
        if end < 0:
            self.feed(b"")
            return None
        self._start = end + 1
        line = self._problem or bytes(self._begun)
        self._begun, self._problem = b"", None
        return line

    def _keep(self, piece: bytes) -> None:
        if piece and self._problem is None:
            self._begun = joined(self._begun, piece)
            if len(self._begun) > self._most:
                self.drop(
                    Problem(TOO_LARGE, f"line: it is longer than {self._most} bytes, the most of an event's JSON")
                )

    def drop(self, problem: Problem) -> None:
        """Drop the incomplete line, as far as it has come and what is still to come: `problem` is its result.

        Between two lines nothing is dropped: a problem there would be the result of no event.
        """
        if self._begun:
            self._begun, self._problem = b"", problem

    def end(self) -> None:
        """Note that the body has ended."""
        if self._begun or self._problem is not None:
            self.feed(b"\n")


def line_of(line: bytes, traceparent: bytes | None = None, scope: str = "") -> Event:
    """Parse one event from a line of at most LONG_BYTES. Raises Problem (400, 413)."""
    if READER is not None and (event := READER.member(line, scope, traceparent)) is not None:
        return event
    return strictly(line, partial(member_of, traceparent=traceparent, scope=scope))


def lines_exchange(head: StreamHead) -> Exchange:
    """Begin a batch of lines. Raises Problem (415) for a charset other than UTF-8."""
    if media_type(head.found.get(b"content-type")) != LINES:
        raise unsupported(LINES)
    parse_line = by_length(line_of, long_member_of, traceparent=head.traceparent, scope=head.caller.scope)

    def parse(line: Text) -> Event | Awaitable[Event]:
        if isinstance(line, Problem):
            raise line
        return parse_line(line)

    return Exchange(Lines(), parse, _render, _render_end, 207, _HEAD)


def _render(result: WriteResult) -> str:
    return render_lines([result]).decode()


def _render_end(problem: Problem) -> str:
    """Render why a batch is not read on. Each line has a key of its own, so the rest can be sent alone."""
    return _render(Problem(problem.kind, f"{problem.detail}: send the rest again", problem.retry_after_s))
