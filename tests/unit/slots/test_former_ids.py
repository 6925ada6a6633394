"""Tests whose transaction hangs under a producer id that no slot has now: a slot's of this namespace, or another's."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest
from aiokafka import errors

from service.contract.wire.headers import Stamp
from service.contract.wire.ledger import Begin
from service.core.problems import KafkaAway
from service.core.settings import Settings
from service.kafka.hanging import RecordCoordinates
from service.kafka.inspection import LogEntry
from service.kafka.metadata import Partition
from service.slots import former_ids as module
from service.slots.former_ids import FormerIds
from service.slots.hanging_recovery import CLOCKS_APART_MS, LOOK_BACK
from tests.unit.fakes import NOW_MS

LEDGER, SLOTS = "ns.ledger", 4
SLOT, PRODUCER_ID, OTHER_ID = 3, 6, 8
FIRST = RecordCoordinates(("orders", 0), 10)
FETCHED = 10  # entries in one response


class Kafka:
    """The partition of SLOT in the ledger, and a record that a slot of some namespace has written."""

    def __init__(self) -> None:
        self.entries_at: list[tuple[int, LogEntry]] = []  # with their times, ms
        self.start = 0
        self.slot = SLOT  # in the header of the record
        self.read: list[int] = []
        self.failure: Exception | None = None
        self.fetch_s = 0.0

    def append(self, pid: int, at_ms: int, *, producer_id: int | None = None) -> None:
        """Append a record that names a producer id, under this id or another."""
        begin = Begin(SLOT, pid, 0, "me", 1, at_ms).encode()
        writer = pid if producer_id is None else producer_id
        self.entries_at.append((at_ms, LogEntry(self.start + len(self.entries_at), writer, 0, begin, (), None)))

    async def stamps_of(self, records: Iterable[RecordCoordinates]) -> dict[RecordCoordinates, Stamp]:
        stamp = Stamp(b"i" * 16, b"f" * 8, NOW_MS, self.slot, PRODUCER_ID, 0, "me")
        return {record: stamp for record in records if record == FIRST}

    async def partitions(self, topics: Sequence[str]) -> dict[str, int]:
        if self.failure is not None:
            raise self.failure
        return {LEDGER: SLOTS}

    async def entries(self, partition: Partition, offset: int) -> tuple[list[LogEntry], int, int]:
        assert partition == (LEDGER, SLOT)
        await asyncio.sleep(self.fetch_s)
        if offset < self.start:
            raise errors.OffsetOutOfRangeError
        found = [entry for _, entry in self.entries_at if entry.offset >= offset][:FETCHED]
        self.read += [entry.offset for entry in found]
        return found, found[-1].offset + 1, self.start + len(self.entries_at)

    async def high_watermarks(self, cluster: object, topic: str, slots: Sequence[int]) -> dict[int, int]:
        return {slots[0]: self.start + len(self.entries_at)}

    async def offsets_since(
        self, cluster: object, topic: str, slots: Sequence[int], since_ms: int
    ) -> dict[int, int | None]:
        return {slots[0]: next((entry.offset for at_ms, entry in self.entries_at if at_ms >= since_ms), None)}


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    kafka = Kafka()
    monkeypatch.setattr(module, "high_watermarks", kafka.high_watermarks)
    monkeypatch.setattr(module, "offsets_since", kafka.offsets_since)
    return kafka


async def slots_of(kafka: Kafka, *more: RecordCoordinates) -> dict[RecordCoordinates, int]:
    fake = cast("Any", kafka)
    former_ids = FormerIds(fake, fake, fake, LEDGER, Settings(request_timeout_ms=100, transaction_timeout_ms=100))
    return await former_ids.slots_of(dict.fromkeys([FIRST, *more], PRODUCER_ID))


async def test_a_slot_is_found_where_its_ledger_names_the_producer_id(kafka: Kafka) -> None:
    for _ in range(3 * FETCHED):
        kafka.append(OTHER_ID, NOW_MS)
    kafka.append(PRODUCER_ID, NOW_MS)
    assert await slots_of(kafka) == {FIRST: SLOT}


@pytest.mark.parametrize("copied", [False, True])
async def test_a_slot_of_another_namespace_has_the_same_number_and_another_ledger(kafka: Kafka, copied: bool) -> None:
    """A record that another program has copied into the ledger names an id under which it was not written."""
    kafka.append(OTHER_ID, NOW_MS)
    if copied:
        kafka.append(PRODUCER_ID, NOW_MS, producer_id=OTHER_ID)
    assert await slots_of(kafka) == {}


async def test_a_slot_that_this_namespace_does_not_have_is_another_s(kafka: Kafka) -> None:
    kafka.slot = SLOTS
    assert await slots_of(kafka) == {}


async def test_a_ledger_partition_that_was_never_written_to_names_nobody(kafka: Kafka) -> None:
    assert await slots_of(kafka) == {}


async def test_an_idle_slot_has_named_its_producer_id_long_before(kafka: Kafka) -> None:
    """Its last record under the id is older than any difference of the clocks; no record is newer."""
    kafka.append(PRODUCER_ID, NOW_MS - 2 * CLOCKS_APART_MS)
    assert await slots_of(kafka) == {FIRST: SLOT}


async def test_the_ledger_is_read_from_shortly_before_the_transaction(kafka: Kafka) -> None:
    for _ in range(500):
        kafka.append(OTHER_ID, NOW_MS - 2 * CLOCKS_APART_MS)
    kafka.append(OTHER_ID, NOW_MS)
    assert await slots_of(kafka) == {}
    assert kafka.read == [*range(500 - LOOK_BACK, 501)]


async def test_a_transaction_in_the_ledger_is_of_the_slot_of_its_partition(kafka: Kafka) -> None:
    in_ledger = RecordCoordinates((LEDGER, 1), 5)
    assert await slots_of(kafka, in_ledger) == {in_ledger: 1}


async def test_the_header_counts_where_the_ledger_has_lost_records(kafka: Kafka) -> None:
    kafka.start = 1_000
    kafka.append(OTHER_ID, NOW_MS)
    assert await slots_of(kafka) == {FIRST: SLOT}


@pytest.mark.parametrize("failure", [KafkaAway("away"), errors.KafkaConnectionError(), None])
async def test_the_header_counts_where_the_ledger_cannot_be_read_in_time(
    kafka: Kafka, failure: Exception | None
) -> None:
    kafka.append(OTHER_ID, NOW_MS)
    kafka.failure, kafka.fetch_s = failure, 10.0
    assert await slots_of(kafka) == {FIRST: SLOT}
