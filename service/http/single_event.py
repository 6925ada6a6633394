"""Writes the one event of a request: looks up what is not cached, submits the event, and answers with its result."""

import asyncio
from collections.abc import Callable
from functools import partial

from service.core.problems import Problem
from service.events.event import Event
from service.http.prefer import NONE, Preference
from service.http.request import PostRequest
from service.http.responder import Responder
from service.http.responses import JSON_LINE, echo_of, location_of, render_metadata
from service.pipeline.admission import Admission
from service.pipeline.request import Committed, WriteResult

# Renders the header lines of a 201 from the key, the result, and the retention of keys without a rule, in seconds.
LinesOf = Callable[[str, Committed, int], bytes]


class SingleEventWriter:
    """Writes events that come one in a request, and answers their requests: 201, 202, or a problem."""

    def __init__(self, admission: Admission, responder: Responder, lines_of: LinesOf, retention_s: int) -> None:
        self._admission = admission
        self._responder = responder
        self._lines_of = lines_of
        self._retention_s = retention_s

    def write(self, post: PostRequest, event: Event, preference: Preference = NONE) -> None:
        """Submit an event, in a task if its topic, its schema or its old key must be looked up. Raises Problem."""
        if self._admission.checks.check_now(event):
            self._submit(post, event, preference)
        else:
            post.run_in_task(self._responder.or_fail(post, self._look_up_first(post, event, preference)))

    async def _look_up_first(self, post: PostRequest, event: Event, preference: Preference) -> None:
        await self._admission.checks.check(event, post.arrived)
        self._submit(post, event, preference)

    def _submit(self, post: PostRequest, event: Event, preference: Preference) -> None:
        """Submit a checked event; its request is answered when it has a result, or its claim stands (202)."""
        on_claim: asyncio.Future[None] | None = None
        if preference.respond_async:
            on_claim = asyncio.get_running_loop().create_future()
            on_claim.add_done_callback(partial(self._answer_202, post, event))
        result = self._admission.submit(event, post.arrived, preference.wait_s, on_claim)
        result.add_done_callback(partial(self._answer, post, event.key, preference.applied))

    def _answer_202(self, post: PostRequest, event: Event, _: asyncio.Future[None]) -> None:
        """Answer 202 once the key is claimed (`respond-async`); the client asks for the outcome by the key."""
        lines = b"%blocation: %b\r\nidempotency-key: %b\r\npreference-applied: respond-async\r\n"
        lines %= JSON_LINE, location_of(event.key), echo_of(event.key)
        self._responder.answer(post, 202, lines, b'{"id":"%b","state":"in_progress"}' % event.id.hex().encode())

    def _answer(self, post: PostRequest, key: str, applied: bytes, result: asyncio.Future[WriteResult]) -> None:
        """Answer with the result of an event: 201, or a problem. `applied` is its Preference-Applied line."""
        if post.answered:  # with 202
            return
        try:
            answer = result.result()
            if isinstance(answer, Problem):
                self._responder.fail(post, answer, applied)
            else:
                lines = self._lines_of(key, answer, self._retention_s) + applied
                self._responder.answer(post, 201, lines, render_metadata(answer.deliveries[0]))
        except Exception as error:
            self._responder.fail(post, error)
