"""Takes, recovers, serves and gives back the slots of this process: a task for each slot, and one for the leases."""

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import cached_property
from typing import Final

import structlog

from service.claims.keys import DEAD, FREE, MINE, Heartbeat, Keys, StoreGeneration
from service.claims.states import SlotEvent, SlotState
from service.contract.wire.names import transactional_id
from service.contract.wire.versions import NewerVersion
from service.core.logs import Incident
from service.core.metrics import Telemetry
from service.core.problems import (
    Fenced,
    KafkaAway,
    KafkaRefusesSetting,
    StoreAway,
    StoreBug,
    StoreLost,
    StoreUnanswered,
)
from service.core.settings import Settings
from service.core.supervision import failure_of, log_failure
from service.kafka.admin import KafkaAdmin
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.metadata import Partition
from service.kafka.outcomes import TransactionFailed
from service.kafka.topics import InternalTopics
from service.kafka.transaction_admin import TransactionAdmin
from service.pipeline.queue import Queue
from service.pipeline.slot_balance import balance, fair_share
from service.slots.recovery import SlotRecovery
from service.slots.slot import Slot
from service.slots.store_recovery import CurrentStore

log = structlog.get_logger(__name__)

# Heartbeats in the time of a lease: a process keeps its slots although two of them were lost.
HEARTBEATS_PER_LEASE: Final = 3
# A heartbeat without an answer in this share of a lease is sent again at once, over another connection.
HEARTBEAT_TIMEOUT_SHARE: Final = 1 / 6
# A process without a slot cannot write, so it looks more often for a free one. After a crash, the slots of its former
# leases become free when those expire.
HEARTBEATS_PER_LEASE_WITHOUT_A_SLOT: Final = 15
# The shortest pause between two heartbeats: each runs a script over all slots.
HEARTBEAT_PAUSE_LEAST_S: Final = 0.01
PAUSE_LEAST_S: Final = 0.05
PAUSE_MOST_S: Final = 2.0
# A slot that is down for this share of the request timeout is stuck: another slot is taken in its place.
STUCK_SHARE: Final = 0.5
CAN_WRITE: Final = frozenset({SlotState.READY, SlotState.WRITING})

Serve = Callable[[Slot], Awaitable[None]]

# Ends of a term after which the slot is recovered, by the name under which they are counted.
ENDS: Final[dict[type[Exception], str]] = {
    TransactionFailed: "transaction",
    StoreUnanswered: "store-unanswered",
    StoreLost: "store-lost",
    StoreAway: "store-away",
    KafkaAway: "kafka-away",
    Fenced: "fenced",
    NewerVersion: "newer-release",
}
BUG: Final = "bug"


def _cause_of(error: Exception) -> str:
    """Return why a term ended: one of ENDS, or BUG for an error that has none of these causes."""
    if isinstance(error, StoreBug) or (isinstance(error, TransactionFailed) and error.is_bug):
        return BUG
    return next((name for kind, name in ENDS.items() if isinstance(error, kind)), BUG)


class Pool:
    """Holds as many slots as the settings want, or the process's fair share if that is less."""

    def __init__(
        self,
        settings: Settings,
        admin: KafkaAdmin,
        transactions: TransactionAdmin,
        keys: Keys,
        store: CurrentStore,
        recovery: SlotRecovery,
        queue: Queue,
        topics: InternalTopics,
        telemetry: Telemetry,
        heartbeat_now: asyncio.Event,
        serve: Serve,
        recovered: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._admin = admin
        self._transactions = transactions
        self._keys = keys
        self._store = store
        self._recovery = recovery
        self._queue = queue
        self._topics = topics
        self._telemetry = telemetry
        self._serve = serve
        self._recovered = recovered
        self.trouble = ""  # why the last term or recovery of a slot failed; "" once a slot is ready again
        self.newer: NewerVersion | None = None  # what only a newer release can read: this process must end
        self.refused: KafkaRefusesSetting | None = None  # in the last recoveries; None once a slot is ready again
        self.was_ready = False  # whether a slot was ready at any time since the start
        self.members = 1  # live processes, by the last heartbeat
        self.slots: dict[int, Slot] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._last_heartbeat: tuple[StoreGeneration, float] | None = None  # its generation and time (monotonic)
        self._take_not_before = 0.0
        self._troubles: dict[int, Incident] = {}  # by slot: repeated failures of a recovery are one incident
        self._heartbeat_now = heartbeat_now  # set to send the next heartbeat at once
        # Slots to take although they may be free, and the partitions in which they have open transactions.
        self._to_recover: dict[int, set[Partition]] = {}
        self._flushing: asyncio.Task[None] | None = None  # tries pending marks again
        self._marks_trouble = Incident(log, "marks pending")
        self._stopping = False

    def __repr__(self) -> str:
        return f"<Pool {self._settings.name} {sorted(self.slots.values(), key=lambda slot: slot.n)}>"

    @cached_property
    def token(self) -> str:
        """The name of this process in its leases.

        It is made at its first use: a server may make the app before it forks its workers (gunicorn's `preload_app`),
        and workers of one name would take each other's slots for their own.
        """
        return f"{self._settings.name}/{secrets.token_hex(6)}"

    @property
    def ready(self) -> int:
        """How many slots can write now."""
        return sum(slot.state in CAN_WRITE for slot in self.slots.values())

    def count(self, state: SlotState) -> int:
        """How many slots are in this state."""
        return sum(slot.state is state for slot in self.slots.values())

    @property
    def in_doubt(self) -> int:
        """How many events wait for a recovery to find their outcome, also those answered 504."""
        return sum(slot.in_doubt for slot in self.slots.values())

    @property
    def in_doubt_s(self) -> float:
        """How long the oldest event in doubt has been so, in seconds; 0 without any."""
        since = [slot.in_doubt_since for slot in self.slots.values() if slot.in_doubt]
        return time.monotonic() - min(since) if since else 0.0

    @property
    def down_s(self) -> float:
        """How long the slot that is down longest has been so, in seconds; 0 if none is down."""
        since = min((slot.down_since for slot in self.slots.values()), default=math.inf)
        return max(0.0, time.monotonic() - since)

    def doubts(self, n: int, term: int) -> bool:
        """Whether a claim of this slot and term is in doubt here: sent, without a clean result, not yet recovered.

        False for slots of other processes, and for terms newer than this process knew.
        """
        slot = self.slots.get(n)
        return slot is not None and slot.in_doubt > 0 and term <= slot.term

    async def of_producers(self, producer_ids: Collection[int]) -> dict[int, int]:
        """Find the slots whose transactional ids have these producer ids, by producer id. Raises KafkaAway.

        Asks Kafka only for ids of slots that this process does not hold.
        """
        held = {slot.producer_id: n for n, slot in self.slots.items()}
        found = {producer: held[producer] for producer in producer_ids if producer in held}
        if found.keys() >= set(producer_ids):
            return found
        others = {
            transactional_id(self._settings.namespace, n): n
            for n in range(self._settings.slots_max)
            if n not in self.slots
        }
        theirs = await self._transactions.producer_ids(others)
        return found | {producer: others[name] for name, producer in theirs.items() if producer in producer_ids}

    def recover(self, n: int, partitions: Collection[Partition]) -> None:
        """Recover a slot whose transaction stays open in these partitions.

        If this process holds the slot, its term ends after its current group. If nobody holds it, the next heartbeat
        takes it. If another process holds it, nothing is done: that process sees the same.
        """
        slot = self.slots.get(n)
        if slot is None:
            self._to_recover.setdefault(n, set()).update(partitions)
            self._heartbeat_now.set()
        elif slot.state in CAN_WRITE:
            slot.maybe_hanging.update(partitions)
            slot.superseded = True
            self._queue.notify_all()

    # ------------------------------------------------------------------------------------------------- the leases

    async def keep(self) -> None:
        """Send heartbeats, for ever: renew leases, take slots, recover dead slots, give back those beyond the share."""
        trouble = Incident(log, "no heartbeat")
        while not self._stopping:
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
                heartbeats = HEARTBEATS_PER_LEASE if self.slots else HEARTBEATS_PER_LEASE_WITHOUT_A_SLOT
                async with asyncio.timeout(self._settings.lease_ttl_ms / 1000 / heartbeats):
                    await self._heartbeat_now.wait()
            await asyncio.sleep(HEARTBEAT_PAUSE_LEAST_S)

    async def _heartbeat(self, generation: StoreGeneration) -> None:
        """Renew the leases, supersede slots that must be recovered, and balance. Raises as Keys.heartbeat does."""
        held = {n: slot for n, slot in self.slots.items() if not slot.draining}
        applied = {n: slot.applied for n, slot in held.items()}
        try:
            async with asyncio.timeout(self._settings.lease_ttl_ms / 1000 * HEARTBEAT_TIMEOUT_SHARE):
                heartbeat = await self._keys.heartbeat(generation, self.token, self._settings.slots_max, applied)
        except TimeoutError as error:
            self._heartbeat_now.set()
            raise StoreUnanswered("Redis did not answer a heartbeat in time") from error
        self._note_heartbeat(generation)
        for n, slot in held.items():
            if heartbeat.slots[n] != MINE:
                log.warning("lease lost", slot=n)
                self._let_go(slot)
            elif slot.state in CAN_WRITE and (
                slot.generation != generation or heartbeat.freed[n] > slot.term or slot.cut_off
            ):
                # The slot was fenced by a store recovery or by another holder. It is recovered now, and not when its
                # next group fails, as other requests may wait for events in its ledger. Or a broker was away: then a
                # transaction may hang, and delays all readers.
                slot.superseded = True
                self._queue.notify_all()
        await self._balance(heartbeat, generation)
        self._recovered()  # requests in doubt because of other processes' slots are claimed again
        self._start_flush(generation)

    def _start_flush(self, generation: StoreGeneration) -> None:
        """Try the pending marks again, in a task of their own: slow marks must not delay the next heartbeat."""
        slots = [slot for slot in self.slots.values() if slot.has_pending_marks and slot.generation == generation]
        if slots and not self._stopping and (self._flushing is None or self._flushing.done()):
            self._flushing = asyncio.create_task(self._flush_marks(slots, generation), name="flush-marks")
            log_failure(self._flushing, "flush-marks", self._telemetry)  # the next heartbeat starts another

    async def _flush_marks(self, slots: Sequence[Slot], generation: StoreGeneration) -> None:
        """Try the pending marks of these slots again, one slot after the other."""
        try:
            for slot in slots:
                await slot.flush_marks()
        except StoreLost:
            self._store.lost(generation)
        except (StoreAway, StoreUnanswered) as error:
            self._marks_trouble.add(error)
        else:
            if failures := self._marks_trouble.end():
                log.info("pending marks written", **failures)

    def _note_heartbeat(self, generation: StoreGeneration) -> None:
        """Take no slot for a lease's time after a pause in which the leases expired, or after a new generation.

        Other processes then return to their slots, as this one does. Slots that were down until now are not stuck.
        """
        now, lease_s = time.monotonic(), self._settings.lease_ttl_ms / 1000
        if self._last_heartbeat is not None and (
            self._last_heartbeat[0] != generation or self._last_heartbeat[1] < now - lease_s
        ):
            self._take_not_before = now + lease_s
            for slot in self.slots.values():
                slot.down_since = max(slot.down_since, now)
        self._last_heartbeat = generation, now

    async def _balance(self, heartbeat: Heartbeat, generation: StoreGeneration) -> None:
        """Take and give up slots as `balance` decides. Raises as Keys.take does."""
        held = [slot for slot in self.slots.values() if not slot.draining]
        others = {n: mark for n, mark in enumerate(heartbeat.slots) if n not in self.slots}
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
            self._let_go(slot)

    def _is_stuck(self, slot: Slot) -> bool:
        return time.monotonic() - slot.down_since > STUCK_SHARE * self._settings.request_timeout_ms / 1000

    async def _take_each(self, numbers: Sequence[int], generation: StoreGeneration) -> None:
        """Take slots until the next heartbeat is due, which follows at once: slow takes must not delay the leases."""
        due = time.monotonic() + self._settings.lease_ttl_ms / 1000 / HEARTBEATS_PER_LEASE
        for n in numbers:
            now = time.monotonic()
            if self._stopping or now < self._take_not_before:
                return
            if now >= due:
                self._heartbeat_now.set()
                return
            await self._take(n, generation)

    async def _take(self, n: int, generation: StoreGeneration) -> None:
        """Take the lease of a slot, and start the task that recovers and serves the slot. Raises as Keys.take does."""
        is_taken = await self._keys.take(generation, n, self.token)
        maybe_hanging = self._to_recover.pop(n, ())  # kept until here: the store may not answer
        if not is_taken or n in self.slots:
            return
        if self._stopping:  # `stop` was called during `take`, and does not know of this slot
            await self._keys.give_back(generation, n, self.token, clean=False)
            return
        idempotent = IdempotentProducer(self._admin, f"plain-{n}")
        slot = Slot(n, self._keys, self._topics.ledger, self._settings.name, idempotent)
        slot.maybe_hanging.update(maybe_hanging)
        slot.move(SlotEvent.LEASE)
        self.slots[n] = slot
        task = self._tasks[n] = asyncio.create_task(self._live(slot), name=f"slot-{n}")
        log_failure(task, "slot", self._telemetry)  # a later heartbeat takes the slot again

    def _let_go(self, slot: Slot) -> None:
        slot.draining = True
        self._queue.notify_all()

    # ------------------------------------------------------------------------------------------------- one slot

    async def _live(self, slot: Slot) -> None:
        """Recover and serve a slot, again after each end of a term, until it drains."""
        pause_s = PAUSE_LEAST_S
        idle = False  # whether no group is in flight
        try:
            while not slot.draining:
                try:
                    await self._recover(slot)
                    pause_s = PAUSE_LEAST_S
                    await self._serve(slot)
                    idle = True
                except (Exception, asyncio.CancelledError) as error:  # a bug too ends only the term
                    self._ended(slot, failure_of(error))
                    await slot.close_producers()
                    if not slot.draining and not await self._still_mine(slot):
                        return
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
                    pause_s = min(2 * pause_s, PAUSE_MOST_S)
        finally:
            await slot.close_producers()
            self.slots.pop(slot.n, None)
            self._tasks.pop(slot.n, None)
            self._troubles.pop(slot.n, None)
            await self._give_back(slot, idle)

    async def _recover(self, slot: Slot) -> None:
        """Bring a slot to READY in a new term, then have parked requests claimed again. Raises as SlotRecovery.run."""
        generation = await self._store.wait_until_settled()
        if slot.state is SlotState.DOUBT:
            slot.move(SlotEvent.RECOVER)
        started = time.monotonic()
        await self._recovery.run(slot, generation)
        took_s = time.monotonic() - started
        self._telemetry.recovery.slot_seconds.observe(took_s)
        slot.in_doubt = 0
        slot.down_since = math.inf
        self.trouble, self.refused, self.was_ready = "", None, True
        log.info("slot ready", slot=slot.n, term=slot.term, took_s=round(took_s, 3), **self._trouble_of(slot).end())
        self._recovered()

    def _ended(self, slot: Slot, error: Exception) -> None:
        """Note the end of a term, or a failed recovery, by the error that caused it."""
        slot.down_since = min(slot.down_since, time.monotonic())
        why = _cause_of(error)
        self._telemetry.terms_ended.labels(why).inc()
        if why == ENDS[TransactionFailed]:
            self._telemetry.kafka.errors.labels("transaction").inc()
        if isinstance(error, NewerVersion):
            self.newer = error
        if isinstance(error, KafkaRefusesSetting):
            self.refused = error
        self.trouble = str(error) or type(error).__name__
        fields = {"slot": slot.n, "term": slot.term, "in_doubt": slot.in_doubt, "cause": why}
        self._trouble_of(slot).add(error, bug=why == BUG, **fields)
        if slot.state is not SlotState.DOUBT:
            slot.move(SlotEvent.FAIL)
        if isinstance(error, StoreLost):
            self._store.lost(slot.generation)

    def _trouble_of(self, slot: Slot) -> Incident:
        return self._troubles.setdefault(slot.n, Incident(log, "term ended"))

    async def _still_mine(self, slot: Slot) -> bool:
        """Whether the lease is still this process's, or could be taken again; True if Redis does not answer."""
        try:
            return self._store.generation is None or await self._keys.take(self._store.generation, slot.n, self.token)
        except (StoreAway, StoreUnanswered, StoreLost):
            return True

    async def _give_back(self, slot: Slot, idle: bool) -> None:
        """Return the lease: clean if the slot is ready and idle, else another process has to recover it."""
        clean = idle and slot.state is SlotState.READY and not slot.has_pending_marks
        if slot.state is SlotState.WRITING:  # its task was cancelled
            slot.move(SlotEvent.FAIL)
        slot.move(SlotEvent.GIVE_BACK)
        if self._store.generation is not None:
            with contextlib.suppress(StoreAway, StoreUnanswered, StoreLost):
                await self._keys.give_back(self._store.generation, slot.n, self.token, clean)

    # ------------------------------------------------------------------------------------------------- stopping

    async def stop(self) -> None:
        """Give all slots back after their current groups, and leave. A slot that hangs is left to other processes."""
        self._stopping = True
        self._heartbeat_now.set()
        for slot in self.slots.values():
            self._let_go(slot)
        timeout_s = self._settings.timeouts_ms / 1000
        if tasks := list(self._tasks.values()):
            _, unfinished = await asyncio.wait(tasks, timeout=timeout_s)
            for task in unfinished:  # Kafka or Redis are away
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished, timeout=timeout_s)
        if self._flushing is not None:
            self._flushing.cancel()
        if self._store.generation is not None:
            with contextlib.suppress(StoreAway, StoreUnanswered, StoreLost):
                await self._keys.leave(self._store.generation, self.token)
