"""Tests slots that move between processes that start and stop, without any event in doubt."""

import asyncio
import subprocess
import sys
import time

from confluent_kafka.admin import AdminClient

from deploy.stack import Service
from service.contract.wire.names import ledger_topic
from tests.integration.client import Asked, events
from tests.integration.conftest import SETTINGS, Stage
from tests.integration.plan import until

LEASE_S = int(SETTINGS["FENCEPOST_LEASE_TTL_MS"]) / 1000
# What a busy machine may add to two lease times.
SLACK_S = 3.0


def holders(stage: Stage) -> dict[str, int]:
    """Count the slots of each instance, by its name."""
    prefix = f"{{{stage.namespace}:0}}"
    counts: dict[str, int] = {}
    with stage.redis.client() as store:
        for slot in range(16):
            token = store.get(f"{prefix}l{slot}")
            if token is not None:
                name = (token.decode() if isinstance(token, bytes) else str(token)).partition("/")[0]
                counts[name] = counts.get(name, 0) + 1
    return counts


async def eventually(stage: Stage, counts: list[int]) -> float:
    """Wait until each holds this many slots; returns the seconds that this took."""
    started = time.monotonic()
    await asyncio.to_thread(until, lambda: sorted(holders(stage).values()) == counts, 20, f"{counts}")
    return time.monotonic() - started


async def test_newcomers_get_their_share_and_leavers_give_back_under_load(stage: Stage, topic: str) -> None:
    first = await stage.started(slots=4, slots_max=4)
    assert holders(stage) == {"service-0": 4}
    urls = [first.url]
    asked = events(topic, 600)
    load = asyncio.create_task(stage.client.load(urls, asked, workers=6, pace_s=0.02))
    newcomers: list[Service] = []
    for counts in ([2, 2], [1, 1, 1]):
        newcomers.append(stage.service(slots=4, slots_max=4))
        await stage.start(newcomers[-1])
        urls.append(newcomers[-1].url)
        assert await eventually(stage, counts) < 2 * LEASE_S + SLACK_S
    for leaver in newcomers:
        urls.remove(leaver.url)
        await asyncio.to_thread(leaver.stop)
    assert await eventually(stage, [4]) < 2 * LEASE_S + SLACK_S
    await load

    doubtful = [a for a in stage.client.history if a.kind == "info"]
    assert doubtful == []
    await stage.assert_exactly_once(topic)


async def test_more_processes_than_slots_wait_and_take_over(stage: Stage, topic: str) -> None:
    holder = await stage.started(slots=1, slots_max=1)
    extra = await stage.started(slots=1, slots_max=1, wait_ready=False)
    await asyncio.to_thread(until, lambda: stage_answers(extra), 20)
    assert not extra.ready()
    answer = await stage.client.http.get(f"{extra.url}/readyz")
    assert (answer.status_code, answer.json()["slots_ready"]) == (503, 0)

    holder.kill()
    died = time.monotonic()
    await asyncio.to_thread(extra.wait_ready)
    assert time.monotonic() - died < 2 * LEASE_S + SLACK_S
    assert (await stage.client.settle([extra.url], Asked("k", topic, b"1"))).kind == "ok"
    await stage.assert_exactly_once(topic)


def stage_answers(service: Service) -> bool:
    """Check whether the process answers at all."""
    probe = subprocess.run(
        [sys.executable, "-c", f"import urllib.request as u; u.urlopen('{service.url}/livez', timeout=2)"],
        check=False,
        capture_output=True,
    )
    return probe.returncode == 0


async def test_slots_max_is_raised_in_a_rolling_restart_and_never_lowered(own_stage: Stage, topic: str) -> None:
    stage = own_stage
    old = await stage.started(slots_max=2)
    new = await stage.started(slots_max=5)
    await stage.client.load([old.url, new.url], events(topic, 40, "both"))
    partitions = AdminClient({"bootstrap.servers": stage.kafka.bootstrap}).list_topics(timeout=10).topics
    assert len(partitions[ledger_topic(stage.namespace)].partitions) == 5

    # A recovery by the old process fences as many slots as there are now.
    stage.redis.flush()
    await stage.client.load([old.url, new.url], events(topic, 40, "after the flush"))
    await stage.assert_exactly_once(topic)

    lowered = stage.service(slots_max=3)
    lowered.start(wait_ready=False)
    assert await asyncio.to_thread(lowered.wait, 20) == 2
    lines = [line for line in lowered.log.read_text().splitlines() if line.startswith("FENCEPOST_")]
    assert lines == [
        f"FENCEPOST_SLOTS_MAX=3 is less than the 5 partitions of {ledger_topic(stage.namespace)}: "
        "set FENCEPOST_SLOTS_MAX to 5 or more"
    ]
