"""Cuts JSON objects out of a text of concatenated objects, which may come in any parts."""

import re
from typing import Final

from service.core.problems import Problem
from service.events.event import EVENT_TEXT_BYTES_MAX
from service.events.incomplete_text import IncompleteText
from service.events.strict_json import DEPTH_MAX, TOO_DEEP, not_json

# The quantifiers are possessive, so that each search is linear. Inside of an object, text without brackets (strings
# are whole) and the innermost arrays and objects are skipped.
_BLANKS: Final = re.compile(rb"[ \t\r\n]*+")
_PLAIN: Final = rb'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+'
_SKIPPED: Final = re.compile(rb'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+"|\[%b\]|\{%b\})*+' % (_PLAIN, _PLAIN), re.DOTALL)
_STRING: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
# The most bytes that one call scans. If each is a bracket, the scan takes less than a time slice.
LOOKED_AT_ONCE: Final = 512
_OPENING: Final = frozenset(b"{[")
_QUOTE: Final = ord('"')


class JsonObjects:
    """Finds where objects end by their brackets; their parser decides whether they are JSON.

    Between objects only blanks are allowed: behind anything else nothing is cut (`is_over`). An object may have `most`
    bytes; a longer one is a problem by itself.
    """

    def __init__(self, most: int = EVENT_TEXT_BYTES_MAX) -> None:
        self._data = b""  # the last part of the text
        self._start = 0  # of the incomplete object in it
        self._at = 0  # what is before was looked at
        # The incomplete object, from earlier parts.
        self._object = IncompleteText(most, f"body: one record's JSON has more than {most} bytes")
        self._depth = 0  # brackets that are open
        self._in_string = False
        self._is_escaped = False  # what was looked at ended with a backslash in a string
        self._fault: Problem | None = None  # to return, of text that cannot be cut
        self.is_over = False

    @property
    def held(self) -> int:
        """The bytes in memory."""
        return self._object.size + len(self._data) - self._start

    @property
    def has_unread(self) -> bool:
        """Whether `next` has not looked at all of the last part, so that a call may return an object after None."""
        return self._depth > 0 and self._at < len(self._data)

    def feed(self, data: bytes) -> None:
        """Take the next part of the text, after `next` has returned None and nothing is unread."""
        self._data, self._start, self._at = data, 0, 0

    def next(self) -> bytes | Problem | None:
        """Return the next object, or the problem that takes its place; None without a whole one."""
        is_within = self._depth > 0 or (not self.is_over and self._begin())
        if self._fault is not None:
            return self._stop(self._fault)
        if not is_within:
            return None
        if self._to_end_of_object():
            self._object.add(self._data[self._start : self._at])
            return self._object.take()
        if self._depth > DEPTH_MAX:
            return self._stop(not_json(TOO_DEEP))
        if self.has_unread:
            return None
        self._object.add(self._data[self._start :])
        self.feed(b"")
        return None

    def drop(self, problem: Problem) -> None:
        """Drop the incomplete object as IncompleteText does: `problem` is its result."""
        self._object.drop(problem)

    def end(self) -> None:
        """Note the end of the text; `next` returns the problem of an incomplete object."""
        if self._depth:
            self._fault = self._object.problem or not_json("ends within a record")

    def _begin(self) -> bool:
        """Move to the first bracket of the next object; return False if there is none."""
        blanks = _BLANKS.match(self._data, self._at)
        self._at = self._start = blanks.end() if blanks else self._at
        if self._at == len(self._data):
            self.feed(b"")
            return False
        if self._data[self._at] != ord("{"):
            self._fault = not_json("is not a sequence of JSON objects, one for each record")
            return False
        self._depth = 1
        self._at += 1
        return True

    def _to_end_of_object(self) -> bool:
        """Look at the next bytes, up to the end of the object; return whether the object is complete."""
        data, at, depth = self._data, self._at, self._depth
        until = min(len(data), at + LOOKED_AT_ONCE)
        while at < until:
            if self._in_string:
                at = self._end_of_string(at, until)
                continue
            at = _end(_SKIPPED, data, at, until)
            if at == until:
                break
            if data[at] == _QUOTE:  # of a string that goes on behind these bytes
                self._in_string = True
            elif data[at] in _OPENING:
                depth += 1
            else:
                depth -= 1
            at += 1
            if not depth or depth > DEPTH_MAX:
                break
        self._at, self._depth = at, depth
        return not depth

    def _end_of_string(self, at: int, until: int) -> int:
        """Move to the end of a string, or to `until`."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        at = _end(_STRING, self._data, at, until)
        if at < until:
            self._in_string = self._data[at] != _QUOTE
            self._is_escaped = self._in_string  # a backslash whose character is behind `until`
            at += 1
        return at

    def _stop(self, fault: Problem) -> Problem:
        """Cut nothing any more; `fault` says why."""
        self.feed(b"")
        self._object.clear()
        self._depth, self._fault, self.is_over = 0, None, True
        return fault


def _end(pattern: re.Pattern[bytes], text: bytes, start: int, until: int) -> int:
    """Return where the match within `start` and `until` ends; each pattern here matches an empty text too."""
    found = pattern.match(text, start, until)
    return found.end() if found else start
