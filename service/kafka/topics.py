"""The topics: Fencepost's own, made at start and checked where they exist, and what is known of everyone else's."""

import asyncio
import contextlib
import math
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from service.contract import PREFIX, SettingsError
from service.contract.wire import control_topic, findings_topic, ledger_topic, requests_topic
from service.core.problems import KafkaAway, KafkaForbids
from service.core.settings import GROUP_LEDGER_BYTES_MAX, Settings
from service.kafka.admin import KafkaAdmin, Topic
from service.kafka.deadline import shared, unwaited

REQUESTS_PARTITIONS: Final = 8
WEEK_S: Final = 168 * 3600
# Past the retention of keys, time for the audit to read what it needs.
EXTRA_S: Final = 2 * 24 * 3600
# The default of Kafka's `max.message.bytes`.
OWN_MESSAGE_BYTES: Final = 1_048_588
# Of a record of our own, what is not its entries: the batch's head, the record's fields, and the JSON's, with names.
RECORD_HEAD_BYTES: Final = 512
# That, and one entry of a topic with the longest name; less holds nothing.
OWN_MESSAGE_BYTES_LEAST: Final = 2 * RECORD_HEAD_BYTES + 256
# How long a topic's settings are believed, and for how long that it lacks replicas.
KNOWN_S: Final = 10.0
SHORT_S: Final = 0.5
# For so long more they will do while Kafka is asked anew: one broker that is silent must not hold up every request.
STALE_S: Final = 60.0
# For a topic that failed a group; what was known of it will do.
LOOK_AGAIN_S: Final = 1.0
# Names that nobody made which are remembered, for batches that were under way when they were asked for.
ABSENT_MAX: Final = 1_000


class InternalTopics:
    """`{ns}.ledger`, `{ns}.requests` and `{ns}.control`."""

    def __init__(self, cluster: KafkaAdmin, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        namespace = settings.namespace
        self.ledger = ledger_topic(namespace)
        self.requests = requests_topic(namespace)
        self.control = control_topic(namespace)
        self.findings = findings_topic(namespace)
        retention_ms = 1000 * (max(settings.key_ttl_s, WEEK_S) + EXTRA_S)
        kept = {
            "cleanup.policy": "delete",
            "retention.ms": str(retention_ms),
            "retention.bytes": "-1",
            "message.timestamp.type": "LogAppendTime",
        }
        self.limits: dict[str, int] = {}  # `max.message.bytes` of each, as far as it may be read
        self._wanted: dict[str, tuple[int, Mapping[str, str]]] = {
            self.ledger: (settings.slots_max, kept),
            self.requests: (REQUESTS_PARTITIONS, kept),
            self.control: (1, {"cleanup.policy": "compact"}),
        }
        # With what they are made beside that: whatever the brokers' defaults are, they take our records, by any clock.
        self._made_with = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(OWN_MESSAGE_BYTES)}

    def reserved(self, topic: str) -> bool:
        """Is this a topic that no client may write to?"""
        return topic in self._wanted or topic == self.findings or topic.startswith("__")

    async def ensure(self) -> None:
        """Make what is missing, grow the ledger, check the rest. SettingsError says what to change."""
        found = await self._cluster.describe(list(self._wanted))
        for name, (partitions, settings) in self._wanted.items():
            if name not in found:
                await self._cluster.create(name, partitions, {**self._made_with, **settings})
        found = await self._described()
        self._note_limits(found)
        wrong = [line for name in self._wanted for line in self.faults(found[name])]
        if wrong:
            raise SettingsError("\n".join(wrong))
        if found[self.ledger].partitions < self._settings.slots_max:
            await self._cluster.grow(self.ledger, self._settings.slots_max)

    async def read_limits(self) -> None:
        """See how large a record they take now. Raises KafkaAway, KafkaForbids."""
        self._note_limits(await self._cluster.describe(list(self._wanted)))

    def _note_limits(self, topics: Mapping[str, Topic]) -> None:
        self.limits |= {name: it.message_bytes_max for name, it in topics.items() if "max.message.bytes" in it.settings}

    @property
    def ledger_bytes_max(self) -> int:
        """Bytes of entries at which a group closes, so that the ledger takes their record."""
        return min(GROUP_LEDGER_BYTES_MAX, self.limits.get(self.ledger, OWN_MESSAGE_BYTES) - RECORD_HEAD_BYTES)

    async def _described(self) -> dict[str, Topic]:
        """The internal topics once each is known: one that was just made takes a moment to show."""
        async with asyncio.timeout(self._cluster.timeout_s):
            while True:
                found = await self._cluster.describe(list(self._wanted))
                if found.keys() == self._wanted.keys():
                    return found
                await asyncio.sleep(0.05)

    async def slots(self) -> int:
        """How many slots there are now: the ledger's number of partitions.

        Not fewer than the start saw to: a broker that lags behind tells what there were, and who fences only those
        leaves the others alive.
        """
        told = await self._cluster.partitions([self.ledger])
        return max(told.get(self.ledger, 0), self._settings.slots_max)

    def faults(self, topic: Topic) -> list[str]:
        """What of an internal topic is not as it must be, a line each that says what to set."""
        partitions, settings = self._wanted[topic.name]
        wrong = []
        if topic.name == self.ledger and topic.partitions > partitions:
            wrong.append(
                f"{PREFIX}SLOTS_MAX={partitions} is less than the {topic.partitions} partitions of {topic.name}: "
                f"set {PREFIX}SLOTS_MAX to {topic.partitions} or more"
            )
        if topic.name == self.requests and topic.partitions < partitions:
            wrong.append(f"topic {topic.name} has {topic.partitions} partitions: raise them to {partitions}")
        if topic.name == self.control and topic.partitions != partitions:
            wrong.append(f"topic {topic.name} has {topic.partitions} partitions: make it anew, with one")
        for name, value in settings.items():
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
    """What is known of the topics of others, asked of Kafka at most every few seconds and never made by asking."""

    def __init__(self, cluster: KafkaAdmin) -> None:
        self._cluster = cluster
        self._known: dict[str, tuple[float, Topic]] = {}
        self._last: dict[str, Topic] = {}
        self._told: dict[str, float] = {}  # when what is last known of it was asked for
        self._absent: dict[str, float] = {}  # when it was last asked for in vain
        self._asking: dict[str, asyncio.Task[Topic | None]] = {}

    def fresh(self, name: str) -> Topic | None:
        """The topic if it was asked for a moment ago; no I/O."""
        until, topic = self._known.get(name, (0.0, None))
        return topic if until > time.monotonic() else None

    def cached(self, name: str) -> Topic | None:
        """The topic if it is known; one that was fresh until lately will do while it is asked for anew, apart."""
        until, topic = self._known.get(name, (0.0, None))
        now = time.monotonic()
        if topic is None or until > now:
            return topic
        if topic.under_min_isr or until + STALE_S <= now:  # that replicas lack is told to callers: it must be true
            return None
        if name not in self._asking:
            self._ask_apart(name)
        return topic

    async def get(self, name: str, arrived: float, *, anew: bool = False) -> Topic | None:
        """The topic, or None where Kafka, asked after `arrived` (time.monotonic), says that there is none.

        So a topic is found by the first who asks after it was made, and a batch asks once. `anew`: as Kafka tells of it
        after `arrived`, or knew it last while it is away. Raises KafkaAway, KafkaForbids.
        """
        topic = self.fresh(name)
        for _ in range(2):  # what was being asked before may have missed a topic that was made or changed meanwhile
            will_do = topic is not None and not (anew and self._told.get(name, -math.inf) < arrived)
            if not will_do and self._absent.get(name, -math.inf) < arrived:
                topic = await shared(self._asking.get(name) or self._ask_apart(name))
        return topic

    @property
    def names(self) -> Collection[str]:
        """The topics that were there when they were last asked for."""
        return self._last.keys()

    def last_known(self, name: str) -> Topic:
        """The topic as it was when it was last there; KeyError where it never was, and no event was let in."""
        return self._last[name]

    def close(self) -> None:
        """Nobody waits for what is being asked any more."""
        for asking in self._asking.values():
            asking.cancel()

    def invalidate(self, name: str) -> None:
        """The broker said otherwise: ask again next time."""
        self._known.pop(name, None)

    async def refresh(self, names: Iterable[str]) -> None:
        """Ask for what is not fresh of these topics, for a second at most: they failed a group, maybe for replicas."""
        stale = [name for name in names if self.fresh(name) is None]
        if stale:
            with contextlib.suppress(KafkaAway, TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await asyncio.gather(*(self.get(name, time.monotonic()) for name in stale))

    def _ask_apart(self, name: str) -> asyncio.Task[Topic | None]:
        asking = self._asking[name] = asyncio.create_task(self._ask(name))
        asking.add_done_callback(lambda _: self._asking.pop(name, None))
        asking.add_done_callback(unwaited)  # `peek` does not
        return asking

    async def _ask(self, name: str) -> Topic | None:
        began = time.monotonic()
        last = self._last.get(name)
        try:
            topic = (await self._cluster.describe([name])).get(name)
            if topic is None:
                # That broker may lag behind, and 404 is final to a client, who may have made the topic just now.
                topic = (await self._cluster.describe([name], elsewhere=True)).get(name)
        except KafkaForbids:  # an answer, and not for want of one
            self._known.pop(name, None)
            raise
        except KafkaAway:
            if last is None:
                raise
            self._known[name] = time.monotonic() + SHORT_S, last
            return last  # what it was will do: the broker itself has the last word
        self._absent.pop(name, None)
        if topic is None:
            self._known.pop(name, None)
            self._absent[name] = began
            if len(self._absent) > ABSENT_MAX:
                del self._absent[next(iter(self._absent))]
        else:
            self._last[name], self._told[name] = topic, began
            self._known[name] = time.monotonic() + (SHORT_S if topic.under_min_isr else KNOWN_S), topic
        return topic
