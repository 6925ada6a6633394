"""Writes the one event of a request: looks up what is not cached, submits the event, and answers with its result."""

import asyncio
from collections.abc import Callable, Coroutine
from copy import copy
from functools import partial
from typing import Any

from service.core.problems import RECORD_REFUSED, Problem
from service.events.dead_letters import DeadLetter
from service.events.event import Event
from service.http.caller import Sender
from service.http.prefer import NO_PREFERENCE, Preference
from service.http.request import PostRequest
from service.http.responder import Responder
from service.http.responses import JSON_LINE, echo_of, key_lines, location_of, render_metadata
from service.pipeline.admission import Admission
from service.pipeline.request import Committed, Quarantined, WriteResult

# Renders the header lines of a 201 from the key, the result, and the retention of keys for which no rule sets one.
LinesOf = Callable[[str, Committed, int], bytes]


class SingleEventWriter:
    """Writes events that come one in a request, and answers their requests: 201, 202, or a problem."""

    def __init__(self, admission: Admission, responder: Responder, lines_of: LinesOf, retention_s: int) -> None:
        self._admission = admission
        self._responder = responder
        self._lines_of = lines_of
        self._retention_s = retention_s

    def write(self, post: PostRequest, event: Event, sender: Sender, preference: Preference = NO_PREFERENCE) -> None:
        """Submit an event, in a task if its topic, its schema or its old key must be looked up. Raises Problem.

        If the event is refused and the rules name a quarantine topic for it, its dead letter is submitted.
        """
        if sender.quarantine:
            self._run(post, self._write_or_quarantine(post, event, sender, preference))
            return
        try:
            is_checked = self._admission.checks.check_now(event, sender.age)
        except Problem as problem:
            self._run(post, self._quarantine(post, event, sender, preference, problem))
            return
        if is_checked:
            self._submit(post, event, sender, preference)
        else:
            self._run(post, self._look_up_first(post, event, sender, preference))

    def replay(self, post: PostRequest, event: Event, written: WriteResult, preference: Preference) -> None:
        """Answer with the result of an event that was written before."""
        result = self._admission.replay((event,), written, post.arrived)
        self._answer(post, event.key, preference, result)

    def write_letter(self, post: PostRequest, letter: DeadLetter, sender: Sender, preference: Preference) -> None:
        """Submit the dead letter of a body from which no event could be made, in a task."""
        self._run(post, self._check_letter(post, letter, sender, preference))

    def _run(self, post: PostRequest, work: Coroutine[Any, Any, None]) -> None:
        post.run_in_task(self._responder.or_fail(post, work))

    async def _look_up_first(self, post: PostRequest, event: Event, sender: Sender, preference: Preference) -> None:
        try:
            written = await self._admission.checks.check(event, post.arrived, age=sender.age)
        except Problem as problem:
            await self._quarantine(post, event, sender, preference, problem)
            return
        if written is None:
            self._submit(post, event, sender, preference)
        else:
            self.replay(post, event, written, preference)

    async def _write_or_quarantine(
        self, post: PostRequest, event: Event, sender: Sender, preference: Preference
    ) -> None:
        """Write the event of a source with a quarantine topic, or its dead letter, also if a broker refuses the event.

        Raises Problem.
        """
        asked = copy(event)  # before a schema of a registry encodes it
        try:
            written = await self._admission.checks.check(event, post.arrived, age=sender.age)
        except Problem as problem:
            await self._quarantine(post, asked, sender, preference, problem)
            return
        if written is not None:
            self.replay(post, event, written, preference)
            return
        result = self._admission.submit(event, post.arrived, preference.wait_s, ttl_s=sender.age.ttl_s)
        answer = await result
        if isinstance(answer, Problem) and answer.kind is RECORD_REFUSED and not isinstance(answer, Quarantined):
            await self._quarantine(post, asked, sender, preference, answer)
        else:
            self._answer(post, event.key, preference, result)

    async def _quarantine(
        self, post: PostRequest, event: Event, sender: Sender, preference: Preference, problem: Problem
    ) -> None:
        """Submit the dead letter of a refused event. Raises the problem itself where no rule asks for one."""
        letter = await self._admission.checks.dead_letter(
            event, problem, sender.scope, post.arrived, age=sender.age, quarantine=sender.quarantine
        )
        self._submit_letter(post, letter, preference)

    async def _check_letter(
        self, post: PostRequest, letter: DeadLetter, sender: Sender, preference: Preference
    ) -> None:
        await self._admission.checks.check_dead_letter(letter, post.arrived, sender.age)
        self._submit_letter(post, letter, preference)

    def _submit_letter(self, post: PostRequest, letter: DeadLetter, preference: Preference) -> None:
        """Submit a dead letter. Its client waits for its answer, also with `respond-async`: the refusal is known."""
        result = self._admission.submit(letter, post.arrived, preference.wait_s, ttl_s=letter.ttl_s)
        result.add_done_callback(partial(self._answer, post, letter.key, preference))

    def _submit(self, post: PostRequest, event: Event, sender: Sender, preference: Preference) -> None:
        """Submit a checked event; its request is answered when it has a result, or its claim stands (202)."""
        on_claim: asyncio.Future[None] | None = None
        if preference.respond_async:
            on_claim = asyncio.get_running_loop().create_future()
            on_claim.add_done_callback(partial(self._answer_202, post, event))
        result = self._admission.submit(event, post.arrived, preference.wait_s, on_claim, sender.age.ttl_s)
        result.add_done_callback(partial(self._answer, post, event.key, preference))

    def _answer_202(self, post: PostRequest, event: Event, _: asyncio.Future[None]) -> None:
        """Answer 202 once the key is claimed (`respond-async`); the client asks for the outcome by the key."""
        lines = b"%blocation: %b\r\nidempotency-key: %b\r\npreference-applied: respond-async\r\n"
        lines %= JSON_LINE, location_of(event.key), echo_of(event.key)
        self._responder.answer(post, 202, lines, b'{"id":"%b","state":"in_progress"}' % event.id.hex().encode())

    def _answer(self, post: PostRequest, key: str, preference: Preference, result: asyncio.Future[WriteResult]) -> None:
        """Answer with the result of an event: 201, or a problem."""
        if post.answered:  # with 202
            return
        try:
            answer = result.result()
            if isinstance(answer, Quarantined):
                lines = key_lines(key, answer, self._retention_s) + preference.applied + preference.repeatable
                self._responder.fail(post, answer, lines)
            elif isinstance(answer, Problem):
                self._responder.fail(post, answer, preference.applied)
            else:
                lines = self._lines_of(key, answer, self._retention_s) + preference.applied + preference.repeatable
                self._responder.succeed(post, lines, render_metadata(answer.deliveries[0]), replayed=answer.replayed)
        except Exception as error:
            self._responder.fail(post, error)
