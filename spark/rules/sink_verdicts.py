"""The rules by which sinks are compared: small functions, each with one decision, and what is kept between runs.

Times are ms since the epoch, offsets are offsets of Kafka.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SinkRule
from spark.reading.run_plan import DATA, Plan
from spark.rule_table import PENDING
from spark.rules import kinds
from spark.settings import HOUR_MS

MISSING: Final = kinds.MISSING_IN_SINK.name
TWICE: Final = kinds.TWICE_IN_SINK.name
LATE: Final = kinds.LATE_IN_SINK.name
EXTRA: Final = kinds.EXTRA_IN_SINK.name
KINDS: Final = (MISSING, TWICE, LATE, EXTRA)

PRESENT_ONCE: Final = "present_once"
CATEGORIES: Final = (PRESENT_ONCE, MISSING, TWICE, LATE, PENDING)
"""Categories of the events that are expected in a sink."""

REPEATED: Final = "repeated"
COPIED: Final = "copied"
"""Causes of `twice_in_sink`: the sink has more rows than Kafka has records; it has a row for each copy in Kafka."""
ARRIVED: Final = "arrived"
WAS_MISSING: Final = "was_missing"
"""Causes of `late_in_sink`: by the column for the arrival; an earlier run had found the event missing."""

COUNTS: Final = ("expected", *CATEGORIES, EXTRA, "unidentified")
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


def category(rows: Column, arrived_ms: Column, was_missing: Column, due_ms: Column, frozen_ms: int) -> Column:
    """Return the category of an expected event by its number of rows in the sink; `due_ms` is its latest arrival.

    The sink is read after the freeze: a row that is not there was not there at the freeze, whatever the clocks say.
    """
    is_late = was_missing | F.coalesce(arrived_ms > due_ms, F.lit(False))
    return (
        F.when(rows > 1, TWICE)
        .when((rows == 1) & is_late, LATE)
        .when(rows == 1, PRESENT_ONCE)
        .when(due_ms < frozen_ms, MISSING)
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
    """An hour as it was last compared: the run, whether its verdicts are final, and the rule's definition then."""

    run: int
    is_closed: bool
    definition: str


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
    then, and its hours."""

    run: int
    read_ms: int | None
    released: tuple[Released, ...]
    definition: str
    hours: Mapping[str, HourState]


NEVER_READ: Final = SinkState(0, None, (), "", {})


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


def judged_until_ms(
    rule: SinkRule, max_settle_ms: int, read_ms: int | None, open_hours_ms: Sequence[int]
) -> int | None:
    """Return the watermark of a sink: the start of its first hour with a pending event, or when lateness began."""
    if read_ms is None:
        return None
    return min((read_ms - max_settle_ms - 1000 * rule.late_s, *open_hours_ms))


def released(plan: Plan, last_plan: Plan | None, known: Sequence[Released], kept_ms: int) -> tuple[Released, ...]:
    """Return what open transactions hid until this run, and until earlier runs that froze since `kept_ms`."""
    last_logs = {} if last_plan is None else last_plan.logs_by_partition
    found = [span for span in known if span.visible_ms >= kept_ms and span.visible_ms != plan.frozen_ms]
    for log in plan.of(DATA):
        last_log = last_logs.get(log.topic_partition)
        if last_log is not None and last_log.last_stable < min(last_log.high_watermark, log.end):
            found.append(Released(log.topic, log.partition, last_log.last_stable, log.end, plan.frozen_ms))
    return tuple(found)
