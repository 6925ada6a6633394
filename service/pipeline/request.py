"""A request inside this process: one event, or an atomic batch of them; and what it is answered."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from service.claims.states import REQUEST, Delivered, RequestEvent, RequestState
from service.contract import Guarantee
from service.core.problems import Problem
from service.core.settings import GROUP_EVENT_BYTES_MAX, GROUP_LEDGER_BYTES_MAX, WAITING_BYTES
from service.events.event import BATCH_EVENTS_MAX, Event

# One event is in Kafka: its id, and where.
Placed = tuple[bytes, Delivered]


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The request's events are in Kafka, in their order. `at` is accepted_at in ms."""

    at: int
    places: tuple[Placed, ...]
    replayed: bool


WriteResult = Committed | Problem


class ResultCollector:
    """The answers of several requests, for one who waits for `all` of them."""

    def __init__(self, count: int) -> None:
        self._answers: list[WriteResult | None] = [None] * count
        self._missing = count
        self.all: asyncio.Future[list[WriteResult]] = asyncio.get_running_loop().create_future()

    def put(self, place: int, answer: WriteResult) -> None:
        """The answer of the request at that place."""
        self._answers[place] = answer
        self._missing -= 1
        if not self._missing and not self.all.done():  # who waited may have been cancelled
            self.all.set_result([answer for answer in self._answers if answer is not None])

    def put_all(self, answer: WriteResult) -> None:
        """One answer for all of them: where they are, in their order, or why they are not."""
        if isinstance(answer, Committed):
            at, replayed = answer.at, answer.replayed
            answers: list[WriteResult] = [Committed(at, (place,), replayed) for place in answer.places]
        else:
            answers = [answer] * len(self._answers)
        if not self.all.done():
            self.all.set_result(answers)


def fit(ledger_bytes: int, event_bytes: int, ledger_bytes_max: int = GROUP_LEDGER_BYTES_MAX) -> bool:
    """Does one transaction hold so much?"""
    return ledger_bytes <= ledger_bytes_max and event_bytes <= GROUP_EVENT_BYTES_MAX


class BatchChunk:
    """Events of one batch that follow each other into one transaction, which is what keeps their order.

    Their keys differ, for a key would meet itself in one claim. Where that transaction fails they may go on one by one,
    and still in their order, as far as it can be seen: those of a topic.
    """

    def __init__(self, events_max: int = BATCH_EVENTS_MAX, ledger_bytes_max: int = GROUP_LEDGER_BYTES_MAX) -> None:
        self.events: list[Event] = []
        self._events_max = events_max
        self._ledger_bytes_max = ledger_bytes_max
        self.ledger_bytes = self.event_bytes = 0
        self.came_apart = False  # some of its requests have gone round again
        self._ids: set[bytes] = set()
        self._again: dict[str, dict[WriteRequest, None]] = {}  # by topic: requests that have gone round again, in order

    def takes(self, event: Event) -> bool:
        """Is there room for it? An empty one takes any."""
        if not self.events:
            return True
        ledger_bytes = self.ledger_bytes + event.entry_bytes
        fits = fit(ledger_bytes, self.event_bytes + event.size, self._ledger_bytes_max)
        return fits and event.id not in self._ids and len(self.events) < self._events_max

    def add(self, event: Event) -> None:
        """Append an event that it takes."""
        self.events.append(event)
        self._ids.add(event.id)
        self.ledger_bytes += event.entry_bytes
        self.event_bytes += event.size

    def goes_again(self, request: "WriteRequest") -> None:
        """A request of it goes round again; all of a topic that do are told of in their order, the first time."""
        self.came_apart = True
        self._again.setdefault(request.topic, {})[request] = None

    def left(self, topic: str) -> "deque[WriteRequest]":
        """Those of a topic that have gone round again and have no answer yet, wherever they are, in their order."""
        left = {request: None for request in self._again.pop(topic, ()) if not request.answered}
        if left:
            self._again[topic] = left
        return deque(left)


class WriteRequest(msgspec.Struct, eq=False):
    """Events on their way together. `reply` is called exactly once, by whoever moves the state to ANSWERED.

    They are one event, an atomic batch, or a train in one piece, which is `part`ed as soon as its events may differ.
    `Request.of` makes one. Its times are by time.monotonic, which is the loop's clock too. `size` is its share of the
    queue's bytes. `asked` is what is claimed: the event's (id, fingerprint), or the whole's and then each member's.
    """

    events: Sequence[Event]
    arrived: float
    deadline: float
    guarantee: Guarantee
    reply: Callable[[WriteResult], None]
    asked: list[tuple[bytes, bytes]]
    atomic: bool
    train: BatchChunk | None
    ledger_bytes: int
    event_bytes: int
    size: int
    state: RequestState = RequestState.QUEUED
    wait_deadline: float = 0.0  # until then it would wait for another's write of its key, by the loop's time
    waits: bool = False  # for another's write of its key, which it has met
    accepted: Callable[[], None] | None = None  # to be told, once, that its claim stands
    accepted_at: int = 0
    claimants: tuple[tuple[int, int], ...] = ()  # slots and ended terms in which a claim of it may stand
    failures: int = 0  # groups that its topic failed while it was in them
    aborts: int = 0  # transactions that failed before their commit was asked for, and maybe because of it
    partitions: Sequence[int] = ()  # of its events, chosen anew for each group that it goes into
    group_number: int = 0  # number of the group that took it last: whoever has an older one has it no more
    reply_each: Callable[[int, WriteResult], None] | None = None  # of a train in one piece: by its event's place
    parts: Sequence["WriteRequest"] = ()  # of a train that was in one piece, and is not any more

    @classmethod
    def of(
        cls,
        events: Sequence[Event],
        arrived: float,
        timeout_s: float,
        guarantee: Guarantee,
        reply: Callable[[WriteResult], None],
        whole: tuple[bytes, bytes] | None = None,
        train: BatchChunk | None = None,
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
        return cls(events, arrived, deadline, guarantee, reply, asked, atomic, train, ledger_bytes, event_bytes, size)

    def __repr__(self) -> str:
        return f"<Request {self.asked[0][0].hex()} {self.state.value}>"

    @property
    def answers(self) -> int:
        """How many events it answers; an atomic batch is one answer."""
        return 1 if self.atomic else len(self.events)

    @property
    def is_whole(self) -> bool:
        """Is it a train whose events have not parted?"""
        return len(self.events) > 1 and not self.atomic and not self.parts

    @property
    def settled(self) -> bool:
        """Has each of its events its answer?"""
        return self.answered and (not self.parts or all(part.answered for part in self.parts))

    def split(self) -> list["WriteRequest"]:
        """Take a train in one piece apart: a request for each event, as far on its way as all were. It ends itself.

        It stands for their deadline, which is one. Where it has gone round again they have, and in their order.
        """
        parts: list[WriteRequest] = []
        for place, event in enumerate(self.events):
            reply = unheard if self.reply_each is None else partial(self.reply_each, place)
            one = WriteRequest.of((event,), self.arrived, 0.0, self.guarantee, reply, train=self.train)
            one.deadline, one.state, one.group_number = self.deadline, self.state, self.group_number
            one.accepted_at, one.claimants = self.accepted_at, self.claimants
            one.partitions = self.partitions[place : place + 1]
            parts.append(one)
        self.parts = parts
        self.end()
        if self.train is not None and self.train.came_apart:
            for one in parts:
                self.train.goes_again(one)
        return parts

    def end(self) -> Callable[[WriteResult], None]:
        """It is answered, or its parts will be; its reply, which it keeps no longer: a connection hangs on that."""
        self.move(RequestEvent.ANSWER)
        reply, self.reply, self.reply_each = self.reply, unheard, None
        return reply

    @property
    def topic(self) -> str:
        """Its event's topic; that of the first one of several."""
        return self.events[0].topic

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


def unheard(answer: WriteResult) -> None:
    """The reply of a request whose answer nobody waits for any more."""
