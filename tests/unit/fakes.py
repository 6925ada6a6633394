"""Fakes of Kafka and Redis, and a service made with them, so that tests run all code in between."""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from prometheus_client import Counter

from service.claims.keys import Heartbeat, StoreGeneration
from service.claims.states import Claim, Claimed, Delivered, KeyState, Row, SlotEvent, SlotState
from service.contract import Guarantee, Rules, TopicRule
from service.contract.wire.ids import event_id, fingerprint
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway, KafkaForbids, Kind, Problem
from service.core.settings import Settings
from service.core.time_of_day import now_ms
from service.events.encoding import Encoder
from service.events.event import Event, event_of
from service.events.schemas import Schemas
from service.kafka.admin import TRANSACTIONS_1, KafkaAdmin
from service.kafka.group_offsets import OFFSETS_TOPIC, GroupOffsets
from service.kafka.hanging import RecordCoordinates
from service.kafka.idempotent_producer import IdempotentProducer
from service.kafka.metadata import Partition
from service.kafka.outcomes import OffsetsRefused
from service.kafka.producer import TransactionalProducer
from service.kafka.records import Record, RecordMetadata, RecordResult
from service.kafka.topic_admin import Topic, TopicAdmin
from service.kafka.topics import READ_TOPICS_MAX, InternalTopics, TopicMetadataCache
from service.kafka.transaction_admin import TransactionAdmin
from service.pipeline.admission import Admission
from service.pipeline.checks import EventChecks
from service.pipeline.journal import Journal
from service.pipeline.queue import Queue
from service.pipeline.request import WriteRequest, WriteResult
from service.pipeline.resolver import Resolver
from service.pipeline.writer import Writer
from service.registry.client import RegistryClient
from service.slots.slot import LedgerPosition, Slot
from service.slots.store_recovery import CurrentStore
from tests.contract.memory_keys import Clock, MemoryKeys, Server

if TYPE_CHECKING:  # tests without tracing import no OpenTelemetry
    from service.pipeline.tracing import Tracing

GENERATION = StoreGeneration(1, "run/repl")
NOW_MS = 1_700_000_000_000
PLAIN_TOPICS = "plain.*"  # topics with the guarantee `idempotent`
KEPT_S = 259_200  # retention of the keys of the topic `kept`


def make_event(key: str, topic: str = "orders", value: bytes = b"1", partition: int | None = None) -> Event:
    event = event_of(key, event_id(key), topic, None, value[:100], [], partition)
    event.value, event.size = value, len(value)  # larger than the service accepts, to reach bounds
    event.fp = fingerprint(topic, partition, None, [], value)
    return event


class Trouble:
    """The plan for the calls of a fake, by their names: errors to raise, and gates to wait at."""

    def __init__(self) -> None:
        self.before: defaultdict[str, deque[BaseException]] = defaultdict(deque)  # raised before the call has an effect
        self.after: defaultdict[str, deque[Exception]] = defaultdict(deque)  # raised after the call has had its effect
        self.gates: dict[str, asyncio.Event] = {}  # the call waits here before it does anything
        self.reached: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def hold(self, name: str) -> asyncio.Event:
        """Let calls of this name wait until the returned event is set."""
        self.gates[name] = asyncio.Event()
        return self.gates[name]

    async def enter(self, name: str) -> None:
        self.reached[name].set()
        await asyncio.sleep(0)
        if name in self.gates:
            await self.gates[name].wait()
        if self.before[name]:
            raise self.before[name].popleft()

    def leave(self, name: str) -> None:
        if self.after[name]:
            raise self.after[name].popleft()


class FakeKeys(MemoryKeys):
    """The key store in memory, with planned errors."""

    def __init__(self) -> None:
        server = Server(GENERATION.store, Clock(NOW_MS), GENERATION)
        super().__init__(server, retention_ms=86_400_000, least_left_ms=60_000, lease_ttl_ms=3_000)
        self.trouble = Trouble()
        self.marks: list[tuple[LedgerPosition, Sequence[Row]]] = []  # all attempts
        self.returned: list[tuple[int, bool]] = []  # slots that were given back, and whether clean
        self.marks_of_slots = ""  # the slots in a heartbeat's reply, if a test sets it

    def is_delivered(self, key: str) -> bool:
        return isinstance(self.server.keys.get(event_id(key)), Delivered)

    def is_claimed(self, key: str) -> bool:
        return isinstance(self.server.keys.get(event_id(key)), Claimed)

    async def claim(
        self,
        generation: StoreGeneration,
        slot: int,
        term: int,
        asked: Sequence[tuple[bytes, bytes]],
        ttls_s: Sequence[int] = (),
    ) -> list[Claim]:
        await self.trouble.enter("claim")
        claims = await super().claim(generation, slot, term, asked, ttls_s)
        self.trouble.leave("claim")
        return claims

    async def claim_all(
        self,
        generation: StoreGeneration,
        slot: int,
        term: int,
        asked: Sequence[tuple[bytes, bytes]],
        ttl_s: int = 0,
    ) -> Claim:
        await self.trouble.enter("claim")
        return await super().claim_all(generation, slot, term, asked, ttl_s)

    async def mark(
        self, generation: StoreGeneration, slot: int, term: int, previous: int, offset: int, rows: Sequence[Row]
    ) -> int:
        self.marks.append((LedgerPosition(generation, term, previous, offset), rows))
        await self.trouble.enter("mark")
        return await super().mark(generation, slot, term, previous, offset, rows)

    async def release(self, generation: StoreGeneration, slot: int, term: int, ids: Sequence[bytes]) -> None:
        await self.trouble.enter("release")
        await super().release(generation, slot, term, ids)

    async def find_all(self, generation: StoreGeneration, ids: Sequence[bytes]) -> list[KeyState]:
        await self.trouble.enter("find_all")
        return await super().find_all(generation, ids)

    async def take(self, generation: StoreGeneration, slot: int, token: str) -> bool:
        await self.trouble.enter("take")
        return await super().take(generation, slot, token)

    async def give_back(self, generation: StoreGeneration, slot: int, token: str, clean: bool) -> None:
        await super().give_back(generation, slot, token, clean)
        self.returned.append((slot, clean))

    async def heartbeat(
        self, generation: StoreGeneration, token: str, slots: int, held: Mapping[int, int]
    ) -> Heartbeat:
        await self.trouble.enter("heartbeat")
        heartbeat = await super().heartbeat(generation, token, slots, held)
        return Heartbeat(heartbeat.members, self.marks_of_slots or heartbeat.slots, heartbeat.freed)


class FakeStore(CurrentStore):
    """A store that is settled from the start; tests set `generation`."""

    def __init__(self, keys: MemoryKeys) -> None:
        self.generation = GENERATION
        self._keys = keys
        self.status = "settled"
        self.losses: list[StoreGeneration] = []
        self.waiting = 0

    def lost(self, generation: StoreGeneration) -> None:
        self.losses.append(generation)

    async def wait_until_settled(self) -> StoreGeneration:
        self.waiting += 1
        try:
            while self.generation is None:  # noqa: ASYNC110 - for ever, where a test says so
                await asyncio.sleep(0.01)
            return self.generation
        finally:
            self.waiting -= 1


class FakeProducer(TransactionalProducer):
    """Writes into lists. An error planned for `write` is raised instead."""

    def __init__(self) -> None:
        self.trouble = Trouble()
        self.written: list[list[Record]] = []
        self.begun_early: list[Partition] | None = None  # partitions of the open transaction
        self.abandoned = 0
        self.closed = False
        self.cut_off = False  # a broker has ended a connection
        self.throttle_s = 0.0
        self._next = 10
        self.records_sent: list[Record] = []
        self.offsets: list[GroupOffsets] = []
        self.leader_asked: list[bool] = []  # by attempt to commit offsets, whether the group's leader had to answer
        self.ledger: list[bytes] = []

    @property
    def producer_id(self) -> int:
        return 7

    @property
    def identity(self) -> tuple[int, int]:
        return 7, 0

    @property
    def has_lost_connection(self) -> bool:
        return self.cut_off

    @property
    def throttled_s(self) -> float:
        return self.throttle_s

    def begin_early(self, partitions: Sequence[Partition]) -> None:
        self.begun_early = list(partitions)

    async def abandon(self) -> None:
        if self.begun_early is not None:
            self.begun_early = None
            await self.trouble.enter("abandon")
            self.abandoned += 1

    async def commit_offsets(self, offsets: GroupOffsets, *, ask_leader: bool = False) -> RecordCoordinates | None:
        self.leader_asked.append(ask_leader)
        try:
            await self.trouble.enter("offsets")
        except OffsetsRefused:
            self.begun_early = None
            raise
        self.offsets.append(offsets)
        return RecordCoordinates((OFFSETS_TOPIC, 3), 50)

    async def send(self, records: Sequence[Record], ledger: tuple[str, int]) -> list[RecordMetadata]:
        self.begun_early = None
        if records:
            await self.trouble.enter("write")
        self.records_sent = list(records)
        return [RecordMetadata(self._next + n, NOW_MS) for n in range(len(records))]

    async def commit(self, ledger_record: bytes) -> int:
        self.ledger.append(ledger_record)
        if self.records_sent:
            await self.trouble.enter("commit")
        self._next += len(self.records_sent) + 2
        if self.records_sent:
            self.written.append(self.records_sent)
        return self._next

    async def close(self) -> None:
        self.closed = True


class FakeIdempotent(IdempotentProducer):
    """Writes into a list; `results` holds the results of the next groups, and success is the default."""

    def __init__(self) -> None:
        self.trouble = Trouble()
        self.results: deque[list[RecordResult]] = deque()
        self.written: list[list[Record]] = []
        self.throttle_s = 0.0

    @property
    def throttled_s(self) -> float:
        return self.throttle_s

    async def unthrottled_identity(self) -> tuple[int, int] | None:
        await self.trouble.enter("throttle")
        return None if self.throttle_s else await self.identity()

    async def identity(self) -> tuple[int, int]:
        await self.trouble.enter("identity")
        return 8, 0

    async def write(self, records: Sequence[Record]) -> list[RecordResult]:
        await self.trouble.enter("write")
        self.written.append(list(records))
        return self.results.popleft() if self.results else [RecordMetadata(n, NOW_MS) for n in range(len(records))]

    async def close(self) -> None:
        pass


def unreachable_kafka(timeout_ms: int = 200, transactions: str = TRANSACTIONS_1) -> KafkaAdmin:
    """Make a client of an address at which no Kafka listens."""
    return KafkaAdmin(
        "127.0.0.1:1",
        client_id="test",
        request_timeout_ms=timeout_ms,
        telemetry=Telemetry(),
        transactions=transactions,
    )


class FakeTopicAdmin(TopicAdmin):
    """Knows the topics that a test names; with `away` Kafka does not answer."""

    def __init__(self, topics: Sequence[str] = ()) -> None:
        super().__init__(unreachable_kafka())
        self.topics = {name: Topic(name, 3, {}) for name in topics}
        self.away = False
        self.forbids = False  # nothing may be described
        self.lagging = False  # the broker that is asked first knows no topic
        self.asked: list[Sequence[str]] = []

    async def describe(self, names: Sequence[str], *, elsewhere: bool = False) -> dict[str, Topic]:
        self.asked.append(names)
        known = self.topics if elsewhere or not self.lagging else {}
        found = {name: known[name] for name in names if name in known}
        await asyncio.sleep(0)
        if self.away:
            raise KafkaAway("it is away")
        if self.forbids:
            raise KafkaForbids("no leave")
        return found


class FakeJournal(Journal):
    """The answers: (key, status) of each event; an atomic batch by its first event's key."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, int]] = []

    def record(self, request: WriteRequest, status: int, answer: WriteResult | None, latency_s: float) -> None:
        self.answers += [(event.key, status) for event in request.events[: request.answers]]


class BrokerClock:
    """The brokers' clock. A test replaces `read` for another time, ms since the Unix epoch."""

    def __init__(self) -> None:
        self.read: Callable[[], int] = now_ms

    def now_ms(self) -> int:
        return self.read()


class World:
    """Admission and Writer with all that they need, in memory. `slot` makes READY slots, `serve` serves them."""

    tracing: "Tracing | None" = None
    registry = ""  # its URL; `client` is its client then, and must be closed

    def __init__(self, *rules: TopicRule, **settings: int) -> None:
        """Make a world with these rules before the usual ones, and settings other than the usual."""
        usual = Settings(instance="test", request_timeout_ms=5_000, slots=1, slots_max=2, registry=self.registry)
        self.settings = replace(usual, **settings)  # type: ignore[arg-type]
        self.clock = BrokerClock()
        self.keys = FakeKeys()
        self.store = FakeStore(self.keys)
        self.queue = Queue(self.settings)
        self.kafka_admin = unreachable_kafka()
        self.transactions = TransactionAdmin(self.kafka_admin)
        self.topic_admin = FakeTopicAdmin(
            ["orders", "other", "third", "kept", "filled", "plain.a", "plain.b", "letters"]
        )
        self.topics = InternalTopics(self.topic_admin, self.settings)
        self.topic_metadata = TopicMetadataCache(self.topic_admin)
        self.read_topics = TopicMetadataCache(self.topic_admin, READ_TOPICS_MAX)
        self.journal = FakeJournal()
        self.telemetry = Telemetry()
        self.rules = Rules(
            (
                *rules,
                TopicRule(PLAIN_TOPICS, Guarantee.IDEMPOTENT),
                TopicRule("kept", key_ttl_s=KEPT_S),
                TopicRule("filled", takes_old_keys=True),
            )
        )
        self.schemas = Schemas(self.rules)
        self.client = RegistryClient(self.settings, self.telemetry) if self.registry else None
        self.checks = EventChecks(
            self.settings,
            self.rules,
            self.schemas,
            self.store,
            self.topics,
            self.topic_metadata,
            self.read_topics,
            self.clock.now_ms,
            Encoder(self.client, self.settings, self.rules, self.telemetry) if self.client else None,
        )
        self.resolver = Resolver(self.settings, self.queue, self.journal, self.telemetry, self.tracing)
        self.admission = Admission(
            self.settings, self.rules, self.checks, self.store, self.queue, self.resolver, self.tracing
        )
        self.heartbeat_now = asyncio.Event()
        self.writer = Writer(
            self.settings,
            self.keys,
            self.store,
            self.queue,
            self.topic_metadata,
            self.resolver,
            self.heartbeat_now,
            self.telemetry,
            self.tracing,
        )
        self.producers: dict[int, FakeProducer] = {}
        self.idempotents: dict[int, FakeIdempotent] = {}
        self._terms = 0

    async def slot(self, n: int = 0) -> Slot:
        """Make a READY slot, whose older terms are freed."""
        self.idempotents[n] = FakeIdempotent()
        slot = Slot(n, self.keys, self.topics.ledger, "test", self.idempotents[n])
        slot.move(SlotEvent.LEASE)
        await self.recover(slot)
        return slot

    async def recover(self, slot: Slot, generation: StoreGeneration = GENERATION) -> None:
        """Free a slot's older terms as recovery does, without a ledger: unmarked events were not written."""
        if slot.state is not SlotState.LEASED:
            slot.move(SlotEvent.FAIL)
            slot.move(SlotEvent.RECOVER)
        await self.bring_up(slot, generation)

    async def bring_up(self, slot: Slot, generation: StoreGeneration = GENERATION) -> None:
        """Bring a slot from LEASED to READY, in a term that is newer than all others."""
        producer = self.producers[slot.n] = FakeProducer()
        slot.enter(generation, producer)
        await slot.begin_term(0)
        self._terms += 100  # terms are ledger offsets, which only grow
        slot.term = slot._last_record = self._terms
        slot.move(SlotEvent.CHECK)
        self.keys.server.freed[slot.n] = self.keys.server.applied[slot.n] = slot.term
        slot.move(SlotEvent.FREE)

    def serve(self, slot: Slot) -> "asyncio.Task[None]":
        return asyncio.create_task(self.writer.serve(slot))

    async def serve_again(self, slot: Slot) -> "asyncio.Task[None]":
        """After a failed term, recover the slot, requeue the requests that waited for that, and serve the slot."""
        await self.recover(slot)
        self.writer.unwritten.recovered()
        return self.serve(slot)

    def submit(self, key: str, topic: str = "orders", ago_s: float = 0.0) -> "asyncio.Task[WriteResult]":
        """Submit an event that arrived `ago_s` seconds ago."""
        return self.ask(make_event(key, topic), ago_s)

    def ask(self, event: Event, ago_s: float = 0.0) -> "asyncio.Task[WriteResult]":
        return asyncio.create_task(self._write(event, asyncio.get_running_loop().time() - ago_s))

    async def _write(self, event: Event, arrived: float) -> WriteResult:
        written = await self.checks.check(event, arrived)
        return await self.admission.submit(event, arrived) if written is None else written

    def keys_written(self, n: int = 0) -> list[list[str]]:
        """List the idempotency keys of each group that a slot's present producers wrote."""
        groups = [*self.producers[n].written, *self.idempotents[n].written]
        return [[record.headers[0][1].decode() for record in records] for records in groups]


class Turns:
    """Counts the turns of the loop in its context, by a task that runs in each."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    def __exit__(self, *_: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


async def steps(count: int = 100) -> None:
    """Let all tasks run that are ready, and those that become ready; no time passes."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def kind_of(answer: WriteResult) -> Kind | None:
    """Return the kind of a problem; None for a 201."""
    return answer.kind if isinstance(answer, Problem) else None


async def end_of_term(serving: "asyncio.Task[None]") -> BaseException:
    """Wait for the end of a term; returns its error."""
    await asyncio.wait([serving], timeout=3.0)
    error = await ended(serving)
    assert error is not None, "the term goes on"
    return error


async def ended(task: "asyncio.Task[None]") -> BaseException | None:
    """End a task that serves for ever, or has ended; returns its exception."""
    if not task.done():
        task.cancel()
    await asyncio.wait([task])
    return None if task.cancelled() else task.exception()


def count_of(counter: Counter) -> float:
    """Read the present value of a counter without labels."""
    (metric,) = counter.collect()
    return float(next(sample.value for sample in metric.samples if sample.name.endswith("_total")))


def grows_in_proportion(work: Callable[[int], object], size: int = 60_000) -> bool:
    """Check that work takes linear and not quadratic time, by CPU time, because other programs run too."""

    def cpu_s(size: int) -> float:
        times = []
        for _ in range(5):
            started = time.thread_time()
            work(size)
            times.append(time.thread_time() - started)
        return min(times)

    return cpu_s(size) < 24 * cpu_s(size // 8)  # 8 times the size takes 8 times as long, or 64 times
