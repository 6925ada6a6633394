"""Tests the audit of the service's own records: copies in an `idempotent` topic are reported with their cause."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from deploy.stack import Kafka, Redis
from service.contract import SharedSettings
from spark import job
from spark.settings import Options, Settings
from tests.conftest import MakeTopic
from tests.integration.auditing import FINDINGS
from tests.integration.client import Client, events
from tests.integration.conftest import Stage, staged
from tests.integration.judge import read_committed
from tests.integration.plan import Fault
from tests.integration.test_idempotent import rules_for


@pytest.fixture
async def stage(tmp_path: Path, kafka: Kafka, redis: Redis, namespace: str) -> AsyncIterator[Stage]:
    async with Client() as client:
        with staged(Stage(tmp_path, kafka, redis, namespace, client)) as stage:
            yield stage


async def test_the_audit_names_the_copies_that_a_kill_under_load_left(
    stage: Stage, spark: SparkSession, make_topic: MakeTopic, tmp_path: Path
) -> None:
    """The process is started again with its name; its clients send again; both guarantees in one run of the audit."""
    plain, exact = make_topic(2), make_topic(2)
    settings: dict[str, Any] = {"rules": rules_for(tmp_path, plain), "instance": "phoenix", "slots": 2}
    first = await stage.started(faults=(Fault("plain.done", "kill", first=4),), **settings)
    urls = [first.url]
    asked = [event for pair in zip(events(plain, 150, "p"), events(exact, 150, "e"), strict=True) for event in pair]
    load = asyncio.create_task(stage.client.load(urls, asked, workers=16))
    assert await asyncio.to_thread(first.wait, 30) == -9
    urls[:] = [(await stage.started(**settings)).url]
    await load

    copies = Counter(r.idempotency_key for r in await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [plain]))
    twice = {key for key, count in copies.items() if count > 1}
    assert twice, "the kill was to come between a write and its mark"
    shared = SharedSettings(kafka=stage.kafka.bootstrap, namespace=stage.namespace)
    options = Options(lake=str(tmp_path / "lake"), report=str(tmp_path / "report"), topics=(plain, exact))
    made = job.run(spark, Settings(shared=shared, options=options), lambda line: None)
    assert made.status == FINDINGS
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    named = {finding["key"]: (finding["kind"], finding["cause"], finding["topic"]) for finding in report["findings"]}
    assert named == dict.fromkeys(twice, ("duplicate", "producer_restart", plain))
    balance = report["balance"]
    assert (balance["duplicated"], balance["lost"], balance["stuck"], balance["conflicted"]) == (len(twice), 0, 0, 0)
