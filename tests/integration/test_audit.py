"""The audit of what the service left behind: copies of an `idempotent` topic are named with their cause."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from tests.conftest import MakeTopic
from tests.integration.auditing import FINDINGS, Audit
from tests.integration.client import events
from tests.integration.conftest import Stage
from tests.integration.judge import read_committed
from tests.integration.plan import Fault
from tests.integration.test_idempotent import rules_for


async def test_the_audit_names_the_copies_that_a_kill_under_load_left(
    stage: Stage, make_topic: MakeTopic, tmp_path: Path
) -> None:
    """The process comes back under its name; its clients send again; both guarantees in one run of the audit."""
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
    job = Audit(stage.kafka.bootstrap, stage.namespace, tmp_path, [plain, exact])
    status, report = await asyncio.to_thread(job.carry_out)
    assert status == FINDINGS
    named = {finding["key"]: (finding["kind"], finding["cause"], finding["topic"]) for finding in report["findings"]}
    assert named == dict.fromkeys(twice, ("duplicate", "producer_restart", plain))
    balance = report["balance"]
    assert (balance["duplicated"], balance["lost"], balance["stuck"], balance["conflicted"]) == (len(twice), 0, 0, 0)
