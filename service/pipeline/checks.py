"""Checks events before they are admitted: against their topics and schemas, and by the age of their keys."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from service.claims.redis_store import Found
from service.claims.states import Claimed, Delivered, DeliveredBatch, KeyState
from service.contract import Rules
from service.core.problems import (
    FORBIDDEN_TOPIC,
    IN_PROGRESS,
    KEY_EXPIRED,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    UNKNOWN_TOPIC,
    KafkaAway,
    KafkaForbids,
    Problem,
    StoreAway,
    StoreLost,
    StoreUnanswered,
)
from service.core.settings import TOPICS_MAX, Settings
from service.core.time_of_day import now_ms
from service.events import dead_letters
from service.events.dead_letters import REFUSED_BY_SCHEMA, REFUSED_OF_SOURCE, DeadLetter
from service.events.event import NONE_IS_PLAIN, Event, check_topic, plain_bytes_max
from service.events.key_time import made_at_ms
from service.events.schemas import Schemas
from service.kafka.admin import Topic
from service.kafka.topics import InternalTopics, TopicMetadataCache
from service.pipeline.request import Committed, WriteResult, result_of
from service.slots.recovery import CurrentStore

if TYPE_CHECKING:  # the packages of extras are imported only where they are asked for
    from service.events.encoding import Encoder


class KeyAge(NamedTuple):
    """What a request tells of the age of its keys, beside what they tell themselves.

    `fresh_key` is a key that was not old when the request began. `sent_ms` is when the request was first sent, ms since
    the Unix epoch; None if it does not tell. `ttl_s` is the retention of its keys as WriteRequest has it; None for that
    of the topic.
    """

    fresh_key: str = ""
    sent_ms: int | None = None
    ttl_s: int | None = None


UNTOLD: Final = KeyAge()


class EventChecks:
    """The checks of an event for which its topic, its schema or its key are looked up. Nothing is submitted here."""

    def __init__(
        self,
        settings: Settings,
        rules: Rules,
        schemas: Schemas,
        store: CurrentStore,
        topics: InternalTopics,
        topic_metadata: TopicMetadataCache,
        now_ms: Callable[[], int] = now_ms,
        encoder: "Encoder | None" = None,
    ) -> None:
        """`encoder` is None without a Schema Registry."""
        self._encoder = encoder
        self.now_ms = now_ms  # the brokers' time, ms since the Unix epoch
        self._rule = lru_cache(maxsize=TOPICS_MAX)(rules.rule)  # by topic
        self._schemas = schemas
        self._store = store
        self._topics = topics
        self._topic_metadata = topic_metadata
        self._key_ttl_s = settings.key_ttl_s
        self._timeout_s = settings.request_timeout_ms / 1000
        # From the look-up of an old key to its claim an event waits for its chunk and in the queue. Besides, the clocks
        # of brokers and Redis differ.
        self._old_key_margin_ms = 2 * (settings.request_timeout_ms + settings.transaction_timeout_ms)

    def check_now(self, event: Event, age: KeyAge = UNTOLD) -> bool:
        """Check an event against its topic and schema. Raises Problem; False where only `check` can decide."""
        if self._encoder is not None and self._encoder.concerns(event):
            return False
        return (
            self._topic_takes(event)
            and self._schemas.check_now(event)
            and not self._has_old_key(event, age, self._old_key_margin_ms)
        )

    async def check(
        self, event: Event, arrived: float, begun: float | None = None, age: KeyAge = UNTOLD
    ) -> WriteResult | None:
        """Check an event as `check_now` does, looking up its topic, its schemas or an old key where that is needed.

        Returns the result of an event that is written already and that is refused now, where a registry's schema
        encodes it: another version made another record of it; and of one whose key is old and forgotten soon. Else
        None: the event is to be submitted. Other arguments are those of `check_content`. Raises Problem.
        """
        encodes = self._encoder is not None and self._encoder.concerns(event)
        try:
            await self.check_content(event, arrived, begun)
        except Problem as problem:
            if encodes and problem.kind.status < 500:
                return await self._written_before(event, self._deadline(arrived, begun), problem)
            raise
        return await self._check_age(event, arrived, begun, age)

    async def check_content(self, event: Event, arrived: float, begun: float | None = None) -> None:
        """Check an event against its topic and schema, whatever its key, and encode it. Raises Problem.

        `arrived` and `begun` are time.monotonic. Metadata from after `arrived` is fresh enough. All look-ups together
        have the request timeout, from `begun`, if given, else from `arrived`; afterwards none is begun.
        """
        deadline = self._deadline(arrived, begun)
        await self._check_topic(event, arrived, deadline)
        if not self._schemas.check_now(event):
            await self._schemas.check(event)
        if self._encoder is not None and self._encoder.concerns(event):
            await self._encoder.encode(event, deadline)
            await self._check_topic(event, arrived, deadline)  # it may be larger now

    async def check_batch_key(
        self, key: str, id: bytes, topics: Iterable[str], ttl_s: int, deadline: float, sent_ms: int | None = None
    ) -> None:
        """Check the age of the key of an atomic batch, with the batch's id. Raises Problem (412, 503).

        `ttl_s` is the retention of the key, in seconds; `sent_ms` is that of KeyAge. An old key is taken if each of the
        topics takes such keys.
        """
        made_ms = None if all(self._rule(topic).takes_old_keys for topic in topics) else made_at_ms(key)
        told_ms = min((ms for ms in (made_ms, sent_ms) if ms is not None), default=None)
        if told_ms is None or not self._was_before(told_ms, ttl_s, self._old_key_margin_ms):
            return
        found = await self._looked_up(id, deadline)
        if (found.state is not None or self._was_before(told_ms, ttl_s)) and self._ends_soon(found.state, ttl_s):
            raise _expired(ttl_s)

    def is_old(self, key: str, topic: str, ttl_s: int | None = None) -> bool:
        """Whether a key tells that it was made before its retention, and the topic takes no such keys.

        `ttl_s` is that of KeyAge.
        """
        made_ms = made_at_ms(key)
        if made_ms is None or not self._was_before(made_ms, self._retention_s(topic, ttl_s)):
            return False
        return not self._rule(topic).takes_old_keys

    def plain_bytes_max(self, topic: str) -> int:
        """Return the size (bytes) up to which `check_now` passes each plain event of a topic, in this turn of the loop.

        NONE_IS_PLAIN if each event must be checked.
        """
        known = self._topic_metadata.cached(topic)
        if known is None or self._schemas.has_one_for(topic):
            return NONE_IS_PLAIN
        if self._encoder is not None and self._encoder.has_rule_for(topic):
            return NONE_IS_PLAIN
        return plain_bytes_max(known)

    def _deadline(self, arrived: float, begun: float | None) -> float:
        return (arrived if begun is None else begun) + self._timeout_s

    # ------------------------------------------------------------------------------------------------- dead letters

    async def dead_letter(
        self,
        event: Event,
        problem: Problem,
        caller: str,
        arrived: float,
        begun: float | None = None,
        age: KeyAge = UNTOLD,
        quarantine: str = "",
    ) -> DeadLetter:
        """Make the dead letter of an event that is refused with this problem, ready to be submitted.

        `caller` is the scope of its key, `quarantine` the topic that its source names; without one, the rule of the
        event's topic decides. The other arguments are those of `check`. Raises the problem itself where no topic is
        named for it, else Problem (412, 503).
        """
        if problem.kind not in REFUSED_OF_SOURCE:
            quarantine = ""
        if not quarantine and problem.kind in REFUSED_BY_SCHEMA:
            quarantine = self._rule(event.topic).quarantine
        if not quarantine:
            raise problem
        await self._check_age_of_letter(event, arrived, begun, age)
        ttl_s = self._rule(event.topic).key_ttl_s if age.ttl_s is None else age.ttl_s
        letter = dead_letters.of_event(event, problem, quarantine, caller, ttl_s)
        await self._check_quarantine(letter, arrived, begun)
        return letter

    async def check_dead_letter(self, letter: DeadLetter, arrived: float, sent_ms: int | None) -> None:
        """Check the dead letter of a body from which no event can be made; `sent_ms` is that of KeyAge.

        Raises Problem (412, 503).
        """
        await self._check_age_of_letter(letter, arrived, None, KeyAge(sent_ms=sent_ms, ttl_s=letter.ttl_s))
        await self._check_quarantine(letter, arrived, None)

    async def _check_quarantine(self, letter: DeadLetter, arrived: float, begun: float | None) -> None:
        """Check that the quarantine topic takes a dead letter. Raises Problem (503).

        What it does not take is no fault of the sender, who must send the event again, so that it is not lost.
        """
        try:
            await self.check_content(letter, arrived, begun)
        except Problem as problem:
            raise Problem(NOT_WRITTEN, f"quarantine: {problem.detail}") from None

    async def letter_of_body(self, event: Event, arrived: float) -> WriteResult | None:
        """Find the dead letter of a body under the key of an event with this body, if one was made of it.

        The arguments are those of `check`. Raises Problem (409, 503).
        """
        found = await self._find(event.id, dead_letters.body_fingerprint(event.value), self._deadline(arrived, None))
        if isinstance(found, Delivered) and found.refused:
            return result_of((event.id, found), replayed=True)
        return None

    def ttl_of_source(self, own_s: int, topics: Iterable[str]) -> int:
        """Return the retention of a source's keys as WriteRequest has it.

        `own_s` is the source's by its rule, in seconds; for 0 it is the longest of the topics.
        """
        retention_s = own_s or max(map(self._ttl_of, topics), default=self._key_ttl_s)
        return 0 if retention_s == self._key_ttl_s else retention_s

    # ------------------------------------------------------------------------------------------------------ topics

    async def _check_topic(self, event: Event, arrived: float, deadline: float) -> None:
        """Check an event against its topic, which is looked up if needed. Raises Problem."""
        if self._topic_takes(event):
            return
        topic = await self._topic(event.topic, arrived, deadline)
        try:
            check_topic(event, topic, self.now_ms)
        except Problem:
            check_topic(event, await self._topic(event.topic, arrived, deadline, after_arrival=True), self.now_ms)

    def _topic_takes(self, event: Event) -> bool:
        """Whether the event's topic takes it, by the cached metadata; False if the topic is not cached.

        Refuses nothing: the topic's settings may have changed since they were cached.
        """
        topic = self._topic_metadata.cached(event.topic)
        if topic is None:
            return False
        try:
            check_topic(event, topic, self.now_ms)
        except Problem:
            return False
        return True

    async def _topic(self, name: str, arrived: float, deadline: float, *, after_arrival: bool = False) -> Topic:
        """Look up a topic until `deadline` as TopicMetadataCache.get does. Raises Problem (403, 404, 503)."""
        if self._topics.reserved(name):
            raise Problem(FORBIDDEN_TOPIC, f"topic: {name} is internal: use another")
        _check_time(f"topic: {name}", deadline)
        try:
            async with asyncio.timeout_at(deadline):
                topic = await self._topic_metadata.get(name, arrived, after_arrival=after_arrival)
        except KafkaForbids as error:
            raise Problem(FORBIDDEN_TOPIC, f"topic: {error}: have it allowed to Describe and Write it") from error
        except (KafkaAway, TimeoutError) as error:
            raise Problem(NOT_WRITTEN, f"topic: {name} cannot be looked up now: send it again") from error
        if topic is None:
            raise Problem(UNKNOWN_TOPIC, f"topic: {name} does not exist: make it, or correct its name")
        return topic

    # ------------------------------------------------------------------------------------- schemas of a registry

    async def _written_before(self, event: Event, deadline: float, problem: Problem) -> WriteResult:
        """Find the result of an event that is refused now, though a record by an older version was taken.

        Raises the problem if the event was not written, and Problem (409, 503) if that is not known now.
        """
        found = await self._find(event.id, event.fp, deadline)
        if isinstance(found, Delivered):
            return result_of((event.id, found), replayed=True)
        raise problem

    async def batch_written_before(
        self, events: Sequence[Event], whole: tuple[bytes, bytes], problem: Problem
    ) -> Committed:
        """Find the result of an atomic batch that `check_content` has refused with this problem, as `check` does.

        `whole` is the batch's (id, fingerprint). Raises Problem.
        """
        if self._encoder is None or problem.kind.status >= 500:
            raise problem
        deadline = time.monotonic() + self._timeout_s
        found = await self._find(*whole, deadline)
        if not isinstance(found, DeliveredBatch):
            raise problem
        members = [(event.id, await self._find(event.id, event.fp, deadline)) for event in events]
        deliveries = tuple((id, state) for id, state in members if isinstance(state, Delivered))
        if len(deliveries) < len(events):
            raise Problem(OUTCOME_UNKNOWN, "Idempotency-Key: it is written; send it again to learn where")
        return Committed(found.at, deliveries, replayed=True)

    async def _find(self, id: bytes, fp: bytes, deadline: float) -> KeyState:
        """Find what is written under an id by a request with this fingerprint. Raises Problem (409, 503)."""
        found = await self._looked_up(id, deadline)
        if found.state is None or found.dead or found.state.fp != fp:
            return None
        if isinstance(found.state, Claimed):
            raise Problem(IN_PROGRESS, "Idempotency-Key: send it again, with the same key")
        return found.state

    # ---------------------------------------------------------------------------------------------------- old keys

    async def _check_age(self, event: Event, arrived: float, begun: float | None, age: KeyAge) -> WriteResult | None:
        """Look up an event's key if it is old, or may be before it is claimed. Raises Problem (412, 503).

        Returns the result of an event that is written and whose key is forgotten soon: its claim may find nothing.
        """
        if not self._has_old_key(event, age, self._old_key_margin_ms):
            return None
        retention_s = self._retention_s(event.topic, age.ttl_s)
        found = await self._looked_up(event.id, self._deadline(arrived, begun))
        if found.state is None and not self._has_old_key(event, age):
            return None  # nothing that was written under it is forgotten yet
        if not self._ends_soon(found.state, retention_s):
            return None
        if isinstance(found.state, Delivered) and found.state.fp == event.fp:
            return result_of((event.id, found.state), replayed=True)
        raise _expired(retention_s)

    async def _check_age_of_letter(self, event: Event, arrived: float, begun: float | None, age: KeyAge) -> None:
        """Check the age of a key as `_check_age` does, and refuse one that is forgotten soon. Raises Problem."""
        if await self._check_age(event, arrived, begun, age) is not None:
            raise _expired(self._retention_s(event.topic, age.ttl_s))

    def _has_old_key(self, event: Event, age: KeyAge, margin_ms: int = 0) -> bool:
        """Whether the event's key was made before its retention, or will have been in `margin_ms`.

        The key or the request tells it. A topic that takes old keys takes them, but no request that was sent before the
        retention.
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
        return at_ms + 1000 * ttl_s <= self.now_ms() + margin_ms

    def _retention_s(self, topic: str, ttl_s: int | None) -> int:
        """Return the retention of a key, in seconds; `ttl_s` is that of KeyAge."""
        return self._ttl_of(topic) if ttl_s is None else ttl_s or self._key_ttl_s

    def _ttl_of(self, topic: str) -> int:
        """Find the retention of the keys of a topic's events, in seconds."""
        return self._rule(topic).key_ttl_s or self._key_ttl_s

    def _expiry_ms(self, state: KeyState, ttl_s: int) -> int:
        """Compute when a state expires, ms since the Unix epoch; 0 for none. `ttl_s` is that of a claim."""
        match state:
            case None:
                return 0
            case Claimed(at=at):
                return at + 1000 * ttl_s
            case Delivered(at=at, ttl_s=own_s) | DeliveredBatch(at=at, ttl_s=own_s):
                return at + 1000 * (own_s or self._key_ttl_s)

    def _ends_soon(self, state: KeyState, ttl_s: int) -> bool:
        """Whether a state may be forgotten before its key is claimed; `ttl_s` is that of a claim."""
        return self._expiry_ms(state, ttl_s) <= self.now_ms() + self._old_key_margin_ms

    async def _looked_up(self, id: bytes, deadline: float) -> Found:
        """Read the state of a key until `deadline` (time.monotonic). Raises Problem (503)."""
        _check_time("Idempotency-Key: it", deadline)
        try:
            async with asyncio.timeout_at(deadline):
                return await self._store.find(id)
        except (StoreLost, StoreAway, StoreUnanswered, TimeoutError) as error:
            why = str(error) or "no answer"
            raise Problem(NOT_WRITTEN, f"Idempotency-Key: it cannot be looked up now ({why}): send it again") from error


def _check_time(what: str, deadline: float) -> None:
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
