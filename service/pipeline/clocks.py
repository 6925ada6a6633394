"""How far this machine's clock is from Redis's and from the brokers', and what time it is for those.

Kafka refuses records whose time is too far from its own (KIP-937), and an event without a timestamp gets one here: what
this machine's clock does must never be an event's fault. So Kafka's time is asked for over and over, and kept by
`time.monotonic` in between, which no step of the clock moves.
"""

import asyncio
import contextlib
import math
import random
import time
from typing import Final

from service.claims.redis_store import KeyStore
from service.contract.wire import encode_answers
from service.core.problems import KafkaAway, StoreAway, StoreUnanswered
from service.kafka.admin import KafkaAdmin
from service.kafka.producer import IdempotentProducer
from service.kafka.topics import REQUESTS_PARTITIONS

MEASURED_S: Final = 10.0
# So little is no reason to doubt this machine's clock: answers take their time, and NTP corrects by so much.
CLOSE_MS: Final = 1_000


def own_ms() -> int:
    """This machine's clock, epoch ms."""
    return time.time_ns() // 1_000_000


def _monotonic_ms() -> float:
    return 1000 * time.monotonic()


class Clock:
    """Another's clock, as its last answer told it."""

    def __init__(self) -> None:
        self._least_ms, self._most_ms = -math.inf, math.inf  # it is ahead of time.monotonic by so much

    def update(self, told_ms: int, asked_ms: float) -> None:
        """It has told its time, now, to who asked at `asked_ms` (by time.monotonic, ms)."""
        self._least_ms, self._most_ms = told_ms - _monotonic_ms(), told_ms + 1 - asked_ms

    @property
    def behind_ms(self) -> float:
        """How far it is surely behind this machine's; negative where it is ahead, 0 where nothing is known."""
        monotonic_ms, own = _monotonic_ms(), own_ms()
        return own - min(max(own, monotonic_ms + self._least_ms), monotonic_ms + self._most_ms)

    def now_ms(self) -> int:
        """Its time: this machine's, unless that is surely wrong."""
        own, behind_ms = own_ms(), self.behind_ms
        return own if abs(behind_ms) <= CLOSE_MS else round(own - behind_ms)


class Clocks:
    """Kafka's and Redis's, measured every few seconds."""

    def __init__(self, cluster: KafkaAdmin, keys: KeyStore, topic: str, instance: str) -> None:
        """`topic` is the journal's: brokers tell their time in answer to a record of it."""
        self.kafka, self.redis = Clock(), Clock()
        self._keys = keys
        self._topic = topic
        self._record = encode_answers(instance, ())
        self._producer = IdempotentProducer(cluster, "clock")

    async def measure(self) -> None:
        """Ask both for their time. Raises KafkaAway, StoreAway, StoreUnanswered."""
        asked_ms = _monotonic_ms()
        self.redis.update(await self._keys.clock_ms(), asked_ms)
        await self._producer.identity()  # what comes first takes longest
        asked_ms = _monotonic_ms()
        partition = random.randrange(REQUESTS_PARTITIONS)  # noqa: S311 - now of one broker, now of another
        (place,) = await self._producer.send_all(self._topic, [(partition, None, self._record)])
        self.kafka.update(place.timestamp, asked_ms)

    async def keep(self) -> None:
        """Measure, for ever; who brings a process up has done so for the first time."""
        while True:
            await asyncio.sleep(MEASURED_S)
            with contextlib.suppress(KafkaAway, StoreAway, StoreUnanswered):  # others tell of that
                await self.measure()

    async def close(self) -> None:
        await self._producer.close()
