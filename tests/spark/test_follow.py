"""`--follow`: when a turn makes a run, and how the loop meets errors and signals. Turns on Spark: test_runs.py."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from service.contract import SettingsError
from spark import follow, job
from spark.cli.command_line import PAUSE_S_LEAST, PAUSE_S_MOST
from spark.errors import AnotherRun, CannotRun, Stopped
from spark.follow import RECHECK_S, SLOW_RECHECK_S, Known, Stop, pause_after, reason_to_run
from spark.reading import sinks
from spark.settings import HOUR_MS, Settings, Webhook
from spark.silences import Silence
from spark.steps import maintenance
from tests.spark.fake_cluster import LEDGER_TOPIC, FakeAdmin, ends, fake_cluster, freeze, settings

HOUR = "2023-11-14 22:00:00"
# In the middle of an hour.
HALF_PAST_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS + 1_800_000
SILENCE = Silence("lost:1", HALF_PAST_MS + 1000, "known")
SINK = """
[[sinks]]
name = "s"
topics = ["orders"]
format = "delta"
path = "p"
id = "id"
event_time = "at"
late_s = 60
"""


def known(cluster: FakeAdmin, **changes: Any) -> Known:
    """Return what is known of a run that has read all, and left nothing open."""
    plan = freeze(cluster, named={"orders"}, now_ms=HALF_PAST_MS)
    last_run = {"run": 1, "options": plan.options, "topics": plan.topics, "last_pass": 1, "webhook": {}, "hours": {}}
    last_run |= {"evidence_changed": False, "open_ids": False} | changes.pop("last_run", {})
    return Known(plan, last_run, settings(), HALF_PAST_MS, open_sinks=False, caught_up=True)._replace(**changes)


def reason(cluster: FakeAdmin, of: Known, later_s: float, given: Settings | None = None) -> str | None:
    now_ms = HALF_PAST_MS + int(later_s * 1000)
    return reason_to_run(of, freeze(cluster, of.plan, now_ms=now_ms), given or of.settings)


def test_a_turn_without_anything_new_makes_no_run_until_the_window_moves() -> None:
    cluster = fake_cluster()
    at_rest = known(cluster)
    assert [reason(cluster, at_rest, later_s) for later_s in (30, 1799, 1801)] == [None, None, "hour"]


@pytest.mark.parametrize("topic", ["orders", LEDGER_TOPIC, "fencepost.requests"])
def test_a_new_record_of_any_audited_log_is_a_reason(topic: str) -> None:
    cluster = fake_cluster()
    at_rest = known(cluster)
    cluster.topics[topic] = ends(11)
    assert reason(cluster, at_rest, 1) == "records"
    # A topic that nothing names is not audited.
    cluster = fake_cluster()
    at_rest = known(cluster)
    cluster.topics["others"] = ends(99)
    assert reason(cluster, at_rest, 1) is None


def test_changed_settings_and_the_end_of_a_silence_are_reasons() -> None:
    cluster = fake_cluster()
    silenced = replace(settings(), silences=(SILENCE,))
    of = known(cluster)._replace(settings=silenced)
    assert reason(cluster, of, 0.5) is None
    assert reason(cluster, of, 2) == "settings"
    assert reason(cluster, of, 0.5, settings()) == "settings"


def test_a_recreated_topic_is_a_reason_also_without_a_record() -> None:
    cluster = fake_cluster()
    at_rest = known(cluster)
    cluster.topics["orders"], cluster.topic_ids["orders"] = ends(0), "two"
    assert reason(cluster, at_rest, 1) == "records"


@pytest.mark.parametrize("left", [{"hours": {HOUR: {"orders": {"open": 1}}}}, {"open_ids": True}])
def test_open_verdicts_are_judged_again_soon_and_rarely_once_their_time_is_over(left: dict[str, Any]) -> None:
    cluster = fake_cluster()
    still_open = known(cluster, last_run=left)
    assert [reason(cluster, still_open, later_s) for later_s in (30, RECHECK_S - 1, RECHECK_S)] == [
        None,
        None,
        "open verdicts",
    ]
    # Everything that was new is settled by 80 s after it was read: two more runs were made since.
    waits = still_open._replace(new_evidence_ms=HALF_PAST_MS - 300_000)
    assert [reason(cluster, waits, later_s) for later_s in (RECHECK_S, SLOW_RECHECK_S)] == [None, "open verdicts"]


def test_a_verdict_is_reported_within_two_minutes_of_its_time_at_any_pause_if_a_run_takes_half_a_minute() -> None:
    """The verdict's time comes just after a run has frozen the ends; the next freeze has it."""

    def report_s(pause_s: int, run_s: int) -> int:
        freeze_s = run_s + pause_s
        while freeze_s < RECHECK_S:
            freeze_s += pause_s
        return freeze_s + run_s

    pauses = range(PAUSE_S_LEAST, PAUSE_S_MOST + 1)
    assert max(report_s(pause_s, run_s) for pause_s in pauses for run_s in range(1, 31)) <= 120


def test_sinks_blocked_partitions_and_a_webhook_that_failed_are_looked_at_again_now_and_then() -> None:
    cluster = fake_cluster()
    hooked = replace(settings(), webhook=Webhook("http://127.0.0.1:1"))
    unsent = known(cluster, last_run={"webhook": {"a": 0, "b": 2}}, settings=hooked)
    assert [reason(cluster, unsent, later_s) for later_s in (RECHECK_S, SLOW_RECHECK_S)] == [None, "webhook"]
    # A run without --webhook keeps what is known of the findings, and sends none.
    assert reason(cluster, unsent._replace(settings=settings()), SLOW_RECHECK_S) is None
    sent = known(cluster, last_run={"webhook": {"a": 0}}, settings=hooked)
    assert reason(cluster, sent, SLOW_RECHECK_S) is None
    with_sinks = known(cluster)._replace(settings=settings(SINK))
    assert [reason(cluster, with_sinks, later_s) for later_s in (RECHECK_S, SLOW_RECHECK_S)] == [None, "sinks"]
    assert reason(cluster, with_sinks._replace(open_sinks=True), RECHECK_S) == "sinks"
    cluster.topics["orders"] = ends(10, open=2)
    assert [reason(cluster, known(cluster), later_s) for later_s in (RECHECK_S, SLOW_RECHECK_S)] == [
        None,
        "blocked partitions",
    ]


def test_a_clock_that_was_set_back_delays_nothing() -> None:
    cluster = fake_cluster()
    still_open = known(cluster, last_run={"open_ids": True})
    assert reason(cluster, still_open, -SLOW_RECHECK_S) == "open verdicts"


def test_the_pause_after_turns_that_failed_in_a_row_is_bounded() -> None:
    assert [pause_after(30, failures) for failures in (0, 1, 2, 3, 4, 5, 10_000)] == [30, 60, 120, 240, 300, 300, 300]


def test_the_first_run_of_each_hour_maintains_the_lake() -> None:
    assert maintenance.is_first_of_hour(None, HALF_PAST_MS)
    assert not maintenance.is_first_of_hour(HALF_PAST_MS, HALF_PAST_MS + 60_000)
    assert maintenance.is_first_of_hour(HALF_PAST_MS, HALF_PAST_MS + 1_800_000)
    assert maintenance.is_first_of_hour(HALF_PAST_MS, HALF_PAST_MS + 24 * HOUR_MS)


# ------------------------------------------------------------------------------------------------------ the loop


class Loop:
    """The loop with fakes in place of runs: `outcomes` are what the turns do, `pauses` what was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outcomes: list[Any] = []
        self.lines: list[str] = []
        self.pauses: list[float] = []
        self.read: Callable[[], Settings] = settings
        self.used: list[Settings] = []
        self.stop = Stop()
        plan = freeze(fake_cluster(), named={"orders"}, now_ms=HALF_PAST_MS)
        self.plan = plan
        monkeypatch.setattr(follow, "checkpointed_ids", lambda spark: set())
        monkeypatch.setattr(follow, "drop_checkpointed", lambda spark, ids: None)
        monkeypatch.setattr(follow, "is_stopped", lambda spark: False)
        monkeypatch.setattr(job, "finish_run", self._run)
        # Each turn makes a run.
        monkeypatch.setattr(job, "plan_after", lambda *_: None)
        monkeypatch.setattr(self.stop, "wait", self._wait)

    def _run(self, spark: Any, given: Settings, on_progress: Any, now_ms: Any, *, on_step: Any) -> job.Finished:
        self.used.append(given)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        on_step("plan the run")
        document: dict[str, Any] = {
            "run": {"number": 7, "verdict": "findings", "findings": 2, "caught_up": outcome},
            "cost": {"offsets": 5},
            "sinks": [],
        }
        return job.Finished(SimpleNamespace(document=document), self.plan, given, {})  # type: ignore[arg-type]

    def _wait(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.stop.is_set = self.stop.is_set or not self.outcomes

    def __call__(self, *outcomes: Any) -> int:
        self.outcomes = list(outcomes)
        return follow.follow(Mock(), lambda: self.read(), self.lines.append, self.stop)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(monkeypatch)


AWAY = CannotRun("Kafka did not answer\nmore")


def test_errors_after_the_first_run_are_lines_and_pauses(loop: Loop) -> None:
    assert loop(True, AWAY, AWAY, True, AWAY) == 0
    assert loop.pauses == [30, 60, 120, 30, 60]
    ran = "run 7 (another run): findings, 2 findings, 5 offsets"
    assert loop.lines == [
        ran.replace("another run", "start"),
        "the turn failed, the next one begins in 60 s: Kafka did not answer",
        "the turn failed, the next one begins in 120 s: Kafka did not answer",
        ran,
        "the turn failed, the next one begins in 60 s: Kafka did not answer",
        "asked to end: the next run continues here",
    ]


def test_an_error_of_the_first_run_ends_the_process_but_that_another_run_is_at_work(loop: Loop) -> None:
    with pytest.raises(CannotRun, match="did not answer"):
        loop(AnotherRun("another run is at work"), AnotherRun("another run is at work"), AWAY)
    assert loop.lines == ["waiting: another run is at work"]
    assert loop.pauses == [30, 30]


def test_a_run_that_has_not_read_all_is_followed_without_a_pause(loop: Loop) -> None:
    loop(False, True)
    assert loop.pauses == [0, 30]
    assert loop.lines[0].endswith("; not all is read yet")


def test_a_lost_jvm_ends_the_process(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionError):
        loop(True, ConnectionError())
    monkeypatch.setattr(follow, "is_stopped", lambda spark: True)
    with pytest.raises(CannotRun):
        loop(True, AWAY)


def test_settings_are_read_anew_and_those_of_the_last_run_stay_in_place_of_a_mistake(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in the text of a file, in the name of a kind of finding, in an expression of a sink."""
    no, no_kind = SettingsError("rules.toml:1: no"), CannotRun("'erorr' is no kind of finding")
    reads: list[Any] = [settings(), settings(), settings(grace_s=7), no, no, no_kind, settings(SINK, grace_s=8)]

    def read() -> Settings:
        found = reads.pop(0)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    def check(spark: Any, rules: Any) -> None:
        if rules:
            raise CannotRun("the sink 's': 'id' is no expression")

    loop.read = read
    monkeypatch.setattr(sinks, "check_rules", check)
    loop(*[True] * 6)
    assert [used.options.grace_s for used in loop.used] == [60, 7, 7, 7, 7, 7]
    reported = [line for line in loop.lines if not line.startswith("run 7")]
    said = "going on with the settings of the last run: "
    assert reported[:-1] == [f"{said}{no}", f"{said}{no_kind}", f"{said}the sink 's': 'id' is no expression"]


def test_a_file_that_cannot_be_read_or_touched_is_tried_again(loop: Loop, tmp_path: Path) -> None:
    alive = tmp_path / "folder" / "alive"
    alive.parent.mkdir()
    loop.read = lambda: settings(alive_file=str(alive))
    loop(True, FileNotFoundError("/tls/ca.pem"), True)
    assert loop.lines[1] == "the turn failed, the next one begins in 60 s: /tls/ca.pem"
    alive.unlink()
    alive.parent.rmdir()
    # Before the first run has finished it ends the process.
    loop.stop.is_set = False
    with pytest.raises(FileNotFoundError):
        loop(True)


def test_a_process_whose_turns_fail_for_an_hour_no_longer_says_that_it_is_alive(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    touched_s: list[float] = []
    pause = loop.stop.wait

    def wait(seconds: float) -> None:
        nonlocal now_s
        now_s += 1700
        pause(seconds)

    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(follow, "Path", lambda path: SimpleNamespace(touch=lambda: touched_s.append(now_s)))
    monkeypatch.setattr(loop.stop, "wait", wait)
    loop.read = lambda: settings(alive_file="alive")
    loop(True, AWAY, AWAY, AWAY, AWAY, True, AWAY, AWAY)
    # The failures began at 1700 s; the turn of 8500 s succeeds, and the steps of its run are too early to tell.
    assert sorted({*touched_s}) == [0, 1700, 3400, 5100, 10200, 11900]


def test_the_process_ends_between_two_steps_once_it_is_told_to(loop: Loop, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    loop.read = lambda: settings(alive_file=str(alive))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        loop.stop.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(Stopped):
            loop.stop.check()
        before_s = 1_000_000_000
        alive.touch()
        os.utime(alive, (before_s, before_s))
        loop.stop.is_set = False
        loop.outcomes = [True]
        # The signal comes during the run.
        loop.stop.check = lambda: loop.stop._note(15, None) or Stop.check(loop.stop)  # type: ignore[func-returns-value,method-assign]
        assert loop(True, True) == 0
        assert (len(loop.used), loop.pauses) == (1, [])
        assert alive.stat().st_mtime > before_s
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
