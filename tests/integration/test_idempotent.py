"""Tests the guarantee `idempotent`, chosen by rules, beside `exactly_once` in one process."""

import asyncio
import json
from collections import Counter
from pathlib import Path

from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.contract.wire.ledger import LedgerRecord, decode_ledger
from service.contract.wire.names import ledger_topic, requests_topic
from tests.conftest import MakeTopic
from tests.integration.client import Asked, events
from tests.integration.conftest import Stage
from tests.integration.judge import read_committed
from tests.integration.plan import Fault


def rules_for(folder: Path, topic: str) -> Path:
    path = folder / "rules.toml"
    path.write_text(f'[[topics]]\npattern = "{topic}"\nguarantee = "idempotent"\n')
    return path


async def test_one_process_serves_both_guarantees(stage: Stage, make_topic: MakeTopic, tmp_path: Path) -> None:
    plain, exact = make_topic(2), make_topic(2)
    service = await stage.started(rules=rules_for(tmp_path, plain))
    asked = events(plain, 60, "p") + events(exact, 60, "e")
    await stage.client.load([service.url], asked)
    await stage.ask_again([service.url], asked)

    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [plain])
    assert Counter(record.idempotency_key for record in records) == Counter(f"p-{n}" for n in range(60))
    stamps = {Stamp.decode(dict(record.headers)[STAMP_HEADER]) for record in records}
    assert {stamp.epoch for stamp in stamps} == {0}
    ledger = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [ledger_topic(stage.namespace)])
    named = {
        entry.topic
        for record in map(decode_ledger, (raw.value for raw in ledger))
        if isinstance(record, LedgerRecord)
        for entry in record.entries
    }
    assert named == {exact}
    await asyncio.to_thread(service.stop)
    journal = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [requests_topic(stage.namespace)])
    answers = [answer for raw in journal for answer in json.loads(raw.value or b"")["answers"]]
    first = {answer["id"]: (answer["topic"], answer["partition"], answer["offset"]) for answer in answers}
    assert first.items() >= {Stamp.decode(dict(r.headers)[STAMP_HEADER]).id.hex(): r.place for r in records}.items()


async def test_a_kill_leaves_a_copy_on_idempotent_topics_and_none_on_exactly_once_topics(
    stage: Stage, make_topic: MakeTopic, tmp_path: Path
) -> None:
    plain, exact = make_topic(1), make_topic(1)
    rules = rules_for(tmp_path, plain)
    heir = await stage.started(rules=rules, slots=1)
    for topic in (plain, exact):
        doomed = await stage.started(faults=(Fault("mark", "kill"),), rules=rules, slots=1)
        asked = Asked(f"in {topic}", topic, b"1")
        assert (await stage.client.post(doomed.url, asked)).kind == "info"
        assert doomed.wait(5) == -9
        await stage.client.settle([heir.url], asked)

    copies = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [plain])
    assert len(copies) == 2
    stamps = [Stamp.decode(dict(copy.headers)[STAMP_HEADER]) for copy in copies]
    assert len({stamp.producer_id for stamp in stamps}) == 2
    assert len({(stamp.id, stamp.fingerprint, stamp.accepted_at) for stamp in stamps}) == 1  # one hour of the audit
    assert len(await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [exact])) == 1


async def test_a_broker_that_is_away_leaves_doubt_and_a_retry_writes_again(
    stage: Stage, make_topic: MakeTopic, tmp_path: Path
) -> None:
    """The batch gets no answer from Kafka: 504, the claim is released, and a retry is written by a new producer."""
    plain = make_topic(1)
    service = await stage.started(rules=rules_for(tmp_path, plain), slots=1, request_timeout_ms=2000)
    before = Asked("before", plain, b"1")
    await stage.client.settle([service.url], before)
    stage.kafka.pause()
    try:
        doubtful = await stage.client.post(service.url, Asked("k", plain, b"1"))
        assert (doubtful.status, doubtful.code) == (504, "outcome-unknown")
    finally:
        stage.kafka.resume()
    again = await stage.client.settle([service.url], Asked("k", plain, b"1"))
    assert not again.replayed
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [plain])
    written = Counter(record.idempotency_key for record in records)
    assert written["before"] == 1
    assert written["k"] in (1, 2)
