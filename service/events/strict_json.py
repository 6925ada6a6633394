"""RFC 8259, strictly: what a body must be before anything of it is believed.

A value is passed on byte for byte, so whoever reads it must be able to trust it. And one body must not hold up
everybody else: what is long is checked in a thread, by service.native without Python's lock.
"""

import asyncio
import gc
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import msgspec

from service import native
from service.core.problems import DETAIL_CHARS_MAX, INVALID_JSON, TOO_LARGE, Problem

DEPTH_MAX: Final = 64
# What is made of a longer body may be millions of objects. The collector would look through them again and again while
# they come to be, for five times as long, and find nothing.
COLLECTED_BYTES: Final = 64 * 1024

# A longer body is checked in a thread: the event loop waits for a shorter one, a millisecond or two at most.
LONG_BYTES: Final = 64 * 1024
# What is wrong with a longer body is told by its kind and its place: to find more words takes Python 100 ns a byte.
EXPLAINED_BYTES: Final = 16 * 1024

# One thread: many long bodies at once take one core, and wait for each other.
_THREAD: Final = ThreadPoolExecutor(1, "long-json")

T = TypeVar("T")
P = ParamSpec("P")


def strictly(body: bytes, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of a body that is yet to be checked. Raises Problem: that it is no JSON comes first.

    But for what is too large (413).
    """
    try:
        parsed = parse(body)
    except Problem as problem:
        if problem.kind is not TOO_LARGE:
            check_json(body)
        raise
    check_json(body)
    return parsed


async def in_thread(check: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
    """What a check of a long body tells, while the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, partial(check, *arguments, **more))


def check_json(body: bytes) -> None:
    """UTF-8 without a BOM, no NaN, no duplicate names, no lone surrogates, at most 64 levels. Raises Problem (400)."""
    if native.COMPILED:
        fault = native.bodies.fault(body)
        if fault is None:
            return
        if len(body) > EXPLAINED_BYTES:
            raise _told(body, *fault)
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


def _told(body: bytes, fault: int, place: int, name: bytes) -> Problem:
    """What service.native has found, in words."""
    match fault:
        case 0 if body.startswith(_BOM):
            return not_json(BOM)
        case 1:
            return not_json(f"is not UTF-8 (byte {place})")
        case 2:
            return not_json(TOO_DEEP)
        case 3:
            return _twice(name.decode(errors="replace"))
        case 4:
            return not_json(LONE_SURROGATE)
    return not_json(f"is not JSON (byte {place})")


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
    if body.startswith(_BOM):
        raise not_json(BOM)
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
        raise not_json(LONE_SURROGATE)


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
                raise _twice(name)
            seen.add(name)
    return members


def _twice(name: str) -> Problem:
    return not_json(f"has the name {name[:DETAIL_CHARS_MAX]!r} twice in one object")


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
_BOM: Final = b"\xef\xbb\xbf"
BOM: Final = "begins with a byte order mark: send UTF-8 without one"
LONE_SURROGATE: Final = "has a lone surrogate (\\ud800 to \\udfff without its pair)"
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")
_NO_MARKS: Final = bytes(set(range(256)) - set(b'[]{}"'))
_LONE_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
_SURROGATE_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
