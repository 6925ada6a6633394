"""The pass over all ids: what no single hour shows. It reads narrow columns only, however long the history."""

from collections.abc import Callable, Iterable
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from service.contract import wire
from spark import rule_table
from spark.reading import wire_expressions
from spark.reading.decode import EVENT, hash_of
from spark.rules import findings
from spark.rules.classify import Evidence
from spark.tables import deliveries, hours, lake

# Pairs of hours that are asked for to prune by; with more of them nearly every hour is one of them.
SPANS_MAX: Final = 10_000
# Spans over several hours are a condition each, of which Spark compiles some hundred and no more.
WIDE_MAX: Final = 100

_WRITER: Final = ("slot", "pid", "epoch", "instance")


def repeated(rows: DataFrame) -> DataFrame:
    """deliveries.ROW → `id, first timestamp, last timestamp` of events with several rows, and their hours."""
    return _multi_row(rows.where(F.col("kind") == EVENT), "id")


def _multi_row(rows: DataFrame, name: str) -> DataFrame:
    """What several rows have in the column `name`, with the first and the last hour of these rows."""
    hour = F.col("accepted_hour")
    counted = rows.groupBy(name).agg(F.count("*").alias("rows"), F.min(hour).alias("first"), F.max(hour).alias("last"))
    return counted.where("rows > 1").select(name, "first", "last")


def spans_of(multi_row_ids: DataFrame) -> list[tuple[str, str]]:
    """What `repeated` or `retried` gives → between which hours (`yyyy-MM-dd HH:mm:ss`) any of these lie."""
    named = [F.date_format(end, hours.FORMAT).alias(end) for end in ("first", "last")]
    found = multi_row_ids.select(*named).distinct().limit(SPANS_MAX).collect()
    if len(found) == SPANS_MAX:
        ends = multi_row_ids.agg(F.min("first").alias("first"), F.max("last").alias("last")).select(*named)
        found = ends.collect()
    return _joined((row["first"], row["last"]) for row in found)


def rows_of(rows: DataFrame, multi_row_ids: DataFrame, spans: Iterable[tuple[str, str]]) -> DataFrame:
    """The deliveries.ROWs of these ids (as `repeated` names them), which lie in these hours only."""
    events = rows.where((F.col("kind") == EVENT) & _within(spans))
    return events.join(multi_row_ids.select("id"), "id", "left_semi").select(*deliveries.ROW)


def _within(spans: Iterable[tuple[str, str]]) -> Column:
    """The condition that a row lies in one of these spans, with literals: Delta reads no other hour for it.

    Most spans are of one hour, and there may be thousands: these are one list, as a chain is too deep for Spark.
    """
    single: list[str] = []
    wide: list[str] = []
    for first, last in spans:
        if first == last:
            single.append(first)
        else:
            wide.append(f"accepted_hour BETWEEN TIMESTAMP '{first}' AND TIMESTAMP '{last}'")
    return F.expr(" OR ".join([hours.sql(single), *wide]))


def _joined(spans: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Spans of hours, those that overlap made one; where too many are wide, one from the first to the last of these."""
    found: list[tuple[str, str]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    wide = [span for span in found if span[0] < span[1]]
    return found if len(wide) <= WIDE_MAX else _joined([*found, (wide[0][0], wide[-1][1])])


def superseded(judged_per_id: DataFrame) -> DataFrame:
    """Judged rows, one an id → lake.FINDING without kind: what the hours found about these ids holds no more."""
    return judged_per_id.select(
        *(
            {
                "scope": F.lit(findings.IDS),
                "accepted_hour": F.col("accepted_hour"),
                "id": F.col("id"),
                "topic": F.col("topic"),
                "last_ms": F.col("last_ms"),
            }.get(name, F.lit(None))
            .cast(kind)
            .alias(name)
            for name, kind in lake.FINDING.items()
        )
    )


def misnamed(rows: DataFrame, run: int) -> DataFrame | None:
    """deliveries.ROW → `accepted_hour, id, topic, partition, offset, named`: records with a bare key that are copies of
    another id's record; None where there are none that this run did not know before.

    A bare key says neither whose it is nor, if an atomic batch's, which member's. The event with the same key and
    fingerprint in the same topic does. Where its own id (the key's in the empty scope) has such an event, it keeps it.
    """
    events = rows.where((F.col("kind") == EVENT) & (F.col("count") > 0) & F.col("key").isNotNull())
    bare = (
        ~F.col("has_fencepost_header")
        & F.col("fingerprint").isNotNull()
        & (F.col("entries_count") + F.col("answered_201") == 0)
    )
    new = F.col("run") == run
    flags = {
        "bare": bare,
        "ours": F.col("has_fencepost_header"),
        "new_bare": bare & new,
        "new_ours": F.col("has_fencepost_header") & new,
    }
    by_topic = events.groupBy("topic").agg(*(F.max(flag).alias(name) for name, flag in flags.items())).collect()
    topics = [
        one["topic"] for one in by_topic if (one["new_bare"] and one["ours"]) or (one["new_ours"] and one["bare"])
    ]
    if not topics:
        return None
    concerned = events.where(F.col("topic").isin(topics))
    may_be = F.concat(
        F.array("fingerprint"), F.coalesce(deliveries.each_fingerprint(F.col("alternative_fingerprints")), F.array())
    )
    place = ("accepted_hour", "id", "topic", "partition", "offset")
    copies = concerned.where(bare).select(*place, "key", F.explode(may_be).alias("fingerprint"))
    named = concerned.where("has_fencepost_header").select(
        "topic", "key", "fingerprint", "accepted_ms", F.col("id").alias("named")
    )
    first = F.min(F.struct((F.col("named") != F.col("id")).alias("other"), "accepted_ms", "named")).alias("first")
    return (
        copies.join(named, ["topic", "key", "fingerprint"])
        .groupBy(*place)
        .agg(first)
        .where("first.other")
        .select(*place, "first.named")
    )


def known_elsewhere(rows: DataFrame, run: int) -> DataFrame | None:
    """deliveries.ROW → `accepted_hour, id, elsewhere, freed_ms` of ids answered 202 or 504 without a place, where rows
    of other hours know more than these rows; None where there is nothing that this run did not know before.

    Such an answer may lie in another hour than the acceptance that it is about: its request came later.
    """
    events = rows.where(F.col("kind") == EVENT)
    in_doubt = events.where(f"is_clean = 0 AND offset IS NULL AND {deliveries.IN_DOUBT}")
    newest = in_doubt.agg(F.max("run")).collect()[0][0]
    if newest is None:
        return None
    telling = events if newest == run else events.where(F.col("run") == run)
    tells = rule_table.tells(F.col("has_fencepost_header"), F.col("entries_count"), F.col("answered_201"))
    others = telling.select(
        "id", F.col("accepted_hour").alias("hour"), tells.alias("tells"), F.col("freed_ms").alias("freed")
    ).where("tells OR freed IS NOT NULL")
    hour = ("accepted_hour", "id")
    here = in_doubt.groupBy(*hour).agg(
        F.coalesce(F.max("elsewhere"), F.lit(False)).alias("was_elsewhere"),
        F.max("freed_ms").alias("was_freed"),
        F.max("in_doubt_ms").alias("in_doubt_ms"),
    )
    found = (
        others.join(F.broadcast(here), "id")
        .where("hour != accepted_hour")
        .groupBy(*hour, "was_elsewhere", "was_freed", "in_doubt_ms")
        .agg(F.max("tells").alias("tells"), F.max("freed").alias("freed"))
    )
    freed = F.greatest("was_freed", F.when(rule_table.takes_back(F.col("freed"), F.col("in_doubt_ms")), F.col("freed")))
    updated = found.select(
        *hour,
        (F.col("was_elsewhere") | F.col("tells")).alias("elsewhere"),
        freed.alias("freed_ms"),
        "was_elsewhere",
        "was_freed",
    )
    more = (F.col("elsewhere") != F.col("was_elsewhere")) | ~F.col("freed_ms").eqNullSafe(F.col("was_freed"))
    return updated.where(more).select(*hour, "elsewhere", "freed_ms")


def _accepted(evidence: Evidence) -> Column:
    """Whether a deliveries.ROW may be a client's retry: an event with a record key that the ledger or a 201 names.

    Values without a record key (a reading, a counter) repeat without being retries.
    """
    claimed = F.col("entries_count") + F.col("answered_201") > 0
    event = (F.col("kind") == EVENT) & F.col("has_fencepost_header") & F.col("record_key_hash").isNotNull() & claimed
    return (
        F.coalesce(event, F.lit(False))
        & evidence.audited(F.col("topic"))
        & ~evidence.without_client_duplicates(F.col("topic"))
    )


def retried(rows: DataFrame, evidence: Evidence) -> DataFrame:
    """deliveries.ROW → `fingerprint, first timestamp, last timestamp` that several rows have, and their hours."""
    return _multi_row(rows.where(_accepted(evidence)), "fingerprint")


def client_duplicates(
    rows: DataFrame, retried_fingerprints: DataFrame, spans: Iterable[tuple[str, str]], evidence: Evidence
) -> DataFrame:
    """deliveries.ROW → lake.FINDING: other ids of one caller with the same fingerprint, accepted one after the other
    within the retention, with nothing else written for their record key in between.

    `retried_fingerprints` is what `retried` gives of the rows, `spans` their hours: no other hour is read.
    """
    there = rows.where(_within(spans) & (F.col("count") > 0) & F.col("record_key_hash").isNotNull())
    marked = there.withColumn("fingerprint", F.when(_accepted(evidence), F.col("fingerprint")))
    keys = (
        marked.join(retried_fingerprints.select("fingerprint"), "fingerprint", "left_semi")
        .select("topic", "record_key_hash")
        .distinct()
    )
    retries = _retries(marked.join(keys, ["topic", "record_key_hash"], "left_semi"), evidence)
    first = F.struct("accepted_ms", "topic", "partition", "offset", "timestamp_ms", *_WRITER, "key", "accepted_hour")
    ids = retries.groupBy("fingerprint", "id").agg(F.min(first).alias("first"), F.max("last_ms").alias("last_ms"))
    order = Window.partitionBy("fingerprint").orderBy("accepted_ms", "id")
    numbered = ids.select("fingerprint", "id", "last_ms", "first.*").withColumn("nth", F.row_number().over(order))
    place = F.struct(
        "nth",
        "topic",
        "partition",
        "offset",
        F.col("timestamp_ms").alias("timestamp"),
        *_WRITER,
        F.lit(None).cast("string").alias("cause"),
    )
    grouped = numbered.groupBy("fingerprint").agg(
        F.max("accepted_hour").alias("accepted_hour"),
        F.max_by("id", -F.col("nth")).alias("id"),
        F.max_by("key", -F.col("nth")).alias("key"),
        F.min("topic").alias("topic"),
        F.count("id").alias("count"),
        F.max("last_ms").alias("last_ms"),
        F.collect_list(F.when(F.col("nth") <= deliveries.COORDINATES_MAX, place)).alias("places"),
    )
    return grouped.select(
        F.lit(findings.IDS).alias("scope"),
        "accepted_hour",
        F.lit(findings.CLIENT_DUPLICATE).alias("kind"),
        F.lit("new_key").alias("cause"),
        "id",
        "key",
        "topic",
        F.lit(None).cast("int").alias("partition"),
        "count",
        F.lit(None).cast("bigint").alias("first_offset"),
        F.lit(None).cast("bigint").alias("last_offset"),
        "last_ms",
        F.transform(F.array_sort("places"), lambda one: one.dropFields("nth"))
        .cast(lake.COORDINATES)
        .alias("coordinates"),
        "fingerprint",
    )


def _retries(sequence: DataFrame, evidence: Evidence) -> DataFrame:
    """All that was written for some record keys → those of it that are one request with the record before or after.

    `fingerprint` is null for what cannot be a retry, and stands between two that can.
    """
    known = F.filter(F.array(*map(F.lit, evidence.callers)), _is_of)
    known_callers = sequence.withColumns(
        {
            "caller": F.when(F.col("fingerprint").isNotNull(), F.get(known, F.lit(0))),
            "asked_ms": F.when(
                rule_table.is_own_time(F.col("timestamp_ms"), F.col("record_accepted_ms"), evidence.timeouts_ms),
                F.col("timestamp_ms"),
            ),
        }
    )
    order = Window.partitionBy("topic", "record_key_hash").orderBy(
        "record_accepted_ms", "timestamp_ms", "partition", "offset"
    )

    def near(step: Callable[[str], Column]) -> Column:
        def same(name: str) -> Column:
            return F.col(name) == step(name).over(order)

        distance = F.abs(F.col("record_accepted_ms") - step("record_accepted_ms").over(order))
        return rule_table.is_retry(
            same_content=same("fingerprint"),
            same_caller=same("caller"),
            same_id=same("id"),
            near=rule_table.is_near(distance, evidence.key_ttl_ms),
            same_time=F.col("asked_ms").eqNullSafe(step("asked_ms").over(order)) | same("timestamp_ms"),
            same_batch=same("batch_hash"),
        )

    return known_callers.withColumn("near", near(F.lag) | near(F.lead)).where("near")


def _is_of(caller: Column) -> Column:
    """Whether a row's id, or that of its atomic batch, is the one of its key in a caller's scope."""
    id = wire_expressions.sha256_head(
        F.concat(
            wire_expressions.as_binary(caller),
            wire_expressions.literal(b"\0"),
            wire_expressions.as_binary(F.col("key")),
        ),
        wire.ID_BYTES,
    )
    return (id == F.col("id")) | F.coalesce(hash_of(id) == F.col("batch_hash"), F.lit(False))
