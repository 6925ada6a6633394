"""`POST /events` and its batch: headers read once, a request handed to the path, its answer written from bytes."""

import json
from collections.abc import Callable, Coroutine, Iterable
from email.utils import formatdate
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import quote

import structlog

from service.batch import parse_batch, write_atomic, write_each
from service.errors import FORBIDDEN_CALLER, INTERNAL, INVALID_KEY, TOO_LARGE, UNSUPPORTED_TYPE, Problem
from service.event import Event, parse_event, parse_key, parse_traceparent
from service.http_posts import Handler, Post
from service.intake import Intake
from service.prefer import Preference, parse_prefer
from service.request import Answer, Committed, Placed
from service.settings import Settings
from service.shared import PREFIX
from service.telemetry import Telemetry

log = structlog.get_logger(__name__)

Headers = list[tuple[bytes, bytes]]

PROBLEM_TYPE: Final = b"application/problem+json"

Found = dict[bytes, str]  # the headers that matter, by lower-case name


class EventsEndpoint:
    """The handlers of `POST /events` and `POST /events/batch`."""

    def __init__(self, intake: Callable[[], Intake], settings: Settings, telemetry: Telemetry) -> None:
        self._intake = intake
        self._telemetry = telemetry
        self._body_bytes_max = settings.body_bytes_max
        self._retention_s = settings.key_ttl_s
        self._loopback_only = not settings.rules
        self._loopback: set[str] = set()  # addresses that were seen to be of the loopback: 127.0.0.1 and ::1
        self.routes: dict[bytes, Handler] = {
            b"/events": partial(self._take, self._post_event),
            b"/events/batch": partial(self._take, self._post_batch),
        }

    def _take(self, step: Callable[[Post, Found], None], post: Post) -> None:
        try:
            self._check_caller(post.client)
            found = pick(post.headers)
            if post.size > self._body_bytes_max:
                raise Problem(TOO_LARGE, f"body: at most {self._body_bytes_max} bytes are taken")
            check_type(found.get(b"content-type"))
            step(post, found)
        except Exception as error:
            self._fail(post, error)

    def _check_caller(self, client: str | None) -> None:
        """Without rules nobody has said who may write: only this machine may."""
        if self._loopback_only and client is not None and client not in self._loopback:
            if not ip_address(client).is_loopback:
                raise Problem(
                    FORBIDDEN_CALLER, f"{PREFIX}RULES is not set, so only callers on this machine may write: set it"
                )
            self._loopback.add(client)

    def _post_event(self, post: Post, found: Found) -> None:
        key = parse_key(found.get(b"idempotency-key"))
        event = parse_event(key, post.body, parse_traceparent(found.get(b"traceparent")))
        preference = parse_prefer(found.get(b"prefer"))
        if self._intake().check_now(event):
            self._submit(post, event, preference)
        else:
            post.apart(self._or_fail(post, self._look_up_first(post, event, preference)))

    async def _look_up_first(self, post: Post, event: Event, preference: Preference) -> None:
        await self._intake().check(event, post.arrived)
        self._submit(post, event, preference)

    def _submit(self, post: Post, event: Event, preference: Preference) -> None:
        reply = partial(self._tell_event, post, event.key, preference.applied)
        accepted = partial(self._tell_accepted, post, event) if preference.respond_async else None
        self._intake().submit(event, post.arrived, reply, wait_s=preference.wait_s, accepted=accepted)

    def _post_batch(self, post: Post, found: Found) -> None:
        post.apart(self._or_fail(post, self._write_batch(post, found)))

    async def _write_batch(self, post: Post, found: Found) -> None:
        batch = parse_batch(post.body)
        traceparent = parse_traceparent(found.get(b"traceparent"))
        if not batch.atomic:
            answers = await write_each(self._intake(), batch, post.arrived, traceparent)
            self._answer(post, 207, JSON_LINE, render_results(answers))
            return
        key = parse_key(found.get(b"idempotency-key"))
        id, answer = await write_atomic(self._intake(), batch, key, post.arrived, traceparent)
        if isinstance(answer, Problem):
            raise answer
        self._answer(post, 201, self._committed_lines(key, answer), render_whole(id, answer))

    def _tell_accepted(self, post: Post, event: Event) -> None:
        """The claim stands: a client that prefers so is answered now, and asks for the outcome by the key."""
        lines = b"%blocation: %b\r\nidempotency-key: %b\r\npreference-applied: respond-async\r\n"
        lines %= JSON_LINE, location_of(event.key), event.key.encode()
        self._answer(post, 202, lines, b'{"id":"%b","state":"in_progress"}' % event.id.hex().encode())

    def _tell_event(self, post: Post, key: str, applied: bytes, answer: Answer) -> None:
        if post.response_complete:  # 202 was said of it
            return
        if isinstance(answer, Problem):
            self._fail(post, answer, applied)
        else:
            lines = self._committed_lines(key, answer) + applied
            self._answer(post, 201, lines, render_place(answer.places[0]))

    async def _or_fail(self, post: Post, work: Coroutine[Any, Any, None]) -> None:
        """Do the work of a request; what it raises is its answer."""
        try:
            await work
        except Exception as error:
            self._fail(post, error)

    def _fail(self, post: Post, error: Exception, applied: bytes = b"") -> None:
        """Answer with a problem; anything else than a Problem is a bug, and nobody knows what became of the event."""
        if not isinstance(error, Problem):
            key = next((content.decode("latin-1") for name, content in post.headers if name == b"idempotency-key"), "")
            log.error("request failed", key=key, exc_info=error)
            error = Problem(INTERNAL, "send it again, with the same key")
        status, headers, body = render_problem(error)
        lines = b"".join([b"%b: %b\r\n" % header for header in headers]) + applied
        self._answer(post, status, lines, body, error.kind.code)

    def _answer(self, post: Post, status: int, lines: bytes, body: bytes, code: str = "") -> None:
        self._telemetry.requested(status, code)
        post.answer(status, lines, body)

    def _committed_lines(self, key: str, answer: Committed) -> bytes:
        """The header lines of a 201: the same each time, but for the one that tells of a replay.

        A key is printable ASCII and an expiry is made here, so neither can end its line early.
        """
        return b"%blocation: %b\r\nidempotency-key: %b\r\nidempotency-key-expires: %b\r\n%b" % (
            JSON_LINE,
            location_of(key),
            key.encode(),
            imf_fixdate(answer.at // 1000 + self._retention_s),
            b"idempotent-replayed: true\r\n" if answer.replayed else b"",
        )


JSON_LINE: Final = b"content-type: application/json\r\n"


def location_of(key: str) -> bytes:
    """Where the state of a key is told."""
    return b"/events/" + quote(key, safe="").encode()


def render_place(place: Placed) -> bytes:
    """`{"id","topic","partition","offset","timestamp"}`; a topic's name needs no escaping."""
    return f"{{{_fields(place)}}}".encode()


def render_results(answers: Iterable[Answer]) -> bytes:
    """The body of a 207: one result an event, in order."""
    results = []
    for answer in answers:
        if isinstance(answer, Problem):
            results.append(f'{{"status":{answer.kind.status},"problem":{json.dumps(answer.body())}}}')
        else:
            replayed = "true" if answer.replayed else "false"
            results.append(f'{{"status":201,{_fields(answer.places[0])},"replayed":{replayed}}}')
    return f'{{"results":[{",".join(results)}]}}'.encode()


def render_whole(id: bytes, answer: Committed) -> bytes:
    """The body of an atomic batch's 201, the same bytes each time."""
    results = ",".join(f'{{"status":201,{_fields(place)}}}' for place in answer.places)
    return f'{{"id":"{id.hex()}","results":[{results}]}}'.encode()


def _fields(place: Placed) -> str:
    return (
        f'"id":"{place.id.hex()}","topic":"{place.topic}","partition":{place.partition},'
        f'"offset":{place.offset},"timestamp":{place.timestamp}'
    )


def render_problem(problem: Problem) -> tuple[int, Headers, bytes]:
    """`application/problem+json` (RFC 9457), with Retry-After where another try may help."""
    headers: Headers = [(b"content-type", PROBLEM_TYPE)]
    if problem.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % problem.retry_after_s))
    return problem.kind.status, headers, json.dumps(problem.body()).encode()


_WANTED: Final = frozenset({b"content-type", b"idempotency-key", b"traceparent", b"prefer"})


def pick(headers: Iterable[tuple[bytes, bytes]]) -> Found:
    """The headers that matter, by lower-case name. Raises Problem where there are two keys."""
    found: Found = {}
    for name, content in headers:
        if name in _WANTED:
            text = content.decode("latin-1")
            if name in found:
                if name == b"idempotency-key":
                    raise Problem(INVALID_KEY, "Idempotency-Key: send it once")
                if name == b"prefer":  # several lines are one list
                    text = f"{found[name]}, {text}"
            found[name] = text
    return found


def check_type(content_type: str | None) -> None:
    """`application/json`, in UTF-8 if it says. Raises Problem (415)."""
    if content_type == "application/json":
        return
    media_type, _, parameters = (content_type or "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() != "application/json" or (charset and charset != "utf-8"):
        raise Problem(UNSUPPORTED_TYPE, "Content-Type: send application/json (in UTF-8)")


@lru_cache(maxsize=1024)
def imf_fixdate(second: int) -> bytes:
    """A time in seconds since 1970 as an IMF-fixdate (RFC 9110, section 5.6.7)."""
    return formatdate(second, usegmt=True).encode()
