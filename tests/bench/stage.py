"""Runs the real stack for a benchmark: Kafka, Redis, processes of the service, and the load on them."""

import contextlib
import os
import re
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from deploy.places import ROOT
from deploy.stack import Kafka, Redis, Service
from tests.bench import checks, wrk
from tests.bench.redis_servers import DeployedRedis
from tests.bench.rows import NotRealWork
from tests.bench.wrk import Loaded

SETTLE_S = 30.0
# The most runs until the broker is warm; it is warm after this many runs in a row that take no less of its CPU, by this
# share. One run is not enough: the JIT compiler works in bursts, for about a minute, and takes CPU itself.
WARM_RUNS = 24
STEADY_RUNS = 5
STEADY = 0.93

T = TypeVar("T")

# Jiffies of /proc/PID/stat.
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Stage:
    """Kafka, Redis, a folder for processes of the service, and the depth of the benchmarks."""

    folder: Path
    kafka: Kafka
    redis: Redis
    results: Path  # folder of the results
    depth: str = "standard"  # or "quick" (small sizes), or "full" (the longest points too)
    records: tuple[int, ...] = ()  # sizes for the benchmarks that write records, from the command line

    def pick(self, quick: T, standard: T, full: T | None = None) -> T:
        """Choose a size by the depth of the run."""
        if self.depth == "quick":
            return quick
        return full if self.depth == "full" and full is not None else standard

    def service(
        self,
        name: str = "service",
        module: str = "service",
        kafka: Kafka | None = None,
        redis: Redis | None = None,
        root: Path = ROOT,
        **settings: Any,
    ) -> Service:
        """Make a process of the project in `root`; it is not started."""
        env = {f"FENCEPOST_{setting.upper()}": str(value) for setting, value in settings.items()}
        kafka, redis = kafka or self.kafka, redis or self.redis
        return Service(
            self.folder, kafka=kafka.bootstrap, redis=redis.url, env=env, name=name, module=module, project=root
        )

    @contextlib.contextmanager
    def target(
        self,
        topics: Sequence[str] = (),
        partitions: int = 3,
        kafka: Kafka | None = None,
        redis: Redis | None = None,
        module: str = "service",
        root: Path = ROOT,
        **settings: Any,
    ) -> Iterator["Target"]:
        """Start a process in a namespace of its own, with topics of its own (one if none are named)."""
        kafka = kafka or self.kafka
        namespace = f"b-{uuid.uuid4().hex[:7]}"  # as long as the default namespace, which is part of every key
        names = list(topics) or [f"{namespace}-events"]
        for topic in names:
            kafka.create_topic(topic, partitions=partitions)
        settings = {"namespace": namespace, "instance": namespace, **settings}
        service = self.service(namespace, module, kafka, redis, root, **settings)
        with service:
            yield Target(service, kafka, redis or self.redis, namespace, names)

    @contextlib.contextmanager
    def empty(self) -> Iterator["Target"]:
        """Start the empty FastAPI handler in a process of its own."""
        with self.service("empty", module="tests.bench.empty") as service:
            yield Target(service, self.kafka, self.redis, "", ["any"])


@dataclass
class Target:
    """A process under load, and the number of its answers so far."""

    service: Service
    kafka: Kafka
    redis: Redis
    namespace: str
    topics: list[str]
    answered: int = 0
    cut: int = 0
    runs: int = 0
    cpu_us: float = field(default=0.0, init=False)  # CPU of the process for a request of the last run
    kafka_us: float = field(default=0.0, init=False)
    redis_us: float = field(default=0.0, init=False)

    @property
    def topic(self) -> str:
        return self.topics[0]

    def load(self, seconds: float, connections: int, batch: int = 0, **arguments: object) -> Loaded:
        """Load the process once with new keys; each event must be written.

        Raises:
            NotRealWork: a request was refused, or had no answer.
        """
        loaded = self.warm(seconds, connections, batch=batch, **arguments)
        if not loaded.requests:
            raise NotRealWork(f"no answer in {seconds} s")
        return loaded

    def warm(self, seconds: float, connections: int, batch: int = 0, **arguments: object) -> Loaded:
        """Run as `load`, but answers may come after the end, as the first ones of a cold broker do."""
        loaded = self.press(seconds, connections, batch=batch, **arguments)
        if loaded.refused or loaded.broken:
            raise NotRealWork(f"{loaded.refused} of {loaded.requests} requests were refused, {loaded.broken} broke off")
        self.answered += loaded.answered * max(1, batch)
        self.cut += connections * max(1, batch)
        return loaded

    def warm_up(self, seconds: float, connections: int, **arguments: Any) -> None:
        """Load until the broker's CPU for a request falls no more, as of a broker whose JIT compiler is done."""
        best, steady = float("inf"), 0
        for _ in range(WARM_RUNS):
            self.warm(seconds, connections, **arguments)
            steady = steady + 1 if self.kafka_us > STEADY * best else 0
            best = min(best, self.kafka_us)
            if steady == STEADY_RUNS:
                return

    def press(self, seconds: float, connections: int, **arguments: object) -> Loaded:
        """Run once, with any result."""
        self.runs += 1
        arguments = {"topic": self.topic, "prefix": f"{self.namespace}-{self.runs}", **arguments}
        before = [cpu_s(process.pid) for process in (self.service, self.kafka, self.redis)]
        loaded = wrk.run(self.service.url, seconds, connections, **arguments)
        after = [cpu_s(process.pid) for process in (self.service, self.kafka, self.redis)]
        each_us = [1e6 * (b - a) / max(1, loaded.requests) for a, b in zip(before, after, strict=True)]
        self.cpu_us, self.kafka_us, self.redis_us = each_us
        return loaded

    def settle(self) -> None:
        """Wait until no request is in progress: wrk ends while its last requests are being written.

        Raises:
            NotRealWork: that took too long.
        """
        deadline = time.monotonic() + SETTLE_S
        while self.metric("fencepost_queue_events"):
            if time.monotonic() > deadline:
                raise NotRealWork(f"events wait for longer than {SETTLE_S:.0f} s")
            time.sleep(0.05)

    def check(self) -> None:
        """Check that all answered events are in the topics once, and in the ledger. Raises NotRealWork."""
        self.settle()
        checks.exactly_once(self.kafka.bootstrap, self.namespace, self.topics, self.answered, self.cut)

    def groups(self) -> tuple[float, float]:
        """Read the number of events that the service has written so far, and of their transactions."""
        return self.metric("fencepost_group_events_sum"), self.metric("fencepost_group_events_count")

    def metric(self, name: str) -> float:
        """Sum up a metric's samples on /metrics."""
        with urllib.request.urlopen(f"{self.service.url}/metrics", timeout=10) as response:
            text = response.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@contextlib.contextmanager
def stack(results: Path, depth: str = "standard", records: tuple[int, ...] = ()) -> Iterator[Stage]:
    """Run the stack in a temporary folder, which is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="fencepost-bench-") as name:
        folder = Path(name)
        with Kafka(folder / "kafka") as kafka, DeployedRedis(folder / "redis") as redis:
            yield Stage(folder, kafka, redis, results, depth, records)


def cpu_s(pid: int) -> float:
    """Read a process's CPU time in user and kernel mode, in seconds (in steps of a hundredth)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def memory_bytes(pid: int) -> int:
    """Read the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
