"""The logs of a mirror, the same topics in another cluster of Kafka: what a run reads of each, and the reading.

A mirror is not ours: whatever is wrong with it is Unreadable, and ends no run. Each log is read once, from where the
last run has left it. What is decided of a log is a pure function of what is known of it and of its present ends.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SettingsError, SharedSettings, SinkRule
from spark import rule_table
from spark.engine import frames
from spark.engine.jvm import Py4JError, Py4JJavaError, reason
from spark.errors import CannotRun, Unreadable
from spark.reading import decode, planning, source
from spark.reading.kafka_admin import NO_LEADER_EPOCH, Ends, KafkaAdmin, Topic, TopicPartition
from spark.reading.run_plan import Plan
from spark.reading.sinks import ROW, shown
from spark.reading.source import Span

ABSENT_MS: Final = 60_000
"""A topic counts as deleted once runs so far apart have not found it: a broker whose metadata lag does not know a topic
that exists."""


@dataclass(frozen=True, slots=True)
class MirrorLog:
    """What is known of a partition of a mirror's topic. Times in ms since the epoch, 0 if there is none.

    `end`: every record below this offset was read. `leader_epoch`: of the leader that answered `end`.
    `complete_since_ms`: no record of an event that was accepted from then on was deleted unread.
    `caught_up_ms`: when the last run froze whose end of the log has been reached by now; `behind_ms` and `behind_end`:
    when a later run froze, and its end of the log, which has not been reached.
    `reset_run`: the last run that found the topic deleted or recreated, or records gone that it had.
    `absent_ms`: when the first run froze that has not found the topic, if no later run has found it. A deleted topic
    has no `topic_id`.
    `is_compacted`: a run has found the topic compacted, so that any record may have been deleted unread.
    """

    topic: str
    partition: int
    topic_id: str
    end: int
    leader_epoch: int = NO_LEADER_EPOCH
    complete_since_ms: int = 0
    caught_up_ms: int = 0
    behind_ms: int = 0
    behind_end: int = 0
    reset_run: int = 0
    absent_ms: int = 0
    is_compacted: bool = False

    @property
    def topic_partition(self) -> TopicPartition:
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class LogPlan:
    """What a run reads of a log: from `start` to before `log.end`.

    `is_gap`: records before `start` were deleted before a run has read them. `gone_from`: rows of the log from this
    offset on are no longer true, None if all are.
    """

    log: MirrorLog
    start: int
    is_gap: bool = False
    gone_from: int | None = None

    @property
    def span(self) -> Span:
        return self.start, self.log.end


@dataclass(frozen=True)
class MirrorRead:
    """What a run has read of a mirror: its logs, and their new records.

    `rows`: sinks.ROW, and `topic_id`.
    """

    plans: tuple[LogPlan, ...]
    rows: DataFrame

    @property
    def logs(self) -> tuple[MirrorLog, ...]:
        return tuple(plan.log for plan in self.plans)


# ------------------------------------------------------------------------------------------------------ decisions

_KEPT: Final = ("complete_since_ms", "caught_up_ms", "behind_ms", "behind_end", "reset_run", "is_compacted")
"""What stays known of a log while its topic exists."""


def planned(
    known: MirrorLog | None,
    topic: Topic,
    partition: int,
    ends: Ends,
    diverged: int | None,
    run: int,
) -> LogPlan:
    """Plan the reading of a log up to its last stable offset: as read_committed consumers of the mirror do.

    `diverged` is the offset from which another leader's log differs from what was read, None if it does not.
    """
    log = MirrorLog(topic.name, partition, topic.topic_id, ends.last_stable, ends.leader_epoch)
    if known is None:
        return LogPlan(log, ends.log_start, is_gap=ends.log_start > 0)
    if rule_table.is_recreated(known.topic_id, topic.topic_id):
        # What the topic had before is in the mirror only if it was copied again.
        return LogPlan(replace(log, reset_run=run), ends.log_start, is_gap=ends.log_start > 0)
    kept = {name: getattr(known, name) for name in _KEPT}
    log = replace(log, **kept)
    intact = rule_table.intact_until(ends.last_stable, diverged, known.end)
    gone_from = intact if rule_table.is_truncated(intact, known.end) else None
    if gone_from is not None:
        log = replace(log, reset_run=run)
    start = known.end if gone_from is None else gone_from
    is_gap = rule_table.is_deleted_unread(ends.log_start, start)
    return LogPlan(log, max(start, ends.log_start), is_gap, gone_from)


def with_compaction(plans: Sequence[LogPlan], compacted: Collection[str]) -> list[LogPlan]:
    """Mark the logs of the topics that are compacted now: what compaction deleted stays deleted."""
    return [
        replace(plan, log=replace(plan.log, is_compacted=plan.log.is_compacted or plan.log.topic in compacted))
        for plan in plans
    ]


def absent(known: MirrorLog, run: int, frozen_ms: int) -> LogPlan:
    """Plan for a log whose topic is not found: nothing is read of it, and the log of a deleted topic is empty.

    The log of a deleted topic stays known: when the topic is back, it was recreated.
    """
    log = replace(known, absent_ms=known.absent_ms or frozen_ms)
    if known.topic_id and frozen_ms - log.absent_ms >= ABSENT_MS:
        log = MirrorLog(known.topic, known.partition, topic_id="", end=0, absent_ms=log.absent_ms, reset_run=run)
    if not log.topic_id:
        log = replace(log, caught_up_ms=frozen_ms)
    return LogPlan(log, log.end)


def capped(plans: Sequence[LogPlan], most: int | None) -> list[LogPlan]:
    """Lower the ends of logs as `planning.capped_ends` does."""
    ends = planning.capped_ends([plan.span for plan in plans], most)
    return [replace(plan, log=replace(plan.log, end=end)) for plan, end in zip(plans, ends, strict=True)]


def caught_up(log: MirrorLog, last_stable: int, frozen_ms: int) -> MirrorLog:
    """Set until when the mirror is known: `caught_up_ms`, by the end of the log that this run has listed.

    A log with steady traffic may never be read to its end, so the end of one run is kept until a later run has read
    that far.
    """
    if log.end >= last_stable:
        return replace(log, caught_up_ms=frozen_ms, behind_ms=0, behind_end=0)
    if log.behind_ms and log.end < log.behind_end:
        return log
    return replace(log, caught_up_ms=log.behind_ms or log.caught_up_ms, behind_ms=frozen_ms, behind_end=last_stable)


def completed(plan: LogPlan, first_event_ms: int | None, frozen_ms: int, margin_ms: int) -> LogPlan:
    """Set since when no record of an event was deleted unread, after a gap.

    A mirror copies the records of a partition in their order, and so again after a restart: what was accepted after the
    first event after the gap (`first_event_ms`, None without one) and by the sink's margin, was copied after it, too.
    """
    if not plan.is_gap:
        return plan
    since_ms = frozen_ms if first_event_ms is None else first_event_ms + margin_ms
    log = replace(plan.log, complete_since_ms=max(plan.log.complete_since_ms, since_ms))
    return replace(plan, log=log)


def seen_until_ms(logs: Iterable[MirrorLog], frozen_ms: int) -> int:
    """Return the time (ms) up to which a mirror is known: each record that it had then has been read. A mirror without
    a log is known to be empty."""
    return min((log.caught_up_ms for log in logs), default=frozen_ms)


def complete_since(rule: SinkRule, logs: Iterable[MirrorLog], topics: Iterable[str]) -> dict[str, int]:
    """Return, for each topic whose mirror had records deleted unread, since when it has every event (ms)."""
    of_copies: dict[str, int] = {}
    for log in logs:
        of_copies[log.topic] = max(of_copies.get(log.topic, 0), log.complete_since_ms)
    since = {topic: of_copies.get(rule.copy_of(topic), 0) for topic in topics}
    return {topic: ms for topic, ms in since.items() if ms}


def compacted_of(rule: SinkRule, logs: Iterable[MirrorLog], topics: Iterable[str]) -> list[str]:
    """Return the topics whose mirror may have deleted any record unread, by compaction."""
    copies = {log.topic for log in logs if log.is_compacted}
    return sorted(topic for topic in topics if rule.copy_of(topic) in copies)


# -------------------------------------------------------------------------------------------------------- reading

_ROW: Final = ROW | {"topic_id": "string"}


def read(
    spark: SparkSession,
    rule: SinkRule,
    topics: Mapping[str, str],
    known: Iterable[MirrorLog],
    plan: Plan,
    max_records: int | None,
) -> MirrorRead:
    """Read what is new in the copies of these topics (each with its id), at most about `max_records` offsets, for the
    run of a plan. Raises Unreadable.

    The rows are kept on the executors.
    """
    run, frozen_ms = plan.run, plan.frozen_ms
    try:
        settings = rule.kafka_settings()
        with closing(KafkaAdmin(spark, settings, "kafka")) as admin:
            copies = {rule.copy_of(topic) for topic in topics}
            found = admin.find(copies)
            _check_other_cluster(rule, topics, found)
            logs_before = {log.topic_partition: log for log in known if log.topic in copies}
            plans, ends = _plan(admin, found, logs_before, run)
            plans = capped(plans, max_records)
            rows = _read(spark, settings, plans, found, frozen_ms)
            _check_topics(admin, found)
            # After the reading: a topic whose records compaction has deleted before is compacted now.
            plans = with_compaction(plans, _compacted(admin, found))
        first = _first_events(rows, plans)
        margin_ms = 1000 * rule.margin_s
        plans = [completed(one, first.get(one.log.topic_partition), frozen_ms, margin_ms) for one in plans]
        logs = [caught_up(one.log, ends[one.log.topic_partition].last_stable, frozen_ms) for one in plans]
        plans = [replace(one, log=log) for one, log in zip(plans, logs, strict=True)]
        plans += [absent(log, run, frozen_ms) for log in logs_before.values() if log.topic not in found]
        return MirrorRead(tuple(plans), rows)
    except Py4JJavaError as error:
        raise Unreadable(shown(reason(error))) from None
    except (CannotRun, SettingsError, PySparkException, Py4JError, OSError) as error:
        raise Unreadable(shown(str(error))) from None


def _check_other_cluster(rule: SinkRule, topics: Mapping[str, str], found: Mapping[str, Topic]) -> None:
    """Check that no copy is the audited topic itself, by the topic's id (KIP-516): it has each of its events. Raises
    Unreadable."""
    for name, topic_id in topics.items():
        if rule.copy_of(name) == name and name in found and found[name].topic_id == topic_id:
            raise Unreadable(
                f"kafka is the audited cluster: the topic {name} there is the audited one; name the mirror's "
                "servers, or with mirror_topic the copies"
            )


def _compacted(admin: KafkaAdmin, topics: Mapping[str, Topic]) -> set[str]:
    """Return the topics that are compacted, none if the user may not see their settings."""
    try:
        return admin.compacted(sorted(topics))
    except CannotRun as error:
        if "AuthorizationException" not in str(error):
            raise
        return set()


def _plan(
    admin: KafkaAdmin, topics: Mapping[str, Topic], known: Mapping[TopicPartition, MirrorLog], run: int
) -> tuple[list[LogPlan], Mapping[TopicPartition, Ends]]:
    """Plan the reading of every log of these topics, and return their present ends."""
    partitions = planning.partitions_of(topics.values())
    ends = dict(admin.ends(partitions)) if partitions else {}
    diverged = planning.diverged_of(admin, known.values(), topics, ends)
    plans = [
        planned(known.get((name, number)), topics[name], number, ends[name, number], diverged.get((name, number)), run)
        for name, number in partitions
    ]
    return plans, ends


def _read(
    spark: SparkSession,
    settings: SharedSettings,
    plans: Iterable[LogPlan],
    topics: Mapping[str, Topic],
    frozen_ms: int,
) -> DataFrame:
    """Read the records of these spans, decoded, and keep them on the executors."""
    spans = {plan.log.topic_partition: plan.span for plan in plans if plan.start < plan.log.end}
    if not spans:
        return frames.rows_of(spark, frames.ddl(_ROW), [])
    topic_ids = F.create_map(*(F.lit(text) for topic in topics.values() for text in (topic.name, topic.topic_id)))
    decoded = decode.by_header(source.read_with_type(spark, settings, spans), frozen_ms)
    arrived_ms = F.when(F.col("is_append_time"), F.col("timestamp_ms"))
    rows = decoded.withColumns({"arrived_ms": arrived_ms, "topic_id": topic_ids[F.col("topic")]}).select(*_ROW)
    return rows.localCheckpoint()


def _check_topics(admin: KafkaAdmin, topics: Mapping[str, Topic]) -> None:
    """Check, after the reading, that the topics are those of the plan. Raises Unreadable.

    Spark reads a span of offsets from whatever log has the topic's name.
    """
    found = admin.find(topics)
    for name, topic in topics.items():
        if name not in found or rule_table.is_recreated(topic.topic_id, found[name].topic_id):
            raise Unreadable(f"topic {name!r} was deleted or recreated while it was read; the next run reads it")


def _first_events(rows: DataFrame, plans: Iterable[LogPlan]) -> dict[TopicPartition, int]:
    """Return the acceptance (ms) of the first event that was read of each log after a gap."""
    logs = [plan.log.topic_partition for plan in plans if plan.is_gap]
    if not logs:
        return {}
    events = rows.where("id IS NOT NULL").where(F.col("topic").isin(*{topic for topic, _ in logs}))
    first = events.groupBy("topic", "partition").agg(F.min_by("event_ms", "offset").alias("event_ms"))
    return {(row["topic"], row["partition"]): row["event_ms"] for row in first.collect()}
