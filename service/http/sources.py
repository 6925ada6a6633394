"""The handlers of `POST /sources/{name}`: a webhook's delivery becomes one event, under the sender's delivery key."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from service.contract import CallerRule
from service.core.metrics import Telemetry
from service.core.problems import ENCODED_DELIVERY, NOT_WRITTEN, TOO_LARGE, UNKNOWN_SOURCE, Problem
from service.core.settings import EVENT_BYTES_MAX, Settings
from service.events.deliveries import Challenge, Source
from service.events.event import Event
from service.events.signatures import values
from service.events.strict_json import LONG_BYTES, in_thread
from service.http.asgi import AsgiEndpoint
from service.http.callers import Caller
from service.http.events import TOO_MANY_BODIES
from service.http.request import Bodies, PostRequest
from service.http.responder import Responder
from service.http.responses import JSON_LINE, key_lines, render_metadata
from service.pipeline.admission import Admission
from service.pipeline.request import WriteResult


class SourcesEndpoint:
    """The ASGI endpoint of all sources."""

    def __init__(
        self,
        sources: Sequence[Source],
        admission: Callable[[], Admission],
        settings: Settings,
        bodies: Bodies,
        telemetry: Telemetry,
    ) -> None:
        handlers = {source.rule.name: _SourceHandler(source, admission, settings, telemetry) for source in sources}
        self._asgi = {
            name: AsgiEndpoint(handler.take, handler.body_bytes_max, bodies) for name, handler in handlers.items()
        }

    def route(self) -> Route:
        """Return the route of all sources, to be added to the app."""
        return Route("/sources/{name}", self, methods=["POST"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a POST of the app to its source. Raises Problem (404), without reading the body."""
        name = scope["path_params"]["name"]
        if name not in self._asgi:
            raise Problem(UNKNOWN_SOURCE, f"/sources/{name}: no [[sources]] table of the rules has this name")
        await self._asgi[name](scope, receive, send)


class _SourceHandler:
    """The handler of one source. Its deliveries need no token: their signature tells who sends them."""

    def __init__(
        self, source: Source, admission: Callable[[], Admission], settings: Settings, telemetry: Telemetry
    ) -> None:
        self._source = source
        self._admission = admission
        self._caller = Caller(CallerRule(source.rule.scope, (), rate=source.rule.rate))
        self.body_bytes_max = min(settings.body_bytes_max, EVENT_BYTES_MAX)  # no record holds more
        self._retention_s = settings.key_ttl_s
        self._wait_s = settings.request_timeout_ms / 1000
        self._responder = Responder(telemetry, self._named)

    def take(self, post: PostRequest) -> None:
        """Check a request, read its delivery (a long one in a thread), and write it."""
        try:
            self._check(post)
            if overload := self._admission().overload:
                self._responder.refuse(post, overload, self._admission().load_shedder)
            elif post.size > LONG_BYTES:
                self._run(post, self._write_long(post))
            else:
                self._go_on(post, self._source.read(post.headers, post.body, self._now_s()))
        except Exception as error:
            self._responder.fail(post, error)

    def _check(self, post: PostRequest) -> None:
        """Check what needs no look at the body: its bounds, its coding, the rate. Raises Problem."""
        if post.body_was_dropped:
            raise Problem(NOT_WRITTEN, TOO_MANY_BODIES)
        if post.size > self.body_bytes_max:
            raise Problem(TOO_LARGE, f"body: at most {self.body_bytes_max} bytes are taken")
        # No sender of the known schemes packs its deliveries, and none says which of the two bodies it would sign.
        codings = {coding.strip(b" \t").lower() for coding in values(post.headers, "content-encoding")}
        if codings - {b"", b"identity"}:
            raise Problem(ENCODED_DELIVERY, "Content-Encoding: send the body as it is signed, without this header")
        self._caller.spend(0, post.arrived)  # before the signature is computed: a sender over its rate costs little

    def _now_s(self) -> float:
        return self._admission().now_ms() / 1000

    def _run(self, post: PostRequest, work: Coroutine[Any, Any, None]) -> None:
        post.run_in_task(self._responder.or_fail(post, work))

    async def _write_long(self, post: PostRequest) -> None:
        self._go_on(post, await in_thread(self._source.read, post.headers, post.body, self._now_s()))

    def _go_on(self, post: PostRequest, delivery: Event | Challenge) -> None:
        if isinstance(delivery, Challenge):
            self._responder.answer(post, 200, b"content-type: text/plain; charset=utf-8\r\n", delivery.text.encode())
        else:
            self._write(post, delivery)

    def _write(self, post: PostRequest, event: Event) -> None:
        self._caller.spend(1, post.arrived)
        if self._admission().check_now(event):
            self._submit(post, event)
        else:
            self._run(post, self._look_up_first(post, event))

    async def _look_up_first(self, post: PostRequest, event: Event) -> None:
        await self._admission().check(event, post.arrived)
        self._submit(post, event)

    def _submit(self, post: PostRequest, event: Event) -> None:
        # A sender takes 409 for a failure, so the copy of a delivery that is being written waits for its result.
        result = self._admission().submit(event, post.arrived, self._wait_s)
        result.add_done_callback(partial(self._answer, post, event.key))

    def _answer(self, post: PostRequest, key: str, result: asyncio.Future[WriteResult]) -> None:
        try:
            answer = result.result()
            if isinstance(answer, Problem):
                self._responder.fail(post, answer)
            else:
                lines = JSON_LINE + key_lines(key, answer, self._retention_s)
                self._responder.answer(post, 201, lines, render_metadata(answer.deliveries[0]))
        except Exception as error:
            self._responder.fail(post, error)

    def _named(self, _: PostRequest) -> dict[str, str]:
        return {"source": self._source.rule.name}
