"""`POST /events/batch`: many events in one request, written independently, or atomically: all or none."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from service.contract.wire.ids import batch_fingerprint, event_id, member_id
from service.core.problems import INVALID_EVENT, MISSING_KEY, TOO_LARGE, Problem
from service.core.settings import GROUP_EVENT_BYTES_MAX, GROUP_LEDGER_BYTES_MAX
from service.core.time_slice import TimeSlice
from service.events.event import (
    ENTRY_BYTES,
    HEADERS_MAX,
    NONE_IS_PLAIN,
    READER,
    Event,
    EventBody,
    check_count,
    check_key,
    check_text,
    cut_batch,
    decode,
    invalid,
    is_plain,
    make_event,
)
from service.events.offsets import fingerprint_of, parse_offsets
from service.events.strict_json import LONG_BYTES, in_thread, strictly
from service.http.caller import ANYBODY, Caller
from service.kafka.group_offsets import GroupOffsets
from service.pipeline.admission import Admission
from service.pipeline.key_checks import KeyAge
from service.pipeline.request import CHUNK_EVENTS_MAX, WriteResult

# The events whose ledger entries fit into one transaction, if the name of their topic has one character.
ATOMIC_EVENTS_MAX: Final = GROUP_LEDGER_BYTES_MAX // (ENTRY_BYTES + 1)
# The events of a larger body are parsed chunk by chunk: all of them at once would take the memory of the body again.
READ_AT_ONCE_BYTES: Final = 1024 * 1024
# The bytes to parse in one step, which takes a fraction of a time slice.
STEP_BYTES: Final = 8 * 1024


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a batch. Its events are decoded one by one, so that a malformed event fails alone.

    `offsets`, of a consumer group, are committed with the events of an atomic batch.
    """

    events: list[msgspec.Raw]
    atomic: bool = False
    offsets: msgspec.Raw = msgspec.Raw()

    def check(self) -> None:
        """Check what the fields must have in common. Raises Problem (400, 413)."""
        if self.offsets and not self.atomic:
            raise invalid("offsets", 'they are committed with all events or with none: write "atomic": true')
        if self.events or not self.offsets:
            check_count(len(self.events), "events")


class MemberBody(EventBody, forbid_unknown_fields=True):
    """The JSON of one event in a batch."""

    idempotency_key: str | None = None


_decode_batch = msgspec.json.Decoder(BatchBody).decode
_decode_member = msgspec.json.Decoder(MemberBody).decode
T = TypeVar("T")
# A parser of events; it is asynchronous for texts longer than LONG_BYTES.
Parse = Callable[[T], Event | Awaitable[Event]]


def parse_batch(body: bytes) -> BatchBody:
    """Parse a batch of at least one event, or of offsets, from a body up to LONG_BYTES. Raises Problem (400, 413)."""
    return strictly(body, _batch_of)


def _batch_of(body: bytes) -> BatchBody:
    batch = decode(_decode_batch, body)
    batch.check()
    return batch


async def parse_long_batch(body: bytes) -> BatchBody:
    """Parse a batch from a body of any length, which a thread checks. Raises Problem (400, 413)."""
    frame, texts = await in_thread(cut_batch, body, "events")
    batch = decode(_decode_batch, frame)
    batch.events = texts or batch.events
    batch.check()
    return batch


# ------------------------------------------------------------------------------------------------ independent events


async def read_batch(body: bytes, scope: str, traceparent: bytes | None) -> list[Event] | None:
    """Parse the events of a plain batch that is not atomic, in steps; None if the body needs the full parser."""
    if READER is None or len(body) > READ_AT_ONCE_BYTES:
        return None
    batch = READER.batch(body, scope, traceparent)
    time_slice = TimeSlice()
    while batch.read(STEP_BYTES):
        if batch.whole:
            return batch.events
        if time_slice.is_over:
            await time_slice.next()
    return None


def member_of(raw: bytes | msgspec.Raw, traceparent: bytes | None = None, scope: str = "") -> Event:
    """Parse one event of a batch. Raises Problem (400, 413)."""
    fields = decode(_decode_member, raw)
    if not fields.idempotency_key:
        raise Problem(MISSING_KEY, "idempotency_key: give each event of a batch a key of its own")
    key = check_key(fields.idempotency_key, "idempotency_key")
    return make_event(key, event_id(key, scope), fields, traceparent)


async def long_member_of(raw: bytes | msgspec.Raw, traceparent: bytes | None = None, scope: str = "") -> Event:
    """Parse one event of any length, which a thread checks to be JSON. Raises Problem (400, 413)."""
    await check_text(raw, b"headers", HEADERS_MAX)
    return member_of(raw, traceparent, scope)


def by_length(of: Callable[..., Event], of_long: Callable[..., Awaitable[Event]], **arguments: Any) -> Parse[Any]:
    """Return a parser that uses `of_long` for texts longer than LONG_BYTES, and `of` for others."""
    of, of_long = partial(of, **arguments), partial(of_long, **arguments)
    return lambda text: of_long(text) if len(text) > LONG_BYTES else of(text)


async def write_each(
    admission: Admission,
    parts: Sequence[T],
    parse: Parse[T],
    arrived: float,
    caller: Caller = ANYBODY,
    fresh_key: str = "",
) -> AsyncIterator[list[WriteResult]]:
    """Write the events of a batch, each under its own key; yield results in the order of the events, as they are known.

    Events go to Kafka in chunks, one chunk after the other: a transaction holds a whole chunk, which keeps the order of
    the batch. A repeated key begins a new chunk, and so finds the result of its first event. Events are checked when
    their chunk is filled, so that the first results need not wait for the last event. `fresh_key` is the key of several
    events that was not old when their request began: a stream may last longer than its key is remembered.
    """
    # The look-ups for the events of a chunk have one request timeout together: earlier chunks may have used up theirs,
    # and while Kafka or Redis is silent, a timeout for each event would add up to hours.
    chunk, begun = admission.new_chunk(), time.monotonic()
    age = KeyAge(fresh_key)
    parsed = 0  # events of the chunk, with those that failed
    results: list[WriteResult | None] = []  # since the last yield; None for an event of the chunk
    topic, plain_bytes_max = "", NONE_IS_PLAIN  # of the last event
    time_slice = TimeSlice()
    for part in parts:
        if time_slice.is_over:
            if results and not chunk.events:
                yield _with_chunk(results, ())
                results = []
            await time_slice.next()
            topic = ""  # what is known of it may change meanwhile
        event: Event | None = None
        known: WriteResult | None = None  # of an event that is not to be written
        try:
            made = parse(part)
            event = made if isinstance(made, Event) else await made  # longer than LONG_BYTES
            if event.topic != topic:
                caller.check(event.topic)
                topic, plain_bytes_max = event.topic, admission.checks.plain_bytes_max(event.topic)
            if not is_plain(event, plain_bytes_max) and not admission.checks.check_now(event, age):
                event, known = await _looked_up(admission, event, arrived, begun, age)
        except Problem as problem:
            event, known = await _dead_letter_of(admission, event, problem, arrived, begun, caller, age)
        if not chunk.add(event) if event is not None else parsed >= CHUNK_EVENTS_MAX:
            yield _with_chunk(results, await admission.submit_chunk(chunk) if chunk.events else ())
            chunk, begun, parsed, results = admission.new_chunk(), time.monotonic(), 0, []
            if event is not None:
                chunk.add(event)
        results.append(known)
        parsed += 1
    yield _with_chunk(results, await admission.submit_chunk(chunk) if chunk.events else ())


async def _looked_up(
    admission: Admission, event: Event, arrived: float, begun: float, age: KeyAge
) -> tuple[Event | None, WriteResult | None]:
    """Check an event that needs a look-up; return it, or its result if it was written before. Raises Problem.

    `arrived`, `begun` and `age` are those of EventChecks.check.
    """
    written = await admission.checks.check(event, arrived, begun, age)
    if written is None:
        return event, None
    return None, admission.replay((event,), written, arrived).result()


async def _dead_letter_of(
    admission: Admission,
    event: Event | None,
    problem: Problem,
    arrived: float,
    begun: float,
    caller: Caller,
    age: KeyAge,
) -> tuple[Event | None, Problem | None]:
    """Return the dead letter of a refused event, or the problem that is its result; `event` is None if none was made.

    `arrived`, `begun` and `age` are those of EventChecks.check.
    """
    if event is None:
        return None, problem.as_result()
    try:
        return await admission.checks.dead_letter(event, problem, caller.scope, arrived, begun, age), None
    except Problem as failure:
        return None, failure.as_result()


def _with_chunk(results: Sequence[WriteResult | None], of_chunk: Sequence[WriteResult]) -> list[WriteResult]:
    """Put the results of a chunk's events, in their order, in the places of None."""
    rest = iter(of_chunk)
    return [next(rest) if result is None else result for result in results]


# -------------------------------------------------------------------------------------------------- all or none


async def write_atomic(
    admission: Admission,
    batch: BatchBody,
    key: str,
    arrived: float,
    traceparent: bytes | None = None,
    caller: Caller = ANYBODY,
    sent_ms: int | None = None,
) -> tuple[bytes, WriteResult]:
    """Write a batch in one transaction or not at all; return the id of the batch and its result.

    `sent_ms`: when its request was first sent, ms since the Unix epoch, if it tells. Raises Problem for a batch that is
    refused before its key is claimed, also if no transaction could hold it.
    """
    offsets = parse_offsets(batch.offsets) if batch.offsets else None
    if offsets is not None:
        caller.check_group(offsets.group)
    count = len(batch.events)
    if count > ATOMIC_EVENTS_MAX:
        raise Problem(TOO_LARGE, f"events: one transaction holds at most {ATOMIC_EVENTS_MAX}; there are {count}")
    events = await _parse_members(key, batch.events, traceparent, caller)
    _check_size(events, admission, offsets)
    id = event_id(key, caller.scope)
    of_offsets = [] if offsets is None else [fingerprint_of(offsets)]
    batch_pair = id, batch_fingerprint([*(event.fp for event in events), *of_offsets])
    if offsets is not None:
        await admission.checks.check_positions(offsets, arrived)
    try:
        await _check_topics(events, admission, arrived)
    except Problem as problem:
        written = await admission.checks.batch_written_before(events, batch_pair, problem)
        return id, admission.replay(events, written, arrived, batch_pair).result()
    return id, await admission.submit_atomic(key, events, batch_pair, arrived, sent_ms, offsets)


async def _parse_members(
    key: str, parts: Sequence[msgspec.Raw], traceparent: bytes | None, caller: Caller
) -> list[Event]:
    """Parse the events of an atomic batch. Raises Problem (400, 403, 413) for the first that is refused."""
    events: list[Event] = []
    time_slice = TimeSlice()
    for index, raw in enumerate(parts):
        if time_slice.is_over:
            await time_slice.next()
        if len(raw) > LONG_BYTES:
            await _check_long(index, raw)
        events.append(_member(key, index, raw, traceparent, caller))
    return events


def _check_size(events: Sequence[Event], admission: Admission, offsets: GroupOffsets | None) -> None:
    """Raise Problem (413) if no transaction could hold the batch, or the queue could never take its events."""
    ledger_bytes = sum(event.entry_bytes for event in events)
    event_bytes = sum(event.size for event in events)
    if offsets is not None and ledger_bytes + offsets.ledger_bytes > admission.ledger_bytes_max:
        raise Problem(TOO_LARGE, "offsets: one transaction does not hold so many positions beside the events")
    if ledger_bytes > admission.ledger_bytes_max:
        most = int(len(events) * admission.ledger_bytes_max / ledger_bytes)
        raise Problem(TOO_LARGE, f"events: one transaction holds about {most} such events; there are {len(events)}")
    if event_bytes > GROUP_EVENT_BYTES_MAX:
        raise Problem(
            TOO_LARGE, f"events: they have {event_bytes} bytes; one transaction holds {GROUP_EVENT_BYTES_MAX}"
        )
    if len(events) > admission.events_max:
        raise Problem(TOO_LARGE, f"events: at most {admission.events_max} may wait here; there are {len(events)}")


async def _check_topics(events: Sequence[Event], admission: Admission, arrived: float) -> None:
    """Raise Problem for the first event that its topic, or the topic's schema, does not take."""
    time_slice = TimeSlice()
    size = 0  # of events that a schema has encoded, which may be larger than they were
    for index, event in enumerate(events):
        if time_slice.is_over:
            await time_slice.next()
        try:
            await admission.checks.check_content(event, arrived)
        except Problem as problem:
            raise _of_member(index, problem) from None
        size += event.size
        if size > GROUP_EVENT_BYTES_MAX:
            most = GROUP_EVENT_BYTES_MAX
            raise Problem(TOO_LARGE, f"events: encoded, they have more bytes than one transaction holds: {most}")


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
