"""The handlers of `POST /sources/{name}`: a webhook's delivery becomes one event, under the sender's delivery key."""

from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from service.contract import CallerRule
from service.core.metrics import Telemetry
from service.core.problems import ENCODED_DELIVERY, UNKNOWN_SOURCE, Problem
from service.core.settings import EVENT_BYTES_MAX, Settings
from service.events.deliveries import Challenge, Source
from service.events.event import Event
from service.events.signatures import values
from service.events.strict_json import LONG_BYTES, in_thread
from service.http.asgi import AsgiEndpoint
from service.http.callers import Caller
from service.http.prefer import Preference
from service.http.request import Bodies, PostRequest
from service.http.responder import Responder
from service.http.responses import JSON_LINE, key_lines
from service.http.single_event import SingleEventWriter
from service.pipeline.admission import Admission
from service.pipeline.request import Committed


class SourcesEndpoint:
    """The ASGI endpoint of all sources."""

    def __init__(
        self,
        sources: Sequence[Source],
        admission: Admission,
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

    def __init__(self, source: Source, admission: Admission, settings: Settings, telemetry: Telemetry) -> None:
        self._source = source
        self._admission = admission
        self._caller = Caller(CallerRule(source.rule.scope, (), rate=source.rule.rate))
        self.body_bytes_max = min(settings.body_bytes_max, EVENT_BYTES_MAX)  # no record holds more
        # A sender takes 409 for a failure, so the copy of a delivery that is being written waits for its result.
        self._preference = Preference(wait_s=settings.request_timeout_ms / 1000)
        self._responder = Responder(telemetry, self._named)
        self._single = SingleEventWriter(admission, self._responder, _lines_of, settings.key_ttl_s)

    def take(self, post: PostRequest) -> None:
        """Check a request, read its delivery (a long one in a thread), and write it."""
        try:
            self._check(post)
            if overload := self._admission.overload:
                self._responder.refuse(post, overload, self._admission.load_shedder)
            elif post.size > LONG_BYTES:
                self._run(post, self._write_long(post))
            else:
                self._go_on(post, self._source.read(post.headers, post.body, self._now_s()))
        except Exception as error:
            self._responder.fail(post, error)

    def _check(self, post: PostRequest) -> None:
        """Check what needs no look at the body: its bounds, its coding, the rate. Raises Problem."""
        post.check_body(self.body_bytes_max)
        # No sender of the known schemes packs its deliveries, and none says which of the two bodies it would sign.
        codings = {coding.strip(b" \t").lower() for coding in values(post.headers, "content-encoding")}
        if codings - {b"", b"identity"}:
            raise Problem(ENCODED_DELIVERY, "Content-Encoding: send the body as it is signed, without this header")
        self._caller.spend(0, post.arrived)  # before the signature is computed: a sender over its rate costs little

    def _now_s(self) -> float:
        return self._admission.checks.now_ms() / 1000

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
        self._single.write(post, event, self._preference)

    def _named(self, _: PostRequest) -> dict[str, str]:
        return {"source": self._source.rule.name}


def _lines_of(key: str, answer: Committed, retention_s: int) -> bytes:
    """Render the header lines of a 201, without a Location: no sender asks for the state of its delivery."""
    return JSON_LINE + key_lines(key, answer, retention_s)
