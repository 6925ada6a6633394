"""Holds the slots of this process: a task for each recovers and serves it, and gives it back.

Which slots the process holds is decided in lease_keeper.py.
"""

import asyncio
import math
import random
import time
from collections.abc import Collection, Sequence
from typing import Final, Protocol

import structlog

from service.claims.keys import StoreGeneration
from service.claims.states import SlotEvent, SlotState
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
from service.core.supervision import failure_of, log_failure
from service.kafka.metadata import Partition
from service.kafka.outcomes import TransactionFailed
from service.pipeline.leases import Leases
from service.pipeline.queue import Queue
from service.slots.recovery import SlotRecovery
from service.slots.slot import Slot
from service.slots.store_recovery import CurrentStore

log = structlog.get_logger(__name__)

# The pause between two recoveries of a slot, doubled each time.
PAUSE_LEAST_S: Final = 0.05
PAUSE_MOST_S: Final = 2.0
CAN_WRITE: Final = frozenset({SlotState.READY, SlotState.WRITING})

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


class SlotWriter(Protocol):
    """Writes through the slots of the pool."""

    async def serve(self, slot: Slot) -> None:
        """Write groups through a READY slot until the slot drains. Raises the error that ends its term."""

    def recovered(self) -> None:
        """Claim again what waits for the recovery of a slot."""


class Pool:
    """The slots of this process, from `start` until each drains."""

    def __init__(
        self,
        leases: Leases,
        store: CurrentStore,
        recovery: SlotRecovery,
        writer: SlotWriter,
        queue: Queue,
        telemetry: Telemetry,
    ) -> None:
        self._leases = leases
        self._store = store
        self._recovery = recovery
        self._writer = writer
        self._queue = queue
        self._telemetry = telemetry
        self.trouble = ""  # why the last term or recovery of a slot failed; "" once a slot is ready again
        self.newer: NewerVersion | None = None  # what only a newer release can read: this process must end
        self.refused: KafkaRefusesSetting | None = None  # in the last recoveries; None once a slot is ready again
        self.was_ready = False  # whether a slot was ready at any time since the start
        self.stopping = False
        self.slots: dict[int, Slot] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._troubles: dict[int, Incident] = {}  # by slot: repeated failures of a recovery are one incident
        self._flushing: asyncio.Task[None] | None = None  # tries pending marks again
        self._marks_trouble = Incident(log, "marks pending")

    def __repr__(self) -> str:
        return f"<Pool {sorted(self.slots.values(), key=lambda slot: slot.n)}>"

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

    def start(self, n: int, maybe_hanging: Collection[Partition] = ()) -> None:
        """Start the task of a slot whose lease is taken; its recovery asks `maybe_hanging` for open transactions."""
        slot = self._recovery.new_slot(n)
        slot.maybe_hanging.update(maybe_hanging)
        slot.move(SlotEvent.LEASE)
        self.slots[n] = slot
        task = self._tasks[n] = asyncio.create_task(self._live(slot), name=f"slot-{n}")
        log_failure(task, "slot", self._telemetry)  # a later heartbeat takes the slot again

    def supersede(self, slot: Slot) -> None:
        """Have a slot recovered after its current group."""
        slot.superseded = True
        self._queue.notify_all()

    def let_go(self, slot: Slot) -> None:
        """Have a slot given back after its current group."""
        slot.draining = True
        self._queue.notify_all()

    def catch_up(self, generation: StoreGeneration) -> None:
        """After a heartbeat, have the requests claimed again that wait for a recovery, and try pending marks again.

        Another process may have recovered the slot for which a request waits.
        """
        self._writer.recovered()
        self._start_flush(generation)

    def _start_flush(self, generation: StoreGeneration) -> None:
        """Try the pending marks again, in a task of their own: slow marks must not delay the next heartbeat."""
        slots = [slot for slot in self.slots.values() if slot.has_pending_marks and slot.generation == generation]
        if slots and not self.stopping and (self._flushing is None or self._flushing.done()):
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
                    await self._writer.serve(slot)
                    idle = True
                except (Exception, asyncio.CancelledError) as error:  # a bug too ends only the term
                    self._ended(slot, failure_of(error))
                    await slot.close_producers()
                    if not slot.draining and not await self._leases.may_keep(slot.n):
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
        self._writer.recovered()

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

    async def _give_back(self, slot: Slot, idle: bool) -> None:
        """Return the lease: clean if the slot is ready and idle, else another process has to recover it."""
        clean = idle and slot.state is SlotState.READY and not slot.has_pending_marks
        if slot.state is SlotState.WRITING:  # its task was cancelled
            slot.move(SlotEvent.FAIL)
        slot.move(SlotEvent.GIVE_BACK)
        await self._leases.give_back(slot.n, clean=clean)

    # ------------------------------------------------------------------------------------------------- stopping

    async def stop(self, timeout_s: float) -> None:
        """Give all slots back after their current groups.

        Slots that cannot write, and one that hangs, are left to other processes, which recover them.
        """
        self.stopping = True
        for n, slot in self.slots.items():
            self.let_go(slot)
            if slot.state not in CAN_WRITE:
                self._tasks[n].cancel()
        if tasks := list(self._tasks.values()):
            _, unfinished = await asyncio.wait(tasks, timeout=timeout_s)
            for task in unfinished:  # Kafka or Redis are away
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished, timeout=timeout_s)
        if self._flushing is not None:
            self._flushing.cancel()
