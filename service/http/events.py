"""`POST /events` and its batch: headers read once, a request handed to the path, its answer written from bytes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Any, Final, TypeVar

import structlog

from service.contract import PREFIX
from service.contract.wire import event_id
from service.core.metrics import Telemetry
from service.core.problems import (
    FORBIDDEN_CALLER,
    INTERNAL,
    INVALID_KEY,
    NOT_WRITTEN,
    TOO_LARGE,
    UNSUPPORTED_TYPE,
    Problem,
)
from service.core.settings import Settings
from service.events import cloudevents
from service.events.event import Event, parse_event, parse_key, parse_long_event, parse_traceparent
from service.events.strict_json import LONG_BYTES, strictly
from service.http.batch import (
    LINES,
    line_of,
    long_member_of,
    member_of,
    parse_batch,
    parse_lines,
    parse_long_batch,
    read_batch,
    write_atomic,
    write_each,
)
from service.http.callers import Caller, Callers
from service.http.headers import JSON, Found, check_message, essence, is_coded, media_type, pick, unsupported
from service.http.prefer import Preference, parse_prefer
from service.http.request import Bodies, Handler, PostRequest
from service.http.responses import (
    JSON_LINE,
    committed_lines,
    echo_of,
    join_results,
    lines_of,
    location_of,
    render_place,
    render_problem,
    render_result,
    render_whole,
)
from service.pipeline.admission import Admission
from service.pipeline.request import WriteResult

log = structlog.get_logger(__name__)

# It tells this 415 from the one of a media type (RFC 9110, section 12.5.3).
_ONLY_UNCODED: Final = b"accept-encoding: identity\r\n"
# Answers that are rendered in one go, which takes some milliseconds where each is another problem.
RENDERED_AT_ONCE: Final = 250

T = TypeVar("T")
# Of an event, where it is long in a while.
Parse = Callable[[T], Event | Awaitable[Event]]


class EventsEndpoint:
    """The handlers of `POST /events` and `POST /events/batch`."""

    def __init__(
        self, admission: Callable[[], Admission], settings: Settings, callers: Callers, telemetry: Telemetry
    ) -> None:
        self._admission = admission
        self._callers = callers
        self._telemetry = telemetry
        self.body_bytes_max = settings.body_bytes_max
        self.bodies = Bodies(settings.bodies_bytes_max)  # whichever transport reads them
        self._retention_s = settings.key_ttl_s
        self._loopback_only = not settings.rules
        self.routes: dict[bytes, Handler] = {
            b"/events": partial(self._take, self._post_event),
            b"/events/batch": partial(self._take, self._post_batch),
        }

    def _take(self, step: Callable[[PostRequest, Found, Caller], None], post: PostRequest) -> None:
        try:
            self._check_address(post.client)
            found = post.found or pick(post.headers)
            if b"host" not in found or b"transfer-encoding" in found:
                check_message(found, host_needed=post.chunked)  # HTTP/1.0 has neither
            caller = self._callers.of(found.get(b"authorization"))
            if post.at_capacity:
                raise Problem(NOT_WRITTEN, "body: too many large ones are under way: send it again a little later")
            if post.size > self.body_bytes_max:
                raise Problem(TOO_LARGE, f"body: at most {self.body_bytes_max} bytes are taken")
            if b"content-encoding" in found and is_coded(found[b"content-encoding"]):
                problem = Problem(UNSUPPORTED_TYPE, "Content-Encoding: send the body as it is, without this header")
                self._fail(post, problem, _ONLY_UNCODED)
                return
            caller.spend(0, post.arrived)  # who has used up its rate costs nobody the reading of its body
            step(post, found, caller)
        except Exception as error:
            self._fail(post, error)

    def _check_address(self, client: str | None) -> None:
        """Without rules nobody has said who may write: only this machine may."""
        if self._loopback_only and client is not None and not _is_loopback(client):
            raise Problem(
                FORBIDDEN_CALLER, f"{PREFIX}RULES is not set, so only callers on this machine may write: set it"
            )

    def _post_event(self, post: PostRequest, found: Found, caller: Caller) -> None:
        if overload := self._admission().overload:
            post.drop_body()  # it waits without its body
            self._admission().load_shedder.refuse(post.arrived, partial(self._fail, post, overload))
            return
        traceparent = parse_traceparent(found.get(b"traceparent"))
        key, scope = found.get(b"idempotency-key"), caller.scope
        content_type = found.get(b"content-type")
        event: Event | Awaitable[Event]
        if b"ce-specversion" in found and essence(content_type) not in cloudevents.WHOLE:
            event = cloudevents.from_binary(post.headers, post.body, key, traceparent, scope)
        else:
            kind = media_type(content_type)
            if kind == cloudevents.BATCHED:
                post.apart(self._or_fail(post, self._write_cloudevents(post, key, traceparent, caller)))
                return
            event = _parse(kind, post.body, key, traceparent, scope)
        if isinstance(event, Event):
            self._write_event(post, found, caller, event)
        else:
            post.apart(self._or_fail(post, self._write_long(post, found, caller, event)))

    async def _write_long(self, post: PostRequest, found: Found, caller: Caller, event: Awaitable[Event]) -> None:
        self._write_event(post, found, caller, await event)

    def _write_event(self, post: PostRequest, found: Found, caller: Caller, event: Event) -> None:
        caller.check(event.topic)
        caller.spend(1, post.arrived)
        preference = parse_prefer(found.get(b"prefer"))
        if self._admission().check_now(event):
            self._submit(post, event, preference)
        else:
            post.apart(self._or_fail(post, self._look_up_first(post, event, preference)))

    async def _look_up_first(self, post: PostRequest, event: Event, preference: Preference) -> None:
        await self._admission().check(event, post.arrived)
        self._submit(post, event, preference)

    def _submit(self, post: PostRequest, event: Event, preference: Preference) -> None:
        accepted: asyncio.Future[None] | None = None
        if preference.respond_async:
            accepted = asyncio.get_running_loop().create_future()
            accepted.add_done_callback(partial(self._tell_accepted, post, event))
        result = self._admission().submit(event, post.arrived, preference.wait_s, accepted)
        result.add_done_callback(partial(self._tell_event, post, event.key, preference.applied))

    def _post_batch(self, post: PostRequest, found: Found, caller: Caller) -> None:
        kind = media_type(found.get(b"content-type"))
        traceparent = parse_traceparent(found.get(b"traceparent"))
        if kind == JSON:
            key = found.get(b"idempotency-key")
            post.apart(self._or_fail(post, self._write_batch(post, key, traceparent, caller)))
        elif kind == LINES:
            post.apart(self._or_fail(post, self._write_lines(post, traceparent, caller)))
        else:
            raise unsupported(JSON, LINES)

    async def _write_batch(
        self, post: PostRequest, raw_key: str | None, traceparent: bytes | None, caller: Caller
    ) -> None:
        if events := await read_batch(post.body, caller.scope, traceparent):
            await self._write_each(post, events, _as_it_is, caller)
            return
        batch = await parse_long_batch(post.body) if post.size > LONG_BYTES else parse_batch(post.body)
        if not batch.atomic:
            parse = _by_length(member_of, long_member_of, traceparent=traceparent, scope=caller.scope)
            await self._write_each(post, batch.events, parse, caller)
            return
        key = parse_key(raw_key)
        caller.spend(len(batch.events), post.arrived)
        id, answer = await write_atomic(self._admission(), batch, key, post.arrived, traceparent, caller)
        if isinstance(answer, Problem):
            raise answer
        self._answer(post, 201, committed_lines(key, answer, self._retention_s), render_whole(id, answer))

    async def _write_cloudevents(
        self, post: PostRequest, key: str | None, traceparent: bytes | None, caller: Caller
    ) -> None:
        if key is not None:
            raise Problem(INVALID_KEY, "Idempotency-Key: the key of each of several CloudEvents is its source and id")
        if post.size > LONG_BYTES:
            parts = await cloudevents.parse_long_batch(post.body)
        else:
            parts = cloudevents.parse_batch(post.body)
        of, of_long = cloudevents.from_structured, cloudevents.from_long_structured
        parse = _by_length(of, of_long, key=None, traceparent=traceparent, scope=caller.scope)
        await self._write_each(post, parts, parse, caller)

    async def _write_each(self, post: PostRequest, parts: Sequence[T], parse: Parse[T], caller: Caller) -> None:
        told = self._told_of_each(post, parts, parse, caller)
        results = [result async for some in told for result in some]
        self._answer(post, 207, JSON_LINE, join_results(results))

    async def _write_lines(self, post: PostRequest, traceparent: bytes | None, caller: Caller) -> None:
        """Answers go out as they come to be known, a line each, in the order of the events."""
        parse = _by_length(line_of, long_member_of, traceparent=traceparent, scope=caller.scope)
        told = self._told_of_each(post, parse_lines(post.body), parse, caller)
        self._telemetry.requested(207, "")
        stream = post.stream(207, b"content-type: %b\r\n" % LINES.encode())
        try:
            async for some in told:
                stream.write(b"".join(b"%b\n" % result.encode() for result in some))
        except Exception:  # the status is sent: what can be told is that the answer is not whole
            log.exception("request failed")
            stream.cut()
            return
        stream.end()

    def _told_of_each(
        self, post: PostRequest, parts: Sequence[T], parse: Parse[T], caller: Caller
    ) -> AsyncIterator[list[str]]:
        """Write events of one caller, each for itself; what is told of them, in their order. Raises Problem (429)."""
        caller.spend(len(parts), post.arrived)
        return _rendered(write_each(self._admission(), parts, parse, post.arrived, caller))

    def _tell_accepted(self, post: PostRequest, event: Event, _: asyncio.Future[None]) -> None:
        """The claim stands: a client that prefers so is answered now, and asks for the outcome by the key."""
        lines = b"%blocation: %b\r\nidempotency-key: %b\r\npreference-applied: respond-async\r\n"
        lines %= JSON_LINE, location_of(event.key), echo_of(event.key)
        self._answer(post, 202, lines, b'{"id":"%b","state":"in_progress"}' % event.id.hex().encode())

    def _tell_event(self, post: PostRequest, key: str, applied: bytes, result: asyncio.Future[WriteResult]) -> None:
        if post.response_complete:  # 202 was said of it
            return
        try:
            answer = result.result()
            if isinstance(answer, Problem):
                self._fail(post, answer, applied)
            else:
                lines = committed_lines(key, answer, self._retention_s) + applied
                self._answer(post, 201, lines, render_place(answer.deliveries[0]))
        except Exception as error:
            self._fail(post, error)

    async def _or_fail(self, post: PostRequest, work: Coroutine[Any, Any, None]) -> None:
        """Do the work of a request; what it raises is its answer."""
        try:
            await work
        except Exception as error:
            self._fail(post, error)

    def _fail(self, post: PostRequest, error: Exception, more: bytes = b"") -> None:
        """Answer with a problem, and `more` lines of headers.

        Anything else than a Problem is a bug, and nobody knows what became of the event. It ends the connection, also
        where the bug is in the answering itself: a client must not wait for an answer that will never come.
        """
        if not isinstance(error, Problem):
            log.error("request failed", **self._named(post), exc_info=error)
            error = Problem(INTERNAL, "send it again, with the same key")
            post.keep_alive = False
            if post.response_complete:
                post.cut()
                return
        status, headers, body = render_problem(error)
        self._answer(post, status, lines_of(headers) + more, body, error.kind.code)

    def _named(self, post: PostRequest) -> dict[str, str]:
        """How a line of the log names a request: by its key, and the id of that among its caller's."""
        try:
            found = post.found or pick(post.headers)
            key, scope = parse_key(found.get(b"idempotency-key")), self._callers.of(found.get(b"authorization")).scope
        except Problem:  # it has none, or several with a key each
            return {}
        return {"key": key, "id": event_id(key, scope).hex()}

    def _answer(self, post: PostRequest, status: int, lines: bytes, body: bytes, code: str = "") -> None:
        self._telemetry.requested(status, code)
        post.answer(status, lines, body)


@lru_cache(maxsize=256)  # the loopback has 16 million addresses
def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a server may have it from a header (X-Forwarded-For), whoever wrote that
        return False


def _as_it_is(event: Event) -> Event:
    return event


def _parse(kind: str, body: bytes, key: str | None, traceparent: bytes | None, scope: str) -> Event | Awaitable[Event]:
    """An event from JSON of this media type."""
    long = len(body) > LONG_BYTES
    if kind == JSON:
        return (parse_long_event if long else parse_event)(parse_key(key), body, traceparent, scope)
    if kind != cloudevents.STRUCTURED:
        raise unsupported(JSON, cloudevents.STRUCTURED, cloudevents.BATCHED)
    if long:
        return cloudevents.from_long_structured(body, key, traceparent, scope)
    return strictly(body, partial(cloudevents.from_structured, key=key, traceparent=traceparent, scope=scope))


def _by_length(of: Callable[..., Event], of_long: Callable[..., Awaitable[Event]], **arguments: Any) -> Parse[Any]:
    """The one for short texts, and the other for long ones."""
    of, of_long = partial(of, **arguments), partial(of_long, **arguments)
    return lambda text: of_long(text) if len(text) > LONG_BYTES else of(text)


async def _rendered(told: AsyncIterator[list[WriteResult]]) -> AsyncIterator[list[str]]:
    """Answers as the text of results, so many at once that others have their turn in between."""
    async for some in told:
        for start in range(0, len(some), RENDERED_AT_ONCE):
            if len(some) > RENDERED_AT_ONCE:
                await asyncio.sleep(0)
            yield [render_result(answer) for answer in some[start : start + RENDERED_AT_ONCE]]
