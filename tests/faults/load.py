"""Clients that draw requests from a seed, send each again with the same key until its outcome is known, and log it."""

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from deploy.demo.http import Connection, NoAnswer
from tests.faults.history import Log, Request, RequestKind, Result, results_of, single
from tests.integration.client import Asked

ANSWER_S: Final = 8.0  # longer than the request timeout of 5 s in this world, so that the service's answer decides
PAUSE_S: Final = (0.03, 0.4)  # the first pause after an error, and the longest; Retry-After says a second
HANGING_S: Final = 300.0  # for one request; a test of a recovery gives up much earlier
RECORD_KEYS: Final = 3  # of one client, which so knows the order in which it wrote them
POLL_S: Final = 0.02

# Shares of all requests; the rest are single events. Given up: not sent again after the first answer other than 201.
BATCHES: Final = 0.15
ATOMIC: Final = 0.08
AGAIN: Final = 0.04
WRONG: Final = 0.02
GIVEN_UP: Final = 0.03
BATCH_MOST: Final = 20


class Load:
    """Clients in a thread of their own, each with one request at a time and a log in `folder`.

    `targets` (name to URL) may change during the run. All that a client draws depends on the seed and its number.
    """

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, str],
        topics: Sequence[str],
        seed: int | str,
        *,
        clients: int = 8,
        keys_per_s: float = 40.0,
        keys_max: float = float("inf"),
        atomic: bool = True,
    ) -> None:
        self.targets = dict(targets)
        self.mistakes: list[str] = []  # answers that no client should get
        self.hanging: list[str] = []
        self.acked = 0  # events
        self.longest_s = 0.0  # until a request was settled
        self.asked = 0
        self.attempts = 0
        self._folder = folder
        self._topics = list(topics)
        self._seed = seed
        self._clients = clients
        self._keys_per_s = keys_per_s
        self._keys_max = keys_max
        self._atomic = ATOMIC if atomic else 0.0
        self._open: dict[int, str] = {}  # requests that are not settled, by a number of their own
        self._numbers = itertools.count()
        self._stopping = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="load", daemon=True)
        self._running: Future[None] | None = None
        self._extra = itertools.count()

    # ------------------------------------------------------------------------- for the thread that injects faults

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def stop(self) -> None:
        """Wait until every client has settled its request, then stop them."""
        self._stopping = True
        if self._running is not None:
            self._running.result(HANGING_S + ANSWER_S)
            self._running = None

    def close(self) -> None:
        """End the thread; requests in progress are left in doubt."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result(ANSWER_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_S)
        self._loop.close()

    async def _cancel(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def open(self) -> set[int]:
        """The numbers of the requests that are not settled now."""
        return set(self._open)

    def settled(self, numbers: set[int]) -> bool:
        return self._open.keys().isdisjoint(numbers)

    def describe(self, numbers: set[int]) -> list[str]:
        return [self._open[number] for number in numbers & self._open.keys()]

    def send(
        self, requests: Sequence[Request], to: Sequence[str] = (), *, once: bool = False
    ) -> Future[list[list[Result]]]:
        """Send requests, all at once, each until it is settled (or once); `to` limits them to these processes.

        Each has a client and a log of its own.
        """
        return asyncio.run_coroutine_threadsafe(self._send(requests, to, once), self._loop)

    # -------------------------------------------------------------------------------------------- in the thread

    async def _send(self, requests: Sequence[Request], to: Sequence[str], once: bool) -> list[list[Result]]:
        async def one(request: Request) -> list[Result]:
            name = f"extra-{next(self._extra)}"
            async with _Client(self, name, random.Random(f"{self._seed}/{name}")) as client:
                return await (client.attempt(request, to) if once else client.settle(request, to))

        return await asyncio.gather(*(one(request) for request in requests))

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._work(f"client-{number}"))

    async def _work(self, name: str) -> None:
        rng = random.Random(f"{self._seed}/{name}")
        begun, sent = time.monotonic(), 0
        rate = self._keys_per_s / self._clients
        async with _Client(self, name, rng) as client:
            while not self._stopping and self.asked < self._keys_max:
                due_s = begun + sent / rate - time.monotonic()
                if due_s > 0:
                    await asyncio.sleep(min(due_s, 0.2))
                    continue
                sent += await client.next(self._topics)

    @contextlib.contextmanager
    def unsettled(self, what: str) -> Iterator[None]:
        begun = time.monotonic()
        number = next(self._numbers)
        self._open[number] = what
        try:
            yield
        finally:
            del self._open[number]
            self.longest_s = max(self.longest_s, time.monotonic() - begun)


class _Client:
    """One client: its written events, its connections, its log."""

    def __init__(self, load: Load, name: str, rng: random.Random) -> None:
        self._load = load
        self._name = name
        self._rng = rng
        self._log = Log(load._folder / f"{name}.jsonl")
        self._connections: dict[str, Connection] = {}
        self._count = 0
        self._known: list[Asked] = []  # single events that were acknowledged

    async def __aenter__(self) -> "_Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._connections.values():
            await connection.close()
        self._log.close()

    async def next(self, topics: Sequence[str]) -> int:
        """Draw the next request and settle it; returns the number of its new keys."""
        draw = self._rng.random()
        if self._known and draw < AGAIN:
            await self.settle(single(self._rng.choice(self._known)))
            return 1
        if self._known and draw < AGAIN + WRONG:
            known = self._rng.choice(self._known)
            await self._refused(single(Asked(known.key, known.topic, b'"another"', known.record_key)), 422)
            return 1
        kind: RequestKind = "single"
        count = 1
        if draw < AGAIN + WRONG + BATCHES:
            kind, count = "batch", self._rng.randint(2, BATCH_MOST)
        elif draw < AGAIN + WRONG + BATCHES + self._load._atomic:
            kind, count = "atomic", self._rng.randint(2, 5)
        events = [self._event(topics) for _ in range(count)]
        request = Request(kind, tuple(events), "" if kind == "batch" else events[0].key)
        self._load.asked += count
        results = await self.settle(request, give_up=self._rng.random() < GIVEN_UP)
        if kind == "single" and results[0].type == "ok":
            self._known = [*self._known[-99:], events[0]]
        return count

    def _event(self, topics: Sequence[str]) -> Asked:
        self._count += 1
        key = f"{self._name}/{self._count}"
        record_key = f"{self._name}.{self._rng.randrange(RECORD_KEYS)}" if self._rng.random() < 0.7 else None
        value = b'{"of": "%s", "n": %d, "pad": "%s"}' % (
            self._name.encode(),
            self._count,
            b"x" * self._rng.randrange(200),
        )
        return Asked(key, self._rng.choice(topics), value, record_key)

    async def settle(self, request: Request, to: Sequence[str] = (), *, give_up: bool = False) -> list[Result]:
        """Send a request until each of its events is settled; returns the last results."""
        with self._load.unsettled(f"{self._name}: {request.events[0].key}"):
            begun, pause_s = time.monotonic(), PAUSE_S[0]
            while True:
                results = await self.attempt(request, to)
                if all(result.final for result in results) or give_up:
                    self._load.acked += sum(result.type == "ok" for result in results)
                    self._load.mistakes += [
                        f"{request.events[0].key} was refused: {r}" for r in results if r.final and r.type == "fail"
                    ]
                    return results
                if time.monotonic() - begun > HANGING_S:
                    self._load.hanging.append(f"{request.events[0].key} after {HANGING_S:.0f} s: {results}")
                    return results
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, PAUSE_S[1])

    async def _refused(self, request: Request, status: int) -> None:
        """Send a request that must be refused, until it is."""
        for _ in range(200):
            (result,) = await self.attempt(request)
            if result.final:
                if result.status != status:
                    self._load.mistakes.append(f"{request.key} was to be refused with {status}: {result}")
                return
            await asyncio.sleep(PAUSE_S[1])

    async def attempt(self, request: Request, to: Sequence[str] = ()) -> list[Result]:
        """Send a request once, to one of the processes."""
        targets = self._load.targets
        names = [name for name in (to or targets) if name in targets]
        if not names:  # all are being replaced
            await asyncio.sleep(POLL_S)
            return [Result("fail", 0)] * len(request.events)
        name = self._rng.choice(names)
        n = self._log.invoke(request, name)
        self._load.attempts += 1
        try:
            answer = await self._connection(targets[name]).post(request.path, request.headers, request.body)
        except NoAnswer as error:
            nothing_sent = isinstance(error.__cause__, ConnectionRefusedError)
            results = [Result("fail" if nothing_sent else "info")] * len(request.events)
            self._log.answer(n, 0, results, "")
        else:
            results = results_of(request, answer)
            self._log.answer(n, answer.status, results, answer.body.decode() if answer.status == 201 else "")
        return results

    def _connection(self, url: str) -> Connection:
        if url not in self._connections:
            self._connections[url] = Connection(url, ANSWER_S)
        return self._connections[url]
