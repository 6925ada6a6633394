"""Tests the time of Kafka, whatever this machine's clock says."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from service.contract.wire.ids import event_id
from service.contract.wire.names import requests_topic
from service.core.problems import NOT_WRITTEN, RECORD_REFUSED
from service.events.event import event_of
from service.kafka.outcomes import OUTSIDE_BOUNDS, TransactionFailed, TransactionOutcome
from service.kafka.records import RecordMetadata
from service.pipeline.clocks import CLOSE_MS, Clock, Clocks
from tests.durations import HOUR_MS
from tests.unit.fakes import NOW_MS, FakeKeys, World, ended, kind_of, unreachable_kafka


class Time:
    """This machine's two clocks: `pass_ms` moves both, `step` only the time of day."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own_ms, self.monotonic_ms = NOW_MS, 5_000
        monkeypatch.setattr(time, "time_ns", lambda: self.own_ms * 1_000_000)
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic_ms / 1000)

    def pass_ms(self, ms: int) -> None:
        self.own_ms += ms
        self.monotonic_ms += ms

    def step(self, ms: int) -> None:
        self.own_ms += ms


@pytest.fixture
def its(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def test_a_clock_without_a_measurement_is_taken_for_this_machine_s(its: Time) -> None:
    clock = Clock()
    its.step(HOUR_MS)
    assert (clock.behind_ms, clock.now_ms()) == (0, NOW_MS + HOUR_MS)


@pytest.mark.parametrize("apart_ms", [0, 400, -400, CLOSE_MS, -CLOSE_MS])
def test_a_clock_that_is_close_is_this_machine_s(its: Time, apart_ms: int) -> None:
    clock = Clock()
    clock.update(its.own_ms + apart_ms, its.monotonic_ms)
    assert clock.now_ms() == NOW_MS
    assert -1 <= clock.behind_ms + apart_ms <= 1


@pytest.mark.parametrize("apart_ms", [2 * HOUR_MS, -2 * HOUR_MS])
def test_a_step_of_this_machine_s_clock_does_not_move_the_measured_clock(its: Time, apart_ms: int) -> None:
    clock = Clock()
    clock.update(its.own_ms, its.monotonic_ms)
    its.pass_ms(700)
    its.step(apart_ms)
    its.pass_ms(300)
    assert abs(clock.now_ms() - (NOW_MS + 1_000)) <= 1
    assert abs(clock.behind_ms - apart_ms) <= 1


def test_the_round_trip_of_a_measurement_is_not_counted_as_clock_distance(its: Time) -> None:
    clock = Clock()
    asked_ms = its.monotonic_ms
    its.pass_ms(9_000)
    clock.update(NOW_MS + 4_000, asked_ms)
    assert (clock.behind_ms, clock.now_ms()) == (0, NOW_MS + 9_000)
    its.step(HOUR_MS)  # the nearest time that is possible
    assert abs(clock.now_ms() - (NOW_MS + 13_000)) <= 1


async def test_a_measurement_asks_redis_and_kafka_for_their_time(its: Time) -> None:
    keys: Any = FakeKeys()
    keys.server.clock.now_ms = NOW_MS - HOUR_MS
    clocks = Clocks(unreachable_kafka(), keys, requests_topic("t"), "me")
    sent: list[tuple[str, bytes]] = []

    class Producer:
        async def identity(self) -> None: ...

        async def send_all(
            self, topic: str, contents: Sequence[tuple[int, bytes | None, bytes]]
        ) -> list[RecordMetadata]:
            sent.extend((topic, value) for _, _, value in contents)
            return [RecordMetadata(7, NOW_MS + HOUR_MS)]

    clocks._producer = Producer()  # type: ignore[assignment]
    await clocks.measure()
    assert sent == [("t.requests", b'{"v":1,"instance":"me","answers":[]}')]
    assert abs(clocks.redis.behind_ms - HOUR_MS) <= 1
    assert abs(clocks.kafka.now_ms() - (NOW_MS + HOUR_MS)) <= 1


@pytest.mark.parametrize(
    ("timestamp", "kind"), [(None, NOT_WRITTEN), (NOW_MS, RECORD_REFUSED)], ids=["given here", "the client's own"]
)
async def test_a_time_that_was_given_here_is_never_refused_for_good(timestamp: int | None, kind: object) -> None:
    world = World()
    slot = await world.slot()

    async def refuse(*_: object) -> Any:
        raise TransactionFailed(TransactionOutcome.ABORTED, "its time", {"orders": OUTSIDE_BOUNDS})

    producer: Any = slot.producer
    producer.send = refuse
    event = event_of("a", event_id("a"), "orders", None, b"1", [], None, timestamp)
    answer = world.ask(event)
    serving = world.serve(slot)
    assert kind_of(await answer) is kind
    await ended(serving)
