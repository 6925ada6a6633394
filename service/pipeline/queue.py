"""The bounded queue where requests wait for a slot, and how they are made up into groups."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from service.contract import Guarantee
from service.core.problems import NOT_WRITTEN, Problem
from service.core.settings import GROUP_LEDGER_BYTES_MAX, Settings
from service.pipeline.request import BatchChunk, WriteRequest, fit

# Groups under way at once: while one is in Kafka the next is claimed. More would only be smaller, and cost more.
GROUPS_AT_ONCE: Final = 2
# A group that takes longer hangs on something, and makes room for another.
GROUP_QUICK_S: Final = 0.05


class Queue:
    """Requests that wait for a slot, first come first served, within bounds of events and bytes.

    The bounds count every request that is not answered yet, also those in a transaction. A topic that failed a group
    travels apart, one request at a time where it was in that group, until one of its events commits. While others wait
    too, what travels apart gets half of the time at most, its topics in turn: such a group may hang for seconds.
    """

    def __init__(self, settings: Settings, groups_at_once: int = GROUPS_AT_ONCE) -> None:
        self._groups_at_once = groups_at_once
        self._events_max = settings.queue_events_max
        self._bytes_max = settings.queue_bytes_max
        self._waiting: dict[Guarantee, deque[WriteRequest]] = {guarantee: deque() for guarantee in Guarantee}
        self._apart: deque[WriteRequest] = deque()
        self._suspects: set[str] = set()
        self._apart_out: list[WriteRequest] | None = None
        self._held: list[WriteRequest] = []  # of trains that came apart, behind one of theirs that is elsewhere
        self._apart_turns: dict[str, int] = {}  # of suspects: their last one
        self._apart_rests_until = 0.0
        self._groups_taken = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._out: dict[int, float] = {}  # groups that were taken and not returned, and when
        self._last_size = 0  # requests in the last of them, each event of a train in one piece counted
        self._within = 0  # so many more wait than there are requests: events of trains in one piece
        self._making_room: asyncio.TimerHandle | None = None
        self.events = 0
        self.bytes = 0
        self.ledger_bytes_max = GROUP_LEDGER_BYTES_MAX  # of a group; what the ledger takes may be less

    def admit(self, requests: Sequence[WriteRequest]) -> None:
        """Take new requests in, all or none. Raises Problem (503) where a bound would be passed."""
        events = size = 0
        for request in requests:
            events += len(request.events)
            size += request.size
        if self.events + events > self._events_max:
            raise self.too_many
        if self.bytes + size > self._bytes_max:
            raise Problem(NOT_WRITTEN, f"the queue is full ({self._bytes_max} bytes): send it again a little later")
        self.events += events
        self.bytes += size
        for request in requests:
            self._lane(request).append(request)
            if len(request.events) > 1 and request.is_whole:
                self._within += len(request.events) - 1
        self.notify()

    @property
    def full(self) -> bool:
        """Is not even one event more taken?"""
        return self.events >= self._events_max

    @property
    def too_many(self) -> Problem:
        """What is answered then."""
        return Problem(NOT_WRITTEN, f"the queue is full ({self._events_max} events): send it again a little later")

    def leave(self, request: WriteRequest) -> None:
        """An answered request counts no more."""
        self.events -= len(request.events)
        self.bytes -= request.size
        if self._held and request.train is not None and request.train.came_apart:
            self.put_back(())

    def forget_answered(self) -> None:
        """Let go of requests that were answered while they waited: without a slot nobody would take them out."""
        for lane in (*self._waiting.values(), self._apart):
            while lane and lane[0].answered:
                lane.popleft()
            if len(lane) > 2 * self.events + 1_000:
                kept = [request for request in lane if not request.answered]
                lane.clear()
                lane.extend(kept)

    def put_back(self, requests: Iterable[WriteRequest]) -> None:
        """Requests that go round again, at the front and in their order; behind them those that may wait for them."""
        again: list[WriteRequest] = []
        for request in requests:
            if request.answered:
                continue
            if request.train is not None:
                request.train.goes_again(request)
            too_large = request.ledger_bytes > self.ledger_bytes_max
            if request.is_whole and (too_large or self.has_suspects(event.topic for event in request.events)):
                again += request.split()  # those of the other topics need not travel apart
            else:
                again.append(request)
        held, self._held = self._held, []
        for request in reversed([*again, *held]):
            if not request.answered:
                self._lane(request).appendleft(request)
                if request.is_whole:
                    self._within += len(request.events) - 1
        self.notify()

    def _lane(self, request: WriteRequest) -> deque[WriteRequest]:
        if self._suspects and any(event.topic in self._suspects for event in request.events):
            return self._apart
        return self._waiting[request.guarantee]

    def quarantine(self, topic: str) -> None:
        """The topic failed a group: its events travel apart from here on."""
        self._suspects.add(topic)

    def release(self, topics: Iterable[str]) -> None:
        """Events of these topics were committed: they travel with the others again."""
        if self._suspects and (trusted := self._suspects.intersection(topics)):
            self._suspects -= trusted
            for topic in trusted:
                self._apart_turns.pop(topic, None)
            apart, self._apart = self._apart, deque()
            for request in apart:
                self._lane(request).append(request)
            self.notify()

    def has_suspects(self, topics: Iterable[str]) -> bool:
        """Has one of these failed a group?"""
        return not self._suspects.isdisjoint(topics)

    def suspects(self, group: Sequence[WriteRequest]) -> bool:
        """Does this group travel apart?"""
        return self._apart_out is group

    # ------------------------------------------------------------------------------------------------- for slots

    def notify(self) -> None:
        """Wake one taker, if any waits and another group may go."""
        while self._waiters and not self._crowded():
            taker = self._waiters.popleft()
            if not taker.done():
                taker.set_result(None)
                return

    def notify_all(self) -> None:
        """Wake every taker: one of them is to stop."""
        takers, self._waiters = self._waiters, deque()
        for taker in takers:
            if not taker.done():
                taker.set_result(None)

    async def wait(self) -> None:
        """Until something may be there to take."""
        if self._crowded() or (not any(self._waiting.values()) and (self._apart_out is not None or not self._apart)):
            taker = asyncio.get_running_loop().create_future()
            self._waiters.append(taker)
            await taker

    def _crowded(self) -> bool:
        """Are as many groups under way as are good for all? Those that take long do not count.

        One goes beside another only if it is as large: the smaller they are, the more each event costs everybody.
        """
        if not self._out:
            return False
        most = self._groups_at_once if self._waiting_count() >= self._last_size else 1
        if len(self._out) < most:
            return False
        now = time.monotonic()
        quick = [since for since in self._out.values() if since > now - GROUP_QUICK_S]
        if len(quick) < most:
            return False
        if self._making_room is None:
            delay_s = min(quick) + GROUP_QUICK_S + 0.001 - now
            self._making_room = asyncio.get_running_loop().call_later(delay_s, self._make_room)
        return True

    def _waiting_count(self) -> int:
        return sum(map(len, self._waiting.values())) + len(self._apart) + self._within

    def _make_room(self) -> None:
        self._making_room = None
        self.notify()

    def take(self) -> list[WriteRequest]:
        """The next group: as many as one transaction holds, in order and of one guarantee; [] where there is none."""
        if self._crowded():
            return []
        now = time.monotonic()
        group = self._take_apart() if now >= self._apart_rests_until else []
        group = (
            group or self._take_group(min(self._waiting.values(), key=_head_arrived), self._held) or self._take_apart()
        )
        if group:
            self._out[id(group)] = now
            self._last_size = len(group)
            if self._within:
                self._last_size += _within(group)
                self._within = sum(map(_within, (*self._waiting.values(), self._apart)))
            self._groups_taken += 1
            for request in group:
                request.group_number = self._groups_taken
        if self._apart or any(self._waiting.values()):
            self.notify()
        return group

    def returned(self, group: list[WriteRequest]) -> None:
        """A group that `take` gave out is done with, well or not: another may go."""
        since = self._out.pop(id(group), None)
        if self._apart_out is group and since is not None:
            self._apart_out = None
            now = time.monotonic()
            self._apart_rests_until = now + (now - since)
        if self._apart or any(self._waiting.values()):
            self.notify()

    def _take_group(self, waiting: deque[WriteRequest], held: list[WriteRequest]) -> list[WriteRequest]:
        return take_group(waiting, held, self.ledger_bytes_max)

    def _take_apart(self) -> list[WriteRequest]:
        """One request that was in a failed group, alone; else what waits of one suspect topic. One group at a time.

        Who has failed alone comes after those of its topic that have not: one of them may commit, and ends the matter.
        """
        if self._apart_out is not None or not self._apart:
            return []
        order, waiting = Order(), list[WriteRequest]()
        for request in self._apart:
            if not request.answered:
                (waiting if order.lets(request) else self._held).append(request)
        self._apart = deque(waiting)
        if not waiting:
            return []
        first = min(_fronts(waiting), key=lambda one: (self._apart_turns.get(one.topic, 0), max(one.failures, 1)))
        topic = first.topic

        def alike(request: WriteRequest) -> bool:
            return not request.failures and all(event.topic == topic for event in request.events)

        together = [first] if first.failures else [one for one in waiting if one is first or alike(one)]
        self._apart_out = group = self._take_group(deque(together), [])
        self._apart_turns[topic] = self._groups_taken + 1
        taken = set(group)
        self._apart = deque(request for request in waiting if request not in taken)
        return group


class Order:
    """For one taking: which requests of trains that came apart may go, those of a topic in their order."""

    def __init__(self) -> None:
        self._left: dict[tuple[BatchChunk, str], deque[WriteRequest]] = {}

    def lets(self, request: WriteRequest) -> bool:
        """May it go, with those that were let before? Not while one of its train that comes before it is elsewhere."""
        train, topic = request.train, request.topic
        if train is None or not train.came_apart:
            return True
        if (train, topic) not in self._left:
            self._left[train, topic] = train.left(topic)
        left = self._left[train, topic]
        return not left or (left[0] is request and left.popleft() is request)


def take_group(
    waiting: deque[WriteRequest], held: list[WriteRequest], ledger_bytes_max: int = GROUP_LEDGER_BYTES_MAX
) -> list[WriteRequest]:
    """Take from the front what one transaction holds; an atomic batch goes alone, a train whole if it can.

    What may not go yet is moved to `held`.
    """
    group: list[WriteRequest] = []
    ledger_bytes = event_bytes = 0
    order = Order()
    while waiting:
        request = waiting[0]
        if request.answered:
            waiting.popleft()
            continue
        if request.train is not None and request.train.came_apart and not order.lets(request):
            held.append(waiting.popleft())
            continue
        train = request.train
        if train is not None and train.came_apart and train.ledger_bytes > ledger_bytes_max:
            train = None  # no transaction holds all of it any more
        if train is None or not group or group[-1].train is not train:
            load = train or request
            ledger_bytes += load.ledger_bytes
            event_bytes += load.event_bytes
            if group and (request.atomic or group[0].atomic or not fit(ledger_bytes, event_bytes, ledger_bytes_max)):
                break
        group.append(waiting.popleft())
    return group


def _within(requests: Iterable[WriteRequest]) -> int:
    """How many more events than requests, of trains in one piece."""
    return sum([len(request.events) - 1 for request in requests if request.is_whole])


def _fronts(waiting: Iterable[WriteRequest]) -> Iterator[WriteRequest]:
    """Those that come after no other of their train and topic."""
    seen: set[tuple[BatchChunk, str]] = set()
    for request in waiting:
        if request.train is None:
            yield request
        elif (request.train, request.topic) not in seen:
            seen.add((request.train, request.topic))
            yield request


def _head_arrived(waiting: deque[WriteRequest]) -> float:
    return waiting[0].arrived if waiting else float("inf")
