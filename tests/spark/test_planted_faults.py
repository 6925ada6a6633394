"""One history with every kind of finding and every cause, on a real broker: all are found, and nothing else.

The job compiles the plans of the first run, which takes minutes in a JVM that has just started. LONG_SPARK_FILES
(tests/conftest.py) has this file at a place at which the JVM of ./tests/run is warm.
"""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterator

import jsonschema
import pytest
from pyspark.sql import SparkSession

from deploy.stack import Kafka
from service.contract import SharedSettings
from service.contract.wire.headers import STAMP_HEADER, Stamp
from service.contract.wire.ids import event_id
from service.contract.wire.names import ledger_topic, requests_topic
from spark import job
from spark.report.model import schema
from spark.settings import Options, Settings, Webhook
from spark.steps import dry_run
from tests.spark.conftest import Audit, Ran
from tests.spark.history import History, Writer, Written
from tests.spark.receiver import Receiver, receiving
from tests.spark.runs import as_large
from tests.spark.times import DAY_MS, HOUR_MS

TTL_S = 86_400
NAMESPACE = "every-fault"
ORDERS, FOREIGN, ARCHIVE = "every-orders", "every-foreign", "every-archive"

Expected = tuple[str, str | None, str | None]


class Faults:
    """Writes the history, and notes the expected findings and balance."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.expected: set[Expected] = set()
        self.once: set[str] = set()
        self.balance: Counter[str] = Counter()
        self.restarts = 0
        history.topic(ORDERS, 4)
        history.topic(FOREIGN, 2)
        history.topic(ARCHIVE, 1)
        self.at = history.now_ms - 2 * HOUR_MS

    def new_writer(self, slot: int, instance: str = "host:8000") -> Writer:
        """Return a writer of a slot with a new producer id, as after a restart."""
        self.restarts += 1
        return Writer(slot, 1000 + self.restarts, 0, instance)

    def delivered(self, key: str, *writers: Writer, at: tuple[int, ...] = (), **more: object) -> None:
        """Write and commit the same event by each of these writers."""
        for nth, writer in enumerate(writers):
            accepted = at[nth] if at else self.at
            producer = self.history.transactional(writer)
            self.history.deliver(producer, writer, ORDERS, [key], at=accepted, value=b'"$key"', **more)  # type: ignore[arg-type]

    def write(self) -> None:
        self.healthy()
        self.repeated()
        self.foreign()
        self.missing()
        self.in_doubt()
        self.unreadable()

    def healthy(self) -> None:
        history, writer = self.history, self.new_writer(0)
        producer = history.transactional(writer)
        history.begin(producer, writer)
        keys = [f"once-{n}" for n in range(40)]
        written = history.deliver(producer, writer, ORDERS, keys, at=self.at, value=b'{"of":"$key"}', record_key=b"k")
        history.answers([written[0].answer(replayed=True), written[1].answer(422), written[2].answer(504)], 1)
        history.deliver(producer, writer, ORDERS, ["tombstone"], at=self.at, value=None, record_key=b"gone")
        # Only in the ledger: the journal may lack answers.
        history.deliver(producer, writer, ORDERS, ["unanswered"], at=self.at, value=b"1", answer=False)
        # Aborted, then written again by the next producer: one delivery.
        producer.begin_transaction()
        aborted = history.send(producer, ORDERS, ["aborted"], writer, at=self.at)
        history.ledger(producer, writer, [one.entry() for one in aborted])
        producer.abort_transaction(30)
        self.delivered("aborted", self.new_writer(0))
        # Store recovery appends a ledger record without entries.
        history.ledger(history.plain, writer, [])
        self.balance["delivered_once"] += 43

    def repeated(self) -> None:
        self.delivered("restart", self.new_writer(1), self.new_writer(1))
        self.expected.add(("duplicate", "producer_restart", "restart"))
        self.delivered("same-host", self.new_writer(1, "a:1"), self.new_writer(2, "a:1"))
        self.expected.add(("duplicate", "producer_restart", "same-host"))
        self.delivered("dual", self.new_writer(1, "a:1"), self.new_writer(2, "b:2"))
        self.expected.add(("duplicate", "dual_producer", "dual"))
        writer = self.new_writer(3)
        self.delivered("rewrite", writer, writer)
        self.expected.add(("duplicate", "rewrite", "rewrite"))
        # In other hours, so that only the pass over all ids finds them.
        writer = self.new_writer(0)
        self.delivered("expired", writer, self.new_writer(0), at=(self.at - TTL_S * 1000 - 1, self.at))
        self.expected.add(("duplicate", "expired_key", "expired"))
        self.delivered(
            "forgotten", self.new_writer(2, "c:1"), self.new_writer(3, "d:1"), at=(self.at - 5 * HOUR_MS, self.at)
        )
        self.expected.add(("duplicate", "dual_producer", "forgotten"))
        self.balance["duplicated"] += 6
        history = self.history
        for value in (b"1", b"2"):
            writer = self.new_writer(1)
            producer = history.transactional(writer)
            history.deliver(producer, writer, ORDERS, ["conflict"], at=self.at, value=value)
        self.expected.add(("conflict", "producer_restart", "conflict"))
        self.balance["conflicted"] += 1
        writer = self.new_writer(2)
        producer = history.transactional(writer)
        same = {"value": b"same", "record_key": b"customer", "at": self.at}
        history.deliver(producer, writer, ORDERS, ["first-key", "second-key"], **same)  # type: ignore[arg-type]
        self.expected.add(("client_duplicate", "new_key", "either-key"))
        # Without a record key, and again a day later: no retry of the client.
        history.deliver(producer, writer, ORDERS, ["tick-1", "tick-2"], value=b"tick", at=self.at)
        history.deliver(producer, writer, ORDERS, ["daily-1"], value=b"daily", record_key=b"d", at=self.at)
        before = self.at - TTL_S * 1000
        history.deliver(producer, writer, ORDERS, ["daily-2"], value=b"daily", record_key=b"d", at=before)
        self.balance["delivered_once"] += 6

    def foreign(self) -> None:
        history = self.history
        writer = self.new_writer(1)
        self.delivered("copied", writer, record_key=b"copied")
        history.send(history.plain, ORDERS, ["copied"], writer, at=self.at, value=b'"$key"', record_key=b"copied")
        self.expected.add(("duplicate", "foreign_writer", "copied"))
        self.delivered("bare", self.new_writer(1), headers=[("h", b"1")])
        history.send(
            history.plain, ORDERS, ["bare"], None, value=b'"$key"', headers=[("traceparent", b"t"), ("h", b"1")]
        )
        self.expected.add(("duplicate", "foreign_writer", "bare"))
        # Requested with a partition: the copy has the fingerprint with that partition.
        self.delivered("placed", self.new_writer(1), partition=2, asked_partition=2)
        history.send(history.plain, ORDERS, ["placed"], None, value=b'"$key"', partition=2)
        self.expected.add(("duplicate", "foreign_writer", "placed"))
        self.balance["duplicated"] += 3
        self.delivered("altered", self.new_writer(1))
        history.send(history.plain, ORDERS, ["altered"], None, value=b"other")
        self.expected.add(("conflict", "foreign_writer", "altered"))
        self.balance["conflicted"] += 1
        history.send(history.plain, FOREIGN, [f"f-{n}" for n in range(20)], None, value=b'"$key"')
        history.send(history.plain, FOREIGN, ["f-3"], None, value=b'"$key"', partition=1)
        self.expected.add(("duplicate", "foreign_writer", "f-3"))
        history.send(history.plain, FOREIGN, ["f-many"] * 300, None, value=b'"$key"')
        self.expected.add(("duplicate", "foreign_writer", "f-many"))
        history.send(history.plain, FOREIGN, ["f-many-values"] * 299, None, value=b"1")
        history.send(history.plain, FOREIGN, ["f-many-values"], None, value=b"2")
        self.expected.add(("conflict", "foreign_writer", "f-many-values"))
        for partition in (0, 0, 1):
            history.raw(history.plain, FOREIGN, b"x", partition)
        self.expected |= {("unkeyed", None, f"{FOREIGN}[0]"), ("unkeyed", None, f"{FOREIGN}[1]")}
        # Two fencepost headers: the first counts.
        twice = Stamp(event_id("z"), bytes(8), self.at, 9, 9, 9, "other:1")
        self.delivered("twice", self.new_writer(0), headers=[(STAMP_HEADER, twice.encode())])
        self.balance["delivered_once"] += 1
        phantom = self.new_writer(3)
        history.send(history.plain, ORDERS, ["phantom"], phantom, at=self.at)
        self.expected.add(("phantom", None, "phantom"))
        self.balance["phantom"] += 1

    def missing(self) -> None:
        history, writer = self.history, self.new_writer(0)
        producer = history.transactional(writer)
        one = history.deliver(producer, writer, ORDERS, ["there"], at=self.at)[0]
        self.balance["delivered_once"] += 1
        lost = {"id": event_id("lost-other"), "fp": bytes(8)}
        beyond = {"id": event_id("lost-beyond"), "fp": bytes(8), "offset": 1_000_000}
        producer.begin_transaction()
        history.ledger(producer, writer, [one.entry(**lost), one.entry(**beyond)])
        producer.commit_transaction(30)
        history.answers([one.answer(id=event_id("lost-answer"), offset=2_000_000)])
        self.expected |= {("lost", "ledger", None), ("lost", "answer", None)}
        self.balance["lost"] += 3
        # The first records of the archive are deleted before a run reads them.
        written = history.deliver(
            producer, writer, ARCHIVE, [f"old-{n}" for n in range(5)], at=self.at, value=b'"$key"'
        )
        history.delete_before(ARCHIVE, 0, written[2].offset)
        self.expected.add(("evidence_gap", "below_start", f"{ARCHIVE}[0]"))
        self.balance["unprovable"] += 2
        self.balance["delivered_once"] += 3
        # An open transaction in partition 3, and an entry for an offset after it.
        open_writer = self.new_writer(3)
        self.open = history.transactional(open_writer)
        self.open.begin_transaction()
        history.send(self.open, ORDERS, ["open"], open_writer, at=self.at, partition=3)
        blocked_entry = {"id": event_id("blocked-entry"), "partition": 3, "offset": 5}
        producer.begin_transaction()
        history.ledger(producer, writer, [one.entry(**blocked_entry)])
        producer.commit_transaction(30)
        self.balance["pending"] += 1

    def in_doubt(self) -> None:
        history = self.history
        model = history.send(history.plain, FOREIGN, ["f-model"], None)[0]

        def answered(key: str, *statuses: int) -> None:
            history.answers([model.answer(status, id=event_id(key), at=self.at, topic=ORDERS) for status in statuses])

        answered("stuck-504", 504, 409)
        answered("stuck-202", 202)
        self.expected |= {("stuck", "504", None), ("stuck", "202", None)}
        self.balance["stuck"] += 2
        # Freed by a 503, or never accepted.
        answered("free", 504, 503)
        answered("refused", 422)
        self.delivered("late", self.new_writer(0))
        answered("late", 504)
        self.balance["delivered_once"] += 1

    def unreadable(self) -> None:
        history = self.history
        ledger, requests = ledger_topic(history.namespace), requests_topic(history.namespace)
        for value in (b"", b"{", b"\xff\xfe", b'{"v":0,"slot":0,"pid":1,"epoch":0,"instance":"x","entries":[]}', None):
            history.raw(history.plain, ledger, value)
            history.raw(history.plain, requests, value)
        history.raw(
            history.plain, requests, b'{"v":1,"instance":"x","answers":[{"id":"12","fp":"","at":1,"status":201}]}'
        )
        history.raw(history.plain, ORDERS, b"x", headers=[(STAMP_HEADER, b"1;nonsense")])
        self.rejects = 12
        self.expected |= {("evidence_gap", "undecoded", f"{name}[0]") for name in (ledger, requests, ORDERS)}


@pytest.fixture(scope="module")
def faults(kafka: Kafka) -> Iterator[Faults]:
    written = Faults(History(kafka.bootstrap, NAMESPACE, begun_ms=int(time.time() * 1000) - 3 * DAY_MS))
    written.write()
    yield written
    written.open.abort_transaction(30)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rules") / "rules.toml"
    path.write_text(f'[[topics]]\npattern = "{FOREIGN}"\n')
    return str(path)


@pytest.fixture(scope="module")
def receiver() -> Iterator[tuple[Receiver, Webhook]]:
    with receiving() as found:
        yield found


@pytest.fixture(scope="module")
def ran(spark: SparkSession, audit: Audit, faults: Faults, rules: str, receiver: tuple[Receiver, Webhook]) -> Ran:
    with as_large(spark):
        return audit(faults.history, later_s=3600, key_ttl_s=TTL_S, rules=rules, publish=True, webhook=receiver[1])


def test_each_planted_fault_is_found_with_its_cause_and_nothing_else(ran: Ran, faults: Faults) -> None:
    names = {"first-key": "either-key", "second-key": "either-key"}
    found = {(kind, cause, names.get(key or "", key)) for kind, cause, key in ran.findings()}
    assert found == faults.expected
    assert ran.made.status == 3


def test_the_balance_closes_over_the_ids_that_were_accepted(ran: Ran, faults: Faults) -> None:
    balance = dict(ran.document["balance"])
    del balance["records"]
    accepted = sum(count for name, count in faults.balance.items() if name != "phantom")
    assert balance == {"accepted": accepted, **dict.fromkeys(balance, 0), **faults.balance} | {"accepted": accepted}


def test_a_duplicate_names_all_its_copies_and_the_cause_of_each(ran: Ran) -> None:
    one = next(one for one in ran.document["findings"] if one["key"] == "restart")
    first, second = one["coordinates"]
    assert (first["cause"], second["cause"]) == (None, "producer_restart")
    assert first["slot"] == second["slot"] == 1
    assert first["pid"] != second["pid"]
    assert first["offset"] < second["offset"]
    assert one["count"] == 2


def test_many_copies_are_counted_beyond_the_coordinates_that_are_kept(ran: Ran) -> None:
    many = next(one for one in ran.document["findings"] if one["key"] == "f-many")
    assert many["count"] == 300
    assert len(many["coordinates"]) == 128
    records = {(row["kind"], row["topic"]): row["records"] for row in ran.document["causes"]}
    assert (records["duplicate", FOREIGN], records["conflict", FOREIGN]) == (1 + 299, 299)


def test_a_lost_event_is_reported_with_its_claimed_coordinates(ran: Ran) -> None:
    lost = [one for one in ran.document["findings"] if one["kind"] == "lost"]
    claimed = {(one["id"], copy["offset"]) for one in lost for copy in one["coordinates"]}
    assert (event_id("lost-beyond").hex(), 1_000_000) in claimed
    assert (event_id("lost-answer").hex(), 2_000_000) in claimed
    assert len(claimed) == 3


def test_the_open_transaction_that_blocks_a_verdict_is_named(ran: Ran) -> None:
    (held,) = ran.document["evidence"]["held_up"]
    assert (held["topic"], held["partition"], held["offset"]) == (ORDERS, 3, 0)
    assert held["age_s"] > 3500


def test_undecodable_records_are_counted(ran: Ran, faults: Faults) -> None:
    assert ran.document["evidence"]["rejects"] == faults.rejects


def test_unkeyed_records_are_one_finding_a_partition(ran: Ran) -> None:
    counts = {one["partition"]: one["count"] for one in ran.document["findings"] if one["kind"] == "unkeyed"}
    assert counts == {0: 2, 1: 1}


def test_a_second_run_without_new_records_finds_the_same_and_tells_nobody(
    spark: SparkSession, ran: Ran, audit: Audit, faults: Faults, rules: str, receiver: tuple[Receiver, Webhook]
) -> None:
    assert ran.document["webhook"] == {"findings": len(ran.document["findings"]), "error": None}
    before = ran.written()
    published = faults.history.published()
    # The topic has every finding, silenced or not.
    found = [{name: value for name, value in one.items() if name != "silenced"} for one in ran.document["findings"]]
    assert dict(published) == {one["finding_id"]: {"v": 1, **one} for one in found}
    shared = SharedSettings(kafka=faults.history.bootstrap, namespace=faults.history.namespace)
    settings = Settings(shared=shared, options=Options(lake=str(ran.lake), report="none"))
    assert "total      0 offsets" in dry_run.lines(job.preview(spark, settings, lambda line: None))
    made, hook = receiver
    again = audit(faults.history, later_s=3600, key_ttl_s=TTL_S, rules=rules, publish=True, webhook=hook)
    assert (again.document["webhook"], len(made.received)) == (None, 1)
    assert faults.history.published() == published
    assert again.document["run"]["number"] == ran.document["run"]["number"] + 1
    assert again.document["cost"]["offsets"] == 0
    assert again.written() == before


@pytest.mark.long
def test_a_run_without_the_pass_over_ids_misses_only_the_copies_of_other_hours(
    audit: Audit, faults: Faults, rules: str
) -> None:
    narrow = audit(faults.history, later_s=3600, key_ttl_s=TTL_S, rules=rules, lake="narrow", skip_ids=True)
    # Copies without header have no acceptance: they are in the hour of their timestamp.
    missed = {"expired", "forgotten", "either-key", "bare", "placed", "altered"}
    assert narrow.findings() == {finding for finding in faults.expected if finding[2] not in missed}


def test_the_page_and_the_metrics_have_the_numbers_of_the_report(ran: Ran) -> None:
    page = (ran.report / "report.html").read_text()
    assert f"{ran.document['run']['findings']:,} findings: 11 duplicates, 3 conflicts" in page
    assert "and 295 more" in page
    assert "every-orders[3]" in page
    assert "http" not in page.replace("http-equiv", "").lower().replace("http://www.w3.org", "")
    metrics = (ran.report / "metrics.prom").read_text()
    assert f'fencepost_audit_ids{{state="lost"}} {ran.document["balance"]["lost"]}' in metrics
    assert json.loads((ran.report / "report.json").read_text()) == ran.document
    jsonschema.Draft202012Validator(schema()).validate(ran.document)


def test_the_heat_map_counts_every_record_in_its_partition(ran: Ran) -> None:
    rows = {(row["topic"], row["partition"]): row for row in ran.document["map"]["rows"]}
    by_topic = {row["topic"]: row["records"] + row["unkeyed"] + row["rejects"] for row in ran.document["topics"]}
    for topic in (ORDERS, FOREIGN, ARCHIVE):
        assert sum(sum(row["records"]) for (name, _), row in rows.items() if name == topic) == by_topic[topic]
    assert sum(rows[FOREIGN, 1]["records"]) == 2
    assert sum(rows[FOREIGN, 1]["troubled"]) == 2  # a surplus copy, and a record without id
    copies = {(one["kind"], one["cause"]): 0 for one in ran.document["timeline"]}
    for one in ran.document["timeline"]:
        copies[one["kind"], one["cause"]] += one["records"]
    assert copies["duplicate", "producer_restart"] == 2
    assert copies["client_duplicate", "new_key"] == 1


@pytest.mark.long
def test_a_missing_record_of_an_old_event_is_lost_once_its_grace_is_over(
    kafka: Kafka, namespace: str, audit: Audit
) -> None:
    """The broker sets the timestamps of ledger and journal: their records are new, also for an old event."""
    history = History(kafka.bootstrap, namespace, begun_ms=int(time.time() * 1000) - 3 * DAY_MS)
    topic, writer, at = (
        history.topic(f"{history.namespace}-orders"),
        Writer(0, 1001, 0, "host:8000"),
        history.now_ms - HOUR_MS,
    )
    producer = history.transactional(writer)
    (there,) = history.deliver(producer, writer, topic, ["there"], at=at)

    def claimed_record(key: str) -> Written:
        return dataclasses.replace(there, key=key, id=event_id(key), offset=1000)

    producer.begin_transaction()
    history.ledger(producer, writer, [claimed_record("entered").entry()])
    producer.commit_transaction(30)
    history.answers([claimed_record("answered").answer(), claimed_record("in-doubt").answer(504)])
    history.send(history.plain, topic, ["unclaimed"], writer, at=at)

    waiting = audit(history)
    assert (waiting.findings(), waiting.document["balance"]["pending"]) == (set(), 3)
    later = audit(history, grace_s=0, later_s=1)
    assert {(kind, key) for kind, _, key in later.findings()} == {
        ("lost", None),
        ("stuck", None),
        ("phantom", "unclaimed"),
    }
    assert {name: later.document["balance"][name] for name in ("lost", "stuck", "pending")} == {
        "lost": 2,
        "stuck": 1,
        "pending": 0,
    }
