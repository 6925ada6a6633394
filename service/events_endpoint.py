"""`POST /events` and its batch as bare ASGI, in front of the app: headers read once, answers written from bytes."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from email.utils import formatdate
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import quote

import structlog

from service.batch import parse_batch, write_atomic, write_each
from service.errors import FORBIDDEN_CALLER, INTERNAL, INVALID_KEY, TOO_LARGE, UNSUPPORTED_TYPE, Problem
from service.event import parse_event, parse_key, parse_traceparent
from service.ingest import Ingest
from service.request import Answer, Committed, Placed
from service.settings import Settings
from service.shared import PREFIX
from service.telemetry import Telemetry

log = structlog.get_logger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON_TYPE: Final = b"application/json"
PROBLEM_TYPE: Final = b"application/problem+json"


class Disconnected(Exception):
    """The client went away before its request was whole: nothing was asked for."""


Found = dict[bytes, str]  # the headers that matter, by lower-case name
Answered = tuple[int, Headers, bytes]


class EventsEndpoint:
    """The ASGI app that answers `POST /events` and `POST /events/batch` itself and hands everything else on."""

    def __init__(self, app: App, ingest: Callable[[], Ingest], settings: Settings, telemetry: Telemetry) -> None:
        self._app = app
        self._ingest = ingest
        self._telemetry = telemetry
        self._body_bytes_max = settings.body_bytes_max
        self._retention_s = settings.key_ttl_s
        self._loopback_only = not settings.rules
        self._loopback: set[str] = set()  # addresses that were seen to be of the loopback: 127.0.0.1 and ::1
        self._routes = {"/events": self._post_event, "/events/batch": self._post_batch}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        arrived = asyncio.get_running_loop().time()
        code = ""
        try:
            self._check_caller(scope)
            found = pick(scope["headers"])
            body = await read_body(receive, found.get(b"content-length"), self._body_bytes_max)
            check_type(found.get(b"content-type"))
            status, headers, body = await route(found, body, arrived)
        except Problem as problem:
            code = problem.kind.code
            status, headers, body = render_problem(problem)
        except Disconnected:
            return
        except Exception:  # a bug: nobody knows what became of the event
            log.exception("request failed", path=scope["path"])
            code = INTERNAL.code
            status, headers, body = render_problem(Problem(INTERNAL, "send it again, with the same key"))
        self._telemetry.requested(status, code)
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _check_caller(self, scope: Scope) -> None:
        """Without rules nobody has said who may write: only this machine may."""
        client = scope.get("client")
        if self._loopback_only and client is not None and client[0] not in self._loopback:
            if not ip_address(client[0]).is_loopback:
                raise Problem(
                    FORBIDDEN_CALLER, f"{PREFIX}RULES is not set, so only callers on this machine may write: set it"
                )
            self._loopback.add(client[0])

    async def _post_event(self, found: Found, body: bytes, arrived: float) -> Answered:
        key = parse_key(found.get(b"idempotency-key"))
        event = parse_event(key, body, parse_traceparent(found.get(b"traceparent")))
        answer = await self._ingest().submit(event, arrived)
        if isinstance(answer, Problem):
            raise answer
        return 201, self._committed_headers(key, answer), render_place(answer.places[0])

    async def _post_batch(self, found: Found, body: bytes, arrived: float) -> Answered:
        batch = parse_batch(body)
        if not batch.atomic:
            answers = await write_each(self._ingest(), batch, arrived)
            return 207, [(b"content-type", JSON_TYPE)], render_results(answers)
        key = parse_key(found.get(b"idempotency-key"))
        id, answer = await write_atomic(self._ingest(), batch, key, arrived)
        if isinstance(answer, Problem):
            raise answer
        return 201, self._committed_headers(key, answer), render_whole(id, answer)

    def _committed_headers(self, key: str, answer: Committed) -> Headers:
        """Of a 201: the same each time, but for the one that tells of a replay."""
        headers = [
            (b"content-type", JSON_TYPE),
            (b"location", b"/events/" + quote(key, safe="").encode()),
            (b"idempotency-key", key.encode()),
            (b"idempotency-key-expires", imf_fixdate(answer.at // 1000 + self._retention_s)),
        ]
        if answer.replayed:
            headers.append((b"idempotent-replayed", b"true"))
        return headers


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


def render_problem(problem: Problem) -> Answered:
    """`application/problem+json` (RFC 9457), with Retry-After where another try may help."""
    headers: Headers = [(b"content-type", PROBLEM_TYPE)]
    if problem.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % problem.retry_after_s))
    return problem.kind.status, headers, json.dumps(problem.body()).encode()


_WANTED: Final = frozenset({b"content-type", b"content-length", b"idempotency-key", b"traceparent", b"prefer"})


def pick(headers: Iterable[tuple[bytes, bytes]]) -> Found:
    """The headers that matter, by lower-case name. Raises Problem where there are two keys."""
    found: Found = {}
    for name, content in headers:
        if name in _WANTED:
            if name == b"idempotency-key" and name in found:
                raise Problem(INVALID_KEY, "Idempotency-Key: send it once")
            found[name] = content.decode("latin-1")
    return found


async def read_body(receive: Receive, length: str | None, most: int) -> bytes:
    """The whole body. Raises Problem (413) past `most` bytes, Disconnected where the client went away."""
    if length is not None and length.isdecimal() and int(length) > most:
        raise Problem(TOO_LARGE, f"body: it has {length} bytes; at most {most} are taken")
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Disconnected
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        whole = body
    else:
        parts, size = [body], len(body)
        while message.get("more_body", False):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise Problem(TOO_LARGE, f"body: at most {most} bytes are taken")
        whole = b"".join(parts)
    if len(whole) > most:
        raise Problem(TOO_LARGE, f"body: it has {len(whole)} bytes; at most {most} are taken")
    return whole


def check_type(content_type: str | None) -> None:
    """`application/json`, in UTF-8 if it says. Raises Problem (415)."""
    media_type, _, parameters = (content_type or "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() != "application/json" or (charset and charset != "utf-8"):
        raise Problem(UNSUPPORTED_TYPE, "Content-Type: send application/json (in UTF-8)")


@lru_cache(maxsize=1024)
def imf_fixdate(second: int) -> bytes:
    """A time in seconds since 1970 as an IMF-fixdate (RFC 9110, section 5.6.7)."""
    return formatdate(second, usegmt=True).encode()
