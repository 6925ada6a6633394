"""Tests logs that change between runs: open transactions; topics that grow, are emptied, deleted, and recreated."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from deploy.stack import Kafka
from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER, Stamp
from service.contract.wire.ids import event_id, fingerprint
from service.contract.wire.ledger_entries import Entry
from service.contract.wire.names import ledger_topic, requests_topic, transactional_id
from spark.queries import show
from spark.reading import decode
from spark.tables import lake
from tests.spark.conftest import Audit
from tests.spark.history import TIMEOUT_S, History
from tests.spark.runs import Ran, cut
from tests.spark.stories import Stage, Stories, Story
from tests.spark.times import DAY_S, HOUR_MS, LATER_S
from tests.spark.views import Views, id_of


class ChangingStage(Stage):
    """Besides the history: the job, and the rules by which one topic is `idempotent`."""

    def __init__(self, spark: SparkSession, bootstrap: str, audit: Audit, rules: Path) -> None:
        super().__init__(bootstrap)
        self.spark = spark
        self.audit = audit
        self.rules = rules
        rules.write_text(
            f'[[topics]]\npattern = "{self.idempotent}"\nguarantee = "idempotent"\n'
            f'[[topics]]\npattern = "{self.foreign}"\n'
        )

    @property
    def idempotent(self) -> str:
        """Name the one topic with this guarantee."""
        return f"{self.history.namespace}-idempotent"

    @property
    def foreign(self) -> str:
        """Name the topic whose records have their key in the value."""
        return f"{self.history.namespace}-foreign"

    @property
    def shared(self) -> dict[str, Any]:
        """The options of all runs."""
        return {"rules": str(self.rules), "identity": {self.foreign: "get_json_object(cast(value as string), '$.id')"}}

    @property
    def runs(self) -> list[dict[str, Any]]:
        """With a later clock, or without the pass over all ids; the last one drops all hours."""
        options: list[dict[str, Any]] = [
            {"later_s": 0.0},
            {"later_s": LATER_S},
            {"later_s": LATER_S, "optimize": True},
            {"later_s": 3 * LATER_S, "skip_ids": True},
            {"later_s": 3 * LATER_S},
            {"later_s": 9 * DAY_S, "keep_days": 7, "optimize": True, "vacuum_h": 1},
        ]
        return [{**one, **self.shared} for one in options]

    def table(self, ran: Ran, name: str) -> list[dict[str, Any]]:
        """Return the rows of a table of the lake."""
        return [row.asDict(recursive=True) for row in lake.Lake(self.spark, str(ran.lake)).read(name).collect()]


def time_and_the_end_of_a_transaction_revise_a_verdict(stage: ChangingStage) -> Story:
    history, one, two = stage.history, stage.writer(), stage.writer()
    topic = history.topic(f"{history.namespace}-revised", 2)
    producer = history.transactional(one)
    there = history.deliver(producer, one, topic, ["there"])[0]
    producer.begin_transaction()
    history.ledger(producer, one, [there.entry(id=b"l" * 16, offset=1000)])
    producer.commit_transaction(30)
    slow = history.transactional(two)
    slow.begin_transaction()
    (late,) = history.send(slow, topic, ["late"], two, partition=1)
    history.ledger(slow, two, [late.entry()])
    history.answers([late.answer(504)])
    first = yield
    assert first.findings(topic) == set()
    assert (first.balance(topic)["pending"], first.balance(topic)["delivered_once"]) == (2, 1)
    held = {(log["topic"], log["partition"]) for log in first.document["evidence"]["held_up"]}
    assert held >= {(topic, 1), (f"{history.namespace}.ledger", two.slot)}
    assert not held & {(topic, 0), (f"{history.namespace}.ledger", one.slot)}
    # Long after, with the transaction still open: the 504 may still get a record, the offset past the end may not.
    second = yield
    assert second.findings(topic) == {("lost", "ledger", None)}
    assert second.balance(topic)["pending"] == 1
    slow.commit_transaction(30)
    third = yield
    assert third.findings(topic) == {("lost", "ledger", None)}
    assert (third.balance(topic)["pending"], third.balance(topic)["delivered_once"]) == (0, 2)


def a_loss_that_is_proven_after_an_open_transaction_ended_stays_when_a_compacted_log_grows(
    stage: ChangingStage,
) -> Story:
    yield
    history, one, two = stage.history, stage.writer(), stage.writer()
    topic = history.topic(f"{history.namespace}-proven-late", 1, {"cleanup.policy": "compact"})
    producer, slow = history.transactional(one), history.transactional(two)
    (there,) = history.deliver(producer, one, topic, ["proven-late"], record_key=b"k")
    slow.begin_transaction()
    history.send(slow, topic, ["proven-late-aborted"], two, record_key=b"k")
    history.answers([there.answer(id=event_id("proven-late-lost"), offset=7)])
    first = yield
    assert (first.findings(topic), first.balance(topic)["pending"]) == (set(), 1)
    slow.abort_transaction(30)
    second = yield
    assert second.findings(topic) == {("lost", "answer", None)}
    history.deliver(producer, one, topic, [f"proven-late-{n}" for n in range(20)], record_key=b"k", value=b'"$key"')
    for _ in range(2):
        ran = yield
        assert ran.findings(topic) == {("lost", "answer", None)}
        assert (ran.balance(topic)["lost"], ran.balance(topic)["unprovable"]) == (1, 0)


def no_record_is_a_phantom_while_an_open_transaction_blocks_its_ledger(stage: ChangingStage) -> Story:
    yield
    history, one, two = stage.history, stage.writer(), stage.writer()
    (topic,) = stage.topics("held")
    old_ms = history.now_ms - 30 * HOUR_MS
    slow = history.transactional(two)
    slow.begin_transaction()
    history.ledger(slow, two, [])
    # Its ledger entry is committed, behind an open transaction in that partition.
    (there,) = history.send(history.plain, topic, ["held"], two, at=old_ms, ts=old_ms)
    history.ledger(history.plain, two, [there.entry()])
    # Another slot's ledger names the topic, so that it is audited.
    history.deliver(history.transactional(one), one, topic, ["named"])
    first = yield
    assert (first.findings(topic), first.balance(topic)["delivered_once"]) == (set(), 1)
    slow.commit_transaction(30)
    second = yield
    assert (second.findings(topic), second.balance(topic)["delivered_once"]) == (set(), 2)


def events_of_a_topic_from_before_it_was_recreated_are_an_evidence_gap(stage: ChangingStage) -> Story:
    """Recreated before a run, and absent in one run and back in the next; with topic ids in the ledger or without.

    Without the id in the ledger, the time of the log's first record decides.
    """
    yield
    history, writer = stage.history, stage.writer()
    before, back = stage.topics("before", "back")

    def promise() -> None:
        producer = history.transactional(writer)
        for topic in (before, back):
            history.deliver(producer, writer, topic, [f"{topic}-{n}" for n in range(5)], answer=False)
            history.deliver(producer, writer, topic, [f"{topic}-old-{n}" for n in range(5)], topic_ids=False)

    def make_anew(topic: str) -> None:
        history.topic(topic)
        now_ms = int(time.time() * 1000)
        producer = history.transactional(writer)
        (first,) = history.deliver(producer, writer, topic, [f"{topic}-new"], at=now_ms, ts=now_ms)
        # In the present log there is no record at this offset.
        producer.begin_transaction()
        history.ledger(producer, writer, [first.entry(id=event_id(f"{topic}-lost"), offset=100)])
        producer.commit_transaction(30)

    promise()
    history.remove(before)
    history.remove(back)
    make_anew(before)
    first = yield
    lost = ("lost", "ledger", None)
    assert first.findings(before) == {("evidence_gap", "recreated", f"{before}[0]"), lost}
    assert first.findings(back) == {("evidence_gap", "topic_gone", f"{back}[0]")}
    make_anew(back)
    second = yield
    for topic in (before, back):
        assert second.findings(topic) == {("evidence_gap", "recreated", f"{topic}[0]"), lost}
    balance = second.balance(before, back)
    assert (balance["unprovable"], balance["lost"], balance["delivered_once"], balance["phantom"]) == (20, 2, 2, 0)
    gaps = [
        one for one in second.document["findings"] if one["kind"] == "evidence_gap" and one["topic"] in (before, back)
    ]
    assert [one["count"] for one in gaps] == [10, 10]


def proven_verdicts_stay_and_the_balance_closes_whatever_happens_to_the_logs(stage: ChangingStage) -> Story:
    """An open transaction, a deleted topic, a recreated topic; an id lost in one hour and duplicated in another."""
    yield
    history, one, two = stage.history, stage.writer(), stage.writer()
    topic, plain = stage.topics("proven", "idempotent")
    assert plain == stage.idempotent
    first, second = history.transactional(one), history.transactional(two)
    hours_ago = [history.now_ms - n * HOUR_MS for n in (30, 3)]
    there = history.deliver(first, one, topic, ["wide"], at=hours_ago[1])[0]
    history.deliver(second, two, topic, ["wide"], at=hours_ago[1])
    gone = there.entry(id=event_id("gone"), offset=2000)
    first.begin_transaction()
    history.ledger(first, one, [there.entry(offset=1000, at=hours_ago[0]), gone])
    first.commit_transaction(30)
    sent = history.send(history.plain, plain, ["answered", "in doubt"], one)
    history.answers([sent[0].answer(), sent[1].answer(504)])

    def balance(ran: Ran) -> dict[str, int]:
        counts = ran.balance(topic, plain)
        return {name: counts[name] for name in ran.document["balance"] if counts[name] and name != "records"}

    begun = yield
    assert balance(begun) == {"accepted": 4, "delivered_once": 2, "lost": 2}
    lost = {finding for finding in begun.findings(topic, plain) if finding[0] == "lost"}
    assert len(lost) == 2

    # An open transaction cannot be that of an earlier claim. The other topic's events were answered, if no ledger has
    # them.
    history.deliver(first, one, topic, ["meanwhile"], at=hours_ago[1])
    second.begin_transaction()
    history.send(second, topic, ["under way"], two)
    history.remove(plain)
    later = yield
    second.abort_transaction(30)
    assert balance(later) == {"accepted": 5, "delivered_once": 3, "lost": 2}
    assert lost <= later.findings(topic, plain)
    assert not {finding for finding in later.findings(topic, plain) if finding[0] == "phantom"}

    history.remove(topic)
    history.topic(topic)
    yield
    last = yield
    assert (balance(last)["accepted"], balance(last)["lost"]) == (5, 2)
    assert lost <= last.findings(topic, plain)


def a_copy_that_a_run_without_the_pass_over_ids_read_gets_its_id_in_the_next_pass(stage: ChangingStage) -> Story:
    """The key alone does not name the caller, in whose scope the event has its id."""
    yield
    yield
    yield
    history, writer = stage.history, stage.writer()
    (topic,) = stage.topics("scoped")
    producer = history.transactional(writer)
    stamp = Stamp(
        event_id("scoped", "caller"),
        fingerprint(topic, None, None, (), b"1"),
        history.now_ms,
        writer.slot,
        writer.producer_id,
        writer.epoch,
        writer.instance,
    )
    headers = [(KEY_HEADER, b"scoped"), (STAMP_HEADER, stamp.encode())]
    producer.begin_transaction()
    history.raw(producer, topic, b"1", headers=headers, timestamp=history.now_ms)
    entry = Entry(stamp.id, stamp.fingerprint, stamp.accepted_at, topic, 0, 0, history.now_ms)
    history.ledger(producer, writer, [entry])
    producer.commit_transaction(30)
    history.send(history.plain, topic, ["scoped"], None, value=b"1")
    without_pass = yield
    assert without_pass.findings(topic) == set()
    views = Views(stage.spark, history, without_pass.lake)
    assert views.register(topic) == 2
    with_pass = yield
    assert with_pass.findings(topic) == {("duplicate", "foreign_writer", "scoped")}
    assert views.rows(topic) == {stamp.id.hex(): (0, 0, b"1", True)}


def a_recreated_topic_gives_no_old_id_the_value_of_a_new_event(stage: ChangingStage) -> Story:
    """Registered before or after; another event is at each old offset, with and without Fencepost's header."""
    yield
    history, writer = stage.history, stage.writer()
    topic, late = stage.topics("viewed", "viewed-late")

    def write(name: str) -> None:
        producer = history.transactional(writer)
        for one in (topic, late):
            value = f"{one} {name}".encode()
            history.send(history.plain, one, [f"{one}-{name}-bare"], None, value=value)
            history.send(history.plain, one, [f"{one}-bare"], None, value=value)
            # Its offset is that of a record with Fencepost's header, and the other way round.
            its, other = (writer, None) if name == "old" else (None, writer)
            history.send(history.plain, one, [f"{one}-{name}-x"], its, value=value)
            history.send(history.plain, one, [f"{one}-{name}-y"], other, value=value)
            # Last, because the time of the marker that ends it is not known.
            history.deliver(producer, writer, one, [f"{one}-{name}-{n}" for n in range(3)], value=value)

    def ids(one: str, name: str) -> set[str]:
        keys = [*(f"{one}-{name}-{n}" for n in range(3)), *(f"{one}-{name}-{word}" for word in ("bare", "x", "y"))]
        return {id_of(key) for key in keys}

    write("old")
    ran = yield
    views = Views(stage.spark, history, ran.lake)
    assert views.register(topic) == 7
    for one in (topic, late):
        history.remove(one)
        history.topic(one)
    write("new")
    yield
    views.register(late)
    rows = views.rows(late)
    assert rows.keys() == ids(late, "new") | {id_of(f"{late}-bare")}
    assert {value for _, _, value, _ in rows.values()} == {f"{late} new".encode()}
    rows = views.rows(topic)
    assert rows.keys() >= ids(topic, "new") | ids(topic, "old")
    for name in ("old", "new"):
        assert {rows[id][2] for id in ids(topic, name)} == {f"{topic} {name}".encode()}
    # A record with and one without Fencepost's header, each where one with it is now, and one without it.
    for key in ("old-0", "old-bare", "old-x", "old-y"):
        lines = list(show.show(stage.spark, views.shared, str(ran.lake), f"{topic}-{key}"))
        assert "           is not in Kafka any more: another record has this offset now" in lines
        assert not [line for line in lines if line.startswith("  value")]
    for key in ("new-0", "new-bare"):
        lines = list(show.show(stage.spark, views.shared, str(ran.lake), f"{topic}-{key}"))
        assert f"  value    {topic} new" in lines


def records_that_compaction_took_unread_are_a_gap_and_never_lost(stage: ChangingStage) -> Story:
    yield
    history, writer = stage.history, stage.writer()
    config = {"cleanup.policy": "compact", "segment.ms": "1000", "min.cleanable.dirty.ratio": "0.001"}
    topic = history.topic(f"{history.namespace}-table", 1, config | {"delete.retention.ms": "0"})
    producer = history.transactional(writer)
    at = history.now_ms - HOUR_MS

    began_ms = int(time.time() * 1000)

    def deliver(key: str, record_key: bytes, nth: int, value: bytes | None = b'"$key"') -> int:
        """Write an event; only a closed segment is cleaned, and a record that is a second later begins a new one.

        The timestamps of events are ahead of the broker's clock, which sets those of the markers between them.
        """
        more = {"at": at, "ts": began_ms + 10_000 * nth, "record_key": record_key, "value": value}
        return history.deliver(producer, writer, topic, [key], **more)[0].offset  # type: ignore[arg-type]

    early = [deliver(f"early-{n}", b"row-%d" % n, n) for n in range(3)]
    first = yield
    assert first.balance(topic)["delivered_once"] == 3
    # Superseded before a run reads them.
    began_ms = int(time.time() * 1000)
    unread = [deliver("over-0", b"row-0", 4), deliver("over-1", b"row-1", 5), deliver("over-1-again", b"row-1", 6)]
    unread.append(deliver("tombstone", b"row-2", 7, None))
    for n in range(3):
        deliver(f"last-{n}", b"row-%d" % n, 9 + n)
    deliver("end", b"end", 20)
    deliver("active", b"active", 30)
    _wait_until_cleaned(history, topic, {*early, *unread})
    second = yield
    assert second.findings(topic) == {("evidence_gap", "compacted", f"{topic}[0]")}
    (gap,) = [one for one in second.document["findings"] if one["topic"] == topic]
    assert gap["count"] == len(unread)
    balance = second.balance(topic)
    assert (balance["accepted"], balance["delivered_once"], balance["unprovable"]) == (12, 8, 4)
    assert balance["lost"] == 0


def _wait_until_cleaned(history: History, topic: str, gone: set[int]) -> None:
    """Wait until none of these offsets holds a record any more."""
    deadline = time.monotonic() + 120
    while left := gone & {message.offset() for message in history.records(topic)}:
        assert time.monotonic() < deadline, f"{topic} still has {sorted(left)}"
        time.sleep(0.2)


def foreign_records_get_ids_and_undecodable_records_are_kept(stage: ChangingStage) -> Story:
    history = stage.history
    (topic,) = stage.topics("foreign")
    assert topic == stage.foreign
    for value in (b'{"id":"a"}', b'{"id":"b"}', b'{"id":"a"}', b"{", b'{"no":1}', None):
        history.raw(history.plain, topic, value)
    history.send(history.plain, topic, ["own"], None)
    history.raw(history.plain, topic, b'{"id":"a"}', headers=[(STAMP_HEADER, b"1;nonsense")])
    # A partition of the ledger that no other story writes to.
    writer = stage.writer()
    history.raw(history.plain, ledger_topic(history.namespace), b"x" * 5000, writer.slot)
    history.answers(['{"id":"12","fp":"","at":1,"status":201}'])
    ran = yield
    ledger, requests = ledger_topic(history.namespace), requests_topic(history.namespace)
    undecoded = {(topic, 0), (requests, 0), (ledger, writer.slot)}
    assert ran.findings(topic, ledger, requests) == {
        ("duplicate", "foreign_writer", "a"),
        ("unkeyed", None, f"{topic}[0]"),
        *(("evidence_gap", "undecoded", f"{name}[{partition}]") for name, partition in undecoded),
    }
    (twice,) = [one for one in ran.document["findings"] if one["key"] == "a"]
    assert (twice["id"], [copy["offset"] for copy in twice["coordinates"]]) == (event_id("a").hex(), [0, 2])
    assert [one["count"] for one in ran.document["findings"] if one["kind"] == "unkeyed"] == [3]
    rejects = {(row["topic"], row["partition"]): row for row in stage.table(ran, "rejects")}
    assert rejects.keys() == undecoded
    assert {
        (name, partition): (row["reason"], bytes(row["content"])) for (name, partition), row in rejects.items()
    } == {
        (topic, 0): ("a fencepost header that cannot be parsed", b"1;nonsense"),
        (ledger, writer.slot): ("no ledger record of version 1", b"x" * decode.CONTENT_MAX),
        (requests, 0): (
            "a record of the journal whose answer lacks a field or has one of another form",
            b'{"id":"12","fp":"","at":1,"status":201}',
        ),
    }
    assert rejects[topic, 0]["offset"] == 7
    assert ran.document["evidence"]["rejects"] == 3


def a_verdict_that_is_revised_keeps_its_history_until_its_hour_is_dropped(stage: ChangingStage) -> Story:
    """The runs show two more things.

    An hour that is over is compacted into one file; the transaction that blocks a partition is named with its age.
    """
    history, one, two = stage.history, stage.writer(), stage.writer()
    topic = history.topic(f"{history.namespace}-kept", 2)
    (past,) = stage.topics("past")
    producer = history.transactional(one)

    def deliver_to_the_past(nth: int) -> None:
        history.deliver(producer, one, past, [f"past-{nth}-{n}" for n in range(5)], at=history.now_ms - 5 * HOUR_MS)

    def revisions(ran: Ran) -> dict[str, Any]:
        """Count the changes in the table of verdicts, of all stories, as the report does."""
        rows = stage.table(ran, "verdicts")
        changes = Counter((row["before"], row["verdict"] or "") for row in rows if row["before"])
        return {
            "revised": sum(count for (before, _), count in changes.items() if before != "pending"),
            "changes": [
                {"before": before, "after": after or None, "ids": count}
                for (before, after), count in sorted(changes.items())
            ],
        }

    deliver_to_the_past(1)
    there = history.deliver(producer, one, topic, ["kept-there"])[0]
    late = there.entry(id=event_id("kept-late"), partition=1, offset=0)
    producer.begin_transaction()
    history.ledger(producer, one, [late])
    producer.commit_transaction(TIMEOUT_S)
    began_s = time.time()
    slow = history.transactional(two)
    slow.begin_transaction()
    history.send(slow, past, ["past-open"], two)
    first = yield
    slow.abort_transaction(TIMEOUT_S)
    assert (first.balance(topic)["pending"], first.document["verdicts"]["changes"]) == (1, [])
    (held,) = [log for log in first.document["evidence"]["held_up"] if log["topic"] == past]
    assert held["partition"] == 0
    assert held["transactional_id"] == transactional_id(history.namespace, two.slot)
    assert held["producer_id"] >= 0
    assert 0 <= held["age_s"] <= time.time() - began_s

    deliver_to_the_past(2)
    second = yield
    assert second.findings(topic, past) == {("lost", "ledger", None)}
    assert ("pending", "lost") in {(one["before"], one["after"]) for one in second.document["verdicts"]["changes"]}
    assert second.document["verdicts"] == revisions(second)
    deliver_to_the_past(3)
    history.send(history.plain, topic, ["kept-late"], one, partition=1)
    third = yield
    assert third.findings(topic, past) == set()
    assert third.balance(topic, past)["delivered_once"] == 2 + 15
    assert third.document["verdicts"] == revisions(third)
    assert third.document["verdicts"]["revised"] >= 1
    changes = [row for row in stage.table(third, "verdicts") if row["topic"] == topic]
    first_run = first.document["run"]["number"]
    assert sorted((row["run"] - first_run, row["before"], row["verdict"]) for row in changes) == [
        (0, None, "pending"),
        (1, "pending", "lost"),
        (third.document["run"]["number"] - first_run, "lost", "delivered_once"),
    ]
    rows = lake.Lake(stage.spark, str(third.lake)).read("deliveries").where(F.col("topic") == past)
    assert (rows.count(), rows.select("accepted_hour").distinct().count(), _files(rows)) == (15, 1, 1)
    fourth = yield
    fifth = yield

    # Nine days later the old rows are dropped, and new evidence about them gives no finding.
    history.answers([there.answer(replayed=True)])
    last = yield
    assert (last.findings(topic, past), last.document["balance"]["accepted"]) == (set(), 0)
    for name in ("deliveries", "verdicts"):
        assert stage.table(last, name) == [], name
    # The pause since the fifth run is longer than --keep-days: the runs of its first hour stay, as its events would.
    runs_since = [ran.document["run"]["number"] for ran in (fourth, fifth, last)]
    assert sorted(row["run"] for row in stage.table(last, "runs")) == runs_since


def _files(rows: DataFrame) -> int:
    """Return the number of files that hold the rows."""
    return rows.select(F.input_file_name()).distinct().count()


def logs_that_change_between_runs(stage: ChangingStage) -> Story:
    """The last story, because its interrupted run must be planned again by its own changes only."""
    yield
    history, writer = stage.history, stage.writer()
    topic, eaten, anew = stage.topics("grown", "eaten", "anew")
    producer = history.transactional(writer)
    for name in (topic, eaten, anew):
        history.deliver(producer, writer, name, [f"{name}-{n}" for n in range(3)])
    first = yield
    assert first.findings(topic, eaten, anew) == set()
    history.grow(topic, 3)
    (fresh,) = stage.topics("fresh")
    producer = history.transactional(writer)
    history.deliver(producer, writer, topic, ["grown"], partition=2)
    history.deliver(producer, writer, fresh, ["fresh"])
    written = history.deliver(producer, writer, eaten, [f"eaten-{n}" for n in range(4)])
    # A run that was interrupted before all this: its planned records do not exist when it is resumed.
    with pytest.MonkeyPatch.context() as patch, cut(patch, lake.Lake, "append_once", after=True, only="progress"):
        stage.audit(history, later_s=LATER_S, **stage.shared)
    history.delete_before(eaten, 0, written[2].offset)
    history.deliver(producer, writer, anew, ["old"])
    history.remove(anew)
    history.topic(anew, 1)
    producer = history.transactional(writer)
    history.deliver(producer, writer, anew, ["new"])
    second = yield
    before = first.document["run"]["number"]
    assert (second.document["run"]["number"], second.document["run"]["resumed"]) == (before + 2, False)
    assert second.findings(topic, eaten, anew, fresh) == {
        ("evidence_gap", "retention", f"{eaten}[0]"),
        ("evidence_gap", "recreated", f"{anew}[0]"),
    }
    balance = second.balance(topic, eaten, anew, fresh)
    # The offset of "old" has another record now, of a topic that is not the one of the claim.
    assert (balance["accepted"], balance["unprovable"], balance["lost"]) == (9 + 1 + 1 + 4 + 2, 3, 0)
    assert fresh in second.document["run"]["topics"]


STORIES = (
    time_and_the_end_of_a_transaction_revise_a_verdict,
    a_loss_that_is_proven_after_an_open_transaction_ended_stays_when_a_compacted_log_grows,
    no_record_is_a_phantom_while_an_open_transaction_blocks_its_ledger,
    events_of_a_topic_from_before_it_was_recreated_are_an_evidence_gap,
    proven_verdicts_stay_and_the_balance_closes_whatever_happens_to_the_logs,
    a_copy_that_a_run_without_the_pass_over_ids_read_gets_its_id_in_the_next_pass,
    a_recreated_topic_gives_no_old_id_the_value_of_a_new_event,
    records_that_compaction_took_unread_are_a_gap_and_never_lost,
    foreign_records_get_ids_and_undecodable_records_are_kept,
    a_verdict_that_is_revised_keeps_its_history_until_its_hour_is_dropped,
    logs_that_change_between_runs,
)


@pytest.fixture(scope="module")
def shared(spark: SparkSession, kafka: Kafka, audit: Audit, tmp_path_factory: pytest.TempPathFactory) -> Stories:
    rules = tmp_path_factory.mktemp("rules") / "rules.toml"
    return ChangingStage(spark, kafka.bootstrap, audit, rules).run(STORIES, audit)


@pytest.mark.parametrize("story", [story.__name__ for story in STORIES])
def test_that(shared: Stories, story: str) -> None:
    shared.check(story)
