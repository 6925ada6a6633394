"""Tests the reader of a consumer group against a consumer without a broker."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError
from aiokafka.structs import TopicPartition

from service.fencepost import (
    Event,
    GroupBatch,
    GroupReader,
    KeyReused,
    NewerVersion,
    Offsets,
    Refused,
    StaleMember,
    Unsettled,
    WrittenBatch,
    group_reader,
)
from service.fencepost.client.events import Pending

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
WAIT_S = 5.0
STEPS = 3  # of the event loop, between the parts of a rebalance


@dataclass(frozen=True)
class Record:
    """A record as far as the reader looks at it; its id is made of `key`."""

    offset: int
    key: str | None = None
    stamp: bytes = b""

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        of_key = [] if self.key is None else [("idempotency-key", self.key.encode())]
        return [*of_key, ("fencepost", self.stamp)] if self.stamp else of_key


@dataclass
class Log:
    """What the brokers have: the records by partition, and the group's offsets."""

    records: dict[TopicPartition, list[Record]]
    committed: dict[TopicPartition, int] = field(default_factory=dict)
    beginnings: dict[TopicPartition, int] = field(default_factory=dict)


class Consumer:
    """Stands for AIOKafkaConsumer: reads a Log, and has a listener that a test tells of rebalances."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.settings: dict[str, Any] = {}
        self.positions: dict[TopicPartition, int] = {}
        self.seeks: list[tuple[TopicPartition, int]] = []
        self.assigned: set[TopicPartition] = set()
        self.errors: list[Exception] = []
        self._coordinator = SimpleNamespace(member_id="m", generation=0)

    def made(self, **settings: Any) -> "Consumer":
        self.settings = settings
        return self

    def subscribe(self, topics: Sequence[str], listener: Any) -> None:
        self.topics, self.listener = topics, listener

    async def start(self) -> None:
        await self.assign(P0, P1)

    async def stop(self) -> None:
        raise asyncio.CancelledError  # as aiokafka's may

    async def assign(self, *partitions: TopicPartition) -> None:
        """Begin a generation. As in aiokafka, the reader hears of it a while after its partitions can be read."""
        self._coordinator.generation += 1
        self.assigned = set(partitions)
        self.positions = {at: offset for at, offset in self.log.committed.items() if at in self.assigned}
        for _ in range(STEPS):
            await asyncio.sleep(0)
        await self.listener.on_partitions_assigned(set(partitions))

    async def rebalance(self, *partitions: TopicPartition) -> None:
        await self.listener.on_partitions_revoked(self.assigned)
        self.assigned = set()
        for _ in range(STEPS):
            await asyncio.sleep(0)
        await self.assign(*partitions)

    async def committed(self, at: TopicPartition) -> int | None:
        await asyncio.sleep(0)
        return self.log.committed.get(at)

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {at: self.log.beginnings.get(at, 0) for at in partitions}

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {at: max([0, *(each.offset + 1 for each in self.log.records.get(at, []))]) for at in partitions}

    def seek(self, at: TopicPartition, offset: int) -> None:
        assert at in self.assigned
        self.positions[at] = offset
        self.seeks.append((at, offset))

    async def getmany(self, timeout_ms: int, max_records: int | None = None) -> dict[TopicPartition, list[Record]]:
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop()
        found = {}
        for at in sorted(self.assigned):
            if at not in self.positions:
                raise NoOffsetForPartitionError(at)
            records = [each for each in self.log.records.get(at, []) if each.offset >= self.positions[at]]
            if records:
                found[at] = records[:max_records]
                self.positions[at] = found[at][-1].offset + 1
        await asyncio.sleep(0 if found else timeout_ms / 1000)
        return found


class Sender:
    """Stands for an AsyncClient, and the service: what it writes, it commits to the log."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.written: dict[str, list[object]] = {}
        self.sent: list[tuple[str, Offsets]] = []
        self.failures: list[Callable[[Pending], Exception]] = []
        self.held: asyncio.Event | None = None

    async def send_atomic(self, key: str, events: Iterable[Event], offsets: Offsets | None = None) -> WrittenBatch:
        assert offsets is not None
        self.sent.append((key, offsets))
        if self.held is not None:
            await self.held.wait()
        if self.failures:
            raise self.failures.pop(0)(Pending(key, b""))
        assert key not in self.written
        self.written[key] = [event.value for event in events]
        self.log.committed |= {TopicPartition(*at): offset for at, offset in offsets.positions.items()}
        return WrittenBatch(key, "", (), replayed=False)


def failure(kind: type[Refused | Unsettled]) -> Callable[[Pending], Exception]:
    return lambda pending: kind(pending, 409, "code", "detail", may_be_written=False)


@dataclass
class Stage:
    """A reader that has joined, its consumer and its sender."""

    reader: GroupReader
    consumer: Consumer
    sender: Sender

    async def next(self) -> GroupBatch:
        async with asyncio.timeout(WAIT_S):
            return await anext(self.reader)

    async def process(self, batches: int) -> None:
        for _ in range(batches):
            await self.send(await self.next())

    async def send(self, batch: GroupBatch) -> WrittenBatch | None:
        return await batch.send(self.sender, [Event("out", record.offset) for record in batch.records])


@pytest.fixture
def log() -> Log:
    return Log({P0: [Record(n, f"a{n}") for n in range(10)]})


@contextlib.asynccontextmanager
async def joined(log: Log, monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[Stage]:
    consumer = Consumer(log)
    monkeypatch.setattr(group_reader, "AIOKafkaConsumer", consumer.made)
    monkeypatch.setattr(group_reader, "CONFLICT_PAUSE_S", 0.0)
    monkeypatch.setattr(group_reader, "POLL_MS", 10)
    async with GroupReader("orders", "g", **{"records_max": 4, **options}) as reader:
        yield Stage(reader, consumer, Sender(log))


@pytest.fixture
async def stage(log: Log, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    async with joined(log, monkeypatch) as stage:
        yield stage


def offsets_of(stage: Stage) -> list[object]:
    return sorted([value for values in stage.sender.written.values() for value in values], key=str)


async def test_each_batch_begins_at_the_committed_offset_and_commits_the_one_behind_it(log: Log, stage: Stage) -> None:
    await stage.process(3)
    assert stage.sender.written == {"g/orders/0/0": [0, 1, 2, 3], "g/orders/0/4": [4, 5, 6, 7], "g/orders/0/8": [8, 9]}
    assert [offsets for _, offsets in stage.sender.sent][-1] == Offsets("g", "m", 1, {("orders", 0): 10})
    assert log.committed == {P0: 10}
    assert stage.consumer.settings["isolation_level"] == "read_committed"
    assert stage.consumer.settings["enable_auto_commit"] is False


async def test_partitions_have_batches_of_their_own(log: Log, stage: Stage) -> None:
    log.records = {P0: [Record(0)], P1: [Record(3)]}
    await stage.process(2)
    assert stage.sender.written == {"g/orders/0/0": [0], "g/orders/1/0": [3]}


@pytest.mark.parametrize("sent", [True, False], ids=["failed", "never sent"])
async def test_a_batch_that_is_not_written_comes_again_under_its_key(stage: Stage, sent: bool) -> None:
    stage.sender.failures = [failure(Unsettled)]
    first = await stage.next()
    if sent:
        with pytest.raises(Unsettled):
            await stage.send(first)
    stage.sender.failures = []
    again = await stage.next()
    assert (again.key, again.records) == (first.key, first.records)
    await stage.send(again)
    await stage.process(2)
    assert offsets_of(stage) == list(range(10))


async def test_copies_are_left_out_as_far_as_the_reader_looks_back(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.records[P0] = [Record(n, key) for n, key in enumerate("abaacbxa")] + [Record(8), Record(9)]
    async with joined(log, monkeypatch, lookback=3) as stage:
        await stage.process(3)
        # The a at 7 is 4 offsets behind that at 3; the b at 5 too behind that at 1.
        assert offsets_of(stage) == [0, 1, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("cut", range(1, 8))
async def test_another_member_leaves_out_the_same_copies(log: Log, monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    """The second member begins at the offset that the first has committed, wherever that is."""
    log.records[P0] = [Record(n, key) for n, key in enumerate("abaacbxa")]
    found: list[object] = []
    for records_max in (cut, 20):
        async with joined(log, monkeypatch, lookback=3, records_max=records_max) as stage:
            await stage.process(1)
            found += offsets_of(stage)
    assert found == [0, 1, 4, 5, 6, 7]


async def test_a_batch_that_is_read_again_is_not_taken_for_copies_of_itself(log: Log, stage: Stage) -> None:
    log.records[P0][2] = Record(2, "a0")
    stage.sender.failures = [failure(KeyReused)]
    assert await stage.send(await stage.next()) is None
    await stage.process(3)
    assert offsets_of(stage) == [0, 1, 3, 4, 5, 6, 7, 8, 9]


async def test_records_of_a_newer_release_come_again_and_none_before_them_is_lost(log: Log, stage: Stage) -> None:
    log.records[P0][6] = Record(6, "a6", stamp=b"2;")
    await stage.process(1)
    for _ in range(2):
        with pytest.raises(NewerVersion):
            await stage.next()
    log.records[P0][6] = Record(6, "a6")
    await stage.process(2)
    assert offsets_of(stage) == list(range(10))


async def test_a_batch_of_a_replaced_member_is_dropped_and_no_other_is_given_until_the_next_generation(
    log: Log, stage: Stage
) -> None:
    await stage.process(1)
    stage.sender.failures = [failure(StaleMember)]
    assert await stage.send(await stage.next()) is None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stage.reader), 0.1)
    log.committed[P0] = 6  # by the other member
    await stage.consumer.rebalance(P0)
    await stage.process(2)  # what is read back for the ids does not fill a batch
    assert stage.sender.sent[-2] == ("g/orders/0/6", Offsets("g", "m", 2, {("orders", 0): 8}))
    assert offsets_of(stage) == [0, 1, 2, 3, 6, 7, 8, 9]


async def test_a_member_that_stays_stale_is_told(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    monkeypatch.setattr(group_reader, "SETTLED_S", 0.05)
    stage.sender.failures = [failure(StaleMember)]
    await stage.send(await stage.next())
    with pytest.raises(StaleMember):
        await stage.next()


async def test_another_batch_from_the_same_offset_is_waited_for(log: Log, stage: Stage) -> None:
    """Its transaction had not ended when the partition was assigned."""
    stage.sender.failures = [failure(KeyReused)] * 3
    for _ in range(3):
        await stage.send(await stage.next())
    log.committed[P0] = 7
    batch = await stage.next()
    assert (batch.key, [record.offset for record in batch.records]) == ("g/orders/0/7", [7])


async def test_the_error_of_a_group_that_was_rewound_says_so(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    monkeypatch.setattr(group_reader, "SETTLED_S", 0.05)
    stage.sender.failures = [failure(KeyReused)] * 10_000
    with pytest.raises(KeyReused) as caught:
        await stage.process(10_000)
    assert "rewound" in caught.value.__notes__[0]


async def test_a_rebalance_waits_for_the_batch_in_flight(log: Log, stage: Stage) -> None:
    stage.sender.held = asyncio.Event()
    sending = asyncio.create_task(stage.send(await stage.next()))
    rebalance = asyncio.create_task(stage.consumer.rebalance(P0))
    await asyncio.sleep(0.02)
    assert not rebalance.done()
    stage.sender.held.set()
    assert await sending is not None
    await asyncio.wait_for(rebalance, 1)
    await stage.process(2)
    assert offsets_of(stage) == list(range(10))
    # The ids of what is committed are known: nothing was read back.
    assert (P0, 4) in stage.consumer.seeks


async def test_a_rebalance_does_not_wait_for_longer_than_it_may(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    async with joined(log, monkeypatch, finish_s=0.01) as stage:
        batch = await stage.next()
        await asyncio.wait_for(stage.consumer.rebalance(P0), WAIT_S)
        stage.sender.failures = [failure(StaleMember)]
        assert await stage.send(batch) is None  # of the earlier generation: the present one goes on
        await stage.process(3)
        assert offsets_of(stage) == list(range(10))
        assert {offsets.generation for _, offsets in stage.sender.sent[1:]} == {2}


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("is_joining", [True, False])
async def test_a_rebalance_amid_a_fetch_or_a_look_up_drops_what_was_read(
    log: Log, monkeypatch: pytest.MonkeyPatch, steps: int, is_joining: bool
) -> None:
    """At each await of the reader. The records have no ids: a second reading would not take them for copies."""
    log.records = {P0: [Record(n) for n in range(10)], P1: [Record(0)]}
    log.committed[P0] = 2
    async with joined(log, monkeypatch, finish_s=0.0) as stage:
        if not is_joining:
            await stage.process(2)
        reading = asyncio.create_task(stage.next())
        for _ in range(steps):
            await asyncio.sleep(0)
        await stage.consumer.rebalance(P0, P1)
        batch = await reading
        if batch.member.generation < stage.consumer._coordinator.generation:
            stage.sender.failures = [failure(StaleMember)]
        await stage.send(batch)
        while len(offsets_of(stage)) < 9:
            await stage.process(1)
        assert offsets_of(stage) == [0, *range(2, 10)]


async def test_no_batch_is_of_a_partition_that_was_given_up(log: Log, stage: Stage) -> None:
    log.records[P1] = [Record(0)]
    await stage.send(await stage.next())  # of P0; that of P1 was fetched with it
    await stage.consumer.rebalance(P0)
    await stage.process(2)
    assert {key.split("/")[2] for key in stage.sender.written} == {"0"}


@pytest.mark.parametrize("steps", range(8))
async def test_a_fetch_that_returns_after_a_rebalance_gives_nothing_of_the_earlier_generation(
    log: Log, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    log.records = {P0: [], P1: [Record(0)]}
    async with joined(log, monkeypatch, finish_s=0.01) as stage:
        reading = asyncio.create_task(stage.next())
        for _ in range(steps):
            await asyncio.sleep(0)
        given = reading.done()
        await stage.consumer.rebalance(P0)
        await asyncio.wait({reading}, timeout=0.05)
        assert reading.done() is given
        reading.cancel()


async def test_a_rebalance_does_not_wait_for_a_batch_that_is_skipped(stage: Stage) -> None:
    first = await stage.next()
    rebalance = asyncio.create_task(stage.consumer.rebalance(P0))
    await asyncio.sleep(0)
    again = await stage.next()
    await asyncio.wait_for(rebalance, 1)
    assert (again.key, again.offsets.generation) == (first.key, 2)


@pytest.mark.parametrize(("committed", "beginning"), [(3, 5), (11, 0)], ids=["deleted", "created again"])
async def test_records_that_kafka_does_not_have_are_told_and_not_skipped(
    log: Log, monkeypatch: pytest.MonkeyPatch, committed: int, beginning: int
) -> None:
    log.committed[P0], log.beginnings[P0] = committed, beginning
    async with joined(log, monkeypatch) as stage:
        with pytest.raises(OffsetOutOfRangeError):
            await stage.next()


@pytest.mark.parametrize("is_revoked", [True, False])
async def test_a_partition_without_a_position_is_no_error(stage: Stage, is_revoked: bool) -> None:
    """aiokafka raises it for partitions that the reader has not placed yet."""
    if is_revoked:
        await stage.consumer.listener.on_partitions_revoked({P0})
    stage.consumer.errors = [NoOffsetForPartitionError(P1)]
    reading = asyncio.create_task(stage.next())
    await asyncio.sleep(0.02)
    assert not stage.consumer.errors
    await stage.consumer.assign(P0, P1)
    assert (await reading).key == "g/orders/0/0"


async def test_errors_of_the_coordinator_are_raised(stage: Stage) -> None:
    await stage.consumer.listener.on_partitions_revoked({P0})
    stage.consumer.errors = [ValueError("group")]
    with pytest.raises(ValueError, match="group"):
        await stage.next()


@pytest.mark.parametrize("name", ["auto_offset_reset", "enable_auto_commit", "group_id", "isolation_level"])
def test_a_setting_on_which_the_guarantee_depends_is_refused(name: str) -> None:
    setting: dict[str, Any] = {name: "x"}
    with pytest.raises(TypeError, match=f"the reader sets {name} itself: leave it out"):
        GroupReader("orders", "g", **setting)


def test_a_key_that_no_header_carries_is_hashed() -> None:
    assert group_reader.batch_key("g", "t", 1, 2) == "g/t/1/2"
    for group in ("ä", "g" * 255):
        key = group_reader.batch_key(group, "t", 1, 2)
        assert key == hashlib.sha256(f"{group}/t/1/2".encode()).hexdigest()


async def test_a_reader_that_was_not_entered_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"GroupReader: enter it first: async with GroupReader\("):
        await anext(GroupReader("orders", "billing"))
