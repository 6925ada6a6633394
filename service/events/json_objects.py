"""Cuts JSON objects out of a text of concatenated objects, which may come in any pieces."""

import re
from typing import Final

from service.core.problems import TOO_LARGE, Problem
from service.events.event import EVENT_TEXT_BYTES_MAX
from service.events.strict_json import DEPTH_MAX, TOO_DEEP, not_json

# The quantifiers are possessive, so that each search is linear.
_BLANKS: Final = re.compile(rb"[ \t\r\n]*+")
# Text without brackets: whole strings, and what is outside of strings.
_PLAIN: Final = re.compile(rb'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_REST_OF_STRING: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_OPENING: Final = frozenset(b"{[")


class JsonObjects:
    """Finds where objects end by their brackets; whether an object is JSON is its parser's question.

    Between objects only blanks are allowed. An unfinished object may have `most` bytes.
    """

    def __init__(self, most: int = EVENT_TEXT_BYTES_MAX) -> None:
        self._most = most
        self._text = bytearray()  # from the unfinished object on
        self._at = 0  # what is before was looked at
        self._depth = 0  # brackets that are open
        self._in_string = False
        self.fault: Problem | None = None

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next piece; return the objects that it completes. Takes up to two microseconds a byte.

        `fault` is the Problem of what follows these objects, if that is none: text outside of objects or nested too
        deep (400), or an object that is too long (413). Nothing is taken after that.
        """
        objects: list[bytes] = []
        if self.fault is None:
            try:
                self._cut(piece, objects)
            except Problem as problem:
                self.fault = problem.as_result()
        return objects

    def _cut(self, piece: bytes, objects: list[bytes]) -> None:
        text = self._text
        text += piece
        start = 0
        while self._to_next_bracket():
            self._depth += 1 if text[self._at] in _OPENING else -1
            self._at += 1
            if self._depth > DEPTH_MAX:
                raise not_json(TOO_DEEP)
            if not self._depth:
                objects.append(bytes(text[start : self._at]).strip())
                start = self._at
        del text[:start]
        self._at -= start
        if len(text) > self._most:
            raise Problem(TOO_LARGE, f"body: one record's JSON has more than {self._most} bytes")

    def end(self) -> None:
        """Note the end of the text: `fault` is a Problem (400) if an object is unfinished."""
        if self.fault is None and self._text.strip():
            self.fault = not_json("ends within a record")

    def _to_next_bracket(self) -> bool:
        """Move to the next bracket outside of strings; False if the text ends before it."""
        text = self._text
        if not self._depth:
            self._at = _end(_BLANKS, text, self._at)
            if self._at < len(text) and text[self._at] != ord("{"):
                raise not_json("is not a sequence of JSON objects, one for each record")
            return self._at < len(text)
        if self._in_string:
            self._at = _end(_REST_OF_STRING, text, self._at)
            if text[self._at : self._at + 1] != b'"':  # the string goes on, perhaps with an escape that is cut
                return False
            self._at += 1
            self._in_string = False
        self._at = _end(_PLAIN, text, self._at)
        if text[self._at : self._at + 1] == b'"':
            self._at += 1
            self._in_string = True
            return self._to_next_bracket()
        return self._at < len(text)


def _end(pattern: re.Pattern[bytes], text: bytearray, start: int) -> int:
    """Return where the match that begins at `start` ends; each pattern here matches an empty text too."""
    found = pattern.match(text, start)
    return found.end() if found else start
