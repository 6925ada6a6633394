"""The handlers of `POST /events` and `POST /events/batch`: from a request to an event, from a result to a response."""

from collections.abc import Awaitable, Coroutine, Sequence
from functools import partial
from typing import Any

from service.contract.wire.ids import event_id
from service.core.metrics import Telemetry
from service.core.problems import INVALID_KEY, Problem
from service.events import cloudevents
from service.events.event import Event, parse_event, parse_key, parse_long_event, parse_traceparent
from service.events.strict_json import LONG_BYTES, strictly
from service.http.batch import (
    Parse,
    T,
    by_length,
    long_member_of,
    member_of,
    parse_batch,
    parse_long_batch,
    read_batch,
    write_atomic,
    write_each,
)
from service.http.caller import Caller
from service.http.headers import (
    JSON,
    LINES,
    REPEATABLE,
    UsedHeaders,
    check_no_key,
    essence,
    media_type,
    pick,
    raw_key_of,
    sent_at_ms,
    unsupported,
)
from service.http.prefer import NO_PREFERENCE, parse_prefer
from service.http.request import Handler, PostRequest
from service.http.request_guard import RequestGuard
from service.http.responder import Responder, check_room, in_steps, rendered
from service.http.responses import JSON_LINE, committed_lines, join_results, render_atomic, render_results
from service.http.single_event import SingleEventWriter
from service.pipeline.admission import Admission
from service.pipeline.key_checks import KeyAge


class EventsEndpoint:
    """The handlers of `POST /events` and `POST /events/batch`, for requests that passed the guard."""

    def __init__(self, guard: RequestGuard, admission: Admission, telemetry: Telemetry, retention_s: int) -> None:
        """`retention_s` is the retention, in seconds, of keys for which no rule sets one."""
        self.guard = guard
        self.admission = admission
        self.telemetry = telemetry
        self._responder = Responder(telemetry, self._named)
        self._single = SingleEventWriter(admission, self._responder, committed_lines, retention_s)
        self._retention_s = retention_s
        self.routes: dict[bytes, Handler] = {
            b"/events": partial(guard.take, self._post_event, self._responder.fail),
            b"/events/batch": partial(guard.take, self._post_batch, self._responder.fail),
        }
        # By path, the media type whose bodies are read as they arrive: service.http.streaming.
        self.streamed: dict[bytes, str] = {b"/events/batch": LINES}

    def _post_event(self, post: PostRequest, used: UsedHeaders, caller: Caller) -> None:
        """Parse the event of a `POST /events`, or its batch of CloudEvents, and write it. Raises Problem."""
        if overload := self.admission.overload:
            self._responder.refuse(post, overload, self.admission.load_shedder)
            return
        traceparent = parse_traceparent(used.get(b"traceparent"))
        key, scope = raw_key_of(used), caller.scope
        content_type = used.get(b"content-type")
        event: Event | Awaitable[Event]
        if b"ce-specversion" in used and essence(content_type) not in cloudevents.WHOLE:
            event = cloudevents.from_binary(post.headers, post.body, key, traceparent, scope)
        else:
            kind = JSON if content_type == JSON else media_type(content_type)
            if kind == cloudevents.BATCHED:
                self._run(post, self._write_cloudevents(post, key, traceparent, caller))
                return
            event = _parse(kind, post.body, key, traceparent, scope)
        if isinstance(event, Event):
            self._write_event(post, used, caller, event)
        else:
            self._run(post, self._write_long(post, used, caller, event))

    def _run(self, post: PostRequest, work: Coroutine[Any, Any, None]) -> None:
        post.run_in_task(self._responder.or_fail(post, work))

    async def _write_long(self, post: PostRequest, used: UsedHeaders, caller: Caller, event: Awaitable[Event]) -> None:
        """Write an event whose JSON is checked in a thread. Raises Problem."""
        self._write_event(post, used, caller, await event)

    def _write_event(self, post: PostRequest, used: UsedHeaders, caller: Caller, event: Event) -> None:
        """Check the caller's topics and rate, then submit the event, after a look-up if needed. Raises Problem."""
        caller.check(event.topic)
        caller.spend(1, post.size)
        sender, preference = caller.sender, parse_prefer(used[b"prefer"]) if b"prefer" in used else NO_PREFERENCE
        if b"repeatability-request-id" in used or b"repeatability-first-sent" in used:
            sender = sender._replace(age=KeyAge(sent_ms=sent_at_ms(used)))
            preference = preference._replace(repeatable=REPEATABLE)
        self._single.write(post, event, sender, preference)

    def _post_batch(self, post: PostRequest, used: UsedHeaders, caller: Caller) -> None:
        """Write the batch of a `POST /events/batch` in a task. Raises Problem (415)."""
        kind = media_type(used.get(b"content-type"))
        traceparent = parse_traceparent(used.get(b"traceparent"))
        if kind == JSON:
            self._run(post, self._write_batch(post, used, traceparent, caller))
        else:
            raise unsupported(JSON, LINES)

    async def _write_batch(
        self, post: PostRequest, used: UsedHeaders, traceparent: bytes | None, caller: Caller
    ) -> None:
        """Write a JSON batch: atomic (201), or each event by itself (207). Raises Problem."""
        if events := await read_batch(post.body, caller.scope, traceparent):
            check_no_key(used)
            await self._write_each(post, events, _as_it_is, caller)
            return
        batch = await parse_long_batch(post.body) if post.size > LONG_BYTES else parse_batch(post.body)
        if not batch.atomic:
            check_no_key(used)
            parse = by_length(member_of, long_member_of, traceparent=traceparent, scope=caller.scope)
            await self._write_each(post, batch.events, parse, caller)
            return
        key, sent_ms = parse_key(raw_key_of(used)), sent_at_ms(used)
        caller.spend(len(batch.events) or 1, post.size)
        id, answer = await write_atomic(self.admission, batch, key, post.arrived, traceparent, caller, sent_ms)
        if isinstance(answer, Problem):
            raise answer
        body = render_atomic(id, answer)
        check_room(post, len(body))
        lines = committed_lines(key, answer, self._retention_s)
        if b"repeatability-request-id" in used or sent_ms is not None:
            lines += REPEATABLE
        self._responder.answer(post, 201, lines, body)

    async def _write_cloudevents(
        self, post: PostRequest, key: str | None, traceparent: bytes | None, caller: Caller
    ) -> None:
        """Write each event of a batch of CloudEvents by itself (207). Raises Problem."""
        if key is not None:
            raise Problem(INVALID_KEY, "Idempotency-Key: the key of each of several CloudEvents is its source and id")
        if post.size > LONG_BYTES:
            parts = await cloudevents.parse_long_batch(post.body)
        else:
            parts = cloudevents.parse_batch(post.body)
        of, of_long = cloudevents.from_structured, cloudevents.from_long_structured
        parse = by_length(of, of_long, key=None, traceparent=traceparent, scope=caller.scope)
        await self._write_each(post, parts, parse, caller)

    async def _write_each(self, post: PostRequest, parts: Sequence[T], parse: Parse[T], caller: Caller) -> None:
        """Write events independently; answer 207 with their results in the order of `parts`. Raises Problem (429)."""
        caller.spend(len(parts), post.size)
        steps = in_steps(write_each(self.admission, parts, parse, post.arrived, caller))
        self._responder.answer(post, 207, JSON_LINE, join_results(await rendered(post, steps, render_results)))

    def _named(self, post: PostRequest) -> dict[str, str]:
        """Return the log fields of a request: its key, and the id of the key in the caller's scope."""
        try:
            used = post.used or pick(post.headers)
            key = parse_key(raw_key_of(used))
            scope = self.guard.callers.of(used.get(b"authorization"), post.certificate).scope
        except Problem:  # no key that is valid, or no caller that is known
            return {}
        return {"key": key, "id": event_id(key, scope).hex()}


def _as_it_is(event: Event) -> Event:
    return event


def _parse(kind: str, body: bytes, key: str | None, traceparent: bytes | None, scope: str) -> Event | Awaitable[Event]:
    """Parse an event from JSON of this media type; the result is awaitable for a body longer than LONG_BYTES."""
    long = len(body) > LONG_BYTES
    if kind == JSON:
        return (parse_long_event if long else parse_event)(parse_key(key), body, traceparent, scope)
    if kind != cloudevents.STRUCTURED:
        raise unsupported(JSON, cloudevents.STRUCTURED, cloudevents.BATCHED)
    if long:
        return cloudevents.from_long_structured(body, key, traceparent, scope)
    return strictly(body, partial(cloudevents.from_structured, key=key, traceparent=traceparent, scope=scope))
