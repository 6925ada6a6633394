"""Measures how far this machine's clock is from Redis's and from the brokers'.

Kafka refuses records whose timestamp is too far from its own time (KIP-937), and the service sets the timestamp of
events without one. A wrong clock of this machine must not cause refusals, so the brokers' time is measured regularly,
and kept by `time.monotonic` in between, which no step of the clock moves.
"""

import asyncio
import contextlib
import math
import random
import time
from typing import Final

from service.claims.keys import Keys
from service.contract.wire.journal import encode_answers
from service.core import time_of_day
from service.core.problems import KafkaAway, StoreAway, StoreUnanswered
from service.kafka.admin import KafkaAdmin
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.topics import REQUESTS_PARTITIONS

MEASURED_S: Final = 10.0
# A smaller difference is ignored: responses take time, and NTP corrects by as much.
CLOSE_MS: Final = 1_000


def _monotonic_ms() -> float:
    return 1000 * time.monotonic()


class Clock:
    """The clock of another machine, as measured last."""

    def __init__(self) -> None:
        self._least_ms, self._most_ms = -math.inf, math.inf  # bounds of its time less time.monotonic

    def update(self, time_ms: int, requested_ms: float) -> None:
        """Note the time that was received now, on a request sent at `requested_ms` (time.monotonic, in ms)."""
        self._least_ms, self._most_ms = time_ms - _monotonic_ms(), time_ms + 1 - requested_ms

    @property
    def behind_ms(self) -> float:
        """By how many ms it is surely behind this machine's clock; negative if ahead, 0 if nothing is known."""
        monotonic_ms, own = _monotonic_ms(), time_of_day.now_ms()
        return own - min(max(own, monotonic_ms + self._least_ms), monotonic_ms + self._most_ms)

    def ahead_s(self) -> float:
        """Return by how many seconds this machine's clock is ahead (`behind_ms`), rounded to 0.1 s."""
        return round(self.behind_ms / 1000, 1)

    def now_ms(self) -> int:
        """Return its time: this machine's, unless that is surely wrong."""
        own, behind_ms = time_of_day.now_ms(), self.behind_ms
        return own if abs(behind_ms) <= CLOSE_MS else round(own - behind_ms)


class Clocks:
    """The clocks of Kafka and of Redis, measured every MEASURED_S."""

    def __init__(self, admin: KafkaAdmin, keys: Keys, topic: str, instance: str) -> None:
        """`topic` is the journal's: with LogAppendTime, the timestamp of a record is its broker's time."""
        self.kafka, self.redis = Clock(), Clock()
        self.by_name = {"kafka": self.kafka, "redis": self.redis}
        self._keys = keys
        self._topic = topic
        self._record = encode_answers(instance, ())
        self._producer = IdempotentProducer(admin, "clock")

    async def measure(self) -> None:
        """Measure both clocks. Raises KafkaAway, StoreAway, StoreUnanswered."""
        requested_ms = _monotonic_ms()
        self.redis.update(await self._keys.clock_ms(), requested_ms)
        await self._producer.identity()  # so that the measured request starts no session
        requested_ms = _monotonic_ms()
        partition = random.randrange(REQUESTS_PARTITIONS)  # noqa: S311 - a random broker
        (written,) = await self._producer.send_all(self._topic, [(partition, None, self._record)])
        self.kafka.update(written.timestamp, requested_ms)

    async def keep(self) -> None:
        """Measure, for ever. The first measurement is done at the start of the process."""
        while True:
            await asyncio.sleep(MEASURED_S)
            with contextlib.suppress(KafkaAway, StoreAway, StoreUnanswered):  # logged by others
                await self.measure()

    async def close(self) -> None:
        await self._producer.close()
