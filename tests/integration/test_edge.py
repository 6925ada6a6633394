"""Tests the service with clients that others wrote: those that repeat requests by themselves, and schemathesis.

The connections of the first are cut, and each event is in Kafka once.
"""

import asyncio
import itertools
import json
import os
import random
import shutil
from pathlib import Path
from typing import Final

import pytest
import stripe

from deploy.stack import Kafka, Redis
from tests import go_tools
from tests.edge.fuzz import Plan, run
from tests.edge.stack import edge
from tests.integration.conftest import SETTINGS, Stage
from tests.integration.cutting import CuttingProxy, Fault
from tests.integration.judge import ledger_faults, read_committed

GO_PROGRAM: Final = Path(__file__).with_name("repeating.go")
GO_S: Final = 240.0
ENDS: Final[tuple[Fault, ...]] = ("unanswered", "behind")
SECRET: Final = "whsec_b2xkIG9sZCBvbGQgb2xk"


@pytest.mark.skipif(shutil.which("go") is None, reason="no go on PATH, which runs a client: install Go")
async def test_a_post_that_go_repeats_by_itself_is_written_once(stage: Stage, topic: str) -> None:
    """Go repeats only on connections that were used before, so each second request of a connection is cut off."""
    await asyncio.to_thread(go_tools.compile_library)
    service = await stage.started()
    count, ends = 24, itertools.cycle(ENDS)

    def choose(number: int) -> Fault:
        return next(ends) if number else "nothing"

    async with CuttingProxy(service.port, choose) as proxy:
        command = ["go", "run", str(GO_PROGRAM), f"http://127.0.0.1:{proxy.port}/events", topic, str(count)]
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, **go_tools.QUICK}
        go = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment)
        async with asyncio.timeout(GO_S):
            out, errors = await go.communicate()
    assert go.returncode == 0, errors.decode()
    sent = [json.loads(line) for line in out.splitlines()]
    assert [each["status"] for each in sent] == [201] * count
    assert [each["attempts"] for each in sent] == [1, *[2] * (count - 1)]
    assert proxy.faults == {"nothing": count, "unanswered": count // 2, "behind": count // 2 - 1}
    assert all(each["replayed"] for each in sent[1::2])  # their first attempt was answered to the proxy
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    assert sorted(int(record.value or b"") for record in records) == [*range(count)]
    assert await asyncio.to_thread(ledger_faults, stage.kafka.bootstrap, stage.namespace, [topic]) == []


def rules_for(folder: Path, topic: str) -> Path:
    """Stripe's client sends JSON only to paths that begin with /v2, so that is the name of the source."""
    (folder / "stripe.secret").write_text(SECRET)
    path = folder / "rules.toml"
    path.write_text(
        f"""
[[sources]]
name = "v2"
topic = "{topic}"
idempotency_key = {{ header = "Idempotency-Key" }}
signature = {{ scheme = "stripe", secret_files = ["stripe.secret"] }}
"""
    )
    return path


def deliver(port: int, numbers: range) -> list[int]:
    """Deliver by Stripe's client, which makes a key for each call, and repeats the call with it; returns the statuses.

    The retries are those of the library; a 4xx raises its error.
    """
    http_client = stripe.RequestsClient(timeout=20)
    base = f"http://127.0.0.1:{port}/sources"
    client = stripe.StripeClient(
        "sk_test_1", base_addresses={"api": base}, http_client=http_client, max_network_retries=50
    )
    try:
        statuses = []
        for n in numbers:
            event = {"id": f"evt_{n}", "type": "charge.succeeded", "n": n}
            signature = stripe.WebhookSignature.generate_signature_header(json.dumps(event), SECRET)
            answer = client.raw_request("post", "/v2", headers={"Stripe-Signature": signature}, **event)
            statuses.append(answer.code)
        return statuses
    finally:
        http_client.close()  # type: ignore[no-untyped-call]


async def test_calls_that_stripe_s_client_repeats_by_itself_are_written_once(
    stage: Stage, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stripe, "enable_telemetry", False)  # it would write a file into the home folder
    monkeypatch.setattr(stripe.HTTPClient, "INITIAL_DELAY", 0.01)
    monkeypatch.setattr(stripe.HTTPClient, "MAX_DELAY", 0.1)
    service = await stage.started(rules=rules_for(tmp_path, topic))
    dice = random.Random(7)

    def choose(_: int) -> Fault:
        return dice.choice(("nothing", "nothing", "amid", "behind", "unanswered"))

    async with CuttingProxy(service.port, choose) as proxy:
        shares = (asyncio.to_thread(deliver, proxy.port, range(n, n + 15)) for n in range(0, 60, 15))
        statuses = [status for share in await asyncio.gather(*shares) for status in share]
    assert statuses == [201] * 60
    assert min(proxy.faults["amid"], proxy.faults["behind"], proxy.faults["unanswered"]) > 5
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    assert sorted(json.loads(record.value or b"")["n"] for record in records) == [*range(60)]


async def test_answers_to_generated_requests_are_those_that_the_document_promises(
    kafka: Kafka, redis: Redis, tmp_path: Path
) -> None:
    """A few random requests of each operation; `python -m tests.edge` makes many, with values at each bound too."""
    with edge(tmp_path, kafka, redis, SETTINGS) as target:
        plan = Plan(examples=4, seed=1, phases=("fuzzing",), response_s=20.0)
        found = await asyncio.to_thread(run, target.service.url, target.world, tmp_path, plan)
        assert found.passed, found.output
        assert {200, 201, 207, 400, 404} <= found.total.keys()
        assert len(found.statuses) == 23
        assert await asyncio.to_thread(target.faults) == []
