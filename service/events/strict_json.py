"""RFC 8259, strictly: what a body must be before anything of it is believed.

A value is passed on byte for byte, so whoever reads it must be able to trust it. And one body must not hold up
everybody else: each step takes a time in proportion to its length.
"""

import gc
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from service import native
from service.core.problems import INVALID_JSON, TOO_LARGE, Problem

DEPTH_MAX: Final = 64
# What is made of a longer body may be millions of objects. The collector would look through them again and again while
# they come to be, for five times as long, and find nothing.
COLLECTED_BYTES: Final = 64 * 1024

# Of a longer body that is refused anyway nobody looks for what else is wrong.
EXPLAINED_BYTES: Final = 64 * 1024

T = TypeVar("T")


def strictly(body: bytes, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of a body that is yet to be checked. Raises Problem: that it is no JSON comes first.

    But for what is too large (413), and for the problem of a long body: that is refused before a check, which takes a
    hundred times as long.
    """
    try:
        parsed = parse(body)
    except Problem as problem:
        if problem.kind is not TOO_LARGE and len(body) <= EXPLAINED_BYTES:
            check_json(body)
        raise
    check_json(body)
    return parsed


def check_json(body: bytes) -> None:
    """UTF-8 without a BOM, no NaN, no duplicate names, no lone surrogates, at most 64 levels. Raises Problem (400)."""
    if native.COMPILED and native.bodies.is_json(body):
        return
    pausing = len(body) > COLLECTED_BYTES and gc.isenabled()
    if pausing:
        gc.disable()
    try:
        if not _is_plain(body):
            _check_each(body)
    finally:
        if pausing:
            gc.enable()


def not_json(why: str) -> Problem:
    """400: the body is no JSON, or not the one that is taken."""
    return Problem(INVALID_JSON, f"body: {why}")


def _is_plain(body: bytes) -> bool:
    """Is it, but for blanks, what an encoder makes of its own decoding? An encoder writes strict JSON and nothing else.

    Most bodies were made by one. It often costs half of `_check_each`, which looks at every name, or less.
    """
    # A run of 1,024 digits shows in this sample of the body; to read it as a number takes the square of its length.
    if _MANY_DIGITS.search(body[::16]):
        return False
    try:
        again = _encode(_decode(body))
        plain = again == body or again == msgspec.json.format(body, indent=-1)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return plain and not _is_deep(body)


def _check_each(body: bytes) -> None:
    if body.startswith(b"\xef\xbb\xbf"):
        raise not_json("begins with a byte order mark: send UTF-8 without one")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise not_json(f"is not UTF-8 (byte {error.start})") from None
    try:
        parsed, end = _scan(text, len(text) - len(text.lstrip(_BLANKS)))
    except json.JSONDecodeError as error:
        raise not_json(f"is not JSON: {error.msg} at character {error.pos}") from None
    except StopIteration as error:  # the scanner's own way to say that no value begins here
        raise not_json(f"is not JSON: Expecting value at character {error.value}") from None
    except RecursionError:  # far deeper: the scanner itself gives up at some 1,000 levels
        raise not_json(TOO_DEEP) from None
    if end != len(text.rstrip(_BLANKS)):
        raise not_json(f"is not JSON: Extra data at character {end}")
    if _is_deep(body):
        raise not_json(TOO_DEEP)
    if _SURROGATE_ESCAPE.search(body) and _has_lone_surrogate(parsed):
        raise not_json("has a lone surrogate (\\ud800 to \\udfff without its pair)")


def _is_deep(body: bytes) -> bool:
    """Is it, which is JSON, nested deeper than `DEPTH_MAX`?"""
    if body.count(b"{") + body.count(b"[") <= DEPTH_MAX:
        return False
    if b"\\" in body:  # of a run of backslashes each pair is a character, and one that is left over escapes the next
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = body.translate(_ONE_KIND, _NO_MARKS)
    brackets = b"".join(marks.replace(b'""', b"").split(b'"')[::2])  # those outside of strings
    for _ in range(DEPTH_MAX):
        brackets = brackets.replace(b"[]", b"")  # the innermost level
        if not brackets:
            return False
    return True


def _has_lone_surrogate(parsed: Any) -> bool:
    match parsed:
        case str():
            return _LONE_SURROGATE.search(parsed) is not None
        case Mapping():
            return any(_has_lone_surrogate(name) or _has_lone_surrogate(item) for name, item in parsed.items())
        case list():
            return any(map(_has_lone_surrogate, parsed))
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise not_json(f"has the name {name!r} twice in one object")
            seen.add(name)
    return members


def _no_constant(name: str) -> Any:
    raise not_json(f"has {name}, which is no JSON number")


# A fraction stays the text that it is: to read 1e-320 as a number takes 7 µs, and a body may have a million of them.
_decode: Final = msgspec.json.Decoder(float_hook=msgspec.Raw).decode
_encode: Final = msgspec.json.Encoder().encode
_MANY_DIGITS: Final = re.compile(rb"[0-9]{64}")
# Numbers stay text: their size is not ours to judge, and an integer of 5,000 digits is JSON.
# Its scanner itself: `decode` around it costs as much again for a small body, and does no more than find the end.
_scan = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=str, parse_float=str
).scan_once  # type: ignore[attr-defined]
_BLANKS: Final = " \t\n\r"
TOO_DEEP: Final = f"is nested deeper than {DEPTH_MAX} levels"
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")
_NO_MARKS: Final = bytes(set(range(256)) - set(b'[]{}"'))
_LONE_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
_SURROGATE_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
