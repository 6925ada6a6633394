"""`POST /events` as bare ASGI, in front of the rest of the app: headers read once, answers written from bytes."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from email.utils import formatdate
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

from service.errors import INVALID_KEY, TOO_LARGE, UNSUPPORTED_TYPE, Problem
from service.event import parse_event, parse_key
from service.ingest import Ingest
from service.request import Committed
from service.settings import Settings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON_TYPE: Final = b"application/json"
PROBLEM_TYPE: Final = b"application/problem+json"


class Disconnected(Exception):
    """The client went away before its request was whole: nothing was asked for."""


class EventsEndpoint:
    """The ASGI app that answers `POST /events` itself and hands everything else on."""

    def __init__(self, app: App, ingest: Callable[[], Ingest], settings: Settings) -> None:
        self._app = app
        self._ingest = ingest
        self._body_bytes_max = settings.body_bytes_max
        self._retention_s = settings.key_ttl_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/events" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            status, headers, body = await self._post(scope, receive)
        except Problem as problem:
            status, headers, body = render_problem(problem)
        except Disconnected:
            return
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _post(self, scope: Scope, receive: Receive) -> tuple[int, Headers, bytes]:
        arrived = asyncio.get_running_loop().time()
        found = pick(scope["headers"])
        body = await read_body(receive, found.get(b"content-length"), self._body_bytes_max)
        check_type(found.get(b"content-type"))
        key = parse_key(found.get(b"idempotency-key"))
        traceparent = found.get(b"traceparent")
        event = parse_event(key, body, None if traceparent is None else traceparent.encode())
        answer = await self._ingest().submit(event, arrived)
        if isinstance(answer, Problem):
            raise answer
        return self._committed(key, event.id, answer)

    def _committed(self, key: str, id: bytes, answer: Committed) -> tuple[int, Headers, bytes]:
        """The 201: the same bytes each time, but for the header that tells of a replay."""
        headers = [
            (b"content-type", JSON_TYPE),
            (b"location", b"/events/" + quote(key, safe="").encode()),
            (b"idempotency-key", key.encode()),
            (b"idempotency-key-expires", imf_fixdate(answer.at // 1000 + self._retention_s)),
        ]
        if answer.replayed:
            headers.append((b"idempotent-replayed", b"true"))
        return 201, headers, render_place(id, answer)


def render_place(id: bytes, answer: Committed) -> bytes:
    """`{"id","topic","partition","offset","timestamp"}`; a topic's name needs no escaping."""
    return (
        f'{{"id":"{id.hex()}","topic":"{answer.topic}","partition":{answer.partition},'
        f'"offset":{answer.offset},"timestamp":{answer.timestamp}}}'
    ).encode()


def render_problem(problem: Problem) -> tuple[int, Headers, bytes]:
    """`application/problem+json` (RFC 9457), with Retry-After where another try may help."""
    headers: Headers = [(b"content-type", PROBLEM_TYPE)]
    if problem.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % problem.retry_after_s))
    return problem.kind.status, headers, json.dumps(problem.body()).encode()


_WANTED: Final = frozenset({b"content-type", b"content-length", b"idempotency-key", b"traceparent", b"prefer"})


def pick(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, str]:
    """The headers that matter, by lower-case name. Raises Problem where there are two keys."""
    found: dict[bytes, str] = {}
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
