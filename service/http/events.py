"""The handlers of `POST /events` and `POST /events/batch`: from a request to an event, from a result to a response."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Any, Final, TypeVar

import structlog

from service.contract import PREFIX
from service.contract.wire import event_id
from service.core.metrics import Telemetry
from service.core.problems import (
    FORBIDDEN_CALLER,
    INVALID_KEY,
    Problem,
)
from service.core.settings import Settings
from service.core.time_slice import TimeSlice
from service.events import cloudevents
from service.events.event import Event, parse_event, parse_key, parse_long_event, parse_traceparent
from service.events.strict_json import LONG_BYTES, in_thread, strictly
from service.http.batch import (
    long_member_of,
    member_of,
    parse_batch,
    parse_long_batch,
    read_batch,
    write_atomic,
    write_each,
)
from service.http.caller import Caller
from service.http.callers import Callers
from service.http.certificates import NONE as NO_CERTIFICATE
from service.http.certificates import Names
from service.http.encodings import Decoder, coding_of, decode
from service.http.headers import (
    JSON,
    LINES,
    REPEATABLE,
    UsedHeaders,
    check_message,
    check_no_key,
    essence,
    media_type,
    pick,
    raw_key_of,
    sent_at_ms,
    unsupported,
)
from service.http.prefer import NONE, parse_prefer
from service.http.rates import RatePending
from service.http.request import Bodies, Handler, PostRequest, StopSignal
from service.http.responder import Responder, check_room, rendered
from service.http.responses import (
    JSON_LINE,
    committed_lines,
    join_results,
    render_results,
    render_whole,
)
from service.http.single_event import SingleEventWriter
from service.identity.refusals import JwksPending
from service.pipeline.admission import Admission
from service.pipeline.key_checks import KeyAge
from service.pipeline.request import WriteResult

log = structlog.get_logger(__name__)

# Results to render in one step, which takes a fraction of a time slice, also if each is a different problem.
RENDERED_AT_ONCE: Final = 50

# Pieces of a body to decode on the event loop; a longer body is decoded in a thread.
PIECES_AT_ONCE: Final = 2

T = TypeVar("T")
# A parser of events; it is asynchronous for texts longer than LONG_BYTES.
Parse = Callable[[T], Event | Awaitable[Event]]
# What an endpoint does with a request that passed the checks of all requests.
AfterChecks = Callable[[PostRequest, UsedHeaders, Caller], None]
# Answers a request with the problem of an error, in the form of its API, and with more header lines.
Fail = Callable[[PostRequest, Exception, bytes], None]


class EventsEndpoint:
    """The handlers of `POST /events` and `POST /events/batch`."""

    def __init__(
        self,
        admission: Admission,
        settings: Settings,
        callers: Callers,
        telemetry: Telemetry,
        before: "EventsEndpoint | None" = None,
    ) -> None:
        """`before` is the endpoint of earlier rules, with which this one shares the bounds of the process."""
        self.admission = admission
        self._callers = callers
        self.telemetry = telemetry
        self.body_bytes_max = settings.body_bytes_max
        # Of all transports.
        self.bodies: Bodies = Bodies(settings.bodies_bytes_max) if before is None else before.bodies
        responder = Responder(telemetry, self._named)
        self._single = SingleEventWriter(admission, responder, committed_lines, settings.key_ttl_s)
        self._answer, self._fail = responder.answer, responder.fail
        self._or_fail, self._refuse = responder.or_fail, responder.refuse
        self.stopping: StopSignal = StopSignal() if before is None else before.stopping
        self._retention_s = settings.key_ttl_s
        self._why_loopback = _why_loopback_only(settings.rules, callers)
        self.routes: dict[bytes, Handler] = {
            b"/events": partial(self.take, self._post_event, self._fail),
            b"/events/batch": partial(self.take, self._post_batch, self._fail),
        }
        # By path, the media type whose bodies are read as they arrive: service.http.streaming.
        self.streamed: dict[bytes, str] = {b"/events/batch": LINES}

    def take(self, step: AfterChecks, fail: Fail, post: PostRequest) -> None:
        """Check what holds for every request (caller, address, body), then do its step; `fail` answers the problems."""
        try:
            found = post.found or pick(post.headers)
            caller = self.caller_of(post.client, found, host_needed=post.chunked, certificate=post.certificate)
            post.check_body(self.body_bytes_max)
            if caller.is_rated:
                post.more_lines = caller.rate_lines
                caller.admit()  # before the body is parsed: a caller over its rate costs little
            if b"content-encoding" in found and (coding := coding_of(found)):
                self._decode(post, coding, partial(step, post, found, caller), fail)
            else:
                step(post, found, caller)
        except (JwksPending, RatePending) as wanted:
            post.run_in_task(self._take_later(wanted, step, fail, post))
        except Exception as error:
            fail(post, error, b"")

    async def _take_later(
        self, wanted: JwksPending | RatePending, step: AfterChecks, fail: Fail, post: PostRequest
    ) -> None:
        """Take a request once the keys are read that its token may be signed with, or the caller has its next slice."""
        await wanted.fetched()
        self.take(step, fail, post)

    def _decode(self, post: PostRequest, coding: str, step: Callable[[], None], fail: Fail) -> None:
        """Decode a body, a long one in a thread, then do the step of its request. Raises Problem (400, 413, 503)."""
        decoder = Decoder(coding, self.body_bytes_max)
        decoder.feed(post.body)
        pieces: list[bytes] = []
        for piece in iter(decoder.next, None):
            pieces.append(piece)
            if len(pieces) == PIECES_AT_ONCE:
                post.run_in_task(self._decode_in_thread(post, decoder, pieces, step, fail))
                return
        post.decode(decode(decoder, pieces))
        step()

    async def _decode_in_thread(
        self, post: PostRequest, decoder: Decoder, pieces: list[bytes], step: Callable[[], None], fail: Fail
    ) -> None:
        try:
            post.decode(await in_thread(decode, decoder, pieces))
            step()
        except Exception as error:
            fail(post, error, b"")

    def caller_of(
        self, client: str | None, found: UsedHeaders, *, host_needed: bool, certificate: Names = NO_CERTIFICATE
    ) -> Caller:
        """Return the caller of a request from an address. Raises Problem (400, 401, 403, 501, 503) and JwksPending."""
        self._check_head(client, found, host_needed)
        return self._callers.of(found.get(b"authorization"), certificate)

    async def find_caller(
        self, client: str | None, found: UsedHeaders, *, host_needed: bool, certificate: Names = NO_CERTIFICATE
    ) -> Caller:
        """Return the caller as caller_of does; wait for the keys of an issuer if need be. Raises Problem."""
        self._check_head(client, found, host_needed)
        return await self._callers.find(found.get(b"authorization"), certificate)

    def _check_head(self, client: str | None, found: UsedHeaders, host_needed: bool) -> None:
        """Check what does not depend on the caller. Raises Problem (400, 403, 501).

        An address other than loopback gets 403 if the rules do not say who may write.
        """
        if self._why_loopback and client is not None and not _is_loopback(client):
            raise Problem(FORBIDDEN_CALLER, self._why_loopback)
        if b"host" not in found or b"transfer-encoding" in found:
            check_message(found, host_needed)  # HTTP/1.0 has neither

    def _post_event(self, post: PostRequest, found: UsedHeaders, caller: Caller) -> None:
        """Parse the event of a `POST /events`, or its batch of CloudEvents, and write it. Raises Problem."""
        if overload := self.admission.overload:
            self._refuse(post, overload, self.admission.load_shedder)
            return
        traceparent = parse_traceparent(found.get(b"traceparent"))
        key, scope = raw_key_of(found), caller.scope
        content_type = found.get(b"content-type")
        event: Event | Awaitable[Event]
        if b"ce-specversion" in found and essence(content_type) not in cloudevents.WHOLE:
            event = cloudevents.from_binary(post.headers, post.body, key, traceparent, scope)
        else:
            kind = JSON if content_type == JSON else media_type(content_type)
            if kind == cloudevents.BATCHED:
                post.run_in_task(self._or_fail(post, self._write_cloudevents(post, key, traceparent, caller)))
                return
            event = _parse(kind, post.body, key, traceparent, scope)
        if isinstance(event, Event):
            self._write_event(post, found, caller, event)
        else:
            post.run_in_task(self._or_fail(post, self._write_long(post, found, caller, event)))

    async def _write_long(self, post: PostRequest, found: UsedHeaders, caller: Caller, event: Awaitable[Event]) -> None:
        """Write an event whose JSON is checked in a thread. Raises Problem."""
        self._write_event(post, found, caller, await event)

    def _write_event(self, post: PostRequest, found: UsedHeaders, caller: Caller, event: Event) -> None:
        """Check the caller's topics and rate, then submit the event, after a look-up if needed. Raises Problem."""
        caller.check(event.topic)
        caller.spend(1, post.size)
        sender, preference = caller.sender, parse_prefer(found[b"prefer"]) if b"prefer" in found else NONE
        if b"repeatability-request-id" in found or b"repeatability-first-sent" in found:
            sender = sender._replace(age=KeyAge(sent_ms=sent_at_ms(found)))
            preference = preference._replace(repeatable=REPEATABLE)
        self._single.write(post, event, sender, preference)

    def _post_batch(self, post: PostRequest, found: UsedHeaders, caller: Caller) -> None:
        """Write the batch of a `POST /events/batch` in a task. Raises Problem (415)."""
        kind = media_type(found.get(b"content-type"))
        traceparent = parse_traceparent(found.get(b"traceparent"))
        if kind == JSON:
            post.run_in_task(self._or_fail(post, self._write_batch(post, found, traceparent, caller)))
        else:
            raise unsupported(JSON, LINES)

    async def _write_batch(
        self, post: PostRequest, found: UsedHeaders, traceparent: bytes | None, caller: Caller
    ) -> None:
        """Write a JSON batch: atomic (201), or each event by itself (207). Raises Problem."""
        if events := await read_batch(post.body, caller.scope, traceparent):
            check_no_key(found)
            await self._write_each(post, events, _as_it_is, caller)
            return
        batch = await parse_long_batch(post.body) if post.size > LONG_BYTES else parse_batch(post.body)
        if not batch.atomic:
            check_no_key(found)
            parse = by_length(member_of, long_member_of, traceparent=traceparent, scope=caller.scope)
            await self._write_each(post, batch.events, parse, caller)
            return
        key, sent_ms = parse_key(raw_key_of(found)), sent_at_ms(found)
        caller.spend(len(batch.events) or 1, post.size)
        id, answer = await write_atomic(self.admission, batch, key, post.arrived, traceparent, caller, sent_ms)
        if isinstance(answer, Problem):
            raise answer
        body = render_whole(id, answer)
        check_room(post, len(body))
        lines = committed_lines(key, answer, self._retention_s)
        if b"repeatability-request-id" in found or sent_ms is not None:
            lines += REPEATABLE
        self._answer(post, 201, lines, body)

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
        self._answer(post, 207, JSON_LINE, join_results(await rendered(post, steps, render_results)))

    def _named(self, post: PostRequest) -> dict[str, str]:
        """Return the log fields of a request: its key, and the id of the key in the caller's scope."""
        try:
            found = post.found or pick(post.headers)
            key = parse_key(raw_key_of(found))
            scope = self._callers.of(found.get(b"authorization"), post.certificate).scope
        except Problem:  # no key that is valid, or no caller that is known
            return {}
        return {"key": key, "id": event_id(key, scope).hex()}


def _why_loopback_only(rules_path: str, callers: Callers) -> str:
    """Say why only clients on this machine may write or list topics, and the remedy; "" if the rules say who may."""
    if not rules_path:
        return f"{PREFIX}RULES is not set, so only callers on this machine may write: set it"
    if callers.are_missing:
        return (
            "the rules name sources and no callers, so only callers on this machine may write: "
            "add [[callers]] or [[issuers]]"
        )
    return ""


@lru_cache(maxsize=256)  # the loopback has 16 million addresses
def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a server may take the address from X-Forwarded-For, which a client can forge
        return False


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


def by_length(of: Callable[..., Event], of_long: Callable[..., Awaitable[Event]], **arguments: Any) -> Parse[Any]:
    """Return a parser that uses `of_long` for texts longer than LONG_BYTES, and `of` for others."""
    of, of_long = partial(of, **arguments), partial(of_long, **arguments)
    return lambda text: of_long(text) if len(text) > LONG_BYTES else of(text)


async def in_steps(groups: AsyncIterator[list[WriteResult]]) -> AsyncIterator[Sequence[WriteResult]]:
    """Yield results to render in steps of RENDERED_AT_ONCE, in time slices."""
    time_slice = TimeSlice()
    async for group in groups:
        for start in range(0, len(group), RENDERED_AT_ONCE):
            if time_slice.is_over:
                await time_slice.next()
            yield group[start : start + RENDERED_AT_ONCE]
