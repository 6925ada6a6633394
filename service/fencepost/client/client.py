"""The clients: one flow of steps, which yields what is to be done, and a client for threads and one for asyncio."""

import asyncio
import itertools
import logging
import math
import os
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, NoReturn, Self, TypeVar

import httpx

from .answers import NO_ANSWER, PAGE_BYTES, PAGE_EVENTS, UNSENT, Answer, Problem, request_of, verdicts
from .events import (
    KEY,
    KEY_RULE,
    Event,
    Offsets,
    Pending,
    Refused,
    Result,
    SendError,
    Unsettled,
    Written,
    WrittenBatch,
    atomic_batch,
)
from .spool import Spool, SpoolError

LOG: Final = logging.getLogger(__name__)

T = TypeVar("T")
H = TypeVar("H", httpx.Client, httpx.AsyncClient)

DEADLINE_S: Final = 60.0
# The service answers within its FENCEPOST_REQUEST_TIMEOUT_MS, 10 s.
TIMEOUT: Final = httpx.Timeout(15.0, connect=5.0)
# What a header can carry (RFC 6750 allows less).
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
# The options of httpx's client that are objects with connections.
_OF_CONNECTIONS: Final = frozenset({"transport", "mounts"})
# The pause before the second attempt, doubled for each further one, and the longest; Retry-After is added.
FIRST_PAUSE_S: Final = 0.1
PAUSE_MAX_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """A step: send a request (arguments of httpx's `stream`) and read its answer until `stop_at` (time.monotonic)."""

    request: dict[str, Any]
    stop_at: float


# What a flow wants done: an exchange, whose reply is an Answer, a pause in seconds, or a call that waits for the disk.
Step = Exchange | float | Callable[[], Any]
Flow = Generator[Step, Any, T]


class _Sender(ABC, Generic[H]):
    """Decides what is sent and when, for both clients."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        spool: Spool | str | os.PathLike[str] | None = None,
        deadline_s: float = DEADLINE_S,
        **options: Any,
    ) -> None:
        """Open the spool, if there is to be one.

        Args:
            url: the service's address, such as https://fencepost.example.com.
            token: of the caller (`Authorization: Bearer`).
            spool: keeps the events that are not settled over a crash; a Spool, or the path of its file.
            deadline_s: the time for a call with all its attempts (of `resume`: for each event), in seconds above 0.
            options: of httpx's client, such as `verify` (an ssl.SSLContext, which may have a certificate for mutual
                TLS), `proxy`, `transport`, and `timeout`, which limits each step of an attempt.

        Raises:
            SpoolError: another program has the spool open, or it cannot be used.
            ValueError: `url` is not an address of HTTP, no header takes `token`, or `deadline_s` is not above 0.
        """
        _check_url(url)
        if not deadline_s > 0:
            raise ValueError(f"deadline_s: write seconds above 0, not {deadline_s!r}")
        headers = httpx.Headers(options.pop("headers", None))
        if token is not None:
            if not _TOKEN.fullmatch(token):
                raise ValueError(
                    "token: it is empty, or has blanks, line breaks or other characters that no header takes"
                )
            headers["Authorization"] = f"Bearer {token}"
        self._options = {"timeout": TIMEOUT, **options, "base_url": url, "headers": headers}
        self._connections: tuple[int, H] = os.getpid(), self._make_http(**self._options)
        # Clients from before a fork: kept unused, so that no garbage collection closes the parent's connections.
        self._inherited: list[H] = []
        self._spool = spool if spool is None or isinstance(spool, Spool) else Spool(spool)
        self._deadline_s = deadline_s
        self._has_resumed = self._spool is None or self._spool.inherited == 0

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: a client cannot be pickled, as where a function that uses it is sent to other processes."""
        raise TypeError(f"{type(self).__name__}: its connections belong to its process: make a client in each process")

    @property
    def _http(self) -> H:
        """The httpx client of this process.

        A fork makes a new one: on a connection that two processes share, one reads answers to the other's requests.
        Raises RuntimeError in a fork where the connections are those of the program's own transport.
        """
        client = self._own_http
        if client is None:
            if given := _OF_CONNECTIONS & self._options.keys():
                raise RuntimeError(
                    f"{', '.join(sorted(given))}: its connections belong to the process that made the client: make "
                    "a client after the fork"
                )
            self._inherited.append(self._connections[1])
            client = self._make_http(**self._options)
            self._connections = os.getpid(), client
        return client

    @property
    def _own_http(self) -> H | None:
        """The httpx client that this process has made; None in a fork that has sent nothing."""
        process, client = self._connections
        return client if process == os.getpid() else None

    @abstractmethod
    def _make_http(self, **arguments: Any) -> H:
        """Make httpx's client."""

    def _send(self, events: Sequence[Event]) -> Flow[list[Result]]:
        """Store events in the spool, send them page by page, and remove from the spool what is settled."""
        if self._spool is not None and not self._has_resumed:
            count = self._spool.inherited
            raise SpoolError(
                f"{self._spool.path}: {count} events of an earlier run are open: iterate over resume() first"
            )
        pending = [Pending(event.idempotency_key, event.encode()) for event in events]
        if self._spool is not None and pending:
            pending = yield partial(self._spool.add, pending)
        stop_at = time.monotonic() + self._deadline_s
        results: list[Result] = []
        for page in pages(pending):
            results += without_batch((yield from self._settle(page, stop_at)))
        yield from self._close_events(pending, results)
        return results

    def _resume_next(self, backlog: "Backlog") -> Flow[Result | None]:
        """Send the next event that is open since before; None at the end, or behind one that stays open.

        The event stays in the spool until `_close_events`, so that a result that nobody has taken comes again.
        """
        found: tuple[int, Pending] | None = None
        if self._spool is not None and not backlog.is_over:
            backlog.until = backlog.until or (yield self._spool.newest)
            found = yield partial(self._spool.next_after, backlog.after, backlog.until)
        if found is None:
            self._has_resumed = True
            return None
        backlog.after, event = found
        backlog.event = event
        if not KEY.fullmatch(event.key):  # it cannot be sent, and must not keep the events behind it
            return Refused(event, NO_ANSWER, "invalid-key", KEY_RULE, may_be_written=False)
        (result,) = without_batch((yield from self._settle([event], time.monotonic() + self._deadline_s)))
        backlog.is_over = isinstance(result, Unsettled)
        return result

    def _close_events(self, events: Sequence[Pending], results: Sequence[Result]) -> Flow[None]:
        """Remove the events that are settled from the spool."""
        settled = [event for event, result in zip(events, results, strict=True) if not isinstance(result, Unsettled)]
        if self._spool is not None and settled:
            yield partial(_remove, self._spool, settled)

    def _close_last(self, backlog: "Backlog", result: Result) -> Flow[None]:
        """Remove the last event of `resume` from the spool, if it is settled."""
        if backlog.event is not None:
            yield from self._close_events([backlog.event], [result])

    def _send_atomic(self, key: str, events: Iterable[Event], offsets: Offsets | None) -> Flow[WrittenBatch]:
        """Send an atomic batch until it is written. Raises SendError, and what atomic_batch raises."""
        batch = atomic_batch(key, events, offsets)
        (result,) = yield from self._settle([batch], time.monotonic() + self._deadline_s)
        if isinstance(result, SendError):
            raise result
        assert isinstance(result, WrittenBatch)
        return result

    def _settle(self, page: Sequence[Pending], stop_at: float) -> Flow[list[Result | WrittenBatch]]:
        """Send the events of a page until each is settled or the deadline comes; results in the order of the events."""
        results: dict[int, Result | WrittenBatch] = {}
        left: dict[int, Problem] = dict.fromkeys(range(len(page)), UNSENT)  # with the last problem of each
        doubtful = {n for n, event in enumerate(page) if event.stored_ms is not None}  # by an earlier call
        for attempt in itertools.count():
            if (left_s := stop_at - time.monotonic()) <= 0:
                break
            events = [page[n] for n in left]
            answer: Answer = yield Exchange(self._request(events, left_s), stop_at)
            found = dict(zip(left, verdicts(events, answer), strict=True))
            left = {n: each for n, each in found.items() if isinstance(each, Problem)}
            doubtful |= {n for n, problem in left.items() if problem.leaves_doubt}
            results |= {n: each for n, each in found.items() if not isinstance(each, Problem)}
            results |= {n: each.error(page[n], n in doubtful) for n, each in left.items() if not each.is_retried}
            left = {n: problem for n, problem in left.items() if problem.is_retried}
            pause_s = answer.retry_after_s + backoff_s(attempt)
            if not left or time.monotonic() + pause_s >= stop_at:
                break
            yield pause_s
        results |= {n: problem.error(page[n], n in doubtful) for n, problem in left.items()}
        return [results[n] for n in range(len(page))]

    def _request(self, events: Sequence[Pending], left_s: float) -> dict[str, Any]:
        """Make a request, of which no step (connect, write, each read) may take longer than `left_s`."""
        own = self._http.timeout.as_dict()
        most_s = left_s if left_s < math.inf else None  # no socket takes an infinite one
        timeout = {step: most_s if limit is None else min(limit, left_s) for step, limit in own.items()}
        return {**request_of(events), "extensions": {"timeout": timeout}}


@dataclass(slots=True)
class Backlog:
    """How far `resume` has come: its last event with its number, and the number of the newest one when it began."""

    event: Pending | None = None
    after: int = 0
    until: int = 0
    is_over: bool = False


def _check_url(url: str) -> None:
    """Raise ValueError for a text that is no address of a service: httpx would call each attempt a lost connection."""
    wanted = f"url: write http:// or https:// and the service's address, not {url!r}"
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{wanted} ({error})") from None
    is_whole = parts.scheme in ("http", "https") and parts.host.strip()
    if not is_whole or parts.query or parts.fragment or url != url.strip():
        raise ValueError(wanted)


def pages(events: Sequence[Pending]) -> Iterator[list[Pending]]:
    """Divide events into pages, each of which is one request. A batch has no header for the age of an open event."""
    page: list[Pending] = []
    size = 0
    for event in events:
        is_alone = bool(page) and (event.stored_ms is not None or page[-1].stored_ms is not None)
        if page and (is_alone or len(page) == PAGE_EVENTS or size + len(event.body) > PAGE_BYTES):
            yield page
            page, size = [], 0
        page.append(event)
        size += len(event.body)
    if page:
        yield page


def _remove(spool: Spool, settled: Sequence[Pending]) -> None:
    """Remove settled events. What the disk does not take (it is full) is a warning: the results must not be lost."""
    try:
        spool.close_events(settled)
    except SpoolError as error:
        LOG.warning("%d settled events stay in the spool, and resume() sends them again: %s", len(settled), error)


def backoff_s(attempt: int) -> float:
    """Draw the pause behind an attempt (from 0), between half and all of a time that doubles."""
    return min(PAUSE_MAX_S, FIRST_PAUSE_S * 2.0 ** min(attempt, 16)) * random.uniform(0.5, 1.0)  # noqa: S311


def without_batch(results: Iterable[Result | WrittenBatch]) -> list[Result]:
    """Narrow the type of results: `send` and `send_many` settle single events only."""
    return [result for result in results if not isinstance(result, WrittenBatch)]


def written_or_raise(result: Result) -> Written:
    """Return the result of an event that is written. Raises SendError for another one."""
    if isinstance(result, SendError):
        raise result
    return result


class Client(_Sender[httpx.Client]):
    """Sends events to Fencepost. Threads may share a client."""

    def _make_http(self, **arguments: Any) -> httpx.Client:
        return httpx.Client(**arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and the spool. A closed client does nothing here; it sends no more."""
        try:
            if self._own_http is not None:
                self._own_http.close()
        finally:
            if self._spool is not None:
                self._spool.close()

    def send(self, event: Event) -> Written:
        """Send an event until it is written.

        Raises:
            Refused: the service refuses the event.
            Unsettled: the deadline came first; the event stays in the spool.
            SpoolError: the spool cannot take the event, which was not sent (another one is open under its key).
        """
        (result,) = self.send_many([event])
        return written_or_raise(result)

    def send_many(self, events: Iterable[Event]) -> list[Result]:
        """Send events in batches, each for itself; a Written, Refused or Unsettled of each, in their order."""
        return self._run(self._send(list(events)))

    def send_atomic(self, key: str, events: Iterable[Event], offsets: Offsets | None = None) -> WrittenBatch:
        """Send events until all are written in one transaction, in which a group's offsets are committed.

        The spool is not used: after a crash, the program reads on from the committed offsets, and so sends the same
        batch again if that was not written. `key` is that of the whole, best made of the coordinates of the source.

        Raises:
            StaleMember: the consumer has been replaced; nothing was written.
            Refused: the service refuses the batch.
            Unsettled: the deadline came first: send the same batch again, with the same key.
            ValueError: `key` is not 1 to 255 printable ASCII characters.
        """
        return self._run(self._send_atomic(key, events, offsets))

    def resume(self) -> Iterator[Result]:
        """Send the events that are open in the spool, with their keys, and yield the results.

        Each is sent by itself, with the time at which it was stored. A result is kept until the next one is asked for:
        if the program ends before, it comes again. The iteration ends behind an event that stays open. Call it at
        start, and again when the service is back.
        """
        backlog = Backlog()
        while result := self._run(self._resume_next(backlog)):
            yield result
            self._run(self._close_last(backlog, result))

    def _run(self, flow: Flow[T]) -> T:
        reply: Any = None
        while True:
            try:
                step = flow.send(reply)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, Exchange):
                reply = self._exchange(step)
            elif isinstance(step, float):
                time.sleep(step)
            else:
                reply = step()

    def _exchange(self, step: Exchange) -> Answer:
        answer = Answer(step.stop_at)
        try:
            with self._http.stream(**step.request) as response:
                answer.begin(response)
                for chunk in response.iter_bytes():
                    if not answer.take(chunk):
                        break
        except httpx.RequestError as error:
            answer.fail(error)
        return answer


class AsyncClient(_Sender[httpx.AsyncClient]):
    """Sends events to Fencepost from asyncio: the arguments, methods and errors of `Client`.

    Tasks may share a client, event loops may not: its connections belong to the loop of its first call. Where each call
    has a loop of its own (asyncio.run in a task queue, async_to_sync), make it there, or use `Client`.
    """

    _home: tuple[int, asyncio.AbstractEventLoop] | None = None  # process and event loop of the first call

    def _make_http(self, **arguments: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(**arguments)

    def _check_loop(self) -> None:
        """Raise RuntimeError in another event loop of this process, unless the program has given the transport."""
        here = os.getpid(), asyncio.get_running_loop()
        if self._home is None or self._home[0] != here[0]:
            self._home = here
        elif self._home != here and not _OF_CONNECTIONS & self._options.keys():
            raise RuntimeError(
                "AsyncClient: its connections belong to the event loop of its first call: make a client in each loop "
                "(`async with` in the coroutine that asyncio.run gets), or use Client"
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """As `Client.close`; in the event loop of the other calls."""
        try:
            if self._own_http is not None:
                self._check_loop()
                await self._own_http.aclose()
        finally:
            if self._spool is not None:
                await asyncio.to_thread(self._spool.close)

    async def send(self, event: Event) -> Written:
        """As `Client.send`. If it is cancelled, the event stays in the spool."""
        (result,) = await self.send_many([event])
        return written_or_raise(result)

    async def send_many(self, events: Iterable[Event]) -> list[Result]:
        """As `Client.send_many`. If it is cancelled, all its events stay in the spool."""
        return await self._run(self._send(list(events)))

    async def send_atomic(self, key: str, events: Iterable[Event], offsets: Offsets | None = None) -> WrittenBatch:
        """As `Client.send_atomic`."""
        return await self._run(self._send_atomic(key, events, offsets))

    async def resume(self) -> AsyncIterator[Result]:
        """As `Client.resume`."""
        backlog = Backlog()
        while result := await self._run(self._resume_next(backlog)):
            yield result
            await self._run(self._close_last(backlog, result))

    async def _run(self, flow: Flow[T]) -> T:
        self._check_loop()
        reply: Any = None
        while True:
            try:
                step = flow.send(reply)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, Exchange):
                reply = await self._exchange(step)
            elif isinstance(step, float):
                await asyncio.sleep(step)
            else:
                reply = await asyncio.to_thread(step)

    async def _exchange(self, step: Exchange) -> Answer:
        answer = Answer(step.stop_at)
        try:
            async with self._http.stream(**step.request) as response:
                answer.begin(response)
                async for chunk in response.aiter_bytes():
                    if not answer.take(chunk):
                        break
        except httpx.RequestError as error:
            answer.fail(error)
        return answer
