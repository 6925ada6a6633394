"""Overload: twice as many POSTs as the process can take, offered at a steady rate.

The peak is that of 256 connections that send as fast as they are answered, at a queue of 1,024 events. Overload is
2,560 connections that each wait before a request, at random, for as long in the mean as makes twice the peak when half
of them are refused at once and the others wait for a full queue. To say 503 takes time as well, so fewer come through
than would: "answered" tells how many, and the others wait in their sockets. A client beside them, one request at a
time, tells how long the 503s take. Memory is the process's own, looked at all the time.
"""

import threading
import time

from tests.bench.client import OneClient, body_of
from tests.bench.rows import Goal, NotRealWork, Row, quantile, ratios
from tests.bench.stage import Stage, Target, memory_bytes
from tests.bench.wrk import Loaded

QUEUE_EVENTS = 1_024
CONNECTIONS = 2_560
PEAK_CONNECTIONS = 256
ANSWERED_LEAST = 1.2  # of the peak, with 503 or 201: fewer would be no overload


class _Beside:
    """A client and a look at the memory, in a thread, while the load runs."""

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


def measure(stage: Stage) -> list[Row]:
    seconds, rounds = stage.pick(3, 4), stage.pick(1, 4)
    peaks: list[float] = []
    answered: list[float] = []
    overs: list[Loaded] = []
    grown: list[float] = []
    refused_ms: list[list[float]] = []
    with stage.target(queue_events_max=QUEUE_EVENTS) as target:
        target.warm(stage.pick(2, 4), PEAK_CONNECTIONS)
        for _ in range(rounds):
            peaks.append(target.load(seconds, PEAK_CONNECTIONS).rate)
            before = memory_bytes(target.service.pid)
            wait_ms = max(1, round(1000 * (CONNECTIONS - QUEUE_EVENTS) / (2 * peaks[-1])))
            with _Beside(target) as beside:
                loaded = target.press(seconds, CONNECTIONS, delay=wait_ms)
            answered.append(loaded.requests / loaded.seconds)
            if loaded.broken or answered[-1] < stage.pick(0.0, ANSWERED_LEAST) * peaks[-1]:
                raise NotRealWork(
                    f"{loaded.broken} had no answer; {answered[-1]:.0f}/s were answered, the peak is {peaks[-1]:.0f}"
                )
            overs.append(loaded)
            refused_ms.append(beside.refused_ms or [0.0])
            grown.append((beside.most_bytes - before) / 2**20)
            target.answered += loaded.answered + beside.written
            target.cut += CONNECTIONS
        target.check()
    goodput = ratios([loaded.rate for loaded in overs], peaks)
    return [
        Row("goodput at overload over the peak", "x", goodput, Goal(least=0.9)),
        Row("peak", "/s", peaks),
        Row("answered at overload, over the peak", "x", ratios(answered, peaks)),
        Row("refused (503)", "/s", [loaded.refused / loaded.seconds for loaded in overs]),
        Row("a 503 takes, p50", "ms", [quantile(each, 0.5) for each in refused_ms]),
        Row("a 503 takes, p99", "ms", [quantile(each, 0.99) for each in refused_ms]),
        Row("all answers at overload, p99", "ms", [loaded.p99_ms for loaded in overs]),
        Row("memory grown by, at most", "MiB", grown),
    ]
