"""Checks that a body is strict JSON (RFC 8259).

Values are written to Kafka byte for byte, so their readers rely on this check. A long body is checked in a thread, by
service.native without the GIL, so that it does not delay other requests.
"""

import asyncio
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from typing import Final, ParamSpec, TypeVar

import jiter

from service import native
from service.core.problems import DETAIL_CHARS_MAX, INVALID_JSON, TOO_LARGE, Problem

DEPTH_MAX: Final = 64
# Garbage collection is off while a longer body is parsed: it would traverse up to millions of new objects repeatedly,
# and find nothing.
COLLECTED_BYTES: Final = 64 * 1024

# A longer body is checked in a thread; a shorter one takes two milliseconds at most.
LONG_BYTES: Final = 64 * 1024
# A fault of a longer body is described by its kind and offset only: jiter, which explains more, holds the GIL.
EXPLAINED_BYTES: Final = 16 * 1024

# The niceness of the thread for long bodies: where CPUs are scarce, the event loop and what it waits for come first.
_NICENESS: Final = 10


def _give_way() -> None:
    """Lower the priority of this thread. Linux has one for each thread, other systems for the whole process only."""
    if sys.platform == "linux":
        os.nice(_NICENESS)


# One thread, so that many long bodies use one core.
_THREAD: Final = ThreadPoolExecutor(1, "long-json", initializer=_give_way)

T = TypeVar("T")
P = ParamSpec("P")


class Fault(IntEnum):
    """The kinds of faults that service.native finds (strict_json.pxi)."""

    NOT_JSON = 0
    NOT_UTF8 = 1
    TOO_DEEP = 2
    NAMED_TWICE = 3
    LONE_SURROGATE = 4


def strictly(body: bytes, parse: Callable[[bytes], T]) -> T:
    """Parse an unchecked body by `parse`, then check it. Raises Problem; that of invalid JSON wins, except over 413."""
    try:
        parsed = parse(body)
    except Problem as problem:
        if problem.kind is not TOO_LARGE:
            check_json(body)
        raise
    check_json(body)
    return parsed


async def in_thread(check: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
    """Run a check of a long body in the thread for long bodies."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, partial(check, *arguments, **more))


def check_json(body: bytes) -> None:
    """Check for UTF-8 without BOM, NaN, duplicate names, lone surrogates and over 64 levels. Raises Problem (400)."""
    fault = native.bodies.fault(body) if native.COMPILED else None
    if native.COMPILED and fault is None:
        return
    if fault is None or len(body) <= EXPLAINED_BYTES:
        _parse(body)
    if fault is not None:
        raise _problem_of(body, *fault)


def not_json(why: str) -> Problem:
    """Make the problem (400) of a body that is not JSON, or not as strict as demanded."""
    return Problem(INVALID_JSON, f"body: {why}")


def _problem_of(body: bytes, fault: int, offset: int, name: bytes) -> Problem:
    """Describe a fault that service.native has found at this offset; `name` is a duplicate name."""
    match fault:
        case Fault.NOT_JSON if body.startswith(_BOM):
            return not_json(BOM)
        case Fault.NOT_UTF8:
            return not_json(f"is not UTF-8 (byte {offset})")
        case Fault.TOO_DEEP:
            return not_json(TOO_DEEP)
        case Fault.NAMED_TWICE:
            return _duplicate_name(name.decode(errors="replace"))
        case Fault.LONE_SURROGATE:
            return not_json(LONE_SURROGATE)
    return not_json(f"is not JSON (byte {offset})")


@contextmanager
def without_collections() -> Iterator[None]:
    """Turn garbage collection off: each one would traverse all of a long value that is being made."""
    pausing = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if pausing:
            gc.enable()


def _parse(body: bytes) -> None:
    """Check a body by jiter, which refuses integers of more than 4,300 digits. Raises Problem (400)."""
    try:
        with without_collections() if len(body) > COLLECTED_BYTES else nullcontext():
            # Fractions stay text: converting one like 1e-320 is slow.
            jiter.from_json(
                body, allow_inf_nan=False, cache_mode="none", catch_duplicate_keys=True, float_mode="lossless-float"
            )
    except ValueError as error:
        raise _explained(body, str(error)) from None
    if _is_deep(body):
        raise not_json(TOO_DEEP)


def _explained(body: bytes, why: str) -> Problem:
    """Describe an error of jiter, by the same texts as `_problem_of` where it has one."""
    if body.startswith(_BOM):
        return not_json(BOM)
    if why.startswith("recursion limit exceeded"):
        return not_json(TOO_DEEP)
    if why.startswith("invalid unicode code point"):
        return not_json(f"is not UTF-8: {why}")
    if why.startswith(("lone leading surrogate", "unexpected end of hex escape")):
        return not_json(LONE_SURROGATE)
    if duplicate := _DUPLICATE.match(why):
        return _duplicate_name(duplicate[1])
    return not_json(f"is not JSON: {why}")


def _duplicate_name(name: str) -> Problem:
    return not_json(f"has the name {name[:DETAIL_CHARS_MAX]!r} twice in one object")


def _is_deep(body: bytes) -> bool:
    """Whether a body that is JSON is nested deeper than DEPTH_MAX."""
    if body.count(b"{") + body.count(b"[") <= DEPTH_MAX:
        return False
    if b"\\" in body:  # drop escaped backslashes, then escaped quotes
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = body.translate(_ONE_KIND, _NO_MARKS)
    brackets = b"".join(marks.replace(b'""', b"").split(b'"')[::2])  # outside of strings
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
