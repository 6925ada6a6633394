"""A request inside this process: one event, an atomic batch, or a chunk of a batch; and its result."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from service.claims.states import REQUEST, Delivered, RequestEvent, RequestState
from service.contract import Guarantee
from service.core.problems import Problem
from service.core.settings import GROUP_EVENT_BYTES_MAX, GROUP_LEDGER_BYTES_MAX, WAITING_BYTES
from service.events.event import BATCH_EVENTS_MAX, Event

if TYPE_CHECKING:  # OpenTelemetry is imported only where it is asked for
    from opentelemetry.trace import Span

# One event is in Kafka: its id, and where.
Placed = tuple[bytes, Delivered]


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The request's events are in Kafka, in their order. `at` is accepted_at in ms, of the first one."""

    at: int
    places: tuple[Placed, ...]
    replayed: bool


WriteResult = Committed | Problem


class ResultCollector:
    """Collects the results of the events of a chunk that are under way together.

    `done` is set when each of them has its result, or is to be sent again: to the requests that are, in their order.
    """

    def __init__(self, results: list[WriteResult | None], missing: int) -> None:
        self._results = results  # of the whole chunk
        self._missing = missing
        self._again: list[WriteRequest] = []
        self.done: asyncio.Future[list[WriteRequest]] = asyncio.get_running_loop().create_future()

    def put(self, places: Sequence[int], result: WriteResult) -> None:
        """Note the result of the events at these places of the chunk: where each is, or why none of them is."""
        if isinstance(result, Committed):
            replayed = result.replayed
            for place, written in zip(places, result.places, strict=True):
                self._results[place] = Committed(written[1].at, (written,), replayed)
        else:
            for place in places:
                self._results[place] = result
        self._settle(len(places))

    def send_again(self, request: "WriteRequest") -> bool:
        """Have the events of a request sent again by whoever waits for `done`; False where nobody does any more."""
        if self.done.done():
            return False
        request.move(RequestEvent.ANSWER)  # its events go on in other requests
        self._again.append(request)
        self._settle(len(request.events))
        return True

    def _settle(self, events: int) -> None:
        self._missing -= events
        if not self._missing and not self.done.done():  # the coroutine that waited may have been cancelled
            self.done.set_result(self._again)


def fit(ledger_bytes: int, event_bytes: int, ledger_bytes_max: int = GROUP_LEDGER_BYTES_MAX) -> bool:
    """Whether one transaction holds so much."""
    return ledger_bytes <= ledger_bytes_max and event_bytes <= GROUP_EVENT_BYTES_MAX


class BatchChunk:
    """Events of one batch that go into one transaction, which keeps their order.

    Their keys differ, for a key would meet itself in one claim.
    """

    def __init__(self, events_max: int = BATCH_EVENTS_MAX, ledger_bytes_max: int = GROUP_LEDGER_BYTES_MAX) -> None:
        self.events: list[Event] = []
        self._events_max = events_max
        self._ledger_bytes_max = ledger_bytes_max
        self.ledger_bytes = self.event_bytes = 0
        self._ids: set[bytes] = set()

    def takes(self, event: Event) -> bool:
        """Whether there is room for an event; an empty chunk takes any."""
        if not self.events:
            return True
        ledger_bytes = self.ledger_bytes + event.entry_bytes
        fits = fit(ledger_bytes, self.event_bytes + event.size, self._ledger_bytes_max)
        return fits and event.id not in self._ids and len(self.events) < self._events_max

    def add(self, event: Event) -> None:
        """Append an event that the chunk takes."""
        self.events.append(event)
        self._ids.add(event.id)
        self.ledger_bytes += event.entry_bytes
        self.event_bytes += event.size


class WriteRequest(msgspec.Struct, eq=False):
    """Events on their way together: one event, an atomic batch, or (a part of) a chunk. `WriteRequest.of` makes one.

    `resolve` gives the result, exactly once: to `future`, or of a chunk to `collector`, where `places` are those of the
    events in the chunk. Times are by time.monotonic, which is the loop's clock too. `size` is the request's share of
    the queue's bytes. `asked` is what is claimed: the (id, fingerprint) of each event, of an atomic batch that of the
    whole before those of its members.
    """

    events: Sequence[Event]
    arrived: float
    deadline: float
    guarantee: Guarantee
    asked: list[tuple[bytes, bytes]]
    atomic: bool
    ledger_bytes: int
    event_bytes: int
    size: int
    future: asyncio.Future[WriteResult] | None = None
    collector: ResultCollector | None = None
    places: Sequence[int] = ()
    state: RequestState = RequestState.QUEUED
    wait_deadline: float = 0.0  # until then the request would wait for another's write of its key
    waits: bool = False  # for another's write of its key, which it has met
    accepted: asyncio.Future[None] | None = None  # done once its claim stands
    accepted_at: int = 0
    claimants: tuple[tuple[int, int], ...] = ()  # slots and ended terms in which a claim of it may stand
    failures: int = 0  # groups that a topic of it failed while it was in them
    aborts: int = 0  # transactions that failed before their commit was asked for, and maybe because of it
    partitions: Sequence[int] = ()  # of its events, chosen anew for each group that it goes into
    group_number: int = 0  # of the group that took it last: a group with a lower number has it no more
    spans: Sequence["Span"] = ()  # of its events, where they are traced

    @classmethod
    def of(
        cls,
        events: Sequence[Event],
        arrived: float,
        timeout_s: float,
        guarantee: Guarantee,
        whole: tuple[bytes, bytes] | None = None,
    ) -> "WriteRequest":
        """A new request; `whole` is the (id, fingerprint) of an atomic batch."""
        asked = [] if whole is None else [whole]
        ledger_bytes = event_bytes = 0
        for event in events:
            asked.append((event.id, event.fp))
            ledger_bytes += event.entry_bytes
            event_bytes += event.size
        size = event_bytes + len(events) * WAITING_BYTES
        deadline, atomic = arrived + timeout_s, whole is not None
        return cls(events, arrived, deadline, guarantee, asked, atomic, ledger_bytes, event_bytes, size)

    def __repr__(self) -> str:
        return f"<WriteRequest {' '.join(id.hex() for id, _ in self.asked[:1])} {self.state.value}>"

    @property
    def is_chunk(self) -> bool:
        """Whether each of several events has a result of its own."""
        return len(self.events) > 1 and not self.atomic

    @property
    def answers(self) -> int:
        """How many results it stands for; an atomic batch is one."""
        return 1 if self.atomic else len(self.events)

    def part(self, indexes: Sequence[int]) -> "WriteRequest":
        """A request for some events of a chunk, as far on its way as the chunk is."""
        events = [self.events[index] for index in indexes]
        part = WriteRequest.of(events, self.arrived, 0.0, self.guarantee)
        part.collector, part.places = self.collector, [self.places[index] for index in indexes]
        part.deadline, part.state, part.group_number = self.deadline, self.state, self.group_number
        part.accepted_at, part.claimants = self.accepted_at, self.claimants
        part.failures, part.aborts = self.failures, self.aborts
        if self.partitions:
            part.partitions = [self.partitions[index] for index in indexes]
        if self.spans:
            part.spans = [self.spans[index] for index in indexes]
        return part

    def take_out(self, indexes: Iterable[int]) -> list["WriteRequest"]:
        """Take events out of a chunk that have results of their own: a request for each. The chunk keeps the others."""
        if not self.is_chunk:
            return [self]
        taken = list(indexes)
        parts = [self.part([index]) for index in taken]
        rest = self.part(sorted(set(range(len(self.events))).difference(taken)))
        self.events, self.asked, self.places, self.spans = rest.events, rest.asked, rest.places, rest.spans
        self.partitions, self.size = rest.partitions, rest.size
        self.ledger_bytes, self.event_bytes = rest.ledger_bytes, rest.event_bytes
        if not self.events:
            self.move(RequestEvent.ANSWER)
        return parts

    def resolve(self, result: WriteResult) -> None:
        """Give the request its result, and let go of who waits for it: a connection hangs on that."""
        self.move(RequestEvent.ANSWER)
        future, self.future = self.future, None
        if self.collector is not None:
            self.collector.put(self.places, result)
        elif future is not None and not future.done():  # whoever waited may have been cancelled
            future.set_result(result)

    def accept(self) -> None:
        """Its claim stands: have that known, once."""
        accepted, self.accepted = self.accepted, None
        if accepted is not None and not accepted.done():
            accepted.set_result(None)

    @property
    def topic(self) -> str:
        """The topic of its first event."""
        return self.events[0].topic

    @property
    def topics(self) -> set[str]:
        return {event.topic for event in self.events}

    @property
    def named(self) -> dict[str, str]:
        """How a line of the log names it."""
        return {"key": self.events[0].key, "id": self.asked[0][0].hex()}

    @property
    def answered(self) -> bool:
        return self.state is RequestState.ANSWERED

    def move(self, event: RequestEvent) -> None:
        """The one way in which the state changes; an answered request stays so, whatever its group still does."""
        if self.state is not RequestState.ANSWERED:
            self.state = REQUEST[self.state, event]
