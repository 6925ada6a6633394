"""Rows of the state → what is to be said of each id: its place in the balance, and what is missing or unproven."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from service.shared import Guarantee
from spark import state
from spark.decode import EVENT, REJECT
from spark.offsets import DATA, LEDGER, REQUESTS, Plan
from spark.settings import Settings, glob_regex

CATEGORIES: Final = ("delivered_once", "duplicated", "conflicted", "lost", "pending", "stuck", "unprovable")
"""Where an accepted id can stand in the balance."""

_BOUND: Final = (
    "struct<first: bigint, end: bigint, settled: boolean, proven_ms: bigint, since_ms: bigint, compacted: boolean, "
    "gaps: array<struct<first: bigint, last: bigint, cause: string>>>"
)
_SLOT: Final = "struct<complete_ms: bigint, decided_ms: bigint>"

THERE: Final = "there"
LOST: Final = "lost"
PENDING: Final = "pending"
"""What becomes of a claimed place; any other word is why it cannot be proven."""


@dataclass(frozen=True)
class Evidence:
    """What a run knows besides the rows, as Spark constants: how far each log was read, and the times to wait."""

    frozen_ms: int
    settle_ms: int
    grace_ms: int
    key_ttl_ms: int
    bounds: Column
    slots: Column
    ledger_decided_ms: int
    answers_complete_ms: int
    answers_decided_ms: int
    audited: Callable[[Column], Column]
    idempotent: tuple[str, ...]

    def over_ms(self, accepted_ms: Column, seen_ms: Column) -> Column:
        """When the fate of what was accepted then, and told of last at `seen_ms`, is final and visible.

        A retry carries the `accepted_at` of its first claim, however long ago that was: so what tells of it gets the
        grace as well.
        """
        return F.greatest(accepted_ms + self.settle_ms, seen_ms + self.grace_ms)

    def held_over_ms(self, accepted_ms: Column, seen_ms: Column) -> Column:
        """The same by a log that is decided only up to some time: what is missing may follow within the timeouts."""
        return F.greatest(accepted_ms, seen_ms) + self.settle_ms


def evidence(plan: Plan, settings: Settings) -> Evidence:
    """The constants of a plan, small enough to travel with every task: they grow with the number of partitions."""
    bounds: dict[str, list[dict[str, Any] | None]] = {}
    for log in plan.of(DATA):
        bounds.setdefault(log.topic, []).append(
            {
                "first": log.first,
                "end": log.end,
                "settled": log.settled,
                "proven_ms": log.proven_ms,
                "since_ms": log.since_ms,
                "compacted": log.compacted,
                "gaps": [
                    {"first": gap.first, "last": gap.last, "cause": gap.cause}
                    for gap in log.gaps
                    # What an earlier life of the topic lost says nothing of this one.
                    if gap.last > gap.first and gap.seen_ms > log.since_ms
                ],
            }
        )
    ledger, answers = plan.of(LEDGER), plan.of(REQUESTS)
    slots = [{"complete_ms": log.complete_ms, "decided_ms": log.decided_ms} for log in ledger]
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
        bounds=F.from_json(F.lit(json.dumps(bounds)), f"map<string, array<{_BOUND}>>"),
        slots=F.from_json(F.lit(json.dumps(slots)), f"array<{_SLOT}>"),
        ledger_decided_ms=min((log.decided_ms for log in ledger), default=plan.frozen_ms),
        answers_complete_ms=max((log.complete_ms for log in answers), default=plan.frozen_ms),
        answers_decided_ms=min((log.decided_ms for log in answers), default=plan.frozen_ms),
        audited=audited,
        idempotent=idempotent(plan, settings),
    )


def idempotent(plan: Plan, settings: Settings) -> tuple[str, ...]:
    """The audited topics with that guarantee, also those that are gone: what was written to them is still judged."""
    names = sorted({log.topic for log in plan.logs if log.role == DATA})
    return tuple(name for name in names if settings.rules.guarantee(name) is Guarantee.IDEMPOTENT)


def judge(rows: DataFrame, seen: Evidence) -> DataFrame:
    """state.GATHERED → the same rows of audited topics, with

    `accepted boolean`, `category string` (of CATEGORIES; null where not accepted),
    `missing array<struct<fate, topic, partition, offset, source>>` (claimed places that are not simply there),
    `phantom string` (`phantom`, `evidence_gap`, `pending` or null),
    `open boolean` (time alone may change the verdict).
    """
    judged = (
        rows.where(_concerned(seen))
        .withColumn("missing", F.when(F.col("plain") == 0, _missing(seen)))
        .withColumn("phantom", _phantom(seen))
        .withColumn("conflicting", (F.col("count") > 1) & (F.size("fingerprints") > 1) & _differ())
        .withColumn("accepted", _accepted())
    )
    fate = judged.withColumn("category", F.when(F.col("accepted"), _category(seen)))
    waits = F.coalesce(F.exists("missing", lambda claim: claim["fate"] == PENDING), F.lit(False))
    return fate.withColumn(
        "open",
        F.coalesce(F.col("category") == PENDING, F.lit(False))
        | F.coalesce(F.col("phantom") == PENDING, F.lit(False))
        | waits,
    )


def plainly(rows: DataFrame, seen: Evidence) -> DataFrame:
    """state.ROW of plain rows, and of records without id → what there is to count of them, from their numbers alone.

    Of a plain row it is what `judge` says, unless the id has another row.
    """
    claimed = (F.col("kind") == EVENT) & ((F.col("entries_count") > 0) | (F.col("answered_201") > 0))
    return rows.where(seen.audited(F.col("topic")) | (F.col("kind") == REJECT)).select(
        *("accepted_hour", "kind", "topic", *state.SUMS),
        F.coalesce(F.col("stamped").cast("bigint"), F.lit(0)).alias("stamped"),
        claimed.alias("accepted"),
        F.when(claimed, "delivered_once").alias("category"),
        F.lit(None).cast("string").alias("phantom"),
        F.lit(False).alias("open"),
    )


def _concerned(seen: Evidence) -> Column:
    """Whether a row names a topic that is audited: its first one, or any."""
    return seen.audited(F.col("topic")) | F.exists(
        F.concat(*(F.col(name)["topic"] for name in ("coordinates", "entries", "answered"))), seen.audited
    )


def _missing(seen: Evidence) -> Column:
    """The places that entries and 201s claim, each once, without those that hold a copy of the id."""

    def claims(places: Column | str, source: str) -> Column:
        return F.transform(
            places,
            lambda claim: F.struct(
                _fate(claim, seen).alias("fate"),
                *(claim[name].alias(name) for name in ("topic", "partition", "offset")),
                F.lit(source).alias("source"),
            ),
        )

    unentered = F.filter("answered", lambda answer: ~F.exists("entries", lambda entry: state.same_place(answer, entry)))
    every = F.concat(claims("entries", "ledger"), claims(unentered, "answer"))
    return F.filter(F.array_distinct(every), lambda claim: claim["fate"] != THERE)


def _fate(claim: Column, seen: Evidence) -> Column:
    """THERE, LOST, PENDING, or why it cannot be proven: `topic_gone`, `below_start`, `retention`, `truncated`,
    `recreated`, `compacted`.

    Below the end of what was read every record is decided, so a place there is proof by itself. Beyond it, only a
    log in which nothing is open proves that the place is empty; once it has, what was opened later changes nothing.
    """
    bound = F.get(F.try_element_at(seen.bounds, claim["topic"]), claim["partition"])
    over_ms = seen.over_ms(claim["accepted_ms"], claim["seen_ms"])
    ripe = over_ms < seen.frozen_ms
    beyond = claim["offset"] >= bound["end"]
    unsettled = ~bound["settled"] & (over_ms >= bound["proven_ms"])
    held = F.exists("coordinates", lambda copy: state.same_place(copy, claim))
    # Copies beyond the cap have left no coordinates: the place may be among them.
    capped = F.col("count") > F.size("coordinates")
    gaps = F.filter(bound["gaps"], lambda gap: (claim["offset"] >= gap["first"]) & (claim["offset"] < gap["last"]))
    gap = F.get(gaps, F.lit(0))
    return (
        F.when(held | capped | ~seen.audited(claim["topic"]), THERE)
        .when(bound.isNull(), F.when(ripe, "topic_gone").otherwise(PENDING))
        .when(claim["seen_ms"] < bound["since_ms"], "recreated")
        .when(claim["offset"] < bound["first"], "below_start")
        .when(gap.isNotNull(), gap["cause"])
        .when(beyond & unsettled, PENDING)
        .when(~ripe, PENDING)
        # What compaction may have taken lies below the end.
        .when(bound["compacted"] & ~beyond, "compacted")
        .otherwise(LOST)
    )


def _phantom(seen: Evidence) -> Column:
    """Whether copies with our header are nowhere in the ledger (for idempotent topics: nor in the answers).

    `pending` until the ledger of the writer's slot is read to a record that is younger than the copy may be;
    `evidence_gap` where that ledger is not known as far back as the copy's acceptance, or not at all.
    """
    ours = F.filter("coordinates", lambda copy: copy["stamped"])
    first = F.get(ours, F.lit(0))
    slot = F.get(seen.slots, first["slot"])
    idempotent = F.col("topic").isin(*seen.idempotent) if seen.idempotent else F.lit(False)
    answered = _sum("answered_201", "answered_202", "answered_503", "answered_504", "answered_other") > 0
    unheard = (F.col("entries_count") == 0) & ~(idempotent & answered)
    complete_ms = F.when(idempotent, seen.answers_complete_ms).otherwise(slot["complete_ms"])
    decided_ms = F.when(idempotent, seen.answers_decided_ms).otherwise(
        F.coalesce(slot["decided_ms"], F.lit(seen.frozen_ms))
    )
    # The record is committed, and was read before the ledger: where nothing in that is open, its entry would be there.
    # The journal is written after the answers.
    times = first["accepted_at"], first["timestamp"]
    over_ms = F.when((decided_ms < seen.frozen_ms) | idempotent, seen.held_over_ms(*times)).otherwise(
        seen.over_ms(*times)
    )
    return F.when(
        (F.col("stamped") > 0) & unheard,
        F.when(over_ms > decided_ms, PENDING)
        # The timestamp may be the client's own. A slot without a ledger here: another namespace's, or it is gone.
        .when(complete_ms.isNull() | (complete_ms > first["accepted_at"]), "evidence_gap")
        .otherwise("phantom"),
    )


def _differ() -> Column:
    """Whether the copies have more than one fingerprint.

    A copy without our header has two: as if it had been asked for without a partition (`fp`) and with its own (`alt`).
    Where either is that of a copy with our header, it is the same request.
    """
    known = F.transform(F.filter("fingerprints", lambda one: one["alt"].isNull()), lambda one: one["fp"])
    meant = F.transform(
        "fingerprints",
        lambda one: F.when(one["alt"].isNotNull() & F.array_contains(known, one["alt"]), one["alt"]).otherwise(
            one["fp"]
        ),
    )
    return F.size(F.array_distinct(meant)) > 1


def _accepted() -> Column:
    """In the ledger, or answered 201, 202 or 504; a 202 or 504 that a 503 took back, and nothing came of, is not."""
    unsure = _sum("answered_202", "answered_504") > 0
    taken_back = (F.col("answered_503") > 0) & (F.col("stamped") == 0)
    return (_sum("entries_count", "answered_201") > 0) | (unsure & ~taken_back)


def _category(seen: Evidence) -> Column:
    """Where an accepted id stands: the first place that fits, as the balance has one for each, whatever is found of it.

    What is proven comes first, and the worse before the better: a promised place that is lost, whatever lies elsewhere;
    then copies, whatever else is promised. Pending comes before unprovable, since it may still prove lost. What is
    only known by a 202 or 504 is settled by a record with our header, not by a stranger's under the same key.
    """

    def some(*fates: str) -> Column:
        return F.coalesce(F.exists("missing", lambda claim: claim["fate"].isin(*fates)), F.lit(False))

    unproven = F.coalesce(F.exists("missing", lambda claim: ~claim["fate"].isin(LOST, PENDING)), F.lit(False))
    ours = _sum("stamped", "entries_count", "answered_201") > 0
    # Nobody named a place: what is known is a 202 or a 504, and that it is not in the data.
    times = F.col("accepted_ms"), F.coalesce(F.col("unsure_ms"), F.col("last_ms"))
    decided_ms = min(seen.ledger_decided_ms, seen.answers_decided_ms)
    unsure_over_ms = (seen.held_over_ms if decided_ms < seen.frozen_ms else seen.over_ms)(*times)
    return (
        F.when(F.col("plain") == 1, "delivered_once")
        .when(some(LOST), LOST)
        .when(F.col("conflicting"), "conflicted")
        .when(F.col("count") > 1, "duplicated")
        .when(some(PENDING), PENDING)
        .when(unproven, "unprovable")
        .when((F.col("count") == 1) & ours, "delivered_once")
        .when(F.col("answered_201") > 0, "unprovable")
        .when(unsure_over_ms > decided_ms, PENDING)
        .otherwise("stuck")
    )


def _sum(*names: str) -> Column:
    total = F.lit(0)
    for name in names:
        total = total + F.col(name)
    return total
