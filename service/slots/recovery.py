"""Recovery of a slot: fence, read through a record of one's own, replay, free.

Used at the start of a slot, after a take-over and after every doubt. An event counts as not written only after the
fence and the read through the own record. Claims are compared by ledger offsets, which only grow.
"""

import contextlib

from service.claims.keys import REPLAY_CHUNK, Keys, StoreGeneration
from service.claims.states import Row, SlotEvent
from service.contract.wire.names import transactional_id
from service.core import time_of_day
from service.core.metrics import Telemetry
from service.core.problems import StoreLost
from service.core.settings import Settings
from service.kafka.admin import KafkaAdmin
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.producer import TransactionalProducer
from service.kafka.reader import Span, read_through
from service.kafka.topics import InternalTopics
from service.kafka.transaction_admin import TransactionAdmin
from service.slots.generation_log import Control
from service.slots.hanging_recovery import HangingRecovery
from service.slots.ledger_end import check_ends, lost_records
from service.slots.ledger_rows import rows_of
from service.slots.slot import Slot


class SlotRecovery:
    """Makes slots, and takes a slot from LEASED to READY."""

    def __init__(
        self,
        admin: KafkaAdmin,
        transactions: TransactionAdmin,
        keys: Keys,
        control: Control,
        topics: InternalTopics,
        settings: Settings,
        telemetry: Telemetry,
    ) -> None:
        self._admin = admin
        self._transactions = transactions
        self._keys = keys
        self._control = control
        self._topics = topics
        self._settings = settings
        self._fences = telemetry.recovery.fences.labels("slot")
        self._hanging_ended = telemetry.recovery.hanging_ended
        self._replayed = telemetry.recovery.replayed.labels("slot")
        self._timeout_s = settings.timeouts_ms / 1000

    def new_slot(self, n: int) -> Slot:
        """Make a slot, which is VACANT."""
        idempotent = IdempotentProducer(self._admin, f"plain-{n}")
        return Slot(n, self._keys, self._topics.ledger, self._settings.name, idempotent)

    async def run(self, slot: Slot, generation: StoreGeneration) -> None:
        """Fence the older producers, end what hangs, check ledger, begin a term, check generation, replay and free.

        Raises StoreLost, Fenced, TransactionFailed, KafkaAway, StoreAway and others. Then the slot is in DOUBT, its
        producer is closed, and the recovery must be run again; after NewerVersion, by a newer release.
        """
        try:
            await self._fence(slot, generation)
            applied = await self._keys.applied(slot.generation, slot.n)
            await self._end_hanging(slot, applied)
            if applied is not None:
                await check_ends(self._transactions, self._topics.ledger, self._settings.namespace, {slot.n: applied})
            await slot.begin_term(time_of_day.now_ms())
            await self._check(slot)
            await self._replay_and_free(slot)
        except BaseException:
            slot.move(SlotEvent.FAIL)
            await slot.close_producers()
            raise

    async def _fence(self, slot: Slot, generation: StoreGeneration) -> None:
        """Fence the older producers (InitProducerId): the outcome of their transaction is final from here on."""
        name = transactional_id(self._settings.namespace, slot.n)
        producer = TransactionalProducer(self._admin, name, self._settings.transaction_timeout_ms)
        await producer.start()
        self._fences.inc()
        slot.enter(generation, producer)

    async def _end_hanging(self, slot: Slot, applied: int | None) -> None:
        """End hanging transactions in the slot's partitions, before the begin record's marker would commit them."""
        ledger = self._topics.ledger, slot.n
        recovery = HangingRecovery(self._admin, ledger, slot.producer.hanging, self._timeout_s, self._hanging_ended)
        slot.maybe_hanging = await recovery.run(applied, slot.maybe_hanging)

    async def _check(self, slot: Slot) -> None:
        """Raise StoreLost unless control, read after the fence, still names the slot's generation."""
        newest = await self._control.newest_generation(slot.n)
        if newest is None or newest != slot.generation:
            raise StoreLost(f"control names {newest}, this process works with {slot.generation}")
        slot.move(SlotEvent.CHECK)

    async def _replay_and_free(self, slot: Slot) -> None:
        """Replay the slot's ledger from `applied` through its own begin record, then free the older terms.

        Raises KafkaAway if `applied` is past the begin record, because the ledger has then lost records.
        """
        start = await self._keys.applied(slot.generation, slot.n)
        if start is not None and start > slot.term:
            raise lost_records(self._topics.ledger, slot.n, self._settings.namespace, start, slot.term)
        rows: list[Row] = []
        spans = {slot.n: Span(start, slot.term)}
        records = read_through(self._admin, self._topics.ledger, spans, "read_committed", self._timeout_s)
        async with contextlib.aclosing(records):
            async for items in records:
                read = rows_of(items)
                self._replayed.inc(len(read))
                rows += read
                while len(rows) > REPLAY_CHUNK:
                    await self._keys.replay(slot.generation, rows[:REPLAY_CHUNK])
                    del rows[:REPLAY_CHUNK]
        await self._keys.replay(slot.generation, rows, (slot.n, slot.term))
        slot.applied = slot.term
        slot.move(SlotEvent.FREE)
