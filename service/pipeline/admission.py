"""Admits requests into the queue, within its bounds. The Resolver resolves each, at its deadline at the latest."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from service.claims.states import RequestEvent
from service.contract import Guarantee, Rules
from service.core.problems import NOT_WRITTEN, RECORD_REFUSED, Problem
from service.core.settings import TOPICS_MAX, Settings
from service.events.dead_letters import DeadLetter
from service.events.event import Event
from service.events.schemas import Schemas
from service.kafka.group_offsets import GroupOffsets
from service.pipeline.checks import EventChecks
from service.pipeline.queue import Queue
from service.pipeline.request import (
    CHUNK_EVENTS_BESIDE_SINGLE,
    CHUNK_EVENTS_MAX,
    BatchChunk,
    WriteRequest,
    WriteResult,
    known,
)
from service.pipeline.resolver import SWEEP_S, Resolver
from service.slots.store_recovery import CurrentStore

if TYPE_CHECKING:  # OpenTelemetry is imported only where it is asked for
    from service.pipeline.tracing import Tracing

log = structlog.get_logger(__name__)

# A stop waits this long for results after the last request's deadline.
DRAIN_MARGIN_S: Final = 1.0
# A request that waits for another's write is answered (201 or 409) so long before its deadline.
ANSWERED_BEFORE_DEADLINE_S: Final = 0.5


class _Handling(NamedTuple):
    """How the events of one part of a chunk are written: `ttl_s` is as in WriteRequest, `is_refused`: dead letters."""

    isolated_topic: str | None  # None: its topic is not isolated
    guarantee: Guarantee
    ttl_s: int
    is_refused: bool


class Admission:
    """The entrance of the pipeline: makes write requests of checked events, and puts them into the queue."""

    def __init__(
        self,
        settings: Settings,
        rules: Rules,
        checks: EventChecks,
        store: CurrentStore,
        queue: Queue,
        resolver: Resolver,
        tracing: "Tracing | None" = None,
    ) -> None:
        self.checks = checks
        self._rule = lru_cache(maxsize=TOPICS_MAX)(rules.rule)  # by topic
        self._quarantine_topics = rules.quarantine_topics
        self._key_ttl_s = settings.key_ttl_s
        self._timeout_s = settings.request_timeout_ms / 1000
        self._store = store
        self._queue = queue
        self._resolver = resolver
        self._tracing = tracing
        self.load_shedder = resolver.load_shedder
        self.events_max = settings.queue_events_max  # a larger request could never be admitted

    def with_rules(self, rules: Rules, schemas: Schemas) -> "Admission":
        """Return the admission by other rules into the same queue."""
        other = copy(self)
        other.checks = self.checks.with_rules(rules, schemas)
        other._rule = lru_cache(maxsize=TOPICS_MAX)(rules.rule)
        other._quarantine_topics = rules.quarantine_topics
        return other

    @property
    def is_accepting(self) -> bool:
        """False while the process stops."""
        return not self._queue.is_closed

    @property
    def overload(self) -> Problem | None:
        """503 for a single event while the queue is full, else None.

        The event is not parsed, which leaves the time to the requests in the queue, and not recorded in the journal.
        """
        return self._queue.too_many if self._queue.full else None

    @property
    def ledger_bytes_max(self) -> int:
        """Bytes of ledger entries that one transaction holds."""
        return self._queue.ledger_bytes_max

    def submit(
        self,
        event: Event,
        arrived: float,
        wait_s: float = 0.0,
        on_claim: asyncio.Future[None] | None = None,
        ttl_s: int | None = None,
    ) -> asyncio.Future[WriteResult]:
        """Write a checked event; the future gets its result within the request timeout.

        `arrived` is time.monotonic. If another request writes the same key, this one waits up to `wait_s` for it.
        `on_claim` is set when the claim stands. `ttl_s` is the retention of its key as WriteRequest has it; None for
        that of the topic. Raises Problem (503) where the request is not admitted.
        """
        rule = self._rule(event.topic)
        deadline = arrived + self._timeout_s
        wait_deadline = min(arrived + wait_s, deadline - ANSWERED_BEFORE_DEADLINE_S) if wait_s else 0.0
        future: asyncio.Future[WriteResult] = asyncio.get_running_loop().create_future()
        if ttl_s is None:
            ttl_s = rule.key_ttl_s
        self._admit(
            WriteRequest.for_event(event, arrived, deadline, rule.guarantee, ttl_s, future, wait_deadline, on_claim)
        )
        return future

    async def submit_atomic(
        self,
        key: str,
        events: Sequence[Event],
        batch_pair: tuple[bytes, bytes],
        arrived: float,
        sent_ms: int | None = None,
        offsets: GroupOffsets | None = None,
    ) -> WriteResult:
        """Write events of checked content in one transaction or not at all; `batch_pair` is its (id, fingerprint).

        Its keys are remembered for the longest retention of its topics. `arrived` is time.monotonic, `sent_ms` that of
        KeyAge. `offsets` are committed in the same transaction; only with them may there be no events. Raises Problem
        where a topic is idempotent, or the batch is not admitted.
        """
        for event in events:
            if self._rule(event.topic).guarantee is not Guarantee.EXACTLY_ONCE:
                detail = f"topic: {event.topic} is idempotent, which no atomic batch can be: send its events singly"
                raise Problem(RECORD_REFUSED, detail)
        topics = {event.topic for event in events}
        longest_s = max([self._rule(topic).key_ttl_s or self._key_ttl_s for topic in topics], default=self._key_ttl_s)
        deadline = arrived + self._timeout_s
        await self.checks.keys.check_age_of_batch(key, batch_pair[0], topics, longest_s, deadline, sent_ms)
        ttl_s = 0 if longest_s == self._key_ttl_s else longest_s
        future: asyncio.Future[WriteResult] = asyncio.get_running_loop().create_future()
        self._admit(WriteRequest.for_atomic(events, batch_pair, arrived, deadline, ttl_s, future, offsets))
        return await future

    def replay(
        self,
        events: Sequence[Event],
        written: WriteResult,
        arrived: float,
        batch_pair: tuple[bytes, bytes] | None = None,
    ) -> asyncio.Future[WriteResult]:
        """Return the result of a request that was written before. It is counted and journaled, and not submitted.

        `batch_pair` is an atomic batch's (id, fingerprint), None for a single event.
        """
        future = known(written)
        deadline = arrived + self._timeout_s
        if batch_pair is None:
            rule = self._rule(events[0].topic)
            request = WriteRequest.for_event(events[0], arrived, deadline, rule.guarantee, rule.key_ttl_s, future)
        else:
            request = WriteRequest.for_atomic(events, batch_pair, arrived, deadline, 0, future)
        self._resolver.note(request, request.shown(written), time.monotonic())
        return future

    def _admit(self, request: WriteRequest) -> None:
        """Put a request into the queue, and its deadline into the sweep. Raises Problem (503) and records it."""
        self._count(request)
        self._resolver.keep_deadline(request)
        self._queue.put(request)

    def _count(self, request: WriteRequest) -> None:
        """Count a request into the queue's bounds. Raises and records Problem (503)."""
        try:
            if self._queue.is_closed:
                raise Problem(NOT_WRITTEN, "this process is stopping: send it again, to another")
            if self._store.generation is None:
                raise Problem(NOT_WRITTEN, f"the key store is not complete ({self._store.status}): send it again")
            self._queue.admit(request)
        except Problem as problem:
            self._resolver.note(request, problem, time.monotonic())
            raise
        if self._tracing is not None:
            self._tracing.begin(request, time.monotonic())

    async def drain(self) -> None:
        """Stop accepting requests, and wait until all accepted ones are answered: until their deadlines, at most."""
        self._queue.close()
        ends_at = time.monotonic() + self._timeout_s + DRAIN_MARGIN_S
        while self._queue.events > 0 and time.monotonic() < ends_at:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(SWEEP_S)
        if self._queue.events:
            log.error("requests were left without an answer", events=self._queue.events)

    # ------------------------------------------------------------------------------------------- chunks of a batch

    def new_chunk(self) -> BatchChunk:
        """Make an empty chunk, which takes what one transaction, and the queue, can hold.

        It is smaller while there is a request other than chunks, unanswered or answered since the last sweep.
        """
        most = CHUNK_EVENTS_BESIDE_SINGLE if self._resolver.by_deadline else CHUNK_EVENTS_MAX
        return BatchChunk(min(most, self.events_max), *self._queue.group_bytes_max)

    async def submit_chunk(self, chunk: BatchChunk) -> list[WriteResult]:
        """Write the checked events of a chunk, in their order; returns the result of each.

        The events are written together. If they cannot be, they are written in parts, one after the other, which keeps
        their order: one part for each isolated topic, for each guarantee and for each retention of keys. A part that
        fails is split in halves, so that an event that the broker refuses is found in log₂ n transactions.
        """
        results: list[WriteResult | None] = [None] * len(chunk.events)
        rule, arrived = self._rule(chunk.events[0].topic), time.monotonic()
        request = WriteRequest.for_chunk(
            chunk.events, arrived, arrived + self._timeout_s, rule.guarantee, rule.key_ttl_s
        )
        try:
            self._count(request)
        except Problem as problem:
            return [problem.as_result()] * len(chunk.events)
        parts = deque(self._split_by_handling(request))
        put = self._queue.put
        try:
            while parts:
                failed = await self._send(parts.popleft(), results, put)
                parts.extendleft(part for each in reversed(failed) for part in reversed(self._halves(each)))
                put = self._put_back  # the following parts have waited already
        finally:
            for part in parts:  # there are some only if this coroutine was cancelled
                self._resolver.resolve(part, Problem(NOT_WRITTEN, "its batch was given up: send it again"))
        return [result for result in results if result is not None]

    def _put_back(self, request: WriteRequest) -> None:
        self._queue.put_back((request,))

    async def _send(
        self, part: WriteRequest, results: list[WriteResult | None], put: Callable[[WriteRequest], None]
    ) -> list[WriteRequest]:
        """Await the write of a part of a chunk, until its deadline. Returns the requests to split and send again."""
        collector = part.collect_in(results)
        part.timer = asyncio.get_running_loop().call_at(part.deadline, self._resolver.expire, part)
        put(part)
        failed = await collector.done  # if this is cancelled, the part goes on until its result or its deadline
        part.timer.cancel()
        return failed

    def _split_by_handling(self, request: WriteRequest) -> list[WriteRequest]:
        """Split a chunk into parts whose events are handled alike, those without an isolated topic first."""
        handlings = {topic: self._handling_of(topic) for topic in request.topics}
        if len(set(handlings.values())) == 1 and self._quarantine_topics.isdisjoint(handlings):
            return [request]
        indexes: dict[_Handling, list[int]] = {}
        for index, event in enumerate(request.events):
            handling = handlings[event.topic]
            if isinstance(event, DeadLetter):  # its retention is that of the event for which it stands
                handling = handling._replace(ttl_s=event.ttl_s, is_refused=True)
            indexes.setdefault(handling, []).append(index)
        parts = [
            request.part(indexes[handling], guarantee=handling.guarantee, ttl_s=handling.ttl_s)
            for handling in sorted(indexes, key=lambda handling: handling.isolated_topic is not None)
        ]
        if len(parts) > 1:
            request.move(RequestEvent.SPLIT)
        return parts

    def _handling_of(self, topic: str) -> _Handling:
        rule = self._rule(topic)
        isolated_topic = topic if self._queue.is_isolated((topic,)) else None
        return _Handling(isolated_topic, rule.guarantee, rule.key_ttl_s, is_refused=False)

    def _halves(self, request: WriteRequest) -> list[WriteRequest]:
        """Split a chunk that failed into parts whose events are handled alike, or if all are, in halves."""
        events = range(len(request.events))
        half = len(events) // 2
        queued = request.to_send_again()
        parts = self._split_by_handling(queued)
        return [queued.part(each) for each in (events[:half], events[half:]) if each] if len(parts) == 1 else parts
