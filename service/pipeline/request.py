"""A request inside this process: one event, an atomic batch, or a chunk of a batch; and its result."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from service.claims.states import FINISHED, REQUEST, Delivered, RequestEvent, RequestState
from service.contract import Guarantee
from service.core.problems import Problem
from service.core.settings import GROUP_EVENT_BYTES_MAX, GROUP_LEDGER_BYTES_MAX, WAITING_BYTES
from service.events.dead_letters import DeadLetter, problem_of
from service.events.event import Event
from service.kafka.group_offsets import GroupOffsets

if TYPE_CHECKING:  # OpenTelemetry is imported only where it is asked for
    from opentelemetry.trace import Span

# The id of an event that is in Kafka, and its coordinates.
Delivery = tuple[bytes, Delivered]


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The result of a request whose events are in Kafka: a delivery for each, in their order.

    `at` is the first event's accepted_at, ms since the Unix epoch.
    """

    at: int
    deliveries: tuple[Delivery, ...]
    replayed: bool


class Quarantined(Problem):
    """The result of a request that was refused, whose dead letter is in Kafka: the problem, and where the letter is.

    `at`, `deliveries` and `replayed` are those of Committed, with the dead letter as the only delivery.
    """

    def __init__(self, delivery: Delivery, *, replayed: bool) -> None:
        _, state = delivery
        problem = problem_of(state.refused)
        super().__init__(problem.kind, problem.detail)
        self.at = state.at
        self.deliveries = (delivery,)
        self.replayed = replayed

    def body(self) -> dict[str, str | int]:
        """Make the members of `application/problem+json`, with the coordinates of the dead letter."""
        id, state = self.deliveries[0]
        return {
            **super().body(),
            "quarantined": True,
            "id": id.hex(),
            "topic": state.topic,
            "partition": state.partition,
            "offset": state.offset,
            "timestamp": state.ts,
        }


WriteResult = Committed | Problem


def known(result: WriteResult) -> asyncio.Future[WriteResult]:
    """Make the future of a request whose result is known without a write."""
    future: asyncio.Future[WriteResult] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


def result_of(delivery: Delivery, *, replayed: bool) -> WriteResult:
    """Make the result of one event that is in Kafka: as itself, or as a dead letter."""
    state = delivery[1]
    return Quarantined(delivery, replayed=replayed) if state.refused else Committed(state.at, (delivery,), replayed)


class ResultCollector:
    """Collects the results of the events of a chunk that are in flight together.

    `done` is set when each of the events has its result or is to be sent again. Its value is the requests to send
    again, in their order.
    """

    def __init__(self, results: list[WriteResult | None], missing: int) -> None:
        self._results = results  # by the event's index in the chunk
        self._missing = missing
        self._to_send_again: list[WriteRequest] = []
        self.done: asyncio.Future[list[WriteRequest]] = asyncio.get_running_loop().create_future()

    def put(self, indexes: Sequence[int], result: WriteResult) -> None:
        """Note the result of the events with these indexes of the chunk: their deliveries, or one problem for all."""
        if isinstance(result, Committed):
            replayed = result.replayed
            for index, delivery in zip(indexes, result.deliveries, strict=True):
                state = delivery[1]  # as `result_of`, without a call
                self._results[index] = (
                    Quarantined(delivery, replayed=replayed)
                    if state.refused
                    else Committed(state.at, (delivery,), replayed)
                )
        else:
            for index in indexes:
                self._results[index] = result
        self._count_down(len(indexes))

    def send_again(self, request: "WriteRequest") -> bool:
        """Have the coroutine that awaits `done` send the request's events again; False if no coroutine awaits it."""
        if self.done.done():
            return False
        request.move(RequestEvent.SPLIT)
        self._to_send_again.append(request)
        self._count_down(len(request.events))
        return True

    def _count_down(self, events: int) -> None:
        self._missing -= events
        if not self._missing and not self.done.done():  # done: the coroutine that awaited it was cancelled
            self.done.set_result(self._to_send_again)


def fit(
    ledger_bytes: int,
    event_bytes: int,
    ledger_bytes_max: int = GROUP_LEDGER_BYTES_MAX,
    event_bytes_max: int = GROUP_EVENT_BYTES_MAX,
) -> bool:
    """Whether one transaction holds so many bytes of ledger entries and of events."""
    return ledger_bytes <= ledger_bytes_max and event_bytes <= event_bytes_max


# A larger batch is written in several chunks: each step with a chunk takes the event loop for milliseconds only.
CHUNK_EVENTS_MAX: Final = 1_000
# The same beside single events and atomic batches: a POST waits for some ten such steps.
CHUNK_EVENTS_BESIDE_SINGLE: Final = 100

# Bound for each request: see IdentityEnum.
_ANSWER: Final = RequestEvent.ANSWER


class BatchChunk:
    """Events of one batch for one transaction, which keeps their order: at most CHUNK_EVENTS_MAX.

    Their keys differ, because the second claim of a key in a call would find the first.
    """

    def __init__(
        self,
        events_max: int = CHUNK_EVENTS_MAX,
        ledger_bytes_max: int = GROUP_LEDGER_BYTES_MAX,
        event_bytes_max: int = GROUP_EVENT_BYTES_MAX,
    ) -> None:
        self.events: list[Event] = []
        self._events_max = min(events_max, CHUNK_EVENTS_MAX)
        self._ledger_bytes_max = ledger_bytes_max
        self._event_bytes_max = event_bytes_max
        self.ledger_bytes = self.event_bytes = 0
        self._ids: set[bytes] = set()

    def add(self, event: Event) -> bool:
        """Append an event; False if the chunk has no room for it. An empty chunk has room for any event."""
        ledger_bytes = self.ledger_bytes + event.entry_bytes
        event_bytes = self.event_bytes + event.size
        if self.events and (
            event.id in self._ids
            or len(self.events) >= self._events_max
            or ledger_bytes > self._ledger_bytes_max
            or event_bytes > self._event_bytes_max
        ):
            return False
        self.events.append(event)
        self._ids.add(event.id)
        self.ledger_bytes, self.event_bytes = ledger_bytes, event_bytes
        return True


def _totals_of(
    events: Sequence[Event], to_claim: list[tuple[bytes, bytes]], offsets: GroupOffsets | None = None
) -> tuple[list[tuple[bytes, bytes]], bool, int, int, int]:
    """Return the fields of a request from `to_claim` to `size`; the events' own pairs follow those in `to_claim`."""
    atomic = bool(to_claim)
    ledger_bytes = event_bytes = 0
    for event in events:
        to_claim.append((event.id, event.fp))
        ledger_bytes += event.entry_bytes
        event_bytes += event.size
    size = event_bytes + len(events) * WAITING_BYTES
    if offsets is not None:
        ledger_bytes += offsets.ledger_bytes
        size += offsets.size + WAITING_BYTES
    return to_claim, atomic, ledger_bytes, event_bytes, size


class WriteRequest(msgspec.Struct, eq=False):
    """Events that are written together: one event, an atomic batch, or (a part of) a chunk.

    `resolve` sets the result once: in `future`, or for a chunk in `collector`, where `indexes` are the events' indexes
    in the chunk. Times are time.monotonic, which is also the loop's clock. `size` is the request's share of the queue's
    bytes. `to_claim` holds the (id, fingerprint) pairs to claim: one for each event, and before them the batch's for an
    atomic batch. Only an atomic batch has `offsets`, and only one with offsets may have no events.
    """

    events: Sequence[Event]
    arrived: float
    deadline: float
    guarantee: Guarantee
    to_claim: list[tuple[bytes, bytes]]
    atomic: bool
    ledger_bytes: int
    event_bytes: int
    size: int
    future: asyncio.Future[WriteResult] | None = None
    collector: ResultCollector | None = None
    indexes: Sequence[int] = ()
    state: RequestState = RequestState.QUEUED
    wait_deadline: float = 0.0  # until when the request waits for another request's write of its key
    timer: asyncio.TimerHandle | None = None  # for the end of its wait, or for a chunk's deadline, until its result
    on_claim: asyncio.Future[None] | None = None  # set when the request's claim stands
    ttl_s: int = 0  # retention of its keys by a rule, in seconds; 0 for the service's own
    accepted_at: int = 0
    claimants: tuple[tuple[int, int], ...] = ()  # (slot, ended term) pairs in which a claim of the request may stand
    failures: int = 0  # groups with this request that one of its topics failed
    aborts: int = 0  # aborted transactions that this request may have failed
    partitions: Sequence[int] = ()  # of its events, chosen again for each group
    group_number: int = 0  # of the last group with this request
    spans: Sequence["Span"] = ()  # of its events, if they are traced
    offsets: GroupOffsets | None = None  # of a consumer group, committed in the same transaction

    @classmethod
    def for_event(
        cls,
        event: Event,
        arrived: float,
        deadline: float,
        guarantee: Guarantee,
        ttl_s: int = 0,
        future: asyncio.Future[WriteResult] | None = None,
        wait_deadline: float = 0.0,
        on_claim: asyncio.Future[None] | None = None,
    ) -> "WriteRequest":
        """Make the request of one event."""
        return cls(
            (event,),
            arrived,
            deadline,
            guarantee,
            [(event.id, event.fp)],
            False,
            event.entry_bytes,
            event.size,
            event.size + WAITING_BYTES,
            ttl_s=ttl_s,
            future=future,
            wait_deadline=wait_deadline,
            on_claim=on_claim,
        )

    @classmethod
    def for_chunk(
        cls, events: Sequence[Event], arrived: float, deadline: float, guarantee: Guarantee, ttl_s: int = 0
    ) -> "WriteRequest":
        """Make the request of a chunk, which `collect_in` gives the list for its results."""
        return cls(
            events,
            arrived,
            deadline,
            guarantee,
            *_totals_of(events, []),
            ttl_s=ttl_s,
            indexes=range(len(events)),
        )

    @classmethod
    def for_atomic(
        cls,
        events: Sequence[Event],
        batch_pair: tuple[bytes, bytes],
        arrived: float,
        deadline: float,
        ttl_s: int = 0,
        future: asyncio.Future[WriteResult] | None = None,
        offsets: GroupOffsets | None = None,
    ) -> "WriteRequest":
        """Make the request of an atomic batch; `batch_pair` is its (id, fingerprint)."""
        totals = _totals_of(events, [batch_pair], offsets)
        return cls(
            events, arrived, deadline, Guarantee.EXACTLY_ONCE, *totals, ttl_s=ttl_s, future=future, offsets=offsets
        )

    def __repr__(self) -> str:
        return f"<WriteRequest {' '.join(id.hex() for id, _ in self.to_claim[:1])} {self.state.value}>"

    @property
    def id(self) -> bytes:
        """The id of the key: of an atomic batch that of the whole, of a chunk that of its first event."""
        return self.to_claim[0][0]

    @property
    def claimed_ids(self) -> list[bytes]:
        """The ids of all claims of the request."""
        return [id for id, _ in self.to_claim]

    @property
    def is_refused(self) -> bool:
        """Whether its events are dead letters: all are, or none, once a chunk is split."""
        return bool(self.events) and isinstance(self.events[0], DeadLetter)

    @property
    def is_chunk(self) -> bool:
        """Whether each of several events has a result of its own."""
        return len(self.events) > 1 and not self.atomic

    @property
    def answers(self) -> int:
        """How many results the request has; an atomic batch has one."""
        return 1 if self.atomic else len(self.events)

    def part(
        self,
        indexes: Sequence[int],
        guarantee: Guarantee | None = None,
        ttl_s: int | None = None,
    ) -> "WriteRequest":
        """Make a request for some events of a chunk, in the state of the chunk, by default under the same rules."""
        events = [self.events[index] for index in indexes]
        to_claim, atomic, ledger_bytes, event_bytes, size = _totals_of(events, [])
        return msgspec.structs.replace(
            self,
            events=events,
            guarantee=guarantee or self.guarantee,
            ttl_s=self.ttl_s if ttl_s is None else ttl_s,
            to_claim=to_claim,
            atomic=atomic,
            ledger_bytes=ledger_bytes,
            event_bytes=event_bytes,
            size=size,
            timer=None,
            indexes=[self.indexes[index] for index in indexes],
            partitions=[self.partitions[index] for index in indexes] if self.partitions else (),
            spans=[self.spans[index] for index in indexes] if self.spans else (),
        )

    def to_send_again(self) -> "WriteRequest":
        """Make a request for the events of a chunk that failed: it is queued, and no transaction of it was aborted."""
        return msgspec.structs.replace(self, state=RequestState.QUEUED, aborts=0, timer=None)

    def collect_in(self, results: list[WriteResult | None]) -> ResultCollector:
        """Have the results of a chunk's events collected in a list, which has one for each event of the whole chunk."""
        self.collector = ResultCollector(results, len(self.events))
        return self.collector

    def take_out(self, indexes: Iterable[int]) -> list["WriteRequest"]:
        """Remove these events from a chunk and make a request for each; any other request is returned itself."""
        if not self.is_chunk:
            return [self]
        taken = list(indexes)
        parts = [self.part([index]) for index in taken]
        rest = self.part(sorted(set(range(len(self.events))).difference(taken)))
        self.events, self.to_claim, self.indexes, self.spans = rest.events, rest.to_claim, rest.indexes, rest.spans
        self.partitions, self.size = rest.partitions, rest.size
        self.ledger_bytes, self.event_bytes = rest.ledger_bytes, rest.event_bytes
        if not self.events:
            self.move(RequestEvent.SPLIT)
        return parts

    def resolve(self, result: WriteResult) -> WriteResult:
        """Set the request's result, and drop the future, which holds the client's connection.

        Also cancels its timer, which would hold the events until then. Returns the result as the client gets it.
        """
        self.move(_ANSWER)
        if self.timer is not None:
            self.timer.cancel()
        future, self.future = self.future, None
        shown = self.shown(result)
        if self.collector is not None:
            self.collector.put(self.indexes, result)
        elif future is not None and not future.done():  # done: the coroutine that awaited it was cancelled
            future.set_result(shown)
        return shown

    def shown(self, result: WriteResult) -> WriteResult:
        """Return the client's answer: a result, or of a dead letter the problem for which the event was refused."""
        if self.is_refused and isinstance(result, Committed):
            return result_of(result.deliveries[0], replayed=result.replayed)
        return result

    def set_claimed(self) -> None:
        """Set `on_claim`, once: the claim stands."""
        on_claim, self.on_claim = self.on_claim, None
        if on_claim is not None and not on_claim.done():
            on_claim.set_result(None)

    @property
    def topic(self) -> str:
        """The topic of the first event."""
        return self.events[0].topic

    @property
    def topics(self) -> set[str]:
        return {event.topic for event in self.events}

    @property
    def dependencies(self) -> set[str]:
        """The names that the queue isolates if they fail a group: the topics, and that of a consumer group."""
        return self.topics if self.offsets is None else {*self.topics, self.offsets.isolation_name}

    @property
    def named(self) -> dict[str, str]:
        """The log fields that name the request."""
        return {**({"key": self.events[0].key} if self.events else {}), "id": self.id.hex()}

    @property
    def finished(self) -> bool:
        """Whether the request has its result, or its events continue in other requests."""
        return self.state in FINISHED

    def move(self, event: RequestEvent) -> None:
        """Change the state. A finished request stays as it is, whatever its group still does."""
        if self.state not in FINISHED:
            self.state = REQUEST[self.state, event]
