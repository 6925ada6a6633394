"""Delta debugging (Zeller, "Yesterday, my program worked. Today, it does not. Why?", 1999): the fewest causes."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


class OutOfTime(Exception):
    """`fails` was called too often; the present result is not minimal."""


def shrink(causes: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Find the fewest of `causes`, in order, with which `fails` is true: without any one of them it is false.

    `fails` is not called for all causes, which are known to fail. If it raises OutOfTime, the smallest set so far is
    returned. A failure that does not occur each time makes the result larger, never wrong.
    """
    left = list(causes)
    try:
        if fails([]):
            return []
        parts = 2
        while len(left) > 1:
            smaller = _smaller(left, min(parts, len(left)), fails)
            if smaller is not None:
                parts = max(2, min(parts - 1, len(smaller))) if len(smaller) > len(left) // 2 else 2
                left = smaller
            elif parts >= len(left):
                break
            else:
                parts = min(2 * parts, len(left))
    except OutOfTime:
        pass
    return left


def _smaller(causes: list[T], parts: int, fails: Callable[[Sequence[T]], bool]) -> list[T] | None:
    """Return one of this many parts, or all but one, with which `fails` is true; None if there is none."""
    cuts = [round(len(causes) * number / parts) for number in range(parts + 1)]
    pieces = [causes[start:end] for start, end in pairwise(cuts)]
    for piece in pieces:
        if fails(piece):
            return piece
    if parts > 2:  # of two parts, each is all but the other
        for start, end in pairwise(cuts):
            rest = causes[:start] + causes[end:]
            if fails(rest):
                return rest
    return None
