"""Tests the watch over last stable offsets: which ones it reports, which slots it recovers, and its requests."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import pytest
import structlog

from service.core.metrics import Telemetry
from service.core.problems import KafkaAway
from service.core.settings import Settings
from service.kafka.hanging import ActiveProducer, RecordCoordinates
from service.kafka.metadata import Partition
from service.kafka.transaction_admin import Ends, LastOffsets
from service.pipeline.lso_watch import ABORT_SCAN_S, FORMER, OTHER, PAUSE_LEAST_S, PAUSE_MOST_S, SLOT, UNKNOWN, LsoWatch

LEDGER = ("ns.ledger", 2)
ORDERS = ("orders", 1)
OURS, THEIRS = 7, 8
BOUND_S = 10.0 + ABORT_SCAN_S


class Kafka:
    """Ends and open transactions as a test sets them; the slot of OURS is 3."""

    def __init__(self) -> None:
        self.ends: dict[Partition, Ends] = {}
        self.open: dict[Partition, list[ActiveProducer]] = {}
        self.asked: list[Sequence[str]] = []
        self.described: list[set[Partition]] = []
        self.recovered: list[int] = []
        self.hinted: set[Partition] = set()  # where the slots' transactions are open
        self.away = False
        self.absent: set[str] = set()
        self.partitions: dict[str, int] = {}
        self.names: set[str] = {"orders"}  # the topics that the service was asked to write to
        self.forgotten: list[Collection[str]] = []
        self.written_by: dict[RecordCoordinates, int] = {}  # slots that have begun a transaction, by its first record
        self.others: dict[str, int] = {}  # the producer ids of other processes' slots, by transactional id
        self.named: dict[int, str] = {}  # transactional ids, by producer id

    def forget_absent(self, absent: Collection[str]) -> None:
        self.forgotten.append(absent)

    async def last_offsets(self, topics: Sequence[str], only: Collection[Partition] = ()) -> LastOffsets:
        self.asked.append(topics)
        if self.away:
            raise KafkaAway("away")
        return LastOffsets(self.ends, self.absent, self.partitions)

    async def open_transactions(
        self, partitions: Collection[Partition]
    ) -> Mapping[Partition, Sequence[ActiveProducer]]:
        self.described.append(set(partitions))
        return {partition: self.open[partition] for partition in partitions if partition in self.open}

    async def slots_of(self, firsts: Mapping[RecordCoordinates, int]) -> Mapping[RecordCoordinates, int]:
        return {record: self.written_by[record] for record in firsts if record in self.written_by}

    async def transactional_ids(self, producer_ids: Collection[int]) -> Mapping[int, str]:
        return {producer: self.named[producer] for producer in producer_ids if producer in self.named}

    def held_producers(self) -> Mapping[int, int]:
        return {OURS: 3}

    async def producer_ids(self, transactional_ids: Iterable[str]) -> Mapping[str, int]:
        return {name: self.others[name] for name in transactional_ids if name in self.others}

    def recover(self, n: int, partitions: Collection[Partition]) -> None:
        self.recovered.append(n)
        self.hinted.update(partitions)


@pytest.fixture
def kafka() -> Kafka:
    return Kafka()


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


@pytest.fixture
def watch(kafka: Kafka, telemetry: Telemetry) -> LsoWatch:
    settings = Settings(transaction_timeout_ms=10_000)
    return LsoWatch(settings, kafka, kafka, kafka, "ns.ledger", kafka, telemetry)


def shown(telemetry: Telemetry, owner: str) -> tuple[float, float]:
    """Return how many LSOs do not move, and for how long the oldest."""
    values = [
        telemetry.registry.get_sample_value(f"fencepost_{name}", {"of": owner})
        for name in ("stalled_partitions", "stalled_oldest_seconds")
    ]
    return (values[0] or 0.0, values[1] or 0.0)


async def test_a_slot_whose_transaction_stays_open_past_the_bound_is_recovered(
    watch: LsoWatch, kafka: Kafka, telemetry: Telemetry
) -> None:
    kafka.ends = {ORDERS: Ends(691, 974), LEDGER: Ends(5, 5)}
    kafka.open = {ORDERS: [ActiveProducer(OURS, 0, 691), ActiveProducer(THEIRS, 0, 700)]}
    await watch.look(0.0)
    await watch.look(BOUND_S - 0.1)
    assert (kafka.recovered, kafka.described) == ([], [])
    assert shown(telemetry, SLOT) == (0, 0)
    await watch.look(BOUND_S)
    assert kafka.recovered == [3]
    assert kafka.described == [kafka.hinted] == [{ORDERS}]
    assert shown(telemetry, SLOT) == (1, BOUND_S)
    kafka.ends = {ORDERS: Ends(974, 974), LEDGER: Ends(5, 5)}
    await watch.look(BOUND_S + 5)
    assert shown(telemetry, SLOT) == (0, 0)


async def test_a_slot_of_another_process_is_found_by_its_transactional_id(watch: LsoWatch, kafka: Kafka) -> None:
    """Perhaps no process holds it."""
    kafka.ends = {ORDERS: Ends(691, 974)}
    kafka.open = {ORDERS: [ActiveProducer(THEIRS, 0, 691)]}
    kafka.others = {"fencepost.slot.3": THEIRS, "fencepost.slot.5": THEIRS}
    await watch.look(0.0)
    await watch.look(BOUND_S)
    assert kafka.recovered == [5], "this process knows the producer id of slot 3"


async def test_a_partition_of_a_topic_that_was_deleted_is_no_longer_reported(
    watch: LsoWatch, kafka: Kafka, telemetry: Telemetry
) -> None:
    kafka.ends = {ORDERS: Ends(691, 974)}
    await watch.look(0.0)
    kafka.ends = {}  # its leader does not answer: the transaction may still be open
    await watch.look(BOUND_S)
    assert shown(telemetry, UNKNOWN) == (1, BOUND_S)
    kafka.absent = {"orders"}
    await watch.look(BOUND_S + 5)
    assert shown(telemetry, UNKNOWN) == (0, 0)
    assert kafka.forgotten[-1] == {"orders"}


async def test_a_partition_that_a_topic_made_anew_does_not_have_is_no_longer_reported(
    watch: LsoWatch, kafka: Kafka, telemetry: Telemetry
) -> None:
    """The look between the two topics may be missing."""
    last = (ORDERS[0], 7)
    kafka.ends, kafka.partitions = {last: Ends(691, 974), ORDERS: Ends(5, 9)}, {"orders": 8}
    await watch.look(0.0)
    kafka.ends = {}  # no leader answers
    await watch.look(BOUND_S)
    assert shown(telemetry, UNKNOWN) == (2, BOUND_S)
    kafka.partitions = {"orders": 7}
    await watch.look(BOUND_S + 5)
    assert shown(telemetry, UNKNOWN) == (1, BOUND_S + 5)


async def test_a_last_stable_offset_that_moves_is_not_reported(watch: LsoWatch, kafka: Kafka) -> None:
    """A busy partition is below its high watermark at every look."""
    for second in range(0, 200, 5):
        kafka.ends = {ORDERS: Ends(second, second + 3)}
        await watch.look(float(second))
    kafka.ends = {ORDERS: Ends(200, 200)}
    await watch.look(200.0)
    kafka.ends = {ORDERS: Ends(200, 201)}  # the next transaction begins there, long after that
    await watch.look(400.0)
    assert kafka.described == []


async def test_the_ledger_is_watched_too(watch: LsoWatch, kafka: Kafka) -> None:
    kafka.ends = {LEDGER: Ends(5, 9)}
    kafka.open = {LEDGER: [ActiveProducer(OURS, 0, 5)]}
    await watch.look(0.0)
    await watch.look(BOUND_S)
    assert (kafka.recovered, kafka.hinted) == ([3], {LEDGER})
    assert kafka.asked == [["ns.ledger", "orders"]] * 2


async def test_transactions_of_other_producers_are_reported_and_left_alone(
    watch: LsoWatch, kafka: Kafka, telemetry: Telemetry
) -> None:
    """OURS has a transaction that began later and does not hold the LSO. The other partition has no answer."""
    kafka.ends = {ORDERS: Ends(10, 20), ("orders", 2): Ends(10, 20)}
    kafka.open = {ORDERS: [ActiveProducer(THEIRS, 0, 10), ActiveProducer(OURS, 0, 15), ActiveProducer(OURS, 0, -1)]}
    await watch.look(0.0)
    await watch.look(BOUND_S + 1)
    assert kafka.recovered == []
    assert shown(telemetry, OTHER) == shown(telemetry, UNKNOWN) == (1, BOUND_S + 1)


async def test_the_log_names_another_program_as_far_as_the_brokers_tell_it(watch: LsoWatch, kafka: Kafka) -> None:
    kafka.ends = {ORDERS: Ends(10, 20), ("orders", 2): Ends(10, 20)}
    kafka.open = {ORDERS: [ActiveProducer(THEIRS, 0, 10)], ("orders", 2): [ActiveProducer(6, 0, 10)]}
    kafka.named = {THEIRS: "billing.slot.3"}
    await watch.look(0.0)
    with structlog.testing.capture_logs() as lines:
        await watch.look(BOUND_S)
    assert [(line["of"], line["transactional_ids"]) for line in lines] == [(OTHER, ["billing.slot.3"]), (OTHER, [])]


async def test_a_slot_is_recovered_for_a_transaction_of_a_producer_id_that_kafka_has_replaced(
    watch: LsoWatch, kafka: Kafka, telemetry: Telemetry
) -> None:
    """No transactional id has it any more: its slot is known by the first record."""
    kafka.ends = {ORDERS: Ends(10, 20), LEDGER: Ends(5, 9)}
    kafka.open = {ORDERS: [ActiveProducer(6, 32_766, 10)], LEDGER: [ActiveProducer(5, 32_766, 5)]}
    kafka.written_by = {RecordCoordinates(ORDERS, 10): 4, RecordCoordinates(LEDGER, 5): 2}
    await watch.look(0.0)
    await watch.look(BOUND_S)
    assert sorted(kafka.recovered) == [2, 4]
    assert kafka.hinted == {ORDERS, LEDGER}
    assert shown(telemetry, FORMER) == (2, BOUND_S)
    assert shown(telemetry, OTHER) == shown(telemetry, SLOT) == (0, 0)


async def test_a_slot_that_recovery_does_not_help_is_recovered_ever_more_rarely(watch: LsoWatch, kafka: Kafka) -> None:
    """Leaders are asked for producers only then, not at every look."""
    kafka.ends = {ORDERS: Ends(10, 20)}
    kafka.open = {ORDERS: [ActiveProducer(OURS, 0, 10)]}
    times = []
    for second in range(0, 40_000, 5):
        before = len(kafka.recovered)
        await watch.look(float(second))
        times += [second] * (len(kafka.recovered) - before)
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == BOUND_S
    assert pauses[:3] == [PAUSE_LEAST_S, 2 * PAUSE_LEAST_S, 4 * PAUSE_LEAST_S]
    assert pauses[-1] == PAUSE_MOST_S
    assert len(kafka.described) == len(kafka.recovered)


async def test_the_age_of_an_open_transaction_counts_from_before_an_outage_of_kafka(
    watch: LsoWatch, kafka: Kafka
) -> None:
    """As for a partition that has no leader for a while."""
    kafka.ends = {ORDERS: Ends(10, 20)}
    kafka.open = {ORDERS: [ActiveProducer(OURS, 0, 10)]}
    await watch.look(0.0)
    kafka.away = True
    with pytest.raises(KafkaAway):
        await watch.look(5.0)
    kafka.away, kafka.ends = False, {}
    await watch.look(10.0)
    kafka.ends = {ORDERS: Ends(10, 20)}
    await watch.look(BOUND_S)
    assert kafka.recovered == [3]
