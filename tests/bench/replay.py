"""(d) Replays: the same keys again, against new keys, on the same process at 256 connections.

A replay is answered from the store, after its claim was refused; nothing is written.
"""

from typing import Any

from tests.bench.rows import Goal, NotRealWork, Row, ratios
from tests.bench.stage import Stage, Target
from tests.bench.wrk import Loaded

CONNECTIONS = 256


def run(target: Target, seconds: float, connections: int, known: dict[str, Any]) -> tuple[Loaded, float]:
    """Load a target with known keys.

    Args:
        target: the process to load.
        seconds: the duration.
        connections: the number of connections.
        known: the arguments of load.lua, with `keys` of them.

    Returns:
        the result of wrk, and how many of its answers were replays; 0 if some were not.
    """
    before = target.metric("fencepost_replays_total")
    loaded = target.press(seconds, connections, **known)
    replayed = target.metric("fencepost_replays_total") - before
    return loaded, replayed if replayed >= loaded.requests and not loaded.refused and not loaded.broken else 0.0


def write_known(target: Target, keys: int) -> dict[str, Any]:
    """Write this many events; returns the arguments of load.lua that send them again."""
    known = {"prefix": f"{target.namespace}-known", "keys": keys}
    while run(target, 1, 64, known)[1] < keys:  # until each of them is written
        pass
    target.answered += keys
    return known


def measure(stage: Stage) -> list[Row]:
    seconds, rounds = stage.pick(1, 2, 4), stage.pick(1, 5, 9)
    new: list[float] = []
    again: list[float] = []
    new_us: list[float] = []
    again_us: list[float] = []
    with stage.target() as target:
        target.warm(stage.pick(2, 4), CONNECTIONS)
        known = write_known(target, stage.pick(200, 2_000))
        for _ in range(rounds):
            new.append(target.load(seconds, CONNECTIONS).rate)
            new_us.append(target.cpu_us)
            loaded, replayed = run(target, seconds, CONNECTIONS, known)
            if replayed < loaded.requests:
                raise NotRealWork(f"{replayed:.0f} of {loaded.requests} answers were replays, {loaded.refused} refused")
            again.append(loaded.rate)
            again_us.append(target.cpu_us)
        target.check()
    return [
        Row("replays over new events", "x", ratios(again, new), Goal(least=1.5)),
        Row("replays", "/s", again),
        Row("new events", "/s", new),
        Row("CPU a replay", "µs", again_us),
        Row("CPU a new event", "µs", new_us),
    ]
