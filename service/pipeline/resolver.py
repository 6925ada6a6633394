"""Gives each request its result, once: that of its write, or a problem at its deadline; counts and journals results."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import structlog

from service.claims.states import MAYBE_WRITTEN
from service.core.metrics import Telemetry
from service.core.problems import NOT_WRITTEN, OUTCOME_UNKNOWN, Problem
from service.core.settings import Settings
from service.pipeline.journal import Journal
from service.pipeline.load_shedding import LoadShedder
from service.pipeline.queue import Queue
from service.pipeline.request import Committed, Quarantined, WriteRequest, WriteResult

if TYPE_CHECKING:  # OpenTelemetry is imported only where it is asked for
    from service.pipeline.tracing import Tracing

log = structlog.get_logger(__name__)

SWEEP_S: Final = 0.02
# Between two sweeps while no request waits for its result: the deadline of one that arrives meanwhile is further off.
SWEEP_IDLE_S: Final = 0.1
# Resolved requests that may be kept behind one that waits, and their bytes.
RESOLVED_KEPT: Final = 1_000
RESOLVED_BYTES_KEPT: Final = 4 * 1024 * 1024


class Resolver:
    """Resolves requests: admission gives it their deadlines, and the writer their results."""

    def __init__(
        self,
        settings: Settings,
        queue: Queue,
        journal: Journal,
        telemetry: Telemetry,
        tracing: "Tracing | None" = None,
    ) -> None:
        self._timeout_ms = settings.request_timeout_ms
        self._queue = queue
        self._journal = journal
        self._telemetry = telemetry
        self._tracing = tracing
        # In the order of their deadlines, the unresolved requests and those that were resolved since the last sweep.
        # Each chunk of a batch has a timer of its own, and is not here.
        self.by_deadline: deque[WriteRequest] = deque()
        self.by_deadline_bytes = 0
        self.load_shedder = LoadShedder()

    def keep_deadline(self, request: WriteRequest) -> None:
        """Have the sweep resolve a request at its deadline."""
        index = len(self.by_deadline)  # nearly always the right one, because all requests have the same timeout
        while index and self.by_deadline[index - 1].deadline > request.deadline:
            index -= 1
        self.by_deadline.insert(index, request)
        self.by_deadline_bytes += request.size

    def resolve(self, request: WriteRequest, result: WriteResult) -> None:
        """Give a request its result, as `resolve_all` does."""
        self.resolve_all(((request, result),))

    def resolve_all(self, results: Iterable[tuple[WriteRequest, WriteResult]]) -> None:
        """Give requests their results, and count and journal the results. Finished requests are left as they are."""
        now = time.monotonic()
        answers = 0
        for request, result in results:
            if request.finished:
                continue
            self._queue.leave(request)
            if self._tracing is not None:
                self._tracing.end(request, result)
            shown = request.resolve(result)
            answers += request.answers
            try:
                self.note(request, shown, now)
            except Exception:  # a bug here must not keep the other requests from their results
                log.exception("an answer was not noted", **request.named)
        self.load_shedder.answered(answers)

    def resolve_claim(self, request: WriteRequest) -> None:
        """Have a request that prefers so answered with 202: its claim stands. Its outcome is kept under its key."""
        if request.on_claim is not None:
            request.set_claimed()
            self._journal.record(request, 202, None, time.monotonic() - request.arrived)

    def note(self, request: WriteRequest, result: WriteResult, now: float) -> None:
        """Count a request's result, and record it in the journal: `result` as the client gets it.

        `now` is time.monotonic.
        """
        latency_s = now - request.arrived
        if isinstance(result, Committed):
            status, code, replayed = 201, "", result.replayed
        else:
            status, code = result.kind.status, result.kind.code
            replayed = isinstance(result, Quarantined) and result.replayed
        self._journal.record(request, status, result, latency_s)
        self._telemetry.answered(code, status, latency_s, request.answers, replayed=replayed)

    async def sweep(self) -> None:
        """Resolve requests at their deadlines, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S if self.by_deadline else SWEEP_IDLE_S)
            now = time.monotonic()
            self.load_shedder.end_due(now)
            while self.by_deadline and (self.by_deadline[0].finished or self.by_deadline[0].deadline <= now):
                request = self.by_deadline.popleft()
                self.by_deadline_bytes -= request.size
                self.expire(request)
            many = len(self.by_deadline) > 2 * self._queue.events + RESOLVED_KEPT
            if many or self.by_deadline_bytes > 2 * self._queue.bytes + RESOLVED_BYTES_KEPT:
                # One request that waits long must not keep all that were resolved since in memory.
                self.by_deadline = deque(request for request in self.by_deadline if not request.finished)
                self.by_deadline_bytes = sum(request.size for request in self.by_deadline)
            self._queue.forget_answered()

    def expire(self, request: WriteRequest) -> None:
        """Resolve a request whose deadline has passed, unless it has its result."""
        if not request.finished:
            self.resolve(request, self.too_late(request))

    def too_late(self, request: WriteRequest) -> Problem:
        """Make the result of a request at its deadline: 504 if it may be written, else 503."""
        if request.state in MAYBE_WRITTEN:
            return Problem(OUTCOME_UNKNOWN, "Idempotency-Key: send it again with the same key to learn the outcome")
        return Problem(NOT_WRITTEN, f"not written within {self._timeout_ms} ms: send it again")
