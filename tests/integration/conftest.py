"""Starts processes of the service for a test, on the run's broker and store, and lets the judge check the topics."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.stack import Kafka, Redis, Service
from tests import kafka_versions
from tests.conftest import MakeTopic
from tests.forked import ForkedService
from tests.integration.client import Asked, Attempt, Client
from tests.integration.judge import ledger_faults, violations
from tests.integration.plan import MODULE, PLAN_ENV, Fault, Plan

# Short times, so that faults show quickly; few slots, so that one process can hold all of them.
SETTINGS = {
    "FENCEPOST_LEASE_TTL_MS": "1000",
    "FENCEPOST_REQUEST_TIMEOUT_MS": "5000",
    "FENCEPOST_TRANSACTION_TIMEOUT_MS": "5000",
    "FENCEPOST_SLOTS": "2",
    "FENCEPOST_SLOTS_MAX": "4",
    "FENCEPOST_KAFKA_TRANSACTIONS": kafka_versions.transactions(),
}


class Stage:
    """One namespace: its processes, its client, and the checks of the judge."""

    def __init__(self, folder: Path, kafka: Kafka, redis: Redis, namespace: str, client: Client) -> None:
        self.folder = folder
        self.kafka = kafka
        self.redis = redis
        self.namespace = namespace
        self.client = client
        self.services: list[Service] = []

    def service(
        self,
        *,
        faults: tuple[Fault, ...] = (),
        mutants: tuple[str, ...] = (),
        only_slots: tuple[int, ...] | None = None,
        redis: Redis | None = None,
        kafka: Kafka | None = None,
        **settings: object,
    ) -> Service:
        """Make a process, which is not started yet; with faults or mutants it runs `faulty`."""
        name = f"service-{len(self.services)}"
        environment = {**SETTINGS, "FENCEPOST_NAMESPACE": self.namespace, "FENCEPOST_INSTANCE": name}
        environment |= {f"FENCEPOST_{setting.upper()}": str(value) for setting, value in settings.items()}
        wrapped = bool(faults or mutants or only_slots)
        if wrapped:
            folder = self.folder / name
            folder.mkdir()
            environment[PLAN_ENV] = Plan(folder, faults, mutants, only_slots).encode()
        service = ForkedService(
            self.folder,
            kafka=(kafka or self.kafka).bootstrap,
            redis=(redis or self.redis).url,
            env=environment,
            module=MODULE if wrapped else "service",
            name=name,
        )
        self.services.append(service)
        return service

    async def start(self, *services: Service, wait_ready: bool = True) -> None:
        """Start processes, all at once."""
        await asyncio.gather(*(asyncio.to_thread(service.start, wait_ready) for service in services))

    async def started(self, *, wait_ready: bool = True, **kwargs: Any) -> Service:
        """Start a process, and wait until it is ready."""
        service = self.service(**kwargs)
        await self.start(service, wait_ready=wait_ready)
        return service

    def dead_slots(self, redis: Redis | None = None) -> list[int]:
        """List the slots that were taken and are not held."""
        prefix = f"{{{self.namespace}:0}}"
        with (redis or self.redis).client() as store:
            taken = sorted(int(slot) for slot in store.smembers(f"{prefix}o"))
            return [slot for slot in taken if not store.exists(f"{prefix}l{slot}")]

    def leases(self) -> dict[int, str]:
        """List the held slots with the tokens of their holders."""
        prefix = f"{{{self.namespace}:0}}"
        with self.redis.client() as store:
            tokens = {slot: store.get(f"{prefix}l{slot}") for slot in range(64)}
        return {slot: token.decode() for slot, token in tokens.items() if token is not None}

    def holders(self) -> set[str]:
        """List the processes that hold the slots that were taken; "" for a slot that is not held."""
        prefix = f"{{{self.namespace}:0}}"
        with self.redis.client() as store:
            leases = [store.get(f"{prefix}l{int(slot)}") or b"" for slot in store.smembers(f"{prefix}o")]
        return {lease.decode().partition("/")[0] for lease in leases}

    def violations(self, *topics: str, history: list[Attempt] | None = None) -> list[str]:
        return violations(self.kafka.bootstrap, topics, self.client.history if history is None else history)

    async def assert_exactly_once(self, *topics: str) -> None:
        """Check that the topics have what the clients' acknowledgements name, and that the ledger has each record."""

        def judge() -> list[str]:
            return self.violations(*topics) + ledger_faults(self.kafka.bootstrap, self.namespace, topics)

        assert await asyncio.to_thread(judge) == []

    async def ask_again(self, urls: list[str], asked: list[Asked]) -> None:
        """Send every event again: the answers must be the same, and nothing may be written."""
        before = {a.asked.key: a.body for a in self.client.history if a.kind == "ok"}
        for attempt in await self.client.load(urls, asked):
            assert before.get(attempt.asked.key, attempt.body) == attempt.body


def plan_of(service: Service) -> Plan:
    return Plan.decode(service.env[PLAN_ENV])


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Client() as client:
        yield client


@contextlib.contextmanager
def staged(stage: Stage) -> Iterator[Stage]:
    """The processes of a stage, which end with the block; none may log a bug."""
    try:
        yield stage
    finally:
        for service in stage.services:
            service.kill()
    for service in stage.services:
        log = service.log.read_text() if service.log.exists() else ""
        assert not any(sign in log for sign in ("Traceback", '"bug"')), f"a bug in {service.name}\n{service.tail(60)}"


@pytest.fixture
def stage(tmp_path: Path, kafka: Kafka, redis: Redis, namespace: str, client: Client) -> Iterator[Stage]:
    """Processes on the run's Redis."""
    with staged(Stage(tmp_path, kafka, redis, namespace, client)) as stage:
        yield stage


@pytest.fixture
def own_stage(tmp_path: Path, kafka: Kafka, own_redis: Redis, namespace: str, client: Client) -> Iterator[Stage]:
    """Processes on a Redis that the test may flush, pause and restart."""
    with staged(Stage(tmp_path, kafka, own_redis, namespace, client)) as stage:
        yield stage


@pytest.fixture
def topic(make_topic: MakeTopic) -> str:
    return make_topic(3)


@pytest.fixture(scope="module")
def transport() -> str:
    """How POSTs reach the app of `served`; a module that overrides it with both transports runs its tests with each."""
    return "direct"


@pytest.fixture(scope="module")
def served(kafka: Kafka, redis: Redis, tmp_path_factory: pytest.TempPathFactory, transport: str) -> Iterator[Service]:
    """One process for all tests of a module."""
    environment = {**SETTINGS, "FENCEPOST_NAMESPACE": f"m-{uuid.uuid4().hex[:12]}"}
    environment["FENCEPOST_BODY_BYTES_MAX"] = "2000000"
    environment["FENCEPOST_TRANSPORT"] = transport
    folder = tmp_path_factory.mktemp("served")
    with ForkedService(folder, kafka=kafka.bootstrap, redis=redis.url, env=environment) as service:
        yield service
    assert "Traceback" not in service.log.read_text(), service.tail(60)
