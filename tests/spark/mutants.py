"""The rules of the job, each broken on purpose: tables of cases with known verdicts must detect each mutant.

A mutant replaces one rule by another function while it is `active`; most rules are in spark/rule_table.py. `check`
names the check of tests/spark/checks.py that must detect the mutant.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from types import ModuleType
from typing import Any, Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from spark import rule_table
from spark.reading import decode, planning, run_plan
from spark.reading.run_plan import UNWANTED, Log, Plan
from spark.rules import classify, sink_verdicts
from spark.rules.balance import Balance
from spark.settings import Settings
from spark.tables import deliveries
from tests.spark.times import HOUR_MS

VERDICTS, CAUSES, CLIENTS, STATES, PLANS, BALANCES = "verdicts", "causes", "clients", "states", "plans", "balances"
WINDOWS, LATE, TIMES, HOURS = "windows", "late", "times", "hours"
VIEWS, SINK_STATES, SINK_VERDICTS = "views", "sink states", "sink verdicts"


@dataclass(frozen=True)
class Mutant:
    """A `rule` of the module or class `owner`, its `replacement`, and the `change` in words.

    A rule that is a constant is given by its name.
    """

    rule: Any
    change: str
    replacement: Any
    check: str
    owner: ModuleType | type = rule_table

    def __str__(self) -> str:
        return f"{self.name}: {self.change}"

    @property
    def name(self) -> str:
        """The rule's name in its owner; for a property the name of its function."""
        return self.rule if isinstance(self.rule, str) else str(getattr(self.rule, "fget", self.rule).__name__)


@contextmanager
def active(mutant: Mutant) -> Iterator[None]:
    """Replace the rule in the context."""
    whole = vars(mutant.owner)[mutant.name]
    setattr(mutant.owner, mutant.name, mutant.replacement)
    try:
        yield
    finally:
        setattr(mutant.owner, mutant.name, whole)


def sample(count: int, seed: int) -> list[Mutant]:
    """Return a sample of the mutants, the same for a seed."""
    return random.Random(seed).sample(MUTANTS, count)


def _never(*given: Any, **named: Any) -> Column:
    return F.lit(False)


def _always(*given: Any, **named: Any) -> Column:
    return F.lit(True)


def _settings(**left_out: int) -> property:
    def max_settle_ms(self: Settings) -> int:
        parts = {
            "request": self.shared.request_timeout_ms,
            "transaction": self.shared.transaction_timeout_ms,
            "grace": self.grace_ms,
        }
        return sum((parts | left_out).values())

    return property(max_settle_ms)


def _with(chain: Callable[..., Column], name: str, other: Callable[[Column], Column]) -> Callable[..., Column]:
    """Return a rule with one of its named columns replaced."""
    return lambda **named: chain(**named | {name: other(named[name])})


def _given(whole: Callable[..., Column], nth: int, other: Callable[[Column], Column]) -> Callable[..., Column]:
    """Return a rule with one of its arguments replaced."""
    return lambda *given: whole(*given[:nth], other(given[nth]), *given[nth + 1 :])


def _retry_but(*left_out: str) -> Callable[..., Column]:
    def is_retry(**named: Column) -> Column:
        named["same_id"] = ~named["same_id"]
        named["same_batch"] = ~F.coalesce(named["same_batch"], F.lit(False))
        kept = [column for name, column in named.items() if name not in left_out]
        return F.coalesce(reduce(and_, kept), F.lit(False))

    return is_retry


def _cause_as(**other: str) -> Callable[..., Column]:
    """Return the rule `cause` with some causes replaced by others."""
    whole = rule_table.cause

    def cause(*given: Column) -> Column:
        made = whole(*given)
        for name, replacement in other.items():
            made = F.when(made == name, replacement).otherwise(made)
        return made

    return cause


def _as_listed(cluster: Any, logs: list[Log]) -> list[Log]:
    return [replace(log, later_end=log.high_watermark) for log in logs]


def _caught_up_only_at_the_end(log: Log, run: int) -> Log:
    return replace(log, caught_up_run=run) if log.end >= log.high_watermark else log


def _closes_with(*ignored: str) -> Callable[..., bool]:
    """Return the rule `closes` without some of its counts."""
    whole = sink_verdicts.closes
    return lambda hour, counts, *given: whole(hour, {**counts, **dict.fromkeys(ignored, 0)}, *given)


def _read_alone(rule: Any, plan: Plan, settle: int, whole: Any = sink_verdicts.decided_until_ms) -> Any:
    return whole(rule, replace(plan, logs=tuple(log for log in plan.logs if log.role != UNWANTED)), settle)


_NO: Final = "is never asked"

_SINKS: Final = (
    *(
        Mutant(
            sink_verdicts.due_hours,
            change,
            lambda newest, state, definition, possible, *, again, other=other, whole=sink_verdicts.due_hours: whole(
                *other(newest, state, definition, possible), again=again
            ),
            SINK_STATES,
            sink_verdicts,
        )
        for change, other in (
            ("not with new records", lambda newest, state, definition, possible: ({}, state, definition, possible)),
            ("not without records", lambda newest, state, definition, possible: (newest, state, definition, ())),
            ("whatever the definition", lambda newest, state, definition, possible: (newest, state, "a", possible)),
        )
    ),
    Mutant(
        sink_verdicts.due_hours,
        "not again",
        lambda *given, again, whole=sink_verdicts.due_hours: whole(*given, again=False),
        SINK_STATES,
        sink_verdicts,
    ),
    *(
        Mutant(sink_verdicts.closes, f"with {name}", _closes_with(name), SINK_STATES, sink_verdicts)
        for name in ("pending", "missing_in_sink", "twice_in_sink", "extra_in_sink")
    ),
    Mutant(
        sink_verdicts.closes,
        "before the lateness is over",
        lambda hour, counts, rule, settle, frozen, decided, whole=sink_verdicts.closes: whole(
            hour, counts, rule, settle, 2**60, decided
        ),
        SINK_STATES,
        sink_verdicts,
    ),
    Mutant(
        sink_verdicts.closes,
        "before it is decided",
        lambda *given, whole=sink_verdicts.closes: whole(*given[:-1], 2**60),
        SINK_STATES,
        sink_verdicts,
    ),
    *(
        Mutant(
            sink_verdicts.judged_until_ms,
            change,
            lambda *given, other=other, whole=sink_verdicts.judged_until_ms: whole(*other(*given)),
            SINK_STATES,
            sink_verdicts,
        )
        for change, other in (
            ("past open hours", lambda rule, settle, state, open_ms: (rule, settle, state, ())),
            ("past what was read", lambda rule, settle, state, o: (rule, settle, replace(state, decided_ms=None), o)),
            ("before the lateness is over", lambda rule, settle, state, o: (replace(rule, late_s=0), settle, state, o)),
            ("before it is settled", lambda rule, settle, state, open_ms: (rule, 0, state, open_ms)),
        )
    ),
    Mutant(sink_verdicts._is_released, _NO, lambda log, last_log: False, SINK_STATES, sink_verdicts),
    Mutant(
        sink_verdicts._is_released,
        "of an earlier topic",
        lambda log, last: last.last_stable < min(last.high_watermark, log.last_stable),
        SINK_STATES,
        sink_verdicts,
    ),
    Mutant(
        sink_verdicts._is_released,
        "by what was read",
        lambda log, last: log.topic_id == last.topic_id and last.last_stable < min(last.high_watermark, log.end) - 1,
        SINK_STATES,
        sink_verdicts,
    ),
    Mutant(
        sink_verdicts.released,
        "for ever",
        lambda *given, whole=sink_verdicts.released: whole(*given[:-1], 0),
        SINK_STATES,
        sink_verdicts,
    ),
    Mutant(
        sink_verdicts.released,
        "of any topic",
        lambda rule, *given, whole=sink_verdicts.released: whole(replace(rule, topics=("*",)), *given),
        SINK_STATES,
        sink_verdicts,
    ),
    Mutant(sink_verdicts.decided_until_ms, "without other runs' topics", _read_alone, SINK_STATES, sink_verdicts),
    Mutant(
        sink_verdicts.decided_until_ms,
        "at the freeze",
        lambda rule, plan, settle: plan.frozen_ms - settle,
        SINK_STATES,
        sink_verdicts,
    ),
    Mutant(
        sink_verdicts.decided_until_ms,
        "before it is settled",
        lambda rule, plan, settle, whole=sink_verdicts.decided_until_ms: whole(rule, plan, 0),
        SINK_STATES,
        sink_verdicts,
    ),
    Mutant(
        sink_verdicts.complete_since_ms,
        "whatever the lake keeps",
        lambda plan, kept, whole=sink_verdicts.complete_since_ms: whole(plan, 0),
        SINK_STATES,
        sink_verdicts,
    ),
    Mutant(sink_verdicts.complete_since_ms, "whatever is claimed", lambda plan, kept: kept, SINK_STATES, sink_verdicts),
    Mutant(
        sink_verdicts.definition, "the rule alone", lambda rule, settings: rule.definition, SINK_STATES, sink_verdicts
    ),
    *(
        Mutant(rule, change, _given(rule, nth, other), SINK_VERDICTS, sink_verdicts)
        for rule, change, nth, other in (
            (sink_verdicts.category, "two are one", 0, lambda rows: F.least(rows, F.lit(1))),
            (sink_verdicts.category, "never late by its arrival", 1, lambda arrived_ms: F.lit(None).cast("bigint")),
            (sink_verdicts.category, "never late by an earlier run", 2, _never),
            (sink_verdicts.category, "1 ms later", 3, lambda due_ms: due_ms + 1),
            (sink_verdicts.category, "whatever was deleted", 4, _never),
            (sink_verdicts.cause, "a row for each record repeats", 2, lambda records: records - 1),
            (sink_verdicts.cause, "whatever was missing", 3, _never),
            (sink_verdicts.is_expected, "a lost record too", 0, lambda count: count + 1),
            (sink_verdicts.is_expected, "whatever is claimed", 1, _never),
            (sink_verdicts.is_expected, "whatever the header", 2, _never),
            (sink_verdicts.is_expected, "another program's", 2, _always),
            (sink_verdicts.visible_ms, "by what named it alone", 0, lambda accepted_ms: F.lit(None).cast("bigint")),
            (sink_verdicts.visible_ms, "by the acceptance alone", 1, lambda named_ms: F.lit(None).cast("bigint")),
            (sink_verdicts.visible_ms, "whatever hid it", 2, lambda released_ms: F.lit(None).cast("bigint")),
            (sink_verdicts.is_unknown_decided, "1 ms before", 0, lambda event_ms: event_ms + 1),
            (sink_verdicts.is_unknown_decided, "1 ms after", 0, lambda event_ms: event_ms - 1),
        )
    ),
)
"""Mutants of the rules by which sinks are compared."""

MUTANTS: Final = (
    # ------------------------------------------------------------------------------------------ order and causes
    Mutant(rule_table.rank, "entered last", lambda entered: F.when(entered, 1).otherwise(0), CAUSES),
    Mutant("ORDER", "topic before time", ("topic", "timestamp", "partition", "offset"), STATES),
    Mutant("ORDER", "offset before partition", ("timestamp", "topic", "offset", "partition"), STATES),
    Mutant(rule_table.is_foreign, "only bare", lambda has_header, same, late: ~has_header, CAUSES),
    Mutant(rule_table.is_foreign, "not the bare", lambda has_header, same, late: same & (late == 1), CAUSES),
    Mutant(rule_table.is_foreign, "also in the ledger", lambda has_header, same, late: ~has_header | same, CAUSES),
    Mutant("PRODUCER_IDENTITY", "without instance", ("slot", "pid", "epoch"), CAUSES),
    Mutant("PRODUCER_IDENTITY", "without number", ("slot", "instance"), CAUSES),
    Mutant(rule_table.cause, "rewrite is a restart", _cause_as(rewrite="producer_restart"), CAUSES),
    Mutant(rule_table.cause, "dual is a restart", _cause_as(dual_producer="producer_restart"), CAUSES),
    Mutant(rule_table.is_past_retention, "more than", lambda at, other, ttl: F.abs(at - other) > ttl, CAUSES),
    Mutant(rule_table.is_past_retention, "a ms less", lambda at, other, ttl: F.abs(at - other) >= ttl - 1, CAUSES),
    Mutant(rule_table.is_expired, "without earlier ones", lambda earlier, past_retention: past_retention, CAUSES),
    Mutant(rule_table.is_restart, "slot alone", lambda slot, instance, number: slot & ~number, CAUSES),
    Mutant(rule_table.is_restart, "instance alone", lambda slot, instance, number: instance & ~number, CAUSES),
    Mutant(rule_table.is_restart, "same number", lambda slot, instance, number: slot | instance, CAUSES),
    Mutant(rule_table.has_cause, "the first too", lambda nth: nth >= 0, CAUSES),
    # ----------------------------------------------------------------------------------------------------- times
    Mutant(rule_table.settled_at_ms, "2 ms more", lambda at, seen, s, g: F.greatest(at + s + 2, seen + g), VERDICTS),
    Mutant(
        rule_table.settled_at_ms, "grace 2 ms more", lambda at, seen, s, g: F.greatest(at + s, seen + g + 2), VERDICTS
    ),
    Mutant(rule_table.settled_at_ms, "no grace", lambda at, seen, s, g: F.greatest(at + s, seen), VERDICTS),
    Mutant(rule_table.blocked_settled_at_ms, "no timeouts", lambda at, seen, s: F.greatest(at, seen), VERDICTS),
    Mutant(Settings.max_settle_ms, "no request timeout", _settings(request=0), VERDICTS, Settings),
    Mutant(Settings.max_settle_ms, "no transaction timeout", _settings(transaction=0), VERDICTS, Settings),
    Mutant(Settings.max_settle_ms, "no grace", _settings(grace=0), VERDICTS, Settings),
    Mutant(rule_table.is_settled, "at once", lambda over, frozen: over <= frozen, VERDICTS),
    Mutant(rule_table.is_undecided, "at once", lambda over, decided: over >= decided, VERDICTS),
    Mutant(rule_table.is_undecided, _NO, _never, VERDICTS),
    Mutant(rule_table.is_undecided_at_freeze, _NO, lambda decided, frozen: False, VERDICTS),
    Mutant(rule_table.is_ledger_behind, _NO, _never, VERDICTS),
    Mutant(rule_table.is_ledger_behind, "in the same run", lambda read, caught_up: read >= caught_up, VERDICTS),
    Mutant(rule_table.is_ahead, _NO, _never, VERDICTS),
    Mutant(rule_table.is_ahead, _NO, _never, TIMES),
    Mutant(rule_table.is_ahead, "at a day", lambda ms, now: ms >= now + rule_table.AHEAD_MS, TIMES),
    Mutant(rule_table.is_ahead, "an hour", lambda ms, now: ms > now + HOUR_MS, TIMES),
    Mutant(decode.clamped, "to the latest", lambda ms: F.least(ms, F.lit(decode.PLAUSIBLE_MS[1])), TIMES, decode),
    # ------------------------------------------------------------------------------------------------------ lost
    Mutant(rule_table.is_not_yet_read, _NO, _never, VERDICTS),
    Mutant(rule_table.is_beyond, "behind", lambda offset, end: offset > end, VERDICTS),
    Mutant(
        rule_table.is_not_yet_read,
        "whatever it was",
        lambda beyond, was_past_end, past_end: beyond & ~past_end,
        VERDICTS,
    ),
    Mutant(
        rule_table.is_not_yet_read,
        "past the end",
        lambda beyond, was_past_end, past_end: beyond & ~was_past_end,
        VERDICTS,
    ),
    Mutant(
        rule_table.is_not_yet_read,
        "anywhere",
        lambda beyond, was_past_end, past_end: ~was_past_end & ~past_end,
        VERDICTS,
    ),
    Mutant(rule_table.is_past_end, "behind", lambda offset, end: offset > end, VERDICTS),
    Mutant(planning._with_later_end, "as listed before", _as_listed, PLANS, planning),
    Mutant(planning._with_caught_up_run, "at once", lambda log, run: replace(log, caught_up_run=run), PLANS, planning),
    Mutant(planning._with_caught_up_run, "when it stands still", _caught_up_only_at_the_end, PLANS, planning),
    Mutant(classify._is_also_entered, _NO, _never, VERDICTS, classify),
    Mutant(rule_table.all_claims, "the ledger's", lambda entered, answered: entered, VERDICTS),
    Mutant(rule_table.all_claims, "the journal's", lambda entered, answered: answered, VERDICTS),
    # ------------------------------------------------------------------------------------------------------ gaps
    Mutant(rule_table.is_below, "at the start", lambda offset, first: offset <= first, VERDICTS),
    Mutant(rule_table.is_below, _NO, _never, VERDICTS),
    Mutant(rule_table.is_of_earlier_topic, _NO, _never, VERDICTS),
    *(
        Mutant(rule_table.is_of_earlier_topic, change, _given(rule_table.is_of_earlier_topic, nth, other), VERDICTS)
        for change, nth, other in (
            ("by time alone", 0, lambda claimed_id: F.lit(None).cast("bigint")),
            ("whatever the id", 1, lambda topic_id: F.lit(0)),
            ("not since it was seen", 3, lambda recreated_at_ms: F.lit(0)),
            ("not by the first record", 4, lambda first_record_ms: F.lit(0)),
            ("at once", 5, _always),
        )
    ),
    Mutant(rule_table.is_compacted, _NO, _never, VERDICTS),
    Mutant(rule_table.is_compacted, "what was never there", lambda compacted, was_past_end: compacted, VERDICTS),
    Mutant(rule_table.outcome_without_log, "not waited for", lambda settled: F.lit("topic_gone"), VERDICTS),
    *(
        Mutant(
            rule_table.is_without_coordinates,
            f"whatever its {name}",
            _given(rule_table.is_without_coordinates, nth, other),
            VERDICTS,
        )
        for name, nth, other in (
            ("entries", 1, lambda entries: F.lit(0)),
            ("answers", 2, _never),
            ("record", 3, lambda with_header: F.lit(0)),
        )
    ),
    Mutant(
        rule_table.outcome_without_coordinates, "not waited for", lambda undecided: F.lit("no_coordinates"), VERDICTS
    ),
    Mutant(rule_table.gap_count, "twice", lambda counted: F.lit(1).cast("bigint"), VERDICTS),
    Mutant(run_plan.settings_of, "the command line's", lambda options, now: now, PLANS, run_plan),
    Mutant(rule_table.is_recreated, _NO, lambda topic_id, now: False, PLANS),
    Mutant(rule_table.is_deleted_unread, _NO, lambda start, read_to: False, PLANS),
    Mutant(rule_table.is_truncated, _NO, lambda agrees_to, read_to: False, PLANS),
    Mutant(rule_table.intact_until, "the end alone", lambda end, diverged, read_to: end, PLANS),
    Mutant(
        rule_table.intact_until,
        "the epoch alone",
        lambda end, diverged, read_to: read_to if diverged is None else diverged,
        PLANS,
    ),
    Mutant(
        rule_table.complete_since,
        "ever",
        lambda oldest_ms, of_topic_ms, *, has_first_record: 0 if has_first_record else oldest_ms,
        PLANS,
    ),
    Mutant(
        rule_table.complete_since,
        "each by itself",
        lambda oldest_ms, of_topic_ms, *, has_first_record: oldest_ms,
        PLANS,
    ),
    Mutant(
        rule_table.complete_since,
        "whatever it lost",
        lambda oldest_ms, of_topic_ms, *, has_first_record: min(of_topic_ms, default=oldest_ms),
        PLANS,
    ),
    # -------------------------------------------------------------------------------------------------- phantoms
    Mutant(rule_table.is_before_evidence, "after", lambda complete, at: complete.isNull() | (complete < at), VERDICTS),
    Mutant(rule_table.is_before_evidence, _NO, _never, VERDICTS),
    Mutant(rule_table.is_before_evidence, "no slot", lambda complete, at: complete > at, VERDICTS),
    Mutant(
        rule_table.is_unclaimed,
        "idempotent never",
        lambda entries, has_201, idempotent, answered: (entries == 0) & ~has_201 & ~idempotent,
        VERDICTS,
    ),
    Mutant(
        rule_table.is_unclaimed,
        "by the ledger and 201s",
        lambda entries, has_201, idempotent, answered: (entries == 0) & ~has_201,
        VERDICTS,
    ),
    Mutant(
        rule_table.is_unclaimed,
        "by the ledger alone",
        lambda entries, has_201, idempotent, answered: (entries == 0) & ~(idempotent & answered),
        VERDICTS,
    ),
    Mutant(
        rule_table.is_within, "at the end", lambda offset, first, end: (offset >= first) & (offset <= end), VERDICTS
    ),
    Mutant(
        rule_table.is_within, "not at its first", lambda offset, first, end: (offset > first) & (offset < end), VERDICTS
    ),
    Mutant(rule_table.is_within, "always", _always, VERDICTS),
    # --------------------------------------------------------------------------------------- stuck and the balance
    Mutant(rule_table.is_freed, "any 503", lambda freed, in_doubt: freed.isNotNull(), VERDICTS),
    Mutant(rule_table.is_freed, _NO, _never, VERDICTS),
    Mutant(rule_table.is_freed, "not in the same ms", lambda freed, in_doubt: freed > in_doubt, VERDICTS),
    Mutant(rule_table.both_decided_until, "the journal alone", lambda ledger, answers: answers, VERDICTS),
    Mutant(
        rule_table.in_doubt_cause, "202 first", lambda a202, a504: F.when(a202 > 0, "202").otherwise("504"), VERDICTS
    ),
    Mutant(
        rule_table.is_accepted,
        "not by a 202",
        _with(rule_table.is_accepted, "answered_202", lambda n: F.lit(0)),
        VERDICTS,
    ),
    Mutant(
        rule_table.is_accepted,
        "not by a 504",
        _with(rule_table.is_accepted, "answered_504", lambda n: F.lit(0)),
        VERDICTS,
    ),
    Mutant(
        rule_table.is_accepted,
        "taken back though it came",
        _with(rule_table.is_accepted, "with_header", lambda n: F.lit(0)),
        VERDICTS,
    ),
    Mutant(
        rule_table.is_accepted, f"elsewhere {_NO}", _with(rule_table.is_accepted, "settled_elsewhere", _never), VERDICTS
    ),
    Mutant(rule_table.settles_doubt, "not a phantom", lambda has_header, entries, a201: entries + a201 > 0, HOURS),
    Mutant(
        rule_table.settles_doubt, "not the ledger", lambda has_header, entries, a201: has_header | (a201 > 0), HOURS
    ),
    Mutant(rule_table.settles_doubt, "not a 201", lambda has_header, entries, a201: has_header | (entries > 0), HOURS),
    Mutant(rule_table.settles_doubt, "a stranger", _always, HOURS),
    Mutant(rule_table.is_freed, "any 503", lambda freed, in_doubt: freed.isNotNull(), HOURS),
    *(
        Mutant(rule_table.category, f"{name} {_NO}", _with(rule_table.category, name, _never), VERDICTS)
        for name in ("lost", "conflicting", "pending", "unproven")
    ),
    Mutant(
        rule_table.category,
        "two are one",
        _with(rule_table.category, "copies", lambda n: n - F.when(n > 1, 1).otherwise(0)),
        VERDICTS,
    ),
    Mutant(
        rule_table.category, "strangers settle", _with(rule_table.category, "settling", lambda n: F.lit(1)), VERDICTS
    ),
    Mutant(rule_table.outcome, "at once", _with(rule_table.outcome, "settled", _always), VERDICTS),
    Mutant(rule_table.outcome, f"proven {_NO}", _with(rule_table.outcome, "proven_lost", _never), VERDICTS),
    # -------------------------------------------------------------------------------------- conflicts and copies
    Mutant(rule_table.is_same_request, _NO, _never, VERDICTS),
    Mutant(rule_table.is_same_request, "any", _always, VERDICTS),
    Mutant(rule_table.copies_kind, "all the same", lambda conflicting: F.lit("duplicate"), VERDICTS),
    Mutant(deliveries._has_distrusted_header, _NO, _never, VERDICTS, deliveries),
    Mutant(
        deliveries._has_distrusted_header,
        "even of the ledger",
        lambda: deliveries._computed_fingerprint().isNotNull(),
        VERDICTS,
        deliveries,
    ),
    Mutant(rule_table.is_derived_copy, _NO, _never, VERDICTS),
    Mutant(
        rule_table.is_derived_copy,
        "in its own topic",
        lambda has_header, claimed, elsewhere: has_header & ~claimed,
        VERDICTS,
    ),
    # ----------------------------------------------------------------------------------------- client duplicates
    Mutant(rule_table.is_near, "at the retention", lambda distance, ttl: distance <= ttl, CLIENTS),
    Mutant(rule_table.is_near, "a ms less", lambda distance, ttl: distance < ttl - 1, CLIENTS),
    *(
        Mutant(rule_table.is_retry, f"without {name}", _retry_but(name), CLIENTS)
        for name in ("same_content", "same_caller", "same_id", "near", "same_time", "same_batch")
    ),
    Mutant(rule_table.is_client_timestamp, _NO, _never, CLIENTS),
    Mutant(rule_table.is_client_timestamp, "any", _always, CLIENTS),
    # ---------------------------------------------------------------------------------------------- views and show
    *(
        Mutant(rule_table.is_its_record, f"any {name}", _with(rule_table.is_its_record, name, _always), VIEWS)
        for name in ("same_id", "bare", "same_content", "same_key")
    ),
    # --------------------------------------------------------------------------------------- balance, window, time
    Mutant(rule_table.window_from, "twice as long", lambda frozen, window: frozen - 2 * window, PLANS),
    Mutant(rule_table.window_from, "to the ms", lambda frozen, window: frozen - window, PLANS),
    *(
        Mutant(rule_table.is_in_window, change, _given(rule_table.is_in_window, nth, _never), WINDOWS)
        for nth, change in enumerate(("not by the evidence", "not by the acceptance", "not by a late decision"))
    ),
    Mutant(rule_table.late_ms, "always now", lambda known, known_ms, decided_ms: decided_ms, LATE),
    Mutant(rule_table.late_ms, "never now", lambda known, known_ms, decided_ms: known_ms, LATE),
    Mutant(rule_table.late_ms, "also what was known", lambda known, known_ms, ms: F.coalesce(known_ms, ms), LATE),
    Mutant(rule_table.is_revoked, "whenever it was", _always, WINDOWS),
    Mutant(rule_table.is_revoked, _NO, _never, WINDOWS),
    Mutant(rule_table.is_revoked, "not by the same run", lambda found, passed: found < passed, WINDOWS),
    Mutant(Balance.open_hours, "none", lambda self: set(), BALANCES, Balance),
    # ----------------------------------------------------------------------------------------------------- sinks
    *_SINKS,
)
