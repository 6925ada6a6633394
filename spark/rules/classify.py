"""Classify ids: the category of each in the balance, and its claims that are lost, pending or unprovable."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from service.contract import Guarantee
from spark import rule_table
from spark.reading import wire_expressions
from spark.reading.decode import EVENT, REJECT, hash_of
from spark.reading.run_plan import DATA, LEDGER, REQUESTS, Log, Plan, by_partition
from spark.rule_table import DELIVERED_ONCE, LOST, PENDING, PRESENT
from spark.settings import OFFSETS_MOST, Settings, glob_regex
from spark.tables import deliveries

STUCK: Final = "stuck"

PHANTOM: Final = "phantom"
UNPROVEN: Final = "evidence_gap"
"""Verdicts about an id with Fencepost's header that was not accepted; PENDING until one of these is decided."""

CATEGORIES: Final = (DELIVERED_ONCE, "duplicated", "conflicted", LOST, PENDING, STUCK, "unprovable")
"""Categories of accepted ids in the balance."""

_BOUND: Final = (
    "struct<first: bigint, end: bigint, later_end: bigint, recreated_at_ms: bigint, compacted: boolean, "
    "topic_id: string, first_record_ms: bigint, "
    "gaps: array<struct<first: bigint, end: bigint, cause: string>>>"
)
_SLOT: Final = "struct<complete_since_ms: bigint, caught_up_run: bigint>"


@dataclass(frozen=True)
class LogEvidence:
    """What a run knows besides the rows, as Spark constants: how far each log was read, and the timeouts.

    `timeouts_ms` is `max_settle_ms` without the grace, `claim_topics` are ledger and journal. `key_ttl_ms` is the
    longest key retention of a topic, `usual_ttl_ms` that of the service; `quarantine` are the topics for what is
    refused.
    """

    frozen_ms: int
    max_settle_ms: int
    grace_ms: int
    key_ttl_ms: Callable[[Column], Column]
    usual_ttl_ms: int
    longest_ttl_ms: int
    timeouts_ms: int
    bounds: Column
    slots: Column
    ledger_decided_until_ms: int
    answers_complete_since_ms: int
    answers_decided_until_ms: int
    audited: Callable[[Column], Column]
    idempotent: Column
    expects_derived_copies: Callable[[Column], Column]
    without_client_duplicates: Callable[[Column], Column]
    callers: tuple[str, ...]
    claim_topics: tuple[str, ...]
    quarantine: tuple[str, ...]

    def ttl_of_entry_ms(self, topic: Column, key_ttl_s: Column) -> Column:
        """Return the retention of a key by its ledger entry (`key_ttl_s` of deliveries.ROW), ms.

        Where that is not known, it is the longest of the topic.
        """
        by_entry = F.when(key_ttl_s > 0, 1000 * key_ttl_s).when(key_ttl_s == 0, F.lit(self.usual_ttl_ms))
        return F.coalesce(by_entry, self.key_ttl_ms(topic))

    def settled_at_ms(self, accepted_ms: Column, seen_ms: Column) -> Column:
        """Return `rule_table.settled_at_ms` with the timeouts of this run."""
        return rule_table.settled_at_ms(accepted_ms, seen_ms, self.max_settle_ms, self.grace_ms)

    def blocked_settled_at_ms(self, accepted_ms: Column, seen_ms: Column) -> Column:
        """Return `rule_table.blocked_settled_at_ms` with the timeouts of this run."""
        return rule_table.blocked_settled_at_ms(accepted_ms, seen_ms, self.max_settle_ms)


def gather_evidence(plan: Plan, settings: Settings) -> LogEvidence:
    """Build the constants of a plan; their size grows with the number of partitions, and each task carries them."""
    bounds = by_partition({log.topic_partition: _bounds_of(log) for log in plan.of(DATA)})
    ledger, answers = plan.of(LEDGER), plan.of(REQUESTS)
    of_slots = {log.topic_partition: _slot_of(log) for log in ledger}
    slots = by_partition(of_slots).get(ledger[0].topic, []) if ledger else []
    globs, without, unwanted = settings.options.topics, settings.options.without_topics, plan.unwanted
    pattern, left_out = glob_regex(globs), glob_regex(without)
    rules = settings.rules
    quarantine = tuple(sorted(rules.quarantine_topics))

    def audited(topic: Column) -> Column:
        excluded = topic.rlike(left_out) if without else F.lit(False)
        if globs:
            return topic.rlike(pattern) & ~excluded
        return ~topic.isin(unwanted) & ~excluded if unwanted else ~excluded

    return LogEvidence(
        frozen_ms=plan.frozen_ms,
        max_settle_ms=settings.max_settle_ms,
        grace_ms=settings.grace_ms,
        key_ttl_ms=_key_ttl_ms(plan, settings),
        usual_ttl_ms=settings.key_ttl_ms,
        longest_ttl_ms=settings.longest_ttl_ms,
        timeouts_ms=settings.max_settle_ms - settings.grace_ms,
        bounds=F.from_json(F.lit(json.dumps(bounds)), f"map<string, array<{_BOUND}>>"),
        slots=F.from_json(F.lit(json.dumps(slots)), f"array<{_SLOT}>"),
        ledger_decided_until_ms=min((log.decided_until_ms for log in ledger), default=plan.frozen_ms),
        answers_complete_since_ms=max((log.complete_since_ms for log in answers), default=plan.frozen_ms),
        answers_decided_until_ms=min((log.decided_until_ms for log in answers), default=plan.frozen_ms),
        audited=audited,
        idempotent=_idempotent(plan),
        expects_derived_copies=_has_property(plan, lambda name: rules.rule(name).derived or name in quarantine),
        without_client_duplicates=_has_property(
            plan, lambda name: not rules.rule(name).client_duplicates or name in quarantine
        ),
        callers=rules.scopes,
        claim_topics=tuple({log.topic: None for log in (*ledger, *answers)}),
        quarantine=quarantine,
    )


def _bounds_of(log: Log) -> dict[str, Any]:
    """Return what the rules need of a data log (_BOUND)."""
    return {
        "first": log.first,
        "end": log.end,
        "later_end": log.later_end,
        "recreated_at_ms": log.recreated_at_ms,
        "compacted": log.compacted,
        "topic_id": log.topic_id,
        "first_record_ms": log.first_record_ms,
        "gaps": [{"first": gap.first, "end": gap.last, "cause": gap.cause} for gap in log.gaps_of_topic],
    }


def _slot_of(log: Log) -> dict[str, int]:
    """Return what the rules need of a slot's ledger (_SLOT)."""
    return {"complete_since_ms": log.complete_since_ms, "caught_up_run": log.caught_up_run}


def _idempotent_spans(log: Log) -> list[dict[str, int]]:
    """Return the offsets of a log with the guarantee `idempotent`."""
    ends = [*(guarantee.first for guarantee in log.guarantees[1:]), OFFSETS_MOST]
    return [
        {"first": guarantee.first, "end": end}
        for guarantee, end in zip(log.guarantees, ends, strict=bool(log.guarantees))
        if guarantee.guarantee == Guarantee.IDEMPOTENT.value
    ]


def _idempotent(plan: Plan) -> Column:
    """Return the offsets with the guarantee `idempotent`, by topic and partition.

    Deleted topics are included, since what was written to them is still classified.
    """
    spans = {log.topic_partition: _idempotent_spans(log) for log in plan.logs if log.role == DATA}
    with_spans = {topic: partitions for topic, partitions in by_partition(spans).items() if any(partitions)}
    return F.from_json(F.lit(json.dumps(with_spans)), "map<string, array<array<struct<first: bigint, end: bigint>>>>")


def _key_ttl_ms(plan: Plan, settings: Settings) -> Callable[[Column], Column]:
    """Return the longest key retention of a topic of the plan by the rules, ms.

    Keys of one topic may have several: those of a source have its own.
    """
    usual_s = settings.shared.key_ttl_s
    names_by_ttl: dict[int, list[str]] = {}
    for name in sorted({log.topic for log in plan.logs}):
        if (ttl_s := settings.rules.longest_ttl_of(name, usual_s)) != usual_s:
            names_by_ttl.setdefault(ttl_s, []).append(name)

    def key_ttl_ms(topic: Column) -> Column:
        found = F.lit(settings.key_ttl_ms)
        for ttl_s, names in names_by_ttl.items():
            found = F.when(topic.isin(names), F.lit(1000 * ttl_s)).otherwise(found)
        return found

    return key_ttl_ms


def _has_property(plan: Plan, holds: Callable[[str], bool]) -> Callable[[Column], Column]:
    """Return a condition on a topic of the plan: the rules give the topic's name a property (`holds`)."""
    names = [name for name in sorted({log.topic for log in plan.logs}) if holds(name)]
    return lambda topic: topic.isin(names) if names else F.lit(False)


def classify(rows: DataFrame, evidence: LogEvidence) -> DataFrame:
    """Classify rows (deliveries.GATHERED) of audited topics. Adds the columns

    `copies_count bigint` (the id's records without derived copies),
    `accepted boolean`, `category string` (of CATEGORIES; null if not accepted),
    `missing array<struct<outcome, topic, partition, offset, source, proven_lost>>` (claims without a present record),
    `phantom string` (`phantom`, `evidence_gap`, `pending` or null),
    `open boolean` (the verdict may change by time alone),
    `suspicious boolean` (there is a finding or a pending verdict: few rows in a healthy system).
    """
    classified = (
        rows.where(_names_audited_topic(evidence))
        .withColumn("missing", F.when(F.col("is_clean") == 0, _missing(evidence)))
        .withColumn("phantom", _phantom(evidence))
        .withColumn("copies_count", F.col("count") - F.col("derived_copies_count"))
        .withColumn("conflicting", (F.col("copies_count") > 1) & (F.size("fingerprints") > 1) & _fingerprints_differ())
        .withColumn("accepted", _accepted())
    )
    with_category = classified.withColumn("category", F.when(F.col("accepted"), _category(evidence)))
    has_pending_claim = F.coalesce(F.exists("missing", lambda claim: claim["outcome"] == PENDING), F.lit(False))
    may_change = (
        F.coalesce(F.col("category") == PENDING, F.lit(False))
        | F.coalesce(F.col("phantom") == PENDING, F.lit(False))
        | has_pending_claim
    )
    return with_category.withColumns({"open": may_change, "suspicious": _is_suspicious()})


def _is_suspicious() -> Column:
    """Check whether a classified row has a finding or a pending verdict."""
    return (
        (F.col("count") > 1)
        | F.coalesce(F.size("missing") > 0, F.lit(False))
        | F.col("phantom").isNotNull()
        | F.coalesce(F.col("category") == STUCK, F.lit(False))
    )


def classify_clean(rows: DataFrame, evidence: LogEvidence) -> DataFrame:
    """Classify clean rows, and rows of records without id: deliveries.ROW → the columns that findings.sums counts.

    For a clean row the result is that of `classify`, unless the id has another row.
    """
    clean_category = rule_table.clean_category(F.col("entries_count"), F.col("answered_201"))
    category = F.when(F.col("kind") == EVENT, clean_category)
    return rows.where(evidence.audited(F.col("topic")) | (F.col("kind") == REJECT)).select(
        *("accepted_hour", "kind", "topic", *deliveries.COUNTS),
        F.col("count").alias("copies_count"),
        F.coalesce(F.col("has_fencepost_header").cast("bigint"), F.lit(0)).alias("with_header"),
        category.isNotNull().alias("accepted"),
        category.alias("category"),
        F.lit(None).cast("string").alias("phantom"),
        F.lit(False).alias("open"),
        F.lit(False).alias("suspicious"),
    )


def _names_audited_topic(evidence: LogEvidence) -> Column:
    """Check whether any topic of a row is audited: the first one, or one in its lists."""
    return evidence.audited(F.col("topic")) | F.exists(
        F.concat(*(F.col(name)["topic"] for name in ("coordinates", "entries", "answered"))), evidence.audited
    )


def _missing(evidence: LogEvidence) -> Column:
    """Return the distinct claims of ledger entries and 201s, without those whose record is present.

    A 201 that nothing locates is a claim without partition and offset.
    """

    def claims(listed: Column | str, source: str) -> Column:
        # The bounds of all logs are a constant, which is in the plan once for each look-up.
        with_bound = F.transform(
            listed,
            lambda claim: F.struct(
                claim.alias("claim"),
                wire_expressions.at_partition(evidence.bounds, claim["topic"], claim["partition"]).alias("bound"),
            ),
        )
        return F.transform(
            with_bound,
            lambda pair: F.struct(
                _outcome(pair["claim"], pair["bound"], evidence).alias("outcome"),
                *(pair["claim"][name].alias(name) for name in ("topic", "partition", "offset")),
                F.lit(source).alias("source"),
                pair["claim"]["proven_lost"].alias("proven_lost"),
            ),
        )

    unentered = F.filter("answered", lambda answer: ~_is_also_entered(answer))
    claimed = rule_table.all_claims(claims("entries", "ledger"), claims(unentered, "answer"))
    missing = F.filter(F.array_distinct(claimed), lambda claim: claim["outcome"] != PRESENT)
    without_coordinates = rule_table.is_without_coordinates(
        F.col("answered_201"), F.col("entries_count"), F.size("answered") > 0, F.col("with_header")
    )
    unlocated = F.struct(
        rule_table.outcome_without_coordinates(_is_undecided(evidence)).alias("outcome"),
        F.col("topic").alias("topic"),
        F.lit(None).cast("int").alias("partition"),
        F.lit(None).cast("bigint").alias("offset"),
        F.lit("answer").alias("source"),
        F.lit(False).alias("proven_lost"),
    )
    return F.when(without_coordinates, F.array(unlocated)).otherwise(missing)


def _is_also_entered(answer: Column) -> Column:
    """Check whether the ledger names the offset of a 201 too: both are one claim."""
    return F.exists("entries", lambda entry: deliveries.same_coordinates(answer, entry))


def _outcome(claim: Column, bound: Column, evidence: LogEvidence) -> Column:
    """Return the outcome of a claim: PRESENT, LOST, PENDING, or the cause of a gap (`topic_gone`, `below_start`,
    `retention`, `truncated`, `recreated`, `compacted`). `bound` (_BOUND) is of the claim's log, null without one."""
    offset = claim["offset"]
    settled_at_ms = evidence.settled_at_ms(claim["accepted_ms"], claim["seen_ms"])
    settled = rule_table.is_settled(settled_at_ms, evidence.frozen_ms)
    beyond = rule_table.is_beyond(offset, bound["end"])
    past_end = rule_table.is_past_end(offset, bound["later_end"])
    has_copy = F.exists("coordinates", lambda copy: deliveries.same_coordinates(copy, claim))
    # Copies beyond the cap have no coordinates, and the claimed record may be one of them.
    capped = F.col("count") > F.size("coordinates")
    gaps = F.filter(bound["gaps"], lambda gap: rule_table.is_within(offset, gap["first"], gap["end"]))
    return rule_table.outcome(
        present=has_copy | capped | ~evidence.audited(claim["topic"]),
        proven_lost=claim["proven_lost"],
        no_log=F.when(bound.isNull(), rule_table.outcome_without_log(settled)),
        recreated=rule_table.is_of_earlier_topic(
            claim["topic_id_hash"],
            hash_of(bound["topic_id"]),
            claim["seen_ms"],
            bound["recreated_at_ms"],
            bound["first_record_ms"],
            settled,
        ),
        below=rule_table.is_below(offset, bound["first"]),
        gap=F.get(gaps, F.lit(0))["cause"],
        not_yet_read=rule_table.is_not_yet_read(beyond, claim["was_past_end"], past_end),
        settled=settled,
        compacted=rule_table.is_compacted(bound["compacted"], claim["was_past_end"] | past_end),
    )


def _phantom(evidence: LogEvidence) -> Column:
    """Classify an id by its first copy with Fencepost's header, if no claim covers that copy; else null.

    `pending` until ledger (or journal, for `idempotent` topics) is read past the time at which the copy was settled;
    `evidence_gap` if ledger or journal is not complete back to the copy's acceptance, or missing; else `phantom`.
    """
    with_header = F.filter("coordinates", lambda copy: copy["has_fencepost_header"] & ~copy["is_derived_copy"])
    first_copy = F.get(with_header, F.lit(0))
    slot = F.get(evidence.slots, first_copy["slot"])
    spans = wire_expressions.at_partition(evidence.idempotent, first_copy["topic"], first_copy["partition"])
    inside = F.exists(spans, lambda span: rule_table.is_within(first_copy["offset"], span["first"], span["end"]))
    idempotent = F.coalesce(inside, F.lit(False))
    has_201 = F.exists(
        "answered", lambda answer: F.exists(with_header, lambda copy: deliveries.same_coordinates(copy, answer))
    )
    unclaimed = rule_table.is_unclaimed(
        F.col("entries_count"), has_201, idempotent, _sum(*rule_table.ANSWER_COUNTS) > 0
    )
    complete_since_ms = F.when(idempotent, evidence.answers_complete_since_ms).otherwise(slot["complete_since_ms"])
    # An answer may be journaled long after its copy was written; a ledger entry is committed with its copy.
    decided_until_ms = F.when(idempotent, evidence.answers_decided_until_ms).otherwise(evidence.frozen_ms)
    # An implausible timestamp is replaced by the time of the last evidence: that of the run that read the copy.
    implausible = rule_table.is_ahead(first_copy["timestamp"], evidence.frozen_ms)
    times = first_copy["accepted_at"], F.when(implausible, F.col("last_ms")).otherwise(first_copy["timestamp"])
    settled_at_ms = F.when(idempotent, evidence.blocked_settled_at_ms(*times)).otherwise(evidence.settled_at_ms(*times))
    ledger_behind = ~idempotent & F.coalesce(
        rule_table.is_ledger_behind(F.col("run"), slot["caught_up_run"]), F.lit(False)
    )
    return F.when(
        (F.col("with_header") > 0) & unclaimed,
        F.when(ledger_behind | rule_table.is_undecided(settled_at_ms, decided_until_ms), PENDING)
        .when(
            rule_table.is_before_evidence(complete_since_ms, first_copy["accepted_at"]),
            UNPROVEN,
        )
        .otherwise(PHANTOM),
    )


def _fingerprints_differ() -> Column:
    """Check whether the copies have more than one fingerprint.

    A copy without Fencepost's header has several fingerprints: that of a request without a partition (`fingerprint`),
    and its `possible_fingerprints`. If a copy with the header has any of these, both copies are the same request.
    """
    of_headers = F.transform(
        F.filter("fingerprints", lambda copy: copy["possible_fingerprints"].isNull()),
        lambda copy: copy["fingerprint"],
    )

    def request_fingerprint(copy: Column) -> Column:
        same = F.filter(
            deliveries.each_fingerprint(copy["possible_fingerprints"]),
            lambda other: rule_table.is_same_request(of_headers, other),
        )
        return F.coalesce(F.get(same, F.lit(0)), copy["fingerprint"])

    requests = F.transform("fingerprints", request_fingerprint)
    return F.size(F.array_distinct(requests)) > 1


def _accepted() -> Column:
    """Return `rule_table.is_accepted` of a row."""
    return rule_table.is_accepted(
        entries_and_201s=_sum("entries_count", "answered_201"),
        answered_202=F.col("answered_202"),
        answered_504=F.col("answered_504"),
        freed=rule_table.is_freed(F.col("freed_ms"), F.col("in_doubt_ms")),
        settled_elsewhere=F.col("settled_elsewhere"),
        with_header=F.col("with_header"),
    )


def _category(evidence: LogEvidence) -> Column:
    """Return the category of an accepted id. The balance counts an id in one category, whatever findings it has."""

    def has_outcome(*outcomes: str) -> Column:
        return F.coalesce(F.exists("missing", lambda claim: claim["outcome"].isin(*outcomes)), F.lit(False))

    classified = rule_table.category(
        lost=has_outcome(LOST),
        conflicting=F.col("conflicting"),
        copies=F.col("copies_count"),
        pending=has_outcome(PENDING),
        unproven=F.coalesce(F.exists("missing", lambda claim: ~claim["outcome"].isin(LOST, PENDING)), F.lit(False)),
        settling=_sum("with_header", "entries_count", "answered_201"),
        answered_201=F.col("answered_201"),
        undecided=_is_undecided(evidence),
    )
    clean_category = rule_table.clean_category(F.col("entries_count"), F.col("answered_201"))
    return F.when(F.col("is_clean") == 1, clean_category).otherwise(classified)


def _is_undecided(evidence: LogEvidence) -> Column:
    """Check whether ledger or journal may still get a record about an id that no claim with coordinates names."""
    times = F.col("accepted_ms"), F.coalesce(F.col("in_doubt_ms"), F.col("last_ms"))
    decided_until_ms = rule_table.both_decided_until(
        evidence.ledger_decided_until_ms, evidence.answers_decided_until_ms
    )
    may_come_later = rule_table.is_undecided_at_freeze(decided_until_ms, evidence.frozen_ms)
    settled_at_ms = evidence.blocked_settled_at_ms(*times) if may_come_later else evidence.settled_at_ms(*times)
    return rule_table.is_undecided(settled_at_ms, decided_until_ms)


def _sum(*names: str) -> Column:
    """Add up columns."""
    total = F.lit(0)
    for name in names:
        total = total + F.col(name)
    return total
