"""Tests the metrics: names by Prometheus' conventions, bounded labels, and present values at each scrape."""

import math
import re
from collections.abc import Iterator
from typing import Final

import pytest
from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.app import Service
from service.claims.states import SlotEvent, SlotState
from service.contract import Rules
from service.core.collectors import NAMESPACE
from service.core.metrics import FastHistogram, Telemetry
from service.core.settings import Settings
from service.events.schemas import Schemas
from service.kafka.outcomes import TransactionFailed, TransactionOutcome
from service.pipeline.leases import Leases
from service.pipeline.pool import Pool
from service.slots.recovery import SlotRecovery
from service.slots.slot import Slot
from service.slots.store_recovery import STORE_STATES
from tests.unit.fakes import FakeIdempotent, FakeProducer, World, end_of_term, until

# The rules of prometheus.io/docs/practices/naming and of `promtool check metrics`.
BASE_UNITS: Final = {"seconds", "bytes"}
OTHER_UNITS: Final = re.compile("_(ms|millis|milliseconds|microseconds|minutes|hours|days|kb|mb|percent)(_|$)")
RESERVED: Final = ("_total", "_count", "_sum", "_bucket", "_info", "_created")


def faults(text: str) -> Iterator[str]:
    """List the faults of names in a text of metrics."""
    for family in text_string_to_metric_families(text):
        name = family.name
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            yield f"{name}: not in snake case"
        if not family.documentation:
            yield f"{name}: no help"
        if OTHER_UNITS.search(name):
            yield f"{name}: not in base units"
        is_info = (
            family.type == "gauge" and name.rpartition("_")[2] == "info"
        )  # this format has no type of its own for it
        if family.type in ("gauge", "histogram") and name.endswith(RESERVED) and not is_info:
            yield f"{name}: a {family.type} with another type's suffix"
        if family.type == "histogram" and not name.endswith(("_seconds", "_bytes", "_events")):
            yield f"{name}: a histogram of what?"
        if family.type not in ("counter", "gauge", "histogram"):
            yield f"{name}: of no type"
        for unit in BASE_UNITS:
            if f"_{unit}_" in name:
                yield f"{name}: the unit comes last"


def shown(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    """Return the value of a sample in a scrape."""
    telemetry.render()
    return telemetry.registry.get_sample_value(name, labels)


def families(telemetry: Telemetry) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(telemetry.render().decode())}


def test_names_keep_to_the_conventions() -> None:
    text = Telemetry().render().decode()
    own = "\n".join(line for line in text.splitlines() if "process_" not in line) + "\n"
    assert list(faults(own)) == []
    assert "_created" not in text


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("# HELP a_ms_total x\n# TYPE a_ms_total counter\na_ms_total 1\n", "a_ms: not in base units"),
        ("# HELP a_total x\n# TYPE a_total gauge\na_total 1\n", "a_total: a gauge with another type's suffix"),
        ("# HELP aB x\n# TYPE aB gauge\naB 1\n", "aB: not in snake case"),
        ("# TYPE a gauge\na 1\n", "a: no help"),
        ("# HELP a_seconds_b x\n# TYPE a_seconds_b gauge\na_seconds_b 1\n", "a_seconds_b: the unit comes last"),
        ("a 1\n", "a: no help"),
    ],
)
def test_a_name_that_breaks_them_is_found(text: str, fault: str) -> None:
    assert fault in list(faults(text))


def test_answers_and_requests_are_counted_by_status_and_code() -> None:
    telemetry = Telemetry()
    for latency_s in (0.001, 0.2):
        telemetry.answered("", 201, latency_s)
        telemetry.requested(201, "")
    telemetry.answered("not-written", 503, 4.0)
    telemetry.requested(400, "invalid-key")
    assert shown(telemetry, "fencepost_answers_total", status="201", code="") == 2
    assert shown(telemetry, "fencepost_answers_total", status="503", code="not-written") == 1
    assert shown(telemetry, "fencepost_requests_total", status="400", code="invalid-key") == 1
    assert shown(telemetry, "fencepost_request_seconds_count", outcome="ok") == 2
    assert shown(telemetry, "fencepost_request_seconds_count", outcome="problem") == 1
    assert len(families(telemetry)["fencepost_answers"].samples) == 2


def test_a_fast_histogram_shows_what_the_librarys_own_does() -> None:
    mine = FastHistogram("a_seconds", "x", (0.5, 1, 2.5), "stage", ("b", "c"))
    bare = FastHistogram("sizes", "x", (1, 10))
    registry, theirs = CollectorRegistry(), CollectorRegistry()
    for histogram in (mine, bare):
        registry.register(histogram)
    their_mine = Histogram("a_seconds", "x", ["stage"], namespace=NAMESPACE, buckets=(0.5, 1, 2.5), registry=theirs)
    their_bare = Histogram("sizes", "x", namespace=NAMESPACE, buckets=(1, 10), registry=theirs)
    for stage in ("b", "c"):
        their_mine.labels(stage)
    assert generate_latest(registry) == generate_latest(theirs)
    for value in (0.25, 0.5, 0.75, 1, 3, 3):
        mine.observe(value, "b")
        their_mine.labels("b").observe(value)
    bare.observe(7, count=2)
    for _ in range(2):
        their_bare.observe(7)
    assert generate_latest(registry) == generate_latest(theirs)


async def test_a_scrape_asks_the_parts_for_their_states() -> None:
    settings = Settings(kafka="127.0.0.1:1", redis="redis://127.0.0.1:1/0", instance="test")
    telemetry = Telemetry()
    service = Service(settings, Rules(), Schemas(Rules()), telemetry, lambda _: None)
    try:
        assert {state: shown(telemetry, "fencepost_store_state", state=state) for state in STORE_STATES} == {
            state: float(state == "starting") for state in STORE_STATES
        }
        service.store.status = "recovering: 3 keys replayed, waiting for slots [1]"
        assert shown(telemetry, "fencepost_store_state", state="recovering") == 1
        assert shown(telemetry, "fencepost_store_state", state="starting") == 0
        assert shown(telemetry, "fencepost_generation") == 0
        slot = Slot(3, service.keys, "ledger", "test", FakeIdempotent())
        slot.move(SlotEvent.LEASE)
        service.pool.slots[3] = slot
        assert {state: shown(telemetry, "fencepost_slots", state=state.value) for state in SlotState} == {
            state: float(state is SlotState.LEASED) for state in SlotState
        }
        assert (shown(telemetry, "fencepost_slot_down_oldest_seconds") or 0) > 0
        slot.down_since = math.inf
        assert shown(telemetry, "fencepost_slot_down_oldest_seconds") == 0
        assert shown(telemetry, "fencepost_in_doubt_oldest_seconds") == 0
        slot.in_doubt, slot.in_doubt_since = 5, 1.0
        assert shown(telemetry, "fencepost_in_doubt_events") == 5
        assert (shown(telemetry, "fencepost_in_doubt_oldest_seconds") or 0) > 0
    finally:
        service.pool.slots.clear()
        await service.stop()


class Recovery(SlotRecovery):
    """Brings a slot to READY when the test allows it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.may = True

    async def run(self, slot: Slot, epoch: object) -> None:
        await until(lambda: self.may)
        await self.world.bring_up(slot)


async def test_events_are_in_doubt_until_their_slot_has_been_recovered_however_long_that_takes() -> None:
    world = World(request_timeout_ms=60, transaction_timeout_ms=60)
    recovery = Recovery(world)
    telemetry = world.telemetry
    leases = Leases(world.keys, world.store, world.settings)
    pool = Pool(leases, world.store, recovery, world.writer, world.queue, telemetry)
    slot = await world.slot()
    pool.slots[0] = slot
    assert isinstance(slot.producer, FakeProducer)
    slot.producer.trouble.before["write"].append(TransactionFailed(TransactionOutcome.UNKNOWN, "a fault"))
    asked = world.submit("a")
    await until(lambda: bool(world.queue.events))
    failed = await end_of_term(world.serve(slot))
    assert isinstance(failed, TransactionFailed)
    assert pool.in_doubt == 1
    recovery.may = False
    pool._ended(slot, failed)
    assert shown(telemetry, "fencepost_kafka_errors_total", operation="transaction") == 1
    assert shown(telemetry, "fencepost_terms_ended_total", why="transaction") == 1
    world.resolver.resolve(world.writer.unwritten.parked[0], world.resolver.too_late(world.writer.unwritten.parked[0]))
    await asked
    assert pool.in_doubt == 1  # its caller has got 504, and the outcome is not known yet
    assert pool.in_doubt_s > 0
    recovery.may = True
    await pool._recover(slot)
    assert (pool.in_doubt, pool.in_doubt_s) == (0, 0)
