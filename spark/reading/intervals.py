"""Spans of time: united, subtracted and cut."""

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
"""A span of time in ms since the epoch; the end is exclusive."""


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Unite intervals that overlap or touch: a row is read once."""
    found: list[Interval] = []
    for first, end in sorted(intervals):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found


def without(intervals: Iterable[Interval], read: Sequence[Interval]) -> list[Interval]:
    """Subtract the intervals that were `read` (merged) from others."""
    left = merged(intervals)
    for first, end in read:
        pieces = [((start, min(stop, first)), (max(start, end), stop)) for start, stop in left]
        left = [piece for pair in pieces for piece in pair if piece[0] < piece[1]]
    return left


def pieces(intervals: Sequence[Interval], least: int) -> list[Interval]:
    """Cut intervals so that there are at least `least` pieces of about the same length, if they are that long."""
    total = sum(end - first for first, end in intervals)
    length = max(-(-total // least), 1)
    return [(start, min(start + length, end)) for first, end in intervals for start in range(first, end, length)]
