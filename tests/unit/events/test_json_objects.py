"""Tests the cutting of concatenated JSON objects out of pieces of any length."""

import itertools
import json

import pytest

from service.core.problems import Problem
from service.events.json_objects import JsonObjects
from tests.unit.fakes import grows_in_proportion

TEXTS = [
    b'{"a":1}',
    b'{"a":"}"}{"b":"\\"}{"}',
    b' {"a":{"b":[1,{"c":"]"}]}}\r\n\t{"d":[]}\n',
    b'{"a\\\\":"\\\\"}{"\xc3\xa9":"[{\\\\\\"}"}',
    b"",
    b" \n",
]


def objects(text: bytes, size: int) -> list[bytes]:
    cutter = JsonObjects()
    found = [each for start in range(0, len(text), size) for each in cutter.feed(text[start : start + size])]
    cutter.end()
    if cutter.fault is not None:
        raise cutter.fault
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_objects_are_cut_whatever_the_pieces(text: bytes) -> None:
    decoder, wanted, rest = json.JSONDecoder(), [], text.decode().strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        wanted.append(value)
        rest = rest[end:].strip()
    for size in (1, 2, 3, 7, 1_000):
        assert [json.loads(each) for each in objects(text, size)] == wanted


def test_an_object_is_there_with_its_last_byte() -> None:
    cutter = JsonObjects()
    assert cutter.feed(b'{"a":"x') == []
    assert cutter.feed(b'"') == []
    assert cutter.feed(b"}") == [b'{"a":"x"}']
    assert cutter.feed(b'{}{"b"') == [b"{}"]


@pytest.mark.parametrize("text", [b"foobar", b"1", b"[{}]", b"{},{}", b'{}"a"', b"}", b"\xef\xbb\xbf{}"])
def test_text_outside_of_objects_is_refused(text: bytes) -> None:
    with pytest.raises(Problem, match="sequence of JSON objects") as caught:
        objects(text, 1)
    assert caught.value.kind.status == 400


@pytest.mark.parametrize("text", [b"{", b'{"a', b'{"a\\', b'{}{"a":[}'])
def test_an_unfinished_object_is_refused_at_the_end(text: bytes) -> None:
    with pytest.raises(Problem, match="ends within a record"):
        objects(text, 2)


def test_an_object_has_bounds() -> None:
    for cutter, text, code, detail in (
        (JsonObjects(most=10), b'{"a":"xxxxx', "too-large", "more than 10 bytes"),
        (JsonObjects(), b'{"a":' + b"[" * 64, "invalid-json", "nested deeper than 64"),
    ):
        assert cutter.feed(b"{}" + text) == [b"{}"]
        assert cutter.fault is not None
        assert (cutter.fault.kind.code, detail in cutter.fault.detail) == (code, True)
        assert cutter.feed(b"{}") == []
    assert JsonObjects().feed(b'{"a":' + b"[" * 63 + b"]" * 63 + b"}") != []


@pytest.mark.parametrize("piece", [b"x", b"\\\\", b'\\"', b'","', b"{}", b"[],"])
def test_a_text_in_small_pieces_is_cut_in_linear_time(piece: bytes) -> None:
    opening = b'{"a":[' if piece in (b"{}", b"[],") else b'{"a":"'

    def cut(size: int) -> None:
        cutter = JsonObjects()
        for part in itertools.chain([opening], [piece] * (size // len(piece))):
            cutter.feed(part)

    assert grows_in_proportion(cut)
