"""`POST /events/batch`: many events in one request, each for itself, or all of them or none."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from io import BytesIO
from itertools import islice
from typing import Final, TypeVar

import msgspec

from service.contract.wire import batch_fingerprint, event_id, member_id
from service.core.problems import INVALID_EVENT, MISSING_KEY, TOO_LARGE, Problem
from service.core.settings import GROUP_EVENT_BYTES_MAX, GROUP_LEDGER_BYTES_MAX
from service.events.event import (
    BATCH_EVENTS_MAX,
    ENTRY_BYTES,
    HEADERS_MAX,
    READER,
    Event,
    EventBody,
    check_count,
    check_key,
    check_text,
    cut_batch,
    decode,
    make_event,
)
from service.events.strict_json import LONG_BYTES, in_thread, strictly
from service.http.callers import ANYBODY, Caller
from service.pipeline.admission import Admission
from service.pipeline.request import BatchChunk, WriteResult

LINES: Final = "application/x-ndjson"
"""The media type of a batch with each event on a line of its own (newline-delimited JSON)."""
# Blank lines among them.
LINES_MAX: Final = 2 * BATCH_EVENTS_MAX
# The entry of the shortest topic's name.
ATOMIC_EVENTS_MAX: Final = GROUP_LEDGER_BYTES_MAX // (ENTRY_BYTES + 1)
# For so long events are made in one go; then whatever else waits for the loop has its turn.
SLICE_S: Final = 0.005
# Of a larger batch only so many events are made as one transaction holds: all of them would be its body once more.
READ_AT_ONCE_BYTES: Final = 1024 * 1024
# And they are made of so many bytes in one go, which takes a millisecond or two.
STEP_BYTES: Final = 64 * 1024


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a batch. Its events are decoded one by one: a bad one fails alone."""

    events: list[msgspec.Raw]
    atomic: bool = False


class MemberBody(EventBody, forbid_unknown_fields=True):
    """The JSON of one event in a batch."""

    idempotency_key: str | None = None


_decode_batch = msgspec.json.Decoder(BatchBody).decode
_decode_member = msgspec.json.Decoder(MemberBody).decode
T = TypeVar("T")


def parse_batch(body: bytes) -> BatchBody:
    """A batch with at least one event, which is not long. Raises Problem (400, 413)."""
    return strictly(body, _batch_of)


def _batch_of(body: bytes) -> BatchBody:
    batch = decode(_decode_batch, body)
    check_count(len(batch.events), "events")
    return batch


async def parse_long_batch(body: bytes) -> BatchBody:
    """As `parse_batch`, for a body of any length: it is checked in a thread."""
    frame, texts = await in_thread(cut_batch, body, "events")
    batch = decode(_decode_batch, frame)
    batch.events = texts or batch.events
    check_count(len(batch.events), "events")
    return batch


def parse_lines(body: bytes) -> list[bytes]:
    """The lines of newline-delimited JSON, but for blank ones. Raises Problem (400, 413)."""
    read = list(islice(BytesIO(body), LINES_MAX + 1))  # which copies nothing of what comes behind them
    if len(read) > LINES_MAX:
        raise Problem(TOO_LARGE, f"body: at most {LINES_MAX} lines are taken, blank ones too")
    lines = [line.removesuffix(b"\n") for line in read if not line.isspace()]
    check_count(len(lines), "body")
    return lines


# ------------------------------------------------------------------------------------------------ each for itself


async def read_batch(body: bytes, scope: str, traceparent: bytes | None) -> list[Event] | None:
    """The events of a batch that is not atomic, in steps; None where there is anything to look into."""
    if READER is None or len(body) > READ_AT_ONCE_BYTES:
        return None
    batch = READER.batch(body, scope, traceparent)
    while batch.read(STEP_BYTES):
        if batch.whole:
            return batch.events
        await asyncio.sleep(0)
    return None


def member_of(raw: bytes | msgspec.Raw, traceparent: bytes | None = None, scope: str = "") -> Event:
    """One event of a batch. Raises Problem (400, 413)."""
    fields = decode(_decode_member, raw)
    if not fields.idempotency_key:
        raise Problem(MISSING_KEY, "idempotency_key: give each event of a batch a key of its own")
    key = check_key(fields.idempotency_key, "idempotency_key")
    return make_event(key, event_id(key, scope), fields, traceparent)


async def long_member_of(raw: bytes | msgspec.Raw, traceparent: bytes | None = None, scope: str = "") -> Event:
    """As `member_of`, for one of any length, which need not be known to be JSON: it is checked in a thread."""
    await check_text(raw, b"headers", HEADERS_MAX)
    return member_of(raw, traceparent, scope)


def line_of(line: bytes, traceparent: bytes | None = None, scope: str = "") -> Event:
    """One event on a line of its own, which is not long. Raises Problem (400, 413)."""
    if READER is not None and (event := READER.member(line, scope, traceparent)) is not None:
        return event
    return strictly(line, partial(member_of, traceparent=traceparent, scope=scope))


async def write_each(
    admission: Admission,
    parts: Sequence[T],
    parse: Callable[[T], Event | Awaitable[Event]],
    arrived: float,
    caller: Caller = ANYBODY,
) -> AsyncIterator[list[WriteResult]]:
    """Write the events of a batch, each under a key of its own; their answers in their order, as they come to be known.

    They go to Kafka in chunks, one after the other: what one transaction holds goes together, which keeps the order of
    the batch. A key that comes again begins a new chunk, and so finds what became of the first. An event is checked
    when its chunk is made up: the first answers need not wait for the last one.
    """
    answers: list[WriteResult | None] = [None] * len(parts)
    told = 0
    chunk, places = BatchChunk(admission.events_max, admission.ledger_bytes_max), list[int]()

    async def write() -> None:
        for place, answer in zip(places, await admission.submit_chunk(chunk), strict=True):
            answers[place] = answer

    until = time.monotonic() + SLICE_S
    for place, part in enumerate(parts):
        if time.monotonic() > until:
            if known := _known(answers, told):
                told += len(known)
                yield known
            await asyncio.sleep(0)
            until = time.monotonic() + SLICE_S
        try:
            event = parse(part)
            if not isinstance(event, Event):  # it is long
                event = await event
            caller.check(event.topic)
            if not admission.check_now(event):
                # Each chunk has the time of a request; those before it may have had theirs.
                await admission.check(event, arrived, time.monotonic())
        except Problem as problem:
            answers[place] = problem.as_result()
            continue
        if not chunk.takes(event):
            await write()
            known = _known(answers, told)
            told += len(known)
            yield known
            chunk, places = BatchChunk(admission.events_max, admission.ledger_bytes_max), []
        chunk.add(event)
        places.append(place)
    if places:
        await write()
    yield _known(answers, told)


def _known(answers: Sequence[WriteResult | None], start: int) -> list[WriteResult]:
    """The answers from `start` on, up to the first that is still to come."""
    known: list[WriteResult] = []
    for answer in answers[start:]:
        if answer is None:
            break
        known.append(answer)
    return known


# -------------------------------------------------------------------------------------------------- all or none


async def write_atomic(
    admission: Admission,
    batch: BatchBody,
    key: str,
    arrived: float,
    traceparent: bytes | None = None,
    caller: Caller = ANYBODY,
) -> tuple[bytes, WriteResult]:
    """Write a batch in one transaction or not at all; the id of the whole, and its answer.

    Raises Problem for what is refused before the key is touched, also where no transaction could hold it.
    """
    there = len(batch.events)
    if there > ATOMIC_EVENTS_MAX:
        raise Problem(TOO_LARGE, f"events: one transaction holds at most {ATOMIC_EVENTS_MAX}; there are {there}")
    events: list[Event] = []
    until = time.monotonic() + SLICE_S
    for index, raw in enumerate(batch.events):
        if time.monotonic() > until:
            await asyncio.sleep(0)
            until = time.monotonic() + SLICE_S
        if len(raw) > LONG_BYTES:
            await _check_long(index, raw)
        events.append(_member(key, index, raw, traceparent, caller))
    ledger_bytes = sum(event.entry_bytes for event in events)
    event_bytes = sum(event.size for event in events)
    if ledger_bytes > admission.ledger_bytes_max:
        most = int(len(events) * admission.ledger_bytes_max / ledger_bytes)
        raise Problem(TOO_LARGE, f"events: one transaction holds about {most} such events; there are {len(events)}")
    if event_bytes > GROUP_EVENT_BYTES_MAX:
        raise Problem(
            TOO_LARGE, f"events: they have {event_bytes} bytes; one transaction holds {GROUP_EVENT_BYTES_MAX}"
        )
    if len(events) > admission.events_max:
        raise Problem(TOO_LARGE, f"events: at most {admission.events_max} may wait here; there are {len(events)}")
    for index, event in enumerate(events):
        if index % 1_000 == 999:
            await asyncio.sleep(0)
        try:
            await admission.check(event, arrived)
        except Problem as problem:
            raise _of_member(index, problem) from None
    id = event_id(key, caller.scope)
    return id, await admission.submit_atomic(events, (id, batch_fingerprint(event.fp for event in events)), arrived)


async def _check_long(index: int, raw: msgspec.Raw) -> None:
    try:
        await check_text(raw, b"headers", HEADERS_MAX)
    except Problem as problem:
        raise _of_member(index, problem) from None


def _member(key: str, index: int, raw: msgspec.Raw, traceparent: bytes | None, caller: Caller) -> Event:
    try:
        fields = decode(_decode_member, raw)
        if fields.idempotency_key is not None:
            raise Problem(INVALID_EVENT, "idempotency_key: the whole batch has one key, in its Idempotency-Key header")
        event = make_event(key, member_id(key, index, caller.scope), fields, traceparent)
        caller.check(event.topic)
        return event
    except Problem as problem:
        raise _of_member(index, problem) from None


def _of_member(index: int, problem: Problem) -> Problem:
    return Problem(problem.kind, f"events[{index}].{problem.detail}", problem.retry_after_s)
