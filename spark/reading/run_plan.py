"""The plan of a run: what each log is read for, up to where, and with which options; a row of `progress` for a log."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Final, TypeVar

from service.contract import CallerRule, Guarantee, KeyLocation, Rules, SourceRule, TopicRule
from spark import rule_table
from spark.reading.kafka_admin import NO_LEADER_EPOCH, BlockingTransaction, TopicPartition
from spark.reading.source import Span
from spark.settings import HOUR_MS, OFFSETS_MOST, Settings

DATA: Final = "data"
LEDGER: Final = "ledger"
REQUESTS: Final = "requests"
UNWANTED: Final = "unwanted"
"""The role of a data topic's log that an earlier run audited and this run does not: keeps the offset to resume from."""

RETENTION: Final = "retention"
TRUNCATED: Final = "truncated"
RECREATED: Final = "recreated"
"""Causes of a gap: records were deleted before they were read, a log was truncated below what was read, the topic was
recreated."""


@dataclass(frozen=True, slots=True)
class LogGap:
    """Offsets from `first` to before `last` that no longer existed when they were to be read, found at `seen_ms`."""

    first: int
    last: int
    cause: str
    seen_ms: int


@dataclass(frozen=True, slots=True)
class OffsetGuarantee:
    """The guarantee of the records from the offset `first` on."""

    first: int
    guarantee: str


@dataclass(frozen=True, slots=True)
class Log:
    """One partition in a run's plan: a row of `progress`. Times in ms since the epoch.

    `first`: the first offset that any run read; `start`, `end`: the offsets that this run reads.
    `recreated_at_ms`: when a run first saw the topic with another topic id, else 0.
    `complete_since_ms`: every record appended from then on was read (ledger and journal; no rule uses that of data).
    `decided_until_ms`: every record appended before then lies below `end`.
    `blocking_transaction`: the open transaction that keeps the last stable offset at `end`.
    `guarantees`: the guarantees of a data topic, by offset. `leader_epoch`: of the leader that answered `end`, or
    NO_LEADER_EPOCH.
    `later_end`: the high watermark of a data log, listed after the ends of ledger and journal; the largest offset if
    an open transaction blocks the log.
    `caught_up_run`: the last run for which every record below its high watermark has been read by now (0: none).
    `behind_run`, `behind_end`: a later run for which some records are still unread, and its high watermark.
    `first_record_ms`: the timestamp of the record at offset 0, of the plan while the log is empty, or 0 (unknown).
    """

    role: str
    topic: str
    partition: int
    topic_id: str
    audited: bool
    compacted: bool
    recreated_at_ms: int
    first: int
    start: int
    end: int
    last_stable: int
    high_watermark: int
    complete_since_ms: int
    decided_until_ms: int
    gaps: tuple[LogGap, ...] = ()
    blocking_transaction: BlockingTransaction | None = None
    guarantees: tuple[OffsetGuarantee, ...] = ()
    later_end: int = 0
    caught_up_run: int = 0
    behind_run: int = 0
    behind_end: int = 0
    first_record_ms: int = 0
    leader_epoch: int = NO_LEADER_EPOCH

    @property
    def topic_partition(self) -> TopicPartition:
        return self.topic, self.partition

    @property
    def is_blocked(self) -> bool:
        """Whether an open transaction keeps records past `end` undecided, and every record below was read."""
        return self.end == self.last_stable < self.high_watermark

    @property
    def gaps_of_topic(self) -> tuple[LogGap, ...]:
        """The gaps since the topic was last recreated; earlier ones do not concern the present log."""
        recreated = [nth for nth, gap in enumerate(self.gaps, 1) if gap.cause == RECREATED]
        return self.gaps[max(recreated, default=0) :]


_ZERO_IF_MISSING: Final = ("caught_up_run", "behind_run", "behind_end", "first_record_ms")


@dataclass(frozen=True)
class Plan:
    """The logs that a run reads, and the options that its verdicts depend on (JSON, see `options_of`).

    `skip_ids`: whether the run skips the pass over all ids; `keep_days`: how many days the lake keeps, 0 for all. Both
    are None in plans of an earlier version. They are not among the options: other values do not change the verdict of
    an hour.
    """

    run: int
    frozen_ms: int
    options: str
    logs: tuple[Log, ...] = field(repr=False)
    skip_ids: bool | None = None
    keep_days: int | None = None

    def spans(self, role: str) -> dict[TopicPartition, Span]:
        """Return the offsets that the run reads of the audited logs of a role."""
        return spans_of(self.logs, role)

    def of(self, role: str) -> list[Log]:
        """Return the audited logs of a role, ordered by topic and partition."""
        return sorted(
            (log for log in self.logs if log.role == role and log.audited), key=lambda log: log.topic_partition
        )

    @cached_property
    def logs_by_partition(self) -> dict[TopicPartition, Log]:
        """The logs by topic and partition."""
        return {log.topic_partition: log for log in self.logs}

    @property
    def topics(self) -> list[str]:
        """Names of the audited data topics."""
        return sorted({log.topic for log in self.of(DATA)})

    @property
    def topic_ids(self) -> dict[str, str]:
        """The ids of the audited data topics."""
        return {log.topic: log.topic_id for log in self.of(DATA)}

    @property
    def partitions(self) -> int:
        """Number of audited partitions of data topics."""
        return sum(1 for log in self.logs if log.role == DATA and log.audited)

    @property
    def unread(self) -> int:
        """Number of offsets that the run reads."""
        return sum(log.end - log.start for log in self.logs if log.audited)

    @property
    def unwanted(self) -> list[str]:
        """Data topics that earlier runs audited and this run does not."""
        return sorted({log.topic for log in self.logs if log.role == UNWANTED})

    def rows(self) -> list[dict[str, Any]]:
        """Return the plan as rows of `progress`."""
        head = {name: getattr(self, name) for name in ("run", "frozen_ms", "options", "skip_ids", "keep_days")}
        return [{**head, **asdict(log)} for log in self.logs]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> "Plan | None":
        """Build the plan of one run from its rows of `progress`; None for no rows."""
        logs = []
        head: Mapping[str, Any] | None = None
        for row in rows:
            head = row
            converted = ("gaps", "blocking_transaction", "guarantees", "later_end", "leader_epoch", *_ZERO_IF_MISSING)
            values = {name: row[name] for name in Log.__dataclass_fields__ if name not in converted}
            gaps = tuple(LogGap(gap["first"], gap["last"], gap["cause"], gap["seen_ms"]) for gap in row["gaps"])
            blocking_transaction = (
                BlockingTransaction(**row["blocking_transaction"]) if row["blocking_transaction"] else None
            )
            # Lakes of an earlier version lack these columns.
            guarantees = tuple(
                OffsetGuarantee(span["first"], span["guarantee"]) for span in row.get("guarantees") or ()
            )
            later_end, epoch = row.get("later_end"), row.get("leader_epoch")
            values["later_end"] = row["high_watermark"] if later_end is None else later_end
            values["leader_epoch"] = NO_LEADER_EPOCH if epoch is None else epoch
            values |= {name: row.get(name) or 0 for name in _ZERO_IF_MISSING}
            logs.append(Log(**values, gaps=gaps, blocking_transaction=blocking_transaction, guarantees=guarantees))
        if head is None:
            return None
        kept = head.get("skip_ids"), head.get("keep_days")
        return cls(head["run"], head["frozen_ms"], head["options"], tuple(logs), *kept)


def spans_of(logs: Iterable[Log], role: str) -> dict[TopicPartition, Span]:
    """Return the offsets to read of the audited logs of a role, by partition."""
    return {log.topic_partition: (log.start, log.end) for log in logs if log.role == role and log.audited}


_RULE: Final = ("pattern", "guarantee", "derived", "client_duplicates", "key_ttl_s")
"""The fields of a topic's rule that a plan stores, in this order; the later ones may be left out."""


def options_of(settings: Settings) -> str:
    """Encode as JSON what a verdict depends on besides the records; if it changes, every hour is judged again.

    The window is included, since a run keeps only the sums of the hours that its report shows.
    """
    options, shared = settings.options, settings.shared
    return json.dumps(
        {
            "topics": options.topics,
            "grace_s": options.grace_s,
            "window_h": options.window_h,
            "key_ttl_s": shared.key_ttl_s,
            "namespace": shared.namespace,
            "identity": dict(options.identity),
            "timeouts_ms": shared.timeouts_ms,
            "rules": [
                # A retention by rule is left out where there is none, as in plans of an earlier version.
                [
                    rule.pattern,
                    rule.guarantee.value,
                    rule.derived,
                    rule.client_duplicates,
                    *([rule.key_ttl_s] if rule.key_ttl_s else []),
                ]
                for rule in settings.rules.topics
            ],
            "callers": settings.rules.scopes[1:],  # those of sources too
            # Left out where there are none, as in plans of an earlier version.
            **({"without_topics": options.without_topics} if options.without_topics else {}),
            **({"quarantine": quarantine} if (quarantine := _quarantine_of(settings.rules)) else {}),
            **({"sources": sources} if (sources := _sources_of(settings.rules)) else {}),
        },
        sort_keys=True,
    )


def _quarantine_of(rules: Rules) -> dict[str, str]:
    """Return the quarantine topics of the rules of topics, by pattern."""
    return {rule.pattern: rule.quarantine for rule in rules.topics if rule.quarantine}


def _sources_of(rules: Rules) -> list[dict[str, Any]]:
    """Return what the audit needs of each source; nothing if no source has a retention or a quarantine of its own."""
    if not any(source.key_ttl_s or source.quarantine for source in rules.sources):
        return []
    return [
        {
            "name": source.name,
            "topics": [*dict.fromkeys(source.all_topics)],
            "key_ttl_s": source.key_ttl_s,
            "quarantine": source.quarantine,
        }
        for source in rules.sources
    ]


def settings_of(options: str, given: Settings) -> Settings:
    """Restore the settings that a plan was made with from its `options` (options_of); the rest is taken from `given`.

    Plans of an earlier version lack the window, the callers, or the identities (which that version did not have). The
    sinks are those of `given`: what a run has merged does not depend on them. So are the kinds of findings that count
    in a topic, by the rule with the same pattern.
    """
    parsed = json.loads(options)
    options_then = replace(
        given.options,
        topics=tuple(parsed["topics"]),
        without_topics=tuple(parsed.get("without_topics", ())),
        grace_s=parsed["grace_s"],
        window_h=parsed.get("window_h", given.options.window_h),
        identity=parsed.get("identity", {}),
    )
    # The plan stores only the sum of the timeouts, and only the sum has an effect.
    shared = replace(
        given.shared, key_ttl_s=parsed["key_ttl_s"], request_timeout_ms=parsed["timeouts_ms"], transaction_timeout_ms=0
    )
    quarantine = parsed.get("quarantine", {})
    counting = {rule.pattern: rule.findings for rule in given.rules.topics}
    topics = tuple(_rule_of(rule, quarantine.get(rule[0], ""), counting.get(rule[0], ())) for rule in parsed["rules"])
    sources = tuple(map(_source_of, parsed.get("sources", [])))
    scopes = {source.scope for source in sources}
    callers = tuple(
        CallerRule(name, ()) for name in parsed.get("callers", given.rules.scopes[1:]) if name not in scopes
    )
    return replace(
        given, options=options_then, shared=shared, rules=Rules(topics, callers, sources, sinks=given.rules.sinks)
    )


def _rule_of(stored: Sequence[Any], quarantine: str, findings: tuple[str, ...]) -> TopicRule:
    """Restore a topic's rule from the fields that a plan stores (_RULE), its topic of refused events, and the kinds of
    findings that count."""
    fields = dict(zip(_RULE, stored, strict=False))
    guarantee = Guarantee(fields["guarantee"])
    return TopicRule(**{**fields, "guarantee": guarantee, "quarantine": quarantine, "findings": findings})


def _source_of(stored: Mapping[str, Any]) -> SourceRule:
    """Restore what the audit needs of a source (`_sources_of`); the rest of the rule stands for nothing."""
    topics = {topic: topic for topic in stored["topics"]}
    own = {name: stored[name] for name in ("key_ttl_s", "quarantine")}
    return SourceRule(stored["name"], KeyLocation.SHA256, "body", None, topics=topics, **own)


def resumed_settings(plan: Plan, given: Settings) -> Settings:
    """Return the settings by which an interrupted run is finished: `given` with all that its plan was made with.

    The result equals `given` if the plan was made with the same options.
    """
    settings = given if plan.options == options_of(given) else settings_of(plan.options, given)
    options = settings.options
    if plan.skip_ids is not None:
        options = replace(options, skip_ids=plan.skip_ids)
    if plan.keep_days is not None:
        options = replace(options, keep_days=plan.keep_days or None)
    return replace(settings, options=options)


def of_run(summary: Mapping[str, Any] | None, name: str, default: Any = None) -> Any:
    """Return a value of a finished run's summary; the default without a run, or in a lake of an earlier version."""
    return (summary or {}).get(name, default)


def caught_up_ms(plan: Plan, last_run: Mapping[str, Any] | None) -> int | None:
    """Return when the newest run froze (ms) whose ends have all been reached by now; None if not known.

    A log with steady traffic may never be read to its end, so the run may be an earlier one than that of `plan`.
    """
    caught_up_run = min((log.caught_up_run for log in plan.logs if log.audited), default=plan.run)
    if caught_up_run >= plan.run:
        return plan.frozen_ms
    for report in of_run(last_run, "reports", []):
        if report["run"]["number"] <= caught_up_run:
            return int(datetime.fromisoformat(report["run"]["frozen_at"]).timestamp() * 1000)
    known: int | None = _known_caught_up_ms(last_run)
    return known


def _known_caught_up_ms(last_run: Mapping[str, Any] | None) -> Any:
    """Return `caught_up_ms` of the last run, which earlier versions did not store."""
    return of_run(last_run, "caught_up_ms", of_run(last_run, "frozen_ms"))


def unread_since(plan: Plan, settings: Settings, last_run: Mapping[str, Any] | None) -> int:
    """Return since when (ms) accepted events may have been unread until this run, at the latest the window's start.

    A first run, and the runs until one has read all that the topics had before the first, return the window's start:
    older events are in no report.
    """
    return min(window_from(plan, settings), paused_since(plan, settings, last_run))


def paused_since(plan: Plan, settings: Settings, last_run: Mapping[str, Any] | None) -> int:
    """Return since when (ms) accepted events may have been unread, by the runs before; the freeze if that is not
    known."""
    read_ms = _known_caught_up_ms(last_run)
    return plan.frozen_ms if read_ms is None else int(read_ms) - settings.max_settle_ms


@dataclass(frozen=True)
class RunContext:
    """What the steps of a run have in common once it has its plan.

    `last_plan` and `last_run` are the plan and the summary of the last finished run (None: there is none), `replaced`
    the plans of later runs that were interrupted before their merge, `kept_from` the first hour that the lake keeps
    ("" for all).
    """

    plan: Plan
    settings: Settings
    last_plan: Plan | None = None
    last_run: Mapping[str, Any] | None = None
    replaced: Sequence[Plan] = ()
    kept_from: str = ""

    @property
    def window_from(self) -> int:
        """The start of the report's window in ms, a whole hour."""
        return window_from(self.plan, self.settings)

    @property
    def unread_since(self) -> int:
        """Since when (ms) accepted events may have been unread until this run (run_plan.unread_since)."""
        return unread_since(self.plan, self.settings, self.last_run)

    @property
    def compares_ids(self) -> bool:
        """Whether the run makes the pass over all ids, which finds copies in other hours."""
        return not self.settings.options.skip_ids

    def of_last_run(self, name: str, default: Any = None) -> Any:
        """Return a value of the last run's summary."""
        return of_run(self.last_run, name, default)


Value = TypeVar("Value")


def by_partition(values: Mapping[TopicPartition, Value]) -> dict[str, list[Value | None]]:
    """Arrange values in a list for each topic, with the partition as the index; None for partitions without a value."""
    topics: dict[str, list[Value | None]] = {}
    for (topic, partition), value in sorted(values.items(), key=lambda item: item[0]):
        column = topics.setdefault(topic, [])
        column += [None] * (partition - len(column)) + [value]
    return topics


def window_from(plan: Plan, settings: Settings) -> int:
    """Return the start of the report's window in ms, a whole hour."""
    return rule_table.window_from(plan.frozen_ms, settings.options.window_h * HOUR_MS)


def arrived(plan: Plan, last_plan: Plan | None) -> dict[TopicPartition, int]:
    """Return the earliest time (ms) at which the records that a run reads can have been written, by partition.

    The last run froze the log's end: records above that end were written or committed later, whatever their
    timestamps. Partitions without such an end are left out.
    """
    if last_plan is None:
        return {}
    read = {log.topic_partition: log for log in last_plan.of(DATA) if log.end == log.last_stable}
    return {
        log.topic_partition: last_plan.frozen_ms
        for log in plan.of(DATA)
        if log.start < log.end
        and (last_log := read.get(log.topic_partition)) is not None
        and (log.topic_id != last_log.topic_id or log.start >= last_log.end)
    }


def evidence_changed(plan: Plan, last_plan: Plan | None) -> bool:
    """Check whether the logs prove something else about the data than in the last run.

    A topic was deleted, recreated or compacted since, records were deleted unread, or the time of a log's first record
    has become known.
    """

    def proof(log: Log) -> tuple[Any, ...]:
        # The plan's time, while the log is empty: later than any claim that the run knows, in every run.
        first_record_ms = log.first_record_ms if log.high_watermark else None
        return log.topic_partition, log.topic_id, log.compacted, log.recreated_at_ms, log.gaps_of_topic, first_record_ms

    def proofs(logs: Iterable[Log]) -> set[tuple[Any, ...]]:
        return set(map(proof, logs))

    return last_plan is not None and proofs(last_plan.of(DATA)) - proofs(plan.of(DATA)) != set()


def reads_nothing_new(plan: Plan, last_plan: Plan | None) -> bool:
    """Check whether a run learns nothing from Kafka that the last run did not know: neither records nor gaps.

    Besides, the logs prove the same about the data, and no end of a log is newly known.
    """
    if last_plan is None or plan.unread or evidence_changed(plan, last_plan) or newly_known_ends(plan, last_plan):
        return False
    gaps = {log.topic_partition: log.gaps for log in last_plan.logs}
    return all(log.gaps == gaps.get(log.topic_partition, ()) for log in plan.logs)


def vanished(plan: Plan, last_plan: Plan | None) -> dict[TopicPartition, Span]:
    """Return the offsets of data that were read, and truncated since the last run: their records are no evidence."""
    known_gaps = {log.topic_partition: set(log.gaps) for log in last_plan.logs} if last_plan else {}
    return {
        log.topic_partition: (gap.first, gap.last)
        for log in plan.of(DATA)
        for gap in log.gaps
        # A plan may have joined older gaps.
        if gap.cause == TRUNCATED
        and gap.seen_ms == plan.frozen_ms
        and gap not in known_gaps.get(log.topic_partition, ())
    }


def later_ends(plan: Plan) -> dict[TopicPartition, int]:
    """Return the `later_end` of each data log of a plan."""
    return {log.topic_partition: log.later_end for log in plan.of(DATA)}


def newly_known_ends(plan: Plan, last_plan: Plan | None) -> dict[TopicPartition, int]:
    """Return the `later_end` of each data log whose end was unknown in the last run.

    An open transaction blocked the log then, or that run did not audit its topic. Claims that runs until then have
    merged were not compared with any end.
    """
    if last_plan is None:
        return {}

    def was_known(log: Log) -> bool:
        last_log = last_plan.logs_by_partition.get(log.topic_partition)
        return last_log is not None and last_log.audited and last_log.later_end < OFFSETS_MOST

    return {
        log.topic_partition: log.later_end
        for log in plan.of(DATA)
        if log.later_end < OFFSETS_MOST and not was_known(log)
    }
