"""Recovery of the store, after each loss: fence all slots, read their ledgers through a barrier, replay, free.

Every process has a CurrentStore, and one of them recovers the store for all.
"""

import asyncio
import contextlib
import functools
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final

import structlog

from service.claims.keys import Found, Keys, ServerIdentity, StoreGeneration, chunks
from service.claims.redis_requirements import POLICY_CHANGE
from service.claims.states import Row
from service.contract import PREFIX
from service.contract.wire.ledger import LedgerRecord
from service.contract.wire.names import transactional_id
from service.contract.wire.versions import NewerVersion
from service.core.logs import Incident
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway, KafkaRefusesSetting, StoreAway, StoreLost, StoreUnanswered
from service.core.settings import Settings
from service.core.supervision import log_failure, supervise
from service.kafka.admin import KafkaAdmin
from service.kafka.deadline import shared
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.producer import TransactionalProducer
from service.kafka.reader import Item, Span, high_watermarks, offsets_since, read_through
from service.kafka.records import RecordMetadata
from service.kafka.topics import InternalTopics
from service.kafka.transaction_admin import TransactionAdmin
from service.slots.generation_log import Control
from service.slots.hanging_recovery import CLOCKS_APART_MS, HangingRecovery
from service.slots.ledger_end import check_ends
from service.slots.ledger_rows import rows_of

log = structlog.get_logger(__name__)

# Ledger records, each of some hundred entries in a busy process, in one call to Redis.
REPLAY_RECORDS: Final = 20
# Writes of at most REPLAY_CHUNK keys that may wait for Redis, some 60 MB, with the longest topic names 260 MB. Redis
# writes more slowly than Kafka is read while Redis rehashes millions of keys.
REPLAYS_AHEAD: Final = 400
PAUSE_LEAST_S: Final = 1.0
PAUSE_MOST_S: Final = 300.0
# Slots to name in the status.
SLOTS_NAMED: Final = 8
# The states of the store: the first words of `CurrentStore.status`, which may go on with a colon and details.
STORE_STATES: Final = ("starting", "settled", "recovering", "stale-store", "store-away")


class NotYet(Exception):
    """The store cannot be settled now, because another process recovers it; tried again after a pause."""

    state = "recovering"


class Stale(NotYet):
    """Control names another store, which may still be in use."""

    state = "stale-store"


class OtherKafka(NotYet):
    """Redis holds keys of another Kafka admin, or of this one before its control topic was created again.

    Generations are offsets of control, so the generation and `freed` in Redis are larger than any that could be written
    here, and Redis holds results of records that this Kafka does not have. A person must decide which one is right.
    """

    state = "stale-store"


class CurrentStore:
    """The store that this process works with: its generation, once it is settled, and its recovery after each loss."""

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
        self.generation: StoreGeneration | None = None  # None until the store is settled, and after its loss
        self.status = "starting"
        self.newer: NewerVersion | None = None  # what only a newer release can read: this process must end
        self.refused: KafkaRefusesSetting | None = None  # in the last attempts; None once the store is settled again
        self._last: StoreGeneration | None = None  # the last settled one, which may be lost
        self._admin = admin
        self._transactions = transactions
        self._keys = keys
        self._control = control
        self._topics = topics
        self._settings = settings
        self._telemetry = telemetry
        self._barriers = IdempotentProducer(admin, "store-recovery")
        self._timeout_s = settings.timeouts_ms / 1000
        self._settling: asyncio.Task[StoreGeneration] | None = None
        self._quiet_pause_s = PAUSE_LEAST_S

    async def close(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait([self._settling])
        await self._barriers.close()

    @property
    def state(self) -> str:
        """The status in one word, of STORE_STATES."""
        return self.status.partition(":")[0]

    @property
    def generation_number(self) -> int:
        """The number of the settled generation; 0, which no generation has, if the store is not settled."""
        return 0 if self.generation is None else self.generation.number

    def note_failed_start(self, error: Exception) -> None:
        """Show in `status` why the last attempt of the start, before the store is settled, has failed."""
        self.status = f"starting: {str(error) or type(error).__name__}"

    def lost(self, generation: StoreGeneration) -> None:
        """Settle the store again: a script for `generation` met another. Ignored if `generation` has passed."""
        if self.generation == generation:
            log.warning("store lost", generation=generation.number)
            self._telemetry.store.losses.inc()
            self.generation = None
            self.status = "recovering: the store was lost"
            self._start_settling()

    async def find(self, id: bytes) -> Found:
        """Read the state of a key. Raises StoreAway where the store is not settled, and what Keys.find raises."""
        if self.generation is None:
            raise StoreAway(f"the key store is not complete: {self.status}")
        return await self._keys.find(self.generation, id)

    async def wait_until_settled(self) -> StoreGeneration:
        """Return the generation in which claims may be made, waiting until the store is settled."""
        if self.generation is not None:
            return self.generation
        return await shared(self._start_settling())

    def _start_settling(self) -> asyncio.Task[StoreGeneration]:
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self._settle(), name="settle-store")
            log_failure(self._settling, "settle-store", self._telemetry)  # whether anybody waits for it or not
        return self._settling

    async def _settle(self) -> StoreGeneration:
        """Try to settle the store until that succeeds; returns its generation."""
        trouble = Incident(log, "store not settled")
        while True:
            try:
                generation = await self._attempt()
            except NewerVersion as error:
                self.newer = error
                self.status = f"store-away: {error}"
                trouble.add(error)
            except (NotYet, StoreAway, StoreUnanswered, StoreLost, KafkaAway) as error:
                self.status = f"{error.state if isinstance(error, NotYet) else 'store-away'}: {error}"
                if isinstance(error, KafkaRefusesSetting):
                    self.refused = error
                trouble.add(error)
            except Exception as error:  # a bug, or a foreign record in control: tried again too
                self.status = f"store-away: {error!r}"
                trouble.add(error, bug=True)
            else:
                self._adopt(generation)
                log.info("store settled", generation=generation.number, store=generation.store, **trouble.end())
                return generation
            await self._pause()

    def _adopt(self, generation: StoreGeneration) -> None:
        """Work with a generation from here on: claims may be made in it."""
        self.generation = generation
        self.status = "settled"
        self.refused = None
        self._quiet_pause_s = PAUSE_LEAST_S
        if self._last is not None and self._last.number != generation.number:
            self._telemetry.store.generation_changes.inc()
        self._last = generation

    async def _pause(self) -> None:
        """Wait before the next attempt, which resolves Redis's address again."""
        await self._keys.resolve_again()
        await asyncio.sleep(random.uniform(0.5, 1.0) * min(PAUSE_LEAST_S, self._lease_s / 3))  # noqa: S311

    async def _attempt(self) -> StoreGeneration:
        """Adopt the generation that Redis and control agree on, else recover the store.

        Recovers at once if Redis is empty or lacks keys; if control names another store, after a quiet lease time.
        """
        identity = await self._keys.who()
        if "/" not in identity.store:
            raise StoreAway(f"the server that answers is {identity.store}")
        if identity.evicts:
            raise StoreAway(f"maxmemory-policy is {identity.evicts}: {POLICY_CHANGE}")
        newest = await self._control.newest_generation()
        if identity.generation is not None and (newest is None or newest.number < identity.generation.number):
            raise OtherKafka(
                f"Redis has keys of generation {identity.generation.number}, which is not in Kafka's control topic: "
                f"stop all processes and delete the keys that begin with {{{self._settings.namespace}:0}} "
                f"(FLUSHDB, where there are no others), or set {PREFIX}NAMESPACE to another"
            )
        if newest is not None:
            if identity.store == newest.store and identity.generation == newest and not identity.incomplete:
                return newest
            if identity.store != newest.store:
                await self._wait_until_quiet(identity, newest)
        return await self._recover(identity)

    async def _wait_until_quiet(self, identity: ServerIdentity, newest: StoreGeneration) -> None:
        """Wait for a lease time in which the store that control names is not used.

        Raises Stale, after a pause, if another primary answers meanwhile or a ledger partition grows.
        """
        self.status = "stale-store: control names another store; waiting for a quiet lease time"
        slots = range(await self._slots())
        before = await high_watermarks(self._admin, self._topics.ledger, slots)
        await asyncio.sleep(self._lease_s * random.uniform(1.0, 1.2))  # noqa: S311
        await self._keys.resolve_again()
        same = (
            (await self._keys.who()).store == identity.store
            and await self._control.newest_generation() == newest
            and await high_watermarks(self._admin, self._topics.ledger, slots) == before
        )
        if not same:
            pause_s, self._quiet_pause_s = self._quiet_pause_s, min(2 * self._quiet_pause_s, PAUSE_MOST_S)
            await self._rest(identity, pause_s * random.uniform(0.5, 1.0))  # noqa: S311
            raise Stale("another store is in use, or the primary changed meanwhile")

    async def _rest(self, identity: ServerIdentity, pause_s: float) -> None:
        """Sleep before the next attempt; ends early if another server answers, which might be adopted."""
        loop = asyncio.get_running_loop()
        end = loop.time() + pause_s
        while (left_s := end - loop.time()) > 0:
            await asyncio.sleep(min(left_s, self._lease_s))
            await self._keys.resolve_again()
            if await self._keys.who() != identity:
                return

    # ------------------------------------------------------------------------------------------ store recovery

    async def _recover(self, seen: ServerIdentity) -> StoreGeneration:
        """Recover the store under a new nonce. Raises NotYet if another process recovers it or superseded this one."""
        nonce = secrets.token_hex(8)
        if not await self._keys.recover(seen, nonce):
            raise NotYet("another process recovers the store, or has done so")
        store = seen.store
        keep = functools.partial(self._keep_nonce, store, nonce)
        keeping = supervise("recovery-nonce", keep, self._telemetry)
        try:
            return await self._recover_under(store, nonce)
        except BaseException:
            with contextlib.suppress(StoreAway, StoreUnanswered):
                await self._keys.recover_abandon(store, nonce)
            raise
        finally:
            keeping.cancel()

    async def _keep_nonce(self, store: str, nonce: str) -> None:
        """Renew the nonce while slots are fenced, which may take a transaction timeout."""
        while True:
            await asyncio.sleep(self._lease_s)
            with contextlib.suppress(StoreAway, StoreUnanswered, StoreLost):
                await self._keys.recover_read(store, nonce, 0)

    async def _recover_under(self, store: str, nonce: str) -> StoreGeneration:
        """Name the store in control, fence all slots, replay all ledger partitions, free the older terms."""
        started = time.monotonic()
        generation = await self._control.append(store)
        newest = await self._control.newest_generation()
        if newest is None or newest.number != generation:
            raise NotYet("a later generation supersedes this recovery")
        slots = await self._slots()
        await self._fence_all(slots)
        await self._end_hanging_in_ledger(store, nonce, slots)
        await self._check_ledger(store, nonce, slots)
        barriers = await self._barrier_all(slots)
        keys = await self._replay_all(store, nonce, barriers)
        await self._keys.recover_end(store, nonce, generation, [barriers[slot].offset for slot in range(slots)])
        took_s = time.monotonic() - started
        self._telemetry.recovery.store_seconds.observe(took_s)
        log.info("store recovered", generation=generation, slots=slots, keys=keys, took_s=round(took_s, 3))
        return StoreGeneration(generation, store)

    async def _slots(self) -> int:
        """Count the slots: the ledger's partitions, or more if control has barriers of more.

        A broker that is cut off may report too few partitions of the ledger. A slot that wrote in a further one has put
        a barrier of itself, or of a higher slot, into control, which was read through our own barrier.
        """
        return max(await self._topics.slots(), self._control.slots)

    async def _fence_all(self, slots: int) -> None:
        """Fence all slots, so that no write that was claimed in the old store can commit."""
        slot_of = {transactional_id(self._settings.namespace, slot): slot for slot in range(slots)}

        def on_progress(left: Collection[str]) -> None:
            waiting = f", waiting for slots {[slot_of[name] for name in left][:SLOTS_NAMED]}" if left else ""
            self.status = f"recovering: {slots - len(left)} of {slots} slots fenced{waiting}"

        await self._transactions.fence(list(slot_of), self._settings.transaction_timeout_ms, on_progress)
        self._telemetry.recovery.fences.labels("store").inc(slots)

    async def _end_hanging_in_ledger(self, store: str, nonce: str, slots: int) -> None:
        """End hanging transactions in the ledger, which would block the replay; others are left to slot recovery."""
        ledger = self._topics.ledger
        hanging = await self._transactions.partitions_with_open_transactions([(ledger, slot) for slot in range(slots)])
        if not hanging:
            return
        applied = await self._keys.recover_read(store, nonce, slots)
        for _, slot in sorted(hanging):
            name = transactional_id(self._settings.namespace, slot)
            producer = TransactionalProducer(self._admin, name, self._settings.transaction_timeout_ms)
            await producer.start()
            try:
                ended = self._telemetry.recovery.hanging_ended
                recovery = HangingRecovery(self._admin, (ledger, slot), producer.hanging, self._timeout_s, ended)
                await recovery.run(applied[slot], ())
            finally:
                await producer.close()

    async def _check_ledger(self, store: str, nonce: str, slots: int) -> None:
        """Raise KafkaAway where a ledger partition has lost records that Redis has applied."""
        applied = await self._keys.recover_read(store, nonce, slots)
        known = {slot: offset for slot, offset in enumerate(applied) if offset is not None}
        if known:
            await check_ends(self._transactions, self._topics.ledger, self._settings.namespace, known)

    async def _barrier_all(self, slots: int) -> dict[int, RecordMetadata]:
        """Append a ledger record without entries to each partition, after the fence, and return their metadata by slot.

        Reading through such a record is safer than reading to the LSO: a deposed leader does not have it.
        """
        records = [(slot, None, LedgerRecord(slot, -1, -1, self._settings.name, ()).encode()) for slot in range(slots)]
        return dict(enumerate(await self._barriers.send_all(self._topics.ledger, records)))

    async def _replay_all(self, store: str, nonce: str, barriers: Mapping[int, RecordMetadata]) -> int:
        """Replay all ledger partitions through their barriers, by slot; returns the number of keys.

        Raises KafkaAway, StoreLost, StoreAway and StoreUnanswered.
        """
        spans = await self._spans_to_replay(store, nonce, barriers)
        remaining = {slot: span.through + 1 - max(span.start or 0, 0) for slot, span in spans.items()}  # offsets
        writes = _Writes(functools.partial(self._keys.recover_replay, store, nonce))
        replayed, left = self._telemetry.recovery.replayed.labels("store"), self._telemetry.recovery.replay_remaining
        records = read_through(self._admin, self._topics.ledger, spans, "read_committed", self._timeout_s)
        try:
            async with contextlib.aclosing(records):
                async for items in records:
                    for rows in _rows_in_chunks(items):
                        await writes.add(rows)
                        replayed.inc(len(rows))
                    last = items[-1]
                    remaining[last.partition] = max(0, spans[last.partition].through - last.offset)
                    left.set(sum(remaining.values()))
                    behind = [slot for slot, offsets in sorted(remaining.items()) if offsets]
                    self.status = f"recovering: {writes.keys} keys replayed, waiting for slots {behind[:SLOTS_NAMED]}"
            await writes.end()
        finally:
            left.set(0)
            await writes.stop()
        return writes.keys

    async def _spans_to_replay(self, store: str, nonce: str, barriers: Mapping[int, RecordMetadata]) -> dict[int, Span]:
        """Find the offsets to replay, by slot: from `applied`, or as far back as keys live, through the barrier.

        Does not use this machine's clock: keys expire by Redis's clock, and ledger records have the brokers' times.
        """
        applied = await self._keys.recover_read(store, nonce, len(barriers))
        unknown = [slot for slot, offset in enumerate(applied) if offset is None]
        now_ms = min(await self._keys.clock_ms(), *(barrier.timestamp for barrier in barriers.values()))
        longest_ttl_s = max(self._topics.longest_ttl_s, self._control.longest_ttl_s)
        since_ms = max(0, now_ms - longest_ttl_s * 1000 - CLOCKS_APART_MS)
        starts = await offsets_since(self._admin, self._topics.ledger, unknown, since_ms) if unknown else {}
        return {
            slot: Span(starts.get(slot) if applied[slot] is None else applied[slot], barrier.offset)
            for slot, barrier in barriers.items()
        }

    @property
    def _lease_s(self) -> float:
        return self._settings.lease_ttl_ms / 1000


def _rows_in_chunks(items: Sequence[Item]) -> Iterator[Sequence[Row]]:
    """Decode ledger records, REPLAY_RECORDS at a time, into rows for one call to Redis each."""
    for start in range(0, len(items), REPLAY_RECORDS):
        yield from chunks(rows_of(items[start : start + REPLAY_RECORDS]))


class _Writes:
    """Concurrent writes of rows into the store, at most REPLAYS_AHEAD, in any order: the newest state of an id stays.

    A failed write is raised by a later call.
    """

    def __init__(self, write: Callable[[Sequence[Row]], Coroutine[Any, Any, None]]) -> None:
        self.keys = 0  # rows added so far
        self._write = write
        self._in_flight: deque[asyncio.Task[None]] = deque()

    async def add(self, rows: Sequence[Row]) -> None:
        """Begin to write rows, once fewer than REPLAYS_AHEAD writes are in flight. Raises what an earlier one did."""
        while self._in_flight and (len(self._in_flight) == REPLAYS_AHEAD or self._in_flight[0].done()):
            await self._in_flight.popleft()
        self._in_flight.append(asyncio.create_task(self._write(rows)))
        self.keys += len(rows)
        await asyncio.sleep(0)  # let the task send: decoding a fetched batch does not yield

    async def end(self) -> None:
        """Wait until all rows are written."""
        while self._in_flight:
            await self._in_flight.popleft()

    async def stop(self) -> None:
        """Cancel the writes that are in flight."""
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
