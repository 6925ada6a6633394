"""Delta debugging (Zeller, "Yesterday, my program worked. Today, it does not. Why?", 1999): the fewest causes."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


class OutOfTime(Exception):
    """`fails` was asked too often; what is left is not the fewest."""


def shrink(causes: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """The fewest of `causes`, in their order, with which it still fails: without any one of them it does not.

    `fails` is not asked about the whole, which is known to fail. Where it raises OutOfTime, the best so far is the
    answer. A failure that does not come each time makes the answer larger, never wrong.
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
    """One of so many parts, or all but one, with which it still fails; None where there is none."""
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
