"""The produce API of the Confluent REST Proxy, v2 and v3, with idempotency keys.

Each record is an event: it is written exactly once under its key, as by `POST /events`. A sender that knows nothing of
keys works unchanged; one that sends the header Idempotency-Key, or a v3 record header of that name, may repeat itself.
"""

import itertools
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

from msgspec import Raw
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from service.contract import Rules
from service.core.metrics import Telemetry
from service.core.problems import MISSING_KEY, NOT_FOUND, NOT_WRITTEN, TOO_LARGE, Problem
from service.core.settings import TOPICS_MAX
from service.core.time_slice import TimeSlice
from service.events.event import BATCH_EVENTS_MAX, Event, check_topic_name, parse_key, parse_traceparent
from service.events.json_objects import JsonObjects
from service.events.produce import PARTITION_NOT_FOUND, UNPROCESSABLE, Format, ProduceProblem, RequestKey, SchemaUse
from service.events.produce_v2 import V2_FORMATS, check_long_v2, parse_v2, v2_event, v2_format
from service.events.produce_v3 import (
    V3Event,
    V3Record,
    decode_long_v3,
    decode_v3,
    parse_v3_batch,
    parse_v3_entry,
    v3_event,
)
from service.events.strict_json import LONG_BYTES
from service.http.asgi import AsgiEndpoint
from service.http.batch import write_each
from service.http.caller import Caller
from service.http.encodings import PIECE_BYTES
from service.http.headers import JSON, UsedHeaders, essence, unsupported
from service.http.produce_answers import (
    V2_TYPE,
    V3_TYPE,
    ProduceResponder,
    error_of,
    failure_of,
    lines_of_error,
    render_error,
    render_offsets,
    render_v2,
    render_v3,
    render_v3_batch,
    render_v3_end,
)
from service.http.request import PostRequest
from service.http.request_guard import RequestGuard
from service.http.responder import TOO_MANY_RESPONSES, check_room, in_slices, rendered
from service.http.responses import Headers, headers_of
from service.http.streamed_body import Text, next_text
from service.http.streaming import Exchange, StreamEndpoint, StreamHead
from service.pipeline.admission import Admission
from service.pipeline.request import WriteResult

PARTITION_DIGITS: Final = 9
# Bytes of memory of a record's problem, which a record of three bytes may have.
PROBLEM_BYTES: Final = 512
# Characters of a cluster's id in a path, which each answer repeats; Kafka's ids have 22.
CLUSTER_CHARS_MAX: Final = 255

# What is before /v3 in the paths of the API: nothing at the REST Proxy, /kafka at Confluent Server and Confluent Cloud.
V3_PREFIXES: Final = ("", "/kafka")

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


# Writes the records of a v3 request, and answers it; the text is the cluster of its path.
V3Writer = Callable[[RecordsRequest, str], Coroutine[Any, Any, None]]


class StreamedRecord:
    """What a record of a stream was parsed to, in `made`; None if no event could be made of it."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made: V3Event | None = None

    async def take(self, fields: Awaitable[V3Record], make: Callable[[V3Record], V3Event]) -> Event:
        """Await the fields of the record, and make its event."""
        self.made = make(await fields)
        return self.made.event


class BySize:
    """An ASGI endpoint that hands requests with a Content-Length up to LONG_BYTES to `whole`, others to `streamed`."""

    def __init__(self, whole: ASGIApp, streamed: ASGIApp) -> None:
        self._whole = whole
        self._streamed = streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sizes = [content for name, content in scope["headers"] if name == b"content-length"]
        is_short = len(sizes) == 1 and sizes[0].isdigit() and int(sizes[0][:20]) <= LONG_BYTES
        await (self._whole if is_short else self._streamed)(scope, receive, send)


class PathEndpoint:
    """An ASGI endpoint for POSTs whose handler gets the parameters of the path."""

    def __init__(self, handler: Callable[[PathParameters, PostRequest], None], guard: RequestGuard) -> None:
        self._handler = handler
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = partial(self._handler, scope["path_params"])
        await AsgiEndpoint(handler, self._guard.body_bytes_max, self._guard.bodies)(scope, receive, send)


class ProduceEndpoint:
    """The handlers of the produce API."""

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
        self._guard = guard
        self._admission = admission
        self._telemetry = telemetry
        self._retention_s = retention_s
        self._schemas = SchemaUse(has_registry)
        self._schema_use = lru_cache(maxsize=TOPICS_MAX)(lambda topic: _schema_use(rules, topic, has_registry))
        self._refuses_keyless = lru_cache(maxsize=TOPICS_MAX)(lambda topic: rules.rule(topic).keyless == "refuse")

    def routes(self) -> list[Route]:
        """Make the routes of the API's POSTs."""
        v2 = PathEndpoint(self._take_v2, self._guard)
        stream = StreamEndpoint(self._guard, self._admission, self._telemetry, self._stream_v3, _v3_refusal)
        v3 = BySize(PathEndpoint(partial(self._take_v3, self._write_v3), self._guard), stream)
        batch = PathEndpoint(partial(self._take_v3, self._write_batch), self._guard)
        of_v2 = [
            Route("/topics/{topic}", v2, methods=["POST"]),
            Route("/topics/{topic}/partitions/{partition}", v2, methods=["POST"]),
        ]
        records = "/v3/clusters/{cluster}/topics/{topic}/records"
        of_v3 = [
            Route(f"{prefix}{path}", endpoint, methods=["POST"], include_in_schema=not prefix)
            for prefix in V3_PREFIXES
            for path, endpoint in ((records, v3), (f"{records}:batch", batch))
        ]
        return of_v2 + of_v3

    def _take_v2(self, path: PathParameters, post: PostRequest) -> None:
        self._guard.take(partial(self._post_v2, path), self._responder(V2_TYPE).fail, post)

    def _take_v3(self, write: V3Writer, path: PathParameters, post: PostRequest) -> None:
        self._guard.take(partial(self._post_v3, write, path), self._responder(V3_TYPE).fail, post)

    # -------------------------------------------------------------------------------------------------------------- v2

    def _post_v2(self, path: PathParameters, post: PostRequest, used: UsedHeaders, caller: Caller) -> None:
        _check_topic(path["topic"], caller)
        data_format = v2_format(essence(used.get(b"content-type")), self._schemas)
        if data_format is None:
            raise unsupported(*V2_FORMATS)
        request = self._request(V2_TYPE, path, post, used, caller)
        self._begin(request, self._write_v2(request, data_format, _partition_in(path)))

    async def _write_v2(self, request: RecordsRequest, data_format: Format, partition: int | None) -> None:
        records, schemas = await parse_v2(request.post.body, data_format)
        use = self._schema_use(request.topic)
        request.caller.spend(len(records), request.post.size)
        events: list[Event | Problem] = []
        time_slice = TimeSlice()
        for index, raw in enumerate(records):
            if time_slice.is_over:
                await time_slice.next()
            try:
                if len(raw) > LONG_BYTES:
                    await check_long_v2(raw)
                events.append(
                    v2_event(
                        raw,
                        index,
                        data_format,
                        request.topic,
                        partition,
                        request.key,
                        request.traceparent,
                        schemas,
                        use,
                    )
                )
            except Problem as problem:
                if problem.kind is not TOO_LARGE:  # malformed: none of the records is written
                    raise _of_record(f"records[{index}]", problem) from None
                events.append(problem.as_result())
        results = await self._results(request, events)
        if failure := failure_of(results):
            raise failure
        pieces = await rendered(request.post, in_slices(results), render_offsets)
        request.answer(results, render_v2(pieces, events))

    # -------------------------------------------------------------------------------------------------------------- v3

    def _post_v3(
        self, write: V3Writer, path: PathParameters, post: PostRequest, used: UsedHeaders, caller: Caller
    ) -> None:
        _check_v3_path(path, caller)
        if essence(used.get(b"content-type")) != JSON:
            raise unsupported(JSON)
        request = self._request(V3_TYPE, path, post, used, caller)
        self._begin(request, write(request, path["cluster"]))

    async def _write_v3(self, request: RecordsRequest, cluster: str) -> None:
        records = await self._parse_v3(request)
        _check_keys(records)
        request.caller.spend(len(records), request.post.size)
        results = await self._results(request, records)
        answers = in_slices([*zip(records, results, strict=True)])
        request.answer(results, b"".join(await rendered(request.post, answers, partial(render_v3, cluster))))

    async def _parse_v3(self, request: RecordsRequest) -> list[V3Event | Problem]:
        """Parse the records of a v3 body. Raises Problem (413, 422) for none, and for too many."""
        records: list[V3Event | Problem] = []
        problems, use = 0, self._schema_use(request.topic)
        async for text in _objects_of(request.post.body):
            if len(records) == BATCH_EVENTS_MAX:
                raise Problem(TOO_LARGE, f"body: at most {BATCH_EVENTS_MAX} records are taken, unless it is streamed")
            try:
                if isinstance(text, Problem):
                    raise text
                # A coded body may be long.
                fields = await decode_long_v3(text) if len(text) > LONG_BYTES else decode_v3(text)
                index = len(records)
                records.append(v3_event(fields, index, request.topic, request.key, request.traceparent, use))
            except Problem as problem:
                records.append(problem.as_result())
                problems += 1
                if not request.post.hold_response(PROBLEM_BYTES * problems):
                    raise Problem(NOT_WRITTEN, TOO_MANY_RESPONSES) from None
        if not records:
            raise ProduceProblem(422, UNPROCESSABLE, "body: is empty: send a record")
        return records

    async def _write_batch(self, request: RecordsRequest, cluster: str) -> None:
        """Write the entries of a batch, each for itself; answer 207 with those that are written, and the others."""
        entries = await parse_v3_batch(request.post.body)
        ids = [id for id, _ in entries]
        records = await self._parse_entries(request, entries)
        _check_keys(records)
        request.caller.spend(len(records), request.post.size)
        results = await self._results(request, records)
        body = render_v3_batch(cluster, ids, records, results)
        check_room(request.post, len(body))
        request.answer(results, body, 207)

    async def _parse_entries(
        self, request: RecordsRequest, entries: Sequence[tuple[str, Raw]]
    ) -> list[V3Event | Problem]:
        """Parse the entries of a batch. Raises Problem (400, 413) for one that has not the form of an entry."""
        parsed = []
        for index, (_, raw) in enumerate(entries):
            try:
                parsed.append(await parse_v3_entry(raw))
            except Problem as problem:  # as with the peer: none of the entries is written
                raise _of_record(f"entries[{index}]", problem) from None
        records: list[V3Event | Problem] = []
        use = self._schema_use(request.topic)
        time_slice = TimeSlice()
        for (id, _), entry in zip(entries, parsed, strict=True):
            if time_slice.is_over:
                await time_slice.next()
            try:
                records.append(v3_event(entry, id, request.topic, request.key, request.traceparent, use))
            except Problem as problem:
                records.append(problem.as_result())
        return records

    def _stream_v3(self, head: StreamHead) -> Exchange:
        """Begin a v3 request whose records are written as they come. Raises Problem (400, 403, 404, 415)."""
        _check_v3_path(head.path_params, head.caller)
        topic, cluster = head.path_params["topic"], head.path_params["cluster"]
        if essence(head.used.get(b"content-type")) != JSON:
            raise unsupported(JSON)
        of_request, use = self._key_of(head.used, topic, head.caller), self._schema_use(topic)
        parsed: deque[StreamedRecord] = deque()  # records that have no result yet
        count = itertools.count()

        def parse(text: Text) -> Event | Awaitable[Event]:
            record = StreamedRecord()
            parsed.append(record)
            make = partial(
                v3_event, index=next(count), topic=topic, key=of_request, traceparent=head.traceparent, use=use
            )
            if isinstance(text, Problem):
                raise text
            if len(text) > LONG_BYTES:
                return record.take(decode_long_v3(text), make)
            record.made = make(decode_v3(text))
            return record.made.event

        def render(result: WriteResult) -> bytes:
            return render_v3(cluster, [(parsed.popleft().made, result)])

        lines = self._responder(V3_TYPE, of_request.key).lines()
        return Exchange(JsonObjects(), parse, render, render_v3_end, 200, lines, of_request.fresh)

    # ------------------------------------------------------------------------------------------------------------ both

    def _request(
        self, media_type: bytes, path: PathParameters, post: PostRequest, used: UsedHeaders, caller: Caller
    ) -> RecordsRequest:
        """Make the request with its key."""
        topic = path["topic"]
        key = self._key_of(used, topic, caller)
        traceparent = parse_traceparent(used.get(b"traceparent"))
        return RecordsRequest(post, topic, caller, key, traceparent, self._responder(media_type, key.key))

    def _responder(self, media_type: bytes, key: str | None = None) -> ProduceResponder:
        return ProduceResponder(self._telemetry, self._retention_s, media_type, key)

    def _key_of(self, used: UsedHeaders, topic: str, caller: Caller) -> RequestKey:
        """Return the key of a request; one is made for a request without, unless the topic's rule refuses that.

        The age of the key is judged here, once: the key of a stream may become old while its records come.
        """
        raw, admission = used.get(b"idempotency-key"), self._admission
        if raw is not None:
            key = parse_key(raw)
            return RequestKey(key, caller.scope, admission.checks.keys.is_old(key, topic))
        return RequestKey(None if self._refuses_keyless(topic) else new_key(admission.checks.now_ms()), caller.scope)

    def _begin(self, request: RecordsRequest, work: Coroutine[Any, Any, None]) -> None:
        """Start the work of a request, unless the queue is full."""
        admission = self._admission
        if overload := admission.overload:
            work.close()
            request.responder.refuse(request.post, overload, admission.load_shedder)
        else:
            request.post.run_in_task(request.responder.or_fail(request.post, work))

    async def _results(
        self, request: RecordsRequest, records: Sequence[Event | V3Event | Problem]
    ) -> list[WriteResult]:
        """Write the records, and return the result of each. Raises Problem (504) if too many problems are in memory."""
        results: list[WriteResult] = []
        problems = 0
        admission, arrived = self._admission, request.post.arrived
        async for group in write_each(admission, records, _event_of, arrived, request.caller, request.key.fresh):
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


def _check_topic(name: str, caller: Caller) -> None:
    """Raise Problem (400, 403) for a name in a path that no topic can have, or that the caller may not write to.

    The caller's rights and the topic's rule are cached by name: names of any length would fill the memory.
    """
    check_topic_name(name)
    caller.check(name)


def _check_v3_path(path: PathParameters, caller: Caller) -> None:
    """Raise what `_check_topic` raises, and Problem (404) for a cluster's name that is longer than any id."""
    _check_topic(path["topic"], caller)
    if len(path["cluster"]) > CLUSTER_CHARS_MAX:
        raise Problem(NOT_FOUND, f"cluster: at most {CLUSTER_CHARS_MAX} characters are taken: send its id, or any word")


def _event_of(record: Event | V3Event | Problem) -> Event:
    if isinstance(record, Problem):
        raise record
    return record.event if isinstance(record, V3Event) else record


def _check_keys(records: Sequence[V3Event | Problem]) -> None:
    """Raise Problem (400) if a record lacks a key that the rule demands: the request is refused as a whole."""
    for record in records:
        if isinstance(record, Problem) and record.kind is MISSING_KEY:
            raise record


def _of_record(place: str, problem: Problem) -> Problem:
    """Add the place of a record in the request to its problem, unless the problem is about the request's header."""
    if problem.kind is MISSING_KEY:
        return problem
    detail = f"{place}.{problem.detail}"
    if isinstance(problem, ProduceProblem):
        return ProduceProblem(problem.status, problem.error_code, detail)
    return Problem(problem.kind, detail, problem.retry_after_s)


def _partition_in(path: PathParameters) -> int | None:
    """Read the partition of a path. Raises Problem (404)."""
    text = path.get("partition")
    if text is None:
        return None
    if not (text.isdecimal() and text.isascii() and len(text) <= PARTITION_DIGITS):
        raise ProduceProblem(404, PARTITION_NOT_FOUND, "partition: is not a partition's number")
    return int(text)


async def _objects_of(body: bytes) -> AsyncIterator[Text]:
    """Yield the JSON objects of a body, in time slices; a text that is no object is yielded as a problem."""
    cutter = JsonObjects()
    time_slice = TimeSlice()
    for start in range(0, len(body) + PIECE_BYTES, PIECE_BYTES):
        if start < len(body):
            cutter.feed(body[start : start + PIECE_BYTES])
        else:
            cutter.end()
        while (text := await next_text(cutter, time_slice)) is not None:
            yield text


def _v3_refusal(problem: Problem) -> tuple[int, Headers, bytes]:
    error = error_of(problem)
    return error.status, headers_of(lines_of_error(problem, V3_TYPE)), render_error(error)
