"""(t) Kafka's transactions of version 1 against version 2 (KIP-890), in one run: on one broker, then on three (RF 3).

Two processes of the service in namespaces of their own, one with FENCEPOST_KAFKA_TRANSACTIONS=1: in turn one client
that waits for each answer, and wrk with 64 connections. CPU is that of all brokers, from /proc/PID/stat.
"""

import contextlib
from collections.abc import Sequence

from deploy.stack import Kafka
from tests.bench.client import OneClient
from tests.bench.rows import Row, quantile, ratios
from tests.bench.single import one_by_one
from tests.bench.stage import Stage, Target, cpu_s
from tests.bench.wrk import Loaded
from tests.faults.cluster import Cluster

CONNECTIONS = 64
VERSIONS = {"version 1": "1", "version 2": "auto"}


class _Side:
    """The runs of one version: one client's median (ms), loads, and the brokers' CPU (ms) a transaction in each."""

    def __init__(self, target: Target, brokers: Sequence[Kafka]) -> None:
        self.target = target
        self._brokers = brokers
        self.p50_ms: list[float] = []
        self.runs: list[Loaded] = []
        self.broker_ms: list[float] = []
        self.events_each: list[float] = []

    def one_client(self, count: int) -> None:
        with OneClient(self.target.service.port) as client:
            self.p50_ms.append(quantile(one_by_one(self.target, client, count), 0.5))
        self.target.answered += count

    def load(self, seconds: float) -> None:
        before, cpu_before_s = self.target.groups(), self._cpu_s()
        self.runs.append(self.target.load(seconds, CONNECTIONS))
        cpu_after_s = self._cpu_s()
        events, transactions = (after - then for after, then in zip(self.target.groups(), before, strict=True))
        self.events_each.append(events / transactions)
        self.broker_ms.append(1000 * (cpu_after_s - cpu_before_s) / transactions)

    def _cpu_s(self) -> float:
        return sum(cpu_s(broker.pid) for broker in self._brokers)


def measure(stage: Stage) -> list[Row]:
    rows = _compare(stage, [stage.kafka], "")
    if stage.depth == "quick":
        return rows
    with Cluster(stage.folder / "three", 3) as cluster:
        return rows + _compare(stage, cluster.brokers, ", RF 3")


def _compare(stage: Stage, brokers: Sequence[Kafka], where: str) -> list[Row]:
    seconds, rounds, count = stage.pick(1, 5, 9), stage.pick(1, 5, 9), stage.pick(50, 400)
    with contextlib.ExitStack() as stack:
        sides = {
            name: _Side(stack.enter_context(stage.target(kafka=brokers[0], kafka_transactions=setting)), brokers)
            for name, setting in VERSIONS.items()
        }
        for side in sides.values():
            stage.warm_up(side.target, 4, CONNECTIONS)
        for number in range(rounds):
            order = [*sides.values()][:: 1 if number % 2 else -1]
            for side in order:
                side.one_client(count)
            for side in order:
                side.load(seconds)
        for side in sides.values():
            side.target.check()
    rows: list[Row] = []
    for name, side in sides.items():
        rows += [
            Row(f"one client, p50, {name}{where}", "ms", side.p50_ms),
            Row(f"exactly-once POSTs, {CONNECTIONS} connections, {name}{where}", "/s", [run.rate for run in side.runs]),
            Row(f"p99, {CONNECTIONS} connections, {name}{where}", "ms", [run.p99_ms for run in side.runs]),
            Row(f"POSTs a transaction, {name}{where}", "", side.events_each),
            Row(f"the broker's CPU a transaction, {name}{where}", "ms", side.broker_ms),
        ]
    first, second = sides.values()
    return [
        *rows,
        Row(f"one client's p50, version 2 over 1{where}", "x", ratios(second.p50_ms, first.p50_ms)),
        Row(f"the broker's CPU a transaction, version 2 over 1{where}", "x", ratios(second.broker_ms, first.broker_ms)),
    ]
