"""Where requests come in and get their answers: bounds, deadlines, the journal. What becomes of them is writer's."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

import structlog

from service.claims.states import MAYBE_WRITTEN
from service.contract import Guarantee, Rules
from service.core.metrics import Telemetry
from service.core.problems import (
    FORBIDDEN_TOPIC,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    RECORD_REFUSED,
    UNKNOWN_TOPIC,
    KafkaAway,
    KafkaForbids,
    Problem,
)
from service.core.settings import TOPICS_MAX, Settings
from service.events.event import Event, check_topic
from service.events.schemas import Schemas
from service.kafka.admin import Topic
from service.kafka.topics import InternalTopics, TopicMetadataCache
from service.pipeline.clocks import own_ms
from service.pipeline.journal import Journal
from service.pipeline.load_shedding import LoadShedder
from service.pipeline.queue import Queue
from service.pipeline.request import BatchChunk, Committed, ResultCollector, WriteRequest, WriteResult
from service.pipeline.response_buffer import ResponseBuffer
from service.slots.recovery import Store

if TYPE_CHECKING:  # OpenTelemetry is imported only where it is asked for
    from service.pipeline.tracing import Tracing

log = structlog.get_logger(__name__)

SWEEP_S: Final = 0.02
# Who waits for another's write hears of it, or a 409, before the deadline.
ANSWERED_BEFORE_DEADLINE_S: Final = 0.5
# Where nobody waits: who comes meanwhile has a deadline that is further off.
SWEEP_IDLE_S: Final = 0.1
# Answered requests that may lie behind one that waits, and their bytes.
ANSWERED_KEPT: Final = 1_000
ANSWERED_BYTES_KEPT: Final = 4 * 1024 * 1024


class Admission:
    """Takes requests from the edge into the queue, and gives each its answer, once, by its deadline."""

    def __init__(
        self,
        settings: Settings,
        rules: Rules,
        schemas: Schemas,
        store: Store,
        queue: Queue,
        topics: InternalTopics,
        topic_metadata: TopicMetadataCache,
        journal: Journal,
        telemetry: Telemetry,
        tracing: "Tracing | None" = None,
        now_ms: Callable[[], int] = own_ms,
    ) -> None:
        self.now_ms = now_ms  # Kafka's time
        self._settings = settings
        self._guarantee = lru_cache(maxsize=TOPICS_MAX)(rules.guarantee)  # by topic
        self._schemas = schemas
        self._store = store
        self._queue = queue
        self._topics = topics
        self._topic_metadata = topic_metadata
        self._journal = journal
        self._telemetry = telemetry
        self._tracing = tracing
        self._timeout_s = settings.request_timeout_ms / 1000
        self.events_max = settings.queue_events_max  # more at once could never come in
        self._open: deque[WriteRequest] = deque()  # by deadline
        self._open_bytes = 0
        self.load_shedder = LoadShedder()
        self.response_buffer = ResponseBuffer()
        self.accepting = True

    def submit(
        self,
        event: Event,
        arrived: float,
        reply: Callable[[WriteResult], None],
        wait_s: float = 0.0,
        accepted: Callable[[], None] | None = None,
    ) -> None:
        """Write a checked event exactly once; `reply` is told what became of it, within the request's timeout.

        Raises Problem for what is refused before the key is touched; `arrived` is by time.monotonic. Somebody else's
        write of the same key is waited for, up to `wait_s`; `accepted` is told once the claim stands.
        """
        request = WriteRequest.of((event,), arrived, self._timeout_s, self._guarantee(event.topic), reply)
        if wait_s:
            request.wait_deadline = min(arrived + wait_s, request.deadline - ANSWERED_BEFORE_DEADLINE_S)
        request.accepted = accepted
        self._admit((request,))

    async def submit_train(self, train: BatchChunk) -> list[WriteResult]:
        """Write the checked events of a train, in their order; the answer of each."""
        answers = ResultCollector(len(train.events))
        whole = WriteRequest.of(
            train.events, time.monotonic(), self._timeout_s, Guarantee.EXACTLY_ONCE, answers.put_all, train=train
        )
        whole.reply_each = answers.put
        try:
            self._admit((whole,) if self._goes_in_one_piece(train) else self._parts_of(whole))
        except Problem as problem:
            return [problem.as_result()] * len(train.events)
        return await answers.all

    def _goes_in_one_piece(self, train: BatchChunk) -> bool:
        """Are its events alike, as far as is known? Nearly always, and that saves a third of what each costs."""
        topics = {event.topic for event in train.events}
        return (
            self._tracing is None
            and not self._queue.has_suspects(topics)
            and all(self._guarantee(topic) is Guarantee.EXACTLY_ONCE for topic in topics)
        )

    def _parts_of(self, whole: WriteRequest) -> list[WriteRequest]:
        parts = whole.split()
        for part in parts:
            part.guarantee = self._guarantee(part.topic)
        return parts

    async def submit_atomic(self, events: Sequence[Event], whole: tuple[bytes, bytes], arrived: float) -> WriteResult:
        """Write checked events in one transaction or not at all, under the whole's (id, fingerprint)."""
        for event in events:
            if self._guarantee(event.topic) is not Guarantee.EXACTLY_ONCE:
                detail = f"topic: {event.topic} is idempotent, which no atomic batch can be: send its events singly"
                raise Problem(RECORD_REFUSED, detail)
        answers = ResultCollector(1)
        reply = partial(answers.put, 0)
        self._admit((WriteRequest.of(events, arrived, self._timeout_s, Guarantee.EXACTLY_ONCE, reply, whole),))
        (answer,) = await answers.all
        return answer

    @property
    def overload(self) -> Problem | None:
        """503 for a single event while the queue is full. It is not looked at, so that those that wait get the time.

        The journal hears nothing of it either: what it was, nobody knows.
        """
        return self._queue.too_many if self._queue.full else None

    def check_now(self, event: Event) -> bool:
        """What the event's schema refuses, before the key is touched. Raises Problem; False: `check` takes a while."""
        return self._topic_takes(event) and self._schemas.check_now(event)

    def _topic_takes(self, event: Event) -> bool:
        """Does its topic, as far as it is known, take the event?

        Nothing is refused for what a topic was: it may have been changed, so that the event is right by now.
        """
        topic = self._topic_metadata.cached(event.topic)
        if topic is None:
            return False
        try:
            check_topic(event, topic, self.now_ms())
        except Problem:
            return False
        return True

    @property
    def ledger_bytes_max(self) -> int:
        """Bytes of entries that one transaction holds."""
        return self._queue.ledger_bytes_max

    async def check(self, event: Event, arrived: float, begun: float | None = None) -> None:
        """As `check_now`, and the topic is looked up where it is not known. Raises Problem.

        `arrived`: what Kafka has said of it since will do. `begun`: when its time began to run, where that was later.
        """
        if not self._topic_takes(event):
            deadline = (arrived if begun is None else begun) + self._timeout_s
            topic = await self._topic(event.topic, arrived, deadline)
            try:
                check_topic(event, topic, self.now_ms())
            except Problem:
                check_topic(event, await self._topic(event.topic, arrived, deadline, anew=True), self.now_ms())
        if not self._schemas.check_now(event):
            await self._schemas.check(event)

    async def _topic(self, name: str, arrived: float, deadline: float, *, anew: bool = False) -> Topic:
        if self._topics.reserved(name):
            raise Problem(FORBIDDEN_TOPIC, f"topic: {name} is internal: use another")
        try:
            async with asyncio.timeout_at(deadline):
                topic = await self._topic_metadata.get(name, arrived, anew=anew)
        except KafkaForbids as error:
            raise Problem(FORBIDDEN_TOPIC, f"topic: {error}: have it allowed to Describe and Write it") from error
        except (KafkaAway, TimeoutError) as error:
            raise Problem(NOT_WRITTEN, f"topic: {name} cannot be looked up now: send it again") from error
        if topic is None:
            raise Problem(UNKNOWN_TOPIC, f"topic: {name} does not exist: make it, or correct its name")
        return topic

    def _admit(self, requests: Sequence[WriteRequest]) -> None:
        """Let requests in, all or none. Raises Problem (503), which the journal is told too."""
        try:
            if not self.accepting:
                raise Problem(NOT_WRITTEN, "this process is stopping: send it again, to another")
            if self._store.epoch is None:
                raise Problem(NOT_WRITTEN, f"the key store is not complete ({self._store.status}): send it again")
            self._queue.admit(requests)
        except Problem as problem:
            for request in requests:
                self._note(request, problem)
            raise
        if self._tracing is not None:
            self._tracing.begin(requests, time.monotonic())
        for request in requests:
            place = len(self._open)  # nearly always its place: all have as much time, from their arrival
            while place and self._open[place - 1].deadline > request.deadline:
                place -= 1
            self._open.insert(place, request)
            self._open_bytes += request.size

    # ------------------------------------------------------------------------------------------ answers

    def answer(self, request: WriteRequest, answer: WriteResult) -> None:
        """The one place where a request gets its answer."""
        if request.answered:
            return
        reply = request.end()
        self._queue.leave(request)
        try:
            reply(answer)
            self.load_shedder.answered(request.answers)
        except Exception:  # a bug at the edge must not keep the others of the group from their answers
            log.exception("an answer was not given", **request.named)
        try:
            self._note(request, answer)
        except Exception:  # nor must one here
            log.exception("an answer was not noted", **request.named)

    def accept(self, request: WriteRequest) -> None:
        """The claim stands: who prefers so is answered 202 now; what becomes of it is for the journal and the key."""
        accepted, request.accepted = request.accepted, None
        if accepted is not None:
            self._journal.record(request, 202, None, time.monotonic() - request.arrived)
            try:
                accepted()
            except Exception:  # as in `answer`
                log.exception("an answer was not given", **request.named)

    def _note(self, request: WriteRequest, answer: WriteResult) -> None:
        """Count an answer, and tell the journal."""
        latency_s = time.monotonic() - request.arrived
        status, code = (201, "") if isinstance(answer, Committed) else (answer.kind.status, answer.kind.code)
        self._journal.record(request, status, answer, latency_s)
        self._telemetry.answered(code, status, latency_s, request.answers)
        if isinstance(answer, Committed) and answer.replayed:
            self._telemetry.replays.inc()

    async def sweep(self) -> None:
        """Answer what has reached its deadline, for ever: 503 where it is surely not written, else 504."""
        while True:
            await asyncio.sleep(SWEEP_S if self._open else SWEEP_IDLE_S)
            now = time.monotonic()
            self.load_shedder.look(now)
            while self._open and (self._open[0].settled or self._open[0].deadline <= now):
                request = self._open.popleft()
                self._open_bytes -= request.size
                if not request.settled:
                    for each in request.parts or (request,):
                        self.answer(each, self.too_late(each))
            many = len(self._open) > 2 * self._queue.events + ANSWERED_KEPT
            if many or self._open_bytes > 2 * self._queue.bytes + ANSWERED_BYTES_KEPT:
                # One that waits long must not keep all that were answered since in memory.
                self._open = deque(request for request in self._open if not request.settled)
                self._open_bytes = sum(request.size for request in self._open)
            self._queue.forget_answered()

    def too_late(self, request: WriteRequest) -> Problem:
        """What the deadline finds: 504 where it may be written, else 503."""
        if request.state in MAYBE_WRITTEN:
            return Problem(OUTCOME_UNKNOWN, "Idempotency-Key: send it again with the same key to learn the outcome")
        return Problem(NOT_WRITTEN, f"not written within {self._settings.request_timeout_ms} ms: send it again")

    async def drain(self) -> None:
        """Stop accepting, and wait until all that was accepted has its answer."""
        self.accepting = False
        while self._queue.events:  # noqa: ASYNC110 - bounded by the last one's deadline, and there is nothing to gain
            await asyncio.sleep(SWEEP_S)
