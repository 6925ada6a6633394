"""Tests how newline-delimited JSON is cut into lines, however it arrives."""

import random
import tracemalloc

import pytest

from service.core.problems import NOT_WRITTEN, TOO_LARGE, Problem
from service.events.event import EVENT_TEXT_BYTES_MAX
from service.http.lines import Lines
from tests.unit.fakes import grows_in_proportion


def cut(*parts: bytes, most: int = EVENT_TEXT_BYTES_MAX) -> list[bytes | str]:
    """Cut a body that comes in parts; the problem of a line is its code."""
    lines = Lines(most)
    texts: list[bytes | str] = []

    def take() -> None:
        while (text := lines.next()) is not None:
            texts.append(text if isinstance(text, bytes) else text.kind.code)

    for part in parts:
        lines.feed(part)
        take()
    lines.end()
    take()
    assert lines.held == 0
    return texts


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (b"", []),
        (b"\n \r\n\t\n", []),
        (b"1", [b"1"]),
        (b"1\n2", [b"1", b"2"]),
        (b"1\n2\n", [b"1", b"2"]),
        (b"1\r\n2\r\n", [b"1\r", b"2\r"]),
        (b"\n\n1\n\n\r\n2\n \n", [b"1", b"2"]),
        (b" 1 \n", [b"1 "]),
        (b"3\x0b4\x85\xe2\x80\xa8\r5\n6", [b"3\x0b4\x85\xe2\x80\xa8\r5", b"6"]),
        (b"\x0b\n1", [b"\x0b", b"1"]),
        (b"12345678901\n1234567890\n123456789012", ["too-large", b"1234567890", "too-large"]),
    ],
)
def test_a_line_ends_with_a_line_feed_or_the_body(body: bytes, lines: list[bytes | str]) -> None:
    assert cut(body, most=10) == lines
    for split in range(len(body) + 1):
        assert cut(body[:split], body[split:], most=10) == lines, split
    assert cut(*[body[n : n + 1] for n in range(len(body))], most=10) == lines
    assert cut(*[b"", *[body[n : n + 1] for n in range(len(body))], b""], most=10) == lines


def test_lines_are_the_same_in_whatever_parts_they_come() -> None:
    dice = random.Random(7)
    for _ in range(300):
        body = bytes(dice.choices(b"\n\n\r 1aaaa", k=dice.randrange(80)))
        whole = [line.lstrip(b" \t\r") for line in body.split(b"\n") if line.strip(b" \t\r")]
        expected = [line if len(line) <= 9 else "too-large" for line in whole]
        cuts = sorted(dice.choices(range(len(body) + 1), k=dice.randrange(6)))
        parts = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        assert cut(*parts, most=9) == expected, parts


def test_a_line_that_is_too_long_is_not_kept() -> None:
    lines = Lines()
    for _ in range(40):
        lines.feed(b"x" * 100_000)
        assert lines.next() is None
        assert lines.held <= EVENT_TEXT_BYTES_MAX
    assert lines.held == 0
    lines.feed(b"y\nnext\n")
    problem = lines.next()
    assert isinstance(problem, Problem)
    assert (problem.kind, problem.detail) == (
        TOO_LARGE,
        "line: it is longer than 2000000 bytes, the most of an event's JSON",
    )
    assert lines.next() == b"next"


def test_a_line_that_is_dropped_fails_alone() -> None:
    lines = Lines()
    lines.feed(b"first\nsecond")
    assert (lines.next(), lines.next(), lines.held) == (b"first", None, 6)
    lines.drop(Problem(NOT_WRITTEN, "no room"))
    assert lines.held == 0
    lines.feed(b" goes on\nthird\n")
    dropped = lines.next()
    assert isinstance(dropped, Problem)
    assert dropped.kind is NOT_WRITTEN
    assert lines.next() == b"third"


def test_between_two_lines_nothing_is_dropped() -> None:
    lines = Lines()
    lines.feed(b"first\n\r\n")
    assert (lines.next(), lines.next()) == (b"first", None)
    lines.drop(Problem(NOT_WRITTEN, "no room"))
    lines.feed(b'\r\n{"a":2}\n')
    assert (lines.next(), lines.next()) == (b'{"a":2}', None)
    lines.drop(Problem(NOT_WRITTEN, "no room"))
    lines.end()
    assert lines.next() is None


@pytest.mark.parametrize("unit", [b"\n", b" ", b"\r\n", b"1\n", b"x"])
def test_a_body_of_any_length_is_cut_in_linear_time(unit: bytes) -> None:
    assert grows_in_proportion(lambda size: cut(unit * (size // len(unit))))


def test_a_line_in_tiny_pieces_has_its_own_size_in_memory() -> None:
    """An object for each piece would take ten times the memory."""
    lines = Lines()
    tracemalloc.start()
    for n in range(20_000):
        lines.feed(b"%05d" % n)
        assert lines.next() is None
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines.held == 100_000
    assert taken < 2 * lines.held
