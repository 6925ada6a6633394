"""Fencepost's internal topics, created and checked at start, and the cache of other topics' metadata."""

import asyncio
import contextlib
import math
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from service.contract import PREFIX, SettingsError
from service.contract.wire.names import control_topic, findings_topic, is_kafka_topic, ledger_topic, requests_topic
from service.core.problems import KafkaAway, KafkaForbids
from service.core.settings import GROUP_LEDGER_BYTES_MAX, Settings
from service.core.shared_task import unwaited
from service.kafka.deadline import shared
from service.kafka.topic_admin import MESSAGE_BYTES_DEFAULT, Topic, TopicAdmin

REQUESTS_PARTITIONS: Final = 8
WEEK_S: Final = 168 * 3600
# Retention of the internal topics beyond that of keys: time for the audit to read them.
EXTRA_S: Final = 2 * 24 * 3600
# The max.message.bytes of the internal topics.
OWN_MESSAGE_BYTES: Final = MESSAGE_BYTES_DEFAULT
# Bytes of an internal record beside its entries: batch header, record fields, and the JSON's other fields.
RECORD_HEAD_BYTES: Final = 512
# The smallest usable max.message.bytes of an internal topic: one entry that names the longest topic fits.
OWN_MESSAGE_BYTES_LEAST: Final = 2 * RECORD_HEAD_BYTES + 256
# How long a topic's cached metadata is fresh, and how long that of a topic under min ISR.
KNOWN_S: Final = 10.0
UNDER_MIN_ISR_S: Final = 0.5
# How long after that the cached metadata is still used while a refresh runs (stale-while-revalidate, RFC 5861):
# a silent broker must not delay every request.
STALE_S: Final = 60.0
# The time limit for refreshing topics that failed a group; afterwards the cached metadata is used.
REFRESH_S: Final = 1.0
# How long a topic is absent before it is forgotten: requests are admitted by its metadata for at most STALE_S more, and
# use the metadata until their group ends: by the settings at most 30 minutes, of two timeouts.
ABSENT_KEPT_S: Final = 3600.0
# The number of names without a topic that are remembered, so that a batch asks for such a name once.
ABSENT_MAX: Final = 1_000
# Look-ups at a time of topics that were never found, and those that may wait for that: a broker answers the requests of
# a connection one by one, so that clients with names of no topic would delay the service's own requests.
NEW_AT_ONCE: Final = 16
NEW_WAITING_MAX: Final = 1_000
# The topics that are remembered of those that are not written to: some KB each.
READ_TOPICS_MAX: Final = 2_000


# The remedy for an internal topic that is gone.
_CREATE_AGAIN: Final = "restart a process, which creates it again; recovery and audit cannot read its records any more"

# By topic: its partitions and its settings.
_Wanted = dict[str, tuple[int, Mapping[str, str]]]


class InternalTopics:
    """`{ns}.ledger`, `{ns}.requests` and `{ns}.control`."""

    def __init__(self, admin: TopicAdmin, settings: Settings, longest_ttl_s: int = 0) -> None:
        """Name the topics. `longest_ttl_s` is the longest retention of keys by a rule, in seconds, 0 without any."""
        self._admin = admin
        self._settings = settings
        namespace = settings.namespace
        self.ledger = ledger_topic(namespace)
        self.requests = requests_topic(namespace)
        self.control = control_topic(namespace)
        self.findings = findings_topic(namespace)
        self.longest_ttl_s = max(settings.key_ttl_s, longest_ttl_s)
        self.limits: dict[str, int] = {}  # `max.message.bytes` of each topic whose settings may be read
        self._wanted = self._wanted_for(self.longest_ttl_s)
        # Further settings at creation, so that the topics accept our records whatever the brokers' defaults and clocks.
        self._made_with = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(OWN_MESSAGE_BYTES)}

    def _wanted_for(self, longest_ttl_s: int) -> _Wanted:
        kept = {
            "cleanup.policy": "delete",
            "retention.ms": str(1000 * (max(longest_ttl_s, WEEK_S) + EXTRA_S)),
            "retention.bytes": "-1",
            "message.timestamp.type": "LogAppendTime",
        }
        return {
            self.ledger: (self._settings.slots_max, kept),
            self.requests: (REQUESTS_PARTITIONS, kept),
            self.control: (1, {"cleanup.policy": "compact"}),
        }

    async def keep_for(self, longest_ttl_s: int) -> None:
        """Count with a longer retention of keys by a rule, if the topics keep their records for it.

        A shorter one counts after a restart only: keys that were claimed before live on. Raises SettingsError with what
        to set on the topics, KafkaAway.
        """
        if longest_ttl_s <= self.longest_ttl_s:
            return
        wanted = self._wanted_for(longest_ttl_s)
        found = await self._admin.describe([self.ledger, self.requests])
        if wrong := [line for topic in found.values() for line in self._faults(topic, wanted)]:
            raise SettingsError("\n".join(wrong))
        self._wanted, self.longest_ttl_s = wanted, longest_ttl_s

    def reserved(self, topic: str) -> bool:
        """Check whether a topic is closed to clients: internal, findings, or Kafka's own."""
        return topic in self._wanted or topic == self.findings or is_kafka_topic(topic)

    async def ensure(self) -> None:
        """Create missing internal topics, grow the ledger, check the rest. Raises SettingsError, KafkaAway."""
        found = await self._admin.describe(list(self._wanted))
        for name, (partitions, settings) in self._wanted.items():
            if name not in found:
                await self._admin.create(name, partitions, {**self._made_with, **settings})
        found = await self._described()
        self._note_limits(found)
        wrong = [line for name in self._wanted for line in self.faults(found[name])]
        if wrong:
            raise SettingsError("\n".join(wrong))
        if found[self.ledger].partitions < self._settings.slots_max:
            await self._admin.grow(self.ledger, self._settings.slots_max)

    async def check_again(self) -> list[str]:
        """Update `limits` from the topics' current settings. Raises KafkaAway, KafkaForbids.

        Returns what is wrong with them now, a line for each deleted topic and each setting to change. The number of
        partitions is left out: a process with another SLOTS_MAX may just have raised it.
        """
        found = await self._admin.describe(list(self._wanted))
        self._note_limits(found)
        gone = [f"topic {name} was deleted: {_CREATE_AGAIN}" for name in self._wanted if name not in found]
        return gone + [line for topic in found.values() for line in self._setting_faults(topic, self._wanted)]

    def _note_limits(self, topics: Mapping[str, Topic]) -> None:
        self.limits |= {
            name: topic.message_bytes_max for name, topic in topics.items() if "max.message.bytes" in topic.settings
        }

    @property
    def ledger_bytes_max(self) -> int:
        """Bytes of entries at which a group closes, so that its record fits the ledger's max.message.bytes."""
        return min(GROUP_LEDGER_BYTES_MAX, self.limits.get(self.ledger, OWN_MESSAGE_BYTES) - RECORD_HEAD_BYTES)

    async def _described(self) -> dict[str, Topic]:
        """Describe the internal topics, waiting until metadata lists those that were just created."""
        async with asyncio.timeout(self._admin.timeout_s):
            while True:
                found = await self._admin.describe(list(self._wanted))
                if found.keys() == self._wanted.keys():
                    return found
                await asyncio.sleep(0.05)

    async def slots(self) -> int:
        """Count the slots: the ledger's partitions, at least `slots_max`, which `ensure` has created.

        A broker with old metadata may list fewer partitions; the producers of the others would not be fenced.
        """
        found = await self._admin.partitions([self.ledger])
        return max(found.get(self.ledger, 0), self._settings.slots_max)

    def faults(self, topic: Topic) -> list[str]:
        """List what is wrong with an internal topic: one line for each fault, with the setting to change."""
        return self._faults(topic, self._wanted)

    def _faults(self, topic: Topic, wanted: _Wanted) -> list[str]:
        partitions, _ = wanted[topic.name]
        wrong = []
        if topic.name == self.ledger and topic.partitions > partitions:
            wrong.append(
                f"{PREFIX}SLOTS_MAX={partitions} is less than the {topic.partitions} partitions of {topic.name}: "
                f"set {PREFIX}SLOTS_MAX to {topic.partitions} or more"
            )
        if topic.name == self.requests and topic.partitions < partitions:
            wrong.append(f"topic {topic.name} has {topic.partitions} partitions: raise them to {partitions}")
        if topic.name == self.control and topic.partitions != partitions:
            wrong.append(f"topic {topic.name} has {topic.partitions} partitions: create it again, with one")
        return wrong + self._setting_faults(topic, wanted)

    @staticmethod
    def _setting_faults(topic: Topic, wanted: _Wanted) -> list[str]:
        wrong = []
        for name, value in wanted[topic.name][1].items():
            present = topic.settings.get(name, value)
            longer = name == "retention.ms" and (present == "-1" or int(present) >= int(value))
            if present != value and not longer:
                wrong.append(f"topic {topic.name} has {name}={present}: set {name}={value} on it")
        if topic.message_bytes_max < OWN_MESSAGE_BYTES_LEAST:
            wrong.append(
                f"topic {topic.name} has max.message.bytes={topic.message_bytes_max}: "
                f"set max.message.bytes={OWN_MESSAGE_BYTES} on it"
            )
        return wrong


class TopicMetadataCache:
    """Caches the metadata of topics. A look-up never creates a topic.

    With `found_max` only so many topics are kept, those that were asked for last: `last_known` is not for such a cache.
    """

    def __init__(self, admin: TopicAdmin, found_max: int | None = None) -> None:
        self._admin = admin
        self._found_max = found_max
        self._known: dict[str, tuple[float, Topic]] = {}
        self._last: dict[str, Topic] = {}  # without a topic that `forget_absent` has forgotten
        self._absent_since: dict[str, float] = {}  # of topics in `_last`, by time.monotonic
        self._asked_at: dict[str, float] = {}  # when the cached metadata was requested, by time.monotonic
        self._absent: dict[str, float] = {}  # when the last look-up that found no topic began
        self._looking_up: dict[str, asyncio.Task[Topic | None]] = {}
        self._permits = asyncio.Semaphore(NEW_AT_ONCE)
        self._waiting = 0  # look-ups that wait for a permit

    def fresh(self, name: str) -> Topic | None:
        """Return the topic if its metadata is fresh, else None; no I/O."""
        until, topic = self._known.get(name, (0.0, None))
        return topic if until > time.monotonic() else None

    def cached(self, name: str) -> Topic | None:
        """Return the topic if its metadata is at most STALE_S past fresh, and start a refresh if needed; no waiting."""
        until, topic = self._known.get(name, (0.0, None))
        now = time.monotonic()
        if topic is None or until > now:
            return topic
        if topic.under_min_isr or until + STALE_S <= now:  # callers answer with it, so it must be current
            return None
        if name not in self._looking_up:
            self._start_look_up(name)
        return topic

    async def get(self, name: str, arrived: float, *, after_arrival: bool = False) -> Topic | None:
        """Look up a topic; None where a look-up that began after `arrived` (time.monotonic) found none.

        So the first request after a topic's creation finds the topic, and a batch looks an absent name up once.
        `after_arrival`: only metadata requested after `arrived` is good enough, or the last known while Kafka is away.
        Raises KafkaAway, KafkaForbids.
        """
        topic = self.fresh(name)
        for _ in range(2):  # a look-up that was already running may have missed a change
            is_recent = topic is not None and not (after_arrival and self._asked_at.get(name, -math.inf) < arrived)
            if not is_recent and self._absent.get(name, -math.inf) < arrived:
                topic = await shared(self._looking_up.get(name) or self._start_look_up(name))
        return topic

    @property
    def names(self) -> Collection[str]:
        """The topics that their last successful look-up found."""
        return self._last.keys()

    def last_found(self, name: str) -> Topic | None:
        """Return the topic as last found, which may be long ago; None if it never was."""
        return self._last.get(name)

    def last_known(self, name: str) -> Topic:
        """Return the topic as last found. Raises KeyError if none was: then no admitted request names it."""
        return self._last[name]

    def forget_absent(self, absent: Collection[str]) -> None:
        """Forget the topics that have been absent for ABSENT_KEPT_S; `absent`: those that Kafka does not have now.

        Otherwise the names of deleted topics would be kept for ever. Called regularly.
        """
        now = time.monotonic()
        self._absent_since = {name: self._absent_since.get(name, now) for name in absent if name in self._last}
        for name, since in list(self._absent_since.items()):
            until, _ = self._known.get(name, (0.0, None))
            if max(since, until) + ABSENT_KEPT_S <= now:
                self._forget(name)

    def _forget(self, name: str) -> None:
        for names in (self._absent_since, self._known, self._last, self._asked_at):
            names.pop(name, None)

    def close(self) -> None:
        """Cancel look-ups that are under way."""
        for looking_up in self._looking_up.values():
            looking_up.cancel()

    def invalidate(self, name: str) -> None:
        """Drop a topic's cached metadata, which a broker has contradicted."""
        self._known.pop(name, None)

    async def refresh(self, names: Iterable[str]) -> None:
        """Look up those of the topics that are not fresh, for at most REFRESH_S: topics that failed a group."""
        expired = [name for name in names if self.fresh(name) is None]
        if expired:
            with contextlib.suppress(KafkaAway, TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await asyncio.gather(*(self.get(name, time.monotonic()) for name in expired))

    def _start_look_up(self, name: str) -> asyncio.Task[Topic | None]:
        """Start the look-up that all callers for this topic share."""
        looking_up = self._looking_up[name] = asyncio.create_task(self._look_up(name))
        looking_up.add_done_callback(lambda _: self._looking_up.pop(name, None))
        looking_up.add_done_callback(unwaited)  # `cached` does not await the task
        return looking_up

    async def _look_up(self, name: str) -> Topic | None:
        """Ask Kafka for a topic as `_ask` does; one that was never found has to wait for a permit."""
        if name in self._last:
            return await self._ask(name)
        await self._permit()
        try:
            return await self._ask(name)
        finally:
            self._permits.release()

    async def _permit(self) -> None:
        """Wait for a permit. Raises KafkaAway if that takes too long, or too many wait."""
        if self._waiting >= NEW_WAITING_MAX:
            raise KafkaAway(f"{NEW_WAITING_MAX} look-ups of new topics wait already")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._admin.timeout_s):
                await self._permits.acquire()
        except TimeoutError as error:
            raise KafkaAway(f"{NEW_AT_ONCE} look-ups of new topics have no answer") from error
        finally:
            self._waiting -= 1

    async def _ask(self, name: str) -> Topic | None:
        """Ask Kafka for a topic, and cache it; None if no broker knows the topic. Raises KafkaAway, KafkaForbids."""
        began = time.monotonic()
        last = self._last.get(name)
        try:
            topic = (await self._admin.describe([name])).get(name)
            if topic is None:
                # One broker may lag behind, and 404 is final: ask a second one before answering it.
                topic = (await self._admin.describe([name], elsewhere=True)).get(name)
        except KafkaForbids:  # an answer of Kafka; its base KafkaAway means that none came
            self._known.pop(name, None)
            raise
        except KafkaAway:
            if last is None:
                raise
            self._known[name] = time.monotonic() + UNDER_MIN_ISR_S, last
            return last  # the old metadata suffices: the broker itself checks each record
        self._absent.pop(name, None)
        if topic is None:
            self._known.pop(name, None)
            self._absent[name] = began
            if len(self._absent) > ABSENT_MAX:
                del self._absent[next(iter(self._absent))]
        else:
            if self._found_max is not None:
                self._last.pop(name, None)  # it becomes the last of the dict
                if len(self._last) >= self._found_max:
                    self._forget(next(iter(self._last)))
            self._last[name], self._asked_at[name] = topic, began
            self._known[name] = time.monotonic() + (UNDER_MIN_ISR_S if topic.under_min_isr else KNOWN_S), topic
        return topic
