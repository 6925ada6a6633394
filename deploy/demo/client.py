"""A correct client: sends each event again, with the same key, until its outcome is known."""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from deploy.demo.flights import Flight
from deploy.demo.http import Answer, Connection, NoAnswer

CONCURRENCY = 64  # requests under way at a time
AGAIN = 0.1  # share of the events that are sent again long after their answer, as a client does that lost the answer
_REQUEST_S = 15.0  # longer than the service's deadline of 10 s, so that the service's answer decides
_GIVE_UP_S = 120.0  # for one event; a crash delays an event by seconds only
_BACKOFF_S = (0.05, 1.0)  # the first pause after an error, and the longest

# A retry would get the same answer.
_FINAL = frozenset({400, 401, 403, 404, 413, 415, 422})


@dataclass(frozen=True)
class Place:
    """The coordinates of a record."""

    partition: int
    offset: int


@dataclass
class Tally:
    """The answers and errors that the client got. Times in seconds."""

    requests: int = 0
    replays: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    answers: dict[str, Place] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    longest_s: float = 0.0


class Client:
    """Sends events to several service processes, CONCURRENCY at a time."""

    def __init__(self, urls: Sequence[str], topic: str) -> None:
        self.tally = Tally()
        self._urls = urls
        self._topic = topic
        self._known: list[tuple[Flight, bytes]] = []  # answered events, with their answers
        self._settled = 0
        self._milestones: list[tuple[int, asyncio.Event]] = []

    async def send(self, events: Iterable[Flight]) -> None:
        """Send each event until its answer is final; send some of them again later."""
        queue = iter(events)
        async with asyncio.TaskGroup() as workers:
            for _ in range(CONCURRENCY):
                workers.create_task(self._work(queue))

    async def settled(self, count: int) -> None:
        """Wait until this many events have a final answer or were given up."""
        done = asyncio.Event()
        self._milestones.append((count, done))
        self._look_at_milestones()
        await done.wait()

    def _look_at_milestones(self) -> None:
        for count, done in self._milestones:
            if self._settled >= count:
                done.set()

    async def _work(self, queue: Iterable[Flight]) -> None:
        connections = [Connection(url, _REQUEST_S) for url in self._urls]
        try:
            for event in queue:
                await self._first(connections, event)
                self._settled += 1
                self._look_at_milestones()
                if self._known and random.random() < AGAIN:
                    await self._again(connections, *random.choice(self._known))
        finally:
            for connection in connections:
                await connection.close()

    async def _first(self, connections: Sequence[Connection], event: Flight) -> None:
        answer = await self._until_known(connections, event)
        if answer is None:
            return
        body = json.loads(answer.body)
        self.tally.answers[event.key] = Place(body["partition"], body["offset"])
        self._known.append((event, answer.body))

    async def _again(self, connections: Sequence[Connection], event: Flight, before: bytes) -> None:
        answer = await self._until_known(connections, event)
        if answer is None:
            return
        if answer.body != before or not _is_replay(answer):
            self.tally.mistakes.append(f"{event.key} was answered {before!r}, and then {answer.body!r}")

    async def _until_known(self, connections: Sequence[Connection], event: Flight) -> Answer | None:
        """Send an event until 201; None, and a mistake is noted, if it is refused or given up."""
        begun = time.monotonic()
        for attempt in itertools.count():
            answer = await self._once(random.choice(connections), event)
            waited = time.monotonic() - begun
            if isinstance(answer, Answer) and answer.status == HTTPStatus.CREATED:
                self.tally.longest_s = max(self.tally.longest_s, waited)
                self.tally.replays += _is_replay(answer)
                return answer
            self.tally.errors[_name(answer)] += 1
            if isinstance(answer, Answer) and answer.status in _FINAL:
                self.tally.mistakes.append(f"{event.key} was refused: {answer.status} {answer.body!r}")
                return None
            if waited > _GIVE_UP_S:
                self.tally.mistakes.append(f"{event.key} had no answer after {waited:.0f} s: {_name(answer)}")
                return None
            await asyncio.sleep(_pause_s(answer, attempt))
        raise AssertionError("unreachable")

    async def _once(self, connection: Connection, event: Flight) -> Answer | NoAnswer:
        self.tally.requests += 1
        body = f'{{"topic":"{self._topic}","key":"{event.record_key}","value":{event.value}}}'
        headers = {"Content-Type": "application/json", "Idempotency-Key": event.key}
        try:
            return await connection.post("/events", headers, body.encode())
        except NoAnswer as error:
            return error


def _is_replay(answer: Answer) -> bool:
    return answer.headers.get("idempotent-replayed") == "true"


def _pause_s(answer: Answer | NoAnswer, attempt: int) -> float:
    """Compute the pause before the next try: Retry-After if present, else growing; with jitter."""
    first, longest = _BACKOFF_S
    retry_after = answer.headers.get("retry-after", "") if isinstance(answer, Answer) else ""
    wait = float(retry_after) if retry_after.isdecimal() else first * 2 ** min(attempt, 10)
    return min(wait, longest) * random.uniform(0.5, 1.0)


def _name(answer: Answer | NoAnswer) -> str:
    return str(answer.status) if isinstance(answer, Answer) else "no answer"
