"""What a run reads: the ends of every log, frozen on the driver, and what each run before it had read.

A plan is written down before anything is read. A run that was cut off is taken up again from its own plan, so that it
ends with the report that it would have had.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Final, Protocol

from service.contract import CallerRule, Guarantee, Rules, TopicRule, wire
from spark import rule_table
from spark.errors import CannotRun
from spark.reading.kafka_admin import BlockingTransaction, Ends, Topic, TopicPartition
from spark.reading.source import Span
from spark.settings import HOUR_MS, OFFSETS_MOST, Settings, matches

DATA: Final = "data"
LEDGER: Final = "ledger"
REQUESTS: Final = "requests"
UNWANTED: Final = "unwanted"
"""A role of its own for what an earlier run read of a data topic that this one leaves out: where to go on, one day."""

RETENTION: Final = "retention"
TRUNCATED: Final = "truncated"
RECREATED: Final = "recreated"
"""Causes of a gap: the log's start passed what was not read, its end fell behind what was, the topic was made anew."""


class Cluster(Protocol):
    """What is asked of Kafka: `kafka.Broker`, or a stand-in."""

    def names(self) -> list[str]: ...
    def describe(self, names: Sequence[str], *, strict: bool = True) -> dict[str, Topic]: ...
    def compacted(self, names: Sequence[str]) -> set[str]: ...
    def ends(self, partitions: Sequence[TopicPartition], *, strict: bool = True) -> dict[TopicPartition, Ends]: ...
    def timestamps_at(self, partitions: dict[TopicPartition, int]) -> dict[TopicPartition, int]: ...
    def blocking_transactions(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, BlockingTransaction]: ...
    def diverged(self, positions: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, int]: ...


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets `first` up to before `last` that were gone before they were read. `seen_ms`: when that was found."""

    first: int
    last: int
    cause: str
    seen_ms: int


@dataclass(frozen=True, slots=True)
class Promise:
    """The guarantee that a topic's records have from the offset `first` on."""

    first: int
    guarantee: str


@dataclass(frozen=True, slots=True)
class Log:
    """One partition in a run: a row of `progress`. Times in ms since the epoch.

    `first`: the offset from which it was ever read; `start`, `end`: what this run reads; `recreated_at_ms`: when the
    topic was first seen with another topic id, else 0; `complete_since_ms`: every record appended from then on was read
    (ledger and journal; 0 for data); `decided_until_ms`: every record appended before lies below `end`;
    `blocking_transaction`: the open transaction that keeps the last stable offset at `end`; `guarantees`: of a data
    topic, by offset; `leader_epoch`: of the leader that answered `end`, or -1.
    `later_end`: the high watermark of a data log, listed after the ends of ledger and journal; the largest offset where
    an open transaction holds the log up.
    `caught_up_run`: the last run whose freeze had nothing in the log that has not been read since (0: none);
    `behind_run` and `behind_end`: a later run whose freeze had, and the log's high watermark then.
    `first_record_ms`: the timestamp of the record at offset 0, or that of the plan while there is none; 0 if unknown.
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
    gaps: tuple[Gap, ...] = ()
    blocking_transaction: BlockingTransaction | None = None
    guarantees: tuple[Promise, ...] = ()
    later_end: int = 0
    caught_up_run: int = 0
    behind_run: int = 0
    behind_end: int = 0
    first_record_ms: int = 0
    leader_epoch: int = -1

    @property
    def topic_partition(self) -> TopicPartition:
        return self.topic, self.partition


_MARKS: Final = ("caught_up_run", "behind_run", "behind_end", "first_record_ms")


@dataclass(frozen=True)
class Plan:
    """All that a run reads and judges by. `options` is the JSON of what the judgement depends on."""

    run: int
    frozen_ms: int
    options: str
    logs: tuple[Log, ...] = field(repr=False)

    def spans(self, role: str) -> dict[TopicPartition, Span]:
        """What the run reads of the audited logs of a role."""
        return spans_of(self.logs, role)

    def of(self, role: str) -> list[Log]:
        """The audited logs of a role, by topic and partition."""
        return sorted(
            (log for log in self.logs if log.role == role and log.audited), key=lambda log: log.topic_partition
        )

    @property
    def topics(self) -> list[str]:
        """The audited data topics."""
        return sorted({log.topic for log in self.of(DATA)})

    @property
    def partitions(self) -> int:
        """How many partitions of data topics are audited."""
        return sum(1 for log in self.logs if log.role == DATA and log.audited)

    @property
    def unwanted(self) -> list[str]:
        """The data topics that earlier runs have audited, and this one leaves out."""
        return sorted({log.topic for log in self.logs if log.role == UNWANTED})

    def rows(self) -> list[dict[str, Any]]:
        """The plan as rows of `progress`."""
        head = {"run": self.run, "frozen_ms": self.frozen_ms, "options": self.options}
        return [{**head, **asdict(log)} for log in self.logs]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> "Plan | None":
        """The plan that these rows of `progress` (of one run) hold, None for no rows."""
        logs = []
        head: Mapping[str, Any] | None = None
        for row in rows:
            head = row
            apart = ("gaps", "blocking_transaction", "guarantees", "later_end", "leader_epoch", *_MARKS)
            values = {name: row[name] for name in Log.__dataclass_fields__ if name not in apart}
            gaps = tuple(Gap(gap["first"], gap["last"], gap["cause"], gap["seen_ms"]) for gap in row["gaps"])
            blocking_transaction = (
                BlockingTransaction(**row["blocking_transaction"]) if row["blocking_transaction"] else None
            )
            # Lakes of before have no such columns.
            guarantees = tuple(Promise(one["first"], one["guarantee"]) for one in row.get("guarantees") or ())
            later_end, epoch = row.get("later_end"), row.get("leader_epoch")
            values["later_end"] = row["high_watermark"] if later_end is None else later_end
            values["leader_epoch"] = -1 if epoch is None else epoch
            values |= {name: row.get(name) or 0 for name in _MARKS}
            logs.append(Log(**values, gaps=gaps, blocking_transaction=blocking_transaction, guarantees=guarantees))
        return None if head is None else cls(head["run"], head["frozen_ms"], head["options"], tuple(logs))


def spans_of(logs: Iterable[Log], role: str) -> dict[TopicPartition, Span]:
    """What is to be read of the audited logs of a role."""
    return {log.topic_partition: (log.start, log.end) for log in logs if log.role == role and log.audited}


_ASK: Final = -1
"""A `complete_since_ms` or `first_record_ms` that has still to be asked for."""

_ASK_TOPIC: Final = -2
"""A `complete_since_ms` that has still to be asked for, of a log that has all records since its topic was made."""

Discover = Callable[[Sequence[Log], Sequence[str]], set[str]]
"""Those of the topics that what is to be read of the ledger and the journal names."""

Named = Callable[[], set[str]]
"""The topics that what the lake has of the ledger and the journal names."""


def options_of(settings: Settings) -> str:
    """What a verdict depends on, besides the records; another value has everything judged anew.

    The window is one of these: a run hands on the sums of no more hours than it shows.
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
            "timeouts_ms": shared.request_timeout_ms + shared.transaction_timeout_ms,
            "rules": [
                [rule.pattern, rule.guarantee.value, rule.derived, rule.client_duplicates]
                for rule in settings.rules.topics
            ],
            "callers": [caller.name for caller in settings.rules.callers],
        },
        sort_keys=True,
    )


def settings_of(options: str, now: Settings) -> Settings:
    """The settings that a plan was made with, as far as its `options` (options_of) tell; the rest is as `now`."""
    parsed = json.loads(options)
    given = replace(
        now.options,
        topics=tuple(parsed["topics"]),
        grace_s=parsed["grace_s"],
        window_h=parsed["window_h"],
        identity=parsed["identity"],
    )
    # Of the timeouts the plan keeps only the sum, and only the sum counts.
    shared = replace(
        now.shared, key_ttl_s=parsed["key_ttl_s"], request_timeout_ms=parsed["timeouts_ms"], transaction_timeout_ms=0
    )
    topics = tuple(
        TopicRule(pattern, Guarantee(guarantee), "", *switches) for pattern, guarantee, *switches in parsed["rules"]
    )
    # Lakes of before tell no callers.
    callers = tuple(CallerRule(name, ()) for name in parsed["callers"]) if "callers" in parsed else now.rules.callers
    return replace(now, options=given, shared=shared, rules=Rules(topics, callers))


def freeze(
    cluster: Cluster,
    settings: Settings,
    before: Plan | None,
    now_ms: int,
    discover: Discover,
    named: Named,
    run: int | None = None,
) -> Plan:
    """The plan of the run after `before`: data topics' ends first, then the ledger's, then the journal's; and where the
    data topics end after that. Its number is `run`, else the next one.

    In this order whatever the data shows has its ledger record below the ledger's end, or undecided; and whatever the
    ledger names lies below the later ends, or was never written. Where the ledger
    names a topic of which no ends are known, all of it is done again: it was made in the meantime, or is one of those
    that may fail as long as nothing names them.
    """
    shared, globs = settings.shared, settings.options.topics
    ledger, requests = wire.ledger_topic(shared.namespace), wire.requests_topic(shared.namespace)
    own = {ledger, requests, wire.control_topic(shared.namespace), wire.findings_topic(shared.namespace)}
    known = set() if globs else _known(settings, before, named)
    last_data = [log for log in before.logs if log.role in (DATA, UNWANTED)] if before else []
    left_out = {log.topic for log in last_data if log.role == UNWANTED}

    def wanted(name: str) -> bool:
        return matches(globs, name) if globs else name in known or _ruled(settings, name)

    while True:
        there = set(cluster.names())
        if ledger not in there and not globs:
            raise CannotRun(
                f"topic {ledger!r} does not exist; "
                "set FENCEPOST_NAMESPACE to the service's, or name topics with --topics"
            )
        sure = {name for name in there - own if wanted(name)}
        if globs and not sure and not any(wanted(log.topic) for log in last_data):
            raise CannotRun(
                f"--topics {','.join(globs)!r} matches no topic of Kafka at FENCEPOST_KAFKA={shared.kafka!r}, and none "
                "that the last run on this --lake knew; name topics that are there, or leave --topics out"
            )
        candidates = set() if globs else there - own - sure
        logs = _frozen(cluster, before, {DATA: sure, LEDGER: {ledger}, REQUESTS: {requests}}, candidates, now_ms)
        if globs:
            break
        # One that an earlier run read may be gone: named, it is wanted all the same, for what it was promised.
        later = set(cluster.names())
        others = {name for name in (there | left_out | later) - own if not wanted(name)}
        found = discover(logs, sorted(others)) if others else set()
        known |= found
        if not (found & later) - {log.topic for log in logs}:
            break
    logs = [log for log in logs if log.role != DATA or wanted(log.topic)]
    compacted = cluster.compacted(sorted({log.topic for log in logs if log.role == DATA}))
    logs = [replace(log, compacted=log.compacted or log.topic in compacted) for log in logs]
    logs = _complete(cluster, logs, now_ms)
    logs = _begun(cluster, logs, now_ms)
    logs = _capped(logs, settings.options.max_records)
    logs = _decided(cluster, logs, now_ms)
    logs = [_promised(settings, before, log) for log in logs]
    run = run or (before.run + 1 if before else 1)
    logs = [_caught_up(log, run) for log in _ended_later(cluster, logs)]
    here = {log.topic_partition for log in logs}
    carried = [
        replace(log, role=_carried_as(log, wanted), audited=False, start=log.end)
        for log in (before.logs if before else ())
        if log.topic_partition not in here
    ]
    return Plan(run, now_ms, options_of(settings), tuple(logs + carried))


def _frozen(
    cluster: Cluster, before: Plan | None, sure: Mapping[str, Iterable[str]], candidates: Iterable[str], now_ms: int
) -> list[Log]:
    """The logs of topics that are there, as far as they go now: of `sure` by role, then of candidates for data.

    `compacted` is yet to be asked. CannotRun where one of `sure` does not answer; a candidate is left out.
    """
    described = cluster.describe([name for names in sure.values() for name in names])
    maybe = cluster.describe(list(candidates), strict=False)

    def partitions_of(topics: Iterable[Topic]) -> list[TopicPartition]:
        return sorted((topic.name, n) for topic in topics for n in range(topic.partitions))

    tried = cluster.ends(partitions_of(maybe.values()), strict=False)
    whole = {name for name, topic in maybe.items() if all((name, n) in tried for n in range(topic.partitions))}
    found = {DATA: {partition: ends for partition, ends in tried.items() if partition[0] in whole}}
    for role, names in sure.items():
        there = [described[name] for name in names if name in described]
        found[role] = found.get(role, {}) | cluster.ends(partitions_of(there))
    topics = described | maybe
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
    """Where logs stopped being what was read of them, of those that have another leader, or one of another epoch."""
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
    """The role in which a log goes on that this run does not read."""
    if log.role in (LEDGER, REQUESTS):
        return log.role
    return DATA if wanted(log.topic) else UNWANTED


def _known(settings: Settings, before: Plan | None, named: Named) -> set[str]:
    """The topics that a run without --topics audits because of what runs before it have read.

    Where the last one had other --topics, its plan does not tell: it merged all of the ledger, whatever it audited.
    """
    if before is None:
        return set()
    if json.loads(before.options)["topics"] != list(settings.options.topics):
        return named()
    return {log.topic for log in before.logs if log.role == DATA}


def _ruled(settings: Settings, name: str) -> bool:
    """Whether a rule names the topic."""
    return any(fnmatchcase(name, rule.pattern) for rule in settings.rules.topics)


def window_from(plan: Plan, settings: Settings) -> int:
    """From when on the report looks, ms: a whole hour."""
    return rule_table.window_from(plan.frozen_ms, settings.options.window_h * HOUR_MS)


def arrived(plan: Plan, before: Plan | None) -> dict[TopicPartition, int]:
    """Since when (ms) what a run reads of a data log has come into it at the earliest, where the run before tells.

    That run froze the log's end: what lies above it came, or was committed, later, whatever its timestamp says.
    """
    if before is None:
        return {}
    read = {log.topic_partition: log for log in before.of(DATA) if log.end == log.last_stable}
    return {
        log.topic_partition: before.frozen_ms
        for log in plan.of(DATA)
        if log.start < log.end
        and (last := read.get(log.topic_partition)) is not None
        and (log.topic_id != last.topic_id or log.start >= last.end)
    }


def shifted(plan: Plan, before: Plan | None) -> bool:
    """Whether other things can be proven of the data than by the run before, for a reason that lies in the logs.

    A topic is gone, or made anew, or compacted now; records went away unread.
    """

    def grounds(logs: Iterable[Log]) -> set[tuple[Any, ...]]:
        return {(log.topic_partition, log.topic_id, log.compacted, log.recreated_at_ms, log.gaps) for log in logs}

    return before is not None and grounds(before.of(DATA)) - grounds(plan.of(DATA)) != set()


def readable(cluster: Cluster, plan: Plan) -> bool:
    """Whether all that a plan wants to read is still in the logs, which go on while nobody carries it out."""
    logs = [log for log in plan.logs if log.audited and log.start < log.end]
    topics = cluster.describe(sorted({log.topic for log in logs}))
    if any(log.topic not in topics or topics[log.topic].topic_id != log.topic_id for log in logs):
        return False
    ends = cluster.ends([log.topic_partition for log in logs]) if logs else {}
    there = all(
        ends[log.topic_partition].log_start <= log.start and log.end <= ends[log.topic_partition].last_stable
        for log in logs
    )
    return there and not _diverged(cluster, logs, topics, ends)


def vanished(plan: Plan, before: Plan | None) -> dict[TopicPartition, Span]:
    """What was read of the data before, and stands in the logs no more since the run before: it is no evidence."""
    known = {log.topic_partition: set(log.gaps) for log in before.logs} if before else {}
    return {
        log.topic_partition: (gap.first, gap.last)
        for log in plan.of(DATA)
        for gap in log.gaps
        if gap.cause == TRUNCATED and gap not in known.get(log.topic_partition, ())
    }


def _next_log(
    before: Plan | None,
    role: str,
    topic: Topic,
    partition: TopicPartition,
    ends: Ends,
    diverged: int | None,
    now_ms: int,
) -> Log:
    """A partition in this run: from where the last run left it, or from where its log is another one since."""
    last = next((log for log in before.logs if log.topic_partition == partition), None) if before else None
    # What is read for the first time is known from its oldest record on: a ledger may have been made after the data.
    complete_since_ms = 0 if role == DATA else _ASK if ends.log_start else _ASK_TOPIC
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
        first_record_ms=0 if ends.log_start else _ASK,
        leader_epoch=ends.leader_epoch,
    )
    if before is None or last is None:
        return log
    if rule_table.is_made_anew(last.topic_id, topic.topic_id):
        gap = Gap(last.end, last.end, RECREATED, now_ms)
        return replace(log, recreated_at_ms=now_ms, complete_since_ms=now_ms, gaps=(*last.gaps, gap))
    return _without_what_went_away(_gone_on(log, last, before.frozen_ms, ends), last, ends, diverged, now_ms)


def _gone_on(log: Log, last: Log, before_ms: int, ends: Ends) -> Log:
    """A log of this run as it goes on from the `last` run, which was at `before_ms`."""
    return replace(
        log,
        # What compaction took, it took, also of a topic that is compacted no more.
        compacted=last.compacted,
        recreated_at_ms=last.recreated_at_ms,
        first=last.first,
        start=last.end,
        # Lakes of before have 0 for a log that began at offset 0, whenever that was.
        complete_since_ms=last.complete_since_ms or (0 if ends.log_start else log.complete_since_ms),
        gaps=last.gaps,
        caught_up_run=last.caught_up_run,
        behind_run=last.behind_run,
        behind_end=last.behind_end,
        first_record_ms=last.first_record_ms if last.first_record_ms and last.high_watermark else log.first_record_ms,
    )


def _without_what_went_away(log: Log, last: Log, ends: Ends, diverged: int | None, now_ms: int) -> Log:
    """A log that goes on, with gaps for what a new leader does not have and for what retention took unread."""
    agreed = rule_table.agrees_to(ends.last_stable, diverged, last.end)
    if rule_table.is_cut_off(agreed, last.end):
        gaps = (*log.gaps, Gap(agreed, last.end, TRUNCATED, now_ms))
        complete_since_ms = 0 if log.role == DATA else now_ms
        log = replace(log, start=max(agreed, ends.log_start), complete_since_ms=complete_since_ms, gaps=gaps)
    if rule_table.is_eaten(ends.log_start, last.end):
        gaps = (*log.gaps, Gap(last.end, ends.log_start, RETENTION, now_ms))
        log = replace(log, start=ends.log_start, complete_since_ms=0 if log.role == DATA else _ASK, gaps=gaps)
    return log


def _ended_later(cluster: Cluster, logs: list[Log]) -> list[Log]:
    """The logs with `later_end`: the data's high watermarks, listed now that those of ledger and journal are known.

    Where an open transaction holds a log up, nothing beyond its last stable offset is proven: `later_end` is the
    largest offset then.
    """
    partitions = [log.topic_partition for log in logs if log.role == DATA]
    ends = cluster.ends(partitions) if partitions else {}

    def later(log: Log) -> int:
        found = ends.get(log.topic_partition)
        stable, end = (
            (log.last_stable, log.high_watermark) if found is None else (found.last_stable, found.high_watermark)
        )
        return end if stable >= end else OFFSETS_MOST

    return [replace(log, later_end=later(log)) for log in logs]


def _caught_up(log: Log, run: int) -> Log:
    """The log with the last run at whose freeze all that stood in it is read by now.

    A busy log never stands still: where it went on beyond what is read, it is read as far as that one day.
    """
    if log.end >= log.high_watermark:
        return replace(log, caught_up_run=run, behind_run=0, behind_end=0)
    if log.behind_run and log.end < log.behind_end:
        return log
    return replace(
        log, caught_up_run=log.behind_run or log.caught_up_run, behind_run=run, behind_end=log.high_watermark
    )


def ended(plan: Plan) -> dict[TopicPartition, int]:
    """Where each data log of a plan ended, after all was written that the run reads of ledger and journal."""
    return {log.topic_partition: log.later_end for log in plan.of(DATA)}


def _complete(cluster: Cluster, logs: list[Log], now_ms: int) -> list[Log]:
    """The logs with `complete_since_ms` where that has still to be asked for: by their oldest records.

    The record itself is read: after DeleteRecords a broker may know no offset for any timestamp, though there is one.
    """
    unknown = [log for log in logs if log.complete_since_ms in (_ASK, _ASK_TOPIC)]
    begins = {log.topic_partition: log.start if log.complete_since_ms == _ASK else 0 for log in unknown}
    asked = {
        log.topic_partition: begins[log.topic_partition]
        for log in unknown
        if begins[log.topic_partition] < log.high_watermark
    }
    timestamps_at = cluster.timestamps_at(asked) if asked else {}
    oldest = {partition: timestamps_at.get(partition, now_ms) for partition in begins}
    of_topics: dict[str, list[int]] = {}
    for log in logs:
        if log.role != DATA and log.first == 0:
            of_topics.setdefault(log.topic, []).append(oldest.get(log.topic_partition, log.complete_since_ms))

    def known_since(log: Log) -> int:
        whole = log.complete_since_ms == _ASK_TOPIC
        return rule_table.known_since(oldest[log.topic_partition], of_topics.get(log.topic, []), whole=whole)

    return [replace(log, complete_since_ms=known_since(log)) if log.topic_partition in oldest else log for log in logs]


def _begun(cluster: Cluster, logs: list[Log], now_ms: int) -> list[Log]:
    """The logs with `first_record_ms` where it has still to be asked for; nobody asks it but of data.

    A timestamp that has still to come is its writer's mistake, and tells nothing.
    """
    unknown = [log for log in logs if log.first_record_ms == _ASK]
    empty = {log.topic_partition: now_ms for log in unknown if not log.high_watermark}
    asked = {log.topic_partition: 0 for log in unknown if log.role == DATA and log.high_watermark}
    timestamps_at: dict[TopicPartition, int] = {}
    if asked:
        with suppress(CannotRun):  # retention may have taken the record in the meantime
            timestamps_at = {partition: ms for partition, ms in cluster.timestamps_at(asked).items() if ms <= now_ms}
    known = empty | timestamps_at
    return [
        replace(log, first_record_ms=known.get(log.topic_partition, 0)) if log.first_record_ms == _ASK else log
        for log in logs
    ]


def _promised(settings: Settings, before: Plan | None, log: Log) -> Log:
    """A data log with its guarantees by offset, as the rules of this run and of those before it say.

    Nobody knows at which offset the service began to follow a changed rule: what lies between two runs counts as
    `idempotent`, of which less is demanded.
    """
    if log.role != DATA:
        return log
    last = (
        next(
            (one for one in before.logs if one.topic_partition == log.topic_partition and one.topic_id == log.topic_id),
            None,
        )
        if before
        else None
    )
    known = last.guarantees if last else ()
    now = settings.rules.guarantee(log.topic)
    if known and known[-1].guarantee == now.value:
        return replace(log, guarantees=known)
    first = log.high_watermark if now is Guarantee.EXACTLY_ONCE else log.start
    return replace(log, guarantees=(*known, Promise(first if known else 0, now.value)))


def _capped(logs: list[Log], most: int | None) -> list[Log]:
    """Ends drawn in so that all spans together have about `most` offsets, each in proportion to what it has."""
    total = sum(log.end - log.start for log in logs)
    if most is None or total <= most:
        return logs
    return [replace(log, end=log.start + -(-(log.end - log.start) * most // total)) for log in logs]


def _decided(cluster: Cluster, logs: list[Log], now_ms: int) -> list[Log]:
    """Where a log goes on beyond its end, the first record there tells up to when all is decided and read."""
    held = {log.topic_partition: log.end for log in logs if log.end < log.high_watermark}
    timestamps_at = cluster.timestamps_at(held) if held else {}
    stopped = [log.topic_partition for log in logs if log.end == log.last_stable < log.high_watermark]
    blocking_transactions = cluster.blocking_transactions(stopped) if stopped else {}
    return [
        replace(
            log,
            decided_until_ms=timestamps_at.get(log.topic_partition, 0) if log.topic_partition in held else now_ms,
            blocking_transaction=blocking_transactions.get(log.topic_partition),
        )
        for log in logs
    ]
