"""`python -m tests.integration.faulty`: the service with faults at certain points, or without a rule of the protocol.

The service itself has no code for that: its methods are wrapped before it starts. A point has the name of the next
step; with `.done` the step has happened, and its result is not yet known to the caller.
"""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from service.claims.keys import ServerIdentity, StoreGeneration
from service.claims.redis_store import RedisKeys
from service.claims.states import SlotEvent
from service.core.problems import KafkaAway, StoreAway, StoreUnanswered
from service.kafka.open_check import OpenCheck
from service.kafka.outcomes import TransactionFailed, TransactionOutcome
from service.kafka.producer import ProducerState, TransactionalProducer
from service.kafka.session import ProducerSession
from service.pipeline.writer import Writer
from service.slots.recovery import SlotRecovery
from service.slots.slot import Slot
from service.slots.store_recovery import CurrentStore
from tests.integration.plan import PLAN_ENV, Plan

HOLD_POLL_S: Final = 0.005

PLACES: Final[dict[str, tuple[type, str]]] = {
    "claim": (RedisKeys, "claim"),
    "release": (RedisKeys, "release"),
    "mark": (RedisKeys, "mark"),
    "plain": (Writer, "_write_idempotent"),
    "slot.fence": (SlotRecovery, "_fence"),
    "slot.begin": (Slot, "begin_term"),
    "slot.check": (SlotRecovery, "_check"),
    "slot.replay": (SlotRecovery, "_replay_and_free"),
    "store.recover": (CurrentStore, "_recover"),
    "store.fence": (CurrentStore, "_fence_all"),
    "store.replay": (CurrentStore, "_replay_all"),
    "store.end": (RedisKeys, "recover_end"),
}
# Points of a transaction with events: before it begins; all sends are answered; the ledger record is answered; the
# commit is answered.
WRITE_PLACES: Final = ("write", "ledger", "commit", "commit.done")

ERRORS: Final[dict[str, type[Exception]]] = {
    error.__name__: error for error in (KafkaAway, StoreAway, StoreUnanswered, TimeoutError)
}
# The broker's error for a refused partition, at the point `ledger`: the transaction stays open.
ABORTABLE: Final = "Abortable"


def replace(owner: type, method: str, other: Callable[..., Awaitable[Any]]) -> None:
    """Replace an existing method."""
    assert callable(getattr(owner, method))
    setattr(owner, method, other)


class Faults:
    """The plan, and the number of visits to each point."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._visits: Counter[str] = Counter()
        known = {*PLACES, *(f"{place}.done" for place in PLACES), *WRITE_PLACES}
        wrong = [fault for fault in plan.faults if fault.at not in known]
        assert not wrong, f"no such place: {wrong}"

    def visit(self, at: str) -> str | None:
        """Do the planned fault of a point, as far as it does not wait; returns the rest: `hold`, or an error."""
        self._visits[at] += 1
        for fault in self._plan.faults:
            if fault.at == at and fault.first <= self._visits[at] < fault.first + fault.times:
                self._plan.tell(at)
                if fault.do == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault.do == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif fault.do in ERRORS:
                    raise ERRORS[fault.do](f"a fault, {at}")
                else:
                    assert fault.do in ("hold", ABORTABLE), fault
                    return fault.do
        return None

    async def reach(self, at: str) -> str | None:
        """Do `visit`, and wait if the fault is `hold`."""
        left = self.visit(at)
        while left == "hold" and not self._plan.may_go(at):  # noqa: ASYNC110 - the test is another process
            await asyncio.sleep(HOLD_POLL_S)
        return left

    def install(self) -> None:
        for place, (owner, method) in PLACES.items():
            replace(owner, method, self._around(place, getattr(owner, method)))
        self._around_write()

    def _around(self, place: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            await self.reach(place)
            result = await method(*args, **kwargs)
            await self.reach(f"{place}.done")
            return result

        return wrapped

    def _around_write(self) -> None:
        send, commit = TransactionalProducer.send, TransactionalProducer.commit

        async def sending(producer: Any, records: Sequence[Any], ledger: Any) -> Any:
            producer.is_begin = not records
            if records:
                await self.reach("write")
            return await send(producer, records, ledger)

        async def committing(producer: Any, ledger_record: bytes) -> int:
            if producer.is_begin:
                return await commit(producer, ledger_record)
            if await self.reach("ledger") == ABORTABLE:
                raise TransactionFailed(TransactionOutcome.ABORTED, "a fault")

            async def end_here(commit: bool) -> None:
                await self.reach("commit")
                await ProducerSession.end_transaction(producer._session, commit)
                await self.reach("commit.done")

            producer._session.end_transaction = end_here
            return await commit(producer, ledger_record)

        replace(TransactionalProducer, "send", sending)
        replace(TransactionalProducer, "commit", committing)


# ------------------------------------------------------------------------------------------------------ mutants


def producer_is_reused() -> None:
    """Step 5 of writing left out: after a failure the same producer goes on, as if its transaction were aborted."""
    fence = SlotRecovery._fence
    kept: dict[int, TransactionalProducer] = {}

    async def fence_or_go_on(recovery: SlotRecovery, slot: Slot, generation: StoreGeneration) -> None:
        if slot.n not in kept:
            await fence(recovery, slot, generation)
            kept[slot.n] = slot.producer
            return
        kept[slot.n]._state = ProducerState.READY
        slot.enter(generation, kept[slot.n])

    async def stay_open(_: TransactionalProducer) -> None:
        pass

    replace(SlotRecovery, "_fence", fence_or_go_on)
    replace(TransactionalProducer, "close", stay_open)


def control_is_not_checked() -> None:
    """Step 4 of slot recovery left out."""

    async def believe(_: SlotRecovery, slot: Slot) -> None:
        slot.move(SlotEvent.CHECK)

    replace(SlotRecovery, "_check", believe)


def ledger_is_not_replayed() -> None:
    """Step 5 of slot recovery left out: the older terms are freed without a replay."""

    async def only_free(recovery: SlotRecovery, slot: Slot) -> None:
        await recovery._keys.replay(slot.generation, [], (slot.n, slot.term))
        slot.move(SlotEvent.FREE)

    replace(SlotRecovery, "_replay_and_free", only_free)


def slots_are_not_fenced() -> None:
    """Step 3 of store recovery left out."""

    async def fence_none(_: CurrentStore, slots: int) -> None:
        pass

    replace(CurrentStore, "_fence_all", fence_none)


def store_is_not_replayed() -> None:
    """Step 4 of store recovery left out: earlier deliveries are forgotten."""

    async def replay_nothing(*_: object) -> int:
        return 0

    replace(CurrentStore, "_replay_all", replay_nothing)


def marks_leave_gaps() -> None:
    """Step 4 of writing without its rule: `applied` moves to each marked record, also past one without a mark."""
    mark = RedisKeys.mark

    async def from_anywhere(
        keys: RedisKeys, generation: StoreGeneration, slot: int, term: int, _: int, offset: int, rows: Any
    ) -> int:
        applied = await keys.applied(generation, slot)
        return await mark(keys, generation, slot, term, -1 if applied is None else applied, offset, rows)

    pay = Slot._flush

    async def pay_or_forget(slot: Slot) -> None:
        """Marks are tried once: a failed one is not tried again."""
        while slot._pending_marks:
            try:
                await pay(slot)
            except StoreAway:
                slot._pending_marks.popleft()

    replace(RedisKeys, "mark", from_anywhere)
    replace(Slot, "_flush", pay_or_forget)


def a_flush_ends_no_recovery() -> None:
    """Step 1 of store recovery left out: the store becomes complete although the nonce is gone."""
    end = RedisKeys.recover_end

    async def end_anyway(keys: RedisKeys, store: str, nonce: str, generation: int, freed: Sequence[int]) -> None:
        await keys.recover(ServerIdentity(store, None), nonce)
        await end(keys, store, nonce, generation, freed)

    replace(RedisKeys, "recover_end", end_anyway)


def what_hangs_is_not_looked_for() -> None:
    """Slot recovery ends no hanging transaction, and a write does not check its partitions."""

    async def nothing(*_: object) -> tuple[dict[Any, int], set[Any]]:
        return {}, set()

    async def nothing_ended(self: SlotRecovery, slot: Slot, applied: int | None) -> None:
        slot.maybe_hanging = set()

    replace(OpenCheck, "ask", nothing)
    replace(SlotRecovery, "_end_hanging", nothing_ended)


MUTANTS: Final[dict[str, Callable[[], None]]] = {
    mutant.__name__: mutant
    for mutant in (
        producer_is_reused,
        control_is_not_checked,
        ledger_is_not_replayed,
        slots_are_not_fenced,
        store_is_not_replayed,
        marks_leave_gaps,
        a_flush_ends_no_recovery,
        what_hangs_is_not_looked_for,
    )
}


def only_take(slots: Sequence[int]) -> None:
    """Leave all other slots to other processes."""
    take = RedisKeys.take

    async def take_some(keys: RedisKeys, generation: StoreGeneration, slot: int, token: str) -> bool:
        return slot in slots and await take(keys, generation, slot, token)

    replace(RedisKeys, "take", take_some)


def main() -> int:
    from service.__main__ import main as serve

    plan = Plan.decode(os.environ[PLAN_ENV])
    for mutant in plan.mutants:
        MUTANTS[mutant]()
    if plan.only_slots is not None:
        only_take(plan.only_slots)
    Faults(plan).install()
    return serve()


if __name__ == "__main__":
    sys.exit(main())
