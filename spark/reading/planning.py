"""Plan a run: freeze the ends of every log on the driver, and continue from what the last run has read.

The plan is stored before anything is read. A run that was interrupted after its merge is finished by its own plan; one
that was interrupted before is planned again.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from service.contract import Guarantee
from spark import rule_table
from spark.errors import CannotRun
from spark.reading.kafka_admin import NO_LEADER_EPOCH, BlockingTransaction, Ends, Topic, TopicPartition
from spark.reading.log_drafts import Draft, ListedLog, OldestRecord, log_of, next_log
from spark.reading.run_plan import (
    DATA,
    LEDGER,
    REQUESTS,
    RETENTION,
    TRUNCATED,
    UNWANTED,
    Log,
    LogGap,
    OffsetGuarantee,
    Plan,
    options_of,
)
from spark.reading.selection import Selection, TopicsInLake, known_to_the_lake_only
from spark.reading.source import Span
from spark.settings import HOUR_MS, OFFSETS_MOST, Settings

# Enough to tell which records were deleted unread; each run stores the gaps of every log again.
GAPS_MAX: Final = 100


def clock_ms(now_ms: int | None) -> int:
    """Return the time of a plan: `now_ms`, or that of the clock."""
    return int(time.time() * 1000) if now_ms is None else now_ms


class Admin(Protocol):
    """The requests that a plan needs: implemented by `kafka_admin.KafkaAdmin`, by `LibrdkafkaAdmin` for logs
    without a change, and by fakes in tests."""

    def names(self) -> list[str]: ...
    def describe(self, names: Sequence[str], *, strict: bool = True) -> dict[str, Topic]: ...
    def compacted(self, names: Sequence[str]) -> set[str]: ...
    def ends(self, partitions: Sequence[TopicPartition], *, strict: bool = True) -> Mapping[TopicPartition, Ends]: ...
    def timestamps_at(self, partitions: dict[TopicPartition, int]) -> dict[TopicPartition, int]: ...
    def blocking_transactions(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, BlockingTransaction]: ...
    def diverged(self, positions: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int]: ...


class ReadLog(Protocol):
    """A log that was read up to `end`, by the leader of `leader_epoch`: of a plan, or of a mirror."""

    @property
    def topic_partition(self) -> TopicPartition: ...
    @property
    def topic_id(self) -> str: ...
    @property
    def end(self) -> int: ...
    @property
    def leader_epoch(self) -> int: ...


Discover = Callable[[Sequence[Log], Sequence[str]], set[str]]
"""Selects, of the topics of these names, those that the spans of ledger and journal in these logs name."""


class NamedTopics(NamedTuple):
    """The topics that ledger and journal name: in what a plan has listed of them (`discover`), and in what earlier
    runs have merged."""

    discover: Discover
    in_lake: TopicsInLake


NONE_NAMED: Final = NamedTopics(lambda logs, names: set(), set)
"""For a plan that looks for no topic."""


def freeze(
    admin: Admin,
    settings: Settings,
    last_plan: Plan | None,
    now_ms: int,
    named: NamedTopics,
    run: int | None = None,
) -> Plan:
    """Make the plan of the run after `last_plan`, with the number `run`, or the next number.

    Lists the ends of the data topics, then of the ledger, then of the journal, and then the data topics' high
    watermarks once more. By this order a record below a data end has its ledger record below the ledger's end, or
    undecided; and an offset that the ledger names lies below the later high watermark, or was never written.
    CannotRun if the ledger does not exist, if --topics matches nothing, or if a request to Kafka fails.
    """
    selection = Selection(settings, last_plan, named.in_lake)
    drafts = _list_selected(admin, selection, last_plan, now_ms, named.discover, settings.options.max_records)
    drafts = _with_compacted(admin, drafts)
    drafts = _with_complete_since(admin, drafts, now_ms)
    logs = _with_first_record(admin, drafts, now_ms)
    logs = _capped(logs, settings.options.max_records)
    logs = _with_decided_until(admin, logs, now_ms)
    logs = [_with_guarantees(settings, last_plan, log) for log in logs]
    window_from = rule_table.window_from(now_ms, settings.options.window_h * HOUR_MS)
    logs = [_with_joined_gaps(log, window_from) for log in logs]
    run = run or (last_plan.run + 1 if last_plan else 1)
    logs = [_with_caught_up_run(log, run) for log in _with_later_end(admin, logs)]
    all_logs = (*logs, *_carried(last_plan, logs, selection))
    options = settings.options
    return Plan(run, now_ms, options_of(settings), all_logs, options.skip_ids, options.keep_days or 0)


def list_ends(admin: Admin, settings: Settings, last_plan: Plan | None) -> Mapping[TopicPartition, Ends]:
    """List the ends of the logs that the run after `last_plan` may read, for `count_unread`, by requests to Kafka only.

    CannotRun as in `freeze`; NeedsSpark if the selection has changed, so that the topics are known to the lake only.
    """
    names = _topics_to_count(set(admin.names()), settings, last_plan)
    return admin.ends(partitions_of(admin.describe(sorted(names)).values()))


def count_unread(ends: Mapping[TopicPartition, Ends], settings: Settings, last_plan: Plan | None) -> int:
    """Count the offsets that the run after `last_plan` has to read of logs with these ends. Raises as `list_ends`.

    In a first run those of all topics that ledger or journal may name are counted; in a later run those of topics that
    only new records of ledger or journal name are not.
    """
    names = _topics_to_count({topic for topic, _ in ends}, settings, last_plan)
    read = {log.topic_partition: log.end for log in last_plan.logs} if last_plan else {}
    unread = sum(
        max(0, log.last_stable - max(log.log_start, read.get(partition, 0)))
        for partition, log in ends.items()
        if partition[0] in names
    )
    return min(unread, settings.options.max_records or unread)


def _topics_to_count(existing: set[str], settings: Settings, last_plan: Plan | None) -> set[str]:
    """Return those of the existing topics whose records `count_unread` counts."""
    selection = Selection(settings, last_plan, known_to_the_lake_only)
    names = {name for of_role in selection.required(existing).values() for name in of_role} & existing
    return names | selection.candidates(existing) if last_plan is None else names


def _list_selected(
    admin: Admin,
    selection: Selection,
    last_plan: Plan | None,
    now_ms: int,
    discover: Discover,
    max_records: int | None,
) -> list[Draft]:
    """List the logs of the selected topics, of the ledger and of the journal, with their present ends.

    The ends of the candidates are listed too, before those of the ledger, since the ledger may name any of them. If the
    ledger names a topic without listed ends, everything is listed again: the topic was created in the meantime, or a
    request for this candidate failed. Topics are discovered in the spans that a run with `max_records` would merge of
    ledger and journal without any further topic: no span grows when another topic takes its share.
    """
    while True:
        existing = set(admin.names())
        drafts, candidates = _frozen(
            admin, last_plan, selection.required(existing), selection.candidates(existing), now_ms
        )
        if selection.globs:
            return drafts
        present = set(admin.names())
        names = selection.all_candidates(existing | present)
        capped = _capped([draft.log for draft in drafts], max_records)
        found = discover(capped, sorted(names)) if names else set()
        selection.add(found)
        drafts = candidates.drafts(admin, found) + drafts
        if not (found & present) - {draft.log.topic for draft in drafts}:
            return drafts


def _carried(last_plan: Plan | None, logs: Sequence[Log], selection: Selection) -> list[Log]:
    """Carry over the logs of the last plan that this run does not read, for the offset to resume from."""

    def role(log: Log) -> str:
        if log.role in (LEDGER, REQUESTS):
            return log.role
        return DATA if selection.has(log.topic) else UNWANTED

    planned = {log.topic_partition for log in logs}
    return [
        replace(log, role=role(log), audited=False, start=log.end)
        for log in (last_plan.logs if last_plan else ())
        if log.topic_partition not in planned
    ]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The logs of topics that the ledger may name, with their ends before those of the ledger.

    Drafts are made of the topics that the ledger names: a cluster may have many others.
    """

    last_plan: Plan | None
    topics: Mapping[str, Topic]
    ends: Mapping[TopicPartition, Ends]
    now_ms: int

    def drafts(self, admin: Admin, names: Iterable[str]) -> list[Draft]:
        """Draft the logs of those of these topics whose ends were all listed."""
        topics = {name: self.topics[name] for name in sorted(set(names) & self.topics.keys())}
        partitions = {name: partitions_of([topic]) for name, topic in topics.items()}
        complete = {name for name in topics if all(partition in self.ends for partition in partitions[name])}
        ends = {partition: self.ends[partition] for name in sorted(complete) for partition in partitions[name]}
        return _drafts(admin, self.last_plan, {DATA: ends}, topics, self.now_ms)


def _frozen(
    admin: Admin,
    last_plan: Plan | None,
    required: Mapping[str, Iterable[str]],
    candidates: Iterable[str],
    now_ms: int,
) -> tuple[list[Draft], _Candidates]:
    """List the logs of existing topics with their present ends: `required` topics by role, and candidates as data.

    `compacted` is filled in later. CannotRun if the request for a required topic fails; a candidate whose request fails
    is left out.
    """
    described = admin.describe([name for names in required.values() for name in names])
    optional = admin.describe(list(candidates), strict=False)
    listed = _Candidates(last_plan, optional, admin.ends(partitions_of(optional.values()), strict=False), now_ms)
    found = {
        role: dict(admin.ends(partitions_of(described[name] for name in names if name in described)))
        for role, names in required.items()
    }
    return _drafts(admin, last_plan, found, described, now_ms), listed


def partitions_of(topics: Iterable[Topic]) -> list[TopicPartition]:
    """Return all partitions of topics."""
    return sorted((topic.name, n) for topic in topics for n in range(topic.partitions))


def _drafts(
    admin: Admin,
    last_plan: Plan | None,
    found: Mapping[str, Mapping[TopicPartition, Ends]],
    topics: Mapping[str, Topic],
    now_ms: int,
) -> list[Draft]:
    """Draft the logs of partitions with these ends, by role."""
    ends = {partition: listed for of_role in found.values() for partition, listed in of_role.items()}
    diverged = diverged_of(admin, last_plan.logs if last_plan else (), topics, ends)
    return [
        next_log(ListedLog(role, topics[topic], number, listed, diverged.get((topic, number))), last_plan, now_ms)
        for role, of_role in found.items()
        for (topic, number), listed in of_role.items()
    ]


def diverged_of(
    admin: Admin, logs: Iterable[ReadLog], topics: Mapping[str, Topic], ends: Mapping[TopicPartition, Ends]
) -> dict[TopicPartition, int]:
    """Find the offsets at which truncated logs diverged; only a log with a new leader epoch can be truncated."""
    return admin.diverged(
        {
            log.topic_partition: (log.end, log.leader_epoch)
            for log in logs
            if log.topic_partition in ends
            and log.topic_id == topics[log.topic_partition[0]].topic_id
            and log.end > 0
            and NO_LEADER_EPOCH not in (log.leader_epoch, ends[log.topic_partition].leader_epoch)
            and log.leader_epoch != ends[log.topic_partition].leader_epoch
        }
    )


def check_read(admin: Admin, plan: Plan) -> None:
    """Check, after a run has read its records, that the logs are those of the plan; CannotRun otherwise.

    Spark reads a span of offsets from whatever log has the topic's name. If the topic was recreated, or a leader
    without the planned records was elected, other records may have these offsets. Records that were deleted meanwhile,
    and had been read, do no harm.
    """
    logs = [log for log in plan.logs if log.audited and log.start < log.end]
    if not logs:
        return
    _check_topic_ids(admin, logs, "read it")
    topics = {log.topic: Topic(log.topic, log.topic_id, 0) for log in logs}
    ends = admin.ends([log.topic_partition for log in logs])
    diverged = diverged_of(admin, logs, topics, ends)
    for log in logs:
        found = ends[log.topic_partition]
        intact = rule_table.intact_until(found.last_stable, diverged.get(log.topic_partition), log.end)
        if rule_table.is_truncated(intact, log.end):
            raise CannotRun(
                f"partition {log.partition} of topic {log.topic!r} was truncated while the run read it; "
                "start the run again"
            )


def _with_joined_gaps(log: Log, window_from: int) -> Log:
    """Bound the number of gaps found before the report's window, about which no finding is reported any more.

    If these are more than GAPS_MAX, those of an earlier topic are dropped, and those of the present topic become one
    gap for each cause. Such a gap covers offsets in between, too: a claim on one of these is unprovable, never lost.
    """
    if sum(gap.seen_ms < window_from for gap in log.gaps) <= GAPS_MAX:
        return log
    of_topic = log.gaps_of_topic
    earlier = log.gaps[: len(log.gaps) - len(of_topic)]
    old = [gap for gap in of_topic if gap.seen_ms < window_from]
    joined = [
        LogGap(min(gap.first for gap in gaps), max(gap.last for gap in gaps), cause, max(gap.seen_ms for gap in gaps))
        for cause in (RETENTION, TRUNCATED)
        if (gaps := [gap for gap in old if gap.cause == cause])
    ]
    # The last earlier gap says that the topic was recreated: it separates the gaps before from those after.
    kept = [gap for gap in earlier[:-1] if gap.seen_ms >= window_from]
    recent = [gap for gap in of_topic if gap.seen_ms >= window_from]
    return replace(log, gaps=(*kept, *earlier[-1:], *joined, *recent))


def _with_later_end(admin: Admin, logs: list[Log]) -> list[Log]:
    """Set `later_end`: the high watermarks of the data logs, listed after those of ledger and journal.

    If an open transaction blocks a log, nothing past the last stable offset is proven, and `later_end` is the largest
    offset.
    """
    partitions = [log.topic_partition for log in logs if log.role == DATA]
    ends = admin.ends(partitions) if partitions else {}
    _check_topic_ids(admin, logs, "was planned")

    def later_end(log: Log) -> int:
        found = ends.get(log.topic_partition)
        stable, end = (
            (log.last_stable, log.high_watermark) if found is None else (found.last_stable, found.high_watermark)
        )
        return end if stable >= end else OFFSETS_MOST

    return [replace(log, later_end=later_end(log)) for log in logs]


def _check_topic_ids(admin: Admin, logs: Sequence[Log], step: str) -> None:
    """Check that no topic was deleted or recreated during a step of the run; CannotRun otherwise.

    Offsets of another topic would prove losses. Called after the last request: a topic id does not come back.
    """
    topic_ids = {log.topic: log.topic_id for log in logs}
    found = admin.describe(sorted(topic_ids))
    for name, topic_id in topic_ids.items():
        if name not in found or rule_table.is_recreated(topic_id, found[name].topic_id):
            raise CannotRun(f"topic {name!r} was deleted or recreated while the run {step}; start the run again")


def _with_caught_up_run(log: Log, run: int) -> Log:
    """Set `caught_up_run`: the last run for which every record below its high watermark has been read by now.

    A log with steady traffic may never be read to its end, so the high watermark of one run (`behind_end`) is kept
    until a later run has read that far.
    """
    if log.end >= log.high_watermark:
        return replace(log, caught_up_run=run, behind_run=0, behind_end=0)
    if log.behind_run and log.end < log.behind_end:
        return log
    return replace(
        log, caught_up_run=log.behind_run or log.caught_up_run, behind_run=run, behind_end=log.high_watermark
    )


def _with_compacted(admin: Admin, drafts: list[Draft]) -> list[Draft]:
    """Set `compacted` of the data logs whose topic is compacted now."""
    compacted = admin.compacted(sorted({draft.log.topic for draft in drafts if draft.log.role == DATA}))
    return [
        replace(draft, log=replace(draft.log, compacted=draft.log.compacted or draft.log.topic in compacted))
        for draft in drafts
    ]


def _with_complete_since(admin: Admin, drafts: list[Draft], now_ms: int) -> list[Draft]:
    """Set `complete_since_ms` where it is unknown, from the log's oldest record, or `now_ms` for an empty log.

    The record itself is read, since after DeleteRecords a broker may find no offset for any timestamp.
    """
    oldest_ms = _oldest_records(admin, [draft for draft in drafts if draft.complete_since is not None], now_ms)
    of_topics: dict[str, list[int]] = {}
    for log in (draft.log for draft in drafts):
        if log.role != DATA and log.first == 0:
            of_topics.setdefault(log.topic, []).append(oldest_ms.get(log.topic_partition, log.complete_since_ms))

    def completed(draft: Draft) -> Draft:
        log = draft.log
        if draft.complete_since is None:
            return draft
        complete_since_ms = rule_table.complete_since(
            oldest_ms[log.topic_partition],
            of_topics.get(log.topic, []),
            has_first_record=draft.complete_since is OldestRecord.OF_TOPIC,
        )
        return replace(draft, log=replace(log, complete_since_ms=complete_since_ms), complete_since=None)

    return [completed(draft) for draft in drafts]


def _oldest_records(admin: Admin, drafts: list[Draft], now_ms: int) -> dict[TopicPartition, int]:
    """Read the timestamp (ms) of the oldest record of each log; `now_ms` for a log without a record."""
    starts = {
        draft.log.topic_partition: 0 if draft.complete_since is OldestRecord.OF_TOPIC else draft.log.start
        for draft in drafts
    }
    ends = {draft.log.topic_partition: draft.log.high_watermark for draft in drafts}
    offsets = {partition: start for partition, start in starts.items() if start < ends[partition]}
    timestamps_at = admin.timestamps_at(offsets) if offsets else {}
    return {partition: timestamps_at.get(partition, now_ms) for partition in starts}


def _with_first_record(admin: Admin, drafts: list[Draft], now_ms: int) -> list[Log]:
    """Set `first_record_ms` where it is unknown; the record is read for data logs only.

    A timestamp in the future is a mistake of the writer, and is not used.
    """
    unknown = [draft.log for draft in drafts if draft.needs_first_record]
    empty = {log.topic_partition: now_ms for log in unknown if not log.high_watermark}
    offsets = {log.topic_partition: 0 for log in unknown if log.role == DATA and log.high_watermark}
    timestamps_at: dict[TopicPartition, int] = {}
    if offsets:
        with suppress(CannotRun):  # retention may have deleted the record in the meantime
            timestamps_at = {partition: ms for partition, ms in admin.timestamps_at(offsets).items() if ms <= now_ms}
    first_records = empty | timestamps_at
    return [
        replace(draft.log, first_record_ms=first_records.get(draft.log.topic_partition, 0))
        if draft.needs_first_record
        else draft.log
        for draft in drafts
    ]


def _with_guarantees(settings: Settings, last_plan: Plan | None, log: Log) -> Log:
    """Set the guarantees of a data log by offset, from the rules of this run and of earlier runs.

    The offset at which the service began to follow a changed rule is unknown: records between two runs count as
    `idempotent`, the weaker guarantee.
    """
    if log.role != DATA:
        return log
    last_log = log_of(last_plan, log.topic_partition)
    earlier = last_log.guarantees if last_log is not None and last_log.topic_id == log.topic_id else ()
    guarantee = settings.rules.guarantee(log.topic)
    if not earlier:
        return replace(log, guarantees=(OffsetGuarantee(0, guarantee.value),))
    if earlier[-1].guarantee == guarantee.value:
        return replace(log, guarantees=earlier)
    first = log.high_watermark if guarantee is Guarantee.EXACTLY_ONCE else log.start
    return replace(log, guarantees=(*earlier, OffsetGuarantee(first, guarantee.value)))


def _capped(logs: list[Log], most: int | None) -> list[Log]:
    """Lower the ends of logs as `capped_ends` does."""
    ends = capped_ends([(log.start, log.end) for log in logs], most)
    return [replace(log, end=end) for log, end in zip(logs, ends, strict=True)]


def capped_ends(spans: Sequence[Span], most: int | None) -> list[int]:
    """Return lower ends by which all spans have about `most` offsets in total, each in proportion to its size."""
    total = sum(end - start for start, end in spans)
    if most is None or total <= most:
        return [end for _, end in spans]
    return [start + -(-(end - start) * most // total) for start, end in spans]


def _with_decided_until(admin: Admin, logs: list[Log], now_ms: int) -> list[Log]:
    """Set `decided_until_ms` and `blocking_transaction`.

    If a log has records past its end, `decided_until_ms` is the timestamp of the first of these. If only transaction
    markers follow, as after a capped span of a ledger, the log has no further record yet.
    """
    unread = {log.topic_partition: log.end for log in logs if log.end < log.high_watermark}
    timestamps_at = admin.timestamps_at(unread) if unread else {}
    blocked = [log.topic_partition for log in logs if log.is_blocked]
    blocking_transactions = admin.blocking_transactions(blocked) if blocked else {}
    return [
        replace(
            log,
            decided_until_ms=timestamps_at.get(log.topic_partition, 0 if log.topic_partition in blocked else now_ms),
            blocking_transaction=blocking_transactions.get(log.topic_partition),
        )
        for log in logs
    ]
