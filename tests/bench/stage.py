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
# The most runs until the broker is warm: its JIT compiler took at most this share of its CPU in so many runs in a row.
# One run is not enough, because the compiler works in bursts, for two minutes and longer on a busy machine.
WARM_RUNS = 48
STEADY_RUNS = 5
COMPILER_SHARE = 0.1

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

    def warm_up(self, target: "Target", seconds: float, connections: int, **arguments: Any) -> None:
        """Load a process until its broker is warm; in a quick run for a second."""
        if self.depth == "quick":
            target.warm(1, connections, **arguments)
            return
        steady = 0
        for _ in range(WARM_RUNS):
            target.warm(seconds, connections, **arguments)
            steady = steady + 1 if target.compiler_share <= COMPILER_SHARE else 0
            if steady == STEADY_RUNS:
                return

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
    compiler_share: float = field(default=0.0, init=False)  # the JIT compiler's part of the broker's CPU
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

    def press(self, seconds: float, connections: int, **arguments: object) -> Loaded:
        """Run once, with any result."""
        self.runs += 1
        arguments = {"topic": self.topic, "prefix": f"{self.namespace}-{self.runs}", **arguments}
        before = self._cpu_s()
        loaded = wrk.run(self.service.url, seconds, connections, **arguments)
        service_s, kafka_s, redis_s, compiler_s = (b - a for a, b in zip(before, self._cpu_s(), strict=True))
        each_us = [1e6 * spent_s / max(1, loaded.requests) for spent_s in (service_s, kafka_s, redis_s)]
        self.cpu_us, self.kafka_us, self.redis_us = each_us
        self.compiler_share = max(0.0, compiler_s) / kafka_s if kafka_s else 0.0
        return loaded

    def _cpu_s(self) -> list[float]:
        """Read the CPU time so far of the service, the broker, Redis, and the broker's JIT compiler."""
        used_s = [cpu_s(process.pid) for process in (self.service, self.kafka, self.redis)]
        return [*used_s, compiler_cpu_s(self.kafka.pid)]

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
    return _times(Path(f"/proc/{pid}/stat").read_text())[1]


def compiler_cpu_s(pid: int) -> float:
    """Read the CPU time of the JIT compiler's threads in a JVM, in seconds; less than before if a thread has ended."""
    total_s = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            name, used_s = _times((task / "stat").read_text())
            total_s += used_s if "CompilerThre" in name else 0.0  # Linux cuts names after 15 bytes
    return total_s


def _times(stat: str) -> tuple[str, float]:
    """Find the name and the CPU time in seconds of a process or thread (proc_pid_stat(5))."""
    head, _, rest = stat.rpartition(")")
    fields = rest.split()
    return head.partition("(")[2], (int(fields[11]) + int(fields[12])) * _TICK_S


def memory_bytes(pid: int) -> int:
    """Read the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
