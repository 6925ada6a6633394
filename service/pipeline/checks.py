"""Checks events before they are admitted, against their topics and schemas; of their keys, see key_checks.py."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING

from service.claims.states import Delivered, DeliveredBatch
from service.contract import Rules
from service.core.problems import (
    FORBIDDEN_TOPIC,
    NOT_WRITTEN,
    OUTCOME_UNKNOWN,
    UNKNOWN_TOPIC,
    KafkaAway,
    KafkaForbids,
    Problem,
)
from service.core.settings import TOPICS_MAX, Settings
from service.core.time_of_day import now_ms
from service.core.time_slice import TimeSlice
from service.events import dead_letters
from service.events.dead_letters import REFUSED_BY_SCHEMA, REFUSED_OF_SOURCE, DeadLetter
from service.events.event import NONE_IS_PLAIN, Event, check_topic, plain_bytes_max
from service.events.schemas import Schemas
from service.kafka.group_offsets import OFFSETS_TOPIC, TOO_FEW_REPLICAS, GroupOffsets, partition_of_group
from service.kafka.topic_admin import Topic
from service.kafka.topics import InternalTopics, TopicMetadataCache
from service.pipeline.key_checks import UNKNOWN_AGE, KeyAge, KeyChecks, check_time
from service.pipeline.request import Committed, WriteResult, result_of
from service.slots.store_recovery import CurrentStore

if TYPE_CHECKING:  # the packages of extras are imported only where they are asked for
    from service.events.encoding import Encoder


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
        read_topics: TopicMetadataCache,
        now_ms: Callable[[], int] = now_ms,
        encoder: "Encoder | None" = None,
    ) -> None:
        """`read_topics` are those of positions, not written to. `encoder` is None without a Schema Registry."""
        self._encoder = encoder
        self.now_ms = now_ms  # the brokers' time, ms since the Unix epoch
        self._rule = lru_cache(maxsize=TOPICS_MAX)(rules.rule)  # by topic
        self._schemas = schemas
        self._topics = topics
        self._topic_metadata = topic_metadata
        self._read_topics = read_topics
        self._timeout_s = settings.request_timeout_ms / 1000
        self.keys = KeyChecks(settings, rules, store, now_ms)

    def with_rules(self, rules: Rules, schemas: Schemas) -> "EventChecks":
        """Return the checks by other rules, with the same caches of what is not made of rules."""
        other = copy(self)
        other._encoder = None if self._encoder is None else self._encoder.with_rules(rules)
        other._rule = lru_cache(maxsize=TOPICS_MAX)(rules.rule)
        other._schemas = schemas
        other.keys = self.keys.with_rules(rules)
        return other

    def check_now(self, event: Event, age: KeyAge = UNKNOWN_AGE) -> bool:
        """Check an event against its topic and schema. Raises Problem; False where only `check` can decide."""
        if self._encoder is not None and self._encoder.concerns(event):
            return False
        return self._topic_takes(event) and self._schemas.check_now(event) and not self.keys.may_be_old(event, age)

    async def check(
        self, event: Event, arrived: float, begun: float | None = None, age: KeyAge = UNKNOWN_AGE
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
        return await self.keys.check_age(event, self._deadline(arrived, begun), age)

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

    def plain_bytes_max(self, topic: str) -> int:
        """Return the size (bytes) up to which `check_now` passes each plain event of a topic, in this turn of the loop.

        NONE_IS_PLAIN if each event must be checked.
        """
        known = self._cached(topic)
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
        age: KeyAge = UNKNOWN_AGE,
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
        await self.keys.check_age_of_letter(event, self._deadline(arrived, begun), age)
        ttl_s = self._rule(event.topic).key_ttl_s if age.ttl_s is None else age.ttl_s
        letter = dead_letters.of_event(event, problem, quarantine, caller, ttl_s)
        await self._check_quarantine(letter, arrived, begun)
        return letter

    async def check_dead_letter(self, letter: DeadLetter, arrived: float, age: KeyAge) -> None:
        """Check the dead letter of a body from which no event can be made; its own retention counts.

        Raises Problem (412, 503).
        """
        age = age._replace(ttl_s=letter.ttl_s)
        await self.keys.check_age_of_letter(letter, self._deadline(arrived, None), age)
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
        found = await self.keys.find(
            event.id, dead_letters.body_fingerprint(event.value), self._deadline(arrived, None)
        )
        if isinstance(found, Delivered) and found.refused:
            return result_of((event.id, found), replayed=True)
        return None

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
        topic = self._cached(event.topic)
        if topic is None:
            return False
        try:
            check_topic(event, topic, self.now_ms)
        except Problem:
            return False
        return True

    def _cached(self, name: str) -> Topic | None:
        """Return the cached metadata of a topic that is open to clients; OFFSETS_TOPIC may be cached as well."""
        return None if self._topics.reserved(name) else self._topic_metadata.cached(name)

    async def _topic(
        self, name: str, arrived: float, deadline: float, *, after_arrival: bool = False, to_read: bool = False
    ) -> Topic:
        """Look up a topic until `deadline` as TopicMetadataCache.get does; `to_read`: it is not written to.

        Raises Problem (403, 404, 503).
        """
        if self._topics.reserved(name):
            raise Problem(FORBIDDEN_TOPIC, f"topic: {name} is internal: use another")
        check_time(f"topic: {name}", deadline)
        topics = self._read_topics if to_read else self._topic_metadata
        try:
            async with asyncio.timeout_at(deadline):
                topic = await topics.get(name, arrived, after_arrival=after_arrival)
        except KafkaForbids as error:
            may = "Describe and Read" if to_read else "Describe and Write"
            raise Problem(FORBIDDEN_TOPIC, f"topic: {error}: have it allowed to {may} it") from error
        except (KafkaAway, TimeoutError) as error:
            raise Problem(NOT_WRITTEN, f"topic: {name} cannot be looked up now: send it again") from error
        if topic is None:
            raise Problem(UNKNOWN_TOPIC, f"topic: {name} does not exist: make it, or correct its name")
        return topic

    async def check_positions(self, offsets: GroupOffsets, arrived: float) -> None:
        """Check that the topics and partitions of a group's positions are there. Raises Problem (403, 404, 503).

        Kafka would keep the other positions of a request with an unknown one, so that the transaction must be aborted.
        """
        deadline = self._deadline(arrived, None)
        time_slice = TimeSlice()
        for index, each in enumerate(offsets.positions):
            if time_slice.is_over:
                await time_slice.next()
            topic = None if self._topics.reserved(each.topic) else self._read_topics.cached(each.topic)
            try:
                if topic is None or each.partition >= topic.partitions:
                    topic = await self._topic(
                        each.topic, arrived, deadline, after_arrival=topic is not None, to_read=True
                    )
            except Problem as problem:
                raise Problem(problem.kind, f"offsets.positions[{index}].{problem.detail}") from None
            if each.partition >= topic.partitions:
                why = f"{each.topic} has {topic.partitions} partitions: correct it"
                raise Problem(UNKNOWN_TOPIC, f"offsets.positions[{index}].partition: {why}")
        await self._check_offsets_topic(offsets.group, arrived, deadline)

    async def _check_offsets_topic(self, group: str, arrived: float, deadline: float) -> None:
        """Raise Problem (503) if the partition with a group's offsets has too few replicas in sync for markers.

        The look-up also tells the watch over last stable offsets of the topic. It may be hidden from the service, or
        not be there yet.
        """
        topic = self._topic_metadata.cached(OFFSETS_TOPIC)
        if topic is None:
            with contextlib.suppress(KafkaAway, TimeoutError):
                async with asyncio.timeout_at(deadline):
                    topic = await self._topic_metadata.get(OFFSETS_TOPIC, arrived)
        if topic is not None and partition_of_group(group, topic.partitions) in topic.under_min_isr:
            raise Problem(TOO_FEW_REPLICAS.kind, f"offsets: {TOO_FEW_REPLICAS.why}")

    # ------------------------------------------------------------------------------------- schemas of a registry

    async def _written_before(self, event: Event, deadline: float, problem: Problem) -> WriteResult:
        """Find the result of an event that is refused now, though a record by an older version was taken.

        Raises the problem if the event was not written, and Problem (409, 503) if that is not known now.
        """
        found = await self.keys.find(event.id, event.fp, deadline)
        if isinstance(found, Delivered):
            return result_of((event.id, found), replayed=True)
        raise problem

    async def batch_written_before(
        self, events: Sequence[Event], batch_pair: tuple[bytes, bytes], problem: Problem
    ) -> Committed:
        """Find the result of an atomic batch that `check_content` has refused with this problem, as `check` does.

        `batch_pair` is the batch's (id, fingerprint). Raises Problem.
        """
        if self._encoder is None or problem.kind.status >= 500:
            raise problem
        deadline = time.monotonic() + self._timeout_s
        found = await self.keys.find(*batch_pair, deadline)
        if not isinstance(found, DeliveredBatch):
            raise problem
        members = [(event.id, await self.keys.find(event.id, event.fp, deadline)) for event in events]
        deliveries = tuple((id, state) for id, state in members if isinstance(state, Delivered))
        if len(deliveries) < len(events):
            raise Problem(OUTCOME_UNKNOWN, "Idempotency-Key: it is written; send it again to learn where")
        return Committed(found.at, deliveries, replayed=True)
