"""Records of ledger and journal that cannot be decoded: what they may have held accuses nobody, and is called a gap."""

import time
from pathlib import Path
from typing import Any, Final

import pytest

from deploy.stack import Kafka
from service.contract import wire
from tests.spark.conftest import Audit
from tests.spark.history import TIMEOUT_S, History, Writer
from tests.spark.rows import DAY_MS, HOUR_MS
from tests.spark.runs import Ran

LATER_S: Final = 3600.0
GAP: Final = "evidence_gap"
DAMAGED, HEALTHY = Writer(0, 1000, 0, "a:1"), Writer(1, 1001, 0, "b:1")


class Damaged:
    """A history whose ledger partition 0 has a damaged record, and the runs of the job on it."""

    def __init__(self, kafka: Kafka, audit: Audit, rules: Path) -> None:
        self.history = History(kafka.bootstrap, "undecoded", begun_ms=int(time.time() * 1000) - 4 * DAY_MS)
        self.orders, self.telemetry = (self.history.topic(f"undecoded-{name}", 2) for name in ("orders", "telemetry"))
        rules.write_text(f'[[topics]]\npattern = "{self.telemetry}"\nguarantee = "idempotent"\n')
        self.at = self.history.now_ms - 2 * HOUR_MS
        self.old = self.history.now_ms - 2 * DAY_MS
        self._audit, self._rules = audit, str(rules)

    def run(self, lake: str = "lake") -> Ran:
        return self._audit(self.history, later_s=LATER_S, rules=self._rules, lake=lake)

    def deliver_damaged(self, writer: Writer, *keys: str, partition: int = 0) -> None:
        """Commit events with a ledger record that was cut, and no answers."""
        history, producer = self.history, self.history.transactional(writer)
        producer.begin_transaction()
        written = history.send(producer, self.orders, keys, writer, at=self.at, partition=partition)
        entries = [one.entry() for one in written]
        whole = wire.LedgerRecord(writer.slot, writer.producer_id, writer.epoch, writer.instance, entries, {}).encode()
        history.raw(producer, wire.ledger_topic(history.namespace), whole[: len(whole) // 2], writer.slot)
        producer.commit_transaction(TIMEOUT_S)

    def send(self, key: str, writer: Writer, at: int, topic: str | None = None) -> None:
        """Write a record with Fencepost's header that no ledger record names."""
        self.history.send(self.history.plain, topic or self.orders, [key], writer, at=at)

    def doubt(self, key: str, at: int) -> None:
        """Answer 504, and nothing else."""
        fields: dict[str, Any] = {"code": "outcome-unknown", "replayed": False, "latency_ms": 1.0, "topic": self.orders}
        answer = wire.encode_answer(
            id=wire.event_id(key), fp=bytes(8), at=at, status=504, partition=None, offset=None, **fields
        )
        self.history.answers([answer])

    def gaps(self, ran: Ran) -> dict[tuple[str, str, int | None], tuple[int, int | None, int | None]]:
        """Return count, first and last offset of each gap, by cause, topic and partition."""
        return {
            (one["cause"], one["topic"], one["partition"]): (one["count"], one["first_offset"], one["last_offset"])
            for one in ran.document["findings"]
            if one["kind"] == GAP
        }


@pytest.fixture(scope="module")
def damaged(kafka: Kafka, audit: Audit, tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return Damaged(kafka, audit, tmp_path_factory.mktemp("rules") / "rules.toml")


@pytest.fixture(scope="module")
def runs(damaged: Damaged) -> tuple[Ran, Ran]:
    """Two runs: before the first one a record of the ledger was damaged, before the second one others, and one of the
    journal."""
    history = damaged.history
    ledger, requests = wire.ledger_topic(history.namespace), wire.requests_topic(history.namespace)
    producer = history.transactional(HEALTHY)
    history.deliver(producer, HEALTHY, damaged.orders, ["fine"], at=damaged.at)
    damaged.deliver_damaged(DAMAGED, "covered-1", "covered-2", "covered-3")
    damaged.send("phantom of another slot", HEALTHY, damaged.at)
    damaged.send("phantom of another day", DAMAGED, damaged.old)
    damaged.send("phantom accepted later", DAMAGED, history.now_ms + HOUR_MS // 2)
    damaged.send("unanswered", DAMAGED, damaged.at, damaged.telemetry)
    damaged.doubt("in doubt", damaged.at)
    damaged.doubt("in doubt of another day", damaged.old)
    first = damaged.run()
    damaged.deliver_damaged(HEALTHY, "covered-4", partition=1)
    history.raw(history.plain, requests, b"\xff")
    history.raw(history.plain, ledger, None, DAMAGED.slot)
    return first, damaged.run()


def test_a_record_whose_ledger_record_cannot_be_decoded_is_a_gap_and_no_phantom(
    damaged: Damaged, runs: tuple[Ran, Ran]
) -> None:
    """The record may have its entry there. So no phantom is proven of that slot and time; of any other it is."""
    first, _ = runs
    phantoms = {key for kind, _, key in first.findings() if kind == "phantom"}
    named = {"phantom of another slot", "phantom of another day", "phantom accepted later", "unanswered"}
    assert phantoms == named
    assert first.document["balance"]["phantom"] == len(named)


def test_the_gap_names_the_undecoded_record_and_counts_the_findings_that_it_withholds(
    damaged: Damaged, runs: tuple[Ran, Ran]
) -> None:
    first, _ = runs
    ledger = wire.ledger_topic(damaged.history.namespace)
    gaps = damaged.gaps(first)
    assert gaps.keys() == {
        ("undecoded", ledger, DAMAGED.slot),
        ("ledger_undecoded", damaged.orders, 0),
        ("ledger_undecoded", damaged.orders, None),
    }
    count, undecoded, last = gaps["undecoded", ledger, DAMAGED.slot]
    assert (count, undecoded) == (1, last)
    assert gaps["ledger_undecoded", damaged.orders, 0][0] == 3
    assert gaps["ledger_undecoded", damaged.orders, None] == (1, None, None)
    assert first.document["run"]["verdict"] == "findings"


def test_an_answer_that_an_undecoded_record_may_settle_is_unprovable_and_not_stuck(
    damaged: Damaged, runs: tuple[Ran, Ran]
) -> None:
    first, _ = runs
    stuck = {one["id"] for one in first.document["findings"] if one["kind"] == "stuck"}
    assert stuck == {wire.event_id("in doubt of another day").hex()}
    balance = first.document["balance"]
    assert {name: balance[name] for name in ("accepted", "delivered_once", "stuck", "unprovable")} == {
        "accepted": 3,
        "delivered_once": 1,
        "stuck": 1,
        "unprovable": 1,
    }


def test_a_phantom_that_was_proven_stays_one_when_a_later_ledger_record_cannot_be_decoded(
    damaged: Damaged, runs: tuple[Ran, Ran]
) -> None:
    """Its entry would have been in the ledger when its record was read. An answer may come at any time."""
    _, second = runs
    phantoms = {key for kind, _, key in second.findings() if kind == "phantom"}
    assert phantoms == {"phantom of another slot", "phantom of another day", "phantom accepted later"}
    gaps = damaged.gaps(second)
    assert {
        (topic, partition): count for (cause, topic, partition), (count, _, _) in gaps.items() if cause != "undecoded"
    } == {
        (damaged.orders, 0): 3,
        (damaged.orders, 1): 1,
        (damaged.orders, None): 1,
        (damaged.telemetry, 0): 1,
    }


def test_a_run_over_all_withholds_what_the_runs_one_after_the_other_may_prove(
    damaged: Damaged, runs: tuple[Ran, Ran]
) -> None:
    """It does not know that the record was read before the ledger record was written."""
    whole = damaged.run("whole")
    phantoms = {key for kind, _, key in whole.findings() if kind == "phantom"}
    assert phantoms == {"phantom of another day", "phantom accepted later"}
