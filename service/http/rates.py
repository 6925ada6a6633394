"""Limits the rates of callers and sources, by token buckets in Redis that all processes share.

A process takes slices: some tokens in advance, for many buckets at once, which it spends without asking. A slice is
small at first, and doubles while it is used up within SLICE_S: a process takes about twice what it uses. A request that
finds no token here waits for the next slice, a round trip, and is refused only if the bucket is empty. While Redis does
not answer, each process uses its share of the rate.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog

from service.claims.rates import Ask, Granted
from service.core.bounded import Bounded
from service.core.logs import Incident
from service.core.problems import RATE_LIMITED, Problem, StoreAway, StoreLost, StoreUnanswered

log = structlog.get_logger(__name__)

# A slice that is used up within this time is followed by a larger one, of as many tokens as the rate allows in it.
SLICE_S: Final = 0.1
# The first slice, of the tokens of SLICE_S.
FIRST_SHARE: Final = 1 / 16
# A smaller slice is not asked for in advance: a process must not hold the few tokens of a small rate.
ADVANCE_LEAST: Final = 8
# Tokens that were taken earlier go back with the next request for more: another process may need them.
HELD_S: Final = 1.0
# The time for an answer of Redis; after a failure, the share of this process counts for PAUSE_S. After a bug, requests
# that need a slice are refused for so long.
TIMEOUT_S: Final = 0.25
PAUSE_S: Final = 1.0
# Buckets in one request to Redis.
ASKED_AT_ONCE: Final = 200
# Buckets whose share is counted while Redis is away.
SHARES_MAX: Final = 10_000
EVENTS, BYTES = "events", "bytes"


class RateStore(Protocol):
    """Token buckets that all processes share."""

    async def take_tokens(self, asks: Sequence[Ask]) -> list[Granted]:
        """Take tokens of buckets. Raises StoreAway, StoreUnanswered."""


class RatePending(Problem):
    """The next slice is being asked for: try again after `fetched`. A request that cannot wait is answered 429."""

    def __init__(self, detail: str, granted: asyncio.Future[None]) -> None:
        super().__init__(RATE_LIMITED, detail)
        self._granted = granted

    async def fetched(self) -> None:
        """Wait until the answer has come; it has a deadline."""
        await asyncio.wait({self._granted})


class Bucket:
    """The tokens of one caller in this process: events, or bytes of bodies."""

    def __init__(self, rates: "Rates", whose: str, rate: float, unit: str) -> None:
        """`rate` is in units a second; the bucket holds those of one second, at least one."""
        self.id = hashlib.sha256(f"{unit}\0{whose}".encode()).digest()[:16]
        self.rate = rate
        self.unit = unit
        self.burst = max(rate, 1.0)
        self.waiting: asyncio.Future[None] | None = None  # for the next slice, while it is asked for
        self._whose = whose
        self._rates = rates
        self._tokens = 0.0  # of the slice that were not spent; negative after a request that took more
        self._slice_max = max(1, int(rate * SLICE_S))
        self._slice = max(1, int(rate * SLICE_S * FIRST_SHARE))
        self._taken_at = -math.inf
        self._empty_until = -math.inf
        self._left = self.burst  # in the store

    def admit(self) -> None:
        """Raise Problem (429) if the bucket is empty, and RatePending if this process does not know."""
        if self._tokens < 1:
            self.check()
            raise RatePending(self._detail(), self._rates.want(self))

    def check(self) -> None:
        """Raise Problem (429) if the bucket is known to be empty."""
        if self._tokens < 1 and (wait_s := self._empty_until - self._rates.now()) > 0:
            raise Problem(RATE_LIMITED, self._detail(), retry_after_s=math.ceil(wait_s))

    def spend(self, count: float) -> None:
        """Take tokens, perhaps more than there are: later requests, of all processes, wait for longer."""
        self._tokens -= count
        # Other processes must know of a debt.
        if self._tokens < 0 or (self._tokens < self._slice / 2 and self._slice >= ADVANCE_LEAST):
            self._rates.want(self)

    async def wait_s(self) -> float:
        """Return the time, in seconds, after which `admit` is worth a try; 0 if it lets a request pass."""
        if self._tokens < 1 and self._rates.now() >= self._empty_until:
            await asyncio.wait({self._rates.want(self)})
        return 0.0 if self._tokens >= 1 else max(0.0, self._empty_until - self._rates.now())

    def remaining(self) -> tuple[int, int]:
        """Return the tokens that may be spent now, and the seconds until the bucket is full, as far as known here."""
        now = self._rates.now()
        in_store = min(self.burst, self._left + max(0.0, now - self._taken_at) * self.rate)
        tokens = min(self.burst, in_store + self._tokens)
        return max(0, int(tokens)), math.ceil((self.burst - tokens) / self.rate)

    def ask(self, now: float) -> Ask:
        """Make the request for the next slice. A debt goes with it, and tokens that were taken long ago."""
        age_s = now - self._taken_at
        if age_s < SLICE_S:
            self._slice = min(2 * self._slice, self._slice_max)
        elif age_s > HELD_S:
            self._slice = max(1, self._slice // 2)
        want = 0 if self._tokens < 0 and self._slice < ADVANCE_LEAST else self._slice
        spent = 0.0
        if self._tokens < 0 or age_s > HELD_S:
            spent, self._tokens = -self._tokens, 0.0
        return Ask(self.id, self.rate, self.burst, spent, want)

    def take(self, granted: Granted, now: float) -> None:
        """Take the tokens that were granted."""
        self._tokens += granted.tokens
        self._left = granted.left
        self._taken_at = now
        if self._tokens < 1:
            self._empty_until = now + (1 - self._tokens - granted.left) / self.rate

    def pause(self, until: float) -> None:
        """Refuse requests that need a slice until a time."""
        self._empty_until = until

    def end_waiting(self) -> None:
        """Tell those who wait for the slice to look again."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _detail(self) -> str:
        return f"{self._whose} may send {self.rate:g} {self.unit} a second"


class Rates:
    """The buckets of this process, and its requests for slices: one at a time, for all buckets that wait."""

    def __init__(
        self,
        store: RateStore | None = None,
        members: Callable[[], int] = lambda: 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`members` returns the number of live processes, whose share counts without a store."""
        self.now = now
        self._store = store
        self._members = members
        self._wanting: list[Bucket] = []
        self._asking: asyncio.Task[None] | None = None
        self._store_at = -math.inf  # when the store may be asked
        self._shares: Bounded[tuple[float, float]] = Bounded(SHARES_MAX, SHARES_MAX)  # by bucket: tokens, and when
        self._trouble = Incident(log, "rates are not shared", now)

    def buckets(self, whose: str, events: float | None, size: float | None) -> tuple[Bucket, ...]:
        """Make the buckets of a caller, for its rates in events and in bytes; none for no rate."""
        rates = ((events, EVENTS), (size, BYTES))
        return tuple(Bucket(self, whose, rate, unit) for rate, unit in rates if rate is not None)

    def want(self, bucket: Bucket) -> asyncio.Future[None]:
        """Ask for the next slice of a bucket, unless it is asked for; return a future for the answer."""
        if bucket.waiting is None:
            loop = asyncio.get_running_loop()
            bucket.waiting = loop.create_future()
            self._wanting.append(bucket)
            if self._asking is None or self._asking.done():
                self._asking = loop.create_task(self._ask())
        return bucket.waiting

    async def close(self) -> None:
        """Cancel what is asked for."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    async def _ask(self) -> None:
        while self._wanting:
            asking, self._wanting = self._wanting[:ASKED_AT_ONCE], self._wanting[ASKED_AT_ONCE:]
            try:
                now = self.now()
                grants = await self.take([bucket.ask(now) for bucket in asking])
                now = self.now()
                for bucket, granted in zip(asking, grants, strict=True):
                    bucket.take(granted, now)
            except Exception as error:  # a bug: requests must not ask again and again
                self._trouble.add(error, bug=True)
                for bucket in asking:
                    bucket.pause(self.now() + PAUSE_S)
            finally:  # requests must not wait for ever
                for bucket in asking:
                    bucket.end_waiting()

    async def take(self, asks: Sequence[Ask]) -> list[Granted]:
        """Take tokens from the store, or from the share of this process while the store is away."""
        if self._store is not None and self.now() >= self._store_at:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    grants = await self._store.take_tokens(asks)
            except (StoreAway, StoreLost, StoreUnanswered, TimeoutError) as error:
                self._trouble.add(error)
                self._store_at = self.now() + PAUSE_S
            except Exception as error:  # a bug: requests must not wait for ever
                self._trouble.add(error, bug=True)
                self._store_at = self.now() + PAUSE_S
            else:
                if ended := self._trouble.end():
                    log.info("rates are shared again", **ended)
                return grants
        return [self._of_share(ask, 1 / max(1, self._members())) for ask in asks]

    def _of_share(self, ask: Ask, share: float) -> Granted:
        """Take tokens as rates.lua does, of a bucket that has a share of the rate."""
        now, rate, burst = self.now(), ask.rate * share, max(1.0, ask.burst * share)
        tokens, at = self._shares.get(ask.id) or (burst, now)
        tokens = min(burst, min(burst, tokens + (now - at) * rate) - ask.spent)
        granted = max(0, min(ask.want, math.floor(tokens)))
        self._shares.put(ask.id, (tokens - granted, now), 1)
        return Granted(granted, tokens - granted)


def rate_lines(buckets: Sequence[Bucket]) -> bytes:
    """Render the header lines of draft-ietf-httpapi-ratelimit-headers-10, each with its CRLF; nothing without a bucket.

    A policy is its quota `q` in a window of `w` seconds; `r` is what remains, and after `t` seconds the quota is whole.
    The quota unit of bytes is registered as `content-bytes`; one of events is not.
    """
    if not buckets:
        return b""
    policies, states = [], []
    for bucket in buckets:
        unit = ';qu="content-bytes"' if bucket.unit == BYTES else ""
        policies.append(f'"{bucket.unit}";q={int(bucket.burst)};w={max(1, math.ceil(1 / bucket.rate))}{unit}')
        remaining, reset_s = bucket.remaining()
        states.append(f'"{bucket.unit}";r={remaining};t={reset_s}')
    return f"ratelimit-policy: {', '.join(policies)}\r\nratelimit: {', '.join(states)}\r\n".encode()
