"""Overload: more POSTs than a process can write, from clients with pauses, and from clients without.

The peak is the rate of 256 connections without pauses, at a queue of 512 events. Then 1,280 connections send: first
each waits a random time before a request, on average as long as gives twice the peak if refusals come at once; then
without pauses. Because refusals are delayed in turn, fewer requests come than planned: "answered" is their number. A
separate client, with one request at a time, measures the time to a 503. Memory is that of the process, measured all the
time.
"""

import threading
import time
from dataclasses import dataclass, field

from tests.bench.client import OneClient, body_of
from tests.bench.rows import Goal, NotRealWork, Row, quantile, ratios
from tests.bench.stage import Stage, Target, memory_bytes
from tests.bench.wrk import Loaded

QUEUE_EVENTS = 512
CONNECTIONS = 1_280
PEAK_CONNECTIONS = 256
LEAST = Goal(least=0.9)
REFUSED_LEAST = 0.1  # share of all answers; fewer refusals would be no overload


class _Beside:
    """Measures the time to a 503 and the memory, in a thread, while the load runs."""

    def __init__(self, target: Target) -> None:
        self.written = 0
        self.refused_ms: list[float] = []
        self.most_bytes = 0
        self._target = target
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        with OneClient(self._target.service.port) as client:
            while not self._stop.wait(0.01):
                number += 1
                key = f"{self._target.namespace}-beside-{time.monotonic_ns()}"
                status, ms = client.post(key, body_of(self._target.topic, number))
                self.written += status == 201
                if status == 503:
                    self.refused_ms.append(ms)
                self.most_bytes = max(self.most_bytes, memory_bytes(self._target.service.pid))

    def __enter__(self) -> "_Beside":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=60)


@dataclass
class _Load:
    """The figures of one kind of overload, by round."""

    of: str
    waits: bool
    runs: list[Loaded] = field(default_factory=list)
    refused_ms: list[list[float]] = field(default_factory=list)
    grown_mib: list[float] = field(default_factory=list)

    def press(self, target: Target, seconds: float, peak: float, refused_least: float) -> None:
        """Run one round. Raises NotRealWork if it was no overload, or a request got no answer."""
        before = memory_bytes(target.service.pid)
        wait_ms = max(1, round(1000 * (CONNECTIONS - QUEUE_EVENTS) / (2 * peak))) if self.waits else 0
        with _Beside(target) as beside:
            loaded = target.press(seconds, CONNECTIONS, **({"delay": wait_ms} if self.waits else {}))
        if loaded.broken or loaded.refused < refused_least * loaded.requests:
            raise NotRealWork(f"{loaded.broken} had no answer; {loaded.refused} of {loaded.requests} were refused")
        self.runs.append(loaded)
        self.refused_ms.append(beside.refused_ms or [0.0])
        self.grown_mib.append((beside.most_bytes - before) / 2**20)
        target.answered += loaded.answered + beside.written
        target.cut += CONNECTIONS
        target.settle()

    def rows(self, peaks: list[float]) -> list[Row]:
        answered = [loaded.requests / loaded.seconds for loaded in self.runs]
        return [
            Row(f"goodput over the peak, {self.of}", "x", ratios([each.rate for each in self.runs], peaks), LEAST),
            Row(f"answered over the peak, {self.of}", "x", ratios(answered, peaks)),
            Row(f"refused (503), {self.of}", "/s", [each.refused / each.seconds for each in self.runs]),
            Row(f"a 503 takes, p50, {self.of}", "ms", [quantile(each, 0.5) for each in self.refused_ms]),
            Row(f"a 503 takes, p99, {self.of}", "ms", [quantile(each, 0.99) for each in self.refused_ms]),
            Row(f"all answers, p99, {self.of}", "ms", [each.p99_ms for each in self.runs]),
            Row(f"memory grown by, at most, {self.of}", "MiB", self.grown_mib),
        ]


def measure(stage: Stage) -> list[Row]:
    seconds, rounds = stage.pick(3, 4), stage.pick(1, 5)
    refused_least = stage.pick(0.0, REFUSED_LEAST)
    peaks: list[float] = []
    loads = [_Load("twice the peak", waits=True), _Load("as fast as they can", waits=False)]
    with stage.target(queue_events_max=QUEUE_EVENTS) as target:
        if stage.depth != "quick":
            stage.warm_up(target, 3, PEAK_CONNECTIONS)
        for _ in range(rounds):
            target.settle()
            peaks.append(target.load(seconds, PEAK_CONNECTIONS).rate)
            for load in loads:
                target.settle()
                load.press(target, seconds, peaks[-1], refused_least)
        target.check()
    return [Row("peak", "/s", peaks), *(row for load in loads for row in load.rows(peaks))]
