"""Decides which slots this process holds: renews its leases by heartbeats, takes slots, and lets slots go."""

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Final

import structlog

from service.claims.keys import DEAD, FREE, MINE, Heartbeat, StoreGeneration
from service.core.logs import Incident
from service.core.problems import KafkaAway, StoreAway, StoreLost, StoreUnanswered
from service.core.settings import Settings
from service.kafka.metadata import Partition
from service.pipeline.leases import Leases
from service.pipeline.pool import CAN_WRITE, Pool
from service.pipeline.slot_balance import balance, fair_share
from service.slots.slot import Slot
from service.slots.store_recovery import CurrentStore

log = structlog.get_logger(__name__)

# Heartbeats in the time of a lease: a process keeps its slots although two of them were lost.
HEARTBEATS_PER_LEASE: Final = 3
# A process without a slot cannot write, so it looks more often for a free one. After a crash, the slots of its former
# leases become free when those expire.
HEARTBEATS_PER_LEASE_WITHOUT_A_SLOT: Final = 15
# The shortest pause between two heartbeats: each runs a script over all slots.
HEARTBEAT_PAUSE_LEAST_S: Final = 0.01
# A slot that is down for this share of the request timeout is stuck: another slot is taken in its place.
STUCK_SHARE: Final = 0.5


class LeaseKeeper:
    """Holds as many slots in the pool as the settings want, or the process's fair share if that is less."""

    def __init__(
        self, settings: Settings, leases: Leases, store: CurrentStore, pool: Pool, heartbeat_now: asyncio.Event
    ) -> None:
        self._settings = settings
        self._leases = leases
        self._store = store
        self._pool = pool
        self._heartbeat_now = heartbeat_now  # set to send the next heartbeat at once
        self.members = 1  # live processes, by the last heartbeat
        self._renewing = asyncio.Lock()  # held while a heartbeat is on its way
        self._last_heartbeat: tuple[StoreGeneration, float] | None = None  # its generation and time (monotonic)
        self._take_not_before = 0.0
        # Slots to take although they may be free, and the partitions in which they have open transactions.
        self._to_recover: dict[int, set[Partition]] = {}

    def held_producers(self) -> dict[int, int]:
        """Return the slots that this process holds, by producer id."""
        return {slot.producer_id: n for n, slot in self._pool.slots.items() if slot.producer_id is not None}

    def recover(self, n: int, partitions: Collection[Partition]) -> None:
        """Recover a slot whose transaction stays open in these partitions.

        If this process holds the slot, its term ends after its current group. If nobody holds it, the next heartbeat
        takes it. If another process holds it, nothing is done: that process sees the same.
        """
        slot = self._pool.slots.get(n)
        if slot is None:
            self._to_recover.setdefault(n, set()).update(partitions)
            self._heartbeat_now.set()
        elif slot.state in CAN_WRITE:
            slot.maybe_hanging.update(partitions)
            self._pool.supersede(slot)

    async def keep(self) -> None:
        """Send heartbeats, for ever: renew leases, take slots, recover dead slots, give back those beyond the share."""
        trouble = Incident(log, "no heartbeat")
        while not self._pool.stopping:
            self._heartbeat_now.clear()  # if it is set during the heartbeat, another one follows at once
            try:
                generation = await self._store.wait_until_settled()
                await self._heartbeat(generation)
                if failures := trouble.end():
                    log.info("heartbeat again", **failures)
            except StoreLost:
                self._store.lost(generation)
            except (StoreAway, StoreUnanswered, KafkaAway) as error:
                trouble.add(error)
            except Exception as error:  # a bug must not end the heartbeats, which would lose all slots
                trouble.add(error, bug=True)
            with contextlib.suppress(TimeoutError):
                heartbeats = HEARTBEATS_PER_LEASE if self._pool.slots else HEARTBEATS_PER_LEASE_WITHOUT_A_SLOT
                async with asyncio.timeout(self._settings.lease_ttl_ms / 1000 / heartbeats):
                    await self._heartbeat_now.wait()
            await asyncio.sleep(HEARTBEAT_PAUSE_LEAST_S)

    async def _heartbeat(self, generation: StoreGeneration) -> None:
        """Renew the leases, supersede slots that must be recovered, and balance. Raises as Keys.heartbeat does."""
        async with self._renewing:
            if self._pool.stopping:
                return
            held = {n: slot for n, slot in self._pool.slots.items() if not slot.draining}
            try:
                heartbeat = await self._leases.renew(generation, {n: slot.applied for n, slot in held.items()})
            except TimeoutError as error:
                self._heartbeat_now.set()
                raise StoreUnanswered("Redis did not answer a heartbeat in time") from error
        self._note_heartbeat(generation)
        for n, slot in held.items():
            if heartbeat.slots[n] != MINE:
                log.warning("lease lost", slot=n)
                self._pool.let_go(slot)
            elif slot.state in CAN_WRITE and (
                slot.generation != generation or heartbeat.freed[n] > slot.term or slot.cut_off
            ):
                # The slot was fenced by a store recovery or by another holder. It is recovered now, and not when its
                # next group fails, as other requests may wait for events in its ledger. Or a broker was away: then a
                # transaction may hang, and delays all readers.
                self._pool.supersede(slot)
        await self._balance(heartbeat, generation)
        self._pool.catch_up(generation)

    def _note_heartbeat(self, generation: StoreGeneration) -> None:
        """Take no slot for a lease's time after a pause in which the leases expired, or after a new generation.

        Other processes then return to their slots, as this one does. Slots that were down until now are not stuck.
        """
        now, lease_s = time.monotonic(), self._settings.lease_ttl_ms / 1000
        if self._last_heartbeat is not None and (
            self._last_heartbeat[0] != generation or self._last_heartbeat[1] < now - lease_s
        ):
            self._take_not_before = now + lease_s
            for slot in self._pool.slots.values():
                slot.down_since = max(slot.down_since, now)
        self._last_heartbeat = generation, now

    async def _balance(self, heartbeat: Heartbeat, generation: StoreGeneration) -> None:
        """Take and give up slots as `balance` decides. Raises as Keys.take does."""
        held = [slot for slot in self._pool.slots.values() if not slot.draining]
        others = {n: mark for n, mark in enumerate(heartbeat.slots) if n not in self._pool.slots}
        self._to_recover = {
            n: partitions for n, partitions in self._to_recover.items() if others.get(n) in (DEAD, FREE)
        }
        self.members = heartbeat.members
        share = fair_share(
            self._settings.slots, self._settings.slots_max, heartbeat.members, stuck=sum(map(self._is_stuck, held))
        )
        decision = balance(others, len(held), share, self._to_recover)
        await self._take_each(decision.to_take, generation)
        writable = [slot for slot in held if slot.state in CAN_WRITE]
        for slot in writable[: max(0, min(decision.excess, len(writable) - 1))]:  # the process keeps one that can write
            log.info("slot given up", slot=slot.n)
            self._pool.let_go(slot)

    def _is_stuck(self, slot: Slot) -> bool:
        return time.monotonic() - slot.down_since > STUCK_SHARE * self._settings.request_timeout_ms / 1000

    async def _take_each(self, numbers: Sequence[int], generation: StoreGeneration) -> None:
        """Take slots until the next heartbeat is due, which follows at once: slow takes must not delay the leases."""
        due = time.monotonic() + self._settings.lease_ttl_ms / 1000 / HEARTBEATS_PER_LEASE
        for n in numbers:
            now = time.monotonic()
            if self._pool.stopping or now < self._take_not_before:
                return
            if now >= due:
                self._heartbeat_now.set()
                return
            await self._take(n, generation)

    async def _take(self, n: int, generation: StoreGeneration) -> None:
        """Take the lease of a slot, and start the slot. Raises as Keys.take does."""
        is_taken = await self._leases.take(generation, n)
        maybe_hanging = self._to_recover.pop(n, ())  # kept until here: the store may not answer
        if not is_taken or n in self._pool.slots:
            return
        if self._pool.stopping:  # `stop` was called during `take`, and does not know of this slot
            await self._leases.give_back(n, clean=False)
            return
        self._pool.start(n, maybe_hanging)

    async def stop(self) -> None:
        """Have the pool give all slots back, and leave.

        Waits for a heartbeat that is on its way: Redis could run that one last, which would take the returned leases
        again until they expire. One that had no answer in time may still do so.
        """
        self._heartbeat_now.set()
        async with self._renewing:
            pass
        await self._pool.stop(self._settings.timeouts_ms / 1000)
        await self._leases.leave()
