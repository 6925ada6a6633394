"""Tests strict JSON: C and jiter must agree, and no body may hold the event loop."""

import gc
import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import native
from service.core.problems import DETAIL_CHARS_MAX, Problem
from service.events import strict_json as module
from service.events.strict_json import check_json, in_thread


@pytest.fixture(autouse=True, scope="module", params=["python", "compiled"])
def _each(request: pytest.FixtureRequest) -> Iterator[None]:
    """With and without service.native, whose check hides Python's for common bodies."""
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "python":
            patched.setattr(native, "COMPILED", False)
        yield


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}")])
def test_json_deeper_than_64_levels_is_refused_whatever_its_content(opens: str, closes: str) -> None:
    """64 levels, the body's own object among them; brackets in strings do not count."""
    for levels in (63, 64, 300, 100_000):
        value = opens * levels + '"[[[{{{"' + closes * levels
        body = f'{{"topic": "t", "value": {value}}}'.encode()
        if levels == 63:
            check_json(body)
        else:
            with pytest.raises(Problem, match="deeper than 64 levels"):
                check_json(body)
    check_json(b"[" + b"[],{}," * 500 + b"1]")


DEEP = {levels: b"[" * levels + b"]" * levels for levels in (63, 64)}


@pytest.mark.parametrize("name", [b'"', b"\\", b'\\"[', b'\\\\"', b"[", b"]}", b'"]', b"\\u005b"])
def test_brackets_in_strings_are_no_levels(name: bytes) -> None:
    """With any escapes before or after them."""
    for text in (json.dumps((name * n).decode()).encode() for n in range(5)):
        check_json(b"[%b,%b]" % (text, DEEP[63]))
        with pytest.raises(Problem, match="deeper than 64 levels"):
            check_json(b"[%b,%b]" % (text, DEEP[64]))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'\xef\xbb\xbf{"a": 1}', "byte order mark"),
        (b'{"a": "\xff"}', "is not UTF-8"),
        (b'{"a": 1}{}', "is not JSON: trailing characters at line 1 column 9"),
        (b"[1] 2", "is not JSON: trailing characters"),
        (b'{"a" 1}', "is not JSON: expected `:` at line 1 column 6"),
        (b"", "is not JSON: EOF"),
        (b'"\\ud800"', "lone surrogate"),
        (b'"\\ud800\\u0041"', "lone surrogate"),
        (b'"\\ud800\\n"', "lone surrogate"),
        (b'[1, ["\\udc00"]]', "lone surrogate"),
        (b'{"a": {"b": ["\\ud800x"]}}', "lone surrogate"),
        (b'{"\\uDBFF": 1}', "lone surrogate"),
        (b'{"a": NaN}', "is not JSON: expected value at line 1 column 7"),
        (b"[-Infinity]", "is not JSON"),
        (b'{"a": 1, "a": 1}', "has the name 'a' twice"),
    ],
)
def test_the_check_itself_refuses_each_violation_of_strict_json(body: bytes, why: str) -> None:
    """Also violations that the decoder refuses too."""
    with pytest.raises(Problem, match=why):
        check_json(body)
    check_json(b' \n[{"a": "\\ud83d\\ude00"}]\t\r\n ')


STYLES: tuple[dict[str, Any], ...] = ({}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False})


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)


def test_the_name_that_is_there_twice_is_found_among_many() -> None:
    """In linear time: a comparison of all pairs takes minutes for a megabyte."""
    body = b"{%b}" % b",".join([b'"name %d":0' % n for n in (*range(200_000), 199_999)])
    with pytest.raises(Problem, match="'name 199999' twice"):
        check_json(body)


COMPILED = pytest.mark.skipif(not native.COMPILED, reason="service.native is not compiled")
NAMES = ["a", "b", "\u00e9", "\U0001f600", "\n", '"', "\\", "/", "", "\u0000", "\u2028"]


def written(name: str, chance: random.Random) -> bytes:
    """Encode a name as JSON, each of its characters with or without an escape."""
    text = ""
    for c in name:
        units = c.encode("utf-16-be").hex()
        escaped = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
        text += chance.choice([json.dumps(c)[1:-1], json.dumps(c, ensure_ascii=False)[1:-1], escaped, escaped.upper()])
    return b'"%b"' % text.replace("\\U", "\\u").encode()


def both_say(body: bytes) -> bool:
    """Check a body with C and jiter, which must agree."""
    try:
        module._parse(body)
    except Problem:
        strict = False
    else:
        strict = True
    assert (native.bodies.fault(body) is None) is strict, body
    return strict


@COMPILED
@given(st.lists(st.sampled_from(NAMES), max_size=8), st.integers(0, 100), st.randoms(use_true_random=False))
def test_c_and_python_find_the_same_duplicate_names(names: list[str], others: int, chance: random.Random) -> None:
    """With any spelling and any number of names; C must not leave them to Python."""
    names += [f"n{n}" for n in range(others)]
    chance.shuffle(names)
    body = b"{%b}" % b",".join(b"%b: %d" % (written(name, chance), n) for n, name in enumerate(names))
    assert both_say(body) is (len(set(names)) == len(names))
    assert both_say(b'[{"a":[%b,{}]},%b]' % (body, body)) is both_say(body)


@COMPILED
@given(JSONS, st.sampled_from(STYLES), st.integers(0), st.binary(max_size=4), st.integers(0, 6))
def test_c_and_python_give_the_same_result_for_any_body(
    value: Any, style: dict[str, Any], place: int, put: bytes, instead: int
) -> None:
    text = json.dumps(value, **style).encode(errors="replace")
    place %= len(text) + 1
    both_say(text)
    both_say(text[:place] + put + text[place + instead :])


@COMPILED
@pytest.mark.parametrize("first", range(0x80, 0x100))
def test_c_and_python_accept_the_same_utf_8(first: int) -> None:
    """Each first byte of a character, with the last correct and the first wrong continuation."""
    edges = [0x00, 0x22, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0]
    for second in edges:
        for rest in (b"", b"\x80", b"\xbf", b"\x80\x80", b"\xbf\xbf", b"\xc0", b"\x80\xc0"):
            both_say(b'["' + bytes([first, second]) + rest + b'"]')
            both_say(b'["' + bytes([first, second]) + rest)


MANY = 40_000


@COMPILED
@pytest.mark.parametrize(
    "body",
    [
        b"[%b]" % b",".join([b"{%b}" % b",".join(b'"%d":0' % n for n in range(40))] * 200),
        b"{%b}" % b",".join(b'"%d":0' % n for n in range(MANY)),
        b"{%b}" % b",".join(b'"\\u0061%d":0' % n for n in range(MANY)),
        b"[%b]" % b",".join([b'{"\\u0061":0}'] * MANY),
        b'["%b"]' % (b"\\ud83d\\ude00" * MANY),
    ],
    ids=["objects of 40 names", "one object of all names", "all escaped", "escaped names", "surrogates"],
)
def test_a_long_body_is_checked_by_c_alone(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "COMPILED", True)
    monkeypatch.setattr(module, "_parse", None)
    check_json(body)
    with pytest.raises(Problem):
        check_json(body[:-1])


@COMPILED
@pytest.mark.parametrize(
    ("end", "why"),
    [
        (b"", r"is not JSON \(byte 40003\)"),
        (b"]]", r"is not JSON \(byte 40004\)"),
        (b",NaN]", r"is not JSON \(byte 40004\)"),
        (b',"\xff"]', r"is not UTF-8 \(byte 40006\)"),
        (b',"\\udead"]', "lone surrogate"),
        (b',{"a":1,"\\u0061":2}]', "the name 'a' twice"),
        (b',{"a":1,%b,"a":2}]' % b",".join(b'"%d":0' % n for n in range(40)), "the name 'a' twice"),
        (b"," + b"[" * 64 + b"]" * 65, "deeper than 64 levels"),
    ],
)
def test_c_reports_the_fault_of_a_long_body(end: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "COMPILED", True)
    monkeypatch.setattr(module, "_parse", None)
    with pytest.raises(Problem, match=why):
        check_json(b'["%b"' % (b"x" * 40_000) + end)
    with pytest.raises(Problem, match="byte order mark"):
        check_json(b'\xef\xbb\xbf["%b"]' % (b"x" * 40_000))


@COMPILED
def test_other_threads_run_while_c_checks_a_long_body() -> None:
    body = b"{%b}" % b",".join(b'"%d":0' % n for n in range(400_000))
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(native.bodies.fault(body)))
    turns = 0
    thread.start()
    while thread.is_alive():
        turns += 1
    assert found == [None]
    assert turns > 1_000


@COMPILED
def test_integers_of_any_length_are_taken_by_c_and_of_4_300_digits_by_jiter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python parses an integer in quadratic time, and jiter converts integers."""
    assert both_say(b"[-%b]" % (b"9" * 4_300))
    monkeypatch.setattr(native, "COMPILED", True)
    check_json(b"9" * 5_000)
    check_json(b"[0.%b, 1e400]" % (b"9" * 5_000))
    monkeypatch.setattr(native, "COMPILED", False)
    check_json(b"[0.%b, 1e400]" % (b"9" * 5_000))
    with pytest.raises(Problem, match="is not JSON: number out of range"):
        check_json(b"9" * 5_000)


MUTATIONS = 60_000
SEEDS = [
    json.dumps({"topic": "t", "value": {"a": [1, -2, 1.5e10, True, None], "b": {"c": "\u00e9\n", "d": [[], {}]}}}),
    ' {"a" : 1 , "b":[ 1 ,2 ], "c": {"a": "\u00e9\U0001f600"} }\n',
    '{"\\u0061":1,"b":1,"\\ud83d\\ude00":"\\ud83d\\ude00\\u0000\\\\/\\b"}',
    "[1e400,-1E+05,0.1,-0.0,1e-320,123456789012345678901234567890]",
    "[" * 63 + "]" * 63,
]
PIECES = [
    *(b'"a" "b" \\u0061 \\ud800 \\udc00 \\u00g0 NaN Infinity - 0 01 . e E5 { } [ ] , : " \\ true null /'.split()),
    *(
        b"\xff",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xef\xbb\xbf",
        b"\x00",
        b"\x7f",
        b"\t",
        b"\n",
        b"\x0c",
        b" ",
    ),
]


@COMPILED
def test_c_and_python_give_the_same_result_for_mutated_bodies() -> None:
    """Bytes inserted, removed, replaced or repeated, at one to three places."""
    chance, strict = random.Random(20), 0
    for _ in range(MUTATIONS):
        body = bytearray(chance.choice(SEEDS).encode())
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            start, end = sorted((chance.randrange(len(body) + 1), chance.randrange(len(body) + 1)))
            end = min(end, start + 4)
            body[start : chance.choice((start, end))] = chance.choice(
                (chance.choice(PIECES), chance.randbytes(1), b"", body[start:end] * 2)
            )
        strict += both_say(bytes(body))
    assert MUTATIONS / 20 < strict < MUTATIONS / 2  # both verdicts occur


def test_a_problem_quotes_only_a_short_part_of_a_body() -> None:
    name = "n" * 1_000_000
    with pytest.raises(Problem) as caught:
        check_json(f'{{"{name}": 1, "{name}": 2}}'.encode())
    assert len(caught.value.detail) < DETAIL_CHARS_MAX + 10
    assert len(str(caught.value)) < DETAIL_CHARS_MAX + 40


@pytest.mark.parametrize("opens", [60, 1])
def test_millions_of_arrays_are_checked_without_the_garbage_collector(opens: int) -> None:
    """The garbage collector would take most of the time, longer than a lease."""
    collected: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    body = b"[%b]" % b",".join([b"[" * opens + b"]" * opens] * (2_000_000 // opens))
    gc.callbacks.append(note)
    try:
        check_json(body)
        with pytest.raises(Problem):
            check_json(body + b"}")
    finally:
        gc.callbacks.remove(note)
    assert len(collected) <= 4  # one collection after each; without the switch there are thousands
    assert gc.isenabled()


@COMPILED
@pytest.mark.parametrize(
    ("body", "taken"),
    [
        ('["\\ud83d\\uDE00"]', True),
        ('["\\uD7FF\\uE000\\u00e9\\u0000"]', True),
        ('["\\ud83d"]', False),
        ('["\\ude00"]', False),
        ('["\\ud83d\\u0041"]', False),
        ('["\\ud83d\\ud83d\\ude00"]', False),
        ('["\\ud83dude00"]', False),
        ('["\\ud83d\\ude0"]', False),
    ],
)
def test_pairs_of_surrogates_are_taken_compiled(body: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 8 MiB of them in Python would hold the event loop."""
    assert (native.bodies.fault(body.encode()) is None) is taken
    monkeypatch.setattr(native, "COMPILED", False)
    if taken:
        check_json(body.encode())
    else:
        with pytest.raises(Problem):
            check_json(body.encode())


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")
async def test_a_long_body_is_checked_at_a_lower_priority_than_that_of_the_event_loop() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert await in_thread(os.getpriority, os.PRIO_PROCESS, 0) == min(own + 10, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
