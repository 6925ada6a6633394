"""Processes of the service for a test, on the run's broker and store, and the judge's last word on it."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.stack import Kafka, Redis, Service
from tests.conftest import MakeTopic
from tests.integration.client import Asked, Attempt, Client
from tests.integration.judge import ledger_faults, violations
from tests.integration.plan import MODULE, PLAN_ENV, Fault, Plan

# Faults show quickly with short times; few slots, so that a process can hold all of them.
SETTINGS = {
    "FENCEPOST_LEASE_TTL_MS": "1000",
    "FENCEPOST_REQUEST_TIMEOUT_MS": "5000",
    "FENCEPOST_TRANSACTION_TIMEOUT_MS": "5000",
    "FENCEPOST_SLOTS": "2",
    "FENCEPOST_SLOTS_MAX": "4",
}


class Stage:
    """One namespace: its processes, the client that talks to them, and how it is judged."""

    def __init__(
        self, folder: Path, kafka: Kafka, redis: Redis, namespace: str, client: Client, bytecode: dict[str, str]
    ) -> None:
        self.folder = folder
        self.kafka = kafka
        self.redis = redis
        self.namespace = namespace
        self.client = client
        self.bytecode = bytecode
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
        """A process, not started yet; with faults or mutants it runs in the wrapper."""
        name = f"service-{len(self.services)}"
        environment = {**SETTINGS, **self.bytecode, "FENCEPOST_NAMESPACE": self.namespace, "FENCEPOST_INSTANCE": name}
        environment |= {f"FENCEPOST_{setting.upper()}": str(value) for setting, value in settings.items()}
        wrapped = bool(faults or mutants or only_slots)
        if wrapped:
            folder = self.folder / name
            folder.mkdir()
            environment[PLAN_ENV] = Plan(folder, faults, mutants, only_slots).encode()
        service = Service(
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
        """A process that is ready."""
        service = self.service(**kwargs)
        await self.start(service, wait_ready=wait_ready)
        return service

    def dead_slots(self, redis: Redis | None = None) -> list[int]:
        """Slots that somebody took and nobody holds."""
        prefix = f"{{{self.namespace}:0}}"
        with (redis or self.redis).client() as store:
            taken = sorted(int(slot) for slot in store.smembers(f"{prefix}o"))
            return [slot for slot in taken if not store.exists(f"{prefix}l{slot}")]

    def leases(self) -> dict[int, str]:
        """The slots that somebody holds, and the token of who does."""
        prefix = f"{{{self.namespace}:0}}"
        with self.redis.client() as store:
            tokens = {slot: store.get(f"{prefix}l{slot}") for slot in range(64)}
        return {slot: token.decode() for slot, token in tokens.items() if token is not None}

    def holders(self) -> set[str]:
        """The processes that hold the slots which somebody took; "" for a slot that nobody holds."""
        prefix = f"{{{self.namespace}:0}}"
        with self.redis.client() as store:
            leases = [store.get(f"{prefix}l{int(slot)}") or b"" for slot in store.smembers(f"{prefix}o")]
        return {lease.decode().partition("/")[0] for lease in leases}

    def violations(self, *topics: str, history: list[Attempt] | None = None) -> list[str]:
        return violations(self.kafka.bootstrap, topics, self.client.history if history is None else history)

    async def assert_exactly_once(self, *topics: str) -> None:
        """What the clients were told is what is in the topics, and the ledger knows each record."""

        def judge() -> list[str]:
            return self.violations(*topics) + ledger_faults(self.kafka.bootstrap, self.namespace, topics)

        assert await asyncio.to_thread(judge) == []

    async def ask_again(self, urls: list[str], asked: list[Asked]) -> None:
        """Every event once more: the same answers, and nothing new."""
        before = {a.asked.key: a.body for a in self.client.history if a.kind == "ok"}
        for attempt in await self.client.load(urls, asked):
            assert before.get(attempt.asked.key, attempt.body) == attempt.body


def plan_of(service: Service) -> Plan:
    return Plan.decode(service.env[PLAN_ENV])


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Client() as client:
        yield client


@pytest.fixture(scope="session")
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Lets processes share compiled modules, whatever the caller's settings: each starts in half the time."""
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("bytecode"))}


@contextlib.contextmanager
def staged(stage: Stage) -> Iterator[Stage]:
    """Processes of a stage, which end with the block; none may have met a bug."""
    try:
        yield stage
    finally:
        for service in stage.services:
            service.kill()
    for service in stage.services:
        log = service.log.read_text() if service.log.exists() else ""
        assert not any(sign in log for sign in ("Traceback", '"bug"')), f"a bug in {service.name}\n{service.tail(60)}"


@pytest.fixture
def stage(
    tmp_path: Path, kafka: Kafka, redis: Redis, namespace: str, client: Client, bytecode: dict[str, str]
) -> Iterator[Stage]:
    """Processes on the run's own store."""
    with staged(Stage(tmp_path, kafka, redis, namespace, client, bytecode)) as stage:
        yield stage


@pytest.fixture
def own_stage(
    tmp_path: Path, kafka: Kafka, own_redis: Redis, namespace: str, client: Client, bytecode: dict[str, str]
) -> Iterator[Stage]:
    """Processes on a Redis that the test may flush, pause and restart."""
    with staged(Stage(tmp_path, kafka, own_redis, namespace, client, bytecode)) as stage:
        yield stage


@pytest.fixture
def topic(make_topic: MakeTopic) -> str:
    return make_topic(3)


@pytest.fixture(scope="module")
def transport() -> str:
    """How the POSTs of `served` reach the app; a module that has this fixture with both has its tests run both ways."""
    return "direct"


@pytest.fixture(scope="module")
def served(kafka: Kafka, redis: Redis, tmp_path_factory: pytest.TempPathFactory, transport: str) -> Iterator[Service]:
    """One process that a module's tests share."""
    environment = {**SETTINGS, "FENCEPOST_NAMESPACE": f"m-{uuid.uuid4().hex[:12]}"}
    environment["FENCEPOST_BODY_BYTES_MAX"] = "2000000"
    environment["FENCEPOST_TRANSPORT"] = transport
    with Service(tmp_path_factory.mktemp("served"), kafka=kafka.bootstrap, redis=redis.url, env=environment) as service:
        yield service
    assert "Traceback" not in service.log.read_text(), service.tail(60)
