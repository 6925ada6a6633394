"""Answers POSTs, and counts the answers: results as bytes, problems, and errors that are bugs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import structlog

from service.core.metrics import Telemetry
from service.core.problems import INTERNAL, OUTCOME_UNKNOWN, Problem
from service.core.supervision import failure_of
from service.core.time_slice import TimeSlice
from service.http.request import PostRequest
from service.http.responses import lines_of, render_problem
from service.pipeline.load_shedding import LoadShedder

log = structlog.get_logger(__name__)

TOO_MANY_RESPONSES: Final = "response: too many large ones are not read yet: send the request again, with the same keys"

# Results to render in one step, which takes a fraction of a time slice, also if each is a different problem.
RENDERED_AT_ONCE: Final = 50

T = TypeVar("T")


def check_room(post: PostRequest, size: int) -> None:
    """Note that the response of a request that may be written has `size` bytes so far. Raises Problem (504)."""
    if not post.hold_response(size):
        raise Problem(OUTCOME_UNKNOWN, TOO_MANY_RESPONSES)


async def in_slices(results: Sequence[T], time_slice: TimeSlice | None = None) -> AsyncIterator[Sequence[T]]:
    """Yield results to render in steps of RENDERED_AT_ONCE, in time slices."""
    time_slice = time_slice or TimeSlice()
    for start in range(0, len(results), RENDERED_AT_ONCE):
        if time_slice.is_over:
            await time_slice.next()
        yield results[start : start + RENDERED_AT_ONCE]


async def in_steps(groups: AsyncIterator[Sequence[T]]) -> AsyncIterator[Sequence[T]]:
    """Yield groups of results as `in_slices` does each, as they are known."""
    time_slice = TimeSlice()
    async for group in groups:
        async for results in in_slices(group, time_slice):
            yield results


async def rendered(
    post: PostRequest, groups: AsyncIterator[Sequence[T]], render: Callable[[Sequence[T]], bytes]
) -> list[bytes]:
    """Render the parts of a response, which are in memory until the client has read it. Raises Problem (504)."""
    pieces: list[bytes] = []
    size = 0
    async for group in groups:
        pieces.append(render(group))
        size += len(pieces[-1])
        check_room(post, size)
    return pieces


class Responder:
    """Answers the requests of one endpoint. `named` returns the fields by which the log names a request."""

    def __init__(self, telemetry: Telemetry, named: Callable[[PostRequest], dict[str, str]]) -> None:
        self._telemetry = telemetry
        self._named = named

    def answer(self, post: PostRequest, status: int, lines: bytes, body: bytes, code: str = "") -> None:
        """Answer with header lines, each with its CRLF, and a body; `code` is that of a problem."""
        self._telemetry.requested(status, code)
        post.answer(status, lines, body)

    def succeed(self, post: PostRequest, lines: bytes, body: bytes, *, replayed: bool) -> None:
        """Answer 201; `replayed`: an earlier request wrote the event."""
        self.answer(post, 201, lines, body)

    def fail(self, post: PostRequest, error: Exception, more: bytes = b"") -> None:
        """Answer with a problem, and `more` header lines.

        An error other than a Problem is a bug, after which the outcome of the event is unknown. The connection ends
        then, also if the bug is in the answering: a client must not wait for a response that never comes.
        """
        if not isinstance(error, Problem):
            log.error("request failed", **self._named(post), exc_info=error)
            error = Problem(INTERNAL, "send it again, with the same key")
            post.keep_alive = False
            if post.answered:
                post.cut()
                return
        post.release_response()  # of what was rendered
        status, lines, body = self.render(error)
        self.answer(post, status, lines + more, body, error.kind.code)

    def render(self, problem: Problem) -> tuple[int, bytes, bytes]:
        """Render the status, the header lines and the body of a problem, in the form of the endpoint's API."""
        status, headers, body = render_problem(problem)
        return status, lines_of(headers), body

    async def or_fail(self, post: PostRequest, work: Coroutine[Any, Any, None]) -> None:
        """Await the work of a request, and answer with the problem that it raises; cancelled from within, as a bug."""
        try:
            await work
        except (Exception, asyncio.CancelledError) as error:
            self.fail(post, failure_of(error))

    def refuse(self, post: PostRequest, overload: Problem, load_shedder: LoadShedder) -> None:
        """Answer 503, now or after a delay, because the queue is full."""
        delay = load_shedder.delay(post.arrived)
        if delay is None:
            self.fail(post, overload)
        else:
            post.drop_body()  # the refusal needs no body
            delay.add_done_callback(lambda _: self.fail(post, overload))
