"""The system under test: brokers, Redis (or a pair behind one address), processes of the service, clients.

All methods block and are called from ordinary threads; clients and relays have threads of their own.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import redis as redis_client

from deploy import places
from deploy.stack import Kafka, Redis, Service, StackError
from service.contract.wire.names import ledger_topic, transactional_id
from service.pipeline.lso_watch import ABORT_SCAN_S, LOOKS_A_TIMEOUT
from tests import kafka_versions
from tests.faults.checker import Verdict
from tests.faults.clock import Clock
from tests.faults.cluster import TRANSACTION_SCAN_S, Cluster
from tests.faults.history import Request, single
from tests.faults.load import Load
from tests.faults.network import Network
from tests.faults.processing import Processing
from tests.faults.relay import Relay
from tests.integration.client import Asked
from tests.integration.plan import MODULE, PLAN_ENV, Fault, Plan, until
from tests.stores import Store

TRANSACTION_TIMEOUT_S: Final = 5
# Short times, so that faults show quickly; few slots, so that store recoveries are short on this machine.
SETTINGS: Final = {
    "FENCEPOST_LEASE_TTL_MS": "1000",
    "FENCEPOST_REQUEST_TIMEOUT_MS": "5000",
    "FENCEPOST_TRANSACTION_TIMEOUT_MS": str(TRANSACTION_TIMEOUT_S * 1000),
    "FENCEPOST_SLOTS": "2",
    "FENCEPOST_SLOTS_MAX": "6",
    "FENCEPOST_KAFKA_TRANSACTIONS": kafka_versions.transactions(),
}
# How long a transaction may stay open after all faults have ended.
STABLE_S: Final = TRANSACTION_TIMEOUT_S + TRANSACTION_SCAN_S + 1.0
# The same for a transaction whose markers never come: until the watch over LSOs has had its slot recovered.
SETTLED_S: Final = TRANSACTION_TIMEOUT_S * (1 + 1 / LOOKS_A_TIMEOUT) + ABORT_SCAN_S + 5.0
TOPICS: Final = {"a": 3, "b": 2}
POLL_S: Final = 0.02
ANSWER_S: Final = 30.0
# For a process that is started while brokers or the store are unreachable; a start alone takes 2 s.
START_S: Final = 180.0
TELL_S: Final = 1.0


@dataclass(frozen=True)
class Odd:
    """A process with a network and a clock of its own."""

    service: Service
    network: Network
    clock: Clock


class NotRecovered(AssertionError):
    """Acknowledgements did not resume within the bound."""


class World:
    """One namespace on a cluster that outlives it.

    Attributes:
        cluster: the brokers.
        redis: the present Redis of the service; with a pair, `replica` follows it.
        address: with a pair, the relay to which the services connect.
        link: with a pair, the relay through which the replica follows; `link.hold()` makes it lag.
        stores: sentinels or a cluster in place of a single server, if the row has them.
        odd: the service with a network and a clock of its own, if there is one.
        services: the processes that must run in the end.
        partitions: the first data topics, with their numbers of partitions.
        project: the tree whose service runs; faults are planned for this tree only.
        topics: the data topics; those in `repeatable` have the guarantee `idempotent`, by `rules`.
        load: the clients, after `start_load`.
        processing: processors of a consumer group, after `start_processors`.
        exits: closed at the end, after the services: for what a row opens for them.
        proxied: whether the services reach Kafka through `cluster.proxy`.
        notes: remarks of a row for its result.
    """

    def __init__(
        self,
        folder: Path,
        cluster: Cluster,
        *,
        pair: bool = False,
        stores: Callable[[Path, str], Store] | None = None,
        proxied: bool = False,
        mutants: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        namespace: str = "",
        topics: Mapping[str, int] = TOPICS,
        project: Path = places.ROOT,
    ) -> None:
        self.folder = folder
        self.cluster = cluster
        self.namespace = namespace or f"w-{uuid.uuid4().hex[:8]}"
        self.settings = {**SETTINGS, **(settings or {})}
        self.partitions = {f"{self.namespace}.{name}": count for name, count in topics.items()}
        self.topics = list(self.partitions)
        self.repeatable: list[str] = []  # topics with the guarantee `idempotent`
        self.rules: Path | None = None
        self.services: list[Service] = []
        self.odd: Odd | None = None
        self.retired: list[Service] = []
        self.notes: list[str] = []
        self.load: Load | None = None
        self.processing: Processing | None = None
        self.proxied = proxied
        self.project = project
        self._pair = pair
        self._make_stores = stores
        self.stores: Store | None = None
        self._mutants = tuple(mutants)
        self._kafka = cluster.proxy.bootstrap if proxied else cluster.bootstrap
        self._made = 0
        self.exits = ExitStack()
        self._probes = 0
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        try:
            self._bring_up()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tear_down()

    def _bring_up(self) -> None:
        if self._make_stores is not None:
            self.stores = self.exits.enter_context(self._make_stores(self.folder / "stores", self.namespace))
            self.redis: Redis = self.stores.primary
        else:
            self.redis = Redis(self.folder / "redis-0", name="redis-0", args=["--enable-debug-command", "yes"])
            self.redis.start()
        self.replica: Redis | None = None
        if self._pair:
            self.link = self.exits.enter_context(Relay(self.redis.port))
            self.address = self.exits.enter_context(Relay(self.redis.port))
            self.replica = Redis(self.folder / "redis-1", name="redis-1", args=["--enable-debug-command", "yes"])
            self.replica.start()
            self.follow()
        for topic, partitions in self.partitions.items():
            self.cluster.create_topic(topic, partitions)

    def _tear_down(self) -> None:
        if self.load is not None:
            self.load.close()
        if self.processing is not None:
            self.processing.close()
        for service in [*self.services, *self.retired]:
            service.kill()
        for server in (getattr(self, "redis", None), getattr(self, "replica", None)):
            if server is not None:
                server.kill()
        self.exits.close()

    # -------------------------------------------------------------------------------------------------- the parts

    @property
    def redis_url(self) -> str:
        """The address of the store."""
        if self.stores is not None:
            return self.stores.url
        return f"redis://127.0.0.1:{self.address.port}/0" if self._pair else self.redis.url

    def service(
        self,
        *,
        faults: Sequence[Fault] = (),
        only_slots: tuple[int, ...] | None = None,
        kafka: str = "",
        redis: str = "",
        env: Mapping[str, str] | None = None,
        argv_prefix: Sequence[str] = (),
        project: Path | None = None,
        **settings: object,
    ) -> Service:
        """Make a process, which is not started yet. `settings` as in `lease_ttl_ms=500`; `project`: another tree's."""
        name = f"service-{self._made}"
        self._made += 1
        environment = {
            **self.settings,
            "FENCEPOST_NAMESPACE": self.namespace,
            "FENCEPOST_INSTANCE": name,
            **(self.stores.settings if self.stores is not None else {}),
            **(env or {}),
        }
        environment |= {f"FENCEPOST_{setting.upper()}": str(value) for setting, value in settings.items()}
        wrapped = bool(faults or self._mutants or only_slots)
        if self.rules:
            environment["FENCEPOST_RULES"] = str(self.rules)
        if wrapped:
            folder = self.folder / name
            folder.mkdir()
            environment[PLAN_ENV] = Plan(folder, tuple(faults), self._mutants, only_slots).encode()
        service = Service(
            self.folder,
            kafka=kafka or self._kafka,
            redis=redis or self.redis_url,
            env=environment,
            module=MODULE if wrapped else "service",
            argv_prefix=argv_prefix,
            name=name,
            project=project or self.project,
        )
        self.services.append(service)
        return service

    def start_services(self, count: int, **kwargs: Any) -> list[Service]:
        """Start this many further processes, wait until they are ready, and tell the clients."""
        started = [self.service(**kwargs) for _ in range(count)]
        for service in started:
            service.start(wait_ready=False)
        for service in started:
            service.wait_ready(START_S)
        self.aim()
        return started

    def start_odd_service(self) -> None:
        """Start a process that can be cut off alone, and whose clock can be shifted."""
        kafka = [int(server.rpartition(":")[2]) for server in self._kafka.split(",")]
        peers = {"kafka": kafka, "redis": [self.address.port if self._pair else self.redis.port]}
        network = self.exits.enter_context(Network(self.folder, peers))
        service = self.service(argv_prefix=network.prefix)
        network.admit(service.port)
        self.odd = Odd(service, network, Clock(service))
        service.start(timeout_s=START_S)
        self.aim()

    def retire(self, service: Service) -> None:
        """Note that a process stays down; clients do not use it from now on."""
        self.services.remove(service)
        self.retired.append(service)
        self.aim()

    def aim(self) -> None:
        """Tell the clients the present processes."""
        if self.load is not None:
            self.load.targets = {service.name: service.url for service in self.services}

    # ---------------------------------------------------------------------------------------------------- the pair

    def follow(self) -> None:
        """Let the replica follow the primary, through `link`, and wait until it does."""
        assert self.replica is not None
        self.link.lead_to(self.redis.port)
        with self.replica.client() as store:
            store.replicaof("127.0.0.1", str(self.link.port))

            def follows() -> bool:
                return bool(store.info("replication").get("master_link_status") == "up")

            self.until(follows, ANSWER_S, "the replica follows")

    def promote(self) -> None:
        """Fail over: the replica becomes the primary, and the address leads to it; `redis` and `replica` change names.

        The old primary is left as it is (dead, or alive and a primary by its own view).
        """
        assert self.replica is not None
        self.link.lead_to(self.redis.port)  # cut: bytes on the way are lost
        with self.replica.client() as store:
            store.replicaof("NO", "ONE")
        self.redis, self.replica = self.replica, self.redis
        self.address.lead_to(self.redis.port)

    # -------------------------------------------------------------------------------------------------- the clients

    @property
    def history(self) -> Path:
        return self.folder / "history"

    def start_load(self, seed: int | str = 1, **kwargs: Any) -> Load:
        """Start the clients, and wait until they have some answers."""
        assert self.load is None
        targets = {service.name: service.url for service in self.services}
        self.load = Load(self.history, targets, self.topics, seed, **kwargs)
        self.load.start()
        self.wait_acked(20)
        return self.load

    def start_processors(self, count: int) -> Processing:
        """Start processors of one group, beside the clients, and wait until they have committed some offsets."""
        assert self.processing is None
        url = self.services[0].url
        processing = Processing(self.folder / "processors", self.cluster, self.namespace, url, count)
        self.processing = processing
        processing.start()
        self.until(lambda: sum(processing.committed().values()) >= 20, ANSWER_S, "processors commit offsets")
        return processing

    def wait_acked(self, more: int, timeout_s: float = ANSWER_S) -> None:
        """Wait until this many more events were acknowledged."""
        load = self._load()
        goal = load.acked + more
        self.until(lambda: load.acked >= goal, timeout_s, f"{more} more acknowledgements")

    def ask(self, key: str, topic: str = "", value: str = "1", record_key: str | None = None) -> Request:
        """Make an event of a row's own, for `load.send`."""
        return single(Asked(f"row/{key}", topic or self.topics[0], value.encode(), record_key))

    def recovery_s(self, bound_s: float) -> float:
        """Measure the time from now until all earlier requests are settled, every running process has acknowledged a
        fresh event on each topic, and processors have committed the offsets of all earlier orders.

        Raises:
            NotRecovered: that took longer than the bound; the text says what is left.
        """
        load = self._load()
        begun = time.monotonic()
        before = load.open()
        orders = {} if self.processing is None else self.processing.written_now()
        self._probes += 1
        probes = [
            load.send([self.ask(f"probe-{self._probes}/{service.name}/{topic}", topic)], [service.name])
            for service in self.services
            if service.running
            for topic in self.topics
        ]
        while not (load.settled(before) and all(probe.done() for probe in probes) and self._has_processed(orders)):
            if time.monotonic() - begun > bound_s:
                left = load.describe(before) + [f"probe {n}" for n, probe in enumerate(probes) if not probe.done()]
                left += [] if self._has_processed(orders) else [f"offsets of {orders} orders"]
                raise NotRecovered(f"not acknowledged {bound_s:.0f} s later: {left[:10]}")
            time.sleep(POLL_S)
        for probe in probes:
            probe.result()
        return time.monotonic() - begun

    def _has_processed(self, orders: Mapping[int, int]) -> bool:
        return self.processing is None or self.processing.has_passed(orders)

    def tell_waits(self) -> None:
        """Let every running process log what its tasks wait for (SIGUSR1)."""
        for service in self.services:
            if service.running:
                os.kill(service.pid, signal.SIGUSR1)
        time.sleep(TELL_S)

    def _load(self) -> Load:
        assert self.load is not None, "no load was started"
        return self.load

    # -------------------------------------------------------------------------------------------------- the end

    def heal(self) -> None:
        """Start everything again, without planned faults, and wait until it is ready."""
        if self.odd is not None:
            self.odd.network.mend()
            self.odd.clock.shift(0)
        for relay in (self.link, self.address) if self._pair else ():
            relay.let_go()
        if self.stores is not None:
            self.stores.heal()
        for server in (self.redis, self.replica) if self.stores is None else ():
            if server is not None:
                server.resume() if server.running else server.start()
        if self.replica is not None:
            self.follow()
        self.cluster.heal()
        for service in self.services:
            service.resume() if service.running else None
            if not service.running:
                self._without_faults(service)
                service.start(wait_ready=False)
        for service in self.services:
            service.wait_ready(START_S)

    def _without_faults(self, service: Service) -> None:
        if PLAN_ENV in service.env:
            service.env[PLAN_ENV] = Plan(self.folder, (), self._mutants).encode()

    def check(self, *, post_again: bool = True, audit: bool = False, timeout_s: float = 300.0) -> Verdict:
        """Run the checker in a process of its own, after the clients have stopped."""
        command = [sys.executable, "-m", "tests.faults.checker", "--history", str(self.history)]
        command += ["--kafka", self.cluster.bootstrap, "--namespace", self.namespace]
        command += ["--topics", ",".join(self.topics), "--stable-s", str(SETTLED_S)]
        command += ["--idempotent", ",".join(self.repeatable)] if self.repeatable else []
        command += ["--rules", str(self.rules)] if self.rules else []
        command += [f"--url={service.url}" for service in self.services if post_again]
        command += ["--audit", str(self.folder)] if audit else []
        run = subprocess.run(
            command,
            cwd=places.ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        if not run.stdout.startswith("{"):
            raise StackError(f"the checker ended with {run.returncode}\n{run.stderr[-3000:]}")
        return _verdict(run.stdout)

    def bugs(self) -> list[str]:
        """Find signs of bugs in the services' logs."""
        found: list[str] = []
        for service in [*self.services, *self.retired]:
            log = service.log.read_text(errors="replace") if service.log.exists() else ""
            if "Traceback" in log or '"bug"' in log:
                found.append(f"a bug in {service.name}: see {service.log}")
        return found

    # ------------------------------------------------------------------------------------------------- for faults

    def transactional_ids(self) -> list[str]:
        return [transactional_id(self.namespace, slot) for slot in range(int(self.settings["FENCEPOST_SLOTS_MAX"]))]

    @property
    def ledger(self) -> str:
        return ledger_topic(self.namespace)

    def leader(self, partition: int = 0) -> Kafka:
        """Find the broker that leads a partition of the first topic."""
        return self.cluster.leader(self.topics[0], partition)

    def until(self, holds: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait for a condition.

        Raises:
            AssertionError: it was not met in time.
        """
        until(holds, timeout_s, what)


def _verdict(text: str) -> Verdict:
    raw = json.loads(text)
    raw.pop("found")
    return Verdict(**{**raw, "violations": [(kind, what) for kind, what in raw["violations"]]})


def redis_call(server: Redis, *command: str) -> Any:
    """Send one command, whose reply may take long or never come."""
    with redis_client.Redis.from_url(server.url, socket_timeout=60, retry=None) as store:
        return store.execute_command(*command)
