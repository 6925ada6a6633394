"""The common parts of versions 2 and 3 of the produce API: a request with its key, and the results of its records.

The API is that of the Confluent REST Proxy, with idempotency keys. Each record is an event: it is written exactly once
under its key, as by `POST /events`. A sender that knows nothing of keys works unchanged; one that sends the header
Idempotency-Key, or a v3 record header of that name, may repeat itself.
"""

import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

from starlette.types import Receive, Scope, Send

from service.contract import Rules
from service.core.metrics import Telemetry
from service.core.problems import MISSING_KEY, Problem
from service.core.settings import TOPICS_MAX
from service.events.event import Event, check_topic_name, parse_key, parse_traceparent
from service.events.produce import ProduceProblem, RequestKey, SchemaUse
from service.http.asgi import AsgiEndpoint
from service.http.batch import write_each
from service.http.caller import Caller
from service.http.headers import UsedHeaders
from service.http.produce_answers import ProduceResponder
from service.http.request import PostRequest
from service.http.request_guard import RequestGuard
from service.http.responder import check_room
from service.pipeline.admission import Admission
from service.pipeline.request import WriteResult

# Bytes of memory of a record's problem, which a record of three bytes may have.
PROBLEM_BYTES: Final = 512

PathParameters = Mapping[str, str]


class RecordsRequest(NamedTuple):
    """A produce request that passed the checks of all requests, with its key."""

    post: PostRequest
    topic: str
    caller: Caller
    key: RequestKey
    traceparent: bytes | None
    responder: ProduceResponder

    def answer(self, results: Sequence[WriteResult], body: bytes, status: int = 200) -> None:
        """Answer with the body that was rendered of these results."""
        self.responder.answer(self.post, status, self.responder.lines(results), body)


class PathEndpoint:
    """An ASGI endpoint for POSTs whose handler gets the parameters of the path."""

    def __init__(self, handler: Callable[[PathParameters, PostRequest], None], guard: RequestGuard) -> None:
        self._handler = handler
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = partial(self._handler, scope["path_params"])
        await AsgiEndpoint(handler, self._guard.body_bytes_max, self._guard.bodies)(scope, receive, send)


class ProduceRequests:
    """Begins the produce requests of both versions, and writes their records."""

    def __init__(
        self,
        guard: RequestGuard,
        admission: Admission,
        telemetry: Telemetry,
        rules: Rules,
        retention_s: int,
        *,
        has_registry: bool = False,
    ) -> None:
        """`retention_s` is the retention, in seconds, of keys for which no rule sets one.

        `has_registry`: there is a schema registry.
        """
        self.guard = guard
        self.admission = admission
        self.telemetry = telemetry
        self.schemas = SchemaUse(has_registry)
        self.schema_use = lru_cache(maxsize=TOPICS_MAX)(lambda topic: _schema_use(rules, topic, has_registry))
        self._retention_s = retention_s
        self._refuses_keyless = lru_cache(maxsize=TOPICS_MAX)(lambda topic: rules.rule(topic).keyless == "refuse")

    def request(
        self, media_type: bytes, path: PathParameters, post: PostRequest, used: UsedHeaders, caller: Caller
    ) -> RecordsRequest:
        """Make the request with its key."""
        topic = path["topic"]
        key = self.key_of(used, topic, caller)
        traceparent = parse_traceparent(used.get(b"traceparent"))
        return RecordsRequest(post, topic, caller, key, traceparent, self.responder(media_type, key.key))

    def responder(self, media_type: bytes, key: str | None = None) -> ProduceResponder:
        return ProduceResponder(self.telemetry, self._retention_s, media_type, key)

    def key_of(self, used: UsedHeaders, topic: str, caller: Caller) -> RequestKey:
        """Return the key of a request; one is made for a request without, unless the topic's rule refuses that.

        The age of the key is judged here, once: the key of a stream may become old while its records come.
        """
        raw, admission = used.get(b"idempotency-key"), self.admission
        if raw is not None:
            key = parse_key(raw)
            return RequestKey(key, caller.scope, admission.checks.keys.is_old(key, topic))
        return RequestKey(None if self._refuses_keyless(topic) else new_key(admission.checks.now_ms()), caller.scope)

    def begin(self, request: RecordsRequest, work: Coroutine[Any, Any, None]) -> None:
        """Start the work of a request, unless the queue is full."""
        admission = self.admission
        if overload := admission.overload:
            work.close()
            request.responder.refuse(request.post, overload, admission.load_shedder)
        else:
            request.post.run_in_task(request.responder.or_fail(request.post, work))

    async def results(self, request: RecordsRequest, events: Sequence[Event | Problem]) -> list[WriteResult]:
        """Write the events, and return the result of each. Raises Problem (504) if too many problems are in memory."""
        results: list[WriteResult] = []
        problems = 0
        admission, arrived = self.admission, request.post.arrived
        async for group in write_each(admission, events, _raised, arrived, request.caller, request.key.fresh):
            results += group
            problems += sum([isinstance(result, Problem) for result in group])
            check_room(request.post, PROBLEM_BYTES * problems)
        return results


def _schema_use(rules: Rules, topic: str, has_registry: bool) -> SchemaUse:
    rule = rules.rule(topic).registry
    return SchemaUse(has_registry, encodes_keys=rule is not None and rule.key is not None)


def new_key(at_ms: int) -> str:
    """Make an idempotency key: a UUID of version 7 (RFC 9562, section 5.7), whose time says when it was made."""
    bits = at_ms << 80 | 7 << 76 | secrets.randbits(12) << 64 | 0b10 << 62 | secrets.randbits(62)
    text = f"{bits:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def check_topic(name: str, caller: Caller) -> None:
    """Raise Problem (400, 403) for a name in a path that no topic can have, or that the caller may not write to.

    The caller's rights and the topic's rule are cached by name: names of any length would fill the memory.
    """
    check_topic_name(name)
    caller.check(name)


def _raised(event: Event | Problem) -> Event:
    if isinstance(event, Problem):
        raise event
    return event


def of_record(place: str, problem: Problem) -> Problem:
    """Add the place of a record in the request to its problem, unless the problem is about the request's header."""
    if problem.kind is MISSING_KEY:
        return problem
    detail = f"{place}.{problem.detail}"
    if isinstance(problem, ProduceProblem):
        return ProduceProblem(problem.status, problem.error_code, detail)
    return Problem(problem.kind, detail, problem.retry_after_s)
