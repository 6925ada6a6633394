"""Version 3 of the produce API: `POST /v3/clusters/…/records`, whole or streamed, and `…/records:batch`.

Each record has a result of its own. A short request with a Content-Length is read whole.
"""

import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Raw
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from service.core.problems import MISSING_KEY, NOT_FOUND, NOT_WRITTEN, TOO_LARGE, Problem
from service.core.time_slice import TimeSlice
from service.events.event import BATCH_EVENTS_MAX, Event
from service.events.json_objects import JsonObjects
from service.events.produce import UNPROCESSABLE, ProduceProblem
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
from service.http.caller import Caller
from service.http.encodings import PIECE_BYTES
from service.http.headers import JSON, UsedHeaders, essence, unsupported
from service.http.produce import (
    PROBLEM_BYTES,
    PathEndpoint,
    PathParameters,
    ProduceRequests,
    RecordsRequest,
    check_topic,
    of_record,
)
from service.http.produce_answers import (
    V3_TYPE,
    error_of,
    lines_of_error,
    render_error,
    render_v3,
    render_v3_batch,
    render_v3_end,
)
from service.http.request import PostRequest
from service.http.responder import TOO_MANY_RESPONSES, check_room, in_slices, rendered
from service.http.responses import Headers, headers_of
from service.http.streamed_body import Text, next_text
from service.http.streaming import Exchange, StreamEndpoint, StreamHead
from service.pipeline.request import WriteResult

# Characters of a cluster's id in a path, which each answer repeats; Kafka's ids have 22.
CLUSTER_CHARS_MAX: Final = 255

# What is before /v3 in the paths of the API: nothing at the REST Proxy, /kafka at Confluent Server and Confluent Cloud.
V3_PREFIXES: Final = ("", "/kafka")

# Writes the records of a request, and answers it; the text is the cluster of its path.
V3Writer = Callable[[RecordsRequest, str], Coroutine[Any, Any, None]]


class StreamedRecord:
    """The event that was made of a record of a stream, in `made`; None if none could be made."""

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


class ProduceV3:
    """The handlers of the POSTs below `/v3`."""

    def __init__(self, requests: ProduceRequests) -> None:
        self._requests = requests

    def routes(self) -> list[Route]:
        """Make the routes of the version's POSTs."""
        requests = self._requests
        stream = StreamEndpoint(requests.guard, requests.admission, requests.telemetry, self._stream, _refusal)
        records = BySize(PathEndpoint(partial(self._take, self._write_records), requests.guard), stream)
        batch = PathEndpoint(partial(self._take, self._write_batch), requests.guard)
        path = "/v3/clusters/{cluster}/topics/{topic}/records"
        return [
            Route(f"{prefix}{path}{more}", endpoint, methods=["POST"], include_in_schema=not prefix)
            for prefix in V3_PREFIXES
            for more, endpoint in (("", records), (":batch", batch))
        ]

    def _take(self, write: V3Writer, path: PathParameters, post: PostRequest) -> None:
        self._requests.guard.take(partial(self._post, write, path), self._requests.responder(V3_TYPE).fail, post)

    def _post(
        self, write: V3Writer, path: PathParameters, post: PostRequest, used: UsedHeaders, caller: Caller
    ) -> None:
        _check_path(path, caller)
        if essence(used.get(b"content-type")) != JSON:
            raise unsupported(JSON)
        request = self._requests.request(V3_TYPE, path, post, used, caller)
        self._requests.begin(request, write(request, path["cluster"]))

    async def _write_records(self, request: RecordsRequest, cluster: str) -> None:
        records = await self._parse_records(request)
        _check_keys(records)
        request.caller.spend(len(records), request.post.size)
        results = await self._requests.results(request, _events(records))
        answers = in_slices([*zip(records, results, strict=True)])
        request.answer(results, b"".join(await rendered(request.post, answers, partial(render_v3, cluster))))

    async def _parse_records(self, request: RecordsRequest) -> list[V3Event | Problem]:
        """Parse the records of a v3 body. Raises Problem (413, 422) for none, and for too many."""
        records: list[V3Event | Problem] = []
        problems, use = 0, self._requests.schema_use(request.topic)
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
        results = await self._requests.results(request, _events(records))
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
                raise of_record(f"entries[{index}]", problem) from None
        records: list[V3Event | Problem] = []
        use = self._requests.schema_use(request.topic)
        time_slice = TimeSlice()
        for (id, _), entry in zip(entries, parsed, strict=True):
            if time_slice.is_over:
                await time_slice.next()
            try:
                records.append(v3_event(entry, id, request.topic, request.key, request.traceparent, use))
            except Problem as problem:
                records.append(problem.as_result())
        return records

    def _stream(self, head: StreamHead) -> Exchange:
        """Begin a v3 request whose records are written as they come. Raises Problem (400, 403, 404, 415)."""
        _check_path(head.path_params, head.caller)
        topic, cluster = head.path_params["topic"], head.path_params["cluster"]
        if essence(head.used.get(b"content-type")) != JSON:
            raise unsupported(JSON)
        of_request, use = self._requests.key_of(head.used, topic, head.caller), self._requests.schema_use(topic)
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

        lines = self._requests.responder(V3_TYPE, of_request.key).lines()
        return Exchange(JsonObjects(), parse, render, render_v3_end, 200, lines, of_request.fresh)


def _check_path(path: PathParameters, caller: Caller) -> None:
    """Raise what `check_topic` raises, and Problem (404) for a cluster's name that is longer than any id."""
    check_topic(path["topic"], caller)
    if len(path["cluster"]) > CLUSTER_CHARS_MAX:
        raise Problem(NOT_FOUND, f"cluster: at most {CLUSTER_CHARS_MAX} characters are taken: send its id, or any word")


def _events(records: Sequence[V3Event | Problem]) -> list[Event | Problem]:
    return [record if isinstance(record, Problem) else record.event for record in records]


def _check_keys(records: Sequence[V3Event | Problem]) -> None:
    """Raise Problem (400) if a record lacks a key that the rule demands: the request is refused as a whole."""
    for record in records:
        if isinstance(record, Problem) and record.kind is MISSING_KEY:
            raise record


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


def _refusal(problem: Problem) -> tuple[int, Headers, bytes]:
    error = error_of(problem)
    return error.status, headers_of(lines_of_error(problem, V3_TYPE)), render_error(error)
