"""Tests a process whose clock jumps, by what its clients see."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Message, Producer

from deploy.stack import Kafka, Redis, StackError
from tests.faults.clock import Clock, lacking

HOUR_S = 3600


@pytest.fixture(autouse=True)
def _possible() -> None:
    if why := lacking():
        pytest.skip(why)


def arrives(error_s: Callable[[], float], wanted_s: float) -> None:
    """Wait until the clock is off by this much, within the time that reading it takes."""
    deadline = time.monotonic() + 10
    while abs(error_s() - wanted_s) > 5:
        assert time.monotonic() < deadline, f"off by {error_s()} s instead of {wanted_s}"
        time.sleep(0.1)


def test_redis_runs_by_a_shifted_clock(tmp_path: Path) -> None:
    """Ahead, behind and right again, while it runs; a key with an expiry of one second expires after one second."""
    server = Redis(tmp_path / "redis")
    clock = Clock(server)
    with server, server.client() as client:

        def error_s() -> float:
            return float(client.time()[0]) - time.time()

        arrives(error_s, 0)
        with pytest.raises(StackError, match="runs by the machine's clock already"):
            Clock(server)
        for shift_s in (HOUR_S, -HOUR_S, 0):
            clock.shift(shift_s)
            arrives(error_s, shift_s)
        client.set("key", "v", px=300)
        time.sleep(0.5)
        assert client.get("key") is None

        clock.shift(HOUR_S)
        server.stop()
        clock.remove()
        server.start()
        arrives(error_s, 0)


def test_a_broker_runs_by_a_shifted_clock(tmp_path: Path) -> None:
    """Records get the broker's own time."""
    broker = Kafka(tmp_path / "kafka")
    clock = Clock(broker)
    with broker:
        broker.create_topic("stamped", config={"message.timestamp.type": "LogAppendTime"})

        def error_s() -> float:
            return stamp_ms(broker) / 1000 - time.time()

        arrives(error_s, 0)
        clock.shift(HOUR_S)
        arrives(error_s, HOUR_S)


def stamp_ms(broker: Kafka) -> int:
    """Write a record, and return its timestamp."""
    stamps: list[int] = []

    def written(_: object, message: Message) -> None:
        stamps.append(message.timestamp()[1])

    producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all"})
    producer.produce("stamped", b"v", on_delivery=written)
    assert producer.flush(20) == 0
    return stamps[0]
