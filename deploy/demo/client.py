"""A client as it should be: it sends again, with the same key, until it knows."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import httpx

from deploy.demo.flights import Flight

CONCURRENCY = 64  # requests under way at a time
AGAIN = 0.1  # of the events are sent once more, long after they were answered, as clients with bad memories do
_REQUEST_S = 15.0  # longer than the service's own deadline of 10 s: its word is better than our guess
_GIVE_UP_S = 120.0  # for one event; a crash costs seconds, so by then something is broken
_BACKOFF_S = (0.05, 1.0)  # the first pause after an error, and the longest

_FINAL = frozenset({400, 401, 403, 404, 413, 415, 422})


@dataclass(frozen=True)
class Place:
    """Where a record is."""

    partition: int
    offset: int


@dataclass
class Tally:
    """What the client saw. Times in seconds."""

    requests: int = 0
    replays: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    answers: dict[str, Place] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    longest_s: float = 0.0


class Client:
    """Sends events to any of several service processes, a bounded number at a time."""

    def __init__(self, urls: Sequence[str], topic: str) -> None:
        self.tally = Tally()
        self._urls = urls
        self._topic = topic
        self._known: list[tuple[Flight, bytes]] = []  # events that were answered, and how
        self._settled = 0
        self._milestones: list[tuple[int, asyncio.Event]] = []

    async def send(self, events: Iterable[Flight]) -> None:
        """Send each event until it is answered for good; some are sent once more later."""
        queue = iter(events)
        limits = httpx.Limits(max_connections=2 * CONCURRENCY, max_keepalive_connections=2 * CONCURRENCY)
        http = httpx.AsyncClient(timeout=_REQUEST_S, limits=limits, trust_env=False)
        async with http, asyncio.TaskGroup() as workers:
            for _ in range(CONCURRENCY):
                workers.create_task(self._work(http, queue))

    async def settled(self, count: int) -> None:
        """Wait until so many events have their answer, or none to hope for."""
        done = asyncio.Event()
        self._milestones.append((count, done))
        self._look_at_milestones()
        await done.wait()

    def _look_at_milestones(self) -> None:
        for count, done in self._milestones:
            if self._settled >= count:
                done.set()

    async def _work(self, http: httpx.AsyncClient, queue: Iterable[Flight]) -> None:
        for event in queue:
            await self._first(http, event)
            self._settled += 1
            self._look_at_milestones()
            if self._known and random.random() < AGAIN:
                await self._again(http, *random.choice(self._known))

    async def _first(self, http: httpx.AsyncClient, event: Flight) -> None:
        answer = await self._until_known(http, event)
        if answer is None:
            return
        body = answer.json()
        self.tally.answers[event.key] = Place(body["partition"], body["offset"])
        self._known.append((event, answer.content))

    async def _again(self, http: httpx.AsyncClient, event: Flight, before: bytes) -> None:
        answer = await self._until_known(http, event)
        if answer is None:
            return
        if answer.content != before or answer.headers.get("Idempotent-Replayed") != "true":
            self.tally.mistakes.append(f"{event.key} was answered {before!r}, and then {answer.content!r}")

    async def _until_known(self, http: httpx.AsyncClient, event: Flight) -> httpx.Response | None:
        """Send until 201, or until there is no hope (None, and a mistake is noted)."""
        begun = time.monotonic()
        for attempt in itertools.count():
            answer = await self._once(http, event)
            waited = time.monotonic() - begun
            if isinstance(answer, httpx.Response) and answer.status_code == httpx.codes.CREATED:
                self.tally.longest_s = max(self.tally.longest_s, waited)
                self.tally.replays += answer.headers.get("Idempotent-Replayed") == "true"
                return answer
            self.tally.errors[_name(answer)] += 1
            if isinstance(answer, httpx.Response) and answer.status_code in _FINAL:
                self.tally.mistakes.append(f"{event.key} was refused: {answer.status_code} {answer.text}")
                return None
            if waited > _GIVE_UP_S:
                self.tally.mistakes.append(f"{event.key} had no answer after {waited:.0f} s: {_name(answer)}")
                return None
            await asyncio.sleep(_pause_s(answer, attempt))
        raise AssertionError("unreachable")

    async def _once(self, http: httpx.AsyncClient, event: Flight) -> httpx.Response | httpx.TransportError:
        self.tally.requests += 1
        body = f'{{"topic":"{self._topic}","key":"{event.record_key}","value":{event.value}}}'
        headers = {"Content-Type": "application/json", "Idempotency-Key": event.key}
        try:
            return await http.post(f"{random.choice(self._urls)}/events", content=body, headers=headers)
        except httpx.TransportError as error:
            return error


def _pause_s(answer: httpx.Response | httpx.TransportError, attempt: int) -> float:
    """How long to wait before the next try: as told, else longer each time; never all clients at once."""
    first, longest = _BACKOFF_S
    told = answer.headers.get("Retry-After", "") if isinstance(answer, httpx.Response) else ""
    wait = float(told) if told.isdecimal() else first * 2 ** min(attempt, 10)
    return min(wait, longest) * random.uniform(0.5, 1.0)


def _name(answer: httpx.Response | httpx.TransportError) -> str:
    return str(answer.status_code) if isinstance(answer, httpx.Response) else "no answer"
