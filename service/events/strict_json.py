"""RFC 8259, strictly: what a body must be before anything of it is believed.

A value is passed on byte for byte, so whoever reads it must be able to trust it. And one body must not hold up
everybody else: what is long is checked in a thread, by service.native without Python's lock.
"""

import asyncio
import gc
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

import jiter

from service import native
from service.core.problems import DETAIL_CHARS_MAX, INVALID_JSON, TOO_LARGE, Problem

DEPTH_MAX: Final = 64
# What is made of a longer body may be millions of objects. The collector would look through them again and again while
# they come to be, for five times as long, and find nothing.
COLLECTED_BYTES: Final = 64 * 1024

# A longer body is checked in a thread: the event loop waits for a shorter one, a millisecond or two at most.
LONG_BYTES: Final = 64 * 1024
# What is wrong with a longer body is told by its kind and its place: jiter, which has more words for it, takes 20 ns a
# byte and holds Python's lock.
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
    fault = native.bodies.fault(body) if native.COMPILED else None
    if native.COMPILED and fault is None:
        return
    if fault is None or len(body) <= EXPLAINED_BYTES:
        _parse(body)
    if fault is not None:
        raise _problem_of(body, *fault)


def not_json(why: str) -> Problem:
    """400: the body is no JSON, or not the one that is taken."""
    return Problem(INVALID_JSON, f"body: {why}")


def _problem_of(body: bytes, fault: int, place: int, name: bytes) -> Problem:
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


def _parse(body: bytes) -> None:
    """The same in Python, by jiter: raises Problem (400). It takes no integer of more than 4,300 digits."""
    pausing = len(body) > COLLECTED_BYTES and gc.isenabled()
    if pausing:
        gc.disable()
    try:
        # A fraction stays the text that it is: to read 1e-320 as a number takes 7 µs, and a body may have many.
        jiter.from_json(
            body, allow_inf_nan=False, cache_mode="none", catch_duplicate_keys=True, float_mode="lossless-float"
        )
    except ValueError as error:
        raise _explained(body, str(error)) from None
    finally:
        if pausing:
            gc.enable()
    if _is_deep(body):
        raise not_json(TOO_DEEP)


def _explained(body: bytes, why: str) -> Problem:
    """What jiter has found, in our words where clients know those."""
    if body.startswith(_BOM):
        return not_json(BOM)
    if why.startswith("recursion limit exceeded"):
        return not_json(TOO_DEEP)
    if why.startswith("invalid unicode code point"):
        return not_json(f"is not UTF-8: {why}")
    if why.startswith(("lone leading surrogate", "unexpected end of hex escape")):
        return not_json(LONE_SURROGATE)
    if twice := _DUPLICATE.match(why):
        return _twice(twice[1])
    return not_json(f"is not JSON: {why}")


def _twice(name: str) -> Problem:
    return not_json(f"has the name {name[:DETAIL_CHARS_MAX]!r} twice in one object")


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


_DUPLICATE: Final = re.compile(r'Detected duplicate key "(.*)" at line \d+ column \d+', re.DOTALL)
TOO_DEEP: Final = f"is nested deeper than {DEPTH_MAX} levels"
_BOM: Final = b"\xef\xbb\xbf"
BOM: Final = "begins with a byte order mark: send UTF-8 without one"
LONE_SURROGATE: Final = "has a lone surrogate (\\ud800 to \\udfff without its pair)"
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")
_NO_MARKS: Final = bytes(set(range(256)) - set(b'[]{}"'))
