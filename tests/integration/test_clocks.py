"""Tests a service whose clock is hours off, on a topic with Kafka's default bounds on timestamps."""

import time

import pytest

from tests.conftest import MakeTopic
from tests.durations import HOUR_MS
from tests.faults.clock import Clock, lacking
from tests.integration.conftest import Stage

BOUNDS = {"message.timestamp.before.max.ms": str(HOUR_MS), "message.timestamp.after.max.ms": str(HOUR_MS)}


@pytest.mark.skipif(bool(lacking()), reason=lacking())
@pytest.mark.parametrize("shift_h", [2, -2])
@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "from its start"])
async def test_a_shifted_clock_of_the_service_refuses_no_event(
    stage: Stage, make_topic: MakeTopic, shift_h: int, running: bool
) -> None:
    topic = make_topic(config=BOUNDS)
    service = stage.service()
    clock = Clock(service)
    clock.shift(0 if running else 3_600 * shift_h)
    await stage.start(service)
    clock.shift(3_600 * shift_h)
    for key, given in (("bare", {}), ("timed", {"timestamp": time.time_ns() // 1_000_000})):
        body = {"topic": topic, "value": 1, **given}
        answer = await stage.client.http.post(f"{service.url}/events", json=body, headers={"Idempotency-Key": key})
        assert answer.status_code == 201, answer.text
        assert abs(answer.json()["timestamp"] - time.time_ns() // 1_000_000) < 60_000
    ahead_s = (await stage.client.http.get(f"{service.url}/readyz")).json()["clock_ahead_s"]
    assert abs(ahead_s["kafka"] - 3_600 * shift_h) < 60
    assert abs(ahead_s["redis"] - 3_600 * shift_h) < 60
