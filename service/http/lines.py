"""Newline-delimited JSON: a batch of any length, with one event on each line and one result on each line."""

import re
from collections import deque
from collections.abc import Awaitable
from functools import partial
from typing import Final

from service.core.problems import Problem
from service.events.event import EVENT_TEXT_BYTES_MAX, READER, Event
from service.events.incomplete_text import IncompleteText
from service.events.strict_json import strictly
from service.http.batch import Parse, by_length, long_member_of, member_of
from service.http.headers import LINES, check_no_key, media_type, unsupported
from service.http.responses import render_line
from service.http.streamed_body import Text
from service.http.streaming import Exchange, StreamHead
from service.pipeline.request import WriteResult

# Blank lines, and blanks before an event, also those of lines that end with CRLF.
_BLANKS: Final = re.compile(rb"[ \t\r\n]*")
_HEAD: Final = b"content-type: %b\r\n" % LINES.encode()


class Lines:
    """Cuts a body into its lines, without the blank ones. A line ends with a line feed, or with the body."""

    is_over: Final = False  # whatever a line is, another may follow

    def __init__(self, most: int = EVENT_TEXT_BYTES_MAX) -> None:
        self._data = b""  # the last part of the body; what is before `_start` is cut
        self._start = 0
        too_long = f"line: it is longer than {most} bytes, the most of an event's JSON"
        self._line = IncompleteText(most, too_long)  # from earlier parts of the body

    @property
    def held(self) -> int:
        """The bytes in memory."""
        return self._line.size + len(self._data) - self._start

    @property
    def has_unread(self) -> bool:
        """Whether `next` stopped before the end of the last part: a line's end is looked for in all of it."""
        return False

    def feed(self, data: bytes) -> None:
        """Take the next part of the body, after `next` has returned None."""
        self._data, self._start = data, 0

    def next(self) -> Text | None:
        """Return the next line, or the problem of one that is too long; None without a whole line."""
        if not self._line.is_begun:
            blanks = _BLANKS.match(self._data, self._start)
            self._start = self._start if blanks is None else blanks.end()
        end = self._data.find(b"\n", self._start)
        self._line.add(self._data[self._start : end if end >= 0 else len(self._data)])
        if end < 0:
            self.feed(b"")
            return None
        self._start = end + 1
        return self._line.take()

    def drop(self, problem: Problem) -> None:
        """Drop the incomplete line as IncompleteText does: `problem` is its result."""
        self._line.drop(problem)

    def end(self) -> None:
        """Note that the body has ended."""
        if self._line.is_begun:
            self.feed(b"\n")


def line_of(line: bytes, traceparent: bytes | None = None, scope: str = "") -> Event:
    """Parse one event from a line of at most LONG_BYTES. Raises Problem (400, 413)."""
    if READER is not None and (event := READER.member(line, scope, traceparent)) is not None:
        return event
    return strictly(line, partial(member_of, traceparent=traceparent, scope=scope))


def lines_exchange(head: StreamHead) -> Exchange:
    """Begin a batch of lines. Raises Problem (400) for a key of the request, (415) for a charset other than UTF-8."""
    if media_type(head.used.get(b"content-type")) != LINES:
        raise unsupported(LINES)
    check_no_key(head.used)
    events = KeyedEvents(by_length(line_of, long_member_of, traceparent=head.traceparent, scope=head.caller.scope))
    return Exchange(Lines(), events.parse, events.render, _render_end, 207, _HEAD)


class KeyedEvents:
    """Parses lines, and renders each result with the key of its event: by it a client tells mixed-up answers."""

    def __init__(self, parse: Parse[bytes]) -> None:
        self._parse = parse
        self._keys: deque[str] = deque()  # of the lines whose results are not rendered yet; "" of one without an event

    def parse(self, line: Text) -> Event | Awaitable[Event]:
        """Parse the next line. Raises Problem."""
        self._keys.append("")
        if isinstance(line, Problem):
            raise line
        made = self._parse(line)
        if not isinstance(made, Event):
            return self._with_key(made)
        self._keys[-1] = made.key
        return made

    async def _with_key(self, parsing: Awaitable[Event]) -> Event:
        event = await parsing
        self._keys[-1] = event.key
        return event

    def render(self, result: WriteResult) -> bytes:
        """Render the result of the next line."""
        return render_line(result, self._keys.popleft())


def _render_end(problem: Problem) -> bytes:
    """Render why a batch is not read on. Each line has a key of its own, so the rest can be sent alone."""
    return render_line(Problem(problem.kind, f"{problem.detail}: send the rest again", problem.retry_after_s))
