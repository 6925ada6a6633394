"""The rules by which sinks are compared: small functions, each with one decision, and what is kept between runs.

Times are ms since the epoch, offsets are offsets of Kafka.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SinkRule
from spark.reading.run_plan import DATA, LEDGER, REQUESTS, UNWANTED, Log, Plan
from spark.rule_table import PENDING
from spark.rules import kinds
from spark.settings import HOUR_MS, Settings

MISSING: Final = kinds.MISSING_IN_SINK.name
TWICE: Final = kinds.TWICE_IN_SINK.name
LATE: Final = kinds.LATE_IN_SINK.name
EXTRA: Final = kinds.EXTRA_IN_SINK.name
GAP: Final = kinds.EVIDENCE_GAP.name

PRESENT_ONCE: Final = "present_once"
UNREADABLE: Final = "unreadable"
"""The cause of the evidence gap of a sink that a run could not read."""
UNPROVABLE: Final = "unprovable"
SINK_CATEGORIES: Final = (PRESENT_ONCE, MISSING, TWICE, LATE, PENDING, UNPROVABLE)
"""Categories of the events that are expected in a sink. UNPROVABLE: a mirror may have deleted the record unread."""
KIND_OF_COUNT: Final[Mapping[str, str]] = {**{name: name for name in (MISSING, TWICE, LATE, EXTRA)}, UNPROVABLE: GAP}
"""By the count that its findings must agree with, each kind of finding about a sink."""

REPEATED: Final = "repeated"
COPIED: Final = "copied"
"""Causes of `twice_in_sink`: the sink has more rows than Kafka has records; it has a row for each copy in Kafka."""
ARRIVED: Final = "arrived"
WAS_MISSING: Final = "was_missing"
"""Causes of `late_in_sink`: by the column for the arrival; an earlier run had found the event missing."""

COUNTS_OF_SINK: Final = ("expected", *SINK_CATEGORIES, EXTRA, "unidentified")
"""The counts of a sink and an hour: events by category, rows of unknown events, and rows that name no event."""


# --------------------------------------------------------------------------------------------------------- rules


def is_expected(count: Column, claimed: Column, with_header: Column) -> Column:
    """Check whether a row of the lake is a record that a consumer must store: it can be read, and is Fencepost's."""
    return (count > 0) & (claimed | F.coalesce(with_header, F.lit(False)))


def visible_ms(accepted_ms: Column, named_ms: Column, released_ms: Column, max_settle: int) -> Column:
    """Return the time at which consumers could read a record, at the latest.

    `named_ms` is when the ledger or a 201 first named it. `released_ms` is when the run froze that first saw a log
    unblocked: until then an open transaction hid the record. Null for a log that was not blocked.
    """
    return F.greatest(F.greatest(accepted_ms, named_ms) + max_settle, released_ms)


def category(
    rows: Column, arrived_ms: Column, was_missing: Column, due_ms: Column, was_deleted: Column, seen_ms: int
) -> Column:
    """Return the category of an expected event by its number of rows in the sink; `due_ms` is its latest arrival.

    The sink is known until `seen_ms`: a row that was read from none was not there then, whatever the clocks say.
    `was_deleted`: a row of the event may have been deleted from the sink before it was read.
    """
    is_late = was_missing | F.coalesce(arrived_ms > due_ms, F.lit(False))
    return (
        F.when(rows > 1, TWICE)
        .when((rows == 1) & is_late, LATE)
        .when(rows == 1, PRESENT_ONCE)
        .when(due_ms < seen_ms, F.when(was_deleted & ~was_missing, UNPROVABLE).otherwise(MISSING))
        .otherwise(PENDING)
    )


def cause(category: Column, rows: Column, records: Column, was_missing: Column) -> Column:
    """Return the cause of a finding, null for a missing event."""
    return (
        F.when(category == TWICE, F.when(rows > records, REPEATED).otherwise(COPIED))
        .when(category == LATE, F.when(was_missing, WAS_MISSING).otherwise(ARRIVED))
        .otherwise(F.lit(None).cast("string"))
    )


def is_unknown_decided(event_ms: Column, margin_ms: int, complete_since_ms: int, decided_until_ms: int) -> Column:
    """Check whether the run knows all events that a row of this time may be: those within the margin around it."""
    return (event_ms - margin_ms >= complete_since_ms) & (event_ms + margin_ms < decided_until_ms)


# --------------------------------------------------------------------------------------------------------- state


class HourState(NamedTuple):
    """An hour as it was last compared: the run, whether its verdicts are final, the sink's definition then, and the
    counts by name (COUNTS_OF_SINK)."""

    run: int
    is_closed: bool
    definition: str
    counts: Mapping[str, int]


class Released(NamedTuple):
    """Records that an open transaction hid until a run froze at `visible_ms` (offsets from `first` to before `end`)."""

    topic: str
    partition: int
    first: int
    end: int
    visible_ms: int


@dataclass(frozen=True)
class SinkState:
    """What is known of a sink: the last run that has read it (0: none), when that run froze, the sink's definition
    then, its hours, and the run's `decided_until_ms` (None in lakes of an earlier version)."""

    run: int
    read_ms: int | None
    released: tuple[Released, ...]
    definition: str
    hours: Mapping[str, HourState]
    decided_ms: int | None = None


NEVER_READ: Final = SinkState(0, None, (), "", {})

RELEASED_MOST: Final = 10_000
"""How many spans of hidden records are kept of a sink, the latest ones."""


def definition(rule: SinkRule, settings: Settings) -> str:
    """Return what the verdicts of a sink depend on besides rows and records; it begins with the rule's own definition.

    The rest is the window, before which no hour is compared, how long a request may be unsettled, and the topics of
    what was refused.
    """
    others = settings.max_settle_ms, sorted(settings.rules.quarantine_topics)
    return f"{rule.definition}-{settings.options.window_h}-{sha256(repr(others).encode()).hexdigest()[:16]}"


def complete_since_ms(plan: Plan, kept_from_ms: int) -> int:
    """Return since when a run knows each accepted event: ledger and journal are complete, and the lake has its rows.

    `kept_from_ms` is the first hour that the lake keeps, 0 for all.
    """
    claims = (*plan.of(LEDGER), *plan.of(REQUESTS))
    return max(kept_from_ms, max((log.complete_since_ms for log in claims), default=plan.frozen_ms))


def decided_until_ms(rule: SinkRule, plan: Plan, max_settle_ms: int) -> int:
    """Return until when a run knows each accepted event of a sink's topics: it has read the records of all before.

    A topic that this run does not audit is known up to the last run that audited the topic.
    """
    unaudited = (log for log in plan.logs if log.role == UNWANTED)
    of_topics = (log for log in (*plan.of(DATA), *unaudited) if rule.expects(log.topic))
    logs = (*of_topics, *plan.of(LEDGER), *plan.of(REQUESTS))
    return min((plan.frozen_ms, *(log.decided_until_ms for log in logs))) - max_settle_ms


def due_hours(
    newest: Mapping[str, int], state: SinkState, definition: str, possible: Iterable[str], *, again: bool
) -> set[str]:
    """Return the hours of a sink to compare: those with new records, open verdicts, or another definition of the sink.

    `newest` is the last run that wrote to each hour (of those since the sink was last read), `possible` are hours to
    compare also without a record. With `again` every known hour is compared.
    """
    due = set()
    for hour in {*newest, *state.hours, *possible}:
        known = state.hours.get(hour)
        is_known = known is not None and known.is_closed and known.definition == definition
        if again or not is_known or newest.get(hour, 0) > state.hours[hour].run:
            due.add(hour)
    return due


def closes(
    hour_ms: int, counts: Mapping[str, int], rule: SinkRule, max_settle_ms: int, frozen_ms: int, decided_until_ms: int
) -> bool:
    """Check whether the verdicts of an hour (its start in ms) are final: nothing is open, and the lateness is over.

    An hour with a fault is compared in each run of the window, since a repaired sink has the event in the end.
    """
    is_open = any(counts[name] for name in (PENDING, MISSING, TWICE, EXTRA))
    is_over = hour_ms + HOUR_MS + max_settle_ms + 1000 * rule.late_s < frozen_ms
    is_decided = not rule.exclusive or hour_ms + HOUR_MS + 1000 * rule.margin_s < decided_until_ms
    return not is_open and is_over and is_decided


def judged_until_ms(rule: SinkRule, max_settle_ms: int, state: SinkState, open_hours_ms: Sequence[int]) -> int | None:
    """Return the watermark of a sink: the start of its first hour with a pending event, when lateness began, or until
    when the records were read, whichever is first. None if no event is known to be judged."""
    if state.read_ms is None:
        return None
    read_until_ms = [] if state.decided_ms is None else [state.decided_ms]
    found = min((state.read_ms - max_settle_ms - 1000 * rule.late_s, *read_until_ms, *open_hours_ms))
    return found if found > 0 else None


def released(
    rule: SinkRule, plan: Plan, last_plan: Plan | None, known: Sequence[Released], window_from: int
) -> tuple[Released, ...]:
    """Return what open transactions hid of a sink's topics until this run, and until earlier runs that froze in the
    window, whose hours may be compared again; at most RELEASED_MOST spans.

    A run with --max-records may read later what is visible now.
    """
    last_logs = {} if last_plan is None else last_plan.logs_by_partition
    found = [span for span in known if span.visible_ms >= window_from and span.visible_ms != plan.frozen_ms]
    for log in plan.of(DATA):
        last_log = last_logs.get(log.topic_partition)
        if rule.expects(log.topic) and last_log is not None and _is_released(log, last_log):
            found.append(Released(log.topic, log.partition, last_log.last_stable, log.last_stable, plan.frozen_ms))
    return tuple(found[-RELEASED_MOST:])


def _is_released(log: Log, last_log: Log) -> bool:
    """Check whether records of a log are visible now that were hidden when the last run froze."""
    is_same = log.topic_id == last_log.topic_id
    return is_same and last_log.last_stable < min(last_log.high_watermark, log.last_stable)
