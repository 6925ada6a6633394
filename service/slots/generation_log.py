"""The control topic, which names the store that holds the claims. Read through a barrier, past deposed leaders."""

import asyncio
import contextlib
import secrets

from service.claims.keys import StoreGeneration
from service.contract.wire.control import (
    GENERATION_KEY,
    Generation,
    barrier_key,
    encode_barrier,
    encode_retention,
    retention_key,
    slot_of_barrier,
    ttl_of_retention,
)
from service.core.time_of_day import now_ms
from service.kafka.admin import KafkaAdmin
from service.kafka.deadline import shared
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.reader import Span, read_through


class Control:
    """Appends to `{ns}.control` and reads it through barriers. Every call may raise KafkaAway, reads NewerVersion."""

    def __init__(self, admin: KafkaAdmin, topic: str, instance: str, key_ttl_s: int) -> None:
        """Make it; `key_ttl_s` is the retention (seconds) that each process knows without a record."""
        self._admin = admin
        self._topic = topic
        self._instance = instance
        self._producer = IdempotentProducer(admin, "control")
        self._newest: StoreGeneration | None = None
        self._position = 0
        self._reading = asyncio.Lock()
        self._next: asyncio.Task[StoreGeneration | None] | None = None
        self._next_slot = 0  # the highest slot of the calls that share the next read
        self.slots = 0  # one more than the highest slot with a barrier in the records read so far
        self.longest_ttl_s = 0  # the longest retention that any rules ever had, by the records read so far, in seconds
        self._remembered_ttl_s = key_ttl_s

    async def close(self) -> None:
        await self._producer.close()

    async def append(self, store: str) -> int:
        """Append a generation record that names `store`; returns its offset, the new generation's number."""
        record = Generation(store, self._instance, now_ms())
        return await self._producer.send(self._topic, 0, GENERATION_KEY, record.encode())

    async def remember_retention(self, ttl_s: int) -> None:
        """Have each later store recovery, by any process, read back as far as keys of this retention (seconds) live.

        Call it before the first key is claimed for so long: rules that are shorter later do not know of it.
        """
        if ttl_s > self._remembered_ttl_s:
            record = encode_retention(self._instance, now_ms())
            await self._producer.send(self._topic, 0, retention_key(ttl_s), record)
            self._remembered_ttl_s = ttl_s

    async def newest_generation(self, slot: int = 0) -> StoreGeneration | None:
        """Read the newest generation up to a barrier appended after this call began; None in a new namespace.

        Without the barrier a deposed leader, or a record that is not replicated yet, could hide a newer generation.
        Concurrent calls share one barrier, of the highest slot among them, so that control has a barrier of every slot
        that ever wrote, or of a higher one.
        """
        if self._next is None:
            self._next_slot = slot
            self._next = asyncio.create_task(self._read())
        self._next_slot = max(self._next_slot, slot)
        return await shared(self._next)

    async def _read(self) -> StoreGeneration | None:
        """Append a barrier, and read from the last position through it. Raises KafkaAway."""
        async with self._reading:
            self._next = None  # later calls need a later barrier
            slot = self._next_slot
            barrier = encode_barrier(self._instance, secrets.token_hex(8), now_ms())
            through = await self._producer.send(self._topic, 0, barrier_key(slot), barrier)
            if through < self._position:  # the topic was created again, without the records read before
                self._position, self._newest, self.slots, self.longest_ttl_s = 0, None, 0, 0
            spans = {0: Span(self._position, through)}
            records = read_through(self._admin, self._topic, spans, "read_uncommitted", self._admin.timeout_s)
            async with contextlib.aclosing(records):
                async for items in records:
                    for item in items:
                        if item.key == GENERATION_KEY:
                            self._newest = StoreGeneration(item.offset, Generation.decode(item.value).store)
                        elif (of := slot_of_barrier(item.key)) is not None:
                            self.slots = max(self.slots, of + 1)
                        elif (ttl_s := ttl_of_retention(item.key)) is not None:
                            self.longest_ttl_s = max(self.longest_ttl_s, ttl_s)
                    self._position = items[-1].offset + 1
            return self._newest
