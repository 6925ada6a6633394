"""Logs that only grow: what a run says before it can know, sizes, clocks, and the window of the report."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from unittest.mock import patch

import pytest
from confluent_kafka import Producer

from deploy.stack import Kafka
from service.contract.wire.ids import event_id
from service.contract.wire.ledger import LedgerRecord
from service.contract.wire.ledger_entries import Entry
from service.contract.wire.names import ledger_topic
from spark.reading.kafka_admin import Ends, KafkaAdmin, TopicPartition
from tests.spark.conftest import Audit
from tests.spark.history import TIMEOUT_S, History, Writer
from tests.spark.stories import Stage, Stories, Story
from tests.spark.times import DAY_MS, FAR_FUTURE_MS, HOUR_MS, WINDOW_H
from tests.spark.world import FOREVER

MEGABYTE: Final = 1_000_000

# The hours after the first run, and whether the run leaves out the pass over ids. From the fourth run on, a clock that
# is ahead has made all records old.
RUNS: Final = ((0, True), (0, True), (0, False), (9, False), (9, True), (9, False))


class GrowingStage(Stage):
    """Besides the history: the time of the first run, and the last whole hour before it (ms)."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(bootstrap, FOREVER)
        self.next_hour_ms = (self.history.now_ms // HOUR_MS + 1) * HOUR_MS
        # All that the stories write is settled then, and the hour is not whole.
        self.now_ms = self.next_hour_ms + 20 * 60_000

    @property
    def runs(self) -> list[dict[str, Any]]:
        return [{"now_ms": self.now_ms + later_h * HOUR_MS, "skip_ids": skip_ids} for later_h, skip_ids in RUNS]


def records_older_than_the_ledger_are_no_phantoms(stage: GrowingStage) -> Story:
    """The ledger was recreated, or the data mirrored with its headers; a later record without an entry is a phantom.

    The first story, because no other may have written to the ledger before it is recreated.
    """
    history, one, other = stage.history, stage.writer(), stage.writer()
    topic, mirror = stage.topics("older", "mirror")
    history.deliver(history.transactional(one), one, topic, [f"older-{n}" for n in range(5)], answer=False)
    history.send(history.plain, mirror, [f"mirrored-{n}" for n in range(5)], one)
    ledger = ledger_topic(history.namespace)
    history.remove(ledger)
    history.topic(ledger, history.slots, history.internal)
    producer = history.transactional(one)
    for name in (topic, mirror):
        history.deliver(producer, one, name, [f"{name}-fine"])
        # The ledger's first record has an earlier timestamp.
        now_ms = int(time.time() * 1000)
        history.send(history.plain, name, [f"{name}-unclaimed"], other, at=now_ms, ts=now_ms)
    ran = yield
    for name in (topic, mirror):
        assert ran.findings(name) == {
            ("evidence_gap", "ledger_gone", f"{name}[0]"),
            ("phantom", None, f"{name}-unclaimed"),
        }
        found = [finding for finding in ran.document["findings"] if finding["topic"] == name]
        assert {finding["kind"]: finding["count"] for finding in found} == {"evidence_gap": 5, "phantom": 1}


def _promise(history: History, producer: Producer, writer: Writer, entry: Entry, timestamp: int) -> None:
    """Name a record in the ledger, at this time (ms), in the open transaction of the producer."""
    ids = history.topic_ids([entry.topic])
    record = LedgerRecord(writer.slot, writer.producer_id, writer.epoch, writer.instance, [entry], ids)
    history.raw(producer, ledger_topic(history.namespace), record.encode(), writer.slot, timestamp=timestamp)


# Accepted this long after the first hour of the window began, named by the ledger this long after → whether the report
# has it.
PROMISES = {"at the edge": (0, 0, True), "within": (300_000, 300_000, True), "clock behind": (5, -5000, True)}
PROMISES |= {"before": (-1, -1, False)}


def findings_are_reported_only_for_ids_that_the_balance_counts(stage: GrowingStage) -> Story:
    """The window begins with a whole hour."""
    history, writer = stage.history, stage.writer()
    (topic,) = stage.topics("window")
    window_from_ms = stage.now_ms // HOUR_MS * HOUR_MS - WINDOW_H * HOUR_MS
    producer = history.transactional(writer)
    history.deliver(producer, writer, topic, ["window"])
    producer.begin_transaction()
    for offset, (name, (after_ms, named_after_ms, _)) in enumerate(PROMISES.items(), 1000):
        at = window_from_ms + after_ms
        entry = Entry(event_id(f"window {name}"), bytes(8), at, topic, 0, offset, at)
        _promise(history, producer, writer, entry, window_from_ms + named_after_ms)
    producer.commit_transaction(TIMEOUT_S)
    lost = {event_id(f"window {name}").hex() for name, (_, _, is_lost) in PROMISES.items() if is_lost}
    for _ in range(3):
        ran = yield
        assert ran.balance(topic)["lost"] == len(lost)
        found = [one for one in ran.document["findings"] if one["topic"] == topic]
        assert {(one["kind"], one["cause"], one["id"]) for one in found} == {("lost", "ledger", id) for id in lost}


def a_loss_that_is_proven_after_its_hour_left_the_window_is_reported_from_then_on(stage: GrowingStage) -> Story:
    """An open transaction keeps the verdict open."""
    yield
    yield
    history, writer, other = stage.history, stage.writer(), stage.writer()
    (topic,) = stage.topics("decided-late")
    producer = history.transactional(writer)
    history.deliver(producer, writer, topic, ["decided-late"])
    slow = history.transactional(other, timeout_ms=900_000)
    slow.begin_transaction()
    history.send(slow, topic, ["decided-late-aborted"], other)
    window_from_ms = stage.now_ms // HOUR_MS * HOUR_MS - WINDOW_H * HOUR_MS
    producer.begin_transaction()
    entry = Entry(event_id("decided-late-lost"), bytes(8), window_from_ms, topic, 0, 1000, window_from_ms)
    _promise(history, producer, writer, entry, window_from_ms)
    producer.commit_transaction(TIMEOUT_S)
    ran = yield
    slow.abort_transaction(TIMEOUT_S)
    assert (ran.findings(topic), ran.balance(topic)["pending"]) == (set(), 1)
    for _ in RUNS[3:]:
        ran = yield
        assert ran.findings(topic) == {("lost", "ledger", None)}
        # The window no longer has the hour.
        balance = ran.balance(topic)
        assert (balance["lost"], balance["pending"], balance["delivered_once"]) == (0, 0, 1)


def a_run_without_the_pass_over_ids_calls_no_id_stuck_that_another_hour_settles(stage: GrowingStage) -> Story:
    history, writer = stage.history, stage.writer()
    (topic,), now_ms = stage.topics("elsewhere"), history.now_ms
    producer = history.transactional(writer)
    (there,) = history.deliver(producer, writer, topic, ["slow"], at=now_ms - 5 * HOUR_MS, answer=False)

    def answered(status: int, key: str, hours_ago: int) -> str:
        return there.answer(status, id=event_id(key), at=now_ms - hours_ago * HOUR_MS)

    history.answers(
        [answered(504, "slow", 2), answered(504, "freed", 5), answered(504, "late", 2), answered(504, "stuck", 3)]
    )
    history.answers([answered(503, "freed", 2)])
    first = yield
    assert {one["id"] for one in first.document["findings"] if one["topic"] == topic} == {
        event_id(key).hex() for key in ("late", "stuck")
    }
    assert (first.balance(topic)["stuck"], first.balance(topic)["accepted"]) == (2, 3)
    # A row of an earlier hour that a later run reads settles it too.
    history.deliver(producer, writer, topic, ["late"], at=now_ms - 5 * HOUR_MS)
    for _ in RUNS[1:]:
        ran = yield
        assert ran.findings(topic) == {("stuck", "504", None)}
        balance = ran.balance(topic)
        assert (balance["accepted"], balance["delivered_once"], balance["stuck"]) == (3, 2, 1)


def the_key_of_a_stuck_id_comes_from_another_hour_only_with_the_pass_over_ids(stage: GrowingStage) -> Story:
    history = stage.history
    (topic,), hour_start_ms = stage.topics("keys"), history.now_ms // HOUR_MS * HOUR_MS - 3 * HOUR_MS
    strange = {}
    for key, before_ms in (("same", 1000), ("other", HOUR_MS)):
        (strange[key],) = history.send(history.plain, topic, [key], None, ts=hour_start_ms + 2000 - before_ms)
    history.answers([one.answer(504, at=hour_start_ms + 2000) for one in strange.values()])
    key_of = {event_id(key).hex(): key for key in strange}
    for keys in ({"same", None}, {"same", None}, {"same", "other"}):
        ran = yield
        found = [one for one in ran.document["findings"] if one["topic"] == topic]
        assert {(one["kind"], key_of[one["id"]]) for one in found} == {("stuck", "same"), ("stuck", "other")}
        assert {one["key"] for one in found} == keys


def a_driver_whose_clock_is_ahead_calls_no_record_lost_that_is_written_during_the_plan(stage: GrowingStage) -> Story:
    for _ in RUNS[:3]:
        yield
    history, writer = stage.history, stage.writer()
    (topic,) = stage.topics("meanwhile")
    producer = history.transactional(writer)
    history.deliver(producer, writer, topic, ["before"])
    whole = KafkaAdmin.ends
    written: list[Any] = []

    def ends(
        self: KafkaAdmin, places: Sequence[TopicPartition], *, strict: bool = True
    ) -> Mapping[TopicPartition, Ends]:
        if not written and any(name == ledger_topic(history.namespace) for name, _ in places):
            written.append(history.deliver(producer, writer, topic, ["meanwhile"]))
        return whole(self, places, strict=strict)

    with patch.object(KafkaAdmin, "ends", ends):
        first = yield
    assert written
    assert first.findings(topic) == set()
    assert (first.balance(topic)["pending"], first.balance(topic)["delivered_once"]) == (1, 1)
    second = yield
    assert (second.findings(topic), second.balance(topic)["delivered_once"]) == (set(), 2)


def a_proven_loss_stays_when_a_compacted_log_grows(stage: GrowingStage) -> Story:
    for _ in RUNS[:2]:
        yield
    history, writer = stage.history, stage.writer()
    topic = history.topic(f"{history.namespace}-compacted", 1, {"cleanup.policy": "compact"})
    producer = history.transactional(writer)
    (there,) = history.deliver(producer, writer, topic, ["there"], record_key=b"k", value=b'"$key"')
    history.answers([there.answer(id=event_id("lost"), offset=7)])
    # In two hours, so that it counts once by the pass over ids.
    history.answers([there.answer(504, id=event_id("lost"), at=history.now_ms - 3 * HOUR_MS)])
    first = yield
    assert first.findings(topic) == {("lost", "answer", None)}
    history.deliver(producer, writer, topic, [f"more-{n}" for n in range(20)], record_key=b"k", value=b'"$key"')
    for _ in RUNS[3:]:
        ran = yield
        assert ran.findings(topic) == {("lost", "answer", None)}
        balance = ran.balance(topic)
        assert (balance["lost"], balance["delivered_once"], balance["unprovable"]) == (1, 21, 0)


def a_store_whose_clock_is_days_ahead_makes_no_record_lost_without_the_pass_over_ids(stage: GrowingStage) -> Story:
    """The ledger's record is written in the next hour; and a day before the acceptance that it names, or more."""
    history, writer = stage.history, stage.writer()
    (topic,) = stage.topics("store-ahead")
    producer = history.transactional(writer)
    for key, at in (("days", stage.now_ms + 72 * HOUR_MS), ("a day", stage.now_ms + 24 * HOUR_MS - 1)):
        history.deliver(producer, writer, topic, [key], at=at, ts=stage.next_hour_ms - HOUR_MS - 5, answer=False)
    for _ in RUNS:
        ran = yield
        assert (ran.findings(topic), ran.balance(topic)["delivered_once"]) == (set(), 2)


def a_verdict_that_is_newer_than_the_last_pass_over_ids_stands(stage: GrowingStage) -> Story:
    """The pass found an id of two hours delivered; then one of these hours, classified again, finds it lost."""
    history, writer = stage.history, stage.writer()
    (topic,), now_ms = stage.topics("newer"), history.now_ms
    producer = history.transactional(writer)
    (there,) = history.deliver(producer, writer, topic, ["wide"], at=now_ms - 5 * HOUR_MS)
    history.answers([there.answer(504, at=now_ms - 2 * HOUR_MS)])
    for _ in RUNS[:4]:
        assert (yield).findings(topic) == set()
    producer.begin_transaction()
    history.ledger(producer, writer, [there.entry(at=now_ms - 2 * HOUR_MS, offset=1000)])
    producer.commit_transaction(30)
    ran = yield
    assert ran.balance(topic)["lost"] == 1
    assert ran.findings(topic) == {("lost", "ledger", None)}


def records_of_every_size_in_topics_of_every_width_are_read(stage: GrowingStage) -> Story:
    yield
    yield
    history, one, two = stage.history, stage.writer(), stage.writer()
    wide = history.topic(f"{history.namespace}-wide", 64)
    large = history.topic(f"{history.namespace}-large", 1, {"max.message.bytes": str(2 * MEGABYTE)})
    producer = history.transactional(one)
    producer.begin_transaction()
    written = [
        history.send(producer, wide, [f"p-{partition}"], one, partition=partition, value=b"x")[0]
        for partition in range(0, 64, 3)
    ]
    history.ledger(producer, one, [event.entry() for event in written])
    producer.commit_transaction(TIMEOUT_S)
    history.answers([event.answer() for event in written])
    # The same event at both ends of the topic, by two producers.
    history.deliver(history.transactional(two), two, wide, ["p-0"], partition=63, value=b"x")
    history.send(history.plain, wide, ["p-3"] * 99, one, partition=3, value=b"x")
    block = bytes(range(256)) * (MEGABYTE // 256)
    history.deliver(producer, one, large, ["tiny", "large"], value=b"1")
    history.deliver(producer, one, large, ["megabyte"], value=block, record_key=b"k")
    history.deliver(producer, one, large, ["other-megabyte"], value=block[:-1] + b"!", record_key=b"k")
    # A megabyte again, from a writer that leaves only the key: the fingerprint is over every byte.
    history.send(history.plain, large, ["megabyte"], None, value=block, record_key=b"k")
    history.send(history.plain, large, ["other-megabyte"], None, value=block[:-1] + b"?", record_key=b"k")
    ran = yield
    assert ran.findings(wide, large) == {
        ("duplicate", "dual_producer", "p-0"),
        ("duplicate", "foreign_writer", "p-3"),
        ("duplicate", "foreign_writer", "megabyte"),
        ("conflict", "foreign_writer", "other-megabyte"),
    }
    (hundred,) = [finding for finding in ran.document["findings"] if finding["key"] == "p-3"]
    assert (hundred["count"], len(hundred["coordinates"])) == (100, 100)
    balance = ran.balance(wide, large)
    assert balance["accepted"] == len(written) + 4
    assert (balance["delivered_once"], balance["duplicated"], balance["conflicted"]) == (len(written), 3, 1)


def clocks_that_jump_change_no_verdict(stage: GrowingStage) -> Story:
    """Writers set timestamps in the past, in the future, and at the start of the epoch."""
    yield
    yield
    history, behind, ahead = stage.history, stage.writer(), stage.writer()
    settings = {"message.timestamp.after.max.ms": str(2**62), "retention.ms": "-1"}
    topic = history.topic(f"{history.namespace}-clocks", 2, settings)
    now_ms = history.now_ms
    slow, fast = history.transactional(behind), history.transactional(ahead)
    far = 4_102_444_800_000 + DAY_MS  # past the year 2100
    times = [(0, 1), (now_ms, 1), (now_ms, far), (far, now_ms), (now_ms + 2 * HOUR_MS, now_ms - 9 * DAY_MS)]
    for nth, (at, ts) in enumerate(times):
        history.deliver(slow, behind, topic, [f"once-{nth}"], at=at, ts=ts, value=b'"$key"')
    # The same event from two clocks: an hour behind, and more than a retention ahead.
    history.deliver(slow, behind, topic, ["behind", "ahead"], value=b'"$key"')
    for key, ms in (("behind", now_ms - HOUR_MS), ("ahead", now_ms + DAY_MS)):
        history.deliver(fast, ahead, topic, [key], at=ms, ts=ms, partition=1, value=b'"$key"')
    # Records without header, with the first and the last possible timestamps, and a forged acceptance.
    history.send(history.plain, topic, ["bare", "bare"], None, ts=1)
    history.send(history.plain, topic, ["bare"], None, ts=far)
    history.send(history.plain, topic, ["forged"], behind, at=FAR_FUTURE_MS, ts=int(time.time() * 1000))
    # A claim of the next hour is not lost now.
    slow.begin_transaction()
    (there,) = history.send(slow, topic, ["clocks-there"], behind)
    promised = there.entry(id=event_id("tomorrow"), offset=1_000_000, at=stage.now_ms + HOUR_MS)
    history.ledger(slow, behind, [there.entry(), promised])
    slow.commit_transaction(TIMEOUT_S)
    found = {
        ("duplicate", "dual_producer", "behind"),
        ("duplicate", "expired_key", "ahead"),
        ("duplicate", "foreign_writer", "bare"),
        ("phantom", None, "forged"),
    }
    ran = yield
    assert ran.findings(topic) == found
    # The copies of an event are in the order of their timestamps, not of their writing.
    copies = {finding["key"]: finding["coordinates"] for finding in ran.document["findings"]}
    order = [[copy["partition"] for copy in copies[key]] for key in ("behind", "ahead")]
    assert order == [[1, 0], [0, 1]]
    balance = ran.balance(topic)
    assert balance["accepted"] == 9
    assert (balance["delivered_once"], balance["duplicated"], balance["pending"]) == (6, 2, 1)
    later = yield
    assert later.findings(topic) == found | {("lost", "ledger", None)}
    assert (later.balance(topic)["lost"], later.balance(topic)["pending"]) == (1, 0)


def a_stuck_id_of_two_hours_is_pending_again_while_a_ledger_is_blocked(stage: GrowingStage) -> Story:
    """One run counted its hours; a later one, with less evidence, counts the id: the balance closes."""
    for _ in range(3):
        yield
    history, writer = stage.history, stage.writer()
    (topic,) = stage.topics("blocked")
    (there,) = history.deliver(history.transactional(writer), writer, topic, ["blocked-there"])
    for hours_ago in (20, 17):
        answered = there.answer(504, id=event_id("blocked-stuck"), at=history.now_ms - hours_ago * HOUR_MS)
        # Not before the ledger is blocked, however long the runs take until then.
        history.answers([answered], timestamp=stage.now_ms)
    ran = yield
    assert (ran.balance(topic)["stuck"], ran.balance(topic)["pending"]) == (1, 0)
    yield
    slow = history.transactional(writer)
    slow.begin_transaction()
    history.ledger(slow, writer, [])
    ran = yield
    slow.abort_transaction(TIMEOUT_S)
    assert (ran.balance(topic)["stuck"], ran.balance(topic)["pending"]) == (0, 1)


def copies_in_topics_that_nothing_names_are_neither_phantoms_nor_duplicates(stage: GrowingStage) -> Story:
    """Mirrors in this cluster: of its own topic, under another name, and of another cluster's topic."""
    history, writer = stage.history, stage.writer()
    topic, here, elsewhere = stage.topics("mirrored", "copies.mirrored", "elsewhere.mirrored")
    history.deliver(history.transactional(writer), writer, topic, ["mirrored"])
    history.send(history.plain, here, ["mirrored", "mirrored"], writer)
    history.send(history.plain, elsewhere, ["mirrored from elsewhere"], Writer(0, 7, 0, "elsewhere:1"))
    ran = yield
    assert (ran.balance(topic)["delivered_once"], ran.balance(topic)["duplicated"]) == (1, 0)
    assert ran.findings(topic, here, elsewhere) == set()
    assert {here, elsewhere}.isdisjoint(counts["topic"] for counts in ran.document["topics"])


STORIES = (
    records_older_than_the_ledger_are_no_phantoms,
    findings_are_reported_only_for_ids_that_the_balance_counts,
    a_loss_that_is_proven_after_its_hour_left_the_window_is_reported_from_then_on,
    a_run_without_the_pass_over_ids_calls_no_id_stuck_that_another_hour_settles,
    the_key_of_a_stuck_id_comes_from_another_hour_only_with_the_pass_over_ids,
    a_driver_whose_clock_is_ahead_calls_no_record_lost_that_is_written_during_the_plan,
    a_proven_loss_stays_when_a_compacted_log_grows,
    a_store_whose_clock_is_days_ahead_makes_no_record_lost_without_the_pass_over_ids,
    a_verdict_that_is_newer_than_the_last_pass_over_ids_stands,
    records_of_every_size_in_topics_of_every_width_are_read,
    clocks_that_jump_change_no_verdict,
    a_stuck_id_of_two_hours_is_pending_again_while_a_ledger_is_blocked,
    copies_in_topics_that_nothing_names_are_neither_phantoms_nor_duplicates,
)


@pytest.fixture(scope="module")
def shared(kafka: Kafka, audit: Audit) -> Stories:
    return GrowingStage(kafka.bootstrap).run(STORIES, audit)


@pytest.mark.parametrize("story", [story.__name__ for story in STORIES])
def test_that(shared: Stories, story: str) -> None:
    shared.check(story)
