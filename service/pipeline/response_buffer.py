"""Answers that come to be known in one step go out together: each wakes its client, and to wake one takes longest.

Clients that share a thread are awake while their answers follow each other at once, so the kernel has nobody to wake.
"""

import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final

import structlog

log = structlog.get_logger(__name__)

Tell = Callable[[], object]
Named = Callable[[], Mapping[str, str]]
_AT_ONCE: Final = contextlib.nullcontext()


class ResponseBuffer:
    """Tells answers at once, or those of a step at its end, in their order."""

    def __init__(self) -> None:
        self._held: list[tuple[Tell, Named]] | None = None

    def put(self, tell: Tell, named: Named) -> None:
        """Have an answer told. Where that is done at once, this raises what it raises; else the log has it `named`."""
        if self._held is None:
            tell()
        else:
            self._held.append((tell, named))

    def together(self, most: int) -> contextlib.AbstractContextManager[None]:
        """Hold what is put in until the end of the `with` block, in which nothing may be awaited.

        One alone is told at once.
        """
        return self if most > 1 else _AT_ONCE

    def __enter__(self) -> None:
        assert self._held is None, "a step within a step: its answers would be lost"
        self._held = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        held, self._held = self._held, None
        for tell, named in held or ():
            try:
                tell()
            except Exception:  # a bug at the edge must not keep the others from their answers
                log.exception("an answer was not given", **named())
