"""Plan a run: freeze the ends of every log on the driver, and continue from what the run before has read.

The plan is stored before anything is read. An interrupted run is resumed from its own plan, so that its report is the
same as without the interruption.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final, Protocol

from service.contract import Guarantee, wire
from spark import rule_table
from spark.errors import CannotRun
from spark.reading.kafka_admin import BlockingTransaction, Ends, Topic, TopicPartition
from spark.reading.run_plan import (
    DATA,
    LEDGER,
    RECREATED,
    REQUESTS,
    RETENTION,
    TRUNCATED,
    UNWANTED,
    Gap,
    Log,
    OffsetGuarantee,
    Plan,
    options_of,
)
from spark.settings import OFFSETS_MOST, Settings, matches


class Cluster(Protocol):
    """The requests that a plan needs: implemented by `kafka_admin.Broker`, and by fakes in tests."""

    def names(self) -> list[str]: ...
    def describe(self, names: Sequence[str], *, strict: bool = True) -> dict[str, Topic]: ...
    def compacted(self, names: Sequence[str]) -> set[str]: ...
    def ends(self, partitions: Sequence[TopicPartition], *, strict: bool = True) -> dict[TopicPartition, Ends]: ...
    def timestamps_at(self, partitions: dict[TopicPartition, int]) -> dict[TopicPartition, int]: ...
    def blocking_transactions(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, BlockingTransaction]: ...
    def diverged(self, positions: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int]: ...


_UNKNOWN: Final = -1
"""A `complete_since_ms` or `first_record_ms` that has yet to be determined."""

_UNKNOWN_OF_TOPIC: Final = -2
"""The same for the `complete_since_ms` of a log that has all records since its topic was created."""

Discover = Callable[[Sequence[Log], Sequence[str]], set[str]]
"""Selects the topics that the unread part of ledger and journal names."""

Named = Callable[[], set[str]]
"""Returns the topics that ledger and journal name, by what earlier runs have merged into the lake."""


def freeze(
    cluster: Cluster,
    settings: Settings,
    before: Plan | None,
    now_ms: int,
    discover: Discover,
    named: Named,
    run: int | None = None,
) -> Plan:
    """Make the plan of the run after `before`, with the number `run`, or the next one.

    Lists the ends of the data topics, then of the ledger, then of the journal, and then the data topics' high
    watermarks once more. By this order a record below a data end has its ledger record below the ledger's end, or
    undecided; and an offset that the ledger names lies below the later high watermark, or was never written.
    If the ledger names a topic without listed ends, all is listed again: the topic was created in the meantime, or is
    one of the `candidates` whose requests may fail. CannotRun if the ledger does not exist or --topics matches nothing.
    """
    shared, globs = settings.shared, settings.options.topics
    ledger, requests = wire.ledger_topic(shared.namespace), wire.requests_topic(shared.namespace)
    own = {ledger, requests, wire.control_topic(shared.namespace), wire.findings_topic(shared.namespace)}
    audited_before = set() if globs else _audited_before(settings, before, named)
    last_data = [log for log in before.logs if log.role in (DATA, UNWANTED)] if before else []
    left_out = {log.topic for log in last_data if log.role == UNWANTED}

    def wanted(name: str) -> bool:
        return matches(globs, name) if globs else name in audited_before or _has_rule(settings, name)

    while True:
        existing = set(cluster.names())
        if ledger not in existing and not globs:
            raise CannotRun(
                f"topic {ledger!r} does not exist; "
                "set FENCEPOST_NAMESPACE to the service's, or name topics with --topics"
            )
        required = {name for name in existing - own if wanted(name)}
        if globs and not required and not any(wanted(log.topic) for log in last_data):
            raise CannotRun(
                f"--topics {','.join(globs)!r} matches no topic of Kafka at FENCEPOST_KAFKA={shared.kafka!r}, and none "
                "of the last run on this --lake; name topics that exist, or leave --topics out"
            )
        candidates = set() if globs else existing - own - required
        logs = _frozen(cluster, before, {DATA: required, LEDGER: {ledger}, REQUESTS: {requests}}, candidates, now_ms)
        if globs:
            break
        # A topic may be deleted since an earlier run read it. If ledger or journal name it, its claims are audited.
        later = set(cluster.names())
        others = {name for name in (existing | left_out | later) - own if not wanted(name)}
        found = discover(logs, sorted(others)) if others else set()
        audited_before |= found
        if not (found & later) - {log.topic for log in logs}:
            break
    logs = [log for log in logs if log.role != DATA or wanted(log.topic)]
    compacted = cluster.compacted(sorted({log.topic for log in logs if log.role == DATA}))
    logs = [replace(log, compacted=log.compacted or log.topic in compacted) for log in logs]
    logs = _with_complete_since(cluster, logs, now_ms)
    logs = _with_first_record(cluster, logs, now_ms)
    logs = _capped(logs, settings.options.max_records)
    logs = _with_decided_until(cluster, logs, now_ms)
    logs = [_with_guarantees(settings, before, log) for log in logs]
    run = run or (before.run + 1 if before else 1)
    logs = [_with_caught_up_run(log, run) for log in _with_later_end(cluster, logs)]
    planned = {log.topic_partition for log in logs}
    carried = [
        replace(log, role=_carried_as(log, wanted), audited=False, start=log.end)
        for log in (before.logs if before else ())
        if log.topic_partition not in planned
    ]
    return Plan(run, now_ms, options_of(settings), tuple(logs + carried))


def _frozen(
    cluster: Cluster, before: Plan | None, required: Mapping[str, Iterable[str]], candidates: Iterable[str], now_ms: int
) -> list[Log]:
    """List the logs of existing topics with their present ends: `required` topics by role, and candidates as data.

    `compacted` is filled in later. CannotRun if the request for a required topic fails; a candidate is left out then.
    """
    described = cluster.describe([name for names in required.values() for name in names])
    optional = cluster.describe(list(candidates), strict=False)

    def partitions_of(topics: Iterable[Topic]) -> list[TopicPartition]:
        return sorted((topic.name, n) for topic in topics for n in range(topic.partitions))

    answered = cluster.ends(partitions_of(optional.values()), strict=False)
    complete = {name for name, topic in optional.items() if all((name, n) in answered for n in range(topic.partitions))}
    found = {DATA: {partition: ends for partition, ends in answered.items() if partition[0] in complete}}
    for role, names in required.items():
        existing = [described[name] for name in names if name in described]
        found[role] = found.get(role, {}) | cluster.ends(partitions_of(existing))
    topics = described | optional
    diverged = _diverged(
        cluster, before.logs if before else (), topics, {**found[DATA], **found[LEDGER], **found[REQUESTS]}
    )
    return [
        _next_log(before, role, topics[partition[0]], partition, ends, diverged.get(partition), now_ms)
        for role, partitions in found.items()
        for partition, ends in partitions.items()
    ]


def _diverged(
    cluster: Cluster, logs: Iterable[Log], topics: Mapping[str, Topic], now: Mapping[TopicPartition, Ends]
) -> dict[TopicPartition, int]:
    """Find the offsets at which truncated logs diverged; only a log with a new leader epoch can be truncated."""
    return cluster.diverged(
        {
            log.topic_partition: (log.end, log.leader_epoch)
            for log in logs
            if log.topic_partition in now
            and log.topic_id == topics[log.topic].topic_id
            and log.end > 0
            and -1 not in (log.leader_epoch, now[log.topic_partition].leader_epoch)
            and log.leader_epoch != now[log.topic_partition].leader_epoch
        }
    )


def _carried_as(log: Log, wanted: Callable[[str], bool]) -> str:
    """Return the role of a log that is carried over from the run before, and not read by this run."""
    if log.role in (LEDGER, REQUESTS):
        return log.role
    return DATA if wanted(log.topic) else UNWANTED


def _audited_before(settings: Settings, before: Plan | None, named: Named) -> set[str]:
    """Return the topics that a run without --topics audits because of what earlier runs have read.

    If the last run had other --topics, its plan does not list them all: it merged the whole ledger, but audited less.
    """
    if before is None:
        return set()
    if json.loads(before.options)["topics"] != list(settings.options.topics):
        return named()
    return {log.topic for log in before.logs if log.role == DATA}


def _has_rule(settings: Settings, name: str) -> bool:
    """Check whether a rule's pattern matches the topic."""
    return any(fnmatchcase(name, rule.pattern) for rule in settings.rules.topics)


def readable(cluster: Cluster, plan: Plan) -> bool:
    """Check whether the logs still have all that an interrupted run planned to read."""
    logs = [log for log in plan.logs if log.audited and log.start < log.end]
    topics = cluster.describe(sorted({log.topic for log in logs}))
    if any(log.topic not in topics or topics[log.topic].topic_id != log.topic_id for log in logs):
        return False
    ends = cluster.ends([log.topic_partition for log in logs]) if logs else {}
    present = all(
        ends[log.topic_partition].log_start <= log.start and log.end <= ends[log.topic_partition].last_stable
        for log in logs
    )
    return present and not _diverged(cluster, logs, topics, ends)


def _next_log(
    before: Plan | None,
    role: str,
    topic: Topic,
    partition: TopicPartition,
    ends: Ends,
    diverged: int | None,
    now_ms: int,
) -> Log:
    """Build a partition's log for this run: it continues where the last run ended, or starts over in a new topic."""
    last = next((log for log in before.logs if log.topic_partition == partition), None) if before else None
    # A log that is read for the first time is complete from its oldest record on: a ledger may be younger than data.
    complete_since_ms = 0 if role == DATA else _UNKNOWN if ends.log_start else _UNKNOWN_OF_TOPIC
    log = Log(
        role=role,
        topic=partition[0],
        partition=partition[1],
        topic_id=topic.topic_id,
        audited=True,
        compacted=False,
        recreated_at_ms=0,
        first=ends.log_start,
        start=ends.log_start,
        end=ends.last_stable,
        last_stable=ends.last_stable,
        high_watermark=ends.high_watermark,
        complete_since_ms=complete_since_ms,
        decided_until_ms=now_ms,
        first_record_ms=0 if ends.log_start else _UNKNOWN,
        leader_epoch=ends.leader_epoch,
    )
    if before is None or last is None:
        return log
    if rule_table.is_recreated(last.topic_id, topic.topic_id):
        gap = Gap(last.end, last.end, RECREATED, now_ms)
        return replace(log, recreated_at_ms=now_ms, complete_since_ms=now_ms, gaps=(*last.gaps, gap))
    return _with_gaps(_continued(log, last, before.frozen_ms, ends), last, ends, diverged, now_ms)


def _continued(log: Log, last: Log, before_ms: int, ends: Ends) -> Log:
    """Continue a log of this run from the same log in the last run (`before_ms`: when that run froze the ends)."""
    return replace(
        log,
        # Compaction deleted records for good, also in a topic that is not compacted any more.
        compacted=last.compacted,
        recreated_at_ms=last.recreated_at_ms,
        first=last.first,
        start=last.end,
        # Lakes of an earlier version have 0 for every log that began at offset 0.
        complete_since_ms=last.complete_since_ms or (0 if ends.log_start else log.complete_since_ms),
        gaps=last.gaps,
        caught_up_run=last.caught_up_run,
        behind_run=last.behind_run,
        behind_end=last.behind_end,
        first_record_ms=last.first_record_ms if last.first_record_ms and last.high_watermark else log.first_record_ms,
    )


def _with_gaps(log: Log, last: Log, ends: Ends, diverged: int | None, now_ms: int) -> Log:
    """Add gaps to a continued log: records that a new leader does not have, and records deleted unread."""
    intact = rule_table.intact_until(ends.last_stable, diverged, last.end)
    if rule_table.is_truncated(intact, last.end):
        gaps = (*log.gaps, Gap(intact, last.end, TRUNCATED, now_ms))
        complete_since_ms = 0 if log.role == DATA else now_ms
        log = replace(log, start=max(intact, ends.log_start), complete_since_ms=complete_since_ms, gaps=gaps)
    if rule_table.is_deleted_unread(ends.log_start, last.end):
        gaps = (*log.gaps, Gap(last.end, ends.log_start, RETENTION, now_ms))
        log = replace(log, start=ends.log_start, complete_since_ms=0 if log.role == DATA else _UNKNOWN, gaps=gaps)
    return log


def _with_later_end(cluster: Cluster, logs: list[Log]) -> list[Log]:
    """Set `later_end`: the high watermarks of the data logs, listed after those of ledger and journal.

    If an open transaction blocks a log, nothing past the last stable offset is proven, and `later_end` is the largest
    offset.
    """
    partitions = [log.topic_partition for log in logs if log.role == DATA]
    ends = cluster.ends(partitions) if partitions else {}

    def later_end(log: Log) -> int:
        found = ends.get(log.topic_partition)
        stable, end = (
            (log.last_stable, log.high_watermark) if found is None else (found.last_stable, found.high_watermark)
        )
        return end if stable >= end else OFFSETS_MOST

    return [replace(log, later_end=later_end(log)) for log in logs]


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


def _with_complete_since(cluster: Cluster, logs: list[Log], now_ms: int) -> list[Log]:
    """Set `complete_since_ms` where it is yet unknown, from the log's oldest record.

    The record itself is read, since after DeleteRecords a broker may find no offset for any timestamp.
    """
    unknown = [log for log in logs if log.complete_since_ms in (_UNKNOWN, _UNKNOWN_OF_TOPIC)]
    begins = {log.topic_partition: log.start if log.complete_since_ms == _UNKNOWN else 0 for log in unknown}
    offsets = {
        log.topic_partition: begins[log.topic_partition]
        for log in unknown
        if begins[log.topic_partition] < log.high_watermark
    }
    timestamps_at = cluster.timestamps_at(offsets) if offsets else {}
    oldest = {partition: timestamps_at.get(partition, now_ms) for partition in begins}
    of_topics: dict[str, list[int]] = {}
    for log in logs:
        if log.role != DATA and log.first == 0:
            of_topics.setdefault(log.topic, []).append(oldest.get(log.topic_partition, log.complete_since_ms))

    def complete_since(log: Log) -> int:
        whole = log.complete_since_ms == _UNKNOWN_OF_TOPIC
        return rule_table.complete_since(oldest[log.topic_partition], of_topics.get(log.topic, []), whole=whole)

    return [
        replace(log, complete_since_ms=complete_since(log)) if log.topic_partition in oldest else log for log in logs
    ]


def _with_first_record(cluster: Cluster, logs: list[Log], now_ms: int) -> list[Log]:
    """Set `first_record_ms` where it is yet unknown; the record is read for data logs only.

    A timestamp in the future is a mistake of the writer, and is not used.
    """
    unknown = [log for log in logs if log.first_record_ms == _UNKNOWN]
    empty = {log.topic_partition: now_ms for log in unknown if not log.high_watermark}
    offsets = {log.topic_partition: 0 for log in unknown if log.role == DATA and log.high_watermark}
    timestamps_at: dict[TopicPartition, int] = {}
    if offsets:
        with suppress(CannotRun):  # retention may have deleted the record in the meantime
            timestamps_at = {partition: ms for partition, ms in cluster.timestamps_at(offsets).items() if ms <= now_ms}
    first_records = empty | timestamps_at
    return [
        replace(log, first_record_ms=first_records.get(log.topic_partition, 0))
        if log.first_record_ms == _UNKNOWN
        else log
        for log in logs
    ]


def _with_guarantees(settings: Settings, before: Plan | None, log: Log) -> Log:
    """Set the guarantees of a data log by offset, from the rules of this run and of earlier runs.

    The offset at which the service began to follow a changed rule is unknown: records between two runs count as
    `idempotent`, the weaker guarantee.
    """
    if log.role != DATA:
        return log
    last = (
        next(
            (
                earlier
                for earlier in before.logs
                if earlier.topic_partition == log.topic_partition and earlier.topic_id == log.topic_id
            ),
            None,
        )
        if before
        else None
    )
    earlier_guarantees = last.guarantees if last else ()
    now = settings.rules.guarantee(log.topic)
    if earlier_guarantees and earlier_guarantees[-1].guarantee == now.value:
        return replace(log, guarantees=earlier_guarantees)
    first = log.high_watermark if now is Guarantee.EXACTLY_ONCE else log.start
    guarantee = OffsetGuarantee(first if earlier_guarantees else 0, now.value)
    return replace(log, guarantees=(*earlier_guarantees, guarantee))


def _capped(logs: list[Log], most: int | None) -> list[Log]:
    """Lower the ends so that all spans have about `most` offsets in total, each in proportion to its size."""
    total = sum(log.end - log.start for log in logs)
    if most is None or total <= most:
        return logs
    return [replace(log, end=log.start + -(-(log.end - log.start) * most // total)) for log in logs]


def _with_decided_until(cluster: Cluster, logs: list[Log], now_ms: int) -> list[Log]:
    """Set `decided_until_ms` and `blocking_transaction`.

    If a log has records past its end, `decided_until_ms` is the timestamp of the first of these.
    """
    unread = {log.topic_partition: log.end for log in logs if log.end < log.high_watermark}
    timestamps_at = cluster.timestamps_at(unread) if unread else {}
    blocked = [log.topic_partition for log in logs if log.end == log.last_stable < log.high_watermark]
    blocking_transactions = cluster.blocking_transactions(blocked) if blocked else {}
    return [
        replace(
            log,
            decided_until_ms=timestamps_at.get(log.topic_partition, 0) if log.topic_partition in unread else now_ms,
            blocking_transaction=blocking_transactions.get(log.topic_partition),
        )
        for log in logs
    ]
