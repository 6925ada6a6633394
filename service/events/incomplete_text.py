"""The incomplete text of a body that arrives in parts: a line, or a JSON object, as far as it has come."""

from service.core.pieces import joined
from service.core.problems import TOO_LARGE, Problem


class IncompleteText:
    """One text at a time, as far as it has come, up to `most` bytes, or the problem that takes its place."""

    def __init__(self, most: int, too_long: str) -> None:
        """`too_long` is the detail of the problem (413) of a text with more than `most` bytes."""
        self._most = most
        self._too_long = too_long
        self._text: bytes | bytearray = b""
        self.problem: Problem | None = None  # of the text, which is dropped

    @property
    def size(self) -> int:
        """The bytes in memory."""
        return len(self._text)

    @property
    def is_begun(self) -> bool:
        """Whether a part of the text has come."""
        return bool(self._text) or self.problem is not None

    def add(self, piece: bytes) -> None:
        """Add the next piece, which may be empty; a text that has a problem stays dropped."""
        if piece and self.problem is None:
            self._text = joined(self._text, piece)
            if len(self._text) > self._most:
                self.drop(Problem(TOO_LARGE, self._too_long))

    def drop(self, problem: Problem) -> None:
        """Drop the text, as far as it has come and what is still to come: `problem` takes its place.

        Before its first piece nothing is dropped: the problem would be that of a text that has not come yet.
        """
        if self._text:
            self._text, self.problem = b"", problem

    def take(self) -> bytes | Problem:
        """Return the text, which is complete now, or its problem; the next piece begins another text."""
        text = self.problem or bytes(self._text)
        self.clear()
        return text

    def clear(self) -> None:
        """Forget the text."""
        self._text, self.problem = b"", None
