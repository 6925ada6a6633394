"""Measures a process without traffic: CPU at rest, and the time from its start until it is ready, with 64 slots.

The start is timed from `python -m service` to the first 200 of /readyz: in a new namespace (the process creates the
topics), and after a kill -9 of a process that held all 64 slots (each is fenced and its ledger read before it is ready;
one ready slot is enough to serve). The leases of the dead process expire one lease after its last heartbeat, so the
kills come at different times between two heartbeats, as crashes do.
"""

import time
from pathlib import Path

from service.core.settings import Settings
from service.pipeline.lease_keeper import HEARTBEATS_PER_LEASE
from tests.bench.rows import Goal, NotRealWork, Row
from tests.bench.stage import Stage, Target

SLOTS = 64
ALL_READY_S = 60.0
BEAT_S = Settings().lease_ttl_ms / 1000 / HEARTBEATS_PER_LEASE


def measure(stage: Stage) -> list[Row]:
    seconds, rounds = stage.pick(2, 10), stage.pick(1, 3)
    with stage.target(slots_max=SLOTS) as target:
        shares = [_idle_share(target, seconds) for _ in range(rounds)]
    fresh, again, whole = _starts(stage, rounds)
    return [
        Row(f"CPU at rest, {SLOTS} slots to look after, share of a core", "%", shares, Goal(most=1.0)),
        Row(f"start to ready, new namespace of {SLOTS} slots", "s", fresh, Goal(most=3.0)),
        Row(f"start to ready after a kill -9 with all {SLOTS} slots", "s", again, Goal(most=3.0)),
        Row(f"until all {SLOTS} slots are recovered", "s", whole),
    ]


def _idle_share(target: Target, seconds: float) -> float:
    """Measure the CPU use over some seconds without a request, in per cent of a core."""
    before, started = _run_ns(target.service.pid), time.monotonic_ns()
    time.sleep(seconds)
    return 100 * (_run_ns(target.service.pid) - before) / (time.monotonic_ns() - started)


def _run_ns(pid: int) -> int:
    """Read the CPU time of all threads of a process, in ns: the hundredths of /proc/PID/stat are too coarse at rest."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def _starts(stage: Stage, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Measure seconds to ready in a new namespace, to ready again after a kill, and to all slots ready."""
    fresh: list[float] = []
    again: list[float] = []
    whole: list[float] = []
    for number in range(rounds):
        name = f"idle-{number}"
        service = stage.service(name, namespace=name, instance=name, slots=SLOTS, slots_max=SLOTS)
        started = time.monotonic()
        with service:
            fresh.append(time.monotonic() - started)
            target = Target(service, stage.kafka, stage.redis, name, [])
            _all_ready(target)  # a heartbeat has just been sent
            time.sleep(BEAT_S * (number + 0.5) / rounds)
            service.kill()
            started = time.monotonic()
            service.start()
            again.append(time.monotonic() - started)
            _all_ready(target)
            whole.append(time.monotonic() - started)
    return fresh, again, whole


def _all_ready(target: Target) -> None:
    deadline = time.monotonic() + ALL_READY_S
    while target.metric("fencepost_slot_recovery_seconds_count") < SLOTS:
        if time.monotonic() > deadline:
            raise NotRealWork(f"not all {SLOTS} slots were ready within {ALL_READY_S:.0f} s")
        time.sleep(0.02)
