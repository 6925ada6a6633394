"""Version 2 of the produce API: `POST /topics/…`. A malformed record refuses its request; else each has a result."""

from functools import partial
from typing import Final

from starlette.routing import Route

from service.core.problems import TOO_LARGE, Problem
from service.core.time_slice import TimeSlice
from service.events.event import Event
from service.events.produce import PARTITION_NOT_FOUND, Format, ProduceProblem
from service.events.produce_v2 import V2_FORMATS, check_long_v2, parse_v2, v2_event, v2_format
from service.events.strict_json import LONG_BYTES
from service.http.caller import Caller
from service.http.headers import UsedHeaders, essence, unsupported
from service.http.produce import (
    PathEndpoint,
    PathParameters,
    ProduceRequests,
    RecordsRequest,
    check_topic,
    of_record,
)
from service.http.produce_answers import V2_TYPE, failure_of, render_offsets, render_v2
from service.http.request import PostRequest
from service.http.responder import in_slices, rendered

PARTITION_DIGITS: Final = 9


class ProduceV2:
    """The handler of `POST /topics/…`."""

    def __init__(self, requests: ProduceRequests) -> None:
        self._requests = requests

    def routes(self) -> list[Route]:
        """Make the routes of the version's POSTs."""
        endpoint = PathEndpoint(self._take, self._requests.guard)
        return [
            Route("/topics/{topic}", endpoint, methods=["POST"]),
            Route("/topics/{topic}/partitions/{partition}", endpoint, methods=["POST"]),
        ]

    def _take(self, path: PathParameters, post: PostRequest) -> None:
        self._requests.guard.take(partial(self._post, path), self._requests.responder(V2_TYPE).fail, post)

    def _post(self, path: PathParameters, post: PostRequest, used: UsedHeaders, caller: Caller) -> None:
        check_topic(path["topic"], caller)
        data_format = v2_format(essence(used.get(b"content-type")), self._requests.schemas)
        if data_format is None:
            raise unsupported(*V2_FORMATS)
        request = self._requests.request(V2_TYPE, path, post, used, caller)
        self._requests.begin(request, self._write(request, data_format, _partition_in(path)))

    async def _write(self, request: RecordsRequest, data_format: Format, partition: int | None) -> None:
        records, schemas = await parse_v2(request.post.body, data_format)
        use = self._requests.schema_use(request.topic)
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
                    raise of_record(f"records[{index}]", problem) from None
                events.append(problem.as_result())
        results = await self._requests.results(request, events)
        if failure := failure_of(results):
            raise failure
        pieces = await rendered(request.post, in_slices(results), render_offsets)
        request.answer(results, render_v2(pieces, events))


def _partition_in(path: PathParameters) -> int | None:
    """Read the partition of a path. Raises Problem (404)."""
    text = path.get("partition")
    if text is None:
        return None
    if not (text.isdecimal() and text.isascii() and len(text) <= PARTITION_DIGITS):
        raise ProduceProblem(404, PARTITION_NOT_FOUND, "partition: is not a partition's number")
    return int(text)
