"""Rows of the state → what is to be said of each id: its place in the balance, and what is missing or unproven."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from service.contract import Guarantee
from spark import rule_table
from spark.reading.decode import EVENT, REJECT, hash_of
from spark.reading.planning import DATA, LEDGER, REQUESTS, Plan
from spark.rule_table import LOST, PENDING, THERE
from spark.settings import OFFSETS_MOST, Settings, glob_regex
from spark.tables import deliveries

CATEGORIES: Final = ("delivered_once", "duplicated", "conflicted", "lost", "pending", "stuck", "unprovable")
"""Where an accepted id can stand in the balance."""

_BOUND: Final = (
    "struct<first: bigint, end: bigint, later_end: bigint, recreated_at_ms: bigint, compacted: boolean, "
    "topic_id: string, first_record_ms: bigint, "
    "gaps: array<struct<first: bigint, last: bigint, cause: string>>>"
)
_SLOT: Final = "struct<complete_since_ms: bigint, caught_up_run: bigint>"


@dataclass(frozen=True)
class Evidence:
    """What a run knows besides the rows, as Spark constants: how far each log was read, and the times to wait."""

    frozen_ms: int
    settle_ms: int
    grace_ms: int
    key_ttl_ms: int
    timeouts_ms: int
    bounds: Column
    slots: Column
    ledger_decided_until_ms: int
    answers_complete_since_ms: int
    answers_decided_until_ms: int
    audited: Callable[[Column], Column]
    idempotent: Column
    derived: Callable[[Column], Column]
    without_client_duplicates: Callable[[Column], Column]
    callers: tuple[str, ...]

    def over_ms(self, accepted_ms: Column, seen_ms: Column) -> Column:
        """`rules.over_ms` with this run's times."""
        return rule_table.over_ms(accepted_ms, seen_ms, self.settle_ms, self.grace_ms)

    def held_over_ms(self, accepted_ms: Column, seen_ms: Column) -> Column:
        """`rules.held_over_ms` with this run's times."""
        return rule_table.held_over_ms(accepted_ms, seen_ms, self.settle_ms)


def gather_evidence(plan: Plan, settings: Settings) -> Evidence:
    """The constants of a plan, small enough to travel with every task: they grow with the number of partitions."""
    bounds: dict[str, list[dict[str, Any] | None]] = {}
    for log in plan.of(DATA):
        bounds.setdefault(log.topic, []).append(
            {
                "first": log.first,
                "end": log.end,
                "later_end": log.later_end,
                "recreated_at_ms": log.recreated_at_ms,
                "compacted": log.compacted,
                "topic_id": log.topic_id,
                "first_record_ms": log.first_record_ms,
                "gaps": [
                    {"first": gap.first, "last": gap.last, "cause": gap.cause}
                    for gap in log.gaps
                    # A gap of the topic's earlier log says nothing of this one.
                    if gap.last > gap.first and gap.seen_ms > log.recreated_at_ms
                ],
            }
        )
    ledger, answers = plan.of(LEDGER), plan.of(REQUESTS)
    slots = [{"complete_since_ms": log.complete_since_ms, "caught_up_run": log.caught_up_run} for log in ledger]
    globs, unwanted = settings.options.topics, plan.unwanted
    wanted = f"^(?:{glob_regex(globs)})$"

    def audited(topic: Column) -> Column:
        if globs:
            return topic.rlike(wanted)
        return ~topic.isin(unwanted) if unwanted else F.lit(True)

    return Evidence(
        frozen_ms=plan.frozen_ms,
        settle_ms=settings.settle_ms,
        grace_ms=settings.grace_ms,
        key_ttl_ms=settings.key_ttl_ms,
        timeouts_ms=settings.settle_ms - settings.grace_ms,
        bounds=F.from_json(F.lit(json.dumps(bounds)), f"map<string, array<{_BOUND}>>"),
        slots=F.from_json(F.lit(json.dumps(slots)), f"array<{_SLOT}>"),
        ledger_decided_until_ms=min((log.decided_until_ms for log in ledger), default=plan.frozen_ms),
        answers_complete_since_ms=max((log.complete_since_ms for log in answers), default=plan.frozen_ms),
        answers_decided_until_ms=min((log.decided_until_ms for log in answers), default=plan.frozen_ms),
        audited=audited,
        idempotent=_idempotent(plan),
        derived=_ruled(plan, lambda name: settings.rules.rule(name).derived),
        without_client_duplicates=_ruled(plan, lambda name: not settings.rules.rule(name).client_duplicates),
        callers=("", *(caller.name for caller in settings.rules.callers)),
    )


def _idempotent(plan: Plan) -> Column:
    """Which offsets of each topic's partitions have that guarantee, also of those that are gone: what was written to
    them is still classified."""
    topics: dict[str, list[list[dict[str, int]]]] = {}
    for log in sorted((log for log in plan.logs if log.role == DATA), key=lambda log: log.topic_partition):
        starts = [*(one.first for one in log.guarantees), OFFSETS_MOST]
        spans = [
            {"first": one.first, "end": end}
            for one, end in zip(log.guarantees, starts[1:], strict=True)
            if one.guarantee == Guarantee.IDEMPOTENT.value
        ]
        partitions = topics.setdefault(log.topic, [])
        partitions += [[] for _ in range(log.partition - len(partitions))] + [spans]
    some = {topic: partitions for topic, partitions in topics.items() if any(partitions)}
    return F.from_json(F.lit(json.dumps(some)), "map<string, array<array<struct<first: bigint, end: bigint>>>>")


def _ruled(plan: Plan, rule: Callable[[str], bool]) -> Callable[[Column], Column]:
    """Whether a topic of the plan is one of which the rules say so."""
    names = [name for name in sorted({log.topic for log in plan.logs}) if rule(name)]
    return lambda topic: topic.isin(names) if names else F.lit(False)


def classify(rows: DataFrame, evidence: Evidence) -> DataFrame:
    """deliveries.GATHERED → the same rows of audited topics, with

    `copies_count bigint` (of the id's records those that are no derived copies),
    `accepted boolean`, `category string` (of CATEGORIES; null where not accepted),
    `missing array<struct<fate, topic, partition, offset, source>>` (claimed places that are not simply there),
    `phantom string` (`phantom`, `evidence_gap`, `pending` or null),
    `open boolean` (time alone may change the verdict).
    """
    classified = (
        rows.where(_concerned(evidence))
        .withColumn("missing", F.when(F.col("is_clean") == 0, _missing(evidence)))
        .withColumn("phantom", _phantom(evidence))
        .withColumn("copies_count", F.col("count") - F.col("derived"))
        .withColumn("conflicting", (F.col("copies_count") > 1) & (F.size("fingerprints") > 1) & _differ())
        .withColumn("accepted", _accepted())
    )
    fate = classified.withColumn("category", F.when(F.col("accepted"), _category(evidence)))
    waits = F.coalesce(F.exists("missing", lambda claim: claim["fate"] == PENDING), F.lit(False))
    return fate.withColumn(
        "open",
        F.coalesce(F.col("category") == PENDING, F.lit(False))
        | F.coalesce(F.col("phantom") == PENDING, F.lit(False))
        | waits,
    )


def classify_clean(rows: DataFrame, evidence: Evidence) -> DataFrame:
    """deliveries.ROW of clean rows, and of records without id → the columns that findings.sums counts.

    For a clean row these are what `classify` gives, unless the id has another row.
    """
    claimed = (F.col("kind") == EVENT) & ((F.col("entries_count") > 0) | (F.col("answered_201") > 0))
    return rows.where(evidence.audited(F.col("topic")) | (F.col("kind") == REJECT)).select(
        *("accepted_hour", "kind", "topic", *deliveries.SUMS),
        F.col("count").alias("copies_count"),
        F.coalesce(F.col("has_fencepost_header").cast("bigint"), F.lit(0)).alias("with_header"),
        claimed.alias("accepted"),
        F.when(claimed, "delivered_once").alias("category"),
        F.lit(None).cast("string").alias("phantom"),
        F.lit(False).alias("open"),
    )


def _concerned(evidence: Evidence) -> Column:
    """Whether a row names a topic that is audited: its first one, or any."""
    return evidence.audited(F.col("topic")) | F.exists(
        F.concat(*(F.col(name)["topic"] for name in ("coordinates", "entries", "answered"))), evidence.audited
    )


def _missing(evidence: Evidence) -> Column:
    """The places that entries and 201s claim, each once, without those that hold a copy of the id."""

    def claims(places: Column | str, source: str) -> Column:
        return F.transform(
            places,
            lambda claim: F.struct(
                _fate(claim, evidence).alias("fate"),
                *(claim[name].alias(name) for name in ("topic", "partition", "offset")),
                F.lit(source).alias("source"),
            ),
        )

    def is_said_twice(answer: Column) -> Column:
        return rule_table.is_said_twice(F.exists("entries", lambda entry: deliveries.same_coordinates(answer, entry)))

    unentered = F.filter("answered", lambda answer: ~is_said_twice(answer))
    every = rule_table.promises(claims("entries", "ledger"), claims(unentered, "answer"))
    return F.filter(F.array_distinct(every), lambda claim: claim["fate"] != THERE)


def _fate(claim: Column, evidence: Evidence) -> Column:
    """THERE, LOST, PENDING, or why it cannot be proven: `topic_gone`, `below_start`, `retention`, `truncated`,
    `recreated`, `compacted`."""
    bound = F.get(F.try_element_at(evidence.bounds, claim["topic"]), claim["partition"])
    offset = claim["offset"]
    over_ms = evidence.over_ms(claim["accepted_ms"], claim["seen_ms"])
    ripe = rule_table.is_ripe(over_ms, evidence.frozen_ms)
    beyond = rule_table.is_beyond(offset, bound["end"])
    held = F.exists("coordinates", lambda copy: deliveries.same_coordinates(copy, claim))
    # Copies beyond the cap have left no coordinates: the place may be among them.
    capped = F.col("count") > F.size("coordinates")
    gaps = F.filter(bound["gaps"], lambda gap: rule_table.is_in_gap(offset, gap["first"], gap["last"]))
    return rule_table.fate(
        there=held | capped | ~evidence.audited(claim["topic"]),
        no_log=F.when(bound.isNull(), rule_table.of_no_log(ripe)),
        anew=rule_table.is_of_another_life(
            claim["topic_id_hash"],
            hash_of(bound["topic_id"]),
            claim["seen_ms"],
            bound["recreated_at_ms"],
            bound["first_record_ms"],
            ripe,
        ),
        below=rule_table.is_below(offset, bound["first"]),
        gap=F.get(gaps, F.lit(0))["cause"],
        waiting=rule_table.is_waiting(
            beyond, claim["was_past_end"], rule_table.is_past_end(offset, bound["later_end"])
        ),
        ripe=ripe,
        taken=rule_table.is_compacted(bound["compacted"], claim["was_past_end"]),
    )


def _phantom(evidence: Evidence) -> Column:
    """`phantom` where nothing tells of a copy with our header; `pending` until what would tell is read to a record that
    is younger than the copy may be; `evidence_gap` where that is not known as far back, or not at all."""
    ours = F.filter("coordinates", lambda copy: copy["has_fencepost_header"] & ~copy["derived"])
    first = F.get(ours, F.lit(0))
    slot = F.get(evidence.slots, first["slot"])
    spans = F.get(F.try_element_at(evidence.idempotent, first["topic"]), first["partition"])
    inside = F.exists(spans, lambda span: rule_table.is_within(first["offset"], span["first"], span["end"]))
    idempotent = F.coalesce(inside, F.lit(False))
    named = F.exists("answered", lambda answer: F.exists(ours, lambda copy: deliveries.same_coordinates(copy, answer)))
    unheard = rule_table.is_unheard(F.col("entries_count"), named, idempotent, _sum(*rule_table.HEARD) > 0)
    complete_since_ms = F.when(idempotent, evidence.answers_complete_since_ms).otherwise(slot["complete_since_ms"])
    # The journal may come long after a copy; a ledger entry comes with it.
    decided_until_ms = F.when(idempotent, evidence.answers_decided_until_ms).otherwise(evidence.frozen_ms)
    # A timestamp that cannot be meant says nothing: then it is the last evidence, that of the run that read it.
    unmeant = rule_table.is_ahead(first["timestamp"], evidence.frozen_ms)
    times = first["accepted_at"], F.when(unmeant, F.col("last_ms")).otherwise(first["timestamp"])
    over_ms = F.when(idempotent, evidence.held_over_ms(*times)).otherwise(evidence.over_ms(*times))
    unread = ~idempotent & F.coalesce(rule_table.is_unread(F.col("run"), slot["caught_up_run"]), F.lit(False))
    return F.when(
        (F.col("with_header") > 0) & unheard,
        F.when(unread | rule_table.is_undecided(over_ms, decided_until_ms), PENDING)
        .when(
            rule_table.is_before_evidence(complete_since_ms, first["accepted_at"], first["timestamp"]), "evidence_gap"
        )
        .otherwise("phantom"),
    )


def _differ() -> Column:
    """Whether the copies have more than one fingerprint.

    A copy without our header has several: as if it had been asked for without a partition (`fingerprint`), and those in
    `alternative_fingerprints`. Where one of them is that of a copy with our header, it is the same request.
    """
    known = F.transform(
        F.filter("fingerprints", lambda one: one["alternative_fingerprints"].isNull()), lambda one: one["fingerprint"]
    )

    def meant_by(one: Column) -> Column:
        same = F.filter(
            deliveries.each_fingerprint(one["alternative_fingerprints"]),
            lambda other: rule_table.is_same_request(known, other),
        )
        return F.coalesce(F.get(same, F.lit(0)), one["fingerprint"])

    meant = F.transform("fingerprints", meant_by)
    return F.size(F.array_distinct(meant)) > 1


def _accepted() -> Column:
    return rule_table.is_accepted(
        promised=_sum("entries_count", "answered_201"),
        answered_202=F.col("answered_202"),
        answered_504=F.col("answered_504"),
        taken_back=rule_table.takes_back(F.col("freed_ms"), F.col("in_doubt_ms")),
        elsewhere=F.col("elsewhere"),
        ours=F.col("with_header"),
    )


def _category(evidence: Evidence) -> Column:
    """Where an accepted id stands: the first place that fits, as the balance has one for each, whatever is found of
    it."""

    def some(*fates: str) -> Column:
        return F.coalesce(F.exists("missing", lambda claim: claim["fate"].isin(*fates)), F.lit(False))

    # Where nobody named a place: what is known is a 202 or a 504, and that it is not in the data.
    times = F.col("accepted_ms"), F.coalesce(F.col("in_doubt_ms"), F.col("last_ms"))
    decided_until_ms = rule_table.decided_by(evidence.ledger_decided_until_ms, evidence.answers_decided_until_ms)
    longer = rule_table.waits_longer(decided_until_ms, evidence.frozen_ms)
    over_ms = evidence.held_over_ms(*times) if longer else evidence.over_ms(*times)
    classified = rule_table.category(
        lost=some(LOST),
        conflicting=F.col("conflicting"),
        copies=F.col("copies_count"),
        pending=some(PENDING),
        unproven=F.coalesce(F.exists("missing", lambda claim: ~claim["fate"].isin(LOST, PENDING)), F.lit(False)),
        ours=_sum("with_header", "entries_count", "answered_201"),
        answered_201=F.col("answered_201"),
        undecided=rule_table.is_undecided(over_ms, decided_until_ms),
    )
    return F.when(F.col("is_clean") == 1, "delivered_once").otherwise(classified)


def _sum(*names: str) -> Column:
    total = F.lit(0)
    for name in names:
        total = total + F.col(name)
    return total
