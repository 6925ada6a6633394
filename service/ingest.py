"""The path of an event: claim → deliver → mark → answer, for a group at a time. Read `Ingest.serve` first."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog

from service.errors import (
    FINGERPRINT_MISMATCH,
    FORBIDDEN_TOPIC,
    IN_PROGRESS,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    UNKNOWN_TOPIC,
    Fenced,
    KafkaAway,
    Problem,
    StoreAway,
    StoreLost,
    StoreUnanswered,
)
from service.event import Event, check_topic, partition_of
from service.journal import Journal
from service.kafka.cluster import Topic
from service.kafka.producer import BATCH_BYTES_MAX, Place, Record
from service.kafka.verdict import TransactionFailed
from service.recovery import Store
from service.request import Answer, Committed, Queue, Request
from service.settings import Settings
from service.slot import Slot
from service.states import MAYBE_WRITTEN, Claim, Claimed, Delivered, Outcome, RequestEvent, RequestState
from service.telemetry import Telemetry
from service.topics import Catalogue, InternalTopics
from service.wire import KEY_HEADER, STAMP_HEADER, TRACE_HEADER, Entry, Stamp

log = structlog.get_logger(__name__)

SWEEP_S: Final = 0.02
STORE_AWAY_PAUSE_S: Final = 0.1


class Ingest:
    """Takes events from the edge, runs groups of them through slots, answers each once."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        queue: Queue,
        topics: InternalTopics,
        catalogue: Catalogue,
        journal: Journal,
        telemetry: Telemetry,
    ) -> None:
        self._settings = settings
        self._store = store
        self._queue = queue
        self._topics = topics
        self._catalogue = catalogue
        self._journal = journal
        self._telemetry = telemetry
        self._timeout_s = settings.request_timeout_ms / 1000
        self._open: deque[Request] = deque()  # in the order of their deadlines
        self._parked: list[Request] = []  # in doubt, until a slot has been recovered
        self._finishing: set[asyncio.Task[None]] = set()
        self.accepting = True
        # Called where a claim of a slot without a lease is met: who looks after slots need not wait for its next beat.
        self.hurry: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------------------------------------ from the edge

    async def submit(self, event: Event, arrived: float) -> Answer:
        """Write an event exactly once and tell what became of it, within the request's timeout.

        Raises Problem for what is refused before the key is touched; `arrived` is the loop's time.
        """
        topic = self._catalogue.peek(event.topic) or await self._topic(event.topic)
        check_topic(event, topic)
        if not self.accepting:
            raise Problem(NOT_WRITTEN, "this process is stopping: send it again, to another")
        if self._store.epoch is None:
            raise Problem(NOT_WRITTEN, f"the key store is not complete ({self._store.status}): send it again")
        request = Request(event, arrived, self._timeout_s)
        self._queue.admit(request)
        self._open.append(request)
        return await request.answer

    async def _topic(self, name: str) -> Topic:
        if self._topics.reserved(name):
            raise Problem(FORBIDDEN_TOPIC, f"topic: {name} is internal: use another")
        try:
            topic = await self._catalogue.get(name)
        except KafkaAway as error:
            raise Problem(NOT_WRITTEN, f"topic: {name} cannot be looked up: {error}") from error
        if topic is None:
            raise Problem(UNKNOWN_TOPIC, f"topic: {name} does not exist: make it, or correct its name")
        return topic

    # ------------------------------------------------------------------------------------------------ through a slot

    async def serve(self, slot: Slot) -> None:
        """Run groups through a READY slot until its term ends (an error is raised) or it is to be given back."""
        finishing: asyncio.Task[None] | None = None
        while not slot.leaving:
            await self._queue.wait()
            requests = [] if slot.leaving else self._queue.take()
            if not requests:
                continue
            try:
                group = await self._claim(slot, requests)
                if group:
                    links = await self._deliver(slot, group)
                    if finishing is not None:
                        await finishing  # one mark under way at most: a store that is slow slows the slot
                    finishing = self._finish_apart(slot, group, *links)
            finally:
                self._queue.returned(requests)
        if finishing is not None:
            await finishing

    async def _claim(self, slot: Slot, requests: Sequence[Request]) -> list[tuple[Request, Claimed]]:
        """Claim a group for the slot in its term; answers what needs no writing, gives back what is to be written.

        Whatever it raises, nothing of the group was sent: its requests wait again.
        """
        started = time.perf_counter()
        for request in requests:
            request.move(RequestEvent.CLAIM)
        try:
            claims = await slot.claim([(request.event.id, request.event.fp) for request in requests])
        except (StoreLost, StoreAway, StoreUnanswered, Fenced) as error:
            for request in requests:
                request.move(RequestEvent.QUEUE)
            self._wait_again(requests)
            if isinstance(error, StoreAway):
                await asyncio.sleep(STORE_AWAY_PAUSE_S)
                return []
            raise
        now = asyncio.get_running_loop().time()
        group: list[tuple[Request, Claimed]] = []
        unwanted: list[bytes] = []
        for request, claim in zip(requests, claims, strict=True):
            if claim.outcome not in (Outcome.NEW, Outcome.TAKEN_OVER):
                self._settle(request, claim)
            elif request.answered or request.deadline <= now:  # also after a pause of the whole process: never sent
                unwanted.append(request.event.id)
            else:
                assert isinstance(claim.state, Claimed)
                request.accepted_at = claim.state.at
                request.move(RequestEvent.WIN)
                group.append((request, claim.state))
        if unwanted:
            await self._release(slot, unwanted, group)
        self._telemetry.stages.labels("claim").observe(time.perf_counter() - started)
        return group

    async def _release(self, slot: Slot, ids: Sequence[bytes], group: Sequence[tuple[Request, Claimed]]) -> None:
        """Give up claims whose requests are past their deadline; without an answer it may run late: the term ends."""
        try:
            await slot.release(ids)
        except (StoreLost, StoreAway, StoreUnanswered) as error:
            for request, _ in group:
                request.move(RequestEvent.QUEUE)
            self._wait_again([request for request, _ in group])
            raise StoreUnanswered(f"a release is open: {error}") from error

    def _settle(self, request: Request, claim: Claim) -> None:
        """What a claim found that leaves nothing to write."""
        doubtful = request.state is RequestState.CHECKING
        match claim.outcome, claim.state:
            case Outcome.DELIVERED, Delivered(at, _, topic, partition, offset, ts):
                # In doubt before: it was this very request's own writing, so this is its first answer.
                self.answer(request, Committed(at, topic, partition, offset, ts, replayed=not doubtful))
            case Outcome.CONFLICT, _:
                detail = f"Idempotency-Key: it was used for another event: use a new key ({request.event.topic})"
                self.answer(request, Problem(FINGERPRINT_MISMATCH, detail))
            case _ if doubtful:
                request.move(RequestEvent.QUEUE)
                self._parked.append(request)  # the slot that wrote it is still to be recovered
            case _:
                if not claim.leased:
                    self.hurry()
                self.answer(request, Problem(IN_PROGRESS, "Idempotency-Key: send it again, with the same key"))

    async def _deliver(
        self, slot: Slot, group: Sequence[tuple[Request, Claimed]]
    ) -> tuple[list[Place], list[Record], tuple[int, int]]:
        """Write a group in one transaction. Raises TransactionFailed: all of it is in doubt until recovery has run."""
        started = time.perf_counter()
        records = list(self._records(slot, group))
        for request, _ in group:
            request.move(RequestEvent.SEND)

        def entries(places: Sequence[Place]) -> Iterator[str]:
            for (request, claim), record, place in zip(group, records, places, strict=True):
                event = request.event
                yield Entry(
                    event.id, event.fp, claim.at, event.topic, record.partition, place.offset, place.timestamp
                ).encode()

        try:
            places, link = await slot.write(records, entries)
        except TransactionFailed as failed:
            self._doubt([request for request, _ in group], failed)
            raise
        self._telemetry.stages.labels("kafka").observe(time.perf_counter() - started)
        self._telemetry.groups.observe(len(group))
        return places, records, link

    def _records(self, slot: Slot, group: Sequence[tuple[Request, Claimed]]) -> Iterator[Record]:
        """The records of a group. Events without a key share one partition of their topic, as in KIP-480."""
        now_ms = time.time_ns() // 1_000_000
        producer_id, epoch, instance = slot.producer.producer_id, slot.producer.epoch, self._settings.name
        sticky: dict[str, int] = {}
        for request, claim in group:
            event = request.event
            topic = self._catalogue.last_known(event.topic)
            partition = partition_of(event, topic.partitions)
            if partition is None:
                partition = sticky.setdefault(event.topic, random.randrange(topic.partitions))  # noqa: S311
            stamp = Stamp(event.id, event.fp, claim.at, slot.n, producer_id, epoch, instance)
            headers = [(KEY_HEADER, event.key.encode()), (STAMP_HEADER, stamp.encode())]
            if event.traceparent is not None:
                headers.append((TRACE_HEADER, event.traceparent))
            headers += event.headers
            timestamp = now_ms if event.timestamp is None else event.timestamp
            most = min(BATCH_BYTES_MAX, topic.message_bytes_max)
            yield Record(event.topic, partition, event.record_key, event.value, headers, timestamp, most)

    def _finish_apart(
        self,
        slot: Slot,
        group: Sequence[tuple[Request, Claimed]],
        places: Sequence[Place],
        records: Sequence[Record],
        link: tuple[int, int],
    ) -> asyncio.Task[None]:
        """Mark and answer a committed group while the slot goes on with the next."""
        rows = [
            (r.event.id, Delivered(c.at, r.event.fp, r.event.topic, record.partition, place.offset, place.timestamp))
            for (r, c), record, place in zip(group, records, places, strict=True)
        ]
        finish = self._finish(slot, [request for request, _ in group], rows, link)
        task: asyncio.Task[None] = asyncio.create_task(finish)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        return task

    async def _finish(
        self, slot: Slot, requests: Sequence[Request], rows: Sequence[tuple[bytes, Delivered]], link: tuple[int, int]
    ) -> None:
        started = time.perf_counter()
        try:
            await slot.mark(link, rows)
        except (StoreLost, StoreAway, StoreUnanswered) as error:
            # The ledger has it: the events are committed, whatever Redis knows of them by now.
            self._telemetry.marks_failed.inc()
            if isinstance(error, StoreLost):
                self._store.lost(slot.epoch)
        self._telemetry.stages.labels("mark").observe(time.perf_counter() - started)
        for topic in {request.event.topic for request in requests}:
            self._queue.trust(topic)
        for request, (_, d) in zip(requests, rows, strict=True):
            self.answer(request, Committed(d.at, d.topic, d.partition, d.offset, d.ts, replayed=False))

    # ---------------------------------------------------------------------------------------------- doubt and deadline

    def _doubt(self, requests: Sequence[Request], failed: TransactionFailed) -> None:
        """A group did not commit cleanly. Its poison is answered if it was alone; the others wait for the recovery."""
        for topic in failed.refusals:
            self._queue.suspect(topic)
            self._catalogue.doubt(topic)
        alone = len(requests) == 1
        for request in requests:
            refusal = failed.refusals.get(request.event.topic)
            if refusal is not None and alone:
                self.answer(request, Problem(refusal.kind, f"topic: {request.event.topic}: {refusal.why}"))
                continue
            request.failures += refusal is not None
            request.move(RequestEvent.DOUBT)
            self._parked.append(request)

    def recovered(self) -> None:
        """A slot has been recovered, or time has passed: what is in doubt is claimed anew, which tells its fate."""
        parked, self._parked = self._parked, []
        self._queue.put_back(parked)

    def _wait_again(self, requests: Sequence[Request]) -> None:
        self._parked += [request for request in requests if request.state is RequestState.IN_DOUBT]
        self._queue.put_back(request for request in requests if request.state is RequestState.QUEUED)

    async def sweep(self) -> None:
        """Answer what has reached its deadline, for ever: 503 where it is surely not written, else 504."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            now = loop.time()
            while self._open and (self._open[0].answered or self._open[0].deadline <= now):
                request = self._open.popleft()
                if not request.answered:
                    self.answer(request, self._too_late(request))
            if len(self._open) > 2 * self._queue.events + 1_000:
                # One that waits long must not keep all that were answered since in memory.
                self._open = deque(request for request in self._open if not request.answered)
            self._telemetry.queued.set(self._queue.events)
            self._telemetry.queued_bytes.set(self._queue.bytes)
            self._telemetry.in_doubt.set(len(self._parked))

    def _too_late(self, request: Request) -> Problem:
        if request.state in MAYBE_WRITTEN:
            return Problem(OUTCOME_UNKNOWN, "Idempotency-Key: send it again with the same key to learn the outcome")
        return Problem(NOT_WRITTEN, f"not written within {self._settings.request_timeout_ms} ms: send it again")

    async def drain(self) -> None:
        """Stop accepting, and wait until all that was accepted has its answer."""
        self.accepting = False
        while self._queue.events:  # noqa: ASYNC110 - bounded by the last one's deadline, and there is nothing to gain
            await asyncio.sleep(SWEEP_S)
        if self._finishing:
            await asyncio.wait(self._finishing)

    def answer(self, request: Request, answer: Answer) -> None:
        """The one place where a request gets its answer."""
        if request.answered:
            return
        request.move(RequestEvent.ANSWER)
        self._queue.leave(request)
        latency_s = asyncio.get_running_loop().time() - request.arrived
        status, code = (201, "") if isinstance(answer, Committed) else (answer.kind.status, answer.kind.code)
        self._journal.record(request, status, answer, latency_s)
        self._telemetry.answered(code, status, latency_s)
        if isinstance(answer, Committed) and answer.replayed:
            self._telemetry.replays.inc()
        if not request.answer.done():  # a caller that went away has cancelled it
            request.answer.set_result(answer)
