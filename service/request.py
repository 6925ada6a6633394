"""One request for one event inside this process, and the bounded queue in which it waits for a slot."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from service.errors import NOT_WRITTEN, Problem
from service.event import ENTRY_BYTES, Event
from service.settings import GROUP_EVENT_BYTES_MAX, GROUP_LEDGER_BYTES_MAX, Settings
from service.states import REQUEST, RequestEvent, RequestState

# What a waiting request costs beside its event: objects, its future, its share of the connection.
REQUEST_BYTES: Final = 2_000


class Committed(NamedTuple):
    """The event is in Kafka, here. `at` is accepted_at, `timestamp` the record's, both in ms."""

    at: int
    topic: str
    partition: int
    offset: int
    timestamp: int
    replayed: bool


Answer = Committed | Problem


class Request:
    """An event on its way. `answer` is set exactly once, by whoever moves the state to ANSWERED."""

    __slots__ = ("accepted_at", "answer", "arrived", "deadline", "event", "failures", "state")

    def __init__(self, event: Event, arrived: float, timeout_s: float) -> None:
        self.event = event
        self.arrived = arrived
        self.deadline = arrived + timeout_s
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.state = RequestState.QUEUED
        self.accepted_at = 0
        self.failures = 0  # groups that its topic failed while it was in them

    def __repr__(self) -> str:
        return f"<Request {self.event.id.hex()} {self.state.value}>"

    @property
    def bytes(self) -> int:
        return self.event.bytes + REQUEST_BYTES

    @property
    def answered(self) -> bool:
        return self.state is RequestState.ANSWERED

    def move(self, event: RequestEvent) -> None:
        """The one way in which the state changes; an answered request stays so, whatever its group still does."""
        if self.state is not RequestState.ANSWERED:
            self.state = REQUEST.move(self.state, event)


class Queue:
    """Requests that wait for a slot, first come first served, within bounds of events and bytes.

    The bounds count every request that is not answered yet, also those in a transaction. A topic that failed a group
    travels apart, one event at a time where it was in that group, until one of its events commits.
    """

    def __init__(self, settings: Settings) -> None:
        self._events_max = settings.queue_events_max
        self._bytes_max = settings.queue_bytes_max
        self._waiting: deque[Request] = deque()
        self._apart: deque[Request] = deque()
        self._suspects: set[str] = set()
        self._apart_out: list[Request] | None = None
        self._takers: deque[asyncio.Future[None]] = deque()
        self.events = 0
        self.bytes = 0

    def admit(self, request: Request) -> None:
        """Take a new request in. Raises Problem (503) where a bound would be passed."""
        if self.events >= self._events_max:
            raise Problem(NOT_WRITTEN, f"the queue is full ({self._events_max} events): send it again a little later")
        if self.bytes + request.bytes > self._bytes_max:
            raise Problem(NOT_WRITTEN, f"the queue is full ({self._bytes_max} bytes): send it again a little later")
        self.events += 1
        self.bytes += request.bytes
        (self._apart if request.event.topic in self._suspects else self._waiting).append(request)
        self.nudge()

    def leave(self, request: Request) -> None:
        """An answered request counts no more."""
        self.events -= 1
        self.bytes -= request.bytes

    def put_back(self, requests: Iterable[Request]) -> None:
        """Requests that go round again, at the front and in their order."""
        for request in reversed([request for request in requests if not request.answered]):
            (self._apart if request.event.topic in self._suspects else self._waiting).appendleft(request)
        self.nudge()

    def suspect(self, topic: str) -> None:
        """The topic failed a group: its events travel apart from here on."""
        self._suspects.add(topic)

    def trust(self, topic: str) -> None:
        """An event of the topic was committed: it travels with the others again."""
        if topic in self._suspects:
            self._suspects.discard(topic)
            cleared = [request for request in self._apart if request.event.topic == topic]
            self._apart = deque(request for request in self._apart if request.event.topic != topic)
            self._waiting.extend(cleared)
            self.nudge()

    def nudge(self) -> None:
        """Wake one taker, if any waits."""
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                return

    def nudge_all(self) -> None:
        """Wake every taker: one of them is to stop."""
        for _ in range(len(self._takers)):
            self.nudge()

    async def wait(self) -> None:
        """Until something may be there to take."""
        if not self._waiting and (self._apart_out is not None or not self._apart):
            taker = asyncio.get_running_loop().create_future()
            self._takers.append(taker)
            await taker

    def take(self) -> list[Request]:
        """The next group: as many as one transaction holds, in order; [] where there is none."""
        group = self._take_apart() if self._apart and self._apart_out is None else []
        if group:
            self._apart_out = group
        else:
            group = _take(self._waiting)
        if self._waiting:
            self.nudge()
        return group

    def returned(self, group: list[Request]) -> None:
        """A group that `take` gave out is done with, well or not: the next one apart may go."""
        if self._apart_out is group:
            self._apart_out = None
            if self._apart:
                self.nudge()

    def _take_apart(self) -> list[Request]:
        """One event that was in a failed group, alone; else what waits of one suspect topic."""
        while self._apart and self._apart[0].answered:
            self._apart.popleft()
        if not self._apart:
            return []
        first = self._apart[0]
        if first.failures:
            return [self._apart.popleft()]
        mine: deque[Request] = deque()
        others: deque[Request] = deque()
        for request in self._apart:
            (mine if request.event.topic == first.event.topic and not request.failures else others).append(request)
        group = _take(mine)
        self._apart = mine + others
        return group


def _take(waiting: deque[Request]) -> list[Request]:
    group: list[Request] = []
    ledger_bytes = event_bytes = 0
    while waiting:
        request = waiting[0]
        ledger_bytes += ENTRY_BYTES + len(request.event.topic)
        event_bytes += request.event.bytes
        if group and (ledger_bytes > GROUP_LEDGER_BYTES_MAX or event_bytes > GROUP_EVENT_BYTES_MAX):
            break
        waiting.popleft()
        if not request.answered:
            group.append(request)
    return group
