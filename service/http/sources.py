"""The handlers of `POST /sources/{name}`: a webhook's delivery becomes one event, under the sender's delivery key."""

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from service.contract import CallerRule, SourceRule
from service.core.metrics import Telemetry
from service.core.problems import BAD_SIGNATURE, ENCODED_DELIVERY, UNKNOWN_SOURCE, Problem
from service.core.settings import EVENT_BYTES_MAX, Settings
from service.events.dead_letters import DeadLetter
from service.events.deliveries import Challenge, Delivery, Source
from service.events.event import Event
from service.events.signatures import values
from service.events.strict_json import LONG_BYTES, in_thread
from service.http.asgi import AsgiEndpoint
from service.http.caller import ANYBODY, Caller, Sender
from service.http.prefer import Preference
from service.http.rates import RatePending, Rates
from service.http.request import Bodies, PostRequest
from service.http.request_guard import admit
from service.http.responder import Responder
from service.http.responses import JSON_LINE, key_lines
from service.http.single_event import SingleEventWriter
from service.pipeline.admission import Admission
from service.pipeline.key_checks import KeyAge
from service.pipeline.request import Committed, Quarantined


class SourcesEndpoint:
    """The ASGI endpoint of all sources."""

    def __init__(
        self,
        sources: Sequence[Source],
        admission: Admission,
        settings: Settings,
        bodies: Bodies,
        telemetry: Telemetry,
        rates: Rates | None = None,
        before: "SourcesEndpoint | None" = None,
    ) -> None:
        """`before` is the endpoint of earlier rules."""
        rates = rates or Rates()
        known = {} if before is None else before._callers
        self._callers: dict[str, Caller] = {
            source.rule.name: _caller_of(source.rule, known, rates) for source in sources
        }
        handlers = {
            source.rule.name: _SourceHandler(source, self._callers[source.rule.name], admission, settings, telemetry)
            for source in sources
        }
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
        self, source: Source, caller: Caller, admission: Admission, settings: Settings, telemetry: Telemetry
    ) -> None:
        self._source = source
        self._admission = admission
        self._caller = caller
        self.body_bytes_max = min(settings.body_bytes_max, EVENT_BYTES_MAX)  # no record holds more
        # A sender takes 409 for a failure, so the copy of a delivery that is being written waits for its result.
        self._preference = Preference(wait_s=settings.request_timeout_ms / 1000)
        rule = source.rule
        # None: the retention is that of the delivery's topic.
        self._ttl_s = None if not rule.key_ttl_s else 0 if rule.key_ttl_s == settings.key_ttl_s else rule.key_ttl_s
        self._responder = SourceResponder(telemetry, rule.name)
        self._single = SingleEventWriter(admission, self._responder, _lines_of, settings.key_ttl_s)

    def take(self, post: PostRequest) -> None:
        """Check a request, read its delivery (a long one in a thread), and write it."""
        try:
            self._check(post)
            if self._caller.is_rated:
                admit(post, self._caller)  # before the signature is computed: a sender over its rate costs little
            if overload := self._admission.overload:
                self._responder.refuse(post, overload, self._admission.load_shedder)
            elif post.size > LONG_BYTES:
                self._run(post, self._write_long(post))
            else:
                self._go_on(post, self._source.read(post.headers, post.body, self._now_s()))
        except RatePending as wanted:
            post.run_in_task(self._take_later(wanted, post))
        except Exception as error:
            self._responder.fail(post, error)

    async def _take_later(self, wanted: RatePending, post: PostRequest) -> None:
        """Take a request once its sender has its next slice."""
        await wanted.fetched()
        self.take(post)

    def _check(self, post: PostRequest) -> None:
        """Check a request without reading its body: the body's size and coding. Raises Problem."""
        post.check_body(self.body_bytes_max)
        # No known scheme says whether a coded body would be signed before or after its coding.
        codings = {coding.strip(b" \t").lower() for coding in values(post.headers, "content-encoding")}
        if codings - {b"", b"identity"}:
            raise Problem(ENCODED_DELIVERY, "Content-Encoding: send the body as it is signed, without this header")

    def _now_s(self) -> float:
        return self._admission.checks.now_ms() / 1000

    def _run(self, post: PostRequest, work: Coroutine[Any, Any, None]) -> None:
        post.run_in_task(self._responder.or_fail(post, work))

    async def _write_long(self, post: PostRequest) -> None:
        self._go_on(post, await in_thread(self._source.read, post.headers, post.body, self._now_s()))

    def _go_on(self, post: PostRequest, delivery: Delivery | Challenge) -> None:
        if isinstance(delivery, Challenge):
            self._responder.outcomes["challenge"].inc()
            self._responder.answer(post, 200, b"content-type: text/plain; charset=utf-8\r\n", delivery.text.encode())
        else:
            self._write(post, delivery)

    def _write(self, post: PostRequest, delivery: Delivery) -> None:
        self._caller.spend(1, post.size)
        event, rule = delivery.event, self._source.rule
        sender = Sender(
            rule.scope, KeyAge(sent_ms=delivery.sent_ms, ttl_s=self._ttl_s, source=rule.name), rule.quarantine
        )
        if isinstance(event, DeadLetter):
            event.ttl_s = self._admission.checks.keys.ttl_of_source(rule.key_ttl_s, rule.all_topics)
            self._single.write_letter(post, event, sender, self._preference)
        elif (without_key := self._source.without_key(event)) is not None:
            self._run(post, self._write_unless_refused(post, event, without_key, sender))
        else:
            self._single.write(post, event, sender, self._preference)

    async def _write_unless_refused(self, post: PostRequest, event: Event, without_key: Event, sender: Sender) -> None:
        """Write a delivery, unless its body was quarantined when the rule did not find the key. Raises Problem."""
        letter = await self._admission.checks.letter_of_body(without_key, post.arrived)
        if letter is None:
            self._single.write(post, event, sender, self._preference)
        else:
            self._single.replay(post, without_key, letter, self._preference)


def _caller_of(rule: SourceRule, known: Mapping[str, Caller], rates: Rates) -> Caller:
    """Make the caller that stands for a source; it has the rates of the source."""
    of_source = CallerRule(rule.scope, (), rate=rule.rate, rate_bytes=rule.rate_bytes)
    return known.get(rule.name, ANYBODY).for_changed_rule(of_source, rates)


class SourceResponder(Responder):
    """Answers the requests of one source, and counts them by outcome."""

    def __init__(self, telemetry: Telemetry, source: str) -> None:
        super().__init__(telemetry, lambda _: {"source": source})
        self.outcomes = telemetry.of_source(source)

    def succeed(self, post: PostRequest, lines: bytes, body: bytes, *, replayed: bool) -> None:
        """Answer 201, and count it."""
        super().succeed(post, lines, body, replayed=replayed)
        self.outcomes["duplicate" if replayed else "written"].inc()

    def fail(self, post: PostRequest, error: Exception, more: bytes = b"") -> None:
        """Answer with a problem, and count it."""
        self.outcomes[_outcome_of(error)].inc()
        super().fail(post, error, more)


def _outcome_of(error: Exception) -> str:
    """Name the outcome of a request that is not answered with a success, as the metric does."""
    if isinstance(error, Quarantined):
        return "duplicate" if error.replayed else "quarantined"
    if not isinstance(error, Problem) or error.kind.status >= 500:
        return "failed"
    return "bad_signature" if error.kind is BAD_SIGNATURE else "refused"


def _lines_of(key: str, answer: Committed, retention_s: int) -> bytes:
    """Render the header lines of a 201, without a Location: no sender asks for the state of its delivery."""
    return JSON_LINE + key_lines(key, answer, retention_s)
