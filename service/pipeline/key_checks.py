"""Checks the keys of events before they are admitted: their age, and what is written under them."""

import asyncio
import time
from collections.abc import Callable, Iterable
from copy import copy
from functools import lru_cache
from typing import Final, NamedTuple

from service.claims.redis_store import Found
from service.claims.states import Claimed, Delivered, DeliveredBatch, KeyState
from service.contract import Rules
from service.core.problems import (
    IN_PROGRESS,
    KEY_EXPIRED,
    NOT_WRITTEN,
    Problem,
    StoreAway,
    StoreLost,
    StoreUnanswered,
)
from service.core.settings import TOPICS_MAX, Settings
from service.events.event import Event
from service.events.key_time import made_at_ms
from service.pipeline.request import WriteResult, result_of
from service.slots.recovery import CurrentStore


class KeyAge(NamedTuple):
    """What a request says about the age of its keys, which may contain the time at which they were made.

    `fresh_key` is a key that was not old when the request began. `sent_ms` is when the request was first sent, ms since
    the Unix epoch; None if the request does not say it. `ttl_s` is the retention of its keys as WriteRequest has it;
    None for that of the topic.
    """

    fresh_key: str = ""
    sent_ms: int | None = None
    ttl_s: int | None = None


UNKNOWN_AGE: Final = KeyAge()


class KeyChecks:
    """The checks of keys, which read the states of those that are old. Deadlines are times of time.monotonic."""

    def __init__(self, settings: Settings, rules: Rules, store: CurrentStore, now_ms: Callable[[], int]) -> None:
        """`now_ms` is the brokers' time, ms since the Unix epoch."""
        self._now_ms = now_ms
        self._rule = lru_cache(maxsize=TOPICS_MAX)(rules.rule)  # by topic
        self._store = store
        self._key_ttl_s = settings.key_ttl_s
        # From the look-up of an old key to its claim an event waits for its chunk and in the queue. Besides, the clocks
        # of brokers and Redis differ.
        self._margin_ms = 2 * (settings.request_timeout_ms + settings.transaction_timeout_ms)

    def under(self, rules: Rules) -> "KeyChecks":
        """Return the checks by other rules."""
        other = copy(self)
        other._rule = lru_cache(maxsize=TOPICS_MAX)(rules.rule)
        return other

    async def check_age(self, event: Event, deadline: float, age: KeyAge) -> WriteResult | None:
        """Look up an event's key if it is old, or may be before it is claimed. Raises Problem (412, 503).

        Returns the result of an event that is written and whose key is forgotten soon: its claim may find nothing.
        """
        if not self.may_be_old(event, age):
            return None
        retention_s = self._retention_s(event.topic, age.ttl_s)
        found = await self._look_up(event.id, deadline)
        if found.state is None and not self._is_old(event, age, 0):
            return None  # nothing that was written under it is forgotten yet
        if not self._ends_soon(found.state, retention_s):
            return None
        if isinstance(found.state, Delivered) and found.state.fp == event.fp:
            return result_of((event.id, found.state), replayed=True)
        raise _expired(retention_s)

    async def check_age_of_letter(self, event: Event, deadline: float, age: KeyAge) -> None:
        """Check the age of a key as `check_age` does, and refuse one that is forgotten soon. Raises Problem."""
        if await self.check_age(event, deadline, age) is not None:
            raise _expired(self._retention_s(event.topic, age.ttl_s))

    async def check_age_of_batch(
        self, key: str, id: bytes, topics: Iterable[str], ttl_s: int, deadline: float, sent_ms: int | None = None
    ) -> None:
        """Check the age of the key of an atomic batch, with the batch's id. Raises Problem (412, 503).

        `ttl_s` is the retention of the key, in seconds; `sent_ms` is that of KeyAge. An old key is taken if each of the
        topics takes such keys.
        """
        made_ms = None if all(self._rule(topic).takes_old_keys for topic in topics) else made_at_ms(key)
        earliest_ms = min((ms for ms in (made_ms, sent_ms) if ms is not None), default=None)
        if earliest_ms is None or not self._was_before(earliest_ms, ttl_s, self._margin_ms):
            return
        found = await self._look_up(id, deadline)
        if (found.state is not None or self._was_before(earliest_ms, ttl_s)) and self._ends_soon(found.state, ttl_s):
            raise _expired(ttl_s)

    async def find(self, id: bytes, fp: bytes, deadline: float) -> KeyState:
        """Find what is written under an id by a request with this fingerprint. Raises Problem (409, 503)."""
        found = await self._look_up(id, deadline)
        if found.state is None or found.dead or found.state.fp != fp:
            return None
        if isinstance(found.state, Claimed):
            raise Problem(IN_PROGRESS, "Idempotency-Key: send it again, with the same key")
        return found.state

    def may_be_old(self, event: Event, age: KeyAge) -> bool:
        """Whether the event's key is older than its retention, or may be before it is claimed."""
        return self._is_old(event, age, self._margin_ms)

    def is_old(self, key: str, topic: str) -> bool:
        """Whether a key contains a time before its retention, and the topic takes no such keys."""
        made_ms = made_at_ms(key)
        if made_ms is None or not self._was_before(made_ms, self._ttl_of(topic)):
            return False
        return not self._rule(topic).takes_old_keys

    def ttl_of_source(self, own_s: int, topics: Iterable[str]) -> int:
        """Return the retention of a source's keys as WriteRequest has it.

        `own_s` is the source's by its rule, in seconds; for 0 it is the longest of the topics.
        """
        retention_s = own_s or max(map(self._ttl_of, topics), default=self._key_ttl_s)
        return 0 if retention_s == self._key_ttl_s else retention_s

    def _is_old(self, event: Event, age: KeyAge, margin_ms: int) -> bool:
        """Whether the event's key was made before its retention, or will have been in `margin_ms`.

        That is by the time in the key, which a topic that takes old keys ignores, or by the time at which the request
        was first sent.
        """
        made_ms = None if event.key == age.fresh_key else made_at_ms(event.key)
        if made_ms is None and age.sent_ms is None:  # the usual case
            return False
        ttl_s = self._retention_s(event.topic, age.ttl_s)
        if age.sent_ms is not None and self._was_before(age.sent_ms, ttl_s, margin_ms):
            return True
        if made_ms is None or not self._was_before(made_ms, ttl_s, margin_ms):
            return False
        return not self._rule(event.topic).takes_old_keys

    def _was_before(self, at_ms: int, ttl_s: int, margin_ms: int = 0) -> bool:
        """Whether a time is so long ago that a key from then is forgotten, or will be in `margin_ms`."""
        return at_ms + 1000 * ttl_s <= self._now_ms() + margin_ms

    def _retention_s(self, topic: str, ttl_s: int | None) -> int:
        """Return the retention of a key, in seconds; `ttl_s` is that of KeyAge."""
        return self._ttl_of(topic) if ttl_s is None else ttl_s or self._key_ttl_s

    def _ttl_of(self, topic: str) -> int:
        """Find the retention of the keys of a topic's events, in seconds."""
        return self._rule(topic).key_ttl_s or self._key_ttl_s

    def _ends_soon(self, state: KeyState, ttl_s: int) -> bool:
        """Whether a state may be forgotten before its key is claimed; `ttl_s` is that of a claim."""
        return self._expiry_ms(state, ttl_s) <= self._now_ms() + self._margin_ms

    def _expiry_ms(self, state: KeyState, ttl_s: int) -> int:
        """Compute when a state expires, ms since the Unix epoch; 0 for none. `ttl_s` is that of a claim."""
        match state:
            case None:
                return 0
            case Claimed(at=at):
                return at + 1000 * ttl_s
            case Delivered(at=at, ttl_s=own_s) | DeliveredBatch(at=at, ttl_s=own_s):
                return at + 1000 * (own_s or self._key_ttl_s)

    async def _look_up(self, id: bytes, deadline: float) -> Found:
        """Read the state of a key until the deadline. Raises Problem (503)."""
        check_time("Idempotency-Key: it", deadline)
        try:
            async with asyncio.timeout_at(deadline):
                return await self._store.find(id)
        except (StoreLost, StoreAway, StoreUnanswered, TimeoutError) as error:
            why = str(error) or "no answer"
            raise Problem(NOT_WRITTEN, f"Idempotency-Key: it cannot be looked up now ({why}): send it again") from error


def check_time(what: str, deadline: float) -> None:
    """Raise Problem (503) if the time for look-ups is over: earlier events of the chunk have used it up."""
    if time.monotonic() >= deadline:
        raise Problem(NOT_WRITTEN, f"{what} was not looked up, because earlier look-ups took too long: send it again")


def _expired(ttl_s: int) -> Problem:
    """Make the problem of an old key whose event may have been written."""
    return Problem(
        KEY_EXPIRED,
        f"Idempotency-Key: it tells that it is older than the {ttl_s} s for which it would be remembered, or will be "
        "soon, so its event may have been written: to write it anyway, use a new key",
    )
