"""Checks the keys of events before they are admitted: their age, and what is written under them."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from copy import copy
from functools import lru_cache
from typing import Final, NamedTuple

from service.claims.keys import Found
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
from service.slots.store_recovery import CurrentStore

# Processes take changed rules at different times, and a stream keeps those of its beginning: for this long after a
# change, keys may still be written for the retention before it.
RULES_APART_MS: Final = 3_600_000


class KeyAge(NamedTuple):
    """The age of a request's keys, as far as the request says it; keys may contain the time at which they were made.

    `fresh_key` is a key that was not old when the request began. `sent_ms` is when the request was first sent, ms since
    the Unix epoch; None if the request does not say it. `ttl_s` is the retention of its keys as WriteRequest has it;
    None for that of the topic. `source` is the name of the source whose delivery it is.
    """

    fresh_key: str = ""
    sent_ms: int | None = None
    ttl_s: int | None = None
    source: str = ""


UNKNOWN_AGE: Final = KeyAge()


class _Retentions:
    """The retentions of keys by rules, which held until `until_ms` (ms since the Unix epoch); 0 while they hold."""

    def __init__(self, rules: Rules, key_ttl_s: int, until_ms: int = 0) -> None:
        self.longest_s = max(rules.longest_ttl_s, key_ttl_s)
        self.rule = lru_cache(maxsize=TOPICS_MAX)(rules.rule)  # by topic
        self.until_ms = until_ms
        self._rules = rules
        self._key_ttl_s = key_ttl_s
        self._sources = {source.name: source for source in rules.sources}

    def ended(self, at_ms: int) -> "_Retentions":
        return _Retentions(self._rules, self._key_ttl_s, at_ms)

    def are_those_of(self, other: "_Retentions") -> bool:
        """Whether both give each key the same retention."""
        return self._named == other._named

    def of_topic(self, topic: str) -> int:
        """Find the retention of the keys of a topic's events, in seconds."""
        return self.rule(topic).key_ttl_s or self._key_ttl_s

    def of_source(self, name: str, topic: str) -> int:
        """Find the retention of the keys of a source's deliveries to a topic, in seconds.

        A topic that the source does not write to is that of its quarantine.
        """
        source = self._sources.get(name)
        if source is None:
            return self.of_topic(topic)
        if source.key_ttl_s:
            return source.key_ttl_s
        topics = [topic] if topic in source.all_topics else source.all_topics
        return max(map(self.of_topic, topics), default=self._key_ttl_s)

    @property
    def _named(self) -> list[object]:
        topics = [(rule.pattern, rule.key_ttl_s) for rule in self._rules.topics]
        return [topics, {source.name: (source.key_ttl_s, source.all_topics) for source in self._rules.sources}]


class KeyChecks:
    """The checks of keys, which read the states of those that are old. Deadlines are times of time.monotonic."""

    def __init__(self, settings: Settings, rules: Rules, store: CurrentStore, now_ms: Callable[[], int]) -> None:
        """`now_ms` is the brokers' time, ms since the Unix epoch."""
        self._now_ms = now_ms
        self._retentions = _Retentions(rules, settings.key_ttl_s)
        self._earlier: tuple[_Retentions, ...] = ()  # under which keys may have been written
        self._store = store
        self._key_ttl_s = settings.key_ttl_s
        # From the look-up of an old key to its claim an event waits for its chunk and in the queue. Besides, the clocks
        # of brokers and Redis differ.
        self._margin_ms = 2 * settings.timeouts_ms

    def with_rules(self, rules: Rules) -> "KeyChecks":
        """Return the checks by other rules. Keys from before them may have been written for the retention before."""
        other = copy(self)
        other._retentions = _Retentions(rules, self._key_ttl_s)
        if other._retentions.are_those_of(self._retentions):
            return other
        now_ms, longest_s = self._now_ms(), max(self._retentions.longest_s, other._retentions.longest_s)
        ended = self._retentions.ended(now_ms + RULES_APART_MS)
        other._earlier = (
            ended,
            *(
                earlier
                for earlier in self._earlier
                if not earlier.are_those_of(ended) and earlier.until_ms + 1000 * longest_s > now_ms
            ),
        )
        return other

    async def check_age(self, event: Event, deadline: float, age: KeyAge) -> WriteResult | None:
        """Look up an event's key if it is old, or may be before it is claimed. Raises Problem (412, 503).

        Returns the result of an event that is written and whose key is forgotten soon: its claim may find nothing.
        """
        if not self.may_be_old(event, age):
            return None
        retention_s = self._retention_of(event, age)
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
            raise _expired(self._retention_of(event, age))

    async def check_age_of_batch(
        self, key: str, id: bytes, topics: Collection[str], ttl_s: int, deadline: float, sent_ms: int | None = None
    ) -> None:
        """Check the age of the key of an atomic batch, with the batch's id. Raises Problem (412, 503).

        `ttl_s` is the retention of the key, in seconds; `sent_ms` is that of KeyAge. An old key is taken if each of the
        topics takes such keys; a batch without events has no topics, and its old key is refused.
        """
        made_ms = (
            None if topics and all(self._retentions.rule(topic).takes_old_keys for topic in topics) else made_at_ms(key)
        )
        earliest_ms = min((ms for ms in (made_ms, sent_ms) if ms is not None), default=None)
        if earliest_ms is None:
            return
        if topics:
            ttl_s = min([ttl_s, *(max(map(rules.of_topic, topics)) for rules in self._held_at(earliest_ms))])
        if not self._was_before(earliest_ms, ttl_s, self._margin_ms):
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
        if made_ms is None or not self._was_before(made_ms, self._retention_s(topic, UNKNOWN_AGE, made_ms)):
            return False
        return not self._retentions.rule(topic).takes_old_keys

    def ttl_of_source(self, own_s: int, topics: Iterable[str]) -> int:
        """Return the retention of a source's keys as WriteRequest has it.

        `own_s` is the source's by its rule, in seconds; for 0 it is the longest of the topics.
        """
        retention_s = own_s or max(map(self._retentions.of_topic, topics), default=self._key_ttl_s)
        return 0 if retention_s == self._key_ttl_s else retention_s

    def _is_old(self, event: Event, age: KeyAge, margin_ms: int) -> bool:
        """Whether the event's key was made before its retention, or will have been in `margin_ms`.

        That is by the time in the key, which a topic that takes old keys ignores, or by the time at which the request
        was first sent.
        """
        made_ms = None if event.key == age.fresh_key else made_at_ms(event.key)
        if made_ms is None and age.sent_ms is None:  # the usual case
            return False
        topic, sent_ms = event.topic, age.sent_ms
        if sent_ms is not None and self._was_before(sent_ms, self._retention_s(topic, age, sent_ms), margin_ms):
            return True
        if made_ms is None or not self._was_before(made_ms, self._retention_s(topic, age, made_ms), margin_ms):
            return False
        return not self._retentions.rule(event.topic).takes_old_keys

    def _was_before(self, at_ms: int, ttl_s: int, margin_ms: int = 0) -> bool:
        """Whether a time is so long ago that a key from then is forgotten, or will be in `margin_ms`."""
        return at_ms + 1000 * ttl_s <= self._now_ms() + margin_ms

    def _retention_of(self, event: Event, age: KeyAge) -> int:
        """Return the retention of an event's key, in seconds, by the earliest time that it or its request tells."""
        times = [ms for ms in (made_at_ms(event.key), age.sent_ms) if ms is not None]
        return self._retention_s(event.topic, age, min(times, default=self._now_ms()))

    def _retention_s(self, topic: str, age: KeyAge, at_ms: int) -> int:
        """Return the shortest retention, in seconds, for which a key from this time may have been written."""
        ttl_s = self._retentions.of_topic(topic) if age.ttl_s is None else age.ttl_s or self._key_ttl_s
        if not self._earlier:
            return ttl_s
        return min([ttl_s, *(rules.of_source(age.source, topic) for rules in self._held_at(at_ms))])

    def _held_at(self, at_ms: int) -> list[_Retentions]:
        """List the earlier retentions under which a key from this time may have been written."""
        return [rules for rules in self._earlier if at_ms < rules.until_ms]

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
