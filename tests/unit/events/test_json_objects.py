"""Tests the cutting of concatenated JSON objects out of pieces of any length."""

import itertools
import json
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.problems import TOO_LARGE, Problem
from service.events.json_objects import LOOKED_AT_ONCE, JsonObjects
from tests.unit.fakes import grows_in_proportion

TEXTS = [
    b'{"a":1}',
    b'{"a":"}"}{"b":"\\"}{"}',
    b' {"a":{"b":[1,{"c":"]"}]}}\r\n\t{"d":[]}\n',
    b'{"a\\\\":"\\\\"}{"\xc3\xa9":"[{\\\\\\"}"}',
    b"",
    b" \n",
]


def taken(cutter: JsonObjects) -> list[bytes]:
    """Take all objects that are there. Raises the Problem that stands for one."""
    found = []
    while (text := cutter.next()) is not None or cutter.has_unread:
        if isinstance(text, Problem):
            raise text
        if text is not None:
            found.append(text)
    return found


def objects(text: bytes, size: int) -> list[bytes]:
    cutter, found = JsonObjects(), []
    for start in range(0, len(text), size):
        cutter.feed(text[start : start + size])
        found += taken(cutter)
        assert cutter.held <= len(text)
    cutter.end()
    return found + taken(cutter)


@pytest.mark.parametrize("text", TEXTS)
def test_objects_are_cut_whatever_the_parts(text: bytes) -> None:
    decoder, wanted, rest = json.JSONDecoder(), [], text.decode().strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        wanted.append(value)
        rest = rest[end:].strip()
    for size in (1, 2, 3, 7, 1_000):
        assert [json.loads(each) for each in objects(text, size)] == wanted


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3), max_size=3), st.integers(1, 9))
def test_any_objects_are_cut(wanted: list[object], size: int) -> None:
    texts = [json.dumps(each, ensure_ascii=False).encode() for each in wanted]
    assert objects(b"".join(texts), size) == texts


def test_an_object_is_there_with_its_last_byte() -> None:
    cutter = JsonObjects()
    for part, cut in ((b'{"a":"x', []), (b'"', []), (b"}", [b'{"a":"x"}']), (b'{}{"b"', [b"{}"])):
        cutter.feed(part)
        assert taken(cutter) == cut
    assert cutter.held == 4


@pytest.mark.parametrize("text", [b"foobar", b"1", b"[{}]", b"{},{}", b'{}"a"', b"}", b"\xef\xbb\xbf{}"])
def test_text_outside_of_objects_is_refused(text: bytes) -> None:
    for size in (1, 100):
        with pytest.raises(Problem, match="sequence of JSON objects") as caught:
            objects(text, size)
        assert caught.value.kind.status == 400


@pytest.mark.parametrize("text", [b"{", b'{"a', b'{"a\\', b'{}{"a":[}'])
def test_an_unfinished_object_is_refused_at_the_end(text: bytes) -> None:
    with pytest.raises(Problem, match="ends within a record"):
        objects(text, 2)


@pytest.mark.parametrize("wrong", [b"foobar", b'{"a":' + b"[" * 64])
def test_behind_text_that_cannot_be_cut_nothing_is(wrong: bytes) -> None:
    cutter = JsonObjects()
    cutter.feed(b'{"a":1}' + wrong)
    assert cutter.next() == b'{"a":1}'
    assert not cutter.is_over
    assert isinstance(cutter.next(), Problem), "with it, the text is over"
    assert cutter.is_over
    assert cutter.next() is None
    cutter.feed(b"{}")
    cutter.end()
    assert cutter.next() is None


def test_objects_may_be_64_levels_deep() -> None:
    deep = b'{"a":' + b"[" * 63 + b"]" * 63 + b"}"
    assert objects(deep, 7) == [deep]


def test_an_object_that_is_too_long_fails_alone() -> None:
    cutter = JsonObjects(most=10)
    cutter.feed(b'{"a":"xx')
    assert cutter.next() is None
    cutter.feed(b"yyyy{")
    assert cutter.next() is None
    assert cutter.held == 0
    cutter.feed(b'"}{"b":1}')
    problem = cutter.next()
    assert isinstance(problem, Problem)
    assert (problem.kind.code, problem.detail) == ("too-large", "body: one record's JSON has more than 10 bytes")
    assert cutter.next() == b'{"b":1}'


def test_an_object_may_be_dropped_as_far_as_it_has_come() -> None:
    cutter, problem = JsonObjects(), Problem(TOO_LARGE, "no room")
    cutter.feed(b'{"a":"x')
    assert cutter.next() is None
    cutter.drop(problem)
    cutter.feed(b'y"}{}')
    assert cutter.next() is problem
    assert cutter.next() == b"{}"
    cutter.feed(b'{"a"')
    assert cutter.next() is None
    cutter.drop(problem)
    cutter.end()
    assert not cutter.is_over
    assert cutter.next() is problem


def test_between_two_objects_nothing_is_dropped() -> None:
    cutter = JsonObjects()
    cutter.feed(b'{"a":1}\n')
    assert (cutter.next(), cutter.next()) == (b'{"a":1}', None)
    cutter.drop(Problem(TOO_LARGE, "no room"))
    cutter.feed(b'{"b":1}')
    assert cutter.next() == b'{"b":1}'


@pytest.mark.parametrize("piece", [b"x", b"\\\\", b'\\"', b'","', b"{}", b"[],", b"[[]],"])
def test_a_text_in_small_parts_is_cut_in_linear_time(piece: bytes) -> None:
    opening = b'{"a":"' if piece in (b"x", b"\\\\", b'\\"', b'","') else b'{"a":['

    def cut(size: int) -> None:
        cutter = JsonObjects()
        for part in itertools.chain([opening], [piece] * (size // len(piece))):
            cutter.feed(part)
            assert cutter.next() is None

    assert grows_in_proportion(cut, size=16_000)


@pytest.mark.parametrize("piece", [b"[[[]]],", b'[[["x"]]],', b'"\\\\",', b"x" * 100, b'"\xc3\xa9\\"[",'])
def test_a_call_does_little_work_whatever_the_text(piece: bytes) -> None:
    text = b'{"a":[' + piece * (32_000 // len(piece)) + b"]}"
    cutter, found = JsonObjects(), None
    most = calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    cutter.feed(text)
    while found is None:
        calls = 0
        sys.setprofile(count)
        found = cutter.next()
        sys.setprofile(None)
        most = max(most, calls)
        assert cutter.has_unread is (found is None)
    assert found == text
    assert most < 8 * LOOKED_AT_ONCE  # events of the profiler: two for each call of a function, Python's and C's


def test_an_object_in_tiny_pieces_has_its_own_size_in_memory() -> None:
    """An object for each piece would take ten times the memory."""
    cutter = JsonObjects()
    tracemalloc.start()
    for part in itertools.chain([b'{"a":["'], (b"%05d" % n for n in range(20_000))):
        cutter.feed(part)
        while cutter.next() is not None or cutter.has_unread:
            pass
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cutter.held == 100_007
    assert taken < 2 * cutter.held
