"""The bounded queue in which requests wait for a slot, and from which slots take them in groups."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from service.contract import Guarantee
from service.core.problems import NOT_WRITTEN, Problem
from service.core.settings import GROUP_EVENT_BYTES_MAX, GROUP_LEDGER_BYTES_MAX, Settings
from service.pipeline.group import Group
from service.pipeline.quota import QuotaBound, pause_after
from service.pipeline.request import WriteRequest, fit

# Groups in flight at once: while a group is written, the next is claimed. With more, groups would be smaller, and each
# event would cost more.
GROUPS_AT_ONCE: Final = 2
# A group that takes longer is stuck on something, and does not count as in flight.
GROUP_QUICK_S: Final = 0.05

# Isolated names without a waiting request that are remembered. A topic that was deleted never commits again.
ISOLATED_NAMES_MAX: Final = 1_000


class GroupConsumer(Protocol):
    """Takes groups: a slot."""

    @property
    def takes_groups(self) -> bool:
        """Whether the consumer may take a group now. Call `notify_all` when this becomes false."""


class Queue:
    """Requests that wait for a slot, first in first out, within bounds of events and bytes.

    The bounds count all requests without an answer, also those in a transaction. A topic that failed a group is
    isolated until one of its events commits: its requests go into groups of their own, and those that were in the
    failed group go one at a time. While other requests wait too, isolated groups get at most half of the time, one
    topic after the other, because such a group may hang for seconds. A consumer group whose coordinator failed a group
    is isolated as a topic is, under a name that no topic can have.
    """

    def __init__(self, settings: Settings, groups_at_once: int = GROUPS_AT_ONCE) -> None:
        self._groups_at_once = groups_at_once
        self._events_max = settings.queue_events_max
        self._bytes_max = settings.queue_bytes_max
        self._waiting: dict[Guarantee, deque[WriteRequest]] = {guarantee: deque() for guarantee in Guarantee}
        self._isolated: deque[WriteRequest] = deque()
        self._isolated_names: dict[str, None] = {}  # in the order of their first failure
        self._isolated_group: Group | None = None  # in flight
        self._isolated_order: dict[str, int] = {}  # by isolated name: the number of its last group
        self._next_isolated_at = 0.0  # time.monotonic before which no isolated group is taken
        self._idle_slots: deque[asyncio.Future[None]] = deque()
        self._in_flight: dict[Group, None] = {}
        self._groups_taken = 0
        self._last_group_size = 0  # requests of the last group that was not isolated
        self._making_room: asyncio.TimerHandle | None = None
        self.is_closed = False  # admits nothing more, because the process stops
        self.events = 0
        self.bytes = 0
        self.ledger_bytes_max = self._topic_bytes_max = GROUP_LEDGER_BYTES_MAX  # of a group, and by the topic's limit
        self._quota = QuotaBound()
        self._resuming: asyncio.TimerHandle | None = None  # while no group is taken, under a quota

    def admit(self, request: WriteRequest) -> None:
        """Count a new request, one without events as one event. Raises Problem (503) if a bound would be exceeded."""
        events = len(request.events) or 1
        if self.events + events > self._events_max:
            raise self.too_many
        if self.bytes + request.size > self._bytes_max:
            raise Problem(NOT_WRITTEN, f"the queue is full ({self._bytes_max} bytes): send it again a little later")
        self.events += events
        self.bytes += request.size

    def close(self) -> None:
        """Admit no further request, by whichever rules; those in the queue are still taken."""
        self.is_closed = True

    def put(self, request: WriteRequest) -> None:
        """Append a counted request."""
        self._queue_of(request).append(request)
        self.notify()

    def limit_ledger_bytes(self, most: int) -> None:
        """Bound the ledger bytes of a group by what the ledger's topic takes, by its settings.

        A smaller bound after a refusal stays until these change: they may be hidden from the service.
        """
        if most != self._topic_bytes_max:
            self.ledger_bytes_max = self._topic_bytes_max = most

    def ledger_was_full(self, requests: Sequence[WriteRequest]) -> None:
        """Halve the bound: the ledger's topic has just refused the ledger record of these requests."""
        self.ledger_bytes_max = max(1, sum(request.ledger_bytes for request in requests) // 2)

    def note_throttle(self, group: Group, throttled_s: float, *, failed: bool = False) -> None:
        """Note for how long Kafka's quota has throttled a group, in seconds: the next groups are as large as it bears.

        If the group has `failed` under the quota, no other is taken until Kafka no longer counts its bytes.
        """
        if not throttled_s and self._quota.bytes_max == GROUP_EVENT_BYTES_MAX:
            return
        written = max(group.event_bytes, group.ledger_bytes)
        self._quota.note(written, throttled_s, group.started, time.monotonic())
        if failed and (pause_s := pause_after(throttled_s)) and self._resuming is None:
            self._resuming = asyncio.get_running_loop().call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._resuming = None
        self.notify()

    @property
    def group_bytes_max(self) -> tuple[int, int]:
        """The most bytes of a group's ledger entries, and of its events."""
        under_quota = self._quota.bytes_max
        return min(self.ledger_bytes_max, under_quota), min(GROUP_EVENT_BYTES_MAX, under_quota)

    @property
    def full(self) -> bool:
        """Whether no further event is admitted."""
        return self.events >= self._events_max

    @property
    def too_many(self) -> Problem:
        """The answer (503) while the queue is full."""
        return Problem(NOT_WRITTEN, f"the queue is full ({self._events_max} events): send it again a little later")

    def leave(self, request: WriteRequest) -> None:
        """Remove an answered request from the counts."""
        self.events -= len(request.events) or 1
        self.bytes -= request.size

    def forget_answered(self) -> None:
        """Drop requests that were answered while they waited; without a slot nobody takes them out."""
        for requests in (*self._waiting.values(), self._isolated):
            while requests and requests[0].finished:
                requests.popleft()
            if len(requests) > 2 * self.events + 1_000:
                kept = [request for request in requests if not request.finished]
                requests.clear()
                requests.extend(kept)

    def put_back(self, requests: Sequence[WriteRequest]) -> None:
        """Put requests back at the front, in their order."""
        for request in reversed(requests):
            if not request.finished:
                self._queue_of(request).appendleft(request)
        self.notify()

    def _queue_of(self, request: WriteRequest) -> deque[WriteRequest]:
        if self._isolated_names and self.is_isolated(request.dependencies):
            return self._isolated
        return self._waiting[request.guarantee]

    # -------------------------------------------------------------------------------------------------- isolation

    def isolate(self, names: Iterable[str]) -> None:
        """Isolate what failed a group, topics or a consumer group, by the names in WriteRequest.dependencies.

        The requests with these names, also those that wait, go into groups of their own.
        """
        if new := [name for name in names if name not in self._isolated_names]:
            self._isolated_names |= dict.fromkeys(new)
            self._bound_isolated_names()
            for guarantee, requests in list(self._waiting.items()):
                self._waiting[guarantee] = deque()
                for request in requests:
                    self._queue_of(request).append(request)

    def release(self, names: Iterable[str]) -> None:
        """End the isolation of these names: an event of the topic was committed, or the group's coordinator answers."""
        if self._isolated_names and (released := self._isolated_names.keys() & set(names)):
            for name in released:
                self._release_name(name)
            requests, self._isolated = self._isolated, deque()
            for request in requests:
                self._queue_of(request).append(request)
            self.notify()

    def is_isolated(self, names: Iterable[str]) -> bool:
        """Whether one of these names is isolated."""
        return any(name in self._isolated_names for name in names)

    def _bound_isolated_names(self) -> None:
        """Release the first names beyond ISOLATED_NAMES_MAX that no isolated request has."""
        if len(self._isolated_names) > ISOLATED_NAMES_MAX:
            waiting = {name for request in self._isolated for name in request.dependencies}
            idle = [name for name in self._isolated_names if name not in waiting]
            for name in idle[: len(self._isolated_names) - ISOLATED_NAMES_MAX]:
                self._release_name(name)

    def _release_name(self, name: str) -> None:
        del self._isolated_names[name]
        self._isolated_order.pop(name, None)

    # ------------------------------------------------------------------------------------------------- for slots

    async def next_group(self, consumer: GroupConsumer) -> Group | None:
        """Await the next group; None if the consumer may take none any more, or another consumer was faster."""
        await self._wait()
        if consumer.takes_groups:
            return self.take()
        self.notify()  # another consumer may take the requests
        return None

    def take(self) -> Group | None:
        """Take the next group: in order, of one guarantee, as much as one transaction holds; None if there is none."""
        if self._at_capacity():
            return None
        now = time.monotonic()
        requests, isolated = self._take_requests(now)
        group = None
        if requests:
            self._groups_taken += 1
            group = Group(requests, self._groups_taken, now, isolated)
            self._in_flight[group] = None
            if isolated:
                self._isolated_group = group
            else:
                self._last_group_size = len(requests)
            for request in requests:
                request.group_number = group.number
        self._notify_if_any_waits()
        return group

    def done(self, group: Group) -> None:
        """End a group, successful or not, so that another may be taken."""
        self._in_flight.pop(group, None)
        if self._isolated_group is group:
            self._isolated_group = None
            now = time.monotonic()
            self._next_isolated_at = now + (now - group.started)
        self._notify_if_any_waits()

    def notify(self) -> None:
        """Wake a waiting slot, if another group may be taken."""
        while self._idle_slots and not self._at_capacity():
            waiter = self._idle_slots.popleft()
            if not waiter.done():  # done: its slot was cancelled
                waiter.set_result(None)
                return

    def notify_all(self) -> None:
        """Wake all waiting slots: those that may not take groups any more return without one."""
        waiters, self._idle_slots = self._idle_slots, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _notify_if_any_waits(self) -> None:
        if self._isolated or any(self._waiting.values()):
            self.notify()

    async def _wait(self) -> None:
        """Wait until there may be a group to take."""
        can_take = any(self._waiting.values()) or (self._isolated and self._isolated_group is None)
        if not can_take or self._at_capacity():
            waiter = asyncio.get_running_loop().create_future()
            self._idle_slots.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():  # it was woken: another consumer takes the group
                    self.notify()
                raise

    def _at_capacity(self) -> bool:
        """Whether no further group may be started. Groups that take longer than GROUP_QUICK_S do not count.

        A second group is started only if it has as many requests as the last: small groups raise the cost of each. A
        chunk of a batch is one request, so that others need not wait until a chunk of 1,000 events is written. No group
        is started while a quota of Kafka demands a pause (`note_throttle`).
        """
        if self._resuming is not None:
            return True
        if not self._in_flight:
            return False
        waiting = sum(map(len, self._waiting.values()))
        if self._isolated_group is None:
            waiting += len(self._isolated)
        most = self._groups_at_once if waiting >= self._last_group_size else 1
        if len(self._in_flight) < most:
            return False
        now = time.monotonic()
        quick = [group.started for group in self._in_flight if group.started > now - GROUP_QUICK_S]
        if len(quick) < most:
            return False
        if self._making_room is None:
            delay_s = min(quick) + GROUP_QUICK_S + 0.001 - now
            self._making_room = asyncio.get_running_loop().call_later(delay_s, self._make_room)
        return True

    def _make_room(self) -> None:
        self._making_room = None
        self.notify()

    def _take_requests(self, now: float) -> tuple[list[WriteRequest], bool]:
        """Take the requests of the next group. Returns them, and whether they are isolated."""
        if now >= self._next_isolated_at and (requests := self._take_isolated()):
            return requests, True
        oldest = min(self._waiting.values(), key=_head_arrived)
        if requests := take_requests(oldest, *self.group_bytes_max):
            return requests, False
        return self._take_isolated(), True

    def _take_isolated(self) -> list[WriteRequest]:
        """Take a request that was in a failed group, or an atomic batch, alone; or else all requests of one topic.

        Takes nothing while an isolated group is in flight. Requests that failed alone come after the others of their
        topic: one of the others may commit, which releases the topic.
        """
        if self._isolated_group is not None or not (self._isolated or self._isolated_order):
            return []
        waiting = [request for request in self._isolated if not request.finished]
        if not waiting:
            self._isolated.clear()
            self._isolated_order.clear()
            return []
        first = min(waiting, key=lambda one: (self._isolated_order.get(_order_name(one), 0), max(one.failures, 1)))
        name = _order_name(first)

        def alike(request: WriteRequest) -> bool:
            return not request.failures and all(event.topic == first.topic for event in request.events)

        alone = first.failures or first.atomic
        together = [first] if alone else [one for one in waiting if one is first or alike(one)]
        taken = take_requests(deque(together), *self.group_bytes_max)
        self._isolated_order[name] = self._groups_taken + 1
        left = set(waiting).difference(taken)
        self._isolated = deque(request for request in waiting if request in left)
        return taken


def take_requests(
    waiting: deque[WriteRequest],
    ledger_bytes_max: int = GROUP_LEDGER_BYTES_MAX,
    event_bytes_max: int = GROUP_EVENT_BYTES_MAX,
) -> list[WriteRequest]:
    """Take from the front what one transaction holds; an atomic batch goes alone."""
    requests: list[WriteRequest] = []
    ledger_bytes = event_bytes = 0
    while waiting:
        request = waiting[0]
        if request.finished:
            waiting.popleft()
            continue
        ledger_bytes += request.ledger_bytes
        event_bytes += request.event_bytes
        is_full = not fit(ledger_bytes, event_bytes, ledger_bytes_max, event_bytes_max)
        if requests and (request.atomic or requests[0].atomic or is_full):
            break
        requests.append(waiting.popleft())
    return requests


def _order_name(request: WriteRequest) -> str:
    """Find the name by which an isolated request takes turns: its consumer group, or the topic of its first event."""
    return request.topic if request.offsets is None else request.offsets.isolation_name


def _head_arrived(waiting: deque[WriteRequest]) -> float:
    return waiting[0].arrived if waiting else float("inf")
