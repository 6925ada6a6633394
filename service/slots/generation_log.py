"""The control topic: which store holds the claims, read so that no deposed leader's old answer is believed."""

import asyncio
import contextlib
import secrets
import time

from service.claims.redis_store import StoreGeneration
from service.contract.wire import GENERATION_KEY, Generation, barrier_key, encode_barrier, slot_of_barrier
from service.kafka.admin import KafkaAdmin
from service.kafka.deadline import shared
from service.kafka.producer import IdempotentProducer
from service.kafka.reader import Span, read_through


class Control:
    """Appends to `{ns}.control` and reads it through barriers. Every call may raise KafkaAway."""

    def __init__(self, cluster: KafkaAdmin, topic: str, instance: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._instance = instance
        self._producer = IdempotentProducer(cluster, "control")
        self._newest: StoreGeneration | None = None
        self._position = 0
        self._reading = asyncio.Lock()
        self._next: asyncio.Task[StoreGeneration | None] | None = None
        self._next_slot = 0  # the highest of those that wait for it
        self.slots = 0  # that have been recovered in this namespace, before what was read last: none is beyond

    async def close(self) -> None:
        await self._producer.close()

    async def append(self, store: str) -> int:
        """Append a generation record that names `store`; its offset is the new generation."""
        record = Generation(store, self._instance, _now_ms())
        return await self._producer.send(self._topic, 0, GENERATION_KEY, record.encode())

    async def newest_generation(self, slot: int = 0) -> StoreGeneration | None:
        """The newest generation before a barrier that was appended after this call began; None on a new namespace.

        Without the barrier a deposed leader, or a record not yet replicated, could hide a newer generation. Calls that
        wait for the same read share one barrier, of the highest slot: so each slot that ever wrote is known by one.
        """
        if self._next is None:
            self._next_slot = slot
            self._next = asyncio.create_task(self._read())
        self._next_slot = max(self._next_slot, slot)
        return await shared(self._next)

    async def _read(self) -> StoreGeneration | None:
        async with self._reading:
            self._next = None  # who comes from here on needs a later barrier
            slot = self._next_slot
            barrier = encode_barrier(self._instance, secrets.token_hex(8), _now_ms())
            through = await self._producer.send(self._topic, 0, barrier_key(slot), barrier)
            if through < self._position:  # the topic was made anew: of what was read before, it has nothing
                self._position, self._newest, self.slots = 0, None, 0
            spans = {0: Span(self._position, through)}
            records = read_through(self._cluster, self._topic, spans, "read_uncommitted", self._cluster.timeout_s)
            async with contextlib.aclosing(records):
                async for items in records:
                    for item in items:
                        if item.key == GENERATION_KEY:
                            self._newest = StoreGeneration(item.offset, Generation.decode(item.value).store)
                        elif (of := slot_of_barrier(item.key)) is not None:
                            self.slots = max(self.slots, of + 1)
                    self._position = items[-1].offset + 1
            return self._newest


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
