"""`--follow`: runs one after another in one session, each as the job makes it, until SIGTERM or SIGINT.

A turn lists the logs by a few requests to Kafka. It makes a run if that run would find or report something else than
the last one (`reason_to_run`); otherwise nothing is read by Spark, and nothing is written. Nothing is carried from run
to run but what the decision needs: whatever a run needs of earlier ones it reads from the lake, so a process that is
killed at any point is followed by any other run.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from service.contract import SettingsError
from spark import job
from spark.engine.jvm import Py4JJavaError, checkpointed_ids, drop_checkpointed, is_stopped
from spark.errors import AnotherRun, CannotRun, Stopped
from spark.reading import run_plan, sinks
from spark.reading.run_plan import Plan, RunContext
from spark.report import webhook
from spark.rules.reconcile import classifies_old_hours, unchanged_balance
from spark.settings import Settings
from spark.silences import Silence
from spark.step_timer import OnProgress

RECHECK_S: Final = 60
"""How soon a run follows the last one only to decide open verdicts, or what a sink has."""

SLOW_RECHECK_S: Final = 300
"""The same for what stays open for long: a partition that a transaction blocks, the acceptance by a clock that was
ahead, a webhook that does not answer."""

FAILED_PAUSE_S: Final = 300
"""The longest pause after turns that failed in a row."""

SLICE_S: Final = 0.5
"""How often a pause looks whether the process was asked to end."""

FAILING_S: Final = 3600
"""How long turns may fail in a row before the process no longer says that it is alive."""

# Kafka was away, a disk was full, a file was not there, an executor was lost: a later turn may succeed.
_RETRIED: Final = (CannotRun, OSError, PySparkException, Py4JJavaError)


class Known(NamedTuple):
    """What a turn knows of the last run of this process.

    `settings` are those of the run, `new_evidence_ms` when the last run froze that found anything new in Kafka,
    `open_sinks` whether a sink had a pending event, `caught_up` whether the run had read all that was visible.
    """

    plan: Plan
    last_run: Any
    settings: Settings
    new_evidence_ms: int
    open_sinks: bool
    caught_up: bool


class Turn(NamedTuple):
    """What a turn did: the reason for its run, and the run; `finished` is None if there was no reason."""

    reason: str | None
    finished: job.Finished | None


def reason_to_run(known: Known, plan: Plan, settings: Settings) -> str | None:
    """Decide whether the run of a plan would find or report something else than the last one; returns why, or None.

    `plan` lists the logs as they are now (`job.plan_after`).
    """
    before, now_ms = known.plan, plan.frozen_ms
    if settings != known.settings or _active(settings.silences, now_ms) != _active(settings.silences, before.frozen_ms):
        return "settings"
    if not run_plan.reads_nothing_new(plan, before):
        return "records"
    if run_plan.window_from(plan, settings) != run_plan.window_from(before, settings):
        return "hour"
    context = RunContext(plan, settings, before, known.last_run, (), known.last_run.get("kept_from", ""))
    if classifies_old_hours(context):
        return "topics"
    # The absolute value: a clock that was set back delays nothing.
    passed_ms = abs(now_ms - before.frozen_ms)
    return next((reason for reason, after_s in _open(known, context) if passed_ms >= 1000 * after_s), None)


def _open(known: Known, context: RunContext) -> Iterator[tuple[str, int]]:
    """Yield what time alone may change since the last run, and how soon (s) after it a run is due for that."""
    logs = (*known.plan.logs, *context.plan.logs)
    if unchanged_balance(context) is None:
        # By then what is settled by time is decided; what is still open waits for something else.
        decided_ms = known.new_evidence_ms + context.settings.max_settle_ms + 2000 * RECHECK_S
        yield "open verdicts", RECHECK_S if context.plan.frozen_ms <= decided_ms else SLOW_RECHECK_S
    if context.settings.rules.sinks:
        yield "sinks", RECHECK_S if known.open_sinks else SLOW_RECHECK_S
    if any(log.audited and log.is_blocked for log in logs):
        yield "blocked partitions", SLOW_RECHECK_S
    # A run without --webhook keeps the state that an earlier one left.
    is_unsent = any(state != webhook.SENT for state in known.last_run["webhook"].values())
    if context.settings.webhook is not None and is_unsent:
        yield "webhook", SLOW_RECHECK_S


def _active(silences: Sequence[Silence], now_ms: int) -> list[bool]:
    return [silence.is_active(now_ms) for silence in silences]


def pause_after(pause_s: int, failures: int) -> int:
    """Return how long to wait after a turn (s): twice as long after each of the turns that failed in a row."""
    return min(pause_s << min(failures, 10), FAILED_PAUSE_S)


class Follower:
    """Makes turns in one session; each reads the settings anew.

    `read_settings` raises SettingsError or CannotRun. `on_step` is called with the name of each step of a run
    (StepTimer).
    """

    def __init__(
        self,
        spark: SparkSession,
        read_settings: Callable[[], Settings],
        on_progress: OnProgress,
        on_step: OnProgress,
    ) -> None:
        self._spark = spark
        self._read_settings = read_settings
        self._on_progress = on_progress
        self._on_step = on_step
        self._known: Known | None = None
        # The last mistake in the files of the settings that was reported.
        self._mistake = ""

    @property
    def has_finished(self) -> bool:
        """Whether a run of this process has finished."""
        return self._known is not None

    @property
    def caught_up(self) -> bool:
        """Whether the last run had read everything that was visible: --max-records bounds what a run reads."""
        return self._known is None or self._known.caught_up

    def turn(self, now_ms: int | None = None) -> Turn:
        """Make a run if there is a reason for one. Raises what a run raises; `now_ms` replaces the clock."""
        settings = self._settings()
        with _released(self._spark):
            reason = self._reason(settings, now_ms)
            if reason is None:
                return Turn(None, None)
            finished = job.finish_run(self._spark, settings, self._on_progress, now_ms, on_step=self._on_step)
        self._known = _known_of(finished, settings, self._known)
        return Turn(reason, finished)

    def _reason(self, settings: Settings, now_ms: int | None) -> str | None:
        """Return why this turn makes a run; None if there is no reason."""
        if self._known is None:
            return "start"
        plan = job.plan_after(self._spark, settings, self._known.plan, now_ms)
        return "another run" if plan is None else reason_to_run(self._known, plan, settings)

    def _settings(self) -> Settings:
        """Read the settings; those of the last run if a file has a mistake, which is reported once."""
        try:
            settings = self._read_settings()
            sinks.check_rules(self._spark, settings.rules.sinks)
        except (SettingsError, CannotRun) as error:
            if self._known is None:
                raise
            if str(error) != self._mistake:
                self._mistake = str(error)
                self._on_progress(f"going on with the settings of the last run: {error}")
            return self._known.settings
        self._mistake = ""
        return settings


def _known_of(finished: job.Finished, settings: Settings, before: Known | None) -> Known:
    """Return what a turn needs to know of a finished run; `before` is what it knew of the run before."""
    document, plan = finished.report.document, finished.plan
    new_evidence_ms = plan.frozen_ms
    if before is not None and run_plan.reads_nothing_new(plan, before.plan):
        new_evidence_ms = before.new_evidence_ms
    return Known(
        plan,
        finished.last_run,
        settings,
        new_evidence_ms,
        any(sink["pending"] for sink in document["sinks"]),
        document["run"]["caught_up"],
    )


@contextmanager
def _released(spark: SparkSession) -> Iterator[None]:
    """Drop what Spark still keeps in memory of the turn in the context; after an error also cached rows."""
    before = checkpointed_ids(spark)
    try:
        yield
    except BaseException:
        if not is_stopped(spark):
            spark.catalog.clearCache()
        raise
    finally:
        if not is_stopped(spark):
            drop_checkpointed(spark, checkpointed_ids(spark) - before)


class AliveFile:
    """The file that tells a probe that the process is alive; none without a path.

    Its time is no longer set once turns have failed for FAILING_S, until one succeeds.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # By time.monotonic(); None if the last turn has not failed.
        self._failing_since_s: float | None = None

    def touch(self) -> None:
        """Set the time of the file. Raises OSError."""
        failing_s = 0 if self._failing_since_s is None else time.monotonic() - self._failing_since_s
        if self._path and failing_s < FAILING_S:
            Path(self._path).touch()

    def failed(self) -> None:
        """Note that a turn has failed."""
        self._failing_since_s = time.monotonic() if self._failing_since_s is None else self._failing_since_s

    def succeeded(self) -> None:
        """Note that a turn has succeeded."""
        self._failing_since_s = None


class Stop:
    """Whether SIGTERM or SIGINT has asked the process to end. A second signal ends the process at once."""

    def __init__(self) -> None:
        self.is_set = False

    def listen(self) -> None:
        """Take the signals; called once the session is open, since Spark takes SIGINT too."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        signal.signal(number, signal.SIG_DFL)

    def check(self) -> None:
        """Raise Stopped once the process was asked to end."""
        if self.is_set:
            raise Stopped

    def wait(self, seconds: float) -> None:
        """Wait for so long, or until the process is asked to end."""
        until_s = time.monotonic() + seconds
        while not self.is_set and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(SLICE_S, left_s))


def follow(spark: SparkSession, read_settings: Callable[[], Settings], on_progress: OnProgress, stop: Stop) -> int:
    """Make turns until the process is asked to end, and return the exit status 0.

    Until the first run has finished, its errors are raised, except AnotherRun. From then on errors are reported in a
    line, and the next turn tries again; only the loss of the JVM ends the process.
    """
    options = read_settings().options
    alive = AliveFile(options.alive_file)

    def on_step(name: str) -> None:
        stop.check()
        alive.touch()

    follower = Follower(spark, read_settings, on_progress, on_step)
    failures, is_waiting = 0, False
    while not stop.is_set:
        pause_s = options.pause_s
        try:
            alive.touch()
            turn = follower.turn()
        except Stopped:
            break
        except AnotherRun as error:
            if not is_waiting:
                on_progress(f"waiting: {error}")
            is_waiting = True
        except _RETRIED as error:
            if _is_lost(spark, error) or not follower.has_finished:
                raise
            alive.failed()
            failures += 1
            pause_s = pause_after(options.pause_s, failures)
            on_progress(f"the turn failed, the next one begins in {pause_s} s: {_first_line(error)}")
        else:
            alive.succeeded()
            failures, is_waiting = 0, False
            if turn.finished is not None:
                on_progress(line_of(turn.finished, turn.reason))
                pause_s = options.pause_s if follower.caught_up else 0
        stop.wait(pause_s)
    on_progress("asked to end: the next run continues here")
    return 0


def line_of(finished: job.Finished, reason: str | None) -> str:
    """Describe a finished run in a line of the log."""
    document = finished.report.document
    run, cost = document["run"], document["cost"]
    text = f"run {run['number']} ({reason}): {run['verdict']}, {run['findings']} findings, {cost['offsets']} offsets"
    return text if run["caught_up"] else f"{text}; not all is read yet"


def _is_lost(spark: SparkSession, error: BaseException) -> bool:
    """Check whether the JVM is lost: Py4J raises a ConnectionError then."""
    return isinstance(error, ConnectionError) or is_stopped(spark)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
