"""Drafts of the logs of a plan: each continues the log of the last run, or begins anew.

A draft is made of the ends of a log alone; what else has to be read from Kafka for it is marked.
"""

from dataclasses import dataclass, replace
from enum import Enum

from spark import rule_table
from spark.reading.kafka_admin import Ends, Topic, TopicPartition
from spark.reading.run_plan import DATA, RECREATED, RETENTION, TRUNCATED, Log, LogGap, Plan


class OldestRecord(Enum):
    """The record whose time becomes the `complete_since_ms` of a ledger's or journal's log."""

    OF_LOG = "the oldest record of the log"
    OF_TOPIC = "the oldest record in any log of the topic, for a log that still has its first record"


@dataclass(frozen=True, slots=True)
class Draft:
    """A log of the plan. Two of its times may be unknown until they are read from Kafka.

    `complete_since`: the record whose time becomes `complete_since_ms`, None if that time is known.
    `needs_first_record`: whether `first_record_ms` is unknown.
    """

    log: Log
    complete_since: OldestRecord | None = None
    needs_first_record: bool = False


@dataclass(frozen=True, slots=True)
class ListedLog:
    """A partition's log as Kafka lists it for this run; `diverged` is the offset from which a truncated log has other
    records than the last run has read, None if it has the same."""

    role: str
    topic: Topic
    partition: int
    ends: Ends
    diverged: int | None


def next_log(listed: ListedLog, last_plan: Plan | None, now_ms: int) -> Draft:
    """Draft a partition's log for this run: it continues where the last run ended, or starts over in a new topic."""
    last_log = log_of(last_plan, (listed.topic.name, listed.partition))
    draft = _new_log(listed, now_ms)
    if last_log is None:
        return draft
    if rule_table.is_recreated(last_log.topic_id, listed.topic.topic_id):
        gap = LogGap(last_log.end, last_log.end, RECREATED, now_ms)
        log = replace(draft.log, recreated_at_ms=now_ms, complete_since_ms=now_ms, gaps=(*last_log.gaps, gap))
        return replace(draft, log=log, complete_since=None)
    return _with_gaps(_continued(draft, last_log), last_log, listed, now_ms)


def log_of(plan: Plan | None, partition: TopicPartition) -> Log | None:
    """Return the log of a partition in a plan."""
    return plan.logs_by_partition.get(partition) if plan else None


def _new_log(listed: ListedLog, now_ms: int) -> Draft:
    """Draft the log of a partition that no run has read.

    A ledger or journal is complete from its oldest record on, since a ledger may be younger than the data.
    """
    ends = listed.ends
    has_first_record = ends.log_start == 0
    log = Log(
        role=listed.role,
        topic=listed.topic.name,
        partition=listed.partition,
        topic_id=listed.topic.topic_id,
        audited=True,
        compacted=False,
        recreated_at_ms=0,
        first=ends.log_start,
        start=ends.log_start,
        end=ends.last_stable,
        last_stable=ends.last_stable,
        high_watermark=ends.high_watermark,
        complete_since_ms=0,
        decided_until_ms=now_ms,
        first_record_ms=0,
        leader_epoch=ends.leader_epoch,
    )
    oldest = OldestRecord.OF_TOPIC if has_first_record else OldestRecord.OF_LOG
    return Draft(log, None if listed.role == DATA else oldest, needs_first_record=has_first_record)


def _continued(draft: Draft, last_log: Log) -> Draft:
    """Continue a new log of this run (`_new_log`) from the same log in the last run."""
    # Lakes of an earlier version have 0 for every log that began at offset 0.
    is_complete_since_known = last_log.complete_since_ms != 0 or draft.log.start > 0
    is_first_record_known = last_log.first_record_ms != 0 and last_log.high_watermark > 0
    log = replace(
        draft.log,
        # Compaction deleted records for good, also in a topic that is not compacted any more.
        compacted=last_log.compacted,
        recreated_at_ms=last_log.recreated_at_ms,
        first=last_log.first,
        start=last_log.end,
        complete_since_ms=last_log.complete_since_ms,
        gaps=last_log.gaps,
        caught_up_run=last_log.caught_up_run,
        behind_run=last_log.behind_run,
        behind_end=last_log.behind_end,
        first_record_ms=last_log.first_record_ms if is_first_record_known else 0,
    )
    return Draft(
        log,
        None if is_complete_since_known else draft.complete_since,
        needs_first_record=draft.needs_first_record and not is_first_record_known,
    )


def _with_gaps(draft: Draft, last_log: Log, listed: ListedLog, now_ms: int) -> Draft:
    """Add gaps to a continued log: records that a new leader does not have, and records deleted unread."""
    ends = listed.ends
    intact = rule_table.intact_until(ends.last_stable, listed.diverged, last_log.end)
    if rule_table.is_truncated(intact, last_log.end):
        gaps = (*draft.log.gaps, LogGap(intact, last_log.end, TRUNCATED, now_ms))
        complete_since_ms = 0 if draft.log.role == DATA else now_ms
        log = replace(draft.log, start=max(intact, ends.log_start), complete_since_ms=complete_since_ms, gaps=gaps)
        draft = replace(draft, log=log, complete_since=None)
    if rule_table.is_deleted_unread(ends.log_start, last_log.end):
        gaps = (*draft.log.gaps, LogGap(last_log.end, ends.log_start, RETENTION, now_ms))
        log = replace(draft.log, start=ends.log_start, complete_since_ms=0, gaps=gaps)
        draft = replace(draft, log=log, complete_since=None if log.role == DATA else OldestRecord.OF_LOG)
    return draft
