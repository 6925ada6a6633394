"""Mirrors compared with the lake: what is read of each log, what that proves, and a real topic with planted faults."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import pytest
from pyspark.sql import SparkSession

from service.contract import Rules, SinkRule
from service.contract.wire.headers import STAMP_HEADER, Stamp
from spark.engine import frames
from spark.errors import CannotRun, Unreadable
from spark.reading import mirror_logs, source
from spark.reading.kafka_admin import Ends, Topic
from spark.reading.mirror_logs import ABSENT_MS, LogPlan, MirrorLog
from spark.reading.run_plan import DATA, UNWANTED, Plan, RunContext
from spark.rules import mirrors, sink_verdicts
from spark.tables import schemas
from spark.tables.lake import Lake
from tests.spark.history import History
from tests.spark.rows import id_bytes
from tests.spark.test_classify import log as log_of
from tests.spark.test_classify import settings
from tests.spark.times import HOUR_MS, MINUTE_MS
from tests.spark.warehouse import BEGIN_MS, FROZEN_MS, LATE_S, SETTLE_MS, Warehouse, counts, event
from tests.spark.world import FOREVER

RULE: Final = SinkRule("dr", ("t",), "kafka", "", LATE_S, margin_s=60, exclusive=True, mirror_topic="b.{topic}")
TOPIC: Final = Topic("b.t", "one", 1)
KNOWN: Final = MirrorLog("b.t", 0, "one", 10, 3, 7, 100)
READ: Final = Ends(0, 15, 14, 3)
"""Records up to 13 are committed."""


def plan(known: MirrorLog | None, ends: Ends = READ, diverged: int | None = None, topic: Topic = TOPIC) -> LogPlan:
    return mirror_logs.planned(known, topic, 0, ends, diverged, 5)


def test_a_log_is_read_from_where_the_last_run_has_left_it_to_its_last_stable_offset() -> None:
    first = plan(None)
    assert (first.span, first.is_gap, first.gone_from) == ((0, 14), False, None)
    assert (first.log.end, first.log.leader_epoch, first.log.caught_up_ms) == (14, 3, 0)
    then = plan(KNOWN)
    assert (then.span, then.is_gap, then.gone_from) == ((10, 14), False, None)
    assert then.log == replace(KNOWN, end=14)


def test_what_was_deleted_unread_is_a_gap() -> None:
    assert plan(None, replace(READ, log_start=4)) == LogPlan(MirrorLog("b.t", 0, "one", 14, 3), 4, is_gap=True)
    assert not plan(KNOWN, replace(READ, log_start=10)).is_gap
    gap = plan(KNOWN, replace(READ, log_start=12))
    assert (gap.span, gap.is_gap, gap.log.reset_run) == ((12, 14), True, 0)


def test_a_recreated_or_truncated_log_is_read_again_without_what_it_had() -> None:
    recreated = plan(KNOWN, topic=replace(TOPIC, topic_id="two"))
    assert recreated == LogPlan(MirrorLog("b.t", 0, "two", 14, 3, reset_run=5), 0)
    truncated = plan(KNOWN, diverged=8)
    assert (truncated.span, truncated.gone_from, truncated.log.reset_run) == ((8, 14), 8, 5)
    shorter = plan(KNOWN, replace(READ, last_stable=6))
    assert (shorter.span, shorter.gone_from, shorter.log.reset_run) == ((6, 6), 6, 5)
    assert plan(replace(KNOWN, reset_run=2)).log.reset_run == 2


def test_a_topic_is_deleted_once_runs_a_minute_apart_have_not_found_it_and_then_recreated() -> None:
    unseen = mirror_logs.absent(KNOWN, 5, 1000)
    assert unseen == LogPlan(replace(KNOWN, absent_ms=1000), 10)
    assert mirror_logs.absent(unseen.log, 6, 1000 + ABSENT_MS - 1) == unseen
    # A broker that did not know the topic cost nothing.
    assert plan(unseen.log) == plan(KNOWN)
    assert plan(unseen.log, topic=replace(TOPIC, topic_id="two")).log.reset_run == 5
    deleted = mirror_logs.absent(unseen.log, 4, over_ms := 1000 + ABSENT_MS)
    expected = MirrorLog("b.t", 0, "", 0, caught_up_ms=over_ms, reset_run=4, absent_ms=1000)
    assert deleted == LogPlan(expected, 0)
    assert mirror_logs.absent(deleted.log, 5, 99_000).log == replace(expected, caught_up_ms=99_000)
    assert plan(deleted.log) == LogPlan(MirrorLog("b.t", 0, "one", 14, 3, reset_run=5), 0)


class Absent:
    """An admin client of a mirror whose broker knows no topic."""

    def __init__(self, *_: Any) -> None:
        pass

    def find(self, names: Any) -> dict[str, Topic]:
        return {}

    def diverged(self, known: Any) -> dict[Any, int]:
        return {}

    def compacted(self, names: Any) -> set[str]:
        return set()

    def close(self) -> None:
        pass


def test_the_logs_of_topics_that_are_not_found_stay_known_while_a_rule_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirror_logs, "KafkaAdmin", Absent)
    monkeypatch.setattr(frames, "rows_of", Mock())
    rule = replace(RULE, connection=(("FENCEPOST_KAFKA", "a:1"),))
    other = replace(KNOWN, topic="b.other")
    read = partial(mirror_logs.read, Mock(), rule, {"t": "of t"}, max_records=1)
    once = read([KNOWN, other], Plan(5, 1000, "", ()))
    assert once.logs == (replace(KNOWN, absent_ms=1000),)
    deleted = read(once.logs, Plan(6, 1000 + ABSENT_MS, "", ()))
    assert mirrors.MirrorState(6, deleted.logs).reset_run == 6
    assert {log.topic_id for log in deleted.logs} == {""}


def test_the_audited_topic_itself_is_no_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have each of its events."""
    admin = Mock(find=lambda names: {name: Topic(name, f"of {name}", 1) for name in names})
    monkeypatch.setattr(mirror_logs, "KafkaAdmin", lambda *given: admin)
    rule = replace(RULE, mirror_topic="", connection=(("FENCEPOST_KAFKA", "127.0.0.1:1"),))
    with pytest.raises(Unreadable, match="kafka is the audited cluster: the topic t there is the audited one"):
        mirror_logs.read(Mock(), rule, {"t": "of t"}, (), Plan(1, 1, "", ()), None)


def test_a_recreated_topic_with_fewer_partitions_is_known_by_its_present_id(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(side_effect=Unreadable("away"))
    monkeypatch.setattr(mirror_logs, "read", read)
    logs = log_of(DATA, "t", 0, topic_id="present"), log_of(DATA, "t", 1, topic_id="earlier", audited=False)
    context = RunContext(Plan(2, FROZEN_MS, "{}", logs), replace(settings(), rules=Rules(sinks=(RULE,))))
    lake = Mock(**{"read_cached.return_value.where.return_value.select.return_value.collect.return_value": []})
    assert mirrors.update(lake, context, lambda line: None) == {"dr": "away"}
    assert read.call_args.args[2] == {"t": "present"}


def test_a_run_reads_about_as_much_as_it_may_and_knows_the_mirror_when_it_has_reached_an_earlier_end() -> None:
    plans = [LogPlan(replace(KNOWN, end=40), 10), LogPlan(replace(KNOWN, end=15), 10)]
    assert mirror_logs.capped(plans, None) == mirror_logs.capped(plans, 35) == plans
    assert [one.span for one in mirror_logs.capped(plans, 7)] == [(10, 16), (10, 11)]
    behind = mirror_logs.caught_up(KNOWN, 14, 200)
    assert (behind.caught_up_ms, behind.behind_ms, behind.behind_end) == (100, 200, 14)
    # More records came than the next runs may read, until one reaches the end that the first one has seen.
    assert mirror_logs.caught_up(replace(behind, end=13), 30, 300) == replace(behind, end=13)
    reached = mirror_logs.caught_up(replace(behind, end=14), 40, 400)
    assert (reached.caught_up_ms, reached.behind_ms, reached.behind_end) == (200, 400, 40)
    done = mirror_logs.caught_up(replace(reached, end=40), 40, 500)
    assert (done.caught_up_ms, done.behind_ms, done.behind_end) == (500, 0, 0)
    assert mirror_logs.seen_until_ms([done, reached], 600) == 200
    assert mirror_logs.seen_until_ms([], 600) == 600


def test_after_a_gap_a_mirror_has_every_event_that_was_accepted_after_its_first_one() -> None:
    whole, gap = LogPlan(KNOWN, 10), LogPlan(KNOWN, 12, is_gap=True)
    assert mirror_logs.completed(whole, 50, 100, 60) == whole
    assert mirror_logs.completed(gap, 50, 100, 60).log.complete_since_ms == 110
    assert mirror_logs.completed(gap, None, 100, 60).log.complete_since_ms == 100
    later = replace(gap, log=replace(KNOWN, complete_since_ms=500))
    assert mirror_logs.completed(later, 50, 100, 60).log.complete_since_ms == 500
    logs = [replace(KNOWN, topic=topic, complete_since_ms=ms) for topic, ms in (("b.t", 7), ("b.t", 9), ("b.u", 0))]
    assert mirror_logs.complete_since(RULE, logs, ["t", "u", "v"]) == {"t": 9}


def test_a_mirror_that_was_compacted_may_have_deleted_any_record_until_it_is_recreated() -> None:
    (known,) = mirror_logs.with_compaction([plan(KNOWN)], {"b.t"})
    (kept,) = mirror_logs.with_compaction([plan(known.log)], ())
    assert kept.log.is_compacted
    assert mirror_logs.compacted_of(RULE, [kept.log], ["t", "u"]) == ["t"]
    recreated = plan(known.log, topic=replace(TOPIC, topic_id="two"))
    assert mirror_logs.compacted_of(RULE, [recreated.log], ["t", "u"]) == []
    assert mirror_logs.compacted_of(RULE, [mirror_logs.absent(known.log, 5, 1000).log], ["t"]) == ["t"]


@pytest.mark.parametrize(("message", "raised"), [("TopicAuthorizationException", False), ("TimeoutException", True)])
def test_a_user_who_may_not_see_settings_can_read_a_mirror(
    monkeypatch: pytest.MonkeyPatch, message: str, raised: bool
) -> None:
    admin = Mock(Absent, **{"find.return_value": {}, "diverged.return_value": {}})
    admin.compacted = Mock(side_effect=CannotRun(message))
    monkeypatch.setattr(mirror_logs, "KafkaAdmin", lambda *given: admin)
    monkeypatch.setattr(frames, "rows_of", Mock())
    rule = replace(RULE, connection=(("FENCEPOST_KAFKA", "a:1"),))
    with pytest.raises(Unreadable) if raised else nullcontext():
        mirror_logs.read(Mock(), rule, {"t": "of t"}, (), Plan(1, 1, "", ()), None)


def test_a_mirror_has_the_copies_of_all_topics_that_a_run_has_ever_audited() -> None:
    logs = log_of(DATA, "t", 0), log_of(DATA, "t", 1), log_of(UNWANTED, "t2", 0, audited=False), log_of(DATA, "u", 0)
    rule = replace(RULE, topics=("t*",))
    assert mirrors.topics_of(rule, Plan(1, 1, "", logs)) == ["t", "t2"]


class Mirror(Warehouse):
    """A lake, and a mirror on a real broker, which a test fills in place of MirrorMaker."""

    def __init__(self, spark: SparkSession, root: Path, history: History) -> None:
        copies = f"{history.namespace}.{{topic}}"
        rule = replace(RULE, mirror_topic=copies, connection=(("FENCEPOST_KAFKA", history.bootstrap),))
        super().__init__(spark, root, rule)
        self.history = history
        self.topic = rule.copy_of("t")

    def create(self, timestamps: str = "CreateTime") -> None:
        self.history.topic(self.topic, 1, FOREVER | {"message.timestamp.type": timestamps})

    def copy(self, *names: str, at: int = BEGIN_MS) -> None:
        """Append a record of each event, with the header and the timestamp of the event's own record."""
        for name in names:
            header = Stamp(id_bytes(name), b"f" * 8, at, 0, 10, 0, "a:1").encode()
            headers = [(STAMP_HEADER, header)]
            self.history.raw(self.history.plain, self.topic, b"{}", headers=headers, timestamp=at)

    def take_over(self) -> None:
        killed = self.plans.pop()
        self.lake = Lake(self.spark, self.lake.root)
        self.lake.take_over(killed.run, ["deliveries", "mirrored", "sinks"])

    def places(self, kind: str) -> list[list[int]]:
        """Return the offsets in the mirror of each finding of a kind."""
        rows = self.lake.read("sinks").where(f"kind = '{kind}'").collect()
        assert {place["topic"] for row in rows for place in row["sink_coordinates"]} <= {self.topic}
        return sorted([place["offset"] for place in row["sink_coordinates"]] for row in rows)


@pytest.fixture
def mirror(spark: SparkSession, tmp_path: Path, history: History) -> Mirror:
    made = Mirror(spark, tmp_path, history)
    made.create()
    return made


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[tuple[int, int]]]:
    """The spans of offsets that each run has read of a mirror."""
    read: list[Sequence[tuple[int, int]]] = []

    def noted(spark: SparkSession, shared: Any, of_logs: Any) -> Any:
        read.append(list(of_logs.values()))
        return original(spark, shared, of_logs)

    original: Callable[..., Any] = source.read_with_type
    monkeypatch.setattr(source, "read_with_type", noted)
    return read


@pytest.mark.long
def test_a_run_that_may_read_a_part_of_a_mirror_does_not_know_what_the_rest_is(
    mirror: Mirror, spans: list[Sequence[tuple[int, int]]]
) -> None:
    mirror.deliver(*event("once", 1), *event("gone", 2), *event("again", 3))
    mirror.copy("once", "again", "again", "made up")
    partly = mirror.run(max_records=2)
    assert counts(partly) == {"expected": 3, "present_once": 2, "pending": 1}
    assert (partly.read_ms, partly.judged_until_ms, partly.unreadable) == (None, None, None)
    mirror.run(FROZEN_MS + 1)
    assert spans == [[(0, 2)], [(2, 4)]]
    assert {kind for kind, _, _ in mirror.found()} == {"missing_in_sink", "twice_in_sink", "extra_in_sink"}


@pytest.mark.long  # five runs of the audit; `python -m tests.mirrors` has a mirror of its own
def test_a_real_mirror_that_drops_repeats_and_is_late_is_found_out(
    mirror: Mirror, spans: list[Sequence[tuple[int, int]]]
) -> None:
    history = mirror.history
    mirror.deliver(*event("once", 1), *event("gone", 2), *event("again", 3), *event("slow", 4))
    mirror.copy("once", "again", "again", "made up")
    history.raw(history.plain, mirror.topic, b"no event", timestamp=BEGIN_MS)
    whole = mirror.run()
    faults = {("missing_in_sink", None, "gone"), ("twice_in_sink", "repeated", "again")}
    extra = ("extra_in_sink", None, "made up")
    assert mirror.found() == {*faults, ("missing_in_sink", None, "slow"), extra}
    assert (whole.counts["unidentified"], whole.judged_until_ms) == (1, FROZEN_MS - SETTLE_MS - 1000 * LATE_S)
    assert (mirror.places("twice_in_sink"), mirror.places("extra_in_sink")) == ([[1, 2]], [[3]])

    # The mirror deletes a record before it is read; a record comes late; MirrorMaker repeats one. The run is killed.
    third = BEGIN_MS + 2 * HOUR_MS
    for offset, name in enumerate(("unread", "kept", "after"), 10):
        mirror.deliver(*event(name, offset, at=third + (offset - 10) * MINUTE_MS * 2))
    mirror.copy("unread", at=third)
    mirror.copy("kept", at=third + 2 * MINUTE_MS)
    history.delete_before(mirror.topic, 0, 6)
    mirror.copy("slow", "once")
    late, repeated = ("late_in_sink", "was_missing", "slow"), ("twice_in_sink", "repeated", "once")
    gap = mirror.run(FROZEN_MS + 1)
    mirror.take_over()
    assert mirror.run(FROZEN_MS + 1) == gap
    known = {*faults, late, repeated, extra, ("evidence_gap", "retention", "t[None]")}
    assert mirror.found() == {*known, ("missing_in_sink", None, "after")}
    assert gap.counts["unprovable"] == 1
    assert mirror.places("twice_in_sink") == [[0, 8], [1, 2]]
    assert spans == [[(0, 5)], [(6, 9)]]

    # What cannot be read keeps its findings.
    broken = replace(mirror.rule, connection=(*mirror.rule.connection, ("FENCEPOST_KAFKA_SSL_CAFILE", "/no/ca")))
    readable, mirror.rule = mirror.rule, broken
    away = mirror.run(FROZEN_MS + 2)
    assert (away.unreadable or "").startswith("kafka_ssl_cafile means nothing with kafka_security_protocol=PLAINTEXT")
    assert away[:4] == (broken, *gap[1:4])
    assert mirror.found() == {*known, ("missing_in_sink", None, "after"), ("evidence_gap", "unreadable", "None[None]")}
    mirror.rule = readable

    # A recreated topic has what was copied into it since. The broker's timestamps tell when that was.
    history.remove(mirror.topic)
    mirror.create("LogAppendTime")
    mirror.copy("gone")
    mirror.copy("kept", at=third + 2 * MINUTE_MS)
    recreated = mirror.run(FROZEN_MS + 3)
    assert mirror.found() == {
        ("late_in_sink", "was_missing", "gone"),
        ("late_in_sink", "arrived", "kept"),
        *(("missing_in_sink", None, name) for name in ("once", "again", "slow", "unread", "after")),
    }
    assert recreated.counts["unprovable"] == 0

    # A mirror with MirrorMaker's copy of the setting may keep only the newest record of each key.
    missing = mirror.found()
    history.configure(mirror.topic, "cleanup.policy", "compact")
    mirror.deliver(*event("superseded", 13, at=third))
    compacted = mirror.run(FROZEN_MS + 4)
    assert mirror.found() == {*missing, ("evidence_gap", "compacted", "t[None]")}
    assert compacted.counts["unprovable"] == 1


def test_an_hour_with_events_that_nothing_can_prove_any_more_closes() -> None:
    assert sink_verdicts.closes(
        BEGIN_MS,
        dict.fromkeys(sink_verdicts.COUNTS_OF_SINK, 0) | {"unprovable": 1},
        replace(RULE, exclusive=False),
        SETTLE_MS,
        BEGIN_MS + 3 * HOUR_MS,
        0,
    )


def test_a_mirror_may_be_read_in_thousands_of_spans_of_time(spark: SparkSession, tmp_path: Path) -> None:
    """The hours of a long window in which events are missing, each of them compared again in every run."""
    lake, rule = Lake(spark, str(tmp_path)), SinkRule("m", ("t",), "kafka", "", 60)
    rows = [{"sink": "m", "run": 1, "accepted_hour": datetime(2026, 1, 1), "event_ms": ms} for ms in (5000, 5001, 6000)]
    lake.append(mirrors.TABLE, spark.createDataFrame(rows, schemas.of(mirrors.TABLE)), 1)
    read = mirrors.read(lake, rule, [(2 * nth, 2 * nth + 1) for nth in range(3000)])
    assert [row["event_ms"] for row in read.collect()] == [5000]
