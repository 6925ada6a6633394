"""Runs a service with the world's topics and rules."""

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from deploy.stack import Kafka, Redis, Service
from tests.edge.world import KNOWN, TOKEN, World, make_topics, write_rules
from tests.integration.judge import ledger_faults


@dataclass(frozen=True)
class Target:
    """A running service, its world, and its broker."""

    service: Service
    world: World
    kafka: Kafka
    namespace: str

    def faults(self) -> list[str]:
        """Look for bugs in the service's log, and for records that are not in the ledger, or there more than once."""
        log = self.service.log.read_text(errors="replace")
        bugs = [
            line for line in log.splitlines() if "Traceback" in line or '"bug"' in line or '"level":"error"' in line
        ]
        return bugs + ledger_faults(self.kafka.bootstrap, self.namespace, [self.world.topic])


@contextlib.contextmanager
def edge(folder: Path, kafka: Kafka, redis: Redis, settings: Mapping[str, str] | None = None) -> Iterator[Target]:
    """Start a service in a namespace of its own."""
    namespace = f"e-{uuid.uuid4().hex[:12]}"
    topic = f"{namespace}-events"
    make_topics(kafka, topic)
    cluster = kafka.admin().list_topics(timeout=10).cluster_id
    environment = {
        "FENCEPOST_NAMESPACE": namespace,
        "FENCEPOST_RULES": str(write_rules(folder, topic)),
        **(settings or {}),
    }
    world = World(topic, str(cluster), str(folder / "answers.tsv"))
    with Service(folder, kafka=kafka.bootstrap, redis=redis.url, env=environment) as service:
        headers = {"Authorization": f"Bearer {TOKEN}", "Idempotency-Key": KNOWN}
        answer = httpx.post(f"{service.url}/events", json={"topic": topic, "value": 0}, headers=headers, timeout=30.0)
        assert answer.status_code == httpx.codes.CREATED, answer.text
        yield Target(service, world, kafka, namespace)
