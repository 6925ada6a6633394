"""Admits requests into the queue within its bounds, answers them by their deadline, and records the answers."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import structlog

from service.claims.states import (
    MAYBE_WRITTEN,
    Claimed,
    Delivered,
    DeliveredBatch,
    KeyState,
    RequestEvent,
    RequestState,
)
from service.contract import Guarantee, Rules
from service.core.metrics import Telemetry
from service.core.problems import (
    FORBIDDEN_TOPIC,
    KEY_EXPIRED,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    RECORD_REFUSED,
    UNKNOWN_TOPIC,
    KafkaAway,
    KafkaForbids,
    Problem,
    StoreAway,
    StoreLost,
    StoreUnanswered,
)
from service.core.settings import TOPICS_MAX, Settings
from service.core.time_of_day import now_ms
from service.events.event import NONE_IS_PLAIN, Event, check_topic, plain_bytes_max
from service.events.key_time import made_at_ms
from service.events.schemas import Schemas
from service.kafka.admin import Topic
from service.kafka.topics import InternalTopics, TopicMetadataCache
from service.pipeline.journal import Journal
from service.pipeline.load_shedding import LoadShedder
from service.pipeline.queue import Queue
from service.pipeline.request import (
    CHUNK_EVENTS_BESIDE_SINGLE,
    CHUNK_EVENTS_MAX,
    BatchChunk,
    Committed,
    ResultCollector,
    WriteRequest,
    WriteResult,
)
from service.slots.recovery import CurrentStore

if TYPE_CHECKING:  # OpenTelemetry is imported only where it is asked for
    from service.pipeline.tracing import Tracing

log = structlog.get_logger(__name__)

SWEEP_S: Final = 0.02
# A stop waits this long for answers after the last request's deadline.
DRAIN_MARGIN_S: Final = 1.0
# A request that waits for another's write is answered (201 or 409) so long before its deadline.
ANSWERED_BEFORE_DEADLINE_S: Final = 0.5
# Between two sweeps while no request waits for its answer: the deadline of one that arrives meanwhile is further off.
SWEEP_IDLE_S: Final = 0.1
# Answered requests that may be kept behind one that waits, and their bytes.
ANSWERED_KEPT: Final = 1_000
ANSWERED_BYTES_KEPT: Final = 4 * 1024 * 1024


class Admission:
    """Puts requests into the queue, and answers each request once, by its deadline."""

    def __init__(
        self,
        settings: Settings,
        rules: Rules,
        schemas: Schemas,
        store: CurrentStore,
        queue: Queue,
        topics: InternalTopics,
        topic_metadata: TopicMetadataCache,
        journal: Journal,
        telemetry: Telemetry,
        tracing: "Tracing | None" = None,
        now_ms: Callable[[], int] = now_ms,
    ) -> None:
        self.now_ms = now_ms  # the brokers' time, ms since the Unix epoch
        self._settings = settings
        self._guarantee = lru_cache(maxsize=TOPICS_MAX)(rules.guarantee)  # by topic
        self._ttl_s = lru_cache(maxsize=TOPICS_MAX)(lambda topic: rules.rule(topic).key_ttl_s)
        self._takes_old_keys = lru_cache(maxsize=TOPICS_MAX)(lambda topic: rules.rule(topic).takes_old_keys)
        self._schemas = schemas
        self._store = store
        self._queue = queue
        self._topics = topics
        self._topic_metadata = topic_metadata
        self._journal = journal
        self._telemetry = telemetry
        self._tracing = tracing
        self._timeout_s = settings.request_timeout_ms / 1000
        # From the look-up of an old key to its claim an event waits for its chunk and in the queue. Besides, the clocks
        # of brokers and Redis differ.
        self._old_key_margin_ms = 2 * (settings.request_timeout_ms + settings.transaction_timeout_ms)
        self.events_max = settings.queue_events_max  # a larger request could never be admitted
        self._by_deadline: deque[WriteRequest] = deque()  # without chunks; ordered by deadline
        self._by_deadline_bytes = 0
        self.load_shedder = LoadShedder()
        self.is_accepting = True  # False while the process stops

    def submit(
        self, event: Event, arrived: float, wait_s: float = 0.0, on_claim: asyncio.Future[None] | None = None
    ) -> asyncio.Future[WriteResult]:
        """Write a checked event; the future gets its result within the request timeout.

        `arrived` is time.monotonic. If another request writes the same key, this one waits up to `wait_s` for it.
        `on_claim` is set when the claim stands. Raises Problem (503) where the request is not admitted.
        """
        request = WriteRequest.of((event,), arrived, self._timeout_s, self._guarantee(event.topic))
        request.ttl_s = self._ttl_s(event.topic)
        future: asyncio.Future[WriteResult] = asyncio.get_running_loop().create_future()
        request.future = future
        if wait_s:
            request.wait_deadline = min(arrived + wait_s, request.deadline - ANSWERED_BEFORE_DEADLINE_S)
        request.on_claim = on_claim
        self._admit(request)
        return future

    def new_chunk(self) -> BatchChunk:
        """Make an empty chunk, which takes what one transaction, and the queue, can hold.

        It is smaller while there is a request other than chunks, unanswered or answered since the last sweep.
        """
        most = CHUNK_EVENTS_BESIDE_SINGLE if self._by_deadline else CHUNK_EVENTS_MAX
        return BatchChunk(min(most, self.events_max), self.ledger_bytes_max)

    async def submit_chunk(self, chunk: BatchChunk) -> list[WriteResult]:
        """Write the checked events of a chunk, in their order; returns the result of each.

        The events are written together. If they cannot be, they are written in parts, one after the other, which keeps
        their order: one part for each quarantined topic, for each guarantee and for each retention of keys. A part that
        fails is split in halves, so that an event that the broker refuses is found in log₂ n transactions.
        """
        results: list[WriteResult | None] = [None] * len(chunk.events)
        request = WriteRequest.of(chunk.events, time.monotonic(), self._timeout_s, Guarantee.EXACTLY_ONCE)
        request.indexes = range(len(chunk.events))
        try:
            self._check_in(request)
        except Problem as problem:
            return [problem.as_result()] * len(chunk.events)
        parts = deque(self._split_by_queue(request))
        put = self._queue.put
        try:
            while parts:
                failed = await self._send(parts.popleft(), results, put)
                parts.extendleft(part for each in reversed(failed) for part in reversed(self._halves(each)))
                put = self._put_back  # the following parts have waited already
        finally:
            for part in parts:  # there are some only if this coroutine was cancelled
                self.answer(part, Problem(NOT_WRITTEN, "its batch was given up: send it again"))
        return [result for result in results if result is not None]

    def _put_back(self, request: WriteRequest) -> None:
        self._queue.put_back((request,))

    async def _send(
        self, part: WriteRequest, results: list[WriteResult | None], put: Callable[[WriteRequest], None]
    ) -> list[WriteRequest]:
        """Await the write of a part of a chunk, until its deadline. Returns the requests to split and send again."""
        part.collector = ResultCollector(results, len(part.events))
        deadline = asyncio.get_running_loop().call_at(part.deadline, self._expire, part)
        put(part)
        failed = await part.collector.done  # if this is cancelled, the part goes on until its deadline
        deadline.cancel()
        return failed

    def _expire(self, request: WriteRequest) -> None:
        self.answer(request, self.too_late(request))

    def _split_by_queue(self, request: WriteRequest) -> list[WriteRequest]:
        """Split a chunk by guarantee, retention and quarantined topic, the parts without a quarantined topic first."""
        topics = request.topics
        queues = {topic: (self._queue.is_quarantined((topic,)), *self._rules_of(topic)) for topic in topics}
        if len(topics) > 1 and len(set(queues.values())) > 1:
            indexes: dict[tuple[bool, Guarantee, int, str], list[int]] = {}
            for index, event in enumerate(request.events):
                queue = queues[event.topic]
                indexes.setdefault((*queue, event.topic if queue[0] else ""), []).append(index)
            parts = [request.part(indexes[queue]) for queue in sorted(indexes, key=lambda queue: queue[0])]
            request.move(RequestEvent.SPLIT)
        else:
            parts = [request]
        for part in parts:
            part.guarantee, part.ttl_s = self._rules_of(part.topic)
        return parts

    def _rules_of(self, topic: str) -> tuple[Guarantee, int]:
        """Find the guarantee of a topic's events, and the retention of their keys by a rule, in seconds, or 0."""
        return self._guarantee(topic), self._ttl_s(topic)

    def _halves(self, request: WriteRequest) -> list[WriteRequest]:
        """Split a chunk that failed by its queues, or if all its events have one queue, in halves."""
        events = range(len(request.events))
        half = len(events) // 2
        whole = request.part(events)
        whole.state, whole.aborts = RequestState.QUEUED, 0
        parts = self._split_by_queue(whole)
        return [whole.part(each) for each in (events[:half], events[half:]) if each] if len(parts) == 1 else parts

    async def submit_atomic(self, events: Sequence[Event], whole: tuple[bytes, bytes], arrived: float) -> WriteResult:
        """Write events of checked content in one transaction or not at all; `whole` is the batch's (id, fingerprint).

        Its keys are remembered for the longest retention of its topics. `arrived` is time.monotonic. Raises Problem
        where a topic is idempotent, or the batch is not admitted.
        """
        for event in events:
            if self._guarantee(event.topic) is not Guarantee.EXACTLY_ONCE:
                detail = f"topic: {event.topic} is idempotent, which no atomic batch can be: send its events singly"
                raise Problem(RECORD_REFUSED, detail)
        request = WriteRequest.of(events, arrived, self._timeout_s, Guarantee.EXACTLY_ONCE, whole)
        longest_s = max(map(self._ttl_of, request.topics))
        request.ttl_s = 0 if longest_s == self._settings.key_ttl_s else longest_s
        if self._is_old(events[0].key, longest_s) and not all(map(self._takes_old_keys, request.topics)):
            await self._check_old_key(whole[0], longest_s, request.deadline)
        future: asyncio.Future[WriteResult] = asyncio.get_running_loop().create_future()
        request.future = future
        self._admit(request)
        return await future

    @property
    def overload(self) -> Problem | None:
        """503 for a single event while the queue is full, else None.

        The event is not parsed, which leaves the time to the requests in the queue, and not recorded in the journal.
        """
        return self._queue.too_many if self._queue.full else None

    def check_now(self, event: Event, fresh_key: str = "") -> bool:
        """Check an event against its topic and schema. Raises Problem; False where only `check` can decide.

        `fresh_key` is a key that was not old when its request began.
        """
        return self._topic_takes(event) and self._schemas.check_now(event) and not self._has_old_key(event, fresh_key)

    def _has_old_key(self, event: Event, fresh_key: str) -> bool:
        return event.key != fresh_key and self.is_old(event.key, event.topic)

    def is_old(self, key: str, topic: str) -> bool:
        """Whether a key tells that it was made before its retention, and the topic takes no such keys."""
        return self._is_old(key, self._ttl_of(topic)) and not self._takes_old_keys(topic)

    def _is_old(self, key: str, ttl_s: int) -> bool:
        made_ms = made_at_ms(key)
        return made_ms is not None and made_ms + 1000 * ttl_s <= self.now_ms()

    def _ttl_of(self, topic: str) -> int:
        """Find the retention of the keys of a topic's events, in seconds."""
        return self._ttl_s(topic) or self._settings.key_ttl_s

    def _expiry_ms(self, state: KeyState, ttl_s: int) -> int:
        """Compute when a state expires, ms since the Unix epoch; 0 for none. `ttl_s` is that of a claim."""
        match state:
            case None:
                return 0
            case Claimed(at=at):
                return at + 1000 * ttl_s
            case Delivered(at=at, ttl_s=own_s) | DeliveredBatch(at=at, ttl_s=own_s):
                return at + 1000 * (own_s or self._settings.key_ttl_s)

    async def _check_old_key(self, id: bytes, ttl_s: int, deadline: float) -> None:
        """Refuse an old key that is forgotten: its event may have been written. Raises Problem (412, 503).

        `id` is that of the event, or of the whole atomic batch; it is looked up until `deadline` (time.monotonic). A
        key that may be forgotten before it is claimed is refused too: its claim would find nothing.
        """
        _check_time("Idempotency-Key: it", deadline)
        try:
            async with asyncio.timeout_at(deadline):
                found = await self._store.find(id)
        except (StoreLost, StoreAway, StoreUnanswered, TimeoutError) as error:
            why = str(error) or "no answer"
            raise Problem(NOT_WRITTEN, f"Idempotency-Key: it cannot be looked up now ({why}): send it again") from error
        if self._expiry_ms(found.state, ttl_s) <= self.now_ms() + self._old_key_margin_ms:
            raise Problem(
                KEY_EXPIRED,
                f"Idempotency-Key: it tells that it is older than the {ttl_s} s for which it would be remembered, so "
                "its event may have been written: to write it anyway, use a new key",
            )

    def plain_bytes_max(self, topic: str) -> int:
        """Return the size (bytes) up to which `check_now` passes each plain event of a topic, in this turn of the loop.

        NONE_IS_PLAIN if each event must be checked.
        """
        known = self._topic_metadata.cached(topic)
        return NONE_IS_PLAIN if known is None or self._schemas.has_one_for(topic) else plain_bytes_max(known)

    def _topic_takes(self, event: Event) -> bool:
        """Whether the event's topic takes it, by the cached metadata; False if the topic is not cached.

        Refuses nothing: the topic's settings may have changed since they were cached.
        """
        topic = self._topic_metadata.cached(event.topic)
        if topic is None:
            return False
        try:
            check_topic(event, topic, self.now_ms)
        except Problem:
            return False
        return True

    @property
    def ledger_bytes_max(self) -> int:
        """Bytes of ledger entries that one transaction holds."""
        return self._queue.ledger_bytes_max

    async def check(self, event: Event, arrived: float, begun: float | None = None, fresh_key: str = "") -> None:
        """Check an event as `check_now` does, looking up its topic or an old key where that is needed. Raises Problem.

        Other arguments are those of `check_content`.
        """
        await self.check_content(event, arrived, begun)
        if self._has_old_key(event, fresh_key):
            await self._check_old_key(event.id, self._ttl_of(event.topic), self._deadline(arrived, begun))

    async def check_content(self, event: Event, arrived: float, begun: float | None = None) -> None:
        """Check an event against its topic and schema, whatever its key. Raises Problem.

        `arrived` and `begun` are time.monotonic. Metadata from after `arrived` is fresh enough. All look-ups together
        have the request timeout, from `begun`, if given, else from `arrived`; afterwards none is begun.
        """
        if not self._topic_takes(event):
            deadline = self._deadline(arrived, begun)
            topic = await self._topic(event.topic, arrived, deadline)
            try:
                check_topic(event, topic, self.now_ms)
            except Problem:
                check_topic(event, await self._topic(event.topic, arrived, deadline, after_arrival=True), self.now_ms)
        if not self._schemas.check_now(event):
            await self._schemas.check(event)

    def _deadline(self, arrived: float, begun: float | None) -> float:
        return (arrived if begun is None else begun) + self._timeout_s

    async def _topic(self, name: str, arrived: float, deadline: float, *, after_arrival: bool = False) -> Topic:
        """Look up a topic until `deadline` as TopicMetadataCache.get does. Raises Problem (403, 404, 503)."""
        if self._topics.reserved(name):
            raise Problem(FORBIDDEN_TOPIC, f"topic: {name} is internal: use another")
        _check_time(f"topic: {name}", deadline)
        try:
            async with asyncio.timeout_at(deadline):
                topic = await self._topic_metadata.get(name, arrived, after_arrival=after_arrival)
        except KafkaForbids as error:
            raise Problem(FORBIDDEN_TOPIC, f"topic: {error}: have it allowed to Describe and Write it") from error
        except (KafkaAway, TimeoutError) as error:
            raise Problem(NOT_WRITTEN, f"topic: {name} cannot be looked up now: send it again") from error
        if topic is None:
            raise Problem(UNKNOWN_TOPIC, f"topic: {name} does not exist: make it, or correct its name")
        return topic

    def _admit(self, request: WriteRequest) -> None:
        """Put a request into the queue, and its deadline into the sweep. Raises Problem (503) and records it."""
        self._check_in(request)
        index = len(self._by_deadline)  # nearly always the right one, because all requests have the same timeout
        while index and self._by_deadline[index - 1].deadline > request.deadline:
            index -= 1
        self._by_deadline.insert(index, request)
        self._by_deadline_bytes += request.size
        self._queue.put(request)

    def _check_in(self, request: WriteRequest) -> None:
        """Count a request into the queue's bounds; the caller keeps its deadline. Raises and records Problem (503)."""
        try:
            if not self.is_accepting:
                raise Problem(NOT_WRITTEN, "this process is stopping: send it again, to another")
            if self._store.generation is None:
                raise Problem(NOT_WRITTEN, f"the key store is not complete ({self._store.status}): send it again")
            self._queue.admit(request)
        except Problem as problem:
            self._note(request, problem)
            raise
        if self._tracing is not None:
            self._tracing.begin(request, time.monotonic())

    # ------------------------------------------------------------------------------------------ answers

    def answer(self, request: WriteRequest, answer: WriteResult) -> None:
        """Give a request its answer, and count and record it. Does nothing if the request is finished."""
        if request.finished:
            return
        self._queue.leave(request)
        if self._tracing is not None:
            self._tracing.end(request, answer)
        request.resolve(answer)
        self.load_shedder.answered(request.answers)
        try:
            self._note(request, answer)
        except Exception:  # a bug here must not keep the group's other requests from their answers
            log.exception("an answer was not noted", **request.named)

    def answer_202(self, request: WriteRequest) -> None:
        """Answer 202 to a request that prefers so, because its claim stands. Its outcome is kept under its key."""
        if request.on_claim is not None:
            request.set_claimed()
            self._journal.record(request, 202, None, time.monotonic() - request.arrived)

    def _note(self, request: WriteRequest, answer: WriteResult) -> None:
        """Count an answer, and record it in the journal."""
        latency_s = time.monotonic() - request.arrived
        status, code = (201, "") if isinstance(answer, Committed) else (answer.kind.status, answer.kind.code)
        self._journal.record(request, status, answer, latency_s)
        self._telemetry.answered(code, status, latency_s, request.answers)
        if isinstance(answer, Committed) and answer.replayed:
            self._telemetry.replays.inc()

    async def sweep(self) -> None:
        """Answer the requests at their deadlines, for ever: 503 if surely not written, else 504."""
        while True:
            await asyncio.sleep(SWEEP_S if self._by_deadline else SWEEP_IDLE_S)
            now = time.monotonic()
            self.load_shedder.look(now)
            while self._by_deadline and (self._by_deadline[0].finished or self._by_deadline[0].deadline <= now):
                request = self._by_deadline.popleft()
                self._by_deadline_bytes -= request.size
                if not request.finished:
                    self._expire(request)
            many = len(self._by_deadline) > 2 * self._queue.events + ANSWERED_KEPT
            if many or self._by_deadline_bytes > 2 * self._queue.bytes + ANSWERED_BYTES_KEPT:
                # One request that waits long must not keep all that were answered since in memory.
                self._by_deadline = deque(request for request in self._by_deadline if not request.finished)
                self._by_deadline_bytes = sum(request.size for request in self._by_deadline)
            self._queue.forget_answered()

    def too_late(self, request: WriteRequest) -> Problem:
        """Make the answer of a request at its deadline: 504 if it may be written, else 503."""
        if request.state in MAYBE_WRITTEN:
            return Problem(OUTCOME_UNKNOWN, "Idempotency-Key: send it again with the same key to learn the outcome")
        return Problem(NOT_WRITTEN, f"not written within {self._settings.request_timeout_ms} ms: send it again")

    async def drain(self) -> None:
        """Stop accepting requests, and wait until all accepted ones are answered: until their deadlines, at most."""
        self.is_accepting = False
        ends_at = time.monotonic() + self._settings.request_timeout_ms / 1000 + DRAIN_MARGIN_S
        while self._queue.events > 0 and time.monotonic() < ends_at:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(SWEEP_S)
        if self._queue.events:
            log.error("requests were left without an answer", events=self._queue.events)


def _check_time(what: str, deadline: float) -> None:
    """Raise Problem (503) if the time for look-ups is over: earlier events of the chunk have used it up."""
    if time.monotonic() >= deadline:
        raise Problem(NOT_WRITTEN, f"{what} was not looked up, because earlier look-ups took too long: send it again")
